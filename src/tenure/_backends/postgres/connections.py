"""The connections of one event loop: opened for waiting requests, and checked after a request was given up."""

from __future__ import annotations

import asyncio
import math
import re
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.exceptions import InterfaceError, InternalClientError

from tenure._backends.postgres.statements import milliseconds
from tenure._runtime.backoff import Backoff
from tenure._runtime.closing import close_together
from tenure.errors import Unavailable

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

DRIVER_ERRORS = (OSError, EOFError, asyncpg.PostgresError, InterfaceError, InternalClientError)
"""The errors that the driver raises for a failed request."""

OPEN_PAUSE_FIRST, OPEN_PAUSE_MAX = 0.02, 0.5
"""Seconds between a failed attempt to connect and the next one, at first and at most."""

CHECK_WITHIN = 3.0
"""Seconds within which a connection whose request was given up must answer again."""

_CLOSED_AFTER = {"26000", "42P05"}  # a connection whose statements a pooler mixes up

_READ_ONLY = "25006"
_ELSEWHERE = re.compile(r"\bread-only (transaction|mode)\b|\b(in|during) recovery\b|\brecovery is in progress\b")
"""What only a server says that is no primary; a pooler or a proxy may give it another code."""

_NO_RIGHT = "42501"
REFUSED_FOR = 5.0
"""Seconds after which a connection that is refused a right is closed: that of a role that was removed gets none again,
also if a role of this name is made anew. Not at once, as a role that has never had the right would open one connection
for each request."""


