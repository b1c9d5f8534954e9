"""Errors for an SQLite file that can't be used; it works again once it can be."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tenure._backends import sqlite
from tenure._backends.sqlite import client, worker
from tenure._backends.sqlite.address import Options
from tenure._backends.sqlite.client import Database, translate
from tenure._lease import Granted, HeldBy, Lost
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable
from tests.absent import skip_or_fail

Opener = Callable[..., sqlite.SqliteBackend]


@pytest.fixture
async def opener() -> AsyncIterator[Opener]:
    opened: list[sqlite.SqliteBackend] = []

    def open_file(path: Path, query: str = "busy=0.2") -> sqlite.SqliteBackend:
        opened.append(sqlite.open(Url.parse(f"sqlite:///{path}?{query}")))
        return opened[-1]

    yield open_file
    for backend in opened:
        await backend.close()


async def refusal(backend: sqlite.SqliteBackend) -> TenureError:
    try:
        await backend.leases.acquire("name", "ann#1", 10)
    except TenureError as error:
        return error
    raise AssertionError("it was not refused")


# --- the address ---


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("sqlite://work.db", "has a host, 'work.db'; write sqlite:///work.db"),
        ("sqlite://me:hush@var/work.db", r"\*\*\*@var/work.db' has a login, and a file needs none"),
        ("sqlite://var/lib/work.db", "has a host, 'var'; write sqlite:///var/lib/work.db"),
        ("sqlite:work.db", "lacks slashes; write sqlite:///work.db"),
        ("sqlite:/var/work.db", "lacks slashes; write sqlite:////var/work.db"),
        ("sqlite:", "lacks slashes"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file; .* or memory:"),
        ("sqlite:///a%00b", "names no file"),
        ("sqlite:///:memory:", "write memory: or memory:NAME"),
        ("sqlite:///%3Amemory%3A", "write memory: or memory:NAME"),
        ("sqlite:////var/lib/", "names a folder; name a file in it, as in sqlite:////var/lib/work.db"),
        ("sqlite:///work.db?bsy=1", "no option 'bsy'; did you mean 'busy'"),
        ("sqlite:///work.db?busy=-1", "busy must be from 0 to 3600 seconds, not -1"),
        ("sqlite:///work.db?synchronous=off", "must be one of full, normal, not 'off'"),
    ],
)
def test_a_url_that_names_no_file_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sqlite.open(Url.parse(written))


async def test_the_path_is_decoded_and_relative_to_where_it_was_opened(
    tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = sqlite.open(Url.parse("sqlite:///sub%20dir/what%3F%23100%25.db"))
    (tmp_path / "sub dir").mkdir()
    monkeypatch.chdir("/")
    await backend.leases.acquire("name", "ann#1", 10)
    await backend.close()
    assert (tmp_path / "sub dir" / "what?#100%.db").is_file()


async def test_two_paths_to_one_file_share_their_sockets(tmp_path: Path, opener: Opener) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, other = opener(tmp_path / "real" / "x.db"), opener(tmp_path / "link" / "x.db")
    hints = other.leases.hints("name")
    assert isinstance(await one.leases.acquire("name", "ann#1", 10), Granted)
    assert isinstance(await other.leases.acquire("name", "bob#1", 10), HeldBy)
    async with asyncio.timeout(30):
        await anext(hints)


# --- permanent errors ---


async def test_a_file_that_is_no_database(tmp_path: Path, opener: Opener) -> None:
    (tmp_path / "x.db").write_text("Dear diary, " * 100)
    error = await refusal(opener(tmp_path / "x.db"))
    assert isinstance(error, ConfigError)
    assert "x.db is not an SQLite database; name another file" in str(error)


async def test_a_folder(tmp_path: Path, opener: Opener) -> None:
    error = await refusal(opener(tmp_path))
    assert isinstance(error, ConfigError)
    assert "it is a folder; name a file in it" in str(error)


async def test_a_folder_that_is_missing(tmp_path: Path, opener: Opener) -> None:
    backend = opener(tmp_path / "gone" / "x.db")
    error = await refusal(backend)
    assert isinstance(error, ConfigError)
    assert f"its folder {tmp_path / 'gone'} does not exist; create it" in str(error)
    (tmp_path / "gone").mkdir()
    assert isinstance(await backend.leases.acquire("name", "ann#1", 10), Granted)


async def test_a_damaged_file(tmp_path: Path, opener: Opener) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (zeroblob(9000));")
    data = bytearray(path.read_bytes())
    data[100:200] = b"\xff" * 100
    path.write_bytes(data)
    error = await refusal(opener(path))
    assert isinstance(error, ConfigError)
    assert "is damaged" in str(error)
    assert "restore it from a copy" in str(error)


async def test_tables_of_a_newer_tenure(tmp_path: Path, opener: Opener) -> None:
    path = tmp_path / "x.db"
    first = opener(path)
    await first.leases.acquire("name", "ann#1", 10)
    await first.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE tenure_schema SET version = 2, written_by = '9.1.0' WHERE part = 'leases'")
    error = await refusal(opener(path))
    assert isinstance(error, ConfigError)
    assert "tables of leases" in str(error)
    assert "version 2, written by tenure 9.1.0, and this tenure reads version 1; use tenure 9.1.0 or newer" in str(
        error
    )


async def test_a_library_that_is_too_old(tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LIBRARY_MIN", (99, 0, 0))
    error = await refusal(opener(tmp_path / "x.db"))
    assert isinstance(error, ConfigError)
    assert f"this Python has SQLite {sqlite3.sqlite_version}, and tenure needs 99.0.0" in str(error)


def test_a_file_system_that_can_not_keep_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own memory stands for it, which can't have a log either."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **options: connect(":memory:", **{**options, "uri": False}))
    database = Database(str(tmp_path / "x.db"), Options(), [])
    with pytest.raises(ConfigError, match="needs a write-ahead log, and its journal mode stayed 'memory'"):
        database.read(lambda connection: None)


async def test_a_file_in_a_folders_place(tmp_path: Path, opener: Opener) -> None:
    (tmp_path / "file").touch()
    error = await refusal(opener(tmp_path / "file" / "x.db"))
    assert isinstance(error, ConfigError)
    assert f"{tmp_path / 'file'} is a file, not a folder" in str(error)


async def test_a_file_without_a_log_that_is_in_use(tmp_path: Path, opener: Opener) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("BEGIN IMMEDIATE")
        backend = opener(path)
        assert isinstance(
            await refusal(backend), Unavailable
        )  # the mode can't be changed while another connection writes
        connection.execute("COMMIT")
    assert isinstance(await backend.leases.acquire("name", "ann#1", 10), Granted)


READ_ONLY = """
import asyncio, os, sys
import tenure._backends.sqlite.boot, tenure._backends.sqlite.leases, tenure._backends.sqlite, tenure._url
import encodings.idna
from tenure.errors import TenureError
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

