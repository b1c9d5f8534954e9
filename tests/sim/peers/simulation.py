"""One run from its seed to its report: faults; then none, and exactly one leader is demanded."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from tenure._backends.peers import machine as peers
from tenure.testing._sim.report import Report, outcome_of
from tenure.testing._sim.world import SkewedClock, World
from tests.sim.peers.checkers import Checkers
from tests.sim.peers.faults import PeerNemesis
from tests.sim.peers.member import Member
from tests.sim.peers.network import PeerNetwork
from tests.sim.peers.plan import ANYTHING, Given, Plan, draw

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
    slowed = (waits + 3 * fleet.election_lasts + fleet.suspect_after) / (1 - timing.drift) / 0.9
    return slowed + 20 * plan.conditions.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport(Report):
    """The result of one seed of a fleet."""

    command: ClassVar[str] = "python -m tests.sim.peers"

    messages: int
    given: Given

    @property
    def replay(self) -> str:
        """The command that shows this run again."""
        planted = f" --mutant {self.mutant}" if self.mutant else ""
        return f"{self.command} --seed {self.seed}{planted}{self.given}"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; a planted bug swaps the machine, and says where it errs: what is not drawn, then."""

    machine: type[peers.Machine] = peers.Machine
    given: Given = ANYTHING


class Simulation:
    """One run.

    Args:
        seed: Decides everything.
        parts: What it is made of.
        mutant: The name of the planted bug in *parts*, for the report.
        given: What is not drawn.
        trace: Whether to keep a log that a human can read.
        plan: The setting, if it is not to be drawn.
    """

    def __init__(
        self,
        seed: int,
        *,
        parts: Parts | None = None,
        mutant: str | None = None,
        given: Given = ANYTHING,
        trace: bool = False,
        plan: Plan | None = None,
    ) -> None:
        self.mutant = mutant
        self.given = given
        self.parts = parts or Parts()
        self.world = World(seed, trace=trace)
        self.plan = plan or draw(self.world.rng, given.confined(self.parts.given))
        self.checkers = Checkers(self.world, self.plan)
        self.network = PeerNetwork(self)
        pairs = zip(self.plan.rates, self.plan.offsets, strict=True)
        self.clocks = [SkewedClock(rate, offset) for rate, offset in pairs]
        self.nemesis = PeerNemesis(self)
        self._starts = 0
        self.members: list[Member | None] = [None] * self.plan.size
        for number in range(self.plan.size):
            if self.plan.late[number]:
                self.world.after(5.0 * self.plan.timing.ttl * self.world.rng.random(), self._start, number)
            else:
                self._start(number)

    def _start(self, number: int) -> None:
        member = self.members[number]
        if member is None or not member.alive:
            self._starts += 1
            self.members[number] = None
            self.members[number] = Member(self, number, self._starts)

    def restart(self, number: int) -> None:
        """Start a new process on the host *number*, if it has none and the faults are not over."""
        if not self.network.healed:
            self._start(number)

    # --- phases ---

    def run(self) -> FleetReport:
        """Run it from beginning to end."""
        self.nemesis.begin()
        self.world.run(self.plan.seconds)
        self._heal()
        bound = leader_within(self.plan)
        healed = self.world.now
        recovery = self._recover(healed + bound) - healed
        return outcome_of(
            self.checkers,
            FleetReport,
            mutant=self.mutant,
            setting=self.plan,
            recovery=recovery,
            bound=bound,
            elections=self.checkers.elections,
            messages=self.network.messages,
            given=self.given,
        )

    def _heal(self) -> None:
        self.nemesis.rest()
        self.network.heal()
        leaders = self.leaders()
        if leaders and self.world.rng.random() < 0.5:
            self.world.rng.choice(leaders).die("killed")
        for number in range(self.plan.size):
            member = self.members[number]
            if member is not None and member.alive:
                member.resume()
            elif self.world.rng.random() < 0.5 or len(self.living()) < self.plan.fleet(None).needed:
                self._start(number)
        for number, count in enumerate(self.plan.candidates):
            # Of those that want to lead, one is alive, and so are as many as are needed.
            if count and not any(member.candidates for member in self.living()):
                self._start(number)
        while len(self.living()) < self.plan.fleet(None).needed:
            self._start(next(n for n in range(self.plan.size) if (m := self.members[n]) is None or not m.alive))
        self.world.run(max(self.world.now, self.network.latest))
        self._cut_for_good()
        self.world.log("fault", "no more")

    def _cut_for_good(self) -> None:
        """Leave one link cut for ever, in one direction, where more live than are needed: there must be a leader."""
        rng = random.Random(self.world.seed)  # its own, so that the run up to here is the same without it
        living = [member.number for member in self.living()]
        if self.plan.quorum == "majority" and len(living) > self.plan.fleet(None).needed and rng.random() < 0.5:
            source, to = rng.sample(living, 2)
            self.network.dead.add((source, to))
            self.world.log("fault", f"{source} never reaches {to} any more")

    def living(self) -> list[Member]:
        """Return the members that run."""
        return [member for member in self.members if member is not None and member.alive]

    def leaders(self) -> list[Member]:
        """Return the members in which a candidate leads."""
        return [member for member in self.living() if member.leader() is not None]

    def _recover(self, until: float) -> float:
        """Go on until exactly one leads, and see that this lasts; return since when it does."""
        step = self.plan.timing.retry_every / 4
        since: float | None = None
        last = None
        while self.world.now < until:
            self.world.run(self.world.now + step)
            leaders = self.leaders()
            now = leaders[0] if len(leaders) == 1 else None
            if now is None or now is not last:
                since = self.world.now if now is not None else None
            last = now
        if len(leaders := self.leaders()) != 1:
            kind = "no leader" if not leaders else "many leaders"
            self.checkers.violated(kind, f"{[member.name for member in leaders]} lead after {until:.1f} s")
        work = last.leader() if last else None
        self.world.run(self.world.now + 2 * self.plan.timing.ttl)
        if last is not None and (self.leaders() != [last] or last.leader() is not work):
            self.checkers.violated("unstable", f"{last.name} lost its term after the faults")
        return since if since is not None else until
