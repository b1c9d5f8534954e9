"""The user's own ear: ``on_event`` of ``connect`` is told of everything, and can't harm what it is told of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tenure.events import Event


def tell_hook(on_event: Callable[[Event], None], event: Event) -> None:
    """Call *on_event*; what it raises is the loop's to report, and changes nothing here."""
    try:
        on_event(event)
    except (Exception, SystemExit) as error:  # SystemExit: a loop in a thread of tenure's own is everybody's
        asyncio.get_running_loop().call_exception_handler({"message": "on_event of tenure failed", "exception": error})
