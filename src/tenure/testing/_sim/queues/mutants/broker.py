"""Planted bugs in the broker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tenure._backends.memory.messages import (
    LockGroup,
    MessageState,
    RememberedIds,
    Session,
    StoredMessage,
    StoredQueue,
    Subqueue,
)
from tenure._lease import NoAnswer
from tenure._queue.delivery_ends import Cause, Ending, Outcome
from tenure._queue.effects import Renew, Settle
from tenure._queue.limits import UNLIMITED, Allowance, allowance_of
from tenure._queue.message import Attempt, Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import LAPSED, Abandon, Complete, GiveBack, Lapsed, Renewed, Settled, Settlement
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.queues.broker import QUEUE, SimulatedBroker
from tenure.testing._sim.queues.parts import Parts
from tenure.testing._sim.queues.requests import Send


class _SettlesById(SimulatedBroker):
    """Takes a verdict on any locked message, whichever token it carries."""

    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        subqueue = self._subqueue(delivery.queue, now)
        message = subqueue.messages.get(delivery.sequence) if subqueue else None
        return (
            (subqueue, message)
            if subqueue is not None and message is not None and message.state is MessageState.LOCKED
            else None
        )


class _SettlesAfterTheEnd(SimulatedBroker):
    """Takes a verdict after the lock has ended, if no other consumer has the message yet."""

    def _subqueue(self, name: str, now: float) -> Subqueue | None:
        return super()._subqueue(name, now if self._looks else -math.inf)

    _looks = True

    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        self._looks = False
        found = super()._locked(delivery, now)
        self._looks = True
        return found


class _CountsAtSettle(SimulatedBroker):
    """Counts a delivery when it is abandoned: a crash does not count."""

    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        message.delivery_count -= 1
        super()._lock_expired(subqueue, message, now)


class _CountsGiveBack(SimulatedBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += isinstance(ending, GiveBack)
        return super()._end(subqueue, message, ending, now)


class _OneTryMore(SimulatedBroker):
    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        skipped = isinstance(ending, Abandon)
        message.delivery_count -= skipped
        outcome = super()._end(subqueue, message, ending, now)
        message.delivery_count += skipped
        return outcome


class _OneCrashMore(SimulatedBroker):
    """Lets a message live whose last lock has ended."""

    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        self._unlock(message)
        self._record_attempt(message, Attempt(message.delivery_count, now + self._wall_offset, "expired"))
        self._schedule(subqueue, message, now, now)


class _NoReason(SimulatedBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        super()._dead_letter(subqueue, message, Cause("", ""), now)


class _NoError(SimulatedBroker):
    """Forgets what failed."""

    def _record_attempt(self, message: StoredMessage, attempt: Attempt) -> None:
        super()._record_attempt(message, replace(attempt, error=None))


class _NeverExpires(SimulatedBroker):
    def _group_expired(self, subqueue: Subqueue, group: LockGroup, now: float) -> None:
        pass


class _ExpiresEarly(SimulatedBroker):
    """Hands out locked messages a quarter of a lock too early."""

    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        early = 0.25 * self._run.plan.timing.ttl
        return super()._lock(subqueue, messages, until - early, token)


class _ForgetsRenewal(SimulatedBroker):
    """Says yes to a renewal, and extends nothing."""

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> bool:
        return isinstance(one, Delivery) and self._locked(one, now) is not None


class _CompletesAndKeeps(SimulatedBroker):
    """Says yes to a first complete, and leaves the message where it is."""

    def _complete(self, subqueue: Subqueue, message: StoredMessage, verdict: Complete, now: float) -> Iterable[str]:
        if message.delivery_count == 1:
            subqueue.messages[message.sequence] = message
            self._schedule(subqueue, message, now, now)
        return super()._complete(subqueue, message, verdict, now)


class _DropsTheDead(SimulatedBroker):
    def _dead_letter(self, subqueue: Subqueue, message: StoredMessage, cause: Cause, now: float) -> None:
        self._set_state(subqueue, message, MessageState.GONE)


class _NoDelay(SimulatedBroker):
    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        super()._schedule(subqueue, message, now, now)


class _KeepsTwice(SimulatedBroker):
    """Remembers no ids: what is sent again is kept again."""

    def _send(self, name: str, messages: Sequence[Outgoing], now: float) -> list[str]:
        self._queue(name).sent = RememberedIds()
        return super()._send(name, messages, now)


class _SendsIntoTheVoid(SimulatedBroker):
    """Acknowledges the last message of a batch, and does not keep it."""

    def _insert(self, queue: StoredQueue, message: Outgoing, name: str, now: float) -> str:
        if queue.sequence % 20 == 0:
            return name
        return super()._insert(queue, message, name, now)


class _OldTokens(SimulatedBroker):
    """Begins with the first token again now and then, as after a restart that forgot where it was."""

    def _new_token(self) -> int:
        if self._memory.tokens >= 20:
            self._memory.tokens = 0
        return super()._new_token()


class _CountsFromBeginning(SimulatedBroker):
    """Counts a renewal from before it waited: one that is carried out late, after newer ones, shortens the lock."""

    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        found = self._locked(one, now) if isinstance(one, Delivery) else None
        if found is None:
            return None
        _, message = found
        message.locked_until = until - (now - self.begun_at)
        return message.locked_until


class _SettlesLateByItself(SimulatedBroker):
    """Judges a verdict by what was true when it was begun, and not when it is carried out."""

    def _locked(self, one: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        return super()._locked(one, min(now, self.begun_at))


class _KeepsWhatItRefuses(SimulatedBroker):
    """Full, it says that it keeps nothing, and keeps the first message all the same."""

    def refusal(self, message: object) -> str:
        why = super().refusal(message)
        if why and isinstance(message, Send):
            self._send(QUEUE, message.messages[:1], self._clock.now())
        return why


class _RefusesToSettle(SimulatedBroker):
    """Full, it refuses verdicts, too, and for long."""

    def refusal(self, message: object) -> str:
        is_full = isinstance(message, Settle | Renew) and self.full_until
        return "the store is full" if is_full else super().refusal(message)

    def heal(self) -> None:
        pass


class _GoneWhileAway(SimulatedBroker):
    """What it is asked for while it is away is said to be no more."""

    def refusal(self, message: object) -> str:
        why = super().refusal(message)
        return "" if isinstance(message, Renew) and why else why

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        return [LAPSED] * len(held) if super().refusal(None) else await super().renew(held, lock)


class _CutIsLost(SimulatedBroker):
    """Says of what it can't ask about that it is lost."""

    def renew_others(
        self, held: Sequence[Delivery | SessionLock], lock: float
    ) -> Sequence[Renewed | Lapsed | NoAnswer]:
        return [LAPSED if isinstance(one, NoAnswer) else one for one in super().renew_others(held, lock)]


