"""Machines of one fleet together: late, lost and overtaken messages, and their outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from tenure._backends.peers.fleet import Fleet, Quorum, Strategy
from tenure._backends.peers.machine import (
    Acquire,
    Answer,
    AskToResign,
    Hint,
    Input,
    Inspect,
    Machine,
    Names,
    Outcome,
    Received,
    Release,
    Renew,
    Send,
    Tick,
)
from tenure._backends.peers.wire import (
    BullyElection,
    Claim,
    Message,
    Refusal,
    ReleaseRequest,
    RingElected,
    RingElection,
    Vote,
)
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer

TTL = 15.0
STEP = 0.01


class Cluster:
    """Members that receive each other's messages at once, unless a way is cut."""

    def __init__(
        self,
        size: int = 3,
        *,
        strategy: Strategy = "lowest",
        quorum: Quorum = "majority",
        ahead: dict[int, float] | None = None,
    ) -> None:
        self.size = size
        self.ahead = ahead or {}
        """How many seconds the wall clock of a member is ahead."""
        self.strategy = strategy
        self.quorum = quorum
        self.now = 0.0
        self.cuts: set[tuple[int, int]] = set()
        self.answers: dict[int, Outcome] = {}
        self.sent: list[tuple[int, int, Message]] = []
        self.hinted: list[int] = []
        self._count = itertools.count(1)
        self.machines: dict[int, Machine] = {}
        for number in range(size):
            self.start(number)
        self.run(1.5)  # until each has received a heartbeat of all others

    def start(self, number: int) -> None:
        """Start a member, with an empty memory."""
        fleet = Fleet(tuple(f"m{each}:1" for each in range(self.size)), number, self.strategy, self.quorum, TTL)
        nonce = 1_000_000 * next(self._count)
        floor = 1 + int(1000 * (self.now + self.ahead.get(number, 0.0)))
        self.machines[number] = Machine(fleet, random.Random(nonce), floor=floor, nonce=nonce, now=self.now)
        self.feed(number, Tick())

    def feed(self, number: int, event: Input) -> list[Message]:
        """Give *event* to a member, deliver its messages, and return its effects."""
        said = []
        for effect in self.machines[number].handle(event, self.now):
            match effect:
                case Send(to, message):
                    said.append(message)
                    self.sent.append((number, to, message))
                    if to in self.machines and (number, to) not in self.cuts:
                        self.feed(to, Received(number, message))
                case Answer(ask, answer):
                    assert ask not in self.answers
                    self.answers[ask] = answer
                case Hint():
                    self.hinted.append(number)
        return said

    def ask(self, number: int, question: Callable[[int], Input]) -> int:
        ask = next(self._count)
        self.feed(number, question(ask))
        return ask

    def acquire(self, number: int, holder: str = "") -> int:
        holder = holder or f"h{number}"
        return self.ask(number, lambda ask: Acquire(ask, "chair", holder, TTL, {}))

    def lead(self, number: int, holder: str = "") -> Grant:
        ask = self.acquire(number, holder)
        self.run(5.0)
        granted = self.answers[ask]
        assert isinstance(granted, Granted), granted
        return granted.grant

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP
            for number, machine in list(self.machines.items()):
                if machine.wake_at <= self.now:
                    self.feed(number, Tick())

    def part(self, number: int) -> None:
        """Cut a member off from all others."""
        for other in range(self.size):
            self.cuts |= {(number, other), (other, number)}

    def count(self, *kinds: type[Message]) -> int:
        return sum(isinstance(message, kinds) for _, _, message in self.sent)


def test_a_lost_answer_is_not_given_again_after_a_newer_term() -> None:
    cluster = Cluster()
    old = cluster.lead(0)  # its answer counts as lost
    cluster.part(0)
    for _ in range(2):  # the candidate, which receives nothing, asks again
        again = cluster.acquire(0)
        cluster.run(TTL / 2 + 1)
        assert isinstance(cluster.answers[again], NoAnswer)
    newer = cluster.lead(2)
    assert newer.token > old.token
    del cluster.machines[1]
    cluster.run(1.0)
    cluster.start(1)  # and has lost its vote
    for _ in range(3):
        again = cluster.acquire(0)
        cluster.run(TTL / 2 + 1)
        assert isinstance(cluster.answers[again], NoAnswer)
    cluster.cuts.clear()
    cluster.run(1.0)
    again = cluster.acquire(0)
    cluster.run(5.0)
    answer = cluster.answers[again]
    assert not isinstance(answer, Granted) or answer.grant.token > newer.token, answer
    assert cluster.lead(0).token > newer.token  # the old claim does not keep the vote


