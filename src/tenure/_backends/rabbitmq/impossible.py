"""Operations that RabbitMQ doesn't support: refused before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from tenure._backends.rabbitmq.message_format import ROUTING
from tenure._queue.broker import LiveSelection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery, State
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Complete, Defer, Verdict
from tenure.errors import ConfigError, MessageRefused

VISIBLE_STATES: frozenset[State] = frozenset({"ready"})

_INSTEAD = "use a backend that can, such as postgresql:// or redis://"


def refuse(feature: str) -> NoReturn:
    """Raise ``ConfigError``: RabbitMQ has no *feature*."""
    raise ConfigError(f"queues in RabbitMQ have no {feature}; {_INSTEAD}")


def check_messages(messages: Sequence[Outgoing]) -> None:
    """Refuse messages with what RabbitMQ doesn't support."""
    for index, message in enumerate(messages):
        try:
            if message.session is not None:
                refuse("sessions")
            if message.priority:
                refuse("priorities")
            for name in ROUTING & message.headers.keys():
                raise ConfigError(
                    f"RabbitMQ would put a message with the header {name!r} into other queues, too; name it otherwise"
                )
        except ConfigError as error:
            raise MessageRefused(str(error), index, len(messages)) from None


def check_selection(which: LiveSelection) -> None:
    """Refuse to select live messages that RabbitMQ doesn't show."""
    if which.session is not None:
        refuse("sessions")
    if which.states is not None and which.states != VISIBLE_STATES:
        unseen = ", ".join(sorted(which.states - VISIBLE_STATES)) or "none"
        raise ConfigError(
            f"queues in RabbitMQ show only messages that are ready, not those that are {unseen}; omit the states, or "
            f"{_INSTEAD}"
        )


def check_verdict(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse a verdict that RabbitMQ doesn't support."""
    if isinstance(verdict, Defer):
        if delivery.queue.endswith(DEAD_SUFFIX):
            raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        raise ConfigError(
            "queues in RabbitMQ can't defer a message, as they deliver none by its sequence; abandon it with a delay, "
            f"or {_INSTEAD}"
        )
    if isinstance(verdict, Complete) and verdict.remember:
        refuse("inbox that remembers ids")
