"""The client of a NATS: one connection for each event loop that uses it, and a time limit for every request.

House rules:

- A request that got no answer may be executed, now or later. So every request can be repeated, or its effect depends on
  what the subject last held.
- A connection that gave no answer in time is replaced: what it still carries can't disturb later requests.
"""

from __future__ import annotations

import asyncio
import json
import math
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import nats.errors
from nats.aio.msg import Msg

from tenure._backends.nats.address import Address, Options
from tenure._backends.nats.connection import Connection, Headers, Request
from tenure._backends.nats.errors import (
    NO_PEERS,
    STREAM_EXISTS,
    SUBJECTS_TAKEN,
    BadAnswer,
    Disconnected,
    HandshakeFailed,
    NoJetStream,
    NotPermitted,
    Refusal,
    TooLarge,
    WrongConsumer,
    is_login_refused,
    is_undecided,
    translate,
)
from tenure._backends.nats.login_files import BadLoginFile
from tenure._connect_failures import NotConnectedInTime
from tenure._foreign import Unreadable, a_count, a_list, a_text, an_object, read_json, read_or
from tenure._logins import Login, Logins, Source, logins_of
from tenure._opened import Fact
from tenure._option_files import require_readable
from tenure._runtime.closing import close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.tasks import Tasks
from tenure._tls_context import ReloadingContext, shown_by, tls_context
from tenure.errors import TenureError, Unavailable

T = TypeVar("T")
Json = dict[str, Any]

FAILURES = (
    Refusal,
    BadAnswer,
    Disconnected,
    HandshakeFailed,
    NotPermitted,
    NoJetStream,
    TooLarge,
    WrongConsumer,
    BadLoginFile,
    nats.errors.Error,
    OSError,
)  # a TimeoutError is one

EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
"""The header with the number that the last message of a subject must have; 0 if there must be none."""

REPEATING_SHARE = 0.5
"""The share of ``timeout`` for which a request is repeated that no server has carried out."""

HEARD_WITHIN = 0.8
"""Seconds within which a server that was not heard of for a moment is: less than is waited to acquire a short lease."""

ANSWERING_SHARE = 0.125
"""The share of ``timeout`` after which a cluster that gave no answer is asked again; from then on, it doubles."""

PAUSE_FIRST, PAUSE_MAX = 0.002, 0.1
"""Seconds between two attempts: from the first they double up to the second."""


