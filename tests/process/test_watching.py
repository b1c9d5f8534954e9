"""``queue --watch`` and ``watch`` on a server that starts later, and is restarted meanwhile."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tenure
import tenure.sync
from tests import warm
from tests.servers import Nats, Postgres, Redis, private
from tests.terminal import Terminal

pytestmark = pytest.mark.process

Start = Callable[..., warm.Process]

QUEUE, LEADER = ["queue", "--watch", "--every", "50ms"], ["watch", "job"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[warm.Process] = []

    def watch(url: str, *arguments: str) -> warm.Process:
        started.append(warm.start([*arguments, "--on", url]))
        return started[-1]

    yield watch
    for process in started:
        process.kill()
        process.communicate()


async def use(url: str) -> None:
    async with tenure.connect(url) as backend:
        await backend.queue("orders").send(b"x")
        async with backend.election("job").campaign():
            pass


def line_with(stream: Any, *texts: str) -> str:
    for line in stream:
        if all(text in line for text in texts):
            return str(line)
    raise AssertionError(f"it ended without a line with {texts}")


@pytest.mark.parametrize("kind", [Redis, Postgres, Nats], ids=lambda kind: kind.__name__)
def test_they_wait_for_a_server_and_outlive_its_restarts(start: Start, kind: type[Redis | Postgres | Nats]) -> None:
    with private(kind) as server:
        if kind is Postgres:
            subprocess.run([sys.executable, "-m", "tenure.cli", "migrate", server.url], check=True, capture_output=True)
        server.stop()
        watching = [start(server.url, *QUEUE), start(server.url, *LEADER)]
        for process in watching:
            line_with(process.stderr, "can't be reached", "trying again until it answers")
        server.start()
        asyncio.run(use(server.url))
        line_with(watching[0].stdout, "  orders  ")
        line_with(watching[1].stdout, "(none)")
        server.stop()
        for process in watching:
            assert "the store answers now" in process.stderr.readline()  # type: ignore[union-attr]
            line_with(process.stderr, "trying again until it answers")
        server.start()
        for process in watching:
            assert "the store answers now" in process.stderr.readline()  # type: ignore[union-attr]
        with tenure.sync.connect(server.url) as backend, backend.election("job").campaign():
            line_with(watching[1].stdout, "token ")  # a term that ends at once may be missed
        for process in watching:
            process.send_signal(2)
            assert process.wait(60) == 0


def test_how_long_they_wait(start: Start) -> None:
    nowhere, began = "redis://127.0.0.1:1", time.monotonic()
    for process in [start(nowhere, *arguments, "--wait", "0") for arguments in (QUEUE, LEADER)]:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (69, "")
        assert err.startswith("tenure: error: redis://127.0.0.1:1/0 can't be reached")
        assert err.count("\n") == 1
    for process in [start(nowhere, *arguments, "--wait", "300ms") for arguments in (QUEUE, LEADER)]:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (69, "")
        assert [line.split()[1] for line in err.splitlines()] == ["warning:", "error:"]
        assert err.endswith("; given up after --wait 0.3 s\n")
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize("arguments", [QUEUE, LEADER], ids=lambda arguments: arguments[0])
def test_a_store_that_stops_answering_is_shown_on_a_terminal(arguments: list[str]) -> None:
    with private(Redis) as server, Terminal(*arguments, "--on", server.url) as terminal:
        asyncio.run(use(server.url))
        terminal.until_shown(f"tenure {arguments[0]}")
        server.stop()
        terminal.until_shown("no answer since 2")
        server.start()
        asyncio.run(use(server.url))
        terminal.until_gone("no answer")
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_a_server_that_does_not_answer_is_not_waited_for_longer(start: Start) -> None:
    with private(Redis) as server:
        server.pause()
        out, err = start(server.url, *QUEUE, "--wait", "300ms").communicate(timeout=60)
        server.resume()
    assert (out, err) == ("", "tenure: error: the store did not answer; given up after --wait 0.3 s\n")
