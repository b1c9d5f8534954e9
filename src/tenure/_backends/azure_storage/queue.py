"""Queues in Azure Storage.

House rules:

- Only the process that received a message can renew and settle it; see ``receipts``.
- Azure removes a message at the end of its time to live without a notice. So no message gets one: an expired message is
  found when it is received, and dead-lettered like any other.
- There are no transactions; see ``dead_letters`` for what that means for a move.
- What Azure can't do (sessions, priorities, deferral, remembered ids) is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

from tenure._backends.azure_storage.background import Background
from tenure._backends.azure_storage.client import Account, LoopConnections, Refused, unless_refused
from tenure._backends.azure_storage.dead_letters import DeadLetters, Request
from tenure._backends.azure_storage.live import LiveMessages
from tenure._backends.azure_storage.message_format import ROOM, TEXT_MAX, Properties, encode
from tenure._backends.azure_storage.names import POISON_SUFFIX, encode_metadata, queue_name_of
from tenure._backends.azure_storage.receipts import Receipts
from tenure._backends.azure_storage.records import FoundMessage, HeldMessage, delivery_of, timestamp_of
from tenure._backends.azure_storage.requests import NO_QUEUE, PAGE, client_of, count, create, lock_page, put
from tenure._backends.azure_storage.schedules import AzureSchedules
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._backends.azure_storage.settings import declare, settings_of
from tenure._backends.azure_storage.settling import DELAY_MAX, Settling
from tenure._foreign import digits, read_or
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
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import found_dead
from tenure._queue.generations import Generations
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, Delivery, LiveMessage, SessionLock, Stats, count_of
from tenure._queue.outgoing import Outgoing
from tenure._queue.refusals import Refusals, WithoutDeferral, WithoutInbox, WithoutSessions
from tenure._queue.schedule_steps import ScheduleSteps
from tenure._queue.verdicts import LAPSED, Abandon, Deleted, Lapsed, NotEmpty, Renewed, Settled, Settlement
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure._runtime.remote_clock import WHOLE_SECONDS
from tenure.errors import ConfigError, MessageRefused, Unavailable

QUEUE_TRAITS = QueueTraits(
    lock_min=1.0,
    lock_max=604_800.0,
    body_max=45_000,  # 60,000 in base64, and room for properties
    dead_letters="emulated",
    delay_step=1.0,
    peek="emulated",
    priorities="impossible",
    sessions="impossible",
    deferral="impossible",
    dedupe="impossible",
    inbox="impossible",
    order="impossible",
    transactions=False,
    exact_stats=False,
    hints=False,
    names_dead=True,
    schedules="emulated",
    limits="impossible",
    tells_holder=False,
    connects=False,  # what answers first may be a proxy, or the front end of the service
)

CHECK_EVERY = 60.0
"""Seconds after which a process that uses a queue reads its settings again: only a queue that is missing is noticed."""

DEAD_FOUND_MAX = 64
"""Expired or exhausted messages that one claim moves to the dead letters; the next claim moves the rest."""

QUIET_CLAIMS = 7
"""Empty claims in a row, about the first second of an idle consumer, before a claim returns when to repeat it."""

RECHECK_AFTER = 1.0
"""Seconds until the next claim while messages are invisible: one of them may be a dead consumer's."""


