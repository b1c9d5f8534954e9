"""Messages that were received, as users meet them: with verbs for asyncio, and with verbs for threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

# For QueueContext.emit: an event may come shortly before a lock ends, or when no file can be opened any more.
import tenure._queue.delivery_ends
import tenure._queue.tracebacks
import tenure._telemetry.hook
import tenure._telemetry.log  # noqa: F401
from tenure._checks import check_seconds
from tenure._queue.checks import check_name, check_text
from tenure._queue.context import DeliveryTracker, QueueContext
from tenure._queue.failures import Failure
from tenure._queue.message import Attempt, Delivery, Headers
from tenure._queue.outgoing import NOT_GIVEN, Outgoing, checked
from tenure._queue.reply import Reply
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Complete, DeadLetter, Defer, Verdict
from tenure.errors import ConfigError, DecodeError, LockLost
from tenure.events import ResultDiscarded

T = TypeVar("T")


class Received:
    """A message that was received: its content, and the broker's facts about it."""

    __slots__ = ("_delivery", "_locked_until")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._locked_until = 0.0

    @property
    def delivery(self) -> Delivery:
        """The delivery as the broker gave it, for a caller that settles it in a transaction of its own."""
        return self._delivery

    @property
    def queue(self) -> str:
        """The queue from which it was received."""
        return self._delivery.queue

    @property
    def id(self) -> str:
        """The id, given by the sender or the broker."""
        return self._delivery.id

    @property
    def body(self) -> bytes:
        """The content."""
        return self._delivery.body

    @property
    def headers(self) -> Headers:
        """The headers that its sender added to the content."""
        return self._delivery.headers

    @property
    def delivery_count(self) -> int:
        """The number of deliveries, this one included."""
        return self._delivery.delivery_count

    @property
    def sequence(self) -> int:
        """Its number in the queue."""
        return self._delivery.sequence

    @property
    def lock_token(self) -> str:
        """The token of this delivery's lock; new with every delivery."""
        return f"{self._delivery.token}.{self._delivery.sequence}"

    @property
    def locked_until(self) -> float:
        """When the lock ends, by the broker's wall clock in Unix seconds, if it isn't renewed."""
        return self._locked_until or self._delivery.locked_until

    @property
    def enqueued_at(self) -> float:
        """When it was sent, by the broker's wall clock in Unix seconds."""
        return self._delivery.enqueued_at

    @property
    def session(self) -> str | None:
        """The session it belongs to."""
        return self._delivery.session

    @property
    def priority(self) -> int:
        """0 to 9."""
        return self._delivery.priority

    @property
    def reply_to(self) -> str | None:
        """The queue to which the answer is to be sent."""
        return self._delivery.reply_to

    @property
    def correlation_id(self) -> str | None:
        """The id of the request that it answers, or the id that its answer should carry."""
        return self._delivery.correlation_id

    @property
    def reason(self) -> str | None:
        """The reason of a dead letter; None for other messages. So are the next three."""
        return self._delivery.death.reason if self._delivery.death else None

    @property
    def description(self) -> str | None:
        """The description of a dead letter."""
        return self._delivery.death.description if self._delivery.death else None

    @property
    def error(self) -> Failure | None:
        """The last failure of a dead letter."""
        return self._delivery.death.error if self._delivery.death else None

    @property
    def history(self) -> tuple[Attempt, ...]:
        """The failed deliveries of a dead letter."""
        return self._delivery.death.history if self._delivery.death else ()

    def text(self) -> str:
        """Return the body as text, which is UTF-8.

        Raises:
            DecodeError: It is none. If a handler does not catch this, its message is dead-lettered at once.
        """
        from tenure._queue.bodies import text_in

        return self._read(text_in)

    def json(self) -> Any:
        """Return the JSON in the body.

        Raises:
            DecodeError: The body is no JSON. If a handler does not catch this, its message is dead-lettered at once.
        """
        from tenure._queue.bodies import loads

        return self._read(loads)

    @overload
    def decode(self, kind: type[T]) -> T: ...
    @overload
    def decode(self, kind: object) -> Any: ...
    def decode(self, kind: Any) -> Any:
        """Return the JSON in the body as a *kind*: the value given to ``send(json=…)``.

        Args:
            kind: A dataclass, TypedDict or NamedTuple, a pydantic model, a msgspec struct; or what can stand in their
                fields, such as ``list[Order]``, ``dict[UUID, Decimal]``, ``Order | None``. Fields it doesn't know are
                ignored, and no value is converted to another type silently: ``"7"`` is no ``int``.

        Raises:
            DecodeError: The body is no JSON, or doesn't fit; the error says where. It is a ``ValueError``. If a handler
                does not catch it, its message is dead-lettered at once, as ``undecodable``.
            ConfigError: Bodies can't be read as a *kind*, whatever is in them.

        Example::

            order = message.decode(Order)
        """
        from tenure._queue.bodies import decode

        return self._read(lambda body: decode(body, kind))

    def _read(self, read: Callable[[bytes], T]) -> T:
        try:
            return read(self._delivery.body)
        except DecodeError as error:
            error.queue, error.sequence = self._delivery.queue, self._delivery.sequence
            raise

    def __repr__(self) -> str:
        one = self._delivery
        return (
            f"<{type(self).__name__} {one.id!r} of {one.queue!r}, {len(one.body)} bytes, delivery {one.delivery_count}>"
        )


