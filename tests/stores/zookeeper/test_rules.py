"""The rules of the ZooKeeper backend that need no server: names, order, records, and what the leader has heard of."""

from __future__ import annotations

import math
from uuid import UUID

import pytest
from kazoo.retry import ForceRetryError

from tenure._backends.zookeeper.address import Options, address_of
from tenure._backends.zookeeper.driver import reconnecting
from tenure._backends.zookeeper.names import Dialect, escaped, is_of, node_prefix, queue_of, unescaped
from tenure._backends.zookeeper.proof import AGE_MAX, DRIFT_MAX
from tenure._backends.zookeeper.records import METADATA_MAX, NO_RECORD, Record, read_record, require_metadata
from tenure._backends.zookeeper.touches import EVERY, EVERY_SHARE, HEARD_AFTER, Touches, lease_in, session_of
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError

GUID = UUID("6f1c3a52-8a8e-4d3c-9a2f-0d5b7e1f2a3b")
LAST = 2**31 - 1
FIRST = -(2**31)


def node(number: int, dialect: Dialect = "latch") -> str:
    return f"{node_prefix(dialect, GUID)}{number:010d}"


# --- names of candidates, byte for byte ---


def test_candidates_are_written_as_the_clients_of_their_dialect_write_them() -> None:
    assert node(7, "latch") == "_c_6f1c3a52-8a8e-4d3c-9a2f-0d5b7e1f2a3b-latch-0000000007"
    assert node(7, "lock") == "_c_6f1c3a52-8a8e-4d3c-9a2f-0d5b7e1f2a3b-lock-0000000007"
    assert node(7, "kazoo") == "6f1c3a528a8e4d3c9a2f0d5b7e1f2a3b__lock__0000000007"
    assert all(is_of(node(7, dialect), GUID) for dialect in ("latch", "lock", "kazoo"))
    assert not is_of(node(7), UUID(int=1))


@pytest.mark.parametrize(
    ("dialect", "foreign"),
    [
        ("latch", "latch-0000000003"),
        ("lock", "_c_3f0c1b1e5d1e4b0f8a3b0d5b7e1f2a3b-lock-0000000003"),  # go-zk: 32 digits
        ("kazoo", "anything__lock__0000000003"),
    ],
)
def test_foreign_forms_of_a_dialect_stand_in_the_same_queue(dialect: Dialect, foreign: str) -> None:
    queue = queue_of([node(4, dialect), foreign, node(2, dialect)], dialect)
    assert queue.nodes == [node(2, dialect), foreign, node(4, dialect)]
    assert queue.strangers == []


@pytest.mark.parametrize(
    ("dialect", "stranger"),
    [
        ("latch", node(3, "lock")),
        ("latch", node(3, "kazoo")),
        ("lock", node(3, "latch")),
        ("lock", node(3, "kazoo")),
        ("kazoo", node(3, "lock")),
        ("kazoo", f"{GUID.hex}__rlock__0000000003"),
        ("lock", f"_c_{GUID}__WRIT__0000000003"),
        ("lock", "lock-0000000003"),  # DistributedLock for .NET
        ("latch", "something0000000003"),
        ("latch", f"something{FIRST}"),
    ],
)
def test_candidates_of_another_dialect_are_strangers(dialect: Dialect, stranger: str) -> None:
    queue = queue_of([stranger, node(4, dialect)], dialect)
    assert queue.nodes == [node(4, dialect)]
    assert queue.strangers == [stranger]


def test_children_without_a_number_are_no_candidates() -> None:
    assert queue_of(["config", "leader-1", "x-latch-12345", ""], "latch") == queue_of([], "latch")
    assert queue_of([], "latch").first is None


def test_each_candidate_knows_the_one_before_it() -> None:
    queue = queue_of([node(5), node(3), node(4)], "latch")
    assert [queue.before(each) for each in queue.nodes] == [None, node(3), node(4)]
    assert queue.first == node(3)


@pytest.mark.parametrize("dialect", ["latch", "lock", "kazoo"])
@pytest.mark.parametrize(
    "numbers",
    [
        [LAST - 1, LAST, FIRST, FIRST + 1],
        [LAST, FIRST],
        [-2, -1, 0, 1],
        [-1_000_000_000, -999_999_999],
        [LAST - 2**29, FIRST + 2**29],
    ],
    ids=str,
)
def test_the_order_goes_on_when_the_counter_wraps(dialect: Dialect, numbers: list[int]) -> None:
    nodes = [node(number, dialect) for number in numbers]
    for turned in (nodes, nodes[::-1], nodes[1:] + nodes[:1]):
        assert queue_of(turned, dialect).nodes == nodes


# --- names of elections ---


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("report", "report"),
        ("a/b", "a%2Fb"),
        ("50%", "50%25"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        ("zookeeper", "%7Aookeeper"),
        ("line\n", "line%0A"),
        ("名前", "名前"),
        ("🗳", "%F0%9F%97%B3"),
        ("\ue000\ufff1", "%EE%80%80%EF%BF%B1"),
    ],
    ids=ascii,
)
def test_a_name_that_cannot_be_a_node_is_escaped(name: str, written: str) -> None:
    assert escaped(name) == written
    assert unescaped(written) == name


# --- records ---


