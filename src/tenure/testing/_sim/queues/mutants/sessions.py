"""Planted bugs in sessions: in the broker, and in the consumer that works on them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tenure._backends.memory.messages import LockGroup as StoredGroup
from tenure._backends.memory.messages import MessageState, Session, StoredMessage, Subqueue
from tenure._queue.broker import NoSession
from tenure._queue.claiming import ClaimTimes
from tenure._queue.delivery_ends import Ending, Outcome
from tenure._queue.effects import Accepted, Claimed, PumpEffect
from tenure._queue.lock_group import NEVER, LossReason
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.pump import Pump
from tenure._queue.session_pump import HeldSession, SessionPump
from tenure._queue.stopping import State
from tenure._queue.verdicts import COMPLETE, Abandon, Lapsed, Settled, Settlement, Verdict
from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.queues.broker import QUEUE, SimulatedBroker
from tenure.testing._sim.queues.parts import Parts

# --- in the broker: owners -------------------------------------------------------------------------------------------


class _EndsSessionsEarly(SimulatedBroker):
    """Gives a session away a quarter of a lock before its lock ends."""

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        return await super().accept(queue, session, 0.75 * lock)


class _SessionNeverEnds(SimulatedBroker):
    """Waits for the release of a session, also when its owner is dead."""

    def _apply_due(self, subqueue: Subqueue, what: StoredMessage | Session | StoredGroup, now: float) -> None:
        if not isinstance(what, Session):
            super()._apply_due(subqueue, what, now)


class _TakesOldOwners(SimulatedBroker):
    """Compares no token of a session: an old owner may renew it, receive from it and release it."""

    def _session(self, held: SessionLock, now: float) -> Session | None:
        subqueue = self._subqueue(held.queue, now)
        session = subqueue.sessions.get(held.session) if subqueue else None
        return session if session is not None and session.token else None


class _OldOwnerSettles(SimulatedBroker):
    """Takes a verdict on a message of a session under any token, also when it is back in the queue."""

    def _locked(self, delivery: Delivery, now: float) -> tuple[Subqueue, StoredMessage] | None:
        subqueue = self._subqueue(delivery.queue, now)
        message = subqueue.messages.get(delivery.sequence) if subqueue else None
        if subqueue is not None and message is not None and message.session is not None:
            return (subqueue, message) if message.state is not MessageState.DELAYED else None
        return super()._locked(delivery, now)


class _HandsOutOfSessions(SimulatedBroker):
    """Hands out messages of sessions to consumers that ask for none."""

    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        if message.sequence % 7 == 0 and not subqueue.is_dead:
            message.session = None
        super()._schedule(subqueue, message, visible_at, now)


# --- in the broker: order --------------------------------------------------------------------------------------------


class _OvertakesAbandoned(SimulatedBroker):
    """Hands out what is behind a message that was abandoned with a delay."""

    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        super()._schedule(subqueue, message, visible_at, now)
        if message.session is not None and message.sequence in message.session.retrying:
            message.session.retrying.remove(message.sequence)
            subqueue.list_if_free(message.session)


class _OvertakesCrashed(SimulatedBroker):
    """Lets a message rest whose owner has crashed, and hands out what is behind it."""

    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        self._rests = 0.2 * self._run.plan.timing.ttl if message.session is not None else 0.0
        super()._lock_expired(subqueue, message, now)
        self._rests = 0.0
        if message.session is not None and message.sequence in message.session.retrying:
            message.session.retrying.remove(message.sequence)
            subqueue.list_if_free(message.session)

    _rests = 0.0

    def _schedule(self, subqueue: Subqueue, message: StoredMessage, visible_at: float, now: float) -> None:
        super()._schedule(subqueue, message, visible_at + self._rests, now)


# --- in the broker: what a session keeps -----------------------------------------------------------------------------


class _OldOwnerWrites(SimulatedBroker):
    """Stores the state of a session for each consumer that has had it."""

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        answer = await super().write_state(held, state)
        session = self._queue(QUEUE).live.sessions.get(held.session)
        if isinstance(answer, Lapsed) and session is not None:
            session.state = state
            return Settled()
        return answer


class _ForgetsState(SimulatedBroker):
    """Forgets the state of a session when it is released."""

    def _unlock_session(self, subqueue: Subqueue, session: Session) -> None:
        session.state = None
        super()._unlock_session(subqueue, session)


class _ReleaseCounts(SimulatedBroker):
    """Counts what goes back with its session as delivered."""

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        self._releases = True
        answer = await super().release(held)
        self._releases = False
        return answer

    _releases = False

    def _end(self, subqueue: Subqueue, message: StoredMessage, ending: Ending, now: float) -> Outcome:
        message.delivery_count += self._releases
        return super()._end(subqueue, message, ending, now)


class _ReleaseLoses(SimulatedBroker):
    """Leaves with its old owner what was not settled when a session is released."""

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        session = self._queue(QUEUE).live.sessions.get(held.session)
        if session is not None and session.token == held.token:
            session.locked.clear()
        return await super().release(held)


# --- in the consumer -------------------------------------------------------------------------------------------------


class _CountsSessionFromAnswer(SessionPump):
    def _accepted(self, event: Accepted, asked_at: float, now: float, effects: list[PumpEffect]) -> None:
        super()._accepted(event, now, now, effects)


class _IgnoresLostSession(SessionPump):
    """Goes on when its session is over."""

    def _lock_ended(self, held: Delivery | SessionLock, why: LossReason, at: float, effects: list[PumpEffect]) -> None:
        pass


class _ReceivesBeforeSettled(SessionPump):
    """Receives the next message when a verdict is passed, and not when it is answered."""

    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        passed = super().done(delivery, verdict)
        if (session := self._sessions.get(delivery.token)) is not None:
            session.group.running.pop(delivery.sequence, None)
            self._advance_if_idle(session)
        return passed


class _GoesOnUnanswered(SessionPump):
    """Receives again when a receive got no answer, and keeps the session."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        session = self._receiving.get(request_id)
        super()._unanswered(request_id, why, now, effects)
        if session is not None:
            session.must_release = False


