"""What must hold of consumers of sessions in every run, seen from outside; the broker is checked in the oracles.

=================  ====================================================================================================
``two owners``     two consumers believed at one true moment that they hold the lock of one session
``outlives lock``  a consumer believed in a session that the broker had given away, or would sooner
``trust``          a belief is longer than the question allows that it came from
``overlap``        a handler began before the message before its own was settled, or while another ran in its session
``not cancelled``  a session was over, and the handler that ran in it had not been cancelled
``late release``   a session was released while its handler ran
``left behind``    a consumer held a session, although nothing waited in it any more
=================  ====================================================================================================

And what :mod:`tenure.testing._sim.queues.consumer_checkers` demands of every consumer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenure._queue.effects import PumpEffect, PumpInput, Release
from tenure._queue.lock_group import LockGroup
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.stopping import State
from tenure._queue.verdicts import Lapsed, Renewed, Settlement
from tenure.testing._sim.client import Pending
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.consumer_checkers import ConsumerCheckers, is_in
from tenure.testing._sim.queues.oracle import Oracle
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.queues.session_oracle import SessionOracle
from tenure.testing._sim.queues.tracked import Stage, TrackedDelivery
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR


@dataclass(slots=True, eq=False)
class TrackedSession:
    """A session at its consumer, seen from outside."""

    lock: SessionLock
    group: LockGroup
    trusted: float
    """Until when its lock may be believed, by the consumer's clock: as the answers so far allow."""
    cancelled_until: float | None = None
    """Until when its lock was believed when its handlers were cancelled; None before."""
    is_left: bool = False
    """Whether a handler runs on in it that is not waited for."""


