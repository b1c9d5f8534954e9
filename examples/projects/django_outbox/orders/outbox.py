"""Send, complete and fence inside the transactions of Django: each is a function in the same database."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, close_old_connections, connection, transaction
from psycopg.types.json import Jsonb

import tenure.sync

T = TypeVar("T")


def send(queue: tenure.sync.TypedQueue[T], body: T, *, message_id: str) -> None:
    """Send a message with the commit of the present transaction; a rollback sends nothing."""
    message = queue.outgoing(body, id=message_id)  # the same body and headers as by queue.send
    _execute(
        "SELECT tenure.send(%s, %s, id => %s, headers => %s)",
        [queue.name, message.body, message.id, Jsonb(dict(message.headers))],
    )


@contextmanager
def completing(message: tenure.sync.Message) -> Iterator[None]:
    """Commit the block and the end of *message* in one transaction: both happen, or neither.

    Raises:
        LockLost: Another consumer may have the message; the block is rolled back.
    """
    message.note_settling()
    is_committed = False
    try:
        with transaction.atomic():
            yield
            _execute("SELECT tenure.complete(%s, %s)", [message.queue, message.lock_token])
        is_committed = True
    finally:
        message.note_settled(is_committed)  # so that the consumer does not complete it once more


def fence(resource: str, token: int) -> None:
    """Accept a leader's write in the present transaction, and make other leaders wait until it ends.

    Raises:
        TermLost: A newer leader has written.
    """
    _execute("SELECT tenure.fence(%s, %s)", [resource, token])


def _execute(statement: str, values: list[Any]) -> None:
    with connection.cursor() as cursor:
        try:
            cursor.execute(statement, values)
        except DatabaseError as error:
            match getattr(error.__cause__, "sqlstate", None):
                case "TN001":
                    raise tenure.TermLost(str(error)) from error
                case "TN002":
                    raise tenure.LockLost(str(error)) from error
            raise


@contextmanager
def fresh_connections() -> Iterator[None]:
    """Replace this thread's connections that have ended, as Django does around a request."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()
