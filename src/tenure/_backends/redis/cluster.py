"""A Redis Cluster: which node has which slot, learned from any node, and each request sent to the right one.

House rules:

- The keys of one script lie in one slot, so each script has one node. A request about several slots is sent slot by
  slot, and is not one step.
- MOVED is followed: nothing was done yet. ASK is not: while a slot is being moved to another node, a part of its keys
  is here and a part is there, and a script that sees half of a queue would make another one. The caller asks again.
- A node that can't be reached may have a successor: then the map is forgotten, and learned anew from the first node
  that answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis import asyncio as aioredis
from redis import exceptions
from redis.crc import key_slot

from tenure._backends.redis.address import Address, Endpoint, Options
from tenure._backends.redis.client import Client, cluster_word
from tenure._backends.redis.connections import LoopConnections, first_answer, is_cut_off, pipelined
from tenure._backends.redis.scripts import Answer, Argument, Call, Script
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

REDIRECTS_MAX = 4
"""So often a request is redirected before it is given up."""


class Nodes:
    """The nodes as one event loop knows them: a pool for each one that was used, and which has which slot."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address = address
        self._options = options
        self._connections: dict[Endpoint, LoopConnections] = {}
        self._slots: dict[int, Endpoint] = {}
        self._endpoints: list[Endpoint] = [self._seed]
        self._learning = asyncio.Lock()

    def at(self, endpoint: Endpoint) -> LoopConnections:
        """Return the way to a node."""
        connections = self._connections.get(endpoint)
        if connections is None:
            address = replace(self._address, host=endpoint[0], port=endpoint[1])
            connections = self._connections[endpoint] = LoopConnections(address, self._options)
        return connections

    def primaries(self) -> list[Endpoint]:
        """Return the nodes that have slots, in order."""
        return sorted(set(self._slots.values()))

    async def of(self, slot: int, limit: asyncio.Timeout) -> Endpoint:
        """Return the node that has *slot*."""
        if slot not in self._slots:
            await self.learn(limit)
        try:
            return self._slots[slot]
        except KeyError:
            raise exceptions.ClusterDownError(f"no node has slot {slot}") from None

    def move(self, slot: int, endpoint: Endpoint) -> None:
        """Note that *slot* is at *endpoint* now."""
        self._slots[slot] = endpoint

    def forget(self) -> None:
        """Forget which node has which slot: a node is gone, or the cluster is down."""
        self._slots.clear()

    async def learn(self, limit: asyncio.Timeout) -> None:
        """Ask which node has which slot: the node in the URL, or any that had slots before."""
        async with self._learning:
            if self._slots:
                return
            # In random order: the node that answered last may be cut off from the others, and its map be old.
            endpoints = random.sample(self._endpoints, len(self._endpoints))
            asked, told = await first_answer(endpoints, lambda endpoint: self._tell(endpoint, limit))
            self._slots = dict(_slots(told, asked[0]))
            self._endpoints = list({self._seed, *self.primaries()})

    async def _tell(self, endpoint: Endpoint, limit: asyncio.Timeout) -> Answer:
        return await self.at(endpoint).command(limit, "CLUSTER SLOTS")

    @property
    def _seed(self) -> Endpoint:
        return self._address.host, self._address.port

    async def close(self) -> None:
        """Close every connection."""
        for connections in self._connections.values():
            await connections.close()


def _slots(told: Any, asked: str) -> Iterator[tuple[int, Endpoint]]:
    """Read the answer to CLUSTER SLOTS: ranges, each with its primary first."""
    for first, last, primary, *_ in told:
        host, port = primary[:2]
        # A node that doesn't know its own name leaves it out: it is the node that was asked.
        endpoint = (host.decode() if host else asked, int(port))
        for slot in range(int(first), int(last) + 1):
            yield slot, endpoint


def _is_moved(answer: object) -> bool:
    return isinstance(answer, exceptions.ResponseError) and cluster_word(answer) == "MOVED"


def _moved_to(error: exceptions.ResponseError, asked: str) -> Endpoint:
    """Return where a slot is: the end of MOVED SLOT HOST:PORT; without a host, it is on the one that was asked."""
    host, _, port = str(error).split()[-1].rpartition(":")
    return host or asked, int(port)


