"""What the pictures of docs/concepts.md show: runs of the real machines and of the store in memory, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tenure._backends.memory.client import Claim, Memory
from tenure._backends.memory.leases import MemoryLeases
from tenure._backends.memory.queue import MemoryBroker
from tenure._election import effects as election
from tenure._election.machine import Machine, State
from tenure._lease import Grant, Granted, HeldBy, Released, trusted_until
from tenure._queue.broker import EVERY_LIVE, Selection
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    GiveBack,
    Settled,
    Settlement,
    Verdict,
)
from tenure._timing import Timing
from tenure.backends.sqlite import Fence
from tenure.errors import TermLost
from tenure.testing import ManualClock
from tenure.testing._sim.elections.parts import Parts
from tenure.testing._sim.elections.script import Zeros, play
from tenure.testing._sim.elections.simulation import Simulation
from tenure.testing.loop import VirtualClock, run
from tests.sim.partitions import QUIET, Fleet

SCENARIOS = Path(__file__).resolve().parent.parent / "tests" / "scenarios"

NAME, TOKEN_BEFORE, DELAY = "report", 32, 0.25
"""The election, the newest token before it, and the seconds that a request takes to the store, and an answer back."""


# --- one lease ------------------------------------------------------------------------------------------------------


class LeaseTimes(NamedTuple):
    """The moments of one lease whose renewals get no answer, in seconds after the question."""

    asked: float
    executed: float
    granted: float
    renewals: tuple[float, ...]
    cancelled: float
    trusted_until: float
    ends_earliest: float
    """When the lease ends if the store executed the question at once, and its clock is the fastest that is allowed."""
    ends: float


def lease_times(delay: float = 0.5) -> LeaseTimes:
    """Let the machine of one candidate win; then nothing is answered any more."""
    timing = Timing()
    machine = Machine(NAME, "a", timing, Zeros(), hints=True, now=0.0)
    (ask,) = machine.handle(election.Tick(), 0.0)
    assert isinstance(ask, election.Acquire)
    grant = Grant(NAME, ask.holder, TOKEN_BEFORE + 1)
    machine.handle(election.Answered(ask.request_id, Granted(grant)), 2 * delay)
    until = machine.trusted_until
    assert until == trusted_until(0.0, timing.ttl, timing.drift, timing.margin)
    renewals, now = [], 0.0
    while machine.state is not State.RESIGNING:
        now = machine.wake_at
        renewals += [now for effect in machine.handle(election.Tick(), now) if isinstance(effect, election.Renew)]
    earliest = timing.ttl - timing.drift * timing.ttl
    return LeaseTimes(0.0, delay, 2 * delay, tuple(renewals), now, until, earliest, delay + timing.ttl)


# --- two candidates -------------------------------------------------------------------------------------------------


class Happened(NamedTuple):
    """Something that a candidate, the store or the resource did, or noticed, at a moment of virtual time."""

    at: float
    who: str
    what: str
    token: int = 0


class Candidate:
    """The real machine on a virtual loop. Its requests reach the store in memory unless it is cut off."""

    def __init__(self, name: str, leases: MemoryLeases, log: Callable[..., None], work: Callable[[int], None]) -> None:
        self.name, self._leases, self._log, self._work = name, leases, log, work
        loop = asyncio.get_running_loop()
        self._clock = VirtualClock(loop)
        # The store gives hints; but a lease that runs out gives none, so none is needed here.
        self._machine = Machine(NAME, name, Timing(), random.Random(3), hints=True, now=loop.time())
        self._inputs: asyncio.Queue[election.Input] = asyncio.Queue()
        self._requests: set[asyncio.Task[None]] = set()
        self.cut_off = asyncio.Event()
        self.runs = asyncio.Event()
        """Not set while the process is paused."""
        self.runs.set()

    async def run(self) -> None:
        """Drive the machine, as tenure's driver does."""
        while True:
            event: election.Input = election.Tick()
            wake_at = self._machine.wake_at
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(wake_at if wake_at < math.inf else None):
                    event = await self._inputs.get()
            await self.runs.wait()
            for effect in self._machine.handle(event, self._clock.now()):
                self._perform(effect)

    def _perform(self, effect: election.Effect) -> None:
        match effect:
            case election.Acquire() | election.Inspect() | election.Renew() | election.Release():
                request = asyncio.ensure_future(self._ask(effect))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
            case election.StartWork(grant, until):
                self._log(self.name, "began", grant.token)
                self._log(self.name, "trusted until", grant.token, until)
                self._work(grant.token)
            case election.Trust(token, until) if until > self._clock.now():
                self._log(self.name, "trusted until", token, until)
            case election.CancelWork(token, _):
                self._log(self.name, "cancelled", token)
                ended = election.WorkEnded(token)
                asyncio.get_running_loop().call_later(Timing().grace / 2, self._work_ended, ended)
            case _:
                pass

    def _work_ended(self, ended: election.WorkEnded) -> None:
        self._log(self.name, "work ended", ended.token)
        self._inputs.put_nowait(ended)

    async def _ask(self, question: election.Acquire | election.Inspect | election.Renew | election.Release) -> None:
        self._log(self.name, f"asked to {type(question).__name__.lower()}")
        await asyncio.sleep(DELAY)
        if self.cut_off.is_set():
            return  # the machine does not need to be told: it counts the time
        answer: election.Answer
        match question:
            case election.Acquire(_, holder):
                answer = await self._leases.acquire(NAME, holder, Timing().ttl)
                if isinstance(answer, Granted):
                    self._log("store", "granted", answer.grant.token)
            case election.Inspect():
                answer = await self._leases.inspect(NAME)
            case election.Renew(_, grant):
                (answer,) = await self._leases.renew([grant], Timing().ttl)
            case election.Release(_, grant):
                answer = await self._leases.release(grant)
        await asyncio.sleep(DELAY)
        if self.cut_off.is_set():
            return
        if isinstance(answer, HeldBy):
            self._log(self.name, "refused")
        await self.runs.wait()
        self._inputs.put_nowait(election.Answered(question.request_id, answer))
        assert not isinstance(answer, Released)  # the pictures show leases that run out


