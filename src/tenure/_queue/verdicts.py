"""The verdicts on a delivery, and the answers of a broker.

A delivery is named by queue, sequence and token. Every verb carries all three, so that a consumer whose lock is over
cannot touch the next one's delivery.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tenure._queue.failures import Failure, storable
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, Delivery, Stats
from tenure._queue.outgoing import Outgoing
from tenure.errors import ConfigError

DESCRIPTION_MAX = 4_096


def check_description(text: object) -> None:
    """Refuse what is no text."""
    if not isinstance(text, str):
        raise ConfigError(
            f"description must be text, not {text!r:.80}; write str(…), or give an exception as its cause"
        )


# --- verdicts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Complete:
    """It was handled: remove it for good.

    ``sends`` are written in the same step where the store has transactions, and before the removal where not.
    ``remember`` notes the id in the queue's inbox for so many seconds, in the same step.
    """

    sends: tuple[tuple[str, Outgoing], ...] = ()
    remember: float = 0.0


@dataclass(frozen=True, slots=True)
class Abandon:
    """It was tried and failed: to be delivered again after *delay*, or dead if that was its last delivery."""

    delay: float = 0.0
    error: Failure | None = None
    """What the handler raised, for the history; None if nothing."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """It was not tried: unlock it and take this delivery off its count, as if it had never been handed out."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Not now: put it aside; it is received again only by its sequence."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """It can't be handled, now or ever: keep it among the dead letters.

    The description is made fit for every store: a verdict that one of them refused would hold up all that are settled
    with it.
    """

    reason: str
    """A word or two, to group and to filter by."""
    description: str = ""
    """More about it; what is beyond 4,096 characters is cut off."""
    error: Failure | None = None
    """What the handler raised; None if nothing."""

    def __post_init__(self) -> None:
        check_description(self.description)
        fit = storable(self.description)
        if len(fit) > DESCRIPTION_MAX:
            fit = fit[: DESCRIPTION_MAX - 1] + "…"
        object.__setattr__(self, "description", fit)


Verdict = Complete | Abandon | GiveBack | Defer | DeadLetter
"""What becomes of a delivery."""

COMPLETE = Complete()
GIVE_BACK = GiveBack()


class Settlement(NamedTuple):
    """A verdict on one delivery."""

    delivery: Delivery
    """The delivery, with its lock token."""
    verdict: Verdict
    """What becomes of it."""


# --- answers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewed:
    """Yes: the lock holds for the time asked, from some moment after the request was sent, or for longer."""

    locked_until: float
    """When the lock ends now, by the store's wall clock, in Unix seconds: for show."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Yes: the verdict stands."""

    dead: bool = False
    """Whether the message died of it, though the verdict was not to dead-letter it."""
    reason: str | None = field(default=None, compare=False)
    """Why it died then; None if the store doesn't tell, or if it lives."""


@dataclass(frozen=True, slots=True)
class Lapsed:
    """No: this lock is over, for certain and for good. The message may be with another, settled, or waiting."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Yes: the queue is gone, and with it the messages that are counted here."""

    stats: Stats
    """The messages that were deleted, by state."""


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """No: the queue holds the messages that are counted here, and nothing was changed."""

    stats: Stats
    """The messages that are there, by state."""


SETTLED = Settled()
SETTLED_DEAD = Settled(dead=True)
"""From a store that doesn't tell the reason of the death."""
SETTLED_EXHAUSTED = Settled(dead=True, reason=MAX_DELIVERIES)
SETTLED_EXPIRED = Settled(dead=True, reason=EXPIRED)
LAPSED = Lapsed()
