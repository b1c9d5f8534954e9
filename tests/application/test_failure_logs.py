"""The log of a handler that fails: a traceback the first time, then one line."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backend import connect
from tenure._queue.received import Received
from tenure.events import Event, MessageFailed
from tests.consuming import consume_down_to

SESSIONS = pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])


def calls(message: Received) -> None:
    """Fail, on its body's line."""
    if message.body == b"library":
        json.loads("{")
    if message.body == b"twice" and message.delivery_count == 2:
        raise KeyError("another")
    raise ValueError("bad")


async def on_loop(message: Received) -> None:
    calls(message)


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "tenure" and "its handler failed" in one.getMessage()]


@SESSIONS
@pytest.mark.parametrize(
    ("handler", "run_in"),
    [(on_loop, "auto"), (calls, "thread"), pytest.param(calls, "process", marks=pytest.mark.process)],
)
def test_the_first_failure_has_a_traceback(
    handler: Any, run_in: Any, sessions: bool, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []

    async def main() -> None:
        async with connect("memory:", on_event=events.append) as backend:
            queue = backend.queue("orders", max_deliveries=3)
            for body in (b"one", b"library", b"twice"):
                await queue.send(body, session=body.decode() if sessions else None)
            policy = tenure.RetryPolicy(initial=0, maximum=0)
            await queue.consume(
                handler, run_in=run_in, sessions=sessions, concurrency=1, until_empty=True, retry=policy
            )

    asyncio.run(main())
    logged = records(caplog)
    assert len(logged) == 9
    formatter = logging.Formatter("%(message)s")
    for one in logged:
        line, *traceback = formatter.format(one).splitlines()
        assert "test_failure_logs.py:" in line
        assert " in calls" in line
        of = one.__dict__["tenure"]
        kind = line.partition("failed (")[2].partition(":")[0]
        # of message 3, delivery 2 is the first of its kind
        assert bool(traceback) == (of["delivery_count"] == 1 or kind == "KeyError")
        if traceback:
            assert any("raise ValueError" in row or "json.loads(" in row or "KeyError(" in row for row in traceback)
            if run_in != "process":  # from there on, not from where tenure called it
                assert traceback[0] == "Traceback (most recent call last):"
                assert 'test_failure_logs.py"' in traceback[1]
    [failed, *_] = [event for event in events if isinstance(event, MessageFailed)]
    assert failed.place.partition(":")[0].endswith("tests/application/test_failure_logs.py")


@SESSIONS
async def test_verdicts_are_logged_in_one_line(sessions: bool, caplog: pytest.LogCaptureFixture) -> None:
    """And so are errors outside the user's handlers."""

    async def handler(message: Received) -> None:
        match message.body:
            case b"retry":
                raise tenure.Retry(delay=600) from ValueError("the reason")
            case b"reject":
                raise tenure.Reject("odd")
            case _:
                await asyncio.sleep(60)

    async with connect("memory:") as backend:
        queue = backend.queue("orders", max_deliveries=2)
        for body in (b"retry", b"reject", b"slow"):
            await queue.send(body, session=body.decode() if sessions else None)
        policy = tenure.RetryPolicy(initial=600, maximum=600)
        left = tenure.Stats(delayed=2, dead=1)
        await consume_down_to(left, queue, handler, sessions=sessions, retry=policy, max_hold=0.1)
    assert sorted(one.getMessage().partition("failed (")[2].partition(":")[0] for one in records(caplog)) == [
        "LockLost",
        "Retry",
    ]
    assert not any(one.exc_info for one in caplog.records if one.name == "tenure")


@SESSIONS
async def test_an_error_without_retry_has_a_traceback(sessions: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with connect("memory:") as backend:
        queue = backend.queue("orders")
        await queue.send(b"one", session="s" if sessions else None)
        never = tenure.RetryPolicy(never=(ValueError,))
        await queue.consume(on_loop, sessions=sessions, until_empty=True, retry=never)
        assert await queue.stats() == tenure.Stats(dead=1)
    [one] = records(caplog)
    assert one.getMessage().endswith("in calls); a retry can't succeed")
    assert one.exc_info
    assert one.exc_info[0] is ValueError


WITHOUT_FILES = """
import asyncio, os, resource
import tenure

async def main():
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("orders", max_deliveries=3)
        await queue.send(b"one")
        consuming = asyncio.ensure_future(
            queue.consume(run, until_empty=True, retry=tenure.RetryPolicy(initial=0, maximum=0))
        )
        await begun.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                os.dup(0)
        except OSError:
            pass
        go_on.set()
        await consuming
    print(counts)

counts, begun, go_on = [], asyncio.Event(), asyncio.Event()

async def run(message):
    begun.set()
    await go_on.wait()
    counts.append(message.delivery_count)
    raise ValueError("bad")

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits the files of a process")
def test_the_first_failure_needs_no_file(tmp_path: Path) -> None:
    """Else a consumer would end with the first failure of a handler when its process can't open a file any more."""
    line = [sys.executable, "-c", WITHOUT_FILES]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[1, 2, 3]\n"), done.stderr
