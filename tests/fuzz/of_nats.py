"""Messages, leases and answers of NATS."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

from nats.aio.msg import Msg

from tenure._backends.nats import client as nats_client
from tenure._backends.nats import diagnosis, lease_records
from tenure._backends.nats.client import names_in, number_in, part_of, read, stored, stored_in
from tenure._backends.nats.configuration import Consumer
from tenure._backends.nats.connection import headers_of
from tenure._backends.nats.errors import NO_STREAM, WRONG_SEQUENCE, BadAnswer, Refusal, TooLarge, last_in
from tenure._backends.nats.inbox import Inbox
from tenure._backends.nats.leases import NatsLeases, is_reporting, takes_rollup
from tenure._backends.nats.message_format import NO_STATE, State, decode, encode, encode_to_fit, properties_of
from tenure._backends.nats.messages import (
    Found,
    dead_delivery_of,
    dead_message,
    delivered_message,
    delivery_of,
    live_message,
    read_message,
)
from tenure._backends.nats.names import is_cut, name_by
from tenure._backends.nats.places import Places, ack_wait_in, nanoseconds, record_of
from tenure._backends.nats.places import Record as QueueRecord
from tenure._backends.nats.pulls import Inbox as Pull
from tenure._backends.nats.receiving import deliveries_before
from tenure._backends.nats.store_clock import StoreClock, timestamp_of
from tenure._foreign import Unreadable
from tenure._lease import HeldBy
from tenure._runtime.clock import SystemClock
from tenure.errors import ConfigError
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    HISTORY,
    NOW,
    SENT,
    Answers,
    always,
    as_bytes,
    as_objects,
    as_text,
    as_texts,
    drive,
    through_json,
    use_delivery,
    use_lease,
    use_message,
    use_moment,
    use_notes,
    use_text,
)

SUBJECT = "tenure.orders.=m.abc"
RECEIPT = "$JS.ACK.tenure_orders.tenure-30000-abc123.2.17.9.1800000000000000000.3"
TIME = "2026-11-24T09:48:57.143453167Z"


def message(data: bytes = b"body", subject: str = SUBJECT, reply: str = RECEIPT, headers: Any = None) -> Msg:
    return Msg(_client=cast(Any, None), subject=subject, reply=reply, data=data, headers=headers)


# --- messages ---

FAILED = State(
    sequence=17,
    enqueued_at=NOW,
    deliveries=2,
    history=HISTORY,
    before=1,
    locked_for=30.0,
    lock="token",
    locked_until=NOW,
)
STATES = (NO_STATE, FAILED, FAILED.dead("rejected", "by its handler", 3, NOW, FAILURE), FAILED.redriven())


def wire(headers: dict[str, str]) -> bytes:
    """Return headers as the server sends them."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode("utf-8", "surrogatepass")


HEADERS = [
    encode(replace(properties_of(one, NOW), state=state))
    for one in (*SENT, replace(SENT[0], id="a\nb", correlation_id="a\nb"))
    for state in STATES
]


def read_headers(given: Any) -> None:
    use_headers(wire(as_texts(given)))


def read_wire(given: Any) -> None:
    use_headers(as_bytes(given))


def use_headers(raw: bytes) -> None:
    headers = headers_of(raw)
    found = delivered_message("orders", message(headers=headers))
    assert found is not None
    use_found(found)
    use_found(Found("orders$dead", "tenure.orders.=m.a", 5, NOW, b"body", decode(headers)))
    assert decode(headers, is_ours=False).state == NO_STATE


def use_found(found: Found) -> None:
    use_delivery(delivery_of(found, "token", NOW))
    use_delivery(dead_delivery_of(found, "token", NOW))
    use_message(dead_message(found.queue, found))
    use_message(live_message(found))
    assert found.locked_until >= 0.0
    assert isinstance(found.is_expired_at(NOW), bool)
    use_moment(found.properties.due)
    assert found.properties.expires_in >= 0.0
    assert not found.delivered or deliveries_before(found) >= 0
    for state in cast("list[State]", use_notes(found.state, found.count)):
        for properties in (found.with_state(), found.dead(state.dead("why", "", found.count, NOW))):
            encoded = encode(properties, "once")
            assert all(one.isprintable() and one.encode() for one in encoded.values())
            again = decode(encoded)
            assert (again.id, again.headers, again.state) == (properties.id, properties.headers, properties.state)
            with suppress(TooLarge):
                encode_to_fit(properties, found.body, 10_000)


