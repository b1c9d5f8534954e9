"""Locks that have ended, or were followed by another lock; and the expiry of messages in every state."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import pytest

from tenure._queue.broker import EVERYTHING, Broker, Claim, NoSession
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import EXPIRED, Delivery, SessionLock
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
from tenure.testing import until
from tenure.testing._conformance.counted_hints import counted
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.leases.steps import LAST
from tenure.testing._conformance.queues.leftovers import LeftoverTests
from tenure.testing._conformance.queues.steps import (
    LATE,
    accept,
    bodies,
    dead_letter,
    expect_counts,
    needs,
    only_dead_letter,
    receive,
    receive_session,
    send,
    settle,
)

After = Literal["ended", "taken"]
ROUNDED = 0.002
"""The seconds by which stores may round the end of a lock."""
VERDICTS: tuple[Verdict, ...] = (COMPLETE, Complete(remember=60.0), Abandon(), GIVE_BACK, DeadLetter("late"), Defer())


class LockExpirySuite(LeftoverTests):
    """No verb with an old lock changes anything, and a message expires in every state."""

    # --- after the end of a lock, and under its successor ---

    @pytest.mark.parametrize("after", ["ended", "taken"])
    async def test_nothing_is_done_under_an_old_lock_of_a_message(
        self, harness: QueueHarness, name: str, after: After
    ) -> None:
        needs(harness.traits.fencing)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        [old] = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * LATE)
        new = await receive(other, name, harness) if after == "taken" else []
        await _all_lapse(harness, broker, old)
        if not new:
            new = await receive(other, name, harness)
        assert [(one.body, one.delivery_count) for one in new] == [(b"a", 2)]
        await _is_held(other, new[0], harness)
        assert (await other.stats(name)).ready == 0
        assert await settle(other, new, COMPLETE) == [Settled()]

    @pytest.mark.parametrize("after", ["ended", "taken"])
    async def test_nothing_is_done_under_an_old_lock_of_a_dead_letter(
        self, harness: QueueHarness, name: str, after: After
    ) -> None:
        needs(harness.traits.fencing)
        broker, other, dead = await harness.open(), await harness.open(), dead_letters_of(name)
        await dead_letter(broker, harness, name, b"a")
        [old] = await receive(broker, dead, harness)
        await harness.pass_time(harness.lock * LATE)
        new = await receive(other, dead, harness) if after == "taken" else []
        await _all_lapse(harness, broker, old)
        if not new:
            new = await receive(other, dead, harness)
        assert bodies(new) == [b"a"]
        await _is_held(other, new[0], harness)
        assert new[0].death is not None
        assert new[0].death.reason == "because"
        assert await settle(other, new, COMPLETE) == [Settled()]

    @pytest.mark.parametrize("after", ["ended", "taken"])
    async def test_nothing_is_done_under_an_old_lock_of_a_session(
        self, harness: QueueHarness, name: str, after: After
    ) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"%d" % number, session="s") for number in range(3)])
        old = await accept(broker, name, harness)
        [mine] = await receive_session(broker, old, 1)
        assert await broker.write_state(old, b"old") == Settled()
        await harness.pass_time(harness.lock * LATE)
        taken = await _take_over(other, name, harness) if after == "taken" else None
        asks: Sequence[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("receive_session", lambda: broker.receive_session(old, 10)),
            ("write_state", lambda: broker.write_state(old, b"stolen")),
            ("read_state", lambda: broker.read_state(old)),
            ("release", lambda: broker.release(old)),
        ]
        for what, ask in asks:
            assert await ask() == LAPSED, what
        assert list(await broker.renew([old], harness.lock)) == [LAPSED]
        await _all_lapse(harness, broker, mine)
        new, first = taken or await _take_over(other, name, harness)
        assert new.state == b"old"
        assert await broker.accept(name, "s", harness.lock) != new
        assert isinstance((await other.renew([new], harness.lock))[0], Renewed)
        assert await settle(other, [first], COMPLETE) == [Settled()]
        assert bodies(await receive_session(other, new)) == [b"1", b"2"]
        assert await other.read_state(new) == b"old"
        assert await other.release(new) == Settled()

    async def test_a_claim_under_the_old_lock_of_a_session_takes_nothing_from_the_next(
        self, harness: QueueHarness, name: str
    ) -> None:
        """Called before the successor has received anything, so all messages are still ready."""
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"0", session="s"), Outgoing(b"1", session="s")])
        old = await accept(broker, name, harness)
        assert await broker.release(old) == Settled()
        new = await accept(other, name, harness)
        assert await broker.receive_session(old, 10) == LAPSED
        assert list(await broker.renew([old], harness.lock * 9)) == [LAPSED]
        assert await broker.release(old) == LAPSED
        assert [one.delivery_count for one in await receive_session(other, new)] == [1, 1]
        await harness.pass_time(harness.lock * LATE)
        assert await other.release(new) == LAPSED  # only its holder can extend its lock

    @pytest.mark.parametrize("kind", ["message", "dead letter"])
    async def test_an_old_lock_does_not_extend_the_next_one(self, harness: QueueHarness, name: str, kind: str) -> None:
        needs(harness.traits.fencing)
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        where = dead_letters_of(name) if kind == "dead letter" else name
        await (dead_letter(broker, harness, name, b"a") if kind == "dead letter" else send(broker, name, b"a"))
        [old] = await receive(broker, where, harness)
        await harness.pass_time(harness.lock * LATE)
        [new] = await receive(other, where, harness)
        assert list(await broker.renew([old], harness.lock * 9)) == [LAPSED]
        await harness.pass_time(harness.lock * LATE)
        [again] = await receive(broker, where, harness)
        assert again.token != new.token

    @pytest.mark.parametrize("kind", ["message", "session", "dead letter"])
    async def test_at_its_exact_end_a_lock_is_over_for_every_verb(
        self, harness: QueueHarness, name: str, kind: str
    ) -> None:
        if not harness.is_exact:
            pytest.skip("time goes on by itself here")
        needs(harness.traits.fencing)
        broker, other = await harness.open(), await harness.open()
        where = dead_letters_of(name) if kind == "dead letter" else name
        session: SessionLock | None = None
        if kind == "session":
            needs(harness.traits.sessions)
            await broker.send(name, [Outgoing(b"a", session="s")])
            session = await accept(broker, name, harness)
            [old] = await receive_session(broker, session)
        else:
            await (dead_letter(broker, harness, name, b"a") if kind == "dead letter" else send(broker, name, b"a"))
            [old] = await receive(broker, where, harness)
        await harness.pass_time(harness.lock * (1 - LAST))
        assert await receive(other, where, harness) == []
        assert session is None or isinstance(await other.accept(name, "s", harness.lock), NoSession)
        await harness.pass_time(harness.lock * LAST)
        await _all_lapse(harness, broker, old)
        if session is not None:
            assert await broker.receive_session(session, 1) == LAPSED
            assert await broker.write_state(session, b"late") == LAPSED
            assert await broker.read_state(session) == LAPSED
            assert list(await broker.renew([session], harness.lock)) == [LAPSED]
            assert await broker.release(session) == LAPSED
            assert (await accept(other, name, harness)).state is None
        else:
            assert bodies(await receive(other, where, harness)) == [b"a"]

    # --- a shorter renewal ---

    @pytest.mark.parametrize("kind", ["message", "one of a claim", "session", "dead letter"])
    async def test_a_renewal_never_shortens_a_lock(self, harness: QueueHarness, name: str, kind: str) -> None:
        """As when the queue's lock was declared shorter meanwhile."""
        needs(harness.traits.renewal)
        if not harness.traits.lock_per_claim:
            pytest.skip("all locks of a queue last equally long here")
        broker, other = await harness.open(), await harness.open()
        long = harness.lock * 3
        held: Delivery | SessionLock
        where = dead_letters_of(name) if kind == "dead letter" else name
        if kind == "session":
            needs(harness.traits.sessions)
            await broker.send(name, [Outgoing(b"a", session="s")])
            accepted = await broker.accept(name, None, long)
            assert isinstance(accepted, SessionLock)
            [message] = await receive_session(broker, accepted)
            held = accepted
        else:
            if kind == "dead letter":
                await dead_letter(broker, harness, name, b"a")
            else:
                await send(broker, name, *[b"a", b"b"][: 2 if kind == "one of a claim" else 1])
            message = held = (await broker.receive(where, 10, long)).deliveries[0]
        before = held.locked_until
        for _ in range(2):
            [answer] = await broker.renew([held], harness.lock)
            assert isinstance(answer, Renewed)
            assert answer.locked_until >= before - ROUNDED
        await harness.pass_time(harness.lock * LATE)
        assert await receive(other, where, harness) == []
        if kind == "session":
            assert isinstance(await other.accept(name, "s", harness.lock), NoSession)
        assert await settle(broker, [message], COMPLETE) == [Settled()]

    # --- one lock beside another ---

    async def test_messages_of_one_claim_end_each_at_its_own_time(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.renewal)
        needs(harness.traits.fencing)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b", b"c")
        got = {one.body: one for one in await receive(broker, name, harness)}
        for body in (b"c", b"a"):
            await harness.pass_time(harness.lock * 0.3)
            assert isinstance((await broker.renew([got[body]], harness.lock))[0], Renewed)
        for body, share in ((b"b", LATE - 0.6), (b"c", 0.3)):  # and not a, which was renewed last
            await harness.pass_time(harness.lock * share)
            assert await settle(broker, [got[body]], COMPLETE) == [LAPSED]
            [again] = await receive(other, name, harness)
            assert again.body == body
            assert await settle(other, [again], COMPLETE) == [Settled()]
        assert await settle(broker, [got[b"a"]], COMPLETE) == [Settled()]

    async def test_a_deferred_message_stays_so_when_another_of_its_claim_is_renewed(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.deferral)
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b", b"c")
        put_aside = await receive(broker, name, harness)
        await settle(broker, put_aside, Defer())
        claim = await broker.receive_deferred(name, [one.sequence for one in put_aside], harness.lock)
        first, second, third = claim.deliveries
        await harness.pass_time(harness.lock * 0.6)
        assert isinstance((await broker.renew([second], harness.lock))[0], Renewed)
        await harness.pass_time(harness.lock * 0.6)
        assert await settle(broker, [first, third], COMPLETE) == [LAPSED, LAPSED]
        assert await receive(other, name, harness) == []  # they come by their sequence only
        again = await other.receive_deferred(name, [first.sequence, second.sequence, third.sequence], harness.lock)
        assert [one.sequence for one in again.deliveries] == [first.sequence, third.sequence]
        assert await settle(broker, [second], GIVE_BACK) == [Settled()]
        assert await receive(other, name, harness) == []
        [back] = (await other.receive_deferred(name, [second.sequence], harness.lock)).deliveries
        assert back.body == b"b"

    async def test_a_deferred_message_that_dies_is_a_dead_letter_like_any_other(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.deferral)
        broker, other, dead = await harness.open(), await harness.open(), dead_letters_of(name)
        await broker.declare(name, {"max_deliveries": 2})
        await send(broker, name, b"rejected", b"abandoned", b"crashed")
        put_aside = await receive(broker, name, harness)
        await settle(broker, put_aside, Defer())
        numbers = [one.sequence for one in put_aside]
        held = {one.body: one for one in (await broker.receive_deferred(name, numbers, harness.lock)).deliveries}
        assert await settle(broker, [held[b"rejected"]], DeadLetter("because")) == [Settled()]
        assert await settle(broker, [held[b"abandoned"]], Abandon()) == [Settled(dead=True)]
        await harness.pass_time(harness.lock * LATE)
        assert await receive(other, name, harness) == []
        for _ in range(2):
            letters = await receive(other, dead, harness)
            assert sorted(bodies(letters)) == [b"abandoned", b"crashed", b"rejected"]
            assert await settle(other, letters, GIVE_BACK) == [Settled()] * 3
        assert (await other.receive_deferred(name, numbers, harness.lock)).deliveries in ((), [])
        assert await other.redrive(name, EVERYTHING, None) == 3
        again = await receive(other, name, harness)
        assert sorted(bodies(again)) == [b"abandoned", b"crashed", b"rejected"]
        assert await settle(other, again[:2], Abandon()) == [Settled()] * 2
        await harness.pass_time(harness.lock * LATE)
        assert len(await receive(other, name, harness)) == 3  # deferred before its death, it is no longer deferred

    async def test_a_deferred_message_of_a_session_has_a_lock_of_its_own(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.deferral)
        needs(harness.traits.renewal)
        needs(harness.traits.sessions)
        if not harness.traits.mixed_sessions:
            pytest.skip("a session's messages are received only under its lock here")
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s")])
        session = await accept(broker, name, harness)
        [got] = await receive_session(broker, session)
        await settle(broker, [got], Defer())
        assert await broker.release(session) == Settled()
        [held] = (await broker.receive_deferred(name, [got.sequence], harness.lock)).deliveries
        await harness.pass_time(harness.lock * 0.6)
        assert isinstance((await broker.renew([held], harness.lock))[0], Renewed)
        await harness.pass_time(harness.lock * 0.6)
        assert await settle(broker, [held], COMPLETE) == [Settled()]

    @pytest.mark.parametrize("way", ["redriven", "given back", "abandoned", "released"])
    async def test_a_message_put_back_gives_a_hint(self, harness: QueueHarness, name: str, way: str) -> None:
        if not harness.traits.hints:
            pytest.skip("this broker gives no hints")
        broker, other = await harness.open(), await harness.open()
        held: Sequence[Delivery] = ()
        session: SessionLock | None = None
        if way == "redriven":
            await dead_letter(broker, harness, name, b"a")
            await until(lambda: _is_dead(broker, name, 1))
        elif way == "released":
            needs(harness.traits.sessions)
            await broker.send(name, [Outgoing(b"a", session="s")])
            session = await accept(broker, name, harness)
        else:
            await send(broker, name, b"a")
            held = await receive(broker, name, harness)
        async with counted(other.hints(name)) as hints:
            await hints.no_more()
            match way:
                case "redriven":
                    assert await broker.redrive(name, EVERYTHING, None) == 1
                case "released":
                    assert session is not None
                    assert await broker.release(session) == Settled()
                case _:
                    verdict = GIVE_BACK if way == "given back" else Abandon()
                    assert await settle(broker, held, verdict) == [Settled()]
            await until(lambda: hints.count, within=harness.answer_within)

    # --- expiry in every state ---

    async def test_a_message_expires_from_every_state(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        short = harness.lock * 0.5
        ways: dict[bytes, Verdict | None] = {
            b"given back": GIVE_BACK,
            b"abandoned": Abandon(),
            b"abandoned for long": Abandon(harness.lock * 9),
            b"twice": GIVE_BACK,
            b"given back too late": None,
            b"abandoned too late": None,
            b"crashed": None,
            b"completed too late": None,
        }
        if harness.traits.delay == "impossible":
            del ways[b"abandoned for long"]
        await broker.declare(name, {"lock": harness.lock})  # or the first send takes a part of the short time
        sent_at = time.monotonic()
        await broker.send(name, [Outgoing(way, expires_in=short) for way in ways])
        await broker.send(
            name,
            [Outgoing(b"untouched", expires_in=short), Outgoing(b"delayed", expires_in=short, delay=harness.lock * 9)],
        )
        held = {one.body: one for one in await receive(broker, name, harness, limit=len(ways))}
        assert held.keys() <= {*ways, b"untouched"}
        for way, verdict in ways.items():
            if verdict is not None and way in held:
                [answer] = await settle(broker, [held[way]], verdict)
                has_expired = time.monotonic() - sent_at >= short  # on a busy machine
                assert answer == Settled() or (answer == Settled(dead=True) and has_expired), way
        await harness.pass_time(harness.lock * 0.6)
        for way, late in ((b"given back too late", GIVE_BACK), (b"abandoned too late", Abandon())):
            if way in held:
                [answer] = await settle(broker, [held[way]], late)
                assert isinstance(answer, Settled), way  # dead at once, or when it would be claimed
        if b"completed too late" in held:
            assert await settle(broker, [held[b"completed too late"]], COMPLETE) == [Settled()]
        assert await receive(broker, name, harness) == []
        await harness.pass_time(harness.lock * 0.6)  # and now the lock of the one that crashed has ended, too
        assert await receive(broker, name, harness) == []
        died = {one.body: one.reason for one in await broker.peek_dead(name, EVERYTHING, 100)}
        unseen = (
            set() if harness.traits.exact_stats else {b"abandoned for long", b"delayed"}
        )  # not seen until they are due
        due = {*ways, b"untouched", b"delayed"} - {b"completed too late"}
        assert due - unseen <= died.keys() <= due | (ways.keys() - held.keys())  # and those that expired unclaimed
        assert set(died.values()) == {EXPIRED}
        assert (await broker.stats(name)).ready == 0

    async def test_a_message_expires_after_a_crash(self, harness: QueueHarness, name: str) -> None:
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a", expires_in=harness.lock * 1.5)])
        assert bodies(await receive(broker, name, harness)) == [b"a"]
        await harness.pass_time(harness.lock * LATE)
        await broker.receive(f"{name}-other", 1, harness.lock)
        await expect_counts(broker, harness, name, ready=1, dead=0)
        await harness.pass_time(harness.lock * 0.5)
        assert await receive(broker, name, harness) == []
        letter = await only_dead_letter(broker, harness, name)
        assert (letter.reason, letter.delivery_count) == (EXPIRED, 1)
        assert await broker.redrive(name, EVERYTHING, None) == 1
        await harness.pass_time(harness.lock * harness.long)  # put back, it has no ttl
        assert bodies(await receive(broker, name, harness)) == [b"a"]

    async def test_a_message_of_a_session_expires_from_every_state(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker = await harness.open()
        ways: dict[str, Verdict | None] = {"released": None, "given back": GIVE_BACK, "abandoned": Abandon()}
        for way, verdict in ways.items():
            await broker.send(name, [Outgoing(way.encode(), session=way, expires_in=harness.lock * 0.5)])
            held = await broker.accept(name, way, harness.lock)
            assert isinstance(held, SessionLock)
            got = await receive_session(broker, held)
            if verdict is not None:
                assert await settle(broker, got, verdict) == [Settled()], way
            assert await broker.release(held) == Settled()
        await harness.pass_time(harness.lock * 0.6)
        for way in ways:
            held = await broker.accept(name, way, harness.lock)
            assert isinstance(held, SessionLock)
            assert await receive_session(broker, held) == [], way
            await broker.release(held)
        died = {one.body.decode(): one.reason for one in await broker.peek_dead(name, EVERYTHING, 10)}
        assert died == dict.fromkeys(ways, EXPIRED)


async def _take_over(broker: Broker, name: str, harness: QueueHarness) -> tuple[SessionLock, Delivery]:
    """Accept a session after its lock ended, and receive the first of its messages again."""
    new = await accept(broker, name, harness)
    [first] = await receive_session(broker, new, 1)
    assert (first.body, first.delivery_count) == (b"0", 2)
    return new, first


async def _all_lapse(harness: QueueHarness, broker: Broker, old: Delivery) -> None:
    """Call every verb under a lock that has ended; none may have an effect."""
    assert list(await broker.renew([old], harness.lock * 9)) == [LAPSED]
    for verdict in VERDICTS:
        is_impossible = isinstance(verdict, Defer) and (
            old.death is not None or harness.traits.deferral == "impossible"
        )
        if is_impossible or (
            isinstance(verdict, Complete) and verdict.remember and harness.traits.inbox == "impossible"
        ):
            continue
        assert list(await broker.settle([Settlement(old, verdict)])) == [LAPSED], verdict
    if harness.traits.inbox != "impossible":
        assert list(await broker.handled(old.queue.removesuffix("$dead"), [old.id])) == [False]


async def _is_held(broker: Broker, new: Delivery, harness: QueueHarness) -> None:
    """Check that a locked message can be renewed, and not claimed."""
    assert isinstance((await broker.renew([new], harness.lock))[0], Renewed)
    claim = await broker.receive(new.queue, 10, harness.lock)
    assert isinstance(claim, Claim)
    assert claim.deliveries == () or list(claim.deliveries) == []


async def _is_dead(broker: Broker, name: str, count: int) -> bool:
    return (await broker.stats(name)).dead == count
