"""Many names, three processes, and etcd, ZooKeeper or Kubernetes, all with faults: never two leaders, rarely none.

Also ensembles of three whose own leader dies or stops, or of which one is cut off together with the candidate that
leads there. The acts of leaders are recorded as in ``test_store_elections.py``. ``TENURE_FULL=1`` makes it long.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from tests.absent import skip_or_fail
from tests.process.ensembles import (
    SIZE,
    Ensemble,
    etcd_on_hosts,
    etcd_on_loopback,
    leader_of,
    zookeeper_on_hosts,
    zookeeper_on_loopback,
)
from tests.process.netlab import NetLab, why_not
from tests.process.store_elections import (
    Candidate,
    ElectionSetup,
    Load,
    elect_through_faults,
    recorded,
    standing,
    standing_behind_proxies,
)
from tests.servers import Etcd, Server, ZooKeeper, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(3_600)]

FULL = os.environ.get("TENURE_FULL", "") not in ("", "0")
ROUNDS, LOAD = (20, Load(names=50, ttl=2.0)) if FULL else (1, Load(names=20, ttl=3.0))


@pytest.mark.parametrize("kind", [Etcd, ZooKeeper], ids=lambda kind: str(kind.__name__))
async def test_never_two_leaders_and_never_none_for_long(kind: type[Server]) -> None:
    with private(kind) as server:
        await elect_through_faults(server, LOAD, ROUNDS, seed=5)


class EnsembleFaults:
    """Faults of the ensemble, one at a time, so that a majority is always there."""

    def __init__(self, ensemble: Ensemble, setup: ElectionSetup) -> None:
        self.ensemble = ensemble
        self.setup = setup

    async def kill_store_leader(self) -> None:
        """Kill the leader of the ensemble; start it again when every name is led."""
        server = self.ensemble.servers[await asyncio.to_thread(leader_of, self.ensemble)]
        server.kill()
        await self.setup.all_lead()
        await asyncio.to_thread(server.start)

    async def stop_store_leader(self) -> None:
        """Stop the leader of the ensemble with SIGSTOP until another leads it, and every name is led."""
        number = await asyncio.to_thread(leader_of, self.ensemble)
        self.ensemble.servers[number].pause()
        try:
            await asyncio.to_thread(leader_of, self.ensemble, but=number)
            await self.setup.all_lead()
        finally:
            self.ensemble.servers[number].resume()


@pytest.mark.parametrize("ensemble_of", [etcd_on_loopback, zookeeper_on_loopback], ids=["etcd", "zookeeper"])
async def test_an_ensemble_changes_its_leader(ensemble_of: Callable[[], AbstractContextManager[Ensemble]]) -> None:
    with ensemble_of() as ensemble:
        ports = [server.port for server in ensemble.servers]
        async with standing_behind_proxies(ensemble.url, ports, LOAD, seed=6) as setup:
            faults = EnsembleFaults(ensemble, setup)
            for _ in range(ROUNDS):
                await setup.strike(faults.kill_store_leader)
                await setup.strike(faults.stop_store_leader)
            await setup.judge()


# --- one server is cut off from the others -----------------------------------------------------------------------


@pytest.fixture
def lab() -> Iterator[NetLab]:
    trouble = why_not()
    if trouble is not None:
        skip_or_fail(trouble)
    with NetLab(SIZE + 1) as made:
        yield made


@pytest.mark.parametrize("ensemble_of", [etcd_on_hosts, zookeeper_on_hosts], ids=["etcd", "zookeeper"])
async def test_a_server_is_cut_off_with_the_candidate_that_leads(
    ensemble_of: Callable[[NetLab], AbstractContextManager[tuple[Ensemble, Sequence[str]]]], lab: NetLab
) -> None:
    """Each candidate reaches one server only, and always; this server no longer reaches the others."""
    with ensemble_of(lab) as (ensemble, urls):
        async with recorded() as acts:
            candidates = [Candidate(url, (), acts, LOAD, lab.on(SIZE, ())) for url in urls]
            async with standing(acts, candidates, LOAD, seed=7) as setup:
                while setup.struck["cut_off_follower"].faults < ROUNDS:
                    await cut_off(lab, ensemble, setup)
                await setup.judge()


async def cut_off(lab: NetLab, ensemble: Ensemble, setup: ElectionSetup) -> None:
    """Cut off the follower whose candidate leads most; if all names are led at the ensemble's leader, that one."""
    leader = await asyncio.to_thread(leader_of, ensemble)
    led = [act.process for act in (await setup.acts.leaders()).values()]
    names = [led.count(candidate.process.pid) for candidate in setup.candidates]
    target = max(range(SIZE), key=lambda number: (names[number] > 0, number != leader, names[number]))

    async def cut() -> None:
        for other in range(SIZE):
            if other != target:
                lab.cut_apart(target, other)
        try:
            await setup.deposed(setup.candidates[target].process.pid)
        finally:
            lab.heal()

    await setup.strike(cut, "cut_off_leader" if target == leader else "cut_off_follower")
    await asyncio.to_thread(ensemble.servers[target].until_ready)
