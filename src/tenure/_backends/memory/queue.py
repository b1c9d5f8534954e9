"""Queues in memory. The conformance suite certifies them, so tests may use them in place of a real broker."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import attrgetter

from tenure._backends.memory.client import Client, Memory
from tenure._queue.broker import (
    CLAIM_BYTES,
    Claim,
    LiveSelection,
    NoSession,
    QueueSettings,
    QueueTraits,
    Selection,
    SettingChanges,
)
from tenure._queue.message import (
    DEAD_SUFFIX,
    EXPIRED,
    HISTORY_MAX,
    ID_MARK,
    LAPSED,
    MAX_DELIVERIES,
    SETTLED,
    SETTLED_DEAD,
    STATES,
    Abandon,
    Attempt,
    Complete,
    DeadLetter,
    DeadMessage,
    Death,
    Defer,
    Deleted,
    Delivery,
    Died,
    Failure,
    GiveBack,
    Headers,
    Lapsed,
    LiveMessage,
    NotEmpty,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    State,
    Stats,
    count_of,
    dead_letters_of,
)
from tenure._runtime.clock import Clock, SystemClock
from tenure.errors import ConfigError

QUEUE_TRAITS = QueueTraits(lock_min=0.01, lock_max=86_400.0, body_max=2**30, names_dead=True, survives_restart=False)

NEVER = math.inf

PURGED_AT_ONCE = 500
"""So many live messages are purged in one step."""

DIED_MAX = 1_000
"""So many deaths are remembered to be told of, the newest."""


class MessageState(IntEnum):
    """Where a message is; also the index of its count."""

    READY = 0
    DELAYED = 1
    LOCKED = 2
    DEFERRED = 3
    GONE = 4


_STATES: dict[MessageState, State] = {
    MessageState.READY: "ready",
    MessageState.DELAYED: "delayed",
    MessageState.LOCKED: "locked",
    MessageState.DEFERRED: "deferred",
}


@dataclass(slots=True, eq=False)
class Row:
    """A message as it is kept."""

    sequence: int
    id: str
    body: bytes
    headers: Headers
    enqueued_at: float
    priority: int
    session: Session | None
    reply_to: str | None
    correlation_id: str | None
    place: MessageState = MessageState.GONE
    visible_at: float = 0.0
    expires_at: float = NEVER
    locked_until: float = 0.0
    token: int = 0
    delivery_count: int = 0
    is_deferred: bool = False
    history: tuple[Attempt, ...] = ()
    death: Death | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A session: its lock, its state, its messages that are ready, and those that hold up the ones behind them."""

    name: str
    token: int = 0
    locked_until: float = 0.0
    state: bytes | None = None
    ready: list[int] = field(default_factory=list)
    retrying: set[int] = field(default_factory=set)
    locked: dict[int, Row] = field(default_factory=dict)
    size: int = 0
    noted: int | None = None  # the sequence under which it was last entered among the free ones


@dataclass(frozen=True, slots=True)
class Locks:
    """What one claim locked."""

    token: int
    rows: list[Row]


class Shelf:
    """The messages of one queue, or its dead letters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead: bool = name.endswith(DEAD_SUFFIX)
        self.rows: dict[int, Row] = {}
        self.count: list[int] = [0] * len(MessageState)
        self.ready: list[int] = []  # heap of the ready ones without session, see _rank
        self.oldest: list[int] = []  # heap of all that became ready, some no longer
        self.deferred: list[int] = []  # in order of sequence
        self.sessions: dict[str, Session] = {}
        self.free: list[tuple[int, str]] = []  # heap of sessions by their next message, some no longer free or theirs
        # Heap of what time will do: (at, number, what). What no longer holds is passed over.
        self.alarms: list[tuple[float, int, Row | Session | Locks]] = []
        self.numbers: itertools.count[int] = itertools.count()


class Ids:
    """What is remembered for a while."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []  # heap

    def note(self, name: str, until: float) -> None:
        """Remember *name* until then, or as long as it already is."""
        until = max(until, self._until.get(name, -NEVER))
        self._until[name] = until
        heapq.heappush(self._ends, (until, name))

    def knows(self, name: str, now: float) -> bool:
        """Whether *name* is remembered *now*."""
        return self._until.get(name, -NEVER) > now

    def forget(self, now: float) -> None:
        """Forget what is over."""
        while self._ends and self._ends[0][0] <= now:
            until, name = heapq.heappop(self._ends)
            if self._until.get(name) == until:
                del self._until[name]


