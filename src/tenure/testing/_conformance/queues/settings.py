"""The settings of a queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from tenure._queue.broker import (
    Broker,
    QueueOptions,
    QueueSettings,
)
from tenure._queue.context import QueueContext
from tenure._queue.verdicts import Abandon, Settled
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    QueueSuite,
    needs,
    receive,
    send,
    settle,
)


class SettingTests(QueueSuite):
    """A declaration changes what it names, for every client."""

    async def test_a_declaration_changes_only_what_it_names(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        assert await broker.declare(name, {"max_deliveries": 7}) == QueueSettings(max_deliveries=7)
        both = QueueSettings(max_deliveries=7, dedupe_window=window_of(harness))
        assert await other.declare(name, {"dedupe_window": window_of(harness)}) == both
        assert await broker.settings(name) == both
        assert await broker.declare(name, {"max_deliveries": 8}) == replace(both, max_deliveries=8)
        assert await other.declare(name, {}) == replace(both, max_deliveries=8)

    @pytest.mark.parametrize("is_new", [True, False])
    async def test_settings_declared_at_the_same_time_all_hold(
        self, harness: QueueHarness, name: str, is_new: bool
    ) -> None:
        clients = [await harness.open() for _ in range(4)]
        if not is_new:
            await send(clients[0], name, b"a")
        given: list[QueueOptions] = [
            {"lock": harness.lock * 2},
            {"max_deliveries": 7},
            {"dedupe_window": window_of(harness)},
            {"body_max": 10},
        ]
        barrier = Barrier(len(clients))
        renewal_thread = cast(RenewalThread, None)  # nothing here is renewed
        contexts = [
            QueueContext(
                name, barrier.around(client), renewal_thread, SystemClock(), QueueSettings(), "", expected=changes
            )
            for client, changes in zip(clients, given, strict=True)
        ]
        await asyncio.gather(*(context.ready() for context in contexts))
        wanted = QueueSettings(lock=harness.lock * 2, max_deliveries=7, dedupe_window=window_of(harness), body_max=10)
        assert await clients[0].settings(name) == wanted

    async def test_only_undeclared_settings_are_declared(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")  # sending declares nothing
        wished: QueueOptions = {"max_deliveries": 7, "dedupe_window": window_of(harness)}
        holds = QueueSettings(max_deliveries=7, dedupe_window=window_of(harness))
        assert await broker.declare(name, wished, only_undeclared=True) == holds
        assert await other.declare(name, wished, only_undeclared=True) == holds
        both: QueueOptions = {"max_deliveries": 8, "body_max": 10}
        holds = replace(holds, body_max=10)
        assert await other.declare(name, both, only_undeclared=True) == holds  # max_deliveries was declared
        assert await broker.settings(name) == holds
        assert await other.declare(name, {"max_deliveries": 8}) == replace(holds, max_deliveries=8)

    async def test_the_usual_value_can_be_declared(self, harness: QueueHarness, name: str) -> None:
        broker, usual = await harness.open(), QueueSettings()
        await broker.declare(name, {"max_deliveries": usual.max_deliveries})
        assert await broker.declare(name, {"max_deliveries": 7}, only_undeclared=True) == usual
        assert await broker.declare(f"{name}-2", {"lock": usual.lock}, only_undeclared=True) == usual
        assert await broker.declare(f"{name}-2", {"lock": usual.lock * 2}, only_undeclared=True) == usual

    async def test_of_two_that_race_one_wins(self, harness: QueueHarness, name: str) -> None:
        clients = [await harness.open() for _ in range(4)]
        for number in range(3):
            wishes = [
                client.declare(f"{name}-{number}", {"max_deliveries": most}, only_undeclared=True)
                for most, client in enumerate(clients, 3)
            ]
            found = {one.max_deliveries for one in await asyncio.gather(*wishes)}
            assert len(found) == 1
            assert found == {(await clients[0].settings(f"{name}-{number}")).max_deliveries}

    async def test_of_two_that_expect_different_settings_one_is_refused(self, harness: QueueHarness, name: str) -> None:
        clients = [await harness.open() for _ in range(2)]
        renewal_thread = cast(RenewalThread, None)  # nothing here is renewed
        contexts = [
            QueueContext(
                name, client, renewal_thread, SystemClock(), QueueSettings(), "", expected={"max_deliveries": most}
            )
            for most, client in enumerate(clients, 3)
        ]
        ends = await asyncio.gather(*(context.ready() for context in contexts), return_exceptions=True)
        [refused] = [one for one in ends if one is not None]
        assert isinstance(refused, ConfigError)
        assert name in str(refused)
        assert "max_deliveries is" in str(refused)

    async def test_a_deleted_queue_has_no_declared_settings(self, harness: QueueHarness, name: str) -> None:
        broker, usual = await harness.open(), QueueSettings()
        await broker.declare(name, {"max_deliveries": 7, "dead_retention": 5.0})
        await broker.delete(name, force=True)
        assert await broker.settings(name) == usual
        holds = await broker.declare(name, {"max_deliveries": 8}, only_undeclared=True)
        assert holds == replace(usual, max_deliveries=8)

    async def test_a_lower_limit_applies_to_old_messages(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dead_letters)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, harness)
        settings = QueueSettings(lock=harness.lock, max_deliveries=1, dedupe_window=window_of(harness), body_max=10)
        changes: QueueOptions = {
            "lock": harness.lock,
            "max_deliveries": 1,
            "dedupe_window": window_of(harness),
            "body_max": 10,
        }
        assert await other.declare(name, changes) == settings
        assert await broker.settings(name) == settings
        assert await broker.settings(f"{name}-2") == QueueSettings()
        assert await settle(broker, [got], Abandon()) == [Settled(dead=True)]


def window_of(harness: QueueHarness) -> float:
    """Return a short dedupe window."""
    return max(5.0, harness.traits.dedupe_min)


class Barrier:
    """Makes brokers wait until each has read the settings of a queue, before any of them goes on."""

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._complete = asyncio.Event()

    def around(self, broker: Broker) -> Broker:
        """Return *broker* as one that waits here."""
        return cast(Broker, _BarrierBroker(broker, self))

    async def wait(self) -> None:
        """Wait for the others."""
        self._missing -= 1
        if self._missing <= 0:
            self._complete.set()
        await self._complete.wait()


class _BarrierBroker:
    def __init__(self, broker: Broker, barrier: Barrier) -> None:
        self._broker = broker
        self._barrier = barrier

    async def settings(self, queue: str) -> QueueSettings:
        found = await self._broker.settings(queue)
        await self._barrier.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)
