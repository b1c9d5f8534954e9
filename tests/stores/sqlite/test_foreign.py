"""Rows of an SQLite file that another program has changed, added or deleted. Edits of one column: see the suites."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tenure._backends import sqlite
from tenure._backends.sqlite import wake
from tenure._backends.sqlite.boot import common_name
from tenure._backends.sqlite.queue_reader import Queue, QueueReader
from tenure._backends.sqlite.rows import death_of, history_of, history_with, log_of, settings_of, unpack
from tenure._checks import LONGEST
from tenure._lease import Granted, HeldBy, Vacant
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Claim, NoSession, QueueSettings
from tenure._queue.checks import COUNT_MAX
from tenure._queue.identity import dead_letters_of
from tenure._queue.limits import Burst
from tenure._queue.message import EXPIRED, HISTORY_MAX, Attempt, Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Settled, Settlement
from tenure._url import Url
from tenure.errors import ConfigError
from tenure.testing import ManualClock

LOCK = 30.0  # of a clock that is put forward by hand


class File:
    """A file with queues and leases, and the hand of another program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock()
        self.backend = sqlite.open(Url.parse(f"sqlite:///{path}?synchronous=normal"), clock=self.clock)
        self.broker = self.backend.broker
        self.leases = self.backend.leases

    def edit(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute(statement, values)

    async def send(self, *bodies: bytes, **fields: Any) -> None:
        await self.broker.send("q", [Outgoing(body, **fields) for body in bodies])

    async def receive(self, name: str = "q", limit: int = 10) -> list[Delivery]:
        return list((await self.broker.receive(name, limit, LOCK)).deliveries)

    async def complete(self, *deliveries: Delivery) -> None:
        answers = await self.broker.settle([Settlement(one, COMPLETE) for one in deliveries])
        assert answers == [Settled()] * len(deliveries)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[File]:
    file = File(tmp_path / "x.db")
    yield file
    await file.backend.close()


# --- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column", ["", "{", "7", "[" * 100_000, '[[1,"x"]]', b"\xff", 5, '[[9,1,"of another kind",null]]', "[null]"]
)
def test_a_history_that_is_unreadable_is_begun_anew(column: object) -> None:
    assert history_of(column) == ()
    [kept] = history_of(history_with(column, Attempt(2, 5.0, "expired")))
    assert kept == Attempt(2, 5.0, "expired")


def test_a_history_keeps_the_newest_attempts_of_any_number() -> None:
    long = json.dumps([[number, 1.0, "expired", None] for number in range(1, 5_001)])
    kept = history_of(history_with(long, Attempt(5_001, 2.0, "abandoned")))
    assert [one.number for one in kept] == list(range(5_002 - HISTORY_MAX, 5_002))


def test_a_death_is_shown_whatever_its_columns_hold() -> None:
    death = death_of(None, b"x", "soon", "{")
    assert (death.reason, death.description, death.at, death.history) == ("unreadable", "", 0.0, ())


def test_settings_that_can_not_be_are_left_out() -> None:
    row = ["long", 0, -1.0, 10, math.inf, "many", 0, 1.0, 5, math.inf, "yes"]
    assert settings_of(row) == QueueSettings(body_max=10)
    assert settings_of([5.0, 3, 1.0, 10, 9.0, 2, 5, 1.0, 6, 2.0, 1]) == QueueSettings(
        5.0, 3, 1.0, 10, 9.0, 2, (5, 1.0), (6, 2.0), paused=True
    )


@pytest.mark.parametrize("column", ["{", '{"x": 1}', "[" * 100_000, None, 7, b"\xff"])
def test_a_log_of_deliveries_that_is_unreadable_is_none(column: object) -> None:
    assert log_of(column) == []


def test_a_log_of_deliveries_is_left_out_as_a_whole_if_an_entry_is_no_burst() -> None:
    assert log_of("[[1.0, 2.0, 3]]") == [Burst(1.0, 2.0, 3)]
    assert log_of('[[1.0, 2.0, 1e300], ["x"]]') == []
    assert len(log_of(json.dumps([[1.0, 2.0, 1]] * 5_000))) < 100


@pytest.mark.parametrize(("blob", "expected"), [(None, []), ("text", []), (b"", []), (bytes(8) + b"abc", [0]), (7, [])])
def test_the_sequences_of_a_lock_are_read_as_far_as_they_go(blob: object, expected: list[int]) -> None:
    assert list(unpack(blob)) == expected


