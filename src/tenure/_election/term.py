"""A term, as users meet it: the claim to lead, and until when it is trusted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from tenure._lease import Grant
from tenure._runtime.clock import Clock
from tenure._runtime.watchdog import Deadline
from tenure.errors import TermLost
from tenure.events import Reason

END_REASONS: Mapping[Reason, str] = MappingProxyType(
    {
        "denied": "the store answered that the lease has ended or belongs to another candidate",
        "unanswered": "the store did not confirm the lease in time",
        "stalled": "the lease was not renewed because the work made no progress",
        "asked": "the leader was asked to step down",
        "resigned": "this candidate resigned",
        "stopped": "the campaign was stopped",
        "ended": "the work has ended",
    }
)

_this_process = object()
"""Identifies this process, without a system call: a forked child gets another object."""


def _after_fork() -> None:
    global _this_process
    _this_process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Flag(Protocol):
    """An event, of asyncio or of threading."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


FlagT = TypeVar("FlagT", bound=Flag)


class TermBase(Generic[FlagT]):
    """A claim to lead, and until when it is trusted: shared by the terms of event loops and of threads."""

    name: str
    holder: str
    token: int
    lost: FlagT

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock, lost: FlagT) -> None:
        self.name = grant.name
        self.holder = grant.holder
        self.token = grant.token
        self.lost = lost
        self._trusted_until = trusted_until
        self._clock = clock
        self._beat_at = clock.now()
        self._end_reason: Reason | None = None
        self._process = _this_process
        self._pid = os.getpid()
        self._exit_deadline: Deadline | None = None  # with overrun="exit": when the process ends, if work still runs
        self._work_runs = False  # written where the work runs

    def remaining(self) -> float:
        """Return for how many seconds this term is still trusted, unless its lease is renewed; 0.0 if it is over.

        In a forked child it is 0.0: the term belongs to the process that won it.
        """
        if self._process is not _this_process:
            return 0.0
        return max(0.0, self._trusted_until - self._clock.now())

    def check(self) -> None:
        """Return if this term is trusted right now, or raise; call it before every act that only a leader may do.

        It compares the clock with the deadline when it is called, so the answer is right even if the event loop was
        blocked.

        Raises:
            TermLost: The term is over, and the next leader has a newer token; or this is a forked child, and the term
                belongs to the process that won it.
        """
        if self._clock.now() >= self._trusted_until or self._process is not _this_process:
            raise TermLost(self.loss_message())

    def beat(self) -> None:
        """Prove that the work makes progress: with ``stall_after``, the lease is renewed only while beats come."""
        self._beat_at = self._clock.now()

    def _note_work_start(self) -> bool:
        """Note that the work starts, unless the term is over; return whether it may."""
        self._work_runs = True  # before the clock is read: from here on the exit deadline covers the work
        if self._exit_deadline is not None:
            self._exit_deadline.begin()
        return self.remaining() > 0.0

    def _note_work_end(self) -> None:
        """Note, on the work's own thread, that the work has ended: the exit deadline is lifted."""
        self._work_runs = False
        if self._exit_deadline is not None and self._process is _this_process:
            self._exit_deadline.lift()

    def loss_message(self) -> str:
        """Return why this term is over, and what to do about it."""
        if self._process is not _this_process:
            return (
                f"term {self.token} of {self.name!r} belongs to process {self._pid}, which won it, and this is "
                f"{os.getpid()}, its child by fork; act as the leader there, or pass the child what it needs to know: "
                "term.token is no secret"
            )
        return (
            f"term {self.token} of {self.name!r} is over: {END_REASONS[self._end_reason or 'unanswered']}; stop acting "
            "as the leader, and send term.token along with every write, so that the resource can refuse an old one"
        )

    def __repr__(self) -> str:
        left = self.remaining()
        return f"<Term {self.token} of {self.name!r}, {f'{left:.3g} s left' if left else 'over'}>"


class Term(TermBase[asyncio.Event]):
    """A term of leadership: the name that is led, the fencing token, and how long the term is trusted.

    Attributes:
        name: The name of the election.
        holder: The identity that won; new for each acquisition.
        token: The fencing token. It rises with every acquisition, by any candidate, and never falls.
        lost: An ``asyncio.Event``, set when the work is cancelled.
    """

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock, asyncio.Event())


class BlockingTerm(TermBase[threading.Event]):
    """A term of leadership, for threads: as :class:`tenure.Term`.

    Attributes:
        name: The name of the election.
        holder: The identity that won; new for each acquisition.
        token: The fencing token. It rises with every acquisition, by any candidate, and never falls.
        lost: A ``threading.Event``, set when the work has to end.
    """

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock, threading.Event())


MakeTerm = Callable[[Grant, float, Clock], TermBase[Any]]
