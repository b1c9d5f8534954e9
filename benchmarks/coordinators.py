"""Elections on etcd, ZooKeeper and Kubernetes, beside other clients of these stores and loops written by hand.

Run by hand: ``python -m benchmarks coordinators [STORE …] [--only NAME …] [--parts PART,…]``. Prints figures only, each
with its ratio to tenure's. One server for each store, without faults; all candidates are processes of this machine.
Kubernetes is the double of its Lease API (tests/servers), which counts requests. Libraries that are not installed are
left out.

- failover: from kill -9 of the leader to the successor's first line, at a moment between two renewals that is spread
  over them; the successor has looked at the leader before.
- handover: from the leader's line that it resigns to the successor's first line.
- usual: the fail-over with the lease and the server's settings that are usual, where those matter (ZooKeeper's tick).
- standing: the requests that the server counts, of one leader and of nine candidates that stand by, with ttl 15.
- many: the requests and the processor time of one process that holds 1,000 leases of etcd.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import tenure
from benchmarks.election import line, percentile
from tenure._timing import Timing
from tenure.events import Event, TermBegan
from tests.servers import Etcd, Kubernetes, Redis, Server, ZooKeeper, private

USUAL_TTL = 15.0
USUAL_TICK = 2.0
"""The default ``tickTime`` of ZooKeeper, in seconds."""
USUAL_LANES = 12
CANDIDATES = 9
MANY = 1_000
LOOKS = 1.0
"""Seconds from the beginning of a campaign until a candidate has surely looked at the leader; or from its start."""
WAIT_MAX = 120.0
SETTLED = 5.0
"""Seconds until the candidates that stand by have asked everything that they ask only once."""


# --- stores and contenders ---------------------------------------------------------------------------------------


def etcd_requests(server: Any) -> float:
    """Return the messages that etcd has received: requests, and what streams carry, as a keep-alive."""
    found: dict[str, float] = server.metrics()
    return sum(value for name, value in found.items() if name.startswith("grpc_server_msg_received_total"))


def zookeeper_requests(server: Any) -> float:
    """Return the packets that ZooKeeper has received, pings of sessions too; without those that ask for this."""
    rows = (row.split("\t") for row in server.word("mntr").splitlines())
    return float(next(row[1] for row in rows if row[0] == "zk_packets_received"))


def kubernetes_requests(server: Any) -> float:
    """Return the requests that the double has received."""
    return len(server.requests())


def redis_requests(server: Any) -> float:
    """Return the commands that Redis has carried out."""
    rows = (row.partition(":") for row in server.run("redis-cli", "-p", str(server.port), "info", "stats").splitlines())
    return float(next(value for name, _, value in rows if name == "total_commands_processed"))


@dataclass(frozen=True)
class Store:
    """A store, and how its requests are counted."""

    kind: Callable[[], Server]
    requests: Callable[[Any], float]
    tick: float = 0.0
    """Seconds by which the end of a lease may be late, besides."""
    usual: Callable[[], Server] | None = None
    """The same with its default settings, where they matter for fail-overs and the requests of those that stand by."""


ZOOKEEPER_TICK = 0.1  # of the server in the tests
STORES = {
    "etcd": Store(lambda: private(Etcd), etcd_requests),
    "zookeeper": Store(
        lambda: private(ZooKeeper), zookeeper_requests, ZOOKEEPER_TICK, lambda: private(ZooKeeper, tick=USUAL_TICK)
    ),
    "kubernetes": Store(lambda: private(Kubernetes), kubernetes_requests),
    "redis": Store(lambda: private(Redis), redis_requests),
}


@dataclass(frozen=True)
class Contender:
    """A client of a store."""

    name: str
    store: str
    kind: str
    """One of benchmarks.candidates; or the command of etcdctl."""
    package: str
    resigns: bool = True
    ttl_fixed: bool = False
    """Whether its lease lasts 60 s whatever is asked, so that fail-over is not measured."""

    @property
    def is_etcdctl(self) -> bool:
        return self.package == "etcdctl"


CONTENDERS = [
    Contender("tenure", "etcd", "tenure", "tenure"),
    Contender("by hand (aiohttp)", "etcd", "etcd_by_hand", "aiohttp"),
    Contender("etcdctl lock", "etcd", "lock", "etcdctl"),
    Contender("etcdctl elect", "etcd", "elect", "etcdctl", ttl_fixed=True),
    Contender("tenure", "zookeeper", "tenure", "tenure"),
    Contender("by hand (kazoo)", "zookeeper", "zookeeper_by_hand", "kazoo"),
    Contender("kazoo Election", "zookeeper", "kazoo_election", "kazoo"),
    Contender("kazoo Lock", "zookeeper", "kazoo_lock", "kazoo"),
    Contender("tenure", "kubernetes", "tenure", "tenure"),
    Contender("client-go's rules (aiohttp)", "kubernetes", "client_go", "aiohttp"),
    Contender("kubernetes LeaseLock", "kubernetes", "python_kubernetes", "kubernetes", resigns=False),
    Contender("grelmicro", "kubernetes", "grelmicro_kubernetes", "grelmicro"),
    Contender("tenure", "redis", "tenure", "tenure"),
    Contender("grelmicro", "redis", "grelmicro_redis", "grelmicro"),
]


class Candidate:
    """A candidate in a process of its own, which prints when it is elected."""

    def __init__(self, contender: Contender, server: Server, name: str, ttl: float) -> None:
        self.contender = contender
        address = f"127.0.0.1:{server.port}"
        if contender.is_etcdctl:
            rest = [f"--ttl={ttl:.0f}", name] if contender.kind == "lock" else [name, "candidate"]
            argv = ["etcdctl", f"--endpoints={address}", contender.kind, *rest]
        else:
            address = server.url if contender.kind == "tenure" else address
            argv = [sys.executable, "-m", "benchmarks.candidates", contender.kind, address, name, str(ttl)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"ETCDCTL_API": "3"}
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for printed in self.process.stdout:
            self._lines.put((time.monotonic(), printed.strip()))
            if self.contender.kind == "elect":
                self.process.stdout.readline()  # its proposal, after its key
        self._lines.put((time.monotonic(), ""))

    def stands(self) -> None:
        """Wait until it has surely looked at the leader."""
        if not self.contender.is_etcdctl:
            self._printed("standing")
        time.sleep(LOOKS)

    def elected(self) -> float:
        """Wait until it is elected; return when."""
        return self._printed("elected")

    @property
    def is_elected(self) -> bool:
        """Whether it has printed more."""
        return not self._lines.empty()

    def _printed(self, what: str) -> float:
        """Return the time of the next line, which must be *what*; etcdctl prints its key when it is elected."""
        at, printed = self._lines.get(timeout=WAIT_MAX)
        if not printed:
            raise RuntimeError(f"a candidate of {self.contender.name} ended with {self.process.wait()}")
        if self.contender.is_etcdctl:
            return at
        word, _, at_text = printed.partition(" ")
        assert word == what, f"expected {what!r}, found {printed!r}"
        return float(at_text)

    def resign(self) -> float:
        """Make it resign; return when that began. etcdctl ends by that."""
        if self.contender.is_etcdctl:
            at = time.monotonic()
            self.process.send_signal(signal.SIGINT)
            return at
        assert self.process.stdin is not None
        self.process.stdin.write("resign\n")
        self.process.stdin.flush()
        return self._printed("resigning")

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[[], Candidate]


@contextmanager
def candidates(contender: Contender, server: Server, name: str, ttl: float) -> Iterator[Start]:
    """Yield a function that starts a candidate; end all of them afterwards."""
    started: list[Candidate] = []

    def start() -> Candidate:
        started.append(Candidate(contender, server, name, ttl))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.close()


# --- measured ----------------------------------------------------------------------------------------------------


def failover(contender: Contender, server: Server, name: str, trials: int, ttl: float) -> list[float]:
    """Return the seconds from kill -9 of the leader to the successor's first line."""
    took = []
    with candidates(contender, server, name, ttl) as start:
        leader = start()
        leader.stands()
        leader.elected()
        for trial in range(trials):
            successor = start()
            successor.stands()
            time.sleep(ttl * (trial % 7) / 7)
            killed_at = leader.kill()
            took.append(successor.elected() - killed_at)
            leader = successor
    return took


