"""What one claim brought: the messages that are locked by one token, shared by the two machines of a consumer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from tenure._queue.message import Delivery, SessionLock, Token

NEVER = math.inf

JUDGED = math.inf
"""Stands in place of the moment at which a handler began, once there is a verdict."""

Why = Literal["denied", "unanswered", "stalled", "max_hold"]
"""Why a lock is over: see :class:`tenure.events.LockEnded`."""


@dataclass(slots=True, eq=False)
class LockGroup:
    """The deliveries of one claim, or a session, and how long their locks may be believed.

    Shared by two threads without a lock: each count has one writer, each move of a message one winner.
    """

    token: Token
    size: int
    sure_until: float
    renew_at: float
    waiting: deque[Delivery] = field(default_factory=deque)
    running: dict[int, tuple[Delivery, float]] = field(default_factory=dict)
    """By sequence: the delivery, and when it was taken; ``JUDGED`` when there is a verdict that is not answered yet.

    Until it is, the lock is kept: the caller's loop may be blocked, or the broker out of reach.
    """
    session: SessionLock | None = None
    asking: set[int] = field(default_factory=set)
    """Running ones whose handler has passed a verdict by itself, not answered yet: a renewal that finds such a message
    gone has met that verdict, and no loss."""
    kept: set[int] = field(default_factory=set)
    """Running ones whose handler has ended without a verdict, so that nobody is left who could be told to stop."""
    cancelled: dict[int, float] = field(default_factory=dict)
    """Running ones that were told to stop, and until when their lock is sure; they are not renewed any more."""
    settled: int = 0
    """How many the pump has heard the last of. Only the pump writes it."""
    dropped: int = 0
    """How many the locks have lost, or given back and heard so. Only the locks write it."""
    over: bool = False
    """It can't be believed any more."""
    stalled: bool = False
    """Because this process did not run when it was to be renewed. Only the locks write it."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is left."""
        return self.settled + self.dropped >= self.size


def withdraw(hold: LockGroup, sequence: int) -> bool:
    """Take a message from its handler, or from who kept it; False if it is with none, or there is a verdict.

    The pump and the locks may both try: it is taken out by one step, so that only one of them can.
    """
    entry = hold.running.pop(sequence, None)
    if entry is not None and entry[1] == JUDGED:
        hold.running[sequence] = entry
        return False
    return entry is not None


def taken(hold: LockGroup) -> list[Delivery]:
    return [delivery for delivery, began in list(hold.running.values()) if began != JUDGED]


def named(delivery: Delivery) -> tuple[str, int, int]:
    return delivery.id, delivery.sequence, delivery.delivery_count
