"""The schema as a script: what ``tenure migrate`` would run, for those who read it first and run it themselves."""

from __future__ import annotations

from tenure._backends.postgres.migrate import (
    BEGIN,
    CATCH_UP,
    LOWER,
    OFFER,
    QUEUES,
    STEPS,
    TABLES,
    WITHOUT_MARKS,
    lock_of,
    written,
)
from tenure._backends.postgres.statements import VERSION, statements, text_of
from tenure.errors import ConfigError


def script(schema: str, since: int) -> str:
    """Return the SQL that makes the present version of *schema* out of version *since*; 0 is a database without it.

    Raises:
        ConfigError: There is no such version.
    """
    if not 0 <= since <= VERSION:
        raise ConfigError(f"a schema of this tenure has version 1 to {VERSION}, or 0 where there is none, not {since}")
    parts = [_head(schema, since)]
    for version, file in TABLES.items():  # as migrate does it: a transaction for each table that is in use
        if QUEUES <= since < version:
            parts += [_transaction(schema, f"{change};") for change in statements(file, schema).values()]
    steps = [_begin(schema, since)]
    for version in range(since + 1, VERSION + 1):
        steps += [f"{change};" for change in statements(TABLES[version], schema).values()] if version in TABLES else []
        steps += [text_of(STEPS[version], schema), f"INSERT INTO {schema}.migration (version) VALUES ({version});"]
    parts.append(_transaction(schema, *steps, *written(schema)))
    if since in WITHOUT_MARKS:
        parts.append(_catch_up(schema))
    return "\n".join(parts)


def _head(schema: str, since: int) -> str:
    what = (
        "creates" if not since else f"upgrades from version {since}" if since < VERSION else "writes the functions of"
    )
    return (
        f"-- This {what} the schema {schema} of tenure, for version {VERSION}. Written by: tenure migrate --sql\n"
        "-- Load it with: psql -v ON_ERROR_STOP=1 -f FILE DATABASE\n"
    )


def _transaction(schema: str, *steps: str) -> str:
    body = "\n".join(step.strip() + "\n" for step in steps)
    name = lock_of(schema)
    return f"BEGIN;\n\nSELECT pg_advisory_xact_lock(hashtextextended('{name}', 0));\n\n{body}\nCOMMIT;\n"


def _begin(schema: str, since: int) -> str:
    """Return what stops the script where it doesn't fit, and makes the schema where there is none."""
    advice = "ask for one that fits it: tenure migrate --sql URL"
    if since:
        return f"""
DO $$
BEGIN
    IF (SELECT max(version) FROM {schema}.migration) <> {since} THEN
        RAISE EXCEPTION 'this script is for version {since} of the schema {schema}, which has another'
            USING HINT = '{advice}';
    END IF;
END
$$;"""
    return f"""
DO $$
BEGIN
    IF to_regclass('{schema}.migration') IS NOT NULL THEN
        RAISE EXCEPTION 'this script creates the schema {schema}, which is there already' USING HINT = '{advice}';
    END IF;
    IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
END
$$;

{BEGIN.replace("{schema}", schema).strip()};"""


def _catch_up(schema: str) -> str:
    """Return what migrate does when those who sent during the upgrade have ended."""
    writing = (
        "locktype = 'relation' AND mode = 'RowExclusiveLock' "
        f"AND relation = '{schema}.message'::regclass AND pid <> pg_backend_pid()"
    )
    return f"""\
-- Wait up to {CATCH_UP:g} s for the transactions that sent meanwhile, and look after what they have sent.
DO $$
DECLARE
    v_writers text[] := ARRAY(SELECT virtualtransaction FROM pg_locks WHERE {writing});
BEGIN
    FOR v_try IN 1 .. {CATCH_UP * 20:.0f} LOOP
        EXIT WHEN NOT EXISTS (SELECT FROM pg_locks WHERE virtualtransaction = ANY (v_writers) AND {writing});
        PERFORM pg_sleep(0.05);
    END LOOP;
END
$$;

{OFFER.replace("{schema}", schema)};
{LOWER.replace("{schema}", schema)};
"""
