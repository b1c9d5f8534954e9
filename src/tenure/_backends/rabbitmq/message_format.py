"""The properties of a message in AMQP: the sender's own in AMQP's own, and tenure's facts in headers ``x-tenure-…``.

There is no envelope: a body is the content, and id, ``reply_to``, ``correlation_id`` and the header ``content-type``
are AMQP's properties. Headers that begin with ``x-tenure-``, and those that the server adds, are not shown.

A message that is put back as a copy keeps all properties of the original, also those that tenure doesn't show.
"""

from __future__ import annotations

import copy
import json
import random
import secrets
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

from tenure._backends.rabbitmq.connection import Delivered, Properties
from tenure._frozen import FrozenDict
from tenure._queue.checks import DEAD_SUFFIX, INT_MAX
from tenure._queue.failures import Failure
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    EXPIRED,
    EXPIRED_DESCRIPTION,
    HISTORY_MAX,
    MAX_DELIVERIES,
    NO_HEADERS,
    Attempt,
    Death,
    Delivery,
    Headers,
    exhausted_description,
    newest_error,
)
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing
from tenure.errors import ConfigError

OURS = "x-tenure-"
SEQUENCE = f"{OURS}sequence"
SENT_AT = f"{OURS}sent-at"
EXPIRES_AT = f"{OURS}expires-at"
DELIVERIES = f"{OURS}deliveries"
"""How many deliveries are counted of a copy's originals."""
HISTORY = f"{OURS}history"
BEFORE = f"{OURS}before"
"""How many entries of the history are from before it was redriven."""
REASON = f"{OURS}reason"
DESCRIPTION = f"{OURS}description"
DIED_AT = f"{OURS}died-at"
ERROR = f"{OURS}error"
DELAYED = f"{OURS}delayed"
"""Of a message that was delayed, the generation of its queue: it may come to one that was made anew meanwhile."""

_SERVERS = frozenset(
    {
        "x-delivery-count",
        "x-acquired-count",
        "x-death",
        "x-first-death-exchange",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
        "x-opt-deaths",
    }
)
ROUTING = frozenset({"CC", "BCC"})
"""Headers by which the server puts a message also into other queues."""

CONTENT_TYPE = "content-type"

FACTS_MAX = 40_000
"""Bytes for history, error and description: all properties of a message must fit into a frame."""

UNKNOWN = "unknown"
"""The reason of a dead letter from another program."""


RANDOM_BITS = 10
"""The lowest bits of a sequence: two processes may send in the same microsecond."""


class Sequences:
    """Makes sequences: the sender's time in microseconds, then random bits; and higher than the one before.

    Ids are made of them, and of a number of this process, so that no other process makes the same.
    """

    def __init__(self) -> None:
        self._last = 0
        self._process = f"{secrets.randbelow(1_000_000):06d}"

    def next(self) -> int:
        """Return a new one."""
        moment = time.time_ns() // 1_000
        self._last = max(self._last + 1, (moment << RANDOM_BITS) + random.getrandbits(RANDOM_BITS))
        return self._last

    def id_of(self, queue: str, sequence: int) -> str:
        """Return an id for a message to *queue*."""
        return f"{queue}{ID_MARK}{sequence}{self._process}"


def moment_of(sequence: int) -> int:
    """Return the sender's time in a *sequence*, in microseconds since 1970."""
    return sequence >> RANDOM_BITS


