"""A simulated consumer of sessions: the real Locks keep its sessions; adapters, threads and handlers are simulated.

Each of its slots holds one session at a time: accept, receive, handle, settle, receive the next; and release the
session when nothing waits in it. All sessions of a consumer are kept by one :class:`tenure._queue.locks.Locks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, NoSession
from tenure._queue.effects import Answered, Ended, LocksInput, Renew, Settle, Tick
from tenure._queue.lock_group import LockGroup
from tenure._queue.message import COMPLETE, Delivery, Lapsed, SessionLock, Settlement, Token, Verdict
from tenure._queue.pump_settings import sure_until
from tenure._queue.retry import verdict_on_failure
from tenure.errors import LockLost, Unavailable
from tenure.testing._sim.client import Client, Pending
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.consumer_process import ConsumerProcess
from tenure.testing._sim.queues.handlers import Work, fails, length
from tenure.testing._sim.queues.protocols import SessionConsumerRun
from tenure.testing._sim.queues.requests import Accept, ReceiveSession, Release, SessionRequest, WriteState
from tenure.testing._sim.world import SkewedClock


@dataclass(slots=True, eq=False)
class HeldSession:
    """A session at its consumer, as it looks from outside."""

    held: SessionLock
    group: LockGroup
    trusted: float
    """Until when its lock may be believed, by the consumer's clock: as the answers so far allow."""
    cancelled_until: float | None = None
    """Until when its lock was believed when its handler was told to stop; None before."""
    is_lost: bool = False
    """Whether the consumer knows that the lock is over."""
    is_left: bool = False
    """Whether it is neither renewed nor released, as a handler runs on in it."""


@dataclass(slots=True, eq=False)
class Slot:
    """Works on one session at a time."""

    session: HeldSession | None = None
    work: Work | None = None
    is_asking: bool = False
    """Whether it waits for an answer of the broker, or to ask again."""
    looks: int = 0
    """How often it has looked for a session: a timer of an earlier look counts no more."""


Then = Callable[[Pending, Any], object]


