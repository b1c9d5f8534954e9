"""Queues in NATS JetStream.

House rules:

- A message is never delivered twice under one number of its stream; see ``storing``. So an old acknowledgement does
  nothing.
- Only the process that received a message can renew and settle it; see ``receipts``.
- There are no transactions: what a completed message sends is stored before it is acknowledged.
- What NATS can't do (sessions, priorities, deferral) is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from tenure._backends.nats.client import EXPECTED_LAST, Client, number_in, part_of, stored
from tenure._backends.nats.configuration import BODY_MAX, WINDOW_MIN, Consumer
from tenure._backends.nats.connection import Connection, Request, has_no_stream
from tenure._backends.nats.dead_letters import DeadLetters
from tenure._backends.nats.errors import (
    NO_STREAM,
    SUBJECTS_TAKEN,
    NoJetStream,
    NotPermitted,
    Refusal,
    is_undecided,
    is_wrong_sequence,
    last_in,
)
from tenure._backends.nats.inbox import Inbox
from tenure._backends.nats.live import LiveMessages
from tenure._backends.nats.message_format import (
    HEADERS_MAX,
    ID,
    LOCK_MAX,
    ROOM,
    encode,
    mark_empty,
    properties_of,
    size_of,
    size_of_id,
)
from tenure._backends.nats.places import Places, Record
from tenure._backends.nats.receipts import Receipts
from tenure._backends.nats.receiving import OVERDUE_MAX, Receiving
from tenure._backends.nats.schedules import NatsSchedules
from tenure._backends.nats.settling import Settling
from tenure._backends.nats.standing import Standing
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import Storing, new_key
from tenure._lease import NoAnswer
from tenure._opened import Fact
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
from tenure._queue.checks import DEAD_SUFFIX, INT_MAX
from tenure._queue.generations import Generations
from tenure._queue.identity import ID_MARK, dead_letters_of
from tenure._queue.message import DeadMessage, Delivery, LiveMessage, SessionLock, Stats, count_of
from tenure._queue.outgoing import Outgoing
from tenure._queue.refusals import Refusals, WithoutDeferral, WithoutSessions
from tenure._queue.schedule_steps import ScheduleSteps
from tenure._queue.verdicts import LAPSED, Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import MessageRefused

QUEUE_TRAITS = QueueTraits(
    lock_min=0.2,
    lock_max=LOCK_MAX,
    body_max=BODY_MAX,  # NATS takes 1,048,576 bytes in all, unless told otherwise
    fencing="emulated",
    dead_letters="emulated",
    delay="emulated",
    delay_lag=OVERDUE_MAX,
    priorities="impossible",
    sessions="impossible",
    deferral="impossible",
    dedupe="emulated",
    inbox="emulated",
    order="impossible",
    transactions=False,
    peek="emulated",
    exact_stats=False,
    names_dead=True,
    schedules="emulated",
    limits="impossible",
    tells_holder=False,
    dead_pages=True,
)

LONG = 3_600.0
"""Seconds for what reads a whole queue; each of its requests has the usual limit."""

MARGIN = 1_000
"""Numbers that a stream leaves out after its deletion: those of messages that were stored while it was deleted."""

CHECK_EVERY = 60.0
"""Seconds after which a process that uses a queue reads its settings again: no sender sees that it was made anew."""

WINDOW_KNOWN_FOR = 1.0
"""Seconds for which a sender knows for how long a queue remembers ids."""

TAKEN_TOO_AFTER = 0.0, 0.02, 0.1, 0.4
"""Seconds after which a message is looked for in its own stream, one look after another, if another stream answered."""

SEND_MAX = 1_000
"""Messages that are sent before the first answer is awaited."""


class NatsBroker(WithoutSessions, WithoutDeferral):
    """A ``Broker`` on NATS JetStream."""

    refusals = Refusals("queues in NATS", QUEUE_TRAITS)

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self.generations = Generations(CHECK_EVERY)
        self._local = clock
        self._notifier = Notifier()
        self._places = Places(client, clock)
        self._clock = StoreClock(client, clock)
        self._receipts = Receipts(clock)
        self._storing = Storing(client, self._places)
        self._inbox = Inbox(client, self._places, self._clock)
        self._receiving = Receiving(client, self._places, self._clock, self._receipts, self._storing)
        self._standing = Standing(client, self._places, self._receiving, self._notifier, clock)
        self._settling = Settling(
            client, self._places, self._clock, self._receipts, self._storing, self._inbox, self.send
        )
        self._dead_letters = DeadLetters(
            client, self._places, self._clock, self._receipts, self._storing, self._inbox, self.send
        )
        self._live = LiveMessages(client, self._places, self._clock, self._storing, self._receiving, self._dead_letters)
        self._claimed_from: dict[str, str] = {}  # by queue: the consumer of the last claim
        self._windows: dict[str, tuple[float, float]] = {}  # by queue: how long ids are remembered; read when
        self._schedules = ScheduleSteps(NatsSchedules(client, self._places, self._clock), self.send, clock)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    async def close(self) -> None:
        """End the hints, and let what is being given back finish."""
        self._notifier.close()
        await self._standing.close()
        await self._receiving.close()
        await self._dead_letters.close()

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when a message of *queue* has come that the next claim takes, or may have."""
        listener = self._notifier.listen(queue)
        if queue.endswith(DEAD_SUFFIX):
            return listener
        return self._standing.hints(queue, listener)

    def report_to(self, report: Callable[[Fact], None]) -> None:
        """Report what is found later, and has consequences."""
        self._places.consumer_check.report = report

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, in one step; return the settings that result."""

        def change(record: Record) -> Record:
            wanted = undeclared(changes, record.settings) if only_undeclared else changes
            made = record.made or (secrets.token_hex(8) if changes else "")
            return replace(record, settings=QueueOptions(**{**record.settings, **wanted}), made=made)

        record = await self._places.change_record(queue, change)
        settings = QueueSettings(**record.settings)

        async def apply(connection: Connection) -> None:
            await self._places.make(connection, queue)
            if "dedupe_window" in changes:
                await self._places.set_window(connection, queue, settings.dedupe_window)

        await self._client.run(apply)
        self._windows[queue] = settings.dedupe_window, self._local.now()
        self.generations.note(queue, record.made)
        return settings

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of *queue*."""
        record, _ = await self._client.run(lambda connection: self._places.read_record(connection, queue))
        self.generations.note(queue, record.made)
        return QueueSettings(**record.settings)

    async def names(self) -> Sequence[str]:
        """List every queue that has a stream, sorted."""
        return sorted(await self._client.run(self._places.queues))

    # --- deletion ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete the streams of *queue*, if both are empty or by *force*.

        NATS has no conditional deletion: a message sent between the count and the deletion is lost.
        """
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)

        async def last(connection: Connection, stream: str) -> int:
            try:
                answer = await self._client.call(connection, f"STREAM.INFO.{stream}")
                return number_in(part_of(answer, "state"), "last_seq")
            except Refusal as error:
                if error.code == NO_STREAM:
                    return -1
                raise

        async def delete(connection: Connection) -> None:
            streams = [self._places.place_of(one).stream for one in (queue, dead_letters_of(queue))]
            lasts = [await last(connection, stream) for stream in streams]

            def change(record: Record) -> Record:
                return Record(
                    next=max(record.next, lasts[0] + 1 + MARGIN),
                    next_dead=max(record.next_dead, lasts[1] + 1 + MARGIN),
                )

            if max(lasts) >= 0 or (await self._places.read_record(connection, queue))[1]:
                await self._places.change_record(queue, change)
            for stream in streams:
                try:
                    await self._client.call(connection, f"STREAM.DELETE.{stream}")
                except Refusal as error:
                    if error.code != NO_STREAM:
                        raise
            await self._inbox.forget_queue(connection, queue)

        await self._client.run(delete)
        self._places.forget(queue)
        self._windows.pop(queue, None)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*; the time is kept with its settings."""

        async def ask(connection: Connection) -> None:
            await self._places.make(connection, queue)
            await self._clock.ensure_known(connection, self._places.place_of(queue).stream)

        await self._client.run(ask)
        idle_at = self._clock.after(seconds)
        await self._places.change_record(queue, lambda record: replace(record, idle_at=idle_at))

    async def idle(self) -> Sequence[str]:
        """List the queues that have been idle for their time."""

        async def ask(connection: Connection) -> dict[str, Record]:
            records = await self._places.records(connection)
            if records:
                await self._clock.ensure_known(connection, self._places.place_of(next(iter(records))).stream)
            return records

        records = await self._client.run(ask, within=LONG)
        now = self._clock.now()
        return [queue for queue, one in records.items() if one.idle_at is not None and one.idle_at <= now][:100]

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Store *messages*, up to ``SEND_MAX`` at a time; return their ids. On an exception, some may be stored."""
        self.refusals.check_messages(messages)
        requests = await self._client.run(partial(self._requests, queue=queue, messages=messages))
        numbers: list[int] = []
        for first in range(0, len(requests), SEND_MAX):
            store = partial(self._store, queue=queue, requests=requests[first : first + SEND_MAX])
            numbers += await self._client.run(store)
        return [one.id or f"{queue}{ID_MARK}{number}" for one, number in zip(messages, numbers, strict=True)]

    async def _requests(self, connection: Connection, queue: str, messages: Sequence[Outgoing]) -> list[Request]:
        """Return the requests that store *messages*."""
        place = self._places.place_of(queue)
        if any(one.delay or one.at is not None for one in messages):
            await self._clock.ensure_known(connection, place.stream)
        now = self._clock.now()
        made_up_size = size_of_id(f"{queue}{ID_MARK}{INT_MAX}")
        requests: list[Request] = []
        for index, one in enumerate(messages):
            due = self._clock.after(one.delay) if one.delay else 0.0 if one.at is None else float(one.at)  # type: ignore[arg-type]
            once = None if one.id is None else await self._name_of(connection, queue, one.id)
            headers = mark_empty(encode(properties_of(one, due if due > now else 0.0), once), one.body)
            size = size_of(headers)
            if ID not in headers:  # it has that one, too, when it is stored again
                size += made_up_size if one.id is None else size_of_id(one.id)
            if size + ROOM > HEADERS_MAX:
                raise MessageRefused(
                    f"the headers take {size:,} bytes, and JetStream takes {HEADERS_MAX:,}, of which {ROOM:,} are kept "
                    "for what tenure notes with the message; put what is large into the body",
                    index,
                    len(messages),
                )
            if len(one.body) + size + ROOM > connection.max_payload:
                raise MessageRefused(
                    f"the message takes {len(one.body) + size:,} bytes with its headers, and {self._client.address} "
                    f"takes {connection.max_payload:,}, of which {ROOM:,} are kept for what tenure notes with it; send "
                    "less, or raise max_payload there",
                    index,
                    len(messages),
                )
            requests.append((place.subject_of(new_key()), one.body, headers or None))
        return requests

    async def _store(self, connection: Connection, queue: str, requests: list[Request]) -> list[int]:
        """Send *requests*; return the numbers of the messages in the stream."""
        numbers: dict[int, int] = {}
        stream = self._places.place_of(queue).stream
        pauses = self._client.pauses(connection)
        is_made = False
        while True:
            left = [index for index in range(len(requests)) if index not in numbers]
            is_gone = partial(self._places.is_stream_gone, connection, stream)
            answers = await self._client.answers(connection, [requests[index] for index in left], is_gone)
            refusal: Refusal | None = None
            for index, answer in zip(left, answers, strict=True):
                if answer is None:  # it may still be on its way between two servers, ahead of the one that follows
                    requests[index] = only_once(requests[index])
                elif not has_no_stream(answer):
                    try:
                        numbers[index] = int(stored(answer, stream)["seq"])
                    except Refusal as error:
                        if is_undecided(error):
                            refusal = error
                        elif (number := await self._number_beside(error, connection, stream, requests[index])) is None:
                            raise
                        else:
                            numbers[index] = number
            if len(numbers) == len(requests):
                return [numbers[index] for index in range(len(requests))]
            # Those that no stream has taken are sent again.
            if refusal is None and not is_made:
                self.generations.rise(queue)
                await self._places.make(connection, queue)
                is_made = True
            pause = next(pauses, None)
            if pause is None:
                raise refusal or await self._places.why_not_taken(connection, queue)
            await asyncio.sleep(pause)

    async def _number_beside(
        self, refusal: Refusal, connection: Connection, stream: str, request: Request
    ) -> int | None:
        """Return the number in *stream* of a message that was refused, although it is there; or None.

        Another stream has taken it, too, as one of another domain; or it was sent again, and the first one has arrived.
        """
        if is_wrong_sequence(refusal):
            return last_in(refusal)
        subject, _, _ = request
        for pause in TAKEN_TOO_AFTER if refusal.code == SUBJECTS_TAKEN else ():
            await asyncio.sleep(pause)
            with suppress(Refusal, NotPermitted, NoJetStream):
                answer = await self._client.call(connection, f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
                return number_in(part_of(answer, "message"), "seq")
        return None

    async def _name_of(self, connection: Connection, queue: str, id_: str) -> str | None:
        """Return the name under which NATS is to remember the id of a message; None if it is not to."""
        window, known_at = self._windows.get(queue, (0.0, -math.inf))
        if self._clock.local.now() - known_at > WINDOW_KNOWN_FOR:
            record, _ = await self._places.read_record(connection, queue)
            window = QueueSettings(**record.settings).dedupe_window
            self._windows[queue] = window, self._clock.local.now()
        if window >= WINDOW_MIN:
            return id_
        return await self._inbox.name_of(connection, queue, id_, window) if window else None

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
        self.refusals.check_messages(messages)
        return await self._schedules.advance(queue, schedule, expected, record, messages, not_before)

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        if queue.endswith(DEAD_SUFFIX):
            return await self._client.run(lambda connection: self._dead_letters.receive(connection, queue, limit, lock))

        async def ask(connection: Connection) -> Claim:
            with self._standing.claiming(queue):
                claim = await self._receive(connection, queue, limit, lock)
            # The pull that waits may get the message that this one has just missed.
            if not claim.deliveries and (
                await self._standing.gets_one(queue) or await self._receiving.has_returned(queue)
            ):
                again = await self._receive(connection, queue, limit, lock)
                claim = again._replace(died=(*claim.died, *again.died))
            return claim

        claim = await self._client.run(ask)
        # If there may be more, the next claim follows at once. It takes many: a pull that waits would hand it only one.
        if len(claim.deliveries) < limit and claim.due_in != 0:
            self._standing.want(queue)
        return claim

    async def _receive(self, connection: Connection, queue: str, limit: int, lock: float) -> Claim:
        for _ in range(2):
            consumer = await self._consumer_of(connection, queue, lock)
            if consumer is None:
                self.generations.rise(queue)
                break
            if self._claimed_from.setdefault(queue, consumer.name) != consumer.name:
                self._claimed_from[queue] = consumer.name
                self.generations.rise(queue)
            asked_at = self._local.now()
            first, age = await self._standing.take(connection, queue, lock, asked_at)
            try:
                waits = not self._standing.is_asking(queue)  # else the pull that waits gets it
                return await self._receiving.receive(
                    connection, queue, consumer, limit, lock, first, asked_at, age, waits=waits
                )
            except NoJetStream:
                continue  # it was deleted, and perhaps made again
        return Claim((), None, self._receiving.take_deaths(queue))

    async def _consumer_of(self, connection: Connection, queue: str, lock: float) -> Consumer | None:
        """Return the consumer of *queue*, made if it is missing; None if nothing was ever sent to it."""
        known = await self._places.checked_consumer_of(connection, queue)
        if known is not None:
            return known
        try:
            await self._client.call(connection, f"STREAM.INFO.{self._places.place_of(queue).stream}")
        except Refusal as error:
            if error.code == NO_STREAM:
                return None
            raise
        return await self._places.make_consumer(connection, queue, lock)

    # --- renewing and settling ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now."""
        live = [one for one in held if isinstance(one, Delivery) and not one.queue.endswith(DEAD_SUFFIX)]
        dead = [one for one in held if isinstance(one, Delivery) and one.queue.endswith(DEAD_SUFFIX)]

        async def ask(connection: Connection) -> list[Renewed | Lapsed]:
            answers = iter(await self._settling.renew(connection, live, lock))
            others = iter(await asyncio.gather(*(self._dead_letters.renew(connection, one, lock) for one in dead)))
            return [
                LAPSED if isinstance(one, SessionLock) else next(others if one.queue.endswith(DEAD_SUFFIX) else answers)
                for one in held
            ]

        return await self._client.run(ask)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts."""
        for delivery, verdict in settlements:
            self.refusals.check_verdict(delivery, verdict)
        live = [one for one in settlements if not one.delivery.queue.endswith(DEAD_SUFFIX)]
        dead = [one for one in settlements if one.delivery.queue.endswith(DEAD_SUFFIX)]

        async def ask(connection: Connection) -> list[Settled | Lapsed | NoAnswer]:
            of_live = iter(await self._settling.settle(connection, live) if live else ())
            of_dead = iter(await self._dead_letters.settle(connection, dead) if dead else ())
            outcomes = [next(of_dead if one.delivery.queue.endswith(DEAD_SUFFIX) else of_live) for one in settlements]
            failures = [one for one in outcomes if isinstance(one, Exception)]
            if failures and len(failures) == len(outcomes):
                raise failures[0]
            return [
                NoAnswer(str(self._client.translate(one))) if isinstance(one, Exception) else one for one in outcomes
            ]

        answers = await self._client.run(ask)
        for queue in {one.delivery.queue for one in dead} | {dead_letters_of(one.delivery.queue) for one in live}:
            self._notifier.notify(queue)
        return answers

    # --- live messages ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*; those that are put off count as locked."""
        return await self._client.run(lambda connection: self._live.stats(connection, queue))

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show the messages that are ready, or delayed and not put off yet."""
        self.refusals.check_selection(which)
        return await self._client.run(lambda connection: self._live.peek(connection, queue, which, limit), within=LONG)

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove messages that are not locked."""
        self.refusals.check_selection(which)
        return await self._client.run(
            lambda connection: self._live.purge(connection, queue, which, dry_run=dry_run), within=LONG
        )

    # --- dead letters ---

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        return await self._client.run(
            lambda connection: self._dead_letters.peek(connection, queue, which, limit), within=LONG
        )

    async def dead_pages(self, queue: str, which: Selection) -> AsyncGenerator[Sequence[DeadMessage], None]:
        """Yield the dead letters that *which* selects, page by page."""
        look = await self._client.run(lambda connection: self._dead_letters.begin_look(connection, queue, which))
        while page := await self._client.run(lambda connection: self._dead_letters.page(connection, look), within=LONG):
            yield page
            page = ()  # it is not held while the next one is read

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        return await self._client.run(
            lambda connection: self._dead_letters.redrive(connection, queue, which, limit, dry_run=dry_run, to=to),
            within=LONG,
        )

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._client.run(
            lambda connection: self._dead_letters.purge(connection, queue, which, limit), within=LONG
        )

    # --- the inbox ---

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Return which *ids* the queue's inbox remembers."""
        return await self._client.run(lambda connection: self._inbox.handled(connection, queue, ids))


def only_once(request: Request) -> Request:
    """Return the request that stores a message unless an earlier one has: no other message has its subject."""
    subject, body, headers = request
    return subject, body, {**(headers or {}), EXPECTED_LAST: "0"}
