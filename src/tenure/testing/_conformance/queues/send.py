"""Sending: contents, ids, order, delays."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    bodies,
    comes_now,
    expect_counts,
    needs,
    receive,
    send,
    settle,
)


class SendTests(QueueSuite):
    """A message is received as it was sent, once, in order."""

    async def test_a_message_is_received_as_it_was_sent(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        sent = Outgoing(
            b"\x00\xff body",
            id="order-17",
            headers={"text": "Ünïcödé", "whole": -7, "number": 1.5, "yes": True, "no": False},
            priority=0,
            reply_to="answers",
            correlation_id="call-1",
        )
        assert list(await broker.send(name, [sent])) == ["order-17"]
        [got] = await receive(broker, name, harness)
        assert (got.queue, got.id, got.body, got.delivery_count) == (name, "order-17", sent.body, 1)
        assert dict(got.headers) == dict(sent.headers)
        assert type(got.headers["yes"]) is bool
        assert type(got.headers["whole"]) is int
        assert (got.session, got.priority, got.reply_to, got.correlation_id) == (None, 0, "answers", "call-1")
        assert got.locked_until > got.enqueued_at
        assert got.death is None

    async def test_an_empty_body_is_a_body(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        size = min(100_000, harness.traits.body_max)
        await send(broker, name, b"", b"x" * size)
        first, second = sorted(await receive(broker, name, harness), key=lambda one: len(one.body))
        assert (first.body, dict(first.headers), len(second.body)) == (b"", {}, size)

    async def test_order_is_that_of_sending(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.order)
        broker = await harness.open()
        await send(broker, name, b"0", b"1")
        await send(broker, name, b"2")
        assert bodies(await receive(broker, name, harness, limit=2)) == [b"0", b"1"]
        await send(broker, name, b"3")
        got = await receive(broker, name, harness)
        assert bodies(got) == [b"2", b"3"]
        assert got[0].sequence < got[1].sequence

    async def test_generated_ids_are_new(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        ids = [*await send(broker, name, b"a", b"a"), *await send(broker, f"{name}-2", b"a")]
        assert len(set(ids)) == 3
        assert sorted(one.id for one in await receive(broker, name, harness)) == sorted(ids[:2])
        assert [one for one in ids if not re.fullmatch(r"[\w.-]+", one, re.ASCII)] == []  # a shell needs no quotes

    async def test_higher_priority_comes_first(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.priorities)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, priority=number % 3) for number in range(6)])
        assert bodies(await receive(broker, name, harness)) == [b"2", b"5", b"1", b"4", b"0", b"3"]

    async def test_queues_do_not_mix(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        cases = [name, name.upper()] if harness.traits.case_sensitive else [name]
        names = [*cases, f"{name}/0", f"{name}/1", f"{name}-Ünïcödé-名前", f"{name}'\"%_"]
        for number, each in enumerate(names):
            await send(broker, each, each.encode())
            for other in names[number + 1 :]:
                assert await receive(broker, other, harness) == []
        for each in names:
            assert bodies(await receive(broker, each, harness)) == [each.encode()]
        assert [each for each in await broker.names() if each.lower().startswith(name)] == sorted(names)

    async def test_a_delayed_message_comes_later(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.delay)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"later", delay=harness.lock), Outgoing(b"now")])
        claim = await broker.receive(name, 10, harness.lock)
        assert bodies(claim.deliveries) == [b"now"]
        assert claim.due_in is None or 0 < claim.due_in <= harness.lock
        stats = await broker.stats(name)
        assert (stats.delayed, stats.ready) == (1 if harness.traits.exact_stats else stats.delayed, 0)
        await settle(broker, claim.deliveries, COMPLETE)
        await harness.pass_time(harness.lock * LATE)
        await expect_counts(broker, harness, name, ready=1)
        assert bodies(await receive(broker, name, harness)) == [b"later"]

    async def test_at_is_a_time_of_the_wall_clock(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.delay)
        broker = await harness.open()
        await send(broker, name, b"probe")
        [probe] = await receive(broker, name, harness)
        await broker.send(name, [Outgoing(b"past", at=1.0), Outgoing(b"later", at=probe.enqueued_at + harness.lock)])
        assert bodies(await receive(broker, name, harness)) == [b"past"]
        await harness.pass_time(harness.lock * LATE)
        await comes_now(broker, harness, name, b"later")

    async def test_an_id_is_kept_once(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dedupe)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"lock": harness.lock, "dedupe_window": harness.lock * 3})
        await broker.send(name, [Outgoing(b"1", id="a"), Outgoing(b"2", id="a"), Outgoing(b"3", id="b")])
        assert list(await other.send(name, [Outgoing(b"4", id="a")])) == ["a"]
        got = await receive(broker, name, harness)
        assert bodies(got) == [b"1", b"3"]
        await settle(broker, got, COMPLETE)
        await broker.send(name, [Outgoing(b"5", id="a")])  # also when the first is done
        assert await receive(broker, name, harness) == []
        await broker.send(f"{name}-2", [Outgoing(b"6", id="a")])  # but in another queue it is another
        assert bodies(await receive(broker, f"{name}-2", harness)) == [b"6"]
        await harness.pass_time(harness.lock * 1.5)
        await broker.send(name, [Outgoing(b"6", id="a")])  # the window is not extended
        assert await receive(broker, name, harness) == []
        await harness.pass_time(harness.lock * (3 * LATE - 1.5))
        await broker.send(name, [Outgoing(b"7", id="a")])
        assert bodies(await receive(broker, name, harness)) == [b"7"]

    async def test_an_empty_dedupe_window_remembers_nothing(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dedupe)
        if harness.traits.dedupe_min > 0:
            pytest.skip("this broker remembers every id for a while")
        broker = await harness.open()
        await broker.declare(name, {"dedupe_window": 0.0})
        for _ in range(2):
            assert list(await broker.send(name, [Outgoing(b"1", id="a"), Outgoing(b"2", id="a")])) == ["a", "a"]
        assert Counter(bodies(await receive(broker, name, harness))) == {b"1": 2, b"2": 2}
