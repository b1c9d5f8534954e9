"""RabbitMQ: remade queues, policies, clocks that differ, silent servers, callers that give up at a bad moment."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import aio_pika
import pytest
from aiormq import spec

import tenure
from tenure import RetryPolicy
from tenure._backends.rabbitmq import connection, receiving, settling
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.delays import steps_of
from tenure._backends.rabbitmq.errors import AmqpError, ChannelLost
from tenure._backends.rabbitmq.held_channels import CONSUMERS_MAX, GROUP, HeldChannels
from tenure._backends.rabbitmq.message_format import Sequences
from tenure._backends.rabbitmq.names import RECORDS, RECORDS_LOCK, amqp_name
from tenure._lease import NoAnswer
from tenure._queue.broker import EVERYTHING
from tenure._queue.identity import dead_letters_of
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Deleted,
    GiveBack,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
)
from tenure.errors import ConfigError, MessageRefused, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import RabbitMQ, patient, private, shared, url_of
from tests.servers.rabbitmq import US
from tests.stores.rabbitmq.opened import complete, gotten, opened, received, until_found


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


@pytest.fixture(scope="module")
def own() -> Iterator[RabbitMQ]:
    """A server whose policies, users and exchanges a test may change."""
    with private(RabbitMQ) as server:
        yield server


def settled(verdict: Any, *deliveries: Any) -> list[Settlement]:
    return [Settlement(one, verdict) for one in deliveries]


# --- delays, and queues that are deleted and made anew ---


async def test_a_delayed_message_comes_to_a_queue_that_another_process_has_remade(name: str) -> None:
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"first", delay=0.05)])
        await complete(one, *await until_found(lambda: received(one, name)))
        assert isinstance(await other.delete(name, force=True), Deleted)
        await other.send(name, [Outgoing(b"plain")])
        await complete(other, *await until_found(lambda: received(other, name)))
        await one.send(name, [Outgoing(b"delayed", delay=0.05)])
        [got] = await until_found(lambda: received(other, name))
        assert got.body == b"delayed"
        await complete(other, got)


async def test_delayed_messages_of_a_deleted_queue_neither_come_back_nor_hold_up_others(name: str) -> None:
    """The server keeps 32 messages on their way out of a queue, until something has taken them."""
    delay = 0.05 * 2**6  # of one level
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"gone", delay=delay) for _ in range(80)])
        assert isinstance(await other.delete(name), NotEmpty)
        assert isinstance(await other.delete(name, force=True), Deleted)
        await one.send(f"{name}-2", [Outgoing(b"other", delay=delay)])
        [got] = await until_found(lambda: received(one, f"{name}-2"))
        await complete(one, got)
        # The same in a queue that is there again, and knows such messages, before the old ones come.
        await one.send(name, [Outgoing(b"gone", delay=delay) for _ in range(3)])
        assert isinstance(await other.delete(name, force=True), Deleted)
        await one.send(name, [Outgoing(b"new", delay=delay)])
        [got] = await until_found(lambda: received(other, name))
        assert got.body == b"new"
        await complete(other, got)
        assert await received(other, name) == ()


async def test_messages_are_sent_while_another_process_declares_their_queue(name: str) -> None:
    """The server refuses messages between the moment when a queue has a name and the one when it runs."""
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        for each in [f"{name}-{number}" for number in range(20)]:
            declaring = asyncio.ensure_future(other.declare(each, {}))
            while not await one._client.has_queue(amqp_name(each)):
                pass
            await one.send(each, [Outgoing(b"a"), Outgoing(b"b")])
            await declaring
            found = [got for _ in range(2) for got in await until_found(partial(received, one, each))]
            assert sorted(got.body for got in found) == [b"a", b"b"]
            await complete(one, *found)
            assert await received(one, each) == ()


async def test_until_empty_waits_for_a_retry_that_the_server_brings_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts delayed messages into the queue by its own schedule."""
    monkeypatch.setattr(settling, "steps_of", lambda delay: steps_of(delay) + 10)
    handled: list[int] = []

    async def fail_once(message: tenure.Message) -> None:
        handled.append(message.delivery_count)
        if message.delivery_count == 1:
            raise ValueError

    async with tenure.connect(patient(url_of(RabbitMQ))) as backend:
        queue = backend.queue(name)
        await queue.send(b"a")
        async with asyncio.timeout(10.0):
            await queue.consume(fail_once, until_empty=True, retry=RetryPolicy(initial=0.1))
    assert handled == [1, 2]


