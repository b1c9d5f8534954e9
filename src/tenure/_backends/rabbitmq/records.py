"""What tenure keeps about queues: their settings and schedules, which there are, their delays, and when they are idle.

RabbitMQ keeps nothing with a queue that a client could change or read. So all of it is one message, in a quorum queue
of its own. It is changed under a lock: an exclusive queue, which ends with the connection of its owner. The new message
is confirmed before the old one is acknowledged; of two, the newer one counts. A user that may not take the lock goes
without it: who holds the message has it alone, so the lock is needed only where there is none yet. A turn under the
lock takes several round trips; callers that come before it begins share it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from aiormq import spec

from tenure._backends.rabbitmq.client import ACCESS_REFUSED, RESOURCE_LOCKED, Client, missing_allowed
from tenure._backends.rabbitmq.connection import AmqpChannel, AmqpConnection, Delivered
from tenure._backends.rabbitmq.errors import AmqpError, ChannelLost, ConnectionLost
from tenure._backends.rabbitmq.message_format import returns_of
from tenure._backends.rabbitmq.names import RECORDS, RECORDS_LOCK
from tenure._backends.rabbitmq.properties import Properties
from tenure._foreign import Unreadable, a_count, a_flag, a_text, an_object, read_object, read_or, seconds
from tenure._queue.broker import QueueOptions, read_settings
from tenure._queue.checks import COUNT_MAX, read_name
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

SIZE_MAX = 2**27
"""Bytes of the longest records that are read: more than any server takes as a message."""

MARK_MAX = 100
"""Characters of the longest mark that is read."""

VERSION_MAX = 2**53
"""The highest version; the next one is 1."""

CACHED = 1.0
"""Seconds for which the settings of a queue are remembered by verdicts and claims."""

LOCK_RETRY = 0.03
"""Seconds until a lock that another process has is asked for again, at most."""

TURN_MAX = 16
"""The callers that share a turn: some of them declare queues in it."""

LOCK_LOOK = 0.25
"""Seconds after which it is looked at what keeps the lock away, each time: longer than a turn of another process."""

LOCK_MAX = 10.0
"""Seconds after which a lock ends whose owner could not end it. What it has read stays with it as long as it lives."""

LOCK_WAIT = 2.0
"""Times ``LOCK_MAX`` for which a turn waits for the lock: by then, one that is not being misused has ended."""

EMPTY_AFTER = 1.0
"""Seconds for which nothing must be found before the records count as empty: a process may have died that made their
queue, and not written them yet. A process that died with them in hand is noticed earlier."""


@dataclass(slots=True)
class Record:
    """What is kept about a queue."""

    settings: QueueOptions = field(default_factory=lambda: QueueOptions())
    is_there: bool = False
    """Whether it is to be listed."""
    generation: int = 0
    """What messages that are delayed note. It rises before the queue is deleted."""
    gone_below: int = 0
    """Those that note a lower generation are gone. It rises once the queue is deleted."""
    gone_until: float = 0.0
    """Until when messages of an earlier generation may come, in Unix seconds."""
    idle_at: float | None = None
    delayed_until: float = 0.0
    """No message is delayed for longer. Nobody can look at those that are."""
    schedules: dict[str, str] = field(default_factory=dict)
    """What is kept of its schedules, by their names; see ``tenure._queue.schedule_steps``."""
    made: str = ""
    """A mark that came with the first setting: it tells the queue from one that was deleted."""


Records = dict[str, Record]


@dataclass(slots=True, eq=False)
class _Part:
    """What one caller wants in a turn."""

    act: Callable[[Records], object]
    first: Callable[[], Awaitable[object]] | None
    answer: object = None
    error: Exception | None = None

    async def prepare(self, within: float) -> None:
        if self.first is not None:
            try:
                async with asyncio.timeout(within):
                    await self.first()
            except Exception as error:
                self.error = error

    def carry_out(self, records: Records) -> None:
        if self.error is None:
            try:
                self.answer = self.act(records)
            except Exception as error:  # the other callers of the turn have nothing to do with it
                self.error = error


class _Turn:
    """Several callers under one lock."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.over: asyncio.Future[None]


