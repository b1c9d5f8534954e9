"""``TypedQueue``: a queue of a service, whose bodies are all of one type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, Unpack, overload

import tenure
from tenure import Outgoing, Queue, QueueOptions, Received, SendOptions
from tenure._service.bodies import body_of, message_of, name_of
from tenure._service.opening import Opening

T = TypeVar("T")
R = TypeVar("R")


class TypedQueue(Generic[T]):
    """A queue whose bodies are all of one type. Made by ``service.queue(name, kind, …)``, before the service is open.

    ``bytes`` are sent as they are, ``str`` as text in UTF-8, values of every other type as JSON, without an envelope.

    Attributes:
        name: Its name, the same in all programs that use it.
        kind: The type of its bodies.
        settings: The settings that this program expects; see :meth:`tenure.Backend.queue`.
    """

    name: str
    kind: Any
    settings: QueueOptions

    def __init__(self, opened: Callable[[], Opening], name: str, kind: Any, settings: QueueOptions) -> None:
        self.name = name
        self.kind = kind
        self.settings = settings
        self._queue = _OfOpening(opened, lambda opening: opening.backend.queue(name, **settings))
        self._for_threads = _OfOpening(opened, lambda opening: opening.blocking.queue(name, **settings))

    @property
    def queue(self) -> Queue:
        """The queue itself, with all that is not about bodies: ``stats``, ``dead_letters``, ``receive`` ….

        Raises:
            ConfigError: The service is not open.
        """
        return self._queue.get()

    @property
    def blocking(self) -> tenure.sync.TypedQueue[T]:
        """The same queue for threads, such as those of handlers that are plain functions."""
        return tenure.sync.TypedQueue(self, self._for_threads.get)

    async def send(self, body: T, **options: Unpack[SendOptions]) -> str:
        """Send a message; return its id once it is kept as safely as the store keeps anything.

        Args:
            body: The content.
            options: As for :meth:`tenure.Queue.send`.

        Raises:
            ConfigError: It can't be sent as it is, or the service is not open; nothing was.
            Unavailable: There was no answer: it may have been sent or not.

        Example::

            await orders.send(Order("kettle", 2), id="order-17")
        """
        return (await self.send_batch([self.outgoing(body, **options)]))[0]

    async def send_batch(self, bodies: Iterable[T | Outgoing]) -> list[str]:
        """Send many messages in one step, all or none; return their ids in order.

        Args:
            bodies: The contents; or messages with options, made by :meth:`outgoing`.

        Raises:
            ConfigError: One of them can't be sent as it is, or the service is not open; none was.
            Unavailable: There was no answer: they may have been sent or not.
        """
        return await self.queue.send_batch(self._ready(bodies))

    @overload
    async def request(self, body: T, reply: type[R], *, timeout: float = ..., **options: Unpack[SendOptions]) -> R: ...
    @overload
    async def request(self, body: T, reply: object, *, timeout: float = ..., **options: Unpack[SendOptions]) -> Any: ...
    async def request(self, body: T, reply: Any, *, timeout: float = 30.0, **options: Unpack[SendOptions]) -> Any:
        """Send a message and return the answer to it: what its handler returns.

        Args:
            body: The content.
            reply: The type of the answer.
            timeout: How many seconds to wait for the answer.
            options: As for :meth:`tenure.Queue.send`.

        Raises:
            TimedOut: No answer came in time.
            DecodeError: The answer is of another type.
            ConfigError: It can't be sent as it is, or the service is not open.
            Unavailable: There was no answer of the store.

        Example::

            receipt = await orders.request(Order("kettle", 2), Receipt, timeout=5)
        """
        question, given = self._question(body, options)
        return self._answer(await self.queue.request(question, timeout=timeout, **given), reply)

    def outgoing(self, body: T, **options: Unpack[SendOptions]) -> Outgoing:
        """Return the message with this *body*, for :meth:`send_batch` or ``message.complete(sends=…)``.

        Raises:
            ConfigError: The body is of another type, or has no JSON form.
        """
        return message_of(body, self.kind, options)

    def decode(self, message: Received) -> T:
        """Return the body of a *message* that was received by hand.

        Raises:
            DecodeError: It doesn't fit.
        """
        body: T = body_of(message, self.kind)
        return body

    def _ready(self, bodies: Iterable[T | Outgoing]) -> list[Outgoing]:
        """Return the messages with these *bodies*; those that are messages already stay as they are."""
        return [one if isinstance(one, Outgoing) else self.outgoing(one) for one in bodies]

    def _question(self, body: T, options: SendOptions) -> tuple[bytes, SendOptions]:
        """Return the body of a request and its options, the headers of the body included."""
        question = self.outgoing(body, **options)
        return question.body, {**options, "headers": question.headers}

    def _answer(self, message: Received, reply: Any) -> Any:
        """Return the answer in *message* as a *reply*."""
        return body_of(message, reply)

    def __repr__(self) -> str:
        return f"<TypedQueue {self.name!r} of {name_of(self.kind)}>"


Q = TypeVar("Q")


class _OfOpening(Generic[Q]):
    """A queue that is made once for each opening of its service: those of an earlier one stay closed."""

    def __init__(self, opened: Callable[[], Opening], make: Callable[[Opening], Q]) -> None:
        self._opened = opened
        self._make = make
        self._made: tuple[Opening, Q] | None = None

    def get(self) -> Q:
        opening = self._opened()
        made = self._made
        if made is None or made[0] is not opening:
            self._made = made = opening, self._make(opening)
        return made[1]
