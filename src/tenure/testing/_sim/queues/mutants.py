"""Planted bugs: each swaps one small part of a run for a wrong one. A checker that cannot find them proves nothing.

Most of them were found in the field, in other projects. ``MUTANTS`` must be found; ``SURVIVORS`` break no promise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tenure._backends.memory.queue import Ids, MessageState, Queue, Row, Shelf
from tenure._backends.memory.queue import Locks as LockedRows
from tenure._jitter import Rng
from tenure._lease import NoAnswer
from tenure._queue.machine import (
    NEVER,
    Effect,
    LockGroup,
    Locks,
    Pump,
    PumpSettings,
    Renew,
    Settle,
    State,
    _Question,
)
from tenure._queue.message import (
    COMPLETE,
    LAPSED,
    Abandon,
    Complete,
    Delivery,
    Failure,
    GiveBack,
    Lapsed,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    Token,
    Verdict,
)
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.broker import QUEUE, Send, SimulatedBroker
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.handlers import Work
from tenure.testing._sim.queues.simulation import Parts

if TYPE_CHECKING:
    from tenure.testing._sim.queues.simulation import Simulation
    from tenure.testing._sim.world import SkewedClock

# --- in the machines: what is believed -------------------------------------------------------------------------------


class _CountsFromAnswer(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[Effect]) -> None:
        self._claim_asked_at = now
        super()._keep(deliveries, now, effects)


class _BelievesLateClaim(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[Effect]) -> None:
        if now >= self._claim_asked_at + self.settings.timing.renew_every:
            self._claim_asked_at = now
        super()._keep(deliveries, now, effects)


class _NoMargin(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[Effect]) -> None:
        super()._keep(deliveries, now, effects)
        for hold in self._holds.values():
            if hold.token == deliveries[0].token:
                hold.sure_until = self._claim_asked_at + self.settings.timing.ttl


class _RenewsFromAnswer(Locks):
    def _take(
        self,
        question: _Question,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[Effect],
    ) -> None:
        super()._take(_Question(now, question.holds, question.held), answers, now, effects)


class _NoAnswerIsYes(Locks):
    def _take(
        self,
        question: _Question,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[Effect],
    ) -> None:
        if isinstance(answers, NoAnswer):
            answers = [Renewed(0.0)] * len(question.held)
        super()._take(question, answers, now, effects)


class _IgnoresNo(Locks):
    def _lose(self, hold: LockGroup, one: Delivery | SessionLock, now: float, effects: list[Effect]) -> None:
        pass


class _ServesOldBuffer(Pump):
    """Takes what waits however long it has waited."""

    def take(self, now: float) -> Delivery | None:
        line = self._line
        while line:
            if line[0].waiting and (delivery := self._begin(line[0], now)) is not None:
                return delivery
            line.popleft()
        return None


class _KeepsOldBuffer(Locks):
    """Neither gives back nor renews what waits."""

    def _take_out(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        pass


class _RenewsForAll(Locks):
    """Believes that a renewal of what runs is one of what waits."""

    def _look_at(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        waiting = list(hold.waiting)
        hold.waiting.clear()
        super()._look_at(hold, now, effects)
        hold.waiting.extend(waiting)


# --- in the machines: what is done -----------------------------------------------------------------------------------


class _CancelsLate(Locks):
    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, holds: dict[Token, LockGroup], *, now: float
    ) -> None:
        settings = replace(settings, timing=replace(settings.timing, grace=0.0))
        super().__init__(name, holder, settings, rng, holds, now=now)


class _KeepsForEver(Locks):
    """Takes what a handler has kept for what a handler runs on with."""

    def _look_at(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        kept, hold.kept = hold.kept, set()
        super()._look_at(hold, now, effects)
        hold.kept = kept


class _IgnoresTime(Locks):
    def _end(self, hold: LockGroup, why: str, now: float, effects: list[Effect]) -> None:
        hold.over = True


class _IgnoresMaxHold(Locks):
    def _look_at(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        for sequence, (delivery, _) in hold.running.items():
            if hold.running[sequence][1] < math.inf:
                hold.running[sequence] = (delivery, now)
        super()._look_at(hold, now, effects)


class _ForgetsUnanswered(Pump):
    """Drops a verdict that got no answer."""

    def _unanswered(self, ask: int, why: str, now: float, effects: list[Effect]) -> None:
        self._settling.pop(ask, None)
        super()._unanswered(ask, why, now, effects)


class _PassesLateResults(Pump):
    """Passes the verdict of a handler whose lock is known to be lost."""

    def judge(self, delivery: Delivery, verdict: Verdict) -> bool:
        if super().judge(delivery, verdict):
            return True
        self._unsettled.append(Settlement(delivery, verdict))
        return True


class _DrainLosesBuffer(Pump):
    def _empty_buffer(self, now: float, effects: list[Effect]) -> None:
        if self.state is State.DRAINING:
            self._line.clear()
        else:
            super()._empty_buffer(now, effects)


class _AbandonsBuffer(Pump):
    """Gives back what nobody tried as if it had been tried."""

    def _put_back(self, hold: LockGroup) -> int:
        before = len(self._unsettled)
        count = super()._put_back(hold)
        self._unsettled[before:] = [Settlement(one, Abandon()) for one, _ in self._unsettled[before:]]
        return count


class _StopsAtOnce(Pump):
    """Calls itself stopped when no handler runs any more, whatever is unanswered."""

    def _wind_up(self, now: float, effects: list[Effect]) -> None:
        super()._wind_up(now, effects)
        if self.state is State.DRAINING and not self.busy:
            self._move(State.STOPPED)


class _ForgetsReturns(Pump):
    """Stops without waiting for what the locks give back."""

    def _wind_up(self, now: float, effects: list[Effect]) -> None:
        super()._wind_up(now, effects)
        under_way = self.busy or self._claiming or self._settling or self._unsettled
        if self.state is State.DRAINING and not under_way:
            self._move(State.STOPPED)


class _ServesWhilePaused(Pump):
    def _empty_buffer(self, now: float, effects: list[Effect]) -> None:
        if self.state is not State.PAUSED:
            super()._empty_buffer(now, effects)


class _ClaimsWithoutPause(Pump):
    def _pause(self, due_in: float | None) -> float:
        return 0.0


class _WaitsForHints(Pump):
    """Never looks unless it is told to."""

    def _pause(self, due_in: float | None) -> float:
        return NEVER


class _GivesUpAsking(Pump):
    """Does not claim again after a claim without an answer."""

    def _unanswered(self, ask: int, why: str, now: float, effects: list[Effect]) -> None:
        gives_up = ask == self._claiming
        super()._unanswered(ask, why, now, effects)
        if gives_up:
            self._claim_at = NEVER


class _CompletesFailures(Pump):
    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        return super().done(delivery, COMPLETE if isinstance(verdict, Abandon) else verdict)


# --- in the broker ---------------------------------------------------------------------------------------------------


class _SettlesById(SimulatedBroker):
    """Takes a verdict for what is locked, whoever holds the lock."""

    def _locked(self, delivery: Delivery, now: float) -> tuple[Shelf, Row] | None:
        shelf = self._shelf(delivery.queue, now)
        row = shelf.rows.get(delivery.sequence) if shelf else None
        return (shelf, row) if shelf is not None and row is not None and row.place is MessageState.LOCKED else None


class _SettlesAfterTheEnd(SimulatedBroker):
    """Takes a verdict after the lock has ended, if nobody else has the message yet."""

    def _shelf(self, name: str, now: float) -> Shelf | None:
        return super()._shelf(name, now if self._looks else -math.inf)

    _looks = True

    def _locked(self, delivery: Delivery, now: float) -> tuple[Shelf, Row] | None:
        self._looks = False
        found = super()._locked(delivery, now)
        self._looks = True
        return found


class _CountsAtSettle(SimulatedBroker):
    """Counts a delivery when it is abandoned: a crash does not count."""

    def _lock_ends(self, shelf: Shelf, row: Row, now: float) -> None:
        row.delivery_count -= 1
        super()._lock_ends(shelf, row, now)


class _CountsGiveBack(SimulatedBroker):
    def _return(self, shelf: Shelf, row: Row, verdict: Abandon | GiveBack, now: float) -> bool:
        row.delivery_count += isinstance(verdict, GiveBack)
        return super()._return(shelf, row, verdict, now)


class _OneTryMore(SimulatedBroker):
    def _return(self, shelf: Shelf, row: Row, verdict: Abandon | GiveBack, now: float) -> bool:
        row.delivery_count -= 1
        died = super()._return(shelf, row, verdict, now)
        row.delivery_count += 1
        return died


class _OneCrashMore(SimulatedBroker):
    """Lets a message live whose last lock has ended."""

    def _lock_ends(self, shelf: Shelf, row: Row, now: float) -> None:
        self._unlock(row)
        self._remember(row, "expired", None, now)
        self._put(shelf, row, now, now)


class _NoReason(SimulatedBroker):
    def _bury(self, shelf: Shelf, row: Row, reason: str, description: str, now: float) -> None:
        super()._bury(shelf, row, "", "", now)


class _NoError(SimulatedBroker):
    """Forgets what failed."""

    def _remember(self, row: Row, outcome: str, error: Failure | None, now: float) -> None:
        super()._remember(row, outcome, None, now)


class _NeverExpires(SimulatedBroker):
    def _locks_end(self, shelf: Shelf, locks: LockedRows, now: float) -> None:
        pass


class _ExpiresEarly(SimulatedBroker):
    """Hands out what is locked a quarter of a lock too early."""

    def _lock(self, shelf: Shelf, rows: list[Row], until: float, token: int = 0) -> Sequence[Delivery]:
        early = 0.25 * self._simulation.plan.timing.ttl
        return super()._lock(shelf, rows, until - early, token)


class _ForgetsRenewal(SimulatedBroker):
    """Says yes to a renewal, and extends nothing."""

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> bool:
        return isinstance(one, Delivery) and self._locked(one, now) is not None


class _CompletesAndKeeps(SimulatedBroker):
    """Says yes to a first complete, and leaves the message where it is."""

    def _complete(self, shelf: Shelf, row: Row, verdict: Complete, now: float) -> Iterable[str]:
        if row.delivery_count == 1:
            shelf.rows[row.sequence] = row
            self._put(shelf, row, now, now)
        return super()._complete(shelf, row, verdict, now)


class _DropsTheDead(SimulatedBroker):
    def _bury(self, shelf: Shelf, row: Row, reason: str, description: str, now: float) -> None:
        self._move(shelf, row, MessageState.GONE)


class _NoDelay(SimulatedBroker):
    def _put(self, shelf: Shelf, row: Row, visible_at: float, now: float) -> None:
        super()._put(shelf, row, now, now)


class _KeepsTwice(SimulatedBroker):
    """Knows no ids: what is sent again is kept again."""

    def _send(self, name: str, messages: Sequence[Outgoing], now: float) -> list[str]:
        self._queue(name).sent = Ids()
        return super()._send(name, messages, now)


class _SendsIntoTheVoid(SimulatedBroker):
    """Acknowledges the last message of a batch, and does not keep it."""

    def _keep(self, queue: Queue, message: Outgoing, name: str, now: float) -> str:
        if queue.sequence % 20 == 0:
            return name
        return super()._keep(queue, message, name, now)


class _OldTokens(SimulatedBroker):
    """Begins with the first token again now and then, as after a restart that forgot where it was."""

    def _new_token(self) -> int:
        if self._memory.tokens >= 20:
            self._memory.tokens = 0
        return super()._new_token()


class _CountsFromBeginning(SimulatedBroker):
    """Counts a renewal from before it waited: one that is carried out late, after newer ones, shortens the lock."""

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        found = self._locked(one, now) if isinstance(one, Delivery) else None
        if found is None:
            return None
        _, row = found
        row.locked_until = until - (now - self.begun_at)
        return row.locked_until


class _SettlesLateByItself(SimulatedBroker):
    """Judges a verdict by what was true when it was begun, and not when it is carried out."""

    def _locked(self, one: Delivery, now: float) -> tuple[Shelf, Row] | None:
        return super()._locked(one, min(now, self.begun_at))


class _KeepsWhatItRefuses(SimulatedBroker):
    """Full, it says that it keeps nothing, and keeps the first message all the same."""

    def refusal(self, message: object) -> str:
        why = super().refusal(message)
        if why and isinstance(message, Send):
            self._send(QUEUE, message.messages[:1], self._clock.now())
        return why


class _RefusesToSettle(SimulatedBroker):
    """Full, it refuses verdicts, too, and for long."""

    def refusal(self, message: object) -> str:
        is_full = isinstance(message, Settle | Renew) and self.full_until
        return "the store is full" if is_full else super().refusal(message)

    def heal(self) -> None:
        pass


class _GoneWhileAway(SimulatedBroker):
    """What it is asked for while it is away is said to be no more."""

    def refusal(self, message: object) -> str:
        why = super().refusal(message)
        return "" if isinstance(message, Renew) and why else why

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        return [LAPSED] * len(held) if super().refusal(None) else await super().renew(held, lock)


class _CutIsLost(SimulatedBroker):
    """Says of what it can't ask about that it is lost."""

    def renew_others(
        self, held: Sequence[Delivery | SessionLock], lock: float
    ) -> Sequence[Renewed | Lapsed | NoAnswer]:
        return [LAPSED if isinstance(one, NoAnswer) else one for one in super().renew_others(held, lock)]


