"""Messages as columns of a statement's parameters, and from its rows.

Whoever may write into the tables can change any row. So each value is read by itself: of a message whose bookkeeping is
unreadable, what can be read is handed out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from tenure._backends.postgres.tokens import since_of
from tenure._checks import LONGEST
from tenure._foreign import clipped, read_object, read_or
from tenure._queue.checks import COUNT_MAX, DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.headers import HEADERS_JSON_MAX, read_headers
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    NO_HEADERS,
    DeadMessage,
    Death,
    Delivery,
    Headers,
    LiveMessage,
    State,
    dead_message_of,
    live_message_of,
)
from tenure._queue.notes import read_death, read_history_text
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing

STATES: tuple[State, ...] = ("ready", "locked", "delayed", "deferred")
"""The states by their numbers in the database."""


def columns_of(messages: Sequence[Outgoing]) -> list[list[Any] | None]:
    """Return the columns of *messages*; a column without any value is None."""
    columns: list[list[Any] | None] = [
        [message.body for message in messages],
        [message.id for message in messages],
        [None if message.headers is NO_HEADERS else _encoded_headers(message.headers) for message in messages],
        [float(message.delay) if message.delay else None for message in messages],
        [message.at for message in messages],
        [None if message.expires_in is None else float(message.expires_in) for message in messages],
        [message.session for message in messages],
        [message.priority or None for message in messages],
        [message.reply_to for message in messages],
        [message.correlation_id for message in messages],
    ]
    for place, column in enumerate(columns):
        if place and column is not None and not any(value is not None for value in column):
            columns[place] = None
    return columns


def is_ready_at_once(message: Outgoing) -> bool:
    """Whether *message* can be received at once, has no place of its own in the order, and no id to be compared."""
    return (
        message.id is None
        and message.session is None
        and message.at is None
        and message.expires_in is None
        and not message.delay
        and not message.priority
    )


def values_of(message: Outgoing) -> tuple[bytes, str | None, str | None, str | None]:
    """Return the values of a message that is ready at once, for the statement ``send_one``."""
    headers = None if message.headers is NO_HEADERS else _encoded_headers(message.headers)
    return message.body, headers, message.reply_to, message.correlation_id


def rank_of(row: Any) -> tuple[int, int]:
    """Return the key by which a claim is sorted: higher priority first, then by sequence."""
    return -row[8], row[0]


def _encoded_headers(headers: Headers) -> str | None:
    return json.dumps(dict(headers)) if headers else None


def _headers(text: str) -> Headers:
    return read_or(_read_headers, text, NO_HEADERS)


def _read_headers(text: str) -> Headers:
    return read_headers(read_object(text, HEADERS_JSON_MAX))


def delivery_of(queue: str, token: int | str, row: Any, death: Death | None = None) -> Delivery:
    number, name, body, headers, count, enqueued_at, until, session, priority, reply_to, correlation_id = row
    if not (0 <= count <= COUNT_MAX and 0.0 <= enqueued_at <= LONGEST and 0.0 <= until <= LONGEST):
        count, enqueued_at, until = max(count, 0), clipped(enqueued_at) or 0.0, clipped(until) or 0.0
    return Delivery(
        queue,
        number,
        token,
        name or f"{queue.removesuffix(DEAD_SUFFIX)}{ID_MARK}{number}",
        body,
        NO_HEADERS if headers is None else _headers(headers),
        count,
        enqueued_at,
        until,
        session or None,
        priority if 0 <= priority <= PRIORITY_MAX else min(max(priority, 0), PRIORITY_MAX),
        reply_to,
        correlation_id,
        death,
    )


def dead_message(queue: str, row: Any) -> DeadMessage:
    return dead_message_of(queue, delivery_of(queue, "", row[:11]), death_of(row[11:]))


def death_of(columns: Sequence[Any]) -> Death:
    reason, description, at, history = columns
    return read_death(reason, description, clipped(at) or 0.0, read_history_text(history)[0])


def live_message(queue: str, row: Any) -> LiveMessage:
    one = delivery_of(queue, "", (*row[:6], row[6] or 0.0, *row[7:11]))
    state, due_at, locked_by, token = row[11:]
    since = None if token is None else since_of(token, time.time())
    return live_message_of(
        one,
        STATES[state],
        locked_until=None if row[6] is None else one.locked_until,
        due_at=clipped(due_at),
        locked_by=locked_by,
        locked_since=since if locked_by else None,
    )


def encoded_failure(failure: Failure | None) -> str | None:
    return None if failure is None else json.dumps([failure.type, failure.message, failure.traceback])
