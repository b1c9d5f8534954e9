"""The queue context: through it, the parts of a queue and the messages in hand reach the broker."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenure._checks import check_seconds
from tenure._lease import NoAnswer
from tenure._queue.broker import Broker, Claim, NoSession, QueueOptions, QueueSettings, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import name_of, text_of
from tenure._queue.hints import MESSAGES, HintSubscriptions, Subscription
from tenure._queue.looks import SharedLooks
from tenure._queue.message import Delivery, Died, SessionLock
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
from tenure.errors import ConfigError, LockLost, TenureError, Unavailable

if TYPE_CHECKING:
    import random

    from tenure._telemetry.telemetry import Telemetry, Tracing
    from tenure.events import Event

T = TypeVar("T")

PURGE_EVERY = 3_600.0
"""Seconds between searches of a process for dead letters past their retention; or a 20th of it, if less."""

PURGE_MAX = 1_000
"""The most of them that are removed at once."""

POLL = 5.0
"""Seconds between looks at a queue without a hint."""


FAILURES_MAX = 1_000
"""The most kinds of failures remembered; further ones are logged in full each time."""

DEATHS_PER_TURN = 50
"""The most deaths reported in one turn of the loop: each calls an event hook and a log handler."""


@dataclass(slots=True, eq=False, repr=False)
class QueueContext:
    """One queue of one backend: the state that its parts share."""

    name: str
    broker: Broker
    renewal_thread: RenewalThread
    clock: Clock
    settings: QueueSettings
    holder: str
    on_event: Callable[[Event], None] | None = None
    expected: QueueOptions | None = None
    """The settings that the queue must have, declared when it is first used, and when it was made anew; None asks for
    nothing, not even for those that hold."""
    _declared_in: int | None = None
    """The generation of the queue in which they were declared; None if it was not used yet."""
    _declared_mark: Hashable | None = None
    """What the broker has noted of that generation."""
    _check_at: float = math.inf
    """When to ask whether they still are, where answers don't show that."""
    purge_at: float = 0.0
    """When to look again for dead letters past their retention."""
    _chores: Tasks = field(default_factory=Tasks)
    hints: HintSubscriptions = field(default_factory=HintSubscriptions)
    """The waiters for hints, shared by all queues of one backend."""
    looks: SharedLooks = field(default_factory=SharedLooks)
    """The looks at empty queues, shared likewise."""
    _failures: set[str] = field(default_factory=set)
    """The kinds of failures, by type and place, that were logged in full."""
    telemetry: Telemetry | None = None
    tracing: Tracing | None = None
    _rng: random.Random | None = None
    has_answered: bool = False
    """Whether the broker has ever answered a consumer: from then on, a failed question is asked again."""

    @property
    def rng(self) -> random.Random:
        """A source of jitter."""
        import random

        if self._rng is None:
            self._rng = random.Random()
        return self._rng

    @property
    def is_ready(self) -> bool:
        """Whether the expected settings were declared in the queue as it was seen last."""
        if not self.expected:
            return self.expected is None or self._declared_in is not None
        return self._declared_in == self.broker.generations.of(self.name)

    @property
    def is_check_due(self) -> bool:
        """Whether to ask if the expected settings are declared still."""
        return self.clock.now() >= self._check_at

    async def ready(self) -> None:
        """Read once which settings hold; declare the expected ones that are not declared, now or any more.

        Raises:
            ConfigError: One of them was declared otherwise.
        """
        if not self.is_ready:
            await self._make_ready()
        elif self._check_at < math.inf and self.is_check_due:  # most queues need no look at the clock
            await self._check()
        elif self.settings.dead_retention == math.inf:
            return
        self.purge_if_due()

    async def _make_ready(self) -> None:
        if self.expected:
            generations = self.broker.generations
            generations.follow(self.name)
            holds = await self.broker.declare(self.name, self.expected, only_undeclared=True)
            self._compare(self.expected, holds)
            self._check_at = self.clock.now() + generations.check_every
        else:
            holds = await self.broker.settings(self.name)
            self._declared_in = 0
        self.go_by(holds)

    async def _check(self) -> None:
        """Declare again what is expected, where answers don't show whether the queue was made anew."""
        assert self.expected
        every = self.broker.generations.check_every
        self._check_at = self.clock.now() + every * self.rng.uniform(0.9, 1.1)
        try:
            holds = await self.broker.declare(self.name, self.expected, only_undeclared=True)
        except TenureError:  # messages may go another way, which is open; and another right may do for them
            return
        self._compare(self.expected, holds)

    def _compare(self, expected: QueueOptions, holds: QueueSettings) -> None:
        """Compare what is *expected* with what *holds*, in a generation in which that was not done before.

        In the others, a program that runs goes on, also if another setting was declared since.
        """
        generations = self.broker.generations
        mark = generations.mark_of(self.name)
        if self._declared_in is None or mark != self._declared_mark:
            check_expected(self.name, expected, holds)
        self._declared_in, self._declared_mark = generations.of(self.name), mark

    async def stay_ready(self) -> None:
        """Declare the expected settings again if the answer that has just come shows that the queue was made anew.

        If that fails, it is tried again at the next use, which raises what is wrong.
        """
        if not self.is_ready:
            with suppress(TenureError):
                await self.ready()

    def forget(self) -> None:
        """Note that the queue was deleted here: its next use begins as the first one did."""
        if self.expected is not None:
            self._declared_in = None

    def go_by(self, holds: QueueSettings) -> QueueSettings:
        """Take note of the settings that hold, and return them as they hold on this store."""
        self.settings = replace(holds, body_max=min(holds.body_max, self.broker.traits.body_max))
        return self.settings

    def purge_if_due(self) -> None:
        """Remove dead letters past their retention, now and then, in a task of its own."""
        kept = self.settings.dead_retention
        if kept == math.inf or self.clock.now() < self.purge_at:
            return
        self.purge_at = self.clock.now() + min(PURGE_EVERY, kept / 20)
        self.begin_chore(self._purge(), "tenure-dead-retention")

    def begin_chore(self, chore: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin *chore*, for which no caller waits, in a task of its own, and return the task; see :meth:`rest`."""
        return self._chores.spawn(chore, name)

    async def handled(self, ids: Sequence[str]) -> list[bool]:
        """Return which *ids* the inbox remembers, in the form of this version or of an older one."""
        from tenure._queue.identity import spellings_of

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
        """Wait for the tasks that :meth:`begin_chore` has started on this loop, at most a second."""
        if chores := self._chores.here():
            await asyncio.wait(chores, timeout=1.0)

    def why_unanswered(self, error: BaseException) -> str | None:
        """Return why a question to the broker got no answer and has to be asked again; None if asking again is no use.

        A driver may raise anything when its server fails. So once the broker has answered, only a ``TenureError`` other
        than ``Unavailable`` says that asking is no use.
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

    def report_dead(self, died: Sequence[Died], queue: str = "") -> None:
        """Report to the observers the messages that the broker dead-lettered by itself, in *queue* if not in ours.

        Of many, the first few are reported now, the others in portions between which the loop turns.
        """
        unreported = deque(died)
        self._report_some(unreported, queue)
        if unreported:
            reporting = self.begin_chore(self._report_others(unreported, queue), "tenure-deaths")
            reporting.add_done_callback(
                lambda _: self._report_some(unreported, queue, len(unreported))
            )  # the loop ends: this is the last chance

    async def _report_others(self, unreported: deque[Died], queue: str) -> None:
        while unreported:
            await asyncio.sleep(0)
            self._report_some(unreported, queue)

    def _report_some(self, unreported: deque[Died], queue: str, most: int = DEATHS_PER_TURN) -> None:
        from tenure.events import MessageDied

        for _ in range(min(most, len(unreported))):
            one = unreported.popleft()
            named = (one.id, one.sequence, one.delivery_count)
            self.emit(MessageDied(self.clock.now(), queue or self.name, self.holder, *named, one.reason))

    def is_news(self, delivery: Delivery, failure: str) -> bool:
        """Return whether to log a *failure* in full: it is a message's first, or of a kind not seen before."""
        is_known = failure in self._failures
        if not is_known and len(self._failures) < FAILURES_MAX:
            self._failures.add(failure)
        return delivery.delivery_count == 1 or not is_known

    def emit(self, event: Event, error: BaseException | None = None) -> None:
        """Report *event* to the observers, to the log with the traceback of *error*. Their own errors are reported."""
        from tenure._queue.tracebacks import told_of
        from tenure._telemetry.hook import call_hook
        from tenure._telemetry.log import is_logged, log_event

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
        """Ask for messages; if we are cancelled meanwhile, give back those that come, to not leave them locked."""
        begun = self.clock.now()
        asking = asyncio.ensure_future(self._claimed(ask))
        try:
            claim = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise
        if isinstance(claim, Claim):
            self.note_claim(claim)
            if self.tracing is not None and claim.deliveries:
                self.tracing.received(self.name, claim.deliveries, self.clock.now() - begun)
        return claim

    async def _claimed(self, ask: Callable[[], Awaitable[Claim | Lapsed]]) -> Claim | Lapsed:
        await self.ready()
        claim = await ask()
        if isinstance(claim, Claim) and not self.is_ready:
            return await self.claim_again(claim, ask)
        return claim

    async def claim_again(self, claim: Claim, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what *ask* claims once the expected settings are declared again in a queue that was made anew.

        What *claim* has brought is given back, uncounted: the settings that held then, limits among them, may not be
        the expected ones.

        Raises:
            ConfigError: The queue has others now.
        """
        self.report_dead(claim.died)
        if claim.deliveries:
            await self._give_back_twice(claim.deliveries)
        await self.ready()
        return await ask()

    async def _give_back_twice(self, deliveries: Sequence[Delivery]) -> None:
        """Give messages back, and those without an answer once more; if that fails, their locks end by themselves."""
        left = list(deliveries)
        for _ in range(2):
            with suppress(Unavailable):
                answers = await self.broker.settle([Settlement(one, GIVE_BACK) for one in left])
                left = [one for one, answer in zip(left, answers, strict=True) if isinstance(answer, NoAnswer)]
            if not left:
                return

    async def accept(self, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or for None the next free one with a message waiting."""
        answer = await self.broker.accept(self.name, session, lock)
        if self.expected:
            await self.stay_ready()
        return answer

    def note_claim(self, claim: Claim) -> None:
        """Report what *claim* brought to the observers."""
        if claim.died:
            self.report_dead(claim.died)
        if self.telemetry is not None and claim.deliveries and claim.deliveries[0].queue == self.name:
            self.telemetry.received(self.name, claim.deliveries)

    def _give_back(self, asked: asyncio.Future[Claim | Lapsed]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        claim = asked.result()
        if isinstance(claim, Lapsed):
            return
        self.report_dead(claim.died)
        if claim.deliveries:
            settling = self.begin_chore(self._settle_all(claim.deliveries, GIVE_BACK), "tenure-give-back")
            settling.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _settle_all(self, deliveries: Sequence[Delivery], verdict: Verdict) -> None:
        answers = await self.broker.settle([Settlement(one, verdict) for one in deliveries])
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Settled):
                self.report_if_dead(delivery, verdict, answer)

    async def settle(self, delivery: Delivery, verdict: Verdict, tracker: DeliveryTracker | None = None) -> bool:
        """Pass *verdict*, and return once it stands: True if the message died of it.

        The *tracker* learns when the message may be back, if it was abandoned and is not known to be dead.

        Raises:
            LockLost: It doesn't stand, as the lock was over.
            Unavailable: There was no answer; it may stand or not.
        """
        answer: Settled | Lapsed | NoAnswer | None = None
        try:
            with nullcontext() if self.tracing is None else self.tracing.settling(delivery, verdict):
                [answer] = await self.broker.settle([Settlement(delivery, verdict)])
        finally:  # without an answer, too: the verdict may stand
            if tracker is not None and (back_at := self.back_at(verdict, answer)) is not None:
                tracker.abandoned(back_at)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(loss_message(delivery, f"could not {_VERBS[type(verdict)]} it"))
        self.report_if_dead(delivery, verdict, answer)
        return answer.dead

    def back_at(self, verdict: Verdict, answer: Settled | Lapsed | NoAnswer | None) -> float | None:
        """Return when a message abandoned just now is back at the latest, as stores may be late; else None.

        None only if the *answer* says that it died: a verdict whose first answer was lost stands, but has lapsed when
        it is passed again.
        """
        if not isinstance(verdict, Abandon) or (isinstance(answer, Settled) and answer.dead):
            return None
        traits = self.broker.traits
        return self.clock.now() + verdict.delay + traits.delay_step + (traits.delay_lag if verdict.delay else 0.0)

    def report_if_dead(self, delivery: Delivery, verdict: Verdict, answer: Settled) -> None:
        """Report the message's death to the observers, if *verdict*, which stands, dead-lettered it."""
        if (answer.dead or isinstance(verdict, DeadLetter)) and not delivery.queue.endswith(DEAD_SUFFIX):
            from tenure._queue.delivery_ends import reason_of_death
            from tenure.events import MessageDied

            reason = reason_of_death(verdict, answer, delivery.delivery_count, self.settings.max_deliveries)
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

        Return None if it finds nothing within *wait* seconds. *name* is the queue whose hints count, if not ours.
        A hint wakes one of the waiters with the same *kind* of question.
        """
        check_seconds("wait", wait, least=0.0)
        give_up = self.clock.now() + wait
        woken = asyncio.Event()

        def wake() -> bool:
            woken.set()
            return True

        subscription: Subscription | None = None
        if wait > 0:  # also where hints come from this process only: it may send
            subscription = self.hints.join(self.broker, name or self.name, kind, wake)
        try:
            poll = POLL if self.broker.traits.hints else 0.05
            while True:
                woken.clear()
                self.purge_if_due()
                if subscription is not None:
                    subscription.asks()
                found, due_in = await look()
                if subscription is not None:
                    subscription.answered(found is not None, due_in)
                left = give_up - self.clock.now()
                if found is None and due_in == 0:
                    continue  # the store has reached its limit for one step, and has more to do
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
        ConfigError: The message names each that differs, both values, and what to do.
    """
    wrong = {name: value for name, value in expected.items() if getattr(holds, name) != value}
    if wrong:
        import shlex

        found = "; ".join(
            f"{name} is {_setting_text(getattr(holds, name))}, not {_setting_text(value)}"
            for name, value in wrong.items()
        )
        wanted = ", ".join(f"{name}={_setting_code(value)}" for name, value in wrong.items())
        options = " ".join(
            f"--{name.replace('_', '-')} {_setting_option(name, value)}" for name, value in wrong.items()
        )
        raise ConfigError(
            f"the settings of the queue {queue!r} are not those expected here: {found}. To use those that hold, leave "
            f"{' and '.join(wrong)} out; to change them for all programs: await queue.declare({wanted}), or "
            f"tenure queue declare {shlex.quote(queue)} {options}"
        )


def _setting_text(value: object) -> str:
    return f"{value[0]} in {value[1]:.15g} s" if isinstance(value, tuple) else f"{value:.15g}"


def _setting_code(value: object) -> str:
    """Return *value* in Python."""
    if isinstance(value, tuple):
        return f"({value[0]}, {value[1]:.15g})"
    return "math.inf" if value == math.inf else f"{value:.15g}"


def _setting_option(name: str, value: object) -> str:
    """Return *value* for the option of the command line that sets *name*."""
    if isinstance(value, tuple):
        return f"{value[0]}/{value[1]:.15g}"
    return f"{value:.15g}" if value != math.inf else "forever" if name == "dead_retention" else "none"


def report(what: str, error: BaseException) -> None:
    """Report to the loop's exception handler that the user's code failed; never raise, even if that handler does.

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
    """Return a text that says that a lock is over, and what to do."""
    return (
        f"{what}: the lock on message {delivery.id!r} of {delivery.queue!r} (delivery {delivery.delivery_count}) is "
        f"over, as it was settled before or the lock has ended; discard the work done, another consumer may have it"
    )


class DeliveryTracker(Protocol):
    """Keeps count of the messages in hand."""

    def settling_begins(self, delivery: Delivery) -> None:
        """Note that a verdict on *delivery* is sent to the broker."""
        ...

    def settling_ends(self, delivery: Delivery) -> None:
        """Note that it is answered, or given up."""
        ...

    def settled(self, delivery: Delivery) -> bool:
        """Note that *delivery* is settled, or lost; return whether that is news."""
        ...

    def abandoned(self, until: float) -> None:
        """Note that a message which was abandoned, as far as is known, comes back at *until*."""
        ...
