"""The status of a schedule, as its store keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from tenure._schedule.plan import Missed


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """What a store keeps of a schedule, at one moment. Times in Unix seconds.

    Attributes:
        name: The name of the schedule.
        queue: The queue to which it sends.
        every: A cron expression, or an interval in seconds.
        timezone: The time zone of the cron expression.
        missed: What becomes of slots that could not be sent in time: see :meth:`tenure.Backend.schedule`.
        missed_after: The seconds after which a slot counts as missed, for ``skip``.
        last: The newest slot that was sent; None if none was yet.
        next: The next slot; None if it is paused, or its plan can't be followed here (*problem*).
        paused: Whether its slots are skipped until it is resumed.
        problem: Why this process can't follow its plan, such as a time zone that this machine doesn't have; else empty.
    """

    name: str
    queue: str
    every: str | float
    timezone: str = "UTC"
    missed: Missed = "once"
    missed_after: float = 60.0
    last: float | None = None
    next: float | None = None
    paused: bool = False
    problem: str = ""