class RecordStore:
    """The records of one virtual host. On the loop of the connections.

    Args:
        client: The RabbitMQ.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._here = asyncio.Lock()  # an exclusive queue keeps other connections away, not other tasks
        self._next: _Turn | None = None  # the last turn that has not begun
        self._cache: dict[str, Record] = {}
        self._cached_until = 0.0
        self._reading: asyncio.Future[Records] | None = None

    async def read(self) -> Records:
        """Return the records."""
        return await self._in_turn(lambda records: dict(records))

    async def change(self, act: Callable[[Records], T], first: Callable[[], Awaitable[object]] | None = None) -> T:
        """Let *act* change the records, in one step; return its result.

        *act* changes nothing if it raises. *first* is done before, under the same lock; if it fails, *act* is not
        called, and its error is raised.
        """
        return await self._in_turn(act, first)

    async def recent(self, queue: str) -> Record:
        """Return the record of *queue*, as it was within the last second; many callers read it once."""
        if self._client.home.time() >= self._cached_until:
            await asyncio.shield(self._read_once())
        return self._cache.get(queue) or Record()

    async def last_known(self, queue: str) -> Record:
        """Return the same, or an older one if it can't be read soon."""
        if self._cached_until and self._client.home.time() >= self._cached_until:
            await asyncio.wait({self._read_once()}, timeout=self._client.options.timeout / 4)
            return self._cache.get(queue) or Record()
        return await self.recent(queue)

    def _read_once(self) -> asyncio.Future[Records]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self.read())
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._reading

    async def _in_turn(self, act: Callable[[Records], T], first: Callable[[], Awaitable[object]] | None = None) -> T:
        part = _Part(act, first)
        if self._next is None or self._next.over.done() or len(self._next.parts) == TURN_MAX:
            turn = self._next = _Turn()
            # To its end, also if the callers give it up: the lock is this connection's, and would be left.
            turn.over = self._client.begin(self._take(turn), "records")
        else:
            turn = self._next
        turn.parts.append(part)
        await asyncio.shield(turn.over)
        if part.error is not None:
            raise part.error
        return cast(T, part.answer)

    async def _take(self, turn: _Turn) -> None:
        async with self._here:
            connection: AmqpConnection | None = None
            refused: ChannelLost | None = None
            try:
                connection = await self._lock()
            except ChannelLost as error:
                if error.code != ACCESS_REFUSED or RECORDS_LOCK not in error.text:
                    raise
                refused = error  # the message with the records keeps others away, too, if it is there
            finally:
                if self._next is turn:
                    self._next = None
            channel: AmqpChannel | None = None
            try:
                within = min(self._client.options.timeout, LOCK_MAX / 2)  # longer than that, others must not wait
                await asyncio.gather(*(part.prepare(within) for part in turn.parts))
                channel, is_new = await self._opened()
                if connection is not None and channel.connection is not connection:
                    raise connection.lost or ConnectionLost(0, "the connection was lost, and the lock with it")
                await self._carry_out(turn, channel, 0.0 if is_new else EMPTY_AFTER, refused)
            finally:
                if connection is not None:
                    await self._unlock(channel)
                if channel is not None:
                    channel.begin_close()  # what was read and not settled comes back with it

    async def _unlock(self, channel: AmqpChannel | None) -> None:
        unlock = spec.Queue.Delete(0, RECORDS_LOCK)
        with suppress(AmqpError):  # then the lock has ended with the connection
            if channel is None or channel.lost is not None:
                await self._client.request(unlock)
            else:
                await channel.request(unlock)

    async def _carry_out(self, turn: _Turn, channel: AmqpChannel, patience: float, refused: ChannelLost | None) -> None:
        """Read the records, and write them if they change.

        Raises:
            ChannelLost: There are none, and the lock, under which they could be made, was *refused*.
        """
        old, records, version = await _read(channel, patience)
        read_at = self._client.home.time()
        before = _encode(records, version)
        for part in turn.parts:
            part.carry_out(records)
        # What is given back is counted, and a policy may let the server drop what was counted too often.
        if _encode(records, version) != before or any(returns_of(one) for one in old[:1]):
            if refused is not None and not old:
                raise refused
            body = _encode(records, version % VERSION_MAX + 1)
            properties = Properties(delivery_mode=2, content_type="application/json", message_id=RECORDS)
            # By the other connection: a full server would stop reading this one, which has locks.
            await self._client.publish("", RECORDS, properties, body)
            for one in old:
                channel.ack(one.tag)
        else:
            for one in old[1:]:
                channel.ack(one.tag)
            if old:
                channel.reject(old[0].tag)
        self._cache, self._cached_until = records, read_at + CACHED

    async def _lock(self) -> AmqpConnection:
        """Take the lock; return the connection with which it ends.

        Raises:
            Unavailable: What has the name is no lock; or its owner doesn't let it end.
        """
        lock = spec.Queue.Declare(0, RECORDS_LOCK, exclusive=True, arguments={"x-expires": int(LOCK_MAX * 1_000)})
        now = self._client.home.time
        give_up_at, look_at = now() + LOCK_WAIT * LOCK_MAX, now() + LOCK_LOOK
        try:
            while True:
                connection = await self._client.connection("receiving")
                try:
                    await self._client.request(lock)
                except ChannelLost as error:
                    if error.code != RESOURCE_LOCKED or RECORDS_LOCK not in error.text:
                        raise
                else:
                    return connection
                if now() >= look_at:
                    self._client.waits_for = await self._examine_lock()
                    look_at = now() + LOCK_LOOK
                if now() >= give_up_at:
                    raise Unavailable(f"{self._client.url} can't change its records: {self._client.waits_for}")
                await asyncio.sleep(random.uniform(0.002, LOCK_RETRY))
        finally:
            self._client.waits_for = ""

    async def _examine_lock(self) -> str:
        """Return why the lock can't be had, if it has an owner; RabbitMQ refuses it likewise where it has none.

        Raises:
            Unavailable: It has no owner with whom it could end: another program has declared a queue of that name.
        """
        try:
            is_shared = await self._client.has_queue(RECORDS_LOCK)
        except ChannelLost as error:
            if error.code != RESOURCE_LOCKED:
                raise
            return (
                f"another connection keeps the exclusive queue {RECORDS_LOCK!r}, under which the records of all queues "
                "are changed; if that goes on, close it: rabbitmqctl list_queues name owner_pid tells which"
            )
        if is_shared:
            raise Unavailable(
                f"{self._client.url} has a queue {RECORDS_LOCK!r} that is not exclusive, so another program has "
                "declared it: nobody can read or change the records of queues; delete it with rabbitmqctl "
                f"delete_queue -p {self._client.address.vhost} {RECORDS_LOCK}, and see who may configure it"
            )
        return ""

    async def _opened(self) -> tuple[AmqpChannel, bool]:
        """Return a channel to read the records on, and whether their queue was made just now."""
        channel = await self._client.receiving()
        with missing_allowed:
            await channel.request(spec.Queue.Declare(0, RECORDS, passive=True))
            return channel, False
        arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}
        await self._client.request(spec.Queue.Declare(0, RECORDS, durable=True, arguments=arguments))
        return await self._client.receiving(), True


