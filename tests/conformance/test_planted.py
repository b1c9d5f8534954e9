"""The suites must find bugs that are planted: a check that can't fail proves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from tenure._backends.memory import Memory, MemoryLeases
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import Unavailable
from tenure.testing.conformance import FaultyLeaseStore, LeaseFaultSuite, LeaseStoreSuite
from tests.conformance.planted import failing_tests, leases_with


class NoExpiry(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        self._memory.claims[name].expires_at += 1e9
        return answer


class EarlyExpiry(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        return await super().acquire(name, holder, ttl * 0.7, metadata)


class RenewalRaisesToken(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        answers = await super().renew(grants, ttl)
        for grant in grants:
            self._memory.claims[grant.name].token += 1
        return answers


class RenewalWithoutEffect(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        before = {name: claim.expires_at for name, claim in self._memory.claims.items()}
        answers = await super().renew(grants, ttl)
        for name, at in before.items():
            self._memory.claims[name].expires_at = at
        return answers


class RenewalForgetsOrder(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        return sorted(await super().renew(grants, ttl), key=lambda answer: answer.grant.name)


class RenewalRevives(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        for grant in grants:
            claim = self._memory.claims.get(grant.name)
            if claim and claim.token == grant.token and claim.holder == grant.holder:
                claim.expires_at = self._clock.now() + ttl
        return await super().renew(grants, ttl)


class RenewalOutlivesTheTerm(MemoryLeases):
    """The longest extension of a name is noted, and nobody clears the note."""

    noted: float = 0.0

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        self.noted = max(self.noted, self._clock.now() + ttl)
        return await super().renew(grants, self.noted - self._clock.now())


class RenewalComparesNameOnly(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        return [Granted(grant) if grant.name in self._memory.claims else Lost(grant) for grant in grants]


class ReleaseComparesHolderOnly(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        claim = self._memory.claims.get(grant.name)
        token = claim.token if claim and claim.holder == grant.holder else grant.token
        answer = await super().release(Grant(grant.name, grant.holder, token))
        return Released(grant) if isinstance(answer, Released) else Lost(grant)


class ReleaseAlwaysSucceeds(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        await super().release(grant)
        return Released(grant)


class ReleaseForgetsToken(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        answer = await super().release(grant)
        if isinstance(answer, Released):
            del self._memory.claims[grant.name]
        return answer


class ReleaseGivesNoHint(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        notifier, self._memory.notifier = self._memory.notifier, Notifier()
        try:
            return await super().release(grant)
        finally:
            self._memory.notifier = notifier


class RenewalTakesOver(MemoryLeases):
    """Renews by name and holder, and compares the token only while no other holder has the name."""

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        for grant in grants:
            claim = self._memory.claims.get(grant.name)
            if claim and claim.token > grant.token and claim.holder is not None:
                claim.holder = grant.holder
                return [Granted(one) for one in grants]
        return await super().renew(grants, ttl)


class AnUnreachableGrantIsLost(FaultyLeaseStore):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        pairs = zip(grants, await super().renew(grants, ttl), strict=True)
        return [Lost(grant) if isinstance(answer, NoAnswer) else answer for grant, answer in pairs]


class AnUnreachableGrantCostsAll(FaultyLeaseStore):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        answers = await super().renew(grants, ttl)
        if any(isinstance(answer, NoAnswer) for answer in answers):
            raise Unavailable("one of them can't be asked")
        return answers


class AskingAgainIsANewTerm(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        claim = self._memory.claims.get(name)
        if claim and claim.holder == holder:
            claim.holder = None
        return await super().acquire(name, holder, ttl, metadata)


class AskingAgainIsRefused(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        seen = await self.inspect(name)
        return seen if isinstance(seen, HeldBy) else await super().acquire(name, holder, ttl, metadata)


class SameHolderKeepsTokenAfterTheEnd(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        claim = self._memory.claims.get(name)
        if claim and claim.holder == holder:
            claim.expires_at = self._clock.now() + ttl
        return await super().acquire(name, holder, ttl, metadata)


class ResignationOutlivesTheTerm(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        claim = self._memory.claims.get(name)
        asked = claim.resign_asked if claim else False
        answer = await super().acquire(name, holder, ttl, metadata)
        self._memory.claims[name].resign_asked = asked
        return answer


class ResignationIsReadOnce(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        answers = await super().renew(grants, ttl)
        for grant in grants:
            if grant.name in self._memory.claims:
                self._memory.claims[grant.name].resign_asked = False
        return answers


class MetadataIsForgotten(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        return await super().acquire(name, holder, ttl)


class InspectCreates(MemoryLeases):
    async def inspect(self, name: str) -> HeldBy | Vacant:
        if name and len(name) < 1000 and name not in self._memory.claims:
            await super().release((await self._win(name)).grant)
        return await super().inspect(name)

    async def _win(self, name: str) -> Granted:
        answer = await super().acquire(name, "nobody", 1.0)
        assert isinstance(answer, Granted)
        return answer


class ManyAreInspectedInTheOrderOfNames(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return await super().inspect_many(sorted(names))


class ManyAreInspectedOnceEach(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return await super().inspect_many(list(dict.fromkeys(names)))


class ManyAreInspectedWithoutVacancies(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [one for one in seen if isinstance(one, HeldBy) or len(names) == 1]


class ManyAreInspectedUpToAHundred(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return [*await super().inspect_many(names[:100]), *map(Vacant, names[100:])]


class ManyAreInspectedWithoutMetadata(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [replace(one, metadata={}) if isinstance(one, HeldBy) and len(names) > 1 else one for one in seen]


class ManyAreInspectedWithoutTheTimeLeft(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [replace(one, remaining=None) if isinstance(one, HeldBy) and len(names) > 1 else one for one in seen]


class ManyAreInspectedWithoutTheTimeOfVacancy(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [replace(one, vacant_for=None) if isinstance(one, Vacant) and len(names) > 1 else one for one in seen]


class ManyOfAnyName(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        if len(names) == 1:
            return await super().inspect_many(names)
        return [
            await super(ManyOfAnyName, self).inspect(each) if each[0:1].isalnum() else Vacant(each) for each in names
        ]


class NoneCanNotBeInspected(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        if not names:
            raise Unavailable("there is nothing to ask about")
        return await super().inspect_many(names)


class ResignationIsNotShown(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [replace(one, resign_asked=False) if isinstance(one, HeldBy) else one for one in seen]


class ResignationIsNotShownAmongMany(MemoryLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        return [replace(one, resign_asked=len(names) == 1) if isinstance(one, HeldBy) else one for one in seen]


class ResignationIsShownInTheNextTerm(MemoryLeases):
    def __init__(self, clock: Clock | None = None, memory: Memory | None = None) -> None:
        super().__init__(clock, memory)
        self._asked: set[str] = set()

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        seen = await super().inspect_many(names)
        self._asked |= {one.name for one in seen if isinstance(one, HeldBy) and one.resign_asked}
        return [replace(one, resign_asked=one.name in self._asked) if isinstance(one, HeldBy) else one for one in seen]


class ResignationIsToldToCandidates(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        return await super().inspect(name) if isinstance(answer, HeldBy) else answer  # type: ignore[return-value]


class AnUnreachableNameIsVacant(FaultyLeaseStore):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        try:
            return await super().inspect_many(names)
        except Unavailable:
            return [Vacant(name) for name in names]


class NamesAreFolded(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        return await super().acquire(name.strip() or name, holder, ttl, metadata)


class NamesAreInOrderOfArrival(MemoryLeases):
    async def names(self) -> Sequence[str]:
        return list(self._memory.claims)


class AnyTime(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        return await super().renew(grants, min(max(0.01, ttl), 100.0) if ttl == ttl else 1.0)


class GivesNoHints(MemoryLeases):
    def hints(self, name: str) -> AsyncIterator[None]:
        super().hints(name)
        return Notifier().listen(name)


PLANTED = [
    plant
    for plant in list(globals().values())
    if isinstance(plant, type) and plant.__base__ in (MemoryLeases, FaultyLeaseStore)
]


def findings(plant: type[MemoryLeases] | type[FaultyLeaseStore]) -> set[str]:
    """Run the suites of leases against *plant*, and return the first test that fails."""
    return failing_tests(leases_with(plant), LeaseStoreSuite, LeaseFaultSuite, first_only=True)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(MemoryLeases) == set()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: type[MemoryLeases] | type[FaultyLeaseStore]) -> None:
    assert findings(plant), f"no test fails on {plant.__name__}"
