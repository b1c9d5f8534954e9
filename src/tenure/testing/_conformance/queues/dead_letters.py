"""Dead letters: their contents, receiving, peeking, purging."""

from __future__ import annotations

import math
from typing import cast

import pytest

from tenure._queue.broker import (
    EVERYTHING,
    QueueSettings,
    Selection,
)
from tenure._queue.context import QueueContext
from tenure._queue.identity import ID_MARK, dead_letters_of
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Defer, Renewed, Settled, Settlement, Verdict
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    ERROR,
    QueueSuite,
    bodies,
    dead_letter,
    expect_stats,
    needs,
    receive,
    settle,
)


class DeadLetterTests(QueueSuite):
    """A dead letter keeps its history until it is redriven or purged."""

    async def test_a_rejected_message_keeps_its_reason(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"bad", id="x", headers={"n": 1}, reply_to="r")])
        got = await receive(broker, name, harness)
        assert await settle(broker, got, DeadLetter("unreadable", "no JSON", ERROR)) == [Settled()]
        assert await broker.stats(name) == Stats(dead=1)
        await harness.pass_time(harness.lock * harness.long)  # nothing expires there
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.queue, dead.sequence, dead.id, dead.body) == (name, got[0].sequence, "x", b"bad")
        assert (dict(dead.headers), dead.reply_to) == ({"n": 1}, "r")
        assert (dead.reason, dead.description, dead.error) == ("unreadable", "no JSON", ERROR)
        assert [one.outcome for one in dead.history] == ["rejected"]

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            ("a\0b", r"a\x00b"),
            ("caf\udce9.txt", r"caf\udce9.txt"),
            ("größer, 更大", "größer, 更大"),
            ("x" * 100_000, "x" * 4_095 + "…"),
        ],
        ids=["NUL", "surrogate", "wide", "long"],
    )
    async def test_no_description_prevents_a_settlement(
        self, harness: QueueHarness, name: str, given: str, kept: str
    ) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"good"), Outgoing(b"bad"), Outgoing(b"good")])
        got = await receive(broker, name, harness, limit=3)
        verdicts: list[Verdict] = [DeadLetter("why", given) if one.body == b"bad" else COMPLETE for one in got]
        settlements = [Settlement(one, verdict) for one, verdict in zip(got, verdicts, strict=True)]
        assert list(await broker.settle(settlements)) == [Settled()] * 3
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.description) == (b"bad", kept)

    async def test_dead_letters_are_received_as_a_queue(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker, other = await harness.open(), await harness.open()
        await dead_letter(broker, harness, name, b"a", b"b", b"c")
        dead_name = dead_letters_of(name)
        got = await receive(broker, dead_name, harness, limit=2)
        if harness.traits.order != "impossible":
            assert bodies(got) == [b"a", b"b"]
        assert [(one.queue, one.delivery_count) for one in got] == [(dead_name, 1), (dead_name, 1)]
        assert got[0].death is not None
        assert (got[0].death.reason, got[0].death.error) == ("because", ERROR)
        [third] = await receive(other, dead_name, harness)
        assert sorted(bodies([*got, third])) == [b"a", b"b", b"c"]
        await harness.pass_time(harness.lock * 0.7)
        assert [type(answer) for answer in await broker.renew(got, harness.lock)] == [Renewed, Renewed]
        await harness.pass_time(harness.lock * 0.7)
        assert await settle(broker, got[:1], COMPLETE) == [Settled()]
        assert await settle(broker, got[1:], Abandon()) == [Settled()]
        left = await receive(broker, dead_name, harness)
        assert sorted(bodies(left)) == sorted([got[1].body, third.body])
        assert await settle(broker, left, DeadLetter("worse")) == [Settled(), Settled()]
        assert await broker.stats(name) == Stats(dead=2)
        assert {one.reason for one in await broker.peek_dead(name, EVERYTHING, 10)} == {"worse"}

    async def test_a_dead_letter_survives_any_number_of_deliveries(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 2})
        await dead_letter(broker, harness, name, b"a")
        for _ in range(5):
            [got] = await receive(broker, dead_letters_of(name), harness)
            assert got.delivery_count == 1
            await settle(broker, [got], Abandon())
        await expect_stats(broker, harness, name, Stats(dead=1))
        with pytest.raises(ConfigError, match="defer"):
            await settle(broker, await receive(broker, dead_letters_of(name), harness), Defer())

    async def test_dead_letters_are_found_by_the_former_spelling_of_their_ids(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b"), Outgoing(b"c", id="order$1")])
        await settle(broker, await receive(broker, name, harness, limit=3), DeadLetter("because"))
        letters = Queue(
            QueueContext(name, broker, RenewalThread.here(), SystemClock(), QueueSettings(), "", expected={})
        ).dead_letters
        for letter in await letters.peek():
            assert [one.body for one in await letters.peek(ids=[letter.id])] == [letter.body]
            former = letter.id.replace(ID_MARK, "$")  # as an older tenure showed it
            assert [one.body for one in await letters.peek(ids=[former])] == [letter.body]

    async def test_dead_letters_are_purged_after_their_retention(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker, other = await harness.open(), await harness.open()
        await dead_letter(broker, harness, name, b"old")
        await harness.pass_time(harness.lock)
        await dead_letter(broker, harness, name, b"new")
        assert [one.body for one in await broker.peek_dead(name, Selection(dead_for=harness.lock * 0.8), 10)] == [
            b"old"
        ]
        await other.declare(name, {"dead_retention": harness.lock * 0.8})
        assert (await broker.settings(name)).dead_retention == harness.lock * 0.8
        renewal_thread = cast(RenewalThread, None)  # nothing here is renewed
        context = QueueContext(name, broker, renewal_thread, SystemClock(), QueueSettings(), "", expected={})
        await context.ready()
        await context.rest()
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [b"new"]
        assert (await broker.declare(name, {"dead_retention": math.inf})).dead_retention == math.inf
        context = QueueContext(name, broker, renewal_thread, SystemClock(), QueueSettings(), "", expected={})
        await harness.pass_time(harness.lock)
        await context.ready()
        await context.rest()
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [b"new"]
