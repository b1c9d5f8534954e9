"""A queue's rooms on one loop in virtual time, over the memory broker and what can go wrong before it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest

import tenure
from tenure._backends.memory.queue import MemoryBroker
from tenure._queue import context, handlers
from tenure._queue.broker import Claim, NoSession, QueueSettings, Selection, SettingChanges
from tenure._queue.context import DEATHS_PER_TURN, QueueContext
from tenure._queue.message import Delivery, Died, Lapsed, Outgoing, Renewed, SessionLock, Settled, Settlement, Stats
from tenure._queue.producer import IDLE, Producer, Requests
from tenure._queue.pump_settings import sure_until
from tenure._queue.queue import Queue
from tenure._queue.received import Message, Received
from tenure._queue.retry import Reject, Retry, RetryPolicy
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import ConfigError, LockLost, QueueNotEmpty, Unavailable
from tenure.events import (
    BrokerUnanswered,
    Event,
    GivenBack,
    HandlerOverran,
    LockEnded,
    MessageDied,
    MessageFailed,
    ResultDiscarded,
)
from tenure.testing import ManualClock, until
from tenure.testing.loop import VirtualLoop, run

LOCK = 30.0
AT_ONCE = RetryPolicy(initial=0.0, maximum=0.0)


class Road(MemoryBroker):
    """The way to the broker: it can be slow, be cut, or lose what comes back."""

    cut = False
    loses_answers = False
    delay = 0.0
    renewing = True
    knows = True
    settling = True
    settle_late = 0.0
    """The next verdict on an answer to a request is so long on its way."""
    parts_to_go = 0
    """So many claims end with a part of what time has brought looked through, and say that there is more."""

    def __init__(self, *inside: Any) -> None:
        super().__init__(*inside)
        self.asked: list[str] = []
        self.accepted: list[SessionLock] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        self.asked.append("handled")
        if not self.knows:
            raise Unavailable("the inbox can't be asked")
        return await super().handled(queue, ids)

    async def settings(self, queue: str) -> QueueSettings:
        await self.answers.wait()
        return await super().settings(queue)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        await self._set_out("receive")
        answer = Claim((), 0.0) if self._is_part() else await super().receive(queue, limit, lock)
        await self._come_back()
        return answer

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        answer = NoSession(0.0) if self._is_part() else await super().accept(queue, session, lock)
        if isinstance(answer, SessionLock):
            self.accepted.append(answer)
        await self._come_back()
        return answer

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        await self._set_out(f"renew {len(held)}")
        if not self.renewing:
            raise Unavailable("no renewal gets through")
        answer = await super().renew(held, lock)
        await self._come_back()
        return answer

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        if not self.settling:
            raise Unavailable("no verdict gets through")
        if self.settle_late and "replies" in settlements[0].delivery.queue:
            late, self.settle_late = self.settle_late, 0.0
            await asyncio.sleep(late)
        await self._set_out(f"settle {len(settlements)}")
        answer = await super().settle(settlements)
        await self._come_back()
        return answer

    def _is_part(self) -> bool:
        self.parts_to_go -= 1
        return self.parts_to_go >= 0

    async def _set_out(self, what: str) -> None:
        self.asked.append(what)
        if self.cut:
            raise Unavailable("the road is cut")

    async def _come_back(self) -> None:
        await asyncio.sleep(self.delay)
        if self.loses_answers:
            raise Unavailable("the answer was lost")


class Town:
    """One broker, several consumers, one virtual time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = loop.clock()
        self.road = Road(self.clock)
        self.events: list[Event] = []
        self.queues: list[Queue] = []

    def queue(self, name: str = "orders", **settings: Any) -> Queue:
        settings = {"lock": LOCK, **settings}
        queue = Queue(
            QueueContext(
                name,
                self.road,
                RenewalThread.here(),
                self.clock,
                QueueSettings(**settings),
                "me",
                self.events.append,
                cast(SettingChanges, settings),
            )
        )
        self.queues.append(queue)
        return queue

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @asynccontextmanager
    async def consuming(self, queue: Queue, handler: Any, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.ensure_future(queue.consume(handler, **options))
        try:
            yield task
        finally:
            await queue.drain(grace=5.0)
            await task


def in_town(test: Callable[[Town], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run *test* in virtual time, and hand it a town."""

    async def main() -> None:
        town = Town()
        await test(town)
        for queue in town.queues:
            await queue.close()

    def wrapped() -> None:
        run(main(), seed=1, limit=100_000)

    wrapped.__name__ = test.__name__
    return wrapped


class Log:
    """A handler that writes down what it gets, and for how long."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.began: list[bytes] = []
        self.ended: list[bytes] = []
        self.cancelled: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.began.append(message.body)
        try:
            if self.seconds:
                await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(message.body)
            raise
        self.ended.append(message.body)


async def fill(queue: Queue, count: int) -> list[bytes]:
    bodies = [b"%d" % number for number in range(count)]
    await queue.send_batch([Outgoing(body) for body in bodies])
    return bodies


# --- sending ---


@in_town
async def test_what_is_sent_is_received_with_all_its_marks(town: Town) -> None:
    queue = town.queue()
    sent = await queue.send(
        b"body", id="a", headers={"k": 1}, priority=3, reply_to="answers", correlation_id="c", expires_in=60.0
    )
    assert sent == "a"
    [message] = await queue.receive()
    assert (message.id, message.body, dict(message.headers), message.delivery_count) == ("a", b"body", {"k": 1}, 1)
    assert (message.priority, message.reply_to, message.correlation_id, message.session) == (3, "answers", "c", None)
    assert message.queue == "orders"
    assert message.locked_until - message.enqueued_at == pytest.approx(LOCK)
    assert (message.reason, message.description, message.error, message.history) == (None, None, None, ())
    assert message.sequence == 1
    await message.complete()
    assert await queue.stats() == Stats()


@dataclass
class Line:
    article: str
    count: int = 1


@dataclass
class Order:
    number: int
    lines: list[Line]
    wanted: datetime | None = None
    rebate: float = 0.0


@in_town
async def test_json_and_dataclasses_are_a_thin_layer(town: Town) -> None:
    queue = town.queue()
    order = Order(7, [Line("Öl", 2), Line("x")], datetime(2026, 1, 1, tzinfo=UTC), 1)
    await queue.send(json=order)
    await queue.send(json={"a": [1, None]}, headers={"content-type": "application/vnd.mine+json"})
    first, second = await queue.receive(10)
    assert first.headers["content-type"] == "application/json"
    assert first.decode(Order) == order
    assert first.json()["lines"][0] == {"article": "Öl", "count": 2}
    assert (second.json(), second.headers["content-type"]) == ({"a": [1, None]}, "application/vnd.mine+json")
    with pytest.raises(ValueError, match="no 'number', 'lines', which Order must have"):
        second.decode(Order)
    with pytest.raises(ConfigError, match="can't be written as JSON"):
        await queue.send(json=object())
    with pytest.raises(ConfigError, match="can't both be given"):
        await queue.send(b"x", json=1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"body": "text"}, "body must be bytes, not str; encode it"),
        ({"body": 17}, "body must be bytes, not int"),
        ({"body": b"x" * 101}, r"body \(101 bytes\) must not be larger than body_max \(100 bytes\)"),
        ({"headers": {1: "x"}}, "header's name must be text"),
        ({"headers": {"x": b"bytes"}}, "header 'x' must be text, a whole number"),
        ({"headers": {"x": None}}, "header 'x' must be text"),
        ({"headers": {"x": math.nan}}, "header 'x' must be a finite number"),
        ({"headers": {"x": 2**63}}, "64 bits"),
        ({"headers": ["x"]}, "headers must be a mapping"),
        ({"delay": -1}, "delay must be at least 0"),
        ({"delay": "1"}, "delay must be a finite number"),
        ({"delay": 1, "at": 17.0}, "delay .* and at .* can't both"),
        ({"at": datetime(2026, 1, 1)}, "must have a time zone"),
        ({"at": math.inf}, "at must be a datetime or finite Unix seconds"),
        ({"expires_in": 0}, "expires_in must be more than 0"),
        ({"headers": {"a": "x" * 65_536}}, "headers \\(65,537 bytes\\) must not be larger than 65,536 bytes"),
        ({"priority": 10}, "priority must be a whole number from 0 to 9"),
        ({"priority": 1.0}, "priority must be a whole number"),
        ({"priority": True}, "priority must be a whole number"),
        ({"id": ""}, "id must not be empty"),
        ({"id": "x" * 256}, r"id \(256 characters\) must not be longer than 255"),
        ({"id": 5}, "id must be text"),
        ({"session": "a\0b"}, "NUL"),
        ({"correlation_id": "\ud800"}, "UTF-8"),
        ({"reply_to": "a$b"}, r"reply_to .* must not contain '\$'"),
    ],
)
def test_bad_messages_are_refused_before_anything_is_written(options: dict[str, Any], complaint: str) -> None:
    @in_town
    async def test(town: Town) -> None:
        queue = town.queue(body_max=100)
        with pytest.raises(ConfigError, match=complaint):
            await queue.send(**options)
        batch = [Outgoing(b"good"), Outgoing(**{"body": b"", **options}), Outgoing(b"good")]
        with pytest.raises(ConfigError, match=f"message 1 of 3: .*{complaint}.*none of them was sent"):
            await queue.send_batch(batch)
        assert await queue.stats() == Stats()

    test()


@in_town
async def test_a_batch_may_be_empty_and_its_bodies_any_bytes(town: Town) -> None:
    queue = town.queue()
    assert await queue.send_batch([]) == []
    bodies: list[Any] = [bytearray(b"a"), memoryview(b"b")]
    await queue.send_batch(Outgoing(body) for body in bodies)
    assert [type(one.body) for one in await queue.receive(5)] == [bytes, bytes]
    with pytest.raises(ConfigError, match="must be an Outgoing"):
        await queue.send_batch([b"raw"])  # type: ignore[list-item]


