"""The suite of short uses must find bugs that are planted: what is left behind, counted, or out of order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import IO

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._backends.memory.messages import Session, StoredMessage, Subqueue
from tenure._queue.broker import Claim
from tenure._queue.delivery_ends import Ending, Outcome
from tenure._queue.message import SessionLock
from tenure._queue.verdicts import GIVE_BACK, SETTLED, GiveBack, Settled, Settlement
from tenure._runtime.notifier import Listener
from tenure.testing.conformance import ShortUseSuite
from tests.conformance.planted import failing_tests, queues_with
from tests.stores.memory.test_suites import MemoryQueueHarness

LEFT: list[object] = []
"""What the bugs leave behind, so that nothing else ends it."""


class LeavesASession(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        for one in self._memory.queues.values():
            name = f"gone-{len(one.live.sessions)}"
            one.live.sessions[name] = Session(name)
        return await super().receive(queue, limit, lock)


class LeavesAListener(MemoryBroker):
    def hints(self, queue: str) -> AsyncIterator[None]:
        listener: Listener = self._memory.notifier.listen(queue)
        LEFT.append(listener)
        return super().hints(queue)


class LeavesATask(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        if not claim.deliveries:
            LEFT.append(asyncio.ensure_future(asyncio.Event().wait()))
        return claim


class LeavesATaskOfASession(MemoryBroker):
    async def release(self, held: SessionLock) -> Settled:
        LEFT.append(asyncio.ensure_future(asyncio.Event().wait()))
        await super().release(held)
        return SETTLED


class LeavesAFile(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        file: IO[bytes] = open("/dev/null", "rb")  # noqa: SIM115  # it stays open: that is the bug
        LEFT.append(file)
        return await super().receive(queue, limit, lock)


class LeavesAThread(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        end = threading.Event()
        LEFT.append(end)
        if sum(isinstance(one, threading.Event) for one in LEFT) < 300:
            threading.Thread(target=end.wait, daemon=True).start()
        return await super().receive(queue, limit, lock)


class CountsWhatAStopGivesBack(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += isinstance(ending, GiveBack)
        return super()._end(subqueue, message, ending, now)


class TakesTwoForOne(MemoryBroker):
    """As one that prefetches does: the second one comes back, behind others, when a lock ends."""

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit + 1, lock)
        if len(claim.deliveries) <= limit:
            return claim
        *most, last = claim.deliveries
        stored = self._memory.queues[queue]
        message = stored.live.messages.pop(last.sequence)
        stored.sequence += 1
        message.sequence = stored.sequence
        stored.live.messages[message.sequence] = message
        await self.settle([Settlement(last._replace(sequence=message.sequence), GIVE_BACK)])
        return claim._replace(deliveries=most)


class TakesWhatComesNext(MemoryBroker):
    """As one whose request waits on when its caller has gone."""

    _in_vain = 0

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        self._in_vain += not claim.deliveries
        if claim.deliveries and self._in_vain > 20:
            self._in_vain = 0
            return claim._replace(deliveries=(), due_in=lock)
        return claim


class AsksAgainAndAgain(MemoryBroker):
    _again = 0

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self._again += 1
        claim = await super().receive(queue, limit, lock)
        return claim if claim.deliveries or self._again % 8 == 0 else claim._replace(due_in=0.0)


class KeepsItsSession(MemoryBroker):
    async def release(self, held: SessionLock) -> Settled:
        return SETTLED


PLANTED: dict[type[MemoryBroker], str] = {
    LeavesASession: "test_short_receives_find_what_is_there_in_order",
    LeavesAListener: "test_short_receives_wait_for_what_comes",
    LeavesATask: "test_short_receives_in_vain",
    LeavesATaskOfASession: "test_sessions_of_one_message",
    LeavesAFile: "test_short_receives_in_vain",
    LeavesAThread: "test_short_receives_find_what_is_there_in_order",
    CountsWhatAStopGivesBack: "test_short_consumes",
    TakesTwoForOne: "test_short_receives_find_what_is_there_in_order",
    TakesWhatComesNext: "test_short_receives_in_vain",
    AsksAgainAndAgain: "test_short_receives_wait_for_what_comes",
    KeepsItsSession: "test_sessions_of_one_message",
}
"""The planted bugs, each with the test that has to find it; others may find it, too."""


def fewer_uses(plant: type[MemoryBroker]) -> type[MemoryQueueHarness]:
    """Return a harness whose brokers are *plant*; a bug that shows at all shows soon."""

    class Planted(queues_with(plant)):  # type: ignore[misc]
        uses = 100

    return Planted


@pytest.fixture(autouse=True)
def _end_what_is_left() -> Iterator[None]:
    yield
    for one in LEFT:
        match one:
            case threading.Event():
                one.set()
            case asyncio.Future():
                pass  # its loop has ended
            case Listener():
                pass
            case _:
                one.close()  # type: ignore[attr-defined]
    LEFT.clear()


def test_without_a_plant_nothing_is_found() -> None:
    assert not failing_tests(fewer_uses(MemoryBroker), ShortUseSuite)


@pytest.mark.parametrize(("plant", "test"), PLANTED.items())
def test_a_planted_bug_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert failing_tests(fewer_uses(plant), ShortUseSuite, is_meant=test.__eq__) == {test}
