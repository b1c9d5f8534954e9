"""Planted bugs in how a consumer takes what handlers and hooks of the user may do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

from tenure._queue.failures import Failure
from tenure._queue.message import Delivery
from tenure._queue.verdicts import Abandon, Verdict
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.process import Alarm
from tenure.testing._sim.queues.consumer import Consumer, Kind
from tenure.testing._sim.queues.parts import Parts
from tenure.testing._sim.queues.protocols import ConsumerRun
from tenure.testing._sim.queues.work import Work
from tenure.testing._sim.queues.workers import Workers
from tenure.testing._sim.world import SkewedClock


class _JudgesByText(Workers):
    """Writes an error down as it is."""

    def _verdict(self, error: BaseException, delivery: Delivery) -> Verdict:
        return Abandon(0.0, Failure(type(error).__name__, str(error)))


class _LosesSlot(Workers):
    """Takes a handler's own CancelledError for the end of its slot."""

    def _conclude(self, work: Work) -> None:
        if not isinstance(work.error, asyncio.CancelledError):
            super()._conclude(work)


class _GoesOnAfterInterrupt(Workers):
    def _end_with_interrupt(self) -> None:
        pass


class _ErrorHookExceptionsOnly(Workers):
    """Expects of an error hook no more than an Exception."""

    def _reports_error_hook(self, error: BaseException) -> bool:
        return isinstance(error, Exception)


class _EventHookExceptionsOnly(Workers):
    def _reports_event_hook(self, error: BaseException) -> bool:
        return isinstance(error, Exception)


class _WaitsForHook(Workers):
    def _hook_patience(self) -> float:
        return 1e9


class _RenewsOnTheLoop(Consumer):
    """Keeps its locks where handlers and hooks run."""

    def __init__(self, run: ConsumerRun, kind: Kind, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(run, kind, number, name, clock)
        self._locks_alarm = Alarm(self, lambda: self.locks.wake_at, self.on_loop_soon, self._locks_ring)


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "judges-by-text": Mutant(
            "an error that can't be printed is printed", Parts(workers=_JudgesByText), "user object"
        ),
        "loses-slot": Mutant("a handler that cancels itself takes its slot along", Parts(workers=_LosesSlot), "slot"),
        "goes-on-after-interrupt": Mutant(
            "Ctrl-C in a handler or a hook is a failure like any other",
            Parts(workers=_GoesOnAfterInterrupt),
            "interrupt",
        ),
        "error-hook-exceptions-only": Mutant(
            "an error hook may raise no BaseException", Parts(workers=_ErrorHookExceptionsOnly), "user object"
        ),
        "event-hook-exceptions-only": Mutant(
            "an event hook may raise no BaseException", Parts(workers=_EventHookExceptionsOnly), "user object"
        ),
        "session-loses-slot": Mutant("loses-slot, in a session", Parts(session_workers=_LosesSlot), "slot"),
        "session-event-hook-exceptions-only": Mutant(
            "event-hook-exceptions-only, in a session", Parts(session_workers=_EventHookExceptionsOnly), "user object"
        ),
        "session-goes-on-after-interrupt": Mutant(
            "goes-on-after-interrupt, in a session", Parts(session_workers=_GoesOnAfterInterrupt), "interrupt"
        ),
        "waits-for-hook": Mutant("an error hook that never ends is waited for", Parts(workers=_WaitsForHook), "slot"),
        "renews-on-the-loop": Mutant(
            "locks are kept on the loop that users block", Parts(consumer=_RenewsOnTheLoop), "not cancelled"
        ),
    }
)
"""Bugs that must be found, by name."""
