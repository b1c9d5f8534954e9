"""The ledger: the work's own SQLite database, in which a leader keeps what is done, so that the next can go on.

Every write of a leader goes through the fence in the transaction that it is part of: a leader that was taken for dead,
and isn't, is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tenure.backends.sqlite import Fence
from tenure.demo.computation import Count, Total
from tenure.demo.job import File, Job
from tenure.errors import ConfigError

PATIENCE = 5.0
"""Seconds to wait while another process writes; each write takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work has come."""

    done: int
    of: int
    finished: bool


class Ledger:
    """The database, opened by one process."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
        # Only processes die here, not the machine; for that, a commit need not wait for the disk.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    @classmethod
    def create(cls, path: Path, job: Job) -> Ledger:
        """Make the database, and write the job down.

        Raises:
            ConfigError: The file can't be made or written there.
        """
        try:
            ledger = cls(path)
            ledger._prepare(job)
        except sqlite3.Error as error:
            raise ConfigError(f"the work's database {path} can't be made: {error}; keep it elsewhere") from error
        return ledger

    def _prepare(self, job: Job) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(resources.files(__package__).joinpath("ledger.sql").read_text(encoding="utf-8"))
        with self._transaction():
            self._connection.execute("INSERT INTO job VALUES (?, ?)", (os.fsencode(job.folder), job.pace))
            rows = ((os.fsencode(file.path), file.parsed) for file in job.files)
            self._connection.executemany("INSERT INTO file (path, parsed) VALUES (?, ?)", rows)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    # --- reading ---

    def job(self) -> Job:
        """Return the job."""
        folder, pace = self._connection.execute("SELECT folder, pace FROM job").fetchone()
        return Job(os.fsdecode(folder), tuple(self._files()), pace)

    def remaining(self) -> list[File]:
        """List the files that nobody has counted yet."""
        return self._files("WHERE id NOT IN (SELECT file FROM count)")

    def _files(self, where: str = "") -> list[File]:
        rows = self._connection.execute(f"SELECT path, parsed FROM file {where} ORDER BY id")  # noqa: S608
        return [File(os.fsdecode(path), bool(parsed)) for path, parsed in rows]

    def counts(self) -> list[Count]:
        """Return what has been counted."""
        rows = self._connection.execute(
            "SELECT path, size, lines, words, nodes, digest, error FROM count JOIN file ON file.id = file ORDER BY id"
        )
        return [Count(os.fsdecode(path), *counted) for path, *counted in rows]

    def progress(self) -> Progress:
        """Tell how far the work has come."""
        row = self._connection.execute(
            "SELECT (SELECT count(*) FROM count), (SELECT count(*) FROM file), EXISTS (SELECT 1 FROM outcome)"
        )
        done, of, finished = row.fetchone()
        return Progress(done, of, bool(finished))

    def outcome(self) -> Total | None:
        """Return the total, if the work is finished."""
        row = self._connection.execute("SELECT total FROM outcome").fetchone()
        return Total(**json.loads(row[0])) if row else None

    # --- writing: only under a term's token ---

    def begin_term(self, token: int, instance: int) -> None:
        """Write down who leads from now on; whoever led before can't write any more.

        Raises:
            TermLost: A newer term has written already.
        """
        with self._fenced(token) as connection:
            (found,) = connection.execute("SELECT count(*) FROM count").fetchone()
            connection.execute("INSERT INTO term (token, instance, found) VALUES (?, ?, ?)", (token, instance, found))

    def record(self, token: int, counts: Sequence[Count]) -> None:
        """Write down what was counted.

        Raises:
            TermLost: A newer term has written already. Nothing is written.
        """
        with self._fenced(token) as connection:
            rows = ((c.size, c.lines, c.words, c.nodes, c.digest, c.error, token, os.fsencode(c.path)) for c in counts)
            connection.executemany("INSERT INTO count SELECT id, ?, ?, ?, ?, ?, ?, ? FROM file WHERE path = ?", rows)

    def finish(self, token: int, total: Total) -> None:
        """Write down the total: the work is finished.

        Raises:
            TermLost: A newer term has written already.
        """
        with self._fenced(token) as connection:
            text = json.dumps(dataclasses.asdict(total))
            connection.execute("INSERT INTO outcome (id, total, token) VALUES (1, ?, ?)", (text, token))

    @contextmanager
    def _fenced(self, token: int) -> Iterator[sqlite3.Connection]:
        with self._transaction():
            Fence(self._connection).check("ledger", token)
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
