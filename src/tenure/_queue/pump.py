"""A consumer's decisions on the caller's loop, as a pure state machine: what to claim, what to settle, how to stop.

House rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns what is to be done; ``wake_at``
  says when to call again with ``Tick``. Nobody polls.
- A lock is believed from *before the claim was sent*; see :func:`tenure._lease.trusted_until`.
- All messages of a claim were locked at one moment, so they share one :class:`LockGroup`: what is kept per message is
  its place in it, and nothing else.
- The broker decides whether a verdict stands.
- "Don't know" is asked again. A verdict is forgotten only when it was answered.

The renewal thread's machine is :class:`tenure._queue.locks.Locks`. They meet in the lock groups: a message moves from
``waiting`` to ``running`` (by the pump), or from the end of ``waiting`` back to the broker (by the locks), each by one
step that only one of them can win.

::

              claimed           take              done             answered
    (broker) ─────────▶ waiting ─────▶ running ─────────▶ unsettled ─────────▶ (gone)
                           │              │                   ▲ │
                           │ too old,     │ lost: cancelled,  └─┘ no answer: again
                           ▼ stopping     ▼ result discarded
                       given back      (broker)

    RUNNING ◀──▶ PAUSED          Pause gives the buffer back, what runs goes on; Resume
       │            │
       └──▶ DRAINING ──▶ STOPPED   Drain: finish what runs until the deadline, cancel and give back the rest, settle all
                                   Stopped when every verdict and every give-back, the locks' too, is answered; or
                    ──▶ LEFT       when the time for that is over, and the locks run out by themselves
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import ClassVar

from tenure._jitter import Rng, later, sooner
from tenure._lease import NoAnswer
from tenure._queue.effects import (
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Ended,
    Hint,
    NothingLeft,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    Report,
    Resume,
    Returned,
    Serve,
    Settle,
    Tick,
)
from tenure._queue.lock_group import JUDGED, NEVER, LockGroup, Why, named, taken
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump_settings import PumpSettings, sure_until
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Lapsed, Renewed, Settled, Settlement, Verdict
from tenure.events import BrokerUnanswered, GivenBack, LockEnded

SETTLE_MAX = 1_000
"""Verdicts in one call: enough to be cheap, few enough not to delay a claim."""

HORIZON = 0.25
"""Seconds of work that a buffer should hold: longer than any claim takes, too short to keep work from others."""

BEHIND_MAX = 4
"""So many buffers' worth of verdicts may wait for an answer before claiming pauses."""


class State(Enum):
    """Where a pump stands."""

    RUNNING = "running"  # claims, and lets messages be taken
    PAUSED = "paused"  # claims nothing; what runs goes on
    DRAINING = "draining"  # claims nothing any more; waits for what runs, and for answers
    STOPPED = "stopped"  # nothing of it is under way
    LEFT = "left"  # the time of the drain is over; what is under way is left to itself, and its locks run out


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.PAUSED, State.DRAINING}),
    State.PAUSED: frozenset({State.RUNNING, State.DRAINING}),
    State.DRAINING: frozenset({State.STOPPED, State.LEFT}),
    State.STOPPED: frozenset(),
    State.LEFT: frozenset(),
}
"""Every legal change of state; the machine refuses any other, whatever it is fed."""


