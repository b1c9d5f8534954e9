"""All that is used of ``azure-servicebus`` beyond its public names. No other module of tenure names any of it.

The library connects, logs in, keeps the connection alive, attaches links, and counts and cuts the transfers that are
sent. What comes on a link, and every byte of messages, verdicts and requests, is ours. So this is little; a version
that differs in it is refused when a namespace is opened (``check_library``), before anything is sent. See
docs/decisions/0037-service-bus-private-parts.md.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, cast

import azure.servicebus

from tenure._backends.servicebus import amqp
from tenure._backends.servicebus.codec import Transfer, text_of
from tenure.errors import ConfigError

TESTED = "7.15"
"""The newest minor version with which all of it was tested."""

INSTALLED = azure.servicebus.__version__


def _refuse(what: str) -> NoReturn:
    """Refuse the installed version of the library.

    Raises:
        ConfigError: Always; it says how to get one that fits.
    """
    raise ConfigError(
        f"azure-servicebus {INSTALLED} doesn't fit: {what}; tenure was tested with {TESTED}: "
        f"run: pip install 'azure-servicebus~={TESTED}.0'"
    ) from None


try:
    from azure.servicebus._pyamqp.constants import (
        CbsAuthState,
        CbsState,
        LinkDeliverySettleReason,
        LinkState,
        SessionTransferState,
    )
    from azure.servicebus._pyamqp.error import AMQPException, AuthenticationException, TokenAuthFailure
    from azure.servicebus.aio._async_utils import create_authentication
except ImportError as error:
    _refuse(str(error))

__all__ = [
    "INSTALLED",
    "TESTED",
    "AMQPException",
    "AuthenticationException",
    "Link",
    "TokenAuthFailure",
    "Wire",
    "check_library",
]

IDLE = 30.0
"""Seconds without a frame after which a connection is given up; the service is told, and sends one in time."""


# --- what it must have -------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A function of the library, and how it is called here, or how it calls what is put in its place."""

    module: str
    name: str
    arguments: int = 0
    keywords: Sequence[str] = ()


_AIO = "azure.servicebus._pyamqp.aio."
CALLS = (
    Call("azure.servicebus.aio", "ServiceBusSender._create_handler", 1),
    Call("azure.servicebus.aio", "ServiceBusReceiver._create_handler", 1),
    Call("azure.servicebus.aio._async_utils", "create_authentication", 1),
    Call(f"{_AIO}_cbs_async", "CBSAuthenticator.handle_token"),
    Call(f"{_AIO}_client_async", "AMQPClientAsync.open_async"),
    Call(f"{_AIO}_client_async", "AMQPClientAsync.auth_complete_async"),
    Call(f"{_AIO}_client_async", "AMQPClientAsync.client_ready_async"),
    Call(f"{_AIO}_client_async", "AMQPClientAsync.close_async"),
    Call(f"{_AIO}_connection_async", "Connection.listen", 0, ("wait",)),
    Call(f"{_AIO}_session_async", "Session.create_sender_link", 1, ("source_address", "on_link_state_change")),
    Call(f"{_AIO}_session_async", "Session.create_receiver_link", 1, ("target_address", "on_link_state_change")),
    Call(f"{_AIO}_session_async", "Session._outgoing_transfer", 2),
    Call(f"{_AIO}_receiver_async", "ReceiverLink.attach"),
    Call(f"{_AIO}_receiver_async", "ReceiverLink.get_state"),
    Call(f"{_AIO}_receiver_async", "ReceiverLink.flow", 0, ("link_credit", "drain")),
    Call(f"{_AIO}_receiver_async", "ReceiverLink._incoming_transfer", 1),
    Call(f"{_AIO}_receiver_async", "ReceiverLink._incoming_flow", 1),
    Call(f"{_AIO}_receiver_async", "ReceiverLink._incoming_disposition", 1),
    Call(f"{_AIO}_sender_async", "SenderLink.attach"),
    Call(f"{_AIO}_sender_async", "SenderLink.get_state"),
    Call(f"{_AIO}_sender_async", "SenderLink.send_transfer", 1, ("on_send_complete", "timeout")),
    Call(f"{_AIO}_sender_async", "SenderLink._outgoing_transfer", 1),
)
"""The functions that are called, or replaced."""

CONSTANTS: Mapping[Any, Sequence[str]] = {
    CbsAuthState: ("REFRESH_REQUIRED",),
    CbsState: ("OPEN",),
    LinkDeliverySettleReason: ("DISPOSITION_RECEIVED",),
    LinkState: ("ATTACHED", "DETACHED", "ERROR"),
    SessionTransferState: ("OKAY",),
}

OWNER = ("_handler", "_running")
CLIENT = ("_connection", "_session", "_cbs_authenticator", "_keep_alive_thread", "_idle_timeout")
CONNECTION = ("_transport", "_last_frame_received_time")
SESSION = ("channel",)
LINK = ("name", "handle", "delivery_count", "current_link_credit", "remote_max_message_size", "remote_properties")
LOGIN = ("_expires_on", "auth_state", "state")
"""The attributes of objects that are read or set, which only an object has."""