def two_candidates(*, fault: str, at: float, until: float, length: float = 18.5) -> list[Happened]:
    """Let ``a`` win and ``b`` stand by; then ``a`` is ``cut off``, or ``paused``, from *at* on until *until*.

    Each leader writes to one resource when its term begins, through a fence. One that is paused writes once more when
    it goes on: it had checked its term just before.
    """
    log: list[Happened] = []

    async def main(connection: sqlite3.Connection) -> None:
        loop = asyncio.get_running_loop()

        def note(who: str, what: str, token: int = 0, moment: float | None = None) -> None:
            log.append(Happened(loop.time() if moment is None else moment, who, what, token))

        def write(token: int) -> None:
            try:
                with connection:
                    Fence(connection).check(NAME, token)
                    connection.execute("INSERT INTO report VALUES (?)", (token,))
                note("resource", "written", token)
            except TermLost as refused:
                note("resource", f"refused: {refused}", token)

        memory = Memory()
        memory.claims[NAME] = Claim(TOKEN_BEFORE)
        leases = MemoryLeases(VirtualClock(loop), memory)
        first, second = (Candidate(name, leases, note, write) for name in "ab")
        tasks = [asyncio.ensure_future(first.run())]
        await asyncio.sleep(DELAY)  # so the first question to arrive is that of a
        tasks.append(asyncio.ensure_future(second.run()))
        await asyncio.sleep(at - loop.time())
        note("a", fault)
        note("store", "lease ends", TOKEN_BEFORE + 1, memory.claims[NAME].expires_at)
        if fault == "cut off":
            first.cut_off.set()
        else:
            first.runs.clear()
        await asyncio.sleep(until - loop.time())
        if fault == "paused":
            note("a", "goes on")
            write(TOKEN_BEFORE + 1)
            first.runs.set()
        await asyncio.sleep(length - loop.time())
        for task in tasks:
            task.cancel()

    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(Path(folder, "report.db"))) as connection:
        connection.execute("CREATE TABLE report (token INTEGER)")
        connection.commit()
        run(main(connection), seed=1)
    return sorted(log, key=lambda one: one.at)


# --- the states of a candidate --------------------------------------------------------------------------------------


