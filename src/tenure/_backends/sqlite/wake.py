"""Notifications between processes: each binds a datagram socket in a folder beside the file, and receives topics.

A datagram arrives in a tenth of a millisecond, where polling would cost more and wake later. It is a hint: if one is
lost, the waiting process polls again when a lease runs out. Topics are ``lease:NAME`` and ``queue:NAME``.

The alternative, polling ``PRAGMA data_version``, was measured: every 5 ms, ten idle processes take 17 % of a core;
every 20 ms, 3 %, and they wake 10 ms late. Nor does it show what has changed, so a busy queue would wake all processes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.sockets import (
    PATH_MAX,
    bind,
    folder_of,
    is_in_place,
    remove_socket,
    send_to_all,
    through_proc,
)
from tenure._backends.sqlite.worker import Worker
from tenure._election.store import Hint
from tenure._opened import Fact
from tenure._runtime.notifier import Listener, Notifier
from tenure.errors import TenureError

_MANY = 8
"""Datagrams at once from which on the socket may have been full (at ten, by default): a topic may be missing."""

_AT_ONCE = 64
"""Datagrams that are read before the loop goes on to other work."""

CHECK_EVERY = 5.0
"""Seconds between checks of the own socket: it may have been removed, or an obstacle may be gone."""

_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOENT)
"""Errors that prevent a socket only for a moment, so that they are no reason to poll."""

_LEFT_BY_FORK: list[object] = []  # tasks inherited by a fork, kept: their loop is the parent's


class Wake:
    """The sockets of one file: ``notify`` wakes all processes, ``listen`` is woken by all.

    Args:
        path: The file.
        worker: Its thread, in which the folder and the socket are made.
    """

    def __init__(self, path: str, worker: Worker) -> None:
        self._file = path
        self._folder = folder_of(path)
        self._worker = worker
        self._notifier = Notifier()
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._name = ""
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that reads the socket
        self._watching: asyncio.Task[None] | None = None  # and its task there
        self._closed = False
        self._reason = _reason_against(self._folder)  # why there is no socket, permanently; empty if there may be one
        self._obstacle: OSError | None = None  # why there is none at present

    @property
    def is_ruled_out(self) -> bool:
        """Whether no other process will ever wake this one."""
        return bool(self._reason)

    @property
    def possible(self) -> bool:
        """Whether other processes can wake this one, as things are."""
        return not self._reason and (self._obstacle is None or self._obstacle.errno in _TEMPORARY)

    def fact(self) -> Fact:
        """Return how this process is woken."""
        if self._obstacle is None and not self._reason:
            return Fact("wake-up", f"by sockets in {self._folder}")
        reason = self._reason or f"no socket can be made in {self._folder}: {self._obstacle}"
        return Fact("wake-up", "none: waiting processes poll", reason, "sqlite-no-wake-up")

    # --- notify ---

    def notify(self, topic: str) -> None:
        """Wake the listeners of *topic*, here and in other processes. Call it after the commit; it does not block."""
        self._refresh()
        self._notifier.notify(topic)
        notify_processes(self._file, topic, but=self._name)

    # --- listen ---

    def listen(self, topic: str) -> AsyncIterator[Hint]:
        """Return an iterator that yields when *topic* was notified, here or in another process."""
        self._refresh()
        return _Hints(self, self._notifier.listen(topic))

    def ensure_listening(self) -> None:
        """Start reading the socket; then notify all listeners, because they may have missed a notification."""
        self._refresh()
        if self._reason or (self._loop is not None and not self._loop.is_closed()):
            return
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch(self._loop))

    async def close(self) -> None:
        """Stop listening, and remove the socket; every iterator ends."""
        self._refresh()
        self._notifier.close()
        self._reason = "closed"
        self._closed = True
        loop, watching, listening = self._loop, self._watching, self._socket
        self._loop = self._watching = self._socket = None
        if loop is None or loop.is_closed():
            if listening is not None:
                listening.close()
        elif loop is asyncio.get_running_loop():
            _detach(loop, watching, listening)
        else:
            loop.call_soon_threadsafe(_detach, loop, watching, listening)
        if listening is not None:
            with suppress(TenureError):
                await self._worker.run(lambda _: self._unlink())

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read a socket that other processes find; make it when possible, and again after its removal."""
        reads = False
        while not self._reason:
            try:
                if self._socket is not None and not await self._worker.run(lambda _: self._is_in_place()):
                    self._drop(loop)
                    reads = False
                was_possible = self.possible
                if not reads and await self._worker.run(self._bind) and self._socket is not None:
                    loop.add_reader(self._socket, self._read)
                    reads = True
                    self._notifier.notify_all()
                elif was_possible and not self.possible:
                    self._notifier.notify_all()  # and then tell each listener that hints are absent
            except NotImplementedError:
                self._reason = "this event loop can't watch a socket"
                self._drop(loop)
                self._notifier.notify_all()
                with suppress(TenureError):
                    await self._worker.run(lambda _: self._unlink())
                return
            except (TenureError, OSError):
                pass  # no hints now; the next iteration tries again
            await asyncio.sleep(CHECK_EVERY)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        listening, self._socket = self._socket, None
        _detach(loop, None, listening)

    def _is_in_place(self) -> bool:
        return is_in_place(self._folder, self._name)

    def _bind(self, database: Database) -> bool:
        """Make the folder and the socket in it; in the worker's thread."""
        if self._socket is not None:
            return True
        database.read(lambda _: None)  # so that the file exists, whose rights are copied
        try:
            listening, self._name = bind(self._folder, self._file)
        except OSError as error:
            self._obstacle = error
            return False
        self._socket, self._obstacle = listening, None
        if self._closed:  # close() ran meanwhile, and did not know this socket
            listening.close()
            self._unlink()
            return False
        return True

    def _unlink(self) -> None:
        remove_socket(self._folder, self._name)

    def _read(self) -> None:
        """Notify for every datagram that has arrived; the loop calls this."""
        topics: list[str] = []
        with suppress(BlockingIOError):
            while self._socket is not None and len(topics) < _AT_ONCE:  # anybody may send any number of them
                topics.append(self._socket.recv(65_536).decode(errors="replace"))
        if len(topics) >= _MANY:
            self._notifier.notify_all()
        else:
            for topic in dict.fromkeys(topics):
                self._notifier.notify(topic)

    def _refresh(self) -> None:
        """Start over after a fork: the socket and the listeners are the parent's."""
        if self._pid != os.getpid():
            self._pid, self._notifier = os.getpid(), Notifier()
            if self._socket is not None:
                os.close(self._socket.detach())
            _LEFT_BY_FORK.append(self._watching)
            self._socket = self._loop = self._watching = None
            self._name = ""


