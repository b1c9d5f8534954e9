"""Connections of the client library, each read by one task: what its public methods can't do, done with its own parts.

``azure-servicebus`` reads a connection only while a method runs on it. So two methods on one connection wait for each
other for up to 0.2 s; ``receive_messages`` leaves credit behind, for which the service locks messages that nobody
receives; it can't hand a message back uncounted, or set properties with a verdict; and each verdict takes a round trip
of its own. All of that is in the protocol, and in the library's own links.

So the library makes senders and receivers by its public methods, and its own parts connect, log in and attach the link;
from then on the link is used here. This module, ``links``, ``codec``, and ``client`` for one method, are the only ones
that touch names of the library with an underscore. ``check_library`` refuses a version that lacks one of the main ones.
See docs/decisions/0024-service-bus-links.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import azure.servicebus
from azure.core.exceptions import AzureError
from azure.servicebus._pyamqp.aio._cbs_async import CBSAuthenticator
from azure.servicebus._pyamqp.aio._client_async import AMQPClientAsync
from azure.servicebus._pyamqp.aio._connection_async import Connection as AmqpConnection
from azure.servicebus._pyamqp.aio._management_link_async import ManagementLink
from azure.servicebus._pyamqp.aio._receiver_async import ReceiverLink
from azure.servicebus._pyamqp.aio._sender_async import SenderLink
from azure.servicebus._pyamqp.aio._session_async import Session
from azure.servicebus._pyamqp.constants import CbsAuthState, CbsState, LinkState, ManagementOpenResult
from azure.servicebus._pyamqp.error import AMQPError, AMQPException, AuthenticationException, TokenAuthFailure
from azure.servicebus._pyamqp.message import Message, Properties
from azure.servicebus._pyamqp.outcomes import Accepted, Modified, Rejected, Released
from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.aio._async_utils import create_authentication

from tenure._backends.servicebus.codec import text_of, uint_of
from tenure.errors import ConfigError

LISTEN = 1.0
"""Seconds after which a connection without traffic looks whether it must show that it is alive."""

LOGIN_EVERY = 10.0
"""Seconds between two looks whether the login ends soon."""

IDLE = 30.0
"""Seconds without a frame after which a connection is given up; the service is told, and sends one in time."""

SILENCE = 10.0
"""Seconds without a frame while something is asked, after which a connection is given up."""

NOT_FOUND = "amqp:not-found"


class Refused(Exception):
    """The service's answer is an error: its AMQP condition, and its text."""

    def __init__(self, condition: str, text: str) -> None:
        super().__init__(f"{text} ({condition})")
        self.condition = condition
        self.text = text


class Disconnected(Exception):
    """The connection or the link is gone; what was asked on it may have been done or not."""


FAILURES = (Refused, Disconnected, AzureError, AMQPException, OSError, ValueError)  # a TimeoutError is an OSError
"""What a request may fail with, here and in the library, which raises a ``ValueError`` where something is closed."""


class Outcome(NamedTuple):
    """A verdict in the words of AMQP."""

    state: Any
    name: str


ACCEPTED = Outcome(Accepted(), "accepted")
RELEASED = Outcome(Released(), "released")


def modified(changes: Mapping[str, object], *, undeliverable: bool = False) -> Outcome:
    """Return the outcome that abandons, or defers if it is *undeliverable* here; with *changes* of properties."""
    return Outcome(Modified(True, undeliverable, dict(changes) or None), "modified")


def rejected(reason: str, description: str, changes: Mapping[str, object]) -> Outcome:
    """Return the outcome that dead-letters, with *changes* of properties."""
    info = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description, **changes}
    return Outcome(Rejected(AMQPError("com.microsoft:dead-letter", description, info)), "rejected")


