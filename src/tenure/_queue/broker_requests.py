"""The requests of a consumer to its broker: carries them out, and returns each answer to the pump."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, NoSession, PushingBroker
from tenure._queue.context import QueueContext
from tenure._queue.effects import (
    Accept,
    Accepted,
    Answered,
    Claimed,
    Look,
    PumpInput,
    Receive,
    ReceiveSession,
    Release,
    Request,
    Settle,
)
from tenure._queue.hints import Subscription
from tenure._queue.pump import Pump
from tenure._queue.stopping import RUNNING
from tenure._queue.verdicts import Lapsed

_NOTHING = Claim(())


class Host(Protocol):
    """The driver of the pump, as its requests use it."""

    @property
    def has_ended(self) -> bool:
        """Whether consuming is over."""
        ...

    def decide(self, event: PumpInput) -> Sequence[Request]:
        """Give *event* to the pump, do what it says, and return the requests that it makes."""
        ...

    def feed_soon(self, event: PumpInput) -> None:
        """Give *event* to the pump together with others, at the end of this iteration of the loop."""
        ...

    def fail(self, error: BaseException) -> None:
        """End at once, and raise *error*."""
        ...


class BrokerRequests:
    """The requests under way, each in a task. A task whose answer brings requests carries on with the first of them.

    Args:
        context: Where the broker is reached.
        lock: The length of a lock in seconds.
        pump: The machine that makes the requests.
        subscription: The consumer's place among those that wait for hints.
        host: The driver of the pump.
    """

    def __init__(self, context: QueueContext, lock: float, pump: Pump, subscription: Subscription, host: Host) -> None:
        self._context = context
        self._lock = lock
        self._pump = pump
        self._subscription = subscription
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, request: Request) -> None:
        """Carry out *request*: at once if what it asks for has come already, else in a task."""
        requests = deque([request])
        while requests:
            request = requests.popleft()
            answer = self._arrived(request)
            if answer is None:
                self._begin_task(request)
            else:
                requests.extend(self._host.decide(answer))

    def _begin_task(self, request: Request) -> None:
        task = self._loop.create_task(self._carry_out(request, self._note(request)))
        if not task.done():  # as it may be if tasks are eager
            self.tasks.add(task)

    def _note(self, request: Request) -> bool:
        """Note in the subscription that *request* looks for messages; return whether its answer is to be noted, too."""
        kind = type(request)
        # Of several accepts at a time, the first is the one that a hint has called for.
        if kind is Receive or (kind is Accept and not self._subscription.is_asking):
            self._subscription.asks()
            return True
        return False

    async def _carry_out(self, request: Request, is_noted: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            while True:
                try:
                    event = await self._ask(request, is_noted)
                except (Exception, asyncio.CancelledError) as error:
                    if is_noted:
                        self._subscription.failed()
                    event = self._unanswered(request.request_id, error)
                if event is None:
                    return
                requests = self._host.decide(event)
                if not requests:
                    return
                request, *others = requests
                is_noted = self._note(request)
                for other in others:
                    self.begin(other)
        finally:  # not by a callback, which takes another step of the loop
            self.tasks.discard(task)

    async def _ask(self, request: Request, is_noted: bool) -> PumpInput | None:
        """Return what is to be given to the pump; None if the host has it already."""
        broker = self._context.broker
        match request:
            case ReceiveSession(request_id, session):
                claim = await broker.receive_session(session, 1)
                if isinstance(claim, Lapsed):
                    return Answered(request_id, [claim])
                self._context.note_claim(claim)
                self._host.feed_soon(_claimed(request_id, claim))
                return None
            case Settle(request_id, settlements):
                return Answered(request_id, await broker.settle(settlements))
            case Receive(request_id, limit, look):
                return await self._receive(request_id, limit, look)
            case Accept(request_id, looks_first):
                return await self._accept(request_id, is_noted, looks_first)
            case Release(request_id, session):
                return Answered(request_id, [await broker.release(session)])

    def _arrived(self, request: Request) -> PumpInput | None:
        """Return the answer to *request* if what it asks for has come to this process already; else None."""
        context, subscription = self._context, self._subscription
        if type(request) is not Receive or not (context.broker.traits.pushes and subscription.may_take_arrived):
            return None
        if not context.is_ready or context.is_check_due:
            return None
        claim = cast(PushingBroker, context.broker).receive_arrived(context.name, request.limit, self._lock)
        if claim is None:
            return None
        context.purge_if_due()
        self._note_answer(claim)
        subscription.note_arrived(found=bool(claim.deliveries), due_in=claim.due_in)
        return _claimed(request.request_id, claim)

    async def _receive(self, request_id: int, limit: int, look: Look) -> Claimed:
        context = self._context
        is_empty = look is not Look.NONE and not await context.looks.holds(context.broker, context.name)
        if is_empty and look is Look.INSTEAD:
            context.purge_if_due()
            claim = _NOTHING
        else:
            await context.ready()
            ask = partial(context.broker.receive, context.name, limit, self._lock)
            claim = await ask()
            if not context.is_ready:
                claim = await context.claim_again(claim, ask)
        self._note_answer(claim)
        self._answered(bool(claim.deliveries), claim.due_in)
        return _claimed(request_id, claim)

    def _note_answer(self, claim: Claim) -> None:
        self._context.has_answered = True
        self._context.note_claim(claim)

    async def _accept(self, request_id: int, is_noted: bool, looks_first: bool) -> Accepted:
        context = self._context
        if looks_first:
            await context.looks.holds(context.broker, context.name)
        await context.ready()
        answer = await context.accept(None, self._lock)
        context.has_answered = True
        if isinstance(answer, NoSession):
            if answer.died:
                context.report_dead(answer.died)
            event = Accepted(request_id, None, answer.due_in, answer.is_held_back)
        else:
            event = Accepted(request_id, answer)
        if is_noted:
            self._answered(event.session is not None, event.due_in)
        return event

    def _answered(self, found: bool, due_in: float | None) -> None:
        if not found and due_in == 0 and self._pump.state is not RUNNING:
            self._subscription.failed()  # the store has not got through yet, and we don't ask again
        else:
            self._subscription.answered(found, due_in)

    def _unanswered(self, request_id: int, error: BaseException) -> PumpInput | None:
        """Return the event that request number *request_id* got no answer, if that is all that *error* says.

        Raises:
            CancelledError: The task was cancelled.
        """
        why = self._context.why_unanswered(error)
        if why is not None:
            return Answered(request_id, NoAnswer(why))
        if not isinstance(error, asyncio.CancelledError):
            self._host.fail(error)
            return None
        if not self._host.has_ended:  # the loop is ending, and the pump waits for each answer
            for request in self._host.decide(Answered(request_id, NoAnswer("the request was cancelled"))):
                self.begin(request)
        raise error


def _claimed(request_id: int, claim: Claim) -> Claimed:
    limits = (claim.is_limited, claim.is_held_back, claim.held_up_for)
    return Claimed(request_id, claim.deliveries, claim.due_in, claim.age, *limits)
