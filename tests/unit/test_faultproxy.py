"""The fault proxy, in front of a plain echo server."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from tenure.testing.faultproxy import Direction, FaultProxy, hold, late
from tests.durations import until

T = TypeVar("T")

SOON = 30.0
SILENCE = 0.05  # seconds without data that count as silence


class Echo:
    """A server that echoes and records its input."""

    def __init__(self) -> None:
        self.received = b""
        self.ended = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                self.received += data
                writer.write(data)
                await writer.drain()
        self.ended += 1
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


class Client:
    """A connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, text: bytes) -> bytes:
        self.writer.write(text)
        return await soon(self.reader.readexactly(len(text)))

    async def is_silent(self) -> bool:
        try:
            await asyncio.wait_for(asyncio.shield(self._peek()), SILENCE)
        except TimeoutError:
            return True
        return False

    async def _peek(self) -> None:
        while not self.reader._buffer and not self.reader.at_eof():  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)


async def soon(question: Awaitable[T]) -> T:
    return await asyncio.wait_for(question, SOON)


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()
    await server.wait_closed()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


class Clients:
    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._made: list[Client] = []

    async def new(self) -> Client:
        client = Client(*await asyncio.open_connection(self._proxy.host, self._proxy.port))
        self._made.append(client)
        return client

    async def close(self) -> None:
        for client in self._made:
            client.writer.close()
            with suppress(OSError):
                await client.writer.wait_closed()


@pytest.fixture
async def clients(proxy: FaultProxy) -> AsyncIterator[Clients]:
    clients = Clients(proxy)
    yield clients
    await clients.close()


async def test_it_passes_data_both_ways(clients: Clients) -> None:
    client = await clients.new()
    assert await client.ask(b"hello") == b"hello"
    much = bytes(range(256)) * 4_096
    assert await client.ask(much) == much


