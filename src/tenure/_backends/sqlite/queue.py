"""Queues in an SQLite file: the broker, which passes each operation to the thread that writes or the one that reads.

House rules:

- Operations that write go to the writer, where they share a commit with others. Operations that read go to another
  connection, which can't write, and waits for no writer.
- A reader must see what is due (an ended delay, expiry or lock), and only a writer can apply that. So if something is
  due, the writer applies it, and the reader reads again.
- A claim whose caller was cancelled meanwhile is given back at once, uncounted.

Limits: the file can't be shared over a network file system. Two can't write at once, so a process that is stopped (not
killed) inside a transaction keeps all others waiting, until they get ``Unavailable``. Partitions of a queue are
sessions, see :func:`tenure._queue.identity.partition_of`; they keep the order of a key. They don't make a file faster,
because it has one writer at a time: for more throughput, shard over several files, and connect to each.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.operations import Operations
from tenure._backends.sqlite.queue_reader import QueueReader
from tenure._backends.sqlite.wake import Wake
from tenure._backends.sqlite.worker import Worker
from tenure._backends.sqlite.writer import Writer
from tenure._election.store import Hint
from tenure._queue.broker import (
    Advanced,
    Claim,
    LiveSelection,
    NoSession,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Schedules,
    Selection,
    undeclared,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.generations import Generations
from tenure._queue.message import (
    NO_DEFERRED_DEAD_LETTERS,
    DeadMessage,
    Delivery,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import GIVE_BACK, Defer, Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure.errors import ConfigError

T = TypeVar("T")

QUEUE_TRAITS = QueueTraits(lock_min=0.1, lock_max=86_400.0, body_max=2**28, names_dead=True, surveys=True)

TAKE_MAX = 500
"""The most dead letters that one transaction redrives, or messages that it purges."""


class SqliteBroker:
    """A ``Broker`` in an SQLite file.

    Args:
        writer: The thread that writes.
        reader: The thread that only reads.
        wake: Receives hints from the other processes.
        clock: The clock of the file.
    """

    def __init__(self, writer: Writer, reader: Worker, wake: Wake, clock: FileClock) -> None:
        self._writer = writer
        self._reader = reader
        self._wake = wake
        self._clock = clock
        self.generations = Generations()

    @property
    def traits(self) -> QueueTraits:
        """What the broker can do here: without hints, if no socket can be made."""
        return QUEUE_TRAITS if self._wake.possible else replace(QUEUE_TRAITS, hints=False)

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Apply *changes* to the settings of *queue*; return the settings after that."""
        if only_undeclared and changes:  # usually there is nothing to write
            declared, settings, generation = await self._read(
                lambda reader: (reader.declared(queue), reader.settings(queue), reader.generation_of(queue))
            )
            if not undeclared(changes, declared):
                self.generations.note(queue, generation)
                return settings
        return await self._write(
            queue, lambda operations: operations.declare(queue, changes, only_undeclared=only_undeclared)
        )

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of *queue*."""
        return await self._read(lambda reader: reader.settings(queue))

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        return await self._read(QueueReader.names)

    def hints(self, queue: str) -> AsyncIterator[Hint]:
        """Yield when messages of *queue* may have become claimable, by this process or another."""
        return self._wake.listen(topic_of(queue))

    # --- messages ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        return await self._write(queue, lambda operations: operations.send(queue, messages))

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        claim = await self._write(
            queue, lambda operations: operations.receive(queue, limit, lock), _give_back, lasting=False
        )
        died = self._writer.died(queue)
        return claim._replace(died=died) if died else claim

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        return await self._write(
            queue, lambda operations: operations.receive_deferred(queue, sequences, lock), _give_back, lasting=False
        )

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        return await self._writer.submit(lambda operations: operations.renew(held, lock), lasting=False, urgent=True)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Apply many verdicts."""
        for delivery, verdict in settlements:
            if type(verdict) is Defer and delivery.queue.endswith(DEAD_SUFFIX):
                raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        return await self._writer.submit(lambda operations: operations.settle(settlements))

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        held = await self._write(
            queue, lambda operations: operations.accept(queue, session, lock), _release, lasting=False
        )
        return held._replace(died=self._writer.died(queue)) if isinstance(held, NoSession) else held

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        claim = await self._writer.submit(
            lambda operations: operations.receive_session(held, limit), _give_back, lasting=False
        )
        died = self._writer.died(held.queue)
        return claim._replace(died=died) if died and isinstance(claim, Claim) else claim

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        return await self._writer.submit(lambda operations: operations.release(held))

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        return await self._read(lambda reader: reader.read_state(held))

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        return await self._writer.submit(lambda operations: operations.write_state(held, state))

    # --- schedules ---

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        return await self._read(lambda reader: reader.schedules(queue))

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        """Keep *record* in place of *expected*, and send *messages*."""
        return await self._write(
            queue, lambda operations: operations.advance(queue, schedule, expected, record, messages, not_before)
        )

    # --- inspection, dead letters ---

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages, from stored counts."""
        return await self._read(lambda reader: reader.holding(queues))

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*, from stored counts: it takes the same time for any number."""
        return await self._read_applied(queue, lambda reader: reader.count(queue))

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        return await self._read_applied(queue, lambda reader: reader.peek(queue, which, limit))

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, some hundreds in one step: those that a reader found."""
        found = await self._read_applied(queue, lambda reader: reader.unlocked(queue, which))
        if dry_run:
            return len(found)
        parts = [found[first : first + TAKE_MAX] for first in range(0, len(found), TAKE_MAX)]
        return sum([await self._writer.submit(_purger(queue, part, which)) for part in parts])

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        return await self._read_applied(queue, lambda reader: reader.peek_deferred(queue, limit, after))

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        return await self._read_applied(queue, lambda reader: reader.peek_dead(queue, which, limit))

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, some hundreds in one step."""
        if dry_run:
            return await self._read_applied(queue, lambda reader: reader.count_dead(queue, which, limit))
        return await self._take_dead(queue, which, limit, to=to or queue)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good, some hundreds in one step."""
        return await self._take_dead(queue, which, limit, to=None)

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Return, for each of *ids*, whether the inbox remembers it."""
        return await self._read(lambda reader: reader.are_remembered(queue, ids))

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty; by *force*, its messages go first, some hundreds in one step."""
        while True:
            found = await self.stats(queue)
            if count_of(found) and not force:
                return NotEmpty(found)
            while force and await self._writer.submit(lambda operations: operations.empty(queue)):
                pass
            if await self._writer.submit(lambda operations: operations.delete(queue, force=force)):
                return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*."""
        await self._writer.submit(lambda operations: operations.delete_when_idle(queue, seconds))

    async def idle(self) -> Sequence[str]:
        """List the queues whose idle time is over."""
        return await self._read(QueueReader.idle)

    async def _take_dead(self, queue: str, which: Selection, limit: int | None, *, to: str | None) -> int:
        await self._read_applied(queue, lambda _: None)
        taken = 0
        while limit is None or taken < limit:
            step = TAKE_MAX if limit is None else min(TAKE_MAX, limit - taken)
            found = await self._writer.submit(_dead_taker(queue, which, step, to))
            taken += len(found)
            if len(found) < step:
                break
            which = replace(which, after=found[-1])  # without letters that die again meanwhile
        return taken

    async def _write(
        self,
        queue: str,
        work: Callable[[Operations], T],
        undo: Callable[[Operations, T], object] | None = None,
        *,
        lasting: bool = True,
    ) -> T:
        """Return the result of *work* in the writer's thread, and note which generation of *queue* it was about."""

        def undo_first(operations: Operations, answers: tuple[T, int | None]) -> None:
            if undo is not None:
                undo(operations, answers[0])

        answer, generation = await self._writer.submit(
            lambda operations: (work(operations), operations.generation_of(queue)),
            None if undo is None else undo_first,
            lasting=lasting,
        )
        self.generations.note(queue.removesuffix(DEAD_SUFFIX), generation)
        return answer

    # --- readers ---

    async def _read(self, work: Callable[[QueueReader], T]) -> T:
        def read(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN")  # one snapshot for all statements
            try:
                return work(QueueReader(connection, self._clock))
            finally:
                connection.execute("ROLLBACK")

        return await self._reader.run(lambda database: database.read(read))

    async def _read_applied(self, queue: str, work: Callable[[QueueReader], T]) -> T:
        """Return the result of *work* once everything that is due was applied."""
        while True:
            answer = await self._read(lambda reader: None if reader.is_due(queue) else (work(reader),))
            if answer is not None:
                return answer[0]
            await self._writer.submit(lambda operations: operations.apply_all_due(queue), lasting=False)


def topic_of(queue: str) -> str:
    """Return the topic that wakes waiting consumers of *queue*."""
    return f"queue:{queue}"


def _dead_taker(queue: str, which: Selection, limit: int, to: str | None) -> Callable[[Operations], list[int]]:
    return lambda operations: operations.take_dead(queue, which, limit, to=to)


def _purger(queue: str, sequences: Sequence[int], which: LiveSelection) -> Callable[[Operations], int]:
    return lambda operations: operations.purge_live(queue, sequences, which)


def _give_back(operations: Operations, claim: Claim | Lapsed) -> None:
    if isinstance(claim, Claim) and claim.deliveries:
        operations.settle([Settlement(delivery, GIVE_BACK) for delivery in claim.deliveries])


def _release(operations: Operations, held: SessionLock | NoSession) -> None:
    if isinstance(held, SessionLock):
        operations.release(held)