class SessionCheckers(ConsumerCheckers):
    """Watch the consumers of sessions in one run.

    Args:
        findings: Where violations go.
        plan: The setting of the run.
        oracle: Has the end of the lock of each message.
        sessions: The same, for sessions.
    """

    def __init__(self, findings: Findings, plan: Plan, oracle: Oracle, sessions: SessionOracle) -> None:
        super().__init__(findings, plan, oracle)
        self._oracle = sessions
        self._sessions: dict[Consumer, dict[Token, TrackedSession]] = {}
        self._believers: dict[str, list[tuple[Consumer, TrackedSession]]] = {}

    def _find(self, consumer: Consumer, token: Token) -> TrackedSession | None:
        return self._sessions.get(consumer, {}).get(token)

    # --- belief ---

    def believes_in(self, consumer: Consumer, tracked: TrackedDelivery) -> float:
        """Return up to which true moment *consumer* believes in the session of *tracked*; minus infinity if not now."""
        session = self._find(consumer, tracked.delivery.token)
        return self._believes(consumer, session) if session is not None else -math.inf

    def _believes(self, consumer: Consumer, session: TrackedSession) -> float:
        if not consumer.running or not _is_held(consumer, session):
            return -math.inf
        until = session.group.trusted_until
        return consumer.clock.moment(until if session.cancelled_until is None else min(until, session.cancelled_until))

    def took_in(self, consumer: Consumer, asked: Pending, token: Token) -> None:
        """*consumer* has taken in the lock of a session, or a message of it."""
        group = consumer.lock_groups.get(token)
        if group is None or group.session is None or self._find(consumer, token) is not None:
            return
        session = TrackedSession(group.session, group, asked.at + self.timing.window)
        self._sessions.setdefault(consumer, {})[token] = session
        self._sure(consumer, session)

    def before_renewed(
        self, consumer: Consumer, held: Sequence[Delivery | SessionLock], answers: Sequence[object]
    ) -> None:
        """*consumer* is about to take in the answer to a renewal."""
        for one, answer in zip(held, answers, strict=True):
            for tracked in consumer.tracked.under(one.token) if isinstance(answer, Lapsed) else ():
                tracked.is_denied = True
                if tracked.stage in (Stage.WAITING, Stage.RUNNING, Stage.KEPT):
                    tracked.stage = Stage.LOST

    def renewed(self, consumer: Consumer, asked: Pending, answers: Sequence[object]) -> None:
        """*consumer* has taken in the *answers* to a renewal; none if there was no answer."""
        for one, answer in zip(asked.question.held, answers, strict=bool(answers)):
            session = self._find(consumer, one.token)
            if session is not None:
                if isinstance(answer, Renewed):
                    session.trusted = max(session.trusted, asked.at + self.timing.window)
                self._sure(consumer, session)

    def _sure(self, consumer: Consumer, session: TrackedSession) -> None:
        now, until, name = self.world.now, self._believes(consumer, session), session.lock.session
        if until <= now + BLUR:
            return
        over = until - consumer.clock.moment(session.trusted)
        if over > BLUR:
            self.violated("trust", f"{consumer.name} believes in {name} for {over:.3f} s more than it may")
        locked = self._oracle.locked_until(session.lock)
        if locked < until - BLUR:
            self.violated("outlives lock", f"{consumer.name} believes in {name} {until - locked:.3f} s too long")
        known = self._believers.get(name, ())
        others = [(one, held) for one, held in known if held is not session and self._believes(one, held) > now + BLUR]
        for other, _ in others:
            self.violated("two owners", f"{consumer.name} is sure of {name}, and {other.name} is, too")
        self._believers[name] = [*others, (consumer, session)]

    def locked(self, consumer: Consumer, held: Sequence[Any]) -> None:
        """The broker has locked these for *consumer*: look again when the locks end."""
        for one in held:
            end = self._oracle.locked_until(one) if isinstance(one, SessionLock) else -math.inf
            if end > self.world.now:
                self.world.at(end, self._lock_ends, consumer, one)

    def _lock_ends(self, consumer: Consumer, held: SessionLock) -> None:
        if not consumer.running or consumer.paused or consumer.blocked:
            return
        if self._oracle.locked_until(held) > self.world.now + BLUR:
            return
        for work in consumer.works.values():
            if work.delivery.token == held.token and work.why is None and not work.ended:
                self.violated("not cancelled", f"{held.session} is over, and {consumer.name} works on in it")

    # --- handlers ---

    def began(self, consumer: Consumer, delivery: Delivery) -> None:
        """A handler begins with *delivery*."""
        super().began(consumer, delivery)
        for entry in self._oracle.earlier(delivery):
            if entry.token == delivery.token:
                what = f"{consumer.name} began with {delivery.id} before {entry.sent.label} was settled"
                self.violated("overlap", what)
        for work in consumer.works.values():
            is_running = work.why is None and not work.ended  # else only its error hook still runs
            if work.delivery.session == delivery.session and work.delivery is not delivery and is_running:
                self.violated("overlap", f"{consumer.name} handles {work.delivery.id} beside {delivery.id}")

    def told_to_stop(self, consumer: Consumer, held: Delivery | SessionLock, why: str) -> None:
        """The locks say that a session is over, or that the handler of one message in it is to stop."""
        super().told_to_stop(consumer, held, why)
        session = self._find(consumer, held.token) if isinstance(held, SessionLock) else None
        if session is not None:
            session.cancelled_until = session.group.trusted_until

    def left(self, consumer: Consumer, delivery: Delivery) -> None:
        """The handler of *delivery* has not stopped in time: it runs on, and is waited for no more."""
        if (session := self._find(consumer, delivery.token)) is not None:
            session.is_left = True

    def settled(self, consumer: Consumer, settlements: Sequence[Settlement], answers: Sequence[object]) -> None:
        """A handler has got the answers to verdicts that it has passed by itself. While it runs, it is watched."""
        for settlement in settlements:
            tracked = consumer.tracked.find(settlement.delivery)
            if tracked is not None and tracked.stage is Stage.RUNNING:
                tracked.is_settled = True
            else:
                consumer.tracked.drop(settlement.delivery)

    # --- the pump ---

    def decided(self, consumer: Consumer, event: PumpInput, was: State, effects: Sequence[PumpEffect]) -> None:
        """The pump of *consumer* has taken in *event*."""
        super().decided(consumer, event, was, effects)
        for effect in effects:
            if isinstance(effect, Release):
                self._releases(consumer, effect.session)

    def _releases(self, consumer: Consumer, lock: SessionLock) -> None:
        session = self._find(consumer, lock.token)
        is_running = any(work.delivery.token == lock.token for work in consumer.works.values())
        if is_running or (session is not None and session.is_left):
            self.violated("late release", f"{consumer.name} releases {lock.session} while a handler runs in it")

    # --- rest ---

    def is_over(self, consumer: Consumer, tracked: TrackedDelivery) -> bool:
        """Return whether a resting consumer is right to do no more about *tracked*."""
        session = self._find(consumer, tracked.delivery.token)
        match tracked.stage:
            case Stage.LOST:
                return True
            case Stage.WAITING:  # it is given back with its session
                return session is None or not _is_held(consumer, session)
            case Stage.KEPT:
                return not is_in(consumer.lock_groups.get(tracked.delivery.token), tracked.delivery)
            case Stage.ENDED:
                return tracked.verdict is None or session is None or session.cancelled_until is not None
        return False

    def rests(self, consumer: Consumer) -> None:
        """All is drained and answered, so *consumer* should hold no session."""
        super().rests(consumer)
        for session in self._sessions.get(consumer, {}).values():
            if _is_held(consumer, session) and not session.is_left:
                self.violated("left behind", f"{consumer.name} holds {session.lock.session}, which is empty")


def _is_held(consumer: Consumer, session: TrackedSession) -> bool:
    return consumer.lock_groups.get(session.group.token) is session.group
