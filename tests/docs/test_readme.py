"""The commands of the README run in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.absent import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text()

PRINTS = r"""[\w-]+--1
[\w-]+--2
QUEUE .*
orders +2 .*
got: two kettles
got: one teapot
leading in term 1
NAME .*
nightly-report +\(none\).*
page 1 of the report, written in term 2
page 2 .*
page 3 .*
(order \d is served, delivery 1\n){3}"""


def blocks() -> list[str]:
    found: list[str] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_the_installation_comes_first() -> None:
    first, *rest = blocks()
    assert first.startswith("git clone ")
    assert [line for block in rest for line in block.splitlines() if re.match(r"git|pip|\. ", line)] == []
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings[:5] == ["Install", "First steps", "Two examples", "A service", "See it work"]


def test_the_first_steps_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    if (bash := shutil.which("bash")) is None:
        skip_or_fail("there is no bash")
    _, *rest = blocks()
    steps = [block for block in rest if not block.startswith("make ")]  # make has tests of its own
    script = "".join(steps).replace("sleep 10", "true")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        cwd=tmp_path,
        env={"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTS, done.stdout), done.stdout
    assert "error" not in done.stderr
