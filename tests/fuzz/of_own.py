"""What tenure keeps in every store, and tells itself: notes, settings, schedules, members, reports, statuses."""

from __future__ import annotations

import asyncio
import json
import math
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple
from types import SimpleNamespace
from typing import Any, cast

from tenure import CandidateStatus, Stats
from tenure._cli import me
from tenure._cli.fleet_source import FleetSource, _read_stats
from tenure._cli.supervise import LINE_MAX, Child, RunOptions, Supervision
from tenure._dashboard import shown
from tenure._foreign import Unreadable
from tenure._lease import HeldBy
from tenure._partitions.plan import LAYOUT, ORDER, WEIGHT, member_of, shares
from tenure._queue.broker import QueueSettings, read_settings
from tenure._queue.headers import read_headers
from tenure._queue.note_headers import plain_attempts, shortened
from tenure._queue.notes import Notes, read_attempts, read_deliveries, read_failure, read_reason
from tenure._queue.schedule_steps import Kept
from tenure._queue.typed_kinds import key_values
from tenure._schedule.machine import ScheduleMachine
from tenure._schedule.plan import Plan, Record
from tenure._schedule.schedules import status_of
from tenure._schedule.slots import first_after, id_of, newest, slots_of
from tenure._supervisor.machine import Settings, Tick
from tenure._telemetry.families import FAMILIES, Histogram, Snapshot, combined, lasting, packed, unpacked
from tenure._tls_context import own_certificate
from tenure.errors import ConfigError, Unavailable
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import (
    FAILURE,
    HEADERS,
    HISTORY,
    NOW,
    as_bytes,
    as_objects,
    as_text,
    as_texts,
    on_loop,
    through_json,
    use_history,
    use_notes,
    use_text,
)

# --- certificates ---


def _der(tag: int, *content: bytes) -> bytes:
    joined = b"".join(content)
    size = bytes([len(joined)]) if len(joined) < 0x80 else bytes([0x81, len(joined)])
    return bytes([tag]) + size + joined


_VALIDITY = _der(0x30, _der(0x17, b"260101000000Z"), _der(0x18, b"20560101000000Z"))
_FIELDS = [_der(0xA0, _der(2, b"\2")), _der(2, b"\7" * 20), _der(0x30, b"\6" * 10), _der(0x30, b"\1" * 90), _VALIDITY]
CERTIFICATE = ssl.DER_cert_to_PEM_cert(_der(0x30, _der(0x30, *_FIELDS))).encode()
"""A certificate up to its dates; what comes behind them is not read."""

# --- notes ---

NOTES = {
    "deliveries": 3,
    "history": plain_attempts(HISTORY),
    "reason": "rejected",
    "error": asdict(FAILURE),
    "rows": [[one.number, one.at, one.outcome, None] for one in HISTORY],
    "failure": list(astuple(FAILURE)),
}
READERS: dict[str, Callable[[Any], Any]] = {
    "deliveries": read_deliveries,
    "history": read_attempts,
    "reason": read_reason,
    "error": read_failure,
    "rows": read_attempts,
    "failure": read_failure,
}


def read_notes(given: Any) -> None:
    fields = given if isinstance(given, dict) else dict.fromkeys(NOTES, given)
    found: dict[str, Any] = {}
    for name, read in READERS.items():
        with suppress(Unreadable):
            found[name] = read(through_json(fields.get(name)))
    use_history(found.pop("rows", ()))
    found.pop("failure", None)
    for notes in use_notes(Notes(**found), found.get("deliveries", 1)):
        for less in shortened(notes):
            assert json.dumps(plain_attempts(less.history))
            assert read_attempts(plain_attempts(less.history)) == less.history


def read_their_headers(given: Any) -> None:
    headers = read_headers(given)
    assert read_headers(dict(headers)) == headers
    use_text(json.dumps(dict(headers), allow_nan=False, ensure_ascii=False))


def read_their_settings(given: Any) -> None:
    found = read_settings(given)
    assert repr(QueueSettings(**found))
    assert read_settings(dict(found)) == found
    assert read_settings(json.loads(json.dumps(found))) == found


SETTINGS = {
    "lock": 20.0,
    "max_deliveries": 3,
    "dedupe_window": 60.0,
    "body_max": 1_000,
    "dead_retention": 3_600.0,
    "max_locked": 5,
    "rate": [5, 1.0],
    "session_rate": (1, 0.5),
    "paused": True,
}

# --- schedules ---

PLANS = (
    Plan("*/5 * * * *", "Europe/Berlin", "all"),
    Plan(60.0),
    Plan("0 3 * * 1-5", missed="skip"),
    Plan(0.1, missed="all"),
)
RECORDS = [Record(one, NOW, NOW - 300.0).encoded() for one in PLANS]


def read_schedule(given: Any) -> None:
    text = as_text(given)
    assert repr(status_of("nightly", "orders", text))
    machine = ScheduleMachine("nightly", PLANS[1], random.Random(1))
    for now in (5.0, 400.0):
        machine.looked(text, NOW + now, now, now)
        assert repr(machine.next(now))
        machine.next_slot()
        machine.advanced(False, text, NOW + now, now, now)
    record = Record.decoded(text, "nightly")
    assert Record.decoded(record.encoded(), "nightly") == record
    slots = slots_of(record.plan)
    following = first_after(slots, record.settled_until)
    for slot in newest(slots, record.settled_until, NOW + 3_600.0, 10) + ([] if following is None else [following]):
        assert id_of("nightly", slot)


