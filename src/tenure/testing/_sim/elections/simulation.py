"""One run from its seed to its report: faults; then none, and a leader is demanded; then a stop and silence."""

from __future__ import annotations

import math
import random

from tenure._election.effects import Resign, Stop
from tenure._election.machine import State
from tenure._timing import Timing
from tenure.testing._sim.elections.checkers import Checkers
from tenure.testing._sim.elections.faults import ElectionNemesis
from tenure.testing._sim.elections.lease_server import LeaseServer, Resource
from tenure.testing._sim.elections.node import Node
from tenure.testing._sim.elections.parts import Parts
from tenure.testing._sim.elections.plan import OLDEST_STABLE, Plan, draw
from tenure.testing._sim.elections.queued_store import QueuedStore
from tenure.testing._sim.elections.stores import ClockStore
from tenure.testing._sim.network import SPREAD_MAX, StoreNetwork
from tenure.testing._sim.report import Report, outcome_of
from tenure.testing._sim.world import SkewedClock, World

IGNORES_MAX = 1.5
"""Work that ignores its cancellation does so for this many ttls at most."""

WATCHED_TO_END = 0.25
"""The share of the runs that are watched to the end of the bound; in the others, the first leader is enough."""

USER_SEEDS = 711_251_000
"""Added to a seed, it seeds the misbehaviour of user code: the kept seeds draw none, and stay the runs they were."""

QUEUE_SEEDS = 65_001
"""Added to a seed, it seeds whether the store has a queue: none of the kept seeds has one."""
AGE_SEEDS = 9_203_112
"""Added to a seed, it seeds whether grants count from before their requests, which those of the kept seeds don't."""
CUT_SEEDS = 31_100
"""Added to a seed, it seeds whether a host stays half cut after the faults, which none of the kept seeds has."""


def leader_within(
    timing: Timing, *, latency: float, ignores: float, watched: bool, queued: bool = False, half_cut: bool = False
) -> float:
    """Return the number of seconds after the last fault within which a candidate leads, and goes on leading.

    The sum of what may have to happen one after the other, each at its worst:

    1. ``renew_every`` and two ``retry_every``: every question that is under way ends, and its asker asks again. Only
       now may a leader learn that it was asked to resign, and with that answer its lease was extended once more.
    2. ``ttl``: the lease of a candidate that leaves, was killed, or never got its grant runs out. A watched store needs
       two: a watcher may see the last change only when it looks, and has to watch a whole ``ttl`` from there. With a
       candidate that is half cut, once more: it leads until its trust ends, and all its renewals arrive; or it gets the
       free name by its last request.
    3. *ignores*: the only candidate that is left may be busy with work that does not stop.
    4. two ``retry_every`` of handing back, and 2.4 of standing back for others afterwards.
    5. 1.2 ``retry_every`` until the next look, and one more if two looks met and one of them lost. In a queue,
       candidates look every ``renew_every``.

    Candidates count on clocks that may be slower than the store's by ``drift``, so all of it may take longer by that.
    Every step may wait for two messages of *latency* seconds.

    Args:
        latency: The longest that a message takes once the faults are over.
        ignores: The longest that work ignores its cancellation.
        watched: Whether expiry is judged by watching the record.
        queued: Whether candidates stand in a queue.
        half_cut: Whether one of them gets no answers all the while; it doesn't count as one that leads.
    """
    asks_again = timing.renew_every + 2.0 * timing.retry_every
    runs_out = timing.ttl * (2.0 if watched else 1.0) * (2.0 if half_cut else 1.0)
    hands_back = (2.0 + 2.4) * timing.retry_every
    looks = 2.0 * 1.2 * timing.retry_every + (timing.renew_every if queued else 0.0)
    return (asks_again + runs_out + ignores + hands_back + looks) / (1.0 - timing.drift) / 0.9 + 10.0 * latency


