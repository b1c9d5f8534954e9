"""The settings that one seed draws for a run of elections."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tenure._timing import Timing
from tenure.testing._sim.network import Conditions, draw_conditions
from tenure.testing._sim.world import rate

TIMINGS: tuple[Timing, ...] = (
    Timing(),
    Timing(ttl=6.0),
    Timing(ttl=2.0),
    Timing(ttl=60.0, renew_every=10.0, grace=10.0),
    Timing(ttl=10.0, renew_every=2.0, retry_every=0.5, drift=0.2, margin=0.5, grace=1.0),
    Timing(ttl=15.0, drift=0.0, margin=0.0),  # equal clocks: only counting from the question keeps it safe
    Timing(ttl=9.0, renew_every=1.0, retry_every=3.0, drift=0.0, margin=0.0, grace=0.0),
    Timing(ttl=15.0, drift=0.1, margin=0.0, grace=0.5),
    Timing(ttl=5.0, renew_every=1.0, retry_every=0.25, drift=0.02, margin=0.1, grace=0.0),
)
"""Settings a run may have; every one is valid, some just so."""

FAULTS: tuple[str, ...] = (
    "pause",
    "kill",
    "cut_up",
    "cut_down",
    "cut_off",
    "store_down",
    "store_frozen",
    "store_forgets",
    "store_slow",
    "lossy",
    "stall",
    "resign",
    "ask_to_resign",
    "stop",
    "false_hint",
    "together",
)
"""What may go wrong, or be asked for; each seed has a part of them, so that rare combinations occur."""


USER_FAULTS: tuple[str, ...] = (
    "health_raises",
    "health_hangs",
    "work_raises",
    "event_hook_raises",
    "event_hook_blocks",
)
"""What the work, its health callback and the event hook may do; half the seeds have none of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The setting of one run. Rates and offsets are those of the hosts' clocks; times are in true seconds.

    ``oldest`` is the share of ``ttl`` by which a grant may count from before its request; 0 if none does. If
    ``half_cut``, one host gets no answers and no hints after the faults either, though its requests arrive.
    """

    nodes: int
    timing: Timing
    hints: bool
    hints_expiry: bool
    watched: bool
    queued: bool
    oldest: float
    shows_remaining: bool
    store_rate: float
    rates: tuple[float, ...]
    offsets: tuple[float, ...]
    conditions: Conditions
    patience: float
    ignores: float
    overrun_exits: bool
    turnover: float
    faults: tuple[str, ...]
    fault_every: float
    seconds: float
    half_cut: bool

    def __str__(self) -> str:
        store = "watched" if self.watched else "queued" if self.queued else "clock"
        hints = "hints" if self.hints else "no hints"
        old = ", old grants" if self.oldest else ""
        cut = ", one is half cut" if self.half_cut else ""
        return f"{self.nodes} nodes, ttl {self.timing.ttl:g} s, {store} store, {hints}{old}{cut}"


OLDEST_STABLE = 0.55
"""The share of ``ttl`` by which all grants may count from before their requests, while a leader still lasts."""
OLDEST: tuple[float, ...] = (0.2, OLDEST_STABLE, 0.95)
"""Such shares while there are faults; with the last, some grants leave no time to lead."""


HALF_CUT = 0.2
"""The share of the runs in which one host stays half cut."""


def draw(
    rng: random.Random, users: random.Random, queues: random.Random, ages: random.Random, cuts: random.Random
) -> Plan:
    """Draw the setting of a run.

    Args:
        rng: Draws what isn't drawn by another.
        users: Draws how user code misbehaves.
        queues: Draws whether the store has a queue.
        ages: Draws whether grants count from before their requests.
        cuts: Draws whether a host stays half cut.
    """
    timing = rng.choice(TIMINGS)
    ttl = timing.ttl
    nodes = rng.randint(2, 7)
    # Any two clocks keep the promise: neither runs slower than the other by more than drift.
    slowest = rng.uniform(0.9, 1.0)
    fastest = slowest / (1.0 - timing.drift)
    faulty = rng.random() < 0.9
    plan = Plan(
        nodes=nodes,
        timing=timing,
        hints=rng.random() < 0.5,
        hints_expiry=rng.random() < 0.5,
        watched=rng.random() < 0.25,
        queued=False,
        oldest=0.0,
        shows_remaining=rng.random() < 0.7,
        store_rate=rate(rng, fastest, slowest),
        rates=tuple(rate(rng, slowest, fastest) for _ in range(nodes)),
        offsets=tuple(rng.uniform(-1000.0, 1000.0) for _ in range(nodes)),
        conditions=draw_conditions(rng, ttl, (0.0, 0.02, 0.1), faulty=faulty),
        patience=rng.choice((0.8 * timing.retry_every, 1.5 * timing.retry_every, 4.0 * ttl)),
        ignores=rng.choice((0.0, 0.1, 0.4)),
        overrun_exits=rng.random() < 0.4,
        turnover=rng.choice((0.0, 0.4, 0.9)),
        faults=(*(fault for fault in FAULTS if rng.random() < 0.5), *_user_faults(users)),
        fault_every=ttl * rng.choice((0.15, 0.3, 0.8)),
        seconds=16.0 * ttl,
        half_cut=cuts.random() < HALF_CUT,
    )
    queued = queues.random() < 0.25 and not plan.watched
    return replace(plan, queued=queued, oldest=0.0 if plan.watched else _oldest(ages))


def _oldest(rng: random.Random) -> float:
    return rng.choice(OLDEST) if rng.random() < 0.25 else 0.0


def _user_faults(rng: random.Random) -> tuple[str, ...]:
    return tuple(fault for fault in USER_FAULTS if rng.random() < 0.6) if rng.random() < 0.5 else ()
