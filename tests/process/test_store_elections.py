"""Many names, three processes and a store, killed, stopped, cut off, restarted: never two leaders, rarely none.

The acts of leaders are recorded in a Redis without faults, see ``store_elections.py``. ``TENURE_LONG=1`` makes it long.
"""

from __future__ import annotations

import pytest

from tenure._backends import postgres
from tests.long import LONG
from tests.process.store_elections import Act, Load, elect_through_faults, late
from tests.servers import Nats, Postgres, Redis, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# A busy machine may fail to renew a short lease, so the short run has longer ones.
ROUNDS, LOAD = (8, Load(names=50, ttl=2.0)) if LONG else (1, Load(names=20, ttl=4.0))


@pytest.mark.parametrize("kind", [Redis, Postgres, Nats], ids=lambda kind: str(kind.__name__))
async def test_never_two_leaders_and_never_none_for_long(kind: type[Redis] | type[Postgres] | type[Nats]) -> None:
    with private(kind) as server:
        if isinstance(server, Postgres):
            await postgres.migrate(server.url)
        await elect_through_faults(server, LOAD, ROUNDS, seed=4)


def test_a_late_act_is_found() -> None:
    acts = [Act("a", 1, 10, 0), Act("b", 7, 10, 1), Act("a", 2, 11, 0), Act("a", 1, 10, 2), Act("b", 7, 10, 3)]
    assert late(acts) == [Act("a", 1, 10, 2)]
