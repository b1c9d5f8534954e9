"""Ring: a member's rank travels round a ring; only the highest comes back to its owner, which then claims the name.

Source: Ernest Chang and Rosemary Roberts, "An improved algorithm for decentralized extrema-finding in circular
configurations of processes", Communications of the ACM 22(5), May 1979, pp. 281–283.

- **Assumes** (there) a ring that is whole, and messages that arrive. Here the ring is repaired by passing over members
  that count as dead; a message whose owner died is dropped after two rounds. If an election has no result when two
  rounds should be over, each participant claims: a member may count as alive, because its heartbeats arrive, and still
  never receive what is passed on to it; another round would fail as well. Where several claim, the votes decide.
- **Differs**: a member that does not want the name passes messages on and is no participant.
- **Failure detection**: heartbeats between all members, so that each knows its next live neighbour.
- **Messages** of one election among ``n`` live members. Begun by one: at most ``n − 1`` until the highest receives it,
  ``n`` until that has come round, and ``n`` to announce it: ``3n − 1``. Begun by all at once: ``n(n + 1)/2`` and ``n``
  at worst, ``n·H(n)`` and ``n`` on average, with H(n) = 1 + 1/2 + … + 1/n. To these come ``n − 1`` claims and
  ``n − 1`` votes, which the paper does not have.
- **Time**: up to ``2n`` messages one after the other, the longest of the three.
"""

from __future__ import annotations

from tenure._backends.peers.strategies import ClaimNow, Effect, ElectionStrategy, Send, WakeCandidate
from tenure._backends.peers.wire import ElectionMessage, RingElected, RingElection


class Ring(ElectionStrategy):
    """Pass the highest rank on; claim when this member's own comes back."""

    _participates = False
    _waits = False  # for the election under way; otherwise ``wake_at`` is the end of a pause

    def _begin(self, now: float) -> list[Effect]:
        self._participates = True
        if self._next(now) == self.me:
            return [ClaimNow()]
        self._wait(now)
        return self._pass(RingElection(self.name, self.me, 0), now)

    def _reset(self) -> None:
        self._participates = self._waits = False

    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        match message:
            case RingElection(candidate=candidate) if candidate == self.me:
                if not (self.campaigns and self._participates):
                    return []
                self._waits = False  # from now on it waits for the votes
                self._wait(now)
                return [*self._pass(RingElected(self.name, self.me, 0), now), ClaimNow()]
            case RingElection() if not self.campaigns:
                return [WakeCandidate(), *self._pass(message, now)]
            case RingElection(candidate=candidate) if candidate > self.me:
                self._participates = True
                self._wait(now)
                return self._pass(message, now)
            case RingElection() if not self._participates:
                return self._begin(now)
            case RingElected(candidate=candidate) if candidate != self.me:
                self._participates = False
                if self.campaigns:
                    self._wait(now)
                return self._pass(message, now)
        return []

    def _wake(self, now: float) -> list[Effect]:
        if not self.campaigns:
            return []
        if self._waits:
            self._waits = False
            return [ClaimNow()]
        return self._begin(now)

    def _wait(self, now: float) -> None:
        """Claim if there is no result when two rounds should be over, and before the candidate gets its answer.

        Later messages do not postpone that moment: members that begin again and again could postpone it without end.
        """
        if not self._waits:
            self._waits = True
            self.wake_at = now + (self.fleet.size + 2 + self._rng.random()) * self.fleet.answer_within

    def _next(self, now: float) -> int:
        """Return the next member in the ring of those that live."""
        alive = self._liveness.alive(now)
        return alive[(alive.index(self.me) + 1) % len(alive)]

    def _pass(self, message: RingElection | RingElected, now: float) -> list[Effect]:
        if message.hops >= 2 * self.fleet.size:
            return []  # its owner is gone, and no other member would stop it
        to = self._next(now)
        if to == self.me:
            return []
        return [Send(to, type(message)(message.name, message.candidate, message.hops + 1))]
