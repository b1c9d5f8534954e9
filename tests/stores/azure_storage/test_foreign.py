"""What other programs may write into queues, metadata and blobs: none of it hangs, hides or ends what is beside it."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("azure.storage.queue")

from azure.storage.blob import BlobProperties
from azure.storage.blob.aio import BlobLeaseClient, BlobServiceClient, ContainerClient
from azure.storage.queue import QueueMessage

import tenure
from tenure._backends.azure_storage import leases as leases_module
from tenure._backends.azure_storage import removal
from tenure._backends.azure_storage import settings as settings_module
from tenure._backends.azure_storage.client import Account
from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import FOREIGN_HOLDER, TOKEN_MAX, LeaseBlob, lease_id
from tenure._backends.azure_storage.message_format import Properties, decode, encode
from tenure._backends.azure_storage.names import POISON_SUFFIX, blob_of, decode_metadata, queue_name_of, queue_of
from tenure._backends.azure_storage.queue import DEAD_FOUND_MAX, QUEUE_TRAITS, AzureBroker
from tenure._backends.azure_storage.records import FoundMessage, dead_letter_properties, live_message
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._backends.azure_storage.settings import _declared, _in_force
from tenure._checks import LONGEST
from tenure._foreign import Unreadable
from tenure._lease import Granted, HeldBy, Lost, Vacant
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, QueueSettings, Selection
from tenure._queue.checks import COUNT_MAX
from tenure._queue.delivery_ends import expired as expired_by_time
from tenure._queue.message import HISTORY_MAX, MAX_DELIVERIES, Attempt, Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, SETTLED, Abandon, DeadLetter, Settlement
from tenure.errors import ConfigError
from tests.durations import until
from tests.servers import Azurite, patient, shared, url_of
from tests.stores.azure_storage.test_azure import native, opened

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def text_of(body: bytes, **said: Any) -> str:
    """Return the text of a message with these properties, as any program may write it."""
    return f"{base64.b64encode(body).decode()}.{json.dumps(said)}"


def found(queue: str, text: str, count: int = 1, *, is_delivery: bool = True) -> FoundMessage:
    """Return the message that Azure delivers for the time *count*, or shows after so many deliveries."""
    raw = QueueMessage(text, id="azures-own", inserted_on=NOW, dequeue_count=count)
    return FoundMessage.of(queue, raw, NOW.timestamp(), is_delivery=is_delivery)


# --- texts -------------------------------------------------------------------------------------------------------


def test_a_huge_count_is_clipped_and_makes_no_attempts_up() -> None:
    _, properties = decode(text_of(b"a", reason="x", deliveries=10**12, uncounted=10**12))
    assert (properties.deliveries, properties.uncounted) == (COUNT_MAX, COUNT_MAX)
    assert len(properties.with_expired_attempts(properties.deliveries, 5.0).history) == HISTORY_MAX


@pytest.mark.parametrize(
    "text",
    ['user.{"id": "5", "name": "bob"}', 'a log line\n.{"reason": "timeout", "code": 5}', 'SGVsbG8=.{"id":"x","ttl":0}'],
)
def test_a_text_of_another_program_is_not_taken_apart(text: str) -> None:
    assert decode(text) == (text.encode(), Properties())


ATTEMPT = {"number": 1, "at": 5.0, "outcome": "abandoned", "error": None}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"id": "a", "history": 5, "before": 1}, Properties(id="a")),
        ({"id": "a", "before": 10**12}, Properties(id="a")),
        ({"id": "a", "description": 5, "error": "x", "dead_at": -1, "deliveries": "2"}, Properties(id="a")),
        ({"id": "a", "dead_at": LONGEST * 1.01}, Properties(id="a")),
        ({"id": "a", "error": {"type": "x", "message": None}}, Properties(id="a")),
        (
            {"history": [{**ATTEMPT, "outcome": "a newer one"}, ATTEMPT, {**ATTEMPT, "at": "noon"}]},
            Properties(history=(Attempt(1, 5.0, "abandoned"),)),
        ),
        ({"history": [{**ATTEMPT, "outcome": "a newer one"}]}, Properties()),
        ({"history": [{**ATTEMPT, "pid": 7}]}, Properties(history=(Attempt(1, 5.0, "abandoned"),))),
        (
            {"headers": {"CC": "other", "Tenure-X": 1, "nan": math.inf, "list": [], "kept": 7}},
            Properties(headers={"CC": "other", "Tenure-X": 1, "kept": 7}),
        ),
        ({"headers": {"tenure-x": "of an older version"}}, Properties(headers={"tenure-x": "of an older version"})),
    ],
)
def test_what_is_unreadable_in_the_notes_of_a_message_is_left_out(said: dict[str, Any], read: Properties) -> None:
    assert decode(text_of(b"abc", **said)) == (b"abc", read)


def test_of_a_long_history_the_newest_attempts_are_kept() -> None:
    history = [{**ATTEMPT, "number": number} for number in range(1, HISTORY_MAX + 12)]
    body, properties = decode(text_of(b"abc", history=history, before=HISTORY_MAX + 11))
    assert body == b"abc"
    assert [one.number for one in properties.history] == list(range(12, HISTORY_MAX + 12))
    assert properties.before == HISTORY_MAX


@pytest.mark.parametrize(
    "said",
    [
        {"id": "x" * 256},
        {"id": "nul\0"},
        {"reply_to": "x" * 201},
        {"reply_to": "two\nlines"},
        {"ttl": LONGEST * 1.01},
        {"enqueued_at": LONGEST * 1.01},
        {"sequence": 2**63},
        {"moving": 1},
        {"colour": "blue"},
        {"number": 10**30},
    ],
)
def test_a_text_whose_message_can_not_be_ours_is_a_body(said: dict[str, Any]) -> None:
    text = text_of(b"abc", **said)
    assert decode(text) == (text.encode(), Properties())


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**12),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=9), inside, max_size=3),
    max_leaves=6,
)
_VALUES = {
    "id": st.just("a") | _JSON,
    "headers": st.dictionaries(st.text(max_size=9), _JSON, max_size=3) | _JSON,
    "history": st.lists(st.fixed_dictionaries({one: st.just(ATTEMPT[one]) | _JSON for one in ATTEMPT})) | _JSON,
    **{one: st.integers(-1, 2**64) | _JSON for one in ("uncounted", "before", "sequence", "deliveries")},
    **{one: st.floats() | _JSON for one in ("ttl", "enqueued_at", "dead_at")},
    **{one: st.text(max_size=9) | _JSON for one in ("reason", "description")},
    "moving": st.just(value=True),
}


@given(st.fixed_dictionaries({}, optional=_VALUES), st.sampled_from(["office", "office$dead"]), st.integers(0, 3))
def test_whatever_was_read_can_be_shown_and_written_again(said: dict[str, Any], queue: str, count: int) -> None:
    one = found(queue, text_of(b"abc", **said), count)
    assert 1 <= one.count <= COUNT_MAX or one.properties.reason is not None
    live_message(queue, one)
    assert one.key == found(queue, text_of(b"abc", **said), count).key
    expired = one.properties.with_expired_attempts(one.count, 5.0)
    dead = dead_letter_properties(one, expired, expired_by_time(one.count), 5.0)
    for kept in (expired, dead, one.properties.redriven()):
        assert decode(encode(one.body, kept))[1] == kept


@given(st.text(max_size=30).map(lambda rest: f"YWJj.{rest}") | st.text(max_size=30).map(lambda rest: f"a\n.{rest}"))
def test_any_text_can_be_read(text: str) -> None:
    decode(text.encode("utf-8", "ignore").decode())


# --- what can't be true of a message where it is -----------------------------------------------------------------


def test_an_unreadable_attempt_makes_none_since_the_redrive_an_older_one() -> None:
    _, properties = decode(text_of(b"a", history=[5, ATTEMPT, ATTEMPT | {"at": 6.0}], before=2))
    assert (len(properties.history), properties.before) == (2, 1)
    assert properties.with_expired_attempts(1, 9.0) == properties


@pytest.mark.parametrize(
    ("uncounted", "delivery", "count"), [(0, 3, 3), (2, 3, 1), (3, 3, 3), (10**12, 3, 3), (1, 1, 1)]
)
def test_no_more_deliveries_are_given_back_than_there_were(uncounted: int, delivery: int, count: int) -> None:
    assert found("office", text_of(b"a", uncounted=uncounted), delivery).count == count


def test_only_a_message_that_was_received_can_be_moving() -> None:
    text = text_of(b"a", id="a", reason="why", deliveries=7, description="d", moving=True)
    first, second = found("office", text), found("office", text, 2)
    assert (first.properties, first.count) == (Properties(id="a"), 1)
    assert second.properties.moving
    assert not found("office", text, 0, is_delivery=False).properties.moving
    assert found("office", text, 1, is_delivery=False).properties.moving


def test_only_a_message_with_a_reason_can_be_moving() -> None:
    assert found("office", text_of(b"a", id="a", moving=True), 2).properties == Properties(id="a")


def test_a_death_among_live_messages_is_over() -> None:
    text = text_of(b"a", id="a", reason="why", deliveries=0, history=[ATTEMPT], dead_at=5.0)
    one = found("office", text, 4)
    assert one.count == 4, "a dead letter that was copied back is not delivered for ever"
    assert one.properties == Properties(id="a", history=(Attempt(1, 5.0, "abandoned"),), before=1)


def test_a_dead_letter_is_not_moving() -> None:
    one = found("office$dead", text_of(b"a", reason="why", moving=True), 2)
    assert one.properties == Properties(reason="why")


# --- settings, names, times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (None, QueueSettings()),
        ("no JSON", QueueSettings()),
        ("=no base64", QueueSettings()),
        ("=/w==", QueueSettings()),
        ("[1]", QueueSettings()),
        ("[" * 8_000, QueueSettings()),
        ('{"max_deliveries": 1' + "0" * 5_000 + "}", QueueSettings()),
        ('{"max_deliveries": "3", "lock": 7}', QueueSettings(lock=7)),
        ('{"max_deliveries": true, "dead_retention": -1, "lock": NaN}', QueueSettings()),
        ('{"dead_retention": Infinity, "max_deliveries": 3, "colour": 1}', QueueSettings(max_deliveries=3)),
        ('{"rate": Infinity, "max_deliveries": 3}', QueueSettings(max_deliveries=3)),
        ('{"rate": [1, 60], "paused": true, "max_deliveries": 3}', QueueSettings(max_deliveries=3)),
        ('{"lock": 1e9, "dead_retention": 5}', QueueSettings(dead_retention=5)),
    ],
)
def test_settings_that_are_unreadable_were_not_declared(text: str | None, settings: QueueSettings) -> None:
    metadata = {} if text is None else {"tenure_settings": text}
    assert _in_force(_declared(metadata), QUEUE_TRAITS) == settings


@pytest.mark.parametrize(
    ("queue", "said", "name"),
    [
        ("orders", None, "orders"),
        ("orders", "orders", "orders"),
        (queue_of("Ä"), "=w4Q=", "Ä"),
        (queue_of("Ä") + POISON_SUFFIX, "=w4QkZGVhZA==", "Ä$dead"),
        ("orders", "=w4Q=", "orders"),
        ("orders", "=no base64", "orders"),
        ("orders", "=/w==", "orders"),
        ("orders", "others$dead", "orders"),
        (queue_of("a$b"), "a$b", queue_of("a$b")),
        (queue_of(""), "=", queue_of("")),
    ],
)
def test_a_queue_is_called_as_its_metadata_says_if_that_is_true(queue: str, said: str | None, name: str) -> None:
    assert queue_name_of(queue, None if said is None else {"tenure_name": said}) == name


@pytest.mark.parametrize("value", ["=no base64", "=w4Q", "=/w==", "=ä"])
def test_metadata_of_another_program_is_unreadable(value: str) -> None:
    with pytest.raises(Unreadable):
        decode_metadata(value)


class Clock:
    """A local clock that stands still."""

    def now(self) -> float:
        return 100.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


@pytest.mark.parametrize(
    "date",
    [
        None,
        "",
        " ",
        "soon",
        "Thu, 01 Jan 1970",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -0000",
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "Thu, 01 Jan 2026 00:00:00 +99999999999",
        "Thu, 99 Jan 2026 00:00:00 GMT",
    ],
)
def test_a_date_that_is_none_teaches_the_clock_nothing(date: str | None) -> None:
    clock = ServiceClock(Account.__new__(Account), Clock())
    headers = {} if date is None else {"Date": date}
    clock.learn_from(SimpleNamespace(http_response=SimpleNamespace(headers=headers)), 100.0)
    assert clock._offset is None
    answer = SimpleNamespace(http_response=SimpleNamespace(headers={"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}))
    clock.learn_from(answer, 100.0)
    assert clock.now() == NOW.timestamp()


# --- lease blobs -------------------------------------------------------------------------------------------------


def lease_blob(**metadata: str) -> LeaseBlob:
    properties = BlobProperties(**{"Last-Modified": NOW, "ETag": '"1"', "metadata": metadata})
    return LeaseBlob.of(properties)


@pytest.mark.parametrize(
    ("text", "token"), [("7", 7), ("0", 0), ("", 0), (str(TOKEN_MAX), TOKEN_MAX), ("1784000000", 1_784_000_000)]
)
def test_a_token_that_is_a_number_is_read(text: str, token: int) -> None:
    blob = lease_blob(tenure_token=text)
    assert (blob.token, blob.floor) == (token, token or int(NOW.timestamp()))


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "1e9", "٣", str(TOKEN_MAX + 1), "9" * 5_000, " ", "=MQ=="])
def test_after_a_token_that_is_no_number_none_is_known_to_be_higher(text: str) -> None:
    blob = lease_blob(tenure_token=text, tenure_holder="ann#1")
    assert (blob.token, blob.floor, blob.holder) == (0, None, None)


@pytest.mark.parametrize(("said", "value"), [("{}", {}), ('{"a": "b"}', {"a": "b"}), ("=eyJhIjogIsOkIn0=", {"a": "ä"})])
def test_metadata_of_a_holder_is_read(said: str, value: dict[str, str]) -> None:
    assert lease_blob(tenure_token="7", tenure_metadata=said).metadata == value


@pytest.mark.parametrize("said", ["no JSON", "[1]", '{"a": 1}', '{"a": null}', "=no base64", "=/w==", "[" * 8_000])
def test_metadata_that_is_unreadable_is_not_shown(said: str) -> None:
    blob = lease_blob(tenure_token="7", tenure_metadata=said, tenure_holder="ann#1", tenure_ttl="1" * 5_000)
    assert (blob.metadata, blob.holder, blob.token, blob.ttl) == ({}, "ann#1", 7, 0)


def test_a_holder_that_is_unreadable_is_unknown_and_no_lease_is_longer_than_azures() -> None:
    blob = lease_blob(tenure_token="7", tenure_holder="=/w==", tenure_ttl="3600", tenure_resign="now")
    assert (blob.holder, blob.ttl, blob.resign_asked) == (None, 60, 0)


# --- messages in a queue -----------------------------------------------------------------------------------------


async def opened_queue(broker: AzureBroker, queue: str, *texts: str, dead: bool = False) -> None:
    """Create *queue* and the queue of its dead letters, and put *texts* into one of them."""
    await broker.send(queue, [Outgoing(b"warm up")])
    [got] = (await broker.receive(queue, 1, 30.0)).deliveries
    await broker.settle([Settlement(got, DeadLetter("why"))])
    assert await broker.purge(queue, EVERYTHING, None) == 1
    with native(queue_of(queue) + POISON_SUFFIX * dead) as client:
        for text in texts:
            client.send_message(text)


async def received(broker: AzureBroker, queue: str) -> dict[bytes, Delivery]:
    return {one.body: one for one in (await broker.receive(queue, 32, 30.0)).deliveries}


def receive_and_forget(queue: str, times: int) -> None:
    """Receive all messages of *queue*, as consumers that die do."""
    with native(queue_of(queue)) as client:
        for _ in range(times):
            for one in list(client.receive_messages(max_messages=32, visibility_timeout=30)):
                client.update_message(one, visibility_timeout=0)


async def test_a_huge_count_hangs_no_consumer() -> None:
    forged = text_of(b"forged", id="forged", reason="x", deliveries=10**12, uncounted=10**12)
    async with opened() as backend:
        broker, queue = backend.broker, "huge-count"
        await opened_queue(broker, queue, forged)
        await broker.send(queue, [Outgoing(b"good")])
        for delivery_count in range(1, 4):
            got = await received(broker, queue)
            assert {one.delivery_count for one in got.values()} == {delivery_count}
            assert got.keys() == {b"forged", b"good"}
            await broker.settle([Settlement(one, Abandon()) for one in got.values()])


async def test_a_forged_count_keeps_no_message_from_the_dead_letters() -> None:
    async with opened() as backend:
        broker, queue = backend.broker, "poison-uncounted"
        await broker.declare(queue, {"max_deliveries": 3})
        await opened_queue(
            broker, queue, text_of(b"poison", uncounted=10**9), text_of(b"dead", reason="x", moving=True)
        )
        receive_and_forget(queue, 3)
        claims = [await broker.receive(queue, 32, 30.0) for _ in range(2)]
        assert [one.deliveries for one in claims] == [(), ()]
        letters = {one.body: one for one in await broker.peek_dead(queue, EVERYTHING, 10)}
        assert {body: one.reason for body, one in letters.items()} == {b"poison": MAX_DELIVERIES, b"dead": "x"}
        assert letters[b"poison"].delivery_count == 3


async def test_letters_of_the_same_forged_key_are_both_redriven() -> None:
    same = {"id": "order-17", "sequence": 17, "enqueued_at": 1_700_000_000.0, "reason": "why"}
    async with opened() as backend:
        broker, queue = backend.broker, "same-key"
        await opened_queue(broker, queue, *(text_of(body, **same) for body in (b"one", b"other", b"one")), dead=True)
        letters = await broker.peek_dead(queue, EVERYTHING, 10)
        assert sorted(one.body for one in letters) == [b"one", b"other"], "of copies, one is shown"
        assert await broker.redrive(queue, EVERYTHING, None) == 2
        assert (await broker.stats(queue)).dead == 0
        got = await received(broker, queue)
        assert got.keys() == {b"one", b"other"}
        assert {one.id for one in got.values()} == {"order-17"}


async def test_a_purge_with_a_limit_leaves_a_letter_of_the_same_forged_key() -> None:
    same = {"id": "order-17", "sequence": 17, "enqueued_at": 1_700_000_000.0, "reason": "why"}
    async with opened() as backend:
        broker, queue = backend.broker, "same-key-purged"
        await opened_queue(broker, queue, text_of(b"one", **same), text_of(b"other", **same), dead=True)
        assert await broker.purge(queue, EVERYTHING, 1) == 1
        assert await broker.purge(queue, EVERYTHING, None) == 1


async def test_a_verdict_settles_no_other_message_of_the_same_forged_sequence() -> None:
    async with opened() as backend:
        broker, queue = backend.broker, "same-sequence"
        await opened_queue(broker, queue, *(text_of(body, id="a", sequence=17) for body in (b"one", b"two", b"three")))
        got = await received(broker, queue)
        assert len({one.sequence for one in got.values()}) == 3
        verdicts = [Settlement(got[b"one"], COMPLETE), *(Settlement(got[one], Abandon()) for one in (b"two", b"three"))]
        assert await broker.settle(verdicts) == [SETTLED] * 3
        assert (await received(broker, queue)).keys() == {b"two", b"three"}


@pytest.mark.parametrize("crashes", [0, 1])
async def test_a_forged_move_takes_no_message_away(crashes: int) -> None:
    """With the key of an innocent dead letter, too: neither that one nor the forged message disappears."""
    async with opened() as backend:
        broker, queue = backend.broker, f"forged-move-{crashes}"
        await opened_queue(broker, queue)
        await broker.send(queue, [Outgoing(b"innocent", id="order-17")])
        [innocent] = (await broker.receive(queue, 1, 30.0)).deliveries
        await broker.settle([Settlement(innocent, DeadLetter("why"))])
        with native(queue_of(queue)) as client:
            client.send_message(
                text_of(b"forged", id="order-17", sequence=innocent.sequence, reason="mine", moving=True)
            )
        if crashes:
            receive_and_forget(queue, crashes)
            assert await received(broker, queue) == {}
            expected = {b"innocent": "why", b"forged": "mine"}
        else:
            assert [one.body for one in await broker.peek(queue, EVERY_LIVE, 10)] == [b"forged"]
            got = await received(broker, queue)
            assert (got[b"forged"].delivery_count, got[b"forged"].death) == (1, None)
            await broker.settle([Settlement(got[b"forged"], DeadLetter("worked on"))])
            expected = {b"innocent": "why", b"forged": "worked on"}
        assert {one.body: one.reason for one in await broker.peek_dead(queue, EVERYTHING, 10)} == expected


async def test_a_forged_move_of_a_message_like_another_takes_no_reason_from_it() -> None:
    """A copy that another program has made dead is not that of a move which a process has begun, and died."""
    async with opened() as backend:
        broker, queue = backend.broker, "forged-twin"
        await opened_queue(broker, queue)
        await broker.send(queue, [Outgoing(b"a", id="order-17")])
        [innocent] = (await broker.receive(queue, 1, 30.0)).deliveries
        await broker.settle([Settlement(innocent, Abandon())])
        twin = text_of(b"a", id="order-17", sequence=innocent.sequence, reason="mine", moving=True)
        with native(queue_of(queue)) as client:
            client.send_message(twin)
        receive_and_forget(queue, 1)
        got = await received(broker, queue)
        assert (got[b"a"].sequence, got[b"a"].delivery_count) == (innocent.sequence, 3)
        await until(lambda: reasons_of(queue) == {"mine"})
        begun = {"id": "order-17", "sequence": innocent.sequence, "reason": "why", "dead_at": 1_700_000_000.0}
        held = broker._receipts.find(got[b"a"])
        assert held is not None
        with native(queue_of(queue)) as client:  # as a process that dies before it puts the copy
            client.update_message(
                held.message, held.receipt, content=text_of(b"a", **begun, moving=True), visibility_timeout=0
            )
        assert await received(broker, queue) == {}
        assert reasons_of(queue) == {"mine", "why"}
        with native(queue_of(queue)) as client:  # as one that dies before it removes the message
            client.send_message(text_of(b"a", **begun, moving=True))
        receive_and_forget(queue, 1)
        assert await received(broker, queue) == {}
        with native(queue_of(queue) + POISON_SUFFIX) as client:
            assert len(client.peek_messages(max_messages=32)) == 2, "the copy is there already"


def reasons_of(queue: str) -> set[str | None]:
    with native(queue_of(queue) + POISON_SUFFIX) as client:
        return {decode(one.content)[1].reason for one in client.peek_messages(max_messages=32)}


async def test_forged_moves_keep_no_message_from_its_consumer_and_touch_no_lock() -> None:
    """More of them than one claim moves: each dies at its second delivery, and nothing else."""
    async with opened() as backend:
        broker, queue = backend.broker, "forged-moves"
        await opened_queue(broker, queue)
        await broker.send(queue, [Outgoing(b"held", id="held")])
        [held] = (await broker.receive(queue, 1, 60.0)).deliveries
        forged = [
            text_of(f"forged {n}".encode(), id="held", sequence=held.sequence, reason="mine", moving=True)
            for n in range(DEAD_FOUND_MAX + 6)
        ]
        with native(queue_of(queue)) as client:
            for text in forged:
                client.send_message(text)
        for _ in range(3):
            receive_and_forget(queue, 1)  # 32 at once
        await broker.send(queue, [Outgoing(b"last")])
        got: dict[bytes, Delivery] = {}

        async def have_come() -> bool:
            claim = await broker.receive(queue, 32, 30.0)
            got.update((one.body, one) for one in claim.deliveries)
            await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            return b"last" in got and (await broker.stats(queue)).dead + len(got) == len(forged) + 1

        await until(have_come)
        assert got[b"last"].delivery_count == 1
        assert all(one.delivery_count == 1 for one in got.values()), "none but those that were never received"
        assert await broker.settle([Settlement(held, COMPLETE)]) == [SETTLED]


async def test_pages_of_odd_dead_letters_hide_none_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are locked at once; Azure shows only 32 without a lock."""
    monkeypatch.setattr(removal, "PAGE", 3)
    async with opened() as backend:
        broker, queue = backend.broker, "odd-pages"
        odd = [text_of(b"%d" % n, history=[5], before=7, sequence=17, reason="", moving=True) for n in range(7)]
        await opened_queue(broker, queue, *odd, text_of(b"good", id="good", reason="why"), dead=True)
        only = Selection(ids=frozenset({"good"}))
        assert await broker.redrive(queue, only, None) == 1
        assert (await received(broker, queue)).keys() == {b"good"}
        with native(queue_of(queue) + POISON_SUFFIX) as client:
            client.send_message(text_of(b"good", id="good", reason="why"))
        assert await broker.purge(queue, only, None) == 1
        assert await broker.purge(queue, EVERYTHING, None) == len(odd)


