"""docs/proof.md: its commands print what it shows, its figures are those of the tests, its long runs are told once."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import proof_figures
from tests.proof.__main__ import parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "proof.md"
TEXT = PAGE.read_text(encoding="utf-8")
SHOWN = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
"""Commands, and the output that the page shows of them; ``…`` as the last line stands for more."""


def any_time(line: str) -> str:
    """Return a pattern for *line*, in which real seconds may differ."""
    return re.sub(r"(?<=hours\\ in\\ )[\d.\\]+", r"[\\d.]+", re.escape(line))


@pytest.mark.parametrize(("commands", "output"), SHOWN)
def test_the_commands_print_what_the_page_shows(commands: str, output: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        ["sh", "-c", commands], capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"PATH": path}
    )
    expected, printed = output.splitlines(), done.stdout.splitlines()
    if expected[-1] == "…":
        expected = expected[:-1]
        assert len(printed) > len(expected)
        printed = printed[: len(expected)]
    assert len(printed) == len(expected), done.stdout + done.stderr
    assert all(re.fullmatch(any_time(line), one) for line, one in zip(expected, printed, strict=True)), done.stdout


def test_all_shell_blocks_are_run_or_are_targets() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(SHOWN) == 3
    for block in blocks:
        assert block in [commands for commands, _ in SHOWN] or re.match(r"make (\w+) ARGS='", block), block
    assert set(re.findall(r"`?make ([a-z]+)", TEXT)) <= targets


def test_the_figures_are_those_of_the_tests() -> None:
    assert proof_figures.page_with_figures(TEXT) == TEXT, f"run: {proof_figures.RUN}"


def test_each_test_of_planted_bugs_is_counted() -> None:
    """A test that runs once for each planted bug, and is not counted, would be missing on the page."""
    elsewhere = {"tests/unit/test_service_types.py", "tests/unit/test_contracts.py"}  # of types, and of imports
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name in proof_figures.PLANTS:
            parametrized = [
                node.name
                for node in ast.parse(file.read_text(encoding="utf-8")).body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.endswith("_found")
                and "nothing" not in node.name
                and "not_found" not in node.name
                and any("parametrize" in ast.unparse(decorator) for decorator in node.decorator_list)
            ]
            assert proof_figures.tests_of_planted_bugs(name) == parametrized
        elif name not in elsewhere:
            assert not proof_figures.tests_of_planted_bugs(name), name


def test_each_store_has_a_row() -> None:
    kinds = proof_figures.module_of("tests/conformance/test_kinds.py")
    assert proof_figures.STORES.keys() - {"Peers"} == kinds.WHERE.keys() - {"Queued", "Observed"}


def long_runs() -> dict[str, list[str]]:
    """Return the cells of the table of long runs, by the name of the part."""
    table = TEXT.partition("## The long runs")[2].partition("## ")[0]
    rows = [row.strip("| \n").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    return {row[0]: row for row in rows if row[0] != "Part"}


def test_the_long_runs_are_the_parts_of_make_proof() -> None:
    command = re.search(r"^make proof ARGS='(.*)'$", TEXT, re.MULTILINE)
    assert command
    wanted = vars(parser().parse_args(command[1].split()))
    assert {part for part in long_runs() if part in wanted} == long_runs().keys()
    for part in ("elections", "queues", "kills", "soak"):  # those whose table says how much was wanted
        done = int(re.sub(r"\D.*", "", long_runs()[part][1].replace(",", "")))
        assert done >= wanted[part], part
    assert all(row[-1] == "0" for row in long_runs().values())


def test_the_long_runs_are_told_once() -> None:
    for page in ("CONTRIBUTING.md", "README.md", "ARCHITECTURE.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for row in long_runs().values():
            assert row[1] not in text, f"{page} has its own figures of the long runs; docs/proof.md has them"


def test_each_double_is_named_as_not_proved() -> None:
    unproved = TEXT.partition("## What is not proved")[2].partition("\n## ")[0]
    for title, tried_on in proof_figures.STORES.values():
        if "double" in tried_on or "emulator" in tried_on:
            assert f"**{title}**" in unproved, title


def test_each_place_exists() -> None:
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT)):
        page = PAGE.parent / target if target else PAGE
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in made, f"{target} has no heading for #{anchor}"