@in_town
async def test_delayed_at_a_datetime(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"probe")
    [probe] = await queue.receive()
    await probe.complete()
    await queue.send(b"later", at=datetime.fromtimestamp(probe.enqueued_at + 60, UTC))
    assert await queue.receive() == []
    [later] = await queue.receive(wait=100)
    assert later.body == b"later"
    assert 59 < town.clock.now() < 62


# --- receiving ---


@in_town
async def test_receive_waits_for_a_message_and_no_longer(town: Town) -> None:
    queue = town.queue()
    assert await queue.receive(wait=3.0) == []
    assert town.clock.now() == pytest.approx(3.0)
    waiting = asyncio.ensure_future(queue.receive(10, wait=60.0))
    await asyncio.sleep(1.0)
    await queue.send(b"now")
    assert [one.body for one in await waiting] == [b"now"]
    assert town.clock.now() == pytest.approx(4.0)


@in_town
async def test_a_receive_that_is_given_up_gives_back(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"a")
    town.road.delay = 1.0
    receiving = asyncio.ensure_future(queue.receive())
    await asyncio.sleep(0.5)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await asyncio.sleep(3.0)
    [message] = await queue.receive()
    assert message.delivery_count == 1


@in_town
async def test_verbs_answer_truthfully(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 6)
    done, failed, deferred, bad, back, slow = await queue.receive(10)
    await done.complete()
    await failed.abandon(delay=5.0, error=ValueError("x"))
    await deferred.defer()
    await bad.dead_letter("bad", "very")
    await back.give_back()
    for message in (done, failed, deferred, bad, back):
        for verb in (message.complete, message.abandon, message.defer, message.renew, message.give_back):
            with pytest.raises(LockLost, match="discard what was done"):
                await verb()
        with pytest.raises(LockLost):
            await message.dead_letter("x")
    stats = await queue.stats()
    assert (stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead) == (1, 1, 1, 1, 1)
    await asyncio.sleep(20.0)
    before = slow.locked_until
    assert await slow.renew() == slow.locked_until > before
    await asyncio.sleep(29.0)
    await slow.complete()
    [again] = await queue.receive_deferred(deferred.sequence, 999)
    assert (again.body, again.delivery_count) == (b"2", 2)
    await again.defer()
    assert [one.sequence for one in await queue.peek_deferred()] == [deferred.sequence]
    with pytest.raises(ConfigError, match="reason must not be empty"):
        await again.dead_letter("")


@in_town
async def test_no_answer_is_neither_yes_nor_no(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 1)
    [message] = await queue.receive()
    town.road.cut = True
    with pytest.raises(Unavailable):
        await message.complete()
    town.road.cut = False
    await message.complete()


# --- the pump ---


@in_town
async def test_a_handler_that_returns_completes(town: Town) -> None:
    queue, log = town.queue(), Log()
    bodies = await fill(queue, 2_500)
    await queue.consume(log, until_empty=True)
    assert log.ended == bodies
    assert await queue.stats() == Stats()
    assert max(int(one.split()[1]) for one in town.road.asked if one.startswith("settle")) > 50


@in_town
async def test_so_many_handlers_run_at_once_and_no_more(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 40)
    running, most = 0, 0

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1

    await queue.consume(handler, concurrency=4, until_empty=True)
    assert most == 4
    assert town.clock.now() == pytest.approx(10.0, abs=1.0)


@in_town
async def test_consuming_until_empty_ends_at_once_also_when_handlers_settle_themselves(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 3)

    async def handler(message: Message) -> None:
        await message.complete()

    await queue.consume(handler, concurrency=1, until_empty=True)
    assert await queue.stats() == Stats()
    assert town.clock.now() < 1.0  # it did not wait for the next look


@pytest.mark.parametrize("sessions", [False, True])
def test_until_empty_goes_on_while_the_store_has_more_to_look_through(sessions: bool) -> None:
    @in_town
    async def test(town: Town) -> None:
        queue = town.queue()
        await queue.send(b"behind", session="s" if sessions else None)
        town.road.parts_to_go = 20
        log = Log()
        await queue.consume(log, concurrency=1, sessions=sessions, until_empty=True)
        assert log.ended == [b"behind"]
        assert town.clock.now() < 1.0  # it did not wait for the next look

    test()


@in_town
async def test_a_renewal_that_comes_after_a_handlers_own_complete_is_no_loss(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 1)
    failures: list[BaseException] = []

    async def handler(message: Message) -> None:
        town.road.delay = LOCK / 2  # on its way back, the answer meets a renewal
        completing = asyncio.ensure_future(message.complete())
        await asyncio.sleep(0)
        town.road.delay = 0.0
        await completing

    await queue.consume(handler, on_error=lambda message, error: failures.append(error), until_empty=True)
    assert "renew 1" in town.road.asked
    assert failures == []
    assert town.told(LockEnded) == []
    assert await queue.stats() == Stats()


@in_town
async def test_slow_handlers_hoard_nothing(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=10.0)
    await fill(queue, 50)
    async with town.consuming(queue, log, concurrency=3):
        await asyncio.sleep(25.0)
        assert (await queue.stats()).locked <= 4


@in_town
async def test_messages_that_come_later_are_told_of(town: Town) -> None:
    queue, log = town.queue(), Log()
    async with town.consuming(queue, log):
        await asyncio.sleep(100.0)
        looks = len(town.road.asked)
        await queue.send(b"a")
        await asyncio.sleep(0.01)
        assert log.ended == [b"a"]
        await queue.send(b"b", delay=7.0)
        await asyncio.sleep(6.99)
        assert log.ended == [b"a"]
        await asyncio.sleep(0.1)
        assert log.ended == [b"a", b"b"]
    assert looks < 25  # an idle consumer looks now and then, and not all the time


@in_town
async def test_a_failure_is_retried_later_and_later_and_ends_among_the_dead(town: Town) -> None:
    queue = town.queue(max_deliveries=4)
    await queue.send(b"poison", id="p")
    tried_at: list[float] = []
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        tried_at.append(town.clock.now())
        raise ValueError(f"try {message.delivery_count}")

    async def hook(message: Message, error: BaseException) -> None:
        hooked.append(f"{message.id} {error}")

    policy = RetryPolicy(initial=1.0, factor=3.0, jitter=0.0)
    async with town.consuming(queue, handler, retry=policy, on_error=hook):
        await asyncio.sleep(60.0)
    gaps = [later - earlier for earlier, later in pairwise(tried_at)]
    assert gaps == pytest.approx([1.0, 3.0, 9.0], abs=0.1)
    assert hooked == ["p try 1", "p try 2", "p try 3", "p try 4"]
    [dead] = await queue.dead_letters.peek()
    assert (dead.id, dead.reason, dead.delivery_count) == ("p", "max_deliveries", 4)
    assert dead.error is not None
    assert (dead.error.type, dead.error.message) == ("ValueError", "try 4")
    assert "raise ValueError" in dead.error.traceback
    assert [one.error and one.error.message for one in dead.history] == ["try 1", "try 2", "try 3", "try 4"]
    assert len(town.told(MessageFailed)) == 4
    assert [one.reason for one in town.told(MessageDied)] == ["max_deliveries"]


@pytest.mark.parametrize("how", ["return", "raise"])
def test_retry_and_reject_are_values_and_exceptions(how: str) -> None:
    @in_town
    async def test(town: Town) -> None:
        queue = town.queue()
        await queue.send_batch([Outgoing(b"retry"), Outgoing(b"reject"), Outgoing(b"never")])
        seen: list[tuple[bytes, float]] = []

        async def handler(message: Message) -> object:
            seen.append((message.body, town.clock.now()))
            if message.body == b"never":
                raise KeyError("k")
            if message.delivery_count > 1:
                return None
            what = Retry(delay=33.0) if message.body == b"retry" else Reject("unreadable", "no JSON")
            if how == "raise":
                try:
                    raise OSError("below")
                except OSError as error:
                    raise what from error
            return what

        policy = RetryPolicy(never=(LookupError,))
        async with town.consuming(queue, handler, concurrency=1, retry=policy):
            await asyncio.sleep(40.0)
        assert [body for body, _ in seen] == [b"retry", b"reject", b"never", b"retry"]
        assert seen[3][1] == pytest.approx(33.0, abs=0.2)
        rejected, never = await queue.dead_letters.peek()
        assert (rejected.reason, rejected.description, rejected.delivery_count) == ("unreadable", "no JSON", 1)
        assert (rejected.error is not None and rejected.error.type) == (how == "raise" and "OSError")
        assert (never.reason, never.error and never.error.message) == ("KeyError", "'k'")

    test()


@in_town
async def test_a_handler_may_settle_by_itself(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 3)

    async def handler(message: Message) -> None:
        if message.body == b"0":
            await message.complete()
        elif message.body == b"1":
            await message.defer()
        else:
            await message.dead_letter("mine")
            raise ValueError("after that, it changes nothing")

    await queue.consume(handler, until_empty=True)
    assert await queue.stats() == Stats(deferred=1, dead=1)
    assert (await queue.dead_letters.peek())[0].reason == "mine"


@in_town
async def test_without_auto_complete_the_handler_decides(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 3)
    kept: list[Message] = []

    async def handler(message: Message) -> None:
        if message.body == b"0":
            await message.complete()
        else:
            kept.append(message)

    async with town.consuming(queue, handler, auto_complete=False, max_hold=200.0):
        await asyncio.sleep(100.0)  # longer than the lock: it is renewed for us
        assert (await queue.stats()).locked == 2
        await kept[0].complete()
        assert (await queue.stats()).locked == 1
        await asyncio.sleep(150.0)  # beyond max_hold, it is nobody's any more
        assert len(kept) == 3
        with pytest.raises(LockLost):
            await kept[1].complete()
    assert (await queue.stats()).ready == 1  # what was kept was given back


@in_town
async def test_what_is_kept_beyond_max_hold_is_let_go(town: Town) -> None:
    queue, kept = town.queue(), list[Message]()
    await fill(queue, 2)

    async def handler(message: Message) -> None:
        kept.append(message)

    async with asyncio.timeout(60.0):
        await queue.consume(handler, auto_complete=False, max_hold=50.0, until_empty=True, sigterm=False)
    assert len(kept) == 2
    assert 50.0 <= town.clock.now() < 52.0
    assert [one.why for one in town.told(LockEnded)] == ["max_hold", "max_hold"]
    assert town.told(HandlerOverran) == []  # they ended long ago
    assert (await queue.stats()).locked == 2  # not given back: whoever kept them may still act on them
    await asyncio.sleep(LOCK)
    with pytest.raises(LockLost):
        await kept[0].complete()


