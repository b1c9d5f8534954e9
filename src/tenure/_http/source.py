"""What the endpoints ask: a service in this process, or the processes of ``tenure run``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from tenure import HandlerStatus, Service, ServiceStatus, Stats
from tenure._telemetry.families import Snapshot
from tenure.errors import TenureError, Unavailable
from tenure.telemetry import Metrics

ANSWER_WITHIN = 2.0
"""Seconds for the loop, the renewal thread or the store to answer; KEDA and the kubelet give up after 3 s or sooner."""

FRESH = 1.0
"""Seconds for which the numbers of a queue serve several requests."""


class Health(NamedTuple):
    """Whether a probe passes, and why not, or how."""

    passes: bool
    why: str


class Source(Protocol):
    """Answers the questions of the endpoints."""

    async def live(self) -> Health:
        """Return whether a restart would improve nothing."""
        ...

    async def ready(self) -> Health:
        """Return whether messages are taken."""
        ...

    async def metrics(self) -> Snapshot:
        """Return the values of all metrics."""
        ...

    async def stats(self) -> dict[str, Stats]:
        """Return the numbers of each queue that has a handler.

        Raises:
            Unavailable: The store did not answer.
        """
        ...


class ServiceSource:
    """A service in this process.

    Args:
        service: The service.
        metrics: Measures it.
    """

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._stats = Remembered(self._ask_stats)

    async def live(self) -> Health:
        """Return whether the loop and the renewal thread turn, and no work of a leader has overrun."""
        try:
            status = await self._status()
        except TimeoutError:
            return Health(False, "the thread that renews leases and locks does not answer")
        except TenureError:
            return Health(True, "the service is ending")
        return Health(True, "live") if status.is_live else Health(False, "the work of a leader has overrun its term")

    async def ready(self) -> Health:
        """Return whether the service runs, and the store has answered all handlers and candidates lately."""
        try:
            status = await self._status()
        except (TimeoutError, TenureError):
            return Health(False, "the service does not answer, or is ending")
        return Health(True, "ready") if status.is_ready else Health(False, _unready(status))

    async def metrics(self) -> Snapshot:
        """Return what was measured, what runs now, and the numbers of the queues if the store tells them."""
        found = self._metrics.snapshot()
        try:
            status = await self._status()
        except (TimeoutError, TenureError):
            return found
        add_handlers(found, status.handlers)
        with suppress(TenureError):  # a number that is unknown is left out: 0 would be taken for one
            add_stats(found, await self.stats())
        return found

    async def stats(self) -> dict[str, Stats]:
        return await self._stats.get()

    async def _ask_stats(self) -> dict[str, Stats]:
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                queues = {one.queue for one in (await self._service.status()).handlers}
                backend = self._service.backend if queues else None
                return {} if backend is None else {name: await backend.queue(name).stats() for name in sorted(queues)}
        except TimeoutError as error:
            raise Unavailable("the store did not answer in time") from error

    async def _status(self) -> ServiceStatus:
        async with asyncio.timeout(ANSWER_WITHIN):
            return await self._service.status()


def _unready(status: ServiceStatus) -> str:
    waiting = [f"the handler of {one.queue}" for one in status.handlers if not one.is_ready]
    waiting += [f"the candidate for {one.name}" for one in status.leaders if not one.is_ready]
    return f"not ready: {', '.join(waiting)}" if waiting else "the service does not run yet, or not any more"


class Remembered:
    """An answer of the store, remembered for a second; those who ask meanwhile share one question."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, dict[str, Stats]]]) -> None:
        self._ask = ask
        self._asking: asyncio.Future[dict[str, Stats]] | None = None
        self._asked_at = 0.0

    async def get(self) -> dict[str, Stats]:
        """Return the answer.

        Raises:
            Unavailable: There is none.
        """
        now = time.monotonic()
        asking = self._asking
        # A question of another loop is not waited for: that loop may have ended, and never answer.
        is_other = asking is not None and not asking.done() and asking.get_loop() is not asyncio.get_running_loop()
        if asking is None or is_other or (asking.done() and (now - self._asked_at > FRESH or _has_failed(asking))):
            asking = self._asking = asyncio.ensure_future(self._ask())
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asked_at = now
        return await asyncio.shield(asking)


def _has_failed(done: asyncio.Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def add_handlers(found: Snapshot, handlers: Iterable[HandlerStatus]) -> None:
    """Add what runs now to a snapshot of metrics; a queue may have a handler for sessions beside a plain one."""
    running: Counter[str] = Counter()
    concurrency: Counter[str] = Counter()
    for one in handlers:
        running[one.queue] += one.running
        concurrency[one.queue] += one.concurrency
    for queue in concurrency:
        found["tenure_handlers_running", (queue,)] = float(running[queue])
        found["tenure_handlers_concurrency", (queue,)] = float(concurrency[queue])


def add_stats(found: Snapshot, stats: dict[str, Stats]) -> None:
    """Add the numbers of queues to a snapshot of metrics."""
    for queue, one in stats.items():
        for state in ("ready", "locked", "delayed", "deferred", "dead"):
            found["tenure_queue_messages", (queue, state)] = float(getattr(one, state))
        found["tenure_queue_oldest_seconds", (queue,)] = one.oldest_age
        found["tenure_queue_paused", (queue,)] = float(one.paused)
