"""Reading queues: counts, settings, messages and lock groups as they are in one transaction. Nothing here writes."""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.rows import (
    MessageRow,
    MessageState,
    blob_of,
    conditions_of,
    count_of,
    dead_message,
    deliveries_and_window,
    delivery_of,
    headers_of,
    live_conditions_of,
    moment_of,
    plain_text,
    settings_of,
    state_of,
    text_of,
    unpack,
)
from tenure._backends.sqlite.statements import statements
from tenure._checks import LONGEST
from tenure._foreign import clipped, read_or, seconds
from tenure._queue.broker import LiveSelection, QueueSettings, Schedules, Selection
from tenure._queue.checks import COUNT_MAX, DEAD_SUFFIX
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    NO_HEADERS,
    DeadMessage,
    Delivery,
    LiveMessage,
    SessionLock,
    State,
    Stats,
    live_message_of,
)
from tenure._queue.outgoing import PRIORITY_MAX
from tenure._queue.verdicts import LAPSED, Lapsed

_SQL = statements("queue.sql")
_LIVE = {name: text.replace("{fits}", _SQL["fits"]) for name, text in _SQL.items() if name.startswith("live_")}
_WAITING: tuple[tuple[State, str, Sequence[int]], ...] = (
    ("ready", "live_ranked", range(0, -PRIORITY_MAX - 1, -1)),
    ("ready", "live_in_sessions", (0,)),
    ("delayed", "live_delayed", (0,)),
    ("deferred", "live_deferred", (0,)),
)
"""Where messages wait: their state, the statement that finds them, the ranks to search."""


_PRIORITIES = frozenset(range(PRIORITY_MAX + 1))
_TEXTS = frozenset({str, type(None)})


