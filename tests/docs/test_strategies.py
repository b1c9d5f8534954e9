"""The three terminals of docs/strategies.md, as written there, on other ports."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ports import ports_held

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def ctrl_c_is_not_ignored() -> Iterator[None]:
    """Let commands react to SIGINT also if the tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def commands() -> Iterator[list[str]]:
    """Yield the commands of the page, with unused ports."""
    found = re.findall(r"^\$ (tenure .*)$", PAGE.read_text(), re.MULTILINE)
    written = sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", " ".join(found))))
    with ports_held(len(written)) as held:
        ports = {port: str(ours) for port, ours in zip(written, held, strict=True)}
        yield [re.sub("|".join(written), lambda match: ports[match[0]], command) for command in found]


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


@contextmanager
def terminal(command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command* in a terminal of its own, which is closed at the end."""
    with log.open("ab") as out:
        process = subprocess.Popen(shlex.split(command), stdout=out, stderr=out, env=environment())
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    give_up = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < give_up, explain()
        time.sleep(0.05)


@dataclass
class Terminals:
    """The page's terminals, and their output."""

    status: str
    logs: list[Path]
    processes: list[subprocess.Popen[bytes]]

    def terms(self) -> list[tuple[int, int]]:
        """Return each printed term and its terminal, oldest first."""
        texts = [(number, log.read_text()) for number, log in enumerate(self.logs) if log.exists()]
        return sorted((int(term), n) for n, text in texts for term in re.findall(r"(?m)^\d+ leads, term (\d+)", text))

    def wait_for_newer(self, token: int, *, not_in: int | None = None) -> tuple[int, int]:
        """Wait for a term above *token*, in another terminal than *not_in*; return the newest, and its terminal."""

        def newer() -> list[tuple[int, int]]:
            return [(term, number) for term, number in self.terms() if term > token and number != not_in]

        until(lambda: bool(newer()), self.output)
        return newer()[-1]

    def output(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()}" for log in self.logs)

    def show(self) -> subprocess.CompletedProcess[str]:
        """Run the page's ``tenure status``."""
        return subprocess.run(shlex.split(self.status), capture_output=True, text=True, env=environment(), check=False)


@contextmanager
def terminals(count: int, folder: Path) -> Iterator[Terminals]:
    logs = [folder / f"terminal {number}" for number in range(count)]
    with ExitStack() as stack:
        *leading, status = stack.enter_context(commands())
        assert len(leading) == 3
        processes = [
            stack.enter_context(terminal(command, log)) for command, log in zip(leading[:count], logs, strict=True)
        ]
        yield Terminals(status, logs, processes)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_three_terminals(how: signal.Signals, tmp_path: Path) -> None:
    with terminals(3, tmp_path) as page:
        token, first = page.wait_for_newer(0)

        def leader_is_shown() -> bool:
            shown = page.show()
            return shown.returncode == 0 and str(page.terms()[-1][0]) in shown.stdout

        until(leader_is_shown, lambda: f"{page.show()}\n{page.output()}")
        page.processes[first].send_signal(how)
        next_token, second = page.wait_for_newer(token, not_in=first)
        page.processes[second].send_signal(signal.SIGKILL)

        def no_leader() -> bool:
            shown = page.show()
            return shown.returncode not in (0, 3) and "are needed" in shown.stderr

        until(no_leader, page.output)
        assert not [term for term, number in page.terms() if term > next_token and number not in (first, second)]


def test_two_terminals_are_enough(tmp_path: Path) -> None:
    begun = time.monotonic()
    with terminals(2, tmp_path) as page:
        page.wait_for_newer(0)
        assert time.monotonic() - begun > 4  # restarted members don't vote for so long
