"""RabbitMQ killed under load; a consumer that hangs past its lock, and one that blocks its loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import tenure
from tenure._queue.broker import Broker
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settlement
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until
from tests.long import LONG
from tests.servers import RabbitMQ, private, url_of

pytest.importorskip("aiormq")

from tenure._backends import rabbitmq  # after the check for its driver

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SERVER_KILLS = 5 if LONG else 2


async def test_no_acknowledged_send_is_lost_when_the_server_is_killed() -> None:
    with private(RabbitMQ) as server:
        backend, other = (rabbitmq.open(Url.parse(f"{server.url}?timeout=5")) for _ in range(2))
        await backend.broker.declare("work", {"max_deliveries": 1_000})
        await asyncio.sleep(1.0)  # it notes within half a second which quorum queues it has
        sent: set[str] = set()
        handled: set[str] = set()
        enough = asyncio.Event()
        tasks = [
            asyncio.create_task(send(backend.broker, sent, enough)),
            asyncio.create_task(handle(other.broker, handled)),
        ]
        try:
            for _ in range(SERVER_KILLS):
                before = len(sent)
                await until(lambda before=before: len(sent) > before + 500, within=60)  # type: ignore[misc]
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            enough.set()
            await tasks[0]
            await until(lambda: sent <= handled, within=60)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await backend.close()
            await other.close()
    print(f"{len(sent)} acknowledged sends, {SERVER_KILLS} kills of the server, {len(sent - handled)} lost")
    assert len(sent) > 500 * SERVER_KILLS


async def send(broker: Broker, sent: set[str], enough: asyncio.Event) -> None:
    """Send until *enough*; note what was acknowledged. What was not is sent again under another id."""
    number = 0
    while not enough.is_set():
        ids = [f"m{number + place}" for place in range(20)]
        number += len(ids)
        try:
            await broker.send("work", [Outgoing(b"body", id=name) for name in ids])
            sent.update(ids)
        except Unavailable:
            await asyncio.sleep(0.05)


async def handle(broker: Broker, handled: set[str]) -> None:
    while True:
        try:
            claim = await broker.receive("work", 100, 10.0)
            handled.update(one.id for one in claim.deliveries)
            await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            if not claim.deliveries:
                await asyncio.sleep(0.01)
        except Unavailable:
            await asyncio.sleep(0.05)


HANGING = """
import asyncio, sys
import tenure

async def main(url, name):
    async with tenure.connect(url) as backend:
        [message] = await backend.queue(name, lock=2.0).receive(wait=20)
        print("received", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        try:
            await message.complete()
            print("completed", flush=True)
        except tenure.LockLost:
            print("LockLost", flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def test_a_stopped_process_loses_its_message(tmp_path: Path) -> None:
    url, name = f"{url_of(RabbitMQ)}?heartbeat=2", f"stopped-{os.getpid()}-{time.time_ns()}"
    async with tenure.connect(url) as backend:
        queue = backend.queue(name, lock=2.0)
        await queue.send(b"body")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            HANGING,
            url,
            name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"received\n"
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            [message] = await queue.receive(wait=30)  # by two to three heartbeats
            print(f"delivered again {time.monotonic() - stopped_at:.1f} s after SIGSTOP, with heartbeat=2")
            assert message.delivery_count == 2
            process.send_signal(signal.SIGCONT)
            process.stdin.write(b"\n")
            assert await asyncio.wait_for(process.stdout.readline(), 20) == b"LockLost\n"
            await message.complete()
            assert await queue.stats() == Stats()
        finally:
            with suppress(ProcessLookupError):  # it may have ended by itself
                process.kill()
            await process.wait()


async def test_a_blocked_loop_loses_no_lock() -> None:
    name, lock = f"blocked-{os.getpid()}-{time.time_ns()}", 2.0
    handled: list[int] = []
    lost: list[BaseException] = []

    async def block(message: tenure.Message) -> None:
        if message.body == b"block":
            time.sleep(3 * lock)
        handled.append(message.delivery_count)

    async with tenure.connect(f"{url_of(RabbitMQ)}?heartbeat=1") as backend:
        queue = backend.queue(name, lock=lock)
        await queue.send_batch([tenure.Outgoing(b"block")] + [tenure.Outgoing(b"x") for _ in range(9)])
        await queue.consume(block, concurrency=10, until_empty=True, on_error=lambda _, error: lost.append(error))
        assert await queue.stats() == Stats()
    assert lost == []
    assert len(handled) == 10
    assert set(handled) == {1}
