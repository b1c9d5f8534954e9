"""The questions of a member to all others: sent, sent again, counted, and ended in time.

:mod:`tenure._backends.peers.rounds` counts the replies to one question; here is when each round begins and ends, and
which answer its callers get. Claims are in :mod:`tenure._backends.peers.claims`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from tenure._backends.peers.events import Answer, Effect, Hint, Outcome, Send
from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.liveness import Liveness
from tenure._backends.peers.quorum import Voter
from tenure._backends.peers.rounds import (
    ClaimRound,
    InspectRound,
    ListRound,
    ReleaseRound,
    ResignRound,
    Round,
)
from tenure._backends.peers.timers import Timers
from tenure._backends.peers.wire import (
    Claim,
    InspectReply,
    InspectRequest,
    ListRequest,
    Refusal,
    Reply,
    ResignRequest,
)
from tenure._jitter import Rng
from tenure._lease import Released


class Questions(ABC):
    """The rounds under way.

    Args:
        fleet: The fleet and its rules.
        rng: Source of jitter.
        floor: The lowest token that this member votes for.
        nonce: Rounds count from it.
        now: The present moment.
    """

    def __init__(self, fleet: Fleet, rng: Rng, *, floor: int, nonce: int, now: float) -> None:
        self.fleet = fleet
        self.liveness = Liveness(fleet, rng, now)
        self.voter = Voter(fleet, floor, self.liveness.is_alive, now)
        self._rng = rng
        self._timers = Timers()
        self._round = nonce
        self._rounds: dict[int, Round] = {}

    # --- questions that change nothing ---

    def _inspect(self, ask: int, name: str, now: float, effects: list[Effect]) -> None:
        number, until = self._next_round(), now + self.fleet.question_lasts
        inspecting = InspectRound(self.fleet, InspectRequest(number, name), name, [ask], until)
        if self.fleet.me is not None and self.voter.awake:
            inspecting.take(self.fleet.me, self._inspect_reply(number, name, now))
        self._begin(inspecting, now, effects)

    def _inspect_reply(self, number: int, name: str, now: float) -> InspectReply:
        promise = self.voter.promise(name, now)
        return InspectReply(number, self.voter.token(name), promise.standing(now) if promise is not None else None)

    def _list(self, ask: int, now: float, effects: list[Effect]) -> None:
        until = now + self.fleet.question_lasts
        listing = ListRound(self.fleet, ListRequest(self._next_round(), ""), [ask], until)
        if self.fleet.me is not None:
            listing.names.update(self.voter.names())
            listing.complete = 1
        self._begin(listing, now, effects)

    def _ask_to_resign(self, ask: int, name: str, now: float, effects: list[Effect]) -> None:
        until = now + self.fleet.question_lasts
        asking = ResignRound(self.fleet, ResignRequest(self._next_round(), name), [ask], until)
        if self.fleet.me is not None and self.voter.awake:
            asking.answers[self.fleet.me] = self._note_resign_request(name, now, effects)
        self._begin(asking, now, effects)

    def _note_resign_request(self, name: str, now: float, effects: list[Effect]) -> bool:
        led = self.voter.ask_to_resign(name, now)
        if led:
            effects.append(Hint(name))
        return led

    # --- rounds ---

    def _next_round(self) -> int:
        self._round += 1
        return self._round

    def _begin(self, asked: Round, now: float, effects: list[Effect]) -> None:
        number = asked.question.round
        self._rounds[number] = asked
        asked.sent(now)
        if isinstance(asked, ClaimRound):
            assert self.fleet.me is not None
            own = self.voter.vote(self.fleet.me, asked.question, now)
            if own is not None:
                asked.take(self.fleet.me, own)
        self._evaluate(asked, now, effects)
        if number not in self._rounds:
            return
        self._send(asked, effects)
        self._timers.set(min(asked.resend_at, asked.ends_at), "round", number)

    def _send(self, asked: Round, effects: list[Effect]) -> None:
        effects.extend(Send(member, asked.question_to(member)) for member in sorted(asked.missing))

    def _count(self, sender: int, reply: Reply, now: float, effects: list[Effect]) -> None:
        asked = self._rounds.get(reply.round)
        if asked is None or sender not in asked.missing:
            return
        if isinstance(asked, ClaimRound) and not self.voter.knows(sender):
            return
        asked.take(sender, reply)
        if isinstance(asked, ClaimRound) and isinstance(reply, Refusal) and self.fleet.quorum == "none":
            self._resolve_conflict(asked.question, reply, now, effects)
            if reply.round not in self._rounds:
                return
        question = asked.next_question(sender)
        if question is not None:
            effects.append(Send(sender, question))
        self._evaluate(asked, now, effects)

    def _round_due(self, number: int, now: float, effects: list[Effect]) -> None:
        asked = self._rounds.get(number)
        if asked is None:
            return
        self._evaluate(asked, now, effects)  # a member whose reply was awaited may count as dead by now
        if number not in self._rounds:
            return
        if now >= asked.ends_at:
            self._end(asked, now, effects)
            return
        if now >= asked.resend_at:
            self._send(asked, effects)
            asked.sent(now)
        self._timers.set(min(asked.resend_at, asked.ends_at), "round", number)

    def _evaluate(self, asked: Round, now: float, effects: list[Effect]) -> None:
        """Give the outcome as soon as it is known."""
        awaited = self.liveness.alive(now) if self.fleet.me is not None else self.fleet.others
        match asked:
            case ClaimRound():
                self._evaluate_claim(asked, now, effects)
            case ReleaseRound():
                if asked.is_done(awaited if now < asked.begun + self.fleet.answer_within else ()):
                    self._settle(asked, Released(asked.grant), effects)
            case InspectRound():
                if (found := asked.outcome(awaited)) is not None:
                    self._settle(asked, found, effects)
                    asked.missing.clear()
            case ListRound():
                if asked.complete >= self.fleet.majority:
                    self._settle(asked, tuple(sorted(asked.names)), effects)
                    asked.missing.clear()
            case ResignRound():
                if self._are_enough(asked, awaited):
                    self._settle(asked, any(asked.answers.values()), effects)
        if not asked.missing and asked.is_settled:
            self._rounds.pop(asked.question.round, None)

    def _are_enough(self, asked: ResignRound, awaited: Collection[int]) -> bool:
        if self.fleet.quorum == "majority":
            return len(asked.answers) >= self.fleet.majority
        return bool(asked.answers) and not asked.missing.intersection(awaited)

    def _settle(self, asked: Round, answer: Outcome, effects: list[Effect]) -> None:
        if not asked.is_settled:
            asked.is_settled = True
            effects.extend(Answer(ask, answer) for ask in asked.asks)

    def _end(self, asked: Round, now: float, effects: list[Effect]) -> None:
        """Stop waiting for further replies."""
        self._rounds.pop(asked.question.round, None)
        if asked.is_settled:
            return
        match asked:
            case ClaimRound() if not asked.holds:
                self._rounds[asked.question.round] = asked
                if self.fleet.quorum == "none" and asked.poll.yes and not asked.poll.no:
                    asked.missing.clear()
                    self._evaluate(asked, now, effects)
                else:
                    asked.is_settled = True
                    self._lose(asked, now, effects)
            case ClaimRound():
                self._settle(asked, asked.too_few(asked.poll.answered), effects)
            case ReleaseRound():
                self._settle(asked, asked.too_few(asked.released), effects)
            case InspectRound():
                self._settle(asked, asked.final_outcome(), effects)
            case ListRound():
                found = tuple(sorted(asked.names)) if asked.complete else asked.too_few(0)
                self._settle(asked, found, effects)
            case ResignRound():
                enough = len(asked.answers) >= self.fleet.needed
                answer = any(asked.answers.values()) if enough else asked.too_few(len(asked.answers))
                self._settle(asked, answer, effects)

    # --- claims ---

    @abstractmethod
    def _evaluate_claim(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        """Act on the votes as soon as they decide."""

    @abstractmethod
    def _lose(self, voting: ClaimRound, now: float, effects: list[Effect]) -> None:
        """End a claim that was not won."""

    @abstractmethod
    def _resolve_conflict(self, claim: Claim, refusal: Refusal, now: float, effects: list[Effect]) -> None:
        """Act on a refusal that names another leader; without a quorum only."""
