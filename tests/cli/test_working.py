"""Parts of ``tenure work`` that need no process of their own: what a failure leaves behind, and what is counted."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

import tenure
from tenure._cli.tally import Tally
from tenure._cli.working import Order, Working
from tenure.testing import message


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
async def test_a_body_that_can_not_be_kept_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    work = Working(Order("orders", ("true",), None, "memory:", {}, 1, False, None, 5.0, True, -1))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await work._serve(message(b"one"))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_handler_that_cancels_itself_has_failed_and_is_not_given_back() -> None:
    async def handle(message: tenure.Message) -> None:
        raise asyncio.CancelledError

    tally = Tally("orders", -1)
    async with tenure.connect("memory:", on_event=tally.on_event) as backend:
        queue = backend.queue("orders", max_deliveries=1)
        await queue.send(b"one")
        await queue.consume(tally.counted(handle), on_error=tally.note_failure, until_empty=True)
    assert tally.summary().startswith("orders: 0 done, 1 failed, 0 given back, 1 dead-lettered, in ")
