"""Ports of this machine that a test reserves for the servers that it starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ports_held(count: int) -> Iterator[list[int]]:
    """Yield so many unused loopback ports; until the end, one server at a time can listen on each.

    A port that was found and released could be given to another test, or to one end of a connection, before a server
    listens on it. So it stays bound here.
    """
    held = [bound() for _ in range(count)]
    try:
        yield [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def bound() -> socket.socket:
    """Return a socket that reserves a loopback port until it is closed.

    It is bound and does not listen, so it accepts no connection, and the system does not assign its port. A server that
    names the port and reuses addresses can still listen on it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
