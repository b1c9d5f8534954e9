"""The answers of ``tenure run --http``, from processes that report, are silent, end meanwhile, or lead too long."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("starlette")

from tenure import Stats, Unavailable
from tenure._cli.fleet_source import FleetSource, _read_stats
from tenure._cli.supervise import ASK_WITHIN, LINE_MAX, Child, RunOptions, Supervision
from tenure._foreign import Unreadable
from tenure._http.source import ANSWER_WITHIN
from tenure._supervisor.awake import READ_EVERY
from tenure._supervisor.machine import KILL_AFTER, Leaving, Reported, Settings, Tick
from tenure._telemetry.families import FAMILIES, LABELS_MAX, Histogram, Snapshot, combined, packed, unpacked
from tenure.testing.loop import run

SENT = ("tenure_messages_sent", ("orders",))
RUNNING = ("tenure_handlers_running", ("orders",))


class Fake:
    """A process that answers as it is told."""

    def __init__(self, number: int, sent: float = 0.0) -> None:
        self.number = number
        self.reported_at = asyncio.get_running_loop().time()
        self.is_live = self.is_ready = True
        self.is_ending = False
        self.silence: float | None = None
        self.measured: Snapshot = {}
        self.sent = sent
        self.stats: dict[str, Stats] | None = {"orders": Stats(ready=number)}
        self.odd: object = None
        self.takes = 0.0
        self.asked: list[str] = []
        self.when_asked: Callable[[], object] = lambda: None

    async def ask(self, question: str) -> Any:
        self.asked.append(question)
        if self.takes:
            await asyncio.sleep(min(self.takes, ASK_WITHIN))
            if self.takes > ASK_WITHIN:
                return None
        self.when_asked()
        if question == "measure":
            self.measured = {SENT: self.sent, RUNNING: 1.0}
            return packed(self.measured)
        if self.odd is not None:
            return self.odd
        return None if self.stats is None else {name: [*astuple(one)] for name, one in self.stats.items()}


class Fleet:
    def __init__(self, *processes: Fake) -> None:
        self.processes = list(processes)
        self.past: Snapshot = {}
        self.source = FleetSource(lambda: list(self.processes), lambda: combined([self.past]), silence=self.silence_of)

    def silence_of(self, number: int) -> float | None:
        return next(one.silence for one in self.processes if one.number == number)

    def end(self, process: Fake) -> None:
        """End a process, as the supervisor notes it."""
        self.processes.remove(process)
        self.past = combined([self.past, {SENT: process.measured.get(SENT, 0.0)}])


def in_virtual_time(test: Callable[[], Any]) -> Callable[[], None]:
    def wrapped() -> None:
        run(test(), limit=10_000)

    wrapped.__name__ = test.__name__
    return wrapped


@in_virtual_time
async def test_a_process_that_hangs_is_named_and_not_ready() -> None:
    first, second = Fake(1), Fake(2)
    source = Fleet(first, second).source
    assert (await source.live()).why == "live"
    second.silence = 31.4
    health = await source.live()  # the supervisor kills it alone: no reason to restart all
    assert (health.passes, health.why) == (True, "live; process 2 has hung for 31 s")
    ready = await source.ready()
    assert (ready.passes, ready.why) == (True, "ready: 1 of 2 processes")


@in_virtual_time
async def test_work_of_a_leader_that_has_overrun_makes_it_dead() -> None:
    process = Fake(1)
    process.is_live = False
    health = await Fleet(process).source.live()
    assert (health.passes, health.why) == (False, "process 1: the work of a leader has overrun its term")


@in_virtual_time
async def test_it_is_ready_while_one_process_is_that_does_not_end() -> None:
    first, second = Fake(1), Fake(2)
    fleet = Fleet()
    assert (await fleet.source.ready()).why == "none of 0 processes is ready"
    assert (await fleet.source.live()).passes
    fleet.processes = [first, second]
    first.is_ready = False
    assert (await fleet.source.ready()).why == "ready: 1 of 2 processes"
    second.is_ending = True
    health = await fleet.source.ready()
    assert (health.passes, health.why) == (False, "none of 1 processes is ready")


@in_virtual_time
async def test_metrics_are_added_up_and_one_that_does_not_answer_counts_as_before() -> None:
    first, second = Fake(1, 10.0), Fake(2, 5.0)
    source = Fleet(first, second).source
    assert (await source.metrics())[SENT] == 15.0
    first.sent, second.sent = 12.0, 6.0
    second.takes = 60.0
    before = asyncio.get_running_loop().time()
    found = await source.metrics()
    assert (found[SENT], found[RUNNING]) == (17.0, 2.0)
    assert asyncio.get_running_loop().time() - before <= ASK_WITHIN + ANSWER_WITHIN


@in_virtual_time
async def test_a_process_that_ends_during_a_scrape_counts_once() -> None:
    first, second = Fake(1, 10.0), Fake(2, 5.0)
    fleet = Fleet(first, second)
    assert (await fleet.source.metrics())[SENT] == 15.0
    second.takes = 1.0
    asyncio.get_running_loop().call_later(0.5, fleet.end, first)
    assert (await fleet.source.metrics())[SENT] == 15.0
    assert (await fleet.source.metrics())[SENT] == 15.0


@in_virtual_time
async def test_a_process_that_begins_during_a_scrape_does_no_harm() -> None:
    first = Fake(1, 10.0)
    fleet = Fleet(first)
    first.when_asked = lambda: fleet.processes.append(Fake(2, 5.0)) if len(fleet.processes) == 1 else None
    assert (await fleet.source.metrics())[SENT] == 10.0
    assert (await fleet.source.metrics())[SENT] == 15.0


async def test_numbers_come_from_the_process_that_has_reported_last_and_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure._http.source.FRESH", -1.0)  # no answer serves twice
    ending, old, new = Fake(1), Fake(2), Fake(3)
    old.reported_at -= 5.0
    ending.is_ending = True
    fleet = Fleet(ending, old, new)
    assert await fleet.source.stats() == {"orders": Stats(ready=3)}
    assert (ending.asked, old.asked, new.asked) == ([], [], ["stats"])
    new.stats = None  # its connection is broken
    assert await fleet.source.stats() == {"orders": Stats(ready=2)}
    old.stats = None
    with pytest.raises(Unavailable):
        await fleet.source.stats()
    assert ending.asked == []


@in_virtual_time
async def test_without_an_answer_numbers_are_unknown_in_time_and_metrics_leave_them_out() -> None:
    fleet = Fleet()
    with pytest.raises(Unavailable):
        await fleet.source.stats()
    silent = [Fake(1), Fake(2), Fake(3)]
    for one in silent:
        one.takes = 60.0
    fleet.processes += silent
    before = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable):
        await fleet.source.stats()
    assert asyncio.get_running_loop().time() - before <= ANSWER_WITHIN
    assert not any(name.startswith("tenure_queue") for name, _ in await fleet.source.metrics())


# --- questions to a process ---


class Transport:
    def close(self) -> None: ...


@pytest.fixture
def pipe() -> Any:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)


def child(control: int) -> Child:
    process: Any = None
    transport: Any = Transport()
    return Child(1, process, control, transport)


async def test_requests_at_once_share_a_question_and_its_answer(pipe: tuple[int, int]) -> None:
    one = child(pipe[1])
    asking = [asyncio.create_task(one.ask("measure")) for _ in range(10)]
    await asyncio.sleep(0)
    assert os.read(pipe[0], 1_000) == b"measure\n"
    value = packed({SENT: 3.0})
    one.answered("measure", value)
    assert await asyncio.gather(*asking) == [value] * 10
    assert one.measured == {SENT: 3.0}
    assert one._answers == {}
    one.close()


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_process_that_does_not_answer_leaves_nothing_behind(
    pipe: tuple[int, int], is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure._cli.supervise.ASK_WITHIN", 0.05)
    os.set_blocking(pipe[1], False)
    while is_full:
        try:
            os.write(pipe[1], b"x" * 4_096)
        except BlockingIOError:
            break
    one = child(pipe[1])
    for _ in range(3):
        asking = [asyncio.create_task(one.ask(question)) for question in ("measure", "stats", "stats")]
        await asyncio.sleep(0)
        asking[2].cancel()
        assert await asyncio.gather(*asking[:2]) == [None, None]
    assert one._answers == {}
    one.answered("measure", packed({SENT: 3.0}))  # late
    assert one.measured == {SENT: 3.0}
    one.close()
    assert await one.ask("measure") is None


FORGED: list[bytes] = [
    *(
        b"",
        b"x",
        b"\xff",
        b"null",
        b"7",
        b'"finished"',
        b'["finished"]',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5_000,
    ),
    *(b"{}", b'{"running":1}', b'{"running":"7","leads":false,"memory":1,"live":true,"ready":true}'),
    b'{"running":1e400,"leads":false,"memory":1,"live":true,"ready":true}',
    b'{"running":1,"leads":0,"memory":1,"live":true,"ready":true}',
    b'{"running":1,"leads":false,"memory":"much","live":true,"ready":true}',
    b'{"running":1,"leads":false,"memory":1,"live":"yes","ready":true}',
    *(b'{"backlogs":[["many",1]]}', b'{"backlogs":[[1]]}', b'{"backlogs":[[-1,1]]}', b'{"backlogs":7}'),
    *(
        b'{"answer":1}',
        b'{"to":["stats"],"answer":1}',
        b'{"to":"measure","answer":7}',
        b'{"to":"measure","answer":[7]}',
    ),
]


def supervision_of(settings: Settings) -> Supervision:
    """Return a supervision with one process that has begun; there is no such process."""
    supervision = Supervision(RunOptions("shop:service", settings, False, False, False, False, 0))
    supervision._machine.handle(Tick(), asyncio.get_running_loop().time())
    supervision._feed(Reported(1, 0, False, 0.0))
    return supervision


def timer_of(supervision: Supervision) -> asyncio.TimerHandle:
    assert supervision._timer is not None
    return supervision._timer


@in_virtual_time
async def test_reports_one_after_the_other_do_not_put_off_a_limit_that_is_over() -> None:
    supervision, loop = supervision_of(Settings(grace=5.0)), asyncio.get_running_loop()
    supervision._feed(Leaving(1))
    timer = timer_of(supervision)
    for _ in range(10):
        supervision._feed(Reported(1, 0, False, 0.0))
    assert supervision._timer is timer
    assert timer.when() == loop.time() + 5.0 + KILL_AFTER


@in_virtual_time
async def test_after_a_time_in_which_it_did_not_run_each_limit_is_as_far_away_as_before() -> None:
    supervision, loop = supervision_of(Settings(grace=5.0)), asyncio.get_running_loop()
    supervision._feed(Leaving(1))
    timer_of(supervision).cancel()
    await asyncio.sleep(3_600.0)  # nothing reads the time meanwhile
    supervision._tick()
    assert not supervision._machine.processes[1].is_killed
    assert timer_of(supervision).when() == pytest.approx(loop.time() + 5.0 + KILL_AFTER - READ_EVERY)


async def test_a_process_that_was_killed_and_has_not_ended_is_not_ready(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal waits for the end of a call to the system that can't be interrupted, or for a group that is frozen."""
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    supervision = supervision_of(Settings(hung_after=0.1, hung_max=10.0))
    machine, one = supervision._machine, child(pipe[1])
    one.process = cast(Any, SimpleNamespace(pid=7, send_signal=lambda number: None))
    supervision._children[1] = one
    one.has_begun = one.is_ready = True
    source = FleetSource(supervision._begun, supervision._counts, silence=supervision._silence)
    assert (await source.ready()).why == "ready: 1 of 1 processes"
    process = machine.processes[1]
    process.heard_at -= 9.0
    supervision._feed(Tick())
    assert (process.hangs, process.is_killed) == (True, False)
    assert (await source.ready()).why == "none of 1 processes is ready"
    process.heard_at -= 1.0
    supervision._feed(Tick())
    assert process.is_killed
    assert (await source.ready()).why == "none of 0 processes is ready"
    assert (await source.live()).why == "live; process 1 has hung for 10 s"
    one.close()


