"""Bully: a member that sees no leader asks all that rank higher; the highest live one that wants the name claims it.

Source: Hector Garcia-Molina, "Elections in a distributed computing system", IEEE Transactions on Computers C-31(1),
January 1982, pp. 48–59: the first of its two algorithms, for networks that deliver in bounded time.

- **Assumes** (there) that a message arrives and is handled within a known time, and that a member that does not answer
  within it is dead. Here, a wrong guess makes two members claim at once, and the votes decide.
- **Differs**: a leader that lives is not deposed by a higher member that comes back; it would cost a change for
  nothing. The paper's COORDINATOR is the claim itself. A live member that does not want the name does not answer.
- **Failure detection**: heartbeats between all members. ELECTION goes only to those that live.
- **Messages** of an election in which every live member begins once, all ``n`` alive: ``n(n − 1)/2`` ELECTION, as many
  OK, and ``n − 1`` claims: ``n² − 1`` at most, O(n²). If only the highest begins: ``n − 1`` claims. To the claims
  come ``n − 1`` votes, which the paper does not have.
- **Time**: ``answer_within`` if a higher one lives and does not want the name; a round trip otherwise.

::

            Campaign, ELECTION received while campaigning
    IDLE ─────────────────────────────────────▶ ASKING ── no higher member answers OK in time ──▶ claims
     ▲                                            │ OK
     │ LeaderKnown                                ▼
     └─────────────────────────────────────── YIELDING ── no leader in time ──▶ ASKING
"""

from __future__ import annotations

from enum import Enum

from tenure._backends.peers.strategies import ClaimNow, Effect, ElectionStrategy, Send, WakeCandidate
from tenure._backends.peers.wire import BullyElection, BullyOk, ElectionMessage


class _Stage(Enum):
    IDLE = "idle"
    ASKING = "asking"  # waits for a higher member to say that it takes over
    YIELDING = "yielding"  # a higher member took over; waits for it to lead
    CLAIMING = "claiming"


class Bully(ElectionStrategy):
    """Ask the higher members, then claim."""

    _stage = _Stage.IDLE

    def _begin(self, now: float) -> list[Effect]:
        higher = [member for member in self._liveness.alive(now) if member > self.me]
        if not higher:
            self._stage = _Stage.CLAIMING
            return [ClaimNow()]
        self._stage = _Stage.ASKING
        self.wake_at = now + self.fleet.answer_within
        return [Send(member, BullyElection(self.name)) for member in higher]

    def _reset(self) -> None:
        self._stage = _Stage.IDLE

    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        match message:
            case BullyElection() if not self.campaigns:
                return [WakeCandidate()]
            case BullyElection() if sender < self.me:
                ok: list[Effect] = [Send(sender, BullyOk(self.name))]
                return [*ok, *self._begin(now)] if self._stage is _Stage.IDLE else ok
            case BullyOk() if self._stage is _Stage.ASKING and sender > self.me:
                self._stage = _Stage.YIELDING
                # Every higher member may have to wait for its own answers, one after the other.
                self.wake_at = now + (self.fleet.size - self.me) * self.fleet.answer_within
        return []

    def _wake(self, now: float) -> list[Effect]:
        if not self.campaigns:
            return []
        if self._stage is _Stage.ASKING:
            self._stage = _Stage.CLAIMING
            return [ClaimNow()]
        return self._begin(now)
