"""The verdict on a message whose handler did not simply return: again, when, or never. Pure; takes its rng."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from tenure._checks import check_seconds
from tenure._jitter import Rng
from tenure._queue.checks import check_text
from tenure._queue.failures import TRACEBACK_MAX, Failure
from tenure._queue.message import UNDECODABLE, Delivery
from tenure._queue.verdicts import Abandon, DeadLetter, Verdict, check_description
from tenure.errors import ConfigError, DecodeError


class Retry(Exception):
    """Deliver the message again: returned by a handler, or raised.

    It counts as a delivery; the last one allowed still leads to the dead letters.

    Args:
        delay: In how many seconds; without, as the retry policy says.
    """

    def __init__(self, delay: float | None = None) -> None:
        if delay is not None:
            check_seconds("delay", delay, least=0.0)
        super().__init__("to be retried" if delay is None else f"to be retried after {delay:g} s")
        self.delay = delay

    def __reduce__(self) -> tuple[type[Retry], tuple[float | None]]:
        return Retry, (self.delay,)  # it may come from another process


class Reject(Exception):
    """Dead-letter the message, as it can never be handled: returned by a handler, or raised.

    Args:
        reason: A word or two, to group and to filter by.
        description: For later inspection; up to 4,096 characters of it are kept.
    """

    def __init__(self, reason: str, description: str = "") -> None:
        check_text("reason", reason)
        check_description(description)
        super().__init__(f"{reason}: {description}" if description else reason)
        self.reason = reason
        self.description = description

    def __reduce__(self) -> tuple[type[Reject], tuple[str, str]]:
        return Reject, (self.reason, self.description)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a failed message waits before its next delivery: ``initial``, and ``factor`` times longer each time.

    Args:
        initial: Seconds to wait after the first delivery failed.
        factor: The wait is multiplied by this after each further failure.
        maximum: The most seconds to wait.
        jitter: The random share of the wait, so that messages that failed together aren't retried together.
        never: Types of exceptions that no retry mends: the message is dead-lettered at once, with the type's name as
            the reason.

    Raises:
        ConfigError: A setting can't work.
    """

    initial: float = 0.5
    factor: float = 2.0
    maximum: float = 60.0
    jitter: float = 0.2
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "maximum", "jitter"):
            check_seconds(name, getattr(self, name), least=0.0, what="a finite number")
        if self.factor < 1:
            raise ConfigError(f"factor ({self.factor:g}) must be at least 1: a wait doesn't shrink; try factor=2")
        if self.jitter > 1:
            raise ConfigError(f"jitter ({self.jitter:g}) must be at most 1: it is a share of the wait; try jitter=0.2")
        if self.maximum < self.initial:
            raise ConfigError(f"maximum ({self.maximum:g} s) must be at least initial ({self.initial:g} s)")


def delay_after(deliveries: int, policy: RetryPolicy, rng: Rng) -> float:
    """Return how long to wait after so many *deliveries* have failed; never longer than ``policy.maximum``."""
    try:
        grown = policy.initial * policy.factor ** max(deliveries - 1, 0)
    except OverflowError:
        grown = policy.maximum
    return min(grown, policy.maximum) * (1.0 - policy.jitter * rng.random())


def verdict_on_failure(
    error: BaseException,
    deliveries: int,
    policy: RetryPolicy,
    rng: Rng,
    most: int = TRACEBACK_MAX,
    delivery: Delivery | None = None,
) -> Verdict:
    """Return the verdict on a message whose handler raised *error*, or returned it.

    A body that could not be decoded is the same at the next delivery, so that no retry mends it: if it is that of this
    *delivery*, and not of another message that the handler has read. Up to *most* characters of a traceback are kept.
    An error that can't be read, as its own methods fail or its values are none that a verdict takes, is a failure like
    any other.
    """
    with suppress(BaseException):
        match error:
            case Reject(reason=reason, description=description):
                check_text("reason", reason)
                return DeadLetter(reason, description, _cause(error, most))
            case Retry(delay=delay):
                if delay is not None:
                    check_seconds("delay", delay, least=0.0)
                return Abandon(delay_after(deliveries, policy, rng) if delay is None else delay, _cause(error, most))
            case DecodeError() if delivery is not None and (error.queue, error.sequence) == delivery[:2]:
                failure = Failure.of(error, most)
                return DeadLetter(UNDECODABLE, failure.message, failure)
            case _ if isinstance(error, policy.never):
                failure = Failure.of(error, most)
                return DeadLetter(failure.type, failure.message, failure)
    return Abandon(delay_after(deliveries, policy, rng), Failure.of(error, most))


def _cause(error: BaseException, most: int) -> Failure | None:
    """Return the cause of a handler's *error*: the exception that it was handling, if there was one."""
    cause = error.__cause__ if error.__cause__ is not None else error.__context__
    return Failure.of(cause, most) if cause is not None else None
