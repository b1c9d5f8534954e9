"""A simulated member: the real machine of the fleet, and over it the real machines of its candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tenure._backends.peers import machine as peers
from tenure._election import effects as election_effects
from tenure._election import machine as election
from tenure._lease import Grant
from tenure.testing._sim.process import Alarm, Process
from tests.sim.peers.protocols import MemberRun

NAME = "chair"
LATE = 1e-9
"""A timer goes off a little after its moment. At the very moment, what is to end then has not ended for everybody."""


@dataclass(slots=True, eq=False)
class Work:
    """The work of one term, and until when its candidate trusts it."""

    grant: Grant
    until: float
    is_cancelled: bool = False


class Candidate:
    """An election's machine with its work, in the process of a member."""

    def __init__(self, member: Member, number: int) -> None:
        self.member = member
        self.work: Work | None = None
        self.name = f"{member.name}/{number}"
        hints = member.world.rng.random() < 0.8
        self.machine = election.Machine(
            NAME, self.name, member.plan.timing, member.world.rng, hints=hints, takes_back=True, now=member.now()
        )
        self._alarm = Alarm(
            member, lambda: self.machine.wake_at + LATE, member.do, lambda: self.feed(election_effects.Tick())
        )

    def feed(self, event: election_effects.Input) -> None:
        for effect in self.machine.handle(event, self.member.now()):
            self._perform(effect)
        self._alarm.set()

    def _perform(self, effect: election_effects.Effect) -> None:
        member, plan = self.member, self.member.plan
        match effect:
            case election_effects.Acquire(ask, holder):
                member.ask(self, ask, lambda n: peers.Acquire(n, NAME, holder, plan.timing.ttl, {}))
            case election_effects.Renew(ask, grant):
                member.ask(self, ask, lambda n: peers.Renew(n, grant, plan.timing.ttl))
            case election_effects.Release(ask, grant):
                if self.work is not None and self.work.grant == grant:
                    member.checkers.violated("late release", f"{grant} was handed back while its work ran")
                member.ask(self, ask, lambda n: peers.Release(n, grant))
            case election_effects.StartWork(grant, until):
                self.work = Work(grant, until)
                member.checkers.began(self, self.work)
            case election_effects.Trust(token, until) if self.work is not None and self.work.grant.token == token:
                self.work.until = until
                member.checkers.believes(self, self.work)
            case election_effects.CancelWork(token, _) if self.work is not None and self.work.grant.token == token:
                self._cancel(self.work)

    def _cancel(self, work: Work) -> None:
        if work.is_cancelled:
            return
        work.is_cancelled = True
        plan, rng = self.member.plan, self.member.world.rng
        longest = plan.timing.ttl if rng.random() < plan.ignores else 0.9 * plan.timing.grace
        self.member.after(longest * rng.random(), self._end, work)

    def _end(self, work: Work) -> None:
        if self.work is work:
            self.work = None
            self.member.checkers.left(self)
            self.feed(election_effects.WorkEnded(work.grant.token, True))


class Member(Process):
    """One process of one member. After a kill, its host gets another one, which knows nothing."""

    def __init__(self, run: MemberRun, number: int, start: int) -> None:
        name = f"{'abcdefghijklmnopqrstuvwxyz'[number]}{start}"
        super().__init__(run.world, number, name, run.clocks[number])
        self.run = run
        self.plan = run.plan
        self.checkers = run.checkers
        self._asks = 0
        self._waiting: dict[int, tuple[Candidate | None, int]] = {}
        floor = int(1_000_000 + (self.world.now + self.plan.skews[number]) * 1000)
        nonce = self.world.rng.getrandbits(50)
        self.machine = run.parts.machine(
            self.plan.fleet(number), self.world.rng, floor=floor, nonce=nonce, now=self.now()
        )
        self.candidates: list[Candidate] = []
        self.candidates += [Candidate(self, each) for each in range(self.plan.candidates[number])]
        for each in self.candidates:
            self.after(self.plan.timing.ttl * 0.01 * self.world.rng.random(), each.feed, election_effects.Tick())
        self._alarm = Alarm(self, lambda: self.machine.wake_at + LATE, self.do, lambda: self.feed(peers.Tick()))
        self._alarm.set()

    def do(self, call: Callable[..., object], *args: Any) -> None:
        """Call *call* now, or when the pause is over; never in a dead process. What it raises is a finding."""
        try:
            super().do(call, *args)
        except Exception as error:
            self.checkers.violated("machine", f"{self.name}: {call.__name__}{args} raised {error!r}")
            self.die("broken")

    # --- the fleet's machine ---

    def feed(self, event: peers.Input) -> None:
        effects = self.machine.handle(event, self.now())
        if self.world.traced and not isinstance(event, peers.Tick):
            self.world.log(self.name, f"{event} → {', '.join(map(str, effects))}")
        answers = []
        for effect in effects:
            match effect:
                case peers.Send(to, message):
                    self.run.network.send(self.number, to, message)
                case peers.Answer(ask, answer):
                    answers.append((ask, answer))
                case peers.Hint():
                    for each in self.candidates:
                        self.world.after(0.0, self.do, each.feed, election_effects.Hint())
        self._alarm.set()
        for ask, answer in answers:
            self._answered(ask, answer)

    def ask(self, candidate: Candidate | None, number: int, question: Any) -> None:
        self._asks += 1
        self._waiting[self._asks] = (candidate, number)
        self.feed(question(self._asks))

    def _answered(self, ask: int, answer: Any) -> None:
        waiting = self._waiting.pop(ask, None)
        if waiting is None:
            self.checkers.violated("machine", f"{self.name} answered question {ask} twice")
            return
        candidate, number = waiting
        if candidate is None:
            return
        self.world.after(0.0, self.do, candidate.feed, election_effects.Answered(number, answer))

    def _died(self) -> None:
        for each in self.candidates:
            each.work = None
            self.checkers.left(each)

    def leader(self) -> Work | None:
        """Return the work of the candidate here that leads and has no reason to leave."""
        for each in self.candidates:
            if each.work is not None and not each.work.is_cancelled and each.work.until > self.now():
                return each.work
        return None
