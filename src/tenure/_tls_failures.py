"""Failures of TLS: recognised in the error of any driver, and told in the same words by every store.

House rules:

- A failure that the next attempt would meet again (a certificate, a server without TLS) is a ``ConfigError``, unless
  the client worked before: then certificates are being changed, and may fit soon.
- A connection that was closed within the handshake may have been cut by the network: that is ``Unavailable``.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tenure._one_line import one_line
from tenure.errors import ConfigError, TenureError, Unavailable


class NoTls(Exception):
    """The server has said that it has no TLS, in the words of its protocol."""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """The certificate that a client shows.

    Args:
        name: Its file, or where else it is from.
        ends_at: When it ends, in Unix seconds; None if that is not known.
        not_renewed: Why what is there by now is not used instead; empty if it is that one.
    """

    name: str
    ends_at: float | None = None
    not_renewed: str = ""

    @property
    def ends(self) -> str:
        """When it ends, for a message; empty if that is not known."""
        if self.ends_at is None:
            return ""
        return f"{datetime.fromtimestamp(self.ends_at, UTC):%Y-%m-%d %H:%M} UTC"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by the clock of this machine."""
        return self.ends_at is not None and self.ends_at < time.time()

    def __str__(self) -> str:
        """Return its name, and since when it is over; and why there is no newer one."""
        if not self.is_over:
            return f"the client's certificate {self.name}"
        why = f", and what is there by now can't be used: {self.not_renewed}" if self.not_renewed else ""
        return f"the client's certificate {self.name} has expired ({self.ends}{why})"


@dataclass(frozen=True, slots=True)
class TlsAdvice:
    """What to do about a failure, in the options of one store.

    Args:
        authority: How to trust the authority of a server's certificate.
        certificate: How to show a client's certificate.
        plain: What to do about a server without TLS.
        own: The certificate that the client shows; None if it shows none.
    """

    authority: str = "name its authority with ca=FILE"
    certificate: str = "name one, and its key, with cert=FILE and key=FILE"
    plain: str = "name the port that has TLS"
    own: OwnCertificate | None = None

    @property
    def renewal(self) -> str:
        """Which certificate of the client has expired, and what to do, as the end of a message; empty if it hasn't.

        By TLS 1.3, a server refuses one after the handshake, and its reason may be lost with the connection.
        """
        return f"; {self.own}; {_RENEW}" if self.own is not None and self.own.is_over else ""


class _Failure(NamedTuple):
    reason: str
    advice: str
    is_lasting: bool = True


NAMES_MAX, NAME_MAX, CHAIN_MAX = 3, 100, 10
"""Names of a certificate that are told, and their characters, and the certificates that are looked at: whoever answers
has written them.
"""

_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"})
"""What OpenSSL says of an answer that is none of TLS; newer versions also say ``RECORD_LAYER_FAILURE``."""
_PEM = "PEM lib"
"""What Python says, without a reason, of a key that OpenSSL can't read."""
_ABOUT_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA")
_ENDED = (
    ConnectionAbortedError,
    ConnectionResetError,
    BrokenPipeError,
    EOFError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)
_RENEW = "renew it: tenure reads it again for each new connection"


def tls_error(error: BaseException, server: str, advice: TlsAdvice, *, worked: bool) -> TenureError | None:
    """Return an *error* of a driver as one of ours if TLS with *server* has failed; None if it is about something else.

    Args:
        error: The error, whatever the driver has wrapped it in.
        server: Host and port, if the driver doesn't tell them.
        advice: What to do, in the words of the store.
        worked: Whether the client has worked before.
    """
    chain = list(chain_of(error))
    told = [one for one in chain if isinstance(one, (ssl.SSLError, NoTls))]
    # aiohttp has classes of the same kind, without what OpenSSL says: that is in what they were made of.
    found = next((one for one in told if isinstance(one, NoTls) or hasattr(one, "library")), None)
    server = next((f"{one.host}:{one.port}" for one in chain if hasattr(one, "host") and hasattr(one, "port")), server)
    if advice.renewal and any(isinstance(one, _ENDED) for one in chain):
        return Unavailable(f"{server} closed the connection{advice.renewal}")
    if found is None:
        return None
    if isinstance(found, ssl.SSLError) and ((found.library or "SSL") != "SSL" or _PEM in str(found)):
        # Of a file, before connecting.
        return lasting(unusable_files(server, found), worked=worked)
    failure = _failure(found, advice, worked=worked)
    if failure is None:
        return None
    text = f"the TLS handshake with {server} failed: {failure.reason}; {failure.advice}"
    return lasting(text, worked=worked) if failure.is_lasting else Unavailable(text)


def lasting(text: str, *, worked: bool) -> TenureError:
    """Return the error for what the next attempt would meet again; if the client *worked* before, it may pass."""
    return Unavailable(f"{text} (it worked before, so tenure tries again)") if worked else ConfigError(text)


def keep_certificates(context: ssl.SSLContext) -> None:
    """Let errors of *context*'s handshakes keep the certificate that was not accepted, so that they can tell of it."""
    context.sslobject_class, context.sslsocket_class = _Object, _Socket


class _Object(ssl.SSLObject):
    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLCertVerificationError as error:
            _keep_certificate(self, error)
            raise


class _Socket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except ssl.SSLCertVerificationError as error:
            _keep_certificate(self, error)
            raise


