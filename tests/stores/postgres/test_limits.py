"""Limits of queues in PostgreSQL: claims that wait for each other, the log of a rate, held-up sessions, upgrades."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import asyncpg
import pytest

import tenure
from tenure._backends import postgres
from tenure._queue.broker import EVERY_LIVE, Broker, Claim, NoSession, QueueOptions, QueueSettings
from tenure._queue.limits import HELD_UP_MAX, Burst, allowed_by, noted
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Defer, Settled, Settlement
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Postgres, shared
from tests.stores.postgres.migrated import Native, migrated, native, opened

LOCK = 200.0  # by a clock that is put forward: the test's own duration must not count


@pytest.fixture
async def server() -> Postgres:
    return await migrated(shared(Postgres))


async def is_waiting(connection: Native, count: int) -> bool:
    """Return whether so many transactions wait for others."""
    return bool(await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") >= count)


@asynccontextmanager
async def claiming(connection: Native, name: str) -> AsyncIterator[None]:
    """Claim on a limited queue, as another process whose claim takes as long as the block."""
    async with connection.transaction():
        await connection.execute("SELECT tenure._lock_limits(id) FROM tenure.queue WHERE name = $1", name)
        yield


async def accepted(broker: Broker, name: str, session: str) -> SessionLock:
    held = await broker.accept(name, session, LOCK)
    assert isinstance(held, SessionLock)
    return held


async def received_in(broker: Broker, held: SessionLock, limit: int = 10) -> Claim:
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim)
    return claim


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [one.body for one in deliveries]


async def test_our_transactions_are_read_committed_whatever_is_usual(server: Postgres, name: str) -> None:
    async with native(server.url) as third:
        await third.execute(f"CREATE ROLE \"{name}\" LOGIN SUPERUSER PASSWORD 'x'")
        await third.execute(f"ALTER ROLE \"{name}\" SET default_transaction_isolation = 'repeatable read'")
        try:
            url = server.url.replace("//postgres:", f"//{name}:").replace("//postgres@", f"//{name}@")
            assert name in url
            async with native(url) as his:
                assert await his.fetchval("SHOW transaction_isolation") == "repeatable read"
            async with opened(url) as one:
                await one.broker.declare(name, {"max_locked": 1})
                await one.broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
                claim = await one.broker.receive(name, 9, LOCK)
                assert (bodies(claim.deliveries), claim.is_held_back) == ([b"a"], True)
        finally:
            await third.execute(f'DROP ROLE "{name}"')


# --- claims at the same time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["max_locked", "rate"])
@pytest.mark.parametrize(
    "ways", [("plain", "plain"), ("plain", "deferred"), ("session", "plain"), ("session", "session")]
)
async def test_claims_that_waited_for_another_bring_no_more_than_the_limit(
    server: Postgres, name: str, ways: tuple[str, str], limit: str
) -> None:
    limits: QueueOptions = {"max_locked": 3} if limit == "max_locked" else {"rate": (3, 600.0)}
    async with opened(server.url) as one, opened(server.url) as other, native(server.url) as third:
        brokers = (one.broker, other.broker)
        sessions = [Outgoing(b"s", session=session) for session in "st" for _ in range(4)]
        await one.broker.send(name, [*(Outgoing(b"x") for _ in range(8)), *sessions])
        put_aside = (await one.broker.receive(name, 4, LOCK)).deliveries
        await one.broker.settle([Settlement(each, Defer()) for each in put_aside])
        held = [await accepted(broker, name, session) for broker, session in zip(brokers, "st", strict=True)]
        await one.broker.declare(name, limits)

        async def claim(place: int) -> Claim:
            broker = brokers[place]
            if ways[place] == "session":
                return await received_in(broker, held[place], 2)
            if ways[place] == "deferred":
                return await broker.receive_deferred(name, [each.sequence for each in put_aside[:2]], LOCK)
            return await broker.receive(name, 2, LOCK)

        async with claiming(third, name):
            waiting = [asyncio.ensure_future(claim(place)) for place in (0, 1)]
            await until(lambda: is_waiting(third, 2))
            assert not any(each.done() for each in waiting)
        claims = await asyncio.gather(*waiting)
        assert sorted(len(each.deliveries) for each in claims) == [1, 2]
        assert sorted(each.is_held_back for each in claims) == [False, True]


async def test_a_login_without_rights_stops_limited_claims_and_migrations_while_it_is_connected(
    server: Postgres, name: str
) -> None:
    """Advisory locks are the database's: they need no right on the schema."""
    async with opened(server.url) as backend, native(server.url) as watch:
        await watch.execute(f'CREATE ROLE "{name}" LOGIN')
        try:
            broker = backend.broker
            await broker.declare(name, {"max_locked": 2})
            await broker.send(name, [Outgoing(b"x")])
            await broker.send(f"{name} unlimited", [Outgoing(b"y")])
            number = await watch.fetchval("SELECT id FROM tenure.queue WHERE name = $1", name)
            async with native(server.url.replace("postgres@", f"{name}@")) as outsider:
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await outsider.execute("SELECT FROM tenure.queue")
                await outsider.execute("SELECT pg_advisory_lock(hashtextextended('tenure limits tenure', $1))", number)
                await outsider.execute("SELECT pg_advisory_lock(hashtextextended('tenure migrate tenure', 0))")
                claim = asyncio.ensure_future(broker.receive(name, 1, LOCK))
                migration = asyncio.ensure_future(postgres.migrate(server.url))
                await until(lambda: is_waiting(watch, 2))
                assert bodies((await broker.receive(f"{name} unlimited", 1, LOCK)).deliveries) == [b"y"]
                assert not claim.done()
                assert not migration.done()
            assert bodies((await claim).deliveries) == [b"x"]
            assert "already" in str(await migration)
        finally:
            await watch.execute(f'DROP ROLE "{name}"')


