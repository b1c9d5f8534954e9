"""The deadlines at which processes end themselves: compared as numbers, on a manual clock."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backends.memory import Memory, MemoryBroker
from tenure._cli import guard, work_run
from tenure._cli.child import Child
from tenure._cli.lead_run import LeadOptions, LeadRun
from tenure._cli.work_run import WorkOptions, WorkRun
from tenure._lease import Grant
from tenure._queue import handler_process, handlers, processes
from tenure._queue.broker import QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.queue import Queue
from tenure._runtime.renewal_thread import RenewalThread
from tenure.testing import ManualClock
from tests.durations import PATIENCE, until

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

LOCK = 60.0
RENEWED_AFTER = 25.0
TRUST = LOCK * 0.95 - 1.0  # seconds after the request, less drift and margin
GRACE = 2.0
DELAY = 0.25
"""Seconds that pass after each call of ``remaining``: no deadline may move because of that."""

Now = tuple[ManualClock, float]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    """Return the clock of this process, a manual one, and its start; children have the real clock."""
    start = guard.now()
    clock = ManualClock(start)
    monkeypatch.setattr(guard, "now", clock.now)
    for module in (handler_process, processes):
        monkeypatch.setattr(module, "CLOCK", clock)
    return clock, start


def _silent(event: tenure.Event) -> None:
    pass


@asynccontextmanager
async def opened(clock: ManualClock) -> AsyncIterator[Queue]:
    memory = Memory()
    broker = MemoryBroker(clock, memory)
    context = QueueContext(
        "orders", broker, RenewalThread.here(), clock, QueueSettings(lock=LOCK), "me", _silent, {"lock": LOCK}
    )
    try:
        yield Queue(context)
    finally:
        memory.notifier.close()


def delay_after(monkeypatch: pytest.MonkeyPatch, clock: ManualClock, owner: type[Any]) -> None:
    """Let time pass between the return of ``remaining`` and the use of its result."""
    remaining = owner.remaining

    def asked(*arguments: Any) -> float:
        left: float = remaining(*arguments)
        clock.advance(DELAY)
        return left

    monkeypatch.setattr(owner, "remaining", asked)


# --- handlers in processes -------------------------------------------------------------------------------------------


def report_deadlines(message: tenure.Received) -> None:
    """Wait until the process gets another deadline; report both."""
    [watch] = [one for one in gc.get_objects() if type(one) is handler_process._Watch]
    first, give_up = watch._until, time.monotonic() + PATIENCE
    Path(message.body.decode()).write_text("begun")
    while watch._until == first and time.monotonic() < give_up:
        time.sleep(0.005)
    raise tenure.Reject("deadlines", f"{first!r} {watch._until!r}")


async def test_a_handlers_process_ends_itself_before_its_lock_does(now: Now, tmp_path: Path) -> None:
    clock, start = now
    begun = tmp_path / "begun"
    errors: list[Any] = []
    async with opened(clock) as queue:
        await queue.send(str(begun).encode())
        consuming = asyncio.create_task(
            queue.consume(
                report_deadlines, run_in="process", until_empty=True, on_error=lambda _, error: errors.append(error)
            )
        )
        await until(begun.exists)
        clock.advance(RENEWED_AFTER)
        await consuming
    deadlines = [float(one) for one in errors[0].description.split()]
    share = handlers.KILL_SHARE * GRACE
    assert deadlines == pytest.approx([start + TRUST - share, start + RENEWED_AFTER + TRUST - share], abs=1e-6)


async def test_the_end_of_a_handlers_process_does_not_move_while_the_consumer_is_delayed(
    now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, start = now
    delay_after(monkeypatch, clock, tenure.Consumer)
    ends: list[float] = []

    async def handle(message: tenure.Message) -> None:
        ends.extend(consumer._handlers._until(message) for _ in range(2))

    async with opened(clock) as queue:
        await queue.send(b"")
        consumer = queue.consumer(handle, until_empty=True)
        assert isinstance(consumer, tenure.Consumer)
        await consumer.run()
    assert ends == pytest.approx([start + TRUST - handlers.KILL_SHARE * GRACE] * 2, abs=1e-6)


# --- the commands of tenure work -------------------------------------------------------------------------------------


def options(*command: str, timeout: float | None = None) -> WorkOptions:
    return WorkOptions("orders", command, None, "memory:", {}, 1, False, timeout, GRACE, True, 0)


def lines_to_guards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which all lines to guards are added."""
    lines: list[str] = []
    send = Child._send

    def record(child: Child, line: str) -> None:
        lines.append(line)
        send(child, line)

    monkeypatch.setattr(Child, "_send", record)
    return lines