def check_library() -> None:
    """Refuse a version of the library whose links differ from what this module knows.

    Raises:
        ConfigError: Something is missing.
    """
    needed = (
        (AmqpConnection, ("listen", "open", "create_session")),
        (AMQPClientAsync, ("open_async", "close_async", "client_ready_async")),
        (CBSAuthenticator, ("handle_token",)),
        (ManagementLink, ("open", "execute_operation", "cancel_operation")),
        (ReceiverLink, ("flow", "get_state", "_incoming_flow", "_incoming_disposition", "_incoming_transfer")),
        (SenderLink, ("send_transfer", "get_state", "_outgoing_transfer")),
        (ServiceBusClient, ("_create_session_browser",)),
        (Session, ("create_request_response_link_pair", "_outgoing_disposition", "_outgoing_transfer")),
    )
    for owner, names in needed:
        for name in names:
            if not hasattr(owner, name):
                raise ConfigError(
                    f"azure-servicebus {azure.servicebus.__version__} has no {owner.__name__}.{name}, which is needed; "
                    "install the version that was tested: pip install 'azure-servicebus~=7.15'"
                )


async def attach(owner: Any) -> None:
    """Connect, log in and attach the link of a receiver or a sender, or none for an owner that only sends requests.

    The library's own way sleeps for a twentieth of a second after every frame.
    """
    make: Any = create_authentication
    owner._create_handler(await make(owner))
    owner._handler._idle_timeout = IDLE
    try:
        await owner._handler.open_async()
        # A link that is refused is attached first, and detached at once: one with a session has none then.
        while not await owner._handler.client_ready_async():
            pass
        while _lacks_session(owner):
            await owner._handler._connection.listen(wait=0.2)
            owner._handler._link.get_state()  # raises the error of the link
    except BaseException:
        await _abort(owner._handler)
        raise
    owner._running = True


async def _abort(client: Any) -> None:
    """Close a connection that was not opened completely."""
    connection = client._connection
    if (keeping := client._keep_alive_thread) is not None:
        keeping.cancel()
        client._keep_alive_thread = None
    try:
        with suppress(Exception):
            async with asyncio.timeout(1.0):
                await client.close_async()
    finally:
        _drop(connection)


def _drop(connection: Any) -> None:
    """Close the socket of a connection at once, if the library hasn't: it leaves that out when its close is cut off."""
    if (writer := _writer_of(connection)) is not None:
        writer.transport.abort()


def _writer_of(connection: Any) -> asyncio.StreamWriter | None:
    writer: asyncio.StreamWriter | None = getattr(getattr(connection, "_transport", None), "writer", None)
    return writer


def _lacks_session(owner: Any) -> bool:
    session = getattr(owner, "session", None)
    return session is not None and session.locked_until_utc is None


