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
    chunk: int = 0  # the chunk that it counts; 0 for none
    counted: int = 0  # chunks

    @property
    def name(self) -> str:
        """The name shown to people."""
        return f"instance {self.number}"

    @property
    def is_busy(self) -> bool:
        """Whether it is alive, and handles a message."""
        return self.chunk > 0 and self.state in ("standing by", "leading")


@dataclass(slots=True)
class RunState:
    """The present state of a run."""

    job: Job
    url: str
    queue_url: str
    election: str
    ttl: float
    progress: Progress
    queue: Stats = field(default_factory=Stats)
    leader: int = 0  # the instance's number; 0 while there is none
    token: int = 0  # the newest seen
    lease_left: float | None = 0.0  # None if the store doesn't know
    plain: str = "counting"
    elapsed: float = 0.0
    instances: list[InstanceState] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)  # seconds since the beginning, and a text


class Display(Protocol):
    """Shows a run to people."""

    def draw(self, run: RunState) -> None:
        """Show the present state; called about ten times a second."""
        ...

    def add_event(self, at: float, text: str) -> None:
        """Show an event, *at* seconds since the beginning."""
        ...