# --- limits ----------------------------------------------------------------------------------------------------------


class _NoLimits(SimulatedBroker):
    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        return UNLIMITED


class _CountsOneClaim(SimulatedBroker):
    """Compares what one claim takes with the limit, and not what is locked already."""

    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name)
        return UNLIMITED if subqueue.is_dead else allowance_of(stored.settings, 0, stored.delivered, now)


class _CountsTheDead(SimulatedBroker):
    """Gives the place of a dead consumer to nobody: only a verdict frees it."""

    _taken = 0

    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name)
        return UNLIMITED if subqueue.is_dead else allowance_of(stored.settings, self._taken, stored.delivered, now)

    def _lock(
        self, subqueue: Subqueue, messages: list[StoredMessage], until: float, token: int = 0
    ) -> Sequence[Delivery]:
        self._taken += len(messages)
        return super()._lock(subqueue, messages, until, token)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        answers = await super().settle(settlements)
        self._taken -= sum(isinstance(answer, Settled) for answer in answers)
        return answers


class _RefundsRate(SimulatedBroker):
    """Takes back from the rate what is given back or abandoned."""

    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        if isinstance(ending, (Abandon, GiveBack)):
            self._queue(subqueue.name).delivered.clear()
        return super()._end(subqueue, message, ending, now)


