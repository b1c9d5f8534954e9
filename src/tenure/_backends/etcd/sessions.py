"""The etcd leases of this process, and the places of its candidates in them.

House rules:

- A session is one etcd lease, whose number we choose: a ``LeaseGrant`` whose answer was lost can be repeated. It
  carries the places of many candidates, at most one for each name, because the lease is a part of the key.
- etcd ends a session that isn't kept alive. A place in it that isn't renewed must be ended by us: each has a deadline
  on our own clock, at which its key is deleted, again and again until it is known to be gone.
- Only an answer moves the deadline, to a ttl after its request was sent. Requests may arrive although no answer comes
  back: then each one keeps the session alive, and its places would stand before all others without being of use.
- A session all of whose places are over is revoked, and takes no more places: none of its keys is left, and nothing
  that is asked later keeps it alive.
- A request to put a key that got no answer may be executed later. So a place with such a request is ended by raising
  the session's fence in the same transaction: then no earlier request puts the key any more.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tenure._backends.etcd import requests
from tenure._backends.etcd.client import Client, patience
from tenure._backends.etcd.errors import LEASE_EXISTS, NO_LEASE, Refused
from tenure._backends.etcd.requests import CHECKED_MAX, Json, Keys, TxnAnswer
from tenure._foreign import Unreadable
from tenure._runtime.backoff import Backoff
from tenure._runtime.clock import Clock
from tenure._runtime.tasks import Tasks
from tenure.errors import ConfigError, TenureError, Unavailable

IDLE_SHARE = 0.5
"""A session that wasn't kept alive for this share of its time is not used for new places: it may be over."""

PAUSE_MAX = 1.0
"""Seconds at most between two attempts to end a place: its session may be kept alive, and others wait behind it."""


class SessionGone(Exception):
    """The etcd lease of a session is over for certain, and every key in it is gone: a put was refused for that."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A keep-alive that was answered: the raft term of the member, from before it passed the request on."""

    term: int


