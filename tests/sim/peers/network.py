"""The way between members: messages as bytes, late, twice or never."""

from __future__ import annotations

from tenure._backends.peers import machine as peers
from tenure._backends.peers.wire import Message, decode, encode
from tenure.testing._sim.network import Network
from tests.sim.peers.protocols import NetworkRun


class PeerNetwork(Network):
    """Carry messages between members."""

    def __init__(self, run: NetworkRun) -> None:
        super().__init__(run.world, run.plan.conditions, run.plan.timing)
        self._run = run
        self.cuts: dict[tuple[int, int], int] = {}
        self.dead: set[tuple[int, int]] = set()  # links that stay cut, after the faults as well
        self.messages = 0
        self.by_kind: dict[str, int] = {}
        self._written: tuple[Message, bytes] | None = None

    def send(self, source: int, to: int, message: Message) -> None:
        self.messages += 1
        kind = type(message).__name__
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        if self._written is None or self._written[0] is not message:  # what goes to all is written once
            self._written = message, encode(message)
        body = self._written[1]
        copies = 2 if not self.healed and self._world.rng.random() < self.conditions.duplicate else 1
        for _ in range(copies):
            delay = None if self._is_cut(source, to) else self.delay()
            if delay is not None:
                self._world.after(delay, self._arrive, source, to, body)

    def _is_cut(self, source: int, to: int) -> bool:
        return (source, to) in self.dead or (not self.healed and self.cuts.get((source, to), 0) > 0)

    def _arrive(self, source: int, to: int, body: bytes) -> None:
        member = self._run.members[to]
        if member is not None:
            member.do(member.feed, peers.Received(source, decode(body)))

    def cut(self, source: int, to: int, seconds: float) -> None:
        self.cuts[source, to] = self.cuts.get((source, to), 0) + 1
        self._world.after(seconds, self._join, source, to)

    def _join(self, source: int, to: int) -> None:
        self.cuts[source, to] -= 1
