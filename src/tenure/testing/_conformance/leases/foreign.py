"""Records of leases that others have edited, in any way."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

from tenure._election.store import LeaseStore
from tenure._lease import Granted, HeldBy, Lost, NoAnswer, Vacant
from tenure.errors import TenureError
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite, claim


class ForeignRecordTests(LeaseSuite):
    """No record that others wrote disturbs another lease."""

    async def test_an_edited_record_disturbs_no_other(self, harness: LeaseHarness, name: str) -> None:
        if not harness.foreign:
            pytest.skip("nobody else can write records here")
        store = await harness.open()
        for how in harness.foreign:
            edited, other = _named(name, how), _named(name, how, "other")
            bad, good = await claim(store, edited, "a", harness.ttl), await claim(store, other, "a", harness.ttl)
            await harness.write_foreign(edited, how)
            first, second = await store.renew([bad, good], harness.ttl)
            assert isinstance(first, Granted | Lost | NoAnswer), how
            assert second == Granted(good), how
            one, two = await store.inspect_many([edited, other])
            assert isinstance(one, HeldBy | Vacant), how
            assert is_possible(one), how
            assert isinstance(two, HeldBy), how
            assert (two.holder, two.token) == ("a", good.token), how
            assert other in await store.names(), how

    async def test_no_edit_of_a_record_lets_a_token_fall(self, harness: LeaseHarness, name: str) -> None:
        if not harness.foreign:
            pytest.skip("nobody else can write records here")
        store = await harness.open()
        tokens: dict[str, int] = {}
        for how in harness.foreign:
            edited = _named(name, how)
            tokens[edited] = (await claim(store, edited, "a", harness.ttl)).token
            await harness.write_foreign(edited, how)
            with suppress(TenureError):  # where clients observe a lease, its end is counted from when they saw the edit
                await store.inspect(edited)
        await harness.outlast_lease()
        for edited, token in tokens.items():
            assert await _is_told_or_higher(store, edited, harness.ttl, token), edited


def _named(*parts: str) -> str:
    """Return a name that each store takes."""
    return "-".join(parts).lower().replace(" ", "-")


async def _is_told_or_higher(store: LeaseStore, name: str, ttl: float, token: int) -> bool:
    """Return whether the next claim of *name* gets a higher token, or an error that names the lease.

    If it is held, its holder has this token, or a higher one.
    """
    try:
        answer = await store.acquire(name, "b", ttl)
    except TenureError as error:
        return name in str(error)
    return answer.token >= token if isinstance(answer, HeldBy) else answer.grant.token > token


def is_possible(answer: HeldBy | Vacant) -> bool:
    """Return whether an answer has values that a store can have found."""
    if type(answer.token) is not int or answer.token < 0:
        return False
    remaining = answer.remaining if isinstance(answer, HeldBy) else answer.vacant_for
    return remaining is None or 0.0 <= remaining < math.inf