class SessionConsumer(ConsumerProcess[Work]):
    """One process of one consumer of sessions."""

    def __init__(self, run: SessionConsumerRun, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, run.plan, number, name, clock)
        sessions = run.plan.sessions
        self._writes = sessions.writes if sessions else 0.0
        self.run = run
        self.checkers = run.session_checkers
        self.lock_groups: dict[Token, LockGroup] = {}
        self.slots = [Slot() for _ in range(sessions.concurrency if sessions else 1)]
        self._paused = False
        self._asked = 0
        self._then: dict[int, Then] = {}
        self.locks = run.parts.locks("q", name, self.plan.settings, self.world.rng, self.lock_groups, now=self.now())
        self._client = Client(self, run.server, self.plan.patience, self._on_answer)
        self._locks_client = Client(self, run.server, self.plan.patience, self._on_locks_answer)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self.do, self._locks_ring)
        self._locks_alarm.set()
        for slot in self.slots:
            self.world.after(0.0, self._loop_soon, self._look, slot)

    def _overslept(self) -> bool:
        return self.locks.wake_at < self.now()

    # --- questions ---

    def _ask(self, slot: Slot, request: Callable[[int], SessionRequest | Settle], then: Then) -> None:
        slot.is_asking = True
        self._asked += 1
        self._then[self._asked] = then
        self._client.ask(self._asked, request(self._asked))

    def _on_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        self._loop(self._then.pop(ask), asked, answer)

    def _pause(self, slot: Slot, seconds: float, then: Callable[[Slot], object]) -> None:
        slot.is_asking = True
        self.after(seconds, self._loop, then, slot)

    # --- a session is looked for ---

    @property
    def _may_go_on(self) -> bool:
        return not (self.draining or self._paused)

    def _look(self, slot: Slot) -> None:
        slot.is_asking = False
        slot.looks += 1
        if self.draining:
            self._end_if_idle()
        elif not self._paused:
            self._ask(slot, Accept, lambda asked, answer: self._accepted(slot, asked, answer))

    def _look_again(self, slot: Slot, looks: int) -> None:
        if slot.looks == looks and not slot.is_asking and slot.session is None:
            self._look(slot)

    def _accepted(self, slot: Slot, asked: Pending, answer: SessionLock | NoSession | NoAnswer) -> None:
        settings = self.plan.settings
        if isinstance(answer, NoAnswer):
            self._pause(slot, settings.timing.retry_every * self.world.rng.random(), self._look)
        elif isinstance(answer, NoSession):
            slot.is_asking = False
            self._end_if_idle()
            due_in = math.inf if answer.due_in is None else max(answer.due_in, settings.timing.retry_every / 4)
            self.after(min(settings.poll_every, due_in), self._loop, self._look_again, slot, slot.looks)
        else:
            until = self._believed_until(asked, self.now())
            group = LockGroup(answer.token, 1, until, asked.at + settings.timing.renew_every, session=answer)
            slot.session = HeldSession(answer, group, asked.at + settings.timing.window)
            self.lock_groups[answer.token] = group
            self.checkers.accepted(self, slot.session)
            self._keep(Tick())
            self._receive(slot)

    def _believed_until(self, asked: Pending, now: float) -> float:
        """Return until when a lock may be believed that was *asked* for, and given *now*."""
        return sure_until(asked.at, self.plan.timing)

    # --- a session is held ---

    def _receive(self, slot: Slot) -> None:
        session = slot.session
        if session is None or session.is_lost or session.is_left:
            self._drop(slot)
        elif not self._may_go_on:
            self._release(slot)
        else:
            self._ask(
                slot,
                lambda ask: ReceiveSession(ask, session.held, 1),
                lambda _, answer: self._received(slot, session, answer),
            )

    def _received(self, slot: Slot, session: HeldSession, answer: Claim | Lapsed | NoAnswer) -> None:
        slot.is_asking = False
        if session.is_lost or isinstance(answer, Lapsed) or self._is_over(session):
            self._drop(slot)
        elif isinstance(answer, NoAnswer):
            self._unanswered(slot)
        elif not answer.deliveries or self.draining:
            self._release(slot)
        else:
            self._begin(slot, session, answer.deliveries[0])

    def _is_over(self, session: HeldSession) -> bool:
        """Return whether the lock is over already, though the locks have not said so: this process did not run."""
        return self.now() >= session.group.sure_until - self.plan.timing.grace

    def _unanswered(self, slot: Slot) -> None:
        """Nobody knows what was handed out: with the session, it goes back."""
        self._release(slot)

    def _release(self, slot: Slot) -> None:
        session = slot.session
        if session is None:
            self._look(slot)
            return
        self._drop_lock(slot)
        self.checkers.releases(self, session, slot.work)
        self._ask(slot, lambda ask: Release(ask, session.held), lambda _, answer: self._released(slot, answer))

    def _released(self, slot: Slot, answer: object) -> None:
        if isinstance(answer, NoAnswer):
            self._pause(slot, self.plan.timing.retry_every * self.world.rng.random(), self._look)
        else:
            self._look(slot)

    def _drop(self, slot: Slot) -> None:
        """The session is not ours any more, or was left."""
        self._drop_lock(slot)
        self._look(slot)

    def _drop_lock(self, slot: Slot) -> None:
        if slot.session is not None:
            self.lock_groups.pop(slot.session.held.token, None)
            slot.session = None

    # --- handlers ---

    def _begin(self, slot: Slot, session: HeldSession, delivery: Delivery) -> None:
        work = slot.work = Work(delivery)
        self.works[delivery.token, delivery.sequence] = work
        self.checkers.began(self, session, delivery)
        seconds = length(self.run, delivery)
        nature = work.nature
        if nature == "blocking" and not self.run.healed:
            self.block(seconds / self.clock.rate)
            self.run.hung(self, seconds / self.clock.rate)
        if nature == "deadly" and not self.run.healed and self.world.rng.random() < 0.7:
            self.after(seconds, self._killed, slot, work)
        else:
            self.after(seconds, self._loop, self._write, slot, work)
        if self.plan.settings.max_hold < seconds:
            self.after(self.plan.settings.max_hold, self._loop, self._overdue, slot, work)

    def _killed(self, slot: Slot, work: Work) -> None:
        if self.run.healed:
            self._loop(self._finish, slot, work)
        elif not work.ended:
            self.die("killed by a message")
            self.run.restart_later(self.number)

    def _write(self, slot: Slot, work: Work) -> None:
        """The handler is nearly done: it may first complete its message by itself, or store a state."""
        delivery, session = work.delivery, slot.session
        if work.ended or session is None:
            return
        if work.nature == "settles":
            self._handler_asks(slot, work, lambda ask: Settle(ask, [Settlement(delivery, COMPLETE)]))
        elif self.world.rng.random() < self._writes:
            state = f"{delivery.sequence}/{delivery.delivery_count}".encode()
            self._handler_asks(slot, work, lambda ask: WriteState(ask, session.held, state))
        else:
            self._finish(slot, work)

    def _handler_asks(self, slot: Slot, work: Work, request: Callable[[int], SessionRequest | Settle]) -> None:
        """The handler asks the broker for something, also if it was told to stop, and waits for the answer."""
        self._ask(slot, request, lambda _, answer: self._handler_gets(slot, work, answer))

    def _handler_gets(self, slot: Slot, work: Work, answer: object) -> None:
        if work.ended:
            return
        error: Exception | None = None
        if isinstance(answer, NoAnswer):
            error = Unavailable(answer.why)
        elif isinstance(answer, Lapsed):
            error = LockLost("the state was not stored")
        self._finish(slot, work, error)

    def _overdue(self, slot: Slot, work: Work) -> None:
        if not work.ended and self.running:
            self._cancel(slot, work, "max_hold")
            self.after(self.plan.timing.grace, self._loop, self._leave, slot, work)

    def _leave(self, slot: Slot, work: Work) -> None:
        """A handler runs on although it was told to stop: its session runs out by itself."""
        if not work.ended and slot.session is not None:
            slot.session.is_left = True
            self.lock_groups.pop(slot.session.held.token, None)

    def _cancel(self, slot: Slot, work: Work, why: str) -> None:
        if work.ended or work.why is not None:
            return
        work.why = why
        rng, timing = self.world.rng, self.plan.timing
        if rng.random() < self.plan.ignores:
            work.is_cancelled = rng.random() < 0.6  # the others end as if nothing had been said
            seconds = self.run.ignores_max * rng.random()
        else:
            work.is_cancelled = True
            seconds = 0.9 * timing.grace * rng.random()
        self.after(seconds, self._loop, self._finish, slot, work)

    def _finish(self, slot: Slot, work: Work, error: BaseException | None = None) -> None:
        """The handler of *work* has ended: pass the verdict that follows from how."""
        if work.ended or not self.running:
            return
        work.ended = True
        slot.work, slot.is_asking = None, False
        self.works.pop((work.delivery.token, work.delivery.sequence), None)
        session = slot.session
        if session is None or session.is_lost:
            self._drop(slot)
            return
        if work.is_cancelled and work.why == "drain":
            self._release(slot)
            return
        if work.is_cancelled:
            error = LockLost(f"cancelled: {work.why}")
        elif error is None:
            error = fails(self.run, work)
        if work.why == "max_hold" and self.now() >= session.group.sure_until:
            self._drop(slot)  # it was left, and is nobody's to judge
            return
        if isinstance(error, KeyboardInterrupt):
            self.drain(0.0)
            self.run.restart_later(self.number)
        delivery = work.delivery
        verdict: Verdict = COMPLETE
        if error is not None:
            verdict = verdict_on_failure(error, delivery.delivery_count, self.plan.retry, self.world.rng)
        self._settle(slot, session, delivery, verdict)

    def _settle(self, slot: Slot, session: HeldSession, delivery: Delivery, verdict: Verdict) -> None:
        self.checkers.passes(self, session, delivery)
        self._ask(
            slot,
            lambda ask: Settle(ask, [Settlement(delivery, verdict)]),
            lambda _, answer: self._settled(slot, session, delivery, verdict, answer),
        )

    def _settled(self, slot: Slot, session: HeldSession, delivery: Delivery, verdict: Verdict, answer: object) -> None:
        if not isinstance(answer, NoAnswer):
            self._receive(slot)
        elif session.is_lost or session.is_left:
            self._drop(slot)
        else:
            pause = self.plan.timing.retry_every / 4 * (0.5 + self.world.rng.random())
            self._pause(slot, pause, lambda slot: self._settle_again(slot, session, delivery, verdict))

    def _settle_again(self, slot: Slot, session: HeldSession, delivery: Delivery, verdict: Verdict) -> None:
        if session.is_lost:
            self._drop(slot)
        else:
            self._settle(slot, session, delivery, verdict)

    # --- the renewal thread's driver ---

    def _locks_ring(self) -> None:
        self._keep(Tick())

    def _keep(self, event: LocksInput) -> None:
        try:
            effects = self.locks.handle(event, self.now())
        except Exception as error:  # whatever it is, it is a finding
            self.checkers.raised(self, event, error)
            self.die("broken")
            return
        for effect in effects:
            match effect:
                case Renew(ask):
                    self._locks_client.ask(ask, effect)
                case Ended(_, locks):
                    for held, why in locks:
                        self._ends(held, why)
        if self.running:
            self.checkers.kept(self)
            self._locks_alarm.set()

    def _ends(self, held: object, why: str) -> None:
        for slot in self.slots:
            if slot.session is not None and slot.session.held is held:
                self.checkers.told_to_stop(self, slot.session, why)
                self.world.after(0.0, self._loop_soon, self._lose, slot, slot.session, why)

    def _lose(self, slot: Slot, session: HeldSession, why: str) -> None:
        """The lock of a session is over: its handler is told to stop."""
        session.is_lost = True
        if slot.session is session and slot.work is not None:
            self._cancel(slot, slot.work, why)

    def _on_locks_answer(self, ask: int, asked: Pending, answer: Sequence[object] | NoAnswer) -> None:
        if self.ended:  # so has the renewal thread
            return
        self._keep(Answered(ask, answer))  # type: ignore[arg-type]
        self.checkers.renewed(self, asked, () if isinstance(answer, NoAnswer) else answer)

    # --- told to stop ---

    def hint(self) -> None:
        """Look for a session, where none is held."""
        for slot in self.slots:
            self._loop_soon(self._look_again, slot, slot.looks)

    def pause_claims(self) -> None:
        """Take no further message and no further session."""
        self._paused = True

    def resume_claims(self) -> None:
        """Go on."""
        self._paused = False
        self.hint()

    def drain(self, grace: float) -> None:
        """Take no further message, let handlers finish for *grace* seconds, then cancel them, and then leave."""
        self.draining = True
        self._loop_soon(self._drain, grace)

    def _drain(self, grace: float) -> None:
        patience = self.plan.timing.grace
        self.after(grace, self._loop, self._cut_short)
        self.after(grace + patience, self._loop, self._leave_behind)
        self.after(grace + 2 * patience, self._loop, self._give_up)
        self._end_if_idle()

    def _cut_short(self) -> None:
        for slot in self.slots:
            if slot.work is not None:
                self._cancel(slot, slot.work, "drain")

    def _leave_behind(self) -> None:
        """Wait no longer for handlers that run on in threads: their sessions run out by themselves."""
        for slot in self.slots:
            if slot.work is not None:
                self._leave(slot, slot.work)
                slot.work.ended, slot.work = True, None
                self._drop(slot)

    def _give_up(self) -> None:
        if not self.run.closing and self.running:
            self._end()

    def _end_if_idle(self) -> None:
        if self.draining and not any(slot.session or slot.work or slot.is_asking for slot in self.slots):
            self._end()

    # --- what is looked at from outside ---

    @property
    def buffered(self) -> bool:
        """It has no buffer."""
        return False

    @property
    def stopped(self) -> bool:
        """Whether it has ended."""
        return self.ended

    def sequences(self) -> Iterable[int]:
        """Return the sequences of the messages that it handles."""
        return [work.delivery.sequence for work in self.works.values()]

    def check_slots(self) -> None:
        """See that no slot holds a handler that has ended."""

    def check_rest(self) -> None:
        """See that no session is held when nothing waits in it."""
        self.checkers.rests(self)

    def check_stopped(self) -> None:
        """Say that it has not stopped, though it was told to."""
        self.checkers.not_stopped(self)
