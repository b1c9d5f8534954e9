"""The folder of sockets beside the file: send datagrams to all sockets in it; make, find and remove the own one.

House rules:

- Other users may write the folder, and the one around it: everything in it may be planted, and may be swapped between
  two calls. So no link is followed, neither at the folder nor in it; and before anything is written to, or has its mode
  changed, it is opened (``O_PATH``), checked through that descriptor, and used through it.
- A socket is removed only if its name has the format of tenure's, it belongs to this user, and no process reads it.
- Where there is no ``/proc``, files are used by name, right after the check.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

UNNAMED_MAX = 60.0
"""Seconds after which a socket that was not renamed is abandoned: its process has died."""

PATH_MAX = 100
"""Bytes of a path that must fit into a socket's address: 108 on Linux, 104 elsewhere, name included."""

_NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")
_ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # not the target of a link
_PIN = getattr(os, "O_PATH", 0) | _ITSELF


def folder_of(file: str) -> str:
    """Return the folder of the sockets of *file*."""
    return f"{file}.wake"


@cache
def through_proc() -> bool:
    """Whether an open file can be used through ``/proc``, independent of the length of its path and of its name."""
    return hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")


def send_to_all(place: str, topic: str, but: str) -> None:
    """Send *topic* to all sockets in the folder *place*, *but* one. It does not block.

    Raises:
        OSError: There is no such folder, or no descriptor left.
    """
    # A new socket each time: datagrams that a stopped process has not read count against their sender.
    with _opened(place) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for name in os.listdir(folder):
            if name != but and _NAME.fullmatch(name):
                _send(sender, topic.encode(), folder, place, name)


def bind(place: str, file: str) -> tuple[socket.socket, str]:
    """Make a socket in the folder *place*, and the folder, for all users that may write *file*, as SQLite does its log.

    Returns the socket and its name in the folder.

    Raises:
        OSError: It can't be made there.
    """
    about = os.stat(file)
    mode = _mode_like(about.st_mode)
    is_new = _make_folder(place)
    with _opened(place) as folder:
        if is_new:
            _open_to_others(folder, about, mode)
        _remove_abandoned(folder)
        return _bound(folder, place, mode & 0o666)


def is_in_place(place: str, name: str) -> bool:
    """Whether the own socket is still where others look for it."""
    try:
        with _opened(place) as folder:
            return stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def remove_socket(place: str, name: str) -> None:
    """Remove the own socket from the folder *place*, if it is there."""
    with suppress(OSError), _opened(place) as folder:
        _remove(folder, name)


# --- the folder --------------------------------------------------------------------------------------------------


@contextmanager
def _opened(place: str) -> Iterator[int]:
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | _ITSELF)
    try:
        yield folder
    finally:
        os.close(folder)


def _make_folder(place: str) -> bool:
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        return False
    return True


def _open_to_others(folder: int, file: os.stat_result, mode: int) -> None:
    """Open a folder that was just made to the users that may write the file."""
    made = os.fstat(folder)
    if made.st_uid != os.geteuid() or os.listdir(folder):
        return  # it was swapped meanwhile
    # A process of root must not leave a folder that the file's owner can't enter.
    if made.st_uid == 0 and (file.st_uid, file.st_gid) != (0, made.st_gid):
        os.fchown(folder, file.st_uid, file.st_gid)
    os.fchmod(folder, mode | made.st_mode & stat.S_ISGID)  # in a folder of a group, sockets belong to the group


def _mode_like(mode: int) -> int:
    """Return the folder's mode for a file's. Where several users may write it, none can remove another's socket."""
    shared = (0o070 if mode & 0o060 == 0o060 else 0) | (0o007 if mode & 0o006 == 0o006 else 0)
    return 0o700 | shared | (stat.S_ISVTX if shared else 0)


def _remove_abandoned(folder: int) -> None:
    """Remove sockets of processes that died between binding and renaming them.

    A process that was only stopped there fails to rename its socket, and makes another one.
    """
    for name in os.listdir(folder):
        if name.startswith("."):
            with suppress(OSError):
                if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > UNNAMED_MAX:
                    _remove(folder, name)


def _remove(folder: int, name: str) -> None:
    """Remove *name* from the folder if it is a socket of this user, named as tenure's are.

    It may be swapped between the check and the removal: only by an owner that could remove it anyway.
    """
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() and _NAME.fullmatch(name.removeprefix(".")):
        os.unlink(name, dir_fd=folder)


# --- a socket ----------------------------------------------------------------------------------------------------


def _bound(folder: int, place: str, mode: int) -> tuple[socket.socket, str]:
    name = f"{os.getpid()}-{os.urandom(4).hex()}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listening.setblocking(False)
        # Bound under a name to which no process sends, then renamed: before it is bound, a socket refuses datagrams,
        # like one of a dead process.
        listening.bind(f"/proc/self/fd/{folder}/.{name}" if through_proc() else os.path.join(place, f".{name}"))
        with _reached(folder, place, f".{name}") as way:
            os.chmod(way, mode)
        os.rename(f".{name}", name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        listening.close()
        with suppress(OSError):
            _remove(folder, f".{name}")
        raise
    return listening, name


def _send(sender: socket.socket, message: bytes, folder: int, place: str, name: str) -> None:
    try:
        with _reached(folder, place, name) as way:
            sender.sendto(message, way)
    except ConnectionRefusedError:  # its process died without removing it
        with suppress(OSError):
            _remove(folder, name)
    except OSError:
        pass  # gone meanwhile; full, so it wakes anyway; another user's; or no socket


@contextmanager
def _reached(folder: int, place: str, name: str) -> Iterator[str]:
    """Yield a path to the socket *name* in the folder that leads to nothing else.

    Raises:
        OSError: It is no socket, or gone.
    """
    if not through_proc():
        _require_socket(os.stat(name, dir_fd=folder, follow_symlinks=False), name)
        yield os.path.join(place, name)
        return
    pinned = os.open(name, _PIN, dir_fd=folder)
    try:
        _require_socket(os.fstat(pinned), name)
        yield f"/proc/self/fd/{pinned}"
    finally:
        os.close(pinned)


def _require_socket(found: os.stat_result, name: str) -> None:
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(f"{name} is no socket")
