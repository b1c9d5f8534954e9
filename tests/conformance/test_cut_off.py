"""Connections whose close is cut off, by a second cancellation or a limit: no socket stays open.

The drivers of NATS, RabbitMQ and Service Bus leave it open then, and the server goes on to deliver on it. Those of the
other stores close theirs first, and wait only then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiormq
import pytest
from azure.servicebus._pyamqp.aio._client_async import AMQPClientAsync
from nats.aio.client import Client as NatsDriver

from tenure._backends import nats, rabbitmq, servicebus
from tenure._backends.nats.client import Client
from tenure._backends.nats.transport import Transport
from tenure._backends.rabbitmq.connection import AmqpConnection
from tenure._backends.servicebus import library
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.names import Path
from tenure._url import Url
from tests.durations import until
from tests.servers import Nats, RabbitMQ, ServiceBus, shared

QUEUE = "cut-off"


class Hanging:
    """Calls of a driver that begin, and never end."""

    def __init__(self) -> None:
        self.of: list[Any] = []
        """What they were called on, or with."""

    @contextmanager
    def planted(self, owner: type, name: str) -> Iterator[None]:
        """Let calls of a method hang inside the block."""

        async def hang(called: Any, *_: Any, **__: Any) -> None:
            self.of.append(called)
            await asyncio.Event().wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, hang)
            yield

    async def cut_off(self, task: asyncio.Future[Any]) -> Any:
        """Cancel *task* when it hangs; return what it hangs on."""
        await until(lambda: self.of)
        task.cancel()
        return self.of.pop()


async def is_closed(task: asyncio.Future[Any], transport: asyncio.WriteTransport) -> bool:
    """Return whether the socket is closed when *task* has ended; it is now."""
    await asyncio.wait({task})
    closed = transport.is_closing()
    transport.abort()
    return closed


# --- NATS ---


@asynccontextmanager
async def nats_client() -> AsyncIterator[Client]:
    backend = nats.open(Url.parse(shared(Nats).url))
    try:
        yield backend._client
    finally:
        await backend.close()


async def nats_while_it_opens() -> bool:
    hanging = Hanging()
    async with nats_client() as client:
        with hanging.planted(NatsDriver, "subscribe"), hanging.planted(NatsDriver, "close"):
            opening = asyncio.ensure_future(client._connect())
            await hanging.cut_off(opening)
            found = await hanging.cut_off(opening)
            return await is_closed(opening, found._transport._io_writer.transport)


async def nats_once_it_is_open() -> bool:
    hanging = Hanging()
    async with nats_client() as client:
        connection = await client.connection()
        with hanging.planted(NatsDriver, "close"):
            closing = asyncio.ensure_future(connection.close())
            found = await hanging.cut_off(closing)
            return await is_closed(closing, found._transport._io_writer.transport)


# --- RabbitMQ ---


async def rabbitmq_once_it_is_open() -> bool:
    hanging = Hanging()
    backend = rabbitmq.open(Url.parse(shared(RabbitMQ).url))
    try:
        connection = await backend._client.connection("receiving")
        assert connection._wire is not None
        assert connection._wire._wire is not None
        with hanging.planted(aiormq.Connection, "close"):
            closing = asyncio.ensure_future(connection.close())
            await hanging.cut_off(closing)
            return await is_closed(closing, connection._wire._wire)
    finally:
        await connection._tasks.cancel_all()
        await backend.close()


# --- Service Bus: on the library's thread ---


async def on_servicebus(act: Callable[[Namespace, Path], Coroutine[Any, Any, bool]]) -> bool:
    backend = servicebus.open(Url.parse(shared(ServiceBus).url))
    try:
        await backend.broker.declare(QUEUE, {})
        namespace = backend.broker._namespace
        return await namespace._thread.run(lambda: act(namespace, Path(QUEUE)))
    finally:
        await backend.close()


async def servicebus_while_it_opens() -> bool:
    async def act(namespace: Namespace, path: Path) -> bool:
        hanging = Hanging()
        with (
            hanging.planted(AMQPClientAsync, "auth_complete_async"),
            hanging.planted(AMQPClientAsync, "close_async"),
        ):
            opening = asyncio.ensure_future(namespace.requests(path))
            await hanging.cut_off(opening)
            found = await hanging.cut_off(opening)
            return await is_closed(opening, found._connection._transport.writer.transport)

    return await on_servicebus(act)


async def servicebus_once_it_is_open() -> bool:
    async def act(namespace: Namespace, path: Path) -> bool:
        hanging = Hanging()
        connection = await namespace.requests(path)
        with hanging.planted(AMQPClientAsync, "close_async"):
            closing = asyncio.ensure_future(connection.close())
            found = await hanging.cut_off(closing)
            return await is_closed(closing, found._connection._transport.writer.transport)

    return await on_servicebus(act)


WAYS: list[Callable[[], Awaitable[bool]]] = [
    nats_while_it_opens,
    nats_once_it_is_open,
    rabbitmq_once_it_is_open,
    servicebus_while_it_opens,
    servicebus_once_it_is_open,
]


@pytest.mark.parametrize("way", WAYS)
async def test_a_close_that_is_cut_off_leaves_no_socket(way: Callable[[], Awaitable[bool]]) -> None:
    assert await way()


@pytest.mark.parametrize("way", WAYS)
async def test_a_planted_bug_of_a_socket_left_open_is_found(
    way: Callable[[], Awaitable[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transport, "drop", lambda transport: None)
    monkeypatch.setattr(AmqpConnection, "_drop", lambda connection: None)
    monkeypatch.setattr(library, "_drop", lambda connection: None)
    assert not await way()


@pytest.mark.parametrize("begins", [True, False])
async def test_a_close_of_a_namespace_that_is_cut_off_ends_its_thread_and_its_links(begins: bool) -> None:
    hanging, may_begin = asyncio.Event(), threading.Event()

    async def hang() -> None:
        hanging.set()
        await asyncio.Event().wait()

    backend = servicebus.open(Url.parse(shared(ServiceBus).url))
    await backend.broker.declare(QUEUE, {})
    namespace = backend.broker._namespace
    link = await namespace._thread.run(lambda: namespace.requests(Path(QUEUE)))
    transport, thread = link._wire._connection._transport.writer.transport, namespace._thread._thread
    namespace._at_close.insert(0, hang)
    if not begins:
        namespace._thread.post(may_begin.wait)  # the thread is busy when it is asked to close
    closing = asyncio.ensure_future(backend.close())
    if begins:
        await until(hanging.is_set)
    else:
        await asyncio.sleep(0)
    closing.cancel()
    await until(lambda: not namespace._thread.runs)  # it was told to end
    may_begin.set()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert transport.is_closing()
    assert thread is not None
    assert not thread.is_alive()


async def test_a_close_of_a_client_of_rabbitmq_that_is_cut_off_leaves_no_connection() -> None:
    hanging = Hanging()
    backend = rabbitmq.open(Url.parse(shared(RabbitMQ).url))
    connection = await backend._client.connection("receiving")
    assert connection._wire is not None
    assert connection._wire._wire is not None
    with hanging.planted(type(backend._client), "_wait_for_last"):
        closing = asyncio.ensure_future(backend.close())
        await hanging.cut_off(closing)
        assert await is_closed(closing, connection._wire._wire)
