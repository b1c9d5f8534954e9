"""The inputs and the effects of the two machines of a consumer: plain values.

Nothing changes one once it is made. Those that come with every message are not declared frozen, as it takes four times
as long to make a frozen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from tenure._lease import NoAnswer
from tenure._queue.lock_group import NEVER, LossReason
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.verdicts import Lapsed, Renewed, Settled, Settlement
from tenure.events import Event

# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come, or messages were taken or done since the last time."""


@dataclass(frozen=True, slots=True)
class LookAlong:
    """Other consumers of the process look at their empty queues now, and this one may share their request."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Messages may have become claimable, says the broker. It may be wrong."""


@dataclass(slots=True)
class Claimed:
    """The answer to claim number *request_id*: *deliveries*; the rest as in :class:`tenure._queue.broker.Claim`."""

    request_id: int
    deliveries: Sequence[Delivery]
    due_in: float | None = None
    age: float = 0.0
    is_limited: bool = False
    is_held_back: bool = False
    held_up_for: float | None = None


Answers = Sequence[Settled | Lapsed | Renewed | NoAnswer]


@dataclass(slots=True)
class Answered:
    """The answer to request number *request_id*. Each request has one, however late."""

    request_id: int
    answers: Answers | NoAnswer


@dataclass(frozen=True, slots=True)
class Pause:
    """Claim nothing, and give the buffer back; handlers that run go on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Claim again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Claim nothing any more, give the buffer back, let handlers finish until *deadline*, then stop.

    Handlers that run longer are cancelled; those that don't stop within the grace of a lock are left. So is, at *until*
    (twice that time after the deadline, if None), all that is still unanswered.
    """

    deadline: float = NEVER
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to accept number *request_id*: *session*, or None; the rest as in ``NoSession``."""

    request_id: int
    session: SessionLock | None
    due_in: float | None = None
    is_held_back: bool = False


# --- from the locks to the pump --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocksEnded:
    """These locks were over, or about to be, at the moment *at*; for each the reason."""

    at: float
    locks: Sequence[tuple[Delivery | SessionLock, LossReason]]


@dataclass(frozen=True, slots=True)
class MessagesGivenBack:
    """So many messages of these groups, which waited for too long, have gone back to the broker."""

    counts: Sequence[tuple[Token, int]]


LocksMessage = LocksEnded | MessagesGivenBack

PumpInput = Tick | Hint | LookAlong | Claimed | Accepted | Answered | Pause | Resume | Drain | LocksMessage
LocksInput = Tick | Answered


# --- what goes out -----------------------------------------------------------------------------------------------


class Look(Enum):
    """Whether to look at the queue before a claim; a look changes nothing there."""

    NONE = "none"
    INSTEAD = "instead"
    """The queue was empty, and nothing has hinted at a message since: no claim follows if it still is."""
    FIRST = "first"
    """The claim before had no answer, and may have locked messages for nobody: so might this one, unless the broker is
    heard first."""


@dataclass(slots=True)
class Receive:
    """Claim up to *limit* messages."""

    request_id: int
    limit: int
    look: Look = Look.NONE


@dataclass(frozen=True, slots=True)
class Accept:
    """Lock the next free session with a message waiting. The answer is ``Accepted``."""

    request_id: int
    looks_first: bool = False
    """Whether to look before it, as ``Look.FIRST`` says."""


@dataclass(slots=True)
class ReceiveSession:
    """Claim the next message of *session*. The answer is ``Claimed``, or ``Answered`` if the lock is over."""

    request_id: int
    session: SessionLock


@dataclass(frozen=True, slots=True)
class Release:
    """Unlock *session*, and give back what was received in it and not settled."""

    request_id: int
    session: SessionLock


@dataclass(slots=True)
class Settle:
    """Pass these verdicts."""

    request_id: int
    settlements: Sequence[Settlement]


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask for more time for these."""

    request_id: int
    held: Sequence[Delivery | SessionLock]


@dataclass(frozen=True, slots=True)
class WakeWorkers:
    """Messages wait: let idle workers take them."""


WAKE_WORKERS = WakeWorkers()


@dataclass(frozen=True, slots=True)
class CancelHandler:
    """Cancel the handler of this delivery."""

    delivery: Delivery
    why: LossReason


@dataclass(frozen=True, slots=True)
class CancelAll:
    """Cancel every handler, as the deadline of a drain has come. What they leave is given back uncounted.

    With ``leave``, those that had time to stop, and did not, are left behind.
    """

    why: Literal["drain", "leave"]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of the broker to a verdict, unless it is the usual one to a complete or a give-back.

    If it has lapsed, *why* is the reason, unless a ``LockEnded`` has reported it before.
    """

    settlement: Settlement
    answer: Settled | Lapsed | None
    """None: the session is lost, and the verdict may stand or not."""
    why: LossReason | None = None


@dataclass(frozen=True, slots=True)
class Emit:
    """Report an event to the observers."""

    event: Event


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """The queue is empty, nothing is in hand, and nothing that was abandoned is still to come back: drain now."""


Request = Receive | Accept | ReceiveSession | Release | Settle
"""An effect of the pump that the broker answers."""

REQUESTS: frozenset[type[object]] = frozenset({Receive, Accept, ReceiveSession, Release, Settle})

PumpEffect = Request | NothingLeft | WakeWorkers | CancelHandler | CancelAll | Report | Emit
LocksEffect = Renew | Settle | LocksEnded | MessagesGivenBack | Emit
