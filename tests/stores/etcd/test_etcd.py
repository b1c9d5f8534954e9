"""etcd alone: its keys, foreign clients, sessions, lost answers, and interleavings that no suite can make."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tenure._backends import etcd
from tenure._backends.etcd.client import CONNECTIONS_MAX, Client, Member, Reply
from tenure._backends.etcd.diagnosis import FULL, is_before, release_of
from tenure._backends.etcd.errors import Refused
from tenure._backends.etcd.hints import CHECKED_EVERY
from tenure._lease import Granted, HeldBy, Lost, Released, Vacant
from tenure._runtime import shared_hints
from tenure._runtime.clock import SystemClock
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing.faultproxy import FaultProxy, late
from tests.connections import connections_to
from tests.durations import stretched, until
from tests.explained import facts_by_name
from tests.servers import Etcd, patient, private, shared
from tests.servers.etcd import end_of, from_base64, in_base64

TTL = 10.0

Call = Callable[..., Awaitable[Reply]]


@asynccontextmanager
async def opened(url: str, options: str = "") -> AsyncIterator[etcd.EtcdBackend]:
    backend = etcd.open(Url.parse(patient(f"{url}?{options}" if options else url)))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def proxied(server: Etcd, options: str = "") -> AsyncIterator[tuple[etcd.EtcdBackend, FaultProxy]]:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(f"etcd://127.0.0.1:{proxy.port}/", options) as backend,
    ):
        yield backend, proxy


@pytest.fixture
def server() -> Etcd:
    return shared(Etcd)


def keys(server: Etcd, prefix: str) -> dict[str, dict[str, str]]:
    """Return the keys with a prefix, with their values and leases."""
    found = server.call("kv/range", {"key": in_base64(prefix), "range_end": in_base64(end_of(prefix))})
    return {
        from_base64(one["key"]): {"value": from_base64(one.get("value", "")), "lease": one.get("lease", "0")}
        for one in found.get("kvs", ())
    }


def places(server: Etcd, name: str) -> list[str]:
    return list(keys(server, f"tenure/{name}/"))


def place_of(server: Etcd, name: str, holder: str) -> str:
    """Return the key of *holder*."""
    (key,) = (key for key, found in keys(server, f"tenure/{name}/").items() if found["value"] == holder)
    return key


def put(server: Etcd, key: str, value: str = "", ttl: int = 60) -> str:
    """Put a key with a lease of its own, as a foreign candidate does; return the lease."""
    lease = str(server.call("lease/grant", {"TTL": str(ttl)})["ID"])
    server.call("kv/put", {"key": in_base64(f"{key}/{int(lease):x}"), "value": in_base64(value), "lease": lease})
    return lease


async def granted(leases: etcd.EtcdLeases, name: str, holder: str = "ann#1", ttl: float = TTL) -> Any:
    answer = await leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def heard(hints: AsyncIterator[Any], change: Awaitable[object]) -> None:
    """Carry out a *change*, and wait for the hint of it; what was heard before doesn't count."""
    listening = asyncio.ensure_future(anext(hints))
    while await passes(listening):
        listening = asyncio.ensure_future(anext(hints))
    await change
    await listening


async def passes(listening: asyncio.Future[None]) -> bool:
    """Return whether there was a hint already."""
    for _ in range(5):
        await asyncio.sleep(0)
    return listening.done()


async def waiting(leases: etcd.EtcdLeases, name: str, holder: str = "bob#1", ttl: float = TTL) -> HeldBy:
    answer = await leases.acquire(name, holder, ttl)
    assert isinstance(answer, HeldBy), answer
    return answer


