"""The classes that a run of queues is made of."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._queue.locks import Locks
from tenure._queue.pump import Pump
from tenure._queue.session_pump import SessionPump
from tenure.testing._sim.queues.broker import SimulatedBroker
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.session_consumer import SessionConsumer


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes that a run is made of; a planted bug swaps one of them."""

    pump: type[Pump] = Pump
    locks: type[Locks] = Locks
    broker: type[SimulatedBroker] = SimulatedBroker
    consumer: type[Consumer] = Consumer
    session_pump: type[SessionPump] = SessionPump
    session_consumer: type[SessionConsumer] = SessionConsumer
