"""Every step of docs/tutorial.md is run in the order of the page, and prints what the page shows.

The form of the page:

- A paragraph that ends with "Save this as `NAME`:" stands before a block; the block is the whole file.
- A ``console`` block is typed into a shell. Lines that begin with ``$`` are commands, ``^C`` is Ctrl-C, and all lines
  below are exactly what is printed. The last sentence of the paragraph before names the shell ("in a second shell");
  without a name it is the first one. Each shell is an interactive bash on a terminal of its own, and starts in the
  folder that the reader starts in.
- A ``text`` block is what the program in a shell has printed since. The paragraph before names the shell. If it says
  "within N seconds" or "N to M seconds", counted from the last input to any shell, that is checked, too.
- A line of exactly 100 characters goes on in the next one, as it does in a window of 100 columns.
- An ``sh`` block installs packages, and is not run.

A program goes on beyond its block if the next block of the same shell is a ``text`` block or begins with ``^C``. All
others have to end in their block, and in the end all have. Nothing may be printed that the page does not show: output
in between is compared at the next block of the same shell.

The values that differ from run to run are in ``VARIES``, ``laptop`` and the folder of the reader. Nothing else may.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.absent import skip_or_fail
from tests.process_states import children_of, until
from tests.servers import Postgres, private

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()

PREPARE = "Before you begin"
POSTGRES = "10. Move to PostgreSQL"
"""The section that needs a server. It needs the files of the sections before it, and no data of theirs."""

FOLDER = "/home/anna/tenure"
"""The folder in which the reader of the page begins."""
DATABASE = "postgresql://anna@localhost/shop"
"""The database of the reader."""

VARIES = {
    "process": (r"\b47\d\d\b", r"\d+"),
    "date and time": (r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d", r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d"),
    "time of day": (r"\b\d\d:\d\d:\d\d\b(?!\+)", r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d"),
    "milliseconds of a date": (r"(?<=:\d\d)\.\d{3}(?=\+00:00)", r"\.\d{3}"),
    "random part of a holder": (r"(?<=-)[0-9a-f]{4}(?=…#)", r"[0-9a-f]{4}"),
    "duration": (r"\b\d+\.\d+(?= s\b)", r"\d{1,2}(\.\d{1,3})?"),
    "duration of tests": (r"\b\d\.\d\d(?=s\b)", r"\d{1,2}\.\d\d"),
    "round trip": (r"\b\d+(?= ms\b)", r"\d{1,4}"),
}
"""What differs from run to run: how the page writes it, and what may be printed in its place."""

BOUND = {"process"}
"""The same text on the page is the same value everywhere, and another text another value."""

SLACK = 2.0
"""Seconds that a busy machine may need beyond the time that the page names."""

COLUMNS = 100
PROMPT = "⟦ready⟧"
SHELLS = ("first", "second", "third")
LANGUAGES = {"console", "text", "python", "ini", "json", "sh"}


# --- the page ---


@dataclass(frozen=True)
class Block:
    """A block of the page, with the heading and the paragraph that it stands below."""

    section: str
    paragraph: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that it is, if it is one."""
        found = re.search(r"Save this as `([\w.]+)`:$", self.paragraph)
        return found[1] if found else None

    @property
    def is_shown(self) -> bool:
        """Whether it is typed into a shell, or printed by it."""
        return self.file is None and self.language in ("console", "text")

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
        found = re.search(r"\bwithin (a|\d+) seconds?\b", self.paragraph)
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
    """An interactive bash on a terminal of its own; use it in a block."""

    def __init__(self, bash: str, folder: Path, environment: dict[str, str]) -> None:
        self._own, side = pty.openpty()
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
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

    def __enter__(self) -> Self:
        self.until_ready()
        self.type("stty -echo\n")
        self.until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        until(lambda: PROMPT in self._pending(), lambda: f"it does not end; it has printed:\n{self._pending()}")
        return self._take(after=PROMPT.encode()).replace(PROMPT, "").splitlines()

    def until_printed(self, count: int) -> list[str]:
        """Wait for so many lines of a program that goes on; return all that were printed since those returned last."""

        def are_there() -> bool:
            assert PROMPT not in self._pending(), f"it has ended; it has printed:\n{self._pending()}"
            return self._pending().count("\n") >= count

        until(are_there, lambda: f"{count} lines are missing; it has printed:\n{self._pending()}")
        return self._take(after=b"\n").splitlines()

    def _pending(self) -> str:
        return plain(bytes(self._raw[self._taken :]))

    def _take(self, *, after: bytes) -> str:
        end = self._raw.rfind(after, self._taken)
        taken = bytes(self._raw[self._taken : end + len(after)]) if end >= 0 else b""
        self._taken += len(taken)
        return plain(taken)

    def _read(self) -> None:
        with suppress(OSError):  # the end of a terminal is an error
            while more := os.read(self._own, 65_536):
                self._raw += more