class Pump:
    """Decide for one consumer of one queue: when and how many to claim, when to pass verdicts, how to stop.

    ``take`` and ``done`` are called for every message, so they do next to nothing; who called them sees that
    ``handle(Tick())`` follows soon, once for many.

    Args:
        name: The queue.
        holder: The consumer, for the observers.
        settings: How it works.
        rng: Source of jitter.
        groups: Where claims are kept, shared with the :class:`Locks` that renew them.
        now: The present moment; the first claim goes out at once.
    """

    MAY: ClassVar[dict[State, frozenset[State]]] = TRANSITIONS

    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, groups: dict[Token, LockGroup], *, now: float
    ) -> None:
        self.name = name
        self.settings = settings
        self.state: State = State.RUNNING
        self.busy: int = 0  # handlers that run
        self._holder = holder
        self._rng = rng
        self._groups = groups
        self._line: deque[LockGroup] = deque()  # groups in which messages wait, oldest first
        self._unsettled: list[Settlement] = []
        self._settling: dict[int, Sequence[Settlement]] = {}
        self._settles_max = 1  # questions at a time; what is to be settled meanwhile goes out together
        self._settle_at = now  # not before this: the broker did not answer the last time
        self._misses = 0
        self._asked = 0  # number of the newest question
        self._claiming = 0  # number of the claim under way; 0 for none
        self._claim_asked_at = now
        self._claim_limit = 0
        self._claim_most = NEVER  # not more than this in one claim: the broker could not answer one of twice as many
        self._claim_at = now  # when to claim next, if there is room
        self._not_before = -NEVER  # not sooner than this, whatever is hinted
        self.retry_at = -NEVER  # by then, all that was abandoned has come back
        self._nothing = 0  # claims in a row that brought nothing
        self._hinted = False
        self._target = 0  # how many should wait in the buffer
        self._done = 0  # since the last claim
        self._deadline = NEVER  # of the drain
        self._give_up_at = NEVER
        self._urges = 0  # how often handlers were told to stop since then
        self._denied: list[Delivery] = []  # lost, unless that is due to the verdict that their handler passes
        self._empty_since = now  # since when nothing is in hand; infinity while something is

    # --- what others may read ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        at = NEVER
        if self.state is State.RUNNING and not self._claiming and self._room():
            at = self._claim_at
        if self._unsettled and len(self._settling) < self._settles_max:
            at = min(at, self._settle_at)
        if self.state is State.DRAINING:
            at = min(at, self._next_urge())
        return at

    @property
    def waiting(self) -> int:
        """How many messages wait in the buffer."""
        return sum(len(group.waiting) for group in self._line)

    @property
    def unanswered(self) -> list[Settlement]:
        """The verdicts of which nobody knows yet whether they stand."""
        return [*(one for batch in self._settling.values() for one in batch), *self._unsettled]

    @property
    def outstanding(self) -> int:
        """How many messages it groups, in whatever state."""
        return sum(group.size - group.settled for group in self._groups.values())

    def sure_until(self, delivery: Delivery) -> float:
        """Return until when the lock of a message that was taken may be believed; minus infinity if it is over."""
        group = self._groups.get(delivery.token)
        if group is None or delivery.sequence not in group.running:
            return -NEVER
        return min(group.ended.get(delivery.sequence, NEVER), group.sure_until)

    # --- for every message ---

    def take(self, now: float) -> Delivery | None:
        """Return the next message to be handled, or None if none waits. Its lock is sure for a while yet."""
        line = self._line
        while line:
            group = line[0]
            # Beyond renew_at they are too old: a handler would begin with half a lock. The locks give them back.
            if group.waiting and now < group.renew_at and (delivery := self._begin(group, now)) is not None:
                return delivery
            line.popleft()
        return None

    def _begin(self, group: LockGroup, now: float) -> Delivery | None:
        try:
            delivery = group.waiting[0]
        except IndexError:  # the locks were faster, and give it back
            return None
        # First in one place, then out of the other: at no moment can the locks overlook it.
        group.running[delivery.sequence] = (delivery, now)
        try:
            group.waiting.popleft()
        except IndexError:
            group.running.pop(delivery.sequence, None)
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
        group = self._groups.get(delivery.token)
        if group is not None and delivery.sequence in group.running:
            if delivery.sequence in group.stopped:
                self._withdraw(group, delivery.sequence)
            else:
                group.kept.add(delivery.sequence)
        return False

    def forget(self, delivery: Delivery) -> None:
        """Note that the handler of *delivery* has ended, and that no verdict follows: its lock is left to run out."""
        self.busy -= 1
        self._done += 1
        self.settled(delivery)

    def judge(self, delivery: Delivery, verdict: Verdict) -> bool:
        """Pass *verdict* on a message that was taken; False if it is settled, or its lock known to be lost."""
        group = self._groups.get(delivery.token)
        if group is None:
            return False
        entry = group.running.get(delivery.sequence)
        if entry is None or entry[1] == JUDGED:
            return False
        if group.ended and -NEVER in (group.ended.get(delivery.sequence), group.sure_until):
            return False  # the message of the locks that says so is under way, and closes it
        group.running[delivery.sequence] = (delivery, JUDGED)
        self._unsettled.append(Settlement(delivery, verdict))
        return True

    def asks(self, delivery: Delivery) -> None:
        """Note that a handler is passing a verdict by itself; :meth:`heard` follows, whatever the answer."""
        group = self._groups.get(delivery.token)
        if group is not None:
            group.asking.add(delivery.sequence)

    def heard(self, delivery: Delivery) -> None:
        """Note that it is answered, or that no answer is waited for."""
        group = self._groups.get(delivery.token)
        if group is not None:
            group.asking.discard(delivery.sequence)

    def abandoned(self, until: float) -> None:
        """Note that a message that was taken was abandoned, as far as is known, and comes back at *until*."""
        self.retry_at = max(self.retry_at, until)

    def settled(self, delivery: Delivery) -> bool:
        """Note that the broker has settled a message that was taken, or called its lock lost, without our asking.

        Returns whether it was with its handler until now, and that not told to stop.
        """
        group = self._groups.get(delivery.token)
        if group is None:
            return False
        if self._withdraw(group, delivery.sequence):
            return delivery.sequence not in group.stopped
        if delivery.sequence in group.running:  # a drain would give it back, and hear that somebody was faster
            left = [one for one in self._unsettled if one.delivery is not delivery]
            if len(left) < len(self._unsettled):
                self._unsettled = left
                del group.running[delivery.sequence]
                self._close(group)
        return False

    # --- the one way in for all else ---

    def handle(self, event: PumpInput, now: float) -> list[PumpEffect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[PumpEffect] = []
        match event:
            case Tick():
                pass
            case Hint():
                self._hinted = True
                self._claim_at = min(self._claim_at, max(now, self._not_before))
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
            case Drain(deadline, until):
                self._drain(deadline, until, now, effects)
            case Ended(at, locks):
                for held, why in locks:
                    self._lock_ended(held, why, at, effects)
            case Returned(counts):
                for token, count in counts:
                    if (group := self._groups.get(token)) is not None:
                        self._close(group, count)
        self._go_on(now, effects)
        return effects

    def _go_on(self, now: float, effects: list[PumpEffect]) -> None:
        """Do what time and room allow."""
        if self._denied:
            denied, self._denied = self._denied, []
            for delivery in denied:
                self._lock_ended(delivery, "denied", now, effects)
        if self._is_empty() != (self._empty_since < NEVER):
            self._note_emptiness(now)
        self._flush(now, effects)
        if self.state is State.RUNNING and not self._claiming and now >= self._claim_at and self._room():
            self._set_target(now)
            if room := self._room():
                self._claim(int(min(room, self._claim_most)), now, effects)
        if self.state is State.DRAINING:
            self._wind_up(now, effects)

    # --- nothing left ---

    def _is_empty(self) -> bool:
        """Tell whether nothing is in hand."""
        return not self._groups

    def _note_emptiness(self, now: float) -> None:
        if self._empty_since < NEVER:
            self._empty_since = NEVER
        else:
            self._empty_since = now
            if self.settings.until_empty:  # look at once whether more has come, also if a claim is under way
                self._claim_at = min(self._claim_at, now)
                self._hinted = True

    def _found_nothing(self, asked_at: float, due_in: float | None, effects: list[PumpEffect]) -> None:
        """Note that a claim asked at *asked_at* has brought nothing, which may be the end of it."""
        self._nothing += 1
        is_over = due_in != 0 and not self._hinted and asked_at >= max(self.retry_at, self._empty_since)
        if self.settings.until_empty and is_over and self.state is State.RUNNING:
            effects.append(NothingLeft())

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

    def _claim(self, limit: int, now: float, effects: list[PumpEffect]) -> None:
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
        self, ask: int, deliveries: Sequence[Delivery], due_in: float | None, now: float, effects: list[PumpEffect]
    ) -> None:
        if ask != self._claiming:
            return
        self._claiming = 0
        self._claim_more()
        if deliveries:
            self._nothing = 0
            self._keep(deliveries, now, effects)
        else:
            self._found_nothing(self._claim_asked_at, due_in, effects)
        self._claim_next(len(deliveries) >= self._claim_limit, due_in, now)

    def _claim_next(self, more: bool, due_in: float | None, now: float) -> None:
        """Set when to claim next: at once if there may be *more*, else when time or a hint brings something."""
        if more or self._hinted:
            self._claim_at = max(now, self._not_before)
        else:
            self._claim_at = max(now + self._pause(due_in), self._not_before)
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

    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        timing, asked_at = self.settings.timing, self._claim_asked_at
        token = deliveries[0].token
        renew_at = asked_at + sooner(timing.renew_every, self._rng)
        group = LockGroup(token, len(deliveries), sure_until(asked_at, timing), renew_at, deque(deliveries))
        self._groups[token] = group
        if self.state is State.RUNNING and now < renew_at:
            self._line.append(group)
            effects.append(Serve())
        else:  # the answer was too long on its way, or we are stopping
            if now >= renew_at:
                self._claim_less()
            effects.append(Emit(GivenBack(now, self.name, self._holder, len(deliveries))))
            self._put_back(group)

    def _pause(self, due_in: float | None) -> float:
        """Return how long to wait for a hint before looking again."""
        most = self.settings.poll_every
        if not self.settings.hints:  # nobody tells us: look often at first, then less and less
            most = min(most, 0.05 * 1.5 ** min(self._nothing, 20))
        most = later(most, self._rng)
        # A thousandth more, so as not to come too early by the store's clock.
        return most if due_in is None else min(most, max(due_in, 0.0) + 0.001)

    # --- verdicts ---

    def _flush(self, now: float, effects: list[PumpEffect]) -> None:
        """Pass whatever verdicts gathered while the last ones were on their way."""
        if self._unsettled and len(self._settling) < self._settles_max and now >= self._settle_at:
            self._asked += 1
            batch = self._unsettled[:SETTLE_MAX]
            del self._unsettled[:SETTLE_MAX]
            self._settling[self._asked] = batch
            effects.append(Settle(self._asked, batch))

    def _answered(
        self, ask: int, answers: Sequence[Settled | Lapsed | Renewed | NoAnswer], now: float, effects: list[PumpEffect]
    ) -> None:
        settlements = self._settling.pop(ask, None)
        if settlements is None:
            return
        self._misses = 0
        groups = self._groups
        unanswered: list[Settlement] = []
        for settlement, answer in zip(settlements, answers, strict=True):
            delivery, verdict = settlement
            if type(answer) is NoAnswer:
                if not unanswered:
                    effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "settle", answer.why)))
                unanswered.append(settlement)
                continue
            group = groups.get(delivery.token)
            if group is not None:
                group.running.pop(delivery.sequence, None)
                self._close(group)
            if type(answer) is Lapsed:
                self._lapsed(settlement, answer, group, now, effects)
            elif type(answer) is Settled and (answer.dead or (verdict is not COMPLETE and verdict is not GIVE_BACK)):
                effects.append(Report(settlement, answer))
        if unanswered:
            self._settle_at = now + later(self.settings.timing.retry_every / 4, self._rng)
            self._unsettled[:0] = unanswered

    def _lapsed(
        self, settlement: Settlement, answer: Lapsed, group: LockGroup | None, now: float, effects: list[PumpEffect]
    ) -> None:
        effects.append(Report(settlement, answer, _why_lapsed(group, settlement.delivery, now)))

    def _withdraw(self, group: LockGroup, sequence: int) -> bool:
        """Take a message from its handler, or from where it is kept; False if there is none, or a verdict on it."""
        entry = group.running.get(sequence)
        if entry is None or entry[1] == JUDGED:
            return False
        del group.running[sequence]
        self._close(group)
        return True

    def _close(self, group: LockGroup, count: int = 1) -> None:
        group.settled += count
        if group.settled >= group.size:
            self._groups.pop(group.token, None)

    def _unanswered(self, ask: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        retry = self._retry_in(self._misses)
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

    def _retry_in(self, misses: int) -> float:
        """Return how long to wait before what had no answer so many times is asked again."""
        return later(self.settings.timing.retry_every / 4, self._rng) * 1.5 ** min(misses, 6)

    # --- what the locks say ---

    def _lock_ended(self, held: Delivery | SessionLock, why: Why, at: float, effects: list[PumpEffect]) -> None:
        """Stop the handler of *held*, unless there is a verdict, whose answer says what became of the message."""
        group = self._groups.get(held.token)
        if group is None or isinstance(held, SessionLock):
            return
        sequence = held.sequence
        entry = group.running.get(sequence)
        if entry is None or entry[1] == JUDGED:
            return
        if why == "denied" and sequence in group.asking:
            self._denied.append(held)
            return
        is_news = sequence not in group.stopped
        if why == "denied" or sequence in group.kept:
            self._withdraw(group, sequence)
        group.stopped.add(sequence)
        if is_news:
            effects.append(Emit(LockEnded(at, self.name, self._holder, *named(held), why)))
            effects.append(CancelHandler(held, why))

    # --- giving back, stopping ---

    def _put_back(self, group: LockGroup) -> int:
        count = 0
        try:
            while True:  # from the end, as the locks do: each goes back once
                delivery = group.waiting.pop()
                group.running[delivery.sequence] = (delivery, JUDGED)
                self._unsettled.append(Settlement(delivery, GIVE_BACK))
                count += 1
        except IndexError:
            return count

    def _empty_buffer(self, now: float, effects: list[PumpEffect]) -> None:
        count = sum(self._put_back(group) for group in self._line)
        self._line.clear()
        if count:
            effects.append(Emit(GivenBack(now, self.name, self._holder, count)))

    def _drain(self, deadline: float, until: float | None, now: float, effects: list[PumpEffect]) -> None:
        if self.state in (State.RUNNING, State.PAUSED):
            self._move(State.DRAINING)
            self._empty_buffer(now, effects)
        if self.state is State.DRAINING:
            self._deadline = min(self._deadline, deadline)
            give_up_at = deadline + 2 * self.settings.timing.grace if until is None else until
            self._give_up_at = min(self._give_up_at, give_up_at)

    def _next_urge(self) -> float:
        """Return when the drain goes a step further: cancels handlers, leaves those that don't stop, and gives up."""
        match self._urges:
            case 0:
                return self._deadline
            case 1:
                return self._deadline + self.settings.timing.grace
        return self._give_up_at

    def _wind_up(self, now: float, effects: list[PumpEffect]) -> None:
        while now >= self._next_urge():
            self._urges += 1
            if self._urges > 2:
                self._move(State.LEFT)
                return
            if self.busy:
                effects.append(CancelAll("drain" if self._urges == 1 else "leave"))
        kept = [] if self.busy else [one for group in list(self._groups.values()) for one in taken(group)]
        if self._urges and kept:  # left unsettled by handlers that have ended
            for delivery in kept:
                self.judge(delivery, GIVE_BACK)
            self._flush(now, effects)
            kept = []
        # A group that is left is one of which the locks give something back: unanswered, it would count as a delivery.
        if self._is_quiet() and not kept:
            self._move(State.STOPPED)

    def _is_quiet(self) -> bool:
        """Tell whether nothing is under way."""
        return not (self.busy or self._claiming or self._settling or self._unsettled or self._groups)

    def _move(self, to: State) -> None:
        if to not in self.MAY[self.state]:
            raise AssertionError(f"a pump can't go from {self.state.value} to {to.value}")
        self.state = to


def _why_lapsed(group: LockGroup | None, delivery: Delivery, now: float) -> Why | None:
    """Return why a verdict came too late; None if that the lock is over was told before."""
    if group is None:
        return "denied"
    if delivery.sequence in group.stopped:
        return None
    # The locks note in time when a lock is over: unless they have not run.
    is_late = now >= group.sure_until > -NEVER and not group.over
    return "stalled" if group.stalled or is_late else "denied"
