"""Queues in Azure Storage.

House rules:

- A *pop receipt* is what Azure locks with, and each update of a message brings a new one. So a delivery has a token of
  ours, and the newest receipt stays here under it: a delivery is renewed and settled by the process that received it.
- Azure takes a late verdict as long as nobody else has received the message. We don't: a lock that has run out by our
  clock, counted from the answer, is over.
- Azure removes a message whose time to live is over, and tells nobody. So no message gets one; what has expired is
  found when it is received, and dies like any other.
- There are no transactions. A message is put among the dead first and removed then, under a lock taken anew: who dies
  in between leaves it in both places, never in none.
- What Azure can't do (sessions, priorities, putting aside, remembering ids) is refused before anything is written.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueClient

from tenure._backends.azure_storage.client import AT_ONCE, Account, LoopConnections, Refused, on_loop, unless_refused
from tenure._backends.azure_storage.message_format import TEXT_MAX, Properties, decode, encode, encode_to_fit
from tenure._backends.azure_storage.names import POISON_SUFFIX, decode_metadata, encode_metadata, queue_of
from tenure._backends.azure_storage.records import (
    FoundMessage,
    HeldMessage,
    dead_letter_properties,
    dead_message,
    delivery_of,
    is_selected_dead,
    is_selected_live,
    live_message,
    timestamp_of,
    with_expired_attempts,
    with_identity,
)
from tenure._lease import NoAnswer
from tenure._queue.broker import (
    EVERY_LIVE,
    EVERYTHING,
    Claim,
    LiveSelection,
    NoSession,
    QueueSettings,
    QueueTraits,
    Selection,
    SettingChanges,
    undeclared,
)
from tenure._queue.message import (
    DEAD_SUFFIX,
    EXPIRED,
    EXPIRED_DESCRIPTION,
    LAPSED,
    MAX_DELIVERIES,
    NO_DEFERRED_DEAD_LETTERS,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Attempt,
    Complete,
    DeadLetter,
    DeadMessage,
    Defer,
    Deleted,
    Delivery,
    Died,
    Lapsed,
    LiveMessage,
    NotEmpty,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Settlement,
    State,
    Stats,
    Verdict,
    count_of,
    dead_letters_of,
    exhausted_description,
)
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError, MessageRefused, Unavailable

T = TypeVar("T")
Request: TypeAlias = Callable[[LoopConnections], Coroutine[Any, Any, None]]

QUEUE_TRAITS = QueueTraits(
    lock_min=1.0,
    lock_max=604_800.0,
    body_max=45_000,  # 60,000 in base64, and room for a note
    dead_letters="emulated",
    delay_step=1.0,
    peek="emulated",
    priorities="impossible",
    sessions="impossible",
    deferral="impossible",
    dedupe="impossible",
    order="impossible",
    transactions=False,
    exact_stats=False,
    hints=False,
    names_dead=True,
)

PAGE = 32
"""The most messages that Azure hands out or shows at once."""

MOVE_LOCK = 60
"""Seconds for which a message is locked while it is moved to or from the dead letters."""

CLOSE_WAIT = 2.0
"""Seconds that burials and verdicts under way have left when the backend is closed."""

STRAGGLER_WAIT = 1.0
"""Seconds for which verdicts that are answered wait for others that are not."""

PENDING_KEPT = 600.0
"""Seconds for which the late answer to a verdict is kept for whoever passes it again."""

DECLARE_CHECK_AFTER = 0.25
"""Seconds after which to look whether a setting that was written still stands."""

DEAD_FOUND_MAX = 64
"""After so many messages that were dead before they were handed out, the rest is left to the next question."""

DIED_MAX = 10_000
"""So many deaths are remembered for a queue until a claim tells of them."""

ROUND = 1_024
"""So many dead letters are looked through at once."""

DELAY_MAX = 604_800

QUIET_CLAIMS = 7
"""So often an idle consumer finds nothing in the first second; from then on it is told whether to look on so often."""

RECHECK_AFTER = 1.0
"""Seconds until the next look while messages are out of sight: one of them may be a dead consumer's."""

_SEEN: frozenset[State] = frozenset({"ready"})

_MISSING = ("QueueNotFound",)
_GONE = ("MessageNotFound", "PopReceiptMismatch", *_MISSING)
_INSTEAD = "use a backend that can, such as postgresql:// or redis://"


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """A verdict under way, and until when its answer is kept."""

    verdict: Verdict
    task: asyncio.Task[Settled | Lapsed]
    until: float


