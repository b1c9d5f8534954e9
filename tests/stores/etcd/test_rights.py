"""The users that docs/etcd.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
import shlex
import urllib.error
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("aiohttp")

from tenure._backends import etcd
from tenure._backends.etcd.diagnosis import ANONYMOUS, is_before, release_of
from tenure._lease import Granted, HeldBy
from tenure._url import Url
from tenure.errors import TermLost
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import Etcd, patient, private
from tests.servers.etcd import end_of, from_base64, in_base64
from tests.servers.turned_process import CAN_TURN
from tests.stores.rights import LATER, TTL, Act, Change, acting, ends_in_time, lead, outlasts, refused


def order(server: Etcd, line: str) -> None:
    """Carry out a line for etcdctl as it does, which not every machine with an etcd has."""
    token = server.login()
    match shlex.split(line):
        case ["etcdctl", "role", "add", role]:
            server.call("auth/role/add", {"name": role}, token=token)
        case ["etcdctl", "role", "grant-permission", role, "--prefix=true", kind, prefix]:
            keys = {"permType": kind.upper(), "key": in_base64(prefix), "range_end": in_base64(end_of(prefix))}
            server.call("auth/role/grant", {"name": role, "perm": keys}, token=token)
        case ["etcdctl", "role", "grant-permission", role, kind, key]:
            perm = {"permType": kind.upper(), "key": in_base64(key)}
            server.call("auth/role/grant", {"name": role, "perm": perm}, token=token)
        case ["etcdctl", "user", "add", login]:
            user, _, password = login.partition(":")
            server.call("auth/user/add", {"name": user, "password": password}, token=token)
        case ["etcdctl", "user", "grant-role", user, role]:
            server.call("auth/user/grant", {"user": user, "role": role}, token=token)
        case _:
            raise AssertionError(f"the page has a command that is not understood: {line}")


@pytest.fixture(scope="module")
def server() -> Iterator[Etcd]:
    """Yield a server with the users of the page, and a name that was led."""
    with private(Etcd) as own:
        own.require_login("s3cret")
        for begin in ("etcdctl role add tenure", "etcdctl role add observer"):
            for line in commands("docs/etcd.md", "Rights", begin).splitlines():
                order(own, line)
        asyncio.run(led(own))
        yield own


async def led(server: Etcd) -> None:
    async with acting(url_of(server, "app")) as backend:
        await lead(backend, "led")


def url_of(server: Etcd, user: str, prefix: str = "") -> str:
    return f"etcd://{user}:PASSWORD@127.0.0.1:{server.port}/{f'?prefix={prefix}' if prefix else ''}"


async def test_a_candidate_leads(server: Etcd) -> None:
    async with acting(url_of(server, "app")) as backend:
        assert await lead(backend, "job") < await lead(backend, "job")
        assert "led" in await backend.leaders()
        assert not await backend.election("job").ask_to_resign()


async def test_an_observer_sees_leaders(server: Etcd) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.election("led").leader() is None
        assert (await backend.diagnose()).traits


ONE_ELECTION = {
    "less": ("tenure/", ["tenure/job/", "tenure/%tenure/"], []),
    "least": ("tenure/", ["tenure/job/", "tenure/%tenure/fence/"], ["record/job", "resign/job", "never"]),
    "bare": ("", ["job/", "%tenure/"], []),
}
"""For each user the prefix, the beginnings of keys that it may use, and the single keys of tenure's own."""


@pytest.mark.parametrize("user", ONE_ELECTION)
async def test_a_candidate_of_one_election_leads_it(server: Etcd, user: str) -> None:
    begin, beginnings, single = ONE_ELECTION[user]
    token = server.login()
    server.call("auth/role/add", {"name": user}, token=token)
    server.call("auth/user/add", {"name": user, "password": "PASSWORD"}, token=token)
    for keys in beginnings:
        order(server, f"etcdctl role grant-permission {user} --prefix=true readwrite {keys}")
    for key in single:
        order(server, f"etcdctl role grant-permission {user} readwrite {begin}%tenure/{key}")
    order(server, f"etcdctl user grant-role {user} {user}")
    url = f"{url_of(server, user)}?prefix={begin}"
    async with acting(url) as backend, acting(url) as other:
        assert await lead(backend, "job") < await lead(backend, "job")
        with suppress(TermLost):  # the leader steps down as soon as it learns of the wish
            async with other.election("job", ttl=TTL).campaign() as term:
                leader = await backend.election("job").leader()
                assert leader is not None
                assert leader.token == term.token
                if begin:
                    await refused(backend, lambda backend: backend.leaders(), "does not permit this user", error=LATER)
                else:
                    assert "job" in await backend.leaders()
                assert await backend.election("job").ask_to_resign()
    async with acting(url) as backend:
        await refused(backend, lambda backend: lead(backend, "another"), "does not permit this user the keys")


