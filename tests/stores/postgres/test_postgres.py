"""Tests of PostgreSQL alone: schemas, rights, standbys, poolers, certificates, notifications, others' transactions."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from asyncpg.transaction import Transaction

import tenure
from tenure._backends import postgres
from tenure._backends.postgres import dead_letters, wake
from tenure._backends.postgres.address import Options
from tenure._backends.postgres.connections import Connection, LoopConnections
from tenure._backends.postgres.migrate import functions
from tenure._backends.postgres.statements import VERSION
from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Released, Vacant
from tenure._opened import Fact
from tenure._queue.broker import Broker, Claim, NoSession, Selection
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, DeadLetter, Deleted, Renewed, Settled, Settlement, Verdict
from tenure._secret import Secret
from tenure._url import Url
from tenure.cli import main
from tenure.errors import ConfigError, TenureError, TermLost, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.absent import skip_or_fail
from tests.explained import facts_by_name
from tests.servers import Authority, Postgres, private, shared
from tests.servers.pgbouncer import PgBouncer
from tests.stores.postgres.migrated import migrated, native, opened

TTL = 60.0  # nothing here waits for its end, and no test takes as long
LOCK = 200.0  # by a clock that is put forward: the test's own duration must not count


async def won(store: LeaseStore, name: str, holder: str = "ann#1") -> Grant:
    answer = await store.acquire(name, holder, TTL)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def refusal(url: str) -> TenureError:
    async with opened(url) as backend:
        try:
            await backend.leases.inspect("name")
        except TenureError as error:
            return error
    raise AssertionError("it was not refused")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Return a server of this file's own, for tests that disturb it."""
    with private(Postgres) as server:
        yield server


@pytest.fixture
async def url(server: Postgres) -> str:
    return (await migrated(server)).url


# --- the address -------------------------------------------------------------------------------------------------


def test_no_password_is_shown_in_a_traceback_with_locals() -> None:
    options = Url.parse("postgresql://host?password=hush&sslpassword=hush").options(Options)
    assert (options.password, options.sslpassword) == (Secret("hush"), Secret("hush"))
    assert "hush" not in repr(options)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("postgresql://h/d?schma=x", "no option 'schma'; did you mean 'schema'"),
        ("postgresql://h/d?schema=Bad-Name", "schema must be up to 40 small letters"),
        ("postgresql://h/d?schema=pg_temp", "not begin with a digit or pg_"),
        ("postgresql://h/d?pool=0", "pool must be from 1 to 1000 connections, not 0"),
        ("postgresql://h/d?timeout=0", "timeout must be more than 0"),
        ("postgresql://h/d?listen=maybe", "'listen' must be true or false"),
        ("postgresql://h/d?sslmode=verify", "sslmode.* did you mean 'verify-(ca|full)'"),
        ("postgresql://h/d?target_session_attrs=standby", "must be one of read-write, primary"),
        ("postgresql://u:se/cret@h/d", r"\*\*\*"),
        ("postgresql://u:secret@h:port/d", "a port that is no number"),
    ],
)
def test_an_address_that_can_not_work_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        postgres.open(Url.parse(written))
    assert "cret" not in str(refused.value)


# --- the schema --------------------------------------------------------------------------------------------------


async def test_without_a_schema_the_command_is_named(server: Postgres) -> None:
    error = await refusal(f"{server.url}?schema=nowhere")
    assert isinstance(error, ConfigError)
    assert "no schema 'nowhere'" in str(error)
    assert "run: tenure migrate URL" in str(error)


async def test_a_newer_schema_is_left_alone(server: Postgres) -> None:
    url = f"{server.url}?schema=newer"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        await connection.execute("INSERT INTO newer.migration (version) VALUES (99)")
    assert "has version 99, made by a newer tenure" in str(await refusal(url))
    with pytest.raises(ConfigError, match="made by a newer"):
        await postgres.migrate(url)


async def test_an_older_schema_is_upgraded_and_keeps_what_is_in_it(server: Postgres, name: str) -> None:
    url = f"{server.url}?schema=older"
    first = await postgres.migrate(url, to=1)
    assert (first.before, first.after) == (0, 1)
    async with native(server.url) as connection:
        row = "(sha256('kept'), 'kept', NULL, 41, 0, '{}', false)"
        await connection.execute(f"INSERT INTO older.lease VALUES {row}")
    assert "has version 1, and this tenure needs" in str(await refusal(url))
    second = await postgres.migrate(url)
    assert (second.before, second.after) == (1, VERSION)
    async with opened(url) as backend:
        assert await backend.leases.inspect("kept") == Vacant("kept", 41)
        assert await backend.broker.stats(name) == Stats()
    third = await postgres.migrate(url)
    assert "already" in str(third)


async def test_queues_of_version_2_go_on_with_the_functions_of_this_one(server: Postgres, name: str) -> None:
    url = f"{server.url}?schema=second"
    assert (await postgres.migrate(url, to=2)).after == 2
    async with native(server.url) as connection:
        await connection.execute('CREATE ROLE "second worker" LOGIN; GRANT USAGE ON SCHEMA second TO "second worker"')
        await connection.execute(
            'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA second TO "second worker"'
        )
        await connection.execute(
            "INSERT INTO second.queue (name, lock, max_deliveries, dedupe_window, body_max) VALUES ($1, 9, 3, 9, 99)",
            name,
        )
        for state, due_at, body in (
            (0, None, b"ready"),
            (1, 1.0, b"orphan"),
            (2, 1e11, b"later"),
            (0, 1.0, b"expired"),
        ):
            await connection.execute(
                "INSERT INTO second.message (queue, state, token, due_at, expires_at, enqueued_at, deliveries, body) "
                "VALUES (1, $1, $2, $3, $4, 1, $5, $6)",
                state,
                7 if state == 1 else None,
                due_at,
                due_at if body == b"expired" else None,
                int(state == 1),
                body,
            )
        await connection.execute("INSERT INTO second.tally (queue, ready, locked, delayed) VALUES (1, 2, 1, 1)")
        # One of the functions as it was: an idle consumer was to claim again at once.
        await connection.execute(
            "CREATE FUNCTION second._due_in(p_queue integer, p_now double precision) RETURNS double precision "
            "LANGUAGE sql AS 'SELECT 0::float8'"
        )
    assert str(await postgres.migrate(url)) == f"upgraded the schema 'second' from version 2 to {VERSION}"
    async with opened(
        url.replace("postgres@", "second%20worker@")
    ) as backend:  # a user with the rights that were granted then
        claim = await backend.broker.receive(name, 10, TTL)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"ready", 1), (b"orphan", 2)]
        assert claim.due_in is not None
        assert claim.due_in > 0
        stats = await backend.broker.stats(name)
        assert (stats.ready, stats.locked, stats.delayed, stats.dead) == (0, 2, 1, 1)


