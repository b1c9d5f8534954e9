"""The address of a PostgreSQL: the options of its URL, and the DSN for the driver."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from typing import Literal
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``postgresql:`` URL: options of tenure, and those of libpq.

    Args:
        schema: The PostgreSQL schema that tenure's tables and functions are in.
        pool: How many connections each event loop may have open, besides one for renewals.
        listen: Whether to listen for changes on one more connection. This fails behind a transaction pooler.
        prepared: Whether to keep prepared statements. Not behind a transaction pooler that doesn't track them.
        timeout: Seconds that a request may take, the wait for a connection included.
        connect_timeout: Seconds that an attempt to connect may take; ``timeout``, and at least 5, if None.
    """

    schema: str = "tenure"
    pool: int = 4
    listen: bool = True
    prepared: bool = True
    timeout: float = 5.0
    application_name: str = "tenure"
    connect_timeout: float | None = None
    target_session_attrs: Literal["read-write", "primary"] = "read-write"
    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = None
    host: str | None = None
    port: str | None = None
    user: str | None = None
    password: Secret | None = None
    passfile: str | None = None
    dbname: str | None = None
    service: str | None = None
    sslrootcert: str | None = None
    sslcert: str | None = None
    sslkey: str | None = None
    sslcrl: str | None = None
    sslpassword: Secret | None = None
    sslnegotiation: Literal["postgres", "direct"] | None = None
    ssl_min_protocol_version: str | None = None
    ssl_max_protocol_version: str | None = None
    krbsrvname: str | None = None
    gsslib: Literal["gssapi", "sspi"] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.schema) or self.schema.startswith("pg_"):
            raise ConfigError(
                f"schema must be up to 40 small letters, digits and underscores, and not begin with a digit or pg_, "
                f"not {self.schema!r}; try schema=tenure"
            )
        if not 1 <= self.pool <= 1_000:
            raise ConfigError(f"pool must be from 1 to 1000 connections, not {self.pool}; try pool=4")
        for name in ("timeout", "connect_timeout"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 3_600.0:
                raise ConfigError(f"{name} must be more than 0 and up to 3600 seconds, not {value:g}; try {name}=5")


_OURS = {"schema", "pool", "listen", "prepared", "timeout", "application_name", "connect_timeout"} | {
    "target_session_attrs"  # an argument of the driver, not part of the DSN
}


def dsn_of(url: Url, **decided: str | None) -> Secret:
    """Return the DSN for the driver: *url* without the options of tenure, and with those that are *decided*.

    Raises:
        ConfigError: A port is not a number.
    """
    if "," in url.hosts and not all(url.hosts.split(",")):
        raise ConfigError(f"{url} has an empty host in its list; remove the comma that is too much")
    try:
        for host in url.hosts.split(","):
            _ = urlsplit(f"//{host}").port
    except ValueError:
        # Without the cause: it quotes the port, which may be part of a password that is not percent-encoded.
        raise ConfigError(
            f"{url} has a port that is no number; percent-encode the special characters of the password"
        ) from None
    left = {name: value.reveal() for name, value in url.query.items() if name not in _OURS}
    left |= {name: text for name, text in decided.items() if text is not None}
    login = ":".join(quote(part.reveal(), safe="") for part in (url.user, url.password) if part is not None)
    netloc = url.hosts if url.user is None else f"{login}@{url.hosts}"
    return Secret(urlunsplit(("postgresql", netloc, url.path, urlencode(left), "")))


def servers_of(url: Url, options: Options) -> str:
    """Return the servers that *url* names, each as ``host:port``, for a message."""
    hosts = url.hosts or options.host or os.environ.get("PGHOST") or "localhost"
    port = options.port or os.environ.get("PGPORT") or "5432"
    return ",".join(host if ":" in host.rpartition("]")[2] else f"{host}:{port}" for host in hosts.split(","))


assert {field.name for field in fields(Options)} >= _OURS
