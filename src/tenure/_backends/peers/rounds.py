"""Questions to all members, and what their answers add up to. Pure counting; who asks and when is the machine's.

A round knows its outcome as soon as the answers that are missing can't change it, and has a last word for when they
don't come in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.quorum import Poll
from tenure._backends.peers.wire import (
    Claim,
    InspectReply,
    ListReply,
    ListRequest,
    Question,
    Refusal,
    ReleaseReply,
    ReleaseRequest,
    Reply,
    ResignReply,
    StandingPromise,
    Vote,
)
from tenure._lease import Grant, HeldBy, Lost, NoAnswer, Vacant


class Round(ABC):
    """One question to everybody.

    Args:
        fleet: Who is asked.
        question: What is sent; ``question.round`` is what answers carry.
        asks: The askers that wait for the outcome, all of whom asked before the round began.
        ends_at: When not to wait any longer.
    """

    def __init__(self, fleet: Fleet, question: Question, asks: Sequence[int], ends_at: float) -> None:
        self.fleet = fleet
        self.question = question
        self.asks = list(asks)
        self.ends_at = ends_at
        self.begun = self.resend_at = 0.0
        self._resends = 0
        self.missing: set[int] = set(fleet.others)
        self.is_settled = False
        """Whether its outcome has been told; it may go on, so that all hear of it."""

    def sent(self, now: float) -> None:
        """Plan to ask again, later each time: who is slow is not helped by more to do."""
        if not self._resends:
            self.begun = now
        self.resend_at = now + self.fleet.answer_within * 2**self._resends
        self._resends += 1

    @abstractmethod
    def take(self, member: int, reply: Reply) -> None:
        """Count the answer of *member*; any other kind of reply is ignored."""

    def next_question(self, member: int) -> Question | None:
        """Return what *member* is asked next, its last answer being in; None for nothing."""
        return None

    def question_to(self, member: int) -> Question:
        """Return what *member* is asked now."""
        return self.question

    def too_few(self, answered: int) -> NoAnswer:
        """Say that no majority has answered."""
        return NoAnswer(f"{answered} of {self.fleet.size} members answered, and {self.fleet.needed} are needed")


class ClaimRound(Round):
    """Who vouches for us; *holds* if the claim was won before, so that silence does not end it."""

    question: Claim

    def __init__(
        self, fleet: Fleet, question: Claim, asks: Sequence[int], if_lost: Lost | NoAnswer, now: float, *, holds: bool
    ) -> None:
        lasts = fleet.question_lasts if holds else 2 * fleet.answer_within
        super().__init__(fleet, question, asks, now + lasts)
        self.holds = holds
        self.if_lost = if_lost
        """What to answer if too many refuse."""
        self.poll = Poll(fleet.size)

    def take(self, member: int, reply: Reply) -> None:
        """Count a vote."""
        if isinstance(reply, (Vote, Refusal)):
            self.missing.discard(member)
            self.poll.take(member, reply)

    def is_won(self, awaited: Collection[int]) -> bool:
        """Return whether enough have vouched; *awaited* are those whose answer must be heard first."""
        if self.fleet.quorum == "majority" or self.holds:
            return len(self.poll.yes) >= self.fleet.needed
        return bool(self.poll.yes) and not self.poll.no and not self.missing.intersection(awaited)

    def is_refused(self, awaited: Collection[int]) -> bool:
        """Return whether too many have refused, or nobody is left of *awaited* who might still vouch."""
        if self.fleet.quorum == "majority":
            everybody = not self.holds and not self.missing.intersection(awaited)
            return everybody or self.poll.is_hopeless(self.fleet.needed)
        if self.holds:  # a newer leader than we was met
            return self.fleet.me in self.poll.no
        return bool(self.poll.no)

    def in_vain_for(self, alive: Collection[int]) -> float:
        """Return for how long another claim is in vain: so long, too many still vouch for a leader that is dead.

        A member that lives and was not elected frees its voters at once; one that died has left them bound.
        """
        denies = self.poll.no.values()
        bound = sorted(deny.held.remaining for deny in denies if deny.held and deny.held.member not in alive)
        short = self.fleet.needed - (len(alive) - len(bound))
        return bound[short - 1] if 0 < short <= len(bound) else 0.0

    def winner(self) -> StandingPromise | None:
        """Return who leads, as far as the refusals tell it for certain."""
        held = self.poll.held
        if held is None or self.fleet.quorum == "none":
            return held
        same = [deny for deny in self.poll.no.values() if deny.held is not None and _claim(deny.held) == _claim(held)]
        return held if len(same) >= self.fleet.needed else None


class ReleaseRound(Round):
    """Who has let go of us."""

    question: ReleaseRequest

    def __init__(self, fleet: Fleet, question: ReleaseRequest, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.freed = 1  # we ourselves

    @property
    def grant(self) -> Grant:
        """The claim that is handed back."""
        return Grant(self.question.name, self.question.holder, self.question.token)

    def take(self, member: int, reply: Reply) -> None:
        """Count who has."""
        if isinstance(reply, ReleaseReply) and member in self.missing:
            self.missing.discard(member)
            self.freed += 1

    def is_done(self, awaited: Collection[int]) -> bool:
        """Return whether so many have that the name is free; *awaited* are those who should hear of it at once."""
        return self.freed >= self.fleet.needed and not self.missing.intersection(awaited)


class InspectRound(Round):
    """Who leads, in the eyes of all."""

    def __init__(self, fleet: Fleet, question: Question, name: str, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self._name = name
        self._seen: dict[int, InspectReply] = {}

    def take(self, member: int, reply: Reply) -> None:
        """Count a view."""
        if isinstance(reply, InspectReply):
            self.missing.discard(member)
            self._seen[member] = reply

    def outcome(self, awaited: Collection[int]) -> HeldBy | Vacant | None:
        """Return who leads, None for not known yet; *awaited* are those whose answer must be heard first."""
        vouching = self._vouching()
        if vouching and len(vouching) >= self.fleet.needed and self.fleet.quorum == "majority":
            return self._held(vouching)
        unheard = self.fleet.size - len(self._seen)
        if self.fleet.quorum == "majority":
            decided = len(self._seen) >= self.fleet.majority and len(vouching) + unheard < self.fleet.needed
            return self._vacant() if decided else None
        if not self._seen or self.missing.intersection(awaited):
            return None
        return self._held(vouching) if vouching else self._vacant()

    def last_word(self) -> HeldBy | Vacant | NoAnswer:
        """Return what those that answered let suppose."""
        heard = len(self._seen)
        if heard < self.fleet.needed:
            return self.too_few(heard)
        vouching = self._vouching()
        if self.fleet.quorum == "none" or len(vouching) >= self.fleet.needed:
            return self._held(vouching) if vouching else self._vacant()
        # Those that were not heard decide. Who is vouched for may never have led, or another may have led since.
        newest = max(seen.newest for seen in self._seen.values())
        for seen in self._seen.values():
            if seen.held is not None and seen.held.won and seen.held.token >= newest:
                return held_by(self._name, seen.held, certain=False)
        return NoAnswer(
            f"{heard} of {self.fleet.size} members answered, and fewer than {self.fleet.needed} of them vouch for the "
            "same claim; the others might"
        )

    def _vouching(self) -> list[StandingPromise]:
        """Return the promises for the claim that most vouch for, the newest of equals."""
        groups: dict[tuple[int, int], list[StandingPromise]] = {}
        for seen in self._seen.values():
            if seen.held is not None:
                groups.setdefault(_claim(seen.held), []).append(seen.held)
        if self.fleet.quorum == "none":
            return groups[max(groups)] if groups else []
        return max(groups.items(), key=lambda group: (len(group[1]), group[0]))[1] if groups else []

    def _held(self, vouching: list[StandingPromise]) -> HeldBy:
        # It ends when fewer than needed still vouch for it.
        ends = sorted((held.remaining for held in vouching), reverse=True)
        remaining = ends[min(self.fleet.needed, len(ends)) - 1]
        return held_by(self._name, replace(vouching[0], remaining=remaining))

    def _vacant(self) -> Vacant:
        return Vacant(self._name, max(seen.newest for seen in self._seen.values()))


class ListRound(Round):
    """Which names there are; members tell a few at a time."""

    def __init__(self, fleet: Fleet, question: ListRequest, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.names: set[str] = set()
        self._after: dict[int, str] = {}
        self.told = 0

    def take(self, member: int, reply: Reply) -> None:
        """Gather a page; an empty one is the last."""
        if not isinstance(reply, ListReply) or member not in self.missing:
            return
        self.names.update(reply.names)
        if reply.names:
            self._after[member] = reply.names[-1]
        else:
            self.missing.discard(member)
            self.told += 1

    def question_to(self, member: int) -> Question:
        """Ask for the next page."""
        return ListRequest(self.question.round, self._after.get(member, ""))

    def next_question(self, member: int) -> Question | None:
        """Ask for the next page, if there is one."""
        return self.question_to(member) if member in self.missing else None


class ResignRound(Round):
    """Who vouches for a leader, and has noted that it is asked to step down."""

    def __init__(self, fleet: Fleet, question: Question, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.answers: dict[int, bool] = {}

    def take(self, member: int, reply: Reply) -> None:
        """Count who has noted it."""
        if isinstance(reply, ResignReply):
            self.missing.discard(member)
            self.answers[member] = reply.led


def held_by(name: str, held: StandingPromise, *, certain: bool = True) -> HeldBy:
    """Tell a promise in the words of a store; how much of it remains only if it is *certain* that it makes a leader."""
    return HeldBy(name, held.holder, held.token, held.remaining if certain else None, held.metadata)


def _claim(held: StandingPromise) -> tuple[int, int]:
    return held.token, held.member
