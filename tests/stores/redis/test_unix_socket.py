"""Redis by a Unix socket: what its addresses mean, and all that works over TCP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from redis import asyncio as aioredis

import tenure
from tenure._backends import redis
from tenure._backends.redis.address import SOCKET_BYTES, SOCKETS, Address, address_of
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tests.durations import until
from tests.explained import facts_by_name
from tests.servers import Redis, private

PASSWORD = "p/w@:#"


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """A socket with a short path, and its server, which has no port."""
    with TemporaryDirectory(prefix="tenure") as folder:
        path = Path(folder, "redis.sock")
        with private(Redis, options=(("unixsocket", str(path)), ("unixsocketperm", "700"), ("user", _USER))):
            yield path


_USER = "app on >p/w@:# ~* &* +@all"


def opened(written: str) -> redis.RedisBackend:
    return redis.open(Url.parse(written))


@pytest.mark.parametrize("scheme", sorted(SOCKETS))
def test_the_forms_of_other_clients_name_a_socket(scheme: str) -> None:
    url = Url.parse(f"{scheme}://app:p%2Fw@/run/re%20dis.sock?db=3")
    address = address_of(url, url.options(redis.Options))
    assert (address.socket, address.database, address.is_tls) == ("/run/re dis.sock", 3, False)
    assert (address.username, address.password) == ("app", Secret("p/w"))
    assert str(address) == "redis+unix:///run/re%20dis.sock?db=3"
    assert "p/w" not in f"{address!r}{url}{url!r}"
    by_options = Url.parse(f"{scheme}:///run/redis.sock?virtual_host=3&username=app&password=p%2Fw")
    assert address_of(by_options, by_options.options(redis.Options)) == Address(
        "/run/redis.sock", 0, 3, "app", Secret("p/w"), is_tls=False
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("redis+unix://run/redis.sock", "begins after three slashes"),
        ("redis+unix://localhost:6379/0", "begins after three slashes"),
        ("unix://", "can't be one of a socket"),
        ("unix:///", "can't be one of a socket"),
        ("unix:///run/", "can't be one of a socket"),
        ("unix:///run/a%00b", "can't be one of a socket"),
        (f"unix:///{'x' * SOCKET_BYTES}", f"has {SOCKET_BYTES + 1} bytes, .* at most {SOCKET_BYTES}"),
        ("unix:///run/\ud800.sock", "a character that no file can have"),
        ("unix:///run/redis.sock?cluster=true", "no socket for all its nodes"),
        ("unix:///run/redis.sock?ca=ca.pem", "doesn't use TLS; leave them out"),
        ("unix:///run/redis.sock?ssl_cert_reqs=none", "doesn't use TLS; leave them out"),
        ("unix:///run/redis.sock?db=1&virtual_host=2", "two databases, db=1 and virtual_host=2"),
        ("unix:///run/redis.sock?db=-1", "db must be the number of a database, not -1"),
        ("unix://:a@/run/redis.sock?password=b", "a login before its @, and one among its options"),
        ("redis:///run/redis.sock", r"for a Unix socket, write redis\+unix:///PATH"),
    ],
)
def test_what_names_none_is_refused(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(written)


def test_a_path_that_is_no_text_is_shown() -> None:
    url = Url.parse("unix:///run/\udcff.sock")
    assert str(address_of(url, redis.Options())) == "redis+unix:///run/%FF.sock?db=0"


async def test_elections_queues_and_hints_work(socket: Path) -> None:
    """Of two candidates and two processes' consumers; nobody waits for a period of polling."""
    url = f"unix://app:p%2Fw%40%3A%23@{socket}?db=1"
    async with (
        tenure.connect(url) as mine,
        tenure.connect(f"redis+socket://app:p%2Fw%40%3A%23@{socket}?virtual_host=1") as theirs,
    ):
        led = asyncio.Queue[int]()

        async def lead(backend: tenure.Backend, name: str) -> None:
            async with backend.election("nightly", ttl=60.0).campaign() as term:
                led.put_nowait(term.token)
                await asyncio.wait_for(asked.wait(), 60)

        asked = asyncio.Event()
        first = asyncio.create_task(lead(mine, "mine"))
        token = await asyncio.wait_for(led.get(), 30)
        second = asyncio.create_task(lead(theirs, "theirs"))
        await until(lambda: _channels(socket))
        asked.set()
        assert await asyncio.wait_for(led.get(), 30) > token  # long before the ttl is over: by a hint
        await asyncio.gather(first, second)

        received = asyncio.Queue[bytes]()

        async def handle(message: tenure.Message) -> None:
            received.put_nowait(message.body)

        consumer = asyncio.create_task(theirs.queue("orders").consume(handle))
        await until(lambda: _channels(socket))
        for number in range(3):
            await mine.queue("orders").send(f"{number}".encode())
            assert await asyncio.wait_for(received.get(), 30) == f"{number}".encode()
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)


async def _channels(socket: Path) -> int:
    """Return to how many channels there is a subscription."""
    async with aioredis.Redis.from_url(f"unix://{socket}") as client:
        return len(await client.pubsub_channels())


async def test_doctor_says_that_nothing_leaves_the_machine(socket: Path) -> None:
    backend = opened(f"redis+unix://{socket}?db=2&protocol=3")
    try:
        facts = facts_by_name(await backend.describe())
    finally:
        await backend.close()
    assert facts["server"].value == f"redis+unix://{socket}?db=2"
    assert (facts["login"].value, facts["login"].advice) == ("none, on this machine", "")
    assert (facts["TLS"].value, facts["TLS"].advice) == ("no TLS: the connection stays on this machine", "")
    assert facts["option protocol"].value == "set aside: connections speak RESP2"


async def test_a_socket_without_a_server_is_told(socket: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.sock", socket.with_name("closed.sock")):
        backend = opened(f"unix://{path}")
        try:
            with pytest.raises(Unavailable, match=r"can't be reached: .*check its unixsocket and unixsocketperm"):
                await backend.leases.inspect("nightly")
        finally:
            await backend.close()


@pytest.mark.parametrize(
    ("login", "said"),
    [("app:wrong@", "refused the login.*check user and password in the URL"), ("", "has no such database: .*slash")],
)
async def test_what_a_server_refuses_is_told_as_over_tcp(socket: Path, login: str, said: str) -> None:
    backend = opened(f"unix://{login}{socket}?db={0 if login else 99}")
    try:
        with pytest.raises(ConfigError, match=said):
            await backend.leases.inspect("nightly")
    finally:
        await backend.close()


async def test_a_socket_of_a_server_that_comes_back_is_used_again(socket: Path) -> None:
    """A client that was connected finds the new server at the same path."""
    with TemporaryDirectory(prefix="tenure") as folder:
        path = os.path.join(folder, "redis.sock")
        with private(Redis, options=(("unixsocket", path),)) as server:
            backend = opened(f"unix://{path}")
            try:
                await backend.leases.inspect("nightly")
                server.kill()
                with pytest.raises(Unavailable):
                    await backend.leases.inspect("nightly")
                server.start()
                await backend.leases.inspect("nightly")
            finally:
                await backend.close()
