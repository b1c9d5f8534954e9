"""Queues in PostgreSQL: rows that are claimed by whoever skips what others are at, judged by the server's clock.

What is done in one step is a function in the database (``sql/functions``); here are the columns that go in and the rows
that come out.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection, on_loop, transaction
from tenure._backends.postgres.sessions import HeldSessions
from tenure._backends.postgres.statements import PLANS, statements
from tenure._backends.postgres.wake import Wake
from tenure._frozen import FrozenDict
from tenure._queue.broker import (
    CLAIM_BYTES,
    Claim,
    LiveSelection,
    NoSession,
    QueueSettings,
    QueueTraits,
    Selection,
    SettingChanges,
)
from tenure._queue.message import (
    COMPLETE,
    DEAD_SUFFIX,
    ID_MARK,
    INT_MAX,
    LAPSED,
    NO_HEADERS,
    SETTLED,
    SETTLED_DEAD,
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
    spellings_of,
)
from tenure.errors import ConfigError, TenureError

QUEUE_TRAITS = QueueTraits(lock_min=0.1, lock_max=7 * 86_400.0, body_max=2**28, names_dead=True)

TIDY_AFTER = 200
"""So many statements after the last time, a queue is tidied by this process; each leaves a narrow row behind."""

TIDY_EVERY = 10.0
"""Seconds after which it is tidied even if there were fewer."""

_SETTINGS = "lock, max_deliveries, dedupe_window, body_max, dead_retention"
RAISE_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each look whether those have ended who wrote when it was proposed; then it is given up."""

RAISE_AFTER = 5_000
"""So many messages after the last time, this process raises the marks from which claims begin."""

LOOK_AHEAD_EVERY = 10.0
"""Seconds before they are to be raised as far as they go again, if that has failed."""

DIED_MAX = 10_000
"""So many deaths of a queue are kept to be told of with this process's next claim, the newest."""

REVIVED_AT_ONCE = 5_000
"""So many dead letters are put back or removed in one statement."""

MOVED_AT_ONCE = 200
"""So many dead letters are put into another queue in one transaction."""

PURGED_AT_ONCE = 1_000
"""So many live messages are purged in one transaction."""

_STATES: tuple[State, ...] = ("ready", "locked", "delayed", "deferred")
"""By their numbers in the database."""

_LOCKED = 1
_LANES: tuple[tuple[State, int], ...] = (("deferred", 11), *(("ready", lane) for lane in range(11)))
"""Where messages wait that are not delayed. What is delayed or deferred may come to a later one while it is purged."""

_PLANNED = "; ".join(f"SET LOCAL {setting}" for setting in PLANS)

_ANSWERS: tuple[Settled | Lapsed, ...] = (LAPSED, SETTLED, SETTLED_DEAD)
_VERDICTS: dict[type[Verdict], str] = {
    Complete: "complete",
    Abandon: "abandon",
    GiveBack: "give back",
    Defer: "defer",
    DeadLetter: "dead",
}


@dataclass(slots=True)
class _Unanswered:
    """A claim without an answer: what it holds, or will, is to be given back."""

    asked_at: float
    lock: float
    missed_at: float = math.inf  # when the server first said that it holds nothing


@dataclass(slots=True)
class _Received:
    """What this process has received of a queue."""

    count: int = 0  # messages since it has proposed to raise the marks
    behind: int = RAISE_AFTER // 2  # since it has raised them as far as they go; before it began, others may not have
    highest: int = 0
    look_ahead_from: float = 0.0  # if that fails, the next claim need not begin it again


