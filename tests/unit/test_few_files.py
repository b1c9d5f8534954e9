"""The warning of ``tenure doctor`` that the limit of open files is too low for a store."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tenure import _diagnosis
from tenure._backends import memory
from tenure._diagnosis import FILES_BESIDES, diagnose, most_files
from tenure._runtime.clock import SystemClock
from tenure._url import Url


class Limited:
    """A backend that opens so many connections at most."""

    def __init__(self, connections_max: int) -> None:
        self._opened = memory.open(Url.parse("memory:"))
        self.leases, self.broker, self.describe = self._opened.leases, self._opened.broker, self._opened.describe
        self.close: Callable[[], object] = self._opened.close
        self.connections_max = connections_max


@pytest.mark.parametrize(
    ("connections", "limit", "warns"),
    [(97, 97 + FILES_BESIDES - 1, True), (97, 97 + FILES_BESIDES, False), (97, math.inf, False), (0, 10, False)],
)
async def test_too_few_files_for_the_connections_are_a_warning(
    connections: int, limit: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_diagnosis, "most_files", lambda: limit)
    found = await diagnose("memory:", Limited(connections), SystemClock(), write=False)  # type: ignore[arg-type]
    facts = [fact for fact in found.facts if fact.code == "few-files"]
    assert [(fact.name, fact.value) for fact in facts] == [("open files", "160 at most")] * warns
    if warns:
        assert "97 connections" in facts[0].advice
        assert "raise the limit to 161 at least" in facts[0].advice


def test_the_limit_of_this_process_is_read() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = soft - 1 if soft > 0 else 1_000
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
    try:
        assert most_files() == lower
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
