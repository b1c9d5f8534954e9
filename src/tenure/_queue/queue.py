"""A queue as its users see it.

What a sender doesn't need is imported where it is used; ``tenure.Message`` loads the type that it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Unpack

import tenure
from tenure._checks import check_seconds
from tenure._queue.broker import (
    Claim,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    checked_changes,
    expectations,
    settings_with,
)
from tenure._queue.checks import check_count, check_sequences, check_text
from tenure._queue.context import QueueContext
from tenure._queue.message import NO_HEADERS, Headers, LiveMessage, State, Stats
from tenure._queue.outgoing import NOT_GIVEN, Outgoing, SendOptions, outgoing
from tenure._queue.producer import OpenRequests, Producer
from tenure._queue.running import RunningConsumers
from tenure._queue.verdicts import NotEmpty
from tenure.errors import ConfigError, QueueNotEmpty

PEEK_MAX = 10_000
"""The most messages that one call looks at."""


class Queue:
    """A queue of messages, each for one of the consumers that compete for them. Made by ``backend.queue(name, …)``.

    Attributes:
        name: Its name, the same in all programs that use it.
    """

    name: str

    def __init__(self, context: QueueContext, requests: OpenRequests | None = None) -> None:
        self.name = context.name
        self._context = context
        self._producer = Producer(context)
        self._requests = OpenRequests() if requests is None else requests  # shared by all queues of one backend
        self._running = RunningConsumers()
        self._dead_letters: tenure.DeadLetters | None = None
        self._schedules: tenure.Schedules | None = None

    @property
    def dead_letters(self) -> tenure.DeadLetters:
        """The messages that could not be handled."""
        if self._dead_letters is None:
            self._dead_letters = tenure.DeadLetters(self._context)
        return self._dead_letters

    @property
    def schedules(self) -> tenure.Schedules:
        """The schedules that send to it."""
        if self._schedules is None:
            self._schedules = tenure.Schedules(self._context)
        return self._schedules

    @property
    def traits(self) -> QueueTraits:
        """The abilities of queues on this store: each is native, emulated or impossible."""
        return self._context.broker.traits

    # --- settings ---

    async def declare(self, **settings: Unpack[QueueOptions]) -> QueueSettings:
        """Make the queue unless there is one, change the settings that are given, and return those that hold then.

        They hold for every process, until they are declared otherwise; those that are not given stay as they are.
        ``max_deliveries``, ``dedupe_window``, the limits and ``paused`` count at once, also for messages sent before;
        ``lock`` and ``body_max`` from when a process next gets the queue from ``backend.queue``, or asks for
        :meth:`settings`, and a consumer takes its ``lock`` when it begins.

        Args:
            settings: As for :meth:`tenure.Backend.queue`; and ``paused``: with True, no consumer of the whole fleet
                receives messages of this queue, until it is declared False. Those that were received stay with their
                consumers, and messages can be sent. (To pause only the consumers here: :meth:`pause`.)

        Raises:
            ConfigError: A setting can't work, or doesn't fit this backend.
            Unavailable: There was no answer: they may be declared or not.
        """
        context = self._context
        changes = checked_changes("declare", settings)
        settings_with(changes, context.broker.traits)
        holds = await context.broker.declare(self.name, changes)
        if context.expected:
            context.expected = {**context.expected, **expectations(changes)}
        return context.go_by(holds)

    async def settings(self) -> QueueSettings:
        """Return the settings that hold, and go by them from now on."""
        return self._context.go_by(await self._context.broker.settings(self.name))

    # --- sending ---

    async def send(
        self,
        body: bytes = b"",
        *,
        json: object = NOT_GIVEN,
        id: str | None = None,  # noqa: A002  # the field's word for it
        headers: Headers | None = None,
        delay: float = 0.0,
        at: datetime | float | None = None,
        expires_in: float | None = None,
        session: str | None = None,
        priority: int = 0,
        reply_to: str | None = None,
        correlation_id: str | None = None,
    ) -> str:
        """Send a message; return its id once it is kept as safely as the backend keeps anything.

        Args:
            body: The content, as bytes.
            json: Instead of *body*: a value to be sent as JSON; also a dataclass, a pydantic model, a msgspec struct.
            id: Names the message. Another with the same id within the queue's ``dedupe_window`` is not kept: send
                again after ``Unavailable``, and it is there once.
            headers: Text names; values are text, whole numbers, numbers or booleans. Up to 65,536 bytes in all.
            delay: Seconds before it can be received.
            at: The moment from which it can be received: an aware ``datetime``, or Unix seconds.
            expires_in: Seconds from now after which it is dead-lettered if it was not received.
            session: Messages with the same session are received in order, by one consumer at a time.
            priority: 0 to 9; higher ones are received first.
            reply_to: The queue to send an answer to.
            correlation_id: An id that the answer will carry, to be matched by.

        Raises:
            ConfigError: It can't be sent as it is; nothing was.
            Unavailable: There was no answer: it may have been sent or not.
        """
        options: SendOptions = {
            "id": id,
            "headers": NO_HEADERS if headers is None else headers,
            "delay": delay,
            "at": at,
            "expires_in": expires_in,
            "session": session,
            "priority": priority,
            "reply_to": reply_to,
            "correlation_id": correlation_id,
        }
        return await self._producer.send(outgoing(body, json, options))

    async def send_batch(self, messages: Iterable[Outgoing]) -> list[str]:
        """Send many messages in one step, all or none; return their ids in order.

        Raises:
            ConfigError: One of them can't be sent as it is. None was; the message says which one.
            Unavailable: There was no answer: they may have been sent or not.

        Example::

            await queue.send_batch([tenure.Outgoing(line) for line in lines])
        """
        return await self._producer.send_batch(messages)

    async def request(
        self,
        body: bytes = b"",
        *,
        timeout: float = 30.0,
        json: object = NOT_GIVEN,
        **options: Unpack[SendOptions],
    ) -> tenure.Received:
        """Send a message and return the answer to it, which its handler sends with ``message.reply(…)``.

        Args:
            body, json: The content, as for :meth:`send`.
            timeout: How many seconds to wait for the answer.
            options: As for :meth:`send`.

        Raises:
            TimedOut: No answer came in time. One that comes later is kept among the dead letters of the reply
                queue, with the reason ``request_ended``.
        """
        _ = tenure.Received  # loads the type of the answer under its public name
        requests = self._requests.here(self._context)
        return await requests.ask(self._producer, outgoing(body, json, options), timeout)

    # --- receiving ---

    async def receive(self, max: int = 1, *, wait: float = 0.0) -> list[tenure.Message]:  # noqa: A002  # as it reads best
        """Lock up to *max* messages to us, and return them.

        Each must be settled by one of its verbs before its lock ends (see ``Message.renew``): else it is delivered
        again, to any consumer. Messages of sessions come through :meth:`session` only.

        Args:
            max: The most to return.
            wait: How many seconds to wait for the first.

        Raises:
            Unavailable: The broker could not be asked.
        """
        check_count("max", max)
        context = self._context
        await context.ready()

        async def look() -> tuple[list[tenure.Message] | None, float | None]:
            claim = await context.claim(lambda: context.broker.receive(context.name, max, context.settings.lock))
            assert isinstance(claim, Claim)
            return [tenure.Message(one, context) for one in claim.deliveries] or None, claim.due_in

        return await context.wait_for(look, wait) or []

    async def receive_deferred(self, *sequences: int) -> list[tenure.Message]:
        """Lock deferred messages by their ``sequence``; those that are gone or locked are left out."""
        check_sequences("a sequence", sequences)
        context = self._context
        await context.ready()
        claim = await context.claim(
            lambda: context.broker.receive_deferred(context.name, sequences, context.settings.lock)
        )
        assert isinstance(claim, Claim)
        return [tenure.Message(one, context) for one in claim.deliveries]

    async def peek_deferred(self, limit: int = 100, *, after: int = 0) -> list[tenure.Received]:
        """Return deferred messages with a sequence above *after*, in order, without locking them."""
        check_count("limit", limit)
        check_sequences("after", [after])
        return [tenure.Received(one) for one in await self._context.broker.peek_deferred(self.name, limit, after)]

    def session(self, name: str | None = None, *, wait: float | None = None) -> tenure.Session:
        """Lock a session as a block, entered once it is ours: that called *name*, or the next free one with messages.

        Args:
            name: The ``session=`` that its messages were sent with.
            wait: How many seconds to wait for it, before ``TimedOut``; for ever if None.

        Example::

            async with queue.session() as session:
                async for message in session:
                    await apply(message)
                    await message.complete()
        """
        if name is not None:
            check_text("session", name, optional=True)
        return tenure.Session(self._context, name, wait)

    # --- consuming ---

    async def consume(
        self, handler: tenure.Handler, *, stop: asyncio.Event | None = None, **options: Unpack[tenure.ConsumeOptions]
    ) -> None:
        """Call *handler* with message after message, until stopped: the message pump.

        If it returns, the message is completed. If it raises, the message is delivered again, after growing delays, and
        dead-lettered after ``max_deliveries``. To decide that itself, it returns or raises ``Retry(delay=…)`` or
        ``Reject(reason, description)``; to answer a request, it returns ``Reply(…)``. If it lets out the
        ``DecodeError`` of ``message.decode(…)``, the message is dead-lettered at once, as ``undecodable``.
        Locks are renewed as long as it runs; when one is lost, the handler is cancelled before the lock ends.

        Args:
            handler: ``handler(message)``. Async ones run on this loop with a ``Message``, plain functions in threads
                with a ``tenure.sync.Message``, or in processes with a ``Received``; see *run_in*.
            stop: Set it to end gracefully: as :meth:`drain`, and as SIGTERM and SIGINT if nothing else handles them.
            concurrency: How many handlers run at once; 10 if unset.
            sessions: Whether to consume the messages of sessions, and only those: ``concurrency`` sessions at a time,
                the messages of each in order, one after the other. A failed one holds up those after it.
            prefetch: How many messages may wait in the buffer at most; 500 if unset. The handler's pace
                decides how many do; those that wait too long are given back, uncounted. Sessions have no buffer, nor
                have queues with limits.
            max_bytes: How many bytes the bodies of all messages in hand, waiting or with a handler, may have; 128 MiB
                if unset. No more are claimed meanwhile, so fewer handlers than *concurrency* may run. It is exceeded
                by one claim at most: by 4 MiB and a body, on most stores. Of a session, one message is in hand.
            max_hold: How many seconds a handler may run before it is cancelled, and its message abandoned; an hour if
                unset, ``math.inf`` for any number.
            grace: How many seconds handlers have to finish when consuming stops; 25 if unset. Unfinished messages
                are given back, uncounted.
            retry: How long to wait before a failed message is delivered again: a ``RetryPolicy``.
            auto_complete: False leaves it to the handler to settle each message by its verbs. One that it leaves
                unsettled stays locked, until ``max_hold`` is over.
            on_error: Called with the message and the exception at every failure, lost locks included; async or not. An
                async one has 10 seconds. Its exceptions are reported to the loop's exception handler.
            run_in: ``"process"`` runs plain functions in processes: for work that keeps a processor busy. They must be
                importable, and their message has no verbs. A process has one message at a time, and is killed when
                its lock is lost, or ``max_hold`` or the grace of a drain is over.
            inbox_window: For how many seconds to remember the ids of completed messages; one whose id is remembered is
                completed without calling the handler.
            until_empty: End as soon as nothing is ready, nothing runs, and nothing that this call has abandoned (its
                handler failed, or asked for it) still waits to be delivered again. It doesn't wait for
                messages that others have delayed or locked; it does for those that the queue's limits keep back, or
                that its pause does.
            raise_errors: End at the first exception of a handler, and raise it here, for tests; its message is
                abandoned as usual, the other handlers are cancelled and their messages given back. ``Retry`` and
                ``Reject`` don't count.
            sigterm: Whether SIGTERM or a first SIGINT ends it gracefully. They do where tenure leads or consumes in the
                main thread, and nothing else has handled the signal before; with False, never. A second SIGINT cancels
                the handlers. A call that begins after a first one leaves SIGINT alone.
            poll_every: How many seconds between looks for messages if no hint comes; 5 if unset.
            wait: How many seconds to wait for a store that can't be asked when consuming begins, before
                ``Unavailable``: for ever if unset, 0 for not at all. Once the store has answered, an outage ends
                nothing.

        Raises:
            ConfigError: An option can't work, or the broker can never be used as it is.
            Unavailable: *wait* was given, and is over.
        """
        await self.consumer(handler, **options).run(stop)

    def consumer(self, handler: tenure.Handler, **options: Unpack[tenure.ConsumeOptions]) -> tenure.Consumer:
        """Return the pump that :meth:`consume` runs, to be run with ``await consumer.run()``.

        Args:
            handler: ``handler(message)``, async or not.
            options: As for :meth:`consume`.

        Raises:
            ConfigError: An option can't work.
        """
        from tenure._queue.options import ConsumeSettings

        consuming = ConsumeSettings.given(options)
        return tenure.Consumer(self._context, handler, consuming, self._running.keeping)

    def pause(self) -> None:
        """Let the calls of :meth:`consume` here claim nothing, and give their buffers back, until :meth:`resume`.

        To pause the queue for all processes: ``await queue.declare(paused=True)``.
        """
        self._running.pause()

    def resume(self) -> None:
        """Let them claim again."""
        self._running.resume()

    async def drain(self, grace: float | None = None) -> None:
        """End the calls of :meth:`consume` here: let handlers finish for *grace* seconds; return when all have ended.

        Called by a handler, it doesn't wait, as it would for itself.

        Args:
            grace: Unset, the ``grace`` of ``consume``.
        """
        _check_grace(grace)
        await self._running.drain(grace)

    def _begin_drain(self, grace: float | None) -> None:
        """End the calls of :meth:`consume` here as :meth:`drain` does, but don't wait; from any thread."""
        _check_grace(grace)
        self._running.begin_drain(grace)

    # --- looking on ---

    async def stats(self) -> Stats:
        """Count the messages, each in one place: ``ready, locked, delayed, deferred, dead``; and ``oldest_age``."""
        return await self._context.broker.stats(self.name)

    async def peek(
        self,
        limit: int = 100,
        *,
        states: Collection[State] | None = None,
        ids: Collection[str] | None = None,
        sequences: Collection[int] | None = None,
        session: str | None = None,
        sent_before: float | None = None,
        after: int = 0,
    ) -> list[LiveMessage]:
        """Return up to *limit* live messages in order of their sequence, without locking or counting them.

        All conditions that are given must hold. Those of a queue in Azure Storage are the first 32 that are ready.

        Args:
            limit: The most to return; 10,000 at most.
            states: Those in one of these: ``ready``, ``locked``, ``delayed``, ``deferred``. All, if unset.
            ids, sequences: Those with one of these ids, or sequences.
            session: Those of this session.
            sent_before: Those sent before this moment, in Unix seconds.
            after: Begin behind this sequence.

        Raises:
            ConfigError: A condition can't be, or the backend can't look for it.

        Example::

            for message in await queue.peek(10, states=["delayed"]):
                print(message.id, message.due_at)
        """
        from tenure._queue.selections import select_live

        check_count("limit", limit, most=PEEK_MAX)
        check_sequences("after", [after])
        which = replace(select_live(states, ids, sequences, session, sent_before), after=after)
        return list(await self._context.broker.peek(self.name, which, limit))

    async def purge(
        self,
        *,
        states: Collection[State] | None = None,
        ids: Collection[str] | None = None,
        sequences: Collection[int] | None = None,
        session: str | None = None,
        sent_before: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove live messages for good, all of them or those chosen; return how many.

        Those that are locked stay with their consumers: to remove these, too, :meth:`delete` the queue by force.
        Dead letters and messages sent meanwhile stay, too. Others may use the queue at the same time; it works
        in portions, so that they don't wait for it. The ids that were sent stay remembered.

        Args:
            states: Those in one of these: ``ready``, ``delayed``, ``deferred``. All three, if unset.
            ids, sequences, session, sent_before: As for :meth:`peek`.
            dry_run: Only count them.

        Raises:
            ConfigError: A condition can't be, or the backend can't look for it. Nothing was removed.
            Unavailable: There was no answer; some of them may be removed.
        """
        from tenure._queue.selections import select_live

        which = select_live(states, ids, sequences, session, sent_before)
        if "locked" in (which.states or ()):
            raise ConfigError(
                "locked messages can't be purged, as a consumer has them; leave 'locked' out, or delete the "
                "queue by force"
            )
        return await self._context.broker.purge_live(self.name, which, dry_run=dry_run)

    async def handled(self, *ids: str) -> list[bool]:
        """Tell which *ids* a completion with ``remember``, or a consumer with ``inbox_window``, still remembers."""
        for one in ids:
            check_text("id", one)
        return await self._context.handled(ids)

    async def delete(self, *, force: bool = False) -> Stats:
        """Delete the queue with its settings, its sessions' states and the ids remembered for it; return its counts.

        Its next use creates it anew, and declares again the settings that ``backend.queue`` expects here.

        Args:
            force: Whether to delete it with the messages and dead letters in it. Locks on them lapse.

        Raises:
            QueueNotEmpty: There are messages or dead letters in it, and *force* is not set. Nothing has changed.
            Unavailable: There was no answer: it may be deleted or not; with *force*, in part.
        """
        answer = await self._context.broker.delete(self.name, force=force)
        if isinstance(answer, NotEmpty):
            raise QueueNotEmpty(
                f"could not delete {self.name!r}: it holds {answer.stats}; consume, redrive or purge "
                "them, or delete it by force"
            )
        self._context.forget()
        return answer.stats

    async def close(self) -> None:
        """End consumers and requests here at once, cancelling handlers. The backend does it when it is closed."""
        await self._running.end()
        await self._context.rest()
        for requests in self._requests.take(self.name):
            await requests.close()

    def __repr__(self) -> str:
        consumers = f", {len(self._running)} consuming" if self._running else ""
        return f"<Queue {self.name!r}, lock {self._context.settings.lock:g} s{consumers}>"


def _check_grace(grace: float | None) -> None:
    if grace is not None:
        check_seconds("grace", grace, least=0.0)
