"""A plug-in for pytest that measures each test, and writes one line of JSON for each."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import TextIO

import pytest

from scripts.suite_times.meter import Meter

WRITES_TO = "TENURE_SUITE_TIMES"
KEY = "suite_times"


class Measuring:
    """In the process that runs the tests: adds its cost to the last report of each."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._ends_file = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        self._meter.begin()
        self._ends_file = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((KEY, asdict(self._meter.end(last_of_file=self._ends_file))))
        return report


class Writing:
    """In the process that reports: writes the costs to a file as the tests end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO | None = None  # a run without tests leaves the records of the one before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for cost in costs_of(report):
            if self._file is None:
                self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115 (closed when pytest ends)
            self._file.write(json.dumps({"test": report.nodeid, **cost}) + "\n")

    def pytest_unconfigure(self) -> None:
        if self._file is not None:
            self._file.close()


def costs_of(report: pytest.TestReport) -> Iterator[dict[str, object]]:
    yield from (value for key, value in report.user_properties if key == KEY and isinstance(value, dict))


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    runs_tests = is_worker or not config.getoption("numprocesses", default=None)
    if runs_tests:
        config.pluginmanager.register(Measuring(), "suite-times-measuring")
    if not is_worker:
        config.pluginmanager.register(Writing(os.environ[WRITES_TO]), "suite-times-writing")
