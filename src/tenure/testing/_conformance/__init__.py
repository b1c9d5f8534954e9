"""The suites, by subject. Their asserts are rewritten, as those of tests are: so this comes before any of them."""

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
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
