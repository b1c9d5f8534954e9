"""Consumers with real threads, processes and signals: handlers that block, crash, or can't be stopped."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

import tenure
from tenure._backend import connect
from tenure._queue.message import Stats
from tenure._queue.received import BlockingMessage, Received
from tenure._timing import Timing
from tenure.events import HandlerOverran
from tests.consuming import consume_down_to
from tests.durations import PATIENCE, stretched, until, wait_until
from tests.process_states import is_alive, is_group_alive, members_of


@pytest.fixture
def stopping_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give handlers unlimited time to stop, so that a busy machine changes nothing."""
    monkeypatch.setattr("tenure._queue.options.Timing", functools.partial(Timing, grace=10.0))


def test_plain_functions_run_in_threads() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue, results = backend.queue("orders", lock=30), backend.queue("results")
            await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(12)])
            threads: set[str] = set()
            together = threading.Barrier(4, timeout=PATIENCE)

            def handler(message: BlockingMessage) -> object:
                threads.add(threading.current_thread().name)
                together.wait()
                match int(message.body):
                    case 0:
                        message.complete(sends=[("results", tenure.Outgoing(b"sent"))])
                    case 1:
                        message.dead_letter("bad", "very", error=ValueError("x"))
                    case 2:
                        message.defer()
                    case 3:
                        before = message.locked_until
                        time.sleep(0.05)
                        assert message.renew() > before
                        assert message.locked_until > before
                        message.abandon(delay=600)
                    case 4:
                        return tenure.Reject("odd")
                    case 5:
                        raise tenure.Retry(delay=600)
                    case 6:
                        message.complete()
                        with pytest.raises(tenure.LockLost):
                            message.complete()
                return None

            await consume_down_to(Stats(delayed=2, deferred=1, dead=2), queue, handler, concurrency=4)
            assert len(threads) == 4
            assert all(name.startswith("tenure-orders") for name in threads)
            assert [one.body for one in await results.receive(5)] == [b"sent"]

    asyncio.run(main())


def test_the_awaitable_of_a_plain_function_is_awaited() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30)
            await queue.send(b"a")
            seen: list[bytes] = []

            async def inner(message: Any) -> None:
                await asyncio.sleep(0)
                seen.append(message.body)

            await queue.consume(lambda message: inner(message), until_empty=True)
            assert seen == [b"a"]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_handler_that_blocks_keeps_its_lock(kind: str) -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            lock = stretched(1.0)
            queue = backend.queue("orders", lock=lock)
            await queue.send(b"a")
            counts: list[int] = []

            def blocks(message: Any) -> None:
                counts.append(message.delivery_count)
                time.sleep(1.2 * lock)  # longer than its lock, and nothing else runs on the loop

            async def blocks_the_loop(message: Any) -> None:
                blocks(message)

            await queue.consume(blocks_the_loop if kind == "async" else blocks, until_empty=True)
            assert counts == [1]
            assert await queue.stats() == Stats()

    asyncio.run(main())


def test_a_blocked_loop_keeps_no_waiting_messages() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue, broker = backend.queue("orders", lock=stretched(2.0)), backend._connection.opened.broker  # type: ignore[union-attr]
            await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(500)])
            blocked, looked = threading.Event(), threading.Event()
            taken: list[bytes] = []

            async def handler(message: tenure.Message) -> None:
                taken.append(message.body)
                if message.body == b"100":
                    blocked.set()
                    assert looked.wait(PATIENCE)

            consuming = asyncio.ensure_future(queue.consume(handler, concurrency=1))
            seen: list[tuple[bytes, int]] = []

            def other() -> None:
                try:
                    assert blocked.wait(PATIENCE)
                    seen.extend(asyncio.run(look()))
                finally:
                    looked.set()

            async def look() -> list[tuple[bytes, int]]:
                await until(are_given_back)
                claim = await broker.receive("orders", 1_000, 60.0)
                return [(one.body, one.delivery_count) for one in claim.deliveries]

            async def are_given_back() -> bool:
                return (await broker.stats("orders")).ready == 500 - len(taken)

            await asyncio.to_thread(other)
            await queue.drain()
            await consuming
            assert len(seen) == 500 - len(taken)
            assert {count for _, count in seen} == {1}
            assert len(set(taken)) == len(taken)
            assert await queue.stats() == Stats(locked=len(seen))

    asyncio.run(main())