def intercepted(backend: etcd.EtcdBackend, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let *change* see each request, and carry it out by calling its first argument."""
    client: Client = backend._client
    real = client.call

    async def call(path: str, body: Mapping[str, object], **options: Any) -> Reply:
        reply: Reply = await change(lambda: real(path, body, **options), path, body)
        return reply

    monkeypatch.setattr(client, "call", call)


# --- the keys ----------------------------------------------------------------------------------------------------


async def test_keys_are_those_of_an_election(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await granted(backend.leases, name)
        ((key, found),) = keys(server, f"tenure/{name}/").items()
        assert key == f"tenure/{name}/{int(found['lease']):x}"
        assert found["value"] == "ann#1"
        (kv,) = server.call("kv/range", {"key": in_base64(key)})["kvs"]
        assert int(kv["create_revision"]) == grant.token


async def test_keys_of_a_lock_have_no_value(server: Etcd, name: str) -> None:
    async with opened(server.url, "kind=lock") as backend, opened(server.url) as other:
        grant = await granted(backend.leases, name)
        ((_, found),) = keys(server, f"tenure/{name}/").items()
        assert found["value"] == ""
        seen = await other.leases.inspect(name)  # both kinds contend by the same rule
        assert isinstance(seen, HeldBy)
        assert (seen.holder, seen.token) == ("ann#1", grant.token)
        assert (await waiting(other.leases, name)).holder == "ann#1"


@pytest.mark.parametrize(
    ("prefix", "written"), [("tenure/", "tenure/"), ("", ""), ("jobs", "jobs"), ("%2Fa%20b%2F", "/a b/")]
)
async def test_prefixes_and_names_are_kept_apart(server: Etcd, prefix: str, written: str) -> None:
    name = f"name-{time.time_ns()}"
    async with opened(server.url, f"prefix={prefix}") as backend:
        leases = backend.leases
        for each in (name, f"{name}/sub", f"{name}%2Fsub"):
            await granted(leases, each)
        assert len(keys(server, f"{written}{name}/")) == 1
        assert len(keys(server, f"{written}{name}%2Fsub/")) == 1
        assert len(keys(server, f"{written}{name}%252Fsub/")) == 1
        assert {name, f"{name}/sub", f"{name}%2Fsub"} <= set(await leases.names())
        hints = leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)
            assert await leases.ask_to_resign(name)
            await anext(hints)


# --- foreign clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a proposal", ""])
async def test_a_foreign_leader_is_seen_and_waited_for(server: Etcd, name: str, value: str) -> None:
    lease = put(server, f"tenure/{name}", value)
    async with opened(server.url) as backend:
        leases = backend.leases
        seen = await leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert seen.holder == (value or f"{int(lease):x}")
        assert seen.remaining is not None
        assert 58 <= seen.remaining <= 60
        assert await leases.ask_to_resign(name) is False
        assert (await waiting(leases, name)).holder == seen.holder
        hints = leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)  # it watches from now on
            server.call("lease/revoke", {"ID": lease})
            await anext(hints)
            assert (await granted(leases, name, "bob#1")).token > seen.token
        assert name in await leases.names()


async def test_a_foreign_candidate_is_not_overtaken(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        leases = backend.leases
        grant = await granted(leases, name)
        lease = put(server, f"tenure/{name}", "foreign")
        await waiting(leases, name)
        assert await leases.release(grant) == Released(grant)
        assert (await waiting(leases, name)).holder == "foreign"
        server.call("lease/revoke", {"ID": lease})
        await granted(leases, name, "bob#1")


async def test_an_operator_may_delete_the_leaders_key(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        leases = backend.leases
        grant = await granted(leases, name)
        await waiting(leases, name)
        hints = leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)
            first, second = place_of(server, name, "ann#1"), place_of(server, name, "bob#1")
            server.call("kv/deleterange", {"key": in_base64(first)})
            await anext(hints)
        assert list(await leases.renew([grant], TTL)) == [Lost(grant)]
        new = await granted(leases, name, "bob#1")
        assert places(server, name) == [second]
        server.call("kv/deleterange", {"key": in_base64(second)})
        assert (await granted(leases, name, "bob#1")).token > new.token  # a new claim, and not a phantom


# --- sessions ----------------------------------------------------------------------------------------------------


async def test_many_candidates_share_an_etcd_lease(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        grants = [await granted(backend.leases, f"{name}-{number}", ttl=60.0) for number in range(130)]
        found = keys(server, f"tenure/{name}-")
        used = [one["lease"] for one in found.values()]
        assert sorted(used.count(each) for each in set(used)) == [3, 127]
        before = server.requests()
        assert list(await backend.leases.renew(grants, 60.0)) == [Granted(grant) for grant in grants]
        after = server.requests()
        assert {kind: after[kind] - before[kind] for kind in ("LeaseKeepAlive", "Txn")} == {
            "LeaseKeepAlive": 2,
            "Txn": 2,
        }
        await waiting(backend.leases, f"{name}-0", ttl=60.0)
        assert len({one["lease"] for one in keys(server, f"tenure/{name}-0/").values()}) == 2


async def test_a_ttl_is_rounded_up_for_etcd_and_kept_exactly_by_the_client(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        began = time.monotonic()
        grant = await granted(backend.leases, name, ttl=1.2)
        ((_, found),) = keys(server, f"tenure/{name}/").items()
        assert server.call("lease/timetolive", {"ID": found["lease"]})["grantedTTL"] == "2"
        await until(lambda: not places(server, name))
        assert 1.2 <= time.monotonic() - began < 2.0
        assert await backend.leases.inspect(name) == Vacant(name, grant.token)


async def test_a_lease_that_is_shorter_than_etcd_grants_is_refused(name: str) -> None:
    with private(Etcd, timers=(100, 1_000)) as server:
        async with opened(server.url) as backend:
            with pytest.raises(ConfigError, match=r"no lease shorter than 2 s.*--election-timeout.*try ttl=2"):
                await backend.leases.acquire(name, "ann#1", 1.0)
            await granted(backend.leases, name, ttl=2.0)


async def test_a_claim_is_extended_for_no_longer_than_its_etcd_lease_lasts(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        grant = await granted(backend.leases, name, ttl=2.0)
        with pytest.raises(ConfigError, match=r"claimed for 2 s.*renewed for 3 s"):
            await backend.leases.renew([grant], 3.0)
        new = await granted(backend.leases, name, ttl=3.0)  # begun anew, in an etcd lease of 3 s
        assert new.token > grant.token
        assert list(await backend.leases.renew([grant, new], 3.0)) == [Lost(grant), Granted(new)]


async def test_an_etcd_lease_whose_answer_was_lost_is_granted_once(server: Etcd, name: str) -> None:
    before = {one["ID"] for one in server.call("lease/leases").get("leases", ())}
    async with proxied(server) as (backend, proxy):
        proxy.lose_answers()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await backend.leases.acquire(name, "ann#1", TTL)
        proxy.heal()
        await granted(backend.leases, name)
        after = {one["ID"] for one in server.call("lease/leases")["leases"]}
        assert len(after - before) == 1


async def test_closing_ends_the_places_that_wait_and_no_claim(server: Etcd, name: str) -> None:
    async with opened(server.url) as backend:
        async with opened(server.url) as closed:
            await granted(closed.leases, f"{name}-led", ttl=2.0)
            await granted(backend.leases, name)
            await waiting(closed.leases, name, ttl=2.0)
            await waiting(closed.leases, f"{name}-led", "cat#1", ttl=2.0)
        assert len(places(server, name)) == 1
        assert len(places(server, f"{name}-led")) == 1
        await until(lambda: not places(server, f"{name}-led"))  # it runs out
        with pytest.raises(ConfigError, match="closed"):
            await closed.leases.inspect(name)


# --- interleavings -----------------------------------------------------------------------------------------------


async def test_a_request_beside_another_is_refused_at_once(server: Etcd, name: str) -> None:
    async with opened(server.url) as ann, proxied(server) as (bob, proxy):
        grant = await granted(ann.leases, name)
        await waiting(bob.leases, name)
        proxy.stall()
        asking = asyncio.ensure_future(bob.leases.acquire(name, "bob#1", TTL))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=f"an earlier request of 'bob#1' for '{name}' is still under way"):
            await bob.leases.acquire(name, "bob#1", TTL)
        await ann.leases.release(grant)
        proxy.heal()
        assert isinstance(await asking, Granted)


async def test_a_session_that_ends_while_its_candidate_waits_gives_no_phantom(server: Etcd, name: str) -> None:
    """etcd issue 22387: a waiter's own lease has ended, and then the key before its own is deleted."""
    async with opened(server.url) as ann, opened(server.url) as bob, opened(server.url) as cat:
        grant = await granted(ann.leases, name)
        await waiting(bob.leases, name, "bob#1")
        bobs = place_of(server, name, "bob#1")
        await waiting(cat.leases, name, "cat#1")
        server.call("lease/revoke", {"ID": keys(server, bobs)[bobs]["lease"]})
        await ann.leases.release(grant)
        assert (await waiting(bob.leases, name, "bob#1")).holder == "cat#1"
        assert (await granted(cat.leases, name, "cat#1")).token > grant.token


async def test_an_owner_loses_what_its_successor_holds(server: Etcd, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob:
        grant, other = await granted(ann.leases, name), await granted(ann.leases, f"{name}-other")
        await waiting(bob.leases, name)
        ((_, found),) = keys(server, f"tenure/{name}-other/").items()
        server.call("lease/revoke", {"ID": found["lease"]})
        new = await granted(bob.leases, name, "bob#1")
        assert list(await ann.leases.renew([grant, other], TTL)) == [Lost(grant), Lost(other)]
        assert await ann.leases.release(grant) == Lost(grant)
        assert list(await bob.leases.renew([new], TTL)) == [Granted(new)]


async def test_the_end_of_the_key_before_is_not_missed(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted after the transaction that found it, and its event comes before the answer of that transaction."""
    async with opened(server.url) as ann, opened(server.url) as bob:
        grant = await granted(ann.leases, name)
        hints = bob.leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)
        txns = 0

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            nonlocal txns
            reply = await carry_out()
            txns += path == "kv/txn"
            if txns == 2:  # it decides that another is first
                monkeypatch.undo()
                await ann.leases.release(grant)
                await until(lambda: name in bob.leases._hints._deleted)
            return reply

        intercepted(bob, monkeypatch, change)
        await waiting(bob.leases, name)
        async with asyncio.timeout(10):
            await anext(hints)
        await granted(bob.leases, name, "bob#1")


async def test_a_keep_alive_of_a_former_leader_extends_nothing(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its raft term is not that of the transaction after it."""
    async with opened(server.url) as backend:
        grant = await granted(backend.leases, name)
        stale = 0

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            nonlocal stale
            reply = await carry_out()
            if path == "lease/keepalive" and stale:
                stale -= 1
                header = reply.body["header"]
                header["raft_term"] = str(int(header["raft_term"]) - 1)
            return reply

        intercepted(backend, monkeypatch, change)
        stale = 100
        with pytest.raises(Unavailable, match="changed its leader"):
            await backend.leases.renew([grant], TTL)
        with pytest.raises(Unavailable, match="tenure asks again"):
            await backend.leases.acquire(name, "ann#1", TTL)
        stale = 1
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
        stale = 1
        assert await backend.leases.acquire(name, "ann#1", TTL) == Granted(grant)


async def test_a_lease_is_not_lost_because_a_keep_alive_does_not_find_it(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as backend:
        grant = await granted(backend.leases, name)

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            reply = await carry_out()
            if path == "lease/keepalive":
                del reply.body["TTL"]
            return reply

        with monkeypatch.context() as context:
            intercepted(backend, context, change)
            with pytest.raises(Unavailable):
                await backend.leases.renew([grant], TTL)
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]


@pytest.mark.parametrize("then", ["withdraws", "asks for another"])
async def test_a_late_request_puts_no_key_after_its_candidate_has_withdrawn(server: Etcd, name: str, then: str) -> None:
    async with proxied(server) as (backend, proxy):
        leases = backend.leases
        other = await granted(leases, f"{name}-other")  # so that the session lives on
        async with late(proxy) as give_up:
            await give_up(leases.acquire(name, "ann#1", TTL))
            await leases.withdraw(name, "ann#1")
            if then == "asks for another":
                new = await granted(leases, name, "ann#2")
                assert await leases.release(new) == Released(new)
        assert list(await leases.renew([other], TTL)) == [Granted(other)]
        assert places(server, name) == []


async def test_candidates_of_a_session_ask_again_after_its_fence_was_raised(server: Etcd, name: str) -> None:
    async with proxied(server) as (backend, proxy):
        leases = backend.leases
        await granted(leases, f"{name}-0")
        for number in (1, 2):
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await leases.acquire(f"{name}-{number}", "ann#1", TTL)
            proxy.heal()
            await leases.withdraw(f"{name}-{number}", "ann#1")
            assert places(server, f"{name}-{number}") == []
            await granted(leases, f"{name}-{number}", "ann#2")
        found = keys(server, f"tenure/{name}-")
        assert len({one["lease"] for one in found.values()}) == 1


async def test_a_fence_that_was_raised_by_a_lost_answer_is_raised_again(server: Etcd, name: str) -> None:
    async with proxied(server) as (backend, proxy):
        leases = backend.leases
        await granted(leases, f"{name}-0")
        proxy.lose_answers()
        for ask in (lambda: leases.acquire(name, "ann#1", TTL), lambda: leases.withdraw(name, "ann#1")):
            with pytest.raises(Unavailable):
                await ask()
        proxy.heal()
        await leases.withdraw(name, "ann#1")
        assert places(server, name) == []
        await granted(leases, name, "ann#2")


def is_raised_fence(body: Any) -> bool:
    """Whether *body* is the transaction that ends a place for good."""
    return any("fence/" in from_base64(one.get("request_put", {}).get("key", "")) for one in body.get("success", ()))


async def test_a_place_that_is_ended_twice_takes_no_other_with_it(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(server) as (backend, proxy):
        leases = backend.leases
        await granted(leases, f"{name}-other")
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await leases.acquire(name, "ann#1", TTL)
        proxy.heal()
        sent, both, next_leads = 0, asyncio.Event(), asyncio.Event()

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            nonlocal sent
            if is_raised_fence(body):
                sent += 1
                await (both if sent == 1 else next_leads).wait()
            return await carry_out()

        intercepted(backend, monkeypatch, change)
        first = asyncio.create_task(leases.withdraw(name, "ann#1"))
        await until(lambda: sent == 1)
        second = asyncio.create_task(leases.withdraw(name, "ann#1"))
        await asyncio.sleep(0)
        both.set()
        await first
        grant = await granted(leases, name, "ann#2")
        next_leads.set()
        await second
        assert list(await leases.renew([grant], TTL)) == [Granted(grant)]


async def test_a_place_is_not_given_again_while_a_request_that_ends_it_is_under_way(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as backend:
        leases = backend.leases
        await granted(leases, f"{name}-other")
        sent: list[str] = []
        entered, ended = asyncio.Event(), asyncio.Event()

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            if is_raised_fence(body):
                sent.append("fence")
                await ended.wait()
            reply = await carry_out()
            if path == "kv/txn" and not sent:
                sent.append("put")
                await entered.wait()
            return reply

        intercepted(backend, monkeypatch, change)
        asking = asyncio.create_task(leases.acquire(name, "ann#1", TTL))
        await until(lambda: sent == ["put"])
        first = asyncio.create_task(leases.withdraw(name, "ann#1"))
        await until(lambda: "fence" in sent)
        entered.set()
        with pytest.raises(Unavailable, match="gave up its place"):
            await asking
        second = asyncio.create_task(leases.withdraw(name, "ann#1"))
        await asyncio.wait({second}, timeout=0.2)  # it waits for the first one
        await leases.acquire(name, "ann#2", TTL)
        place = leases._sessions.find(name, "ann#2")
        assert place is not None
        token = place.revision
        ended.set()
        await asyncio.gather(first, second)
        assert (await granted(leases, name, "ann#2")).token == token


async def test_a_request_that_a_proxy_gave_up_is_not_taken_for_refused(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as backend:
        leases = backend.leases
        await granted(leases, f"{name}-other")
        held: list[Any] = []
        real = Member.post

        async def post(self: Member, path: str, body: Any, token: str) -> Any:
            held.append(body)
            raise Refused(504, "gateway time-out", is_of_etcd=False)

        with monkeypatch.context() as context:
            context.setattr(Member, "post", post)
            with pytest.raises(Unavailable, match="status 504, as a proxy does"):
                await leases.acquire(name, "ann#1", TTL)
        await leases.withdraw(name, "ann#1")
        for body in held:
            await real(backend._client.members[0], "kv/txn", body, "")
        assert places(server, name) == []


async def test_a_release_whose_first_attempt_lost_its_answer_is_one(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as backend:
        grant = await granted(backend.leases, name)
        real, attempts = Member.post, 0

        async def post(self: Member, path: str, body: Any, token: str) -> Any:
            nonlocal attempts
            answer, attempts = await real(self, path, body, token), attempts + 1
            if attempts == 1:
                raise ConnectionResetError
            return answer

        monkeypatch.setattr(Member, "post", post)
        assert await backend.leases.release(grant) == Released(grant)
        assert attempts == 2
        assert await backend.leases.release(grant) == Lost(grant)


async def test_a_deadline_is_kept_although_its_timer_ends_early(server: Etcd, name: str) -> None:
    class Slow(SystemClock):
        def now(self) -> float:
            return 0.8 * super().now()

    backend = etcd.open(Url.parse(server.url), clock=Slow())
    try:
        await granted(backend.leases, name, ttl=2.0)
        await until(lambda: not backend.leases._sessions._places)
    finally:
        await backend.close()


# --- a link that works one way ---------------------------------------------------------------------------------------


@asynccontextmanager
async def asking_on(ask: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Ask again and again, as a driver does, whatever the answer."""

    async def ask_on() -> None:
        while True:
            with suppress(Unavailable):
                await ask()
            await asyncio.sleep(0.02)

    task = asyncio.ensure_future(ask_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@dataclass
class OneWay:
    """A candidate that gets no answer: what it asks on for, and how its answers are kept from it."""

    asks: Literal["renews", "waits"]
    shares: bool
    """Whether another place in its session is answered: of a holder that others can't reach in that way."""


ONE_WAY = [OneWay("renews", False), OneWay("waits", False), OneWay("renews", True), OneWay("waits", True)]


@pytest.mark.parametrize("way", ONE_WAY, ids=repr)
async def test_a_candidate_whose_answers_are_lost_is_followed_although_it_asks_on(
    server: Etcd, name: str, way: OneWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its requests arrives, and would keep its session alive: it leads, or comes to the front."""
    ttl = max(1.0, stretched(0.5))
    async with opened(server.url) as ann, opened(server.url, "timeout=0.1") as bob:
        other = await granted(bob.leases, f"{name}-other", ttl=ttl) if way.shares else None
        if way.asks == "renews":
            grant = await granted(bob.leases, name, "bob#1", ttl=ttl)
        else:
            grant = await granted(ann.leases, name, "cat#1", ttl=ttl)
            await waiting(bob.leases, name, ttl=ttl)
        await waiting(ann.leases, name, "dan#1", ttl=ttl)
        real = Member.post

        async def post(self: Member, path: str, body: Any, token: str) -> Any:
            answer = await real(self, path, body, token)
            if self in bob._client.members and (other is None or f"tenure/{name}/" in written(body)):
                raise ConnectionResetError
            return answer

        monkeypatch.setattr(Member, "post", post)

        async def ask() -> object:
            if other is not None:
                await bob.leases.renew([other], ttl)
            if way.asks == "renews":
                return await bob.leases.renew([grant], ttl)
            return await bob.leases.acquire(name, "bob#1", ttl)

        async def dan_leads() -> bool:
            if way.asks == "waits":
                await ann.leases.release(grant)
            return isinstance(await ann.leases.acquire(name, "dan#1", ttl), Granted)

        async with asking_on(ask):
            began = time.monotonic()
            await until(dan_leads)
            assert time.monotonic() - began < ttl + stretched(1.0)
            if other is not None:
                assert list(await bob.leases.renew([other], ttl)) == [Granted(other)]


def written(body: Mapping[str, Any]) -> str:
    """Return the keys that a transaction compares, as text."""
    return " ".join(from_base64(one["key"]) for one in body.get("compare", ()))


async def test_a_place_whose_time_was_over_before_its_answer_came_is_not_granted(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its key would be deleted by this process while its term goes on."""
    async with opened(server.url) as backend:
        grant, other = await granted(backend.leases, name), await granted(backend.leases, f"{name}-other")
        sessions = backend.leases._sessions

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            reply = await carry_out()
            if f"tenure/{name}/" in written(body):
                monkeypatch.undo()
                place = sessions.find(name, "ann#1")
                assert place is not None
                place.deadline = -math.inf
                sessions._timer_at = -math.inf
                sessions.end_overdue()
            return reply

        intercepted(backend, monkeypatch, change)
        assert list(await backend.leases.renew([grant, other], TTL)) == [Lost(grant), Granted(other)]
        await until(lambda: not places(server, name))
        assert list(await backend.leases.renew([other], TTL)) == [Granted(other)]


async def test_a_session_is_revoked_at_once_when_all_of_its_places_are_over(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url) as backend:
        sessions = backend.leases._sessions
        for number in range(3):
            await granted(backend.leases, f"{name}-{number}")
        (lease,) = {one["lease"] for one in keys(server, f"tenure/{name}-").values()}
        paths: list[str] = []

        async def change(carry_out: Call, path: str, body: Any) -> Reply:
            paths.append(path)
            if path == "lease/revoke" and paths.count(path) == 1:
                raise Unavailable("no answer")
            return await carry_out()

        intercepted(backend, monkeypatch, change)
        for place in sessions._places.values():
            place.deadline = -math.inf
        sessions._timer_at = -math.inf

        async def is_free() -> bool:
            return isinstance(await backend.leases.acquire(f"{name}-0", "ann#2", TTL), Granted)

        await until(is_free)
        await until(lambda: not sessions._ending)
        assert paths.count("lease/revoke") == 2
        ((_, found),) = keys(server, f"tenure/{name}-").items()
        assert found["lease"] != lease


# --- hints -------------------------------------------------------------------------------------------------------


async def test_hints_go_on_where_the_watch_broke_off(server: Etcd, name: str) -> None:
    async with opened(server.url) as ann, proxied(server) as (bob, proxy):
        hints = bob.leases.hints(name)
        async with asyncio.timeout(20):
            await anext(hints)
            proxy.refuse()
            proxy.reset()
            await granted(ann.leases, name)
            proxy.heal()
            await anext(hints)


async def test_hints_come_after_a_compaction(server: Etcd, name: str) -> None:
    async with opened(server.url) as ann, proxied(server) as (bob, proxy):
        hints = bob.leases.hints(name)
        async with asyncio.timeout(20):
            await anext(hints)
            proxy.refuse()
            proxy.reset()
            await granted(ann.leases, name)
            later = await granted(ann.leases, f"{name}-other")
            server.call("kv/compaction", {"revision": str(later.token)})  # so the first change can't be reported
            proxy.heal()
            await anext(hints)


async def test_a_silent_watch_goes_on_after_what_was_compacted_meanwhile(
    server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of others raise the revision. A watch from before the compaction would be cancelled, and give a hint."""
    monkeypatch.setattr(etcd.hints, "CHECKED_EVERY", 0.05)
    async with proxied(server, f"prefix={name}/") as (ann, proxy), opened(server.url, f"prefix={name}/") as bob:
        hints = ann.leases.hints(name)
        async with asyncio.timeout(60):
            await anext(hints)
            (stream,) = ann.leases._hints.sources()
            (watch,) = stream.watches
            key = {"key": in_base64(f"{name}-other"), "value": in_base64("value")}
            revision = max(int(server.call("kv/put", key)["header"]["revision"]) for _ in range(3))
            await until(lambda: (watch.next_revision or 0) > revision)
            server.call("kv/compaction", {"revision": str(revision)})
            waiting_for_hint, before = asyncio.ensure_future(anext(hints)), watch.number
            proxy.reset()
            await until(lambda: watch.number > before and stream.is_live and stream._seen_until > 0)
            seen = stream._checking
            await until(lambda: stream._checking is not seen and not stream._asked)
            assert watch.number == before + 1  # not cancelled, and asked for again
            assert not waiting_for_hint.done()
            await granted(bob.leases, name)
            await waiting_for_hint


async def test_a_stream_that_is_silent_is_replaced(server: Etcd, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link does not end, and carries nothing."""
    monkeypatch.setattr(etcd.hints, "CHECKED_EVERY", 0.05)
    async with opened(server.url) as ann, proxied(server, "timeout=0.5") as (bob, proxy):
        hints = bob.leases.hints(name)
        async with asyncio.timeout(60):
            await anext(hints)
            (stream,) = bob.leases._hints.sources()
            (watch,), before = stream.watches, stream.watches[0].number
            proxy.stall()
            await granted(ann.leases, name)
            await until(lambda: not stream.is_live)
            proxy.heal()
            await anext(hints)
            assert watch.number > before


@dataclass
class Rights:
    """What a user may, whose hints are watched: the beginnings of keys."""

    prefix: str
    keys: Sequence[str]


PER_NAME = {
    "without a prefix, with rights on the name": Rights("", ["{name}/", "%tenure/"]),
    "with rights on the name only": Rights("tenure/", ["tenure/{name}/", "tenure/%tenure/"]),
    "with rights on the least": Rights(
        "tenure/",
        ["tenure/{name}/", "tenure/%tenure/record/{name}", "tenure/%tenure/resign/{name}", "tenure/%tenure/fence/"],
    ),
}


@pytest.mark.parametrize("rights", PER_NAME.values(), ids=PER_NAME)
async def test_each_name_is_watched_on_one_connection(name: str, rights: Rights) -> None:
    with private(Etcd, password="r00t") as server:
        names = [f"{name}-{number}" for number in range(8)]
        assert connections_to(server.port) == 0
        server.add_user("app", "s3cret", *{key.format(name=one) for one in names for key in rights.keys})
        async with (
            opened(server.url, f"prefix={rights.prefix}") as ann,
            opened(f"etcd://app:s3cret@127.0.0.1:{server.port}/", f"prefix={rights.prefix}") as bob,
        ):
            await bob.leases.inspect(names[0])
            async with asyncio.timeout(60):
                hints = [bob.leases.hints(one) for one in names]
                await asyncio.gather(*map(anext, hints))
                (stream,) = bob.leases._hints.sources()
                await until(lambda: stream.is_live and not stream._asked)
                assert len(stream.watches) == 3 * len(names)
                for one, hint in zip(names, hints, strict=True):
                    await heard(hint, granted(ann.leases, one))
                assert connections_to(server.port) == 3  # one of each for requests, one for the stream


@pytest.fixture
def guarded() -> Iterator[Etcd]:
    """Yield a server with a user ``app`` that has no rights."""
    with private(Etcd, password="r00t") as own:
        own.add_user("app", "s3cret")
        yield own


def as_app(server: Etcd) -> str:
    return f"etcd://app:s3cret@127.0.0.1:{server.port}/"


async def test_a_name_that_may_not_be_read_costs_no_other_its_hints(
    guarded: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.permit("app", f"tenure/{name}-a/", f"tenure/{name}-c/", "tenure/%tenure/")
    async with opened(guarded.url) as ann, opened(as_app(guarded)) as bob, asyncio.timeout(60):
        hints = {each: bob.leases.hints(f"{name}-{each}") for each in "abc"}
        await asyncio.gather(*map(anext, hints.values()))
        (stream,) = bob.leases._hints.sources()
        await until(lambda: stream.is_live and not stream._asked)
        assert {watch.topic for watch in stream.watches if not watch.number} == {f"{name}-b"}
        for each in "ac":
            await heard(hints[each], granted(ann.leases, f"{name}-{each}"))
        guarded.permit("app", f"tenure/{name}-b/")
        monkeypatch.setattr(etcd.hints, "CHECKED_EVERY", 0.05)
        stream._check()
        await until(lambda: not stream._asked and all(watch.number for watch in stream.watches))
        await heard(hints["b"], granted(ann.leases, f"{name}-b"))


async def test_hints_come_as_soon_as_rights_are_given(
    guarded: Etcd, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_hints, "DEAF", (0.05, 0.05))
    async with opened(guarded.url) as ann, opened(as_app(guarded)) as bob, asyncio.timeout(60):
        hints = [bob.leases.hints(f"{name}-{number}") for number in range(5)]
        await asyncio.gather(*map(anext, hints))
        (stream,) = bob.leases._hints.sources()
        await until(lambda: stream.is_deaf)
        guarded.permit("app", *(f"tenure/{name}-{number}/" for number in range(5)), "tenure/%tenure/")
        await until(lambda: stream.is_live and not stream._asked)
        assert all(watch.number for watch in stream.watches)
        for number, hint in enumerate(hints):
            await heard(hint, granted(ann.leases, f"{name}-{number}"))


async def test_names_that_come_and_go_are_watched_on_the_same_stream(server: Etcd, name: str) -> None:
    async with opened(server.url, "prefix=") as ann, opened(server.url, "prefix=") as bob, asyncio.timeout(60):
        first = bob.leases.hints(f"{name}-0")
        await anext(first)
        (stream,) = bob.leases._hints.sources()
        upload = stream._upload
        for number in range(1, 4):
            hints = bob.leases.hints(f"{name}-{number}")
            await anext(hints)
            await heard(hints, granted(ann.leases, f"{name}-{number}"))
            del hints
            stream._look()
            assert list(stream.topics) == [f"{name}-0"]
            assert len(stream.watches) == len(stream._by_number) == 3
        await heard(first, granted(ann.leases, f"{name}-0"))
        assert stream._upload is upload


async def test_each_of_many_watches_begins_anew_after_a_compaction(server: Etcd, name: str) -> None:
    async with (
        opened(server.url, "prefix=") as ann,
        proxied(server, "prefix=") as (bob, proxy),
        asyncio.timeout(60),
    ):
        hints = [bob.leases.hints(f"{name}-{number}") for number in range(2)]
        await asyncio.gather(*map(anext, hints))
        (stream,) = bob.leases._hints.sources()
        await until(lambda: stream.is_live and not stream._asked)
        await heard(hints[0], granted(ann.leases, f"{name}-0"))
        proxy.refuse()
        proxy.reset()
        await granted(ann.leases, f"{name}-1")
        later = await granted(ann.leases, f"{name}-2")
        server.call("kv/compaction", {"revision": str(later.token)})
        proxy.heal()
        await asyncio.gather(*map(anext, hints))


async def test_hints_go_on_and_are_not_repeated_after_revisions_have_fallen(server: Etcd, name: str) -> None:
    """As by a restore from a snapshot: each answer is older than a deletion that was seen before."""
    async with opened(server.url) as ann, proxied(server) as (bob, proxy):
        grant = await granted(ann.leases, name)
        hints = bob.leases.hints(name)
        async with asyncio.timeout(20):
            await anext(hints)
            bob.leases._hints._deleted[name] = 1_000_000
            await waiting(bob.leases, name)
            await anext(hints)  # that deletion is taken for one after the answer
            (stream,) = bob.leases._hints.sources()
            (watch,) = stream.watches
            place = bob.leases._sessions.find(name, "bob#1")
            assert place is not None
            await until(lambda: (watch.next_revision or 0) > (place.revision or 0))  # it has seen the place's key
            watch.next_revision = 1_000_000
            proxy.reset()
            await anext(hints)  # the watch has begun again
        await waiting(bob.leases, name)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await anext(hints)
        await ann.leases.release(grant)
        async with asyncio.timeout(CHECKED_EVERY / 2):
            await anext(hints)  # the watch reports what is new


async def test_candidates_that_wait_are_notified_of_the_key_before_only(server: Etcd, name: str) -> None:
    async with opened(server.url) as ann, opened(server.url) as bob, opened(server.url) as cat:
        grant = await granted(ann.leases, name)
        await waiting(bob.leases, name, "bob#1")
        await waiting(cat.leases, name, "cat#1")
        hints, observed = cat.leases.hints(name), bob.leases.hints(name)
        async with asyncio.timeout(10):
            await anext(hints)
            await anext(observed)
            await ann.leases.release(grant)
            await anext(observed)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(hints), 0.2)
            observer = cat.leases.hints(name)  # now there are more listeners than candidates
            new = await granted(bob.leases, name, "bob#1")
            await anext(observer)
            await bob.leases.release(new)
            await anext(hints)
        await granted(cat.leases, name, "cat#1")


# --- a server in trouble -----------------------------------------------------------------------------------------


async def test_a_paused_server_is_unavailable_in_time(name: str) -> None:
    with private(Etcd) as server:
        async with opened(server.url, "timeout=0.3") as backend:
            grant = await granted(backend.leases, name, ttl=30.0)
            server.pause()
            try:
                asked_at = time.monotonic()
                with pytest.raises(Unavailable, match="gave no answer"):
                    await backend.leases.renew([grant], 30.0)
                assert time.monotonic() - asked_at < 5.0
            finally:
                server.resume()
            assert list(await backend.leases.renew([grant], 30.0)) == [Granted(grant)]


async def test_a_full_etcd_keeps_its_leaders_and_takes_no_new_one(name: str) -> None:
    with private(Etcd, options=("--quota-backend-bytes=1000000",)) as server:
        async with opened(server.url) as ann, opened(server.url) as bob:
            grant = await granted(ann.leases, name, ttl=30.0)
            await waiting(bob.leases, name, ttl=30.0)
            with pytest.raises(OSError, match=r"429|500|403|400|507"):
                for _ in range(100):
                    server.call("kv/put", {"key": in_base64("filler"), "value": in_base64("x" * 100_000)})
            release = release_of(server.status()["version"])
            assert release is not None
            if is_before(release, FULL):
                with pytest.raises(Unavailable, match="is full"):
                    await ann.leases.renew([grant], 30.0)
            else:
                assert list(await ann.leases.renew([grant], 30.0)) == [Granted(grant)]
            with pytest.raises(Unavailable, match=r"is full.*database space exceeded.*alarm disarm"):
                await bob.leases.acquire(f"{name}-new", "bob#1", 30.0)
            assert await bob.leases.inspect(f"{name}-new") == Vacant(f"{name}-new")
            facts = facts_by_name(await ann.describe())
            assert facts["alarms"].value == "NOSPACE"
            assert "compact it" in facts["alarms"].advice
            if is_before(release, FULL):
                return
            assert await ann.leases.release(grant) == Released(grant)
            with pytest.raises(Unavailable, match="is full"):  # the turn of the next has come, and can't be noted
                await bob.leases.acquire(name, "bob#1", 30.0)
            header = server.status()["header"]
            server.call("kv/compaction", {"revision": header["revision"], "physical": True})
            server.call("maintenance/defragment")
            alarm = {"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": header["member_id"]}
            server.call("maintenance/alarm", alarm)
            assert (await granted(bob.leases, name, "bob#1", ttl=30.0)).token > grant.token
            await granted(bob.leases, f"{name}-new", "bob#1", ttl=30.0)


async def test_a_request_that_waits_for_others_says_nothing_of_the_server(server: Etcd, name: str) -> None:
    """It was not sent. Else a burst of requests would replace the connections, and each time there would be more."""
    async with opened(server.url, "timeout=0.05") as backend, AsyncExitStack() as turns:
        (member,) = backend._client.members
        connections = member.connections()
        for _ in range(CONNECTIONS_MAX):
            await turns.enter_async_context(member.turns)
        with pytest.raises(Unavailable, match=r"no time was left .*the request was not sent"):
            await backend.leases.acquire(name, "ann#1", TTL)
        assert member._requests is connections
        assert not member.rank[0]
        assert places(server, name) == []


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        ("404 Not Found", ConfigError, r"no JSON gateway under /v3.*'nope'.*3\.4"),
        ("503 Service Unavailable", Unavailable, r"status 503, as a proxy does.*'nope'.*check that etcd runs"),
    ],
)
async def test_another_server_is_named(status: str, error: type[Exception], words: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnope".encode())
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with other, opened(f"etcd://127.0.0.1:{other.sockets[0].getsockname()[1]}/") as backend:
        with pytest.raises(error, match=words):
            await backend.leases.inspect("name")
