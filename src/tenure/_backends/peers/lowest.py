"""Lowest live id: of the members that are alive and want the name, the first in the list claims it.

Source: folklore of process groups, where the lowest live member coordinates; the recipe of ZooKeeper's documentation
("Leader Election": the lowest sequence number leads) is the same with a store to number them.

- **Assumes** that all members agree on which are alive. Where they don't, two may claim at once, and the votes decide.
- **Failure detection**: heartbeats between all members.
- **Messages**: none to find out whose turn it is. Each member waits one ``answer_within`` for every live member before
  it; the first that wants the name claims it meanwhile. The claim itself is ``n − 1`` questions and ``n − 1`` answers.
- **Time**: at once for the first; ``rank × answer_within`` if those before it live but don't want the name.
"""

from __future__ import annotations

from tenure._backends.peers.strategies import ClaimNow, Effect, ElectionStrategy
from tenure._backends.peers.wire import ElectionMessage


class Lowest(ElectionStrategy):
    """Wait for the members before this one, then claim."""

    def _begin(self, now: float) -> list[Effect]:
        before = [member for member in self._liveness.alive(now) if member < self.me]
        if not before:
            return [ClaimNow()]
        self.wake_at = now + len(before) * self.fleet.answer_within
        return []

    def _reset(self) -> None:
        """Do nothing: there is only the turn, and its moment has passed."""

    def _receive(self, sender: int, message: ElectionMessage, now: float) -> list[Effect]:
        return []  # meant for another strategy

    def _wake(self, now: float) -> list[Effect]:
        return [ClaimNow()] if self.campaigns else []
