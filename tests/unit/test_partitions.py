"""The partitions of a group, the shares of its members, and single steps of a member's machine."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure._lease import HeldBy, Vacant
from tenure._partitions.machine import Ask, Claim, Give, Join, Leave, Look, PartitionMachine
from tenure._partitions.plan import (
    LAYOUT,
    ORDER,
    PARTITIONS_MAX,
    WEIGHT,
    Layout,
    Member,
    checked_partitions,
    identity_of,
    member_of,
    shares,
)
from tenure._queue.identity import partition_number
from tenure._timing import Timing
from tenure.errors import ConfigError

# --- names ---


def test_a_number_gives_numbered_partitions() -> None:
    assert checked_partitions(3) == ("partition-0", "partition-1", "partition-2")
    assert checked_partitions(["eu", "us"]) == ("eu", "us")
    assert checked_partitions(name for name in ("eu", "us")) == ("eu", "us")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (0, "1 to 10,000, not 0"),
        (-1, "not -1"),
        (PARTITIONS_MAX + 1, "not 10,001"),
        (True, "a number or names"),
        (2.0, "a number or names"),
        ("eu", "a number or names"),
        (b"eu", "a number or names"),
        (None, "a number or names"),
        ([], "not 0"),
        (["eu", ""], "at least one character"),
        (["eu", 3], "at least one character, not 3"),
        (["eu", "us", "eu"], "'eu' is named twice"),
        (["member-3"], "must not begin with 'member-'"),
        (["eu.west"], "must have no dot, as 'eu.west' does"),
        ({"eu"}, "a set has none; try sorted(…)"),
    ],
    ids=ascii,
)
def test_what_can_not_be_partitions_is_refused(bad: object, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_partitions(bad)  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_sessions_and_partitions_have_the_same_names() -> None:
    names = checked_partitions(16)
    for key in ("alice", "bob", b"\0\xff", "Zoë"):
        assert tenure.partition_of(key, 16) == names[partition_number(key, 16)]
    assert partition_number("alice", 16) == zlib.crc32(b"alice") % 16  # as librdkafka's partitioner "consistent"


def test_a_layout_is_told_from_another_one() -> None:
    texts = [Layout("orders", checked_partitions(one)).text for one in (2, 3, ["eu", "us"], ["us", "eu"], ["eu"])]
    assert texts[0] == "2"
    assert len(set(texts)) == len(texts)
    assert Layout("orders", ("partition-0", "partition-1")).text == texts[0]


def test_a_member_is_read_from_its_slot() -> None:
    held = HeldBy("orders.member-3", "host-1-ab-cdef", 7, 1.0, {ORDER: "12", WEIGHT: "3", LAYOUT: "64", "url": "x"})
    assert member_of(3, held) == Member(3, "host-1-ab", 12, 3, "64")
    assert identity_of(held.holder) == "host-1-ab"


@pytest.mark.parametrize(
    "text", ["", "-1", "x", "1e3", "²", "٣", "9" * 10, "9" * 30, "9" * 5_000], ids=lambda text: str(text)[:12]
)
def test_numbers_that_another_program_wrote_are_no_error(text: str) -> None:
    assert member_of(0, HeldBy("s", "a-b", 1, None, {ORDER: text, WEIGHT: text})) == Member(0, "a", 0, 1)


def test_a_layout_that_another_program_wrote_is_bounded() -> None:
    assert len(member_of(0, HeldBy("s", "a-b", 1, None, {LAYOUT: "9" * 100_000})).layout) < 100


def test_a_weight_that_another_program_wrote_is_bounded() -> None:
    assert member_of(0, HeldBy("s", "a-b", 1, None, {WEIGHT: "99999999"})).weight == 1_000


# --- shares ---

WEIGHTS = st.lists(st.integers(1, 5), min_size=1, max_size=12)


def members(weights: Sequence[int]) -> list[Member]:
    return [Member(place, f"m{place}", place + 1, weight) for place, weight in enumerate(weights)]


@given(WEIGHTS, st.integers(1, 200))
def test_shares_are_all_partitions_and_follow_the_weights(weights: list[int], partitions: int) -> None:
    found = shares(members(weights), partitions)
    assert sum(found.values()) == partitions
    for place, weight in enumerate(weights):
        assert abs(found[f"m{place}"] - partitions * weight / sum(weights)) < 1 + 1e-9


@given(st.integers(1, 12), st.integers(1, 200))
def test_equal_members_differ_by_one_at_most(count: int, partitions: int) -> None:
    found = shares(members([1] * count), partitions).values()
    assert max(found) - min(found) <= 1


@given(st.integers(1, 12), st.integers(1, 200))
def test_a_newcomer_moves_its_own_share_and_no_more(count: int, partitions: int) -> None:
    before, after = (shares(members([1] * number), partitions) for number in (count, count + 1))
    newcomer = f"m{count}"
    assert all(after[one] <= before[one] for one in before)
    assert sum(before[one] - after[one] for one in before) == after[newcomer] <= -(-partitions // (count + 1))


@given(st.integers(2, 12), st.integers(1, 200), st.integers(0, 11))
def test_a_leaver_moves_what_it_had_and_no_more(count: int, partitions: int, leaver: int) -> None:
    all_members = members([1] * count)
    gone = all_members.pop(leaver % count).identity
    before, after = shares(members([1] * count), partitions), shares(all_members, partitions)
    assert all(after[one] >= before[one] for one in after)
    assert sum(after[one] - before[one] for one in after) == before[gone]


@given(WEIGHTS, st.integers(1, 50), st.randoms())
def test_all_members_compute_the_same_shares(weights: list[int], partitions: int, rng: random.Random) -> None:
    seen = members(weights)
    shuffled = rng.sample(seen, len(seen))
    assert shares(seen, partitions) == shares(shuffled, partitions)


# --- the machine ---


def machine(identity: str = "me", partitions: int = 4) -> PartitionMachine:
    layout = Layout("g", checked_partitions(partitions))
    return PartitionMachine(layout, identity, Timing(15.0), random.Random(1), weight=1, now=0.0)


def states(owners: Sequence[str], slots: dict[int, Member] | None = None, asked: str = "") -> list[HeldBy | Vacant]:
    """Return what a look finds: in *owners* a letter for each partition, and a dot for a vacant one."""
    found: list[HeldBy | Vacant] = []
    for number in range(16):
        member = (slots or {}).get(number)
        if member is None:
            found.append(Vacant(f"g.member-{number}"))
        else:
            texts = {ORDER: str(member.order), WEIGHT: str(member.weight), LAYOUT: member.layout}
            found.append(HeldBy(f"g.member-{number}", f"{member.identity}-x", 1, 9.0, texts))
    for number, owner in enumerate(owners):
        name = f"g.partition-{number}"
        is_asked = number < len(asked) and asked[number] == "!"
        found.append(Vacant(name) if owner == "." else HeldBy(name, f"{owner}-x", 1, 9.0, resign_asked=is_asked))
    return found


def joined(one: PartitionMachine) -> None:
    """Let a machine join a group without members."""
    assert isinstance(one.tick(0.0)[0], Look)
    [join] = one.looked(states("...."), 0.1)
    assert isinstance(join, Join)
    one.joined(0.2)


def test_the_first_member_claims_all() -> None:
    one = machine()
    joined(one)
    [look] = one.tick(0.3)
    assert isinstance(look, Look)
    assert look.leases[-4:] == ("g.partition-0", "g.partition-1", "g.partition-2", "g.partition-3")
    assert one.looked(states("...."), 0.4) == [Claim(f"partition-{number}") for number in range(4)]
    assert not one.owned
    for number in range(4):
        one.won(f"partition-{number}", 0.5)
    assert one.owned == ("partition-0", "partition-1", "partition-2", "partition-3")


def test_who_hears_nothing_claims_no_more() -> None:
    """A claim without an answer may be granted, and keep the partition from the others."""
    for silent in (PartitionMachine.look_failed, PartitionMachine.slot_ended):
        one = machine(partitions=100)
        one.tick(0.0)
        one.looked(states(100 * "."), 0.1)
        one.joined(0.2)
        one.tick(0.3)
        claimed = one.looked(states(100 * "."), 0.4)
        assert 0 < len(claimed) < 100
        silent(one, 0.5)
        for claim in claimed:
            assert isinstance(claim, Claim)
            assert not one.ended(claim.partition, 0.6)


def test_no_second_look_is_begun_while_one_is_under_way() -> None:
    one = machine()
    assert len(one.tick(0.0)) == 1
    one.hinted(0.0)
    assert one.wake_at == float("inf")
    assert one.tick(100.0) == []
    one.look_failed(100.0)
    assert 100.0 <= one.wake_at < 103.0
    assert len(one.tick(103.0)) == 1


def test_a_hint_during_a_look_is_not_forgotten() -> None:
    one = machine()
    joined(one)
    one.tick(0.3)
    one.hinted(0.31)
    one.looked(states("xxxx", {1: Member(1, "x", 9, 1, "4")}), 0.32)
    assert one.wake_at <= 0.31 + 0.2


def test_a_member_with_other_partitions_is_a_conflict() -> None:
    one = machine()
    one.tick(0.0)
    assert one.looked(states("....", {2: Member(2, "old", 5, 1, "8")}), 0.1) == []
    assert one.conflict is not None
    assert "other partitions (8)" in one.conflict
    assert "(4): old" in one.conflict


def test_where_no_time_is_known_a_member_with_other_partitions_may_be_dead() -> None:
    """A process that looks for the first time can't tell there; it must neither join nor fail before it knows."""
    one = machine()
    texts = {ORDER: "5", LAYOUT: "8"}
    for now, is_conflict in ((0.0, False), (10.0, False), (16.0, True)):
        one.tick(now)
        found: list[HeldBy | Vacant] = [HeldBy("g.member-0", "old-x", 1, None, texts), *[Vacant("g.x")] * 19]
        assert one.looked(found, now) == []
        assert (one.conflict is not None) is is_conflict
    gone = machine()
    gone.tick(0.0)
    gone.looked([HeldBy("g.member-0", "old-x", 1, None, texts), *[Vacant("g.x")] * 19], 0.0)
    gone.tick(16.0)
    [join] = gone.looked([Vacant("g.x")] * 20, 16.0)
    assert isinstance(join, Join)


