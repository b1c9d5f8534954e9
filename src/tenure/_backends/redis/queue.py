"""Queues in Redis: a hash for each thing known of the messages, a sorted set for each place that a message can be in.

Why not Streams. A stream's consumer group hands out and counts, but its owner is no fence: ``XACK`` asks nobody who
acknowledges, ``XCLAIM`` only moves an entry, and an entry that was claimed twice by one consumer can't be told from
itself. The token, and with it all that must not disagree with it (the delivery count, delays, deferral, the order of
priorities and of sessions, exact sizes), would have to be kept beside the stream anyway; ``XAUTOCLAIM`` scans, and a
delayed or abandoned entry leaves its place in the order. So a message is a few fields under its sequence, and is in
exactly one sorted set: what is claimable is popped from one by rank, what time will bring is read off another by its
moment, and the size of a place is its cardinality. Hashes and sorted sets take many members in one command, so that a
claim of a hundred costs about ten commands inside one script, and that is as fast (``benchmarks/redis_queue.py``).

House rules:

- Each verb is one script (``lua/queue``), so it is one step, however many messages it is about.
- Only the server's clock counts, read once in a script. What time has brought (locks, delays, ttls that have ended) is
  looked after by whoever asks next, a part in each script, before anything else: there is no sweeper.
- A body is stored as it is, in the hash ``tenure:queue:{NAME}:body``; what its sender told of it, if anything, as JSON
  in ``…:head``. A message without either head or delay costs no more than it must.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import repeat
from typing import Any, Literal, TypeVar

from tenure._backends.redis.address import escaped
from tenure._backends.redis.claims import Claims
from tenure._backends.redis.client import Client, other_layout, patience
from tenure._backends.redis.scripts import LAYOUT, NOTE, NOTE_GROWING, QUEUES, Answer, Argument, Call, Script, scripts
from tenure._backends.redis.wake import Wake
from tenure._frozen import FrozenDict
from tenure._lease import NoAnswer
from tenure._queue.broker import Claim, LiveSelection, NoSession, QueueSettings, QueueTraits, Selection, SettingChanges
from tenure._queue.message import (
    DEAD_SUFFIX,
    ID_MARK,
    LAPSED,
    NO_HEADERS,
    SETTLED,
    SETTLED_DEAD,
    STATES,
    Abandon,
    Attempt,
    Complete,
    DeadLetter,
    DeadMessage,
    Death,
    Defer,
    Deleted,
    Delivery,
    Died,
    Failure,
    GiveBack,
    Headers,
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
)
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")
A = TypeVar("A")

QUEUE_TRAITS = QueueTraits(lock_min=0.01, lock_max=86_400.0, body_max=2**28, names_dead=True)

LIST_EVERY = 60.0
"""Seconds after which a queue in use is listed again: another process may have deleted it."""

_ANSWERS = (LAPSED, SETTLED, SETTLED_DEAD)
_TIME_MAX = 10**13  # ms; whoever waits longer waits for ever, and Lua writes more digits in another way
PARTS_MAX = 80
"""So many scripts a claim may take to get past what has died: each looks after a part only."""
DIED_MAX = 1_000
"""After a part that brings the deaths to so many, they are told, and the rest is left to the next claim."""
STATS_PARTS_MAX = 300
"""So many scripts ``stats`` may take to look after what time has brought; the rest is counted without a look at it."""
SESSION_LOST = 300.0
"""Seconds for which a lost claim of a session is looked for: the length of a session's lock is not told with it."""
MORE = 2
LOOKED_AT = 100
"""So many live messages one script looks at, or purges."""
SCANNED = 500
"""So many entries of a sorted set are asked for at once, about."""
_LETTERS: dict[State, str] = {"ready": "r", "locked": "l", "delayed": "d", "deferred": "f"}
_STATES = {letter.encode(): state for state, letter in _LETTERS.items()}
_PLACES: tuple[tuple[State, str], ...] = (
    ("delayed", "delayed"),
    ("deferred", "deferred"),
    ("ready", "waiting"),
    ("ready", "ready"),
)
"""Where messages wait that nobody has; those first that may come to a later one while they are looked for."""
_GROUPED = {Complete: "C", GiveBack: "G", Defer: "F"}


