"""What others may have written is read, or refused with one error; nothing else happens, and it takes no time."""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure._checks import LONGEST
from tenure._foreign import (
    RECORD_MAX,
    Unreadable,
    a_count,
    a_flag,
    a_list,
    a_text,
    an_object,
    digits,
    read_json,
    read_object,
    read_or,
    seconds,
    texts,
)
from tenure._queue.broker import QueueSettings, read_settings
from tenure._queue.checks import COUNT_MAX, INT_MAX
from tenure._queue.failures import MESSAGE_MAX, TRACEBACK_MAX, Failure
from tenure._queue.headers import HEADERS_MAX, RESERVED_NAMES, RESERVED_PREFIXES, checked_headers, read_headers
from tenure._queue.message import HISTORY_MAX, Attempt, Death
from tenure._queue.note_headers import (
    NOTED,
    fields_of,
    noted_death,
    plain_attempts,
    read_fields,
    shortened,
    written_to_fit,
)
from tenure._queue.notes import Notes, read_attempts, read_deliveries, read_failure, read_history, read_reason
from tenure._queue.outgoing import Outgoing, checked
from tenure.errors import ConfigError, MessageRefused

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)
READERS: list[Callable[[object], object]] = [
    read_json,
    read_object,
    an_object,
    a_list,
    a_count,
    digits,
    seconds,
    a_text,
    texts,
    a_flag,
    read_deliveries,
    read_reason,
    read_attempts,
    read_failure,
    read_headers,
    read_settings,
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@given(value=values)
def test_a_reader_answers_or_says_that_it_is_unreadable(reader: Callable[[object], object], value: object) -> None:
    told = ""
    try:
        reader(value)
    except Unreadable as error:
        told = str(error)
    assert told.isascii(), "it is shown to operators"
    assert len(told) < 300


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it is no text, but NoneType"),
        ("", "it is no JSON"),
        (b"\xff", "it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "it is nested too deeply"),
        ("9" * 21, "it has a number of 21 digits"),
        ("NaN", "it has the number NaN"),
        ("[-Infinity]", "it has the number -Infinity"),
        (" " * (RECORD_MAX + 1), "it is longer than 262,144 bytes"),
    ],
)
def test_json_that_is_none_is_refused(text: object, why: str) -> None:
    with pytest.raises(Unreadable, match=f"^{why}"):
        read_json(text)


def test_json_may_have_a_number_without_limit_as_settings_do() -> None:
    assert read_json('{"dead_retention": Infinity}') == {"dead_retention": math.inf}


@pytest.mark.parametrize("value", [True, 1.0, -1, INT_MAX + 1, "1", None])
def test_a_count_is_a_whole_number_of_63_bits(value: object) -> None:
    with pytest.raises(Unreadable):
        a_count(value)


@pytest.mark.parametrize("value", [True, "1", -0.1, LONGEST * 1.1, math.inf, math.nan, 10**400, None])
def test_seconds_are_finite_and_can_be_represented(value: object) -> None:
    with pytest.raises(Unreadable):
        seconds(value)


@pytest.mark.parametrize("value", ["", "-1", "1_0", "\u0661", " 1", "1" * 5_000, b"\xff", str(INT_MAX + 1), 1])
def test_digits_are_those_of_63_bits(value: object) -> None:
    with pytest.raises(Unreadable):
        digits(value)


def test_digits_may_be_text_or_bytes() -> None:
    assert digits("017") == digits(b"17") == 17


@pytest.mark.parametrize("value", ["\ud800", "a\0b", b"a", "x" * 11, 7])
def test_a_text_can_be_kept_by_every_store(value: object) -> None:
    with pytest.raises(Unreadable):
        a_text(value, 10)


def test_what_is_unreadable_is_replaced() -> None:
    assert read_or(a_count, 7, None) == 7
    assert read_or(a_count, "7", None) is None


# --- notes -------------------------------------------------------------------------------------------------------


def test_a_huge_count_of_deliveries_costs_no_more_than_a_small_one() -> None:
    found = Notes().with_expired_attempts(INT_MAX, 5.0)
    assert [one.number for one in found.history] == list(range(INT_MAX - HISTORY_MAX + 1, INT_MAX + 1))


def test_a_count_of_deliveries_is_clipped() -> None:
    assert read_deliveries(10**12) == COUNT_MAX


