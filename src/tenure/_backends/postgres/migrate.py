"""The schema: created and upgraded step by step (``sql/schema_N.sql``), all steps in one transaction.

Changes to tables that are in use are made before it, in one transaction for each table (``sql/schema_N_tables.sql``).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

import asyncpg

from tenure._backends.postgres.address import Options
from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import DRIVER_ERRORS, Connection
from tenure._backends.postgres.owners import SCHEMA, TABLE, found_in
from tenure._backends.postgres.statements import PLANS, SEARCH_PATH, VERSION, statements, text_of, works_with
from tenure._queue.broker import CLAIM_BYTES, QueueSettings
from tenure._queue.checks import COUNT_MAX, INT_MAX
from tenure._queue.identity import ID_MARK
from tenure._queue.limits import HELD_UP_MAX, PARTS
from tenure._queue.message import EXPIRED, EXPIRED_DESCRIPTION, HISTORY_MAX, MAX_DELIVERIES, exhausted_description
from tenure._redaction import redact, redacted
from tenure._url import Url
from tenure.errors import ConfigError

STEPS = {version: f"schema_{version}.sql" for version in range(1, VERSION + 1)}
"""The file that makes each version out of the one before it."""

TABLES = {4: "schema_4_tables.sql", 7: "schema_7_tables.sql"}
"""The file with a step's changes to tables that are in use; the older version's functions work with all of them."""

FUNCTIONS = (
    "indexes",
    "marks",
    "messages",
    "limits",
    "due",
    "queues",
    "send",
    "schedules",
    "claim",
    "settle",
    "sessions",
    "dead_letters",
    "stats",
    "tidy",
    "fences",
    "former",
)
"""The files of ``sql/functions`` in the order in which they are installed: a function in SQL needs those that it calls.

A migration that finds others replaces all of them, and creates the indexes that they need. A function whose arguments
change is dropped by the step that changes them.
"""

RECHECK_AFTER = 0.2
"""Seconds until a claim is repeated that skipped rows of another transaction: its rollback isn't notified."""

CATCH_UP = 10.0
"""Seconds to wait for transactions that send while the schema is upgraded."""

QUEUES = 2
"""The version that added the tables of queues."""

WITHOUT_MARKS = (2, 3)
"""Versions whose functions recorded neither which sessions can be accepted, nor which messages are below a mark."""

ROUNDS = 20
"""Steps of 1,000 messages in which one request applies due times."""

RAISE_BEHIND = 15.0
"""Seconds that the mark of locks stays at most behind the end of the next claims' locks, if no lock is found before."""

LATE = 5.0
"""Seconds within which a statement of tenure is committed: a lock that ends sooner may have ended by then."""

HELD_UP = -1
"""The token of a message that was not delivered, and is delayed as if it had been; see limits.sql. No claim has it."""

OLDEST = 4
"""The oldest version of this code that works with the columns and the functions' arguments of this version."""

PATIENCE = 120.0
"""Seconds for a migration, the wait for another one included."""

BEGIN = """
CREATE TABLE {schema}.migration (
    version integer PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT now(),
    by      text NOT NULL DEFAULT current_user
)
"""


