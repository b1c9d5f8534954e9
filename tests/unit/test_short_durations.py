"""The checker of short durations refuses each kind where real time passes, and the list can only become shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import short_durations
from scripts.short_durations import LIST, OWNER, ROOT, compare, find, read_list, write_list

STORE, VIRTUAL = "tests/stores/planted/test_planted.py", "import asyncio\nfrom tenure.testing.loop import run\n"


def found(source: str, path: str = STORE) -> list[str]:
    return [f"{each.line}: {each.found}" for each in find(path, f"import asyncio, time\n{source}\n", ROOT)]


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("queue = backend.queue('q', lock=1.5)", "lock of 1.5 s"),
        ("election = backend.election('e', ttl=4)", "ttl of 4 s"),
        ("broker.receive(queue, wait=0.5)", "wait of 0.5 s"),
        ("asyncio.timeout(2)", "timeout of 2 s"),
        ("asyncio.wait_for(work, 2.0)", "timeout of 2 s"),
        ("thread.join(0.5)", "timeout of 0.5 s"),
        ("event.wait(0.5)", "timeout of 0.5 s"),
        ("connect(socket_timeout=0.25)", "socket_timeout of 0.25 s"),
        ("await until(condition, within=3)", "within of 3 s"),
        ("LOCK = 3.0", "LOCK of 3 s"),
        ("SHORT_TTL: float = 1 / 2", "SHORT_TTL of 0.5 s"),
        ("store.timeout = 0.2", "timeout of 0.2 s"),
        ("OPTIONS = {'grace': 0.1}", "grace of 0.1 s"),
        ("def leads(name, ttl=2): ...", "ttl of 2 s"),
        ("def leads(name, *, ttl=2): ...", "ttl of 2 s"),
        ("await asyncio.sleep(0.01)", "a sleep of 0.01 s"),
        ("time.sleep(30)", "a sleep of 30 s"),
        ("from tenure.testing import until", "tenure.testing.until, which gives up after 10 s"),
        ("async def until(condition): ...", "another function until"),
        ("def wait_until(condition): ...", "another function wait_until"),
        ("LOCK = stretched(3.0)", "stretched(…) at import"),
        ("class Harness:\n    lock = durations.stretched(3.0)", "stretched(…) at import"),
        ("def leads(ttl=stretched(2.0)): ...", "stretched(…) at import"),
        ("@pytest.mark.parametrize('ttl', [stretched(2.0)])\ndef test(ttl): ...", "stretched(…) at import"),
    ],
)
def test_what_is_planted_is_refused(planted: str, said: str) -> None:
    assert [line.partition(": ")[2] for line in found(planted)] == [said]


def test_a_constant_is_refused_where_it_is_written_and_where_a_test_sleeps_for_it() -> None:
    assert found("LOCK = 3.0\nqueue = backend.queue('q', lock=LOCK)\ntime.sleep(LOCK + 0.5)") == [
        "2: LOCK of 3 s",
        "4: a sleep of 3.5 s",
    ]


@pytest.mark.parametrize(
    "right",
    [
        "queue = backend.queue('q', lock=30)",
        "event.wait(PATIENCE)",
        "', '.join('ab')",
        "time.sleep(3600)  # work that does not end",
        "await asyncio.sleep(0)",
        "def test():\n    lock = stretched(3.0)\n    time.sleep(stretched(1.0))",
        "await queue.consume(handler, max_locked=2, concurrency=3, wait=True)",
        "broker.receive(queue, wait=0)",
    ],
)
def test_what_waits_long_enough_or_not_at_all_is_accepted(right: str) -> None:
    assert found(right) == []


def test_in_virtual_time_any_number_is_right() -> None:
    source = f"""{VIRTUAL}
from tenure.testing import until

def test_a_virtual_lease():
    async def main():
        await asyncio.sleep(1.0)
        await until(condition, within=3.0)
    run(main())

