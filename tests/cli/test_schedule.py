"""``tenure schedule``, on an SQLite file: its output, exit codes and effects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._schedule.plan import Plan, Record
from tenure.cli import main

Captured = pytest.CaptureFixture[str]

SETTLED = 1.7e9
EVERY = "0 3 * * *"
BERLIN = ["2023-11-14T06:13:20+01:00", "2023-11-15T03:00:00+01:00"]
"""The last and the next time of ``tidy``."""

KEPT: Mapping[tuple[str, str], str] = {
    ("tidy", "tidy"): Record(Plan(EVERY, "Europe/Berlin"), SETTLED, SETTLED - 61_200).encoded(),
    ("q1", "dup"): Record(Plan(60.0), SETTLED, SETTLED).encoded(),
    ("q2", "dup"): Record(Plan(0.5, missed="skip", missed_after=30.0), SETTLED, SETTLED - 0.5).encoded(),
    ("q1", "pause"): Record(Plan(3_600.0, missed="all"), SETTLED).encoded(),
    ("q1", "-x"): Record(Plan(5.0), SETTLED, paused=True).encoded(),
    ("q3", "mars"): Record(Plan(EVERY, "Mars/Base"), SETTLED).encoded(),
    ("q3", "newer"): '{"format":99}',
}


@pytest.fixture(autouse=True)
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    monkeypatch.setenv("TENURE_URL", url)
    monkeypatch.chdir(tmp_path)
    return url


@pytest.fixture
def kept(url: str) -> str:
    """Let the store keep some schedules."""

    async def keep() -> None:
        async with tenure.connect(url) as backend:
            for (queue, name), text in KEPT.items():
                await backend.queue(queue)._context.broker.advance(queue, name, None, text)

    asyncio.run(keep())
    return url


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


def in_json(capsys: Captured, *arguments: str) -> Any:
    code, out, err = run_cli(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def state(url: str) -> dict[tuple[str, str], bool]:
    """Return whether each schedule is paused."""

    async def ask() -> dict[tuple[str, str], bool]:
        async with tenure.connect(url) as backend:
            return {(one.queue, one.name): one.paused for one in await backend.schedules()}

    return asyncio.run(ask())


# --- listing ---


def test_all_schedules_are_listed_with_their_last_and_next_times(kept: str, capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "schedule")
    assert (code, err) == (0, "")
    header, *rows = out.splitlines()
    assert header.split() == ["SCHEDULE", "QUEUE", "EVERY", "TIMEZONE", "LAST", "NEXT", "MISSED"]
    assert [tuple(row.split()[1::-1]) for row in rows] == sorted(KEPT)
    by_name = {tuple(row.split()[1::-1]): row for row in rows}
    assert by_name["tidy", "tidy"].split()[7:] == ["Europe/Berlin", *BERLIN, "once"]
    assert "0.5 s" in by_name["q2", "dup"]
    assert "2023-11-14T22:13:19.500+00:00" in by_name["q2", "dup"]
    assert by_name["q2", "dup"].endswith("skip after 30 s")
    assert "paused" in by_name["q1", "-x"]
    assert "no time zone 'Mars/Base'" in by_name["q3", "mars"]
    assert "can't read" in by_name["q3", "newer"]


def test_the_json_has_the_same_with_times_in_its_time_zone(kept: str, capsys: Captured) -> None:
    found = in_json(capsys, "schedule")
    assert [(one["queue"], one["name"]) for one in found] == sorted(KEPT)
    assert in_json(capsys, "schedule", "tidy") == [
        {
            "name": "tidy",
            "queue": "tidy",
            "every": EVERY,
            "timezone": "Europe/Berlin",
            "missed": "once",
            "missed_after": 60.0,
            "last": BERLIN[0],
            "next": BERLIN[1],
            "paused": False,
            "problem": "",
        }
    ]
    [mars] = in_json(capsys, "schedule", "mars")
    assert (mars["last"], mars["next"]) == (None, None)
    assert "no time zone 'Mars/Base'" in mars["problem"]


def test_schedules_of_one_name_are_listed_together(kept: str, capsys: Captured) -> None:
    assert [one["queue"] for one in in_json(capsys, "schedule", "dup")] == ["q1", "q2"]


def test_a_store_without_schedules_has_an_empty_list(url: str, capsys: Captured) -> None:
    run_cli(capsys, "send", "orders", "x")
    assert run_cli(capsys, "schedule") == (0, "", "")
    assert in_json(capsys, "schedule") == []
    code, _, err = run_cli(capsys, "schedule", "tidy")
    assert code == 3
    assert "there is no schedule 'tidy' on this store; list the schedules with: tenure schedule" in err


def test_a_name_that_is_a_command_is_given_after_dashes(kept: str, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "schedule", "--", "pause")
    assert code == 0
    assert "3600 s" in out
    assert in_json(capsys, "schedule", "pause", "pause")["paused"]
    assert state(kept)["q1", "pause"]
    assert run_cli(capsys, "schedule", "resume", "--", "-x")[0] == 0
    assert not state(kept)["q1", "-x"]


# --- changes ---


def test_a_schedule_is_paused_and_resumed(kept: str, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "schedule", "pause", "tidy")
    assert code == 0
    assert "paused" in out
    assert state(kept)["tidy", "tidy"]
    resumed = in_json(capsys, "schedule", "resume", "tidy")
    assert not resumed["paused"]
    assert datetime.fromisoformat(resumed["next"]).timestamp() > SETTLED + 86_400  # those of the pause are skipped
    assert not state(kept)["tidy", "tidy"]


def test_a_pause_is_shown_beside_a_problem(kept: str, capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "schedule", "pause", "mars")
    assert code == 0
    assert "paused; there is no time zone 'Mars/Base'" in out


def test_a_schedule_is_removed_also_one_that_can_not_be_read(kept: str, capsys: Captured) -> None:
    anew = "a process that still runs it makes it anew within a minute"
    assert run_cli(capsys, "schedule", "remove", "tidy") == (0, f"removed tidy; {anew}\n", "")
    assert run_cli(capsys, "schedule", "remove", "newer") == (0, f"removed newer; {anew}\n", "")
    assert set(state(kept)) == set(KEPT) - {("tidy", "tidy"), ("q3", "newer")}
    assert run_cli(capsys, "schedule", "remove", "tidy")[0] == 3


def test_of_several_with_one_name_the_queue_says_which(kept: str, capsys: Captured) -> None:
    before = state(kept)
    for verb in ("pause", "resume", "remove"):
        code, _, err = run_cli(capsys, "schedule", verb, "dup")
        assert code == 78
        assert "2 queues have a schedule 'dup'; give --queue: q1, q2" in err
    assert state(kept) == before
    assert in_json(capsys, "schedule", "pause", "dup", "--queue", "q2")["queue"] == "q2"
    assert state(kept) == before | {("q2", "dup"): True}
    assert run_cli(capsys, "schedule", "remove", "dup", "--queue", "q2")[0] == 0
    assert run_cli(capsys, "schedule", "pause", "dup")[0] == 0


# --- wrong input ---


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (("tidyy",), 3, "there is no schedule 'tidyy' on this store; did you mean 'tidy'?"),
        (("",), 3, "there is no schedule ''"),
        (("tidy", "more"), 2, "unexpected extra argument"),
        (("pause",), 2, "Missing argument 'NAME'"),
        (("pause", "tidyy"), 3, "did you mean 'tidy'?"),
        (("pause", "dup", "--queue", "q3"), 3, "there is no schedule 'dup' of the queue 'q3'"),
        (("pause", "dup", "--queue", "never"), 3, "there is no schedule 'dup' of the queue 'never'"),
        (("pause", "dup", "--queue", "a$b"), 78, "the queue's name ('a$b') must not contain '$'"),
        (("pause", "newer"), 78, "what this tenure can't read"),
        (("resume",), 2, "Missing argument 'NAME'"),
        (("resume", "nothing"), 3, "there is no schedule 'nothing'"),
        (("resume", "dup", "--queue", ""), 78, "the queue's name must not be empty"),
        (("remove",), 2, "Missing argument 'NAME'"),
        (("remove", "tidy", "dup"), 2, "unexpected extra argument"),
        (("remove", "tidy", "--queue", "q1"), 3, "there is no schedule 'tidy' of the queue 'q1'"),
    ],
)
def test_wrong_input_is_refused_and_changes_nothing(
    kept: str, capsys: Captured, line: tuple[str, ...], code: int, message: str
) -> None:
    before = state(kept)
    got, out, err = run_cli(capsys, "schedule", *line)
    assert (got, out) == (code, "")
    assert message in err
    assert state(kept) == before


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ((), 2, "Missing argument 'EVERY'"),
        (("x",), 2, "EVERY is neither a cron expression"),
        (("0 3 * *",), 78, "five fields"),
        (("@never",), 78, "five fields"),
        (("0",), 78, "every must be at least 0.1"),
        (("90m", "--timezone", "Europe/Berlin"), 78, "is for cron expressions"),
        ((EVERY, "--timezone", "Nope"), 78, "there is no time zone 'Nope' here"),
        ((EVERY, "--count", "0"), 2, "not in the range"),
        ((EVERY, "--count", "1001"), 2, "not in the range"),
        (("0 0 30 2 *",), 78, "can't be read"),
    ],
)
def test_times_that_can_not_be_read_are_refused(
    capsys: Captured, line: tuple[str, ...], code: int, message: str
) -> None:
    got, out, err = run_cli(capsys, "schedule", "times", *line)
    assert (got, out) == (code, "")
    assert message in err


# --- times ---


def test_times_need_no_store_and_are_in_the_time_zone(capsys: Captured, tmp_path: Path) -> None:
    found = in_json(capsys, "schedule", "times", "30 6 * * *", "--timezone", "Asia/Kathmandu", "--count", "3")
    assert len(found) == 3
    assert all(one.endswith("T06:30:00+05:45") for one in found)
    assert found == sorted(found)
    assert list(tmp_path.iterdir()) == []


def test_times_of_an_interval(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "schedule", "times", "90m", "--count", "2")
    assert code == 0
    first, second = (datetime.fromisoformat(line).timestamp() for line in out.splitlines())
    assert first % 5_400 == 0
    assert second - first == 5_400
