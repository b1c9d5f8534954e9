"""SIGTERM asks a process to end: whoever serves or leads in it is told, if nobody else does anything about the signal.

The signal is meant for the process, so all in it are told, on whatever loop or thread they are: one that drained its
consumer and went on leading would be in everybody's way. A second SIGTERM ends the process, as the first would have
done without us.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_told: list[Callable[[], object]] = []
_let_go: Callable[[], object] | None = None  # of the signal, while we have it


@contextmanager
def sigterm_tells(tell: Callable[[], object], wanted: bool | None = None) -> Iterator[None]:
    """Inside this block, call *tell* when SIGTERM comes, if *wanted* is not False.

    The signal is caught in the main thread only, and only if nobody else handles it. Whoever is elsewhere is told if
    somebody there has caught it.

    Args:
        tell: Called on the loop that runs here; without one, in the main thread.
        wanted: False leaves the signal alone.
    """
    if wanted is False:
        yield
        return
    loop = _running()
    call = tell if loop is None else lambda: _tell_there(loop, tell)
    _told.append(call)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _catch(loop)
    try:
        yield
    finally:
        _told.remove(call)
        if is_main and not _told:  # only the main thread can; else the next signal finds nobody, and is let go of then
            _release()


def _catch(loop: asyncio.AbstractEventLoop | None) -> None:
    global _let_go
    if loop is None:
        signal.signal(signal.SIGTERM, _hear)
        _let_go = lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)  # noqa: E731  # as short as it is below
        return
    with suppress(NotImplementedError, RuntimeError):  # Windows, or a loop in virtual time
        loop.add_signal_handler(signal.SIGTERM, _hear)
        _let_go = lambda: loop.remove_signal_handler(signal.SIGTERM)  # noqa: E731


def _release() -> None:
    global _let_go
    let_go, _let_go = _let_go, None
    if let_go is not None:
        let_go()


def _hear(*_: object) -> None:
    _release()
    if not _told:  # all who were left have gone, elsewhere
        signal.raise_signal(signal.SIGTERM)
    for tell in _told:
        tell()


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _tell_there(loop: asyncio.AbstractEventLoop, tell: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # that loop is closed, and who was on it has ended
        loop.call_soon_threadsafe(tell)
