"""Runs suites against stores in memory with planted bugs: a check that can't fail proves nothing."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._queue.broker import Broker
from tenure.testing.conformance import FaultyBroker, FaultyLeaseStore, LeaseHarness, QueueHarness
from tenure.testing.loop import run
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness

Test = Callable[..., Awaitable[None]]

LIMIT = 3600.0
"""The virtual seconds after which a test has failed."""

FAILURES: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception)


def calls(suite: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every test of *suite* with each of its parameters, as pytest would."""
    for name in dir(suite):
        if name.startswith("test_"):
            marks = getattr(getattr(suite, name), "pytestmark", [])
            lists = [[*_arguments(*mark.args[:2])] for mark in marks if mark.name == "parametrize"]
            for chosen in itertools.product(*lists):
                yield name, {key: value for one in chosen for key, value in one.items()}


def _arguments(names: str | tuple[str, ...], choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for choice in choices:
        yield {names: choice} if isinstance(names, str) else dict(zip(names, choice, strict=True))


def failing_tests(
    make_harness: Callable[[], LeaseHarness | QueueHarness],
    *suites: type,
    failures: tuple[type[BaseException], ...] = FAILURES,
    is_meant: Callable[[str], bool] = lambda _: True,
    first_only: bool = False,
    in_real_time: bool = False,
) -> set[str]:
    """Run the tests of *suites*, each on a harness of its own, and return the names of those that fail.

    In virtual time, a test that waits in vain, for a hint that a bug withholds, fails at once.

    Args:
        make_harness: Makes the harness of a test.
        failures: The exceptions that count as a failure; any other is raised.
        is_meant: Selects tests by their names.
        first_only: Stop at the first test that fails.
        in_real_time: For suites that renew leases on a thread, or measure a rate.
    """
    failed: set[str] = set()
    for suite in suites:
        for name, arguments in calls(suite):
            if not is_meant(name):
                continue
            try:
                test = _run_test(make_harness(), getattr(suite(), name), arguments)
                asyncio.run(test) if in_real_time else run(test, limit=LIMIT)
            except pytest.skip.Exception:
                pass
            except failures:
                failed.add(name)
            if failed and first_only:
                return failed
    return failed


async def _run_test(harness: LeaseHarness | QueueHarness, test: Test, arguments: dict[str, Any]) -> None:
    await harness.start()
    try:
        await test(harness, f"planted-{secrets.token_hex(4)}", **arguments)
    finally:
        await harness.close()


def leases_with(plant: type[MemoryLeases] | type[FaultyLeaseStore]) -> type[MemoryHarness]:
    """Return a harness whose stores are *plant*, or have *plant* around them."""

    class Planted(MemoryHarness):
        async def open(self) -> FaultyLeaseStore:
            if issubclass(plant, FaultyLeaseStore):
                return plant(MemoryLeases(self._clock, self._memory))
            return FaultyLeaseStore(plant(self._clock, self._memory))

    return Planted


def queues_with(plant: type[MemoryBroker]) -> type[MemoryQueueHarness]:
    """Return a harness whose brokers are *plant*."""

    class Planted(MemoryQueueHarness):
        async def open(self) -> Broker:
            return FaultyBroker.around(plant(self._clock, self._memory))

    return Planted
