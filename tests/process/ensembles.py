"""Ensembles of three, of etcd and of ZooKeeper, on loopback or on hosts that can be cut off; and their faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests import servers
from tests.process.netlab import NetLab
from tests.process.store_elections import (
    Candidate,
    ElectionSetup,
    Load,
    recorded,
    standing,
    standing_behind_proxies,
)
from tests.servers import Etcd, EtcdCluster, Server, ZooKeeper, private
from tests.servers.etcd import TOGETHER
from tests.servers.process import START_MAX
from tests.servers.sharing import require

SIZE = 3
QUORUM_PORT, ELECTION_PORT = 2888, 3888


class EtcdEnsemble:
    """Three etcd, of which one leads."""

    def __init__(self, servers: Sequence[Etcd]) -> None:
        self.servers = servers

    def url(self, ports: Sequence[int]) -> str:
        """Return the URL of a candidate that reaches the servers through proxies on *ports*."""
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in ports)}/?timeout=2"

    def leads(self, number: int) -> bool:
        """Return whether a server answers, and says that it leads the others."""
        return self.servers[number].is_leader


class ZooKeeperEnsemble:
    """Three ZooKeeper, of which one leads."""

    def __init__(self, servers: Sequence[ZooKeeper]) -> None:
        self.servers = servers

    def url(self, ports: Sequence[int]) -> str:
        """Return the URL of a candidate that reaches the servers through proxies on *ports*."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"zookeeper://{hosts}/?timeout=2&tick={self.servers[0].tick:g}"

    def leads(self, number: int) -> bool:
        """Return whether a server answers, and says that it leads the others."""
        return self.servers[number].mode() == "leader"


Ensemble = EtcdEnsemble | ZooKeeperEnsemble


def leader_of(ensemble: Ensemble, *, but: int | None = None) -> int:
    """Wait until a server leads the others, which is not *but*; return its number."""
    give_up = time.monotonic() + START_MAX
    while time.monotonic() < give_up:
        for number, server in enumerate(ensemble.servers):
            if server.runs and number != but and ensemble.leads(number):
                return number
        time.sleep(0.02)
    raise AssertionError("no server leads the ensemble")


@contextmanager
def etcd_on_loopback() -> Iterator[EtcdEnsemble]:
    """Yield three etcd of this machine."""
    with private(EtcdCluster) as cluster:
        yield EtcdEnsemble(cluster.nodes)


@contextmanager
def zookeeper_on_loopback() -> Iterator[ZooKeeperEnsemble]:
    """Yield three ZooKeeper of this machine."""
    with private(servers.ZooKeeperEnsemble) as ensemble:
        yield ZooKeeperEnsemble(ensemble.nodes)


async def elect_through_changes_of_leader(ensemble: Ensemble, load: Load, rounds: int, seed: int) -> ElectionSetup:
    """Kill and stop the leader of *ensemble* in each round; check what the leaders of names did."""
    ports = [server.port for server in ensemble.servers]
    async with standing_behind_proxies(ensemble.url, ports, load, seed) as setup:

        async def kill_store_leader() -> None:
            server = ensemble.servers[await asyncio.to_thread(leader_of, ensemble)]
            server.kill()
            await setup.all_lead()
            await asyncio.to_thread(server.start)

        async def stop_store_leader() -> None:
            number = await asyncio.to_thread(leader_of, ensemble)
            ensemble.servers[number].pause()
            try:
                await asyncio.to_thread(leader_of, ensemble, but=number)
                await setup.all_lead()
            finally:
                ensemble.servers[number].resume()

        for _ in range(rounds):
            await setup.strike(kill_store_leader)
            await setup.strike(stop_store_leader)
        await setup.judge()
        return setup


# --- each server on a host of its own ----------------------------------------------------------------------------


class EtcdOnHost(Etcd):
    """An etcd on a host of a lab."""

    def __init__(self, lab: NetLab, host: int) -> None:
        super().__init__(timers=TOGETHER)
        self.lab, self.host = lab, host
        self.members = {self.name: f"http://{lab.address(host)}:{self.peer_port}"}

    @property
    def address(self) -> str:
        return f"http://{self.lab.address(self.host)}:{self.port}"

    def argv(self) -> Sequence[str]:
        everywhere = f"--listen-client-urls=http://0.0.0.0:{self.port}"  # the last one counts
        return self.lab.on(self.host, [*super().argv(), everywhere])

    def ready(self) -> bool:
        with self.lab.inside(self.host):
            return super().ready()

    @property
    def is_leader(self) -> bool:
        with self.lab.inside(self.host):
            return super().is_leader


