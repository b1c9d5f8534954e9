"""The clock of terms."""

from __future__ import annotations

import time

import pytest

from tenure._runtime.clock import SystemClock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system counts suspend by another clock")
def test_time_in_suspend_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, read = SystemClock(), time.clock_gettime
    before = clock.now()
    monkeypatch.setattr(time, "clock_gettime", lambda of: read(of) + (3600 if of == time.CLOCK_BOOTTIME else 0))
    assert clock.now() >= before + 3600
    monkeypatch.setattr(time, "clock_gettime", lambda of: read(of) - 3600)
    assert clock.now() >= before  # whichever is later
