"""The keys of a fleet, which may be replaced while its members run.

A member seals what it dials with the first key of its file, and accepts all of them. So a key is replaced in three
steps: each member's file gets the new one as its last; then as its first; then the old one is left out, and whatever
was sealed with it ends.

House rules:

- A file may be half-written: what it has is used when it was found twice, one heartbeat after the other.
- A file may be replaced by mistake: one that has no key from before is not used, as it would cut this member off.
- A file may be on a disk that doesn't answer: it is read in a thread, and no message waits for that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tenure._backends.peers.seal import SharedKey
from tenure._opened import Fact
from tenure._option_files import read_file
from tenure._runtime.threads import in_thread
from tenure._secret import path_shown

KEY_MIN = 16
"""Bytes that a key has at least."""
KEYS_MAX = 4
"""How many keys a file may have: each is tried on the first frame of a connection that somebody else has dialled."""

BYTES_MAX = 65_536
"""Bytes of a file with keys."""

_TEXT = frozenset(b"\t\n\r" + bytes(range(0x20, 0x7F)))
_EMPTY_LINES = re.compile(rb"(?:\r?\n[\t ]*)+\r?\n")


class Keys(Protocol):
    """Where a transport finds the keys for a connection that is made now."""

    def latest(self) -> tuple[SharedKey, ...]:
        """Return the keys: the first to dial with, all of them to accept."""
        ...


def keys_in(content: bytes) -> tuple[bytes, ...]:
    """Return the keys in a file: those of a text have empty lines between them, what is no text is one key.

    A key may have line ends: base64 of more than 48 bytes is written in several lines.

    Raises:
        ValueError: A key is too short, or there are too many; the text says which.
    """
    if len(content) > BYTES_MAX:
        raise ValueError(f"at most {BYTES_MAX:,} bytes, not {len(content):,}")
    whole = content.strip()
    parts = _EMPTY_LINES.split(whole)
    if not _TEXT.issuperset(whole):
        if len(parts) > 1 and _is_utf8(whole):
            raise ValueError("ASCII alone, if there are several keys (an editor may have written a byte order mark)")
        parts = [whole]
    found = tuple(dict.fromkeys(part.strip() for part in parts))
    for number, key in enumerate(found, 1):
        if len(key) < KEY_MIN:
            which = f", not {len(key)}" if len(found) == 1 else f" for each key, and key {number} has {len(key)}"
            raise ValueError(f"at least {KEY_MIN} bytes{which}")
    if len(found) > KEYS_MAX:
        raise ValueError(f"at most {KEYS_MAX} keys, with empty lines between them, not {len(found)}")
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


class KeyFile:
    """A file with keys, which is read again and again.

    Args:
        path: The file.
        content: What it had when it was opened.

    Raises:
        ValueError: It has no keys; see :func:`keys_in`.
    """

    def __init__(self, path: str, content: bytes) -> None:
        self._shown = path_shown(path)
        self._path = os.path.abspath(path)  # a daemon changes its folder
        self.keys: tuple[bytes, ...] = keys_in(content)
        """Those that are used now."""
        self._used = content
        self._found: bytes | None = content
        """What it had at the last look; None: it could not be read."""
        self._refused: bytes | None = None
        """What it had that could not be used."""
        self._report: Callable[[Fact], None] | None = None
        self._has_failed = False

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report what can't be used any more, once until it can."""
        self._report = report

    async def look(self) -> None:
        """Read the file, and use the keys that it has if it had them at the last look, too."""
        try:
            content = await in_thread("tenure-key", partial(read_file, self._path))
        except OSError as error:
            self._found = None
            self._keep(f"it can't be read: {error.strerror}")
            return
        is_settled, self._found = content == self._found, content
        if not is_settled or content == self._refused:
            return
        try:
            if content != self._used:
                self.keys, self._used = self._following(keys_in(content)), content
        except ValueError as error:
            self._refused = content
            self._keep(f"it must hold {error}")
        else:
            self._refused, self._has_failed = None, False

    def _following(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return *keys*, if members that use those from before can talk to this one."""
        if not set(keys) & set(self.keys):
            raise ValueError("one of the keys from before, too: a key is replaced in three steps")
        return keys

    def _keep(self, why: str) -> None:
        if self._has_failed or self._report is None:
            return
        self._has_failed = True
        self._report(
            Fact(
                "key file",
                f"what {self._shown} has now can't be used: {why}",
                "write the keys that members may use, that to dial with first, and empty lines between them; until "
                "then, those from before are used",
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
        """Return the keys that are used now."""
        keys = self._file.keys
        self._bound = {key: self._bound.get(key) or SharedKey.of(key, self._terms) for key in keys}
        return tuple(self._bound.values())

    async def look(self) -> None:
        """Read the file."""
        await self._file.look()
