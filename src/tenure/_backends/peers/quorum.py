"""The votes of one member, and the count of all: why there is one leader at a time, and why its token rises.

After PaxosLease (Trencseni, Gazso, Reinhardt: "PaxosLease: Diskless Paxos for Leases", 2012) and Gray & Cheriton
("Leases", 1989), in one round, with a token that rises.

House rules of a voter:

- A vote is a promise. For each name, a voter votes for one claim at a time, for ``ttl`` seconds from the moment it was
  asked, by its own clock. Until then, or until the claimant itself releases the claim, it votes for no other. The
  claimant counts from *before* it asked, and shortens that by drift and margin, so it stops believing before the first
  promise runs out.
- It never votes for two claims under one token, nor for a token older than one that it knows. Two majorities have a
  member in common, so no token is won twice, and each is higher than all that were won before.
- A restarted voter has lost its promises. So it is silent at first: for one whole ``ttl_max``, after which its earlier
  promises are over; or until every other member has replied that it leads nothing and claims nothing. Votes that those
  count later were asked for later, and the process before this one can't answer any more.
- When it begins to vote, it accepts no token that is not higher than all tokens in the replies, and than the wall clock
  (in ms) when it started. If all members have replied, no other token is remembered anywhere. If it begins because its
  time is over, the members that replied may have missed tokens that it has lost itself. So each member also keeps a
  bound, and sends it in its replies: the highest token or bound that it knew, its own wall clock included, and one more
  for each ms since, which is faster than elections use tokens up. The voter continues from the highest bound; a member
  that has not sent its bound gets no vote from it, and its votes are not counted. That errs only if a member was
  started by a clock that was ahead of all these, and they have not received its tokens.
- The clock alone matters only if no member remembers any token: then tokens rise unless this clock is behind the clocks
  by which members were started before, as they would read now.

With ``quorum="none"``, a promise is only advice: it ends when its claimant counts as dead, and of two leaders that
meet, the one with the older term (and of equal terms, the lower member) leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.wire import Claim, Refusal, StandingPromise, Vote
from tenure._lease import Metadata

NAMES_MAX = 20_000
"""How many names a member remembers. It doesn't vote for a new one beyond that."""


@dataclass(slots=True)
class Promise:
    """The claim that has this member's vote, and until when."""

    member: int
    holder: str
    token: int
    until: float
    metadata: Metadata
    resign_asked: bool = False
    won: bool = False  # it was renewed, so a majority had voted for it

    def standing(self, now: float) -> StandingPromise:
        left = max(0.0, self.until - now)
        return StandingPromise(self.member, self.holder, self.token, left, self.metadata, self.won, self.resign_asked)

    def is_of(self, member: int, holder: str, token: int) -> bool:
        return (self.member, self.holder, self.token) == (member, holder, token)


@dataclass(slots=True)
class Record:
    """A voter's record of one name. It is never deleted, so that its tokens never fall."""

    newest: int = 0  # the highest token voted for or received: a new claim must be higher
    term: int = 0  # the highest token voted for that may have been won: a leader that renews must not be older
    before: int = 0  # what ``term`` was before the newest vote, to return to if that claim is not won
    closed: int = 0  # the term under this token was released: no vote for it or an earlier one any more
    promise: Promise | None = None  # the newest one, even if it has run out


