"""What others may put into the nodes of elections, and beside the candidates."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from kazoo.security import make_acl, make_digest_acl_credential

from tenure._backends import zookeeper
from tenure._backends.zookeeper.names import escaped, queue_of, unescaped
from tenure._backends.zookeeper.records import NO_RECORD, Record, is_record, read_record, shown_record
from tenure._election.store import NAME_MAX
from tenure._lease import NO_METADATA, Granted, HeldBy, Vacant
from tenure._url import Url
from tenure.errors import ConfigError
from tests.servers import ZooKeeper, shared

TICK = 0.1
TTL = 30.0

GOOD: dict[str, Any] = {"tenure": 1, "token": 7, "holder": "ann#1", "metadata": {"a": "b"}, "resign": 7}
READ = Record(7, "ann#1", {"a": "b"}, 7)


def edited(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def test_a_record_is_read_field_by_field() -> None:
    assert read_record(edited(), "/x") == READ
    assert read_record(edited(more=[1]), "/x") == READ


@pytest.mark.parametrize("token", ["12", 1.5, True, -1, 0, None, [], {}, 2**63, float("inf"), 1e300])
def test_what_is_no_token_is_not_noted(token: object) -> None:
    assert read_record(edited(token=token), "/x") == NO_RECORD
    assert read_record(edited(resign=token), "/x") == Record(7, "ann#1", {"a": "b"})


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"Infinity", b"9" * 20])
def test_a_token_beyond_all_numbers_is_not_noted(number: bytes) -> None:
    assert read_record(b'{"tenure":1,"holder":"ann#1","token":%s}' % number, "/x") == NO_RECORD


@pytest.mark.parametrize(
    "holder", [None, "", 7, ["ann"], "x" * (NAME_MAX + 1), "\ud800", "a\0"], ids=lambda one: ascii(one)[:9]
)
def test_what_is_no_holder_is_not_noted(holder: object) -> None:
    assert read_record(edited(holder=holder), "/x") == NO_RECORD


@pytest.mark.parametrize("metadata", [None, 7, "x", [], {"a": 1}, {"a": "\ud800"}, {"a": {}}])
def test_what_are_no_metadata_are_not_noted(metadata: object) -> None:
    read = read_record(edited(metadata=metadata), "/x")
    assert read == Record(7, "ann#1", NO_METADATA, 7)


@pytest.mark.parametrize("mark", [None, True, 0, -1, 1.5, "1", [1] * 100_000, {}])
def test_a_record_with_another_mark_is_of_others(mark: object) -> None:
    assert read_record(edited(tenure=mark), "/x") is None
    assert not is_record(edited(tenure=mark))


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b"\xff", b" " * 300_000 + b"{}"])
def test_data_of_any_depth_and_size_are_of_others(data: bytes) -> None:
    assert read_record(data, "/x") is None
    assert shown_record(data) == NO_RECORD


def test_a_record_of_a_newer_tenure_is_listed_and_not_overwritten() -> None:
    with pytest.raises(ConfigError, match=r"/x was written in layout 2"):
        read_record(edited(tenure=2), "/x")
    assert is_record(edited(tenure=2))
    assert not is_record(b"")
    assert shown_record(edited(tenure=2)) == NO_RECORD


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["%", "%zz", "%2f", "%41", "%FF", "%ED%A0%80", "zookeeper", "a\n"])
def test_a_node_that_no_name_gives_is_no_name(node: str) -> None:
    assert unescaped(node) is None


@pytest.mark.parametrize(
    ("numbers", "order"),
    [
        ([5, 6, 5 - 2**31], [5, 6, 5 - 2**31]),
        ([5, 6, 6 - 2**31], [6 - 2**31, 5, 6]),
        ([5, 6, 7 - 2**31, 2**31 - 1], [5, 6, 2**31 - 1, 7 - 2**31]),
        ([-(2**31), 2**31 - 1, 0], [0, 2**31 - 1, -(2**31)]),
    ],
    ids=str,
)
def test_all_candidates_agree_on_the_order_whatever_stands_among_them(numbers: list[int], order: list[int]) -> None:
    """Else two of them would take themselves for the first."""
    for some in permutations(f"_c_x-latch-{number:010d}" for number in numbers):
        assert queue_of(some, "latch").nodes == [f"_c_x-latch-{number:010d}" for number in order]


def test_nodes_with_the_same_number_have_one_order() -> None:
    nodes = ["_c_a-latch-0000000003", "_c_b-latch-0000000003"]
    assert queue_of(nodes, "latch").nodes == queue_of(nodes[::-1], "latch").nodes == nodes


@pytest.mark.parametrize(
    "node",
    [
        "_c_x-latch-9999999999",
        "_c_x-latch--9999999999",
        "_c_x-latch-2147483648",
        "x-2147483649",
        "_c_x-latch-٠٠٠٠٠٠٠٠٠٣",
    ],
)
def test_a_number_that_no_server_gives_is_no_candidate(node: str) -> None:
    queue = queue_of([node, "_c_a-latch-0000000003"], "latch")
    assert (queue.nodes, queue.strangers) == (["_c_a-latch-0000000003"], [])


# --- with a server -----------------------------------------------------------------------------------------------


@pytest.fixture(name="server")
def _server() -> ZooKeeper:
    return shared(ZooKeeper, tick=TICK, options=())


async def test_nodes_that_others_have_made_hide_no_name(server: ZooKeeper, name: str) -> None:
    root = escaped(name)
    backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/{root}?tick={TICK}"))
    try:
        answer = await backend.leases.acquire("ours", "ann#1", TTL)
        assert isinstance(answer, Granted)
        login = "admin", "of this test"
        hidden = [make_acl("digest", make_digest_acl_credential(*login), all=True)]
        with server.client(auth_data={("digest", ":".join(login))}) as client:
            for node, data in [
                ("%zz", edited()),
                ("newer", edited(tenure=2)),
                ("others", b"[" * 100_000),
                ("broken", edited(token="x")),
                ("led", edited(token=[1])),
            ]:
                client.create(f"/{root}/{node}", data)
            client.create(f"/{root}/secret", edited(), acl=hidden)
            client.create(f"/{root}/led/_c_x-latch-", b"y" * 100_000, acl=hidden, ephemeral=True, sequence=True)
            client.create(f"/{root}/newer/_c_x-latch-", b"z" * 100_000, ephemeral=True, sequence=True)
            client.set(f"/{root}/ours", edited(token=-1))
            names = await backend.leases.names()
            assert names == ["broken", "led", "newer", "ours"]
            broken, led, newer, ours = await backend.leases.inspect_many(names)
            assert broken == Vacant("broken")
            assert isinstance(led, HeldBy)
            assert led.holder == "_c_x-latch-0000000000"
            assert isinstance(newer, HeldBy)
            assert newer.holder == "z" * NAME_MAX
            assert ours == HeldBy("ours", "ann#1", answer.grant.token, None)
            with pytest.raises(ConfigError, match="was written in layout 2"):
                await backend.leases.acquire("newer", "ann#1", TTL)
        assert await backend.leases.renew([answer.grant], TTL) == [answer]
        await backend.leases.release(answer.grant)
        again = await backend.leases.acquire("ours", "ann#2", TTL)
        assert isinstance(again, Granted)
        assert again.grant.token > answer.grant.token
    finally:
        await backend.close()
