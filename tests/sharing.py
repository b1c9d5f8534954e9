"""Members that share partitions, for tests of what shows them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import tenure
from tenure.testing import until


@asynccontextmanager
async def sharing_in(
    backend: tenure.Backend,
    name: str = "orders",
    partitions: int | Sequence[str] = 4,
    labels: Sequence[str] = ("ann", "bob"),
) -> AsyncIterator[tenure.PartitionGroup]:
    """Let members with these labels share partitions; yield their group once it is balanced."""

    async def work(term: tenure.PartitionTerm) -> None:
        await asyncio.Event().wait()

    async def group() -> tenure.PartitionGroup | None:
        found = [one for one in tenure.PartitionGroup.all_in(await backend.leaders()) if one.name == name]
        return found[0] if found and found[0].balanced and len(found[0].members) == len(labels) else None

    members = [
        backend.partitions(name, partitions, label=label, metadata={"addr": f"{label}:1"}, ttl=5, retry_every=0.5)
        for label in labels
    ]
    running = []
    count = partitions if isinstance(partitions, int) else len(partitions)
    for member in members:  # in this order: the first one is the oldest, and gives of all the partitions
        running.append(asyncio.create_task(member.run(work, sigterm=False)))
        await until(partial(_owns, member, count if member is members[0] else 1))
    try:
        await until(group)
        found = await group()
        assert found is not None
        yield found
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _owns(member: tenure.Partitions, count: int) -> bool:
    return len(member.owned) >= count


@contextmanager
def sharing(
    url: str = "sqlite:///work.db",
    name: str = "orders",
    partitions: int | Sequence[str] = 4,
    labels: Sequence[str] = ("ann", "bob"),
) -> Iterator[None]:
    """Do the same in a thread, on a store of its own connection."""
    begun, stop = threading.Event(), threading.Event()

    async def share() -> None:
        async with tenure.connect(url) as backend, sharing_in(backend, name, partitions, labels):
            begun.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(share()))
    thread.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        stop.set()
        thread.join()
