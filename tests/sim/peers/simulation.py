"""One run from its seed to its report: faults, then calm and exactly one leader demanded.

Replay one run, with all that happened in it::

    python -m tests.sim.peers --seed 17 [--mutant half_is_enough]
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tenure.election import machine as election
from tenure.pacing import Timing
from tenure.peers import machine as peers
from tenure.peers.fleet import Quorum, Strategy
from tenure.peers.wire import Message, decode, encode
from tenure.testing.sim.world import SkewedClock
from tests.sim.peers.member import NAME, Candidate, Member, Work
from tests.sim.peers.world import Plan, World, draw

BLUR = 1e-5
IGNORES = 1.0  # ttls that work ignores its cancellation at most


def leader_within(plan: Plan) -> float:
    """Return within how many true seconds after the last fault exactly one leads, and goes on leading.

    The sum of what may have to happen one after the other, each at its worst:

    1. ``ttl_max``: members that were just started keep silent.
    2. ``ttl``: a promise that was made at the last moment runs out. Without a quorum, ``suspect_after`` does.
    3. ``renew_every`` and two ``retry_every``: leaders meet, or learn that they were asked to resign.
    4. A ``ttl`` of work that ignores its cancellation, in the only candidate that is left.
    5. 4.4 ``retry_every`` of handing back and standing back for others, and 2.4 until it asks again.
    6. Three elections, the first two of which were split.

    By clocks that run slower than the true time by a tenth and, among one another, by ``drift``.
    """
    timing, fleet = plan.timing, plan.fleet(None)
    waits = plan.ttl_max + timing.ttl + timing.renew_every + IGNORES * timing.ttl + 9 * timing.retry_every
    return (waits + 3 * fleet.election_lasts + fleet.suspect_after) / (1 - timing.drift) / 0.9 + 20 * plan.latency


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one seed."""

    seed: int
    mutant: str | None
    confined: str
    setting: str
    elections: int
    messages: int
    seconds: float
    recovery: float
    bound: float
    digest: str
    violations: tuple[tuple[str, str], ...]
    trace: tuple[str, ...] = field(default=(), repr=False)

    @property
    def replay(self) -> str:
        """The command that shows this run again."""
        confined = f" --mutant {self.mutant}" if self.mutant else self.confined
        return f"python -m tests.sim.peers --seed {self.seed}{confined}"

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.elections} elections in {self.seconds:.0f} virtual s ({self.setting})"
        if not self.violations:
            return f"{head}, no violation"
        told = "\n  ".join(f"{kind}: {what}" for kind, what in self.violations)
        return f"{head}; replay: {self.replay}\n  {told}"


class Checkers:
    """What must hold, looked at from outside and collected: nothing is asserted inside a run.

    ``two leaders``: with a quorum, two candidates trusted a term at one true moment. ``token order``: a later term had
    no higher token. ``old term``: a term went on after a newer one had begun. ``no leader``, ``many leaders``: not
    exactly one leads, long after the faults were over.
    ``machine``: a machine raised, or answered twice. ``late release``: a lease went back while its work ran.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.violations: list[tuple[str, str]] = []
        self.elections = 0
        self._beliefs: dict[Candidate, float] = {}
        self._newest = -1

    def violated(self, kind: str, what: str) -> None:
        self.world.note("CHECK", f"{kind}: {what}")
        if len(self.violations) < 10:
            self.violations.append((kind, f"at {self.world.now:.3f} s: {what}"))

    def began(self, candidate: Candidate, work: Work) -> None:
        self.elections += 1
        self.world.note(candidate.name, f"leads, {work.grant}")
        if self.plan.quorum == "majority" and work.grant.token <= self._newest:
            self.violated("token order", f"{work.grant} after token {self._newest}")
        self._newest = max(self._newest, work.grant.token)
        self.believes(candidate, work)

    def believes(self, candidate: Candidate, work: Work) -> None:
        until = candidate.member.clock.moment(work.until)
        if self.plan.quorum == "majority":
            longer = until > max(self.world.now, self._beliefs.get(candidate, 0.0)) + BLUR
            if longer and work.grant.token < self._newest:
                self.violated("old term", f"{candidate.name} trusts {work.grant} for longer after {self._newest} began")
            for other, theirs in self._beliefs.items():
                if other is not candidate and min(theirs, until) > self.world.now + BLUR:
                    self.violated("two leaders", f"{candidate.name} trusts {work.grant} while {other.name} leads")
        self._beliefs[candidate] = until

    def left(self, candidate: Candidate) -> None:
        self._beliefs.pop(candidate, None)


class Network:
    """Carry messages between members as bytes: late, twice, never."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._plan = simulation.plan
        self.loss = self._plan.loss
        self.calm = False
        self.cuts: dict[tuple[int, int], int] = {}
        self.dead: set[tuple[int, int]] = set()  # ways that stay cut, in calm as well
        self.messages = 0
        self.by_kind: dict[str, int] = {}
        self.latest = 0.0

    def send(self, source: int, to: int, message: Message) -> None:
        self.messages += 1
        kind = type(message).__name__
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        body = encode(message)
        copies = 2 if not self.calm and self._world.dice.random() < self._plan.duplicate else 1
        for _ in range(copies):
            delay = self._delay(source, to)
            if delay is not None:
                self._world.after(delay, self._arrive, source, to, body)

    def _delay(self, source: int, to: int) -> float | None:
        if (source, to) in self.dead:
            return None
        dice = self._world.dice
        usual = min(dice.expovariate(1.0), 3.0) * self._plan.latency
        if self.calm:
            return usual
        if self.cuts.get((source, to)) or dice.random() < self.loss:
            return None
        if dice.random() < self._plan.slow:
            usual = dice.uniform(0.0, 2.0 * self._plan.timing.ttl)
            self.latest = max(self.latest, self._world.now + usual)
        return usual

    def _arrive(self, source: int, to: int, body: bytes) -> None:
        member = self._simulation.members[to]
        if member is not None:
            member.do(member.feed, peers.Received(source, decode(body)))

    def cut(self, source: int, to: int, seconds: float) -> None:
        self.cuts[source, to] = self.cuts.get((source, to), 0) + 1
        self._world.after(seconds, self._join, source, to)

    def _join(self, source: int, to: int) -> None:
        self.cuts[source, to] -= 1


