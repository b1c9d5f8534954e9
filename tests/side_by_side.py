"""Tests of one class that wait at the same time: where a server's clock can't be turned, one wait serves many."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

import pytest

from tenure.testing.conformance import LeaseHarness, QueueHarness

S = TypeVar("S", bound=type)

BUSY_MAX = 2
"""How many tests may be busy, and not waiting, before another one begins: more would slow each other down."""
BEGUN_MAX = 24
LASTS_MAX = 100.0
"""The seconds after which a test has failed: less than pytest's own limit, after which others would not begin."""

FIXTURES = {"harness", "name"}
"""What a test may ask for to run beside others; a patch, say, would change the others too."""

_suites: set[type] = set()
_original: dict[Callable[..., Any], Callable[..., Awaitable[None]]] = {}
"""The test of the suite, for each function that pytest calls in its place."""


def side_by_side(suite: S) -> S:
    """Run the tests of *suite* beside each other, on a loop of their own; while one lets time pass, others go on.

    The first one that pytest runs begins all, with those of the next suites that are side by side, and each waits for
    its own end. For tests that leave each other alone: on names of their own, of a server that none of them disturbs.
    """
    for name, test in inspect.getmembers(suite, inspect.iscoroutinefunction):
        if name.startswith("test_") and not _foreign_fixtures(test):
            setattr(suite, name, _in_place_of(test))
    _suites.add(suite)
    return suite


def _foreign_fixtures(test: Callable[..., Any]) -> set[str]:
    given = {name for mark in getattr(test, "pytestmark", []) for name in _names(mark)}
    return set(inspect.signature(test).parameters) - FIXTURES - given - {"self"}


def _names(mark: pytest.Mark) -> list[str]:
    if mark.name != "parametrize":
        return []
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]


def _in_place_of(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def wait_for_its_end(self: object, request: pytest.FixtureRequest, **arguments: object) -> None:
        await asyncio.wrap_future(_begun(request.node, request.session.items))

    parameters = [one for one in inspect.signature(test).parameters.values() if one.name not in FIXTURES]
    asked = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wait_for_its_end.__signature__ = inspect.Signature([*parameters, asked])  # type: ignore[attr-defined]
    wait_for_its_end.__doc__ = test.__doc__
    wait_for_its_end.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    _original[wait_for_its_end] = test
    return wait_for_its_end


_running: dict[pytest.Item, Future[None]] = {}


def _begun(item: pytest.Function, items: list[pytest.Item]) -> Future[None]:
    """Return the run of *item*, which it has begun with those after it, or one before it has begun."""
    if item not in _running:
        for one in [item] if _goes_to_any_worker(item) else _from(item, items):
            _running[one] = asyncio.run_coroutine_threadsafe(_run(one), _loop())
    return _running.pop(item)


def _goes_to_any_worker(item: pytest.Item) -> bool:
    """Return whether other workers may run the rest of its suite."""
    worker: dict[str, Any] | None = getattr(item.config, "workerinput", None)
    return worker is not None and not any("loadfile" in argument for argument in worker["mainargv"])


def _from(item: pytest.Function, items: list[pytest.Item]) -> Iterator[pytest.Function]:
    """Yield the tests from *item* on, up to one whose suite may disturb them."""
    for other in items[items.index(item) :]:
        if not isinstance(other, pytest.Function) or other.cls not in _suites or other.path != item.path:
            return
        if _test_of(other):
            yield other


def _test_of(item: pytest.Function) -> Callable[..., Awaitable[None]] | None:
    return _original.get(getattr(item.cls, item.originalname))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="side by side", daemon=True).start()
    return loop


class Turns:
    """Lets tests begin one after another, as those before them wait or end."""

    def __init__(self) -> None:
        self._begun = self._busy = 0
        self._changed = asyncio.Condition()

    async def begin(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._busy < BUSY_MAX and self._begun < BEGUN_MAX)
            self._begun += 1
            self._busy += 1

    async def end(self) -> None:
        async with self._changed:
            self._begun -= 1
            self._busy -= 1
            self._changed.notify_all()

    async def wait(self, passing: Awaitable[None]) -> None:
        """Let others be busy while *passing* lets time pass; then go on at once, as locks may run out."""
        async with self._changed:
            self._busy -= 1
            self._changed.notify_all()
        try:
            await passing
        finally:
            self._busy += 1


_turns = Turns()


async def _run(item: pytest.Function) -> None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    test, suite = _test_of(item), item.cls()
    await _turns.begin()
    try:
        assert test is not None
        harness = suite.harness()
        pass_time = harness.pass_time
        harness.pass_time = lambda seconds: _turns.wait(pass_time(seconds))
        async with asyncio.timeout(LASTS_MAX):
            await _run_on(harness, test, suite, parameters)
    finally:
        await _turns.end()


async def _run_on(
    harness: LeaseHarness | QueueHarness, test: Callable[..., Awaitable[None]], suite: object, given: dict[str, Any]
) -> None:
    await harness.start()
    try:
        fixtures = {"harness": harness, "name": f"conformance-{secrets.token_hex(6)}"}
        asked = {name: fixtures[name] for name in inspect.signature(test).parameters.keys() & fixtures}
        await test(suite, **asked, **given)
    finally:
        await harness.close()
