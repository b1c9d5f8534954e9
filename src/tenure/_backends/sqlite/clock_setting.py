"""The way back for a file whose clock was moved ahead, by processes that saw a wrong wall clock.

The clock of a file never goes back by itself: nobody but a person can know whether the old time was wrong or the new
one is. Told which, this shifts what was noted in the wrong time, all in one transaction:

- What is past (sent, died, claimed, delivered) and lies in the future of the right time was noted by the wrong clock.
- So the end of a delay or of an expiry is shifted with the message that was sent then. One that was sent before keeps
  the times that the right clock has given it. But a retry of it counts as delayed by the wrong clock: then it comes
  too early, and never years too late.
- Locks end by the time since boot, which was right all the time.
"""

from __future__ import annotations

import json
import sqlite3
from typing import NamedTuple

from tenure._backends.sqlite.file_clock import ClockReading
from tenure._backends.sqlite.rows import log_of, moment_of, text_of
from tenure._backends.sqlite.statements import statements

AHEAD_MIN = 1.0
"""Seconds by which the clock of a file may be ahead: it is not worth it to set that back."""

_SQL = statements("clock.sql")


class ClockState(NamedTuple):
    """How far the clock of a file is ahead of the right one, and what was noted in the time that is yet to come."""

    ahead: float
    """Seconds; 0 if it isn't, by much."""
    since: float | None = None
    """When the first of that was noted, by the right clock."""
    messages: int = 0
    dead: int = 0
    ids: int = 0


def clock_state(connection: sqlite3.Connection, right: float, at: ClockReading) -> ClockState:
    """Return how far the clock of a file, read *at* this moment, is ahead of the right one, in Unix seconds."""
    ahead = at.wall - right
    if ahead < AHEAD_MIN:
        return ClockState(0.0)
    messages, dead, ids, *firsts = connection.execute(_SQL["ahead"], {"right": right}).fetchone()
    noted = [moment for moment in map(moment_of, firsts) if moment is not None]
    return ClockState(ahead, min(noted) - ahead if noted else None, messages, dead, ids)


def set_clock_back(connection: sqlite3.Connection, right: float, at: ClockReading) -> ClockState:
    """Set the clock of a file back to *right*, with all that was noted in between; return what was found.

    Inside a transaction, in which nothing is postponed.
    """
    state = clock_state(connection, right, at)
    if not state.ahead:
        return state
    values = {"right": right, "by": state.ahead}
    for name, statement in _SQL.items():
        if name.startswith("shift_"):  # in their order: the first ones need times that the later ones shift
            connection.execute(statement, values)
    for queue, session, bursts in connection.execute(_SQL["delivered_ahead"], {"right": right}).fetchall():
        log = [(one.began - state.ahead, one.at - state.ahead, one.number) for one in log_of(bursts)]
        last = log[-1][1] if log else right
        connection.execute(_SQL["set_delivered"], (last, json.dumps(log), queue, text_of(session) or ""))
    at.ahead, at.wall, at.needs_writing = right - at.now, right, True
    return state
