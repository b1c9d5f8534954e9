"""Leases in Redis, by the convention of redis-py's ``Lock``: on the same key, it and a candidate exclude each other.

House rules:

- The lock is a string under ``tenure:lease:NAME``: the holder, which expires with the lease. Everything else (the
  token, the holder's metadata, a request to resign) is in a second key, a hash in the same slot that never expires: a
  token never falls, as long as Redis evicts nothing (see ``describe``).
- Each verb is one script, so it is one step. Renew and release compare the holder *and* the token.
- Expiry is Redis's own, by its wall clock: a step of that clock ends leases early or late.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence

from tenure._backends.redis.address import escaped
from tenure._backends.redis.client import Client, is_forbidden, patience
from tenure._backends.redis.scripts import LEASES, NOTE, Answer, Call, scripts
from tenure._backends.redis.wake import Wake
from tenure._checks import LONGEST
from tenure._election.store import Hint, LeaseTraits, require_name, require_ttl
from tenure._foreign import digits, read_json, read_or, texts
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
    foreign_leaders=True,
)


BATCH_MAX = 100
"""How many leases one script extends, or inspects: it blocks the server meanwhile."""

UNREADABLE = 2
"""The answer to an acquisition if the token of the lease can't rise."""

INSPECTED_AT_ONCE = 1_000
"""How many names are asked about in one round trip: more would delay the requests of others."""


