"""Processes that receive from one queue of RabbitMQ, simulated from many seeds; and planted bugs, all found."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tenure._backends.rabbitmq.receiving import (
    AT_ONCE,
    BULK_MIN,
    HOLD_AFTER,
    NEVER,
    SOON,
    UNITS_MAX,
    Answer,
    Arrived,
    Await,
    Begin,
    Came,
    Claim,
    Close,
    Closed,
    Count,
    Counted,
    Effect,
    End,
    GiveBack,
    GiveUp,
    Hint,
    Input,
    Listen,
    Receiving,
    Taken,
    Tick,
    Unlisten,
    Verdict,
    Waiting,
)
from tests.sim.receiving import World

SEEDS = 40


def first_finding(make_machine: type[Receiving] = Receiving, seeds: int = SEEDS) -> str:
    """Return what is wrong in the first run in which anything is; empty if in none."""
    for seed in range(seeds):
        try:
            found = World(seed, make_machine).run()
        except AssertionError as error:
            found = str(error)
        if found:
            return f"seed {seed}: {found}"
    return ""


@cache
def runs() -> tuple[World, ...]:
    return tuple(World(seed) for seed in range(SEEDS))


def test_nothing_is_counted_that_nobody_had_and_all_is_handled_once() -> None:
    assert [(world.seed, found) for world in runs() if (found := world.run())] == []


def test_the_runs_see_what_can_go_wrong() -> None:
    """The seeds bring enough of everything: else the test above would prove little."""
    faults: Counter[str] = Counter()
    for world in runs():
        world.run()  # it has been, or is so now
        faults += world.faults
    assert sum(world.ended for world in runs()) > 1_000
    assert sum(world.copies for world in runs()) > 20
    assert sum(len(world.closes) for world in runs()) >= 5
    assert min(faults[one] for one in ("close", "end", "lose_channel")) >= 5


# --- by hand ---


def machine_that_listens() -> Receiving:
    machine = Receiving()
    assert machine.handle(Listen(), 0.0) == [Begin(1, 1)]
    assert machine.handle(Claim(1, 10, 1_000), 0.0) == [Await()]
    return machine


def test_a_free_unit_stays_when_the_last_listener_goes() -> None:
    machine = machine_that_listens()
    assert machine.handle(Unlisten(), 1.0) == []
    assert machine.free == 1
    assert machine.wake_at == NEVER


def test_what_comes_to_a_unit_of_nobody_is_given_back_from_one_that_is_ended() -> None:
    machine = Receiving()
    machine.handle(Listen(), 0.0)
    machine.handle(Unlisten(), 1.0)
    assert machine.handle(Came(1, 7, 10), 60.0) == [End(1), GiveBack(7)]
    assert machine.consumers
    assert machine.handle(Verdict(7), 60.0) == []
    assert not machine.consumers


def test_a_lone_message_of_a_short_handler_costs_no_consumer() -> None:
    machine = Receiving()
    machine.handle(Listen(), 0.0)
    assert machine.handle(Came(1, 7, 10), 60.0) == [Hint()]
    assert machine.take(10, 1_000) == (7,)
    assert machine.handle(Taken(9), 60.0) == []
    assert machine.wake_at == 60.0 + SOON
    assert machine.handle(Verdict(7), 60.0 + SOON / 2) == []  # its unit is free again
    assert machine.handle(Tick(), 60.0 + SOON) == []
    assert (machine.free, machine.wake_at) == (1, NEVER)


def test_another_unit_is_begun_beside_a_handler_that_goes_on() -> None:
    machine = Receiving()
    machine.handle(Listen(), 0.0)
    machine.handle(Came(1, 7, 10), 60.0)
    machine.take(10, 1_000)
    machine.handle(Taken(9), 60.0)
    assert machine.handle(Tick(), 60.0 + SOON) == [Begin(2, 1), Hint()]  # more may be ready: it asks for that
    assert machine.handle(Came(2, 8, 10), 60.002) == [Hint()]  # there is more: the next one doesn't wait
    assert not machine.is_calm
    machine.take(10, 1_000)
    assert machine.handle(Taken(8), 60.002) == [Begin(3, 1)]


def test_what_is_put_back_is_taken_next() -> None:
    machine = Receiving()
    machine.handle(Listen(), 0.0)
    machine.waiting.extend(Waiting(message, 60.0, 10) for message in (1, 2, 3))
    taken = list(machine.waiting)[:2]
    assert machine.take(2, 1_000) == (1, 2)
    machine.put_back(taken)
    assert machine.take(3, 1_000) == (1, 2, 3)


def test_a_bulk_is_a_share_of_what_is_ready() -> None:
    machine = machine_that_listens()
    machine._is_backlog = True
    machine._claims[0].is_counted = False
    machine._claims[0].limit = 100
    assert machine.handle(Counted(64, 0), 0.0) == [Begin(2, 64 // 4), Await()]
    machine._claims[0].is_busy = False
    assert not [one for one in machine._counted(4 * BULK_MIN - 1, 1, 0.0) if isinstance(one, Begin) and one.credit > 1]


def test_a_close_gives_back_what_was_on_its_way() -> None:
    machine = Receiving()
    machine.handle(Listen(), 0.0)
    assert machine.handle(Close(), 1.0) == [End(1), Await()]  # it is calm, so it doesn't wait
    assert machine.handle(Came(1, 7, 10), 1.0) == [GiveBack(7)]
    assert machine.handle(Arrived(), 1.1) == []
    assert machine.handle(Verdict(7), 1.2) == [Closed()]


def test_few_are_given_back_at_once() -> None:
    machine = machine_that_listens()
    machine._claims.clear()
    machine._begin(10)
    machine.handle(Unlisten(), 1.0)
    given = [one for tag in range(10) for one in machine.handle(Came(2, tag, 10), 1.0 + HOLD_AFTER)]
    assert given == [Await(), End(2), *(GiveBack(tag) for tag in range(AT_ONCE))]  # once it is full
    assert machine.handle(Verdict(0), 3.0) == [GiveBack(AT_ONCE)]


def test_none_is_begun_behind_an_answer_whose_listener_may_go() -> None:
    machine = machine_that_listens()
    machine._ready = 20
    machine.handle(Came(1, 7, 10), 0.1)
    assert machine.handle(Arrived(), 0.1) == [Answer(1, (7,), is_more=True), Hint()]  # for those who listen on
    assert machine.handle(Claim(2, 9, 1_000), 0.1) == [Count()]  # it wants more
    done = machine.handle(Counted(20, 1), 0.1)
    assert done == [*(Begin(2 + number, 1) for number in range(UNITS_MAX)), Await()]


def test_a_listener_is_told_when_the_claim_of_another_gets_what_came() -> None:
    """Its unit is taken, and nobody else would begin one for it."""
    machine = machine_that_listens()
    machine.handle(Came(1, 7, 10), 0.1)
    assert machine.handle(Arrived(), 0.1)[-1] == Hint()
    assert Begin(2, 1) in machine.handle(Claim(2, 1, 1_000), 0.1)


def test_a_claim_that_was_given_up_takes_no_hint_with_it() -> None:
    machine = machine_that_listens()
    machine.handle(GiveUp(1), 0.1)
    machine.handle(Came(1, 7, 10), 0.2)
    assert Hint() in machine.handle(Arrived(), 0.2)
    assert machine.handle(Claim(2, 1, 1_000), 0.2) == [Answer(2, (7,), is_more=False)]


# --- bugs ---


class EndsWhatIsFree(Receiving):
    """It ends its consumers when the last listener goes, full or not."""

    def handle(self, given: Input, now: float) -> list[Effect]:
        done = super().handle(given, now)
        if isinstance(given, Unlisten) and not self.listeners:
            done += [self._end(tag) for tag, one in self.consumers.items() if one.is_free]
        return done


class EndsABulkThatIsNotFull(Receiving):
    """It lets a bulk hold more than is ready, and ends it when all has come that was there."""

    def _counted(self, ready: int, others: int, now: float) -> list[Effect]:
        return super()._counted(1_000_000, 1, now)

    def _arrived(self, now: float) -> list[Effect]:
        unfilled = [tag for tag, one in self.consumers.items() if one.credit > 1 and one.is_free]
        return [*(self._end(tag) for tag in unfilled), *super()._arrived(now)]


class UsesATagAgain(Receiving):
    """It begins a consumer with the tag of one that was ended."""

    def _begin(self, credit: int) -> Begin:
        free = next(tag for tag in range(1, len(self.consumers) + 2) if tag not in self.consumers)
        self._next = free
        done = super()._begin(credit)
        self._next = max(self.consumers) + 1
        return done


class KeepsWhatNobodyAsksFor(Receiving):
    """It gives nothing back."""

    def _give_back(self, now: float) -> list[Effect]:
        return []


class ClosesAtOnce(Receiving):
    """It doesn't wait for free units to be filled."""

    def handle(self, given: Input, now: float) -> list[Effect]:
        if isinstance(given, Close):
            self._arrivals.clear()
        return super().handle(given, now)


class NeverCloses(Receiving):
    """It waits for ever for free units to be filled."""

    def _close(self, now: float) -> list[Effect]:
        return [] if self.free else super()._close(now)


@pytest.mark.parametrize(
    "machine",
    [
        EndsWhatIsFree,
        EndsABulkThatIsNotFull,
        UsesATagAgain,
        KeepsWhatNobodyAsksFor,
        ClosesAtOnce,
        NeverCloses,
    ],
)
def test_a_planted_bug_is_found(machine: type[Receiving]) -> None:
    assert first_finding(machine)
