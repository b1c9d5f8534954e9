"""The status of a running service at one moment, for probes and displays."""

from __future__ import annotations

from dataclasses import dataclass

from tenure import CandidateStatus, ScheduleStatus


@dataclass(frozen=True, slots=True)
class HandlerStatus:
    """The status of one handler.

    Attributes:
        queue: The queue of which it handles the messages.
        concurrency: How many messages it may handle at once.
        running: How many it handles now.
        is_ready: Whether it receives messages, and the store has answered one of its last two requests.
    """

    queue: str
    concurrency: int
    running: int
    is_ready: bool


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The status of a service in this process, at the moment of the call.

    Attributes:
        handlers: Those that run.
        leaders: The candidates that campaign or lead; one that returned is left out.
        schedules: Those that run, as the store last showed them to this process; see :class:`tenure.ScheduleStatus`.
        is_live: Whether a restart of this process would improve nothing: no work of a leader has overrun.
        is_ready: Whether the service runs, and all of its handlers and candidates are ready.
    """

    handlers: tuple[HandlerStatus, ...] = ()
    leaders: tuple[CandidateStatus, ...] = ()
    schedules: tuple[ScheduleStatus, ...] = ()
    is_live: bool = True
    is_ready: bool = False