OFFER = (
    "INSERT INTO {schema}.waiting (queue, seq, session) SELECT queue, min(seq), session FROM {schema}.message "
    "WHERE state = 0 AND session IS NOT NULL GROUP BY queue, session"
)
LOWER = (
    "INSERT INTO {schema}.mark (queue, kind, keys) "
    "SELECT id, 0, pg_catalog.array_fill(0::double precision, '{14}') FROM {schema}.queue"
)
"""OFFER offers all sessions with ready messages; LOWER lowers all marks."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """The result of a migration: the versions before and after. Version 0: there was no schema."""

    schema: str
    before: int
    after: int
    rewritten: bool = False
    """Whether functions of another release, under the same version, were replaced."""

    def __str__(self) -> str:
        if self.rewritten:
            return f"the schema {self.schema!r} has version {self.after} already; replaced its functions"
        if self.before == self.after:
            return f"the schema {self.schema!r} has version {self.after} already"
        if not self.before:
            return f"created the schema {self.schema!r}, version {self.after}"
        return f"upgraded the schema {self.schema!r} from version {self.before} to {self.after}"


async def migrate(url: str, *, to: int = VERSION) -> Migrated:
    """Create or upgrade tenure's schema in the database at *url*; the option ``schema`` names it.

    Any number of processes may do this at once, and again: the first one migrates, the others change nothing.

    Args:
        url: As for :func:`tenure.connect`.
        to: The version to stop at.

    Raises:
        ConfigError: The schema is newer than this tenure, the user may not create it, or it belongs to a role that
            could run code of its own with the rights of this user.
        Unavailable: There was no answer from the database. The version and the functions have not changed; the next
            migration skips changes to tables that were made.
    """
    parsed = Url.parse(url)
    return await migrate_with(Client(parsed, parsed.options(Options)), to)


async def migrate_with(client: Client, to: int = VERSION) -> Migrated:
    """Do the same as :func:`migrate`, on the database of *client*."""
    asked_at = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            connection = await client.connect()
            try:
                await _change_tables(connection, client.options.schema, to)
                done = await _in_one_step(connection, client.options.schema, to)
                if done.before in WITHOUT_MARKS and done.after > max(WITHOUT_MARKS):
                    await _catch_up(connection, client.options.schema)
                return done
            finally:
                connection.terminate()
    except asyncpg.InsufficientPrivilegeError as error:
        said = redacted(str(error))
        redact(error)
        raise ConfigError(
            f"{client.url} does not let this user create the schema {client.options.schema!r} or tables in it "
            f"(the server reports: {said}); migrate as a user with CREATE on the database, or CREATE and "
            "USAGE on the schema if it exists, and to upgrade it, as the owner of what is in it"
        ) from error
    except DRIVER_ERRORS as error:
        raise client.translate(error, asked_at, PATIENCE) from error


async def _change_tables(connection: Connection, schema: str, to: int) -> None:
    """Make the changes of TABLES to tables that are in use, in a transaction for each table.

    One transaction for several tables could be part of a deadlock: it would hold one table and wait for another.
    """
    for version, file in TABLES.items():
        for change in statements(file, schema).values():
            async with connection.transaction():
                await _lock(connection, schema)
                if QUEUES <= await _version(connection, schema) < version <= to:
                    await connection.execute(change)


async def _in_one_step(connection: Connection, schema: str, to: int) -> Migrated:
    """Migrate in one transaction; repeat it after a deadlock with a transaction that locks tables in another order."""
    for _ in range(4):
        with suppress(asyncpg.DeadlockDetectedError):
            async with connection.transaction():
                return await _migrate(connection, schema, to)
    async with connection.transaction():
        return await _migrate(connection, schema, to)


async def _lock(connection: Connection, schema: str) -> None:
    """Until this transaction ends, make other migrations wait, and call PostgreSQL's own functions only."""
    # Settings and locks of the transaction, not of the session: they end with the transaction, behind a pooler too.
    await connection.execute(f"SET LOCAL {SEARCH_PATH}")
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", lock_of(schema))


def lock_of(schema: str) -> str:
    """Return the name of the advisory lock of migrations."""
    return f"tenure migrate {schema}"


async def _version(connection: Connection, schema: str) -> int:
    if TABLE not in await found_in(connection, schema):
        return 0
    version: int = await connection.fetchval(f"SELECT coalesce(max(version), 0) FROM {schema}.migration")
    return version


async def _migrate(connection: Connection, schema: str, to: int) -> Migrated:
    await _lock(connection, schema)
    found = await found_in(connection, schema)
    if SCHEMA not in found:
        # Unquoted, a keyword of category R can't be a name, and one of category T can't name a schema.
        taken = "SELECT count(*) FROM pg_get_keywords() WHERE word = $1 AND catcode IN ('R', 'T')"
        if await connection.fetchval(taken, schema):
            raise ConfigError(f"schema={schema} is a keyword of SQL, and can't name a schema; try schema=tenure")
        await connection.execute(f"CREATE SCHEMA {schema}")
    if TABLE not in found:
        await connection.execute(BEGIN.replace("{schema}", schema))
    before = await _version(connection, schema)
    if await _is_newer(connection, schema, before):
        return Migrated(schema, before, before)
    for version in range(before + 1, to + 1):
        for change in statements(TABLES[version], schema).values() if version in TABLES else ():
            await connection.execute(change)
        await connection.execute(text_of(STEPS[version], schema))
        await connection.execute(f"INSERT INTO {schema}.migration (version) VALUES ($1)", version)
    return Migrated(schema, before, max(before, to), to == VERSION and await _write(connection, schema, before))


