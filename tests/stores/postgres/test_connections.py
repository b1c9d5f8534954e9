"""The connections to a PostgreSQL: given up requests are cancelled; a slow or broken network recovers."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from tenure._backends import postgres
from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import REFUSED_FOR
from tenure._lease import Grant, Granted
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, Complete, Settlement
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Postgres, private, shared
from tests.servers.pgbouncer import PgBouncer
from tests.stores.postgres.migrated import Native, migrated, native, opened

TTL = 60.0


@pytest.fixture
async def server() -> Postgres:
    return await migrated(shared(Postgres))


def through(server: Postgres, proxy: FaultProxy, options: str) -> str:
    return server.url.replace(f":{server.port}/", f":{proxy.port}/") + options


async def waiting(connection: Native) -> int:
    """Count the requests that wait for locks."""
    count: int = await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    return count


class Blocked:
    """Rows that another open transaction has locked: of a lease, of a message, and of an id that is sent."""

    grant: Grant
    free: Grant
    delivery: Delivery

    def __init__(self, name: str) -> None:
        self.name = name

    async def prepare(self, backend: postgres.PostgresBackend, stranger: Native) -> None:
        for which in ("grant", "free"):
            answer = await backend.leases.acquire(f"{self.name}-{which}", "ann#1", TTL)
            assert isinstance(answer, Granted)
            setattr(self, which, answer.grant)
        await backend.leases.release(self.free)
        await backend.broker.send(self.name, [Outgoing(b"a")])
        [self.delivery] = (await backend.broker.receive(self.name, 1, TTL)).deliveries
        await stranger.execute("BEGIN")
        names = [self.grant.name, self.free.name]
        await stranger.execute("SELECT FROM tenure.lease WHERE name = ANY ($1) FOR UPDATE", names)
        await stranger.execute("SELECT FROM tenure.message WHERE seq = $1 FOR UPDATE", self.delivery.sequence)
        await stranger.execute("SELECT tenure.send($1, 'b', id => 'one')", self.name)

    async def send(self, backend: postgres.PostgresBackend, request: str) -> None:
        done = Settlement(self.delivery, Complete(sends=((self.name, Outgoing(b"c")),)))
        requests: dict[str, Callable[[], Awaitable[object]]] = {
            "acquire": lambda: backend.leases.acquire(self.free.name, "bob#1", TTL),
            "renew": lambda: backend.leases.renew([self.grant], TTL),
            "release": lambda: backend.leases.release(self.grant),
            "ask to resign": lambda: backend.leases.ask_to_resign(self.grant.name),
            "send": lambda: backend.broker.send(self.name, [Outgoing(b"b", id="one")]),
            "settle": lambda: backend.broker.settle([Settlement(self.delivery, Abandon())]),
            "settle and send": lambda: backend.broker.settle([done]),
        }
        await requests[request]()


REQUESTS = ("acquire", "renew", "release", "ask to resign", "send", "settle", "settle and send")


# --- requests that are given up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["direct", "pooled"])
async def test_the_server_gives_up_a_request_that_its_client_gives_up(server: Postgres, name: str, way: str) -> None:
    async with AsyncExitStack() as stack:
        url = server.url + "?timeout=0.2&listen=false"
        if way == "pooled":
            pooler = stack.enter_context(private(PgBouncer, of=server, size=20))
            url = pooler.url + "?timeout=60&listen=false&prepared=false"
        patient = await stack.enter_async_context(opened(server.url))
        backend = await stack.enter_async_context(opened(url))
        watch = await stack.enter_async_context(native(server.url))
        stranger = await stack.enter_async_context(native(server.url))
        blocked = Blocked(name)
        await blocked.prepare(patient, stranger)
        await until(lambda: answers(backend))
        for request in REQUESTS:
            pending = [
                asyncio.ensure_future(blocked.send(backend, request)) for _ in range(3 if way == "direct" else 1)
            ]
            if way == "pooled":  # there, a request that is cancelled before the server has begun it goes on
                await until(lambda: all_wait(watch, 1), within=60, what=request)
                pending[0].cancel()
            for answer in await asyncio.gather(*pending, return_exceptions=True):
                assert isinstance(answer, asyncio.CancelledError if way == "pooled" else Unavailable), request
            await until(lambda: no_request_waits(watch), what=request)
        await stranger.execute("ROLLBACK")
        await until(lambda: answers(backend))


async def no_request_waits(watch: Native) -> bool:
    return await all_wait(watch, 0)


async def all_wait(watch: Native, count: int) -> bool:
    return await waiting(watch) == count


async def answers(backend: postgres.PostgresBackend) -> bool:
    try:
        await backend.leases.inspect("name")
    except Unavailable:
        return False
    return True


async def test_the_server_gives_up_a_disconnected_clients_request_by_itself(server: Postgres, name: str) -> None:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(server.url) as patient,
        opened(through(server, proxy, "?timeout=2&listen=false")) as backend,
        native(server.url) as watch,
        native(server.url) as stranger,
    ):
        blocked = Blocked(name)
        await blocked.prepare(patient, stranger)
        await asyncio.gather(*(backend.leases.inspect(name) for _ in range(4)))
        pending = [asyncio.ensure_future(blocked.send(backend, request)) for request in ("acquire", "send", "settle")]

        await until(lambda: all_wait(watch, len(pending)))
        proxy.stall()  # so that no cancel request arrives
        await until(lambda: no_request_waits(watch))
        for answer in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(answer, Unavailable)


async def test_behind_a_pooler_the_server_gives_up_requests_that_wait_for_locks(server: Postgres, name: str) -> None:
    with private(PgBouncer, of=server, size=20) as pooler:
        async with (
            FaultProxy("127.0.0.1", pooler.port) as proxy,
            opened(server.url) as patient,
            opened(f"{pooler.url.replace(f':{pooler.port}/', f':{proxy.port}/')}?timeout=1&listen=false") as backend,
            native(server.url) as watch,
            native(server.url) as stranger,
        ):
            blocked = Blocked(name)
            await blocked.prepare(patient, stranger)
            await until(lambda: answers(backend))
            pending = [
                asyncio.ensure_future(blocked.send(backend, request)) for request in ("acquire", "settle and send")
            ]
            await until(lambda: all_wait(watch, len(pending)))
            proxy.stall()  # so that no cancel request arrives
            await until(lambda: no_request_waits(watch))
            for answer in await asyncio.gather(*pending, return_exceptions=True):
                assert isinstance(answer, Unavailable)


async def test_a_request_that_was_given_up_costs_no_connection(server: Postgres, name: str) -> None:
    async with (
        opened(server.url) as patient,
        opened(server.url + "?timeout=0.2&pool=1&listen=false") as backend,
        native(server.url) as stranger,
    ):
        client = backend.leases._client
        blocked = Blocked(name)
        await blocked.prepare(patient, stranger)
        await until(lambda: answers(backend))
        [[before]] = await client.fetch("SELECT pg_backend_pid()")

        async def is_back() -> bool:
            [line] = [line for (_, urgent), line in client._by_loop.items() if not urgent]
            return bool(line._idle)

        for request in ("acquire", "send", "settle"):
            with pytest.raises(Unavailable):
                await blocked.send(backend, request)
            await until(is_back)
            pending = asyncio.ensure_future(blocked.send(backend, request))
            await until(lambda: has_begun(client))
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            await until(is_back)
        [[after]] = await client.fetch("SELECT pg_backend_pid()")
        assert after == before


def has_begun(client: Client) -> bool:
    return any(line._busy for line in client._by_loop.values())


async def test_a_cancelled_request_disturbs_no_other_and_leaves_nothing_behind(server: Postgres, name: str) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with opened(server.url + "?listen=false") as backend:
        await backend.leases.inspect(name)

        async def settle() -> object:
            await backend.broker.send(name, [Outgoing(b"a")])
            [got] = (await backend.broker.receive(name, 1, TTL)).deliveries
            return await backend.broker.settle([Settlement(got, Complete(sends=((f"{name}-2", Outgoing(b"b")),)))])

        async def cancelled(request: Callable[[], Coroutine[Any, Any, object]], after: float) -> None:
            pending = asyncio.ensure_future(request())
            await asyncio.sleep(after)
            pending.cancel()
            await asyncio.wait({pending})
            assert pending.cancelled() or pending.exception() is None, pending

        for turn in range(100):
            request = settle if turn % 5 == 0 else lambda: backend.leases.inspect(name)
            await asyncio.gather(*(cancelled(request, (turn * 7 + more * 5) % 20 * 0.0002) for more in range(5)))
        await backend.leases.inspect(name)
    gc.collect()
    assert complaints == []


# --- connections that break --------------------------------------------------------------------------------------


async def test_a_connection_that_was_closed_while_idle_costs_no_answer(server: Postgres, name: str) -> None:
    async with opened(server.url + "?pool=1&listen=false") as backend, native(server.url) as stranger:
        client = backend.leases._client
        [[pid]] = await client.fetch("SELECT pg_backend_pid()")
        [line] = client._by_loop.values()
        connection: Any = line._idle[0]
        fields = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
        connection._protocol.data_received(
            b"E" + struct.pack("!i", len(fields) + 4) + fields
        )  # the client hasn't noticed the end yet
        assert not connection.is_closed()
        [[other]] = await client.fetch("SELECT pg_backend_pid()")
        assert other != pid
        await stranger.execute("SELECT pg_terminate_backend($1)", other)
        [connection] = line._idle
        await until(connection.is_closed)
        assert [tuple(row) for row in await client.fetch("SELECT 7")] == [(7,)]


async def test_a_refusal_ends_a_connection_that_is_old_only(server: Postgres) -> None:
    """One of a role that was made anew is old; a role without a right must not open a connection for each request."""
    async with opened(server.url + "?pool=1&listen=false") as backend:
        client = backend.leases._client

        async def refused_on() -> int:
            """Return the process of the server that refuses a request."""
            [[pid]] = await client.fetch("SELECT pg_backend_pid()")
            with pytest.raises(Unavailable, match="permission denied"):
                await client.fetch("DO $$BEGIN RAISE insufficient_privilege USING MESSAGE = 'permission denied'; END$$")
            return int(pid)

        first = await refused_on()
        assert await refused_on() == first
        [line] = client._by_loop.values()
        line._opened_at[line._idle[0]] -= 2 * REFUSED_FOR
        assert await refused_on() == first
        assert await refused_on() != first


class RoundTrips:
    """A relay to a proxy that counts the requests that follow an answer."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self.count = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._proxy.host, self._proxy.port)
        was_question = False

        async def one_way(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_request: bool) -> None:
            nonlocal was_question
            with suppress(ConnectionError):
                while data := await source.read(65_536):
                    self.count += is_request and not was_question
                    was_question = is_request
                    sink.write(data)
            sink.close()

        up = one_way(reader, far_writer, is_request=True)
        await asyncio.gather(up, one_way(far_reader, writer, is_request=False))


