"""The limits of queues: how many messages a claim may take, and a note of what it took."""

from __future__ import annotations

import json

from tenure._backends.sqlite.queue_reader import Queue
from tenure._backends.sqlite.rows import count_of, log_of
from tenure._backends.sqlite.sending import Sending
from tenure._backends.sqlite.statements import statements
from tenure._queue.limits import UNLIMITED, Allowance, Burst, Rate, allowance_of, allowed_by, noted

FORGET_MAX = 2
"""How many logs of sessions whose time is over are deleted for each that is written: so their table doesn't grow."""

_SQL = statements("queue.sql")


class Limiting(Sending):
    """The questions of claims before they take messages of a limited queue, and their notes when they have."""

    def _allowance(self, queue: Queue) -> Allowance:
        """Return how many messages the limits of *queue* allow. Call it when what is due was applied."""
        if not queue.is_limited:
            return UNLIMITED
        settings = self.settings(queue.name)
        locked, log = 0, []
        if queue.has_max_locked:
            (kept,) = self._run(_SQL["locked"], (queue.number,)).fetchone()
            locked = count_of(kept) + queue.locked  # with what this transaction has changed
        if isinstance(settings.rate, tuple):
            log = self._log(queue, "")
        return allowance_of(settings, locked, log, self._at.wall)

    def _session_allowance(self, queue: Queue, session: str) -> Allowance:
        """Return how many messages the rate of sessions allows in *session*."""
        if not queue.is_limited:
            return UNLIMITED
        rate = self.settings(queue.name).session_rate
        return allowed_by(rate, self._log(queue, session), self._at.wall) if isinstance(rate, tuple) else UNLIMITED

    def _note_delivered(self, queue: Queue, count: int, session: str = "") -> None:
        """Note for the rates of *queue* that *count* messages were delivered, of *session* or of none."""
        if not (count and queue.is_limited):
            return
        settings = self.settings(queue.name)
        self._note(queue, "", settings.rate, count)
        if session and isinstance(settings.session_rate, tuple):
            over = self._at.wall - settings.session_rate[1]
            self._run(_SQL["delete_old_deliveries"], (queue.number, over, FORGET_MAX))
            self._note(queue, session, settings.session_rate, count)

    def _note(self, queue: Queue, session: str, rate: Rate, count: int) -> None:
        if isinstance(rate, tuple):
            log = noted(rate, self._log(queue, session), self._at.wall, count)
            self._run(_SQL["set_delivered"], (queue.number, session, log[-1].at, json.dumps(log)))

    def _log(self, queue: Queue, session: str) -> list[Burst]:
        row = self._run(_SQL["delivered"], (queue.number, session)).fetchone()
        return log_of(row[0]) if row else []

    def _is_any_ready(self, queue: Queue) -> bool:
        return bool(self._run(_SQL["any_ready"], (queue.number,)).fetchone()[0])

    def _next_in_session(self, queue: Queue, session: str) -> int | None:
        """Return the sequence of the next message of *session* that is ready, unless a retry blocks it."""
        first: int | None
        (first,) = self._run(_SQL["first_in_session"], (queue.number, session)).fetchone()
        (blocking,) = self._run(_SQL["blocking_in_session"], (queue.number, session)).fetchone()
        return None if first is None or (blocking is not None and blocking < first) else first

    def _hold_up(self, queue: Queue, session: str, sequence: int, seconds: float) -> None:
        """Delay the next message of *session*, so that it is not accepted before its rate allows a message."""
        self._take_from("ready", queue.number, session, 0, sequence)
        queue.ready -= 1
        self._enqueue(queue, sequence, session, 0, seconds, None, blocks=True)
