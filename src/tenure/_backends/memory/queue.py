"""Queues in memory. The conformance suite certifies them, so tests may use them in place of a real broker."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from tenure._backends.memory.messages import (
    DEFERRED,
    DELAYED,
    GONE,
    LOCKED,
    NEVER,
    READY,
    Session,
    StoredMessage,
    Subqueue,
    dead_message,
    delivery_of,
    is_selected_dead,
    is_selected_live,
    live_message,
    sequence_of,
)
from tenure._backends.memory.transitions import Transitions
from tenure._queue.broker import (
    CLAIM_BYTES,
    LIMITS,
    Advanced,
    Claim,
    LiveSelection,
    NoSession,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Schedules,
    Selection,
    undeclared,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import ID_MARK, dead_letters_of
from tenure._queue.limits import allowed_by, both, delay_by, sooner_of
from tenure._queue.message import (
    NO_DEFERRED_DEAD_LETTERS,
    STATES,
    DeadMessage,
    Delivery,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
    Defer,
    Deleted,
    GiveBack,
    Lapsed,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
)
from tenure.errors import ConfigError

QUEUE_TRAITS = QueueTraits(
    lock_min=0.01, lock_max=86_400.0, body_max=2**30, names_dead=True, survives_restart=False, surveys=True
)

PURGED_AT_ONCE = 500
"""How many live messages are purged in one step."""


class MemoryBroker(Transitions):
    """A ``Broker`` in memory.

    Args:
        clock: Judges expiry; a test brings its own.
        memory: Holds the messages; several brokers on one memory stand for several processes.
    """

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        with self._memory.lock:
            stored = self._queue(queue)
            if only_undeclared:
                changes = undeclared(changes, stored.declared)
            settings = stored.settings = replace(stored.settings, **changes)
            stored.live.has_max_locked = settings.max_locked < math.inf
            stored.declared.update(changes)
            self._note_generation(queue)
        if not LIMITS.isdisjoint(changes):
            self._notify(queue)
        return settings

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of *queue*."""
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
        """Insert *messages*; return their ids."""
        with self._memory.lock:
            ids = self._send(queue, messages, self._clock.now())
            self._note_generation(queue)
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

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        with self._memory.lock:
            now = self._clock.now()
            self._note_generation(queue)
            subqueue = self._subqueue(queue, now)
            if subqueue is None:
                return Claim(())
            self._expire_ids(queue, now)
            allowed = self._allowance(subqueue, now)
            most = min(limit, allowed.most)
            messages: list[StoredMessage] = []
            size = 0
            while subqueue.ready and len(messages) < most and size < CLAIM_BYTES:
                message = subqueue.messages.get(sequence_of(heapq.heappop(subqueue.ready)))
                # One that was ready, dead and redriven is there twice, side by side.
                if message is not None and message.state is READY and (not messages or message is not messages[-1]):
                    messages.append(message)
                    size += len(message.body)
            deliveries = self._lock(subqueue, messages, now + lock)
            self._note_delivered(subqueue, len(messages), now)
            is_held_back = len(messages) == most < limit and subqueue.has_ready()
            due_in = self._due_in(subqueue, now, limit - len(messages), size, is_held_back=is_held_back)
            died = self._take_deaths(subqueue)
            return Claim(deliveries, due_in, died, 0.0, self._is_limited(subqueue), is_held_back)

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        with self._memory.lock:
            now = self._clock.now()
            self._note_generation(queue)
            subqueue = self._subqueue(queue, now)
            if subqueue is None:
                return Claim(())
            found = (subqueue.messages.get(sequence) for sequence in dict.fromkeys(sequences))
            messages = [message for message in found if message is not None and message.state is DEFERRED]
            most = int(min(len(messages), self._allowance(subqueue, now).most))
            self._note_delivered(subqueue, most, now)
            deliveries = self._lock(subqueue, messages[:most], now + lock)
            is_limited = self._is_limited(subqueue)
            return Claim(deliveries, is_limited=is_limited, is_held_back=most < len(messages))

    # --- renewing and settling ---

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
            until = session.locked_until = max(session.locked_until, until)  # a late renewal must not shorten it
            for message in session.locked.values():
                message.locked_until = until
            return until
        found = self._locked(one, now)
        if found is None:
            return None
        subqueue, message = found
        if message.session is None or subqueue.is_dead or message.is_deferred:
            message.locked_until = max(message.locked_until, until)
        return message.locked_until  # the lock of its session, which is renewed on its own

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Apply many verdicts."""
        answers: list[Settled | Lapsed] = []
        notified: set[str] = set()
        with self._memory.lock:
            now = self._clock.now()
            for delivery, verdict in settlements:
                if type(verdict) is Defer and delivery.queue.endswith(DEAD_SUFFIX):
                    raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
            for delivery, verdict in settlements:
                found = self._locked(delivery, now)
                if found is None:
                    answers.append(LAPSED)
                    continue
                subqueue, message = found
                self._unlock(message)
                if subqueue.has_max_locked:
                    notified.add(subqueue.name)  # a place is free
                if isinstance(verdict, Complete):
                    self._set_state(subqueue, message, GONE)
                    notified.update(self._complete(subqueue, message, verdict, now))
                    answers.append(SETTLED)
                    continue
                if isinstance(verdict, (Abandon, GiveBack)):
                    notified.add(subqueue.name)
                answers.append(self._end(subqueue, message, verdict, now).answer)
        for name in sorted(notified):
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

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        with self._memory.lock:
            now = self._clock.now()
            self._note_generation(queue)
            subqueue = self._subqueue(queue, now)
            found: Session | None
            if session is not None:
                subqueue = subqueue or self._queue(queue).live
                found = subqueue.sessions.setdefault(session, Session(session))
            elif subqueue is not None:
                found = subqueue.next_free_session()
                if found is not None and not (allowed := self._allowance(subqueue, now)).most:
                    due_in = sooner_of(subqueue.due_in(now), allowed.free_in)
                    return NoSession(due_in, self._take_deaths(subqueue), is_held_back=True)
            else:
                found = None
            if found is None or found.token:
                return NoSession(subqueue.due_in(now), self._take_deaths(subqueue)) if subqueue else NoSession()
            assert subqueue is not None
            found.token = self._new_token()
            found.locked_until, found.locked_since = now + lock, now
            self._add_due(subqueue, found.locked_until, found)
            return SessionLock(queue, found.name, found.token, found.locked_until + self._wall_offset, found.state)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._memory.lock:
            now = self._clock.now()
            session = self._session(held, now)
            if session is None:
                return LAPSED
            stored = self._queue(held.queue)
            subqueue = stored.live
            here = allowed_by(stored.settings.session_rate, stored.delivered_in.get(session.name, ()), now)
            most = min(limit, both(self._allowance(subqueue, now), here).most)
            messages: list[StoredMessage] = []
            size = 0
            while (
                len(messages) < most
                and size < CLAIM_BYTES
                and (sequence := subqueue.next_in_session(session)) is not None
            ):
                while session.ready and session.ready[0] == sequence:  # twice, as above
                    heapq.heappop(session.ready)
                messages.append(subqueue.messages[sequence])
                size += len(messages[-1].body)
            session.locked.update((message.sequence, message) for message in messages)
            deliveries = self._lock(subqueue, messages, session.locked_until, session.token)
            self._note_delivered(subqueue, len(messages), now, session.name)
            here = allowed_by(stored.settings.session_rate, stored.delivered_in.get(session.name, ()), now)
            if here.free_in is not None:
                self._hold_up(subqueue, session, delay_by(here), now)
            is_held_up = here.free_in is not None and bool(session.retrying)
            is_held_back = len(messages) == most < limit and (
                is_held_up or subqueue.next_in_session(session) is not None
            )
            due_in = self._due_in(subqueue, now, limit - len(messages), size, is_held_back=is_held_back)
            held_up_for = delay_by(here) if is_held_up else None
            if is_held_back and is_held_up:
                due_in = held_up_for
            died = self._take_deaths(subqueue)
            return Claim(deliveries, due_in, died, 0.0, stored.settings.is_limited, is_held_back, held_up_for)

    def _due_in(self, subqueue: Subqueue, now: float, missing: int, size: int, *, is_held_back: bool) -> float | None:
        """Return when to claim again after a claim that brought *size* bytes, and so many messages too few."""
        if is_held_back:
            return sooner_of(subqueue.due_in(now), self._allowance(subqueue, now).free_in)
        if not missing:
            return None
        return 0.0 if size >= CLAIM_BYTES else subqueue.due_in(now)

    def _is_limited(self, subqueue: Subqueue) -> bool:
        return not subqueue.is_dead and self._queue(subqueue.name).settings.is_limited

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
                self._end(subqueue, message, GIVE_BACK, now)
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

    # --- statistics and live messages ---

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages."""
        now = self._clock.now()
        with self._memory.lock:
            counts = [self._count(queue, now) for queue in queues]
        return [count.ready + count.locked + count.delayed > 0 for count in counts]

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
            if message is not None and message.state is READY:
                age = max(0.0, now + self._wall_offset - message.enqueued_at)
                break
            heapq.heappop(live.oldest)
        count = live.count
        return Stats(
            count[READY],
            count[LOCKED],
            count[DELAYED],
            count[DEFERRED],
            len(self._memory.queues[queue].dead.messages),
            age,
            self._memory.queues[queue].settings.paused,
        )

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        with self._memory.lock:
            return [
                live_message(queue, message, self._wall_offset) for message in self._select_live(queue, which, limit)
            ]

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
        self._notify(queue)  # a removed retry may have blocked others of its session
        return count

    def _select_live(self, name: str, which: LiveSelection, limit: int | None) -> list[StoredMessage]:
        subqueue = self._subqueue(name, self._clock.now())
        if subqueue is None:
            return []
        messages = sorted(subqueue.messages.values(), key=attrgetter("sequence"))
        return list(itertools.islice((message for message in messages if is_selected_live(message, which)), limit))

    def _remove(self, name: str, which: LiveSelection, messages: Sequence[StoredMessage]) -> int:
        """Remove the *messages* that are still selected; return how many."""
        subqueue = self._subqueue(name, self._clock.now())
        if subqueue is None:
            return 0
        here = [
            message
            for message in messages
            if subqueue.messages.get(message.sequence) is message and is_selected_live(message, which)
        ]
        for message in here:
            self._set_state(subqueue, message, GONE)
            if message.session is not None and not message.session.token:
                self._unlock_session(subqueue, message.session)
        if len(subqueue.ready) > 2 * len(subqueue.messages):  # else the next claim would skip every removed one
            subqueue.ready = [rank for rank in subqueue.ready if subqueue.is_ready(sequence_of(rank))]
            heapq.heapify(subqueue.ready)
        return len(here)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        with self._memory.lock:
            subqueue = self._subqueue(queue, self._clock.now())
            if subqueue is None:
                return []
            first = bisect_right(subqueue.deferred, after)
            found = subqueue.deferred[first : first + limit]
            return [delivery_of(queue, subqueue.messages[sequence], "", 0.0) for sequence in found]

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        with self._memory.lock:
            return [dead_message(queue, message) for message in self._select_dead(queue, which, limit, locked=True)]

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
                self._set_state(stored.dead, message, GONE)
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
                self._set_state(self._memory.queues[queue].dead, message, GONE)
            return len(messages)

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Return, for each of *ids*, whether the inbox remembers it."""
        with self._memory.lock:
            now = self._clock.now()
            known = self._memory.queues.get(queue)
            return [known is not None and known.inbox.knows(one, now) for one in ids]

    # --- schedules ---

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        with self._memory.lock:
            known = self._memory.queues.get(queue)
            return Schedules(dict(known.schedules) if known else {}, self._clock.now() + self._wall_offset)

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        """Keep *record* in place of *expected*, and send *messages*."""
        with self._memory.lock:
            now = self._clock.now()
            wall = now + self._wall_offset
            schedules = self._queue(queue).schedules
            if schedules.get(schedule) != expected or wall < not_before:
                return Advanced(False, schedules.get(schedule), wall)
            if record is not None:
                schedules[schedule] = record
            else:
                schedules.pop(schedule, None)
            self._send(queue, messages, now)
            self._note_generation(queue)
        if messages:
            self._notify(queue)
        return Advanced(True, record, wall)

    # --- deletion ---

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
        """Let ``idle`` list *queue* in *seconds*."""
        with self._memory.lock:
            self._queue(queue).idle_at = self._clock.now() + seconds

    async def idle(self) -> Sequence[str]:
        """List the queues that have been idle for their time."""
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
            if is_selected_dead(message, which) and (locked or message.state is not LOCKED)
        )
        return list(itertools.islice(found, limit))
