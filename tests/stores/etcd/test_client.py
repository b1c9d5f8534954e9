"""etcd without a server: URLs, keys, transactions, the meaning of answers, and versions with faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from tenure._backends import etcd
from tenure._backends.etcd import requests
from tenure._backends.etcd.address import address_of
from tenure._backends.etcd.diagnosis import ANONYMOUS, REVOKING, STALE, is_before, release_of
from tenure._backends.etcd.errors import NoAnswerInTime, Refused, translate
from tenure._backends.etcd.requests import (
    OPS_MAX,
    Holder,
    Keys,
    KeyValue,
    Record,
    TxnAnswer,
    decoded,
    encoded,
    end_of,
    escaped,
    unescaped,
)
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable

KEYS = Keys("tenure/")
HOLDER_KEY = b"tenure/name/694d"


# --- URLs --------------------------------------------------------------------------------------------------------


def test_members_and_login_are_read() -> None:
    address = address_of(Url.parse("etcds://app:p%40ss%2Fword@a,b:2380,[::1]:2381/?prefix=x/"))
    assert address.members == ("https://a:2379", "https://b:2380", "https://[::1]:2381")
    assert (address.username, address.password) == ("app", Secret("p@ss/word"))
    assert "p@ss" not in repr(address)
    assert str(address) == "etcds://a:2379,b:2380,[::1]:2381"
    assert address_of(Url.parse("etcd://a,a:2379")).members == ("http://a:2379",)


def test_the_connections_to_each_member_count() -> None:
    assert etcd.open(Url.parse("etcd://a,b,c")).connections_max == 3 * 32 + 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("etcd:/x", "names no host"),
        ("etcd://", "names no host"),
        ("etcd://a,,b", "names no host, or an empty one"),
        ("etcd://a:port", "no host:port"),
        ("etcd://a:0", "no host:port"),
        ("etcd://a:99999", "no host:port"),
        ("etcd://app:s3cret/x@a:2379", "an @ after the address"),
        ("etcd://app@a", "not both a user and a password"),
        ("etcd://:s3cret@a", "not both a user and a password"),
        ("etcd://a/prefix", "has a path"),
        ("etcd://a?kind=foo", "must be one of election, lock, not 'foo'"),
        ("etcd://a?kind=elections", "did you mean 'election'"),
        ("etcd://a?prefixx=a", "no option 'prefixx'; did you mean 'prefix'"),
        ("etcd://a?timeout=0", "timeout must be from 0.01"),
        ("etcd://a?prefix=a%00b", "no NUL"),
        ("etcd://a?ca=/nowhere.pem", "doesn't use TLS; write etcds://"),
        ("etcds://a?ca=/nowhere.pem", "ca=/nowhere.pem of etcds://a:2379 can't be read: No such file"),
        ("etcds://a?key=/nowhere.pem", "cert= is missing"),
    ],
)
def test_a_wrong_url_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        etcd.open(Url.parse(url))
    assert words in str(refused.value)
    assert "s3cret" not in str(refused.value)


# --- keys --------------------------------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_no_two_names_share_a_key(one: str, other: str) -> None:
    assert unescaped(escaped(one).encode()) == (one or None)
    assert (KEYS.election(one) == KEYS.election(other)) == (one == other) if is_text(one) and is_text(other) else True
    assert "/" not in escaped(one)


def is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(1, 2**63 - 1))
def test_a_change_belongs_to_the_name_of_its_key(name: str, lease: int) -> None:
    for keys in (KEYS, Keys(""), Keys("%tenure/")):
        found = keys.change({"kv": {"key": encoded(keys.place(name, lease)), "mod_revision": "7"}, "type": "DELETE"})
        assert found is not None
        assert (found.name, found.kind, found.is_delete, found.revision) == (name, "place", True, 7)
        for key, kind in ((keys.record(name), "record"), (keys.resign(name), "resign")):
            found = keys.change({"kv": {"key": encoded(key)}})
            assert found is not None
            assert (found.name, found.kind, found.is_delete) == (name, kind, False)
        assert keys.change({"kv": {"key": encoded(keys.fence(lease))}}) is None
        assert keys.change({"kv": {"key": encoded(keys.never)}}) is None


def test_keys_that_are_no_election_are_no_change() -> None:
    assert KEYS.change({"kv": {"key": encoded(b"tenure/alone")}}) is None
    found = KEYS.change({"kv": {"key": encoded(b"tenure/a/b/694d")}})  # of a foreign election below a/
    assert found is not None
    assert found.name == "a"


@given(st.binary())
def test_a_range_has_all_keys_with_its_beginning(beginning: bytes) -> None:
    end = end_of(beginning)
    if end == b"\0":  # etcd's word for "all that follow"
        assert beginning.strip(b"\xff") == b""
    else:
        assert beginning < beginning + b"\xff" * 3 < end


# --- values ------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was() -> None:
    for record in (Record(7, "ann#1"), Record(7, "Größe 🦒", {"": "a\nb", "url": "http://ann"})):
        assert Record.read(KeyValue(b"", record.written(), 1, 1, 0)) == record


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'{"token": "x", "holder": ""}', b'{"token": 1}', b"7"])
def test_a_record_that_tenure_has_not_written_is_none(value: bytes) -> None:
    assert Record.read(KeyValue(b"", value, 1, 1, 0)) == Record()
    assert Record.read(None) == Record()


@pytest.mark.parametrize(
    ("value", "record", "holder"),
    [
        (b"ann#1", Record(7, "ann#1", {"a": "b"}), Holder("ann#1", 7, 9, {"a": "b"}, True, HOLDER_KEY)),
        (b"", Record(7, "ann#1"), Holder("ann#1", 7, 9, {}, True, HOLDER_KEY)),
        (b"a proposal", Record(6, "ann#1"), Holder("a proposal", 7, 9, {}, False, HOLDER_KEY)),
        (b"", Record(), Holder("694d", 7, 9, {}, False, HOLDER_KEY)),
        (b"\xff", Record(), Holder("\ufffd", 7, 9, {}, False, HOLDER_KEY)),
    ],
)
def test_the_holder_is_known_by_record_value_or_key(value: bytes, record: Record, holder: Holder) -> None:
    assert Holder.of(KeyValue(HOLDER_KEY, value, 7, 1, 9), record) == holder


def test_answers_without_zeros_are_read() -> None:
    assert TxnAnswer.of({}) == TxnAnswer(False, 0, 0, [])
    answer = TxnAnswer.of(
        {
            "header": {"revision": "9", "raft_term": "2"},
            "succeeded": True,
            "responses": [{"response_put": {}}, {"response_range": {}}, {"response_range": {"kvs": [{"key": "YQ=="}]}}],
        }
    )
    assert (answer.succeeded, answer.revision, answer.term) == (True, 9, 2)
    assert answer.first(0) is None
    assert answer.first(1) is None
    assert answer.first(2) == KeyValue(b"a", b"", 0, 0, 0)


# --- transactions ------------------------------------------------------------------------------------------------


def is_write(body: dict[str, Any]) -> bool:
    """Return whether etcd orders a transaction by its log: one of its operations, in any branch, is no read."""
    return any("request_range" not in one for branch in ("success", "failure") for one in body[branch])


def test_no_transaction_that_decides_is_a_read() -> None:
    places = [(b"key", 7, "name")]
    for body in (
        requests.enter(KEYS, "name", 9, b"ann#1", 0),
        requests.decide(KEYS, "name", 9, Record(7, "ann#1")),
        requests.check(KEYS, places),
        requests.leave(KEYS, "name", 9, 7),
        requests.leave_for_good(KEYS, "name", 9, 0),
    ):
        assert is_write(body), body
    assert not is_write(requests.look(KEYS, ["name"]))


def test_a_full_session_is_checked_in_one_transaction() -> None:
    places = [(f"key-{number}".encode(), number, f"name-{number}") for number in range(requests.CHECKED_MAX)]
    body = requests.check(KEYS, places)
    assert max(len(body[part]) for part in ("compare", "success", "failure")) == OPS_MAX


def test_one_transaction_looks_at_many_names() -> None:
    body = requests.look(KEYS, [f"name-{number}" for number in range(requests.LOOKED_MAX)])
    assert OPS_MAX - 3 < len(body["success"]) <= OPS_MAX


def test_the_first_key_wins() -> None:
    body = requests.decide(KEYS, "a/b", 0x694D, Record(7, "ann#1"))
    own, first = body["compare"]
    assert (decoded(own["key"]), own["target"], own["result"], own["create_revision"]) == (
        b"tenure/a%2Fb/694d",
        "CREATE",
        "EQUAL",
        "7",
    )
    assert (decoded(first["key"]), decoded(first["range_end"])) == (b"tenure/a%2Fb/", b"tenure/a%2Fb0")
    assert (first["target"], first["result"], first["create_revision"]) == ("CREATE", "GREATER", "6")
    noted = body["success"][0]["request_put"]
    assert decoded(noted["key"]) == b"tenure/%tenure/record/a%2Fb"
    assert json.loads(decoded(noted["value"])) == {"token": 7, "holder": "ann#1"}


# --- errors ------------------------------------------------------------------------------------------------------

WRONG = [
    (Refused(401, "etcdserver: invalid auth token", 16), True, Unavailable, "logs in again"),
    (Refused(400, "etcdserver: user name is empty", 3), False, ConfigError, "requires a login"),
    (
        Refused(400, "etcdserver: authentication failed, invalid user ID or password", 3),
        True,
        ConfigError,
        "check user and password",
    ),
    (Refused(403, "etcdserver: permission denied", 7), True, ConfigError, "'tenure/'"),
    (Refused(429, "etcdserver: mvcc: database space exceeded", 8), True, Unavailable, "alarm disarm"),
    (Refused(503, "etcdserver: no leader", 14), True, Unavailable, "can't answer at present: no leader"),
    (Refused(503, "etcdserver: request timed out", 14), True, Unavailable, "may have been executed"),
    (Refused(429, "etcdserver: too many requests", 8), True, Unavailable, "too many requests"),
    (Refused(500, "etcdserver: corrupt cluster", 15), True, Unavailable, "replace the corrupt member"),
    (Refused(400, "etcdserver: too many operations in txn request", 3), True, ConfigError, "--max-txn-ops to 128"),
    (Refused(501, "unknown service", 12), True, ConfigError, "etcd 3.4 or newer"),
    (Refused(200, "hello", is_of_etcd=False), True, ConfigError, "does not answer as etcd (status 200): 'hello'"),
    (Refused(500, "something new", 2), True, Unavailable, "something new"),
    (NoAnswerInTime(2.0), True, Unavailable, "gave no answer within 2 s"),
    (ConnectionResetError("reset"), True, Unavailable, "write etcds://"),
]


def translated(error: Exception, *, has_user: bool, worked: bool) -> TenureError:
    address = address_of(Url.parse("etcd://app:s3cret@a/" if has_user else "etcd://a/"))
    return translate(error, address, prefix="tenure/", own=None, worked=worked, permitted=worked)


@pytest.mark.parametrize(("error", "has_user", "kind", "words"), WRONG, ids=lambda each: str(each)[:40])
def test_errors_are_translated(error: Exception, has_user: bool, kind: type[TenureError], words: str) -> None:
    found = translated(error, has_user=has_user, worked=False)
    assert type(found) is kind
    assert words in str(found)
    assert "\n" not in str(found)
    # What has worked may work again.
    assert type(translated(error, has_user=has_user, worked=True)) is Unavailable


async def test_a_request_without_time_is_not_said_to_be_perhaps_executed() -> None:
    backend = etcd.open(Url.parse("etcd://127.0.0.1:1/"))
    try:
        with pytest.raises(Unavailable, match=r"no time was left to ask .*; the request was not sent$") as raised:
            await backend._client.call("kv/txn", {}, until=asyncio.get_running_loop().time())
        assert "executed" not in str(raised.value)
    finally:
        await backend.close()


def test_an_error_that_is_not_the_clients_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        translated(TypeError("a bug"), has_user=False, worked=False)


# --- versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "revokes", "is_stale"),
    [
        ("3.3.25", True, True),
        ("3.4.23", True, True),
        ("3.4.31", False, True),
        ("3.4.42", False, False),
        ("3.5.1", True, True),
        ("3.5.13", False, True),
        ("3.5.28", False, False),
        ("3.6.0", False, True),
        ("3.6.9", False, False),
        ("3.7.0-alpha.0", False, False),
        ("4.0.0", False, False),
    ],
)
def test_versions_with_faults_are_known(version: str, revokes: bool, is_stale: bool) -> None:
    release = release_of(version)
    assert release is not None
    assert (is_before(release, REVOKING), is_before(release, STALE)) == (revokes, is_stale)
    assert is_before(release, ANONYMOUS) == is_stale  # mended in the same versions
    assert release_of("unknown") is None