class Simulation:
    """One run.

    Args:
        seed: Decides everything.
        parts: What it is made of.
        mutant: The name of the planted bug in *parts*, for the report.
        trace: Whether to keep a log that a human can read.
    """

    name = "n"

    def __init__(
        self, seed: int, *, parts: Parts | None = None, mutant: str | None = None, trace: bool = False
    ) -> None:
        self.mutant = mutant
        self.parts = parts or Parts()
        self.machine_type = self.parts.machine
        self.world = World(seed, trace=trace)
        users, queues, ages, self._cuts = (
            random.Random(each + seed) for each in (USER_SEEDS, QUEUE_SEEDS, AGE_SEEDS, CUT_SEEDS)
        )
        self.plan: Plan = draw(self.world.rng, users, queues, ages, self._cuts)
        self.checkers = Checkers(self.world, self.plan)
        self.network = StoreNetwork(self.world, self.plan.conditions, self.plan.timing)
        clock = SkewedClock(self.plan.store_rate, self.world.rng.uniform(0.0, 1000.0))
        self.store = self._store_type()(self.world, self.plan, clock, ages, self.name)
        if isinstance(self.store, QueuedStore):
            self.store.on_end = self._place_ended
        self.resource = Resource(self)
        self.server = LeaseServer(self)
        self.nemesis = ElectionNemesis(self)
        self.healed = False
        self.closing = False
        self._undisturbed_from = math.inf  # a ttl after the last fault
        self.ignores_max = IGNORES_MAX * self.plan.timing.ttl
        self._starts = 0
        pairs = zip(self.plan.rates, self.plan.offsets, strict=True)
        self._clocks = [SkewedClock(rate, offset) for rate, offset in pairs]
        self.nodes: list[Node] = [self._start(number) for number in range(self.plan.nodes)]

    def _store_type(self) -> type[ClockStore]:
        if self.plan.watched:
            return self.parts.watched_store
        return self.parts.queued_store if self.plan.queued else self.parts.clock_store

    def _place_ended(self, holder: str) -> None:
        if self.world.now > self._undisturbed_from:
            self.checkers.place_ended(self._healthy(), holder)

    # --- starts ---

    def _start(self, number: int) -> Node:
        self._starts += 1
        name = "same" if self.parts.shares_identity else f"{'abcdefg'[number]}{self._starts}"
        return self.parts.node(self, number, name, self._clocks[number])

    def restart(self, number: int) -> None:
        """Start a new process on the host *number*, if it has none."""
        if not self.nodes[number].alive and not self.closing:
            self.nodes[number] = self._start(number)

    def restart_later(self, number: int) -> None:
        """Start the process again when it has ended; once the faults are over, only if no other candidate is left."""
        timing = self.plan.timing
        wait = timing.retry_every / 4 if self.healed else self.world.rng.random() * timing.ttl
        self.world.after(wait, self._replace, self.nodes[number])

    def _replace(self, node: Node) -> None:
        if self.nodes[node.number] is not node or self.closing:
            return
        # The last candidate may leave after the faults, too: its work overruns, or has ended for good.
        if (node.alive and not node.machine.is_finished) or (self.healed and self._has_candidate()):
            self.restart_later(node.number)
            return
        node.die("gone")
        self.restart(node.number)

    # --- phases ---

    def run(self) -> Report:
        """Run it from beginning to end."""
        self.nemesis.begin()
        self.world.run(self.plan.seconds)
        self._heal()
        bound = leader_within(
            self.plan.timing,
            latency=SPREAD_MAX * self.network.usual,
            ignores=self.ignores_max,
            watched=self.plan.watched,
            queued=self.plan.queued,
            half_cut=self.plan.half_cut,
        )
        recovery = self._recover(bound)
        if self.world.rng.random() < WATCHED_TO_END:
            self._watch_to_end(bound - recovery)
        self._stop()
        return outcome_of(
            self.checkers,
            Report,
            mutant=self.mutant,
            setting=self.plan,
            recovery=recovery,
            bound=bound,
            elections=self.checkers.elections,
        )

    def _heal(self) -> None:
        """End all faults, but perhaps one cut, and wait until every delayed message has arrived."""
        self.healed = True
        self.nemesis.rest()
        self.network.heal()
        self.server.heal()
        self.store.oldest = min(self.store.oldest, OLDEST_STABLE)
        leader = self.leader()
        if leader is not None and self.world.rng.random() < 0.6:
            leader.die("killed at the last moment")
        for number, node in enumerate(self.nodes):
            node.resume()
            node.unstall()
            node.set_health("")
            node.event_hook = ""
            if not node.alive and self.world.rng.random() < 0.5:
                self.restart(number)
        if self.plan.half_cut:
            self._cut_in_half()
        if not self._has_candidate():
            number = 1 if self.network.half_cut == 0 else 0
            self.nodes[number].die("gone")
            self.restart(number)
        self.world.run(max(self.world.now, self.network.latest))
        self._undisturbed_from = self.world.now + 1.2 * self.plan.timing.ttl
        if self.world.traced:
            self.world.log("fault", "no more")

    def _cut_in_half(self) -> None:
        """Lose all answers to one host, from now on: the leader's, or more often another one's."""
        leads = self._cuts.random() < 0.3
        hosts = [node.number for node in self.nodes if (node.work is not None) is leads]
        self.network.half_cut = self._cuts.choice(hosts or range(self.plan.nodes))

    def _healthy(self) -> list[Node]:
        return [node for node in self.nodes if node.number != self.network.half_cut]

    def _has_candidate(self) -> bool:
        """Return whether a process runs that may lead."""
        return any(node.alive and not node.told_to_stop for node in self._healthy())

    def leader(self) -> Node | None:
        """Return the node that leads by the store and by itself, and has no reason to leave."""
        for node in self._healthy():
            work = node.work
            if work is not None and not work.is_cancelled and self.store.held() and self.store.same(work.grant):
                return node
        return None

    def _recover(self, bound: float) -> float:
        """Go on until a candidate leads; return how long it took."""
        healed = self.world.now
        step = self.plan.timing.retry_every / 4
        if not self.world.run_until(lambda: self.leader() is not None, step=step, end=healed + bound):
            self.checkers.no_leader(bound)
        return self.world.now - healed

    def _watch_to_end(self, left: float) -> None:
        """Go on to the end of the bound and for a while longer: a leader has no reason then to lose its term."""
        self.world.run(self.world.now + left)
        leader = self.leader()
        if leader is None:
            self.checkers.unstable("the first leader after the faults did not last")
        work = leader.work if leader is not None else None
        self.world.run(self.world.now + 1.2 * self.plan.timing.ttl)
        if leader is not None and (leader.work is not work or leader is not self.leader()):
            self.checkers.unstable(f"{leader.name} lost its term after the faults")

    def _stop(self) -> None:
        """Stop all, and wait until all is silent."""
        self.closing = True
        for node in self.nodes:
            node.feed(Stop())
            node.feed(Resign())
        timing = self.plan.timing
        longest = self.ignores_max + timing.ttl + 3.0 * timing.retry_every + self.plan.patience
        self.world.run_until(self._silent, step=timing.retry_every, end=self.world.now + 1.3 * longest)
        for node in self.nodes:
            if node.alive and not (node.machine.is_finished and node.machine.state is State.STOPPED):
                self.checkers.unsettled(node)

    def _silent(self) -> bool:
        return all(node.machine.is_finished for node in self.nodes if node.alive)
