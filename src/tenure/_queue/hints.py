"""The hints of one backend, received once on each event loop, and shared by all waiters there.

One task listens for each queue. Which waiters it wakes is decided by :class:`~tenure._queue.waiters.Waiters`, one for
each kind of request: a hint that wakes a ``receive`` also wakes an ``accept``, which is another request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from weakref import WeakKeyDictionary

from tenure._election.store import Hint
from tenure._queue.broker import Broker
from tenure._queue.waiters import Waiters

MESSAGES = "messages"
"""The kind of waiters that ask for any messages of the queue."""

SESSIONS = ("session", None)
"""The kind of waiters that ask for the next free session of the queue."""

LISTEN_AGAIN = 1.0
"""Seconds after which hints are listened for again when they have ended."""

_Queues = dict[str, "_Queue"]


class HintSubscriptions:
    """The waiters of each queue, by event loop."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = WeakKeyDictionary()

    def join(self, broker: Broker, queue: str, kind: Hashable, wake: Callable[[], bool]) -> Subscription:
        """Subscribe a waiter on this loop to hints for *queue*. It misses no hint from this call on.

        Args:
            broker: Where hints come from.
            queue: The queue that they are about.
            kind: The kind of request it makes; waiters of one kind make the same.
            wake: Called to let it ask at once, or as soon as it can. Returns whether it asks at once.
        """
        loop = asyncio.get_running_loop()
        queues = self._loops.get(loop)
        if queues is None:
            queues = self._loops[loop] = {}
        listener = queues.get(queue)
        if listener is None or listener.has_ended:
            listener = queues[queue] = _Queue(broker, queue, queues)
        return Subscription(listener.group(kind), wake)


class Subscription:
    """A waiter's subscription; each verb is called on its loop."""

    __slots__ = ("_group", "_waiter")

    def __init__(self, group: _WaiterGroup, wake: Callable[[], bool]) -> None:
        self._group = group
        self._waiter = group.waiters.join(wake)

    @property
    def is_asking(self) -> bool:
        """Whether a request of its own is not answered."""
        return self._waiter.asking

    def note_arrived(self, *, found: bool, due_in: float | None) -> None:
        """Note a request that was answered at once, for what had come already.

        This may wake others; see :attr:`may_take_arrived`.
        """
        self.asks()
        group = self._group
        group.is_noting = True
        try:
            self.answered(found, due_in)
        finally:
            group.is_noting = False

    @property
    def may_take_arrived(self) -> bool:
        """Whether a request may be answered at once.

        Not one of a waiter that another wakes by its answer: of many waiters, each would be woken inside the other.
        """
        return not self._group.is_noting

    @property
    def has_hint(self) -> bool:
        """Whether there was a hint for which it has not asked yet."""
        return self._waiter.has_hint

    def asks(self) -> None:
        """Note that it asks."""
        self._group.waiters.asks(self._waiter)

    def answered(self, found: bool, due_in: float | None) -> None:
        """Note the answer: whether it brought something, and in how many seconds time alone will bring more."""
        if due_in:
            self._group.due(due_in)
        self._group.waiters.answered(self._waiter, found=found, again=due_in == 0)

    def failed(self) -> None:
        """Note that there was no answer."""
        self._group.waiters.failed(self._waiter)

    def leave(self) -> None:
        """Wait no more; may be called twice."""
        self._group.waiters.leave(self._waiter)
        self._group.left()


class _WaiterGroup:
    """The waiters of one kind, with a timer for the end of delays and locks.

    A waiter that has learned of such an end may be busy or gone by then.
    """

    def __init__(self, queue: _Queue, kind: Hashable) -> None:
        self.waiters: Waiters = Waiters()
        self.is_noting = False
        self._queue = queue
        self._kind = kind
        self._timer: asyncio.TimerHandle | None = None

    def due(self, seconds: float) -> None:
        """Give a hint after *seconds*, if others than the caller wait here."""
        if len(self.waiters) < 2:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds + 0.001  # a thousandth more, so as not to come too early by the store's clock
        if self._timer is None or at < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.waiters.hint()

    def left(self) -> None:
        """Note that a waiter has left."""
        if not self.waiters:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._queue.forget(self._kind, self)


class _Queue:
    """The task that listens for one queue on one loop, while it has waiters."""

    def __init__(self, broker: Broker, name: str, queues: _Queues) -> None:
        self._broker = broker
        self._name = name
        self._queues = queues
        self._groups: dict[Hashable, _WaiterGroup] = {}
        hints = broker.hints(name)  # from here on, none is missed
        self._listening = asyncio.get_running_loop().create_task(self._listen(hints), name="tenure-hints")

    @property
    def has_ended(self) -> bool:
        """Whether the task has ended."""
        return self._listening.done()

    def group(self, kind: Hashable) -> _WaiterGroup:
        """Return the waiters of one *kind*."""
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _WaiterGroup(self, kind)
        return group

    def forget(self, kind: Hashable, group: _WaiterGroup) -> None:
        """Note that *group* has no waiters."""
        if self._groups.get(kind) is group:
            del self._groups[kind]
        if not self._groups:
            self._listening.cancel()
            if self._queues.get(self._name) is self:
                del self._queues[self._name]

    async def _listen(self, hints: AsyncIterator[Hint] | None) -> None:
        while True:
            try:
                if hints is None:
                    hints = self._broker.hints(self._name)
                    self._hint()
                async for hint in hints:
                    if hint != "absent":  # else waiters look in their own time
                        self._hint()
            except (Exception, asyncio.CancelledError):
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Hints may be absent for any reason; waiters also look again in their own time.
            hints = None
            await asyncio.sleep(LISTEN_AGAIN)

    def _hint(self) -> None:
        for group in list(self._groups.values()):
            group.waiters.hint()
