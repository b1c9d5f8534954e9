"""Leases and queues in a Redis by its Unix socket, under the suites."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tenure._backends import redis
from tenure._url import Url
from tenure.testing.conformance import BrokerSuite, ConsumerSuite, LeaseStoreSuite
from tests.durations import ANSWERED_WITHIN
from tests.servers import Redis, shared
from tests.stores.redis.test_suites import RedisHarness, RedisQueueHarness, RedisSetup


@cache
def folder() -> Path:
    """Return a folder with a short path, for the socket: those have few bytes."""
    made = mkdtemp(prefix="tenure")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


class SocketSetup(RedisSetup):
    """A Redis for one test, by its socket; no fault can be set on that."""

    async def start(self) -> None:
        self._socket = folder() / "redis.sock"
        self._server = shared(Redis, turnable=True, options=(("unixsocket", str(self._socket)),))
        self._backends = []
        self._proxies = {}

    async def backend(self) -> redis.RedisBackend:
        backend = redis.open(Url.parse(f"redis+unix://{self._socket}?timeout={ANSWERED_WITHIN}"))
        self._backends.append(backend)
        return backend


class SocketHarness(SocketSetup, RedisHarness):
    faults = frozenset()


class SocketQueueHarness(SocketSetup, RedisQueueHarness):
    faults = frozenset()


class TestRedisSocketLeases(LeaseStoreSuite):
    harness = SocketHarness


class TestRedisSocketQueues(BrokerSuite):
    harness = SocketQueueHarness


class TestRedisSocketConsumers(ConsumerSuite):
    harness = SocketQueueHarness
