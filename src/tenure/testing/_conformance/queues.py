"""What every broker must do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pickle
import random
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import pytest
import pytest_asyncio

from tenure._lease import NoAnswer
from tenure._queue.broker import (
    CLAIM_BYTES,
    EVERY_LIVE,
    EVERYTHING,
    Broker,
    Claim,
    LiveSelection,
    NoSession,
    QueueSettings,
    Selection,
    SettingChanges,
)
from tenure._queue.context import QueueContext
from tenure._queue.message import (
    COMPLETE,
    EXPIRED,
    GIVE_BACK,
    ID_MARK,
    LAPSED,
    MAX_DELIVERIES,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Deleted,
    Delivery,
    Died,
    Failure,
    Lapsed,
    NotEmpty,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    State,
    Stats,
    Verdict,
    dead_letters_of,
)
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness

LATE = 1.05  # by which share longer than a lock to wait before it is surely over
ERROR = Failure("ValueError", "no such customer: 'Ünïcödé-名前'", "Traceback …\nValueError")


class QueueSuite:
    """What the suites of brokers share: a house for each test, and words to write tests with."""

    harness: ClassVar[type[QueueHarness]]
    pytestmark: ClassVar[pytest.MarkDecorator] = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def house(self) -> AsyncIterator[QueueHarness]:
        """Open a fresh storage for one test."""
        house = self.harness()
        await house.start()
        try:
            yield house
        finally:
            await house.close()

    @pytest.fixture
    def name(self) -> str:
        """Give a name that no other test uses: the storage may be shared."""
        return f"conformance-{secrets.token_hex(6)}"


class BrokerSuite(QueueSuite):
    """The promises of :class:`tenure._queue.broker.Broker`, one test for each."""

    # --- sending and receiving ---

    async def test_what_is_sent_is_received(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        sent = Outgoing(
            b"\x00\xff body",
            id="order-17",
            headers={"text": "Ünïcödé", "whole": -7, "number": 1.5, "yes": True, "no": False},
            priority=0,
            reply_to="answers",
            correlation_id="call-1",
        )
        assert list(await broker.send(name, [sent])) == ["order-17"]
        [got] = await receive(broker, name, house)
        assert (got.queue, got.id, got.body, got.delivery_count) == (name, "order-17", sent.body, 1)
        assert dict(got.headers) == dict(sent.headers)
        assert type(got.headers["yes"]) is bool
        assert type(got.headers["whole"]) is int
        assert (got.session, got.priority, got.reply_to, got.correlation_id) == (None, 0, "answers", "call-1")
        assert got.locked_until > got.enqueued_at
        assert got.death is None

    async def test_an_empty_body_is_a_body(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        size = min(100_000, house.traits.body_max)
        await send(broker, name, b"", b"x" * size)
        first, second = sorted(await receive(broker, name, house), key=lambda one: len(one.body))
        assert (first.body, dict(first.headers), len(second.body)) == (b"", {}, size)

    async def test_an_empty_queue_answers_at_once(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        assert await broker.receive(name, 10, house.lock) == Claim((), None)
        assert await broker.stats(name) == Stats()

    async def test_an_idle_queue_does_not_ask_to_be_looked_at(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, b"a", b"b")
        got = await receive(broker, name, house)
        await broker.settle([Settlement(got[0], COMPLETE), Settlement(got[1], DeadLetter("done"))])
        for _ in range(2):  # whoever is told a moment comes back then: a consumer would do nothing else
            assert await broker.receive(name, 10, house.lock) == Claim((), None)
        if house.traits.sessions != "impossible":
            assert await broker.accept(name, None, house.lock) == NoSession(None)
            held = await broker.accept(name, "s", house.lock)
            assert isinstance(held, SessionLock)
            claim = await broker.receive_session(held, 10)
            assert isinstance(claim, Claim)
            assert claim.deliveries == ()
            assert claim.due_in is None or claim.due_in > house.lock / 2  # when its own lock ends
            await broker.release(held)
            assert await broker.accept(name, None, house.lock) == NoSession(None)

    async def test_order_is_that_of_sending(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.order)
        broker = await house.open()
        await send(broker, name, b"0", b"1")
        await send(broker, name, b"2")
        assert bodies(await receive(broker, name, house, limit=2)) == [b"0", b"1"]
        await send(broker, name, b"3")
        got = await receive(broker, name, house)
        assert bodies(got) == [b"2", b"3"]
        assert got[0].sequence < got[1].sequence

    async def test_made_up_ids_are_new(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        ids = [*await send(broker, name, b"a", b"a"), *await send(broker, f"{name}-2", b"a")]
        assert len(set(ids)) == 3
        assert sorted(one.id for one in await receive(broker, name, house)) == sorted(ids[:2])
        assert [one for one in ids if not re.fullmatch(r"[\w.-]+", one, re.ASCII)] == []  # no shell asks for quotes

    async def test_dead_letters_are_found_by_the_form_their_ids_had(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b"), Outgoing(b"c", id="order$1")])
        await settle(broker, await receive(broker, name, house, limit=3), DeadLetter("because"))
        letters = Queue(
            QueueContext(name, broker, RenewalThread.here(), SystemClock(), QueueSettings(), "", given={})
        ).dead_letters
        for letter in await letters.peek():
            assert [one.body for one in await letters.peek(ids=[letter.id])] == [letter.body]
            former = letter.id.replace(ID_MARK, "$")  # as an older tenure told it, and as somebody may have noted it
            assert [one.body for one in await letters.peek(ids=[former])] == [letter.body]

    async def test_no_more_than_asked_for(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, *[b"%d" % number for number in range(25)])
        assert [len(await receive(broker, name, house, limit=10)) for _ in range(4)] == [10, 10, 5, 0]

    @pytest.mark.parametrize("session", [None, "s"])
    async def test_a_claim_ends_with_the_body_that_makes_it_large(
        self, house: QueueHarness, name: str, session: str | None
    ) -> None:
        needs(house.traits.sessions if session else "native")
        if not house.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await house.open()
        large = bytes(CLAIM_BYTES // 3 + 1)
        sent = [large, large, large, b"small", bytes(CLAIM_BYTES), b"last"]
        for body in sent:
            await broker.send(name, [Outgoing(body, session=session)])
        claims: list[list[int]] = []
        held = await broker.accept(name, session, house.lock) if session else None
        for number in range(3):
            if isinstance(held, SessionLock):
                claim = await broker.receive_session(held, 100)
            else:
                claim = await broker.receive(name, 100, house.lock)
            assert isinstance(claim, Claim)
            assert (claim.due_in == 0) == (number < 2)  # there is more at once
            claims.append([len(one.body) for one in claim.deliveries])
            assert all(isinstance(answer, Settled) for answer in await settle(broker, claim.deliveries, COMPLETE))
        sizes = [len(body) for body in sent]
        assert claims == [sizes[:3], sizes[3:5], sizes[5:]]

    async def test_a_claim_of_dead_letters_ends_with_the_body_that_makes_it_large(
        self, house: QueueHarness, name: str
    ) -> None:
        needs(house.traits.dead_letters)
        if not house.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await house.open()
        sizes = [*[CLAIM_BYTES // 3 + 1] * 3, 5]
        for size in sizes:
            await bury(broker, house, name, bytes(size))
        for expected in (sizes[:3], sizes[3:]):
            got = await receive(broker, dead_letters_of(name), house)
            assert [len(one.body) for one in got] == expected
            assert await settle(broker, got, COMPLETE) == [Settled()] * len(got)

    async def test_behind_a_head_that_waits_large_bodies_are_not_due(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        needs(house.traits.delay)
        if not house.counts_bytes:
            pytest.skip("this broker counts no bytes")
        broker = await house.open()
        for size in (4, CLAIM_BYTES // 2, CLAIM_BYTES // 2):
            await broker.send(name, [Outgoing(bytes(size), session="s")])
        held = await accept(broker, name, house)
        assert await settle(broker, await receive_session(broker, held, limit=1), Abandon(delay=house.lock)) == [
            Settled()
        ]
        claim = await broker.receive_session(held, 100)
        assert isinstance(claim, Claim)
        assert list(claim.deliveries) == []
        assert claim.due_in is None or claim.due_in > 0  # else it is asked again at once, and again

    async def test_a_claim_has_a_token_of_its_own(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, b"a", b"b", b"c")
        first = await receive(broker, name, house, limit=2)
        second = await receive(broker, name, house)
        assert first[0].token == first[1].token != second[0].token
        await settle(broker, first, GIVE_BACK)
        again = await receive(broker, name, house)
        assert again[0].token not in (first[0].token, second[0].token)

    async def test_higher_priority_comes_first(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.priorities)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"%d" % number, priority=number % 3) for number in range(6)])
        assert bodies(await receive(broker, name, house)) == [b"2", b"5", b"1", b"4", b"0", b"3"]

    async def test_queues_do_not_mix(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        names = [name, name.upper(), f"{name}/0", f"{name}/1", f"{name}-Ünïcödé-名前", f"{name}'\"%_"]
        for number, each in enumerate(names):
            await send(broker, each, each.encode())
            for other in names[number + 1 :]:
                assert await receive(broker, other, house) == []
        for each in names:
            assert bodies(await receive(broker, each, house)) == [each.encode()]
        assert [each for each in await broker.names() if each.lower().startswith(name)] == sorted(names)

    async def test_of_twenty_receivers_no_two_get_the_same(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, *[b"%d" % number for number in range(200)])
        others = [await house.open() for _ in range(20)]
        seen: Counter[bytes] = Counter()

        async def consume(one: Broker) -> None:
            while got := await receive(one, name, house, limit=3):
                seen.update(bodies(got))
                assert await settle(one, got, COMPLETE) == [Settled()] * len(got)

        await asyncio.gather(*(consume(one) for one in others))
        assert seen == Counter(b"%d" % number for number in range(200))
        assert await broker.stats(name) == Stats()

    # --- delays and ends ---

    async def test_a_delayed_message_comes_later(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.delay)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"later", delay=house.lock), Outgoing(b"now")])
        claim = await broker.receive(name, 10, house.lock)
        assert bodies(claim.deliveries) == [b"now"]
        assert claim.due_in is None or 0 < claim.due_in <= house.lock
        stats = await broker.stats(name)
        assert (stats.delayed, stats.ready) == (1 if house.traits.exact_stats else stats.delayed, 0)
        await settle(broker, claim.deliveries, COMPLETE)
        await house.pass_time(house.lock * LATE)
        assert (await broker.stats(name)).ready == 1
        assert bodies(await receive(broker, name, house)) == [b"later"]

    async def test_at_is_a_moment_of_the_wall_clock(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.delay)
        broker = await house.open()
        await send(broker, name, b"probe")
        [probe] = await receive(broker, name, house)
        await broker.send(name, [Outgoing(b"past", at=1.0), Outgoing(b"later", at=probe.enqueued_at + house.lock)])
        assert bodies(await receive(broker, name, house)) == [b"past"]
        await house.pass_time(house.lock * LATE)
        assert b"later" in bodies(await receive(broker, name, house))

    async def test_what_is_not_received_in_time_is_dead(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await broker.send(name, [Outgoing(b"short", id="short", ttl=house.lock), Outgoing(b"long", ttl=house.lock * 9)])
        await house.pass_time(house.lock * LATE)
        if house.traits.exact_stats:
            stats = await broker.stats(name)
            assert (stats.ready, stats.dead) == (1, 1)
        assert bodies(await receive(broker, name, house)) == [b"long"]
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.id, dead.body, dead.reason, dead.delivery_count) == ("short", b"short", EXPIRED, 0)

    @pytest.mark.parametrize("session", [None, "s"])
    async def test_what_expires_at_once_with_many_is_not_received_either(
        self, house: QueueHarness, name: str, session: str | None
    ) -> None:
        needs(house.traits.sessions if session else "native")
        broker = await house.open()
        await broker.send(name, [Outgoing(b"short", ttl=house.lock / 2, session=session)] * house.backlog)
        await house.pass_time(house.lock * LATE)
        await broker.send(name, [Outgoing(b"long", ttl=house.lock * 9, session=session)])
        received: list[bytes] = []

        async def receive_all() -> bool:
            if session is None:
                received.extend(bodies(await receive(broker, name, house, limit=5)))
            elif isinstance(held := await broker.accept(name, None, house.lock), SessionLock):
                received.extend(bodies(await receive_session(broker, held, limit=5)))
                if not received:
                    await broker.release(held)
            return bool(received)

        await until(receive_all)
        assert received == [b"long"]
        if house.traits.exact_stats:
            assert await broker.stats(name) == Stats(locked=1, dead=house.backlog)

    async def test_an_expired_backlog_in_front_is_not_the_end_of_a_queue(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await broker.send(name, [Outgoing(b"short", ttl=house.lock / 2)] * house.backlog)
        await house.pass_time(house.lock * LATE)
        await send(broker, name, b"0", b"1", b"2")
        settings = QueueSettings(lock=house.lock)
        queue = Queue(
            QueueContext(name, broker, RenewalThread.here(), SystemClock(), settings, "", given={"lock": house.lock})
        )
        handled: list[bytes] = []

        async def handle(message: Message) -> None:
            handled.append(message.body)

        async with asyncio.timeout(60):
            await queue.consume(handle, until_empty=True, concurrency=1, sigterm=False)
        assert sorted(handled) == [b"0", b"1", b"2"]
        if house.traits.exact_stats:
            assert await broker.stats(name) == Stats(dead=house.backlog)

    async def test_a_received_message_does_not_expire(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await broker.send(name, [Outgoing(b"a", ttl=house.lock * 1.2), Outgoing(b"b", ttl=house.lock * 1.2)])
        got = await receive(broker, name, house)
        await house.pass_time(house.lock * 0.7)
        await broker.renew(got, house.lock)
        await house.pass_time(house.lock * 0.7)
        done, abandoned = sorted(got, key=lambda one: one.body)
        assert await settle(broker, [done], COMPLETE) == [Settled()]
        assert await settle(broker, [abandoned], Abandon()) == [Settled(dead=True)]
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.reason) == (b"b", EXPIRED)

    # --- dedupe ---

    async def test_the_same_id_is_kept_once(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dedupe)
        broker, other = await house.open(), await house.open()
        await broker.declare(name, {"lock": house.lock, "dedupe_window": house.lock * 3})
        await broker.send(name, [Outgoing(b"1", id="a"), Outgoing(b"2", id="a"), Outgoing(b"3", id="b")])
        assert list(await other.send(name, [Outgoing(b"4", id="a")])) == ["a"]
        got = await receive(broker, name, house)
        assert bodies(got) == [b"1", b"3"]
        await settle(broker, got, COMPLETE)
        await broker.send(name, [Outgoing(b"5", id="a")])  # also when the first is done
        assert await receive(broker, name, house) == []
        await broker.send(f"{name}-2", [Outgoing(b"6", id="a")])  # but in another queue it is another
        assert bodies(await receive(broker, f"{name}-2", house)) == [b"6"]
        await house.pass_time(house.lock * 1.5)
        await broker.send(name, [Outgoing(b"6", id="a")])  # the window does not begin anew
        assert await receive(broker, name, house) == []
        await house.pass_time(house.lock * (3 * LATE - 1.5))
        await broker.send(name, [Outgoing(b"7", id="a")])
        assert bodies(await receive(broker, name, house)) == [b"7"]

    async def test_a_window_of_nothing_remembers_nothing(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dedupe)
        broker = await house.open()
        await broker.declare(name, {"dedupe_window": 0.0})
        for _ in range(2):
            assert list(await broker.send(name, [Outgoing(b"1", id="a"), Outgoing(b"2", id="a")])) == ["a", "a"]
        assert Counter(bodies(await receive(broker, name, house))) == {b"1": 2, b"2": 2}

    # --- locks ---

    async def test_a_locked_message_is_nobody_elses(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        await receive(broker, name, house)
        assert await receive(other, name, house) == []
        assert (await broker.stats(name)).locked == 1

    async def test_when_a_lock_ends_the_message_is_claimable(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        [old] = await receive(broker, name, house)
        claim = await other.receive(name, 10, house.lock)
        assert claim.deliveries == ()
        assert claim.due_in is None or 0 < claim.due_in <= house.lock
        await house.pass_time(house.lock * LATE)
        stats = await broker.stats(name)
        assert (stats.ready, stats.locked) == (1, 0)
        [new] = await receive(other, name, house)
        assert (new.sequence, new.id, new.delivery_count) == (old.sequence, old.id, 2)
        assert new.token != old.token

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), Defer(), DeadLetter("late"), GIVE_BACK], ids=repr)
    async def test_a_late_verdict_lapses(self, house: QueueHarness, name: str, verdict: Verdict) -> None:
        possible(house, verdict)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        [old] = await receive(broker, name, house)
        await house.pass_time(house.lock * LATE)
        assert await settle(broker, [old], verdict) == [LAPSED]  # nobody has it yet, and it is ours no more
        assert await broker.renew([old], house.lock) == [LAPSED]
        [new] = await receive(other, name, house)
        assert new.delivery_count == 2
        assert await settle(broker, [old], verdict) == [LAPSED]  # another has it
        assert await broker.renew([old], house.lock) == [LAPSED]
        assert isinstance((await other.renew([new], house.lock))[0], Renewed)
        assert await settle(other, [new], COMPLETE) == [Settled()]
        assert await settle(broker, [old], verdict) == [LAPSED]  # it is gone
        assert await broker.stats(name) == Stats()

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon(), Defer(), DeadLetter("done"), GIVE_BACK], ids=repr)
    async def test_nobody_settles_twice(self, house: QueueHarness, name: str, verdict: Verdict) -> None:
        possible(house, verdict)
        broker = await house.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, house)
        assert await broker.settle([Settlement(got, verdict), Settlement(got, COMPLETE)]) == [Settled(), LAPSED]
        assert await settle(broker, [got], verdict) == [LAPSED]

    async def test_a_forged_token_lapses(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, b"a", b"b")
        first, second = await receive(broker, name, house, limit=1), await receive(broker, name, house, limit=1)
        forged = first[0]._replace(token=second[0].token)
        misplaced = first[0]._replace(queue=f"{name}-2")
        assert await settle(broker, [forged, misplaced], COMPLETE) == [LAPSED, LAPSED]
        assert await settle(broker, [*first, *second], COMPLETE) == [Settled(), Settled()]

    async def test_a_renewed_lock_holds(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.renewal)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, house)
        for _ in range(3):
            await house.pass_time(house.lock * 0.7)
            [answer] = await broker.renew([got], house.lock)
            assert isinstance(answer, Renewed)
            assert answer.locked_until > got.locked_until
            assert await receive(other, name, house) == []
        assert await settle(broker, [got], COMPLETE) == [Settled()]

    async def test_many_are_renewed_each_to_its_own_fate(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.renewal)
        broker = await house.open()
        await send(broker, name, *[b"%d" % number for number in range(6)])
        await send(broker, f"{name}-2", b"other")
        got = await receive(broker, name, house)
        [other] = await receive(broker, f"{name}-2", house)
        await settle(broker, [got[1]], COMPLETE)
        await settle(broker, [got[4]], Abandon())
        answers = await broker.renew([got[0], got[1], other, got[4], got[5]], house.lock)
        assert [type(answer) for answer in answers] == [Renewed, Lapsed, Renewed, Lapsed, Renewed]
        await house.pass_time(house.lock * 0.7)
        await broker.renew([got[5]], house.lock)
        await house.pass_time(house.lock * 0.7)
        answers = await broker.renew([*got, other], house.lock)
        assert [type(answer) for answer in answers] == [Lapsed] * 5 + [Renewed, Lapsed]

    async def test_verdicts_are_passed_in_order_each_by_itself(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, *[b"%d" % number for number in range(6)])
        await send(broker, f"{name}-2", b"other")
        got = await receive(broker, name, house)
        [other] = await receive(broker, f"{name}-2", house)
        await settle(broker, [got[2]], COMPLETE)
        deferred = house.traits.deferral != "impossible"
        last = Defer() if deferred else COMPLETE
        verdicts: list[Verdict] = [COMPLETE, Abandon(), COMPLETE, DeadLetter("bad"), GIVE_BACK, last]
        settlements = [Settlement(one, verdict) for one, verdict in zip(got, verdicts, strict=True)]
        answers = await broker.settle([*settlements, Settlement(other, COMPLETE)])
        assert list(answers) == [Settled(), Settled(), LAPSED, Settled(), Settled(), Settled(), Settled()]
        stats = await broker.stats(name)
        assert (stats.ready, stats.dead, stats.deferred) == (2, 1, deferred)

    # --- counting deliveries ---

    async def test_a_delivery_counts_when_it_is_claimed(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, b"a")
        for count in range(1, 4):
            [got] = await receive(broker, name, house)
            assert got.delivery_count == count
            if count % 2:
                await house.pass_time(house.lock * LATE)
            else:
                await settle(broker, [got], Abandon())

    async def test_giving_back_does_not_count(self, house: QueueHarness, name: str) -> None:
        broker = await house.open()
        await send(broker, name, b"a", b"b", b"c")
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 2})
        for _ in range(5):
            got = await receive(broker, name, house)
            assert [one.delivery_count for one in got] == [1, 1, 1]
            assert in_order(house, got) == [b"a", b"b", b"c"]
            assert await settle(broker, reversed(got), GIVE_BACK) == [Settled()] * 3
        assert (await broker.stats(name)).dead == 0

    async def test_the_last_delivery_abandoned_is_death(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 3})
        await broker.send(name, [Outgoing(b"poison", id="p", headers={"k": "v"}, correlation_id="c")])
        for count in (1, 2, 3):
            [got] = await receive(broker, name, house)
            answer = await settle(broker, [got], Abandon(0.0, Failure("E", f"try {count}", "trace")))
            assert answer == [Settled(dead=count == 3)]
        assert await receive(broker, name, house) == []
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

    async def test_the_last_lock_expired_is_death(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 2})
        await send(broker, name, b"crasher")
        for _ in range(2):
            assert len(await receive(broker, name, house)) == 1
            await house.pass_time(house.lock * LATE)
        if house.traits.exact_stats:
            assert await broker.stats(name) == Stats(dead=1)
        assert await receive(broker, name, house) == []
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.reason, dead.delivery_count, dead.error) == (MAX_DELIVERIES, 2, None)
        assert [one.outcome for one in dead.history] == ["expired", "expired"]

    async def test_who_claims_is_told_once_of_what_time_has_buried(self, house: QueueHarness, name: str) -> None:
        if not house.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        broker = await house.open()
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 1})
        await broker.send(name, [Outgoing(b"crashes", id="a"), Outgoing(b"stands")])
        _, stands = sorted(await receive(broker, name, house), key=lambda one: one.body)
        await broker.send(name, [Outgoing(b"expires", id="b", ttl=house.lock / 2)])
        await broker.settle([Settlement(stands, DeadLetter("of a verdict"))])  # and its answer has told of that
        await house.pass_time(house.lock * LATE)
        await broker.stats(name)  # whoever sees to it that they die
        told = [*(await broker.receive(name, 10, house.lock)).died, *(await broker.receive(name, 10, house.lock)).died]
        sequences = {dead.id: dead.sequence for dead in await broker.peek_dead(name, EVERYTHING, 10)}
        assert sorted(told, key=lambda one: one.id) == [
            Died(sequences["a"], "a", 1, MAX_DELIVERIES),
            Died(sequences["b"], "b", 0, EXPIRED),
        ]

    @pytest.mark.parametrize("session", [None, "s"], ids=["messages", "session"])
    async def test_each_death_by_time_is_told_to_one_of_two_consumers(
        self, house: QueueHarness, name: str, session: str | None
    ) -> None:
        if not house.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        needs(house.traits.sessions if session else "native")
        brokers = [await house.open(), await house.open()]
        quiet, busy = name, f"{name}-busy"
        for queue in (quiet, busy):
            await doom(brokers[0], queue, house, session)
        await brokers[1].send(busy, [Outgoing(b"lives", session=session)])
        await house.pass_time(house.lock * LATE)
        for queue, lives in ((quiet, []), (busy, [b"lives"])):
            died: list[tuple[str, int, str]] = []
            handled: list[bytes] = []
            for _ in range(3):
                for claim in await asyncio.gather(*(polled(broker, queue, house, session) for broker in brokers)):
                    died += [(one.id, one.delivery_count, one.reason) for one in claim.died]
                    handled += bodies(claim.deliveries)
            assert handled == lives
            crashed, late = ([f"{what}-{number}" for number in range(3)] for what in ("crashes", "late"))
            assert sorted(died) == [
                *((one, 1, MAX_DELIVERIES) for one in crashed),
                *((one, 0, EXPIRED) for one in late),
            ]

    @pytest.mark.parametrize("verdict", [GIVE_BACK, Abandon(), None], ids=["given back", "abandoned", "lock ended"])
    async def test_a_death_after_a_ttl_that_ended_under_the_lock_is_told_once(
        self, house: QueueHarness, name: str, verdict: Verdict | None
    ) -> None:
        if not house.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        broker = await house.open()
        await broker.send(name, [Outgoing(b"late", id="late", ttl=house.lock / 2)])
        [got] = await receive(broker, name, house)
        await house.pass_time(house.lock * (0.6 if verdict else LATE))
        [answer] = await settle(broker, [got], verdict) if verdict else [Settled()]
        assert isinstance(answer, Settled)
        died = [*(await broker.receive(name, 10, house.lock)).died, *(await broker.receive(name, 10, house.lock)).died]
        assert (answer.dead, [one.id for one in died]) in ((True, []), (False, ["late"]))

    async def test_a_death_of_a_session_that_is_let_go_is_told(self, house: QueueHarness, name: str) -> None:
        if not house.traits.names_dead:
            pytest.skip("this broker doesn't name them")
        needs(house.traits.sessions)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"late", id="late", ttl=house.lock / 2, session="s")])
        held = await accept(broker, name, house)
        [got] = await receive_session(broker, held)
        await house.pass_time(house.lock * 0.6)
        assert await broker.release(held) == Settled()
        told = [*(await broker.receive(name, 10, house.lock)).died, *(await broker.receive(name, 10, house.lock)).died]
        assert told == [Died(got.sequence, "late", 0, EXPIRED)]

    async def test_a_lower_limit_meets_old_messages(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, house)
        settings = QueueSettings(lock=house.lock, max_deliveries=1, dedupe_window=5.0, body_max=10)
        changes: SettingChanges = {"lock": house.lock, "max_deliveries": 1, "dedupe_window": 5.0, "body_max": 10}
        assert await other.declare(name, changes) == settings
        assert await broker.settings(name) == settings
        assert await broker.settings(f"{name}-2") == QueueSettings()
        assert await settle(broker, [got], Abandon()) == [Settled(dead=True)]

    # --- settings ---

    async def test_a_declaration_changes_only_what_it_names(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        assert await broker.declare(name, {"max_deliveries": 7}) == QueueSettings(max_deliveries=7)
        both = QueueSettings(max_deliveries=7, dedupe_window=5.0)
        assert await other.declare(name, {"dedupe_window": 5.0}) == both
        assert await broker.settings(name) == both
        assert await broker.declare(name, {"max_deliveries": 8}) == replace(both, max_deliveries=8)
        assert await other.declare(name, {}) == replace(both, max_deliveries=8)

    @pytest.mark.parametrize("is_new", [True, False])
    async def test_settings_declared_at_the_same_time_all_hold(
        self, house: QueueHarness, name: str, is_new: bool
    ) -> None:
        clients = [await house.open() for _ in range(4)]
        if not is_new:
            await clients[0].declare(name, {"lock": house.lock})
        given: list[SettingChanges] = [
            {"lock": house.lock * 2},
            {"max_deliveries": 7},
            {"dedupe_window": 5.0},
            {"body_max": 10},
        ]
        meeting = Meeting(len(clients))
        renewal_thread = cast(RenewalThread, None)  # nothing here is renewed
        desks = [
            QueueContext(
                name, meeting.around(client), renewal_thread, SystemClock(), QueueSettings(), "", given=changes
            )
            for client, changes in zip(clients, given, strict=True)
        ]
        await asyncio.gather(*(context.ready() for context in desks))
        wanted = QueueSettings(lock=house.lock * 2, max_deliveries=7, dedupe_window=5.0, body_max=10)
        assert await clients[0].settings(name) == wanted

    # --- abandon, defer ---

    async def test_abandoned_with_a_delay_it_comes_later(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.delay)
        broker = await house.open()
        await send(broker, name, b"a", b"b")
        first, second = sorted(await receive(broker, name, house), key=lambda one: one.body)
        await settle(broker, [first], Abandon(delay=house.lock))
        await settle(broker, [second], Abandon())
        assert bodies(await receive(broker, name, house)) == [b"b"]
        if house.traits.exact_stats:
            assert (await broker.stats(name)).delayed == 1
        await house.pass_time(house.lock * LATE)
        assert b"a" in bodies(await receive(broker, name, house))

    async def test_a_deferred_message_comes_by_sequence_only(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.deferral)
        broker, other = await house.open(), await house.open()
        await send(broker, name, b"a", b"b", b"c")
        got = await receive(broker, name, house)
        await settle(broker, got[:2], Defer())
        await settle(broker, got[2:], COMPLETE)
        a, b, c = (one.sequence for one in got)
        await house.pass_time(house.lock * LATE)
        assert await receive(broker, name, house) == []
        assert (await broker.stats(name)).deferred == 2
        seen = await broker.peek_deferred(name, 10)
        assert [(one.sequence, one.body) for one in seen] == [(a, b"a"), (b, b"b")]
        assert [one.sequence for one in await broker.peek_deferred(name, 10, after=a)] == [b]
        found = (await other.receive_deferred(name, [b, c, a, a, 10**9], house.lock)).deliveries
        assert [(one.body, one.delivery_count) for one in found] == [(b"b", 2), (b"a", 2)]
        assert (await other.receive_deferred(name, [a, b], house.lock)).deliveries == ()
        assert (await broker.stats(name)).locked == 2
        assert await settle(other, found[:1], COMPLETE) == [Settled()]
        assert await settle(other, found[1:], Abandon()) == [Settled()]
        assert await receive(broker, name, house) == []
        assert await broker.stats(name) == Stats(deferred=1)

    async def test_a_deferred_message_stays_so_when_its_lock_ends(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.deferral)
        broker = await house.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, house)
        await settle(broker, got, Defer())
        [found] = (await broker.receive_deferred(name, [got[0].sequence], house.lock)).deliveries
        await house.pass_time(house.lock * LATE)
        assert await settle(broker, [found], COMPLETE) == [LAPSED]
        assert await broker.stats(name) == Stats(deferred=1)
        assert await receive(broker, name, house) == []
        [again] = (await broker.receive_deferred(name, [got[0].sequence], house.lock)).deliveries
        assert again.delivery_count == 3

    # --- dead letters ---

    async def test_a_rejected_message_keeps_its_reason(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"bad", id="x", headers={"n": 1}, reply_to="r")])
        got = await receive(broker, name, house)
        assert await settle(broker, got, DeadLetter("unreadable", "no JSON", ERROR)) == [Settled()]
        assert await broker.stats(name) == Stats(dead=1)
        await house.pass_time(house.lock * 20)  # nothing expires there
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
    async def test_no_description_holds_up_what_is_settled_with_it(
        self, house: QueueHarness, name: str, given: str, kept: str
    ) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"good"), Outgoing(b"bad"), Outgoing(b"good")])
        got = await receive(broker, name, house, limit=3)
        verdicts: list[Verdict] = [DeadLetter("why", given) if one.body == b"bad" else COMPLETE for one in got]
        settlements = [Settlement(one, verdict) for one, verdict in zip(got, verdicts, strict=True)]
        assert list(await broker.settle(settlements)) == [Settled()] * 3
        [dead] = await broker.peek_dead(name, EVERYTHING, 10)
        assert (dead.body, dead.description) == (b"bad", kept)

    async def test_dead_letters_are_received_as_a_queue(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker, other = await house.open(), await house.open()
        await bury(broker, house, name, b"a", b"b", b"c")
        dead_name = dead_letters_of(name)
        got = await receive(broker, dead_name, house, limit=2)
        if house.traits.order != "impossible":
            assert bodies(got) == [b"a", b"b"]
        assert [(one.queue, one.delivery_count) for one in got] == [(dead_name, 1), (dead_name, 1)]
        assert got[0].death is not None
        assert (got[0].death.reason, got[0].death.error) == ("because", ERROR)
        [third] = await receive(other, dead_name, house)
        assert sorted(bodies([*got, third])) == [b"a", b"b", b"c"]
        await house.pass_time(house.lock * 0.7)
        assert [type(answer) for answer in await broker.renew(got, house.lock)] == [Renewed, Renewed]
        await house.pass_time(house.lock * 0.7)
        assert await settle(broker, got[:1], COMPLETE) == [Settled()]
        assert await settle(broker, got[1:], Abandon()) == [Settled()]
        left = await receive(broker, dead_name, house)
        assert sorted(bodies(left)) == sorted([got[1].body, third.body])
        assert await settle(broker, left, DeadLetter("worse")) == [Settled(), Settled()]
        assert await broker.stats(name) == Stats(dead=2)
        assert {one.reason for one in await broker.peek_dead(name, EVERYTHING, 10)} == {"worse"}

    async def test_a_dead_letter_survives_any_number_of_looks(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 2})
        await bury(broker, house, name, b"a")
        for _ in range(5):
            [got] = await receive(broker, dead_letters_of(name), house)
            assert got.delivery_count == 1
            await settle(broker, [got], Abandon())
        assert await broker.stats(name) == Stats(dead=1)
        with pytest.raises(ConfigError, match="defer"):
            await settle(broker, await receive(broker, dead_letters_of(name), house), Defer())

    async def test_redrive_starts_anew(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await broker.declare(name, {"lock": house.lock, "max_deliveries": 1})
        await broker.send(name, [Outgoing(b"a", id="a", ttl=house.lock * 0.5), Outgoing(b"b", id="b")])
        await house.pass_time(house.lock * 0.6)
        await settle(broker, await receive(broker, name, house), Abandon(0.0, ERROR))
        assert await broker.stats(name) == Stats(dead=2)
        assert await broker.redrive(name, EVERYTHING, None, dry_run=True) == 2
        assert await broker.stats(name) == Stats(dead=2)
        assert await broker.redrive(name, EVERYTHING, None) == 2
        stats = await broker.stats(name)
        assert (stats.ready, stats.dead) == (2, 0)
        got = await receive(broker, name, house)
        assert sorted((one.id, one.delivery_count, one.death) for one in got) == [("a", 1, None), ("b", 1, None)]
        await settle(broker, got, Abandon())
        again = await broker.peek_dead(name, EVERYTHING, 10)
        assert {one.id: len(one.history) for one in again} == {"a": 1, "b": 2}  # what happened before is not forgotten

    async def test_redrive_and_purge_take_what_is_meant(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker = await house.open()
        await bury(broker, house, name, *[b"%d" % number for number in range(6)])
        dead = await broker.peek_dead(name, EVERYTHING, 10)
        await house.pass_time(house.lock)
        await bury(broker, house, name, b"x", reason="other")
        [other] = await broker.peek_dead(name, Selection(reason="other"), 10)
        assert other.body == b"x"
        assert len(await broker.peek_dead(name, Selection(dead_before=other.dead_at), 10)) == 6
        assert len(await broker.peek_dead(name, Selection(after=dead[1].sequence), 3)) == 3
        assert await broker.redrive(name, Selection(ids=frozenset({dead[2].id, "nobody"})), None) == 1
        assert await broker.redrive(name, Selection(reason="because"), 2) == 2
        assert sorted(bodies(await receive(broker, name, house))) == sorted(bodies(dead[:3]))
        assert await broker.purge(name, Selection(sequences=frozenset({dead[3].sequence, dead[0].sequence})), None) == 1
        [locked] = await receive(broker, dead_letters_of(name), house, limit=1)
        if house.traits.order != "impossible":
            assert locked.body == b"4"
        assert await broker.redrive(name, Selection(reason="nothing"), None) == 0
        assert await broker.redrive(name, Selection(sequences=frozenset({locked.sequence})), None) == 0
        assert await broker.purge(name, EVERYTHING, None) == 2  # not the one that somebody looks at
        await house.pass_time(house.lock * LATE)
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [locked.body]
        stats = await broker.stats(name)
        assert (stats.ready, stats.delayed, stats.dead) == (3, 0, 1)  # those that were put back, their locks at an end

    async def test_redrive_to_another_queue(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker, other = await house.open(), await house.open()
        there = f"{name}-there"
        highest = 0 if house.traits.priorities == "impossible" else 5
        named = Outgoing(b"named", id="x", headers={"n": 2**60 + 1, "e": ""}, reply_to="answers", correlation_id="c")
        if house.traits.dedupe != "impossible":  # what is remembered there loses no letter
            await broker.send(there, [Outgoing(b"", id="x")])
            await settle(broker, await receive(broker, there, house), COMPLETE)
        await broker.send(name, [named, Outgoing(b"told", headers={"a": 1.5}), Outgoing(b"plain", priority=highest)])
        before = {one.body: one for one in await receive(broker, name, house)}
        await settle(broker, [before[b"named"], before[b"told"]], DeadLetter("bad", "", ERROR))
        await settle(broker, [before[b"plain"]], DeadLetter("odd"))
        assert await other.redrive(name, Selection(reason="bad"), None, dry_run=True, to=there) == 2
        assert await other.redrive(name, Selection(reason="odd"), None, to=there) == 1
        assert await other.redrive(name, EVERYTHING, 5, to=there) == 2
        assert await other.redrive(name, EVERYTHING, None, to=there) == 0
        assert await broker.stats(name) == Stats()
        got = await receive(broker, there, house)
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
        assert len(await settle(broker, [after[b"told"], after[b"plain"]], COMPLETE)) == 2
        assert await broker.stats(there) == Stats(dead=1)

    async def test_redrive_to_another_queue_keeps_the_session(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"%d" % number, session="s") for number in range(3)])
        held = await accept(broker, name, house)
        await settle(broker, await receive_session(broker, held), DeadLetter("bad"))
        await broker.release(held)
        await broker.send(f"{name}-there", [Outgoing(b"before", session="s")])
        assert await broker.redrive(name, EVERYTHING, 2, to=f"{name}-there") == 2
        got = await receive_session(broker, await accept(broker, f"{name}-there", house))
        assert bodies(got) == [b"before", b"0", b"1"]
        assert (await broker.stats(name)).dead == 1

    async def test_redrive_takes_a_dead_letter_that_waits_for_its_delay(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        needs(house.traits.delay)
        if not house.traits.exact_stats:
            pytest.skip("this broker sees no message that is out of sight")
        broker, other = await house.open(), await house.open()
        await bury(broker, house, name, b"a")
        letters = await receive(broker, dead_letters_of(name), house)
        assert await settle(broker, letters, Abandon(delay=house.lock * 0.5)) == [Settled()]
        assert await broker.redrive(name, EVERYTHING, None) == 1
        got = await receive(broker, name, house)
        await house.pass_time(house.lock * 0.6)  # the delay is over, which is nothing to it any more
        assert await receive(other, dead_letters_of(name), house) == []
        assert await receive(other, name, house) == []
        assert await settle(broker, got, COMPLETE) == [Settled()]
        assert await broker.stats(name) == Stats()

    async def test_redrive_puts_messages_back_into_their_session(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        needs(house.traits.sessions)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        held = await accept(broker, name, house)
        await settle(broker, await receive_session(broker, held), DeadLetter("because"))
        assert await broker.release(held) == Settled()  # nothing of it is left to be known
        assert await broker.redrive(name, EVERYTHING, None) == 2
        for _ in range(2):
            held = await accept(broker, name, house)
            assert await broker.release(held) == Settled()
        held = await accept(broker, name, house)
        got = await receive_session(broker, held)
        assert [(one.body, one.session, one.delivery_count) for one in got] == [(b"1", "s", 1), (b"2", "s", 1)]
        assert await settle(broker, got, COMPLETE) == [Settled()] * 2
        assert await broker.stats(name) == Stats()

    # --- sessions ---

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

    # --- together with a complete ---

    async def test_complete_sends_and_remembers(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        await broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"b", id="b")])
        a, b = sorted(await receive(broker, name, house), key=lambda one: one.body)
        remembers = house.traits.dedupe != "impossible"
        results = f"{name}-results"
        verdict = Complete(sends=((results, Outgoing(b"result", correlation_id="a")),), remember=house.lock * remembers)
        assert await settle(broker, [a], verdict) == [Settled()]
        assert await settle(broker, [a], verdict) == [LAPSED]
        assert [(one.body, one.correlation_id) for one in await receive(other, results, house)] == [(b"result", "a")]
        if not remembers:
            return
        assert list(await other.handled(name, ["a", "b", "c"])) == [True, False, False]
        assert list(await other.handled(results, ["a"])) == [False]
        await settle(broker, [b], COMPLETE)
        assert list(await other.handled(name, ["b"])) == [False]
        await house.pass_time(house.lock * LATE)
        assert list(await other.handled(name, ["a"])) == [False]

    async def test_the_inbox_remembers_for_the_longest_that_was_asked(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dedupe)
        broker = await house.open()
        await broker.declare(name, {"dedupe_window": 0.0})
        for seconds in (0.5, 9.0, 0.6):
            await broker.send(name, [Outgoing(b"a", id="a")])
            got = await receive(broker, name, house)
            assert await settle(broker, got, Complete(remember=house.lock * seconds)) == [Settled()]
        await house.pass_time(house.lock * 0.8)
        assert await receive(broker, name, house) == []  # also who finds nothing may forget what is over
        assert list(await broker.handled(name, ["a"])) == [True]

    # --- hints ---

    async def test_a_message_is_told_of(self, house: QueueHarness, name: str) -> None:
        if not house.traits.hints:
            pytest.skip("this broker tells nobody")
        broker, other = await house.open(), await house.open()
        heard = broker.hints(name)
        assert await receive(broker, name, house) == []
        await send(other, name, b"a")
        await asyncio.wait_for(anext(heard), house.patience)
        got = await receive(broker, name, house)
        assert len(got) == 1
        await settle(other, got, Abandon())
        await asyncio.wait_for(anext(heard), house.patience)

    # --- statistics ---

    async def test_age_is_that_of_the_oldest_ready(self, house: QueueHarness, name: str) -> None:
        if not house.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        broker = await house.open()
        await send(broker, name, b"a")
        await house.pass_time(house.lock / 2)
        await send(broker, name, b"b")
        assert (await broker.stats(name)).oldest_age == pytest.approx(house.lock / 2, rel=0.2)
        await receive(broker, name, house, limit=1)
        assert (await broker.stats(name)).oldest_age < house.lock / 4

    async def test_dead_letters_go_when_their_time_is_over(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dead_letters)
        broker, other = await house.open(), await house.open()
        await bury(broker, house, name, b"old")
        await house.pass_time(house.lock)
        await bury(broker, house, name, b"new")
        assert [one.body for one in await broker.peek_dead(name, Selection(dead_for=house.lock * 0.8), 10)] == [b"old"]
        await other.declare(name, {"dead_retention": house.lock * 0.8})
        assert (await broker.settings(name)).dead_retention == house.lock * 0.8
        renewal_thread = cast(RenewalThread, None)  # nothing here is renewed
        context = QueueContext(name, broker, renewal_thread, SystemClock(), QueueSettings(), "", given={})
        await context.ready()
        await context.rest()
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [b"new"]
        assert (await broker.declare(name, {"dead_retention": math.inf})).dead_retention == math.inf
        context = QueueContext(name, broker, renewal_thread, SystemClock(), QueueSettings(), "", given={})
        await house.pass_time(house.lock)
        await context.ready()
        await context.rest()
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 10)] == [b"new"]

    # --- the end of a queue ---

    async def test_an_empty_queue_can_be_deleted(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        await broker.declare(name, {"max_deliveries": 7, "dead_retention": 9_000.0})
        await broker.delete_when_idle(name, 0.0)
        await send(broker, name, b"a", b"b")
        old = await receive(broker, name, house)
        await settle(broker, old, COMPLETE)
        assert await other.delete(name) == Deleted(Stats())
        assert name not in await broker.names()
        assert await broker.settings(name) == QueueSettings()
        assert await receive(broker, name, house) == []
        assert await broker.stats(name) == Stats()
        assert await other.delete(name) == Deleted(Stats())  # there is none, and that is what was asked for
        await send(broker, name, b"c")  # by one who has not heard of it
        assert await broker.settings(name) == QueueSettings()
        assert name in await other.names() or not house.traits.exact_stats
        [new] = await receive(other, name, house)
        if house.traits.order != "impossible":
            assert new.sequence > max(one.sequence for one in old)
        assert await settle(broker, old, COMPLETE) == [LAPSED] * 2
        assert await settle(other, [new], COMPLETE) == [Settled()]
        assert name not in await other.idle()  # of this one, nobody has said so

    @pytest.mark.parametrize("place", ["ready", "locked", "delayed", "deferred", "dead", "session"])
    async def test_a_queue_that_holds_anything_is_deleted_by_force_only(
        self, house: QueueHarness, name: str, place: str
    ) -> None:
        needs(
            {
                "delayed": house.traits.delay,
                "deferred": house.traits.deferral,
                "dead": house.traits.dead_letters,
                "session": house.traits.sessions,
            }.get(place, "native")
        )
        broker, other = await house.open(), await house.open()
        old = await put_in(broker, house, name, place)
        answer = await other.delete(name)
        counted = "ready" if place == "session" else place
        wanted = Stats(**{counted: 1})
        assert isinstance(answer, NotEmpty)
        assert replace(answer.stats, oldest_age=0.0) == wanted or not house.traits.exact_stats
        assert replace(await broker.stats(name), oldest_age=0.0) == wanted or not house.traits.exact_stats
        assert name in await broker.names()
        answer = await other.delete(name, force=True)
        assert isinstance(answer, Deleted)
        assert replace(answer.stats, oldest_age=0.0) == wanted or not house.traits.exact_stats
        assert name not in await broker.names()
        await send(broker, name, b"new")
        assert await settle(broker, old, COMPLETE) == [LAPSED] * len(old)
        await house.pass_time(house.lock * 2 * LATE)
        assert bodies(await receive(broker, name, house)) == [b"new"]
        if house.traits.dead_letters != "impossible":
            assert await broker.peek_dead(name, EVERYTHING, 10) == []

    async def test_what_is_remembered_of_a_queue_goes_with_it(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dedupe)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"a", id="a")])
        await settle(broker, await receive(broker, name, house), Complete(remember=house.lock * 10))
        if house.traits.sessions != "impossible":
            held = await broker.accept(name, "s", house.lock)
            assert isinstance(held, SessionLock)
            await broker.write_state(held, b"state")
            assert await broker.delete(name) == Deleted(Stats())
            assert await broker.write_state(held, b"late") == LAPSED
            assert await broker.release(held) == LAPSED
            held = await broker.accept(name, "s", house.lock)
            assert isinstance(held, SessionLock)
            assert held.state is None
        assert await broker.delete(name) == Deleted(Stats())
        assert list(await broker.handled(name, ["a"])) == [False]
        await broker.send(name, [Outgoing(b"b", id="a")])
        assert bodies(await receive(broker, name, house)) == [b"b"]
        assert list(await broker.handled(name, ["a"])) == [False]  # also when there is a queue again

    async def test_a_deep_queue_can_be_deleted_by_force(self, house: QueueHarness, name: str) -> None:
        if not house.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        broker = await house.open()
        many = [Outgoing(b"x", session="s" if number % 3 else None) for number in range(2_500)]
        await broker.send(name, many)
        await receive(broker, name, house, limit=300)
        await send(broker, f"{name}-2", b"another's")
        answer = await broker.delete(name, force=True)
        assert (answer.stats.ready, answer.stats.locked) == (2_200, 300)
        assert await broker.stats(name) == Stats()
        assert bodies(await receive(broker, f"{name}-2", house)) == [b"another's"]

    async def test_nothing_is_lost_that_is_sent_while_a_queue_is_deleted(self, house: QueueHarness, name: str) -> None:
        if not house.traits.exact_stats:
            pytest.skip("this broker can't look and delete in one step")
        broker, other = await house.open(), await house.open()
        for number in range(15):
            body = b"%d" % number
            await asyncio.gather(send(broker, name, body), other.delete(name))
            got = await receive(broker, name, house)
            assert bodies(got) == [body]
            await settle(broker, got, COMPLETE)

    async def test_an_idle_queue_is_listed_when_nobody_has_used_it(self, house: QueueHarness, name: str) -> None:
        broker, other = await house.open(), await house.open()
        for one in (broker, other):  # so that each has heard what time it is there
            await send(one, f"{name}-2", b"a")
        await broker.delete_when_idle(name, house.lock)
        await house.pass_time(house.lock * 0.6)
        await broker.delete_when_idle(name, house.lock)
        await house.pass_time(house.lock * 0.6)
        assert name not in await other.idle()
        await house.pass_time(house.lock * 0.6)
        assert name in await other.idle()
        assert await other.delete(name) == Deleted(Stats())
        assert name not in await other.idle()

    @pytest.mark.parametrize("seed", range(12))
    async def test_a_random_program_agrees_with_the_model(self, house: QueueHarness, name: str, seed: int) -> None:
        if not house.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        program = Program(await house.open(), await house.open(), house, name, random.Random(seed))
        await program.run(steps=120)


async def put_in(broker: Broker, house: QueueHarness, name: str, place: str) -> list[Delivery]:
    """Send a message, and bring it into *place*; return the deliveries that took it there."""
    if place == "session":
        await broker.send(name, [Outgoing(b"old", session="s")])
        return []
    await broker.send(name, [Outgoing(b"old", delay=house.lock if place == "delayed" else 0.0)])
    if place in ("ready", "delayed"):
        return []
    got = await receive(broker, name, house)
    verdicts: dict[str, Verdict] = {"deferred": Defer(), "dead": DeadLetter("broken")}
    if place in verdicts:
        await settle(broker, got, verdicts[place])
    return got


# --- a model, and random programs that compare the broker with it ---


@dataclass(slots=True, eq=False)
class Kept:
    """What the model knows of one message."""

    number: int
    """In the order sent; it is also the body."""
    priority: int
    place: str = "ready"
    count: int = 0
    until: float = 0.0  # when its lock or delay ends
    delivery: Delivery | None = None


class Meeting:
    """Brokers that all have learned the settings of a queue before any of them goes on."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._all_here = asyncio.Event()

    def around(self, broker: Broker) -> Broker:
        """Return *broker*, as one of them."""
        return cast(Broker, _Guest(broker, self))

    async def wait(self) -> None:
        """Wait for the others."""
        self._missing -= 1
        if self._missing <= 0:
            self._all_here.set()
        await self._all_here.wait()


