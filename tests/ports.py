"""Ports of this machine that a test may give to what it starts: nobody else is given them meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ports_held(count: int) -> Iterator[list[int]]:
    """Yield so many loopback ports on which nobody listens; they can be listened on, once at a time, until the end.

    A port that was found and let go of may be given to anybody before it is listened on: to another test, or to one
    end of a connection. So it stays bound here, not listening. Who names the port and reuses addresses, as servers do,
    can listen on it all the same.
    """
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
