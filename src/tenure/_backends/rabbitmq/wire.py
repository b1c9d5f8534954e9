"""The TCP connection under the driver: it tells when the server was last heard, and can be reset."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

import aiormq


class Wire(asyncio.StreamReaderProtocol, aiormq.TransportFactory):
    """The streams that the driver reads and writes, made before it is asked to connect. Made by :func:`connected`.

    Args:
        on_lost: Called once the connection is gone, before the driver has noticed.
    """

    def __init__(self, on_lost: Callable[[Exception | None], None]) -> None:
        self._loop_here = asyncio.get_running_loop()
        self._stream = asyncio.StreamReader(loop=self._loop_here)
        super().__init__(self._stream, loop=self._loop_here)
        self._on_lost = on_lost
        self._wire: asyncio.Transport | None = None
        self.heard_at = self._loop_here.time()
        """When the server was last heard, by the loop's clock."""

    async def create(self, url: Any, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the streams; called by the driver."""
        assert self._wire is not None
        return self._stream, asyncio.StreamWriter(self._wire, self, self._stream, self._loop_here)

    def drop(self, *, reset: bool = False) -> None:
        """End the connection at once; with *reset*, drop also what the server has not read yet."""
        if self._wire is None:
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
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell it, too."""
        super().connection_lost(exc)
        self._on_lost(exc)


async def connected(
    host: str, port: int, encryption: ssl.SSLContext | None, on_lost: Callable[[Exception | None], None]
) -> Wire:
    """Return a connection to a server.

    Raises:
        OSError: It can't be reached.
    """
    _, wire = await asyncio.get_running_loop().create_connection(lambda: Wire(on_lost), host, port, ssl=encryption)
    return wire
