"""Elections on etcd, ZooKeeper and Kubernetes, in rounds of faults: of candidates, of the store, of its ensemble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.process import ensembles
from tests.process.netlab import NetLab, why_not
from tests.process.store_elections import ElectionSetup, Load, elect_through_faults
from tests.proof.state import Part
from tests.servers import Etcd, Kubernetes, ZooKeeper

LOAD = Load(names=20, ttl=3.0)

Course = Callable[[int], Coroutine[Any, Any, ElectionSetup]]


async def etcd(seed: int) -> ElectionSetup:
    with Etcd() as server:
        return await elect_through_faults(server, LOAD, 1, seed)


async def zookeeper(seed: int) -> ElectionSetup:
    with ZooKeeper() as server:
        return await elect_through_faults(server, LOAD, 1, seed)


async def kubernetes(seed: int) -> ElectionSetup:
    with Kubernetes() as server:
        return await elect_through_faults(server, LOAD, 1, seed)


async def etcd_changes_its_leader(seed: int) -> ElectionSetup:
    with ensembles.etcd_on_loopback() as ensemble:
        return await ensembles.elect_through_changes_of_leader(ensemble, LOAD, 1, seed)


async def zookeeper_changes_its_leader(seed: int) -> ElectionSetup:
    with ensembles.zookeeper_on_loopback() as ensemble:
        return await ensembles.elect_through_changes_of_leader(ensemble, LOAD, 1, seed)


async def etcd_is_cut(seed: int) -> ElectionSetup:
    with NetLab(ensembles.SIZE + 1) as lab, ensembles.etcd_on_hosts(lab) as (ensemble, urls):
        return await ensembles.elect_through_cuts(lab, ensemble, urls, LOAD, 1, seed)


async def zookeeper_is_cut(seed: int) -> ElectionSetup:
    with NetLab(ensembles.SIZE + 1) as lab, ensembles.zookeeper_on_hosts(lab) as (ensemble, urls):
        return await ensembles.elect_through_cuts(lab, ensemble, urls, LOAD, 1, seed)


COURSES: dict[Course, Callable[[], str | None]] = {
    etcd: Etcd.missing,
    zookeeper: ZooKeeper.missing,
    kubernetes: Kubernetes.missing,
    etcd_changes_its_leader: Etcd.missing,
    zookeeper_changes_its_leader: ZooKeeper.missing,
    etcd_is_cut: lambda: Etcd.missing() or why_not(),
    zookeeper_is_cut: lambda: ZooKeeper.missing() or why_not(),
}
"""What a seed runs, in turn, and why it can't be run here."""


def elect(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Run seeds from ``part.next_seed`` on until *enough* names have failed over; yield after each."""
    while part.done < enough:
        seed = part.next_seed
        course = list(COURSES)[seed % len(COURSES)]
        if lacking := COURSES[course]():
            part.notes[course.__name__] = f"left out, {lacking}"
            if len(part.notes) == len(COURSES):
                return
        else:
            took, found = tried(seed, folder)
            for fault, seconds in took.items():
                part.took.setdefault(f"{course.__name__}, {fault}", []).extend(seconds)
            part.done += max(1, sum(map(len, took.values())))  # so that it ends although all fail
            if found:
                part.failed(f"seed {seed}, {found}", f"make proof ARGS='--faults {seed}'")
        part.next_seed += 1
        yield


def tried(seed: int, folder: Path) -> tuple[dict[str, list[float]], str]:
    """Run the course of *seed*; return how long each fail-over took, by fault, and the failure.

    Its output is in *folder*.
    """
    course = list(COURSES)[seed % len(COURSES)]
    log = folder / f"coordinators-{seed}.log"
    with log.open("w") as file, redirect_stdout(file):
        try:
            setup = asyncio.run(course(seed))
        except (AssertionError, RuntimeError) as error:
            return {}, f"{course.__name__}: {str(error) or repr(error)} (see {log})"
    log.unlink()
    return {fault: struck.fail_overs for fault, struck in setup.struck.items()}, ""
