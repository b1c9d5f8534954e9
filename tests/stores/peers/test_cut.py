"""Five hosts, each with its own network; the leader's is cut off repeatedly. No two lead at once.

With each strategy, each way of cutting is tried three times; ``TENURE_LONG=1`` makes it long.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

import pytest

from tests.absent import skip_or_fail
from tests.long import LONG
from tests.process.netlab import NetLab, why_not

CUTS = int(os.environ.get("TENURE_CUTS", "150" if LONG else "27"))
HOSTS = 5
TTL = 1.0
MEMBER = Path(__file__).with_name("fleet_member.py")
PATIENCE = 60.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(60 + 20 * CUTS)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a member: the time, by the clock that all processes of this machine share, and the term."""

    at: float
    what: str
    token: int
    host: int


class Log:
    """One file that all members append to, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Entry] = []
        self._read = 0

    def refresh(self) -> list[Entry]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                news = file.read()
            whole = news[: news.rfind(b"\n") + 1]
            self._read += len(whole)
            for each in whole.decode().splitlines():
                at, what, token, holder = each.split()
                self.lines.append(Entry(float(at), what, int(token), int(holder.split("-")[0].rpartition(".")[2]) - 1))
        return self.lines

    def newest(self) -> Entry | None:
        """Return the beginning of the newest term."""
        return max((line for line in self.refresh() if line.what == "in"), key=lambda line: line.token, default=None)

    def wait_for_newer(self, token: int, *, not_on: int | None = None) -> Entry:
        """Wait until a term above *token* has begun."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up:
            newest = self.newest()
            if newest is not None and newest.token > token and newest.host != not_on:
                return newest
            time.sleep(0.02)
        raise AssertionError(f"no term newer than {token} within {PATIENCE:g} s; {self.lines[-5:]}")


@pytest.fixture
def lab() -> Iterator[NetLab]:
    trouble = why_not()
    if trouble is not None:
        skip_or_fail(trouble)
    with NetLab(HOSTS) as made:
        yield made


@pytest.mark.parametrize("strategy", ["lowest", "bully", "ring"])
def test_a_leader_that_is_cut_off_stops_before_the_next_leads(strategy: str, lab: NetLab, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    addresses = ",".join(f"{lab.address(host)}:7000" for host in range(HOSTS))
    environment = os.environ | {"TENURE_PEERS_KEY": "only for this test, only here"}
    for host in range(HOSTS):
        url = f"peers://{addresses}?me={lab.address(host)}:7000&ttl_max={TTL}&strategy={strategy}"
        lab.start(host, [sys.executable, str(MEMBER), url, str(TTL), str(log.path)], env=environment, stderr=DEVNULL)
    leader = log.wait_for_newer(0)
    rng = random.Random(1)
    cuts = len(range(["lowest", "bully", "ring"].index(strategy), CUTS, 3))
    took: list[float] = []
    for number in range(cuts):
        time.sleep(rng.random() * TTL / 2)  # at any moment between two renewals
        leader = log.newest() or leader
        ways = ("both", "out", "in")[number % 3]
        cut_at = time.monotonic()
        lab.cut_off(leader.host, ways=ways)
        successor = log.wait_for_newer(leader.token, not_on=leader.host)
        took.append(successor.at - cut_at)
        lab.heal()
        leader = successor
    assert len({line.token for line in log.refresh() if line.what == "in"}) > cuts
    overlaps = overlapping(log.lines)
    print(f"{strategy}: {cuts} cuts, {len(overlaps)} overlaps, next in after {sorted(took)[len(took) // 2]:.2f} s")
    assert not overlaps, overlaps


def overlapping(lines: list[Entry]) -> list[str]:
    """Return every entry of a term that came after a newer term had begun, and every token that did not rise."""
    found = []
    newest = 0
    for line in sorted(lines, key=lambda line: line.at):
        if line.what == "in":
            if line.token <= newest:
                found.append(f"{line} began after term {newest}")
            newest = max(newest, line.token)
        elif line.what == "act" and line.token < newest:
            found.append(f"{line} acted after term {newest} had begun")
    return found


def test_an_overlap_is_detected() -> None:
    lines = [
        Entry(1.0, "in", 1, 0),
        Entry(2.0, "act", 1, 0),
        Entry(3.0, "in", 2, 1),
        Entry(3.1, "act", 1, 0),
    ]
    assert len(overlapping(lines)) == 1
    assert len(overlapping([*lines, Entry(4.0, "in", 2, 0)])) == 2
