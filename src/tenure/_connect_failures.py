"""Failures to connect, of every store: recognised in the error of any driver, and told in the same words.

House rules:

- What may pass by itself is ``Unavailable``, and is tried again. What can never work (a name that no host can have, a
  file, a login, a right) is a ``ConfigError``, unless the client worked before: then it is being changed, and may fit
  soon.
- A host that DNS doesn't know may be known soon: that of a container is, once it runs.
- A store adds what is its own: the codes of its protocol for logins and rights, and the names of its options.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tenure._redaction import redacted
from tenure._secret import path_shown
from tenure._tls_failures import TlsAdvice, chain_of, lasting, tls_error
from tenure.errors import ConfigError, TenureError, Unavailable


class Kind(Enum):
    """Why there is no connection; the value is what to do about it, for the software of a server and its place."""

    IMPOSSIBLE_HOST = "correct it in the URL"
    UNREADABLE_FILE = "let this process read it, set HOME to a folder of its own user, or name another file"
    UNKNOWN_HOST = "check its spelling; the name of a container is known once that runs"
    NO_RESOLVER = "check the network of this machine, and its resolver (/etc/resolv.conf)"
    REFUSED = "check {place}, and whether {software} runs"
    TIMED_OUT = "check {place}, whether {software} runs, and whether a firewall drops what is sent there"
    UNREACHABLE = "check {place}, and the network between it and this machine"
    FORBIDDEN = "check the rights on the socket, and the rules of this machine for connections"
    NO_FILES_LEFT = "raise the limit of open files (ulimit -n), or open fewer connections"


LASTING = frozenset({Kind.IMPOSSIBLE_HOST, Kind.UNREADABLE_FILE, Kind.FORBIDDEN})
"""What the next attempt would meet again."""

# Of several addresses of one host, the first of these is told: it says most.
_NUMBERS = {
    errno.ECONNREFUSED: Kind.REFUSED,
    errno.EMFILE: Kind.NO_FILES_LEFT,
    errno.ENFILE: Kind.NO_FILES_LEFT,
    errno.EACCES: Kind.FORBIDDEN,
    errno.EPERM: Kind.FORBIDDEN,
    errno.ENOENT: Kind.REFUSED,  # a Unix socket, which a server makes when it begins
    errno.ETIMEDOUT: Kind.TIMED_OUT,
    errno.EHOSTUNREACH: Kind.UNREACHABLE,
    errno.EHOSTDOWN: Kind.UNREACHABLE,
    errno.ENETUNREACH: Kind.UNREACHABLE,
    errno.ENETDOWN: Kind.UNREACHABLE,
    errno.EADDRNOTAVAIL: Kind.UNREACHABLE,
}
_OF_FILES = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP})
_NUMBER = re.compile(r"\[Errno (\d+)\]")
"""How the errors of several addresses are written together, which have no number then."""
_UNKNOWN = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)
)


class NotConnectedInTime(OSError):
    """No connection was made within so many seconds, so nothing was asked."""

    def __init__(self, within: float) -> None:
        super().__init__(f"no answer within {within:.3g} s")


class _Found(NamedTuple):
    kind: Kind
    reason: str


def kind_of(error: BaseException) -> Kind | None:
    """Return why there is no connection, by the *error* of a driver; None if it is about something else."""
    found = _found(error)
    return found.kind if found else None


@dataclass(frozen=True, slots=True)
class Target:
    """A server that a client connects to, or several, as messages speak of them.

    Args:
        store: The store, as all its messages begin.
        at: Host and port, if the driver doesn't tell them; of several servers, with commas between.
        worked: Whether the client has worked before.
        software: What runs there.
        place: What tells a client where it is.
        tls: What to do about a failure of TLS, in the options of the store.
        timeout: The option of this name, in seconds.
        source: Where the password comes from; empty: from the URL.
    """

    store: object
    at: str = ""
    worked: bool = False
    software: str = "the server"
    place: str = "host and port"
    tls: TlsAdvice = field(default_factory=TlsAdvice)
    timeout: float | None = None
    source: str = ""

    def failure(self, error: BaseException) -> TenureError | None:
        """Return an *error* of a driver as one of ours if no connection was made; None if it is about something else.

        Whatever the driver has wrapped it in.
        """
        if failed := tls_error(error, self.at, self.tls, worked=self.worked):
            return failed
        found = _found(error)
        return None if found is None else self._told(found, _place_in(error) or self.at)

    def unreachable(self, error: BaseException) -> TenureError:
        """Return the error of a driver that made no connection, for whatever reason."""
        return self.failure(error) or self._told(_Found(Kind.REFUSED, _cause(error)), _place_in(error) or self.at)

    def no_answer(self, within: float | None, hint: str = "") -> Unavailable:
        """Return the error for a request without an answer *within* so many seconds; *hint* says what may be wrong."""
        waited = "in time" if within is None else f"within {within:.3g} s"
        if within is not None and self.timeout is not None and round(within, 2) == round(self.timeout, 2):
            waited += " (option timeout)"  # a request about a lease or a lock has less time
        return Unavailable(f"{self.store} gave no answer {waited}; the request may have been executed{hint}")

    def closed(self, said: str, hint: str = "") -> Unavailable:
        """Return the error for a connection that ended during a request; *hint* says what else may be wrong."""
        hint = self.tls.renewal or hint
        return Unavailable(f"{self.store} closed the connection: {said}; the request may have been executed{hint}")

    def login_refused(self, said: str, advice: str) -> TenureError:
        """Return the error for a login that the server refuses: its words, and what to check, if it is of the URL."""
        if self.source:
            advice = f"check what {self.source} gives, and the user"
        return self.lasting(f"{self.store} refused the login{_colon(said)}; {advice}")

    def login_missing(self, advice: str) -> TenureError:
        """Return the error for a server that requires a login, and got none."""
        return self.lasting(f"{self.store} requires a login, and got none; {advice}")

    def not_permitted(self, said: str, advice: str, what: str = "what tenure needs") -> TenureError:
        """Return the error for a right that is missing: the server's words, and which to grant."""
        return self.lasting(f"{self.store} does not permit this user {what}{_colon(said)}; {advice}")

    def lasting(self, text: str) -> TenureError:
        """Return the error for what the next attempt would meet again."""
        return lasting(text, worked=self.worked)

    def _told(self, found: _Found, at: str) -> TenureError:
        reason = found.reason
        match found.kind:
            case Kind.UNKNOWN_HOST:
                reason = f"DNS knows no host {_host(at)}" if "," not in at else f"DNS does not know all hosts of {at}"
            case Kind.NO_RESOLVER:
                reason = f"no DNS server answers for {_host(at) if ',' not in at else at} ({found.reason})"
            case Kind.IMPOSSIBLE_HOST:
                reason = f"{_host(at) if ',' not in at else at} can't be the name of a host"
        where = f" at {at}" if at and at not in str(self.store) else ""
        advice = found.kind.value.format(software=self.software, place=self.place)
        text = f"{self.store} can't be reached{where}: {reason}; {advice}"
        # By TCP, a rule of the network forbids it: some do only until the server, or this machine, is set up.
        is_by_tcp = found.kind is Kind.FORBIDDEN and bool(at) and not at.startswith("/")
        return self.lasting(text) if found.kind in LASTING and not is_by_tcp else Unavailable(text)


