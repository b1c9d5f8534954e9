"""Queues in NATS: beside other programs on the same streams, across deaths in the middle, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import ParseResult

import nats as driver
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import APIError

import tenure
from tenure._backends import nats
from tenure._backends.nats import receiving
from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.message_format import HEADERS_TOO_LONG
from tenure._backends.nats.messages import Found
from tenure._backends.nats.receiving import TOO_LARGE_FOR, Receiving
from tenure._backends.nats.storing import Storing
from tenure._backends.nats.transport import Transport
from tenure._checks import LONGEST
from tenure._lease import NoAnswer
from tenure._queue.broker import EVERY_LIVE, EVERYTHING
from tenure._queue.failures import Failure
from tenure._queue.message import MAX_DELIVERIES, Delivery, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Settled,
    Settlement,
    Verdict,
)
from tenure._url import Url
from tenure.errors import ConfigError, LockLost, MessageRefused, Unavailable
from tenure.testing import until
from tests.clocks import TurnedClock
from tests.servers import Nats, private, shared
from tests.servers.turned_process import CAN_TURN, TurnedProcess
from tests.stores.nats.wall_clock import turn_wall_clock

LOCK = 10.0 if CAN_TURN else 1.0
LATE = 1.1 * LOCK
SHORT = 1.0  # of a lock whose end is awaited in real time
CLOCK = TurnedClock()


@pytest.fixture
def server() -> Nats:
    return shared(Nats, is_turned=True)


@pytest.fixture(autouse=True)
def wall_clock(server: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_wall_clock(monkeypatch, lambda: server.ahead)


async def pass_time(seconds: float) -> None:
    """Turn the clocks of the server and of the clients."""
    if CAN_TURN:
        CLOCK.turned += seconds
        await asyncio.to_thread(shared(Nats, is_turned=True).turn, seconds)
    else:
        await asyncio.sleep(seconds)


@pytest.fixture
def url(server: Nats, request: pytest.FixtureRequest) -> str:
    """Return the URL of a part of the server that no other test uses."""
    return f"{server.url}?prefix=t{abs(hash(request.node.nodeid)) % 10**9}-{os.getpid()}"


@pytest_asyncio.fixture
async def broker(url: str) -> AsyncIterator[nats.NatsBroker]:
    backend = nats.open(Url.parse(url), clock=CLOCK)
    yield backend.broker
    await backend.close()


@pytest_asyncio.fixture
async def native(server: Nats) -> AsyncIterator[JetStreamContext]:
    client = await driver.connect(server.url)
    yield client.jetstream()
    await client.close()


def prefix_of(url: str) -> str:
    return url.partition("prefix=")[2]


async def settle(broker: nats.NatsBroker, held: Any, verdict: Verdict) -> list[object]:
    return list(await broker.settle([Settlement(one, verdict) for one in held]))


async def receive(broker: nats.NatsBroker, limit: int = 10) -> list[Delivery]:
    return list((await broker.receive("orders", limit, LOCK)).deliveries)


# --- beside other programs ---------------------------------------------------------------------------------------


async def test_what_another_program_sends_is_received_unchanged(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    body = bytes(range(256))
    for subject in (f"{prefix_of(url)}.orders", f"{prefix_of(url)}.orders.eu.1"):  # its own, and any below
        await native.publish(subject, body, headers={"Nats-Msg-Id": f"id of {subject}", "tenant": "blue; é", "n": "1"})
        [got] = await receive(broker)
        assert (got.body, got.id, dict(got.headers)) == (body, f"id of {subject}", {"tenant": "blue; é", "n": "1"})
        assert (got.delivery_count, got.reply_to, got.correlation_id) == (1, None, None)
        assert await settle(broker, [got], COMPLETE) == [Settled()]
    assert await broker.stats("orders") == Stats()


async def test_another_programs_message_is_abandoned_and_dead_lettered_like_any_other(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK, "max_deliveries": 3})
    for number in range(3):  # on one subject
        await native.publish(f"{prefix_of(url)}.orders", b"%d" % number, headers={"tenant": "blue"})
    first = await receive(broker)
    assert await settle(broker, first, Abandon()) == [Settled()] * 3
    again = await receive(broker)
    assert [(one.sequence, one.id, one.body, one.delivery_count) for one in again] == [
        (one.sequence, one.id, one.body, 2) for one in first
    ]
    await pass_time(LATE)  # their locks end
    third = await receive(broker)
    assert [one.delivery_count for one in third] == [3] * 3
    assert await settle(broker, third, DeadLetter("bad")) == [Settled()] * 3
    dead = await broker.peek_dead("orders", EVERYTHING, 10)
    assert [(one.body, dict(one.headers), one.reason, one.delivery_count) for one in dead] == [
        (b"%d" % number, {"tenant": "blue"}, "bad", 3) for number in range(3)
    ]
    assert await broker.redrive("orders", EVERYTHING, None) == 3
    assert sorted(one.body for one in await receive(broker)) == [b"0", b"1", b"2"]


async def test_another_program_reads_what_is_sent_and_acknowledges_it(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await broker.send(
        "orders", [Outgoing(b"\0\xff", id="x", headers={"tenant": "blue"}, correlation_id="c"), Outgoing(b"b")]
    )
    assert len(await receive(broker, 1)) == 1  # there is a consumer
    stream = f"{prefix_of(url)}_orders"
    [consumer] = (
        await native._jsm.consumers_info(stream) if hasattr(native, "_jsm") else await native.consumers_info(stream)
    )
    subscription = await native.pull_subscribe_bind(consumer.name, stream)
    [second] = await subscription.fetch(1, timeout=2)
    assert (second.data, second.headers) == (b"b", None)  # no envelope
    await second.ack_sync()
    await pass_time(LATE)  # our lock ends
    [first] = await subscription.fetch(1, timeout=2)
    assert first.data == b"\0\xff"
    assert first.headers == {"Nats-Msg-Id": "x", "tenant": "blue", "Tenure-Correlation-Id": "c"}
    await first.ack_sync()
    assert await broker.stats("orders") == Stats()


async def test_a_late_acknowledgement_of_another_program_does_nothing(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await broker.send("orders", [Outgoing(b"a")])
    assert await settle(broker, await receive(broker), Abandon()) == [Settled()]
    stream = f"{prefix_of(url)}_orders"
    [consumer] = await native.consumers_info(stream)
    subscription = await native.pull_subscribe_bind(consumer.name, stream)
    [theirs] = await subscription.fetch(1, timeout=2)
    await pass_time(LATE)
    [ours] = await receive(broker)
    assert ours.delivery_count == 3
    await theirs.ack_sync()  # NATS answers as if it had been in time
    assert await broker.stats("orders") == Stats(locked=1)
    await pass_time(LATE)
    [again] = await receive(broker)
    assert again.delivery_count == 4
    assert await settle(broker, [again], COMPLETE) == [Settled()]


# --- deaths in the middle ----------------------------------------------------------------------------------------


class Died(Exception):
    """Stands for the death of a process."""


@asynccontextmanager
async def dying(where: str) -> AsyncIterator[None]:
    """Inside the block, each call of a step of ``Storing`` ends as if the process had died before it."""

    async def die(*_: object) -> None:
        raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storing, where, die)
        yield


@pytest.mark.parametrize("others", ["", "beside it", "served"])
@pytest.mark.parametrize("copy_is_done", [False, True])
async def test_an_original_that_was_left_behind_is_not_delivered(
    url: str, native: JetStreamContext, copy_is_done: bool, others: str
) -> None:
    """Nor if *others* have sent something to its subject, so that its copy has another one."""
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await broker.send("orders", [Outgoing(b"a")])
    held = await receive(broker)
    if others:
        found = broker._receipts.find(held[0])
        assert found is not None
        await native.publish(found.found.subject, b"theirs")
    async with dying("_replaces" if others else "_remove"):
        with pytest.raises(Died):
            await settle(broker, held, Abandon())
    received = await receive(other)
    [copy] = [one for one in received if one.body == b"a"]
    theirs = [one for one in received if one is not copy]
    assert len(theirs) == bool(others)
    assert copy.delivery_count == 2
    if others == "served":
        assert await settle(other, theirs, COMPLETE) == [Settled()]
    if copy_is_done:
        assert await settle(other, [copy], COMPLETE) == [Settled()]
    else:
        assert await settle(broker, held, COMPLETE) == [LAPSED]  # it was abandoned
    await pass_time(LATE)  # the original is delivered again
    got = await receive(other)
    ours = [one for one in got if one.body == b"a"]
    assert [one.delivery_count for one in ours] == ([] if copy_is_done else [3])
    assert await settle(other, got, COMPLETE) == [Settled()] * len(got)
    assert await other.stats("orders") == Stats()
    for backend in backends:
        await backend.close()


async def test_a_message_that_was_marked_as_dead_is_moved_by_the_next_claim(url: str) -> None:
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await broker.send("orders", [Outgoing(b"a", id="a")])
    held = await receive(broker)
    async with dying("finish"):
        with pytest.raises(Died):
            await settle(broker, held, DeadLetter("bad"))
    assert await settle(broker, held, COMPLETE) == [LAPSED]  # it is decided
    assert await receive(other) == []
    [dead] = await other.peek_dead("orders", EVERYTHING, 10)
    assert (dead.id, dead.reason) == ("a", "bad")
    assert await other.stats("orders") == Stats(dead=1)
    for backend in backends:
        await backend.close()


async def test_a_lock_ends_with_the_server_that_gave_it() -> None:
    with private(Nats) as server:
        backend = nats.open(Url.parse(server.url))
        broker = backend.broker
        await broker.send("orders", [Outgoing(b"a")])
        held = (await broker.receive("orders", 10, SHORT)).deliveries
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

        async def answers() -> bool:
            try:
                assert await settle(broker, held, COMPLETE) == [LAPSED]
            except Unavailable:
                return False
            return True

        await until(answers)
        await until(lambda: _holds(broker), within=5 * SHORT)
        await backend.close()


async def _holds(broker: nats.NatsBroker) -> bool:
    return await settle(broker, await receive(broker), COMPLETE) == [Settled()]


STOPPED = """
import asyncio, os, signal, sys, tenure

