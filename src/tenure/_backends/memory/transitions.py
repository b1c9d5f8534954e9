"""The transitions of messages between states: by sending, claiming, verdicts and time."""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, insort
from collections.abc import Sequence

from tenure._backends.memory.client import Client, Memory
from tenure._backends.memory.messages import (
    DEFERRED,
    DELAYED,
    GONE,
    LOCKED,
    NEVER,
    READY,
    LockGroup,
    MessageState,
    Session,
    StoredMessage,
    StoredQueue,
    Subqueue,
    delivery_of,
    rank_of,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import LOCK_ENDED, TIME_IS_OVER, Cause, EndedDelivery, Ending, Outcome, outcome_of
from tenure._queue.generations import Generations
from tenure._queue.limits import UNLIMITED, Allowance, allowance_of, noted
from tenure._queue.message import HISTORY_MAX, Attempt, Death, Delivery, Died, SessionLock, newest_error
from tenure._queue.outgoing import Outgoing
from tenure._runtime.clock import Clock, SystemClock


class Transitions(Client):
    """What verdicts and time do to messages. The caller holds the memory's lock."""

    def __init__(self, clock: Clock | None = None, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self.generations = Generations()
        self._clock = clock or SystemClock()
        if self._memory.epoch is None:
            self._memory.epoch = time.time() - self._clock.now()
        self._wall_offset = self._memory.epoch  # added to a time of the clock, it gives wall-clock time

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

    def _insert_redriven(self, queue: StoredQueue, message: StoredMessage, now: float) -> None:
        """Insert a dead letter of another queue; its id is not deduplicated."""
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

    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        if not messages:
            return ()
        if not token:
            token = self._new_token()
            self._add_due(subqueue, until, LockGroup(token, messages))
        name, wall_until, now = subqueue.name, until + self._wall_offset, self._clock.now()
        deliveries = []
        for message in messages:
            if message.state is DEFERRED:
                del subqueue.deferred[bisect_left(subqueue.deferred, message.sequence)]
            subqueue.count[message.state] -= 1
            message.state = LOCKED
            message.token = token
            message.locked_until = until
            message.locked_since = now
            if message.death is None:
                message.delivery_count += 1
            deliveries.append(delivery_of(name, message, token, wall_until))
        subqueue.count[LOCKED] += len(messages)
        return deliveries

    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        """Do with *message*, which was unlocked, what becomes of it at the end of a delivery, and return that."""
        delivered = EndedDelivery(
            message.delivery_count, message.expires_at <= now, message.is_deferred, message.death is not None
        )
        most = math.inf if subqueue.is_dead else self._queue(subqueue.name).settings.max_deliveries
        outcome = outcome_of(ending, delivered, most, now + self._wall_offset)
        message.delivery_count = outcome.deliveries
        if outcome.attempt is not None:
            self._record_attempt(message, outcome.attempt)
        if outcome.cause is not None:
            self._dead_letter(subqueue, message, outcome.cause, now)
        elif outcome.place == "deferred":
            message.is_deferred = True
            self._set_state(subqueue, message, DEFERRED)
        else:
            self._schedule(subqueue, message, now + outcome.delay, now)
        return outcome

    def _unlock_session(self, subqueue: Subqueue, session: Session) -> None:
        session.token = 0
        subqueue.list_if_free(session)
        if not session.size and session.state is None:
            subqueue.sessions.pop(session.name, None)  # nothing of it is left to keep

    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        """Return how many messages the limits of the queue allow; those of dead letters have none."""
        if subqueue.is_dead:
            return UNLIMITED
        stored = self._queue(subqueue.name)
        return allowance_of(stored.settings, subqueue.count[LOCKED], stored.delivered, now)

    def _note_delivered(self, subqueue: Subqueue, count: int, now: float, session: str | None = None) -> None:
        """Note for the rates of the queue that *count* messages were delivered."""
        if subqueue.is_dead or not count:
            return
        stored = self._queue(subqueue.name)
        if isinstance(stored.settings.rate, tuple):
            stored.delivered = noted(stored.settings.rate, stored.delivered, now, count)
        rate, logs = stored.settings.session_rate, stored.delivered_in
        if session is None or not isinstance(rate, tuple):
            return
        logs[session] = noted(rate, logs.pop(session, []), now, count)  # to the end
        while logs and not noted(rate, logs[oldest := next(iter(logs))], now, 0):
            del logs[oldest]

    def _hold_up(self, subqueue: Subqueue, session: Session, seconds: float, now: float) -> None:
        """Delay the next message of *session*, so that it is not accepted before its rate allows a message."""
        sequence = subqueue.next_in_session(session)
        if sequence is not None:
            message = subqueue.messages[sequence]
            heapq.heappop(session.ready)
            self._schedule(subqueue, message, now + seconds, now)
            session.retrying.add(sequence)

    def _queue(self, name: str) -> StoredQueue:
        queue = self._memory.queues.get(name)
        if queue is None:
            queue = self._memory.queues[name] = StoredQueue(name)
            queue.sequence = self._memory.sequence  # one of this name may have been deleted
        return queue

    def _note_generation(self, name: str) -> None:
        if self.generations.followed:
            home = name.removesuffix(DEAD_SUFFIX)
            stored = self._memory.queues.get(home)
            self.generations.note(home, None if stored is None else stored.generation)

    def _expire_ids(self, name: str, now: float) -> None:
        """Forget expired ids, also in queues to which nothing is sent any more."""
        stored = self._memory.queues[name.removesuffix(DEAD_SUFFIX)]
        stored.sent.forget(now)
        stored.inbox.forget(now)

    def _subqueue(self, name: str, now: float) -> Subqueue | None:
        """Apply what is due, and return the live messages or the dead letters; None for an unused queue."""
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
        if subqueue is None or message is None or message.state is not LOCKED or message.token != delivery.token:
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
        if message.state is DEFERRED:
            del subqueue.deferred[bisect_left(subqueue.deferred, message.sequence)]
        if to is DEFERRED:
            insort(subqueue.deferred, message.sequence)
        message.state = to
        if message.session is not None and message.sequence in message.session.retrying:
            message.session.retrying.remove(message.sequence)
            subqueue.list_if_free(message.session)
        if to is GONE:
            del subqueue.messages[message.sequence]
            if message.session is not None and not subqueue.is_dead:
                message.session.size -= 1

    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        """Let *message* be claimable from *visible_at* on, unless it has expired."""
        message.visible_at = visible_at
        if message.expires_at <= now:
            self._dead_letter(subqueue, message, TIME_IS_OVER, now)
        elif visible_at > now:
            self._set_state(subqueue, message, DELAYED)
            self._add_due(subqueue, visible_at, message)
            if message.session is not None and message.delivery_count:
                message.session.retrying.add(message.sequence)
        else:
            self._set_state(subqueue, message, READY)
            if len(subqueue.oldest) > 2 * len(
                subqueue.messages
            ):  # most are stale: stats() has not been called for long
                subqueue.oldest = sorted(one.sequence for one in subqueue.messages.values() if one.state is READY)
            else:
                heapq.heappush(subqueue.oldest, message.sequence)
            if message.session is not None and message.death is None:
                heapq.heappush(message.session.ready, message.sequence)
                subqueue.list_if_free(message.session)
            else:
                heapq.heappush(subqueue.ready, rank_of(message))

    def _take_deaths(self, subqueue: Subqueue) -> Sequence[Died]:
        """Return the deaths by time since the last call."""
        deaths = self._memory.queues[subqueue.name.removesuffix(DEAD_SUFFIX)].deaths
        if subqueue.is_dead or not deaths:
            return ()
        taken = tuple(deaths)
        deaths.clear()
        return taken

    def _record_death(self, subqueue: Subqueue, message: StoredMessage) -> None:
        """If *message* is dead, record it for the next claim to report: time did it, not a verdict."""
        if message.death is not None and not subqueue.is_dead:
            stored = self._memory.queues[subqueue.name]
            stored.deaths.append(Died(message.sequence, message.id, message.delivery_count, message.death.reason))

    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        self._set_state(subqueue, message, GONE)
        dead = self._queue(subqueue.name.removesuffix(DEAD_SUFFIX)).dead
        at, error = now + self._wall_offset, newest_error(message.history)
        message.death = Death(cause.reason, cause.description, at, error, message.history)
        message.is_deferred, message.expires_at = False, NEVER
        dead.messages[message.sequence] = message
        self._schedule(dead, message, now, now)
        self._memory.notifier.notify(f"queue:{dead.name}")

    def _add_due(self, subqueue: Subqueue, at: float, what: StoredMessage | Session | LockGroup) -> None:
        if len(subqueue.due) > 3 * (len(subqueue.messages) + len(subqueue.sessions)) + 64:  # most are settled by now
            subqueue.due = [due for due in subqueue.due if subqueue.is_pending(due[2])]
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
            return  # it is gone, or dead-lettered
        elif what.state in (READY, DELAYED) and what.expires_at <= now:
            self._dead_letter(subqueue, what, TIME_IS_OVER, now)
            self._record_death(subqueue, what)
        elif what.state is DELAYED and what.visible_at <= now:
            self._schedule(subqueue, what, what.visible_at, now)

    def _group_expired(self, subqueue: Subqueue, group: LockGroup, now: float) -> None:
        """End the locks of one claim that have expired; wait for those that were renewed."""
        held = [message for message in group.messages if message.token == group.token and message.state is LOCKED]
        renewed = [message for message in held if message.locked_until > now]
        for message in held:
            if message.locked_until <= now:
                self._lock_expired(subqueue, message, now)
        if renewed:
            self._add_due(subqueue, min(message.locked_until for message in renewed), LockGroup(group.token, renewed))

    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        self._unlock(message)
        self._end(subqueue, message, LOCK_ENDED, now)
        self._record_death(subqueue, message)

    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        message.history = (*message.history, attempt)[-HISTORY_MAX:]

    def _notify(self, name: str) -> None:
        self._memory.notifier.notify(f"queue:{name}")
