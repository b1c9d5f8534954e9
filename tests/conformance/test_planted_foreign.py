"""The suites must find stores in which one message or record of others disturbs what is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Vacant
from tenure._queue.broker import Claim, LiveSelection, Selection
from tenure._queue.message import DeadMessage, LiveMessage, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import LAPSED, Lapsed, Settled, Settlement
from tenure.testing._conformance.leases.foreign import ForeignRecordTests
from tenure.testing._conformance.queues.foreign import ForeignMessageTests
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import LeaseHarness, QueueHarness
from tests.conformance.planted import calls, failing_tests, leases_with, queues_with

FOREIGN = b"foreign"
"""The beginning of the bodies that others write."""
PASSED_ON = "passed-on"
"""The header of a message from another queue, with the count that it had there."""

# --- leases ---


class RefusesTheBatch(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        if any(self._memory.claims[one.name].metadata for one in grants):
            raise ValueError("the metadata can't be read")
        return await super().renew(grants, ttl)


class RefusesToInspectMany(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        if any(self._memory.claims[name].metadata for name in names):
            raise ValueError("the metadata can't be read")
        return await super().inspect_many(names)


class ListsNoNames(MemoryLeases):
    async def names(self) -> Sequence[str]:
        return [] if any(one.metadata for one in self._memory.claims.values()) else await super().names()


class EndsTheOthers(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        answers = await super().renew(grants, ttl)
        is_odd = any(self._memory.claims[one.name].metadata for one in grants)
        return [Lost(one) for one in grants] if is_odd else answers


class BeginsAnew(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if (claim := self._memory.claims.get(name)) and claim.metadata:
            claim.token = 0
        return await super().acquire(name, holder, ttl, metadata)


class TellsNoName(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if (claim := self._memory.claims.get(name)) and claim.metadata:
            raise ValueError("a record can't be read")
        return await super().acquire(name, holder, ttl, metadata)


class TellsALowerToken(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if (claim := self._memory.claims.get(name)) and claim.metadata:
            return HeldBy(name, "a", claim.token - 1, None)
        return await super().acquire(name, holder, ttl, metadata)


LEASES: list[tuple[type[MemoryLeases], str]] = [
    (RefusesTheBatch, "test_an_edited_record_disturbs_no_other"),
    (RefusesToInspectMany, "test_an_edited_record_disturbs_no_other"),
    (ListsNoNames, "test_an_edited_record_disturbs_no_other"),
    (EndsTheOthers, "test_an_edited_record_disturbs_no_other"),
    (BeginsAnew, "test_no_edit_of_a_record_lets_a_token_fall"),
    (TellsALowerToken, "test_no_edit_of_a_record_lets_a_token_fall"),
    (TellsNoName, "test_no_edit_of_a_record_lets_a_token_fall"),
]


def edited(plant: type[MemoryLeases]) -> type[LeaseHarness]:
    """Return a harness whose records others can edit."""

    class Edited(leases_with(plant)):  # type: ignore[misc]
        foreign = ("metadata",)

        async def write_foreign(self, name: str, how: str) -> None:
            self._memory.claims[name].metadata = {"an": how}

    return Edited


@pytest.mark.parametrize(("plant", "test"), LEASES)
def test_a_planted_bug_of_edited_records_is_found(plant: type[MemoryLeases], test: str) -> None:
    assert test in failing_tests(edited(plant), ForeignRecordTests)


# --- queues ---


def is_foreign(body: bytes) -> bool:
    return body.startswith(FOREIGN)


class RaisesAfterTheClaim(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        if any(is_foreign(one.body) for one in claim.deliveries):
            raise ValueError("its headers can't be read")
        return claim


class HidesTheOthersOfAClaim(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        if any(is_foreign(one.body) for one in claim.deliveries):
            return claim._replace(deliveries=[one for one in claim.deliveries if is_foreign(one.body)])
        return claim


class EndsTheConnection(MemoryBroker):
    """As a driver does that can't read a message: all that its process had locked comes back."""

    ended = 0

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        self.ended = max([self.ended, *(int(one.token) for one in claim.deliveries if is_foreign(one.body))])
        return claim

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        is_over = [int(one.delivery.token) < self.ended for one in settlements]
        answers = await super().settle(settlements)
        return [LAPSED if over else answer for over, answer in zip(is_over, answers, strict=True)]


