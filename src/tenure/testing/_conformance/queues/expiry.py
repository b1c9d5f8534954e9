"""The expiry of messages."""

from __future__ import annotations

import asyncio

import pytest

from tenure._queue.broker import (
    EVERYTHING,
    Broker,
    Claim,
    NoSession,
    QueueSettings,
)
from tenure._queue.context import QueueContext
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, Died, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, DeadLetter, Settled, Settlement, Verdict
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    accept,
    bodies,
    expect_stats,
    needs,
    only_dead_letter,
    receive,
    receive_session,
    receive_some,
    send,
    settle,
)


class ExpiryTests(QueueSuite):
    """A message that isn't received in time is dead-lettered, and this is reported once."""

    async def test_a_message_not_received_in_time_is_dead(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.send(
            name,
            [Outgoing(b"short", id="short", expires_in=harness.lock), Outgoing(b"long", expires_in=harness.lock * 9)],
        )
        await harness.pass_time(harness.lock * LATE)
        if harness.traits.exact_stats:
            stats = await broker.stats(name)
            assert (stats.ready, stats.dead) == (1, 1)
        assert bodies(await receive(broker, name, harness)) == [b"long"]
        dead = await only_dead_letter(broker, harness, name)
        assert (dead.id, dead.body, dead.reason, dead.delivery_count) == ("short", b"short", EXPIRED, 0)

    async def test_an_expired_message_is_received_from_the_dead_letters(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a", expires_in=harness.lock / 2), Outgoing(b"b")])
        await harness.pass_time(harness.lock * LATE)
        await settle(broker, await receive(broker, name, harness), DeadLetter("unreadable", "no JSON"))
        dead_name = dead_letters_of(name)
        got = await receive_some(broker, dead_name, harness, 2)
        assert sorted((one.body, one.death.reason) for one in got if one.death) == [
            (b"a", EXPIRED),
            (b"b", "unreadable"),
        ]
        assert (await broker.receive(dead_name, 10, harness.lock)).deliveries == ()
        assert await settle(broker, got[:1], Abandon()) == [Settled()]
        assert await settle(broker, got[1:], COMPLETE) == [Settled()]
        again = await receive_some(broker, dead_name, harness, 1)
        assert [one.body for one in again] == [got[0].body]
        assert await settle(broker, again, COMPLETE) == [Settled()]
        await expect_stats(broker, harness, name, Stats())

    @pytest.mark.parametrize("session", [None, "s"])
    async def test_a_message_that_expires_among_many_is_not_received(
        self, harness: QueueHarness, name: str, session: str | None
    ) -> None:
        needs(harness.traits.sessions if session else "native")
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"short", expires_in=harness.lock / 2, session=session)] * harness.backlog)
        await harness.pass_time(harness.lock * LATE)
        await broker.send(name, [Outgoing(b"long", expires_in=harness.lock * 9, session=session)])
        received: list[bytes] = []

        async def receive_all() -> bool:
            if session is None:
                received.extend(bodies(await receive(broker, name, harness, limit=5)))
            elif isinstance(held := await broker.accept(name, None, harness.lock), SessionLock):
                received.extend(bodies(await receive_session(broker, held, limit=5)))
                if not received:
                    await broker.release(held)
            return bool(received)

        await until(receive_all)
        assert received == [b"long"]
        if harness.traits.exact_stats:
            assert await broker.stats(name) == Stats(locked=1, dead=harness.backlog)

    async def test_an_expired_backlog_in_front_is_not_the_end_of_a_queue(
        self, harness: QueueHarness, name: str
    ) -> None:
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"short", expires_in=harness.lock / 2)] * harness.backlog)
        await harness.pass_time(harness.lock * LATE)
        await send(broker, name, b"0", b"1", b"2")
        settings = QueueSettings(lock=harness.lock)
        queue = Queue(
            QueueContext(
                name, broker, RenewalThread.here(), SystemClock(), settings, "", expected={"lock": harness.lock}
            )
        )
        handled: list[bytes] = []

        async def handle(message: Message) -> None:
            handled.append(message.body)

        async with asyncio.timeout(60):
            await queue.consume(handle, until_empty=True, concurrency=1, sigterm=False)
        assert sorted(handled) == [b"0", b"1", b"2"]
        if harness.traits.exact_stats:
            assert await broker.stats(name) == Stats(dead=harness.backlog)

    async def test_a_received_message_does_not_expire(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.send(
            name, [Outgoing(b"a", expires_in=harness.lock * 1.2), Outgoing(b"b", expires_in=harness.lock * 1.2)]
        )
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.7)
        await broker.renew(got, harness.lock)
        await harness.pass_time(harness.lock * 0.7)
        done, abandoned = sorted(got, key=lambda one: one.body)
        assert await settle(broker, [done], COMPLETE) == [Settled()]
        assert await settle(broker, [abandoned], Abandon()) == [Settled(dead=True)]
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.reason) == (b"b", EXPIRED)

    async def test_a_claim_reports_each_death_by_time_once(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 1})
        await broker.send(name, [Outgoing(b"crashes", id="a"), Outgoing(b"rejected")])
        _, rejected = sorted(await receive(broker, name, harness), key=lambda one: one.body)
        await broker.send(name, [Outgoing(b"expires", id="b", expires_in=harness.lock / 2)])
        await broker.settle([Settlement(rejected, DeadLetter("of a verdict"))])  # reported by its answer
        await harness.pass_time(harness.lock * LATE)
        await broker.stats(name)  # applies the due changes
        reported = [
            *(await broker.receive(name, 10, harness.lock)).died,
            *(await broker.receive(name, 10, harness.lock)).died,
        ]
        sequences = {dead.id: dead.sequence for dead in await broker.peek_dead(name, EVERYTHING, 10)}
        assert sorted(reported, key=lambda one: one.id) == [
            Died(sequences["a"], "a", 1, MAX_DELIVERIES),
            Died(sequences["b"], "b", 0, EXPIRED),
        ]

    @pytest.mark.parametrize("session", [None, "s"], ids=["messages", "session"])
    async def test_a_death_by_time_is_reported_to_one_of_two_consumers(
        self, harness: QueueHarness, name: str, session: str | None
    ) -> None:
        if not harness.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        needs(harness.traits.sessions if session else "native")
        brokers = [await harness.open(), await harness.open()]
        quiet, busy = name, f"{name}-busy"
        for queue in (quiet, busy):
            await send_messages_that_die(brokers[0], queue, harness, session)
        await brokers[1].send(busy, [Outgoing(b"lives", session=session)])
        await harness.pass_time(harness.lock * LATE)
        for queue, lives in ((quiet, []), (busy, [b"lives"])):
            died: list[tuple[str, int, str]] = []
            handled: list[bytes] = []
            for _ in range(3):
                for claim in await asyncio.gather(*(poll(broker, queue, harness, session) for broker in brokers)):
                    died += [(one.id, one.delivery_count, one.reason) for one in claim.died]
                    handled += bodies(claim.deliveries)
            assert handled == lives
            crashed, late = ([f"{what}-{number}" for number in range(3)] for what in ("crashes", "late"))
            assert sorted(died) == [
                *((one, 1, MAX_DELIVERIES) for one in crashed),
                *((one, 0, EXPIRED) for one in late),
            ]

    @pytest.mark.parametrize("verdict", [GIVE_BACK, Abandon(), None], ids=["given back", "abandoned", "lock ended"])
    async def test_an_expiry_under_a_lock_is_reported_once(
        self, harness: QueueHarness, name: str, verdict: Verdict | None
    ) -> None:
        if not harness.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"late", id="late", expires_in=harness.lock / 2)])
        [got] = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * (0.6 if verdict else LATE))
        [answer] = await settle(broker, [got], verdict) if verdict else [Settled()]
        assert isinstance(answer, Settled)
        died = [
            *(await broker.receive(name, 10, harness.lock)).died,
            *(await broker.receive(name, 10, harness.lock)).died,
        ]
        assert (answer.dead, [one.id for one in died]) in ((True, []), (False, ["late"]))

    async def test_an_expiry_in_a_released_session_is_reported(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"late", id="late", expires_in=harness.lock / 2, session="s")])
        held = await accept(broker, name, harness)
        [got] = await receive_session(broker, held)
        await harness.pass_time(harness.lock * 0.6)
        assert await broker.release(held) == Settled()
        reported = [
            *(await broker.receive(name, 10, harness.lock)).died,
            *(await broker.receive(name, 10, harness.lock)).died,
        ]
        assert reported == [Died(got.sequence, "late", 0, EXPIRED)]


