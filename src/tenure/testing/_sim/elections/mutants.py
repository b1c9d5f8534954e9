"""Planted bugs: each swaps one small part of a run for a wrong one. A checker that cannot find them proves nothing.

Most of them were found in the field, in other projects. ``MUTANTS`` must be found; ``SURVIVORS`` break no promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tenure._election.acquire_times import AcquireTimes
from tenure._election.effects import Answer, Effect, Input, Release, Renew, RenewalWithheld
from tenure._election.machine import NEVER, Machine, State, _TermState
from tenure._election.requests import Request
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure.events import Reason
from tenure.testing._sim.client import Client
from tenure.testing._sim.elections.node import Node, Work
from tenure.testing._sim.elections.parts import Parts
from tenure.testing._sim.elections.queued_store import Place, QueuedStore
from tenure.testing._sim.elections.stores import Attempt, ClockStore, Question, Seen, WatchedStore, Watcher
from tenure.testing._sim.planted import Mutant

# --- in the machine: what is believed --------------------------------------------------------------------------------


class _CountsFromAnswer(Machine):
    def _on_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        super()._on_answer(replace(request, asked_at=now), answer, now, effects)


class _NoMargin(Machine):
    def _trust_limit(self, request: Request, granted: Granted) -> float:
        return request.asked_at - granted.age + self.timing.ttl


class _IgnoresAge(Machine):
    def _trust_limit(self, request: Request, granted: Granted) -> float:
        return super()._trust_limit(request, replace(granted, age=0.0))


class _RenewsOldGrantsLate(Machine):
    def _pace(self, granted: Granted) -> float:
        return 1.0


class _RenewsOldGrantsWithoutPause(Machine):
    def _paced(self, seconds: float, pace: float) -> float:
        return seconds * max(0.001, pace)


class _LeadsWithoutTime(Machine):
    def _begin_term(self, request: Request, granted: Granted, now: float, effects: list[Effect]) -> None:
        grace, self.timing = self.timing.grace, replace(self.timing, grace=0.0)
        super()._begin_term(request, granted, now, effects)
        self.timing = replace(self.timing, grace=grace)


class _IgnoresLateRequests(Machine):
    def _on_late_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        late = replace(answer, resign_asked=False) if isinstance(answer, Granted) else answer
        super()._on_late_answer(request, late, now, effects)


class _BelievesLateAnswer(Machine):
    def _on_late_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        super()._on_late_answer(replace(request, asked_at=now), answer, now, effects)


class _NoAnswerIsYes(Machine):
    def _renewal_missed(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        super()._renewal_missed(term, why, now, effects)
        self._extend_trust(term, now + self.timing.window, now, effects)


class _NoIsNoAnswer(Machine):
    def _lease_lost(self, term: _TermState, now: float, effects: list[Effect]) -> None:
        if self.state is State.RENEWING:
            self._renewal_missed(term, "lost", now, effects)


class _IgnoresLateNo(Machine):
    def _revoke_trust(self, term: _TermState, effects: list[Effect]) -> None:
        if self.state is not State.RESIGNING:
            super()._revoke_trust(term, effects)


class _LeadsOnEndedLease(Machine):
    def _trust_limit(self, request: Request, granted: Granted) -> float:
        until = super()._trust_limit(request, granted)
        waits = self.state in (State.STANDBY, State.CAMPAIGNING)
        return max(until, self._answered_at + self.timing.grace + 0.1) if waits else until

    def handle(self, event: Input, now: float) -> list[Effect]:
        self._answered_at = now
        return super().handle(event, now)


class _WithheldIsYes(Machine):
    def _on_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        if isinstance(answer, RenewalWithheld) and self._term is not None:
            answer = Granted(self._term.grant)
        super()._on_answer(request, answer, now, effects)


class _IgnoresTime(Machine):
    def _cancel_at(self, term: _TermState) -> float:
        return NEVER


# --- in the machine: what is done ------------------------------------------------------------------------------------


class _ReleasesFirst(Machine):
    def _end_term(self, reason: Reason, now: float, effects: list[Effect]) -> None:
        super()._end_term(reason, now, effects)
        if self._term is not None and self._term.is_ours:
            effects.append(Release(self._new_request(Release, self._term.grant.holder, now), self._term.grant))


class _CancelsLate(Machine):
    def _cancel_at(self, term: _TermState) -> float:
        return term.trusted_until


class _GivesUpAfterLoss(Machine):
    def _close_term(self, term: _TermState, now: float) -> None:
        super()._close_term(term, now)
        self._acquire_times.due = NEVER


class _NewNameForEachTry(Machine):
    def _acquire_later(self, why: str, now: float, effects: list[Effect]) -> None:
        super()._acquire_later(why, now, effects)
        self._acquisition += 1


class _OneNameForAllTerms(Machine):
    def _close_term(self, term: _TermState, now: float) -> None:
        super()._close_term(term, now)
        self._acquisition -= 1


class _KeepsLateGrants(Machine):
    def _release_unused(self, grant: Grant, now: float, effects: list[Effect]) -> None:
        pass


class _AsksWithoutPause(Machine):
    def _renewal_missed(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        super()._renewal_missed(term, why, now, effects)
        term.renew_at = now


class _TimesOfEveryHint(AcquireTimes):
    def _earliest(self, at: float, last: float) -> float:
        return at


class _BelievesEveryHint(Machine):
    TIMES = _TimesOfEveryHint


class _ForgetsStop(Machine):
    def _close_term(self, term: _TermState, now: float) -> None:
        self._stopping = False
        super()._close_term(term, now)


class _SilentOverrun(Machine):
    def _end_term(self, reason: Reason, now: float, effects: list[Effect]) -> None:
        super()._end_term(reason, now, effects)
        if self._term is not None:
            self._term.stop_by = NEVER


class _AsksAgainUnheard(Machine):
    def _may_ask(self) -> bool:
        return True


# --- in the machine: a queue ---------------------------------------------------------------------------------------


class _NeverWithdraws(Machine):
    def _withdraw(self, place: str, now: float, effects: list[Effect]) -> None:
        self._place = None


class _TimesWithoutPlace(AcquireTimes):
    def _wait_while_held(self, remaining: float | None) -> float:
        return 1.1 * self._timing.ttl if self._keeps_place else super()._wait_while_held(remaining)


class _KeepsNoPlace(Machine):
    TIMES = _TimesWithoutPlace


class _WithdrawsAnyLateRefusal(Machine):
    def _on_late_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        super()._on_late_answer(request, answer, now, effects)
        if self._queued and isinstance(answer, HeldBy) and self._term is not None:
            self._withdraw(request.holder, now, effects)


# --- in the driver and in the setting --------------------------------------------------------------------------------


class _RenewsStalledWork(Node):
    def _ask(self, question: Question) -> None:
        stalled, self.stalled = self.stalled, False
        super()._ask(question)
        self.stalled = stalled


class _LosesQuestions(Client[Node]):
    def unanswered(self, ask: int) -> None:
        if self.process.world.rng.random() < 0.5:
            super().unanswered(ask)


class _IllIsWell(Node):
    """Takes a health callback that raises for one that says yes."""

    def _health_raised(self, question: Question, error: BaseException) -> None:
        self._send(question)


class _WaitsForHealth(Node):
    """Waits for a health callback that hangs."""

    def _health_patience(self, within: float) -> float:
        return 1e9


class _LeadsOnAfterOddEnd(Node):
    """Expects of work no more than an Exception."""

    def _raised(self, work: Work, error: BaseException) -> None:
        if isinstance(error, Exception):
            super()._raised(work, error)
        else:
            self.work = None
            self.checkers.left(self)


class _EventHookExceptionsOnly(Node):
    """Expects of an event hook no more than an Exception."""

    def _reports_event_hook(self, error: BaseException) -> bool:
        return isinstance(error, Exception)


class _WithdrawsTooEarly(Node):
    """Doesn't wait for a request of the same holder that is under way."""

    def _asks_as(self, holder: str) -> bool:
        return False


