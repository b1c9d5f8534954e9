"""Partitions for threads."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import tenure
from tenure import Metadata, Timing
from tenure._partitions.partitions import BlockingPartitionTerm as PartitionTerm
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import Unavailable
from tenure.sync._blocking import blocking
from tenure.sync._work_threads import WorkThreads

PartitionWork = Callable[[PartitionTerm], Any]
"""``work(term)``: it is called, on a thread of its own, for each partition that this process owns."""


class Partitions:
    """Partitions shared among processes, and this process as one member. See :class:`tenure.Partitions`.

    It may be used as a block: ``with backend.partitions("orders", 64) as mine``; leaving it ends what still runs, in
    whichever thread.

    Attributes:
        name: The name of the group.
        names: The names of the partitions.
        timing: The times of the leases.
        metadata: The text about this member for others to read.
        label: The readable part of the member's identity.
        weight: The weight of its share.
    """

    def __init__(self, partitions: tenure.Partitions, renewal_thread: RenewalThread) -> None:
        self.name: str = partitions.name
        self.names: tuple[str, ...] = partitions.names
        self.timing: Timing = partitions.timing
        self.metadata: Metadata = partitions.metadata
        self.label: str = partitions.label
        self.weight: int = partitions.weight
        self._behind = partitions
        self._renewal_thread = renewal_thread

    def run(self, work: PartitionWork, *, stop: threading.Event | None = None, sigterm: bool | None = None) -> None:
        """Take part: own a fair share of the partitions, and run *work* for each one owned, on a thread of its own.

        Blocks until told to end. See :meth:`tenure.Partitions.run`; as a thread can't be cancelled, *work* must watch
        ``term.lost`` or call ``term.check()``. Until it has ended, its partition is not released: a member that is to
        get it waits.

        Args:
            work: ``def work(term)``, with a :class:`tenure.sync.PartitionTerm`. When its partition is given to another
                member, and ``grace`` before its term can no longer be trusted, ``term.lost`` is set.
            stop: Set it to leave: no partition is claimed any more, work that runs may finish, and each partition is
                released after it.
            sigterm: Whether SIGTERM or a first SIGINT ends it: ``term.lost`` is set for all work, everything released,
                and ``run`` returns. By default as for :meth:`tenure.sync.Election.run`.

        Raises:
            ConfigError: The store can't be used as it is configured; or another member has other partitions.
            Unavailable: The backend was closed.

        Example::

            def work(term):
                while not term.lost.wait(1):
                    apply(next_events(term.partition), fence=term.token)


            backend.partitions("orders", 64).run(work)
        """
        threads = WorkThreads(work, self._renewal_thread)
        self._behind.context = contextvars.copy_context()
        threads.run(
            lambda serve, stopping: self._behind.run(serve, stop=stopping, sigterm=sigterm),
            stop=stop,
            sigterm=sigterm,
        )

    @property
    def owned(self) -> tuple[str, ...]:
        """The partitions that this process owns now, in the order in which it got them."""
        return self._behind.owned

    owners = blocking(tenure.Partitions.owners)

    def partition_of(self, key: str | bytes) -> str:
        """Return the partition that *key* belongs to. See :meth:`tenure.Partitions.partition_of`."""
        return self._behind.partition_of(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs, and wait until everything is released."""
        if self._renewal_thread.is_forked:  # what runs, runs in the parent
            return
        with suppress(Unavailable):  # the backend was closed, and all with it
            self._renewal_thread.call_blocking(lambda: self._behind.__aexit__(kind, error, trace))

    def __repr__(self) -> str:
        return repr(self._behind)
