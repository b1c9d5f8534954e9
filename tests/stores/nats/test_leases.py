"""Leases in NATS alone: records, reports, deleted buckets, old answers, foreign buckets, rights, doctor's facts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from tenure._backends import nats
from tenure._backends.nats import leases as leases_module
from tenure._backends.nats import observations
from tenure._backends.nats.errors import NotPermitted
from tenure._backends.nats.lease_records import TTL_MIN, acquired, read, renewed
from tenure._backends.nats.leases import SERIALIZABLE
from tenure._backends.nats.names import WORD_MAX, name_by, short_word_of
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure._opened import Fact
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing._conformance.leases.following import following
from tenure.testing.faultproxy import FaultProxy
from tests.clocks import TurnedClock
from tests.explained import facts_by_name
from tests.servers import Authority, Nats, NatsCluster, private, shared

TTL = 10.0
PASSWORD = "s3cret"

Json = dict[str, Any]


@pytest.fixture
def server() -> Nats:
    return shared(Nats)


@pytest.fixture
def prefix(name: str) -> str:
    """Return a prefix that no other test uses, so that the bucket is this test's alone."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)[-60:]  # its end is the time


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()


@asynccontextmanager
async def opened(url: str, clock: TurnedClock | None = None) -> AsyncIterator[nats.NatsBackend]:
    backend = nats.open(Url.parse(url), clock=clock)
    try:
        yield backend
    finally:
        await backend.close()


def at(server: Nats, prefix: str, login: str = "", more: str = "") -> str:
    return server.url_as(login, f"prefix={prefix}{more}")


async def called(backend: nats.NatsBackend, path: str, body: Mapping[str, object] | None = None) -> Json:
    client = backend._client
    return await client.run(lambda connection: client.call(connection, path, body))


async def stored(backend: nats.NatsBackend, prefix: str, name: str) -> tuple[Json, int]:
    """Return what the key of an election holds, and its revision."""
    subject = f"$KV.{prefix}-leases.{short_word_of(name)}"
    found = await backend._client.run(lambda connection: backend.leases._last(connection, subject))
    assert found[1] is not None
    return json.loads(found[0]), found[1]


async def put(backend: nats.NatsBackend, prefix: str, key: str, body: bytes) -> None:
    client = backend._client
    await client.run(
        lambda connection: client.store(connection, f"KV_{prefix}-leases", f"$KV.{prefix}-leases.{key}", body)
    )


async def granted(backend: nats.NatsBackend, name: str, holder: str = "ann#1", ttl: float = TTL) -> Grant:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def refused(backend: nats.NatsBackend, name: str, holder: str = "bob#1", ttl: float = TTL) -> HeldBy:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, HeldBy), answer
    return answer


# --- the records -------------------------------------------------------------------------------------------------


async def test_the_token_is_the_revision_of_the_acquisition(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        await granted(backend, "another")
        answer = await backend.leases.acquire("orders/eu", "ann#1", TTL, {"url": "http://ann"})
        assert isinstance(answer, Granted)
        found, revision = await stored(backend, prefix, "orders/eu")
        assert answer.grant.token == revision == 2
        assert found.pop("stamp")
        assert found == {
            "name": "orders/eu",
            "holder": "ann#1",
            "write": "acquired",
            "token_above": 0,
            "ttl": TTL,
            "metadata": {"url": "http://ann"},
        }
        await backend.leases.renew([answer.grant], TTL)
        found, revision = await stored(backend, prefix, "orders/eu")
        assert (found["write"], found["token"], revision) == ("renewed", 2, 3)
        await backend.leases.release(answer.grant)
        found, revision = await stored(backend, prefix, "orders/eu")
        assert (found["write"], found["holder"], found["token"], revision) == ("released", "", 2, 4)


async def test_the_bucket_is_one_that_other_clients_can_read(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        await granted(backend, "orders/eu")
        config = (await called(backend, f"STREAM.INFO.KV_{prefix}-leases"))["config"]
        assert config["subjects"] == [f"$KV.{prefix}-leases.>"]
        assert (config["max_msgs_per_subject"], config["discard"], config["storage"]) == (1, "new", "file")
        assert not config["allow_rollup_hdrs"]  # unlike theirs
        assert config["deny_delete"]
        assert short_word_of("orders/eu") == "orders=2Feu"  # "%" and many others are not for keys


def test_long_names_have_short_keys() -> None:
    names = ["x" * WORD_MAX, "x" * (WORD_MAX + 1), "x" * (WORD_MAX + 2), "名" * 1_024, "名" * 1_023 + "x"]
    keys = [short_word_of(name) for name in names]
    assert len(set(keys)) == len(names)
    assert max(map(len, keys)) <= WORD_MAX
    assert [name_by(key) for key in keys] == [names[0], None, None, None, None]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"null", b"7", b'{"holder": "x"}'])
