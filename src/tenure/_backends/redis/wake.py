"""Hints by publish and subscribe: one listening connection for each event loop, which is made again when it breaks.

A message that was published while nobody listened is gone. So whoever listens is woken once when the subscription
stands, and again each time it was taken up anew: whatever may have been missed is found by looking.

A hint of a queue may hold back those that follow it for some milliseconds, and says for how many: then there is a
second wake when they are over. Where this user may not listen, everybody is woken now and then.

In a cluster, hints are published in the shard that has the queue or the lease, and there is a connection to each node
that has some of what is listened to. Whoever listens to what is no longer found at a node is woken, and asks for its
new place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from redis import exceptions
from redis.asyncio.client import PubSub

from tenure._backends.redis.address import Endpoint
from tenure._backends.redis.client import Client
from tenure._backends.redis.connections import on_loop
from tenure._runtime.notifier import Listener, Notifier
from tenure.errors import TenureError

HEARTBEAT = 5.0
"""Seconds of silence after which the server is asked whether it is still there."""
PAUSE_FIRST, PAUSE_MAX = 0.05, 5.0
"""Seconds between two attempts to listen again: they double up to the second."""
DEAF_MAX = 2.0
"""Seconds between two wakes while this user may not listen."""
QUIET_MAX = 100
"""Milliseconds for which hints are held back at most: as in hints.lua."""


class Wake:
    """The bell that Redis rings: topics are its channels."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._notifier = Notifier()
        self._ears: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint | None, Subscriber]] = (
            WeakKeyDictionary()
        )

    def listen(self, channel: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something was published on *channel*."""
        return Subscription(self, channel, self._notifier.listen(channel))

    async def attend(self, heard: Subscription) -> None:
        """See to it that the channel of *heard* is listened to, where it is published."""
        place = await self._client.place_of(heard.channel)
        loop = asyncio.get_running_loop()
        ears = self._ears.get(loop)
        if ears is None:
            ears = self._ears[loop] = {}
        if place not in ears:
            ears[place] = Subscriber(self._client, self._notifier, place)
        ears[place].attend(heard)

    @property
    def is_deaf(self) -> bool:
        """Whether this user was refused to listen when it was last tried."""
        return any(ear.is_deaf for ears in list(self._ears.values()) for ear in list(ears.values()))

    async def close(self) -> None:
        """Stop listening; every iterator ends."""
        self._notifier.close()
        for loop, ears in list(self._ears.items()):
            for ear in list(ears.values()):
                await on_loop(loop, ear.close, within=self._client.options.timeout)
        self._ears.clear()


class Subscription(AsyncIterator[None]):
    """Yields for each ring; it begins to listen when it is first waited for."""

    def __init__(self, wake: Wake, channel: str, listener: Listener) -> None:
        self._wake = wake
        self._listener = listener
        self.channel = channel

    async def __anext__(self) -> None:
        if not self._listener.closed:
            await self._wake.attend(self)
        await anext(self._listener)

    async def aclose(self) -> None:
        await self._listener.aclose()


class Subscriber:
    """One loop's listening connection: to the server, or to one node of a cluster."""

    def __init__(self, client: Client, notifier: Notifier, place: Endpoint | None) -> None:
        self._client = client
        self._notifier = notifier
        self._place = place
        self._pause = PAUSE_FIRST
        self._attended: dict[str, WeakSet[Subscription]] = {}
        self._pubsub: PubSub | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self.is_deaf = False
        """Whether this user was refused to listen when it was last tried."""
        self._later: dict[str, asyncio.TimerHandle] = {}

    def attend(self, heard: Subscription) -> None:
        """See to it that the channel of *heard* is listened to."""
        known = self._attended.get(heard.channel)
        if known is None:
            known = self._attended[heard.channel] = WeakSet()
            if self._pubsub is not None:
                self._spawn(self._subscribe_soon(self._pubsub, heard.channel))
        known.add(heard)
        if self._listening is None or self._listening.done():
            self._listening = self._spawn(self._listen())

    async def close(self) -> None:
        """Stop listening."""
        for timer in self._later.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        while self._attended:
            with suppress(exceptions.RedisError, OSError, TimeoutError, TenureError), self._polling():
                async with self._client.at(self._place).pubsub() as pubsub:
                    async with asyncio.timeout(self._client.options.timeout):
                        await self._subscribe(pubsub, *self._attended)
                    self._pubsub = pubsub
                    try:
                        await self._hear(pubsub)
                    finally:
                        self._pubsub = None
            if self.is_deaf:
                self._pause = min(self._pause, DEAF_MAX)
            await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(self._pause * 2, PAUSE_MAX)
            if self._place is not None:  # it may be another node's by now
                self._send_away(*self._attended)

    def _send_away(self, *channels: str) -> None:
        """Wake those who listen to *channels*, which are not to be heard here: they ask where they are."""
        self._client.forget_places()
        for channel in channels:
            del self._attended[channel]
            self._notifier.notify(channel)

    async def _hear(self, pubsub: PubSub) -> None:
        """Ring for what comes, until nobody attends any more, or the connection is found broken."""
        is_asked = False
        while self._attended:
            message = await pubsub.get_message(timeout=self._client.options.timeout if is_asked else HEARTBEAT)
            if message is not None:
                is_asked = False
                self._tell(message)
                continue
            if is_asked:
                return  # silence is all that a cut connection gives
            is_asked = True
            async with asyncio.timeout(self._client.options.timeout):
                await self._leave_unattended(pubsub)
                await pubsub.ping()

    @contextmanager
    def _polling(self) -> Iterator[None]:
        """Wake everybody when the block ends because this user may not listen: nobody else will."""
        try:
            yield
        except exceptions.NoPermissionError:
            self.is_deaf = True
            for channel in self._attended:
                self._notifier.notify(channel)

    def _tell(self, message: dict[str, Any]) -> None:
        """Ring for what was heard; and once more when hints that followed it may have been held back."""
        kind = message["type"].removeprefix("s" if self._place is not None else "")
        if kind not in ("subscribe", "message", "unsubscribe"):
            return
        channel, told = message["channel"].decode(), message["data"]
        if kind == "unsubscribe":
            if self._place is not None and channel in self._attended:  # not by us: its slot has moved
                self._send_away(channel)
            return
        self.is_deaf, self._pause = False, PAUSE_FIRST
        self._notifier.notify(channel)
        if kind == "subscribe":
            self._ring_later(channel, QUIET_MAX)
        elif told.isdigit():
            self._ring_later(channel, int(told))

    def _ring_later(self, channel: str, milliseconds: int) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + (milliseconds + 1) / 1_000
        known = self._later.get(channel)
        if known is not None:
            at = max(at, known.when())
            known.cancel()

        def ring() -> None:
            del self._later[channel]
            self._notifier.notify(channel)

        self._later[channel] = loop.call_at(at, ring)

    async def _leave_unattended(self, pubsub: PubSub) -> None:
        unattended = [channel for channel, heard in self._attended.items() if not heard]
        for channel in unattended:
            del self._attended[channel]
        if unattended and self._place is None:
            await pubsub.unsubscribe(*unattended)
            return
        for channel in unattended:
            await pubsub.execute_command("SUNSUBSCRIBE", channel)

    async def _subscribe(self, pubsub: PubSub, *channels: str) -> None:
        if self._place is None:
            await pubsub.subscribe(*channels)
            return
        for channel in channels:  # one command is about one slot; older versions of redis-py have no method for it
            await pubsub.execute_command("SSUBSCRIBE", channel)

    async def _subscribe_soon(self, pubsub: PubSub, channel: str) -> None:
        # Should it fail, the connection is broken, and all is subscribed to anew.
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._client.options.timeout):
                await self._subscribe(pubsub, channel)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
