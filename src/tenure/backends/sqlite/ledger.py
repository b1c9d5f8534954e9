"""The books of all queues in a file: what is done to them inside one transaction, on whatever connection that runs.

House rules:

- A message is in one place: ready, delayed, deferred, or in a hold (a claim that is not over). Whoever moves it takes
  it out of one place, puts it into another, and counts both in the same transaction.
- What time alone has done (a delay, a ttl, a lock has ended) is entered when somebody looks: ``ripen`` moves what is
  ripe, found by the first entries of three indexes. Each message is moved once by what ripens it, so to claim and to
  count take a time that doesn't grow with the number of messages.
- A lock is judged by the time since boot, which nobody sets. What another boot has stamped can't be compared with that,
  and may be live: it is stamped anew, with its whole length from now, as leases are.
- Delays, ttls and windows must outlive a boot, so they are judged by the wall clock, which never goes back here: if it
  was set back, it goes on from where it was, at the pace of the time since boot.
- The time is read inside the transaction, after the write lock was won: a reading from before it may be old.
- Nothing here fails half-way: what can be refused is refused before the first write.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenure.backends.sqlite.boot import agreed, this_boot
from tenure.backends.sqlite.client import Part, statements
from tenure.backends.sqlite.rows import (
    Meta,
    columns_of,
    conditions_of,
    dead_message_of,
    death_of,
    headers_column,
    headers_of,
    history_with,
    pack,
    runs_of,
    unpack,
)
from tenure.clock import Clock
from tenure.queue.broker import Claim, NoSession, QueueSettings, Selection
from tenure.queue.message import (
    COMPLETE,
    DEAD_SUFFIX,
    EXPIRED,
    LAPSED,
    MAX_DELIVERIES,
    NO_HEADERS,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    DeadMessage,
    Death,
    Defer,
    Delivery,
    Failure,
    GiveBack,
    Lapsed,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    Stats,
    Verdict,
    dead_letters_of,
)

QUEUES = Part("queues", version=1, script="queue_schema.sql")

RIPEN_MAX = 1_000
"""So many messages ripen in one transaction, so that none takes long."""

_SQL = statements("queue.sql")

MANY = 20
"""So many plain messages go into one statement: three times faster than one by one, and more gain little."""
_INSERT_MANY = _SQL["insert_plain"].replace("(?1, ?2, 0, 0, ?, ?)", ", ".join(["(?1, ?2, 0, 0, ?, ?)"] * MANY))
_CLOCK_STEP = 0.01  # seconds by which the wall clock must have been set forward to be worth writing down
_CLOCK_EVERY = 1.0  # seconds after which the time is written down again


class FileClock:
    """What time it is for the queues of a file.

    Args:
        clock: Common to all that share the file; judges locks.
        wall: The wall clock, in Unix seconds.
        boot: What *clock* counts from; found out when not given.
    """

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time, boot: str = "") -> None:
        self._clock = clock
        self._wall = wall
        self.boot = boot

    def read(self, connection: sqlite3.Connection) -> Moment:
        """Return the present moment, and what else stands in the row of the clock."""
        if not self.boot:
            self.boot = agreed(this_boot(), [boot for (boot,) in connection.execute(_SQL["boots"])])
        origin, sequence, boot, ahead, seen = connection.execute(_SQL["clock"]).fetchone()
        now = self._clock.now()
        is_ours = boot == self.boot
        known = ahead if is_ours else seen - now
        ahead = max(known, self._wall() - now)
        is_news = not is_ours or ahead - known > _CLOCK_STEP or now + ahead - seen > _CLOCK_EVERY
        return Moment(now, now + ahead, ahead, self.boot, origin, sequence, is_news)


@dataclass(slots=True)
class Moment:
    """The row of the clock, read at one moment."""

    now: float
    wall: float
    ahead: float
    boot: str
    origin: str
    sequence: int
    is_news: bool
    """Whether the row must be written anew."""


@dataclass(slots=True)
class Queue:
    """A queue, or its dead letters; and by how much this transaction has changed its counts."""

    number: int
    name: str
    max_deliveries: int
    dedupe_window: float
    ready: int = 0
    locked: int = 0
    delayed: int = 0
    deferred: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether these are dead letters."""
        return self.number % 2 == 1


