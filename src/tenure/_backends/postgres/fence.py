"""A fence: lets a database refuse what a leader of old still tries to write, in the very transaction of the write."""

from __future__ import annotations

from typing import Any

from tenure.errors import ConfigError, TermLost

TOO_OLD = "TN001"
"""The SQLSTATE with which ``fence`` refuses a token; the same in every language and driver."""


async def fence(connection: Any, resource: str, token: int, *, schema: str = "tenure") -> None:
    """Let *token* pass if none newer was seen for *resource*; until the transaction ends, nobody comes between.

    A leader may be stopped between its last look at its term and its write, for longer than its lease. Whatever it
    checks in its own process is then out of date; only the database can tell, if every write brings its token::

        async with connection.transaction():
            await fence(connection, "report", term.token)  # raises TermLost if a newer leader was here
            await connection.execute("UPDATE report SET …")

    Other drivers, and other languages, call the function itself: ``SELECT tenure.fence('report', 7)``. It raises the
    SQLSTATE TN001.

    Args:
        connection: The caller's own, of asyncpg, with a transaction open.
        resource: What is guarded; any text that all writers agree on.
        token: The term's token.
        schema: The one that tenure's tables are in.

    Raises:
        TermLost: A newer term has been here. Roll back, and write nothing.
        ConfigError: No transaction is open, so that the write that follows would not be guarded.
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
        raise TermLost(f"{error}; nothing was written, so roll back and let the newer one work") from error