class _ReleasesWhileRunning(SessionPump):
    """Releases the session of a handler that runs on."""

    def let_expire(self, delivery: Delivery) -> None:
        session = self._sessions.get(delivery.token)
        super().let_expire(delivery)
        if session is not None:
            self._to_release.append((session.lock, NEVER))


class _KeepsEmptySessions(SessionPump):
    """Keeps a session in which nothing waits."""

    def _received(self, session: HeldSession, event: Claimed, now: float, effects: list[PumpEffect]) -> None:
        if event.deliveries or self.state is not State.RUNNING:
            super()._received(session, event, now, effects)
        else:
            session.is_receiving = False


class _LeavesSettled(SessionPump):
    """Watches a handler no longer once it has settled its message by itself."""

    def settled(self, delivery: Delivery) -> bool:
        return Pump.settled(self, delivery)


class _ReceivesWhilePaused(SessionPump):
    """Goes on in the sessions that it has."""

    def _advance(self, session: HeldSession, now: float, effects: list[PumpEffect]) -> None:
        state, self.state = self.state, State.RUNNING
        super()._advance(session, now, effects)
        self.state = state


class _NoPause(ClaimTimes):
    def _pause(self, due_in: float | None) -> float:
        return 0.0


class _AcceptsWithoutPause(SessionPump):
    claim_times = _NoPause


class _CompletesFailuresInSessions(SessionPump):
    def done(self, delivery: Delivery, verdict: Verdict | None = COMPLETE) -> bool:
        return super().done(delivery, COMPLETE if isinstance(verdict, Abandon) else verdict)


