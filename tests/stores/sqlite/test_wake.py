"""Notifications between processes through sockets beside the file; leftovers of dead processes; forks."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tenure._backends import sqlite
from tenure._backends.sqlite import wake
from tenure._lease import Granted, HeldBy, Vacant
from tenure._url import Url
from tenure.testing import until
from tenure.testing.loop import run

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this system has no Unix sockets")

Opener = Callable[[], sqlite.SqliteBackend]

PATIENCE = 30.0
"""Seconds after which a wait counts as hanging."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.db"


@pytest.fixture
async def opener(file: Path) -> AsyncIterator[Opener]:
    opened: list[sqlite.SqliteBackend] = []

    def open_file() -> sqlite.SqliteBackend:
        opened.append(sqlite.open(Url.parse(f"sqlite:///{file}")))
        return opened[-1]

    yield open_file
    for backend in opened:
        await backend.close()


def sockets(file: Path) -> list[Path]:
    folder = Path(f"{file}.wake")
    return sorted(folder.iterdir()) if folder.exists() else []


async def listening(backend: sqlite.SqliteBackend, name: str = "name") -> AsyncIterator[object]:
    """Return hints that are connected for certain: the first one has come."""
    hints = backend.leases.hints(name)
    await anext(hints)
    return hints


async def silence(hints: AsyncIterator[object]) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(hints), 0.05)


# --- in one process, with a socket for each ---


async def test_no_socket_is_made_before_the_first_listener(file: Path, opener: Opener) -> None:
    backend = opener()
    await backend.leases.acquire("name", "ann#1", 10)
    assert sockets(file) == []
    await listening(backend)
    assert len(sockets(file)) == 1
    await backend.close()
    assert sockets(file) == []


async def test_every_change_wakes_and_nothing_else_does(opener: Opener) -> None:
    one, other = opener(), opener()
    hints = await listening(other)
    await silence(hints)
    answer = await one.leases.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    await anext(hints)
    await one.leases.renew([answer.grant], 10)
    await one.leases.acquire("name", "ann#1", 10)
    await one.leases.acquire("name", "bob#1", 10)
    await one.leases.inspect("name")
    await one.leases.acquire("other name", "ann#1", 10)
    await silence(hints)
    await one.leases.ask_to_resign("name")
    await anext(hints)
    await one.leases.release(answer.grant)
    await anext(hints)
    await one.leases.release(answer.grant)
    await silence(hints)


async def test_a_burst_that_overflows_wakes_all_listeners(opener: Opener) -> None:
    one, other = opener(), opener()
    hints = await listening(other)
    names = [f"other-{number}" for number in range(60)]

    def flood() -> None:  # from a thread, so that this loop can't read meanwhile
        for name in [*names, "name"]:
            one._wake.notify(f"lease:{name}")

    thread = threading.Thread(target=flood)
    thread.start()
    thread.join()
    await asyncio.wait_for(anext(hints), PATIENCE)


async def test_a_full_socket_does_not_keep_others_from_being_woken(opener: Opener) -> None:
    """A stopped process never reads. Its unread datagrams must not count against the other processes."""
    one, stopped, other = opener(), opener(), opener()
    await listening(stopped)
    home, reading = stopped._wake._loop, stopped._wake._socket
    assert home is not None
    assert reading is not None
    home.remove_reader(reading)
    hints = await listening(other)
    for _ in range(600):
        one._wake.notify("lease:name")
        await asyncio.wait_for(anext(hints), PATIENCE)


async def test_a_socket_of_a_dead_process_is_removed(file: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    hints = await listening(other)
    dead = Path(f"{file}.wake", "99999-deadbeef")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(dead))
    await one.leases.acquire("name", "ann#1", 10)
    await anext(hints)
    assert not dead.exists()
    assert len(sockets(file)) == 1


async def test_a_socket_of_a_process_that_died_before_renaming_it_is_removed(file: Path, opener: Opener) -> None:
    folder = Path(f"{file}.wake")
    folder.mkdir()
    for name in (".99999-deadbeef", ".99999-0000beef"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(folder / name))
    os.utime(folder / ".99999-deadbeef", (0.0, 0.0))
    await listening(opener())
    new, mine = sockets(file)
    assert new.name == ".99999-0000beef"  # its process may be about to rename it
    assert not mine.name.startswith(".")


# --- what others put there ---


def planted(folder: Path) -> dict[str, bytes]:
    """Fill *folder* with foreign files, with names of all kinds."""
    folder.mkdir()
    for name in ("notes.txt", "12345-deadbeef", ".12345-deadbeef", ".profile"):
        (folder / name).write_bytes(name.encode())
        os.utime(folder / name, (0.0, 0.0))
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


