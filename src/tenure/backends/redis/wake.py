"""Hints by publish and subscribe: one listening connection for each event loop, which is made again when it breaks.

A message that was published while nobody listened is gone. So whoever listens is woken once when the subscription
stands, and again each time it was taken up anew: whatever may have been missed is found by looking.

A hint of a queue may hold back those that follow it for some milliseconds, and says for how many: then there is a
second wake when they are over. Where this user may not listen, everybody is woken now and then.
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

from tenure.backends.redis.client import Client, on_loop
from tenure.bell import Bell, Listener
from tenure.errors import TenureError

HEARTBEAT = 5.0
"""Seconds of silence after which the server is asked whether it is still there."""
PAUSE_FIRST, PAUSE_MAX = 0.05, 5.0
"""Seconds between two attempts to listen again: they double up to the second."""
DEAF_MAX = 2.0
"""Seconds between two wakes while this user may not listen."""
QUIET_MAX = 100
"""Milliseconds for which hints are held back at most: as in queue.lua."""


class Wake:
    """The bell that Redis rings: topics are its channels."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bell = Bell()
        self._ears: WeakKeyDictionary[asyncio.AbstractEventLoop, Ear] = WeakKeyDictionary()

    def listen(self, channel: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something was published on *channel*."""
        return Heard(self, channel, self._bell.listen(channel))

    def ear(self) -> Ear:
        """Return the running loop's own ear."""
        loop = asyncio.get_running_loop()
        ear = self._ears.get(loop)
        if ear is None:
            ear = self._ears[loop] = Ear(self._client, self._bell)
        return ear

    @property
    def is_deaf(self) -> bool:
        """Whether this user was refused to listen when it was last tried."""
        return any(ear.is_deaf for ear in list(self._ears.values()))

    async def close(self) -> None:
        """Stop listening; every iterator ends."""
        self._bell.close()
        for loop, ear in list(self._ears.items()):
            await on_loop(loop, ear.close, within=self._client.options.timeout)
        self._ears.clear()


class Heard(AsyncIterator[None]):
    """Yields for each ring; it begins to listen when it is first waited for."""

    def __init__(self, wake: Wake, channel: str, listener: Listener) -> None:
        self._wake = wake
        self._listener = listener
        self.channel = channel

    async def __anext__(self) -> None:
        if not self._listener.closed:
            self._wake.ear().attend(self)
        await anext(self._listener)

    async def aclose(self) -> None:
        await self._listener.aclose()


class Ear:
    """One loop's listening connection."""

    def __init__(self, client: Client, bell: Bell) -> None:
        self._client = client
        self._bell = bell
        self._attended: dict[str, WeakSet[Heard]] = {}
        self._pubsub: PubSub | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Task[None] | None = None
        self.is_deaf = False
        """Whether this user was refused to listen when it was last tried."""
        self._later: dict[str, asyncio.TimerHandle] = {}

    def attend(self, heard: Heard) -> None:
        """See to it that the channel of *heard* is listened to."""
        known = self._attended.get(heard.channel)
        if known is None:
            known = self._attended[heard.channel] = WeakSet()
            if self._pubsub is not None:
                self._spawn(self._subscribe(self._pubsub, heard.channel))
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
        pause = PAUSE_FIRST
        while self._attended:
            with suppress(exceptions.RedisError, OSError, TimeoutError, TenureError), self._polling():
                async with self._client.here().pubsub() as pubsub:
                    async with asyncio.timeout(self._client.options.timeout):
                        await pubsub.subscribe(*self._attended)
                    self._pubsub, pause = pubsub, PAUSE_FIRST
                    try:
                        await self._hear(pubsub)
                    finally:
                        self._pubsub = None
            if self.is_deaf:
                pause = min(pause, DEAF_MAX)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_MAX)

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
                self._bell.ring(channel)

    def _tell(self, message: dict[str, Any]) -> None:
        """Ring for what was heard; and once more when hints that followed it may have been held back."""
        if message["type"] not in ("subscribe", "message"):
            return
        channel, told = message["channel"].decode(), message["data"]
        self.is_deaf = False
        self._bell.ring(channel)
        if message["type"] == "subscribe":
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
            self._bell.ring(channel)

        self._later[channel] = loop.call_at(at, ring)

    async def _leave_unattended(self, pubsub: PubSub) -> None:
        unattended = [channel for channel, heard in self._attended.items() if not heard]
        for channel in unattended:
            del self._attended[channel]
        if unattended:
            await pubsub.unsubscribe(*unattended)

    async def _subscribe(self, pubsub: PubSub, channel: str) -> None:
        # Should it fail, the connection is broken, and all is subscribed to anew.
        with suppress(exceptions.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._client.options.timeout):
                await pubsub.subscribe(channel)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
