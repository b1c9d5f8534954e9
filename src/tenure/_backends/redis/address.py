"""The address of a Redis: the options of its URL, where it is, and how names stand in keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from tenure._url import Url
from tenure.errors import ConfigError

Endpoint = tuple[str, int]
"""Host and port of a server."""


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``redis:`` URL.

    Args:
        timeout: How many seconds a question may take, connecting included.
        connections: How many connections each event loop may have open at once.
        prefix: Begins every key and channel of ours.
        lease_prefix: Begins the key of a lease, instead of ``PREFIXlease:``; empty, the key is the name itself.
        ca: A file with the certificates to trust, instead of the system's (with TLS only).
        cert: A file with our own certificate, where the server wants one.
        key: A file with its key.
        check_hostname: Whether the server's certificate must be for the host in the URL.
        cluster: Whether the URL names a node of a Redis Cluster, any of them.
    """

    timeout: float = 5.0
    connections: int = 16
    prefix: str = "tenure:"
    lease_prefix: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True
    cluster: bool = False

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not 1 <= self.connections <= 1_000:
            raise ConfigError(f"connections must be from 1 to 1000, not {self.connections}; try connections=16")
        for name in ("prefix", "lease_prefix"):
            if set(getattr(self, name) or "") & set("{}"):
                raise ConfigError(f"{name} must hold no braces: they say where a key lies in a cluster")

    @property
    def leases(self) -> str:
        """Begins the key of a lease."""
        return f"{self.prefix}lease:" if self.lease_prefix is None else self.lease_prefix


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis is, and who we are there."""

    host: str
    port: int
    database: int
    username: str | None
    password: str | None = field(repr=False)
    is_tls: bool

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def address_of(url: Url) -> Address:
    """Return the address that *url* names.

    Raises:
        ConfigError: It is spelled as something else.
    """
    right = f"write {url.scheme}://[[user]:password@]host[:port][/database]"
    parts = urlsplit(url.written)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        # Not told from what: a password that is not percent-encoded may have ended up in the port.
        raise ConfigError(
            f"{str(url)!r} has a port that is no number; {right}, and percent-encode what is special in the password"
        ) from None
    if not host:
        raise ConfigError(f"{str(url)!r} names no host; {right}")
    database = parts.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{str(url)!r} has a database that is no number; {right}")
    return Address(
        host,
        port or 6379,
        int(database or 0),
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        url.scheme == "rediss",
    )


def require_files(address: Address, options: Options) -> None:
    """Refuse an option that names a file that can't be read: the driver would only say that it can't connect."""
    for name in ("ca", "cert", "key"):
        path = getattr(options, name)
        if path is None:
            continue
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(
                f"{name}={path} of {address} can't be read: {error.strerror}; name the file as this process finds it"
            ) from error


def escaped(name: str) -> str:
    """Return *name* without braces, so that it can't say where a key lies; no two names give the same."""
    return re.sub("[%{}]", lambda found: f"%{ord(found[0]):02X}", name)
