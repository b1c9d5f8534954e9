"""Rows of PostgreSQL and of SQLite. A column of PostgreSQL has values of its type only; one of SQLite, of any."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from tenure._backends.postgres import leases as postgres_leases
from tenure._backends.postgres import queue as postgres_queue
from tenure._backends.postgres import rows as postgres_rows
from tenure._backends.postgres.functions import Deaths
from tenure._backends.sqlite import rows
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.leases import SqliteLeases, _held_by, _Row
from tenure._checks import LONGEST
from tenure._lease import Vacant
from tenure._queue.broker import QueueSettings
from tenure._queue.message import Attempt, SessionLock, Stats
from tenure._runtime.clock import SystemClock
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    HEADERS,
    HISTORY,
    NOW,
    always,
    as_bytes,
    as_double,
    as_number,
    as_objects,
    as_text,
    drive,
    nothing,
    use_death,
    use_delivery,
    use_died,
    use_history,
    use_lease,
    use_message,
    use_moment,
)

Row = tuple[Any, ...]

# --- PostgreSQL ---


def columns(kinds: str, given: Any, sample: Row) -> Row:
    """Return values as columns of these types have them: "?" for one that may be NULL."""
    values = [*as_objects(given), *sample] if isinstance(given, (list, tuple)) else sample
    return tuple(_column(kind, one, usual) for kind, one, usual in zip(kinds.split(), values, sample, strict=False))


def _column(kind: str, value: Any, sample: Any) -> Any:
    if value is None:
        return None if kind.endswith("?") else sample
    match kind.rstrip("?"):
        case "text":
            return as_text(value).replace("\0", "")
        case "bytea":
            return as_bytes(value)
        case "double":
            return as_double(value)
        case "boolean":
            return bool(value)
        case "jsonb":  # as the server writes it, so it is JSON
            try:
                return json.dumps(json.loads(as_text(value)), allow_nan=False)
            except (ValueError, RecursionError):
                return "null"
    return as_number(value, {"smallint": 16, "integer": 32, "bigint": 64}[kind.rstrip("?")])


MESSAGE_KINDS = "bigint text? bytea text? integer double double text? smallint text? text?"
ROW: Row = (17, "order-17", b"body", json.dumps(HEADERS), 2, NOW, NOW + 30.0, "s", 3, "answers", "request-5")
PLAIN_ROW: Row = (17, None, b"body", None, 1, NOW, NOW, None, 0, None, None)
JSON_HISTORY = json.dumps([[one.number, one.at, one.outcome, None] for one in HISTORY])
DEATH: Row = ("rejected", "by its handler", NOW, rows.history_with(JSON_HISTORY, Attempt(3, NOW, "rejected", FAILURE)))


def read_postgres_message(given: Any) -> None:
    row = columns(MESSAGE_KINDS, given, ROW)
    use_delivery(postgres_rows.delivery_of("orders", 5, row))
    assert postgres_rows.rank_of(row)
    for state in range(4):
        for token, due_at in ((None, None), (-(2**62), 1e300), (5, NOW)):
            use_message(postgres_rows.live_message("orders", (*row, state, due_at, "host:1", token)))


def read_postgres_death(given: Any) -> None:
    columns_of_death = columns("text text double jsonb?", given, DEATH)
    use_death(death := postgres_rows.death_of(columns_of_death))
    use_message(dead := postgres_rows.dead_message("orders", (*ROW, *columns_of_death)))
    use_delivery(postgres_rows.delivery_of("orders$dead", 5, ROW, death))
    assert postgres_rows.encoded_failure(dead.error) or dead.error is None


def read_postgres_lease(given: Any) -> None:
    token, *rest = columns("bigint? text? double text boolean", given, POSTGRES_LEASE)
    use_lease(postgres_leases._seen("chair", token, *rest))


def read_postgres_settings(given: Any) -> None:
    kinds = "double integer double bigint double bigint? bigint? double? bigint? double? boolean"
    assert repr(postgres_queue._settings_of(columns(kinds, given, POSTGRES_SETTINGS)))


def read_postgres_deaths(given: Any) -> None:
    deaths = Deaths()
    deaths.note("orders", as_text(given))
    use_died(deaths.take("orders"))


def broker_with(answers: Any) -> Any:
    """Return a broker whose functions answer so."""
    broker = cast(Any, postgres_queue.PostgresBroker.__new__(postgres_queue.PostgresBroker))
    functions = SimpleNamespace(
        deaths=Deaths(),
        apply_due=always(None),
        call_text=lambda *_: "counts($1)",
        rows=always(answers),
        rows_with_deaths=always(answers),
    )

    async def run(act: Any, **_: object) -> None:
        await act(SimpleNamespace(fetch=always(answers)))

    options = SimpleNamespace(timeout=5.0)
    broker._functions, broker._schema = functions, "tenure"
    broker._client = SimpleNamespace(fetch=always(answers), run=run, bound=lambda *_: 5.0, options=options)
    broker._sessions = SimpleNamespace(hold=nothing, forget=nothing)
    broker._housekeeping = SimpleNamespace(note_use=nothing, note_claim=nothing, note_received=nothing)
    broker._tokens = SimpleNamespace(new=lambda: 5)
    broker.settings = always(QueueSettings())
    return broker


def read_postgres_claim(given: Any) -> None:
    found = [columns(MESSAGE_KINDS, one, ROW) for one in as_objects(given)[:100]]
    kinds, usual = "text? double? double? boolean?", (DIED, 1.0, 1.0, None)
    died, held_up_for, due_in, is_held_back = columns(kinds, found[0][3:7] if found else usual, usual)
    last = (None, None, None, died, None, held_up_for, due_in, None, is_held_back, None, None)
    claim = broker_with(None)._claim("orders", 5, [*found, last], postgres_rows.rank_of)
    assert repr(claim)
    use_died(claim.died)
    for one in claim.deliveries:
        use_delivery(one)


def read_postgres_answers(given: Any) -> None:
    counts = columns("bigint? bigint? bigint? bigint? bigint? double? boolean?", given, COUNTS)
    use_stats(drive(broker_with([counts]).stats("orders")))
    for is_deleted in (True, False):
        answer = drive(broker_with([(is_deleted, *counts[:6])]).delete("orders"))
        assert repr(answer)
    name, until, state = columns("text? double? bytea?", given, ("s", NOW, b"state"))
    locked = drive(broker_with([(name, until, state)]).accept("orders", None, 30.0))
    assert repr(locked)
    if isinstance(locked, SessionLock):
        use_moment(locked.locked_until)
    held = postgres_rows.delivery_of("orders", 5, ROW)
    for renewed in drive(broker_with([(until,)]).renew([held], 30.0)):
        use_moment(getattr(renewed, "locked_until", 0.0))


def use_stats(stats: Stats) -> None:
    assert str(stats)
    assert 0.0 <= stats.oldest_age <= LONGEST


DIED = json.dumps([[17, "order-17", 3, "max_deliveries"], [18, None, 1, "expired"]])
POSTGRES_LEASE: Row = (17, "ann#1", 15.0, '{"at": "Zürich"}', True)
POSTGRES_SETTINGS: Row = (20.0, 3, 60.0, 1_000, 3_600.0, 5, 5, 1.0, None, None, False)
COUNTS: Row = (1, 2, 3, 4, 5, 6.5, True)

# --- SQLite ---


def cells(given: Any, sample: Row) -> Row:
    """Return values as any columns of SQLite may have them: NULL, 64 bits, a number, a text or bytes."""
    values = [*as_objects(given), *sample] if isinstance(given, (list, tuple)) else [given] * len(sample)
    return tuple(_cell(one) for one in values[: len(sample)])


def _cell(value: Any) -> Any:
    match value:
        case None | bytes():
            return value
        case bool() | int():
            return as_number(value)
        case float():
            return None if value != value else value
    return as_text(value)


LOG = json.dumps([[NOW, NOW + 1.0, 3], [NOW + 1.0, NOW + 2.0, 1]])
MESSAGE: Row = (17, "order-17", b"body", json.dumps(HEADERS), 2, NOW, "s", 3, "answers", "request-5")
PLAIN_MESSAGE: Row = (17, None, b"body", None, 1, NOW, None, 0, None, None)
STATE: Row = (2, 3, "s", NOW, NOW + 60.0, DEATH[3])
SETTINGS: Row = (20.0, 3, 60.0, 1_000, 3_600.0, 5, 5, 1.0, None, None, 0)
LEASE: Row = ("chair", "ann#1", 17, 1_000.0, 15.0, "boot", '{"at": "Zürich"}', 1, 5)
CLOCK: Row = ("abcd1234", 17, "boot", NOW, NOW)


def read_sqlite_message(given: Any) -> None:
    sequence, *row = cells(given, MESSAGE)  # the sequence is the key of the table, so it is a number
    use_delivery(rows.delivery_of("orders", "orders--", (as_number(sequence), *row), 5, NOW))


def read_sqlite_death(given: Any) -> None:
    death = cells(given, DEATH)
    use_death(found := rows.death_of(*death))
    use_message(rows.dead_message("orders", "orders--", (*MESSAGE, *death)))
    again = rows.history_of(rows.history_with(death[3], Attempt(4, NOW, "expired", found.error)))
    use_history(again)
    assert again[-1].number == 4


def read_sqlite_state(given: Any) -> None:
    state = rows.state_of(cells(given, STATE))
    assert repr(state)
    use_history(rows.history_of(state.history))


def read_sqlite_settings(given: Any) -> None:
    row = cells(given, SETTINGS)
    settings = rows.settings_of(row)
    assert rows.columns_of(settings)
    assert rows.limits_of(settings)
    assert asdict(settings)
    most, window = rows.deliveries_and_window(row[1], row[2])
    assert most >= 1
    assert window >= 0.0


def read_sqlite_value(given: Any) -> None:
    value = _cell(given)
    assert json.dumps([list(one) for one in rows.log_of(value)], allow_nan=False)
    assert isinstance(rows.pack(rows.unpack(value)), bytes)
    for read in (rows.count_of, rows.priority_of, rows.moment_of, rows.blob_of, rows.text_of, rows.plain_text):
        assert repr(cast(Any, read)(value))


def read_sqlite_lease(given: Any) -> None:
    row = _Row.of(cells(given, LEASE))
    leases = cast(Any, SqliteLeases.__new__(SqliteLeases))
    leases._boot, leases._foreign_rows = "boot", {}
    for now in (0.0, 1_010.0, 1e9):
        if leases._is_live(row, now):
            use_lease(_held_by(row, row.expires_at - now, resign_asked=row.resign_asked))
        else:
            use_lease(Vacant(row.name, row.shown_token, leases._vacant_for(row, now)))
    assert str(leases._no_token(row))


def read_sqlite_clock(given: Any) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(
            "CREATE TABLE tenure_queue_clock (one INTEGER PRIMARY KEY, origin, sequence, boot, ahead, seen)"
        )
        connection.execute("CREATE TABLE tenure_message (sequence INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO tenure_queue_clock VALUES (1, ?, ?, ?, ?, ?)", cells(given, CLOCK))
        reading = FileClock(SystemClock(), boot="boot").read(connection)
    assert type(reading.sequence) is int
    assert abs(reading.wall) <= 2 * LONGEST
    assert repr(reading)


DECODERS = [
    Decoder("postgres.message", [ROW, PLAIN_ROW], read_postgres_message),
    Decoder("postgres.death", [DEATH, ("expired", "", NOW, None)], read_postgres_death),
    Decoder("postgres.lease", [POSTGRES_LEASE, (17, None, -5.0, "", False)], read_postgres_lease),
    Decoder("postgres.settings", [POSTGRES_SETTINGS], read_postgres_settings),
    Decoder("postgres.deaths", [DIED], read_postgres_deaths),
    Decoder("postgres.claim", [[ROW, PLAIN_ROW]], read_postgres_claim),
    Decoder("postgres.answers", [COUNTS, ("s", NOW, b"state")], read_postgres_answers),
    Decoder("sqlite.message", [MESSAGE, PLAIN_MESSAGE], read_sqlite_message),
    Decoder("sqlite.death", [DEATH], read_sqlite_death),
    Decoder("sqlite.state", [STATE], read_sqlite_state),
    Decoder("sqlite.settings", [SETTINGS], read_sqlite_settings),
    Decoder("sqlite.value", [LOG, rows.pack([5, 6, 7])], read_sqlite_value),
    Decoder("sqlite.lease", [LEASE, ("chair", None, *LEASE[2:])], read_sqlite_lease),
    Decoder("sqlite.clock", [CLOCK], read_sqlite_clock),
]