async def test_the_end_of_a_connection_is_passed_on(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    await client.ask(b"x")
    client.writer.write_eof()
    assert await soon(client.reader.read()) == b""
    await until(lambda: echo.ended == 1 and proxy.open == 0)


async def test_data_of_a_closed_connection_is_delivered_late(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client, other = await clients.new(), await clients.new()
    await client.ask(b".")
    await other.ask(b".")
    async with late(proxy) as give_up:
        await give_up(client.ask(b"old"))
        client.writer.close()
        assert await other.ask(b"new") == b"new"
        assert await (await clients.new()).ask(b"newer") == b"newer"
        assert echo.ended == 0
    assert echo.received == b"..newnewerold"
    await until(lambda: echo.ended == 1)  # only now seen as closed
    assert await other.ask(b"x") == b"x"


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_request_or_its_answer_is_held_back(
    echo: Echo, proxy: FaultProxy, clients: Clients, direction: Direction
) -> None:
    client = await clients.new()
    async with hold(proxy, direction=direction) as begin:
        asking = await begin(client.ask(b"x"))
        assert await client.is_silent()
        assert echo.received == (b"" if direction == "up" else b"x")  # an answer proves that it was carried out
    assert await asking == b"x"
    assert await client.ask(b"y") == b"y"


async def test_the_answer_to_one_of_several_requests_is_held_back(
    echo: Echo, proxy: FaultProxy, clients: Clients
) -> None:
    client, other = await clients.new(), await clients.new()

    async def ask_all() -> list[bytes]:
        return [await client.ask(text) for text in (b"1", b"2", b"3")]

    async with hold(proxy, decides=b"2".__eq__) as begin:
        asking = await begin(ask_all())
        assert echo.received == b"12"
        waiting = asyncio.ensure_future(other.ask(b"x"))
        assert await client.is_silent()
    assert await asking == [b"1", b"2", b"3"]
    assert await waiting == b"x"


async def test_what_both_sides_send_by_themselves_is_not_waited_for(
    echo: Echo, proxy: FaultProxy, clients: Clients
) -> None:
    client = await clients.new()

    async def ask() -> bytes:
        return await client.ask(b"ping") + await client.ask(b"x")

    async with hold(proxy, is_noise=b"ping".__eq__) as begin:
        asking = await begin(ask())
        assert echo.received == b"pingx"
    assert await asking == b"pingx"


async def test_an_answer_that_is_not_held_back_is_an_error(proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    with pytest.raises(RuntimeError, match="nothing held back: b'x'"):
        async with hold(proxy, decides=b"y".__eq__) as begin:
            await begin(client.ask(b"x"))
    assert await client.ask(b"y") == b"y"


async def test_only_sent_data_can_be_late(proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    with pytest.raises(RuntimeError, match="without being sent"):
        async with late(proxy) as give_up:
            await give_up(asyncio.sleep(0))
    assert await client.ask(b"x") == b"x"


async def test_delay_counts_for_each_way(proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    await client.ask(b"x")
    proxy.delay(0.05)
    begun = time.monotonic()
    await client.ask(b"x")
    assert time.monotonic() - begun >= 0.1
    proxy.delay(0.05, "up")
    proxy.delay(0.0, "down")
    begun = time.monotonic()
    await client.ask(b"x")
    assert time.monotonic() - begun >= 0.05


async def test_a_delay_does_not_limit_throughput(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    proxy.delay(0.25, "up")
    begun = time.monotonic()
    for _ in range(60):
        client.writer.write(b"x")
        await asyncio.sleep(0.001)  # so that each is sent separately
    await soon(client.reader.readexactly(60))
    assert time.monotonic() - begun < 10.0  # one at a time it would be 15 s


async def test_a_stall_up_delays_requests(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    await client.ask(b"1")
    proxy.stall("up")
    client.writer.write(b"2")
    assert await client.is_silent()
    assert echo.received == b"1"
    proxy.heal()
    assert await soon(client.reader.readexactly(1)) == b"2"


async def test_a_stall_down_passes_requests_on(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    proxy.stall("down")
    client.writer.write(b"2")
    await until(lambda: echo.received == b"2")
    assert await client.is_silent()
    proxy.heal()
    assert await soon(client.reader.readexactly(1)) == b"2"


async def test_a_black_hole_accepts_connections_and_does_not_answer(
    echo: Echo, proxy: FaultProxy, clients: Clients
) -> None:
    proxy.stall()
    client = await clients.new()
    client.writer.write(b"x")
    assert await client.is_silent()
    assert echo.received == b""


async def test_data_sent_before_closing_arrives_after_the_stall(
    echo: Echo, proxy: FaultProxy, clients: Clients
) -> None:
    client = await clients.new()
    await client.ask(b"1")
    proxy.stall("up")
    client.writer.write(b"late")
    client.writer.close()
    await asyncio.sleep(SILENCE)
    assert (echo.received, echo.ended) == (b"1", 0)
    proxy.heal()
    await until(lambda: echo.received == b"1late" and echo.ended == 1)


@pytest.mark.parametrize("after", [0, 3])
async def test_an_answer_is_lost_after_the_request_has_arrived(
    echo: Echo, proxy: FaultProxy, clients: Clients, after: int
) -> None:
    client, other = await clients.new(), await clients.new()
    await client.ask(b"before")
    await other.ask(b"!")
    proxy.lose_answers(after=after)
    client.writer.write(b"question")
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await soon(client.reader.readexactly(8))
    assert echo.received == b"before!question"
    if after:
        assert await other.ask(b"??") == b"??"  # each connection has its own count
    proxy.heal()
    assert await other.ask(b"still here") == b"still here"


async def test_an_answer_can_be_lost_without_a_reset(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    client = await clients.new()
    proxy.lose_answers(after=2, by="stall")
    client.writer.write(b"question")
    assert await soon(client.reader.readexactly(2)) == b"qu"
    assert await client.is_silent()
    assert echo.received == b"question"
    proxy.heal()
    assert await soon(client.reader.readexactly(6)) == b"estion"


async def test_answers_are_lost_on_new_connections_too(proxy: FaultProxy, clients: Clients) -> None:
    proxy.lose_answers()
    client = await clients.new()
    client.writer.write(b"x")
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await soon(client.reader.readexactly(1))


async def test_only_existing_connections_are_stranded(proxy: FaultProxy, clients: Clients) -> None:
    old = await clients.new()
    await old.ask(b"x")
    proxy.stall_existing()
    old.writer.write(b"lost")
    assert await old.is_silent()
    assert await (await clients.new()).ask(b"y") == b"y"


async def test_new_connections_can_be_redirected(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    old, other = await clients.new(), Echo()
    await old.ask(b"a")
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    proxy.redirect(*server.sockets[0].getsockname()[:2])
    new = await clients.new()
    await new.ask(b"b")
    await old.ask(b"c")
    assert (echo.received, other.received) == (b"ac", b"b")
    await clients.close()
    server.close()
    await server.wait_closed()


async def test_reset_breaks_every_connection(echo: Echo, proxy: FaultProxy, clients: Clients) -> None:
    some = [await clients.new() for _ in range(3)]
    for client in some:
        await client.ask(b"x")
    proxy.reset()
    for client in some:
        with pytest.raises(ConnectionResetError):
            await soon(client.reader.readexactly(1))
    await until(lambda: echo.ended == 3 and proxy.open == 0)
    assert await (await clients.new()).ask(b"anew") == b"anew"


async def test_only_new_connections_are_refused(proxy: FaultProxy, clients: Clients) -> None:
    old = await clients.new()
    await old.ask(b"x")
    proxy.refuse()
    new = await clients.new()
    with pytest.raises(ConnectionResetError):
        await soon(new.reader.readexactly(1))
    assert await old.ask(b"x") == b"x"
    proxy.heal()
    assert await (await clients.new()).ask(b"x") == b"x"
    assert proxy.accepted == 2


async def test_without_a_server_a_connection_is_reset() -> None:
    with socket.socket() as unused:  # it reserves the port, and doesn't listen
        unused.bind(("127.0.0.1", 0))
        async with FaultProxy("127.0.0.1", unused.getsockname()[1]) as proxy:
            clients = Clients(proxy)
            client = await clients.new()
            with pytest.raises(ConnectionResetError):
                await soon(client.reader.readexactly(1))
            await clients.close()


async def test_a_reset_also_ends_a_connection_that_is_being_made(
    echo: Echo, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, may_go_on = asyncio.open_connection, asyncio.Event()

    async def slowly(*server: Any, **client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if server:
            await may_go_on.wait()
        return await connect(*server, **client)

    reader, writer = await connect(proxy.host, proxy.port)
    monkeypatch.setattr(asyncio, "open_connection", slowly)
    await until(lambda: proxy.accepted == 1)
    proxy.reset()
    may_go_on.set()
    with pytest.raises(ConnectionResetError):
        await soon(reader.read())
    writer.close()
    assert proxy.open == 0


@pytest.mark.parametrize("iterations", range(8))
async def test_connections_that_are_made_while_it_ends_are_reset(echo: Echo, iterations: int) -> None:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        made = [socket.create_connection((proxy.host, proxy.port)) for _ in range(20)]
        for _ in range(iterations):
            await asyncio.sleep(0)
    gc.collect()  # a connection that was left open warns
    for client in made:
        with client, pytest.raises(ConnectionResetError):
            client.recv(1)
