"""Messages as arguments of the scripts, and from their answers: of what others may have written, what can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from tenure._backends.redis.scripts import Answer, Argument
from tenure._backends.redis.tokens import holder_of
from tenure._checks import LONGEST
from tenure._foreign import Unreadable, a_list, a_text, clipped, digits, read_json, read_or
from tenure._queue.broker import Claim
from tenure._queue.checks import COUNT_MAX, DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.headers import HEADERS_JSON_MAX, read_headers
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    HISTORY_MAX,
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
)
from tenure._queue.notes import HISTORY_JSON_MAX, UNREADABLE, read_attempts, read_death, row_of
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing

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
    """Return *error* as JSON, in which fifty of the longest are no longer than what is read of a history."""
    return json.dumps(row_of(error), ensure_ascii=False) if error else ""


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
    found = (read_or(_read_died, (queue, death), None) for death in deaths)
    return [died for died in found if died is not None] if deaths else ()


def _read_died(of: tuple[str, bytes]) -> Died:
    queue, death = of
    sequence, count, reason, known_as, *_ = [*death.decode(errors="replace").split("|", 3), "", "", ""]
    return Died(
        digits(sequence),
        known_as or f"{queue}{ID_MARK}{sequence}",
        read_or(_read_count, count, 0),
        reason or UNREADABLE,
    )


def deliveries_of(queue: str, token: Any, until: float, contents: Answer) -> Iterator[Delivery]:
    """Decode deliveries: sequences, states, heads, bodies; of dead letters, deaths and histories, too."""
    sequences, states, heads, bodies, *of_dead = contents
    deaths = map(_death, *of_dead) if of_dead else repeat(None)
    home = queue.removesuffix(DEAD_SUFFIX)
    row: tuple[int, float, int, str | None]
    for sequence, state, head, body, death in zip(
        sequences, states, heads or repeat(None), bodies, deaths, strict=False
    ):
        try:
            count, sent, priority, _, _, _, session = state.split(b"|", 6)
            row = int(count), int(sent) / 1_000, int(priority), session.decode() if session else None
        except (AttributeError, ValueError, OverflowError):
            row = _UNREADABLE_ROW
        if not (0 <= row[0] <= COUNT_MAX and 0.0 <= row[1] <= LONGEST and 0 <= row[2] <= PRIORITY_MAX):
            row = _bounded(*row)
        known_as, headers, reply_to, correlation_id = _head(head) if head else _NO_HEAD
        yield Delivery(
            queue,
            int(sequence),
            token,
            known_as or f"{home}{ID_MARK}{sequence.decode()}",
            b"" if body is None else body,
            headers,
            row[0],
            row[1],
            until,
            row[3],
            row[2],
            reply_to,
            correlation_id,
            death,
        )


_UNREADABLE_ROW = (0, 0.0, 0, None)


def _bounded(count: int, sent: float, priority: int, session: str | None) -> tuple[int, float, int, str | None]:
    return (
        min(max(count, 0), COUNT_MAX),
        min(max(sent, 0.0), LONGEST),
        min(max(priority, 0), PRIORITY_MAX),
        session,
    )


_NO_HEAD: tuple[str | None, Headers, str | None, str | None] = (None, NO_HEADERS, None, None)


def _head(text: bytes) -> tuple[str | None, Headers, str | None, str | None]:
    fields: list[Any] = [*read_or(_read_head, text, []), None, None, None, None]
    known_as, headers, reply_to, correlation_id = fields[:4]
    return (
        _text(known_as),
        read_or(read_headers, headers, NO_HEADERS) if headers else NO_HEADERS,
        _text(reply_to),
        _text(correlation_id),
    )


def _read_head(text: bytes) -> list[Any]:
    return a_list(read_json(text, HEADERS_JSON_MAX))


def _text(value: object) -> str | None:
    return None if value is None else read_or(a_text, value, None)


def _read_count(text: str) -> int:
    return min(digits(text), COUNT_MAX)


def _death(text: bytes | None, lines: bytes | None) -> Death:
    fields: list[Any] = [*read_or(_read_death, text, []), None, None, None]
    reason, description, at = fields[:3]
    history = read_or(_read_history, lines, ()) if lines else ()
    return read_death(reason, description, (clipped(at, most=1_000 * LONGEST) or 0.0) / 1_000, history)


def _read_death(text: object) -> list[Any]:
    return a_list(read_json(text))


def _read_history(lines: bytes) -> tuple[Attempt, ...]:
    if len(lines) > HISTORY_JSON_MAX:
        raise Unreadable("it is too long")
    return read_attempts([_attempt_columns(line) for line in lines.rsplit(b"\n", HISTORY_MAX)[-HISTORY_MAX:]])


def _attempt_columns(line: bytes) -> list[object]:
    number, at, outcome, error, *_ = [*line.decode(errors="replace").split("|", 3), "", "", ""]
    moment = read_or(digits, at, None)
    failure = read_or(read_json, error, None) if error else None
    return [read_or(digits, number, None), None if moment is None else moment / 1_000, outcome, failure]


def dead_message(queue: str, one: Delivery) -> DeadMessage:
    assert one.death is not None
    return dead_message_of(queue, one, one.death)


def live_message(one: Delivery, row: bytes | None, letter: bytes, moment: int) -> LiveMessage:
    state, at = _STATES[letter], moment / 1_000
    if state != "locked":
        return live_message_of(one, state, due_at=at if state == "delayed" else None)
    token = b"".join((row or b"").split(b"|", 6)[5:6])
    locked_by, since = holder_of(token.decode(errors="replace"))
    return live_message_of(one, state, locked_until=at, locked_by=locked_by, locked_since=since)


def seconds_of(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else min(milliseconds / 1_000, LONGEST)
