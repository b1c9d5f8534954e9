"""Events as log records of the logger ``tenure``: one line each, the values as attributes of the record.

The logger escapes what could end a line, for every handler and formatter: names, reasons and the texts of exceptions.
"""

from __future__ import annotations

import dataclasses
import logging
from datetime import UTC, datetime
from types import TracebackType

from tenure._one_line import Indented, indented
from tenure._telemetry.callbacks import backlog, logger, run_callback
from tenure.events import (
    BrokerAnswered,
    BrokerAwaited,
    BrokerUnanswered,
    CampaignFailed,
    Event,
    GivenBack,
    HandlerNotBegun,
    HandlerOverran,
    LockEnded,
    MessageDied,
    MessageEvent,
    MessageFailed,
    Overrun,
    ReleasedUnused,
    ReleaseMissed,
    RenewalMissed,
    Renewed,
    ResultDiscarded,
    SlotSent,
    SlotsSkipped,
    SlotsWithheld,
    StandingBy,
    TermBegan,
    TermEnded,
    TermEnding,
    TokenFell,
)

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_NO_TRACE = Indented()

TRACES_MAX = 100
"""Exceptions that wait with their frames while a log handler blocks; beyond that, only their text is kept."""


def is_logged(event: Event) -> bool:
    """Return whether *event* would be written: renewals are frequent, and only logged at DEBUG."""
    return not isinstance(event, Renewed) or logger.isEnabledFor(logging.DEBUG)


def log_event(event: Event, exc_info: ExcInfo | None = None) -> None:
    """Write *event* to the log, with *exc_info*, never on the renewal thread: a handler may block.

    The event's fields are in ``record.tenure`` for structured handlers, as they are.
    """
    if exc_info is not None and backlog() >= TRACES_MAX:
        run_callback(_write, event, None, _trace_of(exc_info))
    else:
        run_callback(_write, event, exc_info)


def _trace_of(exc_info: ExcInfo) -> Indented:
    return Indented(f"\n{indented(logging.Formatter().formatException(exc_info))}")


def _write(event: Event, exc_info: ExcInfo | None, trace: Indented = _NO_TRACE) -> None:
    level, message = _record(event)
    if logger.isEnabledFor(level):
        extra = {"tenure": dataclasses.asdict(event)}
        logger.log(level, "%s: %s%s", event.name, message, trace, extra=extra, exc_info=exc_info)


def _record(event: Event) -> tuple[int, str]:
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
            return logging.WARNING, f"could not campaign ({why}); trying again"
        case TermEnding(token=token, reason=reason, deadline=deadline, at=at):
            return logging.INFO, f"term {token} ends ({reason}); work has {max(0.0, deadline - at):.3g} s to stop"
        case Overrun(token=token):
            return logging.ERROR, (
                f"term {token} is over and its work still runs; the lease is left to run out, and this candidate "
                "does not campaign until the work has ended"
            )
        case TermEnded(token=token, reason=reason, released=released):
            return (
                logging.INFO,
                f"term {token} has ended ({reason}), the lease {'is being released' if released else 'is over'}",
            )
        case ReleaseMissed(token=token, why=why, time_left=left):
            then = f"trying again until it runs out, in about {left:.3g} s" if left else "it runs out by itself"
            return logging.WARNING, f"the lease of term {token} could not be released ({why}); {then}"
        case ReleasedUnused(token=token):
            return logging.INFO, f"term {token} was granted too late to be used, and is released"
        case TokenFell(token=token, seen=seen):
            return logging.ERROR, (
                f"the store gives token {token}, and gave {seen} before: it was restored from a copy, or lost data; "
                f"resources that compare tokens refuse this term until tokens are above {seen} again"
            )
        case MessageEvent():
            level, message = _message_record(event)
            return level, f"message {event.id!r}, delivery {event.delivery_count}: {message}"
        case GivenBack(count=count):
            return logging.DEBUG, f"{count} messages given back undelivered, and not counted"
        case BrokerUnanswered(what=what, why=why):
            return logging.WARNING, f"could not {what} ({why}); trying again"
        case BrokerAwaited(why=why):
            return logging.WARNING, f"could not start to consume ({why}); waiting for the store, trying again"
        case BrokerAnswered(waited=waited):  # the same level as BrokerAwaited, so that a log has both or neither
            return logging.WARNING, f"the store answers, after {waited:.3g} s; consuming starts"
        case SlotSent(schedule=schedule, slot=slot, late=late):
            return logging.INFO, f"sent the slot {_moment(slot)} of {schedule!r}, {late:.3g} s late"
        case SlotsSkipped(schedule=schedule, first=first, last=last):
            if first == last:
                return logging.WARNING, f"the slot {_moment(first)} of {schedule!r} was missed, and is not sent"
            which = f"the slots {_moment(first)} to {_moment(last)}"
            return logging.WARNING, f"{which} of {schedule!r} were missed, and are not sent"
        case SlotsWithheld(schedule=schedule, why=why):
            return logging.WARNING, f"no slots of {schedule!r} are sent by this process ({why})"
    return logging.INFO, repr(event)


def _moment(seconds: float) -> str:
    """Return Unix seconds as a moment in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _message_record(event: MessageEvent) -> tuple[int, str]:
    match event:
        case MessageFailed(error=error, delay=delay, place=place):
            then = "a retry can't succeed" if delay is None else f"it may be delivered again, after {delay:.3g} s"
            return logging.WARNING, f"its handler failed ({error}{f', at {place}' if place else ''}); {then}"
        case HandlerNotBegun(why=why):
            return logging.WARNING, f"its handler could not be started ({why}); given back, and not counted"
        case MessageDied(reason=reason):
            return logging.ERROR, f"moved to the dead letters ({reason})"
        case LockEnded(why=why):
            return logging.WARNING, f"its lock is over ({why}); its handler is cancelled, and its result discarded"
        case ResultDiscarded(why=why):
            return logging.WARNING, f"its handler ended after its lock was over ({why}); its result is discarded"
        case HandlerOverran():
            return logging.ERROR, "its lock is over and its handler still runs; another consumer may have the message"
    return logging.INFO, repr(event)
