"""The rule for sets and mappings in typed bodies: not many different values with one hash.

A sender can choose numbers, and what is made of them, with one hash: then each takes as long as all those before.
"""

from __future__ import annotations

from typing import Any

from tenure._queue.typed_values import Misfit, shown_briefly

UNCHECKED = 1_000
"""Values of a set, or keys of a mapping, whose hashes may all be equal: that takes some milliseconds."""

COLLISIONS_MAX = 100
"""Different values with one hash in a larger one, at most."""


class Hashes:
    """The hashes of the values of a set, or of the keys of a mapping, while it grows."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, value: Any) -> None:
        """Count one more different value, if a sender can choose its hash: texts have secret ones."""
        if isinstance(value, (str, bytes)):
            return
        hashed = hash(value)
        self._counts[hashed] = count = self._counts.get(hashed, 0) + 1
        if count > COLLISIONS_MAX:
            raise Misfit(
                f"has more than {COLLISIONS_MAX} different values with one hash, such as {shown_briefly(value)}"
            )


def refused_if_colliding(values: list[Any]) -> list[Any]:
    """Return *values*, or refuse them if too many that differ have one hash."""
    if len(values) > UNCHECKED:
        hashes = Hashes()
        different: set[Any] = set()
        for value in values:
            if value not in different:
                hashes.note(value)
                different.add(value)
    return values
