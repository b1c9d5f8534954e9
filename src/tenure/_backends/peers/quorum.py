"""The promises of one member, and the count of all: what makes one of equals the leader, and only one.

After PaxosLease (Trencseni, Gazso, Reinhardt: "PaxosLease: Diskless Paxos for Leases", 2012) and Gray & Cheriton
("Leases", 1989), in one round, with a token that rises.

House rules of a voter:

- For each name, it vouches for one claim at a time, for ``ttl`` seconds from the moment it was asked, by its own clock.
  Until then, or until the claimant itself frees it, it vouches for nobody else. The claimant counts from *before* it
  asked, and shortens that by drift and margin, so it stops believing before the first promise runs out.
- It never vouches for two claims under one token, nor for a token older than one it has heard of. Two majorities have a
  member in common, so no token is won twice, and each is higher than all that were won before.
- It forgets everything when it is started anew. So it keeps silent first: for one whole ``ttl_max``, after which what
  it may have promised is over; or until every other member has told it that it leads nothing and claims nothing. What
  those count later they have asked later, and the process that was there before us can't answer any more.
- When it awakes, it takes no token that is not higher than all that the others told of, and than the wall clock was (in
  ms) when it started. If all have told, that is all that anybody remembers. If it awakes because its time is over,
  those that it hears may have missed tokens that it has forgotten itself. So each keeps and tells a bound as well: the
  highest token or bound that it knew, its own wall clock included, and one more for each ms since, which is more than
  elections take. From the highest bound it goes on; and who has not told one gets no vote of it, and has none that it
  counts. That errs only if one was started by a clock that was ahead of all these, and they have not heard of it.
- Only if nobody remembers is it the clock alone that matters: then tokens rise unless it is behind the clocks by which
  members were started before, as they would stand now.

With ``quorum="none"``, a promise is a courtesy: it ends when its claimant is taken for dead, and of two leaders that
meet, the one with the older term (and of equal terms, the lower member) leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tenure._backends.peers.fleet import Fleet
from tenure._backends.peers.wire import Claim, Refusal, StandingPromise, Vote
from tenure._lease import Metadata

NAMES_MAX = 20_000
"""How many names a member remembers. A new one beyond that is not vouched for."""


@dataclass(slots=True)
class Promise:
    """To whom we said yes, and until when it binds us."""

    member: int
    holder: str
    token: int
    until: float
    metadata: Metadata
    resign_asked: bool = False
    won: bool = False  # it was renewed, so it made a leader

    def held(self, now: float) -> StandingPromise:
        return StandingPromise(
            self.member, self.holder, self.token, max(0.0, self.until - now), self.metadata, self.won
        )

    def is_of(self, member: int, holder: str, token: int) -> bool:
        return (self.member, self.holder, self.token) == (member, holder, token)


@dataclass(slots=True)
class Record:
    """What is known of one name. It is never deleted, so that its tokens never fall."""

    newest: int = 0  # the highest token vouched for, or heard of: a new claim must be higher
    term: int = 0  # the highest token vouched for that may have been won: a leader that renews must not be older
    before: int = 0  # what ``term`` was before the newest vote, should that turn out to be for nothing
    closed: int = 0  # the term under this token was handed back: neither it nor one before it is vouched for again
    promise: Promise | None = None  # the newest one, even if it has run out


class Voter:
    """One member's promises.

    Args:
        fleet: Whose member it is.
        floor: The wall clock in ms, when the member was started.
        is_alive: Whether a member is taken for alive; asked only without a quorum.
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
        """Whether we vouch for anybody."""
        self._bound, self._bound_at = floor, now
        self._heard: set[int] = set()
        self._unheard: set[int] = set()
        if fleet.quorum == "majority" and fleet.others:
            self.silent_until = now + fleet.ttl_max
        else:
            self.wake()
        self._floor = self.newest

    def wake(self) -> None:
        """Keep silent no longer: whatever was promised before the start is over."""
        self.awake = True
        self._floor = self.newest

    def wake_in_time(self, now: float) -> None:
        """Keep silent no longer, though not everybody has told what it remembers: count nobody who hasn't yet."""
        self._unheard = set(self._fleet.others) - self._heard
        self.learn(self.bound(now))
        self.wake()

    def note_reply(self, member: int, newest: int, bound: int, now: float) -> None:
        """Take note of what *member* remembers, and of the tokens that it may have missed."""
        self.learn(newest)
        self._bound = max(self.bound(now), bound)
        self._heard.add(member)
        if member in self._unheard:
            self._unheard.discard(member)
            self.learn(bound)
            self._floor = max(self._floor, bound)

    def knows(self, member: int) -> bool:
        """Return whether we may count on *member*: without its word, we might give a token that it has missed."""
        return member not in self._unheard

    def bound(self, now: float) -> int:
        """Return what no token has reached yet, so far as we may have missed some: they rise by less than 1 each ms."""
        self._bound = max(self._bound + int((now - self._bound_at) * 1000), self.newest)
        self._bound_at = now
        return self._bound

    def learn(self, token: int) -> None:
        """Take note of a token that was given somewhere."""
        self.newest = max(self.newest, token)

    def names(self) -> list[str]:
        """Return all names that were ever claimed, sorted."""
        return sorted(self._records)

    def promise(self, name: str, now: float) -> Promise | None:
        """Return the promise for *name* that binds us now."""
        record = self._records.get(name)
        promise = record.promise if record else None
        if promise is None or now >= promise.until:
            return None
        if self._fleet.quorum == "none" and not self._is_alive(promise.member, now):
            return None
        return promise

    def last(self, name: str) -> Promise | None:
        """Return the newest promise for *name*, even if it binds us no more."""
        record = self._records.get(name)
        return record.promise if record else None

    def token(self, name: str) -> int:
        """Return the highest token heard of under *name*."""
        record = self._records.get(name)
        return record.newest if record else 0

    def remembers(self, name: str) -> bool:
        """Return whether we know *name*, or have room for it: otherwise we vouch for nobody under it."""
        return name in self._records or len(self._records) < NAMES_MAX

    def leads(self, now: float) -> bool:
        """Return whether we ourselves may lead anything: whoever leads vouches for itself."""
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
            return Refusal(claim.round, max(record.newest, self._floor), standing.held(now))
        if not self._is_new(record, member, claim):
            return Refusal(claim.round, max(record.newest, self._floor), None)
        record.newest = max(record.newest, claim.token)
        record.before, record.term = record.term, max(record.term, claim.token)
        until = now + claim.ttl
        record.promise = Promise(member, claim.holder, claim.token, until, claim.metadata, won=claim.renewal)
        self.learn(claim.token)
        return Vote(claim.round, resign_asked=False)

    def _gives_way(self, standing: Promise, member: int, claim: Claim) -> bool:
        """Return whether a promise that stands ends because of this claim."""
        if (standing.member, standing.holder) == (member, claim.holder) and claim.token > standing.token:
            return True  # the same claim, taken back and made anew: its Free was overtaken, or lost
        if self._fleet.quorum == "majority":
            return False
        return claim.renewal and (claim.token, member) > (standing.token, standing.member)

    def _is_new(self, record: Record, member: int, claim: Claim) -> bool:
        if claim.token <= record.closed:
            return False
        # Who renews has its token already, from others who remembered: our own floor is for new ones. But no term goes
        # on after a newer one that may have been won, be it over again.
        if claim.token > (record.term if claim.renewal else max(record.newest, self._floor)):
            return True
        last = record.promise
        if last is not None and last.is_of(member, claim.holder, claim.token):
            return True  # it ran out here, and we have vouched for nobody since
        # Without a quorum there may be two terms of one number: a leader that renews is believed.
        return self._fleet.quorum == "none" and claim.renewal

    def free(self, name: str, member: int, holder: str, token: int, *, won: bool) -> bool:
        """Forget the promise for this claim, and that it ever may be renewed; return whether that is news."""
        record = self._record(name)
        if record is None:
            return False
        record.newest = max(record.newest, token)  # should the claim itself come later, it finds itself outdated
        self.learn(token)
        last = record.promise
        is_ours = last is not None and last.is_of(member, holder, token)
        if won and (is_ours or self._fleet.quorum == "majority"):  # without a quorum, another may lead under this token
            record.closed = max(record.closed, token)
        if not is_ours:
            return False  # whoever we vouch for, it isn't this claim
        record.promise = None
        if not won:
            record.term = record.before
        return True

    def adopt(self, name: str, held: StandingPromise, now: float) -> bool:
        """Without a quorum: believe another member that says who leads; return whether that is news."""
        if self._fleet.quorum == "majority" or held.member == self._fleet.me:
            return False
        record = self._record(name)
        if record is None or held.token <= record.closed:
            return False
        standing = self.promise(name, now)
        if standing is not None and (held.token, held.member) <= (standing.token, standing.member):
            return False
        record.newest = max(record.newest, held.token)
        record.before, record.term = record.term, max(record.term, held.token)
        record.promise = Promise(held.member, held.holder, held.token, now + held.remaining, held.metadata)
        self.learn(held.token)
        return True

    def ask_to_resign(self, name: str, now: float) -> bool:
        """Note that the leader of *name* is asked to step down; return whether we vouch for one."""
        promise = self.promise(name, now)
        if promise is not None:
            promise.resign_asked = True
        return promise is not None