def plain(raw: bytes) -> str:
    """Return what stays on the screen: without colours, and without a status line drawn at its bottom meanwhile."""
    text = raw.decode(errors="replace").replace("\r\n", "\n")
    text = re.sub(r"\x1b7.*?\x1b8", "", text, flags=re.DOTALL)  # save the cursor, draw elsewhere, restore it
    text = text.replace("\n\x1b[1A", "")  # a line is made at the bottom, and the cursor put back
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *_descendants(child))]


# --- the reader ---


@dataclass
class Reader:
    """Follows the page: saves its files, types into its shells, and compares what is printed."""

    bash: str
    start: Path
    environment: dict[str, str]
    places: dict[str, str]
    """Texts of the page that are others here: the folder and the database."""
    shells: dict[str, Shell] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """The values of this run, by the text of the page."""
    typed_at: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shell in self.shells.values():
            shell.__exit__(None, None, None)

    def follow(self, blocks: Sequence[Block]) -> None:
        """Do what the *blocks* say, in their order."""
        for number, block in enumerate(blocks):
            if block.file:
                (self.start / "tutorial" / block.file).write_text(block.text)
            elif block.is_shown:
                following = [each for each in blocks[number + 1 :] if each.is_shown and each.shell == block.shell]
                goes_on = bool(following) and not following[0].text.startswith("$ ")
                self.show(block, goes_on=goes_on)

    def show(self, block: Block, *, goes_on: bool) -> None:
        """Type a block, and compare what is printed."""
        if block.shell not in self.shells:
            self.shells[block.shell] = Shell(self.bash, self.start, self.environment).__enter__()
        shell = self.shells[block.shell]
        steps = list(block.steps)
        for number, (typed, shown) in enumerate(steps):
            if typed is not None:
                shell.type("\x03" if typed == "^C" else f"{self.here(typed[2:])}\n")
                self.typed_at = time.monotonic()
            where = f"{block.section}, {block.shell} shell: {typed or 'later'}"
            try:
                last = number == len(steps) - 1
                printed = shell.until_printed(len(shown)) if goes_on and last else shell.until_ready()
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
            if block.bounds:
                least, most = block.bounds
                assert least - 0.5 <= time.monotonic() - self.typed_at <= most + SLACK, where
            self.compare(where, shown, printed)

    def compare(self, where: str, shown: Sequence[str], printed: Sequence[str]) -> None:
        """Compare the lines on the page with those of this run; spaces between columns depend on their values."""
        difference = "\n".join([where, "--- the page:", *shown, "--- printed:", *printed, ""])
        assert len(shown) == len(printed), difference
        for line, actual in zip(shown, printed, strict=True):
            pattern, groups = self.pattern_of(columns(line))
            found = re.fullmatch(pattern, columns(actual))
            assert found, f"{difference}--- the line:\n{line}"
            for group, text in groups.items():
                value = found[group]
                known = self.values.setdefault(text, value)
                assert known == value, f"{difference}--- {text} was {known}, and is {value}"
                others = [each for each, of_it in self.values.items() if of_it == value]
                assert others == [text], f"{difference}--- {others} are one value"

    def pattern_of(self, line: str) -> tuple[str, dict[str, str]]:
        """Return a pattern for a line of the page, and by group the texts of which the values are bound."""
        kinds = "|".join(f"(?P<_{number}>{page})" for number, (page, _) in enumerate(VARIES.values()))
        places = "|".join(f"(?P<place{number}>{re.escape(text)})" for number, text in enumerate(self.places))
        pattern, groups, end = "", dict[str, str](), 0
        for found in re.finditer(f"{places}|{kinds}", line):
            pattern += re.escape(line[end : found.start()])
            name = str(found.lastgroup)
            if name.startswith("place"):
                pattern += re.escape(self.places[found[0]])
            else:
                kind, (_, actual) = list(VARIES.items())[int(name[1:])]
                if kind in BOUND:
                    groups[f"value{len(groups)}"] = found[0]
                    pattern += f"(?P<value{len(groups) - 1}>{actual})"
                else:
                    pattern += f"(?:{actual})"
            end = found.end()
        return pattern + re.escape(line[end:]), groups

    def here(self, command: str) -> str:
        """Return a command of the page with the values of this run."""
        for text, actual in {**self.places, **self.values}.items():
            command = command.replace(text, actual)
        unknown = [
            found for name in BOUND for found in re.findall(VARIES[name][0], command) if found not in self.values
        ]
        assert set(unknown) <= set(self.values.values()), f"{unknown} in a command has not been printed before"
        return command


