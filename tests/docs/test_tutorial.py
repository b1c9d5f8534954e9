"""Every step of docs/tutorial.md is run in the order of the page, and prints what the page shows.

The form of the page:

- A paragraph that ends with "Save this as `NAME`:" stands before a block; the block is the whole file.
- A ``console`` block is typed into a shell. Lines that begin with ``$`` are commands, ``^C`` is Ctrl-C, and all lines
  below are exactly what is printed. The last sentence of the paragraph before names the shell ("in a second shell");
  without a name it is the first one. Each shell is an interactive bash on a terminal of its own, and starts in the
  folder in which the reader starts.
- A ``text`` block is what the program in a shell has printed since. The paragraph before names the shell. If it says
  "within N seconds" or "N to M seconds", counted from the last input to any shell, that is checked, too.
- A line of exactly 100 characters goes on in the next one, as it does in a window of 100 columns.
- An ``sh`` block installs packages, and is not run.

A program goes on beyond its block if the next block of the same shell is a ``text`` block or begins with ``^C``. All
others have to end in their block, and in the end all have. Nothing may be printed that the page does not show: output
in between is compared at the next block of the same shell.

The values that differ from run to run are in ``VARIES``; besides, the name of the host, the folder and the database of
the reader are those of the test. Nothing else may differ, apart from the width of columns.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.absent import skip_or_fail
from tests.durations import wait_until
from tests.process_states import children_of
from tests.servers import Postgres, private

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()

PREPARE = "Before you begin"
POSTGRES = "10. Move to PostgreSQL"
"""The section that needs a server. It needs the files of the sections before it, and no data of theirs."""

FIRST = ("1. The first leader", "2. Kill it", "3. Fence a write", "4. The first queue")
"""The sections that ``make test`` follows; ``make full`` follows them all."""

HOST = "laptop"
FOLDER = "/home/anna/tenure"
"""The folder in which the reader starts: that of the clone."""
DATABASE = "postgresql://anna@localhost/shop"

VARIES = {
    "process": (r"\b47\d\d\b", r"\d+"),
    "date and time": (r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d", r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d"),
    "milliseconds of a date": (r"(?<=:\d\d)\.\d{3}(?=\+00:00)", r"\.\d{3}"),
    "time of day": (r"\b\d\d:\d\d:\d\d\b(?!\+)", r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d"),
    "random part of a holder": (r"(?<=-)[0-9a-f]{4}(?=…#)", r"[0-9a-f]{4}"),
    "duration": (r"\b\d+\.\d+ s\b|\b\d+ ms\b", r"\d{1,2}(\.\d{1,3})? s|\d{1,4}(\.\d{1,3})? ms"),
    "duration of tests": (r"\b\d\.\d\d(?=s\b)", r"\d{1,2}\.\d\d"),
}
"""What differs from run to run: how the page writes it, and what may be printed in its place."""

BOUND = {"process"}
"""One text of the page is one value in all places, in commands, too; and another text is another value."""

EARLY, LATE = 1.0, 2.0
"""Seconds beyond the page's bounds, as a busy machine renews late and prints late."""

COLUMNS = 100
HOST_EXTRA = max(0, len(socket.gethostname()) - len(HOST))
"""So much wider is the terminal of the test, so that the name of its host folds no table."""
PROMPT = "⟦ready⟧"
SHELLS = ("first", "second", "third")
LANGUAGES = {"console", "text", "python", "ini", "json", "sh"}


# --- the page ---


@dataclass(frozen=True)
class Block:
    """A block of the page, with the heading and the paragraph above it."""

    section: str
    paragraph: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it is one."""
        found = re.search(r"Save this as `([\w.]+)`:$", self.paragraph)
        return found[1] if found else None

    @property
    def is_shown(self) -> bool:
        """Whether it is typed into a shell, or printed there."""
        return self.language in ("console", "text")

    @property
    def shell(self) -> str:
        """The shell that it belongs to."""
        sentence = re.split(r"(?<=[.!?]) ", self.paragraph)[-1]
        found = re.search(rf"\b({'|'.join(SHELLS)}) shell\b", sentence, re.IGNORECASE)
        return found[1].lower() if found else SHELLS[0]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The seconds within which it is printed, if the page names any."""
        if found := re.search(r"\b(\d+) to (\d+) seconds\b", self.paragraph):
            return float(found[1]), float(found[2])
        found = re.search(r"\bwithin (a|\d+) seconds?\b", self.paragraph, re.IGNORECASE)
        return (0.0, 1.0 if found[1] == "a" else float(found[1])) if found else None

    @property
    def steps(self) -> Iterator[tuple[str | None, list[str]]]:
        """The inputs, each with the lines that are shown below it; a ``text`` block has no input."""
        typed: str | None = None
        shown: list[str] = []
        wraps = False
        for line in self.text.splitlines():
            if self.language == "console" and (line.startswith("$ ") or line == "^C"):
                if typed is not None:
                    yield typed, shown
                typed, shown = line, []
            elif wraps:
                shown[-1] += line
            else:
                shown.append(line)
            wraps = bool(shown) and len(line) == COLUMNS
        assert (typed is None) == (self.language == "text"), f"a block begins without a command:\n{self.text}"
        yield typed, shown


