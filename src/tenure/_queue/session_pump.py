"""The pump of a consumer of sessions: up to ``concurrency`` of them at a time, the messages of each one by one.

House rules, besides those of :mod:`tenure._queue.pump`:

- A session is a lock group with a token of its own: one lock for all messages received in it, which the locks renew.
- The next message of a session is received when the one before is settled, and its handler has ended. A session in
  which none waits is released; so is every one at a pause or a drain, once it has no handler and no request.
- A session that is lost, or left because a handler runs on in it, is never released: its lock runs out by itself.
- A receive without an answer may have locked messages unknown to the consumer, and later ones would overtake them:
  their session is released, so that they go back.
- Accepting begins with one request. Each that finds a session doubles the number of requests at a time.

::

                 accepted          claimed            take             done            answered
    (broker) ─────────▶ receiving ─────────▶ waiting ─────▶ serving ─────▶ settling ─────────▶ receiving …
                           │
                           ▼ nothing waits, pause, drain
                       releasing ─────▶ (broker)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenure._jitter import Rng, sooner
from tenure._queue.effects import (
    WAKE_WORKERS,
    Accept,
    Accepted,
    Answers,
    CancelHandler,
    Claimed,
    Emit,
    Look,
    PumpEffect,
    PumpInput,
    ReceiveSession,
    Release,
    Report,
)
from tenure._queue.lock_group import HAS_VERDICT, LockGroup, LossReason, event_fields
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings, lock_trusted_until
from tenure._queue.stopping import RUNNING
from tenure._queue.verdicts import COMPLETE, Lapsed, Settlement, Verdict
from tenure.events import BrokerUnanswered, GivenBack, LockEnded


@dataclass(slots=True, eq=False)
class HeldSession:
    """A session that is locked to us."""

    group: LockGroup
    lock: SessionLock
    is_receiving: bool = False
    is_serving: bool = False
    """Whether a handler runs in it."""
    is_lost: bool = False
    """Its lock is over, or is left to run out."""
    must_release: bool = False
    """To be released, not received in again: its lock was nearly over, a handler was cancelled, or a receive got no
    answer."""
    settled_by_handler: set[int] = field(default_factory=set)
    """Messages that their handler has settled by itself, and that are watched until it ends."""
    undecided: set[int] = field(default_factory=set)
    """Messages reported as settled without an answer: the verdict may stand or not."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no message, no handler and no request."""
        return not (self.is_receiving or self.is_serving or self.group.waiting or self.group.running)