def causes_of_changes(seeds: Iterable[int]) -> dict[tuple[State, State], set[str]]:
    """Return which inputs and answers change the state of a candidate, and how: in tests/scenarios, and simulated."""
    found: dict[tuple[State, State], set[str]] = defaultdict(set)

    class Watched(Machine):
        cause: object = None

        def handle(self, event: election.Input, now: float) -> list[election.Effect]:
            self.cause = event.answer if isinstance(event, election.Answered) else event
            return super().handle(event, now)

        def _check_expiry(self, now: float, effects: list[election.Effect]) -> None:
            cause, self.cause = self.cause, election.Tick()  # whatever came: it is time that ends the term
            super()._check_expiry(now, effects)
            self.cause = cause

        def _on_tick(self, now: float, effects: list[election.Effect]) -> None:
            self.cause = election.Tick()  # a hint only makes it time for what is done anyway
            super()._on_tick(now, effects)

        def _set_state(self, to: State) -> None:
            found[self.state, to].add(type(self.cause).__name__)
            super()._set_state(to)

    for path in sorted(SCENARIOS.glob("*.txt")):
        play(path.read_text(encoding="utf-8"), machine=Watched)
    for seed in seeds:
        Simulation(seed, parts=Parts(machine=Watched)).run()
    return found


# --- a message ------------------------------------------------------------------------------------------------------

QUEUE, LOCK, DELIVERIES, LATER = "orders", 30.0, 2, 60.0
"""A queue, and in it the length of a lock, the deliveries of a message, and a delay or a time to expire."""


class Change(NamedTuple):
    """An act of a client or of time on a message in one state, and the state that follows."""

    before: str
    act: str
    after: str


