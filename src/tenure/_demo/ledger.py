"""The ledger: the work's own SQLite database, in which a leader stores the results, so that the next can continue.

Every write of a leader passes the fence in its own transaction: an old leader that was slow, and not dead, is refused.
The same transaction stores the key of each result, so that one that is delivered twice counts once.
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
from itertools import groupby
from pathlib import Path

from tenure._demo.computation import Count, Total
from tenure._demo.job import Chunk, File, Job
from tenure._demo.messages import DeadChunk, Result
from tenure.backends.sqlite import Fence
from tenure.errors import ConfigError

BUSY_TIMEOUT = 5.0
"""Seconds to wait while another process writes; each write takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the work, in chunks; ``again`` is the number of repeated results."""

    counted: int
    dead: int
    of: int
    again: int
    finished: bool

    @property
    def settled(self) -> int:
        """The chunks that are counted or dead."""
        return self.counted + self.dead

    @property
    def left(self) -> int:
        """The chunks that are not."""
        return self.of - self.settled


class Ledger:
    """The database, opened by one process."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT)
        # Only processes are killed here, not the machine; so a commit need not wait for the disk.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    @classmethod
    def create(cls, path: Path, job: Job) -> Ledger:
        """Create the database, and store the job.

        Raises:
            ConfigError: The file can't be created or written there.
        """
        try:
            ledger = cls(path)
            ledger._prepare(job)
        except sqlite3.Error as error:
            raise ConfigError(f"the work's database {path} can't be created: {error}; use another folder") from error
        return ledger

    def _prepare(self, job: Job) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(resources.files(__package__).joinpath("ledger.sql").read_text(encoding="utf-8"))
        with self._transaction():
            self._connection.execute("INSERT INTO job VALUES (?, ?)", (os.fsencode(job.folder), job.pace))
            rows = ((one.number, os.fsencode(file.path), file.parsed) for one in job.chunks for file in one.files)
            self._connection.executemany("INSERT INTO file (chunk, path, parsed) VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    # --- reading ---

    def job(self) -> Job:
        """Return the job."""
        folder, pace = self._connection.execute("SELECT folder, pace FROM job").fetchone()
        return Job(os.fsdecode(folder), tuple(self._chunks()), pace)

    def remaining(self) -> list[Chunk]:
        """List the chunks that are not done yet."""
        return self._chunks("WHERE chunk NOT IN (SELECT chunk FROM result UNION SELECT chunk FROM dead)")

    def _chunks(self, where: str = "") -> list[Chunk]:
        rows = self._connection.execute(f"SELECT chunk, path, parsed FROM file {where} ORDER BY id")  # noqa: S608
        return [
            Chunk(number, tuple(File(os.fsdecode(path), bool(parsed)) for _, path, parsed in group))
            for number, group in groupby(rows, key=lambda row: row[0])
        ]

    def counts(self) -> list[Count]:
        """Return all counts; a file that was counted twice is there twice."""
        rows = self._connection.execute(
            "SELECT path, size, lines, words, nodes, digest, error FROM count JOIN file ON file.id = file ORDER BY id"
        )
        return [Count(os.fsdecode(path), *counted) for path, *counted in rows]

    def result(self) -> Result | None:
        """Return the first stored result, as its worker sent it."""
        first = self._connection.execute("SELECT chunk, instance FROM result ORDER BY rowid LIMIT 1").fetchone()
        if first is None:
            return None
        chunk, instance = first
        rows = self._connection.execute(
            "SELECT size, lines, words, nodes, digest, error FROM count JOIN file ON file.id = file "
            "WHERE chunk = ? ORDER BY id",
            (chunk,),
        )
        return Result(chunk, instance, tuple(rows))

    def dead(self) -> list[DeadChunk]:
        """Return the chunks that could not be counted."""
        rows = self._connection.execute("SELECT chunk, reason, why, deliveries FROM dead ORDER BY chunk")
        return [DeadChunk(*row) for row in rows]

    def progress(self) -> Progress:
        """Return the progress of the work."""
        row = self._connection.execute(
            "SELECT (SELECT count(*) FROM result), (SELECT count(*) FROM dead), "
            "(SELECT count(DISTINCT chunk) FROM file), (SELECT coalesce(sum(came - 1), 0) FROM result), "
            "EXISTS (SELECT 1 FROM outcome)"
        )
        counted, dead, of, again, finished = row.fetchone()
        return Progress(counted, dead, of, again, bool(finished))

    def outcome(self) -> Total | None:
        """Return the total, if the work is finished."""
        row = self._connection.execute("SELECT total FROM outcome").fetchone()
        return Total(**json.loads(row[0])) if row else None

    # --- writing: only with the token of a term ---

    def begin_term(self, token: int, instance: int) -> None:
        """Store the leader of a new term; from now on, earlier leaders can't write.

        Raises:
            TermLost: A newer term has written already.
        """
        with self._fenced(token) as connection:
            progress = self.progress()
            row = (token, instance, progress.settled)
            connection.execute("INSERT INTO term (token, instance, found) VALUES (?, ?, ?)", row)

    def record(self, token: int, results: Sequence[Result]) -> None:
        """Store results. For a result that is stored already, only its repetition is counted.

        Raises:
            TermLost: A newer term has written already. Nothing is written.
        """
        with self._fenced(token) as connection:
            for result in results:
                if self._is_new(result, token):
                    self._count(result)
                    # Dead before its result came: its last worker had not yet sent the result of its message.
                    connection.execute("DELETE FROM dead WHERE chunk = ?", (result.chunk,))

    def _is_new(self, result: Result, token: int) -> bool:
        (came,) = self._connection.execute(
            "INSERT INTO result (chunk, instance, token, came) VALUES (?, ?, ?, 1) "
            "ON CONFLICT (chunk) DO UPDATE SET came = came + 1 RETURNING came",
            (result.chunk, result.instance, token),
        ).fetchone()
        return bool(came == 1)

    def _count(self, result: Result) -> None:
        files = self._connection.execute("SELECT id FROM file WHERE chunk = ? ORDER BY id", (result.chunk,))
        rows = [(file, *count) for (file,), count in zip(files, result.counts, strict=True)]
        self._connection.executemany("INSERT INTO count VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def record_dead(self, token: int, letters: Sequence[DeadChunk]) -> None:
        """Store the chunks that could not be counted; stored ones stay.

        Raises:
            TermLost: A newer term has written already. Nothing is written.
        """
        with self._fenced(token) as connection:
            connection.executemany(
                "INSERT INTO dead SELECT :chunk, :reason, :why, :deliveries, :token "
                "WHERE :chunk NOT IN (SELECT chunk FROM result) ON CONFLICT DO NOTHING",
                [dataclasses.asdict(letter) | {"token": token} for letter in letters],
            )

    def finish(self, token: int, total: Total) -> None:
        """Store the total: the work is finished.

        Raises:
            TermLost: A newer term has written already. Nothing is written.
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
