"""The data of a queue: messages, sessions, remembered ids, and due times."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from tenure._queue.broker import (
    LiveSelection,
    QueueSettings,
    Selection,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import dead_letters_of
from tenure._queue.limits import Burst
from tenure._queue.message import (
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    Died,
    Headers,
    LiveMessage,
    State,
    dead_message_of,
    live_message_of,
)
from tenure._runtime.process_name import process_name

NEVER = math.inf

DIED_MAX = 1_000
"""The number of deaths kept for the next claim to report; older ones are dropped."""


class MessageState(IntEnum):
    """The state of a message; also the index of its count."""

    READY = 0
    DELAYED = 1
    LOCKED = 2
    DEFERRED = 3
    GONE = 4


READY, DELAYED, LOCKED, DEFERRED, GONE = MessageState
"""The same by themselves: on Python 3.11, ``MessageState.READY`` takes longer than a call."""

STATE_NAMES: dict[MessageState, State] = {
    READY: "ready",
    DELAYED: "delayed",
    LOCKED: "locked",
    DEFERRED: "deferred",
}


@dataclass(slots=True, eq=False)
class StoredMessage:
    """A message as it is stored. Its times are those of the clock, except ``enqueued_at``: wall-clock time."""

    sequence: int
    id: str
    body: bytes
    headers: Headers
    enqueued_at: float
    priority: int
    session: Session | None
    reply_to: str | None
    correlation_id: str | None
    state: MessageState = GONE
    visible_at: float = 0.0
    expires_at: float = NEVER
    locked_until: float = 0.0
    token: int = 0
    locked_since: float = 0.0
    delivery_count: int = 0
    is_deferred: bool = False
    history: tuple[Attempt, ...] = ()
    death: Death | None = None


@dataclass(slots=True, eq=False)
class Session:
    """A session: its lock, its state, its ready messages, and the retries that block the messages behind them."""

    name: str
    token: int = 0
    locked_until: float = 0.0
    locked_since: float = 0.0
    state: bytes | None = None
    ready: list[int] = field(default_factory=list)
    retrying: set[int] = field(default_factory=set)
    locked: dict[int, StoredMessage] = field(default_factory=dict)
    size: int = 0
    listed_as: int | None = None  # the sequence of its newest entry in ``free_sessions``


@dataclass(frozen=True, slots=True)
class LockGroup:
    """The messages of one claim, under one token."""

    token: int
    messages: list[StoredMessage]


class Subqueue:
    """The live messages of a queue, or its dead letters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead: bool = name.endswith(DEAD_SUFFIX)
        self.has_max_locked = False
        self.messages: dict[int, StoredMessage] = {}
        self.count: list[int] = [0] * len(MessageState)
        self.ready: list[int] = []  # heap of the ready messages without a session, see rank_of
        self.oldest: list[int] = []  # heap of all that became ready; some no longer are
        self.deferred: list[int] = []  # in order of sequence
        self.sessions: dict[str, Session] = {}
        # Heap of free sessions by their next message. Stale entries are skipped.
        self.free_sessions: list[tuple[int, str]] = []
        # Heap of (at, number, what): when a lock, a delay or an expiry ends. Stale entries are skipped.
        self.due: list[tuple[float, int, StoredMessage | Session | LockGroup]] = []
        self.numbers: itertools.count[int] = itertools.count()

    def next_in_session(self, session: Session) -> int | None:
        """Return the sequence of the next message of *session*, unless a retry blocks it."""
        while session.ready:
            if self.is_ready(session.ready[0]):
                break
            heapq.heappop(session.ready)
        if not session.ready or any(sequence < session.ready[0] for sequence in session.retrying):
            return None
        return session.ready[0]

    def has_ready(self) -> bool:
        """Return whether a message without a session is ready."""
        while self.ready and not self.is_ready(sequence_of(self.ready[0])):
            heapq.heappop(self.ready)
        return bool(self.ready)

    def is_ready(self, sequence: int) -> bool:
        """Return whether a message is ready."""
        message = self.messages.get(sequence)
        return message is not None and message.state is READY

    def list_if_free(self, session: Session) -> None:
        """Add *session* to ``free_sessions`` if it can be accepted."""
        sequence = None if session.token else self.next_in_session(session)
        if sequence is not None and session.listed_as != sequence:
            session.listed_as = sequence
            heapq.heappush(self.free_sessions, (sequence, session.name))

    def next_free_session(self) -> Session | None:
        """Return the free session that has waited longest."""
        while self.free_sessions:
            sequence, name = self.free_sessions[0]
            session = self.sessions.get(name)
            if session is not None and not session.token and self.next_in_session(session) == sequence:
                return session
            heapq.heappop(self.free_sessions)
            if session is not None:
                session.listed_as = None if session.listed_as == sequence else session.listed_as
                self.list_if_free(session)
        return None

    def due_in(self, now: float) -> float | None:
        """Return in how many seconds time alone changes something; None if it never does."""
        # An entry of a settled message would wake every idle consumer for nothing, once for each claim ever made.
        while self.due and not self.is_pending(self.due[0][2]):
            heapq.heappop(self.due)
        return max(0.0, self.due[0][0] - now) if self.due else None

    def is_pending(self, what: StoredMessage | Session | LockGroup) -> bool:
        """Return whether time alone may still change something about *what*."""
        if isinstance(what, LockGroup):
            return any(message.token == what.token and message.state is LOCKED for message in what.messages)
        if isinstance(what, Session):
            return what.token != 0
        is_here = self.messages.get(what.sequence) is what
        return is_here and (what.state is DELAYED or what.expires_at < NEVER)


