"""Operations that Service Bus doesn't support: refused before anything is written."""

from __future__ import annotations

from typing import NoReturn

from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Complete, Defer, Verdict
from tenure.errors import ConfigError

_INSTEAD = "use a backend that has, such as postgresql:// or redis://"


def refuse(feature: str) -> NoReturn:
    """Raise ``ConfigError``: Service Bus has no *feature*."""
    raise ConfigError(f"queues on Service Bus have no {feature}; {_INSTEAD}")


def check_message(message: Outgoing) -> None:
    """Refuse a message that Service Bus can't keep as it is meant."""
    if message.priority:
        refuse("priorities")


def check_verdict(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse a verdict that Service Bus doesn't support."""
    if isinstance(verdict, Defer) and delivery.queue.endswith(DEAD_SUFFIX):
        raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
    if isinstance(verdict, Complete) and verdict.remember:
        refuse("inbox that remembers ids")