class AzureBroker:
    """A ``Broker`` on Azure Storage Queues."""

    def __init__(self, account: Account, clock: Clock) -> None:
        self._account = account
        self._clock = clock
        self._notifier = Notifier()
        self._held: dict[tuple[str, int], HeldMessage] = {}
        self._empty_claims: dict[str, int] = {}  # how often nothing was found, one time after the other
        self._background: set[asyncio.Task[Any]] = set()  # burials, verdicts; kept, as loops let tasks go
        self._pending: dict[tuple[str, int], PendingVerdict] = {}  # verdicts that were not answered with the others
        self._deaths: dict[str, deque[Died]] = {}  # by queue: buried here of no verdict, and not told yet
        self._lock = threading.Lock()  # renewals and verdicts come from two threads
        self._sweep_at = 0.0
        self._wall: float | None = None  # what makes a moment of our clock one of the service's

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return QUEUE_TRAITS

    async def close(self) -> None:
        """End the hints, and let the burials and verdicts that were begun come to an end."""
        self._notifier.close()
        for loop in {task.get_loop() for task in list(self._background)}:
            await on_loop(loop, self._finish_background)

    def _run_in_background(self, task: asyncio.Task[Any]) -> None:
        """Let *task* come to an end, with nobody there to wait for it."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _finish_background(self) -> None:
        here = asyncio.get_running_loop()
        tasks = {task for task in list(self._background) if task.get_loop() is here}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_WAIT)
        for task in late:
            task.cancel()  # its message comes again
        if late:
            await asyncio.wait(late)

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when this process has sent to *queue*; of others Azure tells nothing."""
        return self._notifier.listen(queue)

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*, in its metadata; return the settings that hold then.

        Azure has no condition for that: it replaces all of the metadata. So we look again a moment later whether what
        was written still stands, and write it again if another process has replaced it. Only for a queue that does
        not exist yet, the first of several wins for sure.
        """
        ask = partial(_declare, queue=queue, changes=changes, only_undeclared=only_undeclared)
        return await self._account.ask(ask)

    async def settings(self, queue: str) -> QueueSettings:
        """Tell which settings hold for *queue*."""
        return await self._account.ask(lambda connections: _settings(connections, queue))

    async def names(self) -> Sequence[str]:
        """List every queue in the account that is no place for dead letters, sorted."""

        async def names(connections: LoopConnections) -> dict[str, str]:
            listed = connections.queues.list_queues(include_metadata=True)
            return {
                str(one.name): decode_metadata((one.metadata or {}).get("tenure_name", one.name))
                async for one in listed
            }

        found = await self._account.ask(names)
        dead = {one for one in found if one.endswith(POISON_SUFFIX) and one.removesuffix(POISON_SUFFIX) in found}
        return sorted(name for one, name in found.items() if one not in dead and not name.endswith(DEAD_SUFFIX))

    # --- the end of a queue ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue* and the place for its dead letters, if both are empty or by *force*.

        Azure has no condition for that: what is sent between our look and the deletion is lost with the queue.
        """
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)

        async def delete(connections: LoopConnections) -> None:
            for name in (queue, dead_letters_of(queue)):
                await unless_refused(_client(connections, name).delete_queue(), *_MISSING)

        await self._account.ask(delete)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*: the moment stands in its metadata."""
        if self._wall is None:
            await self._account.ask(partial(self._ask_the_time, queue=queue))
        idle_at = self._now() + seconds

        async def properties(connections: LoopConnections) -> None:
            client = _client(connections, queue)
            metadata = {"tenure_name": encode_metadata(queue), "tenure_idle_at": f"{idle_at:.0f}"}
            answer = await unless_refused(client.get_queue_properties(), *_MISSING)
            if isinstance(answer, Refused):
                await _create(client, queue, metadata)
            else:
                await unless_refused(client.set_queue_metadata({**(answer.metadata or {}), **metadata}), *_MISSING)

        await self._account.ask(properties)

    async def idle(self) -> Sequence[str]:
        """List the queues whose time has run out."""

        async def look(connections: LoopConnections) -> list[str]:
            found = []
            async for one in connections.queues.list_queues(include_metadata=True):
                metadata = one.metadata or {}
                idle_at = metadata.get("tenure_idle_at", "")
                if idle_at.isdecimal() and int(idle_at) <= self._now():
                    found.append(decode_metadata(metadata.get("tenure_name", str(one.name))))
            return found[:100]

        if self._wall is None:
            await self._account.ask(partial(self._ask_the_time, queue="tenure"))  # which need not be there
        return await self._account.ask(look)

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep *messages*, some at a time; return their ids. On an exception, some may be kept."""
        if self._wall is None and any(message.at is not None for message in messages):
            await self._account.ask(partial(self._ask_the_time, queue=queue))
        puts = []
        for index, message in enumerate(messages):
            try:
                puts.append(partial(_put, queue=queue, text=self._text(message), delay=self._delay(message)))
            except ConfigError as error:
                raise MessageRefused(str(error), index, len(messages)) from error.__cause__
        asked_at = self._clock.now()
        kept = await self._account.ask_all(puts)
        if kept:
            self._learn(timestamp_of(kept[-1].inserted_on), asked_at)
        self._notifier.notify(queue)
        return [message.id or str(one.id) for message, one in zip(messages, kept, strict=True)]

    def _text(self, message: Outgoing) -> str:
        if message.session is not None:
            _impossible("sessions")
        if message.priority:
            _impossible("priorities")
        properties = Properties(
            message.id, message.headers, message.reply_to, message.correlation_id, message.expires_in
        )
        text = encode(message.body, properties)
        if len(text) > TEXT_MAX:
            raise ConfigError(
                f"the message takes {len(text):,} characters with its headers, and an Azure queue takes {TEXT_MAX:,}; "
                "send a reference to it"
            )
        return text

    def _delay(self, message: Outgoing) -> int:
        at = message.at
        delay = message.delay if at is None else float(at) - self._now()  # type: ignore[arg-type]
        if delay > DELAY_MAX:
            raise ConfigError(
                f"delay ({delay:,.0f} s) must not be more than seven days ({DELAY_MAX:,} s) on this backend"
            )
        return max(0, math.ceil(delay))

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        token, seconds = secrets.token_hex(8), math.ceil(lock)
        wait_until = self._clock.now() + seconds / 3
        deliveries: list[Delivery] = []
        moves: list[asyncio.Task[None]] = []
        dead_found = 0
        while len(deliveries) < limit and dead_found < DEAD_FOUND_MAX:
            want = min(PAGE, limit - len(deliveries))
            try:
                page = await self._account.ask(partial(self._page, queue=queue, limit=want, seconds=seconds))
                found, expired_or_exhausted = await self._deliveries_of(queue, page, token, seconds)
                deliveries += found
                moves += self._start_moves(expired_or_exhausted)
                dead_found += len(expired_or_exhausted)
            except Exception:
                if not deliveries:
                    raise
                break  # what has come is locked already: hand it out
            if len(page) < want:
                break
        if moves:
            # Whoever receives the last message and then counts them finds the dead ones dead. But the others' locks
            # are running: if the place for the dead is silent, they are not to wait for it.
            await asyncio.wait(moves, timeout=max(0.0, wait_until - self._clock.now()))
        self._sweep()
        if deliveries:
            self._empty_claims.pop(queue, None)
            return Claim(tuple(deliveries), None, self._take_deaths(queue))
        due_in = 0.0 if dead_found >= DEAD_FOUND_MAX else await self._recheck_after(queue)
        return Claim((), due_in, self._take_deaths(queue))

    def _take_deaths(self, queue: str) -> Sequence[Died]:
        """Return what was buried here of no verdict since this was last asked."""
        died, found = self._deaths.get(queue), []
        with suppress(IndexError):  # burials on another loop may add to it meanwhile
            while died:
                found.append(died.popleft())
        return tuple(found)

    async def _recheck_after(self, queue: str) -> float | None:
        """Tell when to look again after nothing was found.

        Azure doesn't say when a message comes into sight, but counts those out of sight as well: as long as there are
        some, whoever looks less and less often would find a dead consumer's message long after its lock has ended.
        """
        self._empty_claims[queue] = self._empty_claims.get(queue, 0) + 1
        if self._empty_claims[queue] <= QUIET_CLAIMS:
            return None
        with suppress(Unavailable):
            return RECHECK_AFTER if await self._account.ask(partial(_count, queue=queue)) else None
        return None

    async def _page(self, connections: LoopConnections, queue: str, limit: int, seconds: int) -> list[FoundMessage]:
        """Lock and read up to 32 messages."""
        asked_at = self._clock.now()
        pages = _client(connections, queue).receive_messages(
            messages_per_page=limit, max_messages=limit, visibility_timeout=seconds
        )

        async def first() -> list[QueueMessage]:
            async for page in pages.by_page():
                return [one async for one in page]
            return []

        answer = await unless_refused(first(), *_MISSING)
        found = []
        for one in () if isinstance(answer, Refused) else answer:
            now = timestamp_of(one.next_visible_on) - seconds
            found.append(FoundMessage(one, *decode(one.content), now))
        if found:
            self._learn(found[0].now, asked_at)
        return found

    async def _deliveries_of(
        self, queue: str, page: Sequence[FoundMessage], token: str, seconds: int
    ) -> tuple[list[Delivery], list[Request]]:
        """Make deliveries of what was received, and burials of what is dead by now."""
        dead = queue.endswith(DEAD_SUFFIX)
        ends = self._clock.now() + seconds
        max_deliveries = math.inf
        if not dead and any(one.count > 1 for one in page):
            max_deliveries = (await self.settings(queue)).max_deliveries
        deliveries: list[Delivery] = []
        expired_or_exhausted: list[Request] = []
        for one in page:
            held = HeldMessage(
                queue, str(one.raw.id), str(one.raw.pop_receipt), ends, one.properties, one.raw.content or ""
            )
            if not dead and (one.is_expired or one.count > max_deliveries):
                expired_or_exhausted.append(partial(self._dead_letter_found, held=held, one=one))
                continue
            delivery = delivery_of(queue, one, token)
            self._held[token, delivery.sequence] = held
            deliveries.append(delivery)
        return deliveries, expired_or_exhausted

    def _start_moves(self, expired_or_exhausted: Sequence[Request]) -> list[asyncio.Task[None]]:
        """Begin to bury what was found dead."""

        async def bury() -> None:
            with suppress(Unavailable):  # it comes again when its lock has ended, and whoever finds it buries it
                await self._account.ask_all(expired_or_exhausted)

        if not expired_or_exhausted:
            return []
        move = asyncio.get_running_loop().create_task(bury(), name="tenure-azure-burial")
        self._run_in_background(move)
        return [move]

    async def _dead_letter_found(self, connections: LoopConnections, held: HeldMessage, one: FoundMessage) -> None:
        """Bury a message that was dead before it was handed out this time."""
        count = one.count - 1
        properties = with_expired_attempts(held.properties, count, one.now)
        reason, told_of = (
            (EXPIRED, EXPIRED_DESCRIPTION) if one.is_expired else (MAX_DELIVERIES, exhausted_description(count))
        )
        answer = await self._dead_letter(
            connections, held, dead_letter_properties(one, properties, reason, told_of, count, one.now), one.body
        )
        if isinstance(answer, Settled):
            died = Died(one.sequence, one.id, count, reason)
            self._deaths.setdefault(held.queue, deque(maxlen=DIED_MAX)).append(died)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now, side by side; one that can't be asked gets ``NoAnswer``."""
        answers = await self._account.ask_each([partial(self._renew, one=one, seconds=math.ceil(lock)) for one in held])
        unanswered = [answer for answer in answers if isinstance(answer, Unavailable)]
        if unanswered and len(unanswered) == len(answers):
            raise unanswered[0]
        return [NoAnswer(str(answer)) if isinstance(answer, Unavailable) else answer for answer in answers]

    async def _renew(self, connections: LoopConnections, one: Delivery | SessionLock, seconds: int) -> Renewed | Lapsed:
        held = self._find(one)
        if held is None:
            return LAPSED
        left = math.ceil(held.locked_until - self._clock.now())  # a lock never ends sooner for being renewed
        answer = await self._update(connections, held, max(seconds, left))
        return LAPSED if answer is None else Renewed(timestamp_of(answer.next_visible_on))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts, side by side; each has its own answer, or ``NoAnswer``.

        Those that are answered don't wait for one that hangs. It stays under way for its own time: passed again, it is
        not begun anew.
        """
        for delivery, verdict in settlements:
            _check_verdict(delivery, verdict)
        limits = {one.delivery.queue for one in settlements if isinstance(one.verdict, Abandon)}
        max_deliveries = {
            queue: (await self.settings(queue)).max_deliveries for queue in limits if not queue.endswith(DEAD_SUFFIX)
        }
        free = asyncio.Semaphore(AT_ONCE)
        pending: dict[tuple[str, int], PendingVerdict] = {}
        for delivery, verdict in settlements:
            key = str(delivery.token), delivery.sequence
            if key not in pending:
                request = partial(
                    self._settle,
                    delivery=delivery,
                    verdict=verdict,
                    max_deliveries=max_deliveries.get(delivery.queue, 0),
                )
                pending[key] = self._take_pending(key, verdict) or PendingVerdict(
                    verdict, self._account.begin(request, free), self._clock.now() + PENDING_KEPT
                )
        await _wait_for_most([one.task for one in pending.values()])
        answers = self._answers(pending)
        return [answers.pop((str(one.token), one.sequence), LAPSED) for one, _ in settlements]  # LAPSED: twice the same

    def _take_pending(self, key: tuple[str, int], verdict: Verdict) -> PendingVerdict | None:
        """Return what was begun with the same *verdict* before, and had no answer then."""
        one = self._pending.pop(key, None)
        here = asyncio.get_running_loop()
        return one if one and one.verdict == verdict and one.task.get_loop() is here else None

    def _answers(
        self, pending: dict[tuple[str, int], PendingVerdict]
    ) -> dict[tuple[str, int], Settled | Lapsed | NoAnswer]:
        """Return what is known of these verdicts by now, and keep those of which that is nothing."""
        answers: dict[tuple[str, int], Settled | Lapsed | NoAnswer] = {}
        unanswered: dict[tuple[str, int], str] = {}
        bad: list[BaseException] = []
        for key, one in pending.items():
            if not one.task.done():
                self._pending[key] = one
                self._run_in_background(one.task)
                unanswered[key] = f"{self._account.url} has answered other verdicts, and this one not yet"
            elif one.task.cancelled():
                unanswered[key] = f"{self._account.url} is closed; connect again"
            elif isinstance(error := one.task.exception(), Unavailable):
                unanswered[key] = str(error)
            elif error is not None:
                bad.append(error)
            else:
                answers[key] = one.task.result()
        if bad:
            raise bad[0]
        if unanswered and not answers:
            raise Unavailable(next(iter(unanswered.values())))
        return {**answers, **{key: NoAnswer(why) for key, why in unanswered.items()}}

    async def _settle(
        self, connections: LoopConnections, delivery: Delivery, verdict: Verdict, max_deliveries: int
    ) -> Settled | Lapsed:
        held = self._find(delivery)
        if held is None:
            return LAPSED
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self.send(queue, [message])
            answer = await self._delete(connections, held)
        elif delivery.death is not None:
            answer = await self._settle_dead(connections, delivery, held, verdict)
        else:
            answer = await self._settle_failed(connections, delivery, held, verdict, max_deliveries)
        self._held.pop((str(delivery.token), delivery.sequence), None)
        if not isinstance(answer, Lapsed) and not isinstance(verdict, Complete):
            self._notifier.notify(delivery.queue)
        return answer

    async def _settle_failed(
        self, connections: LoopConnections, delivery: Delivery, held: HeldMessage, verdict: Verdict, max_deliveries: int
    ) -> Settled | Lapsed:
        """Put a living message back, or among the dead."""
        now, count, properties = self._now(), delivery.delivery_count, held.properties
        expired = properties.ttl is not None and now >= delivery.enqueued_at + properties.ttl
        if isinstance(verdict, DeadLetter):
            properties = with_expired_attempts(properties, count - 1, now).with_attempt(
                Attempt(count, now, "rejected", verdict.error)
            )
            dead_properties = dead_letter_properties(
                delivery, properties, verdict.reason, verdict.description, count, now, verdict.error
            )
        elif isinstance(verdict, Abandon):
            properties = with_expired_attempts(properties, count - 1, now).with_attempt(
                Attempt(count, now, "abandoned", verdict.error)
            )
            if not expired and count < max_deliveries:
                delay = min(DELAY_MAX, math.ceil(verdict.delay))
                return await self._make_visible(
                    connections, held, delay, encode_to_fit(held.text, delivery.body, properties)
                )
            reason, why = (
                (MAX_DELIVERIES, exhausted_description(count))
                if count >= max_deliveries
                else (EXPIRED, EXPIRED_DESCRIPTION)
            )
            dead_properties = dead_letter_properties(delivery, properties, reason, why, count, now)
        elif expired:
            dead_properties = dead_letter_properties(delivery, properties, EXPIRED, EXPIRED_DESCRIPTION, count - 1, now)
        else:
            given = encode_to_fit(held.text, delivery.body, replace(properties, uncounted=properties.uncounted + 1))
            return await self._make_visible(connections, held, 0, given)
        answer = await self._dead_letter(connections, held, dead_properties, delivery.body, anew=True)
        return answer if isinstance(verdict, DeadLetter) or isinstance(answer, Lapsed) else SETTLED_DEAD

    async def _settle_dead(
        self, connections: LoopConnections, delivery: Delivery, held: HeldMessage, verdict: Verdict
    ) -> Settled | Lapsed:
        """Leave a dead letter where it is."""
        text, delay = None, 0
        if isinstance(verdict, DeadLetter):
            error = verdict.error or held.properties.error
            properties = replace(held.properties, reason=verdict.reason, description=verdict.description, error=error)
            text = encode_to_fit(held.text, delivery.body, with_identity(properties, delivery))
        elif isinstance(verdict, Abandon):
            delay = min(DELAY_MAX, math.ceil(verdict.delay))
        return await self._make_visible(connections, held, delay, text)

    # --- receipts ---

    def _find(self, one: Delivery | SessionLock) -> HeldMessage | None:
        """Return what is known of a delivery whose lock is not over."""
        if isinstance(one, SessionLock):
            return None
        held = self._held.get((str(one.token), one.sequence))
        return held if held and held.queue == one.queue and self._clock.now() < held.locked_until else None

    async def _make_visible(
        self, connections: LoopConnections, held: HeldMessage, delay: int, text: str | None
    ) -> Settled | Lapsed:
        """Let a message be received again, by anybody, after *delay*."""
        return SETTLED if await self._update(connections, held, delay, text, settles=True) else LAPSED

    async def _update(
        self,
        connections: LoopConnections,
        held: HeldMessage,
        seconds: int,
        text: str | None = None,
        *,
        settles: bool = False,
    ) -> QueueMessage | None:
        """Set for how long a message is out of sight, and its text if one is given; None if it isn't ours."""
        client = _client(connections, held.queue)

        async def update(receipt: str) -> QueueMessage | Refused:
            return await unless_refused(
                client.update_message(held.message, receipt, content=text, visibility_timeout=seconds), *_GONE
            )

        answer = await self._with_receipt(held, update, settles=settles)
        if isinstance(answer, Refused):
            return None
        held.locked_until = self._clock.now() + seconds
        return answer

    async def _delete(self, connections: LoopConnections, held: HeldMessage) -> Settled | Lapsed:
        client = _client(connections, held.queue)

        async def delete(receipt: str) -> Refused | None:
            return await unless_refused(client.delete_message(held.message, receipt), *_GONE)

        return LAPSED if isinstance(await self._with_receipt(held, delete), Refused) else SETTLED

    async def _with_receipt(
        self, held: HeldMessage, act: Callable[[str], Awaitable[T | Refused]], *, settles: bool = False
    ) -> T | Refused:
        """Act with the newest receipt: if it is refused, a renewal on another thread may just be bringing a newer.

        Nothing is done under the receipt of an act that *settles*: the message is no longer ours, though we could.
        """
        while True:
            with self._lock:
                if held.is_settled:
                    return Refused("PopReceiptMismatch")
                receipt = held.receipt
                held.requests_under_way += 1
            try:
                answer = await act(receipt)
                if not isinstance(answer, Refused):
                    with self._lock:
                        if settles:
                            held.is_settled = True
                        held.receipt = str(getattr(answer, "pop_receipt", receipt))
            finally:
                with self._lock:
                    held.requests_under_way -= 1
            if not isinstance(answer, Refused) or answer.code != "PopReceiptMismatch":
                return answer
            if held.receipt == receipt:
                if not held.requests_under_way:
                    return answer
                await asyncio.sleep(0.01)

    def _sweep(self) -> None:
        """Forget deliveries that were never settled."""
        now = self._clock.now()
        if now >= self._sweep_at:
            self._sweep_at = now + 60.0
            for key, held in list(self._held.items()):
                if held.locked_until < now:
                    self._held.pop(key, None)
            for key, one in list(self._pending.items()):
                if one.until < now and one.task.done():
                    self._pending.pop(key, None)

    # --- the dead ---

    async def _dead_letter(
        self,
        connections: LoopConnections,
        held: HeldMessage,
        properties: Properties,
        body: bytes,
        *,
        anew: bool = False,
    ) -> Settled | Lapsed:
        """Move a message to the dead letters; *anew* takes its lock once more, which proves that it is ours."""
        if anew and await self._update(connections, held, MOVE_LOCK) is None:
            return LAPSED
        dead = dead_letters_of(held.queue)
        copy = await _put(
            connections, queue=dead, text=encode_to_fit(held.text, body, properties) or held.text, delay=0
        )
        answer = await self._delete(connections, held)
        if isinstance(answer, Lapsed):  # somebody else has it after all: it is not dead
            await unless_refused(_client(connections, dead).delete_message(copy.id, copy.pop_receipt), *_GONE)
        self._notifier.notify(dead)
        return answer

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of the 32 that Azure lets one look at without locking."""
        found = await self._account.ask(partial(_peek, queue=dead_letters_of(queue)))
        letters = sorted(
            (one for one in found if is_selected_dead(one, which.at(self._now()))), key=lambda one: one.sequence
        )
        return [dead_message(queue, one) for one in letters[:limit]]

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*; a dry run sees no more of them than :meth:`peek_dead`."""
        if dry_run:
            count = len(await self.peek_dead(queue, which, PAGE))
            if which == EVERYTHING:
                count = max(count, (await self.stats(queue)).dead)
            return count if limit is None else min(count, limit)

        async def back(connections: LoopConnections, one: FoundMessage) -> None:
            properties = replace(
                one.properties,
                id=one.id,
                sequence=one.sequence if to is None else 0,
                enqueued_at=one.enqueued_at if to is None else 0.0,
                before=len(one.properties.history),
                ttl=None,
                uncounted=0,
                deliveries=0,
                reason=None,
                description="",
                dead_at=0.0,
                error=None,
            )
            text = one.raw.content or ""
            await _put(connections, queue=to or queue, text=encode_to_fit(text, one.body, properties) or text, delay=0)

        count = await self._remove_selected_dead(queue, which, limit, back)
        self._notifier.notify(to or queue)
        return count

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""

        return await self._remove_selected_dead(queue, which, limit, _drop)

    async def _remove_selected_dead(
        self,
        queue: str,
        which: Selection,
        limit: int | None,
        act: Callable[[LoopConnections, FoundMessage], Awaitable[None]],
    ) -> int:
        def meant(one: FoundMessage) -> bool:
            return is_selected_dead(one, which.at(self._now()))

        return await self._remove_selected(dead_letters_of(queue), meant, limit, act)

    async def _remove_selected(
        self,
        queue: str,
        is_wanted: Callable[[FoundMessage], bool],
        limit: int | None,
        act: Callable[[LoopConnections, FoundMessage], Awaitable[None]],
    ) -> int:
        """Lock all of *queue* in sight, a round at a time; act on what is wanted and remove it, unlock the others.

        The others stay locked until all were looked at: unlocked before, they would come again in front of the rest.
        """
        count = 0
        others: dict[str, FoundMessage] = {}

        async def unlock(connections: LoopConnections, one: str) -> None:
            found = others[one]
            text = None if queue.endswith(DEAD_SUFFIX) else _without_this_delivery(found)
            receipt = str(found.raw.pop_receipt)
            await unless_refused(
                _client(connections, queue).update_message(one, receipt, content=text, visibility_timeout=0), *_GONE
            )

        async def move(connections: LoopConnections, one: FoundMessage) -> bool:
            await act(connections, one)
            gone = await unless_refused(
                _client(connections, queue).delete_message(one.raw.id, one.raw.pop_receipt), *_GONE
            )
            return not isinstance(gone, Refused)  # else somebody else has it, or has removed it

        try:
            while True:
                found: list[FoundMessage] = []
                while len(found) < ROUND:
                    page = await self._account.ask(partial(self._page, queue=queue, limit=PAGE, seconds=MOVE_LOCK))
                    found += page
                    if len(page) < PAGE:
                        break
                meant = sorted((one for one in found if is_wanted(one)), key=lambda one: one.sequence)
                taken = meant if limit is None else meant[: limit - count]
                chosen = {one.raw.id for one in taken}
                # Those seen before were so many that their locks have ended.
                is_round = len(found) >= ROUND and not all(one.raw.id in others for one in found)
                others.update((str(one.raw.id), one) for one in found if one.raw.id not in chosen)
                count += sum(await self._account.ask_all([partial(move, one=one) for one in taken]))
                if not is_round or count == limit:
                    return count
        finally:
            await self._account.ask_all([partial(unlock, one=one) for one in others])

    # --- looking on ---

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages: of the 32 that Azure lets one look at without locking."""
        _check_selection(which)
        found = await self._account.ask(partial(_peek, queue=queue))
        shown = sorted(
            (one for one in found if is_selected_live(one, which, self._now())), key=lambda one: one.sequence
        )
        return [live_message(queue, one) for one in shown[:limit]]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove messages that can be received; a dry run sees no more of them than :meth:`peek`, or counts about."""
        _check_selection(which)
        if dry_run:
            count = len(await self.peek(queue, which, PAGE))
            everything = which in (EVERY_LIVE, LiveSelection(states=_SEEN))
            return max(count, (await self.stats(queue)).ready) if everything else count
        await self._account.ask(partial(self._ask_the_time, queue=queue))
        began = self._now()

        def wanted(one: FoundMessage) -> bool:
            return timestamp_of(one.raw.inserted_on) <= began and is_selected_live(one, which, self._now())

        count = await self._remove_selected(queue, wanted, None, _drop)
        self._notifier.notify(queue)
        return count

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*, about: Azure counts all, and shows 32 of those that can be received."""
        if queue.endswith(DEAD_SUFFIX):
            return Stats(dead=await self._account.ask(partial(_count, queue=queue)))
        total = await self._account.ask(partial(_count, queue=queue))
        dead = await self._account.ask(partial(_count, queue=dead_letters_of(queue)))
        seen = await self._account.ask(partial(_peek, queue=queue))
        ready = len(seen) if len(seen) < PAGE else max(total, PAGE)
        age = max(0.0, self._now() - min(one.enqueued_at for one in seen)) if seen else 0.0
        # What is out of sight is locked or delayed; Azure doesn't tell which.
        return Stats(ready=ready, locked=max(0, total - ready), dead=dead, oldest_age=age)

    # --- time ---

    def _now(self) -> float:
        """Return the time by the service's clock, about; by ours before it was heard of."""
        return time.time() if self._wall is None else self._clock.now() + self._wall

    async def _ask_the_time(self, connections: LoopConnections, queue: str) -> None:
        asked_at = self._clock.now()

        def learn(response: Any) -> None:
            self._learn(parsedate_to_datetime(response.http_response.headers["Date"]).timestamp(), asked_at)

        await unless_refused(_client(connections, queue).get_queue_properties(raw_response_hook=learn), *_MISSING)

    def _learn(self, now: float, asked_at: float) -> None:
        """Correct our idea of the service's clock by what it said to a question asked *asked_at* by ours.

        It tells whole seconds, some time between question and answer. What we believed stands if it fits that: or else
        our time would jump back and forth by up to a second, and what comes later would seem to have been earlier.
        """
        least, max_deliveries = now - self._clock.now(), now + 1.0 - asked_at
        self._wall = least if self._wall is None else min(max(self._wall, least), max_deliveries)

    # --- what Azure can't do ---

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Refuse."""
        _impossible("messages put aside")

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Refuse."""
        _impossible("messages put aside")

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Refuse."""
        _impossible("sessions")

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Refuse."""
        _impossible("sessions")

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Refuse."""
        _impossible("sessions")

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Refuse."""
        _impossible("sessions")

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Refuse."""
        _impossible("sessions")

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Refuse."""
        _impossible("inbox that remembers ids")


