"""Processes of programs that begin at once: forked from one that has imported the library already.

A cold process spends most of its CPU time on imports, and on taking them down. A test that needs *a process* takes one
from here; one that needs *a cold process*, such as one that shows that a command imports what it needs, starts Python
itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

PATIENCE = 60.0
SERVER = Path(__file__).with_name("warm_server.py")
FORKS = sys.platform == "linux"
"""Elsewhere, a fork isn't safe or isn't there: each process is a cold one."""


@cache
def _server() -> socket.socket:
    """Return the way to the server of this process of tests; it ends with it, by the end of this socket."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        line = [sys.executable, str(SERVER), str(theirs.fileno())]
        _servers.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
    return control


_servers: list[subprocess.Popen[bytes]] = []
"""Kept, so that they don't warn that they still run."""


class WarmProcess:
    """What ``subprocess.Popen`` is with ``text=True``, in what the tests use of it.

    Args:
        line: The words of a command, without ``tenure``; or the path of a Python file, and its arguments.
        cwd: Its folder.
        env: Its environment.
        stdin: As of ``Popen``, as are the others.
    """

    def __init__(
        self,
        line: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.args = [str(word) for word in line]
        self.returncode: int | None = None
        request = json.dumps([self.args, dict(os.environ if env is None else env), str(cwd or Path.cwd())])
        self._reply, reply = socket.socketpair()
        ends = [_ends(given, number) for number, given in enumerate((stdin, stdout, stderr))]
        theirs = [their for their, _ in ends]
        with reply:
            socket.send_fds(_server(), [request.encode()], [*theirs, reply.fileno()])
        for their in theirs:
            os.close(their)
        ours = [None if our is None else os.fdopen(our, "r" if number else "w") for number, (_, our) in enumerate(ends)]
        self.stdin: IO[str] | None = ours[0]
        self.stdout: IO[str] | None = ours[1]
        self.stderr: IO[str] | None = ours[2]
        self._answers = self._reply.makefile("rb", buffering=0)
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._reply.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended: its number may be another's then."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write *text*, which fits into a pipe; return what is left of both outputs when the process has ended."""
        give_up = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None:
            with suppress(BrokenPipeError):
                self.stdin.write(text)
                self.stdin.close()
        found = {1: "", 2: ""}

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                found[number] = stream.read()

        outputs = [(number, one) for number, one in ((1, self.stdout), (2, self.stderr)) if one and not one.closed]
        readers = [threading.Thread(target=read, args=output, daemon=True) for output in outputs]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if give_up is None else max(0.0, give_up - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if give_up is None else max(0.0, give_up - time.monotonic()))
        return found[1], found[2]


def _ends(given: int, number: int) -> tuple[int, int | None]:
    """Return the files of one stream: the process's, and ours if it is a pipe."""
    match given:
        case subprocess.PIPE:
            reads, writes = os.pipe()
            return (writes, reads) if number else (reads, writes)
        case subprocess.DEVNULL:
            return os.open(os.devnull, os.O_RDWR), None
        case _:
            return os.dup(given), None


Process = WarmProcess | subprocess.Popen[str]


def start(
    line: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> Process:
    """Start a program: the words of a command, without ``tenure``; or the path of a Python file, and its arguments."""
    if FORKS:
        return WarmProcess(line, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    words = [str(word) for word in line]
    cold = [sys.executable, *(words if words[0].endswith(".py") else ["-m", "tenure.cli", *words])]
    return subprocess.Popen(cold, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True)


def run(
    line: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text: str = "",
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; if it takes longer than *timeout* seconds, kill it and fail."""
    process = start(line, cwd=cwd, env=env, stdin=subprocess.PIPE)
    try:
        output, errors = process.communicate(text, timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
