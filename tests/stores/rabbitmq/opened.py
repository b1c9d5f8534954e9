"""Steps of the tests of RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from tenure._backends import rabbitmq
from tenure._backends.rabbitmq.errors import AmqpError
from tenure._queue.verdicts import COMPLETE, LAPSED, Settled, Settlement
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until
from tests.servers import patient


@asynccontextmanager
async def opened(*urls: str) -> AsyncIterator[list[Any]]:
    """Yield a broker for each of *urls*: processes of their own, as far as the server knows."""
    backends = [rabbitmq.open(Url.parse(patient(url))) for url in urls]
    try:
        yield [one.broker for one in backends]
    finally:
        for one in backends:
            await one.close()


async def complete(broker: Any, *deliveries: Any) -> None:
    """Complete messages that are held."""
    settled = await broker.settle([Settlement(one, COMPLETE) for one in deliveries])
    assert settled == [Settled()] * len(deliveries)


async def until_found(look: Callable[[], Awaitable[Any]]) -> Any:
    """Return what *look* finds, once it finds anything."""
    found: list[Any] = []

    async def is_found() -> bool:
        found[:] = await look()
        return bool(found)

    await until(is_found)
    return found


async def received(broker: Any, name: str) -> Any:
    return (await broker.receive(name, 1, 2.0)).deliveries


async def is_lost(broker: Any, got: Any) -> bool:
    """Return whether a renewal says that a lock is lost."""
    try:
        return list(await broker.renew([got], 60.0)) == [LAPSED]
    except Unavailable:
        return False


async def gotten(theirs: Any) -> list[Any]:
    """Return the next message of a queue of aio-pika, if there is one."""
    found = await theirs.get(timeout=5, fail=False)
    return [] if found is None else [found]


async def ended_locks(backend: rabbitmq.RabbitBackend) -> None:
    """Return when the messages whose locks have ended are back in their queues: a claim that follows finds them."""
    client, subscriptions = backend._client, backend.broker._subscriptions
    await asyncio.sleep(0)  # the alarm rings
    with suppress(AmqpError, TimeoutError):  # a lost connection gives back all that was held on it
        async with asyncio.timeout(client.options.timeout):
            while ends := [task for task in client._to_end if task.get_name() == "tenure-rabbitmq-lock-end"]:
                await asyncio.wait(ends)
            for one in list(subscriptions.values()):
                if (channels := one.channels) is not None and channels.lost is None:
                    for each in channels._channels:  # the queue answers after what it has got of the channel before
                        await each.arrived()
