"""The TCP connection of the driver, which sends nothing in the clear where TLS is wanted."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import ParseResult

import nats.errors
from nats.aio.transport import TcpTransport


class Transport(TcpTransport):
    """Given to the driver, which would log in without TLS at a server that doesn't offer it, whatever the URL says.

    Args:
        wants_tls: Whether a connection without TLS is not enough.
    """

    def __init__(self, *, wants_tls: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wants_tls = wants_tls
        self._has_tls = False
        self._is_encrypting = False
        self._encrypted: _EncryptedProtocol | None = None

    def __bool__(self) -> bool:
        return True  # the driver would make another one instead

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._has_tls = False
        await super().connect(uri, buffer_size, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Go on with TLS, as the driver does, but by streams that know of it: others log a warning when they end."""
        assert self._io_writer is not None, "it is not connected"
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = _EncryptedProtocol(reader)
        host = uri if isinstance(uri, str) else uri.hostname
        starting = loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=host)
        self._encrypted, self._is_encrypting = protocol, True
        transport = await asyncio.wait_for(starting, connect_timeout)
        self._is_encrypting = False
        assert transport is not None
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        self._has_tls = True

    def write(self, payload: bytes) -> None:
        if self._wants_tls and not self._has_tls:  # the first that is written is the login
            raise nats.errors.SecureConnWantedError
        super().write(payload)  # type: ignore[no-untyped-call]

    async def wait_closed(self) -> None:
        if not self._is_encrypting:  # else the handshake has failed, and nobody tells the writer of its end
            await super().wait_closed()  # type: ignore[no-untyped-call]

    @property
    def lost_by_tls(self) -> ssl.SSLError | None:
        """The error of TLS with which the connection has ended, after the handshake: as the driver doesn't tell it."""
        error = self._encrypted.lost_by if self._encrypted is not None else None
        return error if isinstance(error, ssl.SSLError) else None

    def drop(self) -> None:
        """Close the socket at once, if the driver hasn't: it leaves that out when its close is cut off."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class _EncryptedProtocol(asyncio.StreamReaderProtocol):
    lost_by: Exception | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost_by = exc
        super().connection_lost(exc)

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # TLS has no connections that are half open
