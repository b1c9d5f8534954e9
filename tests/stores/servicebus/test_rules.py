"""Service Bus where it refuses, or has rules of its own: rights, batches, entities, locks that end, large messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.exceptions import ServiceRequestError

from tenure._backends.servicebus import feed, links, removal
from tenure._backends.servicebus.address import address_of
from tenure._backends.servicebus.driver import Refused
from tenure._backends.servicebus.message_format import outgoing
from tenure._backends.servicebus.queue import ServiceBusBroker
from tenure._backends.servicebus.sending import ROOM
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, LiveSelection, NoSession, Selection
from tenure._queue.failures import Failure
from tenure._queue.message import MAX_DELIVERIES, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    LAPSED,
    Abandon,
    DeadLetter,
    Settled,
    Settlement,
)
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable
from tenure.testing import until
from tests.durations import PATIENCE
from tests.servers import ServiceBus
from tests.stores.servicebus.opened import (
    buried,
    control,
    create_topic,
    inside,
    look_shortly,
    opened,
    proxied,
    received,
    sent,
    without_manage,
)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    look_shortly(monkeypatch)


# --- rights ---


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_subscription_is_found_without_manage(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    await create_topic(server, queue, "first")
    async with opened(server.url) as all_rights, opened(without_manage(server, monkeypatch)) as broker:
        ask = broker._namespace.ask

        async def refuses_a_queue(path: Any, operation: str, *rest: Any) -> Any:
            if path.subscription is None:  # as where the login is for the subscription alone
                raise Refused("com.microsoft:auth-failed", "Unauthorized")
            return await ask(path, operation, *rest)

        if is_refused:
            monkeypatch.setattr(broker._namespace, "ask", refuses_a_queue)
        await sent(all_rights, queue, "a")
        [message] = await received(broker, f"{queue}/first", 1)
        assert list(await broker.settle([Settlement(message, COMPLETE)])) == [Settled()]


async def test_a_missing_queue_is_no_lack_of_rights(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(without_manage(server, monkeypatch)) as broker:
        for missing in (queue, f"{queue}/first"):
            with pytest.raises(ConfigError, match="has no queue"):
                await sent(broker, missing, "a")
            with pytest.raises(ConfigError, match="has no queue"):
                await broker.receive(missing, 1, 30)


async def test_without_manage_the_service_decides_when_a_message_dies(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as all_rights:
        await all_rights.declare(queue, {"max_deliveries": 50})
        await sent(all_rights, queue, "a")
    async with opened(without_manage(server, monkeypatch)) as broker:
        for number in range(1, 13):
            [one] = await received(broker, queue, 1)
            assert one.delivery_count == number
            assert list(await broker.settle([Settlement(one, Abandon())])) == [Settled()]
        stats = await broker.stats(queue)
        assert (stats.ready, stats.dead) == (1, 0)


async def test_the_url_says_when_a_message_dies(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as all_rights:
        await all_rights.declare(queue, {"max_deliveries": 50})
        await sent(all_rights, queue, "a")
    async with opened(without_manage(server, monkeypatch, "&max_deliveries=2")) as broker:
        for is_last in (False, True):
            [one] = await received(broker, queue, 1)
            assert list(await broker.settle([Settlement(one, Abandon())])) == [Settled(dead=is_last)]
        [dead] = await broker.peek_dead(queue, EVERYTHING, 10)
        assert (dead.id, dead.reason) == ("a", MAX_DELIVERIES)


@pytest.mark.parametrize("value", ["0", "2001", "-1", "1.5", "many"])
def test_wrong_numbers_of_deliveries_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"max_deliveries'? must be"):
        address_of(Url.parse(f"servicebus://namespace?max_deliveries={value}"), {})


async def test_a_queue_with_sessions_is_not_reconnected_to_for_ever(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as all_rights:
        await sent(all_rights, queue, "a", session="s")
        async with opened(without_manage(server, monkeypatch)) as broker:
            hints = broker.hints(queue)
            listening = broker._feeds.of(queue)
            await until(lambda: queue in broker._sessions._waiting or queue in broker._sessions._ready)
            await until(lambda: not list(listening._tasks))
            assert listening._opening is None  # nothing is left that would connect
            await asyncio.wait_for(anext(hints), 10)
            assert isinstance(await broker.accept(queue, None, 30), SessionLock)
            await hints.aclose()  # type: ignore[attr-defined]


# --- batches ---


async def test_a_partitioned_queue_gets_its_messages_one_by_one(server: ServiceBus, queue: str) -> None:
    server.control("partition", queue)
    ids = [f"m{number}" for number in range(6)]
    async with opened(server.url) as broker:
        for _ in range(2):  # the first time, that is found out
            await sent(broker, queue, *ids)
            found = await received(broker, queue, 6)
            assert [one.id for one in found] == ids
            delayed, buried = found[:3], found[3:]
            answers = await broker.settle(
                [Settlement(one, Abandon(delay=600)) for one in delayed]
                + [Settlement(one, DeadLetter("bad", "")) for one in buried]
            )
            assert list(answers) == [Settled()] * 6
            assert await broker.redrive(queue, EVERYTHING, None) == 3
            shown = await broker.peek(queue, EVERY_LIVE, 10)
            assert [one.id for one in shown if one.state == "ready"] == ids[3:]
            assert sorted(one.id for one in shown if one.state == "delayed") == ids[:3]
            assert await broker.purge_live(queue, EVERY_LIVE) == 6
            ids = [f"{one}-again" for one in ids]


@pytest.mark.parametrize("is_partitioned", [False, True])
async def test_a_redrive_that_is_refused_on_its_way_leaves_no_duplicates(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, is_partitioned: bool
) -> None:
    monkeypatch.setattr(links.SendLink, "batch_max", 4_096)  # two messages
    async with opened(server.url) as broker:
        await broker.send(queue, [Outgoing(b"x" * 1_000, id=f"m{number}") for number in range(4)])
        for one in await received(broker, queue, 4):
            await broker.settle([Settlement(one, DeadLetter("bad", ""))])
        if is_partitioned:
            server.control("partition", queue)
        link = await inside(broker, broker._namespace.sender(queue))
        send, size, number = link.send, 1 if is_partitioned else 2, 0

        async def refuses_the_second(messages: Any) -> None:
            nonlocal number
            number += len(messages) == size
            if len(messages) == size and number == 2:
                raise Refused("com.microsoft:server-busy", "throttled")
            await send(messages)

        monkeypatch.setattr(link, "send", refuses_the_second)
        with pytest.raises(Unavailable, match="busy"):
            await broker.redrive(queue, EVERYTHING, None)
        moved = 4 - (await broker.stats(queue)).dead
        assert await broker.redrive(queue, EVERYTHING, None) == 4 - moved
        assert sorted(one.id for one in await broker.peek(queue, EVERY_LIVE, 10)) == ["m0", "m1", "m2", "m3"]
        assert (await broker.stats(queue)).dead == 0


# --- entities that are created, or decided about ---


async def test_a_creation_beside_another_is_tried_again(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        server.control("conflicts", "2")
        await sent(broker, queue, "a")
        assert [one.id for one in await received(broker, queue, 1)] == ["a"]


async def test_a_declared_queue_with_messages_is_not_deleted(server: ServiceBus, queue: str) -> None:
    plain = server.url.replace("&create=yes", "")
    async with opened(server.url) as broker, opened(plain) as sender, opened(server.url) as other:
        await broker.declare(queue, {"lock": 30.0})
        await sent(sender, queue, "a", "b")
        with pytest.raises(ConfigError, match="not require sessions"):
            await other.accept(queue, None, 30)
        assert {one.id for one in await received(broker, queue, 2)} == {"a", "b"}


async def test_a_declared_queue_whose_messages_are_dead_is_not_deleted(server: ServiceBus, queue: str) -> None:
    plain = server.url.replace("&create=yes", "")
    async with opened(server.url) as broker, opened(plain) as sender:
        await broker.declare(queue, {"lock": 30.0})
        await buried(sender, queue, "a")
        with pytest.raises(ConfigError, match="not require sessions"):
            await broker.accept(queue, None, 30)
        assert (await broker.stats(queue)).dead == 1


async def test_a_declared_queue_without_messages_can_have_sessions(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await broker.declare(queue, {"lock": 45.0, "max_deliveries": 3})
        assert await broker.accept(queue, None, 30) == NoSession()
        settings = await broker.settings(queue)
        assert (settings.lock, settings.max_deliveries) == (45.0, 3)
        await sent(broker, queue, "a", session="s")
        assert isinstance(await broker.accept(queue, "s", 30), SessionLock)


async def test_a_setting_that_a_late_writer_undoes_can_be_declared_again(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entities are written as a whole: what is noted as declared must come from the read that the values come from."""
    has_read, may_write, has_written = threading.Event(), threading.Event(), threading.Event()
    async with opened(server.url) as early, opened(server.url) as late, opened(server.url) as last:
        await sent(early, queue, "a")
        client: Any = late._administration._here()
        write, update = client.update_queue, last._administration.update

        async def writes_late(found: Any) -> None:
            has_read.set()
            await asyncio.to_thread(may_write.wait, PATIENCE)
            await write(found)
            has_written.set()

        async def update_after_it(*arguments: Any) -> bool:
            may_write.set()
            await asyncio.to_thread(has_written.wait, PATIENCE)
            return await update(*arguments)

        monkeypatch.setattr(client, "update_queue", writes_late)
        monkeypatch.setattr(last._administration, "update", update_after_it)
        undoing = asyncio.ensure_future(late.declare(queue, {"lock": 45.0}, only_undeclared=True))
        await until(has_read.is_set)
        assert (await early.declare(queue, {"max_deliveries": 7}, only_undeclared=True)).max_deliveries == 7
        await last.declare(queue, {"body_max": 10}, only_undeclared=True)
        await undoing
        holds = await early.declare(queue, {"max_deliveries": 7}, only_undeclared=True)
        assert (holds.lock, holds.max_deliveries, holds.body_max) == (45.0, 7, 10)