@dataclass(frozen=True, slots=True)
class Facts:
    """What tenure knows about a message besides what its sender has set."""

    sequence: int
    sent_at: float
    expires_at: float | None = None
    deliveries: int = 0
    """How often it was delivered before; of a dead letter, how often in all."""
    history: tuple[Attempt, ...] = ()
    before: int = 0
    reason: str | None = None
    description: str = ""
    died_at: float = 0.0
    error: Failure | None = None

    def with_attempt(self, attempt: Attempt) -> Facts:
        """Return the facts with one more attempt."""
        return replace(self, history=(*self.history, attempt)[-HISTORY_MAX:])

    def with_expired_attempts(self, count: int, now: float) -> Facts:
        """Return the facts with those of *count* attempts that are missing in the history: their locks have ended."""
        recent = self.history[self.before :]
        recorded = {one.number for one in recent}
        missing = [Attempt(number, now, "expired") for number in range(1, count + 1) if number not in recorded]
        if not missing:
            return self
        history = (*self.history[: self.before], *sorted((*recent, *missing), key=lambda one: one.number))
        return replace(self, history=history[-HISTORY_MAX:])

    def dead(self, reason: str, description: str, count: int, now: float, error: Failure | None = None) -> Facts:
        """Return the facts of it as a dead letter."""
        return replace(
            self,
            deliveries=count,
            reason=reason,
            description=description,
            died_at=now,
            error=error or newest_error(self.history),
            expires_at=None,
        )

    def shortened(self) -> Iterator[Facts]:
        """Yield the facts in full, then with ever less of the history, errors and description."""
        yield self
        brief = tuple(replace(one, error=_shortened(one.error)) for one in self.history)
        yield replace(self, history=brief)
        yield replace(self, history=brief[-3:], before=0, error=_shortened(self.error))
        yield replace(self, history=(), before=0, error=_shortened(self.error))
        yield replace(self, history=(), before=0, error=None, description=self.description[:200])


@dataclass(slots=True, eq=False)
class FoundMessage:
    """A delivery that was read."""

    queue: str
    raw: Delivered
    facts: Facts
    returned: int = 0
    """How often the server counts this very copy as delivered before."""
    id: str = field(default="")

    @property
    def count(self) -> int:
        """Its delivery count, this delivery included; deliveries of dead letters are not counted."""
        return self.facts.deliveries + (0 if self.is_dead else self.returned) + 1

    @property
    def is_dead(self) -> bool:
        """Whether it lies among dead letters."""
        return self.queue.endswith(DEAD_SUFFIX)

    @property
    def delayed_in(self) -> int | None:
        """In which generation of its queue its delay began; None if it was not delayed."""
        return _count((self.raw.properties.headers or {}).get(DELAYED))

    @property
    def is_timed_by_server(self) -> bool:
        """Whether the server ends it in time: nobody's clock is to be compared then."""
        return bool(self.raw.properties.expiration)

    def is_expired_at(self, now: float) -> bool:
        """Return whether it has expired *now*."""
        return self.facts.expires_at is not None and now >= self.facts.expires_at


# --- writing -----------------------------------------------------------------------------------------------------


def check_headers(message: Outgoing) -> None:
    """Refuse a message with headers that mean something to the server."""
    for name in ROUTING & message.headers.keys():
        raise ConfigError(
            f"RabbitMQ would put a message with the header {name!r} into other queues, too; name it otherwise"
        )