ROW: dict[str, Any] = {
    "sequence": 5,
    "id": None,
    "body": b"x",
    "headers": None,
    "deliveries": 0,
    "enqueued_at": 1.5,
    "session": None,
    "priority": 0,
    "reply_to": None,
    "correlation_id": None,
    "expires_at": None,
    "rank": 0,
}


@pytest.mark.parametrize(
    ("column", "value", "field", "expected"),
    [
        ("body", "grüße", "body", "grüße".encode()),
        ("body", None, "body", b""),
        ("body", 7, "body", b"7"),
        ("id", b"\xff", "id", "prefix-5"),
        ("id", "a\0b", "id", "a\0b"),
        ("headers", "{", "headers", {}),
        ("headers", "[" * 100_000, "headers", {}),
        ("headers", '{"a": "b", "c": [1]}', "headers", {"a": "b"}),
        ("deliveries", "many", "delivery_count", 1),
        ("deliveries", 2**40, "delivery_count", COUNT_MAX),
        ("deliveries", -5, "delivery_count", 1),
        ("enqueued_at", "now", "enqueued_at", 0.0),
        ("enqueued_at", math.inf, "enqueued_at", 0.0),
        ("session", b"\xff", "session", None),
        ("priority", 99, "priority", 9),
        ("priority", "high", "priority", 0),
        ("reply_to", 7.5, "reply_to", None),
    ],
)
def test_a_message_is_handed_out_with_what_can_be_read(
    column: str, value: object, field: str, expected: object
) -> None:
    reader = QueueReader.__new__(QueueReader)
    reader._prefix = "prefix-"
    rows = [tuple(ROW.values()), tuple((ROW | {column: value}).values()), tuple(ROW.values())]
    first, edited, last = reader._deliveries_of(Queue(0, "q", 10, 600.0, 0, 0), rows, 9, 10.0)
    assert first == last
    assert getattr(edited, field) == expected
    assert edited.token == 9
    assert edited.locked_until == 10.0


# --- claims ------------------------------------------------------------------------------------------------------


async def test_text_that_is_no_utf_8_fails_no_claim(file: File) -> None:
    await file.send(b"a", b"b", headers={"x": 1})
    file.edit("UPDATE tenure_message SET headers = CAST(x'ff' AS TEXT), id = CAST(x'ff' AS TEXT) WHERE sequence = 1")
    received = await file.receive()
    assert [one.body for one in received] == [b"a", b"b"]
    await file.complete(*received)


async def test_a_lock_whose_messages_are_unreadable_or_gone_ends(file: File) -> None:
    await file.send(b"a", b"b", b"c")
    for edited in ("sequences = 'text'", "sequences = x'0102'", "sequences = CAST(x'ff' AS TEXT)"):
        await file.receive(limit=1)
        file.edit(f"UPDATE tenure_hold SET {edited}")
        file.clock.advance(LOCK + 1)
    await file.send(b"d")
    assert [one.body for one in await file.receive()] == [b"d"]
    file.edit("DELETE FROM tenure_message")
    file.clock.advance(LOCK + 1)
    assert await file.receive() == []
    await file.send(b"e")
    assert [one.body for one in await file.receive()] == [b"e"]


async def test_a_lock_is_renewed_and_shown_whatever_its_times_are(file: File) -> None:
    await file.send(b"a")
    [held] = await file.receive()
    file.edit("UPDATE tenure_hold SET until = 'for ever', lock = 'long', since = 'then', holder = x'ff'")
    [shown] = await file.broker.peek("q", EVERY_LIVE, 10)
    assert shown.state == "locked"
    [renewed] = await file.broker.renew([held], LOCK)
    assert renewed.locked_until <= LONGEST  # type: ignore[union-attr]
    await file.complete(held)


async def test_a_message_that_was_set_to_expire_dies_when_it_is_claimed(file: File) -> None:
    await file.send(b"a", b"b")
    file.edit("UPDATE tenure_message SET expires_at = 1, priority = 7 WHERE sequence = 1")
    claims = [await file.broker.receive("q", 10, LOCK) for _ in range(2)]
    assert [one.body for claim in claims for one in claim.deliveries] == [b"b"]
    assert claims[1].due_in != 0.0, "the consumer would ask again and again"
    [died] = claims[0].died
    assert (died.sequence, died.reason) == (1, EXPIRED)