async def main(url):
    async with tenure.connect(url) as backend:
        [message] = await backend.queue("orders", lock=float(sys.argv[2])).receive(wait=10)
        print("received", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for verb in (message.complete, message.abandon, message.renew):
            try:
                await verb()
                print(verb.__name__, "was accepted", flush=True)
            except tenure.LockLost:
                print("LockLost", flush=True)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_consumer_that_was_stopped_past_its_lock_can_settle_nothing(url: str) -> None:
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders", lock=LOCK)
        await queue.send(b"x")
        process = subprocess.Popen([sys.executable, "-c", STOPPED, url, str(LOCK)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "received\n"
            if CAN_TURN:  # also its own clock: to it, this is a suspend
                await asyncio.to_thread(TurnedProcess(process.pid).turn, LATE)
            await pass_time(LATE)
            [message] = await queue.receive(wait=30)
            assert message.delivery_count == 2
            os.kill(process.pid, signal.SIGCONT)
            assert await asyncio.to_thread(process.stdout.read) == "LockLost\n" * 3
            await message.complete()
            assert await queue.stats() == Stats()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]


async def test_handlers_that_block_the_loop_lose_no_lock(url: str) -> None:
    deliveries: list[int] = []
    lost: list[BaseException] = []
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders", lock=SHORT)
        await queue.send_batch([Outgoing(b"%d" % number) for number in range(10)])

        async def block(message: tenure.Message) -> None:
            deliveries.append(message.delivery_count)
            await asyncio.sleep(0.1)  # until all ten have begun
            if len(deliveries) == 10 and message.body == b"0":
                time.sleep(3 * SHORT)  # this is what is tested

        await queue.consume(
            block, concurrency=10, until_empty=True, on_error=lambda _, error: lost.append(error), sigterm=False
        )
        assert await queue.stats() == Stats()
    assert deliveries == [1] * 10
    assert lost == []


# --- the pull that waits -----------------------------------------------------------------------------------------


async def test_a_message_that_no_claim_takes_is_given_back_uncounted(url: str) -> None:
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    hints = broker.hints("orders")
    await anext(hints)
    await other.send("orders", [Outgoing(b"a")])
    await anext(hints)  # it has come, and nobody claims it

    async def is_back() -> bool:
        return bool(await other.peek("orders", EVERY_LIVE, 10))

    await until(is_back)
    [got] = await receive(other)
    assert got.delivery_count == 1
    assert await settle(other, [got], COMPLETE) == [Settled()]
    for backend in backends:
        await backend.close()


async def test_a_message_that_came_by_itself_is_handed_out_without_a_renewal(url: str) -> None:
    backend = nats.open(Url.parse(url), clock=CLOCK)
    await backend.broker.declare("orders", {"lock": 30.0})
    hints = backend.broker.hints("orders")
    await anext(hints)
    await backend.broker.send("orders", [Outgoing(b"a")])
    await anext(hints)
    claim = await backend.broker.receive("orders", 10, 30.0)
    assert [one.body for one in claim.deliveries] == [b"a"]
    assert 0.0 < claim.age < 30.0 / 4  # its lock counts from before it was sent
    assert await settle(backend.broker, claim.deliveries, COMPLETE) == [Settled()]
    await backend.close()


async def test_a_consumer_is_woken_when_a_lock_or_a_delay_ends(url: str) -> None:
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await other.send("orders", [Outgoing(b"crashed")])
    assert len((await other.receive("orders", 10, SHORT)).deliveries) == 1
    hints = broker.hints("orders")
    assert await receive(broker) == []
    await anext(hints)
    found: list[bytes] = []
    began = time.monotonic()
    await other.send("orders", [Outgoing(b"delayed", delay=SHORT)])
    while len(found) < 2:
        got = await receive(broker)
        found += [one.body for one in got]
        await settle(broker, got, COMPLETE)
        if len(found) < 2:
            await asyncio.wait_for(anext(hints), 5.0)
    assert sorted(found) == [b"crashed", b"delayed"]
    assert time.monotonic() - began < 3 * SHORT
    for backend in backends:
        await backend.close()


# --- names ---


async def test_the_longest_names_are_kept_apart(broker: nats.NatsBroker) -> None:
    names = ["名" * 200, "名" * 199 + "x", "x" * 200, "a.b *>/" + "é" * 100]
    for name in names:
        await broker.send(name, [Outgoing(name.encode())])
        [got] = (await broker.receive(name, 10, LOCK)).deliveries
        assert got.body == name.encode()
        assert await settle(broker, [got], DeadLetter("bad")) == [Settled()]
    assert list(await broker.names()) == sorted(names)
    for name in names:
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert dead.body == name.encode()
        await broker.delete(name, force=True)
    assert list(await broker.names()) == []


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Outgoing(b"a", session="s"), "no sessions"),
        (Outgoing(b"a", priority=1), "no priorities"),
        (Outgoing(b"x" * 1_047_000), "1,048,576"),
    ],
    ids=["session", "priority", "large"],
)
async def test_a_message_that_nats_can_not_carry_is_refused(
    broker: nats.NatsBroker, message: Outgoing, words: str
) -> None:
    with pytest.raises(MessageRefused, match=f"message 1 of 2.*{words}"):
        await broker.send("orders", [Outgoing(b"first"), message])
    assert await broker.stats("orders") == Stats()