class _Guest:
    def __init__(self, broker: Broker, meeting: Meeting) -> None:
        self._broker = broker
        self._meeting = meeting

    async def settings(self, queue: str) -> QueueSettings:
        found = await self._broker.settings(queue)
        await self._meeting.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


@dataclass(slots=True)
class Program:
    """Random operations on a broker, each compared with a model that is too simple to be wrong."""

    broker: Broker
    other: Broker
    house: QueueHarness
    name: str
    rng: random.Random
    now: float = 0.0
    number: int = 0
    messages: dict[int, Kept] = field(default_factory=dict)
    old: list[Delivery] = field(default_factory=list)

    async def run(self, steps: int) -> None:
        """Take so many steps, and compare after each."""
        await self.broker.declare(self.name, {"lock": self.house.lock, "max_deliveries": 3})
        operations = [self.send, self.send, self.receive, self.receive, self.settle, self.settle, self.settle]
        operations += [self.renew, self.pass_time, self.settle_old, self.redrive, self.purge]
        for _ in range(steps):
            await self.rng.choice(operations)()
            await self.compare()

    def pick(self) -> Broker:
        return self.rng.choice([self.broker, self.other])

    def locked(self) -> list[Kept]:
        found = [one for one in self.messages.values() if one.place == "locked"]
        self.rng.shuffle(found)
        return found[: self.rng.randint(0, 4)]

    async def send(self) -> None:
        """Send a few, some with a delay."""
        delays = [self.rng.choice([0.0, 0.0, self.house.lock]) for _ in range(self.rng.randint(1, 4))]
        highest = 0 if self.house.traits.priorities == "impossible" else 2
        sent = []
        for delay in delays:
            self.number += 1
            named = f"{self.name}-{self.number}"
            one = Outgoing(b"%d" % self.number, id=named, delay=delay, priority=self.rng.randint(0, highest))
            sent.append(one)
            place = "delayed" if delay else "ready"
            self.messages[self.number] = Kept(self.number, one.priority, place, until=self.now + delay)
        await self.pick().send(self.name, sent)

    async def receive(self) -> None:
        """Claim a few: the right ones, in order."""
        limit = self.rng.randint(1, 5)
        claim = await self.pick().receive(self.name, limit, self.house.lock)
        ready = [one for one in self.messages.values() if one.place == "ready"]
        expected = sorted(ready, key=lambda one: (-one.priority, one.number))[:limit]
        assert bodies(claim.deliveries) == [b"%d" % one.number for one in expected]
        for one, delivery in zip(expected, claim.deliveries, strict=True):
            one.place, one.count, one.delivery = "locked", one.count + 1, delivery
            one.until = self.now + self.house.lock
            assert delivery.delivery_count == one.count
            self.old.append(delivery)

    async def settle(self) -> None:
        """Pass verdicts on some that are locked."""
        some = self.locked()
        kinds: list[Verdict] = [COMPLETE, COMPLETE, Abandon(), Abandon(self.house.lock), GIVE_BACK, DeadLetter("why")]
        if self.house.traits.deferral != "impossible":
            kinds.append(Defer())
        verdicts = [self.rng.choice(kinds) for _ in some]
        answers = await self.pick().settle(
            [Settlement(one.delivery, verdict) for one, verdict in zip(some, verdicts, strict=True) if one.delivery]
        )
        for one, verdict, answer in zip(some, verdicts, answers, strict=True):
            assert answer == Settled(dead=isinstance(verdict, Abandon) and one.count >= 3)
            self.judge(one, verdict)

    def judge(self, one: Kept, verdict: Verdict) -> None:
        """Do in the model what a verdict does."""
        one.delivery = None
        match verdict:
            case Complete():
                del self.messages[one.number]
            case Abandon(delay=delay):
                one.place = "dead" if one.count >= 3 else "delayed" if delay else "ready"
                one.until = self.now + delay
            case Defer():
                one.place = "deferred"
            case DeadLetter():
                one.place = "dead"
            case _:
                one.place, one.count = "ready", one.count - 1

    async def settle_old(self) -> None:
        """Try with deliveries whose lock is over."""
        current = [one.delivery for one in self.messages.values()]
        late = [one for one in self.old[-20:] if one not in current]
        assert await settle(self.pick(), late, COMPLETE) == [LAPSED] * len(late)

    async def renew(self) -> None:
        """Renew some that are locked, together with one that is not."""
        some = [one for one in self.locked() if one.delivery]
        answers = await self.pick().renew([one.delivery for one in some if one.delivery], self.house.lock)
        assert [type(answer) for answer in answers] == [Renewed] * len(some)
        for one in some:
            one.until = self.now + self.house.lock

    async def pass_time(self) -> None:
        """Let locks and delays end."""
        seconds = self.house.lock * self.rng.choice([0.3, 0.6, LATE])
        await self.house.pass_time(seconds)
        self.now += seconds
        for one in self.messages.values():
            if one.until <= self.now and one.place in ("locked", "delayed"):
                one.place = "dead" if one.place == "locked" and one.count >= 3 else "ready"
                one.delivery = None

    async def redrive(self) -> None:
        """Put some dead letters back."""
        limit = self.rng.randint(1, 2)
        dead = sorted(one.number for one in self.messages.values() if one.place == "dead")[:limit]
        assert await self.pick().redrive(self.name, EVERYTHING, limit) == len(dead)
        for number in dead:
            self.messages[number].place, self.messages[number].count = "ready", 0

    async def purge(self) -> None:
        """Remove some that nobody has."""
        states: list[State] = ["ready", "delayed", "deferred"]
        chosen = frozenset(self.rng.sample(states, self.rng.randint(0, 2)))
        picked = self.rng.sample(sorted(self.messages), min(3, len(self.messages)))
        ids = frozenset(f"{self.name}-{number}" for number in picked)
        gone = [number for number in picked if self.messages[number].place in chosen]
        which = LiveSelection(states=chosen, ids=ids)
        assert await self.pick().purge_live(self.name, which, dry_run=True) == len(gone)
        assert await self.pick().purge_live(self.name, which) == len(gone)
        for number in gone:
            del self.messages[number]

    async def compare(self) -> None:
        """Compare the statistics, and what is shown, to the last message."""
        shown = [
            (int(one.body), one.state, one.delivery_count) for one in await self.pick().peek(self.name, EVERY_LIVE, 999)
        ]
        alive = sorted(self.messages.items())
        assert shown == [(number, one.place, one.count) for number, one in alive if one.place != "dead"]
        stats = await self.pick().stats(self.name)
        places = Counter(one.place for one in self.messages.values())
        expected = Stats(*(places[place] for place in ("ready", "locked", "delayed", "deferred", "dead")))
        assert Stats(stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead) == expected
        assert (stats.oldest_age > 0) <= (stats.ready > 0)


