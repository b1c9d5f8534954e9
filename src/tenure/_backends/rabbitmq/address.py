"""The address of a RabbitMQ: the options of its URL, host, virtual host and login."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal
from urllib.parse import quote, unquote

from tenure._logins import Login, PasswordOptions
from tenure._opened import Fact
from tenure._option_files import require_readable
from tenure._secret import Secret
from tenure._set_aside import set_aside
from tenure._tls_context import ReloadingContext, tls_context
from tenure._url import Url
from tenure.errors import ConfigError

VHOST_LETTERS, VHOST_BYTES = 127, 255
"""The longest virtual host: by the driver, and by AMQP."""

LOGIN_MAX = 3_000
"""Bytes of user and password together: AMQP's first frames have 4,096, with what a client tells about itself."""


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of an ``amqp:`` URL.

    Args:
        timeout: Seconds that a request may take, connecting included.
        heartbeat: Seconds. A connection without a sign of life is given up by this process after 1.25 times as many,
            and by the server after two to three times as many, which then delivers its messages to others.
        consumer_timeout: Seconds for which the server lets a message be unacknowledged, as configured there; no lock is
            held for longer.
        ca: A file with the certificates to trust, instead of the system's (with TLS only).
        cert: A file with the client's certificate, if the server requires one.
        key: A file with its key.
        check_hostname: Whether the server's certificate must be for the host in the URL.
    """

    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "cacertfile": "write ca=FILE",
            "cafile": "write ca=FILE",
            "certfile": "write cert=FILE",
            "fail_if_no_peer_cert": "it is for servers; leave it out",
            "keyfile": "write key=FILE",
            "no_verify_ssl": "a server's certificate is always verified; name its authority with ca=FILE",
            "ssl_options": "write amqps://, with ca=FILE, cert=FILE and key=FILE",
        }
    )
    """Options of other clients, and what to write instead."""

    timeout: float = 5.0
    heartbeat: int = 10
    consumer_timeout: float = 1_800.0
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True
    auth_mechanism: Literal["plain", "PLAIN"] | None = set_aside("the login is always PLAIN")
    blocked_connection_timeout: str | None = set_aside("timeout bounds each request, also to a server that is blocked")
    channel_max: str | None = set_aside("the server's maximum holds")
    connection_attempts: str | None = set_aside("tenure connects again by itself")
    connection_timeout: str | None = set_aside("connecting is part of timeout")
    frame_max: str | None = set_aside("the server's maximum holds")
    locale: str | None = set_aside("texts are en_US")
    name: str | None = set_aside("connections are named after what they are for")
    retry_delay: str | None = set_aside("tenure connects again by itself")
    server_name_indication: str | None = set_aside("TLS always names the host")
    socket_timeout: str | None = set_aside("timeout bounds each request")
    stack_timeout: str | None = set_aside("connecting is part of timeout")
    verify: Literal["verify_peer"] | None = set_aside("a server's certificate is always verified")

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not 1 <= self.heartbeat <= 600:
            raise ConfigError(f"heartbeat must be from 1 to 600 seconds, not {self.heartbeat}; try heartbeat=10")
        if self.consumer_timeout < 10.0:
            raise ConfigError(
                f"consumer_timeout must be at least 10 seconds, not {self.consumer_timeout:g}; give the value that the "
                "server is configured with (1800 by default)"
            )


@dataclass(frozen=True, slots=True)
class Address:
    """Host, port and virtual host of a RabbitMQ, and the login; without a password, if that comes from elsewhere."""

    host: str
    port: int
    vhost: str
    username: str
    password: Secret | None
    is_tls: bool

    @property
    def server(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        vhost = "" if self.vhost == "/" else quote(self.vhost, safe="")
        return f"{'amqps' if self.is_tls else 'amqp'}://{self.server}/{vhost}"


def address_of(url: Url, *, has_source: bool = False) -> Address:
    """Return the address that *url* names; its login is that of ``guest``, unless the password *has_source* elsewhere.

    As other clients read it, a path that is missing or ``/`` names the virtual host ``/``, as ``%2F`` does.

    Raises:
        ConfigError: It has another form.
    """
    form = f"write {url.scheme}://[user:password@]host[:port][/vhost]"
    is_tls = url.scheme == "amqps"
    host, port = url.place(5671 if is_tls else 5672, form)
    vhost = url.path.removeprefix("/")
    if vhost == "/":  # as Celery writes the virtual host "/"
        vhost = ""
    if "/" in vhost:
        raise ConfigError(f"{str(url)!r} has a second slash in its path; {form}, with a slash of the name as %2F")
    vhost = unquote(vhost) or "/"
    if len(vhost) > VHOST_LETTERS or len(vhost.encode()) > VHOST_BYTES:
        raise ConfigError(
            f"the virtual host in {str(url)!r} ({len(vhost)} characters, {len(vhost.encode())} bytes) must not be "
            f"longer than {VHOST_LETTERS} characters and {VHOST_BYTES} bytes"
        )
    user, password = url.user.reveal() if url.user else "", url.password
    if not has_source:
        user, password = user or "guest", password or Secret("guest")
    require_fitting(Login(user, password), f"{url.scheme}://{url.hosts}")
    return Address(host, port, vhost, user, password, is_tls)


def require_fitting(login: Login, source: str) -> None:
    """Refuse a *login* that is too long; *source* is where it is from.

    Raises:
        ConfigError: It is.
    """
    password = login.password.reveal() if login.password else ""
    if (size := len(f"{login.user or ''}{password}".encode())) > LOGIN_MAX:
        raise ConfigError(
            f"user and password of {source} ({size:,} bytes) must not be longer than {LOGIN_MAX:,} bytes together: "
            "they must fit into AMQP's first frame"
        )


def granting(user: str, names: str = "") -> str:
    """Return how to let a *user* do everything, with all *names* that match this; the user of a token if empty."""
    rights = f"to configure, write and read {names}".rstrip()
    if not user:
        return f"give the token the scopes {rights}"
    return f"give the user {user!r} the rights {rights} with rabbitmqctl set_permissions"


def require_files(address: Address, options: Options) -> tuple[Fact, ...]:
    """Return a warning for each file with a secret that other users can read.

    Raises:
        ConfigError: A file can't be read.
    """
    return require_readable(address, ca=options.ca, cert=options.cert, key=options.key)


def tls_of(address: Address, options: Options) -> ReloadingContext | None:
    """Return how to encrypt the connection; None if it isn't.

    Raises:
        ConfigError: A file can't be read, or is no certificate.
    """
    if not address.is_tls:
        return None
    return tls_context(
        address, ca=options.ca, cert=options.cert, key=options.key, check_hostname=options.check_hostname
    )