REFUSED: dict[str, tuple[str, str, Act]] = {
    "an observer leads": ("observer", "", lambda backend: lead(backend, "led")),
    "an observer asks to resign": ("observer", "", lambda backend: backend.election("held").ask_to_resign()),
    "a candidate leads below another prefix": ("app", "billing/", lambda backend: lead(backend, "job")),
    "a candidate looks below another prefix": ("app", "billing/", lambda backend: backend.leaders()),
    "an observer looks below another prefix": ("observer", "billing/", lambda backend: backend.leaders()),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_with_the_prefix(server: Etcd, what: str) -> None:
    user, prefix, act = REFUSED[what]
    async with (
        acting(url_of(server, "app")) as candidate,
        candidate.election("held", ttl=TTL).campaign(),
        acting(url_of(server, user, prefix)) as backend,
    ):
        await refused(backend, act, "does not permit this user the keys", prefix or "tenure/", "docs/etcd.md")


async def test_a_campaign_without_the_right_fails_although_reading_has_worked(server: Etcd) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        await refused(backend, lambda backend: lead(backend, "led"), "does not permit this user the keys")


@asynccontextmanager
async def changing(server: Etcd) -> AsyncIterator[tuple[Change, Change]]:
    """Yield what takes its role from the candidate, and what gives it back, as is done at the end."""

    async def revoke() -> None:
        body = {"name": "app", "role": "tenure"}
        await asyncio.to_thread(lambda: server.call("auth/user/revoke", body, token=server.login()))

    async def grant() -> None:
        await asyncio.to_thread(order, server, "etcdctl user grant-role app tenure")

    try:
        yield revoke, grant
    finally:
        await grant()


async def test_a_term_outlasts_a_right_that_comes_back(server: Etcd) -> None:
    async with changing(server) as (revoke, grant):
        await outlasts(url_of(server, "app"), "outlasting", revoke=revoke, grant=grant)


async def test_a_term_whose_right_is_gone_ends_before_another_begins(server: Etcd) -> None:
    root = f"etcd://root:s3cret@127.0.0.1:{server.port}/"
    async with changing(server) as (revoke, _):
        await ends_in_time(url_of(server, "app"), root, "ending", revoke=revoke, shortest=1.0)


# --- leases without a login ---

LEASE = 30
"""Seconds of an etcd lease."""


def leader_that_died(server: Etcd, name: str) -> str:
    """Put the key of a leader that renews nothing; return the number of its etcd lease."""
    token = server.login("app", "PASSWORD")
    lease = str(server.call("lease/grant", {"TTL": LEASE}, token=token)["ID"])
    key = {"key": in_base64(f"tenure/{name}/{int(lease):x}"), "value": in_base64("dead"), "lease": lease}
    server.call("kv/put", key, token=token)
    return lease


def is_permitted(server: Etcd, path: str, body: Mapping[str, object], token: str = "") -> bool:
    """Return whether etcd carries out a request; without a token, nobody is logged in."""
    try:
        answer = server.call(path, body, token=token)
    except urllib.error.HTTPError:
        return False
    return "error" not in answer  # as of a stream


async def test_whoever_reaches_the_port_keeps_a_dead_leaders_lease_alive_without_a_login(server: Etcd) -> None:
    """A fact of etcd before 3.4.42, 3.5.28 and 3.6.9, tried with 3.4.23: if others differ, the pages are wrong."""
    version = str(server.status()["version"])
    release = release_of(version)
    assert release is not None
    lease = leader_that_died(server, "kept")
    asked: dict[str, dict[str, object]] = {
        "lease/leases": {},
        "lease/timetolive": {"ID": lease, "keys": True},
        "lease/keepalive": {"ID": lease},
        "maintenance/alarm": {"action": "DEACTIVATE", "alarm": "NOSPACE"},
    }
    answers = {path: await asyncio.to_thread(is_permitted, server, path, body) for path, body in asked.items()}
    assert answers == dict.fromkeys(asked, is_before(release, ANONYMOUS)), version
    if not is_before(release, ANONYMOUS):
        return
    assert lease in [one["ID"] for one in server.call("lease/leases")["leases"]]
    [key] = server.call("lease/timetolive", {"ID": lease, "keys": True})["keys"]
    assert from_base64(key).startswith("tenure/kept/")
    if not CAN_TURN:
        return  # nothing waits for a lease to end in real time
    backend = etcd.open(Url.parse(patient(url_of(server, "app"))))
    for _ in range(3):  # in all, for more than its length
        server.turn(LEASE * 0.6)
        assert server.call("lease/keepalive", {"ID": lease})["result"]["TTL"] == str(LEASE)
        found = await backend.leases.acquire("kept", "ann", TTL)
        assert isinstance(found, HeldBy)
        assert found.holder == "dead"
    server.turn(LEASE * 1.1)

    async def is_free() -> bool:
        return isinstance(await backend.leases.acquire("kept", "ann", TTL), Granted)

    await until(is_free)
    await backend.close()


def writes_elsewhere(server: Etcd, prefix: str) -> str:
    """Make a user that may do everything below *prefix* only; return its login."""
    for line in (
        f"etcdctl role add elsewhere-{prefix}",
        f"etcdctl role grant-permission elsewhere-{prefix} --prefix=true readwrite {prefix}",
        f"etcdctl user add elsewhere-{prefix}:PASSWORD",
        f"etcdctl user grant-role elsewhere-{prefix} elsewhere-{prefix}",
    ):
        order(server, line)
    return server.login(f"elsewhere-{prefix}", "PASSWORD")


async def test_who_may_not_write_the_keys_of_a_lease_can_not_end_it(server: Etcd) -> None:
    """Nor keep others from ending it, by a key of one's own with the same etcd lease."""
    lease = leader_that_died(server, "ended")
    elsewhere = writes_elsewhere(server, "billing/")
    for login in ("", server.login("observer", "PASSWORD"), elsewhere):
        assert not is_permitted(server, "lease/revoke", {"ID": lease}, login)
    own = {"key": in_base64("billing/own"), "value": in_base64("x")}
    assert is_permitted(server, "kv/put", own, elsewhere)
    assert not is_permitted(server, "kv/put", own | {"lease": lease}, elsewhere)
    async with acting(url_of(server, "app")) as backend:
        leader = await backend.election("ended").leader()
        assert leader is not None
        assert leader.holder == "dead"
        assert is_permitted(server, "lease/revoke", {"ID": lease}, server.login("app", "PASSWORD"))
        assert await backend.election("ended").leader() is None
