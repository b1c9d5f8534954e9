"""Errors of kazoo, translated in one function."""

from __future__ import annotations

from kazoo import exceptions
from kazoo.handlers.threading import KazooTimeoutError

from tenure._connect_failures import NotConnectedInTime, Target
from tenure._redaction import redacted, redacting
from tenure._tls_failures import OwnCertificate, TlsAdvice
from tenure.errors import ConfigError, TenureError, Unavailable

Expected = (exceptions.NoNodeError, exceptions.NodeExistsError, exceptions.BadVersionError, exceptions.NotEmptyError)
"""Answers that the verbs expect; they are not translated."""

NO_ANSWER = (
    exceptions.ConnectionLoss,  # also the class of ConnectionClosedError's causes
    exceptions.SessionExpiredError,  # also of ConnectionClosedError
    exceptions.AuthFailedError,
    exceptions.OperationTimeoutError,
)
"""Errors that kazoo makes itself; every other one is an answer of the server."""


LOGIN_REFUSED = (exceptions.AuthFailedError, exceptions.SessionClosedRequireSaslError)
"""Errors by which a server refuses a login by SASL."""


class Broken(Unavailable):
    """The connection broke before the answer; on the next one, the request can be repeated at once."""


@redacting
def translate(error: Exception, place: str, *, login: str = "", worked: bool = False, source: str = "") -> TenureError:
    """Turn an error of kazoo about the ensemble at *place* into one of ours.

    A permanent error is a ``ConfigError``, unless the client *worked* before: then the ensemble is being changed, and
    may work again.

    Args:
        error: The error.
        place: The addresses of the ensemble.
        login: The option ``auth`` of a client that has a user; empty without one.
        worked: Whether a request that needs rights was carried out before.
        source: Where the password comes from; empty: from the URL.
    """
    if isinstance(error, exceptions.SessionClosedRequireSaslError) and login == "sasl":
        # A refused password, too, if the server closes the session before kazoo reads the refusal.
        error = exceptions.AuthFailedError()
    target = Target(place, worked=worked)
    match error:
        case exceptions.NoAuthError():
            return target.not_permitted(
                "",
                "grant it the rights that docs/zookeeper.md lists on the path of the URL and the nodes below it, or "
                "give the user in the URL",
            )
        case exceptions.AuthFailedError() | exceptions.SASLException():
            of_url = Target(place, worked=worked, source=source)
            return of_url.login_refused("", "check user and password, and the option auth, in the URL")
        case exceptions.SessionClosedRequireSaslError():
            written = "add" if source else "write zookeeper://USER:PASSWORD@… with"
            required = f"{written} the option auth=sasl, or as enforce.auth.schemes of the servers says"
            if login:
                return target.login_refused("it requires another one than auth=digest", required)
            return target.login_missing(required)
        case exceptions.InvalidACLError():
            return ConfigError(
                f"{place} does not know who this client is, so no rights can be given to it; acl=creator and acl=read "
                "need a user and a password: write them into the URL, or name where the password is (password_file=)"
            )
        case exceptions.UnimplementedError() | exceptions.EphemeralOnLocalSessionError():
            return ConfigError(
                f"{place} lacks an operation that tenure needs: {text_of(error)}; it needs ZooKeeper 3.5"
            )
        case exceptions.SessionExpiredError():
            return Unavailable(f"{place} has ended the session of this client; tenure opens a new one")
        case exceptions.ConnectionLoss():
            return Broken(f"{place} broke the connection; the request may have been executed")
        case exceptions.QuotaExceededError():
            return Unavailable(f"{place} refused the request: a quota is used up; raise it, or remove nodes")
        case exceptions.ZookeeperError():
            return Unavailable(f"{place} refused the request for now: {text_of(error)}")
        case exceptions.KazooException() | KazooTimeoutError():
            return Unavailable(f"the request to {place} failed: {text_of(error)}")
    raise AssertionError("translate() got an error that is not the driver's") from error


def not_connected(
    failure: Exception | None,
    place: str,
    within: float,
    *,
    worked: bool,
    is_tls: bool,
    tried: str = "",
    own: OwnCertificate | None = None,
) -> TenureError:
    """Return the error for a session that could not be connected *within* so many seconds; *failure* says why.

    *tried* is the host and port of the server that was tried last.
    """
    advice = TlsAdvice(plain="name the port that has TLS, or remove tls=true", own=own)
    target = Target(place, tried, worked=worked, software="a majority of the servers", tls=advice)
    match failure:
        case TimeoutError(errno=None):
            return target.unreachable(NotConnectedInTime(within))
        case None:
            # The alert of TLS is not always read: sending may fail before that.
            by_tls = "remove tls=true if it doesn't use TLS; if it requires a client's certificate, check cert and key"
            hint = "" if worked else f"; {by_tls if is_tls else 'add tls=true if it requires TLS'}"
            hint = advice.renewal or hint
            return Unavailable(
                f"{place} gave no answer within {within:.3g} s: it accepted connections, and opened no session{hint}"
            )
        case ConfigError():  # there was no login for it
            return target.lasting(str(failure))
        case TenureError():
            return Unavailable(str(failure))
    return target.unreachable(failure)


def is_hopeless(failure: Exception | None, servers: int) -> bool:
    """Return whether connecting fails for a reason that the next attempt would meet again, such as a certificate.

    Of several servers, another one may accept that: then each has its turn.
    """
    if failure is None or isinstance(failure, TenureError):  # there was no login
        return isinstance(failure, ConfigError)
    return servers == 1 and isinstance(Target("").failure(failure), ConfigError)


def text_of(error: Exception) -> str:
    """Return the text of an error, or its class if it has none."""
    return redacted(str(error)) or type(error).__name__