async def use(opener: Opener) -> None:
    """Do everything that touches the folder: make a socket, notify, remove the socket."""
    one, other = opener(), opener()
    first = asyncio.ensure_future(anext(other.leases.hints("name")))
    await until(lambda: other._wake._socket is not None or other._wake._obstacle or other._wake._reason)
    answer = await one.leases.acquire("name", "ann#1", 10)
    assert isinstance(answer, Granted)
    await one.leases.release(answer.grant)
    await other.close()
    await asyncio.gather(first, return_exceptions=True)


async def test_foreign_files_in_the_folder_are_left_alone(file: Path, opener: Opener) -> None:
    folder = Path(f"{file}.wake")
    before = planted(folder)
    others = [folder / "another user's", folder / ".agent"]
    for other in others:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(other))
        os.utime(other, (0.0, 0.0))
    await use(opener)
    assert contents(folder) == before
    assert all(other.is_socket() for other in others)


async def test_a_link_at_the_folder_is_not_followed(file: Path, tmp_path: Path, opener: Opener) -> None:
    """A user with write access to the file's folder could link to any folder, and root would work in that."""
    victim = tmp_path / "victim"
    before = planted(victim)
    mode = victim.stat().st_mode
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(victim / "99999-deadbeef"))
    Path(f"{file}.wake").symlink_to(victim)
    await use(opener)
    assert contents(victim) == before
    assert (victim / "99999-deadbeef").is_socket()
    assert victim.stat().st_mode == mode
    (fact,) = [fact for fact in await opener().describe() if fact.name == "wake-up"]
    assert "symbolic link" in fact.advice


async def test_a_link_that_takes_the_folders_place_is_not_followed(file: Path, tmp_path: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    await listening(other)
    victim = tmp_path / "victim"
    planted(victim)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(victim / other._wake._name))
        left.setblocking(False)
        Path(f"{file}.wake").rename(tmp_path / "away")
        Path(f"{file}.wake").symlink_to(victim)
        await one.leases.acquire("name", "ann#1", 10)
        await other.close()
        with pytest.raises(BlockingIOError):
            left.recv(1)
    assert (victim / other._wake._name).is_socket()


async def test_a_link_in_the_folder_leads_nowhere(file: Path, tmp_path: Path, opener: Opener) -> None:
    folder = Path(f"{file}.wake")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(tmp_path / "service"))
        service.setblocking(False)
        (folder / "99999-deadbeef").symlink_to(tmp_path / "service")
        await use(opener)
        with pytest.raises(BlockingIOError):
            service.recv(1)


as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs two users, so root")


@as_root
async def test_another_users_socket_is_left_alone(file: Path, opener: Opener) -> None:
    folder = Path(f"{file}.wake")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(folder / "99999-deadbeef"))
    os.chown(folder / "99999-deadbeef", 12345, 12345)
    await use(opener)
    assert (folder / "99999-deadbeef").is_socket()


@as_root
async def test_root_makes_the_folder_for_the_files_owner(file: Path, opener: Opener) -> None:
    sqlite3.connect(file).executescript("CREATE TABLE t (x)").connection.close()
    os.chown(file, 12345, 12346)
    await listening(opener())
    about = Path(f"{file}.wake").stat()
    assert (about.st_uid, about.st_gid) == (12345, 12346)


# --- loops, forks, ends ---


async def test_two_loops_may_listen_on_one_backend(opener: Opener) -> None:
    one, other = opener(), opener()
    hints = await listening(other)
    woken = threading.Event()
    ready = threading.Event()

    async def listen() -> None:
        also = other.leases.hints("name")
        ready.set()
        await anext(also)
        woken.set()

    thread = threading.Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    assert await asyncio.to_thread(ready.wait, PATIENCE)
    await one.leases.acquire("name", "ann#1", 10)
    await anext(hints)
    assert await asyncio.to_thread(woken.wait, PATIENCE)
    thread.join()


def test_another_loop_reads_the_socket_when_its_loop_is_closed(file: Path) -> None:
    one, other = (sqlite.open(Url.parse(f"sqlite:///{file}")) for _ in range(2))

    async def round_trip(holder: str) -> None:
        hints = await listening(other)
        answer = await one.leases.acquire("name", holder, 10)
        assert isinstance(answer, Granted)
        await asyncio.wait_for(anext(hints), PATIENCE)
        await one.leases.release(answer.grant)

    asyncio.run(round_trip("ann#1"))
    asyncio.run(round_trip("ann#2"))
    asyncio.run(other.close())
    asyncio.run(one.close())
    assert sockets(file) == []


