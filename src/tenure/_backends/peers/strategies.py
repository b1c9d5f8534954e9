"""The base of the three strategies, which decide which member claims a name, and when.

A strategy only decides which member claims, and when. Votes decide whether a claim is won
(:mod:`tenure._backends.peers.quorum`). So a strategy that errs, because messages were lost or because two members
disagree about which are alive, costs time, never safety. That is how the classic algorithms, which assume that messages
arrive in time and that crashes are detected truly, can be used where neither holds.

One object is one member's part in the election for one name. A member's rank is its place in the fleet's list.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.liveness import Liveness
from tenure._backends.peers.wire import ElectionMessage
from tenure._jitter import Rng

# --- inputs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Campaign:
    """A candidate here wants the name, and this member knows no leader."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """No candidate here wants the name any more."""


@dataclass(frozen=True, slots=True)
class Received:
    """Another member's message about this election; *wanted* if a candidate here waits for the name to be free."""

    sender: int
    message: ElectionMessage
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class LeaderKnown:
    """There is a leader."""


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """This member's claim was not won, and no leader is known. Another claim is in vain for *wait* seconds."""

    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


Input = Campaign | Withdraw | Received | LeaderKnown | ClaimFailed | Tick


# --- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send *message* to the member *to*."""

    to: int
    message: ElectionMessage


@dataclass(frozen=True, slots=True)
class ClaimNow:
    """It is this member's turn: ask all members for their votes."""


@dataclass(frozen=True, slots=True)
class WakeCandidate:
    """An election goes on: wake the candidate here, if there is one and it waits."""


Effect = Send | ClaimNow | WakeCandidate


class ElectionStrategy(ABC):
    """One member's part in the election for one name, as a pure state machine.

    Args:
        name: What the election is about.
        fleet: Whose members take part.
        liveness: Which members count as alive.
        rng: Source of jitter.
    """

    def __init__(self, name: str, fleet: Fleet, liveness: Liveness, rng: Rng) -> None:
        assert fleet.me is not None
        self.name = name
        self.me = fleet.me
        self.fleet = fleet
        self.wake_at = math.inf
        """When to call ``handle(Tick(), now)``."""
        self.campaigns = False
        """Whether a candidate here wants the name."""
        self._liveness = liveness
        self._rng = rng

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        match event:
            case Campaign():
                if self.campaigns:
                    return []
                self.campaigns = True
                return self._begin(now)
            case Withdraw() | LeaderKnown():
                self.campaigns = False
                self.wake_at = math.inf
                self._reset()
                return []
            case Received(sender, message, wanted):
                return self._join(sender, message, now) if wanted else self._receive(sender, message, now)
            case ClaimFailed(wait):
                if self.campaigns:
                    self._reset()
                    self.wake_at = now + wait + self._pause()
                return []
            case Tick():
                if now < self.wake_at:
                    return []
                self.wake_at = math.inf
                return self._wake(now)

    def _join(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        """Take part from this message on, as if the candidate had asked just before; unless it leads to nothing."""
        before, self.campaigns = self.campaigns, True
        effects = self._receive(sender, message, now)
        if not before and self.wake_at == math.inf and ClaimNow() not in effects:
            self.campaigns = False
        return effects

    def _pause(self) -> float:
        """Return how long to wait after a claim that was not won: members that collided should not do so again."""
        return self.fleet.answer_within * (0.5 + (1 + self.me / self.fleet.size) * self._rng.random())

    @abstractmethod
    def _begin(self, now: float) -> list[Effect]:
        """Begin an election: a candidate here wants the name."""

    @abstractmethod
    def _reset(self) -> None:
        """Forget how far the election had come."""

    @abstractmethod
    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        """Take in another member's message."""

    @abstractmethod
    def _wake(self, now: float) -> list[Effect]:
        """Do what ``wake_at`` was set for."""
