"""Decides what becomes of a message when its handler has ended, by the table of outcomes, and reports it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from tenure._jitter import later
from tenure._queue.context import QueueContext, loss_message
from tenure._queue.failures import text_of, traceback_most
from tenure._queue.handlers import Handlers, RanToEnd
from tenure._queue.hooks import call_error_hook
from tenure._queue.message import Delivery
from tenure._queue.options import ConsumeSettings
from tenure._queue.outcomes import (
    RULES,
    CancelReason,
    Disposition,
    Ending,
    NeverBegins,
    NotBegun,
    Reason,
    Reports,
    Rule,
)
from tenure._queue.received import Message, answer_to, completion
from tenure._queue.reply import Reply
from tenure._queue.reports import event_of, report_unanswered
from tenure._queue.retry import Reject, Retry, RetryPolicy, verdict_on_failure
from tenure._queue.running import CURRENT_CONSUMER
from tenure._queue.tracebacks import place_of
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Complete, Verdict
from tenure._timing import Timing
from tenure.errors import ConfigError, DecodeError, LockLost
from tenure.events import (
    HandlerOverran,
    MessageFailed,
)

WHY = {
    "denied": "the broker answered that its lock is over",
    "unanswered": "renewals got no answer in time",
    "stalled": "this process did not run in time to renew it; use run_in='process' for work that holds the GIL",
    "max_hold": "the handler ran for longer than max_hold",
}


class InboxUnanswered(Exception):
    """The inbox gave no answer: a message may have been handled before, so no handler gets it now."""


def ending_of(outcome: object) -> Ending:
    """Return how a handler has ended, from its result or its exception."""
    if not issubclass(type(outcome), BaseException):  # by type: __class__ of a result may be anything
        return Ending.RETURNED
    match outcome:
        case asyncio.CancelledError():
            return Ending.CANCELLED
        case InboxUnanswered():
            return Ending.INBOX_UNANSWERED
        case NeverBegins():
            return Ending.NEVER_BEGINS
        case NotBegun():
            return Ending.NOT_BEGUN
    return Ending.RAISED


class LockTrust(Protocol):
    """How far the locks of messages are trusted: the pump."""

    def trusted_until(self, delivery: Delivery) -> float:
        """Return until when the lock of a message is trusted."""
        ...

    def has_overrun(self, delivery: Delivery) -> bool:
        """Return whether it was reported that a handler runs on though its lock is over."""
        ...


class Judge:
    """Decides what becomes of the messages of one consumer, and calls its error hook.

    Args:
        context: Where the broker is reached.
        consuming: The options of the consumer.
        handlers: Where its handlers run.
        end_with: Ends the consumer gracefully, and lets it raise this.
        consumer: The consumer, for :data:`CURRENT_CONSUMER`.
    """

    def __init__(
        self,
        context: QueueContext,
        consuming: ConsumeSettings,
        handlers: Handlers,
        end_with: Callable[[BaseException], None],
        consumer: object,
    ) -> None:
        self._context = context
        self._consuming = consuming
        self._handlers = handlers
        self._end_with = end_with
        self._consumer = consumer
        self.success: Verdict | None = None
        """The verdict on a message whose handler has simply returned; None keeps it for a verdict by other code."""
        if consuming.auto_complete:
            window = consuming.inbox_window
            self.success = Complete(remember=window) if window else COMPLETE

    async def judge(
        self, message: Message, outcome: object, why: CancelReason | None, closing: bool, trust: LockTrust
    ) -> Verdict | Literal[Disposition.LET_EXPIRE] | None:
        """Return what becomes of *message*, whose handler did more than return, as :data:`RULES` say; report it.

        Args:
            message: What the handler was called with.
            outcome: What it raised or returned.
            why: Why it was cancelled, if it was.
            closing: Whether its worker is cancelled.
            trust: Knows until when the lock of a message is trusted.
        """
        delivery = message.delivery
        if isinstance(outcome, RanToEnd) and why in ("drain", "leave"):
            outcome = outcome.outcome  # its lock was kept all the while, so the verdict on it is as good as any
        answered: Verdict | None = None
        if issubclass(type(outcome), Reply):
            assert isinstance(outcome, Reply)
            try:
                answered = self._answered(message, outcome)
            except Exception as error:  # it can't be sent, or is of a class whose own code fails
                outcome = error
        ending = ending_of(outcome)

        def rule() -> Rule:
            over = trust.trusted_until(delivery) <= self._context.clock.now()
            left_behind = self._handlers.is_left_behind(delivery)
            return RULES[Reason.of(why, closing=closing, left_behind=left_behind, over=over), ending]

        reports = rule().reports
        if reports is Reports.OVERRUN and not trust.has_overrun(delivery):
            self._context.emit(event_of(HandlerOverran, self._context, delivery))
        elif reports is Reports.LOCK_LOST:
            outcome = LockLost(_loss_message(delivery, why))
        if reports in (Reports.ERROR, Reports.LOCK_LOST):
            assert isinstance(outcome, BaseException)
            await self.call_error_hook(message, outcome)
            if self._consuming.is_to_raise(outcome):
                self._end_with(self._consuming.raised_for(outcome))
        disposition, _, ends = rule()  # once more: the error hook may have taken until the lock was over
        if ends and isinstance(outcome, NeverBegins):
            self._end_with(unusable(outcome))
        match disposition:
            case Disposition.SUCCESS:
                return self.success if answered is None else answered
            case Disposition.GIVE_BACK:
                return GIVE_BACK
            case Disposition.LET_EXPIRE:
                return Disposition.LET_EXPIRE
        assert isinstance(outcome, BaseException)
        return judge_failure(self._context, self._consuming.policy, delivery, outcome)

    def _answered(self, message: Message, reply: Reply) -> Verdict | None:
        """Return the verdict that completes *message* and sends *reply*; None if no answer is expected.

        Raises:
            ConfigError: The answer can't be sent.
        """
        if message.reply_to is None:
            return None
        return completion(self._context, [answer_to(message, reply)], self._consuming.inbox_window)

    async def call_error_hook(self, message: Message, error: BaseException) -> None:
        """Call the error hook with *error*, a failure of the handler of *message*."""
        CURRENT_CONSUMER.set(self._consumer)
        if (interrupt := await call_error_hook(self._consuming.on_error, message, error)) is not None:
            self._end_with(interrupt)

    async def was_handled(self, delivery: Delivery, timing: Timing) -> bool:
        """Return whether the message is in the inbox.

        Raises:
            InboxUnanswered: The inbox gave no answer. Raised after a pause, so that requests are not repeated at once.
        """
        try:
            return (await self._context.handled([delivery.id]))[0]
        except Exception as error:
            if (why := self._context.why_unanswered(error)) is None:
                raise
            report_unanswered(self._context, "read the inbox", why)
            await asyncio.sleep(later(timing.retry_every, self._context.rng))
            raise InboxUnanswered from error


def _loss_message(delivery: Delivery, why: CancelReason | None) -> str:
    assert why is not None
    if delivery.session is not None and why != "max_hold":
        what = f"session {delivery.session!r} was lost while its handler ran, for {WHY[why]}"
    else:
        what = f"its handler was cancelled, for {WHY[why]}"
    return loss_message(delivery, what)


def unusable(error: NeverBegins) -> ConfigError:
    """Return the error that ends a consumer whose handler can never be started."""
    failure = ConfigError(str(error))
    failure.__cause__ = error.__cause__
    return failure


def judge_failure(context: QueueContext, retry: RetryPolicy, delivery: Delivery, error: BaseException) -> Verdict:
    """Return the verdict on a message whose handler failed with *error*, and emit the event of it."""
    most = traceback_most(delivery.delivery_count, context.settings.max_deliveries)
    verdict = verdict_on_failure(error, delivery.delivery_count, retry, context.rng, most, delivery)
    if not isinstance(error, Reject):
        delay = verdict.delay if isinstance(verdict, Abandon) else None
        what, place = f"{type(error).__name__}: {text_of(error)}", place_of(error)
        # For a body that can't be decoded, the text is enough.
        is_news = not isinstance(error, (Retry, DecodeError)) and context.is_news(delivery, f"{type(error)} {place}")
        event = event_of(MessageFailed, context, delivery, what, delay, place)
        context.emit(event, error if is_news else None)
    return verdict
