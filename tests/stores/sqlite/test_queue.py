"""Queues in an SQLite file only: shared commits, a file clock, locks by boot, transactions of the caller."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._backends import sqlite
from tenure._backends.sqlite import client, transaction
from tenure._backends.sqlite.address import Options
from tenure._backends.sqlite.claiming import CLAIM_MAX
from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.leases import LEASES
from tenure._backends.sqlite.operations import TABLES, Operations
from tenure._backends.sqlite.queue import SqliteBroker, _give_back
from tenure._backends.sqlite.rows import pack
from tenure._backends.sqlite.transitions import DUE_MAX
from tenure._backends.sqlite.wake import Wake
from tenure._backends.sqlite.worker import Worker
from tenure._backends.sqlite.writer import Writer, _WriterThread
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Claim, NoSession, QueueSettings
from tenure._queue.identity import dead_letters_of, partition_of
from tenure._queue.message import EXPIRED, Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Deleted,
    NotEmpty,
    Settlement,
    Verdict,
)
from tenure._runtime.process_name import process_name
from tenure._url import Url
from tenure.errors import ConfigError, LockLost, Unavailable
from tenure.events import Event, GivenBack
from tenure.testing import ManualClock, until

PATIENCE = 30.0
"""Seconds after which a wait counts as hanging."""

ORPHANS = {
    "death of no dead letter": """
        SELECT * FROM tenure_death AS death WHERE sequence NOT IN (SELECT sequence FROM tenure_message)
        OR (queue - 1, sequence) IN (SELECT queue, sequence FROM tenure_ready
        UNION SELECT queue, sequence FROM tenure_delayed UNION SELECT queue, sequence FROM tenure_deferred)""",
    "end of a ttl of what is neither ready nor delayed": """
        SELECT * FROM tenure_expiry WHERE (queue, sequence) NOT IN (
            SELECT queue, sequence FROM tenure_ready UNION SELECT queue, sequence FROM tenure_delayed)""",
    "place of no message": """
        SELECT sequence FROM (SELECT queue, sequence FROM tenure_ready UNION ALL SELECT queue, sequence
        FROM tenure_delayed UNION ALL SELECT queue, sequence FROM tenure_deferred)
        WHERE sequence NOT IN (SELECT sequence FROM tenure_message)""",
    "row of no queue": " UNION ALL ".join(
        f"SELECT queue FROM tenure_{table} WHERE queue NOT IN (SELECT queue FROM tenure_queue)"
        for table in (
            *("message", "ready", "delayed", "expiry", "deferred", "hold", "session", "death", "dedupe", "inbox"),
            *("idle", "dead_retention", "declared", "limit", "delivered"),
        )
    ),
}
"""Tables that must be empty at the end."""


class QueueFile:
    """A file, and simulated processes on it: each broker has its own threads and connections."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "x.db")
        self.clock = ManualClock()
        self.wall = 1_700_000_000.0
        self.writers: list[Writer] = []
        self._workers: list[Worker] = []

    def open(self, boot: str = "this boot", options: Options | None = None) -> SqliteBroker:
        """Return a broker of a process in *boot*."""
        options = options or Options(synchronous="normal", busy=30.0)
        times = FileClock(self.clock, lambda: self.wall, boot)
        worker = Worker(lambda: Database(self.path, options, TABLES, reads_only=True))
        wake = Wake(self.path, worker)
        writer = Writer(
            lambda: Database(self.path, options, TABLES, syncs_apart=True),
            times,
            lambda name: wake.notify(name),
        )
        self.writers.append(writer)
        self._workers.append(worker)
        return SqliteBroker(writer, worker, wake, times)

    def connect(self) -> sqlite3.Connection:
        """Return a connection like a user's."""
        return sqlite3.connect(self.path, timeout=30.0)

    def count(self, table: str) -> int:
        """Return the number of rows of *table*."""
        with closing(self.connect()) as connection:
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)

    def check(self) -> None:
        """Check that every message is in exactly one place, and that the counts agree."""
        with closing(self.connect()) as connection:
            for number, *counts in connection.execute(
                "SELECT queue, ready, locked, delayed, deferred FROM tenure_queue"
            ):
                held = connection.execute(
                    "SELECT sum(length(sequences)) / 8 FROM tenure_hold WHERE queue = ?", (number,)
                )
                found = [
                    connection.execute(f"SELECT count(*) FROM tenure_{place} WHERE queue = ?", (number,)).fetchone()[0]
                    for place in ("ready", "delayed", "deferred")
                ]
                assert counts == [found[0], held.fetchone()[0] or 0, found[1], found[2]]
            (total,) = connection.execute(
                "SELECT coalesce(sum(ready + locked + delayed + deferred), 0) FROM tenure_queue"
            ).fetchone()
            (messages,) = connection.execute("SELECT count(*) FROM tenure_message").fetchone()
            assert total == messages
            for kind, orphans in ORPHANS.items():
                assert connection.execute(orphans).fetchall() == [], kind

    async def close(self) -> None:
        for writer in self.writers:
            await writer.close()
        for worker in self._workers:
            await worker.close()


@pytest.fixture
async def queue_file(tmp_path: Path) -> AsyncIterator[QueueFile]:
    queue_file = QueueFile(tmp_path)
    yield queue_file
    await queue_file.close()
    queue_file.check()


async def receive(broker: SqliteBroker, name: str = "q", limit: int = 10, lock: float = 10.0) -> Sequence[Delivery]:
    return (await broker.receive(name, limit, lock)).deliveries


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


