"""The roles that docs/postgresql.md grants least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("asyncpg")

import asyncpg

import tenure
from tenure._backends import postgres
from tenure._backends.postgres import housekeeping
from tenure._url import Url
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import Postgres, private
from tests.stores.postgres.migrated import native, opened
from tests.stores.rights import AT_ONCE, LATER, Act, Change, Refusal, acting, ends_in_time, lead, outlasts, refused

ROLES = ("candidate", "observer", "producer", "consumer")
SENDERS = ("producer", "sender")
"""The producer of the page runs schedules, too; a ``sender`` has the block above that alone."""


def on_the_page(begin: str) -> str:
    return commands("docs/postgresql.md", "Rights", begin)


def to_send_only() -> str:
    block, and_more, _ = on_the_page("-- sends").partition("\n-- runs schedules")
    assert and_more
    return block.replace("producer", "sender")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Yield a server whose schema has the roles of the page, a queue, and a name that was led."""

    async def prepare(own: Postgres) -> None:
        await postgres.migrate(own.url)
        async with native(own.url) as connection:
            await connection.execute("".join(f"CREATE ROLE {role} LOGIN;" for role in (*ROLES, "sender")))
            for grants in (on_the_page("-- leads"), on_the_page("-- sends"), to_send_only()):
                await connection.execute(grants)
        async with acting(own.url) as owner:
            await owner.queue("orders").send_batch([tenure.Outgoing(b"first"), tenure.Outgoing(b"second")])
            [message] = await owner.queue("orders").receive()
            await message.dead_letter("bad")
            await owner.queue("payments").declare()
            await lead(owner, "led")
            await scheduled(owner, "yearly")

    with private(Postgres) as own:
        asyncio.run(prepare(own))
        yield own


async def scheduled(backend: tenure.Backend, name: str) -> None:
    """Run a schedule, which sends nothing, until it is kept."""
    stop = asyncio.Event()
    running = asyncio.create_task(backend.schedule(name, 31_536_000, queue="orders").run(stop=stop))
    await until(lambda: is_listed(backend, name))
    stop.set()
    await running


async def is_listed(backend: tenure.Backend, name: str) -> bool:
    return name in [one.name for one in await backend.schedules()]


def url_of(server: Postgres, role: str) -> str:
    return server.url.replace("postgres@", f"{role}@")


async def test_a_candidate_leads(server: Postgres) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        assert [await lead(backend, "job"), await lead(backend, "job")] == [1, 2]
        assert await backend.leaders() == {"job": None, "led": None}
        assert not await backend.election("job").ask_to_resign()
        assert (await backend.diagnose()).traits


async def test_a_candidate_fences_what_it_writes(server: Postgres) -> None:
    async with native(url_of(server, "candidate")) as connection:
        for token in (1, 2, 2):
            await connection.execute("SELECT tenure.fence('ledger', $1)", token)
        with pytest.raises(asyncpg.PostgresError, match="token 1 is too old for ledger"):
            await connection.execute("SELECT tenure.fence('ledger', 1)")


@pytest.mark.parametrize(
    "act",
    [
        lambda backend: backend.queue("orders").send(b"x"),
        lambda backend: backend.queue("orders").receive(),
        lambda backend: backend.queue("orders").peek(),
        lambda backend: backend.queue("orders").declare(lock=99),
        lambda backend: backend.queue("orders").stats(),
    ],
    ids=["send", "receive", "peek", "declare", "stats"],
)
async def test_a_candidate_has_no_right_on_queues(server: Postgres, act: Act) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        await refused(backend, act, "permission denied for table queue", "GRANT")


async def test_an_observer_sees_leaders_settings_and_numbers(server: Postgres) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.election("led").leader() is None
        assert await backend.queues() == ["orders", "payments"]
        stats = await backend.queue("orders").stats()
        assert (stats.ready, stats.dead) == (1, 1)
        assert (await backend.queue("orders").settings()).lock
        assert [one.name for one in await backend.schedules()] == ["yearly"]
        assert (await backend.diagnose()).traits


@pytest.mark.parametrize(
    ("act", "table", "error"),
    [
        (lambda backend: lead(backend, "led"), "lease", AT_ONCE),
        (lambda backend: backend.election("led").ask_to_resign(), "lease", AT_ONCE),
        (lambda backend: backend.queue("orders").send(b"x"), "message", LATER),
        (lambda backend: backend.queue("orders").receive(), "message", LATER),
        (lambda backend: backend.queue("orders").peek(), "message", LATER),
        (lambda backend: backend.queue("orders").purge(), "message", LATER),
        (lambda backend: backend.queue("orders").dead_letters.peek(), "dead", LATER),
        (lambda backend: backend.queue("orders").dead_letters.redrive(), "dead", LATER),
        (lambda backend: backend.queue("orders").dead_letters.purge(), "dead", LATER),
        (lambda backend: backend.queue("orders").declare(lock=99), "queue", AT_ONCE),
        (lambda backend: backend.queue("orders").declare(paused=True), "queue", AT_ONCE),
        (lambda backend: backend.queue("orders").delete(force=True), "queue", LATER),
        (lambda backend: backend.queue("new").send(b"x", priority=1), "queue", LATER),
        (lambda backend: backend.queue("orders").schedules.remove("yearly"), "schedule", LATER),
    ],
    ids=[
        *("lead", "resign", "send", "receive", "peek", "purge", "dead letters", "redrive", "purge dead letters"),
        *("declare", "pause", "delete", "create", "remove a schedule"),
    ],
)
async def test_an_observer_changes_nothing_and_reads_no_body(
    server: Postgres, act: Act, table: str, error: Refusal
) -> None:
    async with acting(url_of(server, "observer")) as backend:
        await refused(backend, act, f"permission denied for table {table}", "GRANT", error=error)


