"""The fence in SQLite: an old token is refused in the transaction of the write, in every mode and in races."""

from __future__ import annotations

import multiprocessing
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

from tenure._backends.sqlite.fence import Fence
from tenure.errors import ConfigError, TermLost

MODES: dict[str, dict[str, Any]] = {
    "deferred, the default": {},
    "immediate": {"isolation_level": "IMMEDIATE"},
    "exclusive": {"isolation_level": "EXCLUSIVE"},
}
if sys.version_info >= (3, 12):
    MODES["autocommit=False"] = {"autocommit": False}

EXPLICIT: dict[str, dict[str, Any]] = {"isolation_level=None": {"isolation_level": None}}
if sys.version_info >= (3, 12):
    EXPLICIT["autocommit=True"] = {"autocommit": True}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "resource.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode=WAL; CREATE TABLE report (line TEXT);")
    return path


@pytest.fixture(params=MODES)
def connection(request: pytest.FixtureRequest, file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, **MODES[request.param])) as connection:
        yield connection


@pytest.fixture
def plain(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield connection


def lines(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return [line for (line,) in connection.execute("SELECT line FROM report ORDER BY rowid")]


def write(connection: sqlite3.Connection, token: int) -> None:
    Fence(connection).check("report", token)
    connection.execute("INSERT INTO report VALUES (?)", (f"by {token}",))
    connection.commit()


def test_equal_and_newer_tokens_pass_and_older_ones_do_not(connection: sqlite3.Connection, file: Path) -> None:
    for token in (3, 3, 7):
        write(connection, token)
    with pytest.raises(TermLost, match=r"token 6 is too old for 'report': a leader with token 7"):
        write(connection, 6)
    connection.rollback()
    write(connection, 8)
    assert lines(file) == ["by 3", "by 3", "by 7", "by 8"]


def test_resources_are_guarded_apart(connection: sqlite3.Connection) -> None:
    fence = Fence(connection)
    fence.check("report", 9)
    fence.check("other", 1)
    connection.commit()
    with pytest.raises(TermLost):
        fence.check("report", 8)


def test_a_rollback_undoes_the_token(connection: sqlite3.Connection, file: Path) -> None:
    write(connection, 1)
    Fence(connection).check("report", 5)
    connection.execute("INSERT INTO report VALUES ('by 5')")
    connection.rollback()
    write(connection, 2)
    assert lines(file) == ["by 1", "by 2"]


def test_the_first_check_can_be_rolled_back_with_its_table(connection: sqlite3.Connection, file: Path) -> None:
    Fence(connection).check("report", 5)
    connection.rollback()
    write(connection, 2)
    assert lines(file) == ["by 2"]


def test_check_and_write_are_one_transaction(connection: sqlite3.Connection, file: Path) -> None:
    """Between the check and the commit, no other connection can write, with an older token or a newer one."""
    write(connection, 1)
    Fence(connection).check("report", 2)
    with closing(sqlite3.connect(file, timeout=0)) as other, pytest.raises(sqlite3.OperationalError, match="locked"):
        Fence(other).check("report", 3)
    connection.execute("INSERT INTO report VALUES ('by 2')")
    connection.commit()
    assert lines(file) == ["by 1", "by 2"]


def test_a_refusal_leaves_no_transaction_that_python_began(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, closing(sqlite3.connect(file, timeout=0)) as other:
        write(connection, 2)
        with pytest.raises(TermLost):
            Fence(connection).check("report", 1)
        assert not connection.in_transaction
        write(other, 3)


def test_a_refusal_keeps_a_transaction_that_the_caller_began(plain: sqlite3.Connection) -> None:
    plain.execute("BEGIN IMMEDIATE")
    Fence(plain).check("report", 2)
    with pytest.raises(TermLost):
        Fence(plain).check("report", 1)
    assert plain.in_transaction


@pytest.mark.parametrize("mode", EXPLICIT.values(), ids=EXPLICIT.keys())
def test_without_a_transaction_the_check_is_refused(file: Path, mode: dict[str, Any]) -> None:
    with closing(sqlite3.connect(file, **mode)) as connection:
        with pytest.raises(ConfigError, match="BEGIN IMMEDIATE first"):
            Fence(connection).check("report", 1)
        connection.execute("BEGIN IMMEDIATE")
        Fence(connection).check("report", 1)
        connection.execute("COMMIT")


def test_an_old_snapshot_does_not_let_an_old_token_pass(plain: sqlite3.Connection, file: Path) -> None:
    """A deferred transaction that has read before another wrote can't write any more: SQLite refuses it."""
    with closing(sqlite3.connect(file)) as other:
        write(other, 1)
        plain.execute("BEGIN")
        plain.execute("SELECT * FROM report").fetchall()
        write(other, 3)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            Fence(plain).check("report", 2)


def test_the_callers_row_factory_does_not_matter(plain: sqlite3.Connection) -> None:
    plain.row_factory = lambda cursor, row: {"no": "number"}
    plain.execute("BEGIN IMMEDIATE")
    Fence(plain).check("report", 2)
    with pytest.raises(TermLost, match="token 2"):
        Fence(plain).check("report", 1)


def test_another_missing_table_is_not_mistaken_for_the_fence(plain: sqlite3.Connection) -> None:
    plain.execute("CREATE TABLE tenure_fence (unknown TEXT)")
    plain.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="no column named resource"):
        Fence(plain).check("report", 2)


@pytest.mark.parametrize("token", [0, -1, True, 1.0, "7", None, 2**63])
def test_an_invalid_token_is_refused(plain: sqlite3.Connection, token: Any) -> None:
    plain.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="token must be"):
        Fence(plain).check("report", token)


@pytest.mark.parametrize("resource", ["", None, 7])
def test_an_invalid_resource_is_refused(plain: sqlite3.Connection, resource: Any) -> None:
    plain.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="resource must be"):
        Fence(plain).check(resource, 1)


def _race(file: Path, tokens: list[int], begin: str | None, answers: SimpleQueue[int]) -> None:
    connection = sqlite3.connect(file, isolation_level=None if begin else "DEFERRED", timeout=0)
    passed = 0
    for token in tokens:
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            try:
                if begin:
                    connection.execute(begin)
                write(connection, token)
                passed += 1
                break
            except sqlite3.OperationalError:  # locked, or begun before another wrote: begin again
                connection.rollback()
            except TermLost:
                connection.rollback()
                break
    answers.put(passed)


@pytest.mark.process
@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN", None])
def test_no_old_token_passes_when_processes_race(file: Path, begin: str | None) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers: SimpleQueue[int] = spawn.SimpleQueue()
    hands = [list(range(start, 300, 4)) for start in range(1, 5)]
    processes = [spawn.Process(target=_race, args=(file, hand, begin, answers)) for hand in hands]
    for process in processes:
        process.start()
    passed = sum(answers.get() for _ in processes)
    for process in processes:
        process.join()
    written = [int(line.removeprefix("by ")) for line in lines(file)]
    assert written == sorted(written)  # in the order of commits: never an older one after a newer one
    assert len(written) == passed >= 4


def test_errors_of_the_database_are_not_translated(file: Path) -> None:
    answers: list[Callable[[], None]] = []
    with closing(sqlite3.connect(file)) as connection:
        answers.append(lambda: Fence(connection).check("report", 1))
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        answers[0]()