def test_of_two_with_other_partitions_the_older_one_stays() -> None:
    older, later = machine(), machine()
    joined(older)
    older.tick(0.3)
    older.looked(states("....", {3: Member(3, "late", 5, 1, "8")}), 0.4)
    assert older.conflict is None
    joined(later)
    later.tick(0.3)
    later.looked(states("....", {3: Member(3, "old", 0, 1, "8")}), 0.4)
    assert later.conflict is not None


def test_a_slot_without_a_layout_is_no_member_and_not_free() -> None:
    """Its metadata are written a moment later on some stores; or it is another program's."""
    one = machine()
    one.tick(0.0)
    [join] = one.looked(states("....", {0: Member(0, "new", 0, 1, "")}), 0.1)
    assert isinstance(join, Join)
    assert join.slot != 0
    assert join.order == 1


def test_a_member_seen_in_two_slots_counts_once() -> None:
    one = machine()
    joined(one)
    one.tick(0.3)
    other = {1: Member(1, "other", 9, 1, "4"), 2: Member(2, "other", 9, 1, "4")}
    assert len(one.looked(states("....", other), 0.4)) == 2
    assert one.share == 2


def test_it_gives_what_it_was_asked_for_first_and_then_the_newest() -> None:
    one = machine()
    joined(one)
    one.tick(0.3)
    one.looked(states("...."), 0.4)
    for number in range(4):
        one.won(f"partition-{number}", 0.5)
    one.tick(9.0)
    given = one.looked(states(["me"] * 4, {1: Member(1, "n", 9, 1, "4")}, asked=".!.."), 9.1)
    assert given == [Give("partition-1"), Give("partition-3")]


