"""A simulated consumer: the real Pump and the real Locks; driver, adapters, threads and handlers are simulated.

The pump lives on the caller's loop, which handlers may block; the locks live on the renewal thread's, which nothing can
block. A pause stops both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim
from tenure._queue.effects import (
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Ended,
    Hint,
    LocksEffect,
    LocksInput,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    Renew,
    Resume,
    Returned,
    Serve,
    Settle,
    Tick,
)
from tenure._queue.hooks import HOOK_MAX
from tenure._queue.lock_group import LockGroup
from tenure._queue.message import Delivery, Token
from tenure._queue.pump import State
from tenure._queue.retry import verdict_on_failure
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Settlement, Verdict
from tenure.errors import LockLost
from tenure.events import HandlerOverran
from tenure.testing._misbehaving import odd_error
from tenure.testing._sim.client import Client, Pending
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.consumer_process import ConsumerProcess
from tenure.testing._sim.queues.handlers import Work, fails, kept_for, length
from tenure.testing._sim.queues.plan import BLOCKS_MAX
from tenure.testing._sim.queues.protocols import ConsumerRun
from tenure.testing._sim.queues.threads import Interleaved
from tenure.testing._sim.queues.trace import describe_effect
from tenure.testing._sim.queues.tracked import Stage, TrackedDelivery
from tenure.testing._sim.world import SkewedClock


class Consumer(ConsumerProcess[Work]):
    """One process of one consumer. After a kill, its host gets another one, with a new name."""

    def __init__(self, run: ConsumerRun, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, run.plan, number, name, clock)
        self.run = run
        self.checkers = run.checkers
        self.tracked: dict[Token, dict[int, TrackedDelivery]] = {}
        self.lock_groups: dict[Token, LockGroup] = {}
        self._turning = False
        self._deciding = self._keeping = False  # which threads are in the middle of a step
        parts, settings = run.parts, self.plan.settings
        args = ("q", name, settings, self.world.rng, self.lock_groups)
        self.pump = parts.pump(*args, now=self.now())
        self.locks = parts.locks(*args, now=self.now())
        to_server = (run.server, self.plan.patience)
        self._pump_client = Client(self, *to_server, self._on_pump_answer)
        self._locks_client = Client(self, *to_server, self._on_locks_answer)
        self._handler_client = Client(self, *to_server, self._on_handler_answer)
        self._own_asked = 0
        self._pump_alarm = Alarm(self, lambda: self.pump.wake_at, self._loop_soon, self._pump_rings)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self.do, self._locks_ring)
        self._pump_alarm.set()
        self._locks_alarm.set()

    def _overslept(self) -> bool:
        return self.locks.wake_at < self.now()

    # --- the pump's driver ---

    def hint(self) -> None:
        """Take in a hint of the broker."""
        self.checkers.hinted(self)
        self.feed(Hint())

    def pause_claims(self) -> None:
        """Claim nothing, and give back what waits, until :meth:`resume_claims`."""
        self.feed(Pause())

    def resume_claims(self) -> None:
        """Claim again."""
        self.feed(Resume())

    def feed(self, event: PumpInput) -> None:
        """Give *event* to the pump as soon as its loop is free."""
        self._loop_soon(self._decide, event)

    def _pump_rings(self) -> None:
        self.checkers.woke(self)
        self._decide(Tick())

    def _decide(self, event: PumpInput) -> None:
        if self.ended:
            return
        was = self.pump.state
        self._deciding = True
        try:
            effects = self.pump.handle(event, self.now())
        except Exception as error:  # whatever it is, it is a finding
            self.checkers.raised(self, event, error)
            self.die("broken")
            return
        finally:
            self._deciding = False
        self._log(event, effects)
        self.checkers.decided(self, event, was, effects)
        for effect in effects:
            match effect:
                case Serve():
                    self.world.after(0.0, self._loop_soon, self._serve)
                case Settle(ask) | Receive(ask):
                    self._pump_client.ask(ask, effect)
                case CancelHandler(delivery, why):
                    self._cancel_handler(delivery, why)
                case CancelAll(why):
                    for work in list(self.works.values()):
                        self._cancel(work, why)
                    self._turn_soon()
                case Emit() if self.event_hook:
                    self._call_event_hook()
        if not self.running:  # an event hook has broken it
            return
        if self.pump.state is State.STOPPED:
            self.checkers.stopped(self)
            self._end()
        elif self.pump.state is State.LEFT:
            self.after(0.0, self._loop, self._end)
        else:
            self._pump_alarm.set()

    def _on_pump_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        self._loop(self._pump_gets, ask, asked, answer)

    def _pump_gets(self, ask: int, asked: Pending, answer: Any) -> None:
        if isinstance(answer, NoAnswer):
            self._decide(Answered(ask, answer))
        elif isinstance(asked.question, Receive):
            self._claims(ask, asked, answer)
        else:
            self.checkers.answered(self, asked.question.settlements, answer)
            self._decide(Answered(ask, answer))

    def _claims(self, ask: int, asked: Pending, claim: Claim) -> None:
        deliveries = claim.deliveries
        if not deliveries:
            self._decide(Claimed(ask, deliveries, claim.due_in))
            return
        token = deliveries[0].token
        self.tracked[token] = {delivery.sequence: TrackedDelivery(delivery) for delivery in deliveries}
        self._decide(Claimed(ask, deliveries, claim.due_in))
        self.checkers.claimed(self, asked, token)
        group = self.lock_groups.get(token)
        if group is not None and self.plan.interleaves:
            group.waiting = Interleaved(group.waiting, self._other_thread)

    def find(self, delivery: Delivery) -> TrackedDelivery | None:
        """Return how *delivery* stands here; None if it was settled, or never came."""
        return self.tracked.get(delivery.token, {}).get(delivery.sequence)

    def _turn_soon(self) -> None:
        if not self._turning:
            self._turning = True
            self.world.after(0.0, self._loop_soon, self._turn)

    def _turn(self) -> None:
        self._turning = False
        self._decide(Tick())

    # --- the renewal thread's driver ---

    def _locks_ring(self) -> None:
        self.checkers.woke(self)
        self._keep(Tick())

    def _keep(self, event: LocksInput) -> None:
        self._keeping = True
        try:
            effects = self.locks.handle(event, self.now())
        except Exception as error:  # whatever it is, it is a finding
            self.checkers.raised(self, event, error)
            self.die("broken")
            return
        finally:
            self._keeping = False
        self._log(event, effects)
        for effect in effects:
            match effect:
                case Renew(ask) | Settle(ask):
                    if isinstance(effect, Settle):
                        self.checkers.passes(self, effect.settlements)
                    self._locks_client.ask(ask, effect)
                case Ended(_, locks):
                    for held, why in locks:
                        self.checkers.told_to_stop(self, held, why)
                    self.world.after(0.0, self._loop_soon, self._decide, effect)
                case Returned():
                    self.world.after(0.0, self._loop_soon, self._decide, effect)
                case Emit(HandlerOverran(sequence=sequence)):
                    self.checkers.overran(self, sequence)
                    if self.event_hook:
                        self._loop_soon(self._call_event_hook)
        if self.running:
            self.checkers.kept(self)
            self._locks_alarm.set()

    def _on_locks_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        if self.ended:  # so has the renewal thread
            return
        question = asked.question
        is_answered = not isinstance(answer, NoAnswer)
        if isinstance(question, Renew):
            if is_answered:
                self.checkers.before_renewed(self, question.held, answer)
            self._keep(Answered(ask, answer))
            self.checkers.renewed(self, asked, answer if is_answered else ())
        else:
            if is_answered:
                self.checkers.answered(self, question.settlements, answer)
            self._keep(Answered(ask, answer))

    def _other_thread(self) -> None:
        """Between two steps of one thread, let the other one do what it has to do."""
        rng = self.world.rng
        if not self.running or rng.random() >= self.plan.interleaves:
            return
        if self._deciding and not self._keeping:
            self._keep(Tick())
        elif self._keeping and not self._deciding:
            self._serve()

    def _log(self, event: PumpInput | LocksInput, effects: Sequence[PumpEffect | LocksEffect]) -> None:
        if self.world.traced and effects:
            self.world.log(self.name, f"{type(event).__name__} → {', '.join(map(describe_effect, effects))}")

    # --- handlers ---

    def _serve(self) -> None:
        """Let idle workers take what waits."""
        while self.running and len(self.works) < self.plan.settings.concurrency:
            if self.world.now < self._blocked_until:
                break
            self._deciding = True
            delivery = self.pump.take(self.now())
            self._deciding = False
            if delivery is None:
                break
            self._begin(delivery)
        self._turn_soon()

    def _begin(self, delivery: Delivery) -> None:
        work = Work(delivery)
        self.checkers.began(self, delivery)
        self.works[delivery.token, delivery.sequence] = work
        seconds = length(self.run, delivery)
        nature = work.nature
        if nature == "blocking" and not self.run.healed:
            self.block(seconds / self.clock.rate)
            self.run.hung(self, seconds / self.clock.rate)
        if nature == "deadly" and not self.run.healed and self.world.rng.random() < 0.7:
            self.after(seconds, self._killed, work)
        elif nature == "settles":
            self.after(seconds, self._loop, self._settles_itself, work)
        elif seconds == 0.0 and nature == "fine":
            self._finish(work)
        else:
            self.after(seconds, self._loop, self._end_work, work)

    def _killed(self, work: Work) -> None:
        if self.run.healed:
            self._end_work(work)
        elif not work.ended:
            self.die("killed by a message")
            self.run.restart_later(self.number)

    def _settles_itself(self, work: Work) -> None:
        """The handler completes its message, and does not leave that to us."""
        tracked = self.find(work.delivery)
        if work.ended or tracked is None:
            return
        work.is_settling = True
        self._completes(tracked)

    def _completes(self, tracked: TrackedDelivery) -> None:
        tracked.is_settling = tracked.is_asking = True
        self.pump.asks(tracked.delivery)
        self._own_asked += 1
        self._handler_client.ask(self._own_asked, Settle(self._own_asked, [Settlement(tracked.delivery, COMPLETE)]))

    def _on_handler_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        self._loop(self._handler_gets, asked.question.settlements, answer)

    def _handler_gets(self, settlements: Sequence[Settlement], answer: Any) -> None:
        delivery = settlements[0].delivery
        work = self.works.get((delivery.token, delivery.sequence))
        if work is None or work.ended:
            self._kept_gets(settlements, answer)  # or it was told to stop while it waited for this
            return
        self._no_longer_asking(delivery)
        if not isinstance(answer, NoAnswer):
            work.is_settling = False
            self.checkers.answered(self, settlements, answer)
            self.pump.settled(delivery)
            self._turn_soon()
        elif self.world.rng.random() < 0.5:
            work.is_settling = False  # it takes no answer for a yes
        self.after(length(self.run, delivery), self._loop, self._end_work, work)

    def _kept_gets(self, settlements: Sequence[Settlement], answer: Any) -> None:
        delivery = settlements[0].delivery
        tracked = self.find(delivery)
        if tracked is None or tracked.stage is not Stage.KEPT:
            return
        self._no_longer_asking(delivery)
        if isinstance(answer, NoAnswer):
            self.after(self.plan.timing.retry_every, self._loop, self._settles_kept, delivery)
            return
        self.checkers.answered(self, settlements, answer)
        self.pump.settled(delivery)
        self._turn_soon()

    def _no_longer_asking(self, delivery: Delivery) -> None:
        """The handler waits no longer for what the broker says."""
        self.pump.heard(delivery)
        if (tracked := self.find(delivery)) is not None:
            tracked.is_asking = False

    def _end_work(self, work: Work) -> None:
        if not work.ended and self.running:
            self._finish(work)
            self._serve()

    def _finish(self, work: Work) -> None:
        """The handler of *work* has ended: let its error hook know, then say what becomes of its message."""
        work.ended = True
        self._no_longer_asking(work.delivery)
        work.error = self._failure(work)
        if isinstance(work.error, KeyboardInterrupt):
            self._interrupted()
        if work.error is None or not self.error_hook or self._complain(work):
            self._conclude(work)

    def _conclude(self, work: Work) -> None:
        """Nothing of *work* runs any more: pass the verdict, and free its slot."""
        delivery = work.delivery
        try:
            verdict = self._judge(work)
        except (Exception, SystemExit) as error:
            self.misbehaved(error)
            return
        del self.works[delivery.token, delivery.sequence]
        is_kept = verdict is COMPLETE and work.nature == "keeps"
        if is_kept:
            verdict = None
            self.after(kept_for(self.run), self._loop, self._settles_kept, delivery)
        self.checkers.ends(self, delivery, verdict, is_kept=is_kept)
        self.pump.done(delivery, verdict)
        if self.event_hook and isinstance(verdict, Abandon):
            self._call_event_hook()

    def _settles_kept(self, delivery: Delivery) -> None:
        """Complete a kept message, again until there is an answer."""
        tracked = self.find(delivery)
        if tracked is not None and tracked.stage is Stage.KEPT:
            self._completes(tracked)

    def _failure(self, work: Work) -> BaseException | None:
        """Return how the handler of *work* has failed, if its error hook is to be called."""
        if not work.is_cancelled:
            return fails(self.run, work)
        return None if work.why in ("drain", "leave") else LockLost(f"cancelled: {work.why}")

    def _judge(self, work: Work) -> Verdict | None:
        if work.is_cancelled and work.why == "drain":
            return GIVE_BACK
        if work.is_cancelled and work.why == "leave":  # a thread that runs on: its lock is left to run out
            self.pump.settled(work.delivery)
            return None
        if work.error is None:
            return COMPLETE
        if work.why == "denied":
            return None
        if work.why == "stalled":
            return GIVE_BACK
        return self._verdict(work.error, work.delivery)

    def _verdict(self, error: BaseException, delivery: Delivery) -> Verdict:
        return verdict_on_failure(error, delivery.delivery_count, self.plan.retry, self.world.rng)

    # --- hooks ---

    def _complain(self, work: Work) -> bool:
        """Call the error hook; False if it goes on, and *work* is concluded when it has ended."""
        match self.error_hook:
            case "raises" if not self._reports_error_hook(error := odd_error(self.world.rng)):
                self.misbehaved(error)
                return False
            case "interrupts":
                self._interrupted()
            case "blocks":
                self.block(self._blocks_for())
            case "lasts":
                self.after(self._hook_patience(), self._loop, self._hook_ended, work)
                return False
        return True

    def _hook_ended(self, work: Work) -> None:
        if self.running:
            self._conclude(work)
            self._serve()

    def _hook_patience(self) -> float:
        """Return for how many seconds a hook is waited for that never ends."""
        return HOOK_MAX

    def _reports_error_hook(self, error: BaseException) -> bool:
        """Whether *error*, which the error hook has raised, is reported to the loop and nowhere else."""
        return True

    def _reports_event_hook(self, error: BaseException) -> bool:
        """Whether *error*, which the event hook has raised, is reported to the loop and nowhere else."""
        return True

    def _call_event_hook(self) -> None:
        match self.event_hook:
            case "blocks":
                self.block(self._blocks_for())
            case "raises" if not self._reports_event_hook(error := odd_error(self.world.rng)):
                self.misbehaved(error)

    def _blocks_for(self) -> float:
        return BLOCKS_MAX / 4 * self.plan.timing.ttl * self.world.rng.random()

    def _interrupted(self) -> None:
        """Ctrl-C has come while code of the user's ran: end gracefully."""
        self._end_with_interrupt()
        self.checkers.interrupted(self)

    def _end_with_interrupt(self) -> None:
        self.drain(0.0)
        self.run.restart_later(self.number)

    def misbehaved(self, error: BaseException) -> None:
        """An object of the user's has broken this consumer."""
        self.checkers.broken(self, error)
        self.die("broken")

    # --- told to stop ---

    def _cancel_handler(self, delivery: Delivery, why: str) -> None:
        work = self.works.get((delivery.token, delivery.sequence))
        if work is not None:
            self._cancel(work, why)

    def _cancel(self, work: Work, why: str) -> None:
        if work.ended:  # only its error hook goes on, and is not cancelled
            return
        first = work.why is None
        if first or why == "leave":
            work.why = why
        if why == "leave":
            work.is_cancelled = True
            self._finish(work)
        elif first:
            self._tell(work)

    def _tell(self, work: Work) -> None:
        rng, timing = self.world.rng, self.plan.timing
        if rng.random() < self.plan.ignores:
            work.is_cancelled = rng.random() < 0.6  # the others end as if nothing had been said
            seconds = self.run.ignores_max * rng.random()
        else:
            work.is_cancelled = True
            seconds = 0.9 * timing.grace * rng.random()
        self.after(seconds, self._loop, self._end_work, work)

    # --- beginning and end ---

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
        """Return the sequences of the messages that it holds."""
        return [sequence for held in self.tracked.values() for sequence in held]

    def check_slots(self) -> None:
        """See that every handler that has ended has left its slot."""
        self.checkers.has_slots(self)

    def check_rest(self) -> None:
        """See that nothing is held: all is drained and answered."""
        self.checkers.rests(self)

    def check_stopped(self) -> None:
        """Say that it has not stopped, though it was told to."""
        self.checkers.not_stopped(self)
