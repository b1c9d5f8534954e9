"""Leases in memory. The conformance suite certifies them, so tests may use them in place of a real store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from tenure._backends.memory.client import Claim, Client, Memory
from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released, Vacant
from tenure._runtime.clock import Clock, SystemClock

TRAITS = LeaseTraits(
    ttl_min=0.01,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=False,
)


class MemoryLeases(Client):
    """A ``LeaseStore`` in memory.

    Args:
        clock: Judges expiry; a test brings its own.
        memory: Holds the leases; several stores on one memory stand for several processes.
    """

    def __init__(self, clock: Clock | None = None, memory: Memory | None = None) -> None:
        super().__init__(memory)
        self._clock = clock or SystemClock()

    @property
    def traits(self) -> LeaseTraits:
        """What this store can do."""
        return TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that asks again gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        with self._memory.lock:
            now = self._clock.now()
            claim = self._memory.claims.setdefault(name, Claim())
            if _is_live(claim, now):
                if claim.holder != holder:
                    return _held(name, claim, now)
                claim.expires_at = max(claim.expires_at, now + ttl)
                return Granted(Grant(name, holder, claim.token), claim.resign_asked)
            claim.token += 1
            claim.holder, claim.expires_at, claim.resign_asked = holder, now + ttl, False
            claim.metadata = FrozenDict(metadata)
            granted = Granted(Grant(name, holder, claim.token))
        self._memory.notifier.notify(f"lease:{name}")
        return granted

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        """Extend many claims by *ttl* seconds from now; the answers come in the order of *grants*."""
        require_ttl(ttl, TRAITS)
        answers: list[Granted | Lost] = []
        with self._memory.lock:
            now = self._clock.now()
            for grant in grants:
                claim = self._claim_of(grant, now)
                if claim is None:
                    answers.append(Lost(grant))
                else:
                    claim.expires_at = max(claim.expires_at, now + ttl)
                    answers.append(Granted(grant, claim.resign_asked))
        return answers

    async def release(self, grant: Grant) -> Released | Lost:
        """Hand a claim back; its token is kept."""
        with self._memory.lock:
            now = self._clock.now()
            claim = self._claim_of(grant, now)
            if claim is None:
                return Lost(grant)
            claim.holder, claim.expires_at, claim.metadata, claim.resign_asked = None, now, NO_METADATA, False
        self._memory.notifier.notify(f"lease:{grant.name}")
        return Released(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, if there is one."""
        return (await self.inspect_many([name]))[0]

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, in the order of *names*."""
        for name in names:
            require_name(name)
        with self._memory.lock:
            now = self._clock.now()
            return [_seen(name, self._memory.claims.get(name), now) for name in names]

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        with self._memory.lock:
            return sorted(self._memory.claims)

    async def ask_to_resign(self, name: str) -> bool:
        """Ask the present holder to step down; False if there is none."""
        require_name(name)
        with self._memory.lock:
            claim = self._memory.claims.get(name)
            if claim is None or not _is_live(claim, self._clock.now()):
                return False
            claim.resign_asked = True
        self._memory.notifier.notify(f"lease:{name}")
        return True

    def hints(self, name: str) -> AsyncIterator[None]:
        """Yield when something changed for *name*."""
        require_name(name)
        return self._memory.notifier.listen(f"lease:{name}")

    def _claim_of(self, grant: Grant, now: float) -> Claim | None:
        """Return the claim of *grant* if it still holds."""
        claim = self._memory.claims.get(grant.name)
        if claim is None or not _is_live(claim, now):
            return None
        return claim if (claim.holder, claim.token) == (grant.holder, grant.token) else None


def _is_live(claim: Claim, now: float) -> bool:
    return claim.holder is not None and now < claim.expires_at


def _seen(name: str, claim: Claim | None, now: float) -> HeldBy | Vacant:
    if claim is None:
        return Vacant(name)
    if _is_live(claim, now):
        return _held(name, claim, now, resign_asked=claim.resign_asked)
    return Vacant(name, claim.token, now - claim.expires_at)


def _held(name: str, claim: Claim, now: float, *, resign_asked: bool = False) -> HeldBy:
    assert claim.holder is not None
    return HeldBy(name, claim.holder, claim.token, claim.expires_at - now, claim.metadata, resign_asked)
