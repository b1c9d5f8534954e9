"""Another user's functions on the search path: nothing of tenure's calls them, whatever their names and arguments."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from importlib import resources

import pytest

pytest.importorskip("asyncpg")

from tenure._backends import postgres
from tenure._backends.postgres.diagnosis import advice_on_path
from tenure._backends.postgres.migrate import functions
from tenure._backends.postgres.statements import SEARCH_PATH
from tenure._lease import Granted
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Defer, Settlement
from tenure._url import Url
from tests.servers import Postgres, private
from tests.stores.postgres.migrated import Native, native, opened
from tests.stores.rights import acting, lead

# Each is a better match than PostgreSQL's own for a call that tenure makes, and does the same: nobody notices it.
PASSES_ON = {
    "convert_to": ("text, text", "bytea", "pg_catalog.convert_to($1, $2::name)"),
    "to_jsonb": ("tenure.migration", "jsonb", "pg_catalog.to_jsonb($1)"),
    "num_nonnulls": ("bigint, bigint, bigint", "integer", "pg_catalog.num_nonnulls($1, $2, $3)"),
    "cardinality": ("bigint[]", "integer", "pg_catalog.cardinality($1)"),
    "unnest": ("text[]", "SETOF text", "pg_catalog.unnest($1)"),
    "format": ("text, text, text", "text", "pg_catalog.format($1, $2, $3)"),
}

TYPES = (
    *("smallint", "integer", "bigint", "double precision", "numeric", "text", "bytea", "jsonb"),
    *("interval", "oid", "regclass", "regprocedure"),
)
ARRAYS = ("smallint[]", "integer[]", "bigint[]", "double precision[]", "text[]", "bytea[]", "tid[]")
"""The types of the values that tenure's statements and functions work with."""

OPERATORS = ("=", "<>", "<", "<=", ">", ">=", "+", "-", "*", "/", "||", "&&", ">>", "->>")

# Another user's functions and operators: one for each type, or pair of types, that a function of PostgreSQL's might be
# called with by tenure, and for each operator between two types, unless PostgreSQL has one for exactly these.
OF_ANOTHER_USER = """
DO $$
DECLARE
    v_body text := 'RETURNS text LANGUAGE plpgsql AS $body$ BEGIN RAISE ''called''; END $body$';
    v_left text;
    v_right text;
    v_name text;
    v_call text;
BEGIN
    FOREACH v_left IN ARRAY {types} || {arrays} LOOP
        FOR v_call IN SELECT DISTINCT format('%I(%s)', proname, v_left) FROM pg_proc WHERE proname = ANY ({names}) LOOP
            IF to_regprocedure('pg_catalog.' || v_call) IS NULL THEN
                EXECUTE format('CREATE FUNCTION public.%s %s', v_call, v_body);
            END IF;
        END LOOP;
    END LOOP;
    FOREACH v_left IN ARRAY {types} LOOP
        FOREACH v_right IN ARRAY {types} LOOP
            FOR v_call IN
                SELECT DISTINCT format('%I(%s, %s)', proname, v_left, v_right)
                FROM pg_proc WHERE proname = ANY ({names}) AND pronargs = 2
            LOOP
                IF to_regprocedure('pg_catalog.' || v_call) IS NULL THEN
                    EXECUTE format('CREATE FUNCTION public.%s %s', v_call, v_body);
                END IF;
            END LOOP;
            EXECUTE format('CREATE FUNCTION public.operate(%s, %s) %s', v_left, v_right, v_body);
            FOREACH v_name IN ARRAY {operators} LOOP
                IF to_regoperator(format('pg_catalog.%s(%s, %s)', v_name, v_left, v_right)) IS NULL THEN
                    EXECUTE format(
                        'CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.operate)',
                        v_name, v_left, v_right
                    );
                END IF;
            END LOOP;
        END LOOP;
    END LOOP;
END
$$
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Yield a server with a worker, and another user who may create objects where the worker's search begins."""

    async def prepare(own: Postgres) -> None:
        await postgres.migrate(own.url)
        async with native(own.url) as connection:
            await connection.execute(
                "CREATE ROLE worker LOGIN; CREATE ROLE attacker LOGIN;"
                "GRANT USAGE ON SCHEMA tenure TO worker, attacker;"
                "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA tenure TO worker;"
                "GRANT CREATE ON SCHEMA public TO attacker; GRANT CREATE ON DATABASE postgres TO worker"
            )

    with private(Postgres) as own:
        asyncio.run(prepare(own))
        yield own


def url_of(server: Postgres, role: str) -> str:
    return server.url.replace("postgres@", f"{role}@")


