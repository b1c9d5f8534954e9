"""Planted bugs in what a consumer believes of its locks, and when it cancels a handler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tenure._jitter import Rng
from tenure._lease import NoAnswer
from tenure._queue.effects import LocksEffect, PumpEffect
from tenure._queue.lock_group import DeliveryKey, LockGroup, LossReason
from tenure._queue.locks import Locks, _Renewal
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.verdicts import Lapsed, Renewed, Settled
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.queues.parts import Parts


class _CountsFromAnswer(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        self._claim_asked_at = now
        super()._keep(deliveries, now, effects)


class _BelievesLateClaim(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        if now >= self._claim_asked_at + self.settings.timing.renew_every:
            self._claim_asked_at = now
        super()._keep(deliveries, now, effects)


class _NoMargin(Pump):
    def _keep(self, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        super()._keep(deliveries, now, effects)
        for hold in self._groups.values():
            if hold.token == deliveries[0].token:
                hold.trusted_until = self._claim_asked_at + self.settings.timing.ttl


class _RenewsFromAnswer(Locks):
    def _on_renewed(
        self,
        renewal: _Renewal,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[LocksEffect],
    ) -> None:
        super()._on_renewed(_Renewal(now, renewal.groups, renewal.held), answers, now, effects)


class _NoAnswerIsYes(Locks):
    def _on_renewed(
        self,
        renewal: _Renewal,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[LocksEffect],
    ) -> None:
        if isinstance(answers, NoAnswer):
            answers = [Renewed(0.0)] * len(renewal.held)
        super()._on_renewed(renewal, answers, now, effects)


class _IgnoresNo(Locks):
    def _lose(self, hold: LockGroup, one: Delivery | SessionLock, now: float) -> None:
        pass


class _ServesOldBuffer(Pump):
    """Takes what waits however long it has waited."""

    def take(self, now: float) -> Delivery | None:
        buffer = self._buffer
        while buffer:
            if buffer[0].waiting and (delivery := buffer[0].begin(now)) is not None:
                self.busy += 1
                return delivery
            buffer.popleft()
        return None


class _KeepsOldBuffer(Locks):
    """Neither gives back nor renews what waits."""

    def _give_back_waiting(self, hold: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        pass


class _RenewsForAll(Locks):
    """Believes that a renewal of what runs is one of what waits."""

    def _check_group(self, hold: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        waiting = list(hold.waiting)
        hold.waiting.clear()
        super()._check_group(hold, now, effects)
        hold.waiting.extend(waiting)


class _CancelsLate(Locks):
    def __init__(
        self, name: str, holder: str, settings: PumpSettings, rng: Rng, holds: dict[Token, LockGroup], *, now: float
    ) -> None:
        settings = replace(settings, timing=replace(settings.timing, grace=0.0))
        super().__init__(name, holder, settings, rng, holds, now=now)


class _KeepsForEver(Locks):
    """Counts the time of what a handler has kept anew, again and again."""

    def _check_group(self, hold: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        for sequence in hold.kept & hold.running.keys():
            delivery, began = hold.running[sequence]
            if began < math.inf:
                hold.running[sequence] = (delivery, now)
        super()._check_group(hold, now, effects)


class _IgnoresTime(Locks):
    def _stop(self, group: LockGroup, delivery: Delivery, why: LossReason, now: float) -> None:
        if why in ("denied", "max_hold"):
            super()._stop(group, delivery, why, now)


class _IgnoresMaxHold(Locks):
    def _check_group(self, hold: LockGroup, now: float, effects: list[LocksEffect]) -> None:
        for sequence, (delivery, _) in hold.running.items():
            if hold.running[sequence][1] < math.inf:
                hold.running[sequence] = (delivery, now)
        super()._check_group(hold, now, effects)


class _TellsOfKept(Locks):
    """Reports that a handler runs on, which has ended and kept its message."""

    def _may_overrun(self, group: LockGroup, delivery: Delivery) -> bool:
        return DeliveryKey(delivery) not in group.overran and group.ended[DeliveryKey(delivery)] > -math.inf


class _CutIsRenewed(Locks):
    """Takes what could not be asked about for renewed with the others."""

    def _on_renewed(
        self,
        renewal: _Renewal,
        answers: Sequence[Settled | Lapsed | Renewed | NoAnswer] | NoAnswer,
        now: float,
        effects: list[LocksEffect],
    ) -> None:
        if not isinstance(answers, NoAnswer):
            answers = [Renewed(0.0) if isinstance(one, NoAnswer) else one for one in answers]
        super()._on_renewed(renewal, answers, now, effects)


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "counts-from-answer": Mutant(
            "a lock is counted from when the answer came", Parts(pump=_CountsFromAnswer), "outlives lock"
        ),
        "believes-late-claim": Mutant(
            "a claim that comes late counts as if just made", Parts(pump=_BelievesLateClaim), "outlives lock"
        ),
        "no-margin": Mutant("no allowance for clocks that drift", Parts(pump=_NoMargin), "outlives lock"),
        "renews-from-answer": Mutant(
            "a renewal is counted from when the answer came", Parts(locks=_RenewsFromAnswer), "outlives lock"
        ),
        "no-answer-is-yes": Mutant("no answer to a renewal counts as yes", Parts(locks=_NoAnswerIsYes), "two sure"),
        "ignores-no": Mutant("a no to a renewal is ignored", Parts(locks=_IgnoresNo), "late result"),
        "buffer-outlives-locks": Mutant(
            "what waits is neither renewed nor given back",
            Parts(pump=_ServesOldBuffer, locks=_KeepsOldBuffer),
            "unsure start",
        ),
        "renews-for-all": Mutant(
            "a renewal of what runs counts for what waits",
            Parts(pump=_ServesOldBuffer, locks=_RenewsForAll),
            "outlives lock",
        ),
        "cancels-late": Mutant("a handler is cancelled when its lock ends", Parts(locks=_CancelsLate), "grace"),
        "ignores-time": Mutant("a handler is cancelled only by a no", Parts(locks=_IgnoresTime), "not cancelled"),
        "ignores-max-hold": Mutant("a handler may run for ever", Parts(locks=_IgnoresMaxHold), "max hold"),
        "keeps-for-ever": Mutant("what a handler keeps is held on", Parts(locks=_KeepsForEver), "max hold"),
        "tells-of-kept": Mutant(
            "a handler that has ended is reported to run on", Parts(locks=_TellsOfKept), "false alarm"
        ),
        "cut-is-renewed": Mutant(
            "one that can't be asked about counts as renewed", Parts(locks=_CutIsRenewed), "outlives lock"
        ),
    }
)
"""Bugs that must be found, by name."""
