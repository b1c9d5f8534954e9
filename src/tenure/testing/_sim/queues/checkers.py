"""What must hold of consumers in every run, seen from outside; the broker is checked in the oracle.

=================  ====================================================================================================
``two sure``       two consumers believed at one true moment that they hold the lock of one message
``outlives lock``  a consumer believed in a lock that the broker had ended, or would end sooner
``trust``          a belief is longer than the question allows that it came from
``unsure start``   a handler began when its lock was not sure, or its consumer was not to take messages
``not cancelled``  a lock ended, and the handler that ran under it had not been cancelled
``grace``          a handler was told to stop with less than ``grace`` left, though its process was awake
``max hold``       a handler ran for longer than ``max_hold`` and was not told to stop, or its message was kept on
``false alarm``    a handler was said to run on when its lock had ended, and it had ended before
``ignored no``     a renewal said no, and the handler was not told to stop
``late result``    a verdict was passed on a message whose lock was known to be lost
``verdict``        a verdict differs from the handler's outcome, or its message was not held
``left behind``    a consumer forgot a message: it stopped, or rested, and never got the answer to a verdict
``after stop``     a consumer claimed messages while paused, or after it was told to drain
``machine``        a machine raised, or changed its state illegally
``user object``    an object of the user's broke its consumer: an error that can't be printed, a hook that raises
``interrupt``      a handler or a hook met Ctrl-C, and its consumer went on
``slot``           a handler has ended, and so has the time of its error hook, and its slot was not free again
``asleep``         a consumer that keeps locks had no moment to wake at
``busy``           a consumer woke, or asked for nothing, again and again
``not drained``    messages were still waiting, although the faults had been over for long enough
``not stopped``    a consumer that was told to drain had still not, long after its last answer was due
=================  ====================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenure._queue.effects import CancelHandler, Claimed, LocksInput, PumpEffect, PumpInput, Receive, Settle
from tenure._queue.lock_group import JUDGED, LockGroup
from tenure._queue.message import Delivery, Token
from tenure._queue.pump import TRANSITIONS, State
from tenure._queue.verdicts import GIVE_BACK, Lapsed, Renewed, Settlement, Verdict
from tenure.testing._sim.client import Pending
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.oracle import Oracle
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.queues.tracked import Stage, TrackedDelivery
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR, World

WAKES_MAX = 60
"""How often a consumer may wake or ask in vain within one ``retry_every``, beside what hints ask for.

