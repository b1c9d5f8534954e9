"""The clock of the service, estimated from its answers."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from tenure._backends.azure_storage.client import Account, LoopConnections, unless_refused
from tenure._backends.azure_storage.names import queue_of
from tenure._foreign import Unreadable, seconds
from tenure._queue.checks import DEAD_SUFFIX
from tenure._runtime.clock import Clock


class ServiceClock:
    """An estimate of the service's time, in Unix seconds. ``local`` is the local clock."""

    def __init__(self, account: Account, local: Clock) -> None:
        self._account = account
        self.local: Clock = local
        self._offset: float | None = None  # of the service's time from the local clock

    def now(self) -> float:
        """Return the estimated time of the service; before the first answer, that of the local wall clock."""
        return time.time() if self._offset is None else self.local.now() + self._offset

    async def ensure_known(self, queue: str = "tenure") -> None:
        """Read the service's time unless it is known."""
        if self._offset is None:
            await self.read(queue)

    async def read(self, queue: str) -> None:
        """Read the service's time, by a request about *queue*, which need not exist."""
        await self._account.run(partial(self._read, queue=queue))

    async def _read(self, connections: LoopConnections, queue: str) -> None:
        asked_at = self.local.now()

        client = connections.queues.get_queue_client(queue_of(queue.removesuffix(DEAD_SUFFIX)))
        hook = partial(self.learn_from, asked_at=asked_at)
        await unless_refused(client.get_queue_properties(raw_response_hook=hook), "QueueNotFound")

    def learn_from(self, response: Any, asked_at: float) -> None:
        """Correct the estimate by the time that an answer to a request sent at *asked_at* tells; a proxy's may not."""
        with suppress(Unreadable):
            self.learn(_time_in(response.http_response.headers.get("Date")), asked_at)

    def learn(self, now: float, asked_at: float) -> None:
        """Correct the estimate by *now*, the service's answer to a request sent at *asked_at* by the local clock.

        The answer is a time between request and answer, in whole seconds. The estimate is kept if it is consistent with
        that: otherwise it would jump by up to a second, and later events could seem to be earlier.
        """
        least, most = now - self.local.now(), now + 1.0 - asked_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)


def _time_in(date: object) -> float:
    """Return the Unix seconds of a date in the form of HTTP."""
    try:
        moment = parsedate_to_datetime(date).timestamp()  # type: ignore[arg-type]
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError):  # whatever is wrong with it
        raise Unreadable(f"it is no date: {ascii(date)[:80]}") from None
    return seconds(moment)
