"""The courses that two contestants run: they hand the leadership over to each other, or one of them is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from tests.interop.acts import ACT, END, Act, Record, overlaps, terms
from tests.interop.contest import Contest
from tests.interop.contestants import PATIENCE, Contestant
from tests.interop.stores import SLOW, Store

ACTS = 3
"""Acts of the leader during which the other one stands by."""
KILLED = 0.2
"""The share of terms in a crowd that end by ``kill -9``."""
SLACK = 2.0
"""Seconds: a tick of the server, the candidate's next request, and a machine that is busy with other tests."""


def hand_over(
    contest: Contest, one: Contestant, other: Contestant, hand_overs: int, names: Sequence[str]
) -> list[float]:
    """Let two contestants hand each of the elections *names* over, in turn, so many times in all.

    Returns:
        The seconds from each request to give the leadership up until the other one leads.

    Raises:
        AssertionError: Both have led at once, or one of them did not get its turn.
    """
    record, first, took = contest.record, len(contest.record.acts()), []
    rounds = -(-hand_overs // len(names))
    leader, follower = one, other
    for name in names:
        leader.stand(name)
    for name in names:
        leader.until_leads(name)
    for _ in range(rounds):
        for name in names:
            follower.stand(name)
        for name in names:
            until_places(contest.store, name, 2)
            until_acted(record, name, leader.contestant)
        asked = time.monotonic()
        for name in names:
            leader.release(name)
        for name in names:
            follower.until_leads(name)
            took.append(time.monotonic() - asked)
            leader.until_released(name)
        leader, follower = follower, leader
    for name in names:
        leader.release(name)
    for name in names:
        leader.until_released(name)
    acts = record.acts()[first:]
    found = overlaps(acts)
    assert not found, found[:5]
    turns = [
        contestant for _, contestant in zip(range(rounds + 1), cycle((one.contestant, other.contestant)), strict=False)
    ]
    assert terms(acts) == {each: turns.count(each) * len(names) for each in turns}, terms(acts)
    return took


def kill(contest: Contest, successions: Sequence[tuple[Contestant, Contestant, str]], lease: float) -> list[float]:
    """Kill the leaders of elections while others stand by; return after how many seconds these lead.

    Args:
        successions: For each election the leader, the one that stands by, and the name.
        lease: The seconds that the leases of the leaders last.

    Raises:
        AssertionError: Two have led at once, or one took longer than the *lease* and *SLACK* to succeed.
    """
    record, first, took = contest.record, len(contest.record.acts()), []
    for leader, _, name in successions:
        leader.stand(name)
    for leader, heir, name in successions:
        leader.until_leads(name)
        heir.stand(name)
    for leader, _, name in successions:
        until_places(contest.store, name, 2)
        until_acted(record, name, leader.contestant)
    killed = time.monotonic()
    for leader, _, _ in successions:
        leader.kill()
    for _, heir, name in successions:
        heir.until_leads(name)
        took.append(time.monotonic() - killed)
    for _, heir, name in successions:
        until_acted(record, name, heir.contestant)
        heir.release(name)
        heir.until_released(name)
    acts = record.acts()[first:]
    found = overlaps(acts)
    assert not found, found[:5]
    assert terms(acts).keys() == {each.contestant for *both, _ in successions for each in both}, terms(acts)
    assert max(took) <= lease + SLACK, f"after {max(took):.2f} s one did not succeed yet, with a lease of {lease:g} s"
    return took


def crowd(contest: Contest, rng: random.Random, turns: int, name: str) -> None:
    """Let two of ours and two foreign ones stand at once; the leader hands over, or is killed and replaced.

    Raises:
        AssertionError: Two have led at once, or none led for long.
    """
    record, first = contest.record, len(contest.record.acts())
    kinds = {contest.ours(): contest.ours, contest.foreign(): contest.foreign}
    kinds |= {contest.ours(): contest.ours, contest.foreign(): contest.foreign}
    by_name = {one.contestant: one for one in kinds}
    for one in kinds:
        one.stand(name)
    for _ in range(turns):
        until(lambda: leader_of(record, name), f"nobody leads {name}")
        leader = by_name[leader_of(record, name)]
        until_acted(record, name, leader.contestant)
        is_slow = contest.client in SLOW and kinds[leader] == contest.foreign
        if rng.random() < KILLED and not is_slow:
            leader.kill()
            kinds[new := kinds[leader]()] = kinds[leader]
            by_name[new.contestant] = new
            new.stand(name)
        else:
            leader.release(name)
            leader.until_released(name)
            leader.stand(name)
    found = overlaps(record.acts()[first:])
    assert not found, found[:5]


def leader_of(record: Record, name: str) -> str:
    """Return the contestant that leads now; empty for none."""
    last = next((act for act in reversed(record.acts()) if act.name == name), None)
    return last.contestant if last and last.what != END else ""


def until_places(store: Store, name: str, places: int) -> None:
    """Wait until so many stand for *name*, if candidates stand in a queue."""
    until(lambda: not store.is_queued or store.places(name) == places, f"not {places} stand for {name}")


def until_acted(record: Record, name: str, contestant: str) -> None:
    """Wait until a leader has acted some more, or has lost its term."""
    act = Act(ACT, name, contestant)
    enough = record.acts().count(act) + ACTS

    def has_acted() -> bool:
        return record.acts().count(act) >= enough or leader_of(record, name) != contestant

    until(has_acted, f"{contestant} does not act for {name}")


def until(condition: Callable[[], object], otherwise: str) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.002)
