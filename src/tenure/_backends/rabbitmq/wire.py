"""The TCP connection under the driver: it tells when the server was last heard, and can be reset.

It takes the messages that come to consumers out of what comes: the driver would need several turns of the loop, and a
task, for each. It passes on the properties of other messages unread, see ``properties``.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import aiormq
from aiormq import spec

from tenure._backends.rabbitmq.properties import Properties, read_properties

_HEAD = struct.Struct(">BHI")
_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_HEARTBEAT = b"\x08\0\0\0\0\0\0\xce"
_DELIVER, _GET_OK, _RETURN = b"\0\x3c\0\x3c", b"\0\x3c\0\x47", b"\0\x3c\0\x32"
"""How the frames begin behind which the properties of a message come."""

_BEFORE = 12
"""Bytes of a frame with properties that come before them."""

_DELIVERED, _BODY_SIZE = struct.Struct(">Q?"), struct.Struct(">4xQ")

_SHOWN_EVERY = 1.0
"""Seconds after which the driver is shown that the server is heard, if nothing has come but what it doesn't get."""

_HEADERS = Properties.flags["headers"]
_UNREAD = "properties"
_WRAPPED = struct.Struct(f">HIB{len(_UNREAD)}scI")


def unread(properties: spec.Basic.Properties) -> bytes:
    """Return the properties of a message, as bytes, from what the driver has got."""
    found: Any = (properties.headers or {}).get(_UNREAD, b"\0\0")
    return bytes(found)


class Message(NamedTuple):
    """A message that has come to a consumer."""

    channel: int
    """The number of its channel."""
    consumer: str
    tag: int
    redelivered: bool
    properties: bytes
    body: bytes


class _Coming:
    """A message of which not all frames have come."""

    __slots__ = ("body", "deliver", "missing", "properties")

    def __init__(self, deliver: bytes) -> None:
        self.deliver = deliver
        self.properties = b""
        self.body: list[bytes] = []
        self.missing = 0

    def message(self, channel: int) -> Message:
        """Return it, when all has come."""
        behind = 5 + self.deliver[4]
        consumer = self.deliver[5:behind].decode("utf-8", "replace")
        tag, redelivered = _DELIVERED.unpack_from(self.deliver, behind)
        return Message(channel, consumer, tag, redelivered, self.properties, b"".join(self.body))


class Frames:
    """Takes messages to consumers out of the frames that come, and makes the others readable for the driver.

    It has to read them, whatever other programs have written into a message: the properties become one header, whose
    value are their bytes; exchange and routing key, which nobody needs, are left out. Of a message that is returned,
    which is ours, the driver needs the id, and gets that only.

    Args:
        on_message: Called with each message to a consumer, in order.
    """

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._pieces: list[bytes] = []  # of a frame that has not come to its end
        self._missing = 0  # bytes of it
        self._passing = 0  # bytes of a frame that are still to be passed on
        self._coming: dict[int, _Coming] = {}  # by channel
        self._returned: set[int] = set()  # channels on which the properties of a returned message come next

    def readable(self, data: bytes) -> bytes:
        """Return what is to be passed on, after more *data* has come."""
        if self._pieces:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return b""
            data = b"".join(self._pieces)
            self._pieces.clear()
        size = len(data)
        at, start = self._passing, 0
        parts: list[bytes] = []
        while (end := at + _HEAD.size) <= size:
            kind, channel, length = _HEAD.unpack_from(data, at)
            begun, end = end, end + length + len(_END)
            if kind in (_METHOD, _HEADER) or (kind == _BODY and channel in self._coming):
                if end > size:
                    break
                payload = data[begun : end - len(_END)]
                readable = self._read(kind, channel, payload)
                if readable is not payload:
                    parts.append(data[start:at])
                    if readable is not None:
                        parts += (_HEAD.pack(kind, channel, len(readable)), readable, _END)
                    start = end
            at = end
        if at >= size:
            self._passing = at - size
            return b"".join((*parts, data[start:])) if parts else data
        self._passing, self._missing = 0, end - size
        self._pieces.append(data[at:])
        return b"".join((*parts, data[start:at]))

    def _read(self, kind: int, channel: int, payload: bytes) -> bytes | None:
        """Return what the driver is to read in place of *payload*; None if it gets nothing."""
        coming = self._coming.get(channel)
        if kind == _METHOD:
            if payload[:4] == _DELIVER:
                self._coming[channel] = _Coming(payload)
                return None
            if coming is not None:  # such as the end of the channel
                del self._coming[channel]
            return self._method(channel, payload)
        if coming is None:
            return self._readable_header(channel, payload)
        if kind == _HEADER:
            coming.properties = payload[_BEFORE:]
            (coming.missing,) = _BODY_SIZE.unpack_from(payload)
        else:
            coming.body.append(payload)
            coming.missing -= len(payload)
        if coming.missing <= 0:
            del self._coming[channel]
            self._on_message(coming.message(channel))
        return None

    def _readable_header(self, channel: int, payload: bytes) -> bytes:
        if channel in self._returned:
            self._returned.discard(channel)
            returned = Properties(message_id=read_properties(payload[_BEFORE:]).message_id)
            return payload[:_BEFORE] + returned.marshal()
        size = len(payload) - _BEFORE
        wrapped = _WRAPPED.pack(_HEADERS, _WRAPPED.size - 6 + size, len(_UNREAD), _UNREAD.encode(), b"x", size)
        return payload[:_BEFORE] + wrapped + payload[_BEFORE:]

    def _method(self, channel: int, payload: bytes) -> bytes:
        begin = payload[:4]
        if begin == _GET_OK:
            return payload[: 4 + 9] + b"\0\0" + payload[-4:]
        if begin == _RETURN:
            self._returned.add(channel)
        return payload


