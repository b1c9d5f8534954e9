"""What a store keeps of schedules."""

from __future__ import annotations

import asyncio

import pytest

from tenure._queue.broker import Advanced, Broker
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Deleted
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    QueueSuite,
    bodies,
    expect_stats,
    needs,
    receive,
    receive_some,
    settle,
)

ODD = ('{"record": "9", "by": "me", "keep_out": 5.0}', "null", '"', "\\", "=YQ==", "a b", "~2F%20", "\t\n")
"""Texts like those that a store may write beside a record, or that it has to encode."""

LONG = '{"text":"' + "x" * 980 + '"}'


async def advance(
    broker: Broker, queue: str, expected: str | None, record: str | None, *contents: bytes, schedule: str = "s"
) -> Advanced:
    """Advance with messages that have an id of their own."""
    messages = [Outgoing(body, id=f"{schedule}@{body.decode()}") for body in contents]
    return await broker.advance(queue, schedule, expected, record, messages)


class ScheduleTests(QueueSuite):
    """A slot is noted, and its messages are sent, once."""

    async def test_nothing_is_kept_of_a_queue_without_schedules(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        assert (await broker.schedules(name)).records == {}
        assert name not in await broker.names()

    async def test_a_record_is_kept_and_replaced(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        assert (await advance(broker, name, None, "1"))[:2] == (True, "1")
        assert (await advance(broker, name, None, LONG, schedule="other of ün ïcödé"))[:2] == (True, LONG)
        assert (await advance(broker, name, "1", "2"))[:2] == (True, "2")
        other = await harness.open()
        assert (await other.schedules(name)).records == {"s": "2", "other of ün ïcödé": LONG}
        assert name in await other.names()
        assert (await advance(other, name, "2", None))[:2] == (True, None)
        assert (await broker.schedules(name)).records == {"other of ün ïcödé": LONG}

    async def test_a_record_may_be_any_text(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        expected: str | None = None
        for record in ODD:
            assert (await advance(broker, name, expected, record))[:2] == (True, record)
            assert (await broker.schedules(name)).records == {"s": record}
            expected = record

    async def test_what_is_kept_must_be_what_is_expected(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        assert (await advance(broker, name, "0", "1", b"a"))[:2] == (False, None)
        await advance(broker, name, None, "1")
        for expected, record in ((None, "2"), ("0", "2"), ("0", None), (None, None)):
            assert (await advance(broker, name, expected, record, b"a"))[:2] == (False, "1")
        assert (await broker.schedules(name)).records == {"s": "1"}
        assert await receive(broker, name, harness) == []

    async def test_the_messages_are_sent_with_the_record(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        await advance(broker, name, None, "1", b"a", b"b")
        both = await receive_some(broker, name, harness, 2)
        assert sorted(bodies(both)) == [b"a", b"b"]
        await settle(broker, both, COMPLETE)
        message = Outgoing(b"c", id="s@c", headers={"slot": "noon", "n": 7}, expires_in=harness.lock * 9)
        assert (await broker.advance(name, "s", "1", "2", [message])).is_done
        [got] = await receive_some(broker, name, harness, 1)
        assert (got.id, got.body, got.headers) == ("s@c", b"c", {"slot": "noon", "n": 7})

    async def test_a_message_of_a_slot_is_like_any_other(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        await broker.advance(name, "s", None, "1", [Outgoing(b"later", id="1", delay=harness.lock * 50)])
        await broker.advance(name, "s", "1", "2", [Outgoing(b"now", id="2")])
        [got] = await receive_some(broker, name, harness, 1)
        assert got.body == b"now"
        await settle(broker, [got], COMPLETE)
        if harness.traits.exact_stats:
            await expect_stats(broker, harness, name, Stats(delayed=1))

    async def test_a_message_that_the_store_refuses_is_not_noted(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        traits = harness.traits
        if "impossible" not in (traits.priorities, traits.sessions):
            pytest.skip("this broker takes every message")
        broker = await harness.open()
        await advance(broker, name, None, "1")
        message = (
            Outgoing(b"a", id="s@a", priority=1) if traits.priorities == "impossible" else Outgoing(b"a", session="a")
        )
        with pytest.raises(ConfigError):
            await broker.advance(name, "s", "1", "2", [Outgoing(b"b", id="s@b"), message])
        assert (await broker.schedules(name)).records == {"s": "1"}
        assert (await advance(broker, name, "1", "3", b"c"))[:2] == (True, "3")  # at once: nobody is sending
        assert bodies(await receive_some(broker, name, harness, 1)) == [b"c"]

    async def test_an_id_that_is_remembered_is_not_sent_again(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        needs(harness.traits.dedupe)
        broker = await harness.open()
        await advance(broker, name, None, "1", b"a")
        assert (await advance(broker, name, "1", "2", b"a", b"b"))[:2] == (True, "2")
        assert sorted(bodies(await receive_some(broker, name, harness, 2))) == [b"a", b"b"]
        assert await receive(broker, name, harness) == []

    async def test_nothing_is_done_too_early(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        now = (await broker.schedules(name)).now
        early = await broker.advance(name, "s", None, "1", [Outgoing(b"a", id="a")], now + harness.lock * 50)
        assert early[:2] == (False, None)
        assert now <= early.now < now + harness.lock * 40
        due = await broker.advance(name, "s", None, "1", [Outgoing(b"b", id="b")], early.now - 2.0)
        assert due[:2] == (True, "1")
        assert due.now >= early.now
        assert bodies(await receive_some(broker, name, harness, 1)) == [b"b"]

    async def test_of_many_one_advances(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        brokers = [await harness.open() for _ in range(3)]
        record: str | None = None
        for step in range(4):
            asked = [advance(brokers[n % 3], name, record, f"{step}-{n}", b"%d" % step) for n in range(6)]
            answers = await asyncio.gather(*asked)
            done = [one for one in answers if one.is_done]
            assert len(done) == 1, answers
            record = done[0].record
            assert (await brokers[0].schedules(name)).records == {"s": record}
        got = await receive_some(brokers[0], name, harness, 4)
        assert sorted(bodies(got)) == [b"0", b"1", b"2", b"3"]
        assert await receive(brokers[0], name, harness) == []

    async def test_schedules_of_one_queue_do_not_hinder_each_other(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        brokers = [await harness.open() for _ in range(2)]
        asked = [advance(brokers[n % 2], name, None, f"{n}", b"%d" % n, schedule=f"s{n}") for n in range(8)]
        answers = await asyncio.gather(*asked)
        if harness.traits.schedules == "native":
            assert all(one.is_done for one in answers), answers
        kept = (await brokers[0].schedules(name)).records
        assert kept == {f"s{n}": f"{n}" for n, one in enumerate(answers) if one.is_done}
        assert len(await receive_some(brokers[0], name, harness, len(kept))) == len(kept)

    async def test_a_deleted_queue_has_no_schedules(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker = await harness.open()
        await advance(broker, name, None, "1")
        assert isinstance(await broker.delete(name), Deleted)
        assert name not in await broker.names()
        assert (await broker.schedules(name)).records == {}
        assert (await advance(broker, name, "1", "2"))[:2] == (False, None)
        assert (await advance(broker, name, None, "1", b"a"))[:2] == (True, "1")
        assert bodies(await receive_some(broker, name, harness, 1)) == [b"a"]

    async def test_settings_and_schedules_do_not_overwrite_each_other(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_deliveries": 7})
        await advance(other, name, None, "1", b"a")
        await broker.declare(name, {"max_deliveries": 8})
        assert (await other.schedules(name)).records == {"s": "1"}
        assert (await other.settings(name)).max_deliveries == 8

    async def test_settings_may_be_declared_meanwhile(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.schedules)
        brokers = [await harness.open() for _ in range(2)]
        asked = [advance(brokers[n % 2], name, None, f"{n}", schedule=f"s{n}") for n in range(4)]
        answers, _, _ = await asyncio.gather(
            asyncio.gather(*asked),
            brokers[0].declare(name, {"max_deliveries": 7}),
            brokers[1].declare(name, {"dedupe_window": 200.0}),
        )
        kept = (await brokers[0].schedules(name)).records
        assert kept == {f"s{n}": f"{n}" for n, one in enumerate(answers) if one.is_done}
        assert kept
        settings = await brokers[1].settings(name)
        assert (settings.max_deliveries, settings.dedupe_window) == (7, 200.0)
