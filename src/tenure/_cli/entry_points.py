"""Functions and services of the user's own modules, named on the command line as ``module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import tenure
import tenure.sync
from tenure._cli.exits import Exit, Failure
from tenure._cli.output import print_traceback
from tenure.errors import TenureError, in_words

TEXT_MAX = 4_096
"""Characters of an exception in a message."""

_IMPORTING = (__file__, importlib.__file__, "<frozen importlib")
"""Where the files of frames begin that only import a module."""


def handler_named(named: str) -> Callable[[Any], Awaitable[object] | object]:
    """Import the handler that ``--handler`` names.

    Raises:
        Failure: There is no such function; the message says what was found.
    """
    found, module = imported(named, "function", f"--handler {named!r}")
    if not callable(found):
        what = "has no such function" if found is None else f"has a {type(found).__name__} there, not a function"
        raise Failure(Exit.NOT_FOUND, f"--handler {named!r}: the module {module!r} {what}")
    handler: Callable[[Any], Awaitable[object] | object] = found
    return handler


def service_named(named: str) -> tenure.Service:
    """Import the service that the command line names; of a ``tenure.sync.Service``, the one that runs it.

    Raises:
        Failure: There is no such service; the message says what was found.
    """
    found, module = imported(named, "service", repr(named))
    if isinstance(found, tenure.sync.Service):
        return found.service
    if not isinstance(found, tenure.Service):
        what = "has no such service" if found is None else f"has a {type(found).__name__} there, not a tenure.Service"
        raise Failure(Exit.NOT_FOUND, f"{named!r}: the module {module!r} {what}")
    return found


def imported(named: str, kind: str, shown: str) -> tuple[Any, str]:
    """Import what ``module:name`` names, and return it, or None; and the name of its module.

    Raises:
        Failure: The name has another form, or the module can't be imported. What it has raised is on stderr by then,
            with its traceback.
    """
    module_name, colon, name = named.partition(":")
    if not colon or not module_name or not name:
        raise Failure(Exit.USAGE, f"{shown} is not of the form module:{kind}")
    sys.path.insert(0, os.getcwd())  # as python -m does: it is usually in a file of this folder
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part, None)  # a module may import it only now
    except (Exception, SystemExit) as error:  # any error of the module
        raise _failure(error, module_name, shown) from error
    return found, module_name


def _failure(error: Exception | SystemExit, module_name: str, shown: str) -> Failure:
    """Return why the module can't be imported; print the traceback of what it, or one that it imports, has raised."""
    code = Exit.NOT_FOUND if isinstance(error, ImportError) else Exit.CONFIG
    own = _in_modules(error.__traceback__)
    if own is None and code is Exit.NOT_FOUND:
        return Failure(code, f"{shown}: the module can't be imported: {error}")
    if not isinstance(error, TenureError):  # ours says enough; the line that it came from may have a secret
        print_traceback(error, own)
    match error:
        case SyntaxError(filename=str(file), lineno=int(line), msg=str(text)) if not file.startswith("<"):
            where, what = f"{file}, line {line}", f"{type(error).__name__}: {text}"
        case _:
            failed, line = _failed_module(own, module_name)
            where = f"line {line} of " if line and isinstance(error, TenureError) else ""
            where += f"the module {failed!r}" + ("" if failed == module_name else f", which {module_name!r} imports,")
            what = in_words(error).removesuffix(": ")
    return Failure(code, f"{shown}: {where} raised {what:.{TEXT_MAX}}")


def _in_modules(trace: TracebackType | None) -> TracebackType | None:
    """Return *trace* from its first line in a module of the user; None if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_IMPORTING):
        trace = trace.tb_next
    return trace


def _failed_module(trace: TracebackType | None, module_name: str) -> tuple[str, int]:
    """Return the module that was executed last, and its line; 0 if none was."""
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "<module>":
            module_name, line = str(trace.tb_frame.f_globals.get("__name__", module_name)), trace.tb_lineno
        trace = trace.tb_next
    return module_name, line