@asynccontextmanager
async def attacking(server: Postgres) -> AsyncIterator[Native]:
    """Yield a connection of the attacker; what it has made is removed at the end."""
    try:
        async with native(url_of(server, "attacker")) as attacker:
            yield attacker
    finally:
        async with native(server.url) as connection:
            await connection.execute("DROP OWNED BY attacker")
            await connection.execute(
                "GRANT USAGE ON SCHEMA tenure TO attacker; GRANT CREATE ON SCHEMA public TO attacker"
            )


async def test_no_function_of_another_user_runs_with_the_callers_rights(server: Postgres) -> None:
    url = url_of(server, "worker")
    async with attacking(server) as attacker:
        await attacker.execute("CREATE TABLE public.caught (who text, what text)")
        await attacker.execute("GRANT INSERT ON public.caught TO PUBLIC")
        for name, (arguments, result, call) in PASSES_ON.items():
            answer = "RETURN QUERY SELECT" if result.startswith("SETOF") else "RETURN"
            await attacker.execute(
                f"CREATE FUNCTION public.{name}({arguments}) RETURNS {result} LANGUAGE plpgsql AS $$ BEGIN "
                f"INSERT INTO public.caught VALUES (current_user, '{name}'); {answer} {call}; END $$"
            )
        async with acting(url) as backend:
            await lead(backend, "job")
            await backend.queue("orders").send(b"x", id="one")
            [message] = await backend.queue("orders").receive()
            await message.complete()
        await postgres.migrate(f"{url}?schema=of_worker")
        async with native(url) as worker:
            await worker.execute("SELECT tenure.fence('resource', 1), tenure.send('orders', 'x')")
        caught = await attacker.fetch("SELECT DISTINCT who, what FROM public.caught ORDER BY what")
    assert [tuple(row) for row in caught] == []


async def test_no_call_fits_a_function_or_operator_of_another_user_better(server: Postgres) -> None:
    url = url_of(server, "worker")
    async with attacking(server) as attacker:
        await attacker.execute(f"SET {SEARCH_PATH}; SET check_function_bodies = off")
        lists = {"types": TYPES, "arrays": ARRAYS, "operators": OPERATORS, "names": called()}
        await attacker.execute(OF_ANOTHER_USER.format(**{name: array(texts) for name, texts in lists.items()}))
        async with opened(url) as backend:
            await use_leases(backend, url)
            await use_queues(backend)
            await backend.describe()
            await backend.migration_sql()
        async with native(url) as worker:
            await use_functions(worker)
            await postgres.migrate(f"{url}?schema=upgraded", to=3)
            await postgres.migrate(f"{url}?schema=upgraded")
            await postgres.migrate(f"{url}?schema=scripted", to=3)
            await worker.execute(postgres.migration_sql(Url.parse(f"{url}?schema=scripted"), 3))
            await worker.execute(postgres.migration_sql(Url.parse(f"{url}?schema=whole"), 0))


def called() -> set[str]:
    """Return the names that are followed by a parenthesis in the SQL of tenure."""
    folder = resources.files("tenure._backends.postgres")
    files = [one for one in folder.iterdir() if one.name.endswith(".py")]
    for part in ("sql", "sql/functions"):
        files += [one for one in folder.joinpath(part).iterdir() if one.name.endswith(".sql")]
    return {
        name for file in files for name in re.findall(r"(?<![.\w])([a-z_0-9]+)\(", file.read_text(encoding="utf-8"))
    }


def array(texts: Iterable[str]) -> str:
    return "ARRAY[" + ", ".join(f"'{text}'" for text in sorted(texts)) + "]"


async def use_leases(backend: postgres.PostgresBackend, url: str) -> None:
    leases = backend.leases
    won = await leases.acquire("job", "first", 30.0)
    assert isinstance(won, Granted)
    await leases.acquire("job", "second", 30.0)
    assert isinstance((await leases.renew([won.grant], 30.0))[0], Granted)
    async with native(url) as other, other.transaction():
        await other.execute("SELECT FROM tenure.lease FOR UPDATE")
        await leases.renew([won.grant, won.grant], 30.0)
    assert await leases.ask_to_resign("job")
    await leases.inspect_many(["job", "other"])
    await leases.release(won.grant)
    assert await leases.names() == ["job"]


