"""The names of ``tenure``: each is available after ``import tenure``, and loads only what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tenure

# Each name is the first thing that its process loads of tenure; a fork is a new process without the start of a Python.
PROGRAM = """
import os, sys, traceback
from operator import attrgetter

for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            import tenure
            attrgetter(name)(tenure)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def unavailable(*names: str) -> tuple[list[str], str]:
    """Return those of *names* that a process can't use after a plain import, and its errors."""
    line = [sys.executable, "-c", PROGRAM, *names]
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