async def _catch_up(connection: Connection, schema: str) -> None:
    """Offer all sessions and lower all marks, once the transactions that sent during the upgrade have ended.

    A call that had begun runs the old function, which does neither. A repetition does no harm.
    """
    writers = (
        "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' "
        f"AND relation = '{schema}.message'::regclass::oid"
    )
    begun = time.monotonic()
    left = {row[0] for row in await connection.fetch(writers)}
    while left and time.monotonic() - begun < CATCH_UP:
        await asyncio.sleep(0.05)
        left &= {row[0] for row in await connection.fetch(writers)}
    for change in (OFFER, LOWER):
        await connection.execute(change.replace("{schema}", schema))


async def _write(connection: Connection, schema: str, before: int) -> bool:
    """Write the functions, if they differ from this release's; return whether this replaced others of this version."""
    text, note = written(schema)
    if await _has_functions(connection, schema):
        return False
    await connection.execute(text)
    await connection.execute(note)
    return before == VERSION


async def _has_functions(connection: Connection, schema: str) -> bool:
    """Return whether the functions of the schema are those of this release."""
    found = await connection.fetchval(f"SELECT functions FROM {schema}.migration WHERE version = {VERSION}")
    return bool(found == _digest(functions(schema)))


def written(schema: str) -> tuple[str, str]:
    """Return the statements that write the functions, and record their digest."""
    text = functions(schema)
    noted = f"functions = '{_digest(text)}', oldest = {OLDEST}"
    return text, f"UPDATE {schema}.migration SET {noted} WHERE version = {VERSION};"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


async def version_to_migrate(client: Client) -> int | None:
    """Return the version that the schema has, 0 for none; or None if there is nothing to migrate.

    Raises:
        ConfigError: As for :func:`migrate`.
        Unavailable: There was no answer from the database.
    """
    schema, asked_at = client.options.schema, time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE):
            connection = await client.connect()
            try:
                async with connection.transaction():
                    await connection.execute(f"SET LOCAL {SEARCH_PATH}")
                    version = await _version(connection, schema)
                    if await _is_newer(connection, schema, version):
                        return None
                    return None if version == VERSION and await _has_functions(connection, schema) else version
            finally:
                connection.terminate()
    except DRIVER_ERRORS as error:
        raise client.translate(error, asked_at, PATIENCE) from error


async def _is_newer(connection: Connection, schema: str, version: int) -> bool:
    """Return whether a newer release has made the schema; refuse one that this release can't work with."""
    if version <= VERSION:
        return False
    if await connection.fetchval(works_with(schema)) <= VERSION:
        return True
    raise ConfigError(
        f"the schema {schema!r} has version {version}, made by a newer tenure than this one, which knows {VERSION}; "
        "install that newer one here"
    )


def functions(schema: str) -> str:
    """Return the functions' text, with the values that the code and they share."""
    settings = QueueSettings()
    shared = {
        "plans": " ".join(f"SET {one}" for one in (*PLANS, SEARCH_PATH)),
        "path": f"SET {SEARCH_PATH}",
        "lock": settings.lock,
        "max_deliveries": settings.max_deliveries,
        "dedupe_window": settings.dedupe_window,
        "body_max": settings.body_max,
        "history_max": HISTORY_MAX,
        "count_max": COUNT_MAX,
        "int_max": INT_MAX,
        "id_mark": ID_MARK,
        "look_again": RECHECK_AFTER,
        "claim_bytes": CLAIM_BYTES,
        "marks": "{0" + ",Infinity" * 10 + ",0,Infinity,0}",
        "parts": PARTS,
        "held_up": HELD_UP,
        "held_up_max": HELD_UP_MAX,
        "others": "{" + ",".join(["Infinity"] * 9) + "}",
        "late": LATE,
        "behind": RAISE_BEHIND,
        "rounds": ROUNDS,
        "reason_exhausted": MAX_DELIVERIES,
        "reason_expired": EXPIRED,
        "exhausted_description": exhausted_description("%s"),
        "expired_description": EXPIRED_DESCRIPTION,
    }
    text = "\n".join(text_of(f"functions/{name}.sql", schema) for name in FUNCTIONS)
    for name, value in shared.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text
