"""Sessions."""

from __future__ import annotations

from tenure._queue.broker import (
    NoSession,
)
from tenure._queue.message import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
)
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
    """The messages of a session come in order, to the one consumer that has locked it."""

    async def test_messages_of_sessions_come_only_to_their_holder(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"%d" % number, session=f"s{number % 2}") for number in range(6)])
        await send(broker, name, b"free")
        assert bodies(await receive(broker, name, house)) == [b"free"]
        first = await accept(broker, name, house)
        second = await accept(other, name, house)
        assert (first.session, second.session) == ("s0", "s1")
        none = await broker.accept(name, None, house.lock)
        assert isinstance(none, NoSession)
        assert none.due_in is None or 0 < none.due_in <= house.lock
        assert isinstance(await broker.accept(name, "s1", house.lock), NoSession)
        got = await receive_session(broker, first, limit=2)
        assert bodies(got) == [b"0", b"2"]
        assert {one.session for one in got} == {"s0"}
        assert bodies(await receive_session(broker, first)) == [b"4"]
        assert bodies(await receive_session(other, second)) == [b"1", b"3", b"5"]
        assert await settle(broker, got, COMPLETE) == [Settled(), Settled()]

    async def test_a_session_is_in_order_through_failures(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"%d" % number, session="s", priority=number) for number in range(4)])
        await broker.send(name, [Outgoing(b"late", session="s", delay=house.lock / 2), Outgoing(b"4", session="s")])
        held = await accept(broker, name, house)
        first, second = await receive_session(broker, held, limit=2)
        await broker.settle([Settlement(first, Abandon(delay=house.lock / 4)), Settlement(second, GIVE_BACK)])
        assert await receive_session(broker, held) == []  # the one that is to be tried again stands before them
        await house.pass_time(house.lock / 4 * LATE)
        got = await receive_session(broker, held)
        assert bodies(got) == [b"0", b"1", b"2", b"3", b"4"]  # the one sent with a delay holds up nobody
        assert [one.delivery_count for one in got] == [2, 1, 1, 1, 1]
        await settle(broker, got, COMPLETE)
        await house.pass_time(house.lock / 2 * LATE)
        assert bodies(await receive_session(broker, held)) == [b"late"]

    async def test_a_released_session_is_free_at_once(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held = await accept(broker, name, house)
        got = await receive_session(broker, held, limit=1)
        assert await broker.release(held) == Settled()
        assert await broker.release(held) == LAPSED
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await broker.receive_session(held, 1) == LAPSED
        again = await accept(other, name, house)
        assert again.token != held.token
        assert [(one.body, one.delivery_count) for one in await receive_session(other, again)] == [(b"a", 1), (b"b", 1)]

    async def test_when_a_sessions_lock_ends_all_of_it_is_lost(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held = await accept(broker, name, house)
        got = await receive_session(broker, held, limit=1)
        await house.pass_time(house.lock * 0.7)
        [renewed] = await broker.renew([held], house.lock)
        assert isinstance(renewed, Renewed)
        await house.pass_time(house.lock * 0.7)
        assert isinstance(await other.accept(name, None, house.lock), NoSession)
        [covered] = await broker.renew(got, house.lock)  # by the session's lock: it ends when that does
        assert isinstance(covered, Renewed)
        assert abs(covered.locked_until - renewed.locked_until) < 0.1 * house.lock
        await house.pass_time(house.lock * 0.7)
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert await broker.renew([held, *got], house.lock) == [LAPSED, LAPSED]
        assert await broker.write_state(held, b"x") == LAPSED
        again = await accept(other, name, house)
        assert [one.delivery_count for one in await receive_session(other, again)] == [2, 1]

    async def test_a_session_is_in_order_after_a_crash_however_much_is_due(
        self, house: QueueHarness, name: str
    ) -> None:
        needs(house.traits.sessions)
        needs(house.traits.delay)
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(body, session="s") for body in (b"1", b"2", b"3")])
        assert bodies(await receive_session(broker, await accept(broker, name, house), limit=1)) == [
            b"1"
        ]  # the last of it
        await other.send(name, [Outgoing(b"due", delay=house.lock / 2)] * house.backlog)
        await house.pass_time(house.lock * LATE)
        handled: list[bytes] = []

        async def handle_all() -> bool:
            held = await other.accept(name, None, house.lock)
            if isinstance(held, SessionLock):
                got = await receive_session(other, held)
                handled.extend(bodies(got))
                await settle(other, got, COMPLETE)
                await other.release(held)
            return len(handled) >= 3

        await until(handle_all)
        assert handled == [b"1", b"2", b"3"]

    async def test_a_session_keeps_its_state(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker, other = await house.open(), await house.open()
        held = await broker.accept(name, "s", house.lock)  # a named one needs no messages
        assert isinstance(held, SessionLock)
        assert held.state is None
        assert await broker.read_state(held) is None
        assert await broker.write_state(held, b"\x00state") == Settled()
        assert await broker.read_state(held) == b"\x00state"
        assert isinstance(await other.accept(name, "s", house.lock), NoSession)
        await broker.release(held)
        assert await broker.read_state(held) == LAPSED
        again = await other.accept(name, "s", house.lock)
        assert isinstance(again, SessionLock)
        assert again.state == b"\x00state"
        await other.write_state(again, None)
        assert await other.read_state(again) is None

    async def test_the_session_that_waited_longest_is_next(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker = await house.open()
        await broker.send(name, [Outgoing(session="b"), Outgoing(session="a"), Outgoing(session="b")])
        first = await accept(broker, name, house)
        assert first.session == "b"
        await settle(broker, await receive_session(broker, first, limit=1), COMPLETE)
        await broker.release(first)
        assert (await accept(broker, name, house)).session == "a"
        assert (await accept(broker, name, house)).session == "b"
