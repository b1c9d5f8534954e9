"""A pytest plug-in: a queue to test handlers with; tests in virtual time, once for each of many seeds.

Name it in your ``conftest.py``, and then ask for its fixtures::

    pytest_plugins = ["tenure.testing.pytest_plugin"]

::

    def test_the_standby_takes_over(in_virtual_time):
        async def main():
            async with connect_here() as backend:  # from tenure.testing
                ...
                await asyncio.sleep(3600)  # no time at all

        in_virtual_time(main())

A test that asks for ``seed``, or for ``in_virtual_time``, runs once for each of the seeds: with ``--seeds 500`` for the
first five hundred, with ``--seeds 17-17`` for one. A seed decides the order of events at the same moment; it
is part of the test's name.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from uuid import uuid4

import pytest

import tenure.sync
from tenure._backend import Backend
from tenure._queue.queue import Queue
from tenure._runtime.renewal_thread import RenewalThread
from tenure.testing.loop import run

__all__ = ["in_virtual_time", "memory_backend", "memory_queue", "memory_queue_for_threads", "memory_url", "seed"]

T = TypeVar("T")

LIMIT = 86_400.0
"""Virtual seconds that a test may take: a test that runs for a day is taken for one that never ends."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--seeds``."""
    group = parser.getgroup("tenure")
    group.addoption(
        "--seeds",
        type=seeds_of,
        default=range(1),
        metavar="N|A-B",
        help="Run each test that depends on a seed with N of them, or with those from A to B. [default: 1]",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that depends on a seed once for each seed."""
    if "seed" in metafunc.fixturenames and not _has_its_own_seeds(metafunc):
        metafunc.parametrize("seed", metafunc.config.getoption("--seeds"))


def _has_its_own_seeds(metafunc: pytest.Metafunc) -> bool:
    marks = metafunc.definition.iter_markers("parametrize")
    given = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in marks]
    return any("seed" in _names(argnames) for argnames in given)


def _names(argnames: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in (argnames.split(",") if isinstance(argnames, str) else argnames)]


def seeds_of(text: str) -> range:
    """Parse a number of seeds (``"20"``: the first twenty) or a range (``"7-9"``: these three).

    Raises:
        ArgumentTypeError: *text* is neither, or names no seed.
    """
    first, dash, last = text.partition("-")
    with suppress(ValueError):
        seeds = range(int(first), int(last) + 1) if dash else range(int(first))
        if seeds:
            return seeds
    raise ArgumentTypeError(f"{text!r} names no seeds; give how many, as in 20, or which, as in 7-9")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of this run; the first one if the fixture is requested dynamically."""
    seeds: range = request.config.getoption("--seeds")
    return seeds[0]


@pytest.fixture
def in_virtual_time(seed: int) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Return a function that runs a coroutine in virtual time, and returns what it returns.

    It raises ``LimitReached`` after a virtual day, and ``Deadlock`` where the coroutine would wait for ever.
    """

    def run_main(main: Coroutine[Any, Any, T]) -> T:
        return run(main, seed=seed, limit=LIMIT)

    return run_main


@pytest.fixture
def memory_url() -> str:
    """Return the URL of a store in memory that no other test uses; all backends of this process share its data."""
    return f"memory:{uuid4().hex}"


@pytest.fixture
def memory_backend(memory_url: str) -> Iterator[Backend]:
    """Yield an open backend in memory that no other test uses, for any loop; not for virtual time."""
    renewal_thread = RenewalThread.enter()
    try:
        backend = renewal_thread.call_blocking(Backend(memory_url).open)
        yield backend
        renewal_thread.call_blocking(backend.aclose)
    finally:
        renewal_thread.leave()


@pytest.fixture
def memory_queue(memory_backend: Backend) -> Queue:
    """Return the queue ``orders`` of ``memory_backend``, empty: send to it, and consume until it is empty."""
    return memory_backend.queue("orders")


@pytest.fixture
def memory_queue_for_threads(memory_backend: Backend) -> Iterator[tenure.sync.Queue]:
    """Yield the queue of ``memory_queue`` as a ``tenure.sync.Queue``."""
    with tenure.sync.connect(memory_backend.url.written.reveal()) as backend:
        yield backend.queue("orders")
