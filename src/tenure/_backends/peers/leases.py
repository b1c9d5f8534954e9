"""A fleet as a store of leases: each lease is given by the votes of the members.

``tenure.connect("peers://a:7000,b:7000,c:7000?me=a").election(name)`` uses it as any other store, so terms, threads and
the command line are the same. Without ``me``, no member is started, and the others are asked.

With ``quorum="majority"``, it promises what every store promises: the old leader is out before the new one is in, and
the token rises. With ``quorum="none"``, it doesn't: each side of a partition has a leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tenure._backends.peers.client import Member
from tenure._backends.peers.machine import (
    Acquire,
    AskToResign,
    Inspect,
    Names,
    Outcome,
    Release,
    Renew,
)
from tenure._backends.peers.wire import METADATA_MAX, metadata_size
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.together import together
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")
U = TypeVar("U")

TRAITS = LeaseTraits(
    ttl_min=3.0,
    ttl_max=15.0,
    fencing="emulated",
    expiry="store clock",
    hints=True,
    survives_restart=False,
    takes_back=True,
    tells_vacancy=False,
)
"""With the default times; ``ttl_max`` and ``heartbeat`` in the URL change the limits."""

AT_ONCE = 64
"""Questions of one call that are under way together: each must be answered in time."""


class PeersLeases:
    """A ``LeaseStore`` on a member of the fleet.

    Args:
        member: The member of this process, or a client of the fleet.
        traits: What this fleet can do.
    """

    def __init__(self, member: Member, *, traits: LeaseTraits = TRAITS) -> None:
        self.traits = traits
        self._member = member

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Campaign for *name*; a holder that asks again gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, self.traits)
        if (size := metadata_size(metadata)) > METADATA_MAX:
            raise ConfigError(f"metadata must take at most {METADATA_MAX} bytes as JSON, and takes {size}")
        copy = FrozenDict(metadata)
        await self._member.open()
        fleet, _, _ = self._member.running()
        if fleet.me is None:
            raise ConfigError(
                f"to lead, this must be one of the members {', '.join(fleet.members)}, and the URL does not say which; "
                f"add me= with its address, such as me={fleet.members[0]}"
            )
        return _expect(await self._member.ask(lambda ask: Acquire(ask, name, holder, ttl, copy)), Granted, HeldBy)

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        """Ask all members to renew their votes for these claims for *ttl* seconds."""
        require_ttl(ttl, self.traits)
        await self._member.open()
        return list(await asyncio.gather(*(self._renew(grant, ttl) for grant in grants)))

    async def _renew(self, grant: Grant, ttl: float) -> Granted | Lost | NoAnswer:
        try:
            return _expect(await self._member.ask(lambda ask: Renew(ask, grant, ttl)), Granted, Lost)
        except Unavailable as error:  # too few votes for this name; the others may have enough
            return NoAnswer(str(error))

    async def release(self, grant: Grant) -> Released | Lost:
        """Ask all members to free their votes for the claim."""
        await self._member.open()
        return _expect(await self._member.ask(lambda ask: Release(ask, grant)), Released, Lost)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Ask the members which claim has their vote."""
        (found,) = await self.inspect_many([name])
        return found

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Ask the members which claims have their votes; the questions are sent together."""
        for name in names:
            require_name(name)
        if not names:
            return []
        asked, distinct = await self._member.or_client(), list(dict.fromkeys(names))
        found = dict(zip(distinct, await together(partial(_inspect, asked), distinct, AT_ONCE), strict=True))
        return [found[name] for name in names]

    async def names(self) -> Sequence[str]:
        """List every name that a majority remembers, sorted."""
        asked = await self._member.or_client()
        return _expect(await asked.ask(Names), tuple, tuple)

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none."""
        require_name(name)
        asked = await self._member.or_client()
        return _expect(await asked.ask(lambda ask: AskToResign(ask, name)), bool, bool)

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when a vote for *name* changed here; in a client, when the leader changed."""
        require_name(name)
        return _Hints(self._member, name)


class _Hints(AsyncIterator[None]):
    """Yield when something may have changed for a name; after a cancelled wait, the next one goes on."""

    def __init__(self, member: Member, name: str) -> None:
        self._member = member
        self._name = name
        self._notified = member.listen(name)
        self._last: HeldBy | Vacant | None = None

    async def __anext__(self) -> None:
        asked = await self._member.or_client()
        fleet, _, _ = asked.running()
        if fleet.me is not None:
            return await anext(self._notified)
        while True:  # members send a client no hints, so it polls
            await asyncio.sleep(fleet.heartbeat)
            with suppress(Unavailable):
                found = await _inspect(asked, self._name)
                before, self._last = self._last, found
                if before is None or _leader(found) != _leader(before):
                    return None


async def _inspect(asked: Member, name: str) -> HeldBy | Vacant:
    return _expect(await asked.ask(lambda ask: Inspect(ask, name)), HeldBy, Vacant)


def _leader(found: HeldBy | Vacant) -> tuple[str, int]:
    return (found.holder, found.token) if isinstance(found, HeldBy) else ("", found.token)


def _expect(found: Outcome, one: type[T], other: type[U]) -> T | U:
    if not isinstance(found, (one, other)):
        raise AssertionError(f"the fleet's machine answered {found!r}")
    return found