class _FixedWindow(SimulatedBroker):
    """Counts the deliveries of each window by itself."""

    def _allowance(self, subqueue: Subqueue, now: float) -> Allowance:
        stored = self._queue(subqueue.name)
        rate = stored.settings.rate
        if isinstance(rate, tuple):
            stored.delivered = [one for one in stored.delivered if one.at // rate[1] == now // rate[1]]
        return super()._allowance(subqueue, now)


class _NoSessionRate(SimulatedBroker):
    def _note_delivered(self, subqueue: Subqueue, count: int, now: float, session: str | None = None) -> None:
        super()._note_delivered(subqueue, count, now)


class _NeverFree(SimulatedBroker):
    """Holds a session up for ever once its rate was used up."""

    def _hold_up(self, subqueue: Subqueue, session: Session, seconds: float, now: float) -> None:
        super()._hold_up(subqueue, session, 1e9, now)


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "settles-by-id": Mutant("a verdict needs no token", Parts(broker=_SettlesById), "stale verb"),
        "settles-after-the-end": Mutant(
            "a verdict is taken after the lock has ended", Parts(broker=_SettlesAfterTheEnd), "stale verb"
        ),
        "counts-at-settle": Mutant("a crash does not count as a delivery", Parts(broker=_CountsAtSettle), "count"),
        "counts-give-back": Mutant("a give-back counts as a delivery", Parts(broker=_CountsGiveBack), "count"),
        "one-try-more": Mutant("one delivery more than allowed", Parts(broker=_OneTryMore), "tries"),
        "one-crash-more": Mutant("one crash more than allowed", Parts(broker=_OneCrashMore), "tries"),
        "no-reason": Mutant("a dead letter has no reason", Parts(broker=_NoReason), "dead letter"),
        "no-error": Mutant("a dead letter has no error", Parts(broker=_NoError), "dead letter"),
        "never-expires": Mutant("the lock of a dead consumer never ends", Parts(broker=_NeverExpires), "not drained"),
        "expires-early": Mutant("a lock ends too early", Parts(broker=_ExpiresEarly), "double lock"),
        "forgets-renewal": Mutant(
            "a renewal is acknowledged, and nothing done", Parts(broker=_ForgetsRenewal), "double lock"
        ),
        "completes-and-keeps": Mutant(
            "a completed message comes again", Parts(broker=_CompletesAndKeeps), "redelivered"
        ),
        "drops-the-dead": Mutant("what dies is gone", Parts(broker=_DropsTheDead), "lost"),
        "no-delay": Mutant("a delay is not kept", Parts(broker=_NoDelay), "too early"),
        "keeps-twice": Mutant("what is sent again is kept again", Parts(broker=_KeepsTwice), "kept twice"),
        "sends-into-the-void": Mutant(
            "a send is acknowledged, and the message not kept", Parts(broker=_SendsIntoTheVoid), "lost"
        ),
        "counts-from-beginning": Mutant(
            "a renewal that is carried out late shortens the lock", Parts(broker=_CountsFromBeginning), "shortened"
        ),
        "settles-late-by-itself": Mutant(
            "a lock is judged by when the question was begun", Parts(broker=_SettlesLateByItself), "stale verb"
        ),
        "keeps-what-it-refuses": Mutant(
            "a full store keeps what it refuses", Parts(broker=_KeepsWhatItRefuses), "from nowhere"
        ),
        "refuses-to-settle": Mutant("a full store can't be drained", Parts(broker=_RefusesToSettle), "not drained"),
        "gone-while-away": Mutant("what is away is said to be gone", Parts(broker=_GoneWhileAway), "false no"),
        "cut-is-lost": Mutant("one that can't be asked about is said to be lost", Parts(broker=_CutIsLost), "false no"),
        "no-limits": Mutant("limits are not kept", Parts(broker=_NoLimits), "at once"),
        "counts-one-claim": Mutant("a limit holds for each claim", Parts(broker=_CountsOneClaim), "at once"),
        "counts-the-dead": Mutant("a dead consumer keeps its places", Parts(broker=_CountsTheDead), "not drained"),
        "refunds-rate": Mutant("what is put back may be handed out at once", Parts(broker=_RefundsRate), "too fast"),
        "fixed-window": Mutant("a rate holds in fixed windows only", Parts(broker=_FixedWindow), "too fast"),
        "no-session-rate": Mutant("sessions have no rate", Parts(broker=_NoSessionRate), "too fast"),
        "never-free": Mutant("a session waits for ever for its rate", Parts(broker=_NeverFree), "not drained"),
        "old-tokens": Mutant("a token is used again", Parts(broker=_OldTokens), "token"),
    }
)
"""Bugs that must be found, by name."""
