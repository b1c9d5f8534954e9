"""A consumer that starts while its store can't be reached, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError, Unavailable
from tenure.events import BrokerAnswered, BrokerAwaited, Event
from tenure.testing._conformance.harness import FaultyBroker
from tenure.testing.loop import VirtualLoop, run

KINDS = pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])


class Setup:
    """A queue whose broker can be cut off."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.now = loop.time
        self.broker = FaultyBroker(MemoryBroker(loop.clock()))
        self.events: list[Event] = []
        asked = FaultyBroker.around(self.broker)
        self.queue = Queue(
            QueueContext(
                "orders", asked, RenewalThread.here(), loop.clock(), QueueSettings(), "me", self.events.append, {}
            )
        )
        self.handled: list[bytes] = []

    async def handle(self, message: Message) -> None:
        self.handled.append(message.body)


class Silent(FaultyBroker):
    """A broker that never answers."""

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        await asyncio.Event().wait()


@KINDS
def test_it_waits_without_limit_and_reports_once(sessions: bool) -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.broker.cut():
            consuming = asyncio.create_task(setup.queue.consume(setup.handle, sessions=sessions, sigterm=False))
            await asyncio.sleep(100)
            assert [type(event) for event in setup.events] == [BrokerAwaited]
        await setup.queue.send(b"one", session="a" if sessions else None)
        await asyncio.sleep(10)
        assert setup.handled == [b"one"]
        [_, answered] = setup.events
        assert isinstance(answered, BrokerAnswered)
        assert 100 <= answered.waited < 104
        await setup.queue.drain()
        await consuming

    run(main())


@KINDS
@pytest.mark.parametrize("wait", [0, 5])
def test_it_gives_up_when_its_wait_is_over(wait: float, sessions: bool) -> None:
    async def main() -> None:
        setup = Setup()
        await setup.queue.send(b"one")  # so that the queue has nothing left to declare
        for _ in range(2):
            began = setup.now()
            async with setup.broker.cut():
                with pytest.raises(Unavailable, match=f"no answer within {wait:g} s" if wait else "cut by the test"):
                    await setup.queue.consume(setup.handle, sessions=sessions, wait=wait, sigterm=False)
            assert wait <= setup.now() - began <= 1.2 * wait
            # and once it has started, an outage doesn't end it
            consuming = asyncio.create_task(
                setup.queue.consume(setup.handle, sessions=sessions, wait=wait, sigterm=False)
            )
            await asyncio.sleep(1)
            async with setup.broker.cut():
                await asyncio.sleep(30)
            assert not consuming.done()
            await setup.queue.drain()
            await consuming

    run(main())


@KINDS
@pytest.mark.parametrize("asks", ["first", "later"])
def test_its_wait_ends_while_a_request_has_no_answer(asks: str, sessions: bool) -> None:
    """As with a server that accepts connections, and never answers."""

    async def main() -> None:
        setup = Setup()
        await setup.queue.send(b"one")
        consuming = asyncio.create_task(setup.queue.consume(setup.handle, sessions=sessions, wait=5, sigterm=False))
        if asks == "later":
            async with setup.broker.cut():
                await asyncio.sleep(1)
        setup.queue._context.broker = Silent.around(setup.broker._wrapped)
        with pytest.raises(Unavailable, match="no answer within 5 s"):
            async with asyncio.timeout(60):
                await consuming
        assert setup.now() == pytest.approx(5)

    run(main())


@KINDS
@pytest.mark.parametrize("by", ["stop", "drain", "cancel"])
def test_it_can_be_ended_while_it_waits(by: str, sessions: bool) -> None:
    async def main() -> None:
        setup, stop = Setup(), asyncio.Event()
        async with setup.broker.cut():
            consuming = asyncio.create_task(
                setup.queue.consume(setup.handle, stop=stop, sessions=sessions, sigterm=False)
            )
            await asyncio.sleep(100)
            asked_at = setup.now()
            match by:
                case "stop":
                    stop.set()
                case "drain":
                    await setup.queue.drain()
                case _:
                    consuming.cancel()
            with suppress(asyncio.CancelledError):
                await consuming
            assert setup.now() == asked_at
            assert consuming.cancelled() == (by == "cancel")

    run(main())


@pytest.mark.parametrize("wait", [-1, float("nan"), "5", True])
def test_a_wait_that_is_none_is_refused(wait: object) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"^wait must be"):
            Setup().queue.consumer(print, wait=wait)  # type: ignore[arg-type]

    run(main())
