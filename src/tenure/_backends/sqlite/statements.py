"""The SQL files of this folder, as statements."""

from __future__ import annotations

import re
import sqlite3
from functools import cache
from pkgutil import get_data


def _text(file: str) -> str:
    found = get_data(__package__, file)  # importlib.resources takes many modules, and with them milliseconds
    assert found is not None
    return found.decode().replace("\r\n", "\n")


@cache
def statements(file: str) -> dict[str, str]:
    """Return the statements of *file*, an SQL file of this folder, by the name above each."""
    blocks = re.split(r"^-- name: (\w+)\n", _text(file), flags=re.MULTILINE)
    return dict(zip(blocks[1::2], (block.strip() for block in blocks[2::2]), strict=True))


def script(file: str) -> list[str]:
    """Split a script into statements: ``executescript`` would end the transaction in which they are to run."""
    found, statement = [], ""
    for line in _text(file).splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement.strip())
            statement = ""
    return found
