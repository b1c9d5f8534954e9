"""The connections of one event loop to one server: a fair pool, replaced when they fail; each has the newest login."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, TypeVar

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tenure._backends.redis.address import Address, Endpoint, Options
from tenure._backends.redis.scripts import Answer, Argument, Call
from tenure._logins import Login, Logins
from tenure._runtime.closing import Close, close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.tasks import Tasks
from tenure._secret import revealed

T = TypeVar("T")

PROBES: Mapping[int, int] = {
    getattr(socket, option): value
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPALIVE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, option)
}
"""How the system probes a silent connection: after 30 s, and after three probes without an answer the connection ends.
The first option has another name on macOS. The server's process has no part in it."""

HEAD_START = 0.2
"""Seconds that one of several servers has for an answer before the next one gets the request, too."""

REFUSALS = 3
"""So many refusals of one script in a row, and the connections are replaced, whatever the server says."""
REPLACED_EVERY = 1.0
"""Seconds from a replacement of connections until refusals may cause the next one."""

_NO_LOGIN = "it waited for a login"
"""What the cancellation of such a request says."""

_ELSEWHERE = re.compile(
    r"\b(READONLY|MASTERDOWN|LOADING)\b|(?i:\bread[- ]only (replica|slave)\b|\b(not|no) (an? |the )?(primary|master)\b)"
)
"""What only a server says that is no primary, or none yet; proxies and scripts put other words around it."""
_QUOTES = ", with args beginning with"
"""Where Redis begins to quote the arguments of a command that it doesn't know."""
_NO_ANSWER = exceptions.ConnectionError, exceptions.TimeoutError, OSError
"""Errors of a request that no server answers. A request that exceeds its time limit is cancelled instead."""


def is_unanswered(error: BaseException, limit: asyncio.Timeout) -> bool:
    """Return whether *error* means that no server answered in time. A cancellation by the caller does not."""
    return isinstance(error, _NO_ANSWER) or (isinstance(error, asyncio.CancelledError) and limit.expired())


def has_waited_for_login(error: BaseException | None) -> bool:
    """Return whether *error* is the cancellation of a request that got no login in time, so no server was asked."""
    return isinstance(error, asyncio.CancelledError) and error.args == (_NO_LOGIN,)


def is_elsewhere(error: object) -> bool:
    """Return whether *error* is an answer that can only come of the wrong server: one that is no primary."""
    if isinstance(error, (exceptions.ReadOnlyError, exceptions.MasterDownError)):
        return True
    return isinstance(error, exceptions.ResponseError) and _ELSEWHERE.search(unquoted(error)) is not None


def unquoted(error: Exception) -> str:
    """Return the text of an error without the arguments that a server quotes of a command that it doesn't know."""
    return str(error).partition(_QUOTES)[0]


class LoopConnections:
    """The connections of one loop to one server: a pool, replaced by a new one when its connections fail."""

    def __init__(
        self,
        address: Address,
        options: Options,
        tls: ssl.SSLContext | None,
        logins: Logins,
        connect: Callable[[Address, Options, ssl.SSLContext | None, Logins], aioredis.Redis] | None = None,
    ) -> None:
        self._options = options
        self._logins = logins
        self._connect = partial(connect or connected, address, options, tls, logins)
        self.redis: aioredis.Redis = self._connect()
        self._has_idle = False
        self._refusals: Counter[str] = Counter()  # in a row, by what was refused
        self._replaced_at = -math.inf
        self._retired: set[aioredis.Redis] = set()
        self._closing = Tasks()

    async def send(self, request: Callable[[aioredis.Redis], Awaitable[T]], limit: asyncio.Timeout) -> T:
        """Return the result of *request* within *limit*."""
        redis = self.redis
        try:
            answer = await request(redis)
        except exceptions.ResponseError as error:
            self._has_idle = True
            if is_elsewhere(error):
                self._retire(redis)
            raise
        except BaseException as error:
            # The driver closes the connection of a request that was given up; the others are to the same server.
            if self._has_idle and is_unanswered(error, limit) and not self._lacks_login(error):
                self._retire(redis)
            raise
        self._has_idle = True
        return answer

    def _lacks_login(self, error: BaseException) -> bool:
        """Return whether a new connection got no login, or none that the server accepts yet: the others have one."""
        is_refused = not self._logins.is_fixed and isinstance(error, exceptions.AuthenticationError)
        return is_refused or has_waited_for_login(error)

    async def command(self, limit: asyncio.Timeout, *words: Argument) -> Answer:
        """Run a command, and return its answer."""
        return await self.send(lambda redis: redis.execute_command(*words), limit)  # type: ignore[no-untyped-call]

    def accepted(self, what: str) -> None:
        """Note that a request for *what* was carried out."""
        self._refusals.pop(what, None)

    def refused(self, what: str) -> None:
        """Note that a request for *what* was refused. A few times in a row, and another server may be the right one.

        A proxy may word as it likes that the server behind it is no primary any more. Reads may succeed meanwhile.
        """
        self._refusals[what] += 1
        if self._refusals[what] >= REFUSALS and time.monotonic() >= self._replaced_at + REPLACED_EVERY:
            self._retire(self.redis)

    def _retire(self, redis: aioredis.Redis) -> None:
        """Send no new request over the connections of *redis*: one of them failed, and the others may, too.

        A host name may have another address by now, and is resolved for new connections only; a server that becomes a
        replica doesn't close its connections; and a connection that a firewall has dropped stays silent.
        """
        if self.redis is redis:
            self._has_idle = False
            self._refusals.clear()
            self._replaced_at = time.monotonic()
            self.redis = self._connect()
            self._retired.add(redis)
            self._closing.spawn(_disconnect_idle(redis))
            # By then all requests over them have ended.
            asyncio.get_running_loop().call_later(2 * self._options.timeout, self._close_retired, redis)

    def _close_retired(self, redis: aioredis.Redis) -> None:
        if redis in self._retired:
            self._retired.discard(redis)
            self._closing.spawn(_disconnect_idle(redis))

    async def close(self) -> None:
        """Close every connection."""
        retired, self._retired = self._retired, set()
        await close_together(*(redis.aclose for redis in (self.redis, *retired)))
        await asyncio.gather(*self._closing)


