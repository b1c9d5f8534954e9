"""The suite of faults must find stores that lose or double messages when a client is killed between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._queue.broker import QueueOptions, QueueSettings, Selection
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, GiveBack, Lapsed, Settled, Settlement
from tenure.errors import Unavailable
from tenure.testing.conformance import BrokerFaultSuite
from tests.conformance.planted import calls, failing_tests, queues_with

Answers = Sequence[Settled | Lapsed]


async def next_step() -> None:
    """Let the client be killed here."""
    await asyncio.sleep(0)


class RemovesBeforeItStores(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Answers:
        kept = [one for one, verdict in settlements if isinstance(verdict, GiveBack | Abandon)]
        answers = await super().settle([replace_verdict(one) for one in settlements])
        for one in kept:
            await next_step()
            await self.send(one.queue, [Outgoing(one.body)])
        return answers


class StoresBeforeItRemoves(MemoryBroker):
    async def settle(self, settlements: Sequence[Settlement]) -> Answers:
        for one, verdict in settlements:
            if isinstance(verdict, GiveBack | Abandon):
                await self.send(one.queue, [Outgoing(one.body)])
                await next_step()
        return await super().settle([replace_verdict(one) for one in settlements])


def replace_verdict(one: Settlement) -> Settlement:
    return one._replace(verdict=COMPLETE) if isinstance(one.verdict, GiveBack | Abandon) else one


class RedrivesInTwoSteps(MemoryBroker):
    async def redrive(self, queue: str, which: Selection, limit: int | None, **options: Any) -> int:
        dead = await self.peek_dead(queue, which, 100)
        await self.purge(queue, which, limit)
        await next_step()
        await self.send(queue, [Outgoing(one.body) for one in dead])
        return len(dead)


class DeclaresUnderALock(MemoryBroker):
    declaring: set[str] = set()  # noqa: RUF012  # of all clients

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        if queue in self.declaring:
            raise Unavailable("another client declares the queue")
        self.declaring.add(queue)
        await next_step()
        self.declaring.discard(queue)
        return await super().declare(queue, changes, only_undeclared=only_undeclared)


PLANTS: list[tuple[type[MemoryBroker], str]] = [
    (RemovesBeforeItStores, "test_a_client_that_is_killed_while_it_settles_loses_nothing"),
    (StoresBeforeItRemoves, "test_a_client_that_is_killed_while_it_settles_loses_nothing"),
    (RedrivesInTwoSteps, "test_a_client_that_is_killed_while_it_redrives_loses_nothing"),
    (DeclaresUnderALock, "test_a_client_that_is_killed_while_it_declares_leaves_a_queue_that_works"),
]


def findings(plant: type[MemoryBroker]) -> set[str]:
    return failing_tests(queues_with(plant), BrokerFaultSuite, is_meant=lambda name: "_is_killed_" in name)


@pytest.mark.parametrize(("plant", "test"), PLANTS)
def test_a_planted_bug_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert findings(plant) == {test}


def test_a_store_without_a_bug_passes() -> None:
    assert findings(MemoryBroker) == set()


def test_every_test_of_kills_finds_a_plant() -> None:
    assert {name for name, _ in calls(BrokerFaultSuite) if "_is_killed_" in name} == {test for _, test in PLANTS}
