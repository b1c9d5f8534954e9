"""The sockets at which running ``tenure lead`` answer: their folder, their names, how they are made and found.

Rules:

- Only this user may write the folder, ``BASE/tenure-UID``: another user must neither answer for a process of this one,
  nor remove its socket. A folder that another user has made is refused.
- A socket gets its final name when it takes connections. So a process whose socket refuses one has ended.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tenure._cli.exits import Exit, Failure
from tenure._cli.group import SOCKET_BASE, SOCKET_VARIABLE

PATH_MAX = 100
"""Bytes of a path that fit into a socket's address: 108 on Linux, 104 elsewhere, with the end mark."""

LABEL_MAX = 24
"""Characters of an election's name in that of its sockets. The check sum distinguishes the rest."""

BACKLOG = 100

_NAME = re.compile(r"[\w.-]+-[0-9a-f]{8}-(?P<pid>\d+)-[0-9a-f]{8}", re.ASCII)
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)

IS_SUPPORTED = hasattr(socket, "AF_UNIX") and hasattr(os, "geteuid")
"""Whether this system has Unix sockets."""


class LeadSocket(NamedTuple):
    """The socket of a running process."""

    pid: int
    path: str


def folder_in(base: str | None) -> str:
    """Return the folder of this user's sockets."""
    return os.path.join(base or SOCKET_BASE, f"tenure-{os.geteuid()}")


@contextmanager
def listening(name: str, base: str | None) -> Iterator[socket.socket]:
    """Make a socket for this process, which leads *name*, and remove it at the end of the block.

    Raises:
        Failure: It can't be made there.
    """
    folder = folder_in(base)
    path = os.path.join(folder, f"{_prefix(name)}{os.getpid()}-{os.urandom(4).hex()}")
    if len(os.fsencode(path)) > PATH_MAX:
        raise _failure(f"{path} is too long: a socket's path has {PATH_MAX} bytes at most")
    try:
        made = socket.socket(socket.AF_UNIX)
    except OSError as error:  # there is no descriptor left
        raise Failure(Exit.NO_PROCESS, f"no socket can be made: {error.strerror or error}") from error
    with made:
        _publish(made, folder, path)
        try:
            yield made
        finally:
            with suppress(OSError):
                os.unlink(path)


def _publish(made: socket.socket, folder: str, path: str) -> None:
    """Let a socket take connections at *path*, in *folder*, which is made if need be."""
    unnamed = os.path.join(folder, f".{os.urandom(4).hex()}")
    try:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        require_private(folder)
        _remove_abandoned(folder)
        made.bind(unnamed)
        os.chmod(unnamed, 0o600)
        made.listen(BACKLOG)
        os.rename(unnamed, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(unnamed)
        raise _failure(f"no socket can be made in {folder}: {error.strerror or error}") from error


def found(name: str | None, base: str | None) -> list[LeadSocket]:
    """Return the sockets for *name*, or for every name; processes that were killed have left theirs.

    Raises:
        Failure: The folder belongs to another user, or can't be read.
    """
    folder = folder_in(base)
    prefix = "" if name is None else _prefix(name)
    try:
        require_private(folder)
        entries = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _failure(f"{folder} can't be read: {error.strerror or error}") from error
    matches = [_NAME.fullmatch(entry) for entry in entries if entry.startswith(prefix)]
    return [LeadSocket(int(one["pid"]), os.path.join(folder, one[0])) for one in matches if one]


def require_private(folder: str) -> None:
    """Refuse a folder that another user may write.

    Raises:
        Failure: Another user may.
        OSError: There is no such folder.
    """
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise _failure(f"{folder} must be a folder that belongs to this user and has mode 700")


def _prefix(name: str) -> str:
    return f"{_UNSAFE.sub('_', name)[:LABEL_MAX]}-{zlib.crc32(name.encode(errors='backslashreplace')):08x}-"


def _remove_abandoned(folder: str) -> None:
    """Remove the sockets of processes that were killed."""
    for entry in os.listdir(folder):
        if (match := _NAME.fullmatch(entry)) and not _runs(int(match["pid"])):
            path = os.path.join(folder, entry)
            if _is_refused(path):  # else it runs in another container, which numbers its processes by itself
                with suppress(OSError):
                    os.unlink(path)


def _runs(pid: int) -> bool:
    """Whether another process of this number runs here: its socket need not be tried."""
    return pid != os.getpid() and os.path.exists(f"/proc/{pid}")


def _is_refused(path: str) -> bool:
    """Whether the process of this socket has ended, and left it behind."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _failure(why: str) -> Failure:
    return Failure(Exit.CONFIG, f"{why}; name another folder with --socket-dir or {SOCKET_VARIABLE}")
