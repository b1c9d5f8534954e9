"""The states of messages, and their transitions: between ready, delayed, deferred and locked, and to the dead letters.

House rules:

- A message is in one place: ready, delayed, deferred, or in a lock group (the messages of one claim). A transition
  takes it out of one place, puts it into another, and counts both in the same transaction.
- Time alone makes transitions due: a delay, an expiry or a lock has ended. They are applied by the next claim or
  reader: ``apply_due`` finds them at the beginning of three indexes. Each message moves once for each, so claiming and
  counting take a time that doesn't grow with the number of messages.
- A lock is judged by the time since boot, which can't be set. A lock from another boot can't be compared with that, and
  may be live: it restarts with its whole length from now, as leases do. So does one that ends later than its length
  from now, if the clock went back under the same name of the boot.
- Delays, expiries and windows must survive a boot, so they are judged by the wall clock, which never goes back here: if
  it was set back, it continues from where it was, at the pace of the time since boot.
- Another program may have changed any row, or deleted some: a message that is gone is left out, wherever it still has a
  place, and one that has a place already is not put there twice. What is unreadable of a message is ignored.
- The time is read inside the transaction, after the write lock was won: an earlier reading may be old.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

from tenure._backends.sqlite.file_clock import ClockReading, FileClock
from tenure._backends.sqlite.queue_reader import LockGroup, Queue, QueueReader
from tenure._backends.sqlite.rows import MessageState, history_with, moment_of, pack, text_of, unpack
from tenure._backends.sqlite.statements import statements
from tenure._foreign import read_or
from tenure._queue.checks import COUNT_MAX
from tenure._queue.delivery_ends import LOCK_ENDED, TIME_IS_OVER, Cause, EndedDelivery, Ending, outcome_of
from tenure._queue.message import Died
from tenure._queue.notes import read_deliveries
from tenure._queue.verdicts import SETTLED, DeadLetter, Defer, Settled
from tenure._runtime.process_name import process_name

T = TypeVar("T")

DUE_MAX = 1_000
"""The most messages that become due in one transaction, so that none takes long."""

ROW_BYTES = 200
"""The approximate bytes that a message takes besides its body."""

MANY = 20
"""Plain messages in one statement: three times faster than one by one, and more gain little."""

_SQL = statements("queue.sql")
_INSERT_MANY = _SQL["insert_many_plain"].replace("VALUES (?, ?)", "VALUES " + ", ".join(["(?, ?)"] * MANY))


class Transitions(QueueReader):
    """The changes of one transaction. Call ``close`` before the commit, and notify for ``changed`` after it."""

    def __init__(self, connection: sqlite3.Connection, clock: FileClock) -> None:
        super().__init__(connection, clock)
        self._connection = connection
        self._plain: dict[int, list[Any]] = {}  # sent, not written yet: by queue, a sequence and a body in turn
        self._messages: list[tuple[Any, ...]] = []  # sent, not written yet, with more than a body
        self._newest = self._flushed = self._at.sequence
        self._touched: dict[tuple[int, str], None] = {}  # sessions whose row may have to change
        self.growth: int = 0
        """The approximate number of bytes that were sent, once they are written."""
        self.needs_reserve = False
        """Whether they may be written only if the disk keeps its reserve."""
        self.changed: dict[str, None] = {}
        """Queues in which something may have become claimable, now or later."""
        self.died: dict[str, list[Died]] = {}
        """By queue: the messages that expired, or whose lock ended once too often."""

    def close(self) -> None:
        """Write everything that was postponed."""
        self._write_sent()
        self._restamp_late_locks()
        self._write_sessions()
        self._write_counts()
        at = self._at
        if at.needs_writing or self._newest != at.sequence:
            self._run(_SQL["set_clock"], (self._newest, at.boot, at.ahead, at.wall))

    def by_clock(self, work: Callable[[sqlite3.Connection, float, ClockReading], T], right: float) -> T:
        """Return the result of *work* about the clock of the file, which it may change; see ``clock_setting``."""
        self._write_sent()
        found = work(self._connection, right, self._at)
        self.changed.update(dict.fromkeys(self.names()))  # what consumers wait for may be due at another time
        return found

    def _write_counts(self) -> None:
        """Write the changes of the counts. Call it before the counts are read."""
        for queue in self._queues.values():
            changed = (queue.ready, queue.locked, queue.delayed, queue.deferred)
            if any(changed):
                self._run(_SQL["add_counts"], (*changed, queue.number))
                queue.ready = queue.locked = queue.delayed = queue.deferred = 0

    def _write_sent(self) -> None:
        """Write the messages that were sent. Call it before messages are read."""
        if self._newest == self._flushed:
            return
        self.growth += ROW_BYTES * (self._newest - self._flushed)
        self._run_many(_SQL["insert_message"], self._messages)
        for row in self._messages:
            self.growth += sum(len(part) for part in row if isinstance(part, (str, bytes)))  # headers may be long
        for number, flat in self._plain.items():
            self.growth += sum(map(len, flat[1::2]))
            cut = len(flat) - len(flat) % (2 * MANY)
            for start in range(0, cut, 2 * MANY):
                self._run(_INSERT_MANY, (number, self._at.wall, *flat[start : start + 2 * MANY]))
            for start in range(cut, len(flat), 2):
                self._run(_SQL["insert_plain"], (number, self._at.wall, flat[start], flat[start + 1]))
        self._run(_SQL["ready_range"], (self._flushed + 1, self._newest))
        self._flushed = self._newest
        self._messages.clear()
        self._plain.clear()

    # --- lock groups ---

    def _insert_group(self, group: LockGroup) -> None:
        self._run(
            _SQL["insert_lock_group"],
            (
                group.token,
                group.part,
                group.queue,
                group.session,
                group.was_deferred,
                self._at.boot,
                self._at.now + group.lock,
                group.lock,
                pack(group.sequences),
                process_name(),
                self._at.wall,
            ),
        )

    def _save_group(self, group: LockGroup) -> None:
        """Write the remaining messages of *group*."""
        if group.sequences or group.session is not None:
            self._run(_SQL["set_lock_group_messages"], (pack(group.sequences), group.token, group.part))
        else:
            self._run(_SQL["delete_lock_group"], (group.token, group.part))

    # --- the end of a delivery ---

    def _end(self, queue: Queue, group: LockGroup, sequence: int, ending: Ending) -> Settled:
        """Do with a message that was taken out of its group what becomes of it at the end of a delivery."""
        state = self._state(sequence)
        if state is None:
            return SETTLED
        outcome = outcome_of(ending, self._delivered(queue, group, state), queue.max_deliveries, self._at.wall)
        if outcome.attempt is not None or outcome.deliveries != state.deliveries:
            history = state.history if outcome.attempt is None else history_with(state.history, outcome.attempt)
            self._run(_SQL["set_message_state"], (outcome.deliveries, history, sequence))
        if not isinstance(ending, (Defer, DeadLetter)):
            self.changed[queue.name] = None
        if outcome.cause is not None:
            self._dead_letter(queue, sequence, outcome.cause)
        elif queue.is_dead:
            self._enqueue(queue, sequence, None, 0, outcome.delay, None, blocks=False)
        elif outcome.place == "deferred":
            self._defer(queue, sequence)
        else:
            blocks = outcome.deliveries > 0
            self._enqueue(
                queue, sequence, state.session, state.priority, outcome.delay, state.expires_at, blocks=blocks
            )
        return outcome.answer

    def _delivered(self, queue: Queue, group: LockGroup, state: MessageState) -> EndedDelivery:
        """Return a message whose delivery ends; of a live one, its row doesn't count that delivery."""
        if queue.is_dead:
            return EndedDelivery(state.deliveries, is_dead=True)
        is_expired = state.expires_at is not None and state.expires_at <= self._at.wall
        return EndedDelivery(min(state.deliveries + 1, COUNT_MAX), is_expired, bool(group.was_deferred))

    def _defer(self, queue: Queue, sequence: int) -> None:
        queue.deferred += self._run(_SQL["insert_deferred"], (queue.number, sequence)).rowcount

    def _enqueue(
        self,
        queue: Queue,
        sequence: int,
        session: str | None,
        priority: int,
        delay: float,
        expires_at: float | None,
        *,
        blocks: bool,
    ) -> None:
        """Put a message among the ready or the delayed ones."""
        if delay > 0:
            due_at = self._at.wall + delay
            self._run(_SQL["set_due"], (due_at, sequence))
            entry = (queue.number, due_at, sequence, session if blocks else None)
            queue.delayed += self._run(_SQL["insert_delayed"], entry).rowcount
        else:
            rank = -priority if session is None else 0
            queue.ready += self._run(_SQL["insert_ready"], (queue.number, session or "", rank, sequence)).rowcount
        if expires_at is not None:
            self._run(_SQL["insert_expiry"], (queue.number, expires_at, sequence))
        if session is not None:
            self._touched[queue.number, session] = None

    def _dead_letter(self, queue: Queue, sequence: int, cause: Cause) -> None:
        """Move a message, which was taken out of its place, to the dead letters."""
        dead = queue if queue.is_dead else self._numbered(queue.number + 1)
        self._run(_SQL["insert_death"], (dead.number, sequence, self._at.wall, *cause))
        dead.ready += self._run(_SQL["insert_ready"], (dead.number, "", 0, sequence)).rowcount
        self.changed[dead.name] = None

    def _report_death(self, queue: Queue, sequence: int) -> None:
        """Report a message that died without a verdict; after a verdict, its answer reports the death."""
        named, deliveries, reason = self._run(_SQL["death_summary"], (queue.number | 1, sequence)).fetchone()
        known_as = text_of(named) or f"{self._prefix}{sequence}"
        died = Died(sequence, known_as, read_or(read_deliveries, deliveries, 0), reason)
        self.died.setdefault(queue.name, []).append(died)

    def _take_from(self, place: str, *key: object) -> bool:
        """Remove a message from *place*; return False if it isn't there."""
        return self._run(_SQL[f"delete_{place}"], key).rowcount > 0

    # --- time ---

    def apply_all_due(self, name: str) -> None:
        """Apply what is due in a queue and its dead letters, or as much of it as one transaction may."""
        self._write_sent()
        queue = self.find(name)
        if queue is not None:
            for number in {queue.number, queue.number | 1}:
                self.apply_due(self._numbered(number))

    def apply_due(self, queue: Queue) -> float | None:
        """Apply what is due in *queue*, or as much of it as one transaction may.

        Returns the seconds until something is due next: 0 if more is due already; None for never.
        """
        at = self._at
        self._restamp_late_locks()
        due_at, until, expires_at, has_foreign = self._run(
            _SQL["next_due"], {"queue": queue.number, "boot": at.boot}
        ).fetchone()
        if has_foreign:
            self._run(_SQL["restamp_foreign_lock_groups"], {"queue": queue.number, "boot": at.boot, "now": at.now})
        is_due = False
        due_at, until, expires_at = map(moment_of, (due_at, until, expires_at))
        if until is not None and until <= at.now:
            is_due = True
            self._expire_locks(queue)
        if expires_at is not None and expires_at <= at.wall:
            is_due = True
            self._expire_messages(queue)
        if due_at is not None and due_at <= at.wall:
            is_due = True
            self._end_delays(queue)
        if is_due or has_foreign:
            row = self._run(_SQL["next_due"], {"queue": queue.number, "boot": at.boot}).fetchone()
            due_at, until = moment_of(row[0]), moment_of(row[1])
        waits = []
        if due_at is not None:
            waits.append(max(0.0, due_at - at.wall))
        if until is not None:
            waits.append(max(0.0, until - at.now))
        return min(waits) if waits else None

    def _restamp_late_locks(self) -> None:
        """Restart all locks that end later than they can, because the clock went back. That is rare."""
        if self._at.went_back:
            self._run(_SQL["restamp_late_lock_groups"], {"boot": self._at.boot, "now": self._at.now})
            self._at.went_back = False

    def _expire_locks(self, queue: Queue) -> None:
        done = 0
        while done < DUE_MAX:
            row = self._run(_SQL["expired_lock_groups"], (queue.number, self._at.boot, self._at.now)).fetchone()
            if row is None:
                return
            token, part, session, was_deferred, packed = row
            session = text_of(session)
            group = LockGroup(token, part, queue.number, session, was_deferred, 0.0, 0.0, unpack(packed))
            self._run(_SQL["delete_lock_group"], (token, part))
            if session is not None:
                self._touched[queue.number, session] = None
                self.changed[queue.name] = None
            queue.locked -= len(group.sequences)
            for sequence in group.sequences:
                if self._end(queue, group, sequence, LOCK_ENDED).dead:
                    self._report_death(queue, sequence)
            done += len(group.sequences) + 1

    def _expire_messages(self, queue: Queue) -> None:
        for sequence, expires_at in self._run(
            _SQL["expired_messages"], (queue.number, self._at.wall, DUE_MAX)
        ).fetchall():
            self._take_from("expiry", queue.number, expires_at, sequence)
            state = self._state(sequence)
            if state is None:
                continue
            rank = -state.priority if state.session is None else 0
            if self._take_from("ready", queue.number, state.session or "", rank, sequence):
                queue.ready -= 1
            elif self._take_from("delayed", queue.number, state.due_at, sequence):
                queue.delayed -= 1
            else:
                continue  # another program has changed its priority, session or delay: it expires when it is claimed
            self._expire(queue, sequence, state.session)

    def _expire(self, queue: Queue, sequence: int, session: str | None) -> None:
        """Dead-letter an expired message, which was taken out of its place."""
        if session is not None:
            self._touched[queue.number, session] = None
        self._dead_letter(queue, sequence, TIME_IS_OVER)
        self._report_death(queue, sequence)

    def _end_delays(self, queue: Queue) -> None:
        for sequence, due_at in self._run(_SQL["due_delayed"], (queue.number, self._at.wall, DUE_MAX)).fetchall():
            self._take_from("delayed", queue.number, due_at, sequence)
            queue.delayed -= 1
            state = self._state(sequence)
            if state is None:
                continue
            session, priority = (None, 0) if queue.is_dead else (state.session, state.priority)
            self._enqueue(queue, sequence, session, priority, 0.0, None, blocks=False)
            self.changed[queue.name] = None

    # --- sessions ---

    def _write_sessions(self) -> None:
        """Write, for the sessions that were touched, whether they can be accepted."""
        if not self._touched:
            return
        self._write_sent()
        for number, session in self._touched:
            (first,) = self._run(_SQL["first_in_session"], (number, session)).fetchone()
            held = self._run(_SQL["lock_group_of_session"], (number, session)).fetchone()
            (blocking,) = self._run(_SQL["blocking_in_session"], (number, session)).fetchone()
            is_free = held is None and first is not None and (blocking is None or first < blocking)
            self._run(_SQL["set_session"], (number, session, first, is_free))
            if held is None and first is None:
                self._run(_SQL["delete_session"], (number, session))
        self._touched.clear()