class RedisLeases:
    """A ``LeaseStore`` in Redis."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._lua = scripts(LEASES, is_cluster=client.is_cluster)
        self._prefix = client.options.leases
        self._names = f"{client.options.prefix}leases"
        self._listed: set[str] = set()

    @property
    def traits(self) -> LeaseTraits:
        """What the store can do."""
        return TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        written = json.dumps(dict(metadata)) if metadata else ""
        keys = self._keys(name)
        call = Call(self._lua["acquire"], keys, (holder, _milliseconds(ttl), written, keys[0]))
        asked_at = self._wake.now()
        if name in self._listed:
            answer = await self._client.run(call.script, call.keys, *call.arguments, within=patience(ttl))
        else:
            # The list of names is in another slot, so the script can't write it. It is written first, to miss none.
            note = Call(NOTE, [self._names], [name])
            answer, is_noted = await self._client.run_noted(note, call, within=patience(ttl))
            if is_noted:
                self._listed.add(name)
        if not answer[0]:
            held = _held(name, answer)
            self._wake.found(keys[0], held.token, asked_at)
            return held
        token = None if answer[0] == UNREADABLE else read_or(digits, answer[1], None)
        if token is None:
            raise ConfigError(
                f"the token of the lease {name!r} can't rise: the field token of the key {keys[1]} is no whole number "
                f"from 0 to {TOKEN_MAX - 1}; set it to the highest token that was ever given for this name"
            )
        self._wake.found(keys[0], token, asked_at)
        return Granted(Grant(name, holder, token), answer[2] == b"1")

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Extend many claims to *ttl* seconds from now, in one round trip; in a cluster, in one for each node."""
        require_ttl(ttl, TRAITS)
        if not grants:
            return []
        if self._client.is_cluster:  # the keys of one script are in one slot
            return await self._renew_by(1, grants, ttl)
        try:
            return await self._renew_by(BATCH_MAX, grants, ttl)
        except Unavailable as error:
            if not is_forbidden(error):
                raise
            return await self._renew_by(1, grants, ttl)  # perhaps only one of them is

    async def _renew_by(self, most: int, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Renew so *most* leases with each script, all in one round trip."""
        parts = [grants[first : first + most] for first in range(0, len(grants), most)]
        until = _milliseconds(ttl)
        answers = await self._client.run_all([self._renewal(part, until) for part in parts], within=patience(ttl))
        for answer in answers:
            if most > 1 and isinstance(answer, Unavailable) and is_forbidden(answer):
                raise answer
        return [one for part, answer in zip(parts, answers, strict=True) for one in _renewed(part, answer)]

    def _renewal(self, grants: Sequence[Grant], until: int) -> Call:
        keys = [key for grant in grants for key in self._keys(grant.name)]
        holders = [value for grant in grants for value in (grant.holder, grant.token)]
        return Call(self._lua["renew"], keys, (until, *holders))

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim; its token is kept."""
        keys = self._keys(grant.name)
        done = await self._client.run(self._lua["release"], keys, grant.holder, grant.token, keys[0])
        return Released(grant) if done else Lost(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*."""
        require_name(name)
        lock, _ = self._keys(name)
        asked_at = self._wake.now()
        [answer] = await self._client.run(self._lua["inspect"], [lock])
        seen = _seen(name, answer)
        self._wake.found(lock, seen.token, asked_at)
        return seen

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, in the order of *names*; one round trip for each ``INSPECTED_AT_ONCE``."""
        for name in names:
            require_name(name)
        found: list[HeldBy | Vacant] = []
        for start in range(0, len(names), INSPECTED_AT_ONCE):
            some = names[start : start + INSPECTED_AT_ONCE]
            # Together: with a script for each name, the server reads four times as much.
            most = 1 if self._client.is_cluster else BATCH_MAX
            parts = [some[first : first + most] for first in range(0, len(some), most)]
            calls = [Call(self._lua["inspect"], [self._keys(name)[0] for name in part], ()) for part in parts]
            for part, answer in zip(parts, await self._client.run_all(calls), strict=True):
                if isinstance(answer, Unavailable):
                    raise answer
                found += map(_seen, part, answer)
        return found

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        return sorted(name.decode(errors="replace") for name in await self._client.command("SMEMBERS", self._names))

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none, or it is a ``Lock``, which can't do so."""
        require_name(name)
        keys = self._keys(name)
        return bool(await self._client.run(self._lua["ask_to_resign"], keys, keys[0]))

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield when something changed for *name*."""
        require_name(name)
        return self._wake.listen_to_lease(self._keys(name)[0])

    def _keys(self, name: str) -> tuple[str, str]:
        """Return the key of the lock, and that of the term, whose hash tag puts it into the same slot."""
        lock = f"{self._prefix}{escaped(name)}"
        return lock, f"{{{lock}}}:term"


def _renewed(grants: Sequence[Grant], answers: Answer | Unavailable) -> Sequence[Granted | Lost | NoAnswer]:
    if isinstance(answers, Unavailable):
        return [NoAnswer(str(answers))] * len(grants)
    return [
        NoAnswer(f"there is other data under a key of the lease {grant.name!r}")
        if answer < 0
        else Granted(grant, answer == 2)
        if answer
        else Lost(grant)
        for grant, answer in zip(grants, answers, strict=True)
    ]


def _seen(name: str, answer: Answer) -> HeldBy | Vacant:
    if answer[0] < 0:  # so none of ours can hold it
        return HeldBy(name, "(other data)", 0, None)
    if answer[0]:
        return _held(name, answer[:-1], resign_asked=answer[-1] == b"1")
    _, token, ended = answer
    return Vacant(name, read_or(digits, token, 0), _seconds(ended) if ended != b"" else None)


def _held(name: str, answer: Answer, *, resign_asked: bool = False) -> HeldBy:
    _, holder, token, remaining, written = answer
    metadata = read_or(_read_metadata, written, NO_METADATA) if written else NO_METADATA
    # A Lock without a timeout never ends: then there is no remaining time.
    left = _seconds(remaining) if remaining != -1 else None
    holder = holder.decode(errors="replace")
    return HeldBy(name, holder, read_or(digits, token, 0), left, metadata, resign_asked)


def _read_metadata(written: bytes) -> Metadata:
    return FrozenDict(texts(read_json(written)))


def _seconds(milliseconds: int) -> float:
    return min(max(0, milliseconds) / 1_000, LONGEST)


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1_000)
