"""The suites of locks and of consumers must find bugs that are planted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest

from tenure._backends.memory.messages import NEVER, Session, StoredMessage, Subqueue
from tenure._backends.memory.queue import MemoryBroker
from tenure._queue import failures, handlers, judge
from tenure._queue.broker import Claim, Selection
from tenure._queue.delivery_ends import Cause, Ending, Outcome
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import Abandon, GiveBack, Lapsed, Renewed, Settled, Settlement
from tenure.testing._conformance.queues import consumers
from tenure.testing.conformance import ConsumerSuite, LockExpirySuite
from tests.conformance.planted import failing_tests, queues_with
from tests.stores.memory.test_suites import MemoryQueueHarness


class Trusting(MemoryBroker):
    """Accepts any session lock for a locked session, in the verb that a plant chooses."""

    def _session(self, held: SessionLock, now: float) -> Session | None:
        subqueue = self._subqueue(held.queue, now)
        session = subqueue.sessions.get(held.session) if subqueue else None
        return session if session is not None and session.token else None


class ReceivesWithAnyLock(MemoryBroker):
    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        return await Trusting.receive_session(_as_trusting(self), held, limit)


class RenewsWithAnyLock(MemoryBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        return Trusting._renew(_as_trusting(self), one, until, now)


class WritesWithAnyLock(MemoryBroker):
    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        return await Trusting.write_state(_as_trusting(self), held, state)


class ReadsWithAnyLock(MemoryBroker):
    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        return await Trusting.read_state(_as_trusting(self), held)


class ReleasesWithAnyLock(MemoryBroker):
    async def release(self, held: SessionLock) -> Settled | Lapsed:
        return await Trusting.release(_as_trusting(self), held)


class SettlesWithAnyLock(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        mine = []
        for delivery, verdict in settlements:
            subqueue = self._subqueue(delivery.queue, self._clock.now())
            message = subqueue.messages.get(delivery.sequence) if subqueue else None
            mine.append(Settlement(delivery._replace(token=message.token) if message else delivery, verdict))
        return await super().settle(mine)


class ForgetsTheExpiryOfReturnedMessages(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, (Abandon, GiveBack)):
            message.expires_at = NEVER
        return super()._end(subqueue, message, ending, now)


class ForgetsTheExpiryAfterACrash(MemoryBroker):
    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        message.expires_at = NEVER
        super()._lock_expired(subqueue, message, now)


class KeepsTheExpiryOfTheDead(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause, now)
        message.expires_at = now


class ForgetsThatItWasDeferred(MemoryBroker):
    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        for one in held:
            if isinstance(one, Delivery) and (found := self._locked(one, self._clock.now())):
                found[1].is_deferred = False
        return await super().renew(held, lock)


class ShortensLocks(MemoryBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        if isinstance(one, SessionLock):
            if session := self._session(one, now):
                session.locked_until = now
        elif found := self._locked(one, now):
            found[1].locked_until = now
        return super()._renew(one, until, now)


class ExtensionsOutliveTheClaim(MemoryBroker):
    """The longest extension of a message is noted by its number, and nobody clears the note."""

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        if isinstance(one, SessionLock):
            return super()._renew(one, until, now)
        noted: dict[tuple[str, int], float] = vars(self).setdefault("noted", {})
        noted[one.queue, one.sequence] = end = max(until, noted.get((one.queue, one.sequence), 0.0))
        return super()._renew(one, end, now)


class ExtensionsOutliveTheSessionLock(MemoryBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        if isinstance(one, Delivery):
            return super()._renew(one, until, now)
        noted: dict[tuple[str, str], float] = vars(self).setdefault("noted", {})
        noted[one.queue, one.session] = end = max(until, noted.get((one.queue, one.session), 0.0))
        return super()._renew(one, end, now)


class RedriveGivesNoHint(MemoryBroker):
    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        self._notify = lambda name: None  # type: ignore[method-assign]
        return await super().redrive(queue, which, limit, dry_run=dry_run, to=to)


def _as_trusting(broker: MemoryBroker) -> Trusting:
    """Return a broker on the same memory that accepts any lock."""
    return Trusting(broker._clock, broker._memory)


NOT_PLANTED = (MemoryBroker, Trusting)
PLANTED = [
    plant
    for plant in list(globals().values())
    if isinstance(plant, type) and issubclass(plant, MemoryBroker) and plant not in NOT_PLANTED
]


def findings(plant: type[MemoryBroker]) -> set[str]:
    """Run the suite of locks against *plant*; return the first test that fails."""
    return failing_tests(queues_with(plant), LockExpirySuite, first_only=True)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(MemoryBroker) == set()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: type[MemoryBroker]) -> None:
    assert findings(plant), f"no test fails on {plant.__name__}"


def _raises_what_it_is(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


async def _waits_for_the_hook(on_error: Any, message: Any, error: BaseException) -> None:
    answer = on_error(message, error)
    if asyncio.iscoroutine(answer):
        await answer


IN_CONSUMERS = {
    "outcomes travel as exceptions": (handlers, "outcome_of", _raises_what_it_is, "handler"),
    "texts are taken as they come": (failures, "text_of", str, "handler"),
    "hooks are awaited": (judge, "call_error_hook", _waits_for_the_hook, "hook"),
    "hooks are awaited in sessions": (judge, "call_error_hook", _waits_for_the_hook, "hook"),
}


@pytest.mark.parametrize("plant", IN_CONSUMERS)
def test_a_bug_planted_in_a_consumer_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, bug, where = IN_CONSUMERS[plant]
    monkeypatch.setattr(consumers, "WITHIN", 1.0)
    monkeypatch.setattr(module, name, bug)
    suite, sessions = ConsumerSuite(), plant.endswith("sessions")

    async def run() -> None:
        harness = MemoryQueueHarness()
        try:
            if where == "handler":
                await suite.test_a_handler_that_misbehaves_costs_one_delivery(harness, "q", "thread", sessions)
            else:
                await suite.test_an_error_hook_that_misbehaves_costs_nothing(harness, "q", sessions, monkeypatch)
        finally:
            await harness.close()

    # The futures of newer Pythons turn a StopIteration into another error; then a KeyboardInterrupt is what shows the
    # first bug. That ends the loop, so the suite runs in one of its own; not by asyncio.run, which would leave its
    # handler of SIGINT behind, as that can't be printed with such an exception in it.
    with closing(asyncio.new_event_loop()) as loop:
        with pytest.raises(BaseException):  # noqa: B017
            loop.run_until_complete(run())
        for task in (left := asyncio.all_tasks(loop)):
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
