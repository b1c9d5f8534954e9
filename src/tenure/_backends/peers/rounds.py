"""Rounds: one question to all members, and the count of their replies. The machine decides when to ask.

A round knows its outcome as soon as the missing replies can't change it, and has a final outcome for when they don't
come in time.
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
    """One question to all members.

    Args:
        fleet: The members to ask.
        question: What is sent; replies carry its ``round``.
        asks: The callers that wait for the outcome; all of them asked before the round began.
        ends_at: When to stop waiting.
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
        """Whether its outcome was given; it may go on, so that all members receive it."""

    def sent(self, now: float) -> None:
        """Plan to ask again, later each time: more messages don't help a slow member."""
        if not self._resends:
            self.begun = now
        self.resend_at = now + self.fleet.answer_within * 2**self._resends
        self._resends += 1

    @abstractmethod
    def take(self, member: int, reply: Reply) -> None:
        """Count the reply of *member*; ignore any other kind of reply."""

    def next_question(self, member: int) -> Question | None:
        """Return what to ask *member* next, after its last reply; None for nothing."""
        return None

    def question_to(self, member: int) -> Question:
        """Return what to ask *member* now."""
        return self.question

    def too_few(self, answered: int) -> NoAnswer:
        """Return the answer where too few members replied."""
        return NoAnswer(f"{answered} of {self.fleet.size} members answered, and {self.fleet.needed} are needed")


class ClaimRound(Round):
    """The votes on a claim of this member; *holds* if it was won before, so that silence does not end it."""

    question: Claim

    def __init__(
        self, fleet: Fleet, question: Claim, asks: Sequence[int], if_lost: Lost | NoAnswer, now: float, *, holds: bool
    ) -> None:
        lasts = fleet.question_lasts if holds else 2 * fleet.answer_within
        super().__init__(fleet, question, asks, now + lasts)
        self.holds = holds
        self.if_lost = if_lost
        """The answer if too many refuse."""
        self.poll = Poll(fleet.size)

    def take(self, member: int, reply: Reply) -> None:
        """Count a vote."""
        if isinstance(reply, (Vote, Refusal)):
            self.missing.discard(member)
            self.poll.take(member, reply)

    def is_won(self, awaited: Collection[int]) -> bool:
        """Return whether enough voted for it; *awaited* are the members that must answer first."""
        if self.fleet.quorum == "majority" or self.holds:
            return len(self.poll.yes) >= self.fleet.needed
        return bool(self.poll.yes) and not self.poll.no and not self.missing.intersection(awaited)

    def is_refused(self, awaited: Collection[int]) -> bool:
        """Return whether too many have refused, or none is left of *awaited* that might still vote for it."""
        if self.fleet.quorum == "majority":
            everybody = not self.holds and not self.missing.intersection(awaited)
            return everybody or self.poll.is_hopeless(self.fleet.needed)
        if self.holds:  # refused by its own vote, for a newer leader
            return self.fleet.me in self.poll.no
        return bool(self.poll.no)

    def in_vain_for(self, alive: Collection[int]) -> float:
        """Return for how long another claim is in vain, because too many votes still belong to a dead leader.

        A live member that was not elected frees its votes at once; a dead one can't.
        """
        refusals = self.poll.no.values()
        bound = sorted(
            refusal.standing.remaining
            for refusal in refusals
            if refusal.standing and refusal.standing.member not in alive
        )
        short = self.fleet.needed - (len(alive) - len(bound))
        return bound[short - 1] if 0 < short <= len(bound) else 0.0

    def winner(self) -> StandingPromise | None:
        """Return the leader's promise, if the refusals prove that there is one."""
        standing = self.poll.standing
        if standing is None or self.fleet.quorum == "none":
            return standing
        same_claim = [
            refusal
            for refusal in self.poll.no.values()
            if refusal.standing is not None and _claim(refusal.standing) == _claim(standing)
        ]
        return standing if len(same_claim) >= self.fleet.needed else None


