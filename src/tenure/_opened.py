"""Stores and brokers, one folder for each technology; here is what a folder's ``open`` hands over.

Every folder's ``__init__`` has ``TRAITS``, ``QUEUE_TRAITS`` if it has queues, and ``open(url, *, clock=None)``, which
returns an ``Opened``. It reads the URL and touches nothing else: the first question does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing worth knowing about an opened backend; *advice* is what an operator should do about it, if anything."""

    name: str
    value: str
    advice: str = ""


class Opened(Protocol):
    """A backend in use.

    It may also have ``warnings``: facts that are logged whenever it is opened, before the first question.
    """

    @property
    def leases(self) -> LeaseStore:
        """Its store of leases."""
        ...

    @property
    def broker(self) -> Broker:
        """Its broker of queues."""
        ...

    async def describe(self) -> Sequence[Fact]:
        """Ask the backend about itself, for ``tenure doctor``."""
        ...

    async def close(self) -> None:
        """Let go of every connection, thread and socket. A second time does nothing."""
        ...