class CountsNothing(MemoryBroker):
    async def stats(self, queue: str) -> Stats:
        shown = await self.peek(queue, LiveSelection(), 100)
        return Stats() if any(is_foreign(one.body) for one in shown) else await super().stats(queue)


class ShowsNothing(MemoryBroker):
    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        shown = await super().peek(queue, which, limit)
        return [] if any(is_foreign(one.body) for one in shown) else shown


class CantSettleIt(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        if any(is_foreign(one.delivery.body) for one in settlements):
            raise ValueError("its history can't be written")
        return await super().settle(settlements)


class ListsNoDeadLetters(MemoryBroker):
    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        shown = await super().peek_dead(queue, which, limit)
        return [] if any(is_foreign(one.body) for one in shown) else shown


class RedrivesUpToIt(MemoryBroker):
    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        shown = await self.peek_dead(queue, which, 100)
        before = next((number for number, one in enumerate(shown) if is_foreign(one.body)), limit)
        return await super().redrive(queue, which, before, dry_run=dry_run, to=to)


class KeepsItsCount(MemoryBroker):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        counts = [one.delivery_count + int(one.headers.get(PASSED_ON, 0)) for one in claim.deliveries]
        deliveries = [one._replace(delivery_count=count) for one, count in zip(claim.deliveries, counts, strict=True)]
        return claim._replace(deliveries=deliveries)


class KeepsItsHistory(MemoryBroker):
    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        shown = await super().peek_dead(queue, which, limit)
        return [
            replace(one, history=(one.history[0], *one.history)) if PASSED_ON in one.headers else one for one in shown
        ]


QUEUES: list[tuple[type[MemoryBroker], str]] = [
    (RaisesAfterTheClaim, "test_foreign_messages_disturb_no_other"),
    (HidesTheOthersOfAClaim, "test_foreign_messages_disturb_no_other"),
    (EndsTheConnection, "test_foreign_messages_disturb_no_other"),
    (CountsNothing, "test_foreign_messages_are_counted_and_shown"),
    (ShowsNothing, "test_foreign_messages_are_counted_and_shown"),
    (CantSettleIt, "test_foreign_messages_can_fail_and_die"),
    (ListsNoDeadLetters, "test_foreign_dead_letters_disturb_no_other"),
    (RedrivesUpToIt, "test_foreign_dead_letters_disturb_no_other"),
    (KeepsItsCount, "test_a_forwarded_message_begins_anew"),
    (KeepsItsHistory, "test_a_forwarded_message_begins_anew"),
]


def shared(plant: type[MemoryBroker]) -> type[QueueHarness]:
    """Return a harness to whose queues others write."""

    class Shared(queues_with(plant)):  # type: ignore[misc]
        foreign = ("a body",)
        forwards = True

        async def write_foreign(self, queue: str, how: str) -> None:
            await place(MemoryBroker(self._clock, self._memory), self, queue, FOREIGN)

        async def forward(self, source: str, target: str) -> None:
            broker = MemoryBroker(self._clock, self._memory)
            [found] = (await broker.receive(source, 9, self.lock)).deliveries
            await broker.send(target, [Outgoing(found.body, headers={PASSED_ON: 2})])

    return Shared


@pytest.mark.parametrize(("plant", "test"), QUEUES)
def test_a_planted_bug_of_foreign_messages_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert test in failing_tests(shared(plant), ForeignMessageTests)


def test_every_test_of_what_others_write_finds_a_plant() -> None:
    tests = {name for suite in (ForeignRecordTests, ForeignMessageTests) for name, _ in calls(suite)}
    assert tests == {test for _, test in (*LEASES, *QUEUES)}


def test_without_a_bug_all_pass() -> None:
    assert not failing_tests(edited(MemoryLeases), ForeignRecordTests)
    assert not failing_tests(shared(MemoryBroker), ForeignMessageTests)
