"""Drains and stops at each moment of a begin: what has not begun yet ends as what runs does, and handles nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

import tenure
from tenure import Backend, Service
from tenure._queue.consumer import Consumer
from tenure._service.parts import Consumption, Leadership, Sending, UntilEmpty
from tenure.testing import connect_here
from tenure.testing.loop import run

STEPS = 40
"""More iterations of the loop than the begin of anything here takes."""

SOON = 10.0
"""Seconds within which it has to end."""

Drain = Callable[[], object]
Begin = Callable[[Backend, list[str]], tuple[Awaitable[object], Drain]]
"""Make what runs, and what drains it. What is handled after the drain is noted in the list."""


def a_consumer(backend: Backend, handled: list[str]) -> tuple[Awaitable[object], Drain]:
    consumer = backend.queue("orders").consumer(noting(handled))
    return consumer.run(), lambda: consumer.drain(0.0)


def a_consumer_of_sessions(backend: Backend, handled: list[str]) -> tuple[Awaitable[object], Drain]:
    consumer = backend.queue("orders").consumer(noting(handled), sessions=True)
    return consumer.run(), lambda: consumer.drain(0.0)


def a_service(backend: Backend, handled: list[str]) -> tuple[Awaitable[object], Drain]:
    service = service_on(backend, handled)
    stopped = asyncio.Event()

    def stop() -> None:
        service.stop(0.0)
        if not service._running:  # before serve() has begun, nothing happens: an event is for that
            stopped.set()

    return service.serve(sigterm=False, stop=stopped), stop


def a_service_until_it_is_empty(backend: Backend, handled: list[str]) -> tuple[Awaitable[object], Drain]:
    service = service_on(backend, handled)
    stopped = asyncio.Event()

    def stop() -> None:
        service.stop(0.0)
        if not service._running:
            stopped.set()

    return service.serve(sigterm=False, stop=stopped, until_empty=True), stop


def service_on(backend: Backend, handled: list[str]) -> Service:
    service = Service(backend)
    service.handler("orders")(noting(handled))

    @service.every(3_600.0, name="beat")
    async def beat() -> None: ...

    @service.leader("chair")
    async def lead(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    return service


def noting(handled: list[str]) -> Callable[[tenure.Message], Awaitable[None]]:
    async def note(message: tenure.Message) -> None:
        handled.append(message.text())
        await asyncio.sleep(0.5)

    return note


BEGINS: list[Begin] = [a_consumer, a_consumer_of_sessions, a_service, a_service_until_it_is_empty]


async def drained_after(steps: int, begin: Begin) -> str | None:
    """Drain what begins after so many iterations of the loop; return what is wrong."""
    handled: list[str] = []
    async with connect_here() as backend:
        queue = backend.queue("orders")
        for number in range(20):
            await queue.send(json=number, session=f"s{number}" if begin is a_consumer_of_sessions else None)
        running, drain = begin(backend, handled)
        task = asyncio.ensure_future(running)
        for _ in range(steps):
            await asyncio.sleep(0)
        drain()
        before = len(handled)
        await asyncio.wait({task}, timeout=SOON)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return f"drained after {steps} steps, it goes on"
        task.result()
        if len(handled) > before:
            return f"drained after {steps} steps, it has begun to handle {len(handled) - before} messages"
    return None


def complaints(begin: Begin) -> Iterator[str]:
    for steps in range(STEPS):
        if (wrong := run(drained_after(steps, begin), seed=1, limit=1_000.0)) is not None:
            yield wrong


@pytest.mark.parametrize("begin", BEGINS)
def test_a_drain_at_each_moment_of_a_begin_ends_it(begin: Begin) -> None:
    assert list(complaints(begin)) == []


# --- planted bugs ---


def consumers_that_have_not_begun_are_not_drained(patch: pytest.MonkeyPatch) -> Begin:
    def drain(self: Consumer, grace: float | None = None) -> None:
        if self._driver is not None:
            self._driver.drain(grace)

    patch.setattr(Consumer, "drain", drain)
    return a_consumer


def handlers_that_have_not_begun_are_not_drained(patch: pytest.MonkeyPatch) -> Begin:
    def drain(self: Consumption, grace: float) -> None:
        if self._consumer is not None:
            self._consumer.drain(grace)

    patch.setattr(Consumption, "drain", drain)
    return a_service


def a_pass_follows_a_drain(patch: pytest.MonkeyPatch) -> Begin:
    def drain(self: UntilEmpty, grace: float) -> None:
        for one in self._consumptions:
            if one._consumer is not None:
                one._consumer.drain(grace)

    patch.setattr(UntilEmpty, "drain", drain)
    return a_service_until_it_is_empty


def leaders_are_not_drained(patch: pytest.MonkeyPatch) -> Begin:
    patch.setattr(Leadership, "drain", lambda self, grace: None)
    return a_service


def schedules_that_have_not_begun_are_not_drained(patch: pytest.MonkeyPatch) -> Begin:
    patch.setattr(Sending, "drain", lambda self, grace: self._schedule.drain(grace))
    return a_service


@pytest.mark.parametrize(
    "plant",
    [
        consumers_that_have_not_begun_are_not_drained,
        handlers_that_have_not_begun_are_not_drained,
        a_pass_follows_a_drain,
        leaders_are_not_drained,
        schedules_that_have_not_begun_are_not_drained,
    ],
)
def test_a_planted_bug_of_an_early_drain_is_found(
    plant: Callable[[pytest.MonkeyPatch], Begin], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = plant(monkeypatch)
    assert next(complaints(begin), None) is not None
