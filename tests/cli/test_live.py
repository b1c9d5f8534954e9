"""``queue --watch`` and ``watch`` on a terminal: the output, its size, and the terminal's state at the end."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

import tenure.sync
from tests.durations import wait_until
from tests.terminal import ENTER, Terminal, lines_of

RED, GREEN = "\x1b[31m", "\x1b[32m"

TITLES = ["QUEUE", "READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST"]


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    return url


@pytest.fixture
def store(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        backend.queue("n" * 70).send(b"x")
        orders = backend.queue("orders")
        orders.send_batch([tenure.Outgoing(b"x")] * 12)
        orders.receive()[0].dead_letter("unreadable")


def queue_watch(**environment: str) -> Terminal:
    return Terminal("queue", "--watch", "--every", "50ms", environment=environment)


def test_queues_as_a_live_table(url: str, store: None) -> None:
    with queue_watch() as terminal:
        picture = terminal.until_shown("orders")
        title, at, _, titles, long, orders = lines_of(picture)
        assert title.startswith("tenure queue --watch  every 50 ms  sqlite:")
        assert at.endswith("+00:00")
        assert titles.split() == TITLES
        assert long.split()[0] == "n" * (len(long.split()[0]) - 1) + "…"
        assert orders.split()[:6] == ["orders", "11", "0", "0", "0", "1"]
        assert {len(line) for line in (titles, long, orders)} == {80}
        assert f"{RED}1" in picture
        with tenure.sync.connect(url) as backend:
            backend.queue("bills").send(b"x", delay=60)
        terminal.until_shown("bills")
        terminal.resize(120, 30)
        terminal.until_shown("n" * 70)
        terminal.resize(60, 6)
        lines = lines_of(terminal.until_shown("… 2 more: tenure queue"))
        assert lines[3].split() == TITLES  # always shown
        assert lines[4].startswith("orders ")  # with dead letters, so it is omitted last
        assert max(map(len, lines)) <= 60
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_leaders_as_a_live_table(url: str, store: None) -> None:
    with Terminal("watch", "job") as terminal:
        terminal.until_shown("no leader", "(none)")
        with tenure.sync.connect(url) as backend:
            with backend.election("job", label="a-host-1", metadata={"addr": "h:1"}).campaign() as term:
                picture = terminal.until_shown("a-host-1", "lease left ")
                row = lines_of(picture)[-1].split()
                assert row[1] == f"{term.holder[:13]}…{term.holder[41:]}"
                assert row[2:] == ["1", "addr=h:1"]
                assert (picture.count(GREEN), picture.count(RED)) == (2, 0)
            picture = terminal.until_shown("no leader", "a-host-1")
            assert (picture.count(GREEN), picture.count(RED)) == (0, 2)
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert terminal.is_as_before()
        assert [line.split()[1] for line in lines_of(terminal.after)[3:]] == ["LEADER", "(none)", row[1], "(none)"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(store: None, number: signal.Signals) -> None:
    with queue_watch() as terminal:
        terminal.until_shown("orders")
        terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
        assert terminal.is_as_before()
        assert lines_of(terminal.after)[3].split() == TITLES


def test_stopped_and_continued(store: None) -> None:
    with queue_watch() as terminal:
        terminal.until_shown("orders")
        terminal.type(b"\x1a")
        terminal.until_stopped()
        wait_until(terminal.is_as_before)
        terminal.process.send_signal(signal.SIGCONT)
        wait_until(lambda: terminal.raw.count(ENTER) == 2)
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_a_terminal_that_can_not_draw(store: None) -> None:
    with queue_watch(TERM="dumb") as terminal:
        wait_until(lambda: terminal.raw.count(" orders ") > 1)
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.raw


def test_in_the_background_it_does_not_draw(store: None) -> None:
    with Terminal("queue", "--watch", "--every", "50ms", "--count", "2", in_background=True) as terminal:
        assert terminal.wait() == 0
        assert terminal.raw.count(" orders ") == 2
        assert "\x1b" not in terminal.raw


def test_no_colours(store: None) -> None:
    with queue_watch(NO_COLOR="1") as terminal:
        assert RED not in terminal.until_shown("orders")


def test_status_on_a_terminal(url: str, store: None) -> None:
    with tenure.sync.connect(url) as backend, backend.election("job", label="a-host-1").campaign() as term:
        with backend.election("free").campaign():
            pass
        with Terminal("status") as terminal:
            assert terminal.wait() == 0
    short = f"{term.holder[:13]}…{term.holder[41:]}"
    assert f"{GREEN}{short}" in terminal.raw
    assert f"{RED}(none)" in terminal.raw
    assert term.holder not in terminal.raw


def test_dead_letters_on_a_terminal(store: None) -> None:
    with Terminal("dead", "list", "orders") as terminal:
        assert terminal.wait() == 0
    lines = lines_of(terminal.raw)
    assert lines[0].split() == ["SEQ", "ID", "REASON", "TRIES", "DIED", "WHY"]
    assert re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", lines[1])  # in one piece
    assert max(map(len, lines)) <= 80