def blocks_of(page: str) -> list[Block]:
    """Return all blocks of a page in order."""
    found: list[Block] = []
    section, paragraph, before = "", "", ""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith("#"):
            section, paragraph = line.lstrip("# "), ""
        elif line.startswith("```"):
            text = "".join(f"{each}\n" for each in itertools.takewhile(lambda each: each != "```", lines))
            found.append(Block(section, paragraph, line[3:], text))
            paragraph = ""
        elif line:
            paragraph = f"{paragraph} {line}" if before else line
        before = line
    return found


BLOCKS = blocks_of(PAGE)
FILES = [block for block in BLOCKS if block.file]


# --- the shells ---


class Shell:
    """An interactive bash on a terminal of its own."""

    def __init__(self, bash: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._own, side = pty.openpty()
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS + HOST_EXTRA, 0, 0))
        self._process = subprocess.Popen(
            [bash, "--noprofile", "--norc", "--noediting", "-i"],
            stdin=side,
            stdout=side,
            stderr=side,
            cwd=folder,
            env={**environment, "PS1": PROMPT},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(side)
        self._raw = bytearray()
        self._taken = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self) -> None:
        """Wait until it is ready, and turn the echo of the input off."""
        self.until_ready()
        self.type("stty -echo\n")
        self.until_ready()

    def close(self) -> None:
        """Kill it, with all that runs in it."""
        for pid in [*_descendants(self._process.pid), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        os.close(self._own)

    def type(self, keys: str) -> None:
        """Type *keys*."""
        os.write(self._own, keys.encode())

    def until_ready(self) -> list[str]:
        """Wait for the prompt; return the lines that were printed since those returned last."""
        wait_until(lambda: PROMPT in self.printed, lambda: f"it does not end; it has printed:\n{self.printed}")
        return self._take(PROMPT.encode()).removesuffix(PROMPT).splitlines()

    def until_printed(self, count: int) -> list[str]:
        """Wait for so many lines of a program that goes on; return all that were printed since those returned last."""

        def are_there() -> bool:
            assert PROMPT not in self.printed, f"it has ended; it has printed:\n{self.printed}"
            return self.printed.count("\n") >= count

        wait_until(are_there, lambda: f"{count} lines should come; it has printed:\n{self.printed}")
        return self._take(b"\n").splitlines()

    @property
    def printed(self) -> str:
        """What was printed since the lines that were returned last."""
        return plain(bytes(self._raw[self._taken :]))

    def _take(self, end: bytes) -> str:
        found = self._raw.rfind(end, self._taken)
        taken = bytes(self._raw[self._taken : found + len(end)]) if found >= 0 else b""
        self._taken += len(taken)
        return plain(taken)

    def _read(self) -> None:
        with suppress(OSError):  # the end of a terminal is an error
            while more := os.read(self._own, 65_536):
                self._raw += more


def plain(raw: bytes) -> str:
    """Return what stays on the screen: without colours, and without a status line drawn at its bottom meanwhile.

    Nor does it have what a program says of a disk that is slow just now, and goes on.
    """
    text = raw.decode(errors="replace").replace("\r\n", "\n")
    text = re.sub(r"\x1b7.*?\x1b8", "", text, flags=re.DOTALL)  # save the cursor, draw elsewhere, restore it
    text = text.replace("\n\x1b[1A", "")  # make room for a line at the bottom, and return
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.sub(r"^.*\(no answer within [\d.]+ s\).*\n", "", text, flags=re.MULTILINE)


def _descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *_descendants(child))]


# --- the reader ---


