"""Lowest, Bully and Ring by themselves: who claims, and how many messages that takes, against the papers' bounds."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tenure._backends.peers import strategies
from tenure._backends.peers.bully import Bully
from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.liveness import Liveness
from tenure._backends.peers.lowest import Lowest
from tenure._backends.peers.ring import Ring
from tenure._backends.peers.strategies import ElectionStrategy
from tenure._backends.peers.wire import BullyElection, BullyOk, RingElection

SIZES = range(2, 26)


class Track:
    """Races of one fleet, and a network that delivers every message, in order, and at once."""

    def __init__(
        self, kind: type[ElectionStrategy], size: int, *, dead: tuple[int, ...] = (), idle: tuple[int, ...] = ()
    ) -> None:
        self.now = 0.0
        self.messages = 0
        self.claimed: list[int] = []
        self.dead: set[tuple[int, int]] = set()
        """Ways on which nothing arrives."""
        self._underway: deque[tuple[int, int, strategies.Send]] = deque()
        members = tuple(f"m{number}:1" for number in range(size))
        self.fleet = Fleet(members, None, quorum="none")
        self.races: dict[int, ElectionStrategy] = {}
        for me in range(size):
            if me in dead:
                continue
            fleet = Fleet(members, me, quorum="none")
            liveness = Liveness(fleet, random.Random(me), 0.0)
            for other in range(size):
                if other not in dead:
                    liveness.heard(other, 1e6)
            self.races[me] = kind("chair", fleet, liveness, random.Random(me))
            self.races[me].campaigns = me not in idle  # wants it, and has not begun

    def begin(self, *who: int) -> None:
        for me in who:
            self.races[me].campaigns = False
            self._do(me, strategies.Campaign())
        self.run()

    def _do(self, me: int, event: strategies.Input) -> None:
        for effect in self.races[me].handle(event, self.now):
            match effect:
                case strategies.Send(to, _):
                    self.messages += 1
                    self._underway.append((me, to, effect))
                case strategies.ClaimNow():
                    self.claimed.append(me)

    def run(self, seconds: float = 0.0) -> None:
        """Deliver everything, and let time pass."""
        until = self.now + seconds
        while True:
            while self._underway:
                source, to, told = self._underway.popleft()
                if to in self.races and (source, to) not in self.dead:
                    self._do(to, strategies.Received(source, told.message))
            due = min(self.races, key=lambda me: self.races[me].wake_at)
            if self.races[due].wake_at > until or self.claimed:
                break
            self.now = max(self.now, self.races[due].wake_at)
            self._do(due, strategies.Tick())
        self.now = until


@pytest.mark.parametrize("size", SIZES)
def test_ring_begun_by_one_takes_at_most_3n_minus_1_messages(size: int) -> None:
    counts = []
    for starter in range(size):
        track = Track(Ring, size)
        track.begin(starter)
        assert track.claimed == [size - 1]
        counts.append(track.messages)
    assert max(counts) == 3 * size - 1  # begun by the one whose message takes longest to meet the highest
    assert min(counts) == 2 * size  # begun by the highest


@pytest.mark.parametrize("size", SIZES)
def test_ring_begun_by_all_at_once_stays_within_chang_and_roberts(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        track = Track(Ring, size)
        track.begin(*rng.sample(range(size), size))
        assert track.claimed == [size - 1]
        assert track.messages <= size * (size + 1) // 2 + size


def test_ring_passes_over_the_dead_and_through_those_who_do_not_want_it() -> None:
    track = Track(Ring, 6, dead=(5, 2), idle=(4,))
    track.begin(0)
    assert track.claimed == [3]
    assert track.messages <= 3 * 4 - 1


def test_ring_drops_what_has_no_owner_any_more() -> None:
    track = Track(Ring, 4)
    track.races[0].campaigns = False
    track._do(0, strategies.Received(3, RingElection("chair", 9, 0)))
    track.run()
    assert not track.claimed
    assert track.messages <= 2 * 4 + 1


def test_ring_claims_when_a_message_was_lost() -> None:
    track = Track(Ring, 3)
    for each in track.races.values():
        each.campaigns = False
    track._do(1, strategies.Campaign())
    track._underway.clear()
    track.run(60.0)
    assert track.claimed == [1]


def test_ring_claims_when_a_run_leads_to_nothing_because_one_way_is_dead() -> None:
    track = Track(Ring, 3)
    track.dead.add((1, 2))  # 1 hears 2, takes it for alive, and passes everything on to it
    for each in track.races.values():
        each.campaigns = False
    track.begin(0, 1)
    assert not track.claimed
    track.run(track.fleet.election_lasts - track.fleet.answer_within)  # while they still stand
    assert track.claimed


def test_in_the_ring_what_is_heard_meanwhile_does_not_put_the_claim_off() -> None:
    track = Track(Ring, 3)
    runner = track.races[0]
    runner.campaigns = False
    runner.handle(strategies.Campaign(), 0.0)
    due = runner.wake_at
    for number in range(20):
        runner.handle(strategies.Received(2, RingElection("chair", 1, 1)), due * number / 20)
    assert runner.handle(strategies.Tick(), due) == [strategies.ClaimNow()]


@pytest.mark.parametrize("size", SIZES)
def test_bully_takes_n_squared_minus_1_messages_at_most(size: int) -> None:
    for starters in ([0], list(range(size)), list(range(size))[::-1], [size - 1]):
        track = Track(Bully, size)
        track.begin(*starters)
        track.run(60.0)
        assert track.claimed == [size - 1]
        claims = size - 1
        assert track.messages + claims <= size**2 - 1
        if starters == [0]:
            assert track.messages + claims == size**2 - 1  # the paper's worst case: the lowest begins
        if starters == [size - 1]:
            assert track.messages == 0  # its best: the highest does


def test_bully_elects_the_highest_that_lives_and_wants_it() -> None:
    track = Track(Bully, 6, dead=(5,), idle=(4, 1))
    track.begin(0)
    track.run(60.0)
    assert track.claimed == [3]


def test_bully_begins_anew_when_who_took_over_dies() -> None:
    track = Track(Bully, 3)
    track._do(0, strategies.Withdraw())
    assert track.races[0].handle(strategies.Campaign(), 0.0) == [
        strategies.Send(n, BullyElection("chair")) for n in (1, 2)
    ]
    track.races[0].handle(strategies.Received(2, BullyOk("chair")), 0.0)
    for dead in (1, 2):
        del track.races[dead]
    track.races[0]._liveness._heard.clear()
    track.run(60.0)
    assert track.claimed == [0]


@pytest.mark.parametrize("size", SIZES)
def test_lowest_takes_no_message_at_all(size: int) -> None:
    track = Track(Lowest, size)
    track.begin(*range(size))
    assert track.claimed == [0]
    assert track.messages == 0


def test_lowest_waits_for_each_that_comes_before() -> None:
    track = Track(Lowest, 5, dead=(0,), idle=(1, 2))
    for each in track.races.values():
        each.campaigns = False
    track.begin(3)
    assert not track.claimed
    track.run(2.1 * track.fleet.answer_within)
    assert track.claimed == [3]


@pytest.mark.parametrize("kind", [Lowest, Bully, Ring])
def test_who_stands_back_claims_nothing(kind: type[ElectionStrategy]) -> None:
    track = Track(kind, 3, idle=(1, 2))
    track.begin(0)
    track.claimed.clear()
    track._do(0, strategies.Withdraw())
    track.run(60.0)
    assert not track.claimed


@pytest.mark.parametrize("kind", [Lowest, Bully, Ring])
def test_who_was_beaten_tries_again_after_a_pause(kind: type[ElectionStrategy]) -> None:
    track = Track(kind, 1)
    track.races[0].campaigns = False
    track.begin(0)
    assert track.claimed == [0]
    track.claimed.clear()
    track._do(0, strategies.ClaimFailed())
    track.run(0.4 * track.fleet.answer_within)
    assert not track.claimed
    track.run(3 * track.fleet.answer_within)
    assert track.claimed == [0]