class RememberedIds:
    """Ids that are remembered for a while: of messages sent, or handled."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []  # heap

    def note(self, name: str, until: float) -> None:
        """Remember *name* until then, or longer if it already is."""
        until = max(until, self._until.get(name, -NEVER))
        self._until[name] = until
        heapq.heappush(self._ends, (until, name))

    def knows(self, name: str, now: float) -> bool:
        """Return whether *name* is remembered *now*."""
        return self._until.get(name, -NEVER) > now

    def forget(self, now: float) -> None:
        """Forget the ids whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            until, name = heapq.heappop(self._ends)
            if self._until.get(name) == until:
                del self._until[name]


class StoredQueue:
    """A queue: its settings, live messages, dead letters and remembered ids."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.generation = object()  # tells it from one of the same name that was deleted
        self.settings: QueueSettings = QueueSettings()
        self.declared: set[str] = set()  # the names of the settings that were declared
        self.live: Subqueue = Subqueue(name)
        self.dead: Subqueue = Subqueue(dead_letters_of(name))
        self.sequence = 0
        self.sent: RememberedIds = RememberedIds()
        self.inbox: RememberedIds = RememberedIds()
        self.schedules: dict[str, str] = {}
        self.delivered: list[Burst] = []  # for the rate
        self.delivered_in: dict[str, list[Burst]] = {}  # by session, the one that was delivered last at the end
        self.idle_at: float = NEVER
        self.deaths: deque[Died] = deque(maxlen=DIED_MAX)  # by time, not yet reported by a claim


def rank_of(message: StoredMessage) -> int:
    """Return one number to order by: higher priority first, then by sequence."""
    return message.sequence - (message.priority << 48)


def sequence_of(rank: int) -> int:
    """Return the sequence of the message with this *rank*."""
    return rank & ((1 << 48) - 1)


def is_selected_dead(message: StoredMessage, which: Selection) -> bool:
    """Return whether *which* selects this dead letter."""
    assert message.death is not None
    return which.fits(message.sequence, message.id, message.death)


def is_selected_live(message: StoredMessage, which: LiveSelection) -> bool:
    """Return whether *which* selects this live message."""
    session = message.session.name if message.session else None
    return which.wants(STATE_NAMES[message.state]) and which.fits(
        message.sequence, lambda: message.id, session, message.enqueued_at
    )


def delivery_of(queue: str, message: StoredMessage, token: int | str, locked_until: float) -> Delivery:
    """Return *message* as a claim delivers it."""
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


def live_message(queue: str, message: StoredMessage, wall_offset: float) -> LiveMessage:
    """Return *message* as ``peek`` shows it."""
    state, session = message.state, message.session
    one = delivery_of(queue, message, "", 0.0)
    if state is not LOCKED:
        due_at = message.visible_at + wall_offset if state is DELAYED else None
        return live_message_of(one, STATE_NAMES[state], due_at=due_at)
    since = session.locked_since if session and session.token == message.token else message.locked_since
    return live_message_of(
        one,
        "locked",
        locked_until=message.locked_until + wall_offset,
        locked_by=process_name(),
        locked_since=since + wall_offset,
    )


def dead_message(queue: str, message: StoredMessage) -> DeadMessage:
    """Return *message* as ``peek_dead`` shows it."""
    assert message.death is not None
    return dead_message_of(queue, delivery_of(queue, message, "", 0.0), message.death)