def read_receipt(given: Any) -> None:
    reply, subject = (as_text(one) for one in [*as_objects(given), "", ""][:2])
    found = delivered_message("orders", message(subject=subject, reply=reply))
    if found is not None:
        use_found(found)


# --- records ---


def read_lease(given: Any) -> None:
    for revision in (0, 17):
        record = lease_records.read(as_bytes(given), revision)
        if record is None:
            continue
        assert repr(record.grant)
        use_lease(HeldBy(record.name, record.holder, record.token, None, record.metadata, record.resign_asked))
        for one in (
            record,
            lease_records.renewed(record, 15.0, left=3.0, stamp="s"),
            lease_records.released(record, stamp="s"),
            lease_records.asked_to_resign(record),
        ):
            assert lease_records.read(lease_records.written(one), revision) is not None


def read_queue(given: Any) -> None:
    record = record_of(as_bytes(given))
    assert record_of(json.dumps(asdict(record)).encode()) == record


def read_names(given: Any) -> None:
    for one in as_objects(given):
        text = as_text(one, 4_096)  # as long as a line of the server's may be
        seconds = ack_wait_in(text)
        assert seconds is None or nanoseconds(seconds) > 0
        if not is_cut(text):
            use_text(name_by(text) or "")


LEASE = lease_records.acquired("chair", "ann#1", 15.0, {"at": "Zürich"}, after=16, stamp="abc")
LEASES = [lease_records.written(one) for one in (LEASE, lease_records.asked_to_resign(LEASE))]
QUEUE = QueueRecord(
    {"lock": 20.0, "max_deliveries": 3, "rate": (5, 1.0)}, 7, 9, NOW, "orders", {"nightly": "text"}, "5f3a"
)

# --- answers ---


def stored_as(subject: str, body: bytes, headers: bytes = b"") -> dict[str, Any]:
    """Return an answer of the server with a message."""
    found = {"subject": subject, "seq": 17, "data": b64encode(body).decode(), "time": TIME}
    return {"message": found | ({"hdrs": b64encode(headers).decode()} if headers else {})}


MESSAGE = stored_as(SUBJECT, b"body", wire(HEADERS[1]))
KEPT = stored_as("$KV.tenure-queues.orders", json.dumps(asdict(QUEUE)).encode())
REMEMBERED = stored_as("x", json.dumps({"until": NOW + 60.0, "name": "order-17/0123456789abcdef"}).encode())
CONFIG = {
    "name": "KV_tenure-leases",
    "num_replicas": 3,
    "max_age": 5,
    "storage": "memory",
    "ack_wait": 30_000_000_000,
    "max_ack_pending": 1_000,
    "max_msgs": 5,
    "discard": "old",
    "republish": {"src": ">", "dest": "tenure-leases.>"},
}
INFO = {
    "config": CONFIG,
    "state": {"messages": 5, "last_seq": 17, "subjects": {"$KV.tenure-leases.chair": 1}},
    "delivered": {"stream_seq": 17},
    "num_ack_pending": 3,
    "ts": TIME,
    "total": 2,
    "storage": 10,
    "limits": {"max_storage": 11},
    "streams": 3,
}
REFUSAL = {"error": {"code": 404, "err_code": 10_059, "description": "stream not found"}, "type": "x"}
STORED = {"stream": "KV_tenure-leases", "seq": 17, "duplicate": True}
NAMES = {"streams": ["tenure_orders", "tenure_=C3=A4"], "consumers": ["tenure-30000-abc123", "x"], "total": 2}
LISTED = {"streams": [INFO, {"config": {"name": "tenure_orders", "num_replicas": 1}}], "total": 2}

