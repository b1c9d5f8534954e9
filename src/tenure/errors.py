"""The errors that tenure raises: one small tree.

::

    TenureError
    ├── ConfigError            can never work as configured: a setting, a URL, a file that is no database
    │   ├── BackendNotInstalled    the URL's driver is missing; the message names the pip command
    │   └── MessageRefused         one of the messages can't be sent; none of them was
    ├── Unavailable            could not find out: the store did not answer; counts as neither yes nor no
    ├── TimedOut               a wait of the caller ended without a result; also a TimeoutError
    ├── DecodeError            a message's body can't be decoded as the type; also a ValueError
    ├── QueueNotEmpty          a queue was not deleted, because it has messages
    ├── TermLost               this term is over, or can no longer be trusted
    └── LockLost               this delivery's lock is over; another consumer may have the message

Every message says what was asked, what was found, and what to do about it. Every class has a ``code``, under which
``tenure explain`` and docs/errors.md say more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

__all__ = [
    "BackendNotInstalled",
    "ConfigError",
    "DecodeError",
    "LockLost",
    "MessageRefused",
    "QueueNotEmpty",
    "TenureError",
    "TermLost",
    "TimedOut",
    "Unavailable",
]


class TenureError(Exception):
    """The base class of all errors that tenure raises on purpose.

    Attributes:
        code: A word for this kind of error, for logs and for ``tenure explain``; it stays the same in later versions.
            To handle an error, catch its class: a code may name a part of what its class stands for.
    """

    code: ClassVar[str] = "tenure-error"


class ConfigError(TenureError):
    """The request can never work; the message names a setting that would."""

    code: ClassVar[str] = "config"


class BackendNotInstalled(ConfigError):
    """The driver that a URL needs is missing; the message names the extra that has it."""

    code: ClassVar[str] = "not-installed"


class MessageRefused(ConfigError):
    """One of the messages can't be sent; none of them was sent.

    Attributes:
        index: Its index among them, from 0.
        reason: Why it was refused.
    """

    code: ClassVar[str] = "message-refused"

    def __init__(self, reason: str, index: int = 0, count: int = 1) -> None:
        place = f"message {index} of {count}: {reason}; none of them was sent"
        super().__init__(place if count > 1 else reason)
        self.index = index
        self.reason = reason
        self._count = count

    def __reduce__(self) -> tuple[type[MessageRefused], tuple[str, int, int]]:
        return type(self), (self.reason, self.index, self._count)


class Unavailable(TenureError):
    """The store could not be asked, or gave no answer: neither a yes nor a no."""

    code: ClassVar[str] = "unavailable"


class TimedOut(TenureError, TimeoutError):
    """A wait for a reply or a session ended without a result, after the time that the caller gave it."""

    code: ClassVar[str] = "timed-out"


class DecodeError(TenureError, ValueError):
    """A message's body is not JSON, or doesn't fit the type; the message names the place.

    If a handler raises it about its own message, that is not retried, because the body stays the same.
    """

    code: ClassVar[str] = "decode"
    queue: str | None = None
    """The queue of the message; None if only a body was known."""
    sequence: int | None = None
    """The message's sequence in it; None likewise."""


class QueueNotEmpty(TenureError):
    """A queue was not deleted, because it has messages; nothing has changed."""

    code: ClassVar[str] = "queue-not-empty"


class TermLost(TenureError):
    """A term is over: its holder must stop acting as the leader."""

    code: ClassVar[str] = "term-lost"


class LockLost(TenureError):
    """A delivery is over: it was settled, or its lock has ended."""

    code: ClassVar[str] = "lock-lost"


def in_words(error: BaseException) -> str:
    """Return type and message of *error*, even if its own methods fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its own methods may raise anything
        return f"{type(error).__name__}, which can't be printed"


def refuse_generator(what: str, function: object) -> None:
    """Refuse a *function* with ``yield`` in it: calling it runs nothing, which would look like success.

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
                "in it, so calling it only makes a generator; remove the yield, or iterate over the generator inside"
            )


def refuse_unknown(function: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse *options* that *function* does not know, and name the nearest one that it does.

    Raises:
        TypeError: There is no such option.
    """
    names = list(known)
    for name in options:
        if name not in names:
            raise TypeError(f"{function}() has no option {name!r}{nearest(name, names)}")


def nearest(asked: str, known: list[str], closeness: float = 0.5) -> str:
    """Return ``'; did you mean …?'`` for the closest of *known*, or nothing if none is close."""
    from difflib import get_close_matches

    close = get_close_matches(asked, known, n=1, cutoff=closeness)
    return f"; did you mean {close[0]!r}?" if close else ""