def show_guard(output: Path, go_on: Path) -> str:
    """Return a script that writes the command line of its guard to *output*, and waits for *go_on*."""
    wait = f"until [ -e '{go_on}' ]; do sleep 0.02; done"
    return f"cat /proc/$PPID/cmdline > '{output}.new'; mv '{output}.new' '{output}'; {wait}"


def deadline_and_grace(output: Path) -> list[float]:
    return [float(one) for one in output.read_bytes().split(b"\0")[6:8]]


@pytest.mark.parametrize(("timeout", "ends"), [(None, TRUST), (10.0, 10.0 + GRACE)])
async def test_a_command_is_stopped_before_its_lock_ends_and_at_its_time_limit(
    now: Now, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None, ends: float
) -> None:
    clock, start = now
    output, go_on = tmp_path / "output", tmp_path / "go on"
    lines = lines_to_guards(monkeypatch)
    monkeypatch.setattr(work_run, "UPDATES", 400)
    work = WorkRun(options("sh", "-c", show_guard(output, go_on), timeout=timeout))
    async with opened(clock) as queue:
        await queue.send(b"")
        work._consumer = consumer = queue.consumer(work._serve, until_empty=True)
        consuming = asyncio.create_task(consumer.run())
        await until(output.exists)
        assert deadline_and_grace(output) == pytest.approx([start + ends, GRACE], abs=1e-6)
        if timeout is None:
            clock.advance(RENEWED_AFTER)
            await until(lambda: len(lines) > 1)
        go_on.touch()
        await consuming
        assert await queue.stats() == tenure.Stats()
    renewed = [] if timeout else [start + RENEWED_AFTER + TRUST]
    assert [line.split()[0] for line in lines] == ["deadline"] * len(lines)
    assert [float(line.split()[1]) for line in lines] == pytest.approx([start + ends, *renewed], abs=1e-6)


async def test_a_command_that_is_stopped_has_its_grace_and_no_more(
    now: Now, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, start = now
    delay_after(monkeypatch, clock, tenure.Consumer)
    begun = tmp_path / "begun"
    lines = lines_to_guards(monkeypatch)
    work = WorkRun(options("sh", "-c", f": > '{begun}'; sleep 1000"))
    async with opened(clock) as queue:
        await queue.send(b"")
        work._consumer = consumer = queue.consumer(work._serve)
        consuming = asyncio.create_task(consumer.run())
        await until(begun.exists)
        stopped_at = clock.now()
        consumer.drain(grace=0.0)
        await consuming
    first, *_, last, stop = lines
    assert float(first.split()[1]) == pytest.approx(start + TRUST, abs=1e-6)
    assert float(last.split()[1]) == pytest.approx(stopped_at + GRACE, abs=1e-6)
    assert stop == "stop"


# --- the command of tenure lead --------------------------------------------------------------------------------------


async def test_the_command_of_a_term_is_stopped_before_its_lease_ends(
    now: Now, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, start = now
    delay_after(monkeypatch, clock, tenure.Term)
    output, go_on = tmp_path / "output", tmp_path / "go on"
    lines = lines_to_guards(monkeypatch)
    leading = LeadRun(
        LeadOptions("chair", ("sh", "-c", show_guard(output, go_on)), "memory:", {}, False, None, None, 0)
    )
    async with tenure.connect("memory:") as backend:
        election = backend.election("chair", ttl=LOCK)
        term = tenure.Term(Grant("chair", "me", 7), start + TRUST, clock)
        serving = asyncio.create_task(leading._serve(election, term, os.environ))
        await until(output.exists)
        assert deadline_and_grace(output) == pytest.approx([start + TRUST, GRACE], abs=1e-6)
        term._trusted_until = start + RENEWED_AFTER + TRUST
        leading._update_guard()
        go_on.touch()
        await serving
    assert [line.split()[0] for line in lines] == ["deadline"] * 2
    expected = [start + TRUST, start + RENEWED_AFTER + TRUST]
    assert [float(line.split()[1]) for line in lines] == pytest.approx(expected, abs=1e-6)
