"""A Redis Cluster: the slot map, read from any node, and each request sent to the right node.

House rules:

- The keys of one script are in one slot, so each script has one node. A request about several slots is sent slot by
  slot, and is not one step.
- MOVED is followed: the request was not executed. ASK is not: while a slot is being moved to another node, some of its
  keys are at each, and a script that sees half of a queue would create another one. The caller repeats the request.
- A node that can't be reached may have a successor: then the slot map is forgotten, and read again from the first node
  that answers.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from redis import asyncio as aioredis
from redis import exceptions
from redis.crc import key_slot

from tenure._backends.redis.address import Address, Endpoint, Options
from tenure._backends.redis.client import Client, cluster_code, is_other_data, without_arguments
from tenure._backends.redis.connections import LoopConnections, first_answer, is_unanswered, run_scripts
from tenure._backends.redis.scripts import Answer, Argument, Call, Script
from tenure._logins import Logins, Source
from tenure._runtime.closing import close_together
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

REDIRECTS_MAX = 4
"""How often a request is redirected before it is given up."""


class Nodes:
    """The nodes as one event loop knows them: a pool for each one in use, and the slot map."""

    def __init__(self, address: Address, options: Options, tls: ssl.SSLContext | None, logins: Logins) -> None:
        self._address = address
        self._connect = partial(LoopConnections, options=options, tls=tls, logins=logins)
        self._connections: dict[Endpoint, LoopConnections] = {}
        self._slots: dict[int, Endpoint] = {}
        self._endpoints: list[Endpoint] = [self._seed]
        self._learning = asyncio.Lock()

    def at(self, endpoint: Endpoint) -> LoopConnections:
        """Return the connections to a node."""
        connections = self._connections.get(endpoint)
        if connections is None:
            address = replace(self._address, host=endpoint[0], port=endpoint[1])
            connections = self._connections[endpoint] = self._connect(address)
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
        """Forget the slot map: a node is gone, or the cluster is down."""
        self._slots.clear()

    async def learn(self, limit: asyncio.Timeout) -> None:
        """Read the slot map from the node in the URL, or from any that had slots before."""
        async with self._learning:
            if self._slots:
                return
            # In random order: the node that answered last may be partitioned from the others, and its map outdated.
            endpoints = random.sample(self._endpoints, len(self._endpoints))
            (host, _), ranges = await first_answer(endpoints, lambda endpoint: self._read_ranges(endpoint, limit))
            self._slots = dict(_slots(ranges, host))
            self._endpoints = list({self._seed, *self.primaries()})

    async def _read_ranges(self, endpoint: Endpoint, limit: asyncio.Timeout) -> Answer:
        return await self.at(endpoint).command(limit, "CLUSTER SLOTS")

    @property
    def _seed(self) -> Endpoint:
        return self._address.host, self._address.port

    async def close(self) -> None:
        """Close every connection."""
        await close_together(*(connections.close for connections in self._connections.values()))


def _slots(ranges: Any, answered_by: str) -> Iterator[tuple[int, Endpoint]]:
    """Decode the answer to CLUSTER SLOTS from the host *answered_by*: ranges, each with its primary first."""
    for first, last, primary, *_ in ranges:
        host, port = primary[:2]
        # A node that doesn't know its own host name omits it: it is the node that has answered.
        endpoint = (host.decode() if host else answered_by, int(port))
        for slot in range(int(first), int(last) + 1):
            yield slot, endpoint


def _is_moved(answer: object) -> bool:
    return isinstance(answer, exceptions.ResponseError) and cluster_code(answer) == "MOVED"


def _moved_to(error: exceptions.ResponseError, answered_by: str) -> Endpoint:
    """Return the endpoint in MOVED SLOT HOST:PORT; without a host, it is on the host that has answered."""
    host, _, port = str(error).split()[-1].rpartition(":")
    return host or answered_by, int(port)


class ClusterClient(Client):
    """All connections to one Redis Cluster, by event loop. The URL names any node of it."""

    is_cluster = True

    def __init__(self, address: Address, options: Options, credentials: Source | None = None) -> None:
        super().__init__(address, options, credentials)
        if address.database:
            raise ConfigError(f"a Redis Cluster has database 0 only, not {address.database}; remove it from the URL")
        self._nodes: dict[asyncio.AbstractEventLoop, Nodes] = {}

    async def endpoint_of(self, channel: str) -> Endpoint | None:
        """Return the node that has the slot of *channel*, where its scripts publish."""
        slot = key_slot(channel.encode())
        return await self._send(lambda nodes, limit: nodes.of(slot, limit))

    def at(self, endpoint: Endpoint | None) -> aioredis.Redis:
        """Return the running loop's own connections to a node."""
        assert endpoint is not None
        return self._nodes_here().at(endpoint).redis

    def forget_endpoints(self) -> None:
        """Let the next request read the slot map again."""
        self._nodes_here().forget()

    async def command(self, *words: Argument) -> Answer:
        """Run a command about the key that is its second word."""
        return await self._command_at(str(words[1]), *words)

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
            answer = await self._untranslated_at(keys[0], "EVALSHA", script.sha, *rest, within=within)
        except exceptions.NoScriptError:  # it was not executed, so it can be sent again; EVAL stores it
            answer = await self._command_at(keys[0], "EVAL", script.text, *rest, within=within)
        self._permitted = True
        return answer

    async def run_all(self, calls: Sequence[Call], *, within: float | None = None) -> list[Answer | Unavailable]:
        """Run many scripts, concurrently on their nodes, and return their answers.

        The answer of a script whose node can't be reached is ``Unavailable``; it is raised if no node can be.
        """
        by_node: dict[Endpoint, list[int]] = {}

        async def sort(nodes: Nodes, limit: asyncio.Timeout) -> None:
            for number, call in enumerate(calls):
                by_node.setdefault(await nodes.of(key_slot(call.keys[0].encode()), limit), []).append(number)

        await self._send(sort, within)
        answers: list[Answer] = [None] * len(calls)

        async def run(endpoint: Endpoint, numbers: list[int]) -> None:
            async def run(nodes: Nodes, limit: asyncio.Timeout) -> list[Answer]:
                some = [calls[number] for number in numbers]
                return await nodes.at(endpoint).send(lambda redis: run_scripts(redis, some), limit)

            try:
                received = await self._send(run, within)
            except Unavailable as error:
                received = [error] * len(numbers)
            for number, answer in zip(numbers, received, strict=True):
                answers[number] = await self._final_answer(calls[number], answer, within)

        await asyncio.gather(*(run(endpoint, numbers) for endpoint, numbers in by_node.items()))
        if all(isinstance(answer, Unavailable) for answer in answers):
            raise answers[0]
        return answers

    async def run_noted(self, note: Call, call: Call, *, within: float | None = None) -> tuple[Answer, bool]:
        """Run *note*, then *call*, which has other slots; return the answer of *call*, and whether *note* was done."""
        is_noted = True
        try:
            await self.run(note.script, note.keys, *note.arguments, within=within)
        except ConfigError as error:
            if not is_other_data(error.__cause__):
                raise
            is_noted = False
        return await self.run(call.script, call.keys, *call.arguments, within=within), is_noted

    async def _final_answer(self, call: Call, answer: Answer, within: float | None) -> Answer | Unavailable:
        """Return *answer*, from a pipeline, as the answer to *call*; run *call* alone if it was not executed."""
        try:
            # The node doesn't know the script, or has the slot no longer: then it was not executed.
            if isinstance(answer, exceptions.NoScriptError) or _is_moved(answer):
                return await self.run(call.script, call.keys, *call.arguments, within=within)
            if isinstance(answer, exceptions.RedisError):
                raise self.translated(answer) from answer
        except Unavailable as error:
            return error
        return answer

    async def hosts(self) -> list[str]:
        """Return the hosts of the node in the URL and of all nodes that have slots."""
        await self._send(Nodes.learn)
        return [self.address.host, *(host for host, _ in self._nodes_here().primaries())]

    async def each_primary(self) -> list[tuple[str, Callable[..., Awaitable[Answer]]]]:
        """Return every node that has slots: its name, and a function that runs a command there."""
        await self._send(Nodes.learn)

        def commander(endpoint: Endpoint) -> Callable[..., Awaitable[Answer]]:
            async def command(*words: Argument) -> Answer:
                return await self._send(lambda nodes, limit: nodes.at(endpoint).command(limit, *words))

            return command

        return [(f"{host}:{port}", commander((host, port))) for host, port in self._nodes_here().primaries()]

    async def close(self) -> None:
        """Close every connection, on the loop that it belongs to."""
        await self._close({loop: nodes.close for loop, nodes in self._nodes.items()})
        self._nodes.clear()

    # --- requests to nodes ---

    def _nodes_here(self) -> Nodes:
        self.require_open()
        loop = asyncio.get_running_loop()
        nodes = self._nodes.get(loop)
        if nodes is None:
            for ended in [known for known in self._nodes if known.is_closed()]:
                del self._nodes[ended]
            nodes = self._nodes[loop] = Nodes(self.address, self.options, self.tls, self.logins)
        return nodes

    async def _command_at(self, key: str, *words: Argument, within: float | None = None) -> Answer:
        try:
            return await self._untranslated_at(key, *words, within=within)
        except exceptions.RedisError as error:
            raise self.translated(error) from without_arguments(error)

    async def _untranslated_at(self, key: str, *words: Argument, within: float | None = None) -> Answer:
        """Run a command on the node that has *key*; the caller handles NoScriptError."""
        slot = key_slot(key.encode())

        async def follow(nodes: Nodes, limit: asyncio.Timeout) -> Answer:
            for _ in range(REDIRECTS_MAX):
                endpoint = await nodes.of(slot, limit)
                try:
                    return await nodes.at(endpoint).command(limit, *words)
                except exceptions.NoScriptError as error:
                    return error
                except exceptions.ResponseError as error:
                    if cluster_code(error) != "MOVED":
                        raise
                    nodes.move(slot, _moved_to(error, endpoint[0]))
            raise exceptions.ClusterDownError(f"slot {slot} was redirected {REDIRECTS_MAX} times")

        answer = await self._send(follow, within)
        if isinstance(answer, exceptions.NoScriptError):
            raise answer
        return answer

    async def _send(self, request: Callable[[Nodes, asyncio.Timeout], Awaitable[T]], within: float | None = None) -> T:
        """Return the result of *request* within *within* seconds; if a node doesn't answer, forget the slot map."""
        nodes = self._nodes_here()

        async def send(limit: asyncio.Timeout) -> T:
            try:
                return await request(nodes, limit)
            except exceptions.ResponseError as error:
                if cluster_code(error) == "CLUSTERDOWN":
                    nodes.forget()
                raise
            except BaseException as error:
                if is_unanswered(error, limit):
                    nodes.forget()
                raise

        return await self._bounded(send, within)