async def test_no_process_consumes_from_a_queue_that_another_declares(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a queue has a name before it runs, and the server ends the connection of its consumer, with all locks."""
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        request, ends, has_begun = one._client.request, asyncio.Event(), asyncio.Event()

        async def declared_slowly(*methods: Any) -> Any:
            answers = await request(*methods)
            if len(methods) == 2:  # the queue, and that of its dead letters
                has_begun.set()
                await ends.wait()
            return answers

        monkeypatch.setattr(one._client, "request", declared_slowly)
        declaring = asyncio.ensure_future(one.declare(name, {}))
        await has_begun.wait()
        hints = other.hints(name)
        claiming = asyncio.ensure_future(other.receive(name, 1, 30.0))
        done, _ = await asyncio.wait({claiming}, timeout=0.5)
        assert not done
        assert not other._subscriptions[name].known_consumers
        ends.set()
        await declaring
        assert (await claiming).deliveries == ()
        await until(lambda: other._subscriptions[name].known_consumers == 1)
        await hints.aclose()


async def test_no_process_consumes_from_a_queue_that_another_declares_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"a")])
        await complete(other, *await until_found(partial(received, other, name)))
        for place in (name, dead_letters_of(name)):
            await one._client.request(spec.Queue.Delete(0, amqp_name(place)))
        assert await received(other, name) == ()
        request, ends, has_begun = one._client.request, asyncio.Event(), asyncio.Event()

        async def declared_slowly(*methods: Any) -> Any:
            answers = await request(*methods)
            if len(methods) == 2:
                has_begun.set()
                await ends.wait()
            return answers

        monkeypatch.setattr(one._client, "request", declared_slowly)
        sending = asyncio.ensure_future(one.send(name, [Outgoing(b"b")]))
        await has_begun.wait()
        claiming = asyncio.ensure_future(other.receive(name, 1, 30.0))
        done, _ = await asyncio.wait({claiming}, timeout=0.3)
        assert not done
        ends.set()
        await sending
        found = (await claiming).deliveries or await until_found(partial(received, other, name))
        await complete(other, *found)


async def test_claims_do_not_depend_on_the_lock_of_the_records(name: str) -> None:
    """It only tells whether somebody declares the queue just now."""
    async with opened(*[url_of(RabbitMQ)] * 3) as (one, other, holder):
        await one.send(name, [Outgoing(b"a")])
        connection = await holder._records._lock()
        try:
            [got] = (await other.receive(name, 1, 30.0)).deliveries
            hints = other.hints(name)
            await until(lambda: other._subscriptions[name].known_consumers == 1)
            await hints.aclose()
        finally:
            await holder._client.request(spec.Queue.Delete(0, RECORDS_LOCK))
        assert connection.lost is None
        await complete(other, got)


async def test_what_is_asked_of_the_records_at_once_shares_a_turn(name: str) -> None:
    names = [f"{name}-{number}" for number in range(12)]
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(names[0], {})
        lock, turns = broker._records._lock, 0

        async def counted() -> Any:
            nonlocal turns
            turns += 1
            return await lock()

        broker._records._lock = counted
        await asyncio.gather(*(broker.declare(each, {"lock": 40.0 + number}) for number, each in enumerate(names)))
        assert turns <= 6
        settings = await asyncio.gather(*map(broker.settings, names))
        assert [one.lock for one in settings] == [40.0 + number for number in range(12)]
        await broker._client.request(spec.Queue.Declare(0, amqp_name(f"{name}-classic")))
        refused = asyncio.ensure_future(broker.declare(f"{name}-classic", {}))
        others = [asyncio.ensure_future(broker.declare(each, {"lock": 20.0})) for each in names[:3]]
        with pytest.raises(ConfigError, match="not as tenure declares it"):
            await refused
        assert [one.lock for one in await asyncio.gather(*others)] == [20.0] * 3


async def test_callers_that_share_a_turn_of_the_records_fail_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(f"{url_of(RabbitMQ)}?timeout=4") as [broker]:
        await broker.declare(f"{name}-1", {})

        def raises(records: Any) -> None:
            raise LookupError(name)

        async def never() -> None:
            await asyncio.get_running_loop().create_future()

        answers = await asyncio.gather(
            broker._records.change(len, never),
            broker._records.change(raises),
            broker._records.change(len),
            return_exceptions=True,
        )
        assert isinstance(answers[0], TimeoutError)
        assert repr(answers[1]) == repr(LookupError(name))
        assert isinstance(answers[2], int)


async def test_nothing_is_written_once_the_lock_of_the_records_is_lost(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {"lock": 40.0})

        async def loses_the_connection() -> None:
            await (await broker._client.connection("receiving")).close()

        with pytest.raises(AmqpError):
            await broker._records.change(lambda records: records.pop(name), loses_the_connection)
        assert (await broker.settings(name)).lock == 40.0


async def test_the_number_of_a_channel_that_the_server_closed_is_not_used_again_at_once(name: str) -> None:
    """The driver takes it for free before its answer is sent, which a full buffer can delay or lose."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        connection = await broker._client.connection("receiving")
        numbers = set()
        for _ in range(20):
            channel = await connection.channel()
            numbers.add(channel._raw.number)
            with pytest.raises(ChannelLost):
                await channel.request(spec.Queue.Declare(0, name, passive=True))  # there is no such queue
        assert len(numbers) == 20
        assert connection.lost is None


async def test_a_message_is_published_again_after_a_refusal_and_a_deletion(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        attempt, attempts = broker._publisher._attempt, 0

        async def refused_first(queue: str, letters: Any) -> Any:
            nonlocal attempts
            attempts += 1
            return ([], letters, []) if attempts == 1 else await attempt(queue, letters)

        monkeypatch.setattr(broker._publisher, "_attempt", refused_first)
        await broker.send(name, [Outgoing(b"a")])
        assert attempts == 3
        await complete(broker, *await until_found(partial(received, broker, name)))


async def test_a_full_queue_refuses_messages_at_once(own: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(own.url) as [broker]:
        await broker.send(name, [Outgoing(b"a")])
        limit = '{"max-length": 1, "overflow": "reject-publish"}'
        await asyncio.to_thread(own.set_policy, name, f"^{name}$", limit)

        async def is_refused() -> bool:
            refusals = await asyncio.gather(broker.send(name, [Outgoing(b"a")]), return_exceptions=True)
            return "takes no more messages" in str(refusals[0])

        await until(is_refused)
        attempt, attempts = broker._publisher._attempt, 0

        async def counted(queue: str, letters: Any) -> Any:
            nonlocal attempts
            attempts += 1
            return await attempt(queue, letters)

        monkeypatch.setattr(broker._publisher, "_attempt", counted)
        assert await is_refused()
        assert attempts == 1


async def test_a_delayed_message_comes_to_no_queue_whose_name_its_own_ends_with(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"own", delay=0.05)])
        await complete(broker, *await until_found(lambda: received(broker, name)))
        await broker.send(f"eu.{name}", [Outgoing(b"longer", delay=0.05)])
        await complete(broker, *await until_found(lambda: received(broker, f"eu.{name}")))
        assert await received(broker, name) == ()


async def test_a_deletion_that_is_not_carried_out_costs_no_delayed_message(name: str) -> None:
    """It makes all processes note another generation, and waits before it deletes."""
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await other.send(name, [Outgoing(b"delayed", delay=0.05)])
        deleting = asyncio.create_task(one.delete(name, force=True))
        await until(lambda: has_generation(other, name, 1))
        for task in list(one._client._to_end):  # the process dies
            task.cancel()
        await asyncio.gather(deleting, return_exceptions=True)
        other._records._cached_until = 0.0
        [got] = await until_found(lambda: received(other, name))
        assert got.body == b"delayed"
        await complete(other, got)


async def has_generation(broker: Any, name: str, wanted: int) -> bool:
    return bool((await broker._records.read())[name].generation == wanted)


async def test_an_old_message_of_another_program_is_delayed_and_comes(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"first", delay=0.05)])
        await broker.delete(name, force=True)
        await broker.send(name, [Outgoing(b"second")])
        await complete(broker, *await until_found(lambda: received(broker, name)))
        await publish(
            url_of(RabbitMQ), name, aio_pika.Message(b"old", timestamp=datetime.now(UTC) - timedelta(hours=1))
        )
        [got] = await until_found(lambda: received(broker, name))
        assert await broker.settle(settled(Abandon(0.05), got)) == [Settled()]
        [again] = await until_found(lambda: received(broker, name))
        assert (again.body, again.delivery_count) == (b"old", 2)
        await complete(broker, again)