class _CutIsRenewed(Locks):
    """Takes what could not be asked about for renewed with the others."""

    def _take(
        self,
        question: _Question,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[Effect],
    ) -> None:
        if not isinstance(answers, NoAnswer):
            answers = [Renewed(0.0) if isinstance(one, NoAnswer) else one for one in answers]
        super()._take(question, answers, now, effects)


# --- around the machines: what a user's own objects may do ------------------------------------------------------------


class _JudgesByText(Consumer):
    """Writes an error down as it is."""

    def _verdict(self, error: BaseException, delivery: Delivery) -> Verdict:
        return Abandon(0.0, Failure(type(error).__name__, str(error)))


class _LosesSlot(Consumer):
    """Takes a handler's own CancelledError for the end of its slot."""

    def _conclude(self, work: Work) -> None:
        if not isinstance(work.error, asyncio.CancelledError):
            super()._conclude(work)


class _GoesOnAfterInterrupt(Consumer):
    def _end_with_interrupt(self) -> None:
        pass


class _TakesFewOfHook(Consumer):
    """Expects of an error hook no more than an Exception."""

    def _reports_hook(self, error: BaseException) -> bool:
        return isinstance(error, Exception)


class _TakesFewOfEar(Consumer):
    def _reports_ear(self, error: BaseException) -> bool:
        return isinstance(error, Exception)


