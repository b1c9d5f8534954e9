"""The schema as a script: the SQL that ``tenure migrate`` would run, to be reviewed and run by hand."""

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
from tenure._backends.postgres.owners import refusing
from tenure._backends.postgres.statements import SEARCH_PATH, VERSION, statements, text_of
from tenure.errors import ConfigError


def script(schema: str, since: int) -> str:
    """Return the SQL that upgrades *schema* from version *since* to the present one; 0 creates it.

    Raises:
        ConfigError: There is no such version.
    """
    if not 0 <= since <= VERSION:
        raise ConfigError(f"version {since} of a schema is unknown; give 1 to {VERSION}, or 0 if there is no schema")
    parts = [_head(schema, since)]
    for version, file in TABLES.items():  # as in migrate: a transaction for each table that is in use
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
    action = (
        "creates" if not since else f"upgrades from version {since}" if since < VERSION else "writes the functions of"
    )
    return (
        f"-- This {action} the schema {schema} of tenure, for version {VERSION}. Written by: tenure migrate --sql\n"
        "-- Load it with: psql -v ON_ERROR_STOP=1 -f FILE DATABASE\n"
    )


def _transaction(schema: str, *steps: str) -> str:
    body = "\n".join(step.strip() + "\n" for step in steps)
    name = lock_of(schema)
    first = f"SET LOCAL {SEARCH_PATH};\nSELECT pg_advisory_xact_lock(hashtextextended('{name}', 0));"
    return f"BEGIN;\n\n{first}\n\n{refusing(schema)}\n\n{body}\nCOMMIT;\n"


def _begin(schema: str, since: int) -> str:
    """Return the SQL that stops the script if the version is not *since*, and creates the schema if that is 0."""
    advice = "create a script that fits: tenure migrate --sql URL"
    if since:
        return f"""
DO $$
BEGIN
    IF (SELECT max(version) FROM {schema}.migration) <> {since} THEN
        RAISE EXCEPTION 'this script is for version {since} of the schema {schema}, which has another version'
            USING HINT = '{advice}';
    END IF;
END
$$;"""
    return f"""
DO $$
BEGIN
    IF to_regclass('{schema}.migration') IS NOT NULL THEN
        RAISE EXCEPTION 'this script creates the schema {schema}, which exists already' USING HINT = '{advice}';
    END IF;
    IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
END
$$;

{BEGIN.replace("{schema}", schema).strip()};"""


def _catch_up(schema: str) -> str:
    """Return the SQL that waits for transactions that sent meanwhile, then offers sessions and lowers marks."""
    writing = (
        "locktype = 'relation' AND mode = 'RowExclusiveLock' "
        f"AND relation = '{schema}.message'::regclass::oid AND pid <> pg_backend_pid()"
    )
    return f"""\
-- Wait up to {CATCH_UP:g} s for the transactions that sent during the upgrade; then offer sessions and lower marks.
DO $$
DECLARE
    v_writers text[] := ARRAY(SELECT virtualtransaction FROM pg_locks WHERE {writing});
BEGIN
    FOR v_try IN 1 .. {CATCH_UP * 20:.0f} LOOP
        EXIT WHEN NOT EXISTS (SELECT FROM pg_locks WHERE virtualtransaction = ANY (v_writers) AND {writing});
        PERFORM pg_catalog.pg_sleep(0.05);
    END LOOP;
END
$$;

{OFFER.replace("{schema}", schema)};
{LOWER.replace("{schema}", schema)};
"""