async def test_locks_outlive_the_exchanges_of_delays(own: RabbitMQ, name: str) -> None:
    """What comes back may be for lack of those, and not of the queue."""
    async with opened(own.url) as [broker]:
        await broker.send(name, [Outgoing(b"first", delay=0.05)])
        await complete(broker, *await until_found(lambda: received(broker, name)))
        await broker.send(name, [Outgoing(b"held")])
        [held] = await until_found(lambda: received(broker, name))
        async with await aio_pika.connect(own.address) as theirs:
            exchange = await (await theirs.channel()).get_exchange("tenure:delay:00", ensure=False)
            await exchange.delete()
        await broker.send(name, [Outgoing(b"delayed", delay=0.05)])
        assert isinstance((await broker.renew([held], 2.0))[0], Renewed)
        await complete(broker, held)
        await complete(broker, *await until_found(lambda: received(broker, name)))


async def test_a_lock_ends_with_its_queue(name: str) -> None:
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"a")])
        [got] = await until_found(lambda: received(one, name))
        assert isinstance(await other.delete(name, force=True), Deleted)
        assert await one.renew([got], 10.0) == [LAPSED]
        assert await one.settle(settled(COMPLETE, got)) == [LAPSED]


async def test_a_queue_whose_dead_letter_is_held_is_not_deleted(name: str) -> None:
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"a")])
        [got] = await until_found(lambda: received(one, name))
        assert await one.settle(settled(DeadLetter("why"), got)) == [Settled()]
        [letter] = await until_found(lambda: received(one, dead_letters_of(name)))
        assert isinstance(await other.delete(name), NotEmpty)
        await complete(one, letter)
        await until(lambda: is_deleted(other, name))