def test_a_lost_answer_is_given_again_while_it_holds() -> None:
    cluster = Cluster()
    grant = cluster.lead(0)
    assert cluster.lead(0) == grant


@pytest.mark.parametrize("quorum", ["majority", "none"])
def test_a_renewal_overtaken_by_its_release_gets_no_vote(quorum: Quorum) -> None:
    cluster = Cluster(quorum=quorum)
    grant = cluster.lead(0)
    cluster.ask(0, lambda ask: Release(ask, grant))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(cluster.feed(1, Received(0, late))[0], Refusal)


def test_an_overtaken_renewal_gets_no_vote_of_a_member_that_missed_the_claim() -> None:
    cluster = Cluster()
    cluster.cuts |= {(0, 2), (2, 0)}
    grant = cluster.lead(0)
    cluster.cuts.clear()
    cluster.ask(0, lambda ask: Release(ask, grant))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(cluster.feed(2, Received(0, late))[0], Refusal)


def test_a_claim_that_failed_does_not_end_a_term() -> None:
    cluster = Cluster()
    cluster.cuts |= {(0, 2), (2, 0)}
    grant = cluster.lead(0)
    token = grant.token + 1
    assert isinstance(cluster.feed(2, Received(1, Claim(7, "chair", "x", token, TTL, False)))[0], Vote)
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(cluster.feed(2, Received(0, late))[0], Refusal)  # the other claim may be won
    cluster.feed(2, Received(1, ReleaseRequest(8, "chair", "x", token, won=False)))
    assert isinstance(cluster.feed(2, Received(0, late))[0], Vote)


def test_a_claim_that_was_won_ends_older_terms_even_if_it_is_over() -> None:
    cluster = Cluster()
    cluster.cuts |= {(0, 2), (2, 0)}
    grant = cluster.lead(0)
    newer, newest = grant.token + 1, grant.token + 2
    cluster.feed(2, Received(1, Claim(7, "chair", "x", newer, 1.0, False)))
    cluster.run(1.5)  # it may have been won, and is over
    cluster.feed(2, Received(1, Claim(9, "chair", "y", newest, TTL, False)))
    cluster.feed(2, Received(1, ReleaseRequest(10, "chair", "y", newest, won=False)))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(cluster.feed(2, Received(0, late))[0], Refusal)


def test_without_a_quorum_a_leader_with_an_older_term_leaves() -> None:
    cluster = Cluster(2, quorum="none")
    cluster.part(0)
    cluster.run(5.0)  # until each counts as dead for the other
    old = cluster.lead(0)
    newer = cluster.lead(1)
    while newer.token <= old.token:
        cluster.ask(1, lambda ask, grant=newer: Release(ask, grant))  # type: ignore[misc]
        cluster.ask(0, lambda ask: Renew(ask, old, TTL))
        newer = cluster.lead(1)
    assert isinstance(cluster.answers[cluster.ask(0, lambda ask: Renew(ask, old, TTL))], Granted)
    cluster.ask(1, lambda ask: Release(ask, newer))
    cluster.cuts.clear()
    cluster.run(2.0)
    cluster.ask(0, lambda ask: Renew(ask, old, TTL))
    renewed = cluster.ask(0, lambda ask: Renew(ask, old, TTL))
    assert cluster.answers[renewed] == Lost(old)
    assert cluster.lead(1).token > newer.token


def test_a_claim_ends_when_all_live_members_have_answered() -> None:
    cluster = Cluster(5)
    grant = cluster.lead(0)
    del cluster.machines[0], cluster.machines[1]
    cluster.run(4.0)  # the dead leader counts as dead; two of three votes still belong to it
    cluster.machines[4].voter.free("chair", 0, grant.holder, grant.token, won=True)
    cluster.sent.clear()
    cluster.acquire(4)
    cluster.run(3.0)
    assert cluster.count(Claim) == 4  # once to each other member, and not repeatedly
    cluster.run(TTL)
    cluster.lead(4)


def test_a_candidate_without_a_quorum_gets_the_reason_and_a_hint_when_that_changes() -> None:
    cluster = Cluster()
    del cluster.machines[0], cluster.machines[1]
    cluster.run(5.0)
    ask = cluster.acquire(2)
    cluster.run(0.1 * TTL + 2 * STEP)
    assert cluster.answers[ask] == NoAnswer("no member was elected; 1 of 3 members are alive, 2 are needed")
    cluster.hinted.clear()
    cluster.start(1)
    cluster.run(0.5)
    assert cluster.hinted == [2]
    cluster.start(0)
    cluster.run(0.5)
    cluster.lead(1)
    cluster.start(0)
    ask = cluster.acquire(0)
    cluster.run(0.1 * TTL + 2 * STEP)
    answer = cluster.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "does not vote for 13" in answer.why
    cluster.hinted.clear()
    cluster.run(TTL)
    assert 0 in cluster.hinted


