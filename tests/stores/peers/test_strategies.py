"""Lowest, Bully and Ring alone: the member that claims, and the number of messages, within the papers' bounds."""

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


class ElectionRun:
    """One election in a fleet, and a network that delivers every message, in order, and at once."""

    def __init__(
        self, kind: type[ElectionStrategy], size: int, *, dead: tuple[int, ...] = (), idle: tuple[int, ...] = ()
    ) -> None:
        self.now = 0.0
        self.messages = 0
        self.claimed: list[int] = []
        self.dead: set[tuple[int, int]] = set()
        """Links (from, to) that lose every message."""
        self._underway: deque[tuple[int, int, strategies.Send]] = deque()
        members = tuple(f"m{number}:1" for number in range(size))
        self.fleet = Fleet(members, None, quorum="none")
        self.members: dict[int, ElectionStrategy] = {}
        for me in range(size):
            if me in dead:
                continue
            fleet = Fleet(members, me, quorum="none")
            liveness = Liveness(fleet, random.Random(me), 0.0)
            for other in range(size):
                if other not in dead:
                    liveness.heard(other, 1e6)
            self.members[me] = kind("chair", fleet, liveness, random.Random(me))
            self.members[me].campaigns = me not in idle  # a candidate that has not begun

    def begin(self, *numbers: int) -> None:
        for me in numbers:
            self.members[me].campaigns = False
            self._do(me, strategies.Campaign())
        self.run()

    def _do(self, me: int, event: strategies.Input) -> None:
        for effect in self.members[me].handle(event, self.now):
            match effect:
                case strategies.Send(to, _):
                    self.messages += 1
                    self._underway.append((me, to, effect))
                case strategies.ClaimNow():
                    self.claimed.append(me)

    def run(self, seconds: float = 0.0) -> None:
        """Deliver all messages, and let time pass."""
        until = self.now + seconds
        while True:
            while self._underway:
                source, to, sent = self._underway.popleft()
                if to in self.members and (source, to) not in self.dead:
                    self._do(to, strategies.Received(source, sent.message))
            due = min(self.members, key=lambda me: self.members[me].wake_at)
            if self.members[due].wake_at > until or self.claimed:
                break
            self.now = max(self.now, self.members[due].wake_at)
            self._do(due, strategies.Tick())
        self.now = until


@pytest.mark.parametrize("size", SIZES)
def test_ring_begun_by_one_takes_at_most_3n_minus_1_messages(size: int) -> None:
    counts = []
    for starter in range(size):
        run = ElectionRun(Ring, size)
        run.begin(starter)
        assert run.claimed == [size - 1]
        counts.append(run.messages)
    assert max(counts) == 3 * size - 1  # begun by the one whose message takes longest to meet the highest
    assert min(counts) == 2 * size  # begun by the highest


@pytest.mark.parametrize("size", SIZES)
def test_ring_begun_by_all_at_once_stays_within_chang_and_roberts(size: int) -> None:
    rng = random.Random(size)
    for _ in range(20):
        run = ElectionRun(Ring, size)
        run.begin(*rng.sample(range(size), size))
        assert run.claimed == [size - 1]
        assert run.messages <= size * (size + 1) // 2 + size


def test_ring_skips_dead_members_and_passes_through_those_without_a_candidate() -> None:
    run = ElectionRun(Ring, 6, dead=(5, 2), idle=(4,))
    run.begin(0)
    assert run.claimed == [3]
    assert run.messages <= 3 * 4 - 1


def test_ring_drops_a_message_without_an_owner() -> None:
    run = ElectionRun(Ring, 4)
    run.members[0].campaigns = False
    run._do(0, strategies.Received(3, RingElection("chair", 9, 0)))
    run.run()
    assert not run.claimed
    assert run.messages <= 2 * 4 + 1


def test_ring_claims_when_a_message_was_lost() -> None:
    run = ElectionRun(Ring, 3)
    for each in run.members.values():
        each.campaigns = False
    run._do(1, strategies.Campaign())
    run._underway.clear()
    run.run(60.0)
    assert run.claimed == [1]


