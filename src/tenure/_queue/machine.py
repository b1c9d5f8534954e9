"""A consumer's decisions, as two pure state machines: what to claim and settle, and which locks to keep.

House rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns what is to be done; ``wake_at``
  says
  when to call again with ``Tick``. Nobody polls.
- A lock is believed from *before the claim was sent*; see :func:`tenure._lease.trusted_until`.
- All messages of a claim were locked at one moment, so they share one :class:`Hold`: what is kept per message is its
  place in it, and nothing else.
- A message that waits is not renewed: it goes back, untried and uncounted, when its hold is due for renewal. Only
  what runs is renewed, until ``max_hold``.
- The handler is cancelled before the lock ends. Who says whether a verdict stood is the broker, never we.
- "Don't know" is asked again. A verdict is forgotten only when it was answered.

The :class:`Pump` decides on the caller's loop, :class:`Locks` on the renewal thread's, where no user code can block
it. They
meet in the holds: a message moves from ``waiting`` to ``running`` (by the pump), or from the end of ``waiting`` back to
the broker (by the locks), each by one step that only one of them can win.

::

              claimed           take              done             answered
    (broker) ─────────▶ waiting ─────▶ running ─────────▶ unsettled ─────────▶ (gone)
                           │              │                   ▲ │
                           │ too old,     │ lost: cancelled,  └─┘ no answer: again
                           ▼ stopping     ▼ result thrown away
                       given back      (broker)

    RUNNING ◀──▶ PAUSED          Pause gives the buffer back, what runs goes on; Resume
       │            │
       └──▶ DRAINING ──▶ STOPPED   Drain: finish what runs until the deadline, cancel and give back the rest, settle all
                                   Stopped when every verdict and every give-back, the locks' too, is answered
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

from tenure._checks import check_seconds
from tenure._jitter import Rng, later, sooner
from tenure._lease import NoAnswer, trusted_until
from tenure._queue.message import (
    COMPLETE,
    EXPIRED,
    GIVE_BACK,
    Delivery,
    Lapsed,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    Token,
    Verdict,
    check_count,
)
from tenure._timing import RENEWALS_TOGETHER, Timing
from tenure.events import BrokerUnanswered, Event, GivenBack, HandlerOverran, LockEnded, MessageDied

NEVER = math.inf

SETTLE_MAX = 1_000
"""Verdicts in one call: enough to be cheap, few enough not to hold a claim up."""

HORIZON = 0.25
"""Seconds of work that a buffer should hold: longer than any claim takes, too short to keep work from others."""

BEHIND_MAX = 4
"""So many buffers' worth of verdicts may wait for an answer before claiming pauses."""

JUDGED = math.inf
"""Stands in place of the moment at which a handler began, once there is a verdict."""

Why = Literal["denied", "unanswered", "stalled", "max_hold"]
"""Why a lock is over: see :class:`tenure.events.LockEnded`."""


# --- holds: what one claim brought -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class LockGroup:
    """The deliveries of one claim, or a session, and how long their locks may be believed.

    Shared by two threads without a lock: each count has one writer, each move of a message one winner.
    """

    token: Token
    size: int
    sure_until: float
    renew_at: float
    waiting: deque[Delivery] = field(default_factory=deque)
    running: dict[int, tuple[Delivery, float]] = field(default_factory=dict)
    """By sequence: the delivery, and when it was taken; ``JUDGED`` when there is a verdict that is not answered yet.

    Until it is, the lock is kept: the caller's loop may be blocked, or the broker out of reach.
    """
    session: SessionLock | None = None
    asking: set[int] = field(default_factory=set)
    """Running ones whose handler has passed a verdict by itself, not answered yet: a renewal that finds such a message
    gone has met that verdict, and no loss."""
    kept: set[int] = field(default_factory=set)
    """Running ones whose handler has ended without a verdict, so that nobody is left who could be told to stop."""
    cancelled: dict[int, float] = field(default_factory=dict)
    """Running ones that were told to stop, and until when their lock is sure; they are not renewed any more."""
    settled: int = 0
    """How many the pump has heard the last of. Only the pump writes it."""
    dropped: int = 0
    """How many the locks have lost, or given back and heard so. Only the locks write it."""
    over: bool = False
    """It can't be believed any more."""
    stalled: bool = False
    """Because this process did not run when it was to be renewed. Only the locks write it."""

    @property
    def done(self) -> bool:
        """Whether nothing of it is left."""
        return self.settled + self.dropped >= self.size


