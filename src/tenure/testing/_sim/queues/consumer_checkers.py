"""What must hold of every consumer in every run, whether of messages or of sessions, seen from outside.

=================  ====================================================================================================
``unsure start``   a handler began when its lock was not sure, or its consumer was not to take messages
``grace``          a handler was cancelled with less than ``grace`` left, though its process was awake
``max hold``       a handler ran for longer than ``max_hold`` and was not cancelled, or its message was kept on
``false alarm``    a handler was reported to run on when its lock had ended, and it had ended, or was not cancelled
``late result``    a verdict was passed on a message whose lock was known to be lost
``verdict``        a verdict differs from the handler's outcome, or its message was not held
``left behind``    a consumer forgot a message: it stopped, or rested, and never got the answer to a verdict
``after stop``     a consumer claimed messages or sessions while paused, or after its drain began
``machine``        a machine raised, or changed its state illegally
``user object``    an object of the user's broke its consumer: an error that can't be printed, a hook that raises
``interrupt``      a handler or a hook met Ctrl-C, and its consumer went on
``slot``           a handler has ended, and so has the time of its error hook, and its slot was not free again
``asleep``         a consumer that keeps locks had no moment to wake at
``busy``           a consumer woke, or asked for nothing, again and again
``not stopped``    a drain had not ended long after its last answer was due
=================  ====================================================================================================

:mod:`tenure.testing._sim.queues.checkers` and :mod:`tenure.testing._sim.queues.session_checkers` add what they believe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tenure._queue.effects import (
    Accept,
    Accepted,
    CancelHandler,
    Claimed,
    LocksInput,
    PumpEffect,
    PumpInput,
    Receive,
    ReceiveSession,
    Settle,
)
from tenure._queue.lock_group import HAS_VERDICT, DeliveryKey, LockGroup
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.stopping import TRANSITIONS, State
from tenure._queue.verdicts import GIVE_BACK, Settlement, Verdict
from tenure.events import HandlerOverran
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.oracle import Oracle
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.queues.tracked import Stage, TrackedDelivery
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR

WAKES_MAX = 60
"""How often a consumer may wake or ask in vain within one ``retry_every``, beside what hints ask for.

