"""Schedules for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import tenure
from tenure._runtime.loop_thread import LoopThread
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure.sync._blocking import blocking
from tenure.sync._stopping import StopRequest, forwarded


class Schedule:
    """Messages that are sent at the times of a plan. See :class:`tenure.Schedule`."""

    def __init__(self, schedule: tenure.Schedule, consumer_thread: Callable[[], LoopThread]) -> None:
        self.name: str = schedule.name
        self.queue: str = schedule.queue
        self._behind = schedule
        self._consumer_thread = consumer_thread

    def __repr__(self) -> str:
        return repr(self._behind)

    def run(self, *, stop: threading.Event | None = None, sigterm: bool | None = None) -> None:
        """Send the messages of the slots when they are due, until *stop* is set. Blocks until then.

        See :meth:`tenure.Schedule.run`. In the main thread, SIGTERM or a first SIGINT ends it gracefully, if the
        program does not handle that signal (``sigterm=False``: never).
        """
        request = StopRequest()

        async def run() -> None:
            with forwarded(stop, request.event()) as stopping:
                await self._behind.run(stopping)

        with on_shutdown_signal(request.make, sigterm):
            self._consumer_thread().call_blocking(run)  # not on the renewal loop: on_event may block


class Schedules:
    """The schedules of a queue. See :class:`tenure.Schedules`."""

    def __init__(self, schedules: tenure.Schedules, renewal_thread: RenewalThread) -> None:
        self._behind = schedules
        self._renewal_thread = renewal_thread

    def __repr__(self) -> str:
        return repr(self._behind)

    list = blocking(tenure.Schedules.list)
    pause = blocking(tenure.Schedules.pause)
    resume = blocking(tenure.Schedules.resume)
    remove = blocking(tenure.Schedules.remove)
