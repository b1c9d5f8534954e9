"""The names of streams, consumers and subjects: any name of a queue or an election as one word of NATS.

A word may hold every character but white space, ``.``, ``*`` and ``>``; the name of a stream no slashes either, and the
key of a bucket only letters, digits, and ``-/_=``. So what is neither a letter nor a digit, ``-`` nor ``_`` is written
as ``=`` with its code, as in quoted-printable: ``orders/eu`` becomes ``orders=2Feu``.
"""

from __future__ import annotations

import re
from binascii import a2b_qp
from hashlib import sha256

WORD_MAX = 160
"""Characters of a word that is a part of the name of a stream, of which the server takes 255."""

_KEPT = 64
_CUT = "=="  # no word has that: "=" is followed by two digits

_OTHER = re.compile(rb"[^A-Za-z0-9_-]")


def word_of(name: str) -> str:
    """Return *name* as one word."""
    return _OTHER.sub(lambda found: b"=%02X" % found[0][0], name.encode()).decode()


def name_of(word: str) -> str:
    """Return the name that was written as *word*."""
    return a2b_qp(word.encode()).decode(errors="replace")


def name_by(word: str) -> str | None:
    """Return the name that has this word; None if it is cut, or no name has it."""
    try:
        name = name_of(word)
    except UnicodeEncodeError:
        return None
    return name if name and short_word_of(name) == word else None


def short_word_of(name: str) -> str:
    """Return *name* as one word of ``WORD_MAX`` characters at most: a longer one is cut, and ends with a hash."""
    word = word_of(name)
    return word if len(word) <= WORD_MAX else f"{word[:_KEPT]}{_CUT}{sha256(name.encode()).hexdigest()}"


def begins_as(word: str, prefix: str) -> bool:
    """Return whether a name with this *word* may begin with *prefix*: surely not, or perhaps, as a word may be cut."""
    return word.startswith(word_of(prefix)[:_KEPT])


def is_cut(word: str) -> bool:
    """Return whether a word was cut, and doesn't tell the name."""
    return _CUT in word