def properties_of(message: Outgoing, id_: str, sequence: int, *, is_delayed: bool) -> Properties:
    """Return the properties of a message that is sent, with *id_* if it has none."""
    headers: dict[str, Any] = dict(message.headers)
    content_type = headers.pop(CONTENT_TYPE, None)
    if content_type is not None and not isinstance(content_type, str):
        headers[CONTENT_TYPE], content_type = content_type, None
    headers[SEQUENCE] = sequence
    properties = Properties(
        content_type=content_type,
        headers=headers,
        delivery_mode=2,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        message_id=message.id or id_,
        timestamp=datetime.fromtimestamp(moment_of(sequence) // 1_000_000, UTC),
    )
    if message.expires_in is not None:
        headers[EXPIRES_AT] = moment_of(sequence) + int(message.expires_in * 1e6)
        if not is_delayed:  # otherwise the server would end the delay with it
            properties.expiration = str(max(1, int(message.expires_in * 1_000)))
    return properties


def copied(
    found: FoundMessage, facts: Facts, *, now: float, id_: str | None = None, is_delayed: bool = False
) -> Properties:
    """Return the properties of a copy of *found*, with these *facts* instead of its own."""
    properties = copy.copy(found.raw.properties)
    others = {
        name: _encodable(value)
        for name, value in (properties.headers or {}).items()
        if not name.startswith(OURS) and name not in _SERVERS and name not in ROUTING
    }
    properties.headers = others | _headers_of(facts)
    properties.delivery_mode = 2
    properties.expiration = None
    properties.user_id = None  # the server accepts that of the login only
    properties.message_id = id_ or found.id  # every message has one: by it, the driver knows what comes back
    if not is_delayed and facts.expires_at is not None and facts.reason is None:
        properties.expiration = str(max(1, int((facts.expires_at - now) * 1_000)))
    return properties


def mark_delayed(properties: Properties, generation: int) -> None:
    """Note in which generation of its queue the delay of a message begins."""
    assert properties.headers is not None  # tenure's own are among them
    properties.headers[DELAYED] = generation


def _encodable(value: Any) -> Any:
    """Return a header's value as pamqp writes it: it reads bytes, and writes byte arrays only."""
    match value:
        case bytes():
            return bytearray(value)
        case list():
            return [_encodable(one) for one in value]
        case dict():
            return {name: _encodable(one) for name, one in value.items()}
    return value


def _headers_of(facts: Facts) -> dict[str, Any]:
    headers: dict[str, Any] = {SEQUENCE: facts.sequence}
    if round(facts.sent_at * 1e6) != moment_of(facts.sequence):
        headers[SENT_AT] = round(facts.sent_at * 1e6)
    if facts.expires_at is not None:
        headers[EXPIRES_AT] = int(facts.expires_at * 1e6)
    if facts.deliveries:
        headers[DELIVERIES] = facts.deliveries
    told: dict[str, Any] = {}
    for less in facts.shortened():
        told = _told(less)
        if sum(len(str(value)) * 2 for value in told.values()) <= FACTS_MAX:
            return headers | told
    return headers | told


def _told(facts: Facts) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if facts.history:
        told[HISTORY] = json.dumps([asdict(one) for one in facts.history], ensure_ascii=False)
    if facts.before:
        told[BEFORE] = facts.before
    if facts.reason is not None:
        told[REASON] = facts.reason
        told[DESCRIPTION] = facts.description
        told[DIED_AT] = int(facts.died_at * 1e6)
        if facts.error is not None:
            told[ERROR] = json.dumps(asdict(facts.error), ensure_ascii=False)
    return told


def _shortened(error: Failure | None) -> Failure | None:
    return None if error is None else Failure(error.type, error.message[:500])


# --- reading -----------------------------------------------------------------------------------------------------


def found_message(queue: str, raw: Delivered, now: float) -> FoundMessage:
    """Read a delivery; what another program has written can't make that fail."""
    properties = raw.properties
    headers: Mapping[str, Any] = properties.headers or {}
    sequence = _count(headers.get(SEQUENCE))
    if sequence is None:
        sequence, sent_at = _made_up(raw, now)
    else:
        sent_at = (_count(headers.get(SENT_AT)) or moment_of(sequence)) / 1e6
    expires_at = _count(headers.get(EXPIRES_AT))
    if expires_at is None and (properties.expiration or "").isdecimal():
        # Of another program's message, it isn't known when its time began: if it is put back, it begins anew.
        expires_at = int(now * 1e6) + int(properties.expiration or 0) * 1_000
    facts = Facts(
        sequence,
        sent_at,
        None if expires_at is None else expires_at / 1e6,
        _count(headers.get(DELIVERIES)) or 0,
        _history(headers.get(HISTORY)),
        _count(headers.get(BEFORE)) or 0,
    )
    returned = returns_of(properties)
    if queue.endswith(DEAD_SUFFIX):
        facts = _dead_facts(facts, headers, now)
    id_ = properties.message_id or f"{queue.removesuffix(DEAD_SUFFIX)}{ID_MARK}{sequence}"
    return FoundMessage(queue, raw, facts, returned, id_)


def returns_of(properties: Properties) -> int:
    """Return how often the server counts a message as delivered before."""
    return _count((properties.headers or {}).get("x-delivery-count")) or 0


def _made_up(raw: Delivered, now: float) -> tuple[int, float]:
    """Return the sequence of another program's message, the same for each delivery, and the time of its sending.

    That is the time in its properties, if any, to which a hash of its contents is added.
    """
    properties = raw.properties
    headers: Mapping[str, Any] = properties.headers or {}
    at = _count(headers.get("timestamp_in_ms"))  # from the server, where it is configured to add it
    if at is not None:
        began = at / 1_000
    elif isinstance(properties.timestamp, datetime):
        began = properties.timestamp.timestamp()
    else:
        began = 0.0
    hashed = zlib.crc32(raw.body, zlib.crc32((properties.message_id or "").encode()))
    return (int(began * 1e6) << RANDOM_BITS) + hashed % (1_000_000 << RANDOM_BITS) + 1, began or now


def _dead_facts(facts: Facts, headers: Mapping[str, Any], now: float) -> Facts:
    """Return the facts of a dead letter: from our headers, or, if the server has moved it, from the server's."""
    reason = headers.get(REASON)
    if isinstance(reason, str):
        description, died_at = headers.get(DESCRIPTION), _count(headers.get(DIED_AT))
        return replace(
            facts,
            reason=reason,
            description=description if isinstance(description, str) else "",
            died_at=facts.sent_at if died_at is None else died_at / 1e6,
            error=_error(headers.get(ERROR)),
        )
    deaths = [one for one in headers.get("x-death") or () if isinstance(one, dict)]
    deaths = [one for one in deaths if not str(one.get("queue", "")).startswith("tenure:delay")]
    if not deaths:
        return replace(facts, reason=UNKNOWN, died_at=facts.sent_at)
    death = deaths[0]  # the newest
    at = death.get("time")
    moment = at.timestamp() if isinstance(at, datetime) else now
    count = facts.deliveries + (_count(headers.get("x-delivery-count")) or 0)
    why = str(death.get("reason", UNKNOWN))
    if why == "expired":
        reason, description = EXPIRED, EXPIRED_DESCRIPTION
    elif why == "delivery_limit":
        reason, description = MAX_DELIVERIES, exhausted_description(count)
    else:
        reason, description = why, "dead-lettered by the server"
    return facts.with_expired_attempts(count, moment).dead(reason, description, count, moment)


def delivery_of(found: FoundMessage, token: str, locked_until: float) -> Delivery:
    """Return *found* as a delivery under *token*."""
    properties = found.raw.properties
    return Delivery(
        found.queue,
        found.facts.sequence,
        token,
        found.id,
        found.raw.body,
        shown_headers(properties),
        1 if found.is_dead else found.count,
        found.facts.sent_at,
        locked_until,
        None,
        min(PRIORITY_MAX, properties.priority or 0),
        properties.reply_to or None,
        properties.correlation_id or None,
        death_of(found.facts) if found.is_dead else None,
    )


def death_of(facts: Facts) -> Death:
    """Return the death of a dead letter."""
    return Death(facts.reason or UNKNOWN, facts.description, facts.died_at, facts.error, facts.history)


def shown_headers(properties: Properties) -> Headers:
    """Return the headers as the port has them: text, whole numbers, numbers and booleans."""
    headers = properties.headers
    shown: dict[str, Any] = {}
    if properties.content_type:
        shown[CONTENT_TYPE] = properties.content_type
    for name, value in (headers or {}).items():
        if not name.startswith(OURS) and name not in _SERVERS:
            shown[name] = value if type(value) in (str, int, float, bool) else _plain(value)
    return FrozenDict(shown) if shown else NO_HEADERS


def _plain(value: Any) -> str | int | float | bool:
    """Return a value that only AMQP has (a time, a table, bytes) as the nearest that the port has."""
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if value is None:
        return ""
    return json.dumps(value, default=str, ensure_ascii=False)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= INT_MAX else None


def _history(text: Any) -> tuple[Attempt, ...]:
    if not isinstance(text, str):
        return ()
    try:
        return tuple(Attempt(**{**one, "error": _failure(one["error"])}) for one in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _error(text: Any) -> Failure | None:
    if not isinstance(text, str):
        return None
    try:
        return _failure(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _failure(fields_given: Any) -> Failure | None:
    return None if fields_given is None else Failure(**cast(dict[str, str], fields_given))
