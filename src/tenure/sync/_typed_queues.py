"""Typed queues for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, Unpack, overload

import tenure
from tenure import Outgoing, Received, SendOptions
from tenure.sync._queues import Queue

T = TypeVar("T")
R = TypeVar("R")


class TypedQueue(Generic[T]):
    """A queue whose bodies are all of one type, for threads. See :class:`tenure.TypedQueue`.

    Attributes:
        name: Its name, the same in all programs that use it.
        kind: The type of its bodies.
    """

    name: str
    kind: Any

    def __init__(self, behind: tenure.TypedQueue[T], queue: Callable[[], Queue]) -> None:
        self.name = behind.name
        self.kind = behind.kind
        self._behind = behind
        self._queue = queue

    @property
    def queue(self) -> Queue:
        """The queue itself, with all that is not about bodies: ``stats``, ``dead_letters``, ``receive`` ….

        Raises:
            ConfigError: The service is not open.
        """
        return self._queue()

    def send(self, body: T, **options: Unpack[SendOptions]) -> str:
        """Send a message; return its id once it is kept. See :meth:`tenure.TypedQueue.send`."""
        return self.send_batch([self._behind.outgoing(body, **options)])[0]

    def send_batch(self, bodies: Iterable[T | Outgoing]) -> list[str]:
        """Send many messages in one step, all or none; return their ids in order."""
        return self.queue.send_batch(self._behind._ready(bodies))

    @overload
    def request(self, body: T, reply: type[R], *, timeout: float = ..., **options: Unpack[SendOptions]) -> R: ...
    @overload
    def request(self, body: T, reply: object, *, timeout: float = ..., **options: Unpack[SendOptions]) -> Any: ...
    def request(self, body: T, reply: Any, *, timeout: float = 30.0, **options: Unpack[SendOptions]) -> Any:
        """Send a message and return the answer to it, as a *reply*. See :meth:`tenure.TypedQueue.request`."""
        question, given = self._behind._question(body, options)
        return self._behind._answer(self.queue.request(question, timeout=timeout, **given), reply)

    def outgoing(self, body: T, **options: Unpack[SendOptions]) -> Outgoing:
        """Return the message with this *body*. See :meth:`tenure.TypedQueue.outgoing`."""
        return self._behind.outgoing(body, **options)

    def decode(self, message: Received) -> T:
        """Return the body of a *message* that was received by hand. See :meth:`tenure.TypedQueue.decode`."""
        return self._behind.decode(message)

    def __repr__(self) -> str:
        return repr(self._behind)
