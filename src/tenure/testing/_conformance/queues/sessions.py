"""Sessions."""

from __future__ import annotations

from tenure._queue.broker import (
    NoSession,
)
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, LAPSED, Abandon, Renewed, Settled, Settlement
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    accept,
    bodies,
    needs,
    receive,
    receive_session,
    send,
    settle,
)


class SessionTests(QueueSuite):
    """The messages of a session are received in order, by the one consumer that has locked it."""

    async def test_messages_of_sessions_come_only_to_their_holder(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, session=f"s{number % 2}") for number in range(6)])
        if harness.traits.mixed_sessions:
            await send(broker, name, b"free")
            assert bodies(await receive(broker, name, harness)) == [b"free"]
        first = await accept(broker, name, harness)
        second = await accept(other, name, harness)
        assert (first.session, second.session) == ("s0", "s1")
        none = await broker.accept(name, None, harness.lock)
        assert isinstance(none, NoSession)
        assert none.due_in is None or 0 < none.due_in <= harness.lock
        assert isinstance(await broker.accept(name, "s1", harness.lock), NoSession)
        got = await receive_session(broker, first, limit=2)
        assert bodies(got) == [b"0", b"2"]
        assert {one.session for one in got} == {"s0"}
        assert bodies(await receive_session(broker, first)) == [b"4"]
        assert bodies(await receive_session(other, second)) == [b"1", b"3", b"5"]
        assert await settle(broker, got, COMPLETE) == [Settled(), Settled()]

    async def test_a_session_is_in_order_through_failures(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        highest = 0 if harness.traits.priorities == "impossible" else 9
        sent = [Outgoing(b"%d" % number, session="s", priority=min(number, highest)) for number in range(4)]
        await broker.send(name, sent)
        await broker.send(name, [Outgoing(b"late", session="s", delay=harness.lock / 2), Outgoing(b"4", session="s")])
        held = await accept(broker, name, harness)
        first, second = await receive_session(broker, held, limit=2)
        await broker.settle([Settlement(first, Abandon(delay=harness.lock / 4)), Settlement(second, GIVE_BACK)])
        assert await receive_session(broker, held) == []  # the retry blocks the messages behind it
        await harness.pass_time(harness.lock / 4 * LATE)
        got = await receive_session(broker, held)
        assert bodies(got) == [b"0", b"1", b"2", b"3", b"4"]  # the one sent with a delay blocks no other
        assert [one.delivery_count for one in got] == [2, 1, 1, 1, 1]
        await settle(broker, got, COMPLETE)
        await harness.pass_time(harness.lock / 2 * LATE)
        assert bodies(await receive_session(broker, held)) == [b"late"]

    async def test_a_released_session_is_free_at_once(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held = await accept(broker, name, harness)
        got = await receive_session(broker, held, limit=1)
        assert await broker.release(held) == Settled()
        assert await broker.release(held) == LAPSED
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await broker.receive_session(held, 1) == LAPSED
        again = await accept(other, name, harness)
        assert again.token != held.token
        assert [(one.body, one.delivery_count) for one in await receive_session(other, again)] == [(b"a", 1), (b"b", 1)]

    async def test_an_expired_session_lock_loses_all_its_messages(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held = await accept(broker, name, harness)
        got = await receive_session(broker, held, limit=1)
        await harness.pass_time(harness.lock * 0.7)
        [renewed] = await broker.renew([held], harness.lock)
        assert isinstance(renewed, Renewed)
        await harness.pass_time(harness.lock * 0.7)
        assert isinstance(await other.accept(name, None, harness.lock), NoSession)
        [covered] = await broker.renew(got, harness.lock)  # by the lock of its session: both end together
        assert isinstance(covered, Renewed)
        assert abs(covered.locked_until - renewed.locked_until) < 0.1 * harness.lock
        await harness.pass_time(harness.lock * 0.7)
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await broker.renew([held, *got], harness.lock) == [LAPSED, LAPSED]
        assert await broker.write_state(held, b"x") == LAPSED
        again = await accept(other, name, harness)
        assert [one.delivery_count for one in await receive_session(other, again)] == [2, 1]

    async def test_a_session_is_in_order_after_a_crash_however_much_is_due(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.sessions)
        needs(harness.traits.delay)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(body, session="s") for body in (b"1", b"2", b"3")])
        assert bodies(await receive_session(broker, await accept(broker, name, harness), limit=1)) == [
            b"1"
        ]  # the last of it
        session = None if harness.traits.mixed_sessions else "others"
        await other.send(name, [Outgoing(b"due", delay=harness.lock / 2, session=session)] * harness.backlog)
        await harness.pass_time(harness.lock * LATE)
        handled: list[bytes] = []

        async def handle_all() -> bool:
            held = await other.accept(name, None if session is None else "s", harness.lock)
            if isinstance(held, SessionLock):
                got = await receive_session(other, held)
                handled.extend(bodies(got))
                await settle(other, got, COMPLETE)
                await other.release(held)
            return len(handled) >= 3

        await until(handle_all)
        assert handled == [b"1", b"2", b"3"]

    async def test_a_session_keeps_its_state(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        held = await broker.accept(name, "s", harness.lock)  # a named one needs no messages
        assert isinstance(held, SessionLock)
        assert held.state is None
        assert await broker.read_state(held) is None
        assert await broker.write_state(held, b"\x00state") == Settled()
        assert await broker.read_state(held) == b"\x00state"
        assert isinstance(await other.accept(name, "s", harness.lock), NoSession)
        await broker.release(held)
        assert await broker.read_state(held) == LAPSED
        again = await other.accept(name, "s", harness.lock)
        assert isinstance(again, SessionLock)
        assert again.state == b"\x00state"
        await other.write_state(again, None)
        assert await other.read_state(again) is None

    async def test_the_session_that_waited_longest_is_next(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.send(name, [Outgoing(session="b"), Outgoing(session="a"), Outgoing(session="b")])
        first = await accept(broker, name, harness)
        assert first.session == "b"
        await settle(broker, await receive_session(broker, first, limit=1), COMPLETE)
        await broker.release(first)
        assert (await accept(broker, name, harness)).session == "a"
        assert (await accept(broker, name, harness)).session == "b"
