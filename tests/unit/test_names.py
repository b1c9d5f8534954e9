"""The names of ``tenure``: each is available after ``import tenure``, and loads only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenure

# The names of a module are the first thing that their process loads of tenure; a fork is a new process without the
# start of a Python.
PROGRAM = """
import os, sys, traceback
from operator import attrgetter

for names in sys.argv[1:]:
    child = os.fork()
    if not child:
        for name in names.split(","):
            try:
                import tenure
                attrgetter(name)(tenure)
            except BaseException:
                traceback.print_exc()
                print(name, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, names
"""


def unavailable(*names: str) -> tuple[list[str], str]:
    """Return those of *names* that a process can't use after a plain import, and its errors."""
    homes: dict[str, list[str]] = {}
    for name in names:
        homes.setdefault(tenure._HOME_OF.get(name, name), []).append(name)
    line = [sys.executable, "-c", PROGRAM, *map(",".join, homes.values())]
    run = subprocess.run(line, capture_output=True, text=True, check=True)
    return run.stdout.split(), run.stderr


def test_each_name_is_available_after_a_plain_import() -> None:
    names = [*tenure.__all__, "events", "sync", "events.TermBegan"]
    assert unavailable(*names) == ([], "")


def test_a_name_that_is_not_is_found() -> None:
    found, errors = unavailable("connect", "evnets", "sync")
    assert found == ["evnets"]
    assert "module 'tenure' has no attribute 'evnets'" in errors


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tenure' has no attribute 'evnets'"):
        tenure.__getattr__("evnets")
