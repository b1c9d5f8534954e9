"""Claims whose answer was lost: remembered here, and given back by the next claim on the same queue.

A claim that was given up may have been carried out, or may be yet: then messages are locked without a consumer, and
were counted. Redis keeps the newest claim of each *lane*, a process's name for one claim under way. A lane whose
claim had no answer is not used again; its mark is sent along with the next claims, until one of them has found the
lost claim and given it back, or the lock of the lost claim must have ended.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice

SENT_MAX = 8
"""So many lost claims are looked for by one claim."""
LOST_MAX = 256
"""So many are remembered for each queue."""


@dataclass(slots=True)
class Lost:
    """A claim without an answer.

    Args:
        lane: Where Redis keeps it.
        mark: Distinguishes it from other claims of that lane.
        lock: How many seconds its lock lasts.
        until: When that must have ended: counted from the first answer after it, as a server that answers has carried
            out what came before.
    """

    lane: str
    mark: str
    lock: float
    until: float | None = None


@dataclass(slots=True)
class Asking:
    """One claim under way."""

    lane: str
    mark: str
    lost: Sequence[Lost]
    found: Sequence[bytes] | None = None
    """The lanes of the lost claims that were given back; None while there is no answer."""

    @property
    def arguments(self) -> Iterator[str]:
        """Return what the script needs to give lost claims back."""
        for lost in self.lost:
            yield from (lost.lane, lost.mark)


@dataclass(slots=True)
class Claims:
    """The claims of one process on one queue. May be used by several threads."""

    asker: str
    _free: list[str] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)
    _lost: dict[str, Lost] = field(default_factory=dict)

    @contextmanager
    def asking(self, lock: float, mark: str | None = None) -> Iterator[Asking]:
        """Give a lane to the claim inside the block; without an answer at its end, the claim is lost."""
        asking = Asking(self._lane(), mark or secrets.token_hex(8), list(islice(list(self._lost.values()), SENT_MAX)))
        try:
            yield asking
        finally:
            if asking.found is None:
                self._lost[asking.lane] = Lost(asking.lane, asking.mark, lock)
                for oldest in list(self._lost)[: max(0, len(self._lost) - LOST_MAX)]:
                    self._lost.pop(oldest, None)
            else:
                self._free.append(asking.lane)
                self._look_back(asking.lost, {lane.decode() for lane in asking.found})

    def _lane(self) -> str:
        try:
            return self._free.pop()
        except IndexError:
            return f"{self.asker}.{next(self._numbers)}"

    def _look_back(self, lost: Sequence[Lost], found: set[str]) -> None:
        now = time.monotonic()
        for one in lost:
            known = self._lost.pop(one.lane, None)
            if known and one.lane not in found and (one.until is None or now <= one.until):
                one.until = one.until or now + one.lock
                self._lost[one.lane] = one  # at the end, so that others are looked for first