async def test_functions_of_another_tenure_are_replaced(server: Postgres) -> None:
    url = f"{server.url}?schema=patched"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        await connection.execute(
            "CREATE OR REPLACE FUNCTION patched._expired() RETURNS text LANGUAGE sql AS 'SELECT NULL'"
        )
        await connection.execute("UPDATE patched.migration SET functions = 'of an earlier release'")
        assert "replaced its functions" in str(await postgres.migrate(url))
        assert await connection.fetchval("SELECT patched._expired()") is not None
    assert str(await postgres.migrate(url)) == f"the schema 'patched' has version {VERSION} already"


async def test_functions_of_earlier_releases_go_and_their_clients_go_on(server: Postgres) -> None:
    url = f"{server.url}?schema=former"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        await connection.execute(
            "CREATE FUNCTION former._bury(former.message, text, text) RETURNS void LANGUAGE sql AS '';"
            "CREATE FUNCTION former._pass_time(integer, double precision) RETURNS void LANGUAGE sql AS '';"
            "UPDATE former.migration SET functions = 'of an earlier release'"
        )
        assert "replaced its functions" in str(await postgres.migrate(url))
        left = "SELECT count(*) FROM pg_proc WHERE proname = ANY ($1) AND pronamespace = 'former'::regnamespace"
        assert await connection.fetchval(left, ["_bury", "_pass_time"]) == 0
        async with connection.transaction():
            await connection.execute("SELECT former._note_deaths('[[1, null, 1, \"expired\"]]')")
            assert await connection.fetchval("SELECT former._told()") == '[[1, null, 1, "expired"]]'


async def test_replacing_functions_waits_for_no_transaction_that_has_sent(server: Postgres) -> None:
    url = f"{server.url}?schema=unhurried"
    await postgres.migrate(url)
    async with native(server.url) as user, native(server.url) as connection, opened(url) as backend:
        await connection.execute("UPDATE unhurried.migration SET functions = 'of an earlier release'")
        async with user.transaction():
            await user.execute("SELECT unhurried.send('orders', 'x')")
            assert "replaced its functions" in str(await asyncio.wait_for(postgres.migrate(url), 5))
        [delivery] = (await backend.broker.receive("orders", 1, TTL)).deliveries
        assert delivery.body == b"x"


async def test_ten_may_migrate_at_once(server: Postgres) -> None:
    url = f"{server.url}?schema=crowded"
    done = await asyncio.gather(*(postgres.migrate(url) for _ in range(10)))
    assert sorted(one.before for one in done) == [0] + [VERSION] * 9


