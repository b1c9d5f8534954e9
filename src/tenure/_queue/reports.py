"""Reports of a consumer to its observers and the log."""

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
    """Log what a consumer waits for after an interrupt, and how to end it at once."""
    count = f"{running} message{'' if running == 1 else 's'}"
    logger.warning("%s: interrupted: finishing %s; interrupt once more to hurry", context.name, count)


def report_unanswered(context: QueueContext, what: str, why: str) -> None:
    """Report to the observers that the broker did not answer a request for *what*."""
    context.emit(BrokerUnanswered(context.clock.now(), context.name, context.holder, what, why))


def event_of(kind: type[Any], context: QueueContext, delivery: Delivery, *more: object) -> Event:
    """Return an event of this *kind* about *delivery*."""
    named = (delivery.id, delivery.sequence, delivery.delivery_count)
    event: Event = kind(context.clock.now(), context.name, context.holder, *named, *more)
    return event
