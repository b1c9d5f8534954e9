"""Queue operations inside the caller's own transaction: an effect and its message's completion, both or neither.

A queue delivers at least once. But if the handler's effect is written to the same file, it can be written, and the
message completed, in one transaction: then it takes effect exactly once::

    from tenure.backends.sqlite import transact

    def handler(message):  # in a thread, where it may block
        connection = sqlite3.connect("work.db")
        with closing(connection), transact(connection) as queues:
            connection.execute("UPDATE account SET balance = balance + ? …")
            queues.send("receipts", tenure.Outgoing(b"…"))
            queues.complete(message)  # raises LockLost if the lock is over: then everything is undone
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tenure._backends.sqlite.client import random_pause, translate
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.operations import QUEUES, Operations
from tenure._backends.sqlite.queue import QUEUE_TRAITS, topic_of
from tenure._backends.sqlite.wake import notify_processes
from tenure._queue.checks import check_name
from tenure._queue.identity import spellings_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing, checked
from tenure._queue.verdicts import COMPLETE, Complete, Lapsed, Settlement
from tenure._runtime.clock import SystemClock
from tenure.errors import ConfigError, LockLost


class Held(Protocol):
    """A message under a lock: ``tenure.Message``, or ``tenure.sync.Message``."""

    @property
    def delivery(self) -> Delivery:
        """The broker's delivery."""
        ...

    def note_settling(self) -> None:
        """Note that the message is being settled."""
        ...

    def note_settled(self, stands: bool = True) -> None:
        """Note that the message was settled, or, without *stands*, that it was not."""
        ...


@contextmanager
def transact(connection: sqlite3.Connection, *, busy: float = 5.0) -> Iterator[Within]:
    """Run the block in one transaction on *connection*, with the operations of queues; commit at its end.

    If the block raises, everything in it is undone. After the commit, waiting consumers are woken.

    Args:
        connection: The caller's own, to the same file, with no transaction open. (With ``autocommit=False`` there
            always is one; use :class:`Within`.)
        busy: Seconds to keep trying for the write lock.

    Raises:
        ConfigError: A transaction is open already, or the file has no queues.
        Unavailable: The file stayed locked.
    """
    if connection.in_transaction:
        raise ConfigError("a transaction is open on this connection; end it first, or use Within(connection) inside it")
    _begin(connection, busy)
    try:
        within = Within(connection)
        within._commits_at_end = True
        yield within
        within._commit()
    except BaseException:
        _roll_back(connection)
        raise


