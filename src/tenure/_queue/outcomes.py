"""The table of outcomes: the verdict on a message whose handler has ended. Pure.

A handler ends in one of six ways (:class:`Ending`), and may have been cancelled for one of several reasons
(:class:`Reason`). Each pair has one rule: which verdict is passed, and what is reported.

- A result stands whatever the reason: the broker decides whether it came in time.
- A message that was not tried, or whose handler had to stop through no fault of the message, is given back, uncounted.
- No verdict is passed once the lock is over, and none while the handler may still act on the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal, NamedTuple

CancelReason = Literal["denied", "unanswered", "stalled", "max_hold", "drain", "leave"]
"""Why a handler is cancelled."""


class NotBegun(Exception):
    """The handler could not be started, and the message is not the cause."""


class NeverBegins(NotBegun):
    """The handler can never be started: its code has to be corrected."""


class Ending(Enum):
    """How a handler has ended."""

    RETURNED = "returned"
    CANCELLED = "cancelled"
    """By a cancellation: ours if there is a reason, else its own."""
    RAISED = "raised"
    """An exception, or ``Retry`` or ``Reject``, raised or returned."""
    NOT_BEGUN = "not begun"
    """There was no process to run it in."""
    NEVER_BEGINS = "never begins"
    """It can't be run now or later."""
    INBOX_UNANSWERED = "inbox unanswered"
    """It was not called: it is unknown whether the message was handled before."""


class Reason(Enum):
    """Why a handler was cancelled."""

    NONE = "none"
    """It was not."""
    CLOSING = "closing"
    """The consumer is closed, and cancels its workers."""
    DRAIN = "drain"
    """The time of a drain is over."""
    LEAVE = "leave"
    """The time to stop in is over, too."""
    LEFT_BEHIND = "left behind"
    """It was cancelled twice, whatever the reason, and its thread runs on."""
    DENIED = "denied"
    """The broker says that the lock is over."""
    UNANSWERED = "unanswered"
    """Renewals got no answer in time; the lock is not over yet."""
    STALLED = "stalled"
    """This process did not run in time to renew the lock; it is not over yet."""
    MAX_HOLD = "max_hold"
    """It ran for longer than ``max_hold``; the lock is not over yet."""
    TOO_LATE = "too late"
    """One of the last three, and the lock is over by now."""

    @classmethod
    def of(cls, why: CancelReason | None, *, closing: bool, left_behind: bool, over: bool) -> Reason:
        """Return the reason that follows from what is known.

        Args:
            why: Why the handler was cancelled; None if it was not.
            closing: Whether its worker is cancelled.
            left_behind: Whether its thread runs on.
            over: Whether the lock is over.
        """
        if over and why in ("unanswered", "stalled", "max_hold"):
            return cls.TOO_LATE
        if left_behind and why != "denied":  # whatever cancelled it twice: it may still act on the message
            return cls.LEFT_BEHIND
        if why is None:
            return cls.CLOSING if closing else cls.NONE
        return cls(why)


class Disposition(Enum):
    """The verdict on the message."""

    SUCCESS = "success"
    """It is completed, or as the options say: kept for a verdict by other code, remembered in the inbox."""
    FAILURE = "failure"
    """The retry policy decides."""
    GIVE_BACK = "give back"
    """It is unlocked uncounted."""
    LET_EXPIRE = "let expire"
    """No verdict is passed: its lock is over, or left to run out."""


class Reports(Enum):
    """The report that goes with it."""

    NOTHING = "nothing"
    ERROR = "error"
    """The error hook is called with what the handler has raised; ``raise_errors`` raises it."""
    LOCK_LOST = "lock lost"
    """The same, with a ``LockLost`` that names the reason."""
    OVERRUN = "overrun"
    """``HandlerOverran`` is reported to the observers."""


class Rule(NamedTuple):
    """The consequences when a handler has ended; *ends* is whether the consumer ends, too."""

    disposition: Disposition
    reports: Reports
    ends: bool = False


_SUCCESS = Rule(Disposition.SUCCESS, Reports.NOTHING)
_BACK = Rule(Disposition.GIVE_BACK, Reports.NOTHING)
_FAILURE = Rule(Disposition.FAILURE, Reports.ERROR)
_FAILED_BACK = Rule(Disposition.GIVE_BACK, Reports.ERROR)
_FAILED_LATE = Rule(Disposition.LET_EXPIRE, Reports.ERROR)
_STOPPED = Rule(Disposition.FAILURE, Reports.LOCK_LOST)
_STOPPED_BACK = Rule(Disposition.GIVE_BACK, Reports.LOCK_LOST)
_STOPPED_LATE = Rule(Disposition.LET_EXPIRE, Reports.LOCK_LOST)
_OVERRUN = Rule(Disposition.LET_EXPIRE, Reports.OVERRUN)
_USELESS = Rule(Disposition.GIVE_BACK, Reports.ERROR, ends=True)
_USELESS_LATE = Rule(Disposition.LET_EXPIRE, Reports.ERROR, ends=True)

# fmt: off
_ROWS: dict[Reason, tuple[Rule, Rule, Rule, Rule, Rule, Rule]] = {
    #                    RETURNED  CANCELLED      RAISED        NOT_BEGUN     NEVER_BEGINS   INBOX_UNANSWERED
    Reason.NONE:        (_SUCCESS, _FAILURE,      _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.CLOSING:     (_SUCCESS, _BACK,         _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.DRAIN:       (_SUCCESS, _BACK,         _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.LEAVE:       (_SUCCESS, _BACK,         _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.LEFT_BEHIND: (_SUCCESS, _OVERRUN,      _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.DENIED:      (_SUCCESS, _STOPPED_LATE, _FAILED_LATE, _FAILED_LATE, _USELESS_LATE, _BACK),
    Reason.UNANSWERED:  (_SUCCESS, _STOPPED,      _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.STALLED:     (_SUCCESS, _STOPPED_BACK, _FAILED_BACK, _FAILED_BACK, _USELESS,      _BACK),
    Reason.MAX_HOLD:    (_SUCCESS, _STOPPED,      _FAILURE,     _FAILED_BACK, _USELESS,      _BACK),
    Reason.TOO_LATE:    (_SUCCESS, _STOPPED_LATE, _FAILED_LATE, _FAILED_LATE, _USELESS_LATE, _BACK),
}
# fmt: on

RULES: Mapping[tuple[Reason, Ending], Rule] = {
    (reason, ending): rule for reason, row in _ROWS.items() for ending, rule in zip(Ending, row, strict=True)
}
"""The rule for each reason and each ending."""
