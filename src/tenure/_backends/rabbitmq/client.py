"""The client of a RabbitMQ: its connections, on one loop; bounds every request, and translates errors.

All connections live on the loop that opened the backend, which is the renewal thread's: so a caller that blocks its own
loop loses no channel, and no message that it has received. A request from another loop is carried out there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

from aiormq import spec

from tenure._backends.rabbitmq.address import Address, Options, granting, require_files, require_fitting, tls_of
from tenure._backends.rabbitmq.connection import AmqpChannel, AmqpConnection, Published, connect
from tenure._backends.rabbitmq.errors import (
    AmqpError,
    ChannelLost,
    ConnectionLost,
    NoLogin,
    NotConfirmed,
    NotTaken,
    Unacceptable,
    is_login_refused,
)
from tenure._backends.rabbitmq.login_renewal import renew_login
from tenure._backends.rabbitmq.names import PROBE, is_queue
from tenure._backends.rabbitmq.properties import Properties
from tenure._backends.rabbitmq.rejections import find_rejected, largest_body, outcomes
from tenure._connect_failures import NotConnectedInTime, Target
from tenure._logins import Login, Source, logins_of
from tenure._opened import Fact
from tenure._redaction import redacted, redacting
from tenure._runtime.closing import close_in_order, close_together
from tenure._runtime.tasks import Tasks, is_cancelled
from tenure._tls_context import ReloadingContext, shown_by
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

Purpose = Literal["sending", "receiving"]
"""The server stops reading from connections that send when it is short of memory or disk: verdicts have another one."""

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
"""Reply codes of AMQP that callers handle."""

CONNECTING_SHARE = 0.9
"""The share of ``timeout`` within which a server must let a client in: so who waits for that knows it asked nothing."""

CLOSE_WITHIN = 2.0
"""Seconds for which the end waits for requests of several steps."""

CONSUMER_TIMEOUT = re.compile(r"[Tt]imeout value used: (\d+) ms")
"""What the server says when a message was unacknowledged for too long."""

_OF_STREAMS = "stream queues"
"""What the server says when it is asked for something that streams can't do."""

FAILURES = (AmqpError, NotConfirmed, Unacceptable, OSError)
"""The errors of a request; a ``TimeoutError`` is an ``OSError``."""

IDLE_MAX = 4
"""Channels that are kept for further requests: to open and close one takes longer than most requests."""


class MissingAllowed:
    """Goes on behind its block if the server says that there is no such queue."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Return whether the error is to be dropped."""
        return isinstance(error, ChannelLost) and error.code == NOT_FOUND


missing_allowed = MissingAllowed()


@redacting
def translate(
    error: Exception,
    url: Url,
    address: Address,
    within: float,
    *,
    worked: bool,
    user: str,
    source: str = "",
    own: OwnCertificate | None = None,
    timeout: float | None = None,
) -> TenureError:
    """Turn an error of the connection, which *user* has, or of the server into one of ours.

    A permanent error is a ``ConfigError``, unless the server *worked* before: then rights are being changed, or it is
    being set up anew, and may fit soon.
    """
    said = redacted(error.text if isinstance(error, AmqpError) else str(error))
    tls = TlsAdvice(plain="for a server without TLS, write amqp://", own=own)
    target = Target(url, address.server, worked=worked, software="RabbitMQ", tls=tls, timeout=timeout, source=source)
    match error:
        case TimeoutError():
            return target.no_answer(within)
        case NoLogin():
            return type(error.reason)(said)
        case AmqpError() if is_login_refused(error):
            return target.login_refused(said, "check user and password in the URL")
        case ConnectionLost(code=530):
            return target.lasting(
                f"{url} refuses the virtual host {address.vhost!r}: {said}; create it with rabbitmqctl "
                "add_vhost, and give the user rights in it"
            )
        case ChannelLost(code=403):
            return target.not_permitted(said, granting(user))
        case AmqpError(code=0) | OSError() if failed := target.failure(error):
            return failed
        case ChannelLost(code=406) if CONSUMER_TIMEOUT.search(error.text):
            return Unavailable(f"{url} has closed a channel, with all its locks: {said}")
        case ChannelLost(code=406) if "delivery tag" in error.text:
            return Unavailable(f"{url} has closed a channel, with all its locks: {said}")
        case ChannelLost(code=405):
            return ConfigError(
                f"{url} has a queue that belongs to another connection alone: {said}; end that, or use another name or "
                "virtual host"
            )
        case ChannelLost(code=406):
            return ConfigError(
                f"{url} has a queue or an exchange of that name which is not as tenure declares it: {said}; "
                "tenure needs a quorum queue with dead-letter-strategy at-least-once: delete that one, or use another "
                "name or virtual host"
            )
        case ConnectionLost(code=540) if _OF_STREAMS in error.text:
            return ConfigError(
                f"{url} has a stream of that name: {said}; tenure needs a quorum queue: delete that one, or use "
                "another name or virtual host"
            )
        case ChannelLost(code=540) | ConnectionLost(code=540):
            return ConfigError(f"{url} can't do that: {said}; tenure needs RabbitMQ 3.10 or newer")
        case Unacceptable():
            return ConfigError(f"{url} refuses the message: {said}")
        case NotConfirmed():
            return Unavailable(f"{url} did not accept a message: {error}")
        case AmqpError():
            return Unavailable(f"{url} failed: {redacted(str(error))}")
        case OSError():
            return target.unreachable(error)
    raise AssertionError("translate() got an error that is not the connection's") from error  # a TypeError is a bug


