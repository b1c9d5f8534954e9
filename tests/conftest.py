"""Fixtures for all tests: the servers, and a log that no test leaves changed."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import Azurite, Postgres, Redis, url_of

# Where Python is told to keep no bytecode, each of the many processes that the tests start would compile the library.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says nothing on a machine that is busy with other things.
settings.register_profile("tenure", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tenure")


LONGEST = [
    "process/test_lead.py",
    "sim/test_peers.py",
    "process/test_demo.py",
    "conformance/test_azure.py",
    "process/test_peers_cut.py",
    "sim/test_sim.py",
    "process/test_store_elections.py",
    "conformance/test_postgres.py",
    "sim/test_queue_sim.py",
    "process/test_store_kills.py",
    "models/test_models.py",
    "process/test_azure_elections.py",
    "conformance/test_cost.py",
    "process/test_work.py",
    "conformance/test_redis.py",
    "conformance/test_redis_cluster.py",
    "backends/test_wrong_inputs.py",
    "process/test_servers.py",
]
"""The files that take half a minute and more, the longest first, and those that wait beside those that compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: a worker that begins one of them last keeps the others waiting."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    gone = [str(path) for path in places if not path.is_file()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py names files that are not there: {', '.join(gone)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))  # others stay as they are


def pytest_collection_finish() -> None:
    """Take what collecting has made, and what stays to the end, from the garbage collector's rounds.

    They would go through some 200,000 objects each time, which is a sixth of a second, to free none of them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> None:
    """Let what tests start and interrupt hear it, although this run may be one that a script has put to the background.

    Such a run ignores the signals of a keyboard, and what it starts would inherit that.
    """
    for name, usual in (("SIGINT", signal.default_int_handler), ("SIGQUIT", signal.SIG_DFL)):
        number = getattr(signal, name, None)  # Windows has no SIGQUIT
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Undo what a command, run in this process, says of how loud the log is to be."""
    log = logging.getLogger("tenure")
    level, propagate, handlers = log.level, log.propagate, log.handlers[:]
    yield
    log.setLevel(level)
    log.propagate = propagate
    log.handlers[:] = handlers


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Return the URL of a Redis for all tests; use names that no other test uses."""
    return url_of(Redis)


@pytest.fixture(scope="session")
def postgresql_url() -> str:
    """Return the URL of a PostgreSQL for all tests; use a schema or names that no other test uses."""
    return url_of(Postgres)


@pytest.fixture(scope="session")
def azure_url() -> str:
    """Return the URL of an Azurite for all tests; use names that no other test uses."""
    return url_of(Azurite)
