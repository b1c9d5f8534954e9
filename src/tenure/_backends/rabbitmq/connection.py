"""A connection to RabbitMQ in AMQP 0-9-1: its channels, their requests, confirms and deliveries. Frames are pamqp's.

House rules:

- What is written is written at once, in the order of the calls: nothing here waits before it writes.
- A request that was given up costs nothing: its answer is dropped when it comes. (A client that closes the channel then
  loses the locks of every other message on it.)
- A delivery costs no task: it is handed over from inside ``data_received``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pamqp import commands, frame
from pamqp.base import Frame
from pamqp.commands import Basic, Channel, Confirm
from pamqp.commands import Connection as ConnectionClass
from pamqp.exceptions import PAMQPException
from pamqp.header import ContentHeader, ProtocolHeader
from pamqp.heartbeat import Heartbeat

from tenure._backends.rabbitmq.address import Address, Options, tls_of

Properties = commands.Basic.Properties

SILENCE = 1.25
"""How many times the heartbeat's interval a server may be silent. It sends two in one interval. The server gives up a
client after two to three intervals, so this process trusts no lock that the server has given to another."""

WRITE_HIGH = 4 * 2**20
"""Bytes that wait to be sent before a batch pauses."""

_HEADER = struct.Struct(">BHI")
_METHOD = struct.Struct(">HH")
_TAG = struct.Struct(">Q")
_ACK = struct.Struct(">BHIHHQBB")
_REQUEUE = struct.Struct(">BHIHHQBB")
_BASIC_DELIVER = (60, 60)
_BASIC_ACK = (60, 80)
_END = 0xCE


class AmqpError(Exception):
    """The server, or the connection to it, refused or failed.

    ``code`` is AMQP's reply code; 0 if the connection was lost without one.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})" if code else text)
        self.code = code
        self.text = text


class ConnectionLost(AmqpError):
    """The connection is over, and everything that was on it."""


class ChannelLost(AmqpError):
    """The server has closed the channel; or its connection is over."""


class Returned(Exception):
    """No queue has the name to which a message was published."""


class NotConfirmed(Exception):
    """The server did not take responsibility for a message."""


@dataclass(slots=True, eq=False)
class Delivered:
    """A message as it came, unacknowledged on its channel."""

    channel: AmqpChannel
    tag: int
    consumer: str
    redelivered: bool
    properties: Properties
    body: bytes
    at: float
    """When it came, by the loop's clock."""


class _Request(NamedTuple):
    answered_by: frozenset[str]
    answer: asyncio.Future[Any]