class ReleaseRound(Round):
    """The members that have freed their vote for a claim."""

    question: ReleaseRequest

    def __init__(self, fleet: Fleet, question: ReleaseRequest, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.released = 1  # by this member itself

    @property
    def grant(self) -> Grant:
        """The claim that is released."""
        return Grant(self.question.name, self.question.holder, self.question.token)

    def take(self, member: int, reply: Reply) -> None:
        """Count a freed vote."""
        if isinstance(reply, ReleaseReply) and member in self.missing:
            self.missing.discard(member)
            self.released += 1

    def is_done(self, awaited: Collection[int]) -> bool:
        """Return whether enough votes are free for a new leader; *awaited* are the members that must reply first."""
        return self.released >= self.fleet.needed and not self.missing.intersection(awaited)


class InspectRound(Round):
    """The members' views of the leader."""

    def __init__(self, fleet: Fleet, question: Question, name: str, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self._name = name
        self._replies: dict[int, InspectReply] = {}

    def take(self, member: int, reply: Reply) -> None:
        """Count a view."""
        if isinstance(reply, InspectReply):
            self.missing.discard(member)
            self._replies[member] = reply

    def outcome(self, awaited: Collection[int]) -> HeldBy | Vacant | None:
        """Return the leader, None if it is not known yet; *awaited* are the members that must reply first."""
        promises = self._most_voted()
        if promises and len(promises) >= self.fleet.needed and self.fleet.quorum == "majority":
            return self._held_by(promises)
        unheard = self.fleet.size - len(self._replies)
        if self.fleet.quorum == "majority":
            decided = len(self._replies) >= self.fleet.majority and len(promises) + unheard < self.fleet.needed
            return self._vacant() if decided else None
        if not self._replies or self.missing.intersection(awaited):
            return None
        return self._held_by(promises) if promises else self._vacant()

    def final_outcome(self) -> HeldBy | Vacant | NoAnswer:
        """Return what the replies so far suggest."""
        heard = len(self._replies)
        if heard < self.fleet.needed:
            return self.too_few(heard)
        promises = self._most_voted()
        if self.fleet.quorum == "none" or len(promises) >= self.fleet.needed:
            return self._held_by(promises) if promises else self._vacant()
        # The missing replies decide. The claim with votes may never have been won, or another may have led since.
        newest = max(reply.newest for reply in self._replies.values())
        for reply in self._replies.values():
            if reply.standing is not None and reply.standing.won and reply.standing.token >= newest:
                return self._told(reply.standing, certain=False)
        return NoAnswer(
            f"{heard} of {self.fleet.size} members answered, and fewer than {self.fleet.needed} of them voted for the "
            "same claim; the others might have"
        )

    def _most_voted(self) -> list[StandingPromise]:
        """Return the promises to the claim with most votes, the newest of equals."""
        groups: dict[tuple[int, int], list[StandingPromise]] = {}
        for reply in self._replies.values():
            if reply.standing is not None:
                groups.setdefault(_claim(reply.standing), []).append(reply.standing)
        if self.fleet.quorum == "none":
            return groups[max(groups)] if groups else []
        return max(groups.items(), key=lambda group: (len(group[1]), group[0]))[1] if groups else []

    def _held_by(self, promises: list[StandingPromise]) -> HeldBy:
        # It ends when fewer than needed of its promises still hold.
        ends = sorted((standing.remaining for standing in promises), reverse=True)
        remaining = ends[min(self.fleet.needed, len(ends)) - 1]
        is_asked = any(standing.resign_asked for standing in promises)
        return self._told(replace(promises[0], remaining=remaining, resign_asked=is_asked))

    def _told(self, standing: StandingPromise, *, certain: bool = True) -> HeldBy:
        return replace(held_by(self._name, standing, certain=certain), resign_asked=standing.resign_asked)

    def _vacant(self) -> Vacant:
        return Vacant(self._name, max(reply.newest for reply in self._replies.values()))


class ListRound(Round):
    """The names that the members know; each sends some at a time."""

    def __init__(self, fleet: Fleet, question: ListRequest, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.names: set[str] = set()
        self._after: dict[int, str] = {}
        self.complete = 0

    def take(self, member: int, reply: Reply) -> None:
        """Gather a page; an empty one is the last."""
        if not isinstance(reply, ListReply) or member not in self.missing:
            return
        self.names.update(reply.names)
        if reply.names:
            self._after[member] = reply.names[-1]
        else:
            self.missing.discard(member)
            self.complete += 1

    def question_to(self, member: int) -> Question:
        """Ask for the next page."""
        return ListRequest(self.question.round, self._after.get(member, ""))

    def next_question(self, member: int) -> Question | None:
        """Ask for the next page, if there is one."""
        return self.question_to(member) if member in self.missing else None


class ResignRound(Round):
    """The members whose vote a leader has, and which noted that it is asked to step down."""

    def __init__(self, fleet: Fleet, question: Question, asks: Sequence[int], ends_at: float) -> None:
        super().__init__(fleet, question, asks, ends_at)
        self.answers: dict[int, bool] = {}

    def take(self, member: int, reply: Reply) -> None:
        """Count a reply."""
        if isinstance(reply, ResignReply):
            self.missing.discard(member)
            self.answers[member] = reply.led


def held_by(name: str, standing: StandingPromise, *, certain: bool = True) -> HeldBy:
    """Return a promise as a store's answer; with the remaining time only if it is *certain* that its holder leads."""
    return HeldBy(name, standing.holder, standing.token, standing.remaining if certain else None, standing.metadata)


def _claim(standing: StandingPromise) -> tuple[int, int]:
    return standing.token, standing.member