class Client:
    """A NATS in use.

    Args:
        address: Where its servers are, and the login.
        options: The options of the URL.
        credentials: Of the caller.
        logins: Those of another client, in place of what all these say.

    Raises:
        ConfigError: A file can't be read, or is no certificate; or there are two logins.
    """

    def __init__(
        self,
        address: Address,
        options: Options,
        credentials: Source | None = None,
        *,
        logins: Logins | None = None,
    ) -> None:
        files = require_readable(
            address, ca=options.ca, cert=options.cert, key=options.key, creds=options.creds, nkey=options.nkey
        )
        self.logins: Logins = logins or logins_of(
            address,
            options,
            credentials,
            user=address.username,
            password=address.password or address.token,
            login_file=options.login_file,
        )
        self.warnings: tuple[Fact, ...] = (*files, *self.logins.warnings)
        self.address: Address = address
        self.options: Options = options
        self.tls: ReloadingContext | None = (
            tls_context(address, ca=options.ca, cert=options.cert, key=options.key) if options.wants_tls else None
        )
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}
        self._connecting: dict[asyncio.AbstractEventLoop, asyncio.Future[Connection]] = {}
        self._attempts = Tasks()
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
            failure: Exception = error
            if isinstance(error, TimeoutError):  # of this limit, of one request, or of an attempt to connect
                if connection is not None:
                    self._retire(connection)
                else:  # so nothing was asked
                    waited = min(within, self.options.timeout)
                    failure = self.logins.unanswered(waited) or NotConnectedInTime(waited)
            raise self._translated(failure, within) from error
        self._worked = True
        return answer

    def translate(self, error: Exception) -> TenureError:
        """Return an error of a request as one of ours."""
        return self._translated(error, self.options.timeout)

    def _translated(self, error: Exception, within: float) -> TenureError:
        if isinstance(error, TenureError):
            return error
        own, timeout = shown_by(self.tls), self.options.timeout
        source = self.logins.source
        return translate(error, self.address, within, worked=self._worked, own=own, timeout=timeout, source=source)

    async def connection(self) -> Connection:
        """Return the open connection of this loop, or open one.

        Raises:
            Unavailable: The client is closed.
            Exception: As the driver raises it; see :meth:`run`.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        known = self._connections.get(loop)
        if known is not None and not known.is_lost:
            return known
        connecting = self._connecting.get(loop)
        if connecting is None:
            for old in [one for one in list(self._connections) if one.is_closed()]:
                del self._connections[old]
            connecting = self._connecting[loop] = loop.create_future()
            attempt = self._attempts.spawn(self._connect(), "tenure-nats-connect")
            attempt.add_done_callback(partial(self._connected, connecting))
            connecting.add_done_callback(lambda _: attempt.cancel())
        await asyncio.wait((connecting,))  # who is cancelled leaves the others the attempt
        return connecting.result()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"{self.address} is closed; connect again")

    async def close(self) -> None:
        """Close the connections of every loop, and tell who waits for one."""
        self._closed = True
        for loop, connecting in list(self._connecting.items()):
            with suppress(RuntimeError):
                # Not by the end of the attempt: before Python 3.12, the driver's asyncio.wait_for forgets that it was
                # cancelled if its answer comes at the same moment.
                loop.call_soon_threadsafe(_end, connecting, self._closed_error())
        connections, self._connections = self._connections, {}
        await close_together(*(partial(on_loop, loop, connection.close) for loop, connection in connections.items()))
        await asyncio.gather(*self._closing.here(), return_exceptions=True)

    # --- JetStream ---

    async def call(
        self,
        connection: Connection,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        repeats: bool = True,
    ) -> Json:
        """Return JetStream's answer to the request *path*, such as ``STREAM.INFO.orders``.

        A cluster gives no answer about a stream that has no leader yet; and of several that make one at the same time,
        only one may get an answer. So there, it is asked again.

        Args:
            repeats: Whether the answer is the same if the request is carried out twice.

        Raises:
            Refusal: It refused the request.
        """
        subject, data = f"{self.api}.{path}", b"" if body is None else json.dumps(body).encode()
        async with asyncio.timeout(self.options.timeout):
            patience = self.options.timeout * ANSWERING_SHARE
            while repeats and self.is_spread(connection):
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        return read((await connection.request(subject, data)).data)
                patience *= 2
            return read((await connection.request(subject, data)).data)

    async def answers(
        self, connection: Connection, requests: Sequence[Request], is_gone: Callable[[], Awaitable[bool]]
    ) -> list[Msg | None]:
        """Return the answers to requests, in order; None where nobody is left to answer, as *is_gone* tells.

        In a cluster, a server sends on what is for another one, which may have just deleted the stream, or its
        consumer.

        Raises:
            Disconnected: The connection was lost first.
        """
        if not self.is_spread(connection):
            return await connection.request_all(requests)
        return await connection.request_all(requests, is_gone, self.options.timeout * ANSWERING_SHARE)

    async def make_stream(self, connection: Connection, config: Json) -> None:
        """Make a stream, unless there is one with its name: an operator's, or an older version's.

        A cluster has too few servers for it while one of them has not been heard of for a moment. So it is asked again.

        Raises:
            Refusal: It refused the request.
        """
        pauses = self.pauses(connection, within=HEARD_WITHIN)
        while True:
            try:
                await self.call(connection, f"STREAM.CREATE.{config['name']}", config)
                return
            except Refusal as error:
                if error.code == STREAM_EXISTS:
                    return
                pause = next(pauses, None) if error.code == NO_PEERS else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def pages(
        self, connection: Connection, path: str, items: str, body: Mapping[str, object] | None = None
    ) -> AsyncIterator[Json]:
        """Yield JetStream's answers to *path*, which each have a page of *items*, until there are no more.

        Raises:
            Refusal: It refused a request.
        """
        offset, total = 0, 1
        while offset < total:
            answer = await self.call(connection, path, {**(body or {}), "offset": offset})
            yield answer
            count = len(read_or(a_list, answer.get(items), []))
            offset, total = offset + count, read_or(a_count, answer.get("total"), 0) if count else 0

    async def store(
        self,
        connection: Connection,
        stream: str,
        subject: str,
        body: bytes,
        headers: Headers | None = None,
        *,
        last: int | None = None,
    ) -> Json:
        """Publish a message into *stream*, which has *subject*; return its answer: ``seq``, and ``duplicate``.

        Args:
            last: If given, the sequence that the subject's last message must have; 0 if there must be none.

        Raises:
            Refusal: It was refused, see ``errors.is_wrong_sequence``; or another stream has taken it.
            NoJetStream: No stream has this subject, or none that this server knows of.
        """
        if last is not None:
            headers = {**(headers or {}), EXPECTED_LAST: str(last)}
        async with asyncio.timeout(self.options.timeout):
            pauses = self.pauses(connection)
            while True:
                try:
                    return stored(await connection.request(subject, body, headers), stream)
                except Refusal as error:
                    pause = next(pauses, None) if is_undecided(error) else None
                    if pause is None:
                        raise
                await asyncio.sleep(pause)

    # --- several servers ---

    def is_spread(self, connection: Connection) -> bool:
        """Return whether what *connection* asks for may be on other servers than the one that it is connected to.

        These learn a little later what has been made, stored or elected.
        """
        return bool(connection.cluster or self.options.domain)

    def pauses(self, connection: Connection, *, within: float = math.inf) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt of a request that no server has carried out.

        A single server is asked once more, at once; a cluster for *within* seconds at most.
        """
        yield 0.0
        if self.is_spread(connection):
            now = asyncio.get_running_loop().time
            give_up, pause = now() + min(within, self.options.timeout * REPEATING_SHARE), PAUSE_FIRST
            while now() < give_up:
                yield pause
                pause = min(pause * 2, PAUSE_MAX)

    # --- connections ---

    async def _connect(self) -> Connection:
        servers = self.address.servers
        within = self.options.timeout / len(servers)
        failure: Exception | None = None
        for number in range(len(servers)):
            which = (self._first + number) % len(servers)
            try:
                connect = partial(self._log_in, servers[which], within)
                connection = await self.logins.let_in(connect, is_login_refused)
            except (nats.errors.Error, HandshakeFailed, OSError) as error:
                failure = failure or error
                continue
            self._first = which
            return connection
        assert failure is not None  # there is at least one server
        raise failure

    async def _log_in(self, server: str, within: float, login: Login) -> Connection:
        connection = await Connection.open(server, login, self.options, self.tls, within)
        connection.when_lost(partial(self._lost, connection))
        return connection

    def _lost(self, connection: Connection) -> None:
        if connection.is_login_over:
            self.logins.refused(connection.login)

    def _connected(self, connecting: asyncio.Future[Connection], attempt: asyncio.Task[Connection]) -> None:
        loop = attempt.get_loop()
        self._connecting.pop(loop, None)
        if attempt.cancelled():
            connecting.cancel()
        elif (error := attempt.exception()) is not None:
            _end(connecting, error)
        else:
            connection = self._connections[loop] = attempt.result()
            if self._closed:  # looked at after that: a close on another thread may not have found the connection there
                self._connections.pop(loop, None)
                self._closing.spawn(connection.close())
                _end(connecting, self._closed_error())
            else:
                connecting.set_result(connection)

    def _retire(self, connection: Connection) -> None:
        """Use *connection* no more: others that wait for its answers are told that it is lost."""
        loop = asyncio.get_running_loop()
        if self._connections.get(loop) is connection:
            del self._connections[loop]
            # Its server may be cut off from the others, and still accept connections.
            self._first = (self.address.servers.index(connection.server) + 1) % len(self.address.servers)
        self._closing.spawn(connection.close())


