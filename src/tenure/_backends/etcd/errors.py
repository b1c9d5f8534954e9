"""The errors of etcd's gateway and of the connections to it, translated in one function."""

from __future__ import annotations

from dataclasses import replace

import aiohttp

from tenure._backends.etcd.address import Address
from tenure._connect_failures import Target
from tenure._redaction import redacted, redacting
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure.errors import TenureError, Unavailable

# Codes of gRPC
PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = 7, 8, 12, 14, 15, 16

_DECIDED = frozenset({3, 5, 6, 7, 8, 9, 11, 12, 16})
"""The codes of refusals that are final; others, such as a time limit's, may come while the request is executed."""
_GATEWAYS = frozenset({502, 503, 504})
"""What a proxy answers while the servers behind it can't be reached, or are too slow."""

TEXT_MAX = 1_000
"""Characters of the longest reason of a refusal that is shown."""
FOREIGN_MAX = 200
"""The same, for a server that is no etcd."""

NO_LEASE = "requested lease not found"
LEASE_EXISTS = "lease already exists"
NO_SPACE = "database space exceeded"
_BAD_TOKENS = (
    "invalid auth token",
    "user name is empty",
    "revision of auth store is old",
    "auth token is not provided",
)


class Refused(Exception):
    """A request was refused: by etcd with a code of gRPC, or by a server that is no etcd.

    Args:
        status: The status of HTTP.
        text: The reason, as written by the server.
        code: The code of gRPC; None if the server gave none.
        is_of_etcd: Whether the answer has the form of etcd's.
    """

    def __init__(self, status: int, text: str, code: int | None = None, *, is_of_etcd: bool = True) -> None:
        self.said: str = redacted(text.removeprefix("etcdserver: "))[: TEXT_MAX if is_of_etcd else FOREIGN_MAX]
        """The same, for a message."""
        super().__init__(self.said)
        self.status = status
        self.text = text.removeprefix("etcdserver: ")
        self.code = code
        self.is_of_etcd = is_of_etcd
        self.was_only: bool = True
        """Whether no other attempt of the same request may still be executed."""

    @property
    def needs_login(self) -> bool:
        """Whether the request may work after a new login; it was not executed."""
        return self.code == UNAUTHENTICATED or any(part in self.text for part in _BAD_TOKENS)

    @property
    def is_login_refused(self) -> bool:
        """Whether the user, or the password, is wrong."""
        return "invalid user ID or password" in self.text

    @property
    def is_forbidden(self) -> bool:
        """Whether this user has no right to it."""
        return self.code == PERMISSION_DENIED or "permission denied" in self.text

    @property
    def is_without_users(self) -> bool:
        """Whether there is no login, because the servers have no users."""
        return "authentication is not enabled" in self.text

    @property
    def is_of_member(self) -> bool:
        """Whether another member may answer instead."""
        if self.is_temporary or self.code == UNAVAILABLE:
            return True
        return self.code == RESOURCE_EXHAUSTED and "too many requests" in self.text

    @property
    def is_temporary(self) -> bool:
        """Whether a proxy in front of etcd gave this answer, because it got none itself."""
        return self.code is None and self.status in _GATEWAYS

    @property
    def may_be_executed(self) -> bool:
        """Whether the request may be executed, or be executed later, all the same."""
        return self.code not in _DECIDED

    def means(self, text: str) -> bool:
        """Return whether this is the refusal with *text*."""
        return text in self.text


class NoAnswerInTime(Exception):
    """No answer came within so many seconds."""

    def __init__(self, within: float) -> None:
        super().__init__(f"within {within:.2g} s")
        self.within = within


class NoTimeLeft(Exception):
    """The time for a request was over before it was sent."""


