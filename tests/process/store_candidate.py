"""A process that campaigns for many names on a store, or shares them as partitions, and acts for each that it has.

Started as ``python store_candidate.py URL RESOURCE NAMES TTL PAUSE_MAX elections|partitions``. RESOURCE is the URL of a
Redis, in which every act is recorded, and apart from them those that it accepts under a fence (see
``store_elections.py``). SIGTERM ends it in order.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import redis.asyncio

import tenure

ACT_EVERY = 0.2
UNEXPECTED = "UNEXPECTED"
"""Begins every error in the log that no election may raise."""

FENCED = """
local name, token, act = ARGV[1], ARGV[2], table.concat(ARGV, ' ')
redis.call('RPUSH', 'acts', act)
if tonumber(token) < tonumber(redis.call('HGET', 'fence', name) or 0) then return 0 end
redis.call('HSET', 'fence', name, token)
redis.call('HSET', 'leaders', name, act)
redis.call('HINCRBY', 'counts', name, 1)
redis.call('RPUSH', 'accepted', act)
return 1
"""


async def main(url: str, resource_url: str, names: int, ttl: float, pause_max: float, kind: str) -> None:
    resource: Any = redis.asyncio.Redis.from_url(resource_url)
    numbers = itertools.count()

    async def work(term: tenure.Term) -> None:
        while True:
            act = (term.name, term.token, os.getpid(), next(numbers))
            began = time.monotonic()
            term.check()
            try:
                await resource.eval(FENCED, 0, *act)
            finally:  # also after a cancellation
                if time.monotonic() - began > pause_max:
                    await resource.rpush("paused", " ".join(map(str, act)))
            await asyncio.sleep(ACT_EVERY)

    async def stand(run: Callable[[], Awaitable[None]]) -> None:
        while True:  # it campaigns again after an error
            try:
                return await run()
            except tenure.TermLost:
                pass
            except Exception:
                print(UNEXPECTED, traceback.format_exc(), file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)

    async with tenure.connect(url) as backend:
        if kind == "partitions":
            runs = [partial(backend.partitions("shared", names, ttl=ttl).run, work)]
        else:
            runs = [partial(backend.election(f"name-{number}", ttl=ttl).run, work) for number in range(names)]
        await asyncio.gather(*map(stand, runs))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]), sys.argv[6]))
