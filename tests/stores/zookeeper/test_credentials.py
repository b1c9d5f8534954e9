"""Logins at ZooKeeper by a password that isn't in the URL: asked for again and again, and replaced meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kazoo")

from kazoo.protocol.states import KeeperState

import tenure
from tenure._backends import zookeeper
from tenure._backends.zookeeper import login as session_login
from tenure._backends.zookeeper.driver import Driver
from tenure._backends.zookeeper.session import Session
from tenure._lease import Granted
from tenure._logins import Given
from tenure._url import Url
from tenure.events import Event, Renewed, StandingBy, TermEnding
from tests.durations import stretched, until, wait_until
from tests.servers import ZooKeeper, patient, private
from tests.stores.sources import WAYS, Answers, Way, a_file

TICK = 0.1
TTL, RENEW_EVERY = 30.0, 0.1
"""Seconds of a lease that no test waits for, and of the pauses between its renewals."""
USER, PASSWORD = "ann", "s3cret/@:"
REFUSED = "refused the login; check what {} gives, and the user"


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeper]:
    with private(ZooKeeper, tick=TICK, login=(USER, PASSWORD)) as own:
        yield own


def url_of(server: ZooKeeper, options: str = "", user: str = f"{USER}@") -> str:
    return patient(f"zookeeper://{user}127.0.0.1:{server.port}/?tick={TICK}{options}")


async def token_of(backend: tenure.Backend, name: str) -> int:
    """Lead *name* for a moment; return the token."""
    tokens: list[int] = []

    async def work(term: tenure.Term) -> None:
        tokens.append(term.token)

    await backend.election(name, ttl=TTL).run(work)
    return tokens[0]


def owner_of(server: ZooKeeper, name: str) -> tuple[str, str]:
    """Return who has all rights on the node of an election that everybody may read."""
    with server.client() as client:
        [rule] = [one for one in client.get_acls(f"/{name}")[0] if one.id.scheme != "world"]
    return rule.id.scheme, rule.id.id


# --- where a password comes from ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("auth", ["digest", "sasl"])
async def test_each_source_lets_in(server: ZooKeeper, tmp_path: Path, auth: str, way: Way) -> None:
    given = way(tmp_path, USER, PASSWORD)
    name = f"{auth}-{way.__name__}"
    url = url_of(server, f"&auth={auth}&acl=read&{given.option}".rstrip("&"), given.login)
    async with tenure.connect(url, credentials=given.ask) as backend:
        assert await token_of(backend, name) < await token_of(backend, name)
        facts = {fact.name: fact for fact in (await backend.diagnose()).facts}
        assert f"by {auth}; all rights" in facts["rights"].value
        assert "by default 2 to 20 ticks" in facts["sessions"].value
    scheme, who = await asyncio.to_thread(owner_of, server, name)
    assert (scheme, who.partition(":")[0]) == (auth, USER)


async def test_without_an_acl_the_nodes_of_a_source_belong_to_its_user(server: ZooKeeper) -> None:
    async with tenure.connect(url_of(server, "&auth=sasl"), credentials=lambda: PASSWORD) as backend:
        await token_of(backend, "private")
    async with tenure.connect(url_of(server, user="")) as backend:
        with pytest.raises(tenure.ConfigError, match="does not permit this user"):
            await backend.election("private").leader()


# --- a password that is replaced ---


class Process:
    """A backend that leads or stands by, as a process has it."""

    def __init__(self) -> None:
        self.backend: tenure.Backend
        self.events: list[Event] = []
        self.terms: list[tenure.Term] = []
        self.stop = asyncio.Event()
        self.ended: asyncio.Task[None]

    def count(self, kind: type[Event]) -> int:
        return sum(type(event) is kind for event in self.events)

    async def until_next(self, kind: type[Event], more: int = 2) -> None:
        """Wait for *more* events of a *kind*: the first may be of a request that was on its way."""
        before = self.count(kind)
        await until(lambda: self.count(kind) >= before + more)

    async def work(self, term: tenure.Term) -> None:
        self.terms.append(term)
        await self.stop.wait()


@asynccontextmanager
async def process(
    url: str, name: str, ask: tenure.AskCredentials | None = None, ttl: float = TTL
) -> AsyncIterator[Process]:
    made = Process()
    async with tenure.connect(url, credentials=ask, on_event=made.events.append) as made.backend:
        election = made.backend.election(name, ttl=ttl, renew_every=RENEW_EVERY, retry_every=RENEW_EVERY)
        made.ended = asyncio.create_task(election.run(made.work, stop=made.stop))
        yield made
        made.stop.set()
        await made.ended


async def is_refused(backend: tenure.Backend, says: str) -> bool:
    """Return whether a request is refused for now, with a text that *says* something."""
    try:
        await backend.election("job").leader()
    except tenure.Unavailable as error:
        return says in str(error)
    return False


async def restarted(server: ZooKeeper, password: str) -> None:
    """Let a server accept another password; it keeps its sessions."""
    server.accept(USER, password)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


async def test_a_leader_whose_password_comes_late_keeps_its_term(tmp_path: Path) -> None:
    """The server has the new one first: until the file has it, too, logins are refused."""
    with private(ZooKeeper, tick=TICK, login=(USER, "first"), needs_login=True) as server:
        option = a_file(tmp_path, USER, "first").option
        url = url_of(server, f"&auth=sasl&{option}&timeout=1")
        async with process(url, "job") as ann:
            await until(lambda: ann.terms)
            async with process(url, "job") as bob:
                await until(lambda: bob.count(StandingBy))
                await restarted(server, "second")
                says = REFUSED.format(option)
                await until(lambda: is_refused(ann.backend, says))
                a_file(tmp_path, USER, "second")
                await ann.until_next(Renewed)
                ann.terms[0].check()
                ann.stop.set()
                await until(lambda: bob.terms)
                assert bob.terms[0].token > ann.terms[0].token
                assert len(ann.terms) == 1
                assert ann.count(TermEnding) == 0


async def test_a_leader_that_stays_refused_is_followed(tmp_path: Path) -> None:
    """Each attempt to log in renews its session: so it makes none after the end of its claim."""
    ttl = stretched(1.5)
    with private(ZooKeeper, tick=TICK, login=(USER, "first")) as server:
        option = a_file(tmp_path, USER, "first").option
        async with process(url_of(server, f"&auth=sasl&{option}"), "job", ttl=ttl) as ann:
            await until(lambda: ann.terms)
            await restarted(server, "second")
            async with process(url_of(server, "&auth=sasl"), "job", lambda: "second") as bob:
                await until(lambda: bob.terms)
                assert ann.terms[0].lost.is_set()
                assert bob.terms[0].token > ann.terms[0].token
                a_file(tmp_path, USER, "second")
                bob.stop.set()
                await until(lambda: len(ann.terms) > 1)
                assert ann.terms[1].token > bob.terms[0].token


async def test_a_session_keeps_the_digest_that_it_has_begun_with(server: ZooKeeper) -> None:
    """Another password is another owner; its own nodes would not be its own any more."""
    ask = Answers("first")
    async with leased(server, ask, "&auth=digest") as backend:
        claim = await backend.leases.acquire("owned", "ann#1", TTL)
        assert isinstance(claim, Granted)
        ask.next = ["second"]
        session = backend.client.session(TTL)
        await reconnected(session)
        assert await backend.leases.renew([claim.grant], TTL) == [Granted(claim.grant)]
        await backend.leases.release(claim.grant)
        assert set(ask.given) == {"first"}
    async with leased(server, ask, "&auth=digest") as backend:
        with pytest.raises(tenure.ConfigError, match="does not permit this user"):
            await backend.leases.acquire("owned", "ann#2", TTL)
        assert set(ask.given) == {"first", "second"}


@asynccontextmanager
async def leased(
    server: ZooKeeper, ask: tenure.AskCredentials, options: str = "&auth=sasl"
) -> AsyncIterator[zookeeper.ZooKeeperBackend]:
    """Yield a backend on this loop."""
    url = Url.parse(url_of(server, options))
    backend = zookeeper.open(url, credentials=Given(ask, asyncio.get_running_loop()))
    try:
        yield backend
    finally:
        await backend.close()


async def reconnected(session: Session) -> None:
    """Let the connection of a session break, and wait for the next one."""
    before = session.connections
    session.drop()
    await until(lambda: session.connections > before and session.is_connected)


async def test_each_connection_asks_for_the_password(server: ZooKeeper) -> None:
    ask = Answers(PASSWORD)
    async with leased(server, ask) as backend:
        session = backend.client.session(TTL)
        await session.connected(backend.client.until())
        assert len(ask.given) == 1
        await reconnected(session)
        assert len(ask.given) == 2


# --- a password that is refused ---


async def test_a_password_that_is_refused_at_first_is_asked_for_once_more(server: ZooKeeper) -> None:
    ask = Answers("wrong", PASSWORD)
    async with leased(server, ask) as backend:
        session = backend.client.session(TTL)
        await session.connected(backend.client.until())
        assert ask.given == ["wrong", PASSWORD]
        assert session.connections == 1  # without a login, it is none that can be used
        ask.next = ["another wrong one", PASSWORD]
        await reconnected(session)
        assert ask.given[2:] == ["another wrong one", PASSWORD]
        assert session.connections == 2
        assert backend.client.session(TTL) is session
        assert session._driver.failure is None


async def test_a_wrong_password_names_its_source(server: ZooKeeper, tmp_path: Path) -> None:
    ask = Answers("wrong")
    async with tenure.connect(url_of(server, "&auth=sasl"), credentials=ask) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format("credentials=")):
            await backend.election("job").leader()
        assert ask.given == ["wrong", "wrong"]
    option = a_file(tmp_path, USER, "wrong").option
    async with tenure.connect(url_of(server, f"&auth=sasl&{option}")) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format(option)):
            await backend.election("job").leader()
        a_file(tmp_path, USER, PASSWORD)
        assert await backend.election("job").leader() is None  # in another session


async def test_a_request_beside_a_refused_login_is_told_of_it(
    server: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Driver._call

    def call_late(driver: Driver, *arguments: Any) -> Any:
        wait_until(lambda: driver.client_state == KeeperState.CLOSED)  # the loop of a busy machine is behind its thread
        return call(driver, *arguments)

    monkeypatch.setattr(Driver, "_call", call_late)
    async with tenure.connect(url_of(server, "&auth=sasl", f"{USER}:wrong@")) as backend:
        with pytest.raises(tenure.ConfigError, match="refused the login"):
            await backend.election("job").leader()


async def test_a_source_that_has_no_password_is_told(server: ZooKeeper, tmp_path: Path) -> None:
    option = a_file(tmp_path, USER, "").option
    async with tenure.connect(url_of(server, f"&{option}")) as backend:
        with pytest.raises(tenure.ConfigError, match=r"password_file=.* has no password: it is empty"):
            await backend.election("job").leader()
    url = url_of(server, "&auth=sasl", user="")
    async with tenure.connect(url, credentials=lambda: PASSWORD) as backend:
        with pytest.raises(tenure.ConfigError, match=r"gives a password without a user, and zookeeper://.* needs one"):
            await backend.election("job").leader()

    def fail() -> str:
        raise OSError("no token today")

    async with tenure.connect(url_of(server, "&timeout=0.2"), credentials=fail) as backend:
        with pytest.raises(tenure.Unavailable, match="credentials= failed: OSError: no token today"):
            await backend.election("job").leader()


async def test_a_server_that_requires_another_kind_of_login_is_told(tmp_path: Path) -> None:
    with private(ZooKeeper, tick=TICK, login=(USER, PASSWORD), needs_login=True) as server:
        option = a_file(tmp_path, USER, PASSWORD).option
        async with tenure.connect(url_of(server, f"&{option}")) as backend:
            with pytest.raises(tenure.ConfigError, match=r"requires another one than auth=digest; add the option auth"):
                await backend.election("job").leader()


@pytest.mark.parametrize(
    ("user", "options", "given", "says"),
    [
        (f"{USER}:hush@", "", True, "is given a password and credentials="),
        (f"{USER}:hush@", "&password_file=FILE", False, "is given a password and password_file="),
        (f"{USER}@", "&password_file=FILE&password_command=echo", False, "password_file= and password_command="),
        (f"{USER}@", "&password_command=echo", True, "password_command= and credentials="),
        (f"{USER}@", "", False, "needs a user and a password before the @"),
        (":hush@", "&password_command=echo", False, "needs a user and a password before the @"),
        ("", "&auth=sasl", False, "auth=sasl needs a user and a password"),
    ],
)
async def test_two_passwords_and_none_are_refused(
    tmp_path: Path, user: str, options: str, given: bool, says: str
) -> None:
    a_file(tmp_path, USER, PASSWORD)
    url = f"zookeeper://{user}127.0.0.1:1/?tick={TICK}{options.replace('FILE', str(tmp_path / 'password'))}"
    with pytest.raises(tenure.ConfigError, match=says) as refused:
        async with tenure.connect(url, credentials=(lambda: PASSWORD) if given else None):
            pass
    assert "hush" not in str(refused.value)


# --- a loop that is blocked, and a source that is slow ---


async def test_a_blocked_loop_delays_a_login_and_nothing_hangs(server: ZooKeeper) -> None:
    async with leased(server, lambda: PASSWORD) as backend:
        claim = await backend.leases.acquire("blocked", "ann#1", TTL)
        assert isinstance(claim, Granted)
        session = backend.client.session(TTL)
        driver = session._driver
        session.drop()
        wait_until(lambda: "credentials= has given no password within" in str(driver.failure))
        assert f"{session.id:x}" not in server.word("cons")  # it has not connected, so it was not renewed
        assert not session._driver.connected
        assert await backend.leases.renew([claim.grant], TTL) == [Granted(claim.grant)]
        assert backend.client.session(TTL) is session


async def test_an_answer_that_comes_late_is_used_by_the_next_attempt(
    server: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_login, "WAIT_MAX", 0.01)
    asked = 0
    answers = asyncio.Event()

    async def ask() -> str:
        nonlocal asked
        asked += 1
        await answers.wait()
        return PASSWORD

    async with leased(server, ask) as backend:
        session = backend.client.session(TTL)
        await until(lambda: "credentials= has given no password within 0.01 s" in str(session._driver.failure))
        answers.set()
        await session.connected(backend.client.until())
        assert asked == 1


async def test_a_source_that_never_answers_does_not_keep_a_backend_open(server: ZooKeeper) -> None:
    begun = asyncio.Event()

    async def ask() -> str:
        begun.set()
        await asyncio.Event().wait()
        return PASSWORD

    async with leased(server, ask) as backend:
        session = backend.client.session(TTL)
        await begun.wait()
        thread: Any = session._driver._connection._connection_routine
    assert not thread.is_alive()