class PostgresBroker:
    """A ``Broker`` in PostgreSQL."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._schema = client.options.schema
        self._traits = replace(QUEUE_TRAITS, hints=client.options.listen)
        self._used: dict[str, tuple[int, float]] = {}  # statements since a queue was tidied, and when that was
        self._received: dict[str, _Received] = {}
        self._raising: set[str] = set()
        self._unanswered: dict[str, dict[int, _Unanswered]] = {}  # claims by queue and token
        self._sessions = HeldSessions()
        self._died: dict[str, deque[Died]] = {}  # by queue, and not told yet
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return self._traits

    # --- settings ---

    async def declare(self, queue: str, changes: SettingChanges) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        if not changes:
            return await self.settings(queue)
        new = QueueSettings(**changes)
        written = ", ".join(f"{name} = excluded.{name}" for name in sorted(changes))
        [row] = await self._client.ask(
            f"INSERT INTO {self._schema}.queue (name, {_SETTINGS}) VALUES ($1, $2, $3, $4, $5, $6) "
            f"ON CONFLICT (name) DO UPDATE SET {written}, deleted_at = NULL RETURNING {_SETTINGS}",
            queue,
            float(new.lock),
            new.max_deliveries,
            float(new.dedupe_window),
            new.body_max,
            float(new.dead_retention),
        )
        return QueueSettings(*row)

    async def settings(self, queue: str) -> QueueSettings:
        """Tell which settings hold for *queue*."""
        rows = await self._client.ask(f"SELECT {_SETTINGS} FROM {self._schema}.queue WHERE name = $1", queue)
        return QueueSettings(*rows[0]) if rows else QueueSettings()

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        rows = await self._rows("names")
        return [name for (name,) in rows]

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when messages of *queue* may have become claimable."""
        return self._wake.listen(f"queue:{queue}")

    # --- sending and receiving ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        if not messages:
            return []
        numbers = await self._call("send_many", queue, *_columns(messages))
        self._wake.ring(f"queue:{queue}")
        self._note_use(queue)
        made_up = iter(numbers)
        return [f"{queue}{ID_MARK}{next(made_up)}" if message.id is None else message.id for message in messages]

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        token = _new_token()
        if queue.endswith(DEAD_SUFFIX):  # to receive one of these is not counted, so nothing is given back
            rows = await self._told_rows("receive_dead", queue.removesuffix(DEAD_SUFFIX), limit, lock, token)
            rows = sorted((row for row in rows if row[0] is not None), key=_rank)
            return Claim(tuple(_delivery(queue, token, row[:11], _death(row[11:])) for row in rows))
        await self._give_back(queue)
        with self._noted_unanswered(queue, token, lock):
            rows = await self._rows("receive", queue, limit, lock, token)
        return self._claim(queue, token, rows, _rank)

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        token = _new_token()
        rank = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
        await self._give_back(queue)
        with self._noted_unanswered(queue, token, lock):
            rows = await self._told_rows("receive_deferred", queue, list(rank), lock, token)
        rows = [row for row in rows if row[0] is not None]
        return self._claim(queue, token, rows, lambda row: rank[row[0]])

    @contextmanager
    def _noted_unanswered(self, queue: str, token: int, lock: float) -> Iterator[None]:
        """Remember the claim with *token* if there is no answer to it: it may hold messages, or will."""
        asked_at = time.monotonic()
        try:
            yield
        except BaseException:
            self._unanswered.setdefault(queue, {})[token] = _Unanswered(asked_at, lock)
            raise

    async def _give_back(self, queue: str) -> None:
        """Give back what unanswered claims hold. Each is looked for until it is found, or holds nothing for certain."""
        claims = dict(self._unanswered.get(queue, ()))
        if not claims:
            return
        asked = f"SELECT {self._function('give_back', 4)}, {self._schema}._told()"

        async def give_back(connection: Connection) -> tuple[list[int], str | None]:
            now = time.monotonic()  # not from before the wait for the connection
            ages = [now - claim.asked_at for claim in claims.values()]
            row = await connection.fetchrow(asked, queue, list(claims), ages, [claim.lock for claim in claims.values()])
            assert row is not None
            return row[0], row[1]

        found, died = await self._client.work(give_back)
        self._note_died(queue, died)
        left, now = self._unanswered.get(queue, {}), time.monotonic()
        for token, claim in claims.items():
            # It may be carried out yet: also after a cut of the network, which brings what was sent before it late.
            if token in found or claim.missed_at < now - 3 * self._client.options.timeout:
                left.pop(token, None)
            claim.missed_at = min(claim.missed_at, now)
        if not left:
            self._unanswered.pop(queue, None)
        if found:
            self._wake.ring(f"queue:{queue}")

    def _claim(self, queue: str, token: int, rows: list[Any], rank: Callable[[Any], Any]) -> Claim:
        """Make deliveries of *rows*, by *rank*; the last one may only tell when to look again."""
        due_in, has_asked = None, False
        if rows and rows[-1][0] is None:
            last, has_asked = rows.pop(), True
            due_in = last[6]
            self._note_died(queue, last[3])
            if sum(len(row[2]) for row in rows) >= CLAIM_BYTES:
                due_in = 0.0
        if rows:
            self._note_use(queue)
            rows.sort(key=rank)
        if rows or has_asked:
            self._note_received(queue, len(rows), rows[-1][0] if rows else 0, has_asked)
        return Claim(tuple(_delivery(queue, token, row) for row in rows), due_in, self._take_died(queue))

    def _note_died(self, queue: str, text: str | None) -> None:
        """Remember to tell of the deaths in *text* with the next claim."""
        if text:
            self._died.setdefault(queue, deque(maxlen=DIED_MAX)).extend(
                Died(number, named or f"{queue}{ID_MARK}{number}", deliveries, reason)
                for number, named, deliveries, reason in json.loads(text)
            )

    def _take_died(self, queue: str) -> Sequence[Died]:
        died = self._died.get(queue)
        if not died:
            return ()
        told = []
        with suppress(IndexError):  # a loop in another thread may add to it, and take from it
            while True:
                told.append(died.popleft())
        return tuple(told)

    # --- under a lock ---

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        """Extend many locks to *lock* seconds from now."""
        groups: dict[tuple[str, str], list[int]] = {}
        for place, one in enumerate(held):
            kind = "sessions" if isinstance(one, SessionLock) else "dead" if one.queue.endswith(DEAD_SUFFIX) else "many"
            groups.setdefault((kind, one.queue.removesuffix(DEAD_SUFFIX)), []).append(place)
            if isinstance(one, SessionLock):
                self._hold(one.token, lock)
        answers: list[Renewed | Lapsed] = [LAPSED] * len(held)

        bound = self._client.bound(max(1.0, lock / 3))

        async def renew(connection: Connection) -> None:
            async with transaction(connection, bound) if len(groups) > 1 else nullcontext():
                for (kind, queue), places in sorted(groups.items()):
                    some = [held[place] for place in places]
                    rows = await connection.fetch(
                        f"SELECT * FROM {self._schema}.renew_{kind}($1, $2, $3, $4)",
                        queue,
                        [one.session if isinstance(one, SessionLock) else one.sequence for one in some],
                        [one.token for one in some],
                        lock,
                    )
                    for place, (until,) in zip(places, rows, strict=True):
                        answers[place] = LAPSED if until is None else Renewed(until)

        if held:
            await self._client.work(renew, within=bound, urgent=True)  # renew_many builds on this
        for one, answer in zip(held, answers, strict=True):
            if answer is LAPSED and isinstance(one, SessionLock):
                self._sessions.forget(one.token)
        return answers

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Pass many verdicts."""
        if not settlements:
            return []
        queue = settlements[0].delivery.queue
        are_plain = not queue.endswith(DEAD_SUFFIX)
        for delivery, verdict in settlements:
            if delivery.session is not None:
                self._sessions.settled(delivery.token, delivery.sequence)
            if verdict is not COMPLETE or delivery.queue != queue:
                are_plain = False
        if are_plain:
            numbers = [delivery.sequence for delivery, _ in settlements]
            if len(set(numbers)) == len(numbers):
                tokens = [delivery.token for delivery, _ in settlements]
                done = await self._call("complete_many", queue, numbers, tokens) or ()
                self._note_use(queue)
                if len(done) == len(numbers):
                    return [SETTLED] * len(numbers)
                gone = set(done)
                return [SETTLED if number in gone else LAPSED for number in numbers]
        return await self._settle_each(settlements)

    async def _settle_each(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Pass verdicts of any kind, all in one step."""
        groups: dict[str, list[int]] = {}
        seen: set[tuple[str, int, object]] = set()
        for place, (delivery, verdict) in enumerate(settlements):
            if type(verdict) is Defer and delivery.queue.endswith(DEAD_SUFFIX):
                raise ConfigError("a dead letter can't be deferred; complete it, abandon it, or redrive it")
            named = delivery.queue, delivery.sequence, delivery.token
            if named not in seen:  # the second time, it is settled already
                seen.add(named)
                groups.setdefault(delivery.queue, []).append(place)
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)

        several = len(groups) > 1 or any(type(verdict) is Complete and verdict.sends for _, verdict in settlements)

        async def settle(connection: Connection) -> set[str]:
            async with transaction(connection, self._client.bound()) if several else nullcontext():
                for queue, places in sorted(groups.items()):
                    places.sort(key=lambda place: settlements[place].delivery.sequence)
                    result = await self._pass(connection, queue, [settlements[place] for place in places])
                    for place, answer in zip(places, result, strict=True):
                        answers[place] = _ANSWERS[answer]
                passed = [one.verdict for one, answer in zip(settlements, answers, strict=True) if answer is not LAPSED]
                return await self._send_with(connection, passed)

        rung = await self._client.work(settle)
        for (delivery, verdict), answer in zip(settlements, answers, strict=True):
            rung |= _woken_by(delivery, verdict, answer)
        for queue in groups:
            self._note_use(queue.removesuffix(DEAD_SUFFIX))
        self._wake.ring(*sorted(rung))
        return answers

    async def _pass(self, connection: Connection, queue: str, some: Sequence[Settlement]) -> list[int]:
        verdicts = [verdict for _, verdict in some]
        function = "settle_dead" if queue.endswith(DEAD_SUFFIX) else "settle_many"
        result: list[int] = await connection.fetchval(
            f"SELECT {self._schema}.{function}($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            queue.removesuffix(DEAD_SUFFIX),
            [delivery.sequence for delivery, _ in some],
            [delivery.token for delivery, _ in some],
            [_VERDICTS[type(verdict)] for verdict in verdicts],
            [float(verdict.delay) if isinstance(verdict, Abandon) else 0.0 for verdict in verdicts],
            [verdict.reason if isinstance(verdict, DeadLetter) else None for verdict in verdicts],
            [verdict.description if isinstance(verdict, DeadLetter) else None for verdict in verdicts],
            [_failure(verdict.error) if isinstance(verdict, Abandon | DeadLetter) else None for verdict in verdicts],
            [float(verdict.remember) if isinstance(verdict, Complete) else 0.0 for verdict in verdicts],
        )
        return result

    async def _send_with(self, connection: Connection, passed: Sequence[Verdict]) -> set[str]:
        """Send what is to be sent with the verdicts that stand; return the topics to ring."""
        sends: dict[str, list[Outgoing]] = {}
        for verdict in passed:
            for queue, message in verdict.sends if isinstance(verdict, Complete) else ():
                sends.setdefault(queue, []).append(message)
        for queue, messages in sorted(sends.items()):
            columns = _columns(messages)
            await connection.execute(f"SELECT {self._function('send_many', 1 + len(columns))}", queue, *columns)
        return {f"queue:{queue}" for queue in sends}

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        token = _new_token()
        [(name, until, state)] = await self._told_rows("accept", queue, session, lock, token)
        if name is None:
            return NoSession(until, self._take_died(queue))
        self._hold(token, lock)
        return SessionLock(queue, name, token, until, state)

    def _hold(self, token: int | str, lock: float) -> None:
        """Remember a session whose lock was extended by *lock* seconds, or is about to be."""
        now = time.monotonic()
        # The server carries it out while it is asked, or soon after; and its clock may be a slower one.
        self._sessions.hold(token, now + 2 * (self._client.options.timeout + lock), now)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        token = held.token
        assert isinstance(token, int)
        if token not in self._sessions:  # it was accepted by another backend
            self._hold(token, QUEUE_TRAITS.lock_max)
        if self._sessions.is_unsure(token):  # else what comes next would come before what was claimed last
            kept = self._sessions.in_hand(token)
            await self._told_call("give_back_session", held.queue, held.session, token, kept)
            self._sessions.doubt(token, False)
        try:
            rows = await self._rows("receive_session", held.queue, held.session, token, limit)
        except BaseException:
            self._sessions.doubt(token, True)
            raise
        if not rows[-1][4]:
            self._sessions.forget(token)
            return LAPSED
        self._sessions.received(token, (row[0] for row in rows[:-1]))
        return self._claim(held.queue, token, rows, itemgetter(0))

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        self._sessions.forget(held.token)
        if not await self._told_call("release_session", held.queue, held.session, held.token):
            return LAPSED
        self._wake.ring(f"queue:{held.queue}")
        return SETTLED

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        rows = await self._rows("read_state", held.queue, held.session, held.token)
        state: bytes | None = rows[0][0] if rows else None
        return state if rows else LAPSED

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        return SETTLED if await self._rows("write_state", held.queue, held.session, held.token, state) else LAPSED

    # --- looking on ---

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        await self._catch_up(queue.removesuffix(DEAD_SUFFIX))
        rows = await self._rows("counts", queue.removesuffix(DEAD_SUFFIX))
        if not rows:
            return Stats()
        ready, locked, delayed, deferred, dead = (int(count or 0) for count in rows[0][:5])
        if queue.endswith(DEAD_SUFFIX):
            return Stats(dead=dead)
        return Stats(ready, locked, delayed, deferred, dead, rows[0][5] or 0.0)

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        await self._catch_up(queue)
        rows = await self._planned("peek", queue, *_fitting(which), limit, _states(which))
        return [_live_message(queue, row) for row in rows]

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, some of one priority or state in each step."""
        await self._catch_up(queue)
        [[now]] = await self._client.ask(f"SELECT {self._schema}.clock()")
        which = replace(which, sent_before=now if which.sent_before is None else min(now, which.sent_before))
        if dry_run:
            states = [state for state in _states(which) if state != _LOCKED]
            [[counted]] = await self._planned("count", queue, *_fitting(which), None, states)
            return int(counted)
        total = await self._purge_delayed(queue, which) if which.wants("delayed") else 0
        for state, lane in _LANES:
            if which.wants(state):
                total += await self._purge_lane(queue, which, lane)
        return total

    async def _purge_lane(self, queue: str, which: LiveSelection, lane: int) -> int:
        total = 0
        while True:
            count, last = await self._purge("purge_lane", queue, which, lane)
            total += count
            if last is None:
                return total
            which = replace(which, after=int(last))

    async def _purge_delayed(self, queue: str, which: LiveSelection) -> int:
        total, due_at = 0, 0.0
        while True:
            count, last = await self._purge("purge_delayed", queue, which, due_at)
            total += count
            if last is None:
                return total
            due_at = last

    async def _purge(self, statement: str, queue: str, which: LiveSelection, behind: float) -> tuple[int, float | None]:
        """Remove some; return how many, and the last of them, or None if there are no more."""
        asked = _live(self._schema)

        async def purge(connection: Connection) -> tuple[int, float | None, bool]:
            async with transaction(connection, self._client.bound()):
                await connection.execute(_PLANNED)
                row = await connection.fetchrow(asked[statement], queue, *_fitting(which), PURGED_AT_ONCE, behind)
                assert row is not None
                count, last, has_freed = row
            return count, last if count == PURGED_AT_ONCE else None, has_freed

        count, last, has_freed = await self._client.work(purge)
        if has_freed:  # what was removed has held up others
            self._wake.ring(f"queue:{queue}")
        return count, last

    async def _planned(self, statement: str, *values: object) -> list[Any]:
        """Ask one of the statements about live messages."""

        async def ask(connection: Connection) -> list[Any]:
            async with transaction(connection, self._client.bound()):
                await connection.execute(_PLANNED)
                return await connection.fetch(_live(self._schema)[statement], *values)

        return await self._client.work(ask)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        await self._catch_up(queue)
        return [_delivery(queue, "", row) for row in await self._rows("peek_deferred", queue, limit, after)]

    async def _catch_up(self, queue: str) -> None:
        """Have done what time has done, in steps, each of which ends long before the server gives a question up."""
        while await self._told_call("catch_up", queue):
            pass

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        await self._catch_up(queue)
        rows = await self._rows("peek_dead", queue, *_meant(await self._dated(which)), limit)
        return [_dead_message(queue, row) for row in rows]

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        if dry_run:
            await self._catch_up(queue)
            which = await self._dated(which)
            counted: int = await self._call("revive", queue, *_meant(which), limit, False, True)
            return counted
        return await self._revive(queue, which, limit, purge=False, to=to)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._revive(queue, which, limit, purge=True)

    async def _revive(
        self, queue: str, which: Selection, limit: int | None, *, purge: bool, to: str | None = None
    ) -> int:
        """Go through dead letters in steps, each of which ends long before the server gives a question up."""
        await self._catch_up(queue)
        which = await self._dated(which)
        if limit is None or limit > (
            REVIVED_AT_ONCE if to is None else MOVED_AT_ONCE
        ):  # what dies again meanwhile is not meant
            [[now]] = await self._client.ask(f"SELECT {self._schema}.clock()")
            which = replace(which, dead_before=now if which.dead_before is None else min(now, which.dead_before))
        total = 0
        while limit is None or total < limit:
            at_once = REVIVED_AT_ONCE if to is None else MOVED_AT_ONCE
            most = at_once if limit is None else min(at_once, limit - total)
            if to is None:
                found: int = await self._call("revive", queue, *_meant(which), most, purge, False)
            else:
                found = await self._move(queue, which, most, to)
            total += found
            if found and not purge:  # at each step: consumers need not wait for the last, which may fail
                self._wake.ring(f"queue:{to or queue}")
            if not found:  # fewer than asked for may be found because others were at some of them
                break
        return total

    async def _move(self, queue: str, which: Selection, most: int, to: str) -> int:
        """Send dead letters to another queue and remove them, in one step."""
        asked = _live(self._schema)

        async def move(connection: Connection) -> int:
            async with transaction(connection, self._client.bound()):
                await connection.execute(_PLANNED)
                row = await connection.fetchrow(asked["move"], queue, *_meant(which), most, to)
                if row is None:
                    return 0
                await connection.execute(asked["moved"], *row)
            return len(row[0])

        return await self._client.work(move)

    async def _dated(self, which: Selection) -> Selection:
        """Return *which* with a moment, by the server's clock."""
        if which.dead_for is None:
            return which
        [(now,)] = await self._client.ask(f"SELECT {self._schema}.clock()")
        return which.at(now)

    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        """Tell which *ids* the inbox remembers."""
        rows = await self._client.ask(
            f"SELECT i.id FROM {self._schema}.inbox AS i JOIN {self._schema}.queue AS q ON q.id = i.queue "
            f"WHERE q.name = $1 AND i.id = ANY ($2) AND i.until > {self._schema}.clock()",
            queue,
            list(ids),
        )
        known = {row[0] for row in rows}
        return [one in known for one in ids]

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty or by *force*."""
        await self._catch_up(queue)
        rows = await self._rows("delete_queue", queue, force)
        if not rows:
            return Deleted(Stats())
        is_deleted, *counts, age = rows[0]
        ready, locked, delayed, deferred, dead = (int(count or 0) for count in counts)
        found = Stats(ready, locked, delayed, deferred, dead, age or 0.0)
        return Deleted(found) if is_deleted else NotEmpty(found)

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let ``idle`` list *queue* after *seconds*."""
        await self._call("delete_when_idle", queue, float(seconds))

    async def idle(self) -> Sequence[str]:
        """List the queues whose time has run out."""
        return [name for (name,) in await self._rows("idle")]

    async def close(self) -> None:
        """Let the housework that was begun come to an end."""
        for loop in {chore.get_loop() for chore in list(self._chores)}:  # other loops begin and end theirs
            await on_loop(loop, self._rest)

    # --- asking ---

    async def _rows(self, function: str, *values: object) -> list[Any]:
        return await self._client.ask(f"SELECT * FROM {self._function(function, len(values))}", *values)

    async def _call(self, function: str, *values: object) -> Any:
        [row] = await self._client.ask(f"SELECT {self._function(function, len(values))}", *values)
        return row[0]

    async def _told_rows(self, function: str, queue: str, *values: object) -> list[Any]:
        """Ask for rows, and note the deaths of *queue* that were found; where there are none, one row is empty."""
        asked = self._function(function, 1 + len(values))
        rows = await self._client.ask(
            f"SELECT (SELECT {self._schema}._told()), f.* FROM (SELECT) AS x LEFT JOIN LATERAL {asked} AS f ON true",
            queue,
            *values,
        )
        self._note_died(queue, rows[0][0])
        return [row[1:] for row in rows]

    async def _told_call(self, function: str, queue: str, *values: object) -> Any:
        asked = self._function(function, 1 + len(values))
        [(answer, died)] = await self._client.ask(f"SELECT {asked}, {self._schema}._told()", queue, *values)
        self._note_died(queue, died)
        return answer

    def _function(self, name: str, arguments: int) -> str:
        places = ", ".join(f"${place}" for place in range(1, arguments + 1))
        return f"{self._schema}.{name}({places})"

    def _note_use(self, queue: str) -> None:
        """Count a statement, and see to it that the queue is tidied now and then, off everybody's way."""
        count, since = self._used.get(queue) or (0, time.monotonic())
        count += 1
        if count < TIDY_AFTER and time.monotonic() - since < TIDY_EVERY:
            self._used[queue] = count, since
            return
        self._used[queue] = 0, time.monotonic()
        self._begin(self._tidy(queue))

    def _note_received(self, queue: str, count: int, number: int, has_asked: bool) -> None:
        """Count what was received, and see to it that the queue's marks are raised now and then.

        As far as they go only if *has_asked* when the next lock ends: see "propose" in marks.sql.
        """
        received = self._received.setdefault(queue, _Received())
        received.count += count
        received.behind += count
        received.highest = max(received.highest, number)
        if queue in self._raising:
            return
        now = time.monotonic()
        looks_ahead = has_asked and received.behind >= RAISE_AFTER and now >= received.look_ahead_from
        if looks_ahead or received.count >= RAISE_AFTER:
            received.count = 0
            if looks_ahead:
                received.look_ahead_from = now + LOOK_AHEAD_EVERY
            self._raising.add(queue)
            self._begin(self._raise_marks(queue, received, looks_ahead))

    async def _raise_marks(self, queue: str, received: _Received, looks_ahead: bool) -> None:
        """Let claims begin behind what was consumed; see marks.sql."""
        behind = received.behind
        try:
            with suppress(TenureError):  # it can wait
                proposal = await self._call("propose", queue, received.highest, looks_ahead)
                writers = await self._call("writers")
                for pause in RAISE_PAUSES:
                    await asyncio.sleep(pause)
                    is_raised = await self._call("raise_marks", queue, proposal, writers)
                    if is_raised is not False:  # None: by another process
                        received.look_ahead_from = 0.0
                        if is_raised and looks_ahead:
                            received.behind -= behind
                        return
        finally:
            self._raising.discard(queue)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        chore = asyncio.get_running_loop().create_task(work, name="tenure-postgres-tidy")
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _tidy(self, queue: str) -> None:
        with suppress(TenureError):  # it can wait
            await self._call("tidy", queue)

    async def _rest(self) -> None:
        here = asyncio.get_running_loop()
        chores = {chore for chore in list(self._chores) if chore.get_loop() is here}
        if chores:
            await asyncio.wait(chores, timeout=1.0)


