"""Members that share partitions, simulated from a seed: they join, leave, die, hang, and lose requests and answers.

The machines are the real ones, of members and of elections; the store is a few lines, with the same promises as one.
Time is virtual, and each member has a clock of its own.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tenure._election import effects as election
from tenure._election.machine import Machine
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._partitions.machine import (
    Ask,
    Claim,
    Effect,
    Give,
    Join,
    Leave,
    Look,
    PartitionMachine,
    slots_to_follow,
)
from tenure._partitions.plan import LAYOUT, ORDER, WEIGHT, Layout, checked_partitions, identity_of, shares
from tenure._timing import Timing

PATIENCE = 2.0
"""Seconds after which a request is given up."""

BALANCED_WITHIN = 2.0
"""The leases within which all is in balance once nothing fails, and no member comes or goes."""


@dataclass(slots=True)
class Lease:
    holder: str = ""
    token: int = 0
    ends_at: float = 0.0
    metadata: Metadata = field(default_factory=lambda: NO_METADATA)
    is_asked: bool = False


class Store:
    """Leases by name."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.requests: Counter[str] = Counter()
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of a lease that changed: a hint."""

    def acquire(self, now: float, name: str, holder: str, ttl: float, metadata: Metadata) -> Granted | HeldBy:
        self.requests["acquire"] += 1
        lease = self.leases.setdefault(name, Lease())
        if lease.ends_at > now and lease.holder != holder:
            return HeldBy(name, lease.holder, lease.token, lease.ends_at - now, lease.metadata)
        if lease.ends_at <= now:
            lease.token, lease.is_asked = lease.token + 1, False
        lease.holder, lease.ends_at, lease.metadata = holder, now + ttl, metadata
        self.changed(name)
        return Granted(Grant(name, holder, lease.token), lease.is_asked)

    def renew(self, now: float, grant: Grant, ttl: float) -> Granted | Lost:
        self.requests["renew"] += 1
        lease = self.leases[grant.name]
        if (lease.holder, lease.token) != (grant.holder, grant.token) or lease.ends_at <= now:
            return Lost(grant)
        lease.ends_at = max(lease.ends_at, now + ttl)
        return Granted(grant, lease.is_asked)

    def release(self, now: float, grant: Grant) -> Released | Lost:
        self.requests["release"] += 1
        lease = self.leases[grant.name]
        if (lease.holder, lease.token) != (grant.holder, grant.token) or lease.ends_at <= now:
            return Lost(grant)
        lease.ends_at = 0.0
        self.changed(grant.name)
        return Released(grant)

    def ask(self, now: float, name: str) -> None:
        self.requests["ask"] += 1
        lease = self.leases.get(name)
        if lease is not None and lease.ends_at > now and not lease.is_asked:
            lease.is_asked = True
            self.changed(name)

    def look(self, now: float, names: Sequence[str]) -> list[HeldBy | Vacant]:
        self.requests["look"] += 1
        return [self.inspect(now, name) for name in names]

    def inspect(self, now: float, name: str) -> HeldBy | Vacant:
        lease = self.leases.get(name)
        if lease is None or lease.ends_at <= now:
            return Vacant(name, lease.token if lease else 0)
        return HeldBy(name, lease.holder, lease.token, lease.ends_at - now, lease.metadata, lease.is_asked)


@dataclass(slots=True, eq=False)
class Work:
    """What a member does under one lease, and until when it trusts that."""

    member: Member
    partition: str | None
    machine: Machine
    metadata: Metadata
    epoch: int = 0
    runs: bool = False
    token: int = 0
    trusted_until: float = 0.0
    """By the clock of the member."""
    is_cancelled: bool = False

    @property
    def is_trusted(self) -> bool:
        return self.runs and self.member.clock() < self.trusted_until


@dataclass(slots=True, eq=False)
class Member:
    """One process."""

    number: int
    weight: int
    clock: Callable[[], float]
    pace: float
    machine: PartitionMachine
    is_alive: bool = True
    is_leaving: bool = False
    paused_until: float = 0.0
    epoch: int = 0
    slot: Work | None = None
    works: dict[str, Work] = field(default_factory=dict)

    @property
    def running(self) -> list[Work]:
        """The work on partitions that runs, and is trusted."""
        return [one for one in self.works.values() if one.is_trusted] if self.is_alive else []


@dataclass(frozen=True, slots=True)
class Draw:
    """What a seed draws."""

    partitions: int
    members: int
    weights: tuple[int, ...]
    hints: bool
    ttl: float
    length: float
    loss: float
    """The share of requests that are lost, and of answers."""
    joins: int
    leaves: int
    kills: int
    pauses: int
    outages: int
    requests: int
    """How often an operator asks for a partition."""


QUIET = Draw(16, 3, (1,), True, 15.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)
"""Nothing fails and no member comes or goes, but by the test's own acts."""


