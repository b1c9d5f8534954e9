"""What other programs may have written into a namespace: messages, session states, user metadata, answers."""

from __future__ import annotations

import json
import math
import random
import re
import time
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from proton import (
    UNDESCRIBED,
    Array,
    Data,
    Described,
    char,
    decimal32,
    decimal64,
    symbol,
    timestamp,
    ubyte,
    uint,
    ulong,
)
from proton import Message as ProtonMessage

from tenure._backends.servicebus import amqp, links, looking, places, removal
from tenure._backends.servicebus.administration import Administration, Entity
from tenure._backends.servicebus.client import Namespace
from tenure._backends.servicebus.codec import END_OF_TIME, Encoded, Incoming, bytes_of, incoming, state_in
from tenure._backends.servicebus.message_format import (
    DEATH,
    DELIVERIES,
    DESCRIPTION,
    HEADERS_MAX,
    HISTORY,
    ID,
    QUEUE,
    REASON,
    SENT_AT,
    MessageNotes,
    Received,
    copied,
    outgoing,
    received,
)
from tenure._backends.servicebus.names import SCHEDULES, Path
from tenure._backends.servicebus.places import Noted, declared_of, idle_among, names_of, settings_of
from tenure._backends.servicebus.queue import ServiceBusBroker
from tenure._backends.servicebus.schedules import _PATH, _session_of, _texts
from tenure._backends.servicebus.sending import ROOM
from tenure._checks import LONGEST
from tenure._foreign import Unreadable
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, QueueSettings, Selection
from tenure._queue.checks import COUNT_MAX
from tenure._queue.failures import Failure
from tenure._queue.message import HISTORY_MAX, MAX_DELIVERIES, Attempt, exhausted_description
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Settled, Settlement
from tenure._runtime.clock import SystemClock
from tenure._runtime.remote_clock import RemoteClock
from tenure.errors import ConfigError, Unavailable
from tests.servers import ServiceBus
from tests.stores.servicebus.opened import inside, link_of, look_shortly, opened, sent
from tests.stores.servicebus.opened import received as claimed
from tests.stores.servicebus.raw import section, value

NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    look_shortly(monkeypatch)


# --- messages as bytes ---


ANNOTATIONS = {
    symbol("x-opt-sequence-number"): 7,
    symbol("x-opt-enqueued-time"): timestamp(int(NOW * 1_000)),
    symbol("x-opt-locked-until"): timestamp(int((NOW + 30) * 1_000)),
}


def message_of(
    application: dict[Any, Any] | None = None,
    *,
    properties: Any = None,
    header: Any = None,
    annotations: Any = ANNOTATIONS,
    body: bytes = b"\0\x53\x75\xa0\x04body",
) -> bytes:
    parts = [
        section(amqp.HEADER, [None, None, None, None, uint(2)] if header is None else header),
        section(amqp.ANNOTATIONS, annotations),
        section(amqp.PROPERTIES, ["an id"] if properties is None else properties),
    ]
    if application is not None:
        parts.append(section(amqp.APPLICATION, application))
    return b"".join(parts) + body


def read(raw: bytes) -> Received:
    return received("q", incoming(memoryview(raw)))


def noted(**application: Any) -> MessageNotes:
    return read(message_of({name.replace("_", "-"): one for name, one in application.items()})).notes


def copy_of(raw: bytes, notes: MessageNotes | None = None, **options: Any) -> ProtonMessage:
    """Return the copy of a message as another AMQP library reads it."""
    found, message = read(raw), incoming(memoryview(raw))
    options.setdefault("new_id", None)
    copy = copied(found, message, found.notes if notes is None else notes, **options)
    decoded = ProtonMessage()
    decoded.decode(copy.data)
    return decoded


DECIMAL = decimal32(0b0_01100100_00000000000000000001111)  # 15, with the exponent -1

SIMPLE = [
    (None, None),
    (True, True),
    (False, False),
    (ubyte(200), 200),
    (uint(0), 0),
    (uint(4_000_000_000), 4_000_000_000),
    (ulong(2**64 - 1), 2**64 - 1),
    (-5, -5),
    (-(2**62), -(2**62)),
    (1.5, 1.5),
    (math.inf, math.inf),
    (char("é"), "é"),
    (timestamp(-1), -1),
    (DECIMAL, Decimal("1.5")),
    (UUID(int=5), UUID(int=5)),
    (b"\xff" * 300, b"\xff" * 300),
    ("é" * 200, "é" * 200),
    (symbol("symbol"), "symbol"),
]


