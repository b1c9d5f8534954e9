"""A server that speaks Redis' protocol, and names another server: as a sentinel, or as a node of a Redis Cluster."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from types import TracebackType
from typing import Self


class RedisAnswer:
    """Answers whatever it is asked with a place, in the form that the question wants; used as ``async with``.

    Args:
        host: Of the primary of each service, and of all slots.
        port: Likewise.
        tls: For a server that speaks TLS.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._named = port
        self._tls = tls
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            while True:
                writer.write(self._answer(await _request(reader)))
                await writer.drain()
        writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        host = b"$%d\r\n%s\r\n" % (len(self._host), self._host.encode())
        match words[0].upper():
            case b"SENTINEL":
                number = str(self._named).encode()
                return b"*2\r\n%s$%d\r\n%s\r\n" % (host, len(number), number)
            case b"CLUSTER":
                return b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n%s:%d\r\n" % (host, self._named)
        return b"+OK\r\n"


async def _request(reader: asyncio.StreamReader) -> list[bytes]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words