# --- columns and rows --------------------------------------------------------------------------------------------


def _new_token() -> int:
    return secrets.randbits(63)


def _columns(messages: Sequence[Outgoing]) -> list[list[Any] | None]:
    """Return the columns of what is sent, up to the last that anything stands in."""
    columns: list[list[Any] | None] = [
        [message.body for message in messages],
        [message.id for message in messages],
        [None if message.headers is NO_HEADERS else _written_headers(message.headers) for message in messages],
        [float(message.delay) if message.delay else None for message in messages],
        [message.at for message in messages],
        [None if message.expires_in is None else float(message.expires_in) for message in messages],
        [message.session for message in messages],
        [message.priority or None for message in messages],
        [message.reply_to for message in messages],
        [message.correlation_id for message in messages],
    ]
    for place, column in enumerate(columns):
        if place and column is not None and not any(value is not None for value in column):
            columns[place] = None
    return columns


def _rank(row: Any) -> tuple[int, int]:
    """Return what a claim is ordered by: higher priority first, then by sequence."""
    return -row[8], row[0]


def _written_headers(headers: Headers) -> str | None:
    return json.dumps(dict(headers)) if headers else None


def _headers(text: str | None) -> Headers:
    return NO_HEADERS if text is None else FrozenDict(json.loads(text))