async def test_a_letter_with_a_forged_move_is_redriven_to_be_delivered() -> None:
    async with opened() as backend:
        broker, queue = backend.broker, "moving-letter"
        await opened_queue(broker, queue, text_of(b"a", id="a", reason="x", deliveries=9, moving=True), dead=True)
        assert await broker.redrive(queue, EVERYTHING, None) == 1
        receive_and_forget(queue, 1)
        [got] = (await broker.receive(queue, 32, 30.0)).deliveries
        assert (got.body, got.delivery_count) == (b"a", 2)


# --- settings and names of queues --------------------------------------------------------------------------------


async def test_metadata_edited_by_another_program_disturbs_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "CHECK_AFTER", 0.0)
    names = [f"edited-{number}" for number in range(4)]
    edited: list[dict[str, str]] = [
        {"tenure_settings": "no JSON", "tenure_name": "=no base64"},
        {"tenure_settings": "=/w==", "tenure_idle_at": "9" * 5_000},
        {"tenure_settings": '{"max_deliveries": -1, "lock": "long"}', "tenure_idle_at": "soon"},
    ]
    async with opened() as backend:
        broker = backend.broker
        for name, metadata in zip(names, [*edited, {}], strict=True):
            await broker.declare(name, {"max_deliveries": 3})
            if metadata:
                with native(queue_of(name)) as client:
                    client.set_queue_metadata(metadata)
        assert set(names) <= set(await broker.names())
        assert not set(names) & set(await broker.idle())
        assert [(await broker.settings(name)).max_deliveries for name in names] == [10, 10, 10, 3]
        for name in names:
            assert (await broker.declare(name, {"max_deliveries": 5})).max_deliveries == 5
            assert (await broker.settings(name)).max_deliveries == 5