class Wire(asyncio.StreamReaderProtocol, aiormq.TransportFactory):
    """The streams that the driver reads and writes, made before it is asked to connect. Made by :func:`connected`.

    Args:
        on_lost: Called once the connection is gone, before the driver has noticed.
        on_message: Called with each message to a consumer.
    """

    def __init__(self, on_lost: Callable[[Exception | None], None], on_message: Callable[[Message], None]) -> None:
        self._loop_here = asyncio.get_running_loop()
        self._stream = asyncio.StreamReader(loop=self._loop_here)
        super().__init__(self._stream, loop=self._loop_here)
        self._on_lost = on_lost
        self._wire: asyncio.Transport | None = None
        self._is_lost = False
        self.lost_by: Exception | None = None
        """The error with which the connection has ended, if that has happened."""
        self._frames = Frames(on_message)
        self.heard_at = self._loop_here.time()
        """When the server was last heard, by the loop's clock."""
        self._shown_at = self.heard_at

    async def create(self, url: Any, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the streams; called by the driver."""
        assert self._wire is not None
        return self._stream, asyncio.StreamWriter(self._wire, self, self._stream, self._loop_here)

    @property
    def tls_version(self) -> str:
        """The version of TLS, as Python writes it; empty without TLS."""
        if self._wire is None or self._is_lost:
            return ""
        encrypted = self._wire.get_extra_info("ssl_object")
        return encrypted.version() or "" if encrypted is not None else ""

    def drop(self, *, reset: bool = False) -> None:
        """End the connection at once; with *reset*, drop also what the server has not read yet."""
        if self._wire is None or self._is_lost:  # a transport of TLS that is lost tells no socket, but fails
            return
        raw = self._wire.get_extra_info("socket")
        if reset and raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._wire.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Note that the server was heard."""
        self.heard_at = self._loop_here.time()
        readable = self._frames.readable(data)
        if not readable:
            if self.heard_at < self._shown_at + _SHOWN_EVERY:
                return
            readable = _HEARTBEAT  # else the driver would give up a connection on which only messages come
        self._shown_at = self.heard_at
        super().data_received(readable)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell it, too."""
        self._is_lost, self.lost_by = True, exc
        super().connection_lost(exc)
        self._on_lost(exc)


async def connected(
    host: str,
    port: int,
    encryption: ssl.SSLContext | None,
    on_lost: Callable[[Exception | None], None],
    on_message: Callable[[Message], None],
) -> Wire:
    """Return a connection to a server.

    Raises:
        OSError: It can't be reached.
    """
    _, wire = await asyncio.get_running_loop().create_connection(
        lambda: Wire(on_lost, on_message), host, port, ssl=encryption
    )
    return wire