def _delivery(queue: str, token: int | str, row: Any, death: Death | None = None) -> Delivery:
    number, name, body, headers, count, enqueued_at, until, session, priority, reply_to, correlation_id = row
    return Delivery(
        queue,
        number,
        token,
        name or f"{queue.removesuffix(DEAD_SUFFIX)}{ID_MARK}{number}",
        body,
        NO_HEADERS if headers is None else _headers(headers),
        count,
        enqueued_at,
        until,
        session,
        priority,
        reply_to,
        correlation_id,
        death,
    )


def _dead_message(queue: str, row: Any) -> DeadMessage:
    one, death = _delivery(queue, "", row[:11]), _death(row[11:])
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
        death.reason,
        death.description,
        death.at,
        death.error,
        death.history,
    )


def _death(columns: Sequence[Any]) -> Death:
    reason, description, at, history = columns
    attempts = tuple(
        Attempt(number, when, outcome, Failure(*error) if error else None)
        for number, when, outcome, error in json.loads(history or "[]")
    )
    errors = [attempt.error for attempt in reversed(attempts) if attempt.error is not None]
    return Death(reason, description, at, errors[0] if errors else None, attempts)


def _live_message(queue: str, row: Any) -> LiveMessage:
    one, state, due_at = _delivery(queue, "", row[:11]), row[11], row[12]
    return LiveMessage(
        queue,
        one.sequence,
        one.id,
        one.body,
        one.headers,
        _STATES[state],
        one.delivery_count,
        one.enqueued_at,
        one.locked_until,
        due_at,
        one.session,
        one.priority,
        one.reply_to,
        one.correlation_id,
    )


