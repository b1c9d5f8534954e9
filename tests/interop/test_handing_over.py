"""Foreign clients and ours in one election: they hand it over to each other, and each sees the other one lead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.interop.acts import BEGIN, overlaps
from tests.interop.contest import Contest
from tests.interop.contestants import Contestant
from tests.interop.handovers import hand_over, until_acted, until_places
from tests.interop.stores import PAIRS, STORES, Store, slug

EACH_WAY = 20
ROUNDS = 3
AT_ONCE = {"client-go": 5, "Python client": 10}
"""Elections that are handed over at once: to the one that polls, and from the other one that lets its lease run out."""

QUEUED = [(store, client) for store, client in PAIRS if store.is_queued]
each_client = pytest.mark.parametrize(("store", "client"), PAIRS, ids=[client for _, client in PAIRS])


@each_client
def test_they_hand_over_and_see_each_other(store: type[Store], client: str, tmp_path: Path) -> None:
    """20 times each way; then each names the other one as the leader."""
    with Contest(store, client, tmp_path) as contest:
        ours, foreign = contest.ours(), contest.foreign()
        names = [f"over-{slug(client)}-{number}" for number in range(AT_ONCE.get(client, 1))]
        hand_over(contest, ours, foreign, 2 * EACH_WAY, names)
        name = names[0]
        leading(ours, name)
        if client not in store.anonymous:
            assert ours.contestant in foreign.leader(name)
        retire(ours, name)
        leading(foreign, name)
        seen = ours.leader(name)
        assert seen == foreign.contestant or (seen and client in store.anonymous), seen
        retire(foreign, name)


@pytest.mark.parametrize(("store", "client"), QUEUED, ids=[client for _, client in QUEUED])
def test_they_lead_in_the_order_in_which_they_stood(store: type[Store], client: str, tmp_path: Path) -> None:
    """None overtakes another one, so neither side starves behind the other; each stands again after its turn."""
    with Contest(store, client, tmp_path) as contest:
        order = [contest.foreign(), contest.ours(), contest.foreign(), contest.ours()]
        name = f"order-{slug(client)}"
        for place, contestant in enumerate(order, 1):
            contestant.stand(name)
            until_places(contest.store, name, place)
        for round_left in reversed(range(ROUNDS)):
            for contestant in order:
                contestant.until_leads(name)
                until_acted(contest.record, name, contestant.contestant)
                retire(contestant, name)
                if round_left:
                    contestant.stand(name)
                    until_places(contest.store, name, len(order))
        acts = contest.record.acts()
        assert overlaps(acts) == []
        assert [act.contestant for act in acts if act.what == BEGIN] == [one.contestant for one in order] * ROUNDS


@pytest.mark.parametrize("store", STORES)
def test_two_that_stand_for_different_names_are_found_to_overlap(store: type[Store], tmp_path: Path) -> None:
    """The check of these tests can fail: two leaders at once, recorded under one name, are found."""
    with Contest(store, next(iter(store.clients)), tmp_path) as contest:
        ours, foreign = contest.ours(), contest.foreign()
        ours.stand("one")
        foreign.stand("other")
        ours.until_leads("one")
        foreign.until_leads("other")
        until_acted(contest.record, "one", ours.contestant)
        until_acted(contest.record, "other", foreign.contestant)
        acts = contest.record.acts()
        assert overlaps(acts) == []
        found = overlaps([replace(act, name="chair") for act in acts])
        assert any("begins to lead" in line for line in found)
        assert any("writes 'act'" in line for line in found)


def leading(contestant: Contestant, name: str) -> None:
    contestant.stand(name)
    contestant.until_leads(name)


def retire(contestant: Contestant, name: str) -> None:
    contestant.release(name)
    contestant.until_released(name)
