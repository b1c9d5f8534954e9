"""The address of a NATS: its servers, the login, and the options of the URL."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tenure._logins import PasswordOptions
from tenure._secret import Secret
from tenure._url import Url, in_url
from tenure.errors import ConfigError

PORT = 4_222
_WORD = re.compile(r"[A-Za-z0-9-]+")
_INBOX = re.compile(r"[A-Za-z0-9_-]{1,90}")
_PREFIX_MAX = 90
_REPLICAS_MAX = 5


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of a ``nats:`` URL.

    Args:
        timeout: Seconds that a request may take, connecting included.
        prefix: The first word of every subject, and of the names of all streams.
        replicas: On how many servers of a cluster each stream is kept, when tenure makes it.
        domain: The JetStream domain, if it is not the one of the servers.
        inbox: The first word of the subjects on which it is answered, and gets messages: whoever may subscribe there
            can read them, so users with few rights have one of their own.
        creds: A file with the user's credentials (JWT and seed).
        nkey: A file with the user's NKey seed.
        tls: Whether to insist on TLS; a server that requires it gets it in any case.
        ca: A file with the certificates to trust, instead of the system's.
        cert: A file with the client's certificate, if the servers require one.
        key: A file with its key.
    """

    timeout: float = 5.0
    prefix: str = "tenure"
    replicas: int = 1
    domain: str | None = None
    inbox: str = "_INBOX"
    creds: str | None = None
    nkey: str | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        for name, value in (("prefix", self.prefix), ("domain", self.domain)):
            if value is not None and not _WORD.fullmatch(value):
                raise ConfigError(
                    f"{name} must be one word of letters, digits and '-', not {value!r}; try {name}=tenure"
                )
        if not _INBOX.fullmatch(self.inbox):
            raise ConfigError(
                f"inbox must be one word of letters, digits, '-' and '_', not {self.inbox!r}; try inbox=_INBOX_app"
            )
        if len(self.prefix) > _PREFIX_MAX:
            raise ConfigError(f"prefix must have at most {_PREFIX_MAX} characters, not {len(self.prefix)}")
        if not 1 <= self.replicas <= _REPLICAS_MAX:
            raise ConfigError(f"replicas must be from 1 to {_REPLICAS_MAX}, not {self.replicas}; try replicas=3")
        if self.key and not self.cert:
            raise ConfigError("key= names the key of a client's certificate, and cert= is missing; name both files")
        if self.nkey and re.fullmatch(r"S[A-Z2-7]{30,}", self.nkey):
            raise ConfigError("nkey= has a seed itself, and must name a file with it, which others can't read")
        if self.creds and self.nkey:
            raise ConfigError("creds= and nkey= are two logins; give one of them")

    @property
    def login_file(self) -> str:
        """The option that names a file with the whole login, as ``creds=``; empty if none does."""
        return "creds=" if self.creds else "nkey=" if self.nkey else ""

    @property
    def wants_tls(self) -> bool:
        """Whether a connection without TLS is not enough."""
        return self.tls or bool(self.ca or self.cert)


@dataclass(frozen=True, slots=True)
class Address:
    """The servers of a NATS, and the login."""

    servers: tuple[str, ...]
    """Each as ``host:port``."""
    username: str | None
    password: Secret | None
    token: Secret | None

    def __str__(self) -> str:
        return f"nats://{','.join(self.servers)}"


def address_of(url: Url, *, has_source: bool = False) -> Address:
    """Return the address that *url* names; if the password *has_source* elsewhere, what stands before an @ is a user.

    Raises:
        ConfigError: It has another form.
    """
    form = "write nats://[user:password@]host[:port][,host[:port]…]/?prefix=tenure"
    servers = tuple(in_url(host, port) for host, port in url.places(PORT, form))
    if url.path.strip("/"):
        raise ConfigError(f"{str(url)!r} has a path, and NATS has none; {form}")
    user, password = url.user, url.password
    if user is None:
        return Address(servers, None, None, None)
    if not user:
        raise ConfigError(f"{str(url)!r} has an @, but no login before it; {form}, or nats://TOKEN@host")
    if has_source and not password:
        return Address(servers, user.reveal(), None, None)
    if password is None:
        return Address(servers, None, None, user)
    if not password:
        raise ConfigError(f"{str(url)!r} has a user, but no password; {form}")
    return Address(servers, user.reveal(), password, None)
