"""The events that a consumer emits to its observers, and its lines in the log."""

from __future__ import annotations

from typing import Any

from tenure._queue.context import QueueContext
from tenure._queue.message import Delivery
from tenure._telemetry.callbacks import logger
from tenure.events import (
    BrokerUnanswered,
    Event,
)


def log_interrupt(context: QueueContext, running: int) -> None:
    """Log, after an interrupt, what the consumer waits for, and how to stop it without waiting."""
    count = f"{running} message{'' if running == 1 else 's'}"
    logger.warning("%s: interrupted: finishing %s; interrupt again to stop without waiting", context.name, count)


def report_unanswered(context: QueueContext, what: str, why: str) -> None:
    """Emit the event that the broker did not answer the request to do *what*."""
    context.emit(BrokerUnanswered(context.clock.now(), context.name, context.holder, what, why))


def event_of(kind: type[Any], context: QueueContext, delivery: Delivery, *more: object) -> Event:
    """Return an event of this *kind* about *delivery*."""
    named = (delivery.id, delivery.sequence, delivery.delivery_count)
    event: Event = kind(context.clock.now(), context.name, context.holder, *named, *more)
    return event
