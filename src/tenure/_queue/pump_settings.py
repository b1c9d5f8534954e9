"""How a consumer works, and until when it may trust a lock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenure._checks import check_seconds
from tenure._lease import trusted_until
from tenure._queue.checks import check_count
from tenure._timing import Timing


@dataclass(frozen=True, slots=True)
class PumpSettings:
    """How a consumer works. Times in seconds.

    Args:
        timing: The times of a lock, as of a lease; ``timing.ttl`` is its length.
        concurrency: How many handlers run at once.
        prefetch: How many messages may wait in the buffer. How many do follows from the pace of the handlers.
        max_bytes: How many bytes the bodies of all messages in hand may have, before no more are claimed.
        max_hold: How long a handler may run before it is cancelled, its lock renewed all the while.
        poll_every: How often to look for messages if no hint comes.
        hints: Whether the broker gives hints of new messages; without, an idle consumer looks more often.
        until_empty: Whether it ends when nothing is left.
        surveys: Whether the broker tells in one request which of many queues hold messages.
        looks_first: Whether to wait for another answer before a claim that follows one without.

    Raises:
        ConfigError: A setting can't work.
    """

    timing: Timing
    concurrency: int = 10
    prefetch: int = 500
    max_bytes: int = 128 * 2**20
    max_hold: float = 3_600.0
    poll_every: float = 5.0
    hints: bool = True
    until_empty: bool = False
    surveys: bool = False
    looks_first: bool = False

    def __post_init__(self) -> None:
        check_count("concurrency", self.concurrency)
        check_count("prefetch", self.prefetch, least=0)
        check_count("max_bytes", self.max_bytes)
        for name in ("max_hold", "poll_every"):
            value = getattr(self, name)
            if value != math.inf:  # for ever, never
                check_seconds(name, value, above=0.0)


def lock_trusted_until(asked_at: float, timing: Timing) -> float:
    """Return until when a lock asked for at *asked_at* is trusted."""
    return trusted_until(asked_at, timing.ttl, timing.drift, timing.margin)
