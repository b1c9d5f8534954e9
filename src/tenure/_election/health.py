"""The health callback of an election: called where it may block, its failures turned into reasons."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable

from tenure._runtime.tasks import is_cancelled
from tenure._runtime.threads import in_thread
from tenure.errors import in_words

Health = Callable[[], bool | Awaitable[bool]]
"""``health()``: plain or async, it tells whether the work can go on. An exception counts as false."""

NOT_HEALTHY = "the health callback reported that the work is not healthy"


class HealthCheck:
    """The user's health callback, plain or async. It is never called on the renewal thread."""

    def __init__(self, callback: Health) -> None:
        self._callback = callback
        self._is_running = False  # in a thread

    async def problem(
        self, within: float, loop: asyncio.AbstractEventLoop | None, context: contextvars.Context
    ) -> str | None:
        """Call the callback; return why the work is not healthy, or None. No answer *within* this time is a reason.

        It is called on *loop*, where the work runs; or, if there is none, in a thread of its own, in *context*.
        """
        call = self._call_in_thread(context) if loop is None else self._call()
        try:
            async with asyncio.timeout(within):
                if loop is None:
                    return await call
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))
        except TimeoutError:
            return f"the health callback did not answer for {within:g} s"
        except RuntimeError as error:
            call.close()
            return f"the loop that runs the work is closed: {error}"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "the health callback was cancelled"
        except BaseException as error:  # such as KeyboardInterrupt on the work's loop, which handles it itself
            return f"the health callback raised {in_words(error)}"

    async def _call(self) -> str | None:
        try:
            healthy = self._callback()
            if inspect.isawaitable(healthy):
                healthy = await healthy
            return None if healthy else NOT_HEALTHY
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "the health callback was cancelled"
        except (Exception, SystemExit) as error:
            return f"the health callback raised {in_words(error)}"

    async def _call_in_thread(self, context: contextvars.Context) -> str | None:
        if self._is_running:  # a callback that hangs must not use another thread for every renewal
            return "the health callback has not answered the last call yet"
        try:
            return await in_thread("tenure-health", context.copy().run, self._call_without_loop)
        except RuntimeError as error:
            return f"the health callback could not be called: {error}"

    def _call_without_loop(self) -> str | None:
        """Call it on this thread, which has no loop, whether it is async or not."""
        self._is_running = True
        try:
            healthy = self._callback()
            if inspect.isawaitable(healthy):
                healthy = asyncio.run(_awaited(healthy))
            return None if healthy else NOT_HEALTHY
        except BaseException as error:  # also SystemExit: this thread runs only the callback
            return f"the health callback raised {in_words(error)}"
        finally:
            self._is_running = False


async def _awaited(healthy: Awaitable[bool]) -> bool:
    return await healthy
