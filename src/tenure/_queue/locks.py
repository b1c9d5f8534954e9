"""A consumer's decisions on the renewal thread, as a pure state machine: which locks to renew, and which to give up.

House rules, besides those of :mod:`tenure._queue.pump`:

- No user code can block this thread, so a handler that blocks its loop loses no lock.
- A message that waits is not renewed: it goes back, untried and uncounted, when its group is due for renewal. Only
  what runs is renewed, until ``max_hold``.
- The handler is cancelled before the lock ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenure._jitter import Rng, later, sooner
from tenure._lease import NoAnswer
from tenure._queue.effects import (
    Answered,
    CancelHandler,
    Dropped,
    Effect,
    Emit,
    LocksInput,
    Renew,
    Settle,
)
from tenure._queue.lock_group import JUDGED, NEVER, LockGroup, Why, named, taken, withdraw
from tenure._queue.message import (
    EXPIRED,
    GIVE_BACK,
    Delivery,
    Lapsed,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    Token,
)
from tenure._queue.pump_settings import PumpSettings, sure_until
from tenure._timing import RENEWALS_TOGETHER
from tenure.events import BrokerUnanswered, GivenBack, HandlerOverran, LockEnded, MessageDied


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
                if withdraw(hold, sequence):
                    self._drop(hold)
            elif now >= hold.cancelled[sequence]:
                hold.cancelled[sequence] = NEVER  # told once
                effects.append(Emit(HandlerOverran(now, self.name, self._holder, *named(delivery))))

    def _end(self, hold: LockGroup, why: Why, now: float, effects: list[Effect]) -> None:
        """Believe no longer: tell everybody who works under this hold to stop, while its locks are still sure."""
        hold.over = True
        if hold.session is not None:
            effects.append(CancelHandler(hold.session, why))
        for delivery in taken(hold):
            if delivery.sequence not in hold.cancelled:
                hold.cancelled[delivery.sequence] = hold.sure_until
                self._cancel(delivery, why, now, effects)

    def _cancel(self, delivery: Delivery, why: Why, now: float, effects: list[Effect]) -> None:
        effects.append(Emit(LockEnded(now, self.name, self._holder, *named(delivery), why)))
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
        elif one.sequence not in hold.asking and withdraw(hold, one.sequence):
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
            elif isinstance(answer, Settled) and answer.dead:  # it expired under the lock
                effects.append(Emit(MessageDied(now, self.name, self._holder, *named(settlement.delivery), EXPIRED)))
            over.append(settlement)
        if unanswered:
            self._returning[:0] = [one for one in unanswered if now < one[1]]
            self._return_at = now + later(self.settings.timing.retry_every, self._rng)
        for settlement in over:
            if (hold := self._holds.get(settlement.delivery.token)) is not None:
                self._drop(hold)