class RedisBroker:
    """A ``Broker`` in Redis."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._lua = scripts(QUEUES, is_cluster=client.is_cluster)
        self._prefix = client.options.prefix
        self._names = f"{self._prefix}queues"
        self._idle = f"{self._prefix}idle"
        self._listed: dict[str, float] = {}  # when we have noted a queue among all names
        self._claimed: dict[str, Claims] = {}
        self._untold: dict[str, list[Died]] = {}  # deaths that were named to a claim whose next part had no answer

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do: in a cluster, a step ends where a slot does. Who may not listen gets no hints."""
        if not self._client.is_cluster and not self._wake.is_deaf:
            return QUEUE_TRAITS
        return replace(QUEUE_TRAITS, transactions=not self._client.is_cluster, hints=not self._wake.is_deaf)

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        values: list[Argument] = []
        for name, value in changes.items():
            values += (name, repr(value))
        await self._noting({queue}, NOTE, Call(self._lua["declare"], [self._base(queue)], values))
        return await self.settings(queue)

    async def settings(self, queue: str) -> QueueSettings:
        """Tell which settings hold for *queue*."""
        kept: dict[bytes, bytes] = await self._client.command("HGETALL", f"{self._base(queue)}settings")
        layout = kept.get(b"layout", b"1").decode(errors="replace")
        if layout != str(LAYOUT):
            raise other_layout(layout, self._base(queue), str(self._client.address))
        known: dict[str, Any] = {}
        for field in fields(QueueSettings):
            text = kept.get(field.name.encode())
            if text is not None:
                known[field.name] = float(text) if field.type == "float" else int(text)
        return QueueSettings(**known)

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        return sorted(name.decode() for name in await self._client.command("SMEMBERS", self._names))

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when messages of *queue* may have become claimable."""
        return self._wake.listen(f"{self._base(queue)}{'dead' if _is_dead(queue) else 'live'}")

    # --- sending ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        if not messages:
            return []
        arguments: list[Argument] = []
        for message in messages:
            arguments += _packed(message)
        call = Call(self._lua["send"], [self._base(queue)], arguments)
        sequences, is_new = await self._noting({queue}, NOTE_GROWING, call)
        if is_new:
            await self._list(queue)
        return [
            message.id or f"{queue}{ID_MARK}{sequence}" for message, sequence in zip(messages, sequences, strict=True)
        ]

    # --- receiving ---

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        died = self._untold.pop(queue, [])
        try:
            for _ in range(PARTS_MAX):
                claim = await self._receive_part(queue, limit, lock)
                died += claim.died
                if claim.deliveries or claim.due_in != 0.0 or len(died) >= DIED_MAX:
                    return claim._replace(died=died) if died else claim
                # A part of what time has brought was looked after, and nothing was left to claim.
        except BaseException:
            if died:
                self._untold.setdefault(queue, []).extend(died)
            raise
        return Claim((), 0.0, died)

    async def _receive_part(self, queue: str, limit: int, lock: float) -> Claim:
        token = secrets.token_hex(16)
        base = self._base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._client.run(
                self._lua["receive"],
                [base],
                *(limit, _milliseconds(lock), token, int(_is_dead(queue)), asking.lane),
                *asking.arguments,
            )
            asking.found = answer[3]
        return _claim(queue, token, answer)

    def _claims(self, base: str) -> Claims:
        claims = self._claimed.get(base)
        if claims is None:
            claims = self._claimed.setdefault(base, Claims(secrets.token_hex(6)))
        return claims

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        token = secrets.token_hex(16)
        base = self._base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._client.run(
                self._lua["receive_deferred"],
                [base],
                *(_milliseconds(lock), token, asking.lane, len(sequences)),
                *sequences,
                *asking.arguments,
            )
            asking.found = answer[3]
        return _claim(queue, token, answer)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend many locks to *lock* seconds from now."""
        if not held:
            return []
        if self._client.is_cluster:
            return await self._slot_by_slot(held, [one.queue for one in held], lambda part: self._renew(part, lock))
        return await self._renew(held, lock)

    async def _renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> list[Renewed | Lapsed]:
        keys = _Keys(self)
        arguments: list[Argument] = [_milliseconds(lock)]
        for one in held:
            number = keys.number(one.queue)
            if isinstance(one, SessionLock):
                arguments += (number, "s", one.token, one.session)
            else:
                arguments += (number, "d" if _is_dead(one.queue) else "q", one.token, one.sequence)
        answers = await self._client.run(self._lua["renew"], keys.bases, *arguments, within=patience(lock))
        return [Renewed(until / 1_000) if until else LAPSED for until in answers]

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts."""
        if not settlements:
            return []
        if self._client.is_cluster:
            queues = [delivery.queue for delivery, _ in settlements]
            return await self._slot_by_slot(settlements, queues, self._settle_in_slot)
        return await self._settle(settlements)

    async def _settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        keys = _Keys(self)
        arguments: list[Argument] = []
        for group in runs(settlements, _go_together):
            arguments += self._judged(group, keys)
        sent_to = {queue for _, verdict in settlements if type(verdict) is Complete for queue, _ in verdict.sends}
        answers = await self._noting(sent_to, NOTE, Call(self._lua["settle"], keys.bases, arguments))
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
            parts.setdefault(self._base(queue), []).append(number)
        told = await asyncio.gather(
            *(ask([items[number] for number in part]) for part in parts.values()), return_exceptions=True
        )
        failures = [answer for answer in told if isinstance(answer, BaseException)]
        # What is wrong for good is told first; if nothing was answered, so is that.
        failures.sort(key=lambda error: isinstance(error, Unavailable))
        if failures and (len(failures) == len(told) or not isinstance(failures[0], Unavailable)):
            raise failures[0]
        answers: dict[int, A | NoAnswer] = {}
        for part, of_part in zip(parts.values(), told, strict=True):
            if isinstance(of_part, BaseException):
                answers.update(dict.fromkeys(part, NoAnswer(str(of_part))))
            else:
                answers.update(zip(part, of_part, strict=True))
        return [answers[number] for number in range(len(items))]

    async def _settle_in_slot(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Pass verdicts on the messages of one queue. What they send to other queues is sent first, if they stand."""
        base = self._base(settlements[0].delivery.queue)
        plain, asked = list(settlements), []
        for number, (delivery, verdict) in enumerate(settlements):
            if type(verdict) is Complete and any(self._base(queue) != base for queue, _ in verdict.sends):
                plain[number] = Settlement(delivery, replace(verdict, sends=()))
                asked.append(number)
        if asked:
            deliveries = [settlements[number].delivery for number in asked]
            answer = await self._client.run(self._lua["holds"], [base], *_held(deliveries))
            for number, holds in zip(asked, answer, strict=True):
                verdict = settlements[number].verdict
                assert isinstance(verdict, Complete)
                if holds:
                    for queue, message in verdict.sends:
                        await self.send(queue, [message])
        return await self._settle(plain)

    def _judged(self, group: Sequence[Settlement], keys: _Keys) -> Iterator[Argument]:
        """Write a group of verdicts as the script wants it."""
        (first, verdict), size = group[0], len(group)
        is_dead = _is_dead(first.queue)
        letter, more = _written(verdict, first.id, keys)
        if is_dead and letter == "F":
            raise ConfigError("a dead letter can't be deferred; complete it, abandon it, or redrive it")
        yield from (keys.number(first.queue), "d" if is_dead else "q", first.token, letter, size)
        yield from (delivery.sequence for delivery, _ in group)
        yield from more

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        token = secrets.token_hex(16)
        base = self._base(queue)
        with self._claims(base).asking(lock, token) as asking:
            answer = await self._client.run(
                self._lua["accept"],
                [base],
                *(_milliseconds(lock), token, int(session is not None), session or "", asking.lane),
                *asking.arguments,
            )
            asking.found = answer[0]
        if len(answer) == 3:
            return NoSession(_seconds(answer[1]), _died(queue, answer[2]))
        _, until, name, state = answer
        return SessionLock(queue, name.decode(), token, until / 1_000, state)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        with self._claims(self._base(held.queue)).asking(SESSION_LOST) as asking:
            answer = await self._ask("receive_session", held, limit, asking.lane, asking.mark, *asking.arguments)
            asking.found = answer[3] if answer[0] else answer[1]
        return _claim(held.queue, held.token, answer) if answer[0] else LAPSED

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        while (answer := await self._ask("release", held)) == MORE:
            pass  # it has a part of many deliveries left to give back
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
        return await self._client.run(self._lua[verb], [self._base(held.queue)], held.session, held.token, *arguments)

    # --- looking on ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        counts: Answer = []
        # What time has brought is counted where it belongs now, so it is moved there first, in parts.
        for part in range(STATS_PARTS_MAX):
            counts = await self._client.run(self._lua["stats"], [self._base(queue)], int(part == STATS_PARTS_MAX - 1))
            if counts:
                break
        ready, locked, delayed, deferred, dead, age = counts
        if _is_dead(queue):
            return Stats(dead=dead)
        return Stats(ready, locked, delayed, deferred, dead, age / 1_000)

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages, part by part, so that no script runs for long."""
        await self.stats(queue)  # does what time has brought
        if which.sequences is not None:
            named = sorted(one for one in which.sequences if one > which.after)
            return await self._shown(queue, which, named, limit)
        timed = await self._timed(queue, which)
        wants = (int(which.wants("ready")), int(which.wants("deferred")))
        found: list[LiveMessage] = []
        after: int | None = which.after
        while after is not None and len(found) < limit:
            asked = min(LOOKED_AT, limit - len(found))
            waiting = await self._run("waiting", queue, asked, after, *wants)
            last = waiting[-1] if len(waiting) == asked else None
            some = {*waiting, *(one for one in timed if one > after and (last is None or one <= last))}
            found += await self._shown(queue, which, sorted(some), limit - len(found))
            after = last
        return found

    async def _shown(self, queue: str, which: LiveSelection, sequences: Sequence[int], limit: int) -> list[LiveMessage]:
        """Show those that are meant, up to *limit*, and look at no more than that needs."""
        found: list[LiveMessage] = []
        at_once = min(LOOKED_AT, limit)
        while sequences and len(found) < limit:
            part, sequences = sequences[:at_once], sequences[at_once:]
            at_once = LOOKED_AT  # few of them are meant
            _, go_on, told, letters, moments = await self._live("peek", queue, which, part)
            deliveries = _deliveries(queue, "", 0.0, told)
            found += (_live_message(*one) for one in zip(deliveries, letters, moments, strict=False))
            if go_on >= 0:
                sequences = [*(one for one in part if one > go_on), *sequences]
        return found[:limit]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, part by part, so that no script runs for long."""
        await self.stats(queue)  # does what time has brought
        which = replace(which, states=(STATES if which.states is None else which.states) - {"locked"})
        what: Literal["count", "purge"] = "count" if dry_run else "purge"
        if which.sequences is not None:
            return await self._purge(what, queue, which, sorted(one for one in which.sequences if one > which.after))
        newest = int(await self._client.command("GET", f"{self._base(queue)}sequence") or 0)
        total, gone = 0, 1
        while gone and not (dry_run and total):  # again, as what moves while it is looked for may be missed
            gone = 0
            seen: set[int] = set()
            for state, key in _PLACES:
                if which.wants(state):
                    async for page in self._scan(queue, key):
                        some = {one for one in page if which.after < one <= newest} - seen
                        gone += await self._purge(what, queue, which, sorted(some))
                        if dry_run:  # else it is gone
                            seen |= some
            total += gone
        return total

    async def _purge(
        self, what: Literal["count", "purge"], queue: str, which: LiveSelection, sequences: Sequence[int]
    ) -> int:
        parts = [sequences[first : first + LOOKED_AT] for first in range(0, len(sequences), LOOKED_AT)]
        return sum([(await self._live(what, queue, which, part))[0] for part in parts])

    async def _timed(self, queue: str, which: LiveSelection) -> list[int]:
        """Return the sequences of what stands in the order of its moments: locked or delayed, as far as it is meant."""
        keys = [
            key for wanted, key in ((which.wants("locked"), "locked"), (which.wants("delayed"), "delayed")) if wanted
        ]
        return [one for key in keys async for page in self._scan(queue, key) for one in page]

    async def _scan(self, queue: str, key: str) -> AsyncIterator[list[int]]:
        """Go through a sorted set; what stays in it meanwhile is there, perhaps twice."""
        cursor = -1
        while cursor:
            words = ("ZSCAN", f"{self._base(queue)}{key}", max(cursor, 0), "COUNT", SCANNED)
            cursor, page = await self._client.command(*words)
            yield [int(sequence) for sequence, _ in page]

    async def _live(
        self, what: Literal["peek", "count", "purge"], queue: str, which: LiveSelection, sequences: Sequence[int]
    ) -> Answer:
        states = "".join(letter for state, letter in _LETTERS.items() if which.wants(state))
        before: Argument = "" if which.sent_before is None else math.ceil(which.sent_before * 1_000)
        return await self._run(
            "live",
            queue,
            *(what, states, which.session or "", before, f"{queue}{ID_MARK}"),
            *_set_of(which.ids),
            *sequences,
        )

    async def _run(self, script: str, queue: str, *arguments: Argument) -> Answer:
        return await self._client.run(self._lua[script], [self._base(queue)], *arguments)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        answer = await self._client.run(self._lua["peek_deferred"], [self._base(queue)], limit, after)
        return _claim(queue, "", answer).deliveries

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        found: list[DeadMessage] = []
        async for _, more in self._dead("peek", queue, which, limit):
            found += (_dead_message(queue, one) for one in _deliveries(queue, "", 0.0, more[0]))
        return found

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        if to is not None and not dry_run:
            return await self._move(queue, which, limit, to)
        return sum([meant async for meant, _ in self._dead("count" if dry_run else "redrive", queue, which, limit)])

    async def _move(self, queue: str, which: Selection, limit: int | None, to: str) -> int:
        """Move dead letters to another queue; in a cluster, each part is written there before it is removed here."""
        await self._list(to)
        if not self._client.is_cluster:
            return sum([meant async for meant, _ in self._dead("move", queue, which, limit, to)])
        total = 0
        async for _, more in self._dead("peek", queue, which, limit):
            letters = list(_deliveries(queue, "", 0.0, more[0]))
            if letters:
                await self._run("keep_anew", to, *_anew(letters, more[0][5]))
                only = Selection(sequences=frozenset(letter.sequence for letter in letters))
                total += sum([meant async for meant, _ in self._dead("purge", queue, only, None)])
        await self._list(to)  # it may have been deleted meanwhile
        return total

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return sum([meant async for meant, _ in self._dead("purge", queue, which, limit)])

    async def _dead(
        self,
        what: Literal["peek", "count", "redrive", "purge", "move"],
        queue: str,
        which: Selection,
        limit: int | None,
        to: str | None = None,
    ) -> AsyncIterator[tuple[int, Answer]]:
        """Go through the dead letters, part by part, so that no script runs for long."""
        left = 10**9 if limit is None else limit
        before: Argument = "" if which.dead_before is None else math.ceil(which.dead_before * 1_000)
        if which.dead_for is not None:
            before = f"-{_bounded(which.dead_for)}"
        after = which.after
        while left > 0 and after >= 0:
            meant, after, *more = await self._client.run(
                self._lua["dead"],
                [self._base(queue)] if to is None else [self._base(queue), self._base(to)],
                *(what, left, after, before, which.reason or "", f"{queue}{ID_MARK}"),
                *(_set_of(which.sequences)),
                *(_set_of(which.ids)),
            )
            left -= meant
            yield meant, more

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Tell which *ids* the inbox remembers."""
        if not ids:
            return []
        return [bool(one) for one in await self._client.run(self._lua["handled"], [self._base(queue)], *ids)]

    # --- the end of a queue ---

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty; by *force*, its messages go first, some hundreds in one step."""
        found = await self.stats(queue)
        if count_of(found) and not force:
            return NotEmpty(found)
        # First off the list, which lies in another slot: what is used again meanwhile is listed again by that use.
        await self._client.command("SREM", self._names, queue)
        gone = 2
        while gone == 2:
            gone = await self._client.run(self._lua["delete"], [self._base(queue)], int(force))
        self._listed.pop(queue, None)
        self._claimed.pop(self._base(queue), None)
        if not gone:
            await self._list(queue)
            return NotEmpty(await self.stats(queue))
        await self._client.command("ZREM", self._idle, queue)
        return Deleted(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*."""
        await self._client.run(self._lua["delete_when_idle"], [self._idle], queue, _milliseconds(seconds))

    async def idle(self) -> Sequence[str]:
        """List the queues whose time has run out."""
        return [name.decode() for name in await self._client.run(self._lua["idle"], [self._idle])]

    # --- names ---

    def _base(self, queue: str) -> str:
        """Return what the keys of *queue* begin with; those of its dead letters begin with the same."""
        return f"{self._prefix}queue:{{{escaped(queue.removesuffix(DEAD_SUFFIX))}}}:"

    async def _noting(self, queues: set[str], note: Script, call: Call) -> Answer:
        """Run *call*; before it, note *queues* among all names, where there is need of it."""
        since = time.monotonic() - LIST_EVERY
        new = {queue for queue in queues if self._listed.get(queue, -math.inf) <= since}
        if not new:
            return await self._client.run(call.script, call.keys, *call.arguments)
        # The list lies in another slot, so it can't be part of the script; before it, so that none is missing.
        answer, is_noted = await self._client.run_noted(Call(note, [self._names], sorted(new)), call)
        if is_noted:
            self._listed.update(dict.fromkeys(new, time.monotonic()))
        return answer

    async def _list(self, queue: str) -> None:
        await self._client.run(NOTE, [self._names], queue)


class _Keys:
    """The queues that a script is about, numbered as they are met."""

    def __init__(self, broker: RedisBroker) -> None:
        self._broker = broker
        self._numbers: dict[str, int] = {}
        self.bases: list[str] = []

    def number(self, queue: str) -> int:
        """Return the number of the key of *queue*."""
        number = self._numbers.get(queue)
        if number is None:
            self.bases.append(self._broker._base(queue))
            number = self._numbers[queue] = len(self.bases)
        return number


def _held(deliveries: Sequence[Delivery]) -> Iterator[Argument]:
    for delivery in deliveries:
        yield from ("d" if _is_dead(delivery.queue) else "q", delivery.token, delivery.sequence)


# --- going in ----------------------------------------------------------------------------------------------------


def _packed(message: Outgoing) -> tuple[str, str, str, bytes]:
    """Write *message* as the scripts want it: control, id, head, body; what has nothing to tell is empty."""
    control = head = ""
    if message.delay or message.at or message.ttl or message.priority or message.session:
        delay, at = _bounded(message.delay), _bounded(message.at or 0.0)  # type: ignore[arg-type]
        ttl = max(1, _bounded(message.ttl)) if message.ttl else 0
        control = f"{delay}|{at}|{ttl}|{message.priority}|{message.session or ''}"
    if message.id or message.headers or message.reply_to or message.correlation_id:
        told = [message.id, dict(message.headers), message.reply_to, message.correlation_id]
        head = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return control, message.id or "", head, message.body


def _anew(letters: Sequence[Delivery], histories: Sequence[bytes | None]) -> Iterator[Argument]:
    """Write dead letters as the script keep_anew wants them."""
    for letter, history in zip(letters, histories, strict=True):
        told = [letter.id, dict(letter.headers), letter.reply_to, letter.correlation_id]
        head = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
        yield from (letter.priority, letter.session or "", head, letter.body, history or b"")


def runs(items: Sequence[T], same: Callable[[T, T], bool]) -> Iterator[Sequence[T]]:
    """Cut *items* into runs of neighbours that are the same."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or not same(items[start], items[end]):
            yield items[start:end]
            start = end


def _go_together(first: Settlement, other: Settlement) -> bool:
    """Whether two verdicts can be written as one group."""
    (held, verdict), (other_held, other_verdict) = first, other
    return (
        (verdict is other_verdict or verdict == other_verdict)
        and held.token == other_held.token
        and held.queue == other_held.queue
        and not (type(verdict) is Complete and (verdict.sends or verdict.remember))
    )


def _written(verdict: Verdict, named: str, keys: _Keys) -> tuple[str, list[Argument]]:
    match verdict:
        case Complete(sends, remember) if sends or remember:
            more: list[Argument] = [_bounded(remember), named, len(sends)]
            for queue, message in sends:
                more += (keys.number(queue), *_packed(message))
            return "X", more
        case Abandon(delay, error):
            return "A", [_bounded(delay), _error(error)]
        case DeadLetter(reason, description, error):
            return "D", [reason, description, _error(error)]
        case _:
            return _GROUPED[type(verdict)], []


def _error(error: Failure | None) -> str:
    return json.dumps([error.type, error.message, error.traceback]) if error else ""


def _set_of(some: frozenset[int] | frozenset[str] | None) -> list[Argument]:
    return [-1] if some is None else [len(some), *some]


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1_000)