# --- words to write tests with ---


def needs(support: str) -> None:
    """Skip the test if the broker can't do this."""
    if support == "impossible":
        pytest.skip("this broker can't do it")


def possible(house: QueueHarness, verdict: Verdict) -> None:
    """Skip the test if the broker can't pass this verdict."""
    if isinstance(verdict, Defer):
        needs(house.traits.deferral)


def in_order(house: QueueHarness, deliveries: object) -> list[bytes]:
    """Return what is in *deliveries*, in their order, or sorted if the broker keeps none."""
    return sorted(bodies(deliveries)) if house.traits.order == "impossible" else bodies(deliveries)


def bodies(deliveries: object) -> list[bytes]:
    """Return what is in *deliveries*, in order."""
    return [one.body for one in deliveries]  # type: ignore[attr-defined]


async def send(broker: Broker, name: str, *contents: bytes) -> list[str]:
    """Send plain messages."""
    return list(await broker.send(name, [Outgoing(body) for body in contents]))


async def receive(broker: Broker, name: str, house: QueueHarness, limit: int = 100) -> list[Delivery]:
    """Claim what there is."""
    return list((await broker.receive(name, limit, house.lock)).deliveries)


async def doom(broker: Broker, name: str, house: QueueHarness, session: str | None) -> None:
    """Send some messages whose only delivery ends with its lock, as in a crash, and some whose ttl ends before that."""
    await broker.declare(name, {"lock": house.lock, "max_deliveries": 1})
    await broker.send(name, [Outgoing(b"crashes", id=f"crashes-{number}", session=session) for number in range(3)])
    if session is None:
        assert len(await receive(broker, name, house)) == 3
    else:
        assert len(await receive_session(broker, await accept(broker, name, house))) == 3
    short = [Outgoing(b"late", id=f"late-{number}", ttl=house.lock / 2, session=session) for number in range(3)]
    await broker.send(name, short)