async def use_queues(backend: postgres.PostgresBackend) -> None:
    broker, queue = backend.broker, "all"
    await broker.declare(queue, {"lock": 30.0})
    await broker.declare(queue, {"lock": 31.0}, only_undeclared=True)
    await broker.settings(queue)
    await broker.send(queue, [Outgoing(b"plain")])
    await broker.send(queue, [Outgoing(b"a", id="a"), Outgoing(b"b", priority=3), Outgoing(b"c", delay=60)])
    await broker.send(queue, [Outgoing(b"s", session="s"), Outgoing(b"t", session="t"), Outgoing(b"e", expires_in=60)])
    await broker.peek(queue, LiveSelection(), 10)
    first = (await broker.receive(queue, 3, 30.0)).deliveries
    assert len(first) == 3
    await broker.renew(first, 30.0)
    await broker.settle([Settlement(first[0], COMPLETE)])
    await broker.settle([Settlement(first[1], Defer()), Settlement(first[2], DeadLetter("bad", "very"))])
    await broker.peek_deferred(queue, 10)
    [put_aside] = (await broker.receive_deferred(queue, [first[1].sequence], 30.0)).deliveries
    await broker.settle([Settlement(put_aside, Abandon())])
    await broker.receive(f"{queue}{DEAD_SUFFIX}", 1, 30.0)
    await broker.peek_dead(queue, Selection(), 10)
    await broker.redrive(queue, Selection(), None)
    await broker.redrive(queue, Selection(), None, to="others")
    await broker.purge(queue, Selection(), None)
    held = await broker.accept(queue, None, 30.0)
    assert isinstance(held, SessionLock)
    await broker.receive_session(held, 1)
    await broker.renew([held], 30.0)
    await broker.write_state(held, b"state")
    await broker.read_state(held)
    await broker.release(held)
    await broker.schedules(queue)
    await broker.advance(queue, "nightly", None, "record", [Outgoing(b"due")])
    assert list(await broker.holding([queue])) == [True]
    await broker.handled(queue, ["a"])
    await broker.stats(queue)
    await broker.delete_when_idle("others", 1.0)
    await broker.idle()
    await broker.purge_live(queue, LiveSelection())
    await broker.names()
    await broker.delete(queue, force=True)


async def use_functions(connection: Native) -> None:
    """Call what programs of any language may call."""
    await connection.execute("SELECT tenure.declare('mine')")
    options = "id => 'i', headers => '{}', session => 's', priority => 2, at => now(), delay => 1"
    await connection.execute(f"SELECT tenure.send('mine', 'x', {options})")
    await connection.execute("SELECT tenure.send('mine', 'x')")
    number = await connection.fetchval("SELECT seq FROM tenure.receive('mine', 1, 30, 7)")
    await connection.execute("SELECT tenure.complete('mine', $1)", f"7.{number}")
    await connection.execute("SELECT tenure.fence('resource', 9), tenure.stats('mine'), tenure.tidy('mine')")
    proposal = await connection.fetchval("SELECT tenure.propose('mine', 1, true)")
    assert await connection.fetchval("SELECT tenure.raise_marks('mine', $1, '{}')", proposal)


async def test_every_function_that_clients_call_fixes_the_search_path(server: Postgres) -> None:
    """A function whose name begins with "_" is called by these only, and clock() by exact types only."""
    async with native(server.url) as connection:
        rows = await connection.fetch(
            "SELECT proname::text, proconfig FROM pg_proc WHERE pronamespace = 'tenure'::regnamespace AND NOT prosecdef"
        )
        count = await connection.fetchval("SELECT count(*) FROM pg_proc WHERE pronamespace = 'tenure'::regnamespace")
    assert len(rows) == count > 40
    setting = SEARCH_PATH.replace(" = ", "=")
    free = {name for name, settings in rows if setting not in (settings or ())}
    assert {name for name in free if not name.startswith("_")} == {"clock"}
    assert functions("tenure").count(SEARCH_PATH) > 30


async def test_a_search_path_that_lists_postgresqls_own_schema_late_has_a_warning(server: Postgres) -> None:
    url = url_of(server, "worker")

    async def told() -> tuple[str, str, str]:
        async with acting(url) as backend:
            [fact] = [fact for fact in (await backend.diagnose()).facts if fact.name == "search_path"]
        return fact.value, fact.advice, fact.code

    async with native(server.url) as superuser:
        try:
            assert await told() == ('"$user", public', "", "")
            await superuser.execute("ALTER ROLE worker SET search_path = public, pg_catalog")
            path, advice, code = await told()
            assert (path, code) == ("public, pg_catalog", "postgres-search-path")
            assert advice.startswith("pg_catalog comes after public: functions there may run in place of")
        finally:
            await superuser.execute("ALTER ROLE worker RESET search_path")


@pytest.mark.parametrize(
    ("path", "before"),
    [
        ('"$user", public,pg_catalog', "$user"),
        ("public, PG_CATALOG", "public"),
        ('pg_temp, "a ""b"", c", "pg_catalog"', 'a "b", c'),
        ("", None),
        ('"$user", public', None),
        ("pg_catalog, public", None),
        ("pg_temp, pg_catalog, public", None),
        ('public, "PG_CATALOG"', None),
        ('"public, pg_catalog"', None),
    ],
)
def test_a_search_path_is_read_as_it_was_written(path: str, before: str | None) -> None:
    advice = advice_on_path(path)
    assert advice.partition(":")[0] == (f"pg_catalog comes after {before}" if before else "")
