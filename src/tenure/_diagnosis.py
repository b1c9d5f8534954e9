"""What ``tenure doctor`` finds out about a backend: its facts, its round trip, and whether it keeps a message."""

from __future__ import annotations

import math
import platform
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tenure._election.store import LeaseStore, LeaseTraits
from tenure._opened import Fact, Opened
from tenure._queue.broker import Broker, QueueTraits
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settled, Settlement
from tenure._runtime.clock import Clock
from tenure.errors import TenureError, Unavailable

TRIAL = "tenure-doctor-"
"""The prefix of the names of queues in which a message is tried."""

FILES_BESIDES = 64
"""Open files to allow for besides the connections to the store: of the program, its loops, other connections."""

QUESTIONS = 5
"""How many questions are asked, one after another, to measure the round trip."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The facts that ``tenure doctor`` found about a backend.

    ``round_trip`` is the median of five questions, in seconds. ``traits`` are those of its elections, ``queues`` those
    of its queues, each None where there are none. ``failure`` is the error that prevented a message from being kept and
    removed again, if that was tried.
    """

    url: str
    """The address, without secrets."""
    round_trip: float
    traits: LeaseTraits | None
    facts: Sequence[Fact]
    """What was found, in the order in which it is shown."""
    queues: QueueTraits | None = None
    failure: TenureError | None = None


async def diagnose(url: str, opened: Opened, clock: Clock, *, write: bool) -> Diagnosis:
    """Return what is found about the store at *url*, which is open; with *write*, also what only a write can find.

    Raises:
        Unavailable: The store could not be asked.
    """
    leases: LeaseStore | None = getattr(opened, "leases", None)
    broker: Broker | None = getattr(opened, "broker", None)
    warnings: Sequence[Fact] = getattr(opened, "warnings", ())
    round_trip = await _round_trip(leases, broker)
    facts = [
        Fact("python", platform.python_version()),
        *await opened.describe(),
        *warnings,
        *_few_files(getattr(opened, "connections_max", 0)),
        Fact("clock", f"{type(clock).__name__}, at {clock.now():.3f} s"),
    ]
    by_writing: Callable[[], Awaitable[Sequence[Fact]]] | None = getattr(opened, "describe_by_writing", None)
    if by_writing is not None and write:
        facts += await by_writing()
    failure = None
    if broker is not None and write:
        asked_at = time.perf_counter()
        failure = await _try_message(broker)
        took = f"works: a message went through in {1_000 * (time.perf_counter() - asked_at):.0f} ms"
        facts.append(Fact("writing", "fails", str(failure), failure.code) if failure else Fact("writing", took))
    queues = broker.traits if broker is not None else None
    return Diagnosis(url, round_trip, leases.traits if leases is not None else None, facts, queues, failure)


def _few_files(connections: int) -> list[Fact]:
    """Return a warning if this process may have too few files open for so many *connections*."""
    limit, needed = most_files(), connections + FILES_BESIDES
    if not connections or limit >= needed:
        return []
    advice = (
        f"its elections and queues may have {connections} connections to this store, and then no file or connection "
        f"can be opened; raise the limit to {needed} at least (ulimit -n)"
    )
    return [Fact("open files", f"{limit:.0f} at most", advice, "few-files")]


def most_files() -> float:
    """Return how many files this process may have open."""
    try:
        import resource  # not on Windows
    except ImportError:
        return math.inf
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if most == resource.RLIM_INFINITY else most


async def _round_trip(store: LeaseStore | None, broker: Broker | None) -> float:
    trips = []
    for _ in range(QUESTIONS):
        asked_at = time.perf_counter()
        if store is not None:
            await store.inspect("tenure-doctor")
        elif broker is not None:
            await broker.stats("tenure-doctor")
        trips.append(time.perf_counter() - asked_at)
    return sorted(trips)[len(trips) // 2]


async def _try_message(broker: Broker) -> TenureError | None:
    """Send, receive and complete a message in a queue of its own, which is deleted; return what prevented it."""
    name = f"{TRIAL}{secrets.token_hex(8)}"
    failure: TenureError | None = None
    try:
        await broker.delete_when_idle(name, 60.0)
        await broker.send(name, [Outgoing(b"trial")])
        got = (await broker.receive(name, 1, max(30.0, broker.traits.lock_min))).deliveries
        answers = await broker.settle([Settlement(one, COMPLETE) for one in got])
        if len(answers) != 1 or not isinstance(answers[0], Settled):
            failure = Unavailable(f"a message that was sent could not be received and completed: {answers!r}")
    except TenureError as error:
        failure = error
    try:
        await broker.delete(name, force=True)
        for left in await broker.idle():
            if left.startswith(TRIAL):  # when the disk was full, it could not be deleted either
                await broker.delete(left, force=True)
    except TenureError as error:
        failure = failure or error
    return failure
