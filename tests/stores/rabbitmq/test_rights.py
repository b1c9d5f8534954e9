"""The users that docs/rabbitmq.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator

import pytest

pytest.importorskip("aiormq")

import aiormq
from aiormq.abc import AbstractChannel

import tenure
from tenure._backends.rabbitmq.delays import LEVELS, STEP
from tenure._backends.rabbitmq.names import DUE, GONE, RECORDS, delay_name
from tests.docs.pages import commands, section
from tests.durations import PATIENCE, stretched, until
from tests.servers import RabbitMQ, private
from tests.servers.rabbitmq import ROOT, US
from tests.stores.rights import AT_ONCE, LATER, Act, acting, refused


def order(server: RabbitMQ, line: str) -> None:
    """Carry out a line for rabbitmqctl, which is a program of Erlang and takes its time."""
    program, act, user, *more = shlex.split(line)
    assert program == "rabbitmqctl"
    texts = ", ".join(f'<<"{one}">>' for one in more)
    if act == "add_user":
        server.order(f'rabbit_auth_backend_internal:add_user(<<"{user}">>, {texts}, {US})')
    else:
        assert act in ("set_permissions", "set_topic_permissions")
        server.order(f'rabbit_auth_backend_internal:{act}(<<"{user}">>, {ROOT}, {texts}, {US})')


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
        asyncio.run(check_that_delays_are_missing(own))
        asyncio.run(migrate(own))
        yield own


async def check_that_delays_are_missing(server: RabbitMQ) -> None:
    """Check what a producer is told whose delays nobody has made."""
    async with acting(url_of(server, "producer")) as backend:
        await refused(
            backend,
            lambda backend: backend.queue("orders").send(b"later", delay=3600),
            "refused for user 'producer'",
            "access to exchange 'tenure:",
            "tenure migrate",
            error=LATER,  # the settings were read before
        )


async def migrate(server: RabbitMQ) -> None:
    """Make what delayed messages go through, twice."""
    async with acting(server.url) as owner:
        assert "tenure:delay:" in await owner.migrate()
        assert await owner.migrate()


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
    "a producer deletes": ("producer", lambda backend: backend.queue("orders").delete(force=True)),
    "a producer makes a queue": ("producer", lambda backend: backend.queue("fresh").send(b"x")),
    "a consumer receives elsewhere": ("consumer", lambda backend: backend.queue("others").receive()),
    "a consumer deletes": ("consumer", lambda backend: backend.queue("orders").delete(force=True)),
    "a consumer reads dead letters elsewhere": (
        "consumer",
        lambda backend: backend.queue("others").dead_letters.peek(),
    ),
    "a consumer purges elsewhere": ("consumer", lambda backend: backend.queue("others").purge()),
    "a consumer peeks elsewhere": ("consumer", lambda backend: backend.queue("others").peek()),
    "a consumer declares": ("consumer", lambda backend: backend.queue("orders").declare(lock=99)),
    "a consumer makes a queue": ("consumer", lambda backend: backend.queue("fresh").send(b"x")),
}


READS_FIRST = {
    *("a producer receives", "a producer makes a queue"),
    *("a consumer receives elsewhere", "a consumer makes a queue"),
}
"""What reads the settings of the queue before it is refused."""


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_with_the_name_of_the_queue(server: RabbitMQ, what: str) -> None:
    user, act = REFUSED[what]
    error = LATER if what in READS_FIRST else AT_ONCE
    async with acting(url_of(server, user)) as backend:
        await refused(
            backend, act, f"refused for user '{user}'", "access to queue '", "rabbitmqctl set_permissions", error=error
        )


# --- delayed messages ---


async def test_delayed_messages_come(server: RabbitMQ) -> None:
    async with (
        acting(server.url) as owner,
        acting(url_of(server, "producer")) as producer,
        acting(url_of(server, "consumer")) as consumer,
    ):
        await owner.queue("orders").purge()
        await producer.queue("orders").send(b"delayed", delay=0.05)
        [message] = await consumer.queue("orders").receive(wait=PATIENCE)
        assert message.body == b"delayed"
        await message.abandon(delay=0.1)
        [again] = await consumer.queue("orders").receive(wait=PATIENCE)
        assert (again.body, again.delivery_count) == (b"delayed", 2)
        await again.complete()


async def test_a_delay_may_have_any_length(server: RabbitMQ) -> None:
    async with acting(url_of(server, "producer")) as producer:
        for level in (0, 1, LEVELS - 1):
            await producer.queue("orders").send(b"later", delay=STEP * 2**level)


async def test_a_queue_of_delays_that_is_away_is_no_missing_right(server: RabbitMQ) -> None:
    """Nor a missing queue of messages: it may come back, as one does whose server was away."""
    connection = await aiormq.connect(server.url)
    try:
        await (await connection.channel()).queue_delete(delay_name(3))
        async with acting(url_of(server, "producer")) as producer:
            with pytest.raises(tenure.Unavailable, match="tenure migrate"):
                await producer.queue("orders").send(b"later", delay=3_600)
            await migrate(server)
            await producer.queue("orders").send(b"later", delay=3_600)
    finally:
        await connection.close()
        await migrate(server)


async def test_part_of_the_rights_to_make_delays_is_refused_for_good(server: RabbitMQ) -> None:
    """Though the first requests worked."""
    order(server, "rabbitmqctl add_user part PASSWORD")
    order(server, "rabbitmqctl set_permissions part '^tenure:(delay:0.|due|gone|records.*)$' '.*' '.*'")
    async with acting(url_of(server, "part")) as backend:
        for _ in range(2):
            with pytest.raises(tenure.ConfigError, match=r"'tenure:delay:10'.*'part'.*configure.*set_permissions$"):
                await backend.migrate()


@pytest.mark.parametrize("user", ["producer", "consumer"])
async def test_both_can_end_what_is_delayed_for_their_own_queue(server: RabbitMQ, user: str) -> None:
    """As the page says: RabbitMQ asks for the same rights to bind and to unbind."""
    connection, owner = await aiormq.connect(url_of(server, user)), await aiormq.connect(server.url)
    try:
        async with acting(url_of(server, "consumer")) as backend:
            await backend.queue("orders").send(b"later", id="ended", delay=stretched(0.2))
            await (await connection.channel()).queue_unbind("orders", DUE, f"{KEY}.orders")
            channel = await owner.channel()

            async def has_ended() -> bool:
                return (await channel.basic_get(GONE, no_ack=True)).header.properties.message_id == "ended"

            await until(has_ended)

            await backend.queue("orders").send(b"later", delay=0.05)
    finally:
        await connection.close()
        await owner.close()


async def test_a_producer_without_delays_needs_no_right_to_bind(server: RabbitMQ) -> None:
    """The page says which rights are left."""
    for line in section("docs/rabbitmq.md", "Rights").splitlines():
        if line.startswith("  rabbitmqctl "):
            order(server, line)
    async with acting(url_of(server, "prompt")) as backend:
        assert await backend.queue("orders").send(b"x")
        await refused(backend, lambda backend: backend.queue("orders").send(b"x", delay=3600), "'prompt'", error=LATER)
    connection = await aiormq.connect(url_of(server, "prompt"))
    try:
        channel = await connection.channel()
        with pytest.raises(aiormq.ChannelAccessRefused):
            await channel.queue_unbind("orders", DUE, f"{KEY}.orders")
    finally:
        await connection.close()


async def test_a_producer_can_stop_all_queues_by_unreadable_records(server: RabbitMQ) -> None:
    """As the page says of what all users of a virtual host share."""
    garbage = b"garbage"
    theirs, owner = await aiormq.connect(url_of(server, "producer")), await aiormq.connect(server.url)
    handled: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    async with acting(server.url) as running:
        queue = running.queue("stopped")
        await queue.send(b"before")
        consuming = asyncio.ensure_future(queue.consume(handle))
        await until(lambda: handled)
        try:
            channel, own = await theirs.channel(), await owner.channel()
            newest = aiormq.spec.Basic.Properties(message_id=RECORDS)
            await channel.basic_publish(garbage, routing_key=RECORDS, properties=newest)
            acts: list[Act] = [
                lambda backend: backend.queue("others").send(b"x"),
                lambda backend: backend.queue("others").receive(),
                lambda backend: backend.queue("others").declare(lock=31),
                lambda backend: backend.queues(),
            ]
            for act in acts:
                async with acting(server.url) as fresh:
                    await refused(fresh, act, f"'{RECORDS}' is not as tenure writes it")
            await own.basic_publish(b"raw", routing_key="stopped")
            await until(lambda: b"raw" in handled)
            assert not consuming.done()
        finally:
            one = await own.basic_get(RECORDS)
            while one.body != garbage:
                one = await own.basic_get(RECORDS)
            assert one.delivery_tag is not None
            await own.basic_ack(one.delivery_tag)
            await theirs.close()
            await owner.close()
            consuming.cancel()
            await asyncio.wait([consuming])
        await queue.delete(force=True)


NAMES = [
    *("orders", "orders:dead", "others", "others:dead", "tenure:records", "tenure:records:lock"),
    *("amq.default", "amq.direct", "amq.topic", "amq.rabbitmq.trace", "tenure:delay:0", "tenure:delay:23"),
    *("tenure:delays", "tenure:due", "tenure:gone", "ordersx", "xorders", "tenure:records:locks"),
]
"""All that tenure makes, for the queue ``orders`` and another, and what is there from the beginning."""

SENDING = {"amq.default", "orders", "tenure:delay:0", "tenure:delay:23"}
PERMITTED: dict[str, list[set[str]]] = {
    "producer": [{"tenure:records:lock"}, SENDING, {"tenure:records", "tenure:due"}],
    "consumer": [{"tenure:records:lock"}, SENDING, {"tenure:records", "tenure:due", "orders", "orders:dead"}],
    "prompt": [{"tenure:records:lock"}, {"amq.default"}, {"tenure:records"}],
}
"""By user: which of them it may configure, write and read."""


def test_no_user_of_the_page_has_more_rights_than_it_needs() -> None:
    lines = re.findall(r"rabbitmqctl set_permissions .*", section("docs/rabbitmq.md", "Rights"))
    found = {
        user: [{name for name in NAMES if re.search(pattern, name)} for pattern in patterns]
        for _, _, user, *patterns in map(shlex.split, lines)
    }
    assert found == PERMITTED


OTHERS = delay_name(LEVELS - 1)
KEY = ".".join(["*"] * LEVELS)

FORBIDDEN: dict[str, Callable[[AbstractChannel], Awaitable[object]]] = {
    "reads delayed messages": lambda channel: channel.basic_get(OTHERS),
    "receives delayed messages": lambda channel: channel.basic_consume(OTHERS, ignore),
    "purges delayed messages": lambda channel: channel.queue_purge(OTHERS),
    "deletes delayed messages": lambda channel: channel.queue_delete(OTHERS),
    "reads messages of deleted queues": lambda channel: channel.basic_get(GONE),
    "deletes messages of deleted queues": lambda channel: channel.queue_delete(GONE),
    "deletes an exchange of delays": lambda channel: channel.exchange_delete(OTHERS),
    "deletes the last exchange": lambda channel: channel.exchange_delete(DUE),
    "copies what others send with a delay": lambda channel: channel.queue_bind("orders", OTHERS, "#"),
    "copies what is due for others": lambda channel: channel.queue_bind("orders", DUE, f"{KEY}.others"),
    "copies what is due for all": lambda channel: channel.queue_bind("orders", DUE, "#"),
    "ends what is due for others": lambda channel: channel.queue_unbind("others", DUE, f"{KEY}.others"),
    "leads delayed messages elsewhere": lambda channel: channel.exchange_bind(DUE, OTHERS, "#"),
}


async def ignore(message: object) -> None:
    """Do nothing with a message."""


@pytest.mark.parametrize("user", ["producer", "consumer"])
@pytest.mark.parametrize("what", FORBIDDEN)
async def test_nobody_takes_the_delayed_messages_of_other_queues(server: RabbitMQ, user: str, what: str) -> None:
    connection = await aiormq.connect(url_of(server, user))
    try:
        channel = await connection.channel()
        with pytest.raises(aiormq.ChannelAccessRefused, match=f"refused for user '{user}'"):
            await FORBIDDEN[what](channel)
    finally:
        await connection.close()


async def test_a_right_to_bind_without_topics_gets_copies_of_all(server: RabbitMQ) -> None:
    """Why the page has topic permissions."""
    connection = await aiormq.connect(url_of(server, "producer"))
    try:
        order(server, "rabbitmqctl set_topic_permissions producer tenure:due '^$' '.*'")
        channel = await connection.channel()
        await FORBIDDEN["copies what is due for others"](channel)
        await channel.queue_unbind("orders", DUE, f"{KEY}.others")
    finally:
        await connection.close()
        [line] = [
            line
            for line in commands("docs/rabbitmq.md", "Rights", "rabbitmqctl").splitlines()
            if line.startswith("rabbitmqctl set_topic_permissions producer")
        ]
        order(server, line)
