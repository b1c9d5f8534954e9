"""Hints by publish and subscribe: one listening connection for each event loop, which is made again when it breaks.

A message that was published while nobody listened is gone. So whoever listens is woken once when the subscription
stands, and again each time it was taken up anew: whatever may have been missed is found by looking.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        pause = PAUSE_FIRST
        while self._attended:
            with suppress(exceptions.RedisError, OSError, TimeoutError, TenureError):
                async with self._client.here().pubsub() as pubsub:
                    async with asyncio.timeout(self._client.options.timeout):
                        await pubsub.subscribe(*self._attended)
                    self._pubsub, pause = pubsub, PAUSE_FIRST
                    try:
                        await self._hear(pubsub)
                    finally:
                        self._pubsub = None
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, PAUSE_MAX)

    async def _hear(self, pubsub: PubSub) -> None:
        """Ring for what comes, until nobody attends any more, or the connection is found broken."""
        is_asked = False
        while self._attended:
            message = await pubsub.get_message(timeout=self._client.options.timeout if is_asked else HEARTBEAT)
            if message is not None:
                is_asked = False
                if message["type"] in ("subscribe", "message"):
                    self._bell.ring(message["channel"].decode())
                continue
            if is_asked:
                return  # silence is all that a cut connection gives
            is_asked = True
            async with asyncio.timeout(self._client.options.timeout):
                await self._leave_unattended(pubsub)
                await pubsub.ping()

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