@dataclass
class Reader:
    """Follows the page: saves its files, types into its shells, and compares what is printed; use it in a block."""

    bash: str
    start: Path
    environment: Mapping[str, str]
    places: dict[str, str]
    """The texts of the page that are others here."""
    values: dict[str, str] = field(default_factory=dict)
    """The values of this run that are bound, by the text of the page."""
    shells: dict[str, Shell] = field(default_factory=dict)
    typed_at: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shell in self.shells.values():
            shell.close()

    def follow(self, blocks: Sequence[Block]) -> None:
        """Do what the *blocks* say, in their order."""
        for number, block in enumerate(blocks):
            if block.file:
                (self.start / "tutorial" / block.file).write_text(block.text)
            elif block.is_shown:
                following = [each for each in blocks[number + 1 :] if each.is_shown and each.shell == block.shell]
                self.show(block, goes_on=bool(following) and not following[0].text.startswith("$ "))
        for name, shell in self.shells.items():
            assert not shell.printed, f"at the end, the {name} shell has also printed:\n{shell.printed}"

    def show(self, block: Block, *, goes_on: bool) -> None:
        """Type a block, and compare what is printed."""
        if (shell := self.shells.get(block.shell)) is None:
            shell = self.shells[block.shell] = Shell(self.bash, self.start, self.environment)
            shell.begin()
        steps = list(block.steps)
        for number, (typed, shown) in enumerate(steps, start=1):
            if typed is not None:
                shell.type("\x03" if typed == "^C" else f"{self.here(typed.removeprefix('$ '))}\n")
                self.typed_at = time.monotonic()
            where = f"{block.section}, {block.shell} shell: {typed or 'what it prints'}"
            try:
                is_last = number == len(steps)
                printed = shell.until_printed(len(shown)) if goes_on and is_last else shell.until_ready()
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
            if block.bounds:
                least, most = block.bounds
                assert least - EARLY <= time.monotonic() - self.typed_at <= most + LATE, f"{where}: the page's seconds"
            self.compare(where, shown, printed)

    def compare(self, where: str, shown: Sequence[str], printed: Sequence[str]) -> None:
        """Compare the lines of the page with those of this run."""
        difference = "\n".join([where, "--- the page:", *shown, "--- printed:", *printed, ""])
        assert len(shown) == len(printed), difference
        for line, actual in zip(shown, printed, strict=True):
            pattern, bound = self.pattern_of(columns(line))
            found = re.fullmatch(pattern, columns(actual))
            assert found, f"{difference}--- the line:\n{line}"
            for group, text in bound.items():
                value = self.values.setdefault(text, found[group])
                assert value == found[group], f"{difference}--- {text} was {value}, and is {found[group]}"
                assert list(self.values.values()).count(value) == 1, f"{difference}--- {value} has several names"

    def pattern_of(self, line: str) -> tuple[str, dict[str, str]]:
        """Return a pattern for a line of the page, and the text of the page for each of its groups that is bound."""
        names = [f"kind{number}" for number in range(len(VARIES))]
        ways = [f"(?P<{name}>{page})" for name, (page, _) in zip(names, VARIES.values(), strict=True)]
        pattern, bound, end = "", dict[str, str](), 0
        for found in re.finditer("|".join([*map(re.escape, self.places), *ways]), line):
            pattern += re.escape(line[end : found.start()])
            end = found.end()
            if found.lastgroup is None:
                pattern += re.escape(self.places[found[0]])
                continue
            kind, (_, actual) = list(VARIES.items())[names.index(found.lastgroup)]
            if kind in BOUND:
                group = f"bound{len(bound)}"
                bound[group] = found[0]
                pattern += f"(?P<{group}>{actual})"
            else:
                pattern += f"(?:{actual})"
        return pattern + re.escape(line[end:]), bound

    def here(self, command: str) -> str:
        """Return a command of the page with the values of this run."""
        known = {**self.places, **self.values}
        varies = [VARIES[kind][0] for kind in sorted(BOUND)]
        return re.sub("|".join([*map(re.escape, self.places), *varies]), lambda found: known[found[0]], command)


def columns(line: str) -> str:
    """Return a line with two spaces between columns, whose width depends on the values, and none at the end."""
    return re.sub(r" {2,}", "  ", line.rstrip())


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """A reader at the beginning of the page."""
    if (bash := shutil.which("bash")) is None:
        skip_or_fail("there is no bash")
    start = tmp_path / "tenure"
    activate = start / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH='{Path(sys.executable).parent}':\"$PATH\"\n")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tutorial") as sockets:  # a socket's path must be short
        environment = {
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the reader has pytest alone
            "TENURE_SOCKET_DIR": sockets,
            "TERM": "xterm-256color",
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
        }
        with Reader(bash, start, environment, {HOST: socket.gethostname(), FOLDER: str(start)}) as one:
            yield one