# --- shared commits ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def until_submitted(writer: Writer, count: int, urgent: int = 0) -> AsyncIterator[None]:
    """Keep the writer busy until the requests of the block wait for it."""
    begun, go_on = threading.Event(), threading.Event()

    def hold_up(operations: Operations) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    held_up = writer.submit(hold_up)
    try:
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        yield
        thread = writer._thread
        assert thread is not None
        await until(lambda: (thread._inbox.qsize(), len(thread._urgent)) == (count + urgent, urgent), within=PATIENCE)
    finally:
        go_on.set()
    await held_up


async def test_requests_that_come_together_share_a_commit(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"first")])
    transactions: list[int] = []
    write = Database.write

    def counted(self: Database, work: Callable[[sqlite3.Connection], object]) -> object:
        transactions.append(1)
        return write(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "write", counted)
        async with until_submitted(queue_file.writers[0], 200):
            sends = [asyncio.ensure_future(broker.send("q", [Outgoing(b"%d" % number)])) for number in range(200)]
        await asyncio.gather(*sends)
    assert len(transactions) < 20
    assert (await broker.stats("q")).ready == 201


async def test_a_bad_request_does_not_fail_the_others(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"first")])
    [writer] = queue_file.writers

    def half_way(operations: Operations) -> None:
        operations.send("q", [Outgoing(b"never")])
        raise ValueError("bad by itself")

    def unfit(operations: Operations) -> None:
        operations.send("q", [Outgoing(b"neither", id="n"), Outgoing(b"", reply_to=object())])  # type: ignore[arg-type]

    requests: list[Awaitable[object]] = [
        broker.send("q", [Outgoing(b"a")]),
        writer.submit(half_way),
        broker.send("q", [Outgoing(b"b", id="n")]),
        writer.submit(unfit),
        broker.send("q", [Outgoing(b"c")]),
    ]
    kinds = [type(answer) for answer in await asyncio.gather(*requests, return_exceptions=True)]
    assert kinds[:3] + kinds[4:] == [list, ValueError, list, list]
    assert kinds[3] in (sqlite3.InterfaceError, sqlite3.ProgrammingError)  # depends on the version of Python
    assert sorted(bodies(await receive(broker))) == [b"a", b"b", b"c", b"first"]


async def test_deaths_beside_a_bad_request_are_reported_once(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"late", id="late", expires_in=5.0)])
    queue_file.clock.advance(6.0)
    queue_file.wall += 6.0
    [writer] = queue_file.writers

    def bad(operations: Operations) -> None:
        raise ValueError("bad by itself")

    async with until_submitted(writer, 2):
        requests: list[asyncio.Future[Any]] = [asyncio.ensure_future(broker.receive("q", 1, 10.0))]
        await asyncio.sleep(0)  # so that it comes first, and shares a commit with the other
        requests.append(writer.submit(bad))
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(answers[0], Claim)
    assert isinstance(answers[1], ValueError)
    died = [*answers[0].died, *(await broker.receive("q", 1, 10.0)).died]
    assert [(one.id, one.reason) for one in died] == [("late", EXPIRED)]


async def test_a_renewal_goes_before_waiting_sends(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x")])
    got = await receive(broker)
    order: list[str] = []
    async with until_submitted(queue_file.writers[0], 20, urgent=1):
        outgoing = [Outgoing(bytes(1_000)) for _ in range(1_000)]
        sends = [asyncio.ensure_future(broker.send("q", outgoing)) for _ in range(20)]
        for send in sends:
            send.add_done_callback(lambda _: order.append("sent"))
        await asyncio.sleep(0)
        renewal = asyncio.ensure_future(broker.renew(got, 10.0))
        renewal.add_done_callback(lambda _: order.append("renewed"))
    await asyncio.gather(renewal, *sends)
    assert order[0] == "renewed"


async def test_a_locked_file_fails_all_requests_and_changes_nothing(queue_file: QueueFile) -> None:
    broker = queue_file.open(options=Options(busy=0.2))
    await broker.send("q", [Outgoing(b"before")])
    with closing(queue_file.connect()) as other:
        other.execute("BEGIN IMMEDIATE")
        asked_at = time.monotonic()
        requests = [broker.send("q", [Outgoing(b"x")]), broker.receive("q", 1, 10.0)]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable, Unavailable]
        assert time.monotonic() - asked_at < 4.5  # sooner than without the option
    assert bodies(await receive(broker)) == [b"before"]


async def test_a_full_disk_is_unavailable_and_the_next_request_tries_again(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"before")])
    [writer] = queue_file.writers

    def limit(operations: Operations) -> None:
        operations._run("PRAGMA max_page_count = 1").fetchone()  # never below the present size, so the file is full

    await writer.submit(limit)
    with pytest.raises(Unavailable, match="full"):
        await broker.send("q", [Outgoing(bytes(1_000_000))])
    assert (await broker.stats("q")).ready == 1
    await broker.send("q", [Outgoing(bytes(1_000_000))])  # a new connection, without the limit
    assert (await broker.stats("q")).ready == 2


async def test_a_newer_version_is_refused(queue_file: QueueFile) -> None:
    await queue_file.open().send("q", [Outgoing(b"x")])
    with closing(queue_file.connect()) as other, other:
        other.execute("UPDATE tenure_schema SET version = 99, written_by = '9.9' WHERE part = 'queues'")
    with pytest.raises(ConfigError, match=r"version 99, written by tenure 9\.9"):
        await queue_file.open().send("q", [Outgoing(b"x")])
    with closing(queue_file.connect()) as other, pytest.raises(ConfigError, match="version 99"):
        transaction.Within(other)


