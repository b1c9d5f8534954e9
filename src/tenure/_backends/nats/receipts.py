"""The locks of this process: which message of a stream each delivery is, and until when it is surely locked.

The server answers an acknowledgement in the same way whether the message was still locked or not. But a lock can't have
ended before the moment that is counted here, from before the request that began it. So an answer that comes before that
moment proves that the server acted while the lock held; a later one proves nothing, and the lock is over.

A server that is restarted may have forgotten what it delivered in its last tenth of a second, and deliver it again as
if it were new. So a lock belongs to the server's process that gave it, and is over when that is gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tenure._backends.nats.connection import Connection
from tenure._backends.nats.messages import Found
from tenure._queue.message import Delivery, SessionLock
from tenure._runtime.clock import Clock

EXPIRE_EVERY = 60.0
"""Seconds between two searches for expired locks."""


@dataclass(slots=True, eq=False)
class Held:
    """A message that this process has locked: by the server, or with a lock that is stored in it."""

    found: Found
    locked_until: float
    """The end of the lock by the local clock; the server ends it a little later."""
    connection: Connection | None
    """Over which the server gave the lock; None if the lock is stored with the message."""
    was_tried: bool = False
    """Whether a verdict got no answer, so that it may have been passed already."""
    is_completed: bool = False
    """Whether it is completed, and only its id is still to be remembered."""

    def is_known_to(self, connection: Connection) -> bool:
        """Whether the server's process that gave the lock is there still, as far as *connection* tells."""
        given = self.connection
        return given is None or not given.is_lost or given.server_id == connection.server_id


class Receipts:
    """The messages that this process has locked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[tuple[str, int], Held] = {}
        self._lock = threading.Lock()  # claims come from several threads
        self._expire_at = 0.0

    def add(self, delivery: Delivery, held: Held) -> Delivery:
        """Keep the lock of *delivery*; return it with a sequence that differs from the others of its token."""
        token, sequence = str(delivery.token), delivery.sequence
        while (token, sequence) in self._held:
            sequence += 1  # of a message to which another program has given the sequence of one before
        self._held[token, sequence] = held
        return delivery if sequence == delivery.sequence else delivery._replace(sequence=sequence)

    def find(self, one: Delivery | SessionLock) -> Held | None:
        """Return the message of a delivery whose lock has not ended."""
        if isinstance(one, SessionLock):
            return None
        held = self._held.get((str(one.token), one.sequence))
        return held if held and held.found.queue == one.queue and self._clock.now() < held.locked_until else None

    def forget(self, delivery: Delivery) -> None:
        """Forget a delivery that is settled, or lost."""
        self._held.pop((str(delivery.token), delivery.sequence), None)

    def expire(self) -> None:
        """Forget deliveries that were never settled; does something once a minute."""
        now = self._clock.now()
        with self._lock:
            if now < self._expire_at:
                return
            self._expire_at = now + EXPIRE_EVERY
        for key, held in list(self._held.items()):
            if held.locked_until < now:
                self._held.pop(key, None)