async def test_a_campaign_without_the_right_goes_on_if_looking_has_worked(server: Postgres) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        await refused(backend, lambda backend: lead(backend, "led"), "permission denied for table lease", error=LATER)


async def refused_in_sql(server: Postgres, role: str, statement: str) -> None:
    async with native(url_of(server, role)) as connection:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT FROM tenure.queue",
        "SELECT FROM tenure.message",
        "SELECT FROM tenure.dead",
        "SELECT FROM tenure.schedule",
        "DELETE FROM tenure.lease",
        "DELETE FROM tenure.fenced",
        "UPDATE tenure.fenced SET resource = 'x'",
        "TRUNCATE tenure.lease",
        "DELETE FROM tenure.message",
        "INSERT INTO tenure.mark (queue, kind, keys) VALUES (1, 2, '{}')",
        "UPDATE tenure.migration SET oldest = 99",
    ],
)
async def test_a_candidate_writes_nothing_but_leases_and_fences(server: Postgres, statement: str) -> None:
    await refused_in_sql(server, "candidate", statement)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT body FROM tenure.message",
        "SELECT headers FROM tenure.message",
        "SELECT id FROM tenure.message",
        "SELECT FROM tenure.dead",
        "SELECT FROM tenure.session",
        "SELECT FROM tenure.sent",
        "SELECT FROM tenure.inbox",
        "DELETE FROM tenure.message",
        "DELETE FROM tenure.lease",
        "DELETE FROM tenure.schedule",
        "DELETE FROM tenure.declared",
        "UPDATE tenure.message SET priority = 9",
        "UPDATE tenure.lease SET holder = NULL",
        "UPDATE tenure.schedule SET record = record",
        "UPDATE tenure.queue SET paused = true",
        "UPDATE tenure.migration SET oldest = 99",
        "INSERT INTO tenure.tally (queue) VALUES (1)",
        "INSERT INTO tenure.mark (queue, kind, keys) VALUES (1, 2, '{}')",
        "SELECT FROM tenure.lease FOR UPDATE",
    ],
)
async def test_an_observer_writes_nothing_and_reads_no_body_in_sql(server: Postgres, statement: str) -> None:
    await refused_in_sql(server, "observer", statement)


# --- all rights --------------------------------------------------------------------------------------------------

SENDER = {
    "migration": "SELECT",
    "queue": "SELECT",
    "declared": "SELECT",
    "message": (
        "SELECT (due_at, id, priority, seq, session, state); INSERT (body, correlation_id, due_at, enqueued_at, "
        "expires_at, headers, id, priority, queue, reply_to, session, state)"
    ),
    "sent": "SELECT; INSERT; UPDATE (until)",
    "mark": "SELECT; INSERT (keys, kind, queue)",
    "waiting": "INSERT",
    "tally": "INSERT (delayed, queue, ready)",
}
CONSUMER_WRITES = ("session", "waiting", "inbox", "extended", "mark", "tally", "delivered", "process")
RIGHTS = {
    "candidate": {
        "migration": "SELECT",
        "lease": "SELECT; INSERT; UPDATE",
        "fenced": "SELECT; INSERT; UPDATE (token)",
    },
    "observer": {
        **dict.fromkeys(("migration", "lease", "queue", "declared", "tally", "mark", "schedule"), "SELECT"),
        "message": "SELECT (due_at, enqueued_at, priority, queue, seq, session, state)",
    },
    "sender": SENDER,
    "producer": {
        **SENDER,
        "schedule": "SELECT; INSERT; UPDATE (record); DELETE",
        "tally": "SELECT; INSERT (delayed, queue, ready)",
    },
    "consumer": {
        **dict.fromkeys(("migration", "queue", "declared"), "SELECT"),
        **dict.fromkeys(CONSUMER_WRITES, "SELECT; INSERT; UPDATE; DELETE"),
        "message": "SELECT; UPDATE (deliveries, due_at, history, is_deferred, state, token); DELETE",
        "dead": "SELECT; INSERT; UPDATE (dead_at, description, due_at, history, reason, token); DELETE",
        "sent": "SELECT; UPDATE (until); DELETE",
    },
}
"""What each role may do with each table; a right to some columns names them."""

