"""A simulated process that consumes: a caller's loop that user code may block, beside the renewal thread's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from tenure.testing._sim.process import Process
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.world import SkewedClock, World

R = TypeVar("R")


class ConsumerProcess(Process, Generic[R]):
    """What consumers of messages and of sessions have in common. After a kill, its host starts another one.

    Args:
        world: Time and random numbers.
        plan: The setting of the run.
        number: The host.
        name: The consumer.
        clock: The host's.
    """

    works: dict[Any, R]
    """Its handlers that run."""

    def __init__(self, world: World, plan: Plan, number: int, name: str, clock: SkewedClock) -> None:
        super().__init__(world, number, name, clock)
        self.plan = plan
        self.ended = False
        self.draining = False
        self.works = {}
        self.error_hook = self.event_hook = ""
        """What the error hook and the event hook do beside returning, at present."""
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
        self.works.clear()

    # --- the caller's loop ---

    def _loop_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Call *call* on the caller's loop: now, or when it is not blocked any more."""
        self.do(self._loop, call, *args)

    def _loop(self, call: Callable[..., object], *args: Any) -> None:
        if self.ended:
            return
        if self.world.now < self._blocked_until:
            self._on_loop.append((call, args))
        else:
            call(*args)

    def block(self, seconds: float) -> None:
        """Let user code block the caller's loop for *seconds*; the renewal thread's goes on."""
        until = self.world.now + seconds
        if until > self._blocked_until:
            self._blocked_until = until
            self.world.at(until, self.do, self._unblock)

    def _unblock(self) -> None:
        if self.world.now < self._blocked_until:
            return
        waiting, self._on_loop = self._on_loop, []
        for call, args in waiting:
            self._loop_soon(call, *args)

    def _end(self) -> None:
        """The consumer has returned; its process may go on to something else."""
        self.ended = True
        self._died()

    # --- what is asked of it ---

    @property
    def buffered(self) -> bool:
        """Whether messages wait in its buffer."""
        raise NotImplementedError

    @property
    def stopped(self) -> bool:
        """Whether nothing of it is under way."""
        raise NotImplementedError

    def sequences(self) -> Iterable[int]:
        """Return the sequences of the messages that it holds."""
        raise NotImplementedError

    def hint(self) -> None:
        """Take in a hint of the broker, which may be false."""
        raise NotImplementedError

    def pause_claims(self) -> None:
        """Claim nothing until :meth:`resume_claims`."""
        raise NotImplementedError

    def resume_claims(self) -> None:
        """Claim again."""
        raise NotImplementedError

    def drain(self, grace: float) -> None:
        """Stop as on SIGTERM: let handlers finish for *grace* seconds, then cancel them, and then leave."""
        raise NotImplementedError

    # --- what is looked at when all has had its time ---

    def check_slots(self) -> None:
        """See that every handler that has ended has left its slot."""
        raise NotImplementedError

    def check_rest(self) -> None:
        """See that nothing is held: all is drained and answered."""
        raise NotImplementedError

    def check_stopped(self) -> None:
        """Say that it has not stopped, though it was told to."""
        raise NotImplementedError