class AmqpChannel:
    """A channel. Made by :meth:`AmqpConnection.channel`."""

    def __init__(self, connection: AmqpConnection, number: int) -> None:
        self.connection = connection
        self.lost: AmqpError | None = None
        """Why it is over; None while it can be used."""
        self.on_lost: Callable[[AmqpError], None] = lambda _: None
        self.consumers: dict[str, Callable[[Delivered], None]] = {}
        self.on_cancelled: Callable[[str], None] = lambda _: None
        """Called with a consumer that the server has ended, as its queue is gone."""
        self._number = number
        self._waiting: deque[_Request] = deque()
        self._published = 0
        self._unconfirmed: dict[int, tuple[int, asyncio.Future[None]]] = {}
        self._returned: set[int] = set()
        self._method: Any = None  # whose content is being read
        self._content_header: ContentHeader | None = None
        self._parts: list[bytes] = []
        self._missing = 0

    # --- requests ---

    def request(self, method: Frame) -> asyncio.Future[Any]:
        """Send a request, and return its answer when it comes.

        Answers to requests of one kind come in their order; those of consumers may be overtaken by those of others.
        """
        if self.lost is not None:
            raise self.lost
        answer: asyncio.Future[Any] = self.connection.loop.create_future()
        self._waiting.append(_Request(frozenset(method.valid_responses), answer))
        self.connection.write(frame.marshal(method, self._number))
        return answer

    async def close(self) -> None:
        """Close it; the messages that are unacknowledged on it are delivered again."""
        if self.lost is None:
            answer = self.request(Channel.Close(200, "", 0, 0))
            self.end(ChannelLost(0, "the channel is closed"), keep=answer)
            await answer

    def begin_close(self) -> None:
        """Close it, without waiting for the answer."""
        if self.lost is None:
            self.request(Channel.Close(200, "", 0, 0)).add_done_callback(_ignore)
            self.end(ChannelLost(0, "the channel is closed"), keep=self._waiting[-1].answer)

    # --- publishing ---

    def publish(
        self,
        exchange: str,
        routing_key: str,
        properties: Properties,
        body: bytes,
        *,
        key: int = 0,
    ) -> asyncio.Future[None]:
        """Publish a message; the future is done when it is confirmed, or raises why it isn't.

        Args:
            exchange: Where to.
            routing_key: To be routed by.
            properties: With a header ``x-tenure-sequence`` that equals *key*.
            body: The content.
            key: Tells a message that comes back as it can't be routed; 0: it is dropped then.
        """
        if self.lost is not None:
            raise self.lost
        # Built before anything is counted, as a value may not fit into its field.
        size = self.connection.frame_max - 8
        head = Basic.Publish(0, exchange, routing_key, mandatory=bool(key))
        data = [
            frame.marshal(head, self._number),
            frame.marshal(ContentHeader(0, len(body), properties), self._number),
        ]
        if len(data[1]) > self.connection.frame_max:
            raise NotConfirmed(f"the properties of a message ({len(data[1]):,} bytes) don't fit into a frame")
        for start in range(0, len(body), size):
            part = body[start : start + size]
            data += (_HEADER.pack(3, self._number, len(part)), part, b"\xce")
        self._published += 1
        confirmed: asyncio.Future[None] = self.connection.loop.create_future()
        self._unconfirmed[self._published] = key, confirmed
        self.connection.write(b"".join(data))
        return confirmed

    @property
    def unconfirmed(self) -> int:
        """How many messages were published and not confirmed yet."""
        return len(self._unconfirmed)

    # --- verdicts ---

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Acknowledge a delivery; with *multiple*, all up to it. There is no answer: a request behind it has one."""
        if self.lost is not None:
            raise self.lost
        self.connection.write(_ACK.pack(1, self._number, 13, 60, 80, tag, multiple, _END))

    def reject(self, tag: int) -> None:
        """Let a delivery be delivered again, and count this one. There is no answer."""
        if self.lost is not None:
            raise self.lost
        self.connection.write(_REQUEUE.pack(1, self._number, 13, 60, 90, tag, 1, _END))

    # --- called by the connection ---

    def received_method(self, method: Frame) -> None:
        """Take in a method that came on this channel."""
        match method:
            case Basic.Return() | Basic.GetOk():
                self._method = method
            case Basic.Nack():
                self._confirm(method.delivery_tag or 0, bool(method.multiple), NotConfirmed("the queue refuses it"))
            case Basic.Cancel():
                tag = method.consumer_tag or ""
                self.consumers.pop(tag, None)
                self.on_cancelled(tag)
            case Channel.Close():
                self.connection.write(frame.marshal(Channel.CloseOk(), self._number))
                self.end(ChannelLost(method.reply_code or 0, method.reply_text or ""))
                self.connection.forget(self._number)
            case Channel.CloseOk():
                self._answer(method.name, method)
                self.connection.forget(self._number)
            case Channel.Flow():
                self.connection.write(frame.marshal(Channel.FlowOk(bool(method.active)), self._number))
            case _:
                self._answer(method.name, method)

    def received_delivery(self, payload: bytes) -> None:
        """Take in a ``basic.deliver``, read by hand as it comes so often."""
        end = 5 + payload[4]
        self._method = payload[5:end], _TAG.unpack_from(payload, end)[0], bool(payload[end + 8])

    def received_header(self, header: ContentHeader) -> None:
        """Take in the header of a content."""
        self._content_header, self._parts, self._missing = header, [], header.body_size
        if not self._missing:
            self._content_complete()

    def received_body(self, part: bytes) -> None:
        """Take in a part of a content's body."""
        self._parts.append(part)
        self._missing -= len(part)
        if self._missing <= 0:
            self._content_complete()

    def received_ack(self, payload: bytes) -> None:
        """Take in a ``basic.ack``: messages are confirmed."""
        self._confirm(_TAG.unpack_from(payload, 4)[0], bool(payload[12] & 1), None)

    def _content_complete(self) -> None:
        method, header = self._method, self._content_header
        assert header is not None
        self._method = self._content_header = None
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if isinstance(method, tuple):
            consumer = method[0].decode()
            delivered = Delivered(
                self, method[1], consumer, method[2], header.properties, body, self.connection.loop.time()
            )
            receive = self.consumers.get(consumer)
            if receive is not None:
                receive(delivered)
            elif self.lost is None:
                self.reject(delivered.tag)  # its consumer was cancelled before it came
        elif isinstance(method, Basic.Return):
            headers = header.properties.headers or {}
            self._returned.add(cast(int, headers.get("x-tenure-sequence", 0)))
        elif isinstance(method, Basic.GetOk):
            delivered = Delivered(
                self,
                method.delivery_tag or 0,
                "",
                bool(method.redelivered),
                header.properties,
                body,
                self.connection.loop.time(),
            )
            self._answer("Basic.GetOk", delivered)

    def _answer(self, name: str, method: object) -> None:
        for place, request in enumerate(self._waiting):
            if name in request.answered_by:
                del self._waiting[place]
                if not request.answer.done():
                    request.answer.set_result(method)
                return

    def _confirm(self, tag: int, multiple: bool, error: Exception | None) -> None:
        if multiple:
            tags = []
            for one in self._unconfirmed:  # in the order of publishing
                if one > tag:
                    break
                tags.append(one)
        else:
            tags = [tag]
        for one in tags:
            key, confirmed = self._unconfirmed.pop(one, (0, None))
            is_returned = key in self._returned
            if is_returned:
                self._returned.discard(key)
            if confirmed is None or confirmed.done():
                continue
            if error is not None or is_returned:
                confirmed.set_exception(error or Returned())
                confirmed.exception()  # it may be given up: then nobody asks for it
            else:
                confirmed.set_result(None)

    def end(self, error: AmqpError, keep: asyncio.Future[Any] | None = None) -> None:
        """Note that it is over: every request but *keep* fails, and every message is unconfirmed for good."""
        first = self.lost is None
        self.lost = self.lost or error
        waiting: list[asyncio.Future[Any]] = [one.answer for one in self._waiting if one.answer is not keep]
        self._waiting = deque(one for one in self._waiting if one.answer is keep)
        waiting += [confirmed for _, confirmed in self._unconfirmed.values()]
        self._unconfirmed.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()
        if first:
            self.on_lost(error)