READ_RIGHTS = """
SELECT relname::text, string_agg(granted, '; ' ORDER BY place) AS rights
FROM (
    SELECT relname, place, CASE WHEN has_table_privilege($1, pg_class.oid, p) THEN p
        WHEN p NOT IN ('DELETE', 'TRUNCATE', 'TRIGGER') THEN p || ' (' || (
            SELECT string_agg(attname, ', ' ORDER BY attname COLLATE "C") FROM pg_attribute
            WHERE attrelid = pg_class.oid AND NOT attisdropped AND has_column_privilege($1, attrelid, attnum, p)
        ) || ')' END AS granted
    FROM pg_class, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER'])
        WITH ORDINALITY AS known (p, place)
    WHERE relnamespace = 'tenure'::regnamespace AND relkind IN ('r', 'v', 'm', 'f', 'p')
) AS found
WHERE granted IS NOT NULL
GROUP BY relname
"""
READ_OTHER_RIGHTS = """
SELECT p || ' ON SCHEMA' FROM unnest(ARRAY['USAGE', 'CREATE']) AS p WHERE has_schema_privilege($1, 'tenure', p)
UNION ALL SELECT p || ' ON DATABASE' FROM unnest(ARRAY['CREATE']) AS p WHERE has_database_privilege($1, 'postgres', p)
UNION ALL SELECT 'SEQUENCE ' || relname FROM pg_class WHERE relnamespace = 'tenure'::regnamespace
    AND CASE relkind WHEN 'S' THEN has_sequence_privilege($1, oid, 'USAGE, SELECT, UPDATE') END
UNION ALL SELECT 'the owner''s, by ' || proname FROM pg_proc WHERE pronamespace = 'tenure'::regnamespace AND prosecdef
UNION ALL SELECT 'CREATEROLE' FROM pg_roles WHERE rolname = $1 AND rolcreaterole
"""


@pytest.mark.parametrize("role", RIGHTS)
async def test_a_role_of_the_page_has_these_rights_and_no_other(server: Postgres, role: str) -> None:
    async with native(server.url) as owner:
        found = await owner.fetch(READ_RIGHTS, role)
        assert {row["relname"]: row["rights"] for row in found} == RIGHTS[role]
        assert [right for (right,) in await owner.fetch(READ_OTHER_RIGHTS, role)] == ["USAGE ON SCHEMA"]


MADE = ("TABLE {schema}.x ()", "FUNCTION {schema}.x() RETURNS int LANGUAGE sql AS 'SELECT 1'")


@pytest.mark.parametrize("role", ROLES)
async def test_no_role_of_the_page_makes_tables(server: Postgres, role: str) -> None:
    with pytest.raises(tenure.ConfigError, match="CREATE on the database"):
        await postgres.migrate(f"{url_of(server, role)}?schema=theirs")
    for made in MADE:
        await refused_in_sql(server, role, f"CREATE {made.format(schema='tenure')}")


async def test_nor_in_a_schema_that_the_script_has_made(server: Postgres) -> None:
    async with native(server.url) as owner:
        await owner.execute(postgres.migration_sql(Url.parse(f"{server.url}?schema=scripted"), 0))
        await owner.execute("GRANT USAGE ON SCHEMA scripted TO producer")
    for made in MADE:
        await refused_in_sql(server, "producer", f"CREATE {made.format(schema='scripted')}")


async def test_a_right_that_is_revoked_for_a_while_is_no_reason_to_give_up(server: Postgres) -> None:
    change = "UPDATE ON tenure.lease"
    async with acting(url_of(server, "candidate")) as backend, native(server.url) as connection:
        await lead(backend, "revoked")
        await connection.execute(f"REVOKE {change} FROM candidate")
        try:
            with pytest.raises(tenure.Unavailable, match="it worked before, so tenure tries again"):
                await lead(backend, "revoked")
        finally:
            await connection.execute(f"GRANT {change} TO candidate")


@asynccontextmanager
async def changing(server: Postgres) -> AsyncIterator[tuple[Change, Change]]:
    """Yield what takes the right to change leases from the candidate, and what gives it back, as is done at the end."""
    async with native(server.url) as connection:

        async def revoke() -> None:
            await connection.execute("REVOKE UPDATE ON tenure.lease FROM candidate")

        async def grant() -> None:
            await connection.execute("GRANT UPDATE ON tenure.lease TO candidate")

        try:
            yield revoke, grant
        finally:
            await grant()


async def test_a_term_outlasts_a_right_that_comes_back(server: Postgres) -> None:
    async with changing(server) as (revoke, grant):
        await outlasts(url_of(server, "candidate"), "outlasting", revoke=revoke, grant=grant)


async def test_a_term_whose_right_is_gone_ends_before_another_begins(server: Postgres) -> None:
    async with changing(server) as (revoke, _):
        await ends_in_time(url_of(server, "candidate"), server.url, "ending", revoke=revoke)


# --- sending -----------------------------------------------------------------------------------------------------

Send = Callable[[tenure.Queue], Awaitable[object]]
SENDS: dict[str, Send] = {
    "plain": lambda queue: queue.send(b"x"),
    "headers": lambda queue: queue.send(b"x", headers={"a": 1}),
    "id": lambda queue: queue.send(b"x", id="a"),
    "session": lambda queue: queue.send(b"x", session="s"),
    "priority": lambda queue: queue.send(b"x", priority=3),
    "delay": lambda queue: queue.send(b"x", delay=3600.0),
    "at": lambda queue: queue.send(b"x", at=4e9),
    "expires_in": lambda queue: queue.send(b"x", expires_in=3600.0),
    "reply_to": lambda queue: queue.send(b"x", reply_to="answers", correlation_id="c"),
    "batch": lambda queue: queue.send_batch([tenure.Outgoing(b"x")]),
    "batch of all kinds": lambda queue: queue.send_batch(
        [tenure.Outgoing(b"x", id="b", session="s", priority=1, delay=9.0, expires_in=99.0), tenure.Outgoing(b"x")]
    ),
}


