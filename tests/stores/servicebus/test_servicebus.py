"""Tests of Service Bus alone: native clients beside ours, subscriptions, rights, links that are lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue
from azure.servicebus.aio import ServiceBusClient

import tenure
from tenure._backends import servicebus
from tenure._backends.servicebus import feed
from tenure._backends.servicebus.address import EMULATOR_KEY, address_of, connected
from tenure._backends.servicebus.codec import Encoded
from tenure._backends.servicebus.lock_times import LockTimes
from tenure._backends.servicebus.names import SCHEDULES, entity_of, may_be_subscription, subscription_of
from tenure._backends.servicebus.sending import portions
from tenure._queue.broker import EVERY_LIVE, EVERYTHING
from tenure._queue.message import MAX_DELIVERIES
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, Settled, Settlement, Verdict
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, MessageRefused, Unavailable
from tenure.testing import until
from tests.interop.azure_client import wait_for_frames_only
from tests.servers import Authority, ServiceBus, patient, shared
from tests.servers.servicebus import connection_string
from tests.stores.servicebus.opened import look_shortly, without_manage


@pytest.fixture
def server() -> ServiceBus:
    return shared(ServiceBus)


@pytest.fixture
def own(server: ServiceBus) -> Iterator[ServiceBus]:
    """The same as a namespace in which nothing else is, and which the test may disturb."""
    server.reset()
    yield server
    server.reset()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    look_shortly(monkeypatch)
    wait_for_frames_only(monkeypatch)


@asynccontextmanager
async def native(server: ServiceBus) -> AsyncIterator[ServiceBusClient]:
    async with ServiceBusClient.from_connection_string(server.connection_string) as client:
        yield client


@asynccontextmanager
async def opened(server: ServiceBus, options: str = "") -> AsyncIterator[servicebus.ServiceBusBackend]:
    backend = servicebus.open(Url.parse(patient(server.url + options)))
    try:
        yield backend
    finally:
        await backend.close()


# --- native clients ---


async def test_a_native_client_reads_what_we_send(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend, native(server) as client:
        sent = tenure.Outgoing.json(
            {"order": 17},
            id="order-17",
            headers={"text": "Ünïcödé", "whole": -7, "large": 2**60, "number": 1.5, "yes": True},
            reply_to="answers",
            correlation_id="call-1",
            expires_in=100,
        )
        await backend.queue(name).send_batch([sent])
        async with client.get_queue_receiver(name) as receiver:
            [got] = await receiver.receive_messages(1, max_wait_time=30)
            assert b"".join(got.body) == b'{"order":17}'
            assert (got.message_id, got.reply_to, got.correlation_id) == ("order-17", "answers", "call-1")
            assert (got.content_type, got.time_to_live) == ("application/json", timedelta(seconds=100))
            found: dict[Any, object] = dict(got.application_properties or {})
            properties = {bytes(key).decode(): value for key, value in found.items()}
            assert properties == {
                "text": "Ünïcödé".encode(),
                "whole": -7,
                "large": 2**60,
                "number": 1.5,
                "yes": True,
            }  # and nothing of ours
            await receiver.complete_message(got)


async def test_we_read_what_a_native_client_sends(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend, native(server) as client:
        queue = backend.queue(name)
        await queue.receive()  # creates it
        async with client.get_queue_sender(name) as sender:
            await sender.send_messages(
                ServiceBusMessage(
                    "tëxt",
                    application_properties={"a": 1, b"b": "é"},
                    message_id="id",
                    content_type="text/plain",
                    correlation_id="c",
                    reply_to="r",
                )
            )
            await sender.send_messages([ServiceBusMessage(b"1"), ServiceBusMessage(b"2")])
        first, *others = sorted(await queue.receive(max=10, wait=30), key=lambda one: one.sequence)
        assert (first.id, first.body, dict(first.headers)) == (
            "id",
            "tëxt".encode(),
            {"a": 1, "b": "é", "content-type": "text/plain"},
        )
        assert (first.correlation_id, first.reply_to, first.delivery_count) == ("c", "r", 1)
        while len(others) < 2:
            others += await queue.receive(max=10, wait=30)
        assert sorted(one.body for one in others) == [b"1", b"2"]
        assert len({one.id for one in others}) == 2  # made up, where the sender gave none
        for one in (first, *others):
            await one.complete()


async def test_dead_letters_are_native(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend, native(server) as client:
        queue = backend.queue(name)
        await queue.send(b"ours", id="ours")
        [message] = await queue.receive(wait=30)
        await message.dead_letter("unreadable", "no JSON")
        async with client.get_queue_receiver(name, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead:
            [letter] = await dead.receive_messages(1, max_wait_time=30)
            assert (letter.dead_letter_reason, letter.dead_letter_error_description) == ("unreadable", "no JSON")
            assert letter.message_id == "ours"
            await dead.complete_message(letter)
        await queue.send(b"theirs", id="theirs")
        async with client.get_queue_receiver(name) as receiver:
            [got] = await receiver.receive_messages(1, max_wait_time=30)
            await receiver.dead_letter_message(got, reason="why", error_description="text")
        [shown] = await queue.dead_letters.peek()
        assert (shown.id, shown.reason, shown.description) == ("theirs", "why", "text")
        assert await queue.dead_letters.redrive() == 1
        [again] = await queue.receive(wait=30)
        assert (again.id, again.body, again.delivery_count) == ("theirs", b"theirs", 1)


async def test_a_message_that_died_of_its_deliveries_has_our_reason(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend, native(server) as client:
        queue = backend.queue(name, max_deliveries=2)
        await queue.send(b"a")
        async with client.get_queue_receiver(name) as receiver:
            for _ in range(2):
                [got] = await receiver.receive_messages(1, max_wait_time=30)
                await receiver.abandon_message(got)
        [shown] = await queue.dead_letters.peek(reason=MAX_DELIVERIES)
        assert (shown.delivery_count, [one.number for one in shown.history]) == (2, [1, 2])


# --- topics ---


async def test_all_pages_of_queues_are_listed(own: ServiceBus) -> None:
    own.control("page", 2)
    many = {f"q{number}" for number in range(5)}
    async with tenure.connect(own.url) as backend:
        for one in many:
            await backend.queue(one).declare()
        assert set(await backend.queues()) == many


async def test_subscriptions_of_a_topic(own: ServiceBus) -> None:
    async with opened(own) as store:
        admin: Any = store.broker.administration

        async def create_topic() -> None:
            await admin._here().create_topic("news")

        await store._namespace.run(create_topic)
        for each in ("first", "second"):
            await store._namespace.run(partial(admin._here().create_subscription, "news", each))
    async with tenure.connect(own.url) as backend:
        topic, first = backend.queue("news"), backend.queue("news/first")
        second = backend.queue("news/subscriptions/second")
        await topic.send(b"1", id="a")
        for queue in (first, second):
            [message] = await queue.receive(wait=30)
            assert (message.id, message.body) == ("a", b"1")
            await message.dead_letter("bad")
        assert (await first.stats()).dead == 1
        with pytest.raises(ConfigError, match="send to its topic"):
            await first.send(b"2")
        with pytest.raises(ConfigError, match="every subscription"):
            await first.dead_letters.redrive()
        assert await first.dead_letters.redrive(to="mended") == 1
        [message] = await backend.queue("mended").receive(wait=30)
        await message.complete()
        assert (await second.stats()).dead == 1


# --- rights ---


async def test_sending_and_receiving_need_no_manage(
    server: ServiceBus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend:
        await backend.queue(name, lock=20, max_deliveries=3).receive()
    async with tenure.connect(without_manage(server, monkeypatch, "&lock=20")) as backend:
        queue = backend.queue(name)
        await queue.send(b"a")
        await queue.send(b"later", delay=600)
        [message] = await queue.receive(wait=30)
        assert (await queue.stats()).locked == 1
        await message.renew()
        await message.complete()
        stats = await queue.stats()
        assert (stats.ready, stats.delayed, stats.dead) == (0, 1, 0)
        assert await queue.purge() == 1
        handled: list[bytes] = []

        async def handle(message: tenure.Message) -> None:
            handled.append(message.body)

        await queue.send(b"b")
        await queue.consume(handle, until_empty=True, sigterm=False)
        assert handled == [b"b"]
        await queue.send_batch([tenure.Outgoing(f"{number}".encode()) for number in range(4)])
        received: list[tenure.Message] = []
        while len(received) < 4:
            received += await queue.receive(4 - len(received), wait=30)
        one, two, three, four = received
        await one.abandon(delay=600.0)
        await two.dead_letter("bad")
        await three.defer()
        await four.give_back()
        [again] = await queue.receive_deferred(three.sequence)
        await again.complete()
        assert [one.body for one in await queue.dead_letters.peek()] == [b"1"]
        assert await queue.dead_letters.redrive() == 1
        assert sorted([one.body for one in await queue.peek()]) == [b"0", b"1", b"3"]
        assert await backend.queues() == [name]
        with pytest.raises(ConfigError, match="create=yes"):
            await queue.delete()
        with pytest.raises(ConfigError, match="settings of"):
            await queue.declare(max_deliveries=4)
        with pytest.raises(ConfigError, match=r"has no queue 'missing'"):
            await backend.queue("missing").send(b"a")
        facts = {fact.name: fact for fact in (await backend.diagnose()).facts}
        assert "no Manage" in facts["rights"].value


async def test_sessions_need_no_manage(server: ServiceBus, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend:
        await backend.queue(name).send(b"a", session="s")
    async with tenure.connect(without_manage(server, monkeypatch)) as backend:
        async with backend.queue(name).session() as session:
            [message] = await session.receive()
            await session.set_state(b"state")
            await session.renew()
            await message.abandon()
            [message] = await session.receive()
            await message.complete()
        async with backend.queue(name).session("s") as session:
            assert session.state == b"state"


async def test_a_lock_that_is_not_known_is_taken_for_the_shortest(
    server: ServiceBus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend:
        await backend.queue(name).receive()
    async with tenure.connect(without_manage(server, monkeypatch)) as backend:
        queue = backend.queue(name)
        await queue.stats()
        assert (await backend._connection.opened.broker.settings(name)).lock == 5.0  # type: ignore[union-attr]


async def test_settings_of_an_entity_are_respected(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend:
        await backend.queue(name, max_deliveries=3).receive()
    url = server.url.replace("&create=yes", "")
    async with tenure.connect(url) as backend:
        with pytest.raises(ConfigError, match="max_deliveries is 3, not 4"):
            await backend.queue(name, max_deliveries=4).receive()
        await backend.queue(name, max_deliveries=3).receive()
        with pytest.raises(ConfigError, match="portal"):
            await backend.queue(name).declare(max_deliveries=4)


async def test_a_wrong_key_is_a_config_error(server: ServiceBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG", connection_string(server.port, key="wrong"))
    url = f"servicebus:?connection_string_env=WRONG&admin_port={server.admin_port}"
    async with tenure.connect(url) as backend:
        with pytest.raises(ConfigError, match="does not permit this user") as caught:
            await backend.queue("q").send(b"a")
        assert "wrong" not in str(caught.value)


async def test_elections_are_refused(server: ServiceBus) -> None:
    async with tenure.connect(server.url) as backend:
        for ask in (lambda: backend.election("name"), backend.leaders, backend.vacancies):
            with pytest.raises(ConfigError, match="queues, but no elections"):
                answer = ask()
                if asyncio.iscoroutine(answer):
                    await answer
        assert (await backend.diagnose()).traits is None


# --- sessions and kinds ---


async def test_a_queue_has_sessions_or_not(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with tenure.connect(server.url) as backend:
        await backend.queue(name).send(b"a", session="s")
        with pytest.raises(ConfigError, match="requires sessions"):
            await backend.queue(name).receive()
        with pytest.raises(ConfigError, match="SessionId"):
            await backend.queue(name).send(b"plain")
        async with backend.queue(name).session() as session:
            [message] = await session.receive()
            await message.complete()
        plain = f"{name}-plain"
        await backend.queue(plain).send(b"a")
        with pytest.raises(ConfigError, match="not require sessions"):
            async with backend.queue(plain).session("s"):
                pass


async def test_a_session_is_lost_with_its_link(own: ServiceBus) -> None:
    async with opened(own) as backend:
        broker = backend.broker
        await broker.send("q", [Outgoing(b"a", session="s")])
        held = await broker.accept("q", None, 30)
        assert isinstance(held, tuple)
        claim = await broker.receive_session(held, 1)  # type: ignore[arg-type]
        own.control("drop")
        lost = lambda: backend.broker._receipts.find_session(held) is None  # type: ignore[arg-type]  # noqa: E731
        await until(lost)
        assert list(await broker.renew([held], 30)) == [LAPSED]  # type: ignore[list-item]
        assert list(await broker.settle([Settlement(claim.deliveries[0], COMPLETE)])) == [LAPSED]  # type: ignore[union-attr]


# --- links that are lost ---


@pytest.mark.parametrize("how", ["detach", "drop", "close"])
async def test_a_message_is_settled_by_its_token_when_its_link_is_gone(own: ServiceBus, how: str) -> None:
    async with opened(own) as backend:
        broker = backend.broker
        await broker.send("q", [Outgoing(b"%d" % number) for number in range(4)])
        claim = await broker.receive("q", 4, 30)
        own.control(how, "q" if how == "detach" else "")
        link = backend._namespace._existing
        await until(lambda: link("receive", "q") is None)
        verdicts: list[Verdict] = [COMPLETE, Abandon(), COMPLETE, COMPLETE]
        answers: Sequence[object] = ()
        for _ in range(3):  # a connection that breaks under a question is a "don't know"
            try:
                answers = await broker.settle(
                    [Settlement(one, verdict) for one, verdict in zip(claim.deliveries, verdicts, strict=True)]
                )
            except Unavailable:
                continue
            break
        assert list(answers) == [Settled()] * 4
        [again] = (await broker.receive("q", 4, 30)).deliveries
        assert (again.body, again.delivery_count) == (b"1", 2)


async def test_a_lock_that_the_service_gave_to_another_cancels_the_handler(own: ServiceBus) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise

    async with tenure.connect(own.url) as backend:
        queue = backend.queue("q", lock=5)
        await queue.send(b"a")
        consuming = asyncio.create_task(queue.consume(handle, sigterm=False))
        await asyncio.wait_for(begun.wait(), 10)
        own.control("take-lock", "q")
        await asyncio.wait_for(ended.wait(), 5)  # at the next renewal, and not when the lock would have ended
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)


async def test_a_consumer_goes_on_after_ten_idle_minutes(own: ServiceBus) -> None:
    handled: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    async with tenure.connect(own.url) as backend, tenure.connect(own.url) as other:
        queue = backend.queue("q")
        await queue.receive()
        consuming = asyncio.create_task(queue.consume(handle, sigterm=False))
        for body in (b"1", b"2"):
            await other.queue("q").send(body)
            await until(lambda body=body: body in handled)  # type: ignore[misc]
            own.control("detach", "q")
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)


async def test_throttling_is_no_answer(own: ServiceBus) -> None:
    async with opened(own) as backend:
        broker = backend.broker
        await broker.send("q", [Outgoing(b"a")])
        own.control("throttle", 1)
        with pytest.raises(Unavailable, match="busy or throttles"):
            await broker.send("q", [Outgoing(b"b")])
        [got] = (await broker.receive("q", 1, 30)).deliveries
        for verb in (lambda: broker.renew([got], 30), lambda: broker.settle([Settlement(got, COMPLETE)])):
            own.control("throttle", 1)
            with pytest.raises(Unavailable, match="busy or throttles"):
                await verb()
        assert list(await broker.settle([Settlement(got, COMPLETE)])) == [Settled()]  # by its token


# --- credit and hints ---


async def test_a_claim_leaves_no_credit_behind(own: ServiceBus) -> None:
    async with opened(own) as backend, opened(own) as other:
        assert (await backend.broker.receive("q", 10, 30)).deliveries == ()
        assert own.control("credit", "q") == "0"
        await backend.broker.send("q", [Outgoing(b"a")])
        assert len((await other.broker.receive("q", 10, 30)).deliveries) == 1


async def test_what_gave_a_hint_is_handed_back_if_nobody_takes_it(
    own: ServiceBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "HOLD", 0.2)
    async with opened(own) as backend, opened(own) as other:
        await backend.broker.receive("q", 1, 30)
        hints = backend.broker.hints("q")
        await asyncio.wait_for(anext(hints), 10)
        await until(lambda: own.control("credit", "q") == "1")
        await other.broker.send("q", [Outgoing(b"a")])
        await asyncio.wait_for(anext(hints), 10)

        async def has_come() -> bool:
            claim = await other.broker.receive("q", 1, 30)
            return [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"a", 1)]  # uncounted

        await until(has_come)


async def test_a_delay_is_a_scheduled_copy(server: ServiceBus, name: str) -> None:
    name = entity_of(name)
    async with opened(server) as backend, native(server) as client:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"a", id="a", headers={"n": 1}, reply_to="r")])
        [got] = (await broker.receive(name, 1, 30)).deliveries
        assert list(await broker.settle([Settlement(got, Abandon(delay=600))])) == [Settled()]
        async with client.get_queue_receiver(name) as receiver:
            [shown] = await receiver.peek_messages(10, sequence_number=1)
            assert shown.state.name == "SCHEDULED"
            assert shown.message_id != "a"  # else it would be dropped as a duplicate
            due = shown.scheduled_enqueue_time_utc
            assert due is not None
        [live] = await broker.peek(name, EVERY_LIVE, 10)
        assert (live.id, live.state, dict(live.headers), live.reply_to) == ("a", "delayed", {"n": 1}, "r")
        assert live.due_at == due.timestamp()


async def test_a_copy_counts_on(own: ServiceBus) -> None:
    async with opened(own) as backend:
        broker = backend.broker
        await broker.declare("q", {"max_deliveries": 2})
        await broker.send("q", [Outgoing(b"a", id="a")])
        [got] = (await broker.receive("q", 1, 30)).deliveries
        await broker.settle([Settlement(got, Abandon(delay=5))])
        own.turn(6)
        [again] = (await broker.receive("q", 1, 30)).deliveries
        assert (again.id, again.delivery_count) == ("a", 2)
        assert list(await broker.settle([Settlement(again, Abandon(delay=5))])) == [Settled(dead=True)]
        [dead] = await broker.peek_dead("q", EVERYTHING, 10)
        assert (dead.id, dead.reason, dead.delivery_count) == ("a", MAX_DELIVERIES, 2)


async def test_callers_of_several_loops_share_a_backend(own: ServiceBus) -> None:
    async with opened(own) as backend:
        await backend.broker.send("q", [Outgoing(b"a"), Outgoing(b"b")])
        found: list[bytes] = []

        async def work() -> None:
            [got] = (await backend.broker.receive("q", 1, 30)).deliveries
            found.append(got.body)
            assert list(await backend.broker.settle([Settlement(got, COMPLETE)])) == [Settled()]

        threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert sorted(found) == [b"a", b"b"]


async def test_requests_are_answered(own: ServiceBus) -> None:
    async with tenure.connect(own.url) as backend, tenure.connect(own.url) as other:

        async def answer(message: tenure.Message) -> None:
            await message.reply(message.body.upper())

        await backend.queue("q").receive()
        consuming = asyncio.create_task(backend.queue("q").consume(answer, sigterm=False))
        reply = await other.queue("q").request(b"hello", timeout=20)
        assert reply.body == b"HELLO"
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)


async def test_the_worker_of_the_sample(own: ServiceBus) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "servicebus_worker.py"

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(example),
            *arguments,
            env={**os.environ, "TENURE_URL": own.url},
            stdout=asyncio.subprocess.PIPE,
        )

    sender = await start("send", "one", "poison")
    assert await sender.wait() == 0
    worker = await start()
    assert worker.stdout is not None
    async with asyncio.timeout(60):
        line = (await worker.stdout.readline()).decode()
    assert line == f"{worker.pid} has handled one, delivery 1\n"
    async with tenure.connect(own.url) as backend:

        async def is_dead() -> bool:
            return (await backend.queue("orders").stats()).dead == 1

        await until(is_dead)
        [letter] = await backend.queue("orders").dead_letters.peek()
        assert (letter.body, letter.reason) == (b"poison", "poison")
    worker.send_signal(signal.SIGINT)
    assert await worker.wait() == 0


# --- pure parts ---


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("servicebus://ns", "no namespace"),
        ("servicebus://namespace/queue", "has a path"),
        ("servicebus:", "AZURE_SERVICEBUS_CONNECTION_STRING is not set"),
        ("servicebus://namespace?lock=1", "from 5 to 300"),
        ("servicebus://namespace?creat=yes", "create"),
        ("servicebus:?connection_string_env=BAD", "can't be read"),
        ("servicebus:?connection_string_env=HALF", "incomplete"),
        ("servicebus:?connection_string_env=ENTITY", "for the queue 'orders' alone"),
        ("servicebus://another?connection_string_env=GOOD", "remove one of them"),
    ],
)
def test_addresses_that_are_refused(url: str, message: str) -> None:
    key = "SharedAccessKeyName=policy;SharedAccessKey=s3cret"
    env = {
        "BAD": "nonsense",
        "HALF": "Endpoint=sb://namespace.servicebus.windows.net/",
        "ENTITY": f"Endpoint=sb://namespace.servicebus.windows.net/;{key};EntityPath=orders",
        "GOOD": f"Endpoint=sb://namespace.servicebus.windows.net/;{key}",
    }
    with pytest.raises(ConfigError, match=message) as caught:
        address_of(Url.parse(url), env)
    assert "s3cret" not in str(caught.value)


def test_addresses() -> None:
    key = "SharedAccessKeyName=policy;SharedAccessKey=s3cret"
    text = f"Endpoint=sb://namespace.servicebus.windows.net/;{key}"
    address, _ = address_of(Url.parse("servicebus:"), {"AZURE_SERVICEBUS_CONNECTION_STRING": text})
    assert (address.host, address.login) == ("namespace.servicebus.windows.net", "policy policy")
    assert "s3cret" not in repr(address)
    address, _ = address_of(Url.parse("servicebus://namespace"), {})
    assert (address.host, address.login) == ("namespace.servicebus.windows.net", "identity")
    address, options = address_of(Url.parse("servicebus://127.0.0.1:5672?emulator=yes"), {})
    assert (address.host, address.emulator, options.create) == ("127.0.0.1:5672", True, False)


REAL = "Endpoint=sb://namespace.servicebus.windows.net/"
POLICY = "SharedAccessKeyName=policy;SharedAccessKey=s3cret"
EMULATED = "UseDevelopmentEmulator=true"


@pytest.mark.parametrize(
    "text",
    [
        f"{REAL};{POLICY};{EMULATED}",
        f"{REAL};SharedAccessKeyName=policy;SharedAccessKey={EMULATOR_KEY};{EMULATED}",
        f"{REAL};SharedAccessSignature=sig=s3cret;{EMULATED}",
        f"{REAL.replace('windows.net', 'chinacloudapi.cn:5672')};{POLICY};usedevelopmentemulator=True",
        f"Endpoint=sb://gate.example;{POLICY};{EMULATED}",
        f"Endpoint=sb://8.8.8.8:5672;{POLICY};{EMULATED}",
    ],
)
def test_a_real_namespace_is_not_asked_in_clear_text(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is to be asked without TLS, as an emulator.*remove UseDevelopmentEm"
    ) as caught:
        address_of(Url.parse("servicebus:"), {"AZURE_SERVICEBUS_CONNECTION_STRING": text})
    assert "s3cret" not in str(caught.value)


def test_a_real_namespace_is_no_emulator() -> None:
    with pytest.raises(ConfigError, match=r"namespace\.servicebus\.windows\.net is to be asked without TLS"):
        address_of(Url.parse("servicebus://namespace.servicebus.windows.net?emulator=yes"), {})


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("servicebus-emulator", "s3cret"),
        ("10.0.0.7:5672", "s3cret"),
        ("[::1]:5672", "s3cret"),
        ("emulator.example", EMULATOR_KEY),
    ],
)
def test_an_emulator_needs_no_tls(host: str, key: str) -> None:
    text = f"Endpoint=sb://{host};SharedAccessKeyName=policy;SharedAccessKey={key};{EMULATED}"
    address = connected(Secret(text))
    assert (address.host, address.emulator) == (host, True)


@pytest.mark.parametrize(
    "text",
    [
        f"Endpoint=sb://127.0.0.1;{POLICY};{EMULATED};HostName={REAL[9:]}",
        f"Endpoint={REAL[9:]};endpoint={REAL[9:]};Endpoint=sb://127.0.0.1;{POLICY};{EMULATED}",
    ],
)
def test_the_library_connects_to_no_other_host_than_the_one_that_was_checked(text: str) -> None:
    """Its own parser knows a further word for the host, and prefers another one where one is given twice."""
    given = connected(Secret(text)).connection_string
    assert given is not None
    client = ServiceBusClient.from_connection_string(given.reveal())
    assert (client.fully_qualified_namespace, client._config.use_tls) == ("127.0.0.1", False)


async def test_all_links_share_the_authorities_of_this_machine(
    server: ServiceBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority("of this machine").certificate))
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def noted(*given: Any, **named: Any) -> ssl.SSLContext:
        made.append(make(*given, **named))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", noted)
    monkeypatch.setenv("ELSEWHERE", f"{REAL};{POLICY}")
    namespace = servicebus.open(Url.parse("servicebus:?connection_string_env=ELSEWHERE"))
    try:
        client = namespace.broker._namespace._client_here()
        found = [client._ssl_context, *(client.get_queue_sender(name)._config.ssl_context for name in ("a", "b"))]
    finally:
        await namespace.close()
    [context] = made
    assert found == [found[0]] * 3
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert "of this machine" in str(context.get_ca_certs())
    async with opened(server) as elsewhere:  # an emulator, without TLS
        for name in ("a", "b"):
            await elsewhere.broker.send(name, [Outgoing(b"")])
    assert made == [context]


async def test_schedules_are_in_an_entity_that_is_not_listed(own: ServiceBus) -> None:
    async with opened(own) as backend:
        broker = backend.broker
        assert (await broker.advance("orders", "s", None, "1")).is_done
        assert (await broker.advance(SCHEDULES, "s", None, "2", [Outgoing(b"a", id="a")])).is_done
        assert await broker.names() == ["orders", SCHEDULES]
        entities = [entity for entity, _ in await broker._run(broker.administration.queues)]
        assert sorted(entities) == ["orders", SCHEDULES, entity_of(SCHEDULES)]
        assert [one.body for one in (await broker.receive(SCHEDULES, 10, 30.0)).deliveries] == [b"a"]
        await broker.delete(SCHEDULES, force=True)
        assert (await broker.schedules(SCHEDULES)).records == {}
        assert (await broker.schedules("Orders")).records == {"s": "1"}


async def test_schedules_need_no_manage_where_their_entity_is(own: ServiceBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(own) as backend:
        await backend.broker.send("orders", [Outgoing(b"")])
        url = without_manage(own, monkeypatch)
        other = servicebus.open(Url.parse(url))
        assert (await other.broker.schedules("orders")).records == {}
        with pytest.raises(ConfigError, match=f"has no queue '{SCHEDULES}', in which tenure keeps schedules"):
            await other.broker.advance("orders", "s", None, "1")
        assert (await backend.broker.advance("orders", "s", None, "1")).is_done
        assert (await other.broker.advance("orders", "s", "1", "2", [Outgoing(b"a", id="a")])).is_done
        assert (await backend.broker.schedules("orders")).records == {"s": "2"}
        with pytest.raises(ConfigError, match="has no queue 'missing'"):
            await other.broker.advance("missing", "s", None, "1")
        assert (await backend.broker.schedules("missing")).records == {}
        await other.close()


async def test_a_schedule_that_advances_while_its_queue_is_deleted_stays(
    own: ServiceBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(own) as backend, opened(own) as other:
        broker = backend.broker
        for schedule in ("idle", "busy"):
            assert (await broker.advance("orders", schedule, None, "1")).is_done
        forget = broker._kept.forget

        async def advance_and_forget(queue: str, texts: Mapping[str, str]) -> None:
            request = asyncio.ensure_future(asyncio.wrap_future(done))
            loop.call_soon_threadsafe(go_on.set)
            await request
            await forget(queue, texts)

        loop, go_on = asyncio.get_running_loop(), asyncio.Event()
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        monkeypatch.setattr(broker._kept, "forget", advance_and_forget)
        deleting = asyncio.ensure_future(broker.delete("orders"))
        await go_on.wait()
        assert (await other.broker.advance("orders", "busy", "1", "2")).is_done
        done.set_result(None)
        await deleting
        assert (await other.broker.schedules("orders")).records == {"busy": "2"}


def test_names() -> None:
    assert entity_of("Orders.v1/eu_west") == "Orders.v1/eu_west"
    assert entity_of("größe") != entity_of("grösse")
    assert entity_of(entity_of("größe")) != entity_of("größe")  # what looks generated is generated
    assert subscription_of("news/Subscriptions/first") == ("news", "first")
    assert (subscription_of("news/first"), may_be_subscription("news/first")) == (None, ("news", "first"))


def test_portions_of_a_transfer() -> None:
    def sized(*sizes: int) -> list[Encoded]:
        return [Encoded(bytes(size)) for size in sizes]

    def sizes_of(messages: list[Encoded], size_max: int, batch_max: int) -> list[list[int]]:
        return [[len(one.data) for one in portion] for portion in portions(messages, size_max, batch_max)]

    assert sizes_of(sized(*[30_000] * 10), 100_000, 100_000) == [[30_000] * 3] * 3 + [[30_000]]
    assert sizes_of(sized(1, 200_000, 2, 3), 300_000, 100_000) == [[1], [200_000], [2, 3]]  # a large one goes alone
    with pytest.raises(MessageRefused, match="message 1 of 2"):
        portions(sized(0, 100_000), 100_000, 100_000)


def test_the_beginning_of_a_lock_is_told_from_another_one() -> None:
    times = LockTimes()
    assert times.began(1_000.0, asked_at=0.0, read_at=50.0) == 0.0  # nothing is known: at worst, when it was asked for
    times.learn(locked_until=1_030.0, asked_at=100.0, now=100.2)
    assert times.began(1_040.0, asked_at=50.0, read_at=110.5) == pytest.approx(110.0, abs=0.02)
    assert times.began(1_040.0, asked_at=110.2, read_at=110.5) == 110.2  # never before it was asked for
    assert times.began(1_300.0, asked_at=50.0, read_at=120.0) == 120.0  # and never after it was read
