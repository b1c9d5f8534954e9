"""What every store of leases must do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from time import monotonic
from typing import ClassVar

import pytest
import pytest_asyncio

from tenure._election.store import NAME_MAX, LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure.errors import ConfigError
from tenure.testing._conformance.harness import LeaseHarness

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
LATE = 1.05  # by which share longer than a ttl to wait before it is surely over
ROUNDED = 0.01  # seconds by which a store may round its times
LAST = 2**-10  # the share of a ttl that is left a moment before its end; no sum with it is rounded


class LeaseSuite:
    """What the suites of leases share: a house for each test, and words to write tests with."""

    harness: ClassVar[type[LeaseHarness]]
    pytestmark: ClassVar[pytest.MarkDecorator] = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def house(self) -> AsyncIterator[LeaseHarness]:
        """Open a fresh storage for one test."""
        house = self.harness()
        await house.start()
        try:
            yield house
        finally:
            await house.close()

    @pytest.fixture
    def name(self) -> str:
        """Give a name that no other test uses: the storage may be shared."""
        return f"conformance-{secrets.token_hex(6)}"


class LeaseStoreSuite(LeaseSuite):
    """The promises of :class:`tenure._election.store.LeaseStore`, one test for each."""

    # --- winning ---

    async def test_a_free_name_is_granted(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        assert (grant.name, grant.holder) == (name, "ann#1")
        assert grant.token >= 1

    async def test_a_held_name_is_not_granted_to_another(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        for store in (bob, ann):
            answer = await store.acquire(name, "bob#1", house.ttl)
            assert isinstance(answer, HeldBy)
            assert (answer.name, answer.holder, answer.token) == (name, "ann#1", grant.token)
            assert answer.remaining is None or 0 < answer.remaining <= house.ttl

    async def test_names_do_not_touch_each_other(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        names = [name, name.upper(), f"{name} ", f"{name}/", f"{name}/{name}"]
        grants = [await claim(store, each, f"holder of {each}", house.ttl) for each in names]
        await store.release(grants[0])
        for grant in grants[1:]:
            assert await holder(store, grant.name) == grant.holder
        assert await holder(store, name) is None

    async def test_of_twenty_who_ask_at_once_one_wins(self, house: LeaseHarness, name: str) -> None:
        stores = [await house.open() for _ in range(20)]
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert {answer.holder for answer in answers if isinstance(answer, HeldBy)} == {winners[0].holder}

    async def test_of_ten_who_wait_for_the_end_one_wins(self, house: LeaseHarness, name: str) -> None:
        stores = [await house.open() for _ in range(10)]
        old = await claim(stores[0], name, "old#1", house.ttl)
        await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        await house.pass_time(house.ttl * LATE)
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert winners[0].token > old.token

    async def test_who_asks_again_gets_the_same_grant(self, house: LeaseHarness, name: str) -> None:
        store, again = await house.open(), await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        assert await store.acquire(name, "ann#1", house.ttl) == Granted(grant)
        assert await again.acquire(name, "ann#1", house.ttl) == Granted(grant)

    async def test_asking_again_extends(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * 0.6)
        assert await ann.acquire(name, "ann#1", house.ttl) == Granted(grant)
        await house.pass_time(house.ttl * 0.6)
        assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)

    # --- tokens ---

    async def test_tokens_rise_with_every_acquisition(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grants = [await claim(ann, name, "ann#1", house.ttl)]
        await ann.release(grants[-1])
        grants.append(await claim(bob, name, "bob#1", house.ttl))  # another holder, after a release
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", house.ttl))  # the same process again
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", house.ttl))  # even the same holder again
        await house.pass_time(house.ttl * LATE)
        grants.append(await win(house, ann, name, "ann#2"))  # after the end of a lease
        await house.pass_time(house.ttl * LATE)
        grants.append(await win(house, ann, name, "ann#2"))  # the same holder, after the end of its own
        tokens = [grant.token for grant in grants]
        assert all(earlier < later for earlier, later in pairwise(tokens)), tokens

    async def test_the_newest_token_is_told_when_nobody_holds_the_name(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        assert await store.inspect(name) == Vacant(name, 0)
        grant = await claim(store, name, "ann#1", house.ttl)
        await store.release(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)

    # --- renewing ---

    async def test_renewal_keeps_the_token(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        for _ in range(3):
            assert await store.renew([grant], house.ttl) == [Granted(grant)]
        answer = await store.inspect(name)
        assert isinstance(answer, HeldBy)
        assert answer.token == grant.token

    async def test_renewal_extends(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        for _ in range(3):
            await house.pass_time(house.ttl * 0.6)
            assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)
            assert await ann.renew([grant], house.ttl) == [Granted(grant)]
        assert (await win(house, bob, name, "bob#1")).token > grant.token

    async def test_many_are_renewed_at_once_each_with_its_own_fate(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        first, second, third = [await claim(store, f"{name}-{n}", "ann#1", house.ttl) for n in range(3)]
        await store.release(second)
        fourth = await claim(store, f"{name}-1", "ann#2", house.ttl)
        asked = [
            third,
            second,
            Grant(first.name, first.holder, first.token + 1),
            first,
            Grant(first.name, "bob#1", first.token),
            Grant(f"{name}-unknown", "ann#1", 1),
            fourth,
            first,
        ]
        kept = {third, first, fourth}
        assert list(await store.renew(asked, house.ttl)) == [
            Granted(grant) if grant in kept else Lost(grant) for grant in asked
        ]

    async def test_three_hundred_are_renewed_at_once(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        names = [f"{name}-{number}" for number in range(300)]
        grants: list[Grant] = []
        for some in (names[first : first + 10] for first in range(0, 300, 10)):
            grants += await asyncio.gather(*(claim(store, each, "ann#1", house.ttl) for each in some))
            if len(grants) % 100 == 0:  # not only at the end: that may be too late for the first, on a busy machine
                assert list(await store.renew(grants[::-1], house.ttl)) == [Granted(grant) for grant in grants[::-1]]

    async def test_nothing_can_be_renewed(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        assert list(await store.renew([], house.ttl)) == []

    # --- the end of a lease ---

    async def test_a_lease_ends_by_itself_and_not_before(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        await claim(ann, name, "ann#1", house.ttl)
        assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)
        await house.pass_time(house.ttl * 0.8)
        assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)
        await house.pass_time(house.ttl * (LATE - 0.8))
        assert (await win(house, bob, name, "bob#1")).holder == "bob#1"

    @pytest.mark.parametrize("verb", ["renew", "release", "inspect", "ask_to_resign", "acquire"])
    async def test_at_its_very_end_a_lease_is_over_for_every_verb(
        self, house: LeaseHarness, name: str, verb: str
    ) -> None:
        if not house.is_exact:
            pytest.skip("time goes on by itself here")
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * (1 - LAST))
        assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)
        assert await holder(bob, name) == "ann#1"
        await house.pass_time(house.ttl * LAST)
        match verb:
            case "renew":
                assert list(await ann.renew([grant], house.ttl)) == [Lost(grant)]
            case "release":
                assert await ann.release(grant) == Lost(grant)
            case "inspect":
                assert await bob.inspect(name) == Vacant(name, grant.token)
            case "ask_to_resign":
                assert await bob.ask_to_resign(name) is False
            case _:
                assert (await claim(ann, name, "ann#1", house.ttl)).token > grant.token
                return
        assert (await claim(bob, name, "bob#1", house.ttl)).token > grant.token

    async def test_what_has_ended_is_lost(self, house: LeaseHarness, name: str) -> None:
        if house.traits.expiry != "store clock":
            pytest.skip("whether it has ended is known to its watchers only")
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * LATE)
        assert await store.renew([grant], house.ttl) == [Lost(grant)]
        assert await store.release(grant) == Lost(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)
        assert await store.ask_to_resign(name) is False

    async def test_release_frees_the_name_at_once(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        assert await ann.release(grant) == Released(grant)
        assert await bob.inspect(name) == Vacant(name, grant.token)
        assert (await claim(bob, name, "bob#1", house.ttl)).token > grant.token

    async def test_a_vacancy_is_never_said_to_be_longer_than_it_is(self, house: LeaseHarness, name: str) -> None:
        store, began = await house.open(), monotonic()
        assert vacant_for(await store.inspect(name)) is None
        grant = await claim(store, name, "ann#1", house.ttl)
        assert await store.release(grant) == Released(grant)
        first = vacant_for(await store.inspect(name))
        if first is None:
            pytest.skip("since when a name is vacant is not known to this store")
        assert 0.0 <= first <= monotonic() - began + ROUNDED
        await house.pass_time(house.ttl)
        second = vacant_for(await store.inspect(name))
        assert second is not None
        assert house.ttl - ROUNDED <= second - first <= house.ttl + monotonic() - began + ROUNDED
        began = monotonic()
        await claim(store, name, "bob#1", house.ttl)  # and crashes
        await house.pass_time(house.ttl * LATE)
        crashed = vacant_for(await store.inspect(name))
        assert crashed is None or crashed <= house.ttl * (LATE - 1) + monotonic() - began + ROUNDED

    async def test_what_was_released_is_lost(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        await store.release(grant)
        assert await store.release(grant) == Lost(grant)
        assert await store.renew([grant], house.ttl) == [Lost(grant)]

    async def test_late_verbs_of_an_old_grant_do_not_touch_a_new_one(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        old = await claim(ann, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * LATE)
        new = await win(house, bob, name, "bob#1")
        assert await ann.renew([old], house.ttl) == [Lost(old)]
        assert await ann.release(old) == Lost(old)
        assert await holder(ann, name) == "bob#1"
        assert await bob.renew([new], house.ttl) == [Granted(new)]

    async def test_an_old_grant_of_the_same_holder_does_not_touch_its_new_one(
        self, house: LeaseHarness, name: str
    ) -> None:
        store = await house.open()
        old = await claim(store, name, "ann#1", house.ttl)
        await store.release(old)
        new = await claim(store, name, "ann#1", house.ttl)
        assert await store.release(old) == Lost(old)
        assert list(await store.renew([old, new], house.ttl)) == [Lost(old), Granted(new)]

    async def test_an_old_grant_of_the_same_holder_does_not_extend_its_new_one(
        self, house: LeaseHarness, name: str
    ) -> None:
        if house.traits.expiry != "store clock":
            pytest.skip("when it has ended is known to its watchers only")
        ann, bob = await house.open(), await house.open()
        other = await claim(ann, f"{name}-other", "ann#1", house.ttl)
        old = await claim(ann, name, "ann#1", house.ttl)
        await ann.release(old)
        new = await claim(ann, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * 0.6)
        assert list(await ann.renew([other, old], house.ttl)) == [Granted(other), Lost(old)]
        await house.pass_time(house.ttl * (LATE - 0.6))
        assert (await claim(bob, name, "bob#1", house.ttl)).token > new.token
        assert await holder(bob, other.name) == "ann#1"

    async def test_a_renewal_never_shortens_a_lease(self, house: LeaseHarness, name: str) -> None:
        """As when the candidate's ttl was made shorter meanwhile; renewed alone, with another, or granted again."""
        ann, bob = await house.open(), await house.open()
        ttl, short = house.ttl, max(house.traits.ttl_min, house.ttl / 2)
        grants = [await claim(ann, f"{name}-{number}", "ann#1", ttl) for number in range(4)]
        assert list(await ann.renew(grants[:1], short)) == [Granted(grants[0])]
        assert list(await ann.renew(grants[1:3], short)) == [Granted(grant) for grant in grants[1:3]]
        assert await ann.acquire(grants[3].name, "ann#1", short) == Granted(grants[3])
        await house.pass_time(ttl * 0.75)
        for grant in grants:
            assert isinstance(await bob.acquire(grant.name, "bob#1", ttl), HeldBy), grant
        assert list(await ann.renew(grants, short)) == [Granted(grant) for grant in grants]

    async def test_no_verb_of_an_old_grant_touches_what_came_after_it(self, house: LeaseHarness, name: str) -> None:
        """Every verb, asked when the lease was released or has ended, and when another has it by then."""
        ann, bob = await house.open(), await house.open()
        verbs, ttl = ("renew", "release", "acquire"), house.ttl
        is_judged = house.traits.expiry == "store clock"
        ended = {verb: await claim(ann, f"{name}-ended-{verb}", "ann#1", ttl) for verb in verbs}
        taken = {verb: await claim(ann, f"{name}-taken-{verb}", "ann#1", ttl) for verb in verbs}
        await house.pass_time(ttl * LATE)
        successors = dict(
            zip(
                verbs,
                await asyncio.gather(*(win(house, bob, old.name, "bob#1") for old in taken.values())),
                strict=True,
            )
        )
        free = {verb: await claim(ann, f"{name}-free-{verb}", "ann#1", ttl) for verb in verbs}
        passed = {verb: await claim(ann, f"{name}-passed-{verb}", "ann#1", ttl) for verb in verbs}
        for old in (*free.values(), *passed.values()):
            assert await ann.release(old) == Released(old)
        heirs = {verb: await claim(bob, old.name, "bob#1", ttl) for verb, old in passed.items()}
        for olds, news in ((taken, successors), (passed, heirs)):
            assert list(await ann.renew([olds["renew"]], ttl)) == [Lost(olds["renew"])]
            assert await ann.release(olds["release"]) == Lost(olds["release"])
            refused = await ann.acquire(olds["acquire"].name, "ann#1", ttl)
            assert isinstance(refused, HeldBy)
            assert (refused.holder, refused.token) == ("bob#1", news["acquire"].token)
            assert all(news[verb].token > olds[verb].token for verb in verbs)
            grants = list(news.values())
            assert list(await bob.renew(grants, ttl)) == [Granted(grant) for grant in grants]
        for olds in (ended, free) if is_judged else (free,):
            assert list(await ann.renew([olds["renew"]], ttl)) == [Lost(olds["renew"])]
            assert await ann.release(olds["release"]) == Lost(olds["release"])
            assert (await claim(ann, olds["acquire"].name, "ann#1", ttl)).token > olds["acquire"].token
            for verb in ("renew", "release"):
                assert await holder(bob, olds[verb].name) is None

    # --- looking ---

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

    # --- what names and times may be ---

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

    # --- asking a leader to resign ---

    async def test_the_holder_reads_that_it_was_asked_to_resign(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        assert await bob.ask_to_resign(name) is True
        assert await bob.ask_to_resign(name) is True
        assert await ann.renew([grant], house.ttl) == [Granted(grant, resign_asked=True)]
        assert await ann.acquire(name, "ann#1", house.ttl) == Granted(grant, resign_asked=True)
        assert await holder(bob, name) == "ann#1"

    async def test_nobody_is_asked_to_resign_when_nobody_leads(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        assert await store.ask_to_resign(name) is False
        await store.release(await claim(store, name, "ann#1", house.ttl))
        assert await store.ask_to_resign(name) is False
        assert await store.inspect(name) != Vacant(name, 0)

    async def test_the_next_term_was_not_asked_to_resign(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        await store.ask_to_resign(name)
        await store.release(grant)
        next_grant = await claim(store, name, "ann#2", house.ttl)
        assert await store.renew([next_grant], house.ttl) == [Granted(next_grant)]
        await store.ask_to_resign(name)
        await house.pass_time(house.ttl * LATE)
        last_grant = await win(house, store, name, "ann#3")
        assert await store.renew([last_grant], house.ttl) == [Granted(last_grant)]

    # --- hints ---

    async def test_hints_tell_of_every_change(self, house: LeaseHarness, name: str) -> None:
        self.needs_hints(house)
        ann, bob = await house.open(), await house.open()
        hints = [ann.hints(name), bob.hints(name)]
        grant = await claim(ann, name, "ann#1", house.ttl)
        for each in hints:
            await hint(each, lambda: holds(bob, name, "ann#1"))
        await bob.ask_to_resign(name)
        for each in hints:
            await hint(each, lambda: reads_resign_asked(ann, grant, house.ttl))
        await ann.release(grant)
        for each in hints:
            await hint(each, lambda: holds(bob, name, None))

    async def test_a_hint_wakes_everybody_who_waits(self, house: LeaseHarness, name: str) -> None:
        self.needs_hints(house)
        stores = [await house.open() for _ in range(4)]
        grant = await claim(stores[0], name, "ann#1", house.ttl)
        waiting = [asyncio.ensure_future(hint(s.hints(name), lambda: holds(stores[0], name, None))) for s in stores]
        await asyncio.sleep(0)
        await stores[0].release(grant)
        await asyncio.gather(*waiting)

    async def test_a_cancelled_wait_for_a_hint_can_be_taken_up_again(self, house: LeaseHarness, name: str) -> None:
        self.needs_hints(house)
        ann, bob = await house.open(), await house.open()
        hints = bob.hints(name)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exhaust(hints), 0.05)
        await claim(ann, name, "ann#1", house.ttl)
        await hint(hints, lambda: holds(bob, name, "ann#1"))

    @staticmethod
    def needs_hints(house: LeaseHarness) -> None:
        """Skip the test if this store tells of nothing."""
        if not house.traits.hints:
            pytest.skip("this store gives no hints")

    # --- being cancelled ---

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
    async def test_cancelled_questions_leave_nothing_wedged(self, house: LeaseHarness, name: str, steps: int) -> None:
        ann, bob = await house.open(), await house.open()
        await asked_and_cancelled(ann.acquire(name, "ann#1", house.ttl), steps)
        grant = await claim(ann, name, "ann#1", house.ttl)  # whether it was done or not, asking again is right
        await asked_and_cancelled(ann.renew([grant], house.ttl), steps)
        assert await ann.renew([grant], house.ttl) == [Granted(grant)]
        await asked_and_cancelled(ann.inspect(name), steps)
        assert await holder(bob, name) == "ann#1"
        await asked_and_cancelled(ann.release(grant), steps)
        await ann.release(grant)
        assert (await claim(bob, name, "bob#1", house.ttl)).token > grant.token


# --- words to write tests with -----------------------------------------------------------------------------------


async def claim(store: LeaseStore, name: str, holder: str, ttl: float) -> Grant:
    """Acquire what must be free."""
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    assert not answer.resign_asked
    return answer.grant


async def win(house: LeaseHarness, store: LeaseStore, name: str, holder: str) -> Grant:
    """Acquire what is free or will be; where watchers judge the end of a lease, they must watch for a while first."""
    for _ in range(4):
        answer = await store.acquire(name, holder, house.ttl)
        if isinstance(answer, Granted):
            return answer.grant
        await house.pass_time(house.ttl * LATE)
    raise AssertionError(f"{name!r} never came free")


async def holder(store: LeaseStore, name: str) -> str | None:
    """Return who holds *name*."""
    answer = await store.inspect(name)
    return answer.holder if isinstance(answer, HeldBy) else None


def vacant_for(found: HeldBy | Vacant) -> float | None:
    """Return for how long nobody has held what is vacant."""
    assert isinstance(found, Vacant)
    return found.vacant_for


async def holds(store: LeaseStore, name: str, who: str | None) -> bool:
    """Tell whether it is *who* that holds *name*."""
    return await holder(store, name) == who


async def reads_resign_asked(store: LeaseStore, grant: Grant, ttl: float) -> bool:
    """Tell whether the holder can read that it was asked to resign."""
    (answer,) = await store.renew([grant], ttl)
    return isinstance(answer, Granted) and answer.resign_asked


async def hint(hints: AsyncIterator[None], change: Callable[[], Awaitable[bool]], *, within: float = 30.0) -> None:
    """Wait for a hint after which *change* is seen; earlier ones may have been lies."""
    async with asyncio.timeout(within):
        async for _ in hints:
            if await change():
                return
    raise AssertionError("the hints ended")


async def exhaust(hints: AsyncIterator[None]) -> None:
    """Take hints without end."""
    async for _ in hints:
        pass


async def asked_and_cancelled(question: Awaitable[object], steps: int) -> None:
    """Ask, and cancel the question after so many turns of the loop."""
    task = asyncio.ensure_future(question)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
