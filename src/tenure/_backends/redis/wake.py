"""Hints by publish and subscribe: one listening connection for each event loop, replaced when it breaks.

A message that is published without subscribers is lost. So a subscriber is notified once when it is subscribed, and
again each time the subscription was renewed: it polls, and finds any change that it has missed.

A subscribed connection can't log in again. So it is replaced once there is a login that lasts longer, before its own
ends; if there is none, it goes on for as long as the server lets it.

A broken connection may just be silent. So it is checked now and then; and at once when a request over another one has
no answer, or shows that a lease has a new holder of which no hint came. If all hints are about leases, it is checked
more rarely: leases are looked at once in a ttl anyway, and the systems of both ends probe a silent TCP connection. What
ends silent connections nevertheless, such as a proxy, is noticed by that.

A hint of a queue may suppress further hints for some milliseconds, whose number is its content: then a second
notification follows when they are over. If this user may not subscribe, all subscribers are told that hints are absent.

In a cluster, hints are published in the shard that has the queue or the lease, and there is a connection to each node
that has some of the channels. When a channel is no longer at a node, its subscribers are notified, and find its new
endpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.asyncio.client import PubSub

from tenure._backends.redis.address import Endpoint
from tenure._backends.redis.client import Client
from tenure._backends.redis.connections import LoginConnection
from tenure._election.store import Hint
from tenure._foreign import digits, read_or
from tenure._runtime.backoff import Backoff
from tenure._runtime.shared_hints import SharedHints, Source

HEARTBEAT = 45.0
"""Seconds of silence after which the server is sent a PING: often enough for what forgets silent connections."""
HEARTBEATS_OF_LEASES = 6
"""The multiple of ``HEARTBEAT`` after which a PING is sent if there are hints of leases only."""
WARY_FOR = 3_600.0
"""Seconds for which ``HEARTBEAT`` holds for all again, after a connection has ended in a longer silence than that."""
QUIET_MAX = 100
"""Milliseconds for which hints are suppressed at most: as in hints.lua."""

LOGIN_PAUSES = 1.0, 60.0
"""Seconds of the first pause and of the longest between two looks for a login, if there is none that lasts longer."""

_BROKEN = (exceptions.RedisError, OSError, TimeoutError, AttributeError)
"""What the driver raises on a broken connection; an ``AttributeError`` if it is closed while a request connects."""


class Wake(SharedHints[Endpoint | None, "Subscriber"]):
    """The hints of one opened backend: topics are the channels of Redis, sources are connections to its nodes."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self.client = client
        client.on_unanswered = self._check
        client.on_elsewhere = self._renew
        self._leases: set[str] = set()

    async def keys_of(self, topic: str) -> tuple[Endpoint | None]:
        """Return the node where a channel is published."""
        return (await self.client.endpoint_of(topic),)

    def source(self, key: Endpoint | None) -> Subscriber:
        """Make the subscribed connection to a node."""
        return Subscriber(self, key)

    def listen_to_lease(self, channel: str) -> AsyncIterator[Hint]:
        """Return an iterator as :meth:`listen` does; :meth:`found` is told what looks at the lease show."""
        self._leases.add(channel)
        return self.listen(channel)

    def has_only_leases(self, channels: Iterable[str]) -> bool:
        """Return whether all of these are channels of leases."""
        return self._leases.issuperset(channels)

    def now(self) -> float:
        """Return the time of this loop."""
        return asyncio.get_running_loop().time()

    def found(self, channel: str, token: int, asked_at: float) -> None:
        """Note the newest *token* of a lease, by a request that was sent at *asked_at*, in the time of this loop."""
        for subscriber in self.here().values():
            subscriber.found(channel, token, asked_at)

    def _check(self) -> None:
        """Check the connections of this loop: a request on it had no answer."""
        for subscriber in self.here().values():
            subscriber.check_soon()

    def _renew(self) -> None:
        """Subscribe again on this loop: a request on it was refused by a server that is no primary."""
        for subscriber in self.here().values():
            subscriber.renew()

    @property
    def is_refused(self) -> bool:
        """Whether the server refused this user's last attempt to subscribe."""
        return any(subscriber.is_deaf for subscriber in self.sources())