def test_attempts_that_are_missing_are_added_in_their_order() -> None:
    before, tried, last = Attempt(1, 0.5, "rejected"), Attempt(1, 1.0, "abandoned"), Attempt(3, 2.0, "abandoned")
    notes = Notes(history=(before, tried, last), before=1).with_expired_attempts(4, 5.0)
    assert notes.history == (before, tried, Attempt(2, 5.0, "expired"), last, Attempt(4, 5.0, "expired"))


def test_attempts_before_the_first_one_were_dropped_and_are_not_made_up() -> None:
    notes = Notes(history=(Attempt(3, 1.0, "abandoned"),)).with_expired_attempts(5, 5.0)
    assert [(one.number, one.outcome) for one in notes.history] == [(3, "abandoned"), (4, "expired"), (5, "expired")]


@pytest.mark.parametrize("step", range(5))
def test_what_was_dropped_for_want_of_room_does_not_come_back(step: int) -> None:
    """The last step, without any attempt, is for messages beside which not even the least of one has room."""
    error = Failure("E", "m" * 1_000, "t" * 1_000)
    notes = Notes(history=tuple(Attempt(number, 0.1, "rejected", error) for number in range(1, 4)), before=3)
    for number in range(1, 8):
        outcome: Literal["abandoned", "expired"] = "expired" if number % 3 == 0 else "abandoned"
        if outcome == "abandoned":
            notes = notes.with_expired_attempts(number - 1, float(number - 1))
            notes = notes.with_attempt(Attempt(number, float(number), outcome, error))
        if number == 4:
            notes = list(shortened(notes))[step]
    numbers = [one.number for one in notes.history[notes.before :]]
    assert numbers == list(range(8 - len(numbers), 8)), "the newest"
    assert [(one.at, one.outcome) for one in notes.history[notes.before :]] == [
        (float(number), "expired" if number % 3 == 0 else "abandoned") for number in numbers
    ]
    assert all(one.at == 0.1 for one in notes.history[: notes.before])


def test_attempts_from_before_it_was_redriven_leave_first() -> None:
    notes = Notes(history=tuple(Attempt(number, 0.0, "abandoned") for number in range(1, 50)), before=49)
    for number in (1, 2, 3):
        notes = notes.with_attempt(Attempt(number, 1.0, "abandoned"))
    assert (len(notes.history), notes.before) == (HISTORY_MAX, 47)
    assert [one.number for one in notes.with_expired_attempts(3, 2.0).history[47:]] == [1, 2, 3]


def test_a_redriven_message_keeps_its_history_only() -> None:
    dead = Notes(history=(Attempt(1, 1.0, "abandoned", Failure("E", "m")),)).dead("bad", "very", 1, 2.0)
    assert (dead.error, dead.deliveries) == (Failure("E", "m"), 1)
    assert dead.redriven() == Notes(history=dead.history, before=1)


@given(st.lists(st.builds(Attempt, st.integers(1, 99), st.floats(0, 1e9), st.just("expired")), max_size=60))
def test_a_history_survives_its_round_trip(history: list[Attempt]) -> None:
    assert read_attempts(read_json(json.dumps(plain_attempts(tuple(history))))) == tuple(history[-HISTORY_MAX:])


def test_an_attempt_that_is_unreadable_hides_no_other() -> None:
    rows = [[math.inf, 0, "x", None], [2, 5, "expired", None, "a newer column"], {"number": 3}, 7]
    failed = {"number": 4, "at": 6.0, "outcome": "abandoned", "error": {"type": "E", "message": "m"}, "more": 1}
    assert read_attempts([*rows, failed]) == (
        Attempt(2, 5.0, "expired"),
        Attempt(4, 6.0, "abandoned", Failure("E", "m")),
    )


@pytest.mark.parametrize(("before", "left"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (10**9, 2)])
def test_what_is_from_before_a_redrive_is_counted_without_unreadable_attempts(before: int, left: int) -> None:
    """Else an attempt since then would be taken for an older one, and made up once more."""
    entries: list[object] = [7, [1, 5.0, "abandoned", None], {"number": 3}, [1, 6.0, "abandoned", None]]
    assert read_history(entries, before)[1] == left


def test_what_is_from_before_a_redrive_is_counted_without_dropped_attempts() -> None:
    entries = plain_attempts(tuple(Attempt(n, 1.0, "abandoned") for n in range(1, HISTORY_MAX + 6)))
    assert [read_history(entries, count)[1] for count in (3, 5, 6, 10**9)] == [0, 0, 1, HISTORY_MAX]