class Connection:
    """A connection of the library, which opened it for a receiver, a sender, or requests alone."""

    def __init__(self, owner: Any, clock: Callable[[], float]) -> None:
        self._owner = owner
        self._now = clock
        self._client: Any = owner._handler
        self._amqp: Any = self._client._connection
        self._session: Any = self._client._session
        self._link: Any = getattr(self._client, "_link", None)
        self.lost: Exception | None = None
        """Why it can't be used any more."""
        self._waiting: set[asyncio.Future[Any]] = set()
        self._asked: set[asyncio.Future[Any]] = set()
        """Those of them that are questions: the service certainly answers."""
        self._asked_since = 0.0
        """When the first question was asked after the last frame."""
        self._login: Any = self._client._cbs_authenticator
        self._transfers = asyncio.Lock()
        """Held while a transfer is written: a link numbers it before, and counts on after it."""
        self._session._outgoing_transfer = self._one_at_a_time(self._session._outgoing_transfer)
        self.silence_max = SILENCE
        """Seconds without a frame while something is asked, after which it is given up."""
        self._logging_in: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._management: dict[str, Any] = {}
        self._management_lock = asyncio.Lock()
        self._next_login = time.monotonic() + LOGIN_EVERY
        if (keeping := self._client._keep_alive_thread) is not None:
            keeping.cancel()  # it reads now and then; here one task reads all the time
            self._client._keep_alive_thread = None
        transport = self._amqp._transport
        if hasattr(transport, "writer"):
            transport.write = _write_to(transport)

    def start(self) -> None:
        """Begin to read."""
        self._reading = asyncio.ensure_future(self._read())

    async def close(self) -> None:
        """Stop reading, and close the connection; what waits for it gets ``Disconnected``."""
        self._lose(Disconnected("the connection was closed"))
        try:
            if tasks := [task for task in (self._reading, self._logging_in) if task is not None]:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            with suppress(Exception):
                async with asyncio.timeout(2.0):
                    await self._owner.close()
        finally:
            _drop(self._amqp)

    async def _read(self) -> None:
        try:
            while self.lost is None:
                if time.monotonic() >= self._next_login and (self._logging_in is None or self._logging_in.done()):
                    self._next_login = time.monotonic() + LOGIN_EVERY
                    self._logging_in = asyncio.ensure_future(self._keep_login())
                await self._amqp.listen(wait=LISTEN)
                self._check()
        except Exception as error:
            self._give_up(error)

    def _one_at_a_time(self, transfer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return the library's function that writes a transfer, so that none is written, or numbered, within another.

        One that was cut off leaves the session without a number that the service has: then the connection is over.
        """
        turn = asyncio.Lock()

        async def write(*args: Any) -> Any:
            async with turn:
                try:
                    return await transfer(*args)
                except BaseException:
                    self._give_up(Disconnected("a transfer was cut off"))
                    raise

        return write

    def _give_up(self, error: Exception) -> None:
        self._lose(error)
        # Else the service would go on to deliver here what nobody reads, until the next use finds out.
        if (writer := _writer_of(self._amqp)) is not None:
            writer.close()

    async def _keep_login(self) -> None:
        """Log in anew before the login ends. A failure is no loss before that: the next look tries again."""
        if self._login is None:
            return
        left = self._login._expires_on - time.time()
        try:
            await self._login.handle_token()
        except Exception as error:
            if left <= 0:
                self._give_up(error)
            else:
                self._login.auth_state = CbsAuthState.REFRESH_REQUIRED
        else:
            if self._login.state is not CbsState.OPEN and left < 3 * LOGIN_EVERY:
                self._give_up(Disconnected("the link for the login is gone"))

    def _check(self) -> None:
        """Raise an exception if the link is detached, or if the service is silent although it was asked."""
        if self._asked and time.time() - max(self._asked_since, self._last_frame) > self.silence_max:
            raise Disconnected(f"the service has sent nothing for {self.silence_max:g} s")
        if self._link is None:
            return
        state = self._link.get_state()  # raises the error of the link
        if state in (LinkState.DETACHED, LinkState.ERROR):
            raise Disconnected("the link was detached")

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        self.lost = error
        for future in self._waiting:
            if not future.done():
                future.set_exception(readable(error))
                future.exception()  # it was looked at, if nobody awaits it any more
        self._waiting.clear()
        self._ended()

    def _ended(self) -> None:
        """Note that it is lost; for subclasses."""

    @property
    def _last_frame(self) -> float:
        return self._amqp._last_frame_received_time or 0.0

    def _future(self, *, is_question: bool = True) -> asyncio.Future[Any]:
        """Return a future that fails when the connection is lost."""
        self.check_alive()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        if is_question:
            # The time runs from the first one, also if that was given up: a caller may have less patience.
            if self._last_frame >= self._asked_since:
                self._asked_since = time.time()
            self._asked.add(future)
            future.add_done_callback(self._asked.discard)
        return future

    def check_alive(self) -> None:
        """Raise the reason why it can't be used, if it can't."""
        if self.lost is not None:
            raise readable(self.lost)

    # --- requests to the entity's management node ---

    async def request(self, node: str, operation: str, body: Mapping[str, Any], *, timeout: float) -> Any:
        """Ask the management *node* of the entity; return the value of its answer, None if there is none.

        Raises:
            Refused: The answer is an error.
        """
        link = await self._management_of(node)
        answer = self._future()
        try:
            return await self._ask(link, node, operation, body, timeout, answer)
        finally:
            answer.cancel()  # it may have been given up before it was awaited

    async def _ask(
        self,
        link: Any,
        node: str,
        operation: str,
        body: Mapping[str, Any],
        timeout: float,
        answer: asyncio.Future[Any],
    ) -> Any:

        async def answered(result: Any, status: Any, description: Any, message: Any, error: Any = None) -> None:
            if not answer.done():
                answer.set_result((status, description, message, error))

        properties = {
            "operation": f"com.microsoft:{operation}",
            "com.microsoft:server-timeout": uint_of(int(timeout * 1_000)),
        }
        if self._link is not None:
            properties["associated-link-name"] = self._link.name
        message = Message(value=dict(body), properties=Properties(reply_to=node), application_properties=properties)
        async with self._transfers:
            pending = await link.execute_operation(
                message, answered, operation=f"com.microsoft:{operation}", type="entity-mgmt", timeout=timeout
            )
        try:
            status, description, message, error = await answer
        finally:
            link.cancel_operation(pending)
        if isinstance(error, Exception):
            raise readable(error)
        if status in (200, 202):
            return message.value
        if status == 204:
            return None
        condition = (message.application_properties or {}).get(b"errorCondition")
        raise Refused(text_of(condition) or f"status {status}", text_of(description))

    async def _why_refused(self, link: Any) -> Exception:
        """Return the error that follows a link that was refused."""
        for _ in range(100):
            error = link._request_link._error or link._response_link._error
            if error is not None:
                return readable(error)
            await asyncio.sleep(0.01)
        return Disconnected("the management link was refused")

    async def _management_of(self, node: str) -> Any:
        async with self._management_lock:
            link = self._management.get(node)
            if link is not None:
                return link
            opened = self._future()

            async def is_open(result: ManagementOpenResult) -> None:
                if not opened.done():
                    opened.set_result(result)

            async def failed() -> None:
                self._management.pop(node, None)
                self._give_up(Disconnected("the management link was detached"))

            link = self._session.create_request_response_link_pair(
                endpoint=node, on_amqp_management_open_complete=is_open, on_amqp_management_error=failed
            )
            try:
                await link.open()
                if await opened is not ManagementOpenResult.OK:
                    raise await self._why_refused(link)
            finally:
                opened.cancel()
            self._management[node] = link
            return link


def _write_to(transport: Any) -> Callable[[bytes], Awaitable[None]]:
    """Return a function that writes without waiting for the task that reads: the library has one lock for both."""

    async def write(data: bytes) -> None:
        writer = transport.writer
        if writer is None:
            raise OSError("Connection has already been closed")
        writer.write(data)
        await writer.drain()

    return write


def readable(error: Exception) -> Exception:
    """Return an error of the library's inner parts as one of ours.

    They also raise errors of any kind on frames that they don't expect: then the connection is as good as lost.
    """
    match error:
        case Refused() | Disconnected() | OSError() | AzureError():
            return error
        case TokenAuthFailure(status_code=404):  # an entity that is missing is refused at the login for it
            return Refused(NOT_FOUND, text_of(error.status_description))
        case AuthenticationException():
            return Refused("com.microsoft:auth-failed", text_of(error.description))
        case AMQPException():
            condition = text_of(getattr(error.condition, "value", error.condition))
            if condition.startswith(_CONNECTION):
                return Disconnected(text_of(error.description) or condition)
            return Refused(condition, text_of(error.description))
    return Disconnected(f"{type(error).__name__}: {error}")


_CONNECTION = ("amqp:socket", "amqp:connection", "amqp:link:detach", "amqp:client-error", "amqp:unknown")
"""The conditions, by their beginnings, of a connection or a link that is gone."""
