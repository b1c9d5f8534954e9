"""Groups of partitions as the leases of a store show them, and what is no part of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tenure import Leader, PartitionGroup, PartitionMember
from tenure._partitions.plan import Layout


def identity(label: str) -> str:
    return f"{label}-{sum(label.encode()):016x}"


def held(label: str, number: int = 1, **metadata: str) -> Leader:
    """Return the holder of a lease of the member *label*."""
    return Leader(f"{identity(label)}-{number:032x}", number, metadata, 5.0)


def slot(label: str, order: int, layout: str = "4", weight: int = 1, **metadata: str) -> Leader:
    own = {"tenure-order": str(order), "tenure-weight": str(weight), "tenure-partitions": layout}
    return held(label, order, **own, **metadata)


def owning(name: str, owners: dict[str, Leader | None]) -> dict[str, Leader | None]:
    return {f"{name}.{partition}": owner for partition, owner in owners.items()}


ELECTION = Leader(f"ann-{7:032x}", 3)
"""The leader of an ordinary election."""


def one_group(leaders: dict[str, Leader | None]) -> PartitionGroup:
    [group] = PartitionGroup.all_in(leaders)
    return group


def two_members() -> dict[str, Leader | None]:
    return {
        "orders.member-0": slot("ann", 1, address="10.0.0.1"),
        "orders.member-3": slot("bob", 2),
        "orders.member-5": None,
        "orders.partition-0": held("ann"),
        "orders.partition-1": held("ann"),
        "orders.partition-2": held("bob"),
        "orders.partition-3": held("bob"),
    }


def test_a_group_has_its_members_and_owners() -> None:
    leaders = two_members()
    group = one_group(leaders)
    assert group.name == "orders"
    assert group.owners == {f"partition-{number}": leaders[f"orders.partition-{number}"] for number in range(4)}
    ann, bob = group.members
    assert ann == PartitionMember(identity("ann"), 1, 2, ("partition-0", "partition-1"), {"address": "10.0.0.1"})
    assert (bob.identity, bob.share, bob.owned) == (identity("bob"), 2, ("partition-2", "partition-3"))
    assert bob.metadata == {}
    assert group.balanced
    assert group.vacant == ()
    assert set(group.leases) == set(leaders)


def test_numbered_partitions_are_known_before_they_were_owned() -> None:
    group = one_group({"orders.member-0": slot("ann", 1, "12")})
    assert list(group.owners) == [f"partition-{number}" for number in range(12)]
    assert group.vacant == tuple(group.owners)
    assert not group.balanced
    assert group.members[0].share == 12


@pytest.mark.parametrize("leader", [ELECTION, None])
@pytest.mark.parametrize("has_members", [True, False])
def test_an_election_beside_numbered_partitions_is_none(leader: Leader | None, has_members: bool) -> None:
    leaders: dict[str, Leader | None] = {
        **two_members(),
        "orders.report": leader,
        "orders": leader,
        "orders2.x": leader,
    }
    if not has_members:
        leaders |= {"orders.member-0": None, "orders.member-3": None}
    group = one_group(leaders)
    assert len(group.owners) == 4
    assert set(leaders) - set(group.leases) == {"orders.report", "orders", "orders2.x"}


def test_an_election_with_the_name_of_a_slot_makes_no_group() -> None:
    assert PartitionGroup.all_in({"team.member-1": ELECTION, "team.report": None}) == []
    assert PartitionGroup.all_in({"member-1": None, "team.member-01": None, "team.member-x": None}) == []


def test_an_owner_that_is_no_member_any_more_is_shown() -> None:
    leaders = two_members() | {"orders.member-3": None}
    group = one_group(leaders)
    assert group.owners["partition-3"] == leaders["orders.partition-3"]
    [ann] = group.members
    assert (ann.share, len(ann.owned)) == (4, 2)
    assert not group.balanced
    assert group.vacant == ()


def test_a_member_that_has_not_written_its_part_yet_is_none() -> None:
    group = one_group(two_members() | {"orders.member-6": held("joe")})
    assert [one.identity for one in group.members] == [identity("ann"), identity("bob")]
    assert "orders.member-6" in group.leases


def test_a_member_that_is_seen_in_two_slots_is_one() -> None:
    group = one_group(two_members() | {"orders.member-9": slot("ann", 1)})
    assert [one.identity for one in group.members] == [identity("ann"), identity("bob")]


def test_shares_follow_the_weights_and_the_oldest_is_first() -> None:
    group = one_group({"g.member-0": slot("new", 9, weight=3), "g.member-1": slot("old", 2)})
    assert [(one.identity, one.weight, one.share) for one in group.members] == [
        (identity("old"), 1, 1),
        (identity("new"), 3, 3),
    ]


def test_named_partitions_are_those_that_exist() -> None:
    text = Layout("g", ("us", "eu", "eu-west")).text
    leaders = {"g.member-0": slot("ann", 1, text), **owning("g", {"us": held("ann"), "eu-west": None})}
    group = one_group(leaders)
    assert list(group.owners) == ["eu-west", "us"]
    assert group.members[0].share == 3  # one was never owned
    assert group.vacant == ("eu-west",)
    assert not group.balanced


def test_without_members_the_partitions_are_those_that_exist() -> None:
    names = ["partition-10", "partition-2", "partition-1"]
    group = one_group({"g.member-0": None, **owning("g", dict.fromkeys(names))})
    assert list(group.owners) == ["partition-1", "partition-2", "partition-10"]
    assert (group.members, group.balanced) == ((), False)
    assert list(one_group({"g.member-0": None, "g.us": None, "g.eu": None}).owners) == ["eu", "us"]


def test_of_more_partitions_that_there_once_were_the_owned_ones_are_left_to_others() -> None:
    more = {"orders.partition-4": None, "orders.partition-5": held("old"), "orders.partition-04": None}
    group = one_group(two_members() | more)
    assert len(group.owners) == 4
    assert set(more) - set(group.leases) == {"orders.partition-5", "orders.partition-04"}


def test_the_oldest_member_says_which_partitions_there_are() -> None:
    assert len(one_group({"g.member-0": slot("new", 2, "8"), "g.member-1": slot("old", 1, "4")}).owners) == 4


def test_groups_may_have_dots_in_their_names() -> None:
    eu = Layout("shop", ("eu", "us")).text
    leaders = {
        "shop.member-0": slot("ann", 1, eu),
        "shop.eu": held("ann"),
        "shop.orders.member-0": slot("bob", 1, "1"),
        "shop.orders.partition-0": held("bob"),
        "a.member-0": None,  # an election of that name, which nobody leads now
    }
    shop, orders = PartitionGroup.all_in(leaders)
    assert (shop.name, orders.name) == ("shop", "shop.orders")
    assert list(shop.owners) == ["eu"]
    assert list(orders.owners) == ["partition-0"]


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "99999999", "4 5", "4 zzzzzzzz", "٣", "9" * 5000])
@pytest.mark.parametrize("number", ["", "x", "9" * 5000])
def test_what_another_program_has_written_harms_nothing(text: str, number: str) -> None:
    written = {"tenure-order": number, "tenure-weight": number, "tenure-partitions": text}
    group = one_group({"g.member-0": held("ann", 1, **written), "g.a": None, f"g.{'9' * 900}": None, "g.": None})
    assert len(group.owners) == 3


def test_many_leases_take_little_time() -> None:
    def leases(group: int) -> Iterable[tuple[str, Leader | None]]:
        yield f"g{group}.member-0", slot("ann", 1, "1000")
        for number in range(1_000):
            yield f"g{group}.partition-{number}", held("ann", number)

    found = PartitionGroup.all_in(dict(pair for group in range(20) for pair in leases(group)))
    assert all(group.balanced and len(group.members[0].owned) == 1_000 for group in found)
