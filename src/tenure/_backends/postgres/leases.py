"""Leases in PostgreSQL: one durable row for each name, judged by the server's clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tenure._backends.postgres.client import Client, RowLocked
from tenure._backends.postgres.statements import milliseconds, statements
from tenure._backends.postgres.wake import Wake, channel_of
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._foreign import clipped, read_json, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure.errors import ConfigError, Unavailable

TRAITS = LeaseTraits(
    ttl_min=0.1,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=True,
)

TRIES = 10
"""How often to repeat an acquisition during which the name changed hands."""

OUT_OF_RANGE = "22003"
"""The code of the error that a number is too high."""

LOCK_WAIT = 0.25
"""Seconds at most that a renewal, with its whole batch, waits for a row that another transaction has locked."""


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
        """What the store can do."""
        return self._traits

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        written = json.dumps(dict(metadata), ensure_ascii=True)
        topic = f"lease:{name}"
        within = self._client.bound(_patience(ttl))
        for _ in range(TRIES):
            try:
                rows = await self._client.fetch(
                    self._sql["acquire"],
                    name,
                    holder,
                    ttl,
                    written,
                    self._channel,
                    f":{topic}",
                    milliseconds(within),
                    within=within,
                    # Soon after, the candidate has given up: a late request would win a lease that is released at once.
                    queue_for=ttl / 8,
                )
            except ConfigError as error:
                if getattr(error.__cause__, "sqlstate", None) != OUT_OF_RANGE:
                    raise
                raise _no_token(name) from error
            if not rows:
                continue  # another candidate won between the statement's read and its write; the next try sees that
            token, resign_asked, other, remaining, theirs, _ = rows[0]
            if other is not None:
                return _held(name, token, other, remaining, theirs)
            if token < 1:
                await self._change("release", name, holder, token, topic=topic)
                raise _no_token(name)
            self._wake.notify_here(topic)
            return Granted(Grant(name, holder, token), resign_asked)
        raise Unavailable(f"{name!r} changed hands {TRIES} times during the request; tenure tries again")

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims to *ttl* seconds from now; the answers are in the order of *grants*.

        The request waits only briefly for a row that another transaction has locked. Then the others are renewed
        without it, and its answer is ``NoAnswer``.
        """
        require_ttl(ttl, TRAITS)
        if not grants:
            return []
        columns = [list(column) for column in zip(*((one.name, one.holder, one.token) for one in grants), strict=True)]
        within = self._client.bound(_patience(ttl))
        wait = milliseconds(min(LOCK_WAIT, ttl / 15, within))
        try:
            rows = await self._client.fetch(self._sql["renew"], *columns, ttl, wait, within=within, urgent=True)
        except RowLocked as error:
            if len(grants) == 1:
                raise
            rows = await self._client.fetch(self._sql["renew_unlocked"], *columns, ttl, within=within, urgent=True)
            return [
                NoAnswer(str(error)) if is_locked else _renewed(grant, resign_asked)
                for grant, (resign_asked, is_locked) in zip(grants, rows, strict=True)
            ]
        return [_renewed(grant, resign_asked) for grant, (resign_asked,) in zip(grants, rows, strict=True)]

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim; its token is kept."""
        named = grant.name, grant.holder, grant.token
        freed = await self._change("release", *named, topic=f"lease:{grant.name}")
        return Released(grant) if freed else Lost(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything."""
        return (await self.inspect_many([name]))[0]

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, in the order of *names*, by one statement."""
        for name in names:
            require_name(name)
        if not names:
            return []
        rows = await self._client.fetch(self._sql["inspect"], list(names))
        return [_seen(name, *row) for name, row in zip(names, rows, strict=True)]

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        return [name for (name,) in await self._client.fetch(self._sql["names"])]

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none."""
        require_name(name)
        return await self._change("ask_to_resign", name, topic=f"lease:{name}")

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when something changed for *name*, in this process or another."""
        require_name(name)
        return self._wake.listen(f"lease:{name}")

    async def _change(self, statement: str, *values: object, topic: str) -> bool:
        """Run a statement that notifies other processes if it has changed a row; return whether it has."""
        wait = milliseconds(self._client.bound())
        changed = bool(await self._client.fetch(self._sql[statement], *values, self._channel, f":{topic}", wait))
        if changed:
            self._wake.notify_here(topic)
        return changed


def _patience(ttl: float) -> float:
    """Return the seconds to wait for an answer about a lease: few enough to leave time to repeat the request."""
    return max(1.0, ttl / 3)


def _renewed(grant: Grant, resign_asked: bool | None) -> Granted | Lost:
    return Lost(grant) if resign_asked is None else Granted(grant, resign_asked)


def _seen(
    name: str, token: int | None, holder: str | None, remaining: float, metadata: str, resign_asked: bool
) -> HeldBy | Vacant:
    if token is None:
        return Vacant(name)
    if holder is None or remaining <= 0:
        return Vacant(name, max(0, token), clipped(-remaining))
    return _held(name, token, holder, remaining, metadata, resign_asked=resign_asked)


def _held(name: str, token: int, holder: str, remaining: float, metadata: str, *, resign_asked: bool = False) -> HeldBy:
    shown = read_or(_read_metadata, metadata, NO_METADATA)
    return HeldBy(name, holder, max(0, token), clipped(remaining), shown, resign_asked)


def _read_metadata(text: str) -> Metadata:
    return FrozenDict(texts(read_json(text)))


def _no_token(name: str) -> ConfigError:
    return ConfigError(
        f"the token of the lease {name!r} in the table lease can't rise: it is no whole number from 0 to "
        f"{TOKEN_MAX - 1}; set it to the highest token that was ever given for this name"
    )
