"""Handlers in processes: processes that can't be made, their end, and that they never outlast the lock."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backend import connect
from tenure._queue import handlers
from tenure._queue.handler_process import CLOCK
from tenure._queue.outcomes import NotBegun
from tenure._queue.processes import HandlerDied, Lock, Processes
from tenure._queue.received import Received
from tenure.events import Event, HandlerNotBegun
from tests.durations import PATIENCE, stretched, until, wait_until
from tests.process_states import is_group_alive

pytestmark = pytest.mark.process


def output_of(program: str, folder: Path, *arguments: str, stdin: bool = False) -> str:
    """Run *program* from a file, or let it be read from where there is none; return what it prints."""
    text = textwrap.dedent(program)
    file = folder / "program.py"
    file.write_text(text)
    how = arguments or (str(file),)
    ended = subprocess.run(
        [sys.executable, *how],
        input=text if stdin else None,
        stdin=None if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
    )
    return ended.stdout


UNFIT = """
import asyncio, multiprocessing, tenure

def handler(message):
    print("handled", flush=True)

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", lock=30)
        await queue.send(b"x", session=SESSION)
        try:
            await queue.consume(handler, run_in="process", until_empty=True, sessions=bool(SESSION))
        except tenure.ConfigError as error:
            stats = await queue.stats()
            counts = [one.delivery_count for one in await queue.receive()]
            print("refused:", error, stats.locked, stats.dead, counts, flush=True)
        if multiprocessing.parent_process() is not None:
            await asyncio.sleep(3600)  # a process that gets here is a second copy of the whole program
"""

DAEMONIC = """
def run():
    asyncio.run(main())

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=run, daemon=True)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("session", [None, "s"])
def test_a_script_that_would_consume_in_each_process_is_refused(session: str | None, tmp_path: Path) -> None:
    program = UNFIT.replace("SESSION", repr(session)) + "\nasyncio.run(main())\n"
    output = output_of(program, tmp_path)
    assert "refused: each process for handlers runs the script again" in output
    assert "if __name__ == '__main__': 0 0 " in output
    assert session is not None or output.endswith("0 0 [1]\n")  # given back, uncounted
    assert "Traceback" not in output


def test_a_process_without_children_is_refused(tmp_path: Path) -> None:
    output = output_of(UNFIT.replace("SESSION", "None").replace("3600", "0") + DAEMONIC, tmp_path)
    assert "refused: run_in='process' starts processes, but the daemonic process" in output
    assert "0 0 [1]" in output


@pytest.mark.parametrize("how", ["-c", "-"])
def test_a_handler_in_no_file_is_refused(how: str, tmp_path: Path) -> None:
    program = UNFIT.replace("SESSION", "None") + "\nif __name__ == '__main__': asyncio.run(main())\n"
    if how == "-c":
        output = output_of(program, tmp_path, "-c", program)
        assert "is in no file" in output
    else:
        output = output_of(program, tmp_path, "-", stdin=True)
        assert "there is no file '<stdin>'" in output
    assert "0 0 [1]" in output


@pytest.mark.parametrize("session", [None, "s"])
def test_a_handler_that_a_process_cannot_load_ends_the_consumer(session: str | None, tmp_path: Path) -> None:
    program = UNFIT.replace("SESSION", repr(session)).replace("def handler", "def unknown")
    guarded = """
    if __name__ == "__main__":
        def handler(message): ...
        asyncio.run(main())
    """
    output = output_of(program + textwrap.dedent(guarded), tmp_path)
    assert "refused: a process can't load the handler: AttributeError" in output
    assert "define it at the top of a module" in output
    assert session is not None or output.endswith("0 0 [1]\n")  # given back, uncounted


def odd_results(message: Received) -> object:
    """Return what can't be written."""
    match message.body:
        case b"generator":
            return (number for number in range(3))
        case b"coroutine":
            return asyncio.sleep(0)
        case _:
            return threading.Lock()


def test_what_a_handler_returns_need_not_be_carried_over() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30, max_deliveries=1)
            for body in (b"generator", b"lock", b"coroutine"):
                await queue.send(body)
            failures: list[tuple[bytes, str]] = []
            note = lambda message, error: failures.append((message.body, str(error)))  # noqa: E731
            await queue.consume(odd_results, run_in="process", concurrency=1, until_empty=True, on_error=note)
            assert [body for body, _ in failures] == [b"coroutine"]  # it has not run, and never would
            assert "can't be awaited in a process" in failures[0][1]

    asyncio.run(main())


