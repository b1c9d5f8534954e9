"""Who may read and write the file and what is beside it: modes, under every umask, and users that share it."""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import tenure.testing
from tenure._backends import sqlite
from tenure._opened import Fact
from tenure._url import Url
from tests.docs.pages import section
from tests.durations import until

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows: its modes say nothing of other users")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs two users, so root")

Facts = Callable[[Path], Awaitable[dict[str, Fact]]]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(path: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.lstat().st_mode) for each in path.parent.iterdir()}


def beside(name: str, file: int, folder: int) -> dict[str, int]:
    return {name: file, f"{name}-wal": file, f"{name}-shm": file, f"{name}-reserve": file, f"{name}.wake": folder}


async def modes_in_use(path: Path) -> dict[str, int]:
    """Return the modes of the file and of what is beside it, while it has a leader, a message and a listener."""
    async with tenure.connect(f"sqlite:///{path}") as backend:
        await backend.queue("orders").send(b"two kettles")
        async with backend.election("name").campaign():
            folder = Path(f"{os.path.realpath(path)}.wake")
            await until(lambda: len(list(folder.glob("[0-9]*"))) == 1)
            return modes(path)


@pytest.fixture
def reached() -> Iterator[Path]:
    """Return a folder that other users may enter: pytest closes its own to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
async def facts() -> AsyncIterator[Facts]:
    opened: list[sqlite.SqliteBackend] = []

    async def of(path: Path) -> dict[str, Fact]:
        opened.append(sqlite.open(Url.parse(f"sqlite:///{path}")))
        return {fact.name: fact for fact in await opened[-1].describe()}

    yield of
    for backend in opened:
        await backend.close()


# --- a new file ---


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077], ids=oct)
async def test_a_new_file_and_all_beside_it_belong_to_its_user_alone(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        assert await modes_in_use(tmp_path / "x.db") == beside("x.db", 0o600, 0o700)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660, 0o644, 0o666], ids=oct)
async def test_the_mode_of_a_file_that_exists_is_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "x.db"
    path.touch()
    path.chmod(mode)
    folder = {0o660: 0o1770, 0o666: 0o1777}.get(mode, 0o700)
    assert await modes_in_use(path) == beside("x.db", mode, folder)


async def test_the_target_of_a_link_is_made_for_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x.db")
    with umask(0):
        await modes_in_use(tmp_path / "link")
    assert stat.S_IMODE((tmp_path / "x.db").stat().st_mode) == 0o600


async def test_what_is_removed_while_it_is_opened_is_not_made_by_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would make it with a mode that lets all users read it."""
    path, connect = tmp_path / "x.db", sqlite3.connect

    def connect_late(*given: object, **options: object) -> sqlite3.Connection:
        path.unlink()
        return connect(*given, **options)  # type: ignore[call-overload, no-any-return]

    backend = sqlite.open(Url.parse(f"sqlite:///{path}"))
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect_late)
        with pytest.raises(tenure.Unavailable, match="tenure tries again"):
            await backend.leases.inspect("name")
    assert not path.exists()
    await backend.leases.inspect("name")  # made again
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await backend.close()


@pytest.mark.parametrize("name", ["a?b=c#d.db", "50%41 é.db", "x.db?mode=memory"])
async def test_a_name_may_have_what_means_something_in_a_url(tmp_path: Path, name: str) -> None:
    backend = sqlite.SqliteBackend(str(tmp_path / name), sqlite.Options(), tenure.testing.ManualClock())
    await backend.leases.inspect("name")
    assert name in {each.name for each in tmp_path.iterdir()}
    await backend.close()


# --- users that share a file ---