class _WorkNotTold(Node):
    def _trust(self, work: Work, until: float, event: Input) -> None:
        if until > -math.inf:
            super()._trust(work, until, event)


class _TellsWrongTime(Node):
    """Reads the machine's clock when the answer comes, not when the question is put."""

    def _handle(self, event: Input) -> None:
        super()._handle(event)
        for question in self.machine._requests.unanswered.values():
            object.__setattr__(question, "asked_at", self.now())


# --- in the store ----------------------------------------------------------------------------------------------------


class _EarlyStore(ClockStore):
    def held(self) -> bool:
        return super().held() and self.now() < self.expires - 0.25 * self.ttl


class _EarlyWatcher(WatchedStore):
    def outlived(self, node: Watcher, local: float) -> int | None:
        version, since = node.seen
        return version if local - since >= 0.75 * self.ttl else None


class _TokenStays(ClockStore):
    def give(self, holder: str) -> None:
        before = self.token
        super().give(holder)
        self.token = max(1, before)


class _TokenRises(ClockStore):
    def renew(self, grant: Grant) -> Granted | Lost:
        answer = super().renew(grant)
        if isinstance(answer, Granted):
            self.token += 1
            return Granted(Grant(self.name, self.holder, self.token), answer.resign_asked)
        return answer


class _TokenStartsAnew(ClockStore):
    def forget(self) -> None:
        super().forget()
        self.token = 0