@dataclass(slots=True)
class Hold:
    """A live row of ``tenure_hold``."""

    token: int
    part: int
    queue: int
    session: str | None
    was_deferred: int
    until: float
    lock: float
    sequences: dict[int, None]
    """In the order of the claim."""


class Ledger:
    """One transaction's view of the books. Call ``close`` before the commit, and ring for ``rung`` after it."""

    def __init__(self, connection: sqlite3.Connection, clock: FileClock) -> None:
        cursor = connection.cursor()
        cursor.row_factory = None  # the connection may be somebody else's
        self._run = cursor.execute
        self._run_many = cursor.executemany
        self._at = clock.read(connection)
        self._prefix = f"{self._at.origin}$"  # how the ids begin that we make up
        self._queues: dict[str, Queue] = {}
        self._plain: dict[int, list[Any]] = {}  # sent, and not yet written: by queue, a sequence and a body in turn
        self._messages: list[tuple[Any, ...]] = []  # those that say more
        self._newest = self._flushed = self._at.sequence
        self._touched: dict[tuple[int, str], None] = {}  # sessions whose row may have to change
        self.rung: dict[str, None] = {}
        """Queues in which something may have become claimable, now or later."""

    def close(self) -> None:
        """Write what was put off."""
        self._flush()
        self._refresh_sessions()
        for queue in self._queues.values():
            if queue.ready or queue.locked or queue.delayed or queue.deferred:
                self._run(_SQL["count"], (queue.number, queue.ready, queue.locked, queue.delayed, queue.deferred))
        at = self._at
        if at.is_news or self._newest != at.sequence:
            self._run(_SQL["set_clock"], (self._newest, at.boot, at.ahead, at.wall))

    # --- queues ---

    def find(self, name: str) -> Queue | None:
        """Return the queue called *name* if it was ever used."""
        queue = self._queues.get(name)
        if queue is None:
            row = self._run(_SQL["queue"], (name,)).fetchone()
            if row is not None:
                queue = self._queues[name] = Queue(*row)
        return queue

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

    def declare(self, name: str, settings: QueueSettings) -> None:
        """Make *settings* hold for a queue."""
        queue = self.open(name)
        self._run(_SQL["declare"], (name, *columns_of(settings)))
        queue.max_deliveries, queue.dedupe_window = settings.max_deliveries, settings.dedupe_window

    def _numbered(self, number: int) -> Queue:
        for queue in self._queues.values():
            if queue.number == number:
                return queue
        queue = Queue(*self._run(_SQL["queue_of"], (number,)).fetchone())
        self._queues[queue.name] = queue
        return queue

    # --- sending ---

    def send(self, name: str, messages: Sequence[Outgoing]) -> list[str]:
        """Keep *messages*; return their ids."""
        queue = self.open(name)
        prefix, sequence, delayed = self._prefix, self._newest, queue.delayed
        add_plain = self._plain.setdefault(queue.number, []).extend
        ids = []
        for message in messages:
            named = message.id
            if named is not None and not self._is_first(queue, named):
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
            self.rung[name] = None
        return ids

    def _add(self, queue: Queue, sequence: int, message: Outgoing) -> None:
        """Note a message that says more than its body."""
        number, wall = queue.number, self._at.wall
        due_at = self._due_at(message)
        expires_at = None if message.ttl is None else wall + message.ttl
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

    def _is_first(self, queue: Queue, name: str) -> bool:
        """Whether no message was sent under this *name* in the window; from now on one was."""
        since = self._at.wall - queue.dedupe_window
        # Two at a time, for one that is added: so what is remembered doesn't grow for ever, and no sweep is needed.
        self._run(_SQL["forget_sent"], (queue.number, since, 2))
        return self._run(_SQL["sent"], (queue.number, name, self._at.wall, since)).rowcount > 0

    def _flush(self) -> None:
        """Write what was sent; before anything that may want to read it."""
        if self._newest == self._flushed:
            return
        self._run_many(_SQL["insert_message"], self._messages)
        for number, flat in self._plain.items():
            cut = len(flat) - len(flat) % (2 * MANY)
            for start in range(0, cut, 2 * MANY):
                self._run(_INSERT_MANY, (number, self._at.wall, *flat[start : start + 2 * MANY]))
            for start in range(cut, len(flat), 2):
                self._run(_SQL["insert_plain"], (number, self._at.wall, flat[start], flat[start + 1]))
        self._run(_SQL["ready_range"], (self._flushed + 1, self._newest))
        self._flushed = self._newest
        self._messages.clear()
        self._plain.clear()

    # --- claiming ---

    def receive(self, name: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._flush()
        due_in = self.ripen(queue)
        rows = self._run(_SQL["claimable"], (queue.number, "", limit)).fetchall()
        if not rows:
            return Claim((), due_in)
        last = rows[-1]
        self._run(_SQL["take_ready"], (queue.number, "", last[11], last[0]))
        queue.ready -= len(rows)
        token = _new_token()
        self._hold(queue, token, 0, rows, lock)
        return Claim(self._deliveries(queue, rows, token, self._at.wall + lock), None if len(rows) == limit else due_in)

    def receive_deferred(self, name: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        queue = self.find(name)
        if queue is None:
            return Claim(())
        self._flush()
        self.ripen(queue)
        found = [one for one in dict.fromkeys(sequences) if self._take("deferred", queue.number, one)]
        if not found:
            return Claim(())
        queue.deferred -= len(found)
        rows = [self._run(_SQL["message"], (sequence,)).fetchone() for sequence in found]
        token = _new_token()
        self._hold(queue, token, 0, rows, lock, was_deferred=True)
        return Claim(self._deliveries(queue, rows, token, self._at.wall + lock))

    def _hold(
        self, queue: Queue, token: int, part: int, rows: Sequence[Meta], lock: float, *, was_deferred: bool = False
    ) -> None:
        self._insert_hold(
            Hold(token, part, queue.number, None, int(was_deferred), 0.0, lock, dict.fromkeys(row[0] for row in rows))
        )
        queue.locked += len(rows)

    def _insert_hold(self, hold: Hold) -> None:
        self._run(
            _SQL["insert_hold"],
            (
                hold.token,
                hold.part,
                hold.queue,
                hold.session,
                hold.was_deferred,
                self._at.boot,
                self._at.now + hold.lock,
                hold.lock,
                pack(hold.sequences),
            ),
        )

    def _deliveries(self, queue: Queue, rows: Sequence[Meta], token: int, until: float) -> list[Delivery]:
        """Make deliveries of *rows*, which are locked now; their ttl does not end under a lock."""
        made = self._made(queue, rows, token, until)
        timed = [(queue.number, row[10], row[0]) for row in rows if row[10] is not None]
        if timed:
            self._run_many(_SQL["delete_expiry"], timed)
        if queue.is_dead:
            return [one._replace(delivery_count=one.delivery_count - 1, death=self._death(queue, one)) for one in made]
        return made

    def _made(self, queue: Queue, rows: Sequence[Meta], token: int | str, until: float) -> list[Delivery]:
        name, prefix = queue.name, self._prefix
        make = tuple.__new__  # past the check of the number of fields, which takes longer than all the rest
        return [
            make(
                Delivery,
                (
                    name,
                    sequence,
                    token,
                    id_ or f"{prefix}{sequence}",
                    body,
                    NO_HEADERS if headers is None else headers_of(headers),
                    deliveries + 1,
                    sent_at,
                    until,
                    session,
                    priority,
                    reply_to,
                    correlation_id,
                    None,
                ),
            )
            for (
                sequence,
                id_,
                body,
                headers,
                deliveries,
                sent_at,
                session,
                priority,
                reply_to,
                correlation_id,
                _,
                _,
            ) in rows
        ]

    def _death(self, queue: Queue, delivery: Delivery) -> Death:
        return death_of(*self._run(_SQL["death"], (queue.number, delivery.sequence)).fetchone())

    # --- under a lock ---

    def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        answers: list[Renewed | Lapsed] = [LAPSED] * len(held)
        yes = Renewed(self._at.wall + lock)
        for token, places in _by_token(held).items():
            holds = self._holds(token)
            kept: dict[int, None] = {}
            for place in places:
                one = held[place]
                hold = self._hold_of(holds, one)
                if hold is None:
                    continue
                answers[place] = yes
                if isinstance(one, SessionLock):
                    self._renew_hold(hold, lock)
                elif hold.session is None:
                    kept[one.sequence] = None
            if kept:
                self._renew_part(holds, kept, lock)
        return answers

    def _renew_part(self, holds: list[Hold], kept: dict[int, None], lock: float) -> None:
        """Renew those *kept*: as they are if they are all of a row, and else in a row of their own."""
        for hold in holds:
            mine = [sequence for sequence in hold.sequences if sequence in kept]
            if not mine:
                continue
            if len(mine) == len(hold.sequences):
                self._renew_hold(hold, lock)
                continue
            for sequence in mine:
                del hold.sequences[sequence]
            self._keep(hold)
            (newest,) = self._run(_SQL["newest_part"], (hold.token,)).fetchone()
            part = replace(hold, part=(newest or 0) + 1, lock=lock, sequences=dict.fromkeys(mine))
            self._insert_hold(part)

    def _renew_hold(self, hold: Hold, lock: float) -> None:
        self._run(_SQL["renew_hold"], (hold.token, hold.part, self._at.boot, self._at.now + lock, lock))

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Pass many verdicts."""
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)
        gone: dict[int, list[int]] = {}
        for token, places in _by_token([delivery for delivery, _ in settlements]).items():
            holds = self._holds(token)
            for hold in holds:
                self._settle_in(hold, settlements, places, answers, gone)
        for number, sequences in gone.items():
            self._remove(self._numbered(number), sequences)
        return answers

    def _settle_in(
        self,
        hold: Hold,
        settlements: Sequence[Settlement],
        places: Iterable[int],
        answers: list[Settled | Lapsed],
        gone: dict[int, list[int]],
    ) -> None:
        """Pass those of the verdicts at *places* that are on messages of *hold*; note those that are to be removed."""
        name, left, removed = self._numbered(hold.queue).name, hold.sequences, []
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
                answers[place] = self._pass(hold, sequence, verdict)
        if removed:
            gone.setdefault(hold.queue, []).extend(removed)
        if len(left) != before:
            self._keep(hold)

    def _complete(self, delivery: Delivery, verdict: Complete) -> None:
        if verdict.remember:
            self.remember(delivery.queue, delivery.id, verdict.remember)
        for name, message in verdict.sends:
            self.send(name, [message])

    def _remove(self, queue: Queue, sequences: list[int]) -> None:
        """Remove messages that were locked for good."""
        queue.locked -= len(sequences)
        runs = runs_of(sequences)
        self._run_many(_SQL["delete_messages"], runs)
        if queue.is_dead:
            self._run_many(_SQL["delete_deaths"], [(queue.number, first, last) for first, last in runs])

    def _pass(self, hold: Hold, sequence: int, verdict: Verdict) -> Settled:
        """Pass a verdict other than ``Complete`` on a message that is in no place just now."""
        queue = self._numbered(hold.queue)
        queue.locked -= 1
        match verdict:
            case Defer():
                self._run(_SQL["insert_deferred"], (queue.number, sequence))
                queue.deferred += 1
                self._note(sequence, None)
            case DeadLetter(reason, description, error):
                self._note(sequence, "rejected", error, counts=not queue.is_dead)
                self._bury(queue, sequence, reason, description)
            case Abandon(delay, error):
                return self._put_back(queue, hold, sequence, "abandoned", delay, error)
            case GiveBack():
                return self._put_back(queue, hold, sequence)
            case Complete():
                raise AssertionError("a completed message is removed")
        return SETTLED

    # --- holds ---

    def _holds(self, token: object) -> list[Hold]:
        """Return the live rows of a claim."""
        if not isinstance(token, int):
            return []
        rows = self._run(_SQL["holds"], (token, self._at.boot, self._at.now)).fetchall()
        return [
            Hold(token, part, queue, session, was_deferred, until, lock, unpack(packed))
            for part, queue, session, was_deferred, until, lock, packed in rows
        ]

    def _hold_of(self, holds: list[Hold], one: Delivery | SessionLock) -> Hold | None:
        """Return the row that locks *one*, if it is live."""
        for hold in holds:
            queue = self._queues.get(one.queue) or self.find(one.queue)
            if queue is None or queue.number != hold.queue:
                return None
            if isinstance(one, SessionLock):
                if hold.session == one.session:
                    return hold
            elif one.sequence in hold.sequences:
                return hold
        return None

    def _keep(self, hold: Hold) -> None:
        """Write down what is left in *hold*."""
        if hold.sequences or hold.session is not None:
            self._run(_SQL["keep_in_hold"], (hold.token, hold.part, pack(hold.sequences)))
        else:
            self._run(_SQL["delete_hold"], (hold.token, hold.part))

    # --- coming back, dying ---

    def _put_back(
        self,
        queue: Queue,
        hold: Hold,
        sequence: int,
        outcome: str | None = None,
        delay: float = 0.0,
        error: Failure | None = None,
    ) -> Settled:
        """Put a message back to where it can be claimed, or to the dead; without an *outcome*, it was not tried."""
        self.rung[queue.name] = None
        if queue.is_dead:
            self._shelve(queue, sequence, None, 0, delay, None, blocks=False)
            return SETTLED
        if outcome is None:
            deliveries, priority, session, _, expires_at, _ = self._run(_SQL["standing"], (sequence,)).fetchone()
        else:
            deliveries, priority, session, expires_at = self._note(sequence, outcome, error)
            if deliveries >= queue.max_deliveries:
                tried = f"delivered {deliveries} times, and never completed"
                self._bury(queue, sequence, MAX_DELIVERIES, tried)
                return SETTLED_DEAD
        if hold.was_deferred:
            self._run(_SQL["insert_deferred"], (queue.number, sequence))
            queue.deferred += 1
            return SETTLED
        if expires_at is not None and expires_at <= self._at.wall:
            self._bury(queue, sequence, EXPIRED, "not handled before its ttl had ended")
            return SETTLED_DEAD
        self._shelve(queue, sequence, session, priority, delay, expires_at, blocks=deliveries > 0)
        return SETTLED

    def _shelve(
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
        """Put a message to the ready or the delayed ones."""
        if delay > 0:
            due_at = self._at.wall + delay
            self._run(_SQL["set_due"], (sequence, due_at))
            self._run(_SQL["insert_delayed"], (queue.number, due_at, sequence, session if blocks else None))
            queue.delayed += 1
        else:
            rank = -priority if session is None else 0
            self._run(_SQL["insert_ready"], (queue.number, session or "", rank, sequence))
            queue.ready += 1
        if expires_at is not None:
            self._run(_SQL["insert_expiry"], (queue.number, expires_at, sequence))
        if session is not None:
            self._touched[queue.number, session] = None

    def _note(
        self, sequence: int, outcome: str | None, error: Failure | None = None, *, counts: bool = True
    ) -> tuple[int, int, str | None, float | None]:
        """Count the delivery that has ended, and write down how, if it failed."""
        deliveries, priority, session, _, expires_at, history = self._run(_SQL["standing"], (sequence,)).fetchone()
        deliveries += counts
        if outcome is not None:
            history = history_with(history, deliveries, self._at.wall, outcome, error)
        self._run(_SQL["set_standing"], (sequence, deliveries, history))
        return deliveries, priority, session, expires_at

    def _bury(self, queue: Queue, sequence: int, reason: str, description: str) -> None:
        """Put a message to the dead letters; it is in no place just now."""
        dead = queue if queue.is_dead else self._numbered(queue.number + 1)
        self._run(_SQL["insert_death"], (dead.number, sequence, self._at.wall, reason, description))
        self._run(_SQL["insert_ready"], (dead.number, "", 0, sequence))
        dead.ready += 1
        self.rung[dead.name] = None

    def _take(self, place: str, *key: object) -> bool:
        """Take a message out of *place*; False if it isn't there."""
        return self._run(_SQL[f"delete_{place}"], key).rowcount > 0

    # --- time ---

    def ripen(self, queue: Queue) -> float | None:
        """Enter what time has done to *queue*, or as much as one transaction may.

        Returns in how many seconds time will do something next: 0 if it has, and there is more to be entered; None if
        it never will.
        """
        at = self._at
        due_at, until, expires_at, has_foreign = self._run(_SQL["alarms"], (queue.number, at.boot)).fetchone()
        if has_foreign:
            self._run(_SQL["stamp_foreign_holds"], (queue.number, at.boot, at.now))
        ripe = False
        if until is not None and until <= at.now:
            ripe = True
            self._end_locks(queue)
        if expires_at is not None and expires_at <= at.wall:
            ripe = True
            self._end_ttls(queue)
        if due_at is not None and due_at <= at.wall:
            ripe = True
            self._end_delays(queue)
        if ripe or has_foreign:
            due_at, until, _, _ = self._run(_SQL["alarms"], (queue.number, at.boot)).fetchone()
        waits = []
        if due_at is not None:
            waits.append(max(0.0, due_at - at.wall))
        if until is not None:
            waits.append(max(0.0, until - at.now))
        return min(waits) if waits else None

    def _end_locks(self, queue: Queue) -> None:
        done = 0
        while done < RIPEN_MAX:
            row = self._run(_SQL["expired_holds"], (queue.number, self._at.boot, self._at.now)).fetchone()
            if row is None:
                return
            token, part, session, was_deferred, packed = row
            hold = Hold(token, part, queue.number, session, was_deferred, 0.0, 0.0, unpack(packed))
            self._run(_SQL["delete_hold"], (token, part))
            if session is not None:
                self._touched[queue.number, session] = None
                self.rung[queue.name] = None
            queue.locked -= len(hold.sequences)
            for sequence in hold.sequences:
                self._put_back(queue, hold, sequence, "expired")
            done += len(hold.sequences) + 1

    def _end_ttls(self, queue: Queue) -> None:
        for sequence, expires_at in self._run(_SQL["expired"], (queue.number, self._at.wall, RIPEN_MAX)).fetchall():
            self._take("expiry", queue.number, expires_at, sequence)
            _, priority, session, due_at, _, _ = self._run(_SQL["standing"], (sequence,)).fetchone()
            rank = -priority if session is None else 0
            if self._take("ready", queue.number, session or "", rank, sequence):
                queue.ready -= 1
            elif self._take("delayed", queue.number, due_at, sequence):
                queue.delayed -= 1
            else:
                raise AssertionError(f"message {sequence} of {queue.name} is neither ready nor delayed")
            if session is not None:
                self._touched[queue.number, session] = None
            self._bury(queue, sequence, EXPIRED, "not handled before its ttl had ended")

    def _end_delays(self, queue: Queue) -> None:
        for sequence, due_at in self._run(_SQL["due"], (queue.number, self._at.wall, RIPEN_MAX)).fetchall():
            self._take("delayed", queue.number, due_at, sequence)
            queue.delayed -= 1
            _, priority, session, _, _, _ = self._run(_SQL["standing"], (sequence,)).fetchone()
            if queue.is_dead:
                session, priority = None, 0
            self._shelve(queue, sequence, session, priority, 0.0, None, blocks=False)
            self.rung[queue.name] = None

    # --- sessions ---

    def accept(self, name: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        queue = self.find(name) if session is None else self.open(name)
        if queue is None:
            return NoSession()
        self._flush()
        due_in = self.ripen(queue)
        self._refresh_sessions()
        if session is None:
            row = self._run(_SQL["free_session"], (queue.number,)).fetchone()
            if row is None:
                return NoSession(due_in)
            (session,) = row
            assert session is not None
        elif self._run(_SQL["hold_of_session"], (queue.number, session)).fetchone():
            return NoSession(due_in)
        token = _new_token()
        self._insert_hold(Hold(token, 0, queue.number, session, 0, 0.0, lock, {}))
        self._touched[queue.number, session] = None
        row = self._run(_SQL["state"], (queue.number, session)).fetchone()
        return SessionLock(name, session, token, self._at.wall + lock, row[0] if row else None)

    def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        self._flush()
        hold = self._hold_of(self._holds(held.token), held)
        if hold is None:
            return LAPSED
        queue = self._numbered(hold.queue)
        due_in = self.ripen(queue)
        rows = self._run(_SQL["claimable"], (queue.number, held.session, limit)).fetchall()
        (blocking,) = self._run(_SQL["blocking_in_session"], (queue.number, held.session)).fetchone()
        if blocking is not None:
            rows = [row for row in rows if row[0] < blocking]
        if not rows:
            return Claim((), due_in)
        self._run(_SQL["take_ready"], (queue.number, held.session, 0, rows[-1][0]))
        queue.ready -= len(rows)
        queue.locked += len(rows)
        hold.sequences.update(dict.fromkeys(row[0] for row in rows))
        self._keep(hold)
        self._touched[queue.number, held.session] = None
        until = self._at.wall + hold.until - self._at.now
        return Claim(self._deliveries(queue, rows, hold.token, until), None if len(rows) == limit else due_in)

    def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        hold = self._hold_of(self._holds(held.token), held)
        if hold is None:
            return LAPSED
        queue = self._numbered(hold.queue)
        self._run(_SQL["delete_hold"], (hold.token, hold.part))
        queue.locked -= len(hold.sequences)
        for sequence in hold.sequences:
            self._put_back(queue, hold, sequence)
        self._touched[queue.number, held.session] = None
        self.rung[queue.name] = None
        return SETTLED

    def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        hold = self._hold_of(self._holds(held.token), held)
        if hold is None:
            return LAPSED
        row = self._run(_SQL["state"], (hold.queue, held.session)).fetchone()
        state: bytes | None = row[0] if row else None
        return state

    def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        self._refresh_sessions()  # so that it has a row
        hold = self._hold_of(self._holds(held.token), held)
        if hold is None:
            return LAPSED
        self._run(_SQL["set_state"], (hold.queue, held.session, state))
        return SETTLED

    def _refresh_sessions(self) -> None:
        """Write down anew, for the sessions that were touched, whether they can be accepted."""
        if not self._touched:
            return
        self._flush()
        for number, session in self._touched:
            (first,) = self._run(_SQL["first_in_session"], (number, session)).fetchone()
            held = self._run(_SQL["hold_of_session"], (number, session)).fetchone()
            (blocking,) = self._run(_SQL["blocking_in_session"], (number, session)).fetchone()
            is_free = held is None and first is not None and (blocking is None or first < blocking)
            self._run(_SQL["set_session"], (number, session, first, is_free))
            if held is None and first is None:
                self._run(_SQL["forget_session"], (number, session))
        self._touched.clear()

    # --- dead letters, inbox ---

    def peek_dead(self, name: str, which: Selection, limit: int) -> list[DeadMessage]:
        """Show dead letters, also those that somebody holds."""
        dead = self._dead_of(name)
        if dead is None:
            return []
        found = self._selected(dead, which, limit, held=True)
        rows = [self._run(_SQL["dead_message"], (dead.number, sequence)).fetchone() for sequence in found]
        return [dead_message_of(name, self._prefix, row) for row in rows]

    def count_dead(self, name: str, which: Selection, limit: int | None) -> int:
        """Tell how many dead letters are meant that nobody holds."""
        dead = self._dead_of(name)
        return len(self._selected(dead, which, limit, held=False)) if dead else 0

    def take_dead(self, name: str, which: Selection, limit: int, *, redrive: bool) -> list[int]:
        """Put dead letters that nobody holds back into their queue, or remove them; return their sequences."""
        self._flush()
        dead = self._dead_of(name)
        if dead is None:
            return []
        found = self._selected(dead, which, limit, held=False)
        live = self._numbered(dead.number - 1)
        for sequence in found:
            _, priority, session, due_at, _, _ = self._run(_SQL["standing"], (sequence,)).fetchone()
            if self._take("ready", dead.number, "", 0, sequence):
                dead.ready -= 1
            elif self._take("delayed", dead.number, due_at, sequence):
                dead.delayed -= 1
            if redrive:
                self._run(_SQL["revive"], (sequence,))
                self._shelve(live, sequence, session, priority, 0.0, None, blocks=False)
                self.rung[live.name] = None
            else:
                self._run(_SQL["delete_messages"], (sequence, sequence))
            self._run(_SQL["delete_deaths"], (dead.number, sequence, sequence))
        return found

    def _dead_of(self, name: str) -> Queue | None:
        live = self.find(name)
        return None if live is None else self._numbered(live.number + 1)

    def _selected(self, dead: Queue, which: Selection, limit: int | None, *, held: bool) -> list[int]:
        asked = (dead.number, *conditions_of(which), self._prefix, held, -1 if limit is None else limit)
        return [sequence for (sequence,) in self._run(_SQL["dead"], asked)]

    def remember(self, name: str, id_: str, seconds: float) -> None:
        """Note *id_* in the inbox of a queue."""
        queue = self.open(name.removesuffix(DEAD_SUFFIX))
        self._run(_SQL["forget_remembered"], (queue.number, self._at.wall))
        self._run(_SQL["remember"], (queue.number, id_, self._at.wall + seconds))

    # --- looking on ---

    def is_ripe(self, name: str) -> bool:
        """Whether time has done something to a queue, or to its dead letters, that is not entered yet."""
        queue = self.find(name)
        if queue is None:
            return False
        at = self._at
        for number in {queue.number, queue.number | 1}:
            due_at, until, expires_at, has_foreign = self._run(_SQL["alarms"], (number, at.boot)).fetchone()
            if has_foreign or _is_past(due_at, at.wall) or _is_past(until, at.now) or _is_past(expires_at, at.wall):
                return True
        return False

    def ripen_all(self, name: str) -> None:
        """Enter what time has done to a queue and its dead letters, or as much as one transaction may."""
        self._flush()
        queue = self.find(name)
        if queue is not None:
            for number in {queue.number, queue.number | 1}:
                self.ripen(self._numbered(number))

    def count(self, name: str) -> Stats:
        """Count the messages of a queue that is not ripe."""
        row = self._run(_SQL["counts"], (name,)).fetchone()
        if row is None:
            return Stats()
        number, ready, locked, delayed, deferred, dead = row
        if number % 2:
            return Stats(dead=dead)
        oldest = self._run(_SQL["oldest"], (number,)).fetchone() if ready else None
        age = max(0.0, self._at.wall - oldest[0]) if oldest else 0.0
        return Stats(ready, locked, delayed, deferred, dead, age)

    def peek_deferred(self, name: str, limit: int, after: int) -> list[Delivery]:
        """Show deferred messages that nobody holds."""
        queue = self.find(name)
        if queue is None:
            return []
        found = self._run(_SQL["deferred"], (queue.number, after, limit)).fetchall()
        rows = [self._run(_SQL["message"], one).fetchone() for one in found]
        return [one._replace(delivery_count=one.delivery_count - 1) for one in self._made(queue, rows, "", 0.0)]

    def are_remembered(self, name: str, ids: Sequence[str]) -> list[bool]:
        """Tell which *ids* the inbox of a queue knows."""
        queue = self.find(name)
        if queue is None:
            return [False] * len(ids)
        asked = ((queue.number, id_, self._at.wall) for id_ in ids)
        return [self._run(_SQL["remembered"], one).fetchone() is not None for one in asked]

    def names(self) -> list[str]:
        """List every queue, sorted."""
        return [name for (name,) in self._run(_SQL["names"])]

    def settings(self, name: str) -> QueueSettings:
        """Tell which settings hold for a queue."""
        row = self._run(_SQL["settings"], (name,)).fetchone()
        return QueueSettings(*row) if row else QueueSettings()


def _is_plain(message: Outgoing) -> bool:
    """Whether a message says nothing but its body, as most do; that is faster to write."""
    return (
        message.headers is NO_HEADERS
        and not message.delay
        and not message.priority
        and message.id is None
        and message.at is None
        and message.ttl is None
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


def _is_past(moment: float | None, now: float) -> bool:
    return moment is not None and moment <= now
