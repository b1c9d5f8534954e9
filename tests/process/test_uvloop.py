"""Programs on uvloop: elections, queues and hints work there as on asyncio's own loop."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure._backends import postgres
from tests.servers import Postgres, Redis, private, url_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]
pytest.importorskip("uvloop")

PROGRAM = """
import asyncio, sys, uvloop
import tenure

async def main(url, name):
    assert type(asyncio.get_running_loop()).__module__ == "uvloop"
    async with tenure.connect(url) as first, tenure.connect(url) as second:
        sender, receiver = first.queue(name), second.queue(name)
        told, handled = asyncio.Event(), []

        async def handle(message: tenure.Message) -> None:
            handled.append(message.body)
            told.set()

        consumer = receiver.consumer(handle, poll_every=3600)
        consuming = asyncio.create_task(consumer.run())
        for number in range(20):
            told.clear()
            await sender.send(b"%d" % number)
            if number >= 10:  # from now on it surely waits, and only a hint can wake it
                await asyncio.wait_for(told.wait(), 60)
                await asyncio.sleep(0.01)
        while len(handled) < 20:
            await asyncio.sleep(0.01)
        consumer.drain()
        await consuming
        assert (await sender.stats()).backlog == 0

        turns = []

        async def lead(term: tenure.Term) -> None:
            turns.append(term.token)
            term.check()
            await asyncio.sleep(0.1)

        await asyncio.gather(*(one.election(name, ttl=5).run(lead, again=False) for one in (first, second)))
        assert turns == sorted(set(turns)) and len(turns) == 2, turns

        async def last(message: tenure.Message) -> None:
            print("handled", flush=True)
            await asyncio.sleep(0.5)
            print("done", flush=True)

        await sender.send(b"last")
        await receiver.consume(last)  # until SIGTERM
        print("over", flush=True)

uvloop.run(main(*sys.argv[1:]))
"""


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "sqlite":
            yield f"sqlite:///{tmp_path}/work.db"
        case "postgresql":
            with private(Postgres) as server:
                asyncio.run(postgres.migrate(server.url))
                yield server.url
        case "redis":
            yield url_of(Redis)


def test_a_program_on_uvloop_leads_receives_by_hints_and_drains_on_sigterm(url: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", PROGRAM, url, f"uvloop-{tmp_path.name}"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "handled\n"
            program.send_signal(signal.SIGTERM)
            assert program.stdout.read() == "done\nover\n"
            assert program.wait() == 0
        finally:
            program.kill()