class Voter:
    """One member's votes.

    Args:
        fleet: Whose member it is.
        floor: The wall clock in ms, when the member was started.
        is_alive: Whether a member counts as alive; asked only without a quorum.
        now: The present moment.
    """

    def __init__(self, fleet: Fleet, floor: int, is_alive: Callable[[int, float], bool], now: float) -> None:
        self._fleet = fleet
        self._is_alive = is_alive
        self._records: dict[str, Record] = {}
        self.newest = floor
        """The highest token known, of any name. A claim takes a higher one."""
        self.silent_until = now
        self.awake = False
        """Whether this member votes."""
        self._bound, self._bound_at = floor, now
        self._heard: set[int] = set()
        self._unheard: set[int] = set()
        if fleet.quorum == "majority" and fleet.others:
            self.silent_until = now + fleet.ttl_max
        else:
            self.wake()
        self._floor = self.newest

    def wake(self) -> None:
        """Begin to vote: all promises from before the start are over."""
        self.awake = True
        self._floor = self.newest

    def wake_in_time(self, now: float) -> None:
        """Begin to vote, though not all members have replied: those that have not don't count."""
        self._unheard = set(self._fleet.others) - self._heard
        self.learn(self.bound(now))
        self.wake()

    def note_reply(self, member: int, newest: int, bound: int, now: float) -> None:
        """Take in the start-up reply of *member*: the newest token that it remembers, and its bound."""
        self.learn(newest)
        self._bound = max(self.bound(now), bound)
        self._heard.add(member)
        if member in self._unheard:
            self._unheard.discard(member)
            self.learn(bound)
            self._floor = max(self._floor, bound)

    def knows(self, member: int) -> bool:
        """Return whether *member* counts: without its reply, it might know a newer token than this member does."""
        return member not in self._unheard

    def bound(self, now: float) -> int:
        """Return a number that no token has reached yet, missed ones included: they rise by less than 1 each ms."""
        self._bound = max(self._bound + int((now - self._bound_at) * 1000), self.newest)
        self._bound_at = now
        return self._bound

    def learn(self, token: int) -> None:
        """Take note of a token that was given to any claim."""
        self.newest = max(self.newest, token)

    def names(self) -> list[str]:
        """Return all names that were ever claimed, sorted."""
        return sorted(self._records)

    def promise(self, name: str, now: float) -> Promise | None:
        """Return the promise for *name* that holds now."""
        record = self._records.get(name)
        promise = record.promise if record else None
        if promise is None or now >= promise.until:
            return None
        if self._fleet.quorum == "none" and not self._is_alive(promise.member, now):
            return None
        return promise

    def last(self, name: str) -> Promise | None:
        """Return the newest promise for *name*, even if it is over."""
        record = self._records.get(name)
        return record.promise if record else None

    def token(self, name: str) -> int:
        """Return the highest token known for *name*."""
        record = self._records.get(name)
        return record.newest if record else 0

    def remembers(self, name: str) -> bool:
        """Return whether *name* is known, or there is room for it: otherwise no claim to it gets a vote."""
        return name in self._records or len(self._records) < NAMES_MAX

    def leads(self, now: float) -> bool:
        """Return whether this member may lead anything: a leader votes for itself."""
        promises = (self.promise(name, now) for name in self._records)
        return any(promise is not None and promise.member == self._fleet.me for promise in promises)

    def _record(self, name: str) -> Record | None:
        if not self.remembers(name):
            return None
        return self._records.setdefault(name, Record())

    # --- votes ---

    def vote(self, member: int, claim: Claim, now: float) -> Vote | Refusal | None:
        """Answer the claim of *member*; None for silence."""
        if not self.awake or not self.knows(member) or claim.ttl > self._fleet.ttl_max:
            return None
        record = self._record(claim.name)
        if record is None:
            return None
        standing = self.promise(claim.name, now)
        if standing is not None and standing.is_of(member, claim.holder, claim.token):
            standing.until = max(standing.until, now + claim.ttl)
            standing.won = standing.won or claim.renewal
            return Vote(claim.round, standing.resign_asked)
        if standing is not None and not self._gives_way(standing, member, claim):
            return Refusal(claim.round, max(record.newest, self._floor), standing.standing(now))
        if not self._is_new(record, member, claim):
            return Refusal(claim.round, max(record.newest, self._floor), None)
        record.newest = max(record.newest, claim.token)
        record.before, record.term = record.term, max(record.term, claim.token)
        until = now + claim.ttl
        record.promise = Promise(member, claim.holder, claim.token, until, claim.metadata, won=claim.renewal)
        self.learn(claim.token)
        return Vote(claim.round, resign_asked=False)

    def _gives_way(self, standing: Promise, member: int, claim: Claim) -> bool:
        """Return whether a promise that still holds ends because of this claim."""
        if (standing.member, standing.holder) == (member, claim.holder) and claim.token > standing.token:
            return True  # the same claim, withdrawn and made again: its ReleaseRequest was overtaken, or lost
        if self._fleet.quorum == "majority":
            return False
        return claim.renewal and (claim.token, member) > (standing.token, standing.member)

    def _is_new(self, record: Record, member: int, claim: Claim) -> bool:
        if claim.token <= record.closed:
            return False
        # A renewal has its token already, from voters that remembered: the floor is for new claims. But no term goes on
        # after a newer one that may have been won, even if that is over again.
        if claim.token > (record.term if claim.renewal else max(record.newest, self._floor)):
            return True
        last = record.promise
        if last is not None and last.is_of(member, claim.holder, claim.token):
            return True  # it ran out here, and no other claim has had this vote since
        # Without a quorum there may be two terms of one number: a leader that renews is believed.
        return self._fleet.quorum == "none" and claim.renewal

    def free(self, name: str, member: int, holder: str, token: int, *, won: bool) -> bool:
        """End the promise for this claim, and let it never be renewed; return whether that is news."""
        record = self._record(name)
        if record is None:
            return False
        record.newest = max(record.newest, token)  # if the claim itself comes later, it is refused as outdated
        self.learn(token)
        last = record.promise
        is_ours = last is not None and last.is_of(member, holder, token)
        if won and (is_ours or self._fleet.quorum == "majority"):  # without a quorum, another may lead under this token
            record.closed = max(record.closed, token)
        if not is_ours:
            return False  # the vote belongs to another claim, or to none
        record.promise = None
        if not won:
            record.term = record.before
        return True

    def adopt(self, name: str, other: StandingPromise, now: float) -> bool:
        """Without a quorum: take over another member's promise to a leader; return whether it is new here."""
        if self._fleet.quorum == "majority" or other.member == self._fleet.me:
            return False
        record = self._record(name)
        if record is None or other.token <= record.closed:
            return False
        standing = self.promise(name, now)
        if standing is not None and (other.token, other.member) <= (standing.token, standing.member):
            return False
        record.newest = max(record.newest, other.token)
        record.before, record.term = record.term, max(record.term, other.token)
        record.promise = Promise(other.member, other.holder, other.token, now + other.remaining, other.metadata)
        self.learn(other.token)
        return True

    def ask_to_resign(self, name: str, now: float) -> bool:
        """Note that the leader of *name* is asked to step down; return whether one has this member's vote."""
        promise = self.promise(name, now)
        if promise is not None:
            promise.resign_asked = True
        return promise is not None


