"""What only ZooKeeper has: sessions that expire, nodes of others, logins, connections that break at any moment."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import pytest
from kazoo.exceptions import AuthFailedError, KazooException, SessionClosedRequireSaslError
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl_credential

from tenure._backends import zookeeper
from tenure._backends.zookeeper.errors import translate
from tenure._backends.zookeeper.session import Session
from tenure._backends.zookeeper.touches import session_of
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.durations import stretched
from tests.explained import facts_by_name
from tests.servers import Authority, ZooKeeper, private, shared

T = TypeVar("T")

TICK = 0.1
TTL = 1.5
LASTS = session_of(TTL, TICK)
LOGIN = "ann", "s3cret/@:"


@pytest.fixture
def name() -> str:
    return f"election-{secrets.token_hex(6)}"


@pytest.fixture
def server() -> ZooKeeper:
    return shared(ZooKeeper, tick=TICK, options=())


@asynccontextmanager
async def opened(
    server: ZooKeeper, options: str = "", port: int | None = None, path: str = ""
) -> AsyncIterator[zookeeper.ZooKeeperBackend]:
    backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{port or server.port}/{path}?tick={TICK}{options}"))
    try:
        yield backend
    finally:
        await backend.close()


async def claim(backend: zookeeper.ZooKeeperBackend, name: str, holder: str) -> Grant:
    answer = await backend.leases.acquire(name, holder, TTL)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def waits(backend: zookeeper.ZooKeeperBackend, name: str, holder: str) -> HeldBy:
    answer = await backend.leases.acquire(name, holder, TTL)
    assert isinstance(answer, HeldBy), answer
    return answer


def end_session(server: ZooKeeper, backend: zookeeper.ZooKeeperBackend) -> None:
    """Let the server end the session of *backend*, as if it had expired."""
    driver = backend.client.session(TTL)._driver
    witness = f"/of-a-session-{secrets.token_hex(6)}"
    is_made = is_ended = False
    while not is_ended:  # the backend connects anew at once, and may get its session back before it is closed
        with suppress(KazooException), server.client(client_id=driver.client_id, timeout=LASTS) as same:
            is_made = bool(same.create(witness, ephemeral=True)) or is_made
        with server.client() as other:
            is_ended = is_made and not other.exists(witness)


# --- sessions ---


async def test_all_claims_of_a_process_share_one_session_and_one_thread(server: ZooKeeper, name: str) -> None:
    before = threading.active_count()
    async with opened(server) as backend:
        grants = [await claim(backend, f"{name}-{number}", f"ann#{number}") for number in range(20)]
        with server.client() as client:
            owners = {
                client.exists(f"/{grant.name}/{child}").ephemeralOwner
                for grant in grants
                for child in client.get_children(f"/{grant.name}")
            }
        assert len(owners) == 1
        assert sum(thread.name == "tenure-zookeeper" for thread in threading.enumerate()) == 1
    await until(lambda: threading.active_count() <= before + 1)  # a thread that closes may be kept for the next time
    assert not [thread for thread in threading.enumerate() if thread.name == "tenure-zookeeper"]


async def test_a_leader_whose_session_has_ended_has_lost_its_claims(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann, opened(server) as bob:
        grants = [await claim(ann, f"{name}-{number}", "ann#1") for number in range(2)]
        await waits(bob, grants[0].name, "bob#1")
        end_session(server, ann)
        assert (await claim(bob, grants[0].name, "bob#1")).token > grants[0].token
        assert list(await answered(lambda: ann.leases.renew(grants, TTL))) == [Lost(grant) for grant in grants]
        assert await ann.leases.release(grants[0]) == Lost(grants[0])
        assert (await waits(ann, grants[0].name, "ann#2")).holder == "bob#1"  # in a new session
        assert (await claim(ann, grants[1].name, "ann#2")).token > grants[1].token


async def test_a_candidate_whose_session_has_ended_gets_a_hint_and_stands_last(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann, opened(server) as bob, opened(server) as cat:
        grant = await claim(ann, name, "ann#1")
        await waits(bob, name, "bob#1")
        await waits(cat, name, "cat#1")
        hints = bob.leases.hints(name)
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        end_session(server, bob)
        await waiting
        await answered(lambda: waits(bob, name, "bob#1"))
        await ann.leases.release(grant)
        grant = await claim(cat, name, "cat#1")
        await cat.leases.release(grant)
        await claim(bob, name, "bob#1")


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until there is an answer: a client learns that its session has ended when it connects again."""
    while True:
        try:
            return await ask()
        except Unavailable:
            await asyncio.sleep(0.01)