QUEUE_STREAM = {
    "name": "tenure_orders",
    "description": "messages of orders",
    "subjects": ["tenure.orders", "tenure.orders.>"],
    "retention": "workqueue",
    "discard": "old",
    "max_age": 60_000_000_000,
    "max_msgs": 5,
    "max_msgs_per_subject": -1,
    "max_msg_size": 1_000,
    "duplicate_window": 120_000_000_000,
}
DEAD_STREAM = {**QUEUE_STREAM, "name": "tenure_orders=24dead", "retention": "limits", "max_msgs_per_subject": 1}
QUEUE_CONSUMER = {
    "name": "tenure-30000-abc123",
    "config": {"durable_name": "tenure-30000-abc123", "ack_wait": 2_000_000_000, "max_deliver": 1, "backoff": [5]},
    "paused": True,
}
QUEUE_STREAMS = {"streams": [{"config": QUEUE_STREAM}, {"config": DEAD_STREAM}], "total": 2}
CONSUMERS = {"consumers": [QUEUE_CONSUMER], "total": 1}


def read_answer(given: Any) -> None:
    answer = read(as_bytes(given))
    uses: list[Callable[[], object]] = [
        lambda: use_found(read_message("orders", answer)),
        lambda: part_of(answer, "config"),
        lambda: number_in(part_of(answer, "state"), "messages"),
        lambda: names_in(answer, "streams"),
        lambda: stored(message(as_bytes(given)), "KV_tenure-leases"),
        lambda: use_text(stored_in(answer).subject),
    ]
    for use in uses:
        with suppress(BadAnswer):
            use()


class Client(Answers):
    """A client of NATS: the answers are JSON that was read."""

    def __init__(self, answers: Any) -> None:
        options = SimpleNamespace(prefix="tenure", replicas=1, timeout=5.0)
        super().__init__(answers, Refusal(NO_STREAM, "stream not found"), options=options, address="nats://x")
        self.version = (2, 9, 1)

    async def call(self, *_: object, **__: object) -> Any:
        return read(json.dumps(self.next(), default=str, skipkeys=True).encode())

    def is_spread(self, *_: object) -> bool:
        return False

    pages = nats_client.Client.pages


def asked(given: Any, *questions: Callable[[Any], Any]) -> None:
    """Ask clients that have these answers."""
    for ask in questions:
        with suppress(Refusal, BadAnswer, ConfigError):
            assert repr(drive(ask(Client(given))))


def read_places(given: Any) -> None:
    consumer = Consumer("tenure-30000-abc123", 30.0)
    asked(
        given,
        lambda client: Places(client).records(client),
        lambda client: Places(client).consumer_of(client, "orders"),
        lambda client: Places(client).has_undelivered(client, "orders", consumer, 5),
        lambda client: Places(client).queues(client),
        lambda client: Places(client).read_record(client, "orders"),
    )


def read_facts(given: Any) -> None:
    asked(given, diagnosis._jetstream, _facts)


async def _facts(client: Any) -> object:
    streams = [one async for one in diagnosis._listed(client, client, "tenure.>")]
    return list(diagnosis._kept(client, [cast(Any, SimpleNamespace(cluster=""))], streams))


def read_queue_facts(given: Any) -> None:
    asked(given, _queue_facts)


async def _queue_facts(client: Any) -> object:
    streams = [one async for one in diagnosis._listed(client, client, "tenure.>")]
    return diagnosis._queue_streams(client, streams), await diagnosis._queue_consumers(client, streams)


def read_leases(given: Any) -> None:
    def leases_of(client: Any) -> Any:
        leases = cast(Any, NatsLeases.__new__(NatsLeases))
        leases._client, leases._bucket, leases._stream = client, "tenure-leases", "KV_tenure-leases"
        leases._required = set()
        return leases

    asked(
        given,
        lambda client: leases_of(client)._listed(client),
        lambda client: leases_of(client)._require_one_replica(client),
    )
    for one in as_objects(given):
        config = through_json(one.get("config")) if isinstance(one, dict) else None
        if isinstance(config, dict):
            assert isinstance(is_reporting(config, "tenure-leases"), bool)
            assert isinstance(takes_rollup(config), bool)


