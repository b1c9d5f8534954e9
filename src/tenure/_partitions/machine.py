"""One member of a group that shares partitions, as a pure state machine.

Rules:

- No member leads. Each looks at all leases of the group from time to time, and goes by what it sees: the members (the
  holders of slots), and who owns what. From that, all compute the same shares, see :func:`.plan.shares`.
- A member that owns less than its share claims vacant partitions. They are dealt to those that lack some, so that
  members with the same view don't claim the same ones.
- A member that owns more than its share gives the rest: the partitions that it was asked for first, then those that it
  got last. It releases each once the work on it has ended. One that lacks some, and finds too few vacant, asks such
  members for a partition (``ask_to_resign``), so that they look at once.
- A request for a partition that isn't too much is an operator's, if nobody lacks any, and no member came or went
  lately: then the partition is given, too, and its work begins anew in whichever process claims it.
- Leases keep two members from owning one partition. So a wrong view costs a request in vain, or a move; never more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tenure._jitter import Rng, later
from tenure._lease import HeldBy, Vacant
from tenure._partitions.plan import Layout, Member, identity_of, member_of, shares
from tenure._timing import Timing

SLOTS_AHEAD = 16
"""How many slots beyond the last one that is held are looked at. The first look is at all of them."""

CLAIMS_AT_ONCE = 64
"""A member has so many claims under way at most: a store is not flooded, and of members that begin together, the first
one does not take all before it sees the others."""

SLOTS_TRIED = 8
"""A newcomer chooses among so many vacant slots, so that several that come at once seldom choose the same."""


# --- effects ---


class Look(NamedTuple):
    """Inspect these leases; then call ``looked``, or ``look_failed``."""

    leases: tuple[str, ...]


class Join(NamedTuple):
    """Claim this slot, with this place in the order of joining; then call ``joined`` or ``slot_ended``."""

    slot: int
    order: int


class Claim(NamedTuple):
    """Claim this partition, and run the work on it; then call ``won``, or ``ended``."""

    partition: str


class Give(NamedTuple):
    """End the work on this partition, and release it; then call ``ended``."""

    partition: str


class Ask(NamedTuple):
    """Ask the owner of this partition to let go of it."""

    partition: str


class Leave(NamedTuple):
    """Release the slot; then call ``slot_ended``."""


Effect = Look | Join | Claim | Give | Ask | Leave


class Stage(Enum):
    """The stages of a partition here."""

    CLAIMING = "claiming"
    OWNED = "owned"
    ENDING = "ending"


@dataclass(slots=True)
class _Held:
    """A partition that is claimed, owned, or being given by this member."""

    stage: Stage
    since: float  # when it was won
    ignores_request: bool = False  # a request that came while another member lacked partitions


@dataclass(frozen=True, slots=True)
class View:
    """What a member saw at its last look."""

    members: tuple[Member, ...]
    owners: dict[str, str]
    """By partition, the identity of the owner; vacant ones are missing."""
    asked: frozenset[str]
    """The partitions whose owners were asked to let go."""
    vacant_slots: tuple[int, ...]


class PartitionMachine:
    """One member. Methods report what has happened, and return the effects to perform; ``wake_at`` says when to tick.

    Args:
        layout: The partitions.
        identity: This member's; it begins the holders of all its leases.
        timing: The times of the leases.
        rng: Source of jitter.
        weight: The weight of its share.
        now: The present time; the first look is due at once.
    """

    def __init__(self, layout: Layout, identity: str, timing: Timing, rng: Rng, *, weight: int, now: float) -> None:
        self.layout = layout
        self.identity = identity
        self.timing = timing
        self._rng = rng
        self._weight = weight
        self._held: dict[str, _Held] = {}  # in the order in which they were claimed
        self._claiming = 0
        self._to_claim: deque[str] = deque()  # what the last look left to claim
        self._slot: int | None = None
        self._is_joined = False
        self._order: int | None = None
        self._is_leaving = False
        self._slots_max = max(
            len(layout.partitions), SLOTS_AHEAD
        )  # also where a member has fewer partitions by mistake
        self._slots_seen = self._slots_max
        self._join_at = now  # when a slot may be claimed
        self._refusals = 0  # of slots, in a row: held by another member, or without an answer
        self._look_due = now
        self._is_looking = False
        self._looked_at = -math.inf  # when the last look was begun
        self._failed_at = -math.inf  # when it got no answer; minus infinity if it got one
        self._not_before: dict[
            str, float
        ] = {}  # partitions whose work has ended by itself, and when to claim them again
        self._lacking_since: float | None = None
        self._hurried_at: dict[str, float] = {}  # by identity, when a member was asked to let go
        self._identities: frozenset[str] = frozenset()
        self._changed_at = now  # when the members changed, as far as is known here
        self.view: View | None = None
        """What was seen last; None before the first look."""
        self.share = 0
        """How many partitions this member is to own."""
        self.conflict: str | None = None
        """Why this member can't take part: an older one has other partitions. None if no such member is known."""
        self._others_since: dict[str, float] = {}  # by identity, since when such a member was seen

    @property
    def wake_at(self) -> float:
        """When to call ``tick``; infinity while a look is under way, or nothing is to be done any more."""
        return math.inf if self._is_looking or self._is_leaving else self._look_due

    @property
    def member(self) -> Member | None:
        """This member, as the others see it; None while it holds no slot."""
        if not self._is_joined or self._slot is None or self._order is None:
            return None
        return Member(self._slot, self.identity, self._order, self._weight, self.layout.text)

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to leave."""
        return self._is_leaving

    @property
    def owned(self) -> tuple[str, ...]:
        """The partitions whose leases are held, in the order in which they were claimed. Any thread may ask."""
        return tuple(name for name, one in list(self._held.items()) if one.since < math.inf)

    @property
    def has_left(self) -> bool:
        """Whether it was told to leave, and holds nothing any more."""
        return self._is_leaving and not self._held and self._slot is None

    # --- what happens ---

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        if now < self.wake_at:
            return []
        self._is_looking, self._looked_at, self._look_due = True, now, math.inf
        slots = map(self.layout.slot, range(self._slots_seen))
        return [Look((*slots, *map(self.layout.lease_of, self.layout.partitions)))]

    def hinted(self, now: float) -> None:
        """Something may have changed: look soon. Hints may be wrong, so looks have a pause between them.

        They may also come all the while that no look is answered; then half of the pause after a failure is kept.
        """
        retry_every = self.timing.retry_every
        self._look_by(max(now, self._looked_at + retry_every / 10, self._failed_at + retry_every / 2))

    def look_failed(self, now: float) -> None:
        """The store did not answer."""
        self._is_looking, self._failed_at = False, now
        self._to_claim.clear()  # a claim without an answer may be granted unawares, and kept from the others
        self._slots_seen = self._slots_max
        self._look_due = now + later(self.timing.retry_every, self._rng)  # also if a hint came meanwhile

    def looked(self, found: Sequence[HeldBy | Vacant], now: float) -> list[Effect]:
        """The leases that the look named have these states, in its order."""
        began = self._looked_at
        self._is_looking, self._failed_at = False, -math.inf
        self.view = view = self._seen(found)
        remaining = (one.remaining for one in found if isinstance(one, HeldBy) and one.remaining is not None)
        effects: list[Effect] = []
        if self._is_leaving:
            return effects
        self._note_members(view, now)
        is_alone = self._note_others(view, now)
        if self._slot is None and is_alone and now >= self._join_at:
            effects += self._join(view)
        if self._is_joined or (self._slot is None and self._held):
            effects += self._balance(view, began, now)
        self._plan_look(min(remaining, default=math.inf), now)
        return effects

    def joined(self, now: float) -> None:
        """The slot is held."""
        self._is_joined, self._refusals = True, 0
        self._look_by(now)

    def slot_ended(self, now: float) -> None:
        """The slot is not held, or not any more."""
        pause = self.timing.retry_every / 10
        if not self._is_joined:
            pause = self._pause_after_refusals()
            self._refusals = min(self._refusals + 1, 10)
        self._slot, self._is_joined = None, False
        self._to_claim.clear()
        self._slots_seen = self._slots_max  # it may not have looked for long
        self._join_at = now + later(pause, self._rng, share=1.0)
        self._look_by(self._join_at)

    def won(self, partition: str, now: float) -> list[Effect]:
        """The claim of *partition* was granted."""
        held = self._held[partition]
        held.since = now
        if held.stage is not Stage.CLAIMING:
            return []
        held.stage = Stage.OWNED
        return self._claim_answered(now)

    def ended(self, partition: str, now: float) -> list[Effect]:
        """This member does not hold *partition*, or not any more: refused, given, lost, or its work has ended."""
        held = self._held.pop(partition)
        if held.stage is not Stage.ENDING:  # refused, or ended by itself: not again at once
            self._not_before[partition] = now + later(self.timing.retry_every, self._rng)
        effects = self._claim_answered(now) if held.stage is Stage.CLAIMING else []
        self._look_by(now + later(self.timing.retry_every / 10, self._rng, share=1.0))
        return effects

    def leave(self, now: float) -> list[Effect]:
        """Release the slot, so that the others take over; and give everything."""
        if self._is_leaving:
            return []
        self._is_leaving = True
        self._to_claim.clear()
        effects: list[Effect] = [] if self._slot is None else [Leave()]
        kept = [partition for partition, held in self._held.items() if held.stage is not Stage.ENDING]
        return effects + [self._given(partition) for partition in kept]

    # --- inner ---

    def _claim_answered(self, now: float) -> list[Effect]:
        """Note that a claim is under way no more, and claim the next one; after the last one, there may be more."""
        self._claiming -= 1
        if self._claiming == 0 and not self._to_claim and self._lacking_since is not None:
            self._look_by(max(now, self._looked_at + self.timing.retry_every / 10))
        return self._claim()

    def _claim(self) -> list[Effect]:
        """Claim what was dealt to this member, so many at once."""
        effects: list[Effect] = []
        while self._to_claim and self._claiming < CLAIMS_AT_ONCE:
            partition = self._to_claim.popleft()
            self._claiming += 1
            self._held[partition] = _Held(Stage.CLAIMING, math.inf)
            effects.append(Claim(partition))
        return effects

    def _pause_after_refusals(self) -> float:
        """Return how long to wait before a slot is claimed again: longer and longer, as the store may only be read."""
        retry_every = self.timing.retry_every
        return min(retry_every / 4 * 1.5**self._refusals, retry_every)

    def _look_by(self, at: float) -> None:
        self._look_due = min(self._look_due, at)

    def _seen(self, found: Sequence[HeldBy | Vacant]) -> View:
        count = len(found) - len(self.layout.partitions)
        slots, rest = found[:count], found[count:]
        # One without a layout has not written it yet, or is another program. A member that lost its slot, and has
        # another one, may be seen in both for a while.
        seen = [member_of(slot, one) for slot, one in enumerate(slots) if isinstance(one, HeldBy)]
        others = {one.identity: one for one in seen if one.layout and one.identity != self.identity}
        members = list(others.values())
        usable = slots[: len(self.layout.partitions)]
        vacant = tuple(slot for slot, one in enumerate(usable) if isinstance(one, Vacant))
        if self.member is not None:
            members.append(self.member)
        last = max((one.slot for one in members), default=0)
        self._slots_seen = min(last + 1 + SLOTS_AHEAD, self._slots_max)
        pairs = list(zip(self.layout.partitions, rest, strict=True))
        return View(
            members=tuple(members),
            owners={name: identity_of(one.holder) for name, one in pairs if isinstance(one, HeldBy)},
            asked=frozenset(name for name, one in pairs if isinstance(one, HeldBy) and one.resign_asked),
            vacant_slots=vacant,
        )

    def _note_members(self, view: View, now: float) -> None:
        identities = frozenset(one.identity for one in view.members)
        self._hurried_at = {identity: at for identity, at in self._hurried_at.items() if identity in identities}
        if identities != self._identities:
            self._identities, self._changed_at = identities, now

    def _note_others(self, view: View, now: float) -> bool:
        """Note a conflict; return whether no older member has other partitions.

        Where a store doesn't know how long a lease lasts, the member may be dead: then it is watched for as long.
        """
        mine, text = self.member, self.layout.text
        others = [
            one for one in view.members if one.layout != text and (mine is None or one.seniority < mine.seniority)
        ]
        self._others_since = {one.identity: self._others_since.get(one.identity, now) for one in others}
        for one in others:
            if one.is_timed or now - self._others_since[one.identity] > self.timing.ttl:
                self.conflict = (
                    f"{self.layout.name!r} has a member with other partitions ({one.layout}) than those given here "
                    f"({text}): {one.identity}; all members need the same ones, in the same order: stop it first (a "
                    f"dead one is forgotten after its ttl), or give this group another name"
                )
        return not others

    def _join(self, view: View) -> list[Effect]:
        if not view.vacant_slots:
            return []  # as many members as partitions: stand by
        if self._order is None:
            self._order = 1 + max((one.order for one in view.members), default=0)
        choices = view.vacant_slots[:SLOTS_TRIED]
        self._slot = choices[int(self._rng.random() * len(choices))]
        return [Join(self._slot, self._order)]

    def _balance(self, view: View, began: float, now: float) -> list[Effect]:
        self._to_claim.clear()
        partitions = self.layout.partitions
        wanted = shares(view.members, len(partitions))
        # 0 if it has lost its slot, and another member has taken the last one.
        self.share = wanted.get(self.identity, 0)
        kept = {name: one for name, one in self._held.items() if one.stage is not Stage.ENDING}
        owned = dict.fromkeys(wanted, 0)
        for name, owner in view.owners.items():
            if owner in owned and owner != self.identity and name not in self._held:
                owned[owner] += 1
        owned[self.identity] = len(kept)
        if len(kept) > self.share:
            self._lacking_since = None
            return self._give(view, len(kept) - self.share)
        effects = self._heed(view, owned, wanted, began, now)
        if len(kept) < self.share:
            effects += self._take(view, owned, wanted, now)
        else:
            self._lacking_since = None
        return effects

    def _give(self, view: View, surplus: int) -> list[Effect]:
        """Give *surplus* partitions: those that were asked for, then those that came last."""
        kept = [name for name in reversed(self._held) if self._held[name].stage is not Stage.ENDING]
        kept.sort(key=lambda name: name not in view.asked)
        return [self._given(name) for name in kept[:surplus]]

    def _given(self, partition: str) -> Effect:
        held = self._held[partition]
        self._claiming -= held.stage is Stage.CLAIMING
        held.stage = Stage.ENDING
        return Give(partition)

    def _heed(
        self, view: View, owned: dict[str, int], wanted: dict[str, int], began: float, now: float
    ) -> list[Effect]:
        """Give what an operator asked for."""
        is_settled = now - self._changed_at > self.timing.ttl and not any(
            owned[identity] < wanted[identity] for identity in wanted if identity != self.identity
        )
        effects = []
        for name in view.asked:
            one = self._held.get(name)
            if one is None or one.stage is not Stage.OWNED or one.since >= began or one.ignores_request:
                continue
            if is_settled:
                effects.append(self._given(name))
            else:
                one.ignores_request = True
        return effects

    def _take(self, view: View, owned: dict[str, int], wanted: dict[str, int], now: float) -> list[Effect]:
        """Claim vacant partitions; and ask for more if they are too few."""
        if self._lacking_since is None:
            self._lacking_since = now
        lacks = [
            (one.identity, wanted[one.identity] - owned[one.identity])
            for one in sorted(view.members, key=lambda one: one.seniority)
            if wanted[one.identity] > owned[one.identity]
        ]
        vacant = [name for name in self.layout.partitions if name not in view.owners and name not in self._held]
        mine = self._dealt(vacant, lacks)
        lacks_still = wanted[self.identity] - owned[self.identity] - len(mine)
        self._not_before = {name: time for name, time in self._not_before.items() if now < time}
        self._to_claim.extend(name for name in mine if name not in self._not_before)
        effects = self._claim()
        if lacks_still > 0:
            effects += self._hurry(view, owned, wanted, now)
        return effects

    def _hurry(self, view: View, owned: dict[str, int], wanted: dict[str, int], now: float) -> list[Effect]:
        """Ask each member that owns too much for one partition: so it looks now, and gives all that is too much."""
        effects: list[Effect] = []
        for identity, share in wanted.items():
            if identity == self.identity or owned[identity] <= share:
                continue
            if now - self._hurried_at.get(identity, -math.inf) < self.timing.ttl:
                continue  # what it gives is released when the work has ended
            # A partition that was asked for before in this term may give no new hint.
            names = (name for name in view.owners if view.owners[name] == identity and name not in view.asked)
            if (name := next(names, None)) is not None:
                self._hurried_at[identity] = now
                effects.append(Ask(name))
        return effects

    def _dealt(self, partitions: list[str], lacks: list[tuple[str, int]]) -> list[str]:
        """Deal *partitions* to the members that lack some; return this one's."""
        start = 0
        for identity, lack in lacks:
            if identity == self.identity:
                return partitions[start : start + lack]
            start += lack
        return []

    def _plan_look(self, remaining: float, now: float) -> None:
        """Look again after ``renew_every``; sooner while something is missing here, or when a lease ends before."""
        timing = self.timing
        wait = later(0.8 * timing.renew_every, self._rng, share=0.5)
        is_lacking = self._lacking_since is not None and now - self._lacking_since < 2 * timing.ttl
        is_joining = not self._is_joined and self.view is not None and self.view.vacant_slots
        if is_lacking:
            wait = min(wait, later(timing.retry_every / 4, self._rng))
        if is_joining:
            wait = min(wait, max(later(self._pause_after_refusals(), self._rng), self._join_at - now))
        jitter = 0.1 * timing.retry_every * self._rng.random()
        pause = timing.retry_every / 10
        self._look_by(min(now + wait, max(self._looked_at + pause, now + remaining + jitter)))


def slots_to_follow(machine: PartitionMachine) -> Iterable[str]:
    """Return the slots of the other members: one that leaves releases its slot first, so that all look at once."""
    if machine.view is not None and not machine.is_leaving:
        for one in machine.view.members:
            if one.identity != machine.identity:
                yield machine.layout.slot(one.slot)
