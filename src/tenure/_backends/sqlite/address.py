"""The URL of an SQLite file, and its options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from tenure._url import Url
from tenure.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The query of an ``sqlite:`` URL.

    Args:
        synchronous: ``full`` keeps every answer through a loss of power; ``normal`` is faster, and may then lose the
            newest ones, tokens too. Neither loses anything when only a process dies.
        busy: Seconds to keep trying for the write lock.
        create: Whether to create a missing file, or missing tables of tenure in it; if not, that is an error.
    """

    synchronous: Literal["full", "normal"] = "full"
    busy: float = 5.0
    create: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.busy <= 3_600.0:
            raise ConfigError(f"busy must be from 0 to 3600 seconds, not {self.busy:g}; try busy=5")


def path_of(url: Url) -> str:
    """Return the file that *url* names, as a real path: all processes must agree on the folder of the wake sockets.

    Raises:
        ConfigError: The URL has another form; the error has the right one.
    """
    form = "three slashes for a relative path (sqlite:///work.db), four for an absolute one (sqlite:////var/work.db)"
    rest = url.written.reveal().partition(":")[2].partition("?")[0]
    # The text before an @ may be a password, so it is not shown.
    if url.user is not None or ("@" in url.path and not rest.startswith("//")):
        raise ConfigError(f"{str(url)!r} has a login, and a file needs none; write {form}")
    if host := url.hosts:
        raise ConfigError(f"{str(url)!r} has a host, {host!r}; write sqlite:///{host}{url.path}: {form}")
    if not rest.startswith("//"):
        raise ConfigError(f"{str(url)!r} lacks slashes; write sqlite:///{rest}: {form}")
    path = unquote(url.path[1:])
    if not path or "\0" in path:
        raise ConfigError(f"{str(url)!r} names no file; write {form}, or memory: to keep nothing")
    if path == ":memory:":
        raise ConfigError(f"{str(url)!r} would be lost with its connection; write memory: or memory:NAME")
    if path.endswith("/"):
        raise ConfigError(f"{str(url)!r} names a folder; name a file in it, as in sqlite:///{url.path[1:]}work.db")
    return os.path.realpath(path)
