"""A worker: counts chunk after chunk, in competition with all others. It does not use the election."""

from __future__ import annotations

import asyncio

import tenure
from tenure._demo.computation import count_chunk
from tenure._demo.messages import Result, Task
from tenure._demo.report import Report, report

RETRY = tenure.RetryPolicy(initial=0.2, factor=2.0, maximum=1.0)
"""Quick, as the poison message must fail several times during the run."""

GRACE = 2.0
CHECK_EVERY = 0.5
"""Seconds between polls, if the store gives no hints."""


class Worker:
    """The handler of messages in one instance."""

    def __init__(self, number: int, results: str) -> None:
        self._number = number
        self._results = results

    async def work(self, queue: tenure.Queue, stop: asyncio.Event) -> None:
        """Take messages from *queue* until *stop* is set."""
        await queue.consume(
            self._count,
            stop=stop,
            concurrency=1,  # an instance is a process with one core
            prefetch=0,  # a buffered message could be handled by another instance
            retry=RETRY,
            grace=GRACE,
            on_error=self._report_failure,
            poll_every=CHECK_EVERY,
            sigterm=False,
        )

    def _count(self, message: tenure.sync.Message) -> None:
        """Count the chunk. A plain function, so it is called in a thread; the pump handles its errors."""
        task = Task.read(message.body)
        chunk = task.chunk.number
        report(Report("took", chunk=chunk, delivery=message.delivery_count))
        counts = count_chunk(task.folder, task.chunk, pace=task.pace)
        report(Report("counted", chunk=chunk))
        # In one step, if the store has transactions: the result is sent if and only if the message is completed.
        message.complete(sends=[(self._results, Result.of(chunk, self._number, counts).outgoing())])

    def _report_failure(self, message: tenure.Message, error: BaseException) -> None:
        chunk = Task.read(message.body).chunk.number
        # The text of a lost lock is long; its beginning is enough here.
        text = str(error).partition(":")[0] if isinstance(error, tenure.LockLost) else str(error)
        why = f"{type(error).__name__}: {text}"
        report(Report("could not count", chunk=chunk, delivery=message.delivery_count, why=why))
