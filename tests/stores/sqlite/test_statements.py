"""The statements of SQLite: bound in a way that every Python takes without a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tenure

ROOT = Path(tenure.__file__).parent
FOLDERS = [ROOT, *(Path(__file__).parents[3] / folder for folder in ("examples", "tests", "benchmarks"))]


@pytest.mark.parametrize("file", sorted(ROOT.glob("_backends/sqlite/*.sql")), ids=lambda file: file.name)
def test_a_statement_has_plain_binds_or_names_and_not_both(file: Path) -> None:
    text = re.sub(r"--.*", "", file.read_text())
    for statement in text.split(";"):
        plain, named = re.search(r"\?", statement), re.search(r":[a-z]\w*", statement)
        assert not (plain and named), statement


def test_no_statement_has_numbered_binds() -> None:
    # Up to 3.12.3, Python takes ?1 for a name, and warns where the values come in order: an error under -W error.
    files = [file for folder in FOLDERS for file in [*folder.rglob("*.sql"), *folder.rglob("*.py")]]
    found = [f"{file}: {line.strip()}" for file in files for line in _code(file) if re.search(r"[=(, ]\?[1-9]\b", line)]
    assert found == []


def test_no_block_leaves_a_connection_open() -> None:
    # A connection's own block commits and doesn't close; Python 3.13 warns when such a one is collected.
    files = [file for folder in FOLDERS for file in folder.rglob("*.py")]
    found = [f"{file}: {line.strip()}" for file in files for line in _code(file) if "with sqlite3.connect(" in line]
    assert [one for one in found if "_code(file)" not in one] == []


def _code(file: Path) -> list[str]:
    return [line.partition("--")[0] for line in file.read_text(encoding="utf-8").splitlines() if "# Up to" not in line]
