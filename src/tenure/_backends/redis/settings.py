"""The settings of a queue as texts, which the scripts read, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from tenure._queue.broker import QueueOptions, QueueSettings

_RATES = frozenset({"rate", "session_rate"})


def encoded_setting(value: Any) -> str:
    """Return the text of a setting: a rate is ``COUNT/SECONDS``, infinity ``inf``, and a truth value 0 or 1."""
    if isinstance(value, tuple):
        count, seconds = value
        return f"{count}/{seconds!r}"
    return repr(int(value) if isinstance(value, bool) else value)


def settings_of(texts: Mapping[bytes, bytes]) -> QueueOptions:
    """Return the settings among the fields of a queue; others are of later versions."""
    known: dict[str, Any] = {}
    for field in fields(QueueSettings):
        text = texts.get(field.name.encode())
        if text is not None:
            known[field.name] = _setting(field.name, field.default, text)
    return cast(QueueOptions, known)


def _setting(name: str, default: object, text: bytes) -> object:
    if name in _RATES and b"/" in text:
        count, seconds = text.split(b"/")
        return int(count), float(seconds)
    if name == "max_locked":
        return math.inf if text == b"inf" else int(text)
    if isinstance(default, bool):
        return text == b"1"
    return float(text) if isinstance(default, float) else int(text)
