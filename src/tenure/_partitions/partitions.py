"""``Partitions`` and ``PartitionTerm``, for users: share partitions among processes, run the work of each one owned."""

from __future__ import annotations

import asyncio
import contextvars
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from tenure._election.driver import Driver
from tenure._election.elector import Election, checked_metadata
from tenure._election.handle import HOLDER_BYTES
from tenure._election.health import Health, HealthCheck
from tenure._election.options import ElectionOptions
from tenure._election.store import NAME_MAX, require_name
from tenure._election.term import BlockingTerm, MakeTerm, Term
from tenure._lease import Grant, Leader, Metadata, leader_of
from tenure._partitions.machine import PartitionMachine
from tenure._partitions.owner import Owner
from tenure._partitions.plan import (
    LAYOUT,
    OWN,
    WEIGHT,
    WEIGHT_MAX,
    Layout,
)
from tenure._queue.identity import partition_number
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure._timing import Timing
from tenure.errors import ConfigError, refuse_generator
from tenure.events import Event

IDENTITY_BYTES = 8
"""Random bytes in the identity of a member, as two characters each; each of its leases adds ``HOLDER_BYTES``."""


class PartitionTerm(Term):
    """A term in which this process owns a partition: as :class:`tenure.Term`, and the name of the partition.

    Attributes:
        partition: Its name: ``"partition-0"`` and so on for numbered ones.
    """

    def __init__(self, partition: str, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock)
        self.partition = partition


class BlockingPartitionTerm(BlockingTerm):
    """A term for threads in which this process owns a partition: as :class:`tenure.PartitionTerm`.

    Attributes:
        partition: Its name: ``"partition-0"`` and so on for numbered ones.
    """

    def __init__(self, partition: str, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock)
        self.partition = partition


PartitionWork = Callable[[PartitionTerm], Awaitable[Any]]
"""``work(term)``: async; it is called for each partition that this process owns."""

MakePartitionTerm = Callable[[str], MakeTerm]


def make_partition_term(partition: str) -> MakeTerm:
    """Return what makes the terms of a partition."""
    return partial(PartitionTerm, partition)


def make_blocking_partition_term(partition: str) -> MakeTerm:
    """Return what makes the terms of a partition for threads."""
    return partial(BlockingPartitionTerm, partition)


