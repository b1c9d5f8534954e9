"""Rows of the queues' tables to values, and values to columns."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tenure._frozen import FrozenDict
from tenure._queue.broker import LiveSelection, QueueOptions, QueueSettings, Selection
from tenure._queue.failures import Failure
from tenure._queue.limits import Rate
from tenure._queue.message import (
    HISTORY_MAX,
    NO_HEADERS,
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    Headers,
    dead_message_of,
    newest_error,
)
from tenure._queue.outgoing import Outgoing

MessageRow = tuple[
    int, str | None, bytes, str | None, int, float, str | None, int, str | None, str | None, float | None, int
]
"""The columns of the statements ``claimable`` and ``message``."""


def columns_of(settings: QueueSettings) -> tuple[float, int, float, int]:
    """Return the settings in the order of the table's columns."""
    return settings.lock, settings.max_deliveries, settings.dedupe_window, settings.body_max


def limits_of(settings: QueueSettings) -> tuple[int | float | None, ...]:
    """Return the limits in the order of the columns of their table."""
    most = None if settings.max_locked == math.inf else int(settings.max_locked)
    return (most, *_rate_columns(settings.rate), *_rate_columns(settings.session_rate), int(settings.paused))


def settings_of(row: Sequence[Any]) -> QueueSettings:
    """Return the settings from the columns of the statement ``settings``."""
    *usual, most, rate, seconds, session_rate, session_seconds, paused = row
    limits: QueueOptions = {
        "max_locked": math.inf if most is None else most,
        "rate": math.inf if rate is None else (rate, seconds),
        "session_rate": math.inf if session_rate is None else (session_rate, session_seconds),
        "paused": bool(paused),
    }
    return replace(QueueSettings(*usual), **limits)


def _rate_columns(rate: Rate) -> tuple[int | None, float | None]:
    return rate if isinstance(rate, tuple) else (None, None)


# --- sequences ---------------------------------------------------------------------------------------------------


def pack(sequences: Collection[int]) -> bytes:
    """Return *sequences* as a blob."""
    return struct.pack(f"<{len(sequences)}q", *sequences)


def unpack(blob: bytes) -> dict[int, None]:
    """Return the sequences of a blob, in their order, as the keys of a dict."""
    return dict.fromkeys(struct.unpack(f"<{len(blob) // 8}q", blob))


def runs_of(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of consecutive sequences: one claim is mostly one run."""
    ordered = sorted(sequences)
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return [(ordered[0], ordered[-1])]
    runs = []
    first = last = ordered[0]
    for sequence in ordered[1:]:
        if sequence != last + 1:
            runs.append((first, last))
            first = sequence
        last = sequence
    runs.append((first, last))
    return runs


# --- headers, history --------------------------------------------------------------------------------------------


def headers_column(message: Outgoing) -> str | None:
    """Return the headers of *message* as JSON."""
    return json.dumps(dict(message.headers), ensure_ascii=False) if message.headers else None


def headers_of(column: str | None) -> Headers:
    """Return the headers from their column."""
    return NO_HEADERS if column is None else FrozenDict(json.loads(column))


def history_with(column: str | None, number: int, at: float, outcome: str, error: Failure | None) -> str:
    """Return the history with one more attempt, and without the oldest if there are too many."""
    attempts: list[object] = json.loads(column) if column else []
    failure = None if error is None else (error.type, error.message, error.traceback)
    attempts.append((number, at, outcome, failure))
    return json.dumps(attempts[-HISTORY_MAX:], ensure_ascii=False)


def history_of(column: str | None) -> tuple[Attempt, ...]:
    """Return the attempts from the history's column."""
    attempts: list[Any] = json.loads(column) if column else []
    return tuple(
        Attempt(number, at, outcome, None if failure is None else Failure(*failure))
        for number, at, outcome, failure in attempts
    )


def death_of(reason: str, description: str, dead_at: float, history: str | None) -> Death:
    """Return how a message died, with the newest error in its history."""
    attempts = history_of(history)
    return Death(reason, description, dead_at, newest_error(attempts), attempts)


def message_of(queue: str, prefix: str, row: Sequence[Any]) -> Delivery:
    """Return a message as a delivery without a lock, from its columns in ``dead_letter`` and ``live_message``."""
    sequence, id_, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id = row
    return Delivery(
        queue,
        sequence,
        "",
        id_ or f"{prefix}{sequence}",
        body,
        headers_of(headers),
        deliveries,
        enqueued_at,
        0.0,
        session,
        priority,
        reply_to,
        correlation_id,
    )


def dead_message(queue: str, prefix: str, row: Sequence[Any]) -> DeadMessage:
    """Return a dead letter from a row of the statement ``dead_letter``."""
    return dead_message_of(queue, message_of(queue, prefix, row[:10]), death_of(*row[10:]))


def conditions_of(which: Selection) -> dict[str, object]:
    """Return *which* as the parameters of the statement ``dead_letters``."""
    return {
        "after": which.after,
        "reason": which.reason,
        "dead_before": which.dead_before,
        "sequences": None if which.sequences is None else json.dumps(sorted(which.sequences)),
        "ids": None if which.ids is None else json.dumps(sorted(which.ids)),
    }


def live_conditions_of(which: LiveSelection) -> dict[str, object]:
    """Return *which*, without its states, as the parameters of the statements about live messages."""
    return {
        "after": which.after,
        "session": which.session,
        "sent_before": which.sent_before,
        "sequences": None if which.sequences is None else json.dumps(sorted(which.sequences)),
        "ids": None if which.ids is None else json.dumps(sorted(which.ids)),
    }