async def is_deleted(broker: Any, name: str) -> bool:
    return isinstance(await broker.delete(name), Deleted)


async def test_a_count_is_no_reason_to_delete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts none if the leader of a queue doesn't answer in time."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a")])

        async def count(queue: str) -> tuple[int, int]:
            return 0, 0

        with monkeypatch.context() as patch:
            patch.setattr(broker._browser, "count", count)
            assert isinstance(await broker.delete(name), NotEmpty)
        [got] = await until_found(lambda: received(broker, name))
        assert got.delivery_count == 1
        await complete(broker, got)
        await until(lambda: is_deleted(broker, name))


async def test_a_process_that_listens_to_a_deleted_queue_keeps_its_other_locks(name: str) -> None:
    """The server crashes on a consumer of a queue that is just being deleted, and on its declaration."""
    with private(RabbitMQ) as server:
        await listen_to_deleted(name, server.url)


async def listen_to_deleted(name: str, url: str) -> None:
    async with opened(url, url) as (one, other):
        await one.send(f"{name}-2", [Outgoing(b"held")])
        [held] = (await one.receive(f"{name}-2", 1, 60.0)).deliveries
        await one.declare(name, {})

        async def consume() -> None:
            hints = one.hints(name)
            while True:
                await one.receive(name, 5, 30.0)
                await anext(hints)

        consuming = asyncio.create_task(consume())
        try:
            for _ in range(5):
                await until(lambda: is_listening(one, name))
                assert isinstance(await other.delete(name, force=True), Deleted)
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        await complete(one, held)


def is_listening(broker: Any, name: str) -> bool:
    subscription = broker._subscriptions.get(name)
    return bool(subscription and subscription.standing)


async def test_what_waits_in_many_queues_is_given_back_uncounted_by_a_close(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have to wait for what is on its way; a close takes two seconds at most."""
    names = [f"{name}-{number}" for number in range(5)]
    async with opened(url_of(RabbitMQ)) as [other]:
        async with opened(url_of(RabbitMQ)) as [closed]:
            hints = [closed.hints(each) for each in names]
            await until(lambda: all(is_listening(closed, each) for each in names))
            monkeypatch.setattr("tenure._backends.rabbitmq.receiving.KEPT", 600.0)
            for each in names:
                await other.send(each, [Outgoing(b"a")])
            await until(lambda: all(closed._subscriptions[each].waiting for each in names))
        monkeypatch.undo()
        for each in names:
            [got] = await until_found(partial(received, other, each))
            assert (got.body, got.delivery_count) == (b"a", 1)
            await complete(other, got)
        del hints


async def test_a_request_that_waits_for_what_a_close_ends_is_unavailable() -> None:
    """It is not cancelled: its caller was not, and would end without a word."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        client = broker._client
        forever = client.spawn(asyncio.Event().wait(), "forever")
        asking = asyncio.ensure_future(client.run(lambda: asyncio.shield(forever)))
        await asyncio.sleep(0)
        other = asyncio.ensure_future(client.run(lambda: asyncio.shield(forever)))
        await asyncio.sleep(0)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
    with pytest.raises(Unavailable, match="is closed; connect again"):
        await asking


async def test_listening_that_is_begun_anew_at_once_declares_the_queue(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        hints = broker.hints(name)
        await hints.aclose()
        hints = broker.hints(name)
        await until(lambda: is_listening(broker, name))
        await hints.aclose()


# --- locks ---
# --- locks ---


async def test_a_renewal_beside_a_verdict_costs_no_lock(name: str) -> None:
    """Even if the lock can't be extended: a second acknowledgement would end the channel, and its other locks."""
    async with opened(f"{url_of(RabbitMQ)}?consumer_timeout=10") as [broker]:
        await broker.send(name, [Outgoing(b"a", expires_in=60), Outgoing(b"b", expires_in=60)])
        a, b = (await broker.receive(name, 2, 6.0)).deliveries
        renewing = asyncio.create_task(broker.renew([a], 9.5))
        await asyncio.sleep(0)
        done = await asyncio.gather(broker.settle(settled(COMPLETE, a)), renewing)
        assert done[0] == [Settled()]
        assert isinstance((await broker.renew([b], 1.0))[0], Renewed)
        await complete(broker, b)
        assert await received(broker, name) == ()


async def test_queues_that_do_not_answer_cost_no_lock_of_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(f"{url_of(RabbitMQ)}?timeout=4") as [broker]:
        held: list[Any] = []
        for number in range(3):
            await broker.send(f"{name}-{number}", [Outgoing(b"a")])
            held += (await broker.receive(f"{name}-{number}", 1, 30.0)).deliveries
        for number in range(2):
            channels = broker._subscriptions[f"{name}-{number}"].channels
            monkeypatch.setattr(channels, "count", asyncio.get_running_loop().create_future)
        answers = await broker.renew(held, 30.0)
        assert [type(one) for one in answers] == [NoAnswer, NoAnswer, Renewed]
        await complete(broker, *held)


async def test_the_same_verdict_once_more_waits_until_the_first_is_proven(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(3 * GROUP)])
        got: list[Any] = []
        while len(got) < 3 * GROUP:
            got += (await broker.receive(name, 4, 30.0)).deliveries
        last = broker._receipts.find(got[-1])
        number, channels = last.found.raw.tag, last.channels
        channel, _ = channels._places[number]
        first = asyncio.create_task(broker.settle(settled(COMPLETE, *got)))
        while not channel._pending:  # the next step after it was begun
            await asyncio.sleep(0)
        assert await broker.settle(settled(COMPLETE, got[-1])) == [Settled()]
        assert number not in channels._places
        assert await first == [Settled()] * 3 * GROUP


async def test_a_channel_to_be_closed_behind_a_silent_request_is_given_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 0.5)
    async with opened(f"{url_of(RabbitMQ)}?timeout=4", url_of(RabbitMQ)) as (one, other):
        await one.send(name, [Outgoing(b"a")])
        [got] = (await one.receive(name, 1, 60.0)).deliveries
        channel = one._receipts.find(got).channels.first
        channel._order(asyncio.Event().wait, asyncio.get_running_loop().create_future())
        channel.begin_close()
        [again] = await until_found(lambda: received(other, name))
        await complete(other, again)