class Message(Received):
    """A message that is locked to this consumer, until it is settled by one of the verbs or the lock ends.

    Each verb returns once the broker has confirmed it, or raises ``LockLost`` (it has no effect: another consumer may
    have the message) or ``Unavailable`` (no answer: it may have had an effect or not).
    """

    __slots__ = ("_context", "_tracker")

    def __init__(self, delivery: Delivery, context: QueueContext, tracker: DeliveryTracker | None = None) -> None:
        self._delivery = delivery
        self._locked_until = 0.0
        self._context = context
        self._tracker = tracker

    async def complete(self, *, sends: Sequence[tuple[str, Outgoing]] = (), remember: float = 0.0) -> None:
        """Remove the message for good: it was handled.

        Args:
            sends: Queues and messages to send in the same step, where the store has transactions.
            remember: Note its id in the queue's inbox for so many seconds; see ``Queue.handled``.
        """
        await self._settle(completion(self._context, sends, remember))

    async def abandon(self, delay: float = 0.0, *, error: BaseException | None = None) -> None:
        """Unlock the message, to be delivered again after *delay* seconds; dead-lettered after its last delivery."""
        check_seconds("delay", delay, least=0.0)
        await self._settle(Abandon(delay, Failure.of(error) if error is not None else None))

    async def defer(self) -> None:
        """Set the message aside, to be received again only by its sequence; see ``Queue.receive_deferred``."""
        await self._settle(Defer())

    async def dead_letter(self, reason: str, description: str = "", *, error: BaseException | None = None) -> None:
        """Move the message to the dead letters.

        Args:
            reason: A short text to group and filter by; up to 255 characters.
            description: For later inspection; up to 4,096 characters of it are kept.
            error: The exception that is the cause, if there is one; its type, text and traceback are kept.
        """
        check_text("reason", reason)
        await self._settle(DeadLetter(reason, description, Failure.of(error) if error is not None else None))

    async def give_back(self) -> None:
        """Unlock the message as if it had never been received: this delivery doesn't count."""
        await self._settle(GIVE_BACK)

    async def renew(self) -> float:
        """Extend the lock to its full length again, and return its end; one that lasts longer stays as it is."""
        try:
            self._locked_until = await self._context.renew(self._delivery)
        except LockLost:
            self._lost()
            raise
        return self._locked_until

    async def reply(self, body: bytes = b"", *, headers: Headers | None = None, json: object = NOT_GIVEN) -> None:
        """Send the answer to ``reply_to``, and complete the message in the same step.

        Raises:
            ConfigError: The message asks for no answer.
        """
        answer = answer_to(self, Reply(body, json=json, headers=headers))
        await self._settle(completion(self._context, [answer], 0.0))

    def note_settling(self) -> None:
        """Note that the message is being settled by other means, as by the commit of a transaction of your own.

        A renewal that does not find it meanwhile does not report a loss. Call :meth:`note_settled` after that.
        """
        if self._tracker is not None:
            self._tracker.settling_begins(self._delivery)

    def note_settled(self, stands: bool = True) -> None:
        """Note that the message was settled by other means, if that *stands*; no request is sent to the broker."""
        if stands:
            self._gone()
        if self._tracker is not None:
            self._tracker.settling_ends(self._delivery)

    async def _settle(self, verdict: Verdict) -> None:
        tracker = self._tracker
        if tracker is not None:
            tracker.settling_begins(self._delivery)
        try:
            await self._context.settle(self._delivery, verdict, tracker)
        except LockLost:
            self._lost()
            raise
        else:
            self._gone()
        finally:  # after Unavailable, it may still be ours, and can be settled again
            if tracker is not None:
                tracker.settling_ends(self._delivery)

    def _gone(self) -> None:
        if self._tracker is not None:
            self._tracker.settled(self._delivery)

    def _lost(self) -> None:
        if self._tracker is not None and self._tracker.settled(self._delivery):  # so it is not reported yet
            context, one = self._context, self._delivery
            named = (one.id, one.sequence, one.delivery_count)
            context.emit(ResultDiscarded(context.clock.now(), context.name, context.holder, *named, "denied"))


