"""Logins at PostgreSQL by a password that isn't in the URL, for all connections of a backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("asyncpg")

import tenure
from tenure._backends import postgres
from tenure.cli import main
from tests.durations import until
from tests.servers import Postgres, free_port, patient, private
from tests.stores.postgres.migrated import native
from tests.stores.sources import WAYS, Answers, Way, a_file
from tests.stores.users import PASSWORDS, OfPostgres

ROOT = "r00t"
USER, PASSWORD = "first", PASSWORDS["first"]
REFUSED = "refused the login: .*; check what {} gives, and the user"


@pytest.fixture(scope="module")
def users() -> Iterator[OfPostgres]:
    """Yield the users of a server that has the schema."""

    async def prepare(users: OfPostgres) -> None:
        await users.prepare()
        await users.add(USER)

    with private(Postgres, password=ROOT) as server:
        found = OfPostgres(server)
        asyncio.run(prepare(found))
        yield found


UrlOf = Callable[..., str]


@pytest.fixture
def url_of(users: OfPostgres, monkeypatch: pytest.MonkeyPatch) -> UrlOf:
    """Return what makes a URL; no variable and no file of libpq has a password."""
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "/nowhere")

    def make(*options: str, login: str = f"{USER}@", before: str = "") -> str:
        query = "&".join(one for one in options if one)
        return patient(f"postgresql://{login}{before}127.0.0.1:{users.server.port}/postgres?{query}".rstrip("?"))

    return make


async def connected(users: OfPostgres, user: str = USER) -> dict[int, str]:
    """Return the connections of a user, by the numbers of their processes, with the newest statement of each."""
    ask = "SELECT pid, query FROM pg_stat_activity WHERE usename = $1"
    async with native(users.server.url) as connection:
        return {row["pid"]: row["query"] for row in await connection.fetch(ask, user)}


# --- where a password comes from ---


@pytest.mark.parametrize("way", WAYS)
async def test_each_source_lets_in(url_of: UrlOf, users: OfPostgres, tmp_path: Path, way: Way) -> None:
    given = way(tmp_path, USER, PASSWORD)
    name = f"q-{way.__name__}".replace("_", "-")
    async with tenure.connect(url_of(given.option, login=given.login), credentials=given.ask) as backend:
        await backend.queue(name).send(b"x")
        [message] = await backend.queue(name).receive()
        await message.complete()
        async with backend.election(name, ttl=60).campaign() as term:
            term.check()
        assert len(await connected(users)) >= 2


@pytest.mark.parametrize("way", WAYS)
async def test_each_source_lets_in_at_one_of_several_hosts(url_of: UrlOf, tmp_path: Path, way: Way) -> None:
    given = way(tmp_path, USER, PASSWORD)
    url = url_of(given.option, login=given.login, before=f"127.0.0.1:{free_port()},")
    async with tenure.connect(url, credentials=given.ask) as backend:
        assert await backend.election("no-such-name").leader() is None


async def test_a_schema_is_migrated_with_the_password_of_a_source(
    url_of: UrlOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = a_file(tmp_path, "postgres", ROOT).option
    ask = Answers(ROOT)
    async with tenure.connect(url_of("schema=given", login="postgres@"), credentials=ask) as backend:
        assert "created the schema 'given'" in await backend.migrate()
        assert await backend.election("job").leader() is None
    url = url_of("schema=of_a_file", option, login="postgres@")
    assert (await postgres.migrate(url)).before == 0
    url = url_of("schema=of_a_command_line", option, login="postgres@")
    assert await asyncio.to_thread(main, ["migrate", url]) == 0
    assert "created the schema 'of_a_command_line'" in capsys.readouterr().out


async def test_the_connection_that_listens_logs_in_with_the_newest_password(url_of: UrlOf, users: OfPostgres) -> None:
    user, ask = "second", Answers(PASSWORDS["second"])
    await users.add(user)

    async def listening() -> set[int]:
        return {pid for pid, query in (await connected(users, user)).items() if query.startswith("LISTEN")}

    async def listening_again(before: set[int]) -> bool:
        return bool(await listening() - before)

    handled, stop = list[bytes](), asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    async with tenure.connect(url_of(login=f"{user}@"), credentials=ask) as backend:
        consuming = asyncio.create_task(backend.queue("listened").consume(handle, stop=stop))
        await until(listening)
        before = await listening()
        ask.next = ["hush4next"]
        await users.replace(user, "hush4next")
        await until(lambda: listening_again(before))
        async with tenure.connect(users.server.url) as other:
            await other.queue("listened").send(b"x")
        await until(lambda: handled)
        stop.set()
        await consuming


# --- a password that is refused ---


async def test_a_password_that_is_refused_at_first_is_asked_for_once_more(url_of: UrlOf, users: OfPostgres) -> None:
    ask = Answers("wrong", PASSWORD)
    async with tenure.connect(url_of(), credentials=ask) as backend:
        assert await backend.election("job").leader() is None
        assert ask.given[:2] == ["wrong", PASSWORD]
        ask.next = ["another wrong one", PASSWORD]
        for pid in await connected(users):
            await ended(users, pid)
        await backend.queue("refused-at-first").send(b"x")
    assert len(ask.next) == 1


async def ended(users: OfPostgres, pid: int) -> None:
    async with native(users.server.url) as connection:
        await connection.execute("SELECT pg_terminate_backend($1)", pid)


async def test_a_wrong_password_names_its_source(url_of: UrlOf, users: OfPostgres, tmp_path: Path) -> None:
    ask = Answers("wrong")
    async with tenure.connect(url_of(), credentials=ask) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format("credentials=")):
            await backend.leaders()
        assert ask.given == ["wrong", "wrong"]
    option = a_file(tmp_path, USER, "wrong").option
    async with tenure.connect(url_of(option)) as backend:
        with pytest.raises(tenure.ConfigError, match=REFUSED.format(option)):
            await backend.leaders()
        a_file(tmp_path, USER, PASSWORD)
        await backend.leaders()
        a_file(tmp_path, USER, "wrong")

        async def says() -> str:
            for pid in await connected(users):
                await ended(users, pid)
            try:
                await backend.leaders()
            except tenure.Unavailable as error:
                return str(error)
            return ""

        await until(lambda: refused(says))


async def refused(says: Callable[[], Awaitable[str]]) -> bool:
    return "refused the login" in (said := await says()) and "it worked before" in said


async def test_a_source_that_has_no_password_is_told(url_of: UrlOf, tmp_path: Path) -> None:
    with pytest.raises(tenure.ConfigError, match=r"password_file=.*missing .*can't be read: No such file"):
        await tenure.connect(url_of(f"password_file={tmp_path}/missing")).open()
    async with tenure.connect(url_of("password_command=false")) as backend:
        with pytest.raises(tenure.Unavailable, match="the password command 'false' ended with status 1"):
            await backend.leaders()


@pytest.mark.parametrize("has_right", [True, False])
async def test_a_source_is_used_in_place_of_the_environment(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, has_right: bool
) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong" if has_right else PASSWORD)
    async with tenure.connect(url_of(), credentials=Answers(PASSWORD if has_right else "wrong")) as backend:
        if has_right:
            await backend.leaders()
        else:
            with pytest.raises(tenure.ConfigError, match=REFUSED.format("credentials=")):
                await backend.leaders()


@pytest.mark.parametrize(
    ("login", "options", "given", "says"),
    [
        (f"{USER}:hush@", "", True, "is given a password and credentials="),
        (f"{USER}:hush@", "password_file=FILE", False, "is given a password and password_file="),
        (f"{USER}@", "password=hush&password_command=echo", False, "is given a password and password_command="),
        (f"{USER}@", "password_file=FILE&password_command=echo", False, "password_file= and password_command="),
        (f"{USER}@", "password_file=FILE", True, "password_file= and credentials="),
        (f"{USER}@", "passfile=FILE&password_file=FILE", False, "is given passfile= and password_file=FILE"),
        (f"{USER}@", "passfile=FILE&password_command=echo", False, "passfile= and the password command 'echo'"),
        (f"{USER}@", "passfile=FILE", True, "is given passfile= and credentials="),
    ],
)
async def test_two_passwords_are_refused_by_name(
    tmp_path: Path, login: str, options: str, given: bool, says: str
) -> None:
    a_file(tmp_path, USER, "hush")
    file = str(tmp_path / "password")
    url = f"postgresql://{login}127.0.0.1:1/postgres?{options.replace('FILE', file)}".rstrip("?")
    with pytest.raises(tenure.ConfigError, match=says.replace("FILE", file)) as refusal:
        async with tenure.connect(url, credentials=Answers("hush") if given else None):
            pass
    assert "hush" not in str(refusal.value)