async def test_what_came_by_a_lost_channel_is_not_copied(name: str) -> None:
    """The server gives it back by itself."""
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.send(name, [Outgoing(b"%d" % number) for number in range(5)])
        got = (await one.receive(name, 5, 30.0)).deliveries
        held = [one._receipts.find(delivery) for delivery in got]
        channels = held[0].channels
        channels.begin_close()
        await one._settling.give_back(name, channels, [each.found.raw for each in held])
        found: list[bytes] = []

        async def take() -> bool:
            for each in (await other.receive(name, 10, 30.0)).deliveries:
                found.append(each.body)
                await complete(other, each)
            return len(found) >= 5

        await until(take)
        assert await received(other, name) == ()
        assert sorted(found) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("acknowledged", [0, 7])
@pytest.mark.parametrize("how", ["by verdicts", "unasked"])
async def test_a_process_that_ends_while_it_gives_back_leaves_few_copies_too_many(
    how: str, acknowledged: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connections are cut when a copy is confirmed, and its original not acknowledged yet."""
    count = 30
    async with (
        FaultProxy("127.0.0.1", shared(RabbitMQ).port) as proxy,
        opened(f"amqp://{proxy.host}:{proxy.port}/", url_of(RabbitMQ)) as (killed, other),
    ):
        await other.send(name, [Outgoing(b"%d" % number) for number in range(count)])
        got: list[Any] = []
        while len(got) < count:
            got += (await killed.receive(name, count, 60.0)).deliveries
        held = [killed._receipts.find(delivery) for delivery in got]
        acks, begin_ack = itertools.count(), HeldChannels.begin_ack

        def ack_or_cut(channels: HeldChannels, tag: int) -> Any:
            if next(acks) == acknowledged:
                proxy.reset()
                proxy.refuse()
            return begin_ack(channels, tag)

        monkeypatch.setattr(HeldChannels, "begin_ack", ack_or_cut)
        if how == "unasked":
            giving = killed._settling.give_back(name, held[0].channels, [each.found.raw for each in held])
        else:
            giving = killed.settle(settled(GiveBack(), *got))
        await asyncio.gather(giving, return_exceptions=True)
        await until(lambda: is_held_by_none(other, name))
        ready = (await other.stats(name)).ready
        assert count <= ready <= count + receiving.AT_ONCE
        bodies: list[bytes] = []
        monkeypatch.undo()
        while len(bodies) < ready:
            claim = await other.receive(name, count, 60.0)
            bodies += [each.body for each in claim.deliveries]
            await complete(other, *claim.deliveries)
        assert {*bodies} == {b"%d" % number for number in range(count)}


async def test_a_verdict_that_was_not_begun_when_its_channel_ended_is_known_to_be_too_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(receiving.AT_ONCE + 3)])
        got: list[Any] = []
        while len(got) < receiving.AT_ONCE + 3:
            got += (await broker.receive(name, 10, 60.0)).deliveries
        channel, publish = broker._receipts.find(got[0]).channels.first, broker._publisher.publish
        copies: list[Any] = []

        async def publish_and_close(*given: Any) -> None:
            copies.append(given)
            await publish(*given)
            channel.begin_close()

        monkeypatch.setattr(broker._publisher, "publish", publish_and_close)
        answers = await broker.settle(settled(GiveBack(), *got))
        assert len(copies) == receiving.AT_ONCE
        assert [isinstance(one, NoAnswer) for one in answers[: receiving.AT_ONCE]] == [True] * receiving.AT_ONCE
        assert answers[receiving.AT_ONCE :] == [LAPSED] * 3
        assert await broker.settle(settled(GiveBack(), *got)) == [LAPSED] * len(got)
        monkeypatch.undo()

        [again] = await until_found(lambda: received(broker, name))
        channel = broker._receipts.find(again).channels.first
        send = broker._settling._send

        async def send_and_close(*given: Any) -> None:
            await send(*given)
            channel.begin_close()

        monkeypatch.setattr(broker._settling, "_send", send_and_close)
        assert await broker.settle(settled(Complete(sends=((f"{name}-2", Outgoing(b"b")),)), again)) == [LAPSED]


async def is_held_by_none(broker: Any, name: str) -> bool:
    _, consumers = await broker._browser.count(name)
    return not consumers


async def test_a_channel_that_is_over_passes_nothing_on(name: str) -> None:
    """A new one may stand already: numbers of messages begin anew there."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a")])
        [got] = await until_found(lambda: received(broker, name))
        old = broker._subscriptions[name].channels
        come: list[Delivered] = []
        old.on_received = come.append
        old.begin_close()
        late = Delivered(old.first, 1, "tenure-1", False, got, b"late", 0.0)
        old.first._pass_on(late)
        assert not come
        [again] = await until_found(lambda: received(broker, name))
        assert (again.body, again.delivery_count) == (b"a", 2)
        await complete(broker, again)


