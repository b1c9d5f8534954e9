"""Hints by watches: one stream for all elections under the prefix, resumed where it broke off.

Nothing changes in etcd when a lease is renewed, so that stream is silent unless a candidate comes or goes. Without a
prefix, it would carry every change in etcd: then each name has a watch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from weakref import WeakSet

from tenure._backends.etcd import requests
from tenure._backends.etcd.client import Client
from tenure._backends.etcd.requests import Change, Json, Keys, number
from tenure._foreign import Unreadable, a_list, an_object, read_or
from tenure._runtime.backoff import Backoff
from tenure._runtime.notifier import Listener, Notifier
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

UNUSED_AFTER = 30.0
"""Seconds between two looks whether a watch still has listeners."""


class Hints:
    """The hints of one opened backend.

    Args:
        client: Sends the requests.
        keys: The keys of the elections.
        concerns: Whether a change concerns one of so many listeners for its name.
    """

    def __init__(self, client: Client, keys: Keys, concerns: Callable[[Change, int], bool]) -> None:
        self._client = client
        self._keys = keys
        self._concerns = concerns
        self._notifier = Notifier()
        self._subscriptions: dict[str, WeakSet[Subscription]] = {}
        self._watches: dict[bytes, Watch] = {}
        self._deleted: dict[str, int] = {}
        """For names with listeners, the revision of the newest deletion that was seen."""
        self._tasks = Tasks()

    def listen(self, name: str) -> AsyncIterator[None]:
        """Return an iterator that yields when something changed for *name*."""
        subscription = Subscription(self, name, self._notifier.listen(name))
        self._subscriptions.setdefault(name, WeakSet()).add(subscription)
        return subscription

    def notify_if_deleted_since(self, name: str, revision: int) -> None:
        """Notify the listeners for *name* if a key was deleted after *revision*: that may have been the awaited one."""
        if self._deleted.get(name, 0) > revision:
            self._notifier.notify(name)

    def begin(self, name: str) -> None:
        """Watch the keys of *name*, if that isn't done yet."""
        for beginning in self._keys.ranges(name):
            if beginning not in self._watches:
                self._watches[beginning] = Watch(self, beginning)
                self._tasks.spawn(self._follow(self._watches[beginning]))

    async def _follow(self, watch: Watch) -> None:
        backoff = Backoff()
        try:
            while self._is_used(watch):
                watch.is_live = False
                try:
                    async with asyncio.timeout(UNUSED_AFTER) as limit:
                        body = requests.watch(watch.beginning, watch.next_revision)
                        async with aclosing(self._client.stream("watch", body)) as messages:
                            async for message in messages:
                                watch.read(message)
                                if not watch.is_live:
                                    break
                                backoff.reset()
                                limit.reschedule(asyncio.get_running_loop().time() + UNUSED_AFTER)
                except TimeoutError:
                    # Nothing has changed for a while: see whether it is used, and the link still works.
                    watch.note_silence()
                    continue
                except TenureError:
                    pass
                await backoff.rest()
        finally:
            del self._watches[watch.beginning]

    def _is_used(self, watch: Watch) -> bool:
        for name in [name for name, listeners in self._subscriptions.items() if not listeners]:
            del self._subscriptions[name]
            self._deleted.pop(name, None)
        return any(watch.beginning in self._keys.ranges(name) for name in self._subscriptions)

    def notify_all(self, beginning: bytes) -> None:
        """Notify every listener of a watch."""
        for name in list(self._subscriptions):
            if beginning in self._keys.ranges(name):
                self._notifier.notify(name)

    def forget_deletions_after(self, revision: int, beginning: bytes) -> None:
        """Forget what a watch has seen that is newer than etcd: its revisions have fallen."""
        for name, deleted_at in list(self._deleted.items()):
            if deleted_at > revision and beginning in self._keys.ranges(name):
                del self._deleted[name]

    def changed(self, event: object) -> None:
        """Notify the listeners that *event* concerns."""
        change = read_or(self._keys.change, event, None)
        if change is None:
            return
        listeners = len(self._subscriptions.get(change.name, ()))
        if not listeners:
            return
        if change.is_delete:
            self._deleted[change.name] = max(change.revision, self._deleted.get(change.name, 0))
        if self._concerns(change, listeners):
            self._notifier.notify(change.name)

    async def close(self) -> None:
        """End every iterator and every watch."""
        self._notifier.close()
        await self._tasks.cancel_all()


class Watch:
    """The state of one watch: what it has seen, and from where it goes on."""

    def __init__(self, hints: Hints, beginning: bytes) -> None:
        self._hints = hints
        self.beginning = beginning
        self.next_revision: int | None = None
        """The first revision that it has not seen; None at first, and when etcd has forgotten that revision."""
        self.is_live = False
        """Whether its stream will report what happens from now on."""
        self._began_at = 0
        """The revision of etcd when the stream began."""

    def note_silence(self) -> None:
        """Note that there was no change, so that the next stream does not begin at a revision that was compacted.

        If the link was silent instead, what came just before this stream is not reported any more: hints may be lost.
        """
        if self.next_revision is not None:
            self.next_revision = max(self.next_revision, self._began_at + 1)

    def read(self, message: Json) -> None:
        """Read a message of the stream, and notify those whom it concerns.

        Raises:
            Unavailable: It can't be from etcd.
        """
        try:
            self._read(message)
        except Unreadable as error:
            raise requests.no_answer(error) from error

    def _read(self, message: Json) -> None:
        revision = number(an_object(message.get("header", {})), "revision")
        if message.get("canceled"):
            # The revision from which it was to go on was compacted. The stream stays open, and silent.
            self.next_revision, self.is_live = None, False
        elif message.get("created"):
            self._begun(revision)
        elif events := a_list(message.get("events", [])):
            for event in events:
                self._hints.changed(event)
            self.next_revision = number(an_object(an_object(events[-1]).get("kv")), "mod_revision") + 1
        elif revision:  # a notification of progress
            self.next_revision = revision + 1

    def _begun(self, revision: int) -> None:
        self._began_at = revision
        # After a restore from a snapshot, revisions begin again at an earlier one. A stream that was to begin later
        # would report nothing before.
        self.is_live = self.next_revision is None or self.next_revision <= revision + 1
        self._hints.forget_deletions_after(revision, self.beginning)
        if self.next_revision is None or not self.is_live:
            self.next_revision = revision + 1
            self._hints.notify_all(self.beginning)


class Subscription(AsyncIterator[None]):
    """Yields for each notification; it watches from when it is first awaited."""

    def __init__(self, hints: Hints, name: str, listener: Listener) -> None:
        self._hints = hints
        self._listener = listener
        self.name = name

    async def __anext__(self) -> None:
        if not self._listener.closed:
            self._hints.begin(self.name)
        await anext(self._listener)

    async def aclose(self) -> None:
        await self._listener.aclose()