def read_kept(given: Any) -> None:
    kept = Kept.read(as_text(given, 20_000).replace("\0", ""))  # as stores keep it
    assert Kept.read(kept.written()) == kept
    assert kept.record is None or repr(status_of("nightly", "orders", kept.record))


KEPT = [Kept(RECORDS[0], "call", 5.0).written(), Kept(None, "call").written(), RECORDS[1]]

# --- members ---


def read_members(given: Any) -> None:
    members = []
    for slot, metadata in enumerate(as_objects(given)):
        held = HeldBy(f"slot-{slot}", f"ann-{slot}-x", 5, None if slot % 2 else 3.0, as_texts(metadata))
        members.append(member_of(slot, held))
    if members:
        assert sum(shares(members, 64).values()) == 64
        assert repr(sorted(members, key=lambda one: one.seniority))


MEMBER = {ORDER: "1800000000000", WEIGHT: "3", LAYOUT: "64"}

# --- reports of processes, and answers to people ---

STATUS = CandidateStatus("chair", "leading", 17, 5.0, 1.5, "it was away", False, True, True)
STATS: dict[str, Any] = {"orders": list(astuple(Stats(1, 2, 3, 4, 5, 6.5, True)))}


def read_status(given: Any) -> None:
    answer = me._read(as_bytes(given))
    assert json.dumps(me._record(5, answer), allow_nan=False)
    if not isinstance(answer, str):
        assert me._sentence(5, answer)


def read_stats(given: Any) -> None:
    for stats in _read_stats(given).values():
        assert str(stats)
        assert stats.backlog >= 0


def read_asked_stats(given: Any) -> None:
    async def ask() -> None:
        async def answer(_: str) -> Any:
            return through_json(given)

        process: Any = SimpleNamespace(is_ending=False, reported_at=0.0, ask=answer, number=1, measured={})
        assert repr(await FleetSource(lambda: [process], dict).stats())

    on_loop(ask())


def a_child() -> Any:
    child = cast(Any, Child.__new__(Child))
    child.measured, child._answers = {}, {}
    return child


def read_measured(given: Any) -> None:
    child = a_child()
    child.answered("measure", given)
    found = combined([child.measured, MEASURED, unpacked(given)])
    assert unpacked(json.loads(json.dumps(packed(found)))) is not None
    assert lasting(found) is not None
    sums = (one.total if isinstance(one, Histogram) else one for one in found.values())
    assert not any(math.isnan(one) for one in sums)


def read_report(given: Any) -> None:
    async def read() -> None:
        supervision = cast(Any, Supervision(RunOptions("shop:service", Settings(), False, False, False, False, 0)))
        machine = supervision._machine
        machine.handle(Tick(), NOW)
        supervision._feed = lambda event: machine.handle(event, NOW)
        reports = asyncio.StreamReader(limit=LINE_MAX)
        reports.feed_data(as_bytes(given).replace(b"\n", b" ") + b"\n")
        reports.feed_eof()
        await supervision._read(1, a_child(), reports)
        assert repr(machine.processes)

    on_loop(read())


REPORTS: list[dict[str, Any]] = [
    {"running": 3, "leads": True, "memory": 1_000, "live": True, "ready": False},
    {"backlogs": [[5, 10], [0, 1]]},
    {"backlogs": None},
    {"answer": [1], "to": "measure"},
    {"finished": True},
    {"leaving": True},
]


def measured() -> Snapshot:
    """Return a value for each metric."""
    found: Snapshot = {}
    for name, family in FAMILIES.items():
        key = name, tuple("orders" for _ in family.labels)
        found[key] = Histogram([1] * (len(family.bounds) + 1), 2.5) if family.kind == "histogram" else 3.0
    return found


MEASURED = measured()


def read_body(given: Any) -> None:
    kind, text = shown.body(as_bytes(given))
    assert kind
    assert isinstance(text, str)
    for one in key_values(as_text(given)):
        assert json.dumps(one)


DECODERS = [
    Decoder("certificate", [CERTIFICATE], lambda pem: str(own_certificate("client.pem", as_bytes(pem)))),
    Decoder("queue.notes", [NOTES], read_notes, share=0.7),
    Decoder("queue.headers", [HEADERS], read_their_headers, (Unreadable,)),
    Decoder("queue.settings", [SETTINGS], read_their_settings, (Unreadable,)),
    Decoder("schedule.record", RECORDS, read_schedule, (ConfigError,)),
    Decoder("schedule.kept", KEPT, read_kept),
    Decoder("partitions.members", [[MEMBER, {**MEMBER, WEIGHT: "1"}, {}]], read_members),
    Decoder("cli.status", [json.dumps(asdict(STATUS))], read_status),
    Decoder("cli.stats", [STATS], read_stats, (Unreadable,)),
    Decoder("cli.asked", [STATS], read_asked_stats, (Unavailable,)),
    Decoder("cli.reports", [json.dumps(one) for one in REPORTS], read_report),
    Decoder("telemetry.families", [packed(MEASURED)], read_measured, (Unreadable,)),
    Decoder("dashboard.body", ['{"order": 17}', "[1, 2.5, true]", '"text"', "17"], read_body),
]
