"""Where foreign clients do not see each other, or do harm: what they do, and what we do beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import tenure
from tests.interop.acts import BEGIN, END, Act, overlaps
from tests.interop.contest import Contest
from tests.interop.handovers import until, until_acted, until_places
from tests.interop.programs.client_go import LeaderElector, LeaseLock
from tests.interop.stores import SHORT, EtcdStore, KubernetesStore, ZooKeeperStore
from tests.servers import shared
from tests.servers.kubernetes import apis


def test_whatever_stands_below_the_name_is_in_the_queue_on_etcd(tmp_path: Path) -> None:
    """Also for ours, as for foreign clients; but a slash in a name of ours leads nowhere below."""
    with Contest(EtcdStore, "etcdctl elect", tmp_path) as contest:
        foreign, ours = contest.foreign(), contest.ours()
        foreign.stand("below/deeper")
        foreign.until_leads("below/deeper")
        ours.stand("below")
        until_places(contest.store, "below", 2)
        ours.stand("below/deeper")
        ours.until_leads("below/deeper")
        until_acted(contest.record, "below/deeper", foreign.contestant)
        assert Act(BEGIN, "below", ours.contestant) not in contest.record.acts()
        foreign.release("below/deeper")
        foreign.until_released("below/deeper")
        ours.until_leads("below")


def test_a_late_release_of_client_go_ends_the_term_of_its_successor(tmp_path: Path) -> None:
    """It empties the lease although it reads there that another one leads; ours stops then, and stands again."""
    with Contest(KubernetesStore, "client-go", tmp_path, SHORT) as contest:
        ours, server = contest.ours(), shared(apis()[-1])
        late = LeaderElector(LeaseLock(server.server, "default", "late", "late", 5.0), int(SHORT))
        late.acquire()  # it does not renew, as if it were cut off
        ours.stand("late")
        ours.until_leads("late")
        assert ours.leader("late") != "late"
        late.release()
        until(lambda: Act(END, "late", ours.contestant) in contest.record.acts(), "ours did not stop")
        ours.until_leads("late")
        assert overlaps(contest.record.acts()) == []


async def test_ours_does_not_stand_beside_a_dialect_that_does_not_see_it(tmp_path: Path) -> None:
    with Contest(ZooKeeperStore, "kazoo Lock", tmp_path) as contest:
        kazoo = contest.foreign()
        kazoo.stand("refused")
        kazoo.until_leads("refused")
        url = contest.store.url("dialect=lock")
        async with tenure.connect(url) as backend:
            with pytest.raises(tenure.ConfigError, match=r"of the dialect kazoo, and this one is of the dialect lock"):
                await backend.election("refused", ttl=SHORT).run(never)


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
