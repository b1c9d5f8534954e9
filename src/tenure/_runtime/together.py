"""Requests of one kind that are under way together, a limited number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


async def together(ask: Callable[[S], Awaitable[T]], about: Iterable[S], at_once: int) -> list[T]:
    """Return the answers of *ask* about each of these, in their order; the first error ends the others, and is raised.

    Args:
        ask: Sends a request.
        about: One request is sent about each.
        at_once: How many may be under way.
    """
    free = asyncio.Semaphore(at_once)

    async def ask_in_turn(one: S) -> T:
        async with free:
            return await ask(one)

    tasks = [asyncio.ensure_future(ask_in_turn(one)) for one in about]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