# --- leases ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def container() -> AsyncIterator[ContainerClient]:
    """Open the container of the leases, as another program does."""
    async with BlobServiceClient.from_connection_string(shared(Azurite).connection_string) as service:
        yield service.get_container_client("leases")


async def test_lease_blobs_that_are_unreadable_disturb_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "TERM_CHECKS", ())
    names = [f"edited/{number}" for number in range(leases_module.FEW + 2)]
    edited: list[dict[str, str]] = [
        {"tenure_token": "many", "tenure_holder": "ann#1"},
        {"tenure_token": "9" * 5_000},
        {"tenure_token": "7", "tenure_metadata": "no JSON"},
        {"tenure_token": "7", "tenure_metadata": '{"a": 1}', "tenure_holder": "=/w=="},
    ]
    odd = [".long/of-another-program", ".schedules/x/y", "~00", "not ~C3 ours", "x" * 1_024]
    async with opened() as backend, container() as blobs:
        leases = backend.leases
        grants = []
        for name in names:
            answer = await leases.acquire(name, "ann#1", 60.0)
            assert isinstance(answer, Granted)
            grants.append(answer.grant)
            await leases.release(answer.grant)
        again = await leases.acquire(names[-1], "bob#1", 60.0)
        assert isinstance(again, Granted)
        for name, metadata in zip(names, edited, strict=False):
            await blobs.get_blob_client(blob_of(name)).set_blob_metadata(metadata)
        for one in odd:
            await blobs.get_blob_client(one).upload_blob(b"\xff" * 10, metadata={"tenure_token": "7"}, overwrite=True)
        large = blobs.get_blob_client(".long/large")
        await large.upload_blob(b"x" * 5_000, metadata={"tenure_token": "7"}, overwrite=True)
        taken = BlobLeaseClient(blobs.get_blob_client(blob_of(names[3])))
        await taken.acquire(lease_duration=60)
        listed = await leases.names()
        assert set(names) <= set(listed)
        assert not {*odd, "\0", "large"} & set(listed)
        for asked in (listed, names[:4], names):
            answers = dict(zip(asked, await leases.inspect_many(asked), strict=True))
            assert answers[names[0]] == Vacant(names[0])
            assert answers[names[2]] == Vacant(names[2], 7)
            assert answers[names[3]] == HeldBy(names[3], FOREIGN_HOLDER, 0, None)
        assert await leases.inspect(names[-1]) == HeldBy(names[-1], "bob#1", again.grant.token, None)
        for name in names[:2]:
            with pytest.raises(ConfigError, match="set tenure_token to a number as high as"):
                await leases.acquire(name, "ann#2", 60.0)
            await blobs.get_blob_client(blob_of(name)).set_blob_metadata({"tenure_token": "2000000000"})
            answer = await leases.acquire(name, "ann#2", 60.0)
            assert isinstance(answer, Granted)
            assert answer.grant.token == 2_000_000_001
        await taken.release()
        for one in (*odd, ".long/large"):  # the container is shared with other tests
            await blobs.get_blob_client(one).delete_blob()


