"""The wall clock of this machine, which a client takes for the server's before it has read that; turned with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tenure._runtime import remote_clock


def turn_wall_clock(patch: pytest.MonkeyPatch, ahead: Callable[[], float]) -> None:
    """Put it forward by so many seconds."""
    patch.setattr(remote_clock, "time", SimpleNamespace(time=lambda: time.time() + ahead()))
