"""Candidates as processes on one store, the faults that befall them, and the acts of their leaders.

The acts are recorded in a Redis without faults: every act after a ``term.check()``, in true order, and apart from them
what it accepts under a fence.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from redis import asyncio as aioredis

from tenure.testing.faultproxy import FaultProxy
from tests.durations import PATIENCE, until
from tests.process.store_candidate import UNEXPECTED
from tests.servers import Redis, Server, private
from tests.servers.guard import MARK
from tests.servers.process import run_folder

PROGRAM = Path(__file__).with_name("store_candidate.py")
CANDIDATES = 3

Fault = Callable[[], Awaitable[None]]


class Act(NamedTuple):
    """One act of a leader."""

    name: str
    token: int
    process: int
    number: int
    """Its number in its process."""


class Acts:
    """What the leaders did, in a Redis."""

    def __init__(self, server: Redis) -> None:
        # A socket reaches every network namespace; a busy machine may answer late.
        self.url = f"unix://{server.folder}/acts.sock?socket_timeout={PATIENCE:g}"
        self.log = server.folder / "candidates.log"
        self._client: Any = aioredis.Redis.from_url(self.url, decode_responses=True)

    async def close(self) -> None:
        await self._client.aclose()

    async def counts(self) -> dict[str, int]:
        """Return how many acts were accepted for each name."""
        return {name: int(count) for name, count in (await self._client.hgetall("counts")).items()}

    async def leaders(self) -> dict[str, Act]:
        """Return the last accepted act for each name."""
        return {name: parsed([act])[0] for name, act in (await self._client.hgetall("leaders")).items()}

    async def all(self, kind: str) -> list[Act]:
        """Return the ``acts``, those that the fence ``accepted``, or those with a pause after the check, ``paused``."""
        return parsed(await self._client.lrange(kind, 0, -1))


@asynccontextmanager
async def recorded() -> AsyncIterator[Acts]:
    """Yield the record of acts, in a Redis of its own; print the end of the candidates' log at the end."""
    with private(Redis, options=[("appendonly", "no"), ("unixsocket", "acts.sock")]) as server:
        acts = Acts(server)
        try:
            yield acts
        finally:
            await acts.close()
            log = acts.log.read_text() if acts.log.exists() else ""
            print(log[log.find(UNEXPECTED) :][:3_000] if UNEXPECTED in log else log[-3_000:])


class Candidate:
    """A process that campaigns for every name, with its own proxies to the servers.

    *prefix* is a command that starts it somewhere else.
    """

    def __init__(
        self, url: str, proxies: Sequence[FaultProxy], acts: Acts, load: Load, prefix: Sequence[str] = ()
    ) -> None:
        self.proxies = proxies
        kind = "partitions" if load.is_shared else "elections"
        arguments = (url, acts.url, load.names, load.ttl, load.pause_max, kind)
        self._argv = [*prefix, sys.executable, str(PROGRAM), *map(str, arguments)]
        self._log = acts.log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            # With the mark of the servers, so that their guard also ends it after this run was killed.
            return subprocess.Popen(self._argv, stderr=log, env=os.environ | {MARK: str(run_folder())})

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.end()
        self.process = self._start()


@dataclass(frozen=True, slots=True)
class Load:
    """What the candidates campaign for."""

    names: int
    ttl: float
    is_shared: bool = False
    """Whether the names are the partitions of a group, which the candidates share."""

    @property
    def pause_max(self) -> float:
        """Seconds from a check to its act in which no other leader can have begun: the margin."""
        return self.ttl / 20


@dataclass(slots=True)
class Struck:
    """What became of all faults of one kind."""

    faults: int = 0
    fail_overs: list[float] = field(default_factory=list)
    """For each name that got another term: the seconds from the beginning of the fault until that term's first act."""
    led_after: list[float] = field(default_factory=list)
    """For each fault: the seconds from its end until every name was led."""


