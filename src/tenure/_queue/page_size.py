"""How many messages are read at once, where many are looked at: by their bytes, which are known only afterwards."""

from __future__ import annotations

from collections.abc import Iterable

FIRST, GROWTH = 8, 4
"""The size of the first page, and how many times as large the next one may be."""

BYTES = 4 * 2**20
"""Bytes of the bodies of a page, if none is larger than the largest one of the page before; or of one body."""


class PageSize:
    """The size of the next page of messages.

    Args:
        most: The most that it may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.messages = min(FIRST, most)
        """How many messages to read next."""

    def learn(self, sizes: Iterable[int]) -> None:
        """Take note of the *sizes* in bytes of the bodies that the last page had."""
        fitting = BYTES // max(1, *sizes, 1)
        self.messages = max(1, min(self._most, self.messages * GROWTH, fitting))
