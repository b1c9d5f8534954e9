"""Messages as JetStream delivers and shows them, converted to deliveries, dead letters and live messages."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nats.aio.msg import Msg

from tenure._backends.nats.client import Json
from tenure._backends.nats.message_format import NO_STATE, Properties, State, decode
from tenure._backends.nats.places import OWN
from tenure._backends.nats.store_clock import timestamp_of
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.failures import Failure
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    LiveMessage,
    Token,
    dead_message_of,
    live_message_of,
    newest_error,
)

UNKNOWN = "unknown"
"""The reason of a dead letter from another program."""


@dataclass(frozen=True, slots=True)
class Found:
    """A message of a stream, decoded."""

    queue: str
    subject: str
    stored_as: int
    """Its sequence in the stream, which is another one each time that it is stored again."""
    stored_at: float
    body: bytes
    properties: Properties
    reply: str = ""
    """The subject to which it is acknowledged, if it was delivered."""
    delivered: int = 0
    """How often NATS has delivered it since it was stored, this time included."""
    consumer: str = ""
    """The consumer that has delivered it."""

    @property
    def state(self) -> State:
        """What tenure has noted with it."""
        return self.properties.state

    @property
    def sequence(self) -> int:
        """Its sequence in the queue: that of the stream when it was sent."""
        return self.state.sequence or self.stored_as

    @property
    def id(self) -> str:
        """The id from its sender, or one that is made up."""
        return self.properties.id or f"{self.queue.removesuffix('$dead')}{ID_MARK}{self.sequence}"

    @property
    def enqueued_at(self) -> float:
        """When it was sent, by the store's clock."""
        return self.state.enqueued_at or self.stored_at

    @property
    def count(self) -> int:
        """The number of its present delivery, if it is locked."""
        return self.state.deliveries + (0 if self.state.locked_for else 1)

    def is_expired_at(self, now: float) -> bool:
        """Whether it has expired at *now*."""
        return now >= self.enqueued_at + self.properties.expires_in

    def with_state(self, **changes: object) -> Properties:
        """Return its properties, completed by its identity, with *changes* of its state, to be stored again."""
        changes = {"locked_for": 0.0, "lock": "", **changes}
        state = replace(self.state, sequence=self.sequence, enqueued_at=self.enqueued_at, **changes)  # type: ignore[arg-type]
        return replace(self.properties, id=self.id, state=state)


def delivered_message(queue: str, message: Msg) -> Found:
    """Return a message that was delivered.

    The subject of its acknowledgement is ``$JS.ACK.STREAM.CONSUMER.DELIVERED.SEQUENCE.SEQUENCE.TIME.PENDING``, and has
    a domain and an account after ``ACK``, and a random word at the end, if the server has domains.
    """
    words = message.reply.split(".")
    at = 4 if len(words) == 9 else 6
    return Found(
        queue,
        message.subject,
        int(words[at + 1]),
        int(words[at + 3]) / 1e9,
        message.data,
        _decoded(message.subject, message.headers),
        message.reply,
        int(words[at]),
        words[at - 1],
    )


def read_message(queue: str, answer: Json) -> Found:
    """Return a message that was read from its stream, not delivered."""
    message = answer["message"]
    return Found(
        queue,
        str(message["subject"]),
        int(message["seq"]),
        timestamp_of(message["time"]),
        b64decode(message.get("data", "")),
        _decoded(str(message["subject"]), _headers_of(b64decode(message.get("hdrs", "")))),
    )


def _decoded(subject: str, headers: Mapping[str, str] | None) -> Properties:
    """Return the properties of a message; what another program has copied of tenure's notes says nothing."""
    properties = decode(headers)
    return properties if OWN in subject else replace(properties, state=NO_STATE)


def _headers_of(raw: bytes) -> Mapping[str, str]:
    found = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def with_expired_attempts(state: State, count: int, now: float) -> State:
    """Return *state* with the attempts that are missing in the history of *count* deliveries: their locks expired."""
    recorded = {one.number for one in state.history[state.before :]}
    for number in range(1, count + 1):
        if number not in recorded:
            state = state.with_attempt(Attempt(number, now, "expired"))
    before = state.history[: state.before]
    return replace(state, history=(*before, *sorted(state.history[state.before :], key=_number)))


def _number(attempt: Attempt) -> int:
    return attempt.number


def dead_letter_of(
    found: Found, state: State, reason: str, description: str, count: int, now: float, error: Failure | None = None
) -> Properties:
    """Return the properties of a message as a dead letter."""
    dead = replace(
        state,
        sequence=found.sequence,
        enqueued_at=found.enqueued_at,
        locked_for=0.0,
        deliveries=count,
        reason=reason,
        description=description,
        dead_at=now,
        error=error or newest_error(state.history),
    )
    return replace(found.properties, id=found.id, due=0.0, expires_in=math.inf, state=dead)


def delivery_of(found: Found, token: Token, locked_until: float) -> Delivery:
    """Return a live message as a delivery."""
    return _delivery(found, token, found.count, locked_until, None)


def dead_delivery_of(found: Found, token: Token, locked_until: float) -> Delivery:
    """Return a dead letter as a delivery."""
    return _delivery(found, token, found.state.deliveries, locked_until, death_of(found))


def _delivery(found: Found, token: Token, count: int, locked_until: float, death: Death | None) -> Delivery:
    properties = found.properties
    return Delivery(
        found.queue,
        found.sequence,
        token,
        found.id,
        found.body,
        properties.headers,
        count,
        found.enqueued_at,
        locked_until,
        None,
        0,
        properties.reply_to,
        properties.correlation_id,
        death,
    )


def death_of(found: Found) -> Death:
    """Return why a dead letter died."""
    state = found.state
    return Death(
        state.reason or UNKNOWN, state.description, state.dead_at or found.stored_at, state.error, state.history
    )


def dead_message(home: str, found: Found) -> DeadMessage:
    """Return a dead letter of the queue *home*, to be looked at."""
    return dead_message_of(home, dead_delivery_of(found, "", 0.0), death_of(found))


def live_message(found: Found) -> LiveMessage:
    """Return a message that is ready, to be looked at."""
    return live_message_of(_delivery(found, "", found.state.deliveries, 0.0, None), "ready")


def is_selected_live(found: Found, which: LiveSelection) -> bool:
    """Whether *which* selects this live message, by everything but its state."""
    return not found.state.is_dead and which.fits(found.sequence, lambda: found.id, None, found.enqueued_at)


def is_selected_dead(found: Found, which: Selection) -> bool:
    """Whether *which* selects this dead letter."""
    return which.fits(found.sequence, found.id, death_of(found))
