"""The address of a memory, and the register of those that are shared by name."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tenure._backends.memory.client import Memory
from tenure._url import Url
from tenure.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``memory:`` URL: it has no options."""


_shared: dict[str, Memory] = {}  # kept until the process ends, so that no token falls when the last client closes
_shared_lock = threading.Lock()


def memory_of(url: Url) -> Memory:
    """Return a new memory for ``memory:``, or the one of this process for ``memory:NAME``."""
    url.options(Options)
    if url.hosts or url.path.startswith("/"):
        name = url.hosts or url.path.strip("/")
        raise ConfigError(f"{str(url)!r} has slashes, which mean nothing here; write memory:{name}")
    if not url.path:
        return Memory()
    with _shared_lock:
        memory = _shared.get(url.path)
        if memory is None:
            memory = _shared[url.path] = Memory(url.path)
        return memory
