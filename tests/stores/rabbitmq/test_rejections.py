"""RabbitMQ: a message that the server refuses, among others that it doesn't."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aio_pika
import pytest

import tenure
from tenure._backends.rabbitmq import message_format
from tenure._backends.rabbitmq.errors import Rejected
from tenure._backends.rabbitmq.names import delay_name
from tenure._backends.rabbitmq.properties import Properties
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Complete, GiveBack, Settled, Settlement
from tenure.errors import ConfigError, MessageRefused, Unavailable
from tests.servers import RabbitMQ, patient, private
from tests.stores.rabbitmq.opened import complete, opened, received, until_found

LARGEST = 100_000


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


@pytest.fixture(scope="module")
def small() -> Iterator[RabbitMQ]:
    """A server that takes no large messages."""
    with private(RabbitMQ, options=[("max_message_size", str(LARGEST))]) as server:
        yield server


async def kept(broker: Any, name: str) -> Counter[str]:
    """Take all messages of a queue; return how often each id is there."""
    found: Counter[str] = Counter()
    while got := (await broker.receive(name, 100, 60.0)).deliveries:
        found.update(one.id for one in got)
        await complete(broker, *got)
    return found


async def sent_with_one_that_is_refused(broker: Any, name: str, refused: Outgoing) -> BaseException:
    """Send it among 300 others, at once; check what becomes of those; return its error."""

    async def send(message: Outgoing) -> object:
        return await broker.send(name, [message])

    await send(Outgoing(b"declares the queue", id="first"))
    others = [Outgoing(b"a", id=f"{number}") for number in range(300)]
    answers = await asyncio.gather(*map(send, [*others[:150], refused, *others[150:]]), return_exceptions=True)
    error = answers.pop(150)
    assert {type(one) for one in answers} <= {list, Unavailable}, Counter(map(repr, answers)).most_common(3)
    # Those behind it were not taken, and are sent again; of those before it, some may not have been confirmed.
    assert [one for one in answers[150:] if not isinstance(one, list)] == []
    found = await kept(broker, name)
    assert set(found.values()) == {1}
    assert found.keys() >= {one.id for one, answer in zip(others, answers, strict=True) if isinstance(answer, list)}
    assert refused.id not in found
    assert isinstance(error, BaseException)
    return error


async def test_the_doctor_tells_the_largest_message_as_far_as_it_is_known(small: RabbitMQ, name: str) -> None:
    async with tenure.connect(patient(small.url)) as backend:

        async def told() -> str:
            facts = (await backend.diagnose(write=False)).facts
            return next(one.value for one in facts if one.name == "max_message_size")

        assert re.match(r"(134,217,728|16,777,216) bytes, unless it is configured otherwise", await told())
        with pytest.raises(MessageRefused):
            await backend.queue(name).send(b"x" * (LARGEST + 1))
        assert await told() == f"{LARGEST:,} bytes, as the server has told when it refused a larger message"


async def test_a_message_too_large_for_the_server_costs_no_other(small: RabbitMQ, name: str) -> None:
    async with opened(small.url) as [broker]:
        large = Outgoing(b"x" * (LARGEST + 1), id="large")
        error = await sent_with_one_that_is_refused(broker, name, large)
        assert isinstance(error, MessageRefused)
        assert "body (100,001 bytes) must not be larger than the server's max_message_size (100,000 bytes)" in str(
            error
        )
        # Now it is known, and refused before anything is sent.
        sending = await broker._client.sending()
        with pytest.raises(MessageRefused, match=r"^message 1 of 2: body \(100,001 bytes\)") as refused:
            await broker.send(name, [Outgoing(b"a"), large])
        assert refused.value.index == 1
        assert await broker._client.sending() is sending
        assert await kept(broker, name) == Counter()
        await broker.send(name, [Outgoing(b"x" * LARGEST, id="largest")])
        assert await kept(broker, name) == Counter(["largest"])


async def test_several_too_large_are_each_refused(small: RabbitMQ, name: str) -> None:
    async with opened(small.url) as [broker]:
        await broker.declare(name, {})
        bodies = [b"x" * (LARGEST + number % 2) for number in range(20)]
        answers = await asyncio.gather(
            *(broker.send(name, [Outgoing(body)]) for body in bodies), return_exceptions=True
        )
        assert {type(one) for one in answers[1::2]} == {MessageRefused}
        assert {type(one) for one in answers[::2]} <= {list, Unavailable}


@pytest.mark.parametrize("tells", [True, False])
async def test_a_message_that_is_refused_for_another_reason_costs_no_other(
    small: RabbitMQ, name: str, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is one that nobody knew of before: it is tried again, where it is not kept."""
    monkeypatch.setattr(message_format, "_expiration", lambda left: "soon" if left < 1.0 else None)
    async with opened(small.url) as [broker]:
        if not tells:
            monkeypatch.setattr("tenure._backends.rabbitmq.client.find_rejected", found_none)
        odd = Outgoing(b"x", id="odd", expires_in=0.5)
        if tells:
            error = await sent_with_one_that_is_refused(broker, name, odd)
            assert isinstance(error, MessageRefused)
            assert "refuses the message: PRECONDITION_FAILED - invalid expiration 'soon'" in str(error)
            with pytest.raises(ConfigError, match=r"refuses message 1 of 2: .* others may be sent") as refused:
                await broker.send(name, [Outgoing(b"a"), odd])
            assert not isinstance(refused.value, MessageRefused)
        else:
            await broker.declare(name, {})
            with pytest.raises(Unavailable, match="it is not known for which: PRECONDITION_FAILED - invalid"):
                await broker.send(name, [odd])


