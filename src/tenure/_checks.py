"""Checks of what users give: a message names the setting, shows its value and says what fits."""

from __future__ import annotations

import math

from tenure.errors import ConfigError

LONGEST = 250e9
"""Nothing lasts longer, in seconds, and no moment is later, in Unix seconds: every store can count so far."""


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