class Within:
    """The operations of queues inside a transaction that the caller has begun, and will commit.

    ::

        connection.execute("BEGIN IMMEDIATE")
        queues = Within(connection)
        connection.execute("UPDATE account SET balance = balance + ? …")
        queues.complete(message)
        queues.commit()

    ``commit`` also wakes consumers that wait for the sent messages, and notifies the message pump that the completed
    ones are settled. If other code commits, call ``committed`` after that: a renewal in between may find the message
    gone, and report its lock as lost. Without either, consumers find the messages at their next poll (a pump polls
    every five seconds), and the pump reports the lock as lost. Errors of the database are raised unchanged, like those
    of the caller's own statements.

    Args:
        connection: The caller's own, to the file with the queues.

    Raises:
        ConfigError: The file has no queues, or another tenure's; or no transaction is open.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._path = _file_of(connection)
        self._clock = _clock_of(connection, self._path)
        self._changed: dict[str, None] = {}
        self._settled: list[Held] = []
        self._commits_at_end = False  # by transact()

    def complete(self, *messages: Held | Delivery, remember: float = 0.0) -> None:
        """Remove *messages* for good, as part of the transaction.

        Args:
            messages: As the handler got them, or the broker's deliveries.
            remember: Seconds to keep their ids in the queue's inbox; see :meth:`handled`.

        Raises:
            LockLost: The lock of one of them is over. Roll back: another consumer does its work again.
        """
        deliveries = [one if isinstance(one, Delivery) else one.delivery for one in messages]
        verdict = Complete(remember=remember) if remember else COMPLETE
        operations = self._open()
        answers = operations.settle([Settlement(delivery, verdict) for delivery in deliveries])
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Lapsed):
                raise LockLost(
                    f"the lock on message {delivery.id!r} of {delivery.queue!r} (delivery {delivery.delivery_count}) "
                    "is over; roll back, because another consumer may have it"
                )
        self._close(operations)
        self._settled.extend(one for one in messages if not isinstance(one, Delivery))

    def send(self, queue: str, *messages: Outgoing) -> list[str]:
        """Send *messages* to *queue*, as part of the transaction; return their ids."""
        check_name(queue)
        operations = self._open()
        ready = checked(messages, operations.settings(queue).body_max, QUEUE_TRAITS.body_max)
        ids = operations.send(queue, ready)
        self._close(operations)
        return ids

    def handled(self, queue: str, id: str) -> bool:  # noqa: A002  # as Queue.send calls it
        """Return whether the inbox of *queue* remembers that a message with this *id* was completed."""
        return any(self._open().are_remembered(queue, spellings_of(id)))

    def commit(self) -> None:
        """Commit the transaction, wake consumers, and notify the message pump.

        Raises:
            ConfigError: This is the block of ``transact``, which commits at its end.
        """
        if self._commits_at_end:
            raise ConfigError(
                "transact() commits at the end of its block, so don't call commit(); or execute BEGIN IMMEDIATE "
                "yourself, and use Within(connection)"
            )
        self._commit()

    def _commit(self) -> None:
        for message in self._settled:
            message.note_settling()
        try:
            self._connection.execute("COMMIT")  # commit() does nothing in the newer of Python's modes
        except BaseException:
            settled, self._settled = self._settled, []
            for message in settled:
                message.note_settled(stands=False)
            raise
        self.committed()

    def committed(self) -> None:
        """Wake consumers and notify the message pump, after a commit by other code."""
        changed, self._changed = self._changed, {}
        for name in changed:
            notify_processes(os.path.realpath(self._path), topic_of(name))
        settled, self._settled = self._settled, []
        for message in settled:
            message.note_settled()

    def _open(self) -> Operations:
        if not self._connection.in_transaction:
            raise ConfigError(
                "no transaction is open, so this would be committed apart from the writes that follow; "
                "execute BEGIN IMMEDIATE first, or use transact(connection)"
            )
        return Operations(self._connection, self._clock)

    def _close(self, operations: Operations) -> None:
        operations.close()
        self._changed.update(operations.changed)


_clocks: dict[str, FileClock] = {}  # of the files that were checked: a check each time would cost more than the rest


def _clock_of(connection: sqlite3.Connection, path: str) -> FileClock:
    """Return the clock of the file; refuse a file without the tables of queues, or with those of another version."""
    clock = _clocks.get(path)
    if clock is not None:
        return clock
    try:
        row = _first_row(connection, "SELECT version FROM tenure_schema WHERE part = ?", QUEUES.name)
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise
        row = None
    if row is None:
        raise ConfigError(f"{path} has no queues; connect to it with tenure first, and send to one")
    if row[0] != QUEUES.version:
        raise ConfigError(
            f"the queues in {path} have version {row[0]}, and this tenure knows version {QUEUES.version}; "
            "use the tenure that wrote them"
        )
    return _clocks.setdefault(path, FileClock(SystemClock()))


def _begin(connection: sqlite3.Connection, busy: float) -> None:
    """Try to get the write lock, with short random pauses, as tenure's own writers do.

    SQLite's busy handler, which the connection may have, sleeps up to a tenth of a second: it would rarely get the lock
    while writers retry sooner.
    """
    give_up = time.monotonic() + busy
    found = _first_row(connection, "PRAGMA busy_timeout")
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if time.monotonic() >= give_up:
                    raise translate(error, _file_of(connection)) from error
                time.sleep(random_pause(0.001))
    finally:
        connection.execute(f"PRAGMA busy_timeout = {found[0] if found else 0}")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:  # some errors have rolled it back already
        connection.execute("ROLLBACK")


def _file_of(connection: sqlite3.Connection) -> str:
    row = _first_row(connection, "SELECT file FROM pragma_database_list WHERE name = 'main'")
    if row is None or not row[0]:
        raise ConfigError("this connection has no file, and queues are in a file; connect to that file")
    return str(row[0])


def _first_row(connection: sqlite3.Connection, statement: str, *values: str) -> Sequence[object] | None:
    cursor = connection.cursor()
    cursor.row_factory = None  # the caller's may return rows of any type
    row: Sequence[object] | None = cursor.execute(statement, values).fetchone()
    return row