def columns(line: str) -> str:
    """Return a line with two spaces between columns, whatever their width, and none at the end."""
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
    environment = {
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the reader has pytest alone
        "PATH": os.environ["PATH"],
        "TERM": "xterm-256color",
        **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
    }
    with (
        tempfile.TemporaryDirectory(prefix="tenure-") as sockets,  # apart from other runs; tmp_path may be too long
        Reader(
            bash,
            start,
            {**environment, "TENURE_SOCKET_DIR": sockets},
            {FOLDER: str(start), "laptop": socket.gethostname()},
        ) as one,
    ):
        yield one


@pytest.mark.process
@pytest.mark.timeout(240)
def test_the_steps_without_a_server(reader: Reader) -> None:
    reader.follow([block for block in BLOCKS if block.section != POSTGRES])


@pytest.mark.process
def test_the_step_with_postgresql(reader: Reader) -> None:
    begin = [block for block in BLOCKS if block.section == PREPARE or block.file]
    with private(Postgres, durable=True) as server:
        reader.places[DATABASE] = server.url
        reader.follow([*begin, *(block for block in BLOCKS if block.section == POSTGRES and not block.file)])


def test_the_sections_are_numbered() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    numbers = [heading.partition(". ")[0] for heading in headings if heading != PREPARE]
    assert numbers == [str(number) for number in range(1, 12)]
    assert {PREPARE, POSTGRES} <= set(headings)


def test_each_block_of_the_page_is_run_or_installs() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        match block.language:
            case "console" | "text":
                assert block.paragraph.endswith(":"), block
            case "sh":
                assert all(line.startswith("pip install ") for line in block.text.splitlines()), block
            case _:
                assert block.file, block


@pytest.mark.parametrize("block", [each for each in FILES if each.language == "python"], ids=lambda each: each.file)
def test_the_files_are_formatted_and_have_no_lint(block: Block) -> None:
    if (ruff := shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")) is None:
        skip_or_fail("ruff is not installed")
    for line in (["format", "--diff"], ["check"]):
        argv = [ruff, *line, "--no-cache", "--stdin-filename", f"examples/{block.file}", "-"]
        done = subprocess.run(argv, cwd=ROOT, input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- the comparison itself: a checker that can't fail proves nothing ---


def a_reader() -> Reader:
    return Reader("bash", Path("/nowhere"), {}, {FOLDER: "/srv/x", "laptop": "host"})


def test_equal_lines_are_equal() -> None:
    shown = ["process 4711 leads", "report  laptop-4711-803d…#1      1  4.4 s", f"in {FOLDER}/tutorial"]
    printed = ["process 31 leads", "report  host-31-ffff…#1  1  3 s   ", "in /srv/x/tutorial"]
    a_reader().compare("here", shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a", "b"),
        ("term 1", "term 2"),
        ("process 4711 and 4711", "process 31 and 32"),
        ("process 4711 and 4712", "process 31 and 31"),
        ("process 4711 leads", "process x leads"),
        ("10:15:42 process", "27:15:42 process"),
        ("2.5 s", "250 s"),
        ("laptop-4711-803d…#1", "host-31-ffff…#2"),
        ("a  b", "a b"),
        ("price: 12.5", "price: 13.5"),
    ],
)
def test_other_lines_are_not(shown: str, printed: str) -> None:
    with pytest.raises(AssertionError):
        a_reader().compare("here", [shown], [printed])
    with pytest.raises(AssertionError):
        a_reader().compare("here", [], [printed])
