"""Contestants: clients of a store, foreign ones and our own, which stand in the same elections as processes.

A program obeys lines on its standard input, and answers with lines::

    ready                                   when it is connected
    stand NAME     ->  leading NAME TOKEN   when it leads the election, at once or later; it then acts
    release NAME   ->  released NAME        when it has stopped acting, and has given the leadership up
    leader NAME    ->  leader NAME HOLDER   the leader, as this client sees it; empty if there is none

It writes what it does to the record, see :mod:`tests.interop.acts`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from tests.absent import skip_or_fail
from tests.durations import wait_until
from tests.interop.acts import ACT, BEGIN, END, Record
from tests.process_states import STOPPED, is_alive, members_of, states_of
from tests.servers.process import run_folder
from tests.servers.zookeeper import FAST, JAVA, classpath

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
PATIENCE = 90.0
"""Seconds for which anything is waited; the session of ``etcdctl elect`` lasts 60."""
CURATOR = ("curator-recipes", "curator-framework", "curator-client", "guava")
"""The jars of Debian that a client of Curator needs, beside those of ZooKeeper."""


class Contestant(Protocol):
    """A client that can stand in elections, and that can be killed."""

    contestant: str
    """Its name in the record, and its identity in the store, if the client lets one choose it."""

    def stand(self, name: str) -> None: ...

    def until_leads(self, name: str) -> str:
        """Return the token that it prints, if it does."""
        ...

    def release(self, name: str) -> None: ...

    def until_released(self, name: str) -> None: ...

    def leader(self, name: str) -> str: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Lines:
    """The lines that a process prints, gathered by a thread."""

    def __init__(self, stream: IO[str], errors: Path) -> None:
        self._errors = errors
        self._lines: list[str] = []
        self._taken: set[int] = set()
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._gather, args=(stream,), daemon=True).start()

    def _gather(self, stream: IO[str]) -> None:
        with suppress(ValueError):  # closed meanwhile
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, pattern: str) -> str:
        """Wait for the first line that matches *pattern* and was not taken yet; return its first group."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._found(pattern), PATIENCE)
            found = self._found(pattern)
            assert found, f"it did not print '{pattern}', but {self._lines[-5:]}; {self.errors()}"
            number, match = found
            self._taken.add(number)
            return str(match.group(1))

    def _found(self, pattern: str) -> tuple[int, re.Match[str]] | None:
        for number, line in enumerate(self._lines):
            if number not in self._taken and (match := re.fullmatch(pattern, line)):
                return number, match
        return None

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")[-2_000:]


class Program:
    """A contestant that is one process for all elections."""

    def __init__(self, argv: Sequence[str], contestant: str, record: Record) -> None:
        self.contestant = contestant
        self.record = record
        errors = record.path.with_name(f"{contestant}.stderr")
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT
            )
        assert self.process.stdout is not None
        self.lines = Lines(self.process.stdout, errors)
        self._is_ready = False

    def stand(self, name: str) -> None:
        self._say(f"stand {name}")

    def until_leads(self, name: str) -> str:
        return self.lines.take(rf"leading {name} ?(.*)")

    def release(self, name: str) -> None:
        self._say(f"release {name}")

    def until_released(self, name: str) -> None:
        self.lines.take(rf"released {name} ?(.*)")

    def leader(self, name: str) -> str:
        self._say(f"leader {name}")
        return self.lines.take(rf"leader {name} ?(.*)")

    def kill(self) -> None:
        """End it with ``kill -9``."""
        self.process.kill()
        self.process.wait()
        ended(self.record, self.contestant)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _say(self, line: str) -> None:
        if not self._is_ready:  # waited for here, so that several start at once
            self.lines.take("(ready)")
            self._is_ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


def ended(record: Record, contestant: str) -> None:
    """Record that a contestant, whose process is gone, leads no election any more."""
    leading = {}
    for act in record.acts():
        leading[act.name] = act.contestant if act.what != END else ""
    for name, leader in leading.items():
        if leader == contestant:
            record.note(END, name, contestant)


def ours(url: str, ttl: float, contestant: str, record: Record) -> Program:
    """Return a process with elections of tenure."""
    return _python("ours", (url, str(ttl)), contestant, record)


def kazoo(hosts: str, prefix: str, kind: str, session: float, contestant: str, record: Record) -> Program:
    """Return a process with kazoo's recipes; *kind*: ``lock`` or ``election``."""
    return _python("with_kazoo", (hosts, prefix, kind, str(session)), contestant, record)


def python_kubernetes(server: str, namespace: str, duration: int, contestant: str, record: Record) -> Program:
    """Return a process with the election of the Python client of Kubernetes."""
    return _python("with_kubernetes", (server, namespace, str(duration)), contestant, record)


def client_go(server: str, namespace: str, duration: int, contestant: str, record: Record) -> Program:
    """Return a process that follows the rules of client-go."""
    return _python("client_go", (server, namespace, str(duration)), contestant, record)


def _python(program: str, settings: Sequence[str], contestant: str, record: Record) -> Program:
    argv = [sys.executable, "-m", f"tests.interop.programs.{program}", *settings, contestant, str(record.path)]
    return Program(argv, contestant, record)


def curator(hosts: str, prefix: str, kind: str, session: float, contestant: str, record: Record) -> Program:
    """Return a process with Curator's recipes; *kind*: ``latch``, ``mutex`` or ``selector``."""
    argv = [
        "java",
        *FAST,
        "-cp",
        f"{compiled()}:{classpath(*CURATOR)}",
        "Contestant",
        hosts,
        prefix,
        kind,
        str(session),
    ]
    return Program([*argv, contestant, str(record.path)], contestant, record)


