"""The counting of votes alone, at its edges: one vote fewer, an equal token, a lease that is slightly too long."""

from __future__ import annotations

import pytest

from tenure._backends.peers.fleet import Fleet, Quorum
from tenure._backends.peers.quorum import Poll, Voter
from tenure._backends.peers.rounds import ClaimRound, InspectRound, ReleaseRound
from tenure._backends.peers.wire import (
    Claim,
    InspectReply,
    InspectRequest,
    Refusal,
    ReleaseReply,
    ReleaseRequest,
    StandingPromise,
    Vote,
)
from tenure._lease import Grant, HeldBy, Lost

TTL = 15.0
TOKEN = 200


def fleet_of_five(quorum: Quorum = "majority") -> Fleet:
    return Fleet(tuple(f"m{each}:1" for each in range(5)), 0, "lowest", quorum, TTL)


def voter(quorum: Quorum = "majority") -> Voter:
    voter = Voter(fleet_of_five(quorum), 100, lambda member, now: True, 0.0)
    voter.wake()
    return voter


def claim(token: int = TOKEN, *, holder: str = "h", ttl: float = TTL, renewal: bool = False) -> Claim:
    return Claim(1, "chair", holder, token, ttl, renewal)


def held(remaining: float = 5.0, *, member: int = 4, token: int = TOKEN, resign_asked: bool = False) -> StandingPromise:
    return StandingPromise(member, "h", token, remaining, resign_asked=resign_asked)


def voting(denied: list[StandingPromise]) -> ClaimRound:
    """Return the votes of members 1, 2, …: each refuses, because of a promise."""
    counted = ClaimRound(fleet_of_five(), claim(), [1], Lost(Grant("chair", "h", TOKEN)), 0.0, holds=False)
    for member, promise in enumerate(denied, start=1):
        counted.take(member, Refusal(1, TOKEN, promise))
    return counted


# --- the votes of one ---------------------------------------------------------------------------------------------


def test_a_shorter_renewal_makes_no_promise_shorter() -> None:
    one = voter()
    assert isinstance(one.vote(1, claim(), 0.0), Vote)
    assert isinstance(one.vote(1, claim(ttl=1.0, renewal=True), 1.0), Vote)
    assert one.promise("chair", TTL - 0.001) is not None
    assert isinstance(one.vote(2, claim(TOKEN + 1, holder="other"), TTL - 0.001), Refusal)
    assert one.promise("chair", TTL) is None


@pytest.mark.parametrize("renewal", [False, True])
def test_no_token_gets_two_votes(renewal: bool) -> None:
    one = voter()
    assert isinstance(one.vote(1, claim(), 0.0), Vote)
    assert isinstance(one.vote(2, claim(holder="other", renewal=renewal), TTL), Refusal)
    assert isinstance(one.vote(2, claim(TOKEN + 1, holder="other", renewal=renewal), TTL), Vote)


def test_no_vote_lasts_longer_than_the_silence_after_a_start() -> None:
    assert voter().vote(1, claim(ttl=TTL + 0.001), 0.0) is None
    assert isinstance(voter().vote(1, claim(ttl=TTL), 0.0), Vote)


def test_without_a_quorum_a_known_or_ended_claim_changes_nothing() -> None:
    one = voter("none")
    assert one.adopt("chair", held(), 0.0)
    assert not one.adopt("chair", held(), 0.0)
    assert one.free("chair", 4, "h", TOKEN, won=True)
    assert not one.adopt("chair", held(), 0.0)
    assert one.adopt("chair", held(token=TOKEN + 1), 0.0)


# --- the count of all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "majority"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_two_majorities_have_a_member_in_common(size: int, majority: int) -> None:
    fleet = Fleet(tuple(f"m{each}:1" for each in range(size)), 0, "lowest", "majority", TTL)
    assert fleet.needed == fleet.majority == majority


def test_the_first_of_two_answers_of_one_member_counts() -> None:
    poll = Poll(5)
    poll.take(1, Vote(1, resign_asked=False))
    poll.take(1, Refusal(1, TOKEN, None))
    poll.take(2, Refusal(1, TOKEN, None))
    poll.take(2, Vote(1, resign_asked=False))
    assert (list(poll.yes), list(poll.no)) == ([1], [2])


def test_a_claim_is_hopeless_when_a_majority_is_out_of_reach() -> None:
    poll = Poll(5)
    for member in (1, 2):
        poll.take(member, Refusal(1, TOKEN, None))
    assert not poll.is_hopeless(3)
    poll.take(3, Refusal(1, TOKEN, None))
    assert poll.is_hopeless(3)


def test_a_majority_of_refusals_names_the_leader() -> None:
    assert voting([held()] * 2).winner() is None
    assert voting([held()] * 3).winner() == held()
    assert voting([held(), held(), held(token=TOKEN + 1)]).winner() is None


def test_a_claim_is_in_vain_until_a_majority_of_votes_is_free() -> None:
    assert voting([held(9.0), held(5.0)]).in_vain_for({0, 1, 2}) == 9.0
    assert voting([held(9.0), held(5.0)]).in_vain_for({0, 1, 2, 3}) == 5.0
    assert voting([held(9.0), held(5.0)]).in_vain_for({0, 1, 2, 3, 4}) == 0.0


def test_a_name_is_free_when_a_majority_has_freed_its_votes() -> None:
    freeing = ReleaseRound(fleet_of_five(), ReleaseRequest(1, "chair", "h", TOKEN, won=True), [], TTL)
    freeing.take(1, ReleaseReply(1))
    freeing.take(1, ReleaseReply(1))
    assert not freeing.is_done(())
    freeing.take(2, ReleaseReply(1))
    assert freeing.is_done(())


def test_inspect_tells_of_a_request_to_resign_that_one_voter_knows() -> None:
    looking = InspectRound(fleet_of_five(), InspectRequest(1, "chair"), "chair", [1], TTL)
    for member in (1, 2, 3):
        looking.take(member, InspectReply(1, TOKEN, held(resign_asked=member == 2)))
    found = looking.outcome(())
    assert isinstance(found, HeldBy)
    assert found.resign_asked


def test_inspect_names_the_leader_while_a_majority_votes_for_it() -> None:
    looking = InspectRound(fleet_of_five(), InspectRequest(1, "chair"), "chair", [1], TTL)
    for member, remaining in ((1, 3.0), (2, 9.0)):
        looking.take(member, InspectReply(1, TOKEN, held(remaining)))
    assert looking.outcome(()) is None
    looking.take(3, InspectReply(1, TOKEN, held(7.0)))
    found = looking.outcome(())
    assert isinstance(found, HeldBy)
    assert found.remaining == 3.0
    looking.take(0, InspectReply(1, TOKEN, held(5.0)))
    found = looking.outcome(())
    assert isinstance(found, HeldBy)
    assert found.remaining == 5.0