async def bodies(server: Postgres, queue: str) -> list[bytes]:
    async with acting(server.url) as owner:
        return [one.body for one in await owner.queue(queue).peek()]


@pytest.mark.parametrize("role", SENDERS)
@pytest.mark.parametrize("options", ["", "?prepared=false"])
@pytest.mark.parametrize("kind", SENDS)
async def test_a_producer_sends_each_kind_of_message(server: Postgres, kind: str, options: str, role: str) -> None:
    queue = f"of {kind}{options} by the {role}"
    async with native(server.url) as owner:
        await owner.execute("SELECT tenure.declare($1)", queue)
    async with acting(url_of(server, role) + options) as backend:
        await SENDS[kind](backend.queue(queue))
    assert set(await bodies(server, queue)) == {b"x"}


@pytest.mark.parametrize("role", SENDERS)
@pytest.mark.parametrize(
    "options",
    [
        "",
        ", id => 'a'",
        ", session => 's'",
        ", priority => 3",
        ", delay => 9.0",
        ", at => now() + interval '1 hour'",
        ", expires_in => 9.0",
        """, reply_to => 'answers', correlation_id => 'c', headers => '{"a": 1}'""",
    ],
)
async def test_a_producer_sends_in_a_transaction_of_its_own(server: Postgres, options: str, role: str) -> None:
    queue = f"within a transaction{options} by the {role}"
    async with native(server.url) as owner, native(url_of(server, role)) as connection:
        await owner.execute("SELECT tenure.declare($1)", queue)
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with connection.transaction():
                await connection.execute(f"SELECT tenure.send($1, 'undone'{options})", queue)
                await connection.execute("SELECT 1 / 0")
        async with connection.transaction():
            await connection.execute(f"SELECT tenure.send($1, 'done'{options})", queue)
    assert await bodies(server, queue) == [b"done"]


@pytest.mark.parametrize(
    ("act", "table", "error"),
    [
        (lambda backend: lead(backend, "led"), "lease", AT_ONCE),
        (lambda backend: backend.election("led").ask_to_resign(), "lease", AT_ONCE),
        (lambda backend: backend.leaders(), "lease", AT_ONCE),
        (lambda backend: backend.queue("orders").receive(), "message", LATER),
        (lambda backend: backend.queue("orders").receive(2), "message", LATER),
        (lambda backend: backend.queue("orders").receive_deferred(1), "message", LATER),
        (lambda backend: backend.queue("orders").peek(), "message", AT_ONCE),
        (lambda backend: backend.queue("orders").purge(), "message", AT_ONCE),
        (lambda backend: backend.queue("orders").stats(), "message", AT_ONCE),
        (lambda backend: backend.queue("orders").session("s").__aenter__(), "message", LATER),
        (lambda backend: backend.queue("orders").dead_letters.peek(), "message", AT_ONCE),
        (lambda backend: backend.queue("orders").dead_letters.receive(), "message", LATER),
        (lambda backend: backend.queue("orders").dead_letters.redrive(), "message", AT_ONCE),
        (lambda backend: backend.queue("orders").handled("a"), "inbox", AT_ONCE),
        (lambda backend: backend.queue("orders").declare(lock=99), "queue", AT_ONCE),
        (lambda backend: backend.queue("orders").delete(force=True), "message", AT_ONCE),
        (lambda backend: backend.queue("new").send(b"x"), "queue", LATER),
    ],
    ids=[
        *("lead", "resign", "leaders", "receive", "receive two", "deferred", "peek", "purge", "stats", "session"),
        *("dead letters", "receive a dead letter", "redrive", "handled", "declare", "delete", "create"),
    ],
)
async def test_a_producer_only_sends(server: Postgres, act: Act, table: str, error: Refusal) -> None:
    async with acting(url_of(server, "producer")) as backend:
        await refused(backend, act, f"permission denied for table {table}", "GRANT", error=error)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT body FROM tenure.message",
        "SELECT headers FROM tenure.message",
        "UPDATE tenure.message SET priority = 9",
        "DELETE FROM tenure.message",
        "SELECT seq FROM tenure.message FOR UPDATE",
        "INSERT INTO tenure.message (queue, state, enqueued_at, body, history) VALUES (1, 0, 0, 'x', '[]')",
        "INSERT INTO tenure.message (queue, state, enqueued_at, body, seq) VALUES (1, 0, 0, 'x', 1)",
        "INSERT INTO tenure.message (queue, state, enqueued_at, body, token) VALUES (1, 0, 0, 'x', 1)",
        "SELECT FROM tenure.dead",
        "DELETE FROM tenure.sent",
        "UPDATE tenure.sent SET id = 'another'",
        "INSERT INTO tenure.tally (queue, locked) VALUES (1, 1)",
        "INSERT INTO tenure.tally (queue, dead) VALUES (1, 1)",
        "DELETE FROM tenure.tally",
        "UPDATE tenure.mark SET kind = 2",
        "DELETE FROM tenure.mark",
        "SELECT FROM tenure.session",
        "SELECT FROM tenure.inbox",
        "UPDATE tenure.schedule SET name = 'another'",
        "UPDATE tenure.queue SET name = 'another'",
    ],
)
async def test_a_producer_writes_nothing_but_what_sending_needs(server: Postgres, statement: str) -> None:
    await refused_in_sql(server, "producer", statement)


