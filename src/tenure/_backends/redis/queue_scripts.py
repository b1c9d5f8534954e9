"""The scripts about queues, run on the keys of a queue; and the list of all queues."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tenure._backends.redis.address import escaped
from tenure._backends.redis.client import Client
from tenure._backends.redis.scripts import NOTE, QUEUES, Answer, Argument, Call, Script, scripts
from tenure._queue.checks import DEAD_SUFFIX
from tenure.errors import Unavailable

LIST_EVERY = 60.0
"""Seconds after which a queue in use is listed again: another process may have deleted it."""


class QueueScripts:
    """Runs scripts on queues, and lists each queue before it is first used."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._scripts = scripts(QUEUES, is_cluster=client.is_cluster)
        self._prefix = client.options.prefix
        self._names = f"{self._prefix}queues"
        self._listed: dict[str, float] = {}  # by queue: the time at which this process has listed it

    def base(self, queue: str) -> str:
        """Return the beginning of the keys of *queue*, which those of its dead letters share."""
        return f"{self._prefix}queue:{{{escaped(queue.removesuffix(DEAD_SUFFIX))}}}:"

    async def run(
        self, name: str, queue: str, *arguments: Argument, to: str | None = None, within: float | None = None
    ) -> Answer:
        """Run the script *name* on the keys of *queue*, and on those of the queue *to* if it is named."""
        keys = [self.base(queue)] if to is None else [self.base(queue), self.base(to)]
        return await self._client.run(self._scripts[name], keys, *arguments, within=within)

    async def run_on(self, name: str, keys: Sequence[str], *arguments: Argument, within: float | None = None) -> Answer:
        """Run the script *name* on *keys*."""
        return await self._client.run(self._scripts[name], keys, *arguments, within=within)

    async def run_on_many(self, name: str, queues: Sequence[str], most: int) -> list[list[Answer] | Unavailable]:
        """Run the script *name* on the keys of all *queues*, up to *most* at a time, in one round trip.

        In a cluster, it runs on one queue at a time, as others may be in other slots; if only some nodes can't be
        reached, the answer about a queue there is ``Unavailable``.
        """
        if self._client.is_cluster:
            most = 1
        keys = [self.base(queue) for queue in queues]
        parts = [keys[first : first + most] for first in range(0, len(keys), most)]
        return await self._client.run_all([Call(self._scripts[name], part, ()) for part in parts]) if parts else []

    def call(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Call:
        """Return the script *name* with its *keys* and *arguments*, to be run by :meth:`run_listed`."""
        return Call(self._scripts[name], keys, arguments)

    # --- the list of queues ---

    async def names(self) -> list[str]:
        """Return every name on the list, sorted."""
        return sorted(name.decode(errors="replace") for name in await self._client.command("SMEMBERS", self._names))

    async def run_listed(self, queues: set[str], note: Script, call: Call) -> Answer:
        """Run *call*; before it, run *note* to list those of *queues* that this process has not listed lately."""
        since = time.monotonic() - LIST_EVERY
        new = {queue for queue in queues if self._listed.get(queue, -math.inf) <= since}
        if not new:
            return await self._client.run(call.script, call.keys, *call.arguments)
        # The list is in another slot, so it can't be part of the script. It is written first, so that none is missing.
        answer, is_noted = await self._client.run_noted(Call(note, [self._names], sorted(new)), call)
        if is_noted:
            self._listed.update(dict.fromkeys(new, time.monotonic()))
        return answer

    async def list(self, queue: str) -> None:
        """Put *queue* on the list."""
        await self._client.run(NOTE, [self._names], queue)

    async def unlist(self, queue: str) -> None:
        """Take *queue* off the list."""
        await self._client.command("SREM", self._names, queue)

    def forget(self, queue: str) -> None:
        """Forget that *queue* was listed: it was deleted."""
        self._listed.pop(queue, None)


def is_dead(queue: str) -> bool:
    """Return whether *queue* names dead letters."""
    return queue.endswith(DEAD_SUFFIX)
