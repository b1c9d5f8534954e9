"""The address of a Redis: the options of its URL, host and login; and names escaped for keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError

PORT = 6_379

Endpoint = tuple[str, int]
"""Host and port of a server."""


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``redis:`` URL.

    Args:
        timeout: Seconds that a request may take, connecting included.
        connections: How many connections each event loop may have open at once.
        prefix: The beginning of every key and channel.
        lease_prefix: The beginning of a lease's key, instead of ``PREFIXlease:``; if empty, the key is the name itself.
        ca: A file with the certificates to trust, instead of the system's (with TLS only).
        cert: A file with the client's certificate, if the server requires one.
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
                raise ConfigError(f"{name} must have no braces: they would change the slot of a key in a cluster")

    @property
    def leases(self) -> str:
        """The beginning of a lease's key."""
        return f"{self.prefix}lease:" if self.lease_prefix is None else self.lease_prefix


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and database of a Redis, and the login."""

    host: str
    port: int
    database: int
    username: str | None
    password: Secret | None
    is_tls: bool

    @property
    def uses_tls(self) -> bool:
        """Whether any server on the way is asked by TLS."""
        return self.is_tls

    def __str__(self) -> str:
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def address_of(url: Url) -> Address:
    """Return the address that *url* names.

    Raises:
        ConfigError: It has another form.
    """
    form = f"write {url.scheme}://[[user]:password@]host[:port][/database]"
    host, port = url.place(PORT, form)
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{str(url)!r} has a database that is no number; {form}")
    return Address(
        host,
        port,
        int(database or 0),
        url.user.reveal() if url.user else None,
        url.password or None,
        url.scheme == "rediss",
    )


def escaped(name: str) -> str:
    """Return *name* without braces, so that it can't change the slot of a key; no two names give the same."""
    return re.sub("[%{}]", lambda found: f"%{ord(found[0]):02X}", name)
