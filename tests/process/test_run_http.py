"""``tenure run --http`` with real processes: answers while they start, run, are killed, replaced, and drain."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

import tenure
import tenure.sync
from tenure.sync import Queue
from tests.durations import PATIENCE, wait_until
from tests.process.test_run import WORKER, Run
from tests.process_states import is_alive

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TOKEN = "TENURE_HTTP_TOKEN"


class HttpRun(Run):
    """One ``tenure run --http 0``."""

    @property
    def address(self) -> tuple[str, int]:
        """The address where it listens, as its notice names it."""

        def found() -> re.Match[str] | None:
            return re.search(r"tenure: http on http://([^ ]*):(\d+) ", self.output.read_text())

        wait_until(lambda: found() or self.process.poll() is not None, self.shown)
        notice = found()
        assert notice is not None, self.shown()
        return notice[1], int(notice[2])

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        host, port = self.address
        request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return the values by name and labels, in the order of the names of these."""
        code, text = self.get("/metrics")
        assert code == 200, text
        return {
            (one.name, *(one.labels[label] for label in sorted(one.labels))): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }

    def wait_ready(self, count: int) -> None:
        wait_until(lambda: self.get("/ready") == (200, f"ready: {count} of {count} processes\n"), self.shown)


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.fixture
def start(tmp_path: Path, lock: float) -> Iterator[Any]:
    (tmp_path / "worker.py").write_text(WORKER)
    with closing(sqlite3.connect(tmp_path / "done.db")) as done:
        done.execute("pragma journal_mode=wal")
        done.execute("create table done (number integer, pid integer)")
    started: list[HttpRun] = []

    def start(*arguments: str, http: str = "0") -> HttpRun:
        started.append(HttpRun(tmp_path, "--http", http, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def orders(tmp_path: Path, lock: float) -> Iterator[Queue]:
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        yield backend.queue("orders", lock=lock)


HANDLED = ("tenure_messages_handled_total", "completed", "orders")


def test_it_answers_while_processes_start_run_and_drain(start: Any, orders: Queue, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"import os, time\nwhile os.path.exists('slow'): time.sleep(0.02)\n{WORKER}")
    (tmp_path / "slow").touch()
    run = start("--processes", "2")
    run.wait_for("started", 2)
    assert run.get("/ready") == (503, "none of 0 processes is ready\n")
    assert run.get("/live") == (200, "live\n")
    assert run.get("/keda/v1/queues/orders")[0] == 503
    assert run.metrics()["tenure_processes", "starting"] == 2.0
    (tmp_path / "slow").unlink()
    run.wait_ready(2)
    assert run.get("/live") == (200, "live\n")
    assert run.get("/keda/v1/queues/unknown")[0] == 404
    orders.send_batch([tenure.Outgoing.json(number) for number in range(100)])
    wait_until(lambda: run.metrics().get(HANDLED) == 100.0, run.shown)
    found = run.metrics()
    assert found["tenure_handlers_concurrency", "orders"] == 20.0  # of both
    assert found["tenure_processes", "running"] == 2.0
    assert found["tenure_queue_messages", "orders", "ready"] == 0.0
    assert found["tenure_leader", "chair"] == 1.0
    orders.send(json=-50)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    wait_until(lambda: json.loads(run.get("/keda/v1/queues/orders")[1])["backlog"] == 1, run.shown)
    run.send_signal(signal.SIGTERM)
    run.wait_for("stopping")
    assert run.get("/live") == (200, "live\n")
    assert run.get("/ready")[0] == 503
    wait_until(lambda: run.metrics()["tenure_processes", "draining"] == 1.0, run.shown)
    assert run.metrics()[HANDLED] >= 100.0
    assert run.ended() == 0
    assert run.events("killed") == []


def test_counters_never_fall_when_processes_are_killed_replaced_retired_and_end(start: Any, orders: Queue) -> None:
    run = start("--processes", "2")
    run.wait_ready(2)
    fallen: list[str] = []
    failed: list[BaseException] = []
    scrapes = 0
    is_over = threading.Event()

    def scrape() -> None:
        nonlocal scrapes
        before: dict[tuple[str, ...], float] = {}
        try:
            while not is_over.is_set():
                found = run.metrics()
                for key, value in before.items():
                    if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and found.get(key, 0.0) < value:
                        fallen.append(f"{key} fell from {value} to {found.get(key)}")
                before = found
                scrapes += 1
        except BaseException as error:
            failed.append(error)

    def sends(first: int) -> None:
        orders.send_batch([tenure.Outgoing.json(number) for number in range(first, first + 300)])

    scraping = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in scraping:
        thread.start()
    try:
        for round_ in range(2):
            sends(round_ * 1_000)
            os.kill(min(run.pids()), signal.SIGKILL)
            run.wait_for("crashed", round_ + 1)
            wait_until(lambda: len(run.pids()) == 2, run.shown)
            sends(round_ * 1_000 + 300)
            before = len(run.events("ended"))
            run.send_signal(signal.SIGHUP)
            run.wait_for("ended", before + 2)
            wait_until(lambda: len(run.pids()) == 2, run.shown)
            run.send_signal(signal.SIGTTIN)
            wait_until(lambda: len(run.pids()) == 3, run.shown)
            sends(round_ * 1_000 + 600)
            run.send_signal(signal.SIGTTOU)
            wait_until(lambda: len(run.pids()) == 2, run.shown)
        wait_until(lambda: orders.stats() == tenure.Stats(), run.shown)
        count = scrapes
        wait_until(lambda: scrapes > count + 2 or failed, run.shown)
        found = run.metrics()
    finally:
        is_over.set()
        for thread in scraping:
            thread.join(PATIENCE)
    assert (fallen, failed) == ([], [])
    assert scrapes > 10
    assert found["tenure_processes_crashed_total",] == 2.0
    # Counts of a killed process since the last scrape are lost, and so is no more than that.
    assert 900.0 < found[HANDLED] <= 1_900.0
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_a_crash_loop_is_told_and_takes_no_other_process_with_it(start: Any, orders: Queue, tmp_path: Path) -> None:
    run = start()
    run.wait_ready(1)
    works = run.pids()
    (tmp_path / "broken").touch()
    run.send_signal(signal.SIGTTIN)
    run.wait_for("crashed", count=2)
    code, said = run.get("/ready")
    assert code == 200
    assert re.fullmatch(
        r"ready: 1 of 1 processes; \d+ crashes in a row, last process \d+: ended with code 78"
        r"(; the next one begins in \d+ s)?\n",
        said,
    ), said
    orders.send(json=1)
    wait_until(lambda: run.metrics().get(HANDLED) == 1.0, run.shown)
    (tmp_path / "broken").unlink()
    run.wait_for("begun", count=2)
    assert works < run.pids()
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_a_process_that_is_stopped_keeps_no_answer_waiting(start: Any, orders: Queue) -> None:
    run = start("--processes", "2")
    run.wait_ready(2)
    orders.send_batch([tenure.Outgoing.json(number) for number in range(50)])
    wait_until(lambda: run.metrics().get(HANDLED) == 50.0, run.shown)
    stopped = min(run.pids())
    os.kill(stopped, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert run.metrics()[HANDLED] == 50.0  # what it has told last still counts
        assert time.monotonic() - begun < 8.0
        assert run.get("/live")[0] == 200
        wait_until(lambda: run.get("/keda/v1/queues/orders")[0] == 200, run.shown)
    finally:
        os.kill(stopped, signal.SIGCONT)
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0


def test_a_supervisor_that_is_stopped_and_continued_is_live(start: Any) -> None:
    run = start()
    run.wait_ready(1)
    before = run.metrics()
    run.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    run.send_signal(signal.SIGCONT)
    assert run.get("/live") == (200, "live\n")
    run.wait_ready(1)
    assert run.metrics()["tenure_terms_total", "chair"] == before["tenure_terms_total", "chair"]


def test_a_port_that_is_taken_is_refused_before_any_process_starts(start: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start(http=f"127.0.0.1:{port}")
        assert run.ended() == 78
    assert f"--http can't listen on 127.0.0.1:{port}: " in run.output.read_text()
    assert run.events("started") == []
    assert not (tmp_path / "work.db").exists()


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("", 2),
        ("x", 2),
        ("9160x", 2),
        ("-1", 2),
        ("65536", 2),
        ("127.0.0.1:", 2),
        ("127.0.0.1:99999", 2),
        ("127.0.0.1:٣", 2),
        ("256.256.256.256:0", 78),
        (f"{'x' * 70}:0", 78),
        ("a..b:0", 78),
        ("192.0.2.1:0", 78),
    ],
)
@pytest.mark.usefixtures("lock")
def test_an_address_that_can_not_be_used_is_refused(tmp_path: Path, address: str, code: int) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    line = [sys.executable, "-m", "tenure", "run", "worker:service", "--http", address]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
    expected = "is no address; write HOST:PORT" if code == 2 else f"--http can't listen on {address}: "
    assert expected in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "work.db").exists()


@pytest.mark.parametrize("host", ["localhost", "[::1]", "0.0.0.0"])
def test_it_listens_where_it_is_told(start: Any, host: str) -> None:
    if host == "[::1]":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    run = start(http=f"{host}:0")
    run.wait_ready(1)
    assert run.address[0] == {"localhost": "127.0.0.1"}.get(host, host)


def test_metrics_and_numbers_need_the_token(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "s3cret\n")
    run = start()
    run.wait_ready(1)
    for path in ("/metrics", "/keda/v1/queues/orders"):
        assert run.get(path)[0] == run.get(path, Authorization="Bearer wrong")[0] == 401
        assert run.get(path, Authorization="Bearer s3cret")[0] == 200
    assert run.get("/live")[0] == 200
    assert "s3cret" not in run.shown()


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_says_no_more_keeps_it_not_from_ending(start: Any, sent: bytes) -> None:
    run = start()
    run.wait_ready(1)
    with socket.create_connection(run.address) as client:
        client.sendall(sent)
        run.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert run.ended() == 0
        assert time.monotonic() - begun < 30.0
        client.settimeout(PATIENCE)
        with suppress(ConnectionError):
            while client.recv(1_000):
                pass


def test_a_second_signal_still_cancels_the_handlers(start: Any, orders: Queue) -> None:
    run = start()
    run.wait_ready(1)
    orders.send(json=-600)
    wait_until(lambda: any(line.startswith("begins") for line in run.lines()), run.shown)
    with socket.create_connection(run.address):
        run.send_signal(signal.SIGTERM)
        run.wait_for("stopping")
        assert run.get("/live")[0] == 200
        run.send_signal(signal.SIGTERM)
        assert run.ended() == 0
    assert "interrupted -600" in run.lines()


def test_without_the_supervisor_processes_that_measure_end_too(start: Any) -> None:
    run = start("--processes", "2")
    run.wait_ready(2)
    pids = run.pids()
    run.send_signal(signal.SIGKILL)
    run.ended()
    wait_until(lambda: not any(map(is_alive, pids)), run.shown)