class ElectionSetup:
    """The candidates, their acts, and what befalls them."""

    def __init__(self, acts: Acts, candidates: Sequence[Candidate], load: Load, seed: int) -> None:
        self.acts = acts
        self.candidates = candidates
        self.load = load
        self.rng = random.Random(seed)
        self.struck: defaultdict[str, Struck] = defaultdict(Struck)

    # --- faults of candidates ---

    async def busiest(self) -> Candidate:
        """Return the candidate that leads the most names."""
        led = [act.process for act in (await self.acts.leaders()).values()]
        return max(self.candidates, key=lambda candidate: led.count(candidate.process.pid))

    async def kill(self) -> None:
        """Kill one with ``kill -9``, and start another in its place."""
        (await self.busiest()).restart()

    async def leave(self) -> None:
        """End one with SIGTERM, so that it releases what it has, and start another in its place."""
        candidate = await self.busiest()
        candidate.process.terminate()
        await asyncio.to_thread(candidate.process.wait, PATIENCE)
        candidate.restart()

    async def stop(self) -> None:
        """Stop one with SIGSTOP, past its leases; it goes on right after others have begun to act."""
        process = (await self.busiest()).process
        process.send_signal(signal.SIGSTOP)
        try:
            await self.deposed(process.pid)
        finally:
            process.send_signal(signal.SIGCONT)

    async def black_hole(self) -> None:
        """Hold back everything between one and the store until others lead: no answer, and no error."""
        candidate = await self.busiest()
        for proxy in candidate.proxies:
            proxy.stall()
        try:
            await self.deposed(candidate.process.pid)
        finally:
            for proxy in candidate.proxies:
                proxy.heal()

    async def lose_answers(self) -> None:
        """Carry out the requests of one, and lose the answers, for longer than a lease.

        What it asks for meanwhile it may get, and not know: so others need not lead before the end.
        """
        candidate = await self.busiest()
        for proxy in candidate.proxies:
            proxy.lose_answers(by="stall")
        await asyncio.sleep(self.load.ttl * 1.25)
        for proxy in candidate.proxies:
            proxy.heal()

    async def reset(self) -> None:
        """Reset all connections of all."""
        for candidate in self.candidates:
            for proxy in candidate.proxies:
                proxy.reset()

    @property
    def faults_of_candidates(self) -> dict[Fault, bool]:
        """The faults, and whether each deposes a leader for certain."""
        return {self.kill: True, self.stop: True, self.black_hole: True, self.lose_answers: False, self.reset: False}

    # --- running ---

    async def deposed(self, pid: int) -> None:
        """Wait until other processes have acted for every name that *pid* led last."""
        led = [name for name, act in (await self.acts.leaders()).items() if act.process == pid]

        async def others_lead() -> bool:
            leaders = await self.acts.leaders()
            return all(leaders[name].process != pid for name in led)

        await until(others_lead, what=f"others to lead what process {pid} led")

    async def all_lead(self) -> float:
        """Wait until every name has been acted for since now; return how long that took."""
        begun = time.monotonic()
        seen = await self.acts.counts()

        async def acted() -> bool:
            counts = await self.acts.counts()
            return sum(count > seen.get(name, 0) for name, count in counts.items()) == self.load.names

        await until(acted, what="every name to be led")
        return time.monotonic() - begun

    async def balanced(self) -> float:
        """Wait until all candidates act, for as many names each, to one; return how long that took."""
        begun = time.monotonic()

        async def is_balanced() -> bool:
            owned = Counter(act.process for act in (await self.acts.leaders()).values())
            counts = [owned[candidate.process.pid] for candidate in self.candidates]
            return sum(counts) == self.load.names and max(counts) - min(counts) <= 1

        await until(is_balanced, what="the names to be shared in balance")
        return time.monotonic() - begun

    async def strike(self, fault: Fault, *, deposes: bool = False) -> None:
        """Let *fault* happen, and wait until every name is led again; if it *deposes*, some name has a new leader."""
        kind = fault.__name__
        before, begun, took = await self.acts.leaders(), time.monotonic(), dict[str, float]()
        is_over = asyncio.Event()  # a cancellation might be taken for one of a Redis request
        watch = asyncio.create_task(self._note_fail_overs(before, begun, took, is_over))
        try:
            await fault()
            lasted = time.monotonic() - begun
            led_after = await self.all_lead()
            if self.load.is_shared:
                await self.balanced()
        finally:
            is_over.set()
            await watch
        struck = self.struck[kind]
        struck.faults += 1
        struck.fail_overs += took.values()
        struck.led_after.append(led_after)
        print(
            f"{kind} ({lasted:.1f} s): {len(took)} of {self.load.names} fail over; all led {led_after:.1f} s after",
            flush=True,
        )
        assert took or not deposes, f"no name got another leader by {kind}"

    async def _note_fail_overs(
        self, before: Mapping[str, Act], begun: float, took: dict[str, float], is_over: asyncio.Event
    ) -> None:
        """Note in *took* for each name how long after *begun* it was acted for in another term than *before*."""
        is_last = False
        while not is_last:
            is_last = is_over.is_set()  # all names may have got their new terms since the last look
            for name, act in (await self.acts.leaders()).items():
                if name not in took and act.token != before[name].token:
                    took[name] = time.monotonic() - begun
            await asyncio.sleep(0.01)

    async def judge(self) -> None:
        """Check that no leader acted after the next one had, but in a paused process; and none under the fence."""
        acts, accepted, paused = [await self.acts.all(kind) for kind in ("acts", "accepted", "paused")]
        terms = {(act.name, act.token) for act in acts}
        unguarded = late(acts)
        # A process that was stopped or not scheduled between check and act can't know; the fence does.
        unexplained = [act for act in unguarded if act not in set(paused)]
        for kind, struck in self.struck.items():
            slowest = max(struck.fail_overs, default=0.0)
            print(
                f"{kind}: {struck.faults} faults, {len(struck.fail_overs)} fail-overs in {slowest:.1f} s at most; all "
                f"led {max(struck.led_after):.1f} s after"
            )
        print(
            f"{len(acts)} acts in {len(terms)} terms; acts of an old leader after the next one's: "
            f"{len(late(accepted))} guarded; unguarded: {len(unguarded) - len(unexplained)} in paused processes, "
            f"{len(unexplained)} in others",
            flush=True,
        )
        assert UNEXPECTED not in self.acts.log.read_text()
        assert late(accepted) == []
        assert unexplained == []
        assert len({(act.name, act.token, act.process) for act in acts}) == len(terms)  # no token was given twice


