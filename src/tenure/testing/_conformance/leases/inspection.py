"""Names, metadata, and what is refused."""

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
    """What is shown of a lease is true, and to look changes nothing."""

    async def test_to_look_changes_nothing(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        await store.inspect(name)
        assert name not in await store.names()
        grant = await claim(store, name, "ann#1", house.ttl)
        for _ in range(3):
            assert await holder(store, name) == "ann#1"
        assert await store.renew([grant], house.ttl) == [Granted(grant)]

    async def test_metadata_comes_back_as_it_was(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        told = {"url": "http://ann:8080/?a=1&b=2", "Größe": "XL 🦒", "": "empty key", "quote": "'\"\\", "lines": "a\nb"}
        answer = await ann.acquire(name, "ann#1", house.ttl, told)
        assert isinstance(answer, Granted)
        for seen in (await bob.inspect(name), await bob.acquire(name, "bob#1", house.ttl)):
            assert isinstance(seen, HeldBy)
            assert dict(seen.metadata) == told
        await ann.renew([answer.grant], house.ttl)
        seen = await bob.inspect(name)
        assert isinstance(seen, HeldBy)
        assert dict(seen.metadata) == told
        assert json.loads(json.dumps(dataclasses.asdict(seen)))["metadata"] == told  # as frameworks do

    async def test_metadata_goes_with_its_term(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        answer = await store.acquire(name, "ann#1", house.ttl, {"who": "ann"})
        assert isinstance(answer, Granted)
        await store.release(answer.grant)
        await claim(store, name, "bob#1", house.ttl)
        seen = await store.inspect(name)
        assert isinstance(seen, HeldBy)
        assert dict(seen.metadata) == {}

    async def test_names_are_listed_sorted_and_for_ever(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        names = [f"{name}-{last}" for last in ("b", "é", "a", "B", "名")]
        grants = [await claim(store, each, "ann#1", house.ttl) for each in names]
        await store.release(grants[0])
        listed = list(await store.names())
        assert listed == sorted(listed)
        assert [each for each in listed if each.startswith(name)] == sorted(names)

    @pytest.mark.parametrize("odd", ODD_NAMES, ids=lambda odd: ascii(odd[:12]))
    async def test_odd_names_are_names(self, house: LeaseHarness, name: str, odd: str) -> None:
        name = f"{name}{odd}"[-NAME_MAX:] if len(odd) > 1 else odd
        store = await house.open()
        grant = await claim(store, name, odd, house.ttl)
        assert grant == Grant(name, odd, grant.token)
        assert await holder(store, name) == odd
        assert name in await store.names()
        assert await store.ask_to_resign(name) is True
        assert await store.renew([grant], house.ttl) == [Granted(grant, resign_asked=True)]
        assert await store.release(grant) == Released(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)

    @pytest.mark.parametrize("bad", BAD_NAMES, ids=lambda bad: ascii(bad[:12]))
    async def test_what_is_no_name_is_refused(self, house: LeaseHarness, name: str, bad: str) -> None:
        store = await house.open()
        for ask in (
            lambda: store.acquire(bad, "ann#1", house.ttl),
            lambda: store.acquire(name, bad, house.ttl),
            lambda: store.inspect(bad),
            lambda: store.ask_to_resign(bad),
        ):
            with pytest.raises(ConfigError):
                await ask()
        with pytest.raises(ConfigError):
            store.hints(bad)

    async def test_times_that_can_not_be_kept_are_refused(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        traits = house.traits
        bad = [0.0, -1.0, math.nan, math.inf, traits.ttl_min / 2, traits.ttl_max * 2]
        for ttl in bad:
            with pytest.raises(ConfigError, match="ttl"):
                await store.acquire(f"{name}-other", "ann#1", ttl)
            with pytest.raises(ConfigError, match="ttl"):
                await store.renew([grant], ttl)
        assert await holder(store, f"{name}-other") is None
