"""What is said of a failure of TLS, by what OpenSSL says of it."""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import Any

import pytest

from tenure._tls_failures import NoTls, OwnCertificate, TlsAdvice, tls_error
from tenure.errors import ConfigError, TenureError, Unavailable

ADVICE = TlsAdvice()
SHOWS = TlsAdvice(own=OwnCertificate("client.pem"))


def failure(reason: str, library: str = "SSL", kind: type[ssl.SSLError] = ssl.SSLError) -> ssl.SSLError:
    error: Any = kind(1, f"[{library}: {reason}]")
    error.reason, error.library = reason, library
    return error  # type: ignore[no-any-return]


def untrusted(code: int, message: str = "no trust.") -> ssl.SSLError:
    error: Any = failure("CERTIFICATE_VERIFY_FAILED", kind=ssl.SSLCertVerificationError)
    error.verify_code, error.verify_message = code, message
    return error  # type: ignore[no-any-return]


def told(error: BaseException, advice: TlsAdvice = ADVICE, *, worked: bool = False) -> TenureError | None:
    return tls_error(error, "a:1", advice, worked=worked)


@pytest.mark.parametrize(
    ("error", "advice", "says"),
    [
        (untrusted(9), ADVICE, "the server's certificate is not valid yet; set the clock"),
        (untrusted(10), ADVICE, "the server's certificate has expired; renew it"),
        (untrusted(18), ADVICE, "the server's certificate is not trusted (no trust); name its authority with ca=FILE"),
        (untrusted(23), ADVICE, "the server's certificate was revoked; give the server another one"),
        (untrusted(62), ADVICE, "the server's certificate is for another host (no trust); name the host"),
        (NoTls(), ADVICE, "the server has no TLS; name the port that has TLS"),
        (failure("WRONG_VERSION_NUMBER"), ADVICE, "the server answers without TLS; name the port"),
        (failure("RECORD_LAYER_FAILURE"), ADVICE, "the server answers without TLS; name the port"),
        (failure("TLSV13_ALERT_CERTIFICATE_REQUIRED"), ADVICE, "the server requires a client's certificate (tlsv13 al"),
        (
            failure("TLSV1_ALERT_UNKNOWN_CA"),
            SHOWS,
            "the server refuses the client's certificate (tlsv1 alert unknown c",
        ),
        (
            failure("SSLV3_ALERT_HANDSHAKE_FAILURE"),
            ADVICE,
            "the server refuses it (sslv3 alert handshake failure), per",
        ),
        (failure("TLSV1_ALERT_PROTOCOL_VERSION"), ADVICE, "the server refuses it (tlsv1 alert protocol version); see"),
        (failure("UNSUPPORTED_PROTOCOL"), ADVICE, "unsupported protocol; compare the versions"),
    ],
)
def test_a_failure_that_would_come_again(error: Exception, advice: TlsAdvice, says: str) -> None:
    found = told(error, advice)
    assert isinstance(found, ConfigError)
    assert str(found).startswith(f"the TLS handshake with a:1 failed: {says}")


def test_what_worked_before_may_work_again() -> None:
    for error in (untrusted(10), failure("TLSV1_ALERT_UNKNOWN_CA"), NoTls(), failure("NO_START_LINE", "PEM")):
        found = told(error, worked=True)
        assert isinstance(found, Unavailable)
        assert str(found).endswith("(it worked before, so tenure tries again)")


def test_the_end_of_a_connection_that_was_open_is_no_failure_of_a_handshake() -> None:
    for error in (failure("UNEXPECTED_EOF", kind=ssl.SSLEOFError), failure("BAD_RECORD_TYPE")):
        assert told(error, worked=True) is None
        assert told(error) is not None
    assert isinstance(told(failure("UNEXPECTED_EOF", kind=ssl.SSLEOFError)), Unavailable)


def test_files_are_not_blamed_on_the_server() -> None:
    found = told(failure("NO_CERTIFICATE_OR_CRL_FOUND", "X509"))
    assert isinstance(found, ConfigError)
    assert str(found).startswith("the files for TLS with a:1 can't be used: no certificate or crl found; check")


def test_errors_are_unwrapped() -> None:
    class Wrapped(Exception):
        inner_exception: Exception | None = None
        host, port = "b", 2

    by_attribute, by_context = Wrapped(), OSError()
    by_attribute.inner_exception = untrusted(10)
    by_context.__context__ = untrusted(10)
    assert "with b:2 failed: the server's certificate has expired" in str(told(by_attribute))
    assert "with a:1 failed: the server's certificate has expired" in str(told(by_context))
    by_context.__suppress_context__ = True
    assert told(by_context) is None
    assert told(ConnectionRefusedError()) is None


def certificate(*names: str, begins: str = "Jan  1 00:00:00 2001 GMT", ends: str = "Jan  1 00:00:00 2999 GMT") -> Any:
    return {
        "subject": ((("commonName", "an authority"),),),
        "subjectAltName": tuple(("DNS", name) for name in names),
        "issuer": ((("countryName", "NZ"),), (("commonName", "another\nauthority"),)),
        "notBefore": begins,
        "notAfter": ends,
    }


GOOD, OVER = certificate("a.example"), certificate(ends="Feb  3 04:05:06 2001 GMT")
LATER = certificate("b.example", begins="Feb  3 04:05:06 2998 GMT")


@pytest.mark.parametrize(
    ("code", "chain", "says"),
    [
        (9, [LATER], "is not valid yet (from 2998-02-03 04:05:06 UTC; it names b.example); set"),
        (9, [GOOD], "is not valid yet; set"),
        # That of an authority may be over, while the server's own is good.
        (10, [GOOD, OVER], "has expired (on 2001-02-03 04:05:06 UTC; it names an authority); renew"),
        (10, [certificate(ends="never"), {}, GOOD], "has expired; renew"),
        (20, [GOOD], r"is not trusted (no trust; it names a.example; issued by another\nauthority); name"),
        (20, [{}], "is not trusted (no trust); name"),
        (23, [GOOD], "was revoked (it names a.example); give"),
        (62, [certificate("a", "b", "c", "d")], "is for another host (no trust; it names a, b, c, …); name"),
        (62, [certificate("a" * 1_000)], f"is for another host (no trust; it names {'a' * 100}); name"),
    ],
)
def test_the_certificate_is_told(code: int, chain: list[Any], says: str) -> None:
    error: Any = untrusted(code)
    error.certificates = chain
    assert str(told(error)).startswith(f"the TLS handshake with a:1 failed: the server's certificate {says}")


def test_a_certificate_that_has_expired_is_told_with_its_name_and_date() -> None:
    ended = OwnCertificate("client.pem", 1_700_000_000.0)
    found = told(failure("SSLV3_ALERT_CERTIFICATE_EXPIRED"), TlsAdvice(own=ended))
    assert str(found) == (
        "the TLS handshake with a:1 failed: the client's certificate client.pem has expired (2023-11-14 22:13 UTC), "
        "and the server refuses it (sslv3 alert certificate expired); renew it: tenure reads it again for each new "
        "connection"
    )
    kept = replace(ended, not_renewed="key values mismatch")
    found = told(failure("TLSV1_ALERT_UNKNOWN_CA"), TlsAdvice(own=kept), worked=True)
    assert isinstance(found, Unavailable)
    assert "(2023-11-14 22:13 UTC, and what is there by now can't be used: key values mismatch), and the" in str(found)
    assert not replace(ended, ends_at=None).is_over