def test_other_text_is_no_record(body: bytes) -> None:
    assert read(body) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("holder", 7),
        ("stamp", None),
        ("write", "stolen"),
        ("write", ["acquired"]),
        ("token", None),
        ("token", "7"),
        ("ttl", 0),
        ("ttl", -1.0),
        ("ttl", float("inf")),
        ("ttl", "10"),
    ],
)
def test_a_record_with_an_impossible_field_is_none(field: str, value: object) -> None:
    good = {"name": "n", "holder": "ann#1", "write": "renewed", "token": 7, "ttl": 10, "stamp": "s"}
    assert read(json.dumps(good).encode()) is not None
    assert read(json.dumps(good | {field: value}).encode()) is None


@pytest.mark.parametrize("body", [b"leader: go-1", b'{"holder": "go-1"}'])
async def test_a_key_of_another_program_is_left_alone(server: Nats, prefix: str, body: bytes) -> None:
    async with opened(at(server, prefix)) as backend:
        await granted(backend, "ours")
        await put(backend, prefix, "theirs", body)
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: backend.leases.acquire("theirs", "ann#1", TTL),
            lambda: backend.leases.inspect("theirs"),
            lambda: backend.leases.ask_to_resign("theirs"),
        ]
        for ask in asked:
            with pytest.raises(ConfigError, match=f"holds no record of tenure.*nats kv del {prefix}-leases theirs"):
                await ask()
        await refused(backend, "ours")


# --- deleted keys and buckets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "purged"])
async def test_tokens_rise_over_a_deleted_key(server: Nats, prefix: str, how: str) -> None:
    async with opened(at(server, prefix)) as ann, opened(at(server, prefix)) as bob:
        old = await granted(ann, "job")
        subject = f"$KV.{prefix}-leases.job"
        if how == "deleted":  # as `nats kv del` does
            client, stream = bob._client, f"KV_{prefix}-leases"
            headers = {"KV-Operation": "DEL"}
            await client.run(lambda connection: client.store(connection, stream, subject, b"", headers))
        else:
            await called(bob, f"STREAM.PURGE.KV_{prefix}-leases", {"filter": subject})
        assert await ann.leases.inspect("job") == Vacant("job", old.token)
        assert await bob.leases.inspect("job") == Vacant("job", 0)  # it has never seen the record
        new = await granted(bob, "job", "bob#1")  # and still gets a higher token
        assert new.token > old.token
        assert list(await ann.leases.renew([old], TTL)) == [Lost(old)]
        assert await ann.leases.release(old) == Lost(old)


