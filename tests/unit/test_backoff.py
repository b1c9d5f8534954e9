"""The pauses between attempts that fail."""

from __future__ import annotations

import asyncio

import pytest

from tenure._runtime.backoff import FIRST, LONGEST, Backoff
from tenure.testing.loop import run


def unshortened(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("random.uniform", lambda least, most: most)


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    unshortened(monkeypatch)
    backoff = Backoff()
    assert [backoff.next() for _ in range(9)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert (FIRST, LONGEST) == (0.05, 5.0)


def test_after_a_success_the_first_pause_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    unshortened(monkeypatch)
    backoff = Backoff(0.5, 2.0)
    assert [backoff.next() for _ in range(3)] == [0.5, 1.0, 2.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_caller_may_bound_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    unshortened(monkeypatch)
    backoff = Backoff(1.0, 8.0)
    assert [backoff.next(at_most=1.5) for _ in range(3)] == [1.0, 1.5, 1.5]
    assert backoff.next() == 8.0


def test_the_first_is_not_longer_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    unshortened(monkeypatch)
    assert Backoff(3.0, 1.0).next() == 1.0


def test_each_is_shortened_at_random_by_half_at_most() -> None:
    pauses = [Backoff(1.0).next() for _ in range(1_000)]
    assert 0.5 <= min(pauses) < 0.55
    assert 0.95 < max(pauses) <= 1.0


def test_resting_takes_the_next_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    unshortened(monkeypatch)

    async def rest() -> float:
        backoff, now = Backoff(1.0), asyncio.get_running_loop().time
        began = now()
        await backoff.rest()
        await backoff.rest()
        return now() - began

    assert run(rest(), seed=1) == 3.0