class Partitions:
    """Partitions shared among processes, and this process as one member. Made by ``backend.partitions(name, …)``.

    It may be used as a block: ``async with backend.partitions("orders", 64) as mine``; leaving it ends what still runs.

    Attributes:
        name: The name of the group.
        names: The names of the partitions.
        timing: The times of the leases.
        metadata: The text about this member for others to read.
        label: The readable part of the member's identity.
        weight: The weight of its share.
    """

    def __init__(
        self,
        layout: Layout,
        timing: Timing,
        *,
        driver: Driver,
        renewal_thread: RenewalThread,
        options: ElectionOptions,
        weight: int = 1,
        on_event: Callable[[Event], None] | None = None,
        make_term: MakePartitionTerm = make_partition_term,
    ) -> None:
        for partition in layout.partitions:
            require_name(layout.lease_of(partition), of="lease of a partition")
        self._layout = layout
        self.name: str = layout.name
        self.names: tuple[str, ...] = layout.partitions
        self.timing = timing
        self.weight: int = _checked_weight(weight)
        self.metadata: Metadata = _checked_metadata(options.get("metadata"))
        self._driver = driver
        self._renewal_thread = renewal_thread
        self._options = options
        self._on_event = on_event
        self._make_term = make_term
        self.context: contextvars.Context | None = None
        """As that of an election; None: that of ``run``."""
        self._health: Health | HealthCheck | None = options.get("health")
        of_first = self._election(layout.lease_of(layout.partitions[0]), "", Term)  # which refuses what can't work
        self.label: str = of_first.label
        require_name(self.label, of="label", most=NAME_MAX - 2 - 2 * (HOLDER_BYTES + IDENTITY_BYTES))
        # All leases share it, so that one call of the user's function is enough for all that are renewed together.
        self._health = of_first.health_check
        self._owner: Owner | None = None
        self._ended = asyncio.Event()

    async def run(self, work: PartitionWork, *, stop: asyncio.Event | None = None, sigterm: bool | None = None) -> None:
        """Take part: own a fair share of the partitions, and run *work* for each one owned, until told to end.

        Shares differ by one at most, or follow the weights. When a member comes or goes, no more partitions move than
        must: a newcomer asks for its share, and gets each partition once the work on it has ended where it was. Each
        partition is a lease with a fencing token of its own, so there are never two owners that are both trusted.

        When *work* returns, its partition is released, and any member may claim it again, this one after
        ``retry_every``. When it raises, this member gives everything, and the error comes out of ``run``.

        Args:
            work: ``async def work(term)``, with a :class:`tenure.PartitionTerm`. It is cancelled when the partition is
                given to another member; and ``grace`` before its term can no longer be trusted.
            stop: Set it to leave: no partition is claimed any more, work that runs may finish, and each partition is
                released after it.
            sigterm: Whether SIGTERM or a first SIGINT ends it: the work is cancelled, everything released, and ``run``
                returns. By default as for :meth:`tenure.Election.run`.

        Raises:
            ConfigError: The store can't be used as it is configured; or another member has other partitions.
            Unavailable: The backend was closed.

        Example::

            async def work(term):
                async for event in events_of(term.partition):
                    term.check()
                    await apply(event, fence=term.token)


            await backend.partitions("orders", 64).run(work)
        """
        refuse_generator("work", work)
        if self._owner is not None:
            raise ConfigError(
                f"this object takes part in {self.name!r} already; one object is one member: make another with "
                f"backend.partitions({self.name!r}, …)"
            )
        if stop is not None and stop.is_set():
            return
        self._owner = owner = self._new_owner(work, stop or asyncio.Event())
        self._ended.clear()

        async def leave_at(stop: asyncio.Event) -> None:
            await stop.wait()
            owner.leave()

        def end() -> None:
            owner.leave()
            owner.cancel_work()

        leaving = None if stop is None else asyncio.create_task(leave_at(stop))
        try:
            with on_shutdown_signal(end, sigterm):
                await owner.run()
        finally:
            if leaving is not None:
                leaving.cancel()
            self._owner = None
            self._ended.set()

    @property
    def owned(self) -> tuple[str, ...]:
        """The partitions that this process owns now, in the order in which it got them. Any thread may ask."""
        owner = self._owner
        return () if owner is None else owner.machine.owned

    async def owners(self) -> dict[str, Leader | None]:
        """Return the owner of each partition, as the store knows it now; None if it has none.

        Raises:
            Unavailable: The store could not be asked.
        """
        leases = [self._layout.lease_of(partition) for partition in self.names]
        found = await self._renewal_thread.call(lambda: self._driver.store.inspect_many(leases))
        return {partition: leader_of(one) for partition, one in zip(self.names, found, strict=True)}

    def partition_of(self, key: str | bytes) -> str:
        """Return the partition that *key* belongs to, in every process alike; see :func:`tenure.partition_of`.

        Raises:
            ConfigError: The key is no text and no bytes.
        """
        return self.names[partition_number(key, len(self.names))]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs, and wait until everything is released."""
        if self._owner is not None:
            self._owner.leave()
            self._owner.cancel_work()
            await self._ended.wait()

    def __repr__(self) -> str:
        owned = f"{len(self.owned)} of {len(self.names)} partitions owned"
        return f"<Partitions {self.name!r}, ttl {self.timing.ttl:g} s, {owned}>"

    def _new_owner(self, work: PartitionWork, stop: asyncio.Event) -> Owner:
        identity = f"{self.label}-{secrets.token_hex(IDENTITY_BYTES)}"
        machine = PartitionMachine(
            self._layout,
            identity,
            self.timing,
            random.Random(),
            weight=self.weight,
            now=self._driver.clock.now(),
        )
        of_slot = {**self.metadata, WEIGHT: str(self.weight), LAYOUT: self._layout.text}

        def slot_election(slot: int, more: dict[str, str]) -> Election:
            return self._election(self._layout.slot(slot), identity, Term, of_slot | more, is_slot=True)

        def partition_election(partition: str) -> Election:
            return self._election(self._layout.lease_of(partition), identity, self._make_term(partition))

        return Owner(
            machine,
            driver=self._driver,
            renewal_thread=self._renewal_thread,
            slot_election=slot_election,
            partition_election=partition_election,
            work=work,
            stop=stop,
            on_event=self._on_event,
            health_problem=self._health_problem,
            context=self.context,
        )

    async def _health_problem(self) -> str | None:
        """Call the health callback; return why the work is not healthy, or None."""
        health = self._health
        if not isinstance(health, HealthCheck):
            return None
        # As for an election: no user code on the renewal thread, so there the callback gets a thread.
        loop = asyncio.get_running_loop()
        context = self.context or contextvars.copy_context()
        within = self.timing.retry_every / 2
        return await health.problem(within, None if loop is self._renewal_thread.loop else loop, context)

    def _election(
        self,
        lease: str,
        label: str,
        make_term: MakeTerm,
        metadata: Mapping[str, str] | None = None,
        *,
        is_slot: bool = False,
    ) -> Election:
        options = self._options
        election = Election(
            lease,
            self.timing,
            driver=self._driver,
            renewal_thread=self._renewal_thread,
            label=label or options.get("label"),
            metadata=metadata or self.metadata,
            stall_after=None if is_slot else options.get("stall_after"),  # beats are those of work
            health=self._health,
            overrun=options.get("overrun", "report"),
            on_event=self._on_event,
            make_term=make_term,
            once=True,
        )
        election.context = self.context
        return election


def _checked_weight(weight: object) -> int:
    if isinstance(weight, bool) or not isinstance(weight, int) or not 1 <= weight <= WEIGHT_MAX:
        raise ConfigError(f"weight must be a whole number from 1 to {WEIGHT_MAX:,}, not {weight!r}")
    return weight


def _checked_metadata(metadata: Mapping[str, str] | None) -> Metadata:
    checked = checked_metadata(metadata)
    if reserved := next((key for key in checked if key.startswith(OWN)), None):
        raise ConfigError(
            f"metadata keys that begin with {OWN!r} are tenure's own; choose another one for {reserved!r}"
        )
    return checked
