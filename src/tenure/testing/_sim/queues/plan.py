"""The settings that one seed draws for a queue: the plan of a run, its messages, and how long all may take."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tenure._queue.hooks import HOOK_MAX
from tenure._queue.limits import Rate
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.retry import RetryPolicy
from tenure._timing import Timing
from tenure.testing._sim.network import Conditions, draw_conditions
from tenure.testing._sim.world import rate

TIMINGS: tuple[Timing, ...] = (
    Timing(30.0),
    Timing(10.0),
    Timing(2.0),
    Timing(60.0),
    Timing(10.0, drift=0.2, margin=0.5, grace=1.0, renew_every=2.0, retry_every=0.5),
    Timing(15.0, drift=0.0, margin=0.0),  # equal clocks: only counting from the question keeps it safe
    Timing(9.0, drift=0.0, margin=0.0, grace=0.0, renew_every=1.0, retry_every=3.0),
    Timing(5.0, drift=0.02, margin=0.1, grace=0.1, renew_every=1.0, retry_every=0.25),
)
"""Settings a run may have; every one is valid, some just so."""

NATURES: tuple[str, ...] = (
    "fine",
    "fine",
    "flaky",
    "slow",
    "poison",
    "reject",
    "deadly",
    "blocking",
    "settles",
    "keeps",
)
"""How handlers of a message behave; most are fine in every run."""

FAULTS: tuple[str, ...] = (
    "pause",
    "kill",
    "block",
    "cut_up",
    "cut_down",
    "cut_off",
    "store_down",
    "store_frozen",
    "store_restarts",
    "store_slow",
    "lossy",
    "drain",
    "stop",
    "shut_down",
    "pause_claims",
    "false_hint",
)
"""What may go wrong, or be asked for; each seed has a part of them, so that rare combinations occur."""

STORE_FAULTS: tuple[str, ...] = ("store_full", "store_away", "store_waits", "cut_one")
"""What may go wrong inside of a broker; half the seeds have none of it."""

USER_NATURES: tuple[str, ...] = ("odd", "interrupts")
"""What messages may be like beside NATURES in half the seeds: their handlers raise unusual exceptions."""

USER_FAULTS: tuple[str, ...] = (
    "error_hook_raises",
    "error_hook_lasts",
    "error_hook_blocks",
    "error_hook_interrupts",
    "event_hook_raises",
    "event_hook_blocks",
)
"""What the error hook and the event hook of a consumer may do, in the same seeds."""

IGNORES_MAX = 1.5
"""A handler that ignores its cancellation does so for this many locks at most."""
LONGEST = 4.0
"""A slow handler takes this many locks at most."""
BLOCKS_MAX = 2.0
"""User code blocks the loop for this many locks at most."""
DELAY_MAX = 1.5
"""A message is sent with a delay of this many locks at most, and a handler asks for no longer one."""
HEALED_WORK = 0.02
"""Once the faults are over, a handler takes this share of a lock at most."""


SESSIONS = 0.4
"""The share of the runs that have sessions."""
LIMITS = 0.3
"""The share of the runs whose queue has limits."""


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """The sessions of a run, and the consumers of sessions beside the others. Times are in true seconds."""

    names: int
    share: float
    """The share of messages that are of a session."""
    consumers: int
    concurrency: int
    """How many sessions a consumer holds at a time."""
    writes: float
    """How often a handler stores the state of its session."""
    rates: tuple[float, ...]
    offsets: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LimitPlan:
    """The limits of the queue."""

    max_locked: float = math.inf
    rate: Rate = math.inf
    session_rate: Rate = math.inf

    def seconds_for(self, deliveries: int, in_session: int) -> float:
        """Return for how many seconds the rates hold up so many deliveries at most, so many of them of one session."""
        return _seconds_for(self.rate, deliveries) + _seconds_for(self.session_rate, in_session)


def _seconds_for(rate: Rate, deliveries: int) -> float:
    return 1.05 * rate[1] * (deliveries / rate[0] + 1) if isinstance(rate, tuple) else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The setting of one run. Rates and offsets are those of the hosts' clocks; times are in true seconds."""

    consumers: int
    producers: int
    settings: PumpSettings
    max_deliveries: int
    retry: RetryPolicy
    grace: float
    """How long a drain lets handlers finish."""
    messages: int
    burst: int
    natures: tuple[str, ...]
    pace: float
    """How long a usual handler takes at most, in locks."""
    named: float
    """The share of messages that are sent with an id, and again until acknowledged."""
    broker_rate: float
    rates: tuple[float, ...]
    offsets: tuple[float, ...]
    conditions: Conditions
    patience: float
    ignores: float
    interleaves: float
    """How often the other thread comes in between two steps of the one."""
    faults: tuple[str, ...]
    fault_every: float
    seconds: float
    sessions: SessionPlan | None = None
    limits: LimitPlan = LimitPlan()

    @property
    def timing(self) -> Timing:
        """The times of a lock."""
        return self.settings.timing

    def __str__(self) -> str:
        settings, sessions = self.settings, self.sessions
        return (
            f"{self.producers} producers, {self.consumers} consumers of {settings.concurrency}, lock "
            f"{settings.timing.ttl:g} s, {self.max_deliveries} deliveries, {'hints' if settings.hints else 'no hints'}"
            + (f", {sessions.names} sessions for {sessions.consumers} consumers" if sessions else "")
            + (f", {self.limits}" if self.limits != LimitPlan() else "")
        )


