"""RabbitMQ where a time must be kept although the server, or the loop, doesn't keep it: pauses, ends of locks."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import Any

import pytest

from tenure._backends import rabbitmq
from tenure._backends.rabbitmq import subscription
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.receipts import HeldMessage
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Settlement
from tenure._runtime.alarms import Alarms
from tenure._runtime.backoff import Backoff
from tenure._url import Url
from tenure.testing import ManualClock
from tests.clocks import ring_alarms
from tests.durations import until
from tests.servers import RabbitMQ, patient, url_of
from tests.stores.rabbitmq.opened import complete, opened, received, until_found

UNKNOWN = 10**6
"""The number of a message that the server has not sent: who names it loses the channel."""
CONSUMERS = 5
"""How many the server ends at once."""


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


async def begun_without_a_pause(name: str, patch: pytest.MonkeyPatch) -> int:
    """Return how many consumers a client begins at once after one that the server accepted, and ended at once."""
    begun = rests = steady = 0
    consume, rest, reset = HeldChannels.consume, Backoff.rest, Backoff.reset

    def ended_at_once(channels: HeldChannels, tag: str, credit: int) -> asyncio.Future[object]:
        nonlocal begun
        begun += 1
        answer = consume(channels, tag, credit)
        answer.add_done_callback(lambda _: channels.first.reject(UNKNOWN))
        return answer

    async def counted_rest(backoff: Backoff, *args: float) -> None:
        nonlocal rests
        rests += 1
        await rest(backoff, *args)

    def counted_reset(backoff: Backoff) -> None:  # on a busy machine, the end may come late
        nonlocal steady
        steady += 1
        reset(backoff)

    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.receive(name, 1, 30.0)
        with patch.context() as ending:
            ending.setattr(HeldChannels, "consume", ended_at_once)
            ending.setattr(Backoff, "rest", counted_rest)
            ending.setattr(Backoff, "reset", counted_reset)
            hints = broker.hints(name)
            await until(lambda: begun >= CONSUMERS)
            found = begun - 1 - rests - steady
        await hints.aclose()
    return found


async def test_a_consumer_that_the_server_ended_at_once_is_begun_again_after_a_pause(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await begun_without_a_pause(name, monkeypatch) <= 0


async def answers_before_the_alarm(name: str, patch: pytest.MonkeyPatch) -> list[object]:
    """Return the answers about a lock that is over before its alarm rings: a loop that was held up rings it late."""
    patch.setattr(Alarms, "_ring", lambda alarms: None)
    clock = ManualClock()
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))), clock=clock)
    broker: Any = backend.broker
    try:
        await broker.send(name, [Outgoing(b"a")])
        [got] = await until_found(partial(received, broker, name))
        clock.advance(2.0)
        answers = [*await broker.renew([got], 60.0), *await broker.settle([Settlement(got, COMPLETE)])]
        if answers == [LAPSED, LAPSED]:
            patch.undo()
            ring_alarms(clock)
            [again] = await until_found(partial(received, broker, name))
            assert again.delivery_count == 2
            await complete(broker, again)
        return answers
    finally:
        await backend.close()


async def test_a_lock_is_over_although_its_alarm_has_not_rung(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answers_before_the_alarm(name, monkeypatch) == [LAPSED, LAPSED]


async def finds_a_long_lock(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(HeldMessage, "is_over", lambda held, now: False)
    return await answers_before_the_alarm(name, monkeypatch) != [LAPSED, LAPSED]


async def finds_no_pause(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(subscription, "STEADY", 0.0)  # each counts as steady, and is followed at once
    return await begun_without_a_pause(name, monkeypatch) > 0


PLANTS = {
    "a consumer that was ended at once is begun again at once": finds_no_pause,
    "a lock lasts until its alarm rings": finds_a_long_lock,
}


@pytest.mark.parametrize("bug", PLANTS)
async def test_a_planted_bug_is_found(bug: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await PLANTS[bug](name, monkeypatch)