def test_ring_claims_when_an_election_has_no_result_because_one_link_is_dead() -> None:
    run = ElectionRun(Ring, 3)
    run.dead.add((1, 2))  # 1 receives heartbeats of 2, and passes everything on to it
    for each in run.members.values():
        each.campaigns = False
    run.begin(0, 1)
    assert not run.claimed
    run.run(run.fleet.election_lasts - run.fleet.answer_within)  # while they still campaign
    assert run.claimed


def test_ring_later_messages_do_not_delay_the_claim() -> None:
    run = ElectionRun(Ring, 3)
    runner = run.members[0]
    runner.campaigns = False
    runner.handle(strategies.Campaign(), 0.0)
    due = runner.wake_at
    for number in range(20):
        runner.handle(strategies.Received(2, RingElection("chair", 1, 1)), due * number / 20)
    assert runner.handle(strategies.Tick(), due) == [strategies.ClaimNow()]


@pytest.mark.parametrize("size", SIZES)
def test_bully_takes_n_squared_minus_1_messages_at_most(size: int) -> None:
    for starters in ([0], list(range(size)), list(range(size))[::-1], [size - 1]):
        run = ElectionRun(Bully, size)
        run.begin(*starters)
        run.run(60.0)
        assert run.claimed == [size - 1]
        claims = size - 1
        assert run.messages + claims <= size**2 - 1
        if starters == [0]:
            assert run.messages + claims == size**2 - 1  # the paper's worst case: the lowest begins
        if starters == [size - 1]:
            assert run.messages == 0  # its best: the highest does


def test_bully_elects_the_highest_live_candidate() -> None:
    run = ElectionRun(Bully, 6, dead=(5,), idle=(4, 1))
    run.begin(0)
    run.run(60.0)
    assert run.claimed == [3]


def test_bully_begins_again_when_the_member_that_took_over_dies() -> None:
    run = ElectionRun(Bully, 3)
    run._do(0, strategies.Withdraw())
    assert run.members[0].handle(strategies.Campaign(), 0.0) == [
        strategies.Send(n, BullyElection("chair")) for n in (1, 2)
    ]
    run.members[0].handle(strategies.Received(2, BullyOk("chair")), 0.0)
    for dead in (1, 2):
        del run.members[dead]
    run.members[0]._liveness._heard.clear()
    run.run(60.0)
    assert run.claimed == [0]


@pytest.mark.parametrize("size", SIZES)
def test_lowest_takes_no_message(size: int) -> None:
    run = ElectionRun(Lowest, size)
    run.begin(*range(size))
    assert run.claimed == [0]
    assert run.messages == 0


def test_lowest_waits_for_each_live_member_before_it() -> None:
    run = ElectionRun(Lowest, 5, dead=(0,), idle=(1, 2))
    for each in run.members.values():
        each.campaigns = False
    run.begin(3)
    assert not run.claimed
    run.run(2.1 * run.fleet.answer_within)
    assert run.claimed == [3]


@pytest.mark.parametrize("kind", [Lowest, Bully, Ring])
def test_a_member_that_withdraws_claims_nothing(kind: type[ElectionStrategy]) -> None:
    run = ElectionRun(kind, 3, idle=(1, 2))
    run.begin(0)
    run.claimed.clear()
    run._do(0, strategies.Withdraw())
    run.run(60.0)
    assert not run.claimed


@pytest.mark.parametrize("kind", [Lowest, Bully, Ring])
def test_a_failed_claim_is_followed_by_another_after_a_pause(kind: type[ElectionStrategy]) -> None:
    run = ElectionRun(kind, 1)
    run.members[0].campaigns = False
    run.begin(0)
    assert run.claimed == [0]
    run.claimed.clear()
    run._do(0, strategies.ClaimFailed())
    run.run(0.4 * run.fleet.answer_within)
    assert not run.claimed
    run.run(3 * run.fleet.answer_within)
    assert run.claimed == [0]
