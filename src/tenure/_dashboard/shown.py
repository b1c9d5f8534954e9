"""Values as the pages show them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

BODY_MAX = 64 * 1024
"""Bytes of a body that are shown."""

HEX_MAX = 1_024
"""Bytes of a body that are shown in hexadecimal."""

DEPTH_MAX = 32
"""How deep JSON may be nested to be indented; a small body that is nested deeper would be a page of many megabytes."""

_BRACKET_OR_STRING = re.compile(r"""[\[\]{}]|"(?:[^"\\]|\\.)*"?""", re.DOTALL)

_HOLDER = re.compile(r"(?P<label>.+)-(?P<random>[0-9a-f]{32})(?P<count>#\d+)?", re.DOTALL)

_IDENTITY = re.compile(r"(?P<label>.+)-(?P<random>[0-9a-f]{16})", re.DOTALL)


def moment(seconds: float | None) -> str:
    """Return a time in Unix seconds: ISO 8601 in UTC."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")


def duration(seconds: float | None) -> str:
    """Return a duration in its largest unit."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= size * 2:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def holder(text: str) -> str:
    """Return the readable part of a holder, with the first characters of its random part."""
    found = _HOLDER.fullmatch(text)
    return f"{found['label']}-{found['random'][:4]}…{found['count'] or ''}" if found else text


def identity(text: str) -> str:
    """Return the readable part of the identity of a member, with the first characters of its random part."""
    found = _IDENTITY.fullmatch(text)
    return f"{found['label']}-{found['random'][:4]}…" if found else text


def body(content: bytes, most: int = BODY_MAX) -> tuple[str, str]:
    """Return the type of a body, as it is guessed, and so many bytes of it as text."""
    cut = f"\n… {len(content) - most:,} bytes more" if len(content) > most else ""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content[:most], final=not cut)
    except UnicodeDecodeError:
        return "binary", hexadecimal(content)
    if any(letter < " " and letter not in "\t\n\r" for letter in text):
        return "binary", hexadecimal(content)
    if not cut and text.lstrip()[:1] in ("{", "[", '"') and _depth(text) <= DEPTH_MAX:
        try:
            return "JSON", json.dumps(json.loads(text), indent=2, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):  # also a number that JSON has not, and one of thousands of digits
            pass
    return "text", text + cut


def _depth(text: str) -> int:
    """Return how deep brackets are nested, outside of strings."""
    depth = deepest = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        if found[0][0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif found[0][0] in "]}":
            depth -= 1
    return deepest


def hexadecimal(content: bytes) -> str:
    """Return bytes as lines of sixteen, with their letters."""
    lines = []
    for first in range(0, min(len(content), HEX_MAX), 16):
        part = content[first : first + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{first:06x}  {part.hex(' '):<47}  {letters}")
    if len(content) > HEX_MAX:
        lines.append(f"… {len(content) - HEX_MAX:,} bytes more")
    return "\n".join(lines)


def polyline(values: Sequence[int], width: int = 120, height: int = 24) -> str:
    """Return the points of a graph, the newest value at the right: for an SVG of this size."""
    if not values:
        return ""
    top = max(*values, 1)
    step = width / max(len(values) - 1, 1)
    points = (f"{place * step:.1f},{height - 1 - value / top * (height - 2):.1f}" for place, value in enumerate(values))
    return " ".join(points)