def is_elsewhere(error: BaseException) -> bool:
    """Return whether *error* is an answer that can only come of the wrong server: one that can only be read."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    return error.sqlstate == _READ_ONLY or _ELSEWHERE.search(str(error)) is not None


@asynccontextmanager
async def transaction(connection: Connection, within: float) -> AsyncIterator[None]:
    """Run the block in one transaction, in which each statement waits for locks no longer than *within*.

    The driver's own transaction, when cancelled, waits until the server has rolled back; this one leaves that to the
    check of the connection.
    """
    await connection.execute(f"BEGIN; SET LOCAL lock_timeout = {milliseconds(within)}")
    try:
        yield
    except Exception:
        with suppress(*DRIVER_ERRORS):
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")


class NoConnectionInTime(TimeoutError):
    """No connection was there in time, so the request was not sent."""


class LoopConnections:
    """The connections of one loop.

    A request neither opens a connection nor closes one. Requests that find none wait in a queue, while one attempt to
    connect is made for all of them, and more once it has succeeded; it goes on when they have given up. A connection
    whose request was given up is checked: the driver requests its cancellation, and if the server answers, the
    connection is used again. So a slow server, or a slow network, gets no extra connections.
    """

    def __init__(
        self,
        connect: Callable[[], Coroutine[Any, Any, Connection]],
        size: int,
        is_over: Callable[[Connection], bool] = lambda connection: False,
    ) -> None:
        self._connect = connect
        self._is_over = is_over  # says that there is a login that lasts longer
        self._size = size
        self._is_closed = False
        self.schema_check: asyncio.Task[None] | None = None
        """Checks whether the schema fits, for all requests that wait."""
        # The oldest connection is used first: few stay busy, and few have to plan the frequent statements.
        self._idle: list[Connection] = []
        self._opened_at = WeakKeyDictionary[Connection, float]()
        self._busy: set[Connection] = set()
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self._checks: dict[asyncio.Task[None], Connection] = {}  # up to *size* of them, besides the others
        self._is_reached = False  # the newest attempt to connect has succeeded, and no connection broke since
        self._backoff = Backoff(OPEN_PAUSE_FIRST, OPEN_PAUSE_MAX)
        self._open_from = 0.0
        self._latency = 0.0  # of the newest answer
        self._good_from = -math.inf  # connections that were opened earlier may lead to the wrong server

    def schema_checked(self, check: asyncio.Task[None]) -> None:
        """Let the next request begin another check of the schema; called when *check* has ended."""
        self.schema_check = None
        if not check.cancelled():
            check.exception()  # the waiting requests get it; this keeps asyncio from logging it if none waits

    async def run(self, work: Callable[[Connection], Awaitable[T]], within: float, queue_for: float) -> T:
        """Run *work* on a connection within *within* seconds, the wait for the connection included."""
        connection: Connection | None = None
        limit = asyncio.timeout(within)
        try:
            async with limit:
                connection = self._next_idle() or await self._wait_for_connection(limit, within, queue_for)
                return await self._run_on(connection, work, limit)
        except TimeoutError as error:
            if connection is None and limit.expired():
                raise NoConnectionInTime from error
            raise

    # --- waiting for a connection ---

    def _next_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if self._is_over(connection):
                connection.terminate()
                continue
            if not connection.is_closed():
                self._busy.add(connection)
                return connection
            self._is_reached = False
        return None

    async def _wait_for_connection(self, limit: asyncio.Timeout, within: float, queue_for: float) -> Connection:
        """Wait for a connection. Under overload, a request that gives up here costs the server nothing."""
        if self._is_closed:
            raise Unavailable("the backend was closed; connect again")
        loop = asyncio.get_running_loop()
        began = loop.time()
        turn: asyncio.Future[Connection] = loop.create_future()
        self._waiting.append(turn)
        self._open_more()
        try:
            await asyncio.wait({turn}, timeout=min(queue_for, 0.95 * within))
            if not turn.done() and self._busy:
                raise _too_busy(loop.time() - began)
            connection = await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())
            turn.cancel()
            raise
        ends_at = limit.when()
        if ends_at is not None and ends_at - loop.time() < min(self._latency, within / 4):
            self._give_back(connection)  # there is no time left for an answer
            raise _too_busy(loop.time() - began)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._offer(connection)
        if self._waiting:  # the connection may have been closed meanwhile
            self._open_more()

    def _offer(self, connection: Connection) -> None:
        """Give a connection to the first waiting request, or keep it as idle."""
        if connection.is_closed():
            return
        is_of_use = self._opened_at[connection] > self._good_from and not self._is_over(connection)
        if self._is_closed or self._room() <= 0 or not is_of_use:
            connection.terminate()
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self._busy.add(connection)
                turn.set_result(connection)
                return
        insort(self._idle, connection, key=lambda one: -self._opened_at[one])

    def _room(self) -> int:
        return self._size - len(self._busy) - len(self._idle)

    # --- running requests ---

    async def _run_on(
        self, connection: Connection, work: Callable[[Connection], Awaitable[T]], limit: asyncio.Timeout
    ) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await work(connection)
        except asyncpg.PostgresError as error:
            is_of_no_use = error.sqlstate in _CLOSED_AFTER or (
                error.sqlstate == _NO_RIGHT and loop.time() - self._opened_at[connection] > REFUSED_FOR
            )
            if is_elsewhere(error):
                self._replace_all()
            elif is_of_no_use or (not connection.is_closed() and connection.is_in_transaction()):
                connection.terminate()
            elif connection.is_closed():
                self._check_idle()
            self._give_back(connection)
            raise
        except BaseException as error:
            # The answer may still come. If this connection is silent or broken, the idle ones may be, too.
            self._busy.discard(connection)
            self._check_soon(connection)
            if limit.expired() or not isinstance(error, asyncio.CancelledError):
                self._check_idle()
            raise
        else:
            self._latency = loop.time() - began
            self._give_back(connection)
            return answer
        finally:
            if self._waiting:
                self._open_more()

    def _replace_all(self) -> None:
        """Use no connection of before again: one of them leads to the wrong server, and the others may, too.

        A load balancer, or a name with another address by now, leads new ones to the primary.
        """
        self._good_from = asyncio.get_running_loop().time()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _check_idle(self) -> None:
        self._is_reached = False
        idle, self._idle = self._idle, []
        for connection in idle:
            self._check_soon(connection)

    def _check_soon(self, connection: Connection) -> None:
        if connection.is_closed() or len(self._checks) >= self._size or self._is_closed:
            connection.terminate()
            return
        check = asyncio.get_running_loop().create_task(self._check(connection), name="tenure-postgres-check")
        self._checks[check] = connection
        check.add_done_callback(self._checks.pop)

    async def _check(self, connection: Connection) -> None:
        """Use *connection* again if it answers. The driver has requested that the server cancels the request on it."""
        try:
            async with asyncio.timeout(CHECK_WITHIN):
                await connection.execute("SELECT 1")  # after the answer to the cancelled request
        except DRIVER_ERRORS:
            connection.terminate()
        else:
            if not connection.is_closed() and connection.is_in_transaction():
                connection.terminate()
            self._offer(connection)

    # --- opening ---

    def _open_more(self) -> None:
        """Open connections for waiting requests: one at first, up to the pool's size once it has succeeded."""
        most = min(self._room(), self._size if self._is_reached else 1) - len(self._opening)
        if most <= 0 or self._is_closed:
            return
        waiting = sum(not turn.done() for turn in self._waiting) - len(self._opening)
        for _ in range(min(most, waiting)):
            opening = asyncio.get_running_loop().create_task(self._open(), name="tenure-postgres-connect")
            self._opening.add(opening)
            opening.add_done_callback(self._opened)

    async def _open(self) -> None:
        if (pause := self._open_from - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause)
        if self._is_closed:
            return
        connection = await self._connect()
        self._is_reached, self._open_from = True, 0.0
        self._backoff.reset()
        self._opened_at[connection] = asyncio.get_running_loop().time()
        self._offer(connection)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._is_reached = False
            self._open_from = asyncio.get_running_loop().time() + self._backoff.next()
            if not self._busy:  # otherwise a busy connection may still serve the waiting requests
                self._fail(error)
        self._open_more()

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                turn.set_exception(error)

    async def close(self) -> None:
        """Close the connections: idle ones in agreement with the server, others at once, and give up what opens one."""
        self._is_closed = True
        self._fail(Unavailable("the backend was closed meanwhile; connect again"))
        for check, connection in list(self._checks.items()):
            check.cancel()
            connection.terminate()
        for connection in list(self._busy):
            connection.terminate()
        opening = set(self._opening)
        for attempt in opening:
            attempt.cancel()
        idle, self._idle = self._idle, []
        await close_together(*(partial(_close, connection) for connection in idle))
        if opening:
            await asyncio.wait(opening)


def _too_busy(waited: float) -> Unavailable:
    return Unavailable(
        f"all connections were busy for {waited:.2g} s, so the request was not sent; if this happens often, "
        "use a larger pool (option pool), a longer ttl, or a faster server"
    )


async def _close(connection: Connection) -> None:
    with suppress(*DRIVER_ERRORS):
        await connection.close(timeout=1.0)
