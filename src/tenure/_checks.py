"""Checks of settings: the error names the setting, its value and the allowed ones."""

from __future__ import annotations

import math

from tenure.errors import ConfigError

LONGEST = 250e9
"""The longest duration, in seconds, and the latest time, in Unix seconds: every store can represent it."""


def check_seconds(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    what: str = "a finite number of seconds",
) -> None:
    """Refuse a value that is not a number of seconds, or more than every clock and store can represent."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) == math.inf or value != value:
        raise ConfigError(f"{name} must be {what}, not {value!r:.80}")
    if abs(value) > LONGEST:
        raise ConfigError(f"{name} must be at most {LONGEST:g} s")
    if above is not None and value <= above:
        raise ConfigError(f"{name} must be more than {above:g} s, not {value:g}")
    if least is not None and value < least:
        raise ConfigError(f"{name} must be at least {least:g}, not {value:g}")


def is_encodable(text: str) -> bool:
    """Return whether a text has a form in UTF-8: one with a lone surrogate, as of bytes that are no text, has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