async def main():
    backend = tenure._backends.sqlite.open(tenure._url.Url.parse(sys.argv[1]))
    try:
        print(await backend.leases.acquire("other", "ann#1", 10))
    except TenureError as error:
        print(type(error).__name__, error)
    print("hints", backend.leases.traits.hints)
    await backend.close()

asyncio.run(main())
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that other users may enter: pytest closes its own folders to them with every run."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def as_nobody(path: Path, url: str = "", shut: Path | None = None) -> str:
    for folder in path.parents:
        if not folder.stat().st_mode & stat.S_IXOTH and os.getuid() == 0:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    if shut:
        shut.chmod(0o000)
    url = url or f"sqlite:///{path}"
    answer = subprocess.run([sys.executable, "-c", READ_ONLY, url], capture_output=True, text=True, timeout=60)
    if shut:
        shut.chmod(0o755)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.process
def test_a_file_that_can_only_be_read(public: Path) -> None:
    folder = public / "open"
    folder.mkdir()
    folder.chmod(0o777)
    sqlite3.connect(folder / "x.db").executescript("CREATE TABLE t (x)").connection.close()
    (folder / "x.db").chmod(0o444)
    said = as_nobody(folder / "x.db")
    assert said.startswith("ConfigError")
    assert "it can't be written from here; check the rights on the file and its folder" in said


@pytest.mark.process
def test_a_file_that_can_not_be_read(public: Path) -> None:
    folder = public / "open"
    folder.mkdir()
    folder.chmod(0o777)
    sqlite3.connect(folder / "x.db").executescript("CREATE TABLE t (x)").connection.close()
    (folder / "x.db").chmod(0o000)
    said = as_nobody(folder / "x.db")
    assert said.startswith("ConfigError")
    assert "it can't be read from here" in said


@pytest.mark.process
def test_a_folder_that_can_not_be_entered(public: Path) -> None:
    folder = public / "private" / "open"
    folder.mkdir(parents=True)
    said = as_nobody(folder.parent / "x.db", f"sqlite:///{folder}/x.db", shut=folder.parent)
    assert said.startswith("ConfigError")
    assert f"its folder {folder} can't be reached from here: Permission denied" in said


@pytest.mark.process
@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_can_only_be_read(public: Path, exists: bool) -> None:
    folder = public / "closed"
    folder.mkdir()
    if exists:
        sqlite3.connect(folder / "x.db").executescript("CREATE TABLE t (x)").connection.close()
        (folder / "x.db").chmod(0o666)
    folder.chmod(0o555)
    said = as_nobody(folder / "x.db")
    folder.chmod(0o755)
    assert said.startswith("ConfigError")
    assert f"its folder {folder} can't be written from here" in said
    assert "hints False" in said