def test_a_thread_can_not_be_stopped_and_its_lock_runs_out() -> None:
    async def main() -> None:
        go_on, entered = threading.Event(), threading.Event()
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=stretched(1.0), max_deliveries=5)
            await queue.send(b"a")

            def stuck(message: Any) -> None:
                entered.set()
                go_on.wait(2 * PATIENCE)

            consuming = asyncio.ensure_future(queue.consume(stuck))
            try:
                await until(entered.is_set)
                async with asyncio.timeout(PATIENCE):
                    await queue.drain(grace=0.1)
                    await consuming
                    [message] = await queue.receive(wait=PATIENCE)
                # Not given back while it may still do something: then, the first delivery would not be counted.
                assert message.delivery_count > 1
            finally:
                go_on.set()

    asyncio.run(main())


@pytest.mark.usefixtures("stopping_takes_long")
@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("what", ["succeeds", "fails", "returns an awaitable"])
def test_a_thread_that_ends_after_the_grace_of_a_drain_is_judged_by_its_outcome(what: str, session: str | None) -> None:
    async def main() -> None:
        entered, go_on = threading.Event(), threading.Event()
        hooked: list[str] = []
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=60.0, max_deliveries=1)
            await queue.send(b"a", session=session)

            def handler(message: Any) -> Any:
                entered.set()
                go_on.wait(PATIENCE)
                match what:
                    case "fails":
                        raise ValueError("x")
                    case "returns an awaitable":
                        return asyncio.sleep(0)
                return None

            note = lambda message, error: hooked.append(str(error))  # noqa: E731
            consuming = asyncio.ensure_future(
                queue.consume(handler, sessions=session is not None, concurrency=1, on_error=note)
            )
            await until(entered.is_set)
            asyncio.get_running_loop().call_later(stretched(0.3), go_on.set)
            await queue.drain(grace=0.1)
            await consuming
            match what:
                case "succeeds":
                    assert await queue.stats() == Stats()
                case "fails":
                    assert await queue.stats() == Stats(dead=1)
                    assert hooked == ["x"]
                case "returns an awaitable":  # it is not awaited any more
                    assert (await queue.stats()).ready == 1

    asyncio.run(main())


def test_a_session_in_which_a_thread_runs_on_goes_to_no_other_consumer() -> None:
    async def refused(*arguments: Any) -> NoReturn:
        raise tenure.ConfigError("the broker has no such verb")

    async def case(ended_by: str) -> None:
        go_on, entered = threading.Event(), threading.Event()
        events: list[Any] = []
        async with connect("memory:", on_event=events.append) as backend:
            queue = backend.queue("orders", lock=stretched(1.5), max_deliveries=5)
            await queue.send(b"a", session="s")

            def stuck(message: Any) -> None:
                entered.set()
                go_on.wait(2 * PATIENCE)

            def overruns() -> list[Any]:
                return [one for one in events if isinstance(one, HandlerOverran)]

            most = 0.3 if ended_by == "max_hold" else 600.0
            workers = 2 if ended_by == "failure" else 1
            consuming = asyncio.ensure_future(queue.consume(stuck, sessions=True, concurrency=workers, max_hold=most))
            try:
                await until(entered.is_set)
                broker: Any = queue._context.broker
                lock = broker._memory.queues["orders"].live.sessions["s"]
                first = lock.locked_until
                if ended_by != "max_hold":
                    await until(lambda: lock.locked_until > first, what="its renewal")
                async with asyncio.timeout(PATIENCE):
                    match ended_by:
                        case "drain":
                            await queue.drain(grace=0.1)
                            await consuming
                        case "cancel":
                            consuming.cancel()
                            await asyncio.wait({consuming})
                        case "max_hold":
                            await until(overruns)
                        case "failure":
                            accept, broker.accept = broker.accept, refused
                            await queue.send(b"b", session="t")
                            with pytest.raises(tenure.ConfigError, match="no such verb"):
                                await consuming
                            broker.accept = accept
                    async with queue.session("s") as session:
                        [message] = await session.receive()
                # It was not free before its lock had run out: what is given back with its session isn't counted.
                assert message.delivery_count > 1, ended_by
                assert len(overruns()) == 1, ended_by
            finally:
                go_on.set()
            if not consuming.done():
                await queue.drain()
                await consuming

    async def main() -> None:  # side by side, as each waits until its lock has run out
        await asyncio.gather(*map(case, ("drain", "cancel", "max_hold", "failure")))

    asyncio.run(main())


