"""SIGTERM and SIGINT ask a process to end: who serves or leads in it is told, if nobody else handles the signal.

The signal is meant for the process, so all in it are told, on whatever loop or thread they are: one that drained its
consumer and went on leading would be in everybody's way. A second SIGTERM ends the process, as the first would have
done without us. A second SIGINT, too, does what the first would have done: it cancels the program of
``asyncio.run``, or raises ``KeyboardInterrupt``. What begins after a first one leaves SIGINT alone, so that a program
that consumes in a loop can be interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class _Party:
    """Somebody to be told, and where: on a loop, or wherever the signal is heard."""

    tell: Callable[[], object]
    loop: asyncio.AbstractEventLoop | None
    hint: Callable[[], object] | None = None

    def is_beside(self, other: _Party) -> bool:
        """Whether they are on one loop; who has none waits in its thread, and has nobody beside it."""
        return self.loop is not None and self.loop is other.loop

    def hear(self, *, is_interrupt: bool = False) -> None:
        for call in (self.tell, self.hint if is_interrupt else None):
            if call is None:
                continue
            if self.loop is None:
                call()
                continue
            with suppress(RuntimeError):  # that loop is closed, and who was on it has ended
                self.loop.call_soon_threadsafe(call)


_parties: list[_Party] = []
_let_go: Callable[[], object] | None = None  # of SIGTERM, while we have it
_before: Any = None  # what handled SIGINT, while we have it
_was_interrupted = False


@contextmanager
def on_shutdown_signal(
    tell: Callable[[], object], wanted: bool | None = None, hint: Callable[[], object] | None = None
) -> Iterator[None]:
    """Inside this block, call *tell* when SIGTERM or the first SIGINT comes, if *wanted* is not False.

    A signal is caught for those in the main thread, as long as there are any, and only if nobody else handles it (a
    program's own handler is to be there before). Whoever is in another thread is told along with them.

    Args:
        tell: Called on the loop that runs here; without one, in the main thread.
        wanted: False leaves the signals alone.
        hint: Called after *tell* when it was SIGINT, to say that a second one hurries.
    """
    if wanted is False:
        yield
        return
    party = _Party(tell, _running(), hint)
    is_main = threading.current_thread() is threading.main_thread()
    try:  # from here on, for an interrupt may come at any line
        _parties.append(party)
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            _catch(party.loop)
        if is_main and not _was_interrupted and _is_pythons(signal.getsignal(signal.SIGINT)):
            _catch_interrupt()
        yield
    finally:
        with suppress(ValueError):
            _parties.remove(party)
        if is_main and not any(map(party.is_beside, _parties)):
            _release()


# An interrupt may come at any line of these two, too: what is not let go of then is when the next one ends.


def _catch(loop: asyncio.AbstractEventLoop | None) -> None:
    global _let_go
    if loop is None:
        _let_go = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _hear)
        return
    with suppress(NotImplementedError, RuntimeError):  # Windows, or a loop in virtual time
        loop.add_signal_handler(signal.SIGTERM, _hear)
        _let_go = partial(loop.remove_signal_handler, signal.SIGTERM)


def _catch_interrupt() -> None:
    global _before
    # Not by the loop: one that is blocked would never hear of it, nor of the second.
    _before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, _hear_interrupt)


def _is_pythons(handler: object) -> bool:
    """Whether SIGINT is with Python itself, or with ``asyncio.run``; not with a program, or a notebook."""
    if isinstance(handler, partial):
        return getattr(handler.func, "__func__", None) is getattr(asyncio.Runner, "_on_sigint", _running)
    return handler is signal.default_int_handler


def _release() -> None:
    global _let_go
    _release_interrupt()
    if _let_go is not None:
        _let_go()
        _let_go = None


def _release_interrupt() -> None:
    global _before
    before, _before = _before, None
    if before is not None and signal.getsignal(signal.SIGINT) is _hear_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler if _has_ended(before) else before)


def _has_ended(handler: object) -> bool:
    """Whether it is of an ``asyncio.run`` that is over, and would have been taken away if it had been in its place."""
    main_task = handler.keywords.get("main_task") if isinstance(handler, partial) else None
    return isinstance(main_task, asyncio.Task) and main_task.done()


def _leave_to_python(signal_number: int, hear: object, usual: Any) -> None:
    """Take *hear* away where others had saved it as what was there before them, and put it back when we had ended."""
    if signal.getsignal(signal_number) is hear:
        signal.signal(signal_number, usual)


def _forget() -> None:
    """Leave the signal, in a forked child, to mean that child: its loop and all to be told are the parent's."""
    global _let_go, _before
    _parties.clear()
    if _before is not None:
        _before = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _let_go is not None:
        _let_go = None
        signal.set_wakeup_fd(-1)  # the loop's: what is written there wakes the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _hear(*_: object) -> None:
    _release()
    _leave_to_python(signal.SIGTERM, _hear, signal.SIG_DFL)
    if not _parties:  # an interrupt came when it was to be let go of
        signal.raise_signal(signal.SIGTERM)
    for party in _parties.copy():  # others may come or go meanwhile, in their threads
        party.hear()


def _hear_interrupt(*_: object) -> None:
    global _was_interrupted
    _release_interrupt()
    _leave_to_python(signal.SIGINT, _hear_interrupt, signal.default_int_handler)
    if not _parties:  # an interrupt came when it was to be let go of
        signal.raise_signal(signal.SIGINT)
        return
    _was_interrupted = True
    for party in _parties.copy():
        party.hear(is_interrupt=True)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
