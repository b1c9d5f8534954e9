"""The facts that ``describe()`` and ``tenure doctor`` show of an SQLite file."""

from __future__ import annotations

import sqlite3

from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.schema import versions
from tenure._opened import Fact

LIBRARY_SOUND = (3, 51, 3)  # fixes the reset of the write-ahead log, broken since 3.7.0


def diagnose(database: Database) -> list[Fact]:
    """Return facts about the file and the library.

    Raises:
        DiskFullError: There is no room to send anything.
    """
    database.require_room()
    journal = database.read(lambda connection: connection.execute("PRAGMA journal_mode").fetchone()[0])
    known = database.read(versions)
    sound = ".".join(map(str, LIBRARY_SOUND))
    return [
        Fact("file", database.path),
        Fact(
            "SQLite",
            sqlite3.sqlite_version,
            ""
            if sqlite3.sqlite_version_info >= LIBRARY_SOUND
            else f"before {sound}, a rare race at the reset of the log can damage a file; use {sound} or newer",
            "sqlite-version",
        ),
        Fact("journal mode", journal),
        Fact(
            "synchronous",
            database.options.synchronous,
            "" if database.options.synchronous == "full" else "a power failure can lose the newest changes, tokens too",
            "sqlite-synchronous",
        ),
        *(Fact(f"tables of {part}", f"version {version}, by {by}") for part, (version, by) in known.items()),
    ]
