"""Operations of receivers: claim messages, lock sessions."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tenure._backends.sqlite.limiting import Limiting
from tenure._backends.sqlite.queue_reader import LockGroup, Queue, session_state
from tenure._backends.sqlite.rows import MessageRow, death_of, moment_of, text_of
from tenure._backends.sqlite.statements import statements
from tenure._backends.sqlite.transitions import ROW_BYTES
from tenure._foreign import read_or
from tenure._queue.broker import CLAIM_BYTES, Claim, NoSession
from tenure._queue.limits import delay_by, sooner_of
from tenure._queue.message import Death, Delivery, SessionLock
from tenure._queue.notes import read_deliveries
from tenure._queue.verdicts import LAPSED, Lapsed

CLAIM_MAX = 1_000
"""The most messages of one claim: the rest of the claim is rewritten with each verdict."""

STRANGE_MAX = 100
"""The most sessions with a name that is no text that one transaction sets aside."""

REPLACED = "\ufffd"
"""What a byte is read as that is no UTF-8: then the name can't be written back as it is."""

_NO_DEATH = (None, None, None, None)

_SQL = statements("queue.sql")


class Claiming(Limiting):
    """The operations of receivers."""

    def receive(self, name: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._write_sent()
        due_in = self.apply_due(queue)
        if queue.is_limited:
            return self._receive_limited(queue, limit, lock, due_in)
        rows, due_in = self._claimable(queue, "", limit, due_in)
        if not rows:
            self._delete_old_ids(queue)
            return Claim((), due_in)
        return Claim(self._lock_ready(queue, rows, lock), None if len(rows) == limit else due_in)

    def _receive_limited(self, queue: Queue, limit: int, lock: float, next_in: float | None) -> Claim:
        most = min(limit, self._allowance(queue).most)
        rows, due_in = self._claimable(queue, "", int(most), next_in)
        deliveries = self._lock_ready(queue, rows, lock) if rows else ()
        self._note_delivered(queue, len(rows))
        is_held_back = len(rows) == most < limit and self._is_any_ready(queue)
        if is_held_back:  # until a lock ends, also one of these
            due_in = sooner_of(sooner_of(next_in, lock if rows else None), self._allowance(queue).free_in)
        elif not rows:
            self._delete_old_ids(queue)
        return Claim(deliveries, None if len(rows) == limit else due_in, is_limited=True, is_held_back=is_held_back)

    def _lock_ready(self, queue: Queue, rows: Sequence[MessageRow], lock: float) -> list[Delivery]:
        """Lock the first ready messages, which *rows* are."""
        last = rows[-1]
        self._run(_SQL["delete_ready_up_to"], (queue.number, "", last[11], last[0]))
        queue.ready -= len(rows)
        token = _new_token()
        self._insert_claim(queue, token, 0, rows, lock)
        return self._locked_deliveries(queue, rows, token, self._at.wall + lock)

    def _claimable(
        self, queue: Queue, session: str, limit: int, due_in: float | None
    ) -> tuple[Sequence[MessageRow], float | None]:
        """Return claimable messages, up to the first expired one: there were too many to expire in one step.

        A dead letter does not expire again.
        """
        rows: list[MessageRow] = []
        size = 0
        for row in self._run(_SQL["claimable"], (queue.number, session, min(limit, CLAIM_MAX))):
            if row[10] is not None and self._is_expired(queue, row):
                if not rows:  # its entry among those that expire may be gone: so that it doesn't stand first for ever
                    self._expire_first(queue, session, row)
                return rows, 0.0
            rows.append(row)
            body = row[2]
            size += len(body) if isinstance(body, (bytes, str)) else ROW_BYTES
            if size >= CLAIM_BYTES:
                return rows, 0.0
        if not rows and limit > 0:  # else it finds none because it may hand out none
            queue.ready -= self._run(_SQL["delete_ready_without_message"], (queue.number, session)).rowcount
        return rows, 0.0 if len(rows) == CLAIM_MAX else due_in

    def _is_expired(self, queue: Queue, row: MessageRow) -> bool:
        expires_at = moment_of(row[10])
        return expires_at is not None and expires_at <= self._at.wall and not queue.is_dead

    def _expire_first(self, queue: Queue, session: str, row: MessageRow) -> None:
        sequence, expires_at, rank = row[0], row[10], row[11]
        self._take_from("expiry", queue.number, expires_at, sequence)
        if self._take_from("ready", queue.number, session, rank, sequence):
            queue.ready -= 1
            self._expire(queue, sequence, session or None)

    def receive_deferred(self, name: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._write_sent()
        self.apply_due(queue)
        most = self._allowance(queue).most
        found: list[int] = []
        is_held_back = False
        for one in dict.fromkeys(sequences):
            if len(found) < most:
                found += [one] if self._take_from("deferred", queue.number, one) else []
            elif self._run(_SQL["is_deferred"], (queue.number, one)).fetchone():
                is_held_back = True
        self._note_delivered(queue, len(found))
        if not found:
            return Claim((), is_limited=bool(queue.is_limited), is_held_back=is_held_back)
        queue.deferred -= len(found)
        rows = [row for row in (self._run(_SQL["message"], (sequence,)).fetchone() for sequence in found) if row]
        token = _new_token()
        self._insert_claim(queue, token, 0, rows, lock, was_deferred=True)
        deliveries = self._locked_deliveries(queue, rows, token, self._at.wall + lock)
        return Claim(deliveries, is_limited=bool(queue.is_limited), is_held_back=is_held_back)

    def _insert_claim(
        self,
        queue: Queue,
        token: int,
        part: int,
        rows: Sequence[MessageRow],
        lock: float,
        *,
        was_deferred: bool = False,
    ) -> None:
        self._insert_group(
            LockGroup(
                token, part, queue.number, None, int(was_deferred), 0.0, lock, dict.fromkeys(row[0] for row in rows)
            )
        )
        queue.locked += len(rows)

    def _locked_deliveries(self, queue: Queue, rows: Sequence[MessageRow], token: int, until: float) -> list[Delivery]:
        """Return deliveries of *rows*, which are locked now; a message does not expire under a lock."""
        made = self._deliveries_of(queue, rows, token, until)
        timed = [(queue.number, row[10], row[0]) for row in rows if row[10] is not None]
        if timed:
            self._run_many(_SQL["delete_expiry"], timed)
        if queue.is_dead:
            return [
                one._replace(delivery_count=read_or(read_deliveries, row[4], 0), death=self._death(queue, one))
                for one, row in zip(made, rows, strict=True)
            ]
        return made

    def _death(self, queue: Queue, delivery: Delivery) -> Death:
        return death_of(*self._run(_SQL["death"], (queue.number, delivery.sequence)).fetchone() or _NO_DEATH)

    def accept(self, name: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        queue = self.find(name) if session is None else self.open(name)
        if queue is None:
            return NoSession()
        self._write_sent()
        due_in = self.apply_due(queue)
        self._write_sessions()
        if session is None:
            session = self._free_session(queue)
            if session is None:
                return NoSession(due_in)
            if not (allowed := self._allowance(queue)).most:
                return NoSession(sooner_of(due_in, allowed.free_in), is_held_back=True)
        elif self._run(_SQL["lock_group_of_session"], (queue.number, session)).fetchone():
            return NoSession(due_in)
        token = _new_token()
        self._insert_group(LockGroup(token, 0, queue.number, session, 0, 0.0, lock, {}))
        self._touched[queue.number, session] = None
        row = self._run(_SQL["state"], (queue.number, session)).fetchone()
        return SessionLock(name, session, token, self._at.wall + lock, session_state(row))

    def _free_session(self, queue: Queue) -> str | None:
        """Return the free session that has waited longest; set those aside whose name no sender can have written."""
        for _ in range(STRANGE_MAX):
            row = self._run(_SQL["free_session"], (queue.number,)).fetchone()
            if row is None:
                return None
            session, first = row
            if text_of(session) and REPLACED not in session:
                return str(session)
            self._run(_SQL["set_aside_session"], (queue.number, first))
        return None

    def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        self._write_sent()
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        queue = self._numbered(group.queue)
        next_in = self.apply_due(queue)
        most = min(limit, self._allowance(queue).most, self._session_allowance(queue, held.session).most)
        rows, due_in = self._claimable(queue, held.session, int(most), next_in)
        (blocking,) = self._run(_SQL["blocking_in_session"], (queue.number, held.session)).fetchone()
        if blocking is not None and any(row[0] > blocking for row in rows):
            rows = [row for row in rows if row[0] < blocking]
            due_in = next_in  # ready messages behind it don't count
        deliveries = self._lock_in_session(queue, group, rows) if rows else ()
        if not queue.is_limited:
            return Claim(deliveries, None if len(rows) == limit else due_in)
        self._note_delivered(queue, len(rows), held.session)
        following = self._next_in_session(queue, held.session)
        here = self._session_allowance(queue, held.session)
        is_held_up = not here.most and (following is not None or blocking is not None)
        if is_held_up and following is not None:
            self._hold_up(queue, held.session, following, delay_by(here))
        is_held_back = len(rows) == most < limit and (is_held_up or following is not None)
        if is_held_back:
            lock = group.until - self._at.now if rows else None
            due_in = sooner_of(sooner_of(next_in, lock), self._allowance(queue).free_in)
        if is_held_back and is_held_up:
            due_in = delay_by(here)
        return Claim(
            deliveries,
            None if len(rows) == limit else due_in,
            is_limited=True,
            is_held_back=is_held_back,
            held_up_for=delay_by(here) if is_held_up else None,
        )

    def _lock_in_session(self, queue: Queue, group: LockGroup, rows: Sequence[MessageRow]) -> list[Delivery]:
        """Lock the first ready messages of a session, which *rows* are, under the lock of the session."""
        assert group.session is not None
        self._run(_SQL["delete_ready_up_to"], (queue.number, group.session, 0, rows[-1][0]))
        queue.ready -= len(rows)
        queue.locked += len(rows)
        group.sequences.update(dict.fromkeys(row[0] for row in rows))
        self._save_group(group)
        self._touched[queue.number, group.session] = None
        return self._locked_deliveries(queue, rows, group.token, self._at.wall + group.until - self._at.now)


def _new_token() -> int:
    # Not from the module random: a forked child would draw the same numbers.
    return (int.from_bytes(os.urandom(8)) >> 2) + 1
