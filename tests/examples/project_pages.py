"""What the README of a project shows: its commands, its outputs, its files."""

from __future__ import annotations

import re
from pathlib import Path

PROJECTS = Path(__file__).resolve().parents[2] / "examples" / "projects"


def blocks(page: Path, language: str) -> list[str]:
    """Return the lines of all blocks in a language."""
    found = re.findall(rf"(?ms)^```{language}\n(.*?)^```$", page.read_text())
    return [line for block in found for line in block.splitlines() if line]


def commands(page: Path) -> list[str]:
    """Return the commands of a page, without their comments."""
    return [re.sub(r"\s+# .*", "", line) for line in blocks(page, "sh")]


def files_listed(page: Path) -> set[str]:
    """Return the files of the project that the table at the beginning of its README links to."""
    return set(re.findall(r"(?m)^\| \[([^]]+)\]\(\1\) \|", page.read_text()))


def files_of(page: Path) -> set[str]:
    """Return the files of the project itself, without the README, hidden files and what a run leaves behind."""
    return {
        str(path.relative_to(page.parent))
        for path in page.parent.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix != ".db"
        and path.name[0] != "."
        and path != page
    }
