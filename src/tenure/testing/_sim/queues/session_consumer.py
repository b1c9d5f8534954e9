"""A simulated consumer of sessions: the real SessionPump and the real Locks; all around them is simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, NoSession
from tenure._queue.effects import (
    Accept,
    Accepted,
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Ended,
    Hint,
    LocksInput,
    Pause,
    PumpInput,
    ReceiveIn,
    Release,
    Renew,
    Resume,
    Returned,
    Serve,
    Settle,
    Tick,
)
from tenure._queue.lock_group import LockGroup
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump import State
from tenure._queue.retry import verdict_on_failure
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Lapsed, Settlement, Verdict
from tenure.errors import LockLost, Unavailable
from tenure.testing._sim.client import Client, Pending
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.consumer_process import ConsumerProcess
from tenure.testing._sim.queues.handlers import Work, fails, length
from tenure.testing._sim.queues.protocols import SessionConsumerRun
from tenure.testing._sim.queues.requests import WriteState
from tenure.testing._sim.queues.trace import describe_effect
from tenure.testing._sim.world import SkewedClock


@dataclass(slots=True, eq=False)
class HeldSession:
    """A session at its consumer, as it looks from outside."""

    lock: SessionLock
    group: LockGroup
    trusted: float
    """Until when its lock may be believed, by the consumer's clock: as the answers so far allow."""
    cancelled_until: float | None = None
    """Until when its lock was believed when its handlers were told to stop; None before."""
    is_denied: bool = False
    """Whether the pump knows that a renewal said no."""
    is_left: bool = False
    """Whether a handler runs on in it that nobody waits for."""


