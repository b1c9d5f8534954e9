"""How a pump stops: its states, and the steps of a drain."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from tenure._queue.lock_group import NEVER


class State(Enum):
    """The state of a pump."""

    RUNNING = "running"  # claims, and lets messages be taken
    PAUSED = "paused"  # claims nothing; handlers that run go on
    DRAINING = "draining"  # claims nothing any more; waits for handlers and answers
    STOPPED = "stopped"  # no handler runs and every request is answered
    TIMED_OUT = "timed out"  # the time of the drain is over; handlers and requests are left, and their locks run out


RUNNING, PAUSED, DRAINING, STOPPED, TIMED_OUT = State
"""The same by themselves: ``State.RUNNING`` takes as long as a call on Python 3.11, and is asked for every message."""

TRANSITIONS: dict[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.PAUSED, State.DRAINING}),
    State.PAUSED: frozenset({State.RUNNING, State.DRAINING}),
    State.DRAINING: frozenset({State.STOPPED, State.TIMED_OUT}),
    State.STOPPED: frozenset(),
    State.TIMED_OUT: frozenset(),
}
"""Every legal change of state; the machine refuses any other, whatever it is fed."""

Step = Literal["drain", "leave", "give up"]
"""A step of a drain: cancel the handlers, leave those that run on, stop with requests unanswered."""

_STEPS: tuple[Step, ...] = ("drain", "leave", "give up")


class DrainSteps:
    """Decide when a drain goes a step further.

    Args:
        grace: Seconds that a cancelled handler has to stop.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._deadline = NEVER
        self._give_up_at = NEVER
        self._taken = 0

    @property
    def has_begun(self) -> bool:
        """Whether the deadline has passed."""
        return self._taken > 0

    @property
    def next_at(self) -> float:
        """When the next step is due."""
        return (self._deadline, self._deadline + self._grace, self._give_up_at)[self._taken]

    def limit(self, deadline: float, until: float | None) -> None:
        """Take the first step at *deadline* and the last at *until*, or after twice the grace; or as set before, if
        that is earlier."""
        self._deadline = min(self._deadline, deadline)
        self._give_up_at = min(self._give_up_at, deadline + 2 * self._grace if until is None else until)

    def take(self, now: float) -> Step | None:
        """Return the next step if it is due at *now*. It is not asked for after the last one."""
        if now < self.next_at:
            return None
        self._taken += 1
        return _STEPS[self._taken - 1]
