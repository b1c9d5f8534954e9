"""The users that docs/rabbitmq.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator

import pytest

pytest.importorskip("aiormq")

import tenure
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import RabbitMQ, private
from tests.servers.rabbitmq import ROOT, US
from tests.stores.rights import Act, acting, refused


def order(server: RabbitMQ, line: str) -> None:
    """Carry out a line for rabbitmqctl, which is a program of Erlang and takes its time."""
    program, act, user, *more = shlex.split(line)
    assert program == "rabbitmqctl"
    texts = ", ".join(f'<<"{one}">>' for one in more)
    if act == "add_user":
        server.order(f'rabbit_auth_backend_internal:add_user(<<"{user}">>, {texts}, {US})')
    else:
        assert act == "set_permissions"
        server.order(f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, {ROOT}, {texts}, {US})')


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    """Yield a server with the users of the page, and two queues."""

    async def prepare(own: RabbitMQ) -> None:
        async with acting(own.url) as owner:
            await owner.queue("orders").send(b"first")
            await owner.queue("others").send_batch([tenure.Outgoing(b"x"), tenure.Outgoing(b"y")])
            [message] = await owner.queue("others").receive()
            await message.dead_letter("bad")

    with private(RabbitMQ) as own:
        asyncio.run(prepare(own))
        for line in commands("docs/rabbitmq.md", "Rights", "rabbitmqctl").splitlines():
            order(own, line)
        yield own


def url_of(server: RabbitMQ, user: str) -> str:
    return server.url.replace("guest:guest@", f"{user}:PASSWORD@")


async def test_a_producer_sends(server: RabbitMQ) -> None:
    async with acting(url_of(server, "producer")) as backend:
        queue = backend.queue("orders")
        await queue.send(b"later", id="later", delay=3600, expires_in=7200)
        before = (await queue.stats()).ready
        await queue.send_batch([tenure.Outgoing(b"one"), tenure.Outgoing(b"two")])
        assert (await queue.stats()).ready == before + 2
        assert (await queue.settings()).lock


@pytest.mark.parametrize("user", ["producer", "consumer"])
async def test_both_can_send_to_every_queue(server: RabbitMQ, user: str) -> None:
    """As the page says: RabbitMQ permits exchanges, and not the queues behind them."""
    async with acting(server.url) as owner, acting(url_of(server, user)) as backend:
        before = (await owner.queue("others").stats()).ready
        await backend.queue("others").send(b"x")
        assert (await owner.queue("others").stats()).ready == before + 1


async def test_a_consumer_receives_and_settles_in_every_way(server: RabbitMQ) -> None:
    async with acting(server.url) as owner:
        await owner.queue("orders").send_batch([tenure.Outgoing(b"%d" % number) for number in range(5)])
    async with acting(url_of(server, "consumer")) as backend:
        queue = backend.queue("orders")
        [one, two, three, four, *_] = await queue.receive(max=5)
        await one.renew()
        await one.complete()
        await two.abandon()
        await three.abandon(delay=0.05)
        await four.dead_letter("bad")

        await until(lambda: has_dead(queue))
        assert await queue.dead_letters.redrive() == 1
        assert await queue.peek()


async def has_dead(queue: tenure.Queue) -> bool:
    return bool(await queue.dead_letters.peek())


REFUSED: dict[str, tuple[str, Act]] = {
    "a producer receives": ("producer", lambda backend: backend.queue("orders").receive()),
    "a producer peeks": ("producer", lambda backend: backend.queue("orders").peek()),
    "a producer reads dead letters": ("producer", lambda backend: backend.queue("others").dead_letters.peek()),
    "a producer purges": ("producer", lambda backend: backend.queue("orders").purge()),
    "a producer declares": ("producer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a producer makes a queue": ("producer", lambda backend: backend.queue("fresh").send(b"x")),
    "a consumer receives elsewhere": ("consumer", lambda backend: backend.queue("others").receive()),
    "a consumer peeks elsewhere": ("consumer", lambda backend: backend.queue("others").peek()),
    "a consumer declares": ("consumer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer makes a queue": ("consumer", lambda backend: backend.queue("fresh").send(b"x")),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_with_the_name_of_the_queue(server: RabbitMQ, what: str) -> None:
    user, act = REFUSED[what]
    async with acting(url_of(server, user)) as backend:
        await refused(backend, act, f"refused for user '{user}'", "access to queue '", "rabbitmqctl set_permissions")
