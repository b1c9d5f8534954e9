"""What a broker must do when it is hurt: lost answers, no way through, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tenure._queue.broker import EVERY_LIVE, EVERYTHING, LiveSelection, NoSession, QueueSettings
from tenure._queue.message import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Outgoing,
    Renewed,
    Settled,
    Stats,
)
from tenure._queue.received import Message
from tenure.errors import Unavailable
from tenure.events import BrokerUnanswered
from tenure.testing import until
from tenure.testing._conformance.harness import Fault, QueueHarness
from tenure.testing._conformance.queues.consumers import Town
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    accept,
    bodies,
    bury,
    needs,
    receive,
    receive_session,
    send,
    settle,
)

BACK_WITHIN = 10.0  # seconds after a fault has ended


class BrokerFaultSuite(QueueSuite):
    """A question that brings no answer is neither a yes nor a no, and may be asked again."""

    # --- the answer is lost, after the command was carried out ---

    async def test_send_with_an_id_is_asked_again(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        needs(house.traits.dedupe)
        broker, other = await house.open(), await house.open()
        batch = [Outgoing(b"a", id="a"), Outgoing(b"b", id="b")]
        async with house.lose_answer(broker):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await broker.send(name, batch)
        assert list(await broker.send(name, batch)) == ["a", "b"]
        assert bodies(await receive(other, name, house)) == [b"a", b"b"]

    async def test_a_lost_claim_comes_again_when_its_lock_ends(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.receive(name, 10, house.lock)
        assert await receive(other, name, house) == []
        await house.pass_time(house.lock * LATE)
        [got] = await receive(other, name, house)
        assert got.delivery_count == 2

    async def test_a_lost_claim_of_deferred_messages_leaves_them_deferred(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        needs(house.traits.deferral)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a", b"b")
        put_aside = await receive(broker, name, house)
        assert await settle(broker, put_aside, Defer()) == [Settled()] * 2
        numbers = [one.sequence for one in put_aside]
        await broker.receive_deferred(f"{name}-other", [1], house.lock)  # it has asked before
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.receive_deferred(name, numbers, house.lock)
        assert (await other.receive_deferred(name, numbers, house.lock)).deliveries in ((), [])
        await house.pass_time(house.lock * LATE)
        assert await other.stats(name) == Stats(deferred=2)
        found = (await other.receive_deferred(name, numbers, house.lock)).deliveries
        assert [(one.body, one.delivery_count) for one in found] == [(b"a", 3), (b"b", 3)]
        assert await settle(other, found, COMPLETE) == [Settled()] * 2

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), DeadLetter("bad"), GIVE_BACK], ids=repr)
    async def test_a_verdict_asked_again_has_lapsed(self, house: QueueHarness, name: str, verdict: Complete) -> None:
        can(house, "lose_answer")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, house)
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await settle(broker, got, verdict)
        stats = await other.stats(name)
        assert await settle(broker, got, verdict) == [LAPSED]  # it stood the first time, and stands once
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        after = await other.stats(name)
        assert (after.ready, after.locked, after.dead) == (stats.ready, stats.locked, stats.dead)
        assert stats.locked == 0

    async def test_renew_is_asked_again(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        needs(house.traits.renewal)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, house)
        await house.pass_time(house.lock * 0.6)
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.renew(got, house.lock)
        await house.pass_time(house.lock * 0.6)
        assert await receive(other, name, house) == []  # the renewal did count
        assert isinstance((await broker.renew(got, house.lock))[0], Renewed)

    # --- no way through ---

    async def test_what_can_not_be_asked_is_told_in_time(self, house: QueueHarness, name: str) -> None:
        can(house, "cut")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, house, limit=1)
        async with house.cut(broker):
            for ask in (
                lambda: broker.send(name, [Outgoing(b"c")]),
                lambda: broker.receive(name, 10, house.lock),
                lambda: broker.renew(got, house.lock),
                lambda: settle(broker, got, COMPLETE),
            ):
                asked_at = time.monotonic()
                with pytest.raises(Unavailable):
                    await ask()
                assert time.monotonic() - asked_at < house.patience
        assert await settle(broker, got, COMPLETE) == [Settled()]
        assert sorted(bodies([*got, *await receive(other, name, house)])) == [b"a", b"b"]

    async def test_a_cut_does_not_prolong_a_lock(self, house: QueueHarness, name: str) -> None:
        can(house, "cut")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, house)
        async with house.cut(broker):
            with pytest.raises(Unavailable):
                await broker.renew(got, house.lock)
        await house.pass_time(house.lock * LATE)
        [new] = await receive(other, name, house)
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await settle(other, [new], COMPLETE) == [Settled()]

    async def test_a_live_purge_without_an_answer_is_asked_again(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"%d" % number, id=f"id-{number}") for number in range(4)])
        which = LiveSelection(ids=frozenset(["id-1", "id-2"]))
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.purge_live(name, which)
        assert await broker.purge_live(name, which) in (0, 2)
        assert sorted(bodies(await receive(other, name, house))) == [b"0", b"3"]

    # --- given up, and carried out late ---

    @pytest.mark.parametrize("what", ["message", "session"])
    async def test_a_late_renewal_does_not_shorten_a_lock(self, house: QueueHarness, name: str, what: str) -> None:
        can(house, "late")
        needs(house.traits.renewal)
        if what == "session":
            needs(house.traits.sessions)
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"a", session="s" if what == "session" else None)])
        session = await accept(broker, name, house) if what == "session" else None
        got = await receive_session(broker, session) if session else await receive(broker, name, house)
        held = session or got[0]
        assert isinstance((await broker.renew([held], house.lock))[0], Renewed)
        async with house.late(broker) as give_up:
            await give_up(broker.renew([held], house.lock))
            await house.pass_time(house.lock * 0.6)
            assert isinstance((await broker.renew([held], house.lock))[0], Renewed)
        await house.pass_time(house.lock * 0.8)
        assert await receive(other, name, house) == []
        if session:
            assert isinstance(await other.accept(name, "s", house.lock), NoSession)
        assert await settle(broker, got, COMPLETE) == [Settled()]

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
    async def test_a_late_verdict_touches_no_newer_lock(
        self, house: QueueHarness, name: str, verdict: Complete | Abandon
    ) -> None:
        can(house, "late")
        needs(house.traits.fencing)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, house)
        async with house.late(broker) as give_up:
            await give_up(settle(broker, got, verdict))
            await house.pass_time(house.lock * LATE)
            [new] = await receive(other, name, house)
        stats = await other.stats(name)
        assert (stats.ready, stats.locked, stats.dead) == (0, 1, 0)
        assert isinstance((await other.renew([new], house.lock))[0], Renewed)
        assert await settle(other, [new], COMPLETE) == [Settled()]

    async def test_a_purge_without_an_answer_may_be_asked_for_again(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"held", b"a", b"b")
        held = await receive(broker, name, house, limit=1)
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.purge_live(name, EVERY_LIVE)
        await house.pass_time(house.lock / 2)  # where messages are locked to be removed, that ends by then
        assert await broker.purge_live(name, EVERY_LIVE) <= 2
        assert await receive(other, name, house) == []
        assert await settle(broker, held, COMPLETE) == [Settled()]

    async def test_no_letter_is_lost_on_its_way_to_another_queue(self, house: QueueHarness, name: str) -> None:
        can(house, "lose_answer")
        broker, other = await house.open(), await house.open()
        there, sent = f"{name}-there", {b"a", b"b", b"c"}
        await send(broker, name, *sent)
        await settle(broker, await receive(broker, name, house), DeadLetter("bad"))
        await send(broker, there, b"first")  # it has asked before
        async with house.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.redrive(name, EVERYTHING, None, to=there)
        await house.pass_time(house.lock * LATE)
        moved = {one.body for one in await receive(other, there, house)} - {b"first"}
        left = {one.body for one in await other.peek_dead(name, EVERYTHING, 10)}
        assert moved | left == sent
        if house.traits.transactions:
            assert not moved & left
        await other.redrive(name, EVERYTHING, None, to=there)
        again = {one.body for one in await receive(other, there, house)}
        assert moved | again == sent
        assert (await other.stats(name)).dead == 0

    async def test_a_late_claim_comes_again(self, house: QueueHarness, name: str) -> None:
        can(house, "late")
        broker, other = await house.open(), await house.open()
        await broker.declare(name, {"max_deliveries": 2})
        await send(broker, name, b"a", b"b")
        assert await receive(broker, f"{name}-other", house) == []  # it has asked before
        async with house.late(broker) as give_up:
            await give_up(broker.receive(name, 10, house.lock))
            [first] = await receive(other, name, house, limit=1)
        assert isinstance((await other.renew([first], house.lock))[0], Renewed)
        assert await settle(other, [first], COMPLETE) == [Settled()]
        await house.pass_time(house.lock * LATE)
        [second] = await receive(other, name, house)
        assert {first.body, second.body} == {b"a", b"b"}
        assert second.delivery_count <= 2
        assert list(await other.peek_dead(name, EVERYTHING, 10)) == []
        assert await settle(other, [second], COMPLETE) == [Settled()]

    # --- away for a while ---

    async def test_what_was_away_for_a_while_is_found_again(self, house: QueueHarness, name: str) -> None:
        can(house, "away")
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, house, limit=1)
        assert (await other.stats(name)).locked == 1
        async with house.away():
            for ask in (
                lambda: broker.send(name, [Outgoing(b"c")]),
                lambda: broker.receive(name, 10, house.lock),
                lambda: broker.renew(got, house.lock),
                lambda: settle(broker, got, COMPLETE),
                lambda: other.receive(name, 10, house.lock),
                lambda: other.stats(name),
            ):
                with pytest.raises(Unavailable):  # and no ConfigError, which ends a consumer
                    await ask()
        assert isinstance((await broker.renew(got, house.lock))[0], Renewed)
        assert await settle(broker, got, COMPLETE) == [Settled()]
        assert sorted(bodies([*got, *await receive(other, name, house)])) == [b"a", b"b"]

    async def test_a_consumer_outlasts_what_is_away(self, house: QueueHarness, name: str) -> None:
        can(house, "away")
        town, other = Town(await house.open(), name, max(house.traits.lock_min, 4.0)), await house.open()
        handled: list[bytes] = []

        async def work(message: Message) -> None:
            handled.append(message.body)

        await send(other, name, b"a")
        consuming = asyncio.create_task(town.queue.consume(work, poll_every=0.1))
        try:
            await until(lambda: handled == [b"a"])
            async with house.away():
                await until(lambda: town.told(BrokerUnanswered) or consuming.done())
            await send(other, name, b"b")
            await until(lambda: handled == [b"a", b"b"] or consuming.done(), within=BACK_WITHIN)
            assert not consuming.done()
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    # --- giving up, restarts ---

    async def test_a_question_given_up_breaks_nothing(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        for number in range(20):
            asking = asyncio.ensure_future(broker.send(name, [Outgoing(b"%d" % number, id=f"m{number}")]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await broker.send(name, [Outgoing(b"%d" % number, id=f"m{number}") for number in range(20)])
        got = await receive(broker, name, house)
        ids = [one.id for one in got]
        if house.traits.dedupe == "impossible":  # then what was given up and done all the same comes twice
            ids = list(set(ids))
        assert sorted(ids) == sorted(f"m{number}" for number in range(20))
        assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)

    async def test_a_question_that_is_cancelled_says_so(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        questions: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.send(name, [Outgoing(b"a")]),
            lambda: broker.send(name, [Outgoing(b"a", id=f"m{number}") for number in range(50)]),
            lambda: broker.receive(name, 1, house.lock),
            lambda: broker.stats(name),
        ]
        for question in questions:
            for steps in (*range(12), 16, 20, 25, 32):
                asking = asyncio.ensure_future(question())
                for _ in range(steps):
                    await asyncio.sleep(0)
                asked_in_time = asking.cancel()
                [answer] = await asyncio.gather(asking, return_exceptions=True)
                assert isinstance(answer, asyncio.CancelledError) or not asked_in_time, f"after {steps} steps: {answer}"

    async def test_everything_survives_a_restart(self, house: QueueHarness, name: str) -> None:
        can(house, "restart")
        if not house.traits.survives_restart:
            pytest.skip("this broker forgets when it is restarted")
        broker = await house.open()
        settings = QueueSettings(lock=house.lock, max_deliveries=7)
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 7})
        await bury(broker, house, name, b"dead")
        await broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"later", delay=house.lock * 9), Outgoing(b"b")])
        got = await receive(broker, name, house, limit=1)
        before = await broker.stats(name)
        await house.restart()
        broker = await house.open()
        after = await broker.stats(name)
        assert (after.ready, after.locked, after.delayed, after.dead) == (1, 1, 1, 1)
        assert (before.ready, before.locked, before.delayed, before.dead) == (1, 1, 1, 1)
        assert await broker.settings(name) == settings
        await broker.send(name, [Outgoing(b"again", id="a")])  # still known
        assert bodies(await receive(broker, name, house)) == [b"b"]
        assert await settle(broker, got, COMPLETE) == [Settled()]  # a lock is the store's, not the connection's
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.reason) == (b"dead", "because")
        await house.pass_time(house.lock * LATE)
        [again] = await receive(broker, name, house)
        assert (again.body, again.delivery_count) == (b"b", 2)
        await settle(broker, [again], COMPLETE)
        assert await broker.stats(name) == Stats(delayed=1, dead=1)


def can(house: QueueHarness, fault: Fault) -> None:
    """Skip the test if this fault can't be made here."""
    if fault not in house.faults:
        pytest.skip(f"this harness can't make the fault {fault!r}")
