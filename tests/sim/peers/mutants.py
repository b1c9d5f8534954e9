"""Planted bugs: each must be found by the simulator, or its checkers prove nothing."""

from __future__ import annotations

import math
from typing import Any

from tenure.peers import machine as peers
from tenure.peers.bully import Bully
from tenure.peers.quorum import Voter
from tenure.peers.rounds import ClaimRound
from tenure.peers.wire import Claim, Deny, Told, Vouch


class _WithVoter(peers.Machine):
    """A machine with another voter."""

    voter_type: type[Voter]

    def __init__(self, *args: Any, floor: int, now: float, **options: Any) -> None:
        super().__init__(*args, floor=floor, now=now, **options)
        self.voter = self.voter_type(self.fleet, floor, self.liveness.is_alive, now)


class ForgetsSilence(_WithVoter):
    """A member that was just started votes at once."""

    class voter_type(Voter):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.wake()


class VouchesTwice(_WithVoter):
    """A promise gives way to any newer claim."""

    class voter_type(Voter):  # noqa: N801
        def _gives_way(self, standing: Any, member: int, claim: Claim) -> bool:
            return True


class ExpiresEarly(_WithVoter):
    """A promise ends before the lease does."""

    class voter_type(Voter):  # noqa: N801
        def vouch(self, member: int, claim: Claim, now: float) -> Vouch | Deny | None:
            shorter = Claim(claim.round, claim.name, claim.holder, claim.token, 0.6 * claim.ttl, claim.renewal)
            return super().vouch(member, shorter, now)


class FreedByAnybody(_WithVoter):
    """A newer claim that is taken back frees whoever was vouched for."""

    class voter_type(Voter):  # noqa: N801
        def free(self, name: str, member: int, holder: str, token: int, *, won: bool) -> bool:
            news = super().free(name, member, holder, token, won=won)
            record = self._records[name]
            if record.promise is not None and record.promise.token <= token:
                record.promise = None
            return news


class TokenTwice(_WithVoter):
    """Vouches for another claim under a token that it has vouched for already, or that is older."""

    class voter_type(Voter):  # noqa: N801
        def _is_new(self, record: Any, member: int, claim: Claim) -> bool:
            return True

        def learn(self, token: int) -> None:
            """Learn nothing."""


class HalfIsEnough(peers.Machine):
    """Half of the votes make a leader."""

    def _look_at_votes(self, voting: ClaimRound, now: float, effects: Any) -> None:
        if not voting.is_settled and 2 * len(voting.poll.yes) >= self.fleet.size:
            voting.is_settled = True
            self._win(voting, now, effects)
        else:
            super()._look_at_votes(voting, now, effects)


class RenewsAlone(peers.Machine):
    """A leader goes on as long as it vouches for itself."""

    def _look_at_votes(self, voting: ClaimRound, now: float, effects: Any) -> None:
        if voting.holds and not voting.is_settled and self.fleet.me in voting.poll.yes:
            voting.is_settled = True
            self._win(voting, now, effects)
        else:
            super()._look_at_votes(voting, now, effects)


class AnswersLateAskers(peers.Machine):
    """Votes count for who asked after they were asked for."""

    def _win(self, voting: ClaimRound, now: float, effects: Any) -> None:
        voting.asks = [each.ask for each in self._applicants.get(voting.question.name, ())] or voting.asks
        super()._win(voting, now, effects)


class AlwaysClear(peers.Machine):
    """Tells a newcomer that nothing is led, whatever is."""

    def _tell(self, sender: int, number: int, now: float, effects: Any) -> None:
        effects.append(peers.Send(sender, Told(number, True, self.voter.newest, self.voter.newest)))


class OneTellsForAll(peers.Machine):
    """Keeps silent only until one member has told that it leads nothing."""

    def _be_told(self, sender: int, message: Told, now: float, effects: Any) -> None:
        super()._be_told(sender, message, now, effects)
        if self._told and not self.voter.awake:
            self.voter.wake()
            self._awake(now, effects)


class NoFloor(peers.Machine):
    """Tokens begin at nothing after every start, and nobody is asked for the newest."""

    def __init__(self, *args: Any, floor: int, **options: Any) -> None:
        super().__init__(*args, floor=0, **options)


class NeverGivesWay(_WithVoter):
    """Without a quorum, of two leaders that meet, none leaves."""

    class voter_type(Voter):  # noqa: N801
        def _gives_way(self, standing: Any, member: int, claim: Claim) -> bool:
            return False

        def adopt(self, *args: Any) -> bool:
            return False


class YieldsForEver(peers.Machine):
    """Bully: who was told to wait waits for ever."""

    def _run(self, name: str, event: Any, now: float, effects: Any) -> None:
        super()._run(name, event, now, effects)
        runner = self._races[name]
        if isinstance(runner, Bully) and runner._stage.value in ("yielding", "idle"):
            runner.wake_at = math.inf
            if runner._stage.value == "yielding":
                runner.stands = True


class FollowsTheDead(_WithVoter):
    """Without a quorum, a dead leader is followed until its lease is over, and renewed by whoever remembers it."""

    class voter_type(Voter):  # noqa: N801
        def promise(self, name: str, now: float) -> Any:
            record = self._records.get(name)
            return record.promise if record else None


MUTANTS: dict[str, tuple[type[peers.Machine], dict[str, Any]]] = {
    "forgets_silence": (ForgetsSilence, {"quorum": "majority", "size": 3, "faults": ("forget",)}),
    "vouches_twice": (VouchesTwice, {"quorum": "majority"}),
    "expires_early": (ExpiresEarly, {"quorum": "majority"}),
    "freed_by_anybody": (FreedByAnybody, {"quorum": "majority"}),
    "token_twice": (TokenTwice, {"quorum": "majority"}),
    "half_is_enough": (HalfIsEnough, {"quorum": "majority"}),
    "answers_late_askers": (AnswersLateAskers, {"quorum": "majority"}),
    "renews_alone": (RenewsAlone, {"quorum": "majority"}),
    "always_clear": (AlwaysClear, {"quorum": "majority", "size": 3, "faults": ("forget",)}),
    "one_tells_for_all": (OneTellsForAll, {"quorum": "majority", "size": 3, "faults": ("forget",)}),
    "no_floor": (NoFloor, {"quorum": "majority"}),
    "never_gives_way": (NeverGivesWay, {"quorum": "none"}),
    "yields_for_ever": (YieldsForEver, {"strategy": "bully"}),
    "follows_the_dead": (FollowsTheDead, {"quorum": "none"}),
}
"""The machine, and what the runs are confined to, for each: where it errs, and which faults that takes, if two."""