@in_town
async def test_a_drain_waits_for_what_is_kept_until_it_is_lost(town: Town) -> None:
    queue, kept = town.queue(), list[Message]()
    await fill(queue, 1)

    async def handler(message: Message) -> None:
        kept.append(message)

    consuming = asyncio.ensure_future(queue.consume(handler, auto_complete=False, sigterm=False))
    await asyncio.sleep(1.0)
    town.road.renewing = False
    await queue.drain(grace=500.0)
    await consuming
    assert town.clock.now() < LOCK  # when it could not be believed any more
    assert town.told(HandlerOverran) == []


@in_town
async def test_locks_are_renewed_while_handlers_run(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=100.0)
    await fill(queue, 20)
    await queue.consume(log, concurrency=20, until_empty=True)
    assert sorted(log.ended) == sorted(log.began)
    assert len(log.ended) == 20
    assert "renew 20" in town.road.asked  # in one question
    assert len([one for one in town.road.asked if one.startswith("renew")]) < 20


@in_town
async def test_a_handler_that_takes_too_long_is_cancelled_and_abandoned(town: Town) -> None:
    queue, log = town.queue(max_deliveries=2), Log(seconds=1_000.0)
    await queue.send(b"slow")
    async with town.consuming(queue, log, max_hold=50.0, retry=AT_ONCE):
        await asyncio.sleep(51.0)
        assert log.cancelled == [b"slow"]
        await asyncio.sleep(100.0)
    [dead] = await queue.dead_letters.peek()
    assert dead.delivery_count == 2
    assert dead.error is not None
    assert "max_hold" in dead.error.message
    assert {one.why for one in town.told(LockEnded)} == {"max_hold"}


@in_town
async def test_a_handler_is_cancelled_before_its_lock_ends(town: Town) -> None:
    queue, other = town.queue(), town.queue()
    await queue.send(b"a")
    log, hooked = Log(seconds=100.0), list[BaseException]()
    town.road.renewing = False
    async with town.consuming(queue, log, on_error=lambda message, error: hooked.append(error)):
        async with asyncio.timeout(LOCK):
            while not log.cancelled:
                await asyncio.sleep(0.1)
        assert town.clock.now() < LOCK
        assert await other.receive() == []
        assert isinstance(hooked[0], LockLost)
    assert [one.why for one in town.told(LockEnded)] == ["unanswered"]


@in_town
async def test_what_is_lost_when_its_handler_stops_at_last_is_told_once(town: Town) -> None:
    for why in ("unanswered", "max_hold"):
        queue = town.queue(why)
        await queue.send(b"a")
        hooked: list[BaseException] = []

        async def stubborn(message: Message) -> None:
            ending = asyncio.ensure_future(asyncio.sleep(2 * LOCK))
            while not ending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({ending})
            raise asyncio.CancelledError

        def note(
            message: Message, error: BaseException, hooked: list[BaseException] = hooked, queue: Queue = queue
        ) -> None:
            hooked.append(error)
            queue.pause()

        town.road.renewing = why == "max_hold"
        most = 5.0 if why == "max_hold" else 1_000.0
        async with town.consuming(queue, stubborn, on_error=note, concurrency=1, max_hold=most):
            await asyncio.sleep(2 * LOCK + 5.0)
        assert [type(error) for error in hooked] == [LockLost]
        assert town.told(MessageFailed) == []
        assert (await queue.stats()).ready == 1


@in_town
async def test_a_lock_that_was_lost_cancels_at_once_and_discards_the_result(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"a", id="a")
    stubborn: list[str] = []

    async def handler(message: Message) -> None:
        try:
            await asyncio.sleep(1_000.0)
        except asyncio.CancelledError:
            stubborn.append("went on")  # and returns, as if all were well

    async with town.consuming(queue, handler):
        await asyncio.sleep(1.0)
        [row] = town.road._memory.queues["orders"].live.messages.values()
        row.token = 999  # somebody else has it
        await asyncio.sleep(15.0)
        assert stubborn == ["went on"]
        assert (await queue.stats()).locked == 1
        row.token = 0
    assert [one.why for one in town.told(LockEnded)] == ["denied"]


@in_town
async def test_an_answer_that_is_lost_is_asked_for_again(town: Town) -> None:
    queue, log = town.queue(), Log()
    hooked: list[BaseException] = []
    await fill(queue, 5)
    async with town.consuming(queue, log, on_error=lambda message, error: hooked.append(error)):
        await asyncio.sleep(0.0)
        town.road.loses_answers = True
        await asyncio.sleep(10.0)
        town.road.loses_answers = False
        await asyncio.sleep(60.0)
    assert set(log.ended) == {b"0", b"1", b"2", b"3", b"4"}
    assert await queue.stats() == Stats()


@in_town
async def test_a_cut_road_is_waited_out(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=1.0)
    await fill(queue, 30)
    async with town.consuming(queue, log, concurrency=3):
        for _ in range(5):
            await asyncio.sleep(2.5)
            town.road.cut = True
            await asyncio.sleep(4.0)
            town.road.cut = False
        await asyncio.sleep(30.0)
    assert sorted(set(log.ended), key=int) == [b"%d" % number for number in range(30)]
    assert len(log.ended) == 30  # each once: a verdict is kept until it is answered, its lock meanwhile
    assert await queue.stats() == Stats()


# --- pause, drain, stop ---


@in_town
async def test_pause_gives_the_buffer_back_and_resume_goes_on(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=0.01)
    await fill(queue, 500)
    async with town.consuming(queue, log, concurrency=2):
        await asyncio.sleep(1.0)
        queue.pause()
        await asyncio.sleep(1.0)
        done = len(log.ended)
        assert 0 < done < 500
        stats = await queue.stats()
        assert (stats.locked, stats.ready) == (0, 500 - done)
        await asyncio.sleep(100.0)
        assert len(log.ended) == done
        queue.resume()
        await asyncio.sleep(5.0)
        assert len(log.ended) == 500
        await queue.send(b"one more")
        await asyncio.sleep(1.0)
    assert len(set(log.ended)) == 501


@in_town
async def test_draining_does_not_count(town: Town) -> None:
    queue = town.queue(max_deliveries=2)
    await fill(queue, 100)
    log = Log(seconds=5.0)
    for _ in range(5):
        task = asyncio.ensure_future(queue.consume(log, concurrency=3))
        await asyncio.sleep(1.0)
        await queue.drain(grace=1.0)
        await task
    assert await queue.stats() == Stats(ready=100, oldest_age=(await queue.stats()).oldest_age)
    assert log.ended == []
    assert len(log.cancelled) == 15
    assert {one.delivery_count for one in await queue.receive(100)} == {1}


@in_town
async def test_draining_lets_handlers_finish_inside_grace(town: Town) -> None:
    queue, log, stop = town.queue(), Log(seconds=5.0), asyncio.Event()
    await fill(queue, 10)
    task = asyncio.ensure_future(queue.consume(log, concurrency=3, stop=stop, grace=10.0))
    await asyncio.sleep(1.0)
    stop.set()
    await task
    assert town.clock.now() == pytest.approx(5.0, abs=0.1)
    assert len(log.ended) == 3
    assert (await queue.stats()).ready == 7


@in_town
async def test_a_drain_is_honoured_before_the_consumer_has_begun(town: Town) -> None:
    for sessions in (False, True):
        queue, log = town.queue(), Log()
        await queue.send(b"a", session="s" if sessions else None)
        town.road.asked.clear()
        consumer = queue.consumer(log, sessions=sessions)
        consumer.drain()
        await consumer.run()
        stop = asyncio.Event()
        stop.set()
        await queue.consume(log, sessions=sessions, stop=stop)
        assert log.began == []
        assert not [one for one in town.road.asked if one.startswith("receive")]


@in_town
async def test_a_drain_is_honoured_while_the_store_is_slow_to_answer(town: Town) -> None:
    for sessions in (False, True):
        queue, log = town.queue(max_deliveries=7), Log()
        town.road.answers.clear()
        consuming = asyncio.ensure_future(queue.consume(log, sessions=sessions))
        await asyncio.sleep(1.0)
        queue.pause()
        await queue.drain()
        assert town.clock.now() < 3.0
        await consuming
        town.road.answers.set()
        assert log.began == []


@in_town
async def test_a_pause_that_comes_first_is_honoured(town: Town) -> None:
    queue, log = town.queue(), Log()
    await fill(queue, 1)
    consumer = queue.consumer(log)
    consumer.pause()
    running = asyncio.ensure_future(consumer.run())
    await asyncio.sleep(10.0)
    assert log.began == []
    consumer.resume()
    await asyncio.sleep(1.0)
    assert log.began == [b"0"]
    consumer.drain()
    await running


@in_town
async def test_a_consumer_goes_by_what_the_queue_was_declared_with(town: Town) -> None:
    await town.queue(lock=5.0).send(b"a")
    queue = Queue(
        QueueContext("orders", town.road, RenewalThread.here(), town.clock, QueueSettings(lock=LOCK), "me", expected={})
    )
    left: list[float] = []
    began = town.clock.now()

    async def handler(message: Message) -> None:
        left.append(message.locked_until - message.enqueued_at)
        await asyncio.sleep(60.0)

    await queue.consumer(handler, until_empty=True).run()
    assert left == [5.0]
    assert town.clock.now() - began < 61.0
    assert len([one for one in town.road.asked if one.startswith("renew")]) > 20


@in_town
async def test_cancelled_it_gives_back_and_lets_go(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=500.0)
    await fill(queue, 10)
    task = asyncio.ensure_future(queue.consume(log, concurrency=3))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(log.cancelled) == 3
    assert (await queue.stats()).ready == 10
    assert {one.delivery_count for one in await queue.receive(10)} == {1}