def failovers(contender: Contender, server: Server, trials: int, ttl: float, lanes: int) -> list[float]:
    """Measure fail-overs of several names at once, as they mostly wait."""
    with ThreadPoolExecutor(lanes) as pool:
        counts = [len(range(lane, trials, lanes)) for lane in range(lanes)]
        tries = [
            pool.submit(failover, contender, server, f"failover-{n}", count, ttl) for n, count in enumerate(counts)
        ]
        return [each for one in tries for each in one.result()]


def handover(contender: Contender, server: Server, trials: int, ttl: float) -> list[float]:
    """Return the seconds from the leader's decision to resign to the successor's first line."""
    took: list[float] = []
    with candidates(contender, server, "handover", ttl) as start:
        leader = start()
        leader.stands()
        leader.elected()
        other = start()
        other.stands()
        for _ in range(2 * trials):
            resigned_at = leader.resign()
            while not (other.is_elected or leader.is_elected):
                time.sleep(0.001)
            if leader.is_elected and not contender.is_etcdctl:
                leader.elected()  # it may come again before the other has looked: then nothing was handed over
            else:
                took.append(other.elected() - resigned_at)
                leader, other = other, leader
                if contender.is_etcdctl:
                    other = start()
                    other.stands()
            if len(took) == trials:
                return took
            # After resigning, a candidate waits before it campaigns again.
            time.sleep(0.5 + Timing(ttl).retry_every * 2.5)
    raise RuntimeError(
        f"of {2 * trials} leaders of {contender.name} that resigned, {len(took)} were replaced by another"
    )


