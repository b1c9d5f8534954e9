"""Hints by watches: one for each name that somebody waits for, continued where it broke off.

A watch of one Lease needs only the right to watch *that* Lease, and brings no events of others. It also shows each
renewal in the moment in which it happens, so that the time of an expiry is known without polling.

If this user may not watch, or has more names than may be watched, listeners are notified periodically.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from tenure._backends.kubernetes.client import Client, Request
from tenure._backends.kubernetes.observations import Observations
from tenure._backends.kubernetes.records import about, has_version, is_lease
from tenure._runtime.backoff import Backoff
from tenure._runtime.closing import close_together
from tenure._runtime.notifier import Listener, Notifier
from tenure._runtime.on_loop import on_loop
from tenure._runtime.tasks import Tasks
from tenure.errors import ConfigError, Unavailable

LASTS = (30.0, 60.0)
"""Seconds after which the server ends a watch, and it is continued: at random, so that not all do it at once."""
POLL = 2.0
"""Seconds between two notifications of a listener whose name is not watched."""

_CHANGES = ("ADDED", "MODIFIED", "DELETED")


class Watches:
    """The watches of one opened backend, by event loop and name."""

    def __init__(self, client: Client, observations: Observations) -> None:
        self._client = client
        self._observed = observations
        self._notifier = Notifier()
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Watch]] = WeakKeyDictionary()

    def listen(self, name: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something has changed for *name*."""
        return Subscription(self, name, self._notifier.listen(name))

    def watch(self, subscription: Subscription) -> None:
        """See to it that the name of *subscription* is watched on this loop."""
        watches = self._watches.setdefault(asyncio.get_running_loop(), {})
        watch = watches.get(subscription.name)
        if watch is None or watch.has_ended:
            for name in [name for name, old in watches.items() if old.has_ended]:
                del watches[name]
            may_watch = len(watches) < self._client.options.watches
            watch = watches[subscription.name] = Watch(
                self._client, self._observed, self._notifier, subscription.name, may_watch=may_watch
            )
        watch.add(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Watch for *subscription* no more."""
        for watches in list(self._watches.values()):
            if (watch := watches.get(subscription.name)) is not None:
                watch.discard(subscription)

    @property
    def is_refused(self) -> bool:
        """Whether this user may not watch."""
        return any(watch.is_refused for watches in list(self._watches.values()) for watch in list(watches.values()))

    async def close(self) -> None:
        """End all watches; every iterator ends."""
        self._notifier.close()
        await close_together(
            *(
                partial(on_loop, loop, watch.close)
                for loop, watches in list(self._watches.items())
                for watch in list(watches.values())
            )
        )
        self._watches.clear()


class Subscription(AsyncIterator[None]):
    """Yields for each notification; the watch begins when it is first awaited."""

    def __init__(self, watches: Watches, name: str, listener: Listener) -> None:
        self._watches = watches
        self._listener = listener
        self.name = name

    async def __anext__(self) -> None:
        if not self._listener.closed:
            self._watches.watch(self)
        try:
            await anext(self._listener)
        except BaseException:  # the wait was cancelled, or the iterator has ended; the next wait watches again
            self._watches.leave(self)
            raise

    async def aclose(self) -> None:
        self._watches.leave(self)
        await self._listener.aclose()


class Watch:
    """The watch of one name on one loop; it ends when nobody listens any more."""

    def __init__(
        self, client: Client, observations: Observations, notifier: Notifier, name: str, *, may_watch: bool
    ) -> None:
        self._client = client
        self._observed = observations
        self._notifier = notifier
        self._name = name
        self._may_watch = may_watch
        self._version: str | None = None
        """After which ``resourceVersion`` it continues; None: it begins with what is there."""
        self._about: tuple[object, ...] | None = None  # of which listeners were notified; None: there is no Lease
        self._backoff = Backoff()
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._tasks = Tasks()
        self._running: asyncio.Task[None] | None = None
        self.is_refused = False
        """Whether the server refused this user's last attempt."""

    def add(self, subscription: Subscription) -> None:
        """Watch for *subscription*, too."""
        self._subscriptions.add(subscription)
        if self._running is None:
            self._running = self._tasks.spawn(self._run())

    def discard(self, subscription: Subscription) -> None:
        """Watch for *subscription* no more; what was begun ends with the next event, or its time."""
        self._subscriptions.discard(subscription)

    @property
    def has_ended(self) -> bool:
        """Whether its task has ended."""
        return self._running is not None and self._running.done()

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.cancel_all()

    async def _run(self) -> None:
        while self._subscriptions:
            if not self._may_watch:
                self._notifier.notify(self._name)
                await asyncio.sleep(POLL * random.uniform(0.5, 1.0))
                continue
            try:
                await self._follow()
            except ConfigError:  # this user may not watch
                self._refused()
            except Unavailable:
                self._version = None  # begin with what is there: the server may have forgotten the version
            await self._backoff.rest(POLL if self.is_refused else math.inf)

    def _refused(self) -> None:
        self.is_refused = True
        self._version = None
        self._notifier.notify(self._name)

    async def _follow(self) -> None:
        """Handle the events of one watch until it ends."""
        lasts = random.uniform(*LASTS)
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={self._name}",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(lasts)),
        }
        if self._version is not None:
            query["resourceVersion"] = self._version
        is_new = self._version is None
        async with self._client.stream(
            Request("watch", self._name), self._client.leases_path, query, lasts=lasts
        ) as events:
            self.is_refused = False
            if is_new:  # anything may have changed before
                self._notifier.notify(self._name)
            now = asyncio.get_running_loop().time
            began = now()
            try:
                async for event in events:
                    if not self._handle(str(event.get("type")), event.get("object")):
                        return
            finally:
                self._backoff.reset_after(now() - began)

    def _handle(self, kind: str, lease: Any) -> bool:
        """Handle an event; return whether the watch goes on."""
        is_known = has_version(lease) if kind == "BOOKMARK" else kind in _CHANGES and is_lease(lease, self._name)
        if not is_known:  # ERROR: usually 410, the version is too old
            self._version = None
            return False
        self._version = lease["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            if kind == "DELETED":
                self._observed.note_missing(self._name)
            else:
                self._observed.note(self._name, lease)
            seen = about(lease) if kind != "DELETED" else None
            if seen != self._about:  # and not what this process has read itself meanwhile: each listener is to know
                self._about = seen
                self._notifier.notify(self._name)
        return bool(self._subscriptions)