async def polled(broker: Broker, name: str, house: QueueHarness, session: str | None) -> Claim:
    """Claim and complete what there is, in sessions if *session* is one; return what came."""
    held = None if session is None else await broker.accept(name, None, house.lock)
    if isinstance(held, NoSession):
        return Claim((), held.due_in, held.died)
    claim = await (broker.receive(name, 10, house.lock) if held is None else broker.receive_session(held, 10))
    assert isinstance(claim, Claim), claim
    await settle(broker, claim.deliveries, COMPLETE)
    if held is not None:
        await broker.release(held)
    return claim


async def settle(broker: Broker, deliveries: object, verdict: Verdict) -> list[Settled | Lapsed | NoAnswer]:
    """Pass one verdict on several deliveries."""
    return list(await broker.settle([Settlement(one, verdict) for one in deliveries]))  # type: ignore[attr-defined]


async def bury(broker: Broker, house: QueueHarness, name: str, *contents: bytes, reason: str = "because") -> None:
    """Send messages straight to the dead letters."""
    await send(broker, name, *contents)
    await settle(broker, await receive(broker, name, house), DeadLetter(reason, "", ERROR))


async def accept(broker: Broker, name: str, house: QueueHarness) -> SessionLock:
    """Lock the next free session, which must exist."""
    answer = await broker.accept(name, None, house.lock)
    assert isinstance(answer, SessionLock), answer
    return answer


async def receive_session(broker: Broker, held: SessionLock, limit: int = 100) -> list[Delivery]:
    """Claim what there is of a session."""
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim), claim
    return list(claim.deliveries)