class Client:
    """A RabbitMQ in use."""

    def __init__(self, url: Url, address: Address, options: Options, credentials: Source | None = None) -> None:
        self.url = url
        self.address = address
        self.options = options
        files = require_files(address, options)
        self._logins = logins_of(address, options, credentials, user=address.username, password=address.password)
        self.warnings: tuple[Fact, ...] = (*files, *self._logins.warnings)
        self.user: str = address.username
        """The user of the newest login; empty if its token names it."""
        self.tls: ReloadingContext | None = tls_of(address, options)
        self._home: asyncio.AbstractEventLoop | None = _running_loop()
        self._connections: dict[Purpose, AmqpConnection] = {}
        self._connecting: dict[Purpose, asyncio.Task[AmqpConnection]] = {}
        self._sending: AmqpChannel | None = None
        self._idle: list[AmqpChannel] = []  # for the next requests
        self._tasks = Tasks()
        self._to_end = Tasks()
        self._worked = False
        self._closed = False
        self.consumer_timeout = options.consumer_timeout
        """Seconds for which the server lets a message be unacknowledged, as configured here or learned from it."""
        self.body_max: int | None = None
        """Bytes of the largest body that the server takes, as it has told: until the connection is lost."""
        self.waits_for = ""
        """Why requests may be waiting although the server answers, to be told when one times out."""

    # --- on any loop ---

    @property
    def home(self) -> asyncio.AbstractEventLoop:
        """The loop on which the connections live."""
        if self._home is None or self._home.is_closed():
            self._home = asyncio.get_running_loop()
        return self._home

    async def run(
        self, request: Callable[[], Coroutine[Any, Any, T]], *, within: float | None = None, to_end: bool = False
    ) -> T:
        """Return the result of *request*, carried out on the loop of the connections, within *within* seconds.

        With *to_end*, it is carried out to its end, also if the caller gives it up: it has several steps, and would
        leave a copy too many between them.

        Raises:
            Unavailable: There was no answer: the request may have been executed, wholly or in part, or not.
            ConfigError: The server can't be used as it is.
        """
        try:
            if asyncio.get_running_loop() is self.home:
                return await self._run(request, within, to_end)
            try:
                future = asyncio.run_coroutine_threadsafe(self._run(request, within, to_end), self.home)
            except RuntimeError:
                raise self.closed_error() from None
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and not is_cancelled():  # the close cancels what requests wait for
                raise self.closed_error() from None
            raise

    def closed_error(self) -> Unavailable:
        """Return the error of a request after the end."""
        return Unavailable(f"{self.url} is closed; connect again")

    def call_home(self, act: Callable[..., object], *arguments: Any) -> None:
        """Call *act* on the loop of the connections, soon; from any thread, also when that loop has ended."""
        with suppress(RuntimeError):
            self.home.call_soon_threadsafe(act, *arguments)

    @property
    def source(self) -> str:
        """Where passwords come from, in words; empty: the URL."""
        return self._logins.source

    # --- on the loop of the connections ---

    async def _run(self, request: Callable[[], Coroutine[Any, Any, T]], within: float | None, to_end: bool) -> T:
        if self._closed:
            raise self.closed_error()
        within = self.options.timeout if within is None else within
        try:
            async with asyncio.timeout(within):
                answer = await (self.begin(request(), "request") if to_end else request())
        except FAILURES as error:
            raise self._translated(error, within) from error
        self._worked = True
        return answer

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin *work* beside others, until the end."""
        return self._tasks.spawn(work, name=f"tenure-rabbitmq-{name}")

    def begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Future[T]:
        """Begin *work* that is carried out to its end, also if the future is cancelled."""
        task = self._to_end.spawn(work, name=f"tenure-rabbitmq-{name}")
        task.add_done_callback(_report_bug)
        answer = asyncio.shield(task)
        answer.add_done_callback(_retrieve)
        return answer

    def translated(self, error: Exception) -> TenureError:
        """Return one of our errors for one of the connection's."""
        return self._translated(error, self.options.timeout)

    def _translated(self, error: Exception, within: float) -> TenureError:
        if isinstance(error, TimeoutError) and self.waits_for:
            return Unavailable(f"{self.url} could not do it within {within:g} s (option timeout): {self.waits_for}")
        return translate(
            error,
            self.url,
            self.address,
            within,
            worked=self._worked,
            user=self.user,
            source=self._logins.source,
            own=shown_by(self.tls),
            timeout=self.options.timeout,
        )

    def note_consumer_timeout(self, seconds: float) -> None:
        """Note the server's own limit, which it tells when it closes a channel for it."""
        self.consumer_timeout = min(self.consumer_timeout, seconds)

    async def connection(self, purpose: Purpose) -> AmqpConnection:
        """Return the connection for *purpose*, made anew if it was lost; concurrent callers make one."""
        connection = self._connections.get(purpose)
        if connection is not None:
            if connection.lost is None:
                return connection
            if purpose == "sending":
                self.body_max = None  # the server may have been configured anew
            self.begin(self._connections.pop(purpose).close(), "close")
        task = self._connecting.get(purpose)
        if task is None:
            task = self._connecting[purpose] = asyncio.ensure_future(self._connect(purpose))
            task.add_done_callback(lambda _: self._connecting.pop(purpose, None))
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _connect(self, purpose: Purpose) -> AmqpConnection:
        try:
            connection = await self._logins.let_in(partial(self._open, purpose), is_login_refused)
        except TenureError as error:  # of the source
            raise NoLogin(error) from error
        if self._closed:
            await connection.close()
            raise ConnectionLost(0, "the backend is closed")
        self._connections[purpose] = connection
        return connection

    async def _open(self, purpose: Purpose, login: Login) -> AmqpConnection:
        require_fitting(login, self._logins.source)
        self.user = login.user or ""
        within = self.options.timeout * CONNECTING_SHARE
        try:
            # A limit of its own: the caller who began it may have given up, or wait for longer.
            async with asyncio.timeout(within):
                connection = await connect(self.address, self.options, login, self.tls, purpose)
        except TimeoutError as error:
            raise NotConnectedInTime(within) from error
        if not self._logins.is_fixed:
            connection.do_while_open(renew_login(connection, self._logins, login), "login")
        return connection

    async def sending(self) -> AmqpChannel:
        """Return the channel on which messages are published.

        Raises:
            AmqpError: The server can't be reached, or is full.
        """
        while True:
            connection = await self.connection("sending")
            try:
                return await self._sending_on(connection)
            except AmqpError:
                if not connection.is_replaced or self._closed:
                    raise

    async def _sending_on(self, connection: AmqpConnection) -> AmqpChannel:
        while self._sending is None or self._sending.lost is not None or self._sending.connection is not connection:
            channel = await connection.channel(confirms=True)
            try:
                # A server that is full says so when something is published: this, which goes nowhere.
                await channel.publish("", PROBE, Properties(message_id="probe"), b"probe", mandatory=False)
            except BaseException:
                channel.begin_close()
                raise
            if connection.is_replaced:  # meanwhile: it is being closed, and nobody could tell what it takes
                raise ConnectionLost(0, "the server has refused a message")
            if self._sending is None or self._sending.lost is not None or self._sending.connection is not connection:
                self._sending = channel
                channel.on_rejected = partial(self._on_rejected, connection)
            else:
                channel.begin_close()  # another request has made one meanwhile
        return self._sending

    async def publish(self, exchange: str, routing_key: str, properties: Properties, body: bytes) -> None:
        """Return when a message is confirmed; it is published again if the server has surely not taken it."""
        while True:
            with suppress(NotTaken):
                return await (await self.sending()).publish(exchange, routing_key, properties, body)

    def _on_rejected(self, connection: AmqpConnection, error: AmqpError, sent: list[Published]) -> None:
        # The driver may send more on the channel that is over, for which the server ends the connection.
        connection.is_replaced = True
        if self._connections.get("sending") is connection:
            self.begin(self._connections.pop("sending").close(), "close")
        self.body_max = largest_body(error) or self.body_max
        self.begin(self._sort_out(error, sent), "sort-out")

    async def _sort_out(self, error: AmqpError, sent: list[Published]) -> None:
        """Tell each of the messages *sent* what has become of it, of which the server has refused one with *error*."""
        rejected: int | None = None
        try:
            async with asyncio.timeout(self.options.timeout):
                rejected = await self._rejected_of(error, sent)
        except (AmqpError, OSError):
            pass
        finally:
            for one, outcome in zip(sent, outcomes(error, sent, rejected), strict=True):
                if not one.confirmed.done():
                    one.confirmed.set_exception(outcome)
                    one.confirmed.exception()  # nobody may ask for it

    async def _rejected_of(self, error: AmqpError, sent: list[Published]) -> int | None:
        while True:
            connection = await self.connection("sending")
            try:
                return await find_rejected(error, sent, partial(connection.channel, confirms=True))
            except AmqpError:
                if not connection.is_replaced or self._closed:
                    raise

    async def receiving(self) -> AmqpChannel:
        """Return a new channel, to receive messages on."""
        return await (await self.connection("receiving")).channel()

    async def has_queue(self, name: str) -> bool:
        """Return whether there is a queue of RabbitMQ's *name*."""
        if not is_queue(name):
            return False
        with missing_allowed:
            await self.request(spec.Queue.Declare(0, name, passive=True))
            return True
        return False

    async def request(self, *methods: Any) -> list[Any]:
        """Return the answers to *methods*, on a channel of their own: a refusal ends the channel."""
        channel = self._idle.pop() if self._idle else None
        if channel is None or channel.lost is not None:
            channel = await (await self.connection("receiving")).channel()
        answers = [channel.request(method) for method in methods]
        try:
            found = [await answer for answer in answers]
        except BaseException:
            channel.begin_close()
            raise
        if channel.lost is None and len(self._idle) < IDLE_MAX:
            self._idle.append(channel)
        else:
            channel.begin_close()
        return found

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        await close_in_order(
            self._tasks.cancel_all,
            self._wait_for_last,
            self._to_end.cancel_all,
            self._stop_connecting,
            self._close_connections,
        )

    async def _wait_for_last(self) -> None:
        if to_end := list(self._to_end):
            await asyncio.wait(to_end, timeout=CLOSE_WITHIN)

    async def _stop_connecting(self) -> None:
        connecting = list(self._connecting.values())
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)

    async def _close_connections(self) -> None:
        await close_together(*(connection.close for connection in self._connections.values()))
        self._connections.clear()


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Take note of an error for which nobody may ask."""
    if not answer.cancelled():
        answer.exception()


def _report_bug(task: asyncio.Task[Any]) -> None:
    """Report an error that is neither the server's nor the caller's, also if nobody asks for it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, (*FAILURES, TenureError)):
        task.get_loop().call_exception_handler(
            {"message": f"{task.get_name()} failed", "exception": error, "task": task}
        )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
