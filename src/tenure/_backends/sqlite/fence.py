"""A fence: lets a database refuse the write of an earlier leader, in the same transaction."""

from __future__ import annotations

import sqlite3

from tenure._backends.sqlite.statements import statements
from tenure.errors import ConfigError, TermLost

_SQL = statements("fence.sql")
_TOKEN_MAX = 2**63 - 1
_LEGACY = -1  # sqlite3.LEGACY_TRANSACTION_CONTROL, which Python has from 3.12 on


class Fence:
    """Keep the newest token seen for each resource, and refuse older ones.

    A leader may be paused between its last check of its term and its write, for longer than its lease. Then no check in
    its own process helps; but the database can refuse the write, if every write passes its token::

        fence = Fence(connection)
        connection.execute("BEGIN IMMEDIATE")
        fence.check("report", term.token)  # raises TermLost if a newer leader has written
        connection.execute("UPDATE report SET …")
        connection.commit()

    The newest tokens are in the table ``tenure_fence`` of the same database, created when first needed. They are part
    of the transaction: a rollback undoes them too.

    Args:
        connection: The caller's own, in any of Python's transaction modes.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def check(self, resource: str, token: int) -> None:
        """Accept *token* if no newer one was seen for *resource*, up to the end of the transaction.

        Errors of the database are raised as they are, like those of the caller's own statements:
        ``sqlite3.OperationalError`` if it is locked.

        Args:
            resource: The name of the guarded resource; any text that all writers use.
            token: The term's token.

        Raises:
            TermLost: A newer term has written already. Roll back, and write nothing.
            ConfigError: No transaction is open, so the write that follows would not be guarded.
        """
        _require(resource, token)
        was_open = self._connection.in_transaction
        if not was_open and not self._opens_by_itself():
            raise ConfigError(
                f"no transaction is open, so the check of {resource!r} would not guard the write that follows it; "
                "execute BEGIN IMMEDIATE first, then check, write and commit"
            )
        # The insert comes first: it takes the write lock, so nothing can change after it.
        if self._accepts(resource, token):
            return
        newest = self._execute("newest", resource=resource).fetchone()[0]
        if not was_open:
            self._connection.rollback()  # Python began it for this insert: the caller doesn't know that it is open
        raise TermLost(
            f"token {token} is too old for {resource!r}: a leader with token {newest} has written; "
            "nothing was written: roll back, and stop acting as the leader"
        )

    def _opens_by_itself(self) -> bool:
        """Whether Python begins a transaction at the first statement that writes."""
        autocommit = getattr(self._connection, "autocommit", _LEGACY)
        if autocommit == _LEGACY:
            return self._connection.isolation_level is not None
        return not autocommit

    def _accepts(self, resource: str, token: int) -> bool:
        try:
            cursor = self._execute("check", resource=resource, token=token)
        except sqlite3.OperationalError as error:
            if "no such table: tenure_fence" not in str(error):
                raise
            self._execute("create")
            cursor = self._execute("check", resource=resource, token=token)
        return cursor.rowcount == 1

    def _execute(self, statement: str, **values: str | int) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the caller's may return rows of any type
        return cursor.execute(_SQL[statement], values)


def _require(resource: object, token: object) -> None:
    if not isinstance(resource, str) or not resource:
        raise ConfigError(f"resource must be a text that names the guarded resource, not {resource!r}")
    if isinstance(token, bool) or not isinstance(token, int) or not 1 <= token <= _TOKEN_MAX:
        raise ConfigError(f"token must be a term's token, a whole number from 1 on, not {token!r}")
