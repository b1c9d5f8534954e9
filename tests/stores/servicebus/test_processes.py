"""Consumers on the look-alike of Service Bus: a process that is stopped past its lock, and a blocked loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tenure.events import LockEnded
from tenure.testing import until
from tests.clocks import TurnedClock, ring_alarms
from tests.durations import wait_until
from tests.servers import ServiceBus, shared
from tests.servers.turned_process import CAN_TURN, TurnedProcess
from tests.stores.servicebus.opened import look_shortly

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
LOCK = 5.0
"""The shortest lock, in seconds."""
PATIENCE = 30.0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceBus]:
    look_shortly(monkeypatch)
    server = shared(ServiceBus)
    server.reset()
    yield server
    server.reset()


def start(server: ServiceBus) -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "tests.stores.servicebus.consumer", server.url]
    return subprocess.Popen(run, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_a_consumer_that_was_stopped_past_its_lock_settles_nothing(server: ServiceBus) -> None:
    async with tenure.connect(server.url) as backend:
        queue = backend.queue("q", lock=LOCK)
        await queue.send(b"a", id="a")
        with start(server) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "received\n"
                await until(lambda: server.control("credit", "q") == "0")  # else it would be given the message again
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
                if CAN_TURN:  # else its lock ends in real time
                    server.turn(LOCK + 1)
                    TurnedProcess(process.pid).turn(LOCK + 1)
                [again] = await queue.receive(wait=PATIENCE)  # when the lock of the other has ended
                assert (again.id, again.delivery_count) == ("a", 2)
                process.send_signal(signal.SIGCONT)
                out, _ = process.communicate("go on\n", timeout=60)
                assert out.split() == ["LockLost"] * 3
                await again.complete()
                assert (await queue.stats()).ready == 0
            finally:
                process.kill()


async def test_a_blocked_loop_loses_no_lock(server: ServiceBus) -> None:
    lock, step = 60.0, 6.0  # long beside the delays of a busy machine, as no time is waited for
    clock = TurnedClock()
    begun: list[bytes] = []
    handled: list[tuple[bytes, int]] = []
    events: list[tenure.Event] = []

    def is_renewed() -> bool:
        ring_alarms(clock)
        return float(server.control("lock-left", "q")) > lock / 2

    def block() -> None:
        """Hold up this loop for three locks, on the clocks of both sides: each step waits for the renewals before."""
        while clock.turned < 3 * lock:
            wait_until(is_renewed, lambda: "a lock is not renewed while the loop is blocked")
            server.turn(step)
            clock.turned += step

    async def handle(message: tenure.Message) -> None:
        begun.append(message.body)
        await until(lambda: len(begun) >= 10, within=PATIENCE)
        if message.body == b"0" and message.delivery_count == 1:
            block()
        handled.append((message.body, message.delivery_count))

    async with tenure.Backend(server.url, clock=clock, on_event=events.append) as backend:
        queue = backend.queue("q", lock=lock)
        await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(10)])
        await queue.consume(handle, concurrency=10, until_empty=True, sigterm=False)
    assert not [event for event in events if isinstance(event, LockEnded)]
    assert sorted(handled) == [(b"%d" % number, 1) for number in range(10)]