def test_ring_holds_a_message_back_while_a_dead_leader_has_the_vote() -> None:
    cluster = Cluster(4, strategy="ring")
    grant = cluster.lead(3)
    assert isinstance(cluster.answers[cluster.acquire(0)], HeldBy)
    assert isinstance(cluster.answers[cluster.acquire(1)], HeldBy)
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    cluster.feed(2, Received(3, late))
    del cluster.machines[3]
    until = cluster.now + TTL
    cluster.run(TTL - 0.2)
    cluster.sent.clear()
    cluster.feed(2, Received(1, RingElection("chair", 1, 1)))
    cluster.feed(2, Received(1, RingElection("chair", 1, 1)))
    assert cluster.count(RingElection) == 0
    cluster.run(until - cluster.now + 2 * STEP)
    assert cluster.count(RingElection) > 0
    cluster.run(1.0)
    assert cluster.count(RingElection) + cluster.count(RingElected) <= 3 * 3 - 1


def test_ring_waiting_candidates_take_part_when_they_learn_of_an_election() -> None:
    cluster = Cluster(3, strategy="ring")
    cluster.lead(2)
    assert isinstance(cluster.answers[cluster.acquire(1)], HeldBy)
    del cluster.machines[2]
    cluster.run(TTL + 1.0)
    cluster.hinted.clear()
    cluster.sent.clear()
    ask = cluster.acquire(0)  # the lowest begins, and member 1 has not asked again yet
    assert 1 in cluster.hinted
    assert cluster.count(RingElection) == 3  # 0, then 1 twice round
    assert ask not in cluster.answers
    second_candidate = cluster.acquire(1)  # its turn has come before it asked
    assert isinstance(cluster.answers[second_candidate], Granted)
    assert isinstance(cluster.answers[ask], HeldBy)


def test_ring_a_turn_that_no_candidate_takes_is_over_soon() -> None:
    cluster = Cluster(3, strategy="ring")
    cluster.lead(2)
    cluster.acquire(1)
    del cluster.machines[2]
    cluster.run(TTL + 1.0)
    cluster.sent.clear()
    ask = cluster.acquire(0)
    cluster.run(10.0)
    assert isinstance(cluster.answers[ask], Granted) or isinstance(
        cluster.answers[cluster.acquire(0)], (Granted, HeldBy)
    )
    assert cluster.count(Claim) > 0


@pytest.mark.parametrize("meet_late", [False, True])
def test_a_token_is_not_won_twice_by_a_restarted_member_and_one_that_missed_it(meet_late: bool) -> None:
    cluster = Cluster(ahead={1: 3600.0})  # so that tokens run ahead of the clock by which member 0 restarts
    cluster.part(2)
    old = cluster.lead(0)
    cluster.run(60.0)
    cluster.part(1)
    cluster.start(0)
    if meet_late:
        cluster.run(TTL + 0.1)
    cluster.cuts -= {(0, 2), (2, 0)}
    cluster.run(TTL + 0.1)
    assert cluster.machines[0].voter.awake
    assert cluster.lead(0).token > old.token


def test_a_member_that_waited_out_its_silence_ignores_members_without_a_reply() -> None:
    cluster = Cluster(ahead={1: 3600.0})
    cluster.part(2)
    old = cluster.lead(0)
    cluster.part(1)
    cluster.start(0)
    cluster.run(TTL + 0.1)
    cluster.cuts -= {(0, 2)}  # 2 receives from 0, and its messages are lost
    claim = Claim(1, "chair", "h2", old.token, TTL, renewal=False)
    assert not [each for each in cluster.feed(0, Received(2, claim)) if isinstance(each, (Vote, Refusal))]
    cluster.cuts -= {(2, 0)}
    cluster.run(TTL)
    (answer,) = [each for each in cluster.feed(0, Received(2, claim)) if isinstance(each, (Vote, Refusal))]
    assert isinstance(answer, Refusal)
    assert answer.newest > old.token


