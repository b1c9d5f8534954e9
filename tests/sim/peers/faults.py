"""Faults of members and of the network between them."""

from __future__ import annotations

from typing import Protocol

from tenure._backends.peers import machine as peers
from tenure._election import effects as election_effects
from tenure.testing._sim.nemesis import Breakable, Nemesis, Victim
from tests.sim.peers.member import NAME, Member
from tests.sim.peers.network import PeerNetwork
from tests.sim.peers.plan import Plan


class FleetRun(Breakable, Protocol):
    """The run, as its nemesis sees it."""

    @property
    def plan(self) -> Plan: ...
    @property
    def network(self) -> PeerNetwork: ...
    def living(self) -> list[Member]: ...
    def leaders(self) -> list[Member]: ...


class PeerNemesis(Nemesis):
    """Break the members of a fleet, and the network between them."""

    def __init__(self, run: FleetRun) -> None:
        super().__init__(run)
        self._fleet = run
        self._hosts = range(run.plan.size)
        self._cut = run.network.cut

    def _victim(self) -> Member | None:
        living, leaders = self._fleet.living(), self._fleet.leaders()
        if not living:
            return None
        return self._rng.choice(leaders if leaders and self._rng.random() < 0.6 else living)

    # --- of a member ---

    def _kill(self, victim: Victim) -> None:
        victim.die("killed")
        # A member that restarts at once has lost its promises, and they have not run out.
        delay = self._for(1.5) if self._rng.random() < 0.7 else 0.0
        self._world.after(delay, self._fleet.restart, victim.number)

    def _kill_all(self, member: Member) -> None:
        if self._rng.random() < 0.3:
            for each in self._fleet.living():
                self._kill(each)

    def _forget(self, member: Member) -> None:
        """A follower is cut off from the leader, another forgets its promise: would both elect anew?"""
        followers = [each for each in self._fleet.living() if each not in self._fleet.leaders()]
        if len(followers) < 2 or not self._fleet.leaders():
            return
        leader = self._fleet.leaders()[0]
        cut, forgets = self._rng.sample(followers, 2)
        for ways in ((leader.number, cut.number), (cut.number, leader.number)):
            self._cut(*ways, 2.5 * self._plan.timing.ttl)
        self._world.after(self._for(1.5), self._begin_anew, forgets)

    def _begin_anew(self, member: Member) -> None:
        if member.alive and not self._resting:
            member.die("killed")
            self._fleet.restart(member.number)

    def _resign(self, member: Member) -> None:
        for each in member.candidates:
            member.do(each.feed, election_effects.Resign())

    def _ask_to_resign(self, member: Member) -> None:
        member.do(member.ask, None, 0, lambda number: peers.AskToResign(number, NAME))

    def _stop(self, member: Member) -> None:
        for each in member.candidates:
            member.do(each.feed, election_effects.Stop())
            member.do(each.feed, election_effects.Resign())
        self._kill(member)

    # --- of the network ---

    def _cut_one_way(self, member: Member) -> None:
        for other in self._hosts:
            if other != member.number and self._rng.random() < 0.7:
                ways = [(member.number, other), (other, member.number)]
                self._cut(*self._rng.choice(ways), self._for(2.5))

    def _cut_off(self, member: Member) -> None:
        seconds = self._for(2.5)
        for other in self._hosts:
            self._cut(member.number, other, seconds)
            self._cut(other, member.number, seconds)

    def _partition(self, member: Member) -> None:
        seconds = self._for(2.5)
        side = {number for number in self._hosts if self._rng.random() < 0.5}
        for a in self._hosts:
            for b in self._hosts:
                if (a in side) != (b in side):
                    self._cut(a, b, seconds)
