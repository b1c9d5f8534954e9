"""The clock of the service, estimated from its answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from tenure._backends.azure_storage.client import Account, LoopConnections, unless_refused
from tenure._backends.azure_storage.names import queue_of
from tenure._queue.checks import DEAD_SUFFIX
from tenure._runtime.clock import Clock
from tenure._runtime.remote_clock import RemoteClock


class ServiceClock(RemoteClock):
    """An estimate of the service's time."""

    def __init__(self, account: Account, local: Clock) -> None:
        super().__init__(local)
        self._account = account

    async def ensure_known(self, queue: str = "tenure") -> None:
        """Read the service's time unless it is known."""
        if not self.is_known:
            await self.read(queue)

    async def read(self, queue: str) -> None:
        """Read the service's time, by a request about *queue*, which need not exist."""
        await self._account.run(partial(self._read, queue=queue))

    async def _read(self, connections: LoopConnections, queue: str) -> None:
        client = connections.queues.get_queue_client(queue_of(queue.removesuffix(DEAD_SUFFIX)))
        hook = partial(self.learn_from, asked_at=self.local.now())
        await unless_refused(client.get_queue_properties(raw_response_hook=hook), "QueueNotFound")

    def learn_from(self, response: Any, asked_at: float) -> None:
        """Note the time that an answer to a request sent at *asked_at* tells."""
        self.learn_date(response.http_response.headers.get("Date"), asked_at)
