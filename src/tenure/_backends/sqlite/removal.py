"""Operations of operators: redrive and purge dead letters, purge live messages, delete queues."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.sqlite.queue_reader import Queue
from tenure._backends.sqlite.rows import (
    dead_message,
    runs_of,
    unpack,
)
from tenure._backends.sqlite.sending import Sending
from tenure._backends.sqlite.statements import statements
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.outgoing import Outgoing

STEP = 1_000
"""The most messages that one transaction deletes with their queue."""

_SQL = statements("queue.sql")


class Removal(Sending):
    """The operations of operators."""

    def take_dead(self, name: str, which: Selection, limit: int, *, to: str | None) -> list[int]:
        """Put dead letters that are not locked into the queue *to*, or remove them; return their sequences."""
        self._write_sent()
        dead = self._dead_of(name)
        if dead is None:
            return []
        found = self._selected(dead, which, limit, with_locked=False)
        live = self._numbered(dead.number - 1)
        for sequence in found:
            state = self._state(sequence)
            assert state is not None  # it was selected in this transaction
            if self._take_from("ready", dead.number, "", 0, sequence):
                dead.ready -= 1
            elif self._take_from("delayed", dead.number, state.due_at, sequence):
                dead.delayed -= 1
            if to is not None and to != name:
                self._send_copy(to, dead, sequence)
            if to == name:
                self._run(_SQL["reset_message"], (sequence,))
                self._enqueue(live, sequence, state.session, state.priority, 0.0, None, blocks=False)
                self.changed[live.name] = None
            else:
                self._run(_SQL["delete_messages"], (sequence, sequence))
            self._run(_SQL["delete_deaths"], (dead.number, sequence, sequence))
        return found

    def _send_copy(self, name: str, dead: Queue, sequence: int) -> None:
        """Send a dead letter of another queue to the one called *name*, without a check for duplicates."""
        letter = dead_message(
            dead.name, self._prefix, self._run(_SQL["dead_letter"], (dead.number, sequence)).fetchone()
        )
        _, _, _, _, _, history = self._run(_SQL["message_state"], (sequence,)).fetchone()
        queue = self.open(name)
        self._newest += 1
        copy = Outgoing(
            letter.body,
            id=letter.id,
            headers=letter.headers,
            session=letter.session,
            priority=letter.priority,
            reply_to=letter.reply_to,
            correlation_id=letter.correlation_id,
        )
        self._add(queue, self._newest, copy)
        queue.ready += 1
        self._write_sent()
        self._run(_SQL["set_message_state"], (0, history, self._newest))
        self.changed[name] = None

    def purge_live(self, name: str, sequences: Sequence[int], which: LiveSelection) -> int:
        """Remove those of *sequences* that wait in a selected state; return how many."""
        self._write_sent()
        queue = self.find(name)
        gone = [] if queue is None else [one for one in sequences if self._take_waiting(queue, one, which)]
        if gone:
            self._run_many(_SQL["delete_messages"], runs_of(gone))
        return len(gone)

    def _take_waiting(self, queue: Queue, sequence: int, which: LiveSelection) -> bool:
        """Remove a message from its place; return False if it is locked, or its state is not selected."""
        state = self._state(sequence)
        if state is None:
            return False
        _, priority, session, due_at, expires_at, _ = state
        rank = -priority if session is None else 0
        if which.wants("ready") and self._take_from("ready", queue.number, session or "", rank, sequence):
            queue.ready -= 1
        elif which.wants("delayed") and self._take_from("delayed", queue.number, due_at, sequence):
            queue.delayed -= 1
        elif which.wants("deferred") and self._take_from("deferred", queue.number, sequence):
            queue.deferred -= 1
        else:
            return False
        if expires_at is not None:
            self._take_from("expiry", queue.number, expires_at, sequence)
        if session is not None:  # the message may have blocked others
            self._touched[queue.number, session] = None
            self.changed[queue.name] = None
        return True

    def delete_when_idle(self, name: str, seconds: float) -> None:
        """Note when a queue may be deleted."""
        self._run(_SQL["set_idle"], (self.open(name).number, self._at.wall + seconds))

    def delete(self, name: str, *, force: bool) -> bool:
        """Delete a queue; return False if it has messages, or, with *force*, had some, which are deleted first."""
        self._write_sent()
        self._write_sessions()  # none may be written for a queue that is gone
        self._write_counts()  # other requests of this transaction may have sent to it
        queue = self.find(name)
        if queue is None:
            return True
        if force:  # the rows decide, not the counts, which may have been changed by hand
            if self.empty(name):
                return False
        elif self._run(_SQL["size"], {"queue": queue.number}).fetchone()[0]:
            return False
        for number in (queue.number, queue.number + 1):
            for what in (
                "lock_groups",
                "sessions",
                "sent_ids",
                "handled_ids",
                "idle",
                "retention",
                "declared",
                "schedules",
            ):
                self._run(_SQL[f"clear_{what}"], (number,))
            self._run(_SQL["delete_queue"], (number,))
        self._queues.clear()
        return True

    def empty(self, name: str) -> bool:
        """Delete some messages of a queue, in any state; return whether there may be more."""
        self._write_sent()
        queue = self.find(name)
        if queue is None:
            return False
        found = [self._empty(self._numbered(number)) for number in (queue.number, queue.number + 1)]
        return any(found)

    def _empty(self, queue: Queue) -> bool:
        found: list[int] = []
        for place in ("ready", "delayed", "deferred"):
            taken = self._run(_SQL[f"empty_{place}"], (queue.number, STEP)).fetchall()
            setattr(queue, place, getattr(queue, place) - len(taken))
            found += [sequence for (sequence,) in taken if type(sequence) is int]
        for token, part, packed in self._run(_SQL["some_lock_groups"], (queue.number, STEP)).fetchall():
            sequences = unpack(packed)
            self._run(_SQL["delete_lock_group"], (token, part))
            queue.locked -= len(sequences)
            found += sequences
        for first, last in runs_of(found) if found else ():  # a run has no gaps, so it has no messages of other queues
            timed = self._run(_SQL["expiring"], (queue.number, first, last)).fetchall()
            self._run_many(_SQL["delete_expiry"], timed)
            self._run(_SQL["delete_deaths"], (queue.number, first, last))
            self._run(_SQL["delete_messages"], (first, last))
        return bool(found)
