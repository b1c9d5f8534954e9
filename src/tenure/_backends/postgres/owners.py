"""Who owns the schema that is migrated: another role's triggers would run with the rights of the login."""

from __future__ import annotations

from tenure._backends.postgres.connections import Connection
from tenure.errors import ConfigError

SCHEMA, TABLE = "schema", "table"
"""What a migration may find: the schema, and the table ``migration`` in it."""

# Superusers are trusted, and the login itself. A login that is no superuser also trusts the database's owner, and the
# roles of which an administrator has made it a member: before PostgreSQL 16, any role may make others its members. One
# that is a superuser, or can become one, trusts neither. The login decides, not its current role: code can reset that.
_OWNERS = """\
WITH RECURSIVE own AS (
    SELECT oid FROM pg_catalog.pg_roles WHERE rolname = session_user
    UNION
    SELECT roleid FROM own JOIN pg_catalog.pg_auth_members ON member = own.oid
    JOIN pg_catalog.pg_roles AS granting ON granting.oid = grantor
    WHERE granting.rolsuper OR granting.rolcreaterole
)
SELECT found.kind, CASE WHEN NOT (
    owner.rolsuper
    OR owner.rolname = session_user
    OR NOT EXISTS (
        SELECT FROM pg_catalog.pg_roles AS above
        WHERE above.rolsuper AND pg_catalog.pg_has_role(session_user, above.oid, 'MEMBER')
    ) AND (owner.oid = base.datdba OR EXISTS (SELECT FROM own WHERE own.oid = owner.oid))
) THEN pg_catalog.format(
    '%1$s is owned by the role %2$L, whose code would run with the rights of %3$L; to migrate, log in as %2$L or a '
    'member of it (SET ROLE is not enough), or name another schema (?schema=NAME), or, if you trust %2$L with these '
    'rights, run: ALTER %4$s OWNER TO %3$I',
    found.label, owner.rolname, session_user, found.object
) END AS refusal
FROM (
    SELECT 'schema' AS kind, 'the schema ''{schema}''' AS label, 'SCHEMA {schema}' AS object, nspowner AS owner
    FROM pg_catalog.pg_namespace WHERE nspname = '{schema}'
    UNION ALL
    SELECT 'table', 'the table {schema}.migration', 'TABLE {schema}.migration', relowner
    FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = '{schema}' AND relname = 'migration'
) AS found
JOIN pg_catalog.pg_database AS base ON base.datname = pg_catalog.current_database()
JOIN pg_catalog.pg_roles AS named ON named.oid = found.owner
JOIN pg_catalog.pg_roles AS owner
    ON owner.oid = CASE named.rolname WHEN 'pg_database_owner' THEN base.datdba ELSE named.oid END
ORDER BY found.kind"""


async def found_in(connection: Connection, schema: str) -> set[str]:
    """Return what there is of SCHEMA and TABLE; read nothing of it.

    Raises:
        ConfigError: It belongs to a role that could run code of its own with the rights of this login.
    """
    rows = await connection.fetch(_OWNERS.replace("{schema}", schema))
    for row in rows:
        if row["refusal"] is not None:
            raise ConfigError(row["refusal"])
    return {row["kind"] for row in rows}


def refusing(schema: str) -> str:
    """Return the SQL that raises the same error."""
    owners = _OWNERS.replace("{schema}", schema).replace("\n", "\n        ")
    return f"""\
DO $$
DECLARE
    v_refusal text := (SELECT refusal FROM (
        {owners}
    ) AS owners WHERE refusal IS NOT NULL LIMIT 1);
BEGIN
    IF v_refusal IS NOT NULL THEN
        RAISE EXCEPTION '%', v_refusal;
    END IF;
END
$$;"""
