"""What a request may raise, and the errors of the driver as these."""

from __future__ import annotations

import aiormq

from tenure.errors import TenureError


class AmqpError(Exception):
    """The server, or the connection to it, refused or failed.

    ``code`` is AMQP's reply code; 0 if the connection was lost without one.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})" if code else text)
        self.code = code
        self.text = text


class ConnectionLost(AmqpError):
    """The connection is over, and everything that was on it."""


class NoLogin(ConnectionLost):
    """There is no connection, as there is nothing to log in with, for a *reason* that is one of our errors."""

    def __init__(self, reason: TenureError) -> None:
        super().__init__(0, str(reason))
        self.reason = reason


class ChannelLost(AmqpError):
    """The server has closed the channel; or its connection is over."""


class Returned(Exception):
    """No queue has the name to which a message was published."""


class NotConfirmed(Exception):
    """The server did not take responsibility for a message."""


class Refused(NotConfirmed):
    """A queue took no message: it is full, or is being declared."""

    def __init__(self) -> None:
        super().__init__("the queue refuses it")


class NotTaken(ChannelLost):
    """The server has not taken a message, as it had closed the channel for one before: it may be published again."""


class Unacceptable(Exception):
    """The server can't take a message as it is; it is not kept.

    ``index`` is its place among those that were to be published together.
    """

    def __init__(self, text: str, index: int = 0) -> None:
        super().__init__(text)
        self.index = index


class TooLarge(Unacceptable):
    """A message is larger than the server takes; none of those that were to be published together was sent."""


class Rejected(Unacceptable):
    """The server has refused a message, and closed the channel for it; others that were sent with it may be kept."""


_REFUSED_SECRET, _ENDED = "New secret was refused", "rabbit_auth_backend_oauth2 returned an error"
"""What the server says of the login of an open connection: of another one, and that it ends with; of its own.

Of the latter, the end may be missing, that the token has expired: a text in AMQP has 255 bytes.
"""

_CODES: dict[type[BaseException], int] = {
    aiormq.ChannelAccessRefused: 403,
    aiormq.ChannelNotFoundEntity: 404,
    aiormq.ChannelLockedResource: 405,
    aiormq.ChannelPreconditionFailed: 406,
    aiormq.ConnectionFrameError: 501,
    aiormq.ConnectionSyntaxError: 502,
    aiormq.ConnectionCommandInvalid: 503,
    aiormq.ConnectionChannelError: 504,
    aiormq.ConnectionUnexpectedFrame: 505,
    aiormq.ConnectionResourceError: 506,
    aiormq.ConnectionNotAllowed: 530,
    aiormq.ConnectionNotImplemented: 540,
    aiormq.ConnectionInternalError: 541,
}


def is_login_refused(error: Exception) -> bool:
    """Return whether the server refuses the login of a connection, be it new or open."""
    match error:
        case ConnectionLost():
            return error.code == 403 or (error.code == 530 and _REFUSED_SECRET in error.text)
        case AmqpError():
            return is_login_over(error)
    return False


def is_login_over(error: AmqpError) -> bool:
    """Return whether the server refuses a request on an open connection as its token has ended."""
    return error.code == 403 and _ENDED in error.text


def refusal(error: BaseException | None) -> AmqpError:
    """Return why a channel or a connection is over, by the *error* with which the driver ends it."""
    kind = ChannelLost if isinstance(error, aiormq.AMQPChannelError) else ConnectionLost
    match error:
        case aiormq.ChannelClosed() | aiormq.ConnectionClosed():
            code = _CODES.get(type(error))
            if code is None:  # those that have no class of their own come with their code
                number, text = (*error.args, None, None)[:2]
                return kind(number or 0, text or "it was closed")
            return kind(code, str(error.args[0]) if error.args else "")
        case None:
            return kind(0, "it was closed")
    return kind(0, f"the connection was lost: {str(error) or type(error).__name__}")


def refusal_to_connect(error: Exception) -> ConnectionLost:
    """Return why the server didn't let us in."""
    match error:
        case aiormq.ProbableAuthenticationError():
            return ConnectionLost(403, str(error.args[0]) if error.args else "ACCESS_REFUSED")
        case aiormq.AuthenticationError():
            return ConnectionLost(403, f"the server offers no login by password, but {error.args[0]}")
        case aiormq.InvalidFrameError() if "Connection.Close " in str(error):  # the driver drops what the server says
            return ConnectionLost(530, "it doesn't exist, or the user has no rights in it")
        case aiormq.ConnectionClosed():
            lost = refusal(error)
            return ConnectionLost(lost.code, lost.text)
    return ConnectionLost(
        0, f"the connection was lost: {error}; is it an AMQP port, and is TLS as the server wants it?"
    )
