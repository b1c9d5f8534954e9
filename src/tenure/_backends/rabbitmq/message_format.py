"""The properties of a message in AMQP: the sender's own in AMQP's own, and tenure's facts in headers ``x-tenure-…``.

There is no envelope: a body is the content, and id, ``reply_to``, ``correlation_id`` and the header ``content-type``
are AMQP's properties. Headers that begin with ``x-tenure-``, and those that the server adds, are not shown.

A message that is put back as a copy keeps all properties of the original, also those that tenure doesn't show. Whatever
they say, it can be written: counts, times and sequences are read only as far as AMQP and every clock can have them.
"""

from __future__ import annotations

import copy
import json
import random
import secrets
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Self

from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.names import ANSWERS, amqp_name
from tenure._backends.rabbitmq.properties import SHORT_MAX, Properties, cut
from tenure._checks import LONGEST
from tenure._foreign import a_count, a_list, digits, read_json, read_or, seconds
from tenure._queue.checks import COUNT_MAX, DEAD_SUFFIX, read_id
from tenure._queue.failures import Failure
from tenure._queue.headers import is_reserved, read_headers
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    EXPIRED,
    EXPIRED_DESCRIPTION,
    MAX_DELIVERIES,
    NO_HEADERS,
    Death,
    Delivery,
    Headers,
    exhausted_description,
)
from tenure._queue.note_headers import (
    SEQUENCE_MAX,
    UNKNOWN,
    noted_death,
    plain_attempts,
    read_sequence,
    shortened,
    written_to_fit,
)
from tenure._queue.notes import Notes, read_deliveries, read_failure, read_history_text, read_reason
from tenure._queue.outgoing import PRIORITY_MAX, Outgoing
from tenure.errors import ConfigError

OURS = "x-tenure-"
QUEUE = f"{OURS}queue"
"""RabbitMQ's name of the queue that a message was published to. In another one, a program has passed it on, and what
these headers say is not of its time there. (Versions before this name none, and are believed.)"""
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

_NOT_COPIED_PREFIXES = (OURS, "x-first-death-", "x-last-death-")
_NOT_COPIED_NAMES = frozenset({"x-death", "x-delivery-count", "x-acquired-count", "x-opt-deaths", "CC", "BCC"})
"""Beginnings, and names, of headers that a copy doesn't get: tenure's own and the server's, and those by which the
server puts a message also into other queues."""

CONTENT_TYPE = "content-type"

FACTS_MAX = 40_000
"""Bytes for history, error and description, if there is room for so many: all properties of a message must fit into a
frame."""

FACTS_REST = 540
"""Bytes that the names and types of these headers take, and the name of the queue."""

PROPERTIES_MAX = 131_050
"""Bytes of all properties of a message, unless a server takes smaller frames."""

EXPIRATION_MAX = 315_360_000_000
"""Milliseconds of the longest time to live of a message that RabbitMQ 3.10 takes: ten years. For a longer one, it would
close the channel."""

RANDOM_BITS = 10
"""The lowest bits of a sequence: two processes may send in the same microsecond."""

_TIME_MAX = int(LONGEST * 1e6)
"""The latest time that is written, in microseconds since 1970."""


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
        return made_up_id(queue, f"{sequence}{self._process}")


def made_up_id(queue: str, number: int | str) -> str:
    """Return the id of a message that came without one, or is sent without; of a long name, it has the beginning."""
    end = f"{ID_MARK}{number}"
    return cut(queue, SHORT_MAX - len(end)) + end


def moment_of(sequence: int) -> int:
    """Return the sender's time in a *sequence*, in microseconds since 1970."""
    return sequence >> RANDOM_BITS


@dataclass(frozen=True, slots=True)
class Facts(Notes):
    """What tenure knows about a message besides what its sender has set."""

    sequence: int
    sent_at: float
    expires_at: float | None = None

    def dead(self, reason: str, description: str, count: int, now: float, error: Failure | None = None) -> Self:
        """Return the facts of it as a dead letter, which doesn't expire."""
        return replace(Notes.dead(self, reason, description, count, now, error), expires_at=None)