async def test_a_cancelled_claim_leaves_no_lock_behind(queue_file: QueueFile) -> None:
    broker, other = queue_file.open(), queue_file.open()
    await broker.send("q", [Outgoing(b"x"), Outgoing(b"s", session="s")])
    for call in (broker.receive("q", 1, 60.0), broker.accept("q", None, 60.0)):
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def is_back() -> bool:
        stats = await other.stats("q")
        return (stats.ready, stats.locked) == (2, 0) and queue_file.count("tenure_hold") == 0

    await until(is_back, what="the claim without a caller to be given back")
    [got] = await receive(other)
    assert got.delivery_count == 1


async def test_a_request_cancelled_before_its_turn_is_not_done(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x")])
    [writer] = queue_file.writers
    done: list[str] = []
    go_on = threading.Event()
    busy = writer.submit(lambda _: go_on.wait(PATIENCE))
    requests = [
        writer.submit(lambda _: done.append("waiting")),
        writer.submit(lambda _: done.append("urgent"), urgent=True),
        writer.submit(lambda _: done.append("wanted")),
    ]
    for one in requests[:2]:
        one.cancel()
    go_on.set()
    await asyncio.gather(busy, requests[2])
    assert done == ["wanted"]


async def test_a_claim_whose_loop_is_closed_is_given_back(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x"), Outgoing(b"s", session="s")])
    [writer] = queue_file.writers
    go_on = threading.Event()

    async def give_up() -> None:
        started = threading.Event()

        def receive_late(operations: Operations) -> Claim:
            started.set()
            go_on.wait(PATIENCE)
            return operations.receive("q", 10, 60.0)

        claiming = writer.submit(receive_late, _give_back, lasting=False)
        assert await asyncio.to_thread(started.wait, PATIENCE)
        claiming.cancel()

    await asyncio.to_thread(asyncio.run, give_up())
    go_on.set()
    await writer.submit(lambda _: None)  # now the claim is made

    async def is_back() -> bool:
        stats = await broker.stats("q")
        return (stats.ready, stats.locked) == (2, 0)

    await until(is_back)
    [got] = await receive(broker)
    assert got.delivery_count == 1


# --- the disk ----------------------------------------------------------------------------------------------------


class Disk:
    """A disk whose syncs wait until the test lets them finish."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.synced: list[tuple[str, int]] = []  # the file that was synced, and how many messages others saw then
        self.go_on = threading.Event()

    def sync(self, file: int) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM tenure_message").fetchone()
        self.synced.append((os.readlink(f"/proc/self/fd/{file}"), count))
        assert self.go_on.wait(PATIENCE)
        os.fdatasync(file)


async def answers_wait_for_the_disk(queue_file: QueueFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send, then settle, on a disk with slow syncs."""
    broker = queue_file.open(options=Options(synchronous="full", busy=30.0))
    await broker.send("q", [Outgoing(b"before")])
    deliveries = await receive(broker)
    for call, seen in (
        (lambda: broker.send("q", [Outgoing(b"x")]), 2),  # committed, not synced yet
        (lambda: broker.settle([Settlement(deliveries[0], COMPLETE)]), 1),
    ):
        disk = Disk(queue_file.path)
        monkeypatch.setattr(client, "_sync", disk.sync)
        task = asyncio.ensure_future(call())
        try:
            await until(lambda disk=disk, task=task: disk.synced or task.done())  # type: ignore[misc]
            await asyncio.sleep(0.02)
            assert not task.done()
            assert disk.synced == [(f"{queue_file.path}-wal", seen)]
        finally:
            disk.go_on.set()
            await task


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc for the name of the file")
async def test_a_lasting_answer_waits_for_the_disk(queue_file: QueueFile, monkeypatch: pytest.MonkeyPatch) -> None:
    await answers_wait_for_the_disk(queue_file, monkeypatch)


async def test_a_failed_sync_is_unavailable(queue_file: QueueFile, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = queue_file.open(options=Options(synchronous="full", busy=30.0))
    await broker.send("q", [Outgoing(b"before")])

    def fail(file: int) -> None:
        raise OSError("broken")

    monkeypatch.setattr(client, "_sync", fail)
    with pytest.raises(Unavailable, match="could not store it"):
        await broker.send("q", [Outgoing(b"x")])
    monkeypatch.undo()
    await broker.send("q", [Outgoing(b"after")])


def _answers_first(self: Any, group: list[Any]) -> None:
    self._deliver(group)
    self._database.sync()


def _forgets_the_disk(self: Any, group: list[Any]) -> None:
    self._deliver(group)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc for the name of the file")
@pytest.mark.parametrize("plant", [_answers_first, _forgets_the_disk])
async def test_an_answer_given_before_the_sync_is_detected(
    queue_file: QueueFile, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any, list[Any]], None]
) -> None:
    monkeypatch.setattr(_WriterThread, "_answer", plant)
    with pytest.raises(AssertionError):
        await answers_wait_for_the_disk(queue_file, monkeypatch)


def test_commits_of_leases_wait_for_the_disk(tmp_path: Path) -> None:
    """The leases have no sync of their own, so each commit must wait for the disk."""
    for options, level in ((Options(synchronous="full"), 2), (Options(synchronous="normal"), 1)):
        database = Database(str(tmp_path / "x.db"), options, [LEASES])
        assert database.read(lambda connection: connection.execute("PRAGMA synchronous").fetchone()) == (level,)
        database.close()


async def test_calls_come_from_several_loops_at_once(queue_file: QueueFile) -> None:
    broker = queue_file.open()

    def other_thread() -> None:
        async def work() -> None:
            for number in range(50):
                await broker.send("q", [Outgoing(b"%d" % number)])

        asyncio.run(work())

    threads = [threading.Thread(target=other_thread) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        await broker.send("q", [Outgoing(b"here")])
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert (await broker.stats("q")).ready == 200


async def test_a_message_sent_in_the_transaction_of_a_deletion_is_kept(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    for name in ("q", "other"):
        await broker.send(name, [Outgoing(b"a")])
    await broker.delete("q", force=True)
    with closing(queue_file.connect()) as third, closing(queue_file.connect()):
        third.execute("BEGIN IMMEDIATE")  # requests that come meanwhile share a commit
        requests = [
            asyncio.ensure_future(question)
            for question in (
                broker.send("other", [Outgoing(b"b")]),
                broker.send("q", [Outgoing(b"kept")]),
                broker.delete("q"),
                broker.send("other", [Outgoing(b"c")]),
            )
        ]
        await asyncio.sleep(0)
        third.rollback()
        await asyncio.gather(*requests)
    assert isinstance(requests[2].result(), NotEmpty)
    assert [one.body for one in (await broker.receive("q", 9, 10.0)).deliveries] == [b"kept"]
    assert (await broker.stats("other")).ready == 3


async def test_a_dead_letter_that_is_settled_purged_or_redriven_leaves_no_death(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"%d" % number, expires_in=90.0) for number in range(6)])
    await broker.settle([Settlement(one, DeadLetter("bad")) for one in await receive(broker)])
    assert queue_file.count("tenure_death") == 6
    dead = await receive(broker, dead_letters_of("q"), limit=4)
    verdicts: list[Verdict] = [COMPLETE, COMPLETE, Complete(remember=9.0), Abandon()]
    assert await broker.settle([Settlement(*pair) for pair in zip(dead, verdicts, strict=True)]) == [SETTLED] * 4
    queue_file.check()
    assert queue_file.count("tenure_death") == 3
    assert await broker.redrive("q", EVERYTHING, 1) == 1
    assert await broker.purge("q", EVERYTHING, 1) == 1
    queue_file.check()
    assert (queue_file.count("tenure_death"), queue_file.count("tenure_message")) == (1, 2)


async def test_limits_of_a_queue_that_an_older_version_deleted_are_not_those_of_the_next(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.declare("q", {"paused": True, "rate": (1, 90.0)})
    with closing(queue_file.connect()) as third:  # as that version does
        third.execute("DELETE FROM tenure_declared")
        third.execute("DELETE FROM tenure_queue WHERE name IN ('q', 'q$dead')")
        third.commit()
    await broker.send("other", [Outgoing(b"a")])
    assert await broker.settings("other") == QueueSettings()
    assert len(await receive(broker, "other")) == 1


async def test_a_file_of_an_older_version_tells_holders_from_then_on(queue_file: QueueFile) -> None:
    await queue_file.open().send("q", [Outgoing(b"%d" % number) for number in range(4)])
    with closing(queue_file.connect()) as third:
        for column in ("holder", "since"):
            third.execute(f"ALTER TABLE tenure_hold DROP COLUMN {column}")
        third.execute("DELETE FROM tenure_schema WHERE part = 'holders'")
        third.commit()
    several = [queue_file.open() for _ in range(4)]  # of which one adds the columns
    for claim in await asyncio.gather(*(broker.receive("q", 1, 10.0) for broker in several)):
        assert len(claim.deliveries) == 1
    with closing(queue_file.connect()) as third:
        third.execute("UPDATE tenure_hold SET holder = NULL, since = NULL WHERE sequences = ?", (pack([2]),))
        third.commit()
    holders = [one.locked_by for one in await several[0].peek("q", EVERY_LIVE, 10)]
    assert holders == [process_name(), None, process_name(), process_name()]


async def test_a_part_of_a_claim_that_is_renewed_keeps_its_holder(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"%d" % number) for number in range(3)])
    some = await receive(broker, limit=3)
    since = [one.locked_since for one in await broker.peek("q", EVERY_LIVE, 10)]
    queue_file.wall += 3
    queue_file.clock.advance(3)
    await broker.renew(some[:1], 30.0)
    shown = await broker.peek("q", EVERY_LIVE, 10)
    assert [one.locked_since for one in shown] == since
    assert {one.locked_by for one in shown} == {process_name()}
    assert shown[0].locked_until != shown[1].locked_until


