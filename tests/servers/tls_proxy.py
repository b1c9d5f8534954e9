"""A proxy that speaks TLS with clients, and none with the server behind it: so every server can change certificates."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from tests.servers.tls_listener import Protocol

_SSL_REQUEST_BYTES = 8


class TlsProxy:
    """A proxy for the server at *port* of this machine; used as ``async with``. Clients must show a certificate.

    Args:
        port: The server's.
        protocol: What comes before the handshake.
    """

    def __init__(self, port: int, protocol: Protocol) -> None:
        self._target = port
        self._protocol = protocol
        self._context: ssl.SSLContext | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port: int = 0
        self.accepted = self.refused = 0
        """How many handshakes have succeeded, and how many have failed, since ``show``."""

    def show(self, certificate: tuple[Path, Path], demands: Path) -> None:
        """From now on, show this certificate, with its key, and accept clients that this authority has signed only."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=demands)
        context.load_cert_chain(*certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        self._context = context
        self.accepted = self.refused = 0

    async def sever(self) -> None:
        """Break every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self.sever()
        await self._server.wait_closed()

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._protocol != "postgres":  # its first bytes are for the handshake, which begins later
            cast("asyncio.Transport", writer.transport).pause_reading()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled before it began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is being restarted; the connection is aborted
            return
        try:
            with suppress(OSError, EOFError):
                if self._protocol == "postgres":
                    await reader.readexactly(_SSL_REQUEST_BYTES)
                    cast("asyncio.Transport", writer.transport).pause_reading()
                    writer.write(b"S")
                elif self._protocol == "nats":
                    info = await there.readline()
                    writer.write(info.replace(b"{", b'{"tls_required":true,', 1))
                assert self._context is not None, "it has no certificate yet"
                try:
                    await writer.start_tls(self._context)
                except (OSError, EOFError):
                    self.refused += 1
                    raise
                self.accepted += 1
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(_pump(reader, to_there))
                    pumps.create_task(_pump(there, writer))
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            to_there.transport.abort()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)
        await target.drain()
    raise ConnectionAbortedError("one side has closed it, so the other is closed too")
