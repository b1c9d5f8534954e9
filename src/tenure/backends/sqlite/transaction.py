"""Queue verbs inside a transaction of the caller's own: an effect and the end of its message, together or not at all.

At least once is all that a queue can promise, unless the handler's effect is written to the same file. Then it can be
written, and the message completed, in one transaction: whatever happens, the effect is there once::

    from tenure.backends.sqlite import transact

    def handler(message):  # in a thread, where it may block
        connection = sqlite3.connect("work.db")
        with closing(connection), transact(connection) as queues:
            connection.execute("UPDATE account SET balance = balance + ? …")
            queues.send("receipts", tenure.Outgoing(b"…"))
            queues.complete(message)  # raises LockLost if somebody else may have it: all of it is undone
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tenure.backends.sqlite.client import translate
from tenure.backends.sqlite.ledger import QUEUES, FileClock, Ledger
from tenure.backends.sqlite.queue import topic_of
from tenure.backends.sqlite.wake import tell
from tenure.clock import SystemClock
from tenure.errors import ConfigError, LockLost
from tenure.queue.message import COMPLETE, Complete, Delivery, Lapsed, Outgoing, Settlement, check_name, checked


class Held(Protocol):
    """A message under a lock: ``tenure.Message``, or its twin for threads."""

    @property
    def delivery(self) -> Delivery:
        """What the broker handed out."""
        ...

    def note_settled(self) -> None:
        """Take note that it was settled."""
        ...


@contextmanager
def transact(connection: sqlite3.Connection, *, busy: float = 5.0) -> Iterator[Within]:
    """Run the block in one transaction on *connection*, with the verbs of queues at hand; commit at its end.

    If the block raises, everything in it is undone. After the commit, waiting consumers are woken.

    Args:
        connection: The caller's own, to the same file, with no transaction open. (With ``autocommit=False`` there
            always is one; use :class:`Within`.)
        busy: For how many seconds to go on trying for the write lock.

    Raises:
        ConfigError: A transaction is open already, or the file has no queues.
        Unavailable: The file stayed locked.
    """
    if connection.in_transaction:
        raise ConfigError("a transaction is open on this connection; end it first, or use Within(connection) inside it")
    _begin(connection, busy)
    try:
        within = Within(connection)
        yield within
        connection.execute("COMMIT")  # commit() does nothing in the newer of Python's modes
    except BaseException:
        _roll_back(connection)
        raise
    within.committed()


class Within:
    """The verbs of queues inside a transaction that the caller has begun, and will commit.

    ::

        connection.execute("BEGIN IMMEDIATE")
        queues = Within(connection)
        connection.execute("UPDATE account SET balance = balance + ? …")
        queues.complete(message)
        connection.commit()
        queues.committed()

    ``committed`` wakes the consumers that wait for what was sent, and tells the message pump that it has no verdict to
    pass any more. Without it, consumers find the messages when they look again by themselves (a pump does so every
    five seconds), and the pump hears that the lock is lost. Errors of the database are the caller's, as those of its
    own statements are.

    Args:
        connection: The caller's own, to the file with the queues.

    Raises:
        ConfigError: The file has no queues, or another tenure's; or no transaction is open.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._clock = FileClock(SystemClock())
        self._path = _file_of(connection)
        self._rung: dict[str, None] = {}
        self._settled: list[Held] = []
        self._require()

    def complete(self, message: Held | Delivery, *, remember: float = 0.0) -> None:
        """Remove *message* for good, as part of the transaction.

        Args:
            message: As the handler got it, or the broker's delivery.
            remember: Note its id in the queue's inbox for so many seconds; see :meth:`handled`.

        Raises:
            LockLost: It is not ours any more. Roll back: somebody else does the work again.
        """
        delivery = message if isinstance(message, Delivery) else message.delivery
        ledger = self._open()
        [answer] = ledger.settle([Settlement(delivery, Complete(remember=remember) if remember else COMPLETE)])
        if isinstance(answer, Lapsed):
            raise LockLost(
                f"the lock on message {delivery.id!r} of {delivery.queue!r} (delivery {delivery.delivery_count}) is "
                "over; roll back, for somebody else may have it"
            )
        self._close(ledger)
        if not isinstance(message, Delivery):
            self._settled.append(message)

    def send(self, queue: str, *messages: Outgoing) -> list[str]:
        """Send *messages* to *queue*, as part of the transaction; return their ids."""
        check_name(queue)
        ledger = self._open()
        ready = checked(messages, ledger.settings(queue).body_max)
        ids = ledger.send(queue, ready)
        self._close(ledger)
        return ids

    def handled(self, queue: str, id: str) -> bool:  # noqa: A002  # as Queue.send calls it
        """Tell whether the inbox of *queue* remembers that a message with this *id* was completed."""
        return self._open().are_remembered(queue, [id])[0]

    def committed(self) -> None:
        """Tell everybody, after the commit."""
        rung, self._rung = self._rung, {}
        for name in rung:
            tell(self._path, topic_of(name))
        settled, self._settled = self._settled, []
        for message in settled:
            message.note_settled()

    def _open(self) -> Ledger:
        if not self._connection.in_transaction:
            raise ConfigError(
                "no transaction is open, so this would not go together with the writes that follow; "
                "execute BEGIN IMMEDIATE first, or use transact(connection)"
            )
        return Ledger(self._connection, self._clock)

    def _close(self, ledger: Ledger) -> None:
        ledger.close()
        self._rung.update(ledger.rung)

    def _require(self) -> None:
        """Refuse a file without our tables, or with those of another version."""
        try:
            row = _ask(self._connection, "SELECT version FROM tenure_schema WHERE part = ?", QUEUES.name)
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
        if row is None:
            raise ConfigError(f"{self._path} has no queues; connect with sqlite:///{self._path}, and send to one first")
        if row[0] != QUEUES.version:
            raise ConfigError(
                f"the queues in {self._path} have version {row[0]}, and this tenure knows version {QUEUES.version}; "
                "use the tenure that wrote them"
            )


def _begin(connection: sqlite3.Connection, busy: float) -> None:
    give_up = time.monotonic() + busy
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if time.monotonic() >= give_up:
                raise translate(error, _file_of(connection)) from error
            # Short random pauses, as tenure's own writers do: with them each gets its share.
            time.sleep(random.uniform(0.0001, 0.001))


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:  # some errors have rolled it back already
        connection.execute("ROLLBACK")


def _file_of(connection: sqlite3.Connection) -> str:
    row = _ask(connection, "SELECT file FROM pragma_database_list WHERE name = 'main'")
    if row is None or not row[0]:
        raise ConfigError("this connection has no file, and queues are in one; connect to the file that holds them")
    return os.path.realpath(str(row[0]))


def _ask(connection: sqlite3.Connection, statement: str, *values: str) -> Sequence[object] | None:
    cursor = connection.cursor()
    cursor.row_factory = None  # the caller's may turn rows into anything
    row: Sequence[object] | None = cursor.execute(statement, values).fetchone()
    return row