@in_town
async def test_it_ends_even_if_a_handler_catches_what_is_to_cancel_it(town: Town) -> None:
    for session in (None, "s"):
        queue, go_on, began = town.queue(), asyncio.Event(), asyncio.Event()
        await queue.send(b"a", session=session)

        async def stubborn(message: Message, began: asyncio.Event = began, go_on: asyncio.Event = go_on) -> None:
            began.set()
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await go_on.wait()

        consuming = asyncio.ensure_future(queue.consume(stubborn, sessions=session is not None))
        await began.wait()
        since = town.clock.now()
        async with asyncio.timeout(20.0):
            await queue.drain(grace=5.0)
        await consuming
        assert town.clock.now() - since <= 5.0 + 3 * 2.0  # grace, and three times what a handler has to stop
        assert len(town.told(HandlerOverran)) == (1 if session is None else 2)
        assert (await queue.stats()).locked == 1
        go_on.set()
        await asyncio.sleep(2 * LOCK)


@in_town
async def test_whoever_receives_goes_by_the_lock_that_the_queue_was_declared_with(town: Town) -> None:
    await fill(town.queue(lock=5.0), 3)
    first = await town.queue(lock=5.0).receive(2)
    await first[0].defer()
    await first[1].dead_letter("bad")

    def stranger() -> Queue:
        return Queue(
            QueueContext(
                "orders", town.road, RenewalThread.here(), town.clock, QueueSettings(lock=LOCK), "me", expected={}
            )
        )

    [deferred] = await stranger().receive_deferred(first[0].sequence)
    [dead] = await stranger().dead_letters.receive()
    await asyncio.sleep(5.0)
    for message in (deferred, dead):
        with pytest.raises(LockLost):
            await message.complete()


@in_town
async def test_it_ends_even_if_the_broker_can_not_be_asked(town: Town) -> None:
    queue, log = town.queue(), Log(seconds=1.0)
    await fill(queue, 3)
    task = asyncio.ensure_future(queue.consume(log))
    await asyncio.sleep(0.5)
    town.road.cut = True
    await asyncio.sleep(2.0)
    await queue.drain(grace=3.0)
    await task
    town.road.cut = False
    await asyncio.sleep(LOCK)
    assert (await queue.stats()).ready == 3  # kept: nobody heard that they were done


@in_town
async def test_what_waits_too_long_is_given_back_uncounted(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 300)
    seconds = 0.01

    async def handler(message: Message) -> None:
        await asyncio.sleep(seconds)

    async with town.consuming(queue, handler, concurrency=1):
        await asyncio.sleep(1.0)
        seconds = 500.0  # all at once, they have become slow
        await asyncio.sleep(60.0)
        stats = await queue.stats()
        assert stats.locked == 1
        assert stats.ready > 100
        assert {one.delivery_count for one in await queue.receive(200)} == {1}
        assert town.told(GivenBack)


@in_town
async def test_two_consumers_share_and_neither_gets_the_others(town: Town) -> None:
    queue = town.queue()
    bodies = await fill(queue, 1_000)
    logs = [Log(seconds=0.01) for _ in range(4)]
    await asyncio.gather(*(queue.consume(log, concurrency=5, until_empty=True) for log in logs))
    assert sorted(sum((log.ended for log in logs), [])) == sorted(bodies)  # noqa: RUF017
    assert min(len(log.ended) for log in logs) > 150


@in_town
async def test_a_broken_broker_ends_it(town: Town) -> None:
    queue = town.queue()

    async def broken(queue: str, limit: int, lock: float) -> Claim:
        raise ConfigError("this is no queue")

    town.road.receive = broken  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no queue"):
        await queue.consume(Log())


