"""Our places in the queues: each a node, a deadline, and what becomes of it at the deadline.

One session carries all places of a process, so a place doesn't end with a candidate that has stopped to ask for it. So
each has a deadline of its own, on our clock: ``ttl`` seconds after the newest request for it that succeeded was begun.
Then its node is deleted, and that is repeated until it is known to be gone, or the session is. The name of the node is
unique, so no other candidate's can be meant.

A session without a connection is abandoned once all its places are past their deadlines: there is nothing left that
connecting again could save, and the servers would take each attempt for a sign of life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from uuid import UUID, uuid4

from kazoo.exceptions import NoNodeError

from tenure._backends.zookeeper.errors import Expected
from tenure._backends.zookeeper.names import is_of
from tenure._backends.zookeeper.records import Record
from tenure._backends.zookeeper.requests import check, children, delete
from tenure._backends.zookeeper.session import Reply, Session
from tenure._runtime.backoff import Backoff
from tenure._runtime.clock import Clock
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError, Unavailable

AGAIN_MAX = 1.0
"""Seconds at most until the deletion of a node is repeated."""


class Place:
    """One holder's place in the queue for one name; while it is first, its claim.

    Args:
        name: The name of the election.
        holder: The holder.
        path: The path of the election's node.
        session: The session that owns the node.
    """

    def __init__(self, name: str, holder: str, path: str, session: Session) -> None:
        self.name = name
        self.holder = holder
        self.path = path
        self.session = session
        self.guid: UUID = uuid4()
        self.turn = asyncio.Lock()
        """Held by each verb for this holder, so that they are carried out in the order of their calls."""
        self.node: str | None = None
        """The name of its node; None if it has none, or that isn't known."""
        self.token = 0
        self.creating: asyncio.Future[Reply] | None = None
        """The newest request to create its node, until its outcome is known."""
        self.deadline = 0.0
        self.is_granted = False
        self.record: tuple[Record, int] | None = None
        """The record of the election and its version, as read last; newer ones are reported by a watch."""
        self.is_revoked = False
        """Whether a client of Curator has asked its holder, by the data of its node, to give the name up."""
        self.is_gone = False
        """Whether it is known to have no node, now and later."""
        self.was_there = False
        """Whether its node was deleted by us, as far as is known."""
        self.ending: asyncio.Task[None] | None = None
        """What deletes its node, once it has begun; then the place isn't used any more."""

    @property
    def may_have_node(self) -> bool:
        """Whether a node of it may stand in the queue."""
        return not self.is_gone and (self.node is not None or self.creating is not None)

    @property
    def node_path(self) -> str:
        """The path of its node."""
        assert self.node is not None
        return f"{self.path}/{self.node}"

    def keep(self, until: float) -> None:
        """Keep it up to the time *until* at least; a late answer never shortens it."""
        self.deadline = max(self.deadline, until)

    def forget_node(self) -> None:
        """Note that its node is gone."""
        self.node, self.token, self.creating, self.is_granted, self.is_revoked = None, 0, None, False, False


