"""The name of this process, for people who look for it."""

from __future__ import annotations

import os
import socket
from functools import cache


def process_name() -> str:
    """Return the host and the number of this process, as ``HOST:PID``."""
    return f"{_node()}:{os.getpid()}"


@cache
def _node() -> str:
    return socket.gethostname()
