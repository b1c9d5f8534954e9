"""The door to a store of leases: what an election asks of it, and what it can do.

Answers that the domain expects are values. An exception means *could not find out* (``Unavailable``) or *can never
work* (``ConfigError``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tenure.lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released, Vacant


@dataclass(frozen=True, slots=True)
class LeaseTraits:
    """What a store can do: data, so that suite, docs, checks and callers read the same object. Times in seconds."""

    ttl_min: float
    ttl_max: float
    fencing: Literal["native", "emulated"]
    """Where the rising token comes from: the store's own counter, or one that we keep in it."""
    expiry: Literal["store clock", "observed"]
    """Who judges that a lease is over: the store, or the watcher's own monotonic clock."""
    hints: bool
    """Whether a vacancy wakes the others; without, they look every ``retry_every``."""
    survives_restart: bool
    """Whether leases and tokens outlive the store's process."""


class LeaseStore(Protocol):
    """Leases by name, each with its rising token."""

    @property
    def traits(self) -> LeaseTraits:
        """What this store can do."""
        ...

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* for *ttl* seconds if it is free, under a token one higher than any before.

        *holder* is new for each acquisition. If it holds the name already, an earlier answer was lost on its way: the
        same grant is given again, extended.
        """
        ...

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        """Extend many claims by *ttl* seconds from now, in one step; the answers stand in the order of *grants*."""
        ...

    async def release(self, grant: Grant) -> Released | Lost:
        """Hand a claim back, so that the name is free at once; its token is kept."""
        ...

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Tell who holds *name*, without changing anything."""
        ...

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        ...

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none. It hears of it in its next answer or by hint."""
        ...

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when something may have changed for *name*. A hint may lie, may be late, may be absent."""
        ...
