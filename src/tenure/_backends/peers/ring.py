"""Ring: a member's rank travels round a ring; only the highest comes back to its owner, who then claims the name.

Source: Ernest Chang and Rosemary Roberts, "An improved algorithm for decentralized extrema-finding in circular
configurations of processes", Communications of the ACM 22(5), May 1979, pp. 281–283.

- **Assumes** (there) a ring that is whole, and messages that arrive. Here the ring is repaired by passing over members
  that are taken for dead; a message whose owner died is dropped after two rounds. If nothing has come of a run when two
  rounds should be over, whoever took part claims: a member may be taken for alive, because it is heard, and never hear
  what is passed on to it, and no further run would fare better. Where several claim, the votes decide.
- **Differs**: who does not want the name passes messages on and takes no part.
- **Failure detection**: heartbeats between all members, so that everybody knows its next live neighbour.
- **Messages** of one run among ``n`` live members. Begun by one: at most ``n − 1`` until the highest hears of it, ``n``
  until that has come round, and ``n`` to tell: ``3n − 1``. Begun by all at once: ``n(n + 1)/2`` and ``n`` at worst,
  ``n·H(n)`` and ``n`` on average, with H(n) = 1 + 1/2 + … + 1/n. To these come ``n − 1`` claims and ``n − 1`` votes,
  which the paper does not know.
- **Time**: up to ``2n`` messages one after the other, the longest of the three.
"""

from __future__ import annotations

from tenure._backends.peers.strategies import ClaimNow, Effect, ElectionStrategy, Send, WakeCandidate
from tenure._backends.peers.wire import ElectionMessage, RingElected, RingElection


class Ring(ElectionStrategy):
    """Pass the highest rank on; claim when our own comes back."""

    _takes_part = False
    _waits = False  # for a run that is under way; otherwise ``wake_at`` is the end of a pause

    def _begin(self, now: float) -> list[Effect]:
        self._takes_part = True
        if self._next(now) == self.me:
            return [ClaimNow()]
        self._wait(now)
        return self._pass(RingElection(self.name, self.me, 0), now)

    def _end(self) -> None:
        self._takes_part = self._waits = False

    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        match message:
            case RingElection(candidate=candidate) if candidate == self.me:
                if not (self.stands and self._takes_part):
                    return []
                self._waits = False  # what is waited for now is the votes
                self._wait(now)
                return [*self._pass(RingElected(self.name, self.me, 0), now), ClaimNow()]
            case RingElection() if not self.stands:
                return [WakeCandidate(), *self._pass(message, now)]
            case RingElection(candidate=candidate) if candidate > self.me:
                self._takes_part = True
                self._wait(now)
                return self._pass(message, now)
            case RingElection() if not self._takes_part:
                return self._begin(now)
            case RingElected(candidate=candidate) if candidate != self.me:
                self._takes_part = False
                if self.stands:
                    self._wait(now)
                return self._pass(message, now)
        return []

    def _wake(self, now: float) -> list[Effect]:
        if not self.stands:
            return []
        if self._waits:
            self._waits = False
            return [ClaimNow()]
        return self._begin(now)

    def _wait(self, now: float) -> None:
        """Claim if nothing has come of it when two rounds should be over, and before who stands is told that it failed.

        What else is heard meanwhile does not move that back, or members that begin again and again would never let it
        come.
        """
        if not self._waits:
            self._waits = True
            self.wake_at = now + (self.fleet.size + 2 + self._rng.random()) * self.fleet.answer_within

    def _next(self, now: float) -> int:
        """Return who comes after us in the ring of those that live."""
        alive = self._liveness.alive(now)
        return alive[(alive.index(self.me) + 1) % len(alive)]

    def _pass(self, message: RingElection | RingElected, now: float) -> list[Effect]:
        if message.hops >= 2 * self.fleet.size:
            return []  # its owner is gone, and nobody else would stop it
        to = self._next(now)
        if to == self.me:
            return []
        return [Send(to, type(message)(message.name, message.candidate, message.hops + 1))]
