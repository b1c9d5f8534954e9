"""``tenure send --lines``: inputs that end early, and their messages; and input from a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tenure._cli import lines as cli_lines
from tenure._cli.input import body_source
from tenure._cli.lines import LineOptions, send_lines
from tenure._cli.progress import NoProgress
from tenure.cli import main
from tests.durations import PATIENCE, until, wait_until
from tests.unfelt_signals import UNFELT

Captured = pytest.CaptureFixture[str]
TENURE = [sys.executable, "-m", "tenure.cli"]


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    monkeypatch.chdir(tmp_path)
    return url


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


def bodies(url: str) -> list[bytes]:
    with tenure.sync.connect(url) as backend:
        return [message.body for message in backend.queue("orders").receive(max=2_000)]


# --- complete input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_a_line_that_is_refused_and_the_rest_of_the_input(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    with tenure.sync.connect(url) as backend:
        backend.queue("orders", body_max=5).send(b"first")
    lines = b"\r\n".join([*numbered(1, 600), b"much too long", *numbered(602, 700), b""])
    stdin(monkeypatch, lines)
    code, out, err = run_cli(capsys, "send", "orders", "--lines", *(["--json"] if as_json else []))
    assert code == 78
    assert err.startswith(
        "tenure: error: 600 sent; line 601 refused: body (13 bytes) must not be larger than body_max (5"
    )
    assert err.endswith("; correct it and continue with --skip 600, or omit it with --skip 601\n")
    ids = [one for each in out.splitlines() for one in (json.loads(each)["ids"] if as_json else [each])]
    assert len(set(ids)) == 600

    stdin(monkeypatch, lines)
    code, out, err = run_cli(capsys, "send", "orders", "--lines", "--skip", "601", "--json")
    assert (code, err) == (0, "")
    assert [json.loads(each)["line"] for each in out.splitlines()] == [602]
    assert bodies(url) == [b"first", *numbered(1, 600), *numbered(602, 700)]


def test_an_input_that_is_shorter_than_the_skipped_lines(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, b"1\n2\n")
    said = "tenure: warning: nothing was sent: --skip 3 skips all of the input's 2 lines\n"
    assert run_cli(capsys, "send", "orders", "--lines", "--skip", "3") == (0, "", said)


def test_ids_by_line_make_a_second_run_harmless(url: str, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\n\nc")
    line = ("send", "orders", "--lines", "--id-prefix", "today", "--file", "lines")
    assert run_cli(capsys, *line) == (0, "today-1\ntoday-2\ntoday-3\n", "")
    assert run_cli(capsys, *line, "--skip", "1") == (0, "today-2\ntoday-3\n", "")
    assert bodies(url) == [b"a", b"", b"c"]


def test_ids_by_line_where_ids_are_not_remembered(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"1\n")
    monkeypatch.setenv("TENURE_URL", "azurite://127.0.0.1:9")  # no request is sent
    said = "tenure: error: --id-prefix needs a store that remembers ids, and this one does not; omit it\n"
    assert run_cli(capsys, "send", "orders", "--lines", "--id-prefix", "a") == (78, "", said)


@pytest.mark.parametrize("prefix", [(), ("--id-prefix", "a")])
def test_a_store_that_does_not_answer(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, prefix: tuple[str, ...]
) -> None:
    stdin(monkeypatch, b"one\ntwo\nthree\n")
    monkeypatch.setenv("TENURE_URL", f"{url}?busy=0.1")
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as other:
        with tenure.sync.connect(url) as backend:
            backend.queue("orders").send(b"first")
        other.execute("BEGIN IMMEDIATE")
        code, out, err = run_cli(capsys, "send", "orders", "--lines", "--skip", "1", *prefix)
        other.rollback()
    assert (code, out) == (69, "")
    assert "; 0 sent; lines 2 to 3 may have been sent or not: " in err
    if prefix:
        assert err.endswith(": continue with --skip 1 and the same --id-prefix, which keeps each line once\n")
    else:
        assert err.endswith(": --skip 1 may send some twice, --skip 3 may omit some\n")


@pytest.mark.parametrize("where", ["full", "left"])
def test_ids_that_can_not_be_written(url: str, where: str) -> None:
    if where == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        send = subprocess.run(
            [*TENURE, "send", "orders", "--lines"],
            input=b"\n".join(numbered(1, 700)),
            stdout=out,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(out)
    why = "the standard output can't be written: No space left on device"
    left = "the program that read the standard output has ended"
    assert (
        send.stderr.decode()
        == f"tenure: error: {why if where == 'full' else left}; 500 sent; continue with --skip 500\n"
    )
    assert send.returncode == (74 if where == "full" else 141)
    assert bodies(url) == numbered(1, 500)


@pytest.mark.parametrize("lines", [(), ("--lines",)])
def test_an_input_for_which_the_system_gives_no_thread(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        if thread.name == "tenure-send-input":
            raise RuntimeError("can't start new thread")
        start(thread)

    stdin(monkeypatch, b"1\n")
    monkeypatch.setattr(threading.Thread, "start", none)
    said = "tenure: error: the standard input can't be read: can't start new thread"
    code, out, err = run_cli(capsys, "send", "orders", *lines)
    assert (code, out, err.partition(";")[0].strip()) == (78, "", said)


@pytest.mark.parametrize("lines", [(), ("--lines",)])
def test_a_standard_input_without_a_descriptor(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    class Replaced:
        buffer = io.BytesIO(b"one")

        @staticmethod
        def isatty() -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Replaced())
    assert run_cli(capsys, "send", "orders", *lines)[0] == 0
    assert bodies(url) == [b"one"]


# --- while it is read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_lines_of_an_endless_input_are_sent_as_they_come(url: str, number: int) -> None:
    line = [*TENURE, "send", "orders", "--lines"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as send:
        assert send.stdin is not None
        assert send.stdout is not None
        for some in (b"one\ntwo\nhal", b"f\n"):  # the input stays open
            send.stdin.write(some)
            send.stdin.flush()
            assert all(send.stdout.readline().strip() for _ in range(some.count(b"\n")))
        send.send_signal(number)
        _, output = send.communicate(timeout=10)
    assert (send.returncode, output) == (128 + number, b"tenure: interrupted; 3 sent; continue with --skip 3\n")
    assert bodies(url) == [b"one", b"two", b"half"]


@pytest.mark.parametrize("answers", [True, False])
async def test_an_interrupt_waits_for_the_answer_to_an_open_request(
    url: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    async with tenure.connect(url) as backend:
        await backend.queue("orders").stats()
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    if not answers:
        monkeypatch.setattr(cli_lines, "ANSWER_WITHIN", 0.05)
    output: list[str] = []
    sending = asyncio.create_task(
        send_lines(
            f"{url}?busy=1",
            LineOptions("orders", {}),
            body_source(b"1\n2\n"),
            lambda first, ids: output.extend(ids),
            NoProgress(),
        )
    )
    await until(lambda: any("send_batch" in repr(task.get_coro()) for task in asyncio.all_tasks()))
    sending.cancel()
    if answers:
        other.rollback()
    assert await sending == 130
    other.close()
    said = "2 sent; continue with --skip 2\n"
    unsaid = "0 sent; lines 1 to 2 may have been sent or not: --skip 0 may send some twice, --skip 2 may omit some\n"
    assert capsys.readouterr().err == f"tenure: interrupted; {said if answers else unsaid}"
    assert len(output) == (2 if answers else 0)


async def test_lines_refused_after_an_interrupt_are_known_not_to_be_sent(url: str, capsys: Captured) -> None:
    async with tenure.connect(url) as backend:
        await backend.queue("orders").stats()
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("UPDATE tenure_schema SET version = 999")  # as by a newer release
        other.execute("BEGIN EXCLUSIVE")  # which also blocks readers
        wanted = LineOptions("orders", {})
        sending = asyncio.create_task(send_lines(url, wanted, body_source(b"1\n2\n"), lambda *_: None, NoProgress()))
        await until(lambda: any("send_batch" in repr(task.get_coro()) for task in asyncio.all_tasks()))
        sending.cancel()
        other.rollback()
        assert await sending == 130
    assert capsys.readouterr().err == "tenure: interrupted; 0 sent; continue with --skip 0\n"


# --- on a terminal -----------------------------------------------------------------------------------------------


class Terminal:
    """A command with a terminal for some of its streams."""

    def __init__(self, line: list[str], streams: str, program: str | None = None) -> None:
        self.end, inside = pty.openpty()
        stdin, stdout, stderr = (
            inside if name in streams else subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")
        )
        self.process = subprocess.Popen(
            [*(TENURE if program is None else [sys.executable, "-c", program]), *line],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=lambda: _controls(inside),
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
        )
        os.close(inside)
        self.shown = ""

    def until(self, pattern: str, within: float = 20.0) -> None:
        """Read until the output matches, or to the end if there is no pattern."""
        ends_at = time.monotonic() + within
        while not (pattern and re.search(pattern, self.shown)):
            assert time.monotonic() < ends_at, self.shown
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.end, 65_536).decode()
                except OSError:  # the other end was closed
                    break
        if not pattern:
            self.process.wait(within)

    @property
    def plain(self) -> str:
        """The shown text, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown)

    def type(self, keys: bytes) -> None:
        """Type *keys*."""
        os.write(self.end, keys)


