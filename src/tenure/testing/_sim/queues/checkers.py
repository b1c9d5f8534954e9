"""What must hold of consumers in every run, looked at from outside and collected; the broker's side is in the book.

=================  ====================================================================================================
``two sure``       two consumers believed at one true moment that they hold the lock of one message
``outlives lock``  a consumer believed in a lock that the broker had ended, or would end sooner
``trust``          a belief is longer than the question allows that it came from
``unsure start``   a handler began when its lock was not sure, or its consumer was not to take messages
``untold``         a lock ended, and the handler that ran under it had not been told to stop
``grace``          a handler was told to stop with less than ``grace`` left, though its process was awake
``max hold``       a handler ran for longer than ``max_hold`` and was not told to stop, or its message was kept on
``false alarm``    a handler was said to run on when its lock had ended, and it had ended before
``ignored no``     a renewal said no, and the handler was not told to stop
``late result``    a verdict was passed on a message whose lock was known to be lost
``verdict``        a verdict was passed that is not what came of the handler, or on what was not in hand
``left behind``    a consumer forgot a message: it stopped, or rested, and never heard what became of a verdict
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
from typing import TYPE_CHECKING, Any

from tenure._queue.effects import Claimed, Effect, LocksInput, PumpInput, Receive, Settle
from tenure._queue.lock_group import JUDGED, LockGroup
from tenure._queue.message import GIVE_BACK, Delivery, Lapsed, Renewed, Settlement, Token, Verdict
from tenure._queue.pump import TRANSITIONS, State
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.held import Hand, Place
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR, World

if TYPE_CHECKING:
    from tenure.testing._sim.client import Asked
    from tenure.testing._sim.process import Process
    from tenure.testing._sim.queues.oracle import Book
    from tenure.testing._sim.queues.plan import Plan

WAKES_MAX = 60
"""How often a consumer may wake or ask in vain within one ``retry_every``, beside what hints ask for.