class Queue:
    """A queue, its dead letters, and what is remembered for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: QueueSettings = QueueSettings()
        self.live: Shelf = Shelf(name)
        self.dead: Shelf = Shelf(dead_letters_of(name))
        self.sequence = 0
        self.sent: Ids = Ids()
        self.inbox: Ids = Ids()
        self.idle_at: float = NEVER
        self.died: deque[Died] = deque(maxlen=DIED_MAX)  # of what time did, and nobody was told yet


class MemoryBroker(Client):
    """A ``Broker`` in memory.

    Args:
        clock: Judges expiry; a test brings its own.
        memory: What the messages are kept in; several brokers on one memory stand for several processes.
    """

    def __init__(self, clock: Clock | None = None, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self._clock = clock or SystemClock()
        if self._memory.epoch is None:
            self._memory.epoch = time.time() - self._clock.now()
        self._wall = self._memory.epoch  # makes a moment of the clock one of the wall clock

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        with self._memory.lock:
            home = self._queue(queue)
            home.settings = replace(home.settings, **changes)
            return home.settings

    async def settings(self, queue: str) -> QueueSettings:
        """Tell which settings hold for *queue*."""
        with self._memory.lock:
            known = self._memory.queues.get(queue)
            return known.settings if known else QueueSettings()

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        with self._memory.lock:
            return sorted(self._memory.queues)

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when messages of *queue* may have become claimable."""
        return self._memory.notifier.listen(f"queue:{queue}")

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        with self._memory.lock:
            ids = self._send(queue, messages, self._clock.now())
        self._ring(queue)
        return ids

    def _send(self, name: str, messages: Sequence[Outgoing], now: float) -> list[str]:
        queue = self._queue(name)
        queue.sent.forget(now)
        ids = []
        for message in messages:
            named = message.id
            if named is not None:
                if queue.sent.knows(named, now):
                    ids.append(named)
                    continue
                queue.sent.note(named, now + queue.settings.dedupe_window)
            queue.sequence += 1
            ids.append(self._keep(queue, message, named or f"{name}{ID_MARK}{queue.sequence}", now))
        return ids

    def _send_anew(self, queue: Queue, row: Row, now: float) -> None:
        """Keep a dead letter of another queue, whatever ids are remembered here."""
        session = row.session.name if row.session else None
        message = Outgoing(
            row.body,
            headers=row.headers,
            session=session,
            priority=row.priority,
            reply_to=row.reply_to,
            correlation_id=row.correlation_id,
        )
        queue.sequence += 1
        self._keep(queue, message, row.id, now)
        queue.live.rows[queue.sequence].history = row.history

    def _keep(self, queue: Queue, message: Outgoing, name: str, now: float) -> str:
        session = None
        if message.session is not None:
            session = queue.live.sessions.get(message.session)
            if session is None:
                session = queue.live.sessions[message.session] = Session(message.session)
            session.size += 1
        row = Row(
            queue.sequence,
            name,
            message.body,
            message.headers,
            now + self._wall,
            message.priority,
            session,
            message.reply_to,
            message.correlation_id,
        )
        queue.live.rows[row.sequence] = row
        if message.expires_in is not None:
            row.expires_at = now + message.expires_in
            self._set_alarm(queue.live, row.expires_at, row)
        if message.at is not None:
            assert isinstance(message.at, (int, float))
            self._put(queue.live, row, message.at - self._wall, now)
        else:
            self._put(queue.live, row, now + message.delay, now)
        return name

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        with self._memory.lock:
            now = self._clock.now()
            shelf = self._shelf(queue, now)
            if shelf is None:
                return Claim(())
            self._forget(queue, now)
            rows: list[Row] = []
            size = 0
            while shelf.ready and len(rows) < limit and size < CLAIM_BYTES:
                row = shelf.rows.get(_sequence(heapq.heappop(shelf.ready)))
                if row is not None and row.place is MessageState.READY:
                    rows.append(row)
                    size += len(row.body)
            deliveries = self._lock(shelf, rows, now + lock)
            due_in = 0.0 if size >= CLAIM_BYTES else _due_in(shelf, now)
            return Claim(deliveries, None if len(rows) == limit else due_in, self._died(shelf))

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        with self._memory.lock:
            now = self._clock.now()
            shelf = self._shelf(queue, now)
            if shelf is None:
                return Claim(())
            found = (shelf.rows.get(sequence) for sequence in dict.fromkeys(sequences))
            rows = [row for row in found if row is not None and row.place is MessageState.DEFERRED]
            return Claim(self._lock(shelf, rows, now + lock))

    def _lock(self, shelf: Shelf, rows: list[Row], until: float, token: int = 0) -> Sequence[Delivery]:
        if not rows:
            return ()
        if not token:
            token = self._new_token()
            self._set_alarm(shelf, until, Locks(token, rows))
        name, wall_until = shelf.name, until + self._wall
        deliveries = []
        for row in rows:
            if row.place is MessageState.DEFERRED:
                del shelf.deferred[bisect_left(shelf.deferred, row.sequence)]
            shelf.count[row.place] -= 1
            row.place = MessageState.LOCKED
            row.token = token
            row.locked_until = until
            if row.death is None:
                row.delivery_count += 1
            deliveries.append(_delivery(name, row, token, wall_until))
        shelf.count[MessageState.LOCKED] += len(rows)
        return deliveries

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        with self._memory.lock:
            now = self._clock.now()
            until = now + lock
            ends = [self._renew(one, until, now) for one in held]
            return [LAPSED if end is None else Renewed(end + self._wall) for end in ends]

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        if isinstance(one, SessionLock):
            session = self._session(one, now)
            if session is None:
                return None
            until = session.locked_until = max(session.locked_until, until)  # a late renewal shortens nothing
            for row in session.locked.values():
                row.locked_until = until
            return until
        found = self._locked(one, now)
        if found is None:
            return None
        shelf, row = found
        if row.session is None or shelf.is_dead or row.is_deferred:
            row.locked_until = max(row.locked_until, until)
        return row.locked_until  # that of its session, which is renewed by itself

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Pass many verdicts."""
        answers: list[Settled | Lapsed] = []
        ring: set[str] = set()
        with self._memory.lock:
            now = self._clock.now()
            for delivery, verdict in settlements:
                if type(verdict) is Defer and delivery.queue.endswith(DEAD_SUFFIX):
                    raise ConfigError("a dead letter can't be deferred; complete it, abandon it, or redrive it")
            for delivery, verdict in settlements:
                found = self._locked(delivery, now)
                if found is None:
                    answers.append(LAPSED)
                    continue
                shelf, row = found
                self._unlock(row)
                match verdict:
                    case Complete():
                        self._move(shelf, row, MessageState.GONE)
                        ring.update(self._complete(shelf, row, verdict, now))
                        answers.append(SETTLED)
                    case Abandon() | GiveBack():
                        ring.add(shelf.name)
                        answers.append(SETTLED_DEAD if self._return(shelf, row, verdict, now) else SETTLED)
                    case Defer():
                        row.is_deferred = True
                        self._move(shelf, row, MessageState.DEFERRED)
                        answers.append(SETTLED)
                    case DeadLetter(reason, description, error):
                        self._remember(row, "rejected", error, now)
                        self._bury(shelf, row, reason, description, now)
                        answers.append(SETTLED)
        for name in sorted(ring):
            self._ring(name)
        return answers

    def _complete(self, shelf: Shelf, row: Row, verdict: Complete, now: float) -> Iterable[str]:
        if verdict.remember:
            inbox = self._queue(shelf.name.removesuffix(DEAD_SUFFIX)).inbox
            inbox.forget(now)
            inbox.note(row.id, now + verdict.remember)
        for queue, message in verdict.sends:
            self._send(queue, [message], now)
        return [queue for queue, _ in verdict.sends]

    def _return(self, shelf: Shelf, row: Row, verdict: Abandon | GiveBack, now: float) -> bool:
        """Put *row* back where it came from; True if it died of that."""
        if row.death is None:
            if isinstance(verdict, GiveBack):
                row.delivery_count -= 1
            else:
                self._remember(row, "abandoned", verdict.error, now)
                if row.delivery_count >= self._queue(shelf.name).settings.max_deliveries:
                    self._bury(shelf, row, MAX_DELIVERIES, _tried(row), now)
                    return True
        self._put(shelf, row, now + (verdict.delay if isinstance(verdict, Abandon) else 0.0), now)
        return row.death is not None and not shelf.is_dead

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        with self._memory.lock:
            now = self._clock.now()
            shelf = self._shelf(queue, now)
            found: Session | None
            if session is not None:
                shelf = shelf or self._queue(queue).live
                found = shelf.sessions.setdefault(session, Session(session))
            elif shelf is not None:
                found = _next_free(shelf)
            else:
                found = None
            if found is None or found.token:
                return NoSession(_due_in(shelf, now), self._died(shelf)) if shelf else NoSession()
            assert shelf is not None
            found.token = self._new_token()
            found.locked_until = now + lock
            self._set_alarm(shelf, found.locked_until, found)
            return SessionLock(queue, found.name, found.token, found.locked_until + self._wall, found.state)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._memory.lock:
            now = self._clock.now()
            session = self._session(held, now)
            if session is None:
                return LAPSED
            shelf = self._queue(held.queue).live
            rows: list[Row] = []
            size = 0
            while len(rows) < limit and size < CLAIM_BYTES and (sequence := _next_of(shelf, session)) is not None:
                heapq.heappop(session.ready)
                rows.append(shelf.rows[sequence])
                size += len(rows[-1].body)
            session.locked.update((row.sequence, row) for row in rows)
            deliveries = self._lock(shelf, rows, session.locked_until, session.token)
            due_in = 0.0 if size >= CLAIM_BYTES else _due_in(shelf, now)
            return Claim(deliveries, None if len(rows) == limit else due_in, self._died(shelf))

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        with self._memory.lock:
            now = self._clock.now()
            session = self._session(held, now)
            if session is None:
                return LAPSED
            shelf = self._queue(held.queue).live
            self._leave(shelf, session)
            for row in list(session.locked.values()):
                self._unlock(row)
                self._return(shelf, row, GiveBack(), now)
                self._tell_dead(shelf, row)
        self._ring(held.queue)
        return SETTLED

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        with self._memory.lock:
            session = self._session(held, self._clock.now())
            return session.state if session else LAPSED

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        with self._memory.lock:
            session = self._session(held, self._clock.now())
            if session is None:
                return LAPSED
            session.state = state
            return SETTLED

    # --- looking on ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        with self._memory.lock:
            return self._count(queue, self._clock.now())

    def _count(self, queue: str, now: float) -> Stats:
        live = self._shelf(queue, now)
        if live is None:
            return Stats()
        if live.is_dead:
            return Stats(dead=len(live.rows))
        age = 0.0
        while live.oldest:
            row = live.rows.get(live.oldest[0])
            if row is not None and row.place is MessageState.READY:
                age = max(0.0, now + self._wall - row.enqueued_at)
                break
            heapq.heappop(live.oldest)
        count = live.count
        return Stats(
            count[MessageState.READY],
            count[MessageState.LOCKED],
            count[MessageState.DELAYED],
            count[MessageState.DEFERRED],
            len(self._memory.queues[queue].dead.rows),
            age,
        )

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        with self._memory.lock:
            return [self._live_message(queue, row) for row in self._live(queue, which, limit)]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, some hundreds in one step."""
        unlocked = replace(which, states=(STATES if which.states is None else which.states) - {"locked"})
        with self._memory.lock:
            found = self._live(queue, unlocked, None)
        if dry_run:
            return len(found)
        count = 0
        for first in range(0, len(found), PURGED_AT_ONCE):
            with self._memory.lock:
                count += self._remove(queue, unlocked, found[first : first + PURGED_AT_ONCE])
            await asyncio.sleep(0)
        self._ring(queue)  # what was removed may have held up others of its session
        return count

    def _live(self, name: str, which: LiveSelection, limit: int | None) -> list[Row]:
        shelf = self._shelf(name, self._clock.now())
        if shelf is None:
            return []
        rows = sorted(shelf.rows.values(), key=attrgetter("sequence"))
        return list(itertools.islice((row for row in rows if _is_wanted(row, which)), limit))

    def _remove(self, name: str, which: LiveSelection, rows: Sequence[Row]) -> int:
        """Remove those of *rows* that are still meant."""
        shelf = self._shelf(name, self._clock.now())
        if shelf is None:
            return 0
        here = [row for row in rows if shelf.rows.get(row.sequence) is row and _is_wanted(row, which)]
        for row in here:
            self._move(shelf, row, MessageState.GONE)
            if row.session is not None and not row.session.token:
                self._leave(shelf, row.session)
        if len(shelf.ready) > 2 * len(shelf.rows):  # else the next claim would pass by all that is gone
            shelf.ready = [rank for rank in shelf.ready if _is_ready(shelf, _sequence(rank))]
            heapq.heapify(shelf.ready)
        return len(here)

    def _live_message(self, queue: str, row: Row) -> LiveMessage:
        return LiveMessage(
            queue,
            row.sequence,
            row.id,
            row.body,
            row.headers,
            _STATES[row.place],
            row.delivery_count,
            row.enqueued_at,
            row.locked_until + self._wall if row.place is MessageState.LOCKED else None,
            row.visible_at + self._wall if row.place is MessageState.DELAYED else None,
            row.session.name if row.session else None,
            row.priority,
            row.reply_to,
            row.correlation_id,
        )

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        with self._memory.lock:
            shelf = self._shelf(queue, self._clock.now())
            if shelf is None:
                return []
            first = bisect_right(shelf.deferred, after)
            found = shelf.deferred[first : first + limit]
            return [_delivery(queue, shelf.rows[sequence], "", 0.0) for sequence in found]

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        with self._memory.lock:
            return [_dead_message(queue, row) for row in self._dead(queue, which, limit, locked=True)]

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        with self._memory.lock:
            now = self._clock.now()
            rows = self._dead(queue, which, limit)
            if dry_run or not rows:
                return len(rows)
            home = self._memory.queues[queue]
            for row in rows:
                self._move(home.dead, row, MessageState.GONE)
                row.death, row.delivery_count, row.expires_at, row.is_deferred = None, 0, NEVER, False
                if to is not None:
                    self._send_anew(self._queue(to), row, now)
                    continue
                home.live.rows[row.sequence] = row
                if row.session is not None:
                    row.session = home.live.sessions.setdefault(row.session.name, row.session)
                    row.session.size += 1
                self._put(home.live, row, now, now)
        self._ring(to or queue)
        return len(rows)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        with self._memory.lock:
            rows = self._dead(queue, which, limit)
            for row in rows:
                self._move(self._memory.queues[queue].dead, row, MessageState.GONE)
            return len(rows)

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Tell which *ids* the inbox remembers."""
        with self._memory.lock:
            now = self._clock.now()
            known = self._memory.queues.get(queue)
            return [known is not None and known.inbox.knows(one, now) for one in ids]

    # --- the end of a queue ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty or by *force*."""
        with self._memory.lock:
            found = self._count(queue, self._clock.now())
            if count_of(found) and not force:
                return NotEmpty(found)
            gone = self._memory.queues.pop(queue, None)
            if gone is not None:
                self._memory.sequence = max(self._memory.sequence, gone.sequence)
            return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*."""
        with self._memory.lock:
            self._queue(queue).idle_at = self._clock.now() + seconds

    async def idle(self) -> Sequence[str]:
        """List the queues whose time has run out."""
        with self._memory.lock:
            now = self._clock.now()
            found = sorted((one.idle_at, name) for name, one in self._memory.queues.items() if one.idle_at <= now)
            return [name for _, name in found[:100]]

    def _dead(self, name: str, which: Selection, limit: int | None, *, locked: bool = False) -> list[Row]:
        now = self._clock.now()
        shelf = self._shelf(dead_letters_of(name), now) if self._shelf(name, now) else None
        if shelf is None:
            return []
        which = which.at(now + self._wall)
        rows = sorted(shelf.rows.values(), key=attrgetter("sequence"))
        found = (row for row in rows if _is_meant(row, which) and (locked or row.place is not MessageState.LOCKED))
        return list(itertools.islice(found, limit))

    def _leave(self, shelf: Shelf, session: Session) -> None:
        session.token = 0
        _note_free(shelf, session)
        if not session.size and session.state is None:
            shelf.sessions.pop(session.name, None)  # nothing is left to be remembered

    # --- places ---

    def _queue(self, name: str) -> Queue:
        queue = self._memory.queues.get(name)
        if queue is None:
            queue = self._memory.queues[name] = Queue(name)
            queue.sequence = self._memory.sequence  # one of this name may have been deleted
        return queue

    def _forget(self, name: str, now: float) -> None:
        """Forget the ids that are over, also where nothing is sent any more."""
        home = self._memory.queues[name.removesuffix(DEAD_SUFFIX)]
        home.sent.forget(now)
        home.inbox.forget(now)

    def _shelf(self, name: str, now: float) -> Shelf | None:
        """Return the messages of a queue, or its dead letters, as they are *now*; None if it was never used."""
        home = self._memory.queues.get(name.removesuffix(DEAD_SUFFIX))
        if home is None:
            return None
        shelf = home.dead if name.endswith(DEAD_SUFFIX) else home.live
        while shelf.alarms and shelf.alarms[0][0] <= now:
            self._alarm(shelf, heapq.heappop(shelf.alarms)[2], now)
        return shelf

    def _locked(self, delivery: Delivery, now: float) -> tuple[Shelf, Row] | None:
        shelf = self._shelf(delivery.queue, now)
        row = shelf.rows.get(delivery.sequence) if shelf else None
        if shelf is None or row is None or row.place is not MessageState.LOCKED or row.token != delivery.token:
            return None
        return shelf, row

    def _session(self, held: SessionLock, now: float) -> Session | None:
        shelf = self._shelf(held.queue, now)
        session = shelf.sessions.get(held.session) if shelf else None
        return session if session is not None and session.token and session.token == held.token else None

    def _new_token(self) -> int:
        self._memory.tokens += 1
        return self._memory.tokens

    def _unlock(self, row: Row) -> None:
        row.token = 0
        if row.session is not None:
            row.session.locked.pop(row.sequence, None)

    def _move(self, shelf: Shelf, row: Row, to: MessageState) -> None:
        shelf.count[row.place] -= 1
        shelf.count[to] += 1
        if row.place is MessageState.DEFERRED:
            del shelf.deferred[bisect_left(shelf.deferred, row.sequence)]
        if to is MessageState.DEFERRED:
            insort(shelf.deferred, row.sequence)
        row.place = to
        if row.session is not None and row.sequence in row.session.retrying:
            row.session.retrying.remove(row.sequence)
            _note_free(shelf, row.session)
        if to is MessageState.GONE:
            del shelf.rows[row.sequence]
            if row.session is not None and not shelf.is_dead:
                row.session.size -= 1

    def _put(self, shelf: Shelf, row: Row, visible_at: float, now: float) -> None:
        """Let *row* be claimable from *visible_at* on, or deferred again if it was."""
        row.visible_at = visible_at
        if row.is_deferred:
            self._move(shelf, row, MessageState.DEFERRED)
        elif row.expires_at <= now:
            self._bury(shelf, row, EXPIRED, _expired(row), now)
        elif visible_at > now:
            self._move(shelf, row, MessageState.DELAYED)
            self._set_alarm(shelf, visible_at, row)
            if row.session is not None and row.delivery_count:
                row.session.retrying.add(row.sequence)
        else:
            self._move(shelf, row, MessageState.READY)
            if len(shelf.oldest) > 2 * len(shelf.rows):  # nobody has asked for the oldest for long
                shelf.oldest = sorted(one.sequence for one in shelf.rows.values() if one.place is MessageState.READY)
            else:
                heapq.heappush(shelf.oldest, row.sequence)
            if row.session is not None and row.death is None:
                heapq.heappush(row.session.ready, row.sequence)
                _note_free(shelf, row.session)
            else:
                heapq.heappush(shelf.ready, _rank(row))

    def _died(self, shelf: Shelf) -> Sequence[Died]:
        """Return what time has buried since this was last asked."""
        died = self._memory.queues[shelf.name.removesuffix(DEAD_SUFFIX)].died
        if shelf.is_dead or not died:
            return ()
        told = tuple(died)
        died.clear()
        return told

    def _tell_dead(self, shelf: Shelf, row: Row) -> None:
        """Remember to tell of the death of *row*, if it is dead: it died by time, and of no verdict."""
        if row.death is not None and not shelf.is_dead:
            home = self._memory.queues[shelf.name]
            home.died.append(Died(row.sequence, row.id, row.delivery_count, row.death.reason))

    def _bury(self, shelf: Shelf, row: Row, reason: str, description: str, now: float) -> None:
        self._move(shelf, row, MessageState.GONE)
        dead = self._queue(shelf.name.removesuffix(DEAD_SUFFIX)).dead
        errors = [attempt.error for attempt in reversed(row.history) if attempt.error is not None]
        row.death = Death(reason, description, now + self._wall, errors[0] if errors else None, row.history)
        row.is_deferred, row.expires_at = False, NEVER
        dead.rows[row.sequence] = row
        self._put(dead, row, now, now)
        self._memory.notifier.notify(f"queue:{dead.name}")

    # --- time ---

    def _set_alarm(self, shelf: Shelf, at: float, what: Row | Session | Locks) -> None:
        if len(shelf.alarms) > 3 * (len(shelf.rows) + len(shelf.sessions)) + 64:  # most are for what is settled by now
            shelf.alarms = [alarm for alarm in shelf.alarms if _is_awaited(shelf, alarm[2])]
            heapq.heapify(shelf.alarms)
        heapq.heappush(shelf.alarms, (at, next(shelf.numbers), what))

    def _alarm(self, shelf: Shelf, what: Row | Session | Locks, now: float) -> None:
        if isinstance(what, Locks):
            self._locks_end(shelf, what, now)
        elif isinstance(what, Session):
            if what.token and what.locked_until > now:
                self._set_alarm(shelf, what.locked_until, what)
            elif what.token:
                self._leave(shelf, what)
                for row in list(what.locked.values()):
                    self._lock_ends(shelf, row, now)
        elif shelf.rows.get(what.sequence) is not what:
            return  # it is gone, or among the dead
        elif what.place in (MessageState.READY, MessageState.DELAYED) and what.expires_at <= now:
            self._bury(shelf, what, EXPIRED, _expired(what), now)
            self._tell_dead(shelf, what)
        elif what.place is MessageState.DELAYED and what.visible_at <= now:
            self._put(shelf, what, what.visible_at, now)

    def _locks_end(self, shelf: Shelf, locks: Locks, now: float) -> None:
        """Look at the messages of one claim: some are settled, some renewed, the locks of the others have ended."""
        held = [row for row in locks.rows if row.token == locks.token and row.place is MessageState.LOCKED]
        renewed = [row for row in held if row.locked_until > now]
        for row in held:
            if row.locked_until <= now:
                self._lock_ends(shelf, row, now)
        if renewed:
            self._set_alarm(shelf, min(row.locked_until for row in renewed), Locks(locks.token, renewed))

    def _lock_ends(self, shelf: Shelf, row: Row, now: float) -> None:
        self._unlock(row)
        if row.death is None:
            self._remember(row, "expired", None, now)
            if row.delivery_count >= self._queue(shelf.name).settings.max_deliveries:
                self._bury(shelf, row, MAX_DELIVERIES, _tried(row), now)
                self._tell_dead(shelf, row)
                return
        was_dead = row.death is not None
        self._put(shelf, row, now, now)
        if not was_dead:
            self._tell_dead(shelf, row)

    def _remember(self, row: Row, outcome: str, error: Failure | None, now: float) -> None:
        attempt = Attempt(row.delivery_count, now + self._wall, outcome, error)  # type: ignore[arg-type]
        row.history = (*row.history, attempt)[-HISTORY_MAX:]

    def _ring(self, name: str) -> None:
        self._memory.notifier.notify(f"queue:{name}")


def _rank(row: Row) -> int:
    """Return one number to order by: higher priority first, then by sequence."""
    return row.sequence - (row.priority << 48)


def _sequence(rank: int) -> int:
    return rank & ((1 << 48) - 1)


def _next_of(shelf: Shelf, session: Session) -> int | None:
    """Return the sequence of the next message of *session*, if none that is to be tried again stands before it."""
    while session.ready:
        if _is_ready(shelf, session.ready[0]):
            break
        heapq.heappop(session.ready)
    if not session.ready or any(sequence < session.ready[0] for sequence in session.retrying):
        return None
    return session.ready[0]


def _is_ready(shelf: Shelf, sequence: int) -> bool:
    row = shelf.rows.get(sequence)
    return row is not None and row.place is MessageState.READY


def _note_free(shelf: Shelf, session: Session) -> None:
    """Enter *session* among those that can be accepted, if it can be."""
    sequence = None if session.token else _next_of(shelf, session)
    if sequence is not None and session.noted != sequence:
        session.noted = sequence
        heapq.heappush(shelf.free, (sequence, session.name))


def _next_free(shelf: Shelf) -> Session | None:
    """Return the session that can be accepted and has waited longest."""
    while shelf.free:
        sequence, name = shelf.free[0]
        session = shelf.sessions.get(name)
        if session is not None and not session.token and _next_of(shelf, session) == sequence:
            return session
        heapq.heappop(shelf.free)
        if session is not None:
            session.noted = None if session.noted == sequence else session.noted
            _note_free(shelf, session)
    return None


def _due_in(shelf: Shelf, now: float) -> float | None:
    # An alarm for what is settled by now would wake every idle consumer for nothing, once for each claim ever made.
    while shelf.alarms and not _is_awaited(shelf, shelf.alarms[0][2]):
        heapq.heappop(shelf.alarms)
    return max(0.0, shelf.alarms[0][0] - now) if shelf.alarms else None


def _is_awaited(shelf: Shelf, what: Row | Session | Locks) -> bool:
    """Tell whether time alone may still change something about *what*."""
    if isinstance(what, Locks):
        return any(row.token == what.token and row.place is MessageState.LOCKED for row in what.rows)
    if isinstance(what, Session):
        return what.token != 0
    is_here = shelf.rows.get(what.sequence) is what
    return is_here and (what.place is MessageState.DELAYED or what.expires_at < NEVER)


def _is_meant(row: Row, which: Selection) -> bool:
    assert row.death is not None
    return (
        row.sequence > which.after
        and (which.sequences is None or row.sequence in which.sequences)
        and (which.ids is None or row.id in which.ids)
        and (which.reason is None or row.death.reason == which.reason)
        and (which.dead_before is None or row.death.at < which.dead_before)
    )


def _is_wanted(row: Row, which: LiveSelection) -> bool:
    session = row.session.name if row.session else None
    return which.wants(_STATES[row.place]) and which.fits(row.sequence, lambda: row.id, session, row.enqueued_at)


def _tried(row: Row) -> str:
    return f"delivered {row.delivery_count} times, and never completed"


def _expired(row: Row) -> str:
    return "not handled before it expired"


def _delivery(queue: str, row: Row, token: int | str, locked_until: float) -> Delivery:
    return Delivery(
        queue,
        row.sequence,
        token,
        row.id,
        row.body,
        row.headers,
        row.delivery_count,
        row.enqueued_at,
        locked_until,
        row.session.name if row.session else None,
        row.priority,
        row.reply_to,
        row.correlation_id,
        row.death,
    )


def _dead_message(queue: str, row: Row) -> DeadMessage:
    assert row.death is not None
    return DeadMessage(
        queue,
        row.sequence,
        row.id,
        row.body,
        row.headers,
        row.delivery_count,
        row.enqueued_at,
        row.session.name if row.session else None,
        row.priority,
        row.reply_to,
        row.correlation_id,
        row.death.reason,
        row.death.description,
        row.death.at,
        row.death.error,
        row.death.history,
    )
