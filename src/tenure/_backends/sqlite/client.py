"""One connection to an SQLite file: open and check it, translate its errors, retry while it is locked.

:class:`tenure._backends.sqlite.worker.Worker` is the thread that uses it.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from tenure._backends.sqlite.address import Options
from tenure._backends.sqlite.reserve import Reserve, largest_file
from tenure._backends.sqlite.schema import TableSet, create, missing, versions
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

LIBRARY_MIN = (3, 35, 0)  # RETURNING
PATIENCE = 5.0
"""Seconds beyond ``busy`` that a caller waits for the disk before it gets ``Unavailable``."""

_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # a file size limit or a quota gives the latter
_NO_ACCESS = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_NOT_READ = "it can't be read from here; check the rights on the file and its folder"
_NOT_WRITTEN = "it can't be written from here; check the rights on the file and its folder, for SQLite writes both"


_text = partial(str, encoding="utf-8", errors="replace")


class DiskFullError(Unavailable):
    """There is no room to write; operations that free room may still work."""

    code = "sqlite-disk-full"


def translate(error: sqlite3.Error, path: str) -> TenureError:
    """Return the error of tenure for an error of SQLite about the file at *path*."""
    match _primary_code(error):
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Unavailable(
                f"{path} stayed locked by another connection for the whole time of the option busy; "
                "look for a process with a long transaction, or one that was stopped inside a transaction"
            )
        case sqlite3.SQLITE_NOTADB:
            return ConfigError(f"{path} is not an SQLite database; name another file, or move this one away")
        case sqlite3.SQLITE_CORRUPT:
            return ConfigError(
                f"{path} is damaged ({error}); stop all processes that use it, then restore it from a copy or try "
                "the sqlite3 program's .recover"
            )
        case sqlite3.SQLITE_FULL:
            return DiskFullError(_full(path))
        case code if code in _NO_ACCESS:
            obstacle = _obstacle(path)
            if obstacle:
                return ConfigError(f"{path} can't be used: {obstacle}")
            return Unavailable(f"{path} can't be opened ({error}), and no reason was found; tenure tries again")
        case None:
            raise AssertionError("translate() got an error that is not SQLite's") from error
    return Unavailable(f"the request to {path} failed: {error} ({error.sqlite_errorname})")


def _full(path: str) -> str:
    return (
        f"the disk that holds {path} is full; nothing was written. Receiving and completing still work; make room on "
        "the disk to send again"
    )


def _primary_code(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; None if the error is Python's own."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _obstacle(path: str) -> str:
    """Return the reason why *path* can't be opened or written, which SQLite doesn't report."""
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
        return f"{folder} is a file, not a folder; name another place"
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

    Everything in it blocks, and belongs to one thread at a time. It tries for the write lock up to ``until``, by
    ``time.monotonic()``.

    Args:
        path: The file.
        options: How to use it.
        parts: The tables that are needed.
        reads_only: Let SQLite refuse writes, once the tables exist.
        syncs_apart: Commit without waiting for the disk; commits survive a loss of power after ``sync``, which holds no
            lock. A loss of power keeps a prefix of the log: no later commit without all before it.
        used: Set once any connection of the backend could use the file: then it may be usable again.
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
        self._grown = math.inf  # bytes written since the reserve was checked

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what *work* reads. It waits for no writer.

        Raises:
            Unavailable: The file could not be used now.
            ConfigError: The file can't be used as it is.
        """
        return self._try(lambda: work(self._connected()))

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run *work* in a transaction of its own, and return its result once that is committed.

        *work* may run several times, each time in a new transaction, after a rollback of the one before.

        Raises:
            Unavailable: The file stayed locked, or could not be written; it is unknown whether anything was.
            ConfigError: The file can't be used as it is.
        """
        return self._try(lambda: self._transact(self._connected(), work))

    def keep_reserve(self, growth: int) -> None:
        """Check that the disk keeps its reserve when *growth* bytes more are written. Inside a transaction.

        Raises:
            DiskFullError: It would not.
        """
        if not hasattr(os, "statvfs"):  # on Windows, the free room isn't available this way
            return
        self._grown += growth
        if self._grown > self._reserve.spare() / 8:  # a check for each write would cost too much
            if not (self._reserve.keep(growth) and self._fits()):
                raise DiskFullError(_full(self.path))
            self._grown = 0.0

    def sync(self) -> None:
        """Wait until everything committed so far is on the disk; return at once where commits wait for that.

        Raises:
            Unavailable: The disk reports a failed write.
        """
        if self._log is None:
            return
        try:
            _sync(self._log)
        except OSError as error:
            self.close()
            raise Unavailable(
                f"{self.path} was written, but the disk reports that it could not store it: {error}; check the disk"
            ) from error

    def close(self) -> None:
        """Close the connection. The next use opens it again."""
        connection, self._connection = self._connection, None
        log, self._log = self._log, None
        if log is not None:
            os.close(log)
        self._reserve.close()
        self._grown = math.inf
        if connection is not None:
            # Closing may start a checkpoint, which may fail; committed data is safe in the log.
            with suppress(sqlite3.Error):
                connection.close()

    def require_room(self) -> None:
        """Check that there is room to send something.

        Raises:
            DiskFullError: There is none.
        """
        if hasattr(os, "statvfs") and self._reserve.is_disk_full():
            raise DiskFullError(_full(self.path))

    # --- retries ---

    def _try(self, attempt: Callable[[], T]) -> T:
        """Run *attempt*, again and again while the file is locked.

        SQLite's own busy handler sleeps up to 100 ms at a time, so that some of several processes starve; short random
        pauses give each its share.
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
                if code is None:  # a ProgrammingError: a bug in tenure, not translated
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
                time.sleep(random_pause(pause))
                pause = min(pause * 1.05, 0.005)
            else:
                if not self._used.is_set():
                    self._used.set()
                return answer

    def _fits(self) -> bool:
        """Whether the file may become large enough for the contents of the log."""
        most = largest_file()
        if most == math.inf:
            return True
        connection = self._connected()
        (pages,), (size,) = (connection.execute(f"PRAGMA {of}").fetchone() for of in ("page_count", "page_size"))
        return bool(pages * size + self._reserve.spare() / 2 <= most)

    def _empty_log(self) -> None:
        """Move the contents of the log to the file and truncate it, unless a reader or a writer is active."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _fail(self, error: sqlite3.Error) -> None:
        self.close()  # the next use gets a new connection
        translated = translate(error, self.path)
        if isinstance(translated, ConfigError) and _primary_code(error) in _NO_ACCESS:
            translated = self._unusable(str(translated))
        raise translated from error

    def _unusable(self, reason: str) -> TenureError:
        """Return the error for a file that can't be used: ``ConfigError``, or ``Unavailable`` if it was used before."""
        return (
            Unavailable(f"{reason} (it was usable before, so it may be again)")
            if self._used.is_set()
            else ConfigError(reason)
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
        # Another file may have taken its place. Then no other process uses the open one.
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
                f"there is no file {self.path}, so no candidate or sender has used it yet; check the spelling, or let "
                "the first of them create it"
            )
        if self.options.create:
            _create_private(self.path)
        # SQLite itself creates nothing, even if the file is removed just now: all users could read what it creates.
        connection = sqlite3.connect(_uri(self.path), uri=True, timeout=0, isolation_level=None)
        connection.text_factory = _text  # one invalid text would fail the whole statement
        try:
            if not self.options.create and not versions(connection):
                raise self._unusable(
                    f"{self.path} has no tables of tenure, so no candidate or sender has used it yet; check the "
                    "spelling, or let the first of them create the tables"
                )
            synchronous = "normal" if self._syncs_apart else self.options.synchronous
            connection.execute(f"PRAGMA synchronous = {synchronous}")
            (journal,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if journal != "wal":
                raise ConfigError(
                    f"{self.path} needs a write-ahead log, and its journal mode stayed {journal!r}: its file system "
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
            # The reads above have created it, and it stays while any connection is open.
            return os.open(f"{self.path}-wal", os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            connection.execute("PRAGMA synchronous = full")
            return None


def _create_private(path: str) -> None:
    """Create an empty file for this user alone, unless *path* exists: its mode was chosen, and stays."""
    with suppress(OSError):  # SQLite fails in the same way next
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))


def _uri(path: str) -> str:
    return f"file:{'//' if path.startswith('/') else '///'}{quote(os.fsencode(path))}?mode=rw"


_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # as SQLite does it


def random_pause(longest: float) -> float:
    """Return a time of up to *longest* seconds, by the system's die: the module ``random`` takes longer to import."""
    return 0.0001 + (longest - 0.0001) * os.urandom(1)[0] / 255
