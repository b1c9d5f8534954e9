"""Claims: their limits, tokens and answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import pytest

from tenure._queue.broker import (
    CLAIM_BYTES,
    Broker,
    Claim,
    NoSession,
    PushingBroker,
    SurveyingBroker,
)
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, DeadLetter, Defer, Settled, Settlement, Verdict
from tenure.testing import until
from tenure.testing._conformance.counted_hints import HINT_WITHIN, counted
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
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


class ReceiveTests(QueueSuite):
    """A claim takes ready messages, at most its limit, under a token of its own."""

    async def test_an_empty_queue_answers_at_once(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        assert await broker.receive(name, 10, harness.lock) == Claim((), None)
        assert await broker.stats(name) == Stats()

    async def test_one_request_tells_which_queues_hold_messages(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.surveys:
            pytest.skip("this broker can't be asked about many queues at once")
        broker, sender = cast(SurveyingBroker, await harness.open()), await harness.open()
        kinds = ("ready", "locked", "delayed", "deferred", "dead", "completed", "declared", "unknown")
        queues = {kind: f"{name}-{kind}" for kind in kinds}
        assert list(await broker.holding([])) == []
        assert not any(await broker.holding(list(queues.values())))
        await sender.declare(queues["declared"], {"lock": harness.lock})
        for kind in ("ready", "locked", "deferred", "dead", "completed"):
            await send(sender, queues[kind], b"a")
        await sender.send(queues["delayed"], [Outgoing(b"a", delay=60.0)])
        verdicts: dict[str, Verdict] = {"deferred": Defer(), "dead": DeadLetter("because"), "completed": COMPLETE}
        for kind in ("locked", *verdicts):
            got = await receive(sender, queues[kind], harness)
            if kind in verdicts:
                assert await settle(sender, got, verdicts[kind]) == [Settled()]
        found = dict(zip(kinds, await broker.holding(list(queues.values())), strict=True))
        assert [kind for kind, holds in found.items() if holds] == ["ready", "locked", "delayed"]
        many = [f"{name}-{number}" for number in range(250)]
        await send(sender, many[249], b"a")
        await sender.send(many[101], [Outgoing(b"a", session="s")] if harness.traits.mixed_sessions else [Outgoing()])
        assert [many[i] for i, holds in enumerate(await broker.holding(many)) if holds] == [many[101], many[249]]

    async def test_what_has_arrived_is_claimed_without_a_request(self, harness: QueueHarness, name: str) -> None:
        """One that was delivered before may take a request: then it is left to ``receive``."""
        if not harness.traits.pushes:
            pytest.skip("nothing comes to this broker before it is claimed")
        broker, sender = cast(PushingBroker, await harness.open()), await harness.open()
        assert broker.receive_arrived(name, 10, harness.lock) is None
        got: list[Delivery] = []

        def has_arrived() -> bool:
            claim = broker.receive_arrived(name, 10, harness.lock)
            got.extend(() if claim is None else claim.deliveries)
            return bool(got)

        async def is_received() -> bool:
            if not has_arrived():
                got.extend((await broker.receive(name, 10, harness.lock)).deliveries)
            return bool(got)

        async with counted(broker.hints(name)):
            await send(sender, name, b"a")
            await until(has_arrived, within=HINT_WITHIN)
            assert [(one.body, one.delivery_count) for one in got] == [(b"a", 1)]
            assert broker.receive_arrived(name, 10, harness.lock) is None
            assert await settle(broker, [got.pop()], Abandon()) == [Settled()]
            await until(is_received, within=HINT_WITHIN)
            assert [(one.body, one.delivery_count) for one in got] == [(b"a", 2)]
            assert await settle(broker, got, COMPLETE) == [Settled()]

    async def test_an_idle_queue_has_nothing_due(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, harness)
        await broker.settle([Settlement(got[0], COMPLETE), Settlement(got[1], DeadLetter("done"))])
        for _ in range(2):  # a consumer asks again after due_in, so a wrong one makes it spin
            assert await broker.receive(name, 10, harness.lock) == Claim((), None)
        if harness.traits.sessions != "impossible":
            name = name if harness.traits.mixed_sessions else f"{name}-sessions"
            assert await broker.accept(name, None, harness.lock) == NoSession(None)
            held = await broker.accept(name, "s", harness.lock)
            assert isinstance(held, SessionLock)
            claim = await broker.receive_session(held, 10)
            assert isinstance(claim, Claim)
            assert claim.deliveries == ()
            assert claim.due_in is None or claim.due_in > harness.lock / 2  # when its own lock ends
            await broker.release(held)
            assert await broker.accept(name, None, harness.lock) == NoSession(None)

    async def test_no_more_than_asked_for(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, *[b"%d" % number for number in range(25)])
        assert [len(await receive(broker, name, harness, limit=10)) for _ in range(4)] == [10, 10, 5, 0]

    @pytest.mark.parametrize("session", [None, "s"])
    async def test_a_claim_ends_with_the_body_that_makes_it_large(
        self, harness: QueueHarness, name: str, session: str | None
    ) -> None:
        needs(harness.traits.sessions if session else "native")
        if not harness.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await harness.open()
        large = bytes(CLAIM_BYTES // 3 + 1)
        sent = [large, large, large, b"small", bytes(CLAIM_BYTES), b"last"]
        for body in sent:
            await broker.send(name, [Outgoing(body, session=session)])
        claims: list[list[int]] = []
        held = await broker.accept(name, session, harness.lock) if session else None
        for number in range(3):
            if isinstance(held, SessionLock):
                claim = await broker.receive_session(held, 100)
            else:
                claim = await broker.receive(name, 100, harness.lock)
            assert isinstance(claim, Claim)
            assert (claim.due_in == 0) == (number < 2)  # there is more at once
            claims.append([len(one.body) for one in claim.deliveries])
            assert all(isinstance(answer, Settled) for answer in await settle(broker, claim.deliveries, COMPLETE))
        sizes = [len(body) for body in sent]
        assert claims == [sizes[:3], sizes[3:5], sizes[5:]]

    async def test_a_claim_of_dead_letters_ends_with_the_body_that_makes_it_large(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.dead_letters)
        if not harness.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await harness.open()
        sizes = [*[CLAIM_BYTES // 3 + 1] * 3, 5]
        for size in sizes:
            await dead_letter(broker, harness, name, bytes(size))
        for expected in (sizes[:3], sizes[3:]):
            got = await receive(broker, dead_letters_of(name), harness)
            assert [len(one.body) for one in got] == expected
            assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)

    async def test_large_bodies_behind_a_delayed_head_are_not_due(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        needs(harness.traits.delay)
        if not harness.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await harness.open()
        for size in (4, CLAIM_BYTES // 2, CLAIM_BYTES // 2):
            await broker.send(name, [Outgoing(bytes(size), session="s")])
        held = await accept(broker, name, harness)
        assert await settle(broker, await receive_session(broker, held, limit=1), Abandon(delay=harness.lock)) == [
            Settled()
        ]
        claim = await broker.receive_session(held, 100)
        assert isinstance(claim, Claim)
        assert list(claim.deliveries) == []
        assert claim.due_in is None or claim.due_in > 0  # else a consumer asks again at once, and again

    async def test_a_claim_has_a_token_of_its_own(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, b"a", b"b", b"c")
        first = await receive(broker, name, harness, limit=2)
        second = await receive(broker, name, harness)
        assert first[0].token == first[1].token != second[0].token
        await settle(broker, first, GIVE_BACK)
        again = await receive(broker, name, harness)
        assert again[0].token not in (first[0].token, second[0].token)

    async def test_of_twenty_receivers_no_two_get_the_same(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await send(broker, name, *[b"%d" % number for number in range(200)])
        others = [await harness.open() for _ in range(20)]
        seen: Counter[bytes] = Counter()

        async def consume(one: Broker) -> None:
            while got := await receive(one, name, harness, limit=3):
                seen.update(bodies(got))
                assert await settle(one, got, COMPLETE) == [Settled()] * len(got)

        await asyncio.gather(*(consume(one) for one in others))
        assert seen == Counter(b"%d" % number for number in range(200))
        assert await broker.stats(name) == Stats()

    async def test_a_message_gives_a_hint(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.hints:
            pytest.skip("this broker gives no hints")
        broker, other = await harness.open(), await harness.open()
        hints = broker.hints(name)
        assert await receive(broker, name, harness) == []
        await send(other, name, b"a")
        await asyncio.wait_for(anext(hints), harness.answer_within)
        got = await receive(broker, name, harness)
        assert len(got) == 1
        await settle(other if harness.any_client_settles else broker, got, Abandon())
        await asyncio.wait_for(anext(hints), harness.answer_within)