async def _disconnect_idle(redis: aioredis.Redis) -> None:
    """Close the idle connections of *redis*; one with a subscription is closed by its subscriber."""
    with suppress(exceptions.RedisError, OSError):
        await redis.connection_pool.disconnect(inuse_connections=False)


async def close_on(loop: asyncio.AbstractEventLoop, close: Close, *, within: float) -> None:
    """Call *close* on *loop*, if that is still running, for up to *within* seconds; ignore the errors of Redis."""

    async def run() -> None:
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(within):
                await close()

    await on_loop(loop, run, within=within)


async def run_scripts(redis: aioredis.Redis, calls: Sequence[Call]) -> list[Answer]:
    """Run many scripts in one round trip, and in three if the server doesn't know one; an answer may be an error."""
    answers = await _pipelined(redis, calls)
    missed = [i for i, answer in enumerate(answers) if isinstance(answer, exceptions.NoScriptError)]
    if missed:
        for text in {calls[i].script.text for i in missed}:
            await redis.script_load(text)
        again = await _pipelined(redis, [calls[i] for i in missed])
        for i, answer in zip(missed, again, strict=True):
            answers[i] = answer
    return answers


async def _pipelined(redis: aioredis.Redis, calls: Sequence[Call]) -> list[Answer]:
    async with redis.pipeline(transaction=False) as pipeline:
        for call in calls:
            pipeline.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments)
        answers: list[Answer] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if is_elsewhere(answer):
            raise answer  # the others have the same error, and the connections must be replaced
    return answers


async def first_answer(
    endpoints: Sequence[Endpoint], request: Callable[[Endpoint], Coroutine[Any, Any, T]]
) -> tuple[Endpoint, T]:
    """Return the endpoint that answers *request* first, and its answer. A silent one must not use up the time."""
    remaining, running = list(endpoints), dict[asyncio.Task[T], Endpoint]()
    try:
        while True:
            if remaining:
                endpoint = remaining.pop(0)
                running[asyncio.create_task(request(endpoint))] = endpoint
            done, _ = await asyncio.wait(
                running, timeout=HEAD_START if remaining else None, return_when=asyncio.FIRST_COMPLETED
            )
            for one in done:
                endpoint = running.pop(one)
                if (error := one.exception()) is None:
                    return endpoint, one.result()
                is_silent = isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError))
                if not is_silent or not (running or remaining):
                    # With its own cause: its context becomes the caller's, if the caller handles another error.
                    raise error from error.__cause__ or error.__context__
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class FairPool(aioredis.ConnectionPool):
    """A pool that serves requests in the order of their arrival.

    The blocking pool of redis-py gives a free connection to the next caller; so a busy sender gets back the connection
    that it has just released, and waiting requests get none. It also takes longer for each request.
    """

    def __init__(self, max_connections: int, timeout: float, **options: Any) -> None:
        super().__init__(max_connections=max_connections, **options)
        self._patience = timeout
        self._turns = asyncio.Semaphore(max_connections)  # first come, first served
        self._taken: set[object] = set()

    async def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """Return a connection; requests wait for one in turn.

        Raises:
            ConnectionError: None was free in time.
        """
        if self._turns.locked():
            try:
                async with asyncio.timeout(self._patience):
                    await self._turns.acquire()
            except TimeoutError:
                raise exceptions.ConnectionError("No connection available.") from None
        else:
            await self._turns.acquire()
        try:
            connection = await super().get_connection(*arguments, **options)  # type: ignore[no-untyped-call]
        except BaseException:
            # What could not be opened comes last: otherwise the next request would get it, and no connection that is.
            self._available_connections.sort(key=_is_open)
            self._turns.release()
            raise
        self._taken.add(connection)
        return connection

    async def ensure_connection(self, connection: Any) -> None:
        """Make *connection* ready for a request: by another one to the server if it is to have another login."""
        if connection.is_connected and connection.is_outdated:
            await connection.disconnect(nowait=True)
        await super().ensure_connection(connection)

    async def release(self, connection: Any) -> None:
        """Take *connection* back, for the next request in turn."""
        try:
            await super().release(connection)
        finally:
            if connection in self._taken:  # otherwise it could not be opened, and no request has got it
                self._taken.discard(connection)
                self._turns.release()


