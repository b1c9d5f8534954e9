"""The demonstration's messages: encoding, decoding, dead letters."""

from __future__ import annotations

import os

import tenure
from tenure._demo.computation import Count
from tenure._demo.job import Chunk, File
from tenure._demo.messages import DeadChunk, Result, Task

TASK = Task("/some/where", Chunk(7, (File("a.py", True), File(os.fsdecode(b"caf\xe9"), False))), 0.25)


def test_a_task_survives_encoding_and_has_an_id_where_ids_are_remembered() -> None:
    message = TASK.outgoing(named=True)
    assert Task.read(message.body) == TASK
    assert message.id == "chunk-7"
    assert TASK.outgoing(named=False).id is None


def test_a_result_survives_encoding() -> None:
    result = Result.of(7, 3, [Count("a.py", 21, 2, 4, 5, "abc"), Count("b", error="Permission denied")])
    assert result.counts == ((21, 2, 4, 5, "abc", ""), (0, 0, 0, 0, "", "Permission denied"))
    assert Result.read(result.outgoing().body) == result


async def test_a_dead_letter_has_its_chunk_and_reason() -> None:
    async with tenure.connect("memory:") as backend:
        queue = backend.queue("work", max_deliveries=1)
        await queue.send_batch([TASK.outgoing(named=True)])
        [message] = await queue.receive()
        await message.abandon(error=LookupError("not here"))
        [letter] = await queue.dead_letters.peek()
    assert DeadChunk.of(letter) == DeadChunk(7, "max_deliveries", "LookupError: not here", 1)
