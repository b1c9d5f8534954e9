"""Simulated stores of one lease: one that judges expiry by its own clock, one whose callers watch it for a change."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from tenure._election.effects import Acquire, Inspect, Release, Renew, Withdraw
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure.testing._sim.elections.plan import Plan
from tenure.testing._sim.world import SkewedClock, World

Question = Acquire | Inspect | Renew | Release | Withdraw
NO_HOLDER = ""


class Watcher(Protocol):
    """A candidate, as its adapter to a watched store sees it."""

    seen: tuple[int, float]
    """The version that was seen last, and since when by the candidate's clock."""


class ClockStore:
    """A lease that ends when the store's clock says so. Each verb compares and sets in one step, as real ones do."""

    def __init__(self, world: World, plan: Plan, clock: SkewedClock, ages: Random, name: str) -> None:
        self.world = world
        self.plan = plan
        self.clock = clock
        self.ages = ages
        self.name = name
        self.ttl = plan.timing.ttl
        self.holder = NO_HOLDER
        self.token = 0
        self.expires = -1.0
        self.resign_asked = False
        self.age = 0.0  # of the newest claim
        self.oldest = plan.oldest  # the share of ttl by which a claim may be old
        self.silent_until = -1.0  # by its clock: until then nothing is given out, see forget()

    # --- what an adapter does at its own end ---

    def message(self, node: Watcher, question: Question, local: float) -> Any:
        """Return what is sent for *question*, made at *local* by the candidate's clock."""
        return question

    def reading(self, node: Watcher, answer: Any, local: float) -> Granted | HeldBy | Vacant | Lost | Released:
        """Return the answer that the candidate gets, for what arrived at *local* by its clock."""
        result: Granted | HeldBy | Vacant | Lost | Released = answer
        return result

    # --- what happens at the store ---

    def perform(self, message: Any) -> Any:
        """Do what *message* asks for, now."""
        match message:
            case Acquire(_, holder):
                return self.acquire(holder)
            case Inspect():
                return self.inspect()
            case Renew(_, grant):
                return self.renew(grant)
            case Release(_, grant):
                return self.release(grant)
        raise AssertionError(f"a store was sent {message!r}")

    def acquire(self, holder: str) -> Granted | HeldBy:
        """Give the lease if it is free; again to the holder that has it already."""
        if self.held():
            if self.holder != holder:
                return HeldBy(self.name, self.holder, self.token, self.remaining())
            self.expires = self.lasting(self.expires)
        elif self.now() < self.silent_until:
            return HeldBy(self.name, "somebody", self.token, self.silent_until - self.now())
        else:
            self.give(holder)
        return Granted(Grant(self.name, holder, self.token), self.resign_asked, self.age)

    def inspect(self) -> Any:
        """Return who has the lease."""
        return HeldBy(self.name, self.holder, self.token, self.remaining()) if self.held() else Vacant(self.name)

    def renew(self, grant: Grant) -> Granted | Lost:
        """Extend the lease if *grant* still has it."""
        if not (self.held() and self.same(grant)):
            return Lost(grant)
        self.expires = self.lasting(self.expires)
        return Granted(grant, self.resign_asked, self.age)

    def release(self, grant: Grant) -> Released | Lost:
        """Take the lease back if *grant* still has it; the token is kept."""
        if not (self.held() and self.same(grant)):
            return Lost(grant)
        self.holder = NO_HOLDER
        return Released(grant)

    def ask_to_resign(self) -> bool:
        """Note that the holder should step down; it reads that in its next answer."""
        self.resign_asked = self.held()
        return self.resign_asked

    def forget(self) -> None:
        """Lose the lease in a restart, and keep the token. Nothing is given out for a ttl, as the old holder trusts."""
        self.holder = NO_HOLDER
        self.silent_until = self.now() + self.ttl

    # --- parts ---

    def now(self) -> float:
        """Return the store's time."""
        return self.clock.reading(self.world.now)

    def held(self) -> bool:
        """Return whether a candidate has the lease."""
        return self.holder != NO_HOLDER and self.now() < self.expires

    def same(self, grant: Grant) -> bool:
        """Return whether *grant* is the claim that was given last."""
        return self.holder == grant.holder and self.token == grant.token

    def give(self, holder: str) -> None:
        """TrackedDelivery the lease to *holder*, under a token of its own."""
        self.holder = holder
        self.token += 1
        self.expires = self.lasting(-1.0)
        self.resign_asked = False

    def lasting(self, until: float) -> float:
        """Return until when a claim lasts that is asked for now and lasted *until* then; draw how old it is."""
        self.age = self.ttl * self.oldest * self.ages.random()
        return max(until, self.now() + self.ttl - self.age)

    def remaining(self) -> float | None:
        """Return the time left, as a refused candidate gets it."""
        return self.expires - self.now() if self.plan.shows_remaining else None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claim on a watched record: *unchanged* is the version that stood still for a whole ttl of the caller's time."""

    question: Question
    unchanged: int | None
    sent_at: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The record as it is: its version, and its writer."""

    version: int
    holder: str
    token: int
    written_at: float


class WatchedStore(ClockStore):
    """A record without expiry. A caller that finds it unchanged for a whole ttl, by its own clock, may overwrite it.

    No two clocks are compared: *when the change was seen* is read from the same clock as *now*.
    """

    def __init__(self, world: World, plan: Plan, clock: SkewedClock, ages: Random, name: str) -> None:
        super().__init__(world, plan, clock, ages, name)
        self.version = 0
        self.written_at = 0.0  # by the writer's clock: for operators to read, never compared

    def message(self, node: Watcher, question: Question, local: float) -> Any:
        """Say with a claim which version has outlived its ttl."""
        if not isinstance(question, Acquire):
            return question
        return Attempt(question, self.outlived(node, local), local)

    def outlived(self, node: Watcher, local: float) -> int | None:
        """Return the version that *node* has seen unchanged for a whole ttl."""
        version, since = node.seen
        return version if local - since >= self.ttl else None

    def reading(self, node: Watcher, answer: Any, local: float) -> Granted | HeldBy | Vacant | Lost | Released:
        """Note when a change was seen: at the arrival of the answer, as it was made before that."""
        if not isinstance(answer, Seen):
            return super().reading(node, answer, local)
        if node.seen[0] != answer.version:
            node.seen = (answer.version, local)
        left = max(0.0, self.ttl - (local - node.seen[1])) if self.plan.shows_remaining else None
        return HeldBy(self.name, answer.holder, answer.token, left)

    def perform(self, message: Any) -> Any:
        """Do what *message* asks for, now."""
        if not isinstance(message, Attempt):
            return super().perform(message)
        assert isinstance(message.question, Acquire)
        holder = message.question.holder
        if self.holder == holder:
            self.touch()
        elif self.free() if self.holder == NO_HOLDER else message.unchanged == self.version:
            self.give(holder)
        else:
            return self.seen()
        self.written_at = message.sent_at
        return Granted(Grant(self.name, holder, self.token), self.resign_asked)

    def inspect(self) -> Any:
        """Return the record, if it names a holder."""
        return self.seen() if self.held() else Vacant(self.name)

    def seen(self) -> Seen:
        """Return the record."""
        return Seen(self.version, self.holder or "somebody", self.token, self.written_at)

    def renew(self, grant: Grant) -> Granted | Lost:
        """Change the record if *grant* still has it, however long ago it was changed last."""
        answer = super().renew(grant)
        if isinstance(answer, Granted):
            self.touch()
        return answer

    def give(self, holder: str) -> None:
        """TrackedDelivery the lease to *holder*, under a token of its own."""
        super().give(holder)
        self.touch()

    def touch(self) -> None:
        """Change the record, for all that watch it."""
        self.version += 1

    def free(self) -> bool:
        """Return whether a free lease may be given out."""
        return self.now() >= self.silent_until

    def held(self) -> bool:
        """Return whether the record names a holder: it has no end."""
        return self.holder != NO_HOLDER
