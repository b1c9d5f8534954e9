"""Planted bugs: each must be found by the simulator, or its checkers prove nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tenure._backends.peers import machine as peers
from tenure._backends.peers.bully import Bully
from tenure._backends.peers.quorum import Voter
from tenure._backends.peers.rounds import ClaimRound
from tenure._backends.peers.wire import Claim, Refusal, StartupReply, Vote
from tenure.testing._sim.planted import Mutant
from tests.sim.peers.plan import Given
from tests.sim.peers.simulation import Parts


class _WithVoter(peers.Machine):
    """A machine with another voter."""

    voter_type: type[Voter]

    def __init__(self, *args: Any, floor: int, now: float, **options: Any) -> None:
        super().__init__(*args, floor=floor, now=now, **options)
        self.voter = self.voter_type(self.fleet, floor, self.liveness.is_alive, now)


class ForgetsSilence(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.wake()


class VouchesTwice(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def _gives_way(self, standing: Any, member: int, claim: Claim) -> bool:
            return True


class ExpiresEarly(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def vote(self, member: int, claim: Claim, now: float) -> Vote | Refusal | None:
            shorter = Claim(claim.round, claim.name, claim.holder, claim.token, 0.6 * claim.ttl, claim.renewal)
            return super().vote(member, shorter, now)


class FreedByAnybody(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def free(self, name: str, member: int, holder: str, token: int, *, won: bool) -> bool:
            news = super().free(name, member, holder, token, won=won)
            record = self._records[name]
            if record.promise is not None and record.promise.token <= token:
                record.promise = None
            return news


class TokenTwice(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def _is_new(self, record: Any, member: int, claim: Claim) -> bool:
            return True

        def learn(self, token: int) -> None:
            """Learn nothing."""


class HalfIsEnough(peers.Machine):
    def _evaluate_claim(self, voting: ClaimRound, now: float, effects: Any) -> None:
        if not voting.is_settled and 2 * len(voting.poll.yes) >= self.fleet.size:
            voting.is_settled = True
            self._win(voting, now, effects)
        else:
            super()._evaluate_claim(voting, now, effects)


class RenewsAlone(peers.Machine):
    def _evaluate_claim(self, voting: ClaimRound, now: float, effects: Any) -> None:
        if voting.holds and not voting.is_settled and self.fleet.me in voting.poll.yes:
            voting.is_settled = True
            self._win(voting, now, effects)
        else:
            super()._evaluate_claim(voting, now, effects)


class AnswersLateAskers(peers.Machine):
    def _win(self, voting: ClaimRound, now: float, effects: Any) -> None:
        voting.asks = [each.ask for each in self._candidates.get(voting.question.name, ())] or voting.asks
        super()._win(voting, now, effects)


class AlwaysClear(peers.Machine):
    def _answer_startup(self, sender: int, number: int, now: float, effects: Any) -> None:
        effects.append(peers.Send(sender, StartupReply(number, True, self.voter.newest, self.voter.newest)))


class OneTellsForAll(peers.Machine):
    def _take_startup_reply(self, sender: int, message: StartupReply, now: float, effects: Any) -> None:
        super()._take_startup_reply(sender, message, now, effects)
        if self._clear and not self.voter.awake:
            self.voter.wake()
            self._begin_voting(now, effects)


class NoFloor(peers.Machine):
    """Tokens begin at nothing after every start, and nobody is asked for the newest."""

    def __init__(self, *args: Any, floor: int, **options: Any) -> None:
        super().__init__(*args, floor=0, **options)


class NeverGivesWay(_WithVoter):
    class voter_type(Voter):  # noqa: N801
        def _gives_way(self, standing: Any, member: int, claim: Claim) -> bool:
            return False

        def adopt(self, *args: Any) -> bool:
            return False


class YieldsForEver(peers.Machine):
    def _advance(self, name: str, event: Any, now: float, effects: Any) -> None:
        super()._advance(name, event, now, effects)
        runner = self._elections[name]
        if isinstance(runner, Bully) and runner._stage.value in ("yielding", "idle"):
            runner.wake_at = math.inf
            if runner._stage.value == "yielding":
                runner.campaigns = True


class FollowsTheDead(_WithVoter):
    """Without a quorum, a dead leader is followed until its lease is over, and renewed by members that remember it."""

    class voter_type(Voter):  # noqa: N801
        def promise(self, name: str, now: float) -> Any:
            record = self._records.get(name)
            return record.promise if record else None


MAJORITY, NONE = Given(quorum="majority"), Given(quorum="none")
FORGETFUL = Given(quorum="majority", size=3, faults=("forget",))
"""For a bug that errs only if one member forgets while another is cut off."""

MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "forgets_silence": Mutant(
            "a member that was just started votes at once", Parts(ForgetsSilence, FORGETFUL), "two leaders"
        ),
        "vouches_twice": Mutant("a promise gives way to any newer claim", Parts(VouchesTwice, MAJORITY), "two leaders"),
        "expires_early": Mutant("a promise ends before the lease does", Parts(ExpiresEarly, MAJORITY), "two leaders"),
        "freed_by_anybody": Mutant(
            "a newer claim that is taken back frees the earlier promise",
            Parts(FreedByAnybody, MAJORITY),
            "two leaders",
        ),
        "token_twice": Mutant(
            "another claim is vouched for under a token that was used, or is older",
            Parts(TokenTwice, MAJORITY),
            "token order",
        ),
        "half_is_enough": Mutant("half of the votes make a leader", Parts(HalfIsEnough, MAJORITY), "two leaders"),
        "answers_late_askers": Mutant(
            "votes count for candidates that asked after the votes were requested",
            Parts(AnswersLateAskers, MAJORITY),
            "two leaders",
        ),
        "renews_alone": Mutant(
            "a leader goes on as long as it vouches for itself", Parts(RenewsAlone, MAJORITY), "two leaders"
        ),
        "always_clear": Mutant("a newcomer is told that nothing is led", Parts(AlwaysClear, FORGETFUL), "two leaders"),
        "one_tells_for_all": Mutant(
            "one member that tells is enough to end the silence", Parts(OneTellsForAll, FORGETFUL), "two leaders"
        ),
        "no_floor": Mutant("tokens begin at nothing after every start", Parts(NoFloor, MAJORITY), "token order"),
        "never_gives_way": Mutant("of two leaders that meet, none leaves", Parts(NeverGivesWay, NONE), "many leaders"),
        "yields_for_ever": Mutant(
            "a member that was told to wait waits for ever", Parts(YieldsForEver, Given(strategy="bully")), "no leader"
        ),
        "follows_the_dead": Mutant(
            "a dead leader is followed until its lease is over", Parts(FollowsTheDead, NONE), "no leader"
        ),
    }
)
"""Bugs that must be found, by name."""