class AzureBroker(WithoutSessions, WithoutDeferral, WithoutInbox):
    """A ``Broker`` on Azure Storage Queues."""

    refusals = Refusals("queues in Azure Storage", QUEUE_TRAITS)

    def __init__(self, account: Account, clock: Clock) -> None:
        self._account = account
        self.generations = Generations(CHECK_EVERY)
        self._clock = ServiceClock(account, clock)
        self._notifier = Notifier()
        self._background = Background()
        self._receipts = Receipts(clock)
        self._live = LiveMessages(account, self._clock)
        self._dead_letters = DeadLetters(account, self._clock, self._receipts, self._background, self._notifier)
        self._settling = Settling(
            account, self._clock, self._receipts, self._dead_letters, self._background, self._notifier, self.send
        )
        self._empty_claims: dict[str, int] = {}  # by queue: the number of empty claims in a row
        self._kept = AzureSchedules(account, self._clock)
        self._schedules = ScheduleSteps(self._kept, self.send, clock)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    async def close(self) -> None:
        """End the hints, and let verdicts and moves to the dead letters finish."""
        self._notifier.close()
        await self._background.close()

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when this process has sent to *queue*; Azure sends no hints of other processes' messages."""
        return self._notifier.listen(queue)

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, in its metadata; return the settings that result."""
        request = partial(declare, queue=queue, traits=QUEUE_TRAITS, changes=changes, only_undeclared=only_undeclared)
        settings, made = await self._account.run(request)
        self.generations.note(queue, made)
        return settings

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings of *queue*."""
        settings, made = await self._account.run(partial(settings_of, queue=queue, traits=QUEUE_TRAITS))
        self.generations.note(queue, made)
        return settings

    async def names(self) -> Sequence[str]:
        """List every queue in the account that doesn't hold the dead letters of another, sorted."""

        async def names(connections: LoopConnections) -> dict[str, str]:
            listed = connections.queues.list_queues(include_metadata=True)
            return {str(one.name): queue_name_of(str(one.name), one.metadata) async for one in listed}

        found = await self._account.run(names)
        dead = {one for one in found if one.endswith(POISON_SUFFIX) and one.removesuffix(POISON_SUFFIX) in found}
        return sorted(name for one, name in found.items() if one not in dead and not name.endswith(DEAD_SUFFIX))

    # --- deletion ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue* and the queue of its dead letters, if both are empty or by *force*; then its schedules.

        Azure has no conditional deletion: a message sent between the count and the deletion is lost. Schedules that
        are advanced meanwhile stay: they belong to the queue that comes into being by that.
        """
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)
        schedules = await self._kept.blobs(queue)

        async def delete(connections: LoopConnections) -> None:
            for name in (queue, dead_letters_of(queue)):
                await unless_refused(client_of(connections, name).delete_queue(), *NO_QUEUE)

        await self._account.run(delete)
        await self._kept.remove(schedules)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*: the time is kept in its metadata."""
        await self._clock.ensure_known(queue)
        idle_at = self._clock.now() + seconds

        async def write(connections: LoopConnections) -> None:
            client = client_of(connections, queue)
            metadata = {"tenure_name": encode_metadata(queue), "tenure_idle_at": f"{idle_at:.0f}"}
            answer = await unless_refused(client.get_queue_properties(), *NO_QUEUE)
            if isinstance(answer, Refused):
                await create(client, queue, metadata)
            else:
                await unless_refused(client.set_queue_metadata({**(answer.metadata or {}), **metadata}), *NO_QUEUE)

        await self._account.run(write)

    async def idle(self) -> Sequence[str]:
        """List the queues that have been idle for their time."""

        async def list_idle(connections: LoopConnections) -> list[str]:
            found = []
            async for one in connections.queues.list_queues(include_metadata=True):
                idle_at = read_or(digits, (one.metadata or {}).get("tenure_idle_at"), math.inf)
                name = queue_name_of(str(one.name), one.metadata)
                if idle_at <= self._clock.now() and not name.endswith(DEAD_SUFFIX):
                    found.append(name)
            return found[:100]

        await self._clock.ensure_known()
        return await self._account.run(list_idle)

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Put *messages* into *queue*, several concurrently; return their ids. On an exception, some may be sent."""
        self.refusals.check_messages(messages)
        if any(message.at is not None for message in messages):
            await self._clock.ensure_known(queue)
        puts, missing = [], partial(self.generations.rise, queue)
        for index, message in enumerate(messages):
            try:
                text, delay = _text_of(message), self._delay_of(message)
                puts.append(partial(put, queue=queue, text=text, delay=delay, missing=missing))
            except ConfigError as error:
                raise MessageRefused(str(error), index, len(messages)) from error.__cause__
        asked_at = self._clock.local.now()
        sent = await self._account.run_all(puts)
        if sent:
            self._clock.learn(timestamp_of(sent[-1].inserted_on), asked_at, WHOLE_SECONDS)
        self._notifier.notify(queue)
        return [message.id or str(one.id) for message, one in zip(messages, sent, strict=True)]

    def _delay_of(self, message: Outgoing) -> int:
        at = message.at
        delay = message.delay if at is None else float(at) - self._clock.now()  # type: ignore[arg-type]
        if delay > DELAY_MAX:
            raise ConfigError(
                f"delay ({delay:,.0f} s) must not be more than seven days ({DELAY_MAX:,} s) on this backend"
            )
        return max(0, math.ceil(delay))

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
        token, seconds = secrets.token_hex(8), math.ceil(lock)
        missing = partial(self.generations.rise, queue)  # of dead letters: nobody asks for its number
        wait_until = self._clock.local.now() + seconds / 3
        deliveries: list[Delivery] = []
        moves: list[asyncio.Task[None]] = []
        dead_found = 0
        while len(deliveries) < limit and dead_found < DEAD_FOUND_MAX:
            want = min(PAGE, limit - len(deliveries))
            locked_until = self._clock.local.now() + seconds  # Azure counts from when it gets the request, or later
            try:
                page = await self._account.run(
                    partial(lock_page, queue=queue, limit=want, seconds=seconds, clock=self._clock, missing=missing)
                )
                found, dead = await self._deliveries_of(queue, page, token, locked_until)
                deliveries += found
                moves += self._dead_letters.start(dead)
                dead_found += len(dead)
            except Exception:
                if not deliveries:
                    raise
                break  # the messages received before are locked already: deliver them
            if len(page) < want:
                break
        if moves:
            # So a consumer that receives the last message and then counts finds the dead letters. But the locks of the
            # others are running: they must not wait for a queue of dead letters that doesn't answer.
            await asyncio.wait(moves, timeout=max(0.0, wait_until - self._clock.local.now()))
        if self._receipts.expire():
            self._settling.expire()
        if deliveries:
            self._empty_claims.pop(queue, None)
            return Claim(tuple(deliveries), None, self._dead_letters.take_deaths(queue))
        due_in = 0.0 if dead_found >= DEAD_FOUND_MAX else await self._recheck_after(queue)
        return Claim((), due_in, self._dead_letters.take_deaths(queue))

    async def _recheck_after(self, queue: str) -> float | None:
        """Return the seconds until the next claim after an empty one, or None.

        Azure doesn't report when a message becomes visible, but its count includes invisible ones. While there are any,
        a consumer that polls less and less often would find a dead consumer's message long after its lock ended.
        """
        self._empty_claims[queue] = self._empty_claims.get(queue, 0) + 1
        if self._empty_claims[queue] <= QUIET_CLAIMS:
            return None
        with suppress(Unavailable):
            return RECHECK_AFTER if await self._account.run(partial(count, queue=queue)) else None
        return None

    async def _deliveries_of(
        self, queue: str, page: Sequence[FoundMessage], token: str, locked_until: float
    ) -> tuple[list[Delivery], list[Request]]:
        """Return the deliveries of a page, and the moves of messages that have expired or were delivered too often."""
        is_dead = queue.endswith(DEAD_SUFFIX)
        max_deliveries = math.inf
        if not is_dead and any(one.count > 1 for one in page):
            max_deliveries = (await self.settings(queue)).max_deliveries
        deliveries: list[Delivery] = []
        moves: list[Request] = []
        for one in page:
            text = one.raw.content or ""
            held = HeldMessage(queue, str(one.raw.id), str(one.raw.pop_receipt), locked_until, one.properties, text)
            outcome = None
            if not is_dead and not one.properties.moving:
                outcome = found_dead(one.count - 1, one.properties, max_deliveries, one.now, is_expired=one.is_expired)
            if outcome is not None or (one.properties.moving and not is_dead):
                moves.append(self._dead_letters.move_found(held, one, outcome))
                continue
            delivery = delivery_of(queue, one, token, timestamp_of(one.raw.next_visible_on))
            deliveries.append(self._receipts.add(delivery, held, one.own_sequence))
        return deliveries, moves

    # --- renewing and settling ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now, concurrently; one without an answer gets ``NoAnswer``."""
        answers = await self._account.run_each([partial(self._renew, one=one, seconds=math.ceil(lock)) for one in held])
        unanswered = [answer for answer in answers if isinstance(answer, Unavailable)]
        if unanswered and len(unanswered) == len(answers):
            raise unanswered[0]
        return [NoAnswer(str(answer)) if isinstance(answer, Unavailable) else answer for answer in answers]

    async def _renew(self, connections: LoopConnections, one: Delivery | SessionLock, seconds: int) -> Renewed | Lapsed:
        held = self._receipts.find(one)
        if held is None:
            return LAPSED
        left = math.ceil(held.ends_at - self._clock.local.now())  # a renewal must not shorten the lock
        answer = await self._receipts.update(connections, held, max(seconds, left))
        return LAPSED if answer is None else Renewed(timestamp_of(answer.next_visible_on))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Apply many verdicts, concurrently; each has its own answer, or ``NoAnswer``."""
        for delivery, verdict in settlements:
            self.refusals.check_verdict(delivery, verdict)
        abandoned = {one.delivery.queue for one in settlements if isinstance(one.verdict, Abandon)}
        max_deliveries = {
            queue: (await self.settings(queue)).max_deliveries for queue in abandoned if not queue.endswith(DEAD_SUFFIX)
        }
        return await self._settling.settle(settlements, max_deliveries)

    # --- dead letters ---

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of the 32 that Azure shows without locking."""
        return await self._dead_letters.peek(queue, which, limit)

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*; a dry run sees no more of them than :meth:`peek_dead`."""
        return await self._dead_letters.redrive(queue, which, limit, dry_run=dry_run, to=to)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._dead_letters.purge(queue, which, limit)

    # --- live messages ---

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages: of the 32 that Azure shows without locking."""
        self.refusals.check_selection(which)
        return await self._live.peek(queue, which, limit)

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove visible messages; a dry run sees no more of them than :meth:`peek`, or counts approximately."""
        self.refusals.check_selection(which)
        removed = await self._live.purge(queue, which, dry_run=dry_run)
        self._notifier.notify(queue)
        return removed

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*, approximately."""
        return await self._live.stats(queue)


def _text_of(message: Outgoing) -> str:
    properties = Properties(
        id=message.id,
        headers=message.headers,
        reply_to=message.reply_to,
        correlation_id=message.correlation_id,
        ttl=message.expires_in,
    )
    text = encode(message.body, properties)
    if len(text) > TEXT_MAX - ROOM:
        raise ConfigError(
            f"the message takes {len(text):,} characters with its headers, and an Azure queue allows {TEXT_MAX:,}, of "
            f"which {ROOM:,} are kept for what tenure notes with it; send a reference to the data instead"
        )
    return text