@pytest.mark.process
def test_the_first_steps(reader: Reader) -> None:
    reader.follow([block for block in BLOCKS if block.section in (PREPARE, *FIRST)])


@pytest.mark.process
@pytest.mark.timeout(300)  # a minute, if the machine does nothing else
def test_the_steps_without_a_server(reader: Reader) -> None:
    reader.follow([block for block in BLOCKS if block.section != POSTGRES])


@pytest.mark.process
def test_the_step_with_postgresql(reader: Reader) -> None:
    begin = [block for block in BLOCKS if block.section == PREPARE or block.file]
    with private(Postgres) as server:
        reader.places[DATABASE] = server.url
        reader.follow([*begin, *(block for block in BLOCKS if block.section == POSTGRES)])


def test_the_sections_are_numbered() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings[0] == PREPARE
    assert [heading.partition(". ")[0] for heading in headings[1:]] == [str(number) for number in range(1, 12)]
    assert POSTGRES in headings
    assert (PREPARE, *FIRST) == tuple(headings[: len(FIRST) + 1])


def test_each_block_is_run_or_installs() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        assert block.paragraph.endswith(":"), block
        match block.language:
            case "console":
                assert block.text.startswith(("$ ", "^C\n")), block
            case "text":
                assert re.search(r" shell prints(, [\w ]+)?:$", block.paragraph), block
                assert bool(block.bounds) == bool(re.search(r"\bseconds?\b(?! shell)", block.paragraph)), block
            case "sh":
                assert all(line.startswith("pip install ") for line in block.text.splitlines()), block
            case _:
                assert block.file, block


@pytest.mark.parametrize("block", [each for each in FILES if each.language == "python"], ids=lambda each: each.file)
def test_the_programs_are_formatted_and_have_no_lint(block: Block) -> None:
    if (ruff := shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")) is None:
        skip_or_fail("ruff is not installed")
    for verb in (["format", "--diff"], ["check"]):
        argv = [ruff, *verb, "--no-cache", "--stdin-filename", f"examples/{block.file}", "-"]
        done = subprocess.run(argv, cwd=ROOT, input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- the comparison itself ---


@pytest.fixture
def nobody() -> Reader:
    """A reader who only compares."""
    return Reader("bash", Path("/nowhere"), {}, {HOST: "vm", FOLDER: "/srv/x"})


def test_lines_that_differ_in_what_varies_are_equal(nobody: Reader) -> None:
    shown = ["process 4711 leads", "report  laptop-4711-803d…#1      1  4.4 s", f"in {FOLDER}/tutorial"]
    nobody.compare("", shown, ["process 31 leads", "report  vm-31-ffff…#1  1  78.6 ms   ", "in /srv/x/tutorial"])
    assert nobody.here("kill -9 4711; kill 14711") == "kill -9 31; kill 14711"


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a", "b"),
        ("term 1", "term 2"),
        ("price: 12.5", "price: 13.5"),
        ("a  b", "a b"),
        ("process 4711 and 4711", "process 31 and 32"),
        ("process 4711 and 4712", "process 31 and 31"),
        ("process 4711 leads", "process x leads"),
        ("10:15:42 process", "27:15:42 process"),
        ("2.5 s", "250 s"),
        ("laptop-4711-803d…#1", "vm-31-ffff…#2"),
        ("laptop-4711-803d…#1", "other-31-ffff…#1"),
    ],
)
def test_other_lines_are_not(nobody: Reader, shown: str, printed: str) -> None:
    with pytest.raises(AssertionError):
        nobody.compare("", [shown], [printed])


def test_what_a_program_says_of_a_slow_disk_does_not_count() -> None:
    late = b"report: the lease of term 3 could not be released (no answer within 0.667 s); trying again\r\n"
    assert plain(b"one\r\n" + late + b"two\r\n") == "one\ntwo\n"


def test_more_or_fewer_lines_are_not(nobody: Reader) -> None:
    for shown, printed in ((["a"], ["a", "b"]), (["a", "b"], ["a"])):
        with pytest.raises(AssertionError):
            nobody.compare("", shown, printed)


def test_a_process_that_no_step_has_shown_is_unknown(nobody: Reader) -> None:
    with pytest.raises(KeyError):
        nobody.here("kill -9 4711")
