"""The address of a PostgreSQL: the options of its URL, and the DSN for the driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import ClassVar, Literal
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from tenure._logins import PasswordOptions
from tenure._secret import Secret
from tenure._set_aside import names_set_aside, set_aside
from tenure._url import Url
from tenure.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of a ``postgresql:`` URL: options of tenure, and those of libpq and of what services print.

    Args:
        schema: The PostgreSQL schema that tenure's tables and functions are in.
        pool: How many connections each event loop may have open, besides one for renewals.
        listen: Whether to listen for changes on one more connection. This fails behind a transaction pooler.
        prepared: Whether to keep prepared statements. Not behind a transaction pooler that doesn't track them.
        timeout: Seconds that a request may take, the wait for a connection included.
        connect_timeout: Seconds that an attempt to connect may take; ``timeout``, and at least 5, if None or 0.
        options: Settings for the server, as in ``-c search_path=x``, or what a proxy takes from there.
        channel_binding: As libpq's; but ``require`` verifies the server's certificate and name, see ``encryption``.
        pgbouncer: Whether a transaction pooler is on the way: ``prepared`` and ``listen`` are then off, if not given.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "connection_limit": "write pool=N, the connections of each event loop",
            "hostaddr": "write the address in place of the host, or leave it out",
            "pool_timeout": "write timeout=SECONDS, which the wait for a connection is part of",
            "prepareThreshold": "write prepared=false for 0; else leave it out",
            "replication": "tenure doesn't use it; leave it out",
            "require_auth": "the driver can't refuse a way to log in; leave it out, and let sslmode=verify-full verify "
            "the server before it is told a password",
            "requirepeer": "the driver can't verify whose a socket is; leave it out if its folder is safe",
            "ssl": "write sslmode=require, or sslmode=verify-full to verify the server",
            "ssl_mode": "write sslmode=require, or sslmode=verify-full to verify the server",
            "sslaccept": "write sslmode=verify-full for strict, and sslmode=require for what accepts any certificate",
            "statement_cache_size": "write prepared=false for 0; else leave it out",
            "unix_sock": "write host=FOLDER, without the file .s.PGSQL.5432",
        }
    )
    """Options of other clients, and what to write instead."""

    schema: str = "tenure"
    pool: int = 4
    listen: bool = True
    prepared: bool = True
    timeout: float = 5.0
    application_name: str = "tenure"
    connect_timeout: float | None = None
    target_session_attrs: Literal["read-write", "primary", "any"] = set_aside(
        "tenure needs a server that accepts writes, so it is as read-write", "read-write", only="any"
    )
    options: str | None = None
    pgbouncer: bool = False
    channel_binding: Literal["disable", "prefer", "require"] | None = set_aside(
        "the driver can't bind a login to TLS; sslmode=verify-full keeps others from posing as the server",
        only="prefer",
    )
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
    ssl_min_protocol_version: Literal["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"] | None = None
    ssl_max_protocol_version: Literal["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"] | None = None
    krbsrvname: str | None = None
    gsslib: Literal["gssapi", "sspi"] | None = None
    client_encoding: str | None = set_aside("texts are sent in UTF-8")
    fallback_application_name: str | None = set_aside("application_name is always sent")
    gssencmode: Literal["disable", "prefer"] | None = set_aside("the driver has no encryption by GSSAPI, only TLS")
    keepalives: str | None = set_aside("each request has a time limit of its own")
    keepalives_count: str | None = set_aside("each request has a time limit of its own")
    keepalives_idle: str | None = set_aside("each request has a time limit of its own")
    keepalives_interval: str | None = set_aside("each request has a time limit of its own")
    load_balance_hosts: Literal["disable", "random"] | None = set_aside(
        "the hosts are tried in their order, until one accepts writes"
    )
    sslcompression: str | None = set_aside("nothing is compressed")
    sslsni: Literal["1"] | None = set_aside("TLS always names the host")
    supa: str | None = set_aside("it tells nothing about the connection")
    tcp_user_timeout: str | None = set_aside("each request has a time limit of its own")
    uselibpqcompat: Literal["true"] | None = set_aside("sslmode is always understood as in libpq, or more strictly")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.schema) or self.schema.startswith("pg_"):
            raise ConfigError(
                f"schema must be up to 40 small letters, digits and underscores, and not begin with a digit or pg_, "
                f"not {self.schema!r}; try schema=tenure"
            )
        if not 1 <= self.pool <= 1_000:
            raise ConfigError(f"pool must be from 1 to 1000 connections, not {self.pool}; try pool=4")
        for name in ("timeout", "connect_timeout"):
            value = getattr(self, name) or (self.timeout if name == "connect_timeout" else 0.0)  # 0 as in libpq
            if not 0.0 < value <= 3_600.0:
                raise ConfigError(f"{name} must be more than 0 and up to 3600 seconds, not {value:g}; try {name}=5")

    @property
    def session_attrs(self) -> Literal["read-write", "primary"]:
        """Which server is used, of several."""
        return "primary" if self.target_session_attrs == "primary" else "read-write"


def options_of(url: Url) -> Options:
    """Return the options of *url*.

    Raises:
        ConfigError: One is unknown, or its value doesn't fit.
    """
    options = url.options(Options)
    if not options.pgbouncer:
        return options
    return replace(
        options,
        prepared=options.prepared and "prepared" in url.query,
        listen=options.listen and "listen" in url.query,
    )


_OURS = names_set_aside(Options) | {
    *("schema", "pool", "listen", "prepared", "timeout", "application_name", "connect_timeout", "pgbouncer"),
    *("target_session_attrs", "channel_binding", "options"),  # decided here, or arguments of the driver
    *("password_file", "password_command"),
}
"""The options that are not part of the DSN."""


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
        if url.hosts.upper().startswith("%2F"):
            raise ConfigError(
                f"{url} names the folder of a socket with a colon in it; write it as an option, as in "
                "postgresql://USER:PASSWORD@/DATABASE?host=/cloudsql/PROJECT:REGION:INSTANCE"
            ) from None
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