def _impossible(what: str) -> NoReturn:
    raise ConfigError(f"queues in Azure Storage have no {what}; {_INSTEAD}")


def _check_selection(which: LiveSelection) -> None:
    """Refuse to look for what Azure doesn't show."""
    if which.session is not None:
        _impossible("sessions")
    if which.states is not None and which.states != _SEEN:
        unseen = ", ".join(sorted(which.states - _SEEN)) or "none"
        raise ConfigError(
            f"queues in Azure Storage show only messages that are ready, not those that are {unseen}; leave the states "
            f"out, or {_INSTEAD}"
        )


async def _drop(connections: LoopConnections, one: FoundMessage) -> None:
    """Do nothing to what is removed."""


def _without_this_delivery(one: FoundMessage) -> str | None:
    """Return the text that takes our look at a message off its deliveries again, if there is room for it."""
    properties = replace(one.properties, uncounted=one.properties.uncounted + 1)
    return encode_to_fit(one.raw.content or "", one.body, properties)


def _check_verdict(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse what can't be done before anything is."""
    if isinstance(verdict, Defer):
        if delivery.queue.endswith(DEAD_SUFFIX):
            raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        raise ConfigError(
            "queues in Azure Storage can't defer a message, as they hand none out by its number; abandon it with a "
            f"delay, or {_INSTEAD}"
        )
    if isinstance(verdict, Complete) and verdict.remember:
        _impossible("inbox that remembers ids")


# --- requests ----------------------------------------------------------------------------------------------------


def _client(connections: LoopConnections, queue: str) -> QueueClient:
    dead = queue.endswith(DEAD_SUFFIX)
    name = queue_of(queue.removesuffix(DEAD_SUFFIX))
    return connections.queues.get_queue_client(name + POISON_SUFFIX if dead else name)


async def _create(client: QueueClient, queue: str, metadata: dict[str, str] | None = None) -> None:
    await unless_refused(
        client.create_queue(metadata={"tenure_name": encode_metadata(queue), **(metadata or {})}), "QueueAlreadyExists"
    )


async def _put(connections: LoopConnections, *, queue: str, text: str, delay: int) -> QueueMessage:
    client = _client(connections, queue)
    for _ in range(2):
        answer = await unless_refused(client.send_message(text, visibility_timeout=delay, time_to_live=-1), *_MISSING)
        if not isinstance(answer, Refused):
            return answer
        await _create(client, queue)
    return await client.send_message(text, visibility_timeout=delay, time_to_live=-1)


async def _settings(connections: LoopConnections, queue: str) -> QueueSettings:
    answer = await unless_refused(_client(connections, queue).get_queue_properties(), *_MISSING)
    return QueueSettings(**_declared({} if isinstance(answer, Refused) else answer.metadata or {}))


async def _declare(
    connections: LoopConnections, queue: str, changes: SettingChanges, only_undeclared: bool
) -> QueueSettings:
    client = _client(connections, queue)
    while True:  # the limit is the question's time
        answer = await unless_refused(client.get_queue_properties(), *_MISSING)
        known = None if isinstance(answer, Refused) else answer.metadata or {}
        declared = _declared(known or {})
        if only_undeclared:  # also what another process has declared since we looked before
            changes = undeclared(changes, declared)
        if known is not None and all(declared.get(name) == value for name, value in changes.items()):
            return QueueSettings(**declared)
        declared.update(changes)
        metadata = {"tenure_settings": encode_metadata(json.dumps(declared)), "tenure_name": encode_metadata(queue)}
        if known is not None:
            await unless_refused(client.set_queue_metadata({**known, **metadata}), *_MISSING)
        elif not isinstance(
            await unless_refused(client.create_queue(metadata=metadata), "QueueAlreadyExists"), Refused
        ):
            return QueueSettings(**declared)  # whoever comes later has seen it
        await asyncio.sleep(DECLARE_CHECK_AFTER)


def _declared(metadata: dict[str, str]) -> SettingChanges:
    """Return the settings that were declared; those that a newer tenure may have added are left out."""
    text = metadata.get("tenure_settings")
    declared: dict[str, Any] = json.loads(decode_metadata(text)) if text else {}
    known = {field.name for field in fields(QueueSettings)}
    return cast(SettingChanges, {name: value for name, value in declared.items() if name in known})


async def _count(connections: LoopConnections, queue: str) -> int:
    answer = await unless_refused(_client(connections, queue).get_queue_properties(), *_MISSING)
    return 0 if isinstance(answer, Refused) else answer.approximate_message_count or 0


async def _peek(connections: LoopConnections, queue: str) -> list[FoundMessage]:
    answer = await unless_refused(_client(connections, queue).peek_messages(max_messages=PAGE), *_MISSING)
    return [] if isinstance(answer, Refused) else [FoundMessage(one, *decode(one.content), 0.0) for one in answer]


async def _wait_for_most(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all *tasks* are done; or some, and of the others none for a while. Cancelled, cancel them all."""
    late = set(tasks)
    try:
        while late:
            done, late = await asyncio.wait(late, timeout=STRAGGLER_WAIT)
            if not done and len(late) < len(tasks):
                return
    except asyncio.CancelledError:
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
