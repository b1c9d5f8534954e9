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

from tests.absent import nothing_may_be_missing
from tests.servers import NO_SERVERS, Azurite, Postgres, Redis, url_of

# Where Python is set to keep no bytecode, each of the many processes that the tests start would compile the library.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# On a busy machine, the duration of an example says nothing.
settings.register_profile("tenure", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tenure")


QUICK = [
    "unit",
    "properties",
    "scenarios",
    "application",
    "cli",
    "conformance/test_kinds.py",
    "conformance/test_planted_away.py",
    "stores/azure_storage/test_errors.py",
    "stores/azure_storage/test_names.py",
    "stores/etcd/test_client.py",
    "stores/kubernetes/test_records.py",
    "stores/memory",
    "stores/nats/test_connection.py",
    "stores/nats/test_messages.py",
    "stores/peers/test_counting.py",
    "stores/peers/test_machine.py",
    "stores/peers/test_strategies.py",
    "stores/peers/test_wire.py",
    "stores/redis/test_scripts.py",
    "stores/sqlite",
]
"""The folders and files of ``make quick``: machines, units, memory and SQLite. No server is started."""

NOT_QUICK = [
    "application/test_consumer.py::test_a_handler_that_blocks_keeps_its_lock",
    "application/test_consumer.py::test_a_process_is_stopped",
    "application/test_consumer.py::test_a_process_that_dies_harms_its_own_message_only",
    "application/test_consumer.py::test_a_session_in_which_a_thread_runs_on_goes_to_no_other_consumer",
    "application/test_consumer.py::test_a_thread_that_is_stuck_does_not_keep_the_process",
    "application/test_consumer.py::test_no_process_outlives_its_consumer",
    "application/test_consumer.py::test_sigterm_ends_it_gracefully",
    "application/test_elector.py::test_a_thousand_leases_share_their_renewals",
    "application/test_failure_logs.py",
    "application/test_forked.py",
    "application/test_http.py",
    "application/test_partition_threads.py",
    "application/test_processes.py",
    "application/test_sigterm.py",
    "application/test_telemetry.py::test_nothing_is_imported_for_it_when_it_is_off",
    "application/test_threads.py",
    "application/test_queue_threads.py",
    "cli/test_completion.py",
    "cli/test_coordinators.py",
    "cli/test_errors.py",
    "cli/test_foreign_leader.py",
    "cli/test_help.py",
    "cli/test_leases_only.py",
    "cli/test_live.py",
    "cli/test_me.py",
    "cli/test_queues_only.py",
    "cli/test_send_lines.py",
    "unit/test_metrics.py::test_a_child_by_fork_counts_on_although_another_thread_counted_then",
    "unit/test_names.py",
    "stores/peers/test_wire.py::test_a_hundred_thousand_bad_frames_change_nothing",
    "stores/peers/test_wire.py::test_a_known_tag_with_any_fields_is_a_message_or_malformed",
    "unit/test_pytest_plugin.py",
    "unit/test_side_by_side.py",
    "unit/test_suite_times.py",
    "stores/sqlite/test_fence.py::test_no_old_token_passes_when_processes_race",
    "unit/test_watchdog.py",
]
"""Files and tests of these folders that start processes or servers, or that take a second and more."""

LONGEST = [
    "process/test_lead.py",
    "sim/test_peers.py",
    "stores/etcd/test_suites.py",
    "process/test_demo.py",
    "stores/zookeeper/test_suites.py",
    "stores/azure_storage/test_suites.py",
    "stores/peers/test_cut.py",
    "sim/test_sim.py",
    "process/test_coordinators.py",
    "process/test_store_elections.py",
    "stores/servicebus/test_suites.py",
    "stores/rabbitmq/test_suites.py",
    "stores/postgres/test_suites.py",
    "sim/test_queue_sim.py",
    "process/test_store_kills.py",
    "stores/peers/test_models.py",
    "stores/azure_storage/test_elections.py",
    "conformance/test_cost.py",
    "examples/test_kubernetes_deployment.py",
    "examples/test_django_outbox.py",
    "examples/test_fastapi_shop.py",
    "process/test_work.py",
    "process/test_work_locks.py",
    "application/test_threads.py",
    "application/test_processes.py",
    "docs/test_examples.py",
    "examples/test_stateful_stream.py",
    "examples/test_fleet_without_store.py",
    "stores/redis/test_suites.py",
    "stores/redis/test_cluster_suites.py",
    "stores/zookeeper/test_ensemble_suites.py",
    "stores/etcd/test_cluster_suites.py",
    "stores/zookeeper/test_zookeeper.py",
    "stores/zookeeper/test_ensemble.py",
    "stores/test_wrong_inputs.py",
    "process/test_servers.py",
    "interop/test_handing_over.py",
    "interop/test_kills.py",
]
"""The files that take half a minute and more, the longest first, those that mostly wait between those that compute."""

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the tests of `make quick` only")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("quick"):
        os.environ[NO_SERVERS] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``--quick``, don't import other files."""
    if not config.getoption("quick") or not collection_path.is_relative_to(HERE):
        return None
    path = collection_path.relative_to(HERE)
    chosen = [Path(name) for name in QUICK]
    if not any(path.is_relative_to(name) or name.is_relative_to(path) for name in chosen) or str(path) in NOT_QUICK:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ``--quick``, drop the other tests; begin with the files that take longest.

    A worker that begins a long file last keeps the others waiting.
    """
    unknown = [name for name in (*QUICK, *NOT_QUICK, *LONGEST) if not is_there(name)]
    if unknown:
        raise pytest.UsageError(f"tests/conftest.py names missing files or tests: {', '.join(unknown)}")
    if config.getoption("quick"):
        dropped = [item for item in items if is_dropped(item)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))  # the others keep their order


def is_there(name: str) -> bool:
    """Return whether a folder, a file, or a test in a file exists."""
    file, _, test = name.partition("::")
    path = HERE / file
    return f"def {test}(" in path.read_text() if test and path.is_file() else path.exists() and not test


def is_dropped(item: pytest.Item) -> bool:
    """Return whether a test is left out of ``make quick``."""
    function = getattr(item, "originalname", item.name)
    return (
        f"{item.path.relative_to(HERE)}::{function}" in NOT_QUICK
        or item.get_closest_marker("process") is not None
        or item.get_closest_marker("sim") is not None
    )


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


def pytest_collection_finish() -> None:
    """Exclude the objects that collecting has made from garbage collection.

    Each full collection would traverse some 200,000 of them, for a sixth of a second, and free none.
    """
    gc.collect()
    gc.freeze()


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