def test_the_texts_of_an_exception_are_cut() -> None:
    found = read_failure(["E" * 10**5, "m" * 10**5, "t" * 10**5])
    assert found is not None
    assert (len(found.message), len(found.traceback)) == (2 * MESSAGE_MAX, TRACEBACK_MAX + 1)


def test_notes_are_shortened_step_by_step() -> None:
    error = Failure("E", "m" * 1_000, "t" * 1_000)
    full = Notes(history=tuple(Attempt(n, 1.0, "abandoned", error) for n in range(1, 6)), before=3, error=error)
    sizes = [len(repr(one)) for one in shortened(full)]
    assert sizes == sorted(sizes, reverse=True)
    assert [one.before for one in shortened(full)] == [3, 3, 1, 0, 0, 0, 0]
    assert [len(one.history) for one in shortened(full)] == [5, 5, 3, 1, 1, 0, 0]


def test_as_much_of_the_notes_is_written_as_fits() -> None:
    error = Failure("E", "m" * 1_000, "t" * 1_000)
    full = Notes(history=tuple(Attempt(n, 1.0, "abandoned", error) for n in range(1, 6)), error=error)
    sizes = [len(repr(one)) for one in shortened(full)]
    for size, written in zip(sizes, map(repr, shortened(full)), strict=True):
        found = written_to_fit(full, repr, lambda one, size=size: len(one) <= size)  # type: ignore[misc]
        assert found is not None
        assert len(found) == len(written)
    assert written_to_fit(full, repr, lambda one: len(one) < sizes[-1]) is None


def test_notes_survive_as_fields_and_what_is_unreadable_of_them_hides_no_other() -> None:
    attempts = (Attempt(1, 1.0, "rejected"), Attempt(1, 2.0, "abandoned", Failure("E", "m", "t")))
    notes = Notes(deliveries=1, history=attempts, before=1).dead("bad", "very", 2, 3.0)
    said = json.loads(json.dumps(fields_of(notes, Notes())))
    assert Notes(**read_fields(said, NOTED)) == notes
    assert fields_of(Notes(), Notes()) == read_fields({}, NOTED) == {}
    for name in said:
        found = read_fields(said | {name: {"of": "a newer version"}}, NOTED)
        assert found.keys() == said.keys() - {name}
        assert found.get("before", 0) == (0 if name in ("before", "history") else 1)


def test_a_death_that_is_not_noted_is_shown_all_the_same() -> None:
    assert noted_death(Notes(), 7.0) == Death("unknown", "", 7.0)
    assert noted_death(Notes().dead("bad", "very", 2, 3.0), 7.0) == Death("bad", "very", 3.0)


