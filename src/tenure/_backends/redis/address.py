"""The address of a Redis: the options of its URL, host and login; and names escaped for keys."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal
from urllib.parse import quote, unquote

from tenure._logins import PasswordOptions
from tenure._secret import Secret
from tenure._set_aside import set_aside
from tenure._url import Url
from tenure.errors import ConfigError

PORT = 6_379

SOCKETS = frozenset({"redis+unix", "redis+socket", "unix"})
"""Schemes whose path is that of a Unix socket: ours, Celery's, and redis-py's."""

SOCKET_BYTES = 103
"""The longest path of a Unix socket: of macOS, as other systems take some bytes more."""

Endpoint = tuple[str, int]
"""Host and port of a server."""


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
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
        db: The number of the database, in place of the one after the slash.
        virtual_host: The same, as Celery writes it.
        username: The user, if there is none before the ``@``.
        password: The password, if there is none before the ``@``.
        ssl_cert_reqs: As redis-py's: with ``none``, neither the server's certificate nor its name is verified.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "max_connections": "write connections=N",
            "socket_connect_timeout": "write timeout=SECONDS, which connecting is part of",
            "socket_timeout": "write timeout=SECONDS",
            "ssl": "write rediss:// for TLS",
            "ssl_ca_certs": "write ca=FILE",
            "ssl_certfile": "write cert=FILE",
            "ssl_check_hostname": "write check_hostname=false to verify no name",
            "ssl_keyfile": "write key=FILE",
            "tls": "write rediss:// for TLS",
        }
    )
    """Options of other clients, and what to write instead."""

    timeout: float = 5.0
    connections: int = 16
    prefix: str = "tenure:"
    lease_prefix: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True
    cluster: bool = False
    db: int | None = None
    virtual_host: int | None = None
    username: str | None = None
    password: Secret | None = None
    ssl_cert_reqs: Literal["none", "optional", "required", "CERT_NONE", "CERT_OPTIONAL", "CERT_REQUIRED"] | None = None
    client_name: str | None = set_aside("connections have no name")
    decode_responses: str | None = set_aside("bodies are bytes")
    encoding: str | None = set_aside("texts are sent in UTF-8")
    family: str | None = set_aside("each address that a name has is tried")
    health_check_interval: str | None = set_aside("each request has a time limit, and a broken connection is replaced")
    protocol: Literal["2", "3"] | None = set_aside("connections speak RESP2")
    retry_on_timeout: str | None = set_aside("a request is repeated where it can't be executed twice")

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not 1 <= self.connections <= 1_000:
            raise ConfigError(f"connections must be from 1 to 1000, not {self.connections}; try connections=16")
        for name in ("prefix", "lease_prefix"):
            if set(getattr(self, name) or "") & set("{}"):
                raise ConfigError(f"{name} must have no braces: they would change the slot of a key in a cluster")
        for name in ("db", "virtual_host"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must be the number of a database, not {getattr(self, name)}; try {name}=0")
        if not self.verifies and (self.ca or not self.check_hostname):
            raise ConfigError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} verifies nothing, and ca= and check_hostname= say what to verify; "
                "leave out one of them"
            )

    @property
    def verifies(self) -> bool:
        """Whether a server's certificate is verified. For a client, ``optional`` is the same as ``required``."""
        return self.ssl_cert_reqs not in ("none", "CERT_NONE")

    @property
    def leases(self) -> str:
        """The beginning of a lease's key."""
        return f"{self.prefix}lease:" if self.lease_prefix is None else self.lease_prefix


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and database of a Redis, and the login."""

    host: str
    """A name or an address; or the path of a Unix socket, which begins with a slash."""
    port: int
    database: int
    username: str | None
    password: Secret | None
    is_tls: bool

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket; None if there is a host."""
        return self.host if self.host.startswith("/") else None

    @property
    def uses_tls(self) -> bool:
        """Whether any server on the way is asked by TLS."""
        return self.is_tls

    def __str__(self) -> str:
        if self.socket is not None:
            return f"redis+unix://{quote(os.fsencode(self.socket))}?db={self.database}"
        return f"{'rediss' if self.is_tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def address_of(url: Url, options: Options) -> Address:
    """Return the address that *url* names.

    Raises:
        ConfigError: It has another form, or says one thing in two ways that differ.
    """
    if url.scheme in SOCKETS:
        return _socket_of(url, options)
    form = f"write {url.scheme}://[[user]:password@]host[:port][/database]"
    if not url.hosts and url.path.strip("/") and not url.path.strip("/").isdecimal():
        raise ConfigError(f"{str(url)!r} names no host; for a Unix socket, write redis+unix:///PATH?db=0; else, {form}")
    host, port = url.place(PORT, form)
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise ConfigError(f"{str(url)!r} has a database that is no number; {form}")
    written = {f"/{database}": int(database)} if database else {}
    return Address(host, port, database_of(url, options, written), *login_of(url, options), url.scheme == "rediss")


def _socket_of(url: Url, options: Options) -> Address:
    form = f"write {url.scheme}:///run/redis/redis.sock?db=0"
    if url.hosts:
        raise ConfigError(f"{str(url)!r} names a host, and the path of a socket begins after three slashes; {form}")
    path = unquote(url.path)
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"{str(url)!r} has a path that can't be one of a socket; {form}")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise ConfigError(f"a Unix socket's path has a character that no file can have; {form}") from error
    if size > SOCKET_BYTES:
        raise ConfigError(
            f"the path in {str(url)!r} has {size} bytes, and the one of a socket at most {SOCKET_BYTES}; set a shorter "
            "one as unixsocket of the server, or make a symbolic link"
        )
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError(f"{str(url)!r} names a Unix socket, and this Python has none; write redis://host:port")
    if options.cluster:
        raise ConfigError("a Redis Cluster has no socket for all its nodes; remove cluster=true, or write redis://")
    return Address(path, 0, database_of(url, options, {}), *login_of(url, options), is_tls=False)


def database_of(url: Url, options: Options, written: Mapping[str, int]) -> int:
    """Return the number of the database, which a URL may have in three places; *written* is that of its path.

    Raises:
        ConfigError: They differ.
    """
    places = dict(written)
    places |= {f"{name}={one}": one for name in ("db", "virtual_host") if (one := getattr(options, name)) is not None}
    if len(set(places.values())) > 1:
        raise ConfigError(f"{str(url)!r} names two databases, {' and '.join(places)}; leave out one of them")
    return next(iter(places.values()), 0)


def login_of(url: Url, options: Options) -> tuple[str | None, Secret | None]:
    """Return user and password, which a URL may have before its @ or among its options.

    Raises:
        ConfigError: One is in both places.
    """
    user = url.user.reveal() if url.user else None
    if (user and options.username) or (url.password and options.password):
        raise ConfigError(f"{str(url)!r} has a login before its @, and one among its options; leave out one of them")
    return user or options.username or None, url.password or options.password or None


def escaped(name: str) -> str:
    """Return *name* without braces, so that it can't change the slot of a key; no two names give the same."""
    return re.sub("[%{}]", lambda found: f"%{ord(found[0]):02X}", name)
