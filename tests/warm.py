"""Processes of programs that begin at once: forked from one that has imported the library already.

A cold process spends most of its CPU time on imports, and on taking them down. A test that needs *a process* takes one
from here; one that needs *a cold process* starts Python itself: each command and each example is run so, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

PATIENCE = 60.0
SERVER = Path(__file__).with_name("warm_server.py")
FORKS = sys.platform == "linux"
"""Elsewhere, a fork isn't safe or isn't there: each process is a cold one."""


@cache
def _server() -> subprocess.Popen[str]:
    """Return the server of this process of tests; it ends with it, by the end of its input."""
    return subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    line: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text: str = "",
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return what ``subprocess.run`` does.

    Args:
        line: The words of a command, without ``tenure``; or the path of a Python file, and its arguments.
        cwd: Its folder.
        env: Its environment.
        text: Its input.
        timeout: The seconds after which it is killed, and the test fails.
    """
    words = [str(word) for word in line]
    if not FORKS:
        cold = [sys.executable, *(words if words[0].endswith(".py") else ["-m", "tenure.cli", *words])]
        return subprocess.run(
            cold, cwd=cwd, env=env, input=text, capture_output=True, text=True, timeout=timeout, check=False
        )
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "error")]
        for stream in streams:
            stream.write_text(text if stream.name == "in" else "")
        environment = dict(os.environ if env is None else env)
        code = _end_of([words, environment, str(cwd or Path.cwd()), [str(one) for one in streams]], timeout)
        return subprocess.CompletedProcess(words, code, streams[1].read_text(), streams[2].read_text())


def _end_of(request: list[object], timeout: float) -> int:
    process = _server()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    pid = int(process.stdout.readline())
    overdue = threading.Event()

    def kill() -> None:
        overdue.set()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.daemon = True
    timer.start()
    try:
        code = int(process.stdout.readline())
    finally:
        timer.cancel()
    if overdue.is_set():
        raise subprocess.TimeoutExpired(str(request[0]), timeout)
    return code
