"""A fleet of candidates and consumers on one store, in virtual time: the requests that the store gets.

``python -m tests.sim.fleet --candidates 10000 --consumers 1000`` prints the figures of docs/scale.md. The machines of
the candidates and the consumers are the real ones. The store is modelled: it takes a constant time for each request,
one after the other, and refuses all while it is away. Each candidate and each consumer is a process of its own, with
one connection that listens for hints; it is opened again as the clients of PostgreSQL and Redis do it. Clocks run
alike.

A request counts at the moment at which it reaches the store. The peak is the largest number in any second.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tenure._election import effects as election
from tenure._election.acquire_times import outage_pause
from tenure._election.machine import Machine
from tenure._lease import NO_METADATA, Grant, NoAnswer
from tenure._queue import effects as queue
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._timing import Timing
from tests.sim.partitions import Store

NETWORK = 0.0005
"""Seconds from a process to the store, and back."""

LISTEN_FIRST, LISTEN_MAX = 0.05, 5.0
"""Seconds between two attempts to listen again: from the first they double up to the second."""

BUCKET = 0.1
"""Seconds that are counted together; a peak is that of ten of them."""

REST_PEAK_MAX, BACK_PEAK_MAX = 3.8, 4.6
"""The peaks at rest and after an outage, as multiples of the mean rate at rest, that are still in order. After an
outage, a candidate looks who has the name before it asks for one that is free."""

KILLED_PEAK_MAX, RESIGNED_PEAK_MAX = 0.7, 2.2
"""The peaks when a name becomes vacant, for each candidate: two hints come, of the release and of the next leader."""

REPLACED_AFTER = 5.0
"""Seconds after which a candidate that was killed is started again."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a fleet, and what its store does."""

    candidates: int = 1_000
    consumers: int = 100
    per_name: int = 0
    """How many candidates an election has; 0 for all."""
    hints: bool = True
    ttl: float = 15.0
    service: float = 0.0001
    """Seconds that the store takes for one request."""
    seed: int = 0


