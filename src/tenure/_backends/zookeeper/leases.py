"""Leases in ZooKeeper: a queue of candidates, in the form of Curator or kazoo, so that both stand in one queue.

House rules:

- The node with the lowest sequence number has the name. Our nodes are ephemeral, so that they end with our session; and
  each has a deadline of its own, see ``places``.
- ``Granted`` is answered after a write that names our node went through the leader of the ensemble, within the verb, on
  the session that owns the node; and for as long as the leader certainly lets that session last, see ``touches``.
- What foreign clients have no place for (the newest token, metadata, a request to resign) is in the data of the
  election's node, which they don't read.
- A candidate watches the one before it; the leader watches its own node, and the election's for a request to resign.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kazoo.exceptions import BadVersionError, NoNodeError

from tenure._backends.zookeeper.client import Client
from tenure._backends.zookeeper.elections import ATTEMPTS, Elections
from tenure._backends.zookeeper.errors import Broken
from tenure._backends.zookeeper.flags import note_readings, read_flags, resign_asked, send_readings
from tenure._backends.zookeeper.names import Queue, node_prefix, queue_of
from tenure._backends.zookeeper.places import Place, Places, nodes_of
from tenure._backends.zookeeper.proof import Request, proven
from tenure._backends.zookeeper.records import Record, require_metadata
from tenure._backends.zookeeper.requests import (
    check,
    children,
    create_candidate,
    delete,
    exists,
    failure_of,
    get,
)
from tenure._backends.zookeeper.session import Session
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure.errors import ConfigError, TenureError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=4.0,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=True,
    queued=True,
    tells_remaining=False,
    tells_vacancy=False,
    foreign_leaders=True,
)
"""With the default tick of 2 s: a lease lasts two ticks at least. The most is up to the server's settings."""

CHECKED_MAX = 200_000
"""The characters of paths in one request; one of a million bytes breaks the connection."""


EMPTY = Queue((), ())

Stand = float | NoAnswer | None
"""Whether a claim stands: the age of its proof, see ``proven``; None if it doesn't."""


