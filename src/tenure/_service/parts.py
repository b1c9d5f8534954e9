"""The parts of a service that run side by side: a consumer for each handler, a candidate for each leader, schedules."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol

import tenure
from tenure import (
    Backend,
    CandidateStatus,
    ConsumeOptions,
    Consumer,
    Queue,
    ScheduleStatus,
)
from tenure._service.status import HandlerStatus


class Part(Protocol):
    """A part of a running service."""

    @property
    def title(self) -> str:
        """Its work in a few words, for the log."""
        ...

    async def run(self, stop: asyncio.Event) -> None:
        """Run until its work has ended, or *stop* is set; then end gracefully."""
        ...

    def drain(self, grace: float) -> None:
        """End gracefully, as when *stop* is set; but let handlers finish for *grace* seconds. Called on its loop."""
        ...

    async def status(self) -> Sequence[HandlerStatus | CandidateStatus | ScheduleStatus]:
        """Return the status of what runs in it now."""
        ...


class Consumption:
    """A handler at work on a queue."""

    def __init__(self, queue: Queue, handler: Callable[..., Any], options: ConsumeOptions) -> None:
        self._queue = queue
        self._handler = handler
        self._options: ConsumeOptions = {**options, "sigterm": False}
        self._consumer: Consumer | None = None  # while it runs
        self._grace: float | None = None  # once it is drained

    @property
    def title(self) -> str:
        return f"consumes {self._queue.name}"

    async def run(self, stop: asyncio.Event) -> None:
        await self._run(self._queue.consumer(self._handler, **self._options), stop)

    async def run_until_empty(self, stop: asyncio.Event) -> int:
        """Run until the queue has nothing for the handler; return how many messages were received."""
        options: ConsumeOptions = {**self._options, "until_empty": True}
        consumer = self._queue.consumer(self._handler, **options)
        await self._run(consumer, stop)
        return consumer.received

    async def _run(self, consumer: Consumer, stop: asyncio.Event) -> None:
        self._consumer = consumer
        if self._grace is not None:
            consumer.drain(self._grace)
        try:
            await consumer.run(stop)
        finally:
            self._consumer = None

    def drain(self, grace: float) -> None:
        self._grace = grace
        if self._consumer is not None:
            self._consumer.drain(grace)

    @property
    def is_drained(self) -> bool:
        """Whether it was told to end."""
        return self._grace is not None

    async def status(self) -> Sequence[HandlerStatus]:
        consumer = self._consumer
        if consumer is None:
            return ()
        return [HandlerStatus(self._queue.name, consumer.concurrency, consumer.running, consumer.is_ready)]


class UntilEmpty:
    """All handlers, until none of their queues has anything for them: one may consume messages that another sends."""

    def __init__(self, consumptions: Sequence[Consumption]) -> None:
        self._consumptions = consumptions

    @property
    def title(self) -> str:
        return ", ".join(f"{one.title} until it is empty" for one in self._consumptions)

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            passes = [_Pass(one) for one in self._consumptions]
            await run_parts(passes, stop)
            if not any(one.received for one in passes) or any(one.is_drained for one in self._consumptions):
                stop.set()

    def drain(self, grace: float) -> None:
        for one in self._consumptions:
            one.drain(grace)

    async def status(self) -> Sequence[HandlerStatus]:
        return [status for one in self._consumptions for status in await one.status()]


class _Pass:
    """One handler, until its queue has nothing for it."""

    def __init__(self, consumption: Consumption) -> None:
        self._consumption = consumption
        self.title = consumption.title
        self.drain = consumption.drain
        self.status = consumption.status
        self.received = 0

    async def run(self, stop: asyncio.Event) -> None:
        self.received = await self._consumption.run_until_empty(stop)


class Sending:
    """A schedule at work."""

    def __init__(self, schedule: tenure.Schedule) -> None:
        self.title: str = f"sends at the times of {schedule.name}"
        self._schedule = schedule
        self._drained = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        waiting = asyncio.create_task(_any_of(stop, self._drained))
        waiting.add_done_callback(lambda _: self._drained.set())
        try:
            await self._schedule.run(self._drained)
        finally:
            waiting.cancel()

    def drain(self, grace: float) -> None:
        self._drained.set()

    async def status(self) -> Sequence[ScheduleStatus]:
        seen = self._schedule.seen()
        return [] if seen is None else [seen]


class Leadership:
    """A candidate whose work is an async function."""

    def __init__(
        self, backend: Backend, name: str, work: tenure.Work, again: bool, options: tenure.ElectionOptions
    ) -> None:
        self.title: str = f"campaigns for {name}"
        self._election = backend.election(name, **options)
        self._work = work
        self._again = again
        self._drained = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        leading = asyncio.create_task(self._lead())
        stopping = asyncio.create_task(_any_of(stop, self._drained))
        try:
            await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            leading.cancel()  # the work is cancelled, and the lease released once it has ended
            await _wait_through_cancellation({leading})
        if not leading.cancelled() and (error := leading.result()) is not None:
            raise error

    async def _lead(self) -> BaseException | None:
        """Campaign, and return the error that ends it: a ``SystemExit`` that a task raises would end the loop."""
        try:
            await self._election.run(self._work, again=self._again, sigterm=False)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None

    def drain(self, grace: float) -> None:
        self._drained.set()

    async def status(self) -> Sequence[CandidateStatus]:
        return _of_candidates(await self._election.status())


class ThreadLeadership:
    """A candidate whose work is a plain function, which runs on a thread of its own."""

    def __init__(
        self,
        backend: tenure.sync.Backend,
        name: str,
        work: tenure.sync.Work,
        again: bool,
        options: tenure.ElectionOptions,
    ) -> None:
        self.title: str = f"campaigns for {name}"
        self._election = backend.election(name, **options)
        self._work = work
        self._again = again
        self._drained = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        leading = _CampaignThread(self._election, self._work, self._again)
        stopping = asyncio.create_task(_any_of(stop, self._drained))
        either: set[asyncio.Future[Any]] = {leading.ended, stopping}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await leading.stop()
        except asyncio.CancelledError:  # a thread can't be: its lease is left to run out
            await leading.stop(patience=self._election.timing.grace)
            raise
        finally:
            stopping.cancel()
        leading.ended.result()

    def drain(self, grace: float) -> None:
        self._drained.set()

    async def status(self) -> Sequence[CandidateStatus]:
        return _of_candidates(await self._election._behind.status())


async def _any_of(*events: asyncio.Event) -> None:
    """Return when one of *events* is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def _of_candidates(status: CandidateStatus) -> Sequence[CandidateStatus]:
    """Return *status*, if there is a candidate."""
    return [status] if status.state != "idle" or status.overran else []


