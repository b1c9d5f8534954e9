"""The suites, by subject. Pytest rewrites their asserts as those of tests, if it is called before they are imported."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.cost", f"{__name__}.leases", f"{__name__}.queues")
