"""Rows that were stamped in another boot: they can't be compared with the own clock, and are waited out in full."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tenure._backends.sqlite.address import Options
from tenure._backends.sqlite.boot import common_name, this_boot
from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.leases import LEASES, SqliteLeases
from tenure._backends.sqlite.wake import Wake
from tenure._backends.sqlite.worker import Worker
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure.testing import ManualClock

Boot = Callable[[str, float], tuple[SqliteLeases, ManualClock]]


@pytest.fixture
async def boot(tmp_path: Path) -> AsyncIterator[Boot]:
    """Open the file as a process in *boot*, whose clock shows *now*."""
    path, workers = str(tmp_path / "x.db"), []

    def start(name: str, now: float) -> tuple[SqliteLeases, ManualClock]:
        clock = ManualClock(now)
        worker = Worker(lambda: Database(path, Options(), [LEASES]))
        workers.append(worker)
        return SqliteLeases(worker, Wake(path, worker), clock, name), clock

    yield start
    for worker in workers:
        await worker.close()


async def claimed(store: SqliteLeases, holder: str, ttl: float) -> Grant:
    answer = await store.acquire("name", holder, ttl)
    assert isinstance(answer, Granted)
    return answer.grant


@pytest.mark.parametrize("now", [0.0, 5.0, 1e6], ids=["just started", "clock is behind", "clock is far ahead"])
async def test_a_row_of_another_boot_is_waited_out_in_full(boot: Boot, now: float) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("after", now)
    seen = await after.acquire("name", "bob#1", 10)
    assert seen == HeldBy("name", "ann#1", old.token, 30.0)
    clock.advance(29.9)
    again = await after.acquire("name", "bob#1", 10)
    assert isinstance(again, HeldBy)
    assert again.remaining == pytest.approx(0.1)
    clock.advance(0.2)
    assert (await claimed(after, "bob#1", 10)).token == old.token + 1


async def test_a_row_of_another_boot_may_be_renewed_by_its_holder(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("after", 5.0)
    assert list(await after.renew([old], 10)) == [Granted(old)]
    seen = await after.acquire("name", "bob#1", 10)
    assert isinstance(seen, HeldBy)
    assert seen.remaining == 10.0
    clock.advance(10)
    assert list(await after.renew([old], 10)) == [Lost(old)]


async def test_two_boots_that_stamp_in_turn_do_not_keep_a_dead_holders_name_taken(boot: Boot) -> None:
    """Containers in two time namespaces: each finds the row stamped by the other."""
    one, one_clock = boot("one", 1_000.0)
    other, other_clock = boot("other", 5.0)
    old = await claimed(one, "ann#1", 30)
    waited = 0.0
    while True:
        for store, holder in ((other, "bob#1"), (one, "cat#1")):
            answer = await store.acquire("name", holder, 30)
            if isinstance(answer, Granted):
                assert answer.grant.token == old.token + 1
                assert 30 <= waited <= 61
                return
            assert answer.remaining is not None
        for clock in (one_clock, other_clock):
            clock.advance(10)
        waited += 10
        assert waited < 300


async def test_two_boots_that_stamp_in_turn_leave_a_live_holder_alone(boot: Boot) -> None:
    stores = [boot("holder's", 1_000.0), boot("one", 5.0), boot("other", 70.0)]
    old = await claimed(stores[0][0], "ann#1", 30)
    for _ in range(20):
        for store, _clock in stores[1:]:
            assert isinstance(await store.acquire("name", "bob#1", 30), HeldBy)
        for _store, clock in stores:
            clock.advance(29)
        assert list(await stores[0][0].renew([old], 30)) == [Granted(old)]


async def test_a_holder_that_repeats_its_request_counts_as_alive(boot: Boot) -> None:
    before, before_clock = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("after", 5.0)
    other, _ = boot("other", 5.0)
    for _ in range(3):
        assert isinstance(await after.acquire("name", "bob#1", 30), HeldBy)
        assert isinstance(await other.acquire("name", "cat#1", 30), HeldBy)
        clock.advance(20)
        before_clock.advance(20)
        assert await before.acquire("name", "ann#1", 30) == Granted(old)


async def test_a_row_of_another_boot_may_be_released_by_its_holder(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, _ = boot("after", 5.0)
    assert await after.release(old) == Released(old)
    assert await after.inspect("name") == Vacant("name", old.token)


async def test_a_row_of_another_boot_may_be_acquired_again_by_its_holder(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, _ = boot("after", 5.0)
    assert await after.acquire("name", "ann#1", 10) == Granted(old)


async def test_inspecting_a_row_of_another_boot_stamps_nothing(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("after", 5.0)
    for _ in range(2):
        assert await after.inspect("name") == HeldBy("name", "ann#1", old.token, 30.0)
        clock.advance(60)
    assert await after.ask_to_resign("name") is True
    assert list(await after.renew([old], 10)) == [Granted(old, resign_asked=True)]


async def test_a_name_released_before_a_boot_is_free_after_it(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    await before.release(old)
    after, _ = boot("after", 5.0)
    assert await after.inspect("name") == Vacant("name", old.token)
    assert (await claimed(after, "bob#1", 10)).token == old.token + 1


async def test_a_wrong_token_is_lost_in_another_boot_too(boot: Boot) -> None:
    before, _ = boot("before", 1_000.0)
    old = await claimed(before, "ann#1", 30)
    wrong = Grant(old.name, old.holder, old.token + 1)
    after, _ = boot("after", 5.0)
    assert list(await after.renew([wrong], 10)) == [Lost(wrong)]
    assert await after.release(wrong) == Lost(wrong)


# --- the same boot, and a clock that went back ---


async def test_a_row_that_ends_later_than_its_ttl_counts_as_another_boots(boot: Boot) -> None:
    """A virtual machine was set back to a snapshot of days ago, and the disk with the file was not."""
    before, _ = boot("same", 1_000_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("same", 1_000.0)
    assert await after.inspect("name") == HeldBy("name", "ann#1", old.token, 30.0)
    assert await after.acquire("name", "bob#1", 10) == HeldBy("name", "ann#1", old.token, 30.0)
    clock.advance(29.9)
    assert isinstance(await after.acquire("name", "bob#1", 10), HeldBy)
    clock.advance(0.2)
    assert (await claimed(after, "bob#1", 10)).token == old.token + 1


@pytest.mark.parametrize("again", [False, True], ids=["renewed", "acquired again"])
async def test_a_live_holder_restamps_a_row_that_ends_too_late(boot: Boot, again: bool) -> None:
    before, _ = boot("same", 1_000_000.0)
    old = await claimed(before, "ann#1", 30)
    after, clock = boot("same", 1_000.0)
    if again:
        assert await after.acquire("name", "ann#1", 10) == Granted(old)
    else:
        assert list(await after.renew([old], 10)) == [Granted(old)]
    assert await after.inspect("name") == HeldBy("name", "ann#1", old.token, 10.0)
    clock.advance(10)
    assert await after.inspect("name") == Vacant("name", old.token)


@pytest.mark.parametrize("again", [False, True], ids=["renewed", "acquired again"])
async def test_a_shorter_ttl_does_not_shorten_a_lease(boot: Boot, again: bool) -> None:
    store, clock = boot("same", 1_000_000.3)
    old = await claimed(store, "ann#1", 30)
    for passed in (0.1, 9.9, 10.0):
        clock.advance(passed)
        if again:
            assert await store.acquire("name", "ann#1", 5) == Granted(old)
        else:
            assert list(await store.renew([old], 5)) == [Granted(old)]
    seen = await store.inspect("name")
    assert isinstance(seen, HeldBy)
    assert seen.remaining == pytest.approx(10.0)
    clock.advance(9.9)
    assert isinstance(await store.acquire("name", "bob#1", 5), HeldBy)
    assert list(await store.renew([old], 5)) == [Granted(old)]
    clock.advance(5.1)
    assert (await claimed(store, "bob#1", 5)).token == old.token + 1


def test_this_boot_has_a_lasting_name() -> None:
    assert this_boot() == this_boot()
    assert this_boot()


def test_guesses_at_one_boot_agree() -> None:
    assert common_name("booted:1000", ["other", "booted:2000", "booted:1040"]) == "booted:1040"
    assert common_name("booted:1000", ["booted:1061", "booted:939"]) == "booted:1000"
    assert common_name("7c5f… time:[4026531834]", ["booted:1000", "8d6a…"]) == "7c5f… time:[4026531834]"


EARLIER, LATER = "0c1d2e3f-0000-4000-8000-00000000000a", "0c1d2e3f-0000-4000-8000-00000000000b"


@pytest.mark.parametrize(
    ("before", "after", "vacant_for"),
    [
        (EARLIER, LATER, 500.0),
        (f"{EARLIER} time:[1]", f"{LATER} time:[1]", 500.0),
        (f"{EARLIER} time:[1]", f"{EARLIER} time:[2]", None),  # both may be alive, and their clocks can't be compared
        ("booted:1000", "booted:9000", None),  # a guess may be wrong
    ],
)
async def test_a_name_released_in_an_earlier_boot_is_vacant_since_this_one(
    boot: Boot, before: str, after: str, vacant_for: float | None
) -> None:
    store, _ = boot(before, 1_000.0)
    assert isinstance(await store.release(await claimed(store, "ann#1", 30)), Released)
    later, _ = boot(after, 500.0)
    found = await later.inspect("name")
    assert isinstance(found, Vacant)
    assert found.vacant_for == vacant_for
