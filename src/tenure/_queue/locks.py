"""A consumer's decisions on the renewal thread, as a pure state machine: which locks to renew, and which to give up.

House rules, besides those of :mod:`tenure._queue.pump`:

- No user code can block this thread, so a handler that blocks its loop loses no lock.
- A message that waits is not renewed: it goes back, untried and uncounted, when its group is due for renewal. Only
  what runs is renewed, until ``max_hold``.
- The handler is cancelled before the lock ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tenure._jitter import Rng, later, sooner
from tenure._lease import NoAnswer
from tenure._queue.effects import (
    Answered,
    Emit,
    LocksEffect,
    LocksEnded,
    LocksInput,
    MessagesGivenBack,
    Renew,
    Settle,
)
from tenure._queue.lock_group import HAS_VERDICT, NEVER, DeliveryKey, LockGroup, LossReason, event_fields
from tenure._queue.message import EXPIRED, Delivery, SessionLock, Token
from tenure._queue.pump_settings import PumpSettings, lock_trusted_until
from tenure._queue.verdicts import GIVE_BACK, Lapsed, Renewed, Settled, Settlement
from tenure.events import BrokerUnanswered, GivenBack, HandlerOverran, MessageDied

EARLY_SHARE = 0.2
"""A renewal may go out this share of ``renew_every`` early, so that the renewals of a consumer share a statement."""


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A renewal that is not answered: when it was sent, and for which locks."""

    asked_at: float
    groups: Sequence[LockGroup]
    held: Sequence[tuple[LockGroup, Delivery | SessionLock]]


