"""The memory itself, and its clients."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tenure._backends.memory.messages import StoredQueue
from tenure._lease import NO_METADATA, Metadata
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class Claim:
    """The claim on a name. It expires and is never deleted, so that its token never falls."""

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
        self.sequence = 0  # at least that of any queue that was deleted
        self.tokens = 0  # the newest token of deliveries and sessions
        self.epoch: float | None = None  # the wall clock's time when the clock of its first user began


class Client:
    """One client of a memory, until it is closed; other clients may go on using it."""

    def __init__(self, memory: Memory | None) -> None:
        self._opened = memory or Memory()
        self._closed = False

    @property
    def _memory(self) -> Memory:
        if self._closed:
            raise ConfigError("this backend was closed; connect again")
        return self._opened

    def close(self) -> None:
        """Stop using the memory."""
        self._closed = True