def user_unknown(store: object, advice: str) -> ConfigError:
    """Return the error for a process whose user has no entry in passwd, where its name or its home is needed."""
    number = os.geteuid() if hasattr(os, "geteuid") else "?"
    return ConfigError(f"{store}: this process runs as user {number}, who has no entry in passwd; {advice}")


def _found(error: BaseException) -> _Found | None:
    # A driver may have given the number of the resolver to an error of its own, where it stands for something else.
    for one in sorted(chain_of(error), key=lambda one: not isinstance(one, socket.gaierror)):
        match one:
            case NotConnectedInTime():
                return _Found(Kind.TIMED_OUT, str(one))
            case socket.gaierror():
                is_unknown = one.errno in _UNKNOWN
                said = str(one.strerror or one)
                return _Found(Kind.UNKNOWN_HOST if is_unknown else Kind.NO_RESOLVER, said)
            case UnicodeError() if "idna" in str(one):  # before DNS is asked: a part of it is empty, or too long
                return _Found(Kind.IMPOSSIBLE_HOST, "")
            case OSError() if one.filename is not None and one.errno in _OF_FILES:
                path = path_shown(os.fsdecode(one.filename)) if isinstance(one.filename, (str, bytes)) else "a file"
                return _Found(Kind.UNREADABLE_FILE, f"{path} can't be read: {os.strerror(one.errno)}")
            case OSError():
                numbers = {one.errno} if one.errno else {int(number) for number in _NUMBER.findall(str(one))}
                number = next((number for number in _NUMBERS if number in numbers), None)
                if number is not None:
                    return _Found(_NUMBERS[number], os.strerror(number))
    if isinstance(error, TimeoutError):
        return _Found(Kind.TIMED_OUT, "no answer in time")
    return None


def _place_in(error: BaseException) -> str:
    """Return the host and port that a driver notes in its error; empty if it doesn't."""
    return next(_places(error), "")


def _places(error: BaseException) -> Iterator[str]:
    for one in chain_of(error):
        host, port = getattr(one, "host", None), getattr(one, "port", None)
        if host and port:
            yield f"{host}:{port}"


def _cause(error: BaseException) -> str:
    """Return why there is no connection; the system's text is clearer than asyncio's."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else redacted(str(error)) or type(error).__name__


def _host(at: str) -> str:
    host, _, port = at.rpartition(":")
    return (host if host and port.isdecimal() else at).strip("[]") or "of the URL"


def _colon(said: str) -> str:
    return f": {said}" if said else ""
