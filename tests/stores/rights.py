"""What tests of roles ask for: an act that is refused in one line, which names the missing right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest

import tenure
from tests.servers import patient

Act: TypeAlias = Callable[[tenure.Backend], Awaitable[object]]

TTL = 30.0
"""Seconds of a lease that no test waits for."""


@asynccontextmanager
async def acting(url: str) -> AsyncIterator[tenure.Backend]:
    """Yield a backend of a user, whose login is in the *url*."""
    async with tenure.connect(patient(url)) as backend:
        yield backend


async def lead(backend: tenure.Backend, name: str) -> int:
    """Lead *name* for a moment; return the token."""
    tokens: list[int] = []

    async def work(term: tenure.Term) -> None:
        term.check()
        tokens.append(term.token)

    await backend.election(name, ttl=TTL).run(work)
    return tokens[0]


async def refused(backend: tenure.Backend, act: Act, *says: str) -> None:
    """Check that *act* is refused, in one line that has the words of *says*: the missing right, and what to do."""
    with pytest.raises((tenure.ConfigError, tenure.Unavailable)) as caught:
        await act(backend)
    said = str(caught.value)
    assert "\n" not in said
    assert [word for word in says if word not in said] == [], said
