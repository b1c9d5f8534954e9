"""An SQLite file whose clock a wrong wall clock has moved ahead: what the doctor says, and the way back."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backends import sqlite
from tenure._backends.sqlite.clock_setting import ClockState, set_clock_back
from tenure._backends.sqlite.diagnosis import spoken
from tenure._backends.sqlite.queue import SqliteBroker
from tenure._queue.broker import EVERYTHING
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, SETTLED, Abandon, DeadLetter, Settlement
from tenure._schedule.plan import Record, plan_of
from tenure._url import Url
from tenure.cli import main
from tenure.errors import ConfigError
from tests.stores.sqlite.test_queue import QueueFile, bodies, receive

DAY, YEAR = 86_400.0, 365.25 * 86_400.0
AHEAD = 10 * YEAR


@pytest.fixture
async def queue_file(tmp_path: Path) -> AsyncIterator[QueueFile]:
    queue_file = QueueFile(tmp_path)
    yield queue_file
    await queue_file.close()
    queue_file.check()


async def move_ahead(queue_file: QueueFile, broker: SqliteBroker, by: float = AHEAD) -> None:
    """Let the wall clock be wrong for as long as it takes to be believed."""
    queue_file.wall += by
    for _ in range(5):
        await broker.send("other", [Outgoing(b"x")])
        pass_time(queue_file, 3.0)


def pass_time(queue_file: QueueFile, seconds: float) -> None:
    queue_file.clock.advance(seconds)
    queue_file.wall += seconds


async def set_back(queue_file: QueueFile, broker: SqliteBroker) -> ClockState:
    return await broker._writer.submit(lambda operations: operations.by_clock(set_clock_back, queue_file.wall))


async def test_what_is_sent_for_tomorrow_waits_again(queue_file: QueueFile) -> None:
    broker, other = queue_file.open(), queue_file.open()
    await move_ahead(queue_file, broker)
    queue_file.wall -= AHEAD
    await broker.send("q", [Outgoing(b"tomorrow", at=queue_file.wall + DAY)])
    assert bodies(await receive(broker)) == [b"tomorrow"]  # that is what goes wrong
    state = await set_back(queue_file, other)
    assert state.ahead == pytest.approx(AHEAD, abs=1.0)
    assert state.since is not None
    assert queue_file.wall - 20.0 < state.since < queue_file.wall
    await broker.send("q", [Outgoing(b"again", at=queue_file.wall + DAY)])
    assert await receive(broker) == ()
    pass_time(queue_file, DAY - 1.0)
    assert b"again" not in bodies(await receive(broker))
    pass_time(queue_file, 2.0)
    assert b"again" in bodies(await receive(broker))
    assert not (await set_back(queue_file, broker)).ahead


async def test_what_was_noted_meanwhile_is_shifted_and_nothing_is_lost_or_comes_twice(queue_file: QueueFile) -> None:
    broker, other = queue_file.open(), queue_file.open()
    await broker.send("early", [Outgoing(b"in a day", delay=DAY), Outgoing(b"for a day", expires_in=DAY)])
    await broker.send("early", [Outgoing(b"in 20 years", delay=2 * AHEAD)])
    await move_ahead(queue_file, broker)
    await broker.send("q", [Outgoing(b"now"), Outgoing(b"in a minute", delay=60.0)])
    await broker.send("short", [Outgoing(b"for a minute", expires_in=60.0)])
    await broker.send("once", [Outgoing(b"sent", id="a")])
    await broker.send("held", [Outgoing(b"held"), Outgoing(b"to be retried"), Outgoing(b"dead")])
    held, retried, dead = await receive(broker, "held", lock=1_000.0)
    verdicts = [Settlement(retried, Abandon(delay=60.0)), Settlement(dead, DeadLetter("because"))]
    assert await broker.settle(verdicts) == [SETTLED, SETTLED]
    queue_file.wall -= AHEAD
    right = queue_file.wall

    state = await set_back(queue_file, other)
    assert (state.messages, state.dead, state.ids) == (1 + 2 + 1 + 1 + 3, 1, 1)

    assert [one.enqueued_at for one in await receive(broker)] == [pytest.approx(right, abs=1.0)]
    assert await broker.settle([Settlement(held, COMPLETE)]) == [SETTLED]  # its lock had nothing to do with that
    [died] = await broker.peek_dead("held", EVERYTHING, 10)
    assert died.dead_at == pytest.approx(right, abs=1.0)
    assert await receive(broker, "held") == ()
    pass_time(queue_file, 59.0)
    assert bodies(await receive(broker)) == [b"now"]  # its lock has ended
    await broker.send("once", [Outgoing(b"doubled", id="a")])
    assert (await broker.stats("once")).ready == 1
    assert not await broker.peek_dead("short", EVERYTHING, 10)
    pass_time(queue_file, 2.0)
    assert bodies(await receive(broker)) == [b"in a minute"]
    assert bodies(await receive(broker, "held")) == [b"to be retried"]
    assert [one.reason for one in await broker.peek_dead("short", EVERYTHING, 10)] == ["expired"]
    pass_time(queue_file, 600.0)
    await broker.send("once", [Outgoing(b"after the window", id="a")])
    assert (await broker.stats("once")).ready == 2
    stats = await broker.stats("early")
    assert (stats.ready, stats.delayed) == (1, 2)
    assert stats.oldest_age == pytest.approx(677.0, abs=1.0)
    pass_time(queue_file, DAY)
    assert bodies(await receive(broker, "early")) == [b"in a day"]
    assert [one.body for one in await broker.peek_dead("early", EVERYTHING, 10)] == [b"for a day"]


async def test_a_retry_of_an_earlier_message_doesnt_wait_for_years(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x")])
    [got] = await receive(broker, lock=1_000.0)
    await move_ahead(queue_file, broker)
    assert await broker.settle([Settlement(got, Abandon(delay=60.0))]) == [SETTLED]
    queue_file.wall -= AHEAD
    await set_back(queue_file, broker)
    assert await receive(broker) == ()
    pass_time(queue_file, 61.0)
    assert bodies(await receive(broker)) == [b"x"]


async def test_handled_ids_and_rates_are_shifted(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.declare("limited", {"rate": (1, 60.0)})
    await move_ahead(queue_file, broker)
    await broker._writer.submit(lambda operations: operations.remember("q", "handled", 600.0))
    await broker.send("limited", [Outgoing(b"1"), Outgoing(b"2")])
    [first] = await receive(broker, "limited")
    assert await broker.settle([Settlement(first, COMPLETE)]) == [SETTLED]
    queue_file.wall -= AHEAD
    await set_back(queue_file, broker)
    assert list(await broker.handled("q", ["handled"])) == [True]
    assert await receive(broker, "limited") == ()
    pass_time(queue_file, 61.0)
    assert b"2" in bodies(await receive(broker, "limited"))
    pass_time(queue_file, 600.0)
    assert list(await broker.handled("q", ["handled"])) == [False]


async def test_an_id_that_was_over_by_the_wrong_clock_is_not_remembered_for_years(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await move_ahead(queue_file, broker)
    await broker._writer.submit(lambda operations: operations.remember("q", "over", 2.0))
    pass_time(queue_file, 3.0)
    queue_file.wall -= AHEAD
    await set_back(queue_file, broker)
    assert list(await broker.handled("q", ["over"])) == [False]


async def test_a_reply_queue_of_before_is_not_idle_at_once(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("replies", [Outgoing(b"x")])
    await broker.delete_when_idle("replies", 3_600.0)
    await move_ahead(queue_file, broker)
    queue_file.wall -= AHEAD
    await set_back(queue_file, broker)
    assert list(await broker.idle()) == []
    pass_time(queue_file, 601.0)
    assert list(await broker.idle()) == ["replies"]


async def test_a_boot_meanwhile_changes_nothing(queue_file: QueueFile) -> None:
    broker = queue_file.open("boot 1")
    await move_ahead(queue_file, broker)
    queue_file.wall -= AHEAD
    after = queue_file.open("boot 2")
    await set_back(queue_file, after)
    await after.send("q", [Outgoing(b"x", at=queue_file.wall + 5.0)])
    assert await receive(after) == ()
    pass_time(queue_file, 6.0)
    assert bodies(await receive(after)) == [b"x"]


async def test_what_another_program_has_written_is_left_alone(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await move_ahead(queue_file, broker)
    await broker.send("q", [Outgoing(b"x", delay=60.0, expires_in=90.0)])
    with closing(queue_file.connect()) as connection, connection:
        connection.execute("UPDATE tenure_message SET enqueued_at = 'soon', due_at = x'ff', expires_at = 'late'")
    queue_file.wall -= AHEAD
    assert (await set_back(queue_file, broker)).messages == 0
    with closing(queue_file.connect()) as connection:
        rows = connection.execute("SELECT enqueued_at, due_at, expires_at FROM tenure_message").fetchall()
    assert set(rows) == {("soon", b"\xff", "late")}


# --- the doctor and the command ---


def file_with_its_clock_ahead(folder: Path, by: float = AHEAD) -> str:
    """Return the URL of a file that a process with a wrong wall clock has written; that clock was believed before."""
    url = f"sqlite:///{folder / 'x.db'}"

    async def write() -> None:
        async with tenure.connect(url) as backend:
            await backend.queue("q").send(b"before")
        wrong = sqlite.open(Url.parse(url))
        wrong._times.wall = lambda: time.time() + by
        wrong._times._leapt_at = -1e9
        try:
            await wrong.broker.send("q", [Outgoing(b"ahead", delay=60.0)])
        finally:
            await wrong.close()

    asyncio.run(write())
    return url


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_the_doctor_says_it_and_the_command_sets_it_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = file_with_its_clock_ahead(tmp_path)
    _, said = run(capsys, "doctor", url)
    assert "10.0 years ahead, since 20" in said
    assert f"tenure migrate {url} --set-clock --yes [sqlite-clock-ahead]" in said
    code, said = run(capsys, "migrate", url, "--set-clock")
    assert code == 0
    assert "would be set back to this machine's: it was 10.0 years ahead" in said
    assert "nothing was changed; add --yes to do it" in said
    assert "sqlite-clock-ahead" in run(capsys, "doctor", url)[1]
    code, said = run(capsys, "migrate", url, "--set-clock", "--yes")
    assert code == 0
    assert "is set back to this machine's: it was 10.0 years ahead" in said
    assert "1 messages" in said
    assert "sqlite-clock-ahead" not in run(capsys, "doctor", url)[1]
    code, said = run(capsys, "migrate", url, "--set-clock", "--yes")
    assert (code, "there is nothing to do" in said) == (0, True)


async def test_schedules_go_on_with_the_next_slot(tmp_path: Path) -> None:
    url = await asyncio.to_thread(file_with_its_clock_ahead, tmp_path)
    settled = time.time() + AHEAD
    async with tenure.connect(url) as backend:
        broker = backend._connection.require_open()[1].broker
        for name, is_paused in (("hourly", False), ("paused", True)):
            record = Record(plan_of(3_600.0, "UTC", "once", 60.0), settled, paused=is_paused)
            assert (await broker.advance("q", name, None, record.encoded())).is_done
        await backend.set_clock(dry_run=True)
        hourly, _ = await backend.schedules()
        assert hourly.next is not None
        assert hourly.next > settled
        opened: Any = backend._connection.require_open()[1]
        assert "is set back" in await opened.set_clock(dry_run=False)  # the process that asks for it ends now
        hourly, _ = await backend.schedules()
        assert hourly.next is not None
        assert hourly.next > settled
        assert "there is nothing to do" in await backend.set_clock()
        hourly, paused = await backend.schedules()
        assert hourly.next is not None
        assert time.time() - 1.0 < hourly.next < time.time() + 3_600.0
        assert paused.paused


def test_a_little_ahead_is_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run(capsys, "doctor", file_with_its_clock_ahead(tmp_path, 30.0))
    assert "sqlite-clock-ahead" not in said
    assert "s ahead" in said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("sqlite:///missing.db", "--set-clock", "--yes"), 78, "missing.db"),
        (("memory:", "--set-clock"), 78, "memory: has no clock that can be set"),
        (("sqlite:///x.db", "--yes"), 2, "--yes needs --set-clock"),
        (("sqlite:///x.db", "--set-clock", "--sql"), 2, "give either"),
    ],
)
def test_what_can_not_be_set_is_refused(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found, said = run(capsys, "migrate", *arguments)
    assert (found, says in said) == (code, True), said


async def test_only_a_file_has_a_clock_that_can_be_set() -> None:
    async with tenure.connect("memory:") as backend:
        with pytest.raises(ConfigError, match="only an SQLite file has"):
            await backend.set_clock()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.2, "1 s"), (119.0, "119 s"), (120.0, "2.0 minutes"), (3 * DAY, "3.0 days"), (10 * YEAR, "10.0 years")],
)
def test_a_span_is_spoken(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


async def test_to_say_what_would_be_done_makes_no_tables(tmp_path: Path) -> None:
    async with tenure.connect(f"sqlite:///{tmp_path / 'x.db'}") as backend:
        async with backend.election("job").campaign():
            assert "there is nothing to do" in await backend.set_clock(dry_run=True)
        with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
            assert not connection.execute("SELECT name FROM sqlite_master WHERE name = 'tenure_message'").fetchall()
