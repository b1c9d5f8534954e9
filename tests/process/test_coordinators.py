"""Many names, three processes, and etcd, ZooKeeper or Kubernetes, all with faults: never two leaders, rarely none.

Also ensembles of three whose own leader dies or stops, or of which one is cut off together with the candidate that
leads there. The acts of leaders are recorded as in ``test_store_elections.py``. ``TENURE_LONG=1`` makes it long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from tests.absent import skip_or_fail
from tests.durations import stretched
from tests.long import LONG
from tests.process.ensembles import (
    SIZE,
    Ensemble,
    elect_through_changes_of_leader,
    elect_through_cuts,
    etcd_on_hosts,
    etcd_on_loopback,
    zookeeper_on_hosts,
    zookeeper_on_loopback,
)
from tests.process.netlab import NetLab, why_not
from tests.process.store_elections import Load, elect_through_faults
from tests.servers import Etcd, Kubernetes, Server, ZooKeeper, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(3_600)]

ROUNDS = 20 if LONG else 1
TTL_MAX = 20
"""Seconds: a fail-over takes a few leases at most, and must come before a test counts as hanging."""


def load() -> Load:
    """Return many names, whose leases a busy machine can renew: each of three members has a part of the time alone."""
    return Load(names=20 if LONG else 10, ttl=min(math.ceil(stretched(4.0)), TTL_MAX))


@pytest.mark.parametrize("kind", [Etcd, ZooKeeper, Kubernetes], ids=lambda kind: str(kind.__name__))
async def test_never_two_leaders_and_never_none_for_long(kind: type[Server]) -> None:
    with private(kind) as server:
        await elect_through_faults(server, load(), ROUNDS, seed=5)


@pytest.mark.parametrize("started", [etcd_on_loopback, zookeeper_on_loopback], ids=["etcd", "zookeeper"])
async def test_an_ensemble_changes_its_leader(started: Callable[[], AbstractContextManager[Ensemble]]) -> None:
    with started() as ensemble:
        await elect_through_changes_of_leader(ensemble, load(), ROUNDS, seed=6)


@pytest.fixture
def lab() -> Iterator[NetLab]:
    trouble = why_not()
    if trouble is not None:
        skip_or_fail(trouble)
    with NetLab(SIZE + 1) as made:
        yield made


@pytest.mark.parametrize("started", [etcd_on_hosts, zookeeper_on_hosts], ids=["etcd", "zookeeper"])
async def test_a_server_is_cut_off_with_the_candidate_that_leads(
    started: Callable[[NetLab], AbstractContextManager[tuple[Ensemble, Sequence[str]]]], lab: NetLab
) -> None:
    with started(lab) as (ensemble, urls):
        await elect_through_cuts(lab, ensemble, urls, load(), ROUNDS, seed=7)
