"""A fleet that runs one schedule, simulated from a seed: processes that die, hang, and lose requests and answers.

The machines are the real ones; the store is a few lines, with the same promise as a broker. Time is virtual.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tenure._schedule.machine import Advance, Look, ScheduleMachine, Wait
from tenure._schedule.plan import Plan, Record
from tenure._schedule.schedules import resumed
from tenure._schedule.slots import slots_of

BEGIN = 1.7e9
"""The store's clock at the begin, in Unix seconds."""

LATE = 40.0
"""Seconds within which a slot is sent once processes run and the store answers."""


class Store:
    """Keeps the record of the schedule, and the slots that were sent, in order."""

    def __init__(self) -> None:
        self.record: str | None = None
        self.sent: list[tuple[float, float]] = []
        """Each slot, with the true time at which it was sent."""
        self.plans_written = 0
        self.ahead = 0.0  # of the true time, in seconds

    def wall(self, now: float) -> float:
        return BEGIN + now + self.ahead

    def look(self, now: float) -> tuple[str | None, float]:
        return self.record, self.wall(now)

    def advance(self, asked: Advance, now: float) -> tuple[bool, str | None, float]:
        wall = self.wall(now)
        if self.record != asked.expected or wall < asked.not_before:
            return False, self.record, wall
        if self.record is None or Record.decoded(self.record, "").plan != Record.decoded(asked.record, "").plan:
            self.plans_written += 1
        self.record = asked.record
        self.sent += [(slot, now) for slot in asked.slots]
        return True, self.record, wall


@dataclass(slots=True)
class Process:
    """One process: its machine, its clock, and whether it lives."""

    number: int
    plan: Plan
    machine: ScheduleMachine
    clock: float
    """What is added to the true time."""
    is_alive: bool = True
    paused_until: float = 0.0
    epoch: int = 0
    """Of its newest request or alarm: older ones are nothing to it any more."""


@dataclass(slots=True)
class Draw:
    """What a seed draws."""

    plans: list[Plan]
    processes: int
    length: float
    loss: float
    """The share of requests that are lost, and of answers."""
    kills: int
    pauses: int
    outages: int
    steps: int
    """How often the store's clock is set."""
    mixed: bool
    """Whether only some of the processes get the second plan."""