@dataclass(slots=True)
class Poll:
    """The answers to one question, which every member gives once."""

    size: int
    yes: dict[int, bool] = field(default_factory=dict)
    """Who vouches, and whether it knows that the leader is asked to resign."""
    no: dict[int, Refusal] = field(default_factory=dict)

    def take(self, member: int, answer: Vote | Refusal) -> None:
        """Count *answer*; of two, the first."""
        if member not in self.yes and member not in self.no:
            match answer:
                case Vote(_, resign_asked):
                    self.yes[member] = resign_asked
                case Refusal():
                    self.no[member] = answer

    def is_hopeless(self, needed: int) -> bool:
        """Return whether so many can't vouch any more."""
        return self.size - len(self.no) < needed

    @property
    def answered(self) -> int:
        """How many have said something."""
        return len(self.yes) + len(self.no)

    @property
    def resign_asked(self) -> bool:
        """Whether anybody knows that the leader is asked to resign."""
        return any(self.yes.values())

    @property
    def newest(self) -> int:
        """The highest token that a no told of."""
        return max((deny.newest for deny in self.no.values()), default=0)

    @property
    def held(self) -> StandingPromise | None:
        """The newest promise that a no told of."""
        promises = [deny.held for deny in self.no.values() if deny.held is not None]
        return max(promises, key=lambda held: (held.token, held.remaining), default=None)
