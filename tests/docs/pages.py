"""Pages of the documentation as tests read them: their tables, sections and links."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_CELLS = re.compile(r"(?<!\\)\|")


def text_of(page: str) -> str:
    """Return the text of a page, whose path is from the root of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def table(page: str, *head: str) -> list[list[str]]:
    """Return the rows of the table of *page* whose head begins with these cells."""
    lines = text_of(page).splitlines()
    found = [place for place, line in enumerate(lines) if _cells(line)[: len(head)] == list(head)]
    assert len(found) == 1, f"{page} has {len(found)} tables that begin with {head}"
    rows = []
    for line in lines[found[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(_cells(line))
    assert rows
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in _CELLS.split(line)[1:-1]]


def code(cell: str) -> list[str]:
    """Return what is written as code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def fenced(page: str, language: str) -> list[str]:
    """Return the blocks of code of a page that are in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """Return the text below a heading of a page, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text_of(page), re.MULTILINE)
    assert found, f"{page} has no heading {heading!r}"
    return str(re.split(rf"^#{{1,{len(found[1])}}} ", text_of(page)[found.end() :], maxsplit=1, flags=re.MULTILINE)[0])


def commands(page: str, heading: str, begin: str) -> str:
    """Return the block of code below a heading whose text begins with *begin*."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", section(page, heading), re.MULTILINE | re.DOTALL)
    found: list[str] = [block for block in blocks if block.startswith(begin)]
    assert len(found) == 1, f"{page} has {len(found)} blocks below {heading!r} that begin with {begin!r}"
    return found[0]


def broken_links(page: str) -> list[str]:
    """Return the links of a page to files or headings of the repository that don't exist."""
    found = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in _anchors(file.resolve())):
            found.append(target)
    return found


@cache
def _anchors(file: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def _slug(heading: str) -> str:
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
