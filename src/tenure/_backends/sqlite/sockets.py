"""The folder of sockets beside the file: datagrams to all in it, and one's own socket made, found and taken away.

House rules:

- Others may write the folder, and the one around it: whatever is found there may have been planted, and may be swapped
  between two calls. So no link is followed, neither at the folder nor in it; and what is written to, or has its mode
  changed, is opened first (``O_PATH``), looked at through that, and reached through that.
- Only sockets are taken away that bear a name as ours do, belong to our own user, and have nobody who reads them.
- Where there is no ``/proc``, things are reached by their names, right after they were looked at.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

UNNAMED_MAX = 60.0
"""Seconds after which a socket that has no name yet never gets one: its process has died over it."""

PATH_MAX = 100
"""Bytes that a path may have where it must fit into an address: 108 on Linux, 104 elsewhere, name included."""

_NAME = re.compile(r"[0-9]+-[0-9a-f]{8}")
_ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # and not what a link there names
_PIN = getattr(os, "O_PATH", 0) | _ITSELF


def folder_of(file: str) -> str:
    """Return where the sockets of those who use *file* are."""
    return f"{file}.wake"


@cache
def through_proc() -> bool:
    """Whether what is open can be reached through ``/proc``, however long its path is and whatever takes its name."""
    return hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")


def send_to_all(place: str, topic: str, but: str) -> None:
    """Send *topic* to all sockets in the folder *place*, *but* one. It does not block.

    Raises:
        OSError: There is no such folder, or no descriptor left.
    """
    # A new socket each time: what a stopped process has not read yet counts against its sender.
    with _opened(place) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for name in os.listdir(folder):
            if name != but and _NAME.fullmatch(name):
                _send(sender, topic.encode(), folder, place, name)


def bind(place: str, file: str) -> tuple[socket.socket, str]:
    """Make a socket in the folder *place*, and the folder too; for those who may write *file*, as SQLite does its log.

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
    """Whether our socket is still where others look for it."""
    try:
        with _opened(place) as folder:
            return stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def remove_socket(place: str, name: str) -> None:
    """Remove a socket of ours from the folder *place*, if it is there."""
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
    """Open a folder that we have just made to those who may write the file."""
    made = os.fstat(folder)
    if made.st_uid != os.geteuid() or os.listdir(folder):
        return  # it is another one by now
    # A process of root must not leave a folder that the file's owner can't enter.
    if made.st_uid == 0 and (file.st_uid, file.st_gid) != (0, made.st_gid):
        os.fchown(folder, file.st_uid, file.st_gid)
    os.fchmod(folder, mode)


def _mode_like(mode: int) -> int:
    """Return the folder's mode for a file's. Where several users may write it, none takes away another's socket."""
    shared = (0o070 if mode & 0o060 == 0o060 else 0) | (0o007 if mode & 0o006 == 0o006 else 0)
    return 0o700 | shared | (stat.S_ISVTX if shared else 0)


def _remove_abandoned(folder: int) -> None:
    """Take away what processes have left that died between the binding and the naming of their sockets.

    If one was only stopped there, it fails to give the name, and makes another socket.
    """
    for name in os.listdir(folder):
        if name.startswith("."):
            with suppress(OSError):
                if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > UNNAMED_MAX:
                    _remove(folder, name)


def _remove(folder: int, name: str) -> None:
    """Remove *name* from the folder if it is a socket of our own user, named as ours are.

    Between the look and the removal it may be swapped: for what its owner could have removed without us.
    """
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() and _NAME.fullmatch(name.removeprefix(".")):
        os.unlink(name, dir_fd=folder)


# --- a socket ----------------------------------------------------------------------------------------------------


def _bound(folder: int, place: str, mode: int) -> tuple[socket.socket, str]:
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listening.setblocking(False)
        # Bound under a name that nobody sends to, then renamed: between its birth and its binding a socket refuses,
        # and would be taken for one that a dead process left.
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
    except ConnectionRefusedError:  # its process died without taking it away
        with suppress(OSError):
            _remove(folder, name)
    except OSError:
        pass  # gone meanwhile, or full: then it wakes anyway; or another user's; or no socket


@contextmanager
def _reached(folder: int, place: str, name: str) -> Iterator[str]:
    """Give a path to the socket *name* in the folder, by which nothing else can be reached.

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
