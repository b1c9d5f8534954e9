"""The address of an ensemble: the options of its URL, hosts and login."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from tenure._logins import PasswordOptions
from tenure._secret import Secret
from tenure._url import Url, in_url
from tenure.errors import ConfigError

PORT = 2_181
_UNFIT = re.compile("[\u0001-\u001f\u007f-\u009f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Options(PasswordOptions):
    """The query of a ``zookeeper:`` URL.

    Args:
        dialect: Whose queue to stand in: Curator's ``LeaderLatch`` (``latch``), Curator's ``LeaderSelector`` and
            ``InterProcessMutex`` (``lock``), or kazoo's ``Election`` and ``Lock`` (``kazoo``).
        tick: The ``tickTime`` of the ensemble, in seconds.
        timeout: The longest time of a request in seconds, connecting included.
        auth: How the user and the password are shown to the server: ``digest`` (``addauth digest``) or
            ``sasl`` (mechanism DIGEST-MD5).
        acl: The rights on nodes that tenure makes: all rights for everybody (``open``); all for the users that this
            connection is known as (``creator``); or these, and everybody may read (``read``). By default ``creator``
            with a login, else ``open``.
        tls: Whether to use TLS.
        ca: A file with the certificates to trust, instead of the system's.
        cert: A file with the client's certificate, if the server requires one.
        key: A file with its key.
        check_hostname: Whether the server's certificate must be for the host in the URL.
    """

    dialect: Literal["latch", "lock", "kazoo"] = "latch"
    tick: float = 2.0
    timeout: float = 5.0
    auth: Literal["digest", "sasl"] = "digest"
    acl: Literal["open", "creator", "read"] | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    check_hostname: bool = True

    def __post_init__(self) -> None:
        if not 0.01 <= self.tick <= 60.0:
            raise ConfigError(
                f"tick must be from 0.01 to 60 seconds, not {self.tick:g}; it is the ensemble's tickTime, which is in "
                "milliseconds there; try tick=2"
            )
        if not 0.01 <= self.timeout <= 60.0:
            raise ConfigError(f"timeout must be from 0.01 to 60 seconds, not {self.timeout:g}; try timeout=5")
        if not self.tls and (self.ca or self.cert or self.key or not self.check_hostname):
            raise ConfigError("ca, cert, key and check_hostname are options for TLS, which is not used; add tls=true")
        if bool(self.cert) != bool(self.key):
            raise ConfigError("cert and key are given together: the client's certificate, and its key")


@dataclass(frozen=True, slots=True)
class Address:
    """The servers of an ensemble, the login, and the node under which the elections stand."""

    hosts: tuple[tuple[str, int], ...]
    root: str
    """Empty for the root of the tree; else it begins with a slash, and doesn't end with one."""
    user: str | None
    password: Secret | None

    @property
    def servers(self) -> str:
        """The servers, as kazoo reads them."""
        return ",".join(in_url(host, port) for host, port in self.hosts)

    def __str__(self) -> str:
        return f"zookeeper://{self.servers}{self.root or '/'}"


def address_of(url: Url, *, has_source: bool = False) -> Address:
    """Return the address that *url* names; its user may stand alone if the password *has_source* elsewhere.

    Raises:
        ConfigError: It has another form.
    """
    form = f"write {url.scheme}://[user:password@]host[:port][,host[:port]…]/[path]"
    places = url.places(PORT, form)
    if url.user is not None and not (url.user and (url.password or has_source)):
        raise ConfigError(f"{str(url)!r} needs a user and a password before the @; {form}")
    return Address(places, _root(url, form), url.user.reveal() if url.user else None, url.password)


def _root(url: Url, form: str) -> str:
    written = unquote(url.path).rstrip("/")
    parts = written.split("/")[1:]
    if any(part in ("", ".", "..") or _UNFIT.search(part) or "\0" in part for part in parts):
        raise ConfigError(f"{str(url)!r} has the path {written!r}, which can't be one of ZooKeeper's; {form}")
    if parts[:1] == ["zookeeper"]:
        raise ConfigError(f"{str(url)!r} has the path {written!r}, which is ZooKeeper's own; use another one")
    return "".join(f"/{part}" for part in parts)


def require_login(address: Address, options: Options, *, has_source: bool) -> None:
    """Refuse a login by SASL without a user, and without another source of it: nobody would be logged in."""
    if options.auth == "sasl" and not address.user and not has_source:
        raise ConfigError(
            "auth=sasl needs a user and a password, and the URL has none; write zookeeper://USER:PASSWORD@"
            f"{address.servers}{address.root or '/'}?auth=sasl"
        )
