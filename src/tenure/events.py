"""Events of elections and queues, as plain values, for logs and displays: never base a decision on an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BrokerAnswered",
    "BrokerAwaited",
    "BrokerUnanswered",
    "CampaignFailed",
    "Event",
    "GivenBack",
    "HandlerNotBegun",
    "HandlerOverran",
    "LockEnded",
    "MessageDied",
    "MessageEvent",
    "MessageFailed",
    "Overrun",
    "Reason",
    "ReleaseMissed",
    "ReleasedUnused",
    "RenewalMissed",
    "Renewed",
    "ResultDiscarded",
    "SlotSent",
    "SlotsSkipped",
    "SlotsWithheld",
    "StandingBy",
    "TermBegan",
    "TermEnded",
    "TermEnding",
    "TokenFell",
]

Reason = Literal[
    "denied",  # the store said that the claim is over
    "unanswered",  # the trusted time ran out without an answer
    "stalled",  # the renewal was withheld, because the work made no progress
    "asked",  # the leader was asked to step down
    "resigned",  # the owner of the candidate called resign()
    "stopped",  # the campaign is being stopped
    "ended",  # the work returned or raised
]
"""The reason why a term ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one candidate, at *at* seconds of its own clock."""

    at: float
    """When it happened, in seconds of the process's own clock, which is no wall clock."""
    name: str
    """The name of the election, or that of the queue."""
    holder: str
    """The identity of the candidate, or that of the consumer."""


@dataclass(frozen=True, slots=True)
class StandingBy(Event):
    """Another candidate leads: *leader*, in the term *token*. Emitted once for each; the candidate keeps asking."""

    leader: str
    token: int


@dataclass(frozen=True, slots=True)
class TermBegan(Event):
    """The candidate was elected."""

    token: int
    """The fencing token of the term."""


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The term is trusted for longer."""

    token: int
    """The fencing token of the term."""
    trusted_until: float
    """Until when, in seconds of the process's own clock."""


@dataclass(frozen=True, slots=True)
class RenewalMissed(Event):
    """A renewal got no answer; it is tried again inside the time left."""

    token: int
    """The fencing token of the term."""
    why: str
    """Why there was no answer."""
    time_left: float
    """Seconds for which the term is still trusted."""


@dataclass(frozen=True, slots=True)
class CampaignFailed(Event):
    """The store could not be asked for the name; the candidate keeps asking."""

    why: str
    """Why there was no answer."""


@dataclass(frozen=True, slots=True)
class TermEnding(Event):
    """The work was asked to stop; it has until *deadline* to end."""

    token: int
    """The fencing token of the term."""
    reason: Reason
    """Why the term ends."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Overrun(Event):
    """Work still runs although its term can no longer be trusted. The lease is left to run out."""

    token: int
    """The fencing token of the term."""


@dataclass(frozen=True, slots=True)
class TermEnded(Event):
    """Work has ended, and the term with it; *released* says whether the lease is being released."""

    token: int
    """The fencing token of the term."""
    reason: Reason
    """Why the term ended."""
    released: bool


@dataclass(frozen=True, slots=True)
class ReleaseMissed(Event):
    """The lease of an ended term could not be released yet: emitted once. It is tried again, or runs out."""

    token: int
    """The fencing token of the term."""
    why: str
    """Why there was no answer."""
    time_left: float
    """Seconds for which the release is still tried; then the lease is left to run out."""


@dataclass(frozen=True, slots=True)
class ReleasedUnused(Event):
    """A grant arrived after its request was given up, and was released unused."""

    token: int
    """The fencing token of the grant."""


@dataclass(frozen=True, slots=True)
class TokenFell(Event):
    """The store gave a token below *seen*, or *seen* itself for another term: it was restored, or lost data.

    A resource that compares tokens, such as a fence, refuses the new terms until theirs is above *seen*.
    """

    token: int
    """The token that the store gave."""
    seen: int


# --- at a queue: *name* is the queue's, *holder* the consumer -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageEvent(Event):
    """Something that happened to one delivery."""

    id: str
    """The id of the message."""
    sequence: int
    """The number of the message in its queue."""
    delivery_count: int
    """Which delivery it was: 1 is the first."""


@dataclass(frozen=True, slots=True)
class MessageFailed(MessageEvent):
    """A handler failed; the message is delivered again after *delay* seconds, unless that was its last delivery.

    *delay* is None if a retry can't succeed: the message becomes a dead letter. *place* is file, line and function of
    the innermost frame of your code; empty if there is none.
    """

    error: str
    """Type and text of what the handler raised."""
    delay: float | None
    place: str = ""


@dataclass(frozen=True, slots=True)
class HandlerNotBegun(MessageEvent):
    """No process could start the handler (*why*); the message is given back uncounted."""

    why: str


@dataclass(frozen=True, slots=True)
class MessageDied(MessageEvent):
    """A message became a dead letter."""

    reason: str
    """Why it died, in a word or two."""


@dataclass(frozen=True, slots=True)
class LockEnded(MessageEvent):
    """A lock was lost, or is about to be: the handler is cancelled and its result discarded.

    *why* is ``denied`` (the broker said so), ``unanswered`` (renewals got no answer in time), ``stalled`` (this process
    did not run when a renewal was due: it was stopped, or a handler held the GIL) or ``max_hold`` (the handler took
    longer than it may).
    """

    why: str


@dataclass(frozen=True, slots=True)
class ResultDiscarded(MessageEvent):
    """A handler ended after its lock, unnoticed: its result is discarded, and does not settle the message.

    *why* is as in :class:`LockEnded`; ``unanswered`` if consuming ended before the broker had answered to the verdict,
    which may hold or not. For each discarded result there is one ``LockEnded`` or one of these.
    """

    why: str


@dataclass(frozen=True, slots=True)
class HandlerOverran(MessageEvent):
    """A handler still runs although its lock is over; another consumer may have the message."""


@dataclass(frozen=True, slots=True)
class GivenBack(Event):
    """Deliveries were given back unhandled and uncounted: they waited too long, or consuming stops."""

    count: int
    """How many deliveries."""


@dataclass(frozen=True, slots=True)
class BrokerUnanswered(Event):
    """The broker could not be asked (*what*: to receive, settle, renew, advance a schedule …); it is tried again."""

    what: str
    why: str
    """Why there was no answer."""


@dataclass(frozen=True, slots=True)
class BrokerAwaited(Event):
    """A consumer has started, and can't reach its store yet (*why*): it keeps asking. Emitted once."""

    why: str


@dataclass(frozen=True, slots=True)
class BrokerAnswered(Event):
    """The store that a consumer waited for answers, after *waited* seconds; consuming starts."""

    waited: float


@dataclass(frozen=True, slots=True)
class SlotSent(Event):
    """The message of a schedule's slot was sent by this process, *late* seconds after its time.

    *slot* is in Unix seconds.
    """

    schedule: str
    """The name of the schedule."""
    slot: float
    late: float


@dataclass(frozen=True, slots=True)
class SlotsSkipped(Event):
    """The slots of a schedule from *first* to *last* were missed, and are not sent.

    Both are in Unix seconds. Nobody ran the schedule then, or the store did not answer.
    """

    schedule: str
    """The name of the schedule."""
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class SlotsWithheld(Event):
    """This process sends no slots of a schedule for now (*why*). Emitted once for each reason."""

    schedule: str
    """The name of the schedule."""
    why: str