async def test_a_stream_of_another_program_with_the_same_subjects_is_refused(
    native: JetStreamContext, url: str
) -> None:
    await native.add_stream(name=f"theirs-{prefix_of(url)}", subjects=[f"{prefix_of(url)}.>"])
    async with tenure.connect(url) as backend:
        with pytest.raises(ConfigError, match="another stream with tenure's subjects"):
            await backend.queue("orders", lock=5.0).declare(lock=5.0)


async def test_a_message_that_the_stream_of_another_program_takes_is_not_answered_as_sent(
    native: JetStreamContext, url: str
) -> None:
    prefix = prefix_of(url)
    await native.add_stream(name=f"theirs-{prefix}", subjects=[f"{prefix}.orders.>"])
    async with tenure.connect(url) as backend:
        with pytest.raises(ConfigError, match=f"'theirs-{prefix}' has taken what is for '{prefix}_orders'"):
            await backend.queue("orders").send(b"x")


async def test_a_dead_letter_that_the_stream_of_another_program_takes_is_kept(
    native: JetStreamContext, url: str
) -> None:
    prefix = prefix_of(url)
    await native.add_stream(name=f"theirs-{prefix}", subjects=[f"{prefix}.orders=24dead.>"])
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders")
        await queue.send(b"x")
        [message] = await queue.receive(wait=5)
        await message.dead_letter("broken")
        for _ in range(3):  # it is moved by whoever meets it; their stream has refused, or kept, a copy by then
            with suppress(ConfigError):
                assert await queue.receive() == []
        await native.delete_stream(f"theirs-{prefix}")

        async def is_moved() -> bool:
            assert await queue.receive() == []
            return bool(await queue.dead_letters.peek())

        await until(is_moved)


