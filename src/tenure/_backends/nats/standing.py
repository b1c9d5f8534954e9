"""The pull that waits for the next message of an idle queue: a hint, and the first message with it.

While a consumer of this process listens and its last claim found too little, one message is asked for that may come
later. The server sends it as soon as there is one: sent, given back, or with its lock or delay ended. The next claim
takes it. If no claim does in time, as the consumer is busy, it is given back.

It never runs beside a claim that is the first: the two would share the messages that are there, and what this one has
would be given back behind the others. It begins when a claim has found too little, or if those that listen don't claim.
When the last of them has left, it goes on for a moment: short receives in a row share it, and don't leave one each.

Its lock begins at a moment that this process doesn't know, but not before it asked. If that was a short while ago,
compared with the lock, the lock counts from then, and the claim says so by its ``age``: so the message is handed out
without asking the server once more. Otherwise it is renewed first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from tenure._backends.nats.client import Client
from tenure._backends.nats.configuration import Consumer
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.message_format import LOCK_MAX
from tenure._backends.nats.messages import Found
from tenure._backends.nats.places import Places, nanoseconds, slack_of
from tenure._backends.nats.pulls import Inbox
from tenure._backends.nats.receiving import Receiving
from tenure._backends.nats.storing import WORKING, locks_for
from tenure._queue.broker import QueueSettings
from tenure._runtime.backoff import Backoff
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import TenureError

WAITS = 30.0
"""Seconds for which the server keeps a pull, or a share of a lock's time if that is less."""

AGE_SHARE = 0.2
"""The share of a lock's time that may be over when its message is handed out; and that for which a pull is kept."""

PAUSE_MAX = 2.0
"""Seconds at most after a failure until the next pull."""

KEEPS_MAX = 1.0
"""Seconds for which a message waits for a claim, or a quarter of a lock's time if that is less."""

FIRST_AFTER = 0.1
"""Seconds without a claim after which a message is asked for, for those that only listen."""

REUSED_WITHIN = 0.05
"""Seconds for which a pull goes on when the last listener has left."""

LOOKS, LOOKS_EVERY = 4, 0.0005
"""How often, and after how many seconds, an empty claim looks whether the pull that waits has got a message."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A message that no claim has taken yet."""

    found: Found
    connection: Connection
    consumer: Consumer
    asked_at: float
    """When it was asked for: its lock did not begin before."""
    keeps_until: asyncio.TimerHandle | None = None

    def is_usual(self, lock: float) -> bool:
        """Whether the server locks for *lock* seconds by itself."""
        return abs(lock + slack_of(lock) - self.consumer.ack_wait) <= 0.001


