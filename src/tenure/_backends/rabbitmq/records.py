"""What tenure keeps about queues: their settings, which there are, since when, and when they are idle.

RabbitMQ keeps nothing with a queue that a client could change or read. So all of it is one message, in a quorum queue
of its own. It is changed under a lock: an exclusive queue, which ends with the connection of its owner. The new message
is confirmed before the old one is acknowledged; of two, the newer one counts.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from aiormq import spec

from tenure._backends.rabbitmq.client import RESOURCE_LOCKED, Client
from tenure._backends.rabbitmq.connection import AmqpChannel, Delivered, Properties
from tenure._backends.rabbitmq.errors import ChannelLost
from tenure._backends.rabbitmq.names import RECORDS, RECORDS_LOCK
from tenure._queue.broker import QueueOptions, QueueSettings

T = TypeVar("T")

CACHED = 1.0
"""Seconds for which the settings of a queue are remembered by verdicts and claims."""

LOCK_RETRY = 0.03
"""Seconds until a lock that another process has is asked for again, at most."""

LOCK_MAX = 10.0
"""Seconds after which a lock ends whose owner could not end it. What it has read stays with it as long as it lives."""

GONE_KEPT = 10 * 86_400.0
"""Seconds for which a deleted queue is remembered: longer than any delay."""


@dataclass(slots=True)
class Record:
    """What is kept about a queue."""

    settings: QueueOptions = field(default_factory=lambda: QueueOptions())
    is_there: bool = False
    """Whether it is to be listed."""
    since: float = 0.0
    """When it was deleted, in Unix seconds: what was sent before, and is still delayed, is gone."""
    idle_at: float | None = None
    delayed_until: float = 0.0
    """No message is delayed for longer. Nobody can look at those that are."""


Records = dict[str, Record]


class RecordStore:
    """The records of one virtual host. On the loop of the connections.

    Args:
        client: The RabbitMQ.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._here = asyncio.Lock()  # an exclusive queue keeps other connections away, not other tasks
        self._cache: dict[str, tuple[Record, float]] = {}

    async def read(self) -> Records:
        """Return the records."""
        return await self._locked(lambda records: (dict(records), False))

    async def change(self, act: Callable[[Records], T]) -> T:
        """Let *act* change the records, in one step; return its result."""

        def changed(records: Records) -> tuple[T, bool]:
            before = _encode(records, 0)
            result = act(records)
            return result, _encode(records, 0) != before

        return await self._locked(changed)

    async def recent(self, queue: str) -> Record:
        """Return the record of *queue*, as it was within the last second."""
        known = self._cache.get(queue)
        now = self._client.home.time()
        if known is not None and now < known[1]:
            return known[0]
        await self.read()
        return self._cache.get(queue, (Record(), 0.0))[0]

    async def _locked(self, act: Callable[[Records], tuple[T, bool]]) -> T:
        async with self._here:
            channel = await self._lock()
            try:
                old, records, version = await _read(channel)
                result, is_changed = act(records)
                if is_changed:
                    body = _encode(records, version + 1)
                    properties = Properties(delivery_mode=2, content_type="application/json", message_id=RECORDS)
                    # By the other connection: a full server would stop reading this one, which has locks.
                    await (await self._client.sending()).publish("", RECORDS, properties, body)
                    for one in old:
                        channel.ack(one.tag)
                else:
                    for one in old[1:]:
                        channel.ack(one.tag)
                    if old:
                        channel.reject(old[0].tag)
                self._remember(records)
                await channel.request(spec.Queue.Delete(0, RECORDS_LOCK))
            finally:
                # What was read and not settled comes back with the channel.
                channel.begin_close()
            return result

    def _remember(self, records: Records) -> None:
        until = self._client.home.time() + CACHED
        self._cache = {name: (record, until) for name, record in records.items()}

    async def _lock(self) -> AmqpChannel:
        """Return a channel on which the lock is held, and the queue of the records exists."""
        while True:
            channel = await (await self._client.connection("receiving")).channel()
            try:
                await channel.request(
                    spec.Queue.Declare(0, RECORDS_LOCK, exclusive=True, arguments={"x-expires": int(LOCK_MAX * 1_000)})
                )
                arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}
                await channel.request(spec.Queue.Declare(0, RECORDS, durable=True, arguments=arguments))
            except ChannelLost as error:
                if error.code != RESOURCE_LOCKED or RECORDS_LOCK not in error.text:
                    raise
            else:
                return channel
            await asyncio.sleep(random.uniform(0.002, LOCK_RETRY))


async def _read(channel: AmqpChannel) -> tuple[list[Delivered], Records, int]:
    """Take the message with the records, the newest first; older ones are left from a process that died."""
    while True:
        found: list[Delivered] = []
        while isinstance(one := await channel.request(spec.Basic.Get(0, RECORDS)), Delivered):
            found.append(one)
        if found:
            found.sort(key=lambda one: -_version(one.body))
            return found, _decode(found[0].body), _version(found[0].body)
        count: Any = await channel.request(spec.Queue.Declare(0, RECORDS, passive=True))
        if not count.message_count and not count.consumer_count:
            return [], {}, 0
        await asyncio.sleep(0.01)  # a process that died had taken it: it comes back when the server has noticed


def _encode(records: Records, version: int) -> bytes:
    queues = {
        name: {one.name: value for one in fields(Record) if (value := getattr(record, one.name))}
        for name, record in sorted(records.items())
    }
    return json.dumps({"version": version, "queues": queues}, ensure_ascii=False).encode()


def _version(body: bytes) -> int:
    return int(json.loads(body)["version"])


def _decode(body: bytes) -> Records:
    """Read the records; what a newer tenure may have added is left out."""
    names, settings = {one.name for one in fields(Record)}, {one.name for one in fields(QueueSettings)}
    records: Records = {}
    for queue, given in json.loads(body)["queues"].items():
        record = Record(**{name: value for name, value in given.items() if name in names})
        kept = {name: value for name, value in record.settings.items() if name in settings}
        record.settings = cast(QueueOptions, kept)
        records[queue] = record
    return records