class ZooKeeperOnHost(ZooKeeper):
    """A ZooKeeper on a host of a lab."""

    def __init__(self, lab: NetLab, host: int, members: Sequence[tuple[str, str]]) -> None:
        super().__init__(members=members, number=host + 1)
        self.lab, self.host = lab, host

    def argv(self) -> Sequence[str]:
        return self.lab.on(self.host, super().argv())

    def word(self, command: str) -> str:
        with self.lab.inside(self.host):
            return super().word(command)


@contextmanager
def etcd_on_hosts(lab: NetLab) -> Iterator[tuple[EtcdEnsemble, Sequence[str]]]:
    """Yield three etcd on the first hosts of a lab, and the URL of each alone."""
    require(Etcd)
    nodes = [EtcdOnHost(lab, host) for host in range(SIZE)]
    members = {name: url for node in nodes for name, url in node.members.items()}
    for node in nodes:
        node.members = members
    with _started(nodes):
        yield EtcdEnsemble(nodes), [f"etcd://{lab.address(node.host)}:{node.port}/?timeout=2" for node in nodes]


@contextmanager
def zookeeper_on_hosts(lab: NetLab) -> Iterator[tuple[ZooKeeperEnsemble, Sequence[str]]]:
    """Yield three ZooKeeper on the first hosts of a lab, and the URL of each alone."""
    require(ZooKeeper)
    members: list[tuple[str, str]] = []
    nodes = [ZooKeeperOnHost(lab, host, members) for host in range(SIZE)]
    members += [
        (f"server.{node.number}", f"{lab.address(node.host)}:{QUORUM_PORT}:{ELECTION_PORT};0.0.0.0:{node.port}")
        for node in nodes
    ]
    options = f"?timeout=2&tick={nodes[0].tick:g}"
    with _started(nodes):
        yield (
            ZooKeeperEnsemble(nodes),
            [f"zookeeper://{lab.address(node.host)}:{node.port}/{options}" for node in nodes],
        )


@contextmanager
def _started(nodes: Sequence[Server]) -> Iterator[None]:
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.close)
        for node in nodes:  # none serves before a majority runs
            node.launch()
        for node in nodes:
            node.until_ready()
        yield


async def elect_through_cuts(
    lab: NetLab, ensemble: Ensemble, urls: Sequence[str], load: Load, cuts: int, seed: int
) -> ElectionSetup:
    """Cut off so many followers from the others, each with the candidate that leads there; check what leaders did.

    The candidates are on the last host of *lab*. Each reaches one server only, and always.
    """
    async with recorded() as acts:
        candidates = [Candidate(url, (), acts, load, lab.on(SIZE, ())) for url in urls]
        async with standing(acts, candidates, load, seed) as setup:
            for _ in range(cuts):
                await _cut_off_a_follower(lab, ensemble, setup)
            await setup.judge()
            return setup


async def _cut_off_a_follower(lab: NetLab, ensemble: Ensemble, setup: ElectionSetup) -> None:
    """Cut off the follower whose candidate leads most.

    A leader of ZooKeeper 3.8.0 that is cut off, and joins again, may leave one server with nodes of sessions that have
    ended, which no client can tell from others. So the ensemble keeps its leader here.
    """
    leader = await asyncio.to_thread(leader_of, ensemble)
    followers = [number for number in range(SIZE) if number != leader]
    names = await _names_led(setup)
    while not any(names[number] for number in followers):
        setup.candidates[leader].restart()
        await setup.all_lead()
        names = await _names_led(setup)
    target = max(followers, key=names.__getitem__)

    async def cut_off_follower() -> None:
        for other in range(SIZE):
            if other != target:
                lab.cut_apart(target, other)
        try:
            await setup.deposed(setup.candidates[target].process.pid)
        finally:
            lab.heal()

    await setup.strike(cut_off_follower, deposes=True)
    await asyncio.to_thread(ensemble.servers[target].until_ready)


async def _names_led(setup: ElectionSetup) -> list[int]:
    """Return how many names each candidate leads."""
    led = [act.process for act in (await setup.acts.leaders()).values()]
    return [led.count(candidate.process.pid) for candidate in setup.candidates]