@pytest.mark.parametrize(("given", "expected"), SIMPLE)
def test_every_simple_type_is_read(given: Any, expected: Any) -> None:
    assert amqp.value_of(value(given)) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([1, "a", [None]], [1, "a", [None]]),
        ({symbol("a"): [1], 2: {"b": char("x")}}, {"a": [1], 2: {"b": "x"}}),
        (Array(UNDESCRIBED, Data.INT, 1, 2, 3), [1, 2, 3]),
        (Array(UNDESCRIBED, Data.STRING, "a" * 300, "b"), ["a" * 300, "b"]),
        (Array("descriptor", Data.LONG, 5, 2**40), [5, 2**40]),
        (Described("descriptor", Described(ulong(5), ["a"])), ["a"]),
    ],
)
def test_every_compound_type_is_read(given: Any, expected: Any) -> None:
    assert amqp.value_of(value(given)) == expected


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        ("74 32 00 00 0f", "1.5"),  # 32 bits
        ("74 6b f8 96 7f", "9.999999"),  # with a first digit of 8 or 9
        ("84 31 a0 00 00 00 00 00 0f", "1.5"),  # 64 bits
        ("94 b0 3e 00 00 00 00 00 00 00 00 00 00 00 00 00 0f", "-1.5"),  # 128 bits
        ("74 78 00 00 00", "Infinity"),
        ("74 f8 00 00 00", "-Infinity"),
        ("74 7c 00 00 00", "NaN"),
    ],
)
def test_decimal_numbers_are_read(encoded: str, expected: str) -> None:
    assert str(amqp.value_of(bytes.fromhex(encoded))) == expected


NESTED = b"\x40"
for _ in range(40):
    NESTED = b"\xc0" + bytes((len(NESTED) + 1, 1)) + NESTED
ARRAY_OF_NULLS = b"\xf0" + (5).to_bytes(4, "big") + (65_536).to_bytes(4, "big") + b"\x40"


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x3f",
        b"\x4f",
        b"\xa1\x05abc",
        b"\x80\0\0",
        b"\xc0\x02\x05\x40",
        b"\xd0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xd0\0\0\0\x05\xff\xff\xff\xff\x40",
        b"\xc1\x02\x01\x40",  # a key without a value
        b"\xc1\x03\x02\x45\x40",  # a key that is a list
        b"\x40\x40",
        b"\xe0\x01\x05",
        b"\0" * 2_000,
        NESTED,
        ARRAY_OF_NULLS,
    ],
)
def test_what_is_no_value_is_unreadable(encoded: bytes) -> None:
    with pytest.raises(Unreadable):
        amqp.value_of(encoded)


def test_keys_that_were_chosen_to_have_one_hash_are_no_keys() -> None:
    prime = 2**61 - 1
    entries = b"".join(b"\x98" + (number * prime).to_bytes(16, "big") + b"\x40" for number in range(1, 300))
    encoded = b"\xd1" + (len(entries) + 4).to_bytes(4, "big") + (598).to_bytes(4, "big") + entries
    with pytest.raises(Unreadable, match="a key that is none"):
        amqp.value_of(encoded)
    assert amqp.map_of(encoded) == {}
    assert amqp.value_of(b"\xe0\x02\x00\xa1") == [], "an empty array that says what its elements would be"


def test_an_array_takes_no_more_memory_than_its_bytes_allow() -> None:
    """The client library makes 65,536 elements of each ten bytes: gigabytes of a message."""
    content = ARRAY_OF_NULLS * 20_000
    body = b"\0\x53\x77\xd0" + (len(content) + 4).to_bytes(4, "big") + (20_000).to_bytes(4, "big") + content
    began = time.process_time()
    assert read(message_of(body=body)).body == body[3:]  # as it came
    assert time.process_time() - began < 2


def test_many_small_sections_are_read_in_the_time_of_one() -> None:
    count = 100_000
    began = time.process_time()
    assert read(b"\0\x53\x76\x45" * count).body == b"[" + b", ".join([b"[]"] * count) + b"]"
    assert read(b"\0\x53\x75\xa0\x01a" * count).body == b"a" * count
    assert time.process_time() - began < 2