class _PubSub(PubSub):
    """A subscription whose connection is not opened again: it ends, and the next one begins.

    redis-py would open it again for the reader and for each command, at once, and lose all connections but one.
    """

    async def connect(self) -> None:
        self._require_connection()
        await super().connect()  # type: ignore[no-untyped-call]

    async def parse_response(self, block: bool = True, timeout: float = 0) -> Any:
        self._require_connection()
        return await super().parse_response(block, timeout)

    async def _reconnect(self, conn: Any, *given: Any, **named: Any) -> None:
        await conn.disconnect(nowait=True)

    def _require_connection(self) -> None:
        connection: Any = self.connection
        if connection is not None and not connection.is_connected:
            raise exceptions.ConnectionError("the subscribed connection is closed")


class Subscriber(Source):
    """One loop's subscribed connection: to the server, or to one node of a cluster."""

    def __init__(self, wake: Wake, endpoint: Endpoint | None) -> None:
        super().__init__(wake)
        self._client = wake.client
        self._has_only_leases = wake.has_only_leases
        self._endpoint = endpoint
        self._pubsub: PubSub | None = None
        self._reading: asyncio.Timeout | None = None
        self._was_lost = False
        self._checking: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()  # since the check began
        self._later: dict[str, asyncio.TimerHandle] = {}
        self._heard_at = 0.0  # when the newest message came
        self._hinted_at: dict[str, float] = {}  # by channel
        self._found: dict[str, tuple[int, float]] = {}  # by channel: the newest token, and when it was asked for
        self._wary_until = -math.inf

    async def follow(self) -> None:
        """Subscribe, and read until the connection is found broken."""
        if self._was_lost and self._endpoint is not None:  # the channels may be at another node by now
            self._client.forget_endpoints()
            for channel in list(self.topics):
                if await self._client.endpoint_of(channel) != self._endpoint:
                    self._redirect(channel)
        self._was_lost = True
        try:
            async with _PubSub(self._client.at(self._endpoint).connection_pool) as pubsub:
                async with asyncio.timeout(self._client.options.timeout):
                    await self._subscribe_all(pubsub)
                self._pubsub = pubsub
                replacing = self._spawn(self._replace_in_time(pubsub.connection))
                try:
                    async with asyncio.timeout(None) as self._reading:
                        await self._read(pubsub)
                finally:
                    replacing.cancel()
                    self._pubsub = self._reading = None
        except exceptions.NoPermissionError:  # this user may not subscribe
            self.deaf()

    def joined(self, topic: str) -> None:
        """Subscribe to a channel, too: the answer is its first hint."""
        if self._pubsub is not None:
            self._spawn(self._send(self._pubsub, "SUBSCRIBE", topic))

    def left(self, topics: Collection[str]) -> None:
        """Unsubscribe from these channels."""
        for topic in topics:
            self._hinted_at.pop(topic, None)
            self._found.pop(topic, None)
        if self._pubsub is not None:
            self._spawn(self._send(self._pubsub, "UNSUBSCRIBE", *topics))

    def end(self) -> None:
        super().end()
        for timer in self._later.values():
            timer.cancel()

    def _redirect(self, channel: str) -> None:
        """Notify the subscribers of a *channel* that isn't published here: they subscribe at the right node."""
        self.topics.pop(channel, None)
        self._notifier.notify(channel)

    async def _read(self, pubsub: PubSub) -> None:
        """Handle messages until the connection is found broken, or no channel is left."""
        is_pinged = False
        self._heard_at = asyncio.get_running_loop().time()
        try:
            while self.topics:
                message = await pubsub.get_message(timeout=self._client.options.timeout if is_pinged else self._rest)
                if message is not None:
                    is_pinged = False
                    self._heard_at = asyncio.get_running_loop().time()
                    self._heard.set()
                    self._handle(message)
                    continue
                if is_pinged:
                    raise TimeoutError("the PING has no answer")
                is_pinged = True
                async with asyncio.timeout(self._client.options.timeout):
                    await pubsub.ping()
        except _BROKEN:
            self._note_broken()
            raise

    @property
    def _rest(self) -> float:
        """Seconds of silence after which the server is sent a PING."""
        is_wary = asyncio.get_running_loop().time() < self._wary_until
        return HEARTBEAT if is_wary or not self._has_only_leases(self.topics) else HEARTBEATS_OF_LEASES * HEARTBEAT

    def _note_broken(self) -> None:
        """Send PINGs as often as ever for a while if the connection was silent: that may be why it ended."""
        now = asyncio.get_running_loop().time()
        if now - self._heard_at > HEARTBEAT:
            self._wary_until = now + WARY_FOR

    def found(self, channel: str, token: int, asked_at: float) -> None:
        """Check the connection if the *token* of a lease has changed since the last look, and no hint came."""
        if channel not in self.topics:
            return
        known = self._found.get(channel)
        self._found[channel] = token, asked_at
        if known is not None and token != known[0] and self._hinted_at.get(channel, -math.inf) < known[1]:
            self.check_soon()

    def check_soon(self) -> None:
        """Check whether the connection is broken, unless that is being checked."""
        if self._pubsub is not None and (self._checking is None or self._checking.done()):
            self._checking = self._spawn(self._check(self._pubsub))

    def renew(self) -> None:
        """Subscribe on another connection."""
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(0.0)

    async def _replace_in_time(self, connection: LoginConnection) -> None:
        """Subscribe on another connection before the login of this one ends."""
        pauses, pause = Backoff(*LOGIN_PAUSES), 0.0
        while connection.renewed_at < math.inf:
            await asyncio.sleep(max(connection.renewed_at - time.monotonic(), pause))
            if connection.is_outdated:
                self.renew()
                return
            pause = pauses.next()

    async def _check(self, pubsub: PubSub) -> None:
        if self._pubsub is not pubsub:  # it was closed meanwhile, and would take a new connection
            return
        self._heard.clear()
        with suppress(*_BROKEN):
            async with asyncio.timeout(self._client.options.timeout):
                await pubsub.ping()
                await self._heard.wait()
                return
        if self._pubsub is pubsub:
            self._note_broken()
            self.renew()

    def _handle(self, message: dict[str, Any]) -> None:
        """Notify the subscribers of a hint; and once more after the time in which further hints are suppressed."""
        kind = message["type"].removeprefix("s" if self._endpoint is not None else "")
        if kind not in ("subscribe", "message", "unsubscribe"):
            return
        named = message["channel"]
        channel = named.decode(errors="replace") if isinstance(named, bytes) else ""
        if channel not in self.topics:  # as of CLIENT TRACKING, by which any client may send others a list of keys
            return
        if kind == "unsubscribe":
            if self._endpoint is not None:  # the server did it: the slot has moved
                self._client.forget_endpoints()
                self._redirect(channel)
            return
        self.live(anew=False)
        self._hinted_at[channel] = self._heard_at
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

    async def _subscribe_all(self, pubsub: PubSub) -> None:
        """Subscribe to the channels of all, also of those that begin to listen meanwhile."""
        subscribed: set[str] = set()
        while new := [channel for channel in self.topics if channel not in subscribed]:
            await self._execute(pubsub, "SUBSCRIBE", *new)
            subscribed.update(new)

    async def _execute(self, pubsub: PubSub, verb: str, *channels: str) -> None:
        if self._endpoint is None:
            await (pubsub.subscribe if verb == "SUBSCRIBE" else pubsub.unsubscribe)(*channels)
            return
        for channel in channels:  # one slot per command; older versions of redis-py have no method for it
            await pubsub.execute_command(f"S{verb}", channel)

    async def _send(self, pubsub: PubSub, verb: str, *channels: str) -> None:
        if self._pubsub is not pubsub:  # it was closed meanwhile, and would take a new connection
            return
        # If this fails, the connection is broken, and all channels are subscribed again.
        with suppress(*_BROKEN):
            async with asyncio.timeout(self._client.options.timeout):
                await self._execute(pubsub, verb, *channels)


def quiet_of(data: object) -> int | None:
    """Return the milliseconds for which a hint suppresses further ones, by its content; None if it suppresses none."""
    quiet = read_or(digits, data, None)
    return None if quiet is None else min(quiet, QUIET_MAX)