class Simulation:
    """One run.

    Args:
        seed: Decides everything.
        machine: The member's machine; a planted bug brings its own.
        given: What is not drawn: ``strategy``, ``quorum``, ``size``, ``faults``.
    """

    def __init__(
        self,
        seed: int,
        *,
        machine: type[peers.Machine] = peers.Machine,
        mutant: str | None = None,
        trace: bool = False,
        plan: Plan | None = None,
        strategy: Strategy | None = None,
        quorum: Quorum | None = None,
        size: int | None = None,
        faults: tuple[str, ...] | None = None,
    ) -> None:
        self.seed = seed
        self.mutant = mutant
        self._machine = machine
        given = {"strategy": strategy, "quorum": quorum, "size": size, "faults": ",".join(faults or ())}
        self._confined = "".join(f" --{name} {value}" for name, value in given.items() if value)
        self.world = World(seed, trace=trace)
        self.plan = plan or draw(self.world.dice, strategy=strategy, quorum=quorum, size=size, faults=faults)
        self.checkers = Checkers(self.world, self.plan)
        self.network = Network(self)
        pairs = zip(self.plan.rates, self.plan.offsets, strict=True)
        self.clocks = [SkewedClock(rate, offset) for rate, offset in pairs]
        self._births = 0
        self._resting = False
        self.members: list[Member | None] = [None] * self.plan.size
        for number in range(self.plan.size):
            if self.plan.late[number]:
                self.world.after(self._for(5.0), self._born, number)
            else:
                self._born(number)

    def make_machine(self, number: int, floor: int, nonce: int, now: float) -> peers.Machine:
        return self._machine(self.plan.fleet(number), self.world.dice, floor=floor, nonce=nonce, now=now)

    def hinted(self, member: Member) -> None:
        """A member gave a hint."""

    def _born(self, number: int) -> None:
        member = self.members[number]
        if member is None or not member.alive:
            self._births += 1
            self.members[number] = None
            self.members[number] = Member(self, number, self._births)

    def _for(self, ttls: float) -> float:
        return self.world.dice.random() * ttls * self.plan.timing.ttl

    # --- phases ---

    def run(self) -> Report:
        """Run it from beginning to end."""
        if self.plan.faults:
            self.world.after(self._for(1.0), self._strike)
        self.world.run(self.plan.seconds)
        self._heal()
        bound = leader_within(self.plan)
        healed = self.world.now
        recovery = self._recover(healed + bound) - healed
        digest = f"{self.world.steps:x}-{self.world.dice.getrandbits(64):016x}"
        return Report(
            seed=self.seed,
            mutant=self.mutant,
            confined=self._confined,
            setting=str(self.plan),
            elections=self.checkers.elections,
            messages=self.network.messages,
            seconds=self.world.now,
            recovery=recovery,
            bound=bound,
            digest=digest,
            violations=tuple(self.checkers.violations),
            trace=tuple(self.world.lines),
        )

    def _heal(self) -> None:
        self._resting = True
        self.network.calm = True
        leaders = self._leaders()
        if leaders and self.world.dice.random() < 0.5:
            self.world.dice.choice(leaders).die()
        for number in range(self.plan.size):
            member = self.members[number]
            if member is not None and member.alive:
                member.resume()
            elif self.world.dice.random() < 0.5 or len(self._living()) < self.plan.fleet(None).needed:
                self._born(number)
        for number, count in enumerate(self.plan.candidates):
            # Of those that want to lead, one is alive, and so are as many as are needed.
            if count and not any(member.candidates for member in self._living()):
                self._born(number)
        while len(self._living()) < self.plan.fleet(None).needed:
            self._born(next(n for n in range(self.plan.size) if (m := self.members[n]) is None or not m.alive))
        self.world.run(max(self.world.now, self.network.latest))
        self._scar()
        self.world.note("fault", "no more")

    def _scar(self) -> None:
        """Leave one way cut for ever, in one direction, where more live than are needed: somebody must lead still."""
        dice = random.Random(self.seed)  # its own, so that the run up to here is the same without it
        living = [member.number for member in self._living()]
        if self.plan.quorum == "majority" and len(living) > self.plan.fleet(None).needed and dice.random() < 0.5:
            source, to = dice.sample(living, 2)
            self.network.dead.add((source, to))
            self.world.note("fault", f"{source} never reaches {to} any more")

    def _living(self) -> list[Member]:
        return [member for member in self.members if member is not None and member.alive]

    def _leaders(self) -> list[Member]:
        return [member for member in self._living() if member.leader() is not None]

    def _recover(self, until: float) -> float:
        """Go on until exactly one leads, and see that this lasts; return since when it does."""
        step = self.plan.timing.retry_every / 4
        since: float | None = None
        last = None
        while self.world.now < until:
            self.world.run(self.world.now + step)
            leaders = self._leaders()
            now = leaders[0] if len(leaders) == 1 else None
            if now is None or now is not last:
                since = self.world.now if now is not None else None
            last = now
        if len(leaders := self._leaders()) != 1:
            kind = "no leader" if not leaders else "many leaders"
            self.checkers.violated(kind, f"{[member.name for member in leaders]} lead after {until:.1f} s")
        work = last.leader() if last else None
        self.world.run(self.world.now + 2 * self.plan.timing.ttl)
        if last is not None and (self._leaders() != [last] or last.leader() is not work):
            self.checkers.violated("unrest", f"{last.name} lost its term in calm")
        return since if since is not None else until

    # --- faults ---

    def _strike(self) -> None:
        if self._resting:
            return
        self.world.after(self.world.dice.expovariate(1.0) * self.plan.fault_every, self._strike)
        living = self._living()
        if not living:
            return
        leaders = self._leaders()
        victim = self.world.dice.choice(leaders if leaders and self.world.dice.random() < 0.6 else living)
        fault = self.world.dice.choice(self.plan.faults)
        self.world.note("fault", f"{fault} ({victim.name})")
        getattr(self, f"_{fault}")(victim)

    def _pause(self, member: Member) -> None:
        member.pause()
        self.world.after(self._for(2.5), member.resume)

    def _kill(self, member: Member) -> None:
        member.die()
        self.world.after(self._for(1.5) if self.world.dice.random() < 0.7 else 0.0, self._reborn, member.number)

    def _reborn(self, number: int) -> None:
        if not self._resting:
            self._born(number)

    def _kill_all(self, member: Member) -> None:
        if self.world.dice.random() < 0.3:
            for each in self._living():
                self._kill(each)

    def _forget(self, member: Member) -> None:
        """One that follows is cut off from the leader, another forgets whom it vouched for: would both elect anew?"""
        followers = [each for each in self._living() if each not in self._leaders()]
        if len(followers) < 2 or not self._leaders():
            return
        leader, dice = self._leaders()[0], self.world.dice
        cut, forgets = followers if dice.random() < 0.5 else followers[::-1]
        for ways in ((leader.number, cut.number), (cut.number, leader.number)):
            self.network.cut(*ways, 2.5 * self.plan.timing.ttl)
        self.world.after(self._for(1.5), self._begin_anew, forgets)

    def _begin_anew(self, member: Member) -> None:
        if member.alive and not self._resting:
            member.die()
            self._born(member.number)

    def _cut_one_way(self, member: Member) -> None:
        for other in range(self.plan.size):
            if other != member.number and self.world.dice.random() < 0.7:
                ways = [(member.number, other), (other, member.number)]
                self.network.cut(*self.world.dice.choice(ways), self._for(2.5))

    def _cut_off(self, member: Member) -> None:
        seconds = self._for(2.5)
        for other in range(self.plan.size):
            self.network.cut(member.number, other, seconds)
            self.network.cut(other, member.number, seconds)

    def _partition(self, member: Member) -> None:
        seconds = self._for(2.5)
        side = {number for number in range(self.plan.size) if self.world.dice.random() < 0.5}
        for a in range(self.plan.size):
            for b in range(self.plan.size):
                if (a in side) != (b in side):
                    self.network.cut(a, b, seconds)

    def _lossy(self, member: Member) -> None:
        self.network.loss = self.world.dice.uniform(0.2, 0.8)
        self.world.after(self._for(1.0), self._loses, self.plan.loss)

    def _loses(self, share: float) -> None:
        self.network.loss = share

    def _slow(self, member: Member) -> None:
        self.network.loss = self.plan.loss

    def _resign(self, member: Member) -> None:
        for each in member.candidates:
            member.do(each.feed, election.Resign())

    def _ask_to_resign(self, member: Member) -> None:
        member.do(member.ask, None, 0, lambda number: peers.AskToResign(number, NAME))

    def _stop(self, member: Member) -> None:
        for each in member.candidates:
            member.do(each.feed, election.Stop())
            member.do(each.feed, election.Resign())
        self._kill(member)


