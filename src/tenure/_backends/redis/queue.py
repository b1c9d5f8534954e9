"""Queues in Redis: a hash for each property of messages, a sorted set for each place that a message can be in.

Why not Streams. A stream's consumer group hands out and counts, but does not fence: ``XACK`` doesn't check the
consumer, ``XCLAIM`` only moves an entry, and two claims of one entry by one consumer can't be distinguished. The
token, and everything that must agree with it (the delivery count, delays, deferral, the order of priorities and of
sessions, exact sizes), would have to be kept beside the stream anyway; ``XAUTOCLAIM`` scans, and a delayed or
abandoned entry loses its place in the order. So a message is a few fields under its sequence, and is in exactly one
sorted set: claimable messages are popped from one by rank, the earliest due time is the lowest score of another, and
the size of a place is its cardinality. Hashes and sorted sets take many members in one command, so a claim of a hundred
costs about ten commands inside one script, and is as fast (``benchmarks/redis_queue.py``).

House rules:

- Each verb is one script (``lua/queue``), so it is one step, however many messages it is about.
- Only the server's clock counts, read once in a script. Due times (locks, delays and messages that have expired) are
  applied by the next script that runs, before anything else, a part in each script: there is no sweeper.
- A body is stored as it is, in the hash ``tenure:queue:{NAME}:body``; the message's id, headers and reply address, if
  it has any, as JSON in ``…:head``. A message without them has no entry there.

Each part has a module: ``receiving`` (claims), ``settling`` (locks and verdicts), ``live`` and ``dead_letters``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from tenure._backends.redis.client import Client, other_layout
from tenure._backends.redis.dead_letters import DeadLetters
from tenure._backends.redis.live import LiveMessages
from tenure._backends.redis.message_format import (
    claim_of,
    encoded,
    milliseconds,
)
from tenure._backends.redis.queue_scripts import QueueScripts, is_dead
from tenure._backends.redis.receiving import Receiving
from tenure._backends.redis.scripts import LAYOUT, NOTE, NOTE_GROWING, Answer, Argument
from tenure._backends.redis.settings import encoded_setting, settings_of
from tenure._backends.redis.settling import Settling
from tenure._backends.redis.wake import Wake
from tenure._election.store import Hint
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
    undeclared,
)
from tenure._queue.generations import Generations
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    DeadMessage,
    Delivery,
    LiveMessage,
    SessionLock,
    Stats,
    count_of,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    Deleted,
    Lapsed,
    NotEmpty,
    Renewed,
    Settled,
    Settlement,
)

QUEUE_TRAITS = QueueTraits(lock_min=0.01, lock_max=86_400.0, body_max=2**28, names_dead=True, surveys=True)

STATS_PARTS_MAX = 300
"""The most scripts that ``stats`` runs to apply what is due; the rest is counted by its due times."""
MORE = 2
"""The answer of a script that did a part, and is to be run again."""


class RedisBroker:
    """A ``Broker`` in Redis."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self.generations = Generations()
        self._scripts = QueueScripts(client)
        self._live = LiveMessages(client, self._scripts, self.stats)
        self._dead = DeadLetters(self._scripts, is_cluster=client.is_cluster)
        self._idle = f"{client.options.prefix}idle"
        self._receiving = Receiving(self._scripts, self.generations)
        self._settling = Settling(client, self._scripts, self.send)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do: in a cluster, no step spans slots; a user who may not subscribe gets no hints."""
        if not self._client.is_cluster and not self._wake.is_refused:
            return QUEUE_TRAITS
        return replace(QUEUE_TRAITS, transactions=not self._client.is_cluster, hints=not self._wake.is_refused)

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        if only_undeclared and changes:  # usually there is nothing to write
            declared, made = await self._declared(queue)
            if made and not undeclared(changes, declared):
                self.generations.note(queue, made)
                return QueueSettings(**declared)
        values: list[Argument] = [int(only_undeclared)]
        for name, value in changes.items():
            values += (name, encoded_setting(value))
        await self._scripts.run_listed(
            {queue}, NOTE, self._scripts.call("declare", [self._scripts.base(queue)], values)
        )
        declared, made = await self._declared(queue)
        self.generations.note(queue, made)
        return QueueSettings(**declared)

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings that hold for *queue*."""
        return QueueSettings(**(await self._declared(queue))[0])

    async def _declared(self, queue: str) -> tuple[QueueOptions, bytes]:
        """Return the settings of *queue* that were declared, and what tells it from one that was deleted."""
        kept: dict[bytes, bytes] = await self._client.command("HGETALL", f"{self._scripts.base(queue)}settings")
        layout = kept.get(b"layout", b"1").decode(errors="replace")
        if layout != str(LAYOUT):
            raise other_layout(layout, self._scripts.base(queue), str(self._client.address))
        return settings_of(kept), kept.get(b"made", b"")

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        return await self._scripts.names()

    def hints(self, queue: str) -> AsyncIterator[Hint]:
        """Yield when messages of *queue* may have become claimable."""
        return self._wake.listen(f"{self._scripts.base(queue)}{'dead' if is_dead(queue) else 'live'}")

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        if not messages:
            return []
        arguments: list[Argument] = []
        for message in messages:
            arguments += encoded(message)
        call = self._scripts.call("send", [self._scripts.base(queue)], arguments)
        sequences, is_new, made = await self._scripts.run_listed({queue}, NOTE_GROWING, call)
        self.generations.note(queue, made)
        if is_new:
            await self._scripts.list(queue)
        return [
            message.id or f"{queue}{ID_MARK}{sequence}" for message, sequence in zip(messages, sequences, strict=True)
        ]

    # --- schedules ---

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        now, kept = await self._scripts.run("schedules", queue)
        texts = [one.decode(errors="replace") for one in kept]
        return Schedules(dict(zip(texts[::2], texts[1::2], strict=True)), now / 1_000)

    async def advance(
        self,
        queue: str,
        schedule: str,
        expected: str | None,
        record: str | None,
        messages: Sequence[Outgoing] = (),
        not_before: float = 0.0,
    ) -> Advanced:
        """Keep *record* in place of *expected*, and send *messages*."""
        arguments: list[Argument] = [schedule, expected or "", record or "", milliseconds(not_before)]
        for message in messages:
            arguments += encoded(message)
        call = self._scripts.call("advance", [self._scripts.base(queue)], arguments)
        is_done, kept, now, is_new, made = await self._scripts.run_listed({queue}, NOTE_GROWING, call)
        self.generations.note(queue, made)
        if is_new:
            await self._scripts.list(queue)
        return Advanced(bool(is_done), kept.decode(errors="replace") or None, now / 1_000)

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        return await self._receiving.receive(queue, limit, lock)

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        return await self._receiving.receive_deferred(queue, sequences, lock)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now."""
        return await self._settling.renew(held, lock)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Settle many deliveries."""
        return await self._settling.settle(settlements)

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        return await self._receiving.accept(queue, session, lock)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        return await self._receiving.receive_session(held, limit)

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

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages."""
        return await self._receiving.holding(queues)

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        counts: Answer = []
        # Messages are counted in the places where they belong now, so what is due is applied first, in parts.
        for part in range(STATS_PARTS_MAX):
            counts = await self._scripts.run("stats", queue, int(part == STATS_PARTS_MAX - 1))
            if counts:
                break
        ready, locked, delayed, deferred, dead, age, paused = counts
        if is_dead(queue):
            return Stats(dead=dead)
        return Stats(ready, locked, delayed, deferred, dead, age / 1_000, bool(paused))

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
        self._receiving.forget(queue)
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
        return [name.decode(errors="replace") for name in await self._scripts.run_on("idle", [self._idle])]