def test_the_command_migrates(server: Postgres, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("created the schema 'commanded'", "already"):
        assert main(["migrate", f"{server.url}?schema=commanded"]) == 0
        assert said in capsys.readouterr().out
    assert main(["migrate", "memory:"]) == 0
    assert "needs no schema" in capsys.readouterr().out


LOADERS = ("psql", "driver")


async def load(server: Postgres, script: str, loader: str) -> None:
    """Run a script as a DBA would."""
    if loader == "driver":
        async with native(server.url) as connection:
            await connection.execute(script)
        return
    psql = shutil.which("psql")
    if psql is None:
        skip_or_fail("psql is not installed")
    loading = await asyncio.create_subprocess_exec(
        *(psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", server.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await loading.communicate(script.encode())
    if loading.returncode:
        raise RuntimeError(errors.decode())


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("since", range(VERSION))
async def test_a_script_does_what_a_migration_does(server: Postgres, since: int, loader: str) -> None:
    schema = f"scripted_{loader}_{since}"
    url = f"{server.url}?schema={schema}"
    if since:
        await postgres.migrate(url, to=since)
    if since > 1:
        async with native(server.url) as connection:  # messages sent before the upgrade are there after it
            await connection.execute(f"INSERT INTO {schema}.queue VALUES (DEFAULT, 'old', 30, 10, 600, 1000)")
            await connection.execute(
                f"INSERT INTO {schema}.message (queue, state, enqueued_at, session, body) VALUES (1, 0, 1, 's', 'x')"
            )
            await connection.execute(f"INSERT INTO {schema}.tally (queue, ready) VALUES (1, 1)")
            if since >= 4:  # as the functions of that version record it
                await connection.execute(
                    f"INSERT INTO {schema}.waiting SELECT queue, seq, session FROM {schema}.message"
                )
            if since >= 5:
                await connection.execute(f"INSERT INTO {schema}.declared VALUES (1, 'body_max')")
    async with tenure.connect(url) as backend:
        script = await backend.migration_sql()
    assert script == await tenure.connect(url).migration_sql(since)
    await load(server, script, loader)
    assert str(await postgres.migrate(url)) == f"the schema '{schema}' has version {VERSION} already"
    async with opened(url) as store:
        await won(store.leases, "a")
        await store.broker.send("orders", [Outgoing(b"y")])
        assert [one.body for one in (await store.broker.receive("orders", 1, TTL)).deliveries] == [b"y"]
        if since > 1:
            assert isinstance(await store.broker.accept("old", None, TTL), SessionLock)
            declared = await store.broker.declare("old", {"lock": 20.0, "body_max": 9}, only_undeclared=True)
            assert (declared.lock, declared.body_max) == (20.0, 1000)  # settings without the default count as declared
    with pytest.raises((RuntimeError, asyncpg.RaiseError), match=f"{schema}, which (exists|has another) "):
        await load(server, script, loader)
    async with tenure.connect(url) as backend:
        assert await backend.migration_sql() == f"-- the schema {schema} is up to date: nothing to do"


async def test_a_script_replaces_functions(server: Postgres) -> None:
    url = f"{server.url}?schema=scripted_anew"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        await connection.execute("UPDATE scripted_anew.migration SET functions = 'of an earlier release'")
        await connection.execute("DROP FUNCTION scripted_anew.send")
        await connection.execute(
            "CREATE FUNCTION scripted_anew.send(queue text, body bytea, ttl double precision DEFAULT NULL) "
            "RETURNS text LANGUAGE sql AS 'SELECT queue'"
        )
    async with tenure.connect(url) as backend:
        script = await backend.migration_sql()
        assert "CREATE TABLE" not in script
        await load(server, script, "driver")
        assert "already" in await backend.migrate()
    async with native(server.url) as connection:
        await connection.execute("SELECT scripted_anew.send('q', 'a', expires_in => 9)")


def test_the_command_writes_sql(
    server: Postgres, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENURE_URL", raising=False)

    def said(*arguments: str, code: int = 0) -> str:
        assert main(["migrate", *arguments]) == code
        out, err = capsys.readouterr()
        return err if code else out

    whole = said("--sql")
    assert whole == said("--sql", "--from", "0") == said("--sql", "--from", "0", "postgresql://nowhere.invalid/x")
    assert "CREATE SCHEMA tenure;" in whole
    assert "CREATE SCHEMA jobs;" in said("--sql", "--from", "0", "postgresql://nowhere.invalid/x?schema=jobs")
    assert "which exists already" in whole
    assert "CREATE SCHEMA unseen;" in said("--sql", f"{server.url}?schema=unseen")
    assert (
        said("--sql", "redis://localhost", "--from", "0")
        == "-- redis://localhost has no schema, so there is no SQL to run\n"
    )
    assert (
        said("--sql", "sqlite:///x.db", "--from", "2") == "-- sqlite:///x.db has no schema, so there is no SQL to run\n"
    )
    assert "--from needs --sql" in said("--from", "2", code=2)
    assert f"version 9 of a schema is unknown; give 1 to {VERSION}" in said("--sql", "--from", "9", code=78)
    assert "is not in the range" in said("--sql", "--from", "-1", code=2)
    assert "127.0.0.1:1" in said("--sql", "postgresql://127.0.0.1:1/x", code=69)


async def test_two_schemas_are_two_stores(server: Postgres, url: str, name: str) -> None:
    await postgres.migrate(f"{server.url}?schema=other")
    async with opened(url) as backend, opened(f"{server.url}?schema=other") as other:
        hints = other.leases.hints(name)
        await asyncio.wait_for(anext(hints), TTL)  # it listens
        await won(backend.leases, name)
        assert await other.leases.inspect(name) == Vacant(name, 0)


# --- errors ------------------------------------------------------------------------------------------------------


async def test_a_keyword_of_sql_is_refused_as_schema(server: Postgres) -> None:
    for schema in ("user", "left"):
        with pytest.raises(ConfigError, match=f"schema={schema} is a keyword of SQL.*try schema=tenure"):
            await postgres.migrate(f"{server.url}?schema={schema}")


async def test_permanent_errors_have_advice() -> None:
    with private(Postgres, password="s3cret/&x") as server:
        await postgres.migrate(server.url)
        async with native(server.url) as connection:
            await connection.execute("CREATE ROLE guest LOGIN PASSWORD 'guest'")
        wrong = server.url.replace("s3cret", "wr0ng")
        for url, said in (
            (wrong, "refused the login"),
            (server.url.replace("/postgres", "/nowhere").replace("//nowhere", "//postgres"), "no such database"),
            (server.url.replace("postgres:s3cret%2F%26x@", "guest:guest@"), "GRANT"),
            (f"{server.url}?sslmode=require", "the server has no TLS"),
        ):
            error = await refusal(url)
            assert isinstance(error, ConfigError), error
            assert said in str(error)
            assert "3cret" not in str(error)
            assert "wr0ng" not in str(error)
        with pytest.raises(ConfigError, match="CREATE on the database"):
            await postgres.migrate(server.url.replace("postgres:s3cret%2F%26x@", "guest:guest@") + "?schema=mine")


async def test_the_rights_in_the_document_are_enough(server: Postgres, url: str, name: str) -> None:
    written = (Path(__file__).parents[3] / "docs" / "postgresql.md").read_text()
    [grants] = re.findall(r"^```sql\n(GRANT .*?)^```$", written, re.MULTILINE | re.DOTALL)
    async with native(url) as connection:
        await connection.execute(f"DROP ROLE IF EXISTS worker; CREATE ROLE worker LOGIN; {grants}")
    async with opened(server.url.replace("postgres@", "worker@")) as backend:
        assert await backend.leases.release(grant := await won(backend.leases, name)) == Released(grant)
        await backend.broker.send(name, [Outgoing(b"a", id="a")])
        got = (await backend.broker.receive(name, 1, TTL)).deliveries
        assert await backend.broker.settle([Settlement(got[0], COMPLETE)]) == [Settled()]
        await backend.broker._housekeeping._tidy(name)
        assert await backend.broker.stats(name) == Stats()


async def test_a_connection_that_has_worked_is_tried_again() -> None:
    with private(Postgres, password="s3cret") as server:
        await postgres.migrate(server.url)
        async with opened(f"{server.url}?pool=1") as backend, native(server.url) as connection:
            grant = await won(backend.leases, "name")
            await connection.execute("ALTER ROLE postgres PASSWORD 'another'")
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )
            await until(lambda: says(backend, "it worked before"))
            await connection.execute("ALTER ROLE postgres PASSWORD 's3cret'")
            await until(lambda: renewed(backend.leases, grant))


async def says(backend: postgres.PostgresBackend, text: str) -> bool:
    """Return whether a request is unavailable, with *text* in its error."""
    try:
        await backend.leases.inspect("name")
    except Unavailable as error:
        return text in str(error)
    return False


async def test_too_many_connections_are_unavailable() -> None:
    with private(Postgres, options=[("max_connections", "5"), ("superuser_reserved_connections", "0")]) as server:
        await postgres.migrate(server.url)
        async with native(server.url) as first:
            others = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"

            async def is_alone() -> bool:  # the server takes a while to notice that clients have gone
                return bool(await first.fetchval(others) == 1)

            await until(is_alone)
            async with native(server.url), native(server.url), native(server.url), native(server.url):
                error = await refusal(server.url)
            assert isinstance(error, Unavailable)
            assert "max_connections" in str(error)
            await until(is_alone)
            async with opened(server.url) as backend:
                assert await backend.leases.inspect("name") == Vacant("name", 0)


async def test_a_server_that_is_away_is_unavailable() -> None:
    with private(Postgres) as server:
        await postgres.migrate(server.url)
        async with opened(server.url) as backend:
            grant = await won(backend.leases, "name")
            server.stop()
            with pytest.raises(Unavailable):
                await backend.leases.renew([grant], TTL)
            with pytest.raises(Unavailable, match="can't be reached"):
                await backend.leases.inspect("name")
            server.start()
            assert await backend.leases.renew([grant], TTL) == [Granted(grant)]


async def test_only_the_right_authority_is_trusted() -> None:
    right, wrong = Authority(), Authority("another authority")
    with private(Postgres, authority=right, password="s3cret") as server:
        trusting = f"{server.url}?sslmode=verify-full&sslrootcert={right.certificate}"
        await postgres.migrate(trusting)
        async with opened(trusting) as backend:
            assert await backend.leases.inspect("name") == Vacant("name", 0)
            told = f"TLS 1.3; the server's certificate and name are verified against {right.certificate}"
            assert Fact("TLS", told) in await backend.describe()
        async with opened(f"{server.url}?sslmode=require&sslrootcert={right.certificate}") as backend:
            told = f"TLS 1.3; the server's certificate is verified against {right.certificate}; its name is not"
            assert Fact("TLS", f"{told} (sslmode=verify-ca)") in await backend.describe()
        for mode, written in (("require", "?sslmode=require"), ("prefer", "")):
            async with opened(f"{server.url}{written}") as backend:
                assert Fact("TLS", f"TLS 1.3; nothing is verified (sslmode={mode})") in await backend.describe()
        error = await refusal(f"{server.url}?sslmode=verify-full&sslrootcert={wrong.certificate}")
        assert isinstance(error, ConfigError)
        assert "is not trusted" in str(error)
        assert isinstance(await refusal(f"{server.url}?sslmode=disable"), ConfigError)


async def test_a_server_that_can_only_be_read_tells_of_no_empty_queue(name: str) -> None:
    with private(Postgres) as server:
        async with opened((await migrated(server)).url) as backend, native(server.url) as connection:
            assert list(await backend.broker.holding([name])) == [False]
            await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            await connection.execute("SELECT pg_reload_conf()")

            async def is_refused() -> bool:
                try:
                    await backend.broker.holding([name])
                except Unavailable as error:
                    return "read" in str(error)
                return False

            await until(is_refused)


async def test_a_standby_decides_nothing(name: str) -> None:
    options = [("wal_level", "replica"), ("max_wal_senders", "4"), ("hot_standby", "on")]
    with private(Postgres, options=options) as primary:
        await postgres.migrate(primary.url)
        async with opened(primary.url) as backend:
            await won(backend.leases, name)
        with private(Standby, of=primary) as standby:
            error = await refusal(standby.url)
            assert isinstance(error, Unavailable)
            assert "standby" in str(error)
            both = f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"
            async with opened(both) as backend:
                assert (await backend.leases.inspect(name)).token == 1
        async with native(primary.url) as connection:
            await connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        assert "read only" in str(await refusal(primary.url))


class Standby(Postgres):
    """A hot standby of another server."""

    def __init__(self, *, of: Postgres) -> None:
        super().__init__()
        self._primary = of

    def prepare(self) -> None:
        from tests.servers.postgres import programs

        copy = ["-D", str(self.folder / "data"), "-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres"]
        self.run(f"{programs()}/pg_basebackup", *copy, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync")
        with open(self.folder / "data" / "postgresql.conf", "a") as file:
            file.write(f"port = {self.port}\nunix_socket_directories = '{self.folder}'\n")


# --- leases: mistakes of other implementations -------------------------------------------------------------------


async def test_the_leader_table_is_not_gone_after_a_crash(name: str) -> None:
    with private(Postgres) as server:
        await postgres.migrate(server.url)
        async with opened(server.url) as backend:
            grant = await won(backend.leases, name)
            server.kill()
            server.start()
            await until(lambda: holds(backend.leases, name, "ann#1"))
            assert isinstance(await backend.leases.acquire(name, "bob#1", TTL), HeldBy)
            assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
        async with native(server.url) as connection:
            unlogged = (
                "SELECT count(*) FROM pg_class WHERE relnamespace = 'tenure'::regnamespace AND relpersistence <> 'p'"
            )
            assert await connection.fetchval(unlogged) == 0


async def renewed(store: LeaseStore, grant: Grant) -> bool:
    """Renew, and return whether that worked: the connection for renewals may have been broken, too."""
    try:
        answer = await store.renew([grant], TTL)
    except Unavailable:
        return False
    assert answer == [Granted(grant)]
    return True


async def holds(store: LeaseStore, name: str, holder: str) -> bool:
    try:
        answer = await store.inspect(name)
    except Unavailable:
        return False
    return isinstance(answer, HeldBy) and answer.holder == holder


async def test_listen_is_established_again(url: str, name: str) -> None:
    async with opened(url) as backend, opened(url) as other, native(url) as connection:
        hints = backend.leases.hints(name)
        await asyncio.wait_for(anext(hints), TTL)  # the first connection listens
        ended = await connection.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        assert ended >= 1
        await asyncio.wait_for(anext(hints), TTL)  # a notification may have been missed, so a hint follows
        grant = await won(other.leases, name)
        await asyncio.wait_for(anext(hints), TTL)
        assert await other.leases.release(grant) == Released(grant)
        await asyncio.wait_for(anext(hints), TTL)


async def test_a_silent_listening_connection_is_replaced(
    server: Postgres, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake, "PROBE_EVERY", 0.2)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        through = url.replace(f":{server.port}/", f":{proxy.port}/") + "?timeout=0.5"
        async with opened(through) as backend, opened(url) as other:
            hints = backend.leases.hints(name)
            await asyncio.wait_for(anext(hints), TTL)
            proxy.stall()
            await until(lambda: not backend.is_listening)
            await won(other.leases, name)
            proxy.reset()
            proxy.heal()
            await asyncio.wait_for(anext(hints), TTL)


async def test_a_lease_outlives_the_connection_it_was_won_on(url: str, name: str) -> None:
    async with opened(f"{url}?listen=false") as backend, native(url) as connection:
        grant = await won(backend.leases, name)
        for _ in range(3):
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            )
            await until(lambda: holds(backend.leases, name, "ann#1"))
            await until(lambda: renewed(backend.leases, grant))


async def test_no_session_holds_a_lock(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        await won(backend.leases, name)
        await backend.broker.send(name, [Outgoing(b"a")])
        await backend.broker.receive(name, 1, TTL)

        async def no_session_holds_one() -> bool:  # for as long as a transaction lasts, the server's own chores may
            locks = "SELECT count(*) FROM pg_locks WHERE locktype IN ('advisory', 'tuple', 'transactionid')"
            return bool(await connection.fetchval(locks) == 0)

        await until(no_session_holds_one)


async def test_a_request_is_bounded_in_time_also_while_the_row_is_locked(url: str, name: str) -> None:
    async with opened(f"{url}?timeout=0.5") as backend, opened(url) as patient, native(url) as connection:
        grant = await won(patient.leases, name)
        await until(lambda: renewed(backend.leases, grant))
        async with connection.transaction():
            await connection.execute("SELECT FROM tenure.lease WHERE name = $1 FOR UPDATE", name)
            asked_at = time.monotonic()
            with pytest.raises(Unavailable, match=r"no answer within 0\.\d+ s: another transaction has locked the row"):
                await backend.leases.renew([grant], TTL)
            assert time.monotonic() - asked_at < 4.0  # without the option it would be five
            assert isinstance(await patient.leases.acquire(name, "bob#1", TTL), HeldBy)  # reading needs no lock
        assert await patient.leases.renew([grant], TTL) == [Granted(grant)]


async def test_the_error_has_the_time_that_was_waited(server: Postgres, url: str, name: str) -> None:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(url.replace(f":{server.port}/", f":{proxy.port}/")) as backend,
    ):
        grant = await won(backend.leases, name)
        await until(lambda: renewed(backend.leases, grant))
        proxy.stall()
        with pytest.raises(Unavailable, match=r"no answer within 1 s; the"):  # a third of the ttl, and not the option
            await backend.leases.renew([grant], 3.0)


async def test_a_request_cancelled_while_it_connects_leaves_nothing_behind(url: str) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with opened(url) as backend:
        await backend.leases.names()
        client = backend.leases._client
        for turns in range(60):  # so that it is cancelled at each of the steps that connecting takes
            connections = LoopConnections(client.connect, 1)

            async def fetch(connections: LoopConnections = connections) -> int:
                return await connections.run(lambda connection: connection.fetchval("SELECT 7"), 5.0, 5.0)

            pending = asyncio.ensure_future(fetch())
            for _ in range(turns):
                await asyncio.sleep(0)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            if turns % 2:  # the attempt that was begun is finished, and used by the next request
                assert await fetch() == 7
            await connections.close()
    gc.collect()
    assert complaints == []


async def test_requests_cancelled_one_after_another_open_one_connection(url: str) -> None:
    async with opened(url) as backend:
        await backend.leases.names()
        client, begun, may_go_on = backend.leases._client, 0, asyncio.Event()

        async def slowly() -> Connection:
            nonlocal begun
            begun += 1
            await may_go_on.wait()
            return await client.connect()

        connections = LoopConnections(slowly, 1)

        async def fetch() -> int:
            return await connections.run(lambda connection: connection.fetchval("SELECT 7"), 60.0, 60.0)

        for _ in range(20):
            pending = asyncio.ensure_future(fetch())
            await asyncio.sleep(0.001)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        may_go_on.set()
        assert await fetch() == 7
        await connections.close()
        assert begun == 1


# --- behind a pooler ---------------------------------------------------------------------------------------------


async def test_everything_works_behind_a_pooler_of_transactions(server: Postgres, url: str, name: str) -> None:
    with private(PgBouncer, of=server) as pooler:
        options = "?prepared=false&listen=false"
        async with opened(pooler.url + options) as ann, opened(pooler.url + options) as bob, opened(url) as direct:
            assert not ann.leases.traits.hints
            grants = [await won(ann.leases, f"{name}-{number}") for number in range(20)]
            await asyncio.gather(*(won(bob.leases, f"{name}-bob-{number}") for number in range(20)))
            assert list(await ann.leases.renew(grants, TTL)) == [Granted(grant) for grant in grants]
            assert isinstance(await bob.leases.acquire(grants[0].name, "bob#1", TTL), HeldBy)
            assert await ann.leases.release(grants[0]) == Released(grants[0])
            assert (await won(bob.leases, grants[0].name, "bob#1")).token == grants[0].token + 1
            hints = direct.broker.hints(name)
            await asyncio.wait_for(anext(hints), TTL)
            await ann.broker.send(name, [Outgoing(b"%d" % number, id=str(number)) for number in range(10)])
            await asyncio.wait_for(anext(hints), TTL)  # NOTIFY needs no session; only LISTEN does
            got = (await bob.broker.receive(name, 10, TTL)).deliveries
            verdicts: list[Verdict] = [COMPLETE, Abandon()] * 5
            done = await bob.broker.settle(
                [Settlement(one, verdict) for one, verdict in zip(got, verdicts, strict=True)]
            )
            assert done == [Settled()] * 10
            assert (await ann.broker.stats(name)).ready == 5


async def test_a_pooler_that_mixes_up_statements_is_named(server: Postgres, url: str, name: str) -> None:
    with private(PgBouncer, of=server) as pooler:
        async with opened(f"{pooler.url}?listen=false") as ann, opened(f"{pooler.url}?listen=false") as bob:
            with pytest.raises(TenureError, match="prepared=false"):
                for number in range(50):
                    requests = [won(each.leases, f"{name}-{number}-{n}") for each in (ann, bob) for n in range(4)]
                    await asyncio.gather(*requests)


# --- the fence ---------------------------------------------------------------------------------------------------


async def test_the_fence_refuses_an_older_token(url: str, name: str) -> None:
    async with native(url) as connection, native(url) as other:
        async with connection.transaction():
            await postgres.fence(connection, name, 7)
            waiting = asyncio.ensure_future(fenced(other, name, 6))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.1)  # it waits until the first has ended
        with pytest.raises(TermLost, match=r"token 6 is too old for .* token 7 has been here"):
            await waiting
        await fenced(other, name, 7)
        await fenced(other, name, 8)
        with pytest.raises(ConfigError, match="no transaction is open"):
            await postgres.fence(connection, name, 9)
        with pytest.raises(asyncpg.PostgresError) as refused:
            await connection.execute("SELECT tenure.fence($1, 7)", name)
        assert refused.value.sqlstate == "TN001"


async def fenced(connection: asyncpg.Connection[asyncpg.Record], name: str, token: int) -> None:
    async with connection.transaction():
        await postgres.fence(connection, name, token)


async def test_a_rollback_takes_the_token_back(url: str, name: str) -> None:
    async with native(url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await postgres.fence(connection, name, 9)
        await transaction.rollback()
        await fenced(connection, name, 8)


# --- in the caller's own transaction -----------------------------------------------------------------------------


async def test_a_message_is_sent_with_the_callers_transaction(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), TTL)
        transaction = connection.transaction(isolation="serializable")
        await transaction.start()
        await connection.fetchval("SELECT tenure.send($1, 'never')", name)
        await transaction.rollback()
        async with connection.transaction(isolation="serializable"):
            sent = (
                "SELECT tenure.send($1, $2, headers => '{\"n\": 1}', session => 's', correlation_id => 'c', id => $3)"
            )
            assert await connection.fetchval(sent, name, b"a", "first") == "first"
            assert await connection.fetchval(sent, name, b"again", "first") == "first"
            made_up = await connection.fetchval("SELECT tenure.send($1, 'b', priority => 3)", name)
            assert await backend.broker.stats(name) == Stats()
        await asyncio.wait_for(anext(hints), TTL)
        [got] = (await backend.broker.receive(name, 10, TTL)).deliveries
        assert (got.id, got.body, got.priority) == (made_up, b"b", 3)
        assert (await backend.broker.stats(name)).ready == 1
        held = await backend.broker.accept(name, None, TTL)
        assert isinstance(held, SessionLock)
        for wrong in (
            "priority => 10",
            "expires_in => 0",
            "delay => -1",
            "headers => '{\"a\": [1]}'",
            "queue => 'a$b'",
        ):
            argument = "'q'," if "queue" not in wrong else ""
            with pytest.raises(asyncpg.InvalidParameterValueError):
                await connection.execute(f"SELECT tenure.send({argument} body => 'x', {wrong})")


async def test_senders_to_declared_queues_wait_for_no_transaction(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection, native(url) as other:
        for queue in (name, f"{name}-2", name):
            await connection.execute("SELECT tenure.declare($1)", queue)
        assert f"{name}-2" in await backend.broker.names()
        async with connection.transaction(), other.transaction():
            for one, queues in ((connection, (name, f"{name}-2")), (other, (f"{name}-2", name))):
                for queue in queues:
                    await asyncio.wait_for(one.execute("SELECT tenure.send($1, 'a')", queue), 5.0)
            await asyncio.wait_for(backend.broker.send(name, [Outgoing(b"b")]), 5.0)
        assert (await backend.broker.stats(name)).ready == 3
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await connection.execute("SELECT tenure.declare('a$b')")


async def test_messages_of_an_open_transaction_survive_the_deletion_of_their_queue(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection, native(url) as late:
        broker = backend.broker
        await connection.execute("SELECT tenure.declare($1)", name)
        async with late.transaction(isolation="repeatable_read"):
            await late.execute("SELECT 1 FROM tenure.queue LIMIT 1")  # takes its snapshot
            async with connection.transaction():
                await connection.execute("SELECT tenure.send($1, 'a')", name)
                assert await asyncio.wait_for(broker.delete(name), 5.0) == Deleted(Stats())  # it sees no message
                assert name not in await broker.names()
            await late.execute("SELECT tenure.send($1, 'b')", name)
        assert name in await broker.names()
        assert [one.body for one in (await broker.receive(name, 10, TTL)).deliveries] == [b"a", b"b"]


async def test_a_deleted_queue_is_removed_a_day_later(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        broker, names = backend.broker, [name, f"{name}-2", f"{name}-3"]
        for queue in names:
            await connection.execute("SELECT tenure.declare($1)", queue)
            assert await broker.delete(queue) == Deleted(Stats())
        await broker.send(names[1], [Outgoing(b"used again")])
        for queue, ago in zip(names, (86_500, 86_500, 86_300), strict=True):
            await connection.execute(
                "UPDATE tenure.queue SET deleted_at = deleted_at - $2 WHERE name = $1", queue, float(ago)
            )
        await broker.idle()
        rows = await connection.fetch("SELECT name FROM tenure.queue WHERE name = ANY ($1) ORDER BY name", names)
        assert [row[0] for row in rows] == names[1:]
        await broker.send(name, [Outgoing(b"again")])
        assert [one.body for one in (await broker.receive(name, 10, TTL)).deliveries] == [b"again"]


async def test_a_message_is_completed_with_the_callers_transaction(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        await backend.broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
        first, second = (await backend.broker.receive(name, 10, TTL)).deliveries
        async with connection.transaction():
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
            # Its lock can be renewed meanwhile, with others, and no request waits for the transaction.
            [one, two] = await asyncio.wait_for(backend.broker.renew([first, second], TTL), 30)
            assert isinstance(one, Renewed)
            assert isinstance(two, Renewed)
            assert (await backend.broker.stats(name)).locked == 2
        assert (await backend.broker.stats(name)).locked == 1
        assert await backend.broker.settle([Settlement(first, COMPLETE)]) == [LAPSED]
        with pytest.raises(asyncpg.PostgresError, match="is over") as refused:
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
        assert refused.value.sqlstate == "TN002"


async def completed_in_a_transaction(
    broker: Broker, connection: Connection, name: str
) -> tuple[SessionLock, Delivery, Transaction]:
    """Lock the session ``s`` and its first message, and complete that in a transaction that stays open."""
    held = await broker.accept(name, "s", LOCK)
    assert isinstance(held, SessionLock)
    claim = await broker.receive_session(held, 1)
    assert isinstance(claim, Claim)
    [first] = claim.deliveries
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
    return held, first, transaction


async def test_a_session_is_renewed_while_a_transaction_locks_its_message(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held, first, transaction = await completed_in_a_transaction(broker, connection, name)
        turnable.turn(LOCK * 0.6)
        other = await won(backend.leases, name)
        # All renewals of a process share a connection: if this one waits for the transaction, the leader's does, too.
        [session], [leader] = await asyncio.wait_for(
            asyncio.gather(broker.renew([held], LOCK), backend.leases.renew([other], TTL)), 2.0
        )
        assert isinstance(session, Renewed)
        assert isinstance(leader, Granted)
        turnable.turn(LOCK * 0.6)
        await transaction.rollback()
        assert isinstance(await broker.accept(name, None, LOCK), NoSession)
        assert (await broker.stats(name)).locked == 1  # the session's lock covers it, not the end in its row
        assert await broker.settle([Settlement(first, COMPLETE)]) == [Settled()]


async def test_a_session_is_in_order_while_a_transaction_locks_its_message(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        _, _, transaction = await completed_in_a_transaction(broker, connection, name)
        turnable.turn(LOCK * 1.05)
        assert isinstance(await broker.accept(name, None, LOCK), NoSession)  # the transaction may be rolled back
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        claim = await broker.receive_session(held, 10)
        assert isinstance(claim, Claim)
        assert claim.deliveries == ()
        await transaction.rollback()
        claim = await broker.receive_session(held, 10)
        assert isinstance(claim, Claim)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"1", 2), (b"2", 1)]


@pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
async def test_a_message_of_a_session_is_settled_after_a_rollback(
    turnable: Postgres, name: str, verdict: Verdict
) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"a", session="s")])
        held, first, transaction = await completed_in_a_transaction(broker, connection, name)
        turnable.turn(LOCK * 0.6)
        await broker.renew([held], LOCK)
        turnable.turn(LOCK * 0.6)
        await transaction.rollback()
        assert await broker.settle([Settlement(first, verdict)]) == [Settled()]  # no request has read it since


@pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
async def test_a_lock_renewed_beside_a_transaction_holds_after_its_rollback(
    turnable: Postgres, name: str, verdict: Verdict
) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
        first, second = (await broker.receive(name, 2, LOCK)).deliveries
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
        turnable.turn(LOCK * 0.6)
        one, two = await broker.renew([first, second], LOCK)
        assert isinstance(one, Renewed)
        assert isinstance(two, Renewed)
        assert one.locked_until == two.locked_until > first.locked_until + LOCK / 4
        turnable.turn(LOCK * 0.6)
        assert (await broker.receive(name, 1, LOCK)).deliveries == ()
        forged, again = await broker.renew([first._replace(token=17), first], LOCK)
        assert forged is LAPSED
        assert isinstance(again, Renewed)
        assert again.locked_until > one.locked_until
        await transaction.rollback()
        if verdict is COMPLETE:  # also when another request has read it since
            assert (await broker.stats(name)).locked == 2
            assert (await broker.receive(name, 1, LOCK)).deliveries == ()
            assert isinstance((await broker.renew([first], LOCK))[0], Renewed)
        assert await broker.settle([Settlement(first, verdict)]) == [Settled()]
        assert await broker.settle([Settlement(first, COMPLETE)]) == [LAPSED]
        assert await broker.settle([Settlement(second, COMPLETE)]) == [Settled()]


async def test_a_lock_that_is_nearly_over_is_not_renewed_beside_a_transaction(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        await backend.broker.send(name, [Outgoing(b"a")])
        [first] = (await backend.broker.receive(name, 1, LOCK)).deliveries
        async with connection.transaction():
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
            turnable.turn(LOCK * 0.8)
            assert await backend.broker.renew([first], LOCK) == [LAPSED]  # a later claim might not see the extension
        assert await backend.broker.stats(name) == Stats()


async def test_a_transaction_of_a_higher_level_expires_only_locks_that_it_sees(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection, native(turnable.url) as other:
        await backend.broker.send(name, [Outgoing(b"a")])
        [first] = (await backend.broker.receive(name, 1, LOCK)).deliveries
        async with other.transaction(isolation="repeatable_read"):
            locked = await other.fetchval("SELECT locked FROM tenure.stats($1)", name)
            assert locked == 1  # from here on, the transaction sees no change
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
            turnable.turn(LOCK * 0.6)
            await backend.broker.renew([first], LOCK)
            turnable.turn(LOCK * 0.6)
            await transaction.rollback()
            await other.fetch("SELECT tenure.stats($1)", name)
        assert await backend.broker.settle([Settlement(first, COMPLETE)]) == [Settled()]


async def test_a_message_locked_by_a_transaction_is_polled_for(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        await backend.broker.send(name, [Outgoing(b"a")])
        [first] = (await backend.broker.receive(name, 1, LOCK)).deliveries
        async with connection.transaction():
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{first.token}.{first.sequence}")
            turnable.turn(LOCK * 1.05)
            claim = await backend.broker.receive(name, 1, LOCK)
            assert claim.deliveries == ()
            assert claim.due_in is not None  # the end of the transaction is not notified
            assert 0.1 < claim.due_in < 1.0
        assert await backend.broker.receive(name, 1, LOCK) == Claim((), None)


# --- counting and housekeeping -----------------------------------------------------------------------------------


async def test_counts_are_exact_with_many_at_work(url: str, name: str) -> None:
    async with opened(url) as backend, opened(url) as other, native(url) as connection:

        async def work(broker: postgres.PostgresBroker) -> None:
            for _ in range(30):
                await broker.send(name, [Outgoing(b"x"), Outgoing(b"y", delay=3600)])
                got = (await broker.receive(name, 2, TTL)).deliveries
                await broker.settle([Settlement(one, COMPLETE) for one in got[:1]])
                await broker.stats(name)

        await asyncio.gather(*(work(one.broker) for one in (backend, other) for _ in range(3)))
        counted = await connection.fetch(
            "SELECT state, count(*) FROM tenure.message WHERE queue = (SELECT id FROM tenure.queue WHERE name = $1) "
            "GROUP BY state ORDER BY state",
            name,
        )
        states = dict(tuple(row) for row in counted)
        stats = await backend.broker.stats(name)
        assert (stats.ready, stats.locked, stats.delayed) == (states.get(0, 0), states.get(1, 0), states.get(2, 0))
        assert stats.delayed == 180


async def test_a_queue_is_tidied_by_its_users(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as backend, native(url) as connection:
        for number in range(500):
            await backend.broker.send(name, [Outgoing(b"x", id=str(number))])

        async def is_tidy() -> bool:
            mine = "SELECT count(*) FROM tenure.tally JOIN tenure.queue ON id = queue WHERE name = $1"
            return bool(await connection.fetchval(mine, name) < 400)

        await until(is_tidy)
        assert (await backend.broker.stats(name)).ready == 500


async def test_many_messages_share_a_notification(url: str, name: str) -> None:
    payloads: list[object] = []
    async with opened(url) as backend, native(url) as connection:
        await connection.add_listener(wake.channel_of("tenure"), lambda *arguments: payloads.append(arguments[3]))
        began = time.monotonic()
        for _ in range(100):
            await backend.broker.send(name, [Outgoing(b"x")])
        took = time.monotonic() - began
        await until(lambda: payloads)
        await connection.fetchval("SELECT 1")
        assert len([one for one in payloads if str(one).endswith(f":queue:{name}")]) <= took / wake.PAUSES[1] + 4


@pytest.mark.parametrize(("rate", "notified"), [(20, 20), (100, 100), (1_000, 200), (10_000, 200)])
def test_the_pause_between_notifications_grows_with_their_rate(rate: int, notified: int) -> None:
    pause, last, count = 0.0, -math.inf, 0
    for place in range(10 * rate):
        now = place / rate
        if now >= last + pause:
            pause, last, count = wake.pause_after(pause, now - last), now, count + 1
    assert 0.9 * notified <= count / 10 <= notified


async def test_messages_that_are_put_back_share_a_notification(url: str, name: str) -> None:
    payloads: list[object] = []
    async with opened(url) as backend, native(url) as connection:
        broker = backend.broker
        await broker.declare(name, {"max_deliveries": 1_000})
        await connection.add_listener(wake.channel_of("tenure"), lambda *arguments: payloads.append(arguments[3]))

        async def is_notified(of: str) -> bool:
            await connection.fetchval("SELECT 1")
            return any(str(one).endswith(f":queue:{of}") for one in payloads)

        await broker.send(name, [Outgoing(b"x")])
        await until(lambda: is_notified(name))
        payloads.clear()
        began = time.monotonic()
        for _ in range(30):
            [got] = (await broker.receive(name, 1, TTL)).deliveries
            await broker.settle([Settlement(got, Abandon())])
        took = time.monotonic() - began
        await until(lambda: is_notified(name))
        assert len(payloads) <= took / wake.PAUSES[1] + 4
        [got] = (await broker.receive(name, 1, TTL)).deliveries
        await broker.settle([Settlement(got, DeadLetter("wrong", ""))])
        await until(lambda: is_notified(dead_letters_of(name)))
        await asyncio.sleep(2 * wake.PAUSES[1])  # earlier notifications of the queue itself have arrived
        await connection.fetchval("SELECT 1")
        payloads.clear()
        assert await broker.redrive(name, Selection(), None) == 1
        await until(lambda: is_notified(name))


async def test_dead_letters_are_revived_in_steps(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "REDRIVE_BATCH", 3)  # a step must end before the server's time limit
    async with opened(url) as backend:

        async def die(count: int) -> None:
            await backend.broker.send(name, [Outgoing(b"x")] * count)
            got = (await backend.broker.receive(name, count, TTL)).deliveries
            await backend.broker.settle([Settlement(one, DeadLetter("wrong", "")) for one in got])

        everything = Selection()
        await die(10)
        assert await backend.broker.redrive(name, everything, None, dry_run=True) == 10
        assert await backend.broker.redrive(name, everything, 7) == 7
        assert await backend.broker.redrive(name, everything, None) == 3
        got = (await backend.broker.receive(name, 20, TTL)).deliveries
        assert len(got) == 10
        await backend.broker.settle([Settlement(one, DeadLetter("wrong", "")) for one in got])
        assert await backend.broker.purge(name, everything, 2) == 2
        assert await backend.broker.purge(name, everything, None) == 8
        assert await backend.broker.stats(name) == Stats()


def test_the_functions_have_no_gaps() -> None:
    assert not re.search(r"\{[a-z_]+\}", functions("tenure"))


async def test_doctor_reports_the_server(url: str) -> None:
    async with opened(url) as backend:
        facts = facts_by_name(await backend.describe())
    assert facts["schema"].value == f"tenure, version {VERSION}"
    assert "power" in facts["fsync"].advice


def test_shared_servers_are_not_hurt_here(server: Postgres) -> None:
    assert server is not shared(Postgres)
