"""Where foreign clients do not see each other, or do harm: what they do, and what we do beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import tenure
from tests.interop.acts import overlaps
from tests.interop.contest import Contest
from tests.interop.handovers import until_acted
from tests.interop.stores import TTL, ZooKeeperStore


async def test_ours_does_not_stand_beside_a_dialect_that_does_not_see_it(tmp_path: Path) -> None:
    with Contest(ZooKeeperStore, "kazoo Lock", tmp_path) as contest:
        kazoo = contest.foreign()
        kazoo.stand("refused")
        kazoo.until_leads("refused")
        url = contest.store.url("dialect=lock")
        async with tenure.connect(url) as backend:
            with pytest.raises(tenure.ConfigError, match=r"of the dialect kazoo, and this one is of the dialect lock"):
                await backend.election("refused", ttl=TTL).run(never)


async def never(term: tenure.Term) -> None:
    raise AssertionError(f"{term.holder} leads")


def test_kazoos_lock_and_curators_mutex_on_one_node_both_lead(tmp_path: Path) -> None:
    """The two dialects do not mix: kazoo looks at its own nodes only, and Curator sorts kazoo's wrongly."""
    with Contest(ZooKeeperStore, "Curator InterProcessMutex", tmp_path) as contest:
        curator, kazoo = contest.foreign(), contest.foreign("kazoo Lock")
        curator.stand("mixed")
        curator.until_leads("mixed")
        kazoo.stand("mixed")
        kazoo.until_leads("mixed")
        until_acted(contest.record, "mixed", kazoo.contestant)
        assert overlaps(contest.record.acts())