class _TokenWithRecord(ClockStore):
    """Deletes the record with the lease, and the token with it."""

    def release(self, grant: Grant) -> Released | Lost:
        answer = super().release(grant)
        if isinstance(answer, Released):
            self.token = 0
        return answer


class _RenewsByName(ClockStore):
    def renew(self, grant: Grant) -> Granted | Lost:
        if not self.held():
            return Lost(grant)
        self.expires = self.now() + self.ttl
        return Granted(grant, self.resign_asked)


class _ReleasesByName(ClockStore):
    def release(self, grant: Grant) -> Released | Lost:
        if not self.held():
            return Lost(grant)
        self.holder = ""
        return Released(grant)


class _ForgetsAndGives(ClockStore):
    def forget(self) -> None:
        self.holder = ""


class _ComparesWallClocks(WatchedStore):
    """Takes the lease over when *its own* wall clock says that the time written by another one is a ttl ago."""

    def reading(self, node: Watcher, answer: Any, local: float) -> Granted | HeldBy | Vacant | Lost | Released:
        result = super().reading(node, answer, local)
        if isinstance(answer, Seen) and local - answer.written_at >= self.ttl:
            node.seen = (answer.version, -math.inf)
        return result


class _CountsWatchFromQuestion(WatchedStore):
    """Dates what was seen back to when the lease was last looked at, before it was renewed."""

    def reading(self, node: Watcher, answer: Any, local: float) -> Granted | HeldBy | Vacant | Lost | Released:
        before = node.seen[1]
        result = super().reading(node, answer, local)
        if isinstance(answer, Seen) and before > -math.inf and node.seen[1] != before:
            node.seen = (answer.version, before)
        return result


class _RenewsEndedLease(ClockStore):
    def renew(self, grant: Grant) -> Granted | Lost:
        if not self.same(grant):
            return Lost(grant)
        self.expires = self.now() + self.ttl
        return Granted(grant, self.resign_asked)


class _CountsFromSending(ClockStore):
    """Counts a renewal from before it waited: one that is carried out late, after newer ones, shortens the lease."""

    def message(self, node: Watcher, question: Question, local: float) -> Any:
        return Attempt(question, None, self.now()) if isinstance(question, Renew) else question

    def perform(self, message: Any) -> Any:
        if not isinstance(message, Attempt):
            return super().perform(message)
        answer = super().perform(message.question)
        if isinstance(answer, Granted):
            self.expires = message.sent_at + self.ttl
        return answer


