"""Whose schema is migrated: another role's code never runs with the rights of the login, and the usual ways work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("asyncpg")

import asyncpg

from tenure._backends import postgres
from tenure._backends.postgres.statements import VERSION
from tenure._url import Url
from tenure.errors import ConfigError
from tests.servers import Postgres, private
from tests.stores.postgres.migrated import Native, native, opened

# As another role makes it, before the first migration: what is written to the table, or read, runs with other rights.
SQUATTED = """
CREATE SCHEMA {schema};
GRANT ALL ON SCHEMA {schema} TO PUBLIC;
CREATE FUNCTION {schema}.take() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'ALTER ROLE attacker SUPERUSER';
    RETURN new;
END
$$;
CREATE TABLE {schema}.migration (
    version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), by text NOT NULL DEFAULT current_user
);
GRANT ALL ON {schema}.migration TO PUBLIC;
CREATE TRIGGER take BEFORE INSERT OR UPDATE ON {schema}.migration FOR EACH ROW EXECUTE FUNCTION {schema}.take();
"""
EMPTY = "CREATE SCHEMA {schema}; GRANT ALL ON SCHEMA {schema} TO PUBLIC"
READ = """
CREATE SCHEMA {schema};
GRANT ALL ON SCHEMA {schema} TO PUBLIC;
CREATE FUNCTION {schema}.take() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'ALTER ROLE attacker SUPERUSER';
    RETURN 1;
END
$$;
CREATE VIEW {schema}.migration AS SELECT {schema}.take() AS version;
GRANT ALL ON {schema}.migration TO PUBLIC
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Yield a server with the login of a program, one that is its member, and another user; all may create schemas.

    Two may not: a ``tenant``, and a ``doorman``, who makes others members of roles.
    """

    async def prepare(own: Postgres) -> None:
        async with native(own.url) as connection:
            await connection.execute(
                "CREATE ROLE app LOGIN; CREATE ROLE deploy LOGIN; CREATE ROLE attacker LOGIN; CREATE ROLE dba LOGIN;"
                "CREATE ROLE tenant LOGIN; CREATE ROLE doorman LOGIN CREATEROLE;"
                "GRANT app TO deploy; GRANT postgres TO dba;"
                "GRANT CREATE ON DATABASE postgres TO app, attacker"
            )

    with private(Postgres) as own:
        asyncio.run(prepare(own))
        yield own


def url_of(server: Postgres, role: str, schema: str) -> str:
    return f"{login(server, role)}?schema={schema}"


def login(server: Postgres, role: str) -> str:
    return server.url.replace("postgres@", f"{role}@")


@asynccontextmanager
async def held_by(server: Postgres, role: str, sql: str, schema: str) -> AsyncIterator[Native]:
    """Make a schema as *role*; yield a superuser's connection. All that the role has made is removed at the end."""
    async with native(server.url) as superuser:
        try:
            async with native(login(server, role)) as connection:
                await connection.execute(sql.replace("{schema}", schema))
            yield superuser
        finally:
            await superuser.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


@pytest.mark.parametrize("role", ["postgres", "dba", "app"])
@pytest.mark.parametrize("sql", [SQUATTED, EMPTY, READ], ids=["trigger", "empty", "view"])
async def test_a_schema_of_another_role_is_not_migrated(server: Postgres, sql: str, role: str) -> None:
    url = url_of(server, role, "taken")
    async with held_by(server, "attacker", sql, "taken") as superuser:
        with pytest.raises(ConfigError) as caught:
            await postgres.migrate(url)
        for said in (
            "the schema 'taken' is owned by the role 'attacker'",
            f"rights of '{role}'",
            "log in as 'attacker'",
        ):
            assert said in str(caught.value)
        with pytest.raises(ConfigError, match="is owned by the role 'attacker'"):
            async with opened(url) as backend:
                await backend.migration_sql()
        async with native(login(server, role)) as connection:
            for since in (0, 3):
                with pytest.raises(asyncpg.RaiseError, match="is owned by the role 'attacker'"):
                    await connection.execute(postgres.migration_sql(Url.parse(url), since))
                await connection.execute("ROLLBACK")
        assert await superuser.fetchval("SELECT NOT rolsuper FROM pg_roles WHERE rolname = 'attacker'")
        relations = "SELECT count(*) FROM pg_class WHERE relnamespace = 'taken'::regnamespace AND relkind IN ('r', 'v')"
        assert await superuser.fetchval(relations) == (0 if sql == EMPTY else 1)


