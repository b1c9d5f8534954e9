"""Test tools for users and authors of backends: a simulator, a loop in virtual time, suites for stores.

This module has the basic ones: messages to call a handler with, a clock that is set by hand, a wait for a condition,
and a store on a loop in virtual time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence

from tenure._backend import Backend
from tenure._public import publish_all
from tenure._runtime.renewal_thread import RenewalThread
from tenure._telemetry.telemetry import Telemetry
from tenure.events import Event
from tenure.ports import Abandon as Abandon
from tenure.ports import Complete as Complete
from tenure.ports import DeadLetter as DeadLetter
from tenure.ports import Defer as Defer
from tenure.ports import GiveBack as GiveBack
from tenure.ports import Verdict as Verdict
from tenure.testing._messages import MessageOptions as MessageOptions
from tenure.testing._messages import RecordingBlockingMessage as RecordingBlockingMessage
from tenure.testing._messages import RecordingMessage as RecordingMessage
from tenure.testing._messages import message as message
from tenure.testing._messages import message_for_process as message_for_process
from tenure.testing._messages import message_for_threads as message_for_threads
from tenure.testing.loop import VirtualClock

__all__ = [
    "Abandon",
    "Complete",
    "DeadLetter",
    "Defer",
    "GiveBack",
    "ManualClock",
    "MessageOptions",
    "RecordingBlockingMessage",
    "RecordingMessage",
    "Verdict",
    "connect_here",
    "message",
    "message_for_process",
    "message_for_threads",
    "until",
]


class ManualClock:
    """A ``Clock`` that moves only by :meth:`advance`."""

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the present time of this clock, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._now += seconds


def connect_here(
    url: str = "memory:",
    *,
    on_event: Callable[[Event], None] | None = None,
    telemetry: Telemetry | Sequence[Telemetry] | None = None,
) -> Backend:
    """Connect as :func:`tenure.connect` does, entirely on the running loop and its time, without a renewal thread.

    For tests in virtual time, see :mod:`tenure.testing.loop`. In virtual time, only ``memory:`` works: there are no
    sockets and no threads.

    Raises:
        RuntimeError: No loop is running.
    """
    loop = asyncio.get_running_loop()
    return Backend(
        url, on_event=on_event, telemetry=telemetry, clock=VirtualClock(loop), renewal_thread=RenewalThread.here()
    )


async def until(
    condition: Callable[[], object | Awaitable[object]], *, within: float = 60.0, what: str = "the condition"
) -> None:
    """Return as soon as *condition* holds, in the time of the running loop: real, or virtual.

    Args:
        condition: Checked every few milliseconds; may be a coroutine function.
        within: The longest time to wait, in seconds; long, as a busy machine does everything late.
        what: The condition as text, for the error message.

    Raises:
        AssertionError: It did not hold in time.
    """
    now = asyncio.get_running_loop().time
    give_up = now() + within
    pause = 0.001
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        if now() >= give_up:
            raise AssertionError(f"{what} did not hold within {within:g} s")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.05)


publish_all(__name__)
