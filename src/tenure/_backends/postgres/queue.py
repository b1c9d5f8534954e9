"""Queues in PostgreSQL: a claim skips rows that others have locked, and the server's clock decides what is due.

Each step is a function in the database (``sql/functions``), or a statement of ``sql/sending.sql`` or ``sql/live.sql``.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

from tenure._backends.postgres.claims import UnansweredClaims
from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection, transaction
from tenure._backends.postgres.dead_letters import DeadLetters
from tenure._backends.postgres.functions import QueueFunctions
from tenure._backends.postgres.housekeeping import Housekeeping
from tenure._backends.postgres.live import LiveMessages
from tenure._backends.postgres.rows import (
    columns_of,
    death_of,
    delivery_of,
    encoded_failure,
    is_ready_at_once,
    rank_of,
    values_of,
)
from tenure._backends.postgres.sessions import HeldSessions
from tenure._backends.postgres.statements import statements
from tenure._backends.postgres.tokens import ClaimTokens
from tenure._backends.postgres.wake import Wake
from tenure._checks import LONGEST
from tenure._foreign import clipped
from tenure._queue.broker import (
    CLAIM_BYTES,
    LIMITS,
    Advanced,
    Claim,
    LiveSelection,
    NoSession,
    QueueOptions,
    QueueSettings,
    QueueTraits,
    Schedules,
    Selection,
    read_settings,
    undeclared,
)
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.generations import Generations
from tenure._queue.identity import ID_MARK
from tenure._queue.limits import Rate
from tenure._queue.message import NO_DEFERRED_DEAD_LETTERS, DeadMessage, Delivery, LiveMessage, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
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
from tenure.errors import ConfigError

QUEUE_TRAITS = QueueTraits(lock_min=0.1, lock_max=7 * 86_400.0, body_max=2**28, names_dead=True, surveys=True)

_SETTINGS = (
    "lock, max_deliveries, dedupe_window, body_max, dead_retention, max_locked, rate_count, rate_seconds, "
    "session_rate_count, session_rate_seconds, paused"
)
_ANSWERS: tuple[Settled | Lapsed, ...] = (LAPSED, SETTLED, SETTLED_DEAD)
_VERDICTS: dict[type[Verdict], str] = {
    Complete: "complete",
    Abandon: "abandon",
    GiveBack: "give back",
    Defer: "defer",
    DeadLetter: "dead",
}


class PostgresBroker:
    """A ``Broker`` in PostgreSQL."""

    def __init__(self, client: Client, wake: Wake) -> None:
        self._client = client
        self._wake = wake
        self._schema = client.options.schema
        self._traits = replace(QUEUE_TRAITS, hints=client.options.listen)
        self._sending = statements("sending.sql", self._schema)
        self._functions = QueueFunctions(client)
        self.generations: Generations = self._functions.generations
        self._send_one_noted = self._sending["send_one"].replace("SELECT seq", f"SELECT seq, {self._functions.made}")
        self._tokens = ClaimTokens()
        self._housekeeping = Housekeeping(self._functions, self._tokens.origin)
        self._claims = UnansweredClaims(client, self._functions)
        self._sessions = HeldSessions()
        self._live = LiveMessages(client, self._functions, wake)
        self._dead = DeadLetters(client, self._functions, wake)

    @property
    def traits(self) -> QueueTraits:
        """What this broker can do."""
        return self._traits

    # --- settings ---

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        """Write *changes* into the settings of *queue*; return the settings that hold then."""
        if only_undeclared and changes:  # usually there is nothing to write
            rows = await self._client.fetch(
                f"SELECT {_SETTINGS}, {self._functions.made}, "
                f"ARRAY(SELECT d.setting FROM {self._schema}.declared AS d WHERE d.queue = q.id) "
                f"FROM {self._schema}.queue AS q WHERE name = $1",
                queue,
            )
            if rows and not undeclared(changes, rows[0][-1]):
                self.generations.note(queue, rows[0][-2])
                return _settings_of(tuple(rows[0])[:-2])
        new = QueueSettings(**changes)
        [row] = await self._functions.rows(
            "declare_settings",
            queue,
            list(changes),
            only_undeclared,
            float(new.lock),
            new.max_deliveries,
            float(new.dedupe_window),
            new.body_max,
            float(new.dead_retention),
            None if new.max_locked == math.inf else new.max_locked,
            *_rate_columns(new.rate),
            *_rate_columns(new.session_rate),
            new.paused,
        )
        if not LIMITS.isdisjoint(changes):
            self._wake.notify(f"queue:{queue}")
        if queue in self.generations.followed:
            [(made,)] = await self._client.fetch(f"SELECT {self._functions.made}", queue)
            self.generations.note(queue, made)
        return _settings_of(row)

    async def settings(self, queue: str) -> QueueSettings:
        """Return the settings that hold for *queue*."""
        rows = await self._client.fetch(f"SELECT {_SETTINGS} FROM {self._schema}.queue WHERE name = $1", queue)
        return _settings_of(rows[0]) if rows else QueueSettings()

    async def names(self) -> Sequence[str]:
        """List every queue, sorted."""
        rows = await self._functions.rows("names")
        return [name for (name,) in rows]

    def hints(self, queue: str) -> AsyncIterator[None]:
        """Yield when messages of *queue* may have become claimable."""
        return self._wake.listen(f"queue:{queue}")

    # --- sending and receiving ---

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Keep all of *messages*; return their ids."""
        if not messages:
            return []
        numbers = await self._send_one(queue, messages[0]) if len(messages) == 1 else None
        if numbers is None:
            numbers = await self._functions.call_about("send_many", queue, *columns_of(messages))
        self._wake.notify(f"queue:{queue}")
        self._housekeeping.note_use(queue)
        generated = iter(numbers)
        return [f"{queue}{ID_MARK}{next(generated)}" if message.id is None else message.id for message in messages]

    async def _send_one(self, queue: str, message: Outgoing) -> list[int] | None:
        """Keep *message* in the fastest way; return its number, or None if it has to be kept by ``send_many``."""
        if not (self._client.options.prepared and is_ready_at_once(message)):  # to plan it each time takes longer
            return None
        if queue not in self.generations.followed:
            rows = await self._client.fetch(self._sending["send_one"], queue, *values_of(message))
        elif rows := await self._client.fetch(self._send_one_noted, queue, *values_of(message)):
            self.generations.note(queue, rows[0][1])
        return [rows[0][0]] if rows else None

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Claim up to *limit* messages for *lock* seconds."""
        token = self._tokens.new()
        if queue.endswith(DEAD_SUFFIX):  # no delivery is counted here, so a lost claim need not be given back
            rows = await self._functions.rows_with_deaths(
                "receive_dead", queue.removesuffix(DEAD_SUFFIX), limit, lock, token
            )
            rows = sorted((row for row in rows if row[0] is not None), key=rank_of)
            return Claim(tuple(delivery_of(queue, token, row[:11], death_of(row[11:])) for row in rows))
        await self._give_back(queue)
        with self._claims.noting(queue, token, lock):
            rows = await self._functions.rows_about("receive", queue, limit, lock, token)
        return self._claim(queue, token, rows, rank_of)

    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        """Claim the deferred messages among *sequences*."""
        token = self._tokens.new()
        rank = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
        await self._give_back(queue)
        with self._claims.noting(queue, token, lock):
            rows = await self._functions.rows_with_deaths("receive_deferred", queue, list(rank), lock, token)
        rows = [row for row in rows if row[0] is not None or row[8] is not None]  # without limits, no last row
        return self._claim(queue, token, rows, lambda row: rank[row[0]])

    async def _give_back(self, queue: str) -> None:
        """Give back the messages of claims without an answer."""
        if await self._claims.give_back(queue):
            self._wake.notify(f"queue:{queue}")

    def _claim(self, queue: str, token: int, rows: list[Any], rank: Callable[[Any], Any]) -> Claim:
        """Return the deliveries of *rows*, sorted by *rank*.

        A last row without number has a due time, deaths, whether the queue is limited and keeps messages back, and for
        how long the rate of a session holds up one.
        """
        due_in, has_due, is_held_back, held_up_for = None, False, None, None
        if rows and rows[-1][0] is None:
            last = rows.pop()
            due_in, is_held_back, held_up_for = clipped(last[6]), last[8], clipped(last[5])
            has_due = due_in is not None or is_held_back is None
            self._functions.deaths.note(queue, last[3])
            if not is_held_back and sum(len(row[2]) for row in rows) >= CLAIM_BYTES:
                due_in = 0.0
        if rows:
            self._housekeeping.note_use(queue)
            self._housekeeping.note_claim()
            rows.sort(key=rank)
        if rows or has_due:
            self._housekeeping.note_received(queue, len(rows), rows[-1][0] if rows else 0, has_due)
        return Claim(
            tuple(delivery_of(queue, token, row) for row in rows),
            due_in,
            self._functions.deaths.take(queue),
            is_limited=is_held_back is not None,
            is_held_back=bool(is_held_back),
            held_up_for=held_up_for,
        )

    # --- schedules ---

    async def schedules(self, queue: str) -> Schedules:
        """Return what is kept of the schedules of *queue*."""
        rows = await self._functions.rows("schedules", queue)
        return Schedules({name: record for name, record, _ in rows if name is not None}, rows[0][2])

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
        place = (queue, schedule, expected, record, float(not_before))
        [row] = await self._functions.rows_about("advance", *place, *columns_of(messages))
        if row[0] and messages:
            self._wake.notify(f"queue:{queue}")
            self._housekeeping.note_use(queue)
        return Advanced(*row)

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
                        answers[place] = LAPSED if until is None else Renewed(clipped(until) or LONGEST)

        if held:
            await self._client.run(renew, within=bound, urgent=True)  # renew_many relies on this bound
        for one, answer in zip(held, answers, strict=True):
            if answer is LAPSED and isinstance(one, SessionLock):
                self._sessions.forget(one.token)
        return answers

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        """Settle many deliveries."""
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
                done, has_freed = await self._functions.call_with_freed("complete_many", queue, numbers, tokens)
                self._housekeeping.note_use(queue)
                if has_freed:
                    self._wake.notify(f"queue:{queue}")
                if done is None:
                    return [LAPSED] * len(numbers)
                if len(done) == len(numbers):
                    return [SETTLED] * len(numbers)
                gone = set(done)
                return [SETTLED if number in gone else LAPSED for number in numbers]
        return await self._settle_each(settlements)

    async def _settle_each(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Settle deliveries with verdicts of any kind, all in one step."""
        groups: dict[str, list[int]] = {}
        seen: set[tuple[str, int, object]] = set()
        for place, (delivery, verdict) in enumerate(settlements):
            if type(verdict) is Defer and delivery.queue.endswith(DEAD_SUFFIX):
                raise ConfigError(NO_DEFERRED_DEAD_LETTERS)
            key = delivery.queue, delivery.sequence, delivery.token
            if key not in seen:  # a second verdict on a delivery lapses
                seen.add(key)
                groups.setdefault(delivery.queue, []).append(place)
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)

        freed: set[str] = set()
        several = len(groups) > 1 or any(type(verdict) is Complete and verdict.sends for _, verdict in settlements)

        async def settle(connection: Connection) -> set[str]:
            async with transaction(connection, self._client.bound()) if several else nullcontext():
                for queue, places in sorted(groups.items()):
                    places.sort(key=lambda place: settlements[place].delivery.sequence)
                    some = [settlements[place] for place in places]
                    result, has_freed = await self._settle_in(connection, queue, some)
                    if has_freed:
                        freed.add(f"queue:{queue}")
                    for place, answer in zip(places, result, strict=True):
                        answers[place] = _ANSWERS[answer]
                done = [one.verdict for one, answer in zip(settlements, answers, strict=True) if answer is not LAPSED]
                return await self._send_with(connection, done)

        topics = await self._client.run(settle) | freed
        for (delivery, verdict), answer in zip(settlements, answers, strict=True):
            topics |= _topics_of(delivery, verdict, answer)
        for queue in groups:
            self._housekeeping.note_use(queue.removesuffix(DEAD_SUFFIX))
        self._wake.notify(*sorted(topics))
        return answers

    async def _settle_in(
        self, connection: Connection, queue: str, some: Sequence[Settlement]
    ) -> tuple[list[int], str | None]:
        """Return the answers of one queue, and whether they have freed places that others wait for."""
        verdicts = [verdict for _, verdict in some]
        row = await connection.fetchrow(
            self._functions.call_text_with_freed("settle_dead" if queue.endswith(DEAD_SUFFIX) else "settle_many", 9),
            queue.removesuffix(DEAD_SUFFIX),
            [delivery.sequence for delivery, _ in some],
            [delivery.token for delivery, _ in some],
            [_VERDICTS[type(verdict)] for verdict in verdicts],
            [float(verdict.delay) if isinstance(verdict, Abandon) else 0.0 for verdict in verdicts],
            [verdict.reason if isinstance(verdict, DeadLetter) else None for verdict in verdicts],
            [verdict.description if isinstance(verdict, DeadLetter) else None for verdict in verdicts],
            [
                encoded_failure(verdict.error) if isinstance(verdict, Abandon | DeadLetter) else None
                for verdict in verdicts
            ],
            [float(verdict.remember) if isinstance(verdict, Complete) else 0.0 for verdict in verdicts],
        )
        assert row is not None
        return row[0], row[1]

    async def _send_with(self, connection: Connection, passed: Sequence[Verdict]) -> set[str]:
        """Send the messages that the *passed* verdicts carry; return the topics to notify."""
        sends: dict[str, list[Outgoing]] = {}
        for verdict in passed:
            for queue, message in verdict.sends if isinstance(verdict, Complete) else ():
                sends.setdefault(queue, []).append(message)
        for queue, messages in sorted(sends.items()):
            columns = columns_of(messages)
            await connection.execute(
                f"SELECT {self._functions.call_text('send_many', 1 + len(columns))}", queue, *columns
            )
        return {f"queue:{queue}" for queue in sends}

    # --- sessions ---

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Lock *session*, or the next free one with a message waiting."""
        token = self._tokens.new()
        [(name, until, state)] = await self._functions.rows_with_deaths("accept", queue, session, lock, token)
        if name is None:
            return NoSession(clipped(until), self._functions.deaths.take(queue), is_held_back=state is not None)
        self._hold(token, lock)
        return SessionLock(queue, name, token, clipped(until) or 0.0, state)

    def _hold(self, token: int | str, lock: float) -> None:
        """Remember a session whose lock is or will be extended by *lock* seconds."""
        now = time.monotonic()
        # The server extends it within the time limit or soon after; and its clock may be slower.
        self._sessions.hold(token, now + 2 * (self._client.options.timeout + lock), now)

    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        """Claim the next messages of a session."""
        token = held.token
        assert isinstance(token, int)
        if token not in self._sessions:  # it was accepted by another backend
            self._hold(token, QUEUE_TRAITS.lock_max)
        if self._sessions.is_unsure(token):  # else later messages would be received before those of the lost claim
            kept = self._sessions.unsettled(token)
            await self._functions.call_with_deaths("give_back_session", held.queue, held.session, token, kept)
            self._sessions.set_unsure(token, False)
            self._wake.notify(f"queue:{held.queue}")  # places may be free
        try:
            rows = await self._functions.rows("receive_session", held.queue, held.session, token, limit)
        except BaseException:
            self._sessions.set_unsure(token, True)
            raise
        if not rows[-1][4]:
            self._sessions.forget(token)
            return LAPSED
        self._sessions.received(token, (row[0] for row in rows[:-1]))
        return self._claim(held.queue, token, rows, itemgetter(0))

    async def release(self, held: SessionLock) -> Settled | Lapsed:
        """Unlock a session; give back its deliveries."""
        self._sessions.forget(held.token)
        if not await self._functions.call_with_deaths("release_session", held.queue, held.session, held.token):
            return LAPSED
        self._wake.notify(f"queue:{held.queue}")
        return SETTLED

    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        """Return a session's state."""
        rows = await self._functions.rows("read_state", held.queue, held.session, held.token)
        state: bytes | None = rows[0][0] if rows else None
        return state if rows else LAPSED

    async def write_state(self, held: SessionLock, state: bytes | None) -> Settled | Lapsed:
        """Store a session's state."""
        return (
            SETTLED
            if await self._functions.rows("write_state", held.queue, held.session, held.token, state)
            else LAPSED
        )

    # --- peeking and purging ---

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages."""
        return await self._live.holding(queues)

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*."""
        await self._functions.apply_due(queue.removesuffix(DEAD_SUFFIX))
        rows = await self._client.fetch(
            f"SELECT counts.*, (SELECT q.paused FROM {self._schema}.queue AS q WHERE q.name = $1) "
            f"FROM {self._functions.call_text('counts', 1)} AS counts",
            queue.removesuffix(DEAD_SUFFIX),
        )
        if not rows:
            return Stats()
        ready, locked, delayed, deferred, dead = (int(count or 0) for count in rows[0][:5])
        if queue.endswith(DEAD_SUFFIX):
            return Stats(dead=dead)
        return Stats(ready, locked, delayed, deferred, dead, clipped(rows[0][5]) or 0.0, rows[0][6])

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        return await self._live.peek(queue, which, limit)

    async def purge_live(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good."""
        return await self._live.purge(queue, which, dry_run=dry_run)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        return await self._live.peek_deferred(queue, limit, after)

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
        rows = await self._client.fetch(
            f"SELECT i.id FROM {self._schema}.inbox AS i JOIN {self._schema}.queue AS q ON q.id = i.queue "
            f"WHERE q.name = $1 AND i.id = ANY ($2) AND i.until > {self._schema}.clock()",
            queue,
            list(ids),
        )
        known = {row[0] for row in rows}
        return [one in known for one in ids]

    async def delete(self, queue: str, *, force: bool = False) -> Deleted | NotEmpty:
        """Delete *queue*, if it is empty or by *force*."""
        await self._functions.apply_due(queue)
        rows = await self._functions.rows("delete_queue", queue, force)
        if not rows:
            return Deleted(Stats())
        is_deleted, *counts, age = rows[0]
        ready, locked, delayed, deferred, dead = (int(count or 0) for count in counts)
        found = Stats(ready, locked, delayed, deferred, dead, clipped(age) or 0.0)
        if is_deleted:
            return Deleted(found)
        return NotEmpty(replace(found, paused=(await self.settings(queue)).paused))

    async def delete_when_idle(self, queue: str, seconds: float) -> None:
        """Let :meth:`idle` list *queue* after *seconds*."""
        await self._functions.call("delete_when_idle", queue, float(seconds))

    async def idle(self) -> Sequence[str]:
        """List the queues whose idle time has run out."""
        return [name for (name,) in await self._functions.rows("idle")]

    async def close(self) -> None:
        """Wait for the housekeeping that has begun."""
        await self._housekeeping.close()


def _settings_of(row: Any) -> QueueSettings:
    """Return the settings in the columns of _SETTINGS, where NULL is no limit; those that can't be one are left out."""
    lock, max_deliveries, dedupe_window, body_max, dead_retention, max_locked, *rates, paused = row
    count, seconds, session_count, session_seconds = rates
    found: QueueOptions = {
        "lock": lock,
        "max_deliveries": max_deliveries,
        "dedupe_window": dedupe_window,
        "body_max": body_max,
        "dead_retention": dead_retention,
        "max_locked": math.inf if max_locked is None else max_locked,
        "rate": math.inf if count is None else (count, seconds),
        "session_rate": math.inf if session_count is None else (session_count, session_seconds),
        "paused": paused,
    }
    return QueueSettings(**read_settings(found))


def _rate_columns(rate: Rate) -> tuple[int | None, float | None]:
    return (rate[0], float(rate[1])) if isinstance(rate, tuple) else (None, None)


def _topics_of(delivery: Delivery, verdict: Verdict, answer: Settled | Lapsed) -> set[str]:
    """Return the topics to notify when *verdict* was answered by *answer*."""
    if isinstance(answer, Lapsed):
        return set()
    dead = f"queue:{delivery.queue.removesuffix(DEAD_SUFFIX)}{DEAD_SUFFIX}"
    if isinstance(verdict, DeadLetter) or answer.dead:
        return {dead}
    return {f"queue:{delivery.queue}"} if isinstance(verdict, Abandon | GiveBack) else set()
