"""Consumers on real servers that send, and hear nothing: where a connection begins with an answer, they claim no more.

In Azure, a proxy may answer in place of the service: there, a consumer waits for another answer first. The suite of
links that work one way tries that, on the stores that have no connection to lose, or can be asked about many queues.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from typing import Any

import pytest

import tenure
from tenure.testing.faultproxy import FaultProxy
from tests.durations import stretched, until
from tests.servers import Azurite, Nats, RabbitMQ, ServiceBus, shared

for _driver in ("nats", "aiormq", "azure.servicebus", "azure.storage.queue"):
    pytest.importorskip(_driver)

STORES: dict[str, tuple[type[Any], float]] = {
    "azure": (Azurite, 1.0),
    "nats": (Nats, 1.0),
    "rabbitmq": (RabbitMQ, 1.0),
    "servicebus": (ServiceBus, 5.0),
}
"""With the seconds that a lock lasts: few, as what was locked for nobody is back after that."""
ROUNDS, MESSAGES = 3, 10


@pytest.mark.parametrize("store", STORES)
async def test_a_consumer_that_hears_nothing_keeps_messages_from_nobody(store: str) -> None:
    kind, lock = STORES[store]
    server, name = shared(kind), f"orders-{secrets.token_hex(4)}"
    port = server.queue.port if store == "azure" else server.port
    heard: list[str] = []
    handled: Counter[str] = Counter()
    deliveries: dict[str, int] = {}

    async def hear(message: tenure.Message) -> None:
        heard.append(message.body.decode())

    async def handle(message: tenure.Message) -> None:
        if (body := message.body.decode()) not in heard:  # the answer to its verdict may have been lost
            handled[body] += 1
            deliveries[body] = message.delivery_count

    async with FaultProxy("127.0.0.1", port) as proxy:
        url = server.url.replace(str(port), str(proxy.port))
        url += f"{'&' if '?' in url else '?'}timeout={stretched(0.5):g}"
        async with tenure.connect(url) as cut_off, tenure.connect(server.url) as whole:
            stop = asyncio.Event()
            queue = whole.queue(name, lock=lock)
            await queue.send(b"first")
            tasks = [asyncio.create_task(cut_off.queue(name, lock=lock).consume(hear, poll_every=0.1, stop=stop))]
            await until(lambda: heard)
            proxy.stall("down")
            tasks.append(asyncio.create_task(queue.consume(handle, poll_every=0.1, stop=stop)))
            for round_ in range(ROUNDS):
                await queue.send_batch([tenure.Outgoing(f"{round_} {number}".encode()) for number in range(MESSAGES)])
                await until(lambda round_=round_: len(handled) == (round_ + 1) * MESSAGES)  # type: ignore[misc]
            assert heard == ["first"]
            assert set(handled.values()) == {1}
            # What its last claim has locked came back once; on Azure, it claims once in a lock.
            assert sum(count - 1 for count in deliveries.values()) <= MESSAGES + ROUNDS, deliveries
            proxy.heal()
            stop.set()
            await asyncio.gather(*tasks)
