"""Answers ``tenure status --me`` on the event loop of ``tenure lead``, at a Unix socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tenure import CandidateStatus
from tenure.errors import TenureError

GetStatus = Callable[[], Awaitable[CandidateStatus]]


@asynccontextmanager
async def answering(listening: socket.socket, get_status: GetStatus) -> AsyncIterator[None]:
    """Answer every connection to *listening*, during the block, with the status in JSON.

    It is asked for anew each time, on the loop where it is kept: so there is an answer only if both loops run.
    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(TenureError):  # the backend is being closed: no answer
            writer.write(json.dumps(dataclasses.asdict(await get_status())).encode())
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listening)
    try:
        yield
    finally:
        server.close()
