"""The way to an SQLite file: translate its errors, open and check it, write with patience, and do it all in one thread.

``Database`` is one connection, for one thread at a time. ``Worker`` is that thread, with a door for asyncio.
"""

from __future__ import annotations

import math
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from tenure._backends.sqlite.address import Options
from tenure._backends.sqlite.reserve import Reserve, largest_file
from tenure._backends.sqlite.schema import TableSet, create, missing, versions
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

LIBRARY_MIN = (3, 35, 0)  # RETURNING
PATIENCE = 5.0
"""How many seconds beyond ``busy`` a caller waits for the disk before it is told that there was no answer."""

_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # a limit on files, or a quota, is the latter
_NO_ACCESS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_NOT_READ = "it can't be read from here; check the rights on the file and its folder"
_NOT_WRITTEN = "it can't be written from here; check the rights on the file and its folder, for SQLite writes both"


class DiskFullError(Unavailable):
    """There is no room to write; what takes room off may still work."""


def translate(error: sqlite3.Error, path: str) -> TenureError:
    """Turn what SQLite said about the file at *path* into one of ours."""
    match _primary_code(error):
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
        case code if code in _NO_ACCESS:
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


def _primary_code(error: sqlite3.Error) -> int | None:
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
        parts: Sequence[TableSet],
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

    def require_room(self) -> None:
        """Refuse if there is no room to send anything.

        Raises:
            DiskFullError: There is none.
        """
        if hasattr(os, "statvfs") and self._reserve.is_disk_full():
            raise DiskFullError(_full(self.path))

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
                code = _primary_code(error)
                if code is None:  # a ProgrammingError: a bug of ours, let it fly
                    raise
                if may_make_room and code in _FULL:
                    may_make_room = False
                    self._reserve.give_up()
                    self._grown = math.inf
                    self._empty_log()
                    continue
                if code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    self._fail(error)
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

    def _fail(self, error: sqlite3.Error) -> None:
        self.close()  # whatever is wrong with this connection, the next question gets a new one
        ours = translate(error, self.path)
        if isinstance(ours, ConfigError) and _primary_code(error) in _NO_ACCESS:
            ours = self._unusable(str(ours))
        raise ours from error

    def _unusable(self, why: str) -> TenureError:
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
            raise self._unusable(
                f"there is no file {self.path}, so nobody has led or sent anything there; look for a "
                "misspelling, or let the first candidate or sender create it"
            )
        connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            if not self.options.create and not versions(connection):
                raise self._unusable(
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
            absent = missing(connection, self._parts, self.path)
            if absent:
                self._transact(connection, lambda connection: create(connection, absent))
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


_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # as SQLite does it
