"""The locks that only this process can renew and settle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from tenure._queue import receipts
from tenure._queue.message import NO_HEADERS, Delivery, SessionLock
from tenure._queue.receipts import EXPIRE_EVERY
from tenure._queue.verdicts import Abandon, Complete, Settlement
from tenure.testing import ManualClock

LOCK = 30.0


@dataclass(slots=True, eq=False)
class Held(receipts.Held):
    name: str
    ends_at: float


Receipts = receipts.Receipts[Held]


def delivery(sequence: int = 1, queue: str = "orders", token: str = "t") -> Delivery:
    return Delivery(queue, sequence, token, "id", b"", NO_HEADERS, 1, 0.0, 0.0)


def test_a_lock_is_found_until_it_ends_and_is_known_until_it_is_forgotten() -> None:
    clock = ManualClock()
    kept, one = Receipts(clock), delivery()
    assert kept.find(one) is kept.known(one) is kept.forget(one) is None
    held = Held("a", clock.now() + LOCK)
    assert kept.add(one, held) is one
    assert kept.find(one) is held
    clock.advance(LOCK)
    assert kept.find(one) is None
    assert list(kept.find_all([Settlement(one, Complete())])) == []
    assert kept.known(one) is held
    held.ends_at += LOCK
    assert kept.find(one) is held
    assert kept.forget(one) is held
    assert kept.find(one) is kept.known(one) is None


@pytest.mark.parametrize("other", [delivery(2), delivery(queue="others"), delivery(token="u")])
def test_nobody_finds_the_lock_of_another_delivery(other: Delivery) -> None:
    kept = Receipts(ManualClock())
    kept.add(delivery(), Held("a", math.inf))
    assert kept.find(other) is None
    assert kept.find(SessionLock("orders", "1", "t", 0.0)) is None
    assert list(kept.find_all([Settlement(other, Complete())])) == []


@pytest.mark.parametrize(("free", "taken"), [(None, [7, 8, 9]), (40, [7, 40, 41])])
def test_messages_of_the_same_sequence_have_locks_of_their_own(free: int | None, taken: list[int]) -> None:
    kept = Receipts(ManualClock())
    got = [kept.add(delivery(7), Held(name, math.inf), free) for name in "abc"]
    assert [one.sequence for one in got] == taken
    assert [held.name for one in got if (held := kept.find(one)) is not None] == ["a", "b", "c"]
    assert kept.add(delivery(7, token="u"), Held("d", math.inf)).sequence == 7


def test_of_several_verdicts_on_a_delivery_the_first_is_passed() -> None:
    kept = Receipts(ManualClock())
    one, two = (kept.add(delivery(number), Held(str(number), math.inf)) for number in (1, 2))
    verdicts = [Settlement(one, Abandon()), Settlement(delivery(3), Complete())]
    verdicts += [Settlement(one, Complete()), Settlement(two, Complete())]
    found = [(place, verdict, held.name) for place, (_, verdict), held in kept.find_all(verdicts)]
    assert found == [(0, Abandon(), "1"), (3, Complete(), "2")]


def test_what_is_gone_is_forgotten_and_counted() -> None:
    kept = Receipts(ManualClock())
    for number, name in enumerate("aba"):
        kept.add(delivery(number), Held(name, math.inf))
    kept.add(delivery(queue="others"), Held("b", math.inf))
    assert [one.name for one in kept.of("orders")] == ["a", "b", "a"]
    before = kept.moves
    assert [one.name for one in kept.forget_all(lambda held: held.name == "a")] == ["a", "a"]
    assert kept.moves == before + 2
    assert [one.name for one in kept.of("orders")] == ["b"]


@pytest.mark.parametrize("keeps", [0.0, 600.0])
def test_locks_that_nobody_settles_are_forgotten_in_time(keeps: float) -> None:
    clock = ManualClock()
    kept = Receipts(clock, keeps)
    assert kept.expire()
    ended, lasting = (kept.add(delivery(number), Held("a", clock.now() + number * LOCK)) for number in (1, 1_000))
    clock.advance(LOCK + keeps + 1.0)
    assert kept.expire() is (keeps > 0), "it is done once a minute"
    clock.advance(EXPIRE_EVERY)
    assert kept.expire()
    assert not kept.expire()
    assert kept.known(ended) is None
    assert kept.known(lasting) is not None
    if keeps:
        late = kept.add(delivery(), Held("late", clock.now()))
        clock.advance(keeps - 1.0)
        assert kept.expire()
        assert kept.known(late) is not None
