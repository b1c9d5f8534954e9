"""The tests that are left out on three members, unless ``TENURE_LONG=1``: those that take long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tenure.testing._conformance.leases.steps import LeaseSuite
from tenure.testing.conformance import LeaseFaultSuite, LeaseQueueSuite, LeaseStoreSuite
from tests.long import LONG

T = TypeVar("T", bound=type[LeaseSuite])


TAKE_LONG: tuple[Callable[..., object], ...] = (
    LeaseStoreSuite.test_a_lease_ends_by_itself_and_not_before,
    LeaseStoreSuite.test_a_lease_that_is_not_renewed_ends_beside_others_of_its_process,
    LeaseStoreSuite.test_a_renewal_never_shortens_a_lease,
    LeaseStoreSuite.test_acquiring_again_extends,
    LeaseStoreSuite.test_an_expired_grant_is_lost,
    LeaseStoreSuite.test_an_old_grant_of_the_same_holder_does_not_extend_its_new_one,
    LeaseStoreSuite.test_late_verbs_of_an_old_grant_do_not_touch_a_new_one,
    LeaseStoreSuite.test_no_verb_of_an_old_grant_changes_a_later_lease,
    LeaseStoreSuite.test_odd_names_are_names,
    LeaseStoreSuite.test_renewal_extends,
    LeaseStoreSuite.test_the_next_term_was_not_asked_to_resign,
    LeaseStoreSuite.test_three_hundred_are_renewed_at_once,
    LeaseStoreSuite.test_tokens_rise_with_every_acquisition,
    LeaseFaultSuite.test_a_late_acquisition_of_a_free_name_expires,
    LeaseFaultSuite.test_a_late_extension_does_not_shorten_a_lease,
    LeaseFaultSuite.test_a_lost_acquisition_expires,
    LeaseFaultSuite.test_renew_can_be_repeated,
    LeaseQueueSuite.test_a_late_request_leaves_a_place_for_a_while_at_most,
    LeaseQueueSuite.test_a_place_ends_unless_its_holder_asks_again,
    LeaseQueueSuite.test_a_turn_that_nobody_takes_ends,
    LeaseQueueSuite.test_withdrawing_without_a_connection_is_reported_in_time,
)
"""Most of them wait for the end of a lease, or have nothing to do with members; on one server, all of them run."""


def without_long(suite: T) -> T:
    """Leave these tests out of a class."""
    if not LONG:
        for test in TAKE_LONG:
            if hasattr(suite, test.__name__):
                setattr(suite, test.__name__, None)
    return suite
