"""Many names, three processes and a store, killed, stopped, cut off, restarted: never two leaders, rarely none.

The acts of leaders are recorded in a Redis without faults: every act after a ``term.check()``, in true
order, and apart from them what it accepts under a fence. ``TENURE_FULL=1`` makes it long.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import pytest
from redis import asyncio as aioredis

from tenure._backends import postgres
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Postgres, Redis, Server, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FULL = os.environ.get("TENURE_FULL", "") not in ("", "0")
# A busy machine may fail to renew a short lease, so the short run has longer ones.
ROUNDS, NAMES, TTL = (8, 50, 2.0) if FULL else (1, 20, 4.0)
PAUSE_MAX = TTL / 20  # the margin: seconds from a check to its act in which no other leader can have begun
BOUND = 60.0  # seconds in which every name is led again; long, for the machine may be busy

PROGRAM = """
import asyncio, os, sys, time, traceback
import redis.asyncio
import tenure

FENCED = '''
redis.call('RPUSH', 'acts', ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3])
if tonumber(ARGV[2]) < tonumber(redis.call('HGET', 'fence', ARGV[1]) or 0) then return 0 end
redis.call('HSET', 'fence', ARGV[1], ARGV[2])
redis.call('RPUSH', 'accepted', ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3])
return 1
'''

async def main(url, resource, names, ttl, pause_max):
    resource = redis.asyncio.Redis.from_url(resource)

    async def work(term):
        while True:
            began = time.monotonic()
            term.check()
            try:
                await resource.eval(FENCED, 0, term.name, term.token, os.getpid())
            finally:  # also after a cancellation
                if time.monotonic() - began > pause_max:
                    await resource.rpush("paused", f"{term.name} {term.token} {os.getpid()}")
            await asyncio.sleep(0.2)

    async def stand(backend, name):
        while True:  # it campaigns again after an error
            try:
                await backend.election(name, ttl=ttl).run(work)
            except tenure.TermLost:
                pass
            except Exception:
                print("UNEXPECTED", traceback.format_exc(), file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)

    async with tenure.connect(url) as backend:
        await asyncio.gather(*(stand(backend, f"name-{number}") for number in range(names)))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
"""


class Candidate:
    """A process that campaigns for every name, with its own proxy to the server."""

    def __init__(self, url: str, way: FaultProxy, resource: Redis) -> None:
        self.proxy = way
        self._url = url
        self._resource = resource
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", PROGRAM, self._url, self._resource.url, str(NAMES), str(TTL), str(PAUSE_MAX)]
        with open(self._resource.folder / "candidates.log", "ab") as log:
            return subprocess.Popen(argv, stderr=log)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.end()
        self.process = self._start()


class ElectionSetup:
    """The server, its candidates, and their acts."""

    def __init__(self, server: Server, candidates: list[Candidate], records: aioredis.Redis, seed: int) -> None:
        self.server = server
        self.candidates = candidates
        self.records = records
        self.rng = random.Random(seed)
        self.stopped: set[int] = set()

    def one(self) -> Candidate:
        return self.rng.choice(self.candidates)

    async def kill(self) -> None:
        self.one().restart()

    async def stop(self) -> None:
        process = self.one().process
        self.stopped.add(process.pid)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(TTL * 1.25)
        process.send_signal(signal.SIGCONT)

    async def black_hole(self) -> None:
        proxy = self.one().proxy
        proxy.stall()
        await asyncio.sleep(TTL * 1.25)
        proxy.heal()

    async def lose_answers(self) -> None:
        proxy = self.one().proxy
        proxy.lose_answers(by="stall")
        await asyncio.sleep(TTL * 1.25)
        proxy.heal()

    async def reset(self) -> None:
        for candidate in self.candidates:
            candidate.proxy.reset()

    async def restart(self) -> None:
        self.server.kill()
        await asyncio.sleep(self.rng.uniform(0.0, TTL))
        self.server.start()

    @property
    def faults(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [self.kill, self.stop, self.black_hole, self.lose_answers, self.reset, self.restart]

    async def all_lead(self) -> float:
        """Wait until every name has been acted for since now; return how long that took."""
        begun = time.monotonic()
        seen = await self.records.llen("acts")

        async def acted() -> bool:
            return len({act.split()[0] for act in await self.records.lrange("acts", seen, -1)}) == NAMES

        await until(acted, within=BOUND, what="every name to be led")
        return time.monotonic() - begun


@pytest.mark.parametrize("kind", [Redis, Postgres], ids=lambda kind: str(kind.__name__))
async def test_never_two_leaders_and_never_none_for_long(kind: type[Redis] | type[Postgres]) -> None:
    with private(kind) as server, private(Redis, options=[("appendonly", "no")]) as resource:
        if isinstance(server, Postgres):
            await postgres.migrate(server.url)
        proxies = [await FaultProxy("127.0.0.1", server.port).__aenter__() for _ in range(3)]
        records = aioredis.Redis.from_url(resource.url)
        urls = [f"{server.url.replace(str(server.port), str(proxy.port))}?timeout=1" for proxy in proxies]
        candidates = [Candidate(url, proxy, resource) for url, proxy in zip(urls, proxies, strict=True)]
        try:
            setup = ElectionSetup(server, candidates, records, seed=4)
            await setup.all_lead()
            for number in range(ROUNDS):
                for fault in setup.faults:
                    await fault()
                    print(f"round {number}: {fault.__name__}: all led {await setup.all_lead():.1f} s after", flush=True)
            acts = parsed(await records.lrange("acts", 0, -1))
            accepted = parsed(await records.lrange("accepted", 0, -1))
            paused = set(parsed(await records.lrange("paused", 0, -1)))
        finally:
            for candidate in candidates:
                candidate.end()
            for proxy in proxies:
                await proxy.__aexit__(None, None, None)
            await records.aclose()
            log = (resource.folder / "candidates.log").read_text()
            print(log[log.find("UNEXPECTED") :][:3_000] if "UNEXPECTED" in log else log[-3_000:])
    terms = {(name, token) for name, token, _ in acts}
    print(
        f"{len(acts)} acts in {len(terms)} terms, {len(paused)} terms with a pause; late ones of stopped processes: "
        f"{len(late(acts)) - len(late(acts, but=setup.stopped))}"
    )
    assert "UNEXPECTED" not in log
    assert late(accepted) == []
    # A process that was stopped or not scheduled between check and act can't know; the fence does.
    assert [act for act in late(acts, but=setup.stopped) if act not in paused] == []
    assert len({(name, token, pid) for name, token, pid in acts}) == len(terms)  # no token was given twice


Act = tuple[str, int, int]


def parsed(lines: Sequence[bytes | str]) -> list[Act]:
    texts = [line.decode() if isinstance(line, bytes) else line for line in lines]
    return [(name, int(token), int(pid)) for name, token, pid in (line.split() for line in texts)]


def late(acts: list[Act], but: Collection[int] = ()) -> list[Act]:
    """Return the acts of an old term after a newer one had begun to act."""
    newest: dict[str, int] = {}
    found = []
    for name, token, pid in acts:
        if token < newest.get(name, 0) and pid not in but:
            found.append((name, token, pid))
        newest[name] = max(token, newest.get(name, 0))
    return found
