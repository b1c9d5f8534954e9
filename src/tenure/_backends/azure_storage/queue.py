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

from tenure._backends.azure_storage.client import AT_ONCE, Account, LoopConnections, Said, on_loop, said
from tenure._backends.azure_storage.message_format import TEXT_MAX, Note, fitted, read, written
from tenure._backends.azure_storage.names import DEAD, queue_of, told, untold
from tenure._backends.azure_storage.records import (
    EXPIRED_TOLD,
    Found,
    Held,
    dead_message,
    delivery_of,
    filled_up,
    grave_of,
    is_live,
    is_meant,
    live_message,
    moment_of,
    settled_down,
    tried,
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
)
from tenure._queue.message import (
    DEAD_SUFFIX,
    EXPIRED,
    LAPSED,
    MAX_DELIVERIES,
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
)
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError, MessageRefused, Unavailable

T = TypeVar("T")
Question: TypeAlias = Callable[[LoopConnections], Coroutine[Any, Any, None]]

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

MOVING = 60
"""Seconds for which a message is locked while it is moved to or from the dead letters."""

REST = 2.0
"""Seconds that burials and verdicts under way have left when the backend is closed."""

STRAGGLE = 1.0
"""Seconds for which verdicts that are answered wait for others that are not."""

PASSING = 600.0
"""Seconds for which the late answer to a verdict is kept for whoever passes it again."""

DECLARED = 0.25
"""Seconds after which to look whether a setting that was written still stands."""

DOOMED_MAX = 64
"""After so many messages that were dead before they were handed out, the rest is left to the next question."""

DIED_MAX = 10_000
"""So many deaths are remembered for a queue until a claim tells of them."""

ROUND = 1_024
"""So many dead letters are looked through at once."""

DELAY_MAX = 604_800

LOOKS = 7
"""So often an idle consumer finds nothing in the first second; from then on it is told whether to look on so often."""

LOOK_AGAIN = 1.0
"""Seconds until the next look while messages are out of sight: one of them may be a dead consumer's."""

_SEEN: frozenset[State] = frozenset({"ready"})

_MISSING = ("QueueNotFound",)
_GONE = ("MessageNotFound", "PopReceiptMismatch", *_MISSING)
_INSTEAD = "use a backend that can, such as postgresql:// or redis://"