async def _read(channel: AmqpChannel, patience: float) -> tuple[list[Delivered], Records, int]:
    """Take the message with the records, the newest first; older ones are left from a process that died.

    They are empty if nothing is found for *patience* seconds. What another program has put beside them counts as old.

    Raises:
        ConfigError: The newest records may be unreadable: another program has changed them.
    """
    loop = channel.connection.loop
    empty_at: float | None = None
    while True:
        found: list[Delivered] = []
        while isinstance(one := await channel.request(spec.Basic.Get(0, RECORDS)), Delivered):
            found.append(one)
        if found:
            return _newest(found)
        count: Any = await channel.request(spec.Queue.Declare(0, RECORDS, passive=True))
        if count.message_count or count.consumer_count:  # a process that died had taken it: it comes back
            empty_at = None
        else:  # or the leader of the queue didn't answer: then both are 0
            empty_at = loop.time() if empty_at is None else empty_at
            if loop.time() - empty_at >= patience:
                return [], {}, 0
        await asyncio.sleep(0.01)


def _encode(records: Records, version: int) -> bytes:
    queues = {
        name: {one.name: value for one in fields(Record) if (value := getattr(record, one.name))}
        for name, record in sorted(records.items())
    }
    return json.dumps({"version": version, "queues": queues}, ensure_ascii=False).encode()


