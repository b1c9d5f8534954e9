"""SIGTERM in real programs: all consumers and campaigns end, and a second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

import tenure.sync
from tenure._runtime import signals
from tests.durations import PATIENCE
from tests.unfelt_signals import UNFELT

BOTH = """
import asyncio, tenure

ended = asyncio.Event()

async def lead(term):
    print("leads\\n", end="", flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        print("work ended", flush=True)
        ended.set()

async def handle(message):
    print("begins\\n", end="", flush=True)
    await ended.wait()
    print("done\\n", end="", flush=True)

async def main():
    async with tenure.connect("sqlite:///work.db") as backend:
        queue = backend.queue("orders")
        await queue.send(b"one")
        async with asyncio.TaskGroup() as group:
            group.create_task(backend.election("chair", ttl=3600).run(lead, again=True))
            group.create_task(queue.consume(handle, grace=50))
    print("over", flush=True)

asyncio.run(main())
"""

THREADS = """
import threading, tenure.sync

def lead(term):
    print("leads\\n", end="", flush=True)
    term.lost.wait()
    print("work ended", flush=True)

def handle(message):
    print("begins\\n", end="", flush=True)
    print("done\\n", end="", flush=True)

with tenure.sync.connect("sqlite:///work.db") as backend:
    queue = backend.queue("orders")
    queue.send(b"one")
    leading = threading.Thread(target=lambda: backend.election("chair", ttl=3600).run(lead))
    leading.start()
    queue.consume(handle)
    leading.join()
print("over", flush=True)
"""

ALONE = """
import tenure.sync

def lead(term):
    print("leads\\n", end="", flush=True)
    term.lost.wait()
    print("work ended", flush=True)

with tenure.sync.connect("sqlite:///work.db") as backend:
    backend.election("chair", ttl=3600).run(lead)
print("over", flush=True)
"""

IDLE = f"""{UNFELT}
import tenure.sync

with tenure.sync.connect("sqlite:///work.db") as backend:
    queue = backend.queue("orders")
    queue.send(b"one")
    queue.consume(lambda message: tell_soon(NUMBER))
print("over", flush=True)
"""

RAISING = f"""{UNFELT}
import tenure.sync

def mine(*_):
    raise TimeoutError("mine")

signal.signal(signal.SIGUSR1, mine)
with tenure.sync.connect("sqlite:///work.db") as backend:
    queue = backend.queue("orders")
    queue.send(b"one")
    try:
        queue.consume(lambda message: tell_soon(signal.SIGUSR1))
    except TimeoutError as error:
        print("raised", error, flush=True)
"""

STUBBORN = """
import tenure.sync, time

def lead(term):
    print("leads\\n", end="", flush=True)
    term.lost.wait()
    print("signalled", flush=True)
    time.sleep(3600)

with tenure.sync.connect("sqlite:///work.db") as backend:
    backend.election("chair", ttl=3600).run(lead)
"""

UNTOUCHED = """
import asyncio, tenure

async def lead(term):
    print("leads\\n", end="", flush=True)
    await asyncio.sleep(3600)

async def main():
    async with tenure.connect("memory:") as backend:
        await backend.election("chair").run(lead, sigterm=False)

asyncio.run(main())
"""

WAITING = """
import asyncio, tenure

async def main():
    async with tenure.connect("sqlite:///work.db") as backend:
        async with backend.election("chair", ttl=3600).campaign():
            waiting = asyncio.create_task(backend.election("chair", ttl=3600).run(print))
            await asyncio.sleep(0.2)
            print("waits", flush=True)
            await waiting
    print("over", flush=True)

asyncio.run(main())
"""

FORKING = """
import asyncio, multiprocessing, tenure

async def handle(message):
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends its processes by SIGTERM
        print(*await asyncio.to_thread(pool.map, abs, [-1, -2]), flush=True)

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders")
        consuming = asyncio.create_task(queue.consume(handle))
        for _ in range(3):
            await queue.send(b"one")
            while await queue.stats() != tenure.Stats():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        print("still there" if not consuming.done() else "gone", flush=True)

asyncio.run(main())
"""

FORKED_AND_TOLD_AT_ONCE = """
import asyncio, os, signal

# It runs in the child before the hooks of tenure, which is imported later.
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

import tenure, tenure._runtime.signals

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders")
        consuming = asyncio.create_task(queue.consume(print))
        await asyncio.sleep(0.1)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        child = os.fork()
        if not child:
            os._exit(1)
        print("ended by", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        await asyncio.sleep(0.1)
        print("still there" if not consuming.done() else "gone", flush=True)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
        signal.raise_signal(signal.SIGTERM)
        await consuming
    print("over", flush=True)

asyncio.run(main())
"""

Start = Callable[[str], "subprocess.Popen[str]"]

pytestmark = pytest.mark.process


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    def start(program: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            process_group=0,
        )

        def end() -> None:
            with suppress(ProcessLookupError, PermissionError):  # that of macOS if all have ended
                os.killpg(child.pid, signal.SIGKILL)  # with its children, which hold its output open
            child.communicate()

        request.addfinalizer(end)
        return child

    return start


def read(child: subprocess.Popen[str], *lines: str) -> None:
    """Check that *child* prints these lines, in any order."""
    assert child.stdout is not None
    assert sorted(child.stdout.readline() for _ in lines) == sorted(f"{line}\n" for line in lines)


@pytest.mark.parametrize("program", [BOTH, THREADS], ids=["loop", "threads"])
def test_a_process_that_leads_and_consumes_stops_both(start: Start, program: str, tmp_path: Path) -> None:
    child = start(program)
    read(child, "leads", "begins") if program is BOTH else read(child, "leads", "begins", "done")
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=PATIENCE)
    assert sorted(output.split("\n")[:-2]) == (["done", "work ended"] if program is BOTH else ["work ended"])
    assert output.endswith("over\n")
    assert child.returncode == 0
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        assert backend.election("chair").leader() is None  # released, an hour before its end


def test_a_leader_in_the_main_thread_steps_down(start: Start, tmp_path: Path) -> None:
    child = start(ALONE)
    read(child, "leads")
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=PATIENCE)[0] == "work ended\nover\n"
    assert child.returncode == 0
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        assert backend.election("chair").leader() is None


def test_a_candidate_stops_waiting_to_be_elected(start: Start) -> None:
    child = start(WAITING)
    read(child, "waits")
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=PATIENCE)[0] == "over\n"
    assert child.returncode == 0


def test_a_second_one_ends_the_process(start: Start) -> None:
    child = start(STUBBORN)
    read(child, "leads")
    child.send_signal(signal.SIGTERM)
    read(child, "signalled")
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE) == -signal.SIGTERM


def test_a_program_may_keep_the_signal(start: Start) -> None:
    child = start(UNTOUCHED)
    read(child, "leads")
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE) == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_signal_to_a_forked_child_ends_only_the_child(start: Start) -> None:
    child = start(FORKING)
    assert child.communicate(timeout=PATIENCE)[0] == "1 2\n" * 3 + "still there\n"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_signal_to_a_child_that_has_just_been_forked_ends_only_the_child(start: Start) -> None:
    child = start(FORKED_AND_TOLD_AT_ONCE)
    said = f"ended by {-signal.SIGTERM}\nstill there\nover\n"
    assert child.communicate(timeout=PATIENCE)[0] == said


class Interrupt(Exception):
    """Raised by the handler of another signal."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("how", [signal.SIG_BLOCK, signal.SIG_UNBLOCK])
def test_a_fork_that_another_signal_interrupts_leaves_no_signal_blocked(
    how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts: list[int] = []

    def interrupted(number: int, mask: Iterable[int]) -> set[int | signal.Signals]:
        before = pthread_sigmask(number, mask)
        if number == how and signal.SIGTERM in mask and not interrupts:
            interrupts.append(number)
            raise Interrupt  # as a handler would that runs at the end of the call
        return before

    pthread_sigmask = signal.pthread_sigmask
    blocked = pthread_sigmask(signal.SIG_BLOCK, ())
    with signals.on_shutdown_signal(print):
        monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
        with suppress(Interrupt):
            signals._before_fork()
        assert signal.SIGTERM in pthread_sigmask(signal.SIG_BLOCK, ())
        with suppress(Interrupt):
            signals._let_sigterm_come()
    assert interrupts == [how]
    assert pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    assert not signals._forking.blocks_sigterm


CONSUMING = """
import asyncio, signal, sys, tenure

async def handle(message):
    print("begins", flush=True)
    try:
        await (asyncio.to_thread(sys.stdin.readline) if message.body == b"short" else asyncio.sleep(3600))
        print("done", flush=True)
    except asyncio.CancelledError:
        print("cut", flush=True)
        raise

async def main():
    before = signal.getsignal(signal.SIGINT)
    async with tenure.connect("sqlite:///work.db") as backend:
        queue = backend.queue("orders")
        await queue.send(sys.argv[1].encode(), session="a" if "sessions" in sys.argv else None)
        while True:
            await queue.consume(handle, grace=50, sessions="sessions" in sys.argv)
            print("over", signal.getsignal(signal.SIGINT) is before, flush=True)
            if "again" not in sys.argv:
                break
            await queue.send(b"long")

asyncio.run(main())
"""

CONSUMING_THREADS = """
import signal, sys, tenure.sync

def handle(message):
    print("begins", flush=True)
    sys.stdin.readline()
    print("done", flush=True)

with tenure.sync.connect("sqlite:///work.db") as backend:
    queue = backend.queue("orders")
    queue.send(b"one")
    queue.consume(handle, grace=50)
print("over", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
"""

OWN = """
import asyncio, signal, tenure

async def handle(message):
    print("begins", flush=True)
    await asyncio.sleep(3600)

async def main():
    signal.signal(signal.SIGINT, lambda *_: print("mine", flush=True))
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders")
        await queue.send(b"one")
        await queue.consume(handle)

asyncio.run(main())
"""


def begin(start: Start, program: str, *arguments: str) -> subprocess.Popen[str]:
    child = start(f"import sys; sys.argv[1:] = {arguments!r}\n{textwrap.dedent(program)}")
    read(child, "begins")
    return child


def interrupt(child: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Interrupt *child*, and check that stderr has the notice, and nothing else."""
    child.send_signal(signal.SIGINT)
    output, give_up = "", time.monotonic() + PATIENCE
    while not output.endswith("\n"):
        assert time.monotonic() < give_up
        time.sleep(0.01)
        output += capfd.readouterr().err
    assert output == "orders: interrupted: finishing 1 message; interrupt again to stop without waiting\n"


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.mark.parametrize("kind", ["sessions", "threads"])
def test_an_interrupt_lets_handlers_finish(start: Start, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    child = begin(start, CONSUMING_THREADS if kind == "threads" else CONSUMING, "short", kind)
    interrupt(child, capfd)
    go_on(child)
    assert child.communicate(timeout=PATIENCE)[0] == "done\nover True\n"
    assert child.returncode == 0
    assert capfd.readouterr().err == ""


def test_a_second_interrupt_cancels(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    child = begin(start, CONSUMING, "long")
    interrupt(child, capfd)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=PATIENCE)[0] == "cut\n"
    assert child.returncode == -signal.SIGINT


def test_a_program_that_consumes_in_a_loop_is_ended_by_a_later_interrupt(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    child = begin(start, CONSUMING, "short", "messages", "again")
    interrupt(child, capfd)
    go_on(child)
    read(child, "done")
    read(child, "over True")
    read(child, "begins")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=PATIENCE)[0] == "cut\n"
    assert child.returncode == -signal.SIGINT


ENDED = """
import asyncio, signal, tenure

async def main():
    background.append(asyncio.create_task(queue().consume(print)))
    await asyncio.sleep(0.01)

def queue():
    return backend.queue("orders")

async def beside():
    consuming = asyncio.create_task(queue().consume(print))
    await asyncio.sleep(0.01)
    saved = signal.signal(signal.SIGINT, signal.SIG_IGN)
    await queue().drain()
    consuming.cancel()
    await asyncio.wait({consuming})
    signal.signal(signal.SIGINT, saved)
    print("saved ours", saved is tenure._runtime.signals._on_sigint, flush=True)
    signal.raise_signal(signal.SIGINT)

background, backend = [], tenure.connect("memory:")
asyncio.run(backend.open())
asyncio.run(main())
print("python's", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
try:
    asyncio.run(beside())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_no_signal_handler_is_left_behind_in_any_order(start: Start) -> None:
    """That of asyncio.run, if the consumer ends after the main task; and tenure's, if a program restored it."""
    child = start(ENDED)
    assert child.communicate(timeout=PATIENCE)[0] == "python's True\nsaved ours True\ninterrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_ends_no_wait_of_the_main_thread_is_handled(start: Start, number: int) -> None:
    """As one that comes just before the wait begins."""
    child = start(IDLE.replace("NUMBER", str(int(number))))
    assert child.communicate(timeout=PATIENCE)[0] == "over\n"
    assert child.returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGUSR1")
def test_what_a_handler_of_the_program_raises_ends_the_wait(start: Start) -> None:
    """Also a TimeoutError, as of a program that sets an alarm."""
    assert start(RAISING).communicate(timeout=PATIENCE)[0] == "raised mine\n"


def test_an_interrupt_lets_work_end_and_releases_the_lease(start: Start, tmp_path: Path) -> None:
    child = start(ALONE)
    read(child, "leads")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=PATIENCE)[0] == "work ended\nover\n"
    assert child.returncode == 0
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        assert backend.election("chair").leader() is None


def test_an_interrupt_that_a_program_handles_is_left_to_it(start: Start) -> None:
    child = begin(start, OWN)
    child.send_signal(signal.SIGINT)
    read(child, "mine")
