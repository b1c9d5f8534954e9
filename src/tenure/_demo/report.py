"""The reports of an instance to its parent: JSON lines on its standard output."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from typing import Literal

WHY_MAX = 500
"""Characters of a reason: a pipe takes a line in one piece only if it is short."""


@dataclass(frozen=True, slots=True)
class Report:
    """An event; ``at`` is the machine's monotonic clock, the same in all its processes.

    Of a leader: it is ``elected``, it ``wrote`` for the first time, has ``split`` the work into ``count`` messages, was
    ``refused`` by the fence, has ``left`` its term. Of a worker: it ``took`` a chunk, has ``counted`` it (and will
    complete its message), or ``could not count`` it.
    """

    what: Literal[
        "standing by",
        "elected",
        "wrote",
        "split",
        "refused",
        "left",
        "took",
        "counted",
        "could not count",
        "failed",
    ]
    token: int = 0
    why: str = ""
    chunk: int = 0
    delivery: int = 0
    count: int = 0
    at: float = 0.0

    @classmethod
    def read(cls, line: bytes) -> Report:
        """Read what :func:`report` wrote."""
        return cls(**json.loads(line))


def report(what: Report) -> None:
    """Send a report, now. Any thread may call it."""
    line = json.dumps(dataclasses.asdict(dataclasses.replace(what, why=what.why[:WHY_MAX], at=time.monotonic())))
    os.write(1, line.encode() + b"\n")  # in one write, so that a kill leaves no partial line
