"""What a broker hands out and shows: a delivery under its lock, a live message, a dead one, the counts of a queue.

Wall-clock moments (``enqueued_at``, ``locked_until``, ``dead_at``) are the store's, in Unix seconds: to be shown, never
to decide how long a lock is good. That is counted on one's own clock, from before the request was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from tenure._frozen import FrozenDict
from tenure._queue.failures import Failure

HeaderValue = str | int | float | bool
"""A value of a header."""

Headers = Mapping[str, HeaderValue]
"""The headers of a message, by their names."""

NO_HEADERS: Headers = FrozenDict()

Token = str | int
"""What proves a claim: opaque, made by the broker, one for all that a claim handed out, and never used again."""
HISTORY_MAX = 50
"""So many attempts are kept of a message, the newest."""

# Why a message died, when it was not its handler who said so.
MAX_DELIVERIES = "max_deliveries"
EXPIRED = "expired"
UNDECODABLE = "undecodable"
"""Its handler could not read its body as what it was to be."""

# What brokers answer alike.
EXPIRED_DESCRIPTION = "not handled before it expired"
NO_DEFERRED_DEAD_LETTERS = "a dead letter can't be deferred; complete it, abandon it, or redrive it"


def exhausted_description(deliveries: int | str) -> str:
    """Say why a message without deliveries left is dead."""
    return f"delivered {deliveries} times, and never completed"


BODY_SHOWN = 60
"""So many bytes of a body are shown in the ``repr`` of a message."""


def brief(message: Any) -> str:
    """Return the ``repr`` of *message* (a named tuple or dataclass): unusual values, and the beginning of its body."""
    shown = []
    for name in message._fields if hasattr(message, "_fields") else [one.name for one in fields(message)]:
        value = getattr(message, name)
        if isinstance(value, (bytes, bytearray)) and len(value) > BODY_SHOWN:
            shown.append(f"{name}={bytes(value[:BODY_SHOWN])!r}… ({len(value):,} bytes)")
        elif value is not None and value != NO_HEADERS:
            shown.append(f"{name}={value!r}")
    return f"{type(message).__name__}({', '.join(shown)})"


Outcome = Literal["abandoned", "expired", "rejected"]  # beside that of Attempt, as this name isn't public


@dataclass(frozen=True, slots=True)
class Attempt:
    """A delivery that did not settle the message for good; ``at`` by the store's wall clock."""

    number: int
    """Which delivery it was: 1 is the first."""
    at: float
    """When it ended, by the store's wall clock, in Unix seconds."""
    outcome: Literal["abandoned", "expired", "rejected"]
    """``abandoned`` by its consumer, its lock ``expired`` (crash, hang), or ``rejected`` to the dead letters."""
    error: Failure | None = None
    """What the handler raised; None if it raised nothing, or its process died."""


@dataclass(frozen=True, slots=True)
class Death:
    """Why, when and after what a message died."""

    reason: str
    """A word or two: ``max_deliveries``, ``expired``, ``undecodable``, or the handler's own."""
    description: str
    """More about it, as text; it may be empty."""
    at: float
    """When it died, by the store's wall clock, in Unix seconds."""
    error: Failure | None = None
    """The last failure that was reported."""
    history: tuple[Attempt, ...] = ()
    """Its deliveries, the oldest first; the newest fifty are kept."""


def newest_error(history: Sequence[Attempt]) -> Failure | None:
    """Return the error of the newest attempt that has one."""
    return next((attempt.error for attempt in reversed(history) if attempt.error is not None), None)


# --- handed out --------------------------------------------------------------------------------------------------


class Died(NamedTuple):
    """A message whose death the broker decided by itself: it expired, or its last lock did."""

    sequence: int
    """Its number in its queue."""
    id: str
    """Its id."""
    delivery_count: int
    """How often it was handed out."""
    reason: str
    """``expired`` or ``max_deliveries``."""


class Delivery(NamedTuple):
    """A locked message. A tuple, so that a broker can make thousands out of rows: ``Delivery._make(row)``."""

    queue: str
    """The name of the queue."""
    sequence: int
    """The message's number in its queue: rising in the order sent, unchanged by redelivery."""
    token: Token
    """Proves the lock; the same for all deliveries of one claim."""
    id: str
    """The id of the message: that of its sender, or one that the store made up."""
    body: bytes
    """The content, as it was sent."""
    headers: Headers
    """The headers, as they were sent."""
    delivery_count: int
    """How many times it was handed out, this time included. Given back, that time is taken off again."""
    enqueued_at: float
    """When it was sent, by the store's wall clock, in Unix seconds."""
    locked_until: float
    """By the store's wall clock: for show."""
    session: str | None = None
    """The session of the message; None if it belongs to none."""
    priority: int = 0
    """0 to 9; higher ones are received first."""
    reply_to: str | None = None
    """The queue that waits for the answer; None if no answer is expected."""
    correlation_id: str | None = None
    """What the message is an answer to, or an answer to it has to carry; None if nothing."""
    death: Death | None = None
    """Set only for what is received from the dead letters."""

    def __repr__(self) -> str:
        return brief(self)


class SessionLock(NamedTuple):
    """A locked session: no other consumer receives its messages."""

    queue: str
    """The name of the queue."""
    session: str
    """The name of the session."""
    token: Token
    """Proves the lock of the session; opaque."""
    locked_until: float
    """When the lock ends unless it is renewed, by the store's wall clock, in Unix seconds: for show."""
    state: bytes | None = None
    """What was last stored for this session, when it was accepted."""


