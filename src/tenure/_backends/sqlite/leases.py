"""Leases in an SQLite file.

House rules:

- A row per name, which expires and is never deleted. Expiry is judged by a clock that all processes of the machine
  share and that can't be set: the time since boot.
- A row that was stamped in another boot (the machine was restarted, or the file came from elsewhere) can't be compared
  with that clock. It may be live. So a candidate restamps the row, with its whole ttl from now, and waits for its end:
  longer than needed, never shorter. Its holder, if there still is one, renews it meanwhile.
- The clock may go back under the same name of the boot: a virtual machine was set back to a snapshot, and the file was
  not. Then a row ends later than its ttl from now, which is impossible, and it counts as another boot's.
- A renewal never makes a lease end sooner, whatever the ttl is now.
- Where two boots are alive at once (containers in several time namespaces), each would find the row stamped by the
  other, for ever. So each remembers when it first saw the row: if its holder has not renewed it since (``renewals``
  shows that, which a restamp does not change) for a whole ttl of the own clock, it has expired in any case.
- The time is read inside the transaction, after the write lock was won: an earlier reading may be old.
- A claim whose answer did not reach its caller (which was cancelled, or got ``Unavailable``) is released, because no
  candidate uses it. But its holder may have repeated the request and got the same grant. So it is released only if it
  was a new claim, no call of that holder got it, and no call is running that could get it.
- Other programs may write into the table. A time that is unreadable can't be compared, like another boot's; a ttl that
  is, or is longer than any, counts as the longest. A token that can't rise is refused: it must never fall.
- Reading needs no write lock, so that many waiting candidates don't delay a renewal.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tenure._backends.sqlite.boot import common_name, is_earlier_boot, this_boot
from tenure._backends.sqlite.client import Database, DiskFullError
from tenure._backends.sqlite.rows import plain_text
from tenure._backends.sqlite.schema import TableSet
from tenure._backends.sqlite.statements import statements
from tenure._backends.sqlite.wake import Wake
from tenure._backends.sqlite.worker import Worker
from tenure._checks import LONGEST
from tenure._election.store import Hint, LeaseTraits, require_name, require_ttl
from tenure._foreign import a_count, clipped, read_json, read_or, texts
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, TOKEN_MAX, Grant, Granted, HeldBy, Lost, Metadata, Released, Vacant
from tenure._runtime.clock import Clock
from tenure.errors import ConfigError

LEASES = TableSet("leases", version=1, script="leases_schema.sql")

TRAITS = LeaseTraits(
    ttl_min=0.1,
    ttl_max=86_400.0,
    fencing="native",
    expiry="store clock",
    hints=True,
    survives_restart=True,
)

SLACK = 0.001
"""Seconds that a lease may end later than its ttl from now and still be valid: for rounding."""

PAGE = 4_096
"""Bytes: a new name takes no more beside its metadata."""

_NO_TOKEN = -1
"""A token that is unreadable."""

_SQL = statements("leases.sql")


class _Row(NamedTuple):
    name: str
    holder: str | None
    token: int
    expires_at: float
    ttl: float
    boot: str
    metadata: Metadata
    resign_asked: bool
    renewals: object

    @classmethod
    def of(cls, columns: Sequence[Any]) -> _Row:
        name, holder, token, expires_at, ttl, boot, metadata, resign_asked, renewals = columns
        ttl = clipped(ttl, 0.0, TRAITS.ttl_max)
        expires_at = clipped(expires_at, -LONGEST)
        return cls(
            plain_text(name),
            None if holder is None else plain_text(holder),
            read_or(a_count, token, _NO_TOKEN),
            math.inf if expires_at is None else expires_at,
            TRAITS.ttl_max if ttl is None else ttl,
            plain_text(boot),
            read_or(_read_metadata, metadata, NO_METADATA),
            bool(resign_asked),
            renewals,
        )

    @property
    def shown_token(self) -> int:
        return max(0, self.token)


class _PendingAcquire:
    """The running calls of one holder. Written on the callers' loop and in the worker's thread."""

    def __init__(self) -> None:
        self.calls: set[object] = set()
        self.delivered = False
        self.won: Grant | None = None


class SqliteLeases:
    """A ``LeaseStore`` in an SQLite file.

    Args:
        worker: The thread with the connection.
        wake: Sends hints to the other processes, and receives theirs.
        clock: Judges expiry; must be common to all that share the file.
        boot: The name of the boot from which the clock counts; by default, that of the present boot.
    """

    def __init__(self, worker: Worker, wake: Wake, clock: Clock, boot: str = "") -> None:
        self._worker = worker
        self._wake = wake
        self._clock = clock
        self._boot = boot
        self._boot_known = bool(boot)
        self._foreign_rows: dict[str, tuple[int, object, float]] = {}  # token, renewals, and its end by the own clock
        self._pending: dict[tuple[str, str], _PendingAcquire] = {}

    @property
    def traits(self) -> LeaseTraits:
        """What the store can do here: without hints, if no socket can ever be made."""
        return replace(TRAITS, hints=False) if self._wake.is_ruled_out else TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Claim *name* if it is free; a holder that repeats the request gets the same grant, extended."""
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        as_json = json.dumps(dict(metadata))
        pending, call = self._pending.setdefault((name, holder), _PendingAcquire()), object()
        pending.calls.add(call)
        try:
            answer = await self._worker.run(
                lambda database: self._acquire(database, pending, name, holder, ttl, as_json),
                unwanted=lambda database: self._release_unwanted(database, pending, call),
            )
            pending.delivered = pending.delivered or isinstance(answer, Granted)
            return answer
        finally:
            pending.calls.discard(call)
            if not pending.calls:
                self._pending.pop((name, holder), None)

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        """Extend many claims to *ttl* seconds from now, in one transaction."""
        require_ttl(ttl, TRAITS)
        if not grants:
            return []
        return await self._worker.run(lambda database: self._renew(database, grants, ttl))

    async def release(self, grant: Grant) -> Released | Lost:
        """Release a claim; its token is kept."""
        changed = await self._worker.run(lambda database: self._release(database, grant))
        return Released(grant) if changed else Lost(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        """Return the holder of *name*, without changing anything."""
        return (await self.inspect_many([name]))[0]

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        """Return the holders of many names, in the order of *names*, by one statement."""
        for name in names:
            require_name(name)
        if not names:
            return []
        return await self._worker.run(lambda database: self._inspect(database, names))

    async def names(self) -> Sequence[str]:
        """List every name that was ever claimed, sorted."""
        return await self._worker.run(
            lambda database: database.read(
                lambda connection: [plain_text(name) for (name,) in connection.execute(_SQL["names"])]
            )
        )

    async def ask_to_resign(self, name: str) -> bool:
        """Request that the present holder resigns; False if there is none."""
        require_name(name)
        return await self._worker.run(lambda database: self._change(database, "ask_to_resign", {"name": name}))

    def hints(self, name: str) -> AsyncIterator[Hint]:
        """Yield when something changed for *name*, in this process or another."""
        require_name(name)
        return self._wake.listen(f"lease:{name}")

    # --- in the worker's thread ---

    def _acquire(
        self, database: Database, pending: _PendingAcquire, name: str, holder: str, ttl: float, metadata: str
    ) -> Granted | HeldBy:
        self._read_boot(database)
        row = database.read(lambda connection: _find(connection, [name])).get(name)
        now = self._clock.now()
        if row is not None and self._is_ours(row, now) and self._is_live(row, now) and row.holder != holder:
            return _held_by(row, row.expires_at - now)

        def claim(connection: sqlite3.Connection) -> tuple[Granted | HeldBy, bool]:
            answer, won = self._claim(connection, name, holder, ttl, metadata)
            if won:
                with suppress(DiskFullError):  # a full disk refuses no lease as long as there is any room
                    database.keep_reserve(len(metadata) + PAGE)
            return answer, won

        answer, won = database.write(claim)
        if won and isinstance(answer, Granted):
            pending.won = answer.grant
            self._wake.notify(f"lease:{name}")
        return answer

    def _release_unwanted(self, database: Database, pending: _PendingAcquire, call: object) -> None:
        pending.calls.discard(call)
        if not pending.calls and not pending.delivered and (grant := pending.won):
            pending.won = None
            self._release(database, grant)

    def _release(self, database: Database, grant: Grant) -> bool:
        values: dict[str, object] = {"name": grant.name, "holder": grant.holder, "token": grant.token}
        return self._change(database, "release", values)

    def _claim(
        self, connection: sqlite3.Connection, name: str, holder: str, ttl: float, metadata: str
    ) -> tuple[Granted | HeldBy, bool]:
        """Claim the name if it is free, with the write lock held; also return whether the claim is a new one."""
        row = _find(connection, [name]).get(name)
        now = self._clock.now()
        values = {"name": name, "holder": holder, "ttl": ttl, "metadata": metadata, **self._clock_values(now)}
        if row is None or not self._is_live(row, now) or (row.holder != holder and self._has_outlived_ttl(row, now)):
            if row is not None and not 0 <= row.token < TOKEN_MAX:
                raise self._no_token(row)
            self._foreign_rows.pop(name, None)
            (token,) = connection.execute(_SQL["claim"], values).fetchone()
            return Granted(Grant(name, holder, token)), True
        if row.holder == holder:
            if row.token == _NO_TOKEN:
                raise self._no_token(row)
            connection.execute(_SQL["stamp"], {**values, "by_holder": 1})
            return Granted(Grant(name, holder, row.token), row.resign_asked), False
        if self._is_ours(row, now):
            return _held_by(row, row.expires_at - now), False
        if not self._is_remembered(row):
            self._foreign_rows[name] = (row.token, row.renewals, now + row.ttl)
        connection.execute(_SQL["stamp"], {**values, "ttl": row.ttl, "by_holder": 0})
        return _held_by(row, row.ttl), False

    def _renew(self, database: Database, grants: Sequence[Grant], ttl: float) -> list[Granted | Lost]:
        self._read_boot(database)
        keys = [(grant.name, grant.holder, grant.token) for grant in grants]
        as_json = json.dumps(keys)

        def renew(connection: sqlite3.Connection) -> dict[tuple[str, str, int], bool]:
            rows = connection.execute(_SQL["renew"], {"grants": as_json, "ttl": ttl, **self._clock_values()})
            return {(name, holder, token): bool(resign_asked) for name, holder, token, resign_asked in rows}

        kept = database.write(renew)
        return [
            Granted(grant, kept[key]) if key in kept else Lost(grant) for grant, key in zip(grants, keys, strict=True)
        ]

    def _change(self, database: Database, statement: str, values: dict[str, object]) -> bool:
        """Run a statement on one row, and notify other processes if it changed the row; return whether it did."""
        self._read_boot(database)
        changed = database.write(
            lambda connection: (
                connection.execute(_SQL[statement], {**values, **self._clock_values()}).fetchone() is not None
            )
        )
        if changed:
            self._wake.notify(f"lease:{values['name']}")
        return changed

    def _inspect(self, database: Database, names: Sequence[str]) -> list[HeldBy | Vacant]:
        self._read_boot(database)
        rows = database.read(lambda connection: _find(connection, names))
        now = self._clock.now()
        return [self._seen(name, rows.get(name), now) for name in names]

    def _seen(self, name: str, row: _Row | None, now: float) -> HeldBy | Vacant:
        if row is None:
            return Vacant(name)
        if not self._is_live(row, now):
            return Vacant(name, row.shown_token, self._vacant_for(row, now))
        remaining = row.expires_at - now if self._is_ours(row, now) else row.ttl
        return _held_by(row, remaining, resign_asked=row.resign_asked)

    def _no_token(self, row: _Row) -> ConfigError:
        return ConfigError(
            f"the token of the lease {row.name!r} in the table tenure_lease can't rise: it is no whole number from 0 "
            f"to {TOKEN_MAX - 1}; set it to the highest token that was ever given for this name"
        )

    # --- time ---

    def _clock_values(self, now: float | None = None) -> dict[str, object]:
        return {"now": self._clock.now() if now is None else now, "boot": self._boot, "slack": SLACK}

    def _is_ours(self, row: _Row, now: float) -> bool:
        """Whether the row's times can be compared with the own clock."""
        return row.boot == self._boot and row.expires_at <= now + row.ttl + SLACK

    def _is_live(self, row: _Row, now: float) -> bool:
        return row.holder is not None and (not self._is_ours(row, now) or now < row.expires_at)

    def _vacant_for(self, row: _Row, now: float) -> float | None:
        """Return the seconds for which the name was vacant; at least this boot's, if its end is of an earlier boot."""
        if self._is_ours(row, now):
            return clipped(now - row.expires_at)
        return now if is_earlier_boot(row.boot, self._boot) else None

    def _is_remembered(self, row: _Row) -> bool:
        return self._foreign_rows.get(row.name, ())[:2] == (row.token, row.renewals)

    def _has_outlived_ttl(self, row: _Row, now: float) -> bool:
        """Whether another boot's row was seen without a renewal for its whole ttl."""
        return self._is_remembered(row) and now >= self._foreign_rows[row.name][2]

    def _read_boot(self, database: Database) -> None:
        """Read, before anything else, the name that this boot has in the file."""
        if not self._boot_known:
            boots = database.read(
                lambda connection: [
                    plain_text(boot) for (boot,) in connection.execute("SELECT DISTINCT boot FROM tenure_lease")
                ]
            )
            self._boot, self._boot_known = common_name(this_boot(), boots), True


def _find(connection: sqlite3.Connection, names: Sequence[str]) -> dict[str, _Row]:
    rows = connection.execute(_SQL["find"], {"names": json.dumps(list(names))})
    return {row.name: row for row in map(_Row.of, rows)}


def _held_by(row: _Row, remaining: float, *, resign_asked: bool = False) -> HeldBy:
    assert row.holder is not None
    return HeldBy(row.name, row.holder, row.shown_token, clipped(remaining), row.metadata, resign_asked)


def _read_metadata(column: object) -> Metadata:
    return FrozenDict(texts(read_json(column)))
