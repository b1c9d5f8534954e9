"""Shared by the tests of Service Bus: a backend on the look-alike, behind proxies, on a clock that is moved."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest

from tenure._backends import servicebus
from tenure._backends.servicebus import ServiceBusBroker, feed, places, sessions
from tenure._backends.servicebus.links import ReceiveLink
from tenure._backends.servicebus.names import entity_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import DeadLetter, Settlement
from tenure._url import Url
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import ServiceBus, patient
from tests.servers.servicebus import connection_string

T = TypeVar("T")


@dataclass
class MovedClock:
    """This process's clock, moved together with the server's."""

    by: float = 0.0

    def now(self) -> float:
        return time.monotonic() + self.by


@dataclass
class Way:
    """A backend, and the proxies between it and the look-alike."""

    server: ServiceBus
    amqp: FaultProxy
    admin: FaultProxy
    backend: servicebus.ServiceBusBackend
    clock: MovedClock = field(default_factory=MovedClock)

    @property
    def broker(self) -> ServiceBusBroker:
        return self.backend.broker

    async def pass_time(self, seconds: float) -> None:
        await asyncio.to_thread(self.server.turn, seconds)
        self.clock.by += seconds


@asynccontextmanager
async def proxied(server: ServiceBus, options: str = "") -> AsyncIterator[Way]:
    """Yield a way to *server* through proxies."""
    clock = MovedClock()
    async with FaultProxy("127.0.0.1", server.port) as amqp, FaultProxy("127.0.0.1", server.admin_port) as admin:
        url = f"servicebus://127.0.0.1:{amqp.port}?emulator=yes&admin_port={admin.port}&create=yes{options}"
        backend = servicebus.open(Url.parse(url), clock=clock)
        try:
            yield Way(server, amqp, admin, backend, clock)
        finally:
            await backend.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ServiceBusBroker]:
    """Yield the broker of a backend, which is closed at the end."""
    backend = servicebus.open(Url.parse(patient(url)))
    try:
        yield backend.broker
    finally:
        await backend.close()


def without_manage(server: ServiceBus, monkeypatch: pytest.MonkeyPatch, options: str = "", port: int = 0) -> str:
    """Return the URL for a policy that may only send and listen."""
    monkeypatch.setenv("SEND_LISTEN", connection_string(port or server.port, "SendListen"))
    return f"servicebus:?connection_string_env=SEND_LISTEN&admin_port={server.admin_port}{options}"


async def inside(broker: ServiceBusBroker, act: Coroutine[Any, Any, T]) -> T:
    """Return the result of *act*, run on the thread of the client library."""
    return await broker._namespace._thread.run(lambda: act)


async def create_topic(server: ServiceBus, topic: str, *subscriptions: str) -> None:
    async with opened(server.url) as broker:
        client = broker.administration._here()
        await inside(broker, client.create_topic(topic))
        for each in subscriptions:
            await inside(broker, client.create_subscription(topic, each))


async def sent(broker: ServiceBusBroker, queue: str, *ids: str, session: str | None = None) -> None:
    """Send messages with these ids, in order."""
    await broker.send(queue, [Outgoing(id_.encode(), id=id_, session=session) for id_ in ids])


async def buried(broker: ServiceBusBroker, queue: str, *ids: str) -> None:
    """Send messages with these ids, and make dead letters of them."""
    await sent(broker, queue, *ids)
    for one in await received(broker, queue, len(ids)):
        await broker.settle([Settlement(one, DeadLetter("bad", ""))])


async def received(broker: ServiceBusBroker, queue: str, count: int) -> Sequence[Delivery]:
    """Claim *count* messages, in as many claims as it takes."""
    found: list[Delivery] = []

    async def is_complete() -> bool:
        found.extend((await broker.receive(queue, count - len(found), 30)).deliveries)
        return len(found) == count

    await until(is_complete, what=f"{count} messages of {queue}")
    return found


def link_of(broker: ServiceBusBroker, queue: str) -> ReceiveLink:
    """Return the link on which messages of *queue* come."""
    link = broker._feeds.of(queue)._link
    assert link is not None
    return link


def queue_of(name: str) -> str:
    """Return *name* in a form in which its entity has the same name."""
    found = re.sub(r"[^a-z0-9]+", "-", name)
    assert entity_of(found) == found
    return found


def look_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-alike needs no time to look, and none to open a link again."""
    for module, name, seconds in (
        (feed, "LOOK", 0.02),
        (feed, "FIRST_LOOK", 0.02),
        (feed, "REOPEN", 0.05),
        (sessions, "LOOK", 0.02),
        (sessions, "FIRST_LOOK", 0.02),
        (sessions, "WAIT", 0.05),
        (sessions, "REOPEN", 0.05),
        (places, "CHECK_AFTER", 0.01),
    ):
        monkeypatch.setattr(module, name, seconds)


def heal(server: ServiceBus) -> None:
    """End the faults of *server* that last."""
    for what, value in (("drain", "1"), ("throttle", "0"), ("conflicts", "0")):
        server.control(what, value)


async def control(server: ServiceBus, what: str, value: object = "") -> str:
    """Make a fault without holding up this loop, on which the proxies run."""
    return await asyncio.to_thread(partial(server.control, what, value))
