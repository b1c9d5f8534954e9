"""One schedule in one process, as a pure state machine: it says what to ask the store next, and is told the answer.

Rules:

- Every process that runs the schedule does the same, and none leads. The store keeps until when slots are settled; a
  process *advances* that, and the store sends the messages of the slots in the same step, but only if what it keeps is
  still what the process has seen. So of many processes, one sends a slot; if it dies before, another does it.
- The clock of the store decides when a slot is due, and the store refuses to advance before. A process knows that
  clock only by the answers, and looks again now and then.
- A schedule that is new begins with its next slot. So does one whose plan has changed, once the slots are settled that
  were due by the plan before.
- The plan that counts is the one that is kept: the process that was started last has written it, once. All that run go
  by it, and none writes its own a second time. So two programs with different plans don't take turns.
- While slots are withheld, as the schedule is paused or the store's clock was set back, a process looks when the next
  one would be due. So when the schedule is resumed, its next slot comes in time, and nobody has to tell the processes.
- A request without an answer may have been carried out: the process looks, and goes by what it finds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from tenure._jitter import Rng, later, sooner
from tenure._schedule.plan import Plan, Record
from tenure._schedule.slots import Slots, first_after, newest, slots_of
from tenure.errors import ConfigError

LOOK_EVERY = 60.0
"""Seconds after which what is kept is looked at again, and the store's clock with it; or up to a tenth sooner."""

WITHHELD_EVERY = 1.0
"""Seconds at least between two looks while slots are withheld that are due more often."""

RETRY_MIN, RETRY_MAX = 0.5, 15.0
"""Seconds until a request is repeated that got no answer: at first, and after many."""

AFTER = 0.001
"""Seconds from a slot to its request: rounding must not make it come too early."""

EARLY_MIN = 0.005
"""Seconds until a request is repeated that came too early, at least."""

BUSY = 1.0
"""Seconds until a request is repeated while the store sends the same slots for another process."""

ALL_MAX = 100
"""How many missed slots are sent at most, the newest ones, if all are to be."""

BEHIND_MIN = 5.0
"""Seconds that the store's clock must be behind the newest settled slot, until that is reported."""


class Wait(NamedTuple):
    """Nothing is to be asked before this time of the local clock."""

    until: float


class Look(NamedTuple):
    """Ask what the store keeps; then call :meth:`ScheduleMachine.looked`."""


class Advance(NamedTuple):
    """Replace *expected* by *record*, and send the messages of *slots*; then call :meth:`ScheduleMachine.advanced`."""

    expected: str | None
    record: str
    slots: tuple[float, ...]
    not_before: float
    """The store's time before which it must not be done."""
    skipped: tuple[float, float] | None = None
    """The first and the last of the slots that are not sent, because they were missed."""