def test_a_record_is_read_as_it_was_written() -> None:
    record = Record(2**62, "ann#1", {"größe": "XL 🦒", "": "x"}, 2**62)
    assert read_record(record.written(), "/x") == record
    assert read_record(b"", "/x") == NO_RECORD


@pytest.mark.parametrize(
    "data",
    [b"10.0.0.1", b"{}", b"[1]", b"\xff", b"[" * 100_000],
    ids=lambda data: ascii(data[:20]),
)
def test_data_of_others_is_no_record(data: bytes) -> None:
    assert read_record(data, "/x") is None


def test_a_record_of_a_newer_tenure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/x was written in layout 2, and this tenure knows layout 1 only"):
        read_record(b'{"tenure":2}', "/x")


def test_metadata_that_is_too_large_is_refused() -> None:
    require_metadata({"a": "x" * (METADATA_MAX - 8)})
    with pytest.raises(ConfigError, match=f"at most {METADATA_MAX} bytes as JSON, and takes {METADATA_MAX + 1}"):
        require_metadata({"a": "x" * (METADATA_MAX - 7)})


# --- what the leader of the ensemble has heard of ---

TICK = 2.0


def test_an_answer_alone_proves_nothing() -> None:
    touches = Touches(TICK)
    assert touches.heard_at == -math.inf
    touches.answered(10.0, 10.1)
    touches.answered(20.0, 20.1)
    assert touches.heard_at == -math.inf


def test_connecting_goes_through_a_leader_which_a_write_proves_to_be_the_present_one() -> None:
    touches = Touches(TICK)
    touches.connected(5.0)
    assert touches.heard_at == -math.inf
    assert touches.write_at(5.0) == 5.0
    touches.written(5.1)
    assert touches.heard_at == 5.0


def test_a_write_proves_what_was_answered_a_tick_before_it() -> None:
    touches = Touches(TICK)
    touches.answered(10.0, 10.5)
    touches.answered(11.0, 11.5)
    touches.written(10.5 + HEARD_AFTER * TICK - 0.1)
    assert touches.heard_at == -math.inf
    touches.written(10.5 + HEARD_AFTER * TICK)
    assert touches.heard_at == 10.0  # counted from before it was sent
    touches.written(100.0)
    assert touches.heard_at == 11.0


def test_a_server_that_was_left_may_have_told_the_leader_nothing() -> None:
    touches = Touches(TICK)
    touches.connected(5.0)
    touches.answered(10.0, 10.5)
    touches.connected(11.0)
    touches.written(100.0)
    assert touches.heard_at == 11.0


def test_a_session_with_many_requests_is_proven_as_soon_as_any_other() -> None:
    touches, now = Touches(TICK), 0.0
    touches.connected(now)
    while now < 3 * TICK:
        now += TICK / 10_000
        touches.answered(now, now)
        touches.written(now)
    assert now - touches.heard_at < 1.1 * HEARD_AFTER * TICK


def test_the_next_write_that_proves_enough_is_known() -> None:
    touches = Touches(TICK)
    assert touches.write_at(0.0) == math.inf
    touches.answered(10.0, 10.5)
    touches.answered(11.0, 11.5)
    assert touches.write_at(9.0) == 12.5
    assert touches.write_at(10.5) == 13.5
    assert touches.write_at(11.5) == math.inf


# --- how long sessions last ---


@pytest.mark.parametrize("tick", [0.1, 2.0])
@pytest.mark.parametrize("ticks", [2.0, 3.0, 5.5, 6.9, 7.0, 7.1, 10.0, 20.0])
def test_a_session_is_as_short_as_its_leases_allow(ticks: float, tick: float) -> None:
    lease = ticks * tick
    lasts = session_of(lease, tick)
    assert lease <= lasts <= lease + 1.25 * tick + 1e-9
    assert lease_in(lasts, tick) == pytest.approx(lease)
    if ticks >= 7:
        assert lasts == lease
    heard_ago = HEARD_AFTER * tick + min(EVERY * tick, EVERY_SHARE * lasts)  # at most, while requests are answered
    assert heard_ago - (lasts - lease) * (1 - DRIFT_MAX) < AGE_MAX * lease  # so a claim need not wait


# --- the address ---


def test_an_address_names_servers_path_and_login() -> None:
    address = address_of(Url.parse("zookeeper://ann:p%40ss@a,b:2182,[::1]:2183/apps/x%20y/?tick=1"))
    assert address.hosts == (("a", 2_181), ("b", 2_182), ("::1", 2_183))
    assert (address.root, address.user, address.password) == ("/apps/x y", "ann", Secret("p@ss"))
    assert str(address) == "zookeeper://a:2181,b:2182,[::1]:2183/apps/x y"
    assert "p@ss" not in repr(address)
    assert address_of(Url.parse("zookeeper://a")).root == address_of(Url.parse("zookeeper://a/")).root == ""
    assert Options().dialect == "latch"


@pytest.mark.parametrize(("lasts", "waits", "longest"), [(30.0, 15.0, 2.0), (30.0, 3.0, 1.0), (1.5, 15.0, 0.5)])
def test_a_pause_between_connections_leaves_time_for_a_request(lasts: float, waits: float, longest: float) -> None:
    retry = reconnecting(lasts, waits)
    slept: list[float] = []
    retry.sleep_func = slept.append

    def connect() -> None:
        if len(slept) < 1_000:
            raise ForceRetryError

    retry(connect)
    assert 0.9 * longest < max(slept) <= longest
