"""The roles of docs/zookeeper.md: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("kazoo")

from kazoo.exceptions import NoAuthError
from kazoo.security import ACL, Id, make_digest_acl

import tenure
from tests.docs.pages import commands
from tests.durations import stretched, until
from tests.servers import ZooKeeper, private
from tests.stores.rights import LATER, TTL, Act, acting, lead, refused

TICK = 0.1
RIGHTS = {"c": 4, "d": 8, "r": 1, "w": 2, "a": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    """Yield a server with nodes that were made as on the page, and a name that was led."""
    with private(ZooKeeper, tick=TICK) as own:
        make_paths(own)
        asyncio.run(led(own))
        yield own


def make_paths(server: ZooKeeper) -> None:
    """Carry out the lines for zkCli.sh, a program of Java."""
    lines = commands("docs/zookeeper.md", "Rights", "[zk").splitlines()
    (_, *login), *creates = (line.partition("] ")[2].split() for line in lines)
    with server.client(auth_data=[tuple(login)]) as client:
        for order, path, data, rights in creates:
            assert (order, data) == ("create", '""')
            client.create(path, b"", acl=[acl_of(one) for one in rights.split(",")])


def acl_of(text: str) -> ACL:
    """Return the entry that zkCli makes of SCHEME:ID:RIGHTS."""
    scheme, who, rights = text.split(":")
    return ACL(sum(RIGHTS[one] for one in rights), Id(scheme, who))


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


NAMES = {"c": "create", "d": "delete", "r": "read", "w": "write"}


def make_for_another(server: ZooKeeper, node: str, rights: str) -> str:
    """Make a node of an administrator, with these *rights* for the user; return the URL of its path."""
    mine = make_digest_acl("app", "PASSWORD", **{NAMES[one]: True for one in rights})
    path = node.removesuffix("/job")
    with server.client(auth_data=[("digest", "admin:ANOTHER")]) as client:
        client.ensure_path(node)
        client.set_acls(node, [make_digest_acl("admin", "ANOTHER", all=True), mine])
    return url_of(server, "leads").replace("/apps?acl=read&", f"{path}?")


@pytest.mark.parametrize("node", ["/their-path-cr", "/closed/their-path-cr", "/their-name/job-cdrw"])
async def test_these_rights_on_nodes_of_another_are_enough(server: ZooKeeper, node: str) -> None:
    path, _, rights = node.rpartition("-")
    make_for_another(server, path.rpartition("/their")[0] or "/above", "")
    async with acting(make_for_another(server, path, rights)) as backend:
        assert await lead(backend, "job") < await lead(backend, "job")


@pytest.mark.parametrize(
    ("node", "rights", "error"),
    [
        *(("/less-path", rights, tenure.ConfigError) for rights in ("d", "r", "rw")),
        *(("/less-name/job", rights, tenure.ConfigError) for rights in ("cdw", "drw")),
        ("/less-name/job", "cdr", LATER),  # it stands in the queue already when it has to write
    ],
)
async def test_with_less_rights_on_nodes_of_another_it_is_refused(
    server: ZooKeeper, node: str, rights: str, error: type[tenure.TenureError]
) -> None:
    async with acting(make_for_another(server, f"/{rights}{node[1:]}", rights)) as backend:
        await refused(backend, lambda backend: lead(backend, "job"), "does not permit this user", error=error)


async def test_without_the_right_to_read_the_path_leaders_are_not_listed(server: ZooKeeper) -> None:
    async with acting(make_for_another(server, "/unread", "c")) as backend:
        assert await lead(backend, "job")
        await refused(backend, lambda backend: backend.leaders(), "does not permit this user", error=LATER)


async def test_without_the_right_to_delete_a_leader_says_why_it_releases_nothing(
    server: ZooKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    ttl = stretched(1.0)
    async with acting(make_for_another(server, "/no-delete/job", "crw")) as backend:
        leading = asyncio.ensure_future(backend.election("job", ttl=ttl).run(lambda term: asyncio.sleep(0)))
        await until(lambda: "could not be released" in caplog.text)
        assert "does not permit this user what tenure needs" in caplog.text
        assert "docs/zookeeper.md" in caplog.text
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading


async def test_an_observer_can_not_ask_a_leader_to_resign(server: ZooKeeper) -> None:
    async with (
        acting(url_of(server, "leads")) as candidate,
        candidate.election("held", ttl=TTL).campaign(),
        acting(url_of(server, "looks")) as observer,
    ):
        election = observer.election("held")  # it looks who leads first
        await refused(observer, lambda _: election.ask_to_resign(), "does not permit this user", error=LATER)


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
        await refused(backend, act, "does not permit this user", "docs/zookeeper.md")


async def test_who_may_write_another_path_can_not_end_a_term(server: ZooKeeper) -> None:
    def try_to_end() -> None:
        with server.client(auth_data=[("digest", "other:PASSWORD")]) as client:
            client.create("/elsewhere", b"", acl=[make_digest_acl("other", "PASSWORD", all=True)])
            client.create("/elsewhere/own", b"")
            below = nodes_below(client, "/apps/held")
            assert len(below) > 1
            for node in below:
                for act in (client.delete, client.set, client.set_acls, client.create):
                    path = f"{node}/own" if act == client.create else node
                    more = {client.set: (b"",), client.set_acls: ([make_digest_acl("other", "PASSWORD", all=True)],)}
                    with pytest.raises(NoAuthError):
                        act(path, *more.get(act, ()))

    async with acting(url_of(server, "leads")) as backend, backend.election("held", ttl=TTL).campaign() as term:
        await asyncio.to_thread(try_to_end)
        term.check()


async def test_a_campaign_without_the_right_goes_on_if_looking_has_worked(server: ZooKeeper) -> None:
    async with acting(url_of(server, "looks")) as backend:
        assert "led" in await backend.leaders()
        await refused(backend, lambda backend: lead(backend, "led"), "does not permit this user", error=LATER)


def nodes_below(client: Any, path: str) -> list[str]:
    """Return *path*, and all nodes below it."""
    below = (one for name in client.get_children(path) for one in nodes_below(client, f"{path}/{name}"))
    return [path, *below]


async def test_a_second_login_takes_over_on_nodes_of_both(server: ZooKeeper) -> None:
    """As docs/security.md says of rotating a secret: nodes are for both, processes are restarted, the old one goes."""
    old_url = url_of(server, "leads").replace("/apps?acl=read&", "/rotated?")
    new_url = old_url.replace("app:PASSWORD", "app:ANOTHER")

    def give(own: str, *passwords: str) -> None:
        """Give the path and all nodes to the logins with these *passwords*, with the login that has its *own*."""
        with server.client(auth_data=[("digest", f"app:{own}")]) as client:
            for node in nodes_below(client, "/rotated"):
                client.set_acls(node, [make_digest_acl("app", one, all=True) for one in passwords])

    ends = asyncio.Event()
    terms: list[tenure.Term] = []

    async def work(term: tenure.Term) -> None:
        terms.append(term)
        await ends.wait()

    async with acting(old_url) as old:
        leading = asyncio.create_task(old.election("job", ttl=TTL).run(work, stop=ends))
        await until(lambda: terms)
        async with acting(new_url) as early:
            await refused(early, lambda backend: lead(backend, "job"), "does not permit this user")
        await asyncio.to_thread(give, "PASSWORD", "PASSWORD", "ANOTHER")
        async with acting(new_url) as new:
            following = asyncio.create_task(lead(new, "job"))
            await until(lambda: stands(server))
            leader = await new.election("job").leader()
            assert leader is not None
            assert leader.token == terms[0].token
            terms[0].check()
            ends.set()
            await leading
            assert await following > terms[0].token

            # The node of a leader with the new login is its own: the old login is refused meanwhile.
            async with new.election("job", ttl=TTL).campaign():
                await refused(old, lambda backend: lead(backend, "job"), "does not permit this user", error=LATER)
        await asyncio.to_thread(give, "ANOTHER", "ANOTHER")
        with pytest.raises(tenure.Unavailable, match="does not permit this user"):
            await old.election("job").leader()
        async with acting(new_url) as new:
            assert await lead(new, "job") > terms[0].token + 1


async def stands(server: ZooKeeper) -> bool:
    """Return whether a second candidate stands behind the first."""

    def look() -> bool:
        with server.client(auth_data=[("digest", "app:ANOTHER")]) as client:
            return len(client.get_children("/rotated/job")) > 1

    return await asyncio.to_thread(look)