@cache
def compiled() -> Path:
    """Return the folder with the compiled program that uses Curator; skip the test where it can't be compiled."""
    missing = [jar for jar in CURATOR if not (JAVA / f"{jar}.jar").exists()]
    if missing:
        skip_or_fail(f"{', '.join(missing)} of Curator is not installed (apt-get install libcurator-recipes-java)")
    folder = run_folder() / "interop-classes"
    argv = ["javac", "-nowarn", "-d", str(folder), "-cp", classpath(*CURATOR), str(PROGRAMS / "Contestant.java")]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        skip_or_fail("javac is not installed (apt-get install default-jdk-headless)")
    return folder


class Etcdctl:
    """A contestant that is a process of ``etcdctl`` for each candidacy.

    Args:
        kind: ``elect``, or ``lock`` with a command: a shell that acts until it is released.
        ttl: Of the lock's session, in whole seconds; that of ``elect`` is 60.
    """

    def __init__(self, endpoint: str, prefix: str, kind: str, ttl: int, contestant: str, record: Record) -> None:
        self.endpoint = endpoint
        self.prefix = prefix
        self.kind = kind
        self.ttl = ttl
        self.contestant = contestant
        self.record = record
        self.errors = record.path.with_name(f"{contestant}.stderr")
        self.candidacies: dict[str, Candidacy] = {}

    def stand(self, name: str) -> None:
        kind = Elect if self.kind == "elect" else Lock
        self.candidacies[name] = kind(self, name)

    def until_leads(self, name: str) -> str:
        self.candidacies[name].until_leads()
        return ""

    def release(self, name: str) -> None:
        self.candidacies[name].release()

    def until_released(self, name: str) -> None:
        self.candidacies.pop(name).until_released()

    def leader(self, name: str) -> str:
        """Return what ``elect --listen`` prints about a leader; there must be one."""
        listening = self.start("elect", "--listen", self.prefix + name)
        assert listening.stdout is not None
        try:
            listening.stdout.readline()  # the key
            return listening.stdout.readline().strip()
        finally:
            listening.kill()
            listening.wait()
            listening.stdout.close()

    def kill(self) -> None:
        """End all its processes with ``kill -9``, the commands that ``lock`` runs too: they would go on acting."""
        for candidacy in self.candidacies.values():
            candidacy.kill()
        self.candidacies.clear()
        ended(self.record, self.contestant)

    def close(self) -> None:
        for candidacy in self.candidacies.values():
            candidacy.kill()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with self.errors.open("ab") as stderr:
            return subprocess.Popen(
                ["etcdctl", "--endpoints", self.endpoint, *arguments],
                env={**os.environ, "ETCDCTL_API": "3"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )


class Candidacy:
    """One process of ``etcdctl``, in a process group of its own."""

    def __init__(self, etcdctl: Etcdctl, name: str, *arguments: str) -> None:
        self.record = etcdctl.record
        self.name = name
        self.contestant = etcdctl.contestant
        self.process = etcdctl.start(*arguments)
        assert self.process.stdout is not None
        self.lines = Lines(self.process.stdout, etcdctl.errors)

    def until_leads(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def until_released(self) -> None:
        assert self.process.wait(PATIENCE) == 0
        self._close()

    def kill(self) -> None:
        if self.process.poll() is None:
            # Stopped first: if its command died before it, it would give up the lock.
            self.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: states_of(self.process.pid) <= STOPPED)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # Its command, whose parent it was, must have ended too. The next parent may reap it much later.
        wait_until(lambda: not any(is_alive(pid) for pid in members_of(self.process.pid)))
        self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()


class Elect(Candidacy):
    """``etcdctl elect``: it prints its key when it leads, and leads until it is interrupted."""

    def __init__(self, etcdctl: Etcdctl, name: str) -> None:
        super().__init__(etcdctl, name, "elect", etcdctl.prefix + name, etcdctl.contestant)
        self.key = re.escape(etcdctl.prefix + name)
        self.stopped = threading.Event()
        self.leads = threading.Event()
        self.acting = threading.Thread(target=self._act, daemon=True)
        self.acting.start()

    def _act(self) -> None:
        """Act in its place, from the moment at which it says that it leads."""
        with suppress(AssertionError):  # it ended before
            self.lines.take(rf"({self.key}/[0-9a-f]+)")
            self.record.note(BEGIN, self.name, self.contestant)
            self.leads.set()
            while not self.stopped.wait(0.005):
                self.record.note(ACT, self.name, self.contestant)

    def until_leads(self) -> None:
        assert self.leads.wait(PATIENCE), self.lines.errors()

    def release(self) -> None:
        self._stop_acting()
        self.record.note(END, self.name, self.contestant)
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        super().kill()
        self._stop_acting()

    def _stop_acting(self) -> None:
        self.stopped.set()
        self.acting.join()


class Lock(Candidacy):
    """``etcdctl lock`` with a command: a shell that acts until a file tells it to end."""

    COMMAND = """
        echo "begin $0 $1" >>"$2"
        echo "leading $ETCD_LOCK_KEY"
        while [ ! -e "$3" ]; do echo "act $0 $1" >>"$2"; sleep 0.005; done
        echo "end $0 $1" >>"$2"
    """

    def __init__(self, etcdctl: Etcdctl, name: str) -> None:
        folder = Path(tempfile.mkdtemp(dir=etcdctl.record.path.parent))
        self.end = folder / "end"
        command = ("sh", "-c", self.COMMAND, name, etcdctl.contestant, str(etcdctl.record.path), str(self.end))
        super().__init__(etcdctl, name, "lock", f"--ttl={etcdctl.ttl}", etcdctl.prefix + name, "--", *command)

    def until_leads(self) -> None:
        self.lines.take("leading (.*)")

    def release(self) -> None:
        self.end.touch()