async def test_a_queue_that_was_deleted_by_force_leaves_no_row(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.declare("q", {"dead_retention": 90.0, "rate": (100, 90.0), "session_rate": (2, 90.0)})
    kinds = (
        Outgoing(id="a"),
        Outgoing(expires_in=90.0),
        Outgoing(expires_in=90.0, delay=9.0),
        Outgoing(session="s", expires_in=90.0),
    )
    await broker.send("q", [message for message in kinds for _ in range(5)])
    held = await broker.accept("q", "s", 10.0)
    assert isinstance(held, SessionLock)
    assert isinstance(await broker.receive_session(held, 2), Claim)
    await broker.write_state(held, b"state")
    some = await receive(broker, limit=5)
    verdicts: list[Verdict] = [Defer(), Defer(), DeadLetter("bad"), DeadLetter("bad"), Complete(remember=9.0)]
    assert await broker.settle([Settlement(*pair) for pair in zip(some, verdicts, strict=True)]) == [SETTLED] * 5
    await receive(broker, dead_letters_of("q"), limit=1)
    await broker.receive_deferred("q", [some[0].sequence], 10.0)
    await broker.delete_when_idle("q", 90.0)
    tables = ["deferred", "expiry", "death", "hold", "session", "dedupe", "inbox", "idle", "dead_retention", "declared"]
    tables += ["limit", "delivered"]
    assert {table for table in tables if queue_file.count(f"tenure_{table}") == 0} == set()
    assert isinstance(await broker.delete("q"), NotEmpty)
    assert isinstance(await broker.delete("q", force=True), Deleted)
    tables += ["message", "ready", "delayed", "queue"]
    assert {table for table in tables if queue_file.count(f"tenure_{table}")} == set()


async def test_a_wrong_count_does_not_prevent_a_deletion(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"a")])
    with closing(queue_file.connect()) as third:
        third.execute("UPDATE tenure_queue SET ready = ready + 1")
        third.commit()
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await broker.delete("q", force=True), Deleted)
    assert await broker.names() == []
    await broker.send("other", [Outgoing(b"a")])