def test_a_claimant_that_never_led_is_not_named_as_leader() -> None:
    cluster = Cluster(5)
    cluster.cuts |= {(0, other) for other in (2, 3, 4)} | {(other, 0) for other in range(1, 5)}
    cluster.acquire(0)  # only 1 receives it, and the answers of 1 are lost
    del cluster.machines[0], cluster.machines[4]
    ask = cluster.ask(2, lambda ask: Inspect(ask, "chair"))
    cluster.run(3.0)
    answer = cluster.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "fewer than 3 of them voted" in answer.why


def test_a_leader_that_may_lead_still_is_named_without_a_remaining_time() -> None:
    cluster = Cluster(5)
    grant = cluster.lead(0)
    cluster.ask(0, lambda ask: Renew(ask, grant, TTL))
    for number in (2, 3):
        cluster.machines[number].voter.free("chair", 0, grant.holder, grant.token, won=False)
    del cluster.machines[0], cluster.machines[4]
    ask = cluster.ask(2, lambda ask: Inspect(ask, "chair"))
    cluster.run(3.0)
    answer = cluster.answers[ask]
    assert isinstance(answer, HeldBy)
    assert (answer.token, answer.remaining) == (grant.token, None)
    cluster.machines[3].voter.free("chair", 1, "h1", grant.token + 1, won=False)  # it knows of another claim
    ask = cluster.ask(2, lambda ask: Inspect(ask, "chair"))
    cluster.run(3.0)
    assert isinstance(cluster.answers[ask], NoAnswer)


@pytest.mark.parametrize("late", [False, True])
def test_a_member_without_room_for_a_name_refuses_at_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    monkeypatch.setattr("tenure._backends.peers.quorum.NAMES_MAX", 1)
    if late:
        ask = cluster.acquire(2)  # waits for its turn
        cluster.machines[2].voter.free("other", 0, "x", 1, won=True)
        cluster.run(5.0)
    else:
        cluster.machines[2].voter.free("other", 0, "x", 1, won=True)
        ask = cluster.acquire(2)
    answer = cluster.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "remembers 20000 names, and no more" in answer.why
    assert cluster.count(Claim) == 0


def test_a_candidate_just_too_late_for_its_turn_campaigns_again() -> None:
    cluster = Cluster(3, strategy="bully")
    grant = cluster.lead(0)
    assert isinstance(cluster.answers[cluster.acquire(2)], HeldBy)
    cluster.ask(0, lambda ask: Release(ask, grant))
    cluster.cuts |= {(2, 0), (2, 1)}  # so that no other leader ends the turn
    cluster.feed(2, Received(0, BullyElection("chair")))
    cluster.now += cluster.machines[2].fleet.answer_within
    ask = cluster.acquire(2)  # the turn is over at this very moment, and its timer was not handled yet
    cluster.cuts.clear()
    cluster.run(1.0)
    assert isinstance(cluster.answers[ask], Granted)


def test_a_call_after_a_round_began_counts_only_later_votes() -> None:
    """Its trust counts from its own request, and the votes of that round are older."""
    cluster = Cluster()
    cluster.part(2)
    cluster.cuts.add((1, 0))  # the first vote is delayed
    first = cluster.acquire(0)
    while not cluster.count(Claim):
        cluster.run(STEP)
    cluster.run(2 * STEP)
    [vote] = [message for sender, _, message in cluster.sent if sender == 1 and isinstance(message, Vote)]
    claims = cluster.count(Claim)
    second = cluster.acquire(0)  # the same holder asks again, because its first answer is missing
    assert not {first, second} & set(cluster.answers)
    cluster.feed(0, Received(1, vote))
    granted = cluster.answers[first]
    assert isinstance(granted, Granted)
    assert second not in cluster.answers
    assert cluster.count(Claim) > claims
    cluster.cuts.clear()
    cluster.run(1.0)
    assert cluster.answers[second] == granted


def test_a_minority_can_not_answer_ask_to_resign() -> None:
    cluster = Cluster()
    cluster.lead(0)
    cluster.part(0)
    alone = cluster.ask(0, lambda ask: AskToResign(ask, "chair"))
    cluster.run(5.0)
    assert isinstance(cluster.answers[alone], NoAnswer)
    cluster.cuts.clear()
    together = cluster.ask(0, lambda ask: AskToResign(ask, "chair"))
    cluster.run(5.0)
    assert cluster.answers[together] is True


def test_a_majority_lists_the_names() -> None:
    cluster = Cluster()
    cluster.part(0)
    cluster.lead(1)
    cluster.cuts.clear()
    ask = cluster.ask(0, Names)  # it knows none of them itself
    cluster.run(1.0)
    assert cluster.answers[ask] == ("chair",)
