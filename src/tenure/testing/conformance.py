"""Suites that every backend passes: write a harness and two lines for each suite, and run them with pytest.

::

    class TestMyLeases(LeaseStoreSuite):
        harness = MyHarness


    class TestMyLeaseFaults(LeaseFaultSuite):
        harness = MyHarness


    class TestMyLeaseQueue(LeaseQueueSuite):  # only if the store has a queue: ``traits.queued``
        harness = MyHarness


    class TestMyLeaseCost(LeaseCostSuite):
        harness = MyHarness


    class TestMyLeaseRest(LeaseRestSuite):
        harness = MyHarness


    class TestMyLeaseCapacity(LeaseCapacitySuite):
        harness = MyHarness


    class TestMyPartitions(PartitionSuite):
        harness = MyHarness


    class TestMyQueues(BrokerSuite):
        harness = MyQueueHarness


    class TestMyLiveMessages(LiveMessagesSuite):
        harness = MyQueueHarness


    class TestMyQueueFaults(BrokerFaultSuite):
        harness = MyQueueHarness


    class TestMyQueueCost(BrokerCostSuite):
        harness = MyQueueHarness


    class TestMyQueueCapacity(BrokerCapacitySuite):
        harness = MyQueueHarness


    class TestMyLocks(LockExpirySuite):
        harness = MyQueueHarness


    class TestMyConsumers(ConsumerSuite):
        harness = MyQueueHarness


    class TestMyStoredAgain(StoredAgainSuite):
        harness = MyQueueHarness


    class TestMyShortUse(ShortUseSuite):
        harness = MyQueueHarness

They need pytest and pytest-asyncio. Tests are chosen by the store's traits, and by the faults the harness can make.
"""

from tenure._public import publish_all
from tenure.testing._conformance.cost import Scale
from tenure.testing._conformance.harness import (
    Deviation,
    Fault,
    FaultyBroker,
    FaultyLeaseStore,
    GiveUp,
    LeaseHarness,
    QueueHarness,
)
from tenure.testing._conformance.leases.capacity import LeaseCapacitySuite
from tenure.testing._conformance.leases.cost import LeaseCostSuite
from tenure.testing._conformance.leases.faults import LeaseFaultSuite
from tenure.testing._conformance.leases.partitions import PartitionSuite
from tenure.testing._conformance.leases.rest import LeaseRestSuite
from tenure.testing._conformance.leases.suite import LeaseStoreSuite
from tenure.testing._conformance.leases.waiting import LeaseQueueSuite
from tenure.testing._conformance.queues.capacity import BrokerCapacitySuite
from tenure.testing._conformance.queues.consumers import ConsumerSuite
from tenure.testing._conformance.queues.cost import BrokerCostSuite
from tenure.testing._conformance.queues.faults import BrokerFaultSuite
from tenure.testing._conformance.queues.live import LiveMessagesSuite
from tenure.testing._conformance.queues.locks import LockExpirySuite
from tenure.testing._conformance.queues.short_use import ShortUseSuite
from tenure.testing._conformance.queues.stored_again import StoredAgainSuite
from tenure.testing._conformance.queues.suite import BrokerSuite

__all__ = [
    "BrokerCapacitySuite",
    "BrokerCostSuite",
    "BrokerFaultSuite",
    "BrokerSuite",
    "ConsumerSuite",
    "Deviation",
    "Fault",
    "FaultyBroker",
    "FaultyLeaseStore",
    "GiveUp",
    "LeaseCapacitySuite",
    "LeaseCostSuite",
    "LeaseFaultSuite",
    "LeaseHarness",
    "LeaseQueueSuite",
    "LeaseRestSuite",
    "LeaseStoreSuite",
    "LiveMessagesSuite",
    "LockExpirySuite",
    "PartitionSuite",
    "QueueHarness",
    "Scale",
    "ShortUseSuite",
    "StoredAgainSuite",
]

publish_all(__name__)