def test_any_bytes_are_a_message() -> None:
    """And what is read of them can be sent again."""
    rng = random.Random(1)
    whole = message_of(
        {"a": "b", "n": 2**40, "u": UUID(int=1), HISTORY: '[[1,2,"abandoned",null]]', DEATH: "[1,2]"},
        properties=["id", b"user", "to", "s", "r", "c", symbol("t"), None, timestamp(5), timestamp(1), "session"],
        body=section(amqp.VALUE, {"a": [1, 2.5, None]}) + section(amqp.FOOTER, {symbol("f"): 1}),
    )
    for _ in range(1_500):
        raw = bytearray(whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.2 else whole)
        for _ in range(rng.randrange(4)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.choice(
                    (0, 0x40, 0x45, 0x80, 0xC0, 0xD1, 0xE0, 0xFF, rng.randrange(256))
                )
        found, message = read(bytes(raw)), incoming(memoryview(bytes(raw)))
        delivery = found.delivery("q", "token", is_dead=True)
        assert isinstance(delivery.body, bytes)
        assert delivery.death is not None
        assert len(delivery.death.history) <= HISTORY_MAX
        copy = copied(
            found, message, found.notes.with_attempt(Attempt(found.count + 1, NOW, "abandoned")), new_id="new"
        )
        again = read(copy.data)
        assert (again.id, again.headers, again.body) == (found.id, found.headers, found.body)


def test_a_message_of_parts_in_unusual_forms() -> None:
    """With descriptors of eight bytes, and with symbolic ones."""
    raw = b"\0\x80" + amqp.PROPERTIES.to_bytes(8, "big") + value(["an id"])
    raw += b"\0\xa3\x10amqp:data:binary" + value(b"body")
    found = read(raw)
    assert (found.id, found.body, found.sequence) == ("an id", b"body", 0)


# --- bookkeeping ---


@pytest.mark.parametrize(
    "text", ['[[Infinity,0,"x",null]]', "[" * 100_000, "{}", "7", "[7]", '[[1,2,"abandoned"', "NaN"]
)
def test_an_unreadable_history_is_none_and_leaves_the_rest(text: str) -> None:
    found = noted(tenure_history=text, tenure_id="id", tenure_deliveries=3, tenure_death="[5.0, 6]")
    assert found == MessageNotes(id="id", deliveries=3, dead_at=5.0, died_after=6)


@pytest.mark.parametrize("text", ["[Infinity, 1]", "[1e300, 1]", "[", "[1]", "{}", "null", '["x", "y"]', "[-1, -1]"])
def test_an_unreadable_death_is_none_and_leaves_the_rest(text: str) -> None:
    found = noted(tenure_history='[[1,2.0,"abandoned",null]]', tenure_id="id", tenure_death=text)
    assert (found.id, len(found.history)) == ("id", 1)
    assert not found.dead_at


def test_the_readable_attempts_of_a_history_are_read() -> None:
    rows = [[1, 2.0, "abandoned", ["E", "m", "t"]], [math.inf, 0, "x", None], [2, 3.0, "expired", None], 5]
    assert noted(tenure_history=json.dumps(rows)).history == (
        Attempt(1, 2.0, "abandoned", Failure("E", "m", "t")),
        Attempt(2, 3.0, "expired"),
    )


@pytest.mark.parametrize("odd", [-1, True, "5", 1.5, UUID(int=5), [1], {"a": 1}])
def test_an_odd_count_is_none(odd: Any) -> None:
    assert read(message_of({DELIVERIES: odd})).count == 2
    assert read(message_of(header=[None, None, odd, None, odd])).count == 0


def test_counts_are_clipped_and_can_be_written_again() -> None:
    raw = message_of({DELIVERIES: 2**62, DEATH: f"[5, {2**62}]"}, header=[None, None, None, None, uint(2**32 - 1)])
    found = read(raw)
    assert found.count + 1 == COUNT_MAX
    assert found.deaths_count == COUNT_MAX
    assert found.delivery("q", "t").delivery_count == COUNT_MAX
    copy = copy_of(raw, MessageNotes(deliveries=found.count + 1))
    assert dict(copy.properties or {}) == {DELIVERIES: COUNT_MAX, QUEUE: "q"}


def test_notes_count_in_the_queue_alone_that_they_name() -> None:
    history = json.dumps([[1, 5.0, "abandoned", None]])
    notes = {DELIVERIES: 5, DEATH: "[5, 5]", HISTORY: history, SENT_AT: "3.0", ID: "their"}
    for name in (None, "q", "Q", b"q", "other", 7):
        found = read(message_of(notes | ({} if name is None else {QUEUE: name})))
        if name in (None, "q", "Q", b"q"):
            assert (found.count, found.notes.dead_at, found.id, found.stale) == (5 + 2, 5.0, "their", ())
            continue
        assert (found.count, found.notes) == (2, MessageNotes()), "the service's own count"
        changes = found.noted(MessageNotes(deliveries=1))  # what is there stays with the message unless it is changed
        assert changes == dict.fromkeys(notes, "") | {DELIVERIES: 1, QUEUE: "q"}
        again = read(message_of(notes | changes))
        assert (again.count, again.notes) == (1 + 2, MessageNotes(deliveries=1))


def test_a_death_of_many_deliveries_makes_up_no_more_attempts_than_are_kept() -> None:
    header = [None, None, None, None, uint(2**32 - 1)]
    found = read(message_of({REASON: "MaxDeliveryCountExceeded", DESCRIPTION: "x" * 100_000}, header=header))
    assert found.death.reason == MAX_DELIVERIES
    assert len(found.death.history) == HISTORY_MAX
    assert found.death.description == exhausted_description(found.deaths_count)


def test_a_description_of_another_program_is_cut() -> None:
    assert len(read(message_of({REASON: "theirs", DESCRIPTION: "x" * 100_000})).death.description) < 100_000


@pytest.mark.parametrize("odd", ["[", "Infinity", '"x"', "-1", "1e300", 5])
def test_an_odd_time_of_sending_is_none(odd: Any) -> None:
    found = read(message_of({SENT_AT: odd}))
    assert found.sent_at == found.enqueued_at


def test_a_copy_tells_when_it_was_first_sent() -> None:
    notes = MessageNotes(deliveries=1, history=(Attempt(1, NOW, "abandoned"),), sent_at=5.25)
    raw = message_of({"a": "b"})
    found = read(copied(read(raw), incoming(memoryview(raw)), notes, new_id=None).data)
    assert (found.sent_at, found.delivery("q", "t").enqueued_at, found.headers) == (5.25, 5.25, {"a": "b"})


def test_attempts_before_a_redrive_stay_those_of_before_if_some_are_left_out() -> None:
    history = tuple(Attempt(number, NOW, "abandoned", Failure("E", "m" * 9_000, "")) for number in (1, 2, 3, 4, 1, 2))
    written = MessageNotes(history=history, before=4).properties(HEADERS_MAX - 800)
    found = read(message_of(written)).notes
    assert ([one.number for one in found.history], found.before) == ([4, 1, 2], 1)


def test_what_a_copy_leaves_out_and_what_was_no_attempt_is_not_made_up() -> None:
    notes = MessageNotes(deliveries=3, no_attempts=(5,)).with_expired_attempts(6, NOW)
    assert [one.number for one in notes.history] == [4, 6]
    written = MessageNotes(no_attempts=(5, 7)).properties(0)
    assert read(message_of(written)).notes.no_attempts == (5, 7)
    assert noted(tenure_no_attempts='[1, "x", -1, 4]').no_attempts == (1, 4)
    assert noted(tenure_no_attempts="7").no_attempts == ()


def test_what_is_noted_of_a_death_has_the_form_that_every_release_reads() -> None:
    history = (Attempt(1, 2.0, "abandoned", Failure("E", "m", "t")), Attempt(2, 3.5, "rejected"))
    notes = MessageNotes(id="order", deliveries=1, history=history, dead_at=3.5, died_after=2)
    assert notes.properties(0) == {
        "tenure-id": "order",
        "tenure-deliveries": 1,
        "tenure-history": '[[1, 2.0, "abandoned", ["E", "m", "t"]], [2, 3.5, "rejected", null]]',
        "tenure-death": "[3.5, 2]",
    }
    later = MessageNotes(history=history, before=1, sent_at=1.5, no_attempts=(3,)).properties(0)
    del later["tenure-history"]
    assert later == {"tenure-before": 1, "tenure-enqueued-at": "1.500", "tenure-no-attempts": "[3]"}


@pytest.mark.parametrize("odd", [None, "x", -5, 2**63 - 1, UUID(int=1), [1], 1.5, True])
def test_odd_annotations(odd: Any) -> None:
    names = (
        "sequence-number",
        "enqueued-time",
        "locked-until",
        "scheduled-enqueue-time",
        "message-state",
        "partition-key",
    )
    found = read(message_of(annotations={symbol(f"x-opt-{name}"): odd for name in names}, header=[odd] * 5))
    assert 0 <= found.sequence < 2**63
    for moment in (found.enqueued_at, found.locked_until, found.due_at or 0.0, found.ttl or 0.0, found.death.at):
        assert 0.0 <= moment <= LONGEST
    assert found.delivery("q", "t").delivery_count >= 1
    copy_of(message_of(annotations={symbol("x-opt-partition-key"): odd}, header=[odd] * 5))


def test_an_annotation_that_is_unreadable_leaves_the_others() -> None:
    entries = [(value(symbol("x-opt-sequence-number")), value(9)), (value(symbol("odd")), ARRAY_OF_NULLS)]
    raw = amqp.section(amqp.ANNOTATIONS, amqp.joined_map([part for entry in entries for part in entry]))
    assert read(raw).sequence == 9


@pytest.mark.parametrize(
    ("expires", "created", "ttl"),
    [
        (timestamp(5_000), timestamp(1_000), 4.0),
        (timestamp(1_000), timestamp(5_000), None),
        (timestamp(2**63 - 1), timestamp(-(2**63)), LONGEST),
        ("x", timestamp(1), None),
        (timestamp(1), None, None),
        ([1], [2], None),
    ],
)
def test_how_long_a_message_lives(expires: Any, created: Any, ttl: float | None) -> None:
    assert read(message_of(properties=[None] * 8 + [expires, created])).ttl == ttl


@pytest.mark.parametrize(
    ("named", "id_"),
    [
        (ulong(2**64 - 1), str(2**64 - 1)),
        (UUID(int=5), str(UUID(int=5))),
        (b"\xff", "\ufffd"),
        ("", "q#7"),
        ("a\0b", "q#7"),
        ([1], "q#7"),
        (None, "q#7"),
    ],
)
def test_message_ids(named: Any, id_: str) -> None:
    found = read(message_of(properties=[named])).id
    assert found == id_ or (id_ == "q#7" and found.startswith("q") and found.endswith("7"))


# --- headers and bodies ---


def test_headers_of_any_type() -> None:
    found = read(
        message_of(
            {
                "text": "é",
                "bytes": b"\xff",
                "uuid": UUID(int=1),
                "decimal": DECIMAL,
                "char": char("x"),
                "ulong": ulong(2**64 - 1),
                "nan": math.nan,
                "moment": timestamp(5),
                "list": [1, None, math.inf],
                "map": {"a": b"b", 2: True},
                "described": Described("x", 5),
                "array": Array(UNDESCRIBED, Data.INT, 1, 2),
                "null": None,
                "nul": "a\0b",
                "CC": "no sender could set it",
                "": "empty",
                5: "no text",
            },
            properties=[None] * 6 + [symbol("text/plain")],
        )
    )
    assert dict(found.headers) == {
        "text": "é",
        "bytes": "\ufffd",
        "uuid": str(UUID(int=1)),
        "decimal": "1.5",
        "char": "x",
        "ulong": str(2**64 - 1),
        "nan": "nan",
        "moment": 5,
        "list": '[1, null, "inf"]',
        "map": '{"a": "b", "2": true}',
        "described": 5,
        "array": "[1, 2]",
        "content-type": "text/plain",
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", b""),
        (section(amqp.DATA, b"a") + section(amqp.DATA, b"b"), b"ab"),
        (section(amqp.DATA, 10**12), b"1000000000000"),
        (section(amqp.DATA, [1, 2]), b"[1, 2]"),
        (section(amqp.DATA, "text"), b"text"),
        (section(amqp.VALUE, "text"), b"text"),
        (section(amqp.VALUE, b"\xff"), b"\xff"),
        (section(amqp.VALUE, char("x")), b"x"),
        (section(amqp.VALUE, None), b""),
        (section(amqp.VALUE, 10**12), b"1000000000000"),
        (
            section(amqp.VALUE, {"a": [UUID(int=0), math.nan]}),
            b'{"a": ["00000000-0000-0000-0000-000000000000", "nan"]}',
        ),
        (section(amqp.SEQUENCE, [1]) + section(amqp.SEQUENCE, ["a"]), b'[[1], ["a"]]'),
        (b"\0\x53\x77" + NESTED, NESTED),
        (b"\0\x53\x75\xa0\x50cut off", b"\0\x53\x75\xa0\x50cut off"),
    ],
)
def test_bodies(body: bytes, expected: bytes) -> None:
    assert read(message_of(body=body)).body == expected


