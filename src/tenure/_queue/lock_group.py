"""The messages of one claim, locked by one token; shared by the two machines of a consumer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from tenure._queue.message import Delivery, SessionLock, Token

NEVER = math.inf

HAS_VERDICT = math.inf
"""Stands in place of the moment at which a handler began, once there is a verdict."""

LossReason = Literal["denied", "unanswered", "stalled", "max_hold"]
"""Why a lock is over: see :class:`tenure.events.LockEnded`."""


class DeliveryKey:
    """Identifies one delivery of a lock group, which it keeps in memory: by the object.

    Its sequence and its delivery count may be those of the next delivery, as a give-back is not counted.
    """

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeliveryKey) and other._delivery is self._delivery

    def __hash__(self) -> int:
        return id(self._delivery)


@dataclass(slots=True, eq=False)
class LockGroup:
    """The deliveries of one claim, or a session, and how long their locks are trusted.

    Two threads share it without a lock. Each part has one writer, and the other thread may read it at any moment.
    ``waiting`` is the one place where both take something away, each by one step: the pump from its front, the locks
    from its end.
    """

    token: Token
    size: int
    trusted_until: float
    """Until when the locks are trusted. From the claim on, the locks write it, as all down to ``stalled``."""
    renew_at: float
    """When the next renewal is due; what waits then goes back."""
    waiting: deque[Delivery] = field(default_factory=deque)
    """Claimed, and with no handler yet."""
    session: SessionLock | None = None
    bytes: int = 0
    """Of the bodies of its messages, settled ones included."""

    # --- written by the locks ---

    ended: dict[DeliveryKey, float] = field(default_factory=dict)
    """Those taken deliveries whose handler is to stop, and by when; they are not renewed any more. At minus infinity,
    the broker has said that the lock is over. (By :class:`DeliveryKey`: while the locks look at one delivery of a
    message, a session may receive its next one.)"""
    overran: set[DeliveryKey] = field(default_factory=set)
    """Those of them whose handler still ran at that moment, which was reported."""
    over: bool = False
    """Whether none of the locks is trusted any more."""
    stalled: bool = False
    """Whether that is because this process did not run when they were to be renewed."""

    # --- written by the pump ---

    running: dict[int, tuple[Delivery, float]] = field(default_factory=dict)
    """By sequence: the delivery, and when it was taken; ``HAS_VERDICT`` while its verdict is not answered yet.

    Until it is, the lock is kept: the caller's loop may be blocked, or the broker out of reach.
    """
    settling: set[int] = field(default_factory=set)
    """Those whose handler passes a verdict by itself, not answered yet: a renewal that finds such a message gone may
    have met that verdict. (A handler adds to it from its own thread; the pump removes.)"""
    kept: set[int] = field(default_factory=set)
    """Those whose handler has ended without a verdict, so that no handler is left to cancel."""
    stopped: set[int] = field(default_factory=set)
    """Those whose handler was cancelled."""
    settled: int = 0
    """How many are settled, lost, or given back."""

    def begin(self, now: float) -> Delivery | None:
        """Move the first that waits to ``running``, and return it; None if none waits. Called by the pump."""
        try:
            delivery = self.waiting[0]
        except IndexError:  # the locks were faster, and give it back
            return None
        # First in one place, then out of the other: at no moment can the locks overlook it.
        self.running[delivery.sequence] = (delivery, now)
        try:
            self.waiting.popleft()
        except IndexError:
            self.running.pop(delivery.sequence, None)
            return None
        return delivery

    def why_lapsed(self, delivery: Delivery, now: float) -> LossReason | None:
        """Return why a verdict on *delivery* came too late; None if the end of its lock was reported before."""
        if delivery.sequence in self.stopped:
            return None
        # The locks note in time when a lock is over: unless they have not run.
        is_late = now >= self.trusted_until > -NEVER and not self.over
        return "stalled" if self.stalled or is_late else "denied"

    def take_last(self) -> Delivery | None:
        """Take out the last that waits, to be given back; None if none waits. The pump takes from the front."""
        try:
            return self.waiting.pop()
        except IndexError:
            return None

    def bytes_in_hand(self) -> int:
        """Return the bytes of the bodies of the messages that wait, or have no answered verdict."""
        try:
            waiting = sum(len(delivery.body) for delivery in self.waiting)
        except RuntimeError:  # the locks have taken from it meanwhile
            return self.bytes
        return waiting + sum(len(delivery.body) for delivery, _ in self.running.values())

    def is_with_handler(self, sequence: int) -> bool:
        """Return whether a message was taken, and there is no verdict on it."""
        entry = self.running.get(sequence)
        return entry is not None and entry[1] != HAS_VERDICT

    def with_handlers(self) -> list[Delivery]:
        """Return the messages that were taken, and on which there is no verdict."""
        return [delivery for delivery, began in list(self.running.values()) if began != HAS_VERDICT]

    def trusted_until_of(self, delivery: Delivery) -> float:
        """Return until when the lock of a message that was taken is trusted; minus infinity if it is over."""
        if delivery.sequence not in self.running:
            return -NEVER
        return min(self.ended.get(DeliveryKey(delivery), NEVER), self.trusted_until)


def event_fields(delivery: Delivery) -> tuple[str, int, int]:
    """Return what identifies *delivery* in events: message id, sequence, delivery count."""
    return delivery.id, delivery.sequence, delivery.delivery_count
