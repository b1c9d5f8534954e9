"""A queue that is sharded over several stores by key, and a store that is added while messages wait."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import sha256

import tenure
from tenure.testing import until

PARTITIONS = 64  # stays the same for ever, as in backend.partitions
BEFORE = ["sqlite:///shard-0.db", "sqlite:///shard-1.db"]
STORES = [*BEFORE, "sqlite:///shard-2.db"]  # the newest version; each producer changes to it at once

Queues = Mapping[str, tenure.Queue]


def store_of(partition: str, stores: Sequence[str]) -> str:
    """Return the store of a partition, in every process alike; a store that is added takes over its share only."""
    return max(stores, key=lambda store: sha256(f"{partition} {store}".encode()).digest())


async def send(queues: Queues, stores: Sequence[str], key: str, body: bytes) -> None:
    partition = tenure.partition_of(key, PARTITIONS)
    await queues[store_of(partition, stores)].send(body, headers={"customer": key}, session=partition)


async def wait_for_older(queues: Queues, store: str, message: tenure.Message) -> None:
    """Wait until the store that had the partition before has no message of it; meanwhile the lock is renewed."""
    assert message.session is not None
    before = store_of(message.session, BEFORE)
    while store != before:
        with suppress(tenure.Unavailable):  # then it is not known whether there are older ones
            if not await queues[before].peek(1, session=message.session):
                return
        await asyncio.sleep(0.2)


async def consume(queues: Queues, served: dict[str, list[str]], stop: asyncio.Event) -> None:
    """Consume the queue in all stores, as each process does; if one of them is away, the others go on."""

    async def serve(store: str, message: tenure.Message) -> None:
        await wait_for_older(queues, store, message)
        served[str(message.headers["customer"])].append(message.body.decode())

    async with asyncio.TaskGroup() as group:
        for store, queue in queues.items():
            group.create_task(queue.consume(partial(serve, store), sessions=True, concurrency=16, stop=stop))


async def main() -> None:
    customers = ["anna", "ben", "cleo", "dora", "emil", "fay"]
    served: dict[str, list[str]] = defaultdict(list)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        queues = {store: (await stack.enter_async_context(tenure.connect(store))).queue("orders") for store in STORES}
        for stores, numbers in ((BEFORE, "12"), (STORES, "34")):
            for number in numbers:
                for customer in customers:
                    await send(queues, stores, customer, number.encode())
        print(*[(await queue.stats()).ready for queue in queues.values()], "messages wait in the stores")
        consumers = [asyncio.create_task(consume(queues, served, stop)) for _ in range(2)]
        await until(lambda: sum(map(len, served.values())) == 4 * len(customers))
        stop.set()
        await asyncio.gather(*consumers)
    for customer in customers:
        print(customer, *served[customer])


asyncio.run(main())
