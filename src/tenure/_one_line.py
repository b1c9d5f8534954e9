"""Text that others wrote, on lines of ours: in logs, on terminals and in JSON.

What could end a line, move the cursor, reverse the text or not be written at all is escaped: whatever Python does not
call printable. Those are control characters (C0, DEL, C1), the separators of lines and paragraphs, marks of direction,
other characters without a shape, spaces other than the usual one, and half surrogate pairs.
"""

from __future__ import annotations

INDENT = "    "


def one_line(text: str) -> str:
    """Return *text* on one line: each character that is not printable is escaped as in a literal of Python."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class Indented(str):
    """Lines that are indented, each on one line, so that none looks like the beginning of an entry."""

    __slots__ = ()


def indented(text: str) -> Indented:
    """Return the lines of *text*, each on one line and indented."""
    return Indented("\n".join(f"{INDENT}{one_line(line)}".rstrip() for line in text.splitlines()))