async def test_several_processes_make_a_queue_anew_once(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    async with opened(server.url) as first, opened(server.url) as second, opened(server.url) as third:
        await first.declare(queue, {"lock": 45.0, "max_deliveries": 3})
        for broker in (first, second, third):
            create = broker._administration.create

            async def counted(entity: str, options: Any, create: Any = create) -> bool:
                is_new = bool(await create(entity, options))
                created.extend([entity] * is_new)
                return is_new

            monkeypatch.setattr(broker._administration, "create", counted)

        async def uses(broker: ServiceBusBroker, name: str) -> None:
            assert isinstance(await broker.accept(queue, name, 30), SessionLock)
            await sent(broker, queue, name, session=name)

        await asyncio.gather(uses(first, "a"), uses(second, "b"), uses(third, "c"))
        assert created == [queue]
        assert (await first.stats(queue)).ready == 3
        settings = await first.settings(queue)
        assert (settings.lock, settings.max_deliveries) == (45.0, 3)


async def test_a_queue_that_is_made_anew_keeps_its_settings_while_its_name_is_not_free(
    server: ServiceBus, queue: str
) -> None:
    async with opened(server.url) as broker:
        await broker.declare(queue, {"lock": 45.0, "max_deliveries": 3})
        await control(server, "conflicts", "2")
        assert await broker.accept(queue, None, 30) == NoSession()
        settings = await broker.settings(queue)
        assert (settings.lock, settings.max_deliveries) == (45.0, 3)


async def test_a_queue_can_be_sent_to_again_if_making_it_anew_fails(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker, opened(server.url.replace("&create=yes", "")) as sender:
        await broker.declare(queue, {"lock": 30.0})

        async def fails(path: Any) -> None:
            raise ServiceRequestError("the network is away")

        with monkeypatch.context() as patch:
            patch.setattr(broker._administration, "delete", fails)
            with pytest.raises(Unavailable):
                await broker.accept(queue, None, 30)
        await sent(sender, queue, "a")


async def test_nothing_is_sent_to_a_queue_while_it_is_made_anew(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker, opened(server.url.replace("&create=yes", "")) as sender:
        await broker.declare(queue, {"lock": 30.0})
        delete = broker._administration.delete
        refusals: list[TenureError] = []

        async def sends_before(path: Any) -> None:
            try:
                await sent(sender, queue, "a")
            except TenureError as error:
                refusals.append(error)
            await delete(path)

        monkeypatch.setattr(broker._administration, "delete", sends_before)
        assert await broker.accept(queue, None, 30) == NoSession()
        assert len(refusals) == 1  # so its sender knows
        assert isinstance(refusals[0], Unavailable)  # and tries again


# --- locks that end on the way ---


@pytest.mark.parametrize("act", ["purge", "redrive"])
async def test_a_long_scan_keeps_the_locks_of_what_it_does_not_take(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    monkeypatch.setattr(removal, "ROUND", 2)
    monkeypatch.setattr(feed, "FIRST_LOOK", 0.5)
    ids = [f"m{number:02}" for number in range(12)]
    async with proxied(server) as way:
        await way.broker.declare(queue, {"lock": 5.0, "max_deliveries": 2})
        await (sent if act == "purge" else buried)(way.broker, queue, *ids)
        monkeypatch.setattr(removal, "time", SimpleNamespace(monotonic=way.clock.now))
        claim, rounds = feed.Feed.claim, 0

        async def takes_two_seconds(*arguments: Any, **options: Any) -> feed.Taken:
            nonlocal rounds
            rounds += 1
            taken = await claim(*arguments, **options)
            await way.pass_time(2.0)
            return taken

        monkeypatch.setattr(feed.Feed, "claim", takes_two_seconds)
        if act == "purge":
            assert await way.broker.purge_live(queue, LiveSelection(ids=frozenset(["m11"]))) == 1
        else:
            assert await way.broker.redrive(queue, Selection(ids=frozenset(["m11"])), None) == 1
        assert rounds * 2.0 > 2 * 5.0
        shown = {one.id: one.delivery_count for one in await way.broker.peek(queue, EVERY_LIVE, 20)}
        dead = {one.id for one in await way.broker.peek_dead(queue, EVERYTHING, 20)}
        if act == "purge":
            assert (shown, dead) == (dict.fromkeys(ids[:11], 0), set())
        else:
            assert (shown, dead) == ({"m11": 0}, set(ids[:11]))


async def test_a_late_retry_leaves_no_copy(server: ServiceBus, queue: str) -> None:
    async with proxied(server) as way:
        await way.broker.declare(queue, {"lock": 5.0})
        await sent(way.broker, queue, "a")
        [late] = await received(way.broker, queue, 1)
        await way.pass_time(6)
        [again] = await received(way.broker, queue, 1)
        assert list(await way.broker.settle([Settlement(late, Abandon(delay=600))])) == [LAPSED]
        assert list(await way.broker.settle([Settlement(again, COMPLETE)])) == [Settled()]
        assert await way.broker.peek(queue, EVERY_LIVE, 10) == []


async def test_a_retry_that_is_asked_for_again_leaves_one_copy(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        [one] = await received(broker, queue, 1)
        send = broker._sending.send

        async def then_throttles(*arguments: Any, **options: Any) -> None:
            await send(*arguments, **options)
            await control(server, "throttle", "1")  # the verdict

        monkeypatch.setattr(broker._sending, "send", then_throttles)
        for _ in range(2):
            with pytest.raises(Unavailable, match="busy"):
                await broker.settle([Settlement(one, Abandon(delay=600))])
            await control(server, "throttle", "1")
        await control(server, "throttle", "0")
        assert list(await broker.settle([Settlement(one, Abandon(delay=600))])) == [Settled()]
        [copy] = await broker.peek(queue, EVERY_LIVE, 10)
        assert (copy.id, copy.state, copy.delivery_count) == ("a", "delayed", 1)


async def test_deliveries_that_lapsed_are_forgotten(server: ServiceBus, queue: str) -> None:
    async with proxied(server) as way:
        await way.broker.declare(queue, {"lock": 5.0, "max_deliveries": 1_000})
        await sent(way.broker, queue, "a", "b", "c")
        for _ in range(4):
            await received(way.broker, queue, 3)
            await way.pass_time(700)
        assert len(way.broker._receipts._held) == 3
        assert (await way.broker.stats(queue)).locked == 0


# --- retries ---


async def test_many_retries_are_passed_at_once(server: ServiceBus, queue: str) -> None:
    async with proxied(server, "&timeout=5") as way:
        ids = [f"m{number}" for number in range(40)]
        await way.broker.declare(queue, {"lock": 60.0})
        await sent(way.broker, queue, *ids)
        found = await received(way.broker, queue, 40)
        way.admin.delay(0.15)
        way.amqp.delay(0.03)
        answers = await way.broker.settle([Settlement(one, Abandon(delay=600)) for one in found])
        assert list(answers) == [Settled()] * 40
        way.admin.heal()
        way.amqp.heal()
        assert (await way.broker.stats(queue)).delayed == 40


@pytest.mark.parametrize(("room", "state"), [(5_000, "delayed"), (0, "ready")])
async def test_a_message_too_large_for_its_history_is_retried_without(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, room: int, state: str
) -> None:
    """Without its delay, too, if there is no room even for the count of its deliveries."""
    size = 262_144 - ROOM - room - (len(outgoing(Outgoing(b"x" * 1_000, id="large"), 0).data) - 1_000)
    async with opened(server.url) as broker:
        await broker.send(queue, [Outgoing(b"x" * size, id="large"), Outgoing(b"y", id="small")])
        monkeypatch.setattr(links.SendLink, "size_max", 262_144)  # the Standard tier, after a larger one
        large, small = sorted(await received(broker, queue, 2), key=lambda one: one.id)
        error = Failure("RuntimeError", "boom", "in the handler\n" * 1_000)
        answers = await broker.settle([Settlement(large, Abandon(delay=600, error=error)), Settlement(small, COMPLETE)])
        assert list(answers) == [Settled()] * 2
        [left] = await broker.peek(queue, EVERY_LIVE, 10)
        assert (left.id, left.state, left.delivery_count, len(left.body)) == ("large", state, 1, size)


async def test_a_queue_that_is_deleted_during_a_listing_hides_no_other(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = [
        [f"q{number:03}" for number in range(101) if number != 100],  # the first was deleted between two pages
        [f"q{number:03}" for number in range(1, 101)],
        [f"q{number:03}" for number in range(1, 101)],
    ]
    left = iter(listings)

    async def listed() -> AsyncIterator[SimpleNamespace]:
        for one in next(left):
            yield SimpleNamespace(name=one, user_metadata=None)

    async with opened(server.url) as broker:
        await broker.names()  # it is connected
        here = SimpleNamespace(list_queues=listed)
        monkeypatch.setattr(broker._administration, "_here", lambda: here)
        assert "q100" in await broker.names()
        assert next(left, None) is None
