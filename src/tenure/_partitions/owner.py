"""One member of a group at work: performs what its machine decides, on the loop that runs the work.

Each lease, of a partition or of the slot, is an election of its own that asks once: it knows when a term may be
trusted, cancels the work before that ends, and releases the lease once the work has ended. Here are only its tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from tenure._election.driver import Driver
from tenure._election.elector import Election
from tenure._election.store import Hint
from tenure._election.term import TermBase
from tenure._partitions.machine import (
    Ask,
    Claim,
    Effect,
    Give,
    Join,
    Leave,
    Look,
    PartitionMachine,
    slots_to_follow,
)
from tenure._partitions.plan import ORDER
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.tasks import Tasks
from tenure._telemetry.hook import call_hook
from tenure._telemetry.log import log_event
from tenure.errors import ConfigError, Unavailable, in_words
from tenure.events import CampaignFailed, Event

Work = Callable[[Any], Awaitable[Any]]
"""The user's, which gets the kind of term that its elections make."""


class Owner:
    """The tasks of one member, from its first look until it holds nothing any more.

    Args:
        machine: Decides.
        driver: Of the store.
        renewal_thread: The store is asked there.
        slot_election: Makes an election of a slot that asks once, with more metadata.
        partition_election: The same for a partition.
        work: Run during each term of a partition, with that term.
        stop: When it is set, nothing is claimed any more, and work that runs may finish.
        on_event: The user's hook.
        health_problem: Calls the health callback; returns why the work is not healthy, or None.
        context: The context in which it and log handlers are called; None: that of ``run``.
    """

    def __init__(
        self,
        machine: PartitionMachine,
        *,
        driver: Driver,
        renewal_thread: RenewalThread,
        slot_election: Callable[[int, dict[str, str]], Election],
        partition_election: Callable[[str], Election],
        work: Work,
        stop: asyncio.Event,
        on_event: Callable[[Event], None] | None,
        health_problem: Callable[[], Awaitable[str | None]],
        context: contextvars.Context | None = None,
    ) -> None:
        self.machine = machine
        self._driver = driver
        self._renewal_thread = renewal_thread
        self._slot_election = slot_election
        self._partition_election = partition_election
        self._work = work
        self._stop = stop
        self._on_event = on_event
        self._health_problem = health_problem
        self._context = context or contextvars.copy_context()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks()
        self._leases: set[asyncio.Task[BaseException | None]] = set()
        self._works: dict[str, asyncio.Task[BaseException | None]] = {}
        self._calls: dict[str, object] = {}  # by partition, what the work returned when it was called
        self._running: set[str] = set()  # those whose work has not ended yet, or not begun
        self._leaving = asyncio.Event()  # set when the slot is to be released
        self._hints: dict[str, Future[None]] = {}  # by lease: of the partitions here, and of the other members' slots
        self._slots: set[str] = set()
        self._is_proven = False  # a slot was held: then a later error may be temporary
        self._problems: dict[str, str] = {}  # of the store, by lease or group: what was reported last
        self._unhealthy = ""  # why this member does not join
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Take part until ``leave``, or until the work fails; return when all leases are released or have run out."""
        cancelled: asyncio.CancelledError | None = None
        try:
            while not (self.machine.has_left and not self._leases):
                try:
                    self._perform(self.machine.tick(self._driver.clock.now()))
                    self._follow_renewals()
                    self._follow_members()
                except Exception as error:  # as of a renewal thread that has ended
                    self._fail(error)
                try:
                    await self._next_change()
                except asyncio.CancelledError as error:
                    # The caller of run() is cancelled. No lease is released before its work has ended: wait for it.
                    self.leave()
                    if cancelled is None:
                        self.cancel_work()  # also what `stop` lets finish
                    cancelled = error
        finally:
            for hints in self._hints.values():
                hints.cancel()
            await self._tasks.cancel_all()
        if self._failure is not None:
            raise self._failure
        if cancelled is not None:
            raise cancelled

    def leave(self) -> None:
        """Release the slot, so that the others take over, and cancel the work; unless ``stop`` lets it finish."""
        self._perform(self.machine.leave(self._driver.clock.now()))
        self._changed.set()

    def cancel_work(self) -> None:
        """Cancel the work that still runs, also what ``stop`` lets finish."""
        for partition in self._works:
            self._cancel(partition)

    def _cancel(self, partition: str) -> None:
        """Cancel the work on *partition*, once, and while it runs: else the wait for the release would be cancelled."""
        if partition in self._running:
            self._running.discard(partition)
            self._works[partition].cancel()

    async def _next_change(self) -> None:
        """Wait until the machine was told something, or is due."""
        wait = self.machine.wake_at - self._driver.clock.now()
        timer = self._loop.call_later(max(0.0, wait), self._changed.set) if wait < math.inf else None
        try:
            await self._changed.wait()
        finally:
            self._changed.clear()
            if timer is not None:
                timer.cancel()

    # --- effects ---

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Look(leases):
                    self._tasks.keep(self._loop.create_task(self._look(leases)))
                case Join(slot, order):
                    election = self._slot_election(slot, {ORDER: str(order)})
                    self._hold(self._be_member(election), partial(self._slot_ended, slot))
                case Claim(partition):
                    election = self._partition_election(partition)
                    running = election.run(self._work_on(partition), stop=self._stop, sigterm=False)
                    self._running.add(partition)
                    self._works[partition] = self._hold(running, partial(self._partition_ended, partition))
                case Give(partition):
                    if not self._stop.is_set():
                        self._cancel(partition)
                case Ask(partition):
                    self._tasks.keep(self._loop.create_task(self._ask(partition)))
                case Leave():
                    self._leaving.set()

    async def _look(self, leases: tuple[str, ...]) -> None:
        store = self._driver.store
        try:
            found = await self._renewal_thread.call(lambda: store.inspect_many(leases))
        except Exception as error:
            self.machine.look_failed(self._driver.clock.now())
            self._store_failed(self.machine.layout.name, error)
        else:
            self._problems.pop(self.machine.layout.name, None)
            try:
                self._perform(self.machine.looked(found, self._driver.clock.now()))
            except Exception as error:  # nothing would ever look again
                self._fail(error)
            if conflict := self.machine.conflict:
                self._fail(ConfigError(conflict))
        self._changed.set()

    async def _ask(self, partition: str) -> None:
        lease = self.machine.layout.lease_of(partition)
        try:
            await self._renewal_thread.call(lambda: self._driver.store.ask_to_resign(lease))
        except Exception:
            return  # the next look finds that it was not asked; or fails, and says why

    def _hold(
        self, running: Coroutine[Any, Any, None], ended: Callable[[BaseException | None], None]
    ) -> asyncio.Task[BaseException | None]:
        """Start a task that holds a lease; *ended* is called when it has ended, with its error if there was one."""

        def done(task: asyncio.Task[BaseException | None]) -> None:
            running.close()  # if it was cancelled before it started
            self._leases.discard(task)
            ended(None if task.cancelled() else task.exception() or task.result())
            self._changed.set()

        task = self._loop.create_task(_error_of(running))
        self._leases.add(task)
        task.add_done_callback(done)
        return task

    async def _be_member(self, election: Election) -> None:
        """Claim the slot if the work would be healthy, and hold it until this member leaves."""

        async def hold(_: TermBase[Any]) -> None:
            self._is_proven, self._unhealthy = True, ""
            self.machine.joined(self._driver.clock.now())
            self._changed.set()
            await self._leaving.wait()

        # One that is not healthy would get its share, lose it, and get it again, and so keep the others busy.
        if (why := await self._health_problem()) is not None:
            if why != self._unhealthy:
                self._unhealthy = why
                self._report(self.machine.layout.name, why)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.machine.timing.retry_every):
                    await self._leaving.wait()
        elif not self._leaving.is_set():
            await election.run(hold, sigterm=False)

    def _slot_ended(self, slot: int, error: BaseException | None) -> None:
        self.machine.slot_ended(self._driver.clock.now())
        if error is not None:
            self._store_failed(self.machine.layout.slot(slot), error)

    def _work_on(self, partition: str) -> Work:
        @wraps(self._work)
        def work(term: Any) -> Any:
            lease = self.machine.layout.lease_of(partition)
            self._problems.pop(lease, None)
            self._follow(lease)
            self._perform(self.machine.won(partition, self._driver.clock.now()))
            self._changed.set()
            self._calls[partition] = None  # it may raise
            call: Any = self._work(term)
            self._calls[partition] = call
            return self._noting_end(call, partition) if inspect.isawaitable(call) else call

        return work

    async def _noting_end(self, call: Awaitable[Any], partition: str) -> Any:
        try:
            return await call
        finally:
            self._running.discard(partition)

    def _partition_ended(self, partition: str, error: BaseException | None) -> None:
        had_begun = partition in self._calls
        call = self._calls.pop(partition, None)
        if inspect.iscoroutine(call):
            call.close()  # if it was cancelled before it started
        self._running.discard(partition)
        del self._works[partition]
        self._unfollow(self.machine.layout.lease_of(partition))
        self._perform(self.machine.ended(partition, self._driver.clock.now()))
        if error is not None and had_begun:
            self._fail(error)
        elif error is not None:
            self._store_failed(self.machine.layout.lease_of(partition), error)

    # --- failures ---

    def _store_failed(self, name: str, error: BaseException) -> None:
        """The store could not be asked about *name*, a lease or the group."""
        problem = str(error) or in_words(error)
        if self._is_final(error):
            self._fail(error)
        elif self._problems.get(name) != problem:  # else it was reported
            self._problems[name] = problem
            self._report(name, problem)

    def _report(self, name: str, problem: str) -> None:
        event = CampaignFailed(self._driver.clock.now(), name, self.machine.identity, problem)
        self._context.copy().run(log_event, event)
        if self._on_event is not None:
            self._context.copy().run(call_hook, self._on_event, event)

    def _is_final(self, error: BaseException) -> bool:
        """Whether it can't help to ask the store again. After a first success, an error may be temporary."""
        is_temporary = isinstance(error, Unavailable) or (self._is_proven and isinstance(error, Exception))
        return self._driver.is_closing or not is_temporary

    def _fail(self, error: BaseException) -> None:
        # If the backend is closed under the work, this is found first, and an error of the work itself is raised.
        if self._failure is None or (self._driver.is_closing and isinstance(self._failure, Unavailable)):
            self._failure = error
        self.leave()
        self.cancel_work()

    # --- hints ---

    def _follow_renewals(self) -> None:
        """Let the store note the renewals of the whole group: a look alone finds the end of a dead member's late."""
        prefix, pause = self.machine.layout.prefix, self.machine.timing.retry_every
        if prefix not in self._hints:  # which is no lease's name
            self._hints[prefix] = self._renewal_thread.submit(partial(self._driver.follow_renewals, prefix, pause))

    def _follow_members(self) -> None:
        """Follow the hints of the other members' slots that are held now, and of no other."""
        wanted = set(slots_to_follow(self.machine))
        for lease in self._slots - wanted:
            self._unfollow(lease)
        for lease in wanted - self._slots:
            self._follow(lease)
        self._slots = wanted

    def _follow(self, lease: str) -> None:
        if self._driver.store.traits.hints and lease not in self._hints:
            self._hints[lease] = self._renewal_thread.submit(partial(self._follow_hints, lease))

    def _unfollow(self, lease: str) -> None:
        if (hints := self._hints.pop(lease, None)) is not None:
            hints.cancel()

    async def _follow_hints(self, lease: str) -> None:
        """On the renewal loop: pass its hints on."""

        def hinted(hint: Hint) -> None:
            if hint != "absent":  # else it looks in its own time
                with suppress(RuntimeError):  # that loop is closed, and so this member has no work any more
                    self._loop.call_soon_threadsafe(self._hinted)

        await self._driver.follow_hints(lease, hinted, self.machine.timing.retry_every)

    def _hinted(self) -> None:
        self.machine.hinted(self._driver.clock.now())
        self._changed.set()


async def _error_of(running: Coroutine[Any, Any, None]) -> BaseException | None:
    """Return the error that ended *running*; raised out of a task, SystemExit would end the loop for all others."""
    try:
        await running
    except (Exception, SystemExit) as error:
        return error
    return None