async def test_a_new_connection_answers_after_few_round_trips(server: Postgres, name: str) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        trips = RoundTrips(proxy)
        async with await asyncio.start_server(trips.carry, "127.0.0.1", 0) as relay:
            port = relay.sockets[0].getsockname()[1]
            async with opened(server.url.replace(f":{server.port}/", f":{port}/") + "?pool=1&listen=false") as backend:
                await backend.broker.send(name, [Outgoing(b"a", id="a", delay=1.0)])
                proxy.reset()
                await until(lambda: proxy.open == 0)
                before = trips.count
                await backend.broker.send(name, [Outgoing(b"b", id="b", delay=1.0)])
                assert trips.count - before <= 6  # TLS or not, login, prepare, execute; without known types, eleven


async def test_all_waiting_requests_share_one_attempt_to_connect(server: Postgres, name: str) -> None:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(through(server, proxy, "?pool=4&timeout=0.3&listen=false")) as backend,
    ):

        async def all_are_connected() -> bool:
            await asyncio.gather(*(backend.leases.inspect(name) for _ in range(20)), return_exceptions=True)
            return sum(len(line._idle) for line in backend.leases._client._by_loop.values()) == 4

        await until(all_are_connected)
        proxy.stall()
        proxy.reset()
        let_in = proxy.accepted
        for _ in range(2):
            pending = (backend.leases.inspect(name) for _ in range(20))
            got = await asyncio.gather(*pending, return_exceptions=True)
            assert all(isinstance(answer, Unavailable) for answer in got)
        assert proxy.accepted == let_in + 1
        proxy.heal()
        await until(lambda: answers(backend))


async def test_a_slow_network_recovers_after_all_connections_were_cut(server: Postgres, name: str) -> None:
    """The ratio of round trip and time-out is that of 0.4 s and 5 s, where ten seconds are two time-outs."""
    round_trip, timeout = 0.1, 1.25
    sent: list[float] = []
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(through(server, proxy, f"?timeout={timeout}&listen=false")) as backend,
    ):
        await backend.broker.send(name, [Outgoing(b"a")])

        async def send() -> None:
            while True:
                try:
                    await backend.broker.send(name, [Outgoing(b"a")])
                except Unavailable:
                    continue
                sent.append(time.monotonic())

        proxy.delay(round_trip / 2)
        senders = [asyncio.ensure_future(send()) for _ in range(20)]

        async def is_steady() -> bool:
            return sum(one > time.monotonic() - 0.5 for one in sent) >= 0.5 * 4 * 0.5 / round_trip

        await until(is_steady)
        proxy.reset()
        cut_at = time.monotonic()
        sent.clear()
        await until(is_steady)
        assert time.monotonic() - cut_at < 4 * timeout  # it takes about one; on a busy machine, more
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
