"""Logins that come from elsewhere than the URL: each connection asks for one, and is replaced before its own ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from redis import asyncio as aioredis

import tenure
from tenure import _logins
from tenure._backends import redis
from tenure._backends.redis import connections, wake
from tenure._credentials import AskCredentials, Credentials
from tenure._lease import Granted
from tenure._logins import Given
from tenure._queue.outgoing import Outgoing
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.durations import stretched, until
from tests.explained import facts_by_name
from tests.servers import Authority, Redis, patient, private, shared
from tests.servers.redis_cluster import RedisCluster
from tests.servers.redis_sentinel import Sentinel

TTL = 600.0  # no test takes as long
LASTS = 1_000.0
"""Seconds for which the logins of these tests last: time is turned, and not waited for."""
DUE = 0.8 * LASTS
"""When another one should be there, and this one goes on."""


class User:
    """A user of a server, by a name of its own."""

    def __init__(self, server: Any, name: str = "worker", **trusting: Any) -> None:
        self.name = name
        self._url = server.url
        self._trusting = trusting

    async def gets(self, *passwords: str) -> None:
        """Accept these passwords, and no others; connections of before go on."""
        words = [f">{password}" for password in passwords]
        await self._order("ACL", "SETUSER", self.name, "resetpass", "on", *words, "~*", "&*", "+@all")

    async def is_cut_off(self) -> None:
        """End all its connections."""
        await self._order("CLIENT", "KILL", "USER", self.name)

    async def ids(self, *, subscribed: bool = False) -> set[str]:
        """Return the connections that it has."""
        async with aioredis.Redis.from_url(self._url, **self._trusting) as client:
            found = await client.client_list()
        return {
            one["id"]
            for one in found
            if one["user"] == self.name and (not subscribed or one["sub"] != "0" or one.get("ssub", "0") != "0")
        }

    async def _order(self, *words: str) -> None:
        async with aioredis.Redis.from_url(self._url, **self._trusting) as client:
            await client.execute_command(*words)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    with TemporaryDirectory(prefix="tenure") as folder:
        yield Path(folder, "redis.sock")


@pytest.fixture(scope="module")
def server(socket: Path) -> Iterator[Redis]:
    with private(Redis, password="r00t", options=(("unixsocket", str(socket)),)) as server:
        yield server


@pytest.fixture
async def user(server: Redis) -> AsyncIterator[User]:
    user = User(server)
    await user.gets("first")
    yield user
    await user._order("ACL", "DELUSER", user.name)


@pytest.fixture
def url(server: Redis) -> str:
    return f"redis://worker@127.0.0.1:{server.port}"


@asynccontextmanager
async def opened(url: str, ask: AskCredentials | None = None) -> AsyncIterator[redis.RedisBackend]:
    given = None if ask is None else Given(ask, asyncio.get_running_loop())
    backend = redis.open(Url.parse(patient(url)), credentials=given)
    try:
        yield backend
    finally:
        await backend.close()


class Source:
    """Gives the newest of its answers, which may be an error, and counts how often it is asked."""

    def __init__(self, *answers: str | Exception, lasts: float | None = None) -> None:
        self.answers = deque(answers)
        self.lasts = lasts
        self.asked = 0

    def __call__(self) -> Credentials:
        self.asked += 1
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return Credentials(answer, lasts=self.lasts)

    def gives(self, answer: str | Exception) -> None:
        self.answers = deque([answer])


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that puts the clock of logins forward."""
    ahead = 0.0
    turned = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    for module in (_logins, connections, wake):
        monkeypatch.setattr(module, "time", turned)

    def turn(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    return turn


async def opens(backend: redis.RedisBackend, count: int) -> None:
    """Use so many connections at once, until none is in use."""
    requests = [asyncio.create_task(backend._client.command("PING")) for _ in range(count)]
    await asyncio.wait(requests)
    await asyncio.gather(*requests)


# --- each connection asks for a login ---


@pytest.mark.parametrize("kind", ["a function", "an async function", "a file", "a command", "a user, too"])
async def test_each_source_lets_in(user: User, url: str, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    file.chmod(0o600)

    async def ask() -> str:
        await asyncio.sleep(0)
        return "first"

    sources: dict[str, tuple[str, AskCredentials | None]] = {
        "a function": ("", lambda: "first"),
        "an async function": ("", ask),
        "a file": (f"?password_file={file}", None),
        "a command": (f"?password_command={quote('printf first')}", None),
        "a user, too": ("", lambda: Credentials("first", user="worker")),
    }
    options, given = sources[kind]
    written = url.replace("worker@", "") if kind == "a user, too" else url
    async with tenure.connect(patient(f"{written}{options}"), credentials=given) as backend:
        await backend.queue("orders").send(b"x")
        assert await user.ids()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_unix_socket_lets_in(user: User, socket: Path, refused: bool) -> None:
    source = Source(*(["before"] if refused else []), "first")
    async with opened(f"redis+unix://worker@{socket}?db=1", source) as backend:
        await backend.leases.inspect("name")
        assert source.asked == 1 + refused
        source.gives("wrong")
        await user.is_cut_off()
        await until_refused(backend)


async def test_by_tls_it_lets_in() -> None:
    authority = Authority()
    with private(Redis, password="r00t", authority=authority) as server:
        user = User(server, ssl_ca_certs=str(authority.certificate))
        await user.gets("first")
        written = f"rediss://worker@127.0.0.1:{server.port}?ca={authority.certificate}"
        async with opened(written, Source("before", "first")) as backend:
            await backend.leases.inspect("name")
            assert await user.ids()


async def test_the_primary_of_sentinels_lets_in_and_they_have_a_login_of_their_own(server: Redis, user: User) -> None:
    with private(Sentinel, watches=server.port, password="hush", primary_password="r00t") as sentinel:
        source = Source("before", "first")
        async with opened(f"{sentinel.url}?username=worker&sentinel_password=hush", source) as backend:
            await backend.leases.inspect("name")
            assert await user.ids()
            source.gives("wrong")
            await user.is_cut_off()
            await until_refused(backend)


async def test_every_node_of_a_cluster_lets_in() -> None:
    cluster = shared(RedisCluster)
    users = [User(node) for node in cluster.nodes]
    for user in users:
        await user.gets("first")
    source = Source("before", "first")
    try:
        async with opened(cluster.url.replace("//", "//worker@"), source) as backend:
            for number in range(12):
                await backend.leases.inspect(f"{number}")
            assert all([await user.ids() for user in users])
            for user in users:
                await user.gets("second")
                await user.is_cut_off()
            source.gives("second")
            for number in range(12):
                await until(partial(answered, partial(backend.leases.inspect, f"{number}")))
            assert all([await user.ids() for user in users])
    finally:
        for user in users:
            await user._order("ACL", "DELUSER", user.name)


async def refusal(ask: Callable[[], Awaitable[object]]) -> str:
    """Return why there is no answer now; empty if there is one."""
    try:
        await ask()
    except Unavailable as error:
        return str(error)
    return ""


async def answered(ask: Callable[[], Awaitable[object]]) -> bool:
    return not await refusal(ask)


async def until_refused(backend: redis.RedisBackend) -> None:
    """Wait until the login is refused, and not only a connection ended; it names where it comes from."""

    async def is_told() -> bool:
        said = await refusal(lambda: backend.leases.inspect("name"))
        return "refused the login" in said and "check what credentials= gives" in said

    await until(is_told)


# --- a password that is replaced ---


async def test_after_a_replacement_requests_renewals_and_hints_go_on(
    user: User, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "QUIET_MAX", 0)  # a subscription gives one hint, and a second one at once
    source = Source("first")
    async with opened(url, source) as backend, opened(url, source) as other:
        won = await backend.leases.acquire(name, "ann#1", TTL)
        assert isinstance(won, Granted)
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        for password in ("second", "third"):
            await user.gets(password)
            source.gives(password)
            await user.is_cut_off()
            await until(lambda: answered(lambda: other.broker.send(name, [Outgoing(b"x")])))
            await until(lambda: answered(lambda: backend.leases.renew([won.grant], TTL)))
            assert list(await backend.leases.renew([won.grant], TTL)) == [Granted(won.grant)]
            await asyncio.wait_for(anext(hints), 30)  # it listens again
            await until(lambda: user.ids(subscribed=True))
        while True:  # those of the subscription come first
            hint = asyncio.ensure_future(anext(hints))
            if not (await asyncio.wait([hint], timeout=stretched(0.05)))[0]:
                break
        await other.broker.send(name, [Outgoing(b"x")])
        await asyncio.wait_for(hint, 30)


async def test_a_password_that_is_replaced_just_now_is_asked_for_once_more(user: User, url: str) -> None:
    source = Source("before", "first")
    async with opened(url, source) as backend:
        await backend.leases.inspect("name")
    assert source.asked == 2


async def test_a_wrong_password_names_where_it_comes_from(user: User, url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush-wrong")
    file.chmod(0o600)
    for options, given, named in (
        ("", Source("hush-wrong"), "credentials="),
        (f"?password_file={file}", None, f"password_file={file}"),
        (f"?password_command={quote('printf hush-wrong')}", None, "the password command 'printf'"),
    ):
        async with opened(f"{url}{options}", given) as backend:
            with pytest.raises(ConfigError, match=f"refused the login.*; check what {named} gives, and the") as raised:
                await backend.leases.inspect("name")
        assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "given", "named"),
    [
        ("redis://:hush@h?password_file=/f", None, "a password and password_file="),
        ("redis://h?password=hush&password_command=c", None, "a password and password_command="),
        ("redis+sentinel://:hush@h/s", Source("hush"), "a password and credentials="),
        ("redis://h?cluster=true&password_command=hush", Source("hush"), "password_command= and credentials="),
    ],
)
async def test_two_passwords_are_refused(written: str, given: Source | None, named: str) -> None:
    with pytest.raises(ConfigError, match=f"is given {named}; leave out all but one") as raised:
        async with opened(written, given):
            pass
    assert "hush" not in str(raised.value)


async def test_doctor_says_where_the_password_comes_from(user: User, url: str) -> None:
    async with opened(url, Source("first")) as backend:
        facts = facts_by_name(await backend.describe())
    assert (facts["login"].value, facts["login"].advice) == ("a password, from credentials=", "")


@pytest.mark.parametrize("how", ["refused", "failing", "silent"])
async def test_without_a_login_for_more_connections_those_that_are_open_go_on(user: User, url: str, how: str) -> None:
    source, goes_on = Source("first"), asyncio.Event()

    async def ask() -> Credentials:
        if how == "silent" and source.asked:
            await goes_on.wait()
        return source()

    options = f"?timeout={stretched(0.3):.2f}" if how == "silent" else ""
    async with opened(f"{url}{options}", ask) as backend:
        await opens(backend, 2)
        before = await user.ids()
        assert len(before) == 2
        source.gives("wrong" if how == "refused" else LookupError("no token"))
        said = {"refused": "check what credentials= gives", "failing": "LookupError", "silent": "gave no password"}
        with pytest.raises(Unavailable, match=said[how]):
            await opens(backend, 3)
        for _ in range(3):
            await opens(backend, 1)
        assert await user.ids() == before
        goes_on.set()


async def test_a_slow_source_and_a_silent_server_are_told_apart(server: Redis, user: User) -> None:
    source, goes_on = Source("first"), asyncio.Event()

    async def ask() -> Credentials:
        if source.asked:
            await goes_on.wait()
        return source()

    async with FaultProxy("127.0.0.1", server.port) as proxy:
        url = f"redis://worker@{proxy.host}:{proxy.port}?timeout={stretched(0.3):.2f}"
        async with opened(url, ask) as backend:
            await opens(backend, 1)
            before = backend._client._connections().redis
            proxy.stall()
            said = await asyncio.gather(*(refusal(lambda: backend._client.command("PING")) for _ in range(2)))
            assert ["gave no answer" in said[0], "credentials= gave no password" in said[1]] == [True, True], said
            assert backend._client._connections().redis is not before  # what is silent is not used again
            proxy.heal()
            goes_on.set()
            await opens(backend, 2)


# --- a login that ends ---


async def test_connections_are_replaced_before_their_login_ends_and_no_request_is_cut(
    user: User, url: str, turn: Callable[[float], None], name: str
) -> None:
    source = Source("first", lasts=LASTS)
    async with opened(url, source) as backend:
        await opens(backend, 3)
        waiting = asyncio.create_task(backend._client.command("BLPOP", name, 0))
        await until(lambda: in_use(backend))
        before = await user.ids()
        assert len(before) == 3
        await opens(backend, 2)
        assert await user.ids() == before
        await user.gets("second")
        source.gives("second")
        turn(DUE)
        await opens(backend, 2)  # the source is asked beside these
        await until(lambda: is_there(backend, "second"))
        await opens(backend, 2)
        assert len(await user.ids() & before) == 1  # the one that waits
        await backend._client.command("RPUSH", name, "x")
        assert (await waiting)[1] == b"x"
        await opens(backend, 3)
        assert len(await user.ids()) == 3
        assert not await user.ids() & before
        assert source.asked == 2


def is_there(backend: redis.RedisBackend, password: str) -> bool:
    kept = backend._client.logins._kept
    return kept is not None and kept.login.password == Secret(password)


def in_use(backend: redis.RedisBackend) -> int:
    pool: Any = backend._client._connections().redis.connection_pool
    return len(pool._in_use_connections)


async def test_without_another_login_connections_go_on_as_long_as_the_server_lets_them(
    user: User, url: str, turn: Callable[[float], None]
) -> None:
    source = Source("first", lasts=LASTS)
    async with opened(url, source) as backend:
        await opens(backend, 2)
        before = await user.ids()
        source.gives(LookupError("no token"))
        turn(DUE)
        for _ in range(5):
            await opens(backend, 2)
        assert await user.ids() == before
        await until(lambda: source.asked == 2)
        turn(LASTS - DUE)
        for _ in range(3):
            await opens(backend, 2)
        assert await user.ids() == before
        with pytest.raises(Unavailable, match="credentials= failed: LookupError"):
            await opens(backend, 3)
        source.gives("first")
        await opens(backend, 3)
        await until(lambda: is_there(backend, "first"))
        await opens(backend, 3)
        assert not await user.ids() & before


async def test_while_the_source_is_silent_connections_go_on(
    user: User, url: str, turn: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_logins, "SLOW", 0.01)
    source, goes_on = Source("first", lasts=LASTS), asyncio.Event()
    asked = 0

    async def ask() -> Credentials:
        nonlocal asked
        asked += 1
        if asked > 1:
            await goes_on.wait()
        return source()

    async with opened(url, ask) as backend:
        await opens(backend, 2)
        before = await user.ids()
        turn(DUE)
        for _ in range(3):
            await opens(backend, 2)
        await until(lambda: asked == 2)
        assert await user.ids() == before
        await opens(backend, 3)
        assert len(await user.ids()) == 3
        await user.gets("second")
        source.gives("second")
        goes_on.set()
        await until(lambda: is_there(backend, "second"))
        await opens(backend, 3)
        assert len(await user.ids()) == 3
        assert not await user.ids() & before


async def test_a_token_that_a_cloud_gives_again_replaces_no_connection(
    user: User, url: str, turn: Callable[[float], None]
) -> None:
    """It is kept by its library for a while, and lasts for less time each time."""
    source = Source("first", lasts=LASTS)
    async with opened(url, source) as backend:
        await opens(backend, 2)
        before = await user.ids()
        turn(DUE)
        source.lasts = LASTS - DUE
        await opens(backend, 2)
        await until(lambda: source.asked == 2)
        await opens(backend, 2)
        assert await user.ids() == before
        source.lasts = LASTS  # the same password, and the server lets it in for the same time again
        turn(0.9 * (LASTS - DUE))
        await opens(backend, 2)
        await until(lambda: source.asked == 3 and backend._client.logins.unanswered(1.0) is None)
        await opens(backend, 2)
        assert not await user.ids() & before


async def test_the_subscription_is_replaced_before_its_login_ends(
    user: User, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_logins, "RENEWED_AT", 0.2 / LASTS)
    tokens = iter(range(1_000_000))
    await user.gets("first")

    def ask() -> Credentials:
        return Credentials("first", lasts=LASTS * (1 + next(tokens)))

    async with opened(url, ask) as backend, opened(url, lambda: "first") as other:
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        seen: set[str] = set()

        async def is_replaced() -> bool:
            seen.update(await user.ids(subscribed=True))
            return len(seen) >= 3

        await until(is_replaced)
        await other.broker.send(name, [Outgoing(b"x")])
        await asyncio.wait_for(anext(hints), 30)


async def test_a_subscription_goes_on_if_the_source_gives_the_same_again(
    user: User, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_logins, "RENEWED_AT", 1e-9)
    monkeypatch.setattr(_logins, "TRIED_AGAIN_MIN", 0.01)
    monkeypatch.setattr(wake, "LOGIN_PAUSES", (0.02, 0.02))
    ends_at = time.monotonic() + LASTS
    asked = 0

    def ask() -> Credentials:
        nonlocal asked
        asked += 1
        return Credentials("first", lasts=ends_at - time.monotonic())

    async with opened(url, ask) as backend:
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        [before], asked_before = await user.ids(subscribed=True), asked
        await until(lambda: asked >= asked_before + 6)
        assert await user.ids(subscribed=True) == {before}


async def test_a_subscription_that_is_found_broken_by_several_is_renewed_once(user: User, url: str, name: str) -> None:
    """By the task that reads, and by checks: each would open a connection, and only one of them be closed again."""
    source = Source("first")
    async with opened(url, source) as backend:
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        [subscriber] = backend._wake.here().values()
        pubsub, before = subscriber._pubsub, await user.ids(subscribed=True)
        assert pubsub is not None
        await user.is_cut_off()
        await asyncio.gather(*(subscriber._check(pubsub) for _ in range(3)))
        await asyncio.wait_for(anext(hints), 30)
        await until(lambda: user.ids(subscribed=True))
        assert not await user.ids(subscribed=True) & before
    assert source.asked == 2
