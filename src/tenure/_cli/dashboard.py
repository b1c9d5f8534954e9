"""``tenure dashboard``: the elections, queues and schedules of a store in a browser."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from contextlib import suppress

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_existing, on_option
from tenure._cli.http_server import address, listening_at, serve_until
from tenure._cli.output import log_to_stderr, notice

PORT = 8160

TOKEN_VARIABLE = "TENURE_DASHBOARD_TOKEN"  # noqa: S105  # the name of the variable

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(text: str) -> str:
    """Read a host name as browsers send it, without a scheme or a port; to be used as the type of an option."""
    name = re.sub(r"^\[(.*)\]$", r"\1", text)
    if not re.fullmatch(r"[\w.-]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", name, re.ASCII):
        raise click.BadParameter(f"{text!r} is no host name; write it without a scheme or a port, as shop.example")
    return name


def token_for(host: str, port: int, option: str) -> str | None:
    """Return the token of the environment; None if there is none, and only this machine can reach the dashboard."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if host not in LOOPBACK and token is None:
        raise Failure(
            Exit.CONFIG,
            f"{option} {host}:{port} is reachable by others, so a token is needed: set {TOKEN_VARIABLE}, or listen on "
            f"127.0.0.1:{port}",
        )
    if token is not None and not token.strip():
        raise Failure(Exit.CONFIG, f"{TOKEN_VARIABLE} is blank; set it to the token, or unset it")
    return token


def address_of(listening: socket.socket) -> str:
    """Return the address of a dashboard, for a browser."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@click.command("dashboard", cls=Command)
@on_option
@click.option(
    "--listen",
    type=address,
    default=f"127.0.0.1:{PORT}",
    show_default=True,
    metavar="[HOST:]PORT",
    help="Where it answers. For others than this machine, it needs a token.",
)
@click.option("--allow-changes", is_flag=True, help="Show buttons that change the store.")
@click.option("--show-bodies", is_flag=True, help="Show the bodies of messages, and tracebacks.")
@click.option(
    "--allowed-host",
    "hosts",
    type=host_name,
    multiple=True,
    metavar="NAME",
    help="Another host name under which it may be asked, as that of a proxy.",
)
def command(url: str, listen: tuple[str, int], allow_changes: bool, show_bodies: bool, hosts: tuple[str, ...]) -> int:
    """Show the elections, queues and schedules of a store in a browser, live, until Ctrl-C.

    It changes nothing unless --allow-changes is given: then, dead letters can be put back and removed, leaders asked to
    step down, and schedules paused. Each change is in the log.

    On another address than this machine's own, TENURE_DASHBOARD_TOKEN must be set: it is asked for once. Put a proxy
    with TLS before it there.
    """
    host, port = listen
    token = token_for(host, port, "--listen")
    log_to_stderr(0)
    listening = listening_at(host, port, "--listen")
    with suppress(KeyboardInterrupt):  # the usual end
        complete(_serve(url, listening, {*LOOPBACK, host, *hosts}, token, allow_changes, show_bodies))
    return Exit.DONE


async def _serve(
    url: str, listening: socket.socket, hosts: set[str], token: str | None, changes: bool, bodies: bool
) -> None:
    from tenure import dashboard

    try:
        async with connect_existing(url) as backend:
            await backend.diagnose()  # a wrong URL must not come out in the browser only
            app = dashboard.app(backend, allow_changes=changes, show_bodies=bodies, hosts=hosts, token=token)
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            notice(f"the dashboard of {backend.url} is on {address_of(listening)}; Ctrl-C ends it")
            await serve_until(app, listening, stop)
    except ModuleNotFoundError as error:
        raise Failure(
            Exit.CONFIG,
            f"tenure dashboard needs the package {error.name!r}, which is not installed; run: "
            "pip install 'tenure[dashboard]'",
        ) from None