class OneMessage:
    """One message in the store in memory; its methods bring it from state to state."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._broker = MemoryBroker(self._clock)
        self._delivery: Delivery | None = None

    async def send(self, *, delay: float = 0.0, expires_in: float | None = None) -> None:
        """Send it."""
        await self._broker.declare(QUEUE, {"max_deliveries": DELIVERIES})
        await self._broker.send(QUEUE, [Outgoing(b"tea", delay=delay, expires_in=expires_in)])

    async def receive(self) -> None:
        """Receive it."""
        claim = await self._broker.receive(QUEUE, 1, LOCK)
        (self._delivery,) = claim.deliveries

    async def complete_dead(self) -> None:
        """Receive it from the dead letters, and complete it there."""
        (self._delivery,) = (await self._broker.receive(dead_letters_of(QUEUE), 1, LOCK)).deliveries
        await self.settle(Complete())

    async def receive_by_sequence(self) -> None:
        """Receive it although it is deferred."""
        assert self._delivery is not None
        (self._delivery,) = (await self._broker.receive_deferred(QUEUE, [self._delivery.sequence], LOCK)).deliveries

    async def settle(self, verdict: Verdict) -> None:
        """Pass a verdict on its delivery."""
        assert self._delivery is not None
        (answer,) = await self._broker.settle([Settlement(self._delivery, verdict)])
        assert isinstance(answer, Settled), answer

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._clock.advance(seconds)

    async def redrive(self) -> None:
        """Put it back from the dead letters."""
        assert await self._broker.redrive(QUEUE, Selection(), None) == 1

    async def purge(self) -> None:
        """Remove it from the dead letters."""
        assert await self._broker.purge(QUEUE, Selection(), None) == 1

    async def to(self, state: str, *, expires_in: float | None = None) -> None:
        """Bring it into *state* on the usual way."""
        if state == NEW:
            return
        await self.send(delay=LATER if state == "delayed" else 0.0, expires_in=expires_in)
        if state in ("locked", "deferred", DEAD):
            await self.receive()
        if state == "deferred":
            await self.settle(Defer())
        if state == DEAD:
            await self.settle(DeadLetter("unreadable"))

    async def state(self) -> str:
        """Return where it is."""
        shown = await self._broker.peek(QUEUE, EVERY_LIVE, 1)
        if shown:
            return shown[0].state
        return DEAD if (await self._broker.stats(QUEUE)).dead else GONE


NEW, DEAD, GONE = "new", "dead", "gone"
EXPIRES = "time: expires_in"
Act = Callable[[OneMessage], Awaitable[object]]


def _verdict(verdict: Verdict) -> Act:
    return lambda message: message.settle(verdict)


async def _at_the_last_delivery(message: OneMessage, act: Act) -> None:
    await message.settle(Abandon())
    await message.receive()
    await act(message)


VERDICTS: list[tuple[Verdict, str]] = [
    (Complete(), "Complete"),
    (Abandon(), "Abandon"),
    (Abandon(LATER), "Abandon, delay"),
    (GiveBack(), "GiveBack"),
    (Defer(), "Defer"),
    (DeadLetter("unreadable"), "DeadLetter"),
]
"""Every verdict; one that may lead to several states is there once for each."""

ACTS: list[tuple[str, str, Act]] = [
    (NEW, "send", lambda message: message.send()),
    (NEW, "send, delay", lambda message: message.send(delay=LATER)),
    ("delayed", "time: delay", lambda message: message.wait(LATER)),
    ("delayed", EXPIRES, lambda message: message.wait(LATER / 2)),
    ("ready", "receive", lambda message: message.receive()),
    ("ready", EXPIRES, lambda message: message.wait(LATER / 2)),
    *[("locked", name, _verdict(verdict)) for verdict, name in VERDICTS],
    ("locked", "time: lock", lambda message: message.wait(LOCK)),
    ("locked", "Abandon, last", partial(_at_the_last_delivery, act=_verdict(Abandon()))),
    ("locked", "time: lock, last", partial(_at_the_last_delivery, act=lambda message: message.wait(LOCK))),
    ("deferred", "receive by sequence", lambda message: message.receive_by_sequence()),
    (DEAD, "redrive", lambda message: message.redrive()),
    (DEAD, "purge", lambda message: message.purge()),
    (DEAD, "Complete, dead", lambda message: message.complete_dead()),
]


def life_of_a_message() -> list[Change]:
    """Do each of ``ACTS`` to a message in the store in memory; return where it is after that."""

    async def main() -> list[Change]:
        changes = []
        for before, name, act in ACTS:
            message = OneMessage()
            await message.to(before, expires_in=LATER / 2 if name == EXPIRES else None)
            await act(message)
            changes.append(Change(before, name, await message.state()))
        return changes

    return asyncio.run(main())


# --- partitions -----------------------------------------------------------------------------------------------------


@dataclass
class Shares:
    """When each partition was worked on, and by which member; and the moments of two changes of the members."""

    partitions: tuple[str, ...]
    spans: dict[str, list[tuple[float, float, int]]]
    """By partition: from, to, and the number of the member."""
    joined: float
    killed: float
    end: float


@cache
def shares_over_time(partitions: int = 12) -> Shares:
    """Let three members share partitions; a fourth joins, then the first is killed."""
    fleet = Fleet(5, drawn=replace(QUIET, partitions=partitions))
    for _ in range(3):
        fleet.join()
        fleet.until(fleet.now + 3.0)  # one after the other
    fleet.until(100.0)
    start, step = fleet.now, 0.05
    joined, killed, end = start + 5.0, start + 15.0, start + 35.0
    fleet.at(joined, fleet.join)
    fleet.at(killed, lambda: fleet.kill(fleet.members[0]))
    spans: dict[str, list[tuple[float, float, int]]] = {name: [] for name in fleet.layout.partitions}
    while fleet.now < end:
        fleet.until(fleet.now + step)
        for member in fleet.members:
            for work in member.running:
                assert work.partition is not None
                _extend(spans[work.partition], fleet.now - start, step, member.number)
    assert not fleet.findings, fleet.findings
    assert fleet.is_balanced
    return Shares(fleet.layout.partitions, spans, joined - start, killed - start, end - start)


def _extend(spans: list[tuple[float, float, int]], now: float, step: float, member: int) -> None:
    """Note that *member* works on a partition *now*: a new span, unless it did so one *step* ago."""
    if spans and spans[-1][2] == member and now - spans[-1][1] < 1.5 * step:
        spans[-1] = (spans[-1][0], now, member)
    else:
        spans.append((now - step, now, member))
