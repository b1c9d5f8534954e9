"""What must hold of a fleet, looked at from outside and collected: nothing is asserted inside a run.

================  =====================================================================================================
``two leaders``   with a quorum, two candidates trusted a term at one true moment
``token order``   with a quorum, a later term had no higher token
``old term``      with a quorum, a term went on after a newer one had begun
``late release``  a lease went back while its work ran
``machine``       a machine raised, or answered twice
``no leader``     nobody led, although the faults had been over for long enough
``many leaders``  more than one led then
``unstable``      a leader lost its term, long after the faults were over
================  =====================================================================================================
"""

from __future__ import annotations

from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR, World
from tests.sim.peers.member import Candidate, Work
from tests.sim.peers.plan import Plan


class Checkers(Findings):
    """Watch one run."""

    def __init__(self, world: World, plan: Plan) -> None:
        super().__init__(world)
        self.plan = plan
        self.elections = 0
        self._beliefs: dict[Candidate, float] = {}
        self._newest = -1

    def began(self, candidate: Candidate, work: Work) -> None:
        self.elections += 1
        self.world.log(candidate.name, f"leads, {work.grant}")
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
