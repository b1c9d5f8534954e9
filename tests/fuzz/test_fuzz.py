"""Whatever others have written, each decoder reads it or refuses it as documented, soon, and without much memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiormq")
pytest.importorskip("asyncpg")
pytest.importorskip("azure.servicebus")
pytest.importorskip("azure.storage.queue")
pytest.importorskip("cronsim")
pytest.importorskip("kazoo")
pytest.importorskip("nats")
pytest.importorskip("redis")
pytest.importorskip("starlette")
pytest.importorskip("yaml")

from tests import targets
from tests.fuzz.__main__ import main
from tests.fuzz.decoder import Decoder, memory_of, round_of, seeds_of
from tests.fuzz.decoders import DECODERS
from tests.fuzz.missed import executed, missed, readers_in
from tests.fuzz.of_nats import REFUSAL
from tests.proof.fuzz import fuzzed
from tests.proof.simulated import Seed

ROUNDS = 1_000
"""Rounds of each decoder: all of them take some 20 seconds of a processor. ``make proof`` has a million."""

FEW = 6
"""Rounds in which every reader is run at least once."""

BYTES_MAX = 50_000_000
"""Bytes that reading one value may take at once."""

ELSEWHERE = {
    "_backends/redis/live.py::LiveMessages.purge": (
        "stores/redis/test_foreign.py::test_a_queue_is_shown_and_purged_whatever_its_places_have"
    ),
    "_backends/sqlite/claiming.py::Claiming._locked_deliveries": (
        "stores/sqlite/test_foreign.py::test_a_dead_letter_without_its_death_is_received_and_shown"
    ),
    "_backends/sqlite/queue_reader.py::QueueReader.count": (
        "stores/sqlite/test_foreign.py::test_settings_and_counts_that_are_unreadable_stop_no_verb"
    ),
    "_backends/sqlite/queue_reader.py::QueueReader._locks": (
        "stores/sqlite/test_foreign.py::test_a_lock_is_renewed_and_shown_whatever_its_times_are"
    ),
    "_backends/sqlite/queue_reader.py::QueueReader._live_message": (
        "stores/sqlite/test_foreign.py::test_a_lock_is_renewed_and_shown_whatever_its_times_are"
    ),
    "_backends/sqlite/queue_reader.py::QueueReader._groups": (
        "stores/sqlite/test_foreign.py::test_a_lock_is_renewed_and_shown_whatever_its_times_are"
    ),
    "_backends/sqlite/transitions.py::Transitions._report_death": (
        "stores/sqlite/test_foreign.py::test_a_message_that_was_set_to_expire_dies_when_it_is_claimed"
    ),
}
"""Readers that need a store with contents, and for each the test that edits these."""

DIRECT = {
    "_foreign.py::read_json": "the strict reader itself",
    "_backends/peers/wire.py::decode": "frames have a length, and each field of a message a reader of its own",
    "_dashboard/shown.py::body": "it shows a body as its sender wrote it, with whatever numbers",
    "_queue/bodies.py::loads": "bodies may have any JSON: unit/test_hostile_bodies.py",
    "_queue/bodies.py::decode": "bodies may have any JSON: unit/test_hostile_bodies.py",
    "_queue/typed_screening.py::_parsed": "bodies may have any JSON: unit/test_hostile_bodies.py",
    "_queue/typed_kinds.py::key_values": "a key in a body that was read: unit/test_hostile_bodies.py",
    "_backends/azure_storage/address.py::_key": "the key of the own account",
    "_backends/servicebus/amqp.py::_fixed": "it makes readers, when the module is imported",
    "_backends/sqlite/claiming.py::_new_token": "random bytes of this process",
}
"""Functions that read JSON or bytes by themselves, and why."""

REFUSED: dict[str, Sequence[Any]] = {"nats.answer": [json.dumps(REFUSAL)]}
"""Samples by which a server says no."""


@pytest.mark.parametrize("name", DECODERS)
def test_what_tenure_writes_is_read(name: str) -> None:
    for sample in DECODERS[name].samples:
        if sample in REFUSED.get(name, ()):
            with pytest.raises(DECODERS[name].errors):
                DECODERS[name].read(sample)
        else:
            DECODERS[name].read(sample)


@pytest.mark.parametrize("name", DECODERS)
def test_what_others_write_is_read_or_refused(name: str) -> None:
    for seed in seeds_of(DECODERS[name], ROUNDS):
        if found := round_of(DECODERS[name], seed):
            pytest.fail(found, pytrace=False)


@pytest.mark.parametrize("name", DECODERS)
def test_little_memory_is_taken(name: str) -> None:
    assert memory_of(DECODERS[name]) < BYTES_MAX


def run_all() -> None:
    for decoder in DECODERS.values():
        for sample in decoder.samples:
            with suppress(*decoder.errors):
                decoder.read(sample)
        for seed in range(FEW):
            round_of(decoder, seed)


def test_no_decoder_is_missing() -> None:
    assert missed(readers_in(), executed(run_all), ELSEWHERE, DIRECT) == []
    assert [test for test in ELSEWHERE.values() if not targets.is_there(test)] == []


# --- by hand -----------------------------------------------------------------------------------------------------


def test_it_is_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["etcd.txn", "redis.token", "--rounds", "20"]) == 0
    assert "etcd.txn: 20 rounds" in capsys.readouterr().out
    assert main(["etcd.txn", "--seed", "7"]) == 0
    assert "etcd.txn, seed 7: it was read, or refused" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["etcd.nothing"])
    assert "etcd.nothing" in capsys.readouterr().err


def test_a_failure_names_the_line_that_replays_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DECODERS, "planted", Decoder("planted", [{"count": 3}], forgets_a_key))
    assert main(["planted", "--rounds", "50"]) == 1
    replay = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("replay: "))
    assert main(replay.removeprefix("replay: python -m tests.fuzz ").split()) == 1
    assert replay in capsys.readouterr().out


def test_a_seed_of_the_long_run_is_a_round_of_each_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuzzed(3) == Seed(3, len(DECODERS), "", "")
    monkeypatch.setitem(DECODERS, "planted", Decoder("planted", [{"count": 3}], [].index))
    one = fuzzed(3)
    assert one.amount == len(DECODERS)
    assert one.found.startswith("planted, seed 3: ValueError: ")
    assert one.replay == "python -m tests.fuzz planted --seed 3"


# --- planted bugs ------------------------------------------------------------------------------------------------


def count_in(given: Any) -> int:
    count = given.get("count") if isinstance(given, dict) else None
    return count if type(count) is int else 0


def counts(given: Any) -> None:
    for _ in range(count_in(given)):
        pass


def forgets_a_key(given: Any) -> object:
    return given["count"] if isinstance(given, dict) else None


def writes_what_it_read(given: Any) -> object:
    return count_in(given).to_bytes(8, "big", signed=True)


def waits_until_then(given: Any) -> object:
    return isinstance(given, dict) and isinstance(given.get("count"), float) and int(given["count"])


def takes_a_size(given: Any) -> object:
    return bytearray(max(0, min(count_in(given), 2 * BYTES_MAX)))


def copies_for_each(given: Any) -> object:
    return [str(given)] * max(0, min(count_in(given), 10_000_000))


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        (counts, "it took more than"),
        (forgets_a_key, "KeyError: 'count'"),
        (writes_what_it_read, "OverflowError: int too big"),
        (waits_until_then, "OverflowError: cannot convert float infinity"),
    ],
)
def test_a_planted_bug_of_a_decoder_is_found(bug: Callable[[Any], object], says: str) -> None:
    decoder = Decoder("planted", [{"count": 3}], bug, (TypeError,))
    assert any(says in round_of(decoder, seed, seconds=0.1) for seed in range(ROUNDS))


@pytest.mark.parametrize("bug", [takes_a_size, copies_for_each])
def test_a_planted_allocation_is_found(bug: Callable[[Any], object]) -> None:
    assert memory_of(Decoder("planted", [{"count": 3}], bug)) > BYTES_MAX
    assert memory_of(Decoder("planted", [{"count": 3}], repr)) < BYTES_MAX


NOT_RUN, DIRECTLY = "no decoder of the fuzz runs it", "reads JSON without"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("from tenure._foreign import a_count\ndef decode(value):\n return a_count(value)", NOT_RUN),
        ("from tenure._foreign import seconds as read\nasync def decode(value):\n return read(value)", NOT_RUN),
        ("from tenure._foreign import a_text\nclass A:\n def decode(self):\n  return [a_text]", NOT_RUN),
        ("from tenure._queue.notes import read_attempts\ndef decode(value):\n return read_attempts(value)", NOT_RUN),
        ("from tenure._queue.headers import read_headers\ndef decode(value):\n return read_headers(value)", NOT_RUN),
        ("from tenure._queue.broker import read_settings\ndef decode(value):\n return read_settings(value)", NOT_RUN),
        ("from tenure import _foreign\ndef decode(value):\n return _foreign.a_count(value)", NOT_RUN),
        ("import tenure._foreign as foreign\ndef decode(value):\n return foreign.a_count(value)", NOT_RUN),
        ("from tenure._queue import notes\ndef decode(value):\n return notes.read_attempts(value)", NOT_RUN),
        ("import struct\ndef decode(data):\n return struct.unpack('>I', data)", NOT_RUN),
        ("from struct import unpack_from as read\ndef decode(data):\n return read('>I', data)", NOT_RUN),
        ("import struct\n_SIZE = struct.Struct('>I')\ndef decode(data):\n return _SIZE.unpack(data)", NOT_RUN),
        ("def decode(data):\n return int.from_bytes(data)", NOT_RUN),
        ("import base64\ndef decode(text):\n return base64.b64decode(text)", NOT_RUN),
        ("from base64 import b64decode\ndef decode(text):\n return b64decode(text)", NOT_RUN),
        ("import json\ndef decode(text):\n return json.loads(text)", DIRECTLY),
        ("import json as j\ndef decode(text):\n return j.loads(text)", DIRECTLY),
        ("from json import loads\ndef decode(text):\n return loads(text)", DIRECTLY),
        ("from json import JSONDecoder as Reads\ndef decode(text):\n return Reads().decode(text)", DIRECTLY),
        ("import json\n_JSON = json.JSONDecoder()\ndef decode(text):\n return _JSON.decode(text)", DIRECTLY),
    ],
)
def test_a_planted_reader_that_nobody_runs_is_found(source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "_backends").mkdir()
    (tmp_path / "_backends/planted.py").write_text(source)
    found = missed(readers_in(tmp_path), set(), {}, {})
    assert any(says in one and one.startswith("_backends/planted.py::") for one in found), found


READS_AND_NOT = """\
from tenure._foreign import a_count, seconds

def decode(value):
    return a_count(value)

def waits(seconds):
    return seconds + 1
"""


def test_a_reader_that_was_run_or_is_tried_elsewhere_is_not_missed(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(READS_AND_NOT)
    readers = list(readers_in(tmp_path))
    assert [one.where for one in readers] == ["planted.py::decode"]
    scope: dict[str, Any] = {}
    exec(compile(READS_AND_NOT, str(file), "exec"), scope)
    ran = executed(lambda: scope["decode"](5), tmp_path)
    assert ran == {"planted.py::decode"}
    entry = {"planted.py::decode": "a test, or a reason"}
    assert missed(readers, ran, {}, {}) == missed(readers, set(), entry, {}) == []
    assert "remove it from ELSEWHERE" in missed(readers, ran, entry, {})[0]
    assert "remove it from DIRECT" in missed(readers, ran, {}, entry)[0]
    assert "remove it from the lists" in missed(readers, ran, {"planted.py::gone": "a test"}, {})[0]