async def test_no_more_is_acknowledged_at_once_than_the_server_passes_on(name: str) -> None:
    """It makes a command for each consumer of what is acknowledged, and a request overtakes those beyond 32."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(3 * CONSUMERS_MAX)])
        got: list[Any] = []
        while len(got) < 3 * CONSUMERS_MAX:  # a few at once: each is taken by a consumer of its own
            got += (await broker.receive(name, 4, 30.0)).deliveries
        groups = [count_groups(one) for one in broker._subscriptions[name].channels._channels]
        await complete(broker, *got)
        assert sum(map(sum, groups)) == 3 * CONSUMERS_MAX
        assert max(map(sum, groups)) <= CONSUMERS_MAX
        assert max(map(max, groups)) <= GROUP


def count_groups(channel: Any) -> list[int]:
    """Return a list to which comes how many messages of *channel* are acknowledged before each answer."""
    groups, held = [0], set(channel.unacked)
    ack, flow = channel.raw.ack, channel.flow

    def count_acks(tag: int, *, multiple: bool = False) -> None:
        covered = {one for one in held if one <= tag} if multiple else {tag}
        groups[-1] += len(covered)
        held.difference_update(covered)
        ack(tag, multiple=multiple)

    def count_flows() -> Any:
        groups.append(0)
        return flow()

    channel.raw.ack, channel.flow = count_acks, count_flows
    return groups


async def test_an_acknowledgement_of_what_is_given_back_meanwhile_ends(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(3)])
        channels = HeldChannels(await broker._client.receiving(), amqp_name(name))
        come: list[Delivered] = []
        channels.on_received = come.append
        await channels.consume("bulk", 3)
        await until(lambda: len(come) == 3)
        await channels.end_consumers()
        waiting = channels.begin_ack(come[0].tag)
        for taken in channels.reject_all():
            await taken
        with pytest.raises(AmqpError, match="given back"):
            await waiting
        with pytest.raises(AmqpError, match="given back"):
            channels.begin_ack(come[0].tag)
        channels.begin_close()


async def test_a_further_channel_that_can_not_be_opened_costs_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a consumer would be expected there for ever."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {"max_deliveries": 5})
        channels = HeldChannels(await broker._client.receiving(), amqp_name(name))

        async def refuse() -> Any:
            raise RuntimeError("no room")

        monkeypatch.setattr(channels.first.connection, "channel", refuse)
        standing = [channels.consume(f"unit-{number}", 1) for number in range(CONSUMERS_MAX)]
        beyond = channels.consume("beyond", 1)
        with pytest.raises(AmqpError, match="could be opened: no room"):
            await beyond
        await asyncio.wait(standing)
        assert channels.lost is not None
        assert channels.first.lost is not None


@pytest.mark.timeout(60)
async def test_a_claim_given_up_from_another_thread_is_given_back(name: str) -> None:
    """Just when the claim has been made on the loop of the connections."""
    here = asyncio.get_running_loop()
    async with opened(url_of(RabbitMQ)) as [other]:
        await other.send(name, [Outgoing(b"a")])
        ready, over = threading.Event(), threading.Event()
        found: list[Any] = []

        def serve() -> None:
            async def main() -> None:
                async with opened(url_of(RabbitMQ)) as [broker]:
                    await broker.stats(name)
                    found.append(broker)
                    ready.set()
                    await asyncio.to_thread(over.wait)

            asyncio.run(main())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            await asyncio.to_thread(ready.wait)
            [broker] = found
            receive = broker._receive
            cancelled = threading.Event()

            async def receive_late(*given: Any) -> Any:
                claim = await receive(*given)
                here.call_soon_threadsafe(lambda: (claiming.cancel(), here.call_later(0.05, cancelled.set)))
                cancelled.wait()  # this loop does nothing meanwhile
                return claim

            broker._receive = receive_late
            claiming = asyncio.create_task(broker.receive(name, 1, 60.0))
            with pytest.raises(asyncio.CancelledError):
                await claiming
            [got] = await until_found(lambda: received(other, name))
            assert got.delivery_count == 1
            await complete(other, got)
        finally:
            over.set()
            await asyncio.to_thread(thread.join)


# --- messages of other programs ---


async def publish(url: str, name: str, *messages: aio_pika.Message) -> None:
    async with await aio_pika.connect(url) as theirs:
        exchange = (await theirs.channel()).default_exchange
        for one in messages:
            await exchange.publish(one, routing_key=name)


async def test_the_server_says_what_has_expired(name: str) -> None:
    """The clock of the sender may be wrong; the server's time to live is not."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        headers: dict[str, Any] = {"x-tenure-expires-at": int((time.time() - 3_600) * 1e6)}
        await publish(url_of(RabbitMQ), name, aio_pika.Message(b"a", headers=headers, expiration=60))
        [got] = await until_found(lambda: received(broker, name))
        await complete(broker, got)