@dataclass(slots=True, eq=False)
class FoundMessage:
    """A delivery that was read."""

    queue: str
    raw: Delivered
    facts: Facts
    returned: int = 0
    """How often the server counts this very copy as delivered before."""
    id: str = field(default="")
    delayed_in: int | None = None
    """In which generation of its queue its delay began; None if it was not delayed."""

    @property
    def count(self) -> int:
        """Its delivery count, this delivery included; deliveries of dead letters are not counted."""
        return min(COUNT_MAX, self.facts.deliveries + (0 if self.is_dead else self.returned) + 1)

    @property
    def is_dead(self) -> bool:
        """Whether it lies among dead letters."""
        return self.queue.endswith(DEAD_SUFFIX)

    @property
    def is_timed_by_server(self) -> bool:
        """Whether the server ends it in time: nobody's clock is to be compared then."""
        return bool(self.raw.properties.expiration)

    def is_expired_at(self, now: float) -> bool:
        """Return whether it has expired *now*."""
        return self.facts.expires_at is not None and now >= self.facts.expires_at


# --- writing -----------------------------------------------------------------------------------------------------


def check_properties(message: Outgoing) -> None:
    """Refuse a message with a text that AMQP has no room for, or for which the server would close the channel.

    Raises:
        ConfigError: The message shows its name, and its size or what it is.
    """
    if message.reply_to == ANSWERS.removesuffix("."):
        raise ConfigError(
            f"reply_to ({message.reply_to!r}) is for a client that receives the answer on the channel on which it has "
            "sent the message, and tenure does not; name a queue"
        )
    named = [("id", message.id), ("correlation_id", message.correlation_id), ("reply_to", message.reply_to)]
    for what, text in [*named, *(("a header's name", name) for name in message.headers)]:
        size = 0 if text is None else len(text.encode())
        if size > SHORT_MAX:
            raise ConfigError(f"{what} ({size} bytes) must not be longer than {SHORT_MAX} bytes in RabbitMQ")


def properties_of(message: Outgoing, id_: str, sequence: int, *, is_delayed: bool) -> Properties:
    """Return the properties of a message that is sent, with *id_* if it has none."""
    headers: dict[str, Any] = dict(message.headers)
    content_type = headers.get(CONTENT_TYPE)
    if isinstance(content_type, str) and 0 < len(content_type.encode()) <= SHORT_MAX:
        del headers[CONTENT_TYPE]
    else:  # as a property, AMQP has no room for it
        content_type = None
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
        headers[EXPIRES_AT] = min(moment_of(sequence) + int(message.expires_in * 1e6), _TIME_MAX)
        if not is_delayed:  # otherwise the server would end the delay with it
            properties.expiration = _expiration(message.expires_in)
    return properties


def copied(
    found: FoundMessage,
    facts: Facts,
    *,
    now: float,
    most: int = PROPERTIES_MAX,
    id_: str | None = None,
    is_delayed: bool = False,
) -> Properties:
    """Return the properties of a copy of *found*, with these *facts* instead of its own, if *most* bytes are enough."""
    properties = copy.copy(found.raw.properties)
    properties.passed_on = properties.headers_without(
        lambda name: name.startswith(_NOT_COPIED_PREFIXES) or name in _NOT_COPIED_NAMES
    )
    properties.headers = _headers_of(facts)
    properties.delivery_mode = 2
    properties.expiration = None
    properties.user_id = None  # the server accepts that of the login only
    # Every message has one: by it, the driver knows what comes back. One that nobody can read stays as it came.
    properties.message_id = id_ or properties.message_id or found.id
    if not is_delayed and facts.expires_at is not None and facts.reason is None:
        properties.expiration = _expiration(facts.expires_at - now)
    if facts.history or facts.reason is not None:
        properties.headers |= _told_in(facts, min(FACTS_MAX, most - len(properties.marshal()) - FACTS_REST))
    return properties


def _expiration(left: float) -> str | None:
    """Return the time to live that the server keeps of a message; None if its receivers keep a longer one."""
    milliseconds = max(1, int(left * 1_000))
    return str(milliseconds) if milliseconds <= EXPIRATION_MAX else None