class SessionConsumer(ConsumerProcess[Work]):
    """One process of one consumer of sessions."""

    def __init__(self, run: SessionConsumerRun, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, run.plan, number, name, clock)
        plan = run.plan.sessions
        self.run = run
        self.checkers = run.session_checkers
        self.lock_groups: dict[Token, LockGroup] = {}
        self.sessions: dict[Token, HeldSession] = {}
        self._writes = plan.writes if plan else 0.0
        self._settings = replace(self.plan.settings, concurrency=plan.concurrency if plan else 1)
        args = ("q", name, self._settings, self.world.rng, self.lock_groups)
        self.pump = run.parts.session_pump(*args, now=self.now())
        self.locks = run.parts.locks(*args, now=self.now())
        to_server = (run.server, self.plan.patience)
        self._pump_client = Client(self, *to_server, self._on_pump_answer)
        self._locks_client = Client(self, *to_server, self._on_locks_answer)
        self._handler_client = Client(self, *to_server, self._on_handler_answer)
        self._handlers_asked: dict[int, Work] = {}
        self._turning = False
        self._pump_alarm = Alarm(self, lambda: self.pump.wake_at, self._loop_soon, self._pump_rings)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self.do, self._locks_ring)
        self._pump_alarm.set()
        self._locks_alarm.set()

    def _overslept(self) -> bool:
        return self.locks.wake_at < self.now()

    # --- the pump's driver ---

    def hint(self) -> None:
        """Take in a hint of the broker."""
        self.feed(Hint())

    def pause_claims(self) -> None:
        """Take no further message and no further session."""
        self.feed(Pause())

    def resume_claims(self) -> None:
        """Go on."""
        self.feed(Resume())

    def feed(self, event: PumpInput) -> None:
        """Give *event* to the pump as soon as its loop is free."""
        self._loop_soon(self._decide, event)

    def _pump_rings(self) -> None:
        self._decide(Tick())

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self.world.after(0.0, self._loop_soon, self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._decide(Tick())

    def _decide(self, event: PumpInput) -> None:
        if self.ended:
            return
        if isinstance(event, Ended):
            self._is_told(event)
        try:
            effects = self.pump.handle(event, self.now())
        except Exception as error:  # whatever it is, it is a finding
            self.checkers.raised(self, event, error)
            self.die("broken")
            return
        self._log(event, effects)
        for effect in effects:
            match effect:
                case Serve():
                    self.world.after(0.0, self._loop_soon, self._serve)
                case Settle(ask, settlements):
                    self.checkers.passes(self, settlements)
                    self._pump_client.ask(ask, effect)
                case Release(ask, lock):
                    self.checkers.releases(self, lock)
                    self._pump_client.ask(ask, effect)
                case Accept(ask) | ReceiveIn(ask):
                    self._pump_client.ask(ask, effect)
                case CancelHandler(delivery, why):
                    if (work := self.works.get((delivery.token, delivery.sequence))) is not None:
                        self._cancel(work, why)
                case CancelAll(why):
                    for work in list(self.works.values()):
                        self._cancel(work, why)
                    self._turn_soon()
        if not self.running:
            return
        if self.pump.state is State.STOPPED:
            self.checkers.stopped(self)
            self._end()
        elif self.pump.state is State.LEFT:
            self.after(0.0, self._loop, self._end)
        else:
            self._pump_alarm.set()

    def _is_told(self, event: Ended) -> None:
        for held, why in event.locks:
            session = self.sessions.get(held.token)
            if isinstance(held, SessionLock) and why == "denied" and session is not None:
                session.is_denied = True

    def _on_pump_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        self._loop(self._pump_gets, ask, asked, answer)

    def _pump_gets(self, ask: int, asked: Pending, answer: Any) -> None:
        match answer:
            case SessionLock():
                self._decide(Accepted(ask, answer))
                self._holds(asked, answer)
            case NoSession(due_in=due_in):
                self._decide(Accepted(ask, None, due_in))
            case Claim(deliveries=deliveries, due_in=due_in):
                self._decide(Claimed(ask, deliveries, due_in))
            case NoAnswer() | [*_]:
                self._decide(Answered(ask, answer))
            case _:
                self._decide(Answered(ask, [answer]))

    def _holds(self, asked: Pending, lock: SessionLock) -> None:
        group = self.lock_groups.get(lock.token)
        if group is not None:
            trusted = asked.at + self._settings.timing.window
            self.sessions = {token: one for token, one in self.sessions.items() if token in self.lock_groups}
            self.sessions[lock.token] = session = HeldSession(lock, group, trusted)
            self.checkers.accepted(self, session)

    def _log(self, event: PumpInput | LocksInput, effects: Sequence[Any]) -> None:
        if self.world.traced and effects:
            self.world.log(self.name, f"{type(event).__name__} → {', '.join(map(describe_effect, effects))}")

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
        self._log(event, effects)
        for effect in effects:
            match effect:
                case Renew(ask) | Settle(ask):
                    self._locks_client.ask(ask, effect)
                case Ended(_, locks):
                    for held, why in locks:
                        self.checkers.told_to_stop(self, held, why)
                    self.world.after(0.0, self._loop_soon, self._decide, effect)
                case Returned():
                    self.world.after(0.0, self._loop_soon, self._decide, effect)
        if self.running:
            self.checkers.kept(self)
            self._locks_alarm.set()

    def _on_locks_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        if self.ended:  # so has the renewal thread
            return
        self._keep(Answered(ask, answer))
        if isinstance(asked.question, Renew):
            self.checkers.renewed(self, asked, () if isinstance(answer, NoAnswer) else answer)

    # --- handlers ---

    def _serve(self) -> None:
        """Let idle workers take what waits."""
        while self.running and len(self.works) < self._settings.concurrency and not self.blocked:
            delivery = self.pump.take(self.now())
            if delivery is None:
                break
            self._begin(delivery)
        self._turn_soon()

    def _begin(self, delivery: Delivery) -> None:
        work = Work(delivery)
        self.works[delivery.token, delivery.sequence] = work
        self.checkers.began(self, delivery)
        seconds = length(self.run, delivery)
        nature = work.nature
        if nature == "blocking" and not self.run.healed:
            self.block(seconds / self.clock.rate)
            self.run.hung(self, seconds / self.clock.rate)
        if nature == "deadly" and not self.run.healed and self.world.rng.random() < 0.7:
            self.after(seconds, self._killed, work)
        else:
            self.after(seconds, self._loop, self._nearly_done, work)

    def _killed(self, work: Work) -> None:
        if self.run.healed:
            self._loop(self._finish, work)
        elif not work.ended:
            self.die("killed by a message")
            self.run.restart_later(self.number)

    def _nearly_done(self, work: Work) -> None:
        """The handler may first complete its message by itself, or store a state: also if it was told to stop."""
        delivery = work.delivery
        session = self.sessions.get(delivery.token)
        ask = len(self._handlers_asked) + 1
        if work.ended or session is None:
            self._finish(work)
        elif work.nature == "settles":
            work.is_settling = True
            self.pump.asks(delivery)
            self._handlers_asked[ask] = work
            self._handler_client.ask(ask, Settle(ask, [Settlement(delivery, COMPLETE)]))
        elif self.world.rng.random() < self._writes:
            state = f"{delivery.sequence}/{delivery.delivery_count}".encode()
            self._handlers_asked[ask] = work
            self._handler_client.ask(ask, WriteState(ask, session.lock, state))
        else:
            self._finish(work)

    def _on_handler_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        self._loop(self._handler_gets, self._handlers_asked[ask], answer)

    def _handler_gets(self, work: Work, answer: Any) -> None:
        if work.ended:  # it was told to stop while it waited for this
            return
        error: Exception | None = None
        self.pump.heard(work.delivery)
        if isinstance(answer, NoAnswer):
            error = Unavailable(answer.why)
        elif work.is_settling:
            work.is_settling = False
            self.pump.settled(work.delivery)
        elif isinstance(answer, Lapsed):
            error = LockLost("the state was not stored")
        self._finish(work, error)

    def _cancel(self, work: Work, why: str) -> None:
        if work.ended:
            return
        first = work.why is None
        if first or why == "leave":
            work.why = why
        if why == "leave":
            work.is_cancelled = True
            if (session := self.sessions.get(work.delivery.token)) is not None:
                session.is_left = True
            self._finish(work)
        elif first:
            rng, timing = self.world.rng, self.plan.timing
            if rng.random() < self.plan.ignores:
                work.is_cancelled = rng.random() < 0.6  # the others end as if nothing had been said
                seconds = self.run.ignores_max * rng.random()
            else:
                work.is_cancelled = True
                seconds = 0.9 * timing.grace * rng.random()
            self.after(seconds, self._loop, self._finish, work)

    def _finish(self, work: Work, error: BaseException | None = None) -> None:
        """The handler of *work* has ended: pass the verdict that follows from how."""
        delivery = work.delivery
        if work.ended or not self.running:
            return
        work.ended = True
        self.pump.heard(delivery)
        self.works.pop((delivery.token, delivery.sequence), None)
        if work.is_cancelled and work.why == "leave":  # a thread that runs on: its lock is left to run out
            self.pump.forget(delivery)
        else:
            self.pump.done(delivery, self._judge(work, error))
        self._serve()

    def _judge(self, work: Work, error: BaseException | None) -> Verdict | None:
        if work.is_cancelled and work.why == "drain":
            return GIVE_BACK
        if work.is_cancelled:
            error = LockLost(f"cancelled: {work.why}")
        elif error is None:
            error = fails(self.run, work)
        if isinstance(error, KeyboardInterrupt):
            self.drain(0.0)
            self.run.restart_later(self.number)
        if error is None:
            return COMPLETE
        if work.why == "denied":
            return None
        if work.why == "stalled":
            return GIVE_BACK
        return verdict_on_failure(error, work.delivery.delivery_count, self.plan.retry, self.world.rng)

    # --- told to stop ---

    def drain(self, grace: float) -> None:
        """Stop as on SIGTERM: let handlers finish for *grace* seconds, then cancel them, and then leave."""
        self.draining = True
        self._loop_soon(self._drain, grace)

    def _drain(self, grace: float) -> None:
        until = math.inf if self.run.closing else None  # at the end, every drain is to come to its end
        self._decide(Drain(self.now() + grace, until))

    # --- what is looked at from outside ---

    @property
    def buffered(self) -> bool:
        """Whether messages wait in its buffer."""
        return self.pump.waiting > 0

    @property
    def stopped(self) -> bool:
        """Whether its pump has stopped, or it has ended with it or without."""
        return self.pump.state is State.STOPPED or self.ended

    def sequences(self) -> Iterable[int]:
        """Return the sequences of the messages that it handles."""
        return [work.delivery.sequence for work in self.works.values()]

    def check_slots(self) -> None:
        """See that every handler that has ended has left its slot: here, each has."""

    def check_rest(self) -> None:
        """See that no session is held when nothing waits in it."""
        self.checkers.rests(self)

    def check_stopped(self) -> None:
        """Say that it has not stopped, though it was told to."""
        self.checkers.not_stopped(self)
