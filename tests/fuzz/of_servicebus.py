"""Messages, session states and user metadata of Azure Service Bus."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID

from tenure._backends.servicebus import amqp
from tenure._backends.servicebus.administration import Entity
from tenure._backends.servicebus.codec import Incoming, bytes_of, incoming, moment_of, plain, received_in, state_in
from tenure._backends.servicebus.login import check_login, signed
from tenure._backends.servicebus.message_format import (
    DESCRIPTION,
    REASON,
    MessageNotes,
    Received,
    copied,
    outgoing,
    received,
    size_of,
)
from tenure._backends.servicebus.places import Noted, declared_of, idle_among, names_of, settings_of
from tenure._backends.servicebus.schedules import _texts
from tenure._foreign import Unreadable
from tenure._logins import Login
from tenure._queue.message import Attempt, dead_message_of
from tenure._queue.schedule_steps import Kept
from tenure._secret import Secret
from tenure.errors import ConfigError
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    HISTORY,
    NOW,
    SENT,
    as_bytes,
    as_objects,
    as_text,
    use_death,
    use_delivery,
    use_text,
)

# --- written ---


def parts_of(data: bytes) -> dict[str, Any]:
    """Return a message as values by section, as the service delivers it."""
    one = incoming(memoryview(data))
    annotations = {
        **one.annotations,
        "x-opt-sequence-number": 7,
        "x-opt-enqueued-time": int(NOW * 1_000),
        "x-opt-locked-until": int(NOW * 1_000) + 30_000,
        "x-opt-message-state": 1,
    }
    return {
        "header": [True, 4, 60_000, None, 2],
        "annotations": annotations,
        "properties": list(one.properties),
        "application": dict(one.application),
        "body": list(one.data),
        "value": None,
    }


NAMED = [replace(SENT[0], id="a"), SENT[1]]  # without an id, each would get a random one
NOTES = MessageNotes(
    id="order-17",
    deliveries=2,
    history=HISTORY,
    before=1,
    dead_at=NOW,
    died_after=3,
    sent_at=NOW,
    no_attempts=(3, 4),
)
DATA = [
    *(outgoing(one, NOW).data for one in NAMED),
    outgoing(NAMED[1], NOW, {**NOTES.properties(0), REASON: "rejected", DESCRIPTION: "by its handler"}).data,
    outgoing(NAMED[0], NOW, {REASON: "MaxDeliveryCountExceeded", **MessageNotes(history=HISTORY).properties(0)}).data,
]
MESSAGES = [*map(parts_of, DATA), {**parts_of(DATA[0]), "body": None, "value": {"a": [1, None, b"x", 1.5]}}]

DECIMALS = amqp.section(
    amqp.VALUE, amqp.joined_list([b"\x74" + b"\x32" * 4, b"\x84" + b"\x6c" * 8, b"\x94" + bytes(16)])
)

LARGE = amqp.section(amqp.VALUE, amqp.binary(bytes(300)))

TEXT_MAX = 70_000
"""Bytes of the longest text: encoding one in many lists inside each other would take all the time."""

CODES = {
    "header": amqp.HEADER,
    "annotations": amqp.ANNOTATIONS,
    "properties": amqp.PROPERTIES,
    "application": amqp.APPLICATION,
    "value": amqp.VALUE,
}


def encoded(given: Any) -> bytes:
    """Return values by section as the bytes of a message, whatever types they have."""
    sections = given if isinstance(given, dict) else {"value": given}
    found = [
        amqp.section(code, _value(sections[name])) for name, code in CODES.items() if sections.get(name) is not None
    ]
    body = sections.get("body")
    found += [amqp.section(amqp.DATA, _value(one)) for one in as_objects(body)[:200] if body is not None]
    return b"".join(found)


def _value(value: Any) -> bytes:
    match value:
        case None:
            return amqp.NULL
        case bool():
            return b"\x56" + bytes([value])
        case int():
            return struct.pack(">BQ", 0x80 if value >= 2**63 else 0x81, value % 2**64)
        case float():
            return struct.pack(">Bd", 0x82, value)
        case UUID():
            return b"\x98" + value.bytes
        case Decimal():
            return b"\x94" + bytes(16)
        case bytes():
            return amqp.binary(value)
        case dict():
            return amqp.joined_map([_value(one) for pair in value.items() for one in pair])
        case list() | tuple():
            return amqp.joined_list([_value(one) for one in value])
    text = as_bytes(value)[:TEXT_MAX]
    return struct.pack(">BI", 0xB1, len(text)) + text


# --- read ---


def read_message(given: Any) -> None:
    use(encoded(given))


def read_bytes(given: Any) -> None:
    data = as_bytes(given)
    use(data)
    for read in (amqp.value_of, amqp.parts_of, amqp.pairs_of):
        with suppress(Unreadable):
            plain(read(data[3:]))
    assert isinstance(amqp.map_of(data[3:]), dict)
    assert len(amqp.list_of(data[3:], 13)) == 13


def use(data: bytes) -> None:
    message = incoming(memoryview(data))
    assert isinstance(message.body, bytes)
    assert message.size >= 0
    one = received("orders", message)
    use_received(one, message)
    failed = one.notes.with_attempt(Attempt(one.count + 1, NOW, "abandoned", FAILURE))
    for notes, new_id in ((one.notes, None), (failed, "new"), (NOTES, None)):
        copy = incoming(memoryview(copied(one, message, notes, new_id=new_id, ttl=one.ttl, due_at=one.due_at).data))
        again = received("orders", copy)
        use_received(again, copy)
        assert again.body == one.body
        assert again.headers == one.headers
        assert again.notes.deliveries == notes.deliveries
    died = replace(one.notes, dead_at=NOW, died_after=one.count + 1)
    use_death(received("orders", incoming(memoryview(copied(one, message, died, new_id=None).data))).death)


def use_received(one: Received, message: Incoming) -> None:
    assert repr(one)
    assert repr(message)
    use_death(one.death)
    use_delivery(one.delivery("orders", "token"))
    use_delivery(dead := one.delivery("orders$dead", "token", is_dead=True))
    assert repr(dead_message_of("orders", dead, one.death))
    assert size_of(one.headers) >= 0
    assert one.ttl is None or one.ttl >= 0.0


def read_metadata(given: Any) -> None:
    text = as_text(given)
    noted = Noted.read(text)
    if noted is not None:
        assert repr(noted)
        assert Noted.read(noted.written()) == noted
    entity = Entity(30.0, 10, False, None, True, text)
    assert declared_of(entity) is not None
    assert repr(settings_of(entity))
    rows = [("orders", text), ("mails", "{}")]
    for name in [*names_of(rows), *idle_among(rows, NOW)]:
        use_text(name)


def read_schedules(given: Any) -> None:
    for name, text in _texts(as_bytes(given)).items():
        use_text(name)
        assert Kept.read(text).written()


def read_answer(given: Any) -> None:
    answer = given if isinstance(given, dict) else {"session-state": given}
    state = state_in(answer)
    assert state is None or isinstance(state, bytes)
    for message, _ in received_in(answer):
        assert isinstance(message.body, bytes)
    for value in answer.values():
        with suppress(Unreadable):
            assert math.isfinite(moment_of(value))
    assert isinstance(bytes_of(given), bytes)


STATE = b'{"nightly": "{\\"record\\": \\"r\\", \\"by\\": \\"x\\", \\"keep_out\\": 5.0}", "hourly": "x"}'
METADATA = [
    Noted("Orders A", ("lock", "body_max"), 1_000, 60.0, NOW, True, "maker", "5f3a").written(),
    Noted().written(),
]


def read_login(given: Any) -> None:
    text, user = [as_text(one) for one in (*as_objects(given), "", "")][:2]
    login = Login(user or None, Secret(text))
    for emulator in (True, False):
        assert all(check_login(login, "credentials=", emulator=emulator))
        assert signed("sb://example/orders", login).token.startswith("SharedAccessSignature ")


LOGINS = ["SharedAccessSignature sr=x&sig=a%3D&se=9999999999&skn=p", ["a" * 43 + "=", "policy"]]

DECODERS = [
    Decoder("servicebus.message", MESSAGES, read_message, share=0.7),
    Decoder("servicebus.bytes", [*DATA, DECIMALS, LARGE], read_bytes, share=0.7),
    Decoder("servicebus.metadata", METADATA, read_metadata, (ConfigError,)),
    Decoder("servicebus.login", LOGINS, read_login, (ConfigError,)),
    Decoder("servicebus.schedules", [STATE], read_schedules, (Unreadable,)),
    Decoder(
        "servicebus.answers",
        [
            {"session-state": STATE},
            {"session-state": [1, {"a": math.inf}]},
            {"messages": [{"message": DATA[0]}], "expiration": 1_000},
        ],
        read_answer,
    ),
]
