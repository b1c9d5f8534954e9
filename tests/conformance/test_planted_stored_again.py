"""The suite of what is stored again must find bugs that are planted: each is one that a store had, or nearly had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._backends.memory.messages import NEVER, StoredMessage, Subqueue
from tenure._queue.delivery_ends import Cause, Ending, Outcome
from tenure._queue.message import NO_HEADERS, Attempt
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Defer, Lapsed, Settled, Settlement
from tenure.errors import MessageRefused, Unavailable
from tenure.testing.conformance import StoredAgainSuite
from tests.conformance.planted import failing_tests, queues_with

FRAME = 2**20 + 2**16
"""Bytes that a store would take of a message with all that is noted."""


def size_of(message: StoredMessage | Outgoing) -> int:
    """Return about how many bytes a message has."""
    headers = sum(len(f"{name}{value}".encode()) for name, value in message.headers.items())
    return len(message.body) + headers + len(f"{message.id}{message.reply_to}{message.correlation_id}".encode())


def noted_of(message: StoredMessage) -> int:
    """Return about how many bytes its history has."""
    return sum(len(f"{one.error}".encode()) for one in message.history)


class HasNoRoomForAReason(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause, now)
        if message.death is not None and size_of(message) > 2**20:
            message.death = replace(message.death, reason="unknown")


class HasNoRoomForHeaders(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause, now)
        if size_of(message) > FRAME - 2**12:
            message.headers = NO_HEADERS


class HasNoRoomForManyHeaders(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, Abandon) and len(message.headers) > 9_000:
            message.delivery_count -= 1
        return super()._end(subqueue, message, ending, now)


class ReadsNoLongHistory(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        if noted_of(message) > 2**20:
            message.history = ()
        super()._dead_letter(subqueue, message, cause, now)


class KeepsTheOldestAttempts(MemoryBroker):
    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        if len(message.history) < 50:
            super()._record_attempt(message, attempt)


class LocksWhatHasNoRoomForItsHistory(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        for delivery, verdict in settlements:
            error = getattr(verdict, "error", None)
            if error is not None and len(f"{error}".encode()) + len(delivery.body) > FRAME:
                raise Unavailable("the header size exceeds the maximum allowed")
        return await super().settle(settlements)


class PutsOffNothingLarge(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, Abandon) and size_of(message) > 2**20:
            ending = replace(ending, delay=0.0)
        return super()._end(subqueue, message, ending, now)


class ForgetsWhenTheLargeExpire(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if noted_of(message) > 2**16:
            message.expires_at = NEVER
        return super()._end(subqueue, message, ending, now)


class DefersNothingLarge(MemoryBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, Defer) and size_of(message) > 2**20:
            ending = Abandon()
        return super()._end(subqueue, message, ending, now)


class RedrivesNothingLarge(MemoryBroker):
    async def redrive(self, queue: str, *arguments: Any, **options: Any) -> int:
        letters = self._memory.queues[queue].dead.messages.values()
        if any(size_of(one) + noted_of(one) > FRAME for one in letters):
            raise MessageRefused("the message takes too many bytes with its headers", 0, 1)
        return await super().redrive(queue, *arguments, **options)


class BlocksTheSessionOfALargeMessage(MemoryBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, cause, now)
        if message.session is not None and size_of(message) > 2**20:
            message.session.retrying.add(message.sequence)


PLANTED: dict[type[MemoryBroker], str] = {
    HasNoRoomForAReason: "test_it_dies_of_its_last_failure_and_its_neighbours_go_on",
    HasNoRoomForHeaders: "test_it_is_dead_lettered_again_and_redriven",
    HasNoRoomForManyHeaders: "test_it_dies_of_its_last_failure_and_its_neighbours_go_on",
    ReadsNoLongHistory: "test_it_dies_of_its_last_failure_and_its_neighbours_go_on",
    KeepsTheOldestAttempts: "test_it_dies_of_its_last_failure_and_its_neighbours_go_on",
    LocksWhatHasNoRoomForItsHistory: "test_it_dies_of_its_last_failure_and_its_neighbours_go_on",
    PutsOffNothingLarge: "test_it_is_put_off_and_expires",
    ForgetsWhenTheLargeExpire: "test_it_is_put_off_and_expires",
    DefersNothingLarge: "test_it_is_deferred",
    RedrivesNothingLarge: "test_it_is_dead_lettered_again_and_redriven",
    BlocksTheSessionOfALargeMessage: "test_its_session_goes_on",
}
"""The planted bugs, each with the test that has to find it; others may find it, too."""


def test_without_a_plant_nothing_is_found() -> None:
    assert not failing_tests(queues_with(MemoryBroker), StoredAgainSuite)


@pytest.mark.parametrize(("plant", "test"), PLANTED.items())
def test_a_planted_bug_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert failing_tests(queues_with(plant), StoredAgainSuite, is_meant=test.__eq__) == {test}