class ScheduleMachine:
    """A schedule in this process. All its methods take *now*, the seconds of the local clock, which never goes back.

    Args:
        name: The name of the schedule.
        plan: The plan of this program.
        rng: Source of random numbers.

    Raises:
        ConfigError: The plan can't be followed here.
    """

    def __init__(self, name: str, plan: Plan, rng: Rng) -> None:
        slots_of(plan)
        self._name = name
        self._plan = plan
        self._rng = rng
        self._is_written = False  # whether the plan of this program was written, or found
        self._is_known = False  # whether what the store keeps is known
        self._text: str | None = None  # what it keeps, as last seen
        self.record: Record | None = None
        """What the store keeps, as last seen; None if nothing."""
        self._slots: Slots | None = None
        self._offset = 0.0  # of the store's clock, from the local one
        self._look_at = -math.inf
        self._retry_at = -math.inf
        self._misses = 0
        self._has_failed_to_advance = False  # since an advance was answered, or something else is kept
        self._asked: Advance | None = None
        self.problem = ""
        """Why the kept plan can't be followed here; empty if it can."""
        self.behind = 0.0
        """By how many seconds the store's clock is behind the newest settled slot; 0 if it is not, by much."""

    def next(self, now: float) -> Wait | Look | Advance:
        """Return what to do now."""
        if now < self._retry_at:
            return Wait(self._retry_at)
        if not self._is_known:
            return Look()
        store_now = now + self._offset
        if not self._is_written:
            return self._ask(self._written(store_now))
        if now >= self._look_at:
            return Look()
        record, slots = self.record, self._slots
        if record is None or slots is None or record.paused:
            return Wait(self._look_at)
        if (advance := self._due(record, slots, store_now)) is not None:
            return self._ask(advance)
        following = first_after(slots, record.settled_until)
        if following is None:
            return Wait(self._look_at)
        return Wait(min(self._look_at, following - self._offset + AFTER))

    def looked(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        """Take note of what the store keeps, as it was at its time *store_now*; it was asked at *asked_at*."""
        self._see(text, store_now, asked_at, now)

    def advanced(self, is_done: bool, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        """Take note of the answer to :class:`Advance`, and of what the store keeps after it."""
        asked, self._asked = self._asked, None
        self._has_failed_to_advance = False
        self._see(text, store_now, asked_at, now)
        if is_done:
            self._is_written = True
        elif asked is not None and text == asked.expected:
            early = asked.not_before - store_now
            # Not until a clock that was set back has caught up: meanwhile, the schedule may be resumed.
            self._retry_at = (
                min(now + max(early, EARLY_MIN), self._look_at) if early > 0 else now + later(BUSY, self._rng)
            )

    def unanswered(self, now: float) -> None:
        """Take note that the last request got no answer."""
        self._has_failed_to_advance |= self._asked is not None
        self._asked = None
        self._is_known = False
        self._retry_at = now + later(min(RETRY_MIN * 2**self._misses, RETRY_MAX), self._rng)
        self._misses = min(self._misses + 1, 10)

    def next_slot(self) -> float | None:
        """Return the next slot after those that are settled, by the kept plan; None if none will be sent."""
        if self.record is None or self.record.paused or self._slots is None:
            return None
        return first_after(self._slots, self.record.settled_until)

    def _ask(self, advance: Advance) -> Advance:
        self._asked = advance
        return advance

    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        if text != self._text:  # perhaps our own, whose answer was lost
            self._has_failed_to_advance = False
        if not self._has_failed_to_advance:  # else a store that can only be read would be asked without end
            self._misses = 0
        self._offset = store_now - (asked_at + now) / 2
        self._look_at = now + sooner(LOOK_EVERY, self._rng)
        self._is_known = True
        if text is None:
            self._is_written = False  # it is new, or was removed, and begins anew
            self._text = self.record = self._slots = None
            self.problem = ""
        elif text != self._text:
            self._read(text)
        if self.record is not None and self._slots is not None and _is_withheld(self.record, store_now):
            following = first_after(self._slots, store_now)
            if following is not None:
                due = max(following - self._offset + AFTER, now + WITHHELD_EVERY)
                self._look_at = min(self._look_at, due)
        settled = -math.inf if self.record is None else self.record.settled_until
        self.behind = settled - store_now if settled - store_now >= BEHIND_MIN else 0.0

    def _read(self, text: str) -> None:
        self._text = text
        self.record = self._slots = None
        self.problem = ""
        try:
            self.record = Record.decoded(text, self._name)
            self._slots = slots_of(self.record.plan)
        except ConfigError as error:  # of a newer tenure, or a time zone that this machine doesn't have: others go on
            self.problem = str(error)
        if self.record is None or self.record.plan == self._plan:
            self._is_written = True

    def _written(self, store_now: float) -> Advance:
        """Return how to write the plan of this program: with the slots that are due by the plan before."""
        old = self.record
        if old is None:
            return Advance(None, Record(self._plan, store_now).encoded(), (), 0.0)
        due = None
        if self._slots is not None and not old.paused:
            due = self._due(old, self._slots, store_now)
        if due is None:
            due = Advance(self._text, "", (), 0.0)
        last = due.slots[-1] if due.slots else old.last
        new = Record(self._plan, max(old.settled_until, store_now), last, old.paused)
        return due._replace(record=new.encoded())

    def _due(self, record: Record, slots: Slots, store_now: float) -> Advance | None:
        """Return how to settle the slots that are due; None if none is."""
        plan, settled = record.plan, record.settled_until
        most = ALL_MAX if plan.missed == "all" else 1
        due = newest(slots, settled, store_now, most)
        if not due:
            return None
        sent = tuple(due)
        if plan.missed == "skip" and store_now - due[-1] > plan.missed_after:
            sent = ()
        first, last = first_after(slots, settled), due[-1]
        skipped = None
        if sent and first != sent[0]:
            assert first is not None
            skipped = first, newest(slots, settled, sent[0] - 0.0005, 1)[-1]
        elif not sent:
            assert first is not None
            skipped = first, last
        new = replace(record, settled_until=last, last=sent[-1] if sent else record.last)
        return Advance(self._text, new.encoded(), sent, last, skipped)


def _is_withheld(record: Record, store_now: float) -> bool:
    """Return whether slots that come are not sent, unless the schedule is resumed."""
    return record.paused or record.settled_until > store_now
