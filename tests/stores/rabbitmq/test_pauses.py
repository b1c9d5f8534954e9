"""RabbitMQ where a time must be kept although the server, or the loop, doesn't keep it: pauses, ends of locks."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tenure._backends import rabbitmq
from tenure._backends.rabbitmq.held_channel import HeldChannel
from tenure._backends.rabbitmq.receipts import Receipts
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Settlement
from tenure._runtime.alarms import Alarms
from tenure._runtime.backoff import Backoff
from tenure._url import Url
from tenure.testing import ManualClock
from tests.clocks import TurnedClock, ring_alarms
from tests.durations import PATIENCE, until
from tests.servers import RabbitMQ, patient, url_of
from tests.stores.rabbitmq.opened import complete, opened, received, until_found

UNKNOWN = 10**6
"""The number of a message that the server has not sent: who names it loses the channel."""
LASTS, TIMES = 20.0, 10
"""Seconds in which consumers are counted, and how much faster than usual the clock runs then."""
BEGUN_MAX = 40
"""At most: in these seconds, 20 can last long enough to count as steady; others are begun after ever longer pauses."""


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


async def consumers_begun(
    name: str, patch: pytest.MonkeyPatch, lasts: float = LASTS, times: int = TIMES, at_least: int = 0
) -> int:
    """Return how many consumers a client begins in a time that the server accepts, and ends at once.

    Stop counting beyond ``BEGUN_MAX``; wait for *at_least* so many, whatever time that takes.
    """
    begun, consume = 0, HeldChannel.consume

    def ended_at_once(channel: HeldChannel, *args: Any, **options: Any) -> tuple[str, asyncio.Future[object]]:
        nonlocal begun
        begun += 1
        tag, answer = consume(channel, *args, **options)
        channel.channel.reject(UNKNOWN)
        return tag, answer

    clock = TurnedClock()
    clock.turn_loop()
    async with opened(f"{url_of(RabbitMQ)}?heartbeat=600") as [broker]:
        await broker.receive(name, 1, 30.0)
        patch.setattr(HeldChannel, "consume", ended_at_once)
        hints = broker.hints(name)
        async with clock.hurried(times):
            with suppress(TimeoutError):
                async with asyncio.timeout(lasts):
                    await until(lambda: begun > BEGUN_MAX)
        found = begun
        await until(lambda: begun >= at_least)
        patch.undo()
        await hints.aclose()
    return found


async def test_a_consumer_that_the_server_ends_at_once_is_begun_rarely_and_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await consumers_begun(name, monkeypatch, at_least=3) <= BEGUN_MAX


async def rests_little(backoff: Backoff) -> None:
    await asyncio.sleep(backoff._first)


async def finds_no_pause(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as plant:
        plant.setattr(Backoff, "rest", rests_little)
        return await consumers_begun(name, monkeypatch, PATIENCE, times=1) > BEGUN_MAX


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


def found_until_the_alarm(receipts: Receipts, one: Any) -> Any:
    return receipts._held.get((str(one.token), one.sequence))


async def finds_a_long_lock(name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(Receipts, "find", found_until_the_alarm)
    return await answers_before_the_alarm(name, monkeypatch) != [LAPSED, LAPSED]


PLANTS = {
    "a consumer that was ended at once is begun again at once": finds_no_pause,
    "a lock lasts until its alarm rings": finds_a_long_lock,
}


@pytest.mark.parametrize("bug", PLANTS)
async def test_a_planted_bug_is_found(bug: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await PLANTS[bug](name, monkeypatch)