class Locks:
    """Decide for one consumer which locks to renew, which messages to give back, and which handlers to cancel.

    Args:
        name: The queue.
        holder: The consumer, for the observers.
        settings: How it works.
        rng: Source of jitter.
        groups: The claims; the pump adds and removes them.
        now: The present moment.
    """

    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, groups: dict[Token, LockGroup], *, now: float
    ) -> None:
        self.name = name
        self.settings = settings
        self.wake_at: float = now
        """When to call ``handle(Tick(), now)``. It comes often enough to meet each new group in time."""
        self._check_every = min(settings.timing.renew_every / 2, settings.max_hold)
        self._holder = holder
        self._rng = rng
        self._groups = groups
        self._asked = 0
        self._renewals: dict[int, _Renewal] = {}
        self._returning: list[tuple[Settlement, float]] = []  # to be given back, and the end of their locks
        self._return_at = now
        self._returns: dict[int, list[tuple[Settlement, float]]] = {}
        self._ended: list[tuple[Delivery | SessionLock, LossReason]] = []  # for the pump
        self._late_by = 0.0  # how much later than asked for the call came

    def handle(self, event: LocksInput, now: float) -> list[LocksEffect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[LocksEffect] = []
        self._late_by = now - self.wake_at
        match event:
            case Answered(request_id, answers) if request_id in self._renewals:
                self._on_renewed(self._renewals.pop(request_id), answers, now, effects)
            case Answered(request_id, answers) if request_id in self._returns:
                self._on_given_back(self._returns.pop(request_id), answers, now, effects)
            case _:
                pass
        for group in list(self._groups.values()):
            self._check_group(group, now, effects)
        self._renew(now, effects)
        self._give_back(now, effects)
        self._set_wake_at(now)
        if self._ended:
            effects.append(LocksEnded(now, self._ended))
            self._ended = []
        return effects

    @property
    def settled(self) -> bool:
        """Whether no lock is left, and every request is answered."""
        return not (self._groups or self._renewals or self._returning or self._returns)

    # --- time ---

    def _check_group(self, group: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        end = group.trusted_until - self.settings.timing.grace
        if not group.over and now >= end:
            # A call was due before that, to renew it: the broker did not fail, this process did not run.
            group.stalled = self._late_by >= self.settings.timing.retry_every and now - self._late_by < end
            self._end(group, "stalled" if group.stalled else "unanswered", now)
        if group.waiting and group.session is None and (group.over or now >= group.renew_at):
            self._give_back_waiting(group, now, effects)
        for delivery, began in list(group.running.values()):
            if began == HAS_VERDICT:
                continue
            until = group.ended.get(DeliveryKey(delivery))
            if until is None:
                if group.over:  # it was taken while the group ended
                    self._stop(group, delivery, "stalled" if group.stalled else "unanswered", now)
                elif now >= began + self.settings.max_hold:
                    self._stop(group, delivery, "max_hold", now)
            elif self._may_overrun(group, delivery) and now >= until:
                group.overran.add(DeliveryKey(delivery))  # reported once
                effects.append(Emit(HandlerOverran(now, self.name, self._holder, *event_fields(delivery))))
                if group.session is not None and not group.over:  # no other consumer may have the session meanwhile
                    self._end(group, "max_hold", now)

    def _may_overrun(self, group: LockGroup, delivery: Delivery) -> bool:
        """Return whether a handler that was cancelled may still run, which was not reported yet."""
        key = DeliveryKey(delivery)
        return delivery.sequence not in group.kept and key not in group.overran and group.ended[key] > -NEVER

    def _end(self, group: LockGroup, why: LossReason, now: float) -> None:
        """Trust the locks of *group* no longer: cancel its handlers, while the locks still hold."""
        group.over = True
        for delivery in group.with_handlers():
            if DeliveryKey(delivery) not in group.ended:
                self._stop(group, delivery, why, now)
        if group.session is not None:
            self._ended.append((group.session, why))

    def _stop(self, group: LockGroup, delivery: Delivery, why: LossReason, now: float) -> None:
        if group.session is not None and why in ("denied", "max_hold"):  # its lock is over already, or renewed on
            group.ended[DeliveryKey(delivery)] = now + self.settings.timing.grace
        else:
            group.ended[DeliveryKey(delivery)] = -NEVER if why == "denied" else group.trusted_until
        self._ended.append((delivery, why))

    def _set_wake_at(self, now: float) -> None:
        at = now + self._check_every
        for group in list(self._groups.values()):
            if not group.over:
                at = min(at, group.renew_at, group.trusted_until - self.settings.timing.grace)
            for delivery, began in list(group.running.values()):
                if began == HAS_VERDICT:
                    continue
                until = group.ended.get(DeliveryKey(delivery))
                if until is None:
                    at = min(at, began + self.settings.max_hold)
                elif self._may_overrun(group, delivery):
                    at = min(at, until)
        if self._returning and not self._returns:
            at = min(at, self._return_at)
        self.wake_at = at

    # --- renewing ---

    def _renew(self, now: float, effects: list[LocksEffect]) -> None:
        groups = [group for group in list(self._groups.values()) if not group.over and self._is_due(group, now)]
        if not any(now >= group.renew_at for group in groups):
            return
        held = [(group, one) for group in groups for one in self._worth_renewing(group)]
        for group in groups:
            group.renew_at = now + later(self.settings.timing.retry_every, self._rng)  # unless it is answered before
        if held:
            self._asked += 1
            self._renewals[self._asked] = _Renewal(now, groups, held)
            effects.append(Renew(self._asked, [one for _, one in held]))

    def _is_due(self, group: LockGroup, now: float) -> bool:
        # A little early, to go along with another; but not while messages wait, which are given back and not renewed.
        early = 0.0 if group.waiting else EARLY_SHARE * self.settings.timing.renew_every
        return now >= group.renew_at - early

    def _worth_renewing(self, group: LockGroup) -> Sequence[Delivery | SessionLock]:
        if group.session is not None:
            return [group.session]
        running = list(group.running.values())
        return [one for one, began in running if began == HAS_VERDICT or DeliveryKey(one) not in group.ended]

    def _on_renewed(
        self,
        renewal: _Renewal,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[LocksEffect],
    ) -> None:
        timing = self.settings.timing
        unanswered: dict[Token, str] = {}
        if isinstance(answers, NoAnswer):
            unanswered = dict.fromkeys((group.token for group in renewal.groups), answers.why)
            answers = [answers] * len(renewal.held)
        for (group, _), answer in zip(renewal.held, answers, strict=True):
            if isinstance(answer, NoAnswer):
                unanswered.setdefault(group.token, answer.why)
        if unanswered:
            why = next(iter(unanswered.values()))
            effects.append(Emit(BrokerUnanswered(now, self.name, self._holder, "renew", why)))
        until = lock_trusted_until(renewal.asked_at, timing)
        for group in renewal.groups:
            if group.token in unanswered:
                group.renew_at = min(group.renew_at, now + later(timing.retry_every, self._rng))
            elif until > group.trusted_until:
                group.trusted_until = until
                group.renew_at = renewal.asked_at + sooner(timing.renew_every, self._rng)
        for (group, one), answer in zip(renewal.held, answers, strict=True):
            if isinstance(answer, Lapsed):
                self._lose(group, one, now)

    def _lose(self, group: LockGroup, one: Delivery | SessionLock, now: float) -> None:
        """Note that the broker says that a lock is over. The pump knows whether its own verdict has ended it."""
        if isinstance(one, SessionLock):
            group.trusted_until = -NEVER
            if not group.over:
                self._end(group, "denied", now)
        else:
            self._stop(group, one, "denied", now)

    # --- giving back ---

    def _give_back_waiting(self, group: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        """Give back what waits in *group*: it has waited too long here, and others may have time."""
        count = 0
        while (delivery := group.take_last()) is not None:
            self._returning.append((Settlement(delivery, GIVE_BACK), group.trusted_until))
            count += 1
        if count:
            effects.append(Emit(GivenBack(now, self.name, self._holder, count)))

    def _give_back(self, now: float, effects: list[LocksEffect]) -> None:
        if self._returning and not self._returns and now >= self._return_at:
            self._asked += 1
            batch, self._returning = self._returning, []
            self._returns[self._asked] = batch
            effects.append(Settle(self._asked, [settlement for settlement, _ in batch]))

    def _on_given_back(
        self,
        batch: list[tuple[Settlement, float]],
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[LocksEffect],
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
                effects.append(
                    Emit(MessageDied(now, self.name, self._holder, *event_fields(settlement.delivery), EXPIRED))
                )
            over.append(settlement)
        if unanswered:
            self._returning[:0] = [one for one in unanswered if now < one[1]]
            self._return_at = now + later(self.settings.timing.retry_every, self._rng)
        if over:
            effects.append(MessagesGivenBack(list(Counter(settlement.delivery.token for settlement in over).items())))
