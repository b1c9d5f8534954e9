"""The main thread may end while other threads lead: Python waits for these, and tenure's threads must go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="it starts no thread after the main one"),
]

PROGRAM = Path(__file__).with_name("main_ended.py")


def test_elections_outlive_the_main_thread(tmp_path: Path) -> None:
    program = [sys.executable, str(PROGRAM), f"sqlite:///{tmp_path}/work.db"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    output = (sorted(ended.stdout.splitlines()), ended.stderr)
    assert output == (["a host was found", "a loop led on", "a thread led on"], "")
    assert ended.returncode == 0
