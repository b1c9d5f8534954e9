"""Sessions: the messages of one key, in order, to one consumer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType

from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, NoSession
from tenure._queue.cancelling import wait_through_cancellation
from tenure._queue.checks import check_count
from tenure._queue.context import QueueContext
from tenure._queue.effects import LocksEnded, LocksMessage
from tenure._queue.lock_group import LockGroup
from tenure._queue.lock_renewer import LockRenewer
from tenure._queue.locks import Locks
from tenure._queue.message import SessionLock, Token
from tenure._queue.pump_settings import PumpSettings, lock_trusted_until
from tenure._queue.received import Message
from tenure._queue.verdicts import Lapsed
from tenure._timing import Timing
from tenure.errors import ConfigError, LockLost, TimedOut, Unavailable

FOREVER = 1e9


class Session:
    """A session that is locked to this process, as a block: ``async with queue.session() as session:``.

    Its lock is renewed while the block runs. When the lock is lost all the same, the block is cancelled, and raises
    ``LockLost``. At the end of the block, unsettled messages are given back uncounted, and the session is free.

    Iterating yields its messages, one by one and in order, until none is waiting.

    Attributes:
        name: The ``session=`` that the messages were sent with.
        state: The value last stored with :meth:`set_state`, by any holder of the session; None if there is none.
        lost: An ``asyncio.Event``, set when the lock is lost.
    """

    name: str
    state: bytes | None
    lost: asyncio.Event

    def __init__(self, context: QueueContext, name: str | None, wait: float | None) -> None:
        self._context = context
        self._asked_for = name
        self._wait = FOREVER if wait is None else wait
        self._held: SessionLock | None = None
        self._renewer: LockRenewer | None = None
        self._group: LockGroup
        self._owner: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._interrupted = False
        self.lost = asyncio.Event()

    def __repr__(self) -> str:
        if self._held is None:
            return f"<Session {self._asked_for or 'any'!r} of {self._context.name!r}, not entered>"
        left = self.remaining()
        return f"<Session {self.name!r} of {self._context.name!r}, {f'{left:.3g} s left' if left else 'over'}>"

    async def __aenter__(self) -> Session:
        await self._context.ready()
        held, asked_at = await self._accept()
        self._held, self.name, self.state = held, held.session, held.state
        try:
            await self._keep(held, asked_at)
            self._lock()  # it may be lost again by now, if the loop was blocked
        except BaseException:
            await self._end()
            self.lost.set()
            raise
        # Only now, as there is a block to cancel: a caller whose entry failed must not be cancelled later.
        self._owner = asyncio.current_task()
        self._cancelling = self._owner.cancelling() if self._owner else 0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._context.renewal_thread.is_forked:  # the session stayed with the parent
            return
        owner, self._owner = self._owner, None  # from here on, the loss of the lock doesn't cancel us
        ours = False
        try:
            cancellation = await self._end()
        finally:
            # As in asyncio.timeout: raise LockLost only if nothing else has cancelled the task as well.
            if self._interrupted and owner is not None:
                ours = owner.uncancel() <= self._cancelling
        if ours and (kind is None or issubclass(kind, (asyncio.CancelledError, LockLost))):
            raise LockLost(self._loss_message()) from error
        if cancellation is not None and not ours:
            raise cancellation

    async def withdraw(self, error: BaseException | None = None) -> None:
        """Leave the block if it was entered: for a caller that may have been interrupted while it entered."""
        if self._owner is not None:
            await self.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def _end(self) -> asyncio.CancelledError | None:
        """Stop renewing the lock, and release it if it is ours; return the first cancellation that came meanwhile.

        A cancellation does not prevent this: otherwise the lock would be renewed for ever.
        """
        assert self._held is not None
        cancellation = None
        try:
            if self._renewer is not None:
                cancellation = await wait_through_cancellation(self._renewer.end())
        finally:
            if not self.lost.is_set():
                releasing = asyncio.ensure_future(self._context.broker.release(self._held))
                cancellation = await wait_through_cancellation(releasing) or cancellation
        return cancellation

    async def receive(self, max: int = 1, *, wait: float = 0.0) -> list[Message]:  # noqa: A002  # as Queue.receive
        """Return the next up to *max* messages, in order; wait so many seconds for the first.

        A message that was abandoned with a delay blocks those behind it until it is due.

        Raises:
            LockLost: The session is no longer ours.
        """
        check_count("max", max)
        held, context = self._lock(), self._context

        async def look() -> tuple[list[Message] | None, float | None]:
            claim = await context.claim(lambda: context.broker.receive_session(held, max))
            if not isinstance(claim, Claim):
                raise LockLost(self._loss_message())
            return [Message(one, context) for one in claim.deliveries] or None, claim.due_in

        return await context.wait_for(look, wait, kind=self) or []

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        while messages := await self.receive():
            yield messages[0]

    async def set_state(self, state: bytes | None) -> None:
        """Store *state* for this session, for its next holder. None removes it.

        Raises:
            ConfigError: *state* is neither bytes nor None.
            LockLost: The session is no longer ours.
        """
        given: object = state
        if isinstance(given, (bytearray, memoryview)):
            state = bytes(given)
        elif given is not None and not isinstance(given, bytes):
            raise ConfigError(f"a session's state must be bytes or None, not {type(given).__name__}; encode it")
        if isinstance(await self._context.broker.write_state(self._lock(), state), Lapsed):
            raise LockLost(self._loss_message())
        self.state = state

    async def renew(self) -> float:
        """Extend the lock now (it is also renewed in the background), and return its new end.

        Raises:
            LockLost: The session is no longer ours.
        """
        [answer] = await self._context.broker.renew([self._lock()], self._context.settings.lock)
        if isinstance(answer, NoAnswer):
            raise Unavailable(answer.why)
        if isinstance(answer, Lapsed):
            raise LockLost(self._loss_message())
        return answer.locked_until

    def remaining(self) -> float:
        """Return for how many seconds the lock is safe to rely on without another renewal; 0.0 if it is over.

        In a forked child it is 0.0: the session belongs to the process that accepted it.
        """
        if self.lost.is_set() or self._context.renewal_thread.is_forked:
            return 0.0
        return max(0.0, self._group.trusted_until - self._context.clock.now())

    def _lock(self) -> SessionLock:
        if self._held is None or self.lost.is_set():
            raise LockLost(self._loss_message())
        return self._held

    async def _accept(self) -> tuple[SessionLock, float]:
        context = self._context
        asked_at, is_held_back = 0.0, False

        async def look() -> tuple[SessionLock | None, float | None]:
            nonlocal asked_at, is_held_back
            asked_at = context.clock.now()
            asking = asyncio.ensure_future(context.accept(self._asked_for, context.settings.lock))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                asking.add_done_callback(self._release)  # a session that is accepted later must not stay locked
                raise
            if isinstance(answer, NoSession):
                context.report_dead(answer.died)
                context.has_answered = True
                is_held_back = answer.is_held_back
                return None, answer.due_in
            return answer, None

        held = await context.wait_for(look, self._wait, kind=("session", self._asked_for))
        if held is None:
            what = "no free session has a message" if self._asked_for is None else "it is locked to another consumer"
            if is_held_back:
                what = "the limits of the queue, or its pause, keep back the messages of those that are free"
            named = "" if self._asked_for is None else f"session {self._asked_for!r} of "
            raise TimedOut(f"{named}{context.name!r} could not be locked within {self._wait:g} s: {what}")
        return held, asked_at

    def _release(self, asked: asyncio.Future[SessionLock | NoSession]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        if isinstance(held := asked.result(), NoSession):
            self._context.report_dead(held.died)
        else:
            releasing = self._context.begin_chore(self._context.broker.release(held), "tenure-release")
            releasing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _keep(self, held: SessionLock, asked_at: float) -> None:
        context = self._context
        timing = Timing(context.settings.lock)
        group = LockGroup(
            held.token, 1, lock_trusted_until(asked_at, timing), asked_at + timing.renew_every, session=held
        )
        self._group = group
        groups: dict[Token, LockGroup] = {held.token: group}
        locks = Locks(context.name, context.holder, PumpSettings(timing), context.rng, groups, now=context.clock.now())
        self._renewer = LockRenewer(context, locks, self._on_locks_message)
        if cancellation := await wait_through_cancellation(self._renewer.begin()):
            raise cancellation

    def _on_locks_message(self, message: LocksMessage) -> None:
        if self.lost.is_set() or not isinstance(message, LocksEnded):
            return
        self.lost.set()
        if self._owner is not None:
            self._interrupted = True
            self._owner.cancel()

    def _loss_message(self) -> str:
        return (
            f"the lock on session {getattr(self, 'name', self._asked_for)!r} of {self._context.name!r} is over; stop "
            "acting on its messages, another consumer may have it"
        )