class ZooKeeperLeases:
    """A ``QueuedLeaseStore`` in ZooKeeper."""

    def __init__(self, client: Client) -> None:
        self.traits: LeaseTraits = replace(TRAITS, ttl_min=2 * client.options.tick)
        self._client = client
        self._clock = client.clock
        self._elections = Elections(client)
        self._made: set[str] = set()
        """The nodes of elections that were there; the servers may have removed them since."""
        self._places = Places(client.clock, client.until, client.notifier.notify)
        client.on_change = self._places.note_change

    async def close(self) -> None:
        """End the places of those that wait, and every session without a claim; a claim runs out by itself."""
        await self._places.close()
        await self._client.close(self._places.grants_of)

    # --- acquire ---

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Stand in the queue for *name*, or keep the place there; the first one has the name.

        Raises:
            Unavailable: Also while an earlier request for this place is under way.
        """
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, self.traits)
        require_metadata(metadata)
        request = self._request(ttl, FrozenDict(metadata))
        while True:
            place = self._places.find(name, holder)
            if place is None:
                place = Place(name, holder, self._elections.path(name), self._client.session(ttl))
                self._places.add(place)
                self._places.keep(place, request.ends_at)
            if place.turn.locked():
                # It doesn't wait: with a slow ZooKeeper, its own time would pass in the queue. Then each request would
                # be given up shortly before its answer, and none would ever get one.
                raise Unavailable(f"an earlier request of {holder!r} for {name!r} is still under way")
            async with place.turn:
                if place.ending is not None:
                    await self._places.ended(place, request.until)
                if self._places.find(name, holder) is not place:  # it was dropped while this request waited
                    continue
                try:
                    return await self._acquire(place, request)
                finally:
                    if place.node is None and (place.creating is None or place.session.is_over):
                        self._places.drop(place)

    def _request(self, ttl: float, metadata: Metadata = NO_METADATA) -> Request:
        return Request(self._clock.now(), ttl, self._client.until(ttl), metadata)

    async def _acquire(self, place: Place, request: Request) -> Granted | HeldBy:
        session, until = place.session, request.until
        await session.connected(until)
        self._client.require_time(session, request.ttl)
        attempts = 0
        while attempts < ATTEMPTS:
            try:
                answer = await self._ask_once(place, request)
            except Broken:
                if self._clock.now() >= until:
                    raise
                continue
            if answer is not None:
                return self._kept(place, request, answer)
            attempts += 1
        raise Unavailable(f"the queue at {place.path} changes too often to be read; ask again")

    async def _ask_once(self, place: Place, request: Request) -> Granted | HeldBy | None:
        """Stand in the queue, and look who is first; None if that has changed meanwhile."""
        session, elections, until = place.session, self._elections, request.until
        if place.node is None:
            queue = await self._enter(place, until)
        else:
            queue = await elections.queue(session, place.path, until)
        elections.require_one_dialect(queue, place.path)
        if place.node is None or place.node not in queue.nodes:
            place.forget_node()
            return None
        before = queue.before(place.node)
        if before is None:
            return await self._take(place, request)
        if await elections.watch(session, f"{place.path}/{before}", place.name, until):
            return await elections.held_by(session, place.name, queue.nodes[0], until)
        return None

    def _kept(self, place: Place, request: Request, answer: Granted | HeldBy) -> Granted | HeldBy:
        """Let the place last for the time asked for, unless it has ended meanwhile; return *answer*."""
        self._client.require_open()  # closing may have ended the session already
        _require_not_ended(place)
        place.is_granted = isinstance(answer, Granted)
        self._places.keep(place, request.ends_at)
        return answer

    async def _enter(self, place: Place, until: float) -> Queue:
        """Create the node of a place, unless an earlier request has done so; return the queue after that."""
        session, path, acl = place.session, place.path, self._client.acl
        if place.creating is not None and await self._adopt(place, until):
            return await self._elections.queue(session, path, until)
        creation = None if path in self._made else await self._elections.creation(session, path, until)
        await session.connected(until)
        _require_not_ended(place)  # nothing would delete a node that is created from now on
        prefix = f"{path}/{node_prefix(self._client.options.dialect, place.guid)}"
        if creation is not None:  # its answer doesn't matter: that of the next request says whether it is there
            session.send(creation, writes=True)
        place.creating = session.send(create_candidate(prefix, place.holder.encode(), acl), writes=True)
        listing, readings = session.send(children(path)), send_readings(place)
        try:
            created, stat = await session.answer(place.creating, until)
        except NoNodeError:
            place.creating = None
            await self._elections.make(session, path, until)
            return EMPTY
        except ConfigError:  # it was not created
            place.creating = None
            raise
        self._made.add(path)
        if not _note_node(place, created, stat):
            return EMPTY
        await note_readings(place, readings, until)
        return queue_of(await session.answer(listing, until), self._client.options.dialect)

    async def _adopt(self, place: Place, until: float) -> bool:
        """Find the node that an earlier request has created, after its answer was lost."""
        for node in await nodes_of(place, until):
            path = f"{place.path}/{node}"
            stat = await place.session.ask(exists(path), until)
            if stat is not None and _note_node(place, path, stat):
                return True
        return False

    async def _take(self, place: Place, request: Request) -> Granted | None:
        """Claim the name for the first place in the queue; None if that place, or the record, has changed meanwhile."""
        session, path, own = place.session, place.path, place.node_path
        await read_flags(place, request.until)
        assert place.record is not None
        record, version = place.record
        is_new = record.token != place.token
        written = Record(place.token, place.holder, request.metadata).written()
        claiming = session.send(check([own], (path, written, version) if is_new else None), writes=True)
        readings = send_readings(place, anew=is_new)
        failure = failure_of(await session.answer(claiming, request.until))
        if isinstance(failure, BadVersionError):
            place.record = None
            return None
        if isinstance(failure, NoNodeError):
            place.forget_node()
            return None
        if failure is not None:
            raise session.translated(failure) from failure
        await note_readings(place, readings, request.until)
        age = await proven(self._client, [place], request, is_checked=True)
        if age is None:
            place.forget_node()
            return None
        if is_new:
            self._client.notifier.notify(place.name)
        return Granted(Grant(place.name, place.holder, place.token), resign_asked(place), age)

    # --- renew ---

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims by *ttl* seconds, with one write for each session, or for as many as one request holds."""
        require_ttl(ttl, self.traits)
        request = self._request(ttl)
        places = {place: None for grant in grants if (place := self._claimed(grant)) is not None}
        answers: dict[Place, Stand] = {}
        for some in await asyncio.gather(*(self._renew(chunk, request) for chunk in _chunks(places))):
            answers |= some
        found = [_renewed(grant, self._claimed(grant), answers) for grant in grants]
        if found and all(isinstance(one, NoAnswer) for one in found):
            raise Unavailable(next(one.why for one in found if isinstance(one, NoAnswer)))
        return found

    def _claimed(self, grant: Grant) -> Place | None:
        """Return the place of a claim; None if it is over."""
        place = self._places.find(grant.name, grant.holder)
        if place is None or place.token != grant.token or not (place.is_granted or place.ending):
            return None
        return place

    async def _renew(self, places: Sequence[Place], request: Request) -> dict[Place, Stand]:
        """Return of each of these claims, which are in one session, whether it stands."""
        # An acquire of the same holder may give a node up meanwhile, and make another one, with another token.
        tokens = {place: place.token for place in places if place.node is not None}
        lasting = list(tokens)
        try:
            age = await proven(self._client, lasting, request) if lasting else None
        except TenureError as error:
            in_time = lasting[0].session.is_connected and self._clock.now() < request.until
            if len(lasting) == 1 or not in_time:
                return {place: None if place.is_gone else NoAnswer(str(error)) for place in places}
            age = None
        if age is None and len(lasting) > 1:  # one of them is gone, or refused, which must not harm the others
            answers: dict[Place, Stand] = dict.fromkeys(places)
            for some in await asyncio.gather(*(self._renew([place], request) for place in lasting)):
                answers |= some
            return answers
        if age is not None:
            lasting[0].session.note_renewal(request.asked_at, request.ttl)
        for place, token in tokens.items():
            if place.ending is None and place.token == token:
                if age is not None:
                    self._places.keep(place, request.ends_at)
                else:
                    self._places.note_gone(place)
        # A claim that stands is renewed, whether the rest can be read or not.
        await asyncio.gather(*(_read_if_possible(place, request.until) for place in lasting if not place.is_gone))
        return {place: await self._stand(place, age, request.until) for place in places}

    async def _stand(self, place: Place, age: float | None, until: float) -> Stand:
        if place.ending is None:
            return None if place.is_gone else age
        try:
            await self._places.ended(place, until)
        except Unavailable as error:
            return NoAnswer(str(error))
        return None

    # --- release ---

    async def release(self, grant: Grant) -> Released | Lost:
        """Delete the node of a claim, so that the next one in the queue has the name."""
        until = self._client.until()
        place = self._claimed(grant)
        if place is None:
            return await self._release_unknown(grant, until)
        async with place.turn:
            if place.ending is not None:  # its time was over
                await self._places.ended(place, until)
                return Lost(grant)
            if not place.is_gone:
                await self._places.delete(place, until)
            return Released(grant) if place.was_there else Lost(grant)

    async def _release_unknown(self, grant: Grant, until: float) -> Released | Lost:
        """Release a claim whose place isn't ours, or not any more: it has the name, or is over."""
        session, path = self._client.session(), self._elections.path(grant.name)
        queue = await self._elections.queue(session, path, until, is_newest=True)
        if queue.first is None:
            return Lost(grant)
        node = f"{path}/{queue.first}"
        try:
            data, stat = await session.ask(get(node), until)
            if stat.czxid != grant.token or data != grant.holder.encode():
                return Lost(grant)
            await session.ask(delete(node), until, writes=True)
        except NoNodeError:
            return Lost(grant)
        return Released(grant)

    async def withdraw(self, name: str, holder: str) -> None:
        """Delete the node of a place, also if it has come to the front meanwhile."""
        require_name(name)
        require_name(holder, of="holder")
        # More than once, as an acquire that waited for the end of the first place begins another one.
        while (place := self._places.find(name, holder)) is not None:
            async with place.turn:  # after an acquire that is under way
                await self._places.ended(place, self._client.until())

    # --- others' leases ---

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*."""
        (found,) = await self.inspect_many([name])
        return found

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, by three requests for each that are sent together in two steps."""
        for name in names:
            require_name(name)
        return await self._elections.inspect_many(names)

    async def names(self) -> Sequence[str]:
        """List every name in which a candidate of tenure has led, sorted."""
        return await self._elections.names()

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none, or it is no candidate of tenure."""
        require_name(name)
        return await self._elections.ask_to_resign(name)

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when something may have changed for *name*."""
        require_name(name)
        return _Hints(self._client.notifier.listen(name), self._follow, name)

    async def _follow(self, name: str) -> bool:
        """Watch the leader of *name*, unless a candidate of this process does: it watches the one before it."""
        await asyncio.sleep(0)  # a candidate that begins now has its place in the next step of the loop
        if self._places.of(name):
            return False
        return await self._elections.follow(name)