@dataclass(slots=True)
class Fleet:
    """One run.

    Args:
        seed: Decides everything.
        make_store, make_machine: Others have planted bugs.
        one_plan: Whether all processes have the same plan.
        clock_steps: Whether the store's clock is set now and then.
        is_stopped: Whether somebody pauses the schedule for a while, once all is well.
    """

    seed: int
    make_store: Callable[[], Store] = Store
    make_machine: Callable[[str, Plan, random.Random], ScheduleMachine] = ScheduleMachine
    one_plan: bool = True
    clock_steps: bool = False
    is_stopped: bool = False
    store: Store = field(init=False)
    now: float = field(init=False, default=0.0)
    calls: int = field(init=False, default=0)
    findings: list[str] = field(init=False, default_factory=list)
    _rng: random.Random = field(init=False)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(init=False, default_factory=list)
    _count: itertools.count[int] = field(init=False, default_factory=itertools.count)
    _processes: list[Process] = field(init=False, default_factory=list)
    _is_away: bool = field(init=False, default=False)
    _is_deployed: bool = field(init=False, default=False)
    drawn: Draw = field(init=False)
    stop: tuple[float, float] = field(init=False, default=(math.inf, -math.inf))
    """From when until when the schedule is paused, by the store's clock."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.store = self.make_store()
        self.drawn = self._draw()

    def _draw(self) -> Draw:
        rng = self._rng
        every: list[str | float] = [10.0, 7.5, 60.0, 300.0, "* * * * *", "*/5 * * * * *", "*/10 * * * *"]
        missed = rng.choice(["skip", "once", "all"])
        chosen = [rng.choice(every)] if self.one_plan else rng.sample(every, 2)
        plans = [Plan(one, "UTC", missed, 60.0) for one in chosen]  # type: ignore[arg-type]
        length = rng.choice([600.0, 2_000.0])
        return Draw(
            plans,
            rng.randint(1, 5),
            length,
            rng.choice([0.0, 0.05, 0.3]),
            rng.randint(0, 12),
            rng.randint(0, 8),
            rng.randint(0, 3),
            rng.randint(1, 3) if self.clock_steps else 0,
            not self.one_plan and rng.random() < 0.5,
        )

    def run(self) -> list[str]:
        """Run it; return what is wrong."""
        drawn, rng = self.drawn, self._rng
        for _ in range(drawn.processes):
            self._start(drawn.plans[0])
        for _ in range(drawn.kills):
            self._at(rng.uniform(0, drawn.length), self._kill_one)
        for _ in range(drawn.pauses):
            self._at(rng.uniform(0, drawn.length), self._pause_one)
        for _ in range(drawn.outages):
            begin = rng.uniform(0, drawn.length * 0.9)
            self._at(begin, self._go_away)
            self._at(begin + rng.choice([1.0, 30.0, 200.0]), self._come_back)
        for _ in range(drawn.steps):
            self._at(rng.uniform(0, drawn.length), self._set_clock)
        if len(drawn.plans) > 1:
            self._at(drawn.length / 2, self._deploy)
        self._at(drawn.length, self._heal)
        if self.is_stopped:
            begin = drawn.length + LATE + rng.uniform(0.0, 100.0)
            self._at(begin, self._pause)
            self._at(begin + rng.uniform(0.0, 400.0), self._resume)
        end = drawn.length + 700.0
        while self._queue and self._queue[0][0] <= end:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            self.calls += 1
            if self.calls > 200_000:
                self.findings.append("the fleet asks without end")
                break
        self.now = end
        self._check(end)
        return self.findings

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._count), act))

    def _soon(self, process: Process, time: float, act: Callable[[], None]) -> None:
        """Act at *time*, unless the process does something else before."""
        process.epoch += 1
        epoch = process.epoch
        self._at(time, lambda: act() if process.epoch == epoch else None)

    # --- processes ---

    def _start(self, plan: Plan) -> None:
        machine = self.make_machine("tidy", plan, random.Random(self._rng.random()))
        process = Process(len(self._processes), plan, machine, self._rng.uniform(0, 1e6))
        self._processes.append(process)
        self._turn(process)

    def _turn(self, process: Process) -> None:
        """Let a process do what its machine says."""
        if not process.is_alive:
            return
        if self.now < process.paused_until:
            self._soon(process, process.paused_until, lambda: self._turn(process))
            return
        local = self.now + process.clock
        step = process.machine.next(local)
        if isinstance(step, Wait):
            if step.until <= local:
                self.findings.append(f"process {process.number} waits until a time that is over")
            self._soon(process, max(step.until - process.clock, self.now + 1e-6), lambda: self._turn(process))
            return
        self._request(process, step, local)

    def _request(self, process: Process, step: Look | Advance, asked_at: float) -> None:
        rng, drawn = self._rng, self.drawn
        process.epoch += 1
        epoch = process.epoch
        there = self.now + rng.expovariate(1 / 0.02)
        is_healed = self.now >= drawn.length

        def arrive() -> None:
            if self._is_away or (not is_healed and rng.random() < drawn.loss):
                return
            answer: tuple[bool, str | None, float]
            if isinstance(step, Advance):
                answer = self.store.advance(step, self.now)
            else:
                answer = (False, *self.store.look(self.now))
            if not is_healed and rng.random() < drawn.loss:
                return
            self._at(self.now + rng.expovariate(1 / 0.02), lambda: receive(answer))

        def receive(answer: tuple[bool, str | None, float]) -> None:
            if not process.is_alive or process.epoch != epoch:
                return
            if self.now < process.paused_until:
                self._at(process.paused_until, lambda: receive(answer))
                return
            process.epoch += 1
            local = self.now + process.clock
            if isinstance(step, Advance):
                process.machine.advanced(*answer, asked_at, local)
            else:
                process.machine.looked(*answer[1:], asked_at, local)
            self._turn(process)

        def give_up() -> None:
            if process.is_alive and process.epoch == epoch:
                if self.now < process.paused_until:
                    self._at(process.paused_until, give_up)
                    return
                process.epoch += 1
                process.machine.unanswered(self.now + process.clock)
                self._turn(process)

        # a request may hang on the way, and arrive long after it was given up
        hangs = not is_healed and rng.random() < 0.02
        self._at(there + rng.uniform(0, 60) if hangs else there, arrive)
        self._at(self.now + 5.0, give_up)

    # --- what goes wrong ---

    def _kill_one(self) -> None:
        living = [one for one in self._processes if one.is_alive]
        if living:
            self._rng.choice(living).is_alive = False
            self._at(self.now + self._rng.choice([0.0, 1.0, 90.0]), lambda: self._start(self._newest_plan()))

    def _newest_plan(self) -> Plan:
        return self.drawn.plans[-1] if self._is_deployed else self.drawn.plans[0]

    def _pause_one(self) -> None:
        living = [one for one in self._processes if one.is_alive]
        if living:
            process = self._rng.choice(living)
            until = min(self.now + self._rng.choice([0.5, 20.0, 300.0]), self.drawn.length)
            process.paused_until = max(process.paused_until, until)

    def _go_away(self) -> None:
        self._is_away = True

    def _come_back(self) -> None:
        self._is_away = False

    def _set_clock(self) -> None:
        self.store.ahead += self._rng.uniform(-90, 90)

    def _deploy(self) -> None:
        """Replace the processes, or every other one, by ones with the second plan, one after the other."""
        self._is_deployed = True
        living = [one for one in self._processes if one.is_alive]
        for place, process in enumerate(living[:: 2 if self.drawn.mixed else 1]):

            def renew(old: Process = process) -> None:
                old.is_alive = False
                self._start(self.drawn.plans[-1])

            self._at(self.now + place * 3.0, renew)

    def _heal(self) -> None:
        self._is_away = False
        if not any(one.is_alive for one in self._processes):
            self._start(self._newest_plan())

    def _pause(self) -> None:
        assert self.store.record is not None
        record = Record.decoded(self.store.record, "tidy")
        self.store.record = replace(record, paused=True).encoded()
        self.stop = self.store.wall(self.now), math.inf

    def _resume(self) -> None:
        assert self.store.record is not None
        end = self.store.wall(self.now)
        self.store.record = resumed(Record.decoded(self.store.record, "tidy"), end).encoded()
        self.stop = self.stop[0], end

    # --- what must hold ---

    def _check(self, end: float) -> None:
        sent = [slot for slot, _ in self.store.sent]
        if len(set(sent)) != len(sent):
            twice = sorted({slot for slot in sent if sent.count(slot) > 1})
            self.findings.append(f"slots were sent twice: {twice}")
        if sent != sorted(sent):
            self.findings.append("slots were not sent in order")
        begin, end_of_stop = self.stop
        if stopped := [slot for slot, at in self.store.sent if begin < BEGIN + at and slot <= end_of_stop]:
            self.findings.append(f"slots were sent although the schedule was paused: {stopped[:5]}")
        for slot, at in self.store.sent:
            if not self.clock_steps and slot > BEGIN + at:
                self.findings.append(f"the slot {slot} was sent {slot - BEGIN - at:g} s too early")
        if self.store.record is None:
            self.findings.append("nothing is kept")
            return
        record = Record.decoded(self.store.record, "tidy")
        if self.store.plans_written > len(self._processes):
            self.findings.append(f"the plan was written {self.store.plans_written} times")
        if record.plan != self._newest_plan() and not self.drawn.mixed:
            self.findings.append(f"the plan that is kept is {record.plan}, not the newest")
        if not self.clock_steps and not (len(self.drawn.plans) > 1):
            self._check_missed(record.plan, sent)
        if not self.clock_steps:
            self._check_healthy(record.plan, sent, end)

    def _check_missed(self, plan: Plan, sent: list[float]) -> None:
        """With ``all``, no slot between the first and the last is missing, up to the most that are caught up with."""
        if plan.missed != "all" or not sent:
            return
        due = list(itertools.takewhile(lambda slot: slot <= sent[-1], slots_of(plan).after(sent[0])))
        missing = sorted(slot for slot in set(due) - set(sent) if not self._is_stopped_at(slot))
        if missing and due[1] - due[0] > 6.0:  # else there may be more than are caught up with
            self.findings.append(f"slots are missing: {missing[:5]}")

    def _check_healthy(self, plan: Plan, sent: list[float], end: float) -> None:
        """Once all is well, every slot is sent, and soon."""
        begin = BEGIN + self.drawn.length + LATE
        due = list(itertools.takewhile(lambda slot: slot <= BEGIN + end - 1.0, slots_of(plan).after(begin)))
        due = [slot for slot in due if not self._is_stopped_at(slot)]
        if set(due) - set(sent):
            self.findings.append(f"slots were not sent although all was well: {sorted(set(due) - set(sent))[:5]}")
        late = {slot: at for slot, at in self.store.sent if slot in set(due) and at + BEGIN - slot > 1.0}
        if late:
            self.findings.append(f"slots were sent late although all was well: {late}")

    def _is_stopped_at(self, slot: float) -> bool:
        """Return whether the schedule was paused at *slot*, or a moment before: it may not be sent any more then."""
        return self.stop[0] - 1.0 <= slot <= self.stop[1]
