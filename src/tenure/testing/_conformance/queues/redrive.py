"""Redriving dead letters."""

from __future__ import annotations

import pytest

from tenure._queue.broker import (
    EVERYTHING,
    Selection,
)
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Settled
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    ERROR,
    LATE,
    QueueSuite,
    accept,
    bodies,
    dead_letter,
    needs,
    only_dead_letter,
    receive,
    receive_session,
    receive_some,
    settle,
)


class RedriveTests(QueueSuite):
    """A redriven message is delivered again as if it were new, in its queue or in another."""

    @pytest.mark.parametrize("session", [None, "s"])
    async def test_a_message_that_was_ready_before_comes_once(
        self, harness: QueueHarness, name: str, session: str | None
    ) -> None:
        if session:
            needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock})
        await broker.send(name, [Outgoing(b"a", session=session, expires_in=harness.lock * 0.5)])
        await harness.pass_time(harness.lock)
        if not harness.traits.exact_stats and not session:  # it is found to be dead by who would receive it
            assert await receive(broker, name, harness) == []
        await only_dead_letter(broker, harness, name)
        assert await broker.redrive(name, EVERYTHING, None) == 1
        if session:
            got = await receive_session(broker, await accept(broker, name, harness))
        else:
            got = await receive_some(broker, name, harness, 100, least=1)
        assert bodies(got) == [b"a"]

    async def test_redrive_starts_anew(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 1})
        await broker.send(name, [Outgoing(b"a", id="a", expires_in=harness.lock * 0.5), Outgoing(b"b", id="b")])
        await harness.pass_time(harness.lock * 0.6)
        await settle(broker, await receive(broker, name, harness), Abandon(0.0, ERROR))
        assert await broker.stats(name) == Stats(dead=2)
        assert await broker.redrive(name, EVERYTHING, None, dry_run=True) == 2
        assert await broker.stats(name) == Stats(dead=2)
        assert await broker.redrive(name, EVERYTHING, None) == 2
        stats = await broker.stats(name)
        assert (stats.ready, stats.dead) == (2, 0)
        got = await receive(broker, name, harness)
        assert sorted((one.id, one.delivery_count, one.death) for one in got) == [("a", 1, None), ("b", 1, None)]
        await settle(broker, got, Abandon())
        again = await broker.peek_dead(name, EVERYTHING, 10)
        assert {one.id: len(one.history) for one in again} == {"a": 1, "b": 2}  # the earlier history is kept

    async def test_redrive_and_purge_take_the_selected_dead_letters(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await dead_letter(broker, harness, name, *[b"%d" % number for number in range(6)])
        dead = await broker.peek_dead(name, EVERYTHING, 10)
        await harness.pass_time(harness.lock)
        await dead_letter(broker, harness, name, b"x", reason="other")
        [other] = await broker.peek_dead(name, Selection(reason="other"), 10)
        assert other.body == b"x"
        assert len(await broker.peek_dead(name, Selection(dead_before=other.dead_at), 10)) == 6
        assert len(await broker.peek_dead(name, Selection(after=dead[1].sequence), 3)) == 3
        assert await broker.redrive(name, Selection(ids=frozenset({dead[2].id, "unknown"})), None) == 1
        assert await broker.redrive(name, Selection(reason="because"), 2) == 2
        assert sorted(bodies(await receive(broker, name, harness))) == sorted(bodies(dead[:3]))
        assert await broker.purge(name, Selection(sequences=frozenset({dead[3].sequence, dead[0].sequence})), None) == 1
        [locked] = await receive(broker, dead_letters_of(name), harness, limit=1)
        if harness.traits.order != "impossible":
            assert locked.body == b"4"
        assert await broker.redrive(name, Selection(reason="nothing"), None) == 0
        assert await broker.redrive(name, Selection(sequences=frozenset({locked.sequence})), None) == 0
        assert await broker.purge(name, EVERYTHING, None) == 2  # not the locked one
        await harness.pass_time(harness.lock * LATE)
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [locked.body]
        stats = await broker.stats(name)
        assert (stats.ready, stats.delayed, stats.dead) == (3, 0, 1)  # the redriven messages; their locks have ended

    async def test_redrive_to_another_queue(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker, other = await harness.open(), await harness.open()
        there = f"{name}-there"
        highest = 0 if harness.traits.priorities == "impossible" else 5
        named = Outgoing(b"named", id="x", headers={"n": 2**60 + 1, "e": ""}, reply_to="answers", correlation_id="c")
        if harness.traits.dedupe != "impossible":  # ids remembered there must not lose a dead letter
            await broker.send(there, [Outgoing(b"", id="x")])
            await settle(broker, await receive(broker, there, harness), COMPLETE)
        await broker.send(
            name, [named, Outgoing(b"described", headers={"a": 1.5}), Outgoing(b"plain", priority=highest)]
        )
        before = {one.body: one for one in await receive(broker, name, harness)}
        await settle(broker, [before[b"named"], before[b"described"]], DeadLetter("bad", "", ERROR))
        await settle(broker, [before[b"plain"]], DeadLetter("odd"))
        assert await other.redrive(name, Selection(reason="bad"), None, dry_run=True, to=there) == 2
        assert await other.redrive(name, Selection(reason="odd"), None, to=there) == 1
        assert await other.redrive(name, EVERYTHING, 5, to=there) == 2
        assert await other.redrive(name, EVERYTHING, None, to=there) == 0
        assert await broker.stats(name) == Stats()
        got = await receive(broker, there, harness)
        if highest:
            assert got[0].body == b"plain"
        after = {one.body: one for one in got}
        assert {body: (one.id, one.delivery_count, one.priority, dict(one.headers)) for body, one in after.items()} == {
            body: (one.id, 1, one.priority, dict(one.headers)) for body, one in before.items()
        }
        assert (after[b"named"].reply_to, after[b"named"].correlation_id) == ("answers", "c")
        assert there in await other.names()
        await settle(broker, [after[b"named"]], DeadLetter("again"))
        [letter] = await broker.peek_dead(there, EVERYTHING, 10)
        assert [attempt.error for attempt in letter.history] == [ERROR, None]
        assert len(await settle(broker, [after[b"described"], after[b"plain"]], COMPLETE)) == 2
        assert await broker.stats(there) == Stats(dead=1)

    async def test_redrive_to_another_queue_keeps_the_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, session="s") for number in range(3)])
        held = await accept(broker, name, harness)
        await settle(broker, await receive_session(broker, held), DeadLetter("bad"))
        await broker.release(held)
        await broker.send(f"{name}-there", [Outgoing(b"before", session="s")])
        assert await broker.redrive(name, EVERYTHING, 2, to=f"{name}-there") == 2
        got = await receive_session(broker, await accept(broker, f"{name}-there", harness))
        assert bodies(got) == [b"before", b"0", b"1"]
        assert (await broker.stats(name)).dead == 1

    async def test_redrive_takes_a_dead_letter_that_waits_for_its_delay(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        needs(harness.traits.delay)
        if not harness.traits.exact_stats:
            pytest.skip("this broker can't find delayed messages")
        broker, other = await harness.open(), await harness.open()
        await dead_letter(broker, harness, name, b"a")
        letters = await receive(broker, dead_letters_of(name), harness)
        assert await settle(broker, letters, Abandon(delay=harness.lock * 0.5)) == [Settled()]
        assert await broker.redrive(name, EVERYTHING, None) == 1
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.6)  # the delay is over, and has no effect any more
        assert await receive(other, dead_letters_of(name), harness) == []
        assert await receive(other, name, harness) == []
        assert await settle(broker, got, COMPLETE) == [Settled()]
        assert await broker.stats(name) == Stats()

    async def test_redrive_puts_messages_back_into_their_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        needs(harness.traits.sessions)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        held = await accept(broker, name, harness)
        await settle(broker, await receive_session(broker, held), DeadLetter("because"))
        assert await broker.release(held) == Settled()  # nothing of it is left
        assert await broker.redrive(name, EVERYTHING, None) == 2
        for _ in range(2):
            held = await accept(broker, name, harness)
            assert await broker.release(held) == Settled()
        held = await accept(broker, name, harness)
        got = await receive_session(broker, held)
        assert [(one.body, one.session, one.delivery_count) for one in got] == [(b"1", "s", 1), (b"2", "s", 1)]
        assert await settle(broker, got, COMPLETE) == [Settled()] * 2
        assert await broker.stats(name) == Stats()
