"""Inspection, metadata, names, and refused values."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tenure._election.store import NAME_MAX, LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Released, Vacant
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    ROUNDED,
    LeaseSuite,
    claim,
    holder,
    is_refused,
)

ODD_NAMES = [
    "with space",
    " edges ",
    "Ünïcödé-名前-🗳",
    "a/b/c",
    "../up",
    'it\'s "quoted" `here`',
    "back\\slash",
    "semi;colon--",
    "per%cent_underscore*star?",
    "line\nbreak\ttab",
    "{curly}[square]<angle>",
    "-",
    ".",
    "#hash&amp=",
    "x" * NAME_MAX,
    "名" * NAME_MAX,
]

BAD_NAMES = ["", "x" * (NAME_MAX + 1), "nul\0inside", "lone\ud800surrogate"]

HUNDREDS = 300
"""More names than a store asks about in one request, where it asks in several."""


class InspectionTests(LeaseSuite):
    """Inspection shows the lease as it is, and changes nothing."""

    async def test_inspection_changes_nothing(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        await store.inspect(name)
        assert name not in await store.names()
        grant = await claim(store, name, "ann#1", harness.ttl)
        for _ in range(3):
            assert await holder(store, name) == "ann#1"
        assert await store.renew([grant], harness.ttl) == [Granted(grant)]

    async def test_metadata_comes_back_as_it_was(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        metadata = {
            "url": "http://ann:8080/?a=1&b=2",
            "Größe": "XL 🦒",
            "": "empty key",
            "quote": "'\"\\",
            "lines": "a\nb",
        }
        answer = await ann.acquire(name, "ann#1", harness.ttl, metadata)
        assert isinstance(answer, Granted)
        for seen in (await bob.inspect(name), await bob.acquire(name, "bob#1", harness.ttl)):
            assert isinstance(seen, HeldBy)
            assert dict(seen.metadata) == metadata
        await ann.renew([answer.grant], harness.ttl)
        seen = await bob.inspect(name)
        assert isinstance(seen, HeldBy)
        assert dict(seen.metadata) == metadata
        assert json.loads(json.dumps(dataclasses.asdict(seen)))["metadata"] == metadata  # as web frameworks do

    async def test_metadata_goes_with_its_term(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        answer = await store.acquire(name, "ann#1", harness.ttl, {"who": "ann"})
        assert isinstance(answer, Granted)
        await store.release(answer.grant)
        await claim(store, name, "bob#1", harness.ttl)
        seen = await store.inspect(name)
        assert isinstance(seen, HeldBy)
        assert dict(seen.metadata) == {}

    async def test_many_are_inspected_at_once_in_the_order_given(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        held, free, other, never = (f"{name}-{last}" for last in ("d", "c", "b", "a"))
        grants = [await claim(ann, each, "ann#1", harness.ttl) for each in (held, free, other)]
        await ann.release(grants[1])
        asked = [held, never, other, free, held, never, free]
        for store in (ann, bob):
            seen = list(await store.inspect_many(asked))
            assert [one.name for one in seen] == asked
            assert [_holder(one) for one in seen] == ["ann#1", None, "ann#1", None, "ann#1", None, None]
            tokens = {grant.name: grant.token for grant in grants}
            assert [one.token for one in seen] == [tokens.get(each, 0) for each in asked]
            assert [_timeless(one) for one in seen] == [_timeless(await store.inspect(each)) for each in asked]
        assert list(await bob.inspect_many([never])) == [Vacant(never)]
        assert never not in await bob.names()
        assert list(await ann.renew(grants[::2], harness.ttl)) == [Granted(grant) for grant in grants[::2]]

    async def test_many_are_inspected_with_all_that_the_store_tells(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        names = [f"{name}-0", f"{name}-1"]
        answer = await ann.acquire(names[0], "ann#1", harness.ttl, {"url": "http://ann", "Größe": "XL"})
        assert isinstance(answer, Granted)
        assert isinstance(await ann.acquire(names[1], "ann#2", harness.ttl, {"url": "http://ann/2"}), Granted)
        first, second = await bob.inspect_many(names)
        assert isinstance(first, HeldBy)
        assert isinstance(second, HeldBy)
        assert dict(first.metadata) == {"url": "http://ann", "Größe": "XL"}
        assert dict(second.metadata) == {"url": "http://ann/2"}
        for seen in (first, second):
            assert (seen.remaining is not None) == bob.traits.tells_remaining
            assert seen.remaining is None or 0 < seen.remaining <= harness.ttl + ROUNDED
        await ann.release(answer.grant)
        await bob.inspect(names[0])  # where a client tells only what it saw itself, it has seen the vacancy now
        first, second = await bob.inspect_many(names)
        assert first == Vacant(names[0], answer.grant.token)
        assert isinstance(first, Vacant)
        assert (first.vacant_for is not None) == bob.traits.tells_vacancy
        assert isinstance(second, HeldBy)

    async def test_hundreds_are_inspected_at_once(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        names = [f"{name}-{number}" for number in range(HUNDREDS)]
        held = names[7::97]
        grants = {each: await claim(store, each, "ann#1", harness.ttl) for each in held}
        seen = list(await store.inspect_many(names))
        assert [one.name for one in seen] == names
        assert {one.name: one.token for one in seen if isinstance(one, HeldBy)} == {
            each: grant.token for each, grant in grants.items()
        }

    async def test_none_are_inspected_beside_others(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        await claim(store, name, "ann#1", harness.ttl)
        assert list(await store.inspect_many([])) == []

    async def test_a_request_to_resign_is_shown_in_its_term_only(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        beside = f"{name}-beside"
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await claim(ann, beside, "ann#2", harness.ttl)
        assert await _resign_asked(bob, name, beside) == (False, False)
        assert await bob.ask_to_resign(name) is True
        for store in (ann, bob):
            assert await _resign_asked(store, name, beside) == (True, False)
        assert not (await is_refused(bob, name, "bob#1", harness.ttl)).resign_asked  # by acquire, it is not told
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant, resign_asked=True)]
        assert await _resign_asked(bob, name, beside) == (True, False)
        await ann.release(grant)
        await claim(bob, name, "bob#1", harness.ttl)
        for store in (ann, bob):
            assert await _resign_asked(store, name, beside) == (False, False)

    async def test_names_are_listed_sorted_and_kept(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        lasts = ("b", "é", "a", "B", "名") if harness.traits.names == "any" else ("b", "c.0", "a", "c-0", "c")
        names = [f"{name}-{last}" for last in lasts]
        grants = [await claim(store, each, "ann#1", harness.ttl) for each in names]
        await store.release(grants[0])
        listed = list(await store.names())
        assert listed == sorted(listed)
        assert [each for each in listed if each.startswith(name)] == sorted(names)

    @pytest.mark.parametrize("odd", ODD_NAMES, ids=lambda odd: ascii(odd[:12]))
    async def test_odd_names_are_names(self, harness: LeaseHarness, name: str, odd: str) -> None:
        odd_name = f"{name}{odd}"[-NAME_MAX:] if len(odd) > 1 else odd
        store = await harness.open()
        if harness.traits.names == "any":
            name = odd_name
        else:
            with pytest.raises(ConfigError, match="DNS"):
                await store.acquire(odd_name, "ann#1", harness.ttl)
        grant = await claim(store, name, odd, harness.ttl)
        assert grant == Grant(name, odd, grant.token)
        assert await holder(store, name) == odd
        assert [_holder(one) for one in await store.inspect_many([f"{name[1:]}0", name])] == [None, odd]
        assert name in await store.names()
        assert await store.ask_to_resign(name) is True
        assert await store.renew([grant], harness.ttl) == [Granted(grant, resign_asked=True)]
        assert await store.release(grant) == Released(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)

    @pytest.mark.parametrize("bad", BAD_NAMES, ids=lambda bad: ascii(bad[:12]))
    async def test_invalid_names_are_refused(self, harness: LeaseHarness, name: str, bad: str) -> None:
        store = await harness.open()
        for ask in (
            lambda: store.acquire(bad, "ann#1", harness.ttl),
            lambda: store.acquire(name, bad, harness.ttl),
            lambda: store.inspect(bad),
            lambda: store.inspect_many([name, bad]),
            lambda: store.ask_to_resign(bad),
        ):
            with pytest.raises(ConfigError):
                await ask()
        with pytest.raises(ConfigError):
            store.hints(bad)

    async def test_impossible_ttls_are_refused(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        traits = harness.traits
        bad = [0.0, -1.0, math.nan, math.inf, traits.ttl_min / 2, traits.ttl_max * 2]
        for ttl in bad:
            with pytest.raises(ConfigError, match="ttl"):
                await store.acquire(f"{name}-other", "ann#1", ttl)
            with pytest.raises(ConfigError, match="ttl"):
                await store.renew([grant], ttl)
        assert await holder(store, f"{name}-other") is None


def _holder(seen: HeldBy | Vacant) -> str | None:
    return seen.holder if isinstance(seen, HeldBy) else None


def _timeless(seen: HeldBy | Vacant) -> HeldBy | Vacant:
    """Return what was *seen* without the time left, which differs from one request to the next."""
    return dataclasses.replace(seen, remaining=None) if isinstance(seen, HeldBy) else seen


async def _resign_asked(store: LeaseStore, *names: str) -> tuple[bool, ...]:
    """Return which holders were asked to resign; they are the same by ``inspect`` and ``inspect_many``."""
    each = [await store.inspect(name) for name in names]
    asked = []
    for one, among_many in zip(each, await store.inspect_many(names), strict=True):
        assert isinstance(one, HeldBy)
        assert isinstance(among_many, HeldBy)
        assert one.resign_asked == among_many.resign_asked
        asked.append(one.resign_asked)
    return tuple(asked)
