"""Hints by publish and subscribe: one listening connection for each event loop, replaced when it breaks.

A message that is published without subscribers is lost. So a subscriber is notified once when it is subscribed, and
again each time the subscription was renewed: it polls, and finds any change that it has missed.

A broken connection may just be silent. So it is checked now and then; and at once when a request over another one has
no answer.

A hint of a queue may suppress further hints for some milliseconds, whose number is its content: then a second
notification follows when they are over. If this user may not subscribe, all subscribers are notified periodically.

In a cluster, hints are published in the shard that has the queue or the lease, and there is a connection to each node
that has some of the channels. When a channel is no longer at a node, its subscribers are notified, and find its new
endpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from redis import exceptions
from redis.asyncio.client import PubSub

from tenure._backends.redis.address import Endpoint
from tenure._backends.redis.client import Client
from tenure._backends.redis.connections import close_on
from tenure._foreign import digits, read_or
from tenure._runtime.backoff import Backoff
from tenure._runtime.closing import close_together
from tenure._runtime.notifier import Listener, Notifier
from tenure._runtime.tasks import Tasks

HEARTBEAT = 45.0
"""Seconds of silence after which the server is sent a PING: often enough for what forgets silent connections."""
REFUSED_PAUSE_MAX = 2.0
"""Seconds at most between two notifications while this user may not subscribe."""
QUIET_MAX = 100
"""Milliseconds for which hints are suppressed at most: as in hints.lua."""

_BROKEN = (exceptions.RedisError, OSError, TimeoutError, AttributeError)
"""What the driver raises on a broken connection; an ``AttributeError`` if it is closed while a request connects."""


class Wake:
    """The hints of one opened backend: topics are the channels of Redis."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._notifier = Notifier()
        self._subscribers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint | None, Subscriber]] = (
            WeakKeyDictionary()
        )
        client.on_unanswered = self._check

    def listen(self, channel: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something was published on *channel*."""
        return Subscription(self, channel, self._notifier.listen(channel))

    async def subscribe(self, subscription: Subscription) -> None:
        """Subscribe to the channel of *subscription*, at the node where it is published."""
        endpoint = await self._client.endpoint_of(subscription.channel)
        loop = asyncio.get_running_loop()
        subscribers = self._subscribers.get(loop)
        if subscribers is None:
            subscribers = self._subscribers[loop] = {}
        if endpoint not in subscribers:
            subscribers[endpoint] = Subscriber(self._client, self._notifier, endpoint)
        subscribers[endpoint].add(subscription)

    def _check(self) -> None:
        """Check the connections of this loop: a request on it had no answer."""
        for subscriber in self._subscribers.get(asyncio.get_running_loop(), {}).values():
            subscriber.check_soon()

    @property
    def is_refused(self) -> bool:
        """Whether the server refused this user's last attempt to subscribe."""
        return any(
            subscriber.is_refused
            for subscribers in list(self._subscribers.values())
            for subscriber in list(subscribers.values())
        )

    async def close(self) -> None:
        """Unsubscribe; every iterator ends."""
        self._notifier.close()
        within = self._client.options.timeout
        await close_together(
            *(
                partial(close_on, loop, subscriber.close, within=within)
                for loop, subscribers in list(self._subscribers.items())
                for subscriber in list(subscribers.values())
            )
        )
        self._subscribers.clear()


class Subscription(AsyncIterator[None]):
    """Yields for each notification; it subscribes when it is first awaited."""

    def __init__(self, wake: Wake, channel: str, listener: Listener) -> None:
        self._wake = wake
        self._listener = listener
        self.channel = channel

    async def __anext__(self) -> None:
        if not self._listener.closed:
            await self._wake.subscribe(self)
        await anext(self._listener)

    async def aclose(self) -> None:
        await self._listener.aclose()


class Subscriber:
    """One loop's subscribed connection: to the server, or to one node of a cluster."""

    def __init__(self, client: Client, notifier: Notifier, endpoint: Endpoint | None) -> None:
        self._client = client
        self._notifier = notifier
        self._endpoint = endpoint
        self._backoff = Backoff()
        self._channels: dict[str, WeakSet[Subscription]] = {}
        self._pubsub: PubSub | None = None
        self._tasks = Tasks()
        self._listening: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()  # since the check began
        self.is_refused = False
        """Whether the server refused this user's last attempt to subscribe."""
        self._later: dict[str, asyncio.TimerHandle] = {}

    def add(self, subscription: Subscription) -> None:
        """Subscribe to the channel of *subscription*."""
        known = self._channels.get(subscription.channel)
        if known is None:
            known = self._channels[subscription.channel] = WeakSet()
            if self._pubsub is not None:
                self._spawn(self._subscribe_soon(self._pubsub, subscription.channel))
        known.add(subscription)
        if self._listening is None or self._listening.done():
            self._listening = self._spawn(self._listen())

    async def close(self) -> None:
        """Stop listening."""
        for timer in self._later.values():
            timer.cancel()
        await self._tasks.cancel_all()

    async def _listen(self) -> None:
        while self._channels:
            # Whatever ends a subscription: without another one, no hint would come any more.
            with suppress(Exception), self._polling():
                async with self._client.at(self._endpoint).pubsub() as pubsub:
                    async with asyncio.timeout(self._client.options.timeout):
                        await self._subscribe_all(pubsub)
                    self._pubsub = pubsub
                    try:
                        await self._read(pubsub)
                    finally:
                        self._pubsub = None
            await self._backoff.rest(REFUSED_PAUSE_MAX if self.is_refused else math.inf)
            if self._endpoint is not None:  # the channels may be at another node by now
                self._redirect(*self._channels)

    def _redirect(self, *channels: str) -> None:
        """Notify the subscribers of *channels* that are not published here: they subscribe at the right node."""
        self._client.forget_endpoints()
        for channel in channels:
            del self._channels[channel]
            self._notifier.notify(channel)

    async def _read(self, pubsub: PubSub) -> None:
        """Handle messages until there are no subscribers, or the connection is found broken."""
        is_pinged = False
        while self._channels:
            message = await pubsub.get_message(timeout=self._client.options.timeout if is_pinged else HEARTBEAT)
            if message is not None:
                is_pinged = False
                self._heard.set()
                self._handle(message)
                continue
            if is_pinged:
                return  # no answer: the connection is broken
            is_pinged = True
            async with asyncio.timeout(self._client.options.timeout):
                await self._unsubscribe_unused(pubsub)
                await pubsub.ping()

    def check_soon(self) -> None:
        """Check whether the connection is broken, unless that is being checked."""
        if self._pubsub is not None and (self._checking is None or self._checking.done()):
            self._checking = self._spawn(self._check(self._pubsub))

    async def _check(self, pubsub: PubSub) -> None:
        if self._pubsub is not pubsub:  # it was closed meanwhile, and would take a new connection
            return
        self._heard.clear()
        with suppress(*_BROKEN):
            async with asyncio.timeout(self._client.options.timeout):
                await pubsub.ping()
                await self._heard.wait()
                return
        if self._pubsub is pubsub and self._listening is not None:
            self._listening.cancel()
            self._listening = self._spawn(self._listen())

    @contextmanager
    def _polling(self) -> Iterator[None]:
        """Notify all subscribers if the block fails because this user may not subscribe: they get no hints."""
        try:
            yield
        except exceptions.NoPermissionError:
            self.is_refused = True
            for channel in self._channels:
                self._notifier.notify(channel)

    def _handle(self, message: dict[str, Any]) -> None:
        """Notify the subscribers of a hint; and once more after the time in which further hints are suppressed."""
        kind = message["type"].removeprefix("s" if self._endpoint is not None else "")
        if kind not in ("subscribe", "message", "unsubscribe"):
            return
        named = message["channel"]
        channel = named.decode(errors="replace") if isinstance(named, bytes) else ""
        if channel not in self._channels:  # as of CLIENT TRACKING, by which any client may send others a list of keys
            return
        if kind == "unsubscribe":
            if self._endpoint is not None:  # the server did it: the slot has moved
                self._redirect(channel)
            return
        self.is_refused = False
        self._backoff.reset()
        self._notifier.notify(channel)
        if kind == "subscribe":
            self._notify_later(channel, QUIET_MAX)
        elif (quiet := quiet_of(message["data"])) is not None:
            self._notify_later(channel, quiet)

    def _notify_later(self, channel: str, milliseconds: int) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + (milliseconds + 1) / 1_000
        known = self._later.get(channel)
        if known is not None:
            at = max(at, known.when())
            known.cancel()

        def notify() -> None:
            del self._later[channel]
            self._notifier.notify(channel)

        self._later[channel] = loop.call_at(at, notify)

    async def _unsubscribe_unused(self, pubsub: PubSub) -> None:
        unused = [channel for channel, subscription in self._channels.items() if not subscription]
        for channel in unused:
            del self._channels[channel]
        if unused and self._endpoint is None:
            await pubsub.unsubscribe(*unused)
            return
        for channel in unused:
            await pubsub.execute_command("SUNSUBSCRIBE", channel)

    async def _subscribe_all(self, pubsub: PubSub) -> None:
        """Subscribe to the channels of all, also of those that begin to listen meanwhile."""
        subscribed: set[str] = set()
        while new := [channel for channel in self._channels if channel not in subscribed]:
            await self._subscribe(pubsub, *new)
            subscribed.update(new)

    async def _subscribe(self, pubsub: PubSub, *channels: str) -> None:
        if self._endpoint is None:
            await pubsub.subscribe(*channels)
            return
        for channel in channels:  # one slot per command; older versions of redis-py have no method for it
            await pubsub.execute_command("SSUBSCRIBE", channel)

    async def _subscribe_soon(self, pubsub: PubSub, channel: str) -> None:
        if self._pubsub is not pubsub:  # it was closed meanwhile, and would take a new connection
            return
        # If this fails, the connection is broken, and all channels are subscribed again.
        with suppress(*_BROKEN):
            async with asyncio.timeout(self._client.options.timeout):
                await self._subscribe(pubsub, channel)

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.spawn(call)


def quiet_of(data: object) -> int | None:
    """Return the milliseconds for which a hint suppresses further ones, by its content; None if it suppresses none."""
    quiet = read_or(digits, data, None)
    return None if quiet is None else min(quiet, QUIET_MAX)
