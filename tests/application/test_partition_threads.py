"""Partitions of tenure.sync: real threads, and real time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure.events import Event, TermBegan
from tests.application.test_threads import IMPATIENT, nothing_left_behind
from tests.durations import PATIENCE, wait_until

__all__ = ["nothing_left_behind"]  # a fixture

BRISK: dict[str, Any] = {"ttl": 30.0, "retry_every": 0.1}
"""Leases that last through any pause of a busy machine, and members that look often."""


@pytest.fixture(params=["memory", "sqlite"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory:{uuid4().hex}" if request.param == "memory" else f"sqlite:///{tmp_path}/work.db"


@pytest.fixture
def backend() -> Iterator[tenure.sync.Backend]:
    with tenure.sync.connect(f"memory:{uuid4().hex}") as opened:
        yield opened


class Member:
    """A member whose ``run`` blocks a thread of its own; its work lasts until it is told to end."""

    def __init__(self, partitions: tenure.sync.Partitions, work: tenure.sync.PartitionWork | None = None) -> None:
        self.partitions = partitions
        self.terms: list[tenure.sync.PartitionTerm] = []
        self.stop = threading.Event()
        self.may_end = threading.Event()  # for work that a stop lets finish
        self.error: BaseException | None = None
        self._work = work or self.wait
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.partitions.run(self._note, stop=self.stop)
        except BaseException as error:
            self.error = error

    def _note(self, term: tenure.sync.PartitionTerm) -> Any:
        self.terms.append(term)
        return self._work(term)

    def wait(self, term: tenure.sync.PartitionTerm) -> None:
        wait_until(lambda: term.lost.is_set() or self.may_end.is_set())

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> BaseException | None:
        """Wait until ``run`` has ended; return its error."""
        self._thread.join(PATIENCE)
        assert not self.is_running
        return self.error


def members_seen(backend: tenure.sync.Backend) -> int:
    """Return how many members the store knows: those that hold a slot."""
    return sum(leader is not None for name, leader in backend.leaders().items() if ".member-" in name)


def owns(member: Member, count: int) -> Callable[[], bool]:
    return lambda: len(member.partitions.owned) == count


def test_two_members_share_and_a_leaver_hands_over(any_url: str) -> None:
    with tenure.sync.connect(any_url) as backend:
        first = Member(backend.partitions("orders", 6, **BRISK))
        wait_until(owns(first, 6))
        assert repr(first.partitions) == "<Partitions 'orders', ttl 30 s, 6 of 6 partitions owned>"
        second = Member(backend.partitions("orders", 6, **BRISK))
        wait_until(lambda: owns(first, 3)() and owns(second, 3)())
        assert {*first.partitions.owned, *second.partitions.owned} == set(first.partitions.names)

        owners = second.partitions.owners()
        assert list(owners) == list(second.partitions.names)
        held = {name: leader.token for name, leader in owners.items() if leader is not None}
        wait_until(lambda: len(second.terms) == 3)  # owned a moment before the thread of the work runs
        assert {term.partition: term.token for term in second.terms}.items() <= held.items()
        assert sum(term.lost.is_set() for term in first.terms) == 3  # those that were given

        first.may_end.set()
        first.stop.set()
        assert first.ended() is None
        wait_until(owns(second, 6))
        second.may_end.set()
        second.stop.set()
        assert second.ended() is None
        assert set(second.partitions.owners().values()) == {None}
        assert second.partitions.owned == ()


def test_shares_follow_the_weights(backend: tenure.sync.Backend) -> None:
    light, heavy = backend.partitions("orders", 6, **BRISK), backend.partitions("orders", 6, weight=2, **BRISK)
    with light, heavy:
        members = Member(light), Member(heavy)
        wait_until(lambda: owns(members[0], 2)() and owns(members[1], 4)())
    assert [member.ended() for member in members] == [None, None]


def test_work_gets_the_term_of_its_partition_on_a_thread_of_its_own(backend: tenure.sync.Backend) -> None:
    threads: dict[str, str] = {}

    def work(term: tenure.sync.PartitionTerm) -> None:
        term.check()
        threads[term.partition] = threading.current_thread().name
        term.lost.wait(PATIENCE)

    with backend.partitions("orders", ["eu", "us"], metadata={"at": "here"}, label="me", **BRISK) as mine:
        member = Member(mine, work)
        wait_until(lambda: len(threads) == 2)
        assert {term.partition: term.name for term in member.terms} == {"eu": "orders.eu", "us": "orders.us"}
        assert all(isinstance(term, tenure.sync.PartitionTerm) for term in member.terms)
        assert all(isinstance(term, tenure.sync.Term) for term in member.terms)
        assert threads == {"eu": "tenure-orders.eu-1", "us": "tenure-orders.us-1"}
        leader = mine.owners()["eu"]
        assert leader is not None
        assert (leader.metadata, leader.holder[:3]) == ({"at": "here"}, "me-")
        assert mine.partition_of("a key") in ("eu", "us")
        assert mine.partition_of("a key") == mine.partition_of(b"a key")
    assert member.ended() is None
    assert (mine.name, mine.names, mine.weight, mine.label) == ("orders", ("eu", "us"), 1, "me")
    assert (mine.timing.ttl, mine.metadata) == (30.0, {"at": "here"})


def test_an_error_of_work_is_raised_once_everything_is_released(backend: tenure.sync.Backend) -> None:
    ended: list[str] = []
    all_run = threading.Barrier(3)

    def work(term: tenure.sync.PartitionTerm) -> None:
        all_run.wait(PATIENCE)
        if term.partition == "partition-1":
            raise LookupError("no plan")
        assert term.lost.wait(PATIENCE)
        ended.append(term.partition)
        term.check()  # its TermLost is expected

    mine = backend.partitions("orders", 3, **BRISK)
    with pytest.raises(LookupError, match="no plan"):
        mine.run(work)
    assert sorted(ended) == ["partition-0", "partition-2"]
    assert set(mine.owners().values()) == {None}
    assert members_seen(backend) == 0


def test_a_partition_whose_work_has_ended_is_claimed_again(backend: tenure.sync.Backend) -> None:
    stop = threading.Event()
    tokens: list[int] = []

    def work(term: tenure.sync.PartitionTerm) -> None:
        tokens.append(term.token)
        if len(tokens) == 3:
            stop.set()

    backend.partitions("orders", 1, **BRISK).run(work, stop=stop)
    assert tokens == [1, 2, 3]


def test_a_stop_lets_work_finish(backend: tenure.sync.Backend) -> None:
    member = Member(backend.partitions("orders", 2, **BRISK))
    successor: Member | None = None
    try:
        wait_until(lambda: len(member.terms) == 2)
        member.stop.set()
        wait_until(lambda: members_seen(backend) == 0)  # it is leaving
        successor = Member(backend.partitions("orders", 2, **BRISK))
        wait_until(lambda: members_seen(backend) == 1)
        assert not any(term.lost.is_set() for term in member.terms)
        assert member.is_running
        assert set(member.partitions.owned) == {"partition-0", "partition-1"}
        member.may_end.set()
        assert member.ended() is None
        wait_until(lambda: len(successor.terms) == 2)
        assert [term.token for term in successor.terms] == [2, 2]
    finally:
        for one in filter(None, (member, successor)):
            one.may_end.set()
            one.stop.set()
            assert one.ended() is None


def test_a_stop_that_was_set_before_begins_nothing(backend: tenure.sync.Backend) -> None:
    stop = threading.Event()
    stop.set()
    backend.partitions("orders", 2, **BRISK).run(lambda term: pytest.fail("it ran"), stop=stop)
    assert backend.leaders() == {}


def test_one_object_is_one_member(backend: tenure.sync.Backend) -> None:
    mine = backend.partitions("orders", 1, **BRISK)
    refused: list[str] = []
    stop = threading.Event()

    def work(term: tenure.sync.PartitionTerm) -> None:
        try:
            mine.run(work)
        except tenure.ConfigError as error:
            refused.append(str(error))
        stop.set()

    mine.run(work, stop=stop)
    mine.run(work, stop=stop)  # at once, as it is set
    (message,) = refused
    assert "takes part in 'orders' already" in message
    assert "backend.partitions('orders', …)" in message


def test_a_block_ends_what_runs_and_waits_for_it(backend: tenure.sync.Backend) -> None:
    ended: list[str] = []

    def work(term: tenure.sync.PartitionTerm) -> None:
        assert term.lost.wait(PATIENCE)
        assert not is_left.wait(0.05)
        ended.append(term.partition)

    is_left = threading.Event()
    with backend.partitions("orders", 2, **BRISK) as mine:
        member = Member(mine, work)
        wait_until(lambda: len(member.terms) == 2)
    is_left.set()
    assert sorted(ended) == ["partition-0", "partition-1"]
    assert set(mine.owners().values()) == {None}
    assert member.ended() is None


def test_a_block_ends_what_a_stop_lets_finish(backend: tenure.sync.Backend) -> None:
    with backend.partitions("orders", 1, **BRISK) as mine:
        member = Member(mine)
        wait_until(lambda: member.terms)
        member.stop.set()
        wait_until(lambda: members_seen(backend) == 0)
        assert not member.terms[0].lost.is_set()
    assert member.terms[0].lost.is_set()
    assert member.ended() is None


def test_a_block_in_which_nothing_runs_is_left_at_once(backend: tenure.sync.Backend) -> None:
    with pytest.raises(ZeroDivisionError), backend.partitions("orders", 1, **BRISK):
        _ = 1 // 0
    with backend.partitions("orders", 1, **BRISK) as mine:
        backend.close()
    assert mine.owned == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partitions": 0}, "partitions must be from 1 to 10,000, not 0"),
        ({"partitions": []}, "there must be 1 to 10,000 partitions, not 0"),
        ({"partitions": ["eu", "us", "eu"]}, "the partition 'eu' is named twice"),
        ({"partitions": "eu"}, "partitions must be a number or names"),
        ({"weight": 0}, "weight must be a whole number from 1 to 1,000, not 0"),
        ({"ttl": 0.001}, r"ttl \(0.001 s\) must be"),
        ({"metadata": {"tenure-weight": "9"}}, "that begin with 'tenure-' are tenure's own"),
    ],
)
def test_wrong_inputs(backend: tenure.sync.Backend, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(tenure.ConfigError, match=message):
        backend.partitions("orders", **{"partitions": 2, **arguments})


def test_an_option_that_does_not_exist(backend: tenure.sync.Backend) -> None:
    with pytest.raises(TypeError, match="ttl"):
        backend.partitions("orders", 2, tttl=5)  # type: ignore[call-arg]


def test_work_that_is_no_plain_function(backend: tenure.sync.Backend) -> None:
    async def asynchronous(term: tenure.sync.PartitionTerm) -> None: ...

    def generator(term: tenure.sync.PartitionTerm) -> Iterator[None]:
        yield

    mine = backend.partitions("orders", 1, **BRISK)
    with pytest.raises(tenure.ConfigError, match="work must be a plain function"):
        mine.run(asynchronous)
    assert mine.owners() == {"partition-0": None}
    with pytest.raises(tenure.ConfigError, match="work"):
        mine.run(generator)


def test_other_partitions_than_those_of_an_older_member_are_refused(backend: tenure.sync.Backend) -> None:
    with backend.partitions("orders", 2, **BRISK) as mine:
        member = Member(mine)
        wait_until(owns(member, 2))
        with pytest.raises(tenure.ConfigError, match="has a member with other partitions"):
            backend.partitions("orders", 3, **BRISK).run(lambda term: None)
    assert member.ended() is None


def test_hooks_are_called_on_the_consumers_thread_and_health_in_the_context_of_run() -> None:
    request = contextvars.ContextVar("request", default="none")
    events: list[tuple[Event, str]] = []
    asked: set[str] = set()

    def note(event: Event) -> None:
        events.append((event, threading.current_thread().name))

    def began() -> set[str]:
        return {event.name for event, _ in list(events) if isinstance(event, TermBegan)}

    def healthy() -> bool:
        asked.add(request.get())
        return True

    def run(mine: tenure.sync.Partitions, stop: threading.Event) -> None:
        request.set("mine")
        mine.run(lambda term: term.lost.wait(PATIENCE), stop=stop)

    with tenure.sync.connect(f"memory:{uuid4().hex}", on_event=note) as backend:
        with backend.partitions("orders", 1, ttl=1.0, health=healthy) as mine:
            thread = threading.Thread(target=run, args=(mine, threading.Event()))
            thread.start()
            wait_until(lambda: asked and len(began()) == 2)  # the member's own lease may be renewed first
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert began() == {"orders.member-0", "orders.partition-0"}  # of one partition, there is one slot
    assert {thread for _, thread in events} == {"tenure-consumers"}
    assert asked == {"mine"}


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("fails", [False, True], ids=["it ends", "it fails"])
def test_a_backend_that_is_closed_under_work(others: bool, fails: bool) -> None:
    url = f"memory:{uuid4().hex}"
    may_end = threading.Event()

    def work(term: tenure.sync.PartitionTerm) -> None:
        may_end.wait(PATIENCE)
        if fails and term.partition == "partition-1":
            raise LookupError("no plan")

    with tenure.sync.connect(url) if others else nullcontext():
        with tenure.sync.connect(url) as backend:
            member = Member(backend.partitions("orders", 3, **IMPATIENT), work)
            wait_until(lambda: len(member.terms) == 3)
        assert member.is_running  # run does not return before the work does
        may_end.set()
        assert isinstance(member.ended(), LookupError if fails else tenure.Unavailable)


def test_there_are_no_partitions_on_a_closed_backend(backend: tenure.sync.Backend) -> None:
    mine = backend.partitions("orders", 1, **BRISK)
    backend.close()
    with pytest.raises(tenure.Unavailable, match="closed"):
        mine.run(lambda term: None)
    with pytest.raises(tenure.Unavailable, match="closed"):
        mine.owners()
    with pytest.raises(tenure.ConfigError, match="was closed"):
        backend.partitions("orders", 1)