Twice the number of deliveries meanwhile, at any consumer, is allowed as well: a message that becomes due wakes all
consumers, and one of them gets it.
"""

BELIEVED = (Stage.WAITING, Stage.RUNNING, Stage.KEPT)


@dataclass(slots=True, eq=False)
class Pace:
    """How often a consumer did something within the present ``retry_every``."""

    since: float = -math.inf
    count: int = 0
    deliveries: int = 0


class Checkers(Findings):
    """Watch one run. Each method takes in one thing that happened, and notes violations."""

    def __init__(self, world: World, plan: Plan, oracle: Oracle) -> None:
        super().__init__(world)
        self.plan = plan
        self.timing = plan.timing
        self.oracle = oracle
        self._believers: dict[int, list[tuple[Consumer, TrackedDelivery]]] = {}
        self._paces: dict[Consumer, Pace] = {}

    # --- belief ---

    def believes(self, consumer: Consumer, tracked: TrackedDelivery) -> float:
        """Return up to which true moment *consumer* believes in the lock of *tracked*."""
        group = consumer.lock_groups.get(tracked.delivery.token)
        if not consumer.running or group is None or tracked.stage not in BELIEVED:
            return -math.inf
        if tracked.stage is not Stage.RUNNING and not _is_in(group, tracked.delivery):
            return -math.inf  # it is about to be given back, or was let go
        sure = group.sure_until if tracked.cancelled_until is None else min(group.sure_until, tracked.cancelled_until)
        return consumer.clock.moment(sure)

    def claimed(self, consumer: Consumer, asked: Pending, token: Token) -> None:
        """*consumer* has taken in the deliveries under *token*, which it had *asked* for."""
        for tracked in consumer.tracked[token].values():
            tracked.trusted = asked.at + self.timing.window
        self._sure(consumer, token)

    def renewed(self, consumer: Consumer, asked: Pending, answers: Sequence[object]) -> None:
        """*consumer* has taken in the *answers* to a renewal; none if there was no answer."""
        held = asked.question.held
        for one, answer in zip(held, answers, strict=bool(answers)):
            tracked = consumer.find(one)
            if tracked is None:
                continue
            if isinstance(answer, Renewed):
                tracked.trusted = max(tracked.trusted, asked.at + self.timing.window)
            elif tracked.stage is Stage.LOST and tracked.cancelled_until is None:
                self.violated("ignored no", f"{consumer.name} goes on with {one.id}, whose lock is lost")
        for token in {one.token for one in held}:
            self._sure(consumer, token)

    def _sure(self, consumer: Consumer, token: Token) -> None:
        now = self.world.now
        for sequence, tracked in consumer.tracked.get(token, {}).items():
            until = self.believes(consumer, tracked)
            if until <= now + BLUR or tracked.is_settling:
                continue
            name = tracked.delivery.id
            over = until - consumer.clock.moment(tracked.trusted)
            if over > BLUR:
                self.violated("trust", f"{consumer.name} believes in {name} for {over:.3f} s more than it may")
            locked = self.oracle.locked_until(tracked.delivery)
            if locked < until - BLUR:
                self.violated("outlives lock", f"{consumer.name} believes in {name} {until - locked:.3f} s too long")
            known = self._believers.get(sequence, ())
            others = [
                (one, held) for one, held in known if held is not tracked and self.believes(one, held) > now + BLUR
            ]
            for other, _ in others:
                self.violated("two sure", f"{consumer.name} is sure of {name}, and {other.name} is, too")
            self._believers[sequence] = [*others, (consumer, tracked)]

    def locked(self, consumer: Any, held: Sequence[Any]) -> None:
        """The broker has locked these for *consumer*: see what goes on when the locks end."""
        ends = {self.oracle.locked_until(one) for one in held} if isinstance(consumer, Consumer) else ()
        for end in ends:
            if end > self.world.now:
                self.world.at(end, self._lock_ends, consumer, held)

    def _lock_ends(self, consumer: Consumer, held: Sequence[Delivery]) -> None:
        if not consumer.running or consumer.paused:
            return
        for one in held:
            tracked = consumer.find(one)
            if (
                tracked is None
                or tracked.stage is not Stage.RUNNING
                or tracked.cancelled_until is not None
                or tracked.is_settling
            ):
                continue
            if self.oracle.locked_until(one) <= self.world.now + BLUR:
                self.violated("not cancelled", f"the lock of {one.id} has ended, and {consumer.name} works on")

    # --- handlers ---

    def began(self, consumer: Consumer, delivery: Delivery) -> None:
        """A handler has begun with *delivery*."""
        tracked = consumer.find(delivery)
        if tracked is None or tracked.stage is not Stage.WAITING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id}, which did not wait")
            return
        if self.believes(consumer, tracked) <= self.world.now - BLUR:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when its lock was not sure")
        if consumer.pump.state is not State.RUNNING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when it was to take nothing")
        tracked.stage, tracked.began = Stage.RUNNING, consumer.now()

    def told_to_stop(self, consumer: Consumer, held: Any, why: str) -> None:
        """The handler of *held* is told to stop."""
        tracked, group = consumer.find(held), consumer.lock_groups.get(held.token)
        if tracked is None:
            return
        until = group.sure_until if group is not None else -math.inf
        left = until - consumer.now()
        is_running = tracked.stage is not Stage.KEPT  # else there is nobody to stop, and it is let go at once
        if why == "unanswered" and is_running and not consumer.overslept() and left < self.timing.grace - BLUR:
            self.violated("grace", f"{consumer.name} gave the handler of {held.id} {left:.3f} s to stop")
        tracked.cancelled_until = until

    def kept(self, consumer: Consumer) -> None:
        """The locks of *consumer* have done what there was to do."""
        now, settings = consumer.now(), self.plan.settings
        if consumer.locks.wake_at > now + self.timing.renew_every + BLUR:
            self.violated("asleep", f"{consumer.name} wakes at {consumer.locks.wake_at:.3f}, it is {now:.3f}")
        for work in consumer.works.values():
            tracked = consumer.find(work.delivery)
            if tracked is None or tracked.stage is not Stage.RUNNING or tracked.cancelled_until is not None:
                continue
            group = consumer.lock_groups.get(work.delivery.token)
            left = group.sure_until - now if group is not None else 0.0
            if left < self.timing.grace - BLUR:
                self.violated("grace", f"{consumer.name} lets {work.delivery.id} run with {left:.3f} s left")
            if now > tracked.began + settings.max_hold + BLUR:
                self.violated("max hold", f"{consumer.name} has let {work.delivery.id} run for too long")
        for token, group in consumer.lock_groups.items():
            for sequence in group.kept:
                tracked = consumer.tracked.get(token, {}).get(sequence)
                if tracked is None or tracked.stage is not Stage.KEPT or not _is_in(group, tracked.delivery):
                    continue
                if sequence in group.ended:
                    continue  # it is renewed no more, and the pump lets go of it when its loop is free
                if now > tracked.began + settings.max_hold + BLUR:
                    self.violated(
                        "max hold", f"{consumer.name} holds {tracked.delivery.id} on, which was kept too long"
                    )

    def ends(self, consumer: Consumer, delivery: Delivery, verdict: Verdict | None, *, is_kept: bool) -> None:
        """The handler of *delivery* has ended, and *verdict* is what follows from how."""
        tracked = consumer.find(delivery)
        if tracked is not None and tracked.stage is Stage.RUNNING:
            tracked.stage, tracked.verdict = Stage.KEPT if is_kept else Stage.ENDED, verdict
            if tracked.is_denied and not is_kept:  # nobody waits any more for what its handler asked the broker
                tracked.stage = Stage.LOST

    def overran(self, consumer: Consumer, sequence: int) -> None:
        """Observers are told that the handler of message *sequence* runs on."""
        if all(work.delivery.sequence != sequence for work in consumer.works.values()):
            self.violated("false alarm", f"{consumer.name} tells that the handler of {sequence} runs, and none does")

    def broken(self, consumer: Consumer, error: BaseException) -> None:
        """An object of the user's has raised *error*, and nobody has taken it."""
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
            tracked = consumer.find(delivery)
            if tracked is None:
                self.violated("verdict", f"{consumer.name} passes {verdict} on {delivery.id}, which is not held")
                continue
            is_right = True
            match tracked.stage:
                case Stage.LOST if verdict is not GIVE_BACK:  # that changes nothing, if it was decided before
                    self.violated("late result", f"{consumer.name} judges {delivery.id}, whose lock it knows lost")
                case Stage.LOST:
                    pass
                case Stage.WAITING:
                    is_right = verdict is GIVE_BACK
                case Stage.RUNNING:
                    is_right = False
                case Stage.KEPT:
                    is_right = verdict is GIVE_BACK and consumer.pump.state in (State.DRAINING, State.LEFT)
                case Stage.ENDED | Stage.PASSED:
                    is_right = verdict is tracked.verdict
            if not is_right:
                said = f"{consumer.name} passes {verdict} on {delivery.id}"
                self.violated("verdict", f"{said}, which is {tracked.stage.value}")
            tracked.stage, tracked.verdict = Stage.PASSED, verdict

    def answered(self, consumer: Consumer, settlements: Sequence[Settlement], answers: Sequence[object]) -> None:
        """*consumer* has got the answers to verdicts."""
        for settlement in settlements:
            held = consumer.tracked.get(settlement.delivery.token, {})
            held.pop(settlement.delivery.sequence, None)
            if not held:
                consumer.tracked.pop(settlement.delivery.token, None)

    def before_renewed(self, consumer: Consumer, held: Sequence[Any], answers: Sequence[object]) -> None:
        """*consumer* is about to take in the answer to a renewal."""
        for one, answer in zip(held, answers, strict=True):
            tracked = consumer.find(one)
            if not isinstance(answer, Lapsed) or tracked is None:
                continue
            tracked.is_denied = True
            if not tracked.is_asking and tracked.stage in (Stage.RUNNING, Stage.KEPT):
                tracked.stage = Stage.LOST  # else its own verdict may have ended the lock: the answer to that counts

    def rests(self, consumer: Consumer) -> None:
        """All is drained and answered, so *consumer* should have nothing left."""
        for held in consumer.tracked.values():
            for tracked in held.values():
                is_over = tracked.stage is Stage.LOST or (tracked.stage is Stage.ENDED and tracked.verdict is None)
                if tracked.stage is Stage.KEPT:
                    group = consumer.lock_groups.get(tracked.delivery.token)
                    is_over = group is None or not _is_in(group, tracked.delivery)
                elif tracked.stage is Stage.WAITING or (tracked.verdict is GIVE_BACK and not is_over):
                    is_over = consumer.now() >= tracked.trusted - BLUR  # it is given back while that makes sense
                if not is_over:
                    self.violated("left behind", f"{consumer.name} left {tracked.delivery.id} {tracked.stage.value}")

    # --- the pump ---

    def decided(self, consumer: Consumer, event: PumpInput, was: State, effects: Sequence[PumpEffect]) -> None:
        """The pump of *consumer* has taken in *event*."""
        state = consumer.pump.state
        if state is not was and state not in TRANSITIONS[was] | {State.STOPPED, State.LEFT}:
            self.violated("machine", f"{consumer.name} went from {was.value} to {state.value} on {event}")
        for effect in effects:
            match effect:
                case Settle(_, settlements):
                    self.passes(consumer, settlements)
                case CancelHandler(delivery, "denied") if (tracked := consumer.find(delivery)) is not None:
                    tracked.stage = Stage.LOST
                case Receive() if state is not State.RUNNING:
                    self.violated("after stop", f"{consumer.name} claims while it is {state.value}")
        if state is not State.RUNNING:
            self._keeps_nothing(consumer)
        if isinstance(event, Claimed) and not event.deliveries:
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
        self.rests(consumer)

    # --- rest ---

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

    def not_drained(self, left: str, bound: float) -> None:
        """There are messages left, *bound* seconds after the faults were over."""
        self.violated("not drained", f"{left}, {bound:.1f} s after the faults were over")

    def not_stopped(self, consumer: Consumer) -> None:
        """*consumer* was told to drain, has had its time, and still waits."""
        self.violated(
            "not stopped", f"{consumer.name} is {consumer.pump.state.value} and lock_groups {len(consumer.lock_groups)}"
        )


def _is_in(group: LockGroup, delivery: Delivery) -> bool:
    """Return whether *delivery* waits in *group*, or is just being taken from there."""
    taken = group.running.get(delivery.sequence)
    return taken[1] != JUDGED if taken is not None else any(one is delivery for one in group.waiting)
