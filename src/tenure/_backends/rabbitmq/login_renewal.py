"""The login of an open connection, which is replaced by ``connection.update-secret`` before it ends.

With OAuth 2, RabbitMQ refuses the requests on a connection whose token has ended, and doesn't end it. House rules:

- A token is replaced before its end if that is known; else when the server says that it has ended.
- Without OAuth 2, RabbitMQ accepts each new secret, and goes on with what the connection was made with.
- One that it refuses ends the connection; the next connection is made as always, with the newest login.
- If there is no newer login, or no answer, the connection goes on, and it is tried again, also after the end.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

from tenure._backends.rabbitmq.address import require_fitting
from tenure._backends.rabbitmq.connection import AmqpConnection
from tenure._backends.rabbitmq.errors import AmqpError
from tenure._logins import Login, Logins
from tenure._runtime.backoff import Backoff
from tenure.errors import TenureError

PAUSE, PAUSE_MAX = 1.0, 5.0
"""Seconds between two attempts, at least; and at most, while there is no newer login."""


async def renew_login(connection: AmqpConnection, logins: Logins, login: Login) -> None:
    """Give the server the newest of *logins* in place of *login*, and so on, as long as the connection is open."""
    backoff = Backoff(PAUSE, PAUSE_MAX)
    while connection.lost is None:
        await asyncio.sleep(backoff.next())
        if await _is_over(connection, login.renewed_at):
            logins.refused(login)
        with suppress(TenureError, AmqpError):
            newer = await logins.login()
            if not newer.is_same(login):
                require_fitting(newer, logins.source)
                await connection.update_secret(newer)
                backoff.reset()
            login = newer


async def _is_over(connection: AmqpConnection, until: float) -> bool:
    """Wait *until* then, or for the server to say that the login has ended; return whether it has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None if until == math.inf else until - time.monotonic()):
            await connection.login_over.wait()
    is_over = connection.login_over.is_set()
    connection.login_over.clear()
    return is_over
