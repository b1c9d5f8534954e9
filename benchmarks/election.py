"""Elections on one SQLite file: fail-over, hand-over, the cost of standing by, and of holding a thousand leases.

Run by hand: ``python -m benchmarks.election [--trials 40] [--ttl 2] [--seconds 30]``. Prints figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tenure
from tenure._timing import Timing
from tenure.events import Event, TermBegan

CANDIDATE = """
import asyncio, os, sys, time
import tenure

async def main(url, ttl):
    async with tenure.connect(url) as backend:
        election = backend.election("chair", ttl=ttl)
        loop = asyncio.get_running_loop()

        async def work(term):
            print("elected", time.monotonic(), flush=True)
            await asyncio.Event().wait()

        async def listen():
            while await loop.run_in_executor(None, sys.stdin.readline):
                print("resigning", time.monotonic(), flush=True)
                await election.resign()

        listener = asyncio.create_task(listen())
        await election.run(work)

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


class Candidate:
    """A candidate in a process of its own, which prints when it is elected."""

    def __init__(self, url: str, ttl: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CANDIDATE, url, str(ttl)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def printed(self, what: str) -> float:
        """Wait for the next line, which must be *what*; return when it was written."""
        assert self.process.stdout is not None
        word, at = self.process.stdout.readline().split()
        assert word == what, f"expected {what!r}, found {word!r}"
        return float(at)

    def resign(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("resign\n")
        self.process.stdin.flush()

    def kill(self) -> float:
        at = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return at

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextmanager
def place() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tenure-bench-") as folder:
        yield f"sqlite:///{Path(folder) / 'leases.db'}"


def failover(trials: int, ttl: float) -> list[float]:
    """From kill -9 of the leader to the successor's first line of work, in seconds."""
    times: list[float] = []
    with place() as url:
        leader = Candidate(url, ttl)
        leader.printed("elected")
        for trial in range(trials):
            successor = Candidate(url, ttl)
            # Let it look at the leader first; and spread the moment of the kill over the time between renewals.
            time.sleep(1.0 + ttl * (trial % 7) / 7)
            killed_at = leader.kill()
            times.append(successor.printed("elected") - killed_at)
            leader.close()
            leader = successor
        leader.close()
    return times


def handover(trials: int, ttl: float) -> list[float]:
    """From the leader's decision to resign to the successor's first line of work, in seconds."""
    times: list[float] = []
    with place() as url:
        one, two = Candidate(url, ttl), None
        one.printed("elected")
        two = Candidate(url, ttl)
        time.sleep(1.0)
        for _ in range(trials):
            one.resign()
            resigned_at = one.printed("resigning")
            times.append(two.printed("elected") - resigned_at)
            one, two = two, one
            # After resigning, a candidate waits before it campaigns again.
            time.sleep(0.3 + Timing(ttl).retry_every * 2.5)
        one.close()
        two.close()
    return times


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("acquire", "renew", "release", "inspect"):
            self.requests[name] = self.requests.get(name, 0) + 1
        return getattr(self._store, name)


async def many(count: int, seconds: float, *, standing_by: bool) -> tuple[float, dict[str, int]]:
    """Hold *count* leases in one process, or stand by for as many; return the share of a core and the requests."""
    with place() as url:
        began = 0
        all_began = asyncio.Event()

        def on_event(event: Event) -> None:
            nonlocal began
            began += isinstance(event, TermBegan)
            if began == count:
                all_began.set()

        async def forever(term: tenure.Term) -> None:
            await asyncio.Event().wait()

        async with tenure.connect(url, on_event=on_event) as backend:
            holders = [asyncio.create_task(backend.election(f"chair {n}").run(forever)) for n in range(count)]
            await all_began.wait()
            holder = None
            if standing_by:
                # The leases are held by another process, so that only standing by is measured here.
                for task in holders:
                    task.cancel()
                await asyncio.wait(holders)
                holder = subprocess.Popen([sys.executable, "-c", HOLDER, url, str(count)], stdout=subprocess.PIPE)
                assert holder.stdout is not None
                await asyncio.to_thread(holder.stdout.readline)
                holders = [asyncio.create_task(backend.election(f"chair {n}").run(forever)) for n in range(count)]
                await asyncio.sleep(2)
            driver = backend._connection.require_driver()
            driver.store = counted = Counted(driver.store)
            cpu, wall = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            share = (time.process_time() - cpu) / (time.monotonic() - wall)
            requests = dict(counted.requests)  # before the tasks end, which is not measured
            for task in holders:
                task.cancel()
            await asyncio.wait(holders)
            if holder:
                holder.kill()
                holder.communicate()
            return share, requests


HOLDER = """
import asyncio, sys
import tenure
from tenure.events import TermBegan

async def main(url, count):
    began = 0
    def on_event(event):
        nonlocal began
        began += isinstance(event, TermBegan)
        if began == count:
            print("held", flush=True)

    async def forever(term):
        await asyncio.Event().wait()

    async with tenure.connect(url, on_event=on_event) as backend:
        await asyncio.gather(*(backend.election(f"chair {n}").run(forever) for n in range(count)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(what: str, figure: str) -> None:
    print(f"{what:<58}{figure}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=40)
    arguments.add_argument("--ttl", type=float, default=2.0, help="lease of the fail-over trials, in seconds")
    arguments.add_argument("--seconds", type=float, default=30.0, help="how long to measure standing by and holding")
    asked = arguments.parse_args()
    timing = Timing(asked.ttl)

    times = failover(asked.trials, asked.ttl)
    bound = (asked.ttl + timing.retry_every) * 1.1
    line(f"fail-over after kill -9, ttl {asked.ttl:g} s, {len(times)} trials: p50", f"{statistics.median(times):.3f} s")
    p99 = percentile(times, 0.99)
    line("  p99", f"{p99:.3f} s = {p99 / asked.ttl:.2f} leases (lease + retry + 10 %: {bound:.2f} s)")

    times = handover(asked.trials, asked.ttl)
    line(f"hand-over after resign, {len(times)} trials: p50", f"{statistics.median(times) * 1000:.1f} ms")
    line("  p99", f"{percentile(times, 0.99) * 1000:.1f} ms")

    for standing_by in (True, False):
        share, requests = asyncio.run(many(1000, asked.seconds, standing_by=standing_by))
        rate = sum(requests.values()) / asked.seconds
        what = "standing by for" if standing_by else "holding"
        line(f"{what} 1,000 leases, ttl 15 s: share of one core", f"{share:.1%}")
        line("  requests to the store", f"{rate:.2f}/s = {rate / 1000:.4f}/s each {requests}")


if __name__ == "__main__":
    if os.name != "posix":
        sys.exit("needs kill -9, so a POSIX system")
    main()
