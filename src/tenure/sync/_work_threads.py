"""The work of one ``run``, on threads of its own: of an election, or of partitions, each of which has its own term."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tenure._election.term import BlockingTerm
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure.errors import ConfigError, TenureError, TermLost, Unavailable, in_words, refuse_generator
from tenure.sync._stopping import StopRequest, forwarded

Serve = Callable[[Any], Awaitable[None]]
"""Async work, as the asynchronous ``run`` takes it."""


class WorkThreads:
    """Runs *work* during each term, on a thread that is new for each.

    Args:
        work: The user's function, called with the term.
        renewal_thread: Its loop runs the asynchronous ``run``.
        started: Called there with each thread, before it starts.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        renewal_thread: RenewalThread,
        started: Callable[[threading.Thread], object] = lambda _: None,
    ) -> None:
        refuse_generator("work", work)
        self._work = work
        self._renewal_thread = renewal_thread
        self._started = started
        self._outcomes: set[Future[Exception | None]] = set()  # of the threads that run; changed on that loop

    def run(
        self,
        behind: Callable[[Serve, asyncio.Event], Coroutine[Any, Any, None]],
        *,
        stop: threading.Event | None,
        sigterm: bool | None,
    ) -> None:
        """Run *behind* on the renewal loop with async work and an event to stop it, and block until both have ended.

        Raises:
            Unavailable: The backend was closed; unless the work has failed, too: its own error is raised first.
        """
        request = StopRequest()

        async def run() -> None:
            with forwarded(stop, request.event()) as stopping:
                assert stopping is not None  # it is the event given
                await behind(self._serve, stopping)

        try:
            with on_shutdown_signal(request.make, sigterm):
                self._renewal_thread.call_blocking(run)
        except Unavailable:  # perhaps while the work ran
            error = self._join()
            if error is not None:
                raise error from None
            raise

    async def _serve(self, term: BlockingTerm) -> None:
        outcome = Future[Exception | None]()
        outcome.set_running_or_notify_cancel()  # so that cancelling a task that waits for it does not cancel it
        thread = threading.Thread(target=_perform, args=(self._work, term, outcome), daemon=True)
        thread.name = f"tenure-{term.name}-{term.token}"
        self._outcomes.add(outcome)
        self._started(thread)
        try:
            thread.start()
        except BaseException:  # the system gives no thread
            self._outcomes.discard(outcome)
            raise
        ended = asyncio.wrap_future(outcome)
        while not ended.done():
            with suppress(asyncio.CancelledError):  # term.lost is set; the term is not over before the thread is
                await asyncio.wait({ended})
            if self._renewal_thread.is_ending:  # this loop, not the term: the caller of run waits for the thread
                ended.cancel()
                await ended
        self._outcomes.discard(outcome)
        if (error := ended.result()) is not None:
            raise error

    def _join(self) -> Exception | None:
        """Wait for the threads that run although their loop has ended; return the first error, except a lost term."""
        errors = [outcome.result() for outcome in tuple(self._outcomes)]
        self._outcomes.clear()
        return next((one for one in errors if one is not None and not isinstance(one, TermLost)), None)


def _perform(work: Callable[[Any], Any], term: BlockingTerm, outcome: Future[Exception | None]) -> None:
    """Run the work, and set *outcome* to its exception or None: a future can't raise every exception."""
    error: Exception | None = None
    try:
        result = work(term)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigError(
                f"work must be a plain function, and {work!r:.80} returned {type(result).__name__}, which would never "
                "run; for async functions there is tenure.connect"
            )
    except (GeneratorExit, StopIteration, StopAsyncIteration) as raised:  # a coroutine can't raise these
        error = RuntimeError(f"work raised {in_words(raised)}")
        error.__cause__ = raised
    except Exception as raised:
        error = raised
    except BaseException as raised:  # SystemExit in a thread would end only the thread
        error = TenureError(f"work raised {in_words(raised)}")
        error.__cause__ = raised
    term._note_work_end()
    outcome.set_result(error)
    del error, outcome  # otherwise the error's traceback would hold this frame, and this frame the error
