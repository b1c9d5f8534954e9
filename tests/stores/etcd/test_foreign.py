"""Keys and values in etcd that others have put, and answers that etcd can't have given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tenure._backends import etcd
from tenure._backends.etcd.client import Upload, _read
from tenure._backends.etcd.errors import Refused
from tenure._backends.etcd.hints import Hints, Stream, Watch
from tenure._backends.etcd.requests import (
    Holder,
    Keys,
    KeyValue,
    Record,
    TxnAnswer,
    decoded,
    encoded,
    number,
    unescaped,
)
from tenure._election.store import NAME_MAX
from tenure._foreign import Unreadable
from tenure._lease import NO_METADATA, TOKEN_MAX, Granted, HeldBy, Vacant
from tenure._url import Url
from tenure.errors import Unavailable
from tests.servers import Etcd, patient, shared
from tests.servers.etcd import in_base64

KEYS = Keys("tenure/")

ODD_TOKENS = ["null", "true", "-1", "1.5", "NaN", "1e999", "9" * 400, str(2**63), '"7"', "[]", "{}"]


def key_value(value: bytes) -> KeyValue:
    return KeyValue(b"k", value, 1, 1, 0)


@pytest.mark.parametrize("token", ODD_TOKENS, ids=lambda text: str(text)[:12])
def test_a_record_with_another_token_is_none(token: str) -> None:
    assert Record.read(key_value(b'{"token": %s, "holder": "ann#1"}' % token.encode())) == Record()


@pytest.mark.parametrize(
    "holder", [None, 7, ["x"], "x" * (NAME_MAX + 1), "\ud800", "a\0"], ids=lambda one: ascii(one)[:9]
)
def test_a_record_with_another_holder_is_none(holder: Any) -> None:
    assert Record.read(key_value(json.dumps({"token": 7, "holder": holder}).encode())) == Record()


@pytest.mark.parametrize("value", [b"[" * 100_000, b"9" * 100_000, b'{"a":' * 10_000, b"x" * 300_000])
def test_a_value_of_any_depth_and_size_is_no_record(value: bytes) -> None:
    assert Record.read(key_value(value)) == Record()


@pytest.mark.parametrize("metadata", [None, 7, "x", [], {"a": 1}, {"a": None}, {"a": "\ud800"}, {"a": {"b": "c"}}])
def test_metadata_of_another_form_are_not_shown(metadata: Any) -> None:
    read = Record.read(key_value(json.dumps({"token": 7, "holder": "ann#1", "metadata": metadata}).encode()))
    assert read == Record(7, "ann#1")
    assert read.metadata is NO_METADATA


@pytest.mark.parametrize("value", [b"x" * 1_000_000, "🦒".encode() * 100_000, b"\xff" * 100_000, b"\xf0\x9f" * 10_000])
def test_a_foreign_holder_has_a_short_name(value: bytes) -> None:
    found = Holder.of(KeyValue(b"tenure/x/1", value, 7, 1, 9), Record())
    assert 0 < len(found.holder) <= NAME_MAX
    HeldBy("x", found.holder, found.token, None)


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [b"", b"\xff", b"a/b", b"100%", b"%41", b"%2f", b"a%", b"%25%"])
def test_what_no_name_gives_is_no_name(written: bytes) -> None:
    assert unescaped(written) is None
    assert KEYS.change({"kv": {"key": encoded(b"tenure/%tenure/record/" + written)}}) is None


async def test_keys_that_others_have_put_hide_no_name(name: str) -> None:
    server = shared(Etcd)
    prefix = f"foreign-{name}/"
    backend = etcd.open(Url.parse(patient(f"{server.url}?prefix={prefix}")))
    try:
        answer = await backend.leases.acquire("ours", "ann#1", 10.0)
        assert isinstance(answer, Granted)
        for key, value in [
            ("%tenure/record/", "x"),
            ("%tenure/record/50%", "x"),
            ("%tenure/record/a/b", "x"),
            ("%tenure/record/other", '{"token": 1e999, "holder": ["x"]}'),
            ("%tenure/record/deep", "[" * 100_000),
            ("%tenure/record/ours", '{"token": -1, "holder": 7, "metadata": 7}'),
            ("other/not-a-lease", "y" * 100_000),
        ]:
            server.call("kv/put", {"key": in_base64(prefix + key), "value": in_base64(value)})
        assert await backend.leases.names() == ["deep", "other", "ours"]
        deep, other, ours = await backend.leases.inspect_many(["deep", "other", "ours"])
        assert deep == Vacant("deep")
        assert isinstance(other, HeldBy)
        assert (other.holder, other.remaining) == ("y" * NAME_MAX, None)
        assert isinstance(ours, HeldBy)
        assert (ours.holder, ours.token) == ("ann#1", answer.grant.token)
        assert await backend.leases.renew([answer.grant], 10.0) == [answer]
    finally:
        await backend.close()


# --- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [("7", 7), (7, 7), ("-1", -1), ("0", 0), (str(2**64 - 1), 2**64 - 1), (str(TOKEN_MAX), TOKEN_MAX)],
)
def test_numbers_of_the_gateway_are_text_or_numbers(written: object, read: int) -> None:
    assert number({"ID": written}, "ID") == read
    assert number({}, "ID") == 0


@pytest.mark.parametrize("written", [None, True, 1.5, "", "x", "--1", "1e3", "9" * 5_000, 2**64, [], {}, "٣"])
def test_a_number_that_the_gateway_cannot_have_written_is_unreadable(written: object) -> None:
    with pytest.raises(Unreadable):
        number({"ID": written}, "ID")


@pytest.mark.parametrize("written", [None, 7, "%", "YQ", "é", "YQ==\n\0", ["YQ=="]])
def test_bytes_that_the_gateway_cannot_have_written_are_unreadable(written: object) -> None:
    with pytest.raises(Unreadable):
        decoded(written)


ODD_ANSWERS: list[dict[str, Any]] = [
    {"header": 7},
    {"header": {"raft_term": "x"}},
    {"header": {"revision": 1e300}},
    {"responses": 7},
    {"responses": [7]},
    {"responses": [{"response_range": 7}]},
    {"responses": [{"response_range": {"kvs": 7}}]},
    {"responses": [{"response_range": {"kvs": [7]}}]},
    {"responses": [{"response_range": {"kvs": [{"key": "%"}]}}]},
    {"responses": [{"response_range": {"kvs": [{"lease": "9" * 99}]}}]},
]


@pytest.mark.parametrize("answer", ODD_ANSWERS, ids=repr)
def test_what_is_no_answer_to_a_transaction_is_no_answer(answer: dict[str, Any]) -> None:
    with pytest.raises(Unavailable, match="can't be from etcd, as it is "):
        TxnAnswer.of(answer)


def test_a_part_that_is_missing_is_no_answer() -> None:
    with pytest.raises(Unavailable, match="can't be from etcd, as it has 0 parts"):
        TxnAnswer.of({"succeeded": True}).first(1)
    assert not TxnAnswer.of({"succeeded": "false"}).succeeded


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"[" * 100_000, None),
        (b"\xff", None),
        (b"7", None),
        (b'{"code": [], "message": "no"}', None),
        (b'{"code": "7", "message": "no"}', None),
        (b'{"code": true, "message": "no"}', None),
        (b'{"code": 7, "message": "no"}', 7),
        (b'{"message": "%s"}' % (b"x" * 100_000), None),
    ],
    ids=lambda one: repr(one)[:30],
)
def test_a_refusal_of_any_form_is_a_refusal(raw: bytes, code: int | None) -> None:
    with pytest.raises(Refused) as raised:
        _read(500, raw)
    assert raised.value.code == code
    assert len(str(raised.value)) <= 1_000
    assert isinstance(raised.value.may_be_executed, bool)


def begun(prefix: str = "tenure/") -> Stream:
    """Return a stream with a watch, the number of which is 1."""
    keys = Keys(prefix)
    stream = Stream(Hints(None, keys, lambda change, listeners: True))  # type: ignore[arg-type]
    stream._upload = Upload()
    stream._ask(Watch(keys.whole, None))
    return stream


@pytest.mark.parametrize(
    "message",
    [
        lambda: {"header": 7},
        lambda: {"header": {"revision": "x"}, "created": True},
        lambda: {"events": 7},
        lambda: {"events": [7]},
        lambda: {"events": [{"kv": {"mod_revision": "x"}}]},
        lambda: {"events": [{}]},
        lambda: {"watch_id": "x"},
    ],
)
def test_a_message_of_a_watch_that_is_none_ends_the_stream_and_not_the_watch(message: Callable[[], Any]) -> None:
    with pytest.raises(Unavailable, match="can't be from etcd"):
        begun().read(message())


def test_a_watch_that_was_not_asked_for_is_not_answered() -> None:
    stream = begun()
    stream._live_since = 0.0
    assert stream.read({"header": {"revision": "3"}, "created": True, "watch_id": "1"})
    with pytest.raises(Unavailable, match="can't be from etcd, as it answers a watch that was not asked for"):
        stream.read({"header": {"revision": "3"}, "created": True, "watch_id": "2"})


def test_an_event_that_is_none_hides_no_other() -> None:
    stream = begun()
    (watch,) = stream._by_number.values()
    pair = {"kv": {"key": encoded(b"tenure/x/1"), "mod_revision": "9"}}
    stream.read({"header": {"revision": "9"}, "watch_id": "1", "events": [7, {"kv": 7}, {"kv": {"key": "%"}}, pair]})
    assert watch.next_revision == 10