def test_a_request_is_an_operators_only_while_nobody_lacks_a_partition() -> None:
    for other_owns, is_given in (("..", False), ("aa", True)):
        one = machine()
        joined(one)
        other = {1: Member(1, "a", 9, 1, "4")}
        one.tick(0.3)
        one.looked(states("..aa", other), 0.4)
        for number in range(2):
            one.won(f"partition-{number}", 0.5)
        one.tick(20.0)
        asked = one.looked(states(["me", "me", *other_owns], other, asked="!..."), 20.0)
        assert asked == ([Give("partition-0")] if is_given else [])
        one.tick(40.0)
        later = one.looked(states(["me", "me", "a", "a"], other, asked="!..."), 40.0)
        assert later == []  # given already; or it was of another member, which has what it lacked


def test_one_that_lacks_partitions_asks_each_that_has_too_many_once() -> None:
    one = machine()
    joined(one)
    one.tick(0.3)
    found = states("aaaa", {1: Member(1, "a", 0, 1, "4")}, asked="!...")
    assert one.looked(found, 0.4) == [Ask("partition-1")]  # the first was asked for already, and gives no new hint
    one.tick(5.0)
    assert one.looked(found, 5.0) == []  # its work may take a while to end
    one.tick(16.0)
    assert one.looked(found, 16.0) == [Ask("partition-1")]