def failover(seed: int, strategy: Strategy, size: int) -> tuple[float, float, float]:
    """Kill a leader in calm; return the messages to choose a successor, those to claim and vote, and the seconds."""
    timing = Timing(ttl=15.0)
    same = (1.0,) * size
    plan = Plan(
        size=size,
        strategy=strategy,
        quorum="majority",
        timing=timing,
        ttl_max=timing.ttl,
        heartbeat=timing.ttl / 15,
        patience=timing.ttl / 60,
        rates=same,
        offsets=same,
        skews=same,
        candidates=(1,) * size,
        late=(False,) * size,
        latency=0.001,
        loss=0.0,
        slow=0.0,
        duplicate=0.0,
        ignores=0.0,
        faults=(),
        fault_every=1.0,
        seconds=0.0,
    )
    simulation = Simulation(seed, plan=plan)
    simulation.network.calm = True
    world, network = simulation.world, simulation.network
    while not simulation._leaders():
        world.run(world.now + 0.05)
    world.run(world.now + timing.ttl * (1 + world.dice.random()))
    simulation._leaders()[0].die()
    killed = world.now
    network.by_kind.clear()
    while not simulation._leaders():
        world.run(world.now + 0.01)
    elected = world.now
    world.run(world.now + 1.0)  # what is said after it is won
    choose = sum(network.by_kind.get(kind, 0) for kind in ("Election", "Okay", "Elect", "Elected"))
    votes = sum(network.by_kind.get(kind, 0) for kind in ("Claim", "Vouch", "Deny", "Free", "Freed"))
    return choose, votes, elected - killed


COUNT_SEEDS = 5
HEAD = """\
| strategy | members | to choose | at most | allowed | claims and votes, at most | seconds |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Count:
    """What it took a fleet to replace its leader, over some seeds: a line of the table in docs/strategies.md."""

    strategy: Strategy
    size: int
    choose: tuple[float, ...]
    votes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, strategy: Strategy, size: int) -> Count:
        """Count."""
        found = [failover(seed, strategy, size) for seed in range(COUNT_SEEDS)]
        choose, votes, seconds = (tuple(sorted(each[n] for each in found)) for n in range(3))
        return cls(strategy, size, choose, votes, seconds)

    @property
    def allowed(self) -> float:
        """The bound on the messages to choose, among those that are left."""
        live = self.size - 1
        return {"lowest": 0, "bully": live * (live - 1), "ring": live * (live + 1) // 2 + live}[self.strategy]

    def __str__(self) -> str:
        middle = COUNT_SEEDS // 2
        return (
            f"| `{self.strategy}` | {self.size} | {self.choose[middle]} | {self.choose[-1]} | {self.allowed} "
            f"| {self.votes[-1]} | {self.seconds[middle]:.1f} |"
        )
