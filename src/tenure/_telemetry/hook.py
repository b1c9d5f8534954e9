"""The user's own ear: ``on_event`` of ``connect`` is told of everything, and can't harm what it is told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure._telemetry.aside import aside
from tenure._telemetry.log import logger
from tenure.events import Event


class PassedOn:
    """What passes events on to a hook that is called somewhere else, and may itself be called anywhere."""

    def __init__(self, pass_on: Callable[[Event], None]) -> None:
        self._pass_on = pass_on

    def __call__(self, event: Event) -> None:
        self._pass_on(event)


def tell_hook(on_event: Callable[[Event], None], event: Event) -> None:
    """Call *on_event*, never on a thread that renews; what it raises is reported, and changes nothing here."""
    if isinstance(on_event, PassedOn):
        _tell(on_event, event)
    else:
        aside(_tell, on_event, event)


def _tell(on_event: Callable[[Event], None], event: Event) -> None:
    try:
        on_event(event)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        # SystemExit: a loop in a thread of tenure's own is everybody's. CancelledError: nobody has cancelled us.
        _report(error)


def _report(error: BaseException) -> None:
    message = "on_event of tenure failed"
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        logger.error(message, exc_info=error)
    else:
        loop.call_exception_handler({"message": message, "exception": error})
