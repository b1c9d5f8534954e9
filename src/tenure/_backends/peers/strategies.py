"""What the three strategies have in common: who of those that want a name is to claim it.

A strategy only decides who claims, and when. Whether a claim is won is decided by votes
(:mod:`tenure._backends.peers.quorum`),
so a strategy that errs, because messages were lost or because two differ about who is alive, costs time, never safety.
That is how the classic algorithms, which presume that messages arrive in time and that crashes are seen truly, can be
used where neither holds.

One race is one member's part in the election for one name. Ranks are places in the fleet's list.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.liveness import Liveness
from tenure._backends.peers.wire import ElectionMessage
from tenure._jitter import Rng

# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Campaign:
    """A candidate of ours wants the name, and as far as we know nobody leads."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Nobody here wants the name any more."""


@dataclass(frozen=True, slots=True)
class Received:
    """Another member's message about this election; *wanted* if a candidate of ours waits for the name to be free."""

    sender: int
    message: ElectionMessage
    wanted: bool = False


@dataclass(frozen=True, slots=True)
class LeaderKnown:
    """Somebody leads."""


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """Our claim was not won, and we don't know who leads, if anybody. Another is in vain for *wait* seconds."""

    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


Input = Campaign | Withdraw | Received | LeaderKnown | ClaimFailed | Tick


# --- what goes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send *message* to the member *to*."""

    to: int
    message: ElectionMessage


@dataclass(frozen=True, slots=True)
class ClaimNow:
    """It is our turn: ask everybody to vouch for us."""


@dataclass(frozen=True, slots=True)
class WakeCandidate:
    """An election goes on: wake the candidate here, if there is one and it waits."""


Effect = Send | ClaimNow | WakeCandidate


class ElectionStrategy(ABC):
    """One member's part in the election for one name, as a pure state machine.

    Args:
        name: What the election is about.
        fleet: Whose members take part.
        liveness: Who is taken for alive.
        dice: Source of jitter.
    """

    def __init__(self, name: str, fleet: Fleet, liveness: Liveness, rng: Rng) -> None:
        assert fleet.me is not None
        self.name = name
        self.me = fleet.me
        self.fleet = fleet
        self.wake_at = math.inf
        """When to call ``handle(Tick(), now)``."""
        self.stands = False
        """Whether a candidate of ours wants the name."""
        self._liveness = liveness
        self._rng = rng

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        match event:
            case Campaign():
                if self.stands:
                    return []
                self.stands = True
                return self._begin(now)
            case Withdraw() | LeaderKnown():
                self.stands = False
                self.wake_at = math.inf
                self._end()
                return []
            case Received(sender, message, wanted):
                return self._join(sender, message, now) if wanted else self._receive(sender, message, now)
            case ClaimFailed(wait):
                if self.stands:
                    self._end()
                    self.wake_at = now + wait + self._pause()
                return []
            case Tick():
                if now < self.wake_at:
                    return []
                self.wake_at = math.inf
                return self._wake(now)

    def _join(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        """Take part from this message on, as if our candidate had asked just before; if it leads to nothing, don't."""
        stood, self.stands = self.stands, True
        effects = self._receive(sender, message, now)
        if not stood and self.wake_at == math.inf and ClaimNow() not in effects:
            self.stands = False
        return effects

    def _pause(self) -> float:
        """Return how long to wait after a claim that was not won: members that met should not meet again."""
        return self.fleet.answer_within * (0.5 + (1 + self.me / self.fleet.size) * self._rng.random())

    @abstractmethod
    def _begin(self, now: float) -> list[Effect]:
        """Begin an election: we want the name."""

    @abstractmethod
    def _end(self) -> None:
        """Forget how far the election had come."""

    @abstractmethod
    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        """Take in what another member said."""

    @abstractmethod
    def _wake(self, now: float) -> list[Effect]:
        """Do what ``wake_at`` was set for; by default it is to begin anew."""
