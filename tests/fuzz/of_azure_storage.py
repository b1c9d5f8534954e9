"""Messages, lease blobs and metadata of Azure Storage."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from azure.storage.blob import BlobProperties
from azure.storage.queue import QueueMessage

from tenure._backends.azure_storage.fence import Fence
from tenure._backends.azure_storage.leases import LeaseBlob
from tenure._backends.azure_storage.login import check_login, kind_of, signature_in
from tenure._backends.azure_storage.message_format import Properties, decode, encode, encode_to_fit
from tenure._backends.azure_storage.names import encode_metadata, queue_name_of, queue_of
from tenure._backends.azure_storage.queue import QUEUE_TRAITS, AzureBroker
from tenure._backends.azure_storage.records import FoundMessage, dead_letter_properties, live_message
from tenure._backends.azure_storage.schedules import _schedule_in, _text_in
from tenure._backends.azure_storage.settings import _declared, _in_force
from tenure._foreign import Unreadable
from tenure._logins import Login
from tenure._queue.delivery_ends import expired
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Death, Delivery
from tenure._runtime.clock import SystemClock
from tenure._runtime.remote_clock import RemoteClock, http_date
from tenure._secret import Secret
from tenure.errors import ConfigError, Unavailable
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    HEADERS,
    HISTORY,
    NOW,
    Answers,
    always,
    as_objects,
    as_text,
    as_texts,
    drive,
    use_delivery,
    use_holder,
    use_moment,
    use_notes,
    use_text,
)

WHEN = datetime.fromtimestamp(NOW, UTC)

FAILED = Properties(
    id="order-17",
    headers=HEADERS,
    reply_to="answers",
    correlation_id="request-5",
    ttl=60.0,
    uncounted=1,
    sequence=5,
    enqueued_at=NOW,
    history=HISTORY,
    before=1,
    deliveries=2,
)
DEAD = FAILED.dead("rejected", "by its handler", 3, NOW, FAILURE)
TEXTS = [encode(b"body", one) for one in (Properties(), Properties(id="a"), FAILED, DEAD)]
PLAIN = encode_to_fit("a long text " * 4_500, b"a long text " * 4_500, DEAD)
assert PLAIN is not None


def read_message(given: Any) -> None:
    text = as_text(given)
    for queue in ("orders", dead_letters_of("orders")):
        for count, is_delivery in ((1, True), (0, False), (3, True)):
            raw = QueueMessage(text, id="azures-own", inserted_on=WHEN, dequeue_count=count)
            use_found(queue, FoundMessage.of(queue, raw, NOW, is_delivery=is_delivery))


def use_found(queue: str, one: FoundMessage) -> None:
    said = one.properties
    assert repr(one.key)
    assert isinstance(one.is_expired, bool)
    assert repr(live_message(queue, one))
    death = Death(said.reason or "", said.description, said.dead_at, said.error, said.history)
    use_delivery(
        Delivery(
            *(queue, one.sequence, "token", one.id, one.body, said.headers, one.count, one.enqueued_at, NOW, None, 0),
            said.reply_to,
            said.correlation_id,
            death,
        )
    )
    for kept in use_notes(said, one.count):
        assert isinstance(kept, Properties)
        assert decode(encode(one.body, kept))[0] == one.body
    dead = dead_letter_properties(one, said, expired(one.count), NOW)
    assert decode(encode(one.body, dead)) == (one.body, dead)


def read_blob(given: Any) -> None:
    blob = LeaseBlob.of(BlobProperties(**{"Last-Modified": WHEN, "ETag": '"1"', "metadata": as_texts(given)}))
    assert repr(blob)
    use_holder(blob.holder or "")
    assert blob.grant("chair").token == blob.token
    use_text(json.dumps(dict(blob.metadata), ensure_ascii=False))
    assert blob.ttl >= 0


def read_login(given: Any) -> None:
    secret = Secret(as_text(given))
    assert all(check_login(Login(None, secret), "credentials="))
    assert kind_of(secret) == ("shared access signature" if signature_in(secret) else "account key")


def read_queue(given: Any) -> None:
    metadata = as_texts(given)
    declared = _declared(metadata)
    assert repr(_in_force(declared, QUEUE_TRAITS))
    assert json.dumps(declared)
    for queue in ("orders", "orders-poison", queue_of("Orders A")):
        use_text(queue_name_of(queue, metadata))


def read_idle(given: Any) -> None:
    async def list_queues(**_: object) -> AsyncIterator[Any]:
        for metadata in as_objects(given):
            yield SimpleNamespace(name="orders", metadata=as_texts(metadata) or None)

    broker = cast(Any, AzureBroker.__new__(AzureBroker))
    broker._clock = SimpleNamespace(ensure_known=always(None), now=lambda: NOW)
    broker._account = Answers([], Unavailable("no more"), queues=SimpleNamespace(list_queues=list_queues))
    for name in drive(broker.idle()):
        use_text(name)


def read_schedule(given: Any) -> None:
    metadata = as_texts(given)
    use_text(_schedule_in(metadata) or "")
    use_text(_text_in(metadata))


def read_date(given: Any) -> None:
    date = None if given is None else as_text(given)
    clock = RemoteClock(SystemClock())
    clock.learn_date(date, clock.local.now())
    use_moment(clock.now())
    http_date(date)


def read_fence(given: Any) -> None:
    fence = cast(Any, Fence.__new__(Fence))
    fence._blob = SimpleNamespace(blob_name="resource")
    assert fence._newest(as_text(given)) >= 0


BLOB = {
    "tenure_token": "1784000000",
    "tenure_holder": encode_metadata("änn#1"),
    "tenure_metadata": encode_metadata('{"at": "Zürich"}'),
    "tenure_ttl": "15",
    "tenure_resign": "1784000000",
}
PLAIN_BLOB = {**BLOB, "tenure_metadata": '{"at": "here"}', "tenure_holder": "a"}
SETTINGS = json.dumps({"lock": 20.0, "max_deliveries": 3, "dead_retention": 1e999})
QUEUE = {
    "tenure_name": encode_metadata("Orders A"),
    "tenure_settings": encode_metadata(SETTINGS),
    "tenure_idle_at": "1800000000",
}
SCHEDULE = {
    "tenure_schedule": encode_metadata("nächtlich"),
    "tenure_text": encode_metadata('{"record": "r", "by": "x"}'),
}

DECODERS = [
    Decoder("azure_storage.message", TEXTS, read_message, share=0.7),
    Decoder("azure_storage.long", [PLAIN], read_message, share=0.1),
    Decoder("azure_storage.blob", [BLOB, PLAIN_BLOB], read_blob),
    Decoder("azure_storage.queue", [QUEUE, {**QUEUE, "tenure_settings": "=e30="}], read_queue),
    Decoder("azure_storage.idle", [[QUEUE, {"tenure_idle_at": "5"}]], read_idle),
    Decoder("azure_storage.schedule", [SCHEDULE, {"tenure_schedule": "a", "tenure_text": "b"}], read_schedule),
    Decoder("azure_storage.date", ["Thu, 01 Jan 2026 00:00:00 GMT"], read_date, (Unreadable,)),
    Decoder("azure_storage.login", ["aHVzaGh1c2hodXNo", "?sv=1&sig=a%3D"], read_login, (ConfigError,)),
    Decoder("azure_storage.fence", ["1784000000"], read_fence, (ConfigError,)),
]