async def test_a_copy_of_another_users_message_is_accepted(own: RabbitMQ, name: str) -> None:
    """The server refuses a message whose ``user_id`` is not that of the login, and closes the channel."""
    own.order(f'rabbit_auth_backend_internal:add_user(<<"bob">>, <<"bob">>, {US})')
    own.permit("bob")
    async with opened(own.url.replace("guest:guest", "bob:bob")) as [broker]:
        await broker.declare(name, {})
        await publish(own.address, name, aio_pika.Message(b"a", user_id="guest"))
        [got] = await until_found(lambda: received(broker, name))
        assert await broker.settle(settled(Abandon(), got)) == [Settled()]
        [got] = await until_found(lambda: received(broker, name))
        assert got.delivery_count == 2
        await complete(broker, got)


async def test_a_copy_goes_to_no_other_queue(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        for queue in (name, f"{name}-2"):
            await broker.declare(queue, {})
        await publish(url_of(RabbitMQ), name, aio_pika.Message(b"a", headers={"CC": [f"{name}-2"]}))
        [once] = await until_found(lambda: received(broker, f"{name}-2"))
        await complete(broker, once)
        [got] = await until_found(lambda: received(broker, name))
        assert await broker.settle(settled(Abandon(), got)) == [Settled()]
        [again] = await until_found(lambda: received(broker, name))
        assert await received(broker, f"{name}-2") == ()
        await complete(broker, again)


async def test_a_message_without_room_for_a_reason_is_moved_as_it_is(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {"max_deliveries": 1})
        large = aio_pika.Message(b"a", headers={"h": "x" * 130_980}, delivery_mode=2)
        await publish(url_of(RabbitMQ), name, large, large, large)
        rejected, _, put_back = (await broker.receive(name, 3, 1.0)).deliveries
        assert await broker.settle(settled(DeadLetter("why"), rejected)) == [Settled()]
        await broker.declare(name, {"max_deliveries": 2})
        await until(lambda: recent_max_deliveries(broker, name, 2))
        assert await broker.settle(settled(Abandon(), put_back)) == [Settled()]
        # The lock of the one between them ends, and its next delivery counts up to the limit.
        again = await until_found(lambda: received(broker, name))
        await complete(broker, *again)
        await broker.declare(name, {"max_deliveries": 1})
        await until(lambda: recent_max_deliveries(broker, name, 1))
        await until(lambda: has_dead(broker, name, 2))
        assert await received(broker, name) == ()
        with pytest.raises(MessageRefused) as refused:
            await broker.send(name, [Outgoing(b"a"), Outgoing(b"b", headers={"h": "x" * 131_000})])
        assert refused.value.index == 1
        assert await received(broker, name) == ()


async def recent_max_deliveries(broker: Any, name: str, wanted: int) -> bool:
    return bool(await broker._max_deliveries(name) == wanted)


async def has_dead(broker: Any, name: str, wanted: int) -> bool:
    await broker.receive(name, 5, 1.0)
    return len(await broker.peek_dead(name, EVERYTHING, 10)) == wanted


# --- policies ---


async def test_a_limit_of_deliveries_loses_neither_dead_letters_nor_settings(own: RabbitMQ, name: str) -> None:
    own.set_policy("limit", ".*", '{"delivery-limit": 2}')
    try:
        async with opened(own.url) as [broker]:
            await broker.declare(name, {"max_deliveries": 7})
            await broker.send(name, [Outgoing(b"a")])
            [got] = await until_found(lambda: received(broker, name))
            assert await broker.settle(settled(DeadLetter("why"), got)) == [Settled()]
            for _ in range(4):
                [letter] = await broker.peek_dead(name, EVERYTHING, 10)
                assert letter.reason == "why"
                [got] = await until_found(lambda: received(broker, dead_letters_of(name)))
                assert await broker.settle(settled(Abandon(), got)) == [Settled()]
                assert (await broker.settings(name)).max_deliveries == 7
    finally:
        own.clear_policy("limit")


# --- records ---


async def test_a_request_that_is_given_up_holds_up_no_other_process(name: str) -> None:
    """The lock of the records is the connection's: it would be left."""
    async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
        await one.declare(name, {"max_deliveries": 3})
        for steps in range(1, 40, 2):
            reading = asyncio.ensure_future(one.settings(name))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            async with asyncio.timeout(3.0):
                assert (await other.settings(name)).max_deliveries == 3


async def test_many_verdicts_read_the_settings_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(50)])
        got: list[Any] = []
        while len(got) < 50:
            got += (await broker.receive(name, 50, 30.0)).deliveries
        reads: list[int] = []
        read = broker._records.read

        async def count() -> Any:
            reads.append(1)
            return await read()

        monkeypatch.setattr(broker._records, "read", count)
        broker._records._cached_until = 0.0
        assert await broker.settle(settled(Abandon(), *got)) == [Settled()] * 50
        assert len(reads) <= 2
        assert isinstance(await broker.delete(name, force=True), Deleted)