@pytest.mark.parametrize("count", [2**63 - 1, -(2**63)])
async def test_false_numbers_of_a_producer_harm_numbers_only(server: Postgres, count: int) -> None:
    """Also those that are too large for a sum, on a queue with limits, where claims count the locked messages."""
    name = f"counted {count}"
    async with acting(server.url) as owner, opened(server.url) as inner, native(url_of(server, "producer")) as producer:
        queue = owner.queue(name)
        await queue.declare(max_locked=2)
        await queue.send_batch([tenure.Outgoing(b"x") for _ in range(4)])
        await producer.execute(
            "INSERT INTO tenure.tally (queue, ready, delayed) "
            "SELECT id, $2, $2 FROM tenure.queue, generate_series(1, 60) WHERE name = $1",
            name,
            count,
        )
        assert await inner.broker.holding([name]) == [True]  # of many rows
        messages = await queue.receive(4)
        assert len(messages) == 2  # as max_locked says
        await inner.broker._functions.call("tidy", name)
        assert await inner.broker.holding([name]) == [count > 0]
        stats = await queue.stats()
        assert (stats.ready > 0, stats.locked, stats.delayed) == (count > 0, 2, max(count, 1 - 2**63))
        for message in messages:
            await message.complete()
        assert len(await queue.receive(4)) == 2
        assert (await queue.delete(force=True)).dead == 0
        assert "orders" in await owner.queues()


async def test_a_false_mark_of_a_producer_hides_messages_until_the_page_lowers_it(server: Postgres) -> None:
    async with acting(server.url) as owner, native(server.url) as connection:
        queue = owner.queue("hidden")
        await queue.send_batch([tenure.Outgoing(b"plain"), tenure.Outgoing(b"preferred", priority=1)])
        async with native(url_of(server, "producer")) as producer:
            await producer.execute(
                "INSERT INTO tenure.mark (queue, kind, keys) "
                "SELECT id, 2, array_fill('Infinity'::double precision, '{14}') FROM tenure.queue WHERE name = 'hidden'"
            )
        assert not await queue.receive(2)
        await connection.execute(on_the_page("INSERT INTO tenure.mark"))
        assert [one.body for one in await queue.receive(2)] == [b"preferred", b"plain"]


async def test_a_producer_runs_schedules_and_lists_them(server: Postgres) -> None:
    async with acting(url_of(server, "producer")) as backend:
        await scheduled(backend, "of the producer")
        schedules = backend.queue("orders").schedules
        await schedules.pause("of the producer")
        assert {one.name: one.paused for one in await backend.schedules()}["of the producer"]
        await schedules.remove("of the producer")
        assert not await is_listed(backend, "of the producer")


# --- consuming ---------------------------------------------------------------------------------------------------


async def test_a_consumer_receives_and_settles_in_each_way(server: Postgres) -> None:
    name = "consumed"
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        await owner.queue(name).send_batch([tenure.Outgoing(b"x", id=f"{number}") for number in range(8)])
        queue = backend.queue(name)
        [first] = await queue.receive()
        await first.renew()
        await first.complete(remember=99.0)
        with pytest.raises(tenure.LockLost):
            await first.renew()
        assert await queue.handled("0", "1") == [True, False]
        one, two, three, four, five, six, seven = await queue.receive(7)
        await one.complete()
        await two.abandon(error=ValueError("x"))
        await three.abandon(delay=3600.0)
        await four.give_back()
        await five.dead_letter("bad", error=ValueError("x"))
        await six.defer()
        await seven.defer()
        assert len(await queue.peek_deferred()) == 2
        [again] = await queue.receive_deferred(six.sequence)
        await again.complete()
        assert [one.id for one in await queue.peek()] == ["2", "3", "4", "7"]
        assert [letter.id for letter in await queue.dead_letters.peek()] == ["5"]
        for verdict in ("abandon", "dead_letter", "complete"):
            [letter] = await queue.dead_letters.receive()
            await letter.renew()
            await getattr(letter, verdict)(*["worse"] * (verdict == "dead_letter"))
        stats = await queue.stats()
        assert (stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead) == (2, 0, 1, 1, 0)


async def test_a_consumer_removes_dead_letters(server: Postgres) -> None:
    """On demand, and by itself those that are past their retention."""
    name = "removed"
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        queue, letters = owner.queue(name), backend.queue(name).dead_letters
        await queue.send_batch([tenure.Outgoing(b"x", id="a"), tenure.Outgoing(b"x", id="b")])
        for message in await queue.receive(2):
            await message.dead_letter("bad")
        assert await letters.purge(ids=["a"]) == 1
        await queue.declare(dead_retention=0.001)

    async def is_removed() -> bool:
        return not (await backend.queue(name).stats()).dead

    async with acting(url_of(server, "consumer")) as backend:
        assert not await backend.queue(name).receive()
        await until(is_removed)


