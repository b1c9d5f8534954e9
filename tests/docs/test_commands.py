"""The page of commands equals the command line; the page of the command line names each command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tenure._cli.group import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_equals_the_commands() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "commands.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_table_names_each_command_in_the_order_of_help() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `tenure (\w+)", page, re.MULTILINE) == list(COMMANDS)
