"""The tables of tenure in an SQLite file, and their versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from tenure._backends.sqlite.statements import script
from tenure._version import VERSION
from tenure.errors import ConfigError


class TableSet(NamedTuple):
    """A set of tables with a version of its own: ``script`` is a file of this folder that creates them."""

    name: str
    version: int
    script: str


def versions(connection: sqlite3.Connection) -> dict[str, tuple[int, str]]:
    """Return the version of each part in the file, and the version of tenure that wrote it."""
    exists = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'tenure_schema'"
    if connection.execute(exists).fetchone() is None:
        return {}
    rows = connection.execute("SELECT part, version, written_by FROM tenure_schema ORDER BY part")
    return {part: (version, written_by) for part, version, written_by in rows}


def missing(connection: sqlite3.Connection, parts: Sequence[TableSet], path: str) -> list[TableSet]:
    """Return those of *parts* that the file at *path* doesn't have yet.

    Raises:
        ConfigError: A newer tenure has written one of them.
    """
    known = versions(connection)
    for part in parts:
        version, written_by = known.get(part.name, (part.version, ""))
        if version != part.version:  # none is older: there has been no other version yet
            raise ConfigError(
                f"the tables of {part.name} in {path} have version {version}, written by tenure {written_by}, "
                f"and this tenure reads version {part.version}; use tenure {written_by} or newer, or another file"
            )
    return [part for part in parts if part.name not in known]


def create(connection: sqlite3.Connection, parts: Sequence[TableSet]) -> None:
    """Create the tables of *parts*. Inside a transaction."""
    known = versions(connection)  # another process may have been first
    for part in parts:
        if part.name not in known:
            for statement in script(part.script):
                connection.execute(statement)
            row = (part.name, part.version, VERSION)
            connection.execute("INSERT INTO tenure_schema (part, version, written_by) VALUES (?, ?, ?)", row)
