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


STATE_NAMES: dict[MessageState, State] = {
    MessageState.READY: "ready",
    MessageState.DELAYED: "delayed",
    MessageState.LOCKED: "locked",
    MessageState.DEFERRED: "deferred",
}


@dataclass(slots=True, eq=False)
class StoredMessage:
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
    state: MessageState = MessageState.GONE
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
    locked: dict[int, StoredMessage] = field(default_factory=dict)
    size: int = 0
    listed_as: int | None = None  # the sequence under which it was last entered among the free ones


@dataclass(frozen=True, slots=True)
class LockGroup:
    """What one claim locked."""

    token: int
    messages: list[StoredMessage]


class Subqueue:
    """The messages of one queue, or its dead letters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead: bool = name.endswith(DEAD_SUFFIX)
        self.messages: dict[int, StoredMessage] = {}
        self.count: list[int] = [0] * len(MessageState)
        self.ready: list[int] = []  # heap of the ready ones without session, see _rank
        self.oldest: list[int] = []  # heap of all that became ready, some no longer
        self.deferred: list[int] = []  # in order of sequence
        self.sessions: dict[str, Session] = {}
        self.free_sessions: list[
            tuple[int, str]
        ] = []  # heap of sessions by their next message, some no longer free or theirs
        # Heap of what time will do: (at, number, what). What no longer holds is passed over.
        self.due: list[tuple[float, int, StoredMessage | Session | LockGroup]] = []
        self.numbers: itertools.count[int] = itertools.count()


class RememberedIds:
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


class StoredQueue:
    """A queue, its dead letters, and what is remembered for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: QueueSettings = QueueSettings()
        self.live: Subqueue = Subqueue(name)
        self.dead: Subqueue = Subqueue(dead_letters_of(name))
        self.sequence = 0
        self.sent: RememberedIds = RememberedIds()
        self.inbox: RememberedIds = RememberedIds()
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
        self._wall_offset = self._memory.epoch  # makes a moment of the clock one of the wall clock

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        with self._memory.lock:
            stored = self._queue(queue)
            stored.settings = replace(stored.settings, **changes)
            return stored.settings

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
        self._notify(queue)
        return ids

    def _send(self, name: str, messages: Sequence[Outgoing], now: float) -> list[str]:
        queue = self._queue(name)
        queue.sent.forget(now)
        ids = []
        for outgoing in messages:
            named = outgoing.id
            if named is not None:
                if queue.sent.knows(named, now):
                    ids.append(named)
                    continue
                queue.sent.note(named, now + queue.settings.dedupe_window)
            queue.sequence += 1
            ids.append(self._insert(queue, outgoing, named or f"{name}{ID_MARK}{queue.sequence}", now))
        return ids

    def _insert_redriven(self, queue: StoredQueue, message: StoredMessage, now: float) -> None:
        """Keep a dead letter of another queue, whatever ids are remembered here."""
        session = message.session.name if message.session else None
        outgoing = Outgoing(
            message.body,
            headers=message.headers,
            session=session,
            priority=message.priority,
            reply_to=message.reply_to,
            correlation_id=message.correlation_id,
        )
        queue.sequence += 1
        self._insert(queue, outgoing, message.id, now)
        queue.live.messages[queue.sequence].history = message.history

    def _insert(self, queue: StoredQueue, outgoing: Outgoing, name: str, now: float) -> str:
        session = None
        if outgoing.session is not None:
            session = queue.live.sessions.get(outgoing.session)
            if session is None:
                session = queue.live.sessions[outgoing.session] = Session(outgoing.session)
            session.size += 1
        message = StoredMessage(
            queue.sequence,
            name,
            outgoing.body,
            outgoing.headers,
            now + self._wall_offset,
            outgoing.priority,
            session,
            outgoing.reply_to,
            outgoing.correlation_id,
        )
        queue.live.messages[message.sequence] = message
        if outgoing.expires_in is not None:
            message.expires_at = now + outgoing.expires_in
            self._add_due(queue.live, message.expires_at, message)
        if outgoing.at is not None:
            assert isinstance(outgoing.at, (int, float))
            self._schedule(queue.live, message, outgoing.at - self._wall_offset, now)
        else:
            self._schedule(queue.live, message, now + outgoing.delay, now)
        return name

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        with self._memory.lock:
            now = self._clock.now()
            subqueue = self._subqueue(queue, now)
            if subqueue is None:
                return Claim(())
            self._expire_ids(queue, now)
            messages: list[StoredMessage] = []
            size = 0
            while subqueue.ready and len(messages) < limit and size < CLAIM_BYTES:
                message = subqueue.messages.get(_sequence(heapq.heappop(subqueue.ready)))
                if message is not None and message.state is MessageState.READY:
                    messages.append(message)
                    size += len(message.body)
            deliveries = self._lock(subqueue, messages, now + lock)
            due_in = 0.0 if size >= CLAIM_BYTES else _due_in(subqueue, now)
            return Claim(deliveries, None if len(messages) == limit else due_in, self._take_deaths(subqueue))

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        with self._memory.lock:
            now = self._clock.now()
            subqueue = self._subqueue(queue, now)
            if subqueue is None:
                return Claim(())
            found = (subqueue.messages.get(sequence) for sequence in dict.fromkeys(sequences))
            messages = [message for message in found if message is not None and message.state is MessageState.DEFERRED]
            return Claim(self._lock(subqueue, messages, now + lock))

    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        if not messages:
            return ()
        if not token:
            token = self._new_token()
            self._add_due(subqueue, until, LockGroup(token, messages))
        name, wall_until = subqueue.name, until + self._wall_offset
        deliveries = []
        for message in messages:
            if message.state is MessageState.DEFERRED:
                del subqueue.deferred[bisect_left(subqueue.deferred, message.sequence)]
            subqueue.count[message.state] -= 1
            message.state = MessageState.LOCKED
            message.token = token
            message.locked_until = until
            if message.death is None:
                message.delivery_count += 1
            deliveries.append(_delivery(name, message, token, wall_until))
        subqueue.count[MessageState.LOCKED] += len(messages)
        return deliveries

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        with self._memory.lock:
            now = self._clock.now()
            until = now + lock
            ends = [self._renew(one, until, now) for one in held]
            return [LAPSED if end is None else Renewed(end + self._wall_offset) for end in ends]

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        if isinstance(one, SessionLock):
            session = self._session(one, now)
            if session is None:
                return None
            until = session.locked_until = max(session.locked_until, until)  # a late renewal shortens nothing
            for message in session.locked.values():
                message.locked_until = until
            return until
        found = self._locked(one, now)
        if found is None:
            return None
        subqueue, message = found
        if message.session is None or subqueue.is_dead or message.is_deferred:
            message.locked_until = max(message.locked_until, until)
        return message.locked_until  # that of its session, which is renewed by itself

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
                subqueue, message = found
                self._unlock(message)
                match verdict:
                    case Complete():
                        self._set_state(subqueue, message, MessageState.GONE)
                        ring.update(self._complete(subqueue, message, verdict, now))
                        answers.append(SETTLED)
                    case Abandon() | GiveBack():
                        ring.add(subqueue.name)
                        answers.append(SETTLED_DEAD if self._put_back(subqueue, message, verdict, now) else SETTLED)
                    case Defer():
                        message.is_deferred = True
                        self._set_state(subqueue, message, MessageState.DEFERRED)
                        answers.append(SETTLED)
                    case DeadLetter(reason, description, error):
                        self._record_attempt(message, "rejected", error, now)
                        self._dead_letter(subqueue, message, reason, description, now)
                        answers.append(SETTLED)
        for name in sorted(ring):
            self._notify(name)
        return answers

    def _complete(self, subqueue: Subqueue, message: StoredMessage, verdict: Complete, now: float) -> Iterable[str]:
        if verdict.remember:
            inbox = self._queue(subqueue.name.removesuffix(DEAD_SUFFIX)).inbox
            inbox.forget(now)
            inbox.note(message.id, now + verdict.remember)
        for queue, outgoing in verdict.sends:
            self._send(queue, [outgoing], now)
        return [queue for queue, _ in verdict.sends]

    def _put_back(self, subqueue: Subqueue, message: StoredMessage, verdict: Abandon | GiveBack, now: float) -> bool:
        """Put *row* back where it came from; True if it died of that."""
        if message.death is None:
            if isinstance(verdict, GiveBack):
                message.delivery_count -= 1
            else:
                self._record_attempt(message, "abandoned", verdict.error, now)
                if message.delivery_count >= self._queue(subqueue.name).settings.max_deliveries:
                    self._dead_letter(subqueue, message, MAX_DELIVERIES, _tried(message), now)
                    return True
        self._schedule(subqueue, message, now + (verdict.delay if isinstance(verdict, Abandon) else 0.0), now)
        return message.death is not None and not subqueue.is_dead

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        with self._memory.lock:
            now = self._clock.now()
            subqueue = self._subqueue(queue, now)
            found: Session | None
            if session is not None:
                subqueue = subqueue or self._queue(queue).live
                found = subqueue.sessions.setdefault(session, Session(session))
            elif subqueue is not None:
                found = _next_free_session(subqueue)
            else:
                found = None
            if found is None or found.token:
                return NoSession(_due_in(subqueue, now), self._take_deaths(subqueue)) if subqueue else NoSession()
            assert subqueue is not None
            found.token = self._new_token()
            found.locked_until = now + lock
            self._add_due(subqueue, found.locked_until, found)
            return SessionLock(queue, found.name, found.token, found.locked_until + self._wall_offset, found.state)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._memory.lock:
            now = self._clock.now()
            session = self._session(held, now)
            if session is None:
                return LAPSED
            subqueue = self._queue(held.queue).live
            messages: list[StoredMessage] = []
            size = 0
            while (
                len(messages) < limit
                and size < CLAIM_BYTES
                and (sequence := _next_in_session(subqueue, session)) is not None
            ):
                heapq.heappop(session.ready)
                messages.append(subqueue.messages[sequence])
                size += len(messages[-1].body)
            session.locked.update((message.sequence, message) for message in messages)
            deliveries = self._lock(subqueue, messages, session.locked_until, session.token)
            due_in = 0.0 if size >= CLAIM_BYTES else _due_in(subqueue, now)
            return Claim(deliveries, None if len(messages) == limit else due_in, self._take_deaths(subqueue))

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        with self._memory.lock:
            now = self._clock.now()
            session = self._session(held, now)
            if session is None:
                return LAPSED
            subqueue = self._queue(held.queue).live
            self._unlock_session(subqueue, session)
            for message in list(session.locked.values()):
                self._unlock(message)
                self._put_back(subqueue, message, GiveBack(), now)
                self._record_death(subqueue, message)
        self._notify(held.queue)
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
        live = self._subqueue(queue, now)
        if live is None:
            return Stats()
        if live.is_dead:
            return Stats(dead=len(live.messages))
        age = 0.0
        while live.oldest:
            message = live.messages.get(live.oldest[0])
            if message is not None and message.state is MessageState.READY:
                age = max(0.0, now + self._wall_offset - message.enqueued_at)
                break
            heapq.heappop(live.oldest)
        count = live.count
        return Stats(
            count[MessageState.READY],
            count[MessageState.LOCKED],
            count[MessageState.DELAYED],
            count[MessageState.DEFERRED],
            len(self._memory.queues[queue].dead.messages),
            age,
        )

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        with self._memory.lock:
            return [self._live_message(queue, message) for message in self._select_live(queue, which, limit)]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, some hundreds in one step."""
        unlocked = replace(which, states=(STATES if which.states is None else which.states) - {"locked"})
        with self._memory.lock:
            found = self._select_live(queue, unlocked, None)
        if dry_run:
            return len(found)
        count = 0
        for first in range(0, len(found), PURGED_AT_ONCE):
            with self._memory.lock:
                count += self._remove(queue, unlocked, found[first : first + PURGED_AT_ONCE])
            await asyncio.sleep(0)
        self._notify(queue)  # what was removed may have held up others of its session
        return count

    def _select_live(self, name: str, which: LiveSelection, limit: int | None) -> list[StoredMessage]:
        subqueue = self._subqueue(name, self._clock.now())
        if subqueue is None:
            return []
        messages = sorted(subqueue.messages.values(), key=attrgetter("sequence"))
        return list(itertools.islice((message for message in messages if _is_selected_live(message, which)), limit))

    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        """Remove those of *rows* that are still meant."""
        subqueue = self._subqueue(name, self._clock.now())
        if subqueue is None:
            return 0
        here = [
            message
            for message in messages
            if subqueue.messages.get(message.sequence) is message and _is_selected_live(message, which)
        ]
        for message in here:
            self._set_state(subqueue, message, MessageState.GONE)
            if message.session is not None and not message.session.token:
                self._unlock_session(subqueue, message.session)
        if len(subqueue.ready) > 2 * len(subqueue.messages):  # else the next claim would pass by all that is gone
            subqueue.ready = [rank for rank in subqueue.ready if _is_ready(subqueue, _sequence(rank))]
            heapq.heapify(subqueue.ready)
        return len(here)

    def _live_message(self, queue: str, message: StoredMessage) -> LiveMessage:
        return LiveMessage(
            queue,
            message.sequence,
            message.id,
            message.body,
            message.headers,
            STATE_NAMES[message.state],
            message.delivery_count,
            message.enqueued_at,
            message.locked_until + self._wall_offset if message.state is MessageState.LOCKED else None,
            message.visible_at + self._wall_offset if message.state is MessageState.DELAYED else None,
            message.session.name if message.session else None,
            message.priority,
            message.reply_to,
            message.correlation_id,
        )

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        with self._memory.lock:
            subqueue = self._subqueue(queue, self._clock.now())
            if subqueue is None:
                return []
            first = bisect_right(subqueue.deferred, after)
            found = subqueue.deferred[first : first + limit]
            return [_delivery(queue, subqueue.messages[sequence], "", 0.0) for sequence in found]

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        with self._memory.lock:
            return [_dead_message(queue, message) for message in self._select_dead(queue, which, limit, locked=True)]

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        with self._memory.lock:
            now = self._clock.now()
            messages = self._select_dead(queue, which, limit)
            if dry_run or not messages:
                return len(messages)
            stored = self._memory.queues[queue]
            for message in messages:
                self._set_state(stored.dead, message, MessageState.GONE)
                message.death, message.delivery_count, message.expires_at, message.is_deferred = None, 0, NEVER, False
                if to is not None:
                    self._insert_redriven(self._queue(to), message, now)
                    continue
                stored.live.messages[message.sequence] = message
                if message.session is not None:
                    message.session = stored.live.sessions.setdefault(message.session.name, message.session)
                    message.session.size += 1
                self._schedule(stored.live, message, now, now)
        self._notify(to or queue)
        return len(messages)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        with self._memory.lock:
            messages = self._select_dead(queue, which, limit)
            for message in messages:
                self._set_state(self._memory.queues[queue].dead, message, MessageState.GONE)
            return len(messages)

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

    def _select_dead(
        self, name: str, which: Selection, limit: int | None, *, locked: bool = False
    ) -> list[StoredMessage]:
        now = self._clock.now()
        subqueue = self._subqueue(dead_letters_of(name), now) if self._subqueue(name, now) else None
        if subqueue is None:
            return []
        which = which.at(now + self._wall_offset)
        messages = sorted(subqueue.messages.values(), key=attrgetter("sequence"))
        found = (
            message
            for message in messages
            if _is_selected_dead(message, which) and (locked or message.state is not MessageState.LOCKED)
        )
        return list(itertools.islice(found, limit))

    def _unlock_session(self, subqueue: Subqueue, session: Session) -> None:
        session.token = 0
        _list_if_free(subqueue, session)
        if not session.size and session.state is None:
            subqueue.sessions.pop(session.name, None)  # nothing is left to be remembered

    # --- places ---

    def _queue(self, name: str) -> StoredQueue:
        queue = self._memory.queues.get(name)
        if queue is None:
            queue = self._memory.queues[name] = StoredQueue(name)
            queue.sequence = self._memory.sequence  # one of this name may have been deleted
        return queue

    def _expire_ids(self, name: str, now: float) -> None:
        """Forget the ids that are over, also where nothing is sent any more."""
        stored = self._memory.queues[name.removesuffix(DEAD_SUFFIX)]
        stored.sent.forget(now)
        stored.inbox.forget(now)

    def _subqueue(self, name: str, now: float) -> Subqueue | None:
        """Return the messages of a queue, or its dead letters, as they are *now*; None if it was never used."""
        stored = self._memory.queues.get(name.removesuffix(DEAD_SUFFIX))
        if stored is None:
            return None
        subqueue = stored.dead if name.endswith(DEAD_SUFFIX) else stored.live
        while subqueue.due and subqueue.due[0][0] <= now:
            self._apply_due(subqueue, heapq.heappop(subqueue.due)[2], now)
        return subqueue

    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        subqueue = self._subqueue(delivery.queue, now)
        message = subqueue.messages.get(delivery.sequence) if subqueue else None
        if (
            subqueue is None
            or message is None
            or message.state is not MessageState.LOCKED
            or message.token != delivery.token
        ):
            return None
        return subqueue, message

    def _session(self, held: SessionLock, now: float) -> Session | None:
        subqueue = self._subqueue(held.queue, now)
        session = subqueue.sessions.get(held.session) if subqueue else None
        return session if session is not None and session.token and session.token == held.token else None

    def _new_token(self) -> int:
        self._memory.tokens += 1
        return self._memory.tokens

    def _unlock(self, message: StoredMessage) -> None:
        message.token = 0
        if message.session is not None:
            message.session.locked.pop(message.sequence, None)

    def _set_state(self, subqueue: Subqueue, message: StoredMessage, to: MessageState) -> None:
        subqueue.count[message.state] -= 1
        subqueue.count[to] += 1
        if message.state is MessageState.DEFERRED:
            del subqueue.deferred[bisect_left(subqueue.deferred, message.sequence)]
        if to is MessageState.DEFERRED:
            insort(subqueue.deferred, message.sequence)
        message.state = to
        if message.session is not None and message.sequence in message.session.retrying:
            message.session.retrying.remove(message.sequence)
            _list_if_free(subqueue, message.session)
        if to is MessageState.GONE:
            del subqueue.messages[message.sequence]
            if message.session is not None and not subqueue.is_dead:
                message.session.size -= 1

    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        """Let *row* be claimable from *visible_at* on, or deferred again if it was."""
        message.visible_at = visible_at
        if message.is_deferred:
            self._set_state(subqueue, message, MessageState.DEFERRED)
        elif message.expires_at <= now:
            self._dead_letter(subqueue, message, EXPIRED, _expired(message), now)
        elif visible_at > now:
            self._set_state(subqueue, message, MessageState.DELAYED)
            self._add_due(subqueue, visible_at, message)
            if message.session is not None and message.delivery_count:
                message.session.retrying.add(message.sequence)
        else:
            self._set_state(subqueue, message, MessageState.READY)
            if len(subqueue.oldest) > 2 * len(subqueue.messages):  # nobody has asked for the oldest for long
                subqueue.oldest = sorted(
                    one.sequence for one in subqueue.messages.values() if one.state is MessageState.READY
                )
            else:
                heapq.heappush(subqueue.oldest, message.sequence)
            if message.session is not None and message.death is None:
                heapq.heappush(message.session.ready, message.sequence)
                _list_if_free(subqueue, message.session)
            else:
                heapq.heappush(subqueue.ready, _rank(message))

    def _take_deaths(self, subqueue: Subqueue) -> Sequence[Died]:
        """Return what time has buried since this was last asked."""
        died = self._memory.queues[subqueue.name.removesuffix(DEAD_SUFFIX)].died
        if subqueue.is_dead or not died:
            return ()
        told = tuple(died)
        died.clear()
        return told

    def _record_death(self, subqueue: Subqueue, message: StoredMessage) -> None:
        """Remember to tell of the death of *row*, if it is dead: it died by time, and of no verdict."""
        if message.death is not None and not subqueue.is_dead:
            stored = self._memory.queues[subqueue.name]
            stored.died.append(Died(message.sequence, message.id, message.delivery_count, message.death.reason))

    def _dead_letter(
        self, subqueue: Subqueue, message: StoredMessage, reason: str, description: str, now: float
    ) -> None:
        self._set_state(subqueue, message, MessageState.GONE)
        dead = self._queue(subqueue.name.removesuffix(DEAD_SUFFIX)).dead
        errors = [attempt.error for attempt in reversed(message.history) if attempt.error is not None]
        message.death = Death(
            reason, description, now + self._wall_offset, errors[0] if errors else None, message.history
        )
        message.is_deferred, message.expires_at = False, NEVER
        dead.messages[message.sequence] = message
        self._schedule(dead, message, now, now)
        self._memory.notifier.notify(f"queue:{dead.name}")

    # --- time ---

    def _add_due(self, subqueue: Subqueue, at: float, what: StoredMessage | Session | LockGroup) -> None:
        if len(subqueue.due) > 3 * (len(subqueue.messages) + len(subqueue.sessions)) + 64:  # most are settled by now
            subqueue.due = [due for due in subqueue.due if _is_pending(subqueue, due[2])]
            heapq.heapify(subqueue.due)
        heapq.heappush(subqueue.due, (at, next(subqueue.numbers), what))

    def _apply_due(self, subqueue: Subqueue, what: StoredMessage | Session | LockGroup, now: float) -> None:
        if isinstance(what, LockGroup):
            self._group_expired(subqueue, what, now)
        elif isinstance(what, Session):
            if what.token and what.locked_until > now:
                self._add_due(subqueue, what.locked_until, what)
            elif what.token:
                self._unlock_session(subqueue, what)
                for message in list(what.locked.values()):
                    self._lock_expired(subqueue, message, now)
        elif subqueue.messages.get(what.sequence) is not what:
            return  # it is gone, or among the dead
        elif what.state in (MessageState.READY, MessageState.DELAYED) and what.expires_at <= now:
            self._dead_letter(subqueue, what, EXPIRED, _expired(what), now)
            self._record_death(subqueue, what)
        elif what.state is MessageState.DELAYED and what.visible_at <= now:
            self._schedule(subqueue, what, what.visible_at, now)

    def _group_expired(self, subqueue: Subqueue, group: LockGroup, now: float) -> None:
        """Look at the messages of one claim: some are settled, some renewed, the locks of the others have ended."""
        held = [
            message
            for message in group.messages
            if message.token == group.token and message.state is MessageState.LOCKED
        ]
        renewed = [message for message in held if message.locked_until > now]
        for message in held:
            if message.locked_until <= now:
                self._lock_expired(subqueue, message, now)
        if renewed:
            self._add_due(subqueue, min(message.locked_until for message in renewed), LockGroup(group.token, renewed))

    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        self._unlock(message)
        if message.death is None:
            self._record_attempt(message, "expired", None, now)
            if message.delivery_count >= self._queue(subqueue.name).settings.max_deliveries:
                self._dead_letter(subqueue, message, MAX_DELIVERIES, _tried(message), now)
                self._record_death(subqueue, message)
                return
        was_dead = message.death is not None
        self._schedule(subqueue, message, now, now)
        if not was_dead:
            self._record_death(subqueue, message)

    def _record_attempt(self, message: StoredMessage, outcome: str, error: Failure | None, now: float) -> None:
        attempt = Attempt(message.delivery_count, now + self._wall_offset, outcome, error)  # type: ignore[arg-type]
        message.history = (*message.history, attempt)[-HISTORY_MAX:]

    def _notify(self, name: str) -> None:
        self._memory.notifier.notify(f"queue:{name}")


def _rank(message: StoredMessage) -> int:
    """Return one number to order by: higher priority first, then by sequence."""
    return message.sequence - (message.priority << 48)


def _sequence(rank: int) -> int:
    return rank & ((1 << 48) - 1)


def _next_in_session(subqueue: Subqueue, session: Session) -> int | None:
    """Return the sequence of the next message of *session*, if none that is to be tried again stands before it."""
    while session.ready:
        if _is_ready(subqueue, session.ready[0]):
            break
        heapq.heappop(session.ready)
    if not session.ready or any(sequence < session.ready[0] for sequence in session.retrying):
        return None
    return session.ready[0]


def _is_ready(subqueue: Subqueue, sequence: int) -> bool:
    message = subqueue.messages.get(sequence)
    return message is not None and message.state is MessageState.READY


def _list_if_free(subqueue: Subqueue, session: Session) -> None:
    """Enter *session* among those that can be accepted, if it can be."""
    sequence = None if session.token else _next_in_session(subqueue, session)
    if sequence is not None and session.listed_as != sequence:
        session.listed_as = sequence
        heapq.heappush(subqueue.free_sessions, (sequence, session.name))


def _next_free_session(subqueue: Subqueue) -> Session | None:
    """Return the session that can be accepted and has waited longest."""
    while subqueue.free_sessions:
        sequence, name = subqueue.free_sessions[0]
        session = subqueue.sessions.get(name)
        if session is not None and not session.token and _next_in_session(subqueue, session) == sequence:
            return session
        heapq.heappop(subqueue.free_sessions)
        if session is not None:
            session.listed_as = None if session.listed_as == sequence else session.listed_as
            _list_if_free(subqueue, session)
    return None


def _due_in(subqueue: Subqueue, now: float) -> float | None:
    # An alarm for what is settled by now would wake every idle consumer for nothing, once for each claim ever made.
    while subqueue.due and not _is_pending(subqueue, subqueue.due[0][2]):
        heapq.heappop(subqueue.due)
    return max(0.0, subqueue.due[0][0] - now) if subqueue.due else None


def _is_pending(subqueue: Subqueue, what: StoredMessage | Session | LockGroup) -> bool:
    """Tell whether time alone may still change something about *what*."""
    if isinstance(what, LockGroup):
        return any(message.token == what.token and message.state is MessageState.LOCKED for message in what.messages)
    if isinstance(what, Session):
        return what.token != 0
    is_here = subqueue.messages.get(what.sequence) is what
    return is_here and (what.state is MessageState.DELAYED or what.expires_at < NEVER)


def _is_selected_dead(message: StoredMessage, which: Selection) -> bool:
    assert message.death is not None
    return (
        message.sequence > which.after
        and (which.sequences is None or message.sequence in which.sequences)
        and (which.ids is None or message.id in which.ids)
        and (which.reason is None or message.death.reason == which.reason)
        and (which.dead_before is None or message.death.at < which.dead_before)
    )


def _is_selected_live(message: StoredMessage, which: LiveSelection) -> bool:
    session = message.session.name if message.session else None
    return which.wants(STATE_NAMES[message.state]) and which.fits(
        message.sequence, lambda: message.id, session, message.enqueued_at
    )


def _tried(message: StoredMessage) -> str:
    return f"delivered {message.delivery_count} times, and never completed"


def _expired(message: StoredMessage) -> str:
    return "not handled before its ttl had ended"


def _delivery(queue: str, message: StoredMessage, token: int | str, locked_until: float) -> Delivery:
    return Delivery(
        queue,
        message.sequence,
        token,
        message.id,
        message.body,
        message.headers,
        message.delivery_count,
        message.enqueued_at,
        locked_until,
        message.session.name if message.session else None,
        message.priority,
        message.reply_to,
        message.correlation_id,
        message.death,
    )


def _dead_message(queue: str, message: StoredMessage) -> DeadMessage:
    assert message.death is not None
    return DeadMessage(
        queue,
        message.sequence,
        message.id,
        message.body,
        message.headers,
        message.delivery_count,
        message.enqueued_at,
        message.session.name if message.session else None,
        message.priority,
        message.reply_to,
        message.correlation_id,
        message.death.reason,
        message.death.description,
        message.death.at,
        message.death.error,
        message.death.history,
    )
