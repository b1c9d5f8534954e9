"""Inspection, metadata, names, and refused values."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tenure._election.store import NAME_MAX
from tenure._lease import Grant, Granted, HeldBy, Released, Vacant
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LeaseSuite,
    claim,
    holder,
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