@dataclass(frozen=True, slots=True)
class Passing:
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
        self._held: dict[tuple[str, int], Held] = {}
        self._idle: dict[str, int] = {}  # how often nothing was found, one time after the other
        self._left_alone: set[asyncio.Task[Any]] = set()  # burials, verdicts; kept, as loops let tasks go
        self._passing: dict[tuple[str, int], Passing] = {}  # verdicts that were not answered with the others
        self._died: dict[str, deque[Died]] = {}  # by queue: buried here of no verdict, and not told yet
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
        for loop in {task.get_loop() for task in list(self._left_alone)}:
            await on_loop(loop, self._rest)

    def _leave_alone(self, task: asyncio.Task[Any]) -> None:
        """Let *task* come to an end, with nobody there to wait for it."""
        self._left_alone.add(task)
        task.add_done_callback(self._left_alone.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _rest(self) -> None:
        here = asyncio.get_running_loop()
        tasks = {task for task in list(self._left_alone) if task.get_loop() is here}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=REST)
        for task in late:
            task.cancel()  # its message comes again
        if late:
            await asyncio.wait(late)

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when this process has sent to *queue*; of others Azure tells nothing."""
        return self._notifier.listen(queue)

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of *queue*, in its metadata; return the settings that hold then.

        Azure has no condition for that: it replaces all of the metadata. So we look again a moment later whether what
        was written still stands, and write it again if another process has replaced it.
        """
        return await self._account.ask(partial(_declare, queue=queue, changes=changes))

    async def settings(self, queue: str) -> QueueSettings:
        """Tell which settings hold for *queue*."""
        return await self._account.ask(lambda line: _settings(line, queue))

    async def names(self) -> Sequence[str]:
        """List every queue in the account that is no place for dead letters, sorted."""

        async def names(line: LoopConnections) -> dict[str, str]:
            listed = line.queues.list_queues(include_metadata=True)
            return {str(one.name): untold((one.metadata or {}).get("tenure_name", one.name)) async for one in listed}

        found = await self._account.ask(names)
        dead = {one for one in found if one.endswith(DEAD) and one.removesuffix(DEAD) in found}
        return sorted(name for one, name in found.items() if one not in dead and not name.endswith(DEAD_SUFFIX))

    # --- the end of a queue ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue* and the place for its dead letters, if both are empty or by *force*.

        Azure has no condition for that: what is sent between our look and the deletion is lost with the queue.
        """
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)

        async def delete(line: LoopConnections) -> None:
            for name in (queue, dead_letters_of(queue)):
                await said(_client(line, name).delete_queue(), *_MISSING)

        await self._account.ask(delete)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*: the moment stands in its metadata."""
        if self._wall is None:
            await self._account.ask(partial(self._ask_the_time, queue=queue))
        idle_at = self._now() + seconds

        async def note(line: LoopConnections) -> None:
            client = _client(line, queue)
            metadata = {"tenure_name": told(queue), "tenure_idle_at": f"{idle_at:.0f}"}
            answer = await said(client.get_queue_properties(), *_MISSING)
            if isinstance(answer, Said):
                await _create(client, queue, metadata)
            else:
                await said(client.set_queue_metadata({**(answer.metadata or {}), **metadata}), *_MISSING)

        await self._account.ask(note)

    async def idle(self) -> Sequence[str]:
        """List the queues whose time has run out."""

        async def look(line: LoopConnections) -> list[str]:
            found = []
            async for one in line.queues.list_queues(include_metadata=True):
                metadata = one.metadata or {}
                idle_at = metadata.get("tenure_idle_at", "")
                if idle_at.isdecimal() and int(idle_at) <= self._now():
                    found.append(untold(metadata.get("tenure_name", str(one.name))))
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
            self._learn(moment_of(kept[-1].inserted_on), asked_at)
        self._notifier.notify(queue)
        return [message.id or str(one.id) for message, one in zip(messages, kept, strict=True)]

    def _text(self, message: Outgoing) -> str:
        if message.session is not None:
            _impossible("sessions")
        if message.priority:
            _impossible("priorities")
        note = Note(message.id, message.headers, message.reply_to, message.correlation_id, message.expires_in)
        text = written(message.body, note)
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
        burials: list[asyncio.Task[None]] = []
        doomed = 0
        while len(deliveries) < limit and doomed < DOOMED_MAX:
            want = min(PAGE, limit - len(deliveries))
            try:
                page = await self._account.ask(partial(self._page, queue=queue, limit=want, seconds=seconds))
                found, dead_by_now = await self._handed_out(queue, page, token, seconds)
                deliveries += found
                burials += self._buried_meanwhile(dead_by_now)
                doomed += len(dead_by_now)
            except Exception:
                if not deliveries:
                    raise
                break  # what has come is locked already: hand it out
            if len(page) < want:
                break
        if burials:
            # Whoever receives the last message and then counts them finds the dead ones dead. But the others' locks
            # are running: if the place for the dead is silent, they are not to wait for it.
            await asyncio.wait(burials, timeout=max(0.0, wait_until - self._clock.now()))
        self._sweep()
        if deliveries:
            self._idle.pop(queue, None)
            return Claim(tuple(deliveries), None, self._told_dead(queue))
        due_in = 0.0 if doomed >= DOOMED_MAX else await self._look_again(queue)
        return Claim((), due_in, self._told_dead(queue))

    def _told_dead(self, queue: str) -> Sequence[Died]:
        """Return what was buried here of no verdict since this was last asked."""
        died, found = self._died.get(queue), []
        with suppress(IndexError):  # burials on another loop may add to it meanwhile
            while died:
                found.append(died.popleft())
        return tuple(found)

    async def _look_again(self, queue: str) -> float | None:
        """Tell when to look again after nothing was found.

        Azure doesn't say when a message comes into sight, but counts those out of sight as well: as long as there are
        some, whoever looks less and less often would find a dead consumer's message long after its lock has ended.
        """
        self._idle[queue] = self._idle.get(queue, 0) + 1
        if self._idle[queue] <= LOOKS:
            return None
        with suppress(Unavailable):
            return LOOK_AGAIN if await self._account.ask(partial(_count, queue=queue)) else None
        return None

    async def _page(self, line: LoopConnections, queue: str, limit: int, seconds: int) -> list[Found]:
        """Lock and read up to 32 messages."""
        asked_at = self._clock.now()
        pages = _client(line, queue).receive_messages(
            messages_per_page=limit, max_messages=limit, visibility_timeout=seconds
        )

        async def first() -> list[QueueMessage]:
            async for page in pages.by_page():
                return [one async for one in page]
            return []

        answer = await said(first(), *_MISSING)
        found = []
        for one in () if isinstance(answer, Said) else answer:
            now = moment_of(one.next_visible_on) - seconds
            found.append(Found(one, *read(one.content), now))
        if found:
            self._learn(found[0].now, asked_at)
        return found

    async def _handed_out(
        self, queue: str, page: Sequence[Found], token: str, seconds: int
    ) -> tuple[list[Delivery], list[Question]]:
        """Make deliveries of what was received, and burials of what is dead by now."""
        dead = queue.endswith(DEAD_SUFFIX)
        ends = self._clock.now() + seconds
        most = math.inf
        if not dead and any(one.count > 1 for one in page):
            most = (await self.settings(queue)).max_deliveries
        deliveries: list[Delivery] = []
        dead_by_now: list[Question] = []
        for one in page:
            held = Held(queue, str(one.raw.id), str(one.raw.pop_receipt), ends, one.note, one.raw.content or "")
            if not dead and (one.is_expired or one.count > most):
                dead_by_now.append(partial(self._find_dead, held=held, one=one))
                continue
            delivery = delivery_of(queue, one, token)
            self._held[token, delivery.sequence] = held
            deliveries.append(delivery)
        return deliveries, dead_by_now

    def _buried_meanwhile(self, dead_by_now: Sequence[Question]) -> list[asyncio.Task[None]]:
        """Begin to bury what was found dead."""

        async def bury() -> None:
            with suppress(Unavailable):  # it comes again when its lock has ended, and whoever finds it buries it
                await self._account.ask_all(dead_by_now)

        if not dead_by_now:
            return []
        burial = asyncio.get_running_loop().create_task(bury(), name="tenure-azure-burial")
        self._leave_alone(burial)
        return [burial]

    async def _find_dead(self, line: LoopConnections, held: Held, one: Found) -> None:
        """Bury a message that was dead before it was handed out this time."""
        count = one.count - 1
        note = filled_up(held.note, count, one.now)
        reason, told_of = (EXPIRED, EXPIRED_TOLD) if one.is_expired else (MAX_DELIVERIES, tried(count))
        answer = await self._bury(line, held, grave_of(one, note, reason, told_of, count, one.now), one.body)
        if isinstance(answer, Settled):
            died = Died(one.sequence, one.id, count, reason)
            self._died.setdefault(held.queue, deque(maxlen=DIED_MAX)).append(died)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now, side by side; one that can't be asked gets ``NoAnswer``."""
        answers = await self._account.ask_each([partial(self._renew, one=one, seconds=math.ceil(lock)) for one in held])
        unanswered = [answer for answer in answers if isinstance(answer, Unavailable)]
        if unanswered and len(unanswered) == len(answers):
            raise unanswered[0]
        return [NoAnswer(str(answer)) if isinstance(answer, Unavailable) else answer for answer in answers]

    async def _renew(self, line: LoopConnections, one: Delivery | SessionLock, seconds: int) -> Renewed | Lapsed:
        held = self._find(one)
        if held is None:
            return LAPSED
        left = math.ceil(held.ends - self._clock.now())  # a lock never ends sooner for being renewed
        answer = await self._update(line, held, max(seconds, left))
        return LAPSED if answer is None else Renewed(moment_of(answer.next_visible_on))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts, side by side; each has its own answer, or ``NoAnswer``.

        Those that are answered don't wait for one that hangs. It stays under way for its own time: passed again, it is
        not begun anew.
        """
        for delivery, verdict in settlements:
            _check(delivery, verdict)
        limits = {one.delivery.queue for one in settlements if isinstance(one.verdict, Abandon)}
        most = {
            queue: (await self.settings(queue)).max_deliveries for queue in limits if not queue.endswith(DEAD_SUFFIX)
        }
        free = asyncio.Semaphore(AT_ONCE)
        passing: dict[tuple[str, int], Passing] = {}
        for delivery, verdict in settlements:
            key = str(delivery.token), delivery.sequence
            if key not in passing:
                question = partial(self._settle, delivery=delivery, verdict=verdict, most=most.get(delivery.queue, 0))
                passing[key] = self._under_way(key, verdict) or Passing(
                    verdict, self._account.begin(question, free), self._clock.now() + PASSING
                )
        await _most_of([one.task for one in passing.values()])
        answers = self._answers(passing)
        return [answers.pop((str(one.token), one.sequence), LAPSED) for one, _ in settlements]  # LAPSED: twice the same

    def _under_way(self, key: tuple[str, int], verdict: Verdict) -> Passing | None:
        """Return what was begun with the same *verdict* before, and had no answer then."""
        one = self._passing.pop(key, None)
        here = asyncio.get_running_loop()
        return one if one and one.verdict == verdict and one.task.get_loop() is here else None

    def _answers(self, passing: dict[tuple[str, int], Passing]) -> dict[tuple[str, int], Settled | Lapsed | NoAnswer]:
        """Return what is known of these verdicts by now, and keep those of which that is nothing."""
        answers: dict[tuple[str, int], Settled | Lapsed | NoAnswer] = {}
        unanswered: dict[tuple[str, int], str] = {}
        bad: list[BaseException] = []
        for key, one in passing.items():
            if not one.task.done():
                self._passing[key] = one
                self._leave_alone(one.task)
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

    async def _settle(self, line: LoopConnections, delivery: Delivery, verdict: Verdict, most: int) -> Settled | Lapsed:
        held = self._find(delivery)
        if held is None:
            return LAPSED
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self.send(queue, [message])
            answer = await self._delete(line, held)
        elif delivery.death is not None:
            answer = await self._settle_dead(line, delivery, held, verdict)
        else:
            answer = await self._settle_failed(line, delivery, held, verdict, most)
        self._held.pop((str(delivery.token), delivery.sequence), None)
        if not isinstance(answer, Lapsed) and not isinstance(verdict, Complete):
            self._notifier.notify(delivery.queue)
        return answer

    async def _settle_failed(
        self, line: LoopConnections, delivery: Delivery, held: Held, verdict: Verdict, most: int
    ) -> Settled | Lapsed:
        """Put a living message back, or among the dead."""
        now, count, note = self._now(), delivery.delivery_count, held.note
        expired = note.ttl is not None and now >= delivery.enqueued_at + note.ttl
        if isinstance(verdict, DeadLetter):
            note = filled_up(note, count - 1, now).after(Attempt(count, now, "rejected", verdict.error))
            grave = grave_of(delivery, note, verdict.reason, verdict.description, count, now, verdict.error)
        elif isinstance(verdict, Abandon):
            note = filled_up(note, count - 1, now).after(Attempt(count, now, "abandoned", verdict.error))
            if not expired and count < most:
                delay = min(DELAY_MAX, math.ceil(verdict.delay))
                return await self._let_go(line, held, delay, fitted(held.text, delivery.body, note))
            reason, why = (MAX_DELIVERIES, tried(count)) if count >= most else (EXPIRED, EXPIRED_TOLD)
            grave = grave_of(delivery, note, reason, why, count, now)
        elif expired:
            grave = grave_of(delivery, note, EXPIRED, EXPIRED_TOLD, count - 1, now)
        else:
            given = fitted(held.text, delivery.body, replace(note, uncounted=note.uncounted + 1))
            return await self._let_go(line, held, 0, given)
        answer = await self._bury(line, held, grave, delivery.body, anew=True)
        return answer if isinstance(verdict, DeadLetter) or isinstance(answer, Lapsed) else SETTLED_DEAD

    async def _settle_dead(
        self, line: LoopConnections, delivery: Delivery, held: Held, verdict: Verdict
    ) -> Settled | Lapsed:
        """Leave a dead letter where it is."""
        text, delay = None, 0
        if isinstance(verdict, DeadLetter):
            error = verdict.error or held.note.error
            note = replace(held.note, reason=verdict.reason, description=verdict.description, error=error)
            text = fitted(held.text, delivery.body, settled_down(note, delivery))
        elif isinstance(verdict, Abandon):
            delay = min(DELAY_MAX, math.ceil(verdict.delay))
        return await self._let_go(line, held, delay, text)

    # --- receipts ---

    def _find(self, one: Delivery | SessionLock) -> Held | None:
        """Return what is known of a delivery whose lock is not over."""
        if isinstance(one, SessionLock):
            return None
        held = self._held.get((str(one.token), one.sequence))
        return held if held and held.queue == one.queue and self._clock.now() < held.ends else None

    async def _let_go(self, line: LoopConnections, held: Held, delay: int, text: str | None) -> Settled | Lapsed:
        """Let a message be received again, by anybody, after *delay*."""
        return SETTLED if await self._update(line, held, delay, text, settles=True) else LAPSED

    async def _update(
        self, line: LoopConnections, held: Held, seconds: int, text: str | None = None, *, settles: bool = False
    ) -> QueueMessage | None:
        """Set for how long a message is out of sight, and its text if one is given; None if it isn't ours."""
        client = _client(line, held.queue)

        async def update(receipt: str) -> QueueMessage | Said:
            return await said(
                client.update_message(held.message, receipt, content=text, visibility_timeout=seconds), *_GONE
            )

        answer = await self._with_receipt(held, update, settles=settles)
        if isinstance(answer, Said):
            return None
        held.ends = self._clock.now() + seconds
        return answer

    async def _delete(self, line: LoopConnections, held: Held) -> Settled | Lapsed:
        client = _client(line, held.queue)

        async def delete(receipt: str) -> Said | None:
            return await said(client.delete_message(held.message, receipt), *_GONE)

        return LAPSED if isinstance(await self._with_receipt(held, delete), Said) else SETTLED

    async def _with_receipt(
        self, held: Held, act: Callable[[str], Awaitable[T | Said]], *, settles: bool = False
    ) -> T | Said:
        """Act with the newest receipt: if it is refused, a renewal on another thread may just be bringing a newer.

        Nothing is done under the receipt of an act that *settles*: the message is no longer ours, though we could.
        """
        while True:
            with self._lock:
                if held.is_settled:
                    return Said("PopReceiptMismatch")
                receipt = held.receipt
                held.flying += 1
            try:
                answer = await act(receipt)
                if not isinstance(answer, Said):
                    with self._lock:
                        if settles:
                            held.is_settled = True
                        held.receipt = str(getattr(answer, "pop_receipt", receipt))
            finally:
                with self._lock:
                    held.flying -= 1
            if not isinstance(answer, Said) or answer.code != "PopReceiptMismatch":
                return answer
            if held.receipt == receipt:
                if not held.flying:
                    return answer
                await asyncio.sleep(0.01)

    def _sweep(self) -> None:
        """Forget deliveries that were never settled."""
        now = self._clock.now()
        if now >= self._sweep_at:
            self._sweep_at = now + 60.0
            for key, held in list(self._held.items()):
                if held.ends < now:
                    self._held.pop(key, None)
            for key, one in list(self._passing.items()):
                if one.until < now and one.task.done():
                    self._passing.pop(key, None)

    # --- the dead ---

    async def _bury(
        self, line: LoopConnections, held: Held, note: Note, body: bytes, *, anew: bool = False
    ) -> Settled | Lapsed:
        """Move a message to the dead letters; *anew* takes its lock once more, which proves that it is ours."""
        if anew and await self._update(line, held, MOVING) is None:
            return LAPSED
        dead = dead_letters_of(held.queue)
        copy = await _put(line, queue=dead, text=fitted(held.text, body, note) or held.text, delay=0)
        answer = await self._delete(line, held)
        if isinstance(answer, Lapsed):  # somebody else has it after all: it is not dead
            await said(_client(line, dead).delete_message(copy.id, copy.pop_receipt), *_GONE)
        self._notifier.notify(dead)
        return answer

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of the 32 that Azure lets one look at without locking."""
        found = await self._account.ask(partial(_peek, queue=dead_letters_of(queue)))
        letters = sorted((one for one in found if is_meant(one, which.at(self._now()))), key=lambda one: one.sequence)
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

        async def back(line: LoopConnections, one: Found) -> None:
            note = replace(
                one.note,
                id=one.id,
                sequence=one.sequence if to is None else 0,
                enqueued_at=one.enqueued_at if to is None else 0.0,
                before=len(one.note.history),
                ttl=None,
                uncounted=0,
                deliveries=0,
                reason=None,
                description="",
                dead_at=0.0,
                error=None,
            )
            text = one.raw.content or ""
            await _put(line, queue=to or queue, text=fitted(text, one.body, note) or text, delay=0)

        count = await self._take_out_dead(queue, which, limit, back)
        self._notifier.notify(to or queue)
        return count

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""

        return await self._take_out_dead(queue, which, limit, _drop)

    async def _take_out_dead(
        self, queue: str, which: Selection, limit: int | None, act: Callable[[LoopConnections, Found], Awaitable[None]]
    ) -> int:
        def meant(one: Found) -> bool:
            return is_meant(one, which.at(self._now()))

        return await self._take_out(dead_letters_of(queue), meant, limit, act)

    async def _take_out(
        self,
        queue: str,
        is_wanted: Callable[[Found], bool],
        limit: int | None,
        act: Callable[[LoopConnections, Found], Awaitable[None]],
    ) -> int:
        """Lock all of *queue* in sight, a round at a time; act on what is wanted and remove it, unlock the others.

        The others stay locked until all were looked at: unlocked before, they would come again in front of the rest.
        """
        count = 0
        others: dict[str, Found] = {}

        async def unlock(line: LoopConnections, one: str) -> None:
            found = others[one]
            text = None if queue.endswith(DEAD_SUFFIX) else _uncounted(found)
            receipt = str(found.raw.pop_receipt)
            await said(_client(line, queue).update_message(one, receipt, content=text, visibility_timeout=0), *_GONE)

        async def move(line: LoopConnections, one: Found) -> bool:
            await act(line, one)
            gone = await said(_client(line, queue).delete_message(one.raw.id, one.raw.pop_receipt), *_GONE)
            return not isinstance(gone, Said)  # else somebody else has it, or has removed it

        try:
            while True:
                found: list[Found] = []
                while len(found) < ROUND:
                    page = await self._account.ask(partial(self._page, queue=queue, limit=PAGE, seconds=MOVING))
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
        _check_live(which)
        found = await self._account.ask(partial(_peek, queue=queue))
        shown = sorted((one for one in found if is_live(one, which, self._now())), key=lambda one: one.sequence)
        return [live_message(queue, one) for one in shown[:limit]]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove messages that can be received; a dry run sees no more of them than :meth:`peek`, or counts about."""
        _check_live(which)
        if dry_run:
            count = len(await self.peek(queue, which, PAGE))
            everything = which in (EVERY_LIVE, LiveSelection(states=_SEEN))
            return max(count, (await self.stats(queue)).ready) if everything else count
        await self._account.ask(partial(self._ask_the_time, queue=queue))
        began = self._now()

        def wanted(one: Found) -> bool:
            return moment_of(one.raw.inserted_on) <= began and is_live(one, which, self._now())

        count = await self._take_out(queue, wanted, None, _drop)
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

    async def _ask_the_time(self, line: LoopConnections, queue: str) -> None:
        asked_at = self._clock.now()

        def learn(response: Any) -> None:
            self._learn(parsedate_to_datetime(response.http_response.headers["Date"]).timestamp(), asked_at)

        await said(_client(line, queue).get_queue_properties(raw_response_hook=learn), *_MISSING)

    def _learn(self, now: float, asked_at: float) -> None:
        """Correct our idea of the service's clock by what it said to a question asked *asked_at* by ours.

        It tells whole seconds, some time between question and answer. What we believed stands if it fits that: or else
        our time would jump back and forth by up to a second, and what comes later would seem to have been earlier.
        """
        least, most = now - self._clock.now(), now + 1.0 - asked_at
        self._wall = least if self._wall is None else min(max(self._wall, least), most)

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