def _bounded(seconds: float) -> int:
    return min(_milliseconds(seconds), _TIME_MAX)


# --- coming out --------------------------------------------------------------------------------------------------


def _claim(queue: str, token: Any, answer: Answer) -> Claim:
    until, due_in, told, _, died = answer
    return Claim(tuple(_deliveries(queue, token, until / 1_000, told)), _seconds(due_in), _died(queue, died))


def _died(queue: str, named: Sequence[bytes]) -> Sequence[Died]:
    return [_death_of(queue, *one.decode().split("|", 3)) for one in named] if named else ()


def _death_of(queue: str, sequence: str, count: str, reason: str, named: str) -> Died:
    return Died(int(sequence), named or f"{queue}{ID_MARK}{sequence}", int(count), reason)


def _deliveries(queue: str, token: Any, until: float, told: Answer) -> Iterator[Delivery]:
    """Make deliveries of what the scripts tell: sequences, states, heads, bodies; of dead ones deaths and histories."""
    sequences, states, heads, bodies, *of_dead = told
    deaths = map(_death, *of_dead) if of_dead else repeat(None)
    home = queue.removesuffix(DEAD_SUFFIX)
    for sequence, state, head, body, death in zip(
        sequences, states, heads or repeat(None), bodies, deaths, strict=False
    ):
        count, sent, priority, _, _, _, session = state.split(b"|", 6)
        named, headers, reply_to, correlation_id = _head(head) if head else _NO_HEAD
        yield Delivery(
            queue,
            int(sequence),
            token,
            named or f"{home}{ID_MARK}{sequence.decode()}",
            body,
            headers,
            int(count),
            int(sent) / 1_000,
            until,
            session.decode() if session else None,
            int(priority),
            reply_to,
            correlation_id,
            death,
        )


