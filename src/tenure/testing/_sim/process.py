"""A simulated process: its own clock, pauses from which it wakes late, and alarms that its machines set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tenure.testing._sim.world import BLUR, SkewedClock, World


class Process:
    """Base of simulated processes. After a kill, its host starts another one."""

    def __init__(self, world: World, number: int, name: str, clock: SkewedClock) -> None:
        self.world = world
        self.number = number
        self.name = name
        self.clock = clock
        self.alive = True
        self.paused = False
        self._latest = -math.inf
        self._woke_late = False
        self._inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    # --- time ---

    def now(self) -> float:
        """Return the time by this process's clock."""
        reading = self.clock.offset + self.clock.rate * self.world.now
        if reading > self._latest:
            self._latest = reading
        return self._latest

    def reach(self, reading: float) -> None:
        """Let the clock show *reading*, which it may miss by a rounding when it wakes."""
        self._latest = max(self._latest, min(reading, self._latest + BLUR))

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Call *call* in *seconds* of this process's time, or when its pause is over."""
        self.world.after(seconds / self.clock.rate, self.do, call, *args)

    def do(self, call: Callable[..., object], *args: Any) -> None:
        """Call *call* now, or when the pause is over; never in a dead process."""
        if self.paused:
            self._inbox.append((call, args))
        elif self.alive:
            call(*args)

    # --- faults ---

    def pause(self) -> None:
        """Stop the process; its clock goes on."""
        self.paused = True

    def resume(self) -> None:
        """Let the process go on: calls that came meanwhile are made now, timers first or answers first."""
        if not self.paused:
            return
        self.paused = False
        self._woke_late = self._overslept()
        inbox, self._inbox = self._inbox, []
        if self.world.rng.random() < 0.5:
            self.world.rng.shuffle(inbox)
        for call, args in inbox:
            self.do(call, *args)
        self._woke_late = False

    def _overslept(self) -> bool:
        """Return whether it should have woken during its pause."""
        return False

    def die(self, why: str) -> None:
        """End the process at once."""
        if not self.alive:
            return
        if self.world.traced:
            self.world.log(self.name, why)
        self.alive = False
        self.paused = False
        self._inbox.clear()
        self._died()

    def _died(self) -> None:
        """Drop the state that only a living process has."""


class Alarm:
    """Wake a process when its machine asks for it.

    Args:
        process: Its clock counts.
        wake_at: Tells when, by that clock; infinity for never.
        do: Calls something in the process as soon as it can.
        ring: Called then.
    """

    def __init__(
        self,
        process: Process,
        wake_at: Callable[[], float],
        do: Callable[[Callable[[], object]], object],
        ring: Callable[[], object],
    ) -> None:
        self._process = process
        self._wake_at = wake_at
        self._do = do
        self._ring = ring
        self._due: float | None = None

    def set(self) -> None:
        """Schedule the next alarm, if none is scheduled earlier."""
        wake_at = self._wake_at()
        if wake_at == math.inf:
            return
        world = self._process.world
        when = max(world.now, self._process.clock.moment(wake_at))
        if self._due is None or when < self._due:
            self._due = when
            world.at(when, self._go_off, when)

    def _go_off(self, when: float) -> None:
        if when == self._due:
            self._due = None
            self._do(self._look)

    def _look(self) -> None:
        wake_at = self._wake_at()
        if wake_at <= self._process.now() + BLUR / 1000:
            self._process.reach(wake_at)
            self._ring()
        else:
            self.set()
