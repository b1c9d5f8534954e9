"""Operations that Service Bus doesn't support: refused before anything is written."""

from __future__ import annotations

from typing import NoReturn

from tenure._backends.servicebus.message_format import HEADERS_MAX, size_of
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Complete, Defer, Verdict
from tenure.errors import ConfigError

TEXT_MAX = 128
"""Characters of a message's id, and of a session's name."""

_INSTEAD = "use a backend that has, such as postgresql:// or redis://"


def refuse(feature: str) -> NoReturn:
    """Raise ``ConfigError``: Service Bus has no *feature*."""
    raise ConfigError(f"queues on Service Bus have no {feature}; {_INSTEAD}")


def check_message(message: Outgoing) -> None:
    """Refuse a message that Service Bus can't keep as it is meant."""
    if message.priority:
        refuse("priorities")
    for name, text in (("id", message.id), ("session", message.session)):
        if text is not None and len(text) > TEXT_MAX:
            raise ConfigError(
                f"{name} has {len(text)} characters, and Service Bus takes {TEXT_MAX}; choose a shorter one"
            )
    if (size := size_of(message.headers)) > HEADERS_MAX:
        raise ConfigError(
            f"the headers take {size:,} bytes, and Service Bus takes {HEADERS_MAX:,}; put a part of them into the body"
        )


def check_verdict(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse a verdict that Service Bus doesn't support."""
    if isinstance(verdict, Defer) and delivery.queue.endswith(DEAD_SUFFIX):
        raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
    if isinstance(verdict, Complete):
        for _, message in verdict.sends:
            check_message(message)
        if verdict.remember:
            refuse("inbox that remembers ids")