async def test_messages_that_are_refused_at_the_same_time_are_each_told_so(
    small: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each closes the connection on which it is being found out which the others are."""
    monkeypatch.setattr(message_format, "_expiration", lambda left: "soon" if left < 1.0 else None)
    async with opened(small.url) as [broker]:
        await broker.declare(name, {})

        async def send(number: int) -> object:
            await asyncio.sleep(number * 0.0002)
            odd = number % 10 == 5
            return await broker.send(name, [Outgoing(b"a", id=f"{number}", expires_in=0.5 if odd else None)])

        answers = await asyncio.gather(*map(send, range(120)), return_exceptions=True)
        assert {type(one) for one in answers[5::10]} == {MessageRefused}, Counter(map(repr, answers[5::10]))
        others = [one for number, one in enumerate(answers) if number % 10 != 5 and not isinstance(one, list)]
        assert all("for another message" in str(one) for one in others), Counter(map(repr, others)).most_common(3)
        found = await kept(broker, name)
        assert set(found.values()) == {1}
        assert found.keys() >= {id_ for one in answers if isinstance(one, list) for id_ in one}


async def found_none(*given: Any) -> None:
    return None


async def test_a_copy_that_the_server_refuses_is_passed_on_as_it_is(small: RabbitMQ, name: str) -> None:
    """Its limit may have been lowered since it took the message."""
    small.order(f"application:set_env(rabbit, max_message_size, {3 * LARGEST})")  # each channel looks when it is opened
    async with opened(small.url) as [broker]:
        for id_ in ("abandoned", "given back"):
            await broker.send(name, [Outgoing(b"x" * 2 * LARGEST, id=id_)])
        small.order(f"application:set_env(rabbit, max_message_size, {LARGEST})")
        await broker._client._connections["sending"].close()
        for verdict in (Abandon(), GiveBack()):
            [got] = await until_found(lambda: received(broker, name))
            assert await broker.settle([Settlement(got, verdict)]) == [Settled()]
            [again] = await until_found(lambda: received(broker, name))
            assert again.delivery_count == 2
            sends = ((name, Outgoing(b"x" * 2 * LARGEST)),)
            with pytest.raises(MessageRefused):
                await broker.settle([Settlement(again, Complete(sends=sends))])
            await complete(broker, again)


async def test_records_are_written_although_another_message_is_refused(small: RabbitMQ, name: str) -> None:
    async with opened(small.url) as [broker]:
        await broker.declare(name, {})
        sending = await broker._client.sending()
        publish = sending.publish

        def publish_behind_one_that_is_refused(*given: Any, **options: Any) -> Any:
            large = Properties(message_id="large", delivery_mode=2)
            refused.append(publish("", name, large, b"x" * (LARGEST + 1)))
            return publish(*given, **options)

        refused: list[asyncio.Future[None]] = []
        sending.publish = publish_behind_one_that_is_refused
        assert (await broker.declare(name, {"max_deliveries": 3})).max_deliveries == 3
        assert (await broker.settings(name)).max_deliveries == 3
        [one] = refused
        with pytest.raises(Rejected):
            await one


async def test_an_exchange_of_delays_that_is_gone_costs_no_other(small: RabbitMQ, name: str) -> None:
    async with opened(small.url) as [broker]:
        await broker.send(name, [Outgoing(b"a", id="first", delay=0.05)])
        async with await aio_pika.connect(small.address) as theirs:
            await (await theirs.channel()).exchange_delete(delay_name(0))
        sends = [broker.send(name, [Outgoing(b"a", id=f"{n}", delay=0.05 if n % 2 else 0.0)]) for n in range(100)]
        answers = await asyncio.gather(*sends, return_exceptions=True)
        # Unavailable, if another sender has declared it anew when it is to be found out what was refused.
        assert {type(one) for one in answers} <= {list, Unavailable}
        ids = {id_ for one in answers if isinstance(one, list) for id_ in one}
        found: Counter[str] = Counter()
        while not ids <= found.keys():
            found += await kept(broker, name)
        assert {*found.values()} == {1}