async def test_a_claim_that_is_rolled_back_leaves_its_places_to_the_next(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend, native(server.url) as third, native(server.url) as watch:
        broker = backend.broker
        await broker.declare(name, {"max_locked": 2, "rate": (2, 600.0)})
        await broker.send(name, [Outgoing(b"x")] * 4)
        transaction = third.transaction()
        await transaction.start()
        rows = await third.fetch("SELECT seq FROM tenure.receive($1, 2, $2, 7)", name, LOCK)
        assert len([row for row in rows if row[0] is not None]) == 2
        waiting = asyncio.ensure_future(broker.receive(name, 10, LOCK))
        await until(lambda: is_waiting(watch, 1))
        await transaction.rollback()
        assert len((await waiting).deliveries) == 2


async def test_limits_that_change_while_a_claim_waits_hold_for_it(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend, opened(server.url) as other, native(server.url) as third:
        await backend.broker.declare(name, {"max_locked": 5})
        await backend.broker.send(name, [Outgoing(b"x")] * 9)
        async with claiming(third, name):
            waiting = asyncio.ensure_future(other.broker.receive(name, 10, LOCK))
            await until(lambda: is_waiting(third, 1))
            await backend.broker.declare(name, {"max_locked": 4})  # doesn't wait for the claim
        assert len((await waiting).deliveries) == 4
        async with claiming(third, name):
            waiting = asyncio.ensure_future(other.broker.receive(name, 10, LOCK))
            await until(lambda: is_waiting(third, 1))
            await backend.broker.declare(name, {"paused": True})
        claim = await waiting
        assert (len(claim.deliveries), claim.is_held_back) == (0, True)


async def test_a_session_whose_lock_ends_while_its_claim_waits_is_lapsed(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as third, native(turnable.url) as claimer:
        broker = backend.broker
        await broker.declare(name, {"max_locked": 5})
        await broker.send(name, [Outgoing(b"x", session="s")])
        held = await accepted(broker, name, "s")
        # Not by the broker: its time limit would be over, too.
        claim = "SELECT seq, deliveries FROM tenure.receive_session($1, $2, $3, 1)"
        async with claiming(third, name):
            waiting = asyncio.ensure_future(claimer.fetch(claim, name, held.session, held.token))
            await until(lambda: is_waiting(third, 1))
            turnable.turn(LOCK * 1.05)
        assert [tuple(row) for row in await waiting] == [(None, 0)]
        assert await broker.receive_session(held, 1) is LAPSED


async def test_a_queue_without_limits_waits_for_none(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend, native(server.url) as third:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"x"), Outgoing(b"x", session="s")])
        async with claiming(third, name):
            [got] = (await broker.receive(name, 9, LOCK)).deliveries
            await broker.settle([Settlement(got, Defer())])
            assert (await broker.receive_deferred(name, [got.sequence], LOCK)).deliveries
            assert (await received_in(broker, await accepted(broker, name, "s"))).deliveries
            await broker.declare(name, {"max_locked": 9})
            assert (await broker.receive(f"{name}$dead", 9, LOCK)).deliveries == ()
            assert isinstance(await broker.accept(name, None, LOCK), NoSession)


async def test_a_claim_with_limits_is_refused_where_it_would_not_see_others(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend, native(server.url) as third:
        await backend.broker.send(name, [Outgoing(b"x")] * 3)
        claim = "SELECT count(seq) FROM tenure.receive($1, 1, 60, 7)"
        async with third.transaction(isolation="repeatable_read"):
            assert await third.fetchval(claim, name) == 1
        await backend.broker.declare(name, {"max_locked": 5})
        with pytest.raises(asyncpg.PostgresError, match="needs the isolation level READ COMMITTED"):
            async with third.transaction(isolation="repeatable_read"):
                await third.fetchval(claim, name)


# --- places ------------------------------------------------------------------------------------------------------


async def test_a_claim_whose_answer_was_lost_frees_its_places_and_counts_for_the_rate(
    server: Postgres, name: str
) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(server.url) as other:
        through = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        async with opened(f"{through}?pool=1&timeout=5&listen=false") as backend:
            broker = backend.broker
            await broker.declare(name, {"max_locked": 2, "rate": (5, 600.0)})
            await broker.send(name, [Outgoing(b"1"), Outgoing(b"2"), Outgoing(b"3")])
            await broker.receive(name, 0, LOCK)
            await until(lambda: not any(task.get_name().startswith("tenure-postgres") for task in asyncio.all_tasks()))
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await broker.receive(name, 2, LOCK)
            proxy.heal()
            assert not (await other.broker.receive(name, 2, LOCK)).deliveries  # they are still locked

            claims: list[Claim] = []

            async def has_claimed() -> bool:
                with suppress(Unavailable):
                    claims.append(await broker.receive(name, 1, LOCK))
                return bool(claims)

            await until(has_claimed)
            [claim] = claims
            assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"1", 1)]
            assert bodies((await other.broker.receive(name, 9, LOCK)).deliveries) == [b"2"]
            await broker.settle([Settlement(claim.deliveries[0], COMPLETE)])
            assert bodies((await other.broker.receive(name, 9, LOCK)).deliveries) == [b"3"]  # the fifth of the rate
            log = "SELECT sum(number) FROM tenure.delivered JOIN tenure.queue ON id = queue WHERE name = $1"
            async with native(server.url) as connection:
                assert await connection.fetchval(log, name) == 5


