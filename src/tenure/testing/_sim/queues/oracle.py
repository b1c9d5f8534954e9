"""The oracle: a model of the queue beside the broker. Each answer of the broker is compared with the model's.

==================  ===================================================================================================
``from nowhere``    a message was handed out that was never sent, or with another body
``session``         a message was handed out in a session that it was not sent to, or in none
``too early``       a message was handed out before its delay had ended
``double lock``     a message was handed out while it was locked
``redelivered``     a message was handed out after it was completed, or had died
``count``           a delivery has another number than one more than those before it
``tries``           a message was handed out more often than allowed, or died otherwise than at its last try
``token``           a token was given out twice
``shortened``       a renewal, or one that was carried out late, made a lock end sooner
``stale verb``      a verdict or a renewal was accepted that came under no lock, or another one
``false no``        a verdict or a renewal was refused under a good lock
``settled twice``   a message was completed or died a second time
``kept twice``      a message with an id, sent again, was kept again
``dead letter``     a dead letter lacks its reason, error or history, or has no right to be there
``at once``         more messages were locked at once than the queue allows
``too fast``        more messages were handed out in a time than the queue allows, or than it does of a session
``lost``            an acknowledged message is neither waiting, completed nor dead
==================  ===================================================================================================
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim
from tenure._queue.failures import Failure
from tenure._queue.limits import Rate
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, DeadMessage, Delivery, SessionLock, Stats, Token
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    GIVE_BACK,
    Abandon,
    Complete,
    DeadLetter,
    GiveBack,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
)
from tenure.testing._sim.queues.plan import LimitPlan
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR, SkewedClock

OPEN, COMPLETED, DEAD = "open", "completed", "dead"


@dataclass(slots=True, eq=False)
class SentMessage:
    """A message that a producer sends. Its label is its body, and its id if it has one."""

    label: str
    is_named: bool
    session: str | None = None
    batch: int = 0
    """Messages of one batch were sent in one call, in their order."""
    acknowledged: bool = False
    sequences: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """What was stored of a sent message. A message without an id that is sent twice is there twice."""

    sent: SentMessage
    visible_at: float
    expires_at: float


@dataclass(slots=True, eq=False)
class Entry:
    """The model of a message in the queue."""

    sequence: int
    sent: SentMessage
    expires_at: float
    count: int = 0
    visible_at: float = 0.0
    token: Token | None = None
    until: float = 0.0
    end_state: str = OPEN
    end: DeadLetter | None = None
    error: Failure | None = None  # the last one reported
    tries: list[str] = field(default_factory=list)


class Oracle:
    """Follow a broker, verb by verb. All moments are by the broker's clock.

    Args:
        findings: Where violations go.
        clock: The broker's.
        max_deliveries: How often a message may be handed out.
        limits: Those of the queue.
    """

    def __init__(self, findings: Findings, clock: SkewedClock, max_deliveries: int, limits: LimitPlan) -> None:
        self.violated = findings.violated
        self.clock = clock
        self._max_deliveries = max_deliveries
        self._limits = limits
        self._handed_out_at: dict[str | None, deque[float]] = {}  # by session; of all, under None
        self._tokens: set[Token] = set()
        self._copies: dict[str, StoredCopy] = {}  # by id
        self.sent: dict[str, SentMessage] = {}
        self.entries: dict[int, Entry] = {}
        self.deliveries = 0

    # --- lookups ---

    def locked_until(self, delivery: Delivery) -> float:
        """Return until which true moment *delivery* has its lock; minus infinity if it has none any more."""
        entry = self.entries.get(delivery.sequence)
        if entry is None or entry.token != delivery.token:
            return -math.inf
        return self.clock.moment(entry.until)

    @property
    def acknowledged(self) -> int:
        """How many messages were acknowledged to their producers."""
        return sum(sent.acknowledged for sent in self.sent.values())

    # --- answers of the broker ---

    def sending(self, sent: SentMessage) -> None:
        """A producer is about to send this message."""
        self.sent[sent.label] = sent

    def kept(self, messages: Sequence[Outgoing], ids: Sequence[str], now: float) -> None:
        """The broker has kept *messages* under *ids*, or knew them."""
        for message, name in zip(messages, ids, strict=True):
            if name not in self._copies:
                expires_at = math.inf if message.expires_in is None else now + message.expires_in
                self._copies[name] = StoredCopy(self.sent[message.body.decode()], now + message.delay, expires_at)

    def claimed(self, claim: Claim, lock: float, now: float) -> None:
        """The broker has locked and handed out what is in *claim*."""
        if claim.deliveries:
            self.new_token(claim.deliveries[0].token)
        for delivery in claim.deliveries:
            self.handed_out(delivery, now + lock, now)

    def new_token(self, token: Token) -> None:
        """The broker has given out *token*."""
        if token in self._tokens:
            self.violated("token", f"{token} was given out again")
        self._tokens.add(token)

    def handed_out(self, delivery: Delivery, until: float, now: float) -> Entry | None:
        """The broker has handed out *delivery*, locked *until* then; return its entry, None if it was never sent."""
        entry = self._entry(delivery)
        if entry is not None:
            if delivery.session != entry.sent.session:
                self.violated("session", f"{entry.sent.label} was sent to {entry.sent.session}, not {delivery.session}")
            self._handed_out(entry, delivery, now)
            entry.token, entry.until = delivery.token, until
        self._within_limits(delivery, now)
        return entry

    def _within_limits(self, delivery: Delivery, now: float) -> None:
        limits = self._limits
        if limits.max_locked < math.inf:
            locked = sum(one.token is not None and one.until > now for one in self.entries.values())
            if locked > limits.max_locked:
                self.violated("at once", f"{locked} messages are locked, {limits.max_locked} may be")
        self._within_rate(limits.rate, None, now)
        if delivery.session is not None:
            self._within_rate(limits.session_rate, delivery.session, now)

    def _within_rate(self, rate: Rate, session: str | None, now: float) -> None:
        if not isinstance(rate, tuple):
            return
        most, seconds = rate
        moments = self._handed_out_at.setdefault(session, deque())
        moments.append(now)
        while moments[0] <= now - seconds + BLUR:
            moments.popleft()
        if len(moments) > most:
            whose = "" if session is None else f" of {session}"
            self.violated("too fast", f"{len(moments)} messages{whose} were handed out in {seconds:g} s, not {most}")

    def given_back(self, entry: Entry, now: float) -> None:
        """The broker has taken a message back with its session, uncounted."""
        entry.token = None
        self._judged(entry, GIVE_BACK, now >= entry.expires_at, now)

    def is_dead_by_time(self, entry: Entry, now: float) -> bool:
        """Return whether *entry* is dead by its time to live, or as its last lock has ended."""
        return now >= entry.expires_at or (entry.token is not None and entry.count >= self._max_deliveries)

    def _entry(self, one: Delivery | DeadMessage) -> Entry | None:
        """Return the entry of a message that was handed out or has died; made when first seen, None if never sent."""
        entry = self.entries.get(one.sequence)
        if entry is None and (copy := self._copies.get(one.id)) is not None:
            sent = copy.sent
            sent.sequences.add(one.sequence)
            if sent.is_named and len(sent.sequences) > 1:
                self.violated("kept twice", f"{sent.label} is there as {sorted(sent.sequences)}")
            entry = Entry(one.sequence, sent, copy.expires_at, visible_at=copy.visible_at)
            self.entries[one.sequence] = entry
        if entry is None or one.body.decode() != entry.sent.label:
            self.violated("from nowhere", f"{one.id!r} was never sent with {one.body!r}")
        return entry

    def _handed_out(self, entry: Entry, delivery: Delivery, now: float) -> None:
        self.deliveries += 1
        name = entry.sent.label
        if entry.end_state != OPEN:
            self.violated("redelivered", f"{name} was handed out when it was {entry.end_state}")
        if entry.token is not None:
            if now < entry.until:
                self.violated("double lock", f"{name} was handed out {entry.until - now:.3f} s before its lock ended")
            entry.tries.append("expired")
        if now < entry.visible_at:
            self.violated("too early", f"{name} was handed out {entry.visible_at - now:.3f} s before its time")
        entry.count += 1
        if delivery.delivery_count != entry.count:
            self.violated("count", f"{name} says delivery {delivery.delivery_count}, it is number {entry.count}")
        if entry.count > self._max_deliveries:
            self.violated("tries", f"{name} was handed out {entry.count} times, {self._max_deliveries} are allowed")

    def renewed(
        self, held: Sequence[Any], answers: Sequence[Renewed | Lapsed | NoAnswer], lock: float, now: float
    ) -> None:
        """The broker has answered a renewal."""
        for one, answer in zip(held, answers, strict=True):
            if isinstance(answer, NoAnswer) or isinstance(one, SessionLock):  # could not be asked about, or a session
                continue
            entry = self._locked(one, not isinstance(answer, Lapsed), "renewed", now)
            if entry is not None:
                assert isinstance(answer, Renewed)
                if answer.locked_until < entry.until - BLUR:
                    sooner = entry.until - answer.locked_until
                    self.violated("shortened", f"the lock of {entry.sent.label} ends {sooner:.3f} s sooner")
                entry.until = now + lock

    def settled(self, settlements: Sequence[Settlement], answers: Sequence[Settled | Lapsed], now: float) -> None:
        """The broker has answered to verdicts."""
        for (delivery, verdict), answer in zip(settlements, answers, strict=True):
            said_yes = isinstance(answer, Settled)
            entry = self._locked(delivery, said_yes, f"settled by {type(verdict).__name__}", now)
            if said_yes and entry is None:
                entry = self.entries.get(delivery.sequence)
                if entry is not None and entry.end_state != OPEN:
                    self.violated("settled twice", f"{entry.sent.label} was {entry.end_state} already")
            elif entry is not None:
                assert isinstance(answer, Settled)
                entry.token = None
                self._judged(entry, verdict, answer.dead, now)

    def _locked(self, delivery: Delivery, said_yes: bool, verb: str, now: float) -> Entry | None:
        """Return the entry of *delivery* if its lock is good and the broker thought so, too."""
        entry = self.entries.get(delivery.sequence)
        is_good = entry is not None and entry.token == delivery.token and now < entry.until
        if is_good != said_yes:
            kind = "stale verb" if said_yes else "false no"
            self.violated(kind, f"{delivery.id} (token {delivery.token}) was {'' if said_yes else 'not '}{verb}")
        return entry if is_good and said_yes else None

    def _judged(self, entry: Entry, verdict: object, died: bool, now: float) -> None:
        dies = False
        match verdict:
            case Complete():
                entry.end_state = COMPLETED
            case DeadLetter(error=error):
                entry.end_state, entry.end = DEAD, verdict
                entry.error = error or entry.error
                entry.tries.append("rejected")
            case GiveBack():
                entry.count -= 1
                entry.visible_at = now
            case Abandon(delay, error):
                entry.tries.append("abandoned")
                entry.error = error or entry.error
                entry.visible_at = now + delay
                dies = entry.count >= self._max_deliveries
        gone_by = now >= entry.expires_at and isinstance(verdict, (Abandon, GiveBack))
        if died != (dies or gone_by):
            self.violated("tries", f"{entry.sent.label} {'died' if died else 'lives on'} after {entry.count} tries")
        if dies or gone_by:
            entry.end_state = DEAD

    # --- at the end ---

    def audit(self, stats: Stats, dead: Sequence[DeadMessage], now: float) -> None:
        """Compare the drained queue with the model: every message has come to one end, and every end has its reason."""
        dead_ones = {message.sequence: message for message in dead}
        if stats.dead != len(dead):
            self.violated("dead letter", f"{stats.dead} are counted, {len(dead)} are there")
        for message in dead:
            self._dead_message(message, now)
        for entry in self.entries.values():
            if entry.end_state == COMPLETED and entry.sequence in dead_ones:
                self.violated("settled twice", f"{entry.sent.label} is completed and among the dead")
            elif entry.end_state != COMPLETED and entry.sequence not in dead_ones:
                self.violated("lost", f"{entry.sent.label} was {entry.end_state} and is nowhere")
        for sent in self.sent.values():
            if sent.acknowledged and not sent.sequences:
                self.violated("lost", f"{sent.label} was acknowledged and never seen again")

    def _dead_message(self, message: DeadMessage, now: float) -> None:
        entry = self._entry(message)
        if entry is None:
            return
        label = entry.sent.label
        if entry.token is not None:
            entry.tries.append("expired")
        match message.reason:
            case "max_deliveries" if entry.end is None:
                is_right = entry.count == self._max_deliveries and message.reason == MAX_DELIVERIES
            case "expired" if entry.end is None:
                is_right = now >= entry.expires_at and message.reason == EXPIRED
            case reason:
                end = entry.end
                is_right = end is not None and (end.reason, end.description) == (reason, message.description)
        if not is_right or not message.reason:
            self.violated(
                "dead letter" if entry.count != self._max_deliveries + 1 else "tries",
                f"{label} died of {message.reason!r} after {entry.count} deliveries",
            )
        if message.delivery_count != entry.count or [attempt.outcome for attempt in message.history] != entry.tries:
            outcomes = [attempt.outcome for attempt in message.history]
            self.violated("dead letter", f"{label} has {message.delivery_count} tries {outcomes}, not {entry.tries}")
        if message.error != entry.error:
            self.violated("dead letter", f"{label} does not show the last failure")
