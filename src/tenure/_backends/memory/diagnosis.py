"""What ``describe()`` and ``tenure doctor`` show of a memory."""

from __future__ import annotations

from tenure._backends.memory.client import Memory
from tenure._opened import Fact


def diagnose(memory: Memory) -> list[Fact]:
    """Return whether other backends of this process share *memory*, and how many names it holds."""
    shared = f"shared in this process as {memory.name!r}" if memory.name else "private"
    with memory.lock:
        names = len(memory.claims)
    return [
        Fact("memory", shared, "gone when the process ends; for tests and single processes", "memory-only"),
        Fact("names", str(names)),
    ]