def _check_live(which: LiveSelection) -> None:
    """Refuse to look for what Azure doesn't show."""
    if which.session is not None:
        _impossible("sessions")
    if which.states is not None and which.states != _SEEN:
        unseen = ", ".join(sorted(which.states - _SEEN)) or "none"
        raise ConfigError(
            f"queues in Azure Storage show only messages that are ready, not those that are {unseen}; leave the states "
            f"out, or {_INSTEAD}"
        )


async def _drop(line: LoopConnections, one: Found) -> None:
    """Do nothing to what is removed."""


def _uncounted(one: Found) -> str | None:
    """Return the text that takes our look at a message off its deliveries again, if there is room for it."""
    note = replace(one.note, uncounted=one.note.uncounted + 1)
    return fitted(one.raw.content or "", one.body, note)


def _check(delivery: Delivery, verdict: Verdict) -> None:
    """Refuse what can't be done before anything is."""
    if isinstance(verdict, Defer):
        if delivery.queue.endswith(DEAD_SUFFIX):
            raise ConfigError("a dead letter can't be deferred; complete it, abandon it, or redrive it")
        raise ConfigError(
            "queues in Azure Storage can't defer a message, as they hand none out by its number; abandon it with a "
            f"delay, or {_INSTEAD}"
        )
    if isinstance(verdict, Complete) and verdict.remember:
        _impossible("inbox that remembers ids")