async def test_a_consumer_completes_in_a_transaction_of_its_own(server: Postgres) -> None:
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        await owner.queue("own").declare(max_locked=9)
        await owner.queue("own").send_batch([tenure.Outgoing(b"x"), tenure.Outgoing(b"x", session="s")])
        [message] = await backend.queue("own").receive()
        async with native(url_of(server, "consumer")) as connection:
            await connection.execute("SELECT tenure.complete('own', $1)", message.lock_token)
        async with backend.queue("own").session() as session:
            [message] = await session.receive()
            async with native(url_of(server, "consumer")) as connection:
                await connection.execute("SELECT tenure.complete('own', $1)", message.lock_token)
        assert not (await backend.queue("own").stats()).locked


Verdict = Callable[[tenure.Message], Awaitable[object]]


@pytest.mark.parametrize(
    "act",
    [
        lambda message: message.reply(b"y"),
        lambda message: message.complete(sends=[("answers", tenure.Outgoing(b"y"))]),
    ],
    ids=["reply", "complete"],
)
async def test_a_consumer_that_replies_or_sends_needs_the_rights_of_a_producer(server: Postgres, act: Verdict) -> None:
    async with acting(server.url) as owner, native(server.url) as connection:
        await connection.execute("SELECT tenure.declare('answers')")
        await owner.queue("answers").purge()
        await owner.queue("asked").send(b"x", reply_to="answers")
        async with acting(url_of(server, "consumer")) as backend:
            [message] = await backend.queue("asked").receive()
            await refused(backend, lambda _: act(message), "permission denied for table message", "GRANT", error=LATER)
            await message.give_back()
        assert not await bodies(server, "answers")
        await connection.execute("GRANT producer TO consumer")
        try:
            async with acting(url_of(server, "consumer")) as backend:
                [message] = await backend.queue("asked").receive()
                await act(message)
        finally:
            await connection.execute("REVOKE producer FROM consumer")
        assert await bodies(server, "answers") == [b"y"]


async def test_a_consumer_has_sessions(server: Postgres) -> None:
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        await owner.queue("sessions").send_batch([tenure.Outgoing(b"x", session="s") for _ in range(2)])
        for name, state in ((None, None), ("s", b"state")):
            async with backend.queue("sessions").session(name) as session:
                assert session.state == state
                [message] = await session.receive()
                await session.set_state(b"state")
                await session.renew()
                await message.complete()
        assert not (await backend.queue("sessions").stats()).ready


async def test_a_consumer_finds_what_is_due(server: Postgres) -> None:
    """A lock that has ended, a delay, the last delivery, and the time of a message: all are applied by claims."""
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        await owner.queue("due").declare(max_deliveries=2)
        await owner.queue("due").send_batch(
            [
                tenure.Outgoing(b"x", id="locked"),
                tenure.Outgoing(b"x", id="delayed", delay=3600.0),
                tenure.Outgoing(b"x", id="expired", expires_in=3600.0, delay=99.0),
            ]
        )
        queue = backend.queue("due")
        await queue.receive()
        async with native(server.url) as connection:
            ends = "UPDATE tenure.message SET due_at = 1, expires_at = expires_at - 3600 WHERE id = $1"
            lowered = on_the_page("INSERT INTO tenure.mark")
            for one in ("locked", "delayed", "expired"):
                await connection.execute(ends, one)
            await connection.execute(lowered)
            assert {one.id for one in await queue.receive(9)} == {"locked", "delayed"}
            await connection.execute(ends, "locked")
            await connection.execute(lowered)
        assert {letter.id: letter.reason for letter in await queue.dead_letters.peek()} == {
            "locked": "max_deliveries",
            "expired": "expired",
        }


async def test_a_consumer_gives_back_what_it_has_no_answer_for(server: Postgres) -> None:
    async with acting(server.url) as owner, acting(url_of(server, "consumer")) as backend:
        await owner.queue("lost").send_batch([tenure.Outgoing(b"x"), tenure.Outgoing(b"x", session="s")])
        queue = backend.queue("lost")
        async with native(url_of(server, "consumer")) as consumer:
            [message] = await queue.receive()
            token = int(message.lock_token.partition(".")[0])
            assert await consumer.fetchval("SELECT tenure.give_back('lost', ARRAY[$1::bigint], '{9}', '{30}')", token)
            async with queue.session() as session:
                [message] = await session.receive()
                token = int(message.lock_token.partition(".")[0])
                await consumer.execute("SELECT tenure.give_back_session('lost', 's', $1, '{}')", token)
                assert (await queue.stats()).ready == 2


async def test_a_consumer_tidies_what_it_consumes(server: Postgres) -> None:
    async with acting(server.url) as owner, native(server.url) as connection:
        await owner.queue("untidy").send(b"x", id="a")
        number = await connection.fetchval("SELECT id FROM tenure.queue WHERE name = 'untidy'")
        for rows in (
            "INSERT INTO tenure.tally (queue) SELECT $1 FROM generate_series(1, 60)",
            "INSERT INTO tenure.mark (queue, kind, keys) SELECT $1, 0, array_fill(1::double precision, '{14}') "
            "FROM generate_series(1, 60)",
            "UPDATE tenure.sent SET until = 1 WHERE queue = $1",
        ):
            await connection.execute(rows, number)
        async with native(url_of(server, "consumer")) as consumer:
            await consumer.execute("SELECT tenure.tidy('untidy'), tenure.note_process(1, 'a')")
        for table, left in (("tally", 1), ("mark", 1), ("sent", 0)):
            found = await connection.fetchval(f"SELECT count(*) FROM tenure.{table} WHERE queue = $1", number)
            assert (table, found) == (table, left)


