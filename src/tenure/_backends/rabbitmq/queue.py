"""Queues in RabbitMQ: each a quorum queue, with another one for its dead letters.

House rules:

- Only the process that received a message can renew and settle it; see ``receipts``.
- What is sent is confirmed, and comes back if no queue has that name; then the queue is declared.
- Deliveries are counted by the server where a lock has ended, and in a header where a copy is put back; see
  ``settling``.
- The server moves expired messages to the dead letters, at least once. What it can't do (sessions, priorities,
  deferral, remembered ids) is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.client import Client, missing_allowed
from tenure._backends.rabbitmq.delays import LEVELS, STEP, Delays, steps_of
from tenure._backends.rabbitmq.errors import Rejected, TooLarge
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.live import SETTLING_LAG, Browser
from tenure._backends.rabbitmq.message_format import (
    FoundMessage,
    Sequences,
    check_properties,
    delivery_of,
    found_message,
    properties_of,
)
from tenure._backends.rabbitmq.names import SERVERS, amqp_name
from tenure._backends.rabbitmq.presence import Presence
from tenure._backends.rabbitmq.publishing import Letter, Publisher
from tenure._backends.rabbitmq.receipts import TIMEOUT_MARGIN, HeldMessage, Receipts
from tenure._backends.rabbitmq.records import CACHED, Record, Records, RecordStore
from tenure._backends.rabbitmq.schedules import RabbitSchedules
from tenure._backends.rabbitmq.settling import Settling
from tenure._backends.rabbitmq.subscription import Subscription, Taken
from tenure._lease import NoAnswer
from tenure._queue.broker import (
    Advanced,
    Claim,
    LiveSelection,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Schedules,
    Selection,
    undeclared,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import Outcome, found_dead
from tenure._queue.generations import Generations
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import (
    DeadMessage,
    Delivery,
    Died,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.refusals import Refusals, WithoutDeferral, WithoutInbox, WithoutSessions
from tenure._queue.schedule_steps import ScheduleSteps
from tenure._queue.verdicts import GIVE_BACK, LAPSED, Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Listener, Notifier
from tenure.errors import ConfigError, MessageRefused

QUEUE_TRAITS = QueueTraits(
    lock_min=1.0,
    lock_max=86_400.0,
    body_max=16 * 2**20,
    renewal="emulated",
    dead_letters="emulated",
    delay="emulated",
    delay_step=STEP,
    delay_lag=1.0,  # up to 25 ms on an idle server, and more on a busy one: it goes through a queue for each level
    priorities="impossible",
    sessions="impossible",
    deferral="impossible",
    dedupe="impossible",
    inbox="impossible",
    order="impossible",
    transactions=False,
    peek="emulated",
    exact_stats=False,
    connection_bound=True,
    schedules="emulated",
    limits="impossible",
    tells_holder=False,
    dead_pages=True,
    pushes=True,
)

CHECK_EVERY = 300.0
"""Seconds after which a process that uses a queue reads its settings again: no sender sees that it was made anew. They
are many, as all processes of a virtual host take turns to read."""

DELIVERY_LIMIT = 2**31 - 1
"""As good as none: settings say how often a message is delivered, and can be changed. (From 4.0 on, it would be 20.)"""

BROWSE_WITHIN = 120.0
"""Seconds for a request that goes through all messages of a queue."""

NOTICED = 1.25 * CACHED
"""Seconds after which every process knows a change of the records."""

COUNTS_MAX = 5
"""How often messages are counted at most, as long as this process receives or settles some meanwhile."""

COUNT_PAUSE = 0.005
"""Seconds until they are counted again."""

SUBSCRIPTIONS_MAX = 100
"""Queues of which a channel is kept, although nobody receives from them now."""

DELAY_SLACK = 5.0
"""Seconds for which a queue counts as not empty after the last delay has ended, at least."""


class RabbitBroker(WithoutSessions, WithoutDeferral, WithoutInbox):
    """A ``Broker`` on RabbitMQ."""

    refusals = Refusals("queues in RabbitMQ", QUEUE_TRAITS)

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.generations = Generations(CHECK_EVERY)
        self._clock = clock
        self._notifier = Notifier()
        self._sequences = Sequences()
        self._records = RecordStore(client)
        self._presence = Presence(client, self._records, self.generations)
        self._receipts = Receipts(client, clock)
        self._delays = Delays(client)
        self._publisher = Publisher(client, self._delays, self._presence, self._ensure_there, self._note_delay)
        self._settling = Settling(client, self._receipts, self._publisher, self._send, self._max_deliveries)
        self._browser = Browser(client, self._settling, self._publisher, self._sequences.next)
        self._subscriptions: dict[str, Subscription] = {}
        self._listed: set[str] = set()  # queues that are in the records
        self._declared: set[str] = set()
        self._declaring: dict[str, asyncio.Future[None]] = {}
        self._schedules = ScheduleSteps(RabbitSchedules(client, self._records, self._make), self.send, clock)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    async def close(self) -> None:
        """End the hints and the consumers, and give back what has come and was not asked for."""
        self._notifier.close()

        async def close() -> None:  # of all at once, as each may wait for what is on its way
            given_back = (one.give_back_all() for one in list(self._subscriptions.values()))
            await asyncio.gather(*given_back, return_exceptions=True)

        with suppress(Exception):  # the server gives it back then, counted
            await self._client.run(close, within=2.0, to_end=True)
        self._client.call_home(self._receipts.close)

    async def make_delays(self) -> None:
        """Declare all that delayed messages go through, for users who may not.

        Raises:
            ConfigError: This user may not, either.
            Unavailable: There was no answer.
        """
        for level in range(LEVELS):
            await self._client.run(partial(self._delays.make, level))

    # --- queues ---

    async def _ensure(self, queue: str) -> None:
        """Declare *queue* and the queue of its dead letters, and list it; many callers do it once."""
        home = queue.removesuffix(DEAD_SUFFIX)
        if home in self._declared:
            return
        declaring = self._declaring.get(home)
        if declaring is None:
            declaring = self._declaring[home] = self._client.begin(self._declare(home), "declare")
            declaring.add_done_callback(lambda _: self._declaring.pop(home, None))
        await asyncio.shield(declaring)

    async def _ensure_there(self, queue: str) -> None:
        """Declare *queue* if it isn't there, also if this process has declared it before."""
        if await self._presence.has(queue):
            return
        home = queue.removesuffix(DEAD_SUFFIX)
        for place in (home, dead_letters_of(home)):
            if not await self._client.has_queue(amqp_name(place)):
                self._lose_place(place)
        await self._declare(home)

    async def _make(self, queue: str) -> None:
        """Declare *queue* if it isn't there, and list it, also if another program has declared it."""
        await self._ensure_there(queue)
        await self._list(queue)

    def _lose_place(self, place: str) -> None:
        """Note that a queue, or that of its dead letters, was deleted, with what is held of it."""
        self._presence.forget(place)
        self._receipts.lose_queue(place)
        if place in self._subscriptions:
            self._subscriptions[place].lose_held()

    async def _declare(self, home: str) -> None:
        if home.startswith(SERVERS):
            raise ConfigError(
                f"there is no queue {home!r} (any more), and names that begin with {SERVERS!r} are given by the server"
            )
        dead = amqp_name(dead_letters_of(home))
        arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}
        routed = {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": dead,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        methods = (
            spec.Queue.Declare(0, dead, durable=True, arguments=arguments),
            spec.Queue.Declare(0, amqp_name(home), durable=True, arguments=arguments | routed),
        )
        # Under the lock, so that others can wait for the end: until then, the queue has a name, but refuses messages,
        # and a consumer of it ends its connection.
        await self._list(home, partial(self._client.request, *methods))
        self._declared.add(home)
        for place in (home, dead_letters_of(home)):
            self._presence.note(place)

    async def _list(self, queue: str, first: Callable[[], Awaitable[object]] | None = None) -> None:
        def add(records: Records) -> None:
            records.setdefault(queue, Record()).is_there = True

        await self._records.change(add, first)
        self._listed.add(queue)

    async def _note_delay(self, queue: str, until: float) -> int:
        """Note that messages of *queue* are delayed, seldom, as that changes the records; return its generation."""
        home = queue.removesuffix(DEAD_SUFFIX)
        known = await self._records.recent(home)
        if known.delayed_until >= until:
            return known.generation
        later = until + max(DELAY_SLACK, (until - time.time()) / 2)

        def note(records: Records) -> int:
            record = records.setdefault(home, Record())
            record.delayed_until = max(record.delayed_until, later)
            return record.generation

        return await self._records.change(note)

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, in the records; return the settings that result."""

        def write(records: Records) -> tuple[QueueSettings, str]:
            before = records.get(queue, Record()).settings
            wanted = undeclared(changes, before) if only_undeclared else changes
            options = QueueOptions(**{**before, **wanted})
            settings = QueueSettings(**options)  # it may refuse them; then nothing is changed
            record = records.setdefault(queue, Record())
            record.settings, record.is_there = options, True
            record.made = record.made or (secrets.token_hex(8) if changes else "")
            return settings, record.made

        async def declare() -> QueueSettings:
            await self._ensure(queue)
            settings, made = await self._records.change(write)
            self._see(queue, made)
            return settings

        return await self._client.run(declare, to_end=True)

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of *queue*."""

        async def read() -> Record:
            record = (await self._records.read()).get(queue) or Record()
            self._see(queue, record.made)
            return record

        record = await self._client.run(read)
        return QueueSettings(**record.settings)

    def _see(self, queue: str, made: str) -> None:
        """See the mark of *queue*; if it was made anew, begin its channels anew, too.

        The server may not have told that it was deleted, if a consumer was begun just then: it would send nothing.
        """
        if self.generations.mark_of(queue) not in (None, "", made):
            for subscription in self._subscriptions_of((queue, dead_letters_of(queue))):
                subscription.begin_anew()
        self.generations.note(queue, made)

    async def _max_deliveries(self, queue: str) -> int:
        return QueueSettings(**(await self._records.last_known(queue)).settings).max_deliveries

    async def names(self) -> Sequence[str]:
        """List every queue in the records, sorted; those that only other programs have used are not in them."""

        async def names() -> list[str]:
            return sorted(name for name, record in (await self._records.read()).items() if record.is_there)

        return await self._client.run(names)

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue* and the queue of its dead letters, if both are empty and nobody uses them, or by *force*.

        RabbitMQ has no conditional deletion of quorum queues: what is sent between the count and the deletion is lost.
        """

        async def delete() -> Deleted | NotEmpty:
            found = await self._found(queue)
            if count_of(found) and not force:
                return NotEmpty(found)
            if found.delayed:
                await self._records.change(begin_generation)
                await asyncio.sleep(NOTICED)  # else what is delayed after the deletion could note the old one
            # In this order: a process that listens declares both anew once the queue is gone.
            for place in (dead_letters_of(queue), queue):
                with missing_allowed:
                    await self._client.request(spec.Queue.Delete(0, amqp_name(place)))
                self._lose_place(place)
            self._declared.discard(queue)
            self._listed.discard(queue)
            await self._records.change(forget)
            return Deleted(found)

        def begin_generation(records: Records) -> None:
            record = records.setdefault(queue, Record())
            record.generation += 1
            record.gone_until = max(record.gone_until, record.delayed_until)

        def forget(records: Records) -> None:
            now = time.time()
            if (record := records.pop(queue, None)) is not None:
                records[queue] = Record(
                    generation=record.generation, gone_below=record.generation, gone_until=record.gone_until
                )
            for name, one in list(records.items()):
                if not one.is_there and max(one.gone_until, one.delayed_until) < now:
                    del records[name]

        return await self._client.run(delete, within=self._client.options.timeout + NOTICED, to_end=True)

    async def _found(self, queue: str) -> Stats:
        """Count what *queue* has before it is deleted: nothing only if its log has nothing, and nobody uses it."""
        for subscription in self._subscriptions_of((queue, dead_letters_of(queue))):
            with missing_allowed:
                await subscription.arrived()  # a message may be on its way to a consumer that nobody listens to
        found = await self._stats(queue)
        for place in (queue, dead_letters_of(queue)):  # each of them holds a message, or waits for one
            found = replace(found, locked=found.locked + await self._other_consumers(place))
        if time.time() < (await self._records.read()).get(queue, Record()).delayed_until:
            found = replace(found, delayed=1)  # or more, or none any more
        if not count_of(found):
            if not await self._browser.is_empty(queue):
                found = replace(found, ready=1)
            if not await self._browser.is_empty(dead_letters_of(queue)):
                found = replace(found, dead=1)
        return found

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*, by this machine's clock."""

        def note(records: Records) -> None:
            record = records.setdefault(queue, Record())
            record.idle_at, record.is_there = time.time() + seconds, True

        async def write() -> None:
            await self._ensure(queue)
            await self._records.change(note)

        await self._client.run(write, to_end=True)

    async def idle(self) -> Sequence[str]:
        """List the queues that have been idle for their time."""

        async def read() -> list[str]:
            now, records = time.time(), await self._records.read()
            return [name for name, one in records.items() if one.idle_at is not None and one.idle_at <= now][:100]

        return await self._client.run(read)

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Publish *messages* to *queue*; return their ids when all are confirmed. On an exception, some may be sent."""
        self.refusals.check_messages(messages, check_properties)
        return await self._client.run(partial(self._send, queue, messages))

    async def _send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        letters: list[Letter] = []
        for index, message in enumerate(messages):
            sequence = self._sequences.next()
            at = message.at
            delay = message.delay if at is None else float(at) - time.time()  # type: ignore[arg-type]
            try:
                steps = steps_of(delay) if delay > 0 else 0
            except ConfigError as error:
                raise MessageRefused(str(error), index, len(messages)) from None
            id_ = self._sequences.id_of(queue, sequence)
            properties = properties_of(message, id_, sequence, is_delayed=bool(steps))
            letters.append(Letter(properties, message.body, steps))
        try:
            await self._publisher.publish(queue, letters, are_new=True)
        except Rejected as error:
            if len(messages) == 1:
                raise MessageRefused(f"{self._client.url} refuses the message: {error}") from None
            raise ConfigError(
                f"{self._client.url} refuses message {error.index} of {len(messages)}: {error}; others may be sent"
            ) from None
        except TooLarge as error:
            raise MessageRefused(str(error), error.index, len(messages)) from None
        if queue not in self._listed and not queue.startswith(SERVERS):
            await self._list(queue)
        return [letter.properties.message_id or "" for letter in letters]

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
        self.refusals.check_messages(messages, check_properties)
        return await self._schedules.advance(queue, schedule, expected, record, messages, not_before)

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        self._check_lock(lock)
        if (taken := self._take_arrived(queue, limit)) is None:
            return await self._claimed(partial(self._receive, queue, limit, lock))
        founds = _read(queue, taken)
        if not _may_include_dead(queue, founds):
            return self._locked(taken, founds, lock)
        return await self._claimed(partial(self._lock, queue, taken, founds, lock))

    def receive_arrived(self, queue: str, limit: int, lock: float) -> Claim | None:
        """Claim what has come already while somebody listens; None if nothing has, or something may be dead."""
        if lock > self._lock_max or (taken := self._take_arrived(queue, limit)) is None:
            return None
        founds = _read(queue, taken)
        if not _may_include_dead(queue, founds):
            return self._locked(taken, founds, lock)
        if (subscription := self._subscriptions.get(queue)) is not None:  # else its channels are over: it comes again
            subscription.put_back(taken)
        return None

    def _take_arrived(self, queue: str, limit: int) -> Taken | None:
        subscription = self._subscriptions.get(queue)
        return None if subscription is None else subscription.claim_waiting(limit)

    async def _claimed(self, claim: Callable[[], Coroutine[Any, Any, Claim]]) -> Claim:
        """Return what is claimed, or give it back if the caller gives up just when it has been: on another loop."""
        made: list[Claim] = []
        is_given_up = False

        async def carry_out() -> Claim:
            made.append(await claim())
            if is_given_up:
                give_back()
            return made[0]

        def give_back() -> None:
            if made and (given_up := [Settlement(one, GIVE_BACK) for one in made.pop().deliveries]):
                self._client.begin(self._settling.settle(given_up), "give-back")

        try:
            return await self._client.run(carry_out)
        except asyncio.CancelledError:
            is_given_up = True
            self._client.call_home(give_back)
            raise

    @property
    def _lock_max(self) -> float:
        return self._client.consumer_timeout - TIMEOUT_MARGIN

    def _check_lock(self, lock: float) -> None:
        if lock > self._lock_max:
            raise ConfigError(
                f"lock ({lock:g} s) must be shorter than the server's consumer_timeout "
                f"({self._client.consumer_timeout:g} s); raise that on the server, and give its value as the option "
                "consumer_timeout of the URL"
            )

    async def _receive(self, queue: str, limit: int, lock: float) -> Claim:
        taken = await self._subscription(queue).claim(limit)
        if taken is None or not taken.messages:
            return Claim((), None)
        return await self._lock(queue, taken, _read(queue, taken), lock)

    async def _lock(self, queue: str, taken: Taken, founds: list[FoundMessage], lock: float) -> Claim:
        """Lock those that are to be delivered; move the others to the dead letters."""
        channels = taken.channels
        died: list[Died] = []
        if not queue.endswith(DEAD_SUFFIX):
            try:
                now = time.time()
                gone, moves, founds = await self._sort(queue, founds, now)
                died = await self._move_dead(channels, gone, moves, now, lock)
            except BaseException:  # this claim is given up: nobody will settle them
                self._give_back(queue, channels, founds)
                raise
        if self._clock.now() >= taken.asked_at + lock:  # so slow is the server: each lock would be over, and counted
            self._give_back(queue, channels, founds)
            return Claim((), None, tuple(died))
        return self._locked(taken, founds, lock, died)

    def _give_back(self, queue: str, channels: HeldChannels, founds: Sequence[FoundMessage]) -> None:
        self._client.begin(self._settling.give_back(queue, channels, [one.raw for one in founds]), "give-back")

    def _locked(self, taken: Taken, founds: Sequence[FoundMessage], lock: float, died: Sequence[Died] = ()) -> Claim:
        """Lock messages for *lock* seconds from when they were asked for."""
        token, local_now, loop_now = secrets.token_hex(8), self._clock.now(), self._client.home.time()
        last_end = local_now + self._client.consumer_timeout - TIMEOUT_MARGIN - loop_now
        ends_at = taken.asked_at + lock
        shown_end = time.time() - local_now + ends_at
        deliveries: list[Delivery] = []
        for found in founds:
            held = HeldMessage(found, taken.channels, ends_at, last_end + found.raw.at)
            deliveries.append(self._receipts.add(delivery_of(found, token, shown_end), held))
        if deliveries:
            self._receipts.watch(ends_at)
        return Claim(tuple(deliveries), 0.0 if taken.is_more else None, tuple(died))

    async def _sort(
        self, queue: str, founds: list[FoundMessage], now: float
    ) -> tuple[list[FoundMessage], list[tuple[FoundMessage, Outcome]], list[FoundMessage]]:
        """Return which messages are gone with their queue, which have died, with the outcome, and the others."""
        max_deliveries: float = math.inf
        if any(one.count > 1 for one in founds):
            max_deliveries = await self._max_deliveries(queue)
        gone: list[FoundMessage] = []
        moves: list[tuple[FoundMessage, Outcome]] = []
        alive: list[FoundMessage] = []
        for one in founds:
            if await self._is_gone(queue, one):
                gone.append(one)
                continue
            is_expired = _may_be_expired(one) and one.is_expired_at(now)
            outcome = found_dead(one.count - 1, one.facts, max_deliveries, now, is_expired=is_expired)
            if outcome is not None:
                moves.append((one, outcome))
            else:
                alive.append(one)
        return gone, moves, alive

    async def _move_dead(
        self,
        channels: HeldChannels,
        gone: list[FoundMessage],
        moves: list[tuple[FoundMessage, Outcome]],
        now: float,
        lock: float,
    ) -> list[Died]:
        """Move those that have expired or were delivered too often to the dead letters."""
        for one in gone:
            channels.begin_ack(one.raw.tag)
        if not moves:
            return []
        # So a consumer that receives the last message and then counts finds the dead letters. But other locks run.
        begun = {
            self._client.begin(self._settling.move_found(channels, one, outcome, now), "dead-letter"): (one, outcome)
            for one, outcome in moves
        }
        done, _ = await asyncio.wait(begun, timeout=min(lock, self._client.options.timeout) / 3)
        died = []
        for task in done:
            one, outcome = begun[task]
            if task.exception() is None and outcome.cause is not None:
                died.append(Died(one.facts.sequence, one.id, outcome.deliveries, outcome.cause.reason))
        return died

    async def _is_gone(self, queue: str, one: FoundMessage) -> bool:
        """Return whether a message was sent to a queue that was deleted during its delay; if in doubt, it wasn't."""
        began_in = one.delayed_in
        return began_in is not None and began_in < (await self._records.last_known(queue)).gone_below

    def _subscription(self, queue: str) -> Subscription:
        subscription = self._subscriptions.get(queue)
        if subscription is None:
            for name, one in list(self._subscriptions.items()):
                if len(self._subscriptions) >= SUBSCRIPTIONS_MAX and one.is_idle:
                    self._client.begin(self._subscriptions.pop(name).close(), "close")
            subscription = self._subscriptions[queue] = Subscription(
                self._client,
                self._clock,
                queue,
                self._notifier,
                self._presence,
                self._ensure_there,
                partial(self._settling.give_back, queue),
                self._receipts.lose,
            )
        return subscription

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when a message has come to this process, which can be claimed then."""
        return Hints(self, queue)

    def listener(self, queue: str) -> Listener:
        """Return what hears of messages; called by :class:`Hints`."""
        return self._notifier.listen(queue)

    def begin_hints(self, queue: str) -> None:
        """Begin to listen; called by :class:`Hints`, on any loop."""
        self._client.call_home(lambda: self._subscription(queue).listen())

    def end_hints(self, queue: str) -> None:
        """End listening."""
        self._client.call_home(lambda: self._subscription(queue).unlisten())

    # --- renewing and settling ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now, if the server still has their channels and queues."""

        until = self._clock.now() + lock

        async def renew() -> list[Renewed | Lapsed | NoAnswer]:
            channels = {found.channels for one in held if (found := self._receipts.find(one)) is not None}
            counts = {one: asyncio.ensure_future(one.count()) for one in channels}
            if counts:
                await asyncio.wait(counts.values(), timeout=self._client.options.timeout / 2)
            silent = {one for one, count in counts.items() if not _has_answer(count) and one.lost is None}
            answers: list[Renewed | Lapsed | NoAnswer] = []
            for one in held:
                found = self._receipts.find(one)
                if found is None:
                    answers.append(LAPSED)
                elif found.channels in silent:
                    answers.append(NoAnswer(f"the server didn't answer for the queue {found.found.queue!r}"))
                elif self._receipts.renew(found, until):
                    answers.append(Renewed(time.time() + max(0.0, found.ends_at - self._clock.now())))
                else:  # it ends in time, as otherwise the server ends the whole channel, with all locks on it
                    answers.append(LAPSED)
            return answers

        return await self._client.run(renew)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts; each has its own answer, or ``NoAnswer``."""
        for delivery, verdict in settlements:
            self.refusals.check_verdict(delivery, verdict, check_properties)
        return await self._client.run(partial(self._settling.settle, settlements), to_end=True)

    # --- looking ---

    async def stats(self, queue: str) -> Stats:
        """Count what RabbitMQ shows: ready messages and dead letters; of those that are locked, only this process's."""
        return await self._client.run(partial(self._stats, queue))

    async def _stats(self, queue: str) -> Stats:
        places = queue, dead_letters_of(queue)
        stats = Stats()
        for attempt in range(COUNTS_MAX):
            if attempt:
                await asyncio.sleep(COUNT_PAUSE)
            for subscription in self._subscriptions_of(places):
                await subscription.returned()
            moves = self._moves(places)
            locked, dead_locked = (self._receipts.count(one) for one in places)
            waiting, dead_waiting = (sum(one.waiting for one in self._subscriptions_of([place])) for place in places)
            (ready, _), (dead_ready, _) = [await self._browser.count(one) for one in places]
            stats = Stats(ready=ready + waiting, locked=locked, dead=dead_ready + dead_waiting + dead_locked)
            if moves == self._moves(places) and not any(self._receipts.is_settling(one) for one in places):
                break  # else one may have been counted twice, or not at all
        return stats

    def _subscriptions_of(self, places: Sequence[str]) -> list[Subscription]:
        return [self._subscriptions[one] for one in places if one in self._subscriptions]

    def _moves(self, places: Sequence[str]) -> int:
        return self._receipts.moves + sum(one.moves for one in self._subscriptions_of(places))

    async def _other_consumers(self, queue: str) -> int:
        """Return how many consumers other processes have of *queue*, those included that only hold messages."""
        found = 0
        for attempt in range(3):
            if attempt:
                await asyncio.sleep(SETTLING_LAG)
            _, consumers = await self._browser.count(queue)
            subscription = self._subscriptions.get(queue)
            found = max(0, consumers - (0 if subscription is None else subscription.known_consumers))
            if not found:
                break
        return found

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages: of those that are ready, the first."""
        self.refusals.check_selection(which)
        return await self._client.run(
            partial(self._browser.peek, queue, which, limit), within=BROWSE_WITHIN, to_end=True
        )

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages that are ready, for good."""
        self.refusals.check_selection(which)
        request = partial(self._browser.purge, queue, which, dry_run=dry_run)
        return await self._client.run(request, within=BROWSE_WITHIN, to_end=True)

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters that no other process receives just now."""
        return await self._client.run(
            partial(self._browser.peek_dead, queue, which, limit), within=BROWSE_WITHIN, to_end=True
        )

    async def dead_pages(self, queue: str, which: Selection) -> AsyncGenerator[Sequence[DeadMessage], None]:
        """Yield the dead letters that *which* selects, page by page; each is held until the end."""
        look = await self._client.run(partial(self._browser.begin_look, queue, which))
        try:
            while page := await self._client.run(look.next, within=BROWSE_WITHIN, to_end=True):
                yield page
                page = ()  # it is not held while the next one is read
        finally:
            await self._client.run(look.end, within=BROWSE_WITHIN, to_end=True)

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        request = partial(self._browser.redrive, queue, which, limit, dry_run=dry_run, to=to)
        moved = await self._client.run(request, within=BROWSE_WITHIN, to_end=True)
        if to is not None and moved and not dry_run:
            await self._client.run(partial(self._list, to))
        return moved

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._client.run(
            partial(self._browser.purge_dead, queue, which, limit), within=BROWSE_WITHIN, to_end=True
        )


def _has_answer(request: asyncio.Task[Any]) -> bool:
    """Return whether a request has been answered; if not, wait for it no longer."""
    return not request.cancel() and request.exception() is None


def _read(queue: str, taken: Taken) -> list[FoundMessage]:
    now = time.time()
    return [found_message(queue, raw, now) for raw in taken.messages]


def _may_include_dead(queue: str, founds: Sequence[FoundMessage]) -> bool:
    return not queue.endswith(DEAD_SUFFIX) and any(_may_be_dead(one) for one in founds)


def _may_be_dead(one: FoundMessage) -> bool:
    """Return whether it takes more than a look at a message to know that it is to be delivered."""
    return one.count > 1 or _may_be_expired(one) or one.delayed_in is not None


def _may_be_expired(one: FoundMessage) -> bool:
    """Return whether this process has to look whether a message has expired: else the server does, by its own clock."""
    return one.facts.expires_at is not None and not one.is_timed_by_server


class Hints(AsyncIterator[None]):
    """The hints of one queue: while it is iterated, consumers of the queue stand."""

    def __init__(self, broker: RabbitBroker, queue: str) -> None:
        self._broker = broker
        self._queue = queue
        self._listens = False
        self._listener = broker.listener(queue)
        self._begin()

    async def __anext__(self) -> None:
        if not self._listener.closed:
            self._begin()
        try:
            await anext(self._listener)
        except BaseException:  # the wait was cancelled, or this has ended; the next wait begins again
            self._end()
            raise

    async def aclose(self) -> None:
        """Stop listening."""
        self._end()
        await self._listener.aclose()

    def _begin(self) -> None:
        if not self._listens:
            self._listens = True
            self._broker.begin_hints(self._queue)

    def _end(self) -> None:
        if self._listens:
            self._listens = False
            self._broker.end_hints(self._queue)

    def __del__(self) -> None:
        self._end()
