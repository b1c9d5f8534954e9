"""Fleets on this machine: from kill -9 of the leader to its successor's first line; messages when idle.

Run by hand: ``python -m benchmarks.peers [--sizes 3,5,9,25] [--heartbeats 0.1,0.2] [--trials 5] [--quorum majority]``.
Prints figures only. A fleet's members share this machine's cores, so that large ones are slower here than on
machines of their own.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MEMBER = """
import asyncio, sys, time
import tenure

async def main(url, ttl):
    async with tenure.connect(url) as backend:
        async def work(term):
            print("elected", term.token, time.monotonic(), flush=True)
            await asyncio.Event().wait()

        async def count():
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(None, sys.stdin.readline):
                counts = backend._connection.opened.member.running()[2].counts
                print("sent", counts.sent, flush=True)

        counting = asyncio.create_task(count())
        await backend.election("chair", ttl=ttl).run(work)

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""
TTL_OF_HEARTBEATS = 15
"""The defaults: a lease of 15 s, a heartbeat of 1 s."""


class Fleet:
    """Members as processes, which print when they are elected."""

    def __init__(self, size: int, strategy: str, heartbeat: float, quorum: str) -> None:
        taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        self.addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in taken]
        for each in taken:
            each.close()
        self.ttl = heartbeat * TTL_OF_HEARTBEATS
        self.options = f"strategy={strategy}&heartbeat={heartbeat}&ttl_max={self.ttl}&quorum={quorum}"
        self.newest = (0, -1, 0.0)
        self._output: dict[int, bytes] = {}
        self._counts: dict[int, int] = {}
        self.processes = [self.start(number) for number in range(size)]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        url = f"peers://{','.join(self.addresses)}?me={self.addresses[number]}&{self.options}"
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, url, str(self.ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def read(self) -> None:
        """Read what the members have printed meanwhile."""
        for number, process in enumerate(self.processes):
            assert process.stdout is not None
            with suppress(BlockingIOError):
                self._output[number] = self._output.get(number, b"") + os.read(process.stdout.fileno(), 65_536)
            *lines, self._output[number] = self._output.get(number, b"").split(b"\n")
            for word, *values in (line.split() for line in lines):
                if word == b"elected":
                    self.newest = max(self.newest, (int(values[0]), number, float(values[1])))
                else:
                    self._counts[number] = int(values[0])

    def elected(self, after: int = 0) -> tuple[int, int, float]:
        """Wait for a leader with a token above *after*; return its token, its number, and when it began."""
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up:
            self.read()
            if self.newest[0] > after:
                return self.newest
            time.sleep(0.005)
        raise RuntimeError("no member was elected for two minutes")

    def sent(self) -> int:
        """Return how many messages all members have sent."""
        self._counts.clear()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"count\n")
            process.stdin.flush()
        while len(self._counts) < len(self.processes):
            self.read()
            time.sleep(0.005)
        return sum(self._counts.values())

    def kill(self, number: int) -> float:
        at = time.monotonic()
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()
        return at

    def restart(self, number: int) -> None:
        """Restart a member that was killed."""
        self._output.pop(number, None)
        self.processes[number] = self.start(number)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()


@contextmanager
def fleet(size: int, strategy: str, heartbeat: float, quorum: str) -> Iterator[Fleet]:
    members = Fleet(size, strategy, heartbeat, quorum)
    try:
        yield members
    finally:
        members.close()


def failover(size: int, strategy: str, heartbeat: float, quorum: str, trials: int, calm: float) -> str:
    """Kill leaders, and count the messages between two kills; return a line of the table."""
    times, rates = [], []
    with fleet(size, strategy, heartbeat, quorum) as members:
        members.elected()
        for trial in range(trials):
            time.sleep(members.ttl / 2 + members.ttl * (trial % 4) / 4)
            before, since = members.sent(), time.monotonic()
            time.sleep(calm)
            rates.append((members.sent() - before) / (time.monotonic() - since))
            token, leader, _ = members.elected()  # without a quorum, the leader may have changed
            killed_at = members.kill(leader)
            times.append(members.elected(after=token)[2] - killed_at)
            members.restart(leader)
            time.sleep(2 * members.ttl)  # the new process doesn't vote for one lease
    middle, worst = statistics.median(times), max(times)
    return (
        f"{strategy:<9}{size:>8}{heartbeat:>11g}{members.ttl:>8.1f}{middle:>11.2f}{worst:>8.2f}"
        f"{statistics.median(rates):>13.0f}{size * (size - 1) / heartbeat:>13.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Measure fleets on this machine.")
    parser.add_argument("--sizes", default="3,5,9,25")
    parser.add_argument("--heartbeats", default="0.1,0.2")
    parser.add_argument("--strategies", default="lowest,bully,ring")
    parser.add_argument("--quorum", default="majority", choices=["majority", "none"])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--calm", type=float, default=3.0, help="seconds for which idle messages are counted")
    args = parser.parse_args()
    print(f"quorum={args.quorum}, {args.trials} kills each, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'strategy':<9}{'members':>8}{'heartbeat':>11}{'ttl':>8}{'elected s':>11}{'worst':>8}", end="")
    print(f"{'idle msgs/s':>13}{'beats alone':>13}")
    for strategy in args.strategies.split(","):
        for size in map(int, args.sizes.split(",")):
            for heartbeat in map(float, args.heartbeats.split(",")):
                print(failover(size, strategy, heartbeat, args.quorum, args.trials, args.calm), flush=True)


if __name__ == "__main__":
    main()
