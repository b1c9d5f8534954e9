"""The errors that tenure raises: one small tree, each a letter to a tired operator.

::

    TenureError
    ├── ConfigError            can never work as asked: a setting, a URL, a file that is no database
    │   ├── BackendNotInstalled    the URL's driver is missing; the message names the pip command
    │   └── MessageRefused         one of the messages to be sent can't be; none of them was
    ├── Unavailable            could not find out: the store did not answer; counts as neither yes nor no
    ├── TimedOut               a wait of the caller's is over, with nothing to show for it; also a TimeoutError
    ├── DecodeError            a message's body is not what it was to be read as; also a ValueError
    ├── QueueNotEmpty          a queue was not deleted, as there are messages in it
    ├── TermLost               this term is over, or can no longer be trusted
    └── LockLost               this delivery's lock is over; somebody else may have the message

Every message says what was asked, what was found, and what to do about it.
"""

from __future__ import annotations


class TenureError(Exception):
    """Be the common ancestor, so that one ``except`` catches all that tenure raises on purpose."""


class ConfigError(TenureError):
    """Say that what was asked can never work, and which setting would."""


class BackendNotInstalled(ConfigError):
    """Say which extra brings the driver that a URL needs."""


class MessageRefused(ConfigError):
    """Say which of the messages to be sent can't be, and why; none of them was sent.

    Attributes:
        index: Its place among them, from 0.
        reason: Why it was refused.
    """

    def __init__(self, reason: str, index: int = 0, count: int = 1) -> None:
        place = f"message {index} of {count}: {reason}; none of them was sent"
        super().__init__(place if count > 1 else reason)
        self.index = index
        self.reason = reason
        self._count = count

    def __reduce__(self) -> tuple[type[MessageRefused], tuple[str, int, int]]:
        return type(self), (self.reason, self.index, self._count)


class Unavailable(TenureError):
    """Say that the store could not be asked, or gave no answer: neither a yes nor a no."""


class TimedOut(TenureError, TimeoutError):
    """Say that a wait is over, as long as its caller gave it: for an answer to a request, or for a session."""


class DecodeError(TenureError, ValueError):
    """Say that a message's body is no JSON, or doesn't fit the type it was to be read as; and where.

    Raised by a handler about its own message, it is not tried again: the body stays as it is.

    Attributes:
        queue, sequence: Which message it is about; None where only a body was known.
    """

    queue: str | None = None
    sequence: int | None = None


class QueueNotEmpty(TenureError):
    """Say that a queue was not deleted, as there are messages in it: nothing has changed."""


class TermLost(TenureError):
    """Say that a term is over: nothing may be done in its name any more."""


class LockLost(TenureError):
    """Say that a delivery is no longer ours: it was settled, or its lock has ended."""


def in_words(error: BaseException) -> str:
    """Return kind and message of *error*, also if it can't be printed: it may be of anybody's making."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its own methods may raise whatever they like
        return f"{type(error).__name__}, which can't be printed"


def refuse_generator(what: str, function: object) -> None:
    """Refuse a *function* with ``yield`` in it: to call it runs nothing, and that would pass for success.

    Raises:
        ConfigError: It is a generator function, or an async one.
    """
    import functools
    import inspect

    called = function
    while isinstance(called, functools.partial):
        called = called.func
    for one in (called, type(called).__call__ if callable(called) else None):
        code = getattr(one, "__code__", None)
        is_coroutine = code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE  # as of types.coroutine
        if inspect.isasyncgenfunction(one) or (inspect.isgeneratorfunction(one) and not is_coroutine):
            raise ConfigError(
                f"{what} must be a function that does its work when it is called, and {function!r:.80} has a yield "
                "in it, so to call it only makes a generator; take out the yield, or go through the generator inside"
            )


def nearest(asked: str, known: list[str]) -> str:
    """Return ``'; did you mean …?'`` for the closest of *known*, or nothing if none is close."""
    from difflib import get_close_matches

    close = get_close_matches(asked, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
