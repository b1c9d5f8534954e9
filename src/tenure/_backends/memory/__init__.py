"""Leases and queues in this process's memory: ``memory:`` keeps them private, ``memory:NAME`` shares them by name."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.memory.address import memory_of
from tenure._backends.memory.client import Memory
from tenure._backends.memory.diagnosis import diagnose
from tenure._backends.memory.leases import TRAITS, MemoryLeases
from tenure._backends.memory.queue import QUEUE_TRAITS, MemoryBroker
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url

__all__ = ["QUEUE_TRAITS", "TRAITS", "Memory", "MemoryBackend", "MemoryBroker", "MemoryLeases", "open"]


def open(url: Url, *, clock: Clock | None = None) -> MemoryBackend:
    """Open the memory that *url* names.

    Raises:
        ConfigError: The URL is not of the form ``memory:`` or ``memory:NAME``.
    """
    return MemoryBackend(memory_of(url), clock or SystemClock())


class MemoryBackend:
    """A memory in use."""

    def __init__(self, memory: Memory, clock: Clock) -> None:
        self._memory = memory
        self.leases: MemoryLeases = MemoryLeases(clock, memory)
        self.broker: MemoryBroker = MemoryBroker(clock, memory)

    async def describe(self) -> Sequence[Fact]:
        """Return whether it is shared, and how many names it holds."""
        return diagnose(self._memory)

    async def close(self) -> None:
        """Close this client. A private memory ends with its last client, a named one with the process."""
        self.leases.close()
        self.broker.close()
