"""``tenure run`` with a process that hangs: it is named, shows where it is, and is replaced; the others go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import tenure.sync
from tenure.sync import Queue
from tests.durations import stretched, wait_until
from tests.process.test_run_http import HttpRun
from tests.process_states import is_alive

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

WORKER = """
import asyncio, os, re, sqlite3, time
import tenure

service = tenure.Service("sqlite:///work.db")
orders = service.queue("orders", str)

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def sleep_on_the_loop():
    time.sleep(3600)

async def match_for_ever():  # one call in C, which lets no other thread run
    re.match("(a+)+$", 64 * "a" + "b")

async def stop_itself():
    os.kill(os.getpid(), 19)
    await asyncio.sleep(0)

@service.handler(orders, concurrency=4)
async def serve(what: str, message: tenure.Message) -> None:
    say("begins", what, os.getpid())
    if what in globals() and message.delivery_count == 1:
        await globals()[what]()
    say("ends", what, os.getpid())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HttpRun]]:
    (tmp_path / "worker.py").write_text(WORKER)
    started: list[HttpRun] = []

    def start(*arguments: str) -> HttpRun:
        started.append(HttpRun(tmp_path, "--http", "0", *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Queue]:
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        yield backend.queue("orders")


def said(run: HttpRun, begins: str) -> list[str]:
    return [line for line in run.lines() if line.startswith(begins)]


def of_process(run: HttpRun, event: str, pid: int) -> dict[str, Any]:
    """Wait for an event of one process; on a busy machine, the other one may be late, too."""
    wait_until(lambda: [one for one in run.events(event) if one["pid"] == pid], run.shown)
    return next(one for one in run.events(event) if one["pid"] == pid)


@pytest.mark.parametrize("what", ["sleep_on_the_loop", "match_for_ever", "stop_itself"])
def test_a_process_that_hangs_is_named_and_replaced(start: Callable[..., HttpRun], orders: Queue, what: str) -> None:
    run = start("--processes", "2", "--hung-max", "10")
    run.wait_ready(2)
    orders.send(what.encode())
    wait_until(lambda: said(run, f"begins {what}"), run.shown)
    [begun] = said(run, f"begins {what}")
    pid = int(begun.split()[2])
    hung = of_process(run, "hung", pid)
    assert re.match(r"no sign of life for \d+ s, with \d handlers running before; ", hung["text"])
    orders.send(b"well")  # the other one handles it
    wait_until(lambda: said(run, "ends well"), run.shown)
    assert run.get("/live")[0] == 200
    of_process(run, "killed", pid)
    run.wait_for("begun", count=3)
    assert not is_alive(pid)
    if what != "stop_itself":  # a stopped process shows nothing
        stacks = run.output.read_text()
        assert re.search(rf'worker.py", line \d+ in {what}\n', stacks), stacks
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    for event in ("hung", "killed"):
        assert sum(one["pid"] == pid for one in run.events(event)) == 1


def test_a_process_that_gives_signs_of_life_again_is_kept(start: Callable[..., HttpRun]) -> None:
    run = start("--hung-max", f"{stretched(20.0):g}")
    run.wait_ready(1)
    [pid] = run.pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for("hung")
        assert re.fullmatch(r"live; process 1 has hung for \d+ s\n", run.get("/live")[1])
    finally:
        os.kill(pid, signal.SIGCONT)
    run.wait_for("recovered")
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert not run.events("killed")
    assert "Current thread" in run.output.read_text() or "Thread 0x" in run.output.read_text()


def test_a_process_that_can_report_no_more_ends_with_the_reason(start: Callable[..., HttpRun], tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"""{WORKER}
status, calls = service.status, iter(range(3))

async def broken_status():
    if next(calls, None) is None:
        raise RuntimeError("no status today")
    return await status()

service.status = broken_status

@service.on_shutdown
def fail():
    raise ValueError("an end that fails, too")
""")
    run = start()
    [crashed, *_] = run.wait_for("crashed")
    assert crashed["text"].startswith("ended with code 1; ")
    assert "RuntimeError: no status today" in run.output.read_text()
    run.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    assert not run.events("hung")
