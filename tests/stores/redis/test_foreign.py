"""Keys of Redis that another program has changed, added or deleted. Edits of one message or lease: see the suites."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
from redis import asyncio as aioredis
from redis.asyncio.client import PubSub

import tenure
from tenure._backends import redis
from tenure._backends.redis import wake
from tenure._backends.redis.leases import _held, _renewed, _seen
from tenure._backends.redis.message_format import claim_of, deaths_of, deliveries_of, live_message, seconds_of
from tenure._backends.redis.settings import settings_of
from tenure._backends.redis.tokens import holder_of
from tenure._checks import LONGEST
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Vacant
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Claim, NoSession, Selection
from tenure._queue.checks import COUNT_MAX
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import HISTORY_MAX, Attempt, Delivery, Died, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, Complete, DeadLetter, Settled, Settlement
from tenure._url import Url
from tenure.errors import ConfigError
from tenure.events import CampaignFailed, Event, StandingBy
from tests.durations import until
from tests.servers import Redis, patient, url_of
from tests.stores.rights import TTL, acting, lead, refused

LOCK = 3_600.0  # nothing here waits for its end, and no test takes as long


class Server:
    """A queue and leases on a server, and the hand of another program."""

    def __init__(self, backend: redis.RedisBackend, native: aioredis.Redis, name: str) -> None:
        self.backend = backend
        self.broker = backend.broker
        self.leases = backend.leases
        self.native = native
        self.queue = name
        self.base: str = self.broker._scripts.base(name)

    async def send(self, *bodies: bytes, **fields: Any) -> None:
        await self.broker.send(self.queue, [Outgoing(body, **fields) for body in bodies])

    async def receive(self, limit: int = 10) -> list[Delivery]:
        return list((await self.broker.receive(self.queue, limit, LOCK)).deliveries)

    async def set(self, part: str, sequence: int, value: str) -> None:
        await self.native.hset(f"{self.base}{part}", str(sequence), value)

    async def place(self, place: str, **members: float) -> None:
        await self.native.zadd(f"{self.base}{place}", members)

    async def forget(self, *sequences: int) -> None:
        """Delete messages, but not their places."""
        for part in ("state", "body", "head"):
            await self.native.hdel(f"{self.base}{part}", *map(str, sequences))


@pytest.fixture
async def server(name: str) -> AsyncIterator[Server]:
    url = url_of(Redis)
    backend, native = redis.open(Url.parse(patient(url))), aioredis.Redis.from_url(url)
    try:
        yield Server(backend, native, name)
    finally:
        await native.aclose()
        await backend.close()


def bodies(deliveries: Iterable[Any]) -> list[bytes]:
    return [one.body for one in deliveries]


# --- answers of the scripts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (b"2|1500|3|0|q||s", (2, 1.5, 3, "s")),
        (None, (0, 0.0, 0, None)),
        (b"", (0, 0.0, 0, None)),
        (b"1|2", (0, 0.0, 0, None)),
        (b"a|b|c|d|q||", (0, 0.0, 0, None)),
        (b"9" * 5_000 + b"|0|0|0|q||", (0, 0.0, 0, None)),
        (b"9" * 30 + b"|" + b"9" * 400 + b"|0|0|q||", (0, 0.0, 0, None)),
        (b"9" * 30 + b"|" + b"9" * 30 + b"|77|0|q||", (COUNT_MAX, LONGEST, 9, None)),
        (b"-1|-1|-1|0|q||", (0, 0.0, 0, None)),
        (b"1|1000|0|0|q||\xff", (0, 0.0, 0, None)),
    ],
)
def test_a_row_is_read_as_far_as_it_can_be(state: bytes | None, expected: tuple[object, ...]) -> None:
    usual = b"1|1000|0|0|q||"
    contents = [[b"1", b"2", b"3"], [usual, state, usual], [None] * 3, [b"a", None, b"c"]]
    first, edited, last = deliveries_of("q", "token", 5.0, contents)
    assert (first.body, edited.body, last.body) == (b"a", b"", b"c")
    assert (edited.delivery_count, edited.enqueued_at, edited.priority, edited.session) == expected
    live_message(edited, b"" if state is None else state, b"l", 5)


@pytest.mark.parametrize("head", [b"[", b"[" * 100_000, b"7", b"\xff", b"[]", b'[7, [1], {}, ["x"]]', b'["\\ud800"]'])
def test_a_head_that_is_unreadable_is_ignored(head: bytes) -> None:
    [one] = deliveries_of("q", "token", 5.0, [[b"1"], [b"1|1000|0|0|q||"], [head], [b"a"]])
    assert (one.id, one.headers, one.reply_to, one.correlation_id) == ("q--1", {}, None, None)


@pytest.mark.parametrize("death", [None, b"[", b"{}", b"[" * 100_000, b'[7, [], "soon"]', b"[]"])
def test_a_death_that_is_unreadable_has_a_reason_that_says_so(death: bytes | None) -> None:
    lines = b"\n".join([b"", b"1|2", b"x|1|expired|", b"9" * 5_000, b"1|5|expired|[", b"2|5000|abandoned|", b"\xff|||"])
    [one] = deliveries_of("q$dead", "", 0.0, [[b"1"], [b"1|1000|0|0|d||"], [], [b"a"], [death], [lines]])
    assert one.death is not None
    assert (one.death.reason, one.death.description, one.death.at) == ("unreadable", "", 0.0)
    assert one.death.history == (Attempt(1, 0.005, "expired"), Attempt(2, 5.0, "abandoned"))


def test_of_a_long_history_the_newest_attempts_are_read() -> None:
    lines = b"\n".join(b"%d|5|expired|" % number for number in range(1, 5_001))
    [one] = deliveries_of("q$dead", "", 0.0, [[b"1"], [b"1|1|0|0|d||"], [], [b"a"], [b'["r","",1]'], [lines]])
    assert one.death is not None
    assert [attempt.number for attempt in one.death.history] == list(range(5_001 - HISTORY_MAX, 5_001))


def test_deaths_that_are_unreadable_are_left_out() -> None:
    reported = [b"5|2|expired|named", b"x|2|expired|", b"", b"\xff|1|2|3", b"6|many|expired|", b"7"]
    assert deaths_of("q", reported) == [
        Died(5, "named", 2, "expired"),
        Died(6, "q--6", 0, "expired"),
        Died(7, "q--7", 0, "unreadable"),
    ]


def test_no_time_of_an_answer_is_longer_than_any_clock_takes() -> None:
    assert seconds_of(2**63 - 1) == LONGEST
    claim = claim_of("q", "token", [2**62, 2**62, [[], [], [], []], [], [], 0, 2**62])
    assert claim.due_in == LONGEST


@pytest.mark.parametrize("token", ["", "x", "x@", "x@soon@host:1", "x@nan@host:1", "x@1e300@host:1", "x@-1@host:1"])
def test_a_token_of_another_program_tells_no_time(token: str) -> None:
    assert holder_of(token)[1] is None


def test_settings_that_can_not_be_are_left_out() -> None:
    texts = {
        "lock": "nan",
        "max_deliveries": "many",
        "dedupe_window": "-1",
        "body_max": "9" * 5_000,
        "dead_retention": "inf",
        "max_locked": "1.5",
        "rate": "3/x",
        "session_rate": "5/60",
        "paused": "perhaps",
        "of a later version": "1",
    }
    found = settings_of({name.encode(): text.encode() for name, text in texts.items()})
    assert found == {"dead_retention": math.inf, "session_rate": (5, 60.0)}


@pytest.mark.parametrize("written", [b"", b"[", b"[" * 100_000, b"7", b'{"x": 1}', b"\xff"])
@pytest.mark.parametrize("token", [b"new", b"", b"9" * 5_000, b"-1"])
def test_a_holder_is_shown_whatever_its_record_holds(written: bytes, token: bytes) -> None:
    assert _held("a", [0, b"\xff", token, 2**63 - 1, written]) == HeldBy("a", "\ufffd", 0, LONGEST)
    assert _seen("a", [0, token, 2**63 - 1]) == Vacant("a", 0)


def test_a_lease_whose_keys_have_other_data_gives_no_answer_to_its_renewal() -> None:
    grants = [Grant("a", "ann#1", 1), Grant("b", "ann#1", 1), Grant("c", "ann#1", 1)]
    first, second, third = _renewed(grants, [1, -1, 0])
    assert (first, third) == (Granted(grants[0]), Lost(grants[2]))
    assert isinstance(second, NoAnswer)


async def test_no_message_of_a_channel_ends_the_subscription() -> None:
    subscriber = wake.Subscriber(wake.Wake(SimpleNamespace()), None)  # type: ignore[arg-type]
    subscriber.topics["queue"] = WeakSet()
    before = asyncio.get_running_loop().time()
    for data in (b"9" * 5_000, b"999999999999", b"-1", b"\xff", b"", [b"key"], None, 7, b"5"):
        for kind in ("message", "subscribe", "unsubscribe", "pong", "push"):
            for channel in (b"queue", b"__redis__:invalidate", b"\xff", None, [b"queue"]):
                subscriber._handle({"type": kind, "channel": channel, "data": data})
    assert list(subscriber._later) == ["queue"]
    timer = subscriber._later["queue"]
    subscriber.end()
    assert timer.when() - before < LOCK


async def test_keys_that_the_server_sends_for_another_client_end_no_subscription(server: Server) -> None:
    hints, more = server.broker.hints(server.queue), server.broker.hints(f"{server.queue}-2")
    subscriber, pubsub, address = await subscribed(server, hints)
    [told] = [one for one in await server.native.client_list() if one["addr"] == address]
    async with server.native.client() as other:
        tracking = ("CLIENT", "TRACKING", "ON", "REDIRECT", told["id"], "BCAST", "PREFIX", server.base)
        await other.execute_command(*tracking)  # type: ignore[no-untyped-call]
        await server.native.set(f"{server.base}another", "changed")
        await asyncio.wait_for(anext(more), 30)  # its answer comes behind the keys
        assert subscriber._pubsub is pubsub, "it went on"
        await other.execute_command("CLIENT", "TRACKING", "OFF")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("error", [AttributeError("it is None"), ValueError("it is no number"), RuntimeError("?")])
async def test_no_failure_of_the_driver_ends_the_hints(
    server: Server, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = server.broker.hints(server.queue)
    subscriber, pubsub, _ = await subscribed(server, hints)

    async def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pubsub, "get_message", failing)
    await server.send(b"a")  # what it waits for comes, and then the failure
    await until(lambda: subscriber._pubsub not in (None, pubsub))
    await asyncio.wait_for(anext(hints), 30)
    await server.send(b"b")
    await asyncio.wait_for(anext(hints), 30)


async def subscribed(server: Server, hints: AsyncIterator[object]) -> tuple[wake.Subscriber, PubSub, str]:
    """Subscribe, and return the subscriber, with its connection and the address of that at the server."""
    await asyncio.wait_for(anext(hints), 30)
    [subscriber] = server.backend._wake.here().values()
    pubsub = subscriber._pubsub
    assert pubsub is not None
    connection: Any = pubsub.connection
    host, port = connection._writer.get_extra_info("sockname")[:2]
    return subscriber, pubsub, f"{host}:{port}"


# --- places ------------------------------------------------------------------------------------------------------


async def test_an_entry_of_no_message_is_dropped_from_every_place(server: Server) -> None:
    await server.send(b"a")
    for place in ("ready", "delayed", "expiry", "locked", "deferred", "dead:ready", "dead:delayed", "dead:locked"):
        await server.place(place, **{"77": 1.0, "text": 2.0, "9" * 30: 3.0, "-5": 4.0})
    received = await server.receive()
    assert bodies(received) == [b"a"]
    assert (await server.broker.receive(dead_letters_of(server.queue), 10, LOCK)).deliveries == ()
    assert (await server.broker.receive_deferred(server.queue, [77], LOCK)).deliveries == ()
    assert (await server.broker.stats(server.queue)).ready == 0
    assert await server.broker.settle([Settlement(received[0], COMPLETE)]) == [Settled()]


async def test_many_entries_of_no_message_keep_back_none_behind_them(server: Server) -> None:
    await server.send(*[b"x"] * 500)
    await server.send(b"last")
    await server.forget(*range(1, 501))
    assert bodies(await server.receive()) == [b"last"]


async def test_a_message_without_its_row_is_handed_out(server: Server) -> None:
    await server.send(b"a", b"b", b"c")
    await server.native.hdel(f"{server.base}state", "2")
    await server.set("state", 3, "text")
    received = await server.receive()
    assert bodies(received) == [b"a", b"b", b"c"]
    assert [one.delivery_count for one in received] == [1, 1, 1]
    answers = await server.broker.settle([Settlement(one, Abandon()) for one in received])
    assert answers == [Settled()] * 3
    assert [one.delivery_count for one in await server.receive()] == [2, 2, 2]


async def test_a_lock_of_a_message_whose_row_is_unreadable_ends(server: Server) -> None:
    await server.send(b"a", b"b")
    await server.receive()
    await server.set("state", 1, "text")
    await server.place("locked", **{"1": 1.0, "2": 1.0})
    assert bodies(await server.receive()) == [b"a", b"b"]


async def test_a_queue_is_shown_and_purged_whatever_its_places_have(server: Server) -> None:
    await server.send(b"a", b"b")
    await server.send(b"c", delay=LOCK)
    for place in ("ready", "waiting", "delayed", "deferred", "locked"):
        await server.place(place, text=math.inf, **{"77": math.inf, "9" * 30: math.inf})
    assert bodies(await server.broker.peek(server.queue, EVERY_LIVE, 10)) == [b"a", b"b", b"c"]
    assert not await server.broker.peek_deferred(server.queue, 10)
    await server.native.set(f"{server.base}sequence", "3")
    assert await server.broker.purge_live(server.queue, EVERY_LIVE) == 3


async def test_a_listing_of_dead_letters_ends_whatever_their_scores_are(server: Server) -> None:
    await server.send(b"a", b"b", b"c")
    received = await server.receive()
    await server.broker.settle([Settlement(one, DeadLetter("because")) for one in received])
    await server.place("dead", **{"1": 1e12, "2": 2.5, "text": 2.7, "9" * 30: 9e30, "77": 1.0})
    await server.native.hdel(f"{server.base}death", "3")
    shown = await server.broker.peek_dead(server.queue, EVERYTHING, 10)
    assert sorted(bodies(shown)) == [b"a", b"b", b"c"]
    assert await server.broker.redrive(server.queue, EVERYTHING, None, dry_run=True) == 3
    assert await server.broker.redrive(server.queue, EVERYTHING, None) == 3
    assert sorted(bodies(await server.receive())) == [b"a", b"b", b"c"]


async def test_pages_of_unreadable_dead_letters_hide_none_behind_them(server: Server) -> None:
    """Three parts of a listing, and the last of a part is just before a letter."""
    await server.send(*[b"x"] * 300, b"good", b"last")
    received = [one for _ in range(4) for one in await server.receive(100)]
    await server.broker.settle([Settlement(one, DeadLetter("because")) for one in received])
    await server.forget(*range(1, 151))
    for sequence in range(151, 301):
        await server.set("death", sequence, "[")
    await server.native.zremrangebyscore(f"{server.base}dead", 1, 300 - 128)  # the first part is full
    await server.native.zrem(f"{server.base}dead", "300")
    await server.place("dead", text=300.5)
    only = Selection(ids=frozenset({received[300].id}))
    assert bodies(await server.broker.peek_dead(server.queue, only, 10)) == [b"good"]
    assert bodies(await server.broker.peek_dead(server.queue, Selection(reason="because"), 10)) == [b"good", b"last"]
    assert await server.broker.redrive(server.queue, only, None) == 1
    assert bodies(await server.receive()) == [b"good"]
    assert await server.broker.purge(server.queue, Selection(reason="because"), None) == 1


async def test_deleted_messages_of_a_session_hold_up_none_behind_them(server: Server) -> None:
    await server.send(b"a", b"b", b"c", session="s")
    held = await server.broker.accept(server.queue, None, LOCK)
    assert isinstance(held, SessionLock)
    claim = await server.broker.receive_session(held, 1)
    assert isinstance(claim, Claim)
    await server.broker.settle([Settlement(claim.deliveries[0], Abandon(delay=LOCK))])
    await server.forget(1, 2)
    await server.place("session:s", text=0.0)
    claim = await server.broker.receive_session(held, 10)
    assert isinstance(claim, Claim)
    assert bodies(claim.deliveries) == [b"c"]
    await server.broker.release(held)


async def test_a_session_whose_name_is_no_text_keeps_back_no_other(server: Server) -> None:
    await server.send(b"a", session="s")
    await server.native.zadd(f"{server.base}free", {b"\xff": 0.5})
    held = await server.broker.accept(server.queue, None, LOCK)
    assert isinstance(held, SessionLock)
    assert held.session == "s"
    assert isinstance(await server.broker.accept(server.queue, None, LOCK), NoSession)


# --- settings, logs, sequences -----------------------------------------------------------------------------------


async def test_settings_that_are_unreadable_lose_no_message(server: Server) -> None:
    await server.send(b"a", b"b")
    texts: dict[Any, Any] = {
        "max_deliveries": "nan",
        "body_max": "nan",
        "dedupe_window": "x",
        "rate": "3/x",
        "max_locked": "x",
    }
    await server.native.hset(f"{server.base}settings", mapping=texts)
    [first, second] = await server.receive()
    await server.broker.settle([Settlement(first, Abandon()), Settlement(second, Abandon())])
    await server.send(b"c", id="c")
    assert bodies(await server.receive()) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("log", ["1.2.3|4.5.6|7", "x", "9" * 400, "1|99999999999999|" + "9" * 400])
async def test_a_log_of_deliveries_that_is_unreadable_ends_no_claim(server: Server, log: str) -> None:
    await server.broker.declare(server.queue, {"rate": (5, 60.0)})
    await server.send(b"a")
    await server.native.set(f"{server.base}delivered", log)
    claim = await server.broker.receive(server.queue, 10, LOCK)
    assert bodies(claim.deliveries) == [b"a"] or claim.due_in is not None


async def test_lost_claims_that_are_unreadable_keep_back_none(server: Server) -> None:
    await server.send(b"a")
    with server.broker._receiving._claims(server.queue).asking(LOCK) as lost:
        pass  # without an answer
    await server.native.set(f"{server.base}claim:{lost.lane}", "|||")
    await server.native.set(f"{server.base}named:{lost.lane}", "[" * 100_000)
    await server.native.rpush(f"{server.base}untold", "text", b"\xff")
    assert bodies(await server.receive()) == [b"a"]


@pytest.mark.parametrize("sequence", ["text", "1.5", "9223372036854775807", "999999999999999"])
async def test_a_sequence_that_can_not_rise_is_named_and_nothing_is_lost(server: Server, sequence: str) -> None:
    await server.send(b"a", b"b")
    [first, second] = await server.receive()
    await server.broker.settle([Settlement(second, DeadLetter("because"))])
    other = f"{server.queue}-2"
    await server.native.set(f"{server.broker._scripts.base(other)}sequence", sequence)
    with pytest.raises(ConfigError, match="sequence"):
        await server.broker.send(other, [Outgoing(b"x", id="x")])
    with pytest.raises(ConfigError, match="sequence"):
        await server.broker.settle([Settlement(first, Complete(sends=((other, Outgoing(b"x")),)))])
    with pytest.raises(ConfigError, match="sequence"):
        await server.broker.redrive(server.queue, EVERYTHING, None, to=other)
    assert bodies(await server.broker.peek_dead(server.queue, EVERYTHING, 10)) == [b"b"]
    assert await server.broker.settle([Settlement(first, COMPLETE)]) == [Settled()]
    await server.native.delete(f"{server.broker._scripts.base(other)}sequence")
    await server.broker.send(other, [Outgoing(b"x", id="x")])
    assert (await server.broker.stats(other)).ready == 1, "the id of the refused one is not remembered"


async def test_a_history_that_is_long_is_cut_by_the_next_attempt(server: Server) -> None:
    await server.send(b"a")
    [held] = await server.receive()
    await server.set("history", held.sequence, "\n".join(["1|5|expired|"] * 5_000))
    await server.broker.settle([Settlement(held, Abandon())])
    kept: Any = await server.native.hget(f"{server.base}history", str(held.sequence))
    assert kept.count(b"\n") + 1 == HISTORY_MAX


# --- leases ------------------------------------------------------------------------------------------------------


async def test_other_data_under_a_key_costs_no_other_lease_its_renewal(server: Server) -> None:
    grants = []
    for name in ("a", "b", "c"):
        answer = await server.leases.acquire(f"{server.queue}-{name}", "ann#1", LOCK)
        assert isinstance(answer, Granted)
        grants.append(answer.grant)
    lock, _ = server.leases._keys(grants[0].name)
    _, term = server.leases._keys(grants[1].name)
    for key in (lock, term):
        await server.native.delete(key)
        await server.native.rpush(key, "other data")
    first, second, third = await server.leases.renew(grants, LOCK)
    assert isinstance(first, NoAnswer)
    assert isinstance(second, NoAnswer)
    assert third == Granted(grants[2])
    seen = await server.leases.inspect_many([grant.name for grant in grants])
    assert [type(one) for one in seen] == [HeldBy] * 3
    assert isinstance(seen[2], HeldBy)
    assert seen[2].holder == "ann#1"


@pytest.mark.parametrize("token", ["text", "9223372036854775807", "9" * 30, "-1", ""])
async def test_a_token_that_can_not_rise_names_the_lease(server: Server, token: str) -> None:
    _, term = server.leases._keys(server.queue)
    await server.native.hset(term, "token", token)
    with pytest.raises(ConfigError, match="token of the lease"):
        await server.leases.acquire(server.queue, "ann#1", LOCK)
    assert isinstance(await server.leases.inspect(server.queue), Vacant)
    assert await server.native.hget(term, "token") == token.encode()


async def never(term: tenure.Term) -> None:
    raise AssertionError("nobody leads with a token that can not rise")


async def test_a_campaign_for_a_token_that_can_not_rise_names_the_lease(server: Server) -> None:
    """One that begins then fails; one that was answered before goes on, as the token may be mended."""
    events: list[Event] = []
    lock, term = server.leases._keys(server.queue)
    async with (
        tenure.connect(patient(url_of(Redis)), on_event=events.append) as standing,
        acting(url_of(Redis)) as beginning,
    ):
        assert isinstance(await server.leases.acquire(server.queue, "ann#1", TTL), Granted)
        following = asyncio.create_task(standing.election(server.queue, ttl=TTL).run(never))
        await until(lambda: [one for one in events if isinstance(one, StandingBy)])
        await server.native.hset(term, "token", "9223372036854775807")
        await server.native.delete(lock)

        async def has_failed() -> bool:
            await server.native.publish(lock, "released")
            return any("token of the lease" in one.why for one in events if isinstance(one, CampaignFailed))

        await until(has_failed)
        assert not following.done()
        await refused(beginning, lambda backend: lead(backend, server.queue), "token of the lease", server.queue)
        following.cancel()
        await asyncio.wait([following])


async def test_a_high_token_keeps_all_its_digits(server: Server) -> None:
    _, term = server.leases._keys(server.queue)
    await server.native.hset(term, "token", "9223372036854775805")
    granted = await server.leases.acquire(server.queue, "ann#1", LOCK)
    assert isinstance(granted, Granted)
    assert granted.grant.token == 9223372036854775806
    assert await server.leases.renew([granted.grant], LOCK) == [granted]