State = Literal["ready", "locked", "delayed", "deferred"]
"""Where a live message is; each is in one state. The same names as in :class:`Stats`."""

STATES: frozenset[State] = frozenset(("ready", "locked", "delayed", "deferred"))


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A live message, looked at without locking it."""

    queue: str
    """The name of the queue."""
    sequence: int
    """The number of the message in its queue: it rises in the order of sending."""
    id: str
    """The id of the message: that of its sender, or one that the store made up."""
    body: bytes
    """The content, as it was sent."""
    headers: Headers
    """The headers, as they were sent."""
    state: State
    """Where the message is: ``ready``, ``locked``, ``delayed`` or ``deferred``."""
    delivery_count: int
    """How many times it was handed out; the present time included if it is locked."""
    enqueued_at: float
    """When it was sent, by the store's wall clock, in Unix seconds."""
    locked_until: float | None
    """When its lock ends unless it is renewed; None if it is not locked."""
    due_at: float | None
    """When it can be received; None unless it is delayed."""
    session: str | None
    """The session of the message; None if it belongs to none."""
    priority: int
    """0 to 9; higher ones are received first."""
    reply_to: str | None
    """The queue that waits for the answer; None if no answer is expected."""
    correlation_id: str | None
    """What the message is an answer to, or an answer to it has to carry; None if nothing."""
    locked_by: str | None = None
    """The process that has locked it, as ``HOST:PID``; None if it is not locked, or the store doesn't tell."""
    locked_since: float | None = None
    """When it was locked, or its session was, by the clock of that process or of the store; None as above."""


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter, looked at without locking it."""

    queue: str
    """The name of the queue."""
    sequence: int
    """The number of the message in its queue, as before it died."""
    id: str
    """The id of the message: that of its sender, or one that the store made up."""
    body: bytes
    """The content, as it was sent."""
    headers: Headers
    """The headers, as they were sent."""
    delivery_count: int
    """How often it was handed out before it died."""
    enqueued_at: float
    """When it was sent, by the store's wall clock, in Unix seconds."""
    session: str | None
    """The session of the message; None if it belongs to none."""
    priority: int
    """0 to 9; higher ones are received first."""
    reply_to: str | None
    """The queue that waits for the answer; None if no answer is expected."""
    correlation_id: str | None
    """What the message is an answer to, or an answer to it has to carry; None if nothing."""
    reason: str
    """Why it died, in a word or two: ``max_deliveries``, ``expired``, ``undecodable``, or the handler's own."""
    description: str
    """More about its death, as text; it may be empty."""
    dead_at: float
    """When it died, by the store's wall clock, in Unix seconds."""
    error: Failure | None
    """The last failure that was reported; None if there was none."""
    history: tuple[Attempt, ...]
    """Its deliveries, the oldest first; the newest fifty are kept."""

    def __repr__(self) -> str:
        return brief(self)


def live_message_of(
    delivery: Delivery,
    state: State,
    *,
    locked_until: float | None = None,
    due_at: float | None = None,
    locked_by: str | None = None,
    locked_since: float | None = None,
) -> LiveMessage:
    """Return *delivery* as a live message that is only looked at."""
    return LiveMessage(
        delivery.queue,
        delivery.sequence,
        delivery.id,
        delivery.body,
        delivery.headers,
        state,
        delivery.delivery_count,
        delivery.enqueued_at,
        locked_until,
        due_at,
        delivery.session,
        delivery.priority,
        delivery.reply_to,
        delivery.correlation_id,
        locked_by,
        locked_since,
    )


def dead_message_of(queue: str, delivery: Delivery, death: Death) -> DeadMessage:
    """Return *delivery* as a dead letter of *queue* that is only looked at."""
    return DeadMessage(
        queue,
        delivery.sequence,
        delivery.id,
        delivery.body,
        delivery.headers,
        delivery.delivery_count,
        delivery.enqueued_at,
        delivery.session,
        delivery.priority,
        delivery.reply_to,
        delivery.correlation_id,
        death.reason,
        death.description,
        death.at,
        death.error,
        death.history,
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """How many messages a queue holds, each counted in one place, at one moment."""

    ready: int = 0
    """Could be received now: also those whose lock or delay has ended."""
    locked: int = 0
    """With a consumer, under a lock that has not ended."""
    delayed: int = 0
    """Sent or abandoned with a delay that has not ended."""
    deferred: int = 0
    """Set aside: received again only by their sequence."""
    dead: int = 0
    """Dead letters, also those that are being looked at under a lock."""
    oldest_age: float = 0.0
    """Seconds since the oldest ready message was sent; 0 if none is ready."""
    paused: bool = False
    """Whether the queue is paused: no consumer receives its messages."""

    @property
    def backlog(self) -> int:
        """How many messages there are to work on: those ready and locked; of a paused queue, those locked."""
        return self.locked if self.paused else self.ready + self.locked

    def __str__(self) -> str:
        counts = {name: getattr(self, name) for name in ("ready", "locked", "delayed", "deferred", "dead")}
        found = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
        return f"{found} (paused)" if self.paused else found


def count_of(stats: Stats) -> int:
    """Return how many messages *stats* counts, dead letters included."""
    return stats.ready + stats.locked + stats.delayed + stats.deferred + stats.dead