@dataclass(frozen=True, slots=True)
class PumpSettings:
    """How a consumer works. Times in seconds.

    Args:
        timing: The times of a lock, as of a lease; ``timing.ttl`` is its length.
        concurrency: How many handlers run at once.
        prefetch: How many messages may wait in the buffer. How many do follows from the pace of the handlers.
        max_hold: How long a handler may run before it is cancelled, its lock renewed all the while.
        poll_every: How often to look for messages if nothing tells of them.
        hints: Whether the broker tells of new messages; without, an idle consumer looks more often.

    Raises:
        ConfigError: A setting can't work.
    """

    timing: Timing
    concurrency: int = 10
    prefetch: int = 500
    max_hold: float = 3_600.0
    poll_every: float = 5.0
    hints: bool = True

    def __post_init__(self) -> None:
        check_count("concurrency", self.concurrency)
        check_count("prefetch", self.prefetch, least=0)
        for name in ("max_hold", "poll_every"):
            value = getattr(self, name)
            if value != math.inf:  # for ever, never
                check_seconds(name, value, above=0.0)


def sure_until(asked_at: float, timing: Timing) -> float:
    """Return until when a lock asked for at *asked_at* may be believed."""
    return trusted_until(asked_at, timing.ttl, timing.drift, timing.margin)


# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come, or messages were taken or done since the last time."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The broker says that messages may have become claimable. It may lie."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim number *ask* has come back with *deliveries*; *due_in* as in :class:`tenure._queue.broker.Claim`."""

    ask: int
    deliveries: Sequence[Delivery]
    due_in: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The question number *ask* has come back. Each question does, once, however late."""

    ask: int
    answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer


@dataclass(frozen=True, slots=True)
class Pause:
    """Claim nothing, and give back what waits; what runs goes on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Claim again."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Claim nothing ever again, give back what waits, let what runs finish until *deadline*, then stop."""

    deadline: float = NEVER


PumpInput = Tick | Hint | Claimed | Answered | Pause | Resume | Drain
LocksInput = Tick | Answered


# --- what goes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receive:
    """Claim up to *limit* messages."""

    ask: int
    limit: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Pass these verdicts."""

    ask: int
    settlements: Sequence[Settlement]


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask for more time for these."""

    ask: int
    held: Sequence[Delivery | SessionLock]


@dataclass(frozen=True, slots=True)
class Serve:
    """Messages wait: let idle workers take them."""


@dataclass(frozen=True, slots=True)
class CancelHandler:
    """Tell the handler of this delivery to stop, or for a session, everybody who works under its lock."""

    held: Delivery | SessionLock
    why: Why


@dataclass(frozen=True, slots=True)
class CancelAll:
    """The deadline of the drain has come: tell every handler to stop. What they leave is given back uncounted."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the broker answered to a verdict, unless it is what one expects of a complete or a give-back.

    If it has lapsed, *why* tells the reason, unless a ``LockEnded`` has told of that before.
    """

    settlement: Settlement
    answer: Settled | Lapsed
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Emit:
    """Let the observers know."""

    event: Event


@dataclass(frozen=True, slots=True)
class Dropped:
    """What the locks gave back has arrived, or something was lost: let the pump look, which may wait for that."""


Effect = Receive | Settle | Renew | Serve | CancelHandler | CancelAll | Report | Emit | Dropped


# --- the pump ----------------------------------------------------------------------------------------------------


class State(Enum):
    """Where a pump stands."""

    RUNNING = "running"  # claims, and lets messages be taken
    PAUSED = "paused"  # claims nothing; what runs goes on
    DRAINING = "draining"  # claims nothing any more; waits for what runs, and for answers
    STOPPED = "stopped"  # nothing of it is under way


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.PAUSED, State.DRAINING}),
    State.PAUSED: frozenset({State.RUNNING, State.DRAINING}),
    State.DRAINING: frozenset({State.STOPPED}),
    State.STOPPED: frozenset(),
}
"""Every legal change of state; the machine refuses any other, whatever it is fed."""


