"""A process that has imported the library, and runs each program that it is told in a fork of itself; see warm.py.

A request is a program, its environment and its folder, with the files of its streams.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import socket
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


def become(line: list[str], environment: dict[str, str], folder: str) -> int:
    """Run a program in this process, a fork, and do what Python does at the end, except to take down all modules."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # New ones: the server's own know whether theirs was a file, a pipe or a terminal.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    code = carry_out(line)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # what was never closed or awaited says so; what was there before the fork is frozen
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


class Server:
    """Forks what it is told on its socket; says on a socket of each process its number, and how it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, int]] = {}  # by the file that tells that it ended: its number, its socket

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._say_how_it_ended(key.fd)
                elif not self._carry_out_a_request():
                    return

    def _carry_out_a_request(self) -> bool:
        request, files, _, _ = socket.recv_fds(self._control, 1 << 20, 4)
        if not request:
            return False
        assert threading.active_count() == 1, threading.enumerate()
        *streams, reply = files
        child = os.fork()
        if child == 0:
            code = 70
            try:
                self._close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                os.closerange(min(files), max(files) + 1)
                code = become(*json.loads(request))
            finally:
                os._exit(code)
        for stream in streams:
            os.close(stream)
        ends = os.pidfd_open(child)
        self._selector.register(ends, selectors.EVENT_READ)
        self._running[ends] = child, reply
        os.write(reply, f"{child}\n".encode())
        return True

    def _say_how_it_ended(self, ends: int) -> None:
        child, reply = self._running.pop(ends)
        self._selector.unregister(ends)
        os.close(ends)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(BrokenPipeError):  # a test that failed waits no more
            os.write(reply, f"{code}\n".encode())
        os.close(reply)

    def _close(self) -> None:
        """Close the server's own files, in a fork."""
        self._selector.close()
        self._control.close()
        for ends, (_, reply) in self._running.items():
            os.close(ends)
            os.close(reply)


if __name__ == "__main__":
    preload()
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()
