"""The entities of a look-alike of Service Bus: queues, topics, subscriptions and their messages. No network, no clock.

Every method takes *now*, in seconds. Changes are noted in a ``Ledger``, which is written before an answer is sent: what
was answered survives ``kill -9``.
"""

from __future__ import annotations

import heapq
import itertools
import pickle
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

DEAD = "/$deadletterqueue"
SUBSCRIPTIONS = "/subscriptions/"
PAGE = 100
MAX_DELIVERIES = "MaxDeliveryCountExceeded"
EXPIRED = "TTLExpiredException"

State = Literal["active", "deferred", "scheduled"]


class Refusal(Exception):
    """What the service answers instead: an AMQP condition, or a status of its HTTP interface."""

    def __init__(self, condition: str, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.condition = condition
        self.text = text
        self.status = status


def not_found(path: str) -> Refusal:
    return Refusal("amqp:not-found", f"The messaging entity '{path}' could not be found.", 404)


def lock_lost() -> Refusal:
    text = "The lock supplied is invalid. Either the lock expired, or the message has already been removed."
    return Refusal("com.microsoft:message-lock-lost", text, 410)


def session_lost() -> Refusal:
    text = "The session lock has expired on the session. Accept a new session."
    return Refusal("com.microsoft:session-lock-lost", text, 410)


@dataclass
class Settings:
    """What is configured of a queue or subscription; times in seconds."""

    lock_duration: float = 60.0
    max_delivery_count: int = 10
    requires_session: bool = False
    requires_duplicate_detection: bool = False
    duplicate_window: float = 600.0
    default_ttl: float | None = None
    dead_letters_expired: bool = False
    user_metadata: str = ""
    auto_delete_on_idle: float | None = None
    status: str = "Active"


class Content(NamedTuple):
    """A message as it was sent: the sections that nobody but its sender writes, and what the service reads in them."""

    properties: bytes
    application: bytes
    """The section of application properties, encoded; empty if there is none."""
    rest: bytes
    """The body and the footer."""
    annotations: Mapping[str, Any]
    message_id: Any
    session: str | None
    ttl: float | None
    priority: int | None
    durable: bool
    due: float | None
    """When it is to be enqueued, if it is scheduled."""


@dataclass
class Item:
    """A message in an entity."""

    sequence: int
    content: Content
    enqueued: float
    count: int = 0
    state: State = "active"
    expires: float | None = None
    token: uuid.UUID | None = None
    until: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)
    """Application properties set by verdicts."""


@dataclass
class Session:
    """A session: its holder's link, and until when; and its state."""

    holder: str | None = None
    until: float = 0.0
    state: bytes | None = None


class Ledger:
    """Keeps entities and messages on disk. Written without fsync: it outlives the process, not the machine."""

    def __init__(self, path: Path | None) -> None:
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.execute("CREATE TABLE IF NOT EXISTS row (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")
        self._changed: dict[str, Any] = {}

    def set(self, key: str, value: object) -> None:
        self._changed[key] = value

    def drop(self, key: str) -> None:
        self._changed[key] = None

    def drop_all(self, prefix: str) -> None:
        self.write()
        self._db.execute("DELETE FROM row WHERE key >= ? AND key < ?", (prefix, prefix + "\U0010ffff"))

    def rows(self, prefix: str) -> Iterator[tuple[str, Any]]:
        query = "SELECT key, value FROM row WHERE key >= ? AND key < ? ORDER BY key"
        for key, value in self._db.execute(query, (prefix, prefix + "\U0010ffff")).fetchall():
            yield key[len(prefix) :], pickle.loads(value)

    def write(self) -> None:
        if not self._changed:
            return
        self._db.execute("BEGIN")
        for key, value in self._changed.items():
            if value is None:
                self._db.execute("DELETE FROM row WHERE key = ?", (key,))
            else:
                self._db.execute("INSERT OR REPLACE INTO row VALUES (?, ?)", (key, pickle.dumps(value)))
        self._db.execute("COMMIT")
        self._changed.clear()


