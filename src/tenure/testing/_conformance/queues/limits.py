"""Limits of queues over all their consumers, and their pause."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tenure._queue.broker import Broker, Claim, LiveSelection, NoSession, QueueOptions, QueueSettings
from tenure._queue.limits import HELD_UP_MAX
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    Abandon,
    DeadLetter,
    Defer,
    NotEmpty,
    Renewed,
    Settled,
    Verdict,
)
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import LATE, QueueSuite, accept, bodies, dead_letter, needs, send, settle


class LimitTests(QueueSuite):
    """No more is received than the settings of the queue allow."""

    # --- at once ---

    async def test_no_more_are_locked_at_once(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        assert await broker.declare(name, {"max_locked": 2}) == QueueSettings(max_locked=2)
        assert await other.settings(name) == QueueSettings(max_locked=2)
        await send(broker, name, b"a", b"b", b"c", b"d")
        claim = await broker.receive(name, 100, harness.lock)
        assert bodies(claim.deliveries) == [b"a", b"b"]
        assert (claim.is_limited, claim.is_held_back) == (True, True)
        none = await other.receive(name, 100, harness.lock)
        assert (bodies(none.deliveries), none.is_limited, none.is_held_back) == ([], True, True)
        assert none.due_in is not None
        assert 0 < none.due_in <= harness.lock * 1.01
        await settle(broker, [claim.deliveries[0]], COMPLETE)
        assert bodies((await other.receive(name, 100, harness.lock)).deliveries) == [b"c"]
        assert not (await broker.receive(name, 1, harness.lock)).deliveries

    async def test_nothing_is_held_back_of_an_empty_queue(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker = await harness.open()
        await broker.declare(name, {"max_locked": 1, "rate": (1, 60.0)})
        claim = await broker.receive(name, 10, harness.lock)
        assert (claim.is_limited, claim.is_held_back) == (True, False)
        await send(broker, name, b"a")
        claim = await broker.receive(name, 10, harness.lock)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([b"a"], False)
        await send(broker, f"{name}-2", b"a")
        claim = await broker.receive(f"{name}-2", 10, harness.lock)
        assert (claim.is_limited, claim.is_held_back) == (False, False)

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), GIVE_BACK, Defer(), DeadLetter("because")], ids=repr)
    async def test_a_settled_message_frees_its_place_and_gives_a_hint(
        self, harness: QueueHarness, name: str, verdict: Verdict
    ) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_locked": 1})
        await send(broker, name, b"a", b"b")
        [got] = (await broker.receive(name, 10, harness.lock)).deliveries
        async with hints_of(other, name) as hints:
            assert not (await other.receive(name, 10, harness.lock)).deliveries
            before = hints.count
            assert await settle(broker, [got], verdict) == [Settled()]
            if harness.traits.hints:
                await until(lambda: hints.count > before)
        assert len((await other.receive(name, 10, harness.lock)).deliveries) == 1
        assert not (await other.receive(name, 10, harness.lock)).deliveries

    async def test_a_dead_consumer_frees_its_places_when_its_locks_end(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_locked": 3})
        await send(broker, name, *[b"%d" % number for number in range(6)])
        dead = (await broker.receive(name, 2, harness.lock)).deliveries
        [kept] = (await broker.receive(name, 2, harness.lock)).deliveries
        await harness.pass_time(harness.lock * 0.6)
        [answer] = await broker.renew([kept], harness.lock)
        assert isinstance(answer, Renewed)
        assert not (await other.receive(name, 10, harness.lock)).deliveries
        await harness.pass_time(harness.lock * (LATE - 0.6))
        again = (await other.receive(name, 10, harness.lock)).deliveries
        assert bodies(again) == bodies(dead)
        assert not (await other.receive(name, 10, harness.lock)).deliveries

    async def test_many_clients_together_lock_no_more(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        clients = [await harness.open() for _ in range(4)]
        await clients[0].declare(name, {"max_locked": 3})
        await send(clients[0], name, *[b"%d" % number for number in range(40)])
        for _ in range(8):
            claims = await asyncio.gather(*(client.receive(name, 2, harness.lock * 4) for client in clients))
            found = [one for claim in claims for one in claim.deliveries]
            assert len(found) == 3
            assert len(set(bodies(found))) == 3
            await settle(clients[0], found, COMPLETE)

    async def test_deferred_messages_count(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.deferral)
        broker = await harness.open()
        await broker.declare(name, {"max_locked": 2})
        await send(broker, name, b"a", b"b", b"c")
        put_aside = (await broker.receive(name, 2, harness.lock)).deliveries
        await settle(broker, put_aside, Defer())
        [last] = (await broker.receive(name, 2, harness.lock)).deliveries
        claim = await broker.receive_deferred(name, [one.sequence for one in put_aside], harness.lock)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([b"a"], True)
        await settle(broker, [last], COMPLETE)
        claim = await broker.receive_deferred(name, [one.sequence for one in put_aside], harness.lock)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([b"b"], False)

    async def test_messages_of_sessions_count(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_locked": 1})
        await send_to(broker, name, "s", b"a", b"b")
        await send_to(broker, name, "t", b"c")
        held = await accept(broker, name, harness)
        claim = await received_in(broker, held, 10)
        assert (bodies(claim.deliveries), claim.is_limited, claim.is_held_back) == ([b"a"], True, True)
        none = await other.accept(name, None, harness.lock)
        assert isinstance(none, NoSession)
        assert none.is_held_back
        by_name = await other.accept(name, "t", harness.lock)
        assert isinstance(by_name, SessionLock)
        claim_by_name = await received_in(other, by_name, 10)
        assert (bodies(claim_by_name.deliveries), claim_by_name.is_held_back) == ([], True)
        assert claim_by_name.held_up_for is None  # it waits for no rate of its session
        assert claim_by_name.due_in is not None
        assert claim_by_name.due_in <= harness.lock * 1.01
        await settle(broker, claim.deliveries, COMPLETE)
        assert bodies((await received_in(other, by_name, 10)).deliveries) == [b"c"]
        assert not (await received_in(broker, held, 10)).deliveries

    async def test_dead_letters_have_no_limits(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await dead_letter(broker, harness, name, b"a", b"b", b"c")
        await broker.declare(name, {"max_locked": 1, "rate": (1, 60.0), "paused": True})
        claim = await broker.receive(f"{name}$dead", 10, harness.lock)
        assert bodies(claim.deliveries) == [b"a", b"b", b"c"]
        assert (claim.is_limited, claim.is_held_back) == (False, False)

    async def test_a_lowered_limit_waits_for_those_that_are_locked(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker = await harness.open()
        await send(broker, name, *[b"%d" % number for number in range(6)])
        got = (await broker.receive(name, 4, harness.lock)).deliveries
        await broker.declare(name, {"max_locked": 2})
        await settle(broker, got[:2], COMPLETE)
        assert not (await broker.receive(name, 10, harness.lock)).deliveries
        await settle(broker, got[2:3], COMPLETE)
        assert len((await broker.receive(name, 10, harness.lock)).deliveries) == 1
        await broker.declare(name, {"max_locked": math.inf})
        claim = await broker.receive(name, 1, harness.lock)
        assert (len(claim.deliveries), claim.is_limited) == (1, False)

    # --- rates ---

    async def test_no_more_are_received_in_the_time_of_a_rate(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        window = harness.lock * 4
        assert await broker.declare(name, {"rate": (3, window)}) == QueueSettings(rate=(3, window))
        assert await other.settings(name) == QueueSettings(rate=(3, window))
        await send(broker, name, *[b"%d" % number for number in range(8)])
        first = await broker.receive(name, 2, harness.lock * 20)
        assert len(first.deliveries) == 2
        await harness.pass_time(window / 2)
        second = await other.receive(name, 10, harness.lock * 20)
        assert (len(second.deliveries), second.is_limited, second.is_held_back) == (1, True, True)
        assert second.due_in is not None
        assert 0 < second.due_in <= window / 2 * 1.05  # two clients may read the time apart
        await settle(broker, [*first.deliveries, *second.deliveries], COMPLETE)  # that frees nothing
        none = await broker.receive(name, 10, harness.lock * 20)
        assert not none.deliveries
        assert none.due_in is not None
        await harness.pass_time(none.due_in + 0.01)
        third = await broker.receive(name, 10, harness.lock * 20)
        assert len(third.deliveries) == 2
        assert not (await other.receive(name, 10, harness.lock * 20)).deliveries

    async def test_each_delivery_counts_for_a_rate(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker = await harness.open()
        await broker.declare(name, {"rate": (2, harness.lock * 10)})
        await send(broker, name, b"a")
        for verdict in (GIVE_BACK, Abandon()):
            claim = await broker.receive(name, 10, harness.lock)
            assert bodies(claim.deliveries) == [b"a"]
            await settle(broker, claim.deliveries, verdict)
        claim = await broker.receive(name, 10, harness.lock)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([], True)
        await harness.pass_time(harness.lock * 10 * 1.02)
        assert bodies((await broker.receive(name, 10, harness.lock)).deliveries) == [b"a"]

    async def test_many_clients_together_keep_a_rate(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        clients = [await harness.open() for _ in range(4)]
        await clients[0].declare(name, {"rate": (5, 600.0)})
        await send(clients[0], name, *[b"%d" % number for number in range(40)])
        claims = await asyncio.gather(*(client.receive(name, 2, harness.lock * 20) for client in clients))
        assert sum(len(claim.deliveries) for claim in claims) == 5

    async def test_a_rate_that_is_raised_or_lifted_holds_at_once(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"rate": (1, 600.0)})
        await send(broker, name, b"a", b"b", b"c", b"d")
        assert len((await broker.receive(name, 10, harness.lock * 20)).deliveries) == 1
        async with hints_of(other, name) as hints:
            assert not (await other.receive(name, 10, harness.lock * 20)).deliveries
            before = hints.count
            await broker.declare(name, {"rate": (3, 600.0)})
            if harness.traits.hints:
                await until(lambda: hints.count > before)
        assert len((await other.receive(name, 10, harness.lock * 20)).deliveries) == 2
        await broker.declare(name, {"rate": math.inf})
        claim = await other.receive(name, 10, harness.lock * 20)
        assert (len(claim.deliveries), claim.is_limited) == (1, False)

    async def test_a_rate_counts_messages_of_sessions_and_deferred_ones(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        needs(harness.traits.deferral)
        broker = await harness.open()
        await broker.declare(name, {"rate": (3, 600.0)})
        await send(broker, name, b"a")
        await send_to(broker, name, "s", b"b", b"c")
        first = (await broker.receive(name, 10, harness.lock)).deliveries
        await settle(broker, first, Defer())
        await broker.receive_deferred(name, [first[0].sequence], harness.lock)
        claim = await received_in(broker, await accept(broker, name, harness), 10)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([b"b"], True)
        assert claim.due_in is not None
        none = await broker.receive_deferred(name, [first[0].sequence], harness.lock)
        assert not none.deliveries

    async def test_a_rate_of_sessions_holds_for_each_by_itself(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        window = harness.lock * 4
        both: QueueOptions = {"session_rate": (2, window)}
        assert await broker.declare(name, both) == QueueSettings(session_rate=(2, window))
        await send_to(broker, name, "s", b"a", b"b", b"c")
        await send_to(broker, name, "t", b"d")
        await send(broker, name, b"e", b"f", b"g")
        held = await accept(broker, name, harness)
        claim = await received_in(broker, held, 10)
        assert (held.session, bodies(claim.deliveries), claim.is_held_back) == ("s", [b"a", b"b"], True)
        assert claim.due_in is not None
        assert 0 < claim.due_in <= window * 1.01
        await settle(broker, claim.deliveries, COMPLETE)
        claim = await received_in(broker, held, 10)  # it is told again
        assert (bodies(claim.deliveries), claim.is_held_back) == ([], True)
        assert claim.due_in is not None
        assert min(window, HELD_UP_MAX) / 2 < claim.due_in <= window * 1.01
        await broker.release(held)
        held = await accept(other, name, harness)  # the next one, as the first is held up
        assert held.session == "t"
        assert bodies((await received_in(other, held, 10)).deliveries) == [b"d"]
        assert isinstance(await broker.accept(name, None, harness.lock), NoSession)
        assert len((await broker.receive(name, 10, harness.lock)).deliveries) == 3  # of no session
        await harness.pass_time(window * 1.02)
        held = await accept(broker, name, harness)
        assert (held.session, bodies((await received_in(broker, held, 10)).deliveries)) == ("s", [b"c"])

    async def test_a_session_that_is_held_up_keeps_its_order(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker = await harness.open()
        window = harness.lock * 2
        await broker.declare(name, {"session_rate": (1, window)})
        await send_to(broker, name, "s", b"a")
        held = await accept(broker, name, harness)
        [first] = (await received_in(broker, held, 10)).deliveries
        await broker.release(held)  # so that it comes again
        del first
        await send_to(broker, name, "s", b"b", b"c")
        found: list[bytes] = []
        for _ in range(3):
            await harness.pass_time(window * 1.02)
            held = await accept(broker, name, harness)
            claim = await received_in(broker, held, 10)
            found += bodies(claim.deliveries)
            await settle(broker, claim.deliveries, COMPLETE)
            await broker.release(held)
        assert found == [b"a", b"b", b"c"]

    async def test_messages_that_come_into_a_session_at_its_rate_wait(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker = await harness.open()
        window = harness.lock * 4
        await broker.declare(name, {"session_rate": (1, window)})
        await send_to(broker, name, "s", b"a")
        held = await accept(broker, name, harness)
        await settle(broker, (await received_in(broker, held, 10)).deliveries, COMPLETE)
        await broker.release(held)
        await send_to(broker, name, "s", b"b")
        answer = await broker.accept(name, None, harness.lock)
        if isinstance(answer, SessionLock):  # it was free: that its rate is used up shows when one receives
            claim = await received_in(broker, answer, 10)
            assert (claim.is_held_back, bodies(claim.deliveries)) == (True, [])
            assert claim.due_in is not None
            await broker.release(answer)
        assert isinstance(await broker.accept(name, None, harness.lock), NoSession)
        await harness.pass_time(window * 1.02)
        held = await accept(broker, name, harness)
        assert bodies((await received_in(broker, held, 10)).deliveries) == [b"b"]

    async def test_a_session_is_looked_at_again_within_a_minute(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.declare(name, {"session_rate": (1, 1e6)})  # it may be raised before that is over
        await send_to(broker, name, "s", b"a", b"b")
        held = await accept(broker, name, harness)
        claim = await received_in(broker, held, 1)  # as many as were asked for
        assert bodies(claim.deliveries) == [b"a"]
        assert claim.held_up_for is not None
        assert HELD_UP_MAX * 0.8 < claim.held_up_for <= HELD_UP_MAX * 1.01
        claim = await received_in(broker, held, 1)
        assert (claim.is_held_back, bodies(claim.deliveries)) == (True, [])
        assert claim.held_up_for is not None
        assert HELD_UP_MAX * 0.8 < claim.held_up_for <= HELD_UP_MAX * 1.01
        [waiting] = await broker.peek(name, LiveSelection(states=frozenset({"delayed"})), 10)
        assert waiting.due_at is not None
        assert abs(waiting.due_at - waiting.enqueued_at - HELD_UP_MAX) < 5.0

    # --- paused ---

    async def test_nothing_is_received_of_a_paused_queue(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b")
        [got] = (await broker.receive(name, 1, harness.lock)).deliveries
        assert await broker.declare(name, {"paused": True}) == QueueSettings(paused=True)
        assert (await other.settings(name)).paused
        await send(other, name, b"c")
        found = await other.stats(name)
        assert (found.ready, found.locked, found.paused, found.backlog) == (2, 1, True, 1)
        claim = await other.receive(name, 10, harness.lock)
        assert (len(claim.deliveries), claim.is_limited, claim.is_held_back) == (0, True, True)
        [answer] = await broker.renew([got], harness.lock)
        assert isinstance(answer, Renewed)
        assert await settle(broker, [got], COMPLETE) == [Settled()]
        async with hints_of(other, name) as hints:
            assert not (await other.receive(name, 10, harness.lock)).deliveries
            before = hints.count
            assert await broker.declare(name, {"paused": False}) == QueueSettings()
            found = await other.stats(name)
            assert (found.ready, found.paused, found.backlog) == (2, False, 2)
            if harness.traits.hints:
                await until(lambda: hints.count > before)
        assert bodies((await other.receive(name, 10, harness.lock)).deliveries) == [b"b", b"c"]

    async def test_no_session_of_a_paused_queue_is_accepted(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.declare(name, {"paused": True})
        none = await broker.accept(name, None, harness.lock)
        assert isinstance(none, NoSession)
        assert not none.is_held_back
        await send_to(broker, name, "s", b"a")
        none = await broker.accept(name, None, harness.lock)
        assert isinstance(none, NoSession)
        assert none.is_held_back
        held = await broker.accept(name, "s", harness.lock)
        assert isinstance(held, SessionLock)
        claim = await received_in(broker, held, 10)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([], True)
        await broker.declare(name, {"paused": False})
        assert bodies((await received_in(broker, held, 10)).deliveries) == [b"a"]

    async def test_a_paused_queue_that_is_not_empty_is_not_deleted(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker = await harness.open()
        await send(broker, name, b"a")
        await broker.declare(name, {"paused": True})
        answer = await broker.delete(name)
        assert isinstance(answer, NotEmpty)
        assert (answer.stats.ready, answer.stats.paused) == (1, True)
        assert (await broker.settings(name)).paused

    async def test_a_deleted_queue_has_no_limits(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker = await harness.open()
        await broker.declare(name, {"max_locked": 1, "rate": (1, 600.0), "session_rate": (1, 600.0), "paused": True})
        await broker.declare(name, {"paused": False})
        await send(broker, name, b"a", b"b")
        assert len((await broker.receive(name, 10, harness.lock)).deliveries) == 1
        await broker.delete(name, force=True)
        assert await broker.settings(name) == QueueSettings()
        await send(broker, name, b"c", b"d")
        assert len((await broker.receive(name, 1, harness.lock)).deliveries) == 1
        await broker.declare(name, {"rate": (1, 600.0)})
        assert len((await broker.receive(name, 1, harness.lock)).deliveries) == 1

    async def test_limits_are_declared_as_other_settings(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        wished: QueueOptions = {"max_locked": 5, "rate": (7, 1.5), "session_rate": (2, 0.25)}
        holds = QueueSettings(max_locked=5, rate=(7, 1.5), session_rate=(2, 0.25))
        assert await broker.declare(name, wished, only_undeclared=True) == holds
        others: QueueOptions = {"max_locked": 6, "rate": math.inf, "session_rate": math.inf}
        assert await other.declare(name, others, only_undeclared=True) == holds
        assert await other.declare(name, {"paused": True}) == QueueSettings(
            max_locked=5, rate=(7, 1.5), session_rate=(2, 0.25), paused=True
        )
        assert await broker.declare(name, {"max_locked": math.inf, "rate": math.inf}) == QueueSettings(
            session_rate=(2, 0.25), paused=True
        )
        both: QueueOptions = {"session_rate": math.inf, "paused": False}
        assert await broker.declare(name, both) == await other.settings(name) == QueueSettings()


class Hints:
    """Counts the hints that a client gets."""

    count = 0

    async def listen(self, broker: Broker, name: str) -> None:
        """Count them until cancelled."""
        async for _ in broker.hints(name):
            self.count += 1


@asynccontextmanager
async def hints_of(broker: Broker, name: str) -> AsyncIterator[Hints]:
    """Count the hints of a queue meanwhile. A subscription that has just begun may give one for nothing."""
    hints = Hints()
    listening = asyncio.ensure_future(hints.listen(broker, name))
    await asyncio.sleep(0)
    try:
        yield hints
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def send_to(broker: Broker, name: str, session: str, *contents: bytes) -> None:
    """Send messages of a session."""
    await broker.send(name, [Outgoing(body, session=session) for body in contents])


async def received_in(broker: Broker, held: SessionLock, limit: int) -> Claim:
    """Receive in a session whose lock is ours."""
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim), claim
    return claim