@pytest.mark.parametrize("session", [None, "s"])
def test_a_failure_to_make_a_process_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, session: str | None
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no process for you")

    monkeypatch.setattr(handlers, "PAUSE", 0.1)
    events: list[Event] = []

    async def main() -> None:
        async with connect("memory:", on_event=events.append) as backend:
            queue = backend.queue("orders", lock=30, max_deliveries=1)
            await queue.send(b"x", session=session)
            failures: list[BaseException] = []
            note = lambda message, error: failures.append(error)  # noqa: E731
            with pytest.MonkeyPatch.context() as broken:
                broken.setattr(multiprocessing.get_context("spawn").Process, "start", fail)
                consuming = asyncio.ensure_future(
                    queue.consume(odd_results, run_in="process", on_error=note, sessions=session is not None)
                )
                await until(lambda: failures)
            await until(lambda: _is_left(queue, dead=0))
            await queue.drain()
            await consuming
            assert {type(error) for error in failures} == {NotBegun}
            assert (await queue.stats()).dead == 0
            assert [type(event) for event in events] == [HandlerNotBegun] * len(failures)
            assert "could not be started (no process could be started for the handler: ValueError" in caplog.text

    asyncio.run(main())


RAW_FORK = getattr(ctypes.CDLL(None), "fork", None) if sys.platform != "win32" else None


def forking(message: Received) -> None:
    """Leave a process behind, started by multiprocessing or by fork, and die, or be killed."""
    if message.body == b"well" or message.delivery_count > 1:
        return
    pid = RAW_FORK() if message.headers["raw"] and RAW_FORK is not None else os.fork()
    if pid == 0:
        if message.body == b"long":
            os.setsid()  # no signal for the group reaches it
        give_up = time.monotonic() + 2 * PATIENCE
        while not os.path.exists(str(message.headers["over"])) and time.monotonic() < give_up:
            time.sleep(0.05)
        os._exit(0)
    if message.body == b"long":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("body", [b"short", b"long"])
def test_what_a_handler_has_forked_does_not_hide_its_end(body: bytes, tmp_path: Path) -> None:
    # By Python's fork, and by that of the C library, of which Python doesn't know. Side by side: it takes its time.
    overs = {raw: tmp_path / f"over-{raw}" for raw in (False, True)}  # until it is there, the child of the handler runs

    async def main() -> None:
        async with connect("memory:") as backend:
            queues = {raw: backend.queue(f"orders-{raw}", lock=30) for raw in overs}
            await asyncio.gather(*(_ends(queues[raw], body, raw, over) for raw, over in overs.items()))

    try:
        asyncio.run(main())
    finally:
        for over in overs.values():
            over.touch()


async def _ends(queue: tenure.Queue, body: bytes, raw: bool, over: Path) -> None:
    """Check that the handler's end is seen, and its message handled again, while what it has forked runs."""
    failures: list[tuple[bytes, str]] = []
    options: dict[str, Any] = {
        "concurrency": 1,
        "max_hold": 600.0 if body == b"short" else stretched(1.0),
        "retry": tenure.RetryPolicy(initial=0),
        "on_error": lambda message, error: failures.append((message.body, str(error))),
    }
    consuming = asyncio.ensure_future(queue.consume(forking, run_in="process", **options))
    # To make a process can take longer than that max_hold; one that is made is kept for the next message.
    await queue.send(b"well")
    await until(lambda: _is_left(queue, dead=0))
    await queue.send(body, headers={"raw": raw, "over": str(over)})
    await until(lambda: [one for one in failures if one[0] == body])
    over.touch()
    await until(lambda: _is_left(queue, dead=0))  # in another process
    await queue.drain()
    await consuming
    [first, *_] = [error for failed, error in failures if failed == body]
    assert ("SIGKILL" if body == b"short" else "max_hold") in first, raw


async def _is_left(queue: tenure.Queue, dead: int) -> bool:
    stats = await queue.stats()
    return stats.dead == dead and stats.ready + stats.locked + stats.delayed == 0


def overworked(message: Received) -> None:
    time.sleep(3600)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_process_that_has_ended_leaves_nothing_open() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30, max_deliveries=1)
            failures: list[BaseException] = []
            note = lambda message, error: failures.append(error)  # noqa: E731
            multiprocessing.resource_tracker.ensure_running()  # its pipe stays open, for all processes
            open_before = len(os.listdir("/proc/self/fd"))
            gc.disable()
            try:
                consuming = asyncio.ensure_future(
                    queue.consume(overworked, run_in="process", concurrency=1, max_hold=0.5, on_error=note)
                )
                for number in range(4):
                    await queue.send(b"x")
                    await until(lambda: len(failures) > number)  # noqa: B023
                await queue.drain(grace=0.0)
                await consuming
                await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before)
            finally:
                gc.enable()

    asyncio.run(main())


def test_a_process_that_takes_longer_to_make_than_its_message_may_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no message would ever be handled. The handler's own module is imported quickly: that is not the making."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1.5)")
    (tmp_path / "quick_handler.py").write_text("def handle(message):\n    len(message.body)\n")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), path])))
    monkeypatch.syspath_prepend(tmp_path)
    handle = importlib.import_module("quick_handler").handle
    failures: list[BaseException] = []

    async def main() -> None:
        async with connect("memory:") as backend:
            queue = backend.queue("orders", lock=30, max_deliveries=1_000)  # as many as there are until it is made
            options: dict[str, Any] = {"concurrency": 1, "max_hold": 0.5, "retry": tenure.RetryPolicy(initial=0.1)}
            note = lambda message, error: failures.append(error)  # noqa: E731
            await queue.send(b"x")
            async with asyncio.timeout(PATIENCE):
                await queue.consume(handle, run_in="process", until_empty=True, on_error=note, **options)
            assert await queue.stats() == tenure.Stats()

    asyncio.run(main())
    assert failures


