"""Properties of a consumer's two machines: any inputs, in any order, at any time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure._lease import NoAnswer
from tenure._queue import locks, pump
from tenure._queue.effects import (
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Hint,
    LocksEffect,
    LocksEnded,
    LocksMessage,
    MessagesGivenBack,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    Renew,
    Resume,
    Settle,
    Tick,
)
from tenure._queue.lock_group import NEVER, DeliveryKey, LockGroup
from tenure._queue.locks import Locks
from tenure._queue.message import NO_HEADERS, Delivery, Token
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.retry import Reject, Retry, RetryPolicy, delay_after, verdict_on_failure
from tenure._queue.stopping import TRANSITIONS, State
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Abandon,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._timing import Timing
from tenure.errors import ConfigError
from tenure.events import MessageDied

LOCK = 30.0
TIMING = Timing(LOCK)


class Broker:
    """A broker simple enough to be the oracle; its clock is true time."""

    def __init__(self, messages: int) -> None:
        self.now = 0.0
        self.ready: dict[int, int] = dict.fromkeys(range(1, messages + 1), 0)  # sequence: deliveries
        self.locked: dict[int, tuple[Token, float]] = {}
        self.completed: Counter[int] = Counter()
        self.claims = 0

    def receive(self, limit: int) -> list[Delivery]:
        self.claims += 1
        found = [
            sequence
            for sequence in self.ready
            if sequence not in self.locked or self.locked[sequence][1] <= self.now  # the one predicate
        ][:limit]
        for sequence in found:
            self.locked[sequence] = (self.claims, self.now + LOCK)
            self.ready[sequence] += 1
        return [
            Delivery("q", sequence, self.claims, str(sequence), b"", NO_HEADERS, self.ready[sequence], 0.0, 0.0)
            for sequence in found
        ]

    def _holds_lock(self, one: Delivery) -> bool:
        token, until = self.locked.get(one.sequence, (0, 0.0))
        return token == one.token and self.now < until

    def renew(self, held: Sequence[Delivery]) -> list[Renewed | Lapsed]:
        answers: list[Renewed | Lapsed] = []
        for one in held:
            if self._holds_lock(one):
                self.locked[one.sequence] = (one.token, self.now + LOCK)
                answers.append(Renewed(0.0))
            else:
                answers.append(LAPSED)
        return answers

    def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        answers: list[Settled | Lapsed] = []
        for one, verdict in settlements:
            if not self._holds_lock(one):
                answers.append(LAPSED)
                continue
            del self.locked[one.sequence]
            if verdict is COMPLETE:
                del self.ready[one.sequence]
                self.completed[one.sequence] += 1
            elif verdict is GIVE_BACK:
                self.ready[one.sequence] -= 1
            answers.append(SETTLED)
        return answers


@dataclass
class Node:
    """A consumer: its machines, its handlers, its messages in flight. Its clock runs at *rate*."""

    broker: Broker
    rng: random.Random
    rate: float
    loss: float
    slow: float
    settings: PumpSettings
    holds: dict[Token, LockGroup] = field(default_factory=dict)
    running: dict[tuple[Token, int], tuple[Delivery, float]] = field(default_factory=dict)
    in_flight: list[tuple[float, Any, Any]] = field(default_factory=list)  # (arrives at, machine, event)
    violations: list[str] = field(default_factory=list)
    blocked_until: float = 0.0
    cut_until: float = 0.0

    def __post_init__(self) -> None:
        args: tuple[Any, ...] = ("q", "me", self.settings, self.rng, self.holds)
        self.pump = Pump(*args, now=self.now)
        self.locks = Locks(*args, now=self.now)

    @property
    def now(self) -> float:
        return self.broker.now * self.rate + 1_000.0

    def step(self) -> None:
        """Do what is due now."""
        now = self.broker.now
        for one in [one for one in self.in_flight if one[0] <= now]:
            self.in_flight.remove(one)
            if one[1] is self.pump and now < self.blocked_until:
                self.in_flight.append((self.blocked_until, *one[1:]))
            else:
                self.perform(one[1], one[1].handle(one[2], self.now))
        if self.now >= self.locks.wake_at:
            self.perform(self.locks, self.locks.handle(Tick(), self.now))
        if now >= self.blocked_until:
            self._tick_now()

    def _tick_now(self) -> None:
        for key, (delivery, until) in list(self.running.items()):
            if self.broker.now >= until:
                del self.running[key]
                self.pump.done(delivery, COMPLETE if self.rng.random() < 0.8 else Abandon())
        while len(self.running) < self.settings.concurrency:
            taken = self.pump.take(self.now)
            if taken is None:
                break
            if not self.trusts(taken):
                self.violations.append(f"took {taken.sequence} when its lock was not trusted")
            seconds = self.rng.choice([0.0, 0.1, 3.0, 50.0, 300.0])
            self.running[(taken.token, taken.sequence)] = (taken, self.broker.now + seconds)
        self.perform(self.pump, self.pump.handle(Tick(), self.now))

    def perform(self, machine: Any, effects: Sequence[PumpEffect | LocksEffect]) -> None:
        for effect in effects:
            match effect:
                case Receive(request_id, limit):
                    self.ask(machine, request_id, lambda limit=limit: self.broker.receive(limit), claim=True)
                case Settle(request_id, settlements):
                    self.ask(machine, request_id, lambda settlements=settlements: self.broker.settle(settlements))
                case Renew(request_id, held):
                    self.ask(machine, request_id, lambda held=held: self.broker.renew(held))
                case CancelHandler(delivery, _):
                    self._cancel(delivery[:3], Abandon())
                case LocksEnded() | MessagesGivenBack():
                    self.in_flight.append((self.broker.now, self.pump, effect))
                case CancelAll():
                    for delivery, _until in list(self.running.values()):
                        self._cancel(delivery[:3], GIVE_BACK)

    def _cancel(self, held: tuple[Any, ...], verdict: Any) -> None:
        found = self.running.pop((held[2], held[1]), None)
        if found is not None:
            self.pump.done(found[0], verdict)

    def ask(self, machine: Any, request_id: int, request: Any, *, claim: bool = False) -> None:
        """Send a request: it and its answer may be lost or delayed."""
        delay = self.rng.choice([0.0, 0.01, self.slow])
        fate = self.rng.random()
        if fate < self.loss or self.broker.now < self.cut_until:
            event: Any = Answered(request_id, NoAnswer("request lost"))
        else:
            answer = request()
            if fate < 2 * self.loss:
                event = Answered(request_id, NoAnswer("answer lost"))
            elif not claim and fate < 3 * self.loss:  # with several servers, some answers may be missing
                event = Answered(request_id, [one if self.rng.random() < 0.5 else NoAnswer("away") for one in answer])
            else:
                event = Claimed(request_id, answer) if claim else Answered(request_id, answer)
        self.in_flight.append((self.broker.now + delay, machine, event))

    def trusts(self, delivery: Delivery) -> bool:
        """Whether the machines trust this lock now."""
        hold = self.holds.get(delivery.token)
        if hold is None or delivery.sequence not in hold.running:
            return False
        sure = min(hold.trusted_until, hold.ended.get(DeliveryKey(delivery), NEVER))
        return self.now < sure

    def trusted(self) -> set[int]:
        return {one.sequence for one, _ in self.running.values() if self.trusts(one)}


def check(nodes: list[Node]) -> None:
    sure = Counter(sequence for node in nodes for sequence in node.trusted())
    assert not [sequence for sequence, count in sure.items() if count > 1], "two trust the lock of one message"
    for node in nodes:
        assert not node.violations
        for delivery, _ in node.running.values():
            if node.trusts(delivery):
                assert node.broker._holds_lock(delivery), f"{delivery.sequence} is trusted without a lock"


def simulate(seed: int, loss: float, slow: float) -> None:
    """Run with faults, then without, and check that every message is handled."""
    rng = random.Random(seed)
    broker = Broker(messages=40)
    nodes = []
    for rate in (1.0, 0.96, 1.05):
        settings = PumpSettings(TIMING, concurrency=rng.choice([1, 3]), prefetch=rng.choice([0, 20]), max_hold=120.0)
        nodes.append(Node(broker, random.Random(rng.random()), rate, loss, slow, settings))
    step = 0.5
    for _ in range(600):
        broker.now += rng.choice([0.01, step])
        for node in nodes:
            if rng.random() < 0.01:  # user code blocks this node's loop; its locks are renewed all the same
                node.blocked_until = broker.now + rng.choice([1.0, 40.0])
            if rng.random() < 0.005:  # this node's connection to the broker is cut
                node.cut_until = broker.now + rng.choice([5.0, 60.0])
            if rng.random() < 0.01:
                event: Any = rng.choice([Pause(), Resume(), Hint()])
                node.perform(node.pump, node.pump.handle(event, node.now))
            node.step()
        check(nodes)
    assert all(count == 1 for count in broker.completed.values())
    for node in nodes:  # without faults, there must be progress
        node.loss, node.slow, node.cut_until = 0.0, 0.01, 0.0
        node.perform(node.pump, node.pump.handle(Resume(), node.now))
    for _ in range(6_000):
        broker.now += step
        for node in nodes:
            node.step()
        check(nodes)
        if not broker.ready:
            break
    assert set(broker.completed) == set(range(1, 41))
    for node in nodes:
        node.perform(node.pump, node.pump.handle(Drain(node.now + 5.0), node.now))
        for _ in range(400):
            broker.now += step
            node.step()
        assert node.pump.state is State.STOPPED
        assert not node.holds
        assert node.locks.settled


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([0.5, 5.0, 25.0]))
def test_locks_are_never_trusted_too_long_and_all_is_handled(seed: int, loss: float, slow: float) -> None:
    simulate(seed, loss, slow)


def count_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    keep = Pump._keep

    def late(self: Pump, deliveries: Sequence[Delivery], now: float, effects: list[PumpEffect]) -> None:
        self._claim_asked_at = now
        keep(self, deliveries, now, effects)

    patch.setattr(Pump, "_keep", late)


def trust_the_whole_lock(patch: pytest.MonkeyPatch) -> None:
    for module in (pump, locks):
        patch.setattr(module, "lock_trusted_until", lambda asked_at, timing: asked_at + 1.1 * timing.ttl)


def forget_the_verdict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pump, "_unanswered", lambda self, request_id, why, now, effects: self._settling.answered(request_id))


@pytest.mark.parametrize("bug", [count_from_the_answer, trust_the_whole_lock, forget_the_verdict])
def test_planted_bugs_are_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(60):
        try:
            simulate(seed, loss=0.3 if seed % 2 else 0.05, slow=25.0)
        except AssertionError:
            return
    pytest.fail("nothing was found: a checker that can't fail proves nothing")


def test_without_an_answer_no_lock_is_trusted_for_longer() -> None:
    """Nor that of a claim without a renewal request, as its handlers are being cancelled."""
    one, two = (Delivery("q", number, f"t{number}", "x", b"", NO_HEADERS, 1, 0.0, 0.0) for number in (1, 2))
    holds = {
        each.token: LockGroup(each.token, 1, 25.0, 10.0, running={each.sequence: (each, 0.0)}) for each in (one, two)
    }
    holds[two.token].ended[DeliveryKey(two)] = 25.0
    locks = Locks("q", "me", PumpSettings(TIMING), random.Random(1), holds, now=0.0)
    [asked] = [effect for effect in locks.handle(Tick(), 10.0) if isinstance(effect, Renew)]
    assert asked.held == [one]
    locks.handle(Answered(asked.request_id, NoAnswer("away")), 11.0)
    assert [hold.trusted_until for hold in holds.values()] == [25.0, 25.0]


WORDS = st.sampled_from(
    [
        "tick",
        "hint",
        "pause",
        "resume",
        "drain",
        "take",
        "done",
        "claim",
        "answer",
        "lose",
        "locks",
        "deliver",
        "asks",
        "seen",
    ]
)


def test_a_message_that_expires_in_the_buffer_is_reported_when_it_is_given_back() -> None:
    holds: dict[Token, LockGroup] = {}
    pump = Pump("q", "me", PumpSettings(TIMING), random.Random(1), holds, now=0.0)
    locks = Locks("q", "me", PumpSettings(TIMING), random.Random(1), holds, now=0.0)
    [asked] = [effect for effect in pump.handle(Tick(), 0.0) if isinstance(effect, Receive)]
    one = Delivery("q", 7, 1, "late", b"", NO_HEADERS, 1, 0.0, 0.0)
    pump.handle(Claimed(asked.request_id, [one]), 0.0)
    now = holds[1].renew_at  # no worker has taken it by then
    [back] = [effect for effect in locks.handle(Tick(), now) if isinstance(effect, Settle)]
    effects = locks.handle(Answered(back.request_id, [Settled(dead=True)]), now)
    assert [effect.event for effect in effects if isinstance(effect, Emit)] == [
        MessageDied(now, "q", "me", "late", 7, 1, "expired")
    ]
    for message in effects:
        if isinstance(message, MessagesGivenBack):
            pump.handle(message, now)
    assert holds == {}


def test_a_lock_that_may_have_begun_before_its_claim_was_sent_is_trusted_for_less() -> None:
    ends = []
    for age in (0.0, 5.0):
        holds: dict[Token, LockGroup] = {}
        pump = Pump("q", "me", PumpSettings(TIMING), random.Random(1), holds, now=0.0)
        [asked] = [effect for effect in pump.handle(Tick(), 0.0) if isinstance(effect, Receive)]
        one = Delivery("q", 7, 1, "a", b"", NO_HEADERS, 1, 0.0, 0.0)
        pump.handle(Claimed(asked.request_id, [one], age=age), 1.0)
        ends.append(holds[1].trusted_until)
    assert ends[0] - ends[1] == 5.0


@pytest.mark.parametrize("late", [True, False], ids=["answered late", "unanswered"])
def test_a_claim_that_was_too_large_is_halved_and_grows_again(late: bool) -> None:
    pump = Pump("q", "me", PumpSettings(TIMING, concurrency=16, prefetch=0), random.Random(1), {}, now=0.0)
    now, limits = 0.0, []
    for number in range(7):
        now = max(now, pump.wake_at)
        [asked] = [effect for effect in pump.handle(Tick(), now) if isinstance(effect, Receive)]
        limits.append(asked.limit)
        if number >= 2:
            pump.handle(Claimed(asked.request_id, ()), now)
        elif late:
            now += LOCK  # its messages are given back
            one = Delivery("q", number, number, "a", b"", NO_HEADERS, 1, 0.0, 0.0)
            pump.handle(Claimed(asked.request_id, [one]), now)
        else:
            pump.handle(Answered(asked.request_id, NoAnswer("too much")), now)
    assert limits == [16, 8, 4, 8, 16, 16, 16]


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 300, 1_000, 20_000]))
def test_bodies_in_hand_have_no_more_bytes_than_one_claim_adds_to_the_most(seed: int, largest: int) -> None:
    rng, most, claim_most = random.Random(seed), 10_000, 2_000
    bounds = PumpSettings(TIMING, concurrency=50, prefetch=200, max_bytes=most)
    pump = Pump("q", "me", bounds, random.Random(1), {}, now=0.0)
    now, left, in_hand, verdicts = 0.0, 300, 0, 0
    handled: list[Delivery] = []
    events: list[PumpInput] = [Tick()]
    while verdicts < 300 and now < 1_000.0:
        for effect in pump.handle(events.pop(0), now):
            match effect:
                case Receive(request_id, limit):
                    assert in_hand < most, "a claim was sent while too much was in hand"
                    claimed: list[Delivery] = []
                    while left and len(claimed) < limit and sum(len(one.body) for one in claimed) < claim_most:
                        body = bytes(rng.randint(0, largest))
                        claimed.append(Delivery("q", left, request_id, "x", body, NO_HEADERS, 1, 0.0, 0.0))
                        left -= 1
                    in_hand += sum(len(one.body) for one in claimed)
                    assert in_hand < most + claim_most + largest
                    events.append(Claimed(request_id, claimed, due_in=0.0 if left else None))
                case Settle(request_id, settlements):
                    verdicts += len(settlements)
                    in_hand -= sum(len(delivery.body) for delivery, _ in settlements)
                    events.append(Answered(request_id, [SETTLED] * len(settlements)))
        if not events:
            while rng.random() < 0.9 and (one := pump.take(now)) is not None:
                handled.append(one)
            while handled and rng.random() < 0.7:
                pump.done(handled.pop(rng.randrange(len(handled))))
            now += 0.01
            events.append(Tick())
    assert verdicts == 300
    assert in_hand == 0


@settings(max_examples=300)
@given(st.lists(st.tuples(WORDS, st.integers(0, 5), st.floats(0.0, 20.0)), max_size=60))
def test_any_input_in_any_state_is_legal(words: list[tuple[str, int, float]]) -> None:
    holds: dict[Token, LockGroup] = {}
    settings = PumpSettings(TIMING, concurrency=3)
    pump = Pump("q", "me", settings, random.Random(1), holds, now=0.0)
    locks = Locks("q", "me", settings, random.Random(1), holds, now=0.0)
    now, sequence = 0.0, 0
    taken: list[Delivery] = []
    undelivered: list[LocksMessage] = []
    for word, number, pause in words:
        now += pause
        before = pump.state
        match word:
            case "take":
                if (one := pump.take(now)) is not None:
                    taken.append(one)
            case "done" if taken:
                verdicts: list[Verdict | None] = [COMPLETE, GIVE_BACK, Abandon(), None, COMPLETE, COMPLETE]
                pump.done(taken.pop(), verdicts[number])
            case "claim":
                made = []
                for _ in range(number):
                    sequence += 1
                    made.append(Delivery("q", sequence, f"t{sequence}", "x", b"", NO_HEADERS, 1, 0.0, 0.0))
                made = [one._replace(token=made[0].token) for one in made]
                pump.handle(Claimed(pump._claiming if number else 99, made), now)
            case "answer":
                for request_id, settlements in list(pump._settling._asked.items()):
                    pump.handle(Answered(request_id, [SETTLED] * len(settlements)), now)
            case "lose":
                pump.handle(Answered(number + 1, NoAnswer("lost")), now)
            case "locks":
                for request_id, request in list(locks._renewals.items()):
                    answer = (LAPSED, Renewed(0.0), NoAnswer("away"))[number % 3]
                    effects = locks.handle(Answered(request_id, [answer] * len(request.held)), now)
                    undelivered += [one for one in effects if isinstance(one, LocksEnded | MessagesGivenBack)]
                undelivered += [
                    one for one in locks.handle(Tick(), now) if isinstance(one, LocksEnded | MessagesGivenBack)
                ]
            case "deliver" if undelivered:
                pump.handle(undelivered.pop(0), now)
            case "asks" if taken:
                pump.settling_begins(taken[0])
            case "seen" if taken:
                pump.settling_ends(taken[0])
            case "drain":
                pump.handle(Drain(now + number), now)
            case _:
                events: dict[str, Any] = {"tick": Tick(), "hint": Hint(), "pause": Pause(), "resume": Resume()}
                pump.handle(events.get(word, Tick()), now)
        legal = {before, *TRANSITIONS[before]}
        assert pump.state in legal | {after for one in legal for after in TRANSITIONS[one]}  # two steps: drain, stop
        assert pump.busy >= 0
        assert pump.waiting >= 0
        assert all(group.settled <= group.size for group in holds.values())
        if pump.state is State.STOPPED:
            assert pump.take(now) is None


@settings(max_examples=200)
@given(
    st.floats(0, 100),
    st.floats(1, 10),
    st.floats(0, 1e6),
    st.floats(0, 1),
    st.integers(1, 10_000),
    st.integers(0, 2**32),
)
def test_waits_grow_and_keep_their_bounds(
    first: float, factor: float, more: float, jitter: float, deliveries: int, seed: int
) -> None:
    policy = RetryPolicy(first, factor, first + more, jitter)
    wait = delay_after(deliveries, policy, random.Random(seed))
    assert 0 <= wait <= policy.maximum
    assert delay_after(1, policy, random.Random(seed)) <= first


class _FixedRng:
    def random(self) -> float:
        return 0.5


def test_the_verdict_on_a_failure() -> None:
    policy = RetryPolicy(initial=1.0, factor=2.0, maximum=3.0, jitter=0.0, never=(KeyError,))
    assert [delay_after(count, policy, _FixedRng()) for count in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 3.0]
    assert verdict_on_failure(Retry(delay=7.0), 1, policy, _FixedRng()) == Abandon(7.0, None)
    assert verdict_on_failure(Retry(), 2, policy, _FixedRng()) == Abandon(2.0, None)
    verdict: Any = verdict_on_failure(Reject("bad", "very"), 1, policy, _FixedRng())
    assert (verdict.reason, verdict.description, verdict.error) == ("bad", "very", None)
    verdict = verdict_on_failure(KeyError("k"), 1, policy, _FixedRng())
    assert (verdict.reason, verdict.error.type) == ("KeyError", "KeyError")
    verdict = verdict_on_failure(ValueError("x\ud800\0"), 3, policy, _FixedRng())
    assert (verdict.delay, verdict.error.message) == (3.0, "x\\ud800\\x00")


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: RetryPolicy(initial=-1), "initial must be"),
        (lambda: RetryPolicy(factor=0.5), r"factor \(0.5\) must be at least 1"),
        (lambda: RetryPolicy(jitter=2), r"jitter \(2\) must be at most 1"),
        (lambda: RetryPolicy(initial=5, maximum=1), r"maximum \(1 s\) must be at least initial \(5 s\)"),
        (lambda: Retry(delay=-1), "delay must be"),
        (lambda: Retry(delay=NEVER), "delay must be"),
        (lambda: Reject(""), "reason must not be empty"),
        (lambda: Reject("bad", ValueError("x")), r"description must be text, not ValueError\('x'\)"),  # type: ignore[arg-type]
        (lambda: PumpSettings(TIMING, concurrency=0), "concurrency must be"),
        (lambda: PumpSettings(TIMING, prefetch=-1), "prefetch must be"),
        (lambda: PumpSettings(TIMING, max_bytes=0), "max_bytes must be a whole number of at least 1, not 0"),
        (lambda: PumpSettings(TIMING, max_hold=0), "max_hold must be more"),
    ],
)
def test_settings_that_can_not_work(build: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build()
