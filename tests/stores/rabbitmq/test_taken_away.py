"""RabbitMQ: what an administrator takes away while it is used, and gives back: rights, room, the virtual host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiormq")

import tenure
from tenure.errors import ConfigError, Unavailable
from tests.durations import until
from tests.servers import RabbitMQ, patient, private
from tests.servers.rabbitmq import ALL, ROOT, US

NONE, OWN = '<<"^$">>', '<<"own">>'
KINDS = ("configure", "write", "read")


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    """A server with a user whose rights a test may change, a queue that is declared, and what delays need."""

    async def prepare() -> None:
        async with tenure.connect(patient(own.url)) as backend:
            await backend.migrate()
            await backend.queue("orders").declare(max_deliveries=5)

    with private(RabbitMQ) as own:
        own.order(f'rabbit_auth_backend_internal:add_user(<<"ann">>, <<"PASSWORD">>, {US})')
        permit(own)
        asyncio.run(prepare())
        yield own


def permit(server: RabbitMQ, *, vhost: str = ROOT, without: str = "") -> None:
    rights = ", ".join(NONE if one == without else ALL for one in KINDS)
    server.order(f'rabbit_auth_backend_internal:set_permissions(<<"ann">>, {vhost}, {rights}, {US})')


@asynccontextmanager
async def connected(server: RabbitMQ, path: str = "") -> AsyncIterator[tenure.Backend]:
    async with tenure.connect(f"amqp://ann:PASSWORD@127.0.0.1:{server.port}/{path}?timeout=5") as backend:
        yield backend


async def sent(queue: tenure.Queue, body: bytes, **options: Any) -> None:
    """Send a message, as often as it takes while the server is being repaired."""

    async def is_sent() -> bool:
        try:
            await queue.send(body, **options)
        except Unavailable:
            return False
        return True

    await until(is_sent)


async def test_a_user_that_configures_nothing_works_on_a_declared_queue(server: RabbitMQ) -> None:
    permit(server, without="configure")
    try:
        async with connected(server) as backend:
            queue = backend.queue("orders")
            assert (await queue.settings()).max_deliveries == 5
            await queue.send(b"later", delay=0.05)
            await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(4)])
            acts = {
                b"1": lambda message: message.abandon(),
                b"2": lambda message: message.abandon(delay=0.05),
                b"3": lambda message: message.dead_letter("why"),
            }
            completed: set[bytes] = set()
            while acts or completed < {b"0", b"1", b"2", b"later"}:
                for message in await queue.receive(1, wait=20):
                    if (act := acts.pop(message.body, None)) is not None:
                        await act(message)
                    else:
                        await message.complete()
                        completed.add(message.body)

            async def is_dead() -> bool:
                return [one.body for one in await queue.dead_letters.peek()] == [b"3"]

            await until(is_dead)
            assert await queue.dead_letters.redrive() == 1
            [message] = await queue.receive(1, wait=20)
            assert message.body == b"3"
            await message.complete()
            with pytest.raises((ConfigError, Unavailable), match=r"access to queue 'another.*refused for user 'ann'"):
                await backend.queue("another").send(b"x")
    finally:
        permit(server)


async def test_records_are_changed_by_some_with_the_lock_and_others_without(server: RabbitMQ) -> None:
    permit(server, without="configure")
    try:
        async with (
            tenure.connect(patient(server.url)) as owner,
            connected(server) as one,
            connected(server) as another,
        ):
            await asyncio.gather(one.queue("orders").send(b"x"), another.queue("orders").send(b"x"))

            async def declare(number: int) -> None:
                await owner.queue(f"declared-{number}").declare(max_deliveries=number + 1)

            async def delay(backend: tenure.Backend) -> None:
                await backend.queue("orders").send(b"x", delay=0.05)

            acts = [act for number in range(10) for act in (declare(number), delay(one), delay(another))]
            await asyncio.gather(*acts)
            for backend in (owner, one):
                found = [(await backend.queue(f"declared-{number}").settings()).max_deliveries for number in range(10)]
                assert found == list(range(1, 11))
            await owner.queue("orders").purge()
    finally:
        permit(server)


@pytest.mark.parametrize("kind", KINDS)
async def test_rights_that_are_taken_away_and_given_back(server: RabbitMQ, kind: str) -> None:
    got: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        got.append(message.body)

    async with connected(server) as backend:
        queue = backend.queue("orders")
        consuming = asyncio.create_task(queue.consume(handle))
        await queue.send(b"before")
        await until(lambda: b"before" in got)
        permit(server, without=kind)
        try:
            server.close_connections("maintenance")  # a connection remembers its own
            if kind == "write":
                await until(lambda: is_told_of_rights(queue))
            else:
                await sent(queue, b"meanwhile")
            assert not consuming.done()
        finally:
            permit(server)
            server.close_connections("maintenance")
        await sent(queue, b"after")
        await sent(queue, b"later", delay=0.05)
        wanted = {b"before", b"after", b"later"} | (set() if kind == "write" else {b"meanwhile"})
        await until(lambda: wanted <= set(got))
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)


async def is_told_of_rights(queue: tenure.Queue) -> bool:
    """Return whether a send is refused for the rights, not for the connection that was closed."""
    with pytest.raises(Unavailable) as failed:
        await queue.send(b"refused")
    said = str(failed.value)
    return all(one in said for one in ("does not permit this user", "'ann'", "rabbitmqctl set_permissions"))


async def test_a_queue_that_is_full_says_so_and_loses_nothing(server: RabbitMQ) -> None:
    async with tenure.connect(patient(server.url)) as backend:
        queue = backend.queue("short", lock=5)
        await queue.declare()
        server.set_policy("short", "^short", '{"max-length": 2, "overflow": "reject-publish"}')
        kept: set[bytes] = set()
        said: list[str] = []
        try:

            async def is_full() -> bool:
                body = b"%d" % len(kept)
                try:
                    await queue.send(body)
                except Unavailable as error:
                    said.append(str(error))
                    return True
                kept.add(body)
                return False

            await until(is_full)
            messages = await queue.receive(10, wait=10)
            for message in messages:  # the dead letters have a limit, too
                try:
                    await message.dead_letter("why")
                except Unavailable as error:
                    said.append(str(error))
        finally:
            server.clear_policy("short")
        assert "the queue 'short' takes no more messages: it is full" in said[0]
        assert "raise what limits its length" in said[0]
        assert all("the queue 'short:dead' takes no more messages" in one for one in said[1:])
        await sent(queue, b"after")
        found: set[bytes] = set()

        async def have_come() -> bool:
            for message in await queue.receive(10):
                found.add(message.body)
                await message.complete()
            dead = {one.body for one in await queue.dead_letters.peek()}
            return found | dead == kept | {b"after"}

        await until(have_come)


async def test_a_virtual_host_that_is_deleted_and_made_anew(server: RabbitMQ) -> None:
    got: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        got.append(message.body)

    def make() -> None:
        server.order(f"rabbit_vhost:add({OWN}, {US})")
        permit(server, vhost=OWN)

    make()
    async with connected(server, "own") as backend:
        queue = backend.queue("orders")
        consuming = asyncio.create_task(queue.consume(handle))
        await queue.send(b"before")
        await until(lambda: b"before" in got)
        server.order(f"rabbit_vhost:delete({OWN}, {US})")

        async def is_told() -> bool:
            try:
                await queue.stats()
            except Unavailable as error:
                return "refuses the virtual host 'own'" in str(error) and "rabbitmqctl add_vhost" in str(error)
            return False

        await until(is_told)
        assert not consuming.done()
        make()
        await sent(queue, b"after")
        await sent(queue, b"later", delay=0.05)
        await until(lambda: {b"after", b"later"} <= set(got))
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    server.order(f"rabbit_vhost:delete({OWN}, {US})")