@in_virtual_time
async def test_a_decorated_one(setup):
    await asyncio.sleep(1.0)

async def test_with_the_fixture(in_virtual_time):
    await asyncio.sleep(1.0)
"""
    assert find(STORE, source, ROOT) == []


def test_real_time_beside_virtual_time_is_found() -> None:
    source = f"""{VIRTUAL}
def test_in_real_time():
    async def main():
        await asyncio.sleep(1.0)
    asyncio.run(main())

async def test_that_pytest_runs():
    await asyncio.sleep(2.0)

def handler(message):
    time.sleep(3.0)
"""
    assert [each.found for each in find(STORE, source, ROOT)] == ["a sleep of 1 s", "a sleep of 2 s", "a sleep of 3 s"]


def test_virtual_time_may_come_from_another_module_of_tests(tmp_path: Path) -> None:
    source = "import asyncio\nfrom tests.planted import setup\nLOCK = 3.0"
    assert len(find(STORE, source, tmp_path)) == 1
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "planted.py").write_text(VIRTUAL)
    short_durations._uses_virtual_loop.cache_clear()
    assert find(STORE, source, tmp_path) == []


@pytest.mark.parametrize("path", [OWNER, "tests/sim/planted.py"])
def test_the_owner_and_simulations_are_exempt(path: str) -> None:
    assert found("LOCK = 3.0\nawait asyncio.sleep(0.01)", path) == []


def test_without_clocks_loops_or_servers_no_time_passes() -> None:
    assert find(STORE, "from tenure import Timing\nTIMING = Timing(ttl=3.0)", ROOT) == []


def test_a_finding_says_where_it_is_and_what_to_use_instead() -> None:
    [each] = find(STORE, "import time\n\ntime.sleep(0.5)", ROOT)
    assert str(each) == (
        f"{STORE}:3: a sleep of 0.5 s; wait for a condition, turn a clock, or ask tests.durations.stretched(…)"
        " when the test begins"
    )


def test_the_list_can_only_become_shorter() -> None:
    two = {STORE: find(STORE, "import time\ntime.sleep(1)\ntime.sleep(2)", ROOT)}
    assert compare(two, {STORE: 2}) == []
    assert compare(two, {STORE: 1})[-1] == f"{STORE} has 2 short durations, and {LIST} leaves 1 to it: add none"
    assert compare(two, {})[-1] == f"{STORE} has 2 short durations, and {LIST} leaves 0 to it: add none"
    assert compare(two, {STORE: 3}) == [
        f"{STORE} has 2 short durations, and {LIST} still leaves 3 to it: run python -m scripts.short_durations --write"
    ]
    assert len(compare({}, {STORE: 1})) == 1  # the file, or all that was short in it, is gone


def test_the_list_is_read_as_it_is_written() -> None:
    assert read_list(write_list({"tests/b.py": 2, "tests/a.py": 1})) == {"tests/a.py": 1, "tests/b.py": 2}


def test_the_command_refuses_what_is_new_and_writes_the_list_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_planted.py"
    file.write_text("import time\ntime.sleep(1)\n")
    assert short_durations.main([], tmp_path) == 1
    assert "tests/test_planted.py:2: a sleep of 1 s" in capsys.readouterr().out
    assert short_durations.main(["--write"], tmp_path) == 0
    assert short_durations.main([], tmp_path) == 0
    file.write_text("import time\ntime.sleep(1)\ntime.sleep(2)\n")
    assert short_durations.main(["--write"], tmp_path) == 0
    assert "has grown from 1 to 2" in capsys.readouterr().out
    assert short_durations.main(["--all"], tmp_path) == 2


def test_a_line_that_is_none_of_the_list_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / LIST).write_text("# a comment\n<<<<<<< a merge\n")
    assert short_durations.main([], tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"line 2 of {LIST} is '<<<<<<< a merge', and not a file and a number")
    assert short_durations.main(["--write"], tmp_path) == 0
    assert short_durations.main([], tmp_path) == 0
