"""The memory itself: what is kept, and the register of those that are shared by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenure._lease import NO_METADATA, Metadata
from tenure._runtime.notifier import Notifier
from tenure._url import Url
from tenure.errors import ConfigError

if TYPE_CHECKING:
    from tenure._backends.memory.queue import StoredQueue

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class Claim:
    """A name's row. It expires and is never deleted, so that its token never falls."""

    token: int = 0
    holder: str | None = None  # None once released
    expires_at: float = 0.0
    metadata: Metadata = field(default_factory=lambda: NO_METADATA)
    resign_asked: bool = False


class Memory:
    """Everything one ``memory:`` keeps. Clients of several threads may share it: hold ``lock`` while touching it."""

    def __init__(self, name: str = "") -> None:
        self.name: str = name
        self.lock: threading.Lock = threading.Lock()
        self.notifier: Notifier = Notifier()
        self.claims: dict[str, Claim] = {}
        self.queues: dict[str, StoredQueue] = {}
        self.sequence = 0  # no less than any of a queue that was deleted
        self.tokens = 0  # of deliveries and sessions; the newest
        self.epoch: float | None = None  # the wall clock's time when the clock of its first user began


class Client:
    """One user's way to a memory, until it is closed; others may go on using it."""

    def __init__(self, memory: Memory | None) -> None:
        self._kept = memory or Memory()
        self._closed = False

    @property
    def _memory(self) -> Memory:
        if self._closed:
            raise ConfigError("this backend was closed; connect again")
        return self._kept

    def close(self) -> None:
        """Touch the memory no more."""
        self._closed = True


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``memory:`` URL: there is none."""


_shared: dict[str, Memory] = {}  # until the process ends: no token may fall because the last user went
_shared_lock = threading.Lock()


def memory_of(url: Url) -> Memory:
    """Return a new memory for ``memory:``, and for ``memory:NAME`` the one that this process has under the name."""
    url.options(Options)
    if url.netloc or url.path.startswith("/"):
        name = url.netloc or url.path.strip("/")
        raise ConfigError(f"{str(url)!r} has slashes that mean nothing in memory; write memory:{name}")
    if not url.path:
        return Memory()
    with _shared_lock:
        memory = _shared.get(url.path)
        if memory is None:
            memory = _shared[url.path] = Memory(url.path)
        return memory
