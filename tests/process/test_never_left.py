"""A program that falls off its end inside of a block ends, and hands its lease back where nobody works under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tenure.sync

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("never_left.py")


@pytest.mark.parametrize(
    ("kind", "keeps_lease"),
    [("main", False), ("generator", False), ("daemon thread", True)],
)
def test_a_program_that_never_leaves_its_campaign_ends(tmp_path: Path, kind: str, keeps_lease: bool) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), url, kind], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("leads\n", "", 0)
    with tenure.sync.connect(url) as backend:
        assert (backend.election("chair").leader() is not None) is keeps_lease
