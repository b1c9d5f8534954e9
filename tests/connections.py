"""The open files of a process on Linux, and its connections to a server, as the system counts them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ESTABLISHED = "01"


def open_files(pid: int | str = "self") -> int:
    """Return how many files a process has open, sockets included."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def connections_to(port: int, pid: int | str = "self") -> int:
    """Return how many established TCP connections of a process have the remote *port*."""
    own = set[str]()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # it was closed meanwhile
            own.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    found = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            remote, state, inode = fields[2], fields[3], fields[9]
            is_to = int(remote.rpartition(":")[2], 16) == port
            found += state == ESTABLISHED and is_to and f"socket:[{inode}]" in own
    return found
