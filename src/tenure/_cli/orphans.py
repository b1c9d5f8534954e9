"""Processes whose parents have ended become children of process 1: where that is this one, it has to reap them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class Orphans:
    """Reaps the children that others have started, if this is process 1; it does nothing elsewhere.

    What this process has started is reaped by who waits for it, and gets its exit code.

    Args:
        ours: Returns the children that this process has started, and waits for.
    """

    def __init__(self, ours: Callable[[], Collection[int]]) -> None:
        self._ours = ours
        self._is_idle = os.getpid() != 1
        self._starting = 0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Reap nothing during the block: a child of ours may have ended before it is known as one."""
        self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            self.reap()

    def reap(self) -> None:
        """Reap those that have ended; call it when a child has, and when one of ours was waited for.

        The system shows the first that has ended. If that is one of ours, the others wait until it is reaped.
        """
        if self._is_idle or self._starting:
            return
        try:
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self._ours():
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:  # there is none, or it was reaped just now by who waits for it
            return