def test_a_process_that_dies_of_a_body_while_it_reads_it_is_counted() -> None:
    processes = Processes(len)
    lock = Lock(lambda: CLOCK.now() + PATIENCE, 1.0)
    assert processes.task(b"small", lock)() is None  # its result is not used
    [process] = processes._idle
    pid, pipe = process._process.pid, process._pipe
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it stops reading
    outcome: Future[object] = Future()
    task = processes.task(bytes(50_000_000), lock)

    def call() -> None:
        try:
            outcome.set_result(task())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    wait_until(lambda: not select.select([], [pipe], [], 0)[1])  # no more of the body fits into the pipe
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HandlerDied, match="SIGKILL"):
        outcome.result(PATIENCE)
    processes.close()


def test_at_exit_a_process_may_have_been_collected_and_closed_meanwhile() -> None:
    processes = Processes(len)
    assert processes.task(b"small", Lock(lambda: CLOCK.now() + PATIENCE, 1.0))() is None
    [process] = processes._idle
    finalizer = process._finalizer  # which the interpreter may have begun to call
    call, arguments = finalizer._callback, finalizer._args  # type: ignore[attr-defined]
    processes.close()  # on a thread
    wait_until(lambda: process._process._closed)  # type: ignore[attr-defined]
    call(*arguments)


ORPHANED = """
import asyncio, os, subprocess, sys, time, tenure

def handler(message):
    print(os.getpid(), flush=True)
    subprocess.run(["sleep", "3600"])

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", lock=LOCK)
        await queue.send(b"a", session=SESSION)
        consuming = asyncio.ensure_future(queue.consume(handler, run_in="process", sessions=bool(SESSION)))
        await asyncio.to_thread(sys.stdin.readline)
        if not os.fork():  # it inherits the consumer's open files
            os.close(1)
            time.sleep(FORKED)
            os._exit(0)
        print("forked", flush=True)
        await consuming

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_no_process_outlasts_the_lock(number: signal.Signals, tmp_path: Path) -> None:
    # Stopped, the consumer lets the lock run out; killed, it is missed sooner, and sooner than its pipes are closed.
    within = stretched(4.0 if number is signal.SIGSTOP else 8.0)
    lock = within if number is signal.SIGSTOP else 10 * within
    with ExitStack() as stack:
        consumers = [_orphaning(stack, tmp_path, session, lock, 2 * within) for session in (None, "s")]
        time.sleep(within / 10)
        for consumer, handler in consumers:
            assert is_group_alive(handler)
            consumer.send_signal(number)
        signalled_at = time.monotonic()
        for _, handler in consumers:
            wait_until(lambda: not is_group_alive(handler))  # noqa: B023
        assert time.monotonic() - signalled_at < within  # it was locked before that


def _orphaning(
    stack: ExitStack, folder: Path, session: str | None, lock: float, forked: float
) -> tuple[subprocess.Popen[str], int]:
    """Start a consumer, which has forked; return it, and the id of the process of its handler."""
    program = folder / f"orphaned_{session}.py"
    settings = {"SESSION": session, "LOCK": lock, "FORKED": forked}
    program.write_text(re.sub("|".join(settings), lambda found: repr(settings[found[0]]), textwrap.dedent(ORPHANED)))
    pipe, command = subprocess.PIPE, [sys.executable, str(program)]
    consumer = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    stack.callback(consumer.kill)
    assert consumer.stdin is not None
    assert consumer.stdout is not None
    handler = int(consumer.stdout.readline())
    consumer.stdin.write("\n")
    consumer.stdin.flush()
    assert consumer.stdout.readline() == "forked\n"
    return consumer, handler


def patient(message: Received) -> None:
    time.sleep(float(message.body))


def test_a_process_goes_on_as_long_as_its_lock_is_renewed() -> None:
    async def main() -> None:
        async with connect("memory:") as backend:
            lock = stretched(1.5)
            queues = {
                session: backend.queue(f"orders-{session}", lock=lock, max_deliveries=1) for session in (None, "s")
            }
            for session, queue in queues.items():
                await queue.send(str(1.3 * lock).encode(), session=session)
            # The loop is blocked; locks are kept elsewhere.
            asyncio.get_running_loop().call_later(0.5 * lock, time.sleep, 0.8 * lock)
            await asyncio.gather(
                *(
                    queue.consume(patient, run_in="process", until_empty=True, sessions=session is not None)
                    for session, queue in queues.items()
                )
            )
            for queue in queues.values():
                assert await _is_left(queue, dead=0)

    asyncio.run(main())
