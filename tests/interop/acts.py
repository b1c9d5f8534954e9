"""The record of what contestants did while they believed to lead, and the check that no two did so at once.

All contestants append to one file, each line in one write, so that the file has the true order of their lines::

    begin NAME CONTESTANT     it believes that it leads: written after it has won
    act NAME CONTESTANT       it acts as the leader
    end NAME CONTESTANT       it does not lead any more: written before it gives the leadership up

For a contestant that was killed, the one that killed it writes ``end`` as soon as its process is gone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, ACT, END = "begin", "act", "end"


@dataclass(frozen=True)
class Act:
    """One line of the record."""

    what: str
    name: str
    """Of the election."""
    contestant: str


class Record:
    """The file, which each contestant opens for itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def close(self) -> None:
        os.close(self._file)

    def note(self, what: str, name: str, contestant: str) -> None:
        os.write(self._file, f"{what} {name} {contestant}\n".encode())

    def acts(self) -> list[Act]:
        """Return all complete lines so far."""
        lines = self.path.read_text().split("\n")[:-1]  # the last one may be incomplete
        return [Act(*line.split(" ", 2)) for line in lines]


def overlaps(acts: Sequence[Act]) -> list[str]:
    """Return each time that a contestant began or acted while another had not ended; and each act outside a term."""
    leading: dict[str, str] = {}
    found = []
    for number, act in enumerate(acts, 1):
        other = leading.get(act.name, "")
        if act.what == BEGIN:
            if other:
                found.append(f"line {number}: {act.contestant} begins to lead {act.name} while {other} leads it")
            leading[act.name] = act.contestant
        elif other != act.contestant:
            found.append(
                f"line {number}: {act.contestant} writes '{act.what}' for {act.name}, led by {other or 'none'}"
            )
        elif act.what == END:
            del leading[act.name]
    return found


def terms(acts: Sequence[Act]) -> Counter[str]:
    """Return how many times each contestant has begun to lead."""
    return Counter(act.contestant for act in acts if act.what == BEGIN)
