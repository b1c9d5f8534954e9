"""Operations that NATS doesn't support: refused before anything is written."""

from __future__ import annotations

from typing import NoReturn

from tenure._queue.broker import LiveSelection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, Delivery, State
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Defer, Verdict
from tenure.errors import ConfigError

VISIBLE_STATES: frozenset[State] = frozenset({"ready"})

_INSTEAD = "use a backend that can, such as postgresql:// or redis://"


def refuse(feature: str) -> NoReturn:
    """Raise ``ConfigError``: NATS has no *feature*."""
    raise ConfigError(f"queues in NATS have no {feature}; {_INSTEAD}")


def check_outgoing(message: Outgoing) -> None:
    """Refuse a message that needs what NATS doesn't have."""
    if message.session is not None:
        refuse("sessions")
    if message.priority:
        refuse("priorities")


def check_selection(which: LiveSelection) -> None:
    """Refuse to select live messages that NATS doesn't show."""
    if which.session is not None:
        refuse("sessions")
    if which.states is not None and which.states != VISIBLE_STATES:
        unseen = ", ".join(sorted(which.states - VISIBLE_STATES)) or "none"
        raise ConfigError(
            f"queues in NATS show only messages that are ready, not those that are {unseen}; omit the "
            f"states, or {_INSTEAD}"
        )


def check_verdict(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse a verdict that NATS doesn't support."""
    if isinstance(verdict, Defer):
        if delivery.queue.endswith(DEAD_SUFFIX):
            raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        raise ConfigError(
            "queues in NATS can't defer a message, as they deliver none by its sequence; abandon it with a delay, or "
            f"{_INSTEAD}"
        )