def draw(
    rng: random.Random, others: random.Random, users: random.Random, sessions: random.Random, limits: random.Random
) -> Plan:
    """Draw the setting of a run: with *others* the faults of its store, with *users* those of user code."""
    timing = rng.choice(TIMINGS)
    lock = timing.ttl
    consumers = rng.randint(2, 6)
    # Any two clocks keep the promise: neither runs slower than the other by more than drift.
    slowest = rng.uniform(0.9, 1.0)
    fastest = slowest / (1.0 - timing.drift)
    faulty = rng.random() < 0.9
    has_odd = faulty and users.random() < 0.5
    return Plan(
        consumers=consumers,
        producers=rng.randint(1, 3),
        settings=_settings(rng, timing),
        max_deliveries=rng.choice((1, 2, 3, 5)),
        retry=RetryPolicy(initial=0.02 * lock, maximum=rng.choice((0.05, 0.3)) * lock),
        grace=rng.choice((0.0, 0.2, 1.5)) * lock,
        messages=rng.choice((30, 100, 300)),
        burst=rng.choice((1, 10, 60)),
        natures=(
            *sorted({"fine", *rng.sample(NATURES, rng.randint(1, 4))}),
            *_some(USER_NATURES, users, drawn=has_odd),
        ),
        pace=rng.choice((0.0005, 0.005, 0.2)),
        named=rng.choice((0.5, 1.0)),
        broker_rate=rate(rng, fastest, slowest),
        rates=tuple(rate(rng, slowest, fastest) for _ in range(consumers)),
        offsets=tuple(rng.uniform(-1000.0, 1000.0) for _ in range(consumers)),
        conditions=draw_conditions(rng, lock, (0.0, 0.05, 0.2), faulty=faulty),
        patience=rng.choice((0.8 * timing.retry_every, 1.5 * timing.retry_every, 4.0 * lock)),
        ignores=rng.choice((0.0, 0.2, 0.6)),
        interleaves=rng.choice((0.0, 0.0, 0.3)),
        faults=(
            *_some(FAULTS, rng, 0.5, drawn=faulty),
            *_some(STORE_FAULTS, others, drawn=faulty and others.random() < 0.5),
            *_some(USER_FAULTS, users, drawn=has_odd),
        ),
        fault_every=lock * rng.choice((0.15, 0.3, 0.8)),
        seconds=8.0 * lock,
        sessions=_sessions(sessions, slowest, fastest) if sessions.random() < SESSIONS else None,
        limits=_limits(limits, lock) if limits.random() < LIMITS else LimitPlan(),
    )