def test_a_leaver_releases_its_slot_first() -> None:
    one = machine()
    joined(one)
    one.tick(0.3)
    one.looked(states("...."), 0.4)
    assert one.leave(0.5) == [Leave(), *(Give(f"partition-{number}") for number in range(4))]
    assert one.leave(0.6) == []
    assert one.wake_at == float("inf")
    one.slot_ended(0.7)
    for number in range(4):
        assert not one.has_left
        one.ended(f"partition-{number}", 0.8)
    assert one.has_left


def test_a_look_that_ends_after_leaving_changes_nothing() -> None:
    one = machine()
    one.tick(0.0)
    one.leave(0.1)
    assert one.looked(states("...."), 0.2) == []
    assert one.has_left


def test_it_has_so_many_claims_under_way_at_most() -> None:
    one = machine(partitions=200)
    joined_of(one)
    claims = one.looked(nobody_holds(one), 0.3)
    assert len(claims) == 64
    names = [claim.partition for claim in claims if isinstance(claim, Claim)]
    for claimed in names:
        more = one.won(claimed, 0.4)
        names += [claim.partition for claim in more if isinstance(claim, Claim)]  # one for each, to the last
    assert names == list(one.owned) == list(one.layout.partitions)
    assert one.wake_at < 0.7  # to look whether there is more


def test_claims_that_fail_hold_up_no_others_and_are_repeated_after_a_while() -> None:
    one = machine(partitions=100)
    joined_of(one)
    claims = one.looked(nobody_holds(one), 0.3)
    for claim in claims:
        assert isinstance(claim, Claim)
        claims += one.ended(claim.partition, 0.4)  # refused, or without an answer
    assert len(claims) == 100
    one.tick(1.0)
    assert one.looked(nobody_holds(one), 1.0) == []
    one.tick(3.0)
    assert len(one.looked(nobody_holds(one), 3.0)) == 64


def joined_of(one: PartitionMachine) -> None:
    """Let a machine of any size join a group without members, and begin a look."""
    one.tick(0.0)
    [join] = one.looked(nobody_holds(one), 0.1)
    assert isinstance(join, Join)
    one.joined(0.2)
    [look] = one.tick(0.3)
    assert isinstance(look, Look)


def nobody_holds(one: PartitionMachine) -> list[HeldBy | Vacant]:
    """Return what the next look finds if all leases are vacant."""
    return [Vacant("g.x")] * (one._slots_seen + len(one.layout.partitions))


def test_a_claim_that_is_given_up_makes_room_for_another() -> None:
    one = machine(partitions=100)
    nobody = [Vacant("g.x")] * 100
    one.tick(0.0)
    one.looked([*nobody, *nobody], 0.1)
    one.joined(0.2)
    [look] = one.tick(0.3)
    assert isinstance(look, Look)
    slots = len(look.leases) - 100
    assert len(one.looked([*nobody[:slots], *nobody], 0.3)) == 64
    [look] = one.tick(1.0)
    assert isinstance(look, Look)
    text = one.layout.text
    others = [HeldBy("g.member-x", f"m{n}-x", 1, 9.0, {ORDER: "9", LAYOUT: text}) for n in range(9)]
    given = one.looked([*others, *nobody[: len(look.leases) - 109], *nobody], 1.0)
    assert given == [Give(f"partition-{number}") for number in range(63, 9, -1)]  # its share is 10
    for gone in given:
        assert isinstance(gone, Give)
        one.ended(gone.partition, 1.1)
    for number in range(10):
        one.won(f"partition-{number}", 1.2)
    assert len(one.owned) == 10


def test_members_with_the_same_view_claim_different_partitions() -> None:
    claimed = []
    for identity, order in (("old", 1), ("new", 2)):
        one = PartitionMachine(
            Layout("g", checked_partitions(8)), identity, Timing(), random.Random(1), weight=1, now=0
        )
        one._order = order  # as if it had joined so
        one.tick(0.0)
        [join] = one.looked([Vacant("g.x")] * 24, 0.1)
        assert isinstance(join, Join)
        one.joined(0.2)
        [look] = one.tick(0.3)
        assert isinstance(look, Look)
        other = HeldBy("g.x", "new-x" if identity == "old" else "old-x", 1, 9.0, {ORDER: str(3 - order), LAYOUT: "8"})
        slots = [Vacant("g.x")] * (len(look.leases) - 8)
        slots[(join.slot + 1) % len(slots)] = other  # type: ignore[call-overload]
        claimed += [effect for effect in one.looked([*slots, *[Vacant("g.x")] * 8], 0.4) if isinstance(effect, Claim)]
    assert len(claimed) == len(set(claimed)) == 8
