"""The locks of this process. Service Bus locks each message under a token of its own, most of them tied to a link.

A claim of tenure's has one token. So the locks are kept here under it: only the process that received a message can
renew and settle it. All of this belongs to the library's thread, but for ``add``: any thread may claim what has come
already.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from uuid import UUID

from tenure._backends.servicebus.codec import Incoming
from tenure._backends.servicebus.links import Arrived, ReceiveLink
from tenure._backends.servicebus.message_format import Received
from tenure._backends.servicebus.names import Path
from tenure._queue import receipts
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import Verdict
from tenure._runtime.clock import Clock

KEPT = 600.0
"""Seconds for which a lock is kept after its end by our account: a renewal without an answer may have prolonged it."""


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
class Held(receipts.Held):
    """A message under a lock."""

    queue: str
    path: Path
    token: UUID
    received: Received
    message: Incoming
    ends_at: float
    """The end of its lock by the local clock, for statistics: the service judges. Infinity in a session."""
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

    def is_over(self, now: float) -> bool:
        """Return whether its lock is surely over, as its session is: of others, the service judges."""
        return self.session is not None and self.session.is_lost


class Receipts(receipts.Receipts[Held]):
    """The messages and sessions that this process has locked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, KEPT)
        self._sessions: dict[str, HeldSession] = {}

    @staticmethod
    def new_token() -> str:
        """Return the token of a claim."""
        return secrets.token_hex(8)

    def forget(self, delivery: Delivery) -> Held | None:
        """Forget a delivery that is settled, or whose lock is over."""
        held = super().forget(delivery)
        if held is not None and held.session is not None:
            held.session.delivered.pop(held.received.sequence, None)
        return held

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
            self.forget_all(lambda held: held.session is session)

    def forget_queue(self, queue: str) -> None:
        """Forget all locks of a queue that is deleted."""
        self.forget_all(lambda held: held.queue == queue)
        for token in [token for token, one in self._sessions.items() if one.queue == queue]:
            self._sessions.pop(token).is_over = True

    def locked(self, queue: str) -> dict[int, Held]:
        """Return the messages of *queue* that this process has locked, by sequence."""
        now = self._clock.now()
        locked = (held for held in self.of(queue) if not held.is_over(now) and now < held.ends_at)
        return {held.received.sequence: held for held in locked}