async def test_a_message_that_two_streams_take_is_sent(
    native: JetStreamContext, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two domains, of which one audits: either may be the first to answer."""
    request_all = Connection.request_all

    async def audited(connection: Connection, *given: Any) -> list[Msg | None]:
        answers = await request_all(connection, *given)
        for one in answers:
            assert one is not None
            one.data = json.dumps({**json.loads(one.data), "stream": "audit", "seq": 7}).encode()
        return answers

    async with tenure.connect(url) as backend:
        queue = backend.queue("orders")
        first = await queue.send(b"x")
        monkeypatch.setattr(Connection, "request_all", audited)
        ids = [first, *await queue.send_batch([tenure.Outgoing(b"y"), tenure.Outgoing(b"z")])]
        monkeypatch.undo()
        got = [one.id for _ in ids for one in await queue.receive(wait=5)]
        assert got == ids


async def test_who_waits_for_a_connection_is_told_that_the_backend_is_closed(silent: str) -> None:
    """He is not cancelled: nobody has cancelled him, and he would end without a word."""
    backend = nats.open(Url.parse(f"nats://{silent}/"))
    sending, other = (asyncio.ensure_future(backend.broker.send("orders", [Outgoing(b"x")])) for _ in range(2))
    await until(lambda: backend._client._connecting)
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other
    await backend.close()
    with pytest.raises(Unavailable, match="is closed; connect again"):
        await sending


async def test_a_connection_that_comes_during_a_close_is_closed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The close is on another thread: it has begun when the connection is there, and has not found it."""
    opened, goes_on = asyncio.Event(), asyncio.Event()
    connections: list[Connection] = []
    connect = Client._connect

    async def connect_slowly(client: Client) -> Connection:
        connections.append(await connect(client))
        opened.set()
        await goes_on.wait()
        return connections[0]

    class ClosedMeanwhile(dict[asyncio.AbstractEventLoop, Connection]):
        def __setitem__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
            backend._client._closed, backend._client._connections = True, {}
            super().__setitem__(loop, connection)

    monkeypatch.setattr(Client, "_connect", connect_slowly)
    backend = nats.open(Url.parse(url))
    sending = asyncio.ensure_future(backend.broker.send("orders", [Outgoing(b"x")]))
    await opened.wait()
    backend._client._connections = ClosedMeanwhile()
    goes_on.set()
    with pytest.raises(Unavailable, match="is closed; connect again"):
        await sending
    await until(lambda: connections[0].is_lost)


async def test_a_close_does_not_wait_for_an_attempt_that_forgets_its_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before Python 3.12, where a wait forgets that it was cancelled if its answer comes at the same moment."""
    connect, begun, cancelled, goes_on = Transport.connect, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def connect_forgetfully(transport: Transport, uri: ParseResult, **given: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
        await goes_on.wait()
        await connect(transport, uri, **given)

    monkeypatch.setattr(Transport, "connect", connect_forgetfully)
    backend = nats.open(Url.parse(url))
    sending = asyncio.ensure_future(backend.broker.send("orders", [Outgoing(b"x")]))
    await begun.wait()
    await backend.close()
    with pytest.raises(Unavailable, match="is closed; connect again"):
        await sending
    await cancelled.wait()
    goes_on.set()
    [attempt] = backend._client._attempts
    connection = await attempt
    await until(lambda: connection.is_lost)


async def test_a_late_verdict_says_so(url: str) -> None:
    async with tenure.connect(url) as backend:
        queue = backend.queue("orders", lock=SHORT)
        await queue.send(b"x")
        [message] = await queue.receive(wait=5)
        await asyncio.sleep(1.1 * SHORT)
        with pytest.raises(LockLost):
            await message.complete()


# --- one beside another ------------------------------------------------------------------------------------------


async def test_a_redriven_message_that_fails_at_once_is_not_lost(url: str) -> None:
    """Its second death comes while the first dead letter is not removed yet."""
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await broker.send("orders", [Outgoing(b"a", id="a")])
    assert await settle(broker, await receive(broker), DeadLetter("first")) == [Settled()]
    removed, store_new = asyncio.Event(), Storing.store_new

    async def store_and_wait(self: Storing, *arguments: Any) -> None:
        await store_new(self, *arguments)
        if self is broker._storing:
            await removed.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storing, "store_new", store_and_wait)
        redriving = asyncio.create_task(broker.redrive("orders", EVERYTHING, None))

        async def fails_again() -> bool:
            return await settle(other, await receive(other), DeadLetter("second")) == [Settled()]

        await until(fails_again)
        removed.set()
        assert await redriving == 1
    [dead] = await other.peek_dead("orders", EVERYTHING, 10)
    assert (dead.id, dead.reason) == ("a", "second")
    for backend in backends:
        await backend.close()


async def test_dead_letters_of_several_queues_go_to_one(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    for queue in ("qa", "qb"):
        await broker.declare(queue, {"lock": LOCK})
        await native.publish(f"{prefix_of(url)}.{queue}", queue.encode())  # both have the number 1
        got = (await broker.receive(queue, 1, LOCK)).deliveries
        assert await settle(broker, got, DeadLetter("bad")) == [Settled()]
        assert await broker.redrive(queue, EVERYTHING, None, to="orders") == 1
    assert sorted(one.body for one in await receive(broker)) == [b"qa", b"qb"]


async def test_subjects_of_other_programs_that_look_like_ours_are_theirs(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    for number in range(3):
        await native.publish(
            f"{prefix_of(url)}.orders.m.eu", b"%d" % number, headers={"Tenure-State": '{"reason":"x"}'}
        )
    got = await receive(broker)
    assert await settle(broker, got, Abandon()) == [Settled()] * 3
    again = await receive(broker)
    assert sorted(one.body for one in again) == [b"0", b"1", b"2"]
    assert [one.delivery_count for one in again] == [2] * 3


async def test_a_renewal_beside_a_completion_leaves_no_copy(url: str) -> None:
    """Of a message that was delivered before, whose lock is renewed by storing it once more."""
    backend = nats.open(Url.parse(url), clock=CLOCK)
    broker = backend.broker
    for number in range(20):
        await broker.send("orders", [Outgoing(b"%d" % number, delay=0.001)])
        await asyncio.sleep(0.01)
        held = await receive(broker)
        while not held:
            held = await receive(broker)
        _, answers = await asyncio.gather(broker.renew(held, LOCK + number / 100), settle(broker, held, COMPLETE))
        assert answers == [Settled()]
        assert await broker.stats("orders") == Stats()
    await backend.close()


@pytest.mark.parametrize("verdict", [Abandon(), DeadLetter("bad")], ids=repr)
async def test_a_message_is_not_completed_after_a_verdict_that_was_decided(url: str, verdict: Verdict) -> None:
    """The answer to the first verdict was lost between its two steps."""
    backend = nats.open(Url.parse(url), clock=CLOCK)
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"a")])
    held = await receive(broker)
    async with dying("_remove"):
        with pytest.raises(Died):
            await settle(broker, held, verdict)
    assert await settle(broker, held, COMPLETE) == [LAPSED]
    await backend.close()


async def test_a_claim_that_is_given_up_leaves_nothing_locked(url: str) -> None:
    backends = [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await broker.send("orders", [Outgoing(b"%d" % number) for number in range(50)])
    assert len(await receive(broker, 50)) == 50
    await pass_time(LATE)  # they have to be stored again
    claiming = asyncio.create_task(other.receive("orders", 50, 60.0))
    for _ in range(30):
        await asyncio.sleep(0)
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    counts: list[int] = []

    async def all_are_back() -> bool:
        counts.extend(one.delivery_count for one in await receive(broker, 50))
        return len(counts) == 50

    await until(all_are_back, within=10 * LOCK)
    assert set(counts) == {2}
    for backend in backends:
        await backend.close()


async def test_a_lock_is_no_longer_if_its_copy_comes_late(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer learns of a message after its sender was answered; on a busy machine, the next request is faster."""
    pull, asked = Receiving.pull, []

    async def pull_before_copies(receiving: Receiving, *given: Any) -> tuple[list[Found], bool]:
        asked.append(given[-1])
        at_once = isinstance(given[-1], int)  # the last one is what is wanted, not how long it waits
        return ([], False) if at_once and len(asked) > 1 else await pull(receiving, *given)

    backend = nats.open(Url.parse(url), clock=CLOCK)
    await backend.broker.send("orders", [Outgoing(b"%d" % number) for number in range(3)])
    assert len(await receive(backend.broker)) == 3
    await pass_time(LATE)
    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "pull", pull_before_copies)
        patch.setattr(receiving, "JUST_SENT", 5.0)  # until all have come
        assert len(await receive(backend.broker)) == 3
    for connection in backend._client._connections.values():
        await connection.flush()  # they are put off without an answer
    await pass_time(LATE)
    assert [one.delivery_count for one in await receive(backend.broker)] == [3] * 3
    await backend.close()


