"""The requests of one candidate: which are unanswered, whose answer it waits for, and the tokens in the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenure._election.effects import Acquire, Answer, Inspect, Release, Renew, Withdraw
from tenure._lease import Grant, Granted, HeldBy
from tenure.events import TokenFell


@dataclass(frozen=True, slots=True)
class Request:
    """An unanswered request: when it was sent, and for which holder name."""

    asked_at: float
    kind: type[Acquire] | type[Inspect] | type[Renew] | type[Release] | type[Withdraw]
    holder: str


class Requests:
    """The unanswered requests of a candidate by number; it waits for the answer of one at most."""

    def __init__(self) -> None:
        self.unanswered: dict[int, Request] = {}
        self.awaited = 0
        """The number of the request whose answer is awaited; 0 for none."""
        self.answer_due = math.inf
        """Until when it is awaited."""
        self.is_heard = True
        """Whether the store has answered since the newest request, whatever that was, and whatever it said."""
        self._newest = 0

    def add(self, request: Request, *, answer_due: float) -> int:
        """Note a request, and wait for its answer until *answer_due*; return its number."""
        self.awaited = self.add_unawaited(request)
        self.answer_due = answer_due
        return self.awaited

    def add_unawaited(self, request: Request) -> int:
        """Note a request whose answer is not awaited; return its number."""
        self._newest += 1
        self.is_heard = False
        self.unanswered[self._newest] = request
        return self._newest

    def abandon(self) -> None:
        """Stop waiting. The answer may still come; it is a late one then."""
        self.awaited = 0
        self.answer_due = math.inf

    def answered(self, number: int) -> tuple[Request, bool] | None:
        """Return the request with this *number*, and whether its answer was awaited; None if there is none."""
        request = self.unanswered.pop(number, None)
        if request is None:
            return None
        was_awaited = number == self.awaited
        if was_awaited:
            self.abandon()
        return request, was_awaited


class TokenOrder:
    """The newest token that the store has reported, to notice a store whose tokens fall: one restored from a backup."""

    def __init__(self) -> None:
        self._newest: tuple[int, str] = (0, "")  # and its holder
        self._reported_at = -math.inf

    def check(self, name: str, request: Request, answer: Answer, now: float) -> TokenFell | None:
        """Return an event if *answer* has a token older than one that the store gave before *request*."""
        newest, whose = self._newest
        match answer:
            case Granted(Grant(holder=holder, token=token)):
                fell = token < newest or (token == newest and holder != whose)
            case HeldBy(holder=holder, token=token) if token > 0 and request.kind is Acquire:
                # 0 where the store can't tell; and who only inspects may be answered by a replica that lags behind.
                fell = token < newest
            case _:
                return None
        if fell and request.asked_at < self._reported_at:
            return None  # it was the newest when the store answered
        if fell or token > newest:
            self._newest, self._reported_at = (token, holder), now
        return TokenFell(now, name, holder, token, newest) if fell else None