def _end(connecting: asyncio.Future[Connection], error: BaseException) -> None:
    """Fail those who wait for *connecting*, if they still do; there may be none any more."""
    if not connecting.done():
        connecting.set_exception(error)
        connecting.exception()


def read(raw: bytes) -> Json:
    """Return an answer of JetStream.

    Raises:
        Refusal: It is an error.
        BadAnswer: It can't be one of JetStream.
    """
    answer = _answer(raw)
    _check(answer)
    return answer


def _answer(raw: bytes) -> Json:
    try:
        return an_object(read_json(raw, len(raw)))
    except Unreadable as bad:
        raise BadAnswer(str(bad)) from bad


def _check(answer: Json) -> None:
    if "error" in answer and (error := read_or(an_object, answer["error"], {})):  # each message has an answer
        reason = read_or(a_text, error.get("description"), "no reason given")
        raise Refusal(read_or(a_count, error.get("err_code"), 0), reason)


def stored(message: Msg, stream: str) -> Json:
    """Return the answer to a message that was to be stored in *stream*: ``seq``, and ``duplicate``.

    Raises:
        Refusal: It was not; or another program's stream has taken it, as *stream* lacks the subject.
        BadAnswer: It can't be an answer of JetStream.
    """
    answer = _answer(message.data)
    taken_by = answer.get("stream", stream)
    # Also a refusal of another one is not this stream's: it compares with its own messages.
    if taken_by != stream and (taken_by := read_or(a_text, taken_by, stream)) != stream:
        raise Refusal(
            SUBJECTS_TAKEN,
            f"the stream {taken_by!r} has taken what is for {stream!r}, where alone tenure looks for it; it may "
            "be there, too",
        )
    _check(answer)
    try:
        a_count(answer.get("seq"))
    except Unreadable as bad:
        raise BadAnswer(f"of its seq, {bad}") from bad
    return answer