class AmqpConnection(asyncio.Protocol):
    """A connection. Made by :func:`connect`."""

    def __init__(self, address: Address, options: Options, purpose: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.lost: AmqpError | None = None
        self.server: dict[str, Any] = {}
        """What the server tells about itself."""
        self.frame_max = 131_072
        self.heartbeat: float = options.heartbeat
        self._address = address
        self._purpose = purpose
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._channels: dict[int, AmqpChannel] = {}
        self._channel_max = 2_047
        self._number = 0
        self._opened: asyncio.Future[None] = self.loop.create_future()
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._heard_at = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # --- for the client ---

    async def opened(self) -> None:
        """Return when it can be used."""
        await self._opened

    async def channel(self, *, confirms: bool = False) -> AmqpChannel:
        """Open a channel, on which messages that are published are confirmed if asked for."""
        if self.lost is not None:
            raise self.lost
        for _ in range(self._channel_max):
            self._number = self._number % self._channel_max + 1
            if self._number not in self._channels:
                break
        else:
            raise ChannelLost(0, f"all {self._channel_max} channels of the connection are in use")
        channel = self._channels[self._number] = AmqpChannel(self, self._number)
        opened = channel.request(Channel.Open())
        if confirms:
            selected = channel.request(Confirm.Select())
            await opened
            await selected
        else:
            await opened
        return channel

    async def drain(self) -> None:
        """Wait until the network has taken most of what was written."""
        await self._writable.wait()
        if self.lost is not None:
            raise self.lost

    async def close(self) -> None:
        """Say goodbye, and close it."""
        if self.lost is None:
            self.write(frame.marshal(ConnectionClass.Close(200, "", 0, 0), 0))
            await asyncio.wait({self._closed}, timeout=1.0)
            self.fail(ConnectionLost(0, "the connection is closed"))

    def write(self, data: bytes) -> None:
        """Write *data* at once."""
        if self._transport is not None:
            self._transport.write(data)

    def forget(self, number: int) -> None:
        """Let the *number* of a channel be used again."""
        self._channels.pop(number, None)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH)
        self.write(ProtocolHeader().marshal())

    def pause_writing(self) -> None:
        """Note that much waits to be sent."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Note that the network has taken it."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is over."""
        if not self._closed.done():
            self._closed.set_result(None)
        if self.lost is None:
            hint = "" if self._opened.done() else "; is it an AMQP port, and is TLS as the server wants it?"
            why = f"the connection was lost: {error or 'closed by the server'}{hint}"
            self.fail(ConnectionLost(0, why))

    def data_received(self, data: bytes) -> None:
        """Read frames."""
        self._heard_at = self.loop.time()
        buffer = self._buffer
        buffer += data
        start, length = 0, len(buffer)
        try:
            while length - start >= 8:
                kind, number, size = _HEADER.unpack_from(buffer, start)
                if kind == 65:  # "A": another version of the protocol is offered
                    raise ConnectionLost(0, "the server speaks another version of AMQP than 0-9-1")
                end = start + 7 + size
                if length <= end:
                    break
                if buffer[end] != _END:
                    raise ConnectionLost(0, "the server sends something else than AMQP")
                self._received(kind, number, bytes(buffer[start + 7 : end]))
                start = end + 1
        except (PAMQPException, ConnectionLost, ValueError, struct.error) as error:
            self.fail(
                error if isinstance(error, ConnectionLost) else ConnectionLost(0, f"a frame can't be read: {error}")
            )
            return
        del buffer[:start]

    def _received(self, kind: int, number: int, payload: bytes) -> None:
        if number == 0:
            if kind == 1:
                self._received_method(_method_of(payload))
            return
        channel = self._channels.get(number)
        if channel is None:
            return
        if kind == 1:
            method = _METHOD.unpack_from(payload)
            if method == _BASIC_DELIVER:
                channel.received_delivery(payload)
            elif method == _BASIC_ACK:
                channel.received_ack(payload)
            else:
                channel.received_method(_method_of(payload))
        elif kind == 2:
            header = ContentHeader()
            header.unmarshal(payload)
            channel.received_header(header)
        elif kind == 3:
            channel.received_body(payload)

    def _received_method(self, method: Frame) -> None:
        match method:
            case ConnectionClass.Start():
                self.server = dict(method.server_properties or {})
                self._start(method.mechanisms)
            case ConnectionClass.Tune():
                self._tune(method)
            case ConnectionClass.OpenOk():
                if not self._opened.done():
                    self._opened.set_result(None)
            case ConnectionClass.Blocked():
                # It reads no more from this connection, until it has room: then it would take what was given up.
                reason = method.reason or "no reason given"
                self.fail(ConnectionLost(0, f"the server is full and takes no messages: {reason}"), reset=True)
            case ConnectionClass.Close():
                self.write(frame.marshal(ConnectionClass.CloseOk(), 0))
                self.fail(ConnectionLost(method.reply_code or 0, method.reply_text or ""))
            case ConnectionClass.CloseOk():
                if not self._closed.done():
                    self._closed.set_result(None)
            case _:
                pass

    # --- handshake and heartbeats ---

    def _start(self, mechanisms: object) -> None:
        offered = mechanisms.decode() if isinstance(mechanisms, bytes) else str(mechanisms)
        if "PLAIN" not in offered.split():
            self.fail(ConnectionLost(403, f"the server offers no login by password, but {offered}"))
            return
        properties = {
            "product": "tenure",
            "platform": f"Python {sys.version_info.major}.{sys.version_info.minor}",
            "connection_name": f"tenure {self._purpose}",
            "capabilities": {
                "authentication_failure_close": True,
                "basic.nack": True,
                "connection.blocked": True,
                "consumer_cancel_notify": True,
                "publisher_confirms": True,
            },
        }
        login = f"\0{self._address.username}\0{self._address.password}"
        self.write(frame.marshal(ConnectionClass.StartOk(cast(Any, properties), "PLAIN", login, "en_US"), 0))

    def _tune(self, tune: ConnectionClass.Tune) -> None:
        self.frame_max = min(tune.frame_max or self.frame_max, self.frame_max)
        self._channel_max = min(tune.channel_max or self._channel_max, self._channel_max)
        if tune.heartbeat:  # the shorter one: a server that wants it rare can have it often
            self.heartbeat = min(self.heartbeat, tune.heartbeat)
        self.write(
            frame.marshal(ConnectionClass.TuneOk(self._channel_max, self.frame_max, int(self.heartbeat)), 0)
            + frame.marshal(ConnectionClass.Open(self._address.vhost), 0)
        )
        self._beat()

    def _beat(self) -> None:
        """Send a heartbeat, and give the connection up if the server has sent none."""
        if self.lost is not None:
            return
        silent = self.loop.time() - self._heard_at
        if silent > self.heartbeat * SILENCE:
            self.fail(ConnectionLost(0, f"the server has sent nothing for {silent:.1f} s (option heartbeat)"))
            return
        self.write(Heartbeat().marshal())
        # Often, so that the silence is noticed in time.
        self._timer = self.loop.call_later(self.heartbeat / 4, self._beat)

    def fail(self, error: AmqpError, *, reset: bool = False) -> None:
        """Note that it is over, and everything on it; with *reset*, drop also what the server has not read yet."""
        if self.lost is not None:
            return
        if reset and self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.lost = error
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        if self._transport is not None:
            self._transport.abort() if error.code == 0 else self._transport.close()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        for channel in list(self._channels.values()):
            channel.end(error)
        self._channels.clear()


def _method_of(payload: bytes) -> Frame:
    data = _HEADER.pack(1, 1, len(payload)) + payload + b"\xce"
    return cast(Frame, frame.unmarshal(data)[2])


def _ignore(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def connect(address: Address, options: Options, purpose: str) -> AmqpConnection:
    """Return a connection that can be used.

    Raises:
        AmqpError: The server refuses it.
        OSError: It can't be reached.
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: AmqpConnection(address, options, purpose), address.host, address.port, ssl=tls_of(address, options)
    )
    try:
        await connection.opened()
    except BaseException:
        connection.fail(ConnectionLost(0, "connecting was given up"))
        raise
    return connection
