"""Waking other processes: each binds a datagram socket in a folder beside the file, and is sent what has changed.

A datagram arrives in a tenth of a millisecond, where polling would cost more and wake later. It is a hint: if one is
lost, those who wait look again when a lease runs out. Topics are ``lease:NAME`` and the like.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache

from tenure.backends import Fact
from tenure.backends.sqlite.client import Database, Worker
from tenure.bell import Bell, Listener
from tenure.errors import TenureError

_PATH_MAX = 100  # bytes; the kernel's limit is 108 on Linux and 104 elsewhere, and the socket's own name comes on top
_CROWDED = 8
"""So many datagrams at once, and the socket may have been full (at ten, by default): some topic may be missing."""


class Wake:
    """The sockets of one file: ``ring`` tells all processes, ``listen`` hears from all.

    Args:
        path: The file.
        worker: Its thread, in which the folder and the socket are made.
    """

    def __init__(self, path: str, worker: Worker) -> None:
        self._file = path
        self._folder = _folder_of(path)
        self._worker = worker
        self._bell = Bell()
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._name = ""
        self._home: asyncio.AbstractEventLoop | None = None  # the loop that reads the socket
        self._closed = False
        self._why_not = _why_not(self._folder)

    @property
    def possible(self) -> bool:
        """Whether other processes can wake us."""
        return not self._why_not

    def fact(self) -> Fact:
        """Tell how this process is woken."""
        if self.possible:
            return Fact("wake-up", f"by sockets in {self._folder}")
        return Fact("wake-up", "none: waiting processes look again from time to time", self._why_not)

    # --- telling ---

    def ring(self, topic: str) -> None:
        """Wake who listens to *topic*, here and in the other processes. Call it after the commit; it does not block."""
        self._refresh()
        self._bell.ring(topic)
        tell(self._file, topic, but=self._name)

    # --- hearing ---

    def listen(self, topic: str) -> AsyncIterator[None]:
        """Return an iterator that yields when *topic* was rung, here or in another process."""
        self._refresh()
        return _Heard(self, self._bell.listen(topic))

    async def hear(self) -> bool:
        """See to it that the socket is read; True if it was not, so that something may have been missed."""
        self._refresh()
        if self._why_not or (self._home is not None and not self._home.is_closed()):
            return False
        try:
            bound = await self._worker.run(self._bind)
        except TenureError:
            bound = False  # no hint now; the next call tries again
        if not bound or self._socket is None:
            return False
        home = asyncio.get_running_loop()
        try:
            home.add_reader(self._socket, self._read)
        except NotImplementedError:
            self._why_not = "this event loop can't watch a socket"
            self._socket.close()
            self._socket = None
            await self._worker.run(lambda _: self._unlink())
            return False
        self._home = home
        return True

    async def close(self) -> None:
        """Stop listening, and take the socket away; every iterator ends."""
        self._refresh()
        self._bell.close()
        self._why_not = "closed"
        self._closed = True
        listening, home = self._socket, self._home
        self._socket = self._home = None
        if listening is None:
            return
        if home is None or home.is_closed():
            listening.close()
        elif home is asyncio.get_running_loop():
            _let_go(home, listening)
        else:
            home.call_soon_threadsafe(_let_go, home, listening)
        with suppress(TenureError):
            await self._worker.run(lambda _: self._unlink())

    def _bind(self, database: Database) -> bool:
        """Make the folder and the socket in it; in the worker's thread."""
        if self._socket is not None:
            return True
        database.read(lambda _: None)  # so that the file is there, whose rights are to be copied
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            listening.setblocking(False)
            mode = _mode_like(self._file)
            with suppress(FileExistsError):
                os.mkdir(self._folder, mode)
                os.chmod(self._folder, mode)
            self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                # Bound under a name that nobody sends to, then renamed: between its birth and its binding a socket
                # refuses, and would be taken for one that a dead process left.
                address = _address(folder, self._folder, f".{self._name}")
                listening.bind(address)
                os.chmod(address, mode & 0o666)
                os.rename(f".{self._name}", self._name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            listening.close()
            self._why_not = f"no socket can be made in {self._folder}: {error}"
            return False
        self._socket = listening
        if self._closed:  # meanwhile, and without this socket: one of the two sees the other
            listening.close()
            self._unlink()
            return False
        return True

    def _unlink(self) -> None:
        with suppress(OSError):
            os.unlink(os.path.join(self._folder, self._name))

    def _read(self) -> None:
        """Ring for every datagram that has come; the home loop calls this."""
        topics: list[str] = []
        with suppress(BlockingIOError):
            while self._socket is not None:
                topics.append(self._socket.recv(65_536).decode(errors="replace"))
        if len(topics) >= _CROWDED:
            self._bell.ring_all()
        else:
            for topic in dict.fromkeys(topics):
                self._bell.ring(topic)

    def _refresh(self) -> None:
        """Begin anew after a fork: the socket is the parent's, and so are those who listen."""
        if self._pid != os.getpid():
            self._pid, self._bell = os.getpid(), Bell()
            if self._socket is not None:
                os.close(self._socket.detach())
            self._socket = self._home = None
            self._name = ""


class _Heard(AsyncIterator[None]):
    """Yields for each ring; and once when the socket begins to be read, for what may have come before."""

    def __init__(self, wake: Wake, listener: Listener) -> None:
        self._wake = wake
        self._listener = listener

    async def __anext__(self) -> None:
        if not await self._wake.hear():
            await anext(self._listener)

    async def aclose(self) -> None:
        await self._listener.aclose()


def _let_go(home: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
    home.remove_reader(listening)
    listening.close()


def tell(path: str, topic: str, but: str = "") -> None:
    """Wake who listens to *topic* of the file at *path*, through all sockets *but* one. It does not block."""
    if not hasattr(socket, "AF_UNIX"):
        return
    place = _folder_of(path)
    try:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # nobody ever listened
    try:
        # A new socket each time: what a stopped process has not read yet counts against its sender.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            for name in os.listdir(folder):
                if name != but and not name.startswith("."):
                    _send(sender, topic, folder, place, name)
    finally:
        os.close(folder)


def _folder_of(path: str) -> str:
    return f"{path}.wake"


def _send(sender: socket.socket, topic: str, folder: int, path: str, name: str) -> None:
    try:
        sender.sendto(topic.encode(), _address(folder, path, name))
    except ConnectionRefusedError:  # its process died without taking it away
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # gone meanwhile, or full: then it wakes anyway; or another user's


def _address(folder: int, path: str, name: str) -> str:
    """Return a path to the socket that fits into an address, however long the folder's own path is."""
    return f"/proc/self/fd/{folder}/{name}" if _through_proc() else os.path.join(path, name)


@cache
def _through_proc() -> bool:
    return os.path.isdir("/proc/self/fd")


def _mode_like(path: str) -> int:
    """Return the folder's mode: for those who may write the file, as SQLite does it for its log."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    return 0o700 | (0o070 if mode & 0o060 == 0o060 else 0) | (0o007 if mode & 0o006 == 0o006 else 0)


def _why_not(folder: str) -> str:
    """Tell why no socket can be made in *folder*, as far as can be known without trying."""
    if not hasattr(socket, "AF_UNIX"):
        return "this system has no Unix sockets"
    if not _through_proc() and len(os.fsencode(folder)) > _PATH_MAX - 24:
        return f"the path {folder} is too long for a socket; keep the file under a shorter one"
    place = folder if os.path.isdir(folder) else os.path.dirname(folder)
    if os.path.isdir(place) and not os.access(place, os.W_OK | os.X_OK):
        return f"{place} can't be written from here"
    return ""