class SessionPump(Pump):
    """Decide for one consumer of sessions: which to accept, when to receive in them and to release them.

    See :class:`Pump` for the arguments.
    """

    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, groups: dict[Token, LockGroup], *, now: float
    ) -> None:
        # A session has one verdict at a time, which waits for no other session.
        super().__init__(name, holder, settings, rng, groups, now=now, settles_max=settings.concurrency)
        self._sessions: dict[Token, HeldSession] = {}
        self._lost: set[HeldSession] = set()  # those of them that are lost
        self._accepting: dict[int, float] = {}  # by request: when it was sent
        self._accepts_most = 1  # requests at a time
        self._receiving: dict[int, HeldSession] = {}  # by request
        self._ready: deque[HeldSession] = deque()  # to receive in next, or to release
        self._to_release: list[tuple[SessionLock, float]] = []  # and the end of its lock
        self._releasing: dict[int, tuple[SessionLock, float]] = {}
        self._release_at = now
        self._receive_misses = 0  # receives in a row that had no answer

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        at = super().wake_at
        return min(at, self._release_at) if self._to_release else at

    @property
    def unanswered(self) -> list[Settlement]:
        """The verdicts that may stand or not, except those that were reported so."""
        return [one for one in super().unanswered if not self._is_undecided(one.delivery)]

    def _is_undecided(self, delivery: Delivery) -> bool:
        session = self._sessions.get(delivery.token)
        return session is not None and delivery.sequence in session.undecided

    @property
    def releasable(self) -> Sequence[SessionLock]:
        """The sessions that are locked to us and in which no handler runs."""
        idle = [one.lock for one in self._sessions.values() if not (one.is_lost or one.is_serving)]
        return [*idle, *(lock for lock, _ in self._to_release), *(lock for lock, _ in self._releasing.values())]

    # --- for every message ---

    def take(self, now: float) -> Delivery | None:
        """Return the next message to be handled, or None if none waits. The lock of its session is sure for a while."""
        grace = self.settings.timing.grace
        while self._buffer:
            group = self._buffer.popleft()
            session = self._sessions.get(group.token)
            if session is None or session.is_lost or not group.waiting:
                continue
            if group.over or now >= group.trusted_until - grace:  # a handler would begin with no time left
                group.waiting.clear()
                session.must_release = True
                self._ready.append(session)
                continue
            delivery = group.waiting[0]
            group.running[delivery.sequence] = (delivery, now)  # first here, so that the locks don't overlook it
            group.waiting.popleft()
            session.is_serving = True
            self.busy += 1
            return delivery
        return None

    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        """Note that the handler of *delivery* has ended, as :meth:`Pump.done`; its session goes on."""
        passed = super().done(delivery, verdict)
        session = self._sessions.get(delivery.token)
        if session is not None:
            session.is_serving = False
            if not passed:
                if delivery.sequence in session.group.stopped:  # else a message of the locks follows
                    session.group.running.pop(delivery.sequence, None)
                self._advance_if_idle(session)
        return passed

    def let_expire(self, delivery: Delivery) -> None:
        """Note that the handler of *delivery* has ended, and that no verdict follows: its session is left."""
        session = self._sessions.get(delivery.token)
        if session is not None:
            self._lose(session)
            session.is_serving = False
            session.settled_by_handler.clear()
        super().let_expire(delivery)
        if session is not None:
            self._advance_if_idle(session)

    def _close(self, group: LockGroup, count: int = 1) -> None:
        if (session := self._sessions.get(group.token)) is not None:
            self._advance_if_idle(session)

    def _advance_if_idle(self, session: HeldSession) -> None:
        """If *session* is idle, receive in it or release it, at the next step."""
        if session.is_idle:
            self._ready.append(session)

    def settled(self, delivery: Delivery) -> bool:
        """Note that a message was settled, or lost, as :meth:`Pump.settled`. Its handler runs on, and is watched."""
        session = self._sessions.get(delivery.token)
        if session is None or not session.is_serving:
            return super().settled(delivery)
        if not session.group.is_with_handler(delivery.sequence) or delivery.sequence in session.settled_by_handler:
            return False
        session.settled_by_handler.add(delivery.sequence)
        return delivery.sequence not in session.group.stopped

    def pass_verdict(self, delivery: Delivery, verdict: Verdict) -> bool:
        """Pass *verdict*, as :meth:`Pump.pass_verdict`; False if the handler has settled the message by itself."""
        session = self._sessions.get(delivery.token)
        if session is not None and delivery.sequence in session.settled_by_handler:
            session.settled_by_handler.discard(delivery.sequence)
            session.group.running.pop(delivery.sequence, None)
            return False
        return super().pass_verdict(delivery, verdict)

    # --- all other events ---

    def handle(self, event: PumpInput, now: float) -> list[PumpEffect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        if isinstance(event, Accepted) and event.request_id in self._accepting:
            effects: list[PumpEffect] = []
            self._accepted(event, self._accepting.pop(event.request_id), now, effects)
            self._do_what_is_due(now, effects)
            return effects
        if isinstance(event, Claimed) and event.request_id in self._receiving:
            effects = []
            self._received(self._receiving.pop(event.request_id), event, now, effects)
            self._do_what_is_due(now, effects)
            return effects
        return super().handle(event, now)

    def _do_what_is_due(self, now: float, effects: list[PumpEffect]) -> None:
        while self._ready:
            self._advance(self._ready.popleft(), now, effects)
        if self._to_release and now >= self._release_at:
            for lock, until in self._to_release:
                self._requests += 1
                self._releasing[self._requests] = (lock, until)
                effects.append(Release(self._requests, lock))
            self._to_release.clear()
        super()._do_what_is_due(now, effects)

    # --- accepting ---

    def _room(self) -> int:
        """Return how many sessions to ask for now."""
        free = self.settings.concurrency - len(self._sessions)
        if self._lost:  # lost ones whose handlers have ended take up no worker
            free += sum(not session.is_serving for session in self._lost)
        if free <= 0:
            return 0
        return max(0, min(free, self._accepts_most) - len(self._accepting))

    def _claim(self, now: float, effects: list[PumpEffect]) -> None:
        looks_first = self._claim_times.asked(now) is Look.FIRST
        for _ in range(self._room()):
            self._requests += 1
            self._accepting[self._requests] = now
            effects.append(Accept(self._requests, looks_first))

    def _accepted(self, event: Accepted, asked_at: float, now: float, effects: list[PumpEffect]) -> None:
        self.misses = 0
        lock = event.session
        if lock is None:
            self._accepts_most = 1
            if not self._accepting:
                self._found_nothing(asked_at, event, effects)
            self._claim_times.answered(asked_at, event.due_in == 0, event.due_in, now)
            return
        self._claim_times.found()
        self._accepts_most = min(2 * self._accepts_most, self.settings.concurrency)
        self._claim_times.answered(asked_at, True, None, now)
        timing = self.settings.timing
        until, renew_at = lock_trusted_until(asked_at, timing), asked_at + sooner(timing.renew_every, self._rng)
        if self.state is not RUNNING or now >= renew_at:
            self._to_release.append((lock, until))
            return
        group = LockGroup(lock.token, 1, until, renew_at, session=lock)
        self._groups[lock.token] = group
        self._sessions[lock.token] = session = HeldSession(group, lock)
        self._ready.append(session)

    # --- in a session ---

    def _advance(self, session: HeldSession, now: float, effects: list[PumpEffect]) -> None:
        if not session.is_idle or session.lock.token not in self._sessions:
            return
        if session.is_lost:
            self._drop(session)
        # The notes of the locks on a delivery must not be taken for notes on the next delivery of the same message.
        elif self.state is RUNNING and not session.must_release and not session.group.ended:
            self._requests += 1
            session.is_receiving = True
            self._receiving[self._requests] = session
            effects.append(ReceiveSession(self._requests, session.lock))
        else:
            self._release(session)

    def _received(self, session: HeldSession, event: Claimed, now: float, effects: list[PumpEffect]) -> None:
        session.is_receiving = False
        self.received += len(event.deliveries)
        self.misses = self._receive_misses = 0
        self._claim_times.resume()
        if event.held_up_for is not None:  # what waits comes back then, as what was abandoned does
            self.abandoned(now + event.held_up_for)
        if session.is_lost:
            self._drop(session)
        elif not event.deliveries:
            if event.due_in == 0:  # the store has not got through yet
                self._ready.append(session)
            else:
                if event.is_held_back:
                    self._accepts_most = 1  # others have accepted sessions, too, of which few may be received in
                self._release(session)
        elif self.state is RUNNING:
            session.group.waiting.extend(event.deliveries)
            self._buffer.append(session.group)
            effects.append(WAKE_WORKERS)
        else:
            self._give_back(session, len(event.deliveries), now, effects)

    def _give_back(self, session: HeldSession, count: int, now: float, effects: list[PumpEffect]) -> None:
        """Release *session* with what was received in it, which no handler was called with."""
        effects.append(Emit(GivenBack(now, self.name, self._holder, count)))
        self._release(session)

    def _release(self, session: HeldSession) -> None:
        self._to_release.append((session.lock, session.group.trusted_until))
        self._drop(session)

    def _lose(self, session: HeldSession) -> None:
        session.is_lost = True
        self._lost.add(session)

    def _drop(self, session: HeldSession) -> None:
        self._lost.discard(session)
        del self._sessions[session.lock.token]
        self._groups.pop(session.lock.token, None)

    def _empty_buffer(self, now: float, effects: list[PumpEffect]) -> None:
        self._buffer.clear()
        for session in list(self._sessions.values()):
            if session.group.waiting and not session.is_lost:
                count = len(session.group.waiting)
                session.group.waiting.clear()
                self._give_back(session, count, now, effects)

    # --- answers ---

    def _answered(self, request_id: int, answers: Answers, now: float, effects: list[PumpEffect]) -> None:
        if request_id in self._receiving:  # the lock is over
            session = self._receiving.pop(request_id)
            session.is_receiving = False
            self._drop(session)
        elif request_id in self._releasing:
            del self._releasing[request_id]
            self.misses = 0
            self._claim_times.claim_at_once(now)  # no further hint comes for messages sent into it meanwhile
        else:
            asked = self._settling.asked(request_id)
            super()._answered(request_id, answers, now, effects)
            if self._lost:
                self._report_undecided(asked, effects)

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        again_at = now + self._retry_in(max(self.misses, self._receive_misses))
        what = None
        if request_id in self._accepting:
            what = "accept"
            del self._accepting[request_id]
            self._accepts_most = 1
            self._claim_times.unanswered(again_at)
        elif request_id in self._receiving:
            what = "receive"
            session = self._receiving.pop(request_id)
            session.is_receiving = False
            session.must_release = True  # messages may have been locked: they go back with the session
            self._ready.append(session)
            # Once released, it would be accepted again at once: an answer to an accept is no sign of one to a receive.
            self._receive_misses += 1
            self._claim_times.hold_off(again_at)
        elif request_id in self._releasing:
            what = "release"
            lock, until = self._releasing.pop(request_id)
            if now < until:
                self._to_release.append((lock, until))
                self._release_at = again_at
        if what is None:
            asked = self._settling.asked(request_id)
            super()._unanswered(request_id, why, now, effects)
            if self._lost:
                self._report_undecided(asked, effects)
        else:
            self.misses += 1
            effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, what, why)))

    def _lapsed(
        self, settlement: Settlement, answer: Lapsed, group: LockGroup | None, now: float, effects: list[PumpEffect]
    ) -> None:
        if not self._is_undecided(settlement.delivery):  # else that was reported
            super()._lapsed(settlement, answer, group, now, effects)

    # --- messages of the locks ---

    def _lock_ended(self, held: Delivery | SessionLock, why: LossReason, at: float, effects: list[PumpEffect]) -> None:
        session = self._sessions.get(held.token)
        if session is None:
            return
        group = session.group
        if isinstance(held, SessionLock):
            self._lose(session)
            group.waiting.clear()
            self._advance_if_idle(session)
            return
        entry = group.running.get(held.sequence)
        if entry is None or entry[0] is not held or entry[1] == HAS_VERDICT or held.sequence in group.stopped:
            return  # there is a verdict, or the message was received again
        group.stopped.add(held.sequence)
        session.must_release = True  # the notes on this delivery must not be taken for notes on the next one
        effects.append(Emit(LockEnded(at, self.name, self._holder, *event_fields(held), why)))
        if session.is_serving:
            effects.append(CancelHandler(held, why))
        else:  # its handler has just ended, and its result was not passed on
            del group.running[held.sequence]
            self._advance_if_idle(session)

    def _report_undecided(self, asked: Sequence[Settlement], effects: list[PumpEffect]) -> None:
        """Report the verdicts that were *asked* without an answer and whose session is lost: they may stand or not."""
        for settlement in asked:
            sequence = settlement.delivery.sequence
            session = self._sessions.get(settlement.delivery.token)
            if session is None or not session.is_lost or sequence in session.group.stopped:
                continue
            if settlement in self._settling:
                session.group.stopped.add(sequence)
                session.undecided.add(sequence)
                effects.append(Report(settlement, None))

    # --- stopping ---

    def _is_empty(self) -> bool:
        return not (self._groups or self._to_release or self._releasing)

    def _is_quiet(self) -> bool:
        return super()._is_quiet() and not (self._accepting or self._to_release or self._releasing)
