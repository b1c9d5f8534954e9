"""The way to an SQLite file: translate its errors, open and check it, write with patience, and do it all in one thread.

``Database`` is one connection, for one thread at a time. ``Worker`` is that thread, with a door for asyncio.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, TypeVar
from urllib.parse import unquote

from tenure._backends.sqlite.reserve import Reserve, largest_file
from tenure._opened import Fact
from tenure._runtime.threads import Threads
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

LIBRARY_MIN = (3, 35, 0)  # RETURNING
LIBRARY_SOUND = (3, 51, 3)  # mends the reset of the write-ahead log, broken since 3.7.0
PATIENCE = 5.0
"""How many seconds beyond ``busy`` a caller waits for the disk before it is told that there was no answer."""

_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # a limit on files, or a quota, is the latter
_BARRED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_NOT_READ = "it can't be read from here; check the rights on the file and its folder"
_NOT_WRITTEN = "it can't be written from here; check the rights on the file and its folder, for SQLite writes both"


class DiskFullError(Unavailable):
    """There is no room to write; what takes room off may still work."""


def translate(error: sqlite3.Error, path: str) -> TenureError:
    """Turn what SQLite said about the file at *path* into one of ours."""
    match _primary(error):
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Unavailable(
                f"{path} stayed locked by another connection for all the time given (option busy); "
                "look for a process with a long transaction, or stopped in one"
            )
        case sqlite3.SQLITE_NOTADB:
            return ConfigError(f"{path} is not an SQLite database; name another file, or move this one away")
        case sqlite3.SQLITE_CORRUPT:
            return ConfigError(
                f"{path} is damaged ({error}); stop all who use it, then restore it from a copy or try "
                "the sqlite3 program's .recover"
            )
        case sqlite3.SQLITE_FULL:
            return DiskFullError(_full(path))
        case code if code in _BARRED:
            obstacle = _obstacle(path)
            if obstacle:
                return ConfigError(f"{path} can't be used: {obstacle}")
            return Unavailable(f"{path} can't be opened ({error}) although it could be; it is tried again")
        case None:
            raise AssertionError("translate() got a foreign error") from error
    return Unavailable(f"{path} could not be asked: SQLite says {error} ({error.sqlite_errorname})")


def _full(path: str) -> str:
    return (
        f"the disk that holds {path} is full; nothing was written. To receive and to complete goes on; make room for "
        "what is to be sent"
    )


def _primary(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; None if the error is Python's own."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _obstacle(path: str) -> str:
    """Find out why *path* can't be opened or written; SQLite only says that it can't."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        return "it is a folder; name a file in it"
    try:
        os.stat(folder)
    except FileNotFoundError:
        return f"its folder {folder} does not exist; create it"
    except OSError as error:
        return f"its folder {folder} can't be reached from here: {error.strerror}"
    if not os.path.isdir(folder):
        return f"{folder} is a file, and no folder; name another place"
    if os.path.exists(path):
        if not os.access(path, os.R_OK):
            return _NOT_READ
        if not os.access(path, os.W_OK):
            return _NOT_WRITTEN
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"its folder {folder} can't be written from here, and SQLite keeps its log beside the file"
    return ""


# --- the address -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The query of an ``sqlite:`` URL.

    Args:
        synchronous: ``full`` keeps every answer through a loss of power; ``normal`` is faster, and may then lose the
            newest ones, tokens too. Neither loses anything when only a process dies.
        busy: For how many seconds to go on trying for the write lock.
        create: Whether to create the file, or tenure's tables in it, if there are none; without, that is an error.
    """

    synchronous: Literal["full", "normal"] = "full"
    busy: float = 5.0
    create: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.busy <= 3_600.0:
            raise ConfigError(f"busy must be from 0 to 3600 seconds, not {self.busy:g}; try busy=5")


def path_of(url: Url) -> str:
    """Return the file that *url* names, as a real path: all processes must agree on the folder of the wake sockets.

    Raises:
        ConfigError: The URL is spelled as something else; the message has the right spelling.
    """
    right = "three slashes for a relative path (sqlite:///work.db), four for an absolute one (sqlite:////var/work.db)"
    rest = url.written.partition(":")[2].partition("?")[0]
    # What stands before an @ may be a password.
    if "@" in url.path and (url.netloc or not rest.startswith("//")):
        raise ConfigError(f"{str(url)!r} has a login, and a file needs none; write {right}")
    if url.netloc:
        host = url.netloc.rpartition("@")[2]
        raise ConfigError(f"{str(url)!r} has a host, {host!r}; write sqlite:///{host}{url.path}: {right}")
    if not rest.startswith("//"):
        raise ConfigError(f"{str(url)!r} lacks slashes; write sqlite:///{rest}: {right}")
    path = unquote(url.path[1:])
    if not path or "\0" in path:
        raise ConfigError(f"{str(url)!r} names no file; write {right}, or memory: to keep nothing")
    if path == ":memory:":
        raise ConfigError(f"{str(url)!r} would be lost with its connection; write memory: or memory:NAME")
    if path.endswith("/"):
        raise ConfigError(f"{str(url)!r} names a folder; name a file in it, as in sqlite:///{url.path[1:]}work.db")
    return os.path.realpath(path)


# --- SQL ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A set of tables with a version of its own: ``script`` is a file of this folder that creates them."""

    name: str
    version: int
    script: str


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


