"""A simulated candidate: the real machine and its own clock; driver, adapter and work are simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tenure._election.effects import (
    Acquire,
    Answered,
    CancelWork,
    Effect,
    Emit,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    StartWork,
    Tick,
    Trust,
    Withdraw,
    WorkEnded,
    WorkOverran,
)
from tenure._election.machine import Machine
from tenure._lease import Grant, NoAnswer
from tenure.errors import in_words
from tenure.events import Reason, TermEnding
from tenure.testing._misbehaving import odd_error
from tenure.testing._sim.client import Pending
from tenure.testing._sim.elections.protocols import NodeRun
from tenure.testing._sim.elections.stores import Question
from tenure.testing._sim.process import Alarm, Process
from tenure.testing._sim.world import SkewedClock


@dataclass(slots=True, eq=False)
class Work:
    """The work of one term, with its grant, and until when to trust it."""

    grant: Grant
    until: float
    stop_by: float = math.inf
    is_cancelled: bool = False
    overran: bool = False
    busy_until: float = 0.0  # in true time: an act that has begun is not over before


class Node(Process):
    """One process of one candidate. After a kill, its host gets another one, with a new identity."""

    def __init__(self, run: NodeRun, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run.world, number, name, clock)
        self.run = run
        self.checkers = run.checkers
        self.plan = run.plan
        self.stalled = False
        self.stalled_since = 0.0
        self.health = self.event_hook = ""
        """What the health callback and the event hook do beside answering, at present."""
        self.ill_since = math.inf
        self.work: Work | None = None
        self.seen: tuple[int, float] = (-1, 0.0)  # for a watched store: the version, and since when by its clock
        self.client = run.parts.client(self, run.server, self.plan.patience, self._on_answer)
        # What the checkers remember of this process.
        self.told_to_stop = False
        self.must_leave_queue = False
        self.last_ask = 0
        self.last_holder: str | None = None
        self.last_grant: Grant | None = None
        self.last_token: int | None = None
        self.holders: dict[str, bool] = {}  # every name it asked under, and whether a grant came
        self.finished: set[str] = set()
        self.gave_way_at = -math.inf
        self.denied: set[Grant] = set()
        self.ticks = 0
        self.ticks_since = -math.inf
        self.machine = self._machine()
        self._alarm = Alarm(self, lambda: self.machine.wake_at, self.do, lambda: self._handle(Tick()))
        self._alarm.set()

    def _machine(self) -> Machine:
        return self.run.machine_type(
            self.run.name,
            self.name,
            self.plan.timing,
            self.world.rng,
            hints=self.plan.hints,
            queued=self.plan.queued,
            now=self.now(),
        )

    # --- faults ---

    def _overslept(self) -> bool:
        return self.machine.wake_at < self.now()

    def _died(self) -> None:
        self.work = None
        self.checkers.left(self)

    def stall(self) -> None:
        """Let the work make no progress."""
        if not self.stalled:
            self.stalled, self.stalled_since = True, self.now()

    def unstall(self) -> None:
        """Let the work make progress again."""
        self.stalled = False

    def set_health(self, does: str) -> None:
        """Let the health callback do this from now on: raise, hang, or, if it is empty, find the work healthy."""
        self.health = does
        self.ill_since = self.now() if does == "raises" else math.inf

    # --- the driver ---

    def feed(self, event: Input) -> None:
        """Give *event* to the machine, now or when the pause is over."""
        self.do(self._handle, event)

    def _handle(self, event: Input) -> None:
        was, now = self.machine.state, self.now()
        try:
            effects = self.machine.handle(event, now)
        except Exception as error:  # each is a finding
            self.checkers.raised(self, event, error)
            self.die("broken")
            return
        if self.world.traced and (effects or not isinstance(event, Tick)):
            self.world.log(self.name, f"{event} → {', '.join(str(each) for each in effects if type(each) is not Emit)}")
        for effect in effects:
            self._perform(effect, event)
            if not self.alive:
                return
        self.checkers.handled(self, event, was, effects)
        work = self.work
        if work is not None and work.until != self.machine.trusted_until:
            self.checkers.disagrees(self, work)
        self._alarm.set()

    def _perform(self, effect: Effect, event: Input) -> None:
        match effect:
            case Acquire() | Inspect() | Renew() | Release():
                self._ask(effect)
            case Withdraw():
                self._withdraw(effect)
            case StartWork(grant, until):
                self._start(grant, until, event)
            case Trust(token, until) if self.work is not None and self.work.grant.token == token:
                self._trust(self.work, until, event)
            case CancelWork(token, reason) if self.work is not None and self.work.grant.token == token:
                self._cancel(self.work, reason)
            case WorkOverran() if self.work is not None:
                self.work.overran = True
                if self.plan.overrun_exits:
                    self.die("exits, as its work overran")
                    self.run.restart_later(self.number)
            case Emit(event_):
                if isinstance(event_, TermEnding) and self.work is not None:
                    self.work.stop_by = event_.deadline
                if self.event_hook:
                    self._call_event_hook()

    def _trust(self, work: Work, until: float, event: Input) -> None:
        grows = until > work.until
        work.until = until
        if grows:
            self.checkers.grew(self, work, event)
        self.checkers.trusts(self, work)

    # --- the adapter ---

    def _ask(self, question: Question) -> None:
        within = self.plan.timing.retry_every / 2
        if not isinstance(question, Renew) or self.stalled or self.health != "hangs":
            self._ask_if_well(question)
        elif (takes := 4 * within * self.world.rng.random()) < within:
            self.after(takes, self._ask_if_well, question)
        else:
            self.after(self._health_patience(within), self._withhold, question, "the health callback did not answer")

    def _ask_if_well(self, question: Question) -> None:
        """Ask, unless it is a renewal and the work is not healthy; a slow health callback judges by its end."""
        if isinstance(question, Renew) and self.stalled:
            self._withhold(question, "the work makes no progress")
        elif isinstance(question, Renew) and self.health == "raises":
            self._health_raised(question, odd_error(self.world.rng))
        else:
            self._send(question)

    def _send(self, question: Question) -> None:
        self.client.ask(question.request_id, question, self.run.store.message(self, question, self.now()))

    def _withdraw(self, question: Withdraw) -> None:
        """Withdraw when no request of the holder is under way: carried out later, that would leave a place behind."""
        if self._asks_as(question.holder):
            self.after(self.plan.timing.retry_every / 10, self._withdraw, question)
        else:
            self._send(question)

    def _asks_as(self, holder: str) -> bool:
        pending = (each.question for each in self.client.pending.values())
        return any(isinstance(question, Acquire) and question.holder == holder for question in pending)

    def _withhold(self, question: Question, why: str) -> None:
        self.client.withhold(question.request_id, question, RenewalWithheld(why))

    def _health_raised(self, question: Question, error: BaseException) -> None:
        self._withhold(question, f"the health callback raised {in_words(error)}")

    def _health_patience(self, within: float) -> float:
        """Return for how many seconds a health callback is waited for, if that was to be *within* so many."""
        return within

    def _on_answer(self, ask: int, asked: Pending, answer: Any) -> None:
        if not isinstance(answer, (NoAnswer, RenewalWithheld)):
            answer = self.run.store.reading(self, answer, self.now())
        self._handle(Answered(ask, answer))

    # --- hooks ---

    def _call_event_hook(self) -> None:
        match self.event_hook:
            case "blocks" if not self.stalled:  # the loop that runs the work
                self.stall()
                self.after(self.plan.timing.ttl * self.world.rng.random(), self.unstall)
            case "raises" if not self._reports_event_hook(error := odd_error(self.world.rng)):
                self.checkers.broken(self, error)
                self.die("broken")

    def _reports_event_hook(self, error: BaseException) -> bool:
        """Whether *error*, which the event hook has raised, is reported to the loop and nowhere else."""
        return True

    # --- the work ---

    def _start(self, grant: Grant, until: float, event: Input) -> None:
        work = Work(grant, until)
        self.checkers.began(self, work)
        self.work = work
        self.last_grant, self.last_token = grant, grant.token
        self.checkers.grew(self, work, event)
        timing, rng = self.plan.timing, self.world.rng
        self.after(0.3 * timing.retry_every * rng.random(), self._act, work)
        if rng.random() < self.plan.turnover and not self.run.healed:
            self.after(timing.ttl * rng.random(), self._finish, work, rng.random() < 0.8)

    def _act(self, work: Work) -> None:
        """Do what leaders do: something guarded by a look at the trust, and something that the resource guards."""
        if self.work is not work:
            return
        timing, rng = self.plan.timing, self.world.rng
        if not self.stalled:
            if self.now() < work.until:
                # The margin is there for what passes between the look and the act.
                delay = 0.9 * timing.margin * rng.random() / self.clock.rate
                work.busy_until = self.world.now + delay
                self.world.at(work.busy_until, self.checkers.acted, work.grant)
            network = self.run.network
            delay = network.far_delay() if not network.healed and rng.random() < 0.2 else network.usual_delay()
            self.world.after(delay, self.run.resource.write, work.grant)
        if not self.run.healed:
            self.after(timing.ttl * (0.1 + 0.4 * rng.random()), self._act, work)

    def _finish(self, work: Work, again: bool) -> None:
        """Let the work return or raise by itself."""
        if not self.run.healed:
            self._end(work, again)

    def raise_from_work(self) -> None:
        """Let the work, if there is any, raise an unusual exception."""
        if self.work is not None:
            rng = self.world.rng
            self._raised(self.work, KeyboardInterrupt() if rng.random() < 0.2 else odd_error(rng))

    def _raised(self, work: Work, error: BaseException) -> None:
        """The work has raised *error*: that ends the campaign."""
        self._end(work, False)

    def _cancel(self, work: Work, reason: Reason) -> None:
        self.checkers.cancelled(self, work, reason, slept=self._woke_late)
        if work.is_cancelled:
            return
        work.is_cancelled = True
        timing, rng = self.plan.timing, self.world.rng
        ignores = rng.random() < self.plan.ignores
        longest = self.run.ignores_max if ignores else 0.9 * timing.grace
        self.after(longest * rng.random(), self._end, work, True)

    def _end(self, work: Work, again: bool) -> None:
        if self.work is not work:
            return
        if work.busy_until > self.world.now:  # the work has not ended before its act has
            self.world.at(work.busy_until, self.do, self._end, work, again)
            return
        self.checkers.work_ended(self, work, slept=self._woke_late)
        self.work = None
        self.finished.add(work.grant.holder)
        self.checkers.left(self)
        self._handle(WorkEnded(work.grant.token, again))
        if not again:
            self.run.restart_later(self.number)