async def test_counting_and_claiming_do_not_grow_with_the_queue(queue_file: QueueFile) -> None:
    broker = queue_file.open()

    async def steps() -> tuple[int, int]:
        """Return the steps of SQLite's virtual machine for a count, and for a claim of one message."""
        [writer] = queue_file.writers
        counted = [0, 0]

        def look(operations: Operations) -> None:
            connection: sqlite3.Connection = operations._run.__self__.connection  # type: ignore[attr-defined]
            works: list[Callable[[], object]] = [
                lambda: operations.count("q"),
                lambda: operations.receive("q", 1, 10.0),
            ]
            for place, work in enumerate(works):
                seen = 0

                def step() -> int:
                    nonlocal seen
                    seen += 1
                    return 0

                connection.set_progress_handler(step, 1)
                work()
                connection.set_progress_handler(None, 1)
                counted[place] = seen

        await writer.submit(look)
        return counted[0], counted[1]

    async def fill(count: int) -> None:
        plain = [Outgoing(b"x") for _ in range(count)]
        await broker.send("q", plain)
        await broker.send("q", [Outgoing(b"x", delay=60.0, expires_in=90.0, priority=n % 10) for n in range(count)])
        await broker.send("q", [Outgoing(b"x", session=f"s{n}") for n in range(count)])
        await receive(broker, limit=count // 2, lock=100.0)

    await fill(20)
    few = await steps()
    await fill(5_000)
    many = await steps()
    assert many[0] < few[0] * 1.5
    assert many[1] < few[1] * 1.5


async def test_many_messages_due_at_once_are_applied_in_bounded_steps(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    count = DUE_MAX * 2 + 100
    await broker.send("q", [Outgoing(b"x", delay=5.0) for _ in range(count)])
    queue_file.clock.advance(5.0)
    queue_file.wall += 5.0
    claim = await broker.receive("q", count, 10.0)
    assert len(claim.deliveries) == DUE_MAX
    assert claim.due_in == 0.0  # claim again at once
    stats = await broker.stats("q")
    assert (stats.ready, stats.locked, stats.delayed) == (count - DUE_MAX, DUE_MAX, 0)


async def test_a_claim_is_so_small_that_a_verdict_costs_little(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x")] * (CLAIM_MAX + 5))
    claim = await broker.receive("q", CLAIM_MAX * 2, 10.0)
    assert (len(claim.deliveries), claim.due_in) == (CLAIM_MAX, 0.0)
    claim = await broker.receive("q", CLAIM_MAX * 2, 10.0)
    assert len(claim.deliveries) == 5
    assert claim.due_in is not None
    assert claim.due_in > 0


async def test_ids_are_deleted_also_in_queues_without_senders(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    for name in ("q", "idle"):
        await broker.declare(name, {"dedupe_window": 5.0})
        await broker.send(name, [Outgoing(b"x", id=f"{number}") for number in range(50)])
        claim = await broker.receive(name, 100, 10.0)
        await broker.settle([Settlement(one, Complete(remember=5.0)) for one in claim.deliveries])
    queue_file.clock.advance(6.0)
    queue_file.wall += 6.0

    async def forgotten() -> bool:
        await receive(broker)  # in one of the two only
        return queue_file.count("tenure_dedupe") == queue_file.count("tenure_inbox") == 0

    await until(forgotten)


# --- clocks ------------------------------------------------------------------------------------------------------


async def test_a_wall_clock_set_back_or_forward_breaks_no_lock(queue_file: QueueFile) -> None:
    broker, other = queue_file.open(), queue_file.open()
    await broker.send("q", [Outgoing(b"x")])
    got = await receive(broker)
    for step in (-86_400.0, 86_400.0 * 3, -3_600.0):
        queue_file.wall += step
        queue_file.clock.advance(1.0)
        assert await receive(other) == ()
        assert (await other.stats("q")).locked == 1
    queue_file.clock.advance(7.5)
    [again] = await receive(other)
    assert again.delivery_count == 2
    assert await broker.settle([Settlement(got[0], COMPLETE)]) == [LAPSED]


async def test_a_delay_continues_when_the_wall_clock_is_set_back(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x", delay=10.0), Outgoing(b"y", expires_in=20.0, delay=15.0)])
    queue_file.wall -= 3_600.0
    late = queue_file.open()  # has not seen the earlier clock
    queue_file.clock.advance(9.0)
    assert await receive(late) == ()
    queue_file.clock.advance(1.1)
    assert bodies(await receive(late)) == [b"x"]
    queue_file.clock.advance(10.0)
    [dead] = await late.peek_dead("q", EVERYTHING, 10)
    assert dead.reason == "expired"


async def test_a_delay_survives_a_boot(queue_file: QueueFile) -> None:
    broker = queue_file.open("boot 1")
    await broker.send("q", [Outgoing(b"x", delay=100.0)])
    queue_file.clock = ManualClock(5.0)  # starts again
    queue_file.wall += 60.0
    broker = queue_file.open("boot 2")
    assert await receive(broker) == ()
    queue_file.wall += 41.0
    queue_file.clock.advance(41.0)
    assert bodies(await receive(broker)) == [b"x"]


async def test_a_lock_of_another_boot_restarts(queue_file: QueueFile) -> None:
    before = queue_file.open("boot 1")
    await before.send("q", [Outgoing(b"x")])
    await receive(before, lock=10.0)
    queue_file.clock = ManualClock(5.0)
    broker = queue_file.open("boot 2")
    assert await receive(broker) == ()  # restarted: it may be live, as in another container
    queue_file.clock.advance(9.0)
    assert await receive(broker) == ()
    queue_file.clock.advance(1.5)
    [again] = await receive(broker)
    assert again.delivery_count == 2


async def test_a_lock_that_ends_later_than_possible_restarts(queue_file: QueueFile) -> None:
    """A virtual machine was set back to a snapshot of days ago, and the disk with the file was not."""
    queue_file.clock = ManualClock(1_000_000.0)
    before = queue_file.open()
    await before.send("q", [Outgoing(b"x"), Outgoing(b"y", session="s"), Outgoing(b"z", delay=100.0)])
    await before.send("other", [Outgoing(b"x")])
    await receive(before, lock=10.0)
    assert isinstance(await before.accept("q", None, 10.0), SessionLock)
    queue_file.clock = ManualClock(1_000.0)
    broker = queue_file.open()
    await broker.send(
        "other", [Outgoing(b"y")]
    )  # this updates the clock's row, which then no longer shows that it went back
    assert (await broker.stats("q")).locked == 1
    assert await receive(broker) == ()
    queue_file.clock.advance(9.9)
    assert await receive(broker) == ()
    assert isinstance(await broker.accept("q", None, 10.0), NoSession)
    queue_file.clock.advance(0.2)
    [again] = await receive(broker)
    assert again.delivery_count == 2
    assert isinstance(await broker.accept("q", None, 10.0), SessionLock)
    queue_file.clock.advance(90.0)
    assert [one.body for one in await receive(broker)] == [b"x", b"z"]


@pytest.mark.parametrize("boot", ["boot 1", "boot 2"])
async def test_a_lock_that_can_not_be_compared_is_renewed_for_the_requested_time(
    queue_file: QueueFile, boot: str
) -> None:
    """Its holder renews it after the clock went back, or in a container with another clock."""
    queue_file.clock = ManualClock(1_000_000.0)
    before = queue_file.open("boot 1")
    await before.send("q", [Outgoing(b"x"), Outgoing(b"y"), Outgoing(b"z", session="s")])
    got = await receive(before, lock=10.0)
    session = await before.accept("q", None, 10.0)
    assert isinstance(session, SessionLock)
    queue_file.clock = ManualClock(1_000.0)
    after = queue_file.open(boot)
    for held in (got[0], session):  # a part of a claim, and a session
        assert LAPSED not in await after.renew([held], 10.0)
    queue_file.clock.advance(10.1)
    assert b"x" in bodies(await receive(after))
    assert isinstance(await after.accept("q", None, 10.0), SessionLock)


async def test_one_reading_of_the_wall_clock_in_the_future_changes_nothing(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x", delay=1_000.0), Outgoing(b"y", expires_in=1_000.0)])
    queue_file.wall += 10_000.0
    await broker.send("q", [Outgoing(b"z")])
    queue_file.clock.advance(3.0)
    await broker.stats("q")
    queue_file.wall -= 10_000.0 - 3.0
    assert bodies(await receive(broker)) == [b"y", b"z"]
    await broker.send("q", [Outgoing(b"now")])
    [seen] = await receive(broker)
    assert seen.enqueued_at == pytest.approx(1_700_000_003.0)


async def test_a_wall_clock_that_stays_ahead_is_accepted(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.send("q", [Outgoing(b"x", delay=1_000.0)])
    queue_file.wall += 10_000.0
    for _ in range(4):
        assert await receive(broker) == ()
        queue_file.clock.advance(3.0)
        queue_file.wall += 3.0
    assert bodies(await receive(broker)) == [b"x"]


async def test_a_part_of_a_claim_can_be_renewed(queue_file: QueueFile) -> None:
    broker, other = queue_file.open(), queue_file.open()
    await broker.send("q", [Outgoing(b"%d" % number) for number in range(6)])
    got = await receive(broker)
    queue_file.clock.advance(6.0)
    assert len(await broker.renew([got[1], got[4]], 10.0)) == 2
    queue_file.clock.advance(6.0)
    await broker.renew([got[4]], 10.0)
    assert bodies(await receive(other)) == [b"0", b"2", b"3", b"5"]
    queue_file.clock.advance(6.0)
    assert bodies(await receive(other)) == [b"1"]
    assert await broker.settle([Settlement(one, COMPLETE) for one in got]) == [LAPSED] * 4 + [SETTLED, LAPSED]


# --- transactions of the caller ----------------------------------------------------------------------------------


async def held(broker: SqliteBroker) -> Delivery:
    await broker.send("q", [Outgoing(b"x", id="x")])
    [got] = await receive(broker)
    return got


def effects(queue_file: QueueFile) -> int:
    return queue_file.count("effect")


@pytest.fixture
async def user(queue_file: QueueFile) -> AsyncIterator[sqlite3.Connection]:
    await queue_file.open().declare("q", {})
    with closing(queue_file.connect()) as connection:
        with connection:
            connection.execute("CREATE TABLE effect (what TEXT)")
        yield connection


async def test_an_effect_and_its_message_are_committed_together(
    queue_file: QueueFile, user: sqlite3.Connection, caplog: object
) -> None:
    backend = sqlite.open(
        Url.parse(f"sqlite:///{queue_file.path}")
    )  # with real clocks, as the user's connection has them
    try:
        broker = backend.broker
        await broker.send("q", [Outgoing(b"x", id="x")])
        [got] = (await broker.receive("q", 1, 10.0)).deliveries
        user.row_factory = sqlite3.Row
        with transaction.transact(user) as queues:
            user.execute("INSERT INTO effect VALUES ('done')")
            assert not queues.handled("q", "x")
            queues.complete(got, remember=60.0)
            assert queues.handled("q", "x")
            [sent] = queues.send("next", Outgoing(b"y", headers={"a": 1}))
        assert effects(queue_file) == 1
        assert await broker.handled("q", ["x", "z"]) == [True, False]
        [after] = (await broker.receive("next", 1, 10.0)).deliveries
        assert (after.id, after.body, dict(after.headers)) == (sent, b"y", {"a": 1})
        assert await broker.stats("q") == Stats()
        assert await broker.settle([Settlement(got, COMPLETE)]) == [LAPSED]
        with pytest.raises(LockLost, match="roll back"), transaction.transact(user) as queues:
            user.execute("INSERT INTO effect VALUES ('twice')")
            queues.complete(got)
        assert effects(queue_file) == 1
    finally:
        await backend.close()


async def test_a_rollback_undoes_queue_operations(queue_file: QueueFile, user: sqlite3.Connection) -> None:
    backend = sqlite.open(Url.parse(f"sqlite:///{queue_file.path}"))
    try:
        broker = backend.broker
        await broker.send("q", [Outgoing(b"x")])
        [got] = (await broker.receive("q", 1, 10.0)).deliveries
        with pytest.raises(ZeroDivisionError), transaction.transact(user) as queues:
            user.execute("INSERT INTO effect VALUES ('done')")
            queues.complete(got)
            queues.send("next", Outgoing(b"y"))
            raise ZeroDivisionError
        assert effects(queue_file) == 0
        assert await broker.stats("next") == Stats()
        assert await broker.settle([Settlement(got, COMPLETE)]) == [SETTLED]
    finally:
        await backend.close()


async def test_a_transaction_of_the_users_own(queue_file: QueueFile, user: sqlite3.Connection) -> None:
    with pytest.raises(ConfigError, match="BEGIN IMMEDIATE"):
        transaction.Within(user).send("q", Outgoing(b"x"))
    user.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="open on this connection"), transaction.transact(user):
        pass
    queues = transaction.Within(user)
    with pytest.raises(ConfigError, match="message 1 of 2"):
        queues.send("q", Outgoing(b"x"), Outgoing("y"))  # type: ignore[arg-type]
    queues.send("q", Outgoing(b"x"))
    user.commit()
    queues.committed()
    assert (await queue_file.open().stats("q")).ready == 1


async def test_a_transaction_is_committed_once(queue_file: QueueFile, user: sqlite3.Connection) -> None:
    with pytest.raises(ConfigError, match="commits at the end of its block"), transaction.transact(user) as queues:
        queues.send("q", Outgoing(b"x"))
        queues.commit()
    assert (await queue_file.open().stats("q")).ready == 0
    user.execute("BEGIN IMMEDIATE")
    queues = transaction.Within(user)
    queues.send("q", Outgoing(b"x"))
    queues.commit()
    assert (await queue_file.open().stats("q")).ready == 1


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_under_the_pump_settles_in_its_own_transaction(
    queue_file: QueueFile, user: sqlite3.Connection, is_async: bool
) -> None:
    happened: list[Event] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(message: tenure.Message | tenure.BlockingMessage) -> None:
        with closing(queue_file.connect()) as connection, transaction.transact(connection) as queues:
            connection.execute("INSERT INTO effect VALUES (?)", (message.id,))
            queues.complete(message)
        if effects(queue_file) == 20:
            loop.call_soon_threadsafe(stop.set)

    async def work_on_the_loop(message: tenure.Message) -> None:
        work(message)

    async with tenure.connect(f"sqlite:///{queue_file.path}", on_event=happened.append) as backend:
        queue = backend.queue("q")
        await queue.send_batch([Outgoing(b"x") for _ in range(20)])
        async with asyncio.timeout(PATIENCE):
            await queue.consume(work_on_the_loop if is_async else work, stop=stop)
        assert await queue.stats() == Stats()
    assert effects(queue_file) == 20
    assert [event for event in happened if not isinstance(event, GivenBack)] == []


class Lingering(sqlite3.Connection):
    """Stays in its finished commit until the pump has renewed the lock."""

    renewed: threading.Event

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        cursor = super().execute(statement, *values)
        if statement == "COMMIT":
            self.renewed.clear()
            assert self.renewed.wait(PATIENCE)
        return cursor


async def test_a_renewal_between_the_commit_and_its_report_is_no_loss(
    queue_file: QueueFile, user: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Event] = []
    errors: list[BaseException] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    Lingering.renewed = threading.Event()

    def work(message: tenure.BlockingMessage) -> None:
        with closing(sqlite3.connect(queue_file.path, isolation_level=None, factory=Lingering)) as connection:
            with transaction.transact(connection) as queues:
                queues.complete(message)
            loop.call_soon_threadsafe(stop.set)

    renew = SqliteBroker.renew

    async def renewing(self: SqliteBroker, *arguments: Any) -> Any:
        answers = await renew(self, *arguments)
        asyncio.get_running_loop().call_later(0.1, Lingering.renewed.set)  # when the pump has the answer
        return answers

    monkeypatch.setattr(SqliteBroker, "renew", renewing)
    async with tenure.connect(f"sqlite:///{queue_file.path}", on_event=happened.append) as backend:
        queue = backend.queue("q", lock=4.0)
        await queue.send(b"x")
        async with asyncio.timeout(PATIENCE):
            await queue.consume(work, stop=stop, on_error=lambda _, error: errors.append(error))
        assert await queue.stats() == Stats()
    assert errors == []
    assert happened == []


async def test_a_failed_commit_leaves_the_lock(queue_file: QueueFile, user: sqlite3.Connection) -> None:
    user.executescript(
        "PRAGMA foreign_keys = ON; CREATE TABLE a (id INTEGER PRIMARY KEY);"
        "CREATE TABLE b (a REFERENCES a DEFERRABLE INITIALLY DEFERRED);"
    )
    noted: list[bool | None] = []

    class Noting(tenure.Message):
        def note_settling(self) -> None:
            noted.append(None)

        def note_settled(self, stands: bool = True) -> None:
            noted.append(stands)

    async with tenure.connect(f"sqlite:///{queue_file.path}") as backend:
        queue = backend.queue("q")
        await queue.send(b"x")
        [got] = await queue.receive()
        message = Noting(got.delivery, got._context)
        with pytest.raises(sqlite3.IntegrityError), transaction.transact(user) as queues:
            user.execute("INSERT INTO b VALUES (1)")
            queues.complete(message)
        assert noted == [None, False]
        await got.complete()


async def test_a_send_in_a_transaction_wakes_waiting_consumers(queue_file: QueueFile, user: sqlite3.Connection) -> None:
    backend = sqlite.open(Url.parse(f"sqlite:///{queue_file.path}"))
    try:
        hints = backend.broker.hints("q")
        await anext(hints)
        with transaction.transact(user) as queues:
            queues.send("q", Outgoing(b"x"))
        async with asyncio.timeout(PATIENCE):
            await anext(hints)
    finally:
        await backend.close()


def test_a_file_without_queues_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection, pytest.raises(ConfigError, match="has no queues"):
        transaction.Within(connection)
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(ConfigError, match="has no file"):
        transaction.Within(connection)


# --- other processes ---------------------------------------------------------------------------------------------

SENDER = """
import asyncio, sys
import tenure

async def main():
    async with tenure.connect(sys.argv[1]) as backend:
        await backend.queue("q").send(b"from afar")

asyncio.run(main())
"""


async def test_processes_wake_each_other(queue_file: QueueFile) -> None:
    backend = sqlite.open(Url.parse(f"sqlite:///{queue_file.path}"))
    try:
        broker = backend.broker
        hints = broker.hints("q")
        await anext(hints)
        assert (await broker.receive("q", 1, 10.0)).deliveries == ()
        sender = subprocess.Popen([sys.executable, "-c", SENDER, f"sqlite:///{queue_file.path}"])
        async with asyncio.timeout(PATIENCE):
            while not (got := (await broker.receive("q", 1, 10.0)).deliveries):
                await anext(hints)
        assert bodies(got) == [b"from afar"]
        assert await asyncio.to_thread(sender.wait) == 0
    finally:
        await backend.close()


def test_partitions_are_the_same_in_every_process() -> None:
    assert partition_of("customer 7", 16) == partition_of(b"customer 7", 16) == "partition-5"
    assert len({partition_of(str(number), 16) for number in range(1_000)}) == 16
    with pytest.raises(ConfigError, match="partitions"):
        partition_of("x", 0)


async def test_dead_letters_with_a_delay_are_redriven_too(queue_file: QueueFile) -> None:
    broker = queue_file.open()
    await broker.declare("q", {"max_deliveries": 1})
    await broker.send("q", [Outgoing(b"x")])
    await broker.settle([Settlement(one, Abandon()) for one in await receive(broker)])
    await broker.settle([Settlement(one, Abandon(60.0)) for one in await receive(broker, dead_letters_of("q"))])
    queue_file.check()
    assert await broker.redrive("q", EVERYTHING, None, dry_run=True) == 1
    assert await broker.redrive("q", EVERYTHING, None) == 1
    assert await broker.stats("q") == Stats(ready=1)
