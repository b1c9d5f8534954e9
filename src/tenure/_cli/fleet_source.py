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


class Process(Protocol):
    """A process of the service that has begun."""

    number: int
    reported_at: float
    """When it has last reported, by the clock of the loop: the newest is asked first."""
    is_live: bool
    is_ready: bool
    is_ending: bool
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
        silence: Returns for how many seconds the process with a number has given no sign of life, if it hangs.
        crash_loop: Says whether processes crash one after the other; empty if they don't.
    """

    def __init__(
        self,
        processes: Callable[[], Sequence[Process]],
        counts: Callable[[], Snapshot],
        *,
        silence: Callable[[int], float | None] = lambda number: None,
        crash_loop: Callable[[], str] = lambda: "",
    ) -> None:
        self._processes = processes
        self._counts = counts
        self._silence = silence
        self._crash_loop = crash_loop
        self._stats = Remembered(self._ask_stats)

    async def live(self) -> Health:
        """Return whether no work of a leader has overrun. One that hangs is killed alone: no reason to restart all."""
        for one in self._processes():
            if not one.is_live:
                return Health(False, f"process {one.number}: the work of a leader has overrun its term")
        silences = [(one.number, self._silence(one.number)) for one in self._processes()]
        hung = [f"; process {number} has hung for {for_:.0f} s" for number, for_ in silences if for_ is not None]
        return Health(True, f"live{''.join(hung)}")

    async def ready(self) -> Health:
        """Return whether at least one process takes messages; and whether others crash again and again."""
        running = [one for one in self._processes() if not one.is_ending]
        ready = [one for one in running if one.is_ready and self._silence(one.number) is None]
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
