"""Processes that share partitions on a store, killed, stopped, cut off, restarted: never two owners, soon in balance.

The acts of owners are recorded in a Redis without faults, see ``store_elections.py``. ``TENURE_LONG=1`` makes it long.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure._backends import postgres
from tests.long import LONG
from tests.process.store_elections import CANDIDATES, Candidate, Load, elect_through_faults, recorded, standing
from tests.servers import Etcd, Postgres, Redis, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# A busy machine may fail to renew a short lease, so the short run has longer ones.
ROUNDS, LOAD = (8, Load(64, 2.0, is_shared=True)) if LONG else (1, Load(12, 4.0, is_shared=True))


@pytest.mark.parametrize("kind", [Redis, Postgres, Etcd], ids=lambda kind: str(kind.__name__))
async def test_never_two_owners_and_soon_in_balance(kind: type[Redis] | type[Postgres] | type[Etcd]) -> None:
    with private(kind) as server:
        if isinstance(server, Postgres):
            await postgres.migrate(server.url)
        setup = await elect_through_faults(server, LOAD, ROUNDS, seed=6)
    assert setup.struck["kill"].faults == ROUNDS


async def test_never_two_owners_in_a_file(tmp_path: Path) -> None:
    async with recorded() as acts:
        candidates = [Candidate(f"sqlite:///{tmp_path}/leases.db", [], acts, LOAD) for _ in range(CANDIDATES)]
        async with standing(acts, candidates, LOAD, seed=7) as setup:
            for _ in range(ROUNDS):
                await setup.strike(setup.kill, deposes=True)
                await setup.strike(setup.stop, deposes=True)
                await setup.strike(setup.leave, deposes=True)
            await setup.judge()
