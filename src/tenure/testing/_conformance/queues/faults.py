"""A broker under faults: lost answers, cut connections, late requests, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Broker, LiveSelection, NoSession, QueueSettings
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Message
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, LAPSED, Abandon, Complete, DeadLetter, Defer, Renewed, Settled
from tenure.errors import Unavailable
from tenure.events import BrokerUnanswered
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness, needs_fault
from tenure.testing._conformance.queues.consumers import ObservedQueue
from tenure.testing._conformance.queues.hints_after_cut import HintAfterCutTests
from tenure.testing._conformance.queues.kills import KillTests
from tenure.testing._conformance.queues.late_answers import LateAnswerTests
from tenure.testing._conformance.queues.one_way import OneWayTests
from tenure.testing._conformance.queues.slow_answers import SlowAnswerTests
from tenure.testing._conformance.queues.steps import (
    LATE,
    accept,
    bodies,
    dead_letter,
    needs,
    receive,
    receive_session,
    receive_some,
    send,
    settle,
)

BACK_WITHIN = 20.0  # seconds after a fault has ended


class BrokerFaultSuite(SlowAnswerTests, HintAfterCutTests, KillTests, OneWayTests, LateAnswerTests):
    """A request without an answer is neither a yes nor a no, and can be repeated."""

    # --- the answer is lost, after the command was carried out ---

    async def test_send_with_an_id_can_be_repeated(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.dedupe)
        broker, other = await harness.open(), await harness.open()
        batch = [Outgoing(b"a", id="a"), Outgoing(b"b", id="b")]
        async with harness.lose_answer(broker):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await broker.send(name, batch)
        assert list(await broker.send(name, batch)) == ["a", "b"]
        assert bodies(await receive(other, name, harness)) == [b"a", b"b"]

    async def test_a_slot_whose_answer_is_lost_is_sent_once(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.schedules)
        broker, other = await harness.open(), await harness.open()
        await broker.advance(name, "s", None, "1")
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")])

        async def is_advanced() -> bool:  # where it takes several steps, another goes on after a while
            if (await other.schedules(name)).records == {"s": "2"}:
                return True
            return (await other.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")])).is_done

        await until(is_advanced, within=BACK_WITHIN)
        assert not (await other.advance(name, "s", "1", "3", [Outgoing(b"b", id="s@b")])).is_done
        assert bodies(await receive_some(other, name, harness, 1)) == [b"a"]
        if harness.traits.dedupe != "impossible" or harness.traits.schedules == "native":
            assert await receive(other, name, harness) == []

    async def test_a_slot_that_is_not_sent_is_not_noted(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "cut")
        needs(harness.traits.schedules)
        broker, other = await harness.open(), await harness.open()
        await broker.advance(name, "s", None, "1")
        async with harness.cut(broker):
            with pytest.raises(Unavailable):
                await broker.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")])
        assert (await other.schedules(name)).records == {"s": "1"}
        assert (await other.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")])).is_done
        assert bodies(await receive_some(other, name, harness, 1)) == [b"a"]
        assert not (await broker.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")])).is_done
        assert await receive(other, name, harness) == []

    async def test_a_late_request_does_not_send_what_another_has_sent(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "late")
        needs(harness.traits.schedules)
        broker, other = await harness.open(), await harness.open()
        await broker.advance(name, "s", None, "1")
        async with harness.late(broker) as give_up:
            await give_up(broker.advance(name, "s", "1", "2", [Outgoing(b"a", id="s@a")]))
            assert (await other.advance(name, "s", "1", "3", [Outgoing(b"b", id="s@b")])).is_done
        assert (await other.schedules(name)).records == {"s": "3"}
        assert bodies(await receive_some(other, name, harness, 1)) == [b"b"]
        assert await receive(other, name, harness) == []

    async def test_a_lost_claim_comes_again_when_its_lock_ends(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"before")
        assert await settle(broker, await receive(broker, name, harness), COMPLETE) == [Settled()]  # so all is there
        await send(broker, name, b"a")
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.receive(name, 10, harness.lock)
        assert await receive(other, name, harness) == []
        await harness.pass_time(harness.lock * LATE)
        [got] = await receive(other, name, harness)
        assert got.delivery_count == 2

    async def test_a_lost_claim_of_deferred_messages_leaves_them_deferred(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.deferral)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b")
        put_aside = await receive(broker, name, harness)
        assert await settle(broker, put_aside, Defer()) == [Settled()] * 2
        numbers = [one.sequence for one in put_aside]
        await broker.receive_deferred(f"{name}-other", [1], harness.lock)  # so that the client is connected
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.receive_deferred(name, numbers, harness.lock)
        assert (await other.receive_deferred(name, numbers, harness.lock)).deliveries in ((), [])
        await harness.pass_time(harness.lock * LATE)
        assert await other.stats(name) == Stats(deferred=2)
        found = (await other.receive_deferred(name, numbers, harness.lock)).deliveries
        assert [(one.body, one.delivery_count) for one in found] == [(b"a", 3), (b"b", 3)]
        assert await settle(other, found, COMPLETE) == [Settled()] * 2

    # --- limits ---

    async def test_a_lost_claim_takes_places_until_its_locks_end(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await other.declare(name, {"max_locked": 2, "rate": (3, 600.0)})
        await send(broker, name, b"a", b"b", b"c", b"d")
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.receive(name, 2, harness.lock)
        assert await receive(other, name, harness) == []
        await harness.pass_time(harness.lock * LATE)
        assert len(await receive(other, name, harness)) == 1  # the rate counts what was lost
        assert await receive(other, name, harness) == []

    async def test_a_late_claim_exceeds_no_limit(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "late")
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await other.declare(name, {"max_locked": 2, "rate": (3, 600.0)})
        await send(broker, name, b"a", b"b", b"c", b"d", b"e")
        async with harness.late(broker) as give_up:
            await give_up(broker.receive(name, 2, harness.lock * 20))
            assert len(await receive(other, name, harness, limit=2)) == 2
        assert (await other.stats(name)).locked == 2
        await other.declare(name, {"max_locked": 10})
        assert len(await receive(other, name, harness)) <= 1  # of the rate, one is left
        assert (await other.stats(name)).locked <= 3

    async def test_a_change_whose_answer_is_lost_can_be_repeated(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.declare(name, {"paused": True})
        assert (await broker.declare(name, {"paused": True})).paused
        assert await receive(other, name, harness) == []

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), DeadLetter("bad"), GIVE_BACK], ids=repr)
    async def test_a_repeated_verdict_has_lapsed(self, harness: QueueHarness, name: str, verdict: Complete) -> None:
        needs_fault(harness, "lose_answer")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await settle(broker, got, verdict)
        stats = await other.stats(name)
        assert await settle(broker, got, verdict) == [LAPSED]  # it was carried out the first time, and only then
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        after = await other.stats(name)
        assert (after.ready, after.locked, after.dead) == (stats.ready, stats.locked, stats.dead)
        assert stats.locked == 0

    async def test_renew_can_be_repeated(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.6)
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.renew(got, harness.lock)
        # Where a lock is what the client can prove to the store, it must repeat that before the end.
        if harness.any_client_settles or harness.traits.connection_bound:
            await harness.pass_time(harness.lock * 0.6)
        assert await receive(other, name, harness) == []  # the renewal did count
        assert isinstance((await broker.renew(got, harness.lock))[0], Renewed)

    # --- a cut connection ---

    async def test_an_unreachable_store_is_reported_in_time(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "cut")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, harness, limit=1)
        about_locks: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.renew(got, harness.lock),
            lambda: settle(broker, got, COMPLETE),
        ]
        is_bound = harness.traits.connection_bound
        async with harness.cut(broker):
            for ask in (
                lambda: broker.send(name, [Outgoing(b"c")]),
                lambda: broker.receive(name, 10, harness.lock),
                *(() if is_bound else about_locks),
            ):
                asked_at = time.monotonic()
                with pytest.raises(Unavailable):
                    await ask()
                assert time.monotonic() - asked_at < harness.answer_within
            if is_bound:  # this is known without asking
                assert [await ask() for ask in about_locks] == [[LAPSED], [LAPSED]]
        if is_bound:
            got = []
        else:
            assert await settle(broker, got, COMPLETE) == [Settled()]
        assert sorted(bodies([*got, *await receive(other, name, harness)])) == [b"a", b"b"]

    async def test_a_cut_does_not_prolong_a_lock(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "cut")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        async with harness.cut(broker):
            if harness.traits.connection_bound:
                assert await broker.renew(got, harness.lock) == [LAPSED]
            else:
                with pytest.raises(Unavailable):
                    await broker.renew(got, harness.lock)
        await harness.pass_time(harness.lock * LATE)
        [new] = await receive(other, name, harness)
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await settle(other, [new], COMPLETE) == [Settled()]

    async def test_a_purge_by_id_can_be_repeated(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, id=f"id-{number}") for number in range(4)])
        which = LiveSelection(ids=frozenset(["id-1", "id-2"]))
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.purge_live(name, which)
        assert await broker.purge_live(name, which) in (0, 2)
        assert sorted(bodies(await receive(other, name, harness))) == [b"0", b"3"]

    # --- given up, and carried out late ---

    @pytest.mark.parametrize("what", ["message", "session"])
    async def test_a_late_renewal_does_not_shorten_a_lock(self, harness: QueueHarness, name: str, what: str) -> None:
        needs_fault(harness, "late")
        needs(harness.traits.renewal)
        if what == "session":
            needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s" if what == "session" else None)])
        session = await accept(broker, name, harness) if what == "session" else None
        got = await receive_session(broker, session) if session else await receive(broker, name, harness)
        held = session or got[0]
        assert isinstance((await broker.renew([held], harness.lock))[0], Renewed)
        async with harness.late(broker) as give_up:
            await give_up(broker.renew([held], harness.lock))
            await harness.pass_time(harness.lock * 0.6)
            assert isinstance((await broker.renew([held], harness.lock))[0], Renewed)
        await harness.pass_time(harness.lock * 0.8)
        if not session or harness.traits.mixed_sessions:
            assert await receive(other, name, harness) == []
        if session:
            assert isinstance(await other.accept(name, "s", harness.lock), NoSession)
        assert await settle(broker, got, COMPLETE) == [Settled()]

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
    async def test_a_late_verdict_touches_no_newer_lock(
        self, harness: QueueHarness, name: str, verdict: Complete | Abandon
    ) -> None:
        needs_fault(harness, "late")
        needs(harness.traits.fencing)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        async with harness.late(broker) as give_up:
            await give_up(settle(broker, got, verdict))
            await harness.pass_time(harness.lock * LATE)
            [new] = await receive(other, name, harness)
        stats = await other.stats(name)
        assert (stats.ready, stats.locked, stats.dead) == (0, 1, 0)
        assert isinstance((await other.renew([new], harness.lock))[0], Renewed)
        assert await settle(other, [new], COMPLETE) == [Settled()]

    async def test_a_purge_of_everything_can_be_repeated(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"held", b"a", b"b")
        held = await receive(broker, name, harness, limit=1)
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.purge_live(name, EVERY_LIVE)
        await harness.pass_time(harness.lock / 2)  # where messages are locked to be removed, that ends by then
        assert await broker.purge_live(name, EVERY_LIVE) <= 2
        assert await receive(other, name, harness) == []
        assert await settle(broker, held, COMPLETE) == [Settled()]

    async def test_no_dead_letter_is_lost_on_its_way_to_another_queue(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        broker, other = await harness.open(), await harness.open()
        there, sent = f"{name}-there", {b"a", b"b", b"c"}
        await send(broker, name, *sent)
        await settle(broker, await receive(broker, name, harness), DeadLetter("bad"))
        await send(broker, there, b"first")  # so that the client is connected
        async with harness.lose_answer(broker):
            with pytest.raises(Unavailable):
                await broker.redrive(name, EVERYTHING, None, to=there)
        await harness.pass_time(harness.lock * LATE)
        moved = {one.body for one in await receive(other, there, harness)} - {b"first"}
        left = {one.body for one in await other.peek_dead(name, EVERYTHING, 10)}
        assert moved | left == sent
        if harness.traits.transactions:
            assert not moved & left
        await other.redrive(name, EVERYTHING, None, to=there)
        again = {one.body for one in await receive(other, there, harness)}
        assert moved | again == sent
        assert (await other.stats(name)).dead == 0

    async def test_the_messages_of_a_late_claim_come_again(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "late")
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_deliveries": 2})
        await send(broker, name, b"a", b"b")
        assert await receive(broker, f"{name}-other", harness) == []  # so that the client is connected
        async with harness.late(broker) as give_up:
            await give_up(broker.receive(name, 10, harness.lock))
            [first] = await receive(other, name, harness, limit=1)
        assert isinstance((await other.renew([first], harness.lock))[0], Renewed)
        assert await settle(other, [first], COMPLETE) == [Settled()]
        await harness.pass_time(harness.lock * LATE)
        [second] = await receive(other, name, harness)
        assert {first.body, second.body} == {b"a", b"b"}
        assert second.delivery_count <= 2
        assert list(await other.peek_dead(name, EVERYTHING, 10)) == []
        assert await settle(other, [second], COMPLETE) == [Settled()]

    # --- the schema is missing for a while ---

    async def test_the_store_is_used_again_when_it_is_back(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "away")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, harness, limit=1)
        is_bound = harness.traits.connection_bound
        stats = [await one.stats(name) for one in (broker, other)]
        assert stats[1 if harness.traits.exact_stats else 0].locked == 1
        about_locks: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.renew(got, harness.lock),
            lambda: settle(broker, got, COMPLETE),
        ]
        async with harness.away():
            for ask in (
                lambda: broker.send(name, [Outgoing(b"c")]),
                lambda: broker.receive(name, 10, harness.lock),
                *(() if is_bound else about_locks),
                lambda: other.receive(name, 10, harness.lock),
                lambda: other.stats(name),
            ):
                with pytest.raises(Unavailable):  # not ConfigError, which ends a consumer
                    await ask()
        if is_bound:
            assert [await ask() for ask in about_locks] == [[LAPSED], [LAPSED]]
            got = []
        else:
            assert isinstance((await broker.renew(got, harness.lock))[0], Renewed)
            assert await settle(broker, got, COMPLETE) == [Settled()]
        assert sorted(bodies([*got, *await receive(other, name, harness)])) == [b"a", b"b"]

    async def test_a_consumer_goes_on_when_the_store_is_back(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "away")
        observed, other = (
            ObservedQueue(await harness.open(), name, max(harness.traits.lock_min, 4.0)),
            await harness.open(),
        )
        handled: list[bytes] = []

        async def work(message: Message) -> None:
            handled.append(message.body)

        await send(other, name, b"a")
        consuming = asyncio.create_task(observed.queue.consume(work, poll_every=0.1))
        try:
            await until(lambda: handled == [b"a"])
            async with harness.away():
                await until(lambda: observed.events_of(BrokerUnanswered) or consuming.done())
            await send(other, name, b"b")
            await until(lambda: handled == [b"a", b"b"] or consuming.done(), within=BACK_WITHIN)
            assert not consuming.done()
        finally:
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    # --- giving up, restarts ---

    async def test_a_cancelled_send_breaks_nothing(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        for number in range(20):
            asking = asyncio.ensure_future(broker.send(name, [Outgoing(b"%d" % number, id=f"m{number}")]))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await broker.send(name, [Outgoing(b"%d" % number, id=f"m{number}") for number in range(20)])
        got = await receive(broker, name, harness)
        ids = [one.id for one in got]
        if harness.traits.dedupe == "impossible":  # then a cancelled send that was carried out comes twice
            ids = list(set(ids))
        assert sorted(ids) == sorted(f"m{number}" for number in range(20))
        assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)

    async def test_a_cancelled_call_raises_its_cancellation(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        requests: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.send(name, [Outgoing(b"a")]),
            lambda: broker.send(name, [Outgoing(b"a", id=f"m{number}") for number in range(50)]),
            lambda: broker.receive(name, 1, harness.lock),
            lambda: broker.stats(name),
        ]
        for request in requests:
            for steps in (*range(12), 16, 20, 25, 32):
                asking = asyncio.ensure_future(request())
                for _ in range(steps):
                    await asyncio.sleep(0)
                was_cancelled = asking.cancel()
                [answer] = await asyncio.gather(asking, return_exceptions=True)
                assert isinstance(answer, asyncio.CancelledError) or not was_cancelled, f"after {steps} steps: {answer}"

    async def test_everything_survives_a_restart(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "restart")
        if not harness.traits.survives_restart:
            pytest.skip("this broker loses its data when it is restarted")
        broker = await harness.open()
        settings = QueueSettings(lock=harness.lock, max_deliveries=7)
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 7})
        await dead_letter(broker, harness, name, b"dead")
        # Where delayed messages aren't counted, it is only shown that it comes, which may take real time.
        delay = harness.lock * (9 if harness.traits.exact_stats else 3)
        await broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"b")])
        due_at = time.monotonic() + delay
        await broker.send(name, [Outgoing(b"later", delay=delay)])
        got = await receive(broker, name, harness, limit=1)
        before = await broker.stats(name)
        await harness.restart()
        broker = await harness.open()
        if harness.traits.connection_bound:
            await self._after_a_restart_without_locks(harness, broker, name, settings, due_at)
            return
        after = await broker.stats(name)
        if harness.traits.exact_stats:
            assert (after.ready, after.locked, after.delayed, after.dead) == (1, 1, 1, 1)
            assert (before.ready, before.locked, before.delayed, before.dead) == (1, 1, 1, 1)
        assert await broker.settings(name) == settings
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.reason) == (b"dead", "because")
        await broker.send(name, [Outgoing(b"again", id="a")])  # still known
        if not harness.any_client_settles:  # both come again when the lock of the first has ended, or before that
            assert await settle(broker, got, COMPLETE) == [LAPSED]
            await harness.pass_time(harness.lock * LATE)
            assert sorted(bodies(await receive(broker, name, harness))) == [b"a", b"b"]
            return
        assert bodies(await receive(broker, name, harness)) == [b"b"]
        assert await settle(broker, got, COMPLETE) == [Settled()]  # a lock is the store's, not the connection's
        await harness.pass_time(harness.lock * LATE)
        [again] = await receive(broker, name, harness)
        assert (again.body, again.delivery_count) == (b"b", 2)
        await settle(broker, [again], COMPLETE)
        assert await broker.stats(name) == Stats(delayed=1, dead=1)

    async def _after_a_restart_without_locks(
        self, harness: QueueHarness, broker: Broker, name: str, settings: QueueSettings, due_at: float
    ) -> None:
        """Check what is left where locks end with their connections, and delayed messages aren't counted."""

        async def is_all_ready() -> bool:
            return (await broker.stats(name)).ready >= 2

        await until(is_all_ready)  # the server may serve before it has read all of its data
        assert await broker.settings(name) == settings
        got = await receive(broker, name, harness)
        later = [one for one in got if one.body == b"later"]
        got = [one for one in got if one.body != b"later"]
        assert not later or time.monotonic() >= due_at, "a delayed message came too early"
        assert sorted((one.body, one.delivery_count > 1) for one in got) in (
            [(b"a", True), (b"b", False)],
            [(b"a", False), (b"b", True)],
        )
        assert await settle(broker, got, COMPLETE) == [Settled()] * 2
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.reason) == (b"dead", "because")

        if not later:
            await harness.pass_time(harness.lock * 3)

        async def has_come() -> bool:
            if not later:
                later.extend(await receive(broker, name, harness))
            return bool(later)

        await until(has_come, within=BACK_WITHIN)
        assert [(one.body, one.delivery_count) for one in later] == [(b"later", 1)]
        assert await settle(broker, later, COMPLETE) == [Settled()]
        assert await broker.stats(name) == Stats(dead=1)