async def test_a_producer_leaves_housekeeping_to_consumers(server: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "TIDY_AFTER", 1)
    name = "left"
    await refused_in_sql(server, "producer", "SELECT tenure.tidy('orders')")
    async with native(server.url) as owner:
        await owner.execute("SELECT tenure.declare($1)", name)

        async def old_ids() -> int:
            """Wait for the housekeeping that has begun; return how many ids are left, whose time is over then."""
            await asyncio.gather(*chores)
            await owner.execute("UPDATE tenure.sent SET until = 1")
            return int(await owner.fetchval("SELECT count(*) FROM tenure.sent"))

        await owner.execute("DELETE FROM tenure.sent")
        async with opened(url_of(server, "producer")) as backend:
            for count in (1, 2):
                await backend.broker.send(name, [tenure.Outgoing(b"x", id=f"{count}")])
                chores = backend.broker._housekeeping._chores.here()
                assert chores
                assert await old_ids() == count
        async with opened(url_of(server, "consumer")) as backend:
            await backend.broker.receive(name, 2, 30.0)
            chores = backend.broker._housekeeping._chores.here()
            assert await old_ids() == 0


@pytest.mark.parametrize(
    ("act", "table", "error"),
    [
        (lambda backend: lead(backend, "led"), "lease", AT_ONCE),
        (lambda backend: backend.election("led").ask_to_resign(), "lease", AT_ONCE),
        (lambda backend: backend.leaders(), "lease", AT_ONCE),
        (lambda backend: backend.queue("orders").send(b"x"), "message", LATER),
        (lambda backend: backend.queue("orders").send(b"x", session="s"), "message", LATER),
        (lambda backend: backend.queue("orders").send(b"x", id="s"), "sent", LATER),
        (lambda backend: backend.queue("orders").dead_letters.redrive(), "message", LATER),
        (lambda backend: backend.queue("orders").dead_letters.redrive(to="payments"), "message", LATER),
        (lambda backend: backend.queue("orders").declare(lock=99), "queue", AT_ONCE),
        (lambda backend: backend.queue("orders").delete(force=True), "queue", LATER),
        (lambda backend: backend.queue("orders").schedules.list(), "schedule", AT_ONCE),
    ],
    ids=[
        *("lead", "resign", "leaders", "send", "send to a session", "send with an id", "redrive", "redrive elsewhere"),
        *("declare", "delete", "schedule"),
    ],
)
async def test_a_consumer_neither_sends_nor_leads(server: Postgres, act: Act, table: str, error: Refusal) -> None:
    async with acting(url_of(server, "consumer")) as backend:
        await refused(backend, act, f"permission denied for table {table}", "GRANT", error=error)


PAYMENTS = "(SELECT id FROM tenure.queue WHERE name = 'payments')"


@pytest.mark.parametrize("table", ["message", "dead"])
@pytest.mark.parametrize(
    "change",
    [
        "body = 'forged'",
        f"queue = {PAYMENTS}",
        "id = 'forged'",
        "seq = 1",
        "session = 'forged'",
        "headers = '{}'",
        "priority = 9",
        "enqueued_at = 0",
        "reply_to = 'forged'",
        "correlation_id = 'forged'",
        f"state = 0, body = 'forged', id = 'forged', queue = {PAYMENTS}",
    ],
)
async def test_a_consumer_forges_no_message(server: Postgres, table: str, change: str) -> None:
    if table == "dead":
        change = change.replace("state = 0", "token = 0")
    await refused_in_sql(server, "consumer", f"UPDATE tenure.{table} SET {change}")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO tenure.message (queue, state, enqueued_at, body) VALUES (1, 0, 0, 'forged')",
        "SELECT tenure.send('orders', 'forged')",
        "UPDATE tenure.message SET expires_at = 1",
        "INSERT INTO tenure.sent (queue, id, until) VALUES (1, 'forged', 4e9)",
        "UPDATE tenure.sent SET id = 'forged'",
        "UPDATE tenure.queue SET max_locked = NULL",
        "SELECT FROM tenure.queue FOR UPDATE",
        "SELECT FROM tenure.lease",
        "SELECT FROM tenure.schedule",
    ],
)
async def test_a_consumer_writes_nothing_but_what_consuming_needs(server: Postgres, statement: str) -> None:
    await refused_in_sql(server, "consumer", statement)


async def test_a_dead_letter_that_a_consumer_forges_is_sent_by_another_who_redrives_it(server: Postgres) -> None:
    """What the page warns of."""
    async with acting(server.url) as owner:
        async with native(url_of(server, "consumer")) as connection:
            await connection.execute(
                "INSERT INTO tenure.dead "
                "(seq, enqueued_at, dead_at, queue, deliveries, priority, reason, description, body) "
                f"VALUES (1000000, 1, 1, {PAYMENTS}, 1, 0, 'bad', '', 'forged')"
            )
        async with acting(url_of(server, "consumer")) as backend:
            letters = backend.queue("payments").dead_letters
            await refused(backend, lambda _: letters.redrive(), "permission denied for table message", error=LATER)
        assert not await owner.queue("payments").peek()
        await owner.queue("payments").dead_letters.redrive()
        assert [one.body for one in await owner.queue("payments").peek()] == [b"forged"]


