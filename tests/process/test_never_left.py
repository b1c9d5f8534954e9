"""A program that ends while it leads ends quietly, and releases its lease if no work runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tenure.sync
from tests.durations import PATIENCE

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("never_left.py")


def ended(url: str, kind: str) -> tuple[str, str, int]:
    run = subprocess.run(
        [sys.executable, str(PROGRAM), url, kind], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return run.stdout, run.stderr, run.returncode


@pytest.mark.parametrize(
    ("kind", "keeps_lease"),
    [("main", False), ("generator", False), ("daemon thread", True)],
)
def test_a_program_that_never_leaves_its_campaign_ends(tmp_path: Path, kind: str, keeps_lease: bool) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    assert ended(url, kind) == ("leads\n", "", 0)
    with tenure.sync.connect(url) as backend:
        assert (backend.election("chair").leader() is not None) is keeps_lease


@pytest.mark.parametrize("kind", ["session", "stopped caller"])
def test_a_program_that_never_finishes_a_generator_ends(tmp_path: Path, kind: str) -> None:
    assert ended(f"sqlite:///{tmp_path}/work.db", kind) == ("", "", 0)


EXITS = """
import asyncio, os, sys, tenure

async def work(term):
    if sys.argv[2] == "child" and (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(7)

async def main():
    async with tenure.connect(sys.argv[1]) as backend:
        await backend.election("chair", ttl=600.0, retry_every=60.0).run(work)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["main", "child"])
def test_work_that_exits_ends_its_program_quietly(tmp_path: Path, where: str) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    run = subprocess.run(
        [sys.executable, "-c", EXITS, url, where], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 7)
    if where == "main":
        with tenure.sync.connect(url) as backend:
            assert backend.election("chair").leader() is None
