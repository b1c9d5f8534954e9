"""Events as log records of the logger ``tenure``: one line each, the values as attributes of the record."""

from __future__ import annotations

import dataclasses
import logging
from types import TracebackType

from tenure._telemetry.aside import aside, backlog
from tenure.events import (
    BrokerAnswered,
    BrokerAwaited,
    BrokerUnanswered,
    CampaignFailed,
    Event,
    GivenBack,
    HandBackMissed,
    HandedBack,
    HandlerNotBegun,
    HandlerOverran,
    LockEnded,
    MessageDied,
    MessageEvent,
    MessageFailed,
    Overrun,
    RenewalMissed,
    Renewed,
    ResultDiscarded,
    StandingBy,
    TermBegan,
    TermEnded,
    TermEnding,
    TokenFell,
)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

TRACES_MAX = 100
"""So many exceptions wait with their frames, and what those hold, while a log handler blocks; of more, the text."""

logger: logging.Logger = logging.getLogger("tenure")


def is_logged(event: Event) -> bool:
    """Return whether *event* would be written at all: renewals are many, and seldom wanted."""
    return not isinstance(event, Renewed) or logger.isEnabledFor(logging.DEBUG)


def log_event(event: Event, exc_info: ExcInfo | None = None) -> None:
    """Write *event* to the log, with *exc_info*, never on a thread that renews: a handler may block.

    The event's fields are in ``record.tenure`` for structured handlers.
    """
    if exc_info is not None and backlog() >= TRACES_MAX:
        aside(_write, event, None, f"\n{logging.Formatter().formatException(exc_info)}")
    else:
        aside(_write, event, exc_info)


def _write(event: Event, exc_info: ExcInfo | None, trace: str = "") -> None:
    level, message = _said(event)
    if logger.isEnabledFor(level):
        extra = {"tenure": dataclasses.asdict(event)}
        logger.log(level, "%s: %s%s", event.name, message, trace, extra=extra, exc_info=exc_info)


def _said(event: Event) -> tuple[int, str]:
    match event:
        case StandingBy(leader=leader, token=token):
            return logging.INFO, f"standing by: {leader} leads, term {token}"
        case TermBegan(holder=holder, token=token):
            return logging.INFO, f"elected, term {token}, as {holder}"
        case Renewed(token=token):
            return logging.DEBUG, f"term {token} renewed"
        case RenewalMissed(token=token, why=why, time_left=left):
            return logging.WARNING, f"term {token} was not renewed ({why}); trusted for {left:.3g} s more, trying again"
        case CampaignFailed(why=why):
            return logging.WARNING, f"could not stand for election ({why}); trying again"
        case TermEnding(token=token, reason=reason, deadline=deadline, at=at):
            return logging.INFO, f"term {token} ends ({reason}); work has {max(0.0, deadline - at):.3g} s to stop"
        case Overrun(token=token):
            return logging.ERROR, (
                f"term {token} is over and its work still runs; the lease is left to run out, and this candidate "
                "does not contend until the work has ended"
            )
        case TermEnded(token=token, reason=reason, released=released):
            return (
                logging.INFO,
                f"term {token} has ended ({reason}), the lease is {'being handed back' if released else 'gone'}",
            )
        case HandBackMissed(token=token, why=why, time_left=left):
            then = f"trying again until it runs out, in about {left:.3g} s" if left else "it runs out by itself"
            return logging.WARNING, f"the lease of term {token} could not be handed back ({why}); {then}"
        case HandedBack(token=token):
            return logging.INFO, f"term {token} was granted too late to be used, and handed back"
        case TokenFell(token=token, seen=seen):
            return logging.ERROR, (
                f"the store gives token {token} and gave {seen} before: it was restored from a copy, or lost what it "
                f"knew; whatever compares tokens refuses this term until they are above {seen} again"
            )
        case MessageEvent():
            level, message = _said_of_message(event)
            return level, f"message {event.id!r}, delivery {event.delivery_count}: {message}"
        case GivenBack(count=count):
            return logging.DEBUG, f"{count} messages given back untried and uncounted"
        case BrokerUnanswered(what=what, why=why):
            return logging.WARNING, f"could not {what} ({why}); trying again"
        case BrokerAwaited(why=why):
            return logging.WARNING, f"could not begin to consume ({why}); waiting for the store, asking again and again"
        case BrokerAnswered(waited=waited):  # as loud as the other: the log that has one is to have both
            return logging.WARNING, f"the store answers, after {waited:.3g} s; consuming begins"
    return logging.INFO, repr(event)


def _said_of_message(event: MessageEvent) -> tuple[int, str]:
    match event:
        case MessageFailed(error=error, delay=delay, place=place):
            then = "no retry mends that" if delay is None else f"it may be delivered again, after {delay:.3g} s"
            return logging.WARNING, f"its handler failed ({error}{f', at {place}' if place else ''}); {then}"
        case HandlerNotBegun(why=why):
            return logging.WARNING, f"its handler could not be begun ({why}); given back uncounted"
        case MessageDied(reason=reason):
            return logging.ERROR, f"put among the dead letters ({reason})"
        case LockEnded(why=why):
            return logging.WARNING, f"its lock is over ({why}); its handler is cancelled, the result thrown away"
        case ResultDiscarded(why=why):
            return logging.WARNING, f"its handler ended when its lock was over ({why}); its result is thrown away"
        case HandlerOverran():
            return logging.ERROR, "its lock is over and its handler still runs; somebody else may have the message"
    return logging.INFO, repr(event)
