"""Claims whose answer was lost: remembered here, and given back by the next claim on the same queue.

A claim that was given up may have been executed, or may be executed later: then messages are locked without a consumer,
and were counted. Redis keeps the newest claim of each *lane*, an id that a process uses for one claim at a time. A lane
whose claim had no answer is not used again; its mark is sent with the next claims, until one of them has found the
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
"""Lost claims that one claim looks for at most."""
LOST_MAX = 256
"""Lost claims that are remembered for each queue at most."""


@dataclass(slots=True)
class Lost:
    """A claim without an answer.

    Args:
        lane: The lane under which Redis keeps it.
        mark: Distinguishes it from other claims of that lane.
        lock: The seconds that its lock lasts.
        until: The time at which that must have ended: counted from the first answer after it, as a server that answers
            has executed earlier requests.
    """

    lane: str
    mark: str
    lock: float
    until: float | None = None


@dataclass(slots=True)
class Asking:
    """A claim that waits for its answer."""

    lane: str
    mark: str
    lost: Sequence[Lost]
    found: Sequence[bytes] | None = None
    """The lanes of the lost claims that were given back; None while there is no answer."""

    @property
    def arguments(self) -> Iterator[str]:
        """Return the arguments with which the script gives lost claims back."""
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
                self._drop_found(asking.lost, {lane.decode() for lane in asking.found})

    def _lane(self) -> str:
        try:
            return self._free.pop()
        except IndexError:
            return f"{self.asker}.{next(self._numbers)}"

    def _drop_found(self, lost: Sequence[Lost], found: set[str]) -> None:
        now = time.monotonic()
        for one in lost:
            known = self._lost.pop(one.lane, None)
            if known and one.lane not in found and (one.until is None or now <= one.until):
                one.until = one.until or now + one.lock
                self._lost[one.lane] = one  # at the end, so that the next claims look for others first
