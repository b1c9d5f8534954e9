"""One run from its seed to its report: faults; then none, and an empty queue is demanded; then a stop and silence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tenure._queue.hooks import HOOK_MAX
from tenure.testing._sim.network import SPREAD_MAX, StoreNetwork
from tenure.testing._sim.queues.broker_server import BrokerServer
from tenure.testing._sim.queues.checkers import MessageCheckers
from tenure.testing._sim.queues.consumer import Consumer, Kind
from tenure.testing._sim.queues.faults import QueueNemesis
from tenure.testing._sim.queues.oracle import Oracle
from tenure.testing._sim.queues.parts import Parts
from tenure.testing._sim.queues.plan import IGNORES_MAX, Plan, draw, settled_within
from tenure.testing._sim.queues.producer import Producer
from tenure.testing._sim.queues.session_checkers import SessionCheckers
from tenure.testing._sim.queues.session_oracle import SessionOracle
from tenure.testing._sim.report import Findings, QueueReport, outcome_of
from tenure.testing._sim.world import SkewedClock, World

LAST_BATCH = 3
"""So many messages are sent after the faults: in a queue without messages, nothing would show that it is stuck."""

STORE_SEEDS = 320_000_000
"""Added to a seed, it seeds the faults of the store: the kept seeds draw none, and stay the runs they were."""

USER_SEEDS = 603_270_000
"""The same, for the misbehaviour of user code."""

SESSION_SEEDS = 63_000_189
"""The same, for sessions."""

LIMIT_SEEDS = 77_401_557
"""The same, for the limits of the queue."""


class Simulation:
    """One run.

    Args:
        seed: Decides everything.
        parts: What it is made of.
        mutant: The name of the planted bug in *parts*, for the report.
        trace: Whether to keep a log that a human can read.
    """

    def __init__(
        self, seed: int, *, parts: Parts | None = None, mutant: str | None = None, trace: bool = False
    ) -> None:
        self.mutant = mutant
        self.parts = parts or Parts()
        self.world = World(seed, trace=trace)
        self.plan: Plan = draw(
            self.world.rng,
            random.Random(STORE_SEEDS + seed),
            random.Random(USER_SEEDS + seed),
            random.Random(SESSION_SEEDS + seed),
            random.Random(LIMIT_SEEDS + seed),
        )
        clock = SkewedClock(self.plan.broker_rate, self.world.rng.uniform(0.0, 1000.0))
        self.network = StoreNetwork(self.world, self.plan.conditions, self.plan.timing)
        self.findings = Findings(self.world)
        self.oracle = Oracle(self.findings, clock, self.plan.max_deliveries, self.plan.limits)
        self.checkers = MessageCheckers(self.findings, self.plan, self.oracle)
        self.session_oracle = SessionOracle(self.oracle)
        self.session_checkers = SessionCheckers(self.findings, self.plan, self.oracle, self.session_oracle)
        self.consumers: list[Consumer] = []
        self.server = BrokerServer(self, clock, self.parts.broker)
        self.nemesis = QueueNemesis(self)
        self.healed = False
        self.closing = False
        self.ignores_max = IGNORES_MAX * self.plan.timing.ttl
        self._kinds = self._make_kinds()
        self._starts = 0
        hosts = (self.plan, self.plan.sessions) if self.plan.sessions else (self.plan,)
        pairs = [pair for one in hosts for pair in zip(one.rates, one.offsets, strict=True)]
        self._clocks = [SkewedClock(rate, offset) for rate, offset in pairs]
        self.consumers += [self._start(number) for number in range(len(pairs))]
        true = SkewedClock(1.0, 0.0)
        numbers = range(self.plan.producers)
        self.producers = [Producer(self, 100 + number, f"p{number}", true) for number in numbers]

    def _make_kinds(self) -> tuple[Kind, Kind]:
        """Return what consumers of messages and consumers of sessions are."""
        parts, settings, sessions = self.parts, self.plan.settings, self.plan.sessions
        in_sessions = replace(settings, concurrency=sessions.concurrency if sessions else 1)
        return (
            Kind(parts.pump, parts.workers, settings, self.checkers),
            Kind(parts.session_pump, parts.session_workers, in_sessions, self.session_checkers),
        )

    # --- starts ---

    def _start(self, number: int) -> Consumer:
        """Start a consumer of messages on the first hosts, one of sessions on the others."""
        self._starts += 1
        name, clock = f"{'abcdefghi'[number]}{self._starts}", self._clocks[number]
        kind = self._kinds[number >= self.plan.consumers]
        return self.parts.consumer(self, kind, number, name, clock)

    def restart(self, number: int) -> None:
        """Start a new process on the host *number*, if none runs there."""
        if not self.consumers[number].running and not self.closing:
            self.consumers[number] = self._start(number)

    def restart_later(self, number: int) -> None:
        """Start the process again, after a while."""
        self.world.after(self.world.rng.random() * self.plan.timing.ttl, self._replace, self.consumers[number])

    def _replace(self, consumer: Consumer) -> None:
        if self.consumers[consumer.number] is not consumer or self.healed:
            return
        if consumer.running:
            self.restart_later(consumer.number)
            return
        consumer.die("gone")
        self.restart(consumer.number)

    def hung(self, consumer: Consumer, seconds: float) -> None:
        """Let the nemesis use that *consumer* hangs for *seconds*."""
        self.nemesis.hung(consumer, seconds)

    # --- phases ---

    def run(self) -> QueueReport:
        """Run it from beginning to end."""
        for producer in self.producers:
            producer.begin()
        self.nemesis.begin()
        self.world.run(self.plan.seconds)
        self._heal()
        bound = self._bound()
        recovery = self._recover(bound)
        self._rest()
        self._stop()
        now = self.server.clock.now()
        self.oracle.audit(self.server.stats(), self.server.dead(), now)
        self.session_oracle.audit(self.server.state_of, now)
        return outcome_of(
            self.findings,
            QueueReport,
            mutant=self.mutant,
            setting=self.plan,
            recovery=recovery,
            bound=bound,
            messages=self.oracle.acknowledged,
            deliveries=self.oracle.deliveries,
            sessions=len(self.session_oracle.sessions),
        )

    def _heal(self) -> None:
        """End all faults, and wait until every delayed message has arrived."""
        self.healed = True
        self.nemesis.rest()
        self.network.heal()
        self.server.heal()
        for number, consumer in enumerate(self.consumers):
            if consumer.running and self.world.rng.random() < 0.2:
                consumer.die("killed at the last moment")
            consumer.workers.error_hook = consumer.workers.event_hook = ""
            consumer.resume()
            consumer.resume_claims()
            if not consumer.running and self.world.rng.random() < 0.5:
                self.restart(number)
        kinds = [self.consumers[: self.plan.consumers], self.consumers[self.plan.consumers :]]
        for first in [kind[0] for kind in kinds if kind and not self._at_work(kind)]:
            first.die("gone")
            self.restart(first.number)
        for producer in self.producers:
            producer.send(LAST_BATCH)
        self.world.run(max(self.world.now, self.network.latest))
        if self.world.traced:
            self.world.log("fault", "no more")

    def _at_work(self, consumers: Sequence[Consumer]) -> int:
        return sum(consumer.running and not consumer.draining for consumer in consumers)

    def _bound(self) -> float:
        stats = self.server.stats()
        return settled_within(
            self.plan,
            latency=SPREAD_MAX * self.network.usual,
            messages=stats.ready + stats.locked + stats.delayed + LAST_BATCH * self.plan.producers,
            consumers=max(1, self._at_work(self.consumers[: self.plan.consumers])),
            in_session=self.server.most_in_session() + (LAST_BATCH * self.plan.producers if self.plan.sessions else 0),
        )

    def _is_drained(self) -> bool:
        stats = self.server.stats()
        under_way = any(producer.waiting for producer in self.producers)
        return not (under_way or stats.ready or stats.locked or stats.delayed or stats.deferred)

    def _recover(self, bound: float) -> float:
        """Go on until everything is settled; return how long it took."""
        healed = self.world.now
        step = self.plan.timing.retry_every / 2
        if not self.world.run_until(self._is_drained, step=step, end=healed + bound):
            what = f"{self.server.stats()}, {bound:.1f} s after the faults were over"
            self.findings.violated("not drained", what)
        return self.world.now - healed

    def _rest(self) -> None:
        """Wait until the last answers have come: then no consumer has anything left."""
        timing = self.plan.timing
        longest = max(self.plan.patience, timing.ttl) + 2.0 * timing.retry_every
        if "error_hook_lasts" in self.plan.faults:
            longest += HOOK_MAX
        self.world.run(self.world.now + 1.3 * longest)
        for consumer in self.consumers:
            if consumer.running:
                consumer.checkers.has_slots(consumer)
        if self._is_drained():
            for consumer in self.consumers:
                if consumer.running:
                    consumer.checkers.rests(consumer)

    def _stop(self) -> None:
        """Drain all, and wait until all is silent."""
        self.closing = True
        for consumer in self.consumers:
            consumer.drain(self.plan.grace)
        timing = self.plan.timing
        longest = self.ignores_max + self.plan.grace + timing.ttl + 3.0 * timing.retry_every + self.plan.patience
        self.world.run_until(self._is_silent, step=timing.retry_every, end=self.world.now + 1.3 * longest)
        for consumer in self.consumers:
            if consumer.alive and not consumer.stopped:
                consumer.checkers.not_stopped(consumer)

    def _is_silent(self) -> bool:
        return not any(consumer.running for consumer in self.consumers)