def _sessions(rng: random.Random, slowest: float, fastest: float) -> SessionPlan:
    consumers = rng.randint(1, 3)
    return SessionPlan(
        names=rng.choice((1, 3, 12)),
        share=rng.choice((0.3, 0.7, 1.0)),
        consumers=consumers,
        concurrency=rng.choice((1, 2, 4)),
        writes=rng.choice((0.0, 0.3, 1.0)),
        rates=tuple(rate(rng, slowest, fastest) for _ in range(consumers)),
        offsets=tuple(rng.uniform(-1000.0, 1000.0) for _ in range(consumers)),
    )


def _limits(rng: random.Random, lock: float) -> LimitPlan:
    return LimitPlan(
        max_locked=rng.choice((1, 3, 10, math.inf)),
        rate=rng.choice((math.inf, (1, 0.02 * lock), (20, 0.3 * lock), (100, lock))),
        session_rate=rng.choice((math.inf, (1, 0.05 * lock), (5, 0.2 * lock))),
    )


def _some(kinds: tuple[str, ...], rng: random.Random, share: float = 0.6, *, drawn: bool) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if rng.random() < share) if drawn else ()


def _settings(rng: random.Random, timing: Timing) -> PumpSettings:
    lock = timing.ttl
    return PumpSettings(
        timing,
        concurrency=rng.choice((1, 2, 4, 10)),
        prefetch=rng.choice((0, 5, 100, 500)),
        max_hold=lock * rng.choice((0.5, 2.5, 100.0)),
        poll_every=min(5.0, 0.5 * lock),
        hints=rng.random() < 0.7,
    )


def settled_within(plan: Plan, *, latency: float, messages: int, consumers: int, in_session: int = 0) -> float:
    """Return within how many seconds after the last fault every acknowledged message is completed or dead.

    The sum of what may have to happen one after the other, each at its worst:

    1. A busy consumer comes back: a loop is blocked, a handler runs on, is cancelled at ``max_hold`` and ignores
       that; then its error hook is waited for.
    2. A lock runs out: of a delivery whose claim got no answer, or that was given back without an answer.
    3. Every question under way ends (``patience``), and its asker asks again, after the longest pause between
       unanswered questions.
    4. A delay ends.
    5. The tries that the unluckiest message has left, all of them after the first: each time the consumers look,
       handle all that is before it, and it waits its turn to be tried again.
    6. In the session with the most messages, all tries of each, one after the other.
    7. The limits of the queue: fewer are handled at a time, and each delivery may wait for its rate. Those that are
       given back are delivered once more.

    Clocks may be slower than true time by a tenth, and by ``drift`` against each other, so all of it takes longer.

    Args:
        latency: The longest that a message takes once the faults are over.
        messages: How many are not settled yet.
        consumers: How many are there to do it.
        in_session: How many of the messages are of one session, at most.
    """
    settings, timing = plan.settings, plan.timing
    lock = timing.ttl
    busy = BLOCKS_MAX * lock + min(max(LONGEST, plan.pace) * lock, settings.max_hold) + IGNORES_MAX * lock
    asks_again = plan.patience + 1.2 * 1.5**6 / 4.0 * timing.retry_every
    handling = HEALED_WORK * lock + 4.0 * latency
    limits = plan.limits
    at_once = min(consumers * settings.concurrency, limits.max_locked)
    turn = 1.2 * settings.poll_every + handling * (1.0 + messages / at_once)
    tries = plan.max_deliveries * (turn + plan.retry.maximum)
    one_by_one = in_session * plan.max_deliveries * (1.2 * settings.poll_every + 3 * handling + plan.retry.maximum)
    if "error_hook_lasts" in plan.faults:
        busy += HOOK_MAX
    held_up = limits.seconds_for(2 * messages * plan.max_deliveries, 2 * in_session * plan.max_deliveries)
    return (busy + lock + asks_again + DELAY_MAX * lock + tries + one_by_one + held_up) / (1.0 - timing.drift) / 0.9
