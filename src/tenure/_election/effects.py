"""The inputs and the effects of the election's machine: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure.events import Event, Reason

# --- inputs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The store reports that something may have changed. A hint may be wrong."""


@dataclass(frozen=True, slots=True)
class HintsAbsent:
    """The store reports nothing from now on, until the next ``Hint``."""


@dataclass(frozen=True, slots=True)
class RenewTogether:
    """Another candidate of this process renews now: renew together with it, if the own renewal is nearly due."""


@dataclass(frozen=True, slots=True)
class RenewalWithheld:
    """The renewal was not sent, because the work makes no progress."""

    why: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The candidate has no place in the store's queue any more."""


Answer = Granted | HeldBy | Vacant | Lost | Released | Withdrawn | NoAnswer | RenewalWithheld


@dataclass(frozen=True, slots=True)
class Answered:
    """The request *request_id* was answered. Every request is answered exactly once, however late."""

    request_id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """The work of the term *token* has really ended; *again* says whether to campaign again."""

    token: int
    again: bool = True


@dataclass(frozen=True, slots=True)
class Resign:
    """The owner wants this term to end; the candidacy goes on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The owner wants no further term. Work that runs may finish first."""


Input = Tick | Hint | HintsAbsent | RenewTogether | Answered | WorkEnded | Resign | Stop


# --- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask the store for the name, as *holder*."""

    request_id: int
    holder: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask the store who holds the name; that changes nothing there."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the store to extend the lease, if the work makes progress."""

    request_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Release:
    """Release the lease."""

    request_id: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Give up the place of *holder* in the store's queue, if there is one."""

    request_id: int
    holder: str


@dataclass(frozen=True, slots=True)
class StartWork:
    """A term has begun: run the work; the term is trusted until *trusted_until*."""

    grant: Grant
    trusted_until: float


@dataclass(frozen=True, slots=True)
class Trust:
    """The term is trusted until *until*; if that is past, it is no longer trusted."""

    token: int
    until: float


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Cancel the work; the input ``WorkEnded`` follows once it has ended."""

    token: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class WorkOverran:
    """Work still runs although its term is over: report it, or end the process."""

    token: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Pass *event* to the observers."""

    event: Event


Effect = Acquire | Inspect | Renew | Release | Withdraw | StartWork | Trust | CancelWork | WorkOverran | Emit
