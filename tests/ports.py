"""Ports of this machine that a test may give to what it starts: nobody else is given them meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ports_held(count: int) -> Iterator[list[int]]:
    """Yield so many loopback ports on which nobody listens; they can be listened on, once at a time, until the end.

    A port that was found and let go of may be given to anybody before it is listened on: to another test, or to one
    end of a connection. So it stays bound here.
    """
    held = [bound() for _ in range(count)]
    try:
        yield [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def bound() -> socket.socket:
    """Return a socket that keeps a loopback port from others, until it is closed.

    Bound and not listening, it lets nobody in, and the system gives the port to nobody who asks for any. Who names the
    port and reuses addresses, as servers do, can listen on it all the same.
    """
    renewal_thread = socket.socket()
    renewal_thread.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    renewal_thread.bind(("127.0.0.1", 0))
    return renewal_thread
