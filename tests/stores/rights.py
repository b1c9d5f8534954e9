"""What tests of roles ask for: an act that is refused in one line, which names the missing right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import pytest

import tenure
from tenure.events import CampaignFailed, Event
from tests.servers import patient

Act: TypeAlias = Callable[[tenure.Backend], Awaitable[object]]

Refusal: TypeAlias = type[tenure.TenureError] | tuple[type[tenure.TenureError], ...]

TTL = 30.0
"""Seconds of a lease that no test waits for."""

AT_ONCE = tenure.ConfigError
"""How a request is refused before any of a process has worked: for good."""

LATER = tenure.Unavailable
"""How one is refused after another has worked: to be tried again. An act may have several, the first of which look."""

EITHER = (AT_ONCE, LATER)
"""How one is refused while the process waits for the answers to others, too."""

_failures: WeakKeyDictionary[tenure.Backend, asyncio.Future[str]] = WeakKeyDictionary()
"""Why the first campaign of a backend failed, if one has."""


@asynccontextmanager
async def acting(url: str) -> AsyncIterator[tenure.Backend]:
    """Yield a backend of a user, whose login is in the *url*."""
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(event: Event) -> None:
        if isinstance(event, CampaignFailed) and not failed.done():
            failed.set_result(event.why)

    async with tenure.connect(patient(url), on_event=note) as backend:
        _failures[backend] = failed
        yield backend


async def lead(backend: tenure.Backend, name: str) -> int:
    """Lead *name* for a moment; return the token.

    Raises:
        TenureError: It is refused: at once, or in the log, where the right may be granted again.
    """
    tokens: list[int] = []

    async def work(term: tenure.Term) -> None:
        term.check()
        tokens.append(term.token)

    run = asyncio.ensure_future(backend.election(name, ttl=TTL).run(work))
    waited: set[asyncio.Future[Any]] = {run, _failures[backend]}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if run.done():
        run.result()
        return tokens[0]
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run
    raise tenure.Unavailable(_failures[backend].result())


async def refused(backend: tenure.Backend, act: Act, *says: str, error: Refusal = AT_ONCE) -> None:
    """Check that *act* is refused, in one line that has the words of *says*: the missing right, and what to do.

    The *error* is of this kind: ``AT_ONCE``, ``LATER``, or ``EITHER``.
    """
    with pytest.raises(tenure.TenureError) as caught:
        await act(backend)
    assert type(caught.value) in (error if isinstance(error, tuple) else (error,)), caught.value
    said = str(caught.value)
    assert "\n" not in said
    assert not said.count('"') % 2, said
    assert [word for word in says if word not in said] == [], said