async def test_a_campaign_for_a_name_whose_token_is_unreadable_says_so() -> None:
    async with opened() as backend, container() as blobs:
        answer = await backend.leases.acquire("token/gone", "ann#1", 60.0)
        assert isinstance(answer, Granted)
        await backend.leases.release(answer.grant)
        await blobs.get_blob_client(blob_of("token/gone")).set_blob_metadata({"tenure_token": "gone"})
        async with tenure.connect(patient(url_of(Azurite))) as mine:
            with pytest.raises(ConfigError, match="'token/gone' in the container 'leases' has the token 'gone'"):
                async with mine.election("token/gone", ttl=60.0).campaign():
                    pass


async def test_a_term_whose_blob_is_made_unreadable_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "TERM_CHECKS", ())
    async with opened() as backend, container() as blobs:
        answer = await backend.leases.acquire(name, "ann#1", 60.0)
        assert isinstance(answer, Granted)
        grant = answer.grant
        await blobs.get_blob_client(blob_of(name)).set_blob_metadata({"tenure_token": "gone"}, lease=lease_id(grant))
        assert await backend.leases.renew([grant], 60.0) == [Lost(grant)]
        assert await backend.leases.inspect(name) == HeldBy(name, FOREIGN_HOLDER, 0, None)


async def test_a_fence_with_an_unreadable_token_refuses_all_writes(name: str) -> None:
    async with container() as blobs, opened() as backend:
        await backend.leases.acquire(name, "ann#1", 60.0)  # so that there is a container
        blob = blobs.get_blob_client(f"fenced/{blob_of(name)}")
        for text in ("many", "9" * 5_000):
            await blob.upload_blob(b"old", metadata={"tenure_fence": text}, overwrite=True)
            with pytest.raises(ConfigError, match="tenure_fence of the blob"):
                await Fence(blob).upload(b"new", 7)
        assert await (await blob.download_blob()).readall() == b"old"


