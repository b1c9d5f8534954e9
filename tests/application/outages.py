"""A store in memory behind proxies that count its requests, and can let some of them fail or stay unanswered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import pytest

from tenure._backends.memory import Memory, MemoryBroker, MemoryLeases
from tenure._opened import Fact
from tenure._runtime.clock import Clock
from tenure._url import Url
from tenure.errors import Unavailable

Answers = Literal["fine", "fails", "silent", "read only"]
"""Whether requests are answered, fail at once, fail once the client has waited for :data:`TIMEOUT`, or fail at once if
they would change anything."""

TIMEOUT = 5.0
"""Seconds that a client waits for an answer, as those of all stores wait for some."""

READING = frozenset({"inspect", "inspect_many", "names", "settings", "schedules", "holding", "handled", "idle"})
"""What a store that can only be read answers, of all that is asked here."""

EVERY = ("*",)


class Request(NamedTuple):
    """A request that arrived at a proxy: when, what it asks, and for which name, or whatever its first argument is."""

    at: float
    verb: str
    about: str


class Proxy:
    """Stands before a port of a store. Typed as any port, as it has whatever verbs are behind it."""

    def __init__(self, port: Any, clock: Clock) -> None:
        self.requests: list[Request] = []
        self.has_hints = True
        self.takes: dict[str, float] = {}
        """The seconds that the store takes for some verbs, before it answers."""
        self._hints_every: float | None = None
        self._port = port
        self._clock = clock
        self._answers: dict[str, Answers] = {}
        self._listening: set[asyncio.Task[None]] = set()

    @property
    def traits(self) -> Any:
        """The traits of the store, or of one without hints."""
        return replace(self._port.traits, hints=self._port.traits.hints and self.has_hints)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._port, name)
        return partial(self._ask, name, found) if asyncio.iscoroutinefunction(found) else found

    def set(self, answers: Answers, *verbs: str) -> None:
        """Let these *verbs* be answered so from now on; all other ones, too, without a verb."""
        if not verbs:
            self._answers.clear()
        self._answers |= dict.fromkeys(verbs or EVERY, answers)
        if answers in ("fails", "silent") and not verbs:
            self._interrupt()

    def hint_every(self, seconds: float | None) -> None:
        """Give hints so often, although nothing has changed; with None, those of the store again."""
        self._hints_every = seconds
        self._interrupt()

    def _interrupt(self) -> None:
        for listening in self._listening:
            listening.cancel()

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield the hints of the store; in an outage none, and they end with an error when it begins."""
        self.requests.append(Request(self._clock.now(), "hints", name))
        return self._hinted(self._port.hints(name))

    async def _hinted(self, inner: AsyncIterator[None]) -> AsyncIterator[None]:
        while True:
            if self._hints_every is not None:
                await asyncio.sleep(self._hints_every)
                yield None
                continue
            if self._answers.get("*") in ("fails", "silent"):
                raise Unavailable("the store was cut off by the test")
            listening = asyncio.ensure_future(anext(inner))
            self._listening.add(listening)
            try:
                await asyncio.wait({listening})
            finally:
                listening.cancel()
                self._listening.discard(listening)
            if not listening.cancelled():
                listening.result()
                yield None

    async def _ask(self, verb: str, request: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.requests.append(Request(self._clock.now(), verb, str(arguments[0] if arguments else "")))
        answers = self._answers.get(verb, self._answers.get("*", "fine"))
        if answers == "silent":
            await asyncio.sleep(TIMEOUT)
        if answers != "fine" and not (answers == "read only" and verb in READING):
            raise Unavailable("the store was cut off by the test")
        answer = await request(*arguments, **options)
        await asyncio.sleep(self.takes.get(verb, 0.0))
        return answer


class Store:
    """A store in memory, as :func:`tenure._backends.memory.open` returns one, behind proxies."""

    def __init__(self, clock: Clock, *, has_hints: bool = True) -> None:
        memory = Memory()
        self.leases: Proxy = Proxy(MemoryLeases(clock, memory), clock)
        self.broker: Proxy = Proxy(MemoryBroker(clock, memory), clock)
        self.leases.has_hints = self.broker.has_hints = has_hints

    def set(self, answers: Answers, *verbs: str) -> None:
        """Let these *verbs* be answered so from now on; all other ones, too, without a verb."""
        self.leases.set(answers, *verbs)
        self.broker.set(answers, *verbs)

    def hint_every(self, seconds: float | None) -> None:
        """Give hints so often, although nothing has changed; with None, those of the store again."""
        self.leases.hint_every(seconds)
        self.broker.hint_every(seconds)

    def requests(self, verb: str | None = None, *, since: float) -> list[Request]:
        """Return the requests that came since then; the subscriptions to hints only if that is the *verb*."""
        found = [one for one in (*self.leases.requests, *self.broker.requests) if one.at >= since]
        return sorted(one for one in found if (one.verb == verb if verb else one.verb != "hints"))

    async def describe(self) -> Sequence[Fact]:
        return ()

    async def close(self) -> None:
        self.leases.close()
        self.broker.close()


@contextmanager
def proxies(*, has_hints: bool = True) -> Iterator[list[Store]]:
    """Inside the block, each backend of ``memory:`` that is opened has a store behind proxies; yield these stores."""
    stores: list[Store] = []

    def open_one(url: Url, *, clock: Clock) -> Store:
        stores.append(Store(clock, has_hints=has_hints))
        return stores[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenure._backends.memory.open", open_one)
        yield stores
