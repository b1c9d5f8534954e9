"""Real consumers on the look-alike of Service Bus: stopped past their lock, and with a blocked loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tests.servers import ServiceBus, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
LOCK = 5.0
"""The shortest lock, in seconds."""


@pytest.fixture
def server() -> Iterator[ServiceBus]:
    with private(ServiceBus) as server:
        yield server


def start(server: ServiceBus, mode: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "tests.stores.servicebus.consumer", server.url, mode, str(seconds)]
    return subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def test_a_consumer_that_was_stopped_past_its_lock_settles_nothing(server: ServiceBus) -> None:
    async with tenure.connect(server.url) as backend:
        queue = backend.queue("q", lock=LOCK)
        await queue.send(b"a", id="a")
        process = start(server, "stopped")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "received\n"
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            [again] = await queue.receive(wait=3 * LOCK)  # when the lock of the other has ended
            assert (again.id, again.delivery_count) == ("a", 2)
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate(timeout=60)
            assert out.split() == ["LockLost"] * 3
            await again.complete()
            assert (await queue.stats()).ready == 0
        finally:
            process.kill()
            process.wait()


async def test_a_blocked_loop_loses_no_lock(server: ServiceBus) -> None:
    async with tenure.connect(server.url) as backend:
        queue = backend.queue("q", lock=LOCK)
        await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(10)])
        began = time.monotonic()
        process = start(server, "blocked", 3 * LOCK)
        try:
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
        assert time.monotonic() - began > 3 * LOCK
        lines = out.splitlines()
        assert "blocked" in lines
        assert "lost" not in lines
        assert sorted(lines) == sorted(["blocked", *(f"handled {number} 1" for number in range(10))])
