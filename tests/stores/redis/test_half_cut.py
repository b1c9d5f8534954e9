"""A candidate whose requests reach Redis, and whose answers are lost: it keeps no name from the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import pytest

import tenure
from tenure import Backend, Term
from tenure.testing.faultproxy import FaultProxy
from tests.durations import stretched, until
from tests.servers import Redis, shared


@asynccontextmanager
async def campaigning(backend: Backend, name: str, ttl: float, label: str) -> AsyncIterator[list[str]]:
    """Campaign for *name*, again and again; yield the holders under which it has led."""
    led: list[str] = []

    async def work(term: Term) -> None:
        led.append(term.holder)
        await term.lost.wait()

    campaign = asyncio.create_task(backend.election(name, ttl=ttl, label=label).run(work, again=True))
    try:
        yield led
    finally:
        campaign.cancel()
        with suppress(asyncio.CancelledError):
            await campaign


@pytest.mark.parametrize("led_before", [False, True])
async def test_another_candidate_leads_while_one_hears_nothing(led_before: bool) -> None:
    """It goes on trying. A term of before ends by its own clock; a lease that it got unawares, by the one of Redis."""
    server, name, ttl = shared(Redis), f"half-cut-{uuid4().hex}", stretched(1.0)
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        tenure.connect(server.url) as healthy,
        tenure.connect(f"redis://{proxy.host}:{proxy.port}") as cut,
    ):
        watching = healthy.election(name, ttl=ttl)

        async def holder() -> str:
            leader = await watching.leader()
            return leader.holder if leader else ""

        async with campaigning(cut, f"{name}-before", ttl, "cut") as led:
            await until(lambda: led)  # so its requests are known to the server: they need no answers before
        if not led_before:
            proxy.stall("down")
        async with campaigning(cut, name, ttl, "cut") as unheard:
            await until(lambda: unheard if led_before else holder())
            assert (await holder()).startswith("cut")
            proxy.stall("down")
            async with campaigning(healthy, name, ttl, "healthy") as heard:
                await until(lambda: heard, what="a term of the candidate that is heard")
                first = await holder()
                await until(lambda: proxy.accepted > 3, what="further attempts of the other one")
                assert await holder() == first == heard[-1]
        assert len(unheard) == led_before
