"""Functions and services of the user's own modules, named on the command line as ``module:name``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import tenure
import tenure.sync
from tenure._cli.exits import Exit, Failure


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
        Failure: The name has another form, or the module can't be imported.
    """
    module_name, colon, name = named.partition(":")
    if not colon or not module_name or not name:
        raise Failure(Exit.USAGE, f"{shown} is not of the form module:{kind}")
    sys.path.insert(0, os.getcwd())  # as python -m does: it is usually in a file of this folder
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise Failure(Exit.NOT_FOUND, f"{shown}: the module can't be imported: {error}") from error
    except Exception as error:  # any error of the module
        what = "".join(traceback.format_exception_only(error)).strip()
        raise Failure(Exit.CONFIG, f"{shown}: the module {module_name!r} raised {what}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    return found, module_name