def _states(which: LiveSelection) -> list[int]:
    return [number for number, state in enumerate(_STATES) if which.wants(state)]


def _fitting(which: LiveSelection) -> tuple[Any, ...]:
    return (
        which.after,
        None if which.sequences is None else sorted(which.sequences),
        None if which.ids is None else sorted(which.ids),
        which.session,
        which.sent_before,
    )


@cache
def _live(schema: str) -> dict[str, str]:
    """Return the statements about live messages, with what stands in several of them."""
    found = statements("live.sql", schema)
    for part in ("fits", "lanes", "dues"):
        found = {name: text.replace(f"{{{part}}}", found[part]) for name, text in found.items()}
    agreed = {"{id_mark}": ID_MARK, "{int_max}": str(INT_MAX)}
    for place, value in agreed.items():
        found = {name: text.replace(place, value) for name, text in found.items()}
    return found


def _failure(failure: Failure | None) -> str | None:
    return None if failure is None else json.dumps([failure.type, failure.message, failure.traceback])


def _meant(which: Selection) -> tuple[Any, ...]:
    ids = which.ids
    if ids is not None:  # functions from before a migration call those otherwise that are made up
        ids = frozenset(name for one in ids for name in spellings_of(one))
    return (
        None if which.sequences is None else sorted(which.sequences),
        None if ids is None else sorted(ids),
        which.reason,
        which.dead_before,
        which.after,
    )


def _woken_by(delivery: Delivery, verdict: Verdict, answer: Settled | Lapsed) -> set[str]:
    """Return the topics to ring as *verdict* stands."""
    if isinstance(answer, Lapsed):
        return set()
    dead = f"queue:{delivery.queue.removesuffix(DEAD_SUFFIX)}{DEAD_SUFFIX}"
    if isinstance(verdict, DeadLetter) or answer.dead:
        return {dead}
    return {f"queue:{delivery.queue}"} if isinstance(verdict, Abandon | GiveBack) else set()
