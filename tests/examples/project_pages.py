"""What the README of a project shows: its commands, its outputs, its files."""

from __future__ import annotations

import re
from pathlib import Path

LEFT_BEHIND = re.compile(r"^\.|^__pycache__$|^dist$|\.db\b|\.key$|\.egg-info$")
"""What a reader's run leaves in the folder of an example."""

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


def is_left_behind(path: Path, folder: Path) -> bool:
    """Tell whether a file below a *folder* is not of the repository."""
    return any(LEFT_BEHIND.search(part) for part in path.relative_to(folder).parts)


def files_of(page: Path) -> set[str]:
    """Return the files of the project itself, without the README, hidden files and what a run leaves behind."""
    files = [path for path in page.parent.rglob("*") if path.is_file() and path != page]
    return {str(path.relative_to(page.parent)) for path in files if not is_left_behind(path, page.parent)}
