"""``tenure work --until-empty`` on a terminal: a progress bar in the last line, and the commands' output."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tests.durations import wait_until
from tests.terminal import Terminal

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

SCRIPT = """
    read body; [ -t 1 ] && echo "$body on a terminal"; echo "$body oops" >&2
    [ $body = one ] || until [ -e go ]; do sleep 0.02; done
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send_batch([tenure.Outgoing(b"one"), tenure.Outgoing(b"two")])
    return url


def test_a_bar_below_what_commands_write(url: str) -> None:
    with Terminal("work", "orders", "--on", url, "--until-empty", "--", "sh", "-c", SCRIPT) as terminal:
        wait_until(lambda: "1/2" in terminal.raw, lambda: terminal.raw)
        assert "\n\x1b7\x1b[1;23r\x1b8\x1b[1A" in terminal.raw  # the last line does not scroll
        assert re.search(r"\x1b7\x1b\[24;1H\x1b\[0m\x1b\[2Korders [^\n]*1/2[^\n]*\x1b8", terminal.raw)
        terminal.resize(100, 30)
        wait_until(lambda: "\x1b[1;29r" in terminal.raw, lambda: terminal.raw)
        Path("go").touch()
        assert terminal.wait() == 0
        shown = terminal.raw
    assert "\x1b7\x1b[r\x1b[30;1H" in shown  # and scrolls again at the end
    assert shown.rindex("\x1b[r") > shown.rindex("29r")
    for text in ("one on a terminal\n", "one oops\n", "two on a terminal\n", "two oops\n"):
        assert text in shown
    assert re.search(r"tenure: orders: 2 done, 0 failed, 0 given back, in .* s\n$", shown)


def test_a_worker_that_is_stopped_gives_the_line_back(url: str) -> None:
    with Terminal("work", "orders", "--on", url, "--until-empty", "--", "sh", "-c", SCRIPT) as terminal:
        wait_until(lambda: "1/2" in terminal.raw, lambda: terminal.raw)
        terminal.type(b"\x1a")
        terminal.until_stopped()
        # It may have stopped before its last output has been read here.
        wait_until(lambda: terminal.raw.rfind("\x1b[r") > terminal.raw.rfind("23r"), lambda: terminal.raw)
        terminal.process.send_signal(signal.SIGCONT)
        wait_until(lambda: terminal.raw.rfind("\x1b[1;23r") > terminal.raw.rfind("\x1b[r"), lambda: terminal.raw)
        Path("go").touch()
        assert terminal.wait() == 0


@pytest.mark.parametrize("how", ["quiet", "dumb", "small", "for ever"])
def test_no_bar_where_none_is_wanted_or_none_fits(url: str, how: str) -> None:
    Path("go").touch()
    options = {"quiet": ["--until-empty", "--quiet"], "for ever": []}.get(how, ["--until-empty"])
    size = (39, 24) if how == "small" else (80, 24)
    line = ("work", "orders", "--on", url, *options, "--", "sh", "-c", SCRIPT)
    environment = {"TERM": "dumb"} if how == "dumb" else {}
    with Terminal(*line, width=size[0], height=size[1], environment=environment) as terminal:
        wait_until(lambda: "two oops" in terminal.raw, lambda: terminal.raw)
        if how == "for ever":
            terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", terminal.raw)
