"""A process that campaigns for many names of one store, and may open few files; for benchmarks and tests.

As a program, ``python -m tests.held_names URL COUNT FILES PHASE``: it prints how many files it has open, then connects,
and prints a line when each name is led by it (``leads``) or by another (``stands``). It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import tenure
from tenure.events import CampaignFailed, Event, StandingBy, TermBegan
from tests.connections import connections_to, open_files

Phase = Literal["leads", "stands"]

PHASES: dict[str, type[Event]] = {"leads": TermBegan, "stands": StandingBy}
AT_ONCE = 50
"""Campaigns that begin in one iteration of the loop."""


async def hold(url: str, count: int, phase: str) -> None:
    """Campaign for *count* names until the standard input ends."""
    reached, all_reached, problem = set[str](), asyncio.Event(), ""

    def on_event(event: Event) -> None:
        nonlocal problem
        if isinstance(event, CampaignFailed):
            problem = event.why
        if isinstance(event, PHASES[phase]):
            reached.add(event.name)
            if len(reached) == count:
                loop.call_soon_threadsafe(all_reached.set)

    async def forever(term: tenure.Term) -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    async with tenure.connect(url, on_event=on_event) as backend, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(backend.election(f"name-{number}").run(forever))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        while not all_reached.is_set():
            try:
                await asyncio.wait_for(all_reached.wait(), 5.0)
            except TimeoutError:
                print(f"{len(reached)} of {count}: {problem}", flush=True)
        print("all", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)  # resigning from hundreds of names takes a while, and shows nothing here


@dataclass
class Holding:
    """Such a process, once it has reached its phase for all names."""

    pid: int
    files_before: int

    @property
    def files(self) -> int:
        """How many more files it has open than before it connected."""
        return open_files(self.pid) - self.files_before

    def connections(self, *ports: int) -> int:
        """Return how many connections it has to servers on these *ports*."""
        return sum(connections_to(port, self.pid) for port in ports)


@contextmanager
def holding(url: str, count: int, phase: Phase, files: int = 1024) -> Iterator[Holding]:
    """Start a process that may open so many *files*; yield when each name is led by it, or by another."""
    line = [sys.executable, "-m", "tests.held_names", url, str(count), str(files), phase]
    process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        before, said = int(process.stdout.readline()), list[str]()
        for text in process.stdout:
            if text == "all\n":
                yield Holding(process.pid, before)
                return
            said.append(text)
            if len(said) == PATIENCE_LINES:
                break
        raise AssertionError(f"not all of {count} names were reached with {files} files: {said[-1:]}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()


PATIENCE_LINES = 15
"""How often it says how many names it has reached, each five seconds, before that is given up."""


def main(url: str, count: str, files: str, phase: str) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), hard))
    print(open_files(), flush=True)
    asyncio.run(hold(url, int(count), phase))


if __name__ == "__main__":
    main(*sys.argv[1:])
