"""The verbs of queues: each is done to the books inside one transaction, on whatever connection that runs.

What can be refused is refused before the first write, and nothing here fails half-way.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tenure._backends.sqlite.queue_reader import LockGroup, Queue
from tenure._backends.sqlite.rows import (
    MessageRow,
    columns_of,
    dead_message_of,
    death_of,
    headers_column,
    runs_of,
    unpack,
)
from tenure._backends.sqlite.schema import TableSet
from tenure._backends.sqlite.statements import statements
from tenure._backends.sqlite.transitions import Transitions
from tenure._queue.broker import CLAIM_BYTES, Claim, LiveSelection, NoSession, QueueSettings, Selection, SettingChanges
from tenure._queue.message import (
    COMPLETE,
    DEAD_SUFFIX,
    LAPSED,
    NO_HEADERS,
    SETTLED,
    Abandon,
    Complete,
    DeadLetter,
    Death,
    Defer,
    Delivery,
    GiveBack,
    Lapsed,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    Verdict,
    dead_letters_of,
)

CLAIM_MAX = 1_000
"""So many messages make one claim: what is left of it is written anew with each verdict."""

FORGET_MAX = 100
"""So many ids are forgotten by a claim that finds nothing."""

QUEUES = TableSet("queues", version=1, script="queue_schema.sql")
IDLE = TableSet("idle queues", version=1, script="idle_schema.sql")

STEP = 1_000
"""So many messages are deleted with their queue in one transaction."""

_SQL = statements("queue.sql")


class Operations(Transitions):
    """The books, to be written in."""

    def open(self, name: str) -> Queue:
        """Return the queue called *name*; make it if it was never used."""
        queue = self.find(name)
        if queue is None:
            (newest,) = self._run(_SQL["newest_queue"]).fetchone()
            unset = columns_of(QueueSettings())
            self._run(_SQL["create_queue"], (newest + 1, name, *unset))
            self._run(_SQL["create_queue"], (newest + 2, dead_letters_of(name), *unset))
            queue = self.find(name)
            assert queue is not None
            assert not queue.is_dead
        return queue

    def declare(self, name: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of a queue; return the settings that hold then."""
        queue = self.open(name)
        settings = replace(self.settings(name), **changes)
        self._run(_SQL["declare"], (*columns_of(settings), name))
        if "dead_retention" in changes:
            self._run(_SQL["set_retention"], (queue.number, settings.dead_retention))
        queue.max_deliveries, queue.dedupe_window = settings.max_deliveries, settings.dedupe_window
        return settings

    # --- sending ---

    def send(self, name: str, messages: Sequence[Outgoing], *, needs_reserve: bool = True) -> list[str]:
        """Keep *messages*; return their ids. With *needs_room*, only if a reserve is left on the disk."""
        if needs_reserve:
            self.needs_reserve = True
        queue = self.open(name)
        prefix, sequence, delayed = self._prefix, self._newest, queue.delayed
        add_plain = self._plain.setdefault(queue.number, []).extend
        ids = []
        for message in messages:
            named = message.id
            if named is not None and not self._is_new_id(queue, named):
                ids.append(named)
                continue
            sequence += 1
            ids.append(named or f"{prefix}{sequence}")
            if _is_plain(message):
                add_plain((sequence, message.body))
            else:
                self._add(queue, sequence, message)
        if sequence != self._newest:
            queue.ready += sequence - self._newest - (queue.delayed - delayed)
            self._newest = sequence
            self.changed[name] = None
        return ids

    def _add(self, queue: Queue, sequence: int, message: Outgoing) -> None:
        """Note a message that says more than its body."""
        number, wall = queue.number, self._at.wall
        due_at = self._due_at(message)
        expires_at = None if message.expires_in is None else wall + message.expires_in
        self._messages.append(
            (
                sequence,
                number,
                wall,
                message.priority,
                message.id,
                headers_column(message),
                message.session,
                due_at,
                expires_at,
                message.reply_to,
                message.correlation_id,
                message.body,
            )
        )
        if due_at is not None:
            queue.delayed += 1
            self._run(_SQL["insert_delayed"], (number, due_at, sequence, None))
        elif message.session is not None:
            self._touched[number, message.session] = None
        if expires_at is not None:
            self._run(_SQL["insert_expiry"], (number, expires_at, sequence))

    def _due_at(self, message: Outgoing) -> float | None:
        if message.at is not None:
            assert isinstance(message.at, (int, float))
            return message.at if message.at > self._at.wall else None
        return self._at.wall + message.delay if message.delay else None

    def _is_new_id(self, queue: Queue, name: str) -> bool:
        """Whether no message was sent under this *name* in the window; from now on one was."""
        since = self._at.wall - queue.dedupe_window
        # Two at a time, for one that is added: so what is remembered doesn't grow for ever, and no sweep is needed.
        self._run(_SQL["delete_old_sent_ids"], (queue.number, since, 2))
        if not queue.dedupe_window:
            return True
        return self._run(_SQL["remember_sent_id"], (queue.number, name, self._at.wall, since)).rowcount > 0

    def _delete_old_ids(self, queue: Queue) -> None:
        """Forget ids that are over, of this queue and of another one: there, nobody may send or receive any more."""
        other = self._run(_SQL["any_queue"]).fetchone()
        for number in {queue.number & ~1, *(other or ())}:
            one = self._numbered(number)
            self._run(_SQL["delete_old_sent_ids"], (number, self._at.wall - one.dedupe_window, FORGET_MAX))
            self._run(_SQL["delete_old_handled_ids"], (number, self._at.wall, FORGET_MAX))

    # --- claiming ---

    def receive(self, name: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._write_sent()
        due_in = self.apply_due(queue)
        rows, due_in = self._claimable(queue, "", limit, due_in)
        if not rows:
            self._delete_old_ids(queue)
            return Claim((), due_in)
        last = rows[-1]
        self._run(_SQL["delete_ready_up_to"], (queue.number, "", last[11], last[0]))
        queue.ready -= len(rows)
        token = _new_token()
        self._insert_claim(queue, token, 0, rows, lock)
        return Claim(
            self._locked_deliveries(queue, rows, token, self._at.wall + lock), None if len(rows) == limit else due_in
        )

    def _claimable(
        self, queue: Queue, session: str, limit: int, due_in: float | None
    ) -> tuple[Sequence[MessageRow], float | None]:
        """Return what may be claimed, up to what has expired and is not entered yet: there is too much for one step."""
        rows: list[MessageRow] = []
        size = 0
        for row in self._run(_SQL["claimable"], (queue.number, session, min(limit, CLAIM_MAX))):
            if row[10] is not None and row[10] <= self._at.wall:
                return rows, 0.0
            rows.append(row)
            size += len(row[2])
            if size >= CLAIM_BYTES:
                return rows, 0.0
        return rows, 0.0 if len(rows) == CLAIM_MAX else due_in

    def receive_deferred(self, name: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._write_sent()
        self.apply_due(queue)
        found = [one for one in dict.fromkeys(sequences) if self._take_from("deferred", queue.number, one)]
        if not found:
            return Claim(())
        queue.deferred -= len(found)
        rows = [self._run(_SQL["message"], (sequence,)).fetchone() for sequence in found]
        token = _new_token()
        self._insert_claim(queue, token, 0, rows, lock, was_deferred=True)
        return Claim(self._locked_deliveries(queue, rows, token, self._at.wall + lock))

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
        """Make deliveries of *rows*, which are locked now; their ttl does not end under a lock."""
        made = self._deliveries_of(queue, rows, token, until)
        timed = [(queue.number, row[10], row[0]) for row in rows if row[10] is not None]
        if timed:
            self._run_many(_SQL["delete_expiry"], timed)
        if queue.is_dead:
            return [one._replace(delivery_count=one.delivery_count - 1, death=self._death(queue, one)) for one in made]
        return made

    def _death(self, queue: Queue, delivery: Delivery) -> Death:
        return death_of(*self._run(_SQL["death"], (queue.number, delivery.sequence)).fetchone())

    # --- under a lock ---

    def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        answers: list[Renewed | Lapsed] = [LAPSED] * len(held)
        for token, places in _by_token(held).items():
            groups = self._groups(token)
            kept: dict[int, None] = {}
            for place in places:
                one = held[place]
                group = self._group_of(groups, one)
                if group is None:
                    continue
                if isinstance(one, SessionLock):
                    self._renew_group(group, lock)
                elif group.session is None:
                    kept[one.sequence] = None
                until = group.until if group.session is not None else max(group.until, self._at.now + lock)
                answers[place] = Renewed(self._at.wall + until - self._at.now)
            if kept:
                self._renew_some(groups, kept, lock)
        return answers

    def _renew_some(self, groups: list[LockGroup], kept: dict[int, None], lock: float) -> None:
        """Renew those *kept*: as they are if they are all of a row, and else in a row of their own."""
        for group in groups:
            mine = [sequence for sequence in group.sequences if sequence in kept]
            if not mine:
                continue
            if len(mine) == len(group.sequences):
                self._renew_group(group, lock)
                continue
            for sequence in mine:
                del group.sequences[sequence]
            self._save_group(group)
            (newest,) = self._run(_SQL["newest_part"], (group.token,)).fetchone()
            longer = max(lock, group.until - self._at.now)
            part = replace(group, part=(newest or 0) + 1, lock=longer, sequences=dict.fromkeys(mine))
            self._insert_group(part)

    def _renew_group(self, group: LockGroup, lock: float) -> None:
        group.lock = max(lock, group.until - self._at.now)  # a lock never ends sooner for being renewed
        group.until = self._at.now + group.lock
        self._run(_SQL["renew_lock_group"], (self._at.boot, group.until, group.lock, group.token, group.part))

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Pass many verdicts."""
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)
        gone: dict[int, list[int]] = {}
        for token, places in _by_token([delivery for delivery, _ in settlements]).items():
            groups = self._groups(token)
            for group in groups:
                self._settle_group(group, settlements, places, answers, gone)
        for number, sequences in gone.items():
            self._remove(self._numbered(number), sequences)
        return answers

    def _settle_group(
        self,
        group: LockGroup,
        settlements: Sequence[Settlement],
        places: Iterable[int],
        answers: list[Settled | Lapsed],
        gone: dict[int, list[int]],
    ) -> None:
        """Pass those of the verdicts at *places* that are on messages of *hold*; note those that are to be removed."""
        name, left, removed = self._numbered(group.queue).name, group.sequences, []
        before = len(left)
        for place in places:
            delivery, verdict = settlements[place]
            sequence = delivery[1]
            if sequence not in left or delivery[0] != name:
                continue
            del left[sequence]
            if verdict is COMPLETE:
                removed.append(sequence)
                answers[place] = SETTLED
            elif isinstance(verdict, Complete):
                removed.append(sequence)
                answers[place] = SETTLED
                self._complete(delivery, verdict)
            else:
                answers[place] = self._apply(group, sequence, verdict)
        if removed:
            gone.setdefault(group.queue, []).extend(removed)
        if len(left) != before:
            self._save_group(group)

    def _complete(self, delivery: Delivery, verdict: Complete) -> None:
        if verdict.remember:
            self.remember(delivery.queue, delivery.id, verdict.remember)
        for name, message in verdict.sends:
            self.send(name, [message], needs_reserve=False)  # it takes the place of the one that was completed

    def _remove(self, queue: Queue, sequences: list[int]) -> None:
        """Remove messages that were locked for good."""
        queue.locked -= len(sequences)
        runs = runs_of(sequences)
        self._run_many(_SQL["delete_messages"], runs)
        if queue.is_dead:
            self._run_many(_SQL["delete_deaths"], [(queue.number, first, last) for first, last in runs])

    def _apply(self, group: LockGroup, sequence: int, verdict: Verdict) -> Settled:
        """Pass a verdict other than ``Complete`` on a message that is in no place just now."""
        queue = self._numbered(group.queue)
        queue.locked -= 1
        match verdict:
            case Defer():
                self._run(_SQL["insert_deferred"], (queue.number, sequence))
                queue.deferred += 1
                self._record_attempt(sequence, None)
            case DeadLetter(reason, description, error):
                self._record_attempt(sequence, "rejected", error, counts=not queue.is_dead)
                self._dead_letter(queue, sequence, reason, description)
            case Abandon(delay, error):
                return self._requeue(queue, group, sequence, "abandoned", delay, error)
            case GiveBack():
                return self._requeue(queue, group, sequence)
            case Complete():
                raise AssertionError("a completed message is removed")
        return SETTLED

    # --- sessions ---

    def accept(self, name: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        queue = self.find(name) if session is None else self.open(name)
        if queue is None:
            return NoSession()
        self._write_sent()
        due_in = self.apply_due(queue)
        self._write_sessions()
        if session is None:
            row = self._run(_SQL["free_session"], (queue.number,)).fetchone()
            if row is None:
                return NoSession(due_in)
            (session,) = row
            assert session is not None
        elif self._run(_SQL["lock_group_of_session"], (queue.number, session)).fetchone():
            return NoSession(due_in)
        token = _new_token()
        self._insert_group(LockGroup(token, 0, queue.number, session, 0, 0.0, lock, {}))
        self._touched[queue.number, session] = None
        row = self._run(_SQL["state"], (queue.number, session)).fetchone()
        return SessionLock(name, session, token, self._at.wall + lock, row[0] if row else None)

    def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        self._write_sent()
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        queue = self._numbered(group.queue)
        next_in = self.apply_due(queue)
        rows, due_in = self._claimable(queue, held.session, limit, next_in)
        (blocking,) = self._run(_SQL["blocking_in_session"], (queue.number, held.session)).fetchone()
        if blocking is not None and any(row[0] > blocking for row in rows):
            rows = [row for row in rows if row[0] < blocking]
            due_in = next_in  # however much there is behind it
        if not rows:
            return Claim((), due_in)
        self._run(_SQL["delete_ready_up_to"], (queue.number, held.session, 0, rows[-1][0]))
        queue.ready -= len(rows)
        queue.locked += len(rows)
        group.sequences.update(dict.fromkeys(row[0] for row in rows))
        self._save_group(group)
        self._touched[queue.number, held.session] = None
        until = self._at.wall + group.until - self._at.now
        return Claim(self._locked_deliveries(queue, rows, group.token, until), None if len(rows) == limit else due_in)

    def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        queue = self._numbered(group.queue)
        self._run(_SQL["delete_lock_group"], (group.token, group.part))
        queue.locked -= len(group.sequences)
        for sequence in group.sequences:
            if self._requeue(queue, group, sequence).dead:
                self._report_death(queue, sequence)
        self._touched[queue.number, held.session] = None
        self.changed[queue.name] = None
        return SETTLED

    def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        self._write_sessions()  # so that it has a row
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        self._run(_SQL["set_state"], (state, group.queue, held.session))
        return SETTLED

    # --- dead letters, inbox ---

    def take_dead(self, name: str, which: Selection, limit: int, *, to: str | None) -> list[int]:
        """Put dead letters that nobody holds into the queue *to*, or remove them; return their sequences."""
        self._write_sent()
        dead = self._dead_of(name)
        if dead is None:
            return []
        found = self._selected(dead, which, limit, with_locked=False)
        live = self._numbered(dead.number - 1)
        for sequence in found:
            _, priority, session, due_at, _, _ = self._run(_SQL["message_state"], (sequence,)).fetchone()
            if self._take_from("ready", dead.number, "", 0, sequence):
                dead.ready -= 1
            elif self._take_from("delayed", dead.number, due_at, sequence):
                dead.delayed -= 1
            if to is not None and to != name:
                self._send_anew(to, dead, sequence)
            if to == name:
                self._run(_SQL["reset_message"], (sequence,))
                self._enqueue(live, sequence, session, priority, 0.0, None, blocks=False)
                self.changed[live.name] = None
            else:
                self._run(_SQL["delete_messages"], (sequence, sequence))
            self._run(_SQL["delete_deaths"], (dead.number, sequence, sequence))
        return found

    def _send_anew(self, name: str, dead: Queue, sequence: int) -> None:
        """Send a dead letter of another queue to the one called *name*, whatever ids are remembered there."""
        letter = dead_message_of(
            dead.name, self._prefix, self._run(_SQL["dead_letter"], (dead.number, sequence)).fetchone()
        )
        _, _, _, _, _, history = self._run(_SQL["message_state"], (sequence,)).fetchone()
        queue = self.open(name)
        self._newest += 1
        anew = Outgoing(
            letter.body,
            id=letter.id,
            headers=letter.headers,
            session=letter.session,
            priority=letter.priority,
            reply_to=letter.reply_to,
            correlation_id=letter.correlation_id,
        )
        self._add(queue, self._newest, anew)
        queue.ready += 1
        self._write_sent()
        self._run(_SQL["set_message_state"], (0, history, self._newest))
        self.changed[name] = None

    def purge_live(self, name: str, sequences: Sequence[int], which: LiveSelection) -> int:
        """Remove those of *sequences* that wait in a state that is meant; tell how many."""
        self._write_sent()
        queue = self.find(name)
        gone = [] if queue is None else [one for one in sequences if self._take_waiting(queue, one, which)]
        if gone:
            self._run_many(_SQL["delete_messages"], runs_of(gone))
        return len(gone)

    def _take_waiting(self, queue: Queue, sequence: int, which: LiveSelection) -> bool:
        """Take a message out of where it waits; False if it doesn't, or in another state than those meant."""
        row = self._run(_SQL["message_state"], (sequence,)).fetchone()
        if row is None:
            return False
        _, priority, session, due_at, expires_at, _ = row
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
        if session is not None:  # it may have held up others
            self._touched[queue.number, session] = None
            self.changed[queue.name] = None
        return True

    def remember(self, name: str, id_: str, seconds: float) -> None:
        """Note *id_* in the inbox of a queue."""
        queue = self.open(name.removesuffix(DEAD_SUFFIX))
        self._run(_SQL["delete_old_handled_ids"], (queue.number, self._at.wall, 4))
        self._run(_SQL["remember_handled_id"], (queue.number, id_, self._at.wall + seconds))

    # --- the end of a queue ---

    def delete_when_idle(self, name: str, seconds: float) -> None:
        """Note when a queue may be deleted."""
        self._run(_SQL["set_idle"], (self.open(name).number, self._at.wall + seconds))

    def delete(self, name: str, *, force: bool) -> bool:
        """Delete a queue; tell whether that is so: it isn't if something is in it, or by *force* was until now."""
        self._write_sent()
        self._write_sessions()  # none may be entered for a queue that is gone
        self._write_counts()  # other requests of this transaction may have sent to it
        queue = self.find(name)
        if queue is None:
            return True
        if force:  # the rows decide, and not the counts, which somebody may have changed
            if self.empty(name):
                return False
        elif self._run(_SQL["size"], {"queue": queue.number}).fetchone()[0]:
            return False
        for number in (queue.number, queue.number + 1):
            for what in ("lock_groups", "sessions", "sent_ids", "handled_ids", "idle", "retention"):
                self._run(_SQL[f"clear_{what}"], (number,))
            self._run(_SQL["delete_queue"], (number,))
        self._queues.clear()
        return True

    def empty(self, name: str) -> bool:
        """Delete some of the messages of a queue, in whatever state; tell whether there may be more."""
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
            found += [sequence for (sequence,) in taken]
        for token, part, packed in self._run(_SQL["some_lock_groups"], (queue.number, STEP)).fetchall():
            sequences = unpack(packed)
            self._run(_SQL["delete_lock_group"], (token, part))
            queue.locked -= len(sequences)
            found += sequences
        for first, last in runs_of(found) if found else ():  # a run has no gaps, so nothing of other queues is in it
            timed = self._run(_SQL["expiring"], (queue.number, first, last)).fetchall()
            self._run_many(_SQL["delete_expiry"], timed)
            self._run(_SQL["delete_deaths"], (queue.number, first, last))
            self._run(_SQL["delete_messages"], (first, last))
        return bool(found)


def _is_plain(message: Outgoing) -> bool:
    """Whether a message says nothing but its body, as most do; that is faster to write."""
    return (
        message.headers is NO_HEADERS
        and not message.delay
        and not message.priority
        and message.id is None
        and message.at is None
        and message.expires_in is None
        and message.session is None
        and message.reply_to is None
        and message.correlation_id is None
    )


def _new_token() -> int:
    # Not from the module random: a forked child would draw the same.
    return secrets.randbits(62) + 1


def _by_token(held: Sequence[Delivery | SessionLock]) -> dict[object, list[int]]:
    """Return the places of *held* by token: what was claimed together is looked up once."""
    found: dict[object, list[int]] = {}
    for place, one in enumerate(held):
        found.setdefault(one.token, []).append(place)
    return found
