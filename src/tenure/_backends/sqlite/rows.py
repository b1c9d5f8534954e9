"""How messages stand in the tables of queues: rows made into values, values into columns."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tenure._frozen import FrozenDict
from tenure._queue.broker import LiveSelection, QueueSettings, Selection
from tenure._queue.message import (
    HISTORY_MAX,
    NO_HEADERS,
    Attempt,
    DeadMessage,
    Death,
    Failure,
    Headers,
    Outgoing,
)

MessageRow = tuple[
    int, str | None, bytes, str | None, int, float, str | None, int, str | None, str | None, float | None, int
]
"""What the statements ``claimable`` and ``message`` return."""


def columns_of(settings: QueueSettings) -> tuple[float, int, float, int]:
    """Return the settings in the order of the table."""
    return settings.lock, settings.max_deliveries, settings.dedupe_window, settings.body_max


# --- sequences ---------------------------------------------------------------------------------------------------


def pack(sequences: Collection[int]) -> bytes:
    """Return *sequences* as a blob."""
    return struct.pack(f"<{len(sequences)}q", *sequences)


def unpack(blob: bytes) -> dict[int, None]:
    """Return the sequences of a blob, in their order, quick to look up."""
    return dict.fromkeys(struct.unpack(f"<{len(blob) // 8}q", blob))


def runs_of(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last of each run of neighbours: what was claimed together is mostly one."""
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
    """Return what ``headers_column`` has written."""
    return NO_HEADERS if column is None else FrozenDict(json.loads(column))


def history_with(column: str | None, number: int, at: float, outcome: str, error: Failure | None) -> str:
    """Return the history with one more attempt, and the oldest left out if there are too many."""
    attempts: list[object] = json.loads(column) if column else []
    told = None if error is None else (error.type, error.message, error.traceback)
    attempts.append((number, at, outcome, told))
    return json.dumps(attempts[-HISTORY_MAX:], ensure_ascii=False)


def history_of(column: str | None) -> tuple[Attempt, ...]:
    """Return what ``history_with`` has written."""
    attempts: list[Any] = json.loads(column) if column else []
    return tuple(
        Attempt(number, at, outcome, None if told is None else Failure(*told)) for number, at, outcome, told in attempts
    )


def death_of(reason: str, description: str, dead_at: float, history: str | None) -> Death:
    """Return how a message died; the newest error told of stands for all."""
    attempts = history_of(history)
    errors = (attempt.error for attempt in reversed(attempts) if attempt.error is not None)
    return Death(reason, description, dead_at, next(errors, None), attempts)


def dead_message_of(queue: str, prefix: str, row: Sequence[Any]) -> DeadMessage:
    """Return a dead letter from what the statement ``dead_message`` returned."""
    sequence, id_, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id = row[:10]
    death = death_of(*row[10:])
    return DeadMessage(
        queue,
        sequence,
        id_ or f"{prefix}{sequence}",
        body,
        headers_of(headers),
        deliveries,
        enqueued_at,
        session,
        priority,
        reply_to,
        correlation_id,
        death.reason,
        death.description,
        death.at,
        death.error,
        death.history,
    )


def conditions_of(which: Selection) -> dict[str, object]:
    """Return *which* under the names by which the statement ``dead`` asks for it."""
    return {
        "after": which.after,
        "reason": which.reason,
        "dead_before": which.dead_before,
        "sequences": None if which.sequences is None else json.dumps(sorted(which.sequences)),
        "ids": None if which.ids is None else json.dumps(sorted(which.ids)),
    }


def live_conditions_of(which: LiveSelection) -> dict[str, object]:
    """Return *which*, but its states, under the names that the statements about live messages have for it."""
    return {
        "after": which.after,
        "session": which.session,
        "sent_before": which.sent_before,
        "sequences": None if which.sequences is None else json.dumps(sorted(which.sequences)),
        "ids": None if which.ids is None else json.dumps(sorted(which.ids)),
    }
