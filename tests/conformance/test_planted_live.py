"""The suite of live messages must find bugs that are planted: a check that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tenure._backends.memory.messages import MessageState, RememberedIds, StoredMessage
from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import EVERYTHING, LiveSelection
from tenure._queue.message import LiveMessage
from tenure.testing.conformance import LiveMessagesSuite
from tests.conformance.planted import failing_tests, queues_with


class PeekCounts(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        for message in self._select_live(queue, which, limit):
            message.delivery_count += 1
        return await super().peek(queue, which, limit)


class PeekLocks(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        shown = await super().peek(queue, which, limit)
        await self.receive(queue, limit, 1.0)
        return shown


class PeekSeesNoLocks(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        return [one for one in await super().peek(queue, which, limit) if one.state != "locked"]


class PeekIgnoresTime(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        home = self._memory.queues.get(queue)
        alarms = home.live.due if home else []
        held, alarms[:] = list(alarms), []
        shown = await super().peek(queue, which, limit)
        alarms[:] = held
        return shown


class PeekShowsHighPriorityFirst(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        shown = await super().peek(queue, which, 10_000)
        return sorted(shown, key=lambda one: (-one.priority, one.sequence))[:limit]


class PeekStartsAnew(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        return await super().peek(queue, replace(which, after=0), limit)


class PeekForgetsTheLimit(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        return await super().peek(queue, which, 10_000)


class PurgesLockedMessages(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        with self._memory.lock:
            return self._remove(queue, which, self._select_live(queue, which, None))


class PurgesTheDead(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        await self.purge(queue, EVERYTHING, None)
        return await super().purge_live(queue, which, dry_run=dry_run)


class DryRunsPurge(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return await super().purge_live(queue, which)


class PurgesMessagesClaimedMeanwhile(MemoryBroker):
    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        return super()._remove(name, replace(which, states=None), messages)


class CountsAllItFound(MemoryBroker):
    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        super()._remove(name, which, messages)
        return len(messages)


class PurgesAnyState(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return await super().purge_live(queue, replace(which, states=None), dry_run=dry_run)


class PurgesAnyId(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return await super().purge_live(queue, replace(which, ids=None), dry_run=dry_run)


class PurgesAnySession(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return await super().purge_live(queue, replace(which, session=None), dry_run=dry_run)


class PurgesNothingByItsAge(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return 0 if which.sent_before is not None else await super().purge_live(queue, which, dry_run=dry_run)


class PurgesAnyAge(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        return await super().purge_live(queue, replace(which, sent_before=None), dry_run=dry_run)


class ForgetsIdsThatItPurges(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        count = await super().purge_live(queue, which, dry_run=dry_run)
        if count:
            self._queue(queue).sent = RememberedIds()
        return count


class ForgetsSessionsThatItPurges(MemoryBroker):
    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        count = super()._remove(name, which, messages)
        for message in messages:
            if message.session is not None:
                message.session.state = None
        return count


class LeavesSessionsHeldUp(MemoryBroker):
    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        held_up = [
            message.session
            for message in messages
            if message.session is not None and message.state is MessageState.DELAYED
        ]
        count = super()._remove(name, which, messages)
        for session in held_up:
            session.retrying.add(0)
        return count


class PurgeGivesNoHint(MemoryBroker):
    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        self._notify, notify = lambda name: None, self._notify  # type: ignore[method-assign]
        try:
            return await super().purge_live(queue, which, dry_run=dry_run)
        finally:
            self._notify = notify  # type: ignore[method-assign]


PLANTED = [plant for plant in list(globals().values()) if isinstance(plant, type) and plant.__base__ is MemoryBroker]


def findings(plant: type[MemoryBroker]) -> set[str]:
    """Run the suite of live messages against *plant*, and return the first test that fails."""
    return failing_tests(queues_with(plant), LiveMessagesSuite, first_only=True)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(MemoryBroker) == set()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: type[MemoryBroker]) -> None:
    assert findings(plant), f"no test fails on {plant.__name__}"
