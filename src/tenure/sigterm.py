"""SIGTERM asks a process to end: whoever serves or leads in it is told, if nobody else does anything about the signal.

The signal is meant for the process, so all in it are told, on whatever loop or thread they are: one that drained its
consumer and went on leading would be in everybody's way. A second SIGTERM ends the process, as the first would have
done without us.
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


@dataclass(frozen=True, slots=True, eq=False)
class _Party:
    """Somebody to be told, and where: on a loop, or wherever the signal is heard."""

    tell: Callable[[], object]
    loop: asyncio.AbstractEventLoop | None

    def is_beside(self, other: _Party) -> bool:
        """Whether they are on one loop; who has none waits in its thread, and has nobody beside it."""
        return self.loop is not None and self.loop is other.loop

    def hear(self) -> None:
        if self.loop is None:
            self.tell()
        else:
            with suppress(RuntimeError):  # that loop is closed, and who was on it has ended
                self.loop.call_soon_threadsafe(self.tell)


_parties: list[_Party] = []
_let_go: Callable[[], object] | None = None  # of the signal, while we have it


@contextmanager
def sigterm_tells(tell: Callable[[], object], wanted: bool | None = None) -> Iterator[None]:
    """Inside this block, call *tell* when SIGTERM comes, if *wanted* is not False.

    The signal is caught for those in the main thread, as long as there are any, and only if nobody else handles it (a
    program's own handler is to be there before). Whoever is in another thread is told along with them.

    Args:
        tell: Called on the loop that runs here; without one, in the main thread.
        wanted: False leaves the signal alone.
    """
    if wanted is False:
        yield
        return
    party = _Party(tell, _running())
    is_main = threading.current_thread() is threading.main_thread()
    try:  # from here on, for an interrupt may come at any line
        _parties.append(party)
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            _catch(party.loop)
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


def _release() -> None:
    global _let_go
    if _let_go is not None:
        _let_go()
        _let_go = None


def _forget() -> None:
    """Leave the signal, in a forked child, to mean that child: its loop and all to be told are the parent's."""
    global _let_go
    _parties.clear()
    if _let_go is not None:
        _let_go = None
        signal.set_wakeup_fd(-1)  # the loop's: what is written there wakes the parent
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _hear(*_: object) -> None:
    _release()
    if not _parties:  # an interrupt came when it was to be let go of
        signal.raise_signal(signal.SIGTERM)
    for party in _parties.copy():  # others may come or go meanwhile, in their threads
        party.hear()


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
