"""What the names of one process cost: its connections and files, and the requests that the store gets at rest.

``python -m benchmarks names [--store etcd] [--counts 1,100,300] [--rest 30]`` starts each store, then a process that
leads so many names, and one that stands by for them. It prints rows for docs/scale.md: of each process its connections,
and its requests/s at rest; and the most files that one of them has open for the store.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from benchmarks.coordinators import etcd_requests, kubernetes_requests, zookeeper_requests
from benchmarks.partitions import served
from tests.held_names import Holding, holding
from tests.servers import Azurite, Etcd, Kubernetes, Nats, ZooKeeper, private

Asked = Callable[[], float]


@dataclass
class Running:
    """A store that runs: its URL, the ports of its server, and how often it was asked so far, if that is counted."""

    url: str
    ports: Sequence[int] = ()
    asked: Asked | None = None


@contextmanager
def etcd(options: str = "") -> Iterator[Running]:
    with private(Etcd) as server:
        yield Running(f"{server.url}{options}", [server.port], lambda: etcd_requests(server))


@contextmanager
def zookeeper() -> Iterator[Running]:
    with private(ZooKeeper, tick=2.0, session_max=60.0) as server:
        yield Running(server.url, [server.port], lambda: zookeeper_requests(server))


@contextmanager
def kubernetes() -> Iterator[Running]:
    with private(Kubernetes) as server:
        yield Running(server.url, [server.port], lambda: kubernetes_requests(server))


@contextmanager
def nats() -> Iterator[Running]:
    with private(Nats) as server:
        yield Running(server.url, [server.port], server.requests)


@contextmanager
def azure() -> Iterator[Running]:
    with private(Azurite) as server:
        yield Running(server.url, [server.blob.port, server.queue.port])


@contextmanager
def with_statements(store: str) -> Iterator[Running]:
    with served(store) as (url, asked):
        yield Running(url, [port_of(url)], asked)


@contextmanager
def sqlite() -> Iterator[Running]:
    with TemporaryDirectory() as folder:
        yield Running(f"sqlite:///{folder}/leases.db")


def port_of(url: str) -> int:
    """Return the port in the URL of one server."""
    port = urlsplit(url).port
    assert port is not None
    return port


STORES: dict[str, Callable[[], Any]] = {
    "PostgreSQL": lambda: with_statements("postgres"),
    "Redis": lambda: with_statements("redis"),
    "etcd": etcd,
    "etcd, prefix empty": lambda: etcd("?prefix="),
    "ZooKeeper": zookeeper,
    "Kubernetes": kubernetes,
    "NATS": nats,
    "Azure Storage": azure,
    "SQLite": sqlite,
}


COUNTS = {"Kubernetes": [1, 60], "Azure Storage": [1, 30]}
"""How many names, where not 1, 100 and 300: as many as the double and the emulator answer in time."""


@dataclass(frozen=True)
class Cost:
    """What a process with so many names costs at rest."""

    connections: int
    files: int
    requests: float | None


def measured(running: Running, process: Holding, others: float, seconds: float) -> Cost:
    """Measure for so many *seconds*; the requests of the *others*, each second, are not its own."""
    rate = None
    if running.asked is not None:
        before, began = running.asked(), time.monotonic()
        time.sleep(seconds)
        rate = max(0.0, (running.asked() - before) / (time.monotonic() - began) - others)
    return Cost(process.connections(*running.ports), process.files, rate)


def costs(store: str, count: int, seconds: float) -> dict[str, Cost]:
    """Return what a process that leads *count* names of a new store costs, and one that stands by for them."""
    with STORES[store]() as running, holding(running.url, count, "leads") as leader:
        time.sleep(SETTLED)
        leads = measured(running, leader, 0.0, seconds)
        with holding(running.url, count, "stands") as follower:
            time.sleep(SETTLED)
            return {"leads": leads, "stands": measured(running, follower, leads.requests or 0.0, seconds)}


def row(store: str, found: Sequence[dict[str, Cost]]) -> str:
    """Return the row of a table: of each figure those for all counts of names."""
    cells = [store]
    for phase in ("leads", "stands"):
        of_phase = [one[phase] for one in found]
        cells.append(", ".join(str(one.connections) for one in of_phase))
        cells.append(", ".join("" if one.requests is None else _figure(one.requests) for one in of_phase).strip(", "))
    cells.append(str(max(one.files for both in found for one in both.values())))
    return f"| {' | '.join(cells)} |"


def _figure(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


SETTLED = 10.0
"""Seconds until what happens only at the start is over, and leaders renew together."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks names", description=__doc__)
    parser.add_argument("--store", choices=STORES, action="append")
    parser.add_argument(
        "--counts", type=lambda text: [int(one) for one in text.split(",")], help="how many names (default: 1,100,300)"
    )
    parser.add_argument("--rest", type=float, default=30.0, help="seconds at rest that are measured (default: 30)")
    chosen = parser.parse_args()
    for store in chosen.store or STORES:
        print(
            row(
                store, [costs(store, count, chosen.rest) for count in chosen.counts or COUNTS.get(store, [1, 100, 300])]
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
