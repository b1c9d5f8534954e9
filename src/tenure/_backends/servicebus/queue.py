"""Queues on Service Bus.

House rules:

- Only the process that received a message can renew and settle it; see ``receipts``.
- A message is as its sender made it. What tenure notes of failures is in application properties of its own.
- There are no transactions in the client library: a copy is sent before the message is completed.
- Entities belong to the namespace: without ``?create=yes`` none is made, changed or deleted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tenure._backends.servicebus.administration import Administration, NoRights
from tenure._backends.servicebus.claiming import Claiming
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.codec import state_in
from tenure._backends.servicebus.dead_letters import DeadLetters
from tenure._backends.servicebus.driver import FAILURES
from tenure._backends.servicebus.feeds import Feeds
from tenure._backends.servicebus.hints import Hints
from tenure._backends.servicebus.limits import check_limits
from tenure._backends.servicebus.live import LiveMessages
from tenure._backends.servicebus.looking import DEFERRED, looked_at
from tenure._backends.servicebus.message_format import outgoing
from tenure._backends.servicebus.places import Places, idle_among, names_of, no_rights
from tenure._backends.servicebus.receipts import Receipts
from tenure._backends.servicebus.renewing import Renewing
from tenure._backends.servicebus.schedules import ServiceBusSchedules
from tenure._backends.servicebus.sending import Sending
from tenure._backends.servicebus.sessions import Sessions
from tenure._backends.servicebus.settling import Settling
from tenure._lease import NoAnswer
from tenure._queue.broker import (
    Advanced,
    Claim,
    LiveSelection,
    NoSession,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Schedules,
    Selection,
)
from tenure._queue.generations import Generations
from tenure._queue.message import (
    DeadMessage,
    Delivery,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.refusals import Refusals, WithoutInbox
from tenure._queue.schedule_steps import ScheduleSteps
from tenure._queue.verdicts import GIVE_BACK, LAPSED, Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure._runtime.notifier import Notifier
from tenure._runtime.remote_clock import RemoteClock
from tenure._runtime.tasks import Tasks
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

QUEUE_TRAITS = QueueTraits(
    lock_min=5.0,
    lock_max=300.0,
    body_max=1_000_000,  # of the Premium tier, with room for properties; a namespace may take less
    fencing="native",
    renewal="native",
    dead_letters="native",
    delay="native",
    delay_lag=1.0,  # the service promises not to be early
    priorities="impossible",
    sessions="native",
    deferral="native",
    dedupe="native",
    dedupe_min=20.0,
    inbox="impossible",
    order="native",
    transactions=False,
    peek="native",
    exact_stats=False,
    hints=True,
    lock_per_claim=False,
    mixed_sessions=False,
    sequences_restart=True,
    case_sensitive=False,
    schedules="emulated",
    limits="impossible",
    tells_holder=False,
    pushes=True,
)

CHECK_EVERY = 60.0
"""Seconds after which a process that uses a queue reads its settings again: no sender sees that it was made anew."""


class ServiceBusBroker(WithoutInbox):
    """A ``Broker`` on Service Bus."""

    refusals = Refusals("queues on Service Bus", QUEUE_TRAITS)

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.generations = Generations(CHECK_EVERY)
        self._clock = RemoteClock(namespace.clock)
        self._notifier = Notifier()
        self._administration = Administration(namespace, self._clock)
        self._places = Places(namespace, self._administration, self.generations)
        self._receipts = Receipts(namespace.clock)
        self._sending = Sending(namespace, self._places)
        self._sessions = Sessions(namespace, self._places, self._receipts)
        self._settling = Settling(namespace, self._places, self._receipts, self._sending, self._clock)
        self._feeds = Feeds(namespace, self._places, self._sessions, self._notifier)
        common = (namespace, self._places, self._receipts, self._sessions, self._feeds)
        self._claiming = Claiming(*common, self._clock, self._notifier)
        self._renewing = Renewing(*common)
        self._dead_letters = DeadLetters(namespace, self._places, self._sending, self._clock, self._feeds)
        self._live = LiveMessages(*common, self._administration, self._clock)
        self._tasks = Tasks()
        self._kept = ServiceBusSchedules(namespace, self._places, self._administration, self._clock)
        self._schedules = ScheduleSteps(self._kept, self.send, namespace.clock)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    @property
    def administration(self) -> Administration:
        """The namespace's entities, for the diagnosis."""
        return self._administration

    def close(self) -> None:
        """End the hints."""
        self._notifier.close()

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, if entities may be changed; else compare them."""
        return await self._run(partial(self._places.declare, queue, changes, only_undeclared=only_undeclared))

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings that hold for *queue*: those of its entity."""
        return await self._run(partial(self._places.settings, queue, fresh=True))

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Send *messages* in as few transfers as they fit into; return their ids. On an exception, some may be sent."""
        self.refusals.check_messages(messages, check_limits)
        named = [message if message.id is not None else _with_id(message) for message in messages]
        has_sessions = any(message.session is not None for message in messages)

        async def send() -> None:
            await self._places.path_of(queue, sessions=has_sessions)  # so that the service's clock is known
            now = self._clock.now()
            await self._sending.send(queue, [outgoing(one, now) for one in named], sessions=has_sessions)

        if messages:
            await self._run(send)
        return [str(message.id) for message in named]

    # --- schedules ---

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        return await self._schedules.schedules(queue)

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        """Keep *record* of a schedule in place of *expected*, and send *messages*: in steps, see ``schedule_steps``."""
        self.refusals.check_messages(messages, check_limits)
        return await self._schedules.advance(queue, schedule, expected, record, messages, not_before)

    # --- receiving ---

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when a message of *queue* has come to this process, or a session may be free."""
        listener = self._notifier.listen(queue)
        self._namespace.post(lambda: self._feeds.listen(queue))
        return Hints(listener, lambda: self._namespace.post(lambda: self._feeds.leave(queue)))

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages, for as long as the entity's locks last."""
        arrived = self.receive_arrived(queue, limit, lock)
        if arrived is not None:
            return arrived
        return await self._claimed(partial(self._claiming.receive, queue, limit), self._give_back)

    def receive_arrived(self, queue: str, limit: int, lock: float) -> Claim | None:
        """Claim what has come already for those that wait; None if nothing has."""
        return self._claiming.receive_ready(queue, limit)

    async def _claimed(self, claim: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[object]]) -> T:
        """Return the answer to *claim*; *undo* it if it came just as the caller was cancelled: nobody takes it then."""
        come: list[T] = []

        async def noted() -> T:
            come.append(await claim())
            return come[0]

        async def undone() -> None:
            for answer in come:
                with suppress(*FAILURES, TenureError):
                    async with asyncio.timeout(self._namespace.options.timeout):
                        await undo(answer)

        try:
            return await self._run(noted)
        except asyncio.CancelledError:
            self._namespace.post(lambda: self._tasks.spawn(undone()))
            raise

    async def _give_back(self, claim: Claim) -> None:
        await self._settling.settle([Settlement(one, GIVE_BACK) for one in claim.deliveries])

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim deferred messages by their sequences, each by a request of its own."""
        claim = partial(self._claiming.receive_deferred, queue, list(dict.fromkeys(sequences)))
        return await self._claimed(claim, self._give_back)

    # --- renewing and settling ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks: those of a queue in one request, as long as none of them is over."""
        return await self._run(partial(self._renewing.renew, held))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts, all before the first answer; each has its own answer, or ``NoAnswer``."""
        for delivery, verdict in settlements:
            self.refusals.check_verdict(delivery, verdict, check_limits)
        answers = await self._run(partial(self._settling.settle, settlements))
        unanswered = [one for one in answers if isinstance(one, NoAnswer)]
        if unanswered and len(unanswered) == len(answers):
            raise Unavailable(unanswered[0].why)
        return answers

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock a session, for as long as the entity's locks last."""
        return await self._claimed(partial(self._claiming.accept, queue, session), self._claiming.unlock)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session; a retry of this process holds up those behind it."""
        return await self._claimed(partial(self._claiming.receive_session, held, limit), self._claiming.put_back)

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session, by detaching its link."""
        return await self._run(partial(self._sessions.release, held))

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return the state last stored for this session."""
        answer = await self._run(partial(self._sessions.ask, held, "get-session-state"))
        return LAPSED if isinstance(answer, Lapsed) else state_in(answer)

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store *state* for this session."""
        body = {"session-state": None if state is None else bytearray(state)}
        answer = await self._run(partial(self._sessions.ask, held, "set-session-state", body))
        return LAPSED if isinstance(answer, Lapsed) else Settled()

    # --- looking, and what is done to many ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*; see ``live``."""
        return await self._run(partial(self._live.stats, queue))

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages in order of sequence."""
        return await self._run(partial(self._live.peek, queue, which, limit), within=self._long)

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good."""
        return await self._run(partial(self._live.purge, queue, which, dry_run=dry_run), within=self._long)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages in order of sequence."""

        async def look() -> list[Delivery]:
            shown: list[Delivery] = []
            async for found, _ in looked_at(self._namespace, await self._places.existing(queue), queue, after):
                if len(shown) >= limit:
                    break
                if found.state == DEFERRED:
                    shown.append(found.delivery(queue, "")._replace(delivery_count=found.count))
            return shown

        return await self._run(look, within=self._long)

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters in order of sequence."""
        return await self._run(partial(self._dead_letters.peek, queue, which, limit), within=self._long)

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, or into another."""
        act = partial(self._dead_letters.redrive, queue, which, limit, dry_run=dry_run, to=to)
        return await self._run(act, within=self._long)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._run(partial(self._dead_letters.purge, queue, which, limit), within=self._long)

    # --- queues ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete the entity of *queue*, if entities may be deleted: its messages are counted before.

        Then its schedules are deleted, but for those that were advanced meanwhile.
        """
        self._may_change("deleting a queue")
        stats = await self.stats(queue)
        if count_of(stats) and not force:
            return NotEmpty(stats)
        texts = await self._kept.texts(queue)

        async def delete() -> None:
            path = await self._places.existing(queue)
            if path is not None:
                await self._managed(self._administration.delete(path), "deleting a queue")
                await self._namespace.forget(path.node)
            self._receipts.forget_queue(queue)
            self._places.forget(queue)
            if texts is None or texts:
                await self._kept.forget(queue, texts)

        await self._run(delete)
        return Deleted(stats)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Note in the entity when it may be deleted."""
        self._may_change("noting when a queue may be deleted")

        async def note() -> None:
            await self._places.path_of(queue)  # so that the service's clock is known
            await self._places.note(queue, self._clock.now() + seconds)

        await self._run(note)

    async def idle(self) -> Sequence[str]:
        """List the queues that have been idle for their time."""
        if not self._namespace.options.create:
            return []
        rows = await self._run(lambda: self._managed(self._administration.queues(), "listing queues"))
        return idle_among(rows, self._clock.now())[:100]

    async def names(self) -> Sequence[str]:
        """List every queue of the namespace; without the right to, those that this process has used."""

        async def list_names() -> list[str]:
            try:
                return names_of(await self._administration.queues())
            except NoRights:
                return self._places.known

        return await self._run(list_names)

    # --- inner ---

    @property
    def _long(self) -> float:
        """Seconds for what goes through many messages."""
        return self._namespace.options.timeout * 6

    async def _run(self, request: Callable[[], Coroutine[Any, Any, T]], *, within: float | None = None) -> T:
        return await self._namespace.run(request, within=within)

    async def _managed(self, request: Awaitable[T], what: str) -> T:
        try:
            return await request
        except NoRights:
            raise no_rights(self._namespace, what) from None

    def _may_change(self, what: str) -> None:
        if not self._namespace.options.create:
            raise ConfigError(f"{what} needs ?create=yes in the URL, and the right Manage: entities are not tenure's")


def _with_id(message: Outgoing) -> Outgoing:
    """Return *message* with an id, under which the service looks for duplicates."""
    return replace(message, id=uuid.uuid4().hex)
