"""Behind sentinels: requests go to the primary that they name, also after a failover; errors about wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import asyncio as aioredis

import tenure
from tenure._backends import redis
from tenure._backends.redis.sentinel import SentinelOptions, primary_of
from tenure._lease import Granted
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tests.durations import stretched
from tests.explained import facts_by_name
from tests.servers import Authority, Redis, free_port, private, shared
from tests.servers.redis_sentinel import Sentinel

TTL = 60.0
SECRET = "s3cret"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[redis.RedisBackend]:
    backend = redis.open(Url.parse(url))
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture(scope="module")
def sentinel() -> Iterator[Sentinel]:
    """A sentinel with a password, over a primary that stays."""
    with private(Sentinel, watches=shared(Redis).port, password=SECRET) as sentinel:
        yield sentinel


async def test_a_user_of_the_sentinels_needs_one_right(sentinel: Sentinel) -> None:
    url = f"{sentinel.url}?sentinel_user=looks&sentinel_password=hush"
    async with aioredis.Redis(port=sentinel.port, password=SECRET) as client:
        for right, is_enough in (("-sentinel", False), ("+sentinel", True)):
            rights = ["on", ">hush", "-@all", right]
            await client.execute_command("ACL", "SETUSER", "looks", "reset", *rights)  # type: ignore[no-untyped-call]
            async with opened(url) as backend:
                if is_enough:
                    assert await backend.leases.names() is not None
                else:
                    with pytest.raises(tenure.ConfigError, match=r"grant it \+sentinel"):
                        await backend.leases.names()


@pytest.mark.parametrize("speech", ["plain", "tls"])
async def test_after_a_failover_requests_go_to_the_new_primary(speech: str) -> None:
    authority = Authority() if speech == "tls" else None
    trusting: dict[str, Any] = {"ssl_ca_certs": str(authority.certificate)} if authority else {}
    trusted = f"&ca={authority.certificate}" if authority else ""
    options = [("masterauth", SECRET)]
    handled: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    with (
        private(Redis, password=SECRET, options=options, authority=authority) as first,
        private(
            Redis,
            password=SECRET,
            options=[*options, ("replicaof", f"127.0.0.1 {first.port}")],
            authority=authority,
        ) as second,
    ):
        async with aioredis.Redis.from_url(second.url, **trusting) as replica:

            async def is_linked() -> bool:
                return bool((await replica.info("replication"))["master_link_status"] == "up")

            await until(is_linked, within=60)
            with private(Sentinel, watches=first.port, primary_password=SECRET, authority=authority) as sentinel:
                # The first of them is not there.
                places = f"127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}"
                scheme, _, _ = sentinel.url.partition(":")
                url = f"{scheme}://:{SECRET}@{places}/mymaster?timeout={stretched(2.0)}{trusted}"
                async with opened(url) as backend, tenure.connect(url) as waiting:
                    answer = await backend.leases.acquire("name", "ann#1", TTL)
                    assert isinstance(answer, Granted)
                    grant = answer.grant
                    await backend.broker.send("queue", [Outgoing(b"before")])
                    queue = waiting.queue("waited-for")
                    consuming = asyncio.ensure_future(queue.consume(handle, poll_every=3_600.0))
                    await backend.broker.send("waited-for", [Outgoing(b"before")])
                    await until(lambda: handled == [b"before"])

                    async def is_copied() -> bool:
                        return bool(await replica.zcard("tenure:queue:{queue}:ready"))

                    await until(is_copied)
                    first.kill()
                    with pytest.raises(Unavailable):
                        await backend.leases.renew([grant], TTL)

                    async def is_renewed() -> bool:
                        try:
                            return list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
                        except Unavailable:
                            return False

                    await until(is_renewed, within=60)
                    await backend.broker.send("queue", [Outgoing(b"after")])
                    claim = await backend.broker.receive("queue", 10, TTL)
                    assert [one.body for one in claim.deliveries] == [b"before", b"after"]
                    assert await backend.broker.stats("queue") == Stats(locked=2)
                    # A consumer that waits, and polls only once an hour, gets a hint from the new primary.
                    for number in (b"1", b"2"):
                        await backend.broker.send("waited-for", [Outgoing(number)])
                        await until(lambda number=number: handled[-1] == number, within=30)  # type: ignore[misc]
                    await queue.drain()
                    await consuming
                async with aioredis.Redis.from_url(second.url, **trusting) as promoted:
                    assert await promoted.zcard("tenure:queue:{queue}:locked") == 2


async def test_certificates_are_checked_at_the_sentinels_and_at_the_primary() -> None:
    right, wrong = Authority(), Authority("another")
    with (
        private(Redis, authority=right) as primary,
        private(Sentinel, watches=primary.port, authority=right) as sentinel,
        private(Sentinel, watches=primary.port) as plain,
    ):
        for at, more in ((sentinel, ""), (plain, "&sentinel_tls=false")):
            url = at.url.replace("redis+", "rediss+")
            async with opened(f"{url}?ca={right.certificate}{more}") as backend:
                assert await backend.leases.names() == []
                facts = facts_by_name(await backend.describe())
                assert str(right.certificate) in facts["TLS"].value
                assert facts["TLS of sentinels"].value.startswith(
                    "no TLS: " if more else "TLS; the server's certificate"
                )
            async with opened(f"{url}?ca={wrong.certificate}{more}") as backend:
                with pytest.raises(ConfigError, match="certificate is not trusted"):
                    await backend.leases.names()
                try:
                    raise LookupError
                except LookupError:  # a caller that handles another error gets the same
                    with pytest.raises(ConfigError, match="certificate is not trusted"):
                        await backend.leases.names()
        async with opened(f"{sentinel.url}?ca={right.certificate}&sentinel_tls=false") as backend:
            with pytest.raises(Unavailable, match="does not use it"):
                await backend.leases.names()
        async with opened(f"{plain.url}?timeout=1") as backend:
            with pytest.raises(Unavailable):
                await backend.leases.names()


async def test_the_login_at_the_sentinels_may_differ_from_that_at_the_primary(sentinel: Sentinel) -> None:
    async with opened(f"{sentinel.url}?sentinel_password={SECRET}") as backend:
        assert await backend.leases.names() is not None
        facts = {fact.name: fact.value for fact in await backend.describe()}
        assert facts["server"] == sentinel.url
    async with opened(sentinel.url) as backend:
        with pytest.raises(ConfigError, match="sentinel_password"):
            await backend.leases.names()


async def test_live_messages_are_peeked_at_and_purged(sentinel: Sentinel) -> None:
    async with tenure.connect(f"{sentinel.url}?sentinel_password={SECRET}") as backend:
        queue = backend.queue("looked-into")
        await queue.send_batch([tenure.Outgoing(b"%d" % number, delay=60.0 * (number % 2)) for number in range(4)])
        assert [one.state for one in await queue.peek()] == ["ready", "delayed"] * 2
        assert await queue.purge(states=["delayed"]) == 2
        [letter, _] = await queue.receive(2)
        await letter.dead_letter("bad")
        assert await queue.dead_letters.redrive(to="looked-into-later") == 1
        assert [one.id for one in await backend.queue("looked-into-later").peek()] == [letter.id]
        for name in ("looked-into", "looked-into-later"):
            await backend.queue(name).delete(force=True)


async def test_a_service_that_no_sentinel_knows_is_reported(sentinel: Sentinel) -> None:
    async with opened(f"{sentinel.url}r?sentinel_password={SECRET}") as backend:
        with pytest.raises(ConfigError, match="knows no service 'mymasterr'"):
            await backend.leases.names()


async def test_unreachable_sentinels_are_unavailable() -> None:
    async with opened(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/mymaster") as backend:
        with pytest.raises(
            Unavailable,
            match=r"every sentinel of .* can.t be reached.*Connection refused; check host and port, and whether a",
        ):
            await backend.leases.names()


async def test_a_server_that_is_no_sentinel_is_reported() -> None:
    async with opened(f"redis+sentinel://127.0.0.1:{shared(Redis).port}/mymaster") as backend:
        with pytest.raises(ConfigError, match="no sentinel"):
            await backend.leases.names()


def test_an_address_is_taken_apart() -> None:
    url = Url.parse(f"redis+sentinel://us%40er:p%2Fw@a,b:7000,[::1]:7001/orders?db=3&sentinel_password={SECRET}")
    address = primary_of(url, url.options(SentinelOptions))
    assert address.service.sentinels == (("a", 26379), ("b", 7000), ("::1", 7001))
    assert (address.service.name, address.database) == ("orders", 3)
    assert (address.username, address.password) == ("us@er", Secret("p/w"))
    assert (address.service.at_sentinels.username, address.service.at_sentinels.password) == (None, Secret(SECRET))
    shown = str(address) + repr(address) + str(url)
    assert "p/w" not in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("redis+sentinel:///orders", "names no host"),
        ("redis+sentinel://a:b:c/orders", "no host:port"),
        ("redis+sentinel://a:70000/orders", "no host:port"),
        ("redis+sentinel://a", "no service"),
        ("redis+sentinel://a/orders/0", "no service"),
        ("redis+sentinel://a/orders?cluster=true", "cluster"),
        ("redis+sentinel://a/orders?ca=/dev/null", "doesn't use TLS; write rediss"),
        ("rediss+sentinel://a/orders?ca=/no/such/file", "can't be read"),
        ("redis+sentinel://a/orders?db=-1", "db"),
        ("redis+sentinel://a/orders?timeout=0", "timeout"),
    ],
)
def test_a_wrong_address_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        redis.open(Url.parse(wrong))
