"""The settings of a queue as texts, which the scripts read, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenure._foreign import digits, read_or
from tenure._queue.broker import QueueOptions, read_settings

_NAMES = tuple(QueueOptions.__annotations__)
_RATES = frozenset({"rate", "session_rate"})


def encoded_setting(value: Any) -> str:
    """Return the text of a setting: a rate is ``COUNT/SECONDS``, infinity ``inf``, and a truth value 0 or 1."""
    if isinstance(value, tuple):
        count, seconds = value
        return f"{count}/{seconds!r}"
    return repr(int(value) if isinstance(value, bool) else value)


def settings_of(texts: Mapping[bytes, bytes]) -> QueueOptions:
    """Return the settings among the fields of a queue; others are of later versions, or can't be settings."""
    return read_settings({name: _setting(name, texts[name.encode()]) for name in _NAMES if name.encode() in texts})


def _setting(name: str, text: bytes) -> object:
    if name in _RATES and b"/" in text:
        count, _, window = text.partition(b"/")
        return _number(count), _number(window)
    if name == "paused":
        return {b"0": False, b"1": True}.get(text)
    return _number(text)


def _number(text: bytes) -> float | int | None:
    whole = read_or(digits, text, None)
    if whole is not None:
        return whole
    try:
        return float(text)
    except ValueError:
        return None