class ClusterClient(Client):
    """All connections to one Redis Cluster, by event loop. The URL names any node of it."""

    is_cluster = True

    def __init__(self, address: Address, options: Options) -> None:
        super().__init__(address, options)
        if address.database:
            raise ConfigError(f"a Redis Cluster has database 0 only, not {address.database}; leave it out of the URL")
        self._nodes: dict[asyncio.AbstractEventLoop, Nodes] = {}

    async def endpoint_of(self, channel: str) -> Endpoint | None:
        """Return the node that has the slot of *channel*, where its scripts publish."""
        slot = key_slot(channel.encode())
        return await self._ask_nodes(lambda nodes, limit: nodes.of(slot, limit))

    def at(self, endpoint: Endpoint | None) -> aioredis.Redis:
        """Return the running loop's own connections to a node."""
        assert endpoint is not None
        return self._known().at(endpoint).redis

    def forget_endpoints(self) -> None:
        """Learn anew which node has which slot."""
        self._known().forget()

    async def command(self, *words: Argument) -> Answer:
        """Run a command about the key that is its second word."""
        return await self._ask_at(str(words[1]), *words)

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        *arguments: Argument,
        within: float | None = None,
    ) -> Answer:
        """Run *script*, and return its answer."""
        rest = (len(keys), *keys, *arguments)
        try:
            answer = await self._asked_at(keys[0], "EVALSHA", script.sha, *rest, within=within)
        except exceptions.NoScriptError:  # it was not run, so it may be run now; EVAL stores it
            answer = await self._ask_at(keys[0], "EVAL", script.text, *rest, within=within)
        self._permitted = True
        return answer

    async def run_all(self, calls: Sequence[Call], *, within: float | None = None) -> list[Answer | Unavailable]:
        """Run many scripts, side by side where they lie on several nodes, and return their answers.

        A script whose node can't be asked gives ``Unavailable``; it is raised if no node can.
        """
        by_node: dict[Endpoint, list[int]] = {}

        async def sort(nodes: Nodes, limit: asyncio.Timeout) -> None:
            for number, call in enumerate(calls):
                by_node.setdefault(await nodes.of(key_slot(call.keys[0].encode()), limit), []).append(number)

        await self._ask_nodes(sort, within)
        answers: list[Answer] = [None] * len(calls)

        async def run(endpoint: Endpoint, numbers: list[int]) -> None:
            async def ask(nodes: Nodes, limit: asyncio.Timeout) -> list[Answer]:
                some = [calls[number] for number in numbers]
                return await nodes.at(endpoint).ask(lambda redis: pipelined(redis, some), limit)

            try:
                told = await self._ask_nodes(ask, within)
            except Unavailable as error:
                told = [error] * len(numbers)
            for number, answer in zip(numbers, told, strict=True):
                answers[number] = await self._own_way(calls[number], answer, within)

        await asyncio.gather(*(run(endpoint, numbers) for endpoint, numbers in by_node.items()))
        if all(isinstance(answer, Unavailable) for answer in answers):
            raise answers[0]
        return answers

    async def run_noted(self, note: Call, call: Call, *, within: float | None = None) -> tuple[Answer, bool]:
        """Run *note*, then *call*, which lies elsewhere; return the answer of *call*, and that *note* was done."""
        await self.run(note.script, note.keys, *note.arguments, within=within)
        return await self.run(call.script, call.keys, *call.arguments, within=within), True

    async def _own_way(self, call: Call, answer: Answer, within: float | None) -> Answer | Unavailable:
        """Return the answer to *call*, to which a node gave *answer* among others; run it alone if it was not run."""
        try:
            # The script is not known there, or the slot no longer there: then it was not run.
            if isinstance(answer, exceptions.NoScriptError) or _is_moved(answer):
                return await self.run(call.script, call.keys, *call.arguments, within=within)
            if isinstance(answer, exceptions.RedisError):
                raise self.translated(answer) from answer
        except Unavailable as error:
            return error
        return answer

    async def each_primary(self) -> list[tuple[str, Callable[..., Awaitable[Answer]]]]:
        """Return every node that has slots: its name, and a function that runs a command there."""
        await self._ask_nodes(Nodes.learn)

        def commander(endpoint: Endpoint) -> Callable[..., Awaitable[Answer]]:
            async def command(*words: Argument) -> Answer:
                return await self._ask_nodes(lambda nodes, limit: nodes.at(endpoint).command(limit, *words))

            return command

        return [(f"{host}:{port}", commander((host, port))) for host, port in self._known().primaries()]

    async def close(self) -> None:
        """Close every connection, on the loop that it belongs to."""
        await self._close({loop: nodes.close for loop, nodes in self._nodes.items()})
        self._nodes.clear()

    # --- the way to a node ---

    def _known(self) -> Nodes:
        self.require_open()
        loop = asyncio.get_running_loop()
        nodes = self._nodes.get(loop)
        if nodes is None:
            for ended in [known for known in self._nodes if known.is_closed()]:
                del self._nodes[ended]
            nodes = self._nodes[loop] = Nodes(self.address, self.options)
        return nodes

    async def _ask_at(self, key: str, *words: Argument, within: float | None = None) -> Answer:
        try:
            return await self._asked_at(key, *words, within=within)
        except exceptions.RedisError as error:
            raise self.translated(error) from error

    async def _asked_at(self, key: str, *words: Argument, within: float | None = None) -> Answer:
        """Run a command on the node that has *key*; NoScriptError is left to the caller."""
        slot = key_slot(key.encode())

        async def ask(nodes: Nodes, limit: asyncio.Timeout) -> Answer:
            for _ in range(REDIRECTS_MAX):
                endpoint = await nodes.of(slot, limit)
                try:
                    return await nodes.at(endpoint).command(limit, *words)
                except exceptions.NoScriptError as error:
                    return error
                except exceptions.ResponseError as error:
                    if cluster_word(error) != "MOVED":
                        raise
                    nodes.move(slot, _moved_to(error, endpoint[0]))
            raise exceptions.ClusterDownError(f"slot {slot} was sent from node to node")

        answer = await self._ask_nodes(ask, within)
        if isinstance(answer, exceptions.NoScriptError):
            raise answer
        return answer

    async def _ask_nodes(
        self, request: Callable[[Nodes, asyncio.Timeout], Awaitable[T]], within: float | None = None
    ) -> T:
        """Send a request within the time given; if a node doesn't answer, forget the map."""
        nodes = self._known()

        async def ask(limit: asyncio.Timeout) -> T:
            try:
                return await request(nodes, limit)
            except exceptions.ResponseError as error:
                if cluster_word(error) == "CLUSTERDOWN":
                    nodes.forget()
                raise
            except BaseException as error:
                if is_cut_off(error, limit):
                    nodes.forget()
                raise

        return await self._bounded(ask, within)