class Entity:
    """A queue, a subscription, or the dead letters of one."""

    def __init__(self, path: str, settings: Settings, ledger: Ledger, dead: Entity | None) -> None:
        self.path = path
        self.settings = settings
        self.dead = dead
        """Where its dead letters go; None for dead letters."""
        self._ledger = ledger
        self._numbers = itertools.count(1)
        self.items: dict[int, Item] = {}
        self.sessions: dict[str, Session] = {}
        self._ready: dict[str | None, list[int]] = {}  # heaps of sequences, by session
        self._locked: dict[uuid.UUID, int] = {}
        self._times: list[tuple[float, int]] = []  # when something of a message is due
        self._ids: dict[Any, float] = {}  # until when an id counts as sent
        self._restore()

    def _restore(self) -> None:
        highest = 0
        for key, item in self._ledger.rows(f"m {self.path} "):
            self.items[int(key)] = item
            highest = max(highest, int(key))
            self._index(item)
        for key, session in self._ledger.rows(f"s {self.path} "):
            self.sessions[key] = replace(session, holder=None)  # its link is gone
        for _, (id_, until) in self._ledger.rows(f"d {self.path} "):
            self._ids[id_] = until
        for _, number in self._ledger.rows(f"n {self.path} "):
            highest = max(highest, number)
        self._numbers = itertools.count(highest + 1)

    # --- time ---

    def tick(self, now: float) -> bool:
        """Let locks, delays and lives end that are over by *now*; return whether anything did."""
        changed = False
        while self._times and self._times[0][0] <= now:
            _, sequence = heapq.heappop(self._times)
            item = self.items.get(sequence)
            if item is not None:
                changed |= self._due(item, now)
        for session in self.sessions.values():
            if session.holder is not None and session.until <= now:
                self._end_session(session, now)
                changed = True
        return changed

    def _due(self, item: Item, now: float) -> bool:
        if item.state == "scheduled" and item.content.due is not None and item.content.due <= now:
            self._remove(item)
            self._enqueue(item.content, item.content.due, item.changes)
            return True
        if item.token is not None and self._session_of(item) is None and item.until <= now:
            self._unlock(item, now, counts=True)
            return True
        if item.token is None and item.expires is not None and item.expires <= now and item.state == "active":
            self._expire(item)
            return True
        return False

    def _expire(self, item: Item) -> None:
        self._remove(item)
        if self.dead is not None and self.settings.dead_letters_expired:
            self.dead.bury(item, EXPIRED, "The message expired and was dead lettered.")

    def next_due(self) -> float | None:
        ends = [one.until for one in self.sessions.values() if one.holder is not None]
        times = [self._times[0][0]] if self._times else []
        return min(ends + times, default=None)

    # --- sending ---

    def send(self, content: Content, now: float) -> int | None:
        """Keep a message; return its sequence, or None if it is a duplicate."""
        if self.settings.status in ("Disabled", "SendDisabled"):
            raise Refusal("amqp:not-allowed", f"The messaging entity '{self.path}' is disabled.", 403)
        if self.settings.requires_session and content.session is None:
            raise Refusal("amqp:not-allowed", "The SessionId was not set on a message, and it cannot be sent.")
        if self.settings.requires_duplicate_detection and content.message_id is not None:
            if self._ids.get(content.message_id, 0.0) > now:
                return None
            until = now + self.settings.duplicate_window
            self._ids[content.message_id] = until
            self._ledger.set(f"d {self.path} {content.message_id!r}", (content.message_id, until))
            if len(self._ids) % 1_000 == 0:
                self._forget_ids(now)
        if content.due is not None and content.due > now:
            item = Item(next(self._numbers), content, now, state="scheduled")
            self._add(item)
            return item.sequence
        return self._enqueue(content, now, {})

    def _forget_ids(self, now: float) -> None:
        for id_, until in list(self._ids.items()):
            if until <= now:
                del self._ids[id_]
                self._ledger.drop(f"d {self.path} {id_!r}")

    def _enqueue(self, content: Content, at: float, changes: dict[str, Any]) -> int:
        item = Item(next(self._numbers), content, at, changes=changes)
        lives = [one for one in (content.ttl, self.settings.default_ttl) if one is not None]
        if lives and self.dead is not None:
            item.expires = at + min(lives)
        self._add(item)
        return item.sequence

    def bury(self, item: Item, reason: str | None, text: str | None) -> None:
        """Take a message as a dead letter. It keeps its sequence, unless that is taken."""
        named = {"DeadLetterReason": reason, "DeadLetterErrorDescription": text}
        changes = {**item.changes, **{name: value for name, value in named.items() if value is not None}}
        number = item.sequence if item.sequence not in self.items else next(self._numbers)
        self._add(Item(number, item.content, item.enqueued, item.count, changes=changes))

    def cancel(self, sequences: Iterable[int]) -> None:
        found = [self.items.get(sequence) for sequence in sequences]
        if any(item is None or item.state != "scheduled" for item in found):
            raise Refusal("com.microsoft:message-not-found", "The scheduled message was not found.", 404)
        for item in found:
            assert item is not None
            self._remove(item)

    # --- receiving ---

    def take(self, session: str | None, now: float, *, locks: bool = True) -> Item | None:
        """Lock the next message, of *session* if this is an entity with sessions; None if none is ready."""
        self.tick(now)
        if self.settings.status in ("Disabled", "ReceiveDisabled"):
            return None
        heap = self._ready.get(session if self.settings.requires_session else None, [])
        while heap:
            item = self.items.get(heapq.heappop(heap))
            if item is None or item.state != "active" or item.token is not None:
                continue
            if not locks:
                self._remove(item)
            else:
                self._lock(item, now)
            return item
        return None

    def take_deferred(self, sequences: Iterable[int], session: str | None, now: float) -> list[Item]:
        self.tick(now)
        found = []
        for sequence in sequences:
            item = self.items.get(sequence)
            if item is None or item.state != "deferred" or (item.token is not None and item.until > now):
                text = f"Failed to lock one or more specified messages: {sequence} was not found."
                raise Refusal("com.microsoft:message-not-found", text, 404)
            if self.settings.requires_session and item.content.session != session:
                raise Refusal("com.microsoft:session-lock-lost", "The message belongs to another session.", 410)
            found.append(item)
        for item in found:
            self._lock(item, now)
        return found

    def peek(self, start: int, count: int, now: float, session: str | None = None) -> list[Item]:
        self.tick(now)
        wanted = (one for one in self.items.values() if one.sequence >= start)
        return heapq.nsmallest(
            count, (one for one in wanted if session in (None, one.content.session)), key=lambda one: one.sequence
        )

    def is_empty(self, session: str | None) -> bool:
        return not any(
            (one := self.items.get(sequence)) is not None and one.token is None and one.state == "active"
            for sequence in self._ready.get(session if self.settings.requires_session else None, [])
        )

    # --- under a lock ---

    def held(self, token: uuid.UUID, now: float) -> Item:
        """Return the message that is locked under *token*."""
        self.tick(now)
        sequence = self._locked.get(token)
        if sequence is None:
            raise session_lost() if self.settings.requires_session else lock_lost()
        item = self.items[sequence]
        session = self._session_of(item)
        if session is not None and (session.holder is None or session.until <= now):
            raise session_lost()
        return item

    def renew(self, tokens: Iterable[uuid.UUID], now: float) -> list[float]:
        items = [self.held(token, now) for token in tokens]
        for item in items:
            item.until = now + self.settings.lock_duration
            self._note_time(item.until, item)
            self._save(item)
        return [item.until for item in items]

    def complete(self, token: uuid.UUID, now: float) -> None:
        self._remove(self.held(token, now))

    def put_back(self, token: uuid.UUID, now: float, *, counts: bool, changes: Mapping[str, Any] | None = None) -> None:
        """Unlock a message: abandoned, which counts, or released, which doesn't."""
        item = self.held(token, now)
        item.changes.update(changes or {})
        self._unlock(item, now, counts=counts)

    def defer(self, token: uuid.UUID, now: float, changes: Mapping[str, Any] | None = None) -> None:
        item = self.held(token, now)
        item.changes.update(changes or {})
        item.state = "deferred"
        self._unlock(item, now, counts=True)

    def dead_letter(self, token: uuid.UUID, now: float, info: Mapping[str, Any]) -> None:
        item = self.held(token, now)
        if self.dead is None:
            raise Refusal("amqp:not-allowed", "A message in a dead letter queue can't be dead lettered.")
        item.changes.update(info)
        self._remove(item)
        self.dead.bury(item, None, None)

    # --- sessions ---

    def accept(self, name: str | None, holder: str, now: float) -> tuple[str, Session] | None:
        """Lock a session for a link: the named one, or the free one whose message is the oldest; None if none is."""
        self.tick(now)
        if not self.settings.requires_session:
            text = f"A sessionful message receiver cannot be created on '{self.path}': it does not require sessions."
            raise Refusal("amqp:not-allowed", text)
        if name is None:
            free = []
            for session, heap in self._ready.items():
                if session is not None and self._is_free(session) and not self.is_empty(session):
                    free.append((min(heap), session))
            if not free:
                return None
            name = min(free)[1]
        elif not self._is_free(name):
            text = f"The requested session '{name}' cannot be accepted. It may be locked by another receiver."
            raise Refusal("com.microsoft:session-cannot-be-locked", text, 410)
        session_ = self.sessions.setdefault(name, Session())
        session_.holder, session_.until = holder, now + self.settings.lock_duration
        self._save_session(name)
        return name, session_

    def _is_free(self, name: str) -> bool:
        found = self.sessions.get(name)
        return found is None or found.holder is None

    def session_held(self, name: str, now: float) -> Session:
        self.tick(now)
        found = self.sessions.get(name)
        if found is None or found.holder is None:
            raise session_lost()
        return found

    def renew_session(self, name: str, now: float) -> float:
        session = self.session_held(name, now)
        session.until = now + self.settings.lock_duration
        self._save_session(name)
        return session.until

    def set_state(self, name: str, state: bytes | None, now: float) -> None:
        self.session_held(name, now).state = state
        self._save_session(name)

    def let_go(self, holder: str, now: float) -> None:
        """End the session of a link that was detached; its messages are not counted."""
        for session in self.sessions.values():
            if session.holder == holder:
                self._end_session(session, now, counts=False)

    def _end_session(self, session: Session, now: float, *, counts: bool = True) -> None:
        session.holder = None
        for item in list(self.items.values()):
            if item.token is not None and self._session_of(item) is session:
                self._unlock(item, now, counts=counts)

    # --- inner ---

    def _session_of(self, item: Item) -> Session | None:
        if not self.settings.requires_session or item.content.session is None:
            return None
        return self.sessions.setdefault(item.content.session, Session())

    def _lock(self, item: Item, now: float) -> None:
        session = self._session_of(item)
        item.token = uuid.uuid4()
        item.until = now + self.settings.lock_duration if session is None else session.until
        self._locked[item.token] = item.sequence
        self._note_time(item.until, item)
        self._save(item)

    def _unlock(self, item: Item, now: float, *, counts: bool) -> None:
        assert item.token is not None
        self._locked.pop(item.token, None)
        item.token = None
        item.count += counts
        is_last = item.count >= self.settings.max_delivery_count
        if self.dead is not None and is_last and counts:
            self._remove(item)
            text = f"Message could not be consumed after {item.count} delivery attempts."
            self.dead.bury(item, MAX_DELIVERIES, text)
        elif item.expires is not None and item.expires <= now and item.state == "active":
            self._expire(item)
        else:
            self._index(item)
            self._save(item)

    def _add(self, item: Item) -> None:
        self.items[item.sequence] = item
        self._index(item)
        self._save(item)
        self._ledger.set(f"n {self.path} ", item.sequence)

    def _index(self, item: Item) -> None:
        if item.state == "scheduled" and item.content.due is not None:
            self._note_time(item.content.due, item)
        elif item.token is not None:
            self._locked[item.token] = item.sequence
            self._note_time(item.until, item)
        elif item.state == "active":
            key = item.content.session if self.settings.requires_session else None
            heapq.heappush(self._ready.setdefault(key, []), item.sequence)
        if item.expires is not None:
            self._note_time(item.expires, item)

    def _note_time(self, at: float, item: Item) -> None:
        heapq.heappush(self._times, (at, item.sequence))

    def _save(self, item: Item) -> None:
        self._ledger.set(f"m {self.path} {item.sequence:020}", item)

    def _save_session(self, name: str) -> None:
        self._ledger.set(f"s {self.path} {name}", self.sessions[name])

    def _remove(self, item: Item) -> None:
        if item.token is not None:
            self._locked.pop(item.token, None)
            item.token = None
        self.items.pop(item.sequence, None)
        self._ledger.drop(f"m {self.path} {item.sequence:020}")


