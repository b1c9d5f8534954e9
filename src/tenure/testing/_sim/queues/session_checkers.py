"""What must hold of consumers of sessions in every run, seen from outside; the broker is checked in the oracles.

=================  ====================================================================================================
``two owners``     two consumers believed at one true moment that they hold the lock of one session
``outlives lock``  a consumer believed in a session that the broker had given away, or would sooner
``trust``          a belief is longer than the question allows that it came from
``unsure start``   a handler began when its session was not sure
``overlap``        a handler began before the message before its own was settled, or while another ran in its session
``not cancelled``  a session was over, and the handler that ran in it had not been told to stop
``grace``          a handler was told to stop with less than ``grace`` left, though its process was awake
``late result``    a verdict was passed in a session that was known to be lost
``late release``   a session was released while its handler ran
``left behind``    a consumer held a session, although nothing waited in it any more
``machine``        a machine raised
``not stopped``    a consumer that was told to drain had still not, long after its last answer was due
=================  ====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tenure._queue.effects import LocksInput, PumpInput
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.pump import State
from tenure._queue.verdicts import Renewed, Settlement
from tenure.testing._sim.client import Pending
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.queues.session_consumer import HeldSession, SessionConsumer
from tenure.testing._sim.queues.session_oracle import SessionOracle
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR


class SessionCheckers:
    """Watch the consumers of sessions in one run.

    Args:
        findings: Where violations go.
        plan: The setting of the run.
        oracle: Knows until when the broker has locked a session.
    """

    def __init__(self, findings: Findings, plan: Plan, oracle: SessionOracle) -> None:
        self.world = findings.world
        self.timing = plan.timing
        self.oracle = oracle
        self._violated = findings.violated
        self._passed: set[tuple[Any, int, int]] = set()
        self._believers: dict[str, list[tuple[SessionConsumer, HeldSession]]] = {}

    # --- belief ---

    def believes(self, consumer: SessionConsumer, session: HeldSession) -> float:
        """Return up to which true moment *consumer* believes in the lock of *session*."""
        group = session.group
        if not consumer.running or consumer.lock_groups.get(group.token) is not group:
            return -math.inf
        until = group.sure_until
        return consumer.clock.moment(until if session.cancelled_until is None else min(until, session.cancelled_until))

    def accepted(self, consumer: SessionConsumer, session: HeldSession) -> None:
        """*consumer* has taken in the lock of a session."""
        self._sure(consumer, session)

    def renewed(self, consumer: SessionConsumer, asked: Pending, answers: Sequence[object]) -> None:
        """*consumer* has taken in the *answers* to a renewal; none if there was no answer."""
        for one, answer in zip(asked.question.held, answers, strict=bool(answers)):
            session = consumer.sessions.get(one.token)
            if session is not None:
                if isinstance(answer, Renewed):
                    session.trusted = max(session.trusted, asked.at + self.timing.window)
                self._sure(consumer, session)

    def _sure(self, consumer: SessionConsumer, session: HeldSession) -> None:
        now, until, name = self.world.now, self.believes(consumer, session), session.lock.session
        if until <= now + BLUR:
            return
        over = until - consumer.clock.moment(session.trusted)
        if over > BLUR:
            self._violated("trust", f"{consumer.name} believes in {name} for {over:.3f} s more than it may")
        locked = self.oracle.locked_until(session.lock)
        if locked < until - BLUR:
            self._violated("outlives lock", f"{consumer.name} believes in {name} {until - locked:.3f} s too long")
        known = self._believers.get(name, ())
        others = [(one, held) for one, held in known if held is not session and self.believes(one, held) > now + BLUR]
        for other, _ in others:
            self._violated("two owners", f"{consumer.name} is sure of {name}, and {other.name} is, too")
        self._believers[name] = [*others, (consumer, session)]

    def locked(self, consumer: SessionConsumer, held: Sequence[Any]) -> None:
        """The broker has locked these for *consumer*: look again when the locks end."""
        for one in held:
            end = self.oracle.locked_until(one) if isinstance(one, SessionLock) else -math.inf
            if end > self.world.now:
                self.world.at(end, self._lock_ends, consumer, one)

    def _lock_ends(self, consumer: SessionConsumer, held: SessionLock) -> None:
        if not consumer.running or consumer.paused or consumer.blocked:
            return
        if self.oracle.locked_until(held) > self.world.now + BLUR:
            return
        for work in consumer.works.values():
            if work.delivery.token == held.token and work.why is None:
                self._violated("not cancelled", f"{held.session} is over, and {consumer.name} works on in it")

    # --- handlers ---

    def began(self, consumer: SessionConsumer, delivery: Delivery) -> None:
        """A handler has begun with *delivery*."""
        session = consumer.sessions.get(delivery.token)
        if session is None or self.believes(consumer, session) <= self.world.now - BLUR:
            self._violated("unsure start", f"{consumer.name} began with {delivery.id} when its session was not sure")
        if consumer.pump.state is not State.RUNNING:
            self._violated("unsure start", f"{consumer.name} began with {delivery.id} when it was to take nothing")
        for entry in self.oracle.earlier(delivery):
            if entry.token == delivery.token:
                what = f"{consumer.name} began with {delivery.id} before {entry.sent.label} was settled"
                self._violated("overlap", what)
        for work in consumer.works.values():
            if work.delivery.session == delivery.session and work.delivery is not delivery and work.why is None:
                self._violated("overlap", f"{consumer.name} handles {work.delivery.id} beside {delivery.id}")

    def told_to_stop(self, consumer: SessionConsumer, held: Any, why: str) -> None:
        """The locks say that a session is over, or that the handler of one message in it is to stop."""
        session = consumer.sessions.get(held.token)
        if session is None:
            return
        until = session.group.sure_until
        left = until - consumer.now()
        is_running = any(work.delivery.token == held.token for work in consumer.works.values())
        if why == "unanswered" and is_running and not consumer.overslept() and left < self.timing.grace - BLUR:
            self._violated("grace", f"{consumer.name} gave the handler in {session.lock.session} {left:.3f} s to stop")
        if isinstance(held, SessionLock):
            session.cancelled_until = until

    def kept(self, consumer: SessionConsumer) -> None:
        """The locks of *consumer* have done what there was to do."""
        now = consumer.now()
        for work in consumer.works.values():
            session = consumer.sessions.get(work.delivery.token)
            if session is None or session.cancelled_until is not None:
                continue
            left = session.group.sure_until - now
            if left < self.timing.grace - BLUR and consumer.lock_groups.get(session.group.token) is session.group:
                self._violated("grace", f"{consumer.name} lets {work.delivery.id} run with {left:.3f} s left")

    def passes(self, consumer: SessionConsumer, settlements: Sequence[Settlement]) -> None:
        """*consumer* passes verdicts, for the first time or again."""
        for delivery, _ in settlements:
            session = consumer.sessions.get(delivery.token)
            key = delivery.token, delivery.sequence, delivery.delivery_count
            if session is not None and session.is_denied and key not in self._passed:
                self._violated("late result", f"{consumer.name} judges {delivery.id}, whose session it knows lost")
            self._passed.add(key)

    def releases(self, consumer: SessionConsumer, lock: SessionLock) -> None:
        """*consumer* releases a session."""
        session = consumer.sessions.get(lock.token)
        is_running = any(work.delivery.token == lock.token for work in consumer.works.values())
        if is_running or (session is not None and session.is_left):
            self._violated("late release", f"{consumer.name} releases {lock.session} while a handler runs in it")

    # --- rest ---

    def raised(self, consumer: SessionConsumer, event: PumpInput | LocksInput, error: Exception) -> None:
        """A machine has raised."""
        self._violated("machine", f"{consumer.name} raised {error!r} on {event}")

    def stopped(self, consumer: SessionConsumer) -> None:
        """The pump of *consumer* says that nothing is under way any more."""
        if consumer.works:
            self._violated("left behind", f"{consumer.name} stopped while {len(consumer.works)} handlers ran")

    def rests(self, consumer: SessionConsumer) -> None:
        """All is drained and answered, so *consumer* should hold no session."""
        for session in consumer.sessions.values():
            if consumer.lock_groups.get(session.group.token) is session.group and not session.is_left:
                self._violated("left behind", f"{consumer.name} holds {session.lock.session}, which is empty")

    def not_stopped(self, consumer: SessionConsumer) -> None:
        """*consumer* was told to drain, has had its time, and still waits."""
        what = f"{consumer.name} is {consumer.pump.state.value} and holds {len(consumer.lock_groups)} sessions"
        self._violated("not stopped", what)
