"""A reserve for a full disk: a file beside the database that is truncated when nothing can be written.

Receiving and completing write too, into SQLite's log; and a checkpoint of the log takes room for everything that the
file doesn't hold yet. On a disk that is full to the last block neither works, so no message could ever be removed. So
before anything is sent, the reserve is made as large as the log, and some more; if that is impossible, sending is
refused. It is also kept from the first lease on, but no lease is refused for lack of it. When another write finds no
room, the reserve is released, the log is emptied, and the write is tried again.

House rules:

- Other users may write the folder, and may have put another file in the reserve's place: no link is followed, and only
  a file that begins with tenure's mark is ever changed.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from contextlib import suppress

SPARE = 2**20
"""Bytes beyond the size of the log; on a small disk an eighth of it, if that is less."""

_MARK = b"tenure: room kept for a full disk; it may be deleted\n"
_CHUNK = 2**16
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def largest_file() -> float:
    """Return the number of bytes that a file of this process may have (``ulimit -f``)."""
    try:
        import resource  # not on Windows
    except ImportError:
        return math.inf
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most


class Reserve:
    """The reserve of one database.

    Args:
        database: The path of its file.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self._path = f"{database}-reserve"
        self._file: int | None = None
        self._spare = 0

    def keep(self, growth: int) -> bool:
        """Make the reserve large enough for *growth* bytes more; return False if there is no room.

        Where another file has its place, there is no reserve, and nothing is refused for that.
        """
        wanted = self._log_size() + 2 * growth + self.spare()
        try:
            file = self._opened(create=True)
            size = os.fstat(file).st_size
            if size < wanted:
                try:
                    _allocate(file, size, wanted + self.spare() // 2 - size)  # not for each commit
                except OSError:
                    os.ftruncate(file, size)
                    _allocate(file, size, wanted - size)
            elif size > 4 * wanted:
                os.ftruncate(file, wanted)
        except OSError as error:
            return error.errno not in _NO_ROOM
        return True

    def give_up(self) -> bool:
        """Release the room to the disk; return False if there was none."""
        with suppress(OSError):
            file = self._opened(create=False)
            if os.fstat(file).st_size > len(_MARK):
                os.ftruncate(file, len(_MARK))
                return True
        return False

    def close(self) -> None:
        """Close the file; it stays as it is."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def spare(self) -> int:
        """Return the number of bytes that it should have beyond the size of the log."""
        if not self._spare:
            disk = os.statvfs(os.path.dirname(self._database))
            self._spare = min(SPARE, disk.f_blocks * disk.f_frsize // 8)
        return self._spare

    def is_disk_full(self) -> bool:
        """Whether there is so little room that sending is refused, or soon will be."""
        disk = os.statvfs(os.path.dirname(self._database))
        blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
        return blocks * disk.f_frsize < self.spare()

    def _log_size(self) -> int:
        try:
            return os.stat(f"{self._database}-wal").st_size
        except FileNotFoundError:
            return 0

    def _opened(self, *, create: bool) -> int:
        if self._file is not None:
            if os.fstat(self._file).st_nlink:
                return self._file
            self.close()  # it was deleted
        try:
            file = os.open(self._path, os.O_RDWR | _ITSELF)
        except FileNotFoundError:
            if not create:
                raise
            file = self._made()
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode) or os.pread(file, len(_MARK), 0) != _MARK:
                raise FileExistsError(f"{self._path} is another file")
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return file

    def _made(self) -> int:
        about = os.stat(self._database)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _ITSELF, 0o600)
        try:
            os.pwrite(file, _MARK, 0)
            if os.geteuid() == 0:
                os.fchown(file, about.st_uid, about.st_gid)
            os.fchmod(file, stat.S_IMODE(about.st_mode))
        except BaseException:
            os.close(file)
            raise
        return file


def _allocate(file: int, start: int, size: int) -> None:
    """Take *size* bytes of the disk for *file* from *start* on.

    Raises:
        OSError: There is not enough room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
        return
    for place in range(start, start + size, _CHUNK):
        os.pwrite(file, bytes(min(_CHUNK, start + size - place)), place)
