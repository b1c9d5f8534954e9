"""Candidates that stand by: the time of a hand-over, and the requests of each candidate; for every server."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import tenure
from tenure._backend import Backend

TERM = 0.5
"""Seconds of a term here; long enough that no candidate waits because it has just asked the store."""


async def hand_overs(url: str, count: int) -> None:
    """Measure the time from the end of the work to the next leader's start, with three candidates."""
    took: list[float] = []
    ended_at = 0.0

    async def stand() -> None:
        async def lead(term: tenure.Term) -> None:
            nonlocal ended_at
            if ended_at:
                took.append(time.perf_counter() - ended_at)
            await asyncio.sleep(TERM)
            ended_at = time.perf_counter()

        async with tenure.connect(url) as backend:
            await backend.election("bench").run(lead, again=True)

    candidates = [asyncio.create_task(stand()) for _ in range(3)]
    while len(took) < count:
        await asyncio.sleep(0.1)
    for candidate in candidates:
        candidate.cancel()
    await asyncio.gather(*candidates, return_exceptions=True)
    print_times(took)


async def idle(url: str, asked: Callable[[], Awaitable[int]], seconds: float = 30.0) -> None:
    """Count the requests of ten candidates that stand by; *asked* returns the number so far, without its own."""

    async def stand() -> None:
        async with tenure.connect(url) as backend:
            await backend.election("idle").run(asyncio.Event().wait)  # type: ignore[arg-type]

    async with tenure.connect(url) as backend:
        await hold(backend)
        candidates = [asyncio.create_task(stand()) for _ in range(10)]
        await asyncio.sleep(5)
        before, begun = await asked(), time.perf_counter()
        await asyncio.sleep(seconds)
        count = await asked() - before
        print(f"    standing by: {count / 10 / (time.perf_counter() - begun):.2f} requests /s for each candidate")
        for candidate in candidates:
            candidate.cancel()
        await asyncio.gather(*candidates, return_exceptions=True)


async def hold(backend: Backend) -> None:
    """Lead "idle" for an hour, without renewing."""
    assert backend._connection.opened is not None
    held = await backend._connection.opened.leases.acquire("idle", "holder", 3_600.0)
    assert isinstance(held, tenure._lease.Granted)


def print_times(took: list[float]) -> None:
    """Print the median and the 99th percentile."""
    cuts = statistics.quantiles(took, n=100)
    print(f"    {len(took)} times: p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f} ms", flush=True)