@cache
def statements(file: str) -> dict[str, str]:
    """Return the statements of *file*, an SQL file of this folder, by the name that stands above each."""
    blocks = re.split(r"^-- name: (\w+)\n", _text(file), flags=re.MULTILINE)
    return dict(zip(blocks[1::2], (block.strip() for block in blocks[2::2]), strict=True))


def _script(file: str) -> list[str]:
    """Cut a script into statements: ``executescript`` would end the transaction that they are to run in."""
    found, statement = [], ""
    for line in _text(file).splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement.strip())
            statement = ""
    return found


# --- one connection ----------------------------------------------------------------------------------------------


class Database:
    """One connection to one file, opened when first used, and again after a failure.

    Everything in it blocks, and belongs to one thread at a time. ``until`` is the moment, by ``time.monotonic()``, up
    to which it tries for the write lock.

    Args:
        path: The file.
        options: How to use it.
        parts: The tables that are needed.
        reads_only: Let SQLite refuse whatever would write, once the tables are there.
        syncs_apart: Commit without waiting for the disk; what is to survive a loss of power does after ``sync``, which
            holds no lock. A loss of power leaves the log's beginning: no later commit without all before it.
        used: Set once the file could be used, by whichever connection of a backend: then it may be so again.
    """

    def __init__(
        self,
        path: str,
        options: Options,
        parts: Sequence[Part],
        *,
        reads_only: bool = False,
        syncs_apart: bool = False,
        used: threading.Event | None = None,
    ) -> None:
        self.path = path
        self._reads_only = reads_only
        self._syncs_apart = syncs_apart and options.synchronous == "full"
        self._log: int | None = None  # the log's own descriptor, to sync by
        self.options = options
        self.until: float = 0.0
        self._parts = parts
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._used = used or threading.Event()
        self._reserve = Reserve(path)
        self._grown = math.inf  # since the reserve was looked at, in bytes

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what *work* reads. It waits for no writer.

        Raises:
            Unavailable: The file could not be asked.
            ConfigError: The file can't be used as it is.
        """
        return self._try(lambda: work(self._connected()))

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run *work* in a transaction of its own, and return what it returns once that is committed.

        *work* may run several times: each time in a new transaction, what it did before undone.

        Raises:
            Unavailable: The file stayed locked, or could not be written; it is unknown whether anything was.
            ConfigError: The file can't be used as it is.
        """
        return self._try(lambda: self._transact(self._connected(), work))

    def keep_reserve(self, growth: int) -> None:
        """Go on only if a reserve is left on the disk when *growth* bytes more were written. Inside a transaction.

        Raises:
            DiskFullError: There would be none.
        """
        if not hasattr(os, "statvfs"):  # on Windows: how much room there is can't be known so
            return
        self._grown += growth
        if self._grown > self._reserve.spare() / 8:  # to look each time would cost more than it is worth
            if not (self._reserve.keep(growth) and self._fits()):
                raise DiskFullError(_full(self.path))
            self._grown = 0.0

    def sync(self) -> None:
        """Return when everything committed until now is on the disk; do nothing where commits have waited for that.

        Raises:
            Unavailable: The disk says that it could not be written.
        """
        if self._log is None:
            return
        try:
            _sync(self._log)
        except OSError as error:
            self.close()
            raise Unavailable(
                f"{self.path} was written, and the disk says that it could not keep it: {error}; look after the disk"
            ) from error

    def close(self) -> None:
        """Close the connection. The next question opens it again."""
        connection, self._connection = self._connection, None
        log, self._log = self._log, None
        if log is not None:
            os.close(log)
        self._reserve.close()
        self._grown = math.inf
        if connection is not None:
            # A close may have to check-point, and fail; what was committed is safe in the log.
            with suppress(sqlite3.Error):
                connection.close()

    def facts(self) -> list[Fact]:
        """Ask the file and the library about themselves.

        Raises:
            DiskFullError: There is no room to send anything.
        """
        if hasattr(os, "statvfs") and self._reserve.is_disk_full():
            raise DiskFullError(_full(self.path))
        journal = self.read(lambda connection: connection.execute("PRAGMA journal_mode").fetchone()[0])
        known = self.read(_versions)
        sound = ".".join(map(str, LIBRARY_SOUND))
        return [
            Fact("file", self.path),
            Fact(
                "SQLite",
                sqlite3.sqlite_version,
                ""
                if sqlite3.sqlite_version_info >= LIBRARY_SOUND
                else f"before {sound}, a rare race at the reset of the log can damage a file; use {sound} or newer",
            ),
            Fact("journal mode", journal),
            Fact(
                "synchronous",
                self.options.synchronous,
                "" if self.options.synchronous == "full" else "the newest answers, tokens too, may go with the power",
            ),
            *(Fact(f"tables of {part}", f"version {version}, by {by}") for part, (version, by) in known.items()),
        ]

    # --- patience ---

    def _try(self, attempt: Callable[[], T]) -> T:
        """Run *attempt* until the file is not locked.

        SQLite's own busy handler sleeps up to 100 ms at a time, by which some of several processes starve; short
        random pauses give each its share.
        """
        pause = 0.001
        may_make_room = True
        while True:
            try:
                answer = attempt()
            except DiskFullError:  # by keep_reserve
                if not may_make_room:
                    raise
                may_make_room = False
                self._empty_log()
            except sqlite3.Error as error:
                code = _primary(error)
                if code is None:  # a ProgrammingError: a bug of ours, let it fly
                    raise
                if may_make_room and code in _FULL:
                    may_make_room = False
                    self._reserve.give_up()
                    self._grown = math.inf
                    self._empty_log()
                    continue
                if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    self._give_up(error)
                if time.monotonic() >= self.until:
                    raise translate(error, self.path) from error
                time.sleep(random.uniform(0.0001, pause))
                pause = min(pause * 1.05, 0.005)
            else:
                if not self._used.is_set():
                    self._used.set()
                return answer

    def _fits(self) -> bool:
        """Whether the file may become as large as it has to be for what is in the log."""
        most = largest_file()
        if most == math.inf:
            return True
        connection = self._connected()
        (pages,), (size,) = (connection.execute(f"PRAGMA {of}").fetchone() for of in ("page_count", "page_size"))
        return bool(pages * size + self._reserve.spare() / 2 <= most)

    def _empty_log(self) -> None:
        """Move what is in the log to the file, so that it begins anew: as far as nobody reads or writes just now."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _give_up(self, error: sqlite3.Error) -> None:
        self.close()  # whatever is wrong with this connection, the next question gets a new one
        ours = translate(error, self.path)
        if isinstance(ours, ConfigError) and _primary(error) in _BARRED:
            ours = self._barred(str(ours))
        raise ours from error

    def _barred(self, why: str) -> TenureError:
        """Return what to raise for a file that can't be used: for good, or only now."""
        return (
            Unavailable(f"{why} (it was usable before, so it may be again)")
            if self._used.is_set()
            else ConfigError(why)
        )

    @staticmethod
    def _transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        connection.execute("BEGIN IMMEDIATE")
        try:
            answer = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return answer

    # --- opening ---

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and not self._is_same_file():
            self.close()
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _is_same_file(self) -> bool:
        # Somebody may have put another file in its place. We would go on in the old one, and agree with nobody.
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file

    def _open(self) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < LIBRARY_MIN:
            raise ConfigError(
                f"this Python has SQLite {sqlite3.sqlite_version}, and tenure needs {'.'.join(map(str, LIBRARY_MIN))}; "
                "use a Python that was built with a newer one"
            )
        if not self.options.create and not os.path.exists(self.path):
            raise self._barred(
                f"there is no file {self.path}, so nobody has led or sent anything there; look for a "
                "misspelling, or let the first candidate or sender create it"
            )
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            if not self.options.create and not _versions(connection):
                raise self._barred(
                    f"{self.path} has no tables of tenure, so nobody has led or sent anything there; look for a "
                    "misspelling, or let the first candidate or sender create them"
                )
            synchronous = "normal" if self._syncs_apart else self.options.synchronous
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            (journal,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if journal != "wal":
                raise ConfigError(
                    f"{self.path} was asked to keep a write-ahead log, and stayed with {journal!r}: its file system "
                    "can't share memory between processes; put the file on a disk of this machine"
                )
            self._prepare(connection)
            if self._reads_only:
                connection.execute("PRAGMA query_only = ON")
            status = os.stat(self.path)
            self._file = (status.st_dev, status.st_ino)
            if self._syncs_apart:
                self._log = self._open_log(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_log(self, connection: sqlite3.Connection) -> int | None:
        try:
            # It was made by what was read before, and stays for as long as anybody has a connection.
            return os.open(f"{self.path}-wal", os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            connection.execute("PRAGMA synchronous = full")
            return None

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create our tables where they are missing, and refuse what a newer tenure has written."""
        known = _versions(connection)
        missing = [part for part in self._parts if part.name not in known]
        for part in self._parts:
            version, written_by = known.get(part.name, (part.version, ""))
            if version != part.version:  # none is older: there has been no other version yet
                raise ConfigError(
                    f"the tables of {part.name} in {self.path} have version {version}, written by tenure {written_by}, "
                    f"and this tenure reads version {part.version}; use tenure {written_by} or newer, or another file"
                )
        if missing:
            self._transact(connection, lambda connection: _create(connection, missing))


_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # as SQLite does it


def _versions(connection: sqlite3.Connection) -> dict[str, tuple[int, str]]:
    exists = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'tenure_schema'"
    if connection.execute(exists).fetchone() is None:
        return {}
    rows = connection.execute("SELECT part, version, written_by FROM tenure_schema ORDER BY part")
    return {part: (version, written_by) for part, version, written_by in rows}


def _create(connection: sqlite3.Connection, parts: Sequence[Part]) -> None:
    for part in parts:
        for statement in _script(part.script):
            connection.execute(statement)
        # Another process may have been first; then its row stands.
        row = (part.name, part.version, _tenure_version())
        connection.execute("INSERT OR IGNORE INTO tenure_schema (part, version, written_by) VALUES (?, ?, ?)", row)


def _tenure_version() -> str:
    from importlib import metadata  # slow to import, and needed once in a file's life

    try:
        return metadata.version("tenure")
    except metadata.PackageNotFoundError:
        return "unknown"


# --- one thread --------------------------------------------------------------------------------------------------

_LEFT_BEHIND: list[object] = []  # connections that came through a fork: even to close them would not be safe


class Worker:
    """A thread that owns a ``Database`` and does its work, one job after the other; made anew after a fork.

    Args:
        make: Makes the database; called when the first job comes.
    """

    def __init__(self, make: Callable[[], Database]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._staff: tuple[Threads, Database] | None = None
        self._closed = False

    async def run(self, job: Callable[[Database], T], unwanted: Callable[[Database], object] | None = None) -> T:
        """Return what *job* returns; it runs in the thread. A caller that is cancelled only stops waiting.

        Args:
            job: What to do.
            unwanted: Runs in the thread, some time after *job*, if the caller is not told what that returned. It may
                not have been done at all.

        Raises:
            Unavailable: The file could not be asked, or the answer did not come in time.
            ConfigError: The file can't be used as it is, or the worker is closed.
        """
        thread, database = self._hired()
        busy = database.options.busy
        until = time.monotonic() + busy  # counted from here: jobs that queue behind a lock give up together

        def work() -> T:
            database.until = until
            return job(database)

        try:
            async with asyncio.timeout(busy + PATIENCE):
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        except BaseException as error:
            if unwanted is not None:
                _do_after(thread, database, unwanted)
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"{database.path} gave no answer within {busy + PATIENCE:g} s; the disk may hang. "
                    "What was asked may still be done"
                ) from error
            raise

    async def close(self) -> None:
        """Close the connection and end the thread; what is still queued is done first."""
        self._closed = True
        with self._lock:
            staff, self._staff = self._staff, None
        if staff is None or self._pid != os.getpid():
            return
        thread, database = staff
        with suppress(TimeoutError):
            async with asyncio.timeout(database.options.busy + PATIENCE):
                await asyncio.get_running_loop().run_in_executor(thread, database.close)
        thread.shutdown(wait=False)

    def _hired(self) -> tuple[Threads, Database]:
        if self._pid != os.getpid():
            # The parent's thread is not here, and its connection must not be used, nor its lock, which may be held.
            _LEFT_BEHIND.append(self._staff)
            self._lock, self._staff, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._closed:
                raise ConfigError("this backend was closed; connect again")
            if self._staff is None:
                self._staff = (Threads(1, "tenure-sqlite"), self._make())
            return self._staff


def _do_after(thread: Threads, database: Database, job: Callable[[Database], object]) -> None:
    """Do *job* after all that is queued, also of a worker that is closed meanwhile; nobody waits for it."""

    def work() -> None:
        database.until = time.monotonic() + database.options.busy
        with suppress(TenureError):
            job(database)

    with suppress(RuntimeError):  # shut down: then what it should follow is done, and the connection closed
        thread.submit(work)