Also beside twice what was handed out meanwhile, by whomever: what becomes due wakes all, and one of them gets it.
"""

BELIEVED = (Place.WAITING, Place.RUNNING, Place.KEPT)


@dataclass(slots=True, eq=False)
class Pace:
    """How often a consumer did something within the present ``retry_every``."""

    since: float = -math.inf
    count: int = 0
    deliveries: int = 0


class Checkers(Findings):
    """Watch one run. Every method is told of something that happened, and notes what should not have."""

    def __init__(self, world: World, plan: Plan, book: Book) -> None:
        super().__init__(world)
        self.plan = plan
        self.timing = plan.timing
        self.book = book
        self._believers: dict[int, list[tuple[Consumer, Hand]]] = {}
        self._paces: dict[Consumer, Pace] = {}

    # --- belief ---

    def believes(self, consumer: Consumer, hand: Hand) -> float:
        """Return up to which true moment *consumer* believes in the lock of what is in *hand*."""
        hold = consumer.holds.get(hand.delivery.token)
        if not consumer.running or hold is None or hand.place not in BELIEVED:
            return -math.inf
        if hand.place is not Place.RUNNING and not _is_in(hold, hand.delivery):
            return -math.inf  # it is about to be given back, or was let go
        sure = hold.sure_until if hand.told_until is None else min(hold.sure_until, hand.told_until)
        return consumer.clock.moment(sure)

    def claimed(self, consumer: Consumer, asked: Asked, token: Token) -> None:
        """*consumer* has taken in the deliveries under *token*, which it had *asked* for."""
        for hand in consumer.hands[token].values():
            hand.trusted = asked.at + self.timing.window
        self._sure(consumer, token)

    def renewed(self, consumer: Consumer, asked: Asked, answers: Sequence[object]) -> None:
        """*consumer* has taken in the *answers* to a renewal; none if it heard nothing."""
        held = asked.question.held
        for one, answer in zip(held, answers, strict=bool(answers)):
            hand = consumer.hand(one)
            if hand is None:
                continue
            if isinstance(answer, Renewed):
                hand.trusted = max(hand.trusted, asked.at + self.timing.window)
            elif hand.place is Place.LOST and hand.told_until is None:
                self.violated("ignored no", f"{consumer.name} goes on with {one.id}, whose lock is lost")
        for token in {one.token for one in held}:
            self._sure(consumer, token)

    def _sure(self, consumer: Consumer, token: Token) -> None:
        now = self.world.now
        for sequence, hand in consumer.hands.get(token, {}).items():
            until = self.believes(consumer, hand)
            if until <= now + BLUR or hand.is_settling:
                continue
            name = hand.delivery.id
            over = until - consumer.clock.moment(hand.trusted)
            if over > BLUR:
                self.violated("trust", f"{consumer.name} believes in {name} for {over:.3f} s more than it may")
            locked = self.book.locked_until(hand.delivery)
            if locked < until - BLUR:
                self.violated("outlives lock", f"{consumer.name} believes in {name} {until - locked:.3f} s too long")
            known = self._believers.get(sequence, ())
            others = [(one, held) for one, held in known if held is not hand and self.believes(one, held) > now + BLUR]
            for other, _ in others:
                self.violated("two sure", f"{consumer.name} is sure of {name}, and {other.name} is, too")
            self._believers[sequence] = [*others, (consumer, hand)]

    def locked(self, process: Process, held: Sequence[Any]) -> None:
        """The broker has locked these for *process*: see what goes on when the locks end."""
        ends = {self.book.locked_until(one) for one in held} if isinstance(process, Consumer) else ()
        for end in ends:
            if end > self.world.now:
                self.world.at(end, self._lock_ends, process, held)

    def _lock_ends(self, consumer: Consumer, held: Sequence[Delivery]) -> None:
        if not consumer.running or consumer.paused:
            return
        for one in held:
            hand = consumer.hand(one)
            if hand is None or hand.place is not Place.RUNNING or hand.told_until is not None or hand.is_settling:
                continue
            if self.book.locked_until(one) <= self.world.now + BLUR:
                self.violated("untold", f"the lock of {one.id} has ended, and {consumer.name} works on")

    # --- handlers ---

    def began(self, consumer: Consumer, delivery: Delivery) -> None:
        """A handler has begun with *delivery*."""
        hand = consumer.hand(delivery)
        if hand is None or hand.place is not Place.WAITING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id}, which did not wait")
            return
        if self.believes(consumer, hand) <= self.world.now - BLUR:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when its lock was not sure")
        if consumer.pump.state is not State.RUNNING:
            self.violated("unsure start", f"{consumer.name} began with {delivery.id} when it was to take nothing")
        hand.place, hand.began = Place.RUNNING, consumer.now()

    def told_to_stop(self, consumer: Consumer, held: Any, why: str) -> None:
        """The handler of *held* is told to stop."""
        hand, hold = consumer.hand(held), consumer.holds.get(held.token)
        if hand is None:
            return
        until = hold.sure_until if hold is not None else -math.inf
        left = until - consumer.now()
        is_running = hand.place is not Place.KEPT  # else there is nobody to stop, and it is let go at once
        if why == "unanswered" and is_running and not consumer.overslept() and left < self.timing.grace - BLUR:
            self.violated("grace", f"{consumer.name} gave the handler of {held.id} {left:.3f} s to stop")
        hand.told_until = until

    def kept(self, consumer: Consumer) -> None:
        """The locks of *consumer* have done what there was to do."""
        now, settings = consumer.now(), self.plan.settings
        if consumer.locks.wake_at > now + self.timing.renew_every + BLUR:
            self.violated("asleep", f"{consumer.name} wakes at {consumer.locks.wake_at:.3f}, it is {now:.3f}")
        for work in consumer.works.values():
            hand = consumer.hand(work.delivery)
            if hand is None or hand.place is not Place.RUNNING or hand.told_until is not None:
                continue
            hold = consumer.holds.get(work.delivery.token)
            left = hold.sure_until - now if hold is not None else 0.0
            if left < self.timing.grace - BLUR:
                self.violated("grace", f"{consumer.name} lets {work.delivery.id} run with {left:.3f} s left")
            if now > hand.began + settings.max_hold + BLUR:
                self.violated("max hold", f"{consumer.name} has let {work.delivery.id} run for too long")
        for token, hold in consumer.holds.items():
            for sequence in hold.kept:
                hand = consumer.hands.get(token, {}).get(sequence)
                if hand is None or hand.place is not Place.KEPT or not _is_in(hold, hand.delivery):
                    continue
                if now > hand.began + settings.max_hold + BLUR:
                    self.violated("max hold", f"{consumer.name} holds {hand.delivery.id} on, which was kept too long")

    def ends(self, consumer: Consumer, delivery: Delivery, verdict: Verdict | None, *, is_kept: bool) -> None:
        """The handler of *delivery* has ended, and *verdict* is what follows from how."""
        hand = consumer.hand(delivery)
        if hand is not None and hand.place is Place.RUNNING:
            hand.place, hand.verdict = Place.KEPT if is_kept else Place.ENDED, verdict

    def overran(self, consumer: Consumer, sequence: int) -> None:
        """The ears are told that the handler of message *sequence* runs on."""
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
            hand = consumer.hand(delivery)
            if hand is None:
                self.violated("verdict", f"{consumer.name} passes {verdict} on {delivery.id}, which is not in hand")
                continue
            is_right = True
            match hand.place:
                case Place.LOST:
                    self.violated("late result", f"{consumer.name} judges {delivery.id}, whose lock it knows lost")
                case Place.WAITING:
                    is_right = verdict is GIVE_BACK
                case Place.RUNNING:
                    is_right = False
                case Place.KEPT:
                    is_right = verdict is GIVE_BACK and consumer.pump.state is State.DRAINING
                case Place.ENDED | Place.PASSED:
                    is_right = verdict is hand.verdict
            if not is_right:
                said = f"{consumer.name} passes {verdict} on {delivery.id}"
                self.violated("verdict", f"{said}, which is {hand.place.value}")
            hand.place, hand.verdict = Place.PASSED, verdict

    def answered(self, consumer: Consumer, settlements: Sequence[Settlement], answers: Sequence[object]) -> None:
        """*consumer* hears what became of verdicts."""
        for settlement in settlements:
            held = consumer.hands.get(settlement.delivery.token, {})
            held.pop(settlement.delivery.sequence, None)
            if not held:
                consumer.hands.pop(settlement.delivery.token, None)

    def hears(self, consumer: Consumer, held: Sequence[Any], answers: Sequence[object]) -> None:
        """*consumer* is about to hear the answer to a renewal."""
        for one, answer in zip(held, answers, strict=True):
            hand = consumer.hand(one)
            if not isinstance(answer, Lapsed) or hand is None or hand.is_asking:
                continue
            if hand.place in (Place.RUNNING, Place.KEPT):
                hand.place = Place.LOST  # else its own verdict may have ended the lock, and the answer to that counts

    def rests(self, consumer: Consumer) -> None:
        """All is drained and answered, so *consumer* should have nothing in hand."""
        for held in consumer.hands.values():
            for hand in held.values():
                is_over = hand.place is Place.LOST or (hand.place is Place.ENDED and hand.verdict is None)
                if hand.place is Place.KEPT:
                    hold = consumer.holds.get(hand.delivery.token)
                    is_over = hold is None or not _is_in(hold, hand.delivery)
                if hand.place is Place.WAITING or hand.verdict is GIVE_BACK:  # given back for as long as it makes sense
                    is_over = consumer.now() >= hand.trusted - BLUR
                if not is_over:
                    self.violated("left behind", f"{consumer.name} left {hand.delivery.id} {hand.place.value}")

    # --- the pump ---

    def decided(self, consumer: Consumer, event: PumpInput, was: State, effects: Sequence[Effect]) -> None:
        """The pump of *consumer* has taken in *event*."""
        state = consumer.pump.state
        if state is not was and state not in TRANSITIONS[was] | {State.STOPPED}:
            self.violated("machine", f"{consumer.name} went from {was.value} to {state.value} on {event}")
        for effect in effects:
            match effect:
                case Settle(_, settlements):
                    self.passes(consumer, settlements)
                case Receive() if state is not State.RUNNING:
                    self.violated("after stop", f"{consumer.name} claims while it is {state.value}")
        if state is not State.RUNNING:
            self._keeps_nothing(consumer)
        if isinstance(event, Claimed) and not event.deliveries:
            self.woke(consumer)

    def _keeps_nothing(self, consumer: Consumer) -> None:
        now = consumer.now()
        # What is due for renewal is the locks' to give back.
        if any(hold.waiting and now < hold.renew_at for hold in consumer.holds.values()):
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
            pace.since, pace.count, pace.deliveries = self.world.now, 0, self.book.deliveries
        return pace

    def hinted(self, consumer: Consumer) -> None:
        """*consumer* may ask once more: there was a hint."""
        self._pace(consumer).count -= 1

    def woke(self, consumer: Consumer) -> None:
        """*consumer* has woken by itself, or asked in vain."""
        pace = self._pace(consumer)
        pace.count += 1
        if pace.count > WAKES_MAX + 2 * (self.book.deliveries - pace.deliveries):
            self.violated("busy", f"{consumer.name} woke {pace.count} times within {self.timing.retry_every:g} s")
            consumer.die("ends, as it would never rest")

    def not_drained(self, left: str, bound: float) -> None:
        """There are messages left, *bound* seconds after the faults were over."""
        self.violated("not drained", f"{left}, {bound:.1f} s after the faults were over")

    def not_stopped(self, consumer: Consumer) -> None:
        """*consumer* was told to drain, has had its time, and still waits."""
        self.violated("not stopped", f"{consumer.name} is {consumer.pump.state.value} and holds {len(consumer.holds)}")


def _is_in(hold: LockGroup, delivery: Delivery) -> bool:
    """Tell whether *delivery* waits in *hold*, or is just being taken from there."""
    taken = hold.running.get(delivery.sequence)
    return taken[1] != JUDGED if taken is not None else any(one is delivery for one in hold.waiting)