def work(message: Received) -> object:
    assert os.getpid() != int(message.headers["parent"])
    match message.body:
        case b"reject":
            raise tenure.Reject("bad", "x" * 300)
        case b"retry":
            return tenure.Retry(delay=600.0)
        case b"crash" if message.delivery_count == 1:
            os._exit(3)
        case b"fail":
            raise ValueError("in the child")
    return None


@pytest.mark.process
def test_heavy_handlers_run_in_processes() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30)
            failures: list[str] = []
            for body in (b"ok", b"reject", b"retry", b"fail"):
                await queue.send(body, headers={"parent": str(os.getpid())})
            policy = tenure.RetryPolicy(initial=600, maximum=600)
            note = lambda message, error: failures.append(type(error).__name__)  # noqa: E731
            left = Stats(delayed=2, dead=1)
            await consume_down_to(left, queue, work, run_in="process", concurrency=1, retry=policy, on_error=note)
            assert sorted(failures) == ["Reject", "Retry", "ValueError"]
            assert (await queue.dead_letters.peek())[0].description == "x" * 300
            with pytest.raises(tenure.ConfigError, match="another process can import"):
                await queue.consume(lambda message: None, run_in="process")

    asyncio.run(main())


class Odd(Exception):
    """An error that can be pickled, and not unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def record_pid(message: Received) -> None:
    """Work in a process, and record its pid."""
    if folder := message.headers.get("folder"):
        (Path(str(folder)) / f"{message.id}.{message.delivery_count}.{os.getpid()}").touch()
    match message.body:
        case b"segfault" if message.delivery_count == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"exit" if message.delivery_count == 1:
            sys.exit(3)
        case b"odd":
            raise Odd("a", "b")
        case b"long":
            subprocess.run(["sleep", "3600"], check=True)
        case b"short":
            time.sleep(1.5)


def pids(folder: Path) -> list[int]:
    return [int(one.name.rpartition(".")[2]) for one in folder.iterdir()]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_dies_harms_its_own_message_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30)
            failures: list[tuple[bytes, str]] = []
            for body in (b"short", b"short", b"segfault", b"exit", b"odd"):
                await queue.send(body, headers={"folder": str(tmp_path)}, id=None)
            note = lambda message, error: failures.append((message.body, str(error)))  # noqa: E731
            retry = tenure.RetryPolicy(initial=0)
            options: dict[str, Any] = {"concurrency": 5, "until_empty": True, "retry": retry, "on_error": note}
            await queue.consume(record_pid, run_in="process", **options)
            errors = dict(failures)
            assert set(errors) == {b"segfault", b"exit", b"odd"}
            assert "killed by signal 11 (SIGSEGV)" in errors[b"segfault"]
            assert "exit code 3" in errors[b"exit"]
            assert "Odd: ab (the exception can't be sent" in errors[b"odd"]
            assert (await queue.stats()).dead == 1
            [dead] = await queue.dead_letters.peek()
            assert dead.error is not None
            assert "in record_pid" in dead.error.traceback
            assert len([one for one in failures if one[0] != b"odd"]) == 2
            assert len(list(tmp_path.iterdir())) == 2 + 2 + 2 + 10  # no other message was delivered twice
            await until(lambda: not any(map(is_group_alive, pids(tmp_path))))

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("why", ["max_hold", "denied", "drain"])
@pytest.mark.parametrize("session", [None, "s"])
def test_a_process_is_stopped(why: str, session: str | None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if why == "drain":
        request.getfixturevalue("stopping_takes_long")
    failures: list[tuple[bytes, str]] = []

    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=stretched(1.0) if why == "denied" else 60.0)
            options: dict[str, Any] = {
                "sessions": session is not None,
                "concurrency": 2,
                "max_hold": stretched(1.0) if why == "max_hold" else 600.0,
                "on_error": lambda message, error: failures.append((message.body, str(error))),
            }
            consuming = asyncio.ensure_future(queue.consume(record_pid, run_in="process", **options))
            # To make a process can take longer than that max_hold; one that is made is kept for the next message.
            await queue.send(b"at once", session=session)
            await until(lambda: _is_empty(queue))
            await queue.send(b"long", headers={"folder": str(tmp_path)}, session=session)
            await until(lambda: pids(tmp_path))
            [pid] = pids(tmp_path)
            await until(lambda: sum(map(is_alive, members_of(pid))) > 1, what="what it starts")
            if why == "denied":
                memory = backend._connection.opened.broker._memory  # type: ignore[union-attr]
                with memory.lock:
                    for row in memory.queues["orders"].live.messages.values():
                        row.token = -1
                    for one in memory.queues["orders"].live.sessions.values():
                        one.token = -1
            elif why == "drain":
                await queue.drain(grace=0.1)
            await until(lambda: not is_group_alive(pid))
            if why == "max_hold":
                await until(lambda: any(body == b"long" and "max_hold" in error for body, error in failures))
            elif why == "drain":
                assert (await queue.stats()).ready == 1
            await queue.drain(grace=0.0)
            await consuming

    asyncio.run(main())


async def _is_empty(queue: tenure.Queue) -> bool:
    return await queue.stats() == Stats()


def test_a_thread_that_outlives_the_loop_gets_an_error() -> None:
    kept: list[BlockingMessage] = []

    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders")
            await queue.send(b"x")
            await queue.consume(kept.append, until_empty=True)

    asyncio.run(main())
    with pytest.raises(tenure.Unavailable, match="the consumer and its loop have ended"):
        kept[0].complete()


SERVER = """
import asyncio, sys, tenure

