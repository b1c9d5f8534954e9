"""The suites, by subject. Their asserts are rewritten, as those of tests are: so this comes before any of them."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.cost", f"{__name__}.leases", f"{__name__}.queues")
