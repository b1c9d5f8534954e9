"""Leases in etcd, in the dialect of its own package ``concurrency``: they share elections and locks with its clients.

House rules:

- The holder of a name is the candidate whose key was created first; the token is that key's create revision.
- ``Granted`` needs two things: a keep-alive of the etcd lease that was sent after the verb was called, and after its
  answer a transaction in which the key exists. Both answers have the same raft term. Otherwise a member that
  doesn't know yet that it leads no more may have answered the keep-alive, and the new leader counts the lease from an
  earlier time. A leader that is elected after the transaction was ordered extends all leases.
- ``Lost`` needs such a transaction, too: a keep-alive that finds no lease is not enough.
- A name's candidates stand in a queue. One that waits is notified when the key before its own is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenure._backends.etcd import requests
from tenure._backends.etcd.client import CONNECTIONS_MAX, Client, patience
from tenure._backends.etcd.errors import NO_LEASE, NoTimeLeft, Refused
from tenure._backends.etcd.hints import Hints
from tenure._backends.etcd.requests import LOOKED_MAX, Change, Holder, KeyRange, Keys, Record, TxnAnswer
from tenure._backends.etcd.sessions import Extension, Place, Session, SessionGone, Sessions
from tenure._checks import LONGEST
from tenure._election.store import Hint, LeaseTraits, require_name, require_ttl
from tenure._foreign import Unreadable, a_list, an_object
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.together import together
from tenure.errors import ConfigError, TenureError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=1.0,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=True,
    queued=True,
    tells_vacancy=False,
    foreign_leaders=True,
)
"""With etcd's default timers, the shortest lease is 2 s; a shorter one is refused when it is first asked for."""

ROUNDS = 4
"""How often a verb begins again within its time, when a session has ended or etcd's leader has changed meanwhile."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The present state of an election, as one transaction has read it."""

    holder: Holder | None
    newest: int
    """The newest token that tenure has won; 0 for none."""
    resign_asked: bool


