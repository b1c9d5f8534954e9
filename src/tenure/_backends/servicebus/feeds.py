"""The feeds of all queues, each made when its queue is first used."""

from __future__ import annotations

from functools import partial

from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.driver import Disconnected
from tenure._backends.servicebus.feed import Feed
from tenure._backends.servicebus.names import Path
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.sessions import Sessions
from tenure._runtime.closing import close_in_order, close_together
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError


class Feeds:
    """A feed for each queue, and for its dead letters. All of it belongs to the library's thread."""

    def __init__(self, namespace: Namespace, places: Places, sessions: Sessions, notifier: Notifier) -> None:
        self._namespace = namespace
        self._places = places
        self._sessions = sessions
        self._notifier = notifier
        self._feeds: dict[str, Feed] = {}
        namespace.at_close(self._close)

    def known(self, queue: str) -> Feed | None:
        """Return the feed of a queue if there is one; on any thread."""
        return self._feeds.get(queue)

    def listen(self, queue: str) -> None:
        """Let one more wait for hints of *queue*."""
        self.of(queue).begin_listening()

    def leave(self, queue: str) -> None:
        """Let one less wait for hints of *queue*."""
        feed = self.of(queue)
        feed.end_listening()
        if not feed.listeners:
            self._sessions.stop_waiting(queue)

    async def _close(self) -> None:
        await close_in_order(self._sessions.close, self._close_feeds)

    async def _close_feeds(self) -> None:
        # Each waits for the service, and all of them together have a few seconds.
        await close_together(*(feed.close for feed in self._feeds.values()))

    def of(self, queue: str) -> Feed:
        """Return the feed of a queue, or of its dead letters."""
        feed = self._feeds.get(queue)
        if feed is None:
            hint = partial(self._notifier.notify, queue)
            feed = self._feeds[queue] = Feed(
                self._namespace,
                partial(self._path_to_receive, queue),
                partial(self._wait_for_first, queue),
                partial(self._places.lock_known, queue),
                partial(self._places.note_sessions, queue),
                partial(self._places.forget, queue),
                hint,
            )
        return feed

    async def _path_to_receive(self, queue: str) -> Path:
        path = await self._places.path_of(queue)
        if not path.is_dead and await self._places.has_sessions(queue):
            raise ConfigError(
                f"the entity of {queue!r} requires sessions: consume(…, sessions=True), or queue.session()"
            )
        return path

    async def _wait_for_first(self, queue: str) -> bool:
        """Begin to wait for the first message of a queue with sessions; return whether it is one."""
        path = await self._places.existing(queue)
        if path is None or await self._places.is_open(queue):
            raise Disconnected("it is not known yet what kind of queue it is")
        if path.is_dead or not await self._places.has_sessions(queue):
            return False
        self._sessions.wait(queue, partial(self._notifier.notify, queue))
        return True
