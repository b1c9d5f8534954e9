"""A simulated process with a loop that user code may block; another thread of it goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenure.testing._sim.process import Process
from tenure.testing._sim.world import SkewedClock, World


class LoopProcess(Process):
    """A process whose calls are made on its loop, unless they are left to :meth:`do`."""

    def __init__(self, world: World, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(world, number, name, clock)
        self.ended = False
        self._blocked_until = 0.0
        self._on_loop: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    @property
    def running(self) -> bool:
        """Whether it is alive and has not ended."""
        return self.alive and not self.ended

    @property
    def blocked(self) -> bool:
        """Whether its loop is blocked."""
        return self.world.now < self._blocked_until

    def overslept(self) -> bool:
        """Return whether it has just come out of a pause in which it should have woken."""
        return self._woke_late

    def _died(self) -> None:
        self._on_loop.clear()

    def on_loop_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call *call* on the loop: now, or as soon as the process is not paused and the loop not blocked."""
        self.do(self.on_loop, call, *args)

    def on_loop(self, call: Callable[..., object], *args: Any) -> None:
        """Call *call* on the loop of the running process: now, or as soon as the loop is not blocked."""
        if self.ended:
            return
        if self.world.now < self._blocked_until:
            self._on_loop.append((call, args))
        else:
            call(*args)

    def block(self, seconds: float) -> None:
        """Let user code block the loop for *seconds* of true time."""
        until = self.world.now + seconds
        if until > self._blocked_until:
            self._blocked_until = until
            self.world.at(until, self.do, self._unblock)

    def _unblock(self) -> None:
        if self.world.now < self._blocked_until:
            return
        waiting, self._on_loop = self._on_loop, []
        for call, args in waiting:
            self.on_loop_soon(call, *args)

    def end(self) -> None:
        """Let the program on the loop return; the process may go on to something else."""
        self.ended = True
        self._died()
