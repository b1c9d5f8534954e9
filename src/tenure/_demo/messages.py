"""The messages: a chunk of the work for a worker, its result for the leader, or its dead letter.

All data is in the body, and the chunk's number in it identifies repeated messages. So it works on every store, also
on one without headers and ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tenure import Backend, DeadMessage, Outgoing, Queue
from tenure._demo.computation import Count
from tenure._demo.job import Chunk, File

MAX_DELIVERIES = 5
"""The most deliveries of a chunk. The two kills cost at most two of them."""

LETTERS_MAX = 10_000
"""Dead letters that are read; one is expected."""

BODY_MAX = 45_000
"""Bytes; every store accepts as many."""


@dataclass(frozen=True, slots=True)
class Task:
    """A chunk to be counted, with its settings."""

    folder: str
    chunk: Chunk
    pace: float

    def outgoing(self, *, named: bool) -> Outgoing:
        """Return the message; if *named*, with an id, so that the store drops the same message of a second leader."""
        chunk = self.chunk
        files = [(file.path, file.parsed) for file in chunk.files]
        body = json.dumps({"folder": self.folder, "chunk": chunk.number, "files": files, "pace": self.pace})
        return Outgoing(body.encode(), id=f"chunk-{chunk.number}" if named else None)

    @classmethod
    def read(cls, body: bytes) -> Task:
        """Read what :meth:`outgoing` wrote."""
        fields = json.loads(body)
        files = tuple(File(path, parsed) for path, parsed in fields["files"])
        return cls(fields["folder"], Chunk(fields["chunk"], files), fields["pace"])


@dataclass(frozen=True, slots=True)
class Result:
    """The counts of a chunk: for each file in order, everything but its path."""

    chunk: int
    instance: int
    counts: tuple[tuple[int, int, int, int, str, str], ...]

    @classmethod
    def of(cls, chunk: int, instance: int, counts: Sequence[Count]) -> Result:
        """Return the result of a chunk."""
        return cls(chunk, instance, tuple(astuple(count)[1:] for count in counts))

    def outgoing(self) -> Outgoing:
        """Return the message."""
        return Outgoing(json.dumps([self.chunk, self.instance, self.counts]).encode())

    @classmethod
    def read(cls, body: bytes) -> Result:
        """Read what :meth:`outgoing` wrote."""
        chunk, instance, counts = json.loads(body)
        return cls(chunk, instance, tuple(tuple(count) for count in counts))


@dataclass(frozen=True, slots=True)
class DeadChunk:
    """A chunk that could not be counted: the reason of its dead letter, and its last error."""

    chunk: int
    reason: str
    why: str
    deliveries: int

    @classmethod
    def of(cls, letter: DeadMessage) -> DeadChunk:
        """Return the relevant fields of a dead letter."""
        error = letter.error
        why = f"{error.type.rpartition('.')[2]}: {error.message}" if error else letter.description
        return cls(Task.read(letter.body).chunk.number, letter.reason, why, letter.delivery_count)


@dataclass(frozen=True, slots=True)
class Queues:
    """The names and settings of the queues, the same for all instances."""

    work: str
    results: str
    lock: float
    named: bool
    """Whether the store drops a second message with the same id."""

    def work_of(self, backend: Backend) -> Queue:
        """Return the queue that all instances compete for."""
        return backend.queue(self.work, lock=self.lock, max_deliveries=MAX_DELIVERIES, body_max=BODY_MAX)

    def results_of(self, backend: Backend) -> Queue:
        """Return the queue of the results for the leader."""
        return backend.queue(self.results, lock=self.lock, body_max=BODY_MAX)
