"""The commands of the README, and of the page of the command line, run in the order of their page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.absent import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LINES_MAX = 130

EXAMPLES_PRINT = r"""page 1 of the report, written in term 1
page 2 .*
page 3 .*
(order \d is served, delivery 1\n){3}"""

STEPS_PRINT = r"""[\w-]+--1
[\w-]+--2
QUEUE .*
orders +2 .*
got: two kettles
got: one teapot
leading in term 1
NAME .*
nightly-report +\(none\).*
"""


def blocks(page: str) -> list[str]:
    found: list[str] = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return found


def printed(script: str, folder: Path, code: int = 0) -> str:
    """Return what a *script* prints in a new shell, which ends with *code*."""
    if (bash := shutil.which("bash")) is None:
        skip_or_fail("there is no bash")
    (folder / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        cwd=folder,
        env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "error" not in done.stderr
    return done.stdout


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES_MAX, "move something to a page of docs"


def test_the_installation_comes_first_and_then_the_examples_run(tmp_path: Path) -> None:
    [commands] = blocks(README)
    [installation] = blocks((ROOT / "docs" / "install.md").read_text())
    assert commands.startswith(installation)
    script = commands.removeprefix(installation)
    assert re.fullmatch(EXAMPLES_PRINT, got := printed(script, tmp_path)), got


def test_the_first_steps_of_the_command_line_run(tmp_path: Path) -> None:
    steps = [block for block in blocks((ROOT / "docs" / "cli.md").read_text()) if "tenure" in block]
    script = "".join(steps).replace("sleep 10", "true")
    assert re.fullmatch(STEPS_PRINT, got := printed(script, tmp_path, code=3)), got  # there is no leader at the end
