"""Hints that a store sends, shared by all listeners of a topic: each source of hints is followed once on an event loop.

A source is what brings the hints of one topic, or of many: a subscription, a watch, a connection that listens. It is
followed from when a listener first waits until nobody has listened for a while, and followed again if it ends, for
whatever reason, after pauses that grow.

What happened before is not reported: a source that begins gives its listeners a hint. While nothing can come from it,
as it may not subscribe, or could not for some seconds, its listeners are told once that hints are absent, and ask the
store in their own time; they get a hint when it has been followed for a moment. So no source notifies them from time to
time: that would move leaders, too.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar, cast
from weakref import WeakSet

from tenure._election.store import Hint
from tenure._runtime.backoff import STEADY, Backoff
from tenure._runtime.closing import close_together
from tenure._runtime.notifier import Listener, Notifier
from tenure._runtime.on_loop import LOOP_WAIT, on_loop
from tenure._runtime.tasks import Tasks

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound="Source")

UNUSED_AFTER = 30.0
"""Seconds between two looks whether anybody listens: a source may be followed so much longer than it is used."""
DEAF = 2.0, 300.0
"""Seconds of the first pause and of the longest before a deaf source is followed again: of hundreds, each attempt may
be a request in vain."""
SILENT_AFTER = 5.0
"""Seconds for which a source may fail to be followed before its listeners are told: not each restart of a server is to
let all of them ask."""


class SharedHints(ABC, Generic[K, S]):
    """The hints of one opened backend, from any thread: its sources, by event loop and key."""

    def __init__(self) -> None:
        self.notifier = Notifier()
        self.tasks = Tasks()
        self._loops: dict[asyncio.AbstractEventLoop, dict[K, S]] = {}

    async def keys_of(self, topic: str) -> Collection[K]:
        """Return the keys of the sources that bring hints of *topic*: the topic itself, if a store doesn't say more."""
        return (cast(K, topic),)

    @abstractmethod
    def source(self, key: K) -> S:
        """Make a source for the running loop."""

    def listen(self, topic: str) -> AsyncIterator[Hint]:
        """Return an iterator that yields when something may have changed for *topic*, or its hints are absent."""
        return Subscription(self, topic, self.notifier.listen(topic))

    def sources(self) -> Iterator[S]:
        """Yield the sources of all loops."""
        for here in list(self._loops.values()):
            yield from list(here.values())

    def here(self) -> dict[K, S]:
        """Return the sources of the running loop, by key."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            for old in [one for one in list(self._loops) if one.is_closed()]:
                del self._loops[old]
            self._loops[loop] = {}
        return self._loops[loop]

    async def join(self, subscription: Subscription) -> None:
        """See to it that the sources for *subscription* are followed on this loop."""
        keys = await self.keys_of(subscription.topic)
        if subscription.has_ended:
            return
        here, sources = self.here(), list[Source]()
        for key in keys:
            source = here.get(key)
            if source is None:
                source = self.source(key)
                here[key] = source
                source.begin(partial(_forget, here, key, source))
            sources.append(source)
        subscription.take(sources)

    async def close(self, within: float = LOOP_WAIT) -> None:
        """End every iterator and every source, and wait for that up to *within* seconds."""
        self.notifier.close()
        end = partial(self._end_here, within)
        await close_together(*(partial(on_loop, loop, end, within=within) for loop in self.tasks.loops()))
        self._loops.clear()

    async def _end_here(self, within: float) -> None:
        for source in list(self.here().values()):
            source.end()
        if tasks := self.tasks.here():
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=within)


def _forget(sources: dict[K, S], key: K, source: S) -> None:
    if sources.get(key) is source:  # and not one that has begun while it ended
        del sources[key]


class Subscription(AsyncIterator[Hint]):
    """Yields for each notification; its topic is followed while it is awaited, and for a while after that."""

    def __init__(self, hints: SharedHints[K, S], topic: str, listener: Listener) -> None:
        self._join = hints.join
        self._listener = listener
        self._sources: Collection[Source] = ()
        self._has_told = False  # that hints are absent, and not that they are back
        self.topic: str = topic

    @property
    def has_ended(self) -> bool:
        """Whether it yields nothing any more."""
        return self._listener.closed

    async def __anext__(self) -> Hint:
        try:
            if not self.has_ended:
                await self._join(self)
            while self._has_told or not self._is_absent:
                await anext(self._listener)
                if self._has_told and not self.has_ended:
                    await self._join(self)  # they may come from another source now
                if not self._is_absent:
                    break
        except BaseException:  # the wait was cancelled, or the iterator has ended; the next wait joins again
            self.take(())
            raise
        self._has_told = self._is_absent
        return "absent" if self._has_told else None

    @property
    def _is_absent(self) -> bool:
        return any(source.is_silent for source in self._sources)

    async def aclose(self) -> None:
        self.take(())
        await self._listener.aclose()

    def take(self, sources: Collection[Source]) -> None:
        """Listen to these *sources*, and to no others any more."""
        for old in self._sources:
            if old not in sources:
                old.leave(self)
        self._sources = sources
        for source in sources:
            source.join(self)


class Source(ABC):
    """What brings hints, on one loop: followed until nobody listens any more.

    Args:
        hints: Whose source it is.
    """

    def __init__(self, hints: SharedHints[K, S]) -> None:
        self._notifier = hints.notifier
        self._spawn = hints.tasks.spawn
        self.topics: dict[str, WeakSet[Subscription]] = {}
        """The topics of those who listen, or did a while ago."""
        self._new: set[str] = set()  # topics that have joined since it was live
        self.is_deaf = False
        """Whether nothing can come from it, by the last attempt to follow it."""
        self.is_silent = False
        """Whether its listeners are told that no hints come."""
        self._backoff = Backoff()
        self._deaf_backoff = Backoff(*DEAF)
        self._live_since: float | None = None
        self._heard_again: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._forget: Callable[[], object] = lambda: None

    # --- what each store says ---

    @abstractmethod
    async def follow(self) -> None:
        """Subscribe, tell :meth:`live` or :meth:`deaf`, pass on what is reported, and return when it has ended.

        It may end by any exception, too; and is cancelled when nobody listens any more.
        """

    def joined(self, topic: str) -> None:
        """Note that *topic* is new here: its listeners get a hint once it is live, for what they may have missed."""
        if self.is_live:
            self._notifier.notify(topic)
        else:
            self._new.add(topic)

    def left(self, topics: Collection[str]) -> None:
        """Note that nobody listens to these *topics* any more."""
        self._new.difference_update(topics)

    # --- what it is told ---

    @property
    def is_live(self) -> bool:
        """Whether it reports what happens from now on."""
        return self._live_since is not None

    def live(self, *, anew: bool = True) -> None:
        """Note that it reports what happens from now on; if it begins *anew*, anything may have happened before."""
        self.is_deaf = False
        if self._live_since is None:
            loop = asyncio.get_running_loop()
            self._live_since = loop.time()
            if self.is_silent:
                self._heard_again = loop.call_later(STEADY, self._end_silence)
        new, self._new = self._new, set()
        for topic in list(self.topics) if anew else new:
            self._notifier.notify(topic)

    def deaf(self) -> None:
        """Note that nothing can come from it, and that this won't change soon."""
        self.is_deaf = True
        self._fall_silent()

    def notify(self) -> None:
        """Notify all listeners of this source."""
        for topic in self.topics:
            self._notifier.notify(topic)

    def _fall_silent(self) -> None:
        if not self.is_silent:
            self.is_silent = True
            self.notify()

    def _end_silence(self) -> None:
        self.is_silent = False
        self.notify()

    # --- who listens ---

    def begin(self, forget: Callable[[], object]) -> None:
        """Follow it until it ends; *forget* is called then."""
        self._forget = forget
        self._running = self._spawn(self._run(), name="tenure-hints")
        self._look_later()

    def join(self, subscription: Subscription) -> None:
        """Follow it for *subscription*, too."""
        if subscription.topic in self.topics:
            self.topics[subscription.topic].add(subscription)
            return
        self.topics[subscription.topic] = WeakSet([subscription])
        self.joined(subscription.topic)

    def leave(self, subscription: Subscription) -> None:
        """Follow it no more for *subscription*; the next look ends it, if nobody else listens by then."""
        if (listening := self.topics.get(subscription.topic)) is not None:
            listening.discard(subscription)

    def end(self) -> None:
        """Follow it no more; it is forgotten at once, so that another one can begin."""
        self._forget()
        if self._looking is not None:
            self._looking.cancel()
        if self._running is not None:
            self._running.cancel()

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(UNUSED_AFTER, self._look)

    def _look(self) -> None:
        unused = [topic for topic, listening in self.topics.items() if not listening]
        for topic in unused:
            del self.topics[topic]
        if unused:
            self.left(unused)
        if self.topics:
            self._look_later()
        else:
            self.end()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        ended_at = loop.time()
        try:
            while self.topics:
                with suppress(Exception):  # whatever ends it: if it is not followed again, no hint comes any more
                    await self.follow()
                since, self._live_since = self._live_since, None
                if self._heard_again is not None:
                    self._heard_again.cancel()
                lasted = loop.time() - since if since is not None else 0.0
                for backoff in (self._backoff, self._deaf_backoff):
                    backoff.reset_after(lasted)
                if lasted >= STEADY:
                    ended_at = loop.time()
                elif loop.time() - ended_at >= SILENT_AFTER:
                    self._fall_silent()
                if self.topics:
                    await (self._deaf_backoff if self.is_deaf else self._backoff).rest()
        finally:
            self.end()
