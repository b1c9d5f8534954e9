"""Contestants on one store, with the record of what they do; all of them are ended with it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.interop.acts import Record
from tests.interop.contestants import Contestant, ours
from tests.interop.stores import LONG, Store

_numbers = count()


class Contest:
    """A context manager: contestants are added in its block, and killed at its end.

    Args:
        kind: The kind of store.
        client: The foreign client, one of ``kind.clients``.
        folder: A folder for the record, and for what the contestants write.
        lease: The seconds of all leases and sessions; by default, none is short on our side.
    """

    def __init__(self, kind: type[Store], client: str, folder: Path, lease: float | None = None) -> None:
        self.store = kind()
        self.client = client
        self.ttl = lease or LONG
        self.session = lease or kind.session
        self.record = Record(folder / "acts")
        self.contestants: list[Contestant] = []

    def ours(self) -> Contestant:
        """Return a contestant of ours, with the option that fits the foreign client."""
        option = self.store.clients[self.client]
        return self._added(ours(self.store.url(option), self.ttl, f"ours-{next(_numbers)}", self.record))

    def foreign(self, client: str | None = None) -> Contestant:
        """Return a contestant of the foreign client, or of another one."""
        return self._added(
            self.store.foreign(client or self.client, self.session, f"foreign-{next(_numbers)}", self.record)
        )

    def _added(self, contestant: Contestant) -> Contestant:
        self.contestants.append(contestant)
        return contestant

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for contestant in self.contestants:
            contestant.close()
        self.record.close()
        self.store.close()
