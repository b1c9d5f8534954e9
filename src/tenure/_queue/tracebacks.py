"""Where an exception comes from, as the author of a handler sees it: without tenure's own frames."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from types import TracebackType

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages.

    Nothing is imported for it: something has failed, perhaps because no file can be opened any more.
    """
    packages = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple(os.path.join(path, "") for path in (os.path.dirname(os.__file__), *packages))


class ThereTraceback(Exception):
    """The traceback of an exception in another process, as its cause; *place* as of :func:`place_of`."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place = place
        self._text = text

    def __str__(self) -> str:
        return f'\n"""\n{self._text}"""'


def handlers_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of *error* from the handler on; None if no handler's code was running."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def told_of(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None] | None:
    """Return ``exc_info`` for a log record; None if it would show no line of the handler."""
    trace = handlers_traceback(error)
    return (type(error), error, trace) if trace is not None or isinstance(error.__cause__, ThereTraceback) else None


def place_of(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of *error* that is the user's; empty if there is none.

    If all are of installed packages, it is the handler's own.
    """
    trace = handlers_traceback(error)
    if trace is None:
        there = error.__cause__
        return there.place if isinstance(there, ThereTraceback) else ""
    found = trace
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith((_OURS, *_libraries(), "<frozen ")):
            found = trace
        trace = trace.tb_next
    code = found.tb_frame.f_code
    file = code.co_filename
    with suppress(OSError):  # the folder may be gone
        file = file.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{file}:{found.tb_lineno} in {code.co_name}"