class Load:
    """Requests, counted by the time at which they come."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(self, at: float) -> None:
        bucket = int(at / BUCKET)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def _between(self, begin: float, end: float) -> list[int]:
        return [self._counts.get(one, 0) for one in range(int(begin / BUCKET), int(end / BUCKET))]

    def rate(self, begin: float, end: float) -> float:
        """Return how many came in a second, from *begin* to *end*."""
        return sum(self._between(begin, end)) / (end - begin)

    def peak(self, begin: float, end: float) -> int:
        """Return the largest number in any second from *begin* to *end*."""
        counts, second = self._between(begin, end), round(1 / BUCKET)
        return max(sum(counts[at : at + second]) for at in range(max(1, len(counts) - second + 1)))


class Process(Protocol):
    """A process with one machine, which listens for hints."""

    is_alive: bool
    is_listening: bool
    pause: float
    """Until the next attempt to listen."""

    def hint(self) -> None: ...


@dataclass(slots=True, eq=False)
class Candidate:
    """A process that campaigns for one name."""

    fleet: Fleet
    name: str
    machine: Machine
    is_alive: bool = True
    is_listening: bool = True
    pause: float = LISTEN_FIRST
    epoch: int = 0

    def hint(self) -> None:
        self.feed(election.Hint())

    def feed(self, event: election.Input) -> None:
        """Give *event* to the machine, perform its effects, and set its alarm."""
        if not self.is_alive:
            return
        fleet = self.fleet
        for effect in self.machine.handle(event, fleet.now):
            match effect:
                case election.Acquire(request, holder):
                    self._ask(request, partial(fleet.acquire, self.name, holder))
                case election.Inspect(request):
                    self._ask(request, partial(fleet.inspect, self.name))
                case election.Renew(request, grant):
                    self._ask(request, partial(fleet.renew, grant))
                case election.Release(request, grant):
                    self._ask(request, partial(fleet.release, grant))
                case election.StartWork(grant):
                    fleet.began(self, grant.token)
                case election.CancelWork(token):
                    fleet.at(fleet.now + 0.01, partial(self.feed, election.WorkEnded(token, again=True)))
                case _:
                    pass
        self.epoch += 1
        fleet.alarm(self.machine.wake_at, partial(self._wake, self.epoch))

    def _wake(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.feed(election.Tick())

    def _ask(self, request: int, act: Callable[[], election.Answer]) -> None:
        def answered(answer: election.Answer | None) -> None:
            self.feed(election.Answered(request, answer or NoAnswer("the store is away")))

        self.fleet.ask(act, answered)


@dataclass(slots=True, eq=False)
class Consumer:
    """A process that waits for the messages of a queue, of which there are none."""

    fleet: Fleet
    pump: Pump
    is_alive: bool = True
    is_listening: bool = True
    pause: float = LISTEN_FIRST
    epoch: int = 0

    def hint(self) -> None:
        self.feed(queue.Hint())

    def feed(self, event: queue.PumpInput) -> None:
        """Give *event* to the pump, perform its effects, and set its alarm."""
        fleet = self.fleet
        for effect in self.pump.handle(event, fleet.now):
            if isinstance(effect, queue.Receive):
                request = effect.request_id
                fleet.ask(partial(queue.Claimed, request, ()), partial(self._answered, request), fleet.claims)
        self.epoch += 1
        fleet.alarm(self.pump.wake_at, partial(self._wake, self.epoch))

    def _wake(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.feed(queue.Tick())

    def _answered(self, request: int, claimed: queue.Claimed | None) -> None:
        self.feed(claimed or queue.Answered(request, NoAnswer("the store is away")))


class Fleet:
    """All processes and their store.

    Args:
        shape: How many there are.
        make_machine: Another one has planted bugs.
    """

    def __init__(self, shape: Shape, make_machine: type[Machine] = Machine) -> None:
        self.shape = shape
        self.now = 0.0
        self.timing = Timing(shape.ttl)
        self.requests = Load()
        """What reached the store."""
        self.claims = Load()
        """Those of consumers."""
        self.attempts = Load()
        """What would have, while it was away."""
        self.connections = Load()
        """Connections that were opened again."""
        self.took: list[float] = []
        """How long each vacancy lasted, from a kill to the next term."""
        self.candidates: list[Candidate] = []
        self.consumers: list[Consumer] = []
        self.leaders: dict[str, tuple[Candidate, int]] = {}
        self._rng = random.Random(shape.seed)
        self._make_machine = make_machine
        self._store = Store()
        self._store.changed = self._changed
        self._by_name: dict[str, list[Candidate]] = {}
        self._vacant_since: dict[str, float] = {}
        self._is_away = False
        self._connection = 0  # all connections are cut when the store goes away; then others are opened
        self._free_at = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    # --- time ---

    def at(self, time: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), act))

    def alarm(self, time: float, act: Callable[[], object]) -> None:
        if time < float("inf"):
            self.at(time, act)

    def until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end

    # --- the processes ---

    def start(self, within: float) -> None:
        """Start all processes, each at a random moment of the next *within* seconds."""
        each = self.shape.per_name or self.shape.candidates
        for number in range(self.shape.candidates):
            name = f"election-{number // each}"
            self.at(self.now + within * self._rng.random(), partial(self._start_candidate, name))
        for number in range(self.shape.consumers):
            self.at(self.now + within * self._rng.random(), partial(self._start_consumer, number))

    def _start_candidate(self, name: str) -> None:
        rng, hints = random.Random(self._rng.random()), self.shape.hints
        holder = f"c-{len(self.candidates)}"
        machine = self._make_machine(name, holder, self.timing, rng, hints=hints, now=self.now)
        candidate = Candidate(self, name, machine, is_listening=not self._is_away)
        self.candidates.append(candidate)
        self._by_name.setdefault(name, []).append(candidate)
        candidate.feed(election.Tick())

    def _start_consumer(self, number: int) -> None:
        settings = PumpSettings(Timing(30.0), hints=self.shape.hints)
        pump = Pump("orders", f"w-{number}", settings, random.Random(self._rng.random()), {}, now=self.now)
        consumer = Consumer(self, pump)
        self.consumers.append(consumer)
        consumer.feed(queue.Tick())

    def kill_leader(self, name: str) -> None:
        """Kill the leader of *name*; another candidate is started in its place."""
        leader, _ = self.leaders.pop(name)
        leader.is_alive = False
        self._by_name[name].remove(leader)
        self._vacant_since[name] = self.now
        self.at(self.now + REPLACED_AFTER, partial(self._start_candidate, name))

    def resign(self, name: str) -> None:
        """Let the leader of *name* resign."""
        leader, _ = self.leaders.pop(name)
        leader.feed(election.Resign())

    def began(self, candidate: Candidate, token: int) -> None:
        self.leaders[candidate.name] = (candidate, token)
        since = self._vacant_since.pop(candidate.name, None)
        if since is not None:
            self.took.append(self.now - since)

    @property
    def names(self) -> list[str]:
        """The names of all elections."""
        return list(self._by_name)

    @property
    def led(self) -> int:
        """How many of them have a leader that trusts its term now."""
        return sum(one.machine.trusted_until > self.now for one, _ in self.leaders.values())

    # --- the store ---

    def ask(self, act: Callable[[], object], answered: Callable[..., object], also: Load | None = None) -> None:
        """Send a request that lets the store *act*; *answered* gets its answer, or None. Count it in *also*, too."""
        arrives = self.now + NETWORK
        if self._is_away:
            self.attempts.note(arrives)
            self.at(arrives + NETWORK, partial(answered, None))
            return
        self.requests.note(arrives)
        if also is not None:
            also.note(arrives)
        self._free_at = max(arrives, self._free_at) + self.shape.service
        connection = self._connection

        def carry_out() -> None:
            answer = act() if connection == self._connection else None
            self.at(self.now + NETWORK, partial(answered, answer))

        self.at(self._free_at, carry_out)

    def acquire(self, name: str, holder: str) -> election.Answer:
        return self._store.acquire(self.now, name, holder, self.shape.ttl, NO_METADATA)

    def inspect(self, name: str) -> election.Answer:
        return self._store.inspect(self.now, name)

    def renew(self, grant: Grant) -> election.Answer:
        return self._store.renew(self.now, grant, self.shape.ttl)

    def release(self, grant: Grant) -> election.Answer:
        return self._store.release(self.now, grant)

    def send(self) -> None:
        """Send a message: a hint reaches each process that consumes its queue."""
        self._hint(self.consumers)

    def _changed(self, name: str) -> None:
        self._hint(self._by_name[name])

    def _hint(self, processes: Iterable[Process]) -> None:
        if self.shape.hints:
            for one in processes:
                if one.is_listening:
                    self.at(self.now + NETWORK, one.hint)

    def go_away(self) -> None:
        """Cut all connections, and refuse new ones."""
        self._is_away, self._connection, self._free_at = True, self._connection + 1, 0.0
        for one in self._listeners():
            one.is_listening, one.pause = False, LISTEN_FIRST
            self._listen_later(one)

    def come_back(self) -> None:
        self._is_away = False

    def _listeners(self) -> list[Process]:
        everyone: Sequence[Process] = [*self.candidates, *self.consumers]
        return [one for one in everyone if one.is_alive] if self.shape.hints else []

    def _listen_later(self, one: Process) -> None:
        self.at(self.now + one.pause * self._rng.uniform(0.5, 1.0), partial(self._listen, one))
        one.pause = min(2 * one.pause, LISTEN_MAX)

    def _listen(self, one: Process) -> None:
        if not one.is_alive:
            return
        if self._is_away:
            self._listen_later(one)
            return
        self.connections.note(self.now)
        one.is_listening = True
        one.hint()  # one may have been missed


@dataclass(slots=True)
class Figures:
    """What was measured; rates and peaks in requests per second."""

    shape: Shape
    rest: float = 0.0
    rest_peak: int = 0
    rest_claims: float = 0.0
    """The part of the consumers."""
    failover: list[float] = field(default_factory=list)
    killed_peak: int = 0
    resigned_peak: int = 0
    message: float = 0.0
    """Requests for each message that is sent to the idle consumers."""
    away: float = 0.0
    """Attempts in a second while the store was away."""
    back_peak: int = 0
    connections_peak: int = 0
    led_after: float = 0.0
    """Seconds from the return of the store until every election had a leader."""

    @property
    def findings(self) -> list[str]:
        """What is worse than it should be."""
        candidates, timing = self.shape.candidates, Timing(self.shape.ttl)
        most = {
            "at rest": (self.rest_peak, REST_PEAK_MAX * self.rest),
            "killed": (self.killed_peak, KILLED_PEAK_MAX * (candidates if self.shape.hints else 2.5 * candidates)),
            "resigned": (self.resigned_peak, RESIGNED_PEAK_MAX * candidates),
            "back": (self.back_peak, BACK_PEAK_MAX * self.rest),
            "fail-over": (max(self.failover, default=0.0), self.failover_max),
            "led again": (self.led_after, 1.2 * outage_pause(timing) + 1.0),
        }
        return [f"{what}: {found:.1f} > {limit:.1f}" for what, (found, limit) in most.items() if found > limit]

    @property
    def failover_max(self) -> float:
        """The longest that a vacancy may last after a kill."""
        timing = Timing(self.shape.ttl)
        return timing.ttl + timing.retry_every

    def __str__(self) -> str:
        shape, took = self.shape, sorted(self.failover)
        cuts = statistics.quantiles(took, n=100, method="inclusive") if len(took) > 1 else [0.0] * 99
        per_name = shape.per_name or shape.candidates
        hints = "hints" if shape.hints else "no hints"
        lines = [
            f"{shape.candidates:,} candidates, {per_name:,} for each name, {shape.consumers:,} consumers, {hints}",
            f"  at rest                    {self.rest:,.0f} /s, {self.rest_claims:,.0f} of them of consumers; "
            f"peak {self.rest_peak:,}",
            f"  a leader is killed         p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, max {took[-1]:.2f} s of "
            f"{self.failover_max:g} s ({len(took)} times); peak {self.killed_peak:,}",
            f"  a leader resigns           peak {self.resigned_peak:,}",
            f"  a message is sent          {self.message:,.0f} requests",
            f"  the store is away          {self.away:,.0f} attempts/s",
            f"  the store is back          peak {self.back_peak:,} requests, {self.connections_peak:,} connections; "
            f"all lead again after {self.led_after:.1f} s",
        ]
        return "\n".join(lines)


def measure(shape: Shape, *, kills: int = 20, away: float = 60.0, make_machine: type[Machine] = Machine) -> Figures:
    """Run a fleet of this *shape* through a quiet time, *kills* of leaders, a resignation and an outage."""
    fleet, found = Fleet(shape, make_machine), Figures(shape)
    ttl, rng = shape.ttl, random.Random(shape.seed)
    fleet.start(within=1.0)
    fleet.until(5 * ttl)
    begin, end = 5 * ttl, 11 * ttl
    fleet.until(end)
    found.rest, found.rest_peak = fleet.requests.rate(begin, end), fleet.requests.peak(begin, end)
    found.rest_claims = fleet.claims.rate(begin, end)

    begin = fleet.now
    names = fleet.names
    rounds, together = (kills, 1) if len(names) == 1 else (1, min(kills, len(names)))
    for _ in range(rounds):
        for name in rng.sample(names, together):
            fleet.at(fleet.now + ttl * rng.random(), partial(fleet.kill_leader, name))
        fleet.until(fleet.now + 4 * ttl)
    found.failover, found.killed_peak = fleet.took, fleet.requests.peak(begin, fleet.now)

    begin = fleet.now
    fleet.at(fleet.now, partial(fleet.resign, names[0]))
    fleet.until(begin + 2 * ttl)
    found.resigned_peak = fleet.requests.peak(begin, fleet.now)

    begin, seconds = fleet.now, 10
    for at in range(seconds):
        fleet.at(begin + at, fleet.send)
    fleet.until(begin + seconds)
    found.message = max(0.0, fleet.claims.rate(begin, fleet.now) - found.rest_claims)

    begin = fleet.now
    fleet.go_away()
    fleet.until(begin + away)
    found.away = fleet.attempts.rate(fleet.now - away / 2, fleet.now)
    begin = fleet.now
    fleet.come_back()
    while fleet.led < len(names):
        fleet.until(fleet.now + BUCKET)
        if fleet.now > begin + 10 * ttl:
            break
    found.led_after = fleet.now - begin
    fleet.until(begin + 6 * ttl)
    found.back_peak = fleet.requests.peak(begin, fleet.now)
    found.connections_peak = fleet.connections.peak(begin, fleet.now)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.fleet", description=__doc__)
    parser.add_argument("--candidates", type=int, default=10_000)
    parser.add_argument("--consumers", type=int, default=1_000)
    parser.add_argument("--per-name", type=int, nargs="*", default=[0, 3], help="candidates of a name, 0 for all (0 3)")
    parser.add_argument("--ttl", type=float, default=15.0)
    parser.add_argument("--service", type=float, default=0.0001, help="seconds of the store for a request (0.0001)")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for per_name in given.per_name:
        for hints in (True, False):
            shape = Shape(given.candidates, given.consumers, per_name, hints, given.ttl, given.service, seed=given.seed)
            kills = given.kills if per_name else max(3, given.kills // 10)
            print(measure(shape, kills=kills), flush=True)


if __name__ == "__main__":
    main()
