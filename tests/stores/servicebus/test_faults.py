"""Service Bus where something fails: logins, drains, management, connections, sessions, the library itself."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError
from azure.servicebus._pyamqp.error import AMQPConnectionError, ErrorCondition

from tenure._backends.servicebus import ServiceBusBroker, driver, feed, places, sessions
from tenure._backends.servicebus.links import ReceiveLink
from tenure._queue.broker import EVERY_LIVE, NoSession
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Defer,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.errors import Unavailable
from tenure.testing import until
from tests.servers import ServiceBus
from tests.stores.servicebus.opened import (
    Way,
    control,
    inside,
    link_of,
    look_shortly,
    opened,
    proxied,
    received,
    sent,
)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    look_shortly(monkeypatch)


def _give_up_soon(broker: ServiceBusBroker) -> None:
    """Let the connections of *broker* be given up soon if they are silent, and not those that it will open."""
    for link in broker._namespace._links.values():
        link.silence_max = 0.2


# --- logins ---


async def test_a_login_that_fails_early_costs_nothing(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LOGIN_EVERY", 0.05)
    monkeypatch.setattr(driver, "LISTEN", 0.05)
    async with opened(server.url) as broker:
        await sent(broker, queue, "a", session="s")
        lock = await broker.accept(queue, "s", 30)
        assert isinstance(lock, SessionLock)
        held = broker._receipts.session_of(lock)
        assert held is not None
        login, failures = held.link._wire._login, 0

        async def fails() -> None:
            nonlocal failures
            failures += 1
            raise ClientAuthenticationError("the identity's endpoint did not answer")

        login._auth.get_token = fails
        login._refresh_window = 10**9  # the token is to be renewed, and is good for an hour
        await until(lambda: failures >= 3)
        assert held.link.lost is None
        claim = await broker.receive_session(lock, 1)
        assert not isinstance(claim, Lapsed)
        assert [one.id for one in claim.deliveries] == ["a"]
        login._expires_on = int(time.time()) - 1  # now it has ended
        await until(lambda: held.link.lost is not None)
        assert await broker.receive_session(lock, 1) is LAPSED


# --- leave that is taken back late, or never ---


async def test_a_claim_does_not_depend_on_an_answer_to_its_drain(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "DRAIN_MAX", 0.1)
    async with opened(server.url) as broker:
        await broker.receive(queue, 1, 30)
        link = link_of(broker, queue)
        server.control("drain", "0")
        await sent(broker, queue, "a", "b", "c")
        assert [one.id for one in await received(broker, queue, 3)] == ["a", "b", "c"]
        assert (await broker.receive(queue, 10, 30)).deliveries == ()
        await sent(broker, queue, "d")
        [later] = await received(broker, queue, 1)
        assert (later.id, link.lost) == ("d", None)
        assert link_of(broker, queue) is link
        server.control("drain", "1")
        await broker.receive(queue, 10, 30)
        await until(lambda: server.control("credit", queue) == "0")


async def test_a_late_answer_does_not_end_the_next_drain(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await broker.receive(queue, 1, 30)
        link = link_of(broker, queue)
        server.control("drain", "0")

        async def drain_with_a_late_answer() -> tuple[bool, int]:
            await link.ask(10)
            draining = asyncio.ensure_future(link.drain())
            await asyncio.sleep(0)
            taken = (link._link.count + 7) % 2**32  # 7 of a leave given before
            await link._on_flow((None, None, None, None, None, taken, 3, None, None))
            await asyncio.sleep(0)
            left = draining.done(), link.credit
            link._link.count, link._link.credit = (
                taken - 7,
                10,
            )  # the look-alike knows nothing of it
            await control(server, "drain", "1")
            await draining
            return left

        assert await inside(broker, drain_with_a_late_answer()) == (False, 3)
        assert (link.credit, link.lost) == (0, None)


# --- a message that is begun, and aborted ---


def has_leave_again(link: ReceiveLink, began: int) -> bool:
    return link._link.count == began + 1 and link.credit == 1


async def test_an_aborted_message_is_none_and_takes_no_leave_from_the_next(server: ServiceBus, queue: str) -> None:
    """Its bytes are no message, nor the beginning of the next one; it has used leave, which is given anew."""
    async with opened(server.url) as broker:
        await broker.receive(queue, 1, 30)
        link = link_of(broker, queue)
        for body in ("a", "b"):
            began = link._link.count
            await inside(broker, link.ask(1))
            await until(lambda: server.control("credit", queue) == "1")
            assert server.control("abort", queue) == "1"
            await until(partial(has_leave_again, link, began))
            await until(lambda: server.control("credit", queue) == "1")
            await sent(broker, queue, body)
            await until(lambda: len(link.ready) == 1)
            assert (link.credit, len(link.unsettled)) == (0, 1)
            [got] = await received(broker, queue, 1)
            assert (got.id, got.delivery_count) == (body, 1)
            assert await broker.settle([Settlement(got, COMPLETE)]) == [Settled()]
        assert link.lost is None


async def test_an_aborted_message_ends_a_drain_as_any(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await broker.receive(queue, 1, 30)
        link = link_of(broker, queue)
        server.control("drain", "0")
        await inside(broker, link.ask(1))
        await until(lambda: server.control("credit", queue) == "1")
        draining = asyncio.ensure_future(inside(broker, link.drain()))
        await until(lambda: link.owes_answer)
        assert server.control("abort", queue) == "1"
        assert await draining
        assert (link.credit, link.ready) == (0, deque())


async def test_a_session_does_not_depend_on_an_answer_to_its_drain(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "DRAIN_MAX", 0.1)
    async with opened(server.url) as broker:
        await sent(broker, queue, "a", "b", session="s")
        lock = await broker.accept(queue, "s", 30)
        assert isinstance(lock, SessionLock)
        server.control("drain", "0")
        for expected in (["a", "b"], [], ["c"]):
            found: list[str] = []

            async def has_come(found: list[str] = found, count: int = len(expected)) -> bool:
                claim = await broker.receive_session(lock, 10)
                assert not isinstance(claim, Lapsed)
                found.extend(one.id for one in claim.deliveries)
                return len(found) >= count

            await until(has_come)
            assert found == expected
            if not expected:
                await sent(broker, queue, "c", session="s")
        server.control("drain", "1")
        assert await broker.release(lock) == Settled()


# --- management that is away ---


@pytest.mark.parametrize("how", ["refuse", "stall"])
async def test_messages_are_handled_while_management_is_down(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with proxied(server, "&timeout=2") as way:
        broker = way.broker
        await sent(broker, queue, "a", "b", "c")
        one, two, three = await received(broker, queue, 3)
        if how == "refuse":
            way.admin.reset()
            way.admin.refuse()
        else:
            way.admin.stall()

        def is_to_read_the_settings_again() -> None:
            way.clock.by += places.SETTINGS_KEPT + 1  # on this side alone: the locks last

        is_to_read_the_settings_again()
        assert [type(one) for one in await broker.renew([one, two, three], 30)] == [Renewed] * 3
        answers = await broker.settle(
            [Settlement(one, COMPLETE), Settlement(two, Abandon()), Settlement(three, Abandon(delay=600))]
        )
        assert list(answers) == [Settled()] * 3
        is_to_read_the_settings_again()
        [again] = await received(broker, queue, 1)
        assert (again.id, again.delivery_count) == ("b", 2)
        is_to_read_the_settings_again()
        await sent(broker, queue, "d")


async def test_a_message_that_comes_back_gives_a_hint_though_nobody_has_claimed_since(
    server: ServiceBus, queue: str
) -> None:
    async with opened(server.url) as broker:
        hints = broker.hints(queue)
        assert (await broker.receive(queue, 5, 30)).deliveries == ()
        await until(lambda: link_of(broker, queue).credit == 1)
        await sent(broker, queue, "a")
        await until(lambda: link_of(broker, queue).ready)
        [one] = (await broker.receive(queue, 5, 30)).deliveries  # taken from what had come: no leave is left then
        while True:  # the hints so far
            try:
                await asyncio.wait_for(anext(hints), 0.02)
            except TimeoutError:
                break
        await broker.settle([Settlement(one, Abandon())])
        await asyncio.wait_for(anext(hints), 5)


async def test_more_messages_than_were_asked_for_anew_leave_no_leave(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        [one] = await received(broker, queue, 1)
        await broker.settle([Settlement(one, COMPLETE)])
        link = link_of(broker, queue)

        async def over() -> int:
            link._link.credit = -7  # as when nine come that were on their way, of two asked for since
            assert await link.drain()
            return link.credit

        assert await inside(broker, over()) == 0
        assert server.control("credit", queue) == "0"


async def test_an_empty_claim_says_that_there_may_be_more_while_a_drain_is_unanswered(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker:
        await broker.declare(queue, {})
        server.control("drain", "0")
        with monkeypatch.context() as patch:
            patch.setattr(feed, "DRAIN_MAX", 0.1)
            claim = await broker.receive(queue, 5, 30)
        assert (len(claim.deliveries), claim.due_in) == (0, 0.0)
        server.control("drain", "1")
        await until(lambda: not link_of(broker, queue).owes_answer)
        claim = await broker.receive(queue, 5, 30)
        assert (len(claim.deliveries), claim.due_in) == (0, None)


# --- connections ---


@pytest.mark.parametrize("verb", ["send", "renew", "settle"])
async def test_a_silent_connection_is_replaced(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(driver, "LISTEN", 0.05)
    async with proxied(server) as way:
        broker = way.broker
        await broker.declare(queue, {"lock": 60.0})
        await sent(broker, queue, "a")
        [one] = await received(broker, queue, 1)
        await broker.renew([one], 60)
        _give_up_soon(broker)
        way.amqp.stall_existing()

        async def is_answered() -> bool:
            try:
                if verb == "send":
                    await sent(broker, queue, "b")
                elif verb == "renew":
                    assert len(await broker.renew([one], 60)) == 1
                else:
                    # The first request may have been carried out.
                    assert list(await broker.settle([Settlement(one, COMPLETE)])) in ([Settled()], [LAPSED])
            except Unavailable:
                return False
            return True

        await until(is_answered, within=30)


async def test_a_reopening_that_hangs_does_not_block_the_queue(server: ServiceBus, queue: str) -> None:
    async with proxied(server, "&timeout=3") as way:
        broker = way.broker
        await sent(broker, queue, "a")
        [one] = await received(broker, queue, 1)
        await broker.settle([Settlement(one, COMPLETE)])
        hints = broker.hints(queue)
        await until(lambda: link_of(broker, queue).credit == 1)
        before = way.amqp.accepted
        way.amqp.lose_answers(by="stall")
        way.amqp.reset()
        await until(lambda: way.amqp.accepted > before)
        way.amqp.loss = None  # new ones work; those made meanwhile stay silent, as half-open ones do

        async def is_received() -> bool:
            with suppress(Unavailable):
                await sent(broker, queue, "b")
                return bool(await broker.receive(queue, 1, 30))
            return False

        await until(is_received, within=30)
        await hints.aclose()  # type: ignore[attr-defined]


async def test_cancelled_claims_cost_no_link_and_no_message(server: ServiceBus, queue: str) -> None:
    ids = {f"m{number}" for number in range(12)}
    async with proxied(server) as way, opened(server.url) as other:
        broker = way.broker
        await broker.receive(queue, 1, 30)
        link, line = link_of(broker, queue), broker._feeds.of(queue)
        way.amqp.delay(0.05)
        for moment in ("asked", "waiting", "come"):
            first = asyncio.ensure_future(broker.receive(queue, 10, 30))
            await until(lambda: line._claiming)
            second = asyncio.ensure_future(broker.receive(queue, 7, 30))
            if moment != "asked":
                await until(lambda: bool(line._turn._waiters))
            if moment == "come":
                await sent(other, queue, *sorted(ids))
                await until(lambda first=first: first.done() or link.ready)  # type: ignore[misc]
            first.cancel()
            with suppress(asyncio.CancelledError):
                claim = await first
                ids -= {one.id for one in claim.deliveries}  # it was not too late for this one
            ids -= {one.id for one in (await second).deliveries}
        way.amqp.heal()
        await until(lambda: not list(line._tasks))
        assert link_of(broker, queue) is link
        assert link.lost is None
        found = await received(other, queue, len(ids))
        assert {(one.id, one.delivery_count) for one in found} == {(one, 1) for one in ids}  # nothing stayed locked


async def test_a_claim_that_came_when_its_caller_had_given_up_is_given_back(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker, opened(server.url) as other:
        await broker.receive(queue, 1, 30)
        await sent(other, queue, "a")
        claiming = asyncio.ensure_future(broker.receive(queue, 1, 30))
        await asyncio.sleep(0)  # it has begun
        give_up = time.monotonic() + 10
        while not broker._receipts._held and time.monotonic() < give_up:
            time.sleep(0.001)  # this loop is busy; the library's thread goes on
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        [again] = await received(other, queue, 1)
        assert (again.id, again.delivery_count) == ("a", 1)


async def test_a_request_under_way_at_close_is_not_answered(server: ServiceBus, queue: str) -> None:
    async with proxied(server) as way:
        await way.broker.declare(queue, {})
        way.admin.holding = held = asyncio.Event()
        asking = asyncio.ensure_future(way.broker.settings(queue))
        await asyncio.wait_for(held.wait(), 10)
        await way.backend.close()
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(asking, 10)


# --- claims ---


async def test_a_claim_ends_at_its_bytes(server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CLAIM_BYTES", 5_000)
    async with opened(server.url) as broker:
        await broker.receive(queue, 1, 30)
        await broker.send(queue, [Outgoing(b"x" * 1_000, id=f"m{number}") for number in range(16)])
        found: set[str] = set()

        async def is_complete() -> bool:
            claim = await broker.receive(queue, 16, 30)
            assert len(claim.deliveries) <= 5
            found.update(one.id for one in claim.deliveries)
            return len(found) == 16

        await until(is_complete)


async def test_a_failing_request_keeps_no_deferred_message(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a", "b", "c", "d")
        found = await received(broker, queue, 4)
        await broker.settle([Settlement(one, Defer()) for one in found])
        numbers = [one.sequence for one in found]
        server.control("throttle", "1")
        with pytest.raises(Unavailable):
            await broker.receive_deferred(queue, numbers, 30)
        got = (await broker.receive_deferred(queue, numbers, 30)).deliveries
        assert {one.id for one in got} == {"a", "b", "c", "d"}


# --- sessions ---


async def test_a_session_that_gave_a_hint_is_free_when_its_listener_leaves(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HOLD", 30.0)
    async with opened(server.url) as broker, opened(server.url) as other:
        assert await broker.accept(queue, None, 30) == NoSession()
        hints = broker.hints(queue)
        await until(lambda: queue in broker._sessions._waiting)
        await sent(other, queue, "a", session="s")
        await until(lambda: queue in broker._sessions._ready)
        await hints.aclose()  # type: ignore[attr-defined]

        async def is_free() -> bool:
            return isinstance(await other.accept(queue, None, 30), SessionLock)

        await until(is_free)


async def test_hints_of_sessions_go_on_after_an_interruption(server: ServiceBus, queue: str) -> None:
    async with proxied(server) as way, opened(server.url) as other:
        broker = way.broker
        assert await broker.accept(queue, None, 30) == NoSession()
        hints = broker.hints(queue)
        await until(lambda: queue in broker._sessions._waiting and way.amqp.open)
        accepted = way.amqp.accepted
        way.amqp.reset()
        await until(lambda: way.amqp.accepted > accepted)
        await sent(other, queue, "a", session="s")
        async with asyncio.timeout(10):
            async for _ in hints:
                if isinstance(await broker.accept(queue, None, 30), SessionLock):
                    break
        await hints.aclose()  # type: ignore[attr-defined]


async def test_pauses_before_a_queue_of_sessions_begin_anew_after_an_outage(server: ServiceBus, queue: str) -> None:
    async with proxied(server) as way, opened(server.url) as other:
        assert await other.accept(queue, None, 30) == NoSession()
        for proxy in (way.amqp, way.admin):
            proxy.refuse()
        hints = way.broker.hints(queue)
        await until(lambda: way.broker._feeds.known(queue))
        pauses = way.broker._feeds.of(queue)._backoff
        await until(lambda: pauses._next > pauses._first)
        for proxy in (way.amqp, way.admin):
            proxy.heal()
        await until(lambda: queue in way.broker._sessions._waiting)
        await until(lambda: pauses._next == pauses._first)
        await hints.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", ["receive", "receive_deferred", "accept", "receive_session"])
async def test_an_answer_that_comes_as_its_caller_gives_up_is_given_back(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    session = "s" if step in ("accept", "receive_session") else None
    async with opened(server.url) as broker, opened(server.url) as other:
        await sent(other, queue, "a", "b", session=session)
        claim: Any
        match step:
            case "receive":
                claim = partial(broker.receive, queue, 2, 30)
            case "receive_deferred":
                deferred = await received(broker, queue, 2)
                await broker.settle([Settlement(one, Defer()) for one in deferred])
                claim = partial(broker.receive_deferred, queue, [one.sequence for one in deferred], 30)
            case "accept":
                claim = partial(broker.accept, queue, "s", 30)
            case _:
                lock = await broker.accept(queue, "s", 30)
                assert isinstance(lock, SessionLock)
                claim = partial(broker.receive_session, lock, 1)
        real, here = getattr(broker._claiming, step), asyncio.get_running_loop()
        given_up = threading.Event()

        def give_up() -> None:
            claiming.cancel()
            here.call_soon(given_up.set)  # once the cancellation has reached the request

        async def answered_as_the_caller_gives_up(*arguments: Any) -> Any:
            answer = await real(*arguments)
            here.call_soon_threadsafe(give_up)
            assert given_up.wait(5.0)
            return answer

        monkeypatch.setattr(broker._claiming, step, answered_as_the_caller_gives_up)
        claiming = asyncio.ensure_future(claim())
        with pytest.raises(asyncio.CancelledError):
            await claiming
        monkeypatch.setattr(broker._claiming, step, real)
        match step:
            case "receive":
                assert {one.id for one in await received(other, queue, 2)} == {"a", "b"}
            case "receive_deferred":

                async def is_deferred_again() -> bool:
                    return {one.id for one in (await claim()).deliveries} == {"a", "b"}

                await until(is_deferred_again)
            case "accept":
                await until(lambda: not broker._namespace._sessions)
                assert isinstance(await other.accept(queue, "s", 30), SessionLock)
            case _:
                assert [one.id for one in (await claim()).deliveries] == ["a"]
                assert [one.id for one in (await claim()).deliveries] == ["b"]


async def test_deferred_messages_that_came_before_their_claim_was_given_up_stay_deferred(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker, opened(server.url) as other:
        await sent(other, queue, "a", "b")
        deferred = await received(broker, queue, 2)
        await broker.settle([Settlement(one, Defer()) for one in deferred])
        sequences = [one.sequence for one in deferred]
        ask, asked = broker._namespace.ask, 0

        async def answered_once(path: Any, operation: str, body: Any, *arguments: Any) -> Any:
            nonlocal asked
            if operation != "receive-by-sequence-number":
                return await ask(path, operation, body, *arguments)
            asked += 1
            if asked > 1:
                await asyncio.get_running_loop().create_future()
            return await ask(path, operation, body, *arguments)

        monkeypatch.setattr(broker._namespace, "ask", answered_once)
        claiming = asyncio.ensure_future(broker.receive_deferred(queue, sequences, 30))
        await until(lambda: bool(broker._receipts._held))
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming

        async def are_deferred() -> bool:
            found = (await other.receive_deferred(queue, sequences, 30)).deliveries
            await other.settle([Settlement(one, GIVE_BACK) for one in found])
            return len(found) == 2

        await until(are_deferred)


async def test_a_session_keeps_its_order_after_a_claim_that_timed_out(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a", "b", "c", session="s")
        lock = await broker.accept(queue, "s", 30)
        assert isinstance(lock, SessionLock)
        held = broker._receipts.find_session(lock)
        assert held is not None
        drain = held.link.drain

        async def never(within: float) -> None:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(held.link, "drain", never)
        claiming = asyncio.ensure_future(broker.receive_session(lock, 1))
        await until(lambda: held.link.ready)
        claiming.cancel()
        with suppress(asyncio.CancelledError):
            await claiming
        monkeypatch.setattr(held.link, "drain", drain)
        found: list[str] = []

        async def is_complete() -> bool:
            claim = await broker.receive_session(lock, 1)
            assert not isinstance(claim, Lapsed)
            for one in claim.deliveries:
                found.append(one.id)
                await broker.settle([Settlement(one, COMPLETE)])
            return len(found) == 3

        await until(is_complete)
        assert found == ["a", "b", "c"]


# --- errors of the library ---


@pytest.mark.parametrize(
    "error", [AMQPConnectionError(ErrorCondition.SocketError, description="not open"), ValueError("closed")]
)
async def test_errors_of_the_library_do_not_reach_callers(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        [one] = await received(broker, queue, 1)

        async def fails(*arguments: Any, **options: Any) -> None:
            raise error

        link = link_of(broker, queue)
        sender: Any = await inside(broker, broker._namespace.sender(queue))
        monkeypatch.setattr(link._wire, "settle", fails)
        monkeypatch.setattr(link._link._link, "flow", fails)
        monkeypatch.setattr(sender._link._link, "send_transfer", fails)
        verbs: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: broker.settle([Settlement(one, COMPLETE)]),
            lambda: broker.receive(queue, 1, 30),
            lambda: sent(broker, queue, "b"),
        ]
        for verb in verbs:
            with pytest.raises(Unavailable):
                await verb()


class _Load:
    """Senders and workers, while connections are lost."""

    def __init__(self, way: Way, queue: str, total: int) -> None:
        self._way, self._queue, self._total = way, queue, total
        self._random = random.Random(7)
        self.sent: set[str] = set()
        self.handled: set[str] = set()

    async def send(self, prefix: str) -> None:
        for number in range(self._total):
            id_ = f"{prefix}{number}"

            async def is_sent(id_: str = id_) -> bool:
                with suppress(Unavailable):
                    await self._way.broker.send(
                        self._queue, [Outgoing(b"x" * self._random.choice([10, 5_000]), id=id_)]
                    )
                    return True
                return False

            await until(is_sent, within=30)
            self.sent.add(id_)

    async def work(self, until_done: Callable[[], bool]) -> None:
        """Handle messages; what is not answered is asked again, as a consumer does."""
        broker = self._way.broker
        while not until_done():
            with suppress(Unavailable):
                claim = await broker.receive(self._queue, self._random.randint(1, 8), 60)
                if not claim.deliveries:
                    await asyncio.sleep(0.01)
                    continue
                verdicts: list[Verdict] = [COMPLETE, COMPLETE, GIVE_BACK, Abandon()]
                left = [Settlement(one, self._random.choice(verdicts)) for one in claim.deliveries]
                self.handled.update(one.delivery.id for one in left if one.verdict is COMPLETE)
                with suppress(Unavailable):
                    await broker.renew(claim.deliveries, 60)
                await broker.settle(left)

    async def look(self, until_done: Callable[[], bool]) -> None:
        while not until_done():
            with suppress(Unavailable):
                await self._way.broker.stats(self._queue)
                await self._way.broker.peek(self._queue, EVERY_LIVE, 5)
            await asyncio.sleep(0.02)

    def _is_at(self, progress: int, until_done: Callable[[], bool]) -> bool:
        return until_done() or self._progress >= progress

    @property
    def _progress(self) -> int:
        return len(self.sent) + len(self.handled)

    async def disturb(self, until_done: Callable[[], bool]) -> None:
        while not until_done():
            enough = self._progress + 8
            await until(partial(self._is_at, enough, until_done), within=30)
            what = self._random.choice(["close", "detach", "reset"])
            if what == "reset":
                self._way.amqp.reset()
            else:
                await control(self._way.server, what, self._queue if what == "detach" else "")


async def test_no_message_is_lost_with_connections_that_are(server: ServiceBus, queue: str) -> None:
    async with proxied(server, "&timeout=5") as way, asyncio.timeout(60):
        await way.broker.declare(queue, {"lock": 60.0, "max_deliveries": 1_000})
        load = _Load(way, queue, 60)

        def is_sent() -> bool:
            return len(load.sent) == 120

        await asyncio.gather(
            load.send("a"),
            load.send("b"),
            *(load.work(is_sent) for _ in range(3)),
            load.look(is_sent),
            load.disturb(is_sent),
        )
        await way.pass_time(61)  # no lock is left

        async def is_empty() -> bool:
            try:
                claim = await way.broker.receive(queue, 100, 60)
                load.handled.update(one.id for one in claim.deliveries)
                await way.broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
                return (await way.broker.stats(queue)).ready == 0
            except Unavailable:  # the last disturbance may be noticed only now
                await way.pass_time(61)
                return False

        await until(is_empty)
        assert load.handled >= load.sent
        stats = await way.broker.stats(queue)
        assert (stats.ready, stats.locked, stats.dead) == (0, 0, 0)
