"""The URL of a fleet: its members, which of them this is, the rule, the times, the key."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import shlex
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.keys import KEY_MIN, KeyFile, KeysOfFleet
from tenure._backends.peers.seal import SharedKey
from tenure._backends.peers.tcp import TcpTransport, address
from tenure._election.store import LeaseTraits
from tenure._opened import Fact
from tenure._option_files import read_own_secret, require_readable
from tenure._secret import HIDDEN, path_shown
from tenure._timing import DERIVED
from tenure._tls_context import ReloadingContext, tls_context
from tenure._url import Url, can_be_host, is_loopback
from tenure.errors import ConfigError, Unavailable

KEY_VARIABLE = "TENURE_PEERS_KEY"
NO_KEY = SharedKey(b"no key")
TTLS_OF_HEARTBEATS = 3
"""Heartbeats that a lease must outlast, or an election takes longer than the term that it gives."""


@dataclass(frozen=True, slots=True)
class Options:
    """The query of a ``peers://`` URL."""

    me: str = ""
    """Which of the members this is: its address, or its host or port if only one has it. Without: a client."""
    listen: str = ""
    """Where to listen, if not at this member's address: a host, or a host and a port."""
    strategy: Literal["lowest", "bully", "ring"] = "lowest"
    quorum: Literal["majority", "none"] | None = None
    ttl_max: float = 15.0
    heartbeat: float | None = None
    patience: float | None = None
    key_file: str = ""
    insecure: bool = False
    """Allow members on several machines without a key."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    dns: int = 0
    """The URL names one host, for which DNS has this many addresses: those are the members."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A parsed and checked URL."""

    written: str
    addresses: tuple[str, ...]
    options: Options
    key: SharedKey
    warnings: tuple[Fact, ...]
    """One for each file with a secret that other users can read."""
    key_file: KeyFile | None = None
    """Where the key comes from, if it is read again."""
    to_listen: ReloadingContext | None = None
    """By what connections are encrypted that others have made; None for TCP in clear."""
    to_dial: ReloadingContext | None = None
    """By what those are encrypted that are made to others."""

    @classmethod
    def of(cls, url: Url) -> Settings:
        """Parse *url*.

        Raises:
            ConfigError: It names no members, an option is unknown or doesn't fit, or a file can't be used.
        """
        options = url.options(Options)
        if options.listen:
            _check_listen(options.listen)
        if url.path.strip("/"):
            raise ConfigError(f"{str(url)!r} has a path, which means nothing in a fleet; leave it out")
        if url.user is not None:
            raise ConfigError(
                f"{str(url)!r} has a login, and members have none, but a key: see key_file; write "
                "peers://a:7000,b:7000,c:7000?me=a"
            )
        addresses = tuple(_member(each, url) for each in url.hosts.split(","))
        if len(set(addresses)) != len(addresses):
            raise ConfigError(f"{str(url)!r} names a member twice; every member has an address of its own")
        if options.dns and len(addresses) != 1:
            raise ConfigError(f"dns= needs one host name, whose addresses are the members; {url.hosts!r} has several")
        key, key_file, warnings = _key(options, addresses)
        warnings += _require_tls_files(options)
        to_listen, to_dial = _tls(options, ssl.Purpose.CLIENT_AUTH), _tls(options, ssl.Purpose.SERVER_AUTH)
        settings = cls(str(url), addresses, options, key, warnings, key_file, to_listen, to_dial)
        if options.dns:
            settings._fleet(tuple(f"{number}" for number in range(options.dns)), None)  # the rest of it must fit
        else:
            settings._fleet(addresses, settings._me(addresses))
        if options.listen and not options.me:
            raise ConfigError(
                f"listen={options.listen} is for a member, and the URL does not say which one this is; add me="
            )
        return settings

    @property
    def has_key(self) -> bool:
        """Whether a key keeps foreign processes out."""
        return self.key != NO_KEY

    @property
    def traits(self) -> LeaseTraits:
        """What this fleet can do."""
        ttl_max = self.options.ttl_max
        heartbeat = self.options.heartbeat or ttl_max / 15
        return LeaseTraits(
            ttl_min=TTLS_OF_HEARTBEATS * heartbeat,
            ttl_max=ttl_max,
            fencing="emulated",
            expiry="store clock",
            hints=True,
            survives_restart=False,
            takes_back=True,
            tells_vacancy=False,
        )

    async def fleet(self) -> Fleet:
        """Return the fleet; with ``dns``, after asking DNS for its members.

        Raises:
            Unavailable: DNS has fewer or more addresses than there are members.
            ConfigError: This is none of them.
        """
        if not self.options.dns:
            return self._fleet(self.addresses, self._me(self.addresses))
        host, port = address(self.addresses[0])
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"the members' name {host!r} can't be resolved: {error}") from error
        # By number, not as text: all members must come to the same order.
        hosts = sorted({ipaddress.ip_address(each[4][0]) for each in found}, key=lambda ip: (ip.version, int(ip)))
        if len(hosts) != self.options.dns:
            raise Unavailable(f"{host!r} has {len(hosts)} addresses, and the fleet has {self.options.dns} members")
        members = tuple(f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}" for ip in hosts)
        return self._fleet(members, self._me_of_these(members) if self.options.me == "auto" else self._me(members))

    def transport(self, fleet: Fleet) -> TcpTransport:
        """Return the transport to the members of *fleet*."""
        fixed = SharedKey.of(self.key.key, fleet.terms)
        return TcpTransport(
            fleet,
            fixed if self.key_file is None else KeysOfFleet(self.key_file, fleet.terms),
            random.Random(),
            server_tls=self.to_listen,
            client_tls=self.to_dial,
            listen=self._listen(fleet),
        )

    def _listen(self, fleet: Fleet) -> str | None:
        """Return where to listen instead of at this member's address; its port is this member's if none is given."""
        given = self.options.listen
        if not given or fleet.me is None:
            return None
        return given if _has_port(given) else f"{given}:{address(fleet.members[fleet.me])[1]}"

    def _fleet(self, members: tuple[str, ...], me: int | None) -> Fleet:
        given = self.options
        heartbeat = DERIVED if given.heartbeat is None else given.heartbeat
        patience = DERIVED if given.patience is None else given.patience
        return Fleet(members, me, given.strategy, given.quorum, given.ttl_max, heartbeat, patience)

    def _me(self, members: tuple[str, ...]) -> int | None:
        me = self.options.me
        if not me:
            return None
        fits = [n for n, member in enumerate(members) if me in (member, *_parts(member))]
        if len(fits) == 1:
            return fits[0]
        every = ", ".join(members)
        if fits:
            raise ConfigError(f"me={me} is more than one of the members {every}; write the whole address of this one")
        if me == "auto":
            raise ConfigError(f"me=auto needs dns=, and the URL lists its members; say which of {every} this one is")
        raise ConfigError(
            f"me={me} is none of the members {every}; write the one that this is as it is listed, or add it to the "
            "list of every member"
        )

    def _me_of_these(self, members: tuple[str, ...]) -> int | None:
        """Return which of *members* has an address of this machine: one that can be bound."""
        for number, member in enumerate(members):
            host, _ = address(member)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind((host, 0))
                return number
        raise ConfigError(f"me=auto: none of the members {', '.join(members)} has an address of this machine")


