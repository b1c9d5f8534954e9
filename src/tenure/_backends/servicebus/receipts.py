"""The locks of this process. Service Bus locks each message under a token of its own, most of them tied to a link.

A claim of tenure's has one token. So the locks are kept here under it: only the process that received a message can
renew and settle it. All of this belongs to the library's thread, but for ``add``: any thread may claim what has come
already.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from uuid import UUID

from tenure._backends.servicebus.codec import Incoming
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.message_format import Received
from tenure._backends.servicebus.names import Path
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import Verdict
from tenure._runtime.clock import Clock

EXPIRE_EVERY = 60.0
"""Seconds between two searches for locks that ended without a verdict."""


@dataclass(slots=True, eq=False)
class HeldSession:
    """A session that this process has locked: by its link."""

    name: str
    queue: str
    path: Path
    link: ReceiveLink
    locked_until: float
    """By the service's clock."""
    blocked_until: float = 0.0
    """Until when a message that failed holds up the others."""
    delivered: dict[int, Held] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the service has surely unlocked it."""
        return self.is_over or self.link.lost is not None


@dataclass(slots=True, eq=False)
class Held:
    """A message under a lock."""

    queue: str
    path: Path
    token: UUID
    received: Received
    message: Incoming
    until: float
    """When its lock ends by this process's clock, for statistics; the service judges."""
    arrived: Arrived | None = None
    """None if it did not come on a link: a deferred message."""
    link: ReceiveLink | None = None
    session: HeldSession | None = None
    begun: Verdict | None = None
    """The verdict for which something was sent, and which is not passed yet."""
    sent: int = 0
    """How many messages were sent for it: a retry doesn't send them again."""
    is_copied: bool = False
    """Whether a copy of it was sent, so that nothing is left to do but to complete it."""


class Receipts:
    """The messages and sessions that this process has locked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[tuple[str, int], Held] = {}
        self._adding = threading.Lock()  # a dict that grows can't be gone through
        self._sessions: dict[str, HeldSession] = {}
        self._expire_at = 0.0

    @staticmethod
    def new_token() -> str:
        """Return the token of a claim."""
        return secrets.token_hex(8)

    def add(self, token: str, held: Held) -> None:
        """Keep a lock under the *token* of its claim."""
        with self._adding:
            self._held[token, held.received.sequence] = held
        self._expire()

    def find(self, delivery: Delivery) -> Held | None:
        """Return the lock of a delivery, which may be over."""
        held = self._held.get((str(delivery.token), delivery.sequence))
        return held if held is not None and held.queue == delivery.queue else None

    def forget(self, delivery: Delivery) -> None:
        """Forget a delivery that is settled, or whose lock is over."""
        held = self._held.pop((str(delivery.token), delivery.sequence), None)
        if held is not None and held.session is not None:
            held.session.delivered.pop(held.received.sequence, None)

    def add_session(self, token: str, session: HeldSession) -> None:
        """Keep a session under its *token*."""
        self._sessions[token] = session

    def find_session(self, lock: SessionLock) -> HeldSession | None:
        """Return a session that is still ours, as far as is known here."""
        session = self._sessions.get(str(lock.token))
        if session is None or session.queue != lock.queue or session.is_lost:
            return None
        return session

    def session_named(self, queue: str, name: str) -> HeldSession | None:
        """Return the session of this name, if this process has locked it."""
        for held in self._sessions.values():
            if held.queue == queue and held.name == name and not held.is_lost:
                return held
        return None

    def session_of(self, lock: SessionLock) -> HeldSession | None:
        """Return a session that was kept under this lock, also if it is over."""
        return self._sessions.get(str(lock.token))

    def forget_session(self, lock: SessionLock) -> None:
        """Forget a session, and its deliveries."""
        session = self._sessions.pop(str(lock.token), None)
        if session is not None:
            session.is_over = True
            for key in [key for key, held in self._all() if held.session is session]:
                self._held.pop(key, None)

    def forget_queue(self, queue: str) -> None:
        """Forget all locks of a queue that is deleted."""
        for key in [key for key, held in self._all() if held.queue == queue]:
            self._held.pop(key, None)
        for token in [token for token, one in self._sessions.items() if one.queue == queue]:
            self._sessions.pop(token).is_over = True

    def locked(self, queue: str) -> dict[int, Held]:
        """Return the messages of *queue* that this process has locked, by sequence."""
        now = self._clock.now()
        return {
            held.received.sequence: held
            for _, held in self._all()
            if held.queue == queue and (now < held.until if held.session is None else not held.session.is_lost)
        }

    def _all(self) -> list[tuple[tuple[str, int], Held]]:
        with self._adding:
            return list(self._held.items())

    def _expire(self) -> None:
        """Forget deliveries that were never settled, once a minute."""
        now = self._clock.now()
        if now < self._expire_at:
            return
        self._expire_at = now + EXPIRE_EVERY
        for key, held in self._all():
            # Long after its end by our account: a renewal without an answer may have prolonged it.
            if held.session is None and held.until + 600.0 < now:
                self._held.pop(key, None)