def standing(contender: Contender, server: Server, store: Store, seconds: float) -> tuple[float, float]:
    """Return the requests/s of a leader alone, and those of each candidate that stands by beside it."""

    def rate() -> float:
        time.sleep(SETTLED)
        before, begun = store.requests(server), time.monotonic()
        time.sleep(seconds)
        return (store.requests(server) - before) / (time.monotonic() - begun)

    with candidates(contender, server, "standing", USUAL_TTL) as start:
        leader = start()
        leader.stands()
        leader.elected()
        alone = rate()
        for follower in [start() for _ in range(CANDIDATES)]:
            follower.stands()
        return alone, (rate() - alone) / CANDIDATES


async def many(server: Server, store: Store, seconds: float) -> tuple[float, float, float]:
    """Hold 1,000 leases in one process; return the seconds until all led, the requests/s, and the share of a core."""
    began, all_began = 0, asyncio.Event()

    def on_event(event: Event) -> None:
        nonlocal began
        began += isinstance(event, TermBegan)
        if began == MANY:
            all_began.set()

    async def forever(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    async with tenure.connect(server.url, on_event=on_event) as backend:
        begun = time.monotonic()
        holders = [asyncio.create_task(backend.election(f"chair {n}").run(forever)) for n in range(MANY)]
        await all_began.wait()
        took = time.monotonic() - begun
        await asyncio.sleep(SETTLED)
        before, cpu, wall = store.requests(server), time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        lasted = time.monotonic() - wall
        share, rate = (time.process_time() - cpu) / lasted, (store.requests(server) - before) / lasted
        for holder in holders:
            holder.cancel()
        await asyncio.wait(holders)
    return took, rate, share


# --- printed -----------------------------------------------------------------------------------------------------


class Ratio:
    """The ratio of a figure to tenure's in the same table, which comes first."""

    def __init__(self) -> None:
        self._ours: float | None = None

    def of(self, figure: float) -> str:
        if self._ours is None:
            self._ours = figure
            return ""
        return f"  ({figure / self._ours:.1f} x)" if self._ours > 0 else ""


def print_failovers(
    chosen: Sequence[Contender], server: Server, trials: int, *, ttl: float, tick: float, lanes: int
) -> None:
    bound = (ttl + Timing(ttl).retry_every) * 1.1 + tick
    goal = f"lease + retry + 10 %{f' + tick of {tick:g} s' if tick else ''}: {bound:.2f} s"
    print(f"  fail-over after kill -9, ttl {ttl:g} s, {trials} trials; {goal}")
    ratio = Ratio()
    for contender in chosen:
        if contender.ttl_fixed:
            continue
        took = failovers(contender, server, trials, ttl, lanes)
        p50, p99 = statistics.median(took), percentile(took, 0.99)
        line(f"    {contender.name}", f"p50 {p50:.3f} s, p99 {p99:.3f} s{ratio.of(p99)}")


def print_handovers(chosen: Sequence[Contender], server: Server, asked: argparse.Namespace) -> None:
    print(f"  hand-over, ttl {asked.ttl:g} s, {asked.trials} trials")
    ratio = Ratio()
    for contender in chosen:
        if not contender.resigns:
            continue
        took = handover(contender, server, asked.trials, asked.ttl)
        p50, p99 = statistics.median(took) * 1e3, percentile(took, 0.99) * 1e3
        line(f"    {contender.name}", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms{ratio.of(p50)}")


def print_standing(chosen: Sequence[Contender], server: Server, store: Store, asked: argparse.Namespace) -> None:
    print(f"  standing by, ttl {USUAL_TTL:g} s, requests/s over {asked.seconds:g} s")
    ratio = Ratio()
    for contender in chosen:
        alone, each = standing(contender, server, store, asked.seconds)
        line(f"    {contender.name}", f"a candidate {each:.2f}{ratio.of(each)}; the leader {alone:.2f}")


def print_many(server: Server, store: Store, asked: argparse.Namespace) -> None:
    took, rate, share = asyncio.run(many(server, store, asked.seconds))
    print(f"  tenure holds {MANY:,} leases in one process, ttl 15 s")
    line("    until all led", f"{took:.2f} s")
    line("    requests", f"{rate:.2f}/s = {rate * USUAL_TTL / (MANY / 100):.2f} in 15 s for 100 leases")
    line("    share of one core", f"{share:.1%}")


PARTS = ("failover", "handover", "usual", "standing", "many")


def measure(name: str, asked: argparse.Namespace) -> None:
    """Print the figures of all contenders on one store."""
    store = STORES[name]
    chosen = [each for each in CONTENDERS if each.store == name and (not asked.only or each.kind in asked.only)]
    lacking = [each for each in chosen if find_spec(each.package) is None and not each.is_etcdctl]
    chosen = [each for each in chosen if each not in lacking]
    print(f"{name}:{''.join(f' {each.name}: not installed.' for each in lacking)}", flush=True)
    with store.kind() as server:
        if "failover" in asked.parts:
            print_failovers(chosen, server, asked.trials, ttl=asked.ttl, tick=store.tick, lanes=asked.lanes)
        if "handover" in asked.parts:
            print_handovers(chosen, server, asked)
        if "standing" in asked.parts and store.usual is None:
            print_standing(chosen, server, store, asked)
        if "many" in asked.parts and name == "etcd":
            print_many(server, store, asked)
    if store.usual is not None and not {"usual", "standing"}.isdisjoint(asked.parts):
        with store.usual() as server:
            if "usual" in asked.parts:
                print_failovers(chosen, server, asked.trials, ttl=USUAL_TTL, tick=USUAL_TICK, lanes=USUAL_LANES)
            if "standing" in asked.parts:
                print_standing(chosen, server, store, asked)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("stores", nargs="*", metavar="STORE", default=list(STORES), help=f"of {', '.join(STORES)}")
    kinds = ", ".join(dict.fromkeys(each.kind for each in CONTENDERS))
    arguments.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"some of {kinds}")
    arguments.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    arguments.add_argument("--trials", type=int, default=40)
    arguments.add_argument("--lanes", type=int, default=4, help="names whose fail-overs are measured at once")
    arguments.add_argument("--ttl", type=float, default=2.0, help="lease of fail-overs and hand-overs, in seconds")
    arguments.add_argument("--seconds", type=float, default=30.0, help="how long to count requests")
    asked = arguments.parse_args()
    for name in asked.stores:
        if name not in STORES:
            arguments.error(f"there is no {name!r}; there are {', '.join(STORES)}")
    for part in asked.parts:
        if part not in PARTS:
            arguments.error(f"there is no part {part!r}; there are {', '.join(PARTS)}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for name in asked.stores:
        measure(name, asked)


if __name__ == "__main__":
    if os.name != "posix":
        sys.exit("needs kill -9, so a POSIX system")
    main()
