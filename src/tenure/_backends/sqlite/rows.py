"""Rows of the queues' tables to values, and values to columns.

Any program can write into the file, and a column can hold any type. So each value is read by itself: of a message whose
bookkeeping is unreadable, what can be read is handed out.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from tenure._checks import LONGEST
from tenure._foreign import a_count, a_list, a_text, clipped, read_json, read_object, read_or, seconds
from tenure._queue.broker import LiveSelection, QueueOptions, QueueSettings, Selection, read_settings
from tenure._queue.checks import COUNT_MAX
from tenure._queue.headers import HEADERS_JSON_MAX, read_headers
from tenure._queue.limits import PARTS, Burst, Rate
from tenure._queue.message import (
    HISTORY_MAX,
    NO_HEADERS,
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    Headers,
    dead_message_of,
)
from tenure._queue.notes import read_death, read_deliveries, read_history_text, rows_of
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing
from tenure.errors import ConfigError

MessageRow = tuple[Any, ...]
"""The columns of the statements ``claimable`` and ``message``."""

LOG_MAX = PARTS + 2
"""The most entries that a log of deliveries has."""


class MessageState(NamedTuple):
    """The columns of the statement ``message_state``."""

    deliveries: int
    priority: int
    session: str | None
    due_at: Any
    """As it is in the row: it is a part of a key."""
    expires_at: float | None
    history: Any
    """Read by :func:`history_of`."""


def columns_of(settings: QueueSettings) -> tuple[float, int, float, int]:
    """Return the settings in the order of the table's columns."""
    return settings.lock, settings.max_deliveries, settings.dedupe_window, settings.body_max


def limits_of(settings: QueueSettings) -> tuple[int | float | None, ...]:
    """Return the limits in the order of the columns of their table."""
    most = None if settings.max_locked == math.inf else int(settings.max_locked)
    return (most, *_rate_columns(settings.rate), *_rate_columns(settings.session_rate), int(settings.paused))


def settings_of(row: Sequence[Any]) -> QueueSettings:
    """Return the settings from the columns of the statement ``settings``."""
    *usual, dead_retention, most, rate, rate_seconds, session_rate, session_seconds, paused = row
    found: QueueOptions = {
        **_usual_of(usual),
        "dead_retention": dead_retention,
        "max_locked": math.inf if most is None else most,
        "rate": math.inf if rate is None else (rate, rate_seconds),
        "session_rate": math.inf if session_rate is None else (session_rate, session_seconds),
        "paused": bool(paused) if isinstance(paused, int) else paused,
    }
    try:
        return QueueSettings(**found)
    except ConfigError:  # one of them can't be a setting
        return QueueSettings(**read_settings(found))


def _usual_of(columns: Sequence[Any]) -> QueueOptions:
    lock, max_deliveries, dedupe_window, body_max = columns
    return {"lock": lock, "max_deliveries": max_deliveries, "dedupe_window": dedupe_window, "body_max": body_max}


def deliveries_and_window(max_deliveries: Any, dedupe_window: Any) -> tuple[int, float]:
    """Return these two settings; of one that can't be a setting, the usual value."""
    if not (type(max_deliveries) is int and 1 <= max_deliveries <= COUNT_MAX):
        max_deliveries = QueueSettings().max_deliveries
    window = read_or(seconds, dedupe_window, QueueSettings().dedupe_window)
    return max_deliveries, window


def _rate_columns(rate: Rate) -> tuple[int | None, float | None]:
    return rate if isinstance(rate, tuple) else (None, None)


# --- sequences ---------------------------------------------------------------------------------------------------


def pack(sequences: Collection[int]) -> bytes:
    """Return *sequences* as a blob."""
    return struct.pack(f"<{len(sequences)}q", *sequences)


