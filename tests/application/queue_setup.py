"""A queue on one loop in virtual time, on a memory broker whose connection can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import Claim, NoSession, QueueOptions, QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._queue.retry import RetryPolicy
from tenure._queue.verdicts import Lapsed, Renewed, Settled, Settlement
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import Unavailable
from tenure.events import (
    Event,
)
from tenure.testing.loop import VirtualLoop, run

LOCK = 30.0


AT_ONCE = RetryPolicy(initial=0.0, maximum=0.0)


class FaultyBroker(MemoryBroker):
    """A broker whose connection can be slow, be cut, or lose answers."""

    cut = False
    loses_answers = False
    delay = 0.0
    renewing = True
    inbox_answers = True
    settling = True
    settle_late = 0.0
    """The seconds by which the next verdict on a reply is delayed."""
    parts_to_go = 0
    """The number of claims that end after a part of the expired messages, and say that there are more."""

    def __init__(self, *inside: Any) -> None:
        super().__init__(*inside)
        self.requests: list[str] = []
        self.accepted: list[SessionLock] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        self.requests.append("handled")
        if not self.inbox_answers:
            raise Unavailable("the inbox can't be asked")
        return await super().handled(queue, ids)

    async def settings(self, queue: str) -> QueueSettings:
        await self.answers.wait()
        return await super().settings(queue)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        await self._send_request("receive")
        answer = Claim((), 0.0) if self._is_part() else await super().receive(queue, limit, lock)
        await self._return_answer()
        return answer

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        answer = NoSession(0.0) if self._is_part() else await super().accept(queue, session, lock)
        if isinstance(answer, SessionLock):
            self.accepted.append(answer)
        await self._return_answer()
        return answer

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        await self._send_request(f"renew {len(held)}")
        if not self.renewing:
            raise Unavailable("no renewal gets through")
        answer = await super().renew(held, lock)
        await self._return_answer()
        return answer

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        if not self.settling:
            raise Unavailable("no verdict gets through")
        if self.settle_late and "replies" in settlements[0].delivery.queue:
            late, self.settle_late = self.settle_late, 0.0
            await asyncio.sleep(late)
        await self._send_request(f"settle {len(settlements)}")
        answer = await super().settle(settlements)
        await self._return_answer()
        return answer

    def _is_part(self) -> bool:
        self.parts_to_go -= 1
        return self.parts_to_go >= 0

    async def _send_request(self, what: str) -> None:
        self.requests.append(what)
        if self.cut:
            raise Unavailable("the connection is cut")

    async def _return_answer(self) -> None:
        await asyncio.sleep(self.delay)
        if self.loses_answers:
            raise Unavailable("the answer was lost")


class QueueSetup:
    """One broker, several consumers, one virtual clock."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = loop.clock()
        self.broker = FaultyBroker(self.clock)
        self.events: list[Event] = []
        self.queues: list[Queue] = []

    def queue(self, name: str = "orders", **settings: Any) -> Queue:
        settings = {"lock": LOCK, **settings}
        queue = Queue(
            QueueContext(
                name,
                self.broker,
                RenewalThread.here(),
                self.clock,
                QueueSettings(**settings),
                "me",
                self.events.append,
                cast(QueueOptions, settings),
            )
        )
        self.queues.append(queue)
        return queue

    def emitted(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @asynccontextmanager
    async def consuming(self, queue: Queue, handler: Any, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.ensure_future(queue.consume(handler, **options))
        try:
            yield task
        finally:
            await queue.drain(grace=5.0)
            await task


def in_virtual_time(test: Callable[[QueueSetup], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run *test* in virtual time, with a setup as its argument."""

    async def main() -> None:
        setup = QueueSetup()
        await test(setup)
        for queue in setup.queues:
            await queue.close()

    def wrapped() -> None:
        run(main(), seed=1, limit=100_000)

    wrapped.__name__ = test.__name__
    return wrapped


class Log:
    """A handler that records the messages it gets, and runs for *seconds*."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.began: list[bytes] = []
        self.ended: list[bytes] = []
        self.cancelled: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        self.began.append(message.body)
        try:
            if self.seconds:
                await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(message.body)
            raise
        self.ended.append(message.body)


async def fill(queue: Queue, count: int) -> list[bytes]:
    bodies = [b"%d" % number for number in range(count)]
    await queue.send_batch([Outgoing(body) for body in bodies])
    return bodies
