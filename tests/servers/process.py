"""One server as a process: prepared, started, disturbed and ended; and the folder of all servers of one test run."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from scripts.servers import faketime
from tests.absent import skip_or_fail
from tests.durations import wait_until
from tests.ports import bound
from tests.process_states import STOPPED, is_alive, states_of
from tests.servers.guard import MARK, forget

START_MAX = 60.0
STOP_MAX = 20.0


class Server:
    """A server process with a folder and a port of its own. A subclass has the command, and checks when it is ready.

    Usable as a context manager: started on entering, ended and removed on leaving.

    Args:
        turnable: Whether its clock can be put forward, see :meth:`turn`; it is somewhat slower then.
    """

    install: ClassVar[str]
    """The package to install if it is missing, for a message."""
    user: ClassVar[str | None] = None
    """The user that it runs as when the tests run as root, which some servers refuse."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    scheme: ClassVar[str]

    def __init__(self, *, turnable: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-", dir=run_folder()))
        self.port = free_port()
        self.env: dict[str, str] = {}
        self.clock: dict[str, str] = {}
        """More environment, for the server only: the programs that start it would fail under another clock."""
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared = False
        self._turned = 0.0
        self.give(self.folder, 0o700)
        if turnable:
            self.turn(0.0)
            self.clock = _faked(self.folder / "clock")

    # --- for subclasses to implement ---

    @classmethod
    def missing(cls) -> str:
        """Return why this server can't be started here; empty if it can be."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare the folder, once, before the first start."""

    def argv(self) -> Sequence[str]:
        """Return the command that is the server."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether it serves."""
        return self.answers(b"") is not None

    @property
    def url(self) -> str:
        """The URL under which tenure finds it."""
        raise NotImplementedError

    # --- for tests ---

    def start(self) -> Self:
        """Start it, and return when it serves; after a ``stop`` or ``kill``, with the data that it had stored."""
        self.launch()
        return self.until_ready()

    def launch(self) -> None:
        """Start it, and don't wait for it."""
        if not self._prepared:
            self.prepare()
            self._prepared = True
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self._as_user(["env", *(f"{name}={value}" for name, value in self.clock.items()), *self.argv()]),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_ready(self) -> Self:
        """Return when it serves."""
        assert self._process is not None, "it was not launched"
        give_up = time.monotonic() + START_MAX
        while not self.ready():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"{type(self).__name__} did not start:\n{self.log()[-2_000:]}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Send its stop signal, and wait for its end."""
        if self._process is None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(STOP_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            forget([self._process.pid])
            self._process = None

    def kill(self) -> None:
        """End it and its child processes with ``kill -9``."""
        if self._process is None:
            return
        self._signal_all(signal.SIGSTOP)  # otherwise it might start another process meanwhile
        killed = self._signal_all(signal.SIGKILL)
        self._process.wait()
        self._process = None
        # A remaining process of PostgreSQL would block its shared memory.
        wait_until(lambda: not any(map(is_alive, killed)), lambda: "a server's processes outlived kill -9")
        forget(killed)

    def pause(self) -> None:
        """Pause it with SIGSTOP, and return when it is: connections stay open, no request is answered.

        One thread gets the signal, and stops the others only when it has its turn: on a busy machine, they may answer
        requests meanwhile.
        """
        stopped = None
        while stopped != (stopped := self._signal_all(signal.SIGSTOP)):
            wait_until(
                lambda: all(states_of(pid) <= STOPPED for pid in stopped),
                lambda: "a server's process did not stop",
            )

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        self._signal_all(signal.SIGCONT)

    def turn(self, seconds: float) -> None:
        """Put its wall clock forward, so that leases and locks of up to *seconds* end. Only if it is turnable."""
        self._turned += seconds
        clock = self.folder / "clock"
        self.write("clock.new", f"{self._turned:+.3f}\n").rename(clock)

    def close(self) -> None:
        """Kill it, remove its folder, and release its port."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        release(self.port)

    def __enter__(self) -> Self:
        return self if self.runs else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither stopped nor killed."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None, "it is not running"
        return self._process.pid

    def log(self) -> str:
        """Return its output so far."""
        return (self.folder / "server.log").read_text(errors="replace")

    # --- used by subclasses ---

    def run(self, *argv: str) -> str:
        """Run a command to its end, as the server's user and in its folder; return its output."""
        done = subprocess.run(
            self._as_user(argv),
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed:\n{done.stdout[-2_000:]}")
        return done.stdout

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        """Put a file into the folder that the server's user can read."""
        path = self.folder / name
        path.write_text(text)
        self.give(path, mode)
        return path

    def give(self, path: Path, mode: int = 0o600) -> None:
        """Make the server's user the owner of a file or a folder."""
        path.chmod(mode)
        if self.user is not None and self._drops_root():
            shutil.chown(path, self.user, self.user)

    def answers(self, request: bytes) -> bytes | None:
        """Return the first answer to *request* on its port; empty for an empty request, None if it doesn't listen."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(request)
                return connection.recv(4_096) if request else b""
        except OSError:
            return None

    # --- inner ---

    def _drops_root(self) -> bool:
        return self.user is not None and os.geteuid() == 0

    def _as_user(self, argv: Sequence[str]) -> list[str]:
        if not self._drops_root():
            return list(argv)
        return ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--init-groups", "--", *argv]

    def _environment(self) -> Mapping[str, str]:
        return {**os.environ, **self.env, MARK: str(run_folder())}

    def _signal_all(self, number: signal.Signals) -> list[int]:
        if self._process is None or self._process.poll() is not None:
            return []
        family = _family(self._process.pid)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return family


def free_port() -> int:
    """Return a loopback port that is reserved until it is released: only a server that names it can listen on it.

    It stays reserved before the server's first start, and between two starts.
    """
    reserved = bound()
    port: int = reserved.getsockname()[1]
    _reserved[port] = reserved
    return port


def release(port: int) -> None:
    """Release a port, if it is reserved."""
    if (reserved := _reserved.pop(port, None)) is not None:
        reserved.close()


_reserved: dict[int, socket.socket] = {}


@cache
def run_folder() -> Path:
    """Return the folder of all servers of this test run; a guard ends them when the run has ended, in any way.

    The path is short, because the paths of the sockets in it must be.
    """
    folder = Path(tempfile.gettempdir(), f"tenure-{secrets.token_hex(6)}")
    guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(os.getpid()), str(folder)]
    # The guard is started before any server. No process waits for it: it ends after this one.
    _guards.append(subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True))
    folder.mkdir(mode=0o711)
    return folder


_guards: list[subprocess.Popen[bytes]] = []


def _faked(clock: Path) -> dict[str, str]:
    """Return the environment in which a program's wall clock is put forward by the file *clock*."""
    library = faketime()
    if library is None:
        skip_or_fail(
            "this test turns a server's clock, which needs libfaketime; install faketime (apt-get install faketime)"
        )
    # The C library comes second, because jemalloc reads the clock before libfaketime is ready.
    libc = next(Path("/lib").glob(f"{library.parent.parent.name}/libc.so.6"), None)
    return {
        "LD_PRELOAD": " ".join(str(each) for each in (library, libc) if each),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",  # timers run on it, and a server whose timers are faked hangs
    }


def _family(pid: int) -> list[int]:
    """Return *pid* and all its descendants, which may have left its process group."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family
