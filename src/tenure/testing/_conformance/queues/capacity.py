"""A broker that is full, or that was cut off on a slow connection."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress

import pytest

from tenure._queue.broker import EVERYTHING, Selection
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, DeadLetter, Defer, Deleted, Renewed, Settled, Verdict
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness, needs_fault
from tenure.testing._conformance.queues.steps import (
    QueueSuite,
    accept,
    bodies,
    dead_letter,
    receive,
    receive_session,
    send,
    settle,
)

SENDERS = 20
BACK_WITHIN = 20.0  # seconds after a fault has ended
RATE_BACK = 0.5  # of the rate before the fault
ROUND_TRIP = 0.2  # seconds, on a slow connection


class BrokerCapacitySuite(QueueSuite):
    """A full broker refuses new messages, and nothing else; after a cut, a broker is soon as fast as before."""

    async def test_a_full_broker_keeps_nothing_of_a_refused_batch(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "full")
        broker = await harness.open()
        await send(broker, name, b"before")
        large = secrets.token_bytes(harness.slack)  # can't be compressed
        is_mixed = harness.traits.sessions != "impossible" and harness.traits.mixed_sessions
        session = "s" if is_mixed else None
        async with harness.full():
            for queue in (name, f"{name}-new"):
                for batch in (
                    [Outgoing(b"plain" + large)],
                    [Outgoing(b"named", id="one"), Outgoing(b"named" + large, id="two")],
                    [
                        Outgoing(delay=harness.lock),
                        Outgoing(b"ends" + large, expires_in=harness.lock),
                        Outgoing(session=session),
                    ],
                ):
                    with pytest.raises(Unavailable, match=r"full|no room|out of memory"):
                        await broker.send(queue, batch)
        assert list(await broker.send(name, [Outgoing(b"after", id="one")])) == ["one"]  # the id was not remembered
        assert sorted(bodies(await receive(broker, name, harness))) == [b"after", b"before"]
        stats = await broker.stats(name)
        assert (stats.ready, stats.locked, stats.delayed) == (0, 2, 0)
        assert (await broker.stats(f"{name}-new")).ready == 0

    async def test_a_full_broker_is_drained(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "full")
        if not harness.drains_when_full:
            pytest.skip("this broker may refuse to be drained while it is full")
        broker = await harness.open()
        await dead_letter(broker, harness, name, b"dead", b"dead too")
        await send(broker, name, *[b"%d" % number for number in range(6)])
        await send(broker, f"{name}-given-up", b"a")
        [held] = await receive(broker, name, harness, limit=1)
        if harness.traits.sessions != "impossible":
            await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        async with harness.full():
            [answer] = await broker.renew([held], harness.lock)
            assert isinstance(answer, Renewed)
            assert await settle(broker, [held], COMPLETE) == [Settled()]
            for verdict in (GIVE_BACK, Abandon(), Abandon(delay=harness.lock), DeadLetter("bad"), COMPLETE):
                got = await receive(broker, name, harness, limit=1)
                assert await settle(broker, got, verdict) == [Settled()], verdict
            if harness.traits.sessions != "impossible":
                session = await accept(broker, name, harness)
                assert isinstance(session, SessionLock)
                [answer] = await broker.renew([session], harness.lock)
                assert isinstance(answer, Renewed)
                for _ in range(2):
                    got = await receive_session(broker, session, limit=1)
                    assert await settle(broker, got, COMPLETE) == [Settled()]
                assert await broker.write_state(session, b"state") == Settled()
                assert await broker.release(session) == Settled()
            if harness.traits.deferral != "impossible":
                [got_late] = await receive(broker, name, harness, limit=1)
                assert await settle(broker, [got_late], Defer()) == [Settled()]
                got = list((await broker.receive_deferred(name, [got_late.sequence], harness.lock)).deliveries)
                assert await settle(broker, got, COMPLETE) == [Settled()]
            assert await broker.redrive(name, Selection(reason="bad"), None) == 1
            while got := await receive(broker, name, harness, limit=2):
                assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)
            assert await broker.purge(name, EVERYTHING, None) == 2
            assert isinstance(await broker.delete(f"{name}-given-up", force=True), Deleted)
            stats = await broker.stats(name)
            assert (stats.ready, stats.locked, stats.delayed, stats.dead) == (0, 0, 1, 0)
        await send(broker, name, b"again")
        assert bodies(await receive(broker, name, harness)) == [b"again"]

    async def test_a_refusal_of_a_full_broker_has_no_effect(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "full")
        broker, count = await harness.open(), 60
        await send(broker, name, *[b"%d " % number + secrets.token_bytes(500) for number in range(count)])
        held = await receive(broker, name, harness, limit=20)
        verdicts: list[Verdict] = [DeadLetter("bad"), COMPLETE]
        done: list[bytes] = []
        async with harness.full():
            for one, verdict in zip(held, verdicts * 10, strict=True):
                with suppress(Unavailable):
                    assert await settle(broker, [one], verdict) == [Settled()]
                    done.append(one.body)
            for limit in (20, 5, 1):
                with suppress(Unavailable):
                    got = await receive(broker, name, harness, limit=limit)
                    held += got  # and if it is refused, nothing is locked
                    assert await settle(broker, got, DeadLetter("bad")) == [Settled()] * len(got)
                    done += bodies(got)
        left = [one for one in held if one.body not in done]
        assert await settle(broker, left, COMPLETE) == [Settled()] * len(left)
        got = await receive(broker, name, harness)
        assert [one.delivery_count for one in got] == [1] * len(got)
        assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)
        done += bodies([*left, *got])
        assert len(done) == len(set(done)) == count
        stats = await broker.stats(name)
        assert (stats.ready, stats.locked, stats.delayed) == (0, 0, 0)
        await send(broker, name, b"again")
        assert bodies(await receive(broker, name, harness)) == [b"again"]

    async def test_after_a_cut_on_a_slow_link_the_rate_is_back(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "slow")
        broker = await harness.open()
        await send(broker, name, b"first")  # there is a queue, and a connection
        sent = 0

        async def send_on() -> None:
            nonlocal sent
            while True:
                await asyncio.sleep(0)  # some stores answer without a pause
                with suppress(Unavailable):
                    await broker.send(name, [Outgoing(b"a")])
                    sent += 1

        async def round_of_sends() -> float:
            """Return how many seconds the next message of each sender takes."""
            began, goal = time.monotonic(), sent + SENDERS
            await until(lambda: sent >= goal, within=BACK_WITHIN)
            return time.monotonic() - began

        async with harness.slow(broker, ROUND_TRIP):
            senders = [asyncio.create_task(send_on()) for _ in range(SENDERS)]
            try:
                await round_of_sends()  # on connections that are being made
                before = min([await round_of_sends() for _ in range(2)])
                await harness.reset(broker)
                async with asyncio.timeout(BACK_WITHIN):
                    while await round_of_sends() > before / RATE_BACK:
                        pass
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)