class Pump:
    """Decide for one consumer of one queue: when and how many to claim, when to pass verdicts, how to stop.

    ``take`` and ``done`` are called for every message, so they do next to nothing; who called them sees that
    ``handle(Tick())`` follows soon, once for many.

    Args:
        name: The queue.
        holder: The consumer, for the observers.
        habits: How it works.
        dice: Source of jitter.
        holds: Where claims are kept, shared with the :class:`Locks` that renew them.
        now: The present moment; the first claim goes out at once.
    """

    MAY: ClassVar[dict[State, frozenset[State]]] = TRANSITIONS

    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, holds: dict[Token, LockGroup], *, now: float
    ) -> None:
        self.name = name
        self.settings = settings
        self.state: State = State.RUNNING
        self.busy: int = 0  # handlers that run
        self._holder = holder
        self._rng = rng
        self._holds = holds
        self._line: deque[LockGroup] = deque()  # holds in which messages wait, oldest first
        self._unsettled: list[Settlement] = []
        self._settling: dict[int, Sequence[Settlement]] = {}
        self._settle_at = now  # not before this: the broker did not answer the last time
        self._misses = 0
        self._asked = 0  # number of the newest question
        self._claiming = 0  # number of the claim under way; 0 for none
        self._claim_asked_at = now
        self._claim_limit = 0
        self._claim_most = NEVER  # not more than this in one claim: the broker could not answer one of twice as many
        self._claim_at = now  # when to claim next, if there is room
        self.retry_at = -NEVER  # by then, all that was abandoned has come back
        self._nothing = 0  # claims in a row that brought nothing
        self._hinted = False
        self._target = 0  # how many should wait in the buffer
        self._done = 0  # since the last claim
        self._deadline = NEVER  # of the drain
        self._cut_short = False

    # --- what others may read ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        at = NEVER
        if self.state is State.RUNNING and not self._claiming and self._room():
            at = self._claim_at
        if self._unsettled and not self._settling:
            at = min(at, self._settle_at)
        if self.state is State.DRAINING and not self._cut_short:
            at = min(at, self._deadline)
        return at

    @property
    def waiting(self) -> int:
        """How many messages wait in the buffer."""
        return sum(len(hold.waiting) for hold in self._line)

    @property
    def unanswered(self) -> list[Settlement]:
        """The verdicts of which nobody knows yet whether they stand."""
        return [*(one for batch in self._settling.values() for one in batch), *self._unsettled]

    @property
    def outstanding(self) -> int:
        """How many messages it holds, in whatever state."""
        return sum(hold.size - hold.settled - hold.dropped for hold in list(self._holds.values()))

    def sure_until(self, delivery: Delivery) -> float:
        """Return until when the lock of a message that was taken may be believed; minus infinity if it is over."""
        hold = self._holds.get(delivery.token)
        if hold is None or delivery.sequence not in hold.running:
            return -NEVER
        until = hold.cancelled.get(delivery.sequence, hold.sure_until)
        return until if until < NEVER else -NEVER  # a handler that was cancelled and told to be too late

    # --- for every message ---

    def take(self, now: float) -> Delivery | None:
        """Return the next message to be handled, or None if none waits. Its lock is sure for a while yet."""
        line = self._line
        while line:
            hold = line[0]
            # Beyond renew_at they are too old: a handler would begin with half a lock. The locks give them back.
            if hold.waiting and now < hold.renew_at and (delivery := self._begin(hold, now)) is not None:
                return delivery
            line.popleft()
        return None

    def _begin(self, hold: LockGroup, now: float) -> Delivery | None:
        try:
            delivery = hold.waiting[0]
        except IndexError:  # the locks were faster, and give it back
            return None
        # First in one place, then out of the other: at no moment can the locks overlook it.
        hold.running[delivery.sequence] = (delivery, now)
        try:
            hold.waiting.popleft()
        except IndexError:
            hold.running.pop(delivery.sequence, None)
            return None
        self.busy += 1
        return delivery

    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        """Note that the handler of *delivery* has ended; pass *verdict*, and tell whether the message was still ours.

        With None, the message is kept: renewed until ``max_hold``, and waiting for :meth:`settled` or :meth:`judge`.
        Then its lock is left to run out, for whoever kept it may still act on it.
        """
        self.busy -= 1
        self._done += 1
        if verdict is not None:
            return self.judge(delivery, verdict)
        if (hold := self._holds.get(delivery.token)) is not None:
            hold.kept.add(delivery.sequence)
        return False

    def judge(self, delivery: Delivery, verdict: Verdict) -> bool:
        """Pass *verdict* on a message that was taken; False if it is settled, or its lock known to be lost."""
        hold = self._holds.get(delivery.token)
        if hold is None or not _withdraw(hold, delivery.sequence):
            return False
        hold.running[delivery.sequence] = (delivery, JUDGED)
        self._unsettled.append(Settlement(delivery, verdict))
        return True

    def asks(self, delivery: Delivery) -> None:
        """Note that a handler is passing a verdict by itself; :meth:`heard` follows, whatever the answer."""
        hold = self._holds.get(delivery.token)
        if hold is not None:
            hold.asking.add(delivery.sequence)

    def heard(self, delivery: Delivery) -> None:
        """Note that it is answered, or that no answer is waited for."""
        hold = self._holds.get(delivery.token)
        if hold is not None:
            hold.asking.discard(delivery.sequence)

    def abandoned(self, until: float) -> None:
        """Note that a message that was taken was abandoned, as far as is known, and comes back at *until*."""
        self.retry_at = max(self.retry_at, until)

    def settled(self, delivery: Delivery) -> bool:
        """Note that the broker has settled a message that was taken, or called its lock lost, without our asking.

        Returns whether it was with its handler until now, and that not told to stop.
        """
        hold = self._holds.get(delivery.token)
        if hold is None:
            return False
        if _withdraw(hold, delivery.sequence):
            self._close(hold)
            return delivery.sequence not in hold.cancelled
        if delivery.sequence in hold.running:  # a drain would give it back, and hear that somebody was faster
            left = [one for one in self._unsettled if one.delivery is not delivery]
            if len(left) < len(self._unsettled):
                self._unsettled = left
                del hold.running[delivery.sequence]
                self._close(hold)
        return False

    # --- the one way in for all else ---

    def handle(self, event: PumpInput, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[Effect] = []
        match event:
            case Tick():
                pass
            case Hint():
                self._hinted = True
                self._claim_at = min(self._claim_at, now)
            case Claimed(ask, deliveries, due_in):
                self._claimed(ask, deliveries, due_in, now, effects)
            case Answered(ask, answers):
                if isinstance(answers, NoAnswer):
                    self._unanswered(ask, answers.why, now, effects)
                else:
                    self._answered(ask, answers, now, effects)
            case Pause():
                if self.state is State.RUNNING:
                    self._move(State.PAUSED)
                    self._empty_buffer(now, effects)
            case Resume():
                if self.state is State.PAUSED:
                    self._move(State.RUNNING)
                    self._claim_at = now
            case Drain(deadline):
                self._drain(deadline, now, effects)
        self._go_on(now, effects)
        return effects

    def _go_on(self, now: float, effects: list[Effect]) -> None:
        """Do what time and room allow."""
        self._flush(now, effects)
        if self.state is State.RUNNING and not self._claiming and now >= self._claim_at and self._room():
            self._set_target(now)
            if room := self._room():
                self._claim(int(min(room, self._claim_most)), now, effects)
        if self.state is State.DRAINING:
            self._wind_up(now, effects)

    # --- claiming ---

    def _room(self) -> int:
        """Return how many to claim now; 0 while enough wait, or too many verdicts are unanswered."""
        waiting = self.waiting
        if waiting > self._target // 2:
            return 0
        behind = len(self._unsettled) + sum(map(len, self._settling.values()))
        if behind > BEHIND_MAX * max(self.settings.prefetch, self.settings.concurrency):
            return 0
        return max(0, self.settings.concurrency - self.busy + self._target - waiting)

    def _claim(self, limit: int, now: float, effects: list[Effect]) -> None:
        self._asked += 1
        self._claiming = self._asked
        self._claim_limit = limit
        self._hinted = False
        self._claim_asked_at = now
        self._done = 0
        effects.append(Receive(self._asked, limit))

    def _set_target(self, now: float) -> None:
        """Let the buffer hold what is done within the horizon: fast handlers never wait, slow ones hoard nothing."""
        elapsed = now - self._claim_asked_at
        if self._done:
            horizon = min(HORIZON, self.settings.timing.renew_every / 4)
            most = self.settings.prefetch
            self._target = min(most, int(self._done / elapsed * horizon)) if elapsed > 0 else most
        elif self.busy:
            self._target = 0

    def _claimed(
        self, ask: int, deliveries: Sequence[Delivery], due_in: float | None, now: float, effects: list[Effect]
    ) -> None:
        if ask != self._claiming:
            return
        self._claiming = 0
        self._claim_more()
        if deliveries:
            self._nothing = 0
            self._keep(deliveries, now, effects)
        else:
            self._nothing += 1
        if len(deliveries) >= self._claim_limit or self._hinted:
            self._claim_at = now
        else:
            self._claim_at = now + self._pause(due_in)
            if self.retry_at > now:  # the store may not tell, and nobody else may look
                self._claim_at = min(self._claim_at, self.retry_at)

    def _claim_less(self) -> None:
        """Ask for half as many the next time: the answer may have been too much to arrive in time."""
        self._claim_most = max(1, self._claim_limit // 2)

    def _claim_more(self) -> None:
        """Ask for twice as many again, as there was an answer; and for any number when that is more than is wanted."""
        self._claim_most *= 2
        if self._claim_most >= self.settings.concurrency + self.settings.prefetch:
            self._claim_most = NEVER

    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[Effect]) -> None:
        timing, asked_at = self.settings.timing, self._claim_asked_at
        token = deliveries[0].token
        renew_at = asked_at + sooner(timing.renew_every, self._rng)
        hold = LockGroup(token, len(deliveries), sure_until(asked_at, timing), renew_at, deque(deliveries))
        self._holds[token] = hold
        if self.state is State.RUNNING and now < renew_at:
            self._line.append(hold)
            effects.append(Serve())
        else:  # the answer was too long on its way, or we are stopping
            if now >= renew_at:
                self._claim_less()
            effects.append(Emit(GivenBack(now, self.name, self._holder, len(deliveries))))
            self._put_back(hold)

    def _pause(self, due_in: float | None) -> float:
        """Return how long to wait for a hint before looking again."""
        most = self.settings.poll_every
        if not self.settings.hints:  # nobody tells us: look often at first, then less and less
            most = min(most, 0.05 * 1.5 ** min(self._nothing, 20))
        most = later(most, self._rng)
        # A thousandth more, so as not to come too early by the store's clock.
        return most if due_in is None else min(most, max(due_in, 0.0) + 0.001)

    # --- verdicts ---

    def _flush(self, now: float, effects: list[Effect]) -> None:
        """Pass whatever verdicts gathered while the last ones were on their way."""
        if self._unsettled and not self._settling and now >= self._settle_at:
            self._asked += 1
            batch = self._unsettled[:SETTLE_MAX]
            del self._unsettled[:SETTLE_MAX]
            self._settling[self._asked] = batch
            effects.append(Settle(self._asked, batch))

    def _answered(
        self, ask: int, answers: Sequence[Settled | Lapsed | Renewed | NoAnswer], now: float, effects: list[Effect]
    ) -> None:
        settlements = self._settling.pop(ask, None)
        if settlements is None:
            return
        self._misses = 0
        holds = self._holds
        unanswered: list[Settlement] = []
        for settlement, answer in zip(settlements, answers, strict=True):
            delivery, verdict = settlement
            if type(answer) is NoAnswer:
                if not unanswered:
                    effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "settle", answer.why)))
                unanswered.append(settlement)
                continue
            hold = holds.get(delivery.token)
            if hold is not None:
                hold.running.pop(delivery.sequence, None)
                self._close(hold)
            if type(answer) is Lapsed:
                effects.append(Report(settlement, answer, _why_lapsed(hold, delivery, now)))
            elif type(answer) is Settled and (answer.dead or (verdict is not COMPLETE and verdict is not GIVE_BACK)):
                effects.append(Report(settlement, answer))
        if unanswered:
            self._settle_at = now + later(self.settings.timing.retry_every / 4, self._rng)
            self._unsettled[:0] = unanswered

    def _close(self, hold: LockGroup) -> None:
        hold.settled += 1
        if hold.settled + hold.dropped >= hold.size:
            self._holds.pop(hold.token, None)

    def _unanswered(self, ask: int, why: str, now: float, effects: list[Effect]) -> None:
        retry = later(self.settings.timing.retry_every / 4, self._rng) * 1.5 ** min(self._misses, 6)
        if ask == self._claiming:
            self._claiming = 0
            self._misses += 1
            self._claim_at = now + retry
            self._claim_less()
            effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "receive", why)))
            return
        settlements = self._settling.pop(ask, None)
        if settlements is None:
            return
        self._misses += 1
        self._settle_at = now + retry
        self._unsettled[:0] = settlements
        effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "settle", why)))

    # --- giving back, stopping ---

    def _put_back(self, hold: LockGroup) -> int:
        count = 0
        try:
            while True:  # from the end, as the locks do: each goes back once
                delivery = hold.waiting.pop()
                hold.running[delivery.sequence] = (delivery, JUDGED)
                self._unsettled.append(Settlement(delivery, GIVE_BACK))
                count += 1
        except IndexError:
            return count

    def _empty_buffer(self, now: float, effects: list[Effect]) -> None:
        count = sum(self._put_back(hold) for hold in self._line)
        self._line.clear()
        if count:
            effects.append(Emit(GivenBack(now, self.name, self._holder, count)))

    def _drain(self, deadline: float, now: float, effects: list[Effect]) -> None:
        if self.state in (State.RUNNING, State.PAUSED):
            self._move(State.DRAINING)
            self._empty_buffer(now, effects)
        if self.state is State.DRAINING:
            self._deadline = min(self._deadline, deadline)

    def _wind_up(self, now: float, effects: list[Effect]) -> None:
        kept = [] if self.busy else [one for hold in list(self._holds.values()) for one in _taken(hold)]
        if now >= self._deadline and not self._cut_short:
            self._cut_short = True
            if self.busy:
                effects.append(CancelAll())
        if self._cut_short and kept:  # left unsettled by handlers that have ended
            for delivery in kept:
                self.judge(delivery, GIVE_BACK)
            self._flush(now, effects)
            kept = []
        # A hold that is left is one of which the locks give something back: unanswered, it would count as a delivery.
        if not (self.busy or kept or self._claiming or self._settling or self._unsettled or self._holds):
            self._move(State.STOPPED)

    def _move(self, to: State) -> None:
        if to not in self.MAY[self.state]:
            raise AssertionError(f"a pump can't go from {self.state.value} to {to.value}")
        self.state = to