class _PlacesStay(QueuedStore):
    """Ends a lease in time, and no place of a candidate that waits."""

    def is_over(self, place: Place) -> bool:
        return super().is_over(place) and (place.holder, place.token) == (self.holder, self.token)

    def acquire(self, holder: str) -> Granted | HeldBy:
        answer = super().acquire(holder)
        for place in self.places[1:]:
            place.expires = self.now() + 1e9
        return answer


def _store(store: type[ClockStore]) -> Parts:
    """Put the verbs of *store* into both kinds of store, with the watched one's own way of judging expiry."""
    return Parts(clock_store=store, watched_store=type(f"{store.__name__}Watched", (store, WatchedStore), {}))


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "counts-from-answer": Mutant(
            "a lease is counted from when the answer came", Parts(machine=_CountsFromAnswer), "two leaders"
        ),
        "no-margin": Mutant("no allowance for clocks that drift", Parts(machine=_NoMargin), "two leaders"),
        "ignores-age": Mutant(
            "a grant counts from its request, however old it is", Parts(machine=_IgnoresAge), "two leaders"
        ),
        "renews-old-grants-late": Mutant(
            "a grant that leaves less time is renewed as late as any", Parts(machine=_RenewsOldGrantsLate), "unstable"
        ),
        "renews-old-grants-without-pause": Mutant(
            "a grant that leaves no time is renewed in a loop", Parts(machine=_RenewsOldGrantsWithoutPause), "busy"
        ),
        "leads-without-time": Mutant(
            "a term begins with a grant that is too old for it", Parts(machine=_LeadsWithoutTime), "grace"
        ),
        "ignores-late-requests": Mutant(
            "a request to resign in a late yes is ignored", Parts(machine=_IgnoresLateRequests), "deaf leader"
        ),
        "believes-late-answer": Mutant(
            "a late yes counts as if just given", Parts(machine=_BelievesLateAnswer), "two leaders"
        ),
        "no-answer-is-yes": Mutant(
            "no answer to a renewal counts as yes", Parts(machine=_NoAnswerIsYes), "two leaders"
        ),
        "no-is-no-answer": Mutant("a no is retried like no answer", Parts(machine=_NoIsNoAnswer), "trust"),
        "ignores-late-no": Mutant("a no that comes while leaving is ignored", Parts(machine=_IgnoresLateNo), "trust"),
        "leads-on-ended-lease": Mutant(
            "elected with a lease that ended while waiting", Parts(machine=_LeadsOnEndedLease), "trust"
        ),
        "withheld-is-yes": Mutant("a stalled leader keeps its term", Parts(machine=_WithheldIsYes), "two leaders"),
        "ignores-time": Mutant("the work is cancelled only by a no", Parts(machine=_IgnoresTime), "grace"),
        "releases-first": Mutant(
            "the lease is released while the work ends", Parts(machine=_ReleasesFirst), "late release"
        ),
        "cancels-late": Mutant("the work is cancelled when trust ends", Parts(machine=_CancelsLate), "grace"),
        "gives-up": Mutant("a leader that lost does not stand again", Parts(machine=_GivesUpAfterLoss), "no leader"),
        "new-name-for-each-try": Mutant(
            "a retried acquisition is not idempotent", Parts(machine=_NewNameForEachTry), "identity"
        ),
        "one-name-for-all-terms": Mutant(
            "every term of a candidate has the same holder", Parts(machine=_OneNameForAllTerms), "identity"
        ),
        "asks-again-unheard": Mutant(
            "a candidate that hears nothing goes on asking for the name, and keeps it",
            Parts(machine=_AsksAgainUnheard),
            "no leader",
        ),
        "keeps-late-grants": Mutant("a late grant is not released", Parts(machine=_KeepsLateGrants), "orphan"),
        "asks-without-pause": Mutant(
            "a refused connection is tried in a loop", Parts(machine=_AsksWithoutPause), "busy"
        ),
        "believes-every-hint": Mutant("every hint makes it ask", Parts(machine=_BelievesEveryHint), "too soon"),
        "forgets-stop": Mutant("a stopped leader stands again", Parts(machine=_ForgetsStop), "after stop"),
        "silent-overrun": Mutant("work that does not stop is not reported", Parts(machine=_SilentOverrun), "overrun"),
        "renews-stalled-work": Mutant(
            "renewal does not depend on progress", Parts(node=_RenewsStalledWork), "stalled leader"
        ),
        "loses-questions": Mutant("some questions never come back", Parts(client=_LosesQuestions), "unsettled"),
        "work-not-told": Mutant("the work is not cancelled at a no", Parts(node=_WorkNotTold), "trust"),
        "tells-wrong-time": Mutant("questions are dated when looked at", Parts(node=_TellsWrongTime), "trust"),
        "shared-identity": Mutant("all candidates have one name", Parts(shares_identity=True), "two leaders"),
        "early-store": Mutant(
            "the store gives a lease away early",
            Parts(clock_store=_EarlyStore, watched_store=_EarlyWatcher),
            "two leaders",
        ),
        "token-stays": Mutant("an acquisition does not raise the token", _store(_TokenStays), "token order"),
        "token-rises": Mutant("a renewal raises the token", _store(_TokenRises), "token order"),
        "token-starts-anew": Mutant("a restart resets the token", _store(_TokenStartsAnew), "token order"),
        "token-with-record": Mutant("a release resets the token", _store(_TokenWithRecord), "token order"),
        "counts-from-sending": Mutant(
            "a renewal that is carried out late shortens the lease", Parts(clock_store=_CountsFromSending), "shortened"
        ),
        "renews-by-name": Mutant("the store renews for any holder", _store(_RenewsByName), "stale claim"),
        "releases-by-name": Mutant("the store releases for any holder", _store(_ReleasesByName), "two leaders"),
        "forgets-and-gives": Mutant(
            "a store that lost its leases gives new ones at once", _store(_ForgetsAndGives), "two leaders"
        ),
        "ill-is-well": Mutant(
            "a health callback that raises counts as healthy", Parts(node=_IllIsWell), "stalled leader"
        ),
        "waits-for-health": Mutant(
            "a health callback that hangs is waited for", Parts(node=_WaitsForHealth), "unsettled"
        ),
        "leads-on-after-odd-end": Mutant(
            "work that raises a BaseException leaves its lease renewed", Parts(node=_LeadsOnAfterOddEnd), "idle leader"
        ),
        "event-hook-exceptions-only": Mutant(
            "an event hook may raise no BaseException", Parts(node=_EventHookExceptionsOnly), "user object"
        ),
        "never-withdraws": Mutant(
            "a stopped candidate leaves its place in the queue", Parts(machine=_NeverWithdraws), "left place"
        ),
        "withdraws-too-early": Mutant(
            "a withdrawal overtakes the request that takes the place", Parts(node=_WithdrawsTooEarly), "left place"
        ),
        "keeps-no-place": Mutant(
            "a waiting candidate asks too seldom to keep its place", Parts(machine=_KeepsNoPlace), "lost place"
        ),
        "withdraws-any-late-refusal": Mutant(
            "a late refusal withdraws what was granted after it",
            Parts(machine=_WithdrawsAnyLateRefusal),
            "late release",
        ),
        "places-stay": Mutant(
            "the place of a dead candidate stays in the queue", Parts(queued_store=_PlacesStay), "no leader"
        ),
        "compares-wall-clocks": Mutant(
            "expiry is judged by comparing two machines' clocks",
            Parts(watched_store=_ComparesWallClocks),
            "two leaders",
        ),
        "watches-from-question": Mutant(
            "a change counts from the look before it", Parts(watched_store=_CountsWatchFromQuestion), "two leaders"
        ),
    }
)
"""Bugs that must be found, by name."""

SURVIVORS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "renews-ended-lease": Mutant(
            "a lease that ended is renewed if no candidate took it", Parts(clock_store=_RenewsEndedLease)
        ),
    }
)
"""Changes that look like bugs and break no promise: a checker that finds them is wrong itself."""
