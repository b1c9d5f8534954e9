"""The demonstration's verdict: each broken promise is reported; the summary for people and for programs."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

import tenure
from tenure._cli.demo_display import LineDisplay, LiveDisplay, show_summary
from tenure._demo.computation import Count, merge
from tenure._demo.job import Chunk, File, Job
from tenure._demo.ledger import Progress
from tenure._demo.messages import DeadChunk
from tenure._demo.state import InstanceState, RunState
from tenure._demo.summary import Failover, Summary, Term, WorkerKill
from tests.terminal import HOME, SHOW, plain

TOTAL = merge([Count("a", words=3), Count("b", error="Permission denied")])
FAILOVER = Failover(1, 4711, token=1, done=1, at=0.0, elected=1.5, wrote=1.6, refusal="token 1 is too old; so there")
WORKER_KILL = WorkerKill(2, 4712, chunk=2, at=0.0, again=2.75)
POISONOUS = DeadChunk(3, "max_deliveries", "TooDeep: so deep", 5)
WELL = Summary(
    folder="/some/where",
    url="sqlite:///demo.db",
    queue_url="sqlite:///demo.db",
    queue="demo-work",
    instances=3,
    ttl=2.0,
    lock=3.0,
    parsed=0,
    messages=3,
    redelivered={2: 1, 3: 4},
    again=1,
    deliveries_max=5,
    dead=[POISONOUS],
    poison=3,
    left_out=[3],
    lost=[],
    twice=[],
    total=TOTAL,
    plain=TOTAL,
    differing=[],
    unreadable={"b": "Permission denied"},
    terms=[Term(1, 1), Term(2, 2)],
    worker_kill=WORKER_KILL,
    failover=FAILOVER,
    seconds=9.0,
    plain_seconds=1.0,
    led_after=0.4,
    cores=2,
    pace=0.0,
)


def test_a_good_run_has_no_problems() -> None:
    assert WELL.problems() == []
    told = json.loads(json.dumps(WELL.as_json()))
    assert (told["ok"], told["equals_plain_run"], told["elections"]) == (True, True, 2)
    assert told["unreadable"] == {"b": "Permission denied"}
    assert (told["messages"], told["redeliveries"], told["results_again"]) == (3, 5, 1)
    assert (told["lost"], told["counted_twice"]) == ([], [])
    assert [letter["poison"] for letter in told["dead_letters"]] == [True]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"failover": None}, "no fail-over"),
        ({"failover": dataclasses.replace(FAILOVER, wrote=None)}, "no fail-over"),
        ({"failover": dataclasses.replace(FAILOVER, refusal="")}, "the fence was not tried"),
        ({"terms": [Term(1, 1), Term(1, 2)]}, "tokens did not rise"),
        ({"terms": [Term(2, 1), Term(1, 2)]}, "tokens did not rise"),
        ({"plain": merge([])}, "not that of the plain run"),
        ({"worker_kill": None}, "no worker was killed"),
        ({"worker_kill": dataclasses.replace(WORKER_KILL, again=None)}, "message 2, which the killed worker had"),
        ({"dead": []}, "message 3, the poison message, is not among"),
        ({"dead": [dataclasses.replace(POISONOUS, reason="expired")]}, "dead-lettered as expired after 5"),
        ({"dead": [dataclasses.replace(POISONOUS, deliveries=1)]}, "max_deliveries after 1 deliveries, not"),
        (
            {"dead": [POISONOUS, dataclasses.replace(POISONOUS, chunk=2)]},
            "messages were dead-lettered that could be handled: 2",
        ),
        ({"lost": ["a"]}, "lost, neither counted nor dead: a"),
        ({"twice": ["a"]}, "counted twice: a"),
        ({"differing": ["a", "b", "c", "d"]}, "a, b, c and 1 more"),
    ],
)
def test_a_broken_promise_is_reported(change: dict[str, Any], problem: str) -> None:
    changed = dataclasses.replace(WELL, **change)
    assert len(changed.problems()) == 1
    assert problem in changed.problems()[0]
    assert changed.as_json()["ok"] is False
    assert problem in shown(changed)


def test_the_summary_names_the_results() -> None:
    text = shown(WELL)
    for part in ("1.50 s after the kill", "pid 4711", "b (Permission denied)", "token 1 is too old", "the same result"):
        assert part in text
    for part in (
        "5, 4 of them of the poison",
        "max_deliveries after 5 deliveries (TooDeep: so deep)",
        "after 2.75 s",
    ):
        assert part in text


def test_escape_sequences_in_names_are_escaped() -> None:
    assert "\x1b" not in shown(dataclasses.replace(WELL, differing=["\x1b[2J", "\udce9"]))


def shown(summary: Summary) -> str:
    file = io.StringIO()
    show_summary(Console(file=file, width=80), summary)
    return file.getvalue()


def run() -> RunState:
    files = tuple(File(str(number), parsed=False) for number in range(10))
    job = Job("/some/where", tuple(Chunk(number, (file,)) for number, file in enumerate(files, 1)), 0.0)
    return RunState(job, "sqlite:///demo.db", "sqlite:///demo.db", "demo", 2.0, progress(0))


def test_a_second_store_for_the_messages_is_named() -> None:
    assert "messages in sqlite" not in shown(WELL)
    assert "leases in etcd://host, messages in sqlite:///demo.db" in " ".join(
        shown(dataclasses.replace(WELL, url="etcd://host")).split()
    )


def test_a_store_that_does_not_tell_how_long_a_lease_lasts_shows_that() -> None:
    file = io.StringIO()
    now = run()
    now.leader, now.lease_left = 1, None
    with LiveDisplay(Console(file=file, width=100, force_terminal=True, color_system=None)) as picture:
        picture.draw(now)
    assert "time left unknown" in plain(file.getvalue())


def progress(counted: int, dead: int = 0) -> Progress:
    return Progress(counted, dead, of=10, again=0, finished=False)


def test_the_picture_shows_the_leader_and_the_progress() -> None:
    file = io.StringIO()
    now = run()
    now.instances = [InstanceState(1, 4711, "killed", 1), InstanceState(2, 4712, "leading", 2)]
    now.instances[1].chunk, now.instances[1].counted = 7, 3
    now.leader, now.token, now.progress, now.lease_left = 2, 2, progress(4, dead=1), 1.25
    now.queue = tenure.Stats(ready=3, locked=2, dead=1)
    now.events.append((3.0, "kill -9"))
    with LiveDisplay(Console(file=file, width=100, force_terminal=True, color_system=None)) as picture:
        picture.draw(now)
    for part in (
        "led by instance 2, term 2",
        "4711",
        "killed",
        "leading, term 2",
        "5 of 10 messages",
        "1.2 s",
        "kill -9",
    ):
        assert part in file.getvalue()
    for part in ("message 7", "3 ready, 2 locked, 0 delayed, 1 dead"):
        assert part in file.getvalue()


@pytest.mark.parametrize(("width", "height", "instances"), [(80, 24, 4), (80, 24, 64), (160, 50, 4), (40, 12, 4)])
def test_the_picture_fits_and_shows_the_newest(width: int, height: int, instances: int) -> None:
    file = io.StringIO()
    now = run()
    now.instances = [InstanceState(number, 4_710 + number) for number in range(1, instances + 1)]
    now.instances[-1].state = "leading"
    now.queue = tenure.Stats(ready=3_000, locked=200, delayed=100, dead=1)
    now.events = [(float(n), f"news {n}: the poison file nests brackets more than 1,000 deep, " * 2) for n in range(40)]
    now.events.append((40.0, "the very newest, which ends with these words"))
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    with LiveDisplay(console) as picture:
        picture.draw(now)
        lines = plain(file.getvalue().rpartition(HOME)[2]).split("\n")
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    told = [line.rstrip() for line in lines]
    if width == 80:
        assert told[-1] == " 40.00 s  the very newest, which ends with these words"
        assert [line[:10].strip() for line in told[-3:-1]] == ["39.00 s", ""]  # wrapped at words, below itself
    else:
        assert told[-1].endswith("these words")
    assert any("leading" in line for line in told) or width == 40
    after = plain(file.getvalue().rpartition(SHOW)[2])
    assert all(f"news {n}: " in after for n in range(40))


def test_the_summary_is_wrapped_at_words_on_a_terminal() -> None:
    file = io.StringIO()
    show_summary(Console(file=file, width=80, force_terminal=True, color_system=None), WELL)
    lines = plain(file.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    [at] = [place for place, line in enumerate(lines) if line.startswith("plain run")]
    assert " ".join(line[14:] for line in lines[at : at + 2]).split() == WELL.rows()[-2][1].split()
    assert lines[at + 1].startswith(" " * 14)


@pytest.mark.parametrize(
    ("cores", "seconds", "why"),
    [
        (2, 9.0, "3 instances and the plain run shared 2 cores, so there was little to gain; only this run stores"),
        (1, 9.0, "shared 1 core,"),
        (
            2,
            9.0,
            "waited 0.4 s for its processes and a first leader, 2.8 s for the killed worker's message, 1.5 s for a new",
        ),
        (8, 9.0, "only this run stores each message and result"),
    ],
)
def test_a_slower_run_gives_the_reason(cores: int, seconds: float, why: str) -> None:
    assert why in shown(dataclasses.replace(WELL, cores=cores, seconds=seconds))


def test_a_run_with_little_work_gives_that_as_the_reason() -> None:
    text = shown(dataclasses.replace(WELL, pace=0.25))
    assert "as there was little to do, each file was made to take 250 ms here; only this run stores" in text


def test_a_faster_run_gives_no_reason() -> None:
    assert "only this run stores" not in shown(dataclasses.replace(WELL, cores=8, seconds=0.9))


def test_each_quarter_is_printed_once() -> None:
    file = io.StringIO()
    now = run()
    with LineDisplay(Console(file=file, width=80)) as lines:
        for done in (0, 3, 3, 5, 10):
            now.progress = progress(done)
            lines.draw(now)
        lines.add_event(1.0, "something")
    assert [line.split("  ")[-1] for line in file.getvalue().splitlines()] == [
        "3 of 10 messages are done",
        "5 of 10 messages are done",
        "something",
    ]