def _newest(found: list[Delivered]) -> tuple[list[Delivered], Records, int]:
    """Return the messages, the newest records first, and what those say.

    An unreadable message that has the id of records may be the newest: then no older ones count. Without that id, it
    is none of ours, and old.
    """
    readable: list[tuple[int, dict[str, Any], Delivered]] = []
    why, may_be_newest = "", False
    for one in found:
        is_ours = one.properties.message_id == RECORDS
        try:
            given = read_object(one.body, SIZE_MAX)
            version = read_or(_a_version, given.get("version"), None)
            readable.append((version or 0, an_object(given.get("queues")), one))
            if version is None and is_ours and len(found) > 1:
                why, may_be_newest = "its version is unreadable", True
        except Unreadable as error:
            why, may_be_newest = str(error), may_be_newest or is_ours
    if may_be_newest or not readable:
        then = "the other message there counts" if readable else "each has the usual settings, and is listed once used"
        raise ConfigError(
            f"the message in the queue {RECORDS!r} is not as tenure writes it: {why}. The settings and schedules of "
            f"all queues of the virtual host belong there. Publish there what it was; or remove it: then {then}"
        )
    version, queues, newest = max(readable, key=lambda one: one[0])
    return [newest, *(one for one in found if one is not newest)], _decode(queues), version


def _a_version(value: object) -> int:
    return a_count(value, most=VERSION_MAX)


def _decode(queues: dict[str, Any]) -> Records:
    """Read the records; what can't be read, or a newer tenure may have added, is left out."""
    records: Records = {}
    for queue, given in queues.items():
        with suppress(Unreadable):
            records[read_name(queue)] = _read_record(an_object(given))
    return records


def _read_record(given: dict[str, Any]) -> Record:
    return Record(
        read_or(read_settings, given.get("settings"), QueueOptions()),
        read_or(a_flag, given.get("is_there"), False),
        read_or(_a_generation, given.get("generation"), 0),
        read_or(_a_generation, given.get("gone_below"), 0),
        read_or(seconds, given.get("gone_until"), 0.0),
        read_or(seconds, given.get("idle_at"), None) or None,  # 0 would not be written again
        read_or(seconds, given.get("delayed_until"), 0.0),
        read_or(_schedules, given.get("schedules"), {}),
        read_or(_a_mark, given.get("made"), ""),
    )


def _a_mark(value: object) -> str:
    return a_text(value, MARK_MAX)


def _a_generation(value: object) -> int:
    return min(a_count(value), COUNT_MAX)


def _schedules(value: object) -> dict[str, str]:
    """Return the texts of the schedules; another one says nothing about these."""
    found: dict[str, str] = {}
    for name, text in an_object(value).items():
        with suppress(Unreadable):
            found[a_text(name)] = a_text(text)
    return found
