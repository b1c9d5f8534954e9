"""Peeking at live messages, and purging them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tenure._queue.broker import EVERY_LIVE, Broker, LiveSelection
from tenure._queue.message import STATES, Delivery, LiveMessage, SessionLock, State, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Defer, Renewed, Settled
from tenure._runtime.process_name import process_name
from tenure.errors import ConfigError
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    accept,
    bodies,
    dead_letter,
    needs,
    receive,
    receive_session,
    send,
    settle,
)

WAITING: tuple[State, ...] = ("ready", "delayed", "deferred")


class LiveMessagesSuite(QueueSuite):
    """The promises of ``peek`` and ``purge_live``, which act on live messages; one test for each."""

    # --- peeking ---

    async def test_peek_shows_every_field_and_changes_nothing(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        sent = Outgoing(b"\0\xff", id="x", headers={"a": "é", "n": 1}, reply_to="answers", correlation_id="c")
        if harness.traits.sessions == "impossible":
            await broker.send(name, [sent])
        else:
            await broker.send(name, [replace(sent, session="s")])
        [one] = await broker.peek(name, EVERY_LIVE, 10)
        for _ in range(3):
            assert list(await (await harness.open()).peek(name, EVERY_LIVE, 10)) == [one]
            assert (one.queue, one.id, one.body, dict(one.headers)) == (name, "x", b"\0\xff", {"a": "é", "n": 1})
            assert (one.state, one.delivery_count, one.locked_until, one.due_at) == ("ready", 0, None, None)
            assert (one.priority, one.reply_to, one.correlation_id) == (0, "answers", "c")
        if harness.traits.sessions == "impossible":
            [got] = await receive(broker, name, harness)
        else:
            assert one.session == "s"
            [got] = await receive_session(broker, await accept(broker, name, harness))
        assert (got.sequence, got.delivery_count) == (one.sequence, 1)
        assert abs(got.enqueued_at - one.enqueued_at) < 1e-3
        assert (await settle(broker, [got], COMPLETE)) == [Settled()]
        assert list(await broker.peek(name, EVERY_LIVE, 10)) == []
        assert list(await broker.peek(f"{name}-unused", EVERY_LIVE, 10)) == []

    async def test_a_lock_tells_its_holder(self, harness: QueueHarness, name: str) -> None:
        needs_full_peek(harness)
        broker, other = await harness.open(), await harness.open()
        if not harness.traits.tells_holder:
            pytest.skip("this broker does not tell who has locked a message")
        await send(broker, name, b"a", b"b")
        began = time.time()
        [got] = await receive(broker, name, harness, limit=1)

        async def shown() -> tuple[LiveMessage, LiveMessage]:
            locked, ready = await other.peek(name, EVERY_LIVE, 10)
            return locked, ready

        async def is_told() -> bool:
            return (await shown())[0].locked_by is not None

        await until(is_told)
        locked, ready = await shown()
        assert (ready.state, ready.locked_by, ready.locked_since) == ("ready", None, None)
        assert (locked.state, locked.locked_by) == ("locked", process_name())
        since = locked.locked_since
        assert since is not None
        assert abs(since - began) < 2.0
        await harness.pass_time(harness.lock * 0.6)
        assert isinstance((await broker.renew([got], harness.lock))[0], Renewed)
        assert (await shown())[0].locked_since == pytest.approx(since, abs=0.01)
        await harness.pass_time(harness.lock * LATE)
        await receive(other, name, harness, limit=1)
        await until(is_told)
        again = (await shown())[0].locked_since
        assert again is not None
        assert again > since

    async def test_each_state_is_shown_with_its_times(self, harness: QueueHarness, name: str) -> None:
        needs_full_peek(harness)
        broker = await harness.open()
        held = await in_each_state(broker, harness, name)
        shown = {one.body: one for one in await broker.peek(name, EVERY_LIVE, 10)}
        assert {body: one.state for body, one in shown.items()} == {
            b"locked": "locked",
            b"deferred": "deferred",
            b"ready": "ready",
            b"delayed": "delayed",
        }
        assert [one.body for one in shown.values()] == [b"locked", b"deferred", b"ready", b"delayed"]
        counts = {body: one.delivery_count for body, one in shown.items()}
        assert counts == {b"locked": 1, b"deferred": 1, b"ready": 0, b"delayed": 0}
        until, due = shown[b"locked"].locked_until, shown[b"delayed"].due_at
        assert until is not None
        assert abs(until - held.locked_until) < 1.0
        assert due is not None
        assert abs(due - shown[b"delayed"].enqueued_at - harness.lock) < 1.0
        assert [one.due_at for one in shown.values() if one.state != "delayed"] == [None] * 3
        assert [one.locked_until for one in shown.values() if one.state != "locked"] == [None] * 3
        for state in STATES:
            found = await broker.peek(name, LiveSelection(states=frozenset([state])), 10)
            assert bodies(found) == [state.encode()]

    async def test_peek_shows_expired_locks_and_delays(self, harness: QueueHarness, name: str) -> None:
        needs_full_peek(harness)
        broker = await harness.open()
        await broker.declare(name, {"max_deliveries": 2})
        await send(broker, name, b"crashed")
        assert len(await receive(broker, name, harness)) == 1
        await broker.send(
            name, [Outgoing(b"late", delay=harness.lock / 2), Outgoing(b"short", expires_in=harness.lock / 2)]
        )
        await harness.pass_time(harness.lock * LATE)
        shown = [(one.body, one.state, one.delivery_count) for one in await broker.peek(name, EVERY_LIVE, 10)]
        assert shown == [(b"crashed", "ready", 1), (b"late", "ready", 0)]

    async def test_peek_shows_the_selected_messages_oldest_first(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        has_priorities, has_sessions = (
            support != "impossible" for support in (harness.traits.priorities, harness.traits.sessions)
        )
        for number in range(9):
            one = Outgoing(b"%d" % number, id=f"id-{number}", priority=number if has_priorities else 0)
            await broker.send(name, [replace(one, session="s")] if number % 3 == 2 and has_sessions else [one])
        everything = await broker.peek(name, EVERY_LIVE, 100)
        assert in_order_sent(harness, everything) == [b"%d" % number for number in range(9)]
        by_body = {one.body: one for one in everything}
        few = await broker.peek(name, EVERY_LIVE, 4)
        assert len(few) == 4
        if harness.traits.order != "impossible":
            assert bodies(few) == [b"0", b"1", b"2", b"3"]
            rest = await broker.peek(name, LiveSelection(after=few[-1].sequence), 100)
            assert bodies(rest) == [b"4", b"5", b"6", b"7", b"8"]
        three = frozenset([by_body[b"1"].sequence, by_body[b"5"].sequence, 10**12])
        assert in_order_sent(harness, await broker.peek(name, LiveSelection(sequences=three), 9)) == [b"1", b"5"]
        some = LiveSelection(ids=frozenset(["id-2", "id-7", "id-99"]))
        assert in_order_sent(harness, await broker.peek(name, some, 9)) == [b"2", b"7"]
        assert bodies(await broker.peek(name, replace(some, sequences=three), 9)) == []
        first = min(one.enqueued_at for one in everything)
        assert bodies(await broker.peek(name, LiveSelection(sent_before=first), 9)) == []
        assert len(await broker.peek(name, LiveSelection(sent_before=first + 1e6), 9)) == 9
        if has_sessions:
            assert bodies(await broker.peek(name, LiveSelection(session="s"), 9)) == [b"2", b"5", b"8"]

    async def test_generated_ids_are_found(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        ids = await send(broker, name, b"a", b"b", b"c")
        assert bodies(await broker.peek(name, LiveSelection(ids=frozenset([ids[1]])), 9)) == [b"b"]
        assert await broker.purge_live(name, LiveSelection(ids=frozenset([ids[1]]))) == 1
        assert sorted(bodies(await broker.peek(name, EVERY_LIVE, 9))) == [b"a", b"c"]

    async def test_large_bodies_are_all_shown(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        size = min(2**20, harness.traits.body_max)
        for number in range(6):
            await send(broker, name, bytes([number]) * size)
        assert sorted(one.body[:1] for one in await broker.peek(name, EVERY_LIVE, 10)) == [bytes([n]) for n in range(6)]

    async def test_a_state_that_is_not_shown_is_refused(self, harness: QueueHarness, name: str) -> None:
        if harness.traits.peek == "native":
            pytest.skip("this broker shows every state")
        broker = await harness.open()
        await send(broker, name, b"stays")
        with pytest.raises(ConfigError):
            await broker.peek(name, LiveSelection(states=frozenset(["delayed"])), 10)
        with pytest.raises(ConfigError):
            await broker.purge_live(name, LiveSelection(states=frozenset(["ready", "delayed"])))
        assert bodies(await broker.peek(name, LiveSelection(states=frozenset(["ready"])), 10)) == [b"stays"]

    # --- purging ---

    async def test_purge_leaves_locked_messages_and_dead_letters(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await dead_letter(broker, harness, name, b"dead")
        await send(broker, name, b"a", b"b")
        held = await receive(broker, name, harness)
        await send(broker, name, b"c", b"d", b"e")
        await send(broker, f"{name}-2", b"another queue's")
        assert await other.purge_live(name, EVERY_LIVE, dry_run=True) == 3
        assert await other.purge_live(name, EVERY_LIVE) == 3
        assert await other.purge_live(name, EVERY_LIVE) == 0
        stats = await broker.stats(name)
        assert (stats.ready, stats.locked, stats.dead) == (0, 2, 1)
        assert await receive(other, name, harness) == []
        assert await settle(broker, held[:1], GIVE_BACK) == [Settled()]
        assert await settle(broker, held[1:], COMPLETE) == [Settled()]
        [again] = await receive(other, name, harness)
        assert (again.body, again.delivery_count) == (held[0].body, 1)
        assert (await broker.stats(f"{name}-2")).ready == 1
        assert await broker.purge_live(f"{name}-unused", EVERY_LIVE) == 0

    @pytest.mark.parametrize("state", WAITING)
    async def test_purge_takes_the_selected_state(self, harness: QueueHarness, name: str, state: State) -> None:
        needs_full_peek(harness)
        broker = await harness.open()
        held = await in_each_state(broker, harness, name)
        selection = LiveSelection(states=frozenset([state]))
        assert await broker.purge_live(name, selection, dry_run=True) == 1
        assert await broker.purge_live(name, selection) == 1
        left = {one.state for one in await broker.peek(name, EVERY_LIVE, 10)}
        assert left == {"ready", "locked", "delayed", "deferred"} - {state}
        assert await broker.purge_live(name, EVERY_LIVE) == 2
        assert await broker.stats(name) == Stats(locked=1)
        assert await settle(broker, [held], COMPLETE) == [Settled()]

    async def test_purge_takes_the_selected_messages(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, id=f"id-{number}") for number in range(6)])
        shown = {one.body: one for one in await broker.peek(name, EVERY_LIVE, 10)}
        assert await broker.purge_live(name, LiveSelection(ids=frozenset(["id-1", "id-9"]))) == 1
        assert await broker.purge_live(name, LiveSelection(sequences=frozenset([shown[b"4"].sequence, 10**12]))) == 1
        assert await broker.purge_live(name, LiveSelection(sent_before=shown[b"0"].enqueued_at - 10)) == 0
        assert sorted(bodies(await receive(broker, name, harness))) == [b"0", b"2", b"3", b"5"]

    async def test_purge_takes_messages_sent_before_a_time(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"old")
        [old] = await broker.peek(name, EVERY_LIVE, 10)
        await harness.pass_time(3.0 if harness.traits.order == "impossible" else harness.lock)
        await send(broker, name, b"new")
        which = LiveSelection(sent_before=old.enqueued_at + 0.01)
        assert await broker.purge_live(name, replace(which, sent_before=old.enqueued_at)) == 0
        assert await broker.purge_live(name, which, dry_run=True) == 1
        assert await broker.purge_live(name, which) == 1
        assert bodies(await broker.peek(name, EVERY_LIVE, 10)) == [b"new"]

    async def test_purge_takes_the_selected_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        for number in range(6):
            await broker.send(name, [Outgoing(b"%d" % number, session=(None, "s", "t")[number % 3])])
        which = LiveSelection(session="s")
        assert await broker.purge_live(name, replace(which, session="u")) == 0
        assert await broker.purge_live(name, which, dry_run=True) == 2
        assert await broker.purge_live(name, which) == 2
        assert sorted(bodies(await broker.peek(name, EVERY_LIVE, 10))) == [b"0", b"2", b"3", b"5"]

    async def test_messages_not_selected_are_unchanged(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 2})
        await broker.send(name, [Outgoing(b"stays", id="stays"), Outgoing(b"goes", id="goes")])
        for _ in range(3):
            assert await broker.purge_live(name, LiveSelection(ids=frozenset(["unknown"]))) == 0
        assert await broker.purge_live(name, LiveSelection(ids=frozenset(["goes"]))) == 1
        [got] = await receive(broker, name, harness)
        assert (got.body, got.delivery_count) == (b"stays", 1)

    async def test_a_purged_message_is_not_dead_lettered(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"x", expires_in=harness.lock / 2) for _ in range(3)])
        assert await broker.purge_live(name, EVERY_LIVE) == 3
        await harness.pass_time(harness.lock * LATE)
        assert (await broker.receive(name, 10, harness.lock)).deliveries == ()
        assert await broker.stats(name) == Stats()

    async def test_ids_are_remembered_after_a_purge(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dedupe)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"1", id="x")])
        assert await broker.purge_live(name, EVERY_LIVE) == 1
        await broker.send(name, [Outgoing(b"2", id="x")])
        assert await broker.stats(name) == Stats()

    async def test_a_purged_retry_no_longer_blocks_its_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        if not harness.traits.mixed_sessions:
            pytest.skip("a retry of a session waits with the consumer that holds it here")
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"fails", session="s"), Outgoing(b"next", session="s")])
        held = await accept(broker, name, harness)
        await settle(broker, await receive_session(broker, held, 1), Abandon(1_000.0))
        await broker.release(held)
        hint = aiter((await harness.open()).hints(name))
        waiting = asyncio.ensure_future(anext(hint))
        await asyncio.sleep(0)
        assert await broker.purge_live(name, LiveSelection(states=frozenset(["delayed"]))) == 1
        assert bodies(await receive_session(broker, await accept(broker, name, harness))) == [b"next"]
        if harness.traits.hints:
            await asyncio.wait_for(waiting, harness.answer_within)
        else:
            waiting.cancel()

    async def test_a_purged_session_is_not_offered(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, session=f"s{number % 2}") for number in range(6)])
        held = await accept(broker, name, harness)
        [first] = await receive_session(broker, held, 1)
        await broker.write_state(held, b"kept")
        assert await broker.purge_live(name, EVERY_LIVE) == 5
        assert await settle(broker, [first], COMPLETE) == [Settled()]
        assert await receive_session(broker, held) == []
        await broker.release(held)
        assert await broker.stats(name) == Stats()
        assert not await offered(broker, harness, name)
        await broker.send(name, [Outgoing(b"new", session=held.session)])
        again = await accept(broker, name, harness)
        assert (again.session, again.state) == (held.session, b"kept")

    async def test_many_are_purged_while_others_send_and_receive(self, harness: QueueHarness, name: str) -> None:
        """Each message is either purged or claimed, however the two interleave."""
        clients = [await harness.open() for _ in range(4)]
        size = harness.backlog
        for first in range(0, size, 500):
            await send(clients[0], name, *[b"old"] * min(500, size - first))
        taken = await receive(clients[2], name, harness, limit=7)  # some brokers purge everything in one step
        purging = [asyncio.ensure_future(one.purge_live(name, EVERY_LIVE)) for one in clients[:2]]
        sent = 0
        while not all(purge.done() for purge in purging):
            taken += await receive(clients[2], name, harness, limit=7)
            sent += len(await send(clients[3], name, b"new", b"new"))
            await asyncio.sleep(0)
        purged = sum([await purge for purge in purging])
        assert all(type(one) is Settled for one in await settle(clients[2], taken, COMPLETE))
        left = 0
        while got := await receive(clients[3], name, harness, limit=500):
            left += len(got)
            assert all(type(one) is Settled for one in await settle(clients[3], got, COMPLETE))
        assert purged
        assert taken
        assert purged + len(taken) + left == size + sent
        assert await clients[0].stats(name) == Stats()


# --- steps ---


def needs_full_peek(harness: QueueHarness) -> None:
    """Skip the test if the broker shows only some of its live messages."""
    if harness.traits.peek != "native":
        pytest.skip("this broker shows only ready messages")


def in_order_sent(harness: QueueHarness, shown: Sequence[LiveMessage]) -> list[bytes]:
    """Return the bodies of the messages *shown*, in their order, or sorted if the broker keeps no order."""
    assert [one.sequence for one in shown] == sorted(one.sequence for one in shown)
    return sorted(bodies(shown)) if harness.traits.order == "impossible" else bodies(shown)


async def in_each_state(broker: Broker, harness: QueueHarness, name: str) -> Delivery:
    """Send a message into each state, which is its body; return the delivery of the locked one."""
    await send(broker, name, b"locked", b"deferred")
    held, aside = await receive(broker, name, harness)
    assert await settle(broker, [aside], Defer()) == [Settled()]
    await send(broker, name, b"ready")
    await broker.send(name, [Outgoing(b"delayed", delay=harness.lock)])
    return held


async def offered(broker: Broker, harness: QueueHarness, name: str) -> bool:
    """Return whether a session can be accepted."""
    return isinstance(await broker.accept(name, None, harness.lock), SessionLock)
