"""A service in the processes of a web server: forked ones, and openings and closings in any number."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import tenure

FORK_WHILE_OPENED = """
import os, signal
import tenure.sync

service = tenure.sync.Service("sqlite:///work.db").open()
service._turn.acquire()  # as a thread that opens or closes it
child = os.fork()
if child == 0:
    signal.alarm(30)
    service.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

OPEN_IN_THREADS = """
import os, sys, threading
import tenure.sync

service = tenure.sync.Service("sqlite:///work.db").open()
sys.setswitchinterval(1e-6)
for _ in range(20):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(4)
        threads = [threading.Thread(target=lambda: (together.wait(), service.open())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        service.close()
        os._exit("not open" not in repr(service))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

FORK_WHILE_RUNNING = """
import asyncio, os
import tenure

service = tenure.Service("memory:")
orders = service.queue("orders", int)
codes = []
served = []
parent = os.getpid()

@service.handler(orders)
def serve(number: int) -> None:
    served.append(number)
    if number:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                served.clear()
                asyncio.run(service.serve(until_empty=True, sigterm=False))
                code = 0 if served == [0] else 2
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

@service.on_startup
async def fill() -> None:
    await orders.send(1 if os.getpid() == parent else 0)

service.run(until_empty=True)
assert codes == [0], codes
"""


@pytest.mark.process
@pytest.mark.parametrize("program", [FORK_WHILE_OPENED, OPEN_IN_THREADS, FORK_WHILE_RUNNING])
def test_a_forked_child_opens_and_closes_its_own(program: str, tmp_path: Path) -> None:
    line = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


async def test_closing_a_service_that_is_not_open_does_nothing() -> None:
    service = tenure.Service("memory:")
    await service.aclose()
    async with service:
        await service.open()
        await service.aclose()
        assert await service.queue("orders").queue.stats() == tenure.Stats()


@pytest.mark.parametrize("steps", range(6))
async def test_an_opening_during_a_closing_stays_open(steps: int, tmp_path: Path) -> None:
    service = tenure.Service(f"sqlite:///{tmp_path}/work.db")
    orders = service.queue("orders", str)
    await service.open()
    await asyncio.to_thread(lambda: orders.blocking.send("before"))
    closing = asyncio.create_task(service.aclose())
    for _ in range(steps):
        await asyncio.sleep(0)
    async with service:
        await closing
        await orders.send("after")
        assert (await orders.queue.stats()).ready == 2
        await asyncio.to_thread(lambda: orders.blocking.send("from a thread"))