class _ForgetsUnansweredInSessions(SessionPump):
    """Drops a verdict that got no answer."""

    def _unanswered(self, request_id: int, why: str, now: float, effects: list[PumpEffect]) -> None:
        for settlement in self._settling.answered(request_id) or ():
            group = self._groups.get(settlement.delivery.token)
            if group is not None:
                group.running.pop(settlement.delivery.sequence, None)
                self._close(group)
        super()._unanswered(request_id, why, now, effects)


class _RenewsNoSession(SimulatedBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        return super()._renew(one, until, now) if isinstance(one, Delivery) else None


class _PassesLateInSessions(SessionPump):
    """Passes the verdict of a handler whose session is known to be lost."""

    def pass_verdict(self, delivery: Delivery, verdict: Verdict) -> bool:
        if not super().pass_verdict(delivery, verdict) and delivery.token in self._groups:
            self._settling.add(Settlement(delivery, verdict))
        return True


def _broker(about: str, broker: type[SimulatedBroker], shows: str) -> Mutant[Parts]:
    return Mutant(about, Parts(broker=broker), shows)


def _pump(about: str, pump: type[SessionPump], shows: str) -> Mutant[Parts]:
    return Mutant(about, Parts(session_pump=pump), shows)


MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {
        "ends-sessions-early": _broker(
            "a session is given away before its lock ends", _EndsSessionsEarly, "two owners"
        ),
        "session-never-ends": _broker("the session of a dead owner never comes back", _SessionNeverEnds, "not drained"),
        "takes-old-owners": _broker("a session needs no token", _TakesOldOwners, "stale verb"),
        "old-owner-settles": _broker("an old owner settles in a session", _OldOwnerSettles, "stale verb"),
        "hands-out-of-sessions": _broker(
            "a message of a session is handed out by itself", _HandsOutOfSessions, "session"
        ),
        "overtakes-abandoned": _broker(
            "an abandoned message does not hold up those behind it", _OvertakesAbandoned, "order"
        ),
        "overtakes-crashed": _broker(
            "a message of a crashed owner does not hold up those behind it", _OvertakesCrashed, "order"
        ),
        "old-owner-writes": _broker("an old owner stores the state of a session", _OldOwnerWrites, "stale verb"),
        "forgets-state": _broker("the state of a session is lost when it is released", _ForgetsState, "state"),
        "release-counts": _broker("a release counts as a delivery", _ReleaseCounts, "count"),
        "release-loses": _broker("a release loses what is not settled", _ReleaseLoses, "not drained"),
        "session-counts-from-answer": _pump(
            "a session is counted from when the answer came", _CountsSessionFromAnswer, "outlives lock"
        ),
        "ignores-lost-session": _pump("a consumer works on in a lost session", _IgnoresLostSession, "not cancelled"),
        "receives-before-settled": _pump(
            "the next message is received before the one before is settled", _ReceivesBeforeSettled, "overlap"
        ),
        "goes-on-unanswered": _pump(
            "a session is kept although a receive in it had no answer", _GoesOnUnanswered, "overlap"
        ),
        "releases-while-running": _pump(
            "a session is released while its handler runs", _ReleasesWhileRunning, "late release"
        ),
        "keeps-empty-sessions": _pump("an empty session is kept", _KeepsEmptySessions, "left behind"),
        "leaves-settled": _pump("a handler that settles by itself is not watched on", _LeavesSettled, "max hold"),
        "receives-while-paused": _pump("a pause does not end sessions", _ReceivesWhilePaused, "after stop"),
        "accepts-without-pause": _pump("sessions are asked for in a loop", _AcceptsWithoutPause, "busy"),
        "session-completes-failures": _pump(
            "a failed message of a session is completed", _CompletesFailuresInSessions, "verdict"
        ),
        "session-forgets-unanswered": _pump(
            "a verdict in a session without an answer is dropped", _ForgetsUnansweredInSessions, "left behind"
        ),
        "session-passes-late-results": Mutant(
            "the result of a lost session is passed on",
            Parts(broker=_RenewsNoSession, session_pump=_PassesLateInSessions),  # so that enough sessions are lost
            "late result",
        ),
    }
)
"""Bugs that must be found, by name."""