@pytest.mark.parametrize(("given", "expected"), [(10**12, b"1000000000000"), ([1], b"[1]"), ("a", b"a"), (b"a", b"a")])
def test_what_is_no_bytes_is_not_taken_for_a_length(given: Any, expected: bytes) -> None:
    assert bytes_of(given) == expected
    assert state_in({"session-state": given}) == expected


# --- copies ---


def test_a_copy_has_all_that_its_sender_has_set() -> None:
    application = {f"v{number}": one for number, (one, _) in enumerate(SIMPLE)} | {
        "d64": decimal64(5),
        "list": [1, [symbol("a")]],
        "array": Array(UNDESCRIBED, Data.LONG, 5, 2**40),
        "described": Described("x", [1]),
    }
    properties = [
        ulong(2**64 - 1),
        b"\xff\0user",
        "to",
        "subject",
        "reply",
        UUID(int=3),
        symbol("type"),
        symbol("encoding"),
        timestamp(5),
        timestamp(1),
        "session",
        uint(2**32 - 1),
        "reply session",
    ]
    raw = message_of(
        {**application, HISTORY: "[]", ID: "old", "tenure-other": 5},
        properties=properties,
        header=[True, ubyte(9), uint(5), None, uint(3)],
        annotations={**ANNOTATIONS, symbol("x-opt-partition-key"): "partition"},
        body=section(amqp.VALUE, {"a": char("x"), symbol("b"): uint(5)}) + section(amqp.FOOTER, {symbol("f"): DECIMAL}),
    )
    copy = incoming(memoryview(_copy(raw, new_id="new", ttl=7.0).data))
    before = incoming(memoryview(raw))
    for code in (amqp.VALUE, amqp.FOOTER):
        assert copy.parts[code] == before.parts[code]
    entries = dict(amqp.pairs_of(copy.parts[amqp.APPLICATION]))
    for name, one in (*application.items(), ("tenure-other", 5)):
        assert entries[value(name)] == value(one), name
    assert len(entries) == len(application) + 2
    fields = amqp.parts_of(copy.parts[amqp.PROPERTIES])
    assert fields[1:8] + fields[10:] == [value(one) for one in properties[1:8] + properties[10:]]
    assert (copy.properties[0], copy.properties[8:10]) == ("new", [None, None])
    assert copy.annotations["x-opt-partition-key"] == "partition"
    assert copy.header[:3] == [True, 9, 7_000]
    assert copy.application[ID] == "old"


