"""The suite of every store of leases."""

from __future__ import annotations

from tenure.testing._conformance.leases.acquisition import AcquisitionTests
from tenure.testing._conformance.leases.ending import EndingTests
from tenure.testing._conformance.leases.following import FollowingTests
from tenure.testing._conformance.leases.foreign import ForeignRecordTests
from tenure.testing._conformance.leases.hints import HintTests
from tenure.testing._conformance.leases.inspection import InspectionTests
from tenure.testing._conformance.leases.leftovers import LeftoverTests
from tenure.testing._conformance.leases.renewal import RenewalTests


class LeaseStoreSuite(
    AcquisitionTests,
    RenewalTests,
    EndingTests,
    LeftoverTests,
    InspectionTests,
    HintTests,
    FollowingTests,
    ForeignRecordTests,
):
    """The promises of :class:`tenure.ports.LeaseStore`, one test for each."""
