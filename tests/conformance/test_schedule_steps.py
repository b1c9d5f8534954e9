"""The steps of a slot on real stores: a process that fails between two of them is succeeded by another."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tenure._queue import schedule_steps
from tenure._queue.broker import Broker
from tenure._queue.outgoing import Outgoing
from tenure.errors import Unavailable
from tenure.testing._conformance.queues.steps import bodies, receive, receive_some
from tenure.testing.conformance import QueueHarness
from tests.durations import until
from tests.stores.azure_storage.test_suites import AzureQueueHarness
from tests.stores.nats.test_queue_suites import NatsQueueHarness
from tests.stores.rabbitmq.test_suites import RabbitQueueHarness
from tests.stores.servicebus.test_suites import ServiceBusHarness

HARNESSES: list[type[QueueHarness]] = [AzureQueueHarness, NatsQueueHarness, RabbitQueueHarness, ServiceBusHarness]
SLOT = [Outgoing(b"a", id="s@a")]


@pytest_asyncio.fixture(params=HARNESSES, ids=lambda kind: kind.__name__)
async def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[QueueHarness]:
    """Open a store; those that wait for a claim to end wait for a second."""
    monkeypatch.setattr(schedule_steps, "KEEP_OUT", 1.0)
    harness: QueueHarness = request.param()
    await harness.start()
    try:
        yield harness
    finally:
        await harness.close()


@pytest.fixture
def name() -> str:
    """Give a name that no other test uses."""
    return f"steps-{secrets.token_hex(6)}"


def fail_to_send(broker: Broker, monkeypatch: pytest.MonkeyPatch, *, is_sent: bool) -> None:
    """Let the second step fail, before or after the messages are sent."""
    steps: Any = broker._wrapped._schedules  # type: ignore[attr-defined]
    send = steps._send

    async def fail(queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        if is_sent:
            await send(queue, messages)
        raise Unavailable("the process is about to end")

    monkeypatch.setattr(steps, "_send", fail)


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it has sent", "after it has sent"])
async def test_another_process_goes_on(
    harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch, *, is_sent: bool
) -> None:
    broker, other = await harness.open(), await harness.open()
    await broker.advance(name, "s", None, "1")
    fail_to_send(broker, monkeypatch, is_sent=is_sent)
    with pytest.raises(Unavailable, match="about to end"):
        await broker.advance(name, "s", "1", "2", SLOT)
    assert (await other.schedules(name)).records == {"s": "1"}
    assert (await other.advance(name, "s", "1", "2", SLOT))[:2] == (False, "1")
    assert (await other.advance(name, "t", None, "1")).is_done  # another schedule is free

    async def is_advanced() -> bool:
        if harness.is_exact:  # then the claim doesn't end by itself
            await harness.pass_time(schedule_steps.KEEP_OUT)
        return (await other.advance(name, "s", "1", "2", SLOT)).is_done

    await until(is_advanced)
    assert (await broker.schedules(name)).records == {"s": "2", "t": "1"}
    times = 2 if is_sent and harness.traits.dedupe == "impossible" else 1
    assert {one.id for one in await receive_some(other, name, harness, times)} == {"s@a"}
    assert await receive(other, name, harness) == []


async def test_a_claim_does_not_outlive_its_queue(
    harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = await harness.open(), await harness.open()
    fail_to_send(broker, monkeypatch, is_sent=False)
    with pytest.raises(Unavailable, match="about to end"):
        await broker.advance(name, "s", None, "1", SLOT)
    assert name in await other.names()
    await other.delete(name)
    assert (await other.advance(name, "s", None, "1", SLOT)).is_done  # at once
    assert bodies(await receive_some(other, name, harness, 1)) == [b"a"]