class _Hints(AsyncIterator[None]):
    """Yields when something may have changed for a name; after a cancelled wait, the next one goes on."""

    def __init__(self, listener: AsyncIterator[None], follow: Callable[[str], Awaitable[bool]], name: str) -> None:
        self._listener = listener
        self._follow = follow
        self._name = name

    async def __anext__(self) -> None:
        # Between the last hint and a new watch, something may have changed that nobody reports.
        with suppress(Unavailable):  # a new connection gives a hint
            if await self._follow(self._name):
                return
        await anext(self._listener)


async def _read_if_possible(place: Place, until: float) -> None:
    with suppress(TenureError, NoNodeError):
        await read_flags(place, until)


def _require_not_ended(place: Place) -> None:
    """Refuse to use a place that has ended while this request for it was under way, as by its deadline.

    Raises:
        Unavailable: It has.
    """
    if place.ending is not None or place.is_gone:
        raise Unavailable(f"the place of {place.holder!r} at {place.path} has ended meanwhile; ask again")


def _note_node(place: Place, path: str, stat: Any) -> bool:
    """Note the node at *path* as that of *place*, if it is of its session; return whether it is."""
    if stat.ephemeralOwner != place.session.id:
        return False
    place.node, place.token = path.rpartition("/")[2], stat.czxid
    return True


def _chunks(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Yield these places by their session, as many at once as fit into one request."""
    groups: dict[Session, list[Place]] = {}
    for place in places:
        groups.setdefault(place.session, []).append(place)
    for group in groups.values():
        chunk: list[Place] = []
        size = 0
        for place in group:
            size += len(place.path) + 64
            if chunk and size > CHECKED_MAX:
                yield chunk
                chunk, size = [], len(place.path) + 64
            chunk.append(place)
        yield chunk


def _renewed(grant: Grant, place: Place | None, answers: dict[Place, Stand]) -> Granted | Lost | NoAnswer:
    stand = answers.get(place) if place is not None else None
    if place is None or stand is None:
        return Lost(grant)
    return stand if isinstance(stand, NoAnswer) else Granted(grant, resign_asked(place), stand)