async def test_a_table_of_another_role_is_not_used(server: Postgres) -> None:
    async with native(server.url) as superuser:
        await superuser.execute("CREATE SCHEMA shared; GRANT USAGE, CREATE ON SCHEMA shared TO attacker")
        squatted = SQUATTED.replace("CREATE SCHEMA {schema};", "").replace(
            "GRANT ALL ON SCHEMA {schema} TO PUBLIC;", ""
        )
        async with held_by(server, "attacker", squatted, "shared"):
            url, says = f"{server.url}?schema=shared", r"the table shared\.migration is owned by the role 'attacker'"
            with pytest.raises(ConfigError, match=says):
                await postgres.migrate(url)
            for since in (0, 3):
                with pytest.raises(asyncpg.RaiseError, match=says):
                    await superuser.execute(postgres.migration_sql(Url.parse(url), since))
                await superuser.execute("ROLLBACK")
            assert await superuser.fetchval("SELECT NOT rolsuper FROM pg_roles WHERE rolname = 'attacker'")


async def test_a_role_that_a_superuser_has_set_is_not_the_one_that_counts(server: Postgres) -> None:
    """A trigger of the role could reset it."""
    async with held_by(server, "app", EMPTY, "held") as superuser:
        script = postgres.migration_sql(Url.parse(url_of(server, "app", "held")), 0)
        await superuser.execute("SET ROLE app")
        with pytest.raises(asyncpg.RaiseError, match=r"with the rights of 'postgres'.*SET ROLE is not enough"):
            await superuser.execute(script)
        await superuser.execute("ROLLBACK; RESET ROLE")
        async with native(login(server, "deploy")) as member:
            await member.execute(f"SET ROLE app; {script}")
        assert "already" in str(await postgres.migrate(url_of(server, "app", "held")))


@pytest.mark.parametrize(
    ("owner", "sql", "first", "then"),
    [
        ("app", "SELECT", "app", "app"),
        ("app", "CREATE SCHEMA own", "app", "app"),
        ("app", "CREATE SCHEMA own", "app", "deploy"),
        ("postgres", "CREATE SCHEMA own AUTHORIZATION app", "app", "app"),
        ("postgres", "CREATE SCHEMA own; GRANT CREATE, USAGE ON SCHEMA own TO app", "app", "app"),
        ("postgres", "CREATE SCHEMA own; GRANT CREATE, USAGE ON SCHEMA own TO tenant", "tenant", "tenant"),
        ("postgres", "CREATE SCHEMA own AUTHORIZATION tenant", "tenant", "tenant"),
        ("dba", "SET ROLE postgres; CREATE SCHEMA own", "postgres", "postgres"),
        ("postgres", "CREATE SCHEMA own AUTHORIZATION dba", "dba", "dba"),
    ],
)
async def test_the_owner_and_its_members_migrate(server: Postgres, owner: str, sql: str, first: str, then: str) -> None:
    async with held_by(server, owner, sql, "own"):
        assert (await postgres.migrate(url_of(server, first, "own"), to=3)).after == 3
        assert (await postgres.migrate(url_of(server, then, "own"))).after == VERSION
    async with held_by(server, owner, sql, "own"):
        async with native(login(server, first)) as connection:
            await connection.execute(postgres.migration_sql(Url.parse(url_of(server, first, "own")), 0))
        assert "already" in str(await postgres.migrate(url_of(server, then, "own")))


@pytest.mark.parametrize("right", ["CREATE", "USAGE"])
async def test_who_may_not_create_schemas_needs_two_rights_on_the_one_that_exists(server: Postgres, right: str) -> None:
    sql = f"CREATE SCHEMA half; GRANT {right} ON SCHEMA half TO tenant"
    async with held_by(server, "postgres", sql, "half") as superuser:
        assert not await superuser.fetchval("SELECT has_database_privilege('tenant', 'postgres', 'CREATE')")
        needs = (
            r"permission denied for schema half.*CREATE on the database, or CREATE and USAGE on the schema if it exists"
        )
        with pytest.raises(ConfigError, match=needs):
            await postgres.migrate(url_of(server, "tenant", "half"))
        await superuser.execute("GRANT CREATE, USAGE ON SCHEMA half TO tenant")
        assert (await postgres.migrate(url_of(server, "tenant", "half"))).after == VERSION
        await superuser.execute(
            "GRANT CREATE, USAGE ON SCHEMA half TO doorman; UPDATE half.migration SET functions = ''"
        )
        with pytest.raises(ConfigError, match=r"is owned by the role 'tenant'"):
            await postgres.migrate(url_of(server, "doorman", "half"))


