"""The client of a NATS: one connection for each event loop that uses it, and a time limit for every request.

House rules:

- A request that got no answer may be executed, now or later. So every request can be repeated, or its effect depends on
  what the subject last held.
- A connection that gave no answer in time is replaced: what it still carries can't disturb later requests.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import nats.errors

from tenure._backends.nats.address import Address, Options
from tenure._backends.nats.connection import Connection, Headers
from tenure._backends.nats.errors import Disconnected, NoJetStream, NotPermitted, Refusal, TooLarge, translate
from tenure._runtime.tasks import Tasks
from tenure._tls_files import require_readable
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")
Json = dict[str, Any]

FAILURES = (
    Refusal,
    Disconnected,
    NotPermitted,
    NoJetStream,
    TooLarge,
    nats.errors.Error,
    OSError,
)  # a TimeoutError is one


class Client:
    """A NATS in use.

    Args:
        address: Where its servers are, and the login.
        options: The options of the URL.

    Raises:
        ConfigError: A file can't be read, or is no certificate.
    """

    def __init__(self, address: Address, options: Options) -> None:
        require_readable(
            address, ca=options.ca, cert=options.cert, key=options.key, creds=options.creds, nkey=options.nkey
        )
        self.address: Address = address
        self.options: Options = options
        self._tls = _context(address, options) if options.wants_tls else None
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}
        self._connecting: dict[asyncio.AbstractEventLoop, asyncio.Task[Connection]] = {}
        self._closing = Tasks()
        self._worked = False
        self._closed = False
        self._first = 0  # the server to try first: the one that was reached last, or the next one if it gave no answer
        domain = f"$JS.{options.domain}.API" if options.domain else "$JS.API"
        self.api: str = domain
        """The beginning of the subjects of JetStream's requests."""

    async def run(self, ask: Callable[[Connection], Awaitable[T]], *, within: float | None = None) -> T:
        """Return the result of *ask*, which may send several requests, within *within* seconds.

        Raises:
            Unavailable: There was no answer: the request may have been executed, wholly or in part, or not.
            ConfigError: The servers can't be used as they are.
        """
        within = self.options.timeout if within is None else within
        connection: Connection | None = None
        limit = asyncio.timeout(within)
        try:
            async with limit:
                connection = await self.connection()
                answer = await ask(connection)
        except FAILURES as error:
            if isinstance(error, TimeoutError) and connection is not None:  # of this limit, or of one request
                self._retire(connection)
            raise translate(error, self.address, within, worked=self._worked) from error
        self._worked = True
        return answer

    def translate(self, error: Exception) -> TenureError:
        """Return an error of a request as one of ours."""
        if isinstance(error, TenureError):
            return error
        return translate(error, self.address, self.options.timeout, worked=self._worked)

    async def connection(self) -> Connection:
        """Return the open connection of this loop, or open one.

        Raises:
            Unavailable: The client is closed.
            Exception: As the driver raises it; see :meth:`run`.
        """
        if self._closed:
            raise Unavailable(f"{self.address} is closed; connect again")
        loop = asyncio.get_running_loop()
        known = self._connections.get(loop)
        if known is not None and not known.is_lost:
            return known
        task = self._connecting.get(loop)
        if task is None:
            for old in [one for one in list(self._connections) if one.is_closed()]:
                del self._connections[old]
            task = self._connecting[loop] = loop.create_task(self._connect(), name="tenure-nats-connect")
            task.add_done_callback(lambda done: self._connected(loop, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections of every loop."""
        self._closed = True
        for loop, task in list(self._connecting.items()):
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        connections, self._connections = self._connections, {}
        for loop, connection in connections.items():
            await _on_loop(loop, connection.close)
        await asyncio.gather(*self._closing.here(), return_exceptions=True)

    # --- JetStream ---

    async def call(self, connection: Connection, path: str, body: Mapping[str, object] | None = None) -> Json:
        """Return JetStream's answer to the request *path*, such as ``STREAM.INFO.orders``.

        Raises:
            Refusal: It refused the request.
        """
        data = b"" if body is None else json.dumps(body).encode()
        async with asyncio.timeout(self.options.timeout):
            return read((await connection.request(f"{self.api}.{path}", data)).data)

    async def store(
        self,
        connection: Connection,
        subject: str,
        body: bytes,
        headers: Headers | None = None,
        *,
        last: int | None = None,
    ) -> Json:
        """Publish a message into the stream of *subject*; return the stream's answer: ``seq``, and ``duplicate``.

        Args:
            last: If given, the sequence that the subject's last message must have; 0 if there must be none.

        Raises:
            Refusal: It was refused; see ``errors.is_wrong_sequence``.
            NoJetStream: No stream has this subject.
        """
        if last is not None:
            headers = {**(headers or {}), "Nats-Expected-Last-Subject-Sequence": str(last)}
        async with asyncio.timeout(self.options.timeout):
            return read((await connection.request(subject, body, headers)).data)

    # --- connections ---

    async def _connect(self) -> Connection:
        servers = self.address.servers
        within = self.options.timeout / len(servers)
        failure: Exception | None = None
        for number in range(len(servers)):
            which = (self._first + number) % len(servers)
            try:
                connection = await Connection.open(servers[which], self.address, self.options, self._tls, within)
            except (nats.errors.Error, OSError) as error:
                failure = failure or error
                continue
            self._first = which
            return connection
        assert failure is not None  # there is at least one server
        raise failure

    def _connected(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Connection]) -> None:
        self._connecting.pop(loop, None)
        if task.cancelled() or task.exception() is not None:
            return
        connection = task.result()
        if self._closed:
            self._closing.spawn(connection.close())
        else:
            self._connections[loop] = connection

    def _retire(self, connection: Connection) -> None:
        """Use *connection* no more: others that wait for its answers are told that it is lost."""
        loop = asyncio.get_running_loop()
        if self._connections.get(loop) is connection:
            del self._connections[loop]
            # Its server may be cut off from the others, and still accept connections.
            self._first = (self.address.servers.index(connection.server) + 1) % len(self.address.servers)
        self._closing.spawn(connection.close())


def read(raw: bytes) -> Json:
    """Return an answer of JetStream.

    Raises:
        Refusal: It is an error.
    """
    answer: Json = json.loads(raw)
    error = answer.get("error")
    if error:
        raise Refusal(int(error.get("err_code", 0)), str(error.get("description", "no reason given")))
    return answer


def _context(address: Address, options: Options) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca)
        if options.cert:
            context.load_cert_chain(options.cert, options.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"a file for TLS of {address} is no certificate, or does not fit: {error}") from error
    return context


async def _on_loop(loop: asyncio.AbstractEventLoop, act: Callable[[], Any]) -> None:
    """Run *act* on *loop*. If the loop doesn't run any more, its tasks have ended."""
    if loop is asyncio.get_running_loop():
        await act()
    elif loop.is_running():
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(act(), loop)), 5.0)
