"""Queues: peeked, purged, deleted, and closed with their backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tenure
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure.errors import ConfigError, QueueNotEmpty
from tenure.testing import until
from tests.application.queue_setup import QueueSetup, in_virtual_time


@in_virtual_time
async def test_a_queue_that_was_deleted_is_created_again_with_its_settings(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=3)
    await queue.send(b"a")
    with pytest.raises(QueueNotEmpty, match="could not delete 'orders': it holds 1 ready; consume, redrive or purge"):
        await queue.delete()
    assert (await queue.delete(force=True)).ready == 1
    assert (await setup.broker.settings("orders")).max_deliveries == 10
    await queue.send(b"b")
    assert (await setup.broker.settings("orders")).max_deliveries == 3
    assert [message.body for message in await queue.receive(max=2)] == [b"b"]


@in_virtual_time
async def test_a_queue_is_peeked_and_purged(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch(
        [Outgoing(b"%d" % number, id=f"id-{number}", delay=60.0 * (number % 2)) for number in range(6)]
    )
    [held] = await queue.receive(1)
    shown = await queue.peek()
    assert [(one.body, one.state) for one in shown] == [
        *[(b"0", "locked"), (b"1", "delayed"), (b"2", "ready"), (b"3", "delayed"), (b"4", "ready"), (b"5", "delayed")]
    ]
    assert isinstance(shown[0], tenure.LiveMessage)
    assert [one.body for one in await queue.peek(1, states=["delayed"], after=shown[1].sequence)] == [b"3"]
    assert await queue.purge(ids=["id-1", "id-0"], dry_run=True) == 1
    assert await queue.purge(states=["delayed"], sequences=[shown[1].sequence, shown[2].sequence]) == 1
    assert await queue.purge(sent_before=shown[0].enqueued_at) == 0
    assert await queue.purge() == 4
    await held.complete()
    assert await queue.stats() == Stats()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"states": "ready"}, "states must be a collection, not 'ready'; try states=\\['ready'\\]"),
        (
            {"states": ["dead"]},
            "a state must be ready, locked, delayed or deferred, not 'dead'; dead messages are in dead_",
        ),
        ({"ids": ["a", ""]}, "an id must not be empty"),
        ({"sequences": ["1"]}, "a sequence must be a whole number"),
        ({"session": ""}, "session must not be empty; leave it out"),
        ({"sent_before": "today"}, "sent_before must be"),
    ],
)
def test_invalid_filters_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue()
        await queue.send(b"stays")
        for ask in (queue.peek, queue.purge):
            with pytest.raises(ConfigError, match=complaint):
                await ask(**wrong)
        with pytest.raises(ConfigError, match="locked messages can't be purged, as a consumer has them"):
            await queue.purge(states=["ready", "locked"])
        with pytest.raises(ConfigError, match="limit must not be more than 10,000"):
            await queue.peek(10_001)
        assert (await queue.stats()).ready == 1

    test()


@in_virtual_time
async def test_chores_that_another_loop_begins_meanwhile_do_no_harm_to_the_end_of_a_queue(setup: QueueSetup) -> None:
    context = setup.queue()._context

    class Chore(asyncio.Task[None]):
        def get_loop(self) -> asyncio.AbstractEventLoop:
            context._chores.keep(other)  # another thread may come in wherever there is a call
            return super().get_loop()

    other = asyncio.ensure_future(asyncio.sleep(0.0))
    context._chores.keep(Chore(asyncio.sleep(0.0), loop=setup.loop))
    await context.rest()


def test_a_backend_ends_its_consumers_all_at_once() -> None:
    """With a store that does not answer, ending five one after another would take five times as long."""
    stopped = {name: asyncio.Event() for name in ("orders", "letters")}
    ended: list[str] = []

    async def main() -> None:
        async def handler(message: tenure.Message) -> None:
            begun.append(message.queue)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped[message.queue].set()
                for other in stopped.values():
                    await other.wait()
                ended.append(message.queue)
                raise

        begun: list[str] = []
        async with tenure.connect("memory:") as backend:
            for name in stopped:
                await backend.queue(name).send(b"a")
            consuming = [asyncio.ensure_future(backend.queue(name).consume(handler)) for name in stopped]
            await until(lambda: len(begun) == len(stopped))
        await asyncio.gather(*consuming)

    asyncio.run(main())
    assert sorted(ended) == ["letters", "orders"]


def test_connect_queue_send_and_consume() -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders", lock=5, max_deliveries=3)
            await queue.send(b"a")
            done: list[bytes] = []

            async def handler(message: tenure.Message) -> None:
                done.append(message.body)

            await queue.consume(handler, until_empty=True)
            assert done == [b"a"]
            assert await backend.queues() == ["orders"]
            assert isinstance(queue, tenure.Queue)
            again = backend.queue("orders")
            waiting = asyncio.ensure_future(again.consume(handler))
            await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match=r"'\$'"):
                backend.queue("a$b")
            with pytest.raises(ConfigError, match="lock"):
                backend.queue("a", lock=-1)
            with pytest.raises(ConfigError, match=r"lock .* must be from"):
                backend.queue("a", lock=1e9)
        await waiting  # closing the backend ends its consumers

    asyncio.run(main())
