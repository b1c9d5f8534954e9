"""Bully and Ring over the votes of a majority, checked by spin, state by state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.absent import skip_or_fail

MODEL = Path(__file__).with_name("peers.pml")
TOKENS = int(os.environ.get("TENURE_SPIN_TOKENS", "1"))
"""Claims in the models of Bully and Ring. With 2, each takes some 8 million states, 1.5 GiB and minutes."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.process]


@pytest.fixture(autouse=True)
def tools() -> None:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        skip_or_fail(f"{' and '.join(missing)} not installed (Debian: apt-get install spin gcc libc6-dev)")


def errors(folder: Path, *defines: str, deep: bool = False) -> tuple[int, int]:
    """Check the model; return the number of errors and of states.

    It is optimised only if it is *deep*: for some ten thousand states, compiling takes longer than the search.
    """
    flags = [f"-D{each}" for each in defines]
    subprocess.run(["spin", "-a", *flags, str(MODEL)], cwd=folder, check=True, capture_output=True)
    compile_it = ["gcc", "-O1" if deep else "-O0", "-w", "-DSAFETY", "-DMEMLIM=4000", "-o", "pan", "pan.c"]
    subprocess.run(compile_it, cwd=folder, check=True, capture_output=True)
    # -E: an end state without further steps is no error.
    done = subprocess.run(["./pan", "-E", "-m1000000"], cwd=folder, check=True, capture_output=True, text=True)
    found = re.search(r"errors: (\d+)", done.stdout)
    states = re.search(r"(\d+) states, stored", done.stdout)
    assert found, done.stdout
    assert states, done.stdout
    assert "max search depth too small" not in done.stdout
    if found[1] == "0":
        assert "Search not completed" not in done.stdout
    return int(found[1]), int(states[1])


@pytest.mark.parametrize("strategy", ["BULLY", "RING"])
def test_no_two_lead_and_tokens_rise(strategy: str, tmp_path: Path) -> None:
    found, states = errors(tmp_path, strategy, f"TOKENS={TOKENS}", "RESTARTS=0", deep=True)
    assert found == 0
    assert states > 10_000


# All at once, TOKENS=2 and RESTARTS=1, are 10 million states, 2 GiB and a minute: checked by hand, no error.
@pytest.mark.parametrize("bounds", ["TOKENS=2 RESTARTS=0", "TOKENS=1 RESTARTS=1", "TOKENS=2 RESTARTS=1 ONCE"])
def test_no_two_lead_and_tokens_rise_for_any_claimant_at_any_time(bounds: str, tmp_path: Path) -> None:
    found, states = errors(tmp_path, *bounds.split(), deep=True)
    assert found == 0
    assert states > 40_000


@pytest.mark.parametrize("strategy", ["BULLY", "RING"])
def test_without_faults_only_the_highest_candidate_claims(strategy: str, tmp_path: Path) -> None:
    assert errors(tmp_path, strategy, "CALM")[0] == 0


@pytest.mark.parametrize("strategy", ["BULLY", "RING"])
@pytest.mark.parametrize("faults", [["CALM"], ["RESTARTS=0"]])
def test_a_member_can_lead(strategy: str, faults: list[str], tmp_path: Path) -> None:
    assert errors(tmp_path, strategy, "REACHED", "TOKENS=1", *faults)[0] == 1


@pytest.mark.parametrize("bug", ["FORGETFUL", "TWICE"])
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    assert errors(tmp_path, bug, "TOKENS=2")[0] == 1
