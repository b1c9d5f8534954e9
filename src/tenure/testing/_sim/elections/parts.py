"""The classes that a run of elections is made of."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._election.machine import Machine
from tenure.testing._sim.client import Client
from tenure.testing._sim.elections.node import Node
from tenure.testing._sim.elections.queued_store import QueuedStore
from tenure.testing._sim.elections.stores import ClockStore, WatchedStore


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes that a run is made of; a planted bug swaps one of them."""

    machine: type[Machine] = Machine
    node: type[Node] = Node
    client: type[Client[Node]] = Client
    clock_store: type[ClockStore] = ClockStore
    watched_store: type[WatchedStore] = WatchedStore
    queued_store: type[QueuedStore] = QueuedStore
    shares_identity: bool = False
