"""Suites that every backend passes: write a harness and two lines, and they say whether the backend is done.

::

    class TestMyLeases(LeaseStoreSuite):
        harness = MyHarness


    class TestMyLeaseFaults(LeaseFaultSuite):
        harness = MyHarness

They need pytest and pytest-asyncio. Tests are chosen by the store's traits, and by the faults the harness can make.
"""

import pytest

pytest.register_assert_rewrite("tenure.testing.conformance.leases", "tenure.testing.conformance.lease_faults")

from tenure.testing.conformance.harness import Fault, LeaseHarness, Lossy  # noqa: E402
from tenure.testing.conformance.lease_faults import LeaseFaultSuite  # noqa: E402
from tenure.testing.conformance.leases import LeaseStoreSuite  # noqa: E402

__all__ = ["Fault", "LeaseFaultSuite", "LeaseHarness", "LeaseStoreSuite", "Lossy"]