def _controls(terminal: int) -> None:
    os.setsid()
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*line: str, streams: str = "stdin stdout stderr", program: str | None = None) -> Iterator[Terminal]:
    shown = Terminal(list(line), streams, program)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        os.close(shown.end)


def test_on_a_terminal_it_prints_that_it_reads(url: str) -> None:
    with terminal("send", "orders") as shown:
        shown.until(r"tenure: reading the message from the terminal; end it with Ctrl-D on a line of its own")
        shown.type(b"tea\n\x04")
        shown.until("")
        assert shown.process.returncode == 0
    assert bodies(url) == [b"tea\n"]


def test_on_a_terminal_lines_are_sent_when_they_are_entered(url: str) -> None:
    with terminal("send", "orders", "--lines") as shown:
        shown.until(r"tenure: reading lines from the terminal, each is sent when it is entered; end with Ctrl-D")
        shown.type(b"tea\n")
        shown.until(r"tea\r\n\w+--1\r\n")
        shown.type(b"\x03")
        shown.until("")
        assert "^C\r\ntenure: interrupted; 1 sent; continue with --skip 1\r\n" in shown.shown
        assert shown.process.returncode == 130


@pytest.mark.parametrize("lines", [(), ("--lines",)])
def test_one_interrupt_ends_it(lines: tuple[str, ...]) -> None:
    with terminal("send", "orders", *lines) as shown:
        shown.until("Ctrl-")
        shown.type(b"half\x03")
        shown.until("")
        assert shown.process.returncode == 130