async def send_messages_that_die(broker: Broker, name: str, harness: QueueHarness, session: str | None) -> None:
    """Send messages whose only delivery ends with its lock, as after a crash, and others that expire before that."""
    await broker.declare(name, {"lock": harness.lock, "max_deliveries": 1})
    await broker.send(name, [Outgoing(b"crashes", id=f"crashes-{number}", session=session) for number in range(3)])
    if session is None:
        assert len(await receive(broker, name, harness)) == 3
    else:
        assert len(await receive_session(broker, await accept(broker, name, harness))) == 3
    short = [
        Outgoing(b"late", id=f"late-{number}", expires_in=harness.lock / 2, session=session) for number in range(3)
    ]
    await broker.send(name, short)


async def poll(broker: Broker, name: str, harness: QueueHarness, session: str | None) -> Claim:
    """Claim and complete what is ready, in a session if *session* is given; return the claim."""
    held = None if session is None else await broker.accept(name, None, harness.lock)
    if isinstance(held, NoSession):
        return Claim((), held.due_in, held.died)
    claim = await (broker.receive(name, 10, harness.lock) if held is None else broker.receive_session(held, 10))
    assert isinstance(claim, Claim), claim
    await settle(broker, claim.deliveries, COMPLETE)
    if held is not None:
        await broker.release(held)
    return claim
