"""Which queues are known to run. A quorum queue has its name before it runs, and refuses what comes until then.

A consumer that begins in between, or a get, costs the connection, and with it all locks. Tenure declares queues under
the lock of the records, so a turn of that lock comes after the declaration of any other process. That is a precaution:
it is taken once for each queue, and does not decide whether there is one.
"""

from __future__ import annotations

import asyncio

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.names import amqp_name
from tenure._backends.rabbitmq.records import RecordStore
from tenure._queue.generations import Generations

WAIT_MAX = 1.0
"""Seconds to wait for a declaration of another process, or a quarter of a request's time if that is less."""


class Presence:
    """Knows queues, and those of dead letters, by their names. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        records: Whose lock processes declare queues under.
        generations: Those of the queues, which rise when one is missing.
    """

    def __init__(self, client: Client, records: RecordStore, generations: Generations) -> None:
        self._client = client
        self._records = records
        self._generations = generations
        self._known: set[str] = set()

    def knows(self, queue: str) -> bool:
        """Whether *queue* ran when this process used it last."""
        return queue in self._known

    def note(self, queue: str) -> None:
        """Note that *queue* runs: it was declared here, or has confirmed a message."""
        self._known.add(queue)

    def forget(self, queue: str) -> None:
        """Note that *queue* was missing, or is being deleted: the next of this name is another one."""
        self._known.discard(queue)
        self._generations.rise(queue)

    async def has(self, queue: str) -> bool:
        """Return whether there is *queue*; if it is not known, wait for a process that may be declaring it."""
        if not await self._client.has_queue(amqp_name(queue)):
            self.forget(queue)
            return False
        if not self.knows(queue):
            turn = self._client.begin(self._records.read(), "presence")
            await asyncio.wait({turn}, timeout=min(WAIT_MAX, self._client.options.timeout / 4))
            self.note(queue)
        return True
