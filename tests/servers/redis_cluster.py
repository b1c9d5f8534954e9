"""A Redis Cluster of three, each with a third of the slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import ClassVar, Self

from redis import Redis as Plain
from redis import exceptions
from redis.crc import key_slot

from scripts.servers import faketime
from tests.servers.process import START_MAX, free_port
from tests.servers.redis import Redis

SLOTS = 16_384
NODE_TIMEOUT = 86_400.0
"""Long, because the machine may be busy and the clocks may jump: no node is to be considered dead."""
SILENT = 0.6 * NODE_TIMEOUT
"""Seconds without a message after which a node pings another one, and so learns its slots."""
STARTING = 2.5
"""Seconds for which a started node refuses requests, and a margin."""
THIRDS = [(0, 5_460), (5_461, 10_922), (10_923, SLOTS - 1)]


class RedisCluster:
    """Three servers under one name.

    Args:
        turnable: Whether a test puts their clocks forward, all by the same. Where that is possible, each start does it,
            too, and takes half a second instead of more than two.
    """

    install: ClassVar[str] = Redis.install
    scheme: ClassVar[str] = "redis_cluster"

    def __init__(self, *, turnable: bool = False) -> None:
        self._turnable = turnable or faketime() is not None
        self.nodes = [Redis(options=_settings(), turnable=self._turnable) for _ in THIRDS]
        self._is_made = False

    @classmethod
    def missing(cls) -> str:
        return Redis.missing()

    def start(self) -> Self:
        for node in self.nodes:
            node.start()
        if not self._is_made:
            self._make()
        self.until_well()
        return self

    def _make(self) -> None:
        # Two nodes of one epoch would resolve that later, and might take back a slot that a test has just moved.
        for epoch, node in enumerate(self.nodes, 1):
            client_of(node).execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)  # type: ignore[no-untyped-call]
        for node, (begin, end) in zip(self.nodes, THIRDS, strict=True):
            client_of(node).execute_command("CLUSTER ADDSLOTSRANGE", begin, end)  # type: ignore[no-untyped-call]
        for node, other in combinations(self.nodes, 2):  # discovery by gossip would take seconds
            met = "127.0.0.1", other.port, dict(other.options)["cluster-port"]
            client_of(node).execute_command("CLUSTER MEET", *met)  # type: ignore[no-untyped-call]
        if self._turnable:
            self._until(_has_met_all)
            self.turn(SILENT)
        self._is_made = True

    def until_well(self) -> None:
        """Wait until every node accepts requests, and knows all the others and all the slots."""
        if self._turnable:
            self.turn(STARTING)
        self._until(_is_well)

    def _until(self, condition: Callable[[Redis], bool]) -> None:
        give_up = time.monotonic() + START_MAX
        while not all(map(condition, self.nodes)):
            assert time.monotonic() < give_up, "the cluster did not come together"
            time.sleep(0.02)

    def node_of(self, key: str) -> Redis:
        """Return the node that had the slot of *key* in the beginning."""
        slot = key_slot(key.encode())
        return next(node for node, (_, end) in zip(self.nodes, THIRDS, strict=True) if slot <= end)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def turn(self, seconds: float) -> None:
        for node in self.nodes:
            node.turn(seconds)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        return self.nodes[0].folder

    @property
    def url(self) -> str:
        return f"{self.nodes[0].url}?cluster=true"


def client_of(node: Redis) -> Plain:
    """Return a client of this node, without redirection to others."""
    return Plain(port=node.port)


def _settings() -> list[tuple[str, str]]:
    patient = [("cluster-node-timeout", f"{NODE_TIMEOUT * 1_000:.0f}"), ("cluster-require-full-coverage", "no")]
    return [("cluster-enabled", "yes"), ("cluster-port", str(free_port())), *patient]


def _has_met_all(node: Redis) -> bool:
    with client_of(node) as client:
        known = client.execute_command("CLUSTER NODES")
    are_met = [each["connected"] and "handshake" not in each["flags"] for each in known.values()]
    return are_met == [True] * len(THIRDS)


def _is_well(node: Redis) -> bool:
    try:
        with client_of(node) as client:
            info = client.execute_command("CLUSTER INFO")
            slots = client.execute_command("CLUSTER SLOTS")
    except (exceptions.RedisError, OSError):
        return False
    assert isinstance(info, dict), info
    return info["cluster_state"] == "ok" and len(slots) == len(THIRDS) and _has_met_all(node)