@in_town
async def test_a_failing_hook_changes_nothing(town: Town) -> None:
    queue = town.queue(max_deliveries=1)
    await fill(queue, 1)

    def hook(message: Message, error: BaseException) -> None:
        raise RuntimeError("the hook is broken")

    async def handler(message: Message) -> None:
        raise ValueError("x")

    await queue.consume(handler, on_error=hook, until_empty=True)
    assert (await queue.stats()).dead == 1
    assert "error hook" in town.loop.unhandled.pop()["message"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"prefetch": -1}, "prefetch must be"),
        ({"max_hold": 0}, "max_hold must be more than 0"),
        ({"grace": -1}, "grace must be"),
        ({"run_in": "cellar"}, "run_in must be"),
        ({"run_in": "process"}, "an async handler runs on the loop"),
        ({"inbox_window": -1}, "inbox_window must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    @in_town
    async def test(town: Town) -> None:
        with pytest.raises(ConfigError, match=complaint):
            await town.queue().consume(Log(), **options)
        with pytest.raises(ConfigError, match="handler must be a function"):
            await town.queue().consume("x")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max must be"):
            await town.queue().receive(0)

    test()


# --- inbox, requests ---


@in_town
async def test_the_inbox_spares_the_handler_what_was_handled(town: Town) -> None:
    queue = town.queue(dedupe_window=1.0)
    log = Log()
    async with town.consuming(queue, log, inbox_window=1_000.0):
        for _ in range(3):
            await queue.send(b"a", id="a")
            await asyncio.sleep(100.0)  # the dedupe window is over, the inbox still knows
        assert log.ended == [b"a"]
        assert await queue.handled("a", "b") == [True, False]
        await asyncio.sleep(1_000.0)
        await queue.send(b"a", id="a")
    assert await queue.handled("a") == [False]


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize(("noted", "told"), [("orders$17", "orders--17"), ("orders--17", "orders$17")])
def test_the_inbox_knows_an_id_in_both_forms(session: str | None, noted: str, told: str) -> None:
    """One is as an older tenure made it up."""

    @in_town
    async def test(town: Town) -> None:
        queue = town.queue()
        log = Log()
        async with town.consuming(queue, log, inbox_window=1_000.0, sessions=session is not None):
            for named in (noted, told, "orders--18"):
                await queue.send(named.encode(), id=named, session=session)
                await asyncio.sleep(100.0)
        assert log.ended == [noted.encode(), b"orders--18"]
        assert await queue.handled(told, "orders--1", noted, "orders--18") == [True, False, True, True]

    test()


@in_town
async def test_an_inbox_that_can_not_be_asked_is_no_failure_of_the_message(town: Town) -> None:
    for session in (None, "s"):
        queue, log, hooked = town.queue(max_deliveries=2), Log(), list[BaseException]()
        counts: list[int] = []

        async def handler(message: Message, log: Log = log, counts: list[int] = counts) -> None:
            counts.append(message.delivery_count)
            await log(message)

        await queue.send(b"a", id=f"a of {session}", session=session)
        town.road.knows = False

        def note(message: Message, error: BaseException, hooked: list[BaseException] = hooked) -> None:
            hooked.append(error)

        options: dict[str, Any] = {"inbox_window": 1_000.0, "sessions": session is not None, "concurrency": 2}
        async with town.consuming(queue, handler, on_error=note, **options):
            await asyncio.sleep(3 * LOCK)
            assert counts == []
            assert len([one for one in town.road.asked if one == "handled"]) < 300
            town.road.knows = True
            await asyncio.sleep(10.0)
            assert counts == [1]
        assert hooked == []
        assert town.told(BrokerUnanswered)[0].what == "look into the inbox"
        assert await queue.stats() == Stats()


@in_town
async def test_complete_may_send_in_the_same_step(town: Town) -> None:
    queue, results = town.queue(), town.queue("results")
    await queue.send(b"2")
    [message] = await queue.receive()
    with pytest.raises(ConfigError, match="body"):
        await message.complete(sends=[("results", Outgoing("4"))])  # type: ignore[arg-type]
    await message.complete(sends=[("results", Outgoing(b"4"))], remember=10.0)
    [result] = await results.receive()
    assert result.body == b"4"


@in_town
async def test_an_answer_that_nobody_waits_for_is_told_of_when_closing_meets_it(town: Town) -> None:
    queue = town.queue()
    with pytest.raises(tenure.TimedOut):
        await queue.request(b"?", timeout=1.0)
    [asked] = await queue.receive()
    town.road.delay = 1.0
    replying = asyncio.ensure_future(asked.reply(b"late"))
    async with asyncio.timeout(60.0):
        while town.road.asked.count("settle 1") < 2:  # the second is the verdict on the answer
            await asyncio.sleep(0.01)
    await queue.close()
    await replying
    assert [one.reason for one in town.told(MessageDied)] == ["nobody_waits"]


@in_town
async def test_a_request_gets_its_answer(town: Town) -> None:
    queue = town.queue()

    async def square(message: Message) -> None:
        await asyncio.sleep(int(message.body) % 3)
        await message.reply(b"%d" % int(message.body) ** 2)

    async with town.consuming(queue, square):
        answers = await asyncio.gather(*(queue.request(b"%d" % number, timeout=60) for number in range(20)))
        assert [one.body for one in answers] == [b"%d" % number**2 for number in range(20)]
        assert town.clock.now() < 5.0
    assert await queue.stats() == Stats()


@in_town
async def test_a_request_ends_with_its_queue(town: Town) -> None:
    queue = town.queue()
    requesting = asyncio.ensure_future(queue.request(b"?", timeout=60))
    await asyncio.sleep(1.0)
    await queue._requests[queue.name].close()  # as closing the backend does
    with pytest.raises(Unavailable, match=r"request .* on 'orders' got no answer before it was closed"):
        await requesting


@in_town
async def test_an_answer_may_be_any_json_but_not_that_and_a_body(town: Town) -> None:
    queue, refused = town.queue(), list[str]()

    async def say_nothing(message: Message) -> None:
        try:
            await message.reply(b"null", json=None)
        except ConfigError as error:
            refused.append(str(error))
        await message.reply(json=None)

    async with town.consuming(queue, say_nothing):
        answer = await queue.request(json={"question": 1}, timeout=60)
    assert (answer.body, answer.json(), len(refused)) == (b"null", None, 1)


@in_town
async def test_an_answer_that_nobody_waits_for_is_kept(town: Town) -> None:
    queue = town.queue()

    async def late(message: Message) -> None:
        await asyncio.sleep(10.0)
        await message.reply(b"at last")

    async with town.consuming(queue, late):
        with pytest.raises(tenure.TimedOut, match="no answer to request 'mine' on 'orders' within 5 s"):
            await queue.request(b"?", timeout=5.0, correlation_id="mine")
        await asyncio.sleep(10.0)
        [name] = [one for one in await town.road.names() if "replies" in one]
        [dead] = await town.queue(name).dead_letters.peek()
        assert (dead.body, dead.reason, dead.correlation_id) == (b"at last", "nobody_waits", "mine")
        await asyncio.sleep(100.0)
        [died] = town.told(MessageDied)
        assert (died.name, died.id, died.reason, died.delivery_count) == (name, dead.id, "nobody_waits", 1)
    with pytest.raises(ConfigError, match="reply queue of its own"):
        await queue.request(b"?", reply_to="elsewhere")
    await queue.send(b"no answer wanted")
    [message] = await queue.receive()
    with pytest.raises(ConfigError, match="nobody waits for an answer"):
        await message.reply(b"x")


@in_town
async def test_an_answer_that_comes_twice_was_waited_for(town: Town) -> None:
    queue = town.queue()

    async def answers(message: Message) -> None:
        town.road.settling = False
        assert message.reply_to is not None
        await town.queue(message.reply_to).send(b"yes", correlation_id=message.correlation_id)

    async with town.consuming(queue, answers):
        assert (await queue.request(b"?", timeout=20.0)).body == b"yes"
        town.road.settling = True
        await asyncio.sleep(3 * LOCK)  # it is delivered again, as nobody has heard that it is gone
        [name] = [one for one in await town.road.names() if "replies" in one]
        assert await town.queue(name).stats() == Stats()


@in_town
async def test_an_answer_that_was_taken_after_its_lock_had_ended_was_waited_for(town: Town) -> None:
    queue = town.queue()

    async def answers(message: Message) -> None:
        await message.reply(b"yes")

    async with town.consuming(queue, answers):
        await queue.request(b"?", timeout=20.0)  # its verdict has passed, and the next claim is under way
        town.road.settle_late = 2 * LOCK
        assert (await queue.request(b"?", timeout=20.0)).body == b"yes"
        await asyncio.sleep(5 * LOCK)
        [name] = [one for one in await town.road.names() if "replies" in one]
        assert await town.queue(name).stats() == Stats()
    assert town.told(MessageDied) == []


@in_town
async def test_an_answer_that_comes_at_the_last_moment_is_not_lost(town: Town) -> None:
    context = town.queue()._context
    requests = Requests(context)
    [delivery] = (await _claimed(town, b"yes")).deliveries
    town.loop.call_at(town.loop.time() + 5.0, lambda: requests._waiting["x"].set_result(Received(delivery)))
    answer = await requests.ask(Producer(context), Outgoing(b"?", correlation_id="x"), 5.0)
    assert answer.body == b"yes"
    await requests.close()


async def _claimed(town: Town, body: bytes) -> Claim:
    await town.road.send("elsewhere", [Outgoing(body)])
    return await town.road.receive("elsewhere", 1, LOCK)


@in_town
async def test_a_reply_queue_goes_with_its_process(town: Town) -> None:
    queue = town.queue()

    async def answer(message: Message) -> None:
        await message.reply(b"yes")

    async def replies() -> list[str]:
        return [one for one in await town.road.names() if "replies" in one]

    async with town.consuming(queue, answer):
        await queue.request(b"?", timeout=20.0)
        assert len(await replies()) == 1
        await asyncio.sleep(3 * IDLE)  # it lives, and so does its queue
        assert len(await replies()) == 1
        await queue.request(b"?", timeout=20.0)
        await queue.close()
        assert await replies() == []


@in_town
async def test_the_reply_queue_of_a_process_that_died_is_deleted_by_the_next(town: Town) -> None:
    queue = town.queue()
    dead, letter, alive = (Requests(queue._context) for _ in range(3))
    for one in (dead, letter):
        await town.road.delete_when_idle(one.reply_to, IDLE)  # as it does when it begins
    await town.road.send(letter.reply_to, [Outgoing(b"late")])
    await town.road.delete_when_idle("orders.replies.of.a.user", 1.0)
    listening = asyncio.ensure_future(alive._listen())
    await asyncio.sleep(IDLE * 1.5)
    names = await town.road.names()
    assert dead.reply_to not in names
    assert letter.reply_to in names  # not with a message in it
    assert alive.reply_to in names
    assert "orders.replies.of.a.user" in names
    listening.cancel()


@in_town
async def test_a_queue_that_was_deleted_is_made_anew_as_it_was_asked_for(town: Town) -> None:
    queue = town.queue(max_deliveries=3)
    await queue.send(b"a")
    with pytest.raises(QueueNotEmpty, match="could not delete 'orders': it holds 1 ready; consume, redrive or purge"):
        await queue.delete()
    assert (await queue.delete(force=True)).ready == 1
    assert (await town.road.settings("orders")).max_deliveries == 10
    await queue.send(b"b")
    assert (await town.road.settings("orders")).max_deliveries == 3
    assert [message.body for message in await queue.receive(max=2)] == [b"b"]


@in_town
async def test_a_queue_is_looked_into_and_emptied(town: Town) -> None:
    queue = town.queue()
    await queue.send_batch(
        [Outgoing(b"%d" % number, id=f"id-{number}", delay=60.0 * (number % 2)) for number in range(6)]
    )
    [held] = await queue.receive(1)
    shown = await queue.peek()
    assert [(one.body, one.state) for one in shown] == [
        *[(b"0", "locked"), (b"1", "delayed"), (b"2", "ready"), (b"3", "delayed"), (b"4", "ready"), (b"5", "delayed")]
    ]
    assert isinstance(shown[0], tenure.LiveMessage)
    assert [one.body for one in await queue.peek(1, states=["delayed"], after=shown[1].sequence)] == [b"3"]
    assert await queue.purge(ids=["id-1", "id-0"], dry_run=True) == 1
    assert await queue.purge(states=["delayed"], sequences=[shown[1].sequence, shown[2].sequence]) == 1
    assert await queue.purge(sent_before=shown[0].enqueued_at) == 0
    assert await queue.purge() == 4
    await held.complete()
    assert await queue.stats() == Stats()


@in_town
async def test_dead_letters_are_redriven_to_another_queue(town: Town) -> None:
    queue, there = town.queue(), town.queue("there")
    await queue.send_batch([Outgoing(b"%d" % number) for number in range(3)])
    for message in await queue.receive(3):
        await message.dead_letter("bad")
    assert await queue.dead_letters.redrive(where=lambda letter: letter.body != b"1", to="there") == 2
    assert await queue.dead_letters.redrive(to="orders") == 1  # its own
    assert [message.body for message in await there.receive(9)] == [b"0", b"2"]
    assert [(message.body, message.sequence) for message in await queue.receive(9)] == [(b"1", 2)]
    with pytest.raises(ConfigError, match="to \\('a b '\\) must be printable, with no space around it"):
        await queue.dead_letters.redrive(to="a b ")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"states": "ready"}, "states must be a collection, not 'ready'; try states=\\['ready'\\]"),
        (
            {"states": ["dead"]},
            "a state must be ready, locked, delayed or deferred, not 'dead'; what is dead is in dead_",
        ),
        ({"ids": ["a", ""]}, "an id must not be empty"),
        ({"sequences": ["1"]}, "a sequence must be a whole number"),
        ({"session": ""}, "session must not be empty; leave it out"),
        ({"sent_before": "today"}, "sent_before must be"),
    ],
)
def test_what_can_not_be_meant_is_refused(wrong: dict[str, Any], complaint: str) -> None:
    @in_town
    async def test(town: Town) -> None:
        queue = town.queue()
        await queue.send(b"stays")
        for ask in (queue.peek, queue.purge):
            with pytest.raises(ConfigError, match=complaint):
                await ask(**wrong)
        with pytest.raises(ConfigError, match="what is locked can't be purged, as a consumer is at work on it"):
            await queue.purge(states=["ready", "locked"])
        with pytest.raises(ConfigError, match="limit must not be more than 10,000"):
            await queue.peek(10_001)
        assert (await queue.stats()).ready == 1

    test()


def test_reply_queues_are_listed_only_if_something_is_in_them() -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders", lock=5)

            async def handler(message: tenure.Message) -> None:
                await message.reply(b"yes")

            consuming = asyncio.ensure_future(queue.consume(handler))
            answer = await queue.request(b"?")
            assert answer.body == b"yes"
            assert answer.queue.startswith("orders.replies.")

            async def queues() -> list[str]:
                return await backend.queues()

            await until(lambda: _is(queues, ["orders"]))
            await backend.queue(answer.queue).send(b"nobody waits for this", correlation_id="x")
            await until(lambda: _is(queues, ["orders", answer.queue]))
            await queue.drain()
            await consuming

    asyncio.run(main())


@in_town
async def test_many_deaths_are_told_in_portions_between_which_the_loop_turns(town: Town) -> None:
    died = [Died(number, f"gone {number}", 0, "expired") for number in range(1_000)]
    context = town.queue()._context
    context.tell_of_dead(died)
    told = [len(town.told(MessageDied))]  # after each turn
    while told[-1] < len(died):
        await asyncio.sleep(0)
        told.append(len(town.told(MessageDied)))
    assert [one.id for one in town.told(MessageDied)] == [one.id for one in died]
    assert max(after - before for before, after in pairwise([0, *told])) == DEATHS_PER_TURN


def test_a_loop_that_ends_tells_all_deaths_before() -> None:
    told: list[Event] = []

    async def main() -> None:
        context = Town().queue()._context
        context.on_event = told.append
        context.tell_of_dead([Died(number, "gone", 0, "expired") for number in range(1_000)])

    run(main())
    assert len(told) == 1_000


@in_town
async def test_chores_that_another_loop_begins_meanwhile_do_no_harm_to_the_end_of_a_queue(town: Town) -> None:
    context = town.queue()._context

    class Chore(asyncio.Task[None]):
        def get_loop(self) -> asyncio.AbstractEventLoop:
            context._chores.add(other)  # another thread may come in wherever there is a call
            return super().get_loop()

    other = asyncio.ensure_future(asyncio.sleep(0.0))
    context._chores.add(Chore(asyncio.sleep(0.0), loop=town.loop))
    await context.rest()


