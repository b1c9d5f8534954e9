"""Parts of ``tenure work`` that need no process: open files after a failure, and counts."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

import tenure
from tenure._cli.delivery_counter import DeliveryCounter
from tenure._cli.work_run import WorkOptions, WorkRun
from tenure.testing import message


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_a_body_that_can_not_be_kept_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    work = WorkRun(WorkOptions("orders", ("true",), None, "memory:", {}, 1, False, None, 5.0, True, -1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await work._serve(message(b"one"))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("url", ["redis://u:hunter2@host", "azure://account?sas_token=hunter2"], ids=["user", "option"])
def test_the_command_gets_no_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", url)
    work = WorkRun(WorkOptions("orders", ("true",), None, url, {}, 1, False, None, 5.0, True, -1))
    environment = work._environment(message(b"one"))
    assert environment["TENURE_QUEUE"]
    assert "TENURE_URL" not in environment
    assert "hunter2" not in str(environment)


async def test_a_handler_that_cancels_itself_has_failed_and_is_not_given_back() -> None:
    async def handle(message: tenure.Message) -> None:
        raise asyncio.CancelledError

    counter = DeliveryCounter("orders", -1)
    async with tenure.connect("memory:", on_event=counter.on_event) as backend:
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(b"one")
        await queue.consume(counter.counted(handle), on_error=counter.note_failure, until_empty=True)
    assert counter.summary().startswith("orders: 0 done, 1 failed, 0 given back, 1 dead-lettered, in ")
