"""The silence after a start: a member that has lost its promises does not vote until they are over."""

from __future__ import annotations

from tenure._backends.peers import strategies
from tenure._backends.peers.claims import Claims
from tenure._backends.peers.events import Effect, Send
from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.rounds import ClaimRound
from tenure._backends.peers.wire import StartupReply, StartupRequest
from tenure._jitter import Rng


class Startup(Claims):
    """Asks the other members what this one may have promised before it started; answers the same question."""

    def __init__(self, fleet: Fleet, rng: Rng, *, floor: int, nonce: int, now: float) -> None:
        super().__init__(fleet, rng, floor=floor, nonce=nonce, now=now)
        self._startup_round = nonce
        self._clear: set[int] = set()
        """The members that lead nothing and claim nothing."""

    def _ask_others(self, now: float, effects: list[Effect]) -> None:
        if self.voter.awake:
            return
        if now >= self.voter.silent_until:
            self.voter.wake_in_time(now)
            self._begin_voting(now, effects)
            return
        open_ = [other for other in self.fleet.others if other not in self._clear]
        effects.extend(Send(other, StartupRequest(self._startup_round)) for other in open_)
        self._timers.set(min(now + self.fleet.answer_within, self.voter.silent_until), "startup")

    def _answer_startup(self, sender: int, number: int, now: float, effects: list[Effect]) -> None:
        claiming = any(isinstance(each, ClaimRound) for each in self._rounds.values())
        clear = not claiming and not self.voter.leads(now)
        effects.append(Send(sender, StartupReply(number, clear, self.voter.newest, self.voter.bound(now))))

    def _take_startup_reply(self, sender: int, message: StartupReply, now: float, effects: list[Effect]) -> None:
        if message.round != self._startup_round:
            return
        self.voter.note_reply(sender, message.newest, message.bound, now)
        if message.clear and not self.voter.awake:
            self._clear.add(sender)
            if self._clear.issuperset(self.fleet.others):
                self.voter.wake()
                self._begin_voting(now, effects)

    def _begin_voting(self, now: float, effects: list[Effect]) -> None:
        for name in list(self._candidates):
            self._advance(name, strategies.Campaign(), now, effects)
        self._wake_waiting(now, effects)