class Standing:
    """The pulls that wait, one for each queue on each event loop with a listener."""

    def __init__(self, client: Client, places: Places, receiving: Receiving, notifier: Notifier, clock: Clock) -> None:
        self._client = client
        self._places = places
        self._receiving = receiving
        self._notifier = notifier
        self._clock = clock
        self._pulls: dict[tuple[str, asyncio.AbstractEventLoop], _Pull] = {}

    async def hints(self, queue: str, listener: AsyncIterator[None]) -> AsyncIterator[None]:
        """Yield when a message has come, or when *listener* does."""
        key = queue, asyncio.get_running_loop()
        pull = self._pulls.get(key)
        if pull is None:
            for old in [one for one in self._pulls if one[1].is_closed()]:  # it ended before the last pull of it did
                del self._pulls[old]
            pull = self._pulls[key] = _Pull(self, queue)
        pull.join()
        try:
            async for _ in listener:
                yield
        finally:
            pull.leave(partial(self._end_unused, key, pull))

    def _end_unused(self, key: tuple[str, asyncio.AbstractEventLoop], pull: _Pull) -> None:
        if not pull.listeners and self._pulls.get(key) is pull:
            del self._pulls[key]
            pull.close()

    def want(self, queue: str) -> None:
        """Ask for the next message of *queue*, if somebody listens here: a claim has found too little."""
        pull = self._pulls.get((queue, asyncio.get_running_loop()))
        if pull is not None:
            pull.want()

    @contextmanager
    def claiming(self, queue: str) -> Iterator[None]:
        """Claim messages of *queue* in the block: the first pull that waits is not begun meanwhile."""
        pull = self._pulls.get((queue, asyncio.get_running_loop()))
        if pull is None:
            yield
            return
        pull.claims += 1
        try:
            yield
        finally:
            pull.claims -= 1
            pull.claimed_at = asyncio.get_running_loop().time()

    def is_asking(self, queue: str) -> bool:
        """Whether a pull that waits gets the next message of *queue* on this loop."""
        pull = self._pulls.get((queue, asyncio.get_running_loop()))
        return pull is not None and pull.wanted.is_set()

    async def gets_one(self, queue: str) -> bool:
        """Whether a message of *queue* waits for a claim here, or comes in a moment."""
        pull = self._pulls.get((queue, asyncio.get_running_loop()))
        if pull is None:
            return False
        for _ in range(LOOKS):
            if pull.has_one:
                return True
            await asyncio.sleep(LOOKS_EVERY)
        return pull.has_one

    async def take(self, connection: Connection, queue: str, lock: float, asked_at: float) -> tuple[list[Found], float]:
        """Return the message of *queue* that waits, and by how much its lock may have begun before *asked_at*: now.

        It is locked for *lock* seconds and more from then. If that can't be proved, it is given back, and can be pulled
        at once.
        """
        pull = self._pulls.get((queue, asyncio.get_running_loop()))
        waiting = None if pull is None else pull.take()
        if waiting is None:
            return [], 0.0
        try:
            age = asked_at - waiting.asked_at
            if waiting.connection is connection and age <= lock * AGE_SHARE and waiting.is_usual(lock):
                return [waiting.found], age
            if await self._renew(waiting, lock):
                return [waiting.found], 0.0
        except asyncio.CancelledError:
            self.give_back(waiting)
            raise
        except Exception:
            connection.check()  # its own may be another one, which was lost
        self.give_back(waiting)
        await self._receiving.has_returned(queue)
        return [], 0.0

    async def _renew(self, waiting: Waiting, lock: float) -> bool:
        """Lock a message for *lock* seconds from now; False if its lock may have ended before."""
        how = WORKING if waiting.is_usual(lock) else locks_for(lock + slack_of(lock))
        await waiting.connection.request(waiting.found.reply, how)
        # An answer after the earliest end of the lock proves nothing.
        return self._clock.now() < waiting.asked_at + waiting.consumer.ack_wait

    async def close(self) -> None:
        """End all that are of this loop."""
        pulls = list(self._pulls.values())
        self._pulls.clear()
        for pull in pulls:
            pull.close()
        await asyncio.gather(*(pull.ended for pull in pulls if pull.is_here), return_exceptions=True)

    # --- used by a pull ---

    async def pull_one(self, pull: _Pull) -> None:
        """Wait for one message, and keep it for the next claim."""
        queue = pull.queue
        try:
            connection, consumer, inbox = await self._client.run(lambda connection: self._prepare(connection, queue))
        except TenureError as error:
            raise _Failed(str(error)) from error
        waits = min(WAITS, consumer.ack_wait * AGE_SHARE)
        subject = f"{self._client.api}.CONSUMER.MSG.NEXT.{self._places.place_of(queue).stream}.{consumer.name}"
        asked_at = self._clock.now()

        def keep(found: Found) -> None:
            pull.keep(Waiting(found, connection, consumer, asked_at))
            self._notifier.notify(queue)

        request: dict[str, object] = {"batch": 1, "expires": nanoseconds(waits)}
        try:
            pull.begins()
            async with asyncio.timeout(waits + self._client.options.timeout):
                await inbox.pull(queue, subject, request, 1, keep)
        except BaseException as error:
            self._receiving.abandon(connection, inbox)
            if isinstance(error, Exception):
                self._places.forget(queue)
                raise _Failed(str(error)) from error
            raise
        self._receiving.put_back_inbox(connection, inbox)

    async def _prepare(self, connection: Connection, queue: str) -> tuple[Connection, Consumer, Inbox]:
        consumer = await self._places.checked_consumer_of(connection, queue)
        if consumer is None:
            record, _ = await self._places.read_record(connection, queue)
            lock = min(QueueSettings(**record.settings).lock, LOCK_MAX)
            consumer = await self._places.make_consumer(connection, queue, lock)
        return connection, consumer, await self._receiving.take_inbox(connection)

    def give_back(self, waiting: Waiting) -> None:
        """Give a message back that no claim has taken."""
        self._receiving.give_back(waiting.connection, [waiting.found])

    def failed(self, queue: str) -> None:
        """Let listeners look: something may have happened that no pull has shown."""
        self._notifier.notify(queue)


