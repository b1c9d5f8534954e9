"""Queues in Redis: a hash for each property of messages, a sorted set for each place that a message can be in.

Why not Streams. A stream's consumer group hands out and counts, but does not fence: ``XACK`` doesn't check the
consumer, ``XCLAIM`` only moves an entry, and two claims of one entry by one consumer can't be distinguished. The
token, and everything that must agree with it (the delivery count, delays, deferral, the order of priorities and of
sessions, exact sizes), would have to be kept beside the stream anyway; ``XAUTOCLAIM`` scans, and a delayed or
abandoned entry loses its place in the order. So a message is a few fields under its sequence, and is in exactly one
sorted set: claimable messages are popped from one by rank, the next due time is read off another, and the size of a
place is its cardinality. Hashes and sorted sets take many members in one command, so a claim of a hundred costs about
ten commands inside one script, and is as fast (``benchmarks/redis_queue.py``).

House rules:

- Each verb is one script (``lua/queue``), so it is one step, however many messages it is about.
- Only the server's clock counts, read once in a script. Due times (locks, delays and messages that have expired) are
  applied by the next script that runs, before anything else, a part in each script: there is no sweeper.
- A body is stored as it is, in the hash ``tenure:queue:{NAME}:body``; its id, headers and reply address, if it has any,
  as JSON in ``…:head``. A message without head and delay costs no more than it must.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from tenure._backends.redis.claims import Claims
from tenure._backends.redis.client import Client, other_layout, patience
from tenure._backends.redis.dead_letters import DeadLetters
from tenure._backends.redis.live import LiveMessages
from tenure._backends.redis.message_format import (
    bounded,
    claim_of,
    deaths_of,
    encoded,
    encoded_failure,
    milliseconds,
    seconds_of,
)
from tenure._backends.redis.queue_scripts import QueueScripts
from tenure._backends.redis.scripts import LAYOUT, NOTE, NOTE_GROWING, Answer, Argument
from tenure._backends.redis.wake import Wake
from tenure._lease import NoAnswer
from tenure._queue.broker import (
    Claim,
    LiveSelection,
    NoSession,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Selection,
    undeclared,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    NO_DEFERRED_DEAD_LETTERS,
    DeadMessage,
    Delivery,
    Died,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Deleted,
    GiveBack,
    Lapsed,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")
A = TypeVar("A")

QUEUE_TRAITS = QueueTraits(lock_min=0.01, lock_max=86_400.0, body_max=2**28, names_dead=True)

_ANSWERS = (LAPSED, SETTLED, SETTLED_DEAD)
PARTS_MAX = 80
"""The most scripts that one claim runs to get past expired messages: each script applies a part of what is due."""
DIED_MAX = 1_000
"""A claim that has found so many deaths returns them; the rest is left to the next claim."""
STATS_PARTS_MAX = 300
"""The most scripts that ``stats`` runs to apply what is due; the rest is counted by its due times."""
SESSION_LOST = 300.0
"""Seconds for which a lost claim of a session is looked for: the claim doesn't state how long the session's lock is."""
MORE = 2
"""The answer of a script that did a part, and is to be run again."""
_GROUPED = {Complete: "C", GiveBack: "G", Defer: "F"}


class RedisBroker:
    """A ``Broker`` in Redis."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._scripts = QueueScripts(client)
        self._live = LiveMessages(client, self._scripts, self.stats)
        self._dead = DeadLetters(self._scripts, is_cluster=client.is_cluster)
        self._idle = f"{client.options.prefix}idle"
        self._claimed: dict[str, Claims] = {}
        self._unreported: dict[str, list[Died]] = {}  # deaths that one part of a claim returned whose next part failed

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do: in a cluster, no step spans slots; a user who may not subscribe gets no hints."""
        if not self._client.is_cluster and not self._wake.is_refused:
            return QUEUE_TRAITS
        return replace(QUEUE_TRAITS, transactions=not self._client.is_cluster, hints=not self._wake.is_refused)

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        if only_undeclared and changes:  # most often there is nothing to write
            declared = await self._declared(queue)
            if not undeclared(changes, declared):
                return QueueSettings(**declared)
        values: list[Argument] = [int(only_undeclared)]
        for name, value in changes.items():
            values += (name, repr(value))
        await self._scripts.run_listed(
            {queue}, NOTE, self._scripts.call("declare", [self._scripts.base(queue)], values)
        )
        return await self.settings(queue)

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings that hold for *queue*."""
        return QueueSettings(**await self._declared(queue))

    async def _declared(self, queue: str) -> QueueOptions:
        """Return the settings of *queue* that were declared."""
        kept: dict[bytes, bytes] = await self._client.command("HGETALL", f"{self._scripts.base(queue)}settings")
        layout = kept.get(b"layout", b"1").decode(errors="replace")
        if layout != str(LAYOUT):
            raise other_layout(layout, self._scripts.base(queue), str(self._client.address))
        known: dict[str, Any] = {}
        for field in fields(QueueSettings):
            text = kept.get(field.name.encode())
            if text is not None:
                known[field.name] = float(text) if isinstance(field.default, float) else int(text)
        return cast(QueueOptions, known)

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        return await self._scripts.names()

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when messages of *queue* may have become claimable."""
        return self._wake.listen(f"{self._scripts.base(queue)}{'dead' if _is_dead(queue) else 'live'}")

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        if not messages:
            return []
        arguments: list[Argument] = []
        for message in messages:
            arguments += encoded(message)
        call = self._scripts.call("send", [self._scripts.base(queue)], arguments)
        sequences, is_new = await self._scripts.run_listed({queue}, NOTE_GROWING, call)
        if is_new:
            await self._scripts.list(queue)
        return [
            message.id or f"{queue}{ID_MARK}{sequence}" for message, sequence in zip(messages, sequences, strict=True)
        ]

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        died = self._unreported.pop(queue, [])
        try:
            for _ in range(PARTS_MAX):
                claim = await self._receive_part(queue, limit, lock)
                died += claim.died
                if claim.deliveries or claim.due_in != 0.0 or len(died) >= DIED_MAX:
                    return claim._replace(died=died) if died else claim
                # The script has applied a part of what is due, and found nothing to claim.
        except BaseException:
            if died:
                self._unreported.setdefault(queue, []).extend(died)
            raise
        return Claim((), 0.0, died)

    async def _receive_part(self, queue: str, limit: int, lock: float) -> Claim:
        token = secrets.token_hex(16)
        base = self._scripts.base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "receive",
                queue,
                *(limit, milliseconds(lock), token, int(_is_dead(queue)), asking.lane),
                *asking.arguments,
            )
            asking.found = answer[3]
        return claim_of(queue, token, answer)

    def _claims(self, base: str) -> Claims:
        claims = self._claimed.get(base)
        if claims is None:
            claims = self._claimed.setdefault(base, Claims(secrets.token_hex(6)))
        return claims

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        token = secrets.token_hex(16)
        base = self._scripts.base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "receive_deferred",
                queue,
                *(milliseconds(lock), token, asking.lane, len(sequences)),
                *sequences,
                *asking.arguments,
            )
            asking.found = answer[3]
        return claim_of(queue, token, answer)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now."""
        if not held:
            return []
        if self._client.is_cluster:
            return await self._slot_by_slot(held, [one.queue for one in held], lambda part: self._renew(part, lock))
        return await self._renew(held, lock)

    async def _renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        keys = _Keys(self._scripts)
        arguments: list[Argument] = [milliseconds(lock)]
        for one in held:
            number = keys.number(one.queue)
            if isinstance(one, SessionLock):
                arguments += (number, "s", one.token, one.session)
            else:
                arguments += (number, "d" if _is_dead(one.queue) else "q", one.token, one.sequence)
        answers = await self._scripts.run_on("renew", keys.bases, *arguments, within=patience(lock))
        return [Renewed(until / 1_000) if until else LAPSED for until in answers]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Settle many deliveries."""
        if not settlements:
            return []
        if self._client.is_cluster:
            queues = [delivery.queue for delivery, _ in settlements]
            return await self._slot_by_slot(settlements, queues, self._settle_in_slot)
        return await self._settle(settlements)

    async def _settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        keys = _Keys(self._scripts)
        arguments: list[Argument] = []
        for group in runs(settlements, _go_together):
            arguments += self._encoded(group, keys)
        sent_to = {queue for _, verdict in settlements if type(verdict) is Complete for queue, _ in verdict.sends}
        answers = await self._scripts.run_listed(sent_to, NOTE, self._scripts.call("settle", keys.bases, arguments))
        return [_ANSWERS[answer] for answer in answers]

    # --- in a cluster ---

    async def _slot_by_slot(
        self, items: Sequence[T], queues: Sequence[str], ask: Callable[[Sequence[T]], Awaitable[Sequence[A]]]
    ) -> list[A | NoAnswer]:
        """Ask about *items* in parts whose *queues* share their keys' slot; return the answers in order.

        A part whose node can't be asked gives ``NoAnswer``; ``Unavailable`` is raised if that is so of all.
        """
        parts: dict[str, list[int]] = {}
        for number, queue in enumerate(queues):
            parts.setdefault(self._scripts.base(queue), []).append(number)
        results = await asyncio.gather(
            *(ask([items[number] for number in part]) for part in parts.values()), return_exceptions=True
        )
        failures = [answer for answer in results if isinstance(answer, BaseException)]
        # A permanent error is raised first; then Unavailable, if no part was answered.
        failures.sort(key=lambda error: isinstance(error, Unavailable))
        if failures and (len(failures) == len(results) or not isinstance(failures[0], Unavailable)):
            raise failures[0]
        answers: dict[int, A | NoAnswer] = {}
        for part, result in zip(parts.values(), results, strict=True):
            if isinstance(result, BaseException):
                answers.update(dict.fromkeys(part, NoAnswer(str(result))))
            else:
                answers.update(zip(part, result, strict=True))
        return [answers[number] for number in range(len(items))]

    async def _settle_in_slot(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Settle messages of one queue. What a held one sends to other queues is sent first."""
        base = self._scripts.base(settlements[0].delivery.queue)
        plain, asked = list(settlements), []
        for number, (delivery, verdict) in enumerate(settlements):
            if type(verdict) is Complete and any(self._scripts.base(queue) != base for queue, _ in verdict.sends):
                plain[number] = Settlement(delivery, replace(verdict, sends=()))
                asked.append(number)
        if asked:
            deliveries = [settlements[number].delivery for number in asked]
            answer = await self._scripts.run_on("holds", [base], *_held(deliveries))
            for number, holds in zip(asked, answer, strict=True):
                verdict = settlements[number].verdict
                assert isinstance(verdict, Complete)
                if holds:
                    for queue, message in verdict.sends:
                        await self.send(queue, [message])
        return await self._settle(plain)

    def _encoded(self, group: Sequence[Settlement], keys: _Keys) -> Iterator[Argument]:
        """Encode a group of equal verdicts for the script."""
        (first, verdict), size = group[0], len(group)
        is_dead = _is_dead(first.queue)
        letter, more = _verdict_arguments(verdict, first.id, keys)
        if is_dead and letter == "F":
            raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
        yield from (keys.number(first.queue), "d" if is_dead else "q", first.token, letter, size)
        yield from (delivery.sequence for delivery, _ in group)
        yield from more

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        token = secrets.token_hex(16)
        base = self._scripts.base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._scripts.run(
                "accept",
                queue,
                *(milliseconds(lock), token, int(session is not None), session or "", asking.lane),
                *asking.arguments,
            )
            asking.found = answer[0]
        if len(answer) == 3:
            return NoSession(seconds_of(answer[1]), deaths_of(queue, answer[2]))
        _, until, name, state = answer
        return SessionLock(queue, name.decode(), token, until / 1_000, state)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._claims(self._scripts.base(held.queue)).asking(SESSION_LOST) as asking:
            answer = await self._ask("receive_session", held, limit, asking.lane, asking.mark, *asking.arguments)
            asking.found = answer[3] if answer[0] else answer[1]
        return claim_of(held.queue, held.token, answer) if answer[0] else LAPSED

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        while (answer := await self._ask("release", held)) == MORE:
            pass  # many deliveries are given back in parts
        return SETTLED if answer else LAPSED

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        answer = await self._ask("read_state", held)
        if not answer[0]:
            return LAPSED
        state: bytes | None = answer[1]
        return state

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        return SETTLED if await self._ask("write_state", held, *(() if state is None else (state,))) else LAPSED

    async def _ask(self, verb: str, held: SessionLock, *arguments: Argument) -> Answer:
        return await self._scripts.run(verb, held.queue, held.session, held.token, *arguments)

    # --- looking and purging ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        counts: Answer = []
        # Messages are counted in the places where they belong now, so what is due is applied first, in parts.
        for part in range(STATS_PARTS_MAX):
            counts = await self._scripts.run("stats", queue, int(part == STATS_PARTS_MAX - 1))
            if counts:
                break
        ready, locked, delayed, deferred, dead, age = counts
        if _is_dead(queue):
            return Stats(dead=dead)
        return Stats(ready, locked, delayed, deferred, dead, age / 1_000)

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        return await self._live.peek(queue, which, limit)

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good."""
        return await self._live.purge(queue, which, dry_run=dry_run)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        answer = await self._scripts.run("peek_deferred", queue, limit, after)
        return claim_of(queue, "", answer).deliveries

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        return await self._dead.peek(queue, which, limit)

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        return await self._dead.redrive(queue, which, limit, dry_run=dry_run, to=to)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._dead.purge(queue, which, limit)

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Return which *ids* the inbox remembers."""
        if not ids:
            return []
        return [bool(one) for one in await self._scripts.run("handled", queue, *ids)]

    # --- the end of a queue ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty; by *force*, its messages go first, some hundreds in one step."""
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)
        # First off the list, which lies in another slot: a queue that is used again meanwhile is then listed again.
        await self._scripts.unlist(queue)
        gone = MORE
        while gone == MORE:
            gone = await self._scripts.run("delete", queue, int(force))
        self._scripts.forget(queue)
        self._claimed.pop(self._scripts.base(queue), None)
        if not gone:
            await self._scripts.list(queue)
            return NotEmpty(await self.stats(queue))
        await self._client.command("ZREM", self._idle, queue)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let :meth:`idle` list *queue* after *seconds*."""
        await self._scripts.run_on("delete_when_idle", [self._idle], queue, milliseconds(seconds))

    async def idle(self) -> Sequence[str]:
        """List the queues whose idle time has run out."""
        return [name.decode() for name in await self._scripts.run_on("idle", [self._idle])]


class _Keys:
    """The queues that a script is run on, numbered in the order in which they are first named."""

    def __init__(self, scripts: QueueScripts) -> None:
        self._scripts = scripts
        self._numbers: dict[str, int] = {}
        self.bases: list[str] = []

    def number(self, queue: str) -> int:
        """Return the number of the key of *queue*."""
        number = self._numbers.get(queue)
        if number is None:
            self.bases.append(self._scripts.base(queue))
            number = self._numbers[queue] = len(self.bases)
        return number


def _held(deliveries: Sequence[Delivery]) -> Iterator[Argument]:
    for delivery in deliveries:
        yield from ("d" if _is_dead(delivery.queue) else "q", delivery.token, delivery.sequence)


def runs(items: Sequence[T], same: Callable[[T, T], bool]) -> Iterator[Sequence[T]]:
    """Cut *items* into runs of equal neighbours."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or not same(items[start], items[end]):
            yield items[start:end]
            start = end


def _go_together(first: Settlement, other: Settlement) -> bool:
    """Tell whether two settlements can be encoded as one group."""
    (held, verdict), (other_held, other_verdict) = first, other
    return (
        (verdict is other_verdict or verdict == other_verdict)
        and held.token == other_held.token
        and held.queue == other_held.queue
        and not (type(verdict) is Complete and (verdict.sends or verdict.remember))
    )


def _verdict_arguments(verdict: Verdict, known_as: str, keys: _Keys) -> tuple[str, list[Argument]]:
    match verdict:
        case Complete(sends, remember) if sends or remember:
            more: list[Argument] = [bounded(remember), known_as, len(sends)]
            for queue, message in sends:
                more += (keys.number(queue), *encoded(message))
            return "X", more
        case Abandon(delay, error):
            return "A", [bounded(delay), encoded_failure(error)]
        case DeadLetter(reason, description, error):
            return "D", [reason, description, encoded_failure(error)]
        case _:
            return _GROUPED[type(verdict)], []


def _is_dead(queue: str) -> bool:
    return queue.endswith(DEAD_SUFFIX)