_NO_HEAD: tuple[str | None, Headers, str | None, str | None] = (None, NO_HEADERS, None, None)


def _head(text: bytes) -> tuple[str | None, Headers, str | None, str | None]:
    named, headers, reply_to, correlation_id = json.loads(text)
    return named, FrozenDict(headers) if headers else NO_HEADERS, reply_to, correlation_id


def _death(text: bytes, lines: bytes | None) -> Death:
    reason, description, at = json.loads(text)
    history = tuple(_attempt(line) for line in lines.split(b"\n")) if lines else ()
    errors = [attempt.error for attempt in history if attempt.error is not None]
    return Death(reason, description, at / 1_000, errors[-1] if errors else None, history)


def _attempt(line: bytes) -> Attempt:
    number, at, outcome, error = line.decode().split("|", 3)
    failure = Failure(*json.loads(error)) if error else None
    return Attempt(int(number), int(at) / 1_000, outcome, failure)  # type: ignore[arg-type]


def _dead_message(queue: str, one: Delivery) -> DeadMessage:
    assert one.death is not None
    return DeadMessage(
        queue,
        one.sequence,
        one.id,
        one.body,
        one.headers,
        one.delivery_count,
        one.enqueued_at,
        one.session,
        one.priority,
        one.reply_to,
        one.correlation_id,
        one.death.reason,
        one.death.description,
        one.death.at,
        one.death.error,
        one.death.history,
    )


def _live_message(one: Delivery, letter: bytes, moment: int) -> LiveMessage:
    state = _STATES[letter]
    return LiveMessage(
        one.queue,
        one.sequence,
        one.id,
        one.body,
        one.headers,
        state,
        one.delivery_count,
        one.enqueued_at,
        moment / 1_000 if state == "locked" else None,
        moment / 1_000 if state == "delayed" else None,
        one.session,
        one.priority,
        one.reply_to,
        one.correlation_id,
    )


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1_000


def _is_dead(queue: str) -> bool:
    return queue.endswith(DEAD_SUFFIX)
