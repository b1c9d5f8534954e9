"""``tenure top``: what it shows, on a terminal, as lines and as JSON; and how it fits into a small one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure.sync
from tenure import Leader, ScheduleStatus, Stats
from tenure._cli.top import graph, sections, shares
from tenure._overview import SAMPLES, History, Overview
from tenure.cli import main
from tests.durations import wait_until
from tests.sharing import sharing
from tests.terminal import Terminal, lines_of

RED, GREEN = "\x1b[31m", "\x1b[32m"
NOW = 1.8e9


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    return url


def store(url: str) -> None:
    """Make a store with a queue, dead letters, and a paused schedule."""
    with tenure.sync.connect(url) as backend:
        orders = backend.queue("orders")
        orders.send_batch([tenure.Outgoing(b"x")] * 12)
        orders.receive()[0].dead_letter("unreadable")
        stop = threading.Event()
        tidy = backend.schedule("tidy", 3_600, queue="tidy")
        running = threading.Thread(target=lambda: tidy.run(stop=stop))
        running.start()
        wait_until(backend.schedules)
        stop.set()
        running.join()
        backend.queue("tidy").schedules.pause("tidy")


def test_everything_of_a_store_live(url: str) -> None:
    store(url)
    with Terminal("top", "--every", "100ms") as terminal, tenure.sync.connect(url) as backend:
        terminal.resize(120, 30)
        with backend.election("job", label="a-host-1").campaign():
            picture = terminal.until_shown("a-host-1", "orders", "paused")
            lines = lines_of(picture)
            assert lines[0].startswith("tenure top  every 0.1 s  sqlite:")
            [queue] = [line.split() for line in lines if line.startswith("orders ")]
            assert queue[:6] == ["orders", "11", "0", "0", "0", "1"]
            assert f"{GREEN}a-host-1" in picture
            assert f"{RED}paused" in picture
            assert f"{RED}1" in picture  # a dead letter
        terminal.until_shown("(none)")
        backend.queue("bills").send(b"x")
        terminal.until_shown("bills")
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_a_small_terminal_shows_a_part_of_each_table(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        for number in range(20):
            backend.queue(f"queue-{number}").send(b"x")
            with backend.election(f"name-{number}", ttl=5).campaign():
                pass
    with Terminal("top", "--every", "100ms") as terminal:
        terminal.resize(60, 14)
        lines = lines_of(terminal.until_shown("more: tenure status", "more: tenure queue"))
        assert len(lines) <= 14
        assert max(map(len, lines)) <= 60
        terminal.type(b"\x03")
        assert terminal.wait() == 0


def test_each_look_as_lines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store(url)
    assert main(["top", "--count", "2", "--every", "100ms"]) == 0
    looks = capsys.readouterr().out.strip().split("\n\n\n")
    assert len("".join(looks).split("QUEUE   READY")) == 3
    assert "\x1b" not in looks[0]


def test_each_look_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store(url)
    assert main(["top", "--count", "2", "--every", "100ms", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["queue"] for one in first["queues"]] == ["orders", "tidy"]
    assert (first["queues"][0]["ready"], first["queues"][0]["dead"]) == (11, 1)
    [schedule] = second["schedules"]
    assert (schedule["name"], schedule["paused"], schedule["next"]) == ("tidy", True, None)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["top", "--every", "0"], 2, "--every 0 is too short; give at least 0.1 s"),
        (["top", "--every", "soon"], 2, "'soon' is not a duration"),
        (["top", "--count", "0"], 2, "0 is not in the range x>=1"),
        (["top", "orders"], 2, "unexpected extra argument"),
    ],
)
def test_bad_input_is_refused(line: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == code
    assert said in capsys.readouterr().err


def test_a_store_that_does_not_exist_is_not_created(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--count", "1"]) == 78
    assert "there is no file" in capsys.readouterr().err
    assert not (tmp_path / "work.db").exists()


# --- the tables ---


def shown(found: Overview, history: History | None = None, width: int = 200, height: int | None = None) -> list[str]:
    history = history or History()
    return [line.plain.rstrip() for line in sections(found, history, 10.0, NOW, width, height)]


def test_a_store_with_elections_only_has_no_queues() -> None:
    lines = shown(Overview({"job": None}, None, []))
    assert lines[0].split()[0] == "ELECTION"
    assert not any("QUEUE" in line for line in lines)


def test_what_is_unreadable_is_told_beside_the_rest() -> None:
    lines = shown(Overview({}, {"a": Stats()}, [], {"b": "the record of b\ncan't be read"}))
    assert lines[-2].split() == ["UNREADABLE", "WHY"]
    assert lines[-1].startswith("b")
    assert lines[-1].endswith("the record of b\\ncan't be read")


def test_an_empty_store_says_so() -> None:
    assert shown(Overview({}, {}, [])) == ["no election yet", "", "no queue yet"]


def held(label: str) -> Leader:
    return Leader(f"{label}-{'0' * 16}-{'1' * 32}", 1)


def member(label: str, partitions: int) -> Leader:
    own = {"tenure-order": "1", "tenure-weight": "1", "tenure-partitions": str(partitions)}
    return Leader(held(label).holder, 1, own)


def test_partitions_are_a_table_of_groups_and_no_elections() -> None:
    leaders: dict[str, Leader | None] = {"report": None}
    for name, count, owners in (("even", 2, "aa"), ("hurt", 3, "a"), ("odd", 2, "ab"), ("past", 0, "")):
        leaders[f"{name}.member-0"] = member("a", count) if count else None
        leaders |= {f"{name}.partition-{number}": held(label) for number, label in enumerate(owners)}
    leaders["past.partition-0"] = None
    lines = shown(Overview(leaders, None, []))
    assert lines[0].split()[0] == "ELECTION"
    assert lines[1:3] == ["report    (none)", ""]
    assert [line.split(maxsplit=1) for line in lines[3:]] == [
        ["PARTITIONS", "OF  MEMBERS   OWNED  STATE"],
        ["hurt", "1  1 of 3  moving"],
        ["past", "0  0 of 1  no members"],
        ["odd", "1  2 of 2  moving"],
        ["even", "1  2 of 2  balanced"],
    ]
    assert shown(Overview(leaders, None, []), height=8)[-1].endswith("more: tenure partitions")


def test_groups_are_in_the_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with sharing(url):
        assert main(["top", "--count", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["elections"] == []
    assert found["partitions"] == [
        {"name": "orders", "partitions": 4, "owned": 4, "members": 2, "balanced": True},
    ]


def test_the_worst_comes_first() -> None:
    leader = Leader("host-1", 7, {}, 3.0)
    queues = {"full": Stats(ready=9), "dead": Stats(dead=1), "empty": Stats()}
    lines = shown(Overview({"a": leader, "z": None}, queues, []))
    assert [line.split()[0] for line in lines if line] == ["ELECTION", "z", "a", "QUEUE", "dead", "full", "empty"]


def test_a_term_counts_from_when_it_was_first_seen() -> None:
    history = History()
    for at, token in ((0.0, 7), (4.0, 7), (6.0, 8)):
        history.note(Overview({"a": Leader("host", token, {}, 3.0)}, {}, []), at)
    assert history.led_for("a", 10.0) == 4.0
    history.note(Overview({"a": None}, {}, []), 11.0)
    assert history.led_for("a", 12.0) is None


def test_the_change_is_that_of_the_backlog_in_a_second() -> None:
    history = History()
    for at, ready, locked in ((0.0, 10, 0), (2.0, 20, 10)):
        history.note(Overview({}, {"q": Stats(ready, locked, delayed=99, dead=5)}, []), at)
    assert history.change("q") == 10.0
    assert history.backlogs("q") == [10, 30]
    for at in range(SAMPLES * 2):
        history.note(Overview({}, {"q": Stats()}, []), 10.0 + at)
    assert len(history.backlogs("q")) == SAMPLES
    history.note(Overview({}, {}, []), 500.0)
    assert history.backlogs("q") == []


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (ScheduleStatus("s", "q", 60.0, last=NOW - 30, next=NOW + 30), "30 s ago  in 30 s"),
        (ScheduleStatus("s", "q", "0 3 * * *", next=NOW - 7_300), "2 h late"),
        (ScheduleStatus("s", "q", 60.0, paused=True), "paused"),
        (ScheduleStatus("s", "q", 60.0, problem="no such zone"), "unknown"),
    ],
)
def test_a_schedule_says_when_it_is_next(status: ScheduleStatus, said: str) -> None:
    assert shown(Overview({}, {}, [status]))[-1].endswith(said)


def test_hostile_names_can_not_write_to_the_terminal() -> None:
    lines = shown(Overview({"\x1b[2Jname": None}, {"q\nr": Stats()}, []))
    assert not any("\x1b" in line or "\n" in line for line in lines)


@given(st.lists(st.integers(0, 40), max_size=3), st.integers(0, 60))
def test_the_tables_fit_and_share_what_is_left(wanted: list[int], height: int) -> None:
    given_ = shares(wanted, height)
    room = max(0, height - 3 * len(wanted))
    assert sum(given_) == min(room, sum(wanted))
    assert all(0 <= got <= want for got, want in zip(given_, wanted, strict=True))
    short = [got for got, want in zip(given_, wanted, strict=True) if got < want]
    assert not short or max(given_) <= max(short) + 1 or min(short) >= min(given_)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=99), st.integers(1, 30))
def test_a_graph_has_a_bar_for_each_of_the_newest_values(values: list[int], width: int) -> None:
    found = graph(values, width)
    assert len(found) == min(len(values), width)
    newest = values[-width:]
    assert len({bar for bar, value in zip(found, newest, strict=True) if value == 0}) <= 1
    if max(newest) > 0:
        assert found[newest.index(max(newest))] in "█@"
