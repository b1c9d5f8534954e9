"""Pools of connections that are replaced while requests are under way on them."""

from __future__ import annotations

import asyncio

from tenure._runtime.retired import CLOSED_AFTER, Retired
from tenure.testing.loop import run


class Pool:
    def __init__(self) -> None:
        self.closed_at: list[float] = []

    async def close(self) -> None:
        self.closed_at.append(asyncio.get_running_loop().time())


def test_a_pool_is_closed_when_the_last_request_on_it_has_ended() -> None:
    async def main() -> None:
        retired, pool, other = Retired[Pool](), Pool(), Pool()
        with retired.used(pool):
            with retired.used(pool), retired.used(other):
                retired.retire(pool)
                await asyncio.sleep(1.0)
            await asyncio.sleep(1.0)
            assert not pool.closed_at
        await asyncio.sleep(1.0)
        assert pool.closed_at == [2.0]
        assert not other.closed_at  # not retired

    run(main())


def test_a_pool_that_is_not_used_is_closed_at_once() -> None:
    async def main() -> None:
        retired, pool = Retired[Pool](), Pool()
        retired.retire(pool)
        await asyncio.sleep(1.0)
        assert pool.closed_at == [0.0]

    run(main())


def test_a_request_that_never_ends_keeps_no_pool() -> None:
    async def main() -> None:
        retired, pool = Retired[Pool](), Pool()
        with retired.used(pool):
            retired.retire(pool)
            await asyncio.sleep(2 * CLOSED_AFTER)
        assert pool.closed_at == [CLOSED_AFTER]

    run(main())


def test_closing_closes_what_is_left() -> None:
    async def main() -> None:
        retired, pool = Retired[Pool](), Pool()
        with retired.used(pool):
            retired.retire(pool)
            await retired.close()
            assert pool.closed_at == [0.0]

    run(main())