def part_of(answer: Json, name: str) -> Json:
    """Return a part of an answer, such as its ``config``.

    Raises:
        BadAnswer: It has none, so it can't be one of JetStream.
    """
    try:
        return an_object(answer.get(name))
    except Unreadable as bad:
        raise BadAnswer(f"of its {name}, {bad}") from bad


def number_in(answer: Json, name: str) -> int:
    """Return a number of an answer, or of a part of it; -1 is no limit.

    Raises:
        BadAnswer: It has none, so it can't be one of JetStream.
    """
    try:
        return a_count(answer.get(name), least=-1, most=2**64 - 1)
    except Unreadable as bad:
        raise BadAnswer(f"of its {name}, {bad}") from bad


def names_in(answer: Json, name: str) -> list[str]:
    """Return a list of names in an answer, which is left out, or null, if it is empty.

    Raises:
        BadAnswer: They are no names, so it can't be an answer of JetStream.
    """
    try:
        return [a_text(one) for one in a_list(answer.get(name) or [])]
    except Unreadable as bad:
        raise BadAnswer(f"of its {name}, {bad}") from bad


class Stored(NamedTuple):
    """A message as its stream shows it."""

    subject: str
    number: int
    """In the stream."""
    time: object
    """As the server writes it."""
    body: bytes
    headers: bytes


def stored_in(answer: Json) -> Stored:
    """Return the message in an answer to ``STREAM.MSG.GET``.

    Raises:
        BadAnswer: There is none, so it can't be an answer of JetStream.
    """
    try:
        found = an_object(answer.get("message"))
        subject, number = a_text(found.get("subject")), a_count(found.get("seq"), least=1)
        body, headers = _from_base64(found.get("data")), _from_base64(found.get("hdrs"))
    except ValueError as bad:  # Unreadable, or no base64
        raise BadAnswer(f"of its message, {bad}") from bad
    return Stored(subject, number, found.get("time"), body, headers)


def _from_base64(text: object) -> bytes:
    return b64decode(text) if isinstance(text, str) else b""