# --- schedules ---------------------------------------------------------------------------------------------------


async def test_a_schedule_that_is_unreadable_disturbs_no_others(name: str) -> None:
    async with opened() as backend, container() as blobs:
        broker = backend.broker
        for schedule in ("broken", "empty", "good", "lost"):
            assert (await broker.advance(name, schedule, None, "1")).is_done
        at = {schedule: await _blob_of(blobs, schedule, name) for schedule in ("broken", "empty", "lost")}
        await blobs.get_blob_client(at["broken"]).set_blob_metadata(
            {"tenure_schedule": "broken", "tenure_text": "=no base64"}
        )
        await blobs.get_blob_client(at["empty"]).set_blob_metadata({"tenure_schedule": "empty"})
        await blobs.get_blob_client(at["lost"]).set_blob_metadata({"tenure_schedule": "=no base64"})
        copy = blobs.get_blob_client(at["lost"] + "x")
        await copy.upload_blob(b"", metadata={"tenure_schedule": "good", "tenure_text": "{}"})
        records = (await broker.schedules(name)).records
        assert records == {"broken": "=no base64", "empty": "", "good": "1"}
        assert (await broker.advance(name, "good", "1", "2")).is_done
        assert (await broker.advance(name, "broken", "=no base64", "2")).is_done
        assert (await broker.advance(name, "empty", "", None)).is_done
        assert (await broker.advance(name, "lost", None, "2")).is_done
        assert (await broker.schedules(name)).records == {"broken": "2", "good": "2", "lost": "2"}


async def _blob_of(blobs: ContainerClient, schedule: str, queue: str) -> str:
    listed = blobs.list_blobs(name_starts_with=f".schedules/{queue_of(queue)}/", include=["metadata"])
    [found] = [str(one.name) async for one in listed if (one.metadata or {}).get("tenure_schedule") == schedule]
    return found


async def test_an_odd_date_in_an_answer_is_no_error(name: str) -> None:
    async with opened() as backend:
        clock = backend.broker._clock
        learned: list[float] = []

        def learn_from(response: Any, asked_at: float) -> None:
            response.http_response.headers["Date"] = "Fri, 31 Dec 9999 23:59:59 GMT"
            ServiceClock.learn_from(clock, response, asked_at)
            learned.append(asked_at)

        clock.learn_from = learn_from  # type: ignore[method-assign]
        await asyncio.gather(clock.read(name), broker_schedules(backend.broker, name))
        assert len(learned) >= 2
        assert clock._offset is None


async def broker_schedules(broker: AzureBroker, queue: str) -> None:
    assert (await broker.schedules(queue)).records == {}
