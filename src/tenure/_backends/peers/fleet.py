"""A fleet: its members, the rule by which they elect, and their times. Plain values, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tenure._timing import DERIVED
from tenure.errors import ConfigError

Strategy = Literal["lowest", "bully", "ring"]
Quorum = Literal["majority", "none"]

MEMBERS_MAX = 64
"""Every member talks to every other, so a fleet's traffic grows with the square of its size."""

SUSPECT_AFTER = 3.5
"""Heartbeats of silence after which a member counts as dead: three lost ones in a row, and some delay."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all members of a fleet must agree on, and what each may choose for itself. Times in seconds.

    Args:
        members: The address of each member; its place in the list is its rank.
        me: The place of this member; None for a client, which is no member and only asks.
        strategy: Which of the members that want a name claims it.
        quorum: ``"majority"``: a leader has the votes of more than half of all members. ``"none"``: a leader has asked
            those that it could reach, and a partition may give two leaders. Unset: a majority, with three members or
            more.
        ttl_max: The longest lease. A restarted member has lost its promises, and does not vote for so long.
        heartbeat: Seconds between the heartbeats that each member sends to the others.
        patience: The longest that a message and its handling should take; the wait for an answer is twice that.

    Raises:
        ConfigError: The settings contradict one another; the message says which would do.
    """

    members: tuple[str, ...]
    me: int | None
    strategy: Strategy = "lowest"
    quorum: Quorum | None = None
    ttl_max: float = 15.0
    heartbeat: float = DERIVED
    patience: float = DERIVED

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MEMBERS_MAX:
            raise ConfigError(f"a fleet must have 1 to {MEMBERS_MAX} members, not {self.size}")
        if self.quorum is None:
            if self.size < 3:
                raise ConfigError(
                    f"{_members(self.size)} can't lose one and still be a majority; add members until there are 3, "
                    "or write quorum=majority (all of them must answer) or quorum=none (a partition may give two "
                    "leaders)"
                )
            object.__setattr__(self, "quorum", "majority")
        if self.heartbeat is DERIVED:
            object.__setattr__(self, "heartbeat", self.ttl_max / 15)
        if self.patience is DERIVED:
            object.__setattr__(self, "patience", self.heartbeat / 4)
        for name in ("ttl_max", "heartbeat", "patience"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be a positive number of seconds, not {value:g}")
        if self.heartbeat > self.ttl_max / 3:
            raise ConfigError(
                f"heartbeat ({self.heartbeat:g} s) must be at most a third of ttl_max ({self.ttl_max:g} s); "
                f"try heartbeat={self.ttl_max / 15:.2g}"
            )
        if self.patience > self.heartbeat:
            raise ConfigError(
                f"patience ({self.patience:g} s) must be at most heartbeat ({self.heartbeat:g} s); "
                f"try patience={self.heartbeat / 4:.2g}"
            )

    @property
    def size(self) -> int:
        """How many members there are, alive or not."""
        return len(self.members)

    @property
    def majority(self) -> int:
        """How many are more than half."""
        return self.size // 2 + 1

    @property
    def needed(self) -> int:
        """How many votes a leader needs."""
        return self.majority if self.quorum == "majority" else 1

    @property
    def others(self) -> tuple[int, ...]:
        """All members but this one."""
        return tuple(member for member in range(self.size) if member != self.me)

    @property
    def suspect_after(self) -> float:
        """How long a member may be silent before it counts as dead."""
        return SUSPECT_AFTER * self.heartbeat

    @property
    def answer_within(self) -> float:
        """How long to wait for an answer: there and back."""
        return 2 * self.patience

    @property
    def question_lasts(self) -> float:
        """How long a question to the other members may take, with all its repetitions."""
        return max(2 * self.heartbeat, 2 * self.answer_within)

    @property
    def election_lasts(self) -> float:
        """How long an election may take that meets a dead or slow member at every step; a campaign lasts so long."""
        return max(2 * self.heartbeat, (self.size + 4) * self.answer_within)

    @property
    def terms(self) -> str:
        """What all members must agree on, as text: members that differ in it must not count each other's votes."""
        return f"{','.join(self.members)} quorum={self.quorum} ttl_max={self.ttl_max!r}"


def _members(count: int) -> str:
    return "1 member" if count == 1 else f"{count} members"