USER = """
import asyncio, glob, os, sys, tempfile, tenure

async def used(path):
    async with tenure.connect("sqlite:///" + path) as backend:
        await backend.queue("orders").send(b"two kettles")
        diagnosis = await backend.diagnose(write=False)
        async with backend.election("name").campaign():
            hints = backend._connection.opened.leases.hints("name")
            waiting = asyncio.ensure_future(anext(hints))
            while not glob.glob(path + ".wake/[0-9]*"):
                await asyncio.sleep(0)
            waiting.cancel()
            found = []
            for folder in (os.path.dirname(path), path + ".wake"):
                for name in sorted(os.listdir(folder)):
                    about = os.stat(os.path.join(folder, name))
                    found.append(f"{name} {about.st_mode & 0o7777:o} {about.st_gid}")
        return [{fact.name: fact.value for fact in diagnosis.facts}["wake-up"], *found]

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(used(os.path.join(folder, "x.db")))  # imports everything: the other user may be unable to
os.setgroups([12346])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
os.umask(0o077)
for line in asyncio.run(used(sys.argv[1])):
    print(line)
"""


@as_root
@pytest.mark.process
def test_users_of_a_group_share_a_file_that_was_made_for_the_group(reached: Path) -> None:
    """By the commands of docs/sqlite.md."""
    commands = [line for line in section("docs/sqlite.md", "Users and modes").splitlines() if "      install " in line]
    assert len(commands) == 2
    folder = reached / "shared"
    path = folder / "work.db"
    for command in commands:
        words = command.replace("GROUP", "12346").replace("/srv/queues", str(folder))
        subprocess.run(shlex.split(words), check=True, timeout=60)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    for user in ("1001", "1002"):
        line = [sys.executable, "-c", USER, str(path), user]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        hints, *found, socket = done.stdout.splitlines()
        assert hints.startswith("by sockets")
        files = [f"work.db{end} 660 12346" for end in ("", "-reserve", "-shm", "-wal")]
        assert found == [*files, "work.db.wake 3770 12346"]
        assert socket.endswith(" 660 12346")


# --- what tenure doctor shows ---


async def test_a_private_file_has_no_warning(reached: Path, facts: Facts) -> None:
    found = await facts(reached / "x.db")
    assert (found["file mode"].value, found["file mode"].advice) == ("-rw-------", "")
    assert "folder mode" not in found


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        (0o640, ""),
        (0o660, ""),
        (0o644, "every user of this machine can read all bodies in it; run: chmod o= "),
        (0o666, "every user of this machine can change everything in it; run: chmod o= "),
        (0o602, "every user of this machine can change everything in it; run: chmod o= "),
    ],
    ids=str,
)
async def test_a_file_that_others_can_use_has_a_warning(reached: Path, facts: Facts, mode: int, advice: str) -> None:
    path = reached / "x.db"
    path.touch()
    path.chmod(mode)
    found = (await facts(path))["file mode"]
    assert found.advice == (advice and f"{advice}{path} {path}-wal {path}-shm")
    assert found.code == ("sqlite-file-mode" if advice else "")


async def test_the_command_of_an_advice_is_quoted_for_the_shell(reached: Path, facts: Facts) -> None:
    path = reached / "my work.db"
    path.touch(0o644)
    found = (await facts(path))["file mode"]
    files = shlex.split(found.advice.partition("chmod o= ")[2])
    assert files == [str(path), f"{path}-wal", f"{path}-shm"]
    assert all(map(os.path.exists, files))


async def test_a_log_that_others_can_read_has_a_warning(reached: Path, facts: Facts) -> None:
    """It keeps the mode that the file had: bodies are in it, too."""
    path = reached / "x.db"
    path.touch(0o644)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        path.chmod(0o600)
        found = (await facts(path))["file mode"]
    assert (found.value, "read all bodies" in found.advice) == ("-rw-------", True)


@pytest.mark.parametrize("shut", ["", "around"])
async def test_what_others_can_not_reach_has_no_warning(reached: Path, facts: Facts, shut: str) -> None:
    folder = reached / "around" / "in it"
    folder.mkdir(parents=True)
    (reached / "around").chmod(0o755 if not shut else 0o700)
    folder.chmod(0o757)
    (folder / "x.db").touch()
    (folder / "x.db").chmod(0o644)
    found = await facts(folder / "x.db")
    assert bool(found["file mode"].advice) is not bool(shut)
    assert ("folder mode" in found) is not bool(shut)


