"""What tests of roles ask for: an act that is refused in one line, which names the missing right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import pytest

import tenure
from tenure.events import CampaignFailed, Event, RenewalMissed, Renewed, TermBegan, TermEnded
from tests.durations import stretched, until
from tests.servers import patient

Act: TypeAlias = Callable[[tenure.Backend], Awaitable[object]]

Change: TypeAlias = Callable[[], Awaitable[object]]
"""A change of rights."""

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
"""Why the first campaign of a backend was refused, if one was: a server that is slow has refused none."""


@asynccontextmanager
async def acting(url: str) -> AsyncIterator[tenure.Backend]:
    """Yield a backend of a user, whose login is in the *url*."""
    failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(event: Event) -> None:
        if isinstance(event, CampaignFailed) and not event.why.startswith("no answer within") and not failed.done():
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


async def plan(backend: tenure.Backend, name: str, queue: str) -> None:
    """Let a schedule begin for *queue*, which sends nothing before the next hour."""
    running = asyncio.create_task(backend.schedule(name, 3600, queue=queue).run())

    async def is_there() -> bool:
        return name in [one.name for one in await backend.schedules()]

    await until(is_there)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


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


async def outlasts(url: str, name: str, *, revoke: Change, grant: Change) -> None:
    """Check that a term goes on whose right is taken from the user in *url*, and given back in time."""
    events: list[Event] = []
    ends = asyncio.Event()

    async def work(term: tenure.Term) -> None:
        await ends.wait()
        term.check()

    async with tenure.connect(patient(url), on_event=events.append) as backend:
        often = TTL / 300
        leading = asyncio.create_task(backend.election(name, ttl=TTL, renew_every=often, retry_every=often).run(work))
        await until(lambda: any(isinstance(one, Renewed) for one in events))
        await revoke()
        await until(lambda: any(isinstance(one, RenewalMissed | TermEnded) for one in events))
        await grant()
        missed = len(events)
        await until(lambda: any(isinstance(one, Renewed | TermEnded) for one in events[missed:]))
        assert not [one for one in events if isinstance(one, TermEnded)]
        ends.set()
        await leading
    assert len([one for one in events if isinstance(one, TermBegan)]) == 1


async def ends_in_time(url: str, other: str, name: str, *, revoke: Change, shortest: float = 0.6) -> None:
    """Check that a term ends whose right is taken from the user in *url*, before the user in *other* leads.

    The store has leases of *shortest* seconds.
    """
    events: list[Event] = []
    terms: list[tenure.Term] = []
    is_cancelled = asyncio.Event()

    async def work(term: tenure.Term) -> None:
        terms.append(term)
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def follow(term: tenure.Term) -> None:
        assert term.token > terms[0].token
        with pytest.raises(tenure.TermLost):
            terms[0].check()
        await is_cancelled.wait()

    async with tenure.connect(patient(url), on_event=events.append) as backend, acting(other) as successor:
        ttl = stretched(shortest)
        leading = asyncio.create_task(backend.election(name, ttl=ttl).run(work))
        await until(lambda: terms)
        await revoke()
        await successor.election(name, ttl=TTL).run(follow)
        leading.cancel()
        await asyncio.wait([leading])
    assert [one.reason for one in events if isinstance(one, TermEnded)] == ["unanswered"]
