"""Suites that every backend passes: write a harness and two lines, and they say whether the backend is done.

::

    class TestMyLeases(LeaseStoreSuite):
        harness = MyHarness


    class TestMyLeaseFaults(LeaseFaultSuite):
        harness = MyHarness


    class TestMyLeaseCost(LeaseCostSuite):
        harness = MyHarness


    class TestMyLeaseStrain(LeaseStrainSuite):
        harness = MyHarness


    class TestMyQueues(BrokerSuite):
        harness = MyQueueHarness


    class TestMyLiveMessages(LiveSuite):
        harness = MyQueueHarness


    class TestMyQueueFaults(BrokerFaultSuite):
        harness = MyQueueHarness


    class TestMyQueueCost(BrokerCostSuite):
        harness = MyQueueHarness


    class TestMyQueueStrain(BrokerStrainSuite):
        harness = MyQueueHarness


    class TestMyLocks(LockSuite):
        harness = MyQueueHarness


    class TestMyConsumers(ConsumerSuite):
        harness = MyQueueHarness

They need pytest and pytest-asyncio. Tests are chosen by the store's traits, and by the faults the harness can make.
"""

from tenure._public import publish_all
from tenure.testing._conformance.cost import Scale
from tenure.testing._conformance.harness import (
    Fault,
    GiveUp,
    LeaseHarness,
    Lossy,
    LossyBroker,
    QueueHarness,
)
from tenure.testing._conformance.leases.cost import LeaseCostSuite
from tenure.testing._conformance.leases.faults import LeaseFaultSuite
from tenure.testing._conformance.leases.strain import LeaseStrainSuite
from tenure.testing._conformance.leases.suite import LeaseStoreSuite
from tenure.testing._conformance.queues.consumers import ConsumerSuite
from tenure.testing._conformance.queues.cost import BrokerCostSuite
from tenure.testing._conformance.queues.faults import BrokerFaultSuite
from tenure.testing._conformance.queues.live import LiveSuite
from tenure.testing._conformance.queues.locks import LockSuite
from tenure.testing._conformance.queues.strain import BrokerStrainSuite
from tenure.testing._conformance.queues.suite import BrokerSuite

__all__ = [
    "BrokerCostSuite",
    "BrokerFaultSuite",
    "BrokerStrainSuite",
    "BrokerSuite",
    "ConsumerSuite",
    "Fault",
    "GiveUp",
    "LeaseCostSuite",
    "LeaseFaultSuite",
    "LeaseHarness",
    "LeaseStoreSuite",
    "LeaseStrainSuite",
    "LiveSuite",
    "LockSuite",
    "Lossy",
    "LossyBroker",
    "QueueHarness",
    "Scale",
]

publish_all(__name__)