class _Failed(Exception):
    """There was no answer to a pull that waits."""


class _Pull:
    """The pull of one queue on one loop."""

    def __init__(self, standing: Standing, queue: str) -> None:
        self._standing = standing
        self.queue = queue
        self.listeners = self.claims = 0
        self.claimed_at = asyncio.get_running_loop().time()
        """When the last claim ended, or it was made."""
        self.wanted = asyncio.Event()
        self._leaving: asyncio.TimerHandle | None = None
        self._waiting: Waiting | None = None
        self._is_first = True
        self._backoff = Backoff(longest=PAUSE_MAX)
        self._began = math.inf  # when the server got the present pull
        self.ended = asyncio.get_running_loop().create_task(self._run(), name="tenure-nats-pull")

    async def _run(self) -> None:
        await self._until_first()
        while True:
            await self.wanted.wait()
            now = asyncio.get_running_loop().time
            self._began = math.inf
            try:
                await self._standing.pull_one(self)
                self._backoff.reset()
            except _Failed:
                self._is_first = True  # what happened meanwhile is hinted at when the next one is asked for
                self._backoff.reset_after(now() - self._began)
                await self._backoff.rest()

    async def _until_first(self) -> None:
        """Wait until a message is wanted, or nobody has claimed for a while."""
        now = asyncio.get_running_loop().time
        while not self.wanted.is_set():
            left = FIRST_AFTER if self.claims else self.claimed_at + FIRST_AFTER - now()
            if left <= 0:
                self.wanted.set()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.wanted.wait()

    def join(self) -> None:
        """Note one more listener."""
        self.listeners += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def leave(self, end: Callable[[], None]) -> None:
        """Note that a listener has left; *end* it in a while, unless another one comes."""
        self.listeners -= 1
        if not self.listeners:
            if self.is_here and not self.ended.done():
                self._leaving = asyncio.get_running_loop().call_later(REUSED_WITHIN, end)
            else:
                end()

    def begins(self) -> None:
        """Note that a message is asked for now; give a hint if it is the first: none is missed from then on."""
        self._began = asyncio.get_running_loop().time()
        if self._is_first:
            self._is_first = False
            self._standing.failed(self.queue)

    def want(self) -> None:
        """Ask for the next message, unless one waits already."""
        if self._waiting is None:
            self.wanted.set()

    def keep(self, waiting: Waiting) -> None:
        """Keep a message for the next claim, for a while."""
        self.wanted.clear()
        keeps = min(KEEPS_MAX, waiting.consumer.ack_wait / 4)
        waiting.keeps_until = asyncio.get_running_loop().call_later(keeps, self._give_back)
        self._waiting = waiting

    @property
    def has_one(self) -> bool:
        """Whether a message waits."""
        return self._waiting is not None

    def take(self) -> Waiting | None:
        """Return the message that waits, which is the caller's from now on."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.keeps_until is not None:
            waiting.keeps_until.cancel()
        return waiting

    def _give_back(self) -> None:
        waiting = self.take()
        if waiting is not None:
            self._standing.give_back(waiting)

    @property
    def is_here(self) -> bool:
        """Whether it belongs to the running loop."""
        return self.ended.get_loop() is asyncio.get_running_loop()

    def close(self) -> None:
        """End it; what it has received is given back."""
        loop = self.ended.get_loop()
        if loop.is_closed():
            return
        if loop is asyncio.get_running_loop():
            self.ended.cancel()
            self._give_back()
        else:
            loop.call_soon_threadsafe(self.ended.cancel)