def _copy(raw: bytes, **options: Any) -> Encoded:
    found = read(raw)
    return copied(found, incoming(memoryview(raw)), found.notes, **options)


def test_a_section_of_another_form_gives_a_copy_nothing() -> None:
    """A map in place of the list of properties, and a list in place of the map of application properties."""
    raw = message_of(properties={"id": "a", "b": "c", "d": "e", "f": "g"}, annotations=None) + section(
        amqp.APPLICATION, ["tenant", "blue"]
    )
    before, copy = read(raw), read(_copy(raw, new_id=None).data)
    assert before.headers == copy.headers == {}
    assert before.id == copy.id == "q--0"
    assert (before.session, before.reply_to, copy.session, copy.reply_to) == (None, None, None, None)


def test_a_copy_of_a_message_without_sections() -> None:
    copy = copy_of(b"", new_id="new")
    assert copy.id == "new"
    assert not copy.properties or set(copy.properties) == {ID}


@pytest.mark.parametrize("seconds", [1e9, LONGEST])
def test_the_longest_times_can_be_written(seconds: float) -> None:
    given = Outgoing(b"x", id="a", expires_in=seconds, at=seconds)
    for raw in (
        outgoing(given, NOW).data,
        outgoing(Outgoing(b"x", id="a", expires_in=seconds, delay=seconds), NOW).data,
        _copy(message_of(), new_id=None, ttl=seconds, due_at=NOW + seconds).data,
    ):
        found = incoming(memoryview(raw))
        due = found.annotations["x-opt-scheduled-enqueue-time"]
        assert seconds * 1_000 <= due <= END_OF_TIME
        assert found.properties[8] - found.properties[9] > 0.9 * seconds * 1_000
        assert found.properties[8] <= END_OF_TIME
        assert (read(raw).ttl or 0.0) > 0.9 * seconds


