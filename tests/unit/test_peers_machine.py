"""Machines of one fleet among themselves: late, lost and overtaken messages, and what must come of them."""

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


class Hall:
    """Members that hear each other at once, unless a way is cut."""

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
        """By how many seconds the wall clock of a member is ahead."""
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
        self.run(1.5)  # until all have heard each other

    def start(self, number: int) -> None:
        """Start a member, with an empty memory."""
        fleet = Fleet(tuple(f"m{each}:1" for each in range(self.size)), number, self.strategy, self.quorum, TTL)
        nonce = 1_000_000 * next(self._count)
        floor = 1 + int(1000 * (self.now + self.ahead.get(number, 0.0)))
        self.machines[number] = Machine(fleet, random.Random(nonce), floor=floor, nonce=nonce, now=self.now)
        self.feed(number, Tick())

    def feed(self, number: int, event: Input) -> list[Message]:
        """Give *event* to a member, deliver what it sends, and return that."""
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


def test_an_answer_that_was_lost_is_not_given_again_after_a_newer_term() -> None:
    hall = Hall()
    old = hall.lead(0)  # let us say that its answer was lost
    hall.part(0)
    for _ in range(2):  # and that it is asked for again, by a candidate that hears nobody
        again = hall.acquire(0)
        hall.run(TTL / 2 + 1)
        assert isinstance(hall.answers[again], NoAnswer)
    newer = hall.lead(2)
    assert newer.token > old.token
    del hall.machines[1]
    hall.run(1.0)
    hall.start(1)  # and has forgotten whom it vouched for
    for _ in range(3):
        again = hall.acquire(0)
        hall.run(TTL / 2 + 1)
        assert isinstance(hall.answers[again], NoAnswer)
    hall.cuts.clear()
    hall.run(1.0)
    again = hall.acquire(0)
    hall.run(5.0)
    answer = hall.answers[again]
    assert not isinstance(answer, Granted) or answer.grant.token > newer.token, answer
    assert hall.lead(0).token > newer.token  # it does not stay bound to its old claim


def test_an_answer_that_was_lost_is_given_again_while_it_holds() -> None:
    hall = Hall()
    grant = hall.lead(0)
    assert hall.lead(0) == grant


@pytest.mark.parametrize("quorum", ["majority", "none"])
def test_a_renewal_that_was_overtaken_by_its_release_binds_nobody(quorum: Quorum) -> None:
    hall = Hall(quorum=quorum)
    grant = hall.lead(0)
    hall.ask(0, lambda ask: Release(ask, grant))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(hall.feed(1, Received(0, late))[0], Refusal)


def test_a_renewal_that_was_overtaken_binds_nobody_who_never_heard_of_the_claim() -> None:
    hall = Hall()
    hall.cuts |= {(0, 2), (2, 0)}
    grant = hall.lead(0)
    hall.cuts.clear()
    hall.ask(0, lambda ask: Release(ask, grant))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(hall.feed(2, Received(0, late))[0], Refusal)


def test_a_claim_that_came_to_nothing_does_not_end_a_term() -> None:
    hall = Hall()
    hall.cuts |= {(0, 2), (2, 0)}
    grant = hall.lead(0)
    token = grant.token + 1
    assert isinstance(hall.feed(2, Received(1, Claim(7, "chair", "x", token, TTL, False)))[0], Vote)
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(hall.feed(2, Received(0, late))[0], Refusal)  # the other claim may be won
    hall.feed(2, Received(1, ReleaseRequest(8, "chair", "x", token, won=False)))
    assert isinstance(hall.feed(2, Received(0, late))[0], Vote)


def test_a_claim_that_was_won_ends_older_terms_even_if_it_is_over() -> None:
    hall = Hall()
    hall.cuts |= {(0, 2), (2, 0)}
    grant = hall.lead(0)
    newer, newest = grant.token + 1, grant.token + 2
    hall.feed(2, Received(1, Claim(7, "chair", "x", newer, 1.0, False)))
    hall.run(1.5)  # it may have been won, and is over
    hall.feed(2, Received(1, Claim(9, "chair", "y", newest, TTL, False)))
    hall.feed(2, Received(1, ReleaseRequest(10, "chair", "y", newest, won=False)))
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    assert isinstance(hall.feed(2, Received(0, late))[0], Refusal)


def test_without_a_quorum_a_leader_whose_term_was_followed_by_another_leaves() -> None:
    hall = Hall(2, quorum="none")
    hall.part(0)
    hall.run(5.0)  # until they take each other for dead
    old = hall.lead(0)
    newer = hall.lead(1)
    while newer.token <= old.token:
        hall.ask(1, lambda ask, grant=newer: Release(ask, grant))  # type: ignore[misc]
        hall.ask(0, lambda ask: Renew(ask, old, TTL))
        newer = hall.lead(1)
    assert isinstance(hall.answers[hall.ask(0, lambda ask: Renew(ask, old, TTL))], Granted)
    hall.ask(1, lambda ask: Release(ask, newer))
    hall.cuts.clear()
    hall.run(2.0)
    hall.ask(0, lambda ask: Renew(ask, old, TTL))
    renewed = hall.ask(0, lambda ask: Renew(ask, old, TTL))
    assert hall.answers[renewed] == Lost(old)
    assert hall.lead(1).token > newer.token


