"""What is said of a failure to connect, by the error of the system that a driver has wrapped."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from dataclasses import replace

import pytest

from tenure._connect_failures import LASTING, Kind, NotConnectedInTime, Target, kind_of, user_unknown
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure.errors import ConfigError, Unavailable

TARGET = Target("redis://a:1/0", "a:1", software="Redis")


def several(*numbers: int) -> OSError:
    """Return the error of asyncio for several addresses of one host."""
    return OSError("Multiple exceptions: " + ", ".join(f"[Errno {number}] Connect call failed" for number in numbers))


ERRORS: list[tuple[Exception, Kind, str]] = [
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Kind.UNKNOWN_HOST, "DNS knows no host a; check"),
    (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), Kind.NO_RESOLVER, "no DNS server answers for a (Temp"),
    (socket.gaierror(socket.EAI_FAIL, "broken"), Kind.NO_RESOLVER, "no DNS server answers for a (broken); check"),
    (
        UnicodeError("encoding with 'idna' codec failed (UnicodeError: label empty or too long)"),
        Kind.IMPOSSIBLE_HOST,
        "a can't be the name of a host; correct it",
    ),
    (ConnectionRefusedError(errno.ECONNREFUSED, "x"), Kind.REFUSED, "Connection refused; check host and port, and"),
    (FileNotFoundError(errno.ENOENT, "x"), Kind.REFUSED, "No such file or directory; check host and port, and whether"),
    (TimeoutError(errno.ETIMEDOUT, "x"), Kind.TIMED_OUT, "Connection timed out; check host and port, whether Redis"),
    (NotConnectedInTime(0.5), Kind.TIMED_OUT, "no answer within 0.5 s; check host and port, whether Redis runs, and w"),
    (TimeoutError("timed out"), Kind.TIMED_OUT, "no answer in time; check host and port, whether Redis runs, and whe"),
    (OSError(errno.EHOSTUNREACH, "x"), Kind.UNREACHABLE, "No route to host; check host and port, and the network"),
    (OSError(errno.ENETUNREACH, "x"), Kind.UNREACHABLE, "Network is unreachable; check host and port, and the netw"),
    (OSError(errno.EMFILE, "x"), Kind.NO_FILES_LEFT, "Too many open files; raise the limit of open files"),
    (PermissionError(errno.EACCES, "x"), Kind.FORBIDDEN, "Permission denied; check the rights on the socket"),
    (
        PermissionError(errno.EACCES, "x", "/home/ann/.key"),
        Kind.UNREADABLE_FILE,
        "/home/ann/.key can't be read: Permission denied; let this process read it, set HOME",
    ),
    (FileNotFoundError(errno.ENOENT, "x", b"/a.crt"), Kind.UNREADABLE_FILE, "/a.crt can't be read: No such file"),
    (several(errno.ENETUNREACH, errno.ECONNREFUSED), Kind.REFUSED, "Connection refused; check host and port"),
    (several(errno.ENETUNREACH, errno.ENETUNREACH), Kind.UNREACHABLE, "Network is unreachable; check host and port"),
]


@pytest.mark.parametrize(("error", "kind", "says"), ERRORS)
def test_a_failure_has_a_kind_and_words(error: Exception, kind: Kind, says: str) -> None:
    assert kind_of(error) is kind
    found = TARGET.failure(error)
    assert str(found).startswith(f"redis://a:1/0 can't be reached: {says}")
    is_lasting = kind in LASTING - {Kind.FORBIDDEN}  # by TCP, a rule of the network may change
    assert type(found) is (ConfigError if is_lasting else Unavailable)


@pytest.mark.parametrize(("error", "kind", "says"), ERRORS)
def test_what_worked_before_may_work_again(error: Exception, kind: Kind, says: str) -> None:
    found = Target("redis://a:1/0", "a:1", worked=True).failure(error)
    assert type(found) is Unavailable
    is_lasting = kind in LASTING - {Kind.FORBIDDEN}  # by TCP, a rule of the network may change
    assert str(found).endswith("(it worked before, so tenure tries again)") == is_lasting


@pytest.mark.parametrize(("at", "kind"), [("a:1", Unavailable), ("/run/a.sock", ConfigError), ("", ConfigError)])
def test_what_is_forbidden_by_tcp_may_be_permitted_soon(at: str, kind: type[Exception]) -> None:
    for number in (errno.EACCES, errno.EPERM):
        assert type(Target("a store", at).failure(PermissionError(number, "x"))) is kind


def test_every_kind_is_tried() -> None:
    assert {kind for _, kind, _ in ERRORS} == set(Kind)


def test_what_is_about_something_else_is_not_translated() -> None:
    for error in (ValueError("a"), ConnectionResetError(errno.ECONNRESET, "x"), EOFError(), KeyError("a")):
        assert kind_of(error) is None
        assert TARGET.failure(error) is None
    assert "Connection reset by peer; check host and port" in str(TARGET.unreachable(ConnectionResetError(104, "x")))


def test_errors_are_unwrapped() -> None:
    class Wrapped(Exception):
        host, port = "b", 2

    by_cause = Wrapped()
    by_cause.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "x")
    assert str(TARGET.failure(by_cause)).startswith("redis://a:1/0 can't be reached at b:2: Connection refused; check")


def test_the_resolver_is_asked_first() -> None:
    """On macOS, its numbers are those of other errors."""
    wrapped = FileNotFoundError(errno.ENOENT, "x")
    wrapped.__cause__ = socket.gaierror(socket.EAI_AGAIN, "x")
    assert kind_of(wrapped) is Kind.NO_RESOLVER


def test_several_servers_are_named_together() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "x")
    assert "can't be reached: DNS does not know all hosts of a:1,b:1; " in str(
        Target("x://a:1,b:1", "a:1,b:1").failure(unknown)
    )
    assert "can't be reached at [::1]:2: DNS knows no host ::1; " in str(Target("x://", "[::1]:2").failure(unknown))


def test_logins_and_rights() -> None:
    assert str(TARGET.login_refused("no", "check the password")) == (
        "redis://a:1/0 refused the login: no; check the password"
    )
    assert str(TARGET.login_missing("write it")) == "redis://a:1/0 requires a login, and got none; write it"
    assert str(TARGET.not_permitted("", "grant it")) == (
        "redis://a:1/0 does not permit this user what tenure needs; grant it"
    )
    for worked, kind in ((False, ConfigError), (True, Unavailable)):
        target = Target("a", worked=worked)
        for error in (target.login_refused("a", "b"), target.login_missing("a"), target.not_permitted("a", "b")):
            assert type(error) is kind


def test_an_answer_that_does_not_come() -> None:
    target = Target("redis://a", timeout=5.0)
    assert str(target.no_answer(5.0)) == (
        "redis://a gave no answer within 5 s (option timeout); the request may have been executed"
    )
    assert str(target.no_answer(1.0, "; use TLS")) == (
        "redis://a gave no answer within 1 s; the request may have been executed; use TLS"
    )
    assert str(target.closed("end", "; use TLS")) == (
        "redis://a closed the connection: end; the request may have been executed; use TLS"
    )


def test_a_connection_that_ends_is_told_with_the_clients_certificate_if_that_has_expired() -> None:
    advice = TlsAdvice(own=OwnCertificate("client.pem", 1_700_000_000.0))
    expired = (
        "; the client's certificate client.pem has expired (2023-11-14 22:13 UTC); renew it: tenure reads it again for "
        "each new connection"
    )
    target = Target("redis://a", "a:1", tls=advice)
    assert str(target.closed("end", "; use TLS")) == (
        f"redis://a closed the connection: end; the request may have been executed{expired}"
    )
    for error in (ConnectionResetError(), BrokenPipeError(), ssl.SSLEOFError()):
        found = target.failure(error)
        assert isinstance(found, Unavailable)
        assert str(found) == f"a:1 closed the connection{expired}"
    assert "expired" not in str(target.failure(ConnectionRefusedError(errno.ECONNREFUSED, "")))
    later = replace(target, tls=TlsAdvice(own=OwnCertificate("client.pem", 32_503_680_000.0)))
    assert later.failure(ConnectionResetError()) is None
    assert str(later.closed("end", "; use TLS")).endswith("; use TLS")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no passwd")
def test_a_user_without_an_entry() -> None:
    assert f"runs as user {os.geteuid()}, who has no entry in passwd; name it" in str(user_unknown("a", "name it"))
