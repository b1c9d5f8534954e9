"""The answers of ``tenure run --http``: what the processes of the service report, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from tenure import Stats
from tenure._foreign import Unreadable, a_count, a_flag, a_list, a_text, an_object, read_or, seconds
from tenure._http.source import ANSWER_WITHIN, Health, Remembered, add_stats
from tenure._telemetry.families import Snapshot, combined
from tenure.errors import TenureError, Unavailable

SILENT = 30.0
"""Seconds without a report, after which a process is not ready; each reports once a second."""


class Process(Protocol):
    """A process of the service that has begun."""

    number: int
    reported_at: float
    """When it has last reported, by the clock of the loop."""
    is_live: bool
    is_ready: bool
    is_ending: bool
    is_leaving: bool
    """Whether it has said that it only has to end: the supervisor kills it if that takes too long."""

    measured: Snapshot
    """Its metrics, as it has last told them."""

    async def ask(self, question: str) -> Any:
        """Return its answer, or None if there is none in time."""
        ...


def _read_stats(answer: object) -> dict[str, Stats]:
    return {a_text(queue): _read_numbers(one) for queue, one in an_object(answer).items()}


def _read_numbers(value: object) -> Stats:
    match a_list(value):
        case [*counts, oldest_age, paused] if len(counts) == 5:
            ready, locked, delayed, deferred, dead = (a_count(one) for one in counts)
            return Stats(ready, locked, delayed, deferred, dead, seconds(oldest_age), a_flag(paused))
    raise Unreadable("it has not the numbers of a queue")


class FleetSource:
    """The processes of one service, together.

    Args:
        processes: Returns those that have begun.
        counts: Returns the metrics of the supervisor itself.
        crash_loop: Says whether processes crash one after the other; empty if they don't.
    """

    def __init__(
        self,
        processes: Callable[[], Sequence[Process]],
        counts: Callable[[], Snapshot],
        crash_loop: Callable[[], str] = lambda: "",
    ) -> None:
        self._processes = processes
        self._counts = counts
        self._crash_loop = crash_loop
        self._stats = Remembered(self._ask_stats)
        self._loop = asyncio.get_running_loop()

    async def live(self) -> Health:
        """Return whether no work of a leader has overrun. One that hangs is killed alone: no reason to restart all."""
        for one in self._processes():
            if not one.is_live:
                return Health(False, f"process {one.number}: the work of a leader has overrun its term")
        now = self._loop.time()
        silent = [one for one in self._processes() if now - one.reported_at > SILENT and not one.is_leaving]
        hung = "".join(f"; process {one.number} hangs since {now - one.reported_at:.0f} s" for one in silent)
        return Health(True, f"live{hung}")

    async def ready(self) -> Health:
        """Return whether at least one process takes messages; and whether others crash again and again."""
        now = self._loop.time()
        running = [one for one in self._processes() if not one.is_ending]
        ready = [one for one in running if one.is_ready and now - one.reported_at <= SILENT]
        crashes = f"; {said}" if (said := self._crash_loop()) else ""
        if ready:
            return Health(True, f"ready: {len(ready)} of {len(running)} processes{crashes}")
        return Health(False, f"none of {len(running)} processes is ready{crashes}")

    async def metrics(self) -> Snapshot:
        """Return the metrics of all processes, added up."""
        await asyncio.gather(*(one.ask("measure") for one in self._processes()))
        # Of one that gives no answer now, the last one counts: a sum must not fall and rise again. One that has ended
        # meanwhile is among the counts of the supervisor.
        found = combined([self._counts(), *(one.measured for one in self._processes())])
        with suppress(TenureError):  # a number that is unknown is left out: 0 would be taken for one
            add_stats(found, await self.stats())
        return found

    async def stats(self) -> dict[str, Stats]:
        """Return the numbers of the queues, which one of the processes asks for."""
        return await self._stats.get()

    async def _ask_stats(self) -> dict[str, Stats]:
        newest = sorted(self._processes(), key=lambda one: (one.is_ending, -one.reported_at))
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                for one in newest[:2]:
                    if (answer := read_or(_read_stats, await one.ask("stats"), None)) is not None:
                        return answer
        except TimeoutError:
            pass
        raise Unavailable("no process could tell the numbers of its queues")