class _Hints(AsyncIterator[Hint]):
    """Yields for each notification, and once when the socket is first read, for those missed before.

    Without a socket, those of this process come all the same; that others' don't is told again after each of them.
    """

    def __init__(self, wake: Wake, listener: Listener) -> None:
        self._wake = wake
        self._listener = listener
        self._has_told = False  # that the hints of other processes are absent

    async def __anext__(self) -> Hint:
        self._wake.ensure_listening()
        if not (self._has_told or self._wake.possible or self._listener.closed):
            self._has_told = True
            return "absent"
        await anext(self._listener)
        self._has_told = False
        return None

    async def aclose(self) -> None:
        await self._listener.aclose()


def _detach(
    loop: asyncio.AbstractEventLoop, watching: asyncio.Task[None] | None, listening: socket.socket | None
) -> None:
    if watching is not None:
        watching.cancel()
    if listening is not None:
        with suppress(NotImplementedError):  # this loop can't watch a socket
            loop.remove_reader(listening)
        listening.close()


def notify_processes(path: str, topic: str, but: str = "") -> None:
    """Wake the listeners of *topic* of the file at *path*, through all sockets *but* one. It does not block.

    It never fails either: the change is committed already, and a hint may be lost.
    """
    if hasattr(socket, "AF_UNIX"):
        with suppress(OSError):  # no process ever listened; or there are no file descriptors left
            send_to_all(folder_of(path), topic, but)


def _reason_against(folder: str) -> str:
    """Return why no socket can be made in *folder*, as far as known without trying; empty if one may be."""
    if not hasattr(socket, "AF_UNIX"):
        return "this system has no Unix sockets"
    if not through_proc() and len(os.fsencode(folder)) > PATH_MAX - 24:
        return f"the path {folder} is too long for a socket; keep the file under a shorter one"
    if os.path.islink(folder):
        return f"{folder} is a symbolic link, which is not followed; remove it"
    place = folder if os.path.isdir(folder) else os.path.dirname(folder)
    if os.path.isdir(place) and not os.access(place, os.W_OK | os.X_OK):
        return f"{place} can't be written from here"
    return ""
