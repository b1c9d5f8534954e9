"""The user's hook, ``on_event`` of ``connect``: it receives every event, and its errors change nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure._telemetry.callbacks import logger, run_callback
from tenure._telemetry.telemetry import Telemetry
from tenure.events import Event


class ForwardingHook:
    """A hook of tenure's own that forwards events to another thread. It never blocks, so any thread may call it."""

    def __init__(self, forward: Callable[[Event], None]) -> None:
        self._forward = forward

    def __call__(self, event: Event) -> None:
        self._forward(event)


class ObservedHook:
    """A hook that tells *telemetry*, which never raises, of each event; and then the user's hook, if there is one."""

    def __init__(self, telemetry: Telemetry, on_event: Callable[[Event], None] | None) -> None:
        self._telemetry = telemetry
        self._on_event = on_event

    def __call__(self, event: Event) -> None:
        self._telemetry.event(event)
        if self._on_event is not None:
            self._on_event(event)


def call_hook(on_event: Callable[[Event], None], event: Event) -> None:
    """Call *on_event*, never on the renewal thread; an error that it raises is reported, and changes nothing here."""
    if isinstance(on_event, ForwardingHook):
        _call(on_event, event)
    else:
        run_callback(_call, on_event, event)


def _call(on_event: Callable[[Event], None], event: Event) -> None:
    try:
        on_event(event)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        # SystemExit: it would end a loop of tenure's own, shared by all. CancelledError: this task was not cancelled.
        _report(error)


def _report(error: BaseException) -> None:
    message = "on_event of tenure failed"
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        logger.error(message, exc_info=error)
    else:
        loop.call_exception_handler({"message": message, "exception": error})
