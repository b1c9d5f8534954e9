"""Leases of ``coordination.k8s.io/v1``, by the rules of client-go's ``LeaseLock``: both stand in the same election.

House rules:

- A write carries the ``resourceVersion`` that was read: the server refuses it if anything has changed since. So every
  verb is decided by one write, and a late request changes nothing.
- "Changed meanwhile" is no loss. The Lease is read again and compared: perhaps the change was our own write, whose
  answer was lost.
- A lease has expired when the record has not changed for its own duration, on our monotonic clock, counted from when
  this process first saw it. The times in the record are never compared with a clock.
- A candidate claims what it has just seen to be free. A claim that is made of older knowledge may arrive although no
  answer does any more: then its process would keep the name from others, and not know it.
- If the record has a strategy, the API server chooses the holder (coordinated leader election), and we don't acquire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from tenure._backends.kubernetes.client import Answer, Client, Request
from tenure._backends.kubernetes.names import require_lease_name
from tenure._backends.kubernetes.observations import Observation, Observations
from tenure._backends.kubernetes.records import (
    API_VERSION,
    LABEL,
    Json,
    acquired,
    asked_to_resign,
    grant_of,
    holder_of,
    is_asked_to_resign,
    is_kept,
    is_lease,
    is_ours,
    metadata_of,
    name_in,
    new_lease,
    record_of,
    released,
    renewed,
    strategy_of,
    token_of,
)
from tenure._backends.kubernetes.watch import Renewals, Watches
from tenure._election.observed import JUST_SEEN, Promises
from tenure._election.store import Hint, LeaseTraits, require_name, require_ttl
from tenure._foreign import Unreadable, a_list, a_text, an_object
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.together import together
from tenure.errors import ConfigError, TenureError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=1.0,
    ttl_max=86_400.0,
    fencing="emulated",
    expiry="observed",
    hints=True,
    survives_restart=True,
    names="dns",
    tells_remaining=False,
    follows_renewals=True,
    foreign_leaders=True,
)

TRIES = 20
"""How often a verb begins anew after a concurrent change."""
CONCURRENCY = 32
"""Requests of one call that are sent at the same time."""
FEW = 8
"""Up to so many names are inspected one by one; for more, the Leases of the namespace are listed."""
PAGE = 500
"""Leases in one page of a list."""
PAGES_MAX = 2_000
"""Pages of one list: a million Leases."""

_LIST = Request("list")


class KubernetesLeases:
    """A ``LeaseStore`` on the Leases of a namespace."""

    def __init__(self, client: Client, observations: Observations, watches: Watches, renewals: Renewals) -> None:
        self._client = client
        self._observed = observations
        self._watches = watches
        self._renewals = renewals
        self._promises = Promises()

    @property
    def traits(self) -> LeaseTraits:
        """What the store can do."""
        return TRAITS

    # --- a new term ---

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended.

        Raises:
            ConfigError: No Lease can have this name; or the API server chooses its holder, or its token can't rise.
        """
        require_lease_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        within = patience(ttl)
        seen = self._observed.find(name)
        if seen is None or not self._was_just_released(seen):
            seen = await self._read(name, within)  # otherwise it is written at once: that fails if it has changed
        for _ in range(TRIES):
            now = self._observed.now
            if seen is None:
                fresh = new_lease(name, self._client.address.namespace)
                written = await self._create(self._acquired(fresh, name, holder, ttl, metadata), within)
            elif holder_of(seen.lease) == holder and not seen.has_expired(now):
                written = await self._replace(self._renewed(name, seen, holder, ttl), within)
            elif strategy_of(seen.lease):
                raise ConfigError(_coordinated(name, strategy_of(seen.lease)))
            elif seen.has_expired(now):
                written = await self._replace(self._acquired(seen.lease, name, holder, ttl, metadata), within)
            else:
                return self._held_by(name, seen, remaining=seen.left(now))
            if written is not None:
                return Granted(grant_of(name, written), is_asked_to_resign(written))
            seen = await self._read(name, within)
        raise Unavailable(f"the Lease {name!r} was changed {TRIES} times while it was read; tenure tries again")

    def _was_just_released(self, seen: Observation) -> bool:
        is_free = not (holder_of(seen.lease) or strategy_of(seen.lease)) and token_of(seen.lease) < TOKEN_MAX
        return is_free and self._observed.now - seen.since <= JUST_SEEN

    def _acquired(self, lease: Json, name: str, holder: str, ttl: float, metadata: Metadata) -> Json:
        newest = self._observed.newest_token(name)
        self._promises.extend(name, holder, ttl, now=self._observed.now)
        return acquired(lease, holder, ttl, metadata, after=newest, now=_wall_clock())

    def _renewed(self, name: str, seen: Observation, holder: str, ttl: float) -> Json:
        # Another program may have made it longer than any lease: if we die, nobody is to wait so long.
        now, recorded = self._observed.now, min(seen.left(self._observed.now), TRAITS.ttl_max)
        left = self._promises.extend(name, holder, ttl, now=now, recorded=recorded)
        return renewed(seen.lease, ttl, left=left, now=_wall_clock())

    # --- an existing term ---

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims to *ttl* seconds from now, concurrently; one without an answer gets ``NoAnswer``, also if
        the server refuses that Lease alone.

        A claim that has expired is renewed, too, if nobody has taken the name since: the write would fail otherwise.
        """
        require_ttl(ttl, TRAITS)
        free = asyncio.Semaphore(CONCURRENCY)
        asked_at = self._observed.now

        async def renew(grant: Grant) -> Granted | Lost | TenureError:
            async with free:
                if self._observed.now - asked_at >= ttl:  # the term is over; this would keep others waiting
                    return Unavailable(f"the renewals before that of {grant.name!r} took the whole lease of {ttl:g} s")
                try:
                    return await self._renew(grant, ttl)
                except TenureError as error:
                    return error

        answers = await asyncio.gather(*map(renew, grants))
        unanswered = [answer for answer in answers if isinstance(answer, TenureError)]
        if unanswered and len(unanswered) == len(answers):
            raise Unavailable(str(unanswered[0])) from unanswered[0]  # each was asked about by itself
        return [NoAnswer(str(answer)) if isinstance(answer, TenureError) else answer for answer in answers]

    async def _renew(self, grant: Grant, ttl: float) -> Granted | Lost:
        within = patience(ttl)
        if self._observed.was_deleted(grant):  # at once: others have been told of it, too
            return self._lost(grant)
        seen = self._observed.find(grant.name)
        if seen is None or grant_of(grant.name, seen.lease) != grant:
            seen = await self._read(grant.name, within)  # perhaps it was noted before our own write
        for _ in range(TRIES):
            if seen is None or grant_of(grant.name, seen.lease) != grant:
                return self._lost(grant)
            written = await self._replace(self._renewed(grant.name, seen, grant.holder, ttl), within)
            if written is not None:
                return Granted(grant, is_asked_to_resign(written))
            seen = await self._read(grant.name, within)
        raise Unavailable(
            f"the Lease {grant.name!r} was changed {TRIES} times while it was renewed; tenure tries again"
        )

    def _lost(self, grant: Grant) -> Lost:
        self._promises.end(grant.name, grant.holder)
        return Lost(grant)

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim, as client-go does; its token is kept. One that has expired, and nobody took, is released."""
        self._promises.end(grant.name, grant.holder)
        sent: Json | None = None
        for _ in range(TRIES):
            seen = await self._read(grant.name)
            if sent is not None and seen is not None and record_of(seen.lease) == record_of(sent):
                return Released(grant)  # the connection broke, the request was sent again, and the first one arrived
            if seen is None or grant_of(grant.name, seen.lease) != grant:
                return Lost(grant)
            sent = released(seen.lease, now=_wall_clock())
            if await self._replace(sent) is not None:
                return Released(grant)
        raise Unavailable(
            f"the Lease {grant.name!r} was changed {TRIES} times while it was released; tenure tries again"
        )

    # --- questions ---

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything. A process that asks for the first time can't know
        whether the holder is still alive, so ``remaining`` is None then."""
        (found,) = await self.inspect_many([name])
        return found

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, by a list of all Leases in the namespace if this user may list them."""
        for name in names:
            require_lease_name(name)
        seen = await self._read_many(list(dict.fromkeys(names)))
        now = self._observed.now
        return [self._told(name, seen[name], now) for name in names]

    def _told(self, name: str, seen: Observation | None, now: float) -> HeldBy | Vacant:
        if seen is None:
            return Vacant(name, self._observed.newest_token(name))
        if seen.has_expired(now):
            return Vacant(name, token_of(seen.lease), seen.vacant_for(now))
        held = self._held_by(name, seen, remaining=None if seen.is_first else seen.left(now))
        return replace(held, resign_asked=is_asked_to_resign(seen.lease))

    async def names(self) -> Sequence[str]:
        """List every name that a candidate of tenure ever claimed, sorted; not those of other programs only."""
        found = await self._list(LABEL)
        if isinstance(found, Answer):
            raise self._client.refusal(found, _LIST)
        return sorted(found)

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none, or it is another program, which can't."""
        require_lease_name(name)
        for _ in range(TRIES):
            seen = await self._read(name)
            if seen is None or seen.has_expired(self._observed.now) or not is_ours(seen.lease):
                return False
            if await self._replace(asked_to_resign(seen.lease)) is not None:
                return True
        raise Unavailable(f"the Lease {name!r} was changed {TRIES} times during the request to resign; try again")

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield when something changed for *name*; a mere renewal gives no hint."""
        require_lease_name(name)
        return self._watches.listen(name)

    def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        """Note each renewal of the Leases whose names begin with *prefix*, if this user may watch the namespace."""
        return self._renewals.listen(prefix)

    # --- requests ---

    async def _read(self, name: str, within: float | None = None) -> Observation | None:
        """Read a Lease; None if there is none."""
        request = Request("get", name)
        answer = await self._client.send(request, "GET", self._client.path_of(name), expected=(404,), within=within)
        if answer.status == 404:
            if answer.reason != "NotFound" or name not in answer.message:  # not even the API is there
                raise self._client.refusal(answer, request)
            self._client.note_worked(request)
            self._observed.note_missing(name)
            return None
        return self._observed.note(name, self._lease_in(answer.body, name))

    async def _read_many(self, names: Sequence[str]) -> dict[str, Observation | None]:
        """Read many Leases: by a list of all, or one by one if they are few, or this user may not list them."""
        listed = await self._list() if len(names) > FEW else None
        if listed is None or isinstance(listed, Answer):
            return dict(zip(names, await together(self._read, names, CONCURRENCY), strict=True))
        found: dict[str, Observation | None] = {}
        for name in names:
            if (lease := listed.get(name)) is None:
                self._observed.note_missing(name)
                found[name] = None
            else:
                found[name] = self._observed.note(name, lease)
        return found

    async def _list(self, label: str = "") -> dict[str, Json] | Answer:
        """Return the Leases that have this label, or all, by name; or the answer that this user may not list them."""
        for _ in range(TRIES):
            if (found := await self._listed({"labelSelector": label} if label else {})) is not None:
                return found
        raise Unavailable(f"the list of Leases became too old {TRIES} times while it was read; try again")

    async def _listed(self, selected: Mapping[str, str]) -> dict[str, Json] | Answer | None:
        """Read the list in pages; None if it took so long that the server has forgotten where it was."""
        leases: dict[str, Json] = {}
        following = ""
        for _ in range(PAGES_MAX):
            query = {**selected, "limit": str(PAGE)} | ({"continue": following} if following else {})
            answer = await self._client.send(_LIST, "GET", self._client.leases_path, query=query, expected=(403, 410))
            if answer.status == 410:
                return None
            if answer.status == 403:
                return answer
            try:
                items = a_list(answer.body.get("items") or [])
                following = a_text(an_object(answer.body.get("metadata") or {}).get("continue") or "")
            except Unreadable as error:
                raise self._no_answer("a list of Leases") from error
            for lease in items:  # the type of each is that of the list
                if (name := name_in(lease)) is not None:
                    leases[name] = {"apiVersion": API_VERSION, "kind": "Lease", **lease}
            if not following:
                return leases
        raise self._no_answer(f"a list of Leases that ends after {PAGES_MAX} pages")

    async def _create(self, lease: Json, within: float | None = None) -> Json | None:
        """Create a Lease, and return it; None if it exists already."""
        name = str(lease["metadata"]["name"])
        request = Request("create", name)
        answer = await self._client.send(
            request, "POST", self._client.leases_path, body=lease, expected=(409,), within=within
        )
        return self._written(lease, answer)

    async def _replace(self, lease: Json, within: float | None = None) -> Json | None:
        """Replace a Lease, and return it; None if it has changed, or was deleted, since it was read."""
        name = str(lease["metadata"]["name"])
        request = Request("update", name)
        answer = await self._client.send(
            request, "PUT", self._client.path_of(name), body=lease, expected=(404, 409), within=within
        )
        return self._written(lease, answer)

    def _written(self, sent: Json, answer: Answer) -> Json | None:
        if answer.status in (404, 409):
            return None
        name = str(sent["metadata"]["name"])
        stored = self._lease_in(answer.body, name)
        self._observed.note(name, stored)
        if not is_kept(sent, stored):
            raise ConfigError(
                f"the API server stored another holder, duration or token in the Lease {name!r} than tenure sent: an "
                f"admission webhook changes the Leases of {self._client.address.namespace}; exempt this one"
            )
        return stored

    def _lease_in(self, found: Json, name: str) -> Json:
        if not is_lease(found, name):
            raise self._no_answer(f"the Lease {name!r}")
        return found

    def _no_answer(self, asked: str) -> Unavailable:
        return Unavailable(
            f"{self._client.address.access.server} answered, but not with {asked}: is a proxy between here and the API "
            "server?"
        )

    @staticmethod
    def _held_by(name: str, seen: Observation, *, remaining: float | None) -> HeldBy:
        return HeldBy(name, holder_of(seen.lease), token_of(seen.lease), remaining, metadata_of(seen.lease))


def patience(ttl: float) -> float:
    """Return the seconds to wait for an answer about a lease of *ttl* seconds: there must be time left to repeat."""
    return max(1.0, ttl / 3)


def _coordinated(name: str, strategy: str) -> str:
    return (
        f"the Lease {name!r} has spec.strategy {strategy}: the API server chooses its holder among LeaseCandidates "
        "(coordinated leader election), and tenure is none; campaign under another name, or remove spec.strategy"
    )


def _wall_clock() -> datetime:
    return datetime.now(UTC)
