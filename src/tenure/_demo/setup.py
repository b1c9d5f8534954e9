"""What can be seen of a run: written by the director, drawn by a display."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from tenure import Stats
from tenure._demo.job import Job
from tenure._demo.ledger import Progress

State = Literal["starting", "standing by", "leading", "killed", "ended", "failed"]


@dataclass(slots=True)
class Player:
    """An instance, as seen from outside."""

    number: int
    pid: int
    state: State = "starting"
    token: int = 0
    chunk: int = 0  # the one in hand; 0 for none
    counted: int = 0  # chunks

    @property
    def name(self) -> str:
        """What people call it."""
        return f"instance {self.number}"

    @property
    def is_busy(self) -> bool:
        """Whether it is alive, and has a message in hand."""
        return self.chunk > 0 and self.state in ("standing by", "leading")


@dataclass(slots=True)
class Scene:
    """A run, as it is now."""

    job: Job
    url: str
    election: str
    ttl: float
    progress: Progress
    queue: Stats = field(default_factory=Stats)
    leader: int = 0  # the instance's number; 0 while nobody leads
    token: int = 0  # the newest ever seen
    lease_left: float = 0.0
    plain: str = "counting"
    elapsed: float = 0.0
    players: list[Player] = field(default_factory=list)
    news: list[tuple[float, str]] = field(default_factory=list)  # seconds since the beginning, and what happened


class Display(Protocol):
    """Where people look."""

    def draw(self, scene: Scene) -> None:
        """Show the scene as it is now; called about ten times a second."""
        ...

    def tell(self, at: float, text: str) -> None:
        """Say what just happened, *at* seconds since the beginning."""
        ...