# --- user metadata and other answers of the namespace ---


@pytest.mark.parametrize(
    "metadata",
    ["", "x", "7", "[]", '{"tenure": 5}', '{"tenure": []}', "[" * 100_000, '{"tenure": {"dead_retention": NaN}}'],
)
def test_metadata_without_notes(metadata: str) -> None:
    assert Noted.read(metadata) is None


def test_notes_that_are_odd_are_left_out_one_by_one() -> None:
    odd = {"name": 5, "declared": 7, "body_max": "x", "dead_retention": -1, "idle_at": "x", "open": 1, "maker": []}
    assert Noted.read(json.dumps({"tenure": odd})) == Noted()
    mixed = {"name": "a b", "declared": ["lock", 5, "__class__"], "body_max": 7, "dead_retention": 1e300, "idle_at": 5}
    assert Noted.read(json.dumps({"tenure": mixed})) == Noted("a b", ("lock", "__class__"), 7, None, 5.0)


def test_declared_settings_of_foreign_names_are_ignored() -> None:
    metadata = json.dumps({"tenure": {"declared": ["lock", "__class__", "is_limited", "unknown"], "body_max": "x"}})
    entity = Entity(30.0, 10, False, None, True, metadata)
    assert declared_of(entity) == {"lock": 30.0}
    assert settings_of(entity).body_max == QueueSettings().body_max


def test_a_name_that_is_noted_is_that_of_its_entity_or_ignored() -> None:
    noted_names = ["other", "bad$dead", "x\0", "y" * 10_000, 5]
    rows = [(f"e{at}", json.dumps({"tenure": {"name": one, "idle_at": 5}})) for at, one in enumerate(noted_names)]
    assert names_of([*rows, ("plain", "[" * 100_000)]) == ["e0", "e1", "e2", "e3", "e4", "plain"]
    assert idle_among(rows, 10.0) == ["e0", "e1", "e2", "e3", "e4"]


@pytest.mark.parametrize(
    "date",
    ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2020 00:00:00 +99999999999999", "x", "", None],
)
def test_an_odd_date_in_an_answer_is_ignored(date: str | None) -> None:
    clock = SystemClock()
    namespace: Any = SimpleNamespace(clock=clock, at_close=lambda _: None)
    Administration(namespace, RemoteClock(clock))._learn({"Date": date})


