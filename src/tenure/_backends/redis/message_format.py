"""Messages as arguments of the scripts, and from their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from tenure._backends.redis.scripts import Answer, Argument
from tenure._backends.redis.tokens import holder_of
from tenure._frozen import FrozenDict
from tenure._queue.broker import Claim
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    NO_HEADERS,
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    Died,
    Headers,
    LiveMessage,
    State,
    dead_message_of,
    live_message_of,
    newest_error,
)
from tenure._queue.outgoing import Outgoing

_TIME_MAX = 10**13  # ms; a longer time has no effect, and Lua formats larger numbers with an exponent
LETTERS: dict[State, str] = {"ready": "r", "locked": "l", "delayed": "d", "deferred": "f"}
_STATES = {letter.encode(): state for state, letter in LETTERS.items()}


# --- arguments ---


def encoded(message: Outgoing) -> tuple[str, str, str, bytes]:
    """Encode *message* for the scripts: control, id, head, body; a part without content is empty."""
    control = head = ""
    if message.delay or message.at or message.expires_in or message.priority or message.session:
        delay, at = bounded(message.delay), bounded(message.at or 0.0)  # type: ignore[arg-type]
        expires_in = max(1, bounded(message.expires_in)) if message.expires_in else 0
        control = f"{delay}|{at}|{expires_in}|{message.priority}|{message.session or ''}"
    if message.id or message.headers or message.reply_to or message.correlation_id:
        head = _encoded_head(message)
    return control, message.id or "", head, message.body


def encoded_dead_letters(letters: Sequence[Delivery], histories: Sequence[bytes | None]) -> Iterator[Argument]:
    """Encode dead letters for the script send_dead_letters."""
    for letter, history in zip(letters, histories, strict=True):
        yield from (letter.priority, letter.session or "", _encoded_head(letter), letter.body, history or b"")


def _encoded_head(message: Outgoing | Delivery) -> str:
    head = [message.id, dict(message.headers), message.reply_to, message.correlation_id]
    return json.dumps(head, ensure_ascii=False, separators=(",", ":"))


def encoded_failure(error: Failure | None) -> str:
    return json.dumps([error.type, error.message, error.traceback]) if error else ""


def selected(some: frozenset[int] | frozenset[str] | None) -> list[Argument]:
    return [-1] if some is None else [len(some), *some]


def milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1_000)


def bounded(seconds: float) -> int:
    return min(milliseconds(seconds), _TIME_MAX)


# --- answers ---


def claim_of(queue: str, token: Any, answer: Answer) -> Claim:
    until, due_in, contents, _, died, limited, *of_session = answer
    deliveries = tuple(deliveries_of(queue, token, until / 1_000, contents))
    limits = (limited > 0, limited > 1, *map(seconds_of, of_session))
    return Claim(deliveries, seconds_of(due_in), deaths_of(queue, died), 0.0, *limits)


def deaths_of(queue: str, deaths: Sequence[bytes]) -> Sequence[Died]:
    return [_died(queue, *death.decode().split("|", 3)) for death in deaths] if deaths else ()


def _died(queue: str, sequence: str, count: str, reason: str, known_as: str) -> Died:
    return Died(int(sequence), known_as or f"{queue}{ID_MARK}{sequence}", int(count), reason)


def deliveries_of(queue: str, token: Any, until: float, contents: Answer) -> Iterator[Delivery]:
    """Decode deliveries: sequences, states, heads, bodies; of dead letters, deaths and histories, too."""
    sequences, states, heads, bodies, *of_dead = contents
    deaths = map(_death, *of_dead) if of_dead else repeat(None)
    home = queue.removesuffix(DEAD_SUFFIX)
    for sequence, state, head, body, death in zip(
        sequences, states, heads or repeat(None), bodies, deaths, strict=False
    ):
        count, sent, priority, _, _, _, session = state.split(b"|", 6)
        known_as, headers, reply_to, correlation_id = _head(head) if head else _NO_HEAD
        yield Delivery(
            queue,
            int(sequence),
            token,
            known_as or f"{home}{ID_MARK}{sequence.decode()}",
            body,
            headers,
            int(count),
            int(sent) / 1_000,
            until,
            session.decode() if session else None,
            int(priority),
            reply_to,
            correlation_id,
            death,
        )


_NO_HEAD: tuple[str | None, Headers, str | None, str | None] = (None, NO_HEADERS, None, None)


def _head(text: bytes) -> tuple[str | None, Headers, str | None, str | None]:
    known_as, headers, reply_to, correlation_id = json.loads(text)
    return known_as, FrozenDict(headers) if headers else NO_HEADERS, reply_to, correlation_id


def _death(text: bytes, lines: bytes | None) -> Death:
    reason, description, at = json.loads(text)
    history = tuple(_attempt(line) for line in lines.split(b"\n")) if lines else ()
    return Death(reason, description, at / 1_000, newest_error(history), history)


def _attempt(line: bytes) -> Attempt:
    number, at, outcome, error = line.decode().split("|", 3)
    failure = Failure(*json.loads(error)) if error else None
    return Attempt(int(number), int(at) / 1_000, outcome, failure)  # type: ignore[arg-type]


def dead_message(queue: str, one: Delivery) -> DeadMessage:
    assert one.death is not None
    return dead_message_of(queue, one, one.death)


def live_message(one: Delivery, row: bytes, letter: bytes, moment: int) -> LiveMessage:
    state, at = _STATES[letter], moment / 1_000
    if state != "locked":
        return live_message_of(one, state, due_at=at if state == "delayed" else None)
    locked_by, since = holder_of(row.split(b"|", 6)[5].decode())
    return live_message_of(one, state, locked_until=at, locked_by=locked_by, locked_since=since)


def seconds_of(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1_000