# --- temporary errors ---


@contextmanager
def locked(path: Path, how: str = "BEGIN EXCLUSIVE") -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(how)
        yield connection


async def in_time(request: Callable[[], Awaitable[object]], least: float = 0.0, most: float = 4.5) -> TenureError:
    """Return the error of *request*, and check that it took less time than the default of ``busy``."""
    asked_at = time.monotonic()
    with pytest.raises(Unavailable) as raised:
        await request()
    assert least <= time.monotonic() - asked_at < most
    return raised.value


async def test_a_file_that_stays_locked(tmp_path: Path, opener: Opener) -> None:
    backend = opener(tmp_path / "x.db")
    store = backend.leases
    answer = await store.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    with locked(tmp_path / "x.db"):
        for ask in (
            lambda: store.acquire("other", "ann#1", 10),
            lambda: store.renew([answer.grant], 10),
            lambda: store.release(answer.grant),
            lambda: store.ask_to_resign("name"),
        ):
            error = await in_time(ask, 0.2)
            assert "stayed locked by another connection" in str(error)
        # Inspecting, and acquiring a name that another holds, take no lock.
        assert isinstance(await store.inspect("name"), HeldBy)
        assert isinstance(await store.acquire("name", "bob#1", 10), HeldBy)
        assert list(await store.names()) == ["name"]
    assert list(await store.renew([answer.grant], 10)) == [Granted(answer.grant)]


async def test_calls_that_queue_behind_a_lock_give_up_together(tmp_path: Path, opener: Opener) -> None:
    store = opener(tmp_path / "x.db", "busy=0.5").leases
    await store.acquire("name", "ann#1", 10)
    with locked(tmp_path / "x.db"):
        asked_at = time.monotonic()
        answers = await asyncio.gather(
            *(store.acquire(f"name-{number}", "ann#1", 10) for number in range(20)), return_exceptions=True
        )
        assert all(isinstance(answer, Unavailable) for answer in answers)
        assert time.monotonic() - asked_at < 8.0  # one after the other, it would be 10 s


