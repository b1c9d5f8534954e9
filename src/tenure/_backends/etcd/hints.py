"""Hints by watches: all those of an event loop are on one stream, each resumed where it broke off.

One watch has all keys under the prefix. Nothing changes in etcd when a lease is renewed, so it is silent unless a
candidate comes or goes. Without a prefix, it would carry every change in etcd; and a user may have rights on the keys
of some names only. Then each name has watches of its own, on the same stream: that is one connection, however many
there are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, count

from tenure._backends.etcd import requests
from tenure._backends.etcd.client import Client, Upload
from tenure._backends.etcd.requests import Change, Json, KeyRange, Keys, number
from tenure._foreign import Unreadable, a_list, an_object, read_or
from tenure._runtime.shared_hints import SharedHints, Source

CHECKED_EVERY = 30.0
"""Seconds after which a stream is asked for a sign of life: its link may be broken."""


class Hints(SharedHints[None, "Stream"]):
    """The hints of one opened backend: a stream for each event loop.

    Args:
        client: Sends the requests.
        keys: The keys of the elections.
        concerns: Whether a change concerns one of so many listeners for its name.
    """

    def __init__(self, client: Client, keys: Keys, concerns: Callable[[Change, int], bool]) -> None:
        super().__init__()
        self.client = client
        self.keys = keys
        self._concerns = concerns
        self._deleted: dict[str, int] = {}
        """For names with listeners, the revision of the newest deletion that was seen."""

    async def keys_of(self, topic: str) -> tuple[None]:
        """Return the key of the one stream."""
        return (None,)

    def source(self, key: None) -> Stream:
        """Make the stream."""
        return Stream(self)

    def notify_if_deleted_since(self, name: str, revision: int) -> None:
        """Notify the listeners for *name* if a key was deleted after *revision*: that may have been the awaited one."""
        if self._deleted.get(name, 0) > revision:
            self.notifier.notify(name)

    def forget_deletions(self, topics: Collection[str], after: int = 0) -> None:
        """Forget deletions that nobody waits for, or that are newer than etcd: its revisions have fallen."""
        for name in topics:
            if self._deleted.get(name, after) > after:
                del self._deleted[name]

    def changed(self, event: object) -> None:
        """Notify the listeners that *event* concerns."""
        change = read_or(self.keys.change, event, None)
        if change is None:
            return
        listeners = self.notifier.count(change.name)
        if not listeners:
            return
        if change.is_delete:
            self._deleted[change.name] = max(change.revision, self._deleted.get(change.name, 0))
        if self._concerns(change, listeners):
            self.notifier.notify(change.name)


@dataclass(eq=False, slots=True)
class Watch:
    """The watch of some keys: what it has seen, and from where it goes on."""

    keys: KeyRange
    topic: str | None
    """The name whose keys these are; None: all names."""
    next_revision: int | None = None
    """The first revision that it has not seen; None at first, and when etcd has forgotten that revision."""
    number: int = 0
    """Its number on the present stream; 0: it was refused there."""


class Stream(Source):
    """The stream of one event loop, and the watches on it.

    If this user may not watch all keys under the prefix, each name is watched by itself. Names whose keys it may not
    read are asked for again now and then; if there are no others, nothing can come from here.
    """

    def __init__(self, hints: Hints) -> None:
        super().__init__(hints)
        self._hints = hints
        self._whole: Watch | None = Watch(hints.keys.whole, None) if hints.keys.prefix else None
        self._of_names: dict[str, tuple[Watch, ...]] = {}
        self._numbers = count(1)
        self._upload: Upload | None = None
        self._by_number: dict[int, Watch] = {}
        """The watches that etcd has, or was asked for, on the present stream."""
        self._asked: deque[Watch] = deque()
        """Those that it has not answered yet; it does so in their order."""
        self._new_names: set[str] = set()
        """Names with a watch that reports nothing of what happened before; they have not got a hint for that yet."""
        self._seen_until = 0
        """The revision of etcd at the beginning of the stream, or at its last sign of life."""
        self._answer_due: asyncio.Timeout | None = None
        self._checking: asyncio.TimerHandle | None = None

    @property
    def watches(self) -> Sequence[Watch]:
        """All watches, on the present stream or not."""
        return [*([self._whole] if self._whole is not None else ()), *chain.from_iterable(self._of_names.values())]

    # --- who listens ---

    def joined(self, topic: str) -> None:
        """Watch the keys of *topic*, too: the answer is its first hint."""
        if self._whole is not None:
            super().joined(topic)
        elif not self.is_deaf:
            self._watch_names([topic])

    def left(self, topics: Collection[str]) -> None:
        """Watch no more what nobody waits for, and forget it."""
        super().left(topics)
        self._hints.forget_deletions(topics)
        self._new_names.difference_update(topics)
        for watch in chain.from_iterable(self._of_names.pop(topic, ()) for topic in topics):
            if self._by_number.pop(watch.number, None) is not None:
                self._send(requests.no_watch(watch.number))

    # --- one stream ---

    async def follow(self) -> None:
        """Read one stream, on which each watch goes on where it was."""
        self._upload = upload = Upload()
        self._by_number.clear()
        self._asked.clear()
        self._seen_until = 0
        try:
            async with asyncio.timeout(None) as self._answer_due:
                self._begin()
                self._check_later()
                async with aclosing(self._hints.client.stream("watch", upload)) as messages:
                    async for message in messages:
                        if not self.read(message):
                            return
                        self._answer_due.reschedule(self._hints.client.until() if self._asked else None)
        finally:
            self._upload = self._answer_due = None
            if self._checking is not None:
                self._checking.cancel()

    def _begin(self) -> None:
        if self._whole is not None:
            self._ask(self._whole)
        elif self.is_deaf:  # one name: if that is permitted, the others follow
            self._watch_names([next(iter(self.topics))])
        else:
            self._watch_names(self.topics)

    def _watch_names(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if topic not in self._of_names:
                self._of_names[topic] = tuple(Watch(keys, topic) for keys in self._hints.keys.watched(topic))
            for watch in self._of_names[topic]:
                if self._by_number.get(watch.number) is not watch:
                    self._ask(watch)

    def _ask(self, watch: Watch) -> None:
        if self._upload is None:  # it will be asked for on the next stream
            return
        watch.number = next(self._numbers)
        self._by_number[watch.number] = watch
        self._asked.append(watch)
        self._send(requests.watch(watch.keys, watch.number, watch.next_revision))

    def _send(self, request: Json) -> None:
        if self._upload is None or self._answer_due is None:
            return
        self._upload.send(request)
        if self._answer_due.when() is None:  # else the stream ends if the answer to an earlier one is late
            self._answer_due.reschedule(self._hints.client.until())

    def _check_later(self) -> None:
        self._checking = asyncio.get_running_loop().call_later(CHECKED_EVERY, self._check)

    def _check(self) -> None:
        """Ask for a sign of life; and again for the watches that were refused."""
        if self._whole is None:
            self._watch_names(self._of_names)
        self._send(requests.PROGRESS)
        self._check_later()

    # --- its messages ---

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
        if message.get("created"):
            if not self._asked:
                raise Unreadable("it answers a watch that was not asked for")
            watch = self._asked.popleft()
            return self._refused(watch) if message.get("canceled") else self._begun(watch, revision)
        found = self._by_number.get(number(message, "watch_id"))
        if message.get("canceled"):  # the revision from which it was to go on was compacted
            if found is not None:
                del self._by_number[found.number]
                found.next_revision = None
                self._ask(found)
        elif events := a_list(message.get("events", [])):
            for event in events:
                self._hints.changed(event)
            last = number(an_object(an_object(events[-1]).get("kv")), "mod_revision")
            if found is not None:
                found.next_revision = last + 1
        elif found is not None:  # a notification of progress
            found.next_revision = revision + 1
        else:
            self._alive(revision)
        return True

    def _begun(self, watch: Watch, revision: int) -> bool:
        if self._by_number.get(watch.number) is not watch:  # nobody waits for it any more
            return True
        topics = list(self.topics) if watch.topic is None else [watch.topic]
        self._hints.forget_deletions(topics, after=revision)
        self._seen_until = self._seen_until or revision
        if watch.next_revision is not None and watch.next_revision > revision + 1:
            self._fallen(revision)
            return False
        if watch.next_revision is None:
            watch.next_revision = revision + 1
            self._new_names.update(topics)
        was_deaf = self.is_deaf
        self.live(anew=False)
        if was_deaf:
            self._watch_names(self.topics)
        if watch.topic is None or not self._asked or self._asked[0].topic != watch.topic:  # all of that name have begun
            for topic in self._new_names.intersection(topics):
                self._new_names.discard(topic)
                self._notifier.notify(topic)
        return True

    def _fallen(self, revision: int) -> None:
        """Begin again: after a restore from a snapshot, revisions are earlier, and a later watch would be silent."""
        for watch in self.watches:
            if watch.next_revision is not None:
                watch.next_revision = min(watch.next_revision, revision + 1)
        self.notify()

    def _refused(self, watch: Watch) -> bool:
        """Note that this user may not watch these keys; return whether others are watched."""
        self._by_number.pop(watch.number, None)
        watch.number = 0
        if watch.topic is None:
            self._whole = None
            self._watch_names(self.topics)
        elif watch.topic in self.topics:  # another one is tried first when it begins again
            self.topics[watch.topic] = self.topics.pop(watch.topic)
            self._notifier.notify(watch.topic)
        if self._by_number:
            return True
        self.deaf()
        return False

    def _alive(self, revision: int) -> None:
        """Go on later next time: not at a revision that may be compacted by then.

        The *revision* of this sign of life may be ahead of events that are under way; that of the sign before is not.
        """
        for watch in self._by_number.values():
            if watch.next_revision is not None:
                watch.next_revision = max(watch.next_revision, self._seen_until + 1)
        self._seen_until = revision
