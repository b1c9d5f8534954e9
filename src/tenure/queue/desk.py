"""The desk at which a queue's rooms and the messages in hand reach the broker, and the messages themselves."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload

from tenure.clock import Clock
from tenure.errors import ConfigError, DecodeError, LockLost, TenureError, Unavailable
from tenure.events import Event, MessageDied, ResultDiscarded
from tenure.keeper import Keeper
from tenure.lease import NoAnswer
from tenure.observe.hook import tell_hook
from tenure.observe.log import is_logged, log_event
from tenure.pacing import check_seconds
from tenure.queue.bodies import decode, loads
from tenure.queue.broker import Broker, Claim, QueueSettings, Selection, SettingChanges
from tenure.queue.frames import told_of
from tenure.queue.hearing import MESSAGES, Hearing, Place
from tenure.queue.message import (
    COMPLETE,
    DEAD_SUFFIX,
    EXPIRED,
    GIVE_BACK,
    MAX_DELIVERIES,
    NOT_GIVEN,
    Abandon,
    Attempt,
    Complete,
    DeadLetter,
    Defer,
    Delivery,
    Died,
    Failure,
    GiveBack,
    Headers,
    Lapsed,
    Outgoing,
    SendOptions,
    Settled,
    Settlement,
    Verdict,
    check_name,
    check_text,
    checked,
    name_of,
    outgoing,
    spellings_of,
    text_of,
)

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
class Desk:
    """One queue of one backend: what its rooms share."""

    name: str
    broker: Broker
    keeper: Keeper
    clock: Clock
    settings: QueueSettings
    holder: str
    on_event: Callable[[Event], None] | None = None
    given: SettingChanges | None = None
    """What is to hold for everybody from the first use on; None once it does."""
    dice: random.Random = field(default_factory=random.Random)
    purge_at: float = 0.0
    """When to look again for dead letters whose time is over."""
    _chores: set[asyncio.Task[None]] = field(default_factory=set)
    hearing: Hearing = field(default_factory=Hearing)
    """Where hints are heard, shared by all queues of one backend."""
    _failures: set[str] = field(default_factory=set)
    """The kinds of failures, by type and place, that the log has had in full."""
    has_answered: bool = False
    """Whether the broker has ever answered a consumer: what fails from then on is asked again."""

    async def ready(self) -> None:
        """Make known what was given, and learn what others gave before; once."""
        given = self.given
        if given is None:
            if self.settings.dead_retention != math.inf:
                self.look_after()
            return
        holds = await self.broker.settings(self.name)
        if any(getattr(holds, name) != value for name, value in given.items()):
            holds = await self.broker.declare(self.name, given)  # only these: others may be declared elsewhere just now
        self.settings = replace(holds, body_max=min(holds.body_max, self.broker.traits.body_max))
        self.given = None
        self.look_after()

    def look_after(self) -> None:
        """See to it, now and then and off everybody's way, that dead letters whose time is over are removed."""
        kept = self.settings.dead_retention
        if kept == math.inf or self.clock.now() < self.purge_at:
            return
        self.purge_at = self.clock.now() + min(PURGE_EVERY, kept / 20)
        self._begin_chore(self._purge(), "tenure-dead-retention")

    def _begin_chore(self, chore: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        begun = asyncio.get_running_loop().create_task(chore, name=name)
        self._chores.add(begun)
        begun.add_done_callback(self._chores.discard)
        return begun

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
        here = asyncio.get_running_loop()
        if chores := {one for one in list(self._chores) if one.get_loop() is here}:  # other loops begin and end theirs
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
        """Let the ears know of what the broker has buried by itself, in *queue* if that is not ours.

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
            self.tell(MessageDied(self.clock.now(), queue or self.name, self.holder, *named, one.reason))

    def is_news(self, delivery: Delivery, failure: str) -> bool:
        """Tell whether the log is to have all of a *failure*: a message's first, or one of a kind not seen before."""
        is_known = failure in self._failures
        if not is_known and len(self._failures) < FAILURES_MAX:
            self._failures.add(failure)
        return delivery.delivery_count == 1 or not is_known

    def tell(self, event: Event, error: BaseException | None = None) -> None:
        """Let the ears know, the log also of the traceback of *error*. Nothing comes out of this that they raise."""
        try:
            if is_logged(event):
                log_event(event, told_of(error) if error is not None else None)
        except BaseException as error:
            report("the log of tenure failed", error)
        if self.on_event is not None:
            try:
                tell_hook(self.on_event, event)
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

    async def settle(self, delivery: Delivery, verdict: Verdict, keeper: Unsettled | None = None) -> bool:
        """Pass *verdict*, and return once it stands: True if the message died of it.

        The *keeper* is told when the message may be back, if it was abandoned and is not known to be dead.

        Raises:
            LockLost: It doesn't stand, for the lock was over.
            Unavailable: There was no answer; it may stand or not.
        """
        answer: Settled | Lapsed | NoAnswer | None = None
        try:
            [answer] = await self.broker.settle([Settlement(delivery, verdict)])
        finally:  # without an answer, too: the verdict may stand
            if keeper is not None and (back_at := self.back_at(verdict, answer)) is not None:
                keeper.abandoned(back_at)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(obituary(delivery, f"could not {_VERBS[type(verdict)]} it"))
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
        """Let the ears know if *verdict*, that stands, was the death of the message."""
        if (answer.dead or isinstance(verdict, DeadLetter)) and not delivery.queue.endswith(DEAD_SUFFIX):
            if isinstance(verdict, DeadLetter):
                reason = verdict.reason
            else:  # a ttl that ended under the lock kills what is given back, and what is abandoned before its last try
                is_tried = isinstance(verdict, Abandon) and delivery.delivery_count >= self.settings.max_deliveries
                reason = MAX_DELIVERIES if is_tried else EXPIRED
            named = (delivery.id, delivery.sequence, delivery.delivery_count)
            self.tell(MessageDied(self.clock.now(), delivery.queue, self.holder, *named, reason))

    async def renew(self, delivery: Delivery) -> float:
        """Extend the lock to the queue's full length, unless it lasts longer already, and return its end.

        Raises:
            LockLost: It was over.
        """
        [answer] = await self.broker.renew([delivery], self.settings.lock)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(obituary(delivery, "could not renew its lock"))
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

        place: Place | None = None
        if wait > 0:  # also where no other process is heard of: this one may send
            place = self.hearing.join(self.broker, name or self.name, kind, wake)
        try:
            poll = POLL if self.broker.traits.hints else 0.05
            while True:
                woken.clear()
                self.look_after()
                if place is not None:
                    place.asks()
                found, due_in = await look()
                if place is not None:
                    place.answered(found is not None, due_in)
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
            if place is not None:
                place.leave()


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


def obituary(delivery: Delivery, what: str) -> str:
    """Say that a lock is over, and what to do about it."""
    return (
        f"{what}: the lock on message {delivery.id!r} of {delivery.queue!r} (delivery {delivery.delivery_count}) is "
        f"over, as it was settled before or the lock has ended; discard what was done, somebody else may have it"
    )


class Unsettled(Protocol):
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


class Received:
    """A message that was received: its content, and what the broker says of it."""

    __slots__ = ("_delivery", "_locked_until")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._locked_until = 0.0

    @property
    def delivery(self) -> Delivery:
        """What the broker handed out, for whoever settles it in a transaction of his own."""
        return self._delivery

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self._delivery.queue

    @property
    def id(self) -> str:
        """What its sender called it, or the broker."""
        return self._delivery.id

    @property
    def body(self) -> bytes:
        """The content."""
        return self._delivery.body

    @property
    def headers(self) -> Headers:
        """What its sender wrote beside the content."""
        return self._delivery.headers

    @property
    def delivery_count(self) -> int:
        """How many times it was handed out, this time included."""
        return self._delivery.delivery_count

    @property
    def sequence(self) -> int:
        """Its number in the queue."""
        return self._delivery.sequence

    @property
    def lock_token(self) -> str:
        """What proves that it is locked to us; new with every delivery."""
        return f"{self._delivery.token}.{self._delivery.sequence}"

    @property
    def locked_until(self) -> float:
        """When the lock ends, by the broker's wall clock in Unix seconds, if it isn't renewed."""
        return self._locked_until or self._delivery.locked_until

    @property
    def enqueued_at(self) -> float:
        """When it was sent, by the broker's wall clock in Unix seconds."""
        return self._delivery.enqueued_at

    @property
    def session(self) -> str | None:
        """The session it belongs to."""
        return self._delivery.session

    @property
    def priority(self) -> int:
        """0 to 9."""
        return self._delivery.priority

    @property
    def reply_to(self) -> str | None:
        """The queue that waits for the answer."""
        return self._delivery.reply_to

    @property
    def correlation_id(self) -> str | None:
        """What it is an answer to, or what its answer should carry."""
        return self._delivery.correlation_id

    @property
    def reason(self) -> str | None:
        """Why it died; None unless it was received from the dead letters. So are the next three."""
        return self._delivery.death.reason if self._delivery.death else None

    @property
    def description(self) -> str | None:
        """What was said about its death."""
        return self._delivery.death.description if self._delivery.death else None

    @property
    def error(self) -> Failure | None:
        """The last failure before its death."""
        return self._delivery.death.error if self._delivery.death else None

    @property
    def history(self) -> tuple[Attempt, ...]:
        """The deliveries that failed before its death."""
        return self._delivery.death.history if self._delivery.death else ()

    def json(self) -> Any:
        """Return the JSON in the body.

        Raises:
            DecodeError: It is none. A handler that lets this out has its message dead-lettered at once.
        """
        return self._read(loads)

    @overload
    def decode(self, kind: type[T]) -> T: ...
    @overload
    def decode(self, kind: object) -> Any: ...
    def decode(self, kind: Any) -> Any:
        """Return the JSON in the body as a *kind*: what ``send(json=…)`` was given.

        Args:
            kind: A dataclass, TypedDict or NamedTuple, a pydantic model, a msgspec struct; or what can stand in their
                fields, such as ``list[Order]``, ``dict[UUID, Decimal]``, ``Order | None``. Fields it doesn't know are
                ignored, and nothing is turned into another type in silence: ``"7"`` is no ``int``.

        Raises:
            DecodeError: The body is no JSON, or doesn't fit; the message says where. It is a ``ValueError``. A handler
                that lets it out has its message dead-lettered at once, as ``undecodable``.
            ConfigError: Bodies can't be read as a *kind*, whatever is in them.

        Example::

            order = message.decode(Order)
        """
        return self._read(lambda body: decode(body, kind))

    def _read(self, read: Callable[[bytes], Any]) -> Any:
        try:
            return read(self._delivery.body)
        except DecodeError as error:
            error.queue, error.sequence = self._delivery.queue, self._delivery.sequence
            raise

    def __repr__(self) -> str:
        one = self._delivery
        return (
            f"<{type(self).__name__} {one.id!r} of {one.queue!r}, {len(one.body)} bytes, delivery {one.delivery_count}>"
        )


class Message(Received):
    """A message that is locked to us, until it is settled by one of the verbs or the lock ends.

    Each verb returns once the broker has said that it stands, or raises ``LockLost`` (it doesn't: somebody else may
    have the message) or ``Unavailable`` (no answer: it may stand or not).
    """

    __slots__ = ("_desk", "_keeper")

    def __init__(self, delivery: Delivery, desk: Desk, keeper: Unsettled | None = None) -> None:
        self._delivery = delivery
        self._locked_until = 0.0
        self._desk = desk
        self._keeper = keeper

    async def complete(self, *, sends: Sequence[tuple[str, Outgoing]] = (), remember: float = 0.0) -> None:
        """Remove the message for good: it was handled.

        Args:
            sends: Queues and messages to send in the same step, where the store has transactions.
            remember: Note its id in the queue's inbox for so many seconds; see ``Queue.handled``.
        """
        await self._settle(completion(self._desk, sends, remember))

    async def abandon(self, delay: float = 0.0, *, error: BaseException | None = None) -> None:
        """Unlock the message, to be delivered again after *delay* seconds; or dead, if that was its last delivery."""
        check_seconds("delay", delay, least=0.0)
        await self._settle(Abandon(delay, Failure.of(error) if error is not None else None))

    async def defer(self) -> None:
        """Put the message aside, to be received again only by its sequence; see ``Queue.receive_deferred``."""
        await self._settle(Defer())

    async def dead_letter(self, reason: str, description: str = "", *, error: BaseException | None = None) -> None:
        """Move the message to the dead letters.

        Args:
            reason: A word or two, to group and to filter by; up to 255 characters.
            description: For whoever looks at it later; up to 4,096 characters of it are kept.
            error: The exception behind it, if there is one; its type, text and traceback are kept.
        """
        check_text("reason", reason)
        await self._settle(DeadLetter(reason, description, Failure.of(error) if error is not None else None))

    async def give_back(self) -> None:
        """Unlock the message as if it had never been received: this delivery doesn't count."""
        await self._settle(GIVE_BACK)

    async def renew(self) -> float:
        """Extend the lock to its full length again, and return its end; one that lasts longer stays as it is."""
        try:
            self._locked_until = await self._desk.renew(self._delivery)
        except LockLost:
            self._lost()
            raise
        return self._locked_until

    async def reply(self, body: bytes = b"", *, headers: Headers | None = None, json: object = NOT_GIVEN) -> None:
        """Send the answer to ``reply_to``, and complete the message in the same step.

        Raises:
            ConfigError: The message asks for no answer.
        """
        await self._settle(completion(self._desk, [answer_to(self, body, headers, json)], 0.0))

    def note_settling(self) -> None:
        """Take note that it is being settled by other means, as in a transaction of your own that is now committed.

        A renewal that finds it gone meanwhile takes that for no loss. :meth:`note_settled` follows.
        """
        if self._keeper is not None:
            self._keeper.asks(self._delivery)

    def note_settled(self, stands: bool = True) -> None:
        """Take note that it was settled by other means, if that *stands*; the broker isn't asked."""
        if stands:
            self._gone()
        if self._keeper is not None:
            self._keeper.heard(self._delivery)

    async def _settle(self, verdict: Verdict) -> None:
        keeper = self._keeper
        if keeper is not None:
            keeper.asks(self._delivery)
        try:
            await self._desk.settle(self._delivery, verdict, keeper)
        except LockLost:
            self._lost()
            raise
        else:
            self._gone()
        finally:  # Unavailable: it may be ours yet, and be settled once more
            if keeper is not None:
                keeper.heard(self._delivery)

    def _gone(self) -> None:
        if self._keeper is not None:
            self._keeper.settled(self._delivery)

    def _lost(self) -> None:
        if self._keeper is not None and self._keeper.settled(self._delivery):  # so nobody has told of it yet
            desk, one = self._desk, self._delivery
            named = (one.id, one.sequence, one.delivery_count)
            desk.tell(ResultDiscarded(desk.clock.now(), desk.name, desk.holder, *named, "denied"))


class BlockingMessage(Received):
    """A message for threads: as :class:`Message`, but each verb blocks the calling thread until it is answered."""

    __slots__ = ("_call", "_message")

    def __init__(self, message: Message, call: Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]) -> None:
        super().__init__(message._delivery)
        self._message = message
        self._call = call

    @property
    def locked_until(self) -> float:
        """When the lock ends, by the broker's wall clock in Unix seconds, if it isn't renewed."""
        return self._message.locked_until

    def complete(self, *, sends: Sequence[tuple[str, Outgoing]] = (), remember: float = 0.0) -> None:
        """Remove the message for good. See :meth:`Message.complete`."""
        self._call(lambda: self._message.complete(sends=sends, remember=remember))

    def abandon(self, delay: float = 0.0, *, error: BaseException | None = None) -> None:
        """Unlock the message, to be delivered again. See :meth:`Message.abandon`."""
        self._call(lambda: self._message.abandon(delay, error=error))

    def defer(self) -> None:
        """Put the message aside. See :meth:`Message.defer`."""
        self._call(self._message.defer)

    def dead_letter(self, reason: str, description: str = "", *, error: BaseException | None = None) -> None:
        """Move the message to the dead letters. See :meth:`Message.dead_letter`."""
        self._call(lambda: self._message.dead_letter(reason, description, error=error))

    def give_back(self) -> None:
        """Unlock the message uncounted. See :meth:`Message.give_back`."""
        self._call(self._message.give_back)

    def renew(self) -> float:
        """Extend the lock. See :meth:`Message.renew`."""
        end: float = self._call(self._message.renew)
        return end

    def note_settling(self) -> None:
        """Take note that it is being settled by other means. See :meth:`Message.note_settling`."""
        self._message.note_settling()  # which needs no loop: a transaction is open, and is not to wait for one

    def note_settled(self, stands: bool = True) -> None:
        """Take note that it was settled by other means. See :meth:`Message.note_settled`."""

        async def note() -> None:
            self._message.note_settled(stands)

        self._call(note)

    def reply(self, body: bytes = b"", *, headers: Headers | None = None, json: object = NOT_GIVEN) -> None:
        """Send the answer, and complete the message. See :meth:`Message.reply`."""
        self._call(lambda: self._message.reply(body, headers=headers, json=json))


def completion(desk: Desk, sends: Sequence[tuple[str, Outgoing]], remember: float) -> Complete:
    """Return the verdict that completes, sends and remembers; refuse what can't be sent."""
    if not sends and not remember:
        return COMPLETE
    check_seconds("remember", remember, least=0.0)
    body_max, most = desk.settings.body_max, desk.broker.traits.body_max
    ready = [(check_name(queue), checked([message], body_max, most)[0]) for queue, message in sends]
    return Complete(tuple(ready), float(remember))


def answer_to(message: Received, body: bytes, headers: Headers | None, json: object) -> tuple[str, Outgoing]:
    """Return the answer to *message*, and where it goes."""
    if message.reply_to is None:
        raise ConfigError(f"message {message.id!r} of {message.queue!r} has no reply_to: nobody waits for an answer")
    options: SendOptions = {"correlation_id": message.correlation_id or message.id}
    if headers is not None:
        options["headers"] = headers
    return message.reply_to, outgoing(body, json, options)
