"""A simulated consumer: a real pump, for messages or for sessions, and the real Locks; all around them is simulated.

The pump lives on the caller's loop, which handlers may block; the locks live on the renewal thread's, which nothing can
block. A pause stops both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    Emit,
    Hint,
    LocksEffect,
    LocksEnded,
    LocksInput,
    MessagesGivenBack,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    ReceiveSession,
    Release,
    Renew,
    Resume,
    Settle,
    Tick,
    WakeWorkers,
)
from tenure._queue.lock_group import LockGroup
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.stopping import State
from tenure.events import HandlerOverran
from tenure.testing._sim.client import Client, Pending
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.loop_process import LoopProcess
from tenure.testing._sim.queues.protocols import ConsumerChecks, ConsumerRun
from tenure.testing._sim.queues.threads import InterleavedRunning, InterleavedWaiting
from tenure.testing._sim.queues.trace import describe_effect
from tenure.testing._sim.queues.tracked import Key, TrackedDeliveries
from tenure.testing._sim.queues.work import Work
from tenure.testing._sim.queues.workers import Workers
from tenure.testing._sim.world import SkewedClock


@dataclass(frozen=True, slots=True)
class Kind:
    """What a consumer takes in: messages, or sessions."""

    pump: type[Pump]
    workers: type[Workers]
    settings: PumpSettings
    checkers: ConsumerChecks


class Consumer(LoopProcess):
    """One process of one consumer. After a kill, its host gets another one, with a new name.

    Args:
        run: The simulation.
        kind: What it takes in.
        number: The host.
        name: The consumer.
        clock: The host's.
    """

    def __init__(self, run: ConsumerRun, kind: Kind, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, number, name, clock)
        self.run = run
        self.plan = run.plan
        self.settings = kind.settings
        self.checkers = kind.checkers
        self.draining = False
        self.tracked = TrackedDeliveries()
        self.lock_groups: dict[Token, LockGroup] = {}
        self._turning = False
        self._deciding = self._keeping = False  # which threads are in the middle of a step
        args = ("q", name, self.settings, self.world.rng, self.lock_groups)
        self.pump = kind.pump(*args, now=self.now())
        self.locks = run.parts.locks(*args, now=self.now())
        to_server = (run.server, self.plan.patience)
        self._pump_client = Client(self, *to_server, self._on_pump_answer)
        self._locks_client = Client(self, *to_server, self._on_locks_answer)
        self._handler_client = Client(self, *to_server, self._on_handler_answer)
        self._handlers_asked: dict[int, Callable[[Any], object]] = {}
        self.workers = kind.workers(run, self)
        self._pump_alarm = Alarm(self, lambda: self.pump.wake_at, self.on_loop_soon, self._pump_rings)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self.do, self._locks_ring)
        self._pump_alarm.set()
        self._locks_alarm.set()

    def _overslept(self) -> bool:
        return self.locks.wake_at < self.now()

    def _died(self) -> None:
        super()._died()
        self.works.clear()

    # --- the pump's driver ---

    def hint(self) -> None:
        """Take in a hint of the broker, which may be false."""
        self.checkers.hinted(self)
        self.feed(Hint())

    def pause_claims(self) -> None:
        """Claim nothing, and give back what waits, until :meth:`resume_claims`."""
        self.feed(Pause())

    def resume_claims(self) -> None:
        """Claim again."""
        self.feed(Resume())

    def drain(self, grace: float) -> None:
        """Stop as on SIGTERM: let handlers finish for *grace* seconds, then cancel them, and then leave."""
        self.draining = True
        self.on_loop_soon(self._drain, grace)

    def _drain(self, grace: float) -> None:
        until = math.inf if self.run.closing else None  # at the end, every drain is to come to its end
        self._decide(Drain(self.now() + grace, until))

    def feed(self, event: PumpInput) -> None:
        """Give *event* to the pump as soon as its loop is free."""
        self.on_loop_soon(self._decide, event)

    def tick_soon(self) -> None:
        """Let the pump look at what was taken and done, once for many."""
        if not self._turning:
            self._turning = True
            self.world.after(0.0, self.on_loop_soon, self._tick_now)

    def _tick_now(self) -> None:
        self._turning = False
        self._decide(Tick())

    def _pump_rings(self) -> None:
        self.checkers.woke(self)
        self._decide(Tick())

    def take(self) -> Delivery | None:
        """Take the next message that waits."""
        self._deciding = True
        try:
            return self.pump.take(self.now())
        except Exception as error:  # each is a finding
            self._break(Tick(), error)
            return None
        finally:
            self._deciding = False

    def _decide(self, event: PumpInput) -> None:
        if self.ended:
            return
        was = self.pump.state
        self._deciding = True
        try:
            effects = self.pump.handle(event, self.now())
        except Exception as error:  # each is a finding
            self._break(event, error)
            return
        finally:
            self._deciding = False
        self._log(event, effects)
        self.checkers.decided(self, event, was, effects)
        for effect in effects:
            match effect:
                case WakeWorkers():
                    self.world.after(0.0, self.on_loop_soon, self.workers.serve)
                case (
                    Settle(request_id)
                    | Receive(request_id)
                    | Accept(request_id)
                    | ReceiveSession(request_id)
                    | Release(request_id)
                ):
                    self._pump_client.ask(request_id, effect)
                case CancelHandler(delivery, why):
                    self.workers.cancel(delivery, why)
                case CancelAll(why):
                    self.workers.cancel_all(why)
                    self.tick_soon()
                case Emit():
                    self.workers.call_event_hook()
        if not self.running:  # an event hook has broken it
            return
        if self.pump.state is State.STOPPED:
            self.checkers.stopped(self)
            self.end()
        elif self.pump.state is State.TIMED_OUT:
            self.after(0.0, self.on_loop, self.end)
        else:
            self._pump_alarm.set()

    def _on_pump_answer(self, request_id: int, asked: Pending, answer: Any) -> None:
        self.on_loop(self._pump_gets, request_id, asked, answer)

    def _pump_gets(self, request_id: int, asked: Pending, answer: Any) -> None:
        event: PumpInput
        match answer:
            case NoAnswer():
                event = Answered(request_id, answer)
            case SessionLock():
                event = Accepted(request_id, answer)
            case NoSession():
                event = Accepted(request_id, None, answer.due_in, answer.is_held_back)
            case Claim(deliveries=deliveries, due_in=due_in):
                self.tracked.add(deliveries)
                limits = (answer.is_limited, answer.is_held_back, answer.held_up_for)
                event = Claimed(request_id, deliveries, due_in, 0.0, *limits)
            case [*answers]:
                self.checkers.answered(self, asked.question.settlements, answers)
                event = Answered(request_id, answers)
            case _:
                event = Answered(request_id, [answer])
        self._decide(event)
        if isinstance(event, Claimed) and event.deliveries:
            token = event.deliveries[0].token
        elif isinstance(event, Accepted) and event.session is not None:
            token = event.session.token
        else:
            return
        self.checkers.took_in(self, asked, token)
        group = self.lock_groups.get(token)
        if group is not None and self.plan.interleaves and not isinstance(group.waiting, InterleavedWaiting):
            group.waiting = InterleavedWaiting(group.waiting, self._other_thread)
            if group.session is not None:  # its messages come one by one, so that few steps are taken in "waiting"
                group.running = InterleavedRunning(group.running, self._other_thread)

    # --- the renewal thread's driver ---

    def _locks_ring(self) -> None:
        if self.ended:  # so has the renewal thread
            return
        self.checkers.woke(self)
        self._keep(Tick())

    def _keep(self, event: LocksInput) -> None:
        self._keeping = True
        try:
            effects = self.locks.handle(event, self.now())
        except Exception as error:  # each is a finding
            self._break(event, error)
            return
        finally:
            self._keeping = False
        self._log(event, effects)
        for held, why in [lock for effect in effects if isinstance(effect, LocksEnded) for lock in effect.locks]:
            self.checkers.told_to_stop(self, held, why)
        for effect in effects:
            match effect:
                case Renew(request_id) | Settle(request_id):
                    if isinstance(effect, Settle):
                        self.checkers.passes(self, effect.settlements)
                    self._locks_client.ask(request_id, effect)
                case LocksEnded() | MessagesGivenBack():
                    self.world.after(0.0, self.on_loop_soon, self._decide, effect)
                case Emit(HandlerOverran() as overrun):
                    self.checkers.overran(self, overrun)
                    self.on_loop_soon(self.workers.call_event_hook)
        if self.running:
            self.checkers.kept(self)
            self._locks_alarm.set()

    def _on_locks_answer(self, request_id: int, asked: Pending, answer: Any) -> None:
        if self.ended:  # so has the renewal thread
            return
        question = asked.question
        is_answered = not isinstance(answer, NoAnswer)
        if isinstance(question, Renew):
            if is_answered:
                self.checkers.before_renewed(self, question.held, answer)
            self._keep(Answered(request_id, answer))
            self.checkers.renewed(self, asked, answer if is_answered else ())
        else:
            if is_answered:
                self.checkers.answered(self, question.settlements, answer)
            self._keep(Answered(request_id, answer))

    def _other_thread(self) -> None:
        """Between two steps of one thread, let the other one do what it has to do."""
        rng = self.world.rng
        if not self.running or rng.random() >= self.plan.interleaves:
            return
        if self._deciding and not self._keeping:
            self._keep(Tick())
        elif self._keeping and not self._deciding:
            self.workers.serve()

    def _break(self, event: PumpInput | LocksInput, error: Exception) -> None:
        self.checkers.raised(self, event, error)
        self.die("broken")

    def _log(self, event: PumpInput | LocksInput, effects: Sequence[PumpEffect | LocksEffect]) -> None:
        if self.world.traced and effects:
            self.world.log(self.name, f"{type(event).__name__} → {', '.join(map(describe_effect, effects))}")

    # --- requests of handlers ---

    def ask(self, question: Callable[[int], Any], on_answer: Callable[[Any], object]) -> None:
        """Ask the broker the *question* of a handler, given its number; *on_answer* gets the answer on the loop."""
        request_id = len(self._handlers_asked) + 1
        self._handlers_asked[request_id] = on_answer
        self._handler_client.ask(request_id, question(request_id))

    def _on_handler_answer(self, request_id: int, asked: Pending, answer: Any) -> None:
        self.on_loop(self._handlers_asked[request_id], answer)

    # --- seen from outside ---

    @property
    def works(self) -> dict[Key, Work]:
        """Its handlers that run."""
        return self.workers.works

    @property
    def buffered(self) -> bool:
        """Whether messages wait in its buffer."""
        return self.pump.waiting > 0

    @property
    def stopped(self) -> bool:
        """Whether its pump has stopped, or it has ended with it or without."""
        return self.pump.state is State.STOPPED or self.ended

    def sequences(self) -> Iterable[int]:
        """Return the sequences of the messages that it holds."""
        return [tracked.delivery.sequence for tracked in self.tracked]