def _keep_certificate(of: Any, error: Any) -> None:
    with suppress(AttributeError, IndexError, TypeError, ValueError):  # Python has no public name for it
        error.certificates = [one.get_info() for one in of._sslobj.get_unverified_chain()[:CHAIN_MAX]]


def unusable_files(server: str, error: Exception) -> str:
    """Return that the files for TLS with *server* can't be used, because of this *error*."""
    return (
        f"the files for TLS with {server} can't be used: {text_of(error)}; check those of the authority, the "
        "certificate and the key"
    )


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield *error* and everything that it was made of, by Python's chain and by the attributes of the drivers."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [getattr(one, name, None) for name in ("certificate_error", "os_error", "inner_exception")]
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]


def _failure(error: BaseException, advice: TlsAdvice, *, worked: bool) -> _Failure | None:
    match error:
        case NoTls():
            return _Failure("the server has no TLS", advice.plain)
        case ssl.SSLCertVerificationError():
            return _unverified(error, advice)
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            if worked:  # then it is the end of a connection, as without TLS
                return None
            cut = "the server closed the connection, as one without TLS may do"
            return _Failure(cut, advice.plain, is_lasting=False)
        case ssl.SSLError() if error.reason in _NO_TLS or "RECORD_LAYER" in (error.reason or ""):
            return _Failure("the server answers without TLS", advice.plain)
        case ssl.SSLError() if "ALERT" in (error.reason or ""):
            return _refused(error, advice)
    if worked:  # then it may be about a connection that was open
        return None
    return _Failure(text_of(error), "compare the versions and ciphers of TLS on both sides")


def _unverified(error: ssl.SSLCertVerificationError, advice: TlsAdvice) -> _Failure:
    said, chain = error.verify_message.rstrip("."), getattr(error, "certificates", [])
    named = _named(chain[0]) if chain else ""
    match error.verify_code:  # as in OpenSSL's x509_vfy.h
        case 9:
            return _Failure(
                f"the server's certificate is not valid yet{_enclosed(*_out_of_date(chain, 'notBefore'))}",
                "set the clock of this machine, or the server's",
            )
        case 10:
            return _Failure(
                f"the server's certificate has expired{_enclosed(*_out_of_date(chain, 'notAfter'))}",
                "renew it, or set the clock of this machine",
            )
        case 23:
            return _Failure(f"the server's certificate was revoked{_enclosed(named)}", "give the server another one")
        case 62 | 64:
            return _Failure(
                f"the server's certificate is for another host{_enclosed(said, named)}",
                "name the host as the certificate does, or give the server one for this name",
            )
    issuer = next(map(_shown, _common_names(chain[-1], "issuer")), "") if chain else ""
    by = issuer and f"issued by {issuer}"
    return _Failure(f"the server's certificate is not trusted{_enclosed(said, named, by)}", advice.authority)


def _out_of_date(chain: list[dict[str, Any]], end: str) -> tuple[str, ...]:
    """Return when the certificate of *chain* that is not valid now began or ended to be, and what it names."""
    now = time.time()
    for one in chain:
        with suppress(ValueError, KeyError, TypeError):
            at = ssl.cert_time_to_seconds(one[end])
            if (at > now) if end == "notBefore" else (at < now):
                date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
                return f"{'from' if end == 'notBefore' else 'on'} {date}", _named(one)
    return ()


def _named(certificate: dict[str, Any]) -> str:
    names = [str(value) for _, value in _pairs(certificate.get("subjectAltName"))]
    names = names or _common_names(certificate, "subject")
    shown = [_shown(name) for name in names[:NAMES_MAX]] + ["…"] * (len(names) > NAMES_MAX)
    return f"it names {', '.join(shown)}" if shown else ""


def _common_names(certificate: dict[str, Any], of: str) -> list[str]:
    found = [pair for part in certificate.get(of) or () for pair in _pairs(part)]
    return [str(value) for key, value in found if key == "commonName"]


def _pairs(found: Any) -> list[tuple[Any, Any]]:
    return [one for one in found or () if isinstance(one, tuple) and len(one) == 2]


def _shown(text: str) -> str:
    return one_line(text[:NAME_MAX])


def _enclosed(*parts: str) -> str:
    told = "; ".join(part for part in parts if part)
    return f" ({told})" if told else ""


def _refused(error: ssl.SSLError, advice: TlsAdvice) -> _Failure:
    reason, said = error.reason or "", text_of(error)
    if not any(part in reason for part in (*_ABOUT_CERTIFICATES, "HANDSHAKE_FAILURE")):
        return _Failure(f"the server refuses it ({said})", "see the log of the server")
    if advice.own is not None and advice.own.is_over:
        return _Failure(f"{advice.own}, and the server refuses it ({said})", _RENEW)
    if advice.own is not None:
        return _Failure(f"the server refuses the client's certificate ({said})", "show one of an authority it trusts")
    if "HANDSHAKE_FAILURE" in reason:  # as by TLS 1.2; it may be about ciphers, too
        required = "perhaps it requires a client's certificate"
        return _Failure(f"the server refuses it ({said}), {required}", advice.certificate)
    return _Failure(f"the server requires a client's certificate ({said})", advice.certificate)


def text_of(error: BaseException) -> str:
    """Return the reason of OpenSSL in small letters; or the text, if it gives none, without a path."""
    if _PEM in str(error):
        return "the key is damaged, or has a password that is missing or wrong"
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else getattr(error, "strerror", None) or str(error)
