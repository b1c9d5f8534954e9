"""What must hold of consumers of messages in every run, seen from outside; the broker is checked in the oracle.

=================  ====================================================================================================
``two sure``       two consumers believed at one true moment that they hold the lock of one message
``outlives lock``  a consumer believed in a lock that the broker had ended, or would end sooner
``trust``          a belief is longer than the question allows that it came from
``not cancelled``  a lock ended, and the handler that ran under it had not been cancelled
``ignored no``     a renewal said no, and the handler was not cancelled
=================  ====================================================================================================

And what :mod:`tenure.testing._sim.queues.consumer_checkers` demands of every consumer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tenure._queue.message import Delivery, Token
from tenure._queue.verdicts import GIVE_BACK, Lapsed, Renewed
from tenure.testing._sim.client import Pending
from tenure.testing._sim.queues.consumer import Consumer
from tenure.testing._sim.queues.consumer_checkers import ConsumerCheckers, is_in
from tenure.testing._sim.queues.oracle import Oracle
from tenure.testing._sim.queues.plan import Plan
from tenure.testing._sim.queues.tracked import Stage, TrackedDelivery
from tenure.testing._sim.report import Findings
from tenure.testing._sim.world import BLUR

BELIEVED = (Stage.WAITING, Stage.RUNNING, Stage.KEPT)


class MessageCheckers(ConsumerCheckers):
    """Watch the consumers of messages in one run."""

    def __init__(self, findings: Findings, plan: Plan, oracle: Oracle) -> None:
        super().__init__(findings, plan, oracle)
        self._believers: dict[int, list[tuple[Consumer, TrackedDelivery]]] = {}

    def believes_in(self, consumer: Consumer, tracked: TrackedDelivery) -> float:
        """Return up to which true moment *consumer* believes in the lock of *tracked*; minus infinity if not now."""
        group = consumer.lock_groups.get(tracked.delivery.token)
        if not consumer.running or group is None or tracked.stage not in BELIEVED:
            return -math.inf
        if tracked.stage is not Stage.RUNNING and not is_in(group, tracked.delivery):
            return -math.inf  # it is about to be given back, or was let go
        sure = (
            group.trusted_until
            if tracked.cancelled_until is None
            else min(group.trusted_until, tracked.cancelled_until)
        )
        return consumer.clock.moment(sure)

    def took_in(self, consumer: Consumer, asked: Pending, token: Token) -> None:
        """*consumer* has taken in the deliveries under *token*, which it had *asked* for."""
        for tracked in consumer.tracked.under(token):
            tracked.trusted = asked.at + self.timing.window
        self._sure(consumer, token)

    def before_renewed(self, consumer: Consumer, held: Sequence[Delivery], answers: Sequence[object]) -> None:
        """*consumer* is about to take in the answer to a renewal."""
        for one, answer in zip(held, answers, strict=True):
            tracked = consumer.tracked.find(one)
            if not isinstance(answer, Lapsed) or tracked is None:
                continue
            tracked.is_denied = True
            if not tracked.is_asking and tracked.stage in (Stage.RUNNING, Stage.KEPT):
                tracked.stage = Stage.LOST  # else its own verdict may have ended the lock: the answer to that counts

    def renewed(self, consumer: Consumer, asked: Pending, answers: Sequence[object]) -> None:
        """*consumer* has taken in the *answers* to a renewal; none if there was no answer."""
        held = asked.question.held
        for one, answer in zip(held, answers, strict=bool(answers)):
            tracked = consumer.tracked.find(one)
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
        for tracked in consumer.tracked.under(token):
            until = self.believes_in(consumer, tracked)
            if until <= now + BLUR or tracked.is_settling:
                continue
            name, sequence = tracked.delivery.id, tracked.delivery.sequence
            over = until - consumer.clock.moment(tracked.trusted)
            if over > BLUR:
                self.violated("trust", f"{consumer.name} believes in {name} for {over:.3f} s more than it may")
            locked = self.oracle.locked_until(tracked.delivery)
            if locked < until - BLUR:
                self.violated("outlives lock", f"{consumer.name} believes in {name} {until - locked:.3f} s too long")
            known = self._believers.get(sequence, ())
            others = [
                (one, held) for one, held in known if held is not tracked and self.believes_in(one, held) > now + BLUR
            ]
            for other, _ in others:
                self.violated("two sure", f"{consumer.name} is sure of {name}, and {other.name} is, too")
            self._believers[sequence] = [*others, (consumer, tracked)]

    def locked(self, consumer: Consumer, held: Sequence[Any]) -> None:
        """The broker has locked these for *consumer*: see what goes on when the locks end."""
        deliveries = [one for one in held if isinstance(one, Delivery)]
        for end in {self.oracle.locked_until(one) for one in deliveries}:
            if end > self.world.now:
                self.world.at(end, self._lock_ends, consumer, deliveries)

    def _lock_ends(self, consumer: Consumer, held: Sequence[Delivery]) -> None:
        if not consumer.running or consumer.paused:
            return
        for one in held:
            tracked = consumer.tracked.find(one)
            if (
                tracked is None
                or tracked.stage is not Stage.RUNNING
                or tracked.cancelled_until is not None
                or tracked.is_settling
            ):
                continue
            if self.oracle.locked_until(one) <= self.world.now + BLUR:
                self.violated("not cancelled", f"the lock of {one.id} has ended, and {consumer.name} works on")

    def is_over(self, consumer: Consumer, tracked: TrackedDelivery) -> bool:
        """Return whether a resting consumer is right to do no more about *tracked*."""
        if tracked.stage is Stage.KEPT:
            return not is_in(consumer.lock_groups.get(tracked.delivery.token), tracked.delivery)
        if tracked.stage is Stage.LOST or (tracked.stage is Stage.ENDED and tracked.verdict is None):
            return True
        if tracked.stage is Stage.WAITING or tracked.verdict is GIVE_BACK:
            return consumer.now() >= tracked.trusted - BLUR  # it is given back while that makes sense
        return False