def _tls(options: Options, purpose: ssl.Purpose) -> ReloadingContext | None:
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    return tls_context("the fleet", ca=ca, cert=cert, key=key or None, purpose=purpose) if cert else None


def _require_tls_files(options: Options) -> tuple[Fact, ...]:
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if cert is key is ca is None:
        return ()
    if not (cert and ca):  # an empty one, as of a variable that is not set, must not mean no TLS
        raise ConfigError("TLS between members needs tls_cert and tls_ca (and tls_key, if it is a file of its own)")
    return require_readable("the fleet", tls_cert=cert or None, tls_key=key or None, tls_ca=ca or None)


def _member(written: str, url: Url) -> str:
    if trouble := _trouble(written):
        raise ConfigError(
            f"{written!r} in {str(url)!r} is no member's address: {trouble}; write peers://a:7000,b:7000,c:7000?me=a"
        )
    return written


def _check_listen(written: str) -> None:
    trouble = _trouble(written if _has_port(written) else f"{written}:1")
    if trouble:
        raise ConfigError(
            f"listen={written!r} is nowhere to listen: {trouble}; write listen=0.0.0.0 for every address of this "
            "machine, or listen=0.0.0.0:7000 for another port than the others dial"
        )


def _has_port(written: str) -> bool:
    return ":" in written.rpartition("]")[2]


def _trouble(written: str) -> str:
    """Return why *written* is not ``host:port``; an empty text if it is."""
    host, _, port = written.rpartition(":")
    if not host:
        return "a host and a port are needed"
    if any(each.isspace() for each in written):
        return "it has a space"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address must be in brackets"
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        return f"its port must be a number from 1 to 65535, not {port!r}"
    return "" if can_be_host(host) else "its host is no valid DNS name"


def _parts(member: str) -> tuple[str, str]:
    host, port = address(member)
    return host, str(port)


def _key(options: Options, addresses: tuple[str, ...]) -> tuple[SharedKey, KeyFile | None, tuple[Fact, ...]]:
    if options.key_file:
        return _key_of_file(options.key_file)
    key = os.environ.get(KEY_VARIABLE, "").encode()
    if key:
        if len(key) < KEY_MIN:
            raise ConfigError(
                f"the environment variable {KEY_VARIABLE} must hold at least {KEY_MIN} bytes, not {len(key)}; make one "
                "with: openssl rand -hex 32"
            )
        return SharedKey(key), None, ()
    hosts = [address(each)[0] for each in addresses]
    if options.listen:
        hosts.append(address(options.listen)[0] if _has_port(options.listen) else options.listen.strip("[]"))
    if not options.insecure and not all(is_loopback(each) for each in hosts):
        raise ConfigError(
            "members on several machines need a shared key, or any host that reaches their ports could vote; make one "
            f"with: {_command_for('peers.key')}, and add key_file=peers.key (or set "
            f"{KEY_VARIABLE}); insecure=true does without"
        )
    return NO_KEY, None, ()


def _key_of_file(path: str) -> tuple[SharedKey, KeyFile, tuple[Fact, ...]]:
    shown = path_shown(path)
    command = _command_for("peers.key" if shown == HIDDEN else shown)
    try:
        content, warnings = read_own_secret("key_file", path)
        file = KeyFile(path, content)
    except OSError as error:
        raise ConfigError(
            f"the key file {shown!r} can't be read: {error.strerror}; make one with: {command}"
        ) from None  # the cause quotes the path, which may be the secret itself
    except ValueError as error:
        raise ConfigError(f"the key file must hold {error}; make one with: {command}") from None
    return SharedKey(file.keys[0]), file, warnings


def _command_for(file: str) -> str:
    # A plain redirection makes a file that all users can read.
    return f"(umask 077; openssl rand -hex 32 > {shlex.quote(file)})"
