"""A consumer's decisions on the caller's loop, as a pure state machine: what to claim, what to settle, how to stop.

House rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns what is to be done; ``wake_at``
  says when to call again with ``Tick``. Nothing polls.
- A lock is trusted from *before the claim was sent*; see :func:`tenure._lease.trusted_until`.
- All messages of a claim were locked at one moment, so they share one :class:`LockGroup`: what is kept per message is
  its place in it, and nothing else.
- The broker decides whether a verdict stands.
- No answer: ask again. A verdict is forgotten only when it was answered.

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
                    ──▶ TIMED_OUT  when the time for that is over, and the locks run out by themselves
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tenure._jitter import Rng, later, sooner
from tenure._lease import NoAnswer
from tenure._queue.claiming import ClaimSizes, ClaimTimes
from tenure._queue.effects import (
    WAKE_WORKERS,
    Accepted,
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Hint,
    LocksEnded,
    LookAlong,
    MessagesGivenBack,
    NothingLeft,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    Report,
    Resume,
    Tick,
)
from tenure._queue.lock_group import HAS_VERDICT, NEVER, DeliveryKey, LockGroup, LossReason, event_fields
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump_settings import PumpSettings, lock_trusted_until
from tenure._queue.settling import Settling
from tenure._queue.stopping import DRAINING, PAUSED, RUNNING, STOPPED, TIMED_OUT, TRANSITIONS, DrainSteps, State
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Lapsed, Renewed, Settled, Settlement, Verdict
from tenure.events import BrokerUnanswered, GivenBack, LockEnded

BACKLOG_MAX = 4
"""So many buffers' worth of verdicts may wait for an answer before claiming pauses."""