async def test_a_leader_that_is_cut_off_is_never_granted_more_and_is_followed(server: ZooKeeper, name: str) -> None:
    """kazoo reports the end of a session only after it has connected again; nothing here waits for that."""
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(server, port=proxy.port) as ann,
        opened(server) as bob,
    ):
        grant = await claim(ann, name, "ann#1")
        await waits(bob, name, "bob#1")
        proxy.stall()
        began, new = asyncio.get_running_loop().time(), None
        while new is None:
            with suppress(Unavailable):
                assert await ann.leases.renew([grant], TTL) == [Lost(grant)]
            answer = await bob.leases.acquire(name, "bob#1", TTL)
            new = answer.grant if isinstance(answer, Granted) else None
        lasted = asyncio.get_running_loop().time() - began
        assert lasted > TTL * 0.8
        assert new.token > grant.token
        proxy.reset()  # data that was held back is not sent on
        proxy.heal()
        assert await answered(lambda: ann.leases.renew([grant], TTL)) == [Lost(grant)]
        assert await bob.leases.renew([new], TTL) == [Granted(new)]


async def test_a_claim_outlives_its_backend_and_a_place_does_not(server: ZooKeeper, name: str) -> None:
    async with opened(server) as bob:
        async with opened(server) as ann:
            grant = await claim(ann, name, "ann#1")
            held = await claim(bob, f"{name}-other", "bob#1")
            await waits(ann, f"{name}-other", "ann#1")
        loop = asyncio.get_running_loop()
        closed_at = loop.time()
        seen = await bob.leases.inspect(name)  # its work may still run
        assert isinstance(seen, HeldBy)
        assert seen.token == grant.token
        await bob.leases.release(held)
        assert await bob.leases.inspect(held.name) == Vacant(held.name, held.token)
        async with asyncio.timeout(LASTS + 5.0):
            while isinstance(await bob.leases.inspect(name), HeldBy):
                await asyncio.sleep(0.05)
        assert loop.time() - closed_at > TTL * 0.8


async def test_a_session_that_is_too_short_is_refused_with_the_figures(name: str) -> None:
    with private(ZooKeeper, tick=TICK, session_max=1.0) as server:
        async with opened(server) as backend:
            with pytest.raises(ConfigError) as refused:
                await backend.leases.acquire(name, "ann#1", 2.0)
            assert str(refused.value) == (
                f"zookeeper://127.0.0.1:{server.port}/ lets a session last 1 s at most, and ttl=2 s needs 2 s; use "
                "ttl=1 or less, or raise maxSessionTimeout on every server"
            )
            assert await backend.leases.inspect(name) == Vacant(name, 0)
            assert isinstance(await backend.leases.acquire(name, "ann#1", 0.7), Granted)