INTERRUPTED_BEFORE_THE_READ = f"""{UNFELT}
from tenure.cli import main

write = sys.stderr.write

def notice(text):
    if "reading" in text:
        tell_soon(signal.SIGINT)
    return write(text)

sys.stderr.write = notice
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("lines", [(), ("--lines",)])
def test_an_interrupt_that_the_read_does_not_feel_ends_it(lines: tuple[str, ...]) -> None:
    with terminal("send", "orders", *lines, program=INTERRUPTED_BEFORE_THE_READ) as shown:
        shown.until("")
        assert shown.process.returncode == 130


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for threads in /proc")
@pytest.mark.parametrize("lines", [(), ("--lines",)])
def test_an_interrupt_ends_the_wait_for_the_writer_of_a_named_pipe(tmp_path: Path, lines: tuple[str, ...]) -> None:
    os.mkfifo(tmp_path / "pipe")
    send = subprocess.Popen([*TENURE, "send", "orders", "--file", "pipe", *lines], stderr=subprocess.PIPE)
    try:
        threads = Path(f"/proc/{send.pid}/task")
        wait_until(lambda: len(list(threads.iterdir())) > 1)  # one waits for the writer
        send.send_signal(signal.SIGINT)
        said = b"tenure: interrupted; 0 sent; continue with --skip 0" if lines else b""
        assert (send.communicate(timeout=PATIENCE)[1].strip(), send.returncode) == (said, 130)
    finally:
        send.kill()
        send.communicate()


def test_a_bar_shows_the_progress(url: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"\n".join(numbered(1, 1_000)))
    with terminal("send", "orders", "--lines", "--file", "lines", streams="stderr") as shown:
        shown.until("")
        assert re.search(r"send to orders ━━+ 100% 1,000 sent [\d,]+/s 0:00:\d\d", shown.plain)
    with terminal("send", "orders", "--lines", "--file", "lines", "-q", streams="stdout stderr") as shown:
        shown.until("1,000 sent")


def test_no_bar_is_drawn_among_ids(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"1\n2\n")
    with terminal("send", "orders", "--lines", "--file", "lines") as shown:
        shown.until("")
        assert re.fullmatch(r"\w+--1\r\n\w+--2\r\n", shown.shown)