def test_a_backend_ends_its_consumers_all_at_once() -> None:
    """As long as each takes with a store that is away, five would take five times as long one after another."""
    told = {name: asyncio.Event() for name in ("orders", "letters")}
    heard: list[str] = []

    async def main() -> None:
        async def handler(message: tenure.Message) -> None:
            begun.append(message.queue)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told[message.queue].set()
                for other in told.values():
                    await other.wait()
                heard.append(message.queue)
                raise

        begun: list[str] = []
        async with tenure.connect("memory:") as backend:
            for name in told:
                await backend.queue(name).send(b"a")
            consuming = [asyncio.ensure_future(backend.queue(name).consume(handler)) for name in told]
            await until(lambda: len(begun) == len(told))
        await asyncio.gather(*consuming)

    asyncio.run(main())
    assert sorted(heard) == ["letters", "orders"]


async def _is(ask: Callable[[], Coroutine[Any, Any, Any]], wanted: object) -> bool:
    return bool(await ask() == wanted)


# --- sessions ---


@in_town
async def test_a_session_is_ours_alone_and_in_order(town: Town) -> None:
    queue = town.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session="ab"[number % 2]) for number in range(6)])
    async with queue.session() as first, queue.session() as second:
        assert (first.name, second.name, first.state) == ("a", "b", None)
        with pytest.raises(tenure.TimedOut, match="no session with a message waiting is free"):
            async with queue.session(wait=1.0):
                pass
        with pytest.raises(tenure.TimedOut, match=r"session 'a' of 'orders'.*locked to another"):
            async with queue.session("a", wait=1.0):
                pass
        seen = []
        async for message in first:
            seen.append(message.body)
            await message.complete()
        assert seen == [b"0", b"2", b"4"]
        await first.set_state(b"4 was the last")
        await asyncio.sleep(200.0)  # renewed all the while
        assert [one.body for one in await second.receive(10)] == [b"1", b"3", b"5"]
    async with queue.session("a") as again:
        assert again.state == b"4 was the last"
        assert await again.receive() == []
        waiting = asyncio.ensure_future(again.receive(wait=50.0))
        await asyncio.sleep(1.0)
        await queue.send(b"more", session="a")
        assert [one.body for one in await waiting] == [b"more"]
        assert await again.renew() > 0
    async with queue.session("b") as other:
        assert [one.delivery_count for one in await other.receive(10)] == [1, 1, 1]


@in_town
async def test_a_session_waits_for_its_first_message(town: Town) -> None:
    queue = town.queue()

    async def later() -> None:
        await asyncio.sleep(30.0)
        await queue.send(b"x", session="s")

    sending = asyncio.ensure_future(later())
    async with queue.session() as session:
        assert session.name == "s"
        assert town.clock.now() == pytest.approx(30.0, abs=0.1)
    await sending


@in_town
async def test_a_session_that_comes_when_nobody_waits_any_more_is_let_go(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"a", session="s")
    town.road.delay = 1.0
    for kind in ("receiver", "consumer"):
        waiting = asyncio.ensure_future(
            queue.session().__aenter__() if kind == "receiver" else queue.consume(Log(), sessions=True, concurrency=1)
        )
        await asyncio.sleep(0.5)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(5.0)
        answer = await MemoryBroker.accept(town.road, "orders", None, LOCK)
        assert isinstance(answer, SessionLock), kind
        await town.road.release(answer)


@in_town
async def test_deaths_that_are_heard_of_late_are_told(town: Town) -> None:
    """By a question that nobody waits for any more: of what time has buried, and of what dies on being given back."""
    queue = town.queue()
    await queue.send(b"late", id="a", expires_in=1.0)
    town.road.delay = 5.0
    asks: list[Callable[[], Coroutine[Any, Any, object]]] = [queue.receive, queue.session().__aenter__]
    for number, ask in enumerate(asks):
        await queue.send(b"late", id=f"gone {number}", expires_in=1.0)
        await asyncio.sleep(2.0)
        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.sleep(20.0)
    await queue.send(b"late", id="given back", expires_in=1.0)
    asking = asyncio.ensure_future(queue.receive())
    await asyncio.sleep(0.5)
    asking.cancel()
    await asyncio.sleep(20.0)
    assert [one.id for one in town.told(MessageDied)] == ["a", "gone 0", "gone 1", "given back"]


@in_town
async def test_a_lost_session_cancels_the_block(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"x", session="s")
    town.road.renewing = False
    with pytest.raises(LockLost, match="session 's'"):
        async with queue.session() as session:
            [message] = await session.receive()
            await asyncio.sleep(1_000.0)
    assert town.clock.now() < LOCK
    assert session.lost.is_set()
    with pytest.raises(LockLost):
        await session.receive()
    await asyncio.sleep(LOCK)
    with pytest.raises(LockLost):
        await message.complete()


# --- dead letters ---


@in_town
async def test_dead_letters_are_a_queue_of_their_own(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 250)
    for number, message in enumerate(await queue.receive(250)):
        await message.dead_letter("odd" if number % 2 else "even", str(number), error=ValueError(str(number)))
    dead = queue.dead_letters
    assert dead.name == "orders$dead"
    assert len(await dead.peek()) == 100
    assert len(await dead.peek(1_000, reason="odd")) == 125
    assert [one.description for one in await dead.peek(2, where=lambda one: int(one.description) > 200)] == [
        "201",
        "202",
    ]
    [letter] = await dead.receive()
    assert (letter.reason, letter.description, letter.error and letter.error.type) == ("even", "0", "ValueError")
    assert [one.outcome for one in letter.history] == ["rejected"]
    await letter.complete()
    assert await dead.redrive(where=lambda one: one.body.endswith(b"7"), dry_run=True) == 25
    assert await dead.redrive(where=lambda one: one.body.endswith(b"7"), limit=10) == 10
    assert await dead.redrive(reason="odd", limit=5, dry_run=True) == 5
    [one] = await dead.peek(1)
    assert await dead.redrive(ids=[one.id]) == 1
    assert await dead.purge(reason="odd") == 114
    stats = await queue.stats()
    assert (stats.ready, stats.dead) == (11, 124)
    assert await dead.purge() == 124
    with pytest.raises(ConfigError, match="ids must be a collection"):
        await dead.purge(ids="abc")
    with pytest.raises(ConfigError, match="limit must be"):
        await dead.redrive(limit=0)


# --- through the front door ---


def test_the_front_door() -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders", lock=5, max_deliveries=3)
            await queue.send(b"a")
            done: list[bytes] = []

            async def handler(message: tenure.Message) -> None:
                done.append(message.body)

            await queue.consume(handler, until_empty=True)
            assert done == [b"a"]
            assert await backend.queues() == ["orders"]
            assert isinstance(queue, tenure.Queue)
            again = backend.queue("orders")
            waiting = asyncio.ensure_future(again.consume(handler))
            await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match=r"'\$'"):
                backend.queue("a$b")
            with pytest.raises(ConfigError, match="lock"):
                backend.queue("a", lock=-1)
            with pytest.raises(ConfigError, match=r"lock .* must be from"):
                backend.queue("a", lock=1e9)
        await waiting  # closing the backend ends its consumers

    asyncio.run(main())


# --- consuming sessions ---


@in_town
async def test_sessions_are_consumed_side_by_side_each_in_order(town: Town) -> None:
    queue = town.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session=f"s{number % 5}") for number in range(50)])
    await queue.send(b"of no session")
    seen: dict[str | None, list[int]] = {}
    running: set[str | None] = set()
    most = 0

    async def handler(message: Message) -> None:
        nonlocal most
        assert message.session not in running
        running.add(message.session)
        most = max(most, len(running))
        await asyncio.sleep(1.0)
        seen.setdefault(message.session, []).append(int(message.body))
        running.discard(message.session)

    await queue.consume(handler, concurrency=3, sessions=True, until_empty=True)
    assert seen == {f"s{number}": list(range(number, 50, 5)) for number in range(5)}
    assert most == 3
    assert (await queue.stats()).ready == 1


@in_town
async def test_a_failed_message_holds_up_its_session_until_it_is_dead(town: Town) -> None:
    queue = town.queue(max_deliveries=3)
    await queue.send_batch([Outgoing(b"a1", session="a"), Outgoing(b"a2", session="a"), Outgoing(b"b1", session="b")])
    seen: list[bytes] = []
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"a1":
            raise ValueError("no")

    options: dict[str, Any] = {"sessions": True, "retry": RetryPolicy(initial=5.0, jitter=0.0)}
    async with town.consuming(queue, handler, on_error=lambda message, error: hooked.append(str(error)), **options):
        await asyncio.sleep(60.0)
        await queue.send(b"b2", session="b")
        await asyncio.sleep(0.1)
    assert seen == [b"a1", b"b1", b"a1", b"a1", b"a2", b"b2"]
    assert hooked == ["no"] * 3
    assert await queue.stats() == Stats(dead=1)


@in_town
async def test_a_session_asks_again_when_a_verdict_is_not_answered(town: Town) -> None:
    for way in ("cut", "loses_answers"):
        queue, log = town.queue(), Log()
        await queue.send_batch([Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        async with town.consuming(queue, log, sessions=True, concurrency=1):

            async def handler_began(log: Log = log) -> None:
                while not log.began:
                    await asyncio.sleep(0.1)

            log.seconds = 1.0
            await handler_began()
            setattr(town.road, way, True)
            await asyncio.sleep(5.0)
            assert log.ended == [b"1"]
            setattr(town.road, way, False)
            await asyncio.sleep(10.0)
        assert log.ended == [b"1", b"2"]  # and not the first one again
        assert await queue.stats() == Stats()


@in_town
async def test_draining_sessions_does_not_count(town: Town) -> None:
    queue = town.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session=f"s{number % 2}") for number in range(4)])
    log = Log(seconds=20.0)
    async with town.consuming(queue, log, sessions=True):
        await asyncio.sleep(1.0)
        queue.pause()
        queue.resume()
    assert town.clock.now() == pytest.approx(6.0)
    assert len(log.cancelled) == 2
    assert (await queue.stats()).ready == 4
    async with queue.session("s0", wait=1.0) as session:
        assert [one.delivery_count for one in await session.receive(5)] == [1, 1]


