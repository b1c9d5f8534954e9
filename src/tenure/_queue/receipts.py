"""Locks that only this process can renew and settle: where the store doesn't take a token of ours for a proof.

It wants a pop receipt, a tag on a channel, a subject, a token for each message. What proves a lock is kept here, under
the delivery that was handed out.

The end of a lock is counted by the local clock, from before the request that began it or renewed it. So a lock that is
good here has not ended in the store; one that has ended here is over, whatever the store says later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Generic, TypeVar

from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import Settlement
from tenure._runtime.clock import Clock

EXPIRE_EVERY = 60.0
"""Seconds between two searches for locks that ended without a verdict."""


class Held:
    """A message that this process has locked."""

    __slots__ = ()

    ends_at: float
    """The end of its lock, by the local clock."""

    def is_over(self, now: float) -> bool:
        """Return whether its lock has ended *now*."""
        return now >= self.ends_at


H = TypeVar("H", bound=Held)


class Receipts(Generic[H]):
    """The messages that this process has locked; on any thread.

    Args:
        clock: The local clock.
        kept: For how many seconds after its end a lock is kept, if there is no verdict.
    """

    def __init__(self, clock: Clock, kept: float = 0.0) -> None:
        self._clock = clock
        self._kept = kept
        self._held: dict[tuple[object, ...], H] = {}  # by queue, sequence and token
        self._expire_at = 0.0
        self.moves = 0
        """Rises when a message is locked, and when it is forgotten."""

    def add(self, delivery: Delivery, held: H, free: int | None = None) -> Delivery:
        """Keep what *delivery* has locked, and return it with a sequence that no other of its claim has.

        Anybody who may write to a queue can give a message the sequence of another. A verdict on one of them would
        settle the other. So the next sequence that is free is taken, from *free* on if that is given.
        """
        key = delivery[:3]
        if key in self._held:
            queue, sequence, token = key
            numbers = count(sequence if free is None else free)
            delivery = delivery._replace(sequence=next(one for one in numbers if (queue, one, token) not in self._held))
            key = delivery[:3]
        self._held[key] = held
        self.moves += 1
        return delivery

    def known(self, delivery: Delivery) -> H | None:
        """Return what *delivery* has locked, also if the lock is over; None after its verdict."""
        return self._held.get(delivery[:3])

    def find(self, one: Delivery | SessionLock) -> H | None:
        """Return the message of a delivery whose lock is not over."""
        held = self._held.get(one[:3])
        return None if held is None or held.is_over(self._clock.now()) else held

    def find_all(self, settlements: Iterable[Settlement]) -> Iterator[tuple[int, Settlement, H]]:
        """Yield the verdicts that can be passed, each with its place and its message: the locks are not over.

        Of several verdicts on one delivery, that is the first; the others come too late.
        """
        now, seen = self._clock.now(), set()
        for place, settlement in enumerate(settlements):
            key = settlement[0][:3]
            held = self._held.get(key)
            if held is not None and key not in seen and not held.is_over(now):
                seen.add(key)
                yield place, settlement, held

    def forget(self, delivery: Delivery) -> H | None:
        """Forget a delivery that is settled, or lost; return what it had locked."""
        self.moves += 1
        return self._held.pop(delivery[:3], None)

    def forget_all(self, is_gone: Callable[[H], bool]) -> list[H]:
        """Forget all deliveries that are gone, and return what they had locked."""
        gone = [key for key, held in self._held.copy().items() if is_gone(held)]
        self.moves += len(gone)
        return [held for key in gone if (held := self._held.pop(key, None)) is not None]

    def of(self, queue: str) -> list[H]:
        """Return what is locked in *queue*, also if the lock is over."""
        return [held for key, held in self._held.copy().items() if key[0] == queue]

    def expire(self) -> bool:
        """Forget deliveries that were never settled, once a minute; return whether it was done now."""
        now = self._clock.now()
        if now < self._expire_at:
            return False
        self._expire_at = now + EXPIRE_EVERY
        self.forget_all(lambda held: held.ends_at + self._kept < now)
        return True
