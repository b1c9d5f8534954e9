"""What the two machines of a consumer are told, and what they answer: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure._lease import NoAnswer
from tenure._queue.lock_group import NEVER, Why
from tenure._queue.message import Delivery, Lapsed, Renewed, SessionLock, Settled, Settlement, Token
from tenure.events import Event

# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come, or messages were taken or done since the last time."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The broker says that messages may have become claimable. It may lie."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim number *ask* has come back with *deliveries*; *due_in* as in :class:`tenure._queue.broker.Claim`."""

    ask: int
    deliveries: Sequence[Delivery]
    due_in: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The question number *ask* has come back. Each question does, once, however late."""

    ask: int
    answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer


@dataclass(frozen=True, slots=True)
class Pause:
    """Claim nothing, and give back what waits; what runs goes on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Claim again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Claim nothing ever again, give back what waits, let what runs finish until *deadline*, then stop."""

    deadline: float = NEVER


# --- what the locks tell the pump --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """These locks were over, or about to be, at the moment *at*; for each the reason."""

    at: float
    locks: Sequence[tuple[Delivery | SessionLock, Why]]


@dataclass(frozen=True, slots=True)
class Returned:
    """So many messages of these groups, which waited for too long, have gone back to the broker."""

    counts: Sequence[tuple[Token, int]]


LocksMessage = Ended | Returned

PumpInput = Tick | Hint | Claimed | Answered | Pause | Resume | Drain | LocksMessage
LocksInput = Tick | Answered


# --- what goes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receive:
    """Claim up to *limit* messages."""

    ask: int
    limit: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Pass these verdicts."""

    ask: int
    settlements: Sequence[Settlement]


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask for more time for these."""

    ask: int
    held: Sequence[Delivery | SessionLock]


@dataclass(frozen=True, slots=True)
class Serve:
    """Messages wait: let idle workers take them."""


@dataclass(frozen=True, slots=True)
class CancelHandler:
    """Tell the handler of this delivery to stop."""

    delivery: Delivery
    why: Why


@dataclass(frozen=True, slots=True)
class CancelAll:
    """The deadline of the drain has come: tell every handler to stop. What they leave is given back uncounted."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the broker answered to a verdict, unless it is what one expects of a complete or a give-back.

    If it has lapsed, *why* tells the reason, unless a ``LockEnded`` has told of that before.
    """

    settlement: Settlement
    answer: Settled | Lapsed
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Emit:
    """Let the observers know."""

    event: Event


PumpEffect = Receive | Settle | Serve | CancelHandler | CancelAll | Report | Emit
LocksEffect = Renew | Settle | Ended | Returned | Emit
