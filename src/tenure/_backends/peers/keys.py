"""The keys of a fleet, which may be replaced while its members run.

A member seals what it dials with the first key of its file, and accepts all of them. So a key is replaced in three
steps: each member's file gets the new one as its last; then as its first; then the old one is left out, and whatever
was sealed with it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from tenure._backends.peers.seal import SharedKey
from tenure._opened import Fact
from tenure._option_files import read_file
from tenure._secret import path_shown

KEY_MIN = 16
"""Bytes that a key has at least."""
KEYS_MAX = 4
"""How many keys a file may have: each is tried on the first frame of a connection that somebody else has dialled."""

_TEXT = frozenset(b"\t\n\r" + bytes(range(0x20, 0x7F)))


class Keys(Protocol):
    """Where a transport finds the keys for a connection that is made now."""

    def latest(self) -> tuple[SharedKey, ...]:
        """Return the keys: the first to dial with, all of them to accept."""
        ...


def keys_in(content: bytes) -> tuple[bytes, ...]:
    """Return the keys in a file: one in each line of a text, or all of what is none.

    Raises:
        ValueError: A key is too short, or there are too many; the text says which.
    """
    whole = content.strip()
    lines = [line.strip() for line in whole.splitlines()] if _TEXT.issuperset(whole) else [whole]
    found = tuple(dict.fromkeys(line for line in lines if line)) or (b"",)
    for number, key in enumerate(found, 1):
        if len(key) < KEY_MIN:
            which = "" if len(found) == 1 else f" in each line, and key {number} has {len(key)}"
            raise ValueError(f"at least {KEY_MIN} bytes{which or f', not {len(key)}'}")
    if len(found) > KEYS_MAX:
        raise ValueError(f"at most {KEYS_MAX} keys, one in each line, not {len(found)}")
    return found


class KeyFile:
    """A file with keys, which is read again when it has changed.

    Args:
        path: The file.
        content: What it had when it was opened.

    Raises:
        ValueError: It has no keys; see :func:`keys_in`.
    """

    def __init__(self, path: str, content: bytes) -> None:
        self._shown = path_shown(path)
        self._path = os.path.abspath(path)  # a daemon changes its folder
        self._content = content
        self._keys = keys_in(content)
        self._report: Callable[[Fact], None] | None = None
        self._has_failed = False

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report what can't be used any more, once until it can."""
        self._report = report

    def latest(self) -> tuple[bytes, ...]:
        """Return the keys that the file has now; those from before, if it can't be used."""
        try:
            content = read_file(self._path)
            if content != self._content:
                self._keys, self._content = keys_in(content), content
        except OSError as error:
            self._keep(f"it can't be read: {error.strerror}")
        except ValueError as error:
            self._keep(f"it must hold {error}")
        else:
            self._has_failed = False
        return self._keys

    def _keep(self, why: str) -> None:
        is_new, self._has_failed = not self._has_failed, True
        if is_new and self._report is not None:
            self._report(
                Fact(
                    "key file",
                    f"what {self._shown} has now can't be used: {why}",
                    "write the keys that members may use, one in each line, that to dial with first; until then, those "
                    "from before are used",
                    "peers-key-not-renewed",
                )
            )


class KeysOfFleet:
    """The keys in a file, bound to the terms of a fleet."""

    def __init__(self, file: KeyFile, terms: str) -> None:
        self._file = file
        self._terms = terms
        self._bound: dict[bytes, SharedKey] = {}

    def latest(self) -> tuple[SharedKey, ...]:
        """Return the keys that the file has now."""
        keys = self._file.latest()
        self._bound = {key: self._bound.get(key) or SharedKey.of(key, self._terms) for key in keys}
        return tuple(self._bound.values())