def mark_delayed(properties: Properties, generation: int) -> None:
    """Note in which generation of its queue the delay of a message begins."""
    assert properties.headers is not None  # tenure's own are among them
    properties.headers[DELAYED] = generation


def mark_queue(properties: Properties, queue: str) -> None:
    """Note to which queue a message is published."""
    assert properties.headers is not None  # tenure's own are among them
    properties.headers[QUEUE] = amqp_name(queue)


def _headers_of(facts: Facts) -> dict[str, Any]:
    headers: dict[str, Any] = {SEQUENCE: facts.sequence}
    if round(facts.sent_at * 1e6) != moment_of(facts.sequence):
        headers[SENT_AT] = round(facts.sent_at * 1e6)
    if facts.expires_at is not None:
        headers[EXPIRES_AT] = int(facts.expires_at * 1e6)
    if facts.deliveries:
        headers[DELIVERIES] = facts.deliveries
    return headers


def _told_in(facts: Facts, room: int) -> dict[str, Any]:
    """Return what is told of deliveries and of a death, or as much of it as has *room*; the least of it in any case."""
    told = written_to_fit(facts, _told, lambda one: sum(len(str(value).encode()) for value in one.values()) <= room)
    return _told([*shortened(facts)][-1]) if told is None else told


def _told(facts: Facts) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if facts.history:
        told[HISTORY] = json.dumps(plain_attempts(facts.history), ensure_ascii=False)
    if facts.before:
        told[BEFORE] = facts.before
    if facts.reason is not None:
        told[REASON] = facts.reason
        told[DESCRIPTION] = facts.description
        told[DIED_AT] = int(facts.dead_at * 1e6)
        if facts.error is not None:
            told[ERROR] = json.dumps(asdict(facts.error), ensure_ascii=False)
    return told


# --- reading -----------------------------------------------------------------------------------------------------


def found_message(queue: str, raw: Delivered, now: float) -> FoundMessage:
    """Read a delivery; what another program has written can't make that fail."""
    home, properties = queue.removesuffix(DEAD_SUFFIX), raw.properties
    headers: Mapping[str, Any] = properties.headers or {}
    if not _is_marked_here(queue, headers):
        headers = {name: value for name, value in headers.items() if not name.startswith(OURS)}
    sequence = read_or(read_sequence, headers.get(SEQUENCE), None)
    if sequence is None:
        sequence, sent_at = _made_up(raw, now)
    else:
        sent_at = read_or(_a_moment, headers.get(SENT_AT), moment_of(sequence) / 1e6)
    id_ = read_or(read_id, properties.message_id or None, None)
    history, before = read_history_text(headers.get(HISTORY), headers.get(BEFORE))
    facts = Facts(
        sequence,
        sent_at,
        None if home != queue else _expires_at(properties, headers, now),
        deliveries=read_or(read_deliveries, headers.get(DELIVERIES), 0),
        history=history,
        before=before,
    )
    if home != queue:
        facts = _dead_facts(facts, headers, now)
    delayed_in = read_or(a_count, headers.get(DELAYED), None)
    return FoundMessage(queue, raw, facts, returns_of(raw), id_ or made_up_id(home, sequence), delayed_in)


def _is_marked_here(queue: str, headers: Mapping[str, Any]) -> bool:
    """Return whether tenure's headers are about a message in this very place, and not passed on from another one.

    The server moves messages to the dead letters as they are. From there, somebody may move them back, marks and all.
    """
    place = _place_of(queue)
    if queue.endswith(DEAD_SUFFIX):
        return headers.get(QUEUE, place) in (place, _place_of(queue.removesuffix(DEAD_SUFFIX)))
    died_in = [one.get("queue") for one in read_or(a_list, headers.get("x-death"), []) if isinstance(one, dict)]
    return headers.get(QUEUE, place) == place and place not in died_in


_place_of = lru_cache(1_000)(amqp_name)


def _expires_at(properties: Properties, headers: Mapping[str, Any], now: float) -> float | None:
    at = read_or(_a_moment, headers.get(EXPIRES_AT), None)
    if at is None and properties.expiration:
        # Of another program's message, it isn't known when its time began: if it is put back, it begins anew.
        milliseconds = read_or(digits, properties.expiration, None)
        return None if milliseconds is None else min(now + milliseconds / 1_000, LONGEST)
    return at