class Namespace:
    """All entities, by path in small letters: names are not told apart by case."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.names: dict[str, str] = {}
        """As they were written when they were created."""
        self.settings: dict[str, Settings] = {}
        """Of queues and subscriptions."""
        self.topics: set[str] = set()
        self._entities: dict[str, Entity] = {}
        self.is_full = False
        self.page = PAGE
        """The most entities in one answer."""
        for path, (written, settings) in ledger.rows("e "):
            self._make(path, written, settings)
        for path, written in ledger.rows("t "):
            self.topics.add(path)
            self.names[path] = written

    def entity(self, path: str) -> Entity:
        """Return a queue, a subscription, or the dead letters of one."""
        found = self._entities.get(path.lower())
        if found is None:
            raise not_found(path)
        return found

    def has(self, path: str) -> bool:
        """Return whether there is a queue, a topic, a subscription, or the dead letters of one."""
        return path.lower() in self._entities or path.lower() in self.topics

    def entities(self) -> list[Entity]:
        return list(self._entities.values())

    def targets(self, path: str) -> list[Entity]:
        """Return where a message goes that is sent to *path*: a queue, or the subscriptions of a topic."""
        low = path.lower()
        if low in self.topics:
            return [one for key, one in self._entities.items() if _topic_of(key) == low and not key.endswith(DEAD)]
        if SUBSCRIPTIONS in low or low.endswith(DEAD):
            raise Refusal("amqp:not-allowed", f"'{path}' can't be sent to.")
        return [self.entity(path)]

    def create(self, path: str, settings: Settings) -> None:
        low = path.lower()
        if low in self._entities or low in self.topics:
            raise Refusal("com.microsoft:entity-already-exists", f"'{path}' exists already.", 409)
        if not 5.0 <= settings.lock_duration <= 300.0:
            raise Refusal("", "LockDuration must be from 5 seconds to 5 minutes.", 400)
        if not 20.0 <= settings.duplicate_window <= 7 * 86_400:
            raise Refusal("", "DuplicateDetectionHistoryTimeWindow must be from 20 seconds to 7 days.", 400)
        if SUBSCRIPTIONS not in low and not re.fullmatch(r"[A-Za-z0-9]([\w./~-]{0,258}[A-Za-z0-9])?", path, re.ASCII):
            raise Refusal("", f"'{path}' contains an invalid character.", 400)
        if SUBSCRIPTIONS in low and _topic_of(low) not in self.topics:
            raise not_found(path)
        self._make(low, path, settings)
        self.ledger.set(f"e {low}", (path, settings))

    def create_topic(self, path: str) -> None:
        low = path.lower()
        if low in self._entities or low in self.topics:
            raise Refusal("com.microsoft:entity-already-exists", f"'{path}' exists already.", 409)
        self.topics.add(low)
        self.names[low] = path
        self.ledger.set(f"t {low}", path)

    def update(self, path: str, settings: Settings) -> None:
        low = path.lower()
        old = self.entity(low).settings
        for name in ("requires_session", "requires_duplicate_detection"):
            if getattr(old, name) != getattr(settings, name):
                raise Refusal("", f"The value for {name} cannot be changed.", 400)
        if not 5.0 <= settings.lock_duration <= 300.0 or not 20.0 <= settings.duplicate_window <= 7 * 86_400:
            raise Refusal("", "A duration is out of range.", 400)
        for each in fields(Settings):  # the object is shared
            setattr(old, each.name, getattr(settings, each.name))
        self.ledger.set(f"e {low}", (self.names[low], old))

    def delete(self, path: str) -> None:
        low = path.lower()
        if low in self.topics:
            self.topics.discard(low)
            self.ledger.drop(f"t {low}")
            gone = [key for key in self.settings if _topic_of(key) == low]
        else:
            self.entity(low)
            gone = [low]
        for key in gone:
            for each in (key, key + DEAD):
                self._entities.pop(each, None)
                for kind in "msdn":
                    self.ledger.drop_all(f"{kind} {each} ")
            self.settings.pop(key, None)
            self.ledger.drop(f"e {key}")

    def clear(self) -> None:
        """Delete everything in it, and let it have its first settings."""
        for path in [*self.topics, *(one for one in self.settings if _topic_of(one) is None)]:
            self.delete(path)
        self.is_full, self.page = False, PAGE

    def _make(self, path: str, written: str, settings: Settings) -> None:
        self.names[path], self.settings[path] = written, settings
        dead = Entity(path + DEAD, Settings(settings.lock_duration), self.ledger, None)
        dead.settings = _OfDeadLetters(settings)
        self._entities[path + DEAD] = dead
        self._entities[path] = Entity(path, settings, self.ledger, dead)


class _OfDeadLetters(Settings):
    """Of dead letters: the lock is that of their entity."""

    def __init__(self, source: Settings) -> None:
        self._source = source

    def __getattribute__(self, name: str) -> Any:
        match name:
            case "lock_duration" | "status":
                return getattr(object.__getattribute__(self, "_source"), name)
            case "requires_session" | "requires_duplicate_detection" | "dead_letters_expired":
                return False
            case "default_ttl":
                return None
            case "max_delivery_count":
                return 2**31
        return object.__getattribute__(self, name)


def _topic_of(path: str) -> str | None:
    topic, found, _ = path.partition(SUBSCRIPTIONS)
    return topic if found else None
