"""Memories by name, and their use from several threads."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tenure._backends import memory
from tenure._lease import Granted, HeldBy
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Complete, Settlement
from tenure._url import Url
from tenure.errors import ConfigError
from tenure.testing import ManualClock


async def test_a_named_memory_is_shared_and_an_unnamed_one_is_not() -> None:
    one, other = (memory.open(Url.parse("memory:shared-by-test")) for _ in range(2))
    assert isinstance(await one.leases.acquire("name", "ann#1", 10), Granted)
    assert isinstance(await other.leases.acquire("name", "bob#1", 10), HeldBy)
    for private in ("memory:", "memory:", "memory:another"):
        assert isinstance(await memory.open(Url.parse(private)).leases.acquire("name", "bob#1", 10), Granted)


async def test_a_named_memory_outlives_its_users_so_that_no_token_falls() -> None:
    for token in (1, 2):
        one = memory.open(Url.parse("memory:stays"))
        granted = await one.leases.acquire("name", "ann#1", 10)
        assert isinstance(granted, Granted)
        assert granted.grant.token == token
        await one.leases.release(granted.grant)
        await one.close()
        del one
        gc.collect()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("memory://name", "write memory:name"),
        ("memory:///name", "write memory:name"),
        ("memory:/", "write memory:$"),
        ("memory:?x=1", "no option 'x'"),
    ],
)
def test_an_invalid_url_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        memory.open(Url.parse(written))


async def test_a_change_in_one_thread_wakes_another() -> None:
    here, there = (memory.open(Url.parse("memory:threads")) for _ in range(2))
    hints = here.leases.hints("name")

    async def lead() -> None:
        answer = await there.leases.acquire("name", "ann#1", 10)
        assert isinstance(answer, Granted)

    waiting = asyncio.ensure_future(anext(hints))
    await asyncio.sleep(0)
    thread = threading.Thread(target=lambda: asyncio.run(lead()))
    thread.start()
    await asyncio.wait_for(waiting, 5)
    thread.join()


def test_threads_that_race_get_one_winner_each_time() -> None:
    backends = [memory.open(Url.parse("memory:race")) for _ in range(8)]
    tokens: list[int] = []
    together = threading.Barrier(len(backends))

    async def compete(backend: memory.MemoryBackend, number: int) -> None:
        for turn in range(200):
            answer = await backend.leases.acquire("name", f"{number}#{turn}", 60)
            if isinstance(answer, Granted):
                tokens.append(answer.grant.token)
                await backend.leases.release(answer.grant)

    def run(backend: memory.MemoryBackend, number: int) -> None:
        together.wait()
        asyncio.run(compete(backend, number))

    threads = [threading.Thread(target=run, args=(backend, number)) for number, backend in enumerate(backends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(tokens)) == len(tokens) == max(tokens)


async def test_diagnosis() -> None:
    named = memory.open(Url.parse("memory:facts"))
    await named.leases.acquire("name", "ann#1", 10)
    assert {fact.name: fact.value for fact in await named.describe()} == {
        "memory": "shared in this process as 'facts'",
        "names": "1",
    }


async def test_expired_data_takes_no_memory() -> None:
    clock = ManualClock()
    backend = memory.open(Url.parse("memory:"), clock=clock)
    broker = backend.broker
    for number in range(500):
        await broker.send("orders", [Outgoing(b"a", id=f"{number}", expires_in=86_400.0)])
        [one] = (await broker.receive("orders", 1, 3_600.0)).deliveries
        await broker.settle([Settlement(one, Complete(remember=5.0))])
        clock.advance(1.0)
    queue = backend._memory.queues["orders"]
    assert len(queue.live.oldest) < 10
    assert len(queue.live.due) < 100
    assert len(queue.inbox._until) == len(queue.inbox._ends) < 10
    clock.advance(600.0)
    await broker.receive("orders", 1, 10.0)  # no more sends, and one more request
    assert not queue.sent._until
    assert not queue.sent._ends
    assert not queue.inbox._until


async def test_a_shorter_ttl_does_not_shorten_a_lease() -> None:
    clock = ManualClock()
    backend = memory.open(Url.parse("memory:"), clock=clock)
    answer = await backend.leases.acquire("name", "ann#1", 30)
    assert isinstance(answer, Granted)
    await backend.leases.renew([answer.grant], 5)
    await backend.leases.acquire("name", "ann#1", 5)
    clock.advance(29)
    assert isinstance(await backend.leases.acquire("name", "bob#1", 5), HeldBy)


async def test_the_end_of_a_settled_lock_wakes_no_waiter() -> None:
    backend = memory.open(Url.parse("memory:"))
    await backend.broker.send("orders", [Outgoing(b"a"), Outgoing(b"b")])
    claim = await backend.broker.receive("orders", 1, 10.0)
    await backend.broker.settle([Settlement(claim.deliveries[0], COMPLETE)])
    kept = await backend.broker.receive("orders", 1, 60.0)
    assert len(kept.deliveries) == 1
    due_in = (await backend.broker.receive("orders", 1, 10.0)).due_in
    assert due_in is not None
    assert 50.0 < due_in <= 60.0
    await backend.broker.settle([Settlement(kept.deliveries[0], COMPLETE)])
    assert (await backend.broker.receive("orders", 1, 10.0)).due_in is None
