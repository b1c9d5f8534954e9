"""A process that has imported the library, and runs each program that it is told in a fork of itself; see warm.py.

A line on its input is a program, its environment, its folder and the files of its streams; the answers are the number
of its process, and how it ended.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import threading
from contextlib import suppress

import tenure
import tenure.cli
from tenure._cli.group import group


def preload() -> None:
    """Import what the programs use, so that the forks need not; a driver that isn't installed is left out."""
    for package in ("_backends", "_cli", "_queue", "_election", "_runtime", "_schedule", "_partitions", "_service"):
        path = [f"{tenure.__path__[0]}/{package}"]
        for found in pkgutil.walk_packages(path, f"tenure.{package}."):
            with suppress(ImportError):
                importlib.import_module(found.name)
    for name in group.list_commands(None):  # type: ignore[arg-type]  # it doesn't look at the context
        group.get_command(None, name)  # type: ignore[arg-type]


def carry_out(line: list[str]) -> int:
    """Run a program as Python does; return the code that it ends with."""
    try:
        if line[0].endswith(".py"):
            sys.argv, sys.path[0] = line, os.path.dirname(line[0])
            runpy.run_path(line[0], run_name="__main__")
            return 0
        sys.argv, sys.path[0] = ["tenure", *line], os.getcwd()
        return tenure.cli.main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1


def become(line: list[str], environment: dict[str, str], folder: str, streams: list[str]) -> int:
    """Run a program in this process, a fork, and do what Python does at the end, except to take down all modules."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in enumerate(streams):
        opened = os.open(name, os.O_WRONLY | os.O_TRUNC if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    code = carry_out(line)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # what was never closed or awaited says so; what was there before the fork is frozen
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


def serve() -> None:
    preload()
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for request in sys.stdin:
        assert threading.active_count() == 1, threading.enumerate()
        child = os.fork()
        if child == 0:
            os.close(answers.fileno())
            code = 70
            try:
                code = become(*json.loads(request))
            finally:
                os._exit(code)
        answers.write(f"{child}\n")
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


if __name__ == "__main__":
    serve()
