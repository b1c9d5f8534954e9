"""The page on migrating: programs of before and after run, and exclude each other while both are there."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest

import tenure
from tenure._backends.redis.address import Options
from tenure.events import Reason
from tests.docs.pages import ROOT, broken_links, code, table, text_of
from tests.servers import Postgres, Redis, ZooKeeper, private, url_of

asyncpg = pytest.importorskip("asyncpg")

PAGE = "docs/migrating.md"
FOLDER = ROOT / "examples" / "migrating"
PAGES = 3
"""What each program writes while it has the lock."""


@contextmanager
def started(programs: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Start these programs at the same time; yield their common log; in the end, all must have ended well."""
    log = folder / "log"
    with ExitStack() as stack:
        out = stack.enter_context(log.open("ab"))
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, FOLDER / f"{program}.py"],
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    cwd=folder,
                )
            )
            for program in programs
        ]
        try:
            yield log
            assert [process.wait(120) for process in running] == [0] * len(running)
        finally:
            for process in running:
                process.kill()


def until_waiting(count: Callable[[], int], wanted: int, log: Path) -> None:
    """Wait until so many programs wait for the lock that the test has; fail if one writes meanwhile."""
    give_up = time.monotonic() + 60
    while count() < wanted:
        assert time.monotonic() < give_up, f"{count()} of {wanted} wait"
        assert log.read_text() == ""
        time.sleep(0.05)
    assert log.read_text() == ""


def reports(lines: list[str]) -> list[str]:
    """Return the authors of the reports, in order; fails if one has begun before the last one has ended."""
    assert len(lines) % PAGES == 0
    authors = []
    for place in range(0, len(lines), PAGES):
        author = lines[place].partition(":")[0]
        assert lines[place : place + PAGES] == [f"{author}: page {page}" for page in range(1, PAGES + 1)], lines
        authors.append(author)
    return authors


def test_two_at_once_are_noticed() -> None:
    alone = [f"before: page {page}" for page in range(1, PAGES + 1)]
    assert reports(alone * 2) == ["before"] * 2
    for mixed in (
        alone[:2] + [one.replace("before", "after") for one in alone] + alone[2:],
        alone[:2] + alone + alone[2:],
    ):
        with pytest.raises(AssertionError):
            reports(mixed)


# --- side by side, on real servers ------------------------------------------------------------------------------------

MIXED = ("before", "after", "before", "after")