def read_inbox(given: Any) -> None:
    store: Any = SimpleNamespace(
        ensure_known=always(None),
        make_stream=always(None),
        require=always(None),
        store=always(None),
        now=lambda: NOW,
        after=lambda seconds: NOW + seconds,
    )
    asked(
        given,
        lambda client: Inbox(client, store, store).name_of(client, "orders", "order-17", 60.0),
        lambda client: Inbox(client, store, store).handled(client, "orders", ["order-17", "order-18"]),
        lambda client: Inbox(client, store, store).remember(client, "orders", "order-17", 60.0),
    )


def read_clock(given: Any) -> None:
    clock = StoreClock(cast(Any, None), SystemClock())
    answer = given if isinstance(given, dict) else {}
    for _ in range(2):
        clock.learn_from(answer, clock.local.now() - 0.1)
    use_moment(clock.now())
    with suppress(Unreadable):
        timestamp_of(answer.get("ts"))


def read_refusal(given: Any) -> None:
    number = last_in(Refusal(WRONG_SEQUENCE, as_text(given)))
    assert number is None or 0 <= number < 2**63


def read_status(given: Any) -> None:
    pull = cast(Any, Pull.__new__(Pull))
    pull._messages, pull._wanted, pull._complete, pull._status = [], 10, None, None
    headers = as_texts(given)
    pull._note(headers.get("Status", "408"), SimpleNamespace(headers=headers))
    assert repr((pull._wanted, pull._status))


STATUS = {"Status": "408", "Description": "Request Timeout", "Nats-Pending-Messages": "3", "Nats-Pending-Bytes": "0"}
ANSWERS = [json.dumps(one) for one in (MESSAGE, KEPT, INFO, REFUSAL, STORED, NAMES)]
RECEIPTS = [[RECEIPT, SUBJECT], ["$JS.ACK.hub.abc.q.tenure-1-a.1.2.3.4.5.xyz", "tenure.q"]]
PLACES = [[KEPT, MESSAGE], [NAMES, INFO, MESSAGE], [INFO, MESSAGE], [MESSAGE, INFO, MESSAGE]]
BUCKET = {"config": {"max_age": 5}}

DECODERS = [
    Decoder("nats.headers", HEADERS, read_headers, share=0.5),
    Decoder("nats.wire", [*map(wire, HEADERS), b"NATS/1.0 408 Request Timeout\r\n\r\n"], read_wire, share=0.7),
    Decoder("nats.receipt", RECEIPTS, read_receipt),
    Decoder("nats.lease", LEASES, read_lease),
    Decoder("nats.queue", [json.dumps(asdict(one)).encode() for one in (QUEUE, QueueRecord())], read_queue),
    Decoder("nats.names", [["tenure-30000-abc123", "orders", "=C3=A4"], ["tenure-1-a"]], read_names, share=0.7),
    Decoder("nats.answer", ANSWERS, read_answer, (Refusal, BadAnswer)),
    Decoder("nats.places", PLACES, read_places),
    Decoder("nats.facts", [[INFO], [LISTED, LISTED]], read_facts),
    Decoder("nats.queue_facts", [[QUEUE_STREAMS, CONSUMERS], [QUEUE_STREAMS, CONSUMERS, CONSUMERS]], read_queue_facts),
    Decoder("nats.leases", [[INFO, INFO], [INFO]], read_leases),
    Decoder("nats.inbox", [[BUCKET, REMEMBERED, REMEMBERED], [BUCKET, BUCKET, REMEMBERED]], read_inbox),
    Decoder("nats.clock", [{"ts": TIME}, {"ts": "2026-11-24T09:48:57Z"}], read_clock),
    Decoder("nats.status", [STATUS], read_status),
    Decoder("nats.refusal", ["wrong last sequence: 7", "wrong last sequence"], read_refusal),
]