def returns_of(raw: Delivered) -> int:
    """Return how often the server counts a message as delivered before.

    It writes that only into a message that it delivers again. In another, the header is what a program has passed on
    with a message that it had received, perhaps from another queue.
    """
    if not raw.redelivered:
        return 0
    return read_or(read_deliveries, (raw.properties.headers or {}).get("x-delivery-count"), 0)


def _made_up(raw: Delivered, now: float) -> tuple[int, float]:
    """Return the sequence of another program's message, the same for each delivery, and the time of its sending.

    That is the time in its properties, if any, to which a hash of its contents is added.
    """
    properties = raw.properties
    at = (properties.headers or {}).get("timestamp_in_ms")  # from the server, where it is configured to add it
    began = read_or(_a_moment_in_ms, at, None)
    if began is None:
        began = properties.timestamp.timestamp() if isinstance(properties.timestamp, datetime) else 0.0
    hashed = zlib.crc32(raw.body, zlib.crc32((properties.message_id or "").encode()))
    moment = min(int(began * 1e6), (SEQUENCE_MAX >> RANDOM_BITS) - 1_000_000)
    return (moment << RANDOM_BITS) + hashed % (1_000_000 << RANDOM_BITS) + 1, began or now


def _dead_facts(facts: Facts, headers: Mapping[str, Any], now: float) -> Facts:
    """Return the facts of a dead letter: from our headers, or, if the server has moved it, from the server's."""
    reason = read_or(read_reason, headers.get(REASON), None)
    if reason is not None:
        return replace(
            facts,
            reason=reason,
            description=read_or(read_reason, headers.get(DESCRIPTION), ""),
            dead_at=read_or(_a_moment, headers.get(DIED_AT), facts.sent_at),
            error=read_or(_a_failure, headers.get(ERROR), None),
        )
    deaths = [one for one in read_or(a_list, headers.get("x-death"), []) if isinstance(one, dict)]
    deaths = [one for one in deaths if not str(one.get("queue", "")).startswith("tenure:delay")]
    if not deaths:
        return replace(facts, reason=UNKNOWN, dead_at=facts.sent_at)
    death = deaths[0]  # the newest
    at = death.get("time")
    moment = at.timestamp() if isinstance(at, datetime) else now
    count = facts.deliveries  # x-delivery-count is of another queue, or of the looks at it here: the server tells none
    why = read_or(read_reason, death.get("reason"), UNKNOWN)
    if why == "expired":
        reason, description = EXPIRED, EXPIRED_DESCRIPTION
    elif why == "delivery_limit":
        reason, description = MAX_DELIVERIES, exhausted_description(count)
    else:
        reason, description = why, "dead-lettered by the server"
    return facts.with_expired_attempts(count, moment).dead(reason, description, count, moment)


def _a_moment(value: object) -> float:
    """Return a time in microseconds as Unix seconds."""
    return a_count(value, most=_TIME_MAX) / 1e6


def _a_moment_in_ms(value: object) -> float:
    return seconds(a_count(value) / 1_000)


def _a_failure(value: object) -> Failure | None:
    return read_failure(read_json(value))


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
        found.facts.deliveries if found.is_dead else found.count,
        found.facts.sent_at,
        locked_until,
        None,
        min(PRIORITY_MAX, properties.priority or 0),
        read_or(read_id, properties.reply_to or None, None),
        read_or(read_id, properties.correlation_id or None, None),
        death_of(found.facts) if found.is_dead else None,
    )


def death_of(facts: Facts) -> Death:
    """Return the death of a dead letter."""
    return noted_death(facts, facts.sent_at)


def shown_headers(properties: Properties) -> Headers:
    """Return the headers as the port has them: text, whole numbers, numbers and booleans, without reserved ones."""
    shown: dict[str, Any] = {}
    if properties.content_type:
        shown[CONTENT_TYPE] = properties.content_type
    for name, value in (properties.headers or {}).items():
        if not is_reserved(name):
            shown[name] = value if type(value) in (str, int, float, bool) else _plain(value)
    return read_headers(shown) if shown else NO_HEADERS


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
