"""The roles of docs/zookeeper.md: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("kazoo")

from kazoo.client import KazooClient
from kazoo.security import ACL, Id

from tests.docs.pages import commands
from tests.servers import ZooKeeper, private
from tests.stores.rights import Act, acting, lead, refused, refused_for_good

TICK = 0.1
RIGHTS = {"c": 4, "d": 8, "r": 1, "w": 2, "a": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    """Yield a server with a node that was made as on the page, and a name that was led."""
    with private(ZooKeeper, tick=TICK) as own:
        make_path(own)
        asyncio.run(led(own))
        yield own


def make_path(server: ZooKeeper) -> None:
    """Carry out the two lines for zkCli.sh, a program of Java."""
    login, made = (
        line.partition("] ")[2].split() for line in commands("docs/zookeeper.md", "Rights", "[zk").splitlines()
    )
    assert (login[0], made[0], made[2]) == ("addauth", "create", '""')
    scheme, _, rights = made[3].partition("::")
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    try:
        client.add_auth(*login[1:])
        client.create(made[1], b"", acl=[ACL(sum(RIGHTS[one] for one in rights), Id(scheme, ""))])
    finally:
        client.stop()
        client.close()


async def led(server: ZooKeeper) -> None:
    async with acting(url_of(server, "leads")) as backend:
        await lead(backend, "led")


def url_of(server: ZooKeeper, role: str) -> str:
    """Return the URL that the page has for a *role*, for this server."""
    lines = commands("docs/zookeeper.md", "Rights", "zookeeper://").splitlines()
    [url] = [url.strip() for url, _, does in (line.partition("#") for line in lines) if does.strip().startswith(role)]
    return f"{url.replace('host', f'127.0.0.1:{server.port}')}{'&' if '?' in url else '?'}tick={TICK}"


async def test_a_candidate_leads(server: ZooKeeper) -> None:
    async with acting(url_of(server, "leads")) as backend:
        assert await lead(backend, "job") < await lead(backend, "job")
        assert not await backend.election("job").ask_to_resign()


async def test_an_observer_sees_leaders(server: ZooKeeper) -> None:
    async with acting(url_of(server, "looks")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.election("led").leader() is None


async def test_a_path_that_was_made_for_a_user_is_led_by_this_user(server: ZooKeeper) -> None:
    async with acting(url_of(server, "leads").replace("/apps?acl=read&", "/jobs?")) as backend:
        assert await lead(backend, "job")


REFUSED: dict[str, tuple[str, Act]] = {
    "an observer leads": ("/apps", lambda backend: lead(backend, "led")),
    "an observer leads another name": ("/apps/led", lambda backend: lead(backend, "fresh")),
    "a stranger looks at the path of a user": ("/jobs", lambda backend: backend.leaders()),
    "a stranger leads on the path of a user": ("/jobs", lambda backend: lead(backend, "job")),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_all_else_is_refused(server: ZooKeeper, what: str) -> None:
    path, act = REFUSED[what]
    async with acting(url_of(server, "looks").replace("/apps", path)) as backend:
        await refused(backend, act, "does not permit this client", "docs/zookeeper.md")


async def test_a_campaign_without_the_right_fails_although_reading_has_worked(server: ZooKeeper) -> None:
    async with acting(url_of(server, "looks")) as backend:
        await refused_for_good(
            backend, lambda backend: backend.leaders(), lambda backend: lead(backend, "led"), "docs/zookeeper.md"
        )