# --- functions, and who owns them --------------------------------------------------------------------------------


async def test_each_role_needs_the_functions_where_they_were_taken_from_all(server: Postgres) -> None:
    schema = "closed"
    url = f"{{}}?schema={schema}"
    await postgres.migrate(url.format(server.url))
    async with native(server.url) as owner:
        for first in ("-- leads", "-- sends"):
            grants = on_the_page(first).replace("tenure.", f"{schema}.")
            await owner.execute(grants.replace("SCHEMA tenure", f"SCHEMA {schema}"))
        await owner.execute(f"SELECT {schema}.declare('orders')")
        await owner.execute(f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC")
        acts: dict[str, Act] = {
            "candidate": lambda backend: lead(backend, "job"),
            "producer": lambda backend: backend.queue("orders").send(b"x"),
            "consumer": lambda backend: backend.queue("orders").receive(),
            "observer": lambda backend: backend.queue("orders").stats(),
        }
        for role, act in acts.items():
            async with acting(url.format(url_of(server, role))) as backend:
                reads_first = role in ("producer", "consumer")  # the settings, without a function
                error = LATER if reads_first else AT_ONCE
                await refused(backend, act, "permission denied for function", "GRANT", error=error)
        grant = on_the_page("ALTER DEFAULT PRIVILEGES").splitlines()[-1]
        await owner.execute(grant.replace("tenure", schema).replace("worker", ", ".join(acts)))
        for role, act in acts.items():
            async with acting(url.format(url_of(server, role))) as backend:
                await act(backend)


async def test_default_privileges_hold_for_functions_that_a_migration_creates(server: Postgres) -> None:
    """And to revoke the right doesn't."""
    url = f"{url_of(server, 'keeper')}?schema=kept"
    async with native(server.url) as admin:
        await admin.execute(
            "CREATE ROLE keeper LOGIN; CREATE ROLE worker; CREATE ROLE stranger;"
            "GRANT CREATE ON DATABASE postgres TO keeper"
        )

        async def executable(role: str) -> set[str]:
            """Return the functions that *role* may execute after a migration that creates one of them."""
            await admin.execute("DROP FUNCTION kept.fence; UPDATE kept.migration SET functions = 'of another release'")
            assert (await postgres.migrate(url)).rewritten
            functions = (
                "SELECT proname::text FROM pg_proc WHERE pronamespace = 'kept'::regnamespace "
                "AND has_function_privilege($1, oid, 'EXECUTE')"
            )
            return {name for (name,) in await admin.fetch(functions, role)}

        await postgres.migrate(url)
        everything = await executable("stranger")
        assert {"fence", "send", "receive"} < everything
        await admin.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA kept FROM PUBLIC")
        assert await executable("stranger") == {"fence"}
        closed = on_the_page("ALTER DEFAULT PRIVILEGES").replace("tenure", "kept").replace("ROLE owner", "ROLE keeper")
        await admin.execute(closed)
        assert await executable("stranger") == set()
        assert await executable("worker") == everything
        await admin.execute("ALTER DEFAULT PRIVILEGES FOR ROLE keeper GRANT EXECUTE ON FUNCTIONS TO PUBLIC")
        in_schema = closed.replace("keeper REVOKE", "keeper IN SCHEMA kept REVOKE")
        await admin.execute(in_schema)
        assert await executable("stranger") == {"fence"}  # as the page says: for all schemas only


async def test_the_user_that_migrated_is_removed_once_its_tables_have_another_owner(server: Postgres) -> None:
    url = f"{server.url}?schema=given"
    async with native(server.url) as admin:
        for role in ("former", "owner", "second"):
            await admin.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE postgres TO {role}")
        await postgres.migrate(url.replace("postgres@", "former@"))
        async with acting(url.replace("postgres@", "former@")) as former:
            await former.queue("orders").send(b"kept")
            assert await lead(former, "job") == 1
        grants = on_the_page("GRANT USAGE ON SCHEMA tenure TO worker").replace("worker", "second")
        async with native(server.url.replace("postgres@", "former@")) as former:
            await former.execute(grants.replace("SCHEMA tenure", "SCHEMA given"))
        async with acting(url.replace("postgres@", "second@")) as second:
            await second.queue("orders").stats()
            await admin.execute(on_the_page("REASSIGN OWNED"))
            assert await lead(second, "job") == 2
            [message] = await second.queue("orders").receive()
            assert message.body == b"kept"
            await message.complete()
            await second.queue("orders").send(b"x", priority=1)
        await admin.execute("UPDATE given.migration SET functions = 'of another release'")
        assert (await postgres.migrate(url.replace("postgres@", "owner@"))).rewritten
        async with acting(url.replace("postgres@", "second@")) as second:
            assert len(await second.queue("orders").receive(2)) == 1


async def test_to_drop_what_the_user_that_migrated_owns_drops_the_tables(server: Postgres) -> None:
    async with native(server.url) as admin:
        await admin.execute("CREATE ROLE hasty LOGIN; GRANT CREATE ON DATABASE postgres TO hasty")
        await postgres.migrate(f"{url_of(server, 'hasty')}?schema=dropped")
        await admin.execute("DROP OWNED BY hasty; DROP ROLE hasty")
        assert await admin.fetchval("SELECT to_regclass('dropped.lease')") is None
