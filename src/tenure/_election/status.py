"""The status of one candidate at one moment, for probes: what it does, and when the store last answered it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CandidateState = Literal[
    "idle",  # no candidate campaigns: `run` was not called yet, or has returned
    "standing by",  # it waits for its turn, or has asked for the name
    "leading",  # it holds the lease, and the work runs
    "ending",  # its term ends: the work is ending, or the lease is being released
]
"""The state of one candidate."""


@dataclass(frozen=True, slots=True)
class CandidateStatus:
    """The status of this process's candidate for one name, at the moment of the call.

    Attributes:
        name: The name of the election.
        state: ``idle`` (no candidate campaigns), ``standing by``, ``leading``, or ``ending`` (a term ends: its work is
            ending, or its lease is being released).
        token: The fencing token of the present term; None if there is none.
        trusted_for: The seconds for which the present term is still trusted; 0.0 if it is over, or there is none.
        answered_ago: The seconds since the store last answered this candidate; None if it has not answered yet.
        problem: Why the newest request got no answer, or was not sent; empty if the store has answered since.
        overran: Whether work still runs although its term can no longer be trusted.
        is_live: Whether a restart of this process would improve nothing: no work has overrun. It depends neither on the
            store nor on being the leader.
        is_ready: Whether it leads in a trusted term; or stands by, and the store answered within the last ``ttl`` and
            two ``retry_every`` (a candidate that waits for a hint asks once per ``ttl``).
    """

    name: str
    state: CandidateState = "idle"
    token: int | None = None
    trusted_for: float = 0.0
    answered_ago: float | None = None
    problem: str = ""
    overran: bool = False
    is_live: bool = True
    is_ready: bool = False
