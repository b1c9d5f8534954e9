"""When to renew, when to repeat a request, how long to trust a lease: durations in seconds, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from tenure._checks import LONGEST, check_seconds
from tenure.errors import ConfigError

ATTEMPTS_MIN = 3
"""A term must survive two lost answers in a row, so three requests must fit into its trusted time."""

EARLY_RENEWAL_SHARE = 0.6
"""A renewal may go out this share of its wait early, so that the renewals of one process share a statement.

With a half and some jitter, two groups of leases become one: at the renewal of one of them, half of the other's wait is
over.
"""

MARGIN_MAX = 1.0
"""The longest margin that is derived from ``ttl``."""

DERIVED: Final[Any] = None
"""The default of a time that is derived from others; in a built ``Timing`` it is a number."""

SHORTEST = 1e-6
"""The shortest time between requests, in seconds: no clock and no timer is finer."""

ROOM_MIN = 5 * SHORTEST
"""The shortest time for the work, in seconds, into which half for a renewal and a quarter for each retry fit."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an election, in seconds, all counted on the candidate's own clock.

    Unset ones are derived from ``ttl``: ``renew_every`` is a third, ``retry_every`` two fifteenths (at most 2 s),
    ``margin`` a twentieth (at most 1 s), ``grace`` two fifteenths (at most 2 s). So ``Timing()`` is
    15 / 5 / 2 / 5 % / 0.75 / 2.

    Args:
        ttl: Length of a lease. A dead leader's name is free after this time.
        renew_every: Time between renewals.
        retry_every: Time until an unanswered request is repeated, and between those of a candidate that stands by.
        drift: The share by which the store's clock may run faster than ours.
        margin: Trusted time given up, on top of ``drift``, for scheduling delays.
        grace: Time for cancelled work to end before the term is no longer trusted.

    Raises:
        ConfigError: The settings leave room for fewer than three attempts to renew. The message shows both values
            and a setting that fits.
    """

    ttl: float = 15.0
    renew_every: float = DERIVED
    retry_every: float = DERIVED
    drift: float = 0.05
    margin: float = DERIVED
    grace: float = DERIVED

    def __post_init__(self) -> None:
        check_seconds("ttl", self.ttl, above=0.0)
        self._derive("renew_every", self.ttl / 3)
        self._derive("retry_every", min(2.0, self.ttl * 2 / 15))
        self._derive("margin", min(MARGIN_MAX, self.ttl / 20))
        self._derive("grace", min(2.0, self.ttl * 2 / 15))
        for name in ("renew_every", "retry_every"):
            check_seconds(name, getattr(self, name), above=0.0, least=SHORTEST)
        for name in ("drift", "margin", "grace"):
            check_seconds(name, getattr(self, name), least=0.0)
        if self.drift >= 1.0:
            raise ConfigError(f"drift ({self.drift:g}) must be less than 1: it is a share of ttl; try drift=0.05")
        if self.window <= self.grace:
            raise ConfigError(
                f"grace ({self.grace:g} s) must be less than ttl − drift·ttl − margin ({self.window:g} s); "
                f"try {f'grace={_round_down(self.window / 5):g} or ' if self.window > 0 else ''}{self._ample_lease()}"
            )
        if self.renew_every >= self.work_window:
            raise ConfigError(
                f"renew_every ({self.renew_every:g} s) must be less than ttl − drift·ttl − margin − grace "
                f"({self.work_window:g} s); try {self._fitting_renewal()}"
            )
        if self.attempts < ATTEMPTS_MIN:
            fits = _round_down((self.work_window - self.renew_every) / (ATTEMPTS_MIN - 1))
            hint = f"retry_every={fits:g}" if fits >= SHORTEST else self._fitting_renewal()
            raise ConfigError(
                f"retry_every ({self.retry_every:g} s) leaves room for {self.attempts} attempts to renew between "
                f"renew_every ({self.renew_every:g} s) and ttl − drift·ttl − margin − grace ({self.work_window:g} s), "
                f"and {ATTEMPTS_MIN} are needed; try {hint}"
            )

    @property
    def window(self) -> float:
        """The seconds, from before a request is sent, for which its grant is trusted."""
        return self.ttl - self.drift * self.ttl - self.margin

    @property
    def work_window(self) -> float:
        """The seconds, from before a request is sent, after which the work is cancelled if no further grant comes."""
        return self.window - self.grace

    @property
    def attempts(self) -> int:
        """The number of renewal requests that fit in before the work is cancelled."""
        return 1 + math.floor((self.work_window - self.renew_every) / self.retry_every + 1e-9)

    def _fitting_renewal(self) -> str:
        """Return a setting that leaves room for renewals: half of the work's time, or a longer lease."""
        if self.work_window >= ROOM_MIN:
            return f"renew_every={_round_down(self.work_window / 2):g}"
        return self._ample_lease()

    def _ample_lease(self) -> str:
        """Return a setting with which the lease is long enough for the others."""
        ttl = math.ceil(3 * (self.grace + max(self.margin, MARGIN_MAX)) / (1 - self.drift))
        return f"ttl={ttl}" if ttl <= LONGEST else "drift=0.05"

    def _derive(self, name: str, value: float) -> None:
        if getattr(self, name) is DERIVED:
            object.__setattr__(self, name, value)


def _round_down(seconds: float) -> float:
    """Round to two significant digits, downwards, so that a suggested value does fit."""
    if seconds <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.floor(seconds / step + 1e-9) * step:.12g}")