async def test_lines_that_no_process_of_ours_writes_change_nothing(pipe: tuple[int, int]) -> None:
    """Another program may hold the pipe of the reports; the next report is read as ever."""
    options = RunOptions("shop:service", Settings(), False, False, False, False, 0)
    supervision = Supervision(options)
    number = 1
    supervision._machine.handle(Tick(), asyncio.get_running_loop().time())
    one = child(pipe[1])
    reports = asyncio.StreamReader(limit=LINE_MAX)
    for line in FORGED:
        reports.feed_data(line + b"\n")
    reports.feed_eof()
    before = list(map(repr, supervision._machine.processes.values()))
    await supervision._read(number, one, reports)
    assert list(map(repr, supervision._machine.processes.values())) == before
    assert (one.has_begun, one.has_finished, one.is_ending, one.measured) == (False, False, False, {})

    reports = asyncio.StreamReader()
    reports.feed_data(b'{"running":3,"leads":false,"memory":1,"live":true,"ready":true}\n')
    reports.feed_eof()
    await supervision._read(number, one, reports)
    assert (one.has_begun, one.is_ready) == (True, True)
    assert supervision._machine.processes[number].running == 3
    one.close()


@pytest.mark.parametrize(
    "answer",
    [7, "x", [], {"\0": [1] * 7}, {"orders": 7}, {"orders": [1]}, {"orders": ["1"] * 7}, {"orders": [1] * 7},
     {"orders": [-1, 0, 0, 0, 0, 0.0, False]}, {"orders": [1, 0, 0, 0, 0, 1e300, False]}],
)  # fmt: skip
def test_numbers_that_can_not_be_read_are_unknown_and_not_0(answer: Any) -> None:
    with pytest.raises(Unreadable):
        _read_stats(answer)


async def test_another_process_is_asked_if_the_numbers_of_one_can_not_be_read() -> None:
    odd, good = Fake(1), Fake(2)
    odd.reported_at += 1.0
    odd.odd = {"orders": ["many"]}
    assert await FleetSource(lambda: [odd, good], dict).stats() == {"orders": Stats(ready=2)}
    assert (odd.asked, good.asked) == (["stats"], ["stats"])


def test_the_metrics_of_very_many_queues_with_long_names_are_one_report() -> None:
    snapshot: Snapshot = {}
    for number in range(LABELS_MAX):
        for name, family in FAMILIES.items():
            labels = tuple(f"{number:05}{'☃' * 195}" for _ in family.labels)
            value = Histogram([10**9] * (len(family.bounds) + 1), 1e12 / 7)
            snapshot[name, labels] = value if family.kind == "histogram" else 1e12 / 7
        for outcome in range(7):
            snapshot["tenure_messages_handled", (f"{number:05}{'☃' * 195}", f"{outcome}")] = 1.0
    line = json.dumps({"to": "measure", "answer": packed(snapshot)}) + "\n"
    assert len(line) < LINE_MAX
    assert unpacked(json.loads(line)["answer"]) == snapshot
