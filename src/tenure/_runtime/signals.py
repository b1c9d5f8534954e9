"""SIGTERM and SIGINT ask a process to end: its campaigns and consumers are notified, unless the program handles them.

The signal is meant for the process, so all its campaigns and consumers are notified, on whatever loop or thread they
are: a process that drained its consumer and went on leading would block the next leader. A second SIGTERM ends the
process, as the first would have done without tenure. A second SIGINT, too, does what the first would have done: it
cancels the program of ``asyncio.run``, or raises ``KeyboardInterrupt``. Campaigns and consumers that start after a
first SIGINT leave it alone, so that a program that consumes in a loop can be interrupted.
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
class _Subscriber:
    """A callback, and the loop to call it on; without a loop, it is called in the signal handler."""

    callback: Callable[[], object]
    loop: asyncio.AbstractEventLoop | None
    hint: Callable[[], object] | None = None

    def shares_loop(self, other: _Subscriber) -> bool:
        """Whether both are on one loop; one without a loop blocks its thread, and shares it with no other."""
        return self.loop is not None and self.loop is other.loop

    def notify(self, *, is_sigint: bool = False) -> None:
        for call in (self.callback, self.hint if is_sigint else None):
            if call is None:
                continue
            if self.loop is None:
                call()
                continue
            with suppress(RuntimeError):  # that loop is closed, and its campaigns and consumers have ended
                self.loop.call_soon_threadsafe(call)


_subscribers: list[_Subscriber] = []
_restore_sigterm: Callable[[], object] | None = None  # undoes our handler of SIGTERM, while it is installed
_previous_sigint: Any = None  # the handler of SIGINT before ours, while ours is installed
_got_sigint = False


class _Forking(threading.local):
    blocks_sigterm = False  # whether this thread lets SIGTERM wait while it forks


_forking = _Forking()


@contextmanager
def on_shutdown_signal(
    callback: Callable[[], object], wanted: bool | None = None, hint: Callable[[], object] | None = None
) -> Iterator[None]:
    """Inside this block, call *callback* when SIGTERM or the first SIGINT comes, if *wanted* is not False.

    A signal is handled while there are such blocks in the main thread, and only if the program does not handle it (its
    own handler must be installed before). Blocks in other threads are notified along with them.

    Args:
        callback: Called on the running loop; without one, in the main thread.
        wanted: False leaves the signals alone.
        hint: Called after *callback* when it was SIGINT, to say that a second one ends the process sooner.
    """
    if wanted is False:
        yield
        return
    subscriber = _Subscriber(callback, _running_loop(), hint)
    is_main = threading.current_thread() is threading.main_thread()
    try:  # from here on, as an interrupt may come at any line
        _subscribers.append(subscriber)
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            _handle_sigterm(subscriber.loop)
        if is_main and not _got_sigint and _is_default_sigint(signal.getsignal(signal.SIGINT)):
            _handle_sigint()
        yield
    finally:
        with suppress(ValueError):
            _subscribers.remove(subscriber)
        if is_main and not any(map(subscriber.shares_loop, _subscribers)):
            _restore()


# An interrupt may come at any line of these two, too: a handler that is left then is removed when the next block ends.


def _handle_sigterm(loop: asyncio.AbstractEventLoop | None) -> None:
    global _restore_sigterm
    if loop is None:
        _restore_sigterm = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _on_sigterm)
        return
    with suppress(NotImplementedError, RuntimeError):  # Windows, or a loop in virtual time
        loop.add_signal_handler(signal.SIGTERM, _on_sigterm)
        _restore_sigterm = partial(loop.remove_signal_handler, signal.SIGTERM)


def _handle_sigint() -> None:
    global _previous_sigint
    # Not by the loop: a blocked loop would handle neither the first nor the second.
    _previous_sigint = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, _on_sigint)


def _is_default_sigint(handler: object) -> bool:
    """Whether SIGINT is handled by Python itself or ``asyncio.run``; not by the program or a notebook."""
    if isinstance(handler, partial):
        return getattr(handler.func, "__func__", None) is getattr(asyncio.Runner, "_on_sigint", _running_loop)
    return handler is signal.default_int_handler


def _restore() -> None:
    global _restore_sigterm
    _restore_sigint()
    if _restore_sigterm is not None:
        _restore_sigterm()
        _restore_sigterm = None


def _restore_sigint() -> None:
    global _previous_sigint
    before, _previous_sigint = _previous_sigint, None
    if before is not None and signal.getsignal(signal.SIGINT) is _on_sigint:
        signal.signal(signal.SIGINT, signal.default_int_handler if _has_ended(before) else before)


def _has_ended(handler: object) -> bool:
    """Whether it belongs to an ``asyncio.run`` that is over, which would have removed it had ours not replaced it."""
    main_task = handler.keywords.get("main_task") if isinstance(handler, partial) else None
    return isinstance(main_task, asyncio.Task) and main_task.done()


def _restore_default(signal_number: int, ours: object, usual: Any) -> None:
    """Replace *ours* by the default, if other code had saved it as its predecessor and put it back after our block."""
    if signal.getsignal(signal_number) is ours:
        signal.signal(signal_number, usual)


# A handler of another signal may raise at any line of these two, too. What it raises is only printed, and SIGTERM must
# not stay blocked.


def _before_fork() -> None:
    """Let SIGTERM wait until the child has restored the default: our handler would tell the parent, and not end it."""
    if _restore_sigterm is not None and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        _forking.blocks_sigterm = True
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_sigterm_come() -> None:
    if _forking.blocks_sigterm:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        finally:  # once more: it may have been raised before the call
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            _forking.blocks_sigterm = False


def _after_fork_in_child() -> None:
    """Restore the default: the loop and the subscribers belong to the parent."""
    global _restore_sigterm, _previous_sigint
    try:
        _subscribers.clear()
        if _previous_sigint is not None:
            _previous_sigint = None
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if _restore_sigterm is not None:
            _restore_sigterm = None
            signal.set_wakeup_fd(-1)  # the loop's: a byte written there would wake the parent
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:
        _let_sigterm_come()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_let_sigterm_come, after_in_child=_after_fork_in_child)


def _on_sigterm(*_: object) -> None:
    _restore()
    _restore_default(signal.SIGTERM, _on_sigterm, signal.SIG_DFL)
    if not _subscribers:  # an interrupt came while the handler was to be removed
        signal.raise_signal(signal.SIGTERM)
    for subscriber in _subscribers.copy():  # other threads may add or remove subscribers meanwhile
        subscriber.notify()


def _on_sigint(*_: object) -> None:
    global _got_sigint
    _restore_sigint()
    _restore_default(signal.SIGINT, _on_sigint, signal.default_int_handler)
    if not _subscribers:  # an interrupt came while the handler was to be removed
        signal.raise_signal(signal.SIGINT)
        return
    _got_sigint = True
    for subscriber in _subscribers.copy():
        subscriber.notify(is_sigint=True)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