class BlockingMessage(Received):
    """A message for threads: as :class:`Message`, but each verb blocks the calling thread until it is answered."""

    __slots__ = ("_call", "_message")

    def __init__(self, message: Message, call: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]) -> None:
        super().__init__(message._delivery)
        self._message = message
        self._call = call

    @property
    def locked_until(self) -> float:
        """When the lock ends, by the broker's wall clock in Unix seconds, if it isn't renewed."""
        return self._message.locked_until

    def complete(self, *, sends: Sequence[tuple[str, Outgoing]] = (), remember: float = 0.0) -> None:
        """Remove the message for good. See :meth:`Message.complete`."""
        self._call(lambda: self._message.complete(sends=sends, remember=remember))

    def abandon(self, delay: float = 0.0, *, error: BaseException | None = None) -> None:
        """Unlock the message, to be delivered again. See :meth:`Message.abandon`."""
        self._call(lambda: self._message.abandon(delay, error=error))

    def defer(self) -> None:
        """Set the message aside. See :meth:`Message.defer`."""
        self._call(self._message.defer)

    def dead_letter(self, reason: str, description: str = "", *, error: BaseException | None = None) -> None:
        """Move the message to the dead letters. See :meth:`Message.dead_letter`."""
        self._call(lambda: self._message.dead_letter(reason, description, error=error))

    def give_back(self) -> None:
        """Unlock the message uncounted. See :meth:`Message.give_back`."""
        self._call(self._message.give_back)

    def renew(self) -> float:
        """Extend the lock. See :meth:`Message.renew`."""
        end: float = self._call(self._message.renew)
        return end

    def note_settling(self) -> None:
        """Note that the message is being settled by other means. See :meth:`Message.note_settling`."""
        self._message.note_settling()  # without the loop: an open transaction must not wait for it

    def note_settled(self, stands: bool = True) -> None:
        """Note that the message was settled by other means. See :meth:`Message.note_settled`."""

        async def note() -> None:
            self._message.note_settled(stands)

        self._call(note)

    def reply(self, body: bytes = b"", *, headers: Headers | None = None, json: object = NOT_GIVEN) -> None:
        """Send the answer, and complete the message. See :meth:`Message.reply`."""
        self._call(lambda: self._message.reply(body, headers=headers, json=json))


def completion(context: QueueContext, sends: Sequence[tuple[str, Outgoing]], remember: float) -> Complete:
    """Return the verdict that completes, sends and remembers; refuse messages that can't be sent."""
    if not sends and not remember:
        return COMPLETE
    check_seconds("remember", remember, least=0.0)
    body_max, most = context.settings.body_max, context.broker.traits.body_max
    ready = [(check_name(queue), checked([message], body_max, most)[0]) for queue, message in sends]
    return Complete(tuple(ready), float(remember))


def answer_to(message: Received, reply: Reply) -> tuple[str, Outgoing]:
    """Return the queue for the answer to *message*, and the answer."""
    if message.reply_to is None:
        raise ConfigError(f"message {message.id!r} of {message.queue!r} has no reply_to: its sender expects no answer")
    return message.reply_to, replace(reply.outgoing, correlation_id=message.correlation_id or message.id)