async def test_a_session_that_lasts_longer_than_asked_for_makes_whole_leases_certain(name: str) -> None:
    """The server has a longer ``minSessionTimeout``; a dead leader is followed after that time."""
    lasts = 2.5
    with private(ZooKeeper, tick=TICK, options=[("minSessionTimeout", f"{lasts * 1_000:.0f}")]) as server:
        async with (
            FaultProxy("127.0.0.1", server.port) as proxy,
            opened(server, port=proxy.port) as ann,
            opened(server) as bob,
        ):
            grant = await claim(ann, name, "ann#1")
            await waits(bob, name, "bob#1")
            clock, session = ann.client.clock, ann.client.session(TTL)
            assert session.negotiated == lasts
            for heard_ago in (TTL / 8, TTL / 4, TTL / 3):  # each would make a claim older in a shorter session
                session.touches._answered.clear()
                asked_at = clock.now()
                session.touches.heard_at = asked_at - heard_ago
                (renewed,) = await ann.leases.renew([grant], TTL)
                assert isinstance(renewed, Granted)
                assert renewed.age == 0.0
            proxy.stall()
            stalled_at = clock.now()

            async def is_followed() -> bool:
                return isinstance(await answered(lambda: bob.leases.acquire(name, "bob#1", TTL)), Granted)

            await until(is_followed, within=lasts + 10.0)
            assert clock.now() - stalled_at > lasts * 0.8


async def test_a_session_that_lasts_less_after_it_has_moved_carries_no_longer_leases(name: str) -> None:
    """To a server with a lower ``maxSessionTimeout``: here it is the same one, restarted with another configuration."""
    ttl = 30.0
    figures = "lets a session last 5 s at most, and ttl=30 s needs 30 s"
    with private(ZooKeeper, tick=TICK) as server:
        async with opened(server) as ann:
            granted = await ann.leases.acquire(name, "ann#1", ttl)
            assert isinstance(granted, Granted)
            assert isinstance(await ann.leases.acquire(name, "ann#2", ttl), HeldBy)
            session = ann.client.session(ttl)
            assert session.negotiated == session.lasts
            server.stop()
            server.write("zoo.cfg", (server.folder / "zoo.cfg").read_text() + "maxSessionTimeout=5000\n")
            server.start()
            async with asyncio.timeout(60.0):
                for holder in ("ann#1", "ann#2"):
                    with pytest.raises(ConfigError, match=figures):
                        await answered(partial(ann.leases.acquire, name, holder, ttl))
            assert ann.client.session(ttl) is session
            assert session.negotiated == 5.0
            with pytest.raises(Unavailable, match=figures):  # whether it is lost is not known
                await ann.leases.renew([granted.grant], ttl)