@pytest.mark.parametrize(
    "error", [TypeError("x"), AttributeError("x"), SyntaxError("no XML"), RecursionError(), KeyError("x")]
)
async def test_an_unreadable_answer_is_unavailable(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail(*_: Any) -> Any:
        raise error

    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        await broker.settings(queue)
        monkeypatch.setattr(places, "SETTINGS_KEPT", 0.0)
        asked = dict.fromkeys(
            ("get_queue", "get_topic", "get_queue_runtime_properties", "get_namespace_properties"), fail
        )
        monkeypatch.setattr(broker.administration, "_here", lambda: SimpleNamespace(**asked))
        with pytest.raises(Unavailable, match="can't be read"):
            await broker.settings(queue)
        with pytest.raises(Unavailable, match="can't be read"):
            await broker.stats(queue)
        with pytest.raises(Unavailable, match="can't be read"):
            await inside(broker, _run(broker._namespace, broker.administration.tier()))
        [one] = await claimed(broker, queue, 1)  # with the settings that were read before
        assert one.id == "a"


async def _run(namespace: Namespace, act: Any) -> Any:
    return await namespace._bounded(lambda: act, 30.0)


async def test_odd_counts_are_none(server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def counts(_: str) -> Any:
        return SimpleNamespace(active_message_count=None, scheduled_message_count="x", dead_letter_message_count=-3)

    async with opened(server.url) as broker:
        await sent(broker, queue, "a")
        monkeypatch.setattr(
            broker.administration, "_here", lambda: SimpleNamespace(get_queue_runtime_properties=counts)
        )
        found = await inside(broker, broker.administration.counts(Path(queue)))
        assert (found.active, found.scheduled, found.dead) == (0, 0, 0)  # type: ignore[union-attr]


# --- on the look-alike ---


async def send_raw(broker: ServiceBusBroker, queue: str, *messages: bytes) -> None:
    """Send messages as another AMQP library has encoded them, between two of ours."""
    await sent(broker, queue, "before")
    for one in messages:
        await inside(broker, broker._sending.send(queue, [Encoded(one)]))
    await sent(broker, queue, "after")


def foreign(id_: str, application: dict[Any, Any] | None = None, body: bytes | None = None) -> bytes:
    raw = section(amqp.PROPERTIES, [id_, b"\xffuser"])
    if application is not None:
        raw += section(amqp.APPLICATION, application)
    return raw + (section(amqp.DATA, b"body") if body is None else body)


POISON = [
    foreign("infinite", {HISTORY: '[[Infinity,0,"x",null]]', DELIVERIES: -1, DEATH: "["}),
    foreign("nested", {HISTORY: "[" * 20_000}),
    foreign("char", {"c": char("x"), "d": DECIMAL}, section(amqp.VALUE, char("x"))),
    foreign("decimal", None, section(amqp.VALUE, [decimal64(5), {"a": DECIMAL}])),
    foreign("key", None, section(amqp.SEQUENCE, [{1.5: char("y")}])),
]
IDS = ["infinite", "nested", "char", "decimal", "key"]


async def test_foreign_messages_disturb_no_others(server: ServiceBus, queue: str) -> None:
    async with opened(server.url) as broker:
        await broker.declare(queue, {"lock": 60.0})
        await send_raw(broker, queue, *POISON)
        ids = ["before", *IDS, "after"]
        assert [one.id for one in await broker.peek(queue, EVERY_LIVE, 20)] == ids
        assert (await broker.stats(queue)).ready == len(ids)
        found = await claimed(broker, queue, len(ids))
        link = link_of(broker, queue)
        by_id = {one.id: one for one in found}
        assert by_id.keys() == set(ids)
        assert by_id["char"].body == b"x"
        verdicts = [Settlement(by_id[id_], DeadLetter("bad", "")) for id_ in IDS[:3]]
        verdicts += [Settlement(by_id[id_], Abandon(delay=600)) for id_ in IDS[3:]]
        verdicts += [Settlement(by_id[id_], COMPLETE) for id_ in ("before", "after")]
        answers = await broker.settle(verdicts)
        assert all(isinstance(one, Settled) for one in answers)
        assert link_of(broker, queue) is link
        assert link.lost is None
        assert [one.id for one in await broker.peek_dead(queue, EVERYTHING, 10)] == IDS[:3]
        assert await broker.redrive(queue, EVERYTHING, None) == 3
        assert {one.id for one in await broker.peek(queue, EVERY_LIVE, 20)} == set(IDS)
        again = {one.id: one for one in await claimed(broker, queue, 3)}
        assert again["char"].headers == by_id["char"].headers == {"c": "x", "d": "1.5"}
        copy = broker._receipts.find(again["char"])
        assert copy is not None
        _is_as_sent(copy.message)
        await broker.settle([Settlement(one, COMPLETE) for one in again.values()])
        assert await broker.purge_live(queue, EVERY_LIVE) == 2


async def test_pages_of_odd_dead_letters_hide_none_behind_them(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "PAGE", 3)
    monkeypatch.setattr(removal, "ROUND", 3)
    async with opened(server.url) as broker:
        await broker.declare(queue, {"lock": 60.0})
        await send_raw(broker, queue, *POISON)
        odd = await claimed(broker, queue, len(POISON) + 2)
        assert await broker.settle([Settlement(one, DeadLetter("bad", "")) for one in odd]) == [Settled()] * len(odd)
        await sent(broker, queue, "good")
        only = Selection(ids=frozenset({"good"}))
        for _ in range(2):
            [good] = await claimed(broker, queue, 1)
            assert await broker.settle([Settlement(good, DeadLetter("bad", ""))]) == [Settled()]
            assert [one.id for one in await broker.peek_dead(queue, EVERYTHING, 20)][-1] == "good"
            assert await broker.redrive(queue, only, None) == 1
        [good] = await claimed(broker, queue, 1)
        assert await broker.settle([Settlement(good, DeadLetter("bad", ""))]) == [Settled()]
        assert await broker.purge(queue, only, None) == 1
        assert await broker.purge(queue, EVERYTHING, None) == len(odd)


def _is_as_sent(message: Incoming) -> None:
    assert message.properties[1] == b"\xffuser"
    assert message.parts[amqp.VALUE] == value(char("x"))
    assert dict(amqp.pairs_of(message.parts[amqp.APPLICATION]))[value("d")] == value(DECIMAL)


async def test_a_dead_letter_that_is_too_large_with_its_history_is_redriven_without(
    server: ServiceBus, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 262_144 - ROOM - 100 - (len(outgoing(Outgoing(b"x" * 1_000, id="large"), 0).data) - 1_000)
    async with opened(server.url) as broker:
        await broker.send(queue, [Outgoing(b"x" * size, id="large"), Outgoing(b"y", id="small")])
        monkeypatch.setattr(links.SendLink, "size_max", 262_144)  # the Standard tier, after a larger one
        error = Failure("RuntimeError", "boom", "in the handler\n" * 1_000)
        verdicts = [Settlement(one, DeadLetter("bad", "", error)) for one in await claimed(broker, queue, 2)]
        await broker.settle(verdicts)
        assert await broker.redrive(queue, EVERYTHING, None) == 2
        assert {one.id for one in await broker.peek(queue, EVERY_LIVE, 10)} == {"large", "small"}


@pytest.mark.parametrize("state", [b"[1]", b"\xff", b"7", b"[" * 100_000, b'{"a": NaN}'])
async def test_an_unreadable_state_of_schedules_is_told_and_concerns_its_queue_alone(
    server: ServiceBus, queue: str, state: bytes
) -> None:
    other = f"{queue}-other"
    async with opened(server.url) as broker:
        for each in (queue, other):
            assert (await broker.advance(each, "s", None, "record")).is_done
        await write_state(broker, queue, state)
        why = re.escape(f"the schedules of {queue!r} can't be read")
        for act in (partial(broker.schedules, queue), partial(broker.advance, queue, "s", None, "record")):
            with pytest.raises(ConfigError, match=f"{why}: .* {SCHEDULES!r}"):
                await act()
        assert (await broker.schedules(other)).records == {"s": "record"}
        await broker.delete(queue)
        assert (await broker.schedules(queue)).records == {}
        assert (await broker.advance(queue, "s", None, "record")).is_done


async def write_state(broker: ServiceBusBroker, queue: str, state: bytes) -> None:
    async def write() -> None:
        async with broker._kept._locked(queue) as link:
            body = {"session-id": _session_of(queue), "session-state": bytearray(state)}
            await broker._namespace.ask(_PATH, "set-session-state", body, link)

    await inside(broker, write())


def test_a_schedule_that_is_no_text_is_one_by_itself() -> None:
    assert _texts(b'{"a": "text", "b": 5, "c": "\\u0000", "d\\u0000": "x", "": "y"}') == {
        "a": "text",
        "b": "5",
        "c": '"\\u0000"',
    }


async def test_odd_user_metadata_concerns_its_queue_alone(server: ServiceBus, queue: str) -> None:
    notes = {"tenure": {"name": 5, "declared": ["__class__"], "body_max": "x", "dead_retention": -1, "idle_at": "x"}}
    async with opened(server.url) as broker:
        await broker.declare(f"{queue}-other", {"lock": 30.0})
        for at, metadata in enumerate((json.dumps(notes), "[" * 900, '{"tenure": 5}')):
            client = broker.administration._here()
            await inside(broker, client.create_queue(f"{queue}-{at}", user_metadata=metadata))
            assert await broker.settings(f"{queue}-{at}") == QueueSettings(lock=60.0, dedupe_window=0.0)
            await sent(broker, f"{queue}-{at}", "a")
        assert {f"{queue}-{at}" for at in range(3)} | {f"{queue}-other"} <= set(await broker.names())
        await broker.declare(f"{queue}-0", {"lock": 40.0})
        assert (await broker.settings(f"{queue}-0")).lock == 40.0
        await broker.idle()
