"""What happens in an election or at a queue, as plain values: told to ears (logs, displays), never to decide by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "denied",  # the store said that the claim is over
    "unanswered",  # the trusted time ran out without an answer
    "stalled",  # we withheld the renewal: the work made no progress
    "asked",  # somebody asked the leader to step down
    "resigned",  # the candidate's own owner called resign()
    "stopped",  # the campaign is being stopped
    "ended",  # the work returned or raised
]
"""Why a term came to its end."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one candidate, at *at* seconds of its own clock."""

    at: float
    name: str
    holder: str


@dataclass(frozen=True, slots=True)
class StandingBy(Event):
    """Somebody else leads: *leader*, in the term *token*. Told once for each leader; the candidate goes on asking."""

    leader: str
    token: int


@dataclass(frozen=True, slots=True)
class TermBegan(Event):
    """The candidate was elected."""

    token: int


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The term may be trusted for longer."""

    token: int
    trusted_until: float


@dataclass(frozen=True, slots=True)
class RenewalMissed(Event):
    """A renewal got no answer; it is tried again inside the time left."""

    token: int
    why: str
    time_left: float


@dataclass(frozen=True, slots=True)
class CampaignFailed(Event):
    """The store could not be asked for the name; the candidate goes on asking."""

    why: str


@dataclass(frozen=True, slots=True)
class TermEnding(Event):
    """Work has been told to stop; it has until *deadline*."""

    token: int
    reason: Reason
    deadline: float


@dataclass(frozen=True, slots=True)
class Overrun(Event):
    """Work still runs although its term can no longer be trusted. The lease is left to run out."""

    token: int


@dataclass(frozen=True, slots=True)
class TermEnded(Event):
    """Work has ended, and the term with it; *released* tells whether the lease is being handed back."""

    token: int
    reason: Reason
    released: bool


@dataclass(frozen=True, slots=True)
class HandBackMissed(Event):
    """The lease of a term that has ended could not be handed back yet: told once. It is tried again, or runs out."""

    token: int
    why: str
    time_left: float


@dataclass(frozen=True, slots=True)
class HandedBack(Event):
    """A grant arrived after we had given up on it, and was returned unused."""

    token: int


@dataclass(frozen=True, slots=True)
class TokenFell(Event):
    """The store told a token below *seen*, or *seen* itself for another term: it was restored, or lost what it knew.

    A resource that compares tokens, such as a fence, refuses the new terms until theirs is above *seen*.
    """

    token: int
    seen: int


# --- at a queue: *name* is the queue's, *holder* the consumer -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageEvent(Event):
    """Something that happened to one delivery."""

    id: str
    sequence: int
    delivery_count: int


@dataclass(frozen=True, slots=True)
class MessageFailed(MessageEvent):
    """A handler failed; the message is delivered again after *delay* seconds, unless that was its last delivery.

    *delay* is None if no retry mends that: the message goes to the dead letters. *place* is file, line and function of
    the innermost frame that is yours; empty if there is none.
    """

    error: str
    delay: float | None
    place: str = ""


@dataclass(frozen=True, slots=True)
class HandlerNotBegun(MessageEvent):
    """No process could begin the handler, for *why*; the message is given back uncounted."""

    why: str


@dataclass(frozen=True, slots=True)
class MessageDied(MessageEvent):
    """A message went to the dead letters."""

    reason: str


@dataclass(frozen=True, slots=True)
class LockEnded(MessageEvent):
    """A lock was lost, or is about to be: the handler is cancelled and its result thrown away.

    *why* is ``denied`` (the broker said so), ``unanswered`` (renewals got no answer in time), ``stalled`` (this process
    did not run when it was to renew: it was stopped, or a handler held the GIL) or ``max_hold`` (the handler took
    longer than it may).
    """

    why: str


@dataclass(frozen=True, slots=True)
class ResultDiscarded(MessageEvent):
    """A handler ended after its lock had, unnoticed: its result is thrown away, and the message is not settled by it.

    *why* is as of :class:`LockEnded`; ``unanswered`` if consuming ended before the broker had answered to the verdict,
    which may stand or not. For each result that is thrown away there is one ``LockEnded`` or one of these.
    """

    why: str


@dataclass(frozen=True, slots=True)
class HandlerOverran(MessageEvent):
    """A handler still runs although its lock is over; somebody else may have the message."""


@dataclass(frozen=True, slots=True)
class GivenBack(Event):
    """Deliveries were given back untried and uncounted: they waited too long, or consuming stops."""

    count: int


@dataclass(frozen=True, slots=True)
class BrokerUnanswered(Event):
    """The broker could not be asked to receive, settle or renew, or for the inbox (*what*); it is tried again."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class BrokerAwaited(Event):
    """A consumer has begun and its store can't be asked yet, for *why*: it goes on asking, and tells this once."""

    why: str


@dataclass(frozen=True, slots=True)
class BrokerAnswered(Event):
    """The store that a consumer waited for answers, after *waited* seconds; consuming begins."""

    waited: float