async def test_a_claim_waits_until_the_leader_has_surely_heard_of_an_idle_session(
    server: ZooKeeper, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session connected long ago, and since then nothing shows that the leader has heard of it."""
    async with opened(server) as backend:
        session = backend.client.session(TTL)
        await session.connected(backend.client.until())
        _connected_long_ago(session)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await claim(backend, name, "ann#1")
        assert loop.time() - began > TICK * 0.9
        assert session.touches.heard_at > 0
    async with opened(server, "&timeout=0.05") as backend:  # there is no time to wait for that
        session = backend.client.session(TTL)
        await session.connected(asyncio.get_running_loop().time() + 5.0)
        with pytest.raises(Unavailable, match="its leader may not have heard of this session for too long"):
            while True:  # slow answers have other texts
                _connected_long_ago(session)
                try:
                    await backend.leases.acquire(f"{name}-other", "ann#1", TTL)
                except Unavailable as error:
                    if "gave no answer" not in str(error):
                        raise


def _connected_long_ago(session: Session) -> None:
    session.touches._answered.clear()
    session.touches.heard_at = -math.inf


async def test_a_claim_counts_from_before_its_request_if_the_leader_may_know_of_no_newer_one(
    server: ZooKeeper, name: str
) -> None:
    async with opened(server) as backend:
        grant = await claim(backend, name, "ann#1")
        clock, touches = backend.client.clock, backend.client.session(TTL).touches
        for heard_ago in (0.0, TTL / 8, TTL / 4, 0.3 * TTL):
            touches._answered.clear()
            asked_at = clock.now()
            touches.heard_at = asked_at - heard_ago
            (renewed,) = await backend.leases.renew([grant], TTL)
            took = clock.now() - asked_at
            assert isinstance(renewed, Granted)
            assert renewed.age == pytest.approx(max(0.0, heard_ago - 0.75 * (LASTS - TTL)), abs=took)
            # It never counts for longer than the session, by a clock that is slower than the server's by a quarter.
            assert asked_at - renewed.age + TTL - 0.25 * TTL <= touches.heard_at + 0.75 * LASTS + took


async def test_a_renewal_in_step_is_nearly_whole(server: ZooKeeper, name: str) -> None:
    """The time between renewals is such that the usual requests come too late to count for them."""
    tick = stretched(0.25)
    ttl, step = 8 * tick, 2.1 * tick
    backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/?tick={tick}"))
    try:
        granted = await backend.leases.acquire(name, "ann#1", ttl)
        assert isinstance(granted, Granted)
        ages = []
        for _ in range(3):
            await asyncio.sleep(step)
            (renewed,) = await backend.leases.renew([granted.grant], ttl)
            assert isinstance(renewed, Granted)
            ages.append(renewed.age)
    finally:
        await backend.close()
    assert min(ages[1:]) < 1.7 * tick  # the first step could not be known


async def test_an_idle_candidate_keeps_the_leader_informed(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann, opened(server) as bob:
        grant = await claim(ann, name, "ann#1")
        await waits(bob, name, "bob#1")
        await asyncio.sleep(TTL / 2)
        await ann.leases.release(grant)
        loop = asyncio.get_running_loop()
        session = bob.client.session(TTL)
        touched = len(session.touches._answered)
        assert touched > 2
        began = loop.time()
        await claim(bob, name, "bob#1")
        assert loop.time() - began < 10 * TICK  # in the verb's own round trips; it need not wait for a tick


# --- requests whose answers are lost ---


@pytest.mark.parametrize("after", [0, 1, 20, 45, 90, 130, 180, 240, 300, 400])
async def test_an_acquisition_that_breaks_off_anywhere_leaves_one_node(
    server: ZooKeeper, name: str, after: int
) -> None:
    """After so many bytes of answers, the connection is reset: each request of the verb loses its answer."""
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(server, port=proxy.port) as ann:
        await ann.leases.inspect(name)
        await ann.client.session(TTL).connected(ann.client.until())
        proxy.lose_answers(after=after)
        asking = asyncio.ensure_future(ann.leases.acquire(name, "ann#1", TTL))
        await until(lambda: asking.done() or ann.client.session(TTL)._driver.state != "CONNECTED")
        proxy.heal()
        await asyncio.gather(asking, return_exceptions=True)
        grant = await claim(ann, name, "ann#1")
        with server.client() as client:
            children = client.get_children(f"/{name}")
            assert len(children) == 1
            assert client.get(f"/{name}/{children[0]}")[1].czxid == grant.token
        assert await ann.leases.renew([grant], TTL) == [Granted(grant)]
        assert await ann.leases.release(grant) == Released(grant)


async def test_a_node_whose_creation_was_given_up_ends_with_its_place(server: ZooKeeper, name: str) -> None:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(server, "&timeout=0.2", port=proxy.port) as ann,
        opened(server) as bob,
    ):
        grant = await claim(ann, f"{name}-before", "ann#1")  # the servers were asked whether they know containers
        await ann.leases.release(grant)
        proxy.stall("down")  # the request arrives, the answer doesn't
        with pytest.raises(Unavailable):
            await ann.leases.acquire(name, "ann#1", TTL)
        with server.client() as client:
            await until(lambda: client.exists(f"/{name}") and client.get_children(f"/{name}"))
            proxy.heal()
            await until(lambda: not client.get_children(f"/{name}"), within=LASTS + 10.0)
        assert isinstance(await bob.leases.acquire(name, "bob#1", TTL), Granted)


async def test_a_cancelled_wait_for_a_connection_leaves_nothing(server: ZooKeeper, name: str) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(server, port=proxy.port) as ann:
        proxy.refuse()
        asking = asyncio.ensure_future(ann.leases.acquire(name, "ann#1", TTL))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        proxy.heal()
        assert await answered(lambda: ann.leases.inspect(name)) == Vacant(name, 0)


# --- nodes of others ---


async def test_a_name_can_be_led_again_after_its_nodes_were_removed(server: ZooKeeper, name: str) -> None:
    """A container, as Curator makes it, is removed when it is empty; and an administrator may clean up."""
    path = f"apps-{secrets.token_hex(4)}"
    async with opened(server, path=f"{path}/elections") as backend:
        grant = await claim(backend, name, "ann#1")
        await backend.leases.release(grant)
        with server.client() as client:
            client.delete(f"/{path}/elections/{name}")
            again = await claim(backend, name, "ann#2")
            assert again.token > grant.token
            await backend.leases.release(again)
            client.delete(f"/{path}", recursive=True)
        assert await backend.leases.inspect(name) == Vacant(name, 0)
        assert await backend.leases.names() == []
        assert (await claim(backend, name, "ann#3")).token > again.token
        assert await backend.leases.names() == [name]


async def test_a_claim_whose_node_was_removed_is_lost_at_once(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann:
        grants = [await claim(ann, f"{name}-{number}", "ann#1") for number in range(3)]
        hints = ann.leases.hints(grants[1].name)
        with server.client() as client:
            (child,) = client.get_children(f"/{grants[1].name}")
            client.delete(f"/{grants[1].name}/{child}")
        await asyncio.wait_for(anext(hints), 10.0)
        assert list(await ann.leases.renew(grants, TTL)) == [Granted(grants[0]), Lost(grants[1]), Granted(grants[2])]
        assert (await claim(ann, grants[1].name, "ann#1")).token > grants[1].token


async def test_one_claim_that_is_refused_does_not_harm_the_others(server: ZooKeeper, name: str) -> None:
    """As when the rights of one election, or its data, are changed by others."""
    async with opened(server) as ann:
        grants = [await claim(ann, f"{name}-{number}", "ann#1") for number in range(3)]
        with server.client(auth_data={("digest", "admin:of this test")}) as client:
            (child,) = client.get_children(f"/{grants[0].name}")
            rights = make_acl("digest", make_digest_acl_credential("admin", "of this test"), all=True)
            client.set_acls(f"/{grants[0].name}/{child}", [rights])
            client.set(f"/{grants[1].name}", b"of another program")
            refused, *others = await ann.leases.renew(grants, TTL)
            assert isinstance(refused, NoAnswer)
            assert "does not permit this user what tenure needs" in refused.why
            assert others == [Granted(grants[1]), Granted(grants[2])]
            client.set_acls(f"/{grants[0].name}/{child}", OPEN_ACL_UNSAFE)
        assert list(await ann.leases.renew(grants, TTL)) == [Granted(grant) for grant in grants]


@pytest.mark.parametrize("dialect", ["latch", "lock", "kazoo"])
async def test_foreign_leaders_are_waited_for(server: ZooKeeper, name: str, dialect: str) -> None:
    forms = {"latch": "_c_x-latch-", "lock": "_c_x-lock-", "kazoo": "x__lock__"}
    async with opened(server, f"&dialect={dialect}") as ann:
        with server.client() as client:
            made = client.create(f"/{name}/{forms[dialect]}", b"java", ephemeral=True, sequence=True, makepath=True)
            token = client.exists(made).czxid
            held = HeldBy(name, "java", token, None)
            assert await waits(ann, name, "ann#1") == held
            assert await ann.leases.inspect(name) == held
            assert await ann.leases.ask_to_resign(name) is False
            assert name not in await ann.leases.names()
            hints = ann.leases.hints(name)
            client.delete(made)
            await asyncio.wait_for(anext(hints), 10.0)
            grant = await claim(ann, name, "ann#1")
            assert grant.token > token
            (child,) = client.get_children(f"/{name}")
            assert client.get(f"/{name}/{child}")[0] == b"ann#1"


async def test_a_foreign_leader_without_data_has_the_name_of_its_node(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann:
        with server.client() as client:
            made = client.create(f"/{name}/_c_x-latch-", b"", ephemeral=True, sequence=True, makepath=True)
            assert (await waits(ann, name, "ann#1")).holder == made.rpartition("/")[2]


async def test_curators_request_to_revoke_asks_to_resign(server: ZooKeeper, name: str) -> None:
    async with opened(server, "&dialect=lock") as ann:
        grant = await claim(ann, name, "ann#1")
        hints = ann.leases.hints(name)
        with server.client() as client:
            (child,) = client.get_children(f"/{name}")
            client.set(f"/{name}/{child}", b"__REVOKE__")
        await asyncio.wait_for(anext(hints), 10.0)
        assert await ann.leases.renew([grant], TTL) == [Granted(grant, resign_asked=True)]
        seen = await ann.leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert seen.holder == "ann#1"
        assert seen.resign_asked


@pytest.mark.parametrize(
    ("dialect", "other", "text"),
    [
        ("latch", "kazoo", "is of the dialect kazoo, and this one is of the dialect latch"),
        ("kazoo", "latch", "is of the dialect latch, and this one is of the dialect kazoo"),
        ("lock", "latch", "is of the dialect latch, and this one is of the dialect lock"),
    ],
)
async def test_dialects_are_not_mixed(server: ZooKeeper, name: str, dialect: str, other: str, text: str) -> None:
    async with opened(server, f"&dialect={dialect}") as ann, opened(server, f"&dialect={other}") as bob:
        grant = await claim(ann, name, "ann#1")
        with pytest.raises(ConfigError, match="they do not see each other, so both would lead"):
            await bob.leases.acquire(name, "bob#1", TTL)
        with pytest.raises(ConfigError, match=text):  # its place ends soon; until then, nobody is granted the name
            await ann.leases.acquire(name, "ann#2", TTL)
        assert await ann.leases.renew([grant], TTL) == [Granted(grant)]


async def test_data_of_others_is_not_overwritten(server: ZooKeeper, name: str) -> None:
    async with opened(server) as ann:
        with server.client() as client:
            client.create(f"/{name}", b"settings of another program")
            with pytest.raises(ConfigError, match=f"/{name} holds data that is not tenure's"):
                await ann.leases.acquire(name, "ann#1", TTL)
            assert client.get(f"/{name}")[0] == b"settings of another program"
            await until(lambda: not client.get_children(f"/{name}"), within=LASTS + 10.0)


# --- logins, rights, TLS ---


@pytest.mark.parametrize("auth", ["digest", "sasl"])
async def test_only_the_creator_has_rights(name: str, auth: str) -> None:
    with private(ZooKeeper, tick=TICK, login=LOGIN) as server:
        user, password = LOGIN
        login = f"{user}:{quote(password, safe='')}@127.0.0.1:{server.port}"
        ours = zookeeper.open(Url.parse(f"zookeeper://{login}/?tick={TICK}&auth={auth}"))
        read = zookeeper.open(Url.parse(f"zookeeper://{login}/read?tick={TICK}&auth={auth}&acl=read"))
        try:
            grant = await claim(ours, name, "ann#1")
            assert await ours.leases.renew([grant], TTL) == [Granted(grant)]
            await claim(read, name, "ann#1")
            async with opened(server) as other, opened(server, path="read") as reader:
                for ask in (
                    lambda: other.leases.inspect(name),
                    lambda: other.leases.acquire(name, "bob#1", TTL),
                    lambda: reader.leases.acquire(name, "bob#1", TTL),
                ):
                    with pytest.raises(ConfigError, match="does not permit this user what tenure needs"):
                        await ask()
                assert isinstance(await reader.leases.inspect(name), HeldBy)
        finally:
            await ours.close()
            await read.close()


async def test_a_wrong_login_and_none_are_refused(name: str) -> None:
    with private(ZooKeeper, tick=TICK, login=LOGIN, needs_login=True) as server:
        wrong = zookeeper.open(Url.parse(f"zookeeper://ann:wrong@127.0.0.1:{server.port}/?auth=sasl"))
        with pytest.raises(ConfigError, match="refused the login; check user and password, and the option auth"):
            await wrong.leases.acquire(name, "ann#1", 5.0)
        await wrong.close()
        async with opened(server) as none:
            with pytest.raises(ConfigError, match=r"requires a login, and got none.*zookeeper://USER:PASSWORD@"):
                await none.leases.acquire(name, "ann#1", TTL)
        plain = zookeeper.open(Url.parse(f"zookeeper://ann:wrong@127.0.0.1:{server.port}/?auth=digest"))
        with pytest.raises(ConfigError, match=r"requires another one than auth=digest; .* auth=sasl"):
            await plain.leases.acquire(name, "ann#1", 5.0)
        await plain.close()


@pytest.mark.parametrize("refusal", [AuthFailedError, SessionClosedRequireSaslError])
def test_a_refused_password_is_told_alike_however_the_refusal_comes(refusal: type[Exception]) -> None:
    """The server closes the session behind its refusal, which kazoo may not have read by then."""
    with pytest.raises(ConfigError, match="refused the login; check user and password, and the option auth"):
        raise translate(refusal(), "zookeeper://here", login="sasl")


async def test_rights_for_the_creator_need_a_login(server: ZooKeeper, name: str) -> None:
    async with opened(server, "&acl=creator") as backend:
        with pytest.raises(ConfigError, match="does not know who this client is, so no rights can be given to it"):
            await backend.leases.acquire(name, "ann#1", TTL)


async def test_tls_trusts_the_named_authority_only(name: str) -> None:
    authority = Authority()
    with private(ZooKeeper, tick=TICK, authority=authority) as server:
        for ca, reason in ((Authority("another").certificate, "certificate is not trusted"), (None, "")):
            backend = zookeeper.open(
                Url.parse(server.url if ca is None else f"zookeeper://127.0.0.1:{server.port}/?tls=true&ca={ca}")
            )
            try:
                if reason:
                    with pytest.raises(ConfigError, match=reason):
                        await backend.leases.acquire(name, "ann#1", 5.0)
                else:
                    grant = await claim(backend, name, "ann#1")
                    assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
                    told = f"TLS; the server's certificate and name are verified against {authority.certificate}"
                    assert facts_by_name(await backend.describe())["TLS"].value == told
            finally:
                await backend.close()
        elsewhere = server.url.replace("127.0.0.1", "localhost")
        backend = zookeeper.open(Url.parse(elsewhere))
        with pytest.raises(ConfigError, match="certificate is for another host"):
            await backend.leases.inspect(name)
        await backend.close()
        async with opened(server, "&timeout=1") as plain:
            with pytest.raises(Unavailable, match="add tls=true if it requires TLS"):
                await plain.leases.inspect(name)


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
async def test_a_client_shows_its_certificate(name: str, tmp_path: Path, protocol: str) -> None:
    """By TLS 1.3, a server refuses it after the handshake."""
    authority, other = Authority(), Authority("another")
    certificate, key = other.issue(tmp_path, "a client", usage="clientAuth")
    options = [("ssl.protocol", protocol), ("ssl.enabledProtocols", protocol)]
    if protocol == "TLSv1.3":
        options.append(("ssl.ciphersuites", "TLS_AES_128_GCM_SHA256"))
    with private(ZooKeeper, tick=TICK, authority=authority, client_certificates=True, options=options) as server:
        backend = zookeeper.open(Url.parse(server.url))
        try:
            grant = await claim(backend, name, "ann#1")
            assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
        finally:
            await backend.close()
        assert server.certificate is not None
        ours = "&cert={}&key={}".format(*server.certificate)
        for options_of_tls, reason in (
            (f"&ca={authority.certificate}", "with cert=FILE and key=FILE|check cert and key"),
            (
                f"&ca={authority.certificate}&cert={certificate}&key={key}",
                "refuses the client's certificate|check cert and key",
            ),
            (f"&ca={other.certificate}{ours}", "not trusted.*name its authority with ca=FILE"),
        ):
            async with opened(server, f"&tls=true{options_of_tls}") as backend:
                # A refusal is not always read: sending may fail before that.
                with pytest.raises((ConfigError, Unavailable), match=reason):
                    await backend.leases.acquire(f"{name}-other", "ann#1", TTL)


async def test_an_unreachable_server_is_told(name: str) -> None:
    with private(ZooKeeper, tick=TICK) as server:
        server.kill()
        async with opened(server, "&timeout=0.3") as backend:
            with pytest.raises(Unavailable, match="can't be reached: Connection refused; check host and port"):
                await backend.leases.inspect(name)


# --- processes ---


class Recorder(logging.Handler):
    """Keeps each record that it gets; its thread is in the record."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


async def test_no_log_handler_runs_on_the_thread_of_a_connection(
    server: ZooKeeper, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers are user code. kazoo would log on its own thread: connections that are made, broken, refused, ended."""
    recorder, everything = Recorder(), 1
    caplog.set_level(everything)
    caplog.set_level(everything, logger="kazoo")
    monkeypatch.setattr(logging, "lastResort", recorder)  # which writes to stderr, where no handler is found
    for logger in (logging.root, logging.getLogger("kazoo")):
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, recorder])
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(server, "&timeout=0.5", port=proxy.port) as ann:
        await answered(lambda: claim(ann, name, "ann#1"))
        proxy.refuse()
        proxy.reset()
        with pytest.raises(Unavailable):
            await ann.leases.inspect(name)
        proxy.heal()
        await answered(lambda: ann.leases.inspect(name))
    logging.getLogger("kazoo").info("another client of this process")
    assert {one.getMessage() for one in recorder.records if one.name.startswith("kazoo")} == {
        "another client of this process"
    }
    assert not [one for one in recorder.records if (one.threadName or "").startswith("tenure-zookeeper")]


async def test_a_fork_leaves_the_connection_to_its_parent(server: ZooKeeper, name: str) -> None:
    async with opened(server) as backend:
        grant = await claim(backend, name, "ann#1")
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        for _ in range(3):
            assert await backend.leases.renew([grant], TTL) == [Granted(grant)]


async def test_doctor_tells_the_ticks_and_the_rights(server: ZooKeeper) -> None:
    async with opened(server) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts[f"server 127.0.0.1:{server.port}"].value == "3.8.0, standalone"
    assert "an ensemble of three or five" in facts["ensemble"].advice
    assert (facts["sessions"].value, facts["sessions"].advice) == ("0.2 to 60 s, by default 2 to 20 ticks", "")
    assert facts["ttl at most"].value == "60 s"
    assert "anyone who reaches the servers can end a term" in facts["rights"].advice
    assert facts["rights"].code == "zookeeper-open-rights"
    for tick, advice in (("0.02", "may be trusted for longer"), ("2", "another candidate takes over sooner")):
        backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/?tick={tick}"))
        facts = facts_by_name(await backend.describe())
        assert "add tick=0.1" in facts["sessions"].advice or "with tick=0.1" in facts["sessions"].advice
        assert advice in facts["sessions"].advice
        await backend.close()


async def test_looks_open_no_session_of_their_own_while_another_one_connects(
    server: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, no session is connected yet: each look would open one, beside that of the leases."""
    async with opened(server) as backend:
        session = backend.client.session(TTL)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "is_connected", False)
            assert backend.client.session() is session
        assert list(backend.client._sessions.values()) == [session]
