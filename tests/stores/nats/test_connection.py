"""Which request a refusal of NATS belongs to: the server names the subject only, and its refusal may come late."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.client import Client as Driver
from nats.errors import Error

import tenure
from tenure import Unavailable
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NotPermitted
from tenure._backends.nats.transport import Transport
from tenure._logins import Login


class Silent:
    """A driver that sends nothing."""

    is_closed = False

    def __init__(self) -> None:
        self.replies: list[str] = []

    def new_inbox(self) -> str:
        return "_INBOX.a"

    async def publish(self, subject: str, body: bytes, reply: str, headers: object) -> None:
        self.replies.append(reply)


class Setup:
    def __init__(self) -> None:
        self.driver = Silent()
        self.connection = Connection(
            cast(Driver, self.driver), Transport(wants_tls=False), "127.0.0.1:4222", Login(None, None)
        )

    async def ask(self, subject: str) -> asyncio.Future[Any]:
        return await self.connection.begin(subject)

    async def refuse(self, subject: str) -> None:
        await self.connection._on_error(Error(f"nats: 'Permissions Violation for Publish to \"{subject}\"'"))

    async def answer(self, number: int) -> None:
        """Answer the request that was sent as number *number*, counted from 0."""
        reply = self.driver.replies[number]
        await self.connection._on_answer(cast(Any, SimpleNamespace(subject=reply, data=b"yes", headers=None)))


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def test_a_refusal_ends_the_oldest_request_to_its_subject(setup: Setup) -> None:
    other, first, second = await setup.ask("B"), await setup.ask("A"), await setup.ask("A")
    await setup.refuse("A")
    with pytest.raises(NotPermitted):
        await first
    assert not second.done()
    assert not other.done()
    await setup.refuse("A")
    with pytest.raises(NotPermitted):
        await second
    await setup.answer(0)
    assert (await other).data == b"yes"


async def test_a_late_refusal_of_a_request_that_was_given_up_ends_no_later_one(setup: Setup) -> None:
    first, second = await setup.ask("A"), await setup.ask("A")
    await setup.refuse("A")
    with pytest.raises(NotPermitted):
        await first
    second.cancel()
    third = await setup.ask("A")  # permitted since
    await setup.refuse("A")
    assert not third.done()
    await setup.answer(2)
    assert (await third).data == b"yes"


async def test_a_request_that_was_given_up_awaits_no_refusal_after_a_later_answer(setup: Setup) -> None:
    given_up, second = await setup.ask("A"), await setup.ask("A")
    given_up.cancel()
    await setup.answer(1)
    await second
    third = await setup.ask("A")
    await setup.refuse("A")
    with pytest.raises(NotPermitted):
        await third
    assert not setup.connection._asked


async def test_a_late_answer_to_a_request_that_was_given_up_is_dropped(setup: Setup) -> None:
    (await setup.ask("A")).cancel()
    await setup.answer(0)
    await setup.answer(0)
    assert not setup.connection._asked


async def test_a_server_that_another_announces_is_not_asked() -> None:
    """What answers at the address of a URL sends nobody, with the login, to a server of its choice."""
    connections: list[bytes] = []
    announced: list[asyncio.StreamWriter] = []

    async def announce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        about = {"server_id": "x", "version": "2.10.1", "headers": True, "max_payload": 1_000_000}
        about["connect_urls"] = [f"127.0.0.1:{other.sockets[0].getsockname()[1]}"]
        writer.write(f"INFO {json.dumps(about)}\r\n".encode())
        said = b""
        while b"PUB" not in said and (more := await reader.read(2**16)):  # then it closes the connection
            said += more
            if b"PING" in more:
                writer.write(b"PONG\r\n")
        connections.append(said)
        writer.close()

    async with (
        await asyncio.start_server(lambda _, writer: announced.append(writer), "127.0.0.1", 0) as other,
        await asyncio.start_server(announce, "127.0.0.1", 0) as first,
        tenure.connect(f"nats://ann:hush@127.0.0.1:{first.sockets[0].getsockname()[1]}/?timeout=5") as backend,
    ):
        while len(connections) < 3:
            with pytest.raises(tenure.TenureError):
                await backend.leaders()
    assert b"hush" in connections[0]
    assert announced == []


async def test_a_server_that_accepts_and_says_nothing_was_asked_nothing(silent: str) -> None:
    async with tenure.connect(f"nats://{silent}/?timeout=0.2") as backend:
        with pytest.raises(Unavailable, match=r"can't be reached: no answer within 0\.2 s; check"):
            await backend.queue("orders").send(b"x")
