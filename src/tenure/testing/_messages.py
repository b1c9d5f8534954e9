"""Messages for unit tests of handlers: real ones, whose verbs are recorded and reach no broker.

They need no store, no loop of their own and no fixture::

    async def test_an_unknown_customer_is_rejected():
        order = tenure.testing.message(json={"customer": 404})
        await handle(order)
        assert order.verdict == DeadLetter("no such customer")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast

from tenure._backends.memory import QUEUE_TRAITS
from tenure._lease import NoAnswer
from tenure._queue.broker import Broker, QueueSettings
from tenure._queue.checks import check_count, check_name
from tenure._queue.context import QueueContext
from tenure._queue.message import NO_HEADERS, Delivery, Headers
from tenure._queue.outgoing import NOT_GIVEN, Outgoing, SendOptions, checked, outgoing
from tenure._queue.received import BlockingMessage, Message, Received
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.events import Event


class MessageOptions(TypedDict, total=False):
    """The properties of a message beside its body, as for :func:`message`."""

    queue: str
    id: str
    headers: Headers
    delivery_count: int
    sequence: int
    session: str | None
    priority: int
    reply_to: str | None
    correlation_id: str | None
    enqueued_at: datetime | float | None
    lock: float


class _RecordingBroker:
    """A broker for one message: gives a broker's answers, and records the verdict and each renewal."""

    def __init__(self, settings: QueueSettings) -> None:
        self.traits = QUEUE_TRAITS
        self.settings = settings
        self.verdict: Verdict | None = None
        self.renewals = 0
        self.is_lost = False

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed | NoAnswer]:
        [(delivery, verdict)] = settlements
        if self.is_lost or self.verdict is not None:
            return [LAPSED]
        self.verdict = verdict
        is_last = isinstance(verdict, Abandon) and delivery.delivery_count >= self.settings.max_deliveries
        return [SETTLED_DEAD if is_last else SETTLED]

    async def renew(self, deliveries: Sequence[Delivery], lock: float) -> list[Renewed | Lapsed | NoAnswer]:
        if self.is_lost or self.verdict is not None:
            return [LAPSED]
        self.renewals += 1
        return [Renewed(time.time() + lock)]


class _QuietContext(QueueContext):
    def emit(self, event: Event, error: BaseException | None = None) -> None:
        """Report nothing: there is no queue."""


class _Recording:
    """The record of the verbs, which a message in a test has in addition to its fields."""

    _broker: _RecordingBroker

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that the handler passed by a verb: ``Complete``, ``Abandon``, ``Defer``, ``DeadLetter`` or
        ``GiveBack``, which compare by their fields; None if it has passed none.
        """
        return self._broker.verdict

    @property
    def sends(self) -> Sequence[tuple[str, Outgoing]]:
        """The queues and messages that were sent with the verdict, by ``reply(…)`` or ``complete(sends=…)``."""
        verdict = self._broker.verdict
        return verdict.sends if isinstance(verdict, Complete) else ()

    @property
    def renewals(self) -> int:
        """The number of times that the handler has renewed the lock."""
        return self._broker.renewals

    def lose_lock(self) -> None:
        """End the lock: from now on each verb raises ``LockLost``, as if another consumer had the message."""
        self._broker.is_lost = True


class RecordingMessage(_Recording, Message):
    """A ``tenure.Message`` whose verbs are recorded; made by :func:`message`."""


class RecordingBlockingMessage(_Recording, BlockingMessage):
    """A ``tenure.sync.Message`` whose verbs are recorded; made by :func:`message_for_threads`."""


def message(body: bytes = b"", *, json: object = NOT_GIVEN, **options: Unpack[MessageOptions]) -> RecordingMessage:
    """Return a message to call an async handler with, in a test.

    It is as received from a queue: values that ``send`` would refuse are refused. Its verbs reach no broker;
    ``message.verdict`` is the first verdict passed. A second one raises ``LockLost``, as with a broker.

    Args:
        body: The content, as bytes.
        json: Instead of *body*: a value that is sent as JSON.
        options: ``queue`` ("orders"), ``id``, ``headers``, ``delivery_count`` (1), ``sequence`` (1), ``session``,
            ``priority``, ``reply_to``, ``correlation_id``, ``enqueued_at`` (now), and ``lock`` in seconds (30).

    Raises:
        ConfigError: No queue would accept such a message.

    Example::

        order = tenure.testing.message(json={"item": "tea"}, delivery_count=3)
        await handle(order)
        assert order.verdict is None  # so consume completes it
    """
    delivery, broker, context = _parts(body, json, options)
    message = RecordingMessage(delivery, context)
    message._broker = broker
    return message


def message_for_threads(
    body: bytes = b"", *, json: object = NOT_GIVEN, **options: Unpack[MessageOptions]
) -> RecordingBlockingMessage:
    """Return a message to call a handler with that runs in a thread. See :func:`message`."""
    delivery, broker, context = _parts(body, json, options)
    message = RecordingBlockingMessage(Message(delivery, context), _run_at_once)
    message._broker = broker
    return message


def message_for_process(body: bytes = b"", *, json: object = NOT_GIVEN, **options: Unpack[MessageOptions]) -> Received:
    """Return a message to call a handler with that runs in a process: it has no verbs. See :func:`message`."""
    return Received(_parts(body, json, options)[0])


def _parts(body: bytes, json: object, options: MessageOptions) -> tuple[Delivery, _RecordingBroker, QueueContext]:
    settings = QueueSettings(lock=options.get("lock", 30.0))
    queue = check_name(options.get("queue", "orders"))
    for name in ("delivery_count", "sequence"):
        check_count(name, options.get(name, 1))
    now = time.time()
    enqueued_at = options.get("enqueued_at")
    sent: SendOptions = {
        "headers": options.get("headers", NO_HEADERS),
        "at": now if enqueued_at is None else enqueued_at,
    }
    for key in ("id", "session", "priority", "reply_to", "correlation_id"):
        if key in options:
            sent[key] = options[key]
    [one] = checked([outgoing(body, json, sent)], settings.body_max)
    sequence = options.get("sequence", 1)
    delivery = Delivery(
        queue=queue,
        sequence=sequence,
        token="test",  # noqa: S106  # of a lock
        id=one.id or f"{queue}--{sequence}",
        body=one.body,
        headers=one.headers,
        delivery_count=options.get("delivery_count", 1),
        enqueued_at=cast(float, one.at),
        locked_until=now + settings.lock,
        session=one.session,
        priority=one.priority,
        reply_to=one.reply_to,
        correlation_id=one.correlation_id,
    )
    recording = _RecordingBroker(settings)
    context = _QuietContext(queue, cast(Broker, recording), cast(RenewalThread, None), SystemClock(), settings, "test")
    return delivery, recording, context


def _run_at_once(start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the coroutine that *start* makes, which waits for nothing."""
    try:
        start().send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a verb of a message in a test waits for nothing")