def _is_open(connection: AbstractConnection) -> bool:
    return bool(connection.is_connected)


class LoginConnection(AbstractConnection):
    """A connection that is opened with the newest login.

    Args:
        logins: Of its client.
    """

    def __init__(self, *, logins: Logins, **more: Any) -> None:
        self._logins = logins
        self._login: Login | None = None
        super().__init__(**more)

    async def connect(self) -> None:
        """Open it, unless it is open.

        Raises:
            TenureError: There is no login.
        """
        if self.is_connected:
            return
        self._login = None
        try:
            await self._logins.let_in(self._connect_with, _is_login_refused)
        except asyncio.CancelledError as error:
            if self._login is None:
                raise asyncio.CancelledError(_NO_LOGIN) from error
            raise

    async def _connect_with(self, login: Login) -> None:
        self._login = login
        self.username, self.password = login.user, revealed(login.password)
        try:
            await super().connect()  # type: ignore[no-untyped-call]
        except exceptions.AuthenticationError:
            self._login = None  # it waits for another one now
            raise
        except BaseException:  # also of a login that can't be sent: without one, it has another user's rights
            await self.disconnect(nowait=True)
            raise

    @property
    def renewed_at(self) -> float:
        """The time, by ``time.monotonic``, at which it should have another login."""
        return math.inf if self._login is None else self._login.renewed_at

    @property
    def is_outdated(self) -> bool:
        """Whether it is to be replaced: there is a login that lasts longer."""
        return self._login is not None and self._logins.replaces(self._login)


def _is_login_refused(error: Exception) -> bool:
    return isinstance(error, exceptions.AuthenticationError)


class PlainConnection(LoginConnection, aioredis.Connection):
    """A connection without TLS."""


class SocketConnection(LoginConnection, aioredis.UnixDomainSocketConnection):
    """A connection by a Unix socket.

    redis-py would log in twice, and turn an error of the first time into another one.
    """

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await asyncio.open_unix_connection(self.path)


class TlsConnection(LoginConnection, aioredis.Connection):
    """A connection with TLS, by a context of our own.

    redis-py would make one for each connection. That one would trust the authorities of this machine beside the one
    that is named, and ask on the terminal for the password of a key, while the loop waits.
    """

    def __init__(self, *, tls: ssl.SSLContext, **more: Any) -> None:
        self._tls = tls
        super().__init__(**more)

    def _connection_arguments(self) -> Mapping[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._tls}


def connected(
    address: Address,
    options: Options,
    tls: ssl.SSLContext | None,
    logins: Logins,
    kind: type[LoginConnection] | None = None,
    **more: Any,
) -> aioredis.Redis:
    """Return a pool of connections, none of them open yet; *kind* is their class, *more* its arguments."""
    if address.socket is not None:
        usual: type[LoginConnection] = SocketConnection
        more["path"] = address.socket
    else:
        usual = TlsConnection if address.is_tls else PlainConnection
        more |= {"host": address.host, "port": address.port}
        more |= {"socket_keepalive": True, "socket_keepalive_options": PROBES}
        more |= {"tls": tls} if address.is_tls else {}
    pool = FairPool(
        max_connections=options.connections,
        timeout=options.timeout,
        connection_class=kind or usual,
        db=address.database,
        logins=logins,
        protocol=2,
        **_no_client_info(),
        # Each request is bounded as a whole; redis-py's own timeouts may swallow a cancellation.
        socket_timeout=None,
        socket_connect_timeout=options.timeout,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        **more,
    )
    return aioredis.Redis.from_pool(pool)


def _no_client_info() -> dict[str, Any]:
    """Return the options with which redis-py sends no CLIENT SETINFO on new connections: it may be forbidden."""
    if "driver_info" in signature(AbstractConnection.__init__).parameters:
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}  # older versions of redis-py