async def test_hints_end_when_the_backend_is_closed(opener: Opener) -> None:
    backend = opener()
    hints = await listening(backend)
    waiting = asyncio.ensure_future(anext(hints, "the end"))
    await asyncio.sleep(0)
    await backend.close()
    assert await asyncio.wait_for(waiting, PATIENCE) == "the end"
    assert await anext(backend.leases.hints("name"), "the end") == "the end"


async def test_a_socket_that_is_made_while_the_backend_is_closed_is_not_left(file: Path, opener: Opener) -> None:
    backend = opener()
    await backend.leases.inspect("name")
    first = asyncio.ensure_future(anext(backend.leases.hints("name")))
    for _ in range(3):
        await asyncio.sleep(0)  # now the thread has the job to make the socket
    await backend.close()
    await asyncio.gather(first, return_exceptions=True)
    assert sockets(file) == []


async def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("name" * 30)
    folder.mkdir(parents=True)
    one, other = (sqlite.open(Url.parse(f"sqlite:///{folder}/x.db")) for _ in range(2))
    assert one.leases.traits.hints
    hints = await listening(other)
    await one.leases.acquire("name", "ann#1", 10)
    await asyncio.wait_for(anext(hints), PATIENCE)
    await one.close()
    await other.close()


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o700), (0o664, 0o1770), (0o666, 0o1777), (0o640, 0o700)])
async def test_users_that_may_write_the_file_may_use_the_folder(
    file: Path, opener: Opener, mode: int, expected: int
) -> None:
    sqlite3.connect(file).executescript("CREATE TABLE t (x)").connection.close()
    file.chmod(mode)
    await listening(opener())
    assert stat.S_IMODE(Path(f"{file}.wake").stat().st_mode) == expected
    assert stat.S_IMODE(sockets(file)[0].stat().st_mode) == expected & 0o666


async def test_where_no_socket_can_be_made_hints_of_others_are_absent(
    file: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "CHECK_EVERY", 0.01)
    Path(f"{file}.wake").write_text("in the way")
    backend = opener()
    hints = backend.leases.hints("name")
    while await anext(hints) != "absent":
        pass
    assert not backend.broker.traits.hints
    assert isinstance(await backend.leases.acquire("name", "ann#1", 10), Granted)
    assert await anext(hints) is None  # no socket is needed within the process
    assert await anext(hints) == "absent"
    Path(f"{file}.wake").unlink()
    other = opener()
    await until(lambda: bool(sockets(file)))
    assert await asyncio.wait_for(anext(hints), PATIENCE) is None
    await other.leases.ask_to_resign("name")
    assert await asyncio.wait_for(anext(hints), PATIENCE) is None
    Path(f"{file}.wake").rename(f"{file}.away")
    Path(f"{file}.wake").write_text("in the way")
    while await asyncio.wait_for(anext(hints), PATIENCE) != "absent":
        pass
    (fact,) = [fact for fact in await backend.describe() if fact.name == "wake-up"]
    assert "no socket can be made" in fact.advice


