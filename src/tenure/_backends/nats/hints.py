"""Hints: the bucket reports each message that it has stored, on a subject of core NATS that has no stream.

There is one subscription for each name that somebody waits for, and no consumer in JetStream. Nobody subscribes to the
keys themselves: those are also the messages that the bucket refuses; and a subscriber would keep the server from
saying that there is no bucket.

Any program that may publish there can forge a report: it is a reason to ask the store, and says nothing by itself.

No report is kept for a subscriber that is away: a new subscription begins with a hint. If the bucket reports nothing,
because somebody else has made it, or this user may not subscribe, listeners are notified periodically.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import nats.errors

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.lease_records import read
from tenure._backends.nats.observations import Observations
from tenure._runtime.backoff import Backoff
from tenure._runtime.notifier import Listener, Notifier
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription as Subscribed

T = TypeVar("T")

PAUSE_MAX = 2.0
"""Seconds at most between two attempts to subscribe."""
UNUSED_AFTER = 30.0
"""Seconds between two looks whether anybody listens."""


class Hints:
    """The subscriptions of one opened backend, by event loop and name.

    Args:
        client: Has the connections.
        observations: Note the writes that pass.
        subject_of: The subject on which the bucket reports an election.
        reports: Whether the bucket reports anything.
    """

    def __init__(
        self,
        client: Client,
        observations: Observations,
        subject_of: Callable[[str], str],
        reports: Callable[[Connection], Awaitable[bool]],
    ) -> None:
        self._client = client
        self._observed = observations
        self._subject_of = subject_of
        self._reports = reports
        self._notifier = Notifier()
        self._followed: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Following]] = WeakKeyDictionary()

    def listen(self, name: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something may have changed for *name*."""
        return Subscription(self, name, self._notifier.listen(name))

    def follow(self, subscription: Subscription) -> None:
        """See to it that the name of *subscription* is followed on this loop."""
        followed = self._followed.setdefault(asyncio.get_running_loop(), {})
        following = followed.get(subscription.name)
        if following is None or following.has_ended:
            for name in [name for name, old in followed.items() if old.has_ended]:
                del followed[name]
            following = followed[subscription.name] = Following(self, subscription.name)
        following.add(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Follow its name for *subscription* no more."""
        for followed in list(self._followed.values()):
            if (following := followed.get(subscription.name)) is not None:
                following.discard(subscription)

    @property
    def are_absent(self) -> bool:
        """Whether the bucket reports nothing, or this user may not subscribe."""
        return any(one.is_deaf for followed in list(self._followed.values()) for one in list(followed.values()))

    async def subscribe(self, name: str, connection: Connection) -> tuple[Subscribed, bool]:
        """Subscribe to the reports of *name*; return whether there are any, too."""
        subject = self._subject_of(name)
        subscribed = await connection.subscribe(subject, partial(self._reported, name))
        await connection.flush()  # from now on, no change is missed
        return subscribed, connection.may_subscribe(subject) and await self._reports(connection)

    async def run(self, ask: Callable[[Connection], Awaitable[T]]) -> T:
        """Return the result of *ask*, within a time limit."""
        return await self._client.run(ask)

    def notify(self, name: str) -> None:
        """Give the listeners of *name* a hint."""
        self._notifier.notify(name)

    def _reported(self, name: str, message: Msg) -> None:
        """Note a message that the bucket may have stored; a mere renewal gives no hint."""
        record = read(message.data)
        if record is not None and record.name == name:
            self._observed.note_report(record)
            if record.write == "renewed":
                return
        self._notifier.notify(name)

    async def close(self) -> None:
        """End all subscriptions of this loop, and every iterator."""
        self._notifier.close()
        for following in list(self._followed.pop(asyncio.get_running_loop(), {}).values()):
            await following.close()
        for loop, followed in list(self._followed.items()):
            for following in list(followed.values()):
                with suppress(RuntimeError):  # that loop is closed, and its tasks with it
                    loop.call_soon_threadsafe(following.end)
        self._followed.clear()


class Subscription(AsyncIterator[None]):
    """Yields for each notification; the name is followed from when it is first awaited."""

    def __init__(self, hints: Hints, name: str, listener: Listener) -> None:
        self._hints = hints
        self._listener = listener
        self.name = name

    async def __anext__(self) -> None:
        if not self._listener.closed:
            self._hints.follow(self)
        try:
            await anext(self._listener)
        except BaseException:  # the wait was cancelled, or the iterator has ended; the next wait follows it again
            self._hints.leave(self)
            raise

    async def aclose(self) -> None:
        self._hints.leave(self)
        await self._listener.aclose()


class Following:
    """The subscription to one name on one loop; it ends when nobody listens any more."""

    def __init__(self, hints: Hints, name: str) -> None:
        self._hints = hints
        self._name = name
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._changed = asyncio.Event()
        """Set when the connection is lost, or a listener has left."""
        self._backoff = Backoff(longest=PAUSE_MAX)
        self._tasks = Tasks()
        self._running: asyncio.Task[None] | None = None
        self.is_deaf = False
        """Whether it gets no reports."""

    def add(self, subscription: Subscription) -> None:
        """Follow it for *subscription*, too."""
        self._subscriptions.add(subscription)
        if self._running is None:
            self._running = self._tasks.spawn(self._run())

    def discard(self, subscription: Subscription) -> None:
        """Follow it for *subscription* no more."""
        self._subscriptions.discard(subscription)
        self._changed.set()

    @property
    def has_ended(self) -> bool:
        """Whether its task has ended."""
        return self._running is not None and self._running.done()

    def end(self) -> None:
        """Follow it no more; called on its loop."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Follow it no more, and wait for that."""
        await self._tasks.cancel_all()

    async def _run(self) -> None:
        while self._subscriptions:
            with suppress(TenureError):
                await self._follow()
            if self._subscriptions:
                await self._backoff.rest()

    async def _follow(self) -> None:
        """Subscribe, and return when the connection is lost, or nobody listens."""
        connection, subscribed = await self._hints.run(self._subscribe)
        withdraw = connection.when_lost(self._changed.set)
        try:
            self._hints.notify(self._name)  # anything may have changed before
            if self.is_deaf:
                return  # and notify again after the pause
            self._backoff.reset()
            while self._subscriptions and not connection.is_lost:
                self._changed.clear()
                with suppress(TimeoutError):  # listeners that were dropped, and not closed, tell nobody
                    await asyncio.wait_for(self._changed.wait(), UNUSED_AFTER)
        finally:
            withdraw()
            with suppress(nats.errors.Error, OSError):
                await subscribed.unsubscribe()

    async def _subscribe(self, connection: Connection) -> tuple[Connection, Subscribed]:
        self._changed.clear()
        subscribed, is_heard = await self._hints.subscribe(self._name, connection)
        self.is_deaf = not is_heard
        return connection, subscribed
