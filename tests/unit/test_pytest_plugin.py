"""The plug-in for pytest, in runs of its own."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from tenure.testing import connect_here
from tenure.testing.loop import run
from tenure.testing.pytest_plugin import seeds_of

TESTS = """
import asyncio, time
import pytest
from tenure.testing.loop import Deadlock, LimitReached

def test_time_is_virtual(in_virtual_time):
    begun = time.monotonic()
    assert in_virtual_time(asyncio.sleep(3600, "an hour")) == "an hour"
    assert time.monotonic() - begun < 60

def test_a_seed_of_ones_own(seed):
    assert seed < 3

@pytest.mark.parametrize("other, seed", [(1, 100)])
def test_seeds_given_by_the_test_stand(seed, other):
    assert seed == 100

@pytest.mark.parametrize(argnames="seed", argvalues=[100])
def test_seeds_given_by_name_stand(seed):
    assert seed == 100

def test_a_late_request_gets_the_first_seed(request):
    request.getfixturevalue("in_virtual_time")(asyncio.sleep(0))
    assert request.getfixturevalue("seed") < 3

def test_a_deadlock_fails(in_virtual_time):
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        in_virtual_time(main())

def test_a_virtual_day_fails(in_virtual_time):
    async def main():
        while True:
            await asyncio.sleep(60)

    with pytest.raises(LimitReached):
        in_virtual_time(main())

URLS = set()

@pytest.mark.parametrize("nth", [1, 2])
def test_a_store_of_its_own(memory_url, nth):
    URLS.add(memory_url)
    assert len(URLS) == nth

def test_without_a_seed():
    pass

def test_a_queue_for_any_loop(memory_queue, memory_queue_for_threads):
    asyncio.run(memory_queue.send(b"x"))
    assert memory_queue_for_threads.stats().ready == 1
    handled = []
    asyncio.run(memory_queue.consume(lambda message: handled.append(message.body), until_empty=True))
    assert handled == [b"x"]

def test_the_next_test_has_another_queue(memory_queue, memory_backend):
    assert asyncio.run(memory_queue.stats()).ready == 0
    assert "open" in repr(memory_backend)
"""


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS)
    line = [sys.executable, "-m", "pytest", "-v", "-p", "tenure.testing.pytest_plugin", *options, "test_it.py"]
    environment = {"PATH": "", "PYTHONPATH": ".", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no other plug-in is needed
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_every_test_that_depends_on_a_seed_runs_with_each(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--seeds", "3")
    assert done.returncode == 0, done.stdout
    for name, times in [
        ("time_is_virtual", 3),
        ("a_seed_of", 3),
        ("seeds_given", 2),
        ("without_a_seed", 1),
        ("a_queue", 1),
    ]:
        assert sum(f"::test_{name}" in line for line in done.stdout.splitlines()) == times, done.stdout
    again = pytest_run(tmp_path, "--seeds", "2-3", "-k", "a_seed_of_ones_own")
    assert "test_a_seed_of_ones_own[2] PASSED" in again.stdout
    assert "test_a_seed_of_ones_own[3] FAILED" in again.stdout


def test_a_wrong_seed_is_refused(tmp_path: Path) -> None:
    done = pytest_run(tmp_path, "--seeds", "many")
    assert done.returncode == 4
    assert "--seeds: 'many' names no seeds; give how many, as in 20, or which, as in 7-9" in done.stderr
    for text in ("0", "5-3", "", "-1"):
        with pytest.raises(ArgumentTypeError, match="names no seeds"):
            seeds_of(text)


def test_a_store_on_the_running_loop() -> None:
    async def main() -> str:
        async with connect_here() as backend:
            queue = backend.queue("orders")
            await queue.send(b"x", delay=3_600)
            [message] = await queue.receive(wait=4_000)
            await message.complete()
            async with backend.election("chair", ttl=15).campaign() as term:
                return term.name

    assert run(main()) == "chair"
