"""The address of an etcd: its members, the login, and the options of the URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tenure._logins import PasswordOptions
from tenure._secret import Secret
from tenure._url import Url, in_url
from tenure.errors import ConfigError

PORT = 2_379


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of an ``etcd:`` or ``etcds:`` URL.

    Args:
        timeout: Seconds that a request may take, on all members together, connecting included.
        prefix: The beginning of every key, as written: the key of a candidate is PREFIXNAME/LEASE.
        kind: Which foreign clients stand in the same elections: ``election`` for etcd's ``Election`` and
            ``etcdctl elect``, whose keys have the candidate as their value; ``lock`` for its ``Mutex`` and ``etcdctl
            lock``, whose keys have an empty value.
        ca: A file with the certificates to trust, instead of the system's (with ``etcds:`` only).
        cert: A file with the client's certificate, if the servers require one.
        key: A file with its key.
        check_hostname: Whether a server's certificate must be for its host in the URL.
    """

    timeout: float = 5.0
    prefix: str = "tenure/"
    kind: Literal["election", "lock"] = "election"
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True

    def __post_init__(self) -> None:
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if "\0" in self.prefix:
            raise ConfigError("prefix must have no NUL; write for example prefix=tenure/")
        if self.key and not self.cert:
            raise ConfigError("key= names the key of a client's certificate, and cert= is missing; name both files")


@dataclass(frozen=True, slots=True)
class Address:
    """The members of an etcd, as URLs of HTTP, and the login."""

    members: tuple[str, ...]
    username: str | None
    password: Secret | None
    is_tls: bool

    def __str__(self) -> str:
        hosts = ",".join(member.partition("://")[2] for member in self.members)
        return f"{'etcds' if self.is_tls else 'etcd'}://{hosts}"


def address_of(url: Url, *, has_source: bool = False) -> Address:
    """Return the address that *url* names; its user may stand alone if the password *has_source* elsewhere.

    Raises:
        ConfigError: It has another form.
    """
    form = f"write {url.scheme}://[user:password@]host[:port][,host[:port]…]/?prefix=tenure/"
    is_tls = url.scheme == "etcds"
    scheme = "https" if is_tls else "http"
    members = tuple(f"{scheme}://{in_url(host, port)}" for host, port in url.places(PORT, form))
    if url.path.strip("/"):
        raise ConfigError(f"{str(url)!r} has a path, and etcd has none; {form}, with the beginning of the keys there")
    if url.user is not None and not (url.user and (url.password or has_source)):
        raise ConfigError(f"{str(url)!r} has an @, but not both a user and a password before it; {form}")
    return Address(members, url.user.reveal() if url.user else None, url.password, is_tls)