def unpack(blob: Any) -> dict[int, None]:
    """Return the sequences of a blob, in their order, as the keys of a dict; a part of one at its end is left out."""
    if not isinstance(blob, bytes):
        return {}
    return dict.fromkeys(struct.unpack_from(f"<{len(blob) // 8}q", blob))


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


def headers_of(column: Any) -> Headers:
    """Return the headers from their column."""
    return NO_HEADERS if column is None else read_or(_read_headers, column, NO_HEADERS)


def _read_headers(column: object) -> Headers:
    return read_headers(read_object(column, HEADERS_JSON_MAX))


def history_with(column: Any, attempt: Attempt) -> str:
    """Return the history with one more attempt, and without the oldest if there are too many."""
    return json.dumps(rows_of([*history_of(column), attempt][-HISTORY_MAX:]), ensure_ascii=False)


def history_of(column: Any) -> tuple[Attempt, ...]:
    """Return the attempts from the history's column."""
    return read_history_text(column)[0]


def death_of(reason: Any, description: Any, dead_at: Any, history: Any) -> Death:
    """Return how a message died, with the newest error in its history."""
    return read_death(reason, description, read_or(seconds, dead_at, 0.0), history_of(history))


# --- values ------------------------------------------------------------------------------------------------------


def plain_text(value: Any) -> str:
    """Return a text column as text, whatever it holds."""
    if isinstance(value, str):
        return value
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def text_of(value: Any) -> str | None:
    """Return the text of a column, or None if there is none that every store can keep."""
    return None if value is None else read_or(a_text, value, None)


def blob_of(value: Any) -> bytes:
    """Return a blob column as bytes: a text that was inserted in place of one as UTF-8."""
    return value if isinstance(value, bytes) else plain_text("" if value is None else value).encode()


def priority_of(value: Any) -> int:
    """Return a priority; of one that is none, the nearest."""
    return int(clipped(value, 0, PRIORITY_MAX) or 0)


def count_of(value: Any) -> int:
    """Return a number of messages; 0 if it is none."""
    return int(clipped(value, 0, COUNT_MAX) or 0)


def moment_of(value: Any) -> float | None:
    """Return a time, also one that is far off; None if there is none."""
    return clipped(value, -LONGEST)


def state_of(row: Sequence[Any]) -> MessageState:
    """Return the columns of the statement ``message_state``."""
    deliveries, priority, session, due_at, expires_at, history = row
    return MessageState(
        read_or(read_deliveries, deliveries, 0),
        priority_of(priority),
        text_of(session),
        due_at,
        moment_of(expires_at),
        history,
    )


def log_of(column: Any) -> list[Burst]:
    """Return the log of a rate from its column; of one that is unreadable, none."""
    return read_or(_read_log, column, [])


def _read_log(column: object) -> list[Burst]:
    return [_read_burst(one) for one in a_list(read_json(column))[-LOG_MAX:]]


def _read_burst(value: object) -> Burst:
    began, at, number, *_ = [*a_list(value), None, None, None]
    return Burst(seconds(began), seconds(at), a_count(number, most=COUNT_MAX))


def delivery_of(queue: str, prefix: str, row: Sequence[Any], token: int | str = "", until: float = 0.0) -> Delivery:
    """Return a message as a delivery, from its columns, whatever they hold."""
    sequence, id_, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id = row
    return Delivery(
        queue,
        sequence,
        token,
        text_of(id_) or f"{prefix}{sequence}",
        blob_of(body),
        headers_of(headers),
        read_or(read_deliveries, deliveries, 0),
        read_or(seconds, enqueued_at, 0.0),
        until,
        text_of(session) or None,
        priority_of(priority),
        text_of(reply_to),
        text_of(correlation_id),
    )


def dead_message(queue: str, prefix: str, row: Sequence[Any]) -> DeadMessage:
    """Return a dead letter from a row of the statement ``dead_letter``."""
    return dead_message_of(queue, delivery_of(queue, prefix, row[:10]), death_of(*row[10:]))


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
