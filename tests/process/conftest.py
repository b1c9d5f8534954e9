"""How long locks and leases last in services that are run as processes."""

from __future__ import annotations

import pytest

from tests.durations import stretched


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the seconds of a lock that is not lost while its process lives; processes find them in ``LOCK``."""
    seconds = stretched(1.5)
    monkeypatch.setenv("LOCK", str(seconds))
    return seconds