async def test_an_entry_of_no_message_expires_and_ends_for_nothing(file: File) -> None:
    await file.send(b"a")
    for sequence in (1, 77):
        file.edit("INSERT INTO tenure_expiry SELECT queue, 1, ? FROM tenure_queue WHERE name = 'q'", sequence)
        file.edit("INSERT INTO tenure_delayed SELECT queue, 1, ?, NULL FROM tenure_queue WHERE name = 'q'", sequence)
    [received] = await file.receive()
    await file.complete(received)
    assert (await file.broker.stats("q")).backlog == 0


async def test_a_time_that_is_text_is_waited_for_in_no_loop(file: File) -> None:
    await file.send(b"a", b"b", delay=5.0, expires_in=60.0)
    file.edit("UPDATE tenure_delayed SET due_at = 'soon'")
    file.edit("UPDATE tenure_expiry SET expires_at = 'soon'")
    claim = await file.broker.receive("q", 1, LOCK)
    assert (claim.deliveries, claim.due_in) == ((), None)
    file.edit("UPDATE tenure_delayed SET due_at = 9e999")
    claim = await file.broker.receive("q", 1, LOCK)
    assert claim.due_in is not None
    assert claim.due_in <= LONGEST


async def test_the_places_of_deleted_messages_are_deleted(file: File) -> None:
    await file.send(b"a", b"b")
    file.edit("DELETE FROM tenure_message")
    assert await file.receive() == []
    assert await file.broker.holding(["q"]) == [False]


async def test_a_session_of_deleted_messages_is_not_accepted_again_and_again(file: File) -> None:
    await file.send(b"a", session="s")
    file.edit("DELETE FROM tenure_message")
    held = await file.broker.accept("q", None, LOCK)
    assert isinstance(held, SessionLock)
    claim = await file.broker.receive_session(held, 10)
    assert isinstance(claim, Claim)
    assert claim.deliveries == ()
    await file.broker.release(held)
    assert isinstance(await file.broker.accept("q", None, LOCK), NoSession)


@pytest.mark.parametrize("named", ["x'ff'", "CAST(x'ff' AS TEXT)"])
async def test_a_session_whose_name_is_no_text_keeps_back_no_other(file: File, named: str) -> None:
    await file.send(b"a", session="s")
    await file.send(b"b", session="t")
    file.edit(f"UPDATE tenure_session SET session = {named} WHERE session = 's'")
    held = await file.broker.accept("q", None, LOCK)
    assert isinstance(held, SessionLock)
    assert held.session == "t"


async def test_a_dead_letter_without_its_death_is_received_and_shown(file: File) -> None:
    await file.send(b"a", b"b")
    await file.broker.settle([Settlement(one, DeadLetter("because")) for one in await file.receive()])
    file.edit("UPDATE tenure_death SET reason = x'ff', description = 7, dead_at = 'then' WHERE sequence = 1")
    shown = await file.broker.peek_dead("q", EVERYTHING, 10)
    assert [one.body for one in shown] == [b"a", b"b"]
    file.edit("DELETE FROM tenure_death WHERE sequence = 1")
    received = await file.receive(dead_letters_of("q"))
    assert [one.body for one in received] == [b"a", b"b"]
    assert received[0].death is not None
    await file.complete(*received)


async def test_a_message_that_has_a_place_already_can_be_abandoned(file: File) -> None:
    await file.send(b"a")
    [held] = await file.receive()
    file.edit("INSERT INTO tenure_ready SELECT queue, '', 0, 1 FROM tenure_queue WHERE name = 'q'")
    assert await file.broker.settle([Settlement(held, Abandon())]) == [Settled()]
    assert [one.body for one in await file.receive()] == [b"a"]


async def test_limits_that_are_unreadable_limit_nothing(file: File) -> None:
    await file.broker.declare("q", {"rate": (1, 60.0)})
    await file.send(b"a", b"b")
    await file.receive(limit=1)
    file.edit("UPDATE tenure_delivered SET bursts = '{'")
    assert [one.body for one in await file.receive()] == [b"b"]
    file.edit("UPDATE tenure_limit SET rate = 'many', paused = 'yes', max_locked = -1")
    await file.send(b"c")
    assert [one.body for one in await file.receive()] == [b"c"]