def test_a_claim_is_given_up_when_all_that_live_have_answered() -> None:
    hall = Hall(5)
    grant = hall.lead(0)
    del hall.machines[0], hall.machines[1]
    hall.run(4.0)  # who died is taken for dead; two of three are still bound to it
    hall.machines[4].voter.free("chair", 0, grant.holder, grant.token, won=True)
    hall.sent.clear()
    hall.acquire(4)
    hall.run(3.0)
    assert hall.count(Claim) == 4  # once to each other, and not again and again
    hall.run(TTL)
    hall.lead(4)


def test_who_can_not_be_elected_is_told_why_and_hears_when_that_changes() -> None:
    hall = Hall()
    del hall.machines[0], hall.machines[1]
    hall.run(5.0)
    ask = hall.acquire(2)
    hall.run(0.1 * TTL + 2 * STEP)
    assert hall.answers[ask] == NoAnswer("nobody was elected; 1 of 3 members are alive, 2 are needed")
    hall.hinted.clear()
    hall.start(1)
    hall.run(0.5)
    assert hall.hinted == [2]
    hall.start(0)
    hall.run(0.5)
    hall.lead(1)
    hall.start(0)
    ask = hall.acquire(0)
    hall.run(0.1 * TTL + 2 * STEP)
    answer = hall.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "does not vote for 13" in answer.why
    hall.hinted.clear()
    hall.run(TTL)
    assert 0 in hall.hinted


def test_in_the_ring_a_message_waits_for_who_is_bound_to_a_dead_leader_for_a_moment_more() -> None:
    hall = Hall(4, strategy="ring")
    grant = hall.lead(3)
    assert isinstance(hall.answers[hall.acquire(0)], HeldBy)
    assert isinstance(hall.answers[hall.acquire(1)], HeldBy)
    late = Claim(1, "chair", grant.holder, grant.token, TTL, renewal=True)
    hall.feed(2, Received(3, late))
    del hall.machines[3]
    until = hall.now + TTL
    hall.run(TTL - 0.2)
    hall.sent.clear()
    hall.feed(2, Received(1, RingElection("chair", 1, 1)))
    hall.feed(2, Received(1, RingElection("chair", 1, 1)))
    assert hall.count(RingElection) == 0
    hall.run(until - hall.now + 2 * STEP)
    assert hall.count(RingElection) > 0
    hall.run(1.0)
    assert hall.count(RingElection) + hall.count(RingElected) <= 3 * 3 - 1


def test_in_the_ring_who_stands_by_takes_part_as_soon_as_it_hears_of_an_election() -> None:
    hall = Hall(3, strategy="ring")
    hall.lead(2)
    assert isinstance(hall.answers[hall.acquire(1)], HeldBy)
    del hall.machines[2]
    hall.run(TTL + 1.0)
    hall.hinted.clear()
    hall.sent.clear()
    ask = hall.acquire(0)  # the lowest begins, and member 1 has not asked again yet
    assert 1 in hall.hinted
    assert hall.count(RingElection) == 3  # 0, then 1 twice round
    assert ask not in hall.answers
    heir = hall.acquire(1)  # its turn has come before it asked
    assert isinstance(hall.answers[heir], Granted)
    assert isinstance(hall.answers[ask], HeldBy)


def test_in_the_ring_a_turn_that_nobody_takes_is_over_soon() -> None:
    hall = Hall(3, strategy="ring")
    hall.lead(2)
    hall.acquire(1)
    del hall.machines[2]
    hall.run(TTL + 1.0)
    hall.sent.clear()
    ask = hall.acquire(0)
    hall.run(10.0)
    assert isinstance(hall.answers[ask], Granted) or isinstance(hall.answers[hall.acquire(0)], (Granted, HeldBy))
    assert hall.count(Claim) > 0


@pytest.mark.parametrize("meet_late", [False, True])
def test_a_token_is_not_won_twice_by_who_forgot_it_and_who_has_missed_it(meet_late: bool) -> None:
    hall = Hall(ahead={1: 3600.0})  # so that tokens run ahead of the clock that member 0 is started anew by
    hall.part(2)
    old = hall.lead(0)
    hall.run(60.0)
    hall.part(1)
    hall.start(0)
    if meet_late:
        hall.run(TTL + 0.1)
    hall.cuts -= {(0, 2), (2, 0)}
    hall.run(TTL + 0.1)
    assert hall.machines[0].voter.awake
    assert hall.lead(0).token > old.token


def test_who_awoke_in_time_counts_nobody_who_has_not_told_what_it_may_have_missed() -> None:
    hall = Hall(ahead={1: 3600.0})
    hall.part(2)
    old = hall.lead(0)
    hall.part(1)
    hall.start(0)
    hall.run(TTL + 0.1)
    hall.cuts -= {(0, 2)}  # 2 hears 0, and is not heard
    claim = Claim(1, "chair", "h2", old.token, TTL, renewal=False)
    assert not [each for each in hall.feed(0, Received(2, claim)) if isinstance(each, (Vote, Refusal))]
    hall.cuts -= {(2, 0)}
    hall.run(TTL)
    (answer,) = [each for each in hall.feed(0, Received(2, claim)) if isinstance(each, (Vote, Refusal))]
    assert isinstance(answer, Refusal)
    assert answer.newest > old.token


