"""What a consumer tells its observers, and the log."""

from __future__ import annotations

from typing import Any

from tenure._queue.context import QueueContext
from tenure._queue.message import Delivery
from tenure._telemetry.log import logger
from tenure.events import (
    BrokerUnanswered,
    Event,
)


def hint_at(context: QueueContext, running: int) -> None:
    """Say in the log, when an interrupt has ended a consumer, what it waits for, and how to hurry it."""
    count = f"{running} message{'' if running == 1 else 's'}"
    logger.warning("%s: interrupted: finishing %s; interrupt once more to hurry", context.name, count)


def tell_unanswered(context: QueueContext, what: str, why: str) -> None:
    """Let the observers know that the broker did not answer when it was asked to do *what*."""
    context.emit(BrokerUnanswered(context.clock.now(), context.name, context.holder, what, why))


def event_of(kind: type[Any], context: QueueContext, delivery: Delivery, *more: object) -> Event:
    """Return an event of this *kind* about *delivery*."""
    named = (delivery.id, delivery.sequence, delivery.delivery_count)
    event: Event = kind(context.clock.now(), context.name, context.holder, *named, *more)
    return event
