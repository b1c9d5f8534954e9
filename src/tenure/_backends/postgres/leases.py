"""Leases in PostgreSQL: one durable row for each name, judged by the server's clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tenure._backends.postgres.client import Client, RowLocked
from tenure._backends.postgres.statements import milliseconds, statements
from tenure._backends.postgres.wake import Wake, channel_of
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure.errors import Unavailable

TRAITS = LeaseTraits(
    ttl_min=0.1,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=True,
)

TRIES = 10
"""How often to ask again for a name that was given and taken while we looked."""

LOCK_WAIT = 0.25
"""For how many seconds at most a renewal waits for a row that another transaction has locked. Others travel with it."""


class PostgresLeases:
    """A ``LeaseStore`` in PostgreSQL."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._sql = statements("leases.sql", client.options.schema)
        self._channel = channel_of(client.options.schema)
        self._traits = replace(TRAITS, hints=client.options.listen)

    @property
    def traits(self) -> LeaseTraits:
        """What this store can do."""
        return self._traits

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that asks again gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        written = json.dumps(dict(metadata), ensure_ascii=True)
        topic = f"lease:{name}"
        within = self._client.bound(_patience(ttl))
        for _ in range(TRIES):
            rows = await self._client.ask(
                self._sql["acquire"],
                name,
                holder,
                ttl,
                written,
                self._channel,
                f":{topic}",
                milliseconds(within),
                within=within,
                # The candidate has given up soon after; to ask late would take the name for nobody, and give it back.
                queue_for=ttl / 8,
            )
            if not rows:
                continue  # between our look and our claim, another took it; now it is there to be seen
            token, resign_asked, other, remaining, theirs, _ = rows[0]
            if other is not None:
                return HeldBy(name, other, token, remaining, _metadata(theirs))
            self._wake.notify_here(topic)
            return Granted(Grant(name, holder, token), resign_asked)
        raise Unavailable(f"{name!r} changed hands {TRIES} times while it was asked for; it is tried again")

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims by *ttl* seconds from now; the answers stand in the order of *grants*.

        A row that another transaction has locked is waited for only shortly, as the others would wait with it. Then
        they are renewed without it, and it gets ``NoAnswer``.
        """
        require_ttl(ttl, TRAITS)
        if not grants:
            return []
        columns = [list(column) for column in zip(*((one.name, one.holder, one.token) for one in grants), strict=True)]
        within = self._client.bound(_patience(ttl))
        wait = milliseconds(min(LOCK_WAIT, ttl / 15, within))
        try:
            rows = await self._client.ask(self._sql["renew"], *columns, ttl, wait, within=within, urgent=True)
        except RowLocked as error:
            if len(grants) == 1:
                raise
            rows = await self._client.ask(self._sql["renew_unlocked"], *columns, ttl, within=within, urgent=True)
            return [
                NoAnswer(str(error)) if is_locked else _renewed(grant, resign_asked)
                for grant, (resign_asked, is_locked) in zip(grants, rows, strict=True)
            ]
        return [_renewed(grant, resign_asked) for grant, (resign_asked,) in zip(grants, rows, strict=True)]

    async def release(self, grant: Grant) -> Released | Lost:
        """Hand a claim back; its token is kept."""
        named = grant.name, grant.holder, grant.token
        freed = await self._change("release", *named, topic=f"lease:{grant.name}")
        return Released(grant) if freed else Lost(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Tell who holds *name*, without changing anything."""
        require_name(name)
        rows = await self._client.ask(self._sql["inspect"], name)
        if not rows:
            return Vacant(name, 0)
        token, holder, remaining, metadata = rows[0]
        if holder is None or remaining <= 0:
            return Vacant(name, token, max(0.0, -remaining))
        return HeldBy(name, holder, token, remaining, _metadata(metadata))

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        return [name for (name,) in await self._client.ask(self._sql["names"])]

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none."""
        require_name(name)
        return await self._change("ask_to_resign", name, topic=f"lease:{name}")

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when something changed for *name*, in this process or another."""
        require_name(name)
        return self._wake.listen(f"lease:{name}")

    async def _change(self, statement: str, *asked: object, topic: str) -> bool:
        """Run a statement on one row, which tells the others if it has changed it."""
        wait = milliseconds(self._client.bound())
        changed = bool(await self._client.ask(self._sql[statement], *asked, self._channel, f":{topic}", wait))
        if changed:
            self._wake.notify_here(topic)
        return changed


def _patience(ttl: float) -> float:
    """Return how long to wait for an answer about a lease: not so long that no time is left to ask again."""
    return max(1.0, ttl / 3)


def _renewed(grant: Grant, resign_asked: bool | None) -> Granted | Lost:
    return Lost(grant) if resign_asked is None else Granted(grant, resign_asked)


def _metadata(text: str) -> Metadata:
    return FrozenDict(json.loads(text))