async def handler(message):
    print("began", message.body.decode(), flush=True)
    await asyncio.sleep(float(message.body))
    print("ended", message.body.decode(), flush=True)

async def main():
    async with tenure.connect("memory:") as backend:
        queue, other = backend.queue("orders", lock=30), backend.queue("other")
        listening = asyncio.ensure_future(other.consume(handler, grace=1.0))
        for seconds in ("0.2", "60", "60", "60"):
            await queue.send(seconds.encode())
        await queue.consume(handler, concurrency=2, grace=GRACE)
        await listening  # ended by the same signal
        stats = await queue.stats()
        counts = [one.delivery_count for one in await queue.receive(10)]
        print("over", stats.ready, stats.locked, counts, flush=True)

asyncio.run(main())
"""


@pytest.mark.process
def test_sigterm_ends_it_gracefully() -> None:
    program = textwrap.dedent(SERVER.replace("GRACE", repr(stretched(1.0))))
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        for _ in range(2):
            assert child.stdout.readline().startswith("began")
        child.send_signal(signal.SIGTERM)
        output, _ = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    lines = output.splitlines()
    assert "ended 0.2" in lines  # inside grace
    assert lines[-1] == "over 3 0 [1, 1, 1]"  # given back, uncounted
    assert child.returncode == 0


STUCK = """
import asyncio, sys, time, tenure

def handler(message):
    print("began", flush=True)
    time.sleep(3600)

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", lock=%(lock)r)
        await queue.send(b"a", session=%(session)r)
        await queue.consume(handler, grace=0.1, sessions=%(session)r is not None)
        print("over", (await queue.stats()).locked, flush=True)

asyncio.run(main())
"""


@pytest.mark.process
def test_a_thread_that_is_stuck_does_not_keep_the_process() -> None:
    lock = stretched(6.0)
    with ExitStack() as stack:
        children = []
        for session in (None, "s"):
            program = textwrap.dedent(STUCK % {"session": session, "lock": lock})
            command = [sys.executable, "-c", program]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "began\n"
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            output, _ = child.communicate(timeout=PATIENCE)
            assert output == "over 1\n"  # not given back: its lock is left to run out
            assert child.returncode == 0


HEAVY = """
import asyncio, os, subprocess, sys, tenure

def handler(message):
    print(os.getpid(), flush=True)
    subprocess.run(["sleep", "3600"])

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", lock=30)
        await queue.send(b"a")
        await queue.consume(handler, grace=0.1, run_in="process")
        print("over", (await queue.stats()).ready, flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_consumer(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "heavy.py"
    program.write_text(textwrap.dedent(HEAVY))
    child = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        pid = int(child.stdout.readline())
        child.send_signal(number)
        output, _ = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
        child.wait()
    assert output == ("over 1\n" if number is signal.SIGTERM else "")
    wait_until(lambda: not is_group_alive(pid))


async def test_a_hook_that_fails_is_reported_and_ends_no_consumer() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))

    def hook(event: object) -> None:
        raise LookupError("no such metric")

    async def handle(message: tenure.Message) -> None:
        if message.delivery_count == 1:
            raise ValueError("not yet")

    async with tenure.connect("memory:", on_event=hook) as backend:
        queue = backend.queue("orders")
        await queue.send(b"one")
        consuming = asyncio.ensure_future(queue.consume(handle, retry=tenure.RetryPolicy(initial=0)))
        await until(lambda: _is_empty(queue))
        await queue.drain()
        await consuming
    assert reported == ["on_event of tenure failed"]  # once, for the first failure
