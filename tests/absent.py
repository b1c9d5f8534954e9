"""Skip tests that need what this machine lacks; or fail them, under ``TENURE_REQUIRE``."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def nothing_may_be_missing() -> bool:
    """Return whether ``TENURE_REQUIRE`` is set, as in CI."""
    return os.environ.get("TENURE_REQUIRE", "0") not in ("", "0")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test for *reason*, or fail it under ``TENURE_REQUIRE``."""
    if nothing_may_be_missing():
        pytest.fail(f"{reason} (TENURE_REQUIRE is set, so nothing may be missing)", pytrace=False)
    pytest.skip(reason)
