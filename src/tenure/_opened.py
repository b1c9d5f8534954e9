"""An opened backend: what the function ``open`` of a backend's folder returns.

Every folder's ``__init__`` has ``TRAITS``, ``QUEUE_TRAITS`` if it has queues, and ``open(url, *, clock=None)``, which
returns an ``Opened``. ``open`` only reads the URL: the first request connects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about an opened backend; *advice* says what an operator should do about it, if anything.

    *code* is the word under which ``tenure explain`` says more about the advice; it is dropped if there is none.
    """

    name: str
    """What it is about, in a word or two."""
    value: str
    """What was found, as text."""
    advice: str = ""
    code: str = ""

    def __post_init__(self) -> None:
        if not self.advice:
            object.__setattr__(self, "code", "")


class Opened(Protocol):
    """A backend: its store of leases, and its broker. One of the two may be missing.

    It may also have ``warnings``: facts that are logged whenever it is opened, before the first request, and that
    ``tenure doctor`` shows. And ``report_to(report)``: then it calls *report* with facts that it finds while it is
    used, to be logged. And ``describe_by_writing()``: further facts for ``tenure doctor``, found by a write that
    leaves nothing behind. And ``connections_max``: how many connections it opens to the store at most.
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
        """Return facts about the backend, for ``tenure doctor``; it only reads."""
        ...

    async def close(self) -> None:
        """Close every connection and socket, and end every thread. A second call does nothing."""
        ...
