"""The picture of the demonstration needs nothing else, shows what the demonstration prints, and comes from a script."""

from __future__ import annotations

import ast
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tenure._cli.demo_display import _STYLES, COLUMNS

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "demo.svg"
SOURCES = [*(ROOT / "src" / "tenure" / "_demo").glob("*.py"), ROOT / "src" / "tenure" / "_cli" / "demo_display.py"]
NAMESPACE = "http://www.w3.org/2000/svg"
CELL = 12.2
"""The width of a character in the picture."""
LITERAL_LEAST = 10
"""Characters that a text of the sources has at least besides its figures, so that it does not match any line."""


def lines_of(picture: Path) -> list[str]:
    """Return the lines of the terminal in *picture*, from its title to the end."""
    rows: dict[float, str] = {}
    for text in ElementTree.parse(picture).getroot().iter(f"{{{NAMESPACE}}}text"):
        if "title" in text.get("class", ""):
            continue
        row, column = float(text.get("y", 0)), round(float(text.get("x", 0)) / CELL)
        rows[row] = rows.get(row, "").ljust(column) + (text.text or "").replace("\xa0", " ")
    return [line.rstrip() for _, line in sorted(rows.items()) if line.strip()]


def joined(lines: list[str]) -> Iterator[str]:
    """Yield *lines*, with wrapped ones in one piece."""
    whole = ""
    for line in lines:
        if whole and re.match(r"  +(?!\d+\.\d\d s )", line):
            whole += f" {line.strip()}"
        else:
            yield from [whole] if whole else []
            whole = line
    yield whole


def texts_of_sources() -> list[str]:
    """Return regular expressions for the texts in the demonstration's sources."""
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in texts if isinstance(text, str)) >= LITERAL_LEAST:
                found.append("".join(re.escape(text) if isinstance(text, str) else ".+" for text in texts))
    return found


def check(picture: Path) -> None:
    """Check that *picture* shows what the demonstration prints, of the moment in which all has happened."""
    head, titles, *rest = joined(lines_of(picture))
    leader = re.fullmatch(r"tenure demo  election 'demo': led by (instance \d+), (term \d+)", head)
    assert leader, head
    assert titles.split() == [column.title for column in COLUMNS]
    instances = [line for line in rest if re.match(r"\d+ +\d+ ", line)]
    states = "|".join(_STYLES)
    assert [row for row in instances if not re.fullmatch(rf"\d+ +\d+ +\d+ +(message \d+ +)?({states}).*", row)] == []
    assert sum(row.endswith("killed") for row in instances) == 2
    bars = [line for line in rest if re.match(r"(lease|work |queue) [━─]+  ", line)]
    assert len(bars) == 3
    texts = texts_of_sources()
    events = [line for line in rest if line not in instances and line not in bars]
    unknown = [line for line in events if not any(re.fullmatch(rf"( *[\d.]+ s  |✓ ){text}", line) for text in texts)]
    assert unknown == []
    told = "\n".join(events)
    for part in (
        "a worker, was killed",
        "the leader, was killed",
        "was refused",
        "was dead-lettered",
        "✓ a worker and",
    ):
        assert part in told
    assert f"{leader[1]} is elected: {leader[2]}" in told


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    source = PICTURE.read_text(encoding="utf-8")
    assert set(re.findall(r"\w+://[^\s\"'<>]+", source)) == {NAMESPACE}
    assert set(re.findall(r"url\((.)", source)) == {"#"}
    assert re.findall(r"@import|@font-face|<(?:image|script|use|foreignObject)|href", source) == []


def test_the_picture_names_no_place_on_the_machine_where_it_was_taken() -> None:
    shown = "\n".join(lines_of(PICTURE))
    assert not re.search(rf"(?<![\w-]){re.escape(socket.gethostname())}-\d", shown)  # as in the name of a holder
    assert set(re.findall(r"(?<!\w)/[\w./-]+", shown)) <= set(re.findall(r"/tmp/tenure-demo-\w+/poison\.py", shown))


def test_the_picture_shows_what_the_demonstration_prints() -> None:
    check(PICTURE)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the terminal of the tests is that of Linux")
def test_the_script_takes_such_a_picture(tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    for number in range(20):
        (tmp_path / "input" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n")
    script = [sys.executable, str(ROOT / "scripts" / "demo_picture.py"), "--input", "input", "--output", "demo.svg"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(tmp_path / "demo.svg")
