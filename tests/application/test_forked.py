"""A forked child: terms and locks of its parent are not valid in it, and it ends quietly."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tests.servers import Postgres, Redis, Server, url_of

TTL = 30.0

QUIET = ("-W", "ignore:This process:DeprecationWarning")
"""From 3.12 on, Python warns of a fork beside threads; these programs fork there on purpose."""


def in_child(function: Callable[[], object]) -> str:
    """Call *function* in a forked child; return what it returned, or raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory:"
        case "sqlite":
            return f"sqlite:///{tmp_path}/work.db"
    return f"{url_of(Redis)}?prefix={uuid4().hex}:"


def test_a_term_belongs_to_the_process_that_won_it(url: str) -> None:
    with tenure.sync.connect(url) as backend, backend.election("chair", ttl=TTL).campaign() as term:
        assert "belongs to process" in in_child(term.check)
        assert in_child(term.remaining) == "0.0"
        term.check()
        assert term.remaining() > 0.0


async def test_also_a_term_of_a_loop(url: str) -> None:
    async with tenure.connect(url) as backend, backend.election("chair", ttl=TTL).campaign() as term:
        assert in_child(term.check).startswith("TermLost: ")
        term.check()


async def test_a_lock_belongs_to_the_process_that_has_it(url: str) -> None:
    """Of a session, and of the messages that handlers of both kinds of consumers have in hand."""
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders", lock=TTL)
        await queue.send_batch([tenure.Outgoing(b"", session=one) for one in ("own", "handled", None)])
        async with queue.session("own") as session:
            assert in_child(session.remaining) == "0.0"
            assert session.remaining() > 0.0
            said: list[str] = []

            async def handle(message: tenure.Message) -> None:
                remaining = functools.partial(consumers[message.session].remaining, message)
                said.append(f"{in_child(remaining)} {remaining() > 0.0}")

            consumers: dict[str | None, tenure.Consumer] = {
                one: queue.consumer(handle, sessions=one is not None, until_empty=True) for one in (None, "handled")
            }
            for consumer in consumers.values():
                await consumer.run()
            assert said == ["0.0 True", "0.0 True"]


def test_also_a_session_of_a_thread(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        queue = backend.queue("orders", lock=TTL)
        queue.send(b"", session="s")
        with queue.session("s") as session:
            assert in_child(session.remaining) == "0.0"
            assert session.remaining() > 0.0


def test_a_child_that_opens_the_backend_anew_does_not_wait_for_consumers_of_its_parent(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        orders = backend.queue("orders")

        def handle(message: tenure.sync.Message) -> tenure.Reply:
            return tenure.Reply(b"yes")

        consuming = threading.Thread(target=orders.consume, args=(handle,), kwargs={"sigterm": False})
        consuming.start()
        assert orders.request(b"?", timeout=60).body == b"yes"  # so there are requests, too

        def open_anew() -> str:
            signal.alarm(30)
            sent = backend.open().queue("mails").send(b"of the child", id="a")
            backend.close()
            return sent

        while orders.stats() != tenure.Stats():  # not in a transaction of SQLite, whose locks the child would inherit
            time.sleep(0.01)
        time.sleep(0.2)
        assert in_child(open_anew) == "a"
        assert orders.request(b"?", timeout=60).body == b"yes"
        orders.drain()
        consuming.join()


async def test_a_child_is_refused_the_backend_of_its_parent(url: str) -> None:
    async with tenure.connect(url) as backend:
        queue, election = backend.queue("orders"), backend.election("chair", ttl=TTL)
        await queue.send(b"one")
        [message] = await queue.receive()
        verbs: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: queue.send(b"two"),
            queue.receive,
            message.complete,
            message.renew,
            queue.stats,
            queue.session("one").__aenter__,
            queue.dead_letters.peek,
            lambda: queue.consume(print, until_empty=True),
            election.leader,
            lambda: election.run(lambda term: asyncio.sleep(0)),
            backend.leaders,
            backend.queues,
        ]

        async def ask() -> list[str]:
            return [repr(one) for one in await asyncio.gather(*(verb() for verb in verbs), return_exceptions=True)]

        for said in in_child(lambda: "\n".join(asyncio.run(ask()))).splitlines():
            assert said.startswith("ConfigError")
            assert "connect again after the fork" in said
        assert in_child(lambda: backend.queue("others")).startswith("ConfigError")
        await message.complete()  # what is the parent's goes on
        await queue.send(b"three")
        assert (await queue.stats()).ready == 1


@pytest.mark.parametrize(("form", "code"), [("block", 7), ("work", 0), ("session", 7)])
def test_a_child_that_exits_inside_of_a_block_ends_quietly(form: str, code: int) -> None:
    """From a thread, Python itself ends the child with 0."""
    entered = {
        "block": "with backend.election('chair', ttl=30).campaign() as term: fork()",
        "work": "backend.election('chair', ttl=30).run(lambda term: fork())",
        "session": "backend.queue('q').send(b'', session='s')\n    with backend.queue('q').session('s'): fork()",
    }[form]
    program = f"""
import os, sys, tenure.sync

def fork():
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

with tenure.sync.connect("memory:") as backend:
    {entered}
print("left")
"""
    done = forked(program)
    assert (done.stdout, done.stderr) == (f"{code}\nleft\n", "")


def forked(program: str) -> subprocess.CompletedProcess[str]:
    """Run a *program* that forks."""
    line = [sys.executable, *QUIET, "-c", program]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def watched() -> set[tuple[str, str]]:
    """Return what the loops of this process wait for: the number of each ``epoll``, and the lines about it."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if one.readlink().name == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{one.name}").read_text().splitlines()
                found |= {(one.name, line) for line in lines if line.startswith("tfd:")}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("server", [Redis, Postgres], ids=lambda server: server.__name__)
async def test_a_child_that_leaves_the_block_takes_nothing_from_the_loop_of_its_parent(server: type[Server]) -> None:
    """A connection that is collected in the child tells the kernel not to wait for it: not for the parent either."""
    backend = tenure.connect(url_of(server))
    await backend.__aenter__()
    await backend.migrate()
    queue = backend.queue(f"forked-{uuid4().hex}")
    await queue.send(b"one")
    before = watched()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            await backend.__aexit__(None, None, None)
            del backend, queue
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watched() >= before
    async with asyncio.timeout(30):
        await queue.send(b"two")
        await queue.delete(force=True)
        await backend.__aexit__(None, None, None)


@pytest.mark.parametrize("sessions", [False, True])
def test_a_child_that_exits_inside_of_a_handler_on_a_loop_ends_quietly(sessions: bool) -> None:
    program = f"""
import asyncio, os, sys, tenure

async def handle(message):
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)  # the child has closed its copy of the loop, which is the parent's, too

async def main():
    async with tenure.connect("memory:") as backend:
        await backend.queue("q").send(b"", session="s" if {sessions} else None)
        await backend.queue("q").consume(handle, sessions={sessions})

asyncio.run(main())
"""
    done = forked(program)
    assert (done.stdout, done.stderr) == ("7\n", "")
