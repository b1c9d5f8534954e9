"""Fixtures for all tests: the servers, and a log that no test leaves changed."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import targets
from tests.absent import nothing_may_be_missing
from tests.servers import NO_SERVERS, Azurite, Postgres, Redis, url_of
from tests.targets import HERE, TARGETS, Target

# Where Python is set to keep no bytecode, each of the many processes that the tests start would compile the library.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a busy machine, the duration of an example says nothing.
settings.register_profile("tenure", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tenure")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", choices=TARGETS, help="run the tests of `make quick`, `make test` or `make full` only")


def pytest_configure(config: pytest.Config) -> None:
    if target_of(config) == "quick":
        os.environ[NO_SERVERS] = "1"


def target_of(config: pytest.Config) -> Target | None:
    chosen: Target | None = config.getoption("target")
    return chosen


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no test of the target."""
    target = target_of(config)
    if target is None or not collection_path.is_relative_to(HERE) or collection_path == HERE:
        return None
    return None if targets.may_have(target, collection_path.relative_to(HERE).as_posix()) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the tests of other targets; begin with the files that take longest.

    A worker that begins a long file last keeps the others waiting.
    """
    if unknown := targets.missing():
        raise pytest.UsageError(f"tests/targets.py names missing files or tests: {', '.join(unknown)}")
    if target := target_of(config):
        dropped = [item for item in items if not is_of(target, item)]
        config.hook.pytest_deselected(items=dropped)
        left_out = set(dropped)
        items[:] = [item for item in items if item not in left_out]
    places = {HERE / name: place for place, name in enumerate(targets.LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))  # the others keep their order


def is_of(target: Target, item: pytest.Item) -> bool:
    """Return whether a target runs a test. What is marked as a process or as a long simulation isn't quick."""
    slow = item.get_closest_marker("process") or item.get_closest_marker("sim")
    return targets.has(target, name_of(item)) and not (target == "quick" and slow)


def name_of(item: pytest.Item) -> str:
    """Return the file of a test, its class, and its function, without its arguments."""
    file = item.path.relative_to(HERE).as_posix()
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return "::".join([file, *classes, getattr(item, "originalname", item.name)])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that ``importorskip`` skips, where nothing may be missing."""
    report = yield
    if report.skipped and (reason := missing_package(call)):
        report.outcome, report.longrepr = "failed", reason
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file that ``importorskip`` skips, where nothing may be missing."""
    report = yield
    if report.skipped and (call := getattr(report, "call", None)) and (reason := missing_package(call)):
        report.outcome, report.longrepr = "failed", reason
    return report


def missing_package(call: pytest.CallInfo[Any]) -> str:
    """Return the missing package if a test was skipped for it although nothing may be missing; otherwise ""."""
    text = str(call.excinfo.value) if call.excinfo else ""
    if not nothing_may_be_missing() or not text.removeprefix("Skipped: ").startswith("could not import"):
        return ""
    return f"{text} (TENURE_REQUIRE is set, so nothing may be missing)"


@pytest.fixture(autouse=True, scope="session")
def signals_are_not_ignored() -> None:
    """Let processes that tests start react to SIGINT, SIGQUIT and SIGHUP, also if this run ignores them.

    It does in the background of a script, or under nohup, and the processes that it starts would inherit that. A
    handler is not inherited, so the run itself survives its terminal.
    """
    usual_handlers: tuple[tuple[str, Any], ...] = (
        ("SIGINT", signal.default_int_handler),
        ("SIGQUIT", signal.SIG_DFL),
        ("SIGHUP", lambda number, frame: None),
    )
    for name, usual in usual_handlers:
        number = getattr(signal, name, None)  # Windows has no SIGQUIT and no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(autouse=True, scope="module")
def only_what_this_file_makes_is_collected() -> None:
    """Exclude from garbage collection what the tests begin with: what collecting has made, and the files before.

    Each full collection would traverse hundreds of thousands of objects, for a third of a second, and free none. So a
    test may collect as often as it likes.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Undo the log settings of a command that was run in this process."""
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