class Fleet:
    """One run.

    Args:
        seed: Decides everything that *drawn* leaves open.
        make_machine: Another one has planted bugs.
        drawn: What happens; by default, the seed draws it.
    """

    def __init__(
        self, seed: int, make_machine: type[PartitionMachine] = PartitionMachine, drawn: Draw | None = None
    ) -> None:
        self._rng = random.Random(seed)
        self._make_machine = make_machine
        self.drawn = drawn or self._draw()
        self.timing = Timing(self.drawn.ttl)
        self.layout = Layout("orders", checked_partitions(self.drawn.partitions))
        self.store = Store()
        self.store.changed = self._notify
        self.now = 0.0
        self.members: list[Member] = []
        self.findings: list[str] = []
        self.begun: list[tuple[float, str, int]] = []
        """When work on a partition began, and in which member."""
        self.healed = False
        self._is_away = False
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._runs: dict[str, list[Work]] = {name: [] for name in self.layout.partitions}

    def _draw(self) -> Draw:
        rng = self._rng
        ttl = rng.choice([5.0, 15.0, 60.0])
        return Draw(
            partitions=rng.choice([1, 3, 8, 24]),
            members=rng.randint(1, 6),
            weights=rng.choice([(1,), (1,), (1, 3)]),
            hints=rng.random() < 0.6,
            ttl=ttl,
            length=ttl * rng.choice([5, 20]),
            loss=rng.choice([0.0, 0.02, 0.2]),
            joins=rng.randint(0, 4),
            leaves=rng.randint(0, 3),
            kills=rng.randint(0, 4),
            pauses=rng.randint(0, 4),
            outages=rng.randint(0, 2),
            requests=rng.randint(0, 2),
        )

    # --- the run ---

    def run(self) -> list[str]:
        """Run what was drawn, and then a time without faults; return what is wrong."""
        drawn, rng = self.drawn, self._rng
        for _ in range(drawn.members):
            self.at(rng.choice([0.0, 0.0, rng.uniform(0, drawn.ttl)]), self.join)
        acts: list[tuple[Callable[[], object], int]] = [
            (self.join, drawn.joins),
            (self.leave_one, drawn.leaves),
            (self.kill_one, drawn.kills),
        ]
        acts += [(self.pause_one, drawn.pauses), (self._ask_one, drawn.requests)]
        for act, times in acts:
            for _ in range(times):
                self.at(rng.uniform(0, drawn.length), act)
        for _ in range(drawn.outages):
            begin = rng.uniform(0, drawn.length * 0.9)
            self.at(begin, self._go_away)
            self.at(begin + rng.choice([0.2, 1.0]) * drawn.ttl, self._come_back)
        self.at(drawn.length, self._heal)
        self.until(drawn.length)
        self.until(drawn.length + BALANCED_WITHIN * drawn.ttl)
        self.check_balance()
        moves, requests = len(self.begun), Counter(self.store.requests)
        self.until(self.now + 5 * drawn.ttl)
        self.check_balance()
        if len(self.begun) > moves:
            self.findings.append(f"partitions moved at rest: {self.begun[moves:][:3]}")
        asked = self.store.requests - requests
        living = len(self.living)
        if asked["ask"] or asked["acquire"] or asked["look"] > living * 5 * 3 * 1.3 + living:
            self.findings.append(f"{living} members asked at rest: {asked}")
        return self.findings

    def until(self, end: float) -> None:
        """Go on until *end*."""
        while self._queue and self._queue[0][0] <= end and len(self.findings) < 5:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = end

    def until_balanced(self, longest: float) -> float:
        """Go on until all is in balance, for *longest* at most; return how long it took."""
        begin = self.now
        while not self.is_balanced and self.now < begin + longest and self._queue:
            self.until(self._queue[0][0])
        return self.now - begin

    def at(self, time: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self._count), act))

    # --- what must hold ---

    @property
    def living(self) -> list[Member]:
        return [one for one in self.members if one.is_alive and not one.is_leaving]

    @property
    def owned(self) -> dict[int, int]:
        """By member, how many partitions it works on."""
        return {one.number: len(one.running) for one in self.living}

    @property
    def wanted(self) -> dict[int, int]:
        """By member, the share that follows from those that hold a slot."""
        members = [one.machine.member for one in self.living if one.machine.member is not None]
        found = shares(members, len(self.layout.partitions)) if members else {}
        return {one.number: found.get(one.machine.identity, 0) for one in self.living}

    @property
    def is_balanced(self) -> bool:
        is_whole = sum(self.owned.values()) == len(self.layout.partitions)
        most = min(len(self.living), len(self.layout.partitions))
        slots = sum(one.machine.member is not None for one in self.living)
        return is_whole and slots == most and self.owned == self.wanted

    def check_balance(self) -> None:
        if self.living and not self.is_balanced:
            self.findings.append(f"{self.now:.1f}: members own {self.owned}, and should own {self.wanted}")
        if set(self.drawn.weights) == {1} and self.living and max(self.owned.values()) - min(self.owned.values()) > 1:
            self.findings.append(f"{self.now:.1f}: shares differ by more than one: {self.owned}")

    def _check_owner(self, work: Work) -> None:
        """No other member may trust the same partition, also one that hangs: its clock goes on."""
        assert work.partition is not None
        for other in self._runs[work.partition]:
            if other is not work and other.is_trusted and other.member.is_alive:
                self.findings.append(
                    f"{self.now:.2f}: {work.partition} is owned by members {other.member.number} and "
                    f"{work.member.number}"
                )

    # --- members ---

    def join(self, weight: int | None = None) -> Member:
        """Start a member."""
        rng = self._rng
        offset, pace = rng.uniform(0, 1e6), rng.uniform(0.98, 1.02)

        def clock() -> float:
            return self.now * pace + offset

        number = len(self.members)
        weight = weight or rng.choice(self.drawn.weights)
        machine = self._make_machine(
            self.layout, f"m-{number}", self.timing, random.Random(rng.random()), weight=weight, now=clock()
        )
        member = Member(number, weight, clock, pace, machine)
        self.members.append(member)
        self._turn(member)
        return member

    def _wait(self, one: Member | Work, member: Member, wake_at: float, act: Callable[[], None]) -> None:
        """Act at *wake_at* of the member's clock, unless something else happens to it before."""
        one.epoch += 1
        epoch = one.epoch
        if wake_at < float("inf"):
            wait = max(1e-6, (wake_at - member.clock()) / member.pace + 1e-6)
            self.at(self.now + wait, self._awake(member, lambda: act() if one.epoch == epoch else None))

    def _awake(self, member: Member, act: Callable[[], object]) -> Callable[[], None]:
        """Return *act* for a member that may be dead by then, or hang."""

        def do() -> None:
            if member.is_alive and self.now < member.paused_until:
                self.at(member.paused_until, do)
            elif member.is_alive:
                act()

        return do

    def _turn(self, member: Member, effects: Sequence[Effect] = ()) -> None:
        """Perform effects of a member's machine, then what is due; and set its alarm."""
        machine = member.machine
        for effect in [*effects, *machine.tick(member.clock())]:
            match effect:
                case Look(leases):
                    self._look(member, leases)
                case Join(slot, order):
                    texts = {ORDER: str(order), WEIGHT: str(member.weight), LAYOUT: self.layout.text}
                    member.slot = self._campaign(member, self.layout.slot(slot), None, texts)
                case Claim(partition):
                    work = self._campaign(member, self.layout.lease_of(partition), partition, {})
                    member.works[partition] = work
                case Give(partition):
                    self._stop(member.works[partition])
                case Ask(partition):
                    ask = partial(self._asked, self.layout.lease_of(partition))
                    self._request(member, ask, lambda _: None)
                case Leave():
                    assert member.slot is not None
                    self._stop(member.slot)
        self._wait(member, member, machine.wake_at, lambda: self._turn(member))
        if machine.has_left:
            member.is_alive = False

    def _asked(self, lease: str) -> None:
        self.store.ask(self.now, lease)

    def _look(self, member: Member, leases: Sequence[str]) -> None:
        def answered(found: object) -> None:
            if isinstance(found, list):
                self._turn(member, member.machine.looked(found, member.clock()))
            else:
                member.machine.look_failed(member.clock())
                self._turn(member)

        self._request(member, lambda: self.store.look(self.now, leases), answered)

    def _request(self, member: Member, act: Callable[[], object], receive: Callable[[object], None]) -> None:
        """Send a request: it arrives or not, and so does its answer; then *receive* gets that, or ``NoAnswer``."""
        rng, is_answered = self._rng, False
        loss = 0.0 if self.healed else self.drawn.loss

        def answered(answer: object) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                receive(answer)

        def arrive() -> None:
            if self._is_away or rng.random() < loss:
                return
            answer = act()
            if rng.random() >= loss:
                self.at(self.now + rng.expovariate(1 / 0.01), self._awake(member, lambda: answered(answer)))

        hangs = rng.random() < loss / 10
        self.at(self.now + (rng.uniform(0, 2 * self.drawn.ttl) if hangs else rng.expovariate(1 / 0.01)), arrive)
        self.at(self.now + PATIENCE, self._awake(member, lambda: answered(NoAnswer("no answer"))))

    # --- its leases ---

    def _campaign(self, member: Member, lease: str, partition: str | None, metadata: Mapping[str, str]) -> Work:
        holder = f"{member.machine.identity}-{next(self._count)}"
        assert identity_of(holder) == member.machine.identity
        machine = Machine(
            lease, holder, self.timing, random.Random(self._rng.random()), hints=True, now=member.clock(), once=True
        )
        work = Work(member, partition, machine, metadata)
        self.at(self.now, self._awake(member, lambda: self._feed(work, election.Tick())))
        return work

    def _stop(self, work: Work) -> None:
        self._feed(work, election.Stop())
        self._feed(work, election.Resign())

    def _feed(self, work: Work, event: election.Input) -> None:
        machine, member = work.machine, work.member
        was_finished = machine.is_finished
        for effect in machine.handle(event, member.clock()):
            match effect:
                case election.Acquire(number, holder):
                    self._ask(work, number, partial(self._acquired, work, holder))
                case election.Renew(number, grant):
                    self._ask(work, number, partial(self._renewed, grant))
                case election.Release(number, grant):
                    self._ask(work, number, partial(self._released, grant))
                case election.StartWork(grant, until):
                    self._begin(work, grant, until)
                case election.Trust(_, until):
                    work.trusted_until = until
                case election.CancelWork(_, _):
                    self._cancel(work)
                case _:
                    pass
        if machine.is_finished and not was_finished:
            self.at(self.now, self._awake(member, lambda: self._ended(work)))
        self._wait(work, member, machine.wake_at, lambda: self._feed(work, election.Tick()))

    def _acquired(self, work: Work, holder: str) -> object:
        return self.store.acquire(self.now, work.machine.name, holder, self.timing.ttl, work.metadata)

    def _renewed(self, grant: Grant) -> object:
        return self.store.renew(self.now, grant, self.timing.ttl)

    def _released(self, grant: Grant) -> object:
        return self.store.release(self.now, grant)

    def _ask(self, work: Work, number: int, act: Callable[[], object]) -> None:
        def receive(answer: object) -> None:
            self._feed(work, election.Answered(number, answer))  # type: ignore[arg-type]

        self._request(work.member, act, receive)

    def _begin(self, work: Work, grant: Grant, until: float) -> None:
        work.runs, work.token, work.trusted_until = True, grant.token, until
        member = work.member
        effects: list[Effect] = []
        if work.partition is None:
            member.machine.joined(member.clock())
        else:
            self._runs[work.partition] = [one for one in self._runs[work.partition] if one.is_trusted] + [work]
            self._check_owner(work)
            self.begun.append((self.now, work.partition, member.number))
            effects = member.machine.won(work.partition, member.clock())
        self.at(self.now, self._awake(member, lambda: self._turn(member, effects)))

    def _cancel(self, work: Work) -> None:
        """Let the work end within its grace; now and then it takes a while."""
        takes = self._rng.choice([0.0, 0.0, self.timing.grace * 0.8]) if work.partition else 0.0
        self.at(self.now + takes, self._awake(work.member, lambda: self.end_work(work)))

    def end_work(self, work: Work) -> None:
        """Let the work on a lease return."""
        if work.runs:
            work.runs = False
            self._feed(work, election.WorkEnded(work.token, again=False))

    def _ended(self, work: Work) -> None:
        member, now = work.member, work.member.clock()
        effects: list[Effect] = []
        if work.partition is None:
            member.machine.slot_ended(now)
            member.slot = None
        else:
            del member.works[work.partition]
            effects = member.machine.ended(work.partition, now)
        self._turn(member, effects)

    # --- hints ---

    def _notify(self, lease: str) -> None:
        if not self.drawn.hints:
            return
        for member in self.members:
            follows = {*map(self.layout.lease_of, member.machine.owned), *slots_to_follow(member.machine)}
            if member.is_alive and lease in follows and self._rng.random() >= self._lost:
                self.at(self.now + 0.01, self._awake(member, partial(self._hinted, member)))

    @property
    def _lost(self) -> float:
        return 0.0 if self.healed else self.drawn.loss

    def _hinted(self, member: Member) -> None:
        member.machine.hinted(member.clock())
        self._turn(member)

    # --- what happens to them ---

    def _one(self) -> Member | None:
        living = [one for one in self.living if self.now >= one.paused_until]
        return self._rng.choice(living) if living else None

    def leave(self, member: Member) -> None:
        """Let a member leave in order."""
        member.is_leaving = True
        self._turn(member, member.machine.leave(member.clock()))

    def kill(self, member: Member) -> None:
        member.is_alive = False

    def leave_one(self) -> None:
        if member := self._one():
            self.leave(member)

    def kill_one(self) -> None:
        if member := self._one():
            self.kill(member)
            if self._rng.random() < 0.7:
                self.at(min(self.now + self._rng.choice([0.1, 2.0, 30.0]), self.drawn.length), self.join)

    def pause_one(self) -> None:
        if member := self._one():
            longest = max(self.now, self.drawn.length)
            member.paused_until = min(self.now + self._rng.choice([0.1, 0.7, 3.0]) * self.drawn.ttl, longest)

    def _ask_one(self) -> None:
        """Ask for a partition, as an operator does."""
        self.store.ask(self.now, self.layout.lease_of(self._rng.choice(self.layout.partitions)))

    def _go_away(self) -> None:
        self._is_away = True

    def _come_back(self) -> None:
        self._is_away = False

    def _heal(self) -> None:
        self._is_away, self.healed = False, True
        if not self.living:
            self.join()
