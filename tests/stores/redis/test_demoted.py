"""A Redis that is no primary any more, behind a proxy that goes to another one by now: the connections are replaced."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import pytest
from redis import asyncio as aioredis
from redis import exceptions

from tenure import Unavailable
from tenure._backends import redis
from tenure._backends.redis.connections import REFUSALS, is_elsewhere
from tenure._lease import Granted
from tenure._url import Url
from tests.durations import ANSWERED_WITHIN, until
from tests.servers import Redis, private

WORDS = {
    "as Redis does": b"-READONLY You can't write against a read only replica.",
    "with a prefix": b"-ERR READONLY You can't write against a read only replica.",
    "in other words": b"-ERR upstream is not primary",
    "without telling": b"-ERR denied (17)",
}


@dataclass
class Rewording:
    """A proxy of TCP to *port*, for new connections; refusals of a replica come in other *words*."""

    port: int
    words: bytes

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Yield the port on which it listens."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        down = asyncio.ensure_future(self._copy(upstream, writer, re.compile(rb"-READONLY [^\r]*")))
        await self._copy(reader, to_server, None)
        await down

    async def _copy(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, refusal: re.Pattern[bytes] | None
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                to.write(refusal.sub(self.words, data) if refusal else data)
                await to.drain()
        to.close()


async def attempts(call: Callable[[], Awaitable[object]]) -> int:
    """Return how often *call* was refused before it was answered."""
    for refused in range(REFUSALS + 1):
        try:
            await call()
        except Unavailable:
            continue
        return refused
    raise AssertionError(f"refused {REFUSALS + 1} times: the connections are still those to the replica")


@pytest.mark.parametrize("verb", ["acquire", "renew"])
@pytest.mark.parametrize("words", WORDS)
async def test_requests_reach_the_new_primary(words: str, verb: str) -> None:
    with private(Redis) as old, private(Redis) as new:
        proxy = Rewording(old.port, WORDS[words])
        async with (
            proxy.listening() as port,
            aioredis.Redis(port=new.port) as there,
            aioredis.Redis(port=old.port) as was,
        ):
            backend = redis.open(Url.parse(f"redis://127.0.0.1:{port}?timeout={ANSWERED_WITHIN}"))
            leases = backend.leases
            listening = asyncio.ensure_future(_follow(leases.hints("name")))
            try:
                await until(partial(_has_subscriber, was))
                granted = await leases.acquire("name", "holder", 30.0)  # on a connection that is kept
                assert isinstance(granted, Granted)
                proxy.port = new.port
                await was.replicaof("127.0.0.1", new.port)
                if verb == "acquire":
                    refused = await attempts(lambda: leases.acquire("name", "holder", 30.0))
                else:
                    refused = await attempts(lambda: leases.renew([granted.grant], 30.0))
                assert refused == (REFUSALS if words == "without telling" else 1)
                if words != "without telling":
                    await until(partial(_has_subscriber, there), what="a subscription at the new primary")
            finally:
                listening.cancel()
                await backend.close()


async def _has_subscriber(server: aioredis.Redis) -> bool:
    return bool(await server.pubsub_channels())


async def _follow(hints: AsyncIterator[object]) -> None:
    async for _ in hints:
        pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("READONLY You can't write against a read only replica.", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("LOADING Redis is loading the dataset in memory", True),
        ("Error running script: @user_script:1: -READONLY You can't write against a read only slave.", True),
        ("the server is not the primary", True),
        ("NOREPLICAS Not enough good replicas to write.", False),
        ("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", False),
        ("unknown command 'X', with args beginning with: 'READONLY' ", False),
        ("the field readonly is not known", False),
    ],
)
def test_what_only_the_wrong_server_says(text: str, expected: bool) -> None:
    assert is_elsewhere(exceptions.ResponseError(text)) is expected
    assert not is_elsewhere(exceptions.ConnectionError(text))
