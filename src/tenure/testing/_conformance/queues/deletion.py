"""Deleting a queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tenure._queue.broker import (
    EVERYTHING,
    Broker,
    QueueSettings,
)
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Complete, DeadLetter, Defer, Deleted, NotEmpty, Settled, Verdict
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    bodies,
    needs,
    receive,
    send,
    settle,
)


class DeletionTests(QueueSuite):
    """An empty queue can be deleted, any other by force only."""

    async def test_an_empty_queue_can_be_deleted(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_deliveries": 7, "dead_retention": 9_000.0})
        await broker.delete_when_idle(name, 0.0)
        await send(broker, name, b"a", b"b")
        old = await receive(broker, name, harness)
        await settle(broker, old, COMPLETE)
        assert await other.delete(name) == Deleted(Stats())
        assert name not in await broker.names()
        assert await broker.settings(name) == QueueSettings()
        assert await receive(broker, name, harness) == []
        assert await broker.stats(name) == Stats()
        assert await other.delete(name) == Deleted(Stats())  # deleting a missing queue is no error
        await send(broker, name, b"c")  # by a client that doesn't know of the deletion
        assert await broker.settings(name) == QueueSettings()
        assert name in await other.names() or not harness.traits.exact_stats
        [new] = await receive(other, name, harness)
        if harness.traits.order != "impossible" and not harness.traits.sequences_restart:
            assert new.sequence > max(one.sequence for one in old)
        assert await settle(broker, old, COMPLETE) == [LAPSED] * 2
        assert await settle(other, [new], COMPLETE) == [Settled()]
        assert name not in await other.idle()  # nothing was declared for the new queue

    @pytest.mark.parametrize("state", ["ready", "locked", "delayed", "deferred", "dead", "session"])
    async def test_a_queue_that_holds_anything_is_deleted_by_force_only(
        self, harness: QueueHarness, name: str, state: str
    ) -> None:
        needs(
            {
                "delayed": harness.traits.delay,
                "deferred": harness.traits.deferral,
                "dead": harness.traits.dead_letters,
                "session": harness.traits.sessions,
            }.get(state, "native")
        )
        broker, other = await harness.open(), await harness.open()
        old = await put_into_state(broker, harness, name, state)
        answer = await other.delete(name)
        counted = "ready" if state == "session" else state
        wanted = Stats(**{counted: 1})  # type: ignore[arg-type]  # it is a count
        assert isinstance(answer, NotEmpty)
        assert replace(answer.stats, oldest_age=0.0) == wanted or not harness.traits.exact_stats
        assert replace(await broker.stats(name), oldest_age=0.0) == wanted or not harness.traits.exact_stats
        assert name in await broker.names()
        answer = await other.delete(name, force=True)
        assert isinstance(answer, Deleted)
        assert replace(answer.stats, oldest_age=0.0) == wanted or not harness.traits.exact_stats
        assert name not in await broker.names()
        await send(broker, name, b"new")
        assert await settle(broker, old, COMPLETE) == [LAPSED] * len(old)
        await harness.pass_time(harness.lock * 2 * LATE)
        assert bodies(await receive(broker, name, harness)) == [b"new"]
        if harness.traits.dead_letters != "impossible":
            assert await broker.peek_dead(name, EVERYTHING, 10) == []

    async def test_deletion_removes_ids_and_session_states(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dedupe)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a", id="a")])
        has_inbox = harness.traits.inbox != "impossible"
        await settle(broker, await receive(broker, name, harness), Complete(remember=harness.lock * 10 * has_inbox))
        if harness.traits.sessions != "impossible":
            home = name if harness.traits.mixed_sessions else f"{name}-sessions"
            held = await broker.accept(home, "s", harness.lock)
            assert isinstance(held, SessionLock)
            await broker.write_state(held, b"state")
            assert await broker.delete(home) == Deleted(Stats())
            assert await broker.write_state(held, b"late") == LAPSED
            assert await broker.release(held) == LAPSED
            held = await broker.accept(home, "s", harness.lock)
            assert isinstance(held, SessionLock)
            assert held.state is None
        assert await broker.delete(name) == Deleted(Stats())
        if has_inbox:
            assert list(await broker.handled(name, ["a"])) == [False]
        await broker.send(name, [Outgoing(b"b", id="a")])
        assert bodies(await receive(broker, name, harness)) == [b"b"]
        if has_inbox:
            assert list(await broker.handled(name, ["a"])) == [False]  # also when there is a queue again

    async def test_a_deep_queue_can_be_deleted_by_force(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        broker = await harness.open()
        many = [Outgoing(b"x", session="s" if number % 3 else None) for number in range(2_500)]
        await broker.send(name, many)
        await receive(broker, name, harness, limit=300)
        await send(broker, f"{name}-2", b"of another queue")
        answer = await broker.delete(name, force=True)
        assert (answer.stats.ready, answer.stats.locked) == (2_200, 300)
        assert await broker.stats(name) == Stats()
        assert bodies(await receive(broker, f"{name}-2", harness)) == [b"of another queue"]

    async def test_nothing_is_lost_that_is_sent_while_a_queue_is_deleted(
        self, harness: QueueHarness, name: str
    ) -> None:
        if not harness.traits.exact_stats:
            pytest.skip("this broker can't check and delete in one step")
        broker, other = await harness.open(), await harness.open()
        for number in range(15):
            body = b"%d" % number
            await asyncio.gather(send(broker, name, body), other.delete(name))
            got = await receive(broker, name, harness)
            assert bodies(got) == [body]
            await settle(broker, got, COMPLETE)

    async def test_an_idle_queue_is_listed_after_its_time(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        for one in (broker, other):  # so that each knows the time of the store
            await send(one, f"{name}-2", b"a")
        await broker.delete_when_idle(name, harness.lock)
        await harness.pass_time(harness.lock * 0.6)
        await broker.delete_when_idle(name, harness.lock)
        await harness.pass_time(harness.lock * 0.6)
        assert name not in await other.idle()
        await harness.pass_time(harness.lock * 0.6)
        assert name in await other.idle()
        assert await other.delete(name) == Deleted(Stats())
        assert name not in await other.idle()


async def put_into_state(broker: Broker, harness: QueueHarness, name: str, state: str) -> list[Delivery]:
    """Send a message, and bring it into *state*; return the deliveries that took it there."""
    if state == "session":
        await broker.send(name, [Outgoing(b"old", session="s")])
        return []
    await broker.send(name, [Outgoing(b"old", delay=harness.lock if state == "delayed" else 0.0)])
    if state in ("ready", "delayed"):
        return []
    got = await receive(broker, name, harness)
    verdicts: dict[str, Verdict] = {"deferred": Defer(), "dead": DeadLetter("broken")}
    if state in verdicts:
        await settle(broker, got, verdicts[state])
    return got