@in_town
async def test_a_handler_of_a_session_has_its_limits(town: Town) -> None:
    queue = town.queue(max_deliveries=1)
    await queue.send(b"slow", session="s")
    log, hooked = Log(seconds=1_000.0), list[str]()
    note = lambda message, error: hooked.append(str(error))  # noqa: E731
    async with town.consuming(queue, log, sessions=True, max_hold=100.0, on_error=note):
        await asyncio.sleep(110.0)
    assert log.cancelled == [b"slow"]
    assert (await queue.stats()).dead == 1
    assert "max_hold" in hooked[0]
    await queue.send(b"lost", session="s")
    async with town.consuming(queue, log, sessions=True, on_error=note):
        await asyncio.sleep(1.0)
        town.road.renewing = False
        await asyncio.sleep(29.0)
        assert log.cancelled == [b"slow", b"lost"]
        assert "lost while" in hooked[1]
    with pytest.raises(ConfigError, match="not for sessions"):
        await queue.consume(log, sessions=True, auto_complete=False)


@in_town
async def test_a_handler_that_runs_on_in_a_lost_session_is_told_of(town: Town) -> None:
    for why in ("unanswered", "denied"):
        queue = town.queue(why)
        await queue.send(b"a", session="s")
        told = len(town.events)
        began, go_on = asyncio.Event(), asyncio.Event()
        hooked: list[BaseException] = []

        async def stubborn(message: Message, began: asyncio.Event = began, go_on: asyncio.Event = go_on) -> None:
            began.set()
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await go_on.wait()

        note = lambda message, error, hooked=hooked: hooked.append(error)  # noqa: E731
        async with town.consuming(queue, stubborn, sessions=True, concurrency=1, on_error=note):
            await began.wait()
            since = town.clock.now()
            if why == "unanswered":
                town.road.renewing = False
            else:
                await town.road.release(town.road.accepted[-1])
            async with queue.session("s", wait=LOCK + 1.0):  # another has it
                pass
            await asyncio.sleep(LOCK / 2)
            events = town.events[told:]
            [ended] = [event for event in events if isinstance(event, LockEnded)]
            assert (ended.why, ended.delivery_count) == (why, 1)
            [overran] = [event for event in events if isinstance(event, HandlerOverran)]
            assert ended.at < overran.at < since + LOCK
            town.road.renewing = True
            go_on.set()
        assert not [event for event in events if isinstance(event, MessageFailed)]


@in_town
async def test_the_verdict_on_a_message_of_a_session_may_come_too_late(town: Town) -> None:
    queue = town.queue()
    await queue.send_batch([Outgoing(b"blocks", session="s"), Outgoing(b"settles", session="s")])
    hooked: list[str] = []
    counts: list[int] = []

    async def handler(message: Message) -> None:
        counts.append(message.delivery_count)
        match message.body, message.delivery_count:
            case b"blocks", 1:
                town.road.renewing = False
                town.loop.block(2 * LOCK)
                town.road.renewing = True
            case b"blocks", 2:  # its verdict stands, but it is heard only when the session is lost
                town.road.renewing = False
                town.road.delay = LOCK
            case b"settles", _:
                await message.complete()

    note = lambda message, error: hooked.append(f"{message.id} {type(error).__name__}: {error}")  # noqa: E731
    async with town.consuming(queue, handler, sessions=True, concurrency=1, on_error=note):
        await asyncio.sleep(3.5 * LOCK)
        town.road.delay, town.road.renewing = 0.0, True
        await asyncio.sleep(2 * LOCK)
    assert counts == [1, 2, 1]
    assert len(hooked) == 2
    assert "could not complete it" in hooked[0]
    assert "before there was an answer to its verdict" in hooked[1]
    assert await queue.stats() == Stats()


@in_town
async def test_a_worker_outlives_handlers_that_catch_their_cancellation(town: Town) -> None:
    queue = town.queue(max_deliveries=20)
    await queue.send_batch([Outgoing(b"%d" % number, session="s") for number in range(3)])
    ended: list[bytes] = []

    async def handler(message: Message) -> None:
        try:
            await asyncio.sleep(100.0 if message.body == b"0" or message.delivery_count == 1 else 1.0)
        except asyncio.CancelledError:
            if message.body == b"1":
                raise ValueError("cut short") from None
            if message.body == b"2":
                raise
        ended.append(message.body)

    async with town.consuming(queue, handler, sessions=True, concurrency=1, max_hold=5.0, retry=AT_ONCE):
        await asyncio.sleep(25.0)
        assert ended == [b"0", b"1", b"2"]
        await queue.send(b"3", session="s")
        await asyncio.sleep(1.0)
        town.road.renewing = False
        await asyncio.sleep(LOCK)  # lost: the worker looks for another one
        town.road.renewing = True
        await queue.send(b"4", session="t")
        await asyncio.sleep(LOCK)
    assert await queue.stats() == Stats()


@in_town
async def test_a_handler_may_end_the_consuming_that_it_is_part_of(town: Town) -> None:
    for sessions in (False, True):
        queue = town.queue(f"orders-{sessions}")
        await queue.send_batch([Outgoing(b"last", session="s" if sessions else None)])
        ended: list[bytes] = []

        async def handler(message: Message, queue: Queue = queue, ended: list[bytes] = ended) -> None:
            await queue.drain()
            ended.append(message.body)

        await queue.consume(handler, sessions=sessions)
        assert ended == [b"last"]
        assert await queue.stats() == Stats()


@in_town
async def test_a_handler_that_cancels_itself_has_failed(town: Town) -> None:
    queue = town.queue(max_deliveries=1)
    await fill(queue, 2)

    async def handler(message: Message) -> None:
        if message.body == b"0":
            raise asyncio.CancelledError("of my own")

    await queue.consume(handler, concurrency=1, until_empty=True)
    assert await queue.stats() == Stats(dead=1)
    [dead] = await queue.dead_letters.peek()
    assert dead.error is not None
    assert dead.error.type == "asyncio.exceptions.CancelledError"


# --- what is told ---


@in_town
async def test_a_result_that_comes_too_late_is_told_of_once(town: Town) -> None:
    for sessions in (False, True):
        town.events.clear()
        queue = town.queue(f"orders-{sessions}")
        await queue.send(b"a", session="s" if sessions else None)
        counts: list[int] = []

        async def handler(message: Message, counts: list[int] = counts) -> None:
            counts.append(message.delivery_count)
            if message.delivery_count == 1:
                town.loop.block(2 * LOCK)  # this process does not run, and nobody has noticed

        await queue.consume(handler, sessions=sessions, until_empty=True)
        assert counts == [1, 2]
        assert len(town.told(ResultDiscarded)) + len(town.told(LockEnded)) == 1
        if not sessions:
            [told] = town.told(ResultDiscarded)
            assert (told.why, told.delivery_count) == ("stalled", 1)


@in_town
async def test_a_handler_cut_short_because_its_process_stood_still_is_not_counted(town: Town) -> None:
    queue = town.queue(max_deliveries=2)
    await queue.send(b"a")
    timing = Timing(LOCK)
    counts: list[int] = []

    async def handler(message: Message) -> None:
        counts.append(message.delivery_count)
        if len(counts) < 4:
            town.loop.block(sure_until(0.0, timing) - timing.grace / 2)  # too long to go on, and the lock still holds
            await asyncio.sleep(LOCK)

    await queue.consume(handler, until_empty=True)
    assert counts == [1, 1, 1, 1]
    assert {told.why for told in town.told(LockEnded)} == {"stalled"}
    assert town.told(MessageFailed) == town.told(MessageDied) == []
    assert await queue.stats() == Stats()


@in_town
async def test_a_verb_that_comes_too_late_is_told_of_once(town: Town) -> None:
    for sessions in (False, True):
        town.events.clear()
        queue = town.queue(f"orders-{sessions}")
        await queue.send(b"a", session="s" if sessions else None)

        async def handler(message: Message) -> None:
            if message.delivery_count == 1:
                town.loop.block(2 * LOCK)
                with pytest.raises(LockLost):
                    await message.complete()

        await queue.consume(handler, sessions=sessions, until_empty=True)
        assert len(town.told(ResultDiscarded)) + len(town.told(LockEnded)) == 1


@in_town
async def test_a_verdict_without_an_answer_at_the_end_is_told_of(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 1)
    town.road.settling = False
    await asyncio.gather(queue.consume(Log(), grace=1.0), _drain_after(queue, 1.0))
    [told] = town.told(ResultDiscarded)
    assert told.why == "unanswered"
    town.road.settling = True


@in_town
async def test_a_session_lost_while_its_verdict_has_no_answer_is_told_of(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"a", session="s")
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        if message.delivery_count == 1:
            town.road.settling = town.road.renewing = False

    def note(message: Message, error: BaseException) -> None:
        hooked.append(str(error))
        town.road.settling = town.road.renewing = True

    async with town.consuming(queue, handler, sessions=True, concurrency=1, on_error=note):
        await asyncio.sleep(3 * LOCK)
    [told] = town.told(ResultDiscarded)
    assert (told.why, told.delivery_count) == ("unanswered", 1)
    assert town.told(LockEnded) == []
    [error] = hooked
    assert "before there was an answer to its verdict" in error
    assert await queue.stats() == Stats()


