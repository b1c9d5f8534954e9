"""The state of a run: written by ``run``, drawn by a display."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from tenure import Stats
from tenure._demo.job import Job
from tenure._demo.ledger import Progress

State = Literal["starting", "standing by", "leading", "killed", "ended", "failed"]


@dataclass(slots=True)
class InstanceState:
    """An instance, as seen from outside."""

    number: int
    pid: int
    state: State = "starting"
    token: int = 0
    chunk: int = 0  # the one that it counts; 0 for none
    counted: int = 0  # chunks

    @property
    def name(self) -> str:
        """Its name for people."""
        return f"instance {self.number}"

    @property
    def is_busy(self) -> bool:
        """Whether it is alive, and handles a message."""
        return self.chunk > 0 and self.state in ("standing by", "leading")


@dataclass(slots=True)
class RunState:
    """A run, as it is now."""

    job: Job
    url: str
    election: str
    ttl: float
    progress: Progress
    queue: Stats = field(default_factory=Stats)
    leader: int = 0  # the instance's number; 0 while there is none
    token: int = 0  # the newest seen
    lease_left: float = 0.0
    plain: str = "counting"
    elapsed: float = 0.0
    instances: list[InstanceState] = field(default_factory=list)
    news: list[tuple[float, str]] = field(default_factory=list)  # seconds since the beginning, and what happened


class Display(Protocol):
    """Shows a run to people."""

    def draw(self, run: RunState) -> None:
        """Show the state as it is now; called about ten times a second."""
        ...

    def tell(self, at: float, text: str) -> None:
        """Show a line about an event, *at* seconds since the beginning."""
        ...
