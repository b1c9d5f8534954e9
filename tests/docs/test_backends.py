"""The page of traits equals the traits that the backends declare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_equals_the_traits() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "traits.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