class EtcdLeases:
    """A ``QueuedLeaseStore`` in etcd."""

    traits: LeaseTraits = TRAITS

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._keys = Keys(client.options.prefix)
        self._has_values = client.options.kind == "election"
        self._sessions = Sessions(client, self._keys, clock)
        self._hints = Hints(client, self._keys, self._concerns_others)

    # --- acquire --------------------------------------------------------------------------------------

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Take a place in the queue for *name*, or keep it; the first one has the name.

        Raises:
            Unavailable: Also while an earlier request for this place is under way.
        """
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        asked_at, until = self._clock.now(), self._client.until(patience(ttl))
        place = self._sessions.find(name, holder)
        if place is not None and place.session.ttl < ttl:  # it can't be extended for so long
            await self._sessions.end(name, holder, until)
            place = None
        place = place or self._sessions.add(name, holder, ttl)
        with place.asking():
            for _ in range(ROUNDS):
                try:
                    answer = await self._ask(place, FrozenDict(metadata) if metadata else NO_METADATA, until)
                except SessionGone:
                    self._require_waiting(place)
                    self._sessions.move(place)
                    continue
                self._require_waiting(place)
                if answer is not None:
                    place.answered(asked_at, ttl)
                    return answer
        raise Unavailable(f"{self._client.address} changed while {holder!r} asked for {name!r}; tenure asks again")

    async def _ask(self, place: Place, metadata: Metadata, until: float) -> Granted | HeldBy | None:
        """Return the answer of etcd; None if it can't be relied on, or the key is gone: then ask again."""
        revision = place.revision if place.revision is not None else await self._enter(place, until)
        extension = await place.session.extend(until)
        record = Record(revision, place.holder, metadata)
        body = requests.decide(self._keys, place.name, place.session.lease, record)
        answer = TxnAnswer.of((await self._client.call("kv/txn", body, until=until)).body)
        if answer.succeeded:
            self._client.note_permitted()
            if not _is_judged(extension, answer):
                return None
            place.is_granted, place.before = True, None
            grant = Grant(place.name, place.holder, revision)
            return Granted(grant, requests.is_asked(answer.first(1), revision))
        own, first, before = answer.first(0), answer.first(1), answer.first(2)
        if own is None or own.create_revision != revision or first is None:
            place.revision, place.is_granted = None, False  # its session has ended, or an operator has deleted it
            return None
        if extension is None:
            return None
        place.before = before.key if before else None
        self._hints.notify_if_deleted_since(place.name, answer.revision)
        found = Holder.of(first, Record.read(answer.first(3)))
        return HeldBy(place.name, found.holder, found.token, None, found.metadata)

    async def _enter(self, place: Place, until: float) -> int:
        """Put the key of *place*, and return its create revision.

        Raises:
            SessionGone: Its etcd lease is over.
        """
        session = place.session
        await session.begin(until)
        value = place.holder.encode() if self._has_values else b""
        while True:
            self._require_waiting(place)
            body = requests.enter(self._keys, place.name, session.lease, value, session.fence)
            place.unanswered += 1
            try:
                reply = await self._client.call("kv/txn", body, until=until, handles=NO_LEASE)
            except Refused:
                raise SessionGone from None
            except TenureError as error:
                cause = error.__cause__
                if isinstance(cause, NoTimeLeft) or (isinstance(cause, Refused) and cause.was_only):
                    place.unanswered -= 1  # it was not executed
                raise
            place.unanswered -= reply.is_only
            answer = TxnAnswer.of(reply.body)
            if answer.succeeded:
                place.revision = answer.revision
                return place.revision
            own, fence = answer.first(0), answer.first(1)
            if own is not None:  # an earlier request was executed, and its answer lost
                place.revision = own.create_revision
                return place.revision
            session.fence = fence.version if fence else 0

    def _require_waiting(self, place: Place) -> None:
        if place.is_ending:
            raise Unavailable(f"{place.holder!r} gave up its place for {place.name!r} while it asked for it")

    # --- renew ----------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims, by a keep-alive and a transaction for each session, which has up to 127 of them."""
        require_ttl(ttl, TRAITS)
        asked_at, until = self._clock.now(), self._client.until(patience(ttl))
        places = [self._place_of(grant) for grant in grants]
        by_session: dict[Session, list[Place]] = {}
        for place in dict.fromkeys(place for place in places if place is not None):
            if place.session.ttl < ttl:
                raise ConfigError(
                    f"{place.name!r} was claimed for {place.session.ttl} s and can't be renewed for {ttl:g} s; use "
                    "one ttl for both"
                )
            by_session.setdefault(place.session, []).append(place)
        renewing = [self._renew(session, some, asked_at, ttl, until) for session, some in by_session.items()]
        answers: dict[Place, Granted | Lost | NoAnswer] = {}
        for found in await asyncio.gather(*renewing):
            answers |= found
        if answers and all(isinstance(one, NoAnswer) for one in answers.values()) and None not in places:
            raise Unavailable(next(one.why for one in answers.values() if isinstance(one, NoAnswer)))
        return [Lost(grant) if place is None else answers[place] for grant, place in zip(grants, places, strict=True)]

    def _place_of(self, grant: Grant) -> Place | None:
        """Return the place that has *grant*; None if no place of this client has it, or it is ending."""
        place = self._sessions.find(grant.name, grant.holder)
        return place if place is not None and place.revision == grant.token else None

    async def _renew(
        self, session: Session, places: Sequence[Place], asked_at: float, ttl: float, until: float
    ) -> dict[Place, Granted | Lost | NoAnswer]:
        answers: dict[Place, Granted | Lost | NoAnswer] = {}
        left = list(places)
        try:
            for _ in range(ROUNDS):
                extension = await session.extend(until)
                answer, lost = await self._check(left, until)
                for place in lost:
                    answers[place] = Lost(_grant_of(place))
                    self._sessions.drop(place)
                if not lost and _is_judged(extension, answer):
                    for number, place in enumerate(left):
                        resign = requests.is_asked(answer.first(number), place.revision or 0)
                        if place.is_ending:  # its time was over before this answer came
                            answers[place] = Lost(_grant_of(place))
                        else:
                            place.answered(asked_at, ttl)
                            answers[place] = Granted(_grant_of(place), resign)
                    return answers
                left = [place for place in left if place not in lost]
                if not left:
                    return answers
            why = f"{self._client.address} changed its leader while leases were renewed; tenure asks again"
        except Unavailable as error:
            why = str(error)
        return answers | {place: NoAnswer(why) for place in left}

    async def _check(self, places: Sequence[Place], until: float) -> tuple[TxnAnswer, list[Place]]:
        """Return the answer about *places*, and those of them whose keys are gone."""
        known = [(place.key(self._keys), place.revision or 0, place.name) for place in places]
        body = requests.check(self._keys, known)
        answer = TxnAnswer.of((await self._client.call("kv/txn", body, until=until)).body)
        if answer.succeeded:
            return answer, []
        lost = []
        for number, place in enumerate(places):
            found = answer.first(number)
            if found is None or found.create_revision != place.revision:
                lost.append(place)
        return answer, lost

    # --- the other verbs ------------------------------------------------------------------------------

    async def release(self, grant: Grant) -> Released | Lost:
        """Delete the key of a claim, so that the next candidate has the name at once."""
        place = self._place_of(grant)
        if place is None:
            return Lost(grant)
        done = await self._sessions.release(place, self._client.until(patience(place.session.ttl)))
        return Released(grant) if done else Lost(grant)

    async def withdraw(self, name: str, holder: str) -> None:
        """Delete the key of *holder*; if etcd can't be reached, that is repeated in the background, too."""
        require_name(name)
        require_name(holder, of="holder")
        await self._sessions.end(name, holder, self._client.until())

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*; a foreign one by the value of its key, or by its etcd lease."""
        (found,) = await self.inspect_many([name])
        return found

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, by a transaction for every 42, and a request for each holder's etcd lease.

        The claims of one process are usually in one etcd lease, or few.
        """
        for name in names:
            require_name(name)
        looked = await self._look(names)
        leases = {one.holder.lease: None for one in looked.values() if one.holder is not None}
        left = dict(zip(leases, await together(self._remaining, leases, CONNECTIONS_MAX), strict=True))
        return [_told(name, looked[name], left) for name in names]

    async def _look(self, names: Sequence[str]) -> dict[str, _Look]:
        distinct = list(dict.fromkeys(names))
        chunks = [distinct[start : start + LOOKED_MAX] for start in range(0, len(distinct), LOOKED_MAX)]
        found: dict[str, _Look] = {}
        for some in await together(self._look_at_once, chunks, CONNECTIONS_MAX):
            found |= some
        return found

    async def _look_at_once(self, names: Sequence[str]) -> dict[str, _Look]:
        answer = TxnAnswer.of((await self._client.call("kv/txn", requests.look(self._keys, names))).body)
        found: dict[str, _Look] = {}
        for number, name in enumerate(names):
            first, record, asked = (answer.first(3 * number + part) for part in range(3))
            known = Record.read(record)
            holder = Holder.of(first, known) if first is not None else None
            found[name] = _Look(holder, known.token, holder is not None and requests.is_asked(asked, holder.token))
        return found

    async def _remaining(self, lease: int) -> float | None:
        """Return the seconds that an etcd lease has left; etcd tells whole ones, rounded down: this rounds up."""
        if not lease:
            return None  # a key without a lease never ends
        found = (await self._client.call("lease/timetolive", {"ID": str(lease)})).body
        try:
            left, granted = requests.number(found, "TTL"), requests.number(found, "grantedTTL")
        except Unreadable:
            return None
        return float(min(max(0, left + 1), granted, LONGEST))

    async def names(self) -> Sequence[str]:
        """List every name that tenure has ever led under this prefix, sorted; a key made by others may be no name."""
        beginning = self._keys.records
        keys = KeyRange.beginning_with(beginning).written()
        found = (await self._client.call("kv/range", {**keys, "keys_only": True})).body.get("kvs", [])
        try:
            known = [requests.decoded(an_object(one).get("key")) for one in a_list(found)]
        except Unreadable as error:
            raise requests.no_answer(error) from error
        names = (requests.unescaped(key.removeprefix(beginning)) for key in known)
        return sorted(name for name in names if name is not None)

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none, or a foreign one, which doesn't listen."""
        require_name(name)
        holder = (await self._look([name]))[name].holder
        if holder is None or not holder.is_ours:
            return False
        body = requests.ask_to_resign(self._keys, name, holder)
        try:
            reply = await self._client.call("kv/txn", body, handles=NO_LEASE)
        except Refused:  # its session has ended
            return False
        return TxnAnswer.of(reply.body).succeeded

    # --- hints ----------------------------------------------------------------------------------------

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield when something changed for *name*."""
        require_name(name)
        return self._hints.listen(name)

    def _concerns_others(self, change: Change, listeners: int) -> bool:
        """Return whether *change* concerns one of so many *listeners* for its name.

        As long as these are candidates only, those that wait need to know the end of the key before their own, and the
        leader needs to know the end of its own key, and a request to resign. Otherwise all of a thousand candidates
        would ask at each change.
        """
        places = list(self._sessions.of_name(change.name))
        if listeners > len(places):
            return True
        if change.kind == "resign":
            return not change.is_delete and any(place.is_granted for place in places)
        return change.is_delete and change.key in set(self._awaited(places))

    def _awaited(self, places: Sequence[Place]) -> Iterator[bytes]:
        for place in places:
            yield place.key(self._keys)
            if place.before is not None:
                yield place.before

    async def close(self) -> None:
        """End the hints and the places of candidates that wait."""
        await self._hints.close()
        await self._sessions.close()


def _told(name: str, seen: _Look, left: Mapping[int, float | None]) -> HeldBy | Vacant:
    """Return what was *seen* as the answer of ``inspect``; *left* are the seconds that etcd leases have left."""
    holder = seen.holder
    if holder is None:
        return Vacant(name, seen.newest)
    return HeldBy(name, holder.holder, holder.token, left[holder.lease], holder.metadata, seen.resign_asked)


def _grant_of(place: Place) -> Grant:
    return Grant(place.name, place.holder, place.revision or 0)


def _is_judged(extension: Extension | None, answer: TxnAnswer) -> bool:
    """Return whether the session was extended, by a leader that still led when *answer* was ordered."""
    return extension is not None and extension.term == answer.term != 0