async def test_a_new_file_in_the_old_ones_place_is_noticed(tmp_path: Path, opener: Opener) -> None:
    one, other = opener(tmp_path / "x.db"), opener(tmp_path / "x.db")
    answer = await one.leases.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    for file in tmp_path.glob("x.db*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert isinstance(await other.leases.acquire("name", "bob#1", 10), Granted)
    assert list(await one.leases.renew([answer.grant], 10)) == [Lost(answer.grant)]


async def test_a_folder_that_goes_and_comes(tmp_path: Path, opener: Opener) -> None:
    (tmp_path / "disk").mkdir()
    store = opener(tmp_path / "disk" / "x.db").leases
    answer = await store.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    (tmp_path / "disk").rename(tmp_path / "away")
    error = await in_time(lambda: store.renew([answer.grant], 10))
    assert "does not exist" in str(error)
    assert "it was usable before" in str(error)
    (tmp_path / "away").rename(tmp_path / "disk")
    assert list(await store.renew([answer.grant], 10)) == [Granted(answer.grant)]


async def test_a_file_that_goes_and_comes_where_none_is_to_be_created(tmp_path: Path, opener: Opener) -> None:
    await opener(tmp_path / "x.db").leases.acquire("another", "bob#1", 10)
    store = opener(tmp_path / "x.db", "busy=0.2&create=false").leases
    answer = await store.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    (tmp_path / "x.db").rename(tmp_path / "away.db")
    error = await in_time(lambda: store.renew([answer.grant], 10))
    assert "there is no file" in str(error)
    assert "it was usable before" in str(error)
    (tmp_path / "away.db").rename(tmp_path / "x.db")
    assert list(await store.renew([answer.grant], 10)) == [Granted(answer.grant)]


async def test_tables_that_were_dropped_are_made_again(tmp_path: Path, opener: Opener) -> None:
    store = opener(tmp_path / "x.db").leases
    answer = await store.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
        connection.executescript("DROP TABLE tenure_lease; DROP TABLE tenure_schema;")
    error = await in_time(lambda: store.renew([answer.grant], 10))
    assert "no such table: tenure_lease" in str(error)
    assert list(await store.renew([answer.grant], 10)) == [Lost(answer.grant)]


async def test_a_disk_that_hangs(tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opener(tmp_path / "x.db")
    await backend.leases.acquire("name", "ann#1", 60)
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "PATIENCE", 0.1)
        stuck = asyncio.ensure_future(backend._worker.run(lambda database: gate.wait(60)))
        for request in (lambda: stuck, lambda: backend.leases.acquire("name", "ann#1", 60)):
            error = await in_time(request)
            assert "gave no answer within 0.3 s; the disk may hang" in str(error)
    gate.set()
    assert isinstance(await backend.leases.acquire("name", "ann#1", 60), Granted)


FULL = """
import asyncio, resource, sys
from tenure._backends import sqlite
from tenure.errors import TenureError
from tenure._url import Url

async def main():
    store = sqlite.open(Url.parse(sys.argv[1])).leases
    granted = await store.acquire("name", "ann#1", 60)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        print(await store.acquire("big", "ann#1", 60, {"x": "x" * 100_000}))
    except TenureError as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    print((await store.renew([granted.grant], 60)) == [granted], await store.inspect("big"))

asyncio.run(main())
"""


@pytest.mark.process
def test_a_write_that_fails_half_way(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FULL, f"sqlite:///{tmp_path}/x.db"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    first, second = answer.stdout.splitlines()
    assert first.startswith("Unavailable")
    assert "failed: disk I/O error" in first
    assert second.startswith("True Vacant(name='big', token=0")


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux") or os.getuid() != 0, reason="must be root to mount a disk")
async def test_a_full_disk(tmp_path: Path, opener: Opener) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        skip_or_fail("mounting is not allowed here")
    try:
        store = opener(tmp_path / "x.db").leases
        answer = await store.acquire("name", "ann#1", 60)
        assert isinstance(answer, Granted)
        error = await in_time(lambda: store.acquire("big", "ann#1", 60, {"x": "x" * 400_000}))
        assert f"the disk that holds {tmp_path / 'x.db'} is full; nothing was written" in str(error)
        assert list(await store.renew([answer.grant], 60)) == [Granted(answer.grant)]
        await store._worker.close()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


# --- the rest ---


def test_foreign_errors_are_not_translated() -> None:
    with pytest.raises(AssertionError, match="not SQLite"):
        translate(sqlite3.ProgrammingError("a bug of ours"), "/x.db")


def test_a_bug_in_a_statement_is_not_reported_as_unavailable(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "x.db"), Options(), [])
    with pytest.raises(sqlite3.ProgrammingError):
        database.write(lambda connection: connection.execute("SELECT ?", ()))
    assert database.read(lambda connection: connection.in_transaction) is False
    database.close()


async def test_a_closed_backend_says_so(tmp_path: Path, opener: Opener) -> None:
    backend = opener(tmp_path / "x.db")
    await backend.leases.acquire("name", "ann#1", 10)
    await backend.close()
    await backend.close()
    error = await refusal(backend)
    assert isinstance(error, ConfigError)
    assert "was closed; connect again" in str(error)
    assert not list(tmp_path.glob("x.db-[!r]*"))  # the log was moved into the file


async def test_a_users_own_database_is_left_as_it_is(tmp_path: Path, opener: Opener) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE customer (x); PRAGMA user_version = 7; PRAGMA application_id = 99;")
    backend = opener(path)
    assert isinstance(await backend.leases.acquire("name", "ann#1", 10), Granted)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (7,)
        assert connection.execute("PRAGMA application_id").fetchone() == (99,)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"customer", "tenure_schema", "tenure_lease"}


async def test_twenty_backends_that_create_the_file_at_once(tmp_path: Path, opener: Opener) -> None:
    backends = [opener(tmp_path / "x.db", "busy=60") for _ in range(20)]
    answers = await asyncio.gather(*(b.leases.acquire("name", f"c{n}#1", 60) for n, b in enumerate(backends)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1


@pytest.mark.parametrize(("version", "advised"), [((3, 51, 2), True), ((3, 51, 3), False)])
async def test_facts_advise_on_a_library_with_a_known_fault(
    tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], advised: bool
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    facts = {fact.name: fact for fact in await opener(tmp_path / "x.db").describe()}
    assert facts["file"].value == str(tmp_path / "x.db")
    assert facts["journal mode"].value == "wal"
    assert facts["synchronous"].value == "full"
    assert facts["tables of leases"].value.startswith("version 1, by ")
    assert facts["wake-up"].value.startswith("by sockets")
    assert ("3.51.3 or newer" in facts["SQLite"].advice) is advised


@pytest.mark.parametrize(("option", "level"), [("full", 2), ("normal", 1)])
async def test_the_option_synchronous_reaches_the_connection(
    tmp_path: Path, opener: Opener, option: str, level: int
) -> None:
    backend = opener(tmp_path / "x.db", f"synchronous={option}")
    found = await backend._worker.run(
        lambda database: database.read(lambda connection: connection.execute("PRAGMA synchronous").fetchone())
    )
    assert found == (level,)
