"""A proxy for an HTTP server that answers some requests itself, as a service that refuses them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

Refusal = Callable[[str], tuple[int, str] | None]
"""Returns, for the first line of a request, the status and the error code to answer; None to forward it."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


class HttpGate:
    """A proxy for the server at *port* of this machine; used as ``async with``."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port: int = 0
        self.refusal: Refusal = _nothing

    async def __aenter__(self) -> HttpGate:
        self._server = await asyncio.start_server(self._welcome, "127.0.0.1", 0)
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
        await self._server.wait_closed()

    def heal(self) -> None:
        """Forward all requests again."""
        self.refusal = _nothing

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, to_there = await asyncio.open_connection("127.0.0.1", self._target)
        with suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            while True:
                line, request = await _message(reader)
                refused = self.refusal(line.decode())
                if refused is None:
                    to_there.write(request)
                    _, answer = await _message(there, bodiless=line.startswith(b"HEAD"))
                else:
                    answer = _refusal(*refused)
                writer.write(answer)
        writer.close()
        to_there.close()


async def _message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> tuple[bytes, bytes]:
    """Read a request or an answer; return its first line, and all of it."""
    head = await reader.readuntil(b"\r\n\r\n")
    line = head.partition(b"\r\n")[0]
    body = b""
    if bodiless or line.split()[1] in (b"204", b"304"):
        pass
    elif _CHUNKED.search(head):
        size = b"1"
        while int(size, 16):
            size = await reader.readline()
            body += size + await reader.readexactly(int(size, 16) + 2)
    elif length := _LENGTH.search(head):
        body = await reader.readexactly(int(length[1]))
    return line, head + body


def _refusal(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0' encoding='utf-8'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    head = f"HTTP/1.1 {status} No\r\nx-ms-error-code: {code}\r\ncontent-type: application/xml"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def _nothing(line: str) -> None:
    return None