async def test_records_are_made_where_a_process_has_died_before_it_wrote_them(name: str) -> None:
    with private(RabbitMQ) as server:
        async with await aio_pika.connect(server.address) as theirs:
            arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}
            await (await theirs.channel()).declare_queue(RECORDS, durable=True, arguments=arguments)
        async with opened(server.url) as [broker]:
            await broker.declare(name, {"max_deliveries": 3})
            assert (await broker.settings(name)).max_deliveries == 3


async def test_records_that_another_program_has_changed_hang_nothing(own: RabbitMQ, name: str) -> None:
    odd = aio_pika.Message(b"odd")
    async with opened(own.url, own.url) as (one, other):
        await one.declare(name, {"max_deliveries": 3})
        await publish(own.address, RECORDS, odd, aio_pika.Message(b"\xff"))
        assert (await other.settings(name)).max_deliveries == 3
        assert name in await other.names()
        known = json.loads(await taken(own.address, RECORDS))
        known["queues"] |= {"odd": 5, name: {"settings": 5}}
        await publish(own.address, RECORDS, aio_pika.Message(json.dumps(known).encode()))
        await other.declare(f"{name}-2", {"max_deliveries": 4})
        assert (await other.settings(name)).max_deliveries == 10
        await taken(own.address, RECORDS)
        await publish(own.address, RECORDS, odd)
        for request in (one.names(), one.settings(name), one.declare(name, {"max_deliveries": 5})):
            with pytest.raises(ConfigError, match="or remove it"):
                await request
        await taken(own.address, RECORDS)
        await one.declare(name, {"max_deliveries": 5})
        assert (await other.settings(name)).max_deliveries == 5


async def taken(url: str, name: str) -> bytes:
    """Take a message as another program does."""
    async with await aio_pika.connect(url) as theirs:
        queue = await (await theirs.channel()).get_queue(name)
        [message] = await until_found(lambda: gotten(queue))
        await message.ack()
        return bytes(message.body)


# --- sending ---


def test_two_processes_make_different_ids_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count(1_800_000_000_000_000_000, 1_000)
    now = [next(moments)]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    one, other = Sequences(), Sequences()
    ids: set[str] = set()
    numbers: set[int] = set()
    for _ in range(2_000):
        now[0] = next(moments)
        for maker in (one, other):
            numbers.add(sequence := maker.next())
            ids.add(maker.id_of("orders", sequence))
    assert len(ids) == 4_000
    assert len(numbers) > 3_900


async def test_a_message_that_is_never_confirmed_costs_its_channel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another one of the same id would wait for it for ever. And a caller that gives up frees no id."""
    monkeypatch.setattr(connection, "PATIENCE", 1.5)
    async with (
        FaultProxy("127.0.0.1", shared(RabbitMQ).port) as proxy,
        opened(f"amqp://{proxy.host}:{proxy.port}/?timeout=3&heartbeat=60") as [broker],
    ):
        await broker.declare(name, {})
        await broker.send(name, [Outgoing(b"first")])
        channel = await broker._client.sending()
        proxy.stall("down")
        with pytest.raises(Unavailable):
            await broker.send(name, [Outgoing(b"a", id="same")])
        assert "same" in channel._publishing
        await until(lambda: channel.lost is not None)
        proxy.heal()
        await until(lambda: is_sent(broker, name))


async def is_sent(broker: Any, name: str) -> bool:
    try:
        await broker.send(name, [Outgoing(b"a", id="same")])
    except Unavailable:
        return False
    return True
