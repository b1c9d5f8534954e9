"""A fence: lets a database refuse the writes of a former leader, in the transaction of the write."""

from __future__ import annotations

from typing import Any

from tenure.errors import ConfigError, TermLost

TOO_OLD = "TN001"
"""The SQLSTATE with which ``fence`` refuses a token; the same in every language and driver."""


async def fence(connection: Any, resource: str, token: int, *, schema: str = "tenure") -> None:
    """Accept *token* if no newer one was seen for *resource*, which stays locked until the transaction ends.

    A leader may be paused between its last check of its term and its write, for longer than its lease. Then no check in
    its own process helps; but the database can refuse the write, if every write passes its token::

        async with connection.transaction():
            await fence(connection, "report", term.token)  # raises TermLost if a newer leader has written
            await connection.execute("UPDATE report SET …")

    Other drivers, and other languages, call the function itself: ``SELECT tenure.fence('report', 7)``. It raises the
    SQLSTATE TN001.

    Args:
        connection: The caller's own, of asyncpg, with a transaction open.
        resource: The name of the guarded resource; any text that all writers use.
        token: The term's token.
        schema: The one that tenure's tables are in.

    Raises:
        TermLost: A newer token was seen. Roll back, and write nothing.
        ConfigError: No transaction is open, so the write that follows would not be guarded.
    """
    if not connection.is_in_transaction():
        raise ConfigError(
            f"no transaction is open, so the check of {resource!r} would not guard the write that follows it; "
            "write: async with connection.transaction()"
        )
    try:
        await connection.execute(f"SELECT {schema}.fence($1, $2)", resource, token)
    except Exception as error:
        if getattr(error, "sqlstate", None) != TOO_OLD:
            raise
        raise TermLost(f"{error}; nothing was written: roll back, and stop acting as the leader") from error
