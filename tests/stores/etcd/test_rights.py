"""The users that docs/etcd.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp")

from tests.docs.pages import commands
from tests.servers import Etcd, private
from tests.servers.etcd import end_of, in_base64
from tests.stores.rights import Act, acting, lead, refused


def order(server: Etcd, line: str) -> None:
    """Carry out a line for etcdctl as it does, which not every machine with an etcd has."""
    token = server.login()
    match shlex.split(line):
        case ["etcdctl", "role", "add", role]:
            server.call("auth/role/add", {"name": role}, token=token)
        case ["etcdctl", "role", "grant-permission", role, "--prefix=true", kind, prefix]:
            keys = {"permType": kind.upper(), "key": in_base64(prefix), "range_end": in_base64(end_of(prefix))}
            server.call("auth/role/grant", {"name": role, "perm": keys}, token=token)
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


REFUSED: dict[str, tuple[str, str, Act]] = {
    "an observer leads": ("observer", "", lambda backend: lead(backend, "led")),
    "a candidate leads below another prefix": ("app", "billing/", lambda backend: lead(backend, "job")),
    "a candidate looks below another prefix": ("app", "billing/", lambda backend: backend.leaders()),
    "an observer looks below another prefix": ("observer", "billing/", lambda backend: backend.leaders()),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused_with_the_prefix(server: Etcd, what: str) -> None:
    user, prefix, act = REFUSED[what]
    async with acting(url_of(server, user, prefix)) as backend:
        await refused(backend, act, "does not permit this user the keys", prefix or "tenure/", "docs/etcd.md")