class Pump:
    """Decide for one consumer of one queue: when and how many to claim, when to pass verdicts, how to stop.

    ``take`` and ``done`` are called for every message, so they do next to nothing; the caller calls
    ``handle(Tick())`` soon afterwards, once for many.

    Args:
        name: The queue.
        holder: The consumer, for the observers.
        settings: How it works.
        rng: Source of jitter.
        groups: Where claims are kept, shared with the :class:`Locks` that renew them.
        now: The present moment; the first claim goes out at once.
        settles_max: How many requests may pass verdicts at a time.
    """

    claim_times: type[ClaimTimes] = ClaimTimes
    claim_sizes: type[ClaimSizes] = ClaimSizes

    def __init__(
        self,
        name: str,
        holder: str,
        settings: PumpSettings,
        rng: Rng,
        groups: dict[Token, LockGroup],
        *,
        now: float,
        settles_max: int = 1,
    ) -> None:
        self.name = name
        self.settings = settings
        self.state: State = RUNNING
        self.busy: int = 0  # handlers that run
        self.received: int = 0  # messages that were received so far
        self._holder = holder
        self._rng = rng
        self._groups = groups
        self._buffer: deque[LockGroup] = deque()  # groups in which messages wait, oldest first
        self._claim_times = self.claim_times(settings, rng, now=now)
        self._claim_sizes = self.claim_sizes(settings)
        self._settling = Settling(settles_max, now=now)
        self._drain_steps = DrainSteps(settings.timing.grace)
        self._backlog_max = BACKLOG_MAX * max(settings.prefetch, settings.concurrency)
        self._requests = 0  # number of the newest request
        self.misses: int = 0  # requests in a row that had no answer
        self._settle_misses = 0  # of those that pass verdicts: an answer to a claim is no sign of one to these
        self._claiming = 0  # number of the claim that is not answered; 0 for none
        self._claim_asked_at = now
        self._denied: list[Delivery] = []  # lost, unless that is due to the verdict that their handler passes

    # --- for the driver ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        at = NEVER
        if self.state is RUNNING and not self._claiming and self._room():
            at = self._claim_times.next_at
        if (settle_at := self._settling.wake_at) < at:
            at = settle_at
        if self.state is DRAINING:
            at = min(at, self._drain_steps.next_at)
        return at

    @property
    def waiting(self) -> int:
        """How many messages wait in the buffer."""
        return sum(len(group.waiting) for group in self._buffer)

    @property
    def unanswered(self) -> list[Settlement]:
        """The verdicts that may stand or not, as the broker has not answered yet."""
        return self._settling.unanswered

    def trusted_until(self, delivery: Delivery) -> float:
        """Return until when the lock of a message that was taken is trusted; minus infinity if it is over."""
        group = self._groups.get(delivery.token)
        return -NEVER if group is None else group.trusted_until_of(delivery)

    def has_overrun(self, delivery: Delivery) -> bool:
        """Return whether it was reported that the handler of *delivery* runs on though its lock is over."""
        group = self._groups.get(delivery.token)
        return group is not None and DeliveryKey(delivery) in group.overran

    @property
    def releasable(self) -> Sequence[SessionLock]:
        """The sessions that are locked to us and in which no handler runs."""
        return ()

    # --- for every message ---

    def take(self, now: float) -> Delivery | None:
        """Return the next message to be handled, or None if none waits. Its lock is sure for a while yet."""
        buffer = self._buffer
        while buffer:
            group = buffer[0]
            # Beyond renew_at they are too old: a handler would begin with half a lock. The locks give them back.
            if group.waiting and now < group.renew_at and (delivery := group.begin(now)) is not None:
                self.busy += 1
                return delivery
            buffer.popleft()
        return None

    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        """Note that the handler of *delivery* has ended; pass *verdict*, and return whether the message was still ours.

        With None, the message is kept and renewed until ``max_hold``; :meth:`settled` or :meth:`pass_verdict` may
        follow. After that its lock is left to run out, as the code that keeps it may still act on it.
        """
        self.busy -= 1
        self._claim_sizes.done += 1
        if verdict is not None:
            return self.pass_verdict(delivery, verdict)
        group = self._groups.get(delivery.token)
        if group is not None and delivery.sequence in group.running:
            if delivery.sequence in group.stopped:
                self._withdraw(group, delivery.sequence)
            else:
                group.kept.add(delivery.sequence)
        return False

    def let_expire(self, delivery: Delivery) -> None:
        """Note that the handler of *delivery* has ended, and that no verdict follows: its lock is left to run out."""
        self.busy -= 1
        self._claim_sizes.done += 1
        self.settled(delivery)

    def pass_verdict(self, delivery: Delivery, verdict: Verdict) -> bool:
        """Pass *verdict* on a message that was taken; False if it is settled, or its lock known to be lost."""
        group = self._groups.get(delivery.token)
        if group is None:
            return False
        entry = group.running.get(delivery.sequence)
        if entry is None or entry[1] == HAS_VERDICT:
            return False
        if group.ended and -NEVER in (group.ended.get(DeliveryKey(delivery)), group.trusted_until):
            return False  # a message of the locks says so, and is not here yet
        group.running[delivery.sequence] = (delivery, HAS_VERDICT)
        self._settling.add(Settlement(delivery, verdict))
        return True

    def settling_begins(self, delivery: Delivery) -> None:
        """Note that a handler is passing a verdict by itself; :meth:`settling_ends` follows, whatever the answer."""
        group = self._groups.get(delivery.token)
        if group is not None:
            group.settling.add(delivery.sequence)

    def settling_ends(self, delivery: Delivery) -> None:
        """Note that the verdict is answered, or that no answer is waited for."""
        group = self._groups.get(delivery.token)
        if group is not None:
            group.settling.discard(delivery.sequence)

    def abandoned(self, until: float) -> None:
        """Note that a message that was taken was abandoned, as far as is known, and comes back at *until*."""
        self._claim_times.retry_at = max(self._claim_times.retry_at, until)

    def settled(self, delivery: Delivery) -> bool:
        """Note that the broker has settled a message that was taken, or called its lock lost, without our asking.

        Returns whether its handler still ran, and was not cancelled.
        """
        group = self._groups.get(delivery.token)
        if group is None:
            return False
        if self._withdraw(group, delivery.sequence):
            return delivery.sequence not in group.stopped
        # The give-back of a drain would be refused, as the message is settled.
        if delivery.sequence in group.running and self._settling.withdraw(delivery):
            del group.running[delivery.sequence]
            self._close(group)
        return False

    # --- all other events ---

    def handle(self, event: PumpInput, now: float) -> list[PumpEffect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[PumpEffect] = []
        match event:
            case Tick():
                pass
            case Hint():
                self._claim_times.hint(now)
            case LookAlong():
                self._claim_times.look_along(now)
            case Claimed():
                self._claimed(event, now, effects)
            case Answered(request_id, answers):
                if isinstance(answers, NoAnswer):
                    self._unanswered(request_id, answers.why, now, effects)
                else:
                    self._answered(request_id, answers, now, effects)
            case Pause():
                if self.state is RUNNING:
                    self._set_state(PAUSED)
                    self._empty_buffer(now, effects)
            case Resume():
                if self.state is PAUSED:
                    self._set_state(RUNNING)
                    self._claim_times.next_at = now
            case Drain(deadline, until):
                self._drain(deadline, until, now, effects)
            case LocksEnded(at, locks):
                for held, why in locks:
                    self._lock_ended(held, why, at, effects)
            case MessagesGivenBack(counts):
                for token, count in counts:
                    if (group := self._groups.get(token)) is not None:
                        self._close(group, count)
        self._do_what_is_due(now, effects)
        return effects

    def _do_what_is_due(self, now: float, effects: list[PumpEffect]) -> None:
        """Do whatever is due."""
        if self._denied:
            denied, self._denied = self._denied, []
            for delivery in denied:
                self._lock_ended(delivery, "denied", now, effects)
        times = self._claim_times
        if self._is_empty() != (times.empty_since < NEVER):
            times.note_emptiness(now)
        self._flush(now, effects)
        if self.state is RUNNING and not self._claiming and now >= times.next_at and self._room():
            self._claim(now, effects)
        if self.state is DRAINING:
            self._continue_drain(now, effects)

    # --- nothing left ---

    def _is_empty(self) -> bool:
        """Return whether nothing is in hand."""
        return not self._groups

    def _found_nothing(self, asked_at: float, answer: Claimed | Accepted, effects: list[PumpEffect]) -> None:
        """Note that a claim sent at *asked_at* has brought nothing; drain, if the queue is empty for good."""
        is_over = self._claim_times.found_nothing(asked_at, answer.due_in, is_held_back=answer.is_held_back)
        if self.settings.until_empty and is_over and self.state is RUNNING:
            effects.append(NothingLeft())

    # --- claiming ---

    def _room(self) -> int:
        """Return how many to claim now; 0 while enough wait, or too many verdicts are unanswered."""
        waiting = self.waiting
        target = self._claim_sizes.target
        if waiting > target // 2 or len(self._settling) > self._backlog_max:
            return 0
        room = self.settings.concurrency - self.busy + target - waiting
        return self._claim_sizes.fitting(room, self._groups.values()) if room > 0 else 0

    def _claim(self, now: float, effects: list[PumpEffect]) -> None:
        self._claim_sizes.set_target(now - self._claim_asked_at, self.busy)
        if room := self._room():
            self._requests += 1
            self._claiming = self._requests
            self._claim_asked_at = now
            look = self._claim_times.asked(now)
            effects.append(Receive(self._requests, self._claim_sizes.asked(room), look))

    def _claimed(self, answer: Claimed, now: float, effects: list[PumpEffect]) -> None:
        if answer.request_id != self._claiming:
            return
        self._claiming = self.misses = 0
        self._claim_asked_at -= answer.age  # from when on its locks may have run
        self._claim_sizes.ask_more()
        self._claim_sizes.is_limited = answer.is_limited
        if answer.deliveries:
            self._claim_times.found()
            self._keep(answer.deliveries, now, effects)
        else:
            self._found_nothing(self._claim_asked_at, answer, effects)
        is_more = self._claim_sizes.is_full(len(answer.deliveries))
        self._claim_times.answered(self._claim_asked_at, is_more, answer.due_in, now)

    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        timing, asked_at = self.settings.timing, self._claim_asked_at
        self.received += len(deliveries)
        token = deliveries[0].token
        renew_at = asked_at + sooner(timing.renew_every, self._rng)
        size = sum(len(delivery.body) for delivery in deliveries)
        self._claim_sizes.brought(len(deliveries), size)
        trusted_until = lock_trusted_until(asked_at, timing)
        group = LockGroup(token, len(deliveries), trusted_until, renew_at, deque(deliveries), bytes=size)
        self._groups[token] = group
        if self.state is RUNNING and now < renew_at:
            self._buffer.append(group)
            effects.append(WAKE_WORKERS)
        else:  # the answer was too late, or the pump is stopping
            if now >= renew_at:
                self._claim_sizes.ask_less()
            effects.append(Emit(GivenBack(now, self.name, self._holder, len(deliveries))))
            self._put_back(group)

    # --- verdicts ---

    def _flush(self, now: float, effects: list[PumpEffect]) -> None:
        """Pass the verdicts that gathered while the last ones were on their way."""
        if now >= self._settling.wake_at:
            self._requests += 1
            effects.append(self._settling.next_request(self._requests))

    def _answered(
        self,
        request_id: int,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer],
        now: float,
        effects: list[PumpEffect],
    ) -> None:
        settlements = self._settling.answered(request_id)
        if settlements is None:
            return
        self.misses = self._settle_misses = 0
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
            self._settling.ask_again(unanswered, now + later(self.settings.timing.retry_every / 4, self._rng))

    def _lapsed(
        self, settlement: Settlement, answer: Lapsed, group: LockGroup | None, now: float, effects: list[PumpEffect]
    ) -> None:
        why = "denied" if group is None else group.why_lapsed(settlement.delivery, now)
        effects.append(Report(settlement, answer, why))

    def _withdraw(self, group: LockGroup, sequence: int) -> bool:
        """Take a message from its handler, or from where it is kept; False if there is none, or a verdict on it."""
        if not group.is_with_handler(sequence):
            return False
        del group.running[sequence]
        self._close(group)
        return True

    def _close(self, group: LockGroup, count: int = 1) -> None:
        group.settled += count
        if group.settled >= group.size:
            self._groups.pop(group.token, None)

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        if request_id == self._claiming:
            self._claiming = 0
            self._claim_times.unanswered(now + self._retry_in(self.misses))
            self.misses += 1
            self._claim_sizes.ask_less()
            effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "receive", why)))
            return
        settlements = self._settling.answered(request_id)
        if settlements is None:
            return
        self._settling.ask_again(settlements, now + self._retry_in(self._settle_misses))
        self.misses += 1
        self._settle_misses += 1
        effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "settle", why)))

    def _retry_in(self, misses: int) -> float:
        """Return how long to wait before what had no answer so many times is asked again."""
        return later(self.settings.timing.retry_every / 4, self._rng) * 1.5 ** min(misses, 6)

    # --- messages of the locks ---

    def _lock_ended(self, held: Delivery | SessionLock, why: LossReason, at: float, effects: list[PumpEffect]) -> None:
        """Stop the handler of *held*, unless there is a verdict, whose answer says what became of the message."""
        group = self._groups.get(held.token)
        if group is None or isinstance(held, SessionLock):
            return
        sequence = held.sequence
        if not group.is_with_handler(sequence):
            return
        if why == "denied" and sequence in group.settling:
            self._denied.append(held)
            return
        is_news = sequence not in group.stopped
        if why == "denied" or sequence in group.kept:
            self._withdraw(group, sequence)
        group.stopped.add(sequence)
        if is_news:
            effects.append(Emit(LockEnded(at, self.name, self._holder, *event_fields(held), why)))
            effects.append(CancelHandler(held, why))

    # --- giving back, stopping ---

    def _put_back(self, group: LockGroup) -> int:
        count = 0
        while (delivery := group.take_last()) is not None:
            group.running[delivery.sequence] = (delivery, HAS_VERDICT)
            self._settling.add(Settlement(delivery, GIVE_BACK))
            count += 1
        return count

    def _empty_buffer(self, now: float, effects: list[PumpEffect]) -> None:
        count = sum(self._put_back(group) for group in self._buffer)
        self._buffer.clear()
        if count:
            effects.append(Emit(GivenBack(now, self.name, self._holder, count)))

    def _drain(self, deadline: float, until: float | None, now: float, effects: list[PumpEffect]) -> None:
        if self.state in (RUNNING, PAUSED):
            self._set_state(DRAINING)
            self._empty_buffer(now, effects)
        if self.state is DRAINING:
            self._drain_steps.limit(deadline, until)

    def _continue_drain(self, now: float, effects: list[PumpEffect]) -> None:
        while (step := self._drain_steps.take(now)) is not None:
            if step == "give up":
                self._set_state(TIMED_OUT)
                return
            if self.busy:
                effects.append(CancelAll(step))
        kept = [] if self.busy else [one for group in list(self._groups.values()) for one in group.with_handlers()]
        if self._drain_steps.has_begun and kept:  # left unsettled by handlers that have ended
            for delivery in kept:
                self.pass_verdict(delivery, GIVE_BACK)
            self._flush(now, effects)
            kept = []
        # A group that is left is one of which the locks give something back: unanswered, it would count as a delivery.
        if self._is_quiet() and not kept:
            self._set_state(STOPPED)

    def _is_quiet(self) -> bool:
        """Return whether no handler runs and every request is answered."""
        return not (self.busy or self._claiming or self._settling or self._groups)

    def _set_state(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise AssertionError(f"a pump can't go from {self.state.value} to {to.value}")
        self.state = to