@dataclass(slots=True)
class Poll:
    """The votes on one claim; each member has one."""

    size: int
    yes: dict[int, bool] = field(default_factory=dict)
    """The members that voted yes, and whether each knows that the leader is asked to resign."""
    no: dict[int, Refusal] = field(default_factory=dict)

    def take(self, member: int, answer: Vote | Refusal) -> None:
        """Count *answer*; of two from one member, the first."""
        if member not in self.yes and member not in self.no:
            match answer:
                case Vote(_, resign_asked):
                    self.yes[member] = resign_asked
                case Refusal():
                    self.no[member] = answer

    def is_hopeless(self, needed: int) -> bool:
        """Return whether *needed* votes can't be reached any more."""
        return self.size - len(self.no) < needed

    @property
    def answered(self) -> int:
        """How many members have answered."""
        return len(self.yes) + len(self.no)

    @property
    def resign_asked(self) -> bool:
        """Whether a voter knows that the leader is asked to resign."""
        return any(self.yes.values())

    @property
    def newest(self) -> int:
        """The highest token in a refusal."""
        return max((refusal.newest for refusal in self.no.values()), default=0)

    @property
    def standing(self) -> StandingPromise | None:
        """The newest promise in a refusal."""
        promises = [refusal.standing for refusal in self.no.values() if refusal.standing is not None]
        return max(promises, key=lambda standing: (standing.token, standing.remaining), default=None)
