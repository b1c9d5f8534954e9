"""Requests that are sent together: their order, their number at a time, and their errors."""

from __future__ import annotations

import asyncio

import pytest

from tenure._runtime.together import together
from tenure.errors import Unavailable


async def test_the_answers_stand_in_the_order_of_the_requests() -> None:
    async def ask(number: int) -> int:
        await asyncio.sleep(0.001 * (5 - number))
        return number

    assert await together(ask, range(5), at_once=5) == [0, 1, 2, 3, 4]
    assert await together(ask, [], at_once=5) == []


async def test_no_more_are_under_way_than_permitted() -> None:
    under_way = most = 0

    async def ask(number: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1

    await together(ask, range(10), at_once=3)
    assert most == 3


async def test_the_first_error_ends_the_others() -> None:
    sent, ended = set[int](), set[int]()

    async def ask(number: int) -> None:
        sent.add(number)
        try:
            await asyncio.sleep(0.01 if number == 1 else 60)
        finally:
            ended.add(number)
        raise Unavailable("cut off")

    with pytest.raises(Unavailable, match="cut off"):
        await together(ask, range(10), at_once=3)
    await asyncio.sleep(0.01)
    assert ended == sent <= {0, 1, 2, 3}