# --- requests ----------------------------------------------------------------------------------------------------


def _client(line: LoopConnections, queue: str) -> QueueClient:
    dead = queue.endswith(DEAD_SUFFIX)
    name = queue_of(queue.removesuffix(DEAD_SUFFIX))
    return line.queues.get_queue_client(name + DEAD if dead else name)


async def _create(client: QueueClient, queue: str, metadata: dict[str, str] | None = None) -> None:
    await said(client.create_queue(metadata={"tenure_name": told(queue), **(metadata or {})}), "QueueAlreadyExists")


async def _put(line: LoopConnections, *, queue: str, text: str, delay: int) -> QueueMessage:
    client = _client(line, queue)
    for _ in range(2):
        answer = await said(client.send_message(text, visibility_timeout=delay, time_to_live=-1), *_MISSING)
        if not isinstance(answer, Said):
            return answer
        await _create(client, queue)
    return await client.send_message(text, visibility_timeout=delay, time_to_live=-1)


async def _settings(line: LoopConnections, queue: str) -> QueueSettings:
    answer = await said(_client(line, queue).get_queue_properties(), *_MISSING)
    return QueueSettings(**_declared({} if isinstance(answer, Said) else answer.metadata or {}))


async def _declare(line: LoopConnections, queue: str, changes: SettingChanges) -> QueueSettings:
    client = _client(line, queue)
    while True:  # the limit is the question's time
        answer = await said(client.get_queue_properties(), *_MISSING)
        known = None if isinstance(answer, Said) else answer.metadata or {}
        declared = _declared(known or {})
        if known is not None and all(declared.get(name) == value for name, value in changes.items()):
            return QueueSettings(**declared)
        declared.update(changes)
        metadata = {"tenure_settings": told(json.dumps(declared)), "tenure_name": told(queue)}
        if known is not None:
            await said(client.set_queue_metadata({**known, **metadata}), *_MISSING)
        elif not isinstance(await said(client.create_queue(metadata=metadata), "QueueAlreadyExists"), Said):
            return QueueSettings(**declared)  # whoever comes later has seen it
        await asyncio.sleep(DECLARED)


def _declared(metadata: dict[str, str]) -> SettingChanges:
    """Return the settings that were declared; those that a newer tenure may have added are left out."""
    text = metadata.get("tenure_settings")
    declared: dict[str, Any] = json.loads(untold(text)) if text else {}
    known = {field.name for field in fields(QueueSettings)}
    return cast(SettingChanges, {name: value for name, value in declared.items() if name in known})


async def _count(line: LoopConnections, queue: str) -> int:
    answer = await said(_client(line, queue).get_queue_properties(), *_MISSING)
    return 0 if isinstance(answer, Said) else answer.approximate_message_count or 0


async def _peek(line: LoopConnections, queue: str) -> list[Found]:
    answer = await said(_client(line, queue).peek_messages(max_messages=PAGE), *_MISSING)
    return [] if isinstance(answer, Said) else [Found(one, *read(one.content), 0.0) for one in answer]


async def _most_of(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all *tasks* are done; or some, and of the others none for a while. Cancelled, cancel them all."""
    late = set(tasks)
    try:
        while late:
            done, late = await asyncio.wait(late, timeout=STRAGGLE)
            if not done and len(late) < len(tasks):
                return
    except asyncio.CancelledError:
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