def no_socket(*_: object) -> socket.socket:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_claim_is_answered_even_if_no_process_can_be_woken(
    file: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is committed by then: an error would leave a lease that its holder does not know."""
    Path(f"{file}.wake").mkdir()
    monkeypatch.setattr(socket, "socket", no_socket)
    assert isinstance(await opener().leases.acquire("name", "ann#1", 10), Granted)


async def test_a_socket_is_made_once_the_obstacle_is_gone(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "CHECK_EVERY", 0.01)
    one, other = opener(), opener()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_socket)
        hints = other.leases.hints("name")
        first = asyncio.ensure_future(anext(hints))
        await until(lambda: other._wake._obstacle is not None)
        (fact,) = [fact for fact in await other.describe() if fact.name == "wake-up"]
        assert "no socket can be made" in fact.advice
        assert other.leases.traits.hints  # that is no reason to poll from now on
    await asyncio.wait_for(first, PATIENCE)
    await one.leases.acquire("name", "ann#1", 10)
    await asyncio.wait_for(anext(hints), PATIENCE)


async def test_a_removed_socket_is_made_again(
    file: Path, tmp_path: Path, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "CHECK_EVERY", 0.01)
    one, other = opener(), opener()
    hints = await listening(other)
    Path(f"{file}.wake").rename(tmp_path / "away")  # in one step: a process may look for it at any moment
    await asyncio.wait_for(anext(hints), PATIENCE)  # a hint may have been missed
    assert len(sockets(file)) == 1
    await one.leases.acquire("name", "ann#1", 10)
    await asyncio.wait_for(anext(hints), PATIENCE)


def test_on_a_loop_without_sockets_the_store_works_without_hints_from_others(file: Path) -> None:
    async def work() -> bool:
        backend = sqlite.open(Url.parse(f"sqlite:///{file}"))
        hints = backend.leases.hints("name")
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(1)
        await backend.leases.acquire("name", "ann#1", 10)
        await waiting
        await backend.close()
        return backend.leases.traits.hints

    assert run(work()) is False
    assert sockets(file) == []


# --- between real processes ---

CANDIDATE = """
import asyncio, sys, time
from tenure._backends import sqlite
from tenure._lease import Granted
from tenure._url import Url

async def main():
    backend = sqlite.open(Url.parse(sys.argv[1]))
    hints = backend.leases.hints("name")
    while not isinstance(answer := await backend.leases.acquire("name", sys.argv[2], 600), Granted):
        print("waits", flush=True)
        await anext(hints)
    print("leads", answer.grant.token, time.monotonic(), flush=True)
    async for _ in hints:
        (answer,) = await backend.leases.renew([answer.grant], 600)
        if answer.resign_asked:
            break
    await backend.leases.release(answer.grant)
    print("resigned", time.monotonic(), flush=True)
    await backend.close()

asyncio.run(main())
"""


async def candidate(file: Path, holder: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CANDIDATE, f"sqlite:///{file}", holder, stdout=asyncio.subprocess.PIPE
    )


async def said(process: asyncio.subprocess.Process, word: str) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        async for line in process.stdout:
            words = line.decode().split()
            if words[0] == word:
                return words
    raise AssertionError(f"it never said {word!r}")


@pytest.mark.process
async def test_processes_hand_over_without_polling(file: Path, opener: Opener) -> None:
    """With leases of ten minutes, only a notification can hand over at once."""
    first = await candidate(file, "ann#1")
    assert (await said(first, "leads"))[1] == "1"
    second = await candidate(file, "bob#1")
    await said(second, "waits")
    assert await opener().leases.ask_to_resign("name") is True
    resigned_at = float((await said(first, "resigned"))[1])
    _, token, led_at = await said(second, "leads")
    assert token == "2"
    assert float(led_at) - resigned_at < PATIENCE
    assert await opener().leases.ask_to_resign("name") is True
    await said(second, "resigned")
    assert await first.wait() == await second.wait() == 0
    assert sockets(file) == []


@pytest.mark.process
async def test_the_socket_of_a_killed_process_is_removed(file: Path, opener: Opener) -> None:
    process = await candidate(file, "ann#1")
    await said(process, "leads")
    named = lambda: [one for one in sockets(file) if not one.name.startswith(".")]  # noqa: E731
    await until(named, within=PATIENCE, what="the other's socket, by the name by which it is sent to")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    store = opener().leases
    seen = await store.inspect("name")
    assert isinstance(seen, HeldBy)
    assert seen.remaining is not None
    assert 0 < seen.remaining <= 600
    assert len(sockets(file)) == 1
    await store.ask_to_resign("name")
    assert sockets(file) == []


FORKS = """
import asyncio, os, sys, warnings
from tenure._backends import sqlite
from tenure._url import Url

backend = sqlite.open(Url.parse(sys.argv[1]))

async def work(name):
    hints = backend.leases.hints(name)
    await anext(hints)
    granted = await backend.leases.acquire(name, f"{os.getpid()}#1", 600)
    async with asyncio.timeout(30):
        await anext(hints)
    return granted.grant

async def hand_back(grant):
    released = await backend.leases.release(grant)
    await backend.close()
    return released

grant = asyncio.run(work("parent"))
warnings.simplefilter("ignore")  # Python warns of forks while threads run; that is tested here
child = os.fork()
if child == 0:
    code = 1
    try:
        mine = asyncio.run(work("child"))
        asyncio.run(hand_back(mine))
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
print(asyncio.run(hand_back(grant)))
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
async def test_a_fork_gets_a_connection_and_a_socket_of_its_own(file: Path, opener: Opener) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FORKS, f"sqlite:///{file}"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("Released")
    store = opener().leases
    assert isinstance(await store.inspect("child"), Vacant)
    assert isinstance(await store.inspect("parent"), Vacant)
    assert sockets(file) == []
