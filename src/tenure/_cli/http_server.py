"""``tenure run --http``: the endpoints for probes, Prometheus and KEDA, on the loop of the supervisor."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from tenure._cli.exits import Exit, Failure
from tenure._cli.output import notice

if TYPE_CHECKING:
    from tenure._http.source import Source

TOKEN_VARIABLE = "TENURE_HTTP_TOKEN"  # noqa: S105  # the name of the variable
"""The environment variable with the token that ``/metrics`` and ``/keda`` need, if any."""

BACKLOG = 64
END_WITHIN = 2.0
"""Seconds that requests get to end when the processes have ended."""


def address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, or a port alone, which is one of this machine only; to be used as the type of an option."""
    host, _, port = text.rpartition(":")
    host = re.sub(r"^\[(.*)\]$", r"\1", host) or "127.0.0.1"
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or int(port) > 65_535:
        raise click.BadParameter(f"{text!r} is no address; write HOST:PORT, as 0.0.0.0:9160, or a port alone: 9160")
    return host, int(port)


def listening_at(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that listens there; so a port that is taken is noticed before anything is started."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise Failure(Exit.CONFIG, f"{option} can't listen on {host}:{port}: {error}") from None


@asynccontextmanager
async def serving(source: Source, listening: socket.socket) -> AsyncIterator[None]:
    """Answer requests to *listening* during the block, as *source* says."""
    from tenure._http.app import make_app

    host, port = listening.getsockname()[:2]
    notice(f"http on http://{f'[{host}]' if ':' in host else host}:{port} (/live, /ready, /metrics, /keda)")
    stop = asyncio.Event()
    app = make_app(source, os.environ.get(TOKEN_VARIABLE) or None)
    running = asyncio.create_task(serve_until(app, listening, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=END_WITHIN * 2)
        running.cancel()


async def serve_until(app: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Let *app* answer requests to *listening*, until *stop* is set; open requests have a moment to end."""
    import uvicorn

    class Server(uvicorn.Server):
        """A server that leaves the signals to the command."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config: Any = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="auto", timeout_graceful_shutdown=int(END_WITHIN)
    )
    server = Server(config)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait({running}, timeout=END_WITHIN * 2)
        running.cancel()
        listening.close()