@dataclass(slots=True, eq=False)
class Queue:
    """A queue, or its dead letters, with the changes that this transaction makes to its counts."""

    number: int
    name: str
    max_deliveries: int
    dedupe_window: float
    is_limited: int
    has_max_locked: int
    ready: int = 0
    locked: int = 0
    delayed: int = 0
    deferred: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether these are dead letters."""
        return self.number % 2 == 1


@dataclass(slots=True, eq=False)
class LockGroup:
    """The messages of one claim, under one token: a live row of ``tenure_hold``."""

    token: int
    part: int
    queue: int
    session: str | None
    was_deferred: int
    until: float
    lock: float
    sequences: dict[int, None]
    """In the order of the claim."""


class _Lock(NamedTuple):
    """The lock of a message, as people see it: its end by the wall clock, the process that has it, and since when."""

    until: float | None = None
    holder: str | None = None
    since: float | None = None


_UNLOCKED = _Lock()


class QueueReader:
    """The queues of a file as they are in one transaction."""

    def __init__(self, connection: sqlite3.Connection, clock: FileClock) -> None:
        cursor = connection.cursor()
        cursor.row_factory = None  # the connection may be a user's
        self._run = cursor.execute
        self._run_many = cursor.executemany
        self._at = clock.read(connection)
        self._prefix = f"{self._at.origin}{ID_MARK}"  # of generated ids
        self._queues: dict[str, Queue] = {}

    def is_due(self, name: str) -> bool:
        """Whether something is due in a queue, or in its dead letters, that was not applied yet."""
        queue = self.find(name)
        if queue is None:
            return False
        at = self._at
        if at.went_back:
            return True
        for number in {queue.number, queue.number | 1}:
            due_at, until, expires_at, has_foreign = self._run(
                _SQL["next_due"], {"queue": number, "boot": at.boot}
            ).fetchone()
            if has_foreign or _is_past(due_at, at.wall) or _is_past(until, at.now) or _is_past(expires_at, at.wall):
                return True
        return False

    def count(self, name: str) -> Stats:
        """Count the messages of a queue in which nothing is due."""
        row = self._run(_SQL["counts"], (name,)).fetchone()
        if row is None:
            return Stats()
        number, *counts, paused = row
        ready, locked, delayed, deferred, dead = map(count_of, counts)
        if number % 2:
            return Stats(dead=dead)
        oldest = self._run(_SQL["oldest"], {"queue": number}).fetchone() if ready else None
        age = max(0.0, self._at.wall - read_or(seconds, oldest[0], self._at.wall)) if oldest else 0.0
        return Stats(ready, locked, delayed, deferred, dead, age, bool(paused))

    def holding(self, names: Sequence[str]) -> list[bool]:
        """Tell which queues hold messages."""
        holding = {name for (name,) in self._run(_SQL["holding"], (json.dumps(names),))}
        return [name in holding for name in names]

    def names(self) -> list[str]:
        """List every queue, sorted."""
        return [name for (name,) in self._run(_SQL["names"]) if isinstance(name, str)]

    def settings(self, name: str) -> QueueSettings:
        """Return the settings of a queue."""
        row = self._run(_SQL["settings"], (name,)).fetchone()
        return settings_of(row) if row else QueueSettings()

    def declared(self, name: str) -> set[str]:
        """Return the names of the settings of a queue that were declared."""
        return {setting for (setting,) in self._run(_SQL["declared"], (name,))}

    def schedules(self, name: str) -> Schedules:
        """Return what is kept of the schedules of a queue."""
        kept = {plain_text(one): plain_text(record) for one, record in self._run(_SQL["schedules"], (name,))}
        return Schedules(kept, self._at.wall)

    def idle(self) -> list[str]:
        """List the queues that may be deleted if they are empty."""
        return [name for (name,) in self._run(_SQL["idle"], (self._at.wall,)) if isinstance(name, str)]

    def are_remembered(self, name: str, ids: Sequence[str]) -> list[bool]:
        """Return, for each of *ids*, whether the inbox of a queue remembers it."""
        queue = self.find(name)
        if queue is None:
            return [False] * len(ids)
        keys = ((queue.number, id_, self._at.wall) for id_ in ids)
        return [self._run(_SQL["is_handled"], key).fetchone() is not None for key in keys]

    def peek(self, name: str, which: LiveSelection, limit: int) -> list[LiveMessage]:
        """Show live messages."""
        queue = self.find(name)
        if queue is None:
            return []
        found = [(one, state) for state, some in self._waiting(queue, which, limit) for one in some]
        ends = self._locks(queue) if which.wants("locked") else {}
        if ends:
            values = {**self._live_values(queue, which, limit), "locked": json.dumps(sorted(ends))}
            found += [(sequence, "locked") for (sequence,) in self._run(_LIVE["live_locked"], values)]
        return [self._live_message(name, one, state, ends.get(one, _UNLOCKED)) for one, state in sorted(found)[:limit]]

    def unlocked(self, name: str, which: LiveSelection) -> array[int]:
        """Return the sequences of live messages that are selected and not locked."""
        queue = self.find(name)
        found = array("q")
        for _, some in () if queue is None else self._waiting(queue, which, -1):
            found.extend(some)
        return found

    def _waiting(self, queue: Queue, which: LiveSelection, limit: int) -> Iterator[tuple[State, Iterable[int]]]:
        """Return, for each place, the first messages that are selected and not locked."""
        values = self._live_values(queue, which, limit)
        for state, statement, ranks in _WAITING:
            for rank in ranks if which.wants(state) else ():
                yield state, (sequence for (sequence,) in self._run(_LIVE[statement], {**values, "rank": rank}))

    def _live_values(self, queue: Queue, which: LiveSelection, limit: int) -> dict[str, object]:
        return {"queue": queue.number, "prefix": self._prefix, "limit": limit, **live_conditions_of(which)}

    def _locks(self, queue: Queue) -> dict[int, _Lock]:
        """Return the lock of each locked message."""
        later = self._at.wall - self._at.now
        groups = self._run(_SQL["all_lock_groups"], (queue.number,)).fetchall()
        return {
            sequence: _Lock(clipped((moment_of(until) or 0.0) + later), text_of(holder), read_or(seconds, since, None))
            for until, packed, holder, since in groups
            for sequence in unpack(packed)
        }

    def _live_message(self, name: str, sequence: int, state: State, lock: _Lock) -> LiveMessage:
        *columns, due_at = self._run(_SQL["live_message"], (sequence,)).fetchone()
        one = delivery_of(name, self._prefix, columns)
        if state == "locked":
            one = _counted(one)
        return live_message_of(
            one,
            state,
            locked_until=lock.until,
            due_at=clipped(due_at) if state == "delayed" else None,
            locked_by=lock.holder,
            locked_since=lock.since,
        )

    def peek_deferred(self, name: str, limit: int, after: int) -> list[Delivery]:
        """Show deferred messages that are not locked."""
        queue = self.find(name)
        if queue is None:
            return []
        found = self._run(_SQL["deferred"], (queue.number, after, limit)).fetchall()
        rows = [self._run(_SQL["message"], one).fetchone() for one in found]
        return [
            one._replace(delivery_count=one.delivery_count - 1) for one in self._deliveries_of(queue, rows, "", 0.0)
        ]

    def peek_dead(self, name: str, which: Selection, limit: int) -> list[DeadMessage]:
        """Show dead letters, locked ones too."""
        dead = self._dead_of(name)
        if dead is None:
            return []
        found = self._selected(dead, which, limit, with_locked=True)
        rows = [self._run(_SQL["dead_letter"], (dead.number, sequence)).fetchone() for sequence in found]
        return [dead_message(name, self._prefix, row) for row in rows]

    def count_dead(self, name: str, which: Selection, limit: int | None) -> int:
        """Count the dead letters that are selected and not locked."""
        dead = self._dead_of(name)
        return len(self._selected(dead, which, limit, with_locked=False)) if dead else 0

    def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        group = self._group_of(self._groups(held.token), held)
        if group is None:
            return LAPSED
        row = self._run(_SQL["state"], (group.queue, held.session)).fetchone()
        return session_state(row)

    # --- shared with the operations that write ---

    def find(self, name: str) -> Queue | None:
        """Return the queue called *name* if it was ever used."""
        queue = self._queues.get(name)
        if queue is None:
            row = self._run(_SQL["queue_by_name"], (name,)).fetchone()
            if row is not None:
                queue = self._queues[name] = _queue_of(row)
        return queue

    def generation_of(self, name: str) -> int | None:
        """Return what tells the queue called *name* from one that was deleted; None if there is none."""
        queue = self.find(name.removesuffix(DEAD_SUFFIX))
        return None if queue is None else queue.number

    def _numbered(self, number: int) -> Queue:
        for queue in self._queues.values():
            if queue.number == number:
                return queue
        queue = _queue_of(self._run(_SQL["queue_by_number"], (number,)).fetchone())
        self._queues[queue.name] = queue
        return queue

    def _dead_of(self, name: str) -> Queue | None:
        live = self.find(name)
        return None if live is None else self._numbered(live.number + 1)

    def _selected(self, dead: Queue, which: Selection, limit: int | None, *, with_locked: bool) -> list[int]:
        values = {
            "queue": dead.number,
            "prefix": self._prefix,
            "with_locked": with_locked,
            "limit": -1 if limit is None else limit,
            **conditions_of(which.at(self._at.wall)),
        }
        return [sequence for (sequence,) in self._run(_SQL["dead_letters"], values)]

    def _state(self, sequence: int) -> MessageState | None:
        """Return what else is kept of a message; None if there is no such message."""
        row = self._run(_SQL["message_state"], (sequence,)).fetchone()
        return None if row is None else state_of(row)

    def _deliveries_of(
        self, queue: Queue, rows: Sequence[MessageRow], token: int | str, until: float
    ) -> list[Delivery]:
        """Return deliveries of *rows*, with the one under way counted."""
        name, prefix = queue.name, self._prefix
        make = tuple.__new__  # skips the check of the number of fields, which takes longer than all the rest
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
            # As nearly all are: the others are read value by value.
            if type(body) is bytes
            and type(deliveries) is int
            and 0 <= deliveries < COUNT_MAX
            and type(sent_at) is float
            and 0.0 <= sent_at <= LONGEST
            and priority in _PRIORITIES
            and (
                id_ is session is reply_to is correlation_id is None
                or (
                    (type(id_) in _TEXTS and type(session) in _TEXTS)
                    and (type(reply_to) in _TEXTS and type(correlation_id) in _TEXTS)
                )
            )
            else _counted(
                delivery_of(
                    name,
                    prefix,
                    (sequence, id_, body, headers, deliveries, sent_at, session, priority, reply_to, correlation_id),
                    token,
                    until,
                )
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

    def _groups(self, token: object) -> list[LockGroup]:
        """Return the live lock groups of a token."""
        if not isinstance(token, int):
            return []
        rows = self._run(_SQL["lock_groups"], {"token": token, "boot": self._at.boot, "now": self._at.now}).fetchall()
        return [
            LockGroup(
                token,
                part,
                queue,
                text_of(session),
                was_deferred,
                moment_of(until) or 0.0,
                clipped(lock) or 0.0,
                unpack(packed),
            )
            for part, queue, session, was_deferred, until, lock, packed in rows
        ]

    def _group_of(self, groups: list[LockGroup], one: Delivery | SessionLock) -> LockGroup | None:
        """Return the one of *groups* that locks *one*, if any does."""
        for group in groups:
            queue = self._queues.get(one.queue) or self.find(one.queue)
            if queue is None or queue.number != group.queue:
                return None
            if isinstance(one, SessionLock):
                if group.session == one.session:
                    return group
            elif one.sequence in group.sequences:
                return group
        return None


def _counted(one: Delivery) -> Delivery:
    return one._replace(delivery_count=min(one.delivery_count + 1, COUNT_MAX))


def _queue_of(row: Sequence[Any]) -> Queue:
    number, name, max_deliveries, dedupe_window, is_limited, has_max_locked = row
    return Queue(
        number, plain_text(name), *deliveries_and_window(max_deliveries, dedupe_window), is_limited, has_max_locked
    )


def session_state(row: Sequence[Any] | None) -> bytes | None:
    """Return a session's state from a row of the statement ``state``."""
    return None if row is None or row[0] is None else blob_of(row[0])


def _is_past(moment: object, now: float) -> bool:
    at = moment_of(moment)
    return at is not None and at <= now
