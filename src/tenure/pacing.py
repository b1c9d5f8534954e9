"""When to renew, when to ask again, when to stop believing: durations in seconds, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tenure.errors import ConfigError

ATTEMPTS_MIN = 3
"""A term must survive two lost answers in a row, so three questions must fit into its trusted time."""

RENEWALS_TOGETHER = 0.2
"""A renewal may go out this share of ``renew_every`` early, so that many of one process share one statement."""

MARGIN_MOST = 1.0
"""A margin that follows from ``ttl`` is never longer."""

DERIVED: Final[Any] = None
"""The default of a time that follows from another if it is not given; once a ``Timing`` is built, it is a number."""

SHORTEST = 1e-6
"""Nothing is asked more often, in seconds: no clock and no timer is finer."""

LONGEST = 250e9
"""Nothing lasts longer, in seconds, and no moment is later, in Unix seconds: every store can count so far."""


class Dice(Protocol):
    """A source of uniform numbers in [0, 1): ``random.Random`` is one, a simulation brings its own."""

    def random(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of an election, in seconds, all counted on the candidate's own clock.

    Unset ones follow from ``ttl``: ``renew_every`` a third, ``retry_every`` two fifteenths (at most 2 s), ``margin`` a
    twentieth (at most 1 s), ``grace`` two fifteenths (at most 2 s). So ``Timing()`` is 15 / 5 / 2 / 5 % / 0.75 / 2.

    Args:
        ttl: Length of a lease. A dead leader's name is free after this time.
        renew_every: From one renewal to the next.
        retry_every: From an unanswered question to the next one, and between looks of a candidate that stands by.
        drift: By which share the store's clock may run faster than ours.
        margin: Trusted time given up, on top of ``drift``, for scheduling delays.
        grace: How long cancelled work has to end before the term stops being trusted.

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
        self._derive("margin", min(MARGIN_MOST, self.ttl / 20))
        self._derive("grace", min(2.0, self.ttl * 2 / 15))
        for name in ("renew_every", "retry_every"):
            check_seconds(name, getattr(self, name), above=0.0, least=SHORTEST)
        for name in ("drift", "margin", "grace"):
            check_seconds(name, getattr(self, name), least=0.0)
        if self.drift >= 1.0:
            raise ConfigError(f"drift ({self.drift:g}) must be less than 1: it is a share of ttl; try drift=0.05")
        if self.window <= self.grace:
            ttl = 3 * (self.grace + max(self.margin, MARGIN_MOST)) / (1 - self.drift)
            raise ConfigError(
                f"grace ({self.grace:g} s) must be less than ttl − drift·ttl − margin ({self.window:g} s); "
                f"try {f'grace={_round_down(self.window / 5):g} or ' if self.window > 0 else ''}ttl={math.ceil(ttl)}"
            )
        if self.renew_every >= self.office:
            raise ConfigError(
                f"renew_every ({self.renew_every:g} s) must be less than ttl − drift·ttl − margin − grace "
                f"({self.office:g} s); try renew_every={_round_down(self.office / 2):g}"
            )
        if self.attempts < ATTEMPTS_MIN:
            fits = _round_down((self.office - self.renew_every) / (ATTEMPTS_MIN - 1))
            raise ConfigError(
                f"retry_every ({self.retry_every:g} s) leaves room for {self.attempts} attempts to renew between "
                f"renew_every ({self.renew_every:g} s) and ttl − drift·ttl − margin − grace ({self.office:g} s), "
                f"and {ATTEMPTS_MIN} are needed; try retry_every={fits:g}"
            )

    @property
    def window(self) -> float:
        """How long after the question was sent a grant may be believed."""
        return self.ttl - self.drift * self.ttl - self.margin

    @property
    def office(self) -> float:
        """How long after the question was sent work may run before it is told to stop."""
        return self.window - self.grace

    @property
    def attempts(self) -> int:
        """How many questions to renew fit in before work is told to stop."""
        return 1 + math.floor((self.office - self.renew_every) / self.retry_every + 1e-9)

    def _derive(self, name: str, value: float) -> None:
        if getattr(self, name) is DERIVED:
            object.__setattr__(self, name, value)


def check_seconds(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    what: str = "a finite number of seconds",
) -> None:
    """Refuse what is no number of seconds, or more than every clock and store can count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) == math.inf or value != value:
        raise ConfigError(f"{name} must be {what}, not {value!r:.80}")
    if abs(value) > LONGEST:
        raise ConfigError(f"{name} must be at most {LONGEST:g} s")
    if above is not None and value <= above:
        raise ConfigError(f"{name} must be more than {above:g} s, not {value:g}")
    if least is not None and value < least:
        raise ConfigError(f"{name} must be at least {least:g}, not {value:g}")


def sooner(duration: float, dice: Dice, share: float = 0.1) -> float:
    """Return *duration* shortened by a random part of *share*, for renewals: they may be early, never late."""
    return duration * (1.0 - share * dice.random())


def later(duration: float, dice: Dice, share: float = 0.2) -> float:
    """Return *duration* lengthened by a random part of *share*, so that equal candidates don't ask in step."""
    return duration * (1.0 + share * dice.random())


def _round_down(seconds: float) -> float:
    """Round to two significant digits, downwards, so that what a message suggests does fit."""
    if seconds <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.floor(seconds / step + 1e-9) * step:.12g}")
