"""Hints by watches: one stream for all elections under the prefix, resumed where it broke off.

Nothing changes in etcd when a lease is renewed, so that stream is silent unless a candidate comes or goes. Without a
prefix, it would carry every change in etcd: then each name has a watch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing

from tenure._backends.etcd import requests
from tenure._backends.etcd.client import Client
from tenure._backends.etcd.requests import Change, Json, Keys, number
from tenure._foreign import Unreadable, a_list, an_object, read_or
from tenure._runtime.shared_hints import SharedHints, Source

SILENT_AFTER = 30.0
"""Seconds without a change after which a stream begins anew: its link may be broken."""


class Hints(SharedHints[bytes, "Watch"]):
    """The hints of one opened backend: its watches, by the beginning of their keys.

    Args:
        client: Sends the requests.
        keys: The keys of the elections.
        concerns: Whether a change concerns one of so many listeners for its name.
    """

    def __init__(self, client: Client, keys: Keys, concerns: Callable[[Change, int], bool]) -> None:
        super().__init__()
        self.client = client
        self._keys = keys
        self._concerns = concerns
        self._deleted: dict[str, int] = {}
        """For names with listeners, the revision of the newest deletion that was seen."""

    async def keys_of(self, topic: str) -> tuple[bytes, ...]:
        """Return the beginnings of the keys of a name."""
        return self._keys.ranges(topic)

    def source(self, key: bytes) -> Watch:
        """Make the watch of the keys that begin with *key*."""
        return Watch(self, key)

    def notify_if_deleted_since(self, name: str, revision: int) -> None:
        """Notify the listeners for *name* if a key was deleted after *revision*: that may have been the awaited one."""
        if self._deleted.get(name, 0) > revision:
            self.notifier.notify(name)

    def forget_deletions(self, topics: Collection[str], after: int = 0) -> None:
        """Forget deletions that nobody waits for, or that are newer than etcd: its revisions have fallen."""
        for name in topics:
            if self._deleted.get(name, 0) > after:
                del self._deleted[name]

    def changed(self, event: object) -> None:
        """Notify the listeners that *event* concerns."""
        change = read_or(self._keys.change, event, None)
        if change is None:
            return
        listeners = self.notifier.count(change.name)
        if not listeners:
            return
        if change.is_delete:
            self._deleted[change.name] = max(change.revision, self._deleted.get(change.name, 0))
        if self._concerns(change, listeners):
            self.notifier.notify(change.name)


class Watch(Source):
    """One watch: what it has seen, and from where it goes on."""

    def __init__(self, hints: Hints, beginning: bytes) -> None:
        super().__init__(hints)
        self._hints = hints
        self._beginning = beginning
        self.next_revision: int | None = None
        """The first revision that it has not seen; None at first, and when etcd has forgotten that revision."""
        self._began_at = 0
        """The revision of etcd when the stream began."""

    def left(self, topics: Collection[str]) -> None:
        """Forget what nobody waits for any more."""
        super().left(topics)
        self._hints.forget_deletions(topics)

    async def follow(self) -> None:
        """Read one stream after the other; each goes on where the last one was silent."""
        while True:
            try:
                await self._read_stream()
                return
            except TimeoutError:
                self.note_silence()

    async def _read_stream(self) -> None:
        async with asyncio.timeout(SILENT_AFTER) as limit:
            body = requests.watch(self._beginning, self.next_revision)
            async with aclosing(self._hints.client.stream("watch", body)) as messages:
                async for message in messages:
                    if not self.read(message):
                        return
                    limit.reschedule(asyncio.get_running_loop().time() + SILENT_AFTER)

    def note_silence(self) -> None:
        """Note that there was no change, so that the next stream does not begin at a revision that was compacted.

        If the link was silent instead, what came just before this stream is not reported any more: hints may be lost.
        """
        if self.next_revision is not None:
            self.next_revision = max(self.next_revision, self._began_at + 1)

    def read(self, message: Json) -> bool:
        """Read a message of the stream, and notify those whom it concerns; return whether the stream goes on.

        Raises:
            Unavailable: It can't be from etcd.
        """
        try:
            return self._read(message)
        except Unreadable as error:
            raise requests.no_answer(error) from error

    def _read(self, message: Json) -> bool:
        revision = number(an_object(message.get("header", {})), "revision")
        if message.get("canceled"):
            # The revision from which it was to go on was compacted. The stream stays open, and silent.
            self.next_revision = None
            return False
        if message.get("created"):
            return self._begun(revision)
        if events := a_list(message.get("events", [])):
            for event in events:
                self._hints.changed(event)
            self.next_revision = number(an_object(an_object(events[-1]).get("kv")), "mod_revision") + 1
        elif revision:  # a notification of progress
            self.next_revision = revision + 1
        return True

    def _begun(self, revision: int) -> bool:
        self._began_at = revision
        # After a restore from a snapshot, revisions begin again at an earlier one. A stream that was to begin later
        # would report nothing before.
        is_new = self.next_revision is None
        has_fallen = self.next_revision is not None and self.next_revision > revision + 1
        self._hints.forget_deletions(self.topics, after=revision)
        if is_new or has_fallen:
            self.next_revision = revision + 1
        if has_fallen:
            self.notify()
            return False
        self.live(anew=is_new)
        return True