async def test_who_makes_others_its_members_is_not_trusted_for_that(server: Postgres) -> None:
    """Before PostgreSQL 16, every role may; later, those that were given the right to."""
    async with held_by(server, "attacker", EMPTY, "lured") as superuser:
        await superuser.execute("CREATE ROLE lure; GRANT lure TO attacker WITH ADMIN OPTION")
        await superuser.execute("ALTER SCHEMA lured OWNER TO lure")
        async with native(login(server, "attacker")) as attacker:
            await attacker.execute("GRANT lure TO app")
        for role in ("app", "deploy"):
            with pytest.raises(ConfigError, match="is owned by the role 'lure'"):
                await postgres.migrate(url_of(server, role, "lured"))
        await superuser.execute("REVOKE lure FROM app CASCADE; GRANT lure TO app")
        assert (await postgres.migrate(url_of(server, "deploy", "lured"))).after == VERSION


async def test_who_may_create_roles_is_trusted_for_the_members_that_it_makes(server: Postgres) -> None:
    """Also if it is no superuser."""
    async with held_by(
        server, "postgres", "CREATE ROLE landlord; CREATE SCHEMA let AUTHORIZATION landlord", "let"
    ) as own:
        await own.execute("GRANT landlord TO doorman WITH ADMIN OPTION")
        with pytest.raises(ConfigError, match="is owned by the role 'landlord'"):
            await postgres.migrate(url_of(server, "tenant", "let"))
        async with native(login(server, "doorman")) as doorman:
            await doorman.execute("GRANT landlord TO tenant")
        assert (await postgres.migrate(url_of(server, "tenant", "let"))).after == VERSION
        await own.execute("ALTER ROLE doorman NOCREATEROLE")
        with pytest.raises(ConfigError, match="is owned by the role 'landlord'"):
            await postgres.migrate(url_of(server, "tenant", "let"))


async def test_a_superuser_is_told_how_to_migrate_what_a_role_has_made(server: Postgres) -> None:
    async with held_by(server, "app", "SELECT", "apps") as superuser:
        await postgres.migrate(url_of(server, "app", "apps"), to=3)
        for what in ("SCHEMA apps", "TABLE apps.migration"):
            with pytest.raises(ConfigError, match="log in as 'app'") as caught:
                await postgres.migrate(url_of(server, "postgres", "apps"))
            advice = str(caught.value).partition(" run: ")[2]
            assert advice == f"ALTER {what} OWNER TO postgres"
            await superuser.execute(advice)
        assert (await postgres.migrate(url_of(server, "postgres", "apps"))).after == VERSION


async def test_the_owner_of_a_database_is_trusted_by_those_who_are_no_superusers(server: Postgres) -> None:
    async with native(server.url) as superuser:
        await superuser.execute("CREATE DATABASE owned OWNER app")
    owned = server.url.replace("/postgres", "/owned").replace("//owned", "//postgres")
    async with native(owned.replace("postgres@", "app@")) as owner:
        await owner.execute("CREATE SCHEMA lent; GRANT ALL ON SCHEMA lent TO attacker")
    assert (await postgres.migrate(owned.replace("postgres@", "attacker@") + "?schema=lent")).after == VERSION
    with pytest.raises(ConfigError, match="is owned by the role 'app'"):
        await postgres.migrate(f"{owned}?schema=lent")
    async with native(owned) as superuser:  # as it is from PostgreSQL 15 on
        await superuser.execute("ALTER SCHEMA public OWNER TO pg_database_owner")
    with pytest.raises(ConfigError, match="is owned by the role 'app'"):
        await postgres.migrate(f"{owned}?schema=public")
    assert (await postgres.migrate(owned.replace("postgres@", "app@") + "?schema=public")).after == VERSION
