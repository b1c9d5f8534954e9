"""The claims of a member: acquire, renew, release, and what becomes of each after the votes.

A claim from beginning to end, in a fleet of three::

    a: acquire ─▶ strategy ─▶ ClaimNow ─▶ Claim ─▶ b, c     a votes for itself
                                          b: Vote ─▶ a      two of three: Granted
                                          c: Vote ─▶ a      (counted, changes nothing)
    a: renew ───────────────────────────▶ Claim ─▶ b, c     … every renew_every
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace

from tenure._backends.peers import strategies
from tenure._backends.peers.events import Acquire, Answer, Effect, Hint
from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.questions import Questions
from tenure._backends.peers.quorum import NAMES_MAX, Promise
from tenure._backends.peers.rounds import ClaimRound, ReleaseRound, held_by
from tenure._backends.peers.wire import Claim, Refusal, ReleaseRequest, StandingPromise
from tenure._jitter import Rng
from tenure._lease import Grant, Granted, HeldBy, Lost, Metadata, NoAnswer

EARLY_ANSWER_AFTER = 0.1
"""Share of a lease after which a candidate learns that no member can be elected now, while its caller still waits."""

RETRIES = 3
"""How often a claim that was refused for its token is made again at once with a higher one."""


@dataclass(slots=True)
class _Candidate:
    """A candidate of this process that wants a name, until it is answered."""

    ask: int
    holder: str
    ttl: float
    metadata: Metadata
    early_answer_at: float
    until: float
    probable_leader: StandingPromise | None = None  # as far as a refused claim has shown


class Claims(Questions):
    """The candidates of this process, and their claims."""

    def __init__(self, fleet: Fleet, rng: Rng, *, floor: int, nonce: int, now: float) -> None:
        super().__init__(fleet, rng, floor=floor, nonce=nonce, now=now)
        self._candidates: dict[str, list[_Candidate]] = {}
        self._waiting: dict[str, float] = {}  # until when a candidate that was answered is assumed to wait
        self._turns: dict[str, float] = {}  # until when a candidate that asks for a name may claim it at once
        self._claims: dict[str, int] = {}  # the round of the claim that is under way for a name
        self._retries: dict[str, int] = {}  # how often it was made again for its token

    # --- candidates ---

    def _acquire(self, event: Acquire, now: float, effects: list[Effect]) -> None:
        name, promise = event.name, self.voter.promise(event.name, now)
        if promise is not None and name not in self._claims:
            if (promise.member, promise.holder) == (self.fleet.me, event.holder):
                # Its answer was lost or late: ask all once more, under the same token.
                claim = self._renewal(promise, name, event.ttl)
                if self.fleet.quorum == "majority":
                    # No work began under it, so others may have led meanwhile: like a new claim, it may be outdated.
                    claim = replace(claim, renewal=False)
                lost = NoAnswer("the claim was lost while its answer was asked for once more")
                self._begin(ClaimRound(self.fleet, claim, [event.ask], lost, now, holds=True), now, effects)
            else:
                self._note_waiting(name, now)
                effects.append(Answer(event.ask, held_by(name, promise.standing(now))))
            return
        if not self.voter.remembers(name):
            effects.append(Answer(event.ask, _no_room()))
            return
        until = now + self.fleet.election_lasts
        early_answer_at = min(until, now + EARLY_ANSWER_AFTER * event.ttl)
        candidate = _Candidate(event.ask, event.holder, event.ttl, event.metadata, early_answer_at, until)
        self._waiting.pop(name, None)
        self._candidates.setdefault(name, []).append(candidate)
        self._timers.set(early_answer_at, "candidate", name)
        self._timers.set(until, "candidate", name)
        if not self.voter.awake:
            return
        turn_ends = self._turns.pop(name, None)
        if turn_ends is not None and now < turn_ends:
            self._claim(name, now, effects)
            return
        if turn_ends is not None:  # it came just too late, and the strategy still takes the turn as used
            self._advance(name, strategies.Withdraw(), now, effects)
        self._advance(name, strategies.Campaign(), now, effects)

    def _note_waiting(self, name: str, now: float) -> None:
        """Note that a candidate here waits for *name*: it asks again once the name is free, perhaps late."""
        if name in self._waiting or len(self._waiting) < NAMES_MAX:
            self._waiting[name] = now + 2 * self.fleet.ttl_max

    def _candidates_due(self, name: str, now: float, effects: list[Effect]) -> None:
        candidates = self._candidates.get(name, [])
        early = not self._can_elect(now)
        for candidate in [each for each in candidates if now >= (each.early_answer_at if early else each.until)]:
            candidates.remove(candidate)
            effects.append(Answer(candidate.ask, self._not_elected(name, candidate, now)))
            self._note_waiting(name, now)
        self._withdraw_if_unwanted(name, now, effects)

    def _drop(self, ask: int, now: float, effects: list[Effect]) -> None:
        for name, candidates in list(self._candidates.items()):
            candidates[:] = [each for each in candidates if each.ask != ask]
            self._withdraw_if_unwanted(name, now, effects)
        for asked in self._rounds.values():
            if not isinstance(asked, ClaimRound) and ask in asked.asks:
                asked.asks.remove(ask)

    def _withdraw_if_unwanted(self, name: str, now: float, effects: list[Effect]) -> None:
        """If no candidate here wants *name* any more, stop claiming it."""
        if name in self._candidates and not self._candidates[name]:
            del self._candidates[name]
            if name in self._claims:
                self._withdraw_claim(name, now, effects)
            self._advance(name, strategies.Withdraw(), now, effects)

    def _not_elected(self, name: str, candidate: _Candidate, now: float) -> HeldBy | NoAnswer:
        if candidate.probable_leader is not None:
            return held_by(name, candidate.probable_leader, certain=False)
        if not self.voter.awake:
            silence = self.voter.silent_until - now
            return NoAnswer(
                f"this member has just started, and does not vote for {silence:.1f} s more, or until all others replied"
            )
        alive = len(self.liveness.alive(now))
        return NoAnswer(
            f"no member was elected; {alive} of {self.fleet.size} members are alive, {self.fleet.needed} are needed"
        )

    def _can_elect(self, now: float) -> bool:
        """Return whether a member can be elected now, as far as this one knows."""
        return self.voter.awake and len(self.liveness.alive(now)) >= self.fleet.needed

    def _wake_waiting(self, now: float, effects: list[Effect]) -> None:
        """Wake the candidates that campaigned in vain: from now on a member can be elected."""
        waiting = [name for name, until in self._waiting.items() if now < until]
        effects.extend(Hint(name) for name in waiting if self.voter.promise(name, now) is None)

    def _turn_due(self, name: str, now: float, effects: list[Effect]) -> None:
        if self._turns.get(name, math.inf) <= now:
            del self._turns[name]
            if name not in self._candidates:
                self._advance(name, strategies.Withdraw(), now, effects)

    # --- a claim ---

    def _claim(self, name: str, now: float, effects: list[Effect]) -> None:
        """Claim *name* for the first candidate."""
        candidates = self._candidates.get(name)
        if not candidates:
            if self._waiting.pop(name, -math.inf) > now:  # it was hinted a moment ago; the strategy was faster
                self._turns[name] = now + self.fleet.answer_within
                self._timers.set(self._turns[name], "turn", name)
                effects.append(Hint(name))
            else:
                self._advance(name, strategies.Withdraw(), now, effects)
            return
        if name in self._claims:
            return
        promise = self.voter.promise(name, now)
        if promise is not None:
            self._answer_candidates(name, held_by(name, promise.standing(now)), now, effects)
            return
        if not self.voter.remembers(name):  # other names have taken the last places meanwhile
            effects.extend(Answer(each.ask, _no_room()) for each in candidates)
            candidates.clear()
            self._withdraw_if_unwanted(name, now, effects)
            return
        first = candidates[0]
        asks = [each.ask for each in candidates if each.holder == first.holder]
        claim = Claim(self._next_round(), name, first.holder, self.voter.newest + 1, first.ttl, False, first.metadata)
        self._claims[name] = claim.round
        self._begin(ClaimRound(self.fleet, claim, asks, NoAnswer("not elected"), now, holds=False), now, effects)

    def _renewal(self, promise: Promise, name: str, ttl: float) -> Claim:
        # It says everything once more, for members that have not received the claim.
        return Claim(self._next_round(), name, promise.holder, promise.token, ttl, True, promise.metadata)

    def _evaluate_claim(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        if voting.is_settled:
            return
        alive = self.liveness.alive(now)
        if voting.is_won(alive):
            voting.is_settled = True
            self._win(voting, now, effects)
        elif voting.is_refused(alive):
            voting.is_settled = True
            self._lose(voting, now, effects)

    def _win(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        claim = voting.question
        grant = Grant(claim.name, claim.holder, claim.token)
        granted = Granted(grant, voting.poll.resign_asked)
        if voting.holds:
            effects.extend(Answer(ask, granted) for ask in voting.asks)
            return
        del self._claims[claim.name]
        self._retries.pop(claim.name, None)
        effects.append(Hint(claim.name))
        candidates = self._candidates.pop(claim.name, [])
        self._advance(claim.name, strategies.LeaderKnown(), now, effects)
        for each in candidates:
            if each.ask in voting.asks:
                effects.append(Answer(each.ask, granted))
            else:  # it asked after the round began, and the votes of this round are too old for it
                self._acquire(Acquire(each.ask, claim.name, each.holder, each.ttl, each.metadata), now, effects)

    def _lose(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        claim = voting.question
        if voting.holds:
            self._rounds.pop(claim.round, None)
            effects.extend(Answer(ask, voting.if_lost) for ask in voting.asks)
            if not claim.renewal:
                self.voter.learn(voting.poll.newest)
                self._free_votes(claim, [], now, effects)
            return
        self._withdraw_claim(claim.name, now, effects)
        winner = voting.winner()
        self.voter.learn(voting.poll.newest)
        if winner is not None:
            self._answer_candidates(claim.name, held_by(claim.name, winner), now, effects)
            return
        for candidate in self._candidates.get(claim.name, ()):
            candidate.probable_leader = voting.poll.standing
        tries = self._retries.get(claim.name, 0)
        if voting.poll.standing is None and voting.poll.newest >= claim.token and tries < RETRIES:
            self._retries[claim.name] = tries + 1
            self._claim(claim.name, now, effects)
            return
        self._retries.pop(claim.name, None)
        wait = voting.in_vain_for(self.liveness.alive(now))
        self._advance(claim.name, strategies.ClaimFailed(wait), now, effects)

    def _withdraw_claim(self, name: str, now: float, effects: list[Effect]) -> None:
        """Stop claiming *name*: count no further vote, and free the votes given so far."""
        voting = self._rounds.pop(self._claims.pop(name), None)
        assert isinstance(voting, ClaimRound)
        claim = voting.question
        assert self.fleet.me is not None
        # No hint to this process: it would try again at once.
        self.voter.free(name, self.fleet.me, claim.holder, claim.token, won=False)
        request = ReleaseRequest(self._next_round(), name, claim.holder, claim.token, won=False)
        self._begin(ReleaseRound(self.fleet, request, [], now + self.fleet.question_lasts), now, effects)

    def _answer_candidates(self, name: str, answer: HeldBy, now: float, effects: list[Effect]) -> None:
        """Answer all candidates here: another holder leads *name*."""
        if name in self._claims:
            self._withdraw_claim(name, now, effects)
        candidates = self._candidates.pop(name, ())
        if candidates:
            self._note_waiting(name, now)
        effects.extend(Answer(each.ask, answer) for each in candidates)
        if name in self._elections:
            self._advance(name, strategies.LeaderKnown(), now, effects)

    # --- a term ---

    def _renew(self, ask: int, grant: Grant, ttl: float, now: float, effects: list[Effect]) -> None:
        promise = self._own_vote(grant, now)
        if promise is None:
            effects.append(Answer(ask, Lost(grant)))
            return
        claim = self._renewal(promise, grant.name, ttl)
        self._begin(ClaimRound(self.fleet, claim, [ask], Lost(grant), now, holds=True), now, effects)

    def _own_vote(self, grant: Grant | Claim, now: float) -> Promise | None:
        """Return this member's vote for its own claim: without it, the claim is over."""
        promise = self.voter.promise(grant.name, now)
        me = self.fleet.me
        return promise if promise and me is not None and promise.is_of(me, grant.holder, grant.token) else None

    def _release(self, ask: int, grant: Grant, now: float, effects: list[Effect]) -> None:
        if self._own_vote(grant, now) is None:
            self._release_again(ask, grant, effects)
            return
        for voting in [each for each in self._rounds.values() if isinstance(each, ClaimRound)]:
            if (voting.question.name, voting.question.token) == (grant.name, grant.token):
                del self._rounds[voting.question.round]  # its votes no longer count
                if not voting.is_settled:
                    effects.extend(Answer(each, voting.if_lost) for each in voting.asks)
        effects.append(Hint(grant.name))
        self._free_votes(grant, [ask], now, effects)

    def _free_votes(self, held: Grant | Claim, asks: list[int], now: float, effects: list[Effect]) -> None:
        """Free the votes for a claim of this member that was won."""
        assert self.fleet.me is not None
        self.voter.free(held.name, self.fleet.me, held.holder, held.token, won=True)
        request = ReleaseRequest(self._next_round(), held.name, held.holder, held.token, won=True)
        self._begin(ReleaseRound(self.fleet, request, asks, now + self.fleet.question_lasts), now, effects)

    def _release_again(self, ask: int, grant: Grant, effects: list[Effect]) -> None:
        """Answer for a claim that is over; if it is just being released, wait for that."""
        for asked in self._rounds.values():
            if isinstance(asked, ReleaseRound) and not asked.is_settled and asked.grant == grant:
                asked.asks.append(ask)
                return
        effects.append(Answer(ask, Lost(grant)))

    def _resolve_conflict(self, claim: Claim, refusal: Refusal, now: float, effects: list[Effect]) -> None:
        """Without a quorum: another member knows a better leader, or a later term than this claim's."""
        if refusal.standing is None:
            if claim.renewal and refusal.newest > claim.token and self._own_vote(claim, now) is not None:
                self._free_votes(claim, [], now, effects)
                effects.append(Hint(claim.name))
        elif self.voter.adopt(claim.name, refusal.standing, now):
            self._follow(claim.name, now, effects)

    # --- the rest of the machine ---

    _elections: dict[str, strategies.ElectionStrategy]

    @abstractmethod
    def _advance(self, name: str, event: strategies.Input, now: float, effects: list[Effect]) -> None:
        """Give *event* to the election for *name*, and perform its effects."""

    @abstractmethod
    def _follow(self, name: str, now: float, effects: list[Effect]) -> None:
        """Act on a new promise: another holder may lead now."""


def _no_room() -> NoAnswer:
    return NoAnswer(f"this member remembers {NAMES_MAX} names, and no more; use fewer, or restart the members in turn")