class _WaitsForHook(Consumer):
    def _hook_patience(self) -> float:
        return 1e9


class _RenewsOnTheLoop(Consumer):
    """Keeps its locks where handlers and hooks run."""

    def __init__(self, simulation: Simulation, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(simulation, number, name, clock)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self._loop_soon, self._locks_ring)


# --- what breaks no promise ------------------------------------------------------------------------------------------


class _PassesOneByOne(Pump):
    """Passes each verdict in a call of its own."""

    def _flush(self, now: float, effects: list[Effect]) -> None:
        unsettled, self._unsettled = self._unsettled, self._unsettled[:1]
        super()._flush(now, effects)
        self._unsettled += unsettled[1:]


class _NeverPrefetches(Pump):
    def _set_target(self, now: float) -> None:
        self._target = 0


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "counts-from-answer": Mutant(
            "a lock is counted from when the answer came", Parts(pump=_CountsFromAnswer), "outlives lock"
        ),
        "believes-late-claim": Mutant(
            "a claim that comes late counts as if just made", Parts(pump=_BelievesLateClaim), "outlives lock"
        ),
        "no-margin": Mutant("no allowance for clocks that drift", Parts(pump=_NoMargin), "outlives lock"),
        "renews-from-answer": Mutant(
            "a renewal is counted from when the answer came", Parts(locks=_RenewsFromAnswer), "outlives lock"
        ),
        "no-answer-is-yes": Mutant("no answer to a renewal counts as yes", Parts(locks=_NoAnswerIsYes), "two sure"),
        "ignores-no": Mutant("a no to a renewal is ignored", Parts(locks=_IgnoresNo), "late result"),
        "buffer-outlives-locks": Mutant(
            "what waits is neither renewed nor given back",
            Parts(pump=_ServesOldBuffer, locks=_KeepsOldBuffer),
            "unsure start",
        ),
        "renews-for-all": Mutant(
            "a renewal of what runs counts for what waits",
            Parts(pump=_ServesOldBuffer, locks=_RenewsForAll),
            "outlives lock",
        ),
        "cancels-late": Mutant("a handler is told to stop when its lock ends", Parts(locks=_CancelsLate), "grace"),
        "ignores-time": Mutant("a handler is told to stop only by a no", Parts(locks=_IgnoresTime), "untold"),
        "ignores-max-hold": Mutant("a handler may run for ever", Parts(locks=_IgnoresMaxHold), "max hold"),
        "forgets-unanswered": Mutant(
            "a verdict without an answer is dropped", Parts(pump=_ForgetsUnanswered), "left behind"
        ),
        "passes-late-results": Mutant(
            "the result of a lost lock is passed on", Parts(pump=_PassesLateResults), "late result"
        ),
        "drain-loses-buffer": Mutant("a drain forgets what waits", Parts(pump=_DrainLosesBuffer), "left behind"),
        "abandons-buffer": Mutant("what nobody tried is abandoned", Parts(pump=_AbandonsBuffer), "verdict"),
        "stops-at-once": Mutant("a drain does not wait for answers", Parts(pump=_StopsAtOnce), "left behind"),
        "forgets-returns": Mutant(
            "a drain does not wait for what the locks give back", Parts(pump=_ForgetsReturns), "left behind"
        ),
        "keeps-for-ever": Mutant("what a handler keeps is held on", Parts(locks=_KeepsForEver), "max hold"),
        "serves-while-paused": Mutant(
            "what waits is handled during a pause", Parts(pump=_ServesWhilePaused), "left behind"
        ),
        "claims-without-pause": Mutant("an empty queue is asked in a loop", Parts(pump=_ClaimsWithoutPause), "busy"),
        "waits-for-hints": Mutant("nobody looks unless told to", Parts(pump=_WaitsForHints), "not drained"),
        "gives-up-asking": Mutant(
            "a claim without an answer is the last one", Parts(pump=_GivesUpAsking), "not drained"
        ),
        "completes-failures": Mutant("a failed message is completed", Parts(pump=_CompletesFailures), "verdict"),
        "settles-by-id": Mutant("a verdict needs no token", Parts(broker=_SettlesById), "stale verb"),
        "settles-after-the-end": Mutant(
            "a verdict is taken after the lock has ended", Parts(broker=_SettlesAfterTheEnd), "stale verb"
        ),
        "counts-at-settle": Mutant("a crash does not count as a delivery", Parts(broker=_CountsAtSettle), "count"),
        "counts-give-back": Mutant("a give-back counts as a delivery", Parts(broker=_CountsGiveBack), "count"),
        "one-try-more": Mutant("one delivery more than allowed", Parts(broker=_OneTryMore), "tries"),
        "one-crash-more": Mutant("one crash more than allowed", Parts(broker=_OneCrashMore), "tries"),
        "no-reason": Mutant("a dead letter has no reason", Parts(broker=_NoReason), "dead letter"),
        "no-error": Mutant("a dead letter has no error", Parts(broker=_NoError), "dead letter"),
        "never-expires": Mutant("the lock of a dead consumer never ends", Parts(broker=_NeverExpires), "not drained"),
        "expires-early": Mutant("a lock ends too early", Parts(broker=_ExpiresEarly), "double lock"),
        "forgets-renewal": Mutant(
            "a renewal is acknowledged, and nothing done", Parts(broker=_ForgetsRenewal), "double lock"
        ),
        "completes-and-keeps": Mutant(
            "a completed message comes again", Parts(broker=_CompletesAndKeeps), "redelivered"
        ),
        "drops-the-dead": Mutant("what dies is gone", Parts(broker=_DropsTheDead), "lost"),
        "no-delay": Mutant("a delay is not kept", Parts(broker=_NoDelay), "too early"),
        "keeps-twice": Mutant("what is sent again is kept again", Parts(broker=_KeepsTwice), "kept twice"),
        "sends-into-the-void": Mutant(
            "a send is acknowledged, and the message not kept", Parts(broker=_SendsIntoTheVoid), "lost"
        ),
        "counts-from-beginning": Mutant(
            "a renewal that is carried out late shortens the lock", Parts(broker=_CountsFromBeginning), "shortened"
        ),
        "settles-late-by-itself": Mutant(
            "a lock is judged by when the question was begun", Parts(broker=_SettlesLateByItself), "stale verb"
        ),
        "keeps-what-it-refuses": Mutant(
            "a full store keeps what it refuses", Parts(broker=_KeepsWhatItRefuses), "from nowhere"
        ),
        "refuses-to-settle": Mutant("a full store can't be drained", Parts(broker=_RefusesToSettle), "not drained"),
        "gone-while-away": Mutant("what is away is said to be gone", Parts(broker=_GoneWhileAway), "false no"),
        "cut-is-lost": Mutant("one that can't be asked about is said to be lost", Parts(broker=_CutIsLost), "false no"),
        "cut-is-renewed": Mutant(
            "one that can't be asked about counts as renewed", Parts(locks=_CutIsRenewed), "outlives lock"
        ),
        "judges-by-text": Mutant(
            "an error that can't be printed is printed", Parts(consumer=_JudgesByText), "user object"
        ),
        "loses-slot": Mutant("a handler that cancels itself takes its slot along", Parts(consumer=_LosesSlot), "slot"),
        "goes-on-after-interrupt": Mutant(
            "Ctrl-C in a handler or a hook is a failure like any other",
            Parts(consumer=_GoesOnAfterInterrupt),
            "interrupt",
        ),
        "takes-few-of-hook": Mutant(
            "an error hook may raise no BaseException", Parts(consumer=_TakesFewOfHook), "user object"
        ),
        "takes-few-of-ear": Mutant(
            "an event hook may raise no BaseException", Parts(consumer=_TakesFewOfEar), "user object"
        ),
        "waits-for-hook": Mutant("an error hook that never ends is waited for", Parts(consumer=_WaitsForHook), "slot"),
        "renews-on-the-loop": Mutant(
            "locks are kept on the loop that users block", Parts(consumer=_RenewsOnTheLoop), "untold"
        ),
        "old-tokens": Mutant("a token is used again", Parts(broker=_OldTokens), "token"),
    }
)
"""Bugs that must be found, by name."""

SURVIVORS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "passes-one-by-one": Mutant("every verdict is a call of its own", Parts(pump=_PassesOneByOne)),
        "never-prefetches": Mutant("nothing waits", Parts(pump=_NeverPrefetches)),
    }
)
"""Changes that look like bugs and break no promise: a checker that finds them is wrong itself."""
