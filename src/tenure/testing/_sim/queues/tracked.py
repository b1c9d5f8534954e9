"""How a delivery stands at its consumer, seen from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tenure._queue.message import Delivery
from tenure._queue.verdicts import Verdict


class Stage(Enum):
    """Where a delivery stands, seen from outside."""

    WAITING = "waiting"
    RUNNING = "running"
    KEPT = "kept"  # its handler has ended without a verdict: somebody else will pass one
    ENDED = "ended"  # its handler has, with a verdict that is to be passed, or without
    PASSED = "passed"  # a verdict was passed, and is not answered yet
    LOST = "lost"  # a renewal said no


@dataclass(slots=True, eq=False)
class TrackedDelivery:
    """A delivery at its consumer, as it looks from outside."""

    delivery: Delivery
    stage: Stage = Stage.WAITING
    verdict: Verdict | None = None
    began: float = 0.0
    is_settling: bool = False
    """Whether its handler has asked the broker to complete it, so that nobody knows what became of its lock."""
    is_asking: bool = False
    """Whether the broker has still to say what became of that."""
    is_denied: bool = False
    """Whether a renewal said no."""
    trusted: float = -math.inf
    """Until when its lock may be believed, by the consumer's clock: as the answers so far allow."""
    cancelled_until: float | None = None
    """Until when its lock was believed when its handler was told to stop; None before."""