async def test_locks_that_were_extended_beside_a_transaction_keep_their_places(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as third:
        broker = backend.broker
        await broker.declare(name, {"max_locked": 1})
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2")])
        [got] = (await broker.receive(name, 2, LOCK)).deliveries
        async with third.transaction():
            await third.execute("SELECT FROM tenure.message WHERE seq = $1 FOR UPDATE", got.sequence)
            await broker.renew([got], LOCK * 2)
        turnable.turn(LOCK * 1.5)
        assert not (await broker.receive(name, 2, LOCK)).deliveries
        assert await broker.settle([Settlement(got, COMPLETE)]) == [Settled()]
        assert bodies((await broker.receive(name, 2, LOCK)).deliveries) == [b"2"]


async def test_completing_in_a_transaction_of_ones_own_frees_a_place_and_gives_a_hint(
    server: Postgres, name: str
) -> None:
    async with opened(server.url) as backend, native(server.url) as user:
        broker = backend.broker
        await broker.declare(name, {"max_locked": 1})
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2")])
        hints = broker.hints(name)
        await anext(hints)
        [got] = (await broker.receive(name, 2, LOCK)).deliveries
        while True:  # those of the declaration and of the messages
            try:
                await asyncio.wait_for(anext(hints), 0.3)
            except TimeoutError:
                hints = broker.hints(name)
                break
        hint = asyncio.ensure_future(anext(hints))
        async with user.transaction():
            await user.execute("SELECT tenure.complete($1, $2)", name, f"{got.token}.{got.sequence}")
            assert not (await broker.receive(name, 2, LOCK)).deliveries
        await asyncio.wait_for(hint, 20)
        assert bodies((await broker.receive(name, 2, LOCK)).deliveries) == [b"2"]


# --- rates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_the_log_of_a_rate_is_kept_as_the_rules_say(server: Postgres, name: str, seed: int) -> None:
    rng = random.Random(seed)
    rate, now = (rng.randrange(1, 30), rng.choice([1.0, 64.0])), 1e9
    log: list[Burst] = []
    async with opened(server.url) as backend, native(server.url) as connection:
        await backend.broker.declare(name, {"rate": rate, "session_rate": rate})
        number = await connection.fetchval("SELECT id FROM tenure.queue WHERE name = $1", name)
        asked = "SELECT most, free_at FROM tenure._session_allowance($1, 's', $2)"
        plain = "SELECT most, free_at FROM tenure._allowance($1, $2)"
        for step in range(150):
            now += rng.choice([0.0, rate[1] / 200, rate[1] / 70, rate[1] / 9]) * rng.random()
            if step == 100:
                rate = (max(1, rate[0] // 3), rate[1] / 2)
                await backend.broker.declare(name, {"rate": rate, "session_rate": rate})
            expected = allowed_by(rate, log, now)
            for statement in (asked, plain):
                [[most, free_at]] = await connection.fetch(statement, number, now)
                assert most == expected.most
                assert (free_at is None) == (expected.free_in is None)
                if expected.free_in is not None:
                    assert free_at - now == pytest.approx(expected.free_in, abs=1e-5)
            if expected.most:
                count = rng.randrange(1, int(expected.most) + 1)
                log = noted(rate, log, now, count)
                await connection.execute("SELECT tenure._note_delivered($1, 's', $2, $3)", number, now, count)
        rows = await connection.fetch(
            "SELECT scope, count(*) FROM tenure.delivered WHERE queue = $1 GROUP BY 1", number
        )
        assert {row[0] for row in rows} == {"", "=s"}


async def test_deliveries_of_a_clock_that_was_set_back_count_no_longer_than_others(
    turnable: Postgres, name: str
) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.declare(name, {"rate": (1, LOCK)})
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2")])
        assert (await broker.receive(name, 2, LOCK * 9)).deliveries
        await connection.execute(
            "UPDATE tenure.delivered SET began = began + 1e6, at = at + 1e6 "
            "FROM tenure.queue WHERE id = queue AND name = $1",
            name,
        )
        claim = await broker.receive(name, 2, LOCK * 9)
        assert not claim.deliveries
        assert claim.due_in is not None
        assert LOCK * 0.9 < claim.due_in <= LOCK
        turnable.turn(LOCK * 1.01)
        assert bodies((await broker.receive(name, 2, LOCK)).deliveries) == [b"2"]


async def test_what_was_delivered_is_forgotten_when_it_is_over(turnable: Postgres, name: str) -> None:
    left = "SELECT scope FROM tenure.delivered JOIN tenure.queue ON id = queue WHERE name = $1 ORDER BY scope"
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker

        async def logs() -> list[str]:
            return [row[0] for row in await connection.fetch(left, name)]

        await broker.declare(name, {"rate": (9, LOCK * 2), "session_rate": (9, LOCK)})
        await broker.send(name, [Outgoing(b"x", session="s"), Outgoing(b"x")])
        await received_in(broker, await accepted(broker, name, "s"))
        await broker.receive(name, 1, LOCK)
        await broker._housekeeping._tidy(name)
        assert await logs() == ["", "=s"]
        turnable.turn(LOCK * 2.05)
        await broker._housekeeping._tidy(name)
        assert await logs() == []
        await broker.receive(name, 1, LOCK)
        assert await logs() == [""]
        await broker.delete(name, force=True)
        assert await logs() == []


# --- sessions ----------------------------------------------------------------------------------------------------


async def test_a_message_that_is_held_up_was_not_delivered(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend:
        broker = backend.broker
        await broker.declare(name, {"session_rate": (1, LOCK)})
        await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s"), Outgoing(b"3", session="s")])
        held = await accepted(broker, name, "s")
        claim = await received_in(broker, held)
        assert bodies(claim.deliveries) == [b"1"]
        seen = await broker.peek(name, EVERY_LIVE, 10)
        assert [(one.state, one.delivery_count) for one in seen] == [("locked", 1), ("delayed", 0), ("ready", 0)]
        stats = await broker.stats(name)
        assert (stats.ready, stats.locked, stats.delayed) == (1, 1, 1)
        await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
        assert not (await received_in(broker, held)).deliveries
        await broker.release(held)
        none = await broker.accept(name, None, LOCK)
        assert isinstance(none, NoSession)
        assert none.due_in is not None
        assert 0.9 * HELD_UP_MAX < none.due_in <= HELD_UP_MAX
        turnable.turn(LOCK * 1.01)
        answer = await broker.accept(name, None, LOCK)
        assert isinstance(answer, SessionLock)
        assert [(one.body, one.delivery_count) for one in (await received_in(broker, answer)).deliveries] == [(b"2", 1)]


async def test_a_message_that_is_held_up_expires_undelivered(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend:
        broker = backend.broker
        await broker.declare(name, {"session_rate": (1, LOCK * 2)})
        sent = [Outgoing(b"1", session="s"), Outgoing(b"2", session="s", expires_in=LOCK), Outgoing(b"3", session="s")]
        await broker.send(name, sent)
        held = await accepted(broker, name, "s")
        [got] = (await received_in(broker, held)).deliveries
        await broker.settle([Settlement(got, COMPLETE)])
        await broker.release(held)
        turnable.turn(LOCK * 1.01)
        held = await accepted(broker, name, "s")
        claim = await received_in(broker, held)
        assert (bodies(claim.deliveries), claim.is_held_back) == ([], True)
        assert [(one.reason, one.delivery_count) for one in claim.died] == [("expired", 0)]
        [dead] = (await broker.receive(f"{name}$dead", 9, LOCK)).deliveries
        assert (dead.body, dead.delivery_count) == (b"2", 0)
        turnable.turn(LOCK * 1.01)
        held = await accepted(broker, name, "s")
        assert bodies((await received_in(broker, held)).deliveries) == [b"3"]


async def test_a_rate_of_sessions_alone_keeps_no_other_claim_back(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend:
        broker = backend.broker
        await broker.declare(name, {"session_rate": (1, 600.0)})
        await broker.send(name, [Outgoing(b"x")] * 2)
        claim = await broker.receive(name, 9, LOCK)
        assert (len(claim.deliveries), claim.is_limited, claim.is_held_back) == (2, True, False)
        await broker.settle([Settlement(one, Defer()) for one in claim.deliveries])
        again = await broker.receive_deferred(name, [one.sequence for one in claim.deliveries], LOCK)
        assert (len(again.deliveries), again.is_limited, again.is_held_back) == (2, True, False)
        full = await broker.receive(name, 0, LOCK)
        assert (full.is_limited, full.is_held_back) == (True, False)


async def test_a_session_that_is_held_back_is_accepted_when_there_is_a_place(server: Postgres, name: str) -> None:
    async with opened(server.url) as backend:
        broker = backend.broker
        await broker.declare(name, {"max_locked": 1})
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2", session="s"), Outgoing(b"3", session="t")])
        [got] = (await broker.receive(name, 1, LOCK)).deliveries
        for _ in range(3):  # it is offered again each time
            none = await broker.accept(name, None, LOCK)
            assert isinstance(none, NoSession)
            assert none.is_held_back
            assert none.due_in is not None
            assert none.due_in > LOCK / 2
        await broker.settle([Settlement(got, COMPLETE)])
        held = await broker.accept(name, None, LOCK)
        assert isinstance(held, SessionLock)
        assert held.session == "s"


# --- upgrades ----------------------------------------------------------------------------------------------------


async def test_limits_come_with_an_upgrade_and_older_clients_go_on(server: Postgres, name: str) -> None:
    url = f"{server.url}?schema=sixth"
    await postgres.migrate(url, to=6)
    async with native(server.url) as connection:
        await connection.execute(
            "CREATE ROLE sixth LOGIN; GRANT USAGE ON SCHEMA sixth TO sixth;"
            "GRANT SELECT ON sixth.migration, sixth.queue, sixth.declared TO sixth;"
            "GRANT SELECT, UPDATE, DELETE ON sixth.message, sixth.sent TO sixth;"
            "GRANT SELECT, INSERT, UPDATE, DELETE ON sixth.dead, sixth.session, sixth.waiting, sixth.inbox, "
            "sixth.extended, sixth.mark, sixth.tally TO sixth"
        )
        await postgres.migrate(url)
        older = "SELECT * FROM sixth.declare_settings($1, $2, false, 9, 10, 600, 1000, 'infinity')"
        row = await connection.fetchrow(older, name, ["lock"])
        assert tuple(row or ()) == (9.0, 10, 600.0, 1_048_576, float("inf"))
        async with opened(url) as backend, opened(url.replace("postgres@", "sixth@")) as consumer:
            limits: QueueOptions = {"max_locked": 2, "rate": (3, 600.0), "session_rate": (2, 600.0)}
            holds = QueueSettings(lock=9.0, max_locked=2, rate=(3, 600.0), session_rate=(2, 600.0))
            assert await backend.broker.declare(name, limits) == holds
            row = await connection.fetchrow(older, name, ["max_deliveries"])
            assert await backend.broker.settings(name) == holds  # an older client changes no limits
            await backend.broker.send(name, [Outgoing(b"x")] * 5)
            got = (await consumer.broker.receive(name, 9, LOCK)).deliveries
            assert len(got) == 2
            numbers, tokens = [one.sequence for one in got], [got[0].token, 7]
            done = await connection.fetchval("SELECT sixth.complete_many($1, $2, $3)", name, numbers, tokens)
            assert done == numbers[:1]  # an older client compares the length, too


async def test_several_consumers_know_of_a_session_that_is_held_back(server: Postgres, name: str) -> None:
    """A look of one of them hides the session from no other: else some would end, as if the queue were empty."""
    ended: list[float] = []
    handled: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    async def consume() -> None:
        async with tenure.connect(server.url) as backend:
            await backend.queue(name).consume(handle, sessions=True, until_empty=True)
        ended.append(time.monotonic())

    async with tenure.connect(server.url) as backend:
        queue = backend.queue(name, rate=(1, 2.0))
        await queue.send_batch([tenure.Outgoing(b"first"), tenure.Outgoing(b"x", session="s")])
        [first] = await queue.receive()
        began = time.monotonic()
        await asyncio.gather(*(consume() for _ in range(4)))
        await first.complete()
    assert handled == [b"x"]
    assert min(ended) > began + 1.5
