"""Exceptions as text, which outlives their process and which every store can keep."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._queue.checks import TEXT_MAX

TRACEBACK_MAX = 16_384
TRACEBACK_BRIEF = 1_024
"""Characters kept of the traceback of a delivery that is neither the first nor the last allowed: so the history of a
message that failed fifty times stays below 100 KB."""
MESSAGE_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as text that outlives its process."""

    type: str
    """The full name of the type, such as ``ValueError`` or ``shop.errors.NoSuchCustomer``."""
    message: str
    """The text of the exception: at most 4,096 characters."""
    traceback: str = ""
    """The traceback as text, or its end if it is long; empty if none was kept."""

    @classmethod
    def of(cls, error: BaseException, most: int = TRACEBACK_MAX) -> Failure:
        """Return *error* as text; of a traceback longer than *most* characters, its end, which is the most relevant.

        Exceptions raised by methods of *error* are not passed on.
        """
        traceback = traceback_of(error)
        if len(traceback) > most:
            traceback = "…" + traceback[-most:]
        return cls(storable(name_of(error))[:TEXT_MAX], storable(text_of(error)[:MESSAGE_MAX]), storable(traceback))


def traceback_most(deliveries: int, max_deliveries: int) -> int:
    """Return how many characters to keep of the traceback of the delivery with this number."""
    return TRACEBACK_MAX if deliveries == 1 or deliveries >= max_deliveries else TRACEBACK_BRIEF


def name_of(error: BaseException) -> str:
    """Return the full name of the type of *error*."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or a note if the exception's own ``__str__`` fails in any way."""
    try:
        return str.__str__(str(error))  # never a subclass of str, which could have methods of its own
    except BaseException:
        return "(its text can't be printed)"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of *error* as text, or a note if it can't be printed."""
    from traceback import format_exception  # expensive to import, and seldom needed

    try:
        return "".join(format_exception(error))
    except BaseException:  # the module itself catches only some exceptions of __str__ and __notes__
        return f"{name_of(error)}: (its traceback can't be printed)"


def storable(text: str) -> str:
    """Return *text* with the characters escaped that some store can't keep (lone surrogates, NUL)."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