def test_who_has_claimed_a_name_and_never_led_is_not_told_as_its_leader() -> None:
    hall = Hall(5)
    hall.cuts |= {(0, other) for other in (2, 3, 4)} | {(other, 0) for other in range(1, 5)}
    hall.acquire(0)  # heard by 1 only, which is not heard
    del hall.machines[0], hall.machines[4]
    ask = hall.ask(2, lambda ask: Inspect(ask, "chair"))
    hall.run(3.0)
    answer = hall.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "fewer than 3 of them voted" in answer.why


def test_who_has_led_and_may_lead_still_is_told_without_a_time() -> None:
    hall = Hall(5)
    grant = hall.lead(0)
    hall.ask(0, lambda ask: Renew(ask, grant, TTL))
    for number in (2, 3):
        hall.machines[number].voter.free("chair", 0, grant.holder, grant.token, won=False)
    del hall.machines[0], hall.machines[4]
    ask = hall.ask(2, lambda ask: Inspect(ask, "chair"))
    hall.run(3.0)
    answer = hall.answers[ask]
    assert isinstance(answer, HeldBy)
    assert (answer.token, answer.remaining) == (grant.token, None)
    hall.machines[3].voter.free("chair", 1, "h1", grant.token + 1, won=False)  # another claim is known of
    ask = hall.ask(2, lambda ask: Inspect(ask, "chair"))
    hall.run(3.0)
    assert isinstance(hall.answers[ask], NoAnswer)


@pytest.mark.parametrize("late", [False, True])
def test_who_remembers_too_many_names_to_vouch_for_itself_says_so_at_once(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hall = Hall()
    monkeypatch.setattr("tenure._backends.peers.quorum.NAMES_MAX", 1)
    if late:
        ask = hall.acquire(2)  # waits for its turn
        hall.machines[2].voter.free("other", 0, "x", 1, won=True)
        hall.run(5.0)
    else:
        hall.machines[2].voter.free("other", 0, "x", 1, won=True)
        ask = hall.acquire(2)
    answer = hall.answers[ask]
    assert isinstance(answer, NoAnswer)
    assert "remembers 20000 names, and no more" in answer.why
    assert hall.count(Claim) == 0


def test_who_asks_a_hair_after_its_turn_stands_anew() -> None:
    hall = Hall(3, strategy="bully")
    grant = hall.lead(0)
    assert isinstance(hall.answers[hall.acquire(2)], HeldBy)
    hall.ask(0, lambda ask: Release(ask, grant))
    hall.cuts |= {(2, 0), (2, 1)}  # so that the turn is not over because somebody else leads
    hall.feed(2, Received(0, BullyElection("chair")))
    hall.now += hall.machines[2].fleet.answer_within
    ask = hall.acquire(2)  # the turn is over at this very moment, and its timer was not handled yet
    hall.cuts.clear()
    hall.run(1.0)
    assert isinstance(hall.answers[ask], Granted)


def test_who_asks_after_a_round_began_is_answered_by_votes_that_are_cast_after_that() -> None:
    """It counts its trust from its own question, and the votes of that round are older."""
    hall = Hall()
    hall.part(2)
    hall.cuts.add((1, 0))  # the first vote is on its way for a while
    first = hall.acquire(0)
    while not hall.count(Claim):
        hall.run(STEP)
    hall.run(2 * STEP)
    [vote] = [message for sender, _, message in hall.sent if sender == 1 and isinstance(message, Vote)]
    claims = hall.count(Claim)
    second = hall.acquire(0)  # the same holder asks again, as its first answer stays away
    assert not {first, second} & set(hall.answers)
    hall.feed(0, Received(1, vote))
    granted = hall.answers[first]
    assert isinstance(granted, Granted)
    assert second not in hall.answers
    assert hall.count(Claim) > claims
    hall.cuts.clear()
    hall.run(1.0)
    assert hall.answers[second] == granted


def test_a_minority_says_nothing_about_who_is_asked_to_resign() -> None:
    hall = Hall()
    hall.lead(0)
    hall.part(0)
    alone = hall.ask(0, lambda ask: AskToResign(ask, "chair"))
    hall.run(5.0)
    assert isinstance(hall.answers[alone], NoAnswer)
    hall.cuts.clear()
    together = hall.ask(0, lambda ask: AskToResign(ask, "chair"))
    hall.run(5.0)
    assert hall.answers[together] is True


def test_names_are_told_by_a_majority() -> None:
    hall = Hall()
    hall.part(0)
    hall.lead(1)
    hall.cuts.clear()
    ask = hall.ask(0, Names)  # of which it has heard of none
    hall.run(1.0)
    assert hall.answers[ask] == ("chair",)