@dataclass(eq=False, slots=True)
class Place:
    """A candidate's place in the queue for a name: a key in a session."""

    name: str
    holder: str
    session: Session
    deadline: float
    """When it ends, on our clock, unless its holder is answered again."""
    revision: int | None = None
    """The create revision of its key: the token; None while that is unknown, or there is no key."""
    unanswered: int = 0
    """Requests to put its key that may still be executed, or were."""
    is_granted: bool = False
    is_ending: bool = False
    before: bytes | None = None
    """The key of the candidate before it, when it last asked."""
    is_asked_for: bool = False
    """Whether a request for it is under way."""

    def answered(self, asked_at: float, ttl: float) -> None:
        """Let it end a *ttl* after a request that was sent at *asked_at*, and was answered, unless it ends later."""
        self.deadline = max(self.deadline, asked_at + ttl)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Hold it for one request. Others don't wait: with a slow etcd, their own time would pass in the queue.

        Then each would be given up shortly before its answer, and none would ever get one.

        Raises:
            Unavailable: A request for it is under way.
        """
        if self.is_asked_for:
            raise Unavailable(f"an earlier request of {self.holder!r} for {self.name!r} is still under way")
        self.is_asked_for = True
        try:
            yield
        finally:
            self.is_asked_for = False

    def key(self, keys: Keys) -> bytes:
        """Return its key in etcd."""
        return keys.place(self.name, self.session.lease)


class Session:
    """One etcd lease of *ttl* whole seconds."""

    def __init__(self, client: Client, clock: Clock, tasks: Tasks, ttl: int) -> None:
        self._client = client
        self._clock = clock
        self._tasks = tasks
        self.ttl = ttl
        self.lease = secrets.randbits(62) + 1
        self.fence = 0
        """The version of its fence: requests to put a key in it succeed only with this one."""
        self.fencing: asyncio.Lock = asyncio.Lock()
        self.is_gone = False
        self.is_abandoned = False
        """Whether it is being revoked, as all of its places are over."""
        self.places: dict[str, Place] = {}
        self._is_granted = False
        self._granting = asyncio.Lock()
        self._kept_at = clock.now()
        self._extending: asyncio.Task[Extension | None] | None = None

    @property
    def takes_places(self) -> bool:
        """Whether a new place may be put into it."""
        is_idle = not self.places and self._clock.now() - self._kept_at > IDLE_SHARE * self.ttl
        return not (self.is_gone or self.is_abandoned or is_idle) and len(self.places) < CHECKED_MAX

    async def begin(self, until: float) -> None:
        """Grant the lease, unless that was done.

        Raises:
            ConfigError: This etcd grants only longer leases.
        """
        async with self._granting:
            if self._is_granted:
                return
            asked_at = self._clock.now()
            body = {"TTL": str(self.ttl), "ID": str(self.lease)}
            try:
                reply = await self._client.call("lease/grant", body, until=until, handles=LEASE_EXISTS)
            except Refused:  # an earlier request was executed, and its answer lost
                reply = await self._client.call("lease/timetolive", {"ID": str(self.lease)}, until=until)
                granted = _seconds_in(reply.body, "grantedTTL")
            else:
                granted = _seconds_in(reply.body, "TTL")
            if granted > self.ttl:
                raise ConfigError(
                    f"{self._client.address} grants no lease shorter than {granted} s, which follows its "
                    f"--election-timeout, and ttl asks for {self.ttl} s; try ttl={granted}"
                )
            self._is_granted, self._kept_at = True, asked_at

    async def extend(self, until: float) -> Extension | None:
        """Keep the lease alive by a request that is sent after this call; calls at the same time share it.

        None if the member that answered knows of no such lease, which is not certain.
        """
        if self._extending is None:
            self._extending = self._tasks.spawn(self._extend(until))
            self._extending.add_done_callback(_retrieve)
        return await asyncio.shield(self._extending)

    async def _extend(self, until: float) -> Extension | None:
        self._extending = None  # whoever calls from now on needs another one: this one is being sent
        asked_at = self._clock.now()
        reply = await self._client.call("lease/keepalive", {"ID": str(self.lease)}, until=until)
        if _seconds_in(reply.body, "TTL") <= 0:
            return None
        self._kept_at = max(self._kept_at, asked_at)
        return Extension(TxnAnswer.of(reply.body).term)

    async def revoke(self, until: float) -> None:
        """End the lease, and with it every key in it."""
        if self._is_granted and not self.is_gone:
            with suppress(Refused):  # there is no such etcd lease any more
                await self._client.call("lease/revoke", {"ID": str(self.lease)}, until=until, handles=NO_LEASE)


def _seconds_in(answer: Json, name: str) -> int:
    try:
        return requests.number(answer, name)
    except Unreadable as error:
        raise requests.no_answer(error) from error


def _retrieve(task: asyncio.Task[Extension | None]) -> None:
    """Take the error of a task, which nobody may wait for any more."""
    if not task.cancelled():
        task.exception()


class Sessions:
    """All sessions of one opened backend, and the places in them."""

    def __init__(self, client: Client, keys: Keys, clock: Clock) -> None:
        self._client = client
        self._keys = keys
        self._clock = clock
        self._sessions: list[Session] = []
        self._places: dict[tuple[str, str], Place] = {}
        self._by_name: dict[str, set[Place]] = {}
        self._ending: set[Place] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._tasks = Tasks()

    def find(self, name: str, holder: str) -> Place | None:
        """Return the place of *holder* for *name*, unless there is none, or it is ending."""
        self.end_overdue()
        return self._places.get((name, holder))

    def of_name(self, name: str) -> Iterator[Place]:
        """Return the places for *name* that are not ending."""
        return iter(tuple(self._by_name.get(name, ())))

    def add(self, name: str, holder: str, ttl: float) -> Place:
        """Return a new place, in a session that has none for *name*; its key is not put yet."""
        place = Place(name, holder, self._session_for(name, ttl), self._clock.now() + ttl)
        self._places[name, holder] = place
        self._by_name.setdefault(name, set()).add(place)
        place.session.places[name] = place
        self._set_timer(place.deadline)
        return place

    def move(self, place: Place) -> None:
        """Give *place*, whose session is gone, another session; its key is not put there yet."""
        self.lost(place.session)
        place.session = self._session_for(place.name, place.session.ttl)
        place.session.places[place.name] = place
        place.revision, place.unanswered, place.is_granted, place.before = None, 0, False, None

    def _session_for(self, name: str, ttl: float) -> Session:
        seconds = math.ceil(ttl)
        self._sessions = [one for one in self._sessions if one.places or one.takes_places]
        for session in self._sessions:
            if session.ttl == seconds and session.takes_places and name not in session.places:
                return session
        session = Session(self._client, self._clock, self._tasks, seconds)
        self._sessions.append(session)
        return session

    def lost(self, session: Session) -> None:
        """Note that *session* is gone; its places are found to be lost one by one."""
        session.is_gone = True
        if session in self._sessions:
            self._sessions.remove(session)

    # --- ending places ---

    async def end(self, name: str, holder: str, until: float) -> None:
        """End the places of *holder* for *name*: delete the keys, and let no request that is under way put them again.

        If that fails, it is repeated in the background.

        Raises:
            Unavailable: etcd can't be reached.
        """
        if (place := self.find(name, holder)) is not None:
            self._begin_ending(place)
            self._tasks.spawn(self._delete_later(place))
        for place in [one for one in self._ending if (one.name, one.holder) == (name, holder)]:
            await self._delete(place, until)

    def end_overdue(self) -> None:
        """End the places whose deadline is over: by the timer, and before each verb, as a timer stops in a suspend."""
        now = self._clock.now()
        if now < self._timer_at:
            return
        overdue = [one for one in self._places.values() if one.deadline <= now]
        for place in overdue:
            self._begin_ending(place)
        for session in dict.fromkeys(place.session for place in overdue):
            if all(place.is_ending for place in session.places.values()):
                session.is_abandoned = True
                self._tasks.spawn(self._abandon(session))
        for place in overdue:
            if not place.session.is_abandoned:
                self._tasks.spawn(self._delete_later(place, at_once=True))
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf
        if self._places:
            self._set_timer(min(place.deadline for place in self._places.values()))

    async def release(self, place: Place, until: float) -> bool:
        """Delete the key of *place*, which was granted; return whether it was there, for all that is known.

        Raises:
            Unavailable: etcd can't be reached.
        """
        session = place.session
        assert place.revision is not None, "it was granted"
        body = requests.leave(self._keys, place.name, session.lease, place.revision)
        reply = await self._client.call("kv/txn", body, until=until)
        self.drop(place)
        # If it is gone, an attempt of this request that got no answer may have deleted it.
        return TxnAnswer.of(reply.body).succeeded or not reply.is_only

    def forget(self, place: Place) -> None:
        """Forget *place*, whose key is known to be gone for good."""
        self._begin_ending(place)
        self._ending.discard(place)
        if place.session.places.get(place.name) is place:
            del place.session.places[place.name]

    def drop(self, place: Place) -> None:
        """Forget *place*, whose key is gone; end a request that is under way and could put it again."""
        if place.unanswered and not place.session.is_gone:
            self._begin_ending(place)
            self._tasks.spawn(self._delete_later(place, at_once=True))
        else:
            self.forget(place)

    def _begin_ending(self, place: Place) -> None:
        place.is_ending = True
        self._ending.add(place)
        if self._places.get((place.name, place.holder)) is place:
            del self._places[place.name, place.holder]
            of_name = self._by_name[place.name]
            of_name.discard(place)
            if not of_name:
                del self._by_name[place.name]

    async def _abandon(self, session: Session) -> None:
        """Revoke *session*, again and again until it is known to be gone: its places, which are over, are gone, too."""
        backoff = Backoff(min(1.0, session.ttl / 10), PAUSE_MAX)
        while not session.is_gone:
            try:
                await session.revoke(self._client.until(patience(session.ttl)))
                self.lost(session)
            except TenureError:
                await backoff.rest()
        for place in list(session.places.values()):
            self.forget(place)

    async def _delete_later(self, place: Place, *, at_once: bool = False) -> None:
        first = min(1.0, place.session.ttl / 10)
        if not at_once:
            await asyncio.sleep(first)
        backoff = Backoff(first, PAUSE_MAX)
        while place in self._ending:
            with suppress(TenureError):
                await self._delete(place, self._client.until(patience(place.session.ttl)))
                return
            await backoff.rest()

    async def _delete(self, place: Place, until: float) -> None:
        session = place.session
        if not session.is_gone:
            try:
                if place.unanswered:
                    await self._raise_fence(place, until)
                elif place.revision is not None:
                    body = requests.leave(self._keys, place.name, session.lease, place.revision)
                    await self._client.call("kv/txn", body, until=until)
            except Refused:  # there is no such etcd lease any more
                self.lost(session)
        self.forget(place)

    async def _raise_fence(self, place: Place, until: float) -> None:
        session = place.session
        place.unanswered += 1  # for good: only a raised fence keeps this deletion from the key of a later place
        async with session.fencing:
            while place in self._ending:  # else another call has ended it, and the key may be a later place's
                body = requests.leave_for_good(self._keys, place.name, session.lease, session.fence)
                reply = await self._client.call("kv/txn", body, until=until, handles=NO_LEASE)
                answer = TxnAnswer.of(reply.body)
                if answer.succeeded:
                    session.fence += 1
                    return
                # An answer was lost: the fence is higher than we knew.
                found = answer.first(0)
                session.fence = found.version if found else 0

    # --- time ---

    def _set_timer(self, at: float) -> None:
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock.now()), self._timer_ended)

    def _timer_ended(self) -> None:
        """Look at the deadlines, and set the timer again: it may have ended a little before our clock got there."""
        self._timer, self._timer_at = None, -math.inf
        self.end_overdue()

    async def close(self) -> None:
        """End what is still waiting, as far as etcd can be reached; claims that were granted run out."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel_all()
        until = self._client.until(1.0)
        unused = [one for one in self._sessions if one.places and not any(p.is_granted for p in one.places.values())]
        waiting = [
            place
            for session in self._sessions
            if session not in unused
            for place in session.places.values()
            if not place.is_granted
        ]
        for place in waiting:
            self._begin_ending(place)
        ending = [*(session.revoke(until) for session in unused), *(self._delete(place, until) for place in waiting)]
        await asyncio.gather(*ending, return_exceptions=True)
        self._sessions.clear()