# --- headers and settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED_NAMES), *(f"{one}x" for one in RESERVED_PREFIXES), "Tenure-State", "X-TENURE-deliveries"]
)
def test_a_reserved_header_is_refused_and_read_where_it_was_stored(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the header '{name}' is reserved"):
        checked_headers({name: 1})
    with pytest.raises(MessageRefused):
        checked([Outgoing(b"x", headers={name: 1})], 9)
    assert read_headers({name: 1, "tenant": "blue"}) == {name: 1, "tenant": "blue"}, "an older version has let it pass"


@given(values)
def test_headers_that_were_read_can_be_sent(value: object) -> None:
    found = read_or(read_headers, value, {})
    assert checked_headers(found) == found


def test_of_headers_that_are_too_large_those_are_read_that_fit() -> None:
    given = {"large": "x" * (HEADERS_MAX + 1), **{f"{number:04}": "x" * 1_000 for number in range(100)}}
    found = read_headers(given)
    assert list(found) == list(given)[1 : 1 + HEADERS_MAX // 1_004]
    assert checked_headers(found) == found


def test_settings_that_can_not_work_are_left_out() -> None:
    given = read_json('{"lock": -1, "max_deliveries": 3, "dead_retention": Infinity, "rate": [5, 60], "__class__": 1}')
    found = read_settings({**given, "paused": "yes", "body_max": 10**30, "max_locked": math.nan})
    assert found == {"max_deliveries": 3, "dead_retention": math.inf, "rate": (5, 60)}
    QueueSettings(**found)


# --- what is never done with what was read -----------------------------------------------------------------------

SOURCE = Path(tenure.__file__).parent
OWN_MODULES = {"importlib.import_module"}
RUNNING = {
    "__init__.py": OWN_MODULES,  # public names, when they are used
    "_cli/entry_points.py": OWN_MODULES,  # MODULE:NAME of the command line
    "_cli/group.py": OWN_MODULES,  # the module of a command
    "_cli/guard.py": {"os.execvp"},  # the command of the command line
    "_cli/run.py": OWN_MODULES,  # MODULE:NAME of the command line
    "_backends/servicebus/library.py": OWN_MODULES,  # the driver's modules, from a table
    "_registry.py": OWN_MODULES,  # the backend for a scheme, from a table
    "telemetry.py": OWN_MODULES,
    "_queue/handler_process.py": {"pickle.loads"},  # from the process that started it, by a pipe
    "_service/signatures.py": {"eval"},  # the annotations of the user's own function
}
"""What may run what it is given, and where it is given what no other program can write."""

RUNS = re.compile(
    r"(?:builtins\.)?(eval|exec|compile|__import__)"
    r"|(?:_?pickle)\.(load|loads|Unpickler|_\w+|\*)|(marshal|shelve|runpy|code|codeop|imp|dill|cloudpickle|jsonpickle)(\..*)?"
    r"|importlib\.(import_module|reload|util\..*|machinery\..*|\*)|yaml\.(load|unsafe|full|Loader|Unsafe|Full|C?Loader|\*)\w*"
    r"|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*|startfile|\*)|subprocess\.(getoutput|getstatusoutput|\*)"
    r"|asyncio\.(subprocess\.)?create_subprocess_shell|_?pickle|importlib|subprocess"
)
"""Names, as they are written in full. A module alone is one that is handed on."""


def what_runs(source: str) -> set[str]:
    """Return what *source* names that evaluates, unpickles, imports or starts a shell, whatever it calls it."""
    tree = ast.parse(source)
    full: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            firsts = {one.name.partition(".")[0] for one in node.names if not one.asname}
            full |= {one.asname: one.name for one in node.names if one.asname} | {one: one for one in firsts}
            found |= {one.name for one in node.names if one.name not in ("pickle", "importlib", "subprocess")}
        elif isinstance(node, ast.ImportFrom):
            full |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            found.add("shell=")
    inner = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            first, *rest = ast.unparse(node).split(".")
            if first in full or (not rest and first in vars(builtins)):
                found.add(".".join([full.get(first, first), *rest]))
    return {one for one in found if one == "shell=" or RUNS.fullmatch(one)}


def test_nothing_that_was_read_is_run() -> None:
    files = {path.relative_to(SOURCE).as_posix(): what_runs(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {name: found for name, found in files.items() if found and not name.startswith("testing/")} == RUNNING


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle\npickle.loads(body)", "pickle.loads"),
        ("import pickle as p\np.load(file)", "pickle.load"),
        ("import pickle\nread = pickle.loads", "pickle.loads"),
        ("import pickle\nread = getattr(pickle, name)", "pickle"),
        ("from pickle import loads as read", "pickle.loads"),
        ("from pickle import *", "pickle.*"),
        ("from pickle import Unpickler", "pickle.Unpickler"),
        ("import marshal", "marshal"),
        ("import shelve as s\ns.open(path)", "shelve.open"),
        ("from importlib import import_module\nimport_module(x)", "importlib.import_module"),
        ("import importlib as i\ni.import_module(x)", "importlib.import_module"),
        ("__import__(text)", "__import__"),
        ("eval(text)", "eval"),
        ("run = exec", "exec"),
        ("import builtins as b\nb.eval(text)", "builtins.eval"),
        ("import yaml as y\ny.load(text, y.Loader)", "yaml.load"),
        ("import os\nos.system(text)", "os.system"),
        ("from os import popen", "os.popen"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell="),
        ("from subprocess import run as r\nr(text, shell=is_windows)", "shell="),
        ("import subprocess as s\ns.getoutput(text)", "subprocess.getoutput"),
        ("import asyncio\nasyncio.create_subprocess_shell(text)", "asyncio.create_subprocess_shell"),
        ("import runpy\nrunpy.run_path(path)", "runpy.run_path"),
        ("from runpy import run_module", "runpy.run_module"),
    ],
)
def test_planted_code_that_runs_what_was_read_is_found(source: str, found: str) -> None:
    assert found in what_runs(source)


def test_what_runs_nothing_that_was_read_is_no_finding() -> None:
    source = "import yaml, pickle, os, subprocess, re\nyaml.safe_load(x)\npickle.dumps(x)\nos.stat(x)\nre.compile(x)\n"
    assert (
        what_runs(f"{source}subprocess.run([x], shell=False)\nself.exec(x)\nfrom importlib import resources") == set()
    )