@redacting
def translate(
    error: Exception,
    address: Address,
    *,
    prefix: str,
    own: OwnCertificate | None,
    worked: bool,
    permitted: bool,
    source: str = "",
) -> TenureError:
    """Turn a refusal of etcd at *address*, or a failure of the connection, into one of our errors.

    A permanent error is a ``ConfigError``, unless the client *worked* before (for rights: was *permitted*): then the
    servers are being changed, and may work again.
    """
    target = Target(
        address,
        str(address).partition("://")[2],
        worked=worked,
        software="etcd",
        tls=TlsAdvice(plain="if these servers don't use TLS, write etcd://", own=own),
        source=source,
    )
    match error:
        case Refused():
            return _refusal(error, address, prefix, target, permitted=permitted)
        case NoTimeLeft():
            return Unavailable(
                f"no time was left to ask {address}: it, or this process, is too slow; the request was not sent"
            )
        case NoAnswerInTime():
            return target.no_answer(error.within)
        case TimeoutError():
            return target.no_answer(None)
        case aiohttp.ClientError() | OSError() if failed := target.failure(error):
            return failed
        case aiohttp.ClientError() | OSError():
            # The alert of TLS is not always read: the request may fail before that.
            by_tls = "; if these servers don't use TLS, write etcd://; for a client's certificate, check cert and key"
            hint = "" if worked else by_tls if address.is_tls else "; if these servers require TLS, write etcds://"
            return target.closed(redacted(str(error)).rstrip("."), hint)
    raise AssertionError("translate() got an error that is not the client's") from error  # a TypeError is a bug


def _refusal(error: Refused, address: Address, prefix: str, target: Target, *, permitted: bool) -> TenureError:
    text, said = error.text, error.said
    allowed = replace(target, worked=permitted)
    if error.is_temporary:
        proxy = f"{address} answers with status {error.status}, as a proxy does that can't reach etcd: {said!r}"
        return Unavailable(f"{proxy}; check that etcd runs; the request may have been executed")
    if not error.is_of_etcd:
        return target.lasting(_foreign(error, address))
    if error.is_forbidden:
        return allowed.not_permitted(
            "",
            "grant its role read and write for them, or name another prefix, see docs/etcd.md",
            f"the keys that begin with {prefix!r}",
        )
    if error.is_login_refused:
        return target.login_refused(said, "check user and password in the URL")
    if error.needs_login:
        if address.username is None and not target.source:
            return allowed.login_missing("write it into the URL: etcd://USER:PASSWORD@…")
        return Unavailable(f"{address} ended the login: {said}; tenure logs in again")
    if NO_SPACE in text:
        return Unavailable(
            f"{address} is full, and changed nothing: {said}; compact it, defragment its members, then run etcdctl "
            "alarm disarm, or raise --quota-backend-bytes"
        )
    if error.code == DATA_LOSS or "corrupt" in text:
        return Unavailable(f"{address} has an alarm, as its members' data differ: {said}; replace the corrupt member")
    if "too many operations" in text:
        return target.lasting(
            f"{address} permits fewer than 128 operations in a transaction: {said}; set --max-txn-ops to 128"
        )
    if error.code == UNIMPLEMENTED:
        return target.lasting(f"{address} has no such request: {said}; tenure needs etcd 3.4 or newer")
    if error.code == UNAVAILABLE:
        return Unavailable(f"{address} can't answer at present: {said}; the request may have been executed")
    return Unavailable(f"{address} refused the request: {said}")


def _foreign(error: Refused, address: Address) -> str:
    """Return the reason for an answer that etcd's gateway did not give."""
    if "CommonName of client" in error.text:
        return (
            f"{address} takes a client's certificate with a common name for a user, which its JSON gateway can't do; "
            "use a certificate without a common name, and a user and a password"
        )
    if error.status == 404:
        return (
            f"{address} has no JSON gateway under /v3: {error.said!r}; tenure needs etcd 3.4 or newer, with its gateway"
        )
    return f"{address} does not answer as etcd (status {error.status}): {error.said!r}; check hosts and ports"