async def test_settings_and_counts_that_are_unreadable_stop_no_verb(file: File) -> None:
    await file.send(b"a")
    file.edit("UPDATE tenure_queue SET max_deliveries = 'many', dedupe_window = 'long', lock = 'x', locked = 'x'")
    assert await file.broker.settings("q") == QueueSettings()
    [held] = await file.receive()
    await file.broker.settle([Settlement(held, Abandon())])
    await file.send(b"b", id="b")
    assert (await file.broker.stats("q")).ready == 2
    assert await file.broker.names() == ["q"]


@pytest.mark.parametrize("edited", ["ahead = 9e999", "ahead = 'x'", "seen = 'x'", "seen = 1e300", "origin = x'ff'"])
async def test_the_clock_of_a_file_goes_on_after_an_edit(file: File, edited: str) -> None:
    await file.send(b"a")
    file.edit(f"UPDATE tenure_queue_clock SET {edited}")
    await file.send(b"b")
    received = await file.receive()
    assert [one.body for one in received] == [b"a", b"b"]
    assert all(0 < one.enqueued_at < LONGEST for one in received)


async def test_a_sequence_that_is_unreadable_goes_on_from_the_messages(file: File) -> None:
    await file.send(b"a")
    file.edit("UPDATE tenure_queue_clock SET sequence = 'x'")
    await file.send(b"b")
    assert [one.sequence for one in await file.receive()] == [1, 2]


async def test_a_sequence_that_can_not_rise_is_named(file: File) -> None:
    await file.send(b"a")
    file.edit("UPDATE tenure_queue_clock SET sequence = 9223372036854775807")
    with pytest.raises(ConfigError, match="tenure_queue_clock"):
        await file.send(b"b")
    file.edit("DELETE FROM tenure_queue_clock")
    with pytest.raises(ConfigError, match="tenure_queue_clock"):
        await file.send(b"b")


@pytest.mark.parametrize("record", [b"\xff", 7, 1e300])
async def test_the_record_of_a_schedule_of_another_type_can_be_replaced(file: File, record: object) -> None:
    await file.broker.advance("q", "daily", None, "{}")
    file.edit("UPDATE tenure_schedule SET record = ?", record)
    kept = (await file.broker.schedules("q")).records["daily"]
    assert (await file.broker.advance("q", "daily", kept, "{}")).is_done


# --- leases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["9223372036854775807", "'new'", "1e300", "-3"])
async def test_a_token_that_can_not_rise_names_the_lease(file: File, token: str) -> None:
    await file.leases.acquire("a", "ann#1", 10.0)
    file.edit(f"UPDATE tenure_lease SET token = {token}, holder = NULL")
    with pytest.raises(ConfigError, match=r"token of the lease 'a'.* set it to the highest token"):
        await file.leases.acquire("a", "bob#1", 10.0)
    seen = await file.leases.inspect("a")
    assert isinstance(seen, Vacant)
    assert isinstance(await file.leases.acquire("b", "bob#1", 10.0), Granted)


async def test_a_lease_with_an_endless_ttl_is_waited_for_as_long_as_any(file: File) -> None:
    await file.leases.acquire("a", "ann#1", 10.0)
    file.edit("UPDATE tenure_lease SET expires_at = 1e300, ttl = 1e300")
    held = await file.leases.acquire("a", "bob#1", 10.0)
    assert isinstance(held, HeldBy)
    assert held.remaining == sqlite.TRAITS.ttl_max
    file.clock.advance(sqlite.TRAITS.ttl_max + 1.0)
    assert isinstance(await file.leases.acquire("a", "bob#1", 10.0), Granted)


def test_a_boot_that_another_program_has_named_is_none_of_ours() -> None:
    assert common_name("booted:100", ["booted:never", "x", "booted:120"]) == "booted:120"


# --- hints -------------------------------------------------------------------------------------------------------


def test_a_flood_of_hints_is_read_in_parts() -> None:
    flood = Flood()
    reader = wake.Wake.__new__(wake.Wake)
    reader._socket = reader._notifier = flood  # type: ignore[assignment]
    reader._read()
    assert flood.notified == 1


class Flood:
    """A socket whose senders are faster than its reader, and the notifier of its topics."""

    notified = 0
    received = 0

    def recv(self, size: int) -> bytes:
        self.received += 1
        assert self.received < 1_000, "nothing else on the loop goes on"
        return b"\xff of no topic"

    def notify_all(self) -> None:
        self.notified += 1
