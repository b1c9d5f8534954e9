"""Planted bugs in how a consumer claims, passes verdicts and drains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tenure._queue.claiming import ClaimSizes, ClaimTimes
from tenure._queue.effects import PumpEffect
from tenure._queue.lock_group import NEVER, LockGroup
from tenure._queue.message import Delivery
from tenure._queue.pump import Pump
from tenure._queue.stopping import State
from tenure._queue.verdicts import COMPLETE, Abandon, Settlement, Verdict
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.queues.parts import Parts


class _ForgetsUnanswered(Pump):
    """Drops a verdict that got no answer."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        self._settling.answered(request_id)
        super()._unanswered(request_id, why, now, effects)


class _PassesLateResults(Pump):
    """Passes the verdict of a handler whose lock is known to be lost."""

    def pass_verdict(self, delivery: Delivery, verdict: Verdict) -> bool:
        if super().pass_verdict(delivery, verdict):
            return True
        self._settling.add(Settlement(delivery, verdict))
        return True


class _DrainLosesBuffer(Pump):
    def _empty_buffer(self, now: float, effects: list[PumpEffect]) -> None:
        if self.state is State.DRAINING:
            self._buffer.clear()
        else:
            super()._empty_buffer(now, effects)


class _AbandonsBuffer(Pump):
    """Gives back what was not tried as if it had been tried."""

    def _put_back(self, hold: LockGroup) -> int:
        waiting = self._settling._waiting
        before = len(waiting)
        count = super()._put_back(hold)
        waiting[before:] = [Settlement(one, Abandon()) for one, _ in waiting[before:]]
        return count


class _StopsAtOnce(Pump):
    """Calls itself stopped when no handler runs any more, also with verdicts unanswered."""

    def _continue_drain(self, now: float, effects: list[PumpEffect]) -> None:
        super()._continue_drain(now, effects)
        if self.state is State.DRAINING and not self.busy:
            self._set_state(State.STOPPED)


class _ForgetsReturns(Pump):
    """Stops without waiting for what the locks give back."""

    def _continue_drain(self, now: float, effects: list[PumpEffect]) -> None:
        super()._continue_drain(now, effects)
        under_way = self.busy or self._claiming or self._settling
        if self.state is State.DRAINING and not under_way:
            self._set_state(State.STOPPED)


class _GivesBackCompleted(Pump):
    """Passes a give-back on a kept message that was completed meanwhile."""

    def settled(self, delivery: Delivery) -> bool:
        waiting = self._settling._waiting
        unsettled = waiting.copy()
        waiting.clear()
        try:
            return super().settled(delivery)
        finally:
            waiting[:] = unsettled


class _ServesWhilePaused(Pump):
    def _empty_buffer(self, now: float, effects: list[PumpEffect]) -> None:
        if self.state is not State.PAUSED:
            super()._empty_buffer(now, effects)


class _NoPause(ClaimTimes):
    def _pause(self, due_in: float | None) -> float:
        return 0.0


class _ClaimsWithoutPause(Pump):
    claim_times = _NoPause


class _EndlessPause(ClaimTimes):
    def _pause(self, due_in: float | None) -> float:
        return NEVER


class _WaitsForHints(Pump):
    """Claims only after a hint."""

    claim_times = _EndlessPause


class _GivesUpAsking(Pump):
    """Does not claim again after a claim without an answer."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        gives_up = request_id == self._claiming
        super()._unanswered(request_id, why, now, effects)
        if gives_up:
            self._claim_times.next_at = NEVER


class _CompletesFailures(Pump):
    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        return super().done(delivery, COMPLETE if isinstance(verdict, Abandon) else verdict)


class _PassesOneByOne(Pump):
    """Passes each verdict in a call of its own."""

    def _flush(self, now: float, effects: list[PumpEffect]) -> None:
        waiting = self._settling._waiting
        rest = waiting[1:]
        del waiting[1:]
        super()._flush(now, effects)
        waiting += rest


class _NoTarget(ClaimSizes):
    def set_target(self, elapsed: float, busy: int) -> None:
        pass


class _NeverPrefetches(Pump):
    claim_sizes = _NoTarget


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "forgets-unanswered": Mutant(
            "a verdict without an answer is dropped", Parts(pump=_ForgetsUnanswered), "left behind"
        ),
        "passes-late-results": Mutant(
            "the result of a lost lock is passed on", Parts(pump=_PassesLateResults), "late result"
        ),
        "drain-loses-buffer": Mutant("a drain forgets what waits", Parts(pump=_DrainLosesBuffer), "left behind"),
        "abandons-buffer": Mutant("what was not tried is abandoned", Parts(pump=_AbandonsBuffer), "verdict"),
        "stops-at-once": Mutant("a drain does not wait for answers", Parts(pump=_StopsAtOnce), "left behind"),
        "forgets-returns": Mutant(
            "a drain does not wait for what the locks give back", Parts(pump=_ForgetsReturns), "left behind"
        ),
        "gives-back-completed": Mutant(
            "a drain gives back what was completed meanwhile", Parts(pump=_GivesBackCompleted), "verdict"
        ),
        "serves-while-paused": Mutant(
            "what waits is handled during a pause", Parts(pump=_ServesWhilePaused), "left behind"
        ),
        "claims-without-pause": Mutant("an empty queue is asked in a loop", Parts(pump=_ClaimsWithoutPause), "busy"),
        "waits-for-hints": Mutant("a consumer claims only after a hint", Parts(pump=_WaitsForHints), "not drained"),
        "gives-up-asking": Mutant(
            "a claim without an answer is the last one", Parts(pump=_GivesUpAsking), "not drained"
        ),
        "completes-failures": Mutant("a failed message is completed", Parts(pump=_CompletesFailures), "verdict"),
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