class Places:
    """All places of this process.

    Args:
        clock: Measures their deadlines.
        until: Returns when a request that begins now is given up.
        on_end: Is called with the name of a place that has ended.
    """

    def __init__(self, clock: Clock, until: Callable[[], float], on_end: Callable[[str], None]) -> None:
        self._clock = clock
        self._until = until
        self._on_end = on_end
        self._places: dict[tuple[str, str], Place] = {}
        self._tasks = Tasks()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def find(self, name: str, holder: str) -> Place | None:
        """Return the place of *holder*, if there is one."""
        return self._places.get((name, holder))

    def of(self, name: str) -> bool:
        """Return whether there is a place in the queue for *name*."""
        return any(place.name == name for place in self._places.values())

    def add(self, place: Place) -> None:
        """Add a place."""
        self._places[place.name, place.holder] = place

    def keep(self, place: Place, until: float) -> None:
        """Let a place last up to the time *until*, at least, and its session be kept up for it."""
        place.keep(until)
        place.session.use(until + (until - self._clock.now()))
        self._set_timer(place.deadline)

    def grants_of(self, session: Session) -> bool:
        """Return whether claims stand in *session*."""
        return any(place.is_granted and place.session is session for place in self._places.values())

    # --- ending ---

    def end(self, place: Place) -> asyncio.Task[None]:
        """Begin to delete the node of a place, if that hasn't begun; return the task, which ends when it is gone."""
        if place.ending is None:
            place.is_granted = False
            place.ending = self._tasks.spawn(self._remove(place))
        return place.ending

    async def ended(self, place: Place, until: float) -> None:
        """Delete the node of a place, and wait until it is gone.

        Raises:
            Unavailable: That is not known yet at *until*; it is tried again.
        """
        ending = self.end(place)
        within = until - self._clock.now()
        await asyncio.wait({ending}, timeout=max(0.0, within))
        if not place.is_gone:
            raise Unavailable(
                f"the node of {place.holder!r} at {place.path} could not be deleted within {within:.3g} s; it is tried "
                "again until its session ends"
            )

    def note_change(self, session: Session) -> None:
        """Note that *session* has changed: if it has expired, its nodes are gone."""
        if session.is_expired:
            for place in [one for one in self._places.values() if one.session is session]:
                self.note_gone(place)
        else:
            self._abandon_if_due(session)

    def _abandon_if_due(self, session: Session) -> None:
        """Abandon a session that has no connection, and nodes, but none whose place lasts any longer."""
        if session.is_over or session.is_connected:
            return
        deadlines = [one.deadline for one in self._places.values() if one.session is session and one.may_have_node]
        if deadlines and max(deadlines) <= self._clock.now():
            session.abandon()

    async def _remove(self, place: Place) -> None:
        backoff = Backoff(longest=AGAIN_MAX)
        while not place.is_gone:
            try:
                await self.delete(place, self._until())
            except TenureError:
                if place.session.is_over:  # nothing can be deleted any more; it runs out
                    self.drop(place)
                    return
                if place.session.is_connected:  # else the next attempt waits for the connection
                    await backoff.rest()

    async def delete(self, place: Place, until: float) -> None:
        """Delete the node of a place, also if an earlier request to create it may still be carried out.

        Raises:
            Unavailable: It is not known whether it is gone.
        """
        session = place.session
        nodes = [place.node] if place.node is not None else await nodes_of(place, until)
        for node in nodes:
            await session.connected(until)
            connections = session.connections
            try:
                await session.ask(delete(f"{place.path}/{node}"), until, writes=True)
            except NoNodeError:
                if session.connections == connections:  # else it was sent again, and the first one may have done it
                    continue
            except Unavailable:
                place.was_there = True  # perhaps
                raise
            place.was_there = True
        self.note_gone(place)

    def note_gone(self, place: Place) -> None:
        """Note that the node of a place is gone for ever."""
        place.is_gone, place.is_granted = True, False
        self.drop(place)
        self._on_end(place.name)

    def drop(self, place: Place) -> None:
        """Forget a place that has no node, or whose session can't be used any more."""
        if self._places.get((place.name, place.holder)) is place:
            del self._places[place.name, place.holder]

    # --- deadlines ---

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        wait = max(0.001, at - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(wait, self._end_due)

    def _end_due(self) -> None:
        self._timer = None
        now = self._clock.now()
        lasting, due = [], set()
        for place in list(self._places.values()):
            if place.deadline > now:
                lasting.append(place.deadline)
            else:
                self.end(place)
                due.add(place.session)
        if lasting:
            self._set_timer(min(lasting))
        for session in due:
            self._abandon_if_due(session)

    async def close(self) -> None:
        """Delete the nodes of those that wait, where their session goes on for a claim; stop all tasks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = [one for one in self._places.values() if not one.is_granted and self.grants_of(one.session)]
        if waiting:
            await asyncio.wait({self.end(one) for one in waiting}, timeout=max(0.0, self._until() - self._clock.now()))
        await self._tasks.cancel_all()


async def nodes_of(place: Place, until: float) -> list[str]:
    """Return the nodes that were made for a place, after every request to create one was carried out, or never will be.

    Raises:
        Unavailable: That is not known at *until*.
    """
    session = place.session
    if place.creating is None:
        return []
    with suppress(TenureError, *Expected):  # its error is told to the caller of that request
        await session.answer(place.creating, until)
    if not place.creating.done():
        raise Unavailable(f"the request to create a node at {place.path} has not been answered yet")
    # A request on an earlier connection is refused once the session has moved to another one. What is under way is
    # overtaken by no write, so after a write through the leader, the list is complete. A "sync" would not do: it needs
    # no majority, so a server that leads no more may answer it.
    await session.ask(check([place.path]), until, writes=True)
    try:
        found = await session.ask(children(place.path), until)
    except NoNodeError:
        return []
    return sorted(child for child in found if is_of(child, place.guid))
