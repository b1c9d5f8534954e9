"""Faults of consumers, of their network, and of the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tenure.testing._sim.nemesis import StoreNemesis, WithStore
from tenure.testing._sim.queues.broker import SimulatedBroker
from tenure.testing._sim.queues.broker_server import BrokerServer
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.plan import BLOCKS_MAX, Plan


class QueueRun(WithStore, Protocol):
    """The run, as its nemesis sees it."""

    @property
    def plan(self) -> Plan: ...
    @property
    def server(self) -> BrokerServer: ...
    @property
    def consumers(self) -> Sequence[Consumer]: ...
    def restart_later(self, number: int) -> None: ...


class QueueNemesis(StoreNemesis):
    """Break consumers, the network, the broker."""

    def __init__(self, run: QueueRun) -> None:
        super().__init__(run)
        self._queue_run = run

    def _victim(self) -> Consumer | None:
        living = [consumer for consumer in self._queue_run.consumers if consumer.running]
        for busy in ([one for one in living if one.buffered], [one for one in living if one.works]):
            if busy and self._rng.random() < 0.5:
                return self._rng.choice(busy)
        return self._rng.choice(living) if living else None

    # --- of a consumer ---

    def _block(self, consumer: Consumer) -> None:
        consumer.block(self._for(BLOCKS_MAX))

    def _drain(self, consumer: Consumer) -> None:
        consumer.drain(self._queue_run.plan.grace)
        self._queue_run.restart_later(consumer.number)

    def _stop(self, consumer: Consumer) -> None:
        consumer.drain(0.0)
        self._queue_run.restart_later(consumer.number)

    def _shut_down(self, consumer: Consumer) -> None:
        seconds = self._for(1.0)
        consumer.block(seconds)
        self.hung(consumer, seconds)

    def hung(self, consumer: Consumer, seconds: float) -> None:
        """An overloaded host hangs for *seconds*, then receives nothing either; an operator stops it."""
        if "shut_down" not in self._plan.faults or self._rng.random() < 0.5:
            return
        cut_from = self._rng.uniform(0.2, 0.35) * self._plan.timing.ttl
        if cut_from < seconds:
            cut, host = self._network.cut_down, consumer.number
            self._world.after(cut_from, self._later, lambda _: cut.add(host), consumer)
            self._world.after(seconds, cut.discard, host)
        self._world.after(self._rng.random() * seconds, self._later, self._drain, consumer)

    def _later(self, way: Callable[[Consumer], object], consumer: Consumer) -> None:
        if not self._resting and consumer.running:
            way(consumer)

    def _pause_claims(self, consumer: Consumer) -> None:
        consumer.pause_claims()
        self._world.after(self._for(2.0), consumer.resume_claims)

    def _false_hint(self, consumer: Consumer) -> None:
        for _ in range(self._rng.randint(1, 5)):
            consumer.hint()

    # --- of user code ---

    def _error_hook_raises(self, consumer: Consumer) -> None:
        self._error_hook(consumer, "raises")

    def _error_hook_lasts(self, consumer: Consumer) -> None:
        self._error_hook(consumer, "lasts")

    def _error_hook_blocks(self, consumer: Consumer) -> None:
        self._error_hook(consumer, "blocks")

    def _error_hook_interrupts(self, consumer: Consumer) -> None:
        self._error_hook(consumer, "interrupts")

    def _error_hook(self, consumer: Consumer, does: str) -> None:
        consumer.workers.error_hook = does
        self._world.after(self._for(2.0), setattr, consumer.workers, "error_hook", "")

    def _event_hook_raises(self, consumer: Consumer) -> None:
        self._event_hook(consumer, "raises")

    def _event_hook_blocks(self, consumer: Consumer) -> None:
        self._event_hook(consumer, "blocks")

    def _event_hook(self, consumer: Consumer, does: str) -> None:
        consumer.workers.event_hook = does
        self._world.after(self._for(2.0), setattr, consumer.workers, "event_hook", "")

    # --- of the broker ---

    def _store_full(self, consumer: Consumer) -> None:
        self._broker.full_until = self._world.now + self._for(1.0)

    def _store_away(self, consumer: Consumer) -> None:
        self._broker.away_until = self._world.now + self._for(0.5)

    def _store_waits(self, consumer: Consumer) -> None:
        self._queue_run.server.wait(self._for(0.5))

    def _cut_one(self, consumer: Consumer) -> None:
        """Let another transaction hold the row of a message, perhaps for longer than its lock."""
        mine = list(consumer.sequences())
        if mine:
            self._broker.cut_until[self._rng.choice(mine)] = self._world.now + self._for(1.2)

    @property
    def _broker(self) -> SimulatedBroker:
        return self._queue_run.server.broker

    def _store_restarts(self, consumer: Consumer) -> None:
        seconds = self._for(0.3)
        self._server.go_down(seconds, refuses=True)
        self._world.after(seconds, self._queue_run.server.hint)  # consumers subscribe again, and look