@asynccontextmanager
async def standing(acts: Acts, candidates: Sequence[Candidate], load: Load, seed: int) -> AsyncIterator[ElectionSetup]:
    """Yield *candidates* when they lead every name; end them afterwards."""
    try:
        setup = ElectionSetup(acts, candidates, load, seed)
        await setup.all_lead()
        yield setup
    finally:
        for candidate in candidates:
            candidate.end()


@asynccontextmanager
async def standing_behind_proxies(
    url: Callable[[Sequence[int]], str], ports: Sequence[int], load: Load, seed: int
) -> AsyncIterator[ElectionSetup]:
    """Yield candidates that lead every name, each with its own proxies for the servers on *ports*.

    *url* returns the URL with the ports of a candidate's proxies.
    """
    async with recorded() as acts, AsyncExitStack() as stack:
        candidates = []
        for _ in range(CANDIDATES):
            proxies = [await stack.enter_async_context(FaultProxy("127.0.0.1", port)) for port in ports]
            candidates.append(Candidate(url([proxy.port for proxy in proxies]), proxies, acts, load))
        async with standing(acts, candidates, load, seed) as setup:
            yield setup


async def elect_through_faults(server: Server, load: Load, rounds: int, seed: int) -> ElectionSetup:
    """Let every fault befall candidates and *server* in each round; check what the leaders did."""

    def url(ports: Sequence[int]) -> str:
        through = server.url.replace(f":{server.port}", f":{ports[0]}")
        return f"{through}{'&' if '?' in through else '?'}timeout=1"

    async with standing_behind_proxies(url, [server.port], load, seed) as setup:

        async def restart() -> None:
            server.kill()
            await asyncio.sleep(setup.rng.uniform(0.0, load.ttl))
            await asyncio.to_thread(server.start)

        for _ in range(rounds):
            for fault, deposes in setup.faults_of_candidates.items():
                await setup.strike(fault, deposes=deposes)
            await setup.strike(restart)
        await setup.judge()
        return setup


def parsed(lines: Sequence[str]) -> list[Act]:
    rows = (line.split() for line in lines)
    return [Act(name, int(token), int(process), int(number)) for name, token, process, number in rows]


def late(acts: Sequence[Act]) -> list[Act]:
    """Return the acts of an old term after a newer one had begun to act."""
    newest: dict[str, int] = {}
    found = []
    for act in acts:
        if act.token < newest.get(act.name, 0):
            found.append(act)
        newest[act.name] = max(act.token, newest.get(act.name, 0))
    return found