async def test_what_a_claim_has_pulled_before_it_is_given_up_is_given_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up while it waits for the copy that it has stored, which somebody else has put off."""
    pull, backends = Receiving.pull, [nats.open(Url.parse(url), clock=CLOCK) for _ in range(2)]
    broker, other = (one.broker for one in backends)
    await broker.send("orders", [Outgoing(b"a")])
    assert len(await receive(broker, 1)) == 1
    await pass_time(LATE)
    pulls, is_waiting = 0, asyncio.Event()

    async def pull_beside(receiving: Receiving, *given: Any) -> tuple[list[Found], bool]:
        nonlocal pulls
        if receiving is broker._receiving:
            pulls += 1
            if pulls == 2:
                assert await receive(other, 1) == []
                await broker.send("orders", [Outgoing(b"b")])
            elif pulls == 3:
                is_waiting.set()
                await asyncio.Event().wait()
        return await pull(receiving, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Receiving, "pull", pull_beside)
        claiming = asyncio.ensure_future(receive(broker))
        await is_waiting.wait()
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
    found: list[Delivery] = []

    async def is_back() -> bool:
        found.extend(await receive(broker))
        return any(one.body == b"b" for one in found)

    await until(is_back)
    assert [one.delivery_count for one in found if one.body == b"b"] == [1]
    for backend in backends:
        await backend.close()


async def test_claims_that_fail_count_no_deliveries(url: str) -> None:
    """As on a server that is full for a while."""
    backend = nats.open(Url.parse(url), clock=CLOCK)
    broker = backend.broker
    await broker.declare("orders", {"lock": LOCK, "max_deliveries": 3})
    await broker.send("orders", [Outgoing(b"a")])
    assert len(await receive(broker)) == 1
    for _ in range(4):
        await pass_time(LATE)
        async with dying("replace"):
            with pytest.raises(Died):
                await receive(broker)
            await broker._receiving.has_returned("orders")  # and giving it back fails, too
    await pass_time(LATE)
    [got] = await receive(broker)
    assert got.delivery_count == 2
    await backend.close()


async def test_a_message_too_large_to_be_stored_again_holds_up_no_other(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await native.publish(f"{prefix_of(url)}.orders", b"x" * 1_048_576)
    await native.publish(f"{prefix_of(url)}.orders", b"small")
    large, small = await receive(broker)
    with pytest.raises(Unavailable, match="raise max_payload"):
        await settle(broker, [large], Abandon())
    assert await settle(broker, [small], Abandon()) == [Settled()]
    await pass_time(LATE)
    got = await receive(broker)
    assert [one.body for one in got] == [b"small"]
    for number in range(3):  # each time, it is put off for a minute, and stays
        assert await settle(broker, got, COMPLETE) == [Settled()]
        await broker.send("orders", [Outgoing(b"%d" % number)])
        await pass_time(TOO_LARGE_FOR + 1.0)
        got = await receive(broker)
        assert [one.body for one in got] == [b"%d" % number]
        assert (await broker.stats("orders")).locked == 2, "that one, and the one received"


@pytest.mark.parametrize("letter", ["ü", "\x01", "😀"], ids=["umlaut", "control", "emoji"])
async def test_a_message_that_fails_with_many_words_dies_at_its_last_delivery(
    broker: nats.NatsBroker, letter: str
) -> None:
    """JetStream takes 65,535 bytes of headers, and the whole history would take more."""
    await broker.declare("orders", {"lock": LOCK, "max_deliveries": 10})
    await broker.send("orders", [Outgoing(b"a"), Outgoing(b"wordy", headers={"tenant": "blue"}), Outgoing(b"b")])
    for number in range(1, 11):
        a, b, wordy = sorted(await receive(broker), key=lambda one: one.body)
        assert (wordy.delivery_count, a.delivery_count, b.delivery_count) == (number, 1, 1)
        verdicts: list[Verdict] = [GIVE_BACK, Abandon(error=Failure.of(ValueError(letter * 6_000))), GIVE_BACK]
        settlements = [Settlement(one, verdict) for one, verdict in zip((a, wordy, b), verdicts, strict=True)]
        assert list(await broker.settle(settlements)) == [Settled(), Settled(dead=number == 10), Settled()]
    assert sorted(one.body for one in await receive(broker)) == [b"a", b"b"]
    [dead] = await broker.peek_dead("orders", EVERYTHING, 9)
    assert (dead.body, dead.headers, dead.reason, dead.delivery_count) == (
        b"wordy", {"tenant": "blue"}, MAX_DELIVERIES, 10,
    )  # fmt: skip
    assert dead.history[-1].number == 10
    assert dead.error is not None
    assert dead.error.message.startswith(Failure.of(ValueError(letter * 6_000)).message[:400])


LONG_VERDICT = DeadLetter("😀" * 255, "😀" * 6_000, Failure("ValueError", "😀" * 4_096, "😀" * 16_000))


@pytest.mark.parametrize("id_", [None, "17", "😀" * 255], ids=["made up", "short", "long"])
async def test_headers_that_leave_no_room_to_store_a_message_again_are_refused(
    broker: nats.NatsBroker, id_: str | None
) -> None:
    def message(size: int) -> Outgoing:
        return Outgoing(b"", id=id_, headers={"long": "x" * size}, reply_to="ü" * 200, correlation_id="ü" * 255)

    await broker.declare("orders", {"lock": LOCK, "max_deliveries": 10})
    with pytest.raises(
        MessageRefused, match=r"takes 65,535, of which 4,096 are kept .* put what is large into the"
    ) as no:
        await broker.send("orders", [Outgoing(b"short"), message(65_000)])
    assert no.value.index == 1
    takes = int(str(no.value).partition("headers take ")[2].partition(" bytes")[0].replace(",", ""))
    size = 65_000 - (takes - (65_535 - 4_096))
    with pytest.raises(MessageRefused, match=f"headers take {65_535 - 4_096 + 1:,} bytes"):
        await broker.send("orders", [message(size + 1)])
    await broker.send("orders", [message(size)])
    for _ in range(2):
        assert await settle(broker, await receive(broker), Abandon(error=LONG_VERDICT.error)) == [Settled()]
    assert len(await receive(broker)) == 1
    await pass_time(LATE)
    got = await receive(broker)
    assert got[0].delivery_count == 4
    assert await settle(broker, got, LONG_VERDICT) == [Settled()]
    [dead] = await broker.peek_dead("orders", EVERYTHING, 9)
    assert (dead.headers, dead.reason) == ({"long": "x" * size}, LONG_VERDICT.reason)
    [letter] = (await broker.receive("orders$dead", 9, LOCK)).deliveries
    assert await settle(broker, [letter], Abandon()) == [Settled()]
    assert await broker.redrive("orders", EVERYTHING, None) == 1
    assert await settle(broker, await receive(broker), COMPLETE) == [Settled()]


def full_headers(more: int = 0) -> dict[str, str]:
    return {"x": "a" * (65_535 - len("NATS/1.0\r\nx: \r\n\r\n") + more)}


@pytest.mark.parametrize(
    ("verdict", "answer", "reason"),
    [
        (COMPLETE, Settled(), None),
        (Abandon(), Settled(dead=True), HEADERS_TOO_LONG),
        (Abandon(delay=60.0), Settled(dead=True), HEADERS_TOO_LONG),
        (GIVE_BACK, Settled(dead=True), HEADERS_TOO_LONG),
        (DeadLetter("bad", "no number"), Settled(), "bad"),
        (None, None, HEADERS_TOO_LONG),
    ],
    ids=str,
)
async def test_a_message_of_another_program_whose_headers_leave_no_room_is_never_locked_for_ever(
    broker: nats.NatsBroker,
    native: JetStreamContext,
    url: str,
    verdict: Verdict | None,
    answer: Settled | None,
    reason: str | None,
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    with pytest.raises(APIError, match="header size exceeds maximum"):
        await native.publish(f"{prefix_of(url)}.orders", b"longer", headers=full_headers(1))
    await native.publish(f"{prefix_of(url)}.orders", b"long", headers=full_headers())
    await native.publish(f"{prefix_of(url)}.orders", b"short")
    long, short = await receive(broker)
    assert long.headers == full_headers()
    if verdict is None:
        assert await settle(broker, [short], GIVE_BACK) == [Settled()]
        await pass_time(LATE)
        claim = await broker.receive("orders", 9, LOCK)
        assert [(one.reason, one.delivery_count) for one in claim.died] == [(reason, 1)]
        [short] = claim.deliveries
    else:
        assert await settle(broker, [long], verdict) == [answer]
        assert await settle(broker, [long], verdict) == [LAPSED]
    assert await settle(broker, [short], COMPLETE) == [Settled()]
    assert await broker.stats("orders") == Stats(dead=0 if reason is None else 1)
    dead = await broker.peek_dead("orders", EVERYTHING, 9)
    assert [(one.body, one.reason, dict(one.headers)) for one in dead] == [(b"long", reason, {})][: len(dead)]
    assert all("65,535 bytes" in one.description for one in dead)
    assert await broker.redrive("orders", EVERYTHING, None) == len(dead)


async def test_a_stream_that_takes_shorter_messages_than_the_server_holds_up_no_other(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await broker.send("orders", [Outgoing(b"x" * 1_000), Outgoing(b"short")])
    long, short = await receive(broker)
    stream = broker._places.place_of("orders").stream
    config = (await native.stream_info(stream)).config
    await native.update_stream(config, max_msg_size=900)
    with pytest.raises(Unavailable, match="max_msg_size"):
        await settle(broker, [long], Abandon())
    assert await settle(broker, [short], Abandon()) == [Settled()]
    await pass_time(LATE)
    assert [one.body for one in await receive(broker)] == [b"short"]
    with pytest.raises(Unavailable, match=r"size exceeds maximum.* raise max_msg_size"):
        await broker.send("orders", [Outgoing(b"x" * 1_000)])
    await native.update_stream(config, max_msg_size=-1)
    await pass_time(TOO_LARGE_FOR + 1.0)
    assert b"x" * 1_000 in [one.body for one in await receive(broker)]


async def test_the_longest_delay_is_no_delay_that_has_ended(broker: nats.NatsBroker) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await broker.send("orders", [Outgoing(b"a", delay=LONGEST), Outgoing(b"b"), Outgoing(b"c", at=LONGEST)])
    got = await receive(broker)
    assert [one.body for one in got] == [b"b"]
    assert await settle(broker, got, Abandon(delay=LONGEST)) == [Settled()]
    assert await receive(broker) == []
    await broker.send("orders", [Outgoing(b"d")])
    got = await receive(broker)
    assert [one.body for one in got] == [b"d"]
    await settle(broker, got, DeadLetter("bad"))
    letters = (await broker.receive("orders$dead", 9, LOCK)).deliveries
    assert await settle(broker, letters, Abandon(delay=LONGEST)) == [Settled()]
    assert (await broker.receive("orders$dead", 9, LOCK)).deliveries == ()


async def test_an_id_may_be_remembered_for_the_longest_time(broker: nats.NatsBroker) -> None:
    await broker.declare("orders", {"lock": LOCK})
    await broker.send("orders", [Outgoing(b"a", id="17")])
    assert await settle(broker, await receive(broker), Complete(remember=LONGEST)) == [Settled()]
    assert list(await broker.handled("orders", ["17", "18"])) == [True, False]


async def test_completed_is_answered_truly_although_ids_can_not_be_remembered_at_first(
    broker: nats.NatsBroker, native: JetStreamContext, url: str
) -> None:
    """The same verdict, passed again, remembers the id; a failure among the dead letters hides no other answer."""
    await broker.declare("orders", {"lock": LOCK})
    await broker.send("orders", [Outgoing(b"a", id="17"), Outgoing(b"b", id="18"), Outgoing(b"c", id="19")])
    first, second, third = await receive(broker)
    await settle(broker, [third], DeadLetter("bad"))
    [dead] = (await broker.receive("orders$dead", 9, LOCK)).deliveries
    inbox = f"KV_{prefix_of(url)}-inbox"
    made = await native.add_stream(name=inbox, subjects=[f"$KV.{prefix_of(url)}-inbox.>"], max_msg_size=1)
    remembering = [Settlement(one, Complete(remember=60.0)) for one in (second, dead)]
    with pytest.raises(Unavailable, match="size exceeds"):
        await broker.settle(remembering[:1])
    settled, *unanswered = await broker.settle([Settlement(first, COMPLETE), *remembering])
    assert settled == Settled()
    assert [type(one) for one in unanswered] == [NoAnswer, NoAnswer]
    assert await broker.stats("orders") == Stats()
    await native.update_stream(made.config, max_msg_size=-1)
    assert list(await broker.settle(remembering)) == [Settled(), Settled()]
    assert list(await broker.handled("orders", ["17", "18", "19"])) == [False, True, True]
    assert list(await broker.settle(remembering)) == [LAPSED, LAPSED]


@pytest.mark.parametrize("verdict", [DeadLetter("bad", "no number"), Abandon()], ids=str)
async def test_dead_letters_with_long_headers_are_received_and_redriven(
    broker: nats.NatsBroker, native: JetStreamContext, url: str, verdict: Verdict
) -> None:
    """Also if their headers left just enough room to note why they died: a lock has to be noted, too."""
    await broker.declare("orders", {"lock": LOCK, "max_deliveries": 1})
    for less in range(600, 1_000, 10):
        await native.publish(f"{prefix_of(url)}.orders", b"%d" % less, headers=full_headers(-less))
    got = await receive(broker, 100)
    assert len(got) == 40
    await broker.settle([Settlement(one, verdict) for one in got])
    assert await broker.stats("orders") == Stats(dead=40)
    letters = (await broker.receive("orders$dead", 100, LOCK)).deliveries
    kept = sorted(int(one.body) for one in letters if one.headers)
    assert 0 < len(kept) < 40
    assert kept == list(range(kept[0], 1_000, 10))
    assert all("65,535 bytes" in one.death.description for one in letters if one.death is not None and not one.headers)
    assert sorted(one.body for one in letters) == sorted(one.body for one in got)
    assert list(await broker.settle([Settlement(one, Abandon()) for one in letters])) == [Settled()] * 40
    assert await broker.redrive("orders", EVERYTHING, None) == 40