async def _drain_after(queue: Queue, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await queue.drain(grace=1.0)


@in_town
async def test_every_death_is_told_of_once(town: Town) -> None:
    for sessions in (False, True):
        town.events.clear()
        queue = town.queue(f"orders-{sessions}", max_deliveries=1)
        one = "s" if sessions else None
        for body in (b"rejected", b"failed", b"by hand", b"never", b"fine"):
            await queue.send(body, session=one)
        await queue.send(b"expired", session=one, expires_in=1.0)

        async def handler(message: Message) -> None:
            match message.body:
                case b"rejected":
                    raise Reject("odd")
                case b"failed":
                    raise ValueError
                case b"never":
                    raise KeyError
                case b"by hand":
                    await message.dead_letter("by hand")

        await asyncio.sleep(2.0)
        await queue.consume(handler, sessions=sessions, until_empty=True, retry=RetryPolicy(never=(KeyError,)))
        assert [event.reason for event in town.told(MessageDied)].count("max_deliveries") == 1
        told = sorted((event.sequence, event.reason) for event in town.told(MessageDied))
        dead = [(letter.sequence, letter.reason) for letter in await queue.dead_letters.peek()]
        assert told == dead
        assert len(dead) == 5


@in_town
async def test_the_death_of_a_message_whose_last_lock_ended_is_told_of(town: Town) -> None:
    queue = town.queue(max_deliveries=1)
    await fill(queue, 1)
    await queue.receive()  # and never settled, as by a process that crashed
    await asyncio.sleep(2 * LOCK)
    await queue.stats()  # whoever looks on finds it dead
    await queue.consume(Log(), until_empty=True)
    [told] = town.told(MessageDied)
    assert (told.reason, told.delivery_count) == ("max_deliveries", 1)


@in_town
async def test_a_death_that_a_receiver_finds_is_told_of(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"late", expires_in=1.0)
    await queue.send(b"live")
    await asyncio.sleep(2.0)
    [got] = await queue.receive()
    assert got.body == b"live"
    [told] = town.told(MessageDied)
    assert (told.reason, told.delivery_count) == ("expired", 0)


# --- what a driver may do ---


@in_town
async def test_a_foreign_error_after_something_has_worked_ends_no_consumer(town: Town) -> None:
    for sessions in (False, True):
        town.events.clear()
        queue = town.queue(f"orders-{sessions}")
        log = Log()
        async with town.consuming(queue, log, sessions=sessions):
            await queue.send(b"before", session="s" if sessions else None)
            await until(partial(_has_ended, log, b"before"))
            for verb in ("receive", "receive_session", "accept", "settle", "renew"):
                broken = getattr(town.road, verb)

                async def fails(*_: Any, verb: str = verb) -> Any:
                    if verb == "settle":
                        raise asyncio.CancelledError  # as a driver may, though nobody has cancelled anything
                    raise RuntimeError("another operation is in progress")

                setattr(town.road, verb, fails)
                await queue.send(verb.encode(), session="t" if sessions else None)
                await asyncio.sleep(3.0)
                setattr(town.road, verb, broken)
                await until(partial(_has_ended, log, verb.encode()))
        assert await queue.stats() == Stats()
        assert town.told(BrokerUnanswered)


def _has_ended(log: Log, body: bytes) -> bool:
    return body in log.ended


@in_town
async def test_a_foreign_error_before_anything_has_worked_ends_it(town: Town) -> None:
    async def broken(queue: str, limit: int, lock: float) -> Claim:
        raise RuntimeError("this is no queue")

    town.road.receive = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no queue"):
        await town.queue().consume(Log())


@in_town
async def test_a_cancelled_error_that_cancels_nobody_is_no_answer(town: Town) -> None:
    """A driver may raise one of its own, also at the very first question."""
    queue = town.queue()
    log = Log(LOCK)
    for verb in ("receive", "renew", "settle"):
        answering = getattr(town.road, verb)

        async def fails(*_: Any, verb: str = verb, answering: Any = answering) -> Any:
            setattr(town.road, verb, answering)
            raise asyncio.CancelledError

        setattr(town.road, verb, fails)
    async with town.consuming(queue, log, concurrency=1, prefetch=2):
        await fill(queue, 3)
        await asyncio.sleep(5 * LOCK)
    assert log.ended == [b"0", b"1", b"2"]
    assert await queue.stats() == Stats()


@in_town
async def test_a_worker_that_is_cancelled_in_its_error_hook_leaves_nothing_locked(town: Town) -> None:
    queue = town.queue()
    worker: asyncio.Task[Any] | None = None
    handled = 0

    async def handler(message: Message) -> None:
        nonlocal worker, handled
        worker, handled = asyncio.current_task(), handled + 1
        if handled == 1:
            raise ValueError("the first time")

    async def on_error(message: Message, error: BaseException) -> None:
        assert worker is not None
        worker.cancel()
        await asyncio.sleep(1.0)

    async with town.consuming(queue, handler, concurrency=1, on_error=on_error):
        await fill(queue, 2)
        await asyncio.sleep(5 * LOCK)
    assert handled == 3
    assert await queue.stats() == Stats()


def test_how_long_letters_have_been_dead_is_counted_back_from_now() -> None:
    assert Selection(dead_for=60.0).at(100.0) == Selection(dead_before=40.0)


@in_town
async def test_dead_letters_are_kept_as_long_as_another_process_has_declared_since(town: Town) -> None:
    mine, theirs = town.queue(dead_retention=60.0), town.queue()
    await mine.send(b"a")
    [message] = await mine.receive()
    await message.dead_letter("no use")
    await theirs.declare(dead_retention=10_000.0)
    await theirs.send(b"b")
    await asyncio.sleep(100.0)
    assert (await mine.receive())[0].body == b"b"
    await asyncio.sleep(1.0)
    assert (await mine.stats()).dead == 1
    await asyncio.sleep(10_000.0)
    await mine.receive()
    await asyncio.sleep(1.0)
    assert (await mine.stats()).dead == 0


@in_town
async def test_dead_letters_go_in_their_time_also_beside_an_idle_consumer(town: Town) -> None:
    async def reject(message: Message) -> None:
        raise Reject("odd")

    for sessions in (False, True):
        queue = town.queue(f"orders-{sessions}", dead_retention=60.0)
        async with town.consuming(queue, reject, sessions=sessions, concurrency=1):
            await asyncio.sleep(600.0)
            for _ in range(2):
                await queue.send(b"no session's", expires_in=1.0)
                await asyncio.sleep(30.0)
                assert (await queue.stats()).dead == 1
                await asyncio.sleep(60.0)
                assert (await queue.stats()).dead == 0


def test_dead_letters_go_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "PURGE_MAX", 10)

    @in_town
    async def test(town: Town) -> None:
        queue = town.queue(dead_retention=60.0)
        await queue.send_batch([Outgoing(b"late", expires_in=1.0)] * 25)
        await asyncio.sleep(2.0)
        assert (await queue.stats()).dead == 25
        await asyncio.sleep(100.0)
        await queue.receive()
        await asyncio.sleep(1.0)
        assert (await queue.stats()).dead == 0

    test()


@in_town
async def test_reply_queues_that_are_not_empty_hide_no_others(town: Town) -> None:
    left = [f"rpc.replies.{number:016x}" for number in range(150)]
    for name in left[:120]:
        await town.road.send(name, [Outgoing(b"late")])
        await town.road.delete_when_idle(name, 0.0)
    await asyncio.sleep(1.0)
    for name in left[120:]:
        await town.road.delete_when_idle(name, 0.0)
    queue = town.queue("rpc")

    async def answer(message: Message) -> None:
        await message.reply(b"yes")

    async with town.consuming(queue, answer):
        await queue.request(b"?")
        await asyncio.sleep(IDLE)
    assert [name for name in await town.road.names() if name in left] == left[:120]


@in_town
async def test_an_unanswered_accept_is_told_of(town: Town) -> None:
    queue = town.queue()
    town.road.loses_answers = True
    async with town.consuming(queue, Log(), sessions=True, concurrency=1):
        await asyncio.sleep(3.0)
        town.road.loses_answers = False
    assert {event.what for event in town.told(BrokerUnanswered)} == {"accept"}


@in_town
async def test_a_claim_that_is_too_much_is_halved_until_it_is_answered(town: Town) -> None:
    queue = town.queue()
    await fill(queue, 40)
    limits: list[int] = []
    receive = town.road.receive

    async def slow(queue: str, limit: int, lock: float) -> Claim:
        limits.append(limit)
        if limit > 2:
            raise Unavailable("no answer within a second: too much")
        return await receive(queue, limit, lock)

    town.road.receive = slow  # type: ignore[method-assign]
    log = Log()
    await queue.consume(log, concurrency=16, until_empty=True)
    assert len(log.ended) == 40
    assert limits[:4] == [16, 8, 4, 2]
    assert await queue.stats() == Stats()


# --- numbers ---


@in_town
async def test_the_lock_of_a_session_is_counted_from_the_question(town: Town) -> None:
    queue = town.queue()
    await queue.send(b"a", session="s")
    asked_at = town.clock.now()
    town.road.delay = 5.0
    async with queue.session() as session:
        assert session.sure_until == sure_until(asked_at, Timing(LOCK))
        assert session.remaining() == sure_until(asked_at, Timing(LOCK)) - town.clock.now()
        town.road.delay = 0.0


def _handles(message: Received) -> None:
    """Do nothing, in whatever process."""


def test_the_deadline_of_a_process_is_what_remains_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timing = ManualClock(100.0), Timing(LOCK)

    class RenewalThread:
        def __init__(self) -> None:
            self.timing = timing

        def remaining(self, message: Message) -> float:
            clock.advance(3.0)  # a thread may be held up anywhere
            return 20.0

    monkeypatch.setattr(handlers, "CLOCK", clock)
    served = handlers.Handlers(_handles, "process", 1, RenewalThread())
    asked: Any = None  # it only asks its keeper about it
    assert served._until(asked) == 100.0 + 20.0 - handlers.KILL_SHARE * timing.grace


@in_town
async def test_the_history_of_a_message_that_failed_often_stays_small(town: Town) -> None:
    queue = town.queue(max_deliveries=50)
    await fill(queue, 1)

    async def handler(message: Message) -> None:
        raise ValueError("x" * 100_000)

    await queue.consume(handler, until_empty=True, retry=AT_ONCE)
    [dead] = await queue.dead_letters.peek()
    sizes = [len(attempt.error.traceback) for attempt in dead.history if attempt.error is not None]
    assert len(sizes) == 50
    assert min(sizes[0], sizes[-1]) > 16_000
    assert sum(sizes) < 100_000
