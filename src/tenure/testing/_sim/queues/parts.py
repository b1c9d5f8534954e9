"""The classes that a run of queues is made of."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._queue.locks import Locks
from tenure._queue.pump import Pump
from tenure._queue.session_pump import SessionPump
from tenure.testing._sim.queues.broker import SimulatedBroker
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.workers import Workers


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes that a run is made of; a planted bug swaps some of them."""

    pump: type[Pump] = Pump
    session_pump: type[SessionPump] = SessionPump
    locks: type[Locks] = Locks
    broker: type[SimulatedBroker] = SimulatedBroker
    consumer: type[Consumer] = Consumer
    workers: type[Workers] = Workers
    """Of consumers of messages."""
    session_workers: type[Workers] = Workers
    """Of consumers of sessions."""