# --- the locks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    """A renewal under way: when it was asked, and for what."""

    asked_at: float
    holds: Sequence[LockGroup]
    held: Sequence[tuple[LockGroup, Delivery | SessionLock]]


class Locks:
    """Decide for one consumer which locks to renew, which messages to give back, and which handlers to cancel.

    Args:
        name: The queue.
        holder: The consumer, for the observers.
        habits: How it works.
        dice: Source of jitter.
        holds: The claims, shared with the :class:`Pump` that makes them.
        now: The present moment.
    """

    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, holds: dict[Token, LockGroup], *, now: float
    ) -> None:
        self.name = name
        self.settings = settings
        self.wake_at: float = now
        """When to call ``handle(Tick(), now)``. It comes often enough to meet each new hold in time."""
        self._beat = min(settings.timing.renew_every / 2, settings.max_hold)
        self._holder = holder
        self._rng = rng
        self._holds = holds
        self._asked = 0
        self._questions: dict[int, _Question] = {}
        self._returning: list[tuple[Settlement, float]] = []  # to be given back, and until when that makes sense
        self._return_at = now
        self._returns: dict[int, list[tuple[Settlement, float]]] = {}
        self._has_dropped = False
        self._overslept = 0.0  # how much later than we had asked for we were called

    def handle(self, event: LocksInput, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[Effect] = []
        self._overslept = now - self.wake_at
        match event:
            case Answered(ask, answers) if ask in self._questions:
                self._take(self._questions.pop(ask), answers, now, effects)
            case Answered(ask, answers) if ask in self._returns:
                self._returned(self._returns.pop(ask), answers, now, effects)
            case _:
                pass
        for hold in list(self._holds.values()):
            self._look_at(hold, now, effects)
        self._renew(now, effects)
        self._give_back(now, effects)
        self._set_alarm(now)
        if self._has_dropped:
            self._has_dropped = False
            effects.append(Dropped())
        return effects

    @property
    def settled(self) -> bool:
        """Whether nothing is kept, and every question has come back."""
        return not (self._holds or self._questions or self._returning or self._returns)

    # --- time ---

    def _look_at(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        end = hold.sure_until - self.settings.timing.grace
        if not hold.over and now >= end:
            # We were to be called before that, to renew it: nobody refused to answer, this process did not run.
            hold.stalled = self._overslept >= self.settings.timing.retry_every and now - self._overslept < end
            self._end(hold, "stalled" if hold.stalled else "unanswered", now, effects)
        if hold.waiting and (hold.over or now >= hold.renew_at):
            self._take_out(hold, now, effects)
        for delivery, began in list(hold.running.values()):
            sequence = delivery.sequence
            if began == JUDGED:
                continue
            if sequence not in hold.cancelled and now >= began + self.settings.max_hold:
                hold.cancelled[sequence] = hold.sure_until
                self._cancel(delivery, "max_hold", now, effects)
            if sequence not in hold.cancelled:
                continue
            if sequence in hold.kept:
                if _withdraw(hold, sequence):
                    self._drop(hold)
            elif now >= hold.cancelled[sequence]:
                hold.cancelled[sequence] = NEVER  # told once
                effects.append(Emit(HandlerOverran(now, self.name, self._holder, *_named(delivery))))

    def _end(self, hold: LockGroup, why: Why, now: float, effects: list[Effect]) -> None:
        """Believe no longer: tell everybody who works under this hold to stop, while its locks are still sure."""
        hold.over = True
        if hold.session is not None:
            effects.append(CancelHandler(hold.session, why))
        for delivery in _taken(hold):
            if delivery.sequence not in hold.cancelled:
                hold.cancelled[delivery.sequence] = hold.sure_until
                self._cancel(delivery, why, now, effects)

    def _cancel(self, delivery: Delivery, why: Why, now: float, effects: list[Effect]) -> None:
        effects.append(Emit(LockEnded(now, self.name, self._holder, *_named(delivery), why)))
        effects.append(CancelHandler(delivery, why))

    def _set_alarm(self, now: float) -> None:
        at = now + self._beat
        for hold in list(self._holds.values()):
            if not hold.over:
                at = min(at, hold.renew_at, hold.sure_until - self.settings.timing.grace)
            for delivery, began in list(hold.running.values()):
                if began != JUDGED:
                    at = min(at, hold.cancelled.get(delivery.sequence, began + self.settings.max_hold))
        if self._returning and not self._returns:
            at = min(at, self._return_at)
        self.wake_at = at

    # --- renewing ---

    def _renew(self, now: float, effects: list[Effect]) -> None:
        holds = [hold for hold in list(self._holds.values()) if not hold.over and self._is_due(hold, now)]
        if not any(now >= hold.renew_at for hold in holds):
            return
        held = [(hold, one) for hold in holds for one in self._worth_renewing(hold)]
        for hold in holds:
            hold.renew_at = now + later(self.settings.timing.retry_every, self._rng)  # unless answered by then
        if held:
            self._asked += 1
            self._questions[self._asked] = _Question(now, holds, held)
            effects.append(Renew(self._asked, [one for _, one in held]))

    def _is_due(self, hold: LockGroup, now: float) -> bool:
        # A little early, to go along with another; but not while messages wait, which are given back and not renewed.
        early = 0.0 if hold.waiting else RENEWALS_TOGETHER * self.settings.timing.renew_every
        return now >= hold.renew_at - early

    def _worth_renewing(self, hold: LockGroup) -> Sequence[Delivery | SessionLock]:
        if hold.session is not None:
            return [hold.session]
        running = list(hold.running.values())
        return [one for one, began in running if began == JUDGED or one.sequence not in hold.cancelled]

    def _take(
        self,
        question: _Question,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[Effect],
    ) -> None:
        timing = self.settings.timing
        unanswered: dict[Token, str] = {}
        if isinstance(answers, NoAnswer):
            unanswered = dict.fromkeys((hold.token for hold in question.holds), answers.why)
            answers = [answers] * len(question.held)
        for (hold, _), answer in zip(question.held, answers, strict=True):
            if isinstance(answer, NoAnswer):
                unanswered.setdefault(hold.token, answer.why)
        if unanswered:
            why = next(iter(unanswered.values()))
            effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "renew", why)))
        until = sure_until(question.asked_at, timing)
        for hold in question.holds:
            if hold.token in unanswered:
                hold.renew_at = min(hold.renew_at, now + later(timing.retry_every, self._rng))
            elif until > hold.sure_until:
                hold.sure_until = until
                hold.renew_at = question.asked_at + sooner(timing.renew_every, self._rng)
        for (hold, one), answer in zip(question.held, answers, strict=True):
            if isinstance(answer, Lapsed):
                self._lose(hold, one, now, effects)

    def _lose(self, hold: LockGroup, one: Delivery | SessionLock, now: float, effects: list[Effect]) -> None:
        if isinstance(one, SessionLock):
            hold.sure_until = -NEVER
            if not hold.over:
                self._end(hold, "denied", now, effects)
        elif one.sequence not in hold.asking and _withdraw(hold, one.sequence):
            # Else there is a verdict, and what became of it is yet to be told.
            self._cancel(one, "denied", now, effects)
            self._drop(hold)

    def _drop(self, hold: LockGroup) -> None:
        self._has_dropped = True
        hold.dropped += 1
        if hold.done:
            self._holds.pop(hold.token, None)

    # --- giving back ---

    def _take_out(self, hold: LockGroup, now: float, effects: list[Effect]) -> None:
        """Give back what waits in *hold*: it has waited too long here, and others may have time."""
        count = 0
        try:
            while True:  # from the end: the pump takes from the front
                self._returning.append((Settlement(hold.waiting.pop(), GIVE_BACK), hold.sure_until))
                count += 1
        except IndexError:
            if count:
                effects.append(Emit(GivenBack(now, self.name, self._holder, count)))

    def _give_back(self, now: float, effects: list[Effect]) -> None:
        if self._returning and not self._returns and now >= self._return_at:
            self._asked += 1
            batch, self._returning = self._returning, []
            self._returns[self._asked] = batch
            effects.append(Settle(self._asked, [settlement for settlement, _ in batch]))

    def _returned(
        self,
        batch: list[tuple[Settlement, float]],
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[Effect],
    ) -> None:
        if isinstance(answers, NoAnswer):
            answers = [answers] * len(batch)
        unanswered: list[tuple[Settlement, float]] = []
        over: list[Settlement] = []
        for one, answer in zip(batch, answers, strict=True):
            settlement, until = one
            if isinstance(answer, NoAnswer):
                if not unanswered:
                    effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "give back", answer.why)))
                unanswered.append(one)
                if now < until:
                    continue  # else its lock has ended anyway
            elif isinstance(answer, Settled) and answer.dead:  # its ttl had ended under the lock
                effects.append(Emit(MessageDied(now, self.name, self._holder, *_named(settlement.delivery), EXPIRED)))
            over.append(settlement)
        if unanswered:
            self._returning[:0] = [one for one in unanswered if now < one[1]]
            self._return_at = now + later(self.settings.timing.retry_every, self._rng)
        for settlement in over:
            if (hold := self._holds.get(settlement.delivery.token)) is not None:
                self._drop(hold)


def _why_lapsed(hold: LockGroup | None, delivery: Delivery, now: float) -> Why | None:
    """Return why a verdict came too late; None if that the lock is over was told before."""
    if hold is None:
        return "denied"
    if delivery.sequence in hold.cancelled:
        return None
    # The locks note in time when a lock is over: unless they have not run.
    is_late = now >= hold.sure_until > -NEVER and not hold.over
    return "stalled" if hold.stalled or is_late else "denied"


def _withdraw(hold: LockGroup, sequence: int) -> bool:
    """Take a message from its handler, or from who kept it; False if it is with none, or there is a verdict.

    The pump and the locks may both try: it is taken out by one step, so that only one of them can.
    """
    entry = hold.running.pop(sequence, None)
    if entry is not None and entry[1] == JUDGED:
        hold.running[sequence] = entry
        return False
    return entry is not None


def _taken(hold: LockGroup) -> list[Delivery]:
    return [delivery for delivery, began in list(hold.running.values()) if began != JUDGED]


def _named(delivery: Delivery) -> tuple[str, int, int]:
    return delivery.id, delivery.sequence, delivery.delivery_count
