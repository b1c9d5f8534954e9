"""The options of ``queue.consume``, in one piece, checked."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TypedDict

from tenure._checks import check_seconds
from tenure._queue.handlers import RunIn
from tenure._queue.hooks import OnError
from tenure._queue.outcomes import NotBegun
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.retry import Reject, Retry, RetryPolicy
from tenure._timing import Timing
from tenure.errors import ConfigError, refuse_generator, refuse_unknown


class ConsumeOptions(TypedDict, total=False):
    """The options of :meth:`tenure.Queue.consume`, explained there; for code that passes them on."""

    concurrency: int
    sessions: bool
    prefetch: int
    max_bytes: int
    max_hold: float
    grace: float
    retry: RetryPolicy | None
    auto_complete: bool
    on_error: OnError | None
    run_in: RunIn
    inbox_window: float
    until_empty: bool
    raise_errors: bool
    sigterm: bool | None
    poll_every: float
    wait: float | None


RENEW_BOUND_EVERY = 2.0
"""Seconds between renewals of locks that end with their connection: so long at most, a handler runs on after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeSettings:
    """The same, with the defaults. :class:`PumpSettings` checks its own when it is made.

    Raises:
        ConfigError: An option can't work.
    """

    concurrency: int = 10
    sessions: bool = False
    prefetch: int = 500
    max_bytes: int = 128 * 2**20
    max_hold: float = 3_600.0
    grace: float = 25.0
    retry: RetryPolicy | None = None
    auto_complete: bool = True
    on_error: OnError | None = None
    run_in: RunIn = "auto"
    inbox_window: float = 0.0
    until_empty: bool = False
    raise_errors: bool = False
    sigterm: bool | None = None
    poll_every: float = 5.0
    wait: float | None = None

    def __post_init__(self) -> None:
        check_seconds("grace", self.grace, least=0.0)
        check_seconds("inbox_window", self.inbox_window, least=0.0)
        if self.wait is not None and self.wait != math.inf:
            check_seconds("wait", self.wait, least=0.0)
        retry: object = self.retry
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise ConfigError(
                f"retry must be a RetryPolicy, not {retry!r:.80}; try retry=tenure.RetryPolicy(initial=1)"
            )
        if self.on_error is not None and not callable(self.on_error):
            raise ConfigError(
                f"on_error must be a function that takes a message and an exception, not {self.on_error!r:.80}"
            )
        refuse_generator("on_error", self.on_error)
        if self.sessions and not self.auto_complete:
            raise ConfigError("auto_complete=False is not for sessions=True; use 'async with queue.session()' instead")

    @classmethod
    def given(cls, options: ConsumeOptions) -> ConsumeSettings:
        """Return the settings that *options* give.

        Raises:
            TypeError: There is no such option.
        """
        refuse_unknown("consume", options, ConsumeOptions.__annotations__)
        return cls(**options)

    @property
    def policy(self) -> RetryPolicy:
        """How long failed messages wait."""
        return self.retry or RetryPolicy()

    def is_to_raise(self, error: BaseException) -> bool:
        """Return whether *error*, of a handler, ends consuming: never if it is a verdict, or no handler was started."""
        return self.raise_errors and not isinstance(error, (Retry, Reject, NotBegun))

    @staticmethod
    def raised_for(error: BaseException) -> BaseException:
        """Return the exception to raise for a handler's *error*: a cancellation would look like the caller's."""
        if not isinstance(error, asyncio.CancelledError):
            return error
        failure = RuntimeError("the handler cancelled itself: it raised CancelledError without being cancelled")
        failure.__cause__ = error
        return failure

    def settings(
        self,
        lock: float,
        *,
        hints: bool = True,
        connection_bound: bool = False,
        surveys: bool = False,
        looks_first: bool = False,
    ) -> PumpSettings:
        """Return the settings of a consumer whose locks last *lock* seconds, or as long as a connection, if that ends.

        Raises:
            ConfigError: An option can't work.
        """
        timing = Timing(lock)
        if connection_bound:  # a lost connection is noticed by the next renewal, which costs next to nothing
            timing = Timing(lock, renew_every=min(timing.renew_every, RENEW_BOUND_EVERY))
        return PumpSettings(
            timing,
            self.concurrency,
            self.prefetch,
            self.max_bytes,
            self.max_hold,
            self.poll_every,
            hints,
            self.until_empty,
            surveys,
            looks_first,
        )
