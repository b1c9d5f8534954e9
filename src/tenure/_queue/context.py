"""The desk at which a queue's rooms and the messages in hand reach the broker, and the messages themselves."""

from __future__ import annotations

import asyncio
import math
import random
import shlex
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from tenure._checks import check_seconds
from tenure._lease import NoAnswer
from tenure._queue.broker import Broker, Claim, QueueOptions, QueueSettings, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import name_of, text_of
from tenure._queue.hints import MESSAGES, HintSubscriptions, Subscription
from tenure._queue.identity import spellings_of
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, Delivery, Died
from tenure._queue.tracebacks import told_of
from tenure._queue.verdicts import (
    GIVE_BACK,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    GiveBack,
    Lapsed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.tasks import Tasks
from tenure._telemetry.hook import call_hook
from tenure._telemetry.log import is_logged, log_event
from tenure.errors import ConfigError, LockLost, TenureError, Unavailable
from tenure.events import Event, MessageDied

T = TypeVar("T")

PURGE_EVERY = 3_600.0
"""Seconds after which a process looks again for dead letters whose time is over, or a 20th of their time."""

PURGE_MAX = 1_000
"""So many of them are removed at once."""

POLL = 5.0
"""Seconds between looks at a queue that nobody told of."""


FAILURES_MAX = 1_000
"""So many kinds of failures are remembered; further ones are told in full each time."""

DEATHS_PER_TURN = 50
"""So many deaths are told in one turn of the loop: an event hook and a log handler are called for each."""


@dataclass(slots=True)
class QueueContext:
    """One queue of one backend: what its rooms share."""

    name: str
    broker: Broker
    renewal_thread: RenewalThread
    clock: Clock
    settings: QueueSettings
    holder: str
    on_event: Callable[[Event], None] | None = None
    expected: QueueOptions | None = None
    """The settings that the queue is to have, checked when it is first used; None once they are."""
    rng: random.Random = field(default_factory=random.Random)
    purge_at: float = 0.0
    """When to look again for dead letters whose time is over."""
    _chores: Tasks = field(default_factory=Tasks)
    hints: HintSubscriptions = field(default_factory=HintSubscriptions)
    """Where hints are heard, shared by all queues of one backend."""
    _failures: set[str] = field(default_factory=set)
    """The kinds of failures, by type and place, that the log has had in full."""
    has_answered: bool = False
    """Whether the broker has ever answered a consumer: what fails from then on is asked again."""

    async def ready(self) -> None:
        """Learn once which settings hold; declare those expected that nobody has declared.

        Raises:
            ConfigError: One of them was declared otherwise.
        """
        expected = self.expected
        if expected is None:
            if self.settings.dead_retention != math.inf:
                self.look_after()
            return
        if expected:
            holds = await self.broker.declare(self.name, expected, only_undeclared=True)
            check_expected(self.name, expected, holds)
        else:
            holds = await self.broker.settings(self.name)
        self.go_by(holds)
        self.expected = None
        self.look_after()

    def go_by(self, holds: QueueSettings) -> QueueSettings:
        """Take note of the settings that hold, and return them as they hold on this store."""
        self.settings = replace(holds, body_max=min(holds.body_max, self.broker.traits.body_max))
        return self.settings

    def look_after(self) -> None:
        """See to it, now and then and off everybody's way, that dead letters whose time is over are removed."""
        kept = self.settings.dead_retention
        if kept == math.inf or self.clock.now() < self.purge_at:
            return
        self.purge_at = self.clock.now() + min(PURGE_EVERY, kept / 20)
        self._begin_chore(self._purge(), "tenure-dead-retention")

    def _begin_chore(self, chore: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._chores.spawn(chore, name)

    async def handled(self, ids: Sequence[str]) -> list[bool]:
        """Tell which *ids* the inbox remembers, in whichever form an older tenure or this one has noted them."""
        spellings = [spellings_of(one) for one in ids]
        asked = [one for some in spellings for one in some]
        answers = zip(asked, await self.broker.handled(self.name, asked), strict=True)
        known = {one for one, is_known in answers if is_known}
        return [not known.isdisjoint(some) for some in spellings]

    async def _purge(self) -> None:
        with suppress(TenureError):  # it can wait
            kept = (await self.broker.settings(self.name)).dead_retention  # another process may have declared another
            while (
                kept < math.inf and await self.broker.purge(self.name, Selection(dead_for=kept), PURGE_MAX) == PURGE_MAX
            ):
                pass

    async def rest(self) -> None:
        """Let what :meth:`look_after` has begun on this loop come to an end."""
        if chores := self._chores.here():
            await asyncio.wait(chores, timeout=1.0)

    def why_unanswered(self, error: BaseException) -> str | None:
        """Return why a question to the broker brought no answer, so that it is to be asked again; None if it is not to.

        A driver may raise anything when its server fails. So once the broker has answered, only a ``ConfigError`` says
        that asking is no use.
        """
        if isinstance(error, Unavailable):
            return str(error)
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return None  # meant for us
        elif isinstance(error, TenureError) or not self.has_answered:
            return None
        return f"{name_of(error)}: {text_of(error)}"

    def tell_of_dead(self, died: Sequence[Died], queue: str = "") -> None:
        """Let the observers know of what the broker has buried by itself, in *queue* if that is not ours.

        Of many, the first few are told now, the others in portions between which the loop turns.
        """
        untold = deque(died)
        self._tell_some(untold, queue)
        if untold:
            telling = self._begin_chore(self._tell_the_others(untold, queue), "tenure-deaths")
            telling.add_done_callback(
                lambda _: self._tell_some(untold, queue, len(untold))
            )  # the loop ends: now or never

    async def _tell_the_others(self, untold: deque[Died], queue: str) -> None:
        while untold:
            await asyncio.sleep(0)
            self._tell_some(untold, queue)

    def _tell_some(self, untold: deque[Died], queue: str, most: int = DEATHS_PER_TURN) -> None:
        for _ in range(min(most, len(untold))):
            one = untold.popleft()
            named = (one.id, one.sequence, one.delivery_count)
            self.emit(MessageDied(self.clock.now(), queue or self.name, self.holder, *named, one.reason))

    def is_news(self, delivery: Delivery, failure: str) -> bool:
        """Tell whether the log is to have all of a *failure*: a message's first, or one of a kind not seen before."""
        is_known = failure in self._failures
        if not is_known and len(self._failures) < FAILURES_MAX:
            self._failures.add(failure)
        return delivery.delivery_count == 1 or not is_known

    def emit(self, event: Event, error: BaseException | None = None) -> None:
        """Let the observers know, the log also of the traceback of *error*. What they raise is reported."""
        try:
            if is_logged(event):
                log_event(event, told_of(error) if error is not None else None)
        except BaseException as error:
            report("the log of tenure failed", error)
        if self.on_event is not None:
            try:
                call_hook(self.on_event, event)
            except BaseException as error:
                report("on_event of tenure failed", error)

    async def claim(self, ask: Callable[[], Coroutine[Any, Any, Claim | Lapsed]]) -> Claim | Lapsed:
        """Ask for messages; if we are cancelled meanwhile, what comes is given back, and not left locked."""
        asking = asyncio.ensure_future(ask())
        try:
            claim = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise
        if isinstance(claim, Claim) and claim.died:
            self.tell_of_dead(claim.died)
        return claim

    def _give_back(self, asked: asyncio.Future[Claim | Lapsed]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        claim = asked.result()
        if isinstance(claim, Lapsed):
            return
        self.tell_of_dead(claim.died)
        if claim.deliveries:
            settling = asyncio.ensure_future(self._settle_all(claim.deliveries, GIVE_BACK))
            settling.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _settle_all(self, deliveries: Sequence[Delivery], verdict: Verdict) -> None:
        answers = await self.broker.settle([Settlement(one, verdict) for one in deliveries])
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Settled):
                self.tell_if_dead(delivery, verdict, answer)

    async def settle(self, delivery: Delivery, verdict: Verdict, tracker: DeliveryTracker | None = None) -> bool:
        """Pass *verdict*, and return once it stands: True if the message died of it.

        The *tracker* is told when the message may be back, if it was abandoned and is not known to be dead.

        Raises:
            LockLost: It doesn't stand, for the lock was over.
            Unavailable: There was no answer; it may stand or not.
        """
        answer: Settled | Lapsed | NoAnswer | None = None
        try:
            [answer] = await self.broker.settle([Settlement(delivery, verdict)])
        finally:  # without an answer, too: the verdict may stand
            if tracker is not None and (back_at := self.back_at(verdict, answer)) is not None:
                tracker.abandoned(back_at)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(loss_message(delivery, f"could not {_VERBS[type(verdict)]} it"))
        self.tell_if_dead(delivery, verdict, answer)
        return answer.dead

    def back_at(self, verdict: Verdict, answer: Settled | Lapsed | NoAnswer | None) -> float | None:
        """Return when a message is back that was abandoned just now, also where delays are rounded; else None.

        Unless the *answer* is that it died: a verdict whose first answer was lost stands, and has lapsed when it is
        passed again.
        """
        if not isinstance(verdict, Abandon) or (isinstance(answer, Settled) and answer.dead):
            return None
        return self.clock.now() + verdict.delay + self.broker.traits.delay_step

    def tell_if_dead(self, delivery: Delivery, verdict: Verdict, answer: Settled) -> None:
        """Let the observers know if *verdict*, that stands, was the death of the message."""
        if (answer.dead or isinstance(verdict, DeadLetter)) and not delivery.queue.endswith(DEAD_SUFFIX):
            if isinstance(verdict, DeadLetter):
                reason = verdict.reason
            else:  # what expired under the lock dies when it is given back, and what is abandoned before its last try
                is_tried = isinstance(verdict, Abandon) and delivery.delivery_count >= self.settings.max_deliveries
                reason = MAX_DELIVERIES if is_tried else EXPIRED
            named = (delivery.id, delivery.sequence, delivery.delivery_count)
            self.emit(MessageDied(self.clock.now(), delivery.queue, self.holder, *named, reason))

    async def renew(self, delivery: Delivery) -> float:
        """Extend the lock to the queue's full length, unless it lasts longer already, and return its end.

        Raises:
            LockLost: It was over.
        """
        [answer] = await self.broker.renew([delivery], self.settings.lock)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(loss_message(delivery, "could not renew its lock"))
        return answer.locked_until

    async def wait_for(
        self,
        look: Callable[[], Awaitable[tuple[T | None, float | None]]],
        wait: float,
        name: str = "",
        kind: Hashable = MESSAGES,
    ) -> T | None:
        """Return what *look* finds, looking again when a hint wakes us, and when it says that something is due.

        None, if it has found nothing when *wait* seconds are over. *name* is the queue whose hints count, if not ours.
        A hint wakes one of those who wait for it with the same *kind* of question.
        """
        check_seconds("wait", wait, least=0.0)
        give_up = self.clock.now() + wait
        woken = asyncio.Event()

        def wake() -> bool:
            woken.set()
            return True

        subscription: Subscription | None = None
        if wait > 0:  # also where no other process is heard of: this one may send
            subscription = self.hints.join(self.broker, name or self.name, kind, wake)
        try:
            poll = POLL if self.broker.traits.hints else 0.05
            while True:
                woken.clear()
                self.look_after()
                if subscription is not None:
                    subscription.asks()
                found, due_in = await look()
                if subscription is not None:
                    subscription.answered(found is not None, due_in)
                left = give_up - self.clock.now()
                if found is None and due_in == 0:
                    continue  # the store is not through yet, and has done as much as it does in one step
                if found is not None or left <= 0:
                    return found
                pause = min(left, poll if due_in is None else min(poll, due_in + 0.001))
                poll = min(poll * 1.5, POLL)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await woken.wait()
        finally:
            if subscription is not None:
                subscription.leave()


def check_expected(queue: str, expected: QueueOptions, holds: QueueSettings) -> None:
    """Refuse a *queue* whose settings are not those *expected*.

    Raises:
        ConfigError: The message names each that differs, with both values, and what to do.
    """
    wrong = {name: value for name, value in expected.items() if getattr(holds, name) != value}
    if wrong:
        found = "; ".join(f"{name} is {getattr(holds, name):.15g}, not {value:.15g}" for name, value in wrong.items())
        wanted = ", ".join(f"{name}={value:.15g}" for name, value in wrong.items())
        options = " ".join(f"--{name.replace('_', '-')} {value:.15g}" for name, value in wrong.items())
        raise ConfigError(
            f"the settings of the queue {queue!r} are not those expected here: {found}. To go by what holds, leave "
            f"{' and '.join(wrong)} out; to change it for everybody: await queue.declare({wanted}), or "
            f"tenure queue declare {shlex.quote(queue)} {options}"
        )


def report(what: str, error: BaseException) -> None:
    """Let the loop report that code of the user's failed; nothing comes out of that, whatever the loop's handler does.

    Called on a loop.
    """
    with suppress(BaseException):
        asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


_VERBS: dict[type[Verdict], str] = {
    Complete: "complete",
    Abandon: "abandon",
    Defer: "defer",
    DeadLetter: "dead-letter",
    GiveBack: "give back",
}


def loss_message(delivery: Delivery, what: str) -> str:
    """Say that a lock is over, and what to do about it."""
    return (
        f"{what}: the lock on message {delivery.id!r} of {delivery.queue!r} (delivery {delivery.delivery_count}) is "
        f"over, as it was settled before or the lock has ended; discard what was done, somebody else may have it"
    )


class DeliveryTracker(Protocol):
    """Who else keeps count of the messages in hand."""

    def asks(self, delivery: Delivery) -> None:
        """Note that a verdict on *delivery* is on its way to the broker."""
        ...

    def heard(self, delivery: Delivery) -> None:
        """Note that it is answered, or given up."""
        ...

    def settled(self, delivery: Delivery) -> bool:
        """Note that *delivery* is settled, or lost; tell whether that is news."""
        ...

    def abandoned(self, until: float) -> None:
        """Note that a message which was abandoned, as far as is known, comes back at *until*."""
        ...
