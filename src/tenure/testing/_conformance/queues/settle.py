"""Verdicts, and the count of deliveries."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from tenure._queue.broker import (
    EVERYTHING,
)
from tenure._queue.failures import Failure
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import MAX_DELIVERIES, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    bodies,
    comes_now,
    expect_stats,
    needs,
    receive,
    send,
    settle,
)


class SettleTests(QueueSuite):
    """A verdict is accepted once, while its delivery is locked."""

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), Defer(), DeadLetter("late"), GIVE_BACK], ids=repr)
    async def test_a_late_verdict_lapses(self, harness: QueueHarness, name: str, verdict: Verdict) -> None:
        needs_verdict(harness, verdict)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        [old] = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * LATE)
        assert await settle(broker, [old], verdict) == [LAPSED]  # not claimed again yet, but no longer ours
        assert await broker.renew([old], harness.lock) == [LAPSED]
        [new] = await receive(other, name, harness)
        assert new.delivery_count == 2
        assert await settle(broker, [old], verdict) == [LAPSED]  # another consumer has it
        assert await broker.renew([old], harness.lock) == [LAPSED]
        assert isinstance((await other.renew([new], harness.lock))[0], Renewed)
        assert await settle(other, [new], COMPLETE) == [Settled()]
        assert await settle(broker, [old], verdict) == [LAPSED]  # it is gone
        await expect_stats(broker, harness, name, Stats())

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), Defer(), DeadLetter("done"), GIVE_BACK], ids=repr)
    async def test_a_delivery_is_settled_once(self, harness: QueueHarness, name: str, verdict: Verdict) -> None:
        needs_verdict(harness, verdict)
        broker = await harness.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, harness)
        assert await broker.settle([Settlement(got, verdict), Settlement(got, COMPLETE)]) == [Settled(), LAPSED]
        assert await settle(broker, [got], verdict) == [LAPSED]

    async def test_a_forged_token_lapses(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"a", b"b")
        first, second = await receive(broker, name, harness, limit=1), await receive(broker, name, harness, limit=1)
        forged = first[0]._replace(token=second[0].token)
        misplaced = first[0]._replace(queue=f"{name}-2")
        assert await settle(broker, [forged, misplaced], COMPLETE) == [LAPSED, LAPSED]
        assert await settle(broker, [*first, *second], COMPLETE) == [Settled(), Settled()]

    async def test_verdicts_are_answered_in_order_each_by_itself(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, *[b"%d" % number for number in range(6)])
        await send(broker, f"{name}-2", b"other")
        got = await receive(broker, name, harness)
        [other] = await receive(broker, f"{name}-2", harness)
        await settle(broker, [got[2]], COMPLETE)
        deferred = harness.traits.deferral != "impossible"
        last = Defer() if deferred else COMPLETE
        verdicts: list[Verdict] = [COMPLETE, Abandon(), COMPLETE, DeadLetter("bad"), GIVE_BACK, last]
        settlements = [Settlement(one, verdict) for one, verdict in zip(got, verdicts, strict=True)]
        answers = await broker.settle([*settlements, Settlement(other, COMPLETE)])
        assert list(answers) == [Settled(), Settled(), LAPSED, Settled(), Settled(), Settled(), Settled()]
        stats = await broker.stats(name)
        assert (stats.ready, stats.dead, stats.deferred) == (2, 1, deferred)

    async def test_a_delivery_counts_when_it_is_claimed(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"a")
        for count in range(1, 4):
            [got] = await receive(broker, name, harness)
            assert got.delivery_count == count
            if count % 2:
                await harness.pass_time(harness.lock * LATE)
            else:
                await settle(broker, [got], Abandon())

    async def test_giving_back_does_not_count(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"a", b"b", b"c")
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 2})
        for _ in range(5):
            got = await receive(broker, name, harness)
            assert [one.delivery_count for one in got] == [1, 1, 1]
            assert in_order(harness, got) == [b"a", b"b", b"c"]
            assert await settle(broker, reversed(got), GIVE_BACK) == [Settled()] * 3
        assert (await broker.stats(name)).dead == 0

    async def test_a_message_abandoned_at_its_last_delivery_is_dead(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 3})
        await broker.send(name, [Outgoing(b"poison", id="p", headers={"k": "v"}, correlation_id="c")])
        for count in (1, 2, 3):
            [got] = await receive(broker, name, harness)
            answer = await settle(broker, [got], Abandon(0.0, Failure("E", f"try {count}", "trace")))
            assert answer == [Settled(dead=count == 3)]
        assert await receive(broker, name, harness) == []
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.id, dead.body, dict(dead.headers), dead.correlation_id) == ("p", b"poison", {"k": "v"}, "c")
        assert json.dumps(dataclasses.asdict(dead)["headers"]) == '{"k": "v"}'
        assert pickle.loads(pickle.dumps(dead)) == dead  # noqa: S301  # our own
        assert (dead.reason, dead.delivery_count) == (MAX_DELIVERIES, 3)
        assert dead.description
        assert dead.error == Failure("E", "try 3", "trace")
        assert [(one.number, one.outcome, one.error and one.error.message) for one in dead.history] == [
            (1, "abandoned", "try 1"),
            (2, "abandoned", "try 2"),
            (3, "abandoned", "try 3"),
        ]
        assert dead.enqueued_at <= dead.history[0].at <= dead.dead_at

    async def test_a_message_whose_last_lock_expires_is_dead(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker = await harness.open()
        await broker.declare(name, {"lock": harness.lock, "max_deliveries": 2})
        await send(broker, name, b"crasher")
        for _ in range(2):
            assert len(await receive(broker, name, harness)) == 1
            await harness.pass_time(harness.lock * LATE)
        if harness.traits.exact_stats:
            assert await broker.stats(name) == Stats(dead=1)
        assert await receive(broker, name, harness) == []
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.reason, dead.delivery_count, dead.error) == (MAX_DELIVERIES, 2, None)
        assert [one.outcome for one in dead.history] == ["expired", "expired"]

    async def test_a_message_abandoned_with_a_delay_comes_later(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.delay)
        broker = await harness.open()
        await send(broker, name, b"a", b"b")
        first, second = sorted(await receive(broker, name, harness), key=lambda one: one.body)
        await settle(broker, [first], Abandon(delay=harness.lock))
        await settle(broker, [second], Abandon())
        assert bodies(await receive(broker, name, harness)) == [b"b"]
        if harness.traits.exact_stats:
            assert (await broker.stats(name)).delayed == 1
        await harness.pass_time(harness.lock * LATE)
        await comes_now(broker, harness, name, b"a")

    async def test_complete_sends_and_remembers(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"b", id="b")])
        a, b = sorted(await receive(broker, name, harness), key=lambda one: one.body)
        remembers = harness.traits.inbox != "impossible"
        results = f"{name}-results"
        verdict = Complete(
            sends=((results, Outgoing(b"result", correlation_id="a")),), remember=harness.lock * remembers
        )
        assert await settle(broker, [a], verdict) == [Settled()]
        assert await settle(broker, [a], verdict) == [LAPSED]
        assert [(one.body, one.correlation_id) for one in await receive(other, results, harness)] == [(b"result", "a")]
        if not remembers:
            return
        assert list(await other.handled(name, ["a", "b", "c"])) == [True, False, False]
        assert list(await other.handled(results, ["a"])) == [False]
        await settle(broker, [b], COMPLETE)
        assert list(await other.handled(name, ["b"])) == [False]
        await harness.pass_time(harness.lock * LATE)
        assert list(await other.handled(name, ["a"])) == [False]

    async def test_complete_sends_and_remembers_for_a_dead_letter_too(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker, other = await harness.open(), await harness.open()
        ids = [*await broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"made up")]), "c"]
        await settle(broker, await receive(broker, name, harness), DeadLetter("because"))
        given, made_up = sorted(await receive(broker, dead_letters_of(name), harness), key=lambda one: one.body)
        remembers = harness.traits.inbox != "impossible"
        results = f"{name}-results"
        verdict = Complete(
            sends=((results, Outgoing(b"result", correlation_id="a")),), remember=harness.lock * remembers
        )
        assert await settle(broker, [given, made_up], verdict) == [Settled(), Settled()]
        assert await settle(broker, [given, made_up], verdict) == [LAPSED, LAPSED]
        sent = await receive(other, results, harness)
        assert [(one.body, one.correlation_id) for one in sent] == [(b"result", "a")] * 2
        await expect_stats(broker, harness, name, Stats())
        if remembers:
            assert list(await other.handled(name, ids)) == [True, True, False]

    async def test_the_inbox_remembers_for_the_longest_that_was_asked(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.inbox)
        broker = await harness.open()
        await broker.declare(name, {"dedupe_window": 0.0})
        for seconds in (0.5, 9.0, 0.6):
            await broker.send(name, [Outgoing(b"a", id="a")])
            got = await receive(broker, name, harness)
            assert await settle(broker, got, Complete(remember=harness.lock * seconds)) == [Settled()]
        await harness.pass_time(harness.lock * 0.8)
        assert await receive(broker, name, harness) == []  # a claim that finds nothing may forget expired ids
        assert list(await broker.handled(name, ["a"])) == [True]


def needs_verdict(harness: QueueHarness, verdict: Verdict) -> None:
    """Skip the test if the broker can't pass this verdict."""
    if isinstance(verdict, Defer):
        needs(harness.traits.deferral)


def in_order(harness: QueueHarness, deliveries: object) -> list[bytes]:
    """Return the bodies of *deliveries*, in their order, or sorted if the broker keeps no order."""
    return sorted(bodies(deliveries)) if harness.traits.order == "impossible" else bodies(deliveries)
