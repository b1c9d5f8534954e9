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

import pytest

pytest.register_assert_rewrite(
    *(
        f"tenure.testing._conformance.{name}"
        for name in (
            "leases",
            "lease_faults",
            "lease_cost",
            "queues",
            "live",
            "queue_faults",
            "queue_cost",
            "locks",
            "consumers",
            "strain",
        )
    )
)

from tenure.testing._conformance.consumers import ConsumerSuite  # noqa: E402
from tenure.testing._conformance.cost import Scale  # noqa: E402
from tenure.testing._conformance.harness import (  # noqa: E402
    Fault,
    GiveUp,
    LeaseHarness,
    Lossy,
    LossyBroker,
    QueueHarness,
)
from tenure.testing._conformance.lease_cost import LeaseCostSuite  # noqa: E402
from tenure.testing._conformance.lease_faults import LeaseFaultSuite  # noqa: E402
from tenure.testing._conformance.leases import LeaseStoreSuite  # noqa: E402
from tenure.testing._conformance.live import LiveSuite  # noqa: E402
from tenure.testing._conformance.locks import LockSuite  # noqa: E402
from tenure.testing._conformance.queue_cost import BrokerCostSuite  # noqa: E402
from tenure.testing._conformance.queue_faults import BrokerFaultSuite  # noqa: E402
from tenure.testing._conformance.queues import BrokerSuite  # noqa: E402
from tenure.testing._conformance.strain import BrokerStrainSuite, LeaseStrainSuite  # noqa: E402

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
