"""The leader: splits the work into messages, and aggregates the results. It does not count files."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import tenure
from tenure._demo.computation import merge
from tenure._demo.ledger import Ledger
from tenure._demo.messages import LETTERS_MAX, DeadChunk, Result, Task
from tenure._demo.report import Report, report

TOGETHER = 100
"""Messages that are sent, and results that are stored, in one step."""

WAIT = 0.25
"""Seconds to wait for results, before the dead letters are checked."""

AGAIN_AFTER = 0.2
"""Seconds until a request that the store did not answer is repeated."""


class Leader:
    """The work of a term."""

    def __init__(
        self,
        number: int,
        ledger: Ledger,
        work: tenure.Queue,
        results: tenure.Queue,
        *,
        named: bool,
        stop: asyncio.Event,
    ) -> None:
        self._number = number
        self._ledger = ledger
        self._queue = work
        self._results = results
        self._named = named
        self._stop = stop

    async def lead(self, term: tenure.Term) -> None:
        """Lead for one term: to the end of the work, and then until the instance is stopped."""
        report(Report("elected", term.token))
        try:
            self._ledger.begin_term(term.token, self._number)
            report(Report("wrote", term.token))
            report(Report("split", term.token, count=await self._split()))
            while not self._stop.is_set():
                try:
                    await self._aggregate(term)
                except tenure.Unavailable:
                    await asyncio.sleep(
                        AGAIN_AFTER
                    )  # messages that were not completed are delivered again, and recognised
        except tenure.TermLost as refusal:
            # A newer leader has written already. This term is over; the next renewal will be refused.
            report(Report("refused", term.token, str(refusal)))
            await term.lost.wait()
        finally:
            report(Report("left", term.token))

    async def _split(self) -> int:
        """Send a message for every chunk that is not done; return how many.

        A predecessor may have sent it already. Its id makes that harmless; on a store without ids, it is counted
        twice, and the ledger keeps the first result.
        """
        job, left = self._ledger.job(), self._ledger.remaining()
        messages = [Task(job.folder, chunk, job.pace).outgoing(named=self._named) for chunk in left]
        while messages:
            try:
                await self._queue.send_batch(messages[:TOGETHER])
            except tenure.Unavailable:
                await asyncio.sleep(AGAIN_AFTER)
            else:
                del messages[:TOGETHER]
        return len(left)

    async def _aggregate(self, term: tenure.Term) -> None:
        """Store the received results, and only then complete their messages."""
        received = await self._results.receive(TOGETHER, wait=WAIT)
        if received:
            term.check()
            self._ledger.record(term.token, [Result.read(message.body) for message in received])
            await asyncio.gather(*map(_complete, received))
        else:
            await self._record_dead(term)
        progress = self._ledger.progress()
        if progress.left == 0 and not progress.finished:
            self._ledger.finish(term.token, merge(self._ledger.counts()))

    async def _record_dead(self, term: tenure.Term) -> None:
        """Store the chunks that could not be counted."""
        letters = await self._queue.dead_letters.peek(LETTERS_MAX)
        if letters:
            self._ledger.record_dead(term.token, [DeadChunk.of(letter) for letter in letters])


async def _complete(message: tenure.Message) -> None:
    with suppress(tenure.LockLost):  # too late: it is delivered again, and the ledger recognises it
        await message.complete()