async def test_a_bucket_deleted_under_a_leader_does_not_lower_the_token(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as ann, opened(at(server, prefix)) as bob:
        for number in range(5):
            await ann.leases.release(await granted(ann, "job", f"ann#{number}"))
        old = await granted(ann, "job")
        await refused(bob, "job")  # bob has seen the token
        await called(ann, f"STREAM.DELETE.KV_{prefix}-leases")
        assert list(await ann.leases.renew([old], TTL)) == [Lost(old)]
        assert await bob.leases.inspect("job") == Vacant("job", old.token)
        new = await granted(bob, "job", "bob#1")
        found, revision = await stored(bob, prefix, "job")
        assert (new.token, revision, found["token_above"]) == (old.token + 1, 1, old.token)
        async with opened(at(server, prefix)) as carl:  # it reads the token in the record
            assert (await refused(carl, "job", "carl#1")).token == new.token
        assert list(await bob.leases.renew([new], TTL)) == [Granted(new)]


async def test_no_bucket_is_no_holder(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        assert await backend.leases.inspect("job") == Vacant("job", 0)
        assert await backend.leases.names() == []
        assert await backend.leases.ask_to_resign("job") is False
        grant = Grant("job", "ann#1", 3)
        assert list(await backend.leases.renew([grant], TTL)) == [Lost(grant)]
        assert await backend.leases.release(grant) == Lost(grant)


async def test_a_listener_to_everything_does_not_hide_that_there_is_no_bucket(
    server: Nats, prefix: str, clock: TurnedClock
) -> None:
    """A server says that nobody listens to a subject only if nobody does, as with ``nats sub '>'``."""
    async with opened(server.url) as tap, opened(at(server, prefix, more="&timeout=0.5"), clock) as backend:
        connection = await tap._client.connection()
        await connection.subscribe(">", lambda _: None)
        await connection.flush()
        old = await granted(backend, "job")
        await called(backend, f"STREAM.DELETE.KV_{prefix}-leases")
        clock.turned += TTL
        with pytest.raises(Unavailable):  # it is known, so it is written at once, and nobody answers
            await backend.leases.renew([old], TTL)
        assert (await granted(backend, "job", "bob#1")).token > old.token


# --- observed expiry, and reports --------------------------------------------------------------------------------


async def test_renewals_are_reported_so_that_the_end_is_known(server: Nats, prefix: str, clock: TurnedClock) -> None:
    async with opened(at(server, prefix), clock) as ann, opened(at(server, prefix), clock) as bob:
        grant = await granted(ann, "job")
        hints = bob.leases.hints("job")
        await anext(hints)
        await refused(bob, "job")
        clock.turned += TTL * 0.9
        await ann.leases.renew([grant], TTL)
        await until(lambda: bob.leases._observed.find("job") is None)  # in doubt, until the store has said the same
        clock.turned += TTL * 0.9
        left = (await refused(bob, "job")).remaining
        assert left is not None
        assert left <= TTL * 0.1  # counted from the report, not from this answer
        clock.turned += TTL * 0.1
        assert (await granted(bob, "job", "bob#1")).token > grant.token


async def test_a_request_to_resign_is_no_renewal(server: Nats, prefix: str, clock: TurnedClock) -> None:
    async with opened(at(server, prefix), clock) as ann, opened(at(server, prefix), clock) as bob:
        await granted(ann, "job")
        await refused(bob, "job")
        clock.turned += TTL * 0.9
        assert await bob.leases.ask_to_resign("job")
        clock.turned += TTL * 0.1
        await granted(bob, "job", "bob#1")


async def test_a_report_is_believed_about_nothing(server: Nats, prefix: str, clock: TurnedClock) -> None:
    """A forged one makes a follower ask the store; it ends no lease, lends no time, and changes no token."""
    async with opened(at(server, prefix), clock) as ann, opened(at(server, prefix), clock) as bob:
        grant = await granted(ann, "job")
        hints = bob.leases.hints("job")
        await anext(hints)
        await refused(bob, "job")
        found, revision = await stored(ann, prefix, "job")
        client = bob._client
        forged: list[Json] = [
            {"holder": "", "write": "released", "token": grant.token, "stamp": "a"},
            {"holder": "ann#1", "write": "renewed", "token": grant.token, "ttl": TTL_MIN, "stamp": "b"},
            {"holder": "eve#1", "write": "renewed", "token": 2**63 - 1, "stamp": "c"},
            {"holder": "bob#1", "write": "acquired", "token_above": 10**9, "stamp": "d"},
        ]
        for number, change in enumerate(forged):
            body = json.dumps(found | change).encode()
            headers = {"Nats-Sequence": str(revision + 1 + number)}  # what it is when ann has renewed
            connection = await client.connection()
            await connection.publish(f"{prefix}-leases.job", body, headers=headers)
            await until(lambda: bob.leases._observed.find("job") is None)
            await ann.leases.renew([grant], TTL)
            assert (await refused(bob, "job")).token == grant.token
        assert list(await ann.leases.renew([grant], TTL)) == [Granted(grant)]
        await (await client.connection()).flush()  # the report of this renewal would count from when it comes
        await refused(bob, "job")
        clock.turned += TTL
        assert (await granted(bob, "job", "bob#1")).token < 10**9


async def test_a_record_without_a_stamp_counts_from_its_first_answer(
    server: Nats, prefix: str, clock: TurnedClock
) -> None:
    async with opened(at(server, prefix), clock) as backend:
        await granted(backend, "job")
        found, _ = await stored(backend, prefix, "job")
        await put(backend, prefix, "job", json.dumps(found | {"stamp": "", "holder": "theirs"}).encode())
        await refused(backend, "job")


async def test_a_stamp_told_by_a_report_counts_only_if_the_store_has_it(
    server: Nats, prefix: str, clock: TurnedClock
) -> None:
    async with opened(at(server, prefix), clock) as ann, opened(at(server, prefix), clock) as bob:
        await granted(ann, "job")
        await refused(bob, "job")
        found, revision = await stored(ann, prefix, "job")
        record = read(json.dumps(found | {"stamp": "another"}).encode(), revision)
        assert record is not None
        clock.turned += TTL * 0.4
        bob.leases._observed.note_report(record)
        clock.turned += TTL * 0.5
        left = (await refused(bob, "job")).remaining
        assert left is not None
        assert left <= TTL * 0.1  # counted from the first answer


async def test_hints_come_again_after_a_lost_connection(server: Nats, prefix: str) -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
        ann = await stack.enter_async_context(opened(at(server, prefix)))
        bob = await stack.enter_async_context(opened(f"nats://127.0.0.1:{proxy.port}/?prefix={prefix}"))
        grant = await granted(ann, "job")
        hints = bob.leases.hints("job")
        await anext(hints)
        proxy.reset()
        proxy.refuse()
        await ann.leases.release(grant)
        proxy.heal()
        await asyncio.wait_for(anext(hints), 10.0)
        assert isinstance(await bob.leases.inspect("job"), Vacant)


async def test_a_bucket_that_reports_nothing_gives_no_hints(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        config = {"name": f"KV_{prefix}-leases", "subjects": [f"$KV.{prefix}-leases.>"], "max_msgs_per_subject": 1}
        await called(backend, f"STREAM.CREATE.KV_{prefix}-leases", config)
        hints = backend.leases.hints("job")
        assert await asyncio.wait_for(anext(hints), 10.0) == "absent"
        fact = fact_of(await backend.describe(), "hints")
        assert "none" in fact.value
        assert "--republish-destination" in fact.advice


@pytest.mark.parametrize("ttl", [TTL_MIN, TTL])
async def test_a_ttl_that_was_edited_is_corrected_by_the_next_renewal(server: Nats, prefix: str, ttl: float) -> None:
    async with opened(at(server, prefix)) as backend:
        grant = await granted(backend, "job", ttl=ttl)
        await backend.leases.renew([grant], ttl)  # else the edit would be an acquisition
        for edited in (3_600.0, TTL_MIN):
            found, _ = await stored(backend, prefix, "job")
            await put(backend, prefix, "job", json.dumps(found | {"ttl": edited}).encode())
            assert list(await backend.leases.renew([grant], ttl)) == [Granted(grant)]
            assert (await stored(backend, prefix, "job"))[0]["ttl"] == pytest.approx(ttl)


# --- following renewals ------------------------------------------------------------------------------------------


async def test_one_subscription_follows_a_whole_group(server: Nats, prefix: str, clock: TurnedClock) -> None:
    async with opened(at(server, prefix)) as ann, opened(at(server, prefix), clock) as bob:
        names = [f"{'orders ' * 20}.{number}" for number in range(20)]  # too long for a key as they are
        await granted(ann, "other")
        async with following(bob.leases, names[0][:-1]):
            await until(lambda: all(one.is_live for one in bob.leases._renewals.sources()) and followers(bob))
            grants = [await granted(ann, one) for one in names]
            await ann.leases.renew([*grants, await granted(ann, "other")], TTL)
            await until(lambda: len(heard(bob)) == len(names) and stamps(bob) == stamps(ann, names))
            assert heard(bob) == set(names)
            clock.turned += TTL * 0.9
            seen = await bob.leases.inspect_many(names)
            assert all(isinstance(one, HeldBy) for one in seen)
            clock.turned += TTL * 0.1
            assert all(isinstance(one, Vacant) for one in await bob.leases.inspect_many(names))
            bob.leases._observed._known.clear()
        bob.leases._renewals.here()["*"].end()
        assert not heard(bob)


def followers(backend: nats.NatsBackend) -> int:
    return len(list(backend.leases._renewals.sources()))


def heard(backend: nats.NatsBackend) -> set[str]:
    return set(backend.leases._observed._heard)


def stamps(backend: nats.NatsBackend, known: list[str] | None = None) -> set[str]:
    """Return the stamps that were heard; or those of *known* names."""
    seen = backend.leases._observed
    if known is None:
        return {one.stamp for one in seen._heard.values()}
    return {found.record.stamp for one in known if (found := seen._known[one]).record is not None}


async def test_a_user_of_single_names_does_without_all_reports(prefix: str) -> None:
    async with as_user(prefix, {"subscribe": ["_INBOX.>", f"{prefix}-leases.job"]}) as backend:
        grant = await granted(backend, "job")
        async with following(backend.leases, "job"):
            await until(lambda: any(one.is_deaf for one in backend.leases._renewals.sources()))
            hints = backend.leases.hints("job")
            await asyncio.wait_for(anext(hints), 10.0)
            assert backend.leases.traits.hints
            assert await backend.leases.release(grant) == Released(grant)
            await asyncio.wait_for(anext(hints), 10.0)
            assert isinstance(await backend.leases.inspect("job"), Vacant)


async def test_what_is_heard_is_bounded(monkeypatch: pytest.MonkeyPatch, clock: TurnedClock) -> None:
    monkeypatch.setattr(observations, "HEARD_MAX", 3)
    seen = observations.Observations(clock)
    records = {name: acquired(name, "ann#1", TTL, {}, after=1, stamp=f"{name}-1") for name in "abcde"}
    for record in (*records.values(), renewed(records["c"], TTL, left=0.0, stamp="c-2")):
        seen.note_report(record)
    assert list(seen._heard) == ["d", "e", "c"]  # of too many, those that were told last
    heard_at = seen.now
    clock.turned += TTL / 2
    assert seen.note(records["d"], 1).since <= heard_at
    assert seen.note(records["a"], 1).since >= heard_at + TTL / 2
    clock.turned += 2 * TTL
    seen.note_report(records["b"])
    assert list(seen._heard) == ["c", "b"]  # and not what is far older than a lease, two at a time
    assert not seen._doubted


# --- links and servers -------------------------------------------------------------------------------------------


async def test_a_black_hole_is_reported_in_time_and_left_behind(server: Nats, prefix: str) -> None:
    """A connection that gave no answer is replaced, by one to the next server."""
    async with AsyncExitStack() as stack:
        hole, way = [await stack.enter_async_context(FaultProxy("127.0.0.1", server.port)) for _ in range(2)]
        url = f"nats://127.0.0.1:{hole.port},127.0.0.1:{way.port}/?timeout=1&prefix={prefix}"
        backend = await stack.enter_async_context(opened(url))
        grant = await granted(backend, "job")
        assert (hole.accepted, way.accepted) == (1, 0)
        hole.stall()
        asked_at = time.monotonic()
        with pytest.raises(Unavailable, match="no answer within 1 s"):
            await backend.leases.renew([grant], TTL)
        assert time.monotonic() - asked_at < 2.0
        asked_at = time.monotonic()
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
        assert time.monotonic() - asked_at < 0.5
        assert way.accepted == 1


async def test_a_candidate_that_hears_nothing_claims_nothing(server: Nats, prefix: str, clock: TurnedClock) -> None:
    """Its requests arrive. If it claimed what it knows to be free, it would keep the name from others, unawares."""
    async with opened(at(server, prefix)) as ann, FaultProxy("127.0.0.1", server.port) as proxy:
        grant = await granted(ann, "job")
        async with opened(f"nats://127.0.0.1:{proxy.port}/?prefix={prefix}&timeout=0.5", clock) as bob:
            await refused(bob, "job")
            clock.turned += TTL
            before = await stored(ann, prefix, "job")
            proxy.stall("down")
            with pytest.raises(Unavailable):
                await bob.leases.acquire("job", "bob#1", TTL)
            assert await stored(ann, prefix, "job") == before
            proxy.heal()
            assert (await granted(bob, "job", "bob#1")).token > grant.token


async def test_a_candidate_that_would_hear_too_late_claims_nothing(
    server: Nats, prefix: str, clock: TurnedClock
) -> None:
    async with opened(at(server, prefix)) as ann, FaultProxy("127.0.0.1", server.port) as proxy:
        grant = await granted(ann, "job")
        async with opened(f"nats://127.0.0.1:{proxy.port}/?prefix={prefix}&timeout=2", clock) as bob:
            await refused(bob, "job")
            clock.turned += TTL
            before = await stored(ann, prefix, "job")
            proxy.delay(1.2, "down")
            with pytest.raises(Unavailable):
                await bob.leases.acquire("job", "bob#1", TTL)
            assert await stored(ann, prefix, "job") == before
            proxy.heal()
            assert (await granted(bob, "job", "bob#1")).token > grant.token


async def test_a_lost_connection_is_noted_at_once(server: Nats, prefix: str) -> None:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
        backend = await stack.enter_async_context(opened(f"nats://127.0.0.1:{proxy.port}/?prefix={prefix}&timeout=30"))
        grant = await granted(backend, "job")
        proxy.stall("up")
        renewal = asyncio.ensure_future(backend.leases.renew([grant], 90.0))
        await until(lambda: len((next(iter(backend._client._connections.values())))._answers) == 1)
        asked_at = time.monotonic()
        proxy.reset()
        with pytest.raises(Unavailable, match="closed the connection"):
            await renewal
        assert time.monotonic() - asked_at < 5.0


async def test_old_answers_decide_nothing(server: Nats, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was cut off from the others may answer with what was: it can't make two leaders of that."""
    monkeypatch.setattr(leases_module, "PAUSE", 0.0)
    async with opened(at(server, prefix)) as ann, opened(at(server, prefix)) as bob:
        await ann.leases.release(await granted(ann, "job"))
        subject = f"$KV.{prefix}-leases.job"
        old = await bob._client.run(lambda connection: bob.leases._last(connection, subject))
        grant = await granted(ann, "job", "ann#2")

        async def answer(*_: object) -> object:
            return old

        monkeypatch.setattr(bob.leases, "_last", answer)
        assert isinstance(await bob.leases.inspect("job"), Vacant)
        with pytest.raises(Unavailable, match="changed 20 times"):
            await bob.leases.acquire("job", "bob#1", TTL)
        assert list(await ann.leases.renew([grant], TTL)) == [Granted(grant)]
        assert await ann.leases.release(grant) == Released(grant)


async def test_a_full_server_refuses_every_write_and_keeps_what_it_has() -> None:
    """Renewals, too: so the leader's term ends in time, and none begins before there is room again."""
    with private(Nats, storage=200_000) as server:
        async with opened(server.url) as backend:
            grant = await granted(backend, "job")
            await called(backend, "STREAM.CREATE.ballast", {"name": "ballast", "subjects": ["ballast"]})
            client = backend._client
            with pytest.raises(Unavailable, match="is full, and stored nothing"):
                for _ in range(100):
                    await client.run(lambda connection: client.store(connection, "ballast", "ballast", bytes(10_000)))
            asked: list[Callable[[], Awaitable[object]]] = [
                lambda: backend.leases.renew([grant], TTL),
                lambda: backend.leases.acquire("new", "bob#1", TTL),
                lambda: backend.leases.release(grant),
            ]
            for ask in asked:
                with pytest.raises(Unavailable, match="is full, and stored nothing"):
                    await ask()
            assert isinstance(await backend.leases.inspect("job"), HeldBy)
            assert await backend.leases.inspect("new") == Vacant("new", 0)
            await called(backend, "STREAM.DELETE.ballast")
            assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]


async def test_a_stream_of_several_servers_is_refused_where_a_name_may_be_granted_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = shared(NatsCluster)
    if cluster.version >= SERIALIZABLE:
        monkeypatch.setattr(leases_module, "SERIALIZABLE", (99, 0, 0))
    refusal = r"may grant one name to two candidates.*has 3 \(nats-server issue 4320\); upgrade to 2.9.21"
    async with opened(f"{cluster.url}?prefix=several&replicas=3") as backend:
        with pytest.raises(ConfigError, match=refusal):
            await backend.leases.acquire("job", "ann#1", TTL)
    async with opened(f"{cluster.url}?prefix=one") as backend:
        grant = await granted(backend, "job")
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
        config = (await called(backend, "STREAM.INFO.KV_one-leases"))["config"]
        await called(backend, "STREAM.UPDATE.KV_one-leases", {**config, "num_replicas": 3})
    async with opened(f"{cluster.url}?prefix=one&timeout=1") as backend:
        with pytest.raises(ConfigError, match=refusal):
            while True:
                with suppress(Unavailable):  # for a while, the stream has no leader
                    assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]


# --- TLS and logins ----------------------------------------------------------------------------------------------


async def test_a_lease_by_tls_with_a_certificate() -> None:
    server = shared(Nats, authority=Authority(), client_certificates=True)
    async with opened(server.url) as backend:
        grant = await granted(backend, "job")
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
        facts = await backend.describe()
        assert fact_of(facts, "login").value == "a certificate"
        told = "TLS; the server's certificate and name are verified against /"
        assert fact_of(facts, "TLS").value.startswith(told)


async def test_a_lease_with_a_token() -> None:
    async with opened(shared(Nats, token=PASSWORD).url) as backend:
        await granted(backend, "job")
        assert fact_of(await backend.describe(), "login").value == "a token"


async def test_no_login_is_sent_without_tls() -> None:
    """Also to a server that says it has none."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "x", "version": "2.15.1", "max_payload": 1048576, "headers": true}\r\n')
        received.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with opened(f"nats://app:{PASSWORD}@127.0.0.1:{port}/?tls=true") as backend:
            with pytest.raises(ConfigError, match="the server has no TLS"):
                await backend.leases.inspect("job")
        await until(lambda: received)
    assert set(received) == {b""}


# --- rights ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def as_user(prefix: str, permissions: Mapping[str, object]) -> AsyncIterator[nats.NatsBackend]:
    """Open a backend for a user with these permissions, on a server that has the bucket."""
    with private(Nats, password=PASSWORD, users={"app": (PASSWORD, permissions)}) as server:
        async with opened(at(server, prefix, f"root:{PASSWORD}@")) as root:
            await granted(root, "another")
        async with opened(at(server, prefix, f"app:{PASSWORD}@")) as backend:
            yield backend


async def test_the_permissions_that_leases_need(prefix: str) -> None:
    """As docs/nats.md names them, for a bucket that is there."""
    publish = [
        f"$KV.{prefix}-leases.*",
        f"$JS.API.STREAM.MSG.GET.KV_{prefix}-leases",
        f"$JS.API.STREAM.INFO.KV_{prefix}-leases",
    ]
    async with as_user(prefix, {"publish": publish, "subscribe": ["_INBOX.>", f"{prefix}-leases.*"]}) as backend:
        grant = await granted(backend, "job")
        hints = backend.leases.hints("job")
        assert await anext(hints) is None
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
        assert await backend.leases.ask_to_resign("job")
        assert await backend.leases.names() == ["another", "job"]
        assert await backend.leases.release(grant) == Released(grant)
        assert await backend.leases.inspect("job") == Vacant("job", grant.token)


async def test_without_the_right_to_write_it_names_the_subject(prefix: str) -> None:
    async with as_user(prefix, {"publish": {"deny": "$KV.>"}}) as backend:
        with pytest.raises(ConfigError, match=rf"does not permit this user.*\$KV\.{prefix}-leases\.job"):
            await backend.leases.acquire("job", "ann#1", TTL)
        assert isinstance(await backend.leases.inspect("another"), HeldBy)


async def test_each_request_is_refused_by_itself(prefix: str) -> None:
    """So a refusal can be counted against the oldest request to its subject."""
    subject = f"$KV.{prefix}-leases.job"
    async with as_user(prefix, {"publish": {"deny": subject}}) as backend:
        connection = await backend._client.connection()
        asked = [await connection.begin(subject) for _ in range(20)]
        for one in asked:
            with pytest.raises(NotPermitted):
                await asyncio.wait_for(one, TTL)
        assert not connection._asked


async def test_without_the_right_to_subscribe_there_are_no_hints(prefix: str) -> None:
    async with as_user(prefix, {"subscribe": {"deny": f"{prefix}-leases.>"}}) as backend:
        await granted(backend, "job")
        hints = backend.leases.hints("job")
        assert await asyncio.wait_for(anext(hints), 10.0) == "absent"
        assert fact_of(await backend.describe(), "hints").value == "refused"


# --- the facts of doctor -----------------------------------------------------------------------------------------


def fact_of(facts: Any, name: str) -> Fact:
    return facts_by_name(facts)[name]


async def test_doctor_only_reads(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        facts = await backend.describe()
        assert "is made by the first leader" in fact_of(facts, "leases").value
        assert fact_of(facts, f"server 127.0.0.1:{server.port}").value.endswith(", alone")
        with pytest.raises(Unavailable, match="stream not found"):
            await called(backend, f"STREAM.INFO.KV_{prefix}-leases")


async def test_doctor_on_one_server(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        await granted(backend, "job")
        facts = await backend.describe()
        assert fact_of(facts, "leases") == Fact("leases", f"in the bucket {prefix}-leases")
        assert fact_of(facts, "roll-ups") == Fact("roll-ups", "refused")
        assert fact_of(facts, "replicas").value == "1, of 1 streams"
        assert "run a cluster of three" in fact_of(facts, "replicas").advice
        assert "sync_interval: always" in fact_of(facts, "on disk").advice
        assert "require a login" in fact_of(facts, "login").advice
        assert fact_of(facts, "hints") == Fact("hints", "by subscription")


async def test_doctor_on_a_cluster() -> None:
    cluster = shared(NatsCluster)
    replicas = 3 if cluster.version >= SERIALIZABLE else 1
    async with opened(f"{cluster.url}?prefix=doctor&replicas={replicas}") as backend:
        await granted(backend, "job")
        facts = await backend.describe()
        assert fact_of(facts, "replicas").value == f"{replicas}, of 1 streams"
        assert bool(fact_of(facts, "replicas").advice) == (replicas == 1)
        for node in cluster.nodes:
            assert "in the cluster" in fact_of(facts, f"server 127.0.0.1:{node.port}").value
        if cluster.version < SERIALIZABLE:
            assert "issue 4320" in fact_of(facts, "version").advice


@pytest.mark.parametrize(
    ("config", "advice"),
    [
        ({"storage": "memory"}, "after a restart, two candidates may lead"),
        ({"max_age": 60 * 10**9, "duplicate_window": 10**9}, "forgets what is older than 60 s"),
        ({"max_bytes": 100_000, "discard": "old"}, "forgets the oldest lease"),
    ],
)
async def test_doctor_finds_a_bucket_that_forgets(server: Nats, prefix: str, config: Json, advice: str) -> None:
    async with opened(at(server, prefix)) as backend:
        stream = f"KV_{prefix}-leases"
        usual = {"name": stream, "subjects": [f"$KV.{prefix}-leases.>"], "max_msgs_per_subject": 1, "discard": "new"}
        await called(backend, f"STREAM.CREATE.{stream}", usual | config)
        assert advice in fact_of(await backend.describe(), "leases").advice


async def test_a_bucket_of_another_program_keeps_its_roll_ups_and_doctor_tells(server: Nats, prefix: str) -> None:
    async with opened(at(server, prefix)) as backend:
        names = [f"KV_{prefix}-{bucket}" for bucket in ("leases", "queues")]
        for stream in names:
            subjects = [f"$KV.{stream.removeprefix('KV_')}.>"]
            config = {"name": stream, "subjects": subjects, "max_msgs_per_subject": 1, "allow_rollup_hdrs": True}
            await called(backend, f"STREAM.CREATE.{stream}", config)
        await anext(backend.leases.hints("job"))
        fact = fact_of(await backend.describe(), "roll-ups")
        assert (fact.value, fact.code) == (f"taken by {' and '.join(names)}", "nats-rollup")
        assert all(f"nats stream edit {name} --no-allow-rollup" in fact.advice for name in names)


async def test_doctor_names_servers_that_do_not_answer(server: Nats, prefix: str) -> None:
    async with opened(f"nats://127.0.0.1:{server.port},127.0.0.1:1/?prefix={prefix}") as backend:
        facts = await backend.describe()
        assert fact_of(facts, "server 127.0.0.1:1").value == "does not answer"
        assert "can't be reached" in fact_of(facts, "server 127.0.0.1:1").advice
        assert fact_of(facts, "hints").value == "by subscription"


async def test_doctor_without_rights(prefix: str) -> None:
    async with as_user(prefix, {"publish": {"deny": "$JS.API.>"}}) as backend:
        facts = await backend.describe()
        assert "does not permit this user" in fact_of(facts, "JetStream").advice
        assert fact_of(facts, "streams").value == "may not be read"