Twice the number of deliveries meanwhile, at any consumer, is allowed as well: a message that becomes due wakes all
consumers, and one of them gets it.
"""


@dataclass(slots=True, eq=False)
class Pace:
    """How often a consumer did something within the present ``retry_every``."""

    since: float = -math.inf
    count: int = 0
    deliveries: int = 0


class ConsumerCheckers:
    """Watch the consumers of one kind in one run. Each method takes in one thing that happened.

    Args:
        findings: Where violations go.
        plan: The setting of the run.
        oracle: Has the end of the lock of each message.
    """

    def __init__(self, findings: Findings, plan: Plan, oracle: Oracle) -> None:
        self.world = findings.world
        self.plan = plan
        self.timing = plan.timing
        self.oracle = oracle
        self.violated = findings.violated
        self._paces: dict[Consumer, Pace] = {}

    # --- written by each kind ---

    def believes_in(self, consumer: Consumer, tracked: TrackedDelivery) -> float:
        """Return up to which true moment *consumer* believes in the lock of *tracked*; minus infinity if not now."""
        raise NotImplementedError

    def is_over(self, consumer: Consumer, tracked: TrackedDelivery) -> bool:
        """Return whether a resting consumer is right to do no more about *tracked*."""
        raise NotImplementedError

    # --- handlers ---

    def began(self, consumer: Consumer, delivery: Delivery) -> None:
        """A handler begins with *delivery*."""
        tracked = consumer.tracked.find(delivery)
        if tracked is None or tracked.stage is not Stage.WAITING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id}, which did not wait")
            return
        if self.believes_in(consumer, tracked) <= self.world.now - BLUR:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when its lock was not sure")
        if consumer.pump.state is not State.RUNNING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when it was to take nothing")
        tracked.stage, tracked.began = Stage.RUNNING, consumer.now()

    def told_to_stop(self, consumer: Consumer, held: Delivery | SessionLock, why: str) -> None:
        """The locks say that *held* is over, or that its handler is to stop."""
        tracked = consumer.tracked.find(held) if isinstance(held, Delivery) else None
        if tracked is None:
            return
        group = consumer.lock_groups.get(held.token)
        until = group.trusted_until if group is not None else -math.inf
        left = until - consumer.now()
        is_running = tracked.stage is not Stage.KEPT  # else no handler is to stop, and it is let go at once
        if why == "unanswered" and is_running and not consumer.overslept() and left < self.timing.grace - BLUR:
            self.violated("grace", f"{consumer.name} gave the handler of {tracked.delivery.id} {left:.3f} s to stop")
        # It is trusted no longer than when first cancelled, and not at all once the broker has said no: the answer with
        # the no may have prolonged the trust in the rest of its group.
        earlier = math.inf if tracked.cancelled_until is None else tracked.cancelled_until
        tracked.cancelled_until = -math.inf if why == "denied" else min(earlier, until)

    def kept(self, consumer: Consumer) -> None:
        """The locks of *consumer* have done what there was to do."""
        now, max_hold = consumer.now(), consumer.settings.max_hold
        if consumer.locks.wake_at > now + self.timing.renew_every + BLUR:
            self.violated("asleep", f"{consumer.name} wakes at {consumer.locks.wake_at:.3f}, it is {now:.3f}")
        for work in consumer.works.values():
            tracked = consumer.tracked.find(work.delivery)
            if tracked is None or tracked.stage is not Stage.RUNNING or tracked.cancelled_until is not None:
                continue
            group = consumer.lock_groups.get(work.delivery.token)
            left = group.trusted_until - now if group is not None else 0.0
            if left < self.timing.grace - BLUR:
                self.violated("grace", f"{consumer.name} lets {work.delivery.id} run with {left:.3f} s left")
            if now > tracked.began + max_hold + BLUR:
                self.violated("max hold", f"{consumer.name} has let {work.delivery.id} run for too long")
        for group in consumer.lock_groups.values():
            for sequence in group.kept:
                held = group.running.get(sequence)
                tracked = consumer.tracked.find(held[0]) if held is not None and held[1] != HAS_VERDICT else None
                # Once it is in "ended", it is renewed no more, and the pump lets go of it when its loop is free.
                if tracked is None or tracked.stage is not Stage.KEPT or DeliveryKey(tracked.delivery) in group.ended:
                    continue
                if now > tracked.began + max_hold + BLUR:
                    self.violated(
                        "max hold", f"{consumer.name} holds {tracked.delivery.id} on, which was kept too long"
                    )

    def ends(self, consumer: Consumer, delivery: Delivery, verdict: Verdict | None, *, is_kept: bool) -> None:
        """The handler of *delivery* has ended, and *verdict* is what follows from how."""
        tracked = consumer.tracked.find(delivery)
        if tracked is None or tracked.stage is not Stage.RUNNING:
            return
        tracked.stage, tracked.verdict = Stage.KEPT if is_kept else Stage.ENDED, verdict
        if tracked.is_settled:
            consumer.tracked.drop(delivery)
        elif tracked.is_denied and not is_kept:  # an answer to what its handler asked the broker is waited for no more
            tracked.stage = Stage.LOST

    def left(self, consumer: Consumer, delivery: Delivery) -> None:
        """The handler of *delivery* has not stopped in time: it runs on, and is waited for no more."""

    def overran(self, consumer: Consumer, event: HandlerOverran) -> None:
        """The observers get an event that a handler runs on."""
        for work in consumer.works.values():
            delivery = work.delivery
            if (delivery.sequence, delivery.delivery_count) == (event.sequence, event.delivery_count):
                tracked = consumer.tracked.find(delivery)
                if tracked is not None and tracked.cancelled_until is None:
                    what = f"{consumer.name} reports that the handler of {delivery.id} runs on, and did not cancel it"
                    self.violated("false alarm", what)
                return
        what = f"{consumer.name} reports that the handler of {event.id} runs on, and none does"
        self.violated("false alarm", what)

    def broken(self, consumer: Consumer, error: BaseException) -> None:
        """An object of the user's has raised *error*, and it was not caught."""
        self.violated("user object", f"{consumer.name} was broken by {type(error).__name__}")

    def interrupted(self, consumer: Consumer) -> None:
        """*consumer* was met by Ctrl-C and has had the chance to end."""
        if consumer.running and not consumer.draining:
            self.violated("interrupt", f"{consumer.name} goes on after Ctrl-C")

    def has_slots(self, consumer: Consumer) -> None:
        """All has had its time: every handler of *consumer* that has ended has left its slot."""
        lost = [work.delivery.id for work in consumer.works.values() if work.ended]
        if lost and not consumer.blocked:
            self.violated("slot", f"{consumer.name} has lost {len(lost)} slots, of {', '.join(lost)}")

    # --- verdicts ---

    def passes(self, consumer: Consumer, settlements: Sequence[Settlement]) -> None:
        """*consumer* passes verdicts, for the first time or again."""
        for delivery, verdict in settlements:
            tracked = consumer.tracked.find(delivery)
            if tracked is None:
                self.violated("verdict", f"{consumer.name} passes {verdict} on {delivery.id}, which is not held")
                continue
            is_right = True
            match tracked.stage:
                case Stage.LOST if verdict is not GIVE_BACK:  # that changes nothing, if it was decided before
                    self.violated(
                        "late result", f"{consumer.name} judges {delivery.id}, whose lock is known to be lost"
                    )
                case Stage.LOST:
                    pass
                case Stage.WAITING:
                    is_right = verdict is GIVE_BACK
                case Stage.RUNNING:
                    is_right = False
                case Stage.KEPT:
                    is_right = verdict is GIVE_BACK and consumer.pump.state in (State.DRAINING, State.TIMED_OUT)
                case Stage.ENDED | Stage.PASSED:
                    is_right = verdict is tracked.verdict
            if not is_right:
                said = f"{consumer.name} passes {verdict} on {delivery.id}"
                self.violated("verdict", f"{said}, which is {tracked.stage.value}")
            tracked.stage, tracked.verdict = Stage.PASSED, verdict

    def answered(self, consumer: Consumer, settlements: Sequence[Settlement], answers: Sequence[object]) -> None:
        """*consumer* has got the answers to verdicts."""
        for settlement in settlements:
            consumer.tracked.drop(settlement.delivery)

    def settled(self, consumer: Consumer, settlements: Sequence[Settlement], answers: Sequence[object]) -> None:
        """A handler has got the answers to verdicts that it has passed by itself."""
        self.answered(consumer, settlements, answers)

    # --- the pump ---

    def decided(self, consumer: Consumer, event: PumpInput, was: State, effects: Sequence[PumpEffect]) -> None:
        """The pump of *consumer* has taken in *event*."""
        state = consumer.pump.state
        if state is not was and state not in TRANSITIONS[was] | {State.STOPPED, State.TIMED_OUT}:
            self.violated("machine", f"{consumer.name} went from {was.value} to {state.value} on {event}")
        for effect in effects:
            match effect:
                case Settle(_, settlements):
                    self.passes(consumer, settlements)
                case CancelHandler(delivery, "denied") if (tracked := consumer.tracked.find(delivery)) is not None:
                    tracked.stage = Stage.LOST
                case Receive() | Accept() | ReceiveSession() if state is not State.RUNNING:
                    self.violated("after stop", f"{consumer.name} claims while it is {state.value}")
        if state is not State.RUNNING:
            self._keeps_nothing(consumer)
        is_nothing = isinstance(event, Claimed) and not event.deliveries
        if is_nothing or (isinstance(event, Accepted) and event.session is None):
            self.woke(consumer)

    def _keeps_nothing(self, consumer: Consumer) -> None:
        now = consumer.now()
        # What is due for renewal is the locks' to give back.
        if any(group.waiting and now < group.renew_at for group in consumer.lock_groups.values()):
            self.violated("left behind", f"{consumer.name} takes nothing, and keeps what waits")

    def raised(self, consumer: Consumer, event: PumpInput | LocksInput, error: Exception) -> None:
        """A machine has raised."""
        self.violated("machine", f"{consumer.name} raised {error!r} on {event}")

    def stopped(self, consumer: Consumer) -> None:
        """The pump of *consumer* says that nothing is under way any more."""
        if consumer.works:
            self.violated("left behind", f"{consumer.name} stopped while {len(consumer.works)} handlers ran")
        self._has_nothing_left(consumer)

    # --- rest ---

    def rests(self, consumer: Consumer) -> None:
        """All is drained and answered, so *consumer* should have nothing left."""
        self._has_nothing_left(consumer)

    def _has_nothing_left(self, consumer: Consumer) -> None:
        for tracked in consumer.tracked:
            if not self.is_over(consumer, tracked):
                self.violated("left behind", f"{consumer.name} left {tracked.delivery.id} {tracked.stage.value}")

    def not_stopped(self, consumer: Consumer) -> None:
        """The drain of *consumer* has had its time, and has not ended."""
        what = f"{consumer.name} is {consumer.pump.state.value} and holds {len(consumer.lock_groups)} lock groups"
        self.violated("not stopped", what)

    def _pace(self, consumer: Consumer) -> Pace:
        pace = self._paces.setdefault(consumer, Pace())
        if self.world.now - pace.since > self.timing.retry_every:
            pace.since, pace.count, pace.deliveries = self.world.now, 0, self.oracle.deliveries
        return pace

    def hinted(self, consumer: Consumer) -> None:
        """*consumer* may ask once more: there was a hint."""
        self._pace(consumer).count -= 1

    def woke(self, consumer: Consumer) -> None:
        """*consumer* has woken by itself, or asked in vain."""
        pace = self._pace(consumer)
        pace.count += 1
        if pace.count > WAKES_MAX + 2 * (self.oracle.deliveries - pace.deliveries):
            self.violated("busy", f"{consumer.name} woke {pace.count} times within {self.timing.retry_every:g} s")
            consumer.die("ends, as it would never rest")


def is_in(group: LockGroup | None, delivery: Delivery) -> bool:
    """Return whether *delivery* waits in *group*, or was taken from there and has no verdict."""
    if group is None:
        return False
    taken = group.running.get(delivery.sequence)
    return taken[1] != HAS_VERDICT if taken is not None else any(one is delivery for one in group.waiting)