@pytest.mark.parametrize(("mode", "warned"), [(0o755, False), (0o775, False), (0o777, True), (0o1777, False)], ids=str)
async def test_a_folder_in_which_others_can_replace_the_file_has_a_warning(
    reached: Path, facts: Facts, mode: int, warned: bool
) -> None:
    reached.chmod(mode)
    found = await facts(reached / "x.db")
    assert ("folder mode" in found) is warned
    if warned:
        assert found["folder mode"].code == "sqlite-folder-mode"
        assert found["folder mode"].advice.endswith(f"run: chmod o-w {reached}")


@pytest.mark.parametrize("inner", [0o755, 0o700], ids=str)
@pytest.mark.parametrize(("mode", "warned"), [(0o755, False), (0o777, True), (0o1777, False)], ids=str)
async def test_a_folder_around_it_that_others_can_replace_has_a_warning(
    reached: Path, facts: Facts, mode: int, warned: bool, inner: int
) -> None:
    """Also if they can't enter the folder of the file: they put another in its place."""
    folder = reached / "around" / "in it"
    folder.mkdir(parents=True)
    folder.chmod(inner)
    (reached / "around").chmod(mode)
    found = await facts(folder / "x.db")
    assert ("folder mode" in found) is warned
    if warned:
        assert found["folder mode"].advice.endswith(f"run: chmod o-w {reached / 'around'}")


@as_root
@pytest.mark.parametrize(("mode", "warned"), [(0o600, True), (0o640, True), (0o660, False)], ids=str)
async def test_a_file_of_another_user_has_a_warning(reached: Path, facts: Facts, mode: int, warned: bool) -> None:
    """Unless a group shares it."""
    path = reached / "x.db"
    path.touch()
    path.chmod(mode)
    os.chown(path, 12345, 12346)
    found = (await facts(path))["file mode"]
    assert found.value.endswith(", of user 12345")
    said = "it belongs to user 12345, who can change everything in it; unless that is meant, run: chown 0 "
    assert (found.advice.startswith(said), found.code == "sqlite-file-mode") == (warned, warned)


@as_root
@pytest.mark.parametrize(
    ("owner", "mode", "warned"), [(12345, 0o755, True), (12345, 0o1755, True), (12345, 0o770, False), (0, 0o755, False)]
)
async def test_a_folder_of_another_user_has_a_warning(
    reached: Path, facts: Facts, owner: int, mode: int, warned: bool
) -> None:
    """Its owner can replace the file, whatever the mode of the file is."""
    reached.chmod(mode)
    os.chown(reached, owner, -1)
    found = await facts(reached / "x.db")
    assert found["file mode"].advice == ""
    assert ("folder mode" in found) is warned
    if warned:
        assert found["folder mode"].code == "sqlite-folder-mode"
        assert found["folder mode"].advice == (
            "it belongs to user 12345, who can remove or replace the file; unless that is meant, run: "
            f"chown 0 {reached}"
        )


DOCTOR = """
import asyncio, os, sys, tempfile, tenure

async def advice(path):
    async with tenure.connect("sqlite:///" + path) as backend:
        facts = {fact.name: fact for fact in (await backend.diagnose(write=False)).facts}
    return [facts[name].advice if name in facts else "" for name in ("file mode", "folder mode")]

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(advice(os.path.join(folder, "x.db")))  # imports everything: the other user may be unable to
os.setgroups([])
os.setgid(12346)
os.setuid(1001)
for path in sys.argv[1:]:
    print(*asyncio.run(advice(path)), sep="\\n")
"""


@as_root
@pytest.mark.process
def test_a_process_of_another_user_than_root_trusts_root_and_itself(reached: Path) -> None:
    """What root owns has no warning, nor what its own user owns; what a third one owns has."""
    paths = []
    for owner in (0, 1001, 12345):
        folder = reached / f"{owner}"
        folder.mkdir()
        folder.chmod(0o1757)
        os.chown(folder, owner, -1)
        paths.append(folder / "x.db")
    line = [sys.executable, "-c", DOCTOR, *map(str, paths)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    last = (
        "it belongs to user 12345, who can remove or replace the file; unless that is meant, run: "
        f"chown 1001 {reached / '12345'}"
    )
    assert done.stdout.splitlines() == [*[""] * 5, last]