@pytest.mark.process
def test_a_lock_of_redis_py_and_a_leader_exclude_each_other(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    with private(Redis) as server, redis.Redis.from_url(server.url) as client:

        def standing_by() -> int:
            return sum(count for _, count in client.pubsub_numsub(*client.pubsub_channels()))

        environment = {"REDIS_URL": server.url, "TENURE_URL": f"{server.url}?lease_prefix="}
        lock = client.lock("nightly-report", timeout=100)
        assert lock.acquire()
        with started([f"redis_lock_{one}" for one in MIXED], environment, tmp_path) as log:
            until_waiting(standing_by, MIXED.count("after"), log)
            lock.release()
        assert sorted(reports(log.read_text().splitlines())) == sorted(MIXED)


@pytest.mark.process
def test_an_election_of_kazoo_and_a_leader_exclude_each_other(tmp_path: Path) -> None:
    url = url_of(ZooKeeper)
    environment = {"ZOOKEEPER": urlsplit(url).netloc, "TENURE_URL": f"{url.replace('/?', '/jobs?')}&dialect=kazoo"}
    client = pytest.importorskip("kazoo.client").KazooClient(environment["ZOOKEEPER"])
    client.start()
    try:
        lock = client.Lock("/jobs/nightly-report", "test")
        assert lock.acquire(timeout=60)
        with started([f"kazoo_{one}" for one in MIXED], environment, tmp_path) as log:
            until_waiting(lambda: len(client.get_children("/jobs/nightly-report")), len(MIXED) + 1, log)
            lock.release()
        assert sorted(reports(log.read_text().splitlines())) == sorted(MIXED)
    finally:
        client.stop()
        client.close()


@pytest.fixture
def database() -> Iterator[str]:
    """Yield the URL of a database with tenure's schema."""
    with private(Postgres) as server:
        with tenure.sync.connect(server.url) as backend:
            backend.migrate()
        yield server.url


def listening(database: str) -> int:
    """Return how many connections listen for the changes of elections."""

    async def main() -> int:
        connection = await asyncpg.connect(database)
        try:
            found = await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'listen %'")
        finally:
            await connection.close()
        assert isinstance(found, int)
        return found

    return asyncio.run(main())


@pytest.mark.process
def test_an_advisory_lock_and_a_bridge_exclude_each_other(database: str, tmp_path: Path) -> None:
    kinds = ("before", "bridge", "before", "bridge")

    async def main() -> Path:
        connection = await asyncpg.connect(database)
        await connection.execute("SELECT pg_advisory_lock(4217)")
        with started([f"advisory_lock_{kind}" for kind in kinds], {"DATABASE_URL": database}, tmp_path) as log:
            give_up = time.monotonic() + 60
            while (await waiting(connection)) < 3:  # both old ones, and the bridge that leads
                assert time.monotonic() < give_up
                assert log.read_text() == ""
                await asyncio.sleep(0.05)
            await connection.close()
        return log

    async def waiting(connection: Any) -> int:
        found = await connection.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        assert isinstance(found, int)
        return found

    log = asyncio.run(main())
    assert sorted(reports(log.read_text().splitlines())) == sorted(kinds)


@pytest.mark.process
def test_a_bridge_and_the_new_program_exclude_each_other(database: str, tmp_path: Path) -> None:
    kinds = ("after", "bridge", "after", "bridge")
    with tenure.sync.connect(database) as backend, ExitStack() as leading:
        leading.enter_context(backend.election("nightly-report").campaign())
        with started([f"advisory_lock_{kind}" for kind in kinds], {"DATABASE_URL": database}, tmp_path) as log:
            until_waiting(partial(listening, database), len(kinds) + 1, log)  # the test listens, too
            leading.close()
    assert sorted(reports(log.read_text().splitlines())) == sorted(kinds)


@pytest.mark.process
def test_the_service_that_replaces_celery_runs(tmp_path: Path) -> None:
    with started(["celery_after"], {}, tmp_path) as log:
        pass
    assert log.read_text() == "2 kettle served\n"
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        assert backend.queue("orders").stats().delayed == 1


def test_the_programs_of_before_can_be_read() -> None:
    found = sorted(FOLDER.glob("*_before.py"))
    assert [one.stem.removesuffix("_before") for one in found] == ["advisory_lock", "celery", "kazoo", "redis_lock"]
    for file in found:
        compile(file.read_text(encoding="utf-8"), file, "exec")
        assert file.with_name(file.name.replace("_before", "_after")).exists()
        assert f"(../examples/migrating/{file.name})" in text_of(PAGE)


# --- the words --------------------------------------------------------------------------------------------------------


def test_the_times_of_client_go_are_compared_with_ours() -> None:
    timing = tenure.Timing(15.0)
    shown = {row[0]: row[1:] for row in table(PAGE, "client-go", "its default", "tenure")}
    assert f"`ttl`, {timing.ttl:g} s" in shown["`LeaseDuration`"][1]
    assert f"{timing.work_window:g} s after" in shown["`RenewDeadline`"][1]
    assert f"{timing.window:g} s" in shown["`RenewDeadline`"][1]
    assert f"`retry_every`, {timing.retry_every:g} s" in shown["`RetryPeriod`"][1]
    assert f"`renew_every`, {timing.renew_every:g} s" in shown["`RetryPeriod`"][1]


def test_names_of_tenure_in_the_tables_exist() -> None:
    """The names in the column of tenure are attributes, options, events or commands that exist."""
    known = {
        *dir(tenure),
        *dir(tenure.events),
        *dir(tenure.Term),
        *dir(tenure.Election),
        *dir(tenure.Queue),
        *dir(tenure.Backend),
        *dir(tenure.Service),
        *dir(tenure.TypedQueue),
        *dir(tenure.Message),
        *dir(tenure.DeadLetters),
        *dir(tenure.CandidateStatus),
        *tenure.ElectionOptions.__annotations__,
        *tenure.ConsumeOptions.__annotations__,
        *tenure.SendOptions.__annotations__,
        *tenure.QueueOptions.__annotations__,
        *tenure.RetryPolicy.__dataclass_fields__,
        *inspect.signature(tenure.Message.complete).parameters,
        *inspect.signature(tenure.Election.run).parameters,
        *Options.__dataclass_fields__,
        *get_args(Reason),
    }
    rows = re.findall(r"^\| .* \|$", text_of(PAGE), re.MULTILINE)
    ours = [name for row in rows for name in code(re.split(r"(?<!\\)\|", row)[-2])]
    assert len(ours) > 40
    unknown = []
    for name in ours:
        if " " in name or "://" in name or name.startswith("-"):
            continue  # a command, a URL or an option of the command line
        parts = re.split(r"[.(=]", name.removeprefix("tenure."))[:2]
        unknown += [name for part in parts if part.isidentifier() and part not in known | OBJECTS]
    assert unknown == []


OBJECTS = {"term", "election", "backend", "service", "queue", "orders", "finally", "asyncio", "timeout"}
"""Names that stand for an object in the tables, and those of Python."""


def test_links_lead_somewhere() -> None:
    assert broken_links(PAGE) == []


def test_a_lock_of_redis_py_without_an_end_keeps_tenure_out() -> None:
    """What the page warns of: it must be deleted by hand."""
    redis = pytest.importorskip("redis")
    name = f"job-{secrets.token_hex(4)}"
    url = url_of(Redis)
    with redis.Redis.from_url(url) as client, tenure.sync.connect(f"{url}?lease_prefix=") as backend:
        assert client.lock(name).acquire()
        found = backend.election(name).leader()
        assert found is not None
        assert found.remaining is None
        client.delete(name)
        assert backend.election(name).leader() is None