def check_library() -> None:
    """Refuse a version of the library that differs in what is used here.

    Raises:
        ConfigError: It does.
    """
    for call in CALLS:
        try:
            found: Any = importlib.import_module(call.module)
            for part in call.name.split("."):
                found = getattr(found, part)
            inspect.signature(found).bind(
                *[None] * (call.arguments + ("." in call.name)), **dict.fromkeys(call.keywords)
            )
        except (ImportError, AttributeError):
            _refuse(f"it has no {call.name}")
        except TypeError as error:
            _refuse(f"its {call.name} takes other arguments ({error})")
    for kind, names in CONSTANTS.items():
        for name in names:
            if not hasattr(kind, name):
                _refuse(f"it has no {kind.__name__}.{name}")


def _check(one: Any, names: Sequence[str]) -> None:
    for name in names:
        if not hasattr(one, name):
            _refuse(f"its {type(one).__name__} has no {name}")


# --- links -------------------------------------------------------------------------------------------------------


class Link:
    """A link that the library attaches, and whose frames are handled here."""

    def __init__(self, link: Any) -> None:
        _check(link, LINK)
        self._link = link

    @property
    def name(self) -> str:
        """Its name, by which the service knows it, too."""
        return cast(str, self._link.name)

    @property
    def message_max(self) -> int:
        """The largest message in bytes that the service takes, 0 if it doesn't say."""
        return self._link.remote_max_message_size or 0

    @property
    def properties(self) -> Mapping[str, Any]:
        """What the service has said of the link."""
        return {text_of(name): value for name, value in (self._link.remote_properties or {}).items()}

    @property
    def count(self) -> int:
        """The number of messages that have passed, as the two sides count them."""
        return cast(int, self._link.delivery_count)

    @count.setter
    def count(self, count: int) -> None:
        self._link.delivery_count = count

    @property
    def credit(self) -> int:
        """For how many messages the receiver has given leave."""
        return cast(int, self._link.current_link_credit)

    @credit.setter
    def credit(self, credit: int) -> None:
        self._link.current_link_credit = credit

    def is_attached(self) -> bool | None:
        """Return whether it is; None before the service has answered.

        Raises:
            AMQPException: It was refused, or detached, with this reason.
        """
        state = self._link.get_state()
        if state is LinkState.ATTACHED:
            return True
        return False if state in (LinkState.DETACHED, LinkState.ERROR) else None

    async def attach(self) -> None:
        """Ask the service to attach it."""
        await self._link.attach()

    async def give_leave(self, count: int, *, drain: bool = False) -> None:
        """Give leave for *count* messages; with *drain*, the service takes back at once what it has none for."""
        await self._link.flow(link_credit=count, drain=drain)

    def on_transfer(self, handle: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
        """Call *handle* with the fields of each frame of a message, in the order of the protocol, and its payload.

        The library's own function fails with the connection at what it can't read.
        """
        self._link._incoming_transfer = handle

    def on_flow(self, handle: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
        """Call *handle* with the fields of each frame by which the service counts."""
        self._link._incoming_flow = handle

    def on_disposition(self, handle: Callable[[Sequence[Any]], Awaitable[None]]) -> None:
        """Call *handle* with the fields of each frame about verdicts."""
        self._link._incoming_disposition = handle


class SendingLink(Link):
    """A link on which messages are sent."""

    def __init__(self, link: Any, session: Any) -> None:
        super().__init__(link)
        self._session = session
        self._turn = asyncio.Lock()
        """Held while a transfer is written: a link numbers it before, and counts on after it."""
        link._outgoing_transfer = self._write

    async def send(self, transfer: Transfer, settled: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Send a message, or several; *settled* gets the state that the service answers, or None if the link is gone.

        It returns when the message is written, or waits for leave.
        """

        async def on_settled(reason: Any, state: Any) -> None:
            settled(state if reason is LinkDeliverySettleReason.DISPOSITION_RECEIVED else None)

        async with self._turn:  # a large one takes several frames
            await self._link.send_transfer(transfer, on_send_complete=on_settled, timeout=0)

    async def _write(self, delivery: Any) -> bool:
        """Write a transfer as it is: the library would encode a message of its own."""
        transfer: Transfer = delivery.message
        number = self.count + 1
        fields = ("rcv_settle_mode", "state", "resume", "aborted", "batchable")
        delivery.frame = {
            **dict.fromkeys(fields),
            "handle": self._link.handle,
            "delivery_tag": struct.pack(">I", number % 2**32),
            "message_format": transfer.format,
            "settled": False,
            "more": False,
            "payload": transfer.payload,
        }
        await self._session._outgoing_transfer(delivery, None)
        if delivery.transfer_state == SessionTransferState.OKAY:
            self.count = number
            self.credit -= 1
            delivery.sent = True
        return False  # it is not settled before the answer


# --- connections -------------------------------------------------------------------------------------------------


class Wire:
    """A connection of the library, which it opened for a receiver, a sender, or requests alone."""

    def __init__(self, owner: Any, broken: Callable[[], None]) -> None:
        """*broken* is called when a transfer was cut off: then the connection can't be used any more."""
        self._owner = owner
        self._broken = broken
        self._client: Any = owner._handler
        _check(self._client, CLIENT)
        self._connection: Any = self._client._connection
        _check(self._connection, CONNECTION)
        self._session: Any = self._client._session
        _check(self._session, SESSION)
        self._login: Any = self._client._cbs_authenticator
        if self._login is not None:
            _check(self._login, LOGIN)
        self._session._outgoing_transfer = self._one_at_a_time(self._session._outgoing_transfer)
        _stop_keeping(self._client)
        if hasattr(self._connection._transport, "writer"):
            self._connection._transport.write = self.write
        link: Any = getattr(self._client, "_link", None)
        self.link: Link | None = None
        """The link of the receiver or sender; None if there is none."""
        if link is not None:
            self.link = SendingLink(link, self._session) if hasattr(link, "send_transfer") else Link(link)

    @staticmethod
    async def attach(owner: Any, *, linked: bool) -> None:
        """Connect, log in and attach the link of a receiver or a sender; or none, for requests alone.

        The library's own way sleeps for a twentieth of a second after every frame.
        """
        owner._create_handler(await cast(Any, create_authentication)(owner))
        _check(owner, OWNER)
        owner._handler._idle_timeout = IDLE
        try:
            await owner._handler.open_async()
            if not linked:
                while not await owner._handler.auth_complete_async():
                    pass
                owner._running = True
                return
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

    # --- the connection ---

    async def read(self, within: float) -> None:
        """Read what comes within *within* seconds, and show the service that this side is alive."""
        await self._connection.listen(wait=within)

    async def write(self, data: bytes) -> None:
        """Write without waiting for the task that reads: the library has one lock for both."""
        writer = self._writer
        if writer is None:
            raise OSError("Connection has already been closed")
        writer.write(data)
        await writer.drain()

    @property
    def last_frame_at(self) -> float:
        """When the last frame came, by the wall clock."""
        return self._connection._last_frame_received_time or 0.0

    def end(self) -> None:
        """Close the socket, after what was written: the service delivers nothing here any more."""
        if (writer := self._writer) is not None:
            writer.close()

    async def close(self) -> None:
        """Close the connection; its socket is closed also if this is cut off."""
        try:
            with suppress(Exception):
                async with asyncio.timeout(2.0):
                    await self._owner.close()
        finally:
            _drop(self._connection)

    @property
    def _writer(self) -> asyncio.StreamWriter | None:
        return _writer_of(self._connection)

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
                    self._broken()
                    raise

        return write

    # --- the login ---

    @property
    def login_ends_in(self) -> float | None:
        """In how many seconds the login ends; None if there is none."""
        return None if self._login is None else self._login._expires_on - time.time()

    @property
    def can_log_in(self) -> bool:
        """Whether the link for logins stands."""
        return self._login.state is CbsState.OPEN

    async def log_in(self) -> None:
        """Log in anew if the login ends soon. What fails is tried again the next time."""
        try:
            await self._login.handle_token()
        except Exception:
            self._login.auth_state = CbsAuthState.REFRESH_REQUIRED
            raise

    # --- links ---

    @property
    def session(self) -> tuple[str, float] | None:
        """The name of the session that the link has locked, and until when."""
        session = self._owner.session
        if session is None:
            return None
        until = session.locked_until_utc
        return session.session_id, 0.0 if until is None else until.timestamp()

    def pair(self, node: str, changed: Callable[[], None]) -> tuple[SendingLink, Link]:
        """Return links to a node and from it, not attached yet; *changed* is called when the state of one changes."""

        async def on_change(before: Any, after: Any) -> None:
            changed()

        modes = {"send_settle_mode": 0, "rcv_settle_mode": 0, "on_link_state_change": on_change}
        to = self._session.create_sender_link(node, source_address=node, **modes)
        back = self._session.create_receiver_link(node, target_address=node, on_transfer=None, **modes)
        return SendingLink(to, self._session), Link(back)

    async def settle(self, delivery: int, state: bytes, *, settled: bool = False) -> None:
        """Write the verdict on a delivery; the service answers unless it is *settled* with that."""
        parts = (amqp.encoded(True), amqp.uint(delivery), amqp.NULL, amqp.encoded(settled), state)
        await self.write(amqp.frame(self._session.channel, amqp.described(0x15, parts)))


def _lacks_session(owner: Any) -> bool:
    session = getattr(owner, "session", None)
    return session is not None and session.locked_until_utc is None


def _stop_keeping(client: Any) -> None:
    """Stop the task of the library that reads now and then: here, one task reads all the time."""
    if (keeping := client._keep_alive_thread) is not None:
        keeping.cancel()
        client._keep_alive_thread = None


async def _abort(client: Any) -> None:
    """Close a connection that was not opened completely."""
    connection = client._connection
    _stop_keeping(client)
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