class _CampaignThread:
    """Runs a campaign that blocks, on a daemon thread: one that hangs does not keep the process alive."""

    def __init__(self, election: tenure.sync.Election, work: tenure.sync.Work, again: bool) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._election = election
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        name = f"tenure-campaign-{election.name}"
        threading.Thread(target=context.run, args=(self._run, work, again), name=name, daemon=True).start()

    def _run(self, work: tenure.sync.Work, again: bool) -> None:
        error: BaseException | None = None
        try:
            self._election.run(work, again=again, stop=self._stop, sigterm=False)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: it did not wait any longer
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def stop(self, patience: float = math.inf) -> None:
        """End the campaign, and wait until its work has ended, or for *patience* seconds.

        A thread can't be cancelled; ``term.lost`` tells it.
        """
        self._stop.set()
        until = self._loop.time() + patience
        while not self.ended.done() and self._loop.time() < until:
            # Repeated, as a term may be won in the moment in which the campaign ends. No thread is needed for it: those
            # of the loop may all be busy with the user's calls.
            resigning = asyncio.ensure_future(self._election._behind.resign(wait=False))
            either: set[asyncio.Future[Any]] = {resigning, self.ended}
            await asyncio.wait(either, timeout=RESIGN_EVERY, return_when=asyncio.FIRST_COMPLETED)
            if resigning.done() and not resigning.cancelled():
                resigning.exception()  # the backend is closed: then the campaign ends, too
            await asyncio.wait({self.ended}, timeout=min(RESIGN_EVERY, max(until - self._loop.time(), 0.0)))


RESIGN_EVERY = 0.5
"""Seconds between requests to end a term that is won while its campaign ends."""


async def _wait_through_cancellation(waited: Collection[asyncio.Future[Any]]) -> None:
    """Wait until all are done, however often this task is cancelled meanwhile."""
    while not all(one.done() for one in waited):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(waited)


async def run_parts(parts: Sequence[Part], stop: asyncio.Event) -> None:
    """Run *parts* side by side until all have ended. The first failure stops the others, gracefully, and is raised.

    Cancelled, it cancels the handlers and the work of all of them, and waits for their end.
    """
    failures: list[BaseException] = []

    async def run(part: Part) -> None:
        try:
            await part.run(stop)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            failures.append(error)
            stop.set()

    tasks = {asyncio.create_task(run(part), name=f"tenure-{part.title}") for part in parts}
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await _wait_through_cancellation(tasks)  # hooks that follow must not run beside them
        raise
    if failures:
        first, *others = failures
        for other in others:
            first.add_note(f"while it stopped, there was also {type(other).__name__}: {other}")
        raise first
